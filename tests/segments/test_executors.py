"""Ways of doing recorded segments: which one is taken, and that their bits agree.

For segments.executors.
"""

import copy
import io
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from recorded_steps import LR, Each, off, start, train
from torch import Tensor
from torch.optim import SGD, Adafactor, Adagrad, AdamW, Optimizer, RMSprop

import collage_fx
from collage_fx.segments.executors import MOST, Executors
from collage_fx.segments.segment import Readers


class ByHand(Optimizer):
    """Adam, its corrections computed in Python."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            st = self.state[p]
            if not st:
                st.update(k=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
            st["k"] += 1
            st["m"].lerp_(p.grad, 0.1)
            st["v"].mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
            root = (st["v"] / (1 - 0.999 ** st["k"])).sqrt_().add_(1e-8)
            p.addcdiv_(st["m"], root, value=-LR / (1 - 0.9 ** st["k"]))


MAKERS: dict[str, Callable[[list[Tensor]], Optimizer]] = {
    "AdamW": lambda ps: AdamW(ps, lr=LR, weight_decay=0.1),
    "AdamW foreach": lambda ps: AdamW(ps, lr=LR, foreach=True),
    "SGD": lambda ps: SGD(ps, lr=LR, weight_decay=0.1),
    "Adagrad": lambda ps: Adagrad(ps, lr=LR),
    "by hand": lambda ps: ByHand(ps, {}),
    "RMSprop": lambda ps: RMSprop(ps, lr=LR, centered=True),
}


def executors_of(step: Any) -> Executors:
    executors: Executors = step._collage.steps().executors
    return executors


def take(optimizer: Optimizer, step: Any, first: int, last: int) -> None:
    params = optimizer.param_groups[0]["params"]
    for k in range(first, last):
        made = torch.Generator().manual_seed(k)
        for p in params:
            p.grad = torch.randn(p.shape, generator=made).to(p.dtype)
        step()


def values(optimizer: Optimizer) -> list[Tensor]:
    params = optimizer.param_groups[0]["params"]
    states = [t for p in params for t in optimizer.state[p].values() if isinstance(t, Tensor)]
    return [collage_fx.value(t).detach() for t in [*params, *states] if t.dim()]


@pytest.mark.parametrize(
    ("name", "arithmetic"),
    [("SGD", "eft"), *((name, "wide") for name in MAKERS)],
)
@pytest.mark.quick("SGD-eft", "AdamW foreach-wide")
def test_a_recorded_graph_is_bit_equal_to_a_traced_one(name: str, arithmetic: str) -> None:
    found = []
    for record in (
        "auto",
        True,
    ):  # of torch.optim Dynamo traces another formula, which eft and 24 bits show
        torch.compiler.reset()
        optimizer = MAKERS[name](start(torch.bfloat16))
        take(optimizer, optimizer.step, 0, 1)  # its states are there: Dynamo sees the next step
        options: dict[str, Any] = {"storage": "mcf2", "arithmetic": arithmetic, "level": "plus"}
        step = collage_fx.compile(optimizer, record=record, **options)
        step._collage.keep = True  # compile what is seen for the first time
        take(optimizer, step, 1, 6)
        assert all(s.graph == 5 for s in collage_fx.report(step).states)
        assert (step._collage.steps().recorder.noted > 0) == (record is True)
        found.append(values(optimizer))
    assert all(map(torch.equal, *found))


def test_what_is_seen_twice_is_compiled_and_what_is_seen_once_is_not() -> None:
    _, step = train(lambda p, g, _: p.data.sub_(LR * g), record=True, steps=4)
    assert executors_of(step).runs == {"interpreted": 1, "rewritten": 3}

    def shrinking(p: Tensor, g: Tensor, state: Any) -> None:
        k = state["k"] = state.get("k", 0) + 1
        p.data.view(-1)[k:].sub_(LR * g.view(-1)[k:])

    _, step = train(shrinking, record=True)
    assert executors_of(step).runs == {"interpreted": 10} and not executors_of(step).count


@pytest.mark.slow
def test_a_step_of_ever_new_structures_compiles_no_more_than_so_many() -> None:
    def many(p: Tensor, g: Tensor, state: Any) -> None:
        for k in range(MOST):
            p.data.view(-1)[k % 12 :].sub_(LR * g.view(-1)[k % 12 :])
            float(g[0, 0]) if k % 2 else g.max().item()

    exact, _ = train(many, torch.float64, steps=3)
    begin, _ = train(many, torch.float64, steps=0)
    found, step = train(many, record=True, steps=3, storage="remainder16")
    assert off(found, exact, begin) < 0.01 and executors_of(step).count <= MOST


def test_nothing_is_compiled_where_the_user_wants_nothing_compiled() -> None:
    with torch.compiler.set_stance("force_eager"):
        _, step = train(lambda p, g, _: p.data.sub_(LR * g), steps=5)
    assert set(executors_of(step).runs) == {"interpreted"}


@pytest.mark.parametrize("rates", [(1e-4, 2e-4, 3e-4, 4e-4), (1e-4, 1.0, 1e-4, 1.0, 0.5)])
def test_numbers_that_change_are_inputs_and_what_is_asked_of_them_is_kept(rates: Any) -> None:
    """With alpha=1 there is no product, which another number must not go without."""

    def run(dtype: torch.dtype, record: bool) -> tuple[Tensor, Any]:
        given = iter(rates)

        def update(p: Tensor, g: Tensor, state: Any) -> None:
            p.data.add_(g, alpha=-next(given))

        params = start(dtype, count=1)
        options = {"record": True} if record else {}
        return train(update, dtype, params=params, steps=len(rates), **options)

    (found, step), (exact, _) = run(torch.bfloat16, True), run(torch.float64, False)
    assert float((found - exact).abs().max()) < 1e-4
    assert executors_of(step).count <= 3


@pytest.mark.slow
def test_classes_of_parameters_are_compiled_once() -> None:
    params = [p for _ in range(10) for p in start(torch.bfloat16)]
    optimizer = AdamW(params, lr=LR, foreach=False)
    step = collage_fx.compile(optimizer, record=True, multi_tensor=True)
    step._collage.keep = True
    take(optimizer, step, 0, 2)
    last = step._collage.compiled[-1].program
    assert sum(len(copies.others) for copies in last.copies) == 19
    assert len(values(optimizer)) == 60


def adafactor(params: list[Tensor]) -> Optimizer:
    return Adafactor(params, lr=1e-3)


@pytest.mark.parametrize("record", ["auto", True])
@pytest.mark.parametrize("make", [adafactor, MAKERS["AdamW"]], ids=["Adafactor", "AdamW"])
@pytest.mark.quick("AdamW-auto")
def test_a_resumed_run_has_the_bits_of_an_unbroken_one(make: Any, record: Any) -> None:
    """Under a rate that changes: it is an input of the graphs of both from the beginning."""
    if record == "auto" and make is not adafactor:
        pytest.skip("a rate is a constant to Dynamo in the first step: see docs/limits.md")

    def go(optimizer: Optimizer, step: Any, first: int, last: int) -> None:
        for k in range(first, last):
            optimizer.param_groups[0]["lr"] = 1e-3 * (k + 1) / 10
            take(optimizer, step, k, k + 1)

    optimizer = make(start(torch.bfloat16))
    step = collage_fx.compile(optimizer, record=record)
    go(optimizer, step, 0, 5)
    params, file = optimizer.param_groups[0]["params"], io.BytesIO()
    torch.save(([p.detach() for p in params], optimizer.state_dict()), file)
    twin = copy.deepcopy(optimizer)
    go(optimizer, step, 5, 8)

    file.seek(0)
    weights, saved = torch.load(file)
    resumed = make([w.requires_grad_() for w in weights])
    resumed.load_state_dict(saved)
    for other in (resumed, twin):
        torch.compiler.reset()
        go(other, collage_fx.compile(other, record=record), 5, 8)
        assert all(map(torch.equal, values(optimizer), values(other)))


def scaled(p: Tensor, g: Tensor, state: Any) -> None:
    """Read a number back in the middle, as Adafactor does."""
    m = state["m"] = state.get("m", torch.zeros_like(p))
    m.mul_(0.9).add_(g, alpha=0.1)
    p.sub_(m, alpha=LR / (1 + float(p.norm())))


@pytest.mark.slow
def test_optimizers_in_threads_do_not_meet() -> None:
    """Once they are compiled: what PyTorch knows of tracing is one for all threads."""

    def prepared() -> list[tuple[Optimizer, Any]]:
        optimizers = [
            Each([(p.detach() * (k + 1)).requires_grad_() for p in start(torch.bfloat16)], scaled)
            for k in range(2)
        ]
        found = [(one, collage_fx.compile(one, record=True)) for one in optimizers]
        for optimizer, step in found:
            take(optimizer, step, 0, 4)
        return found

    alone, together = prepared(), prepared()
    for optimizer, step in alone:
        take(optimizer, step, 4, 14)
    threads = [threading.Thread(target=take, args=(*one, 4, 14)) for one in together]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for (a, _), (b, _) in zip(alone, together, strict=True):
        assert all(map(torch.equal, values(a), values(b)))


class TakenOver(Optimizer):
    """Writes states in one segment, and the parameters from them in another in each second step.

    Tensors are read after all states are written, or after each.
    """

    def __init__(self, params: list[Tensor], apart: bool) -> None:
        super().__init__(params, {})
        self.taken, self.apart = 0, apart

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        params, self.taken = self.param_groups[0]["params"], self.taken + 1
        for part in [[p] for p in params] if self.apart else [params]:
            for p in part:
                state = self.state[p]
                if not state:
                    state["slow"] = p.clone()
                state["slow"].sub_(p.grad, alpha=LR)
            float(sum(p.grad.float().sum() for p in part))  # ends the segment
            for p in part if self.taken % 2 == 0 else ():
                p.copy_(self.state[p]["slow"])


def after_ten_steps(dtype: torch.dtype, apart: bool) -> tuple[Tensor, Any]:
    params = start(dtype)
    optimizer = TakenOver(params, apart)
    step: Any = optimizer.step
    if dtype is torch.bfloat16:
        step = collage_fx.compile(optimizer, record=True, level="light", storage="mcf2")
    take(optimizer, step, 0, 10)
    return torch.cat([collage_fx.value(p).double().flatten() for p in params]), step


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("known", [True, False])
def test_level_light_keeps_the_low_words_that_other_segments_read(
    known: bool, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control does not know those, and drops the low words that they take over."""
    if not known:
        monkeypatch.setattr(Readers, "of", lambda *_: set())
    exact, _ = after_ten_steps(torch.float64, apart)
    found, step = after_ten_steps(torch.bfloat16, apart)
    begin = torch.cat([p.detach().double().flatten() for p in start(torch.bfloat16)])
    assert executors_of(step).runs["rewritten"] > 5
    assert (off(found, exact, begin) < 0.02) is known


def in_parts(p: Tensor, g: Tensor, state: Any) -> None:
    if not state:
        state["v"] = torch.zeros_like(p)
        float(p.float().sum())  # so that all segments that follow are those of later steps
    v = state["v"].mul_(0.999).addcmul_(g, g, value=0.001)
    float(g.float().sum())  # ends the segment
    p.addcdiv_(g, v.sqrt() + 1e-8, value=-LR)


@pytest.mark.parametrize("waits", [True, False])
def test_level_light_compiles_a_writer_after_those_that_read_it(
    waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled before, it keeps low words that those have no use for; the control does that."""
    if not waits:
        monkeypatch.setattr(Executors, "_waits", lambda *_: False)
    seen = []

    def update(p: Tensor, g: Tensor, state: Any) -> None:
        in_parts(p, g, state)
        seen.append(state["v"])

    params = start(torch.bfloat16, count=1)
    _, step = train(update, params=params, record=True, level="light", storage="mcf2")
    assert executors_of(step).runs["rewritten"] > 5
    assert len(collage_fx.residuals(seen[0])) == (0 if waits else 1)
