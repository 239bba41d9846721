"""Recorded steps that would go wrong if data came too early, too late, or with one word only.

For segments.low_words and record.notes.
"""

import copy
import ctypes
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from recorded_steps import LR, off, start, train
from torch import Tensor

import collage_fx
from collage_fx.errors import CollageWarning
from collage_fx.segments.low_words import LowWords

SEEN: list[float] = []
"""Numbers read of a tensor whose data were to come later."""


def written_twice(p: Tensor, g: Tensor, state: Any) -> None:
    p.mul_(1 - LR)
    p.data = p.data - LR * g


def factor_near_one(p: Tensor, g: Tensor, state: Any) -> None:
    p.mul_(torch.exp(-LR * g))


def state_filled_and_replaced(p: Tensor, g: Tensor, state: Any) -> None:
    if not state:
        state["v"] = torch.full_like(p, 1.0)
    state["v"] = state["v"] - LR * g
    p.copy_(p - LR * g / state["v"])


def strides_through_data(p: Tensor, g: Tensor, state: Any) -> None:
    if not state:
        state["m"] = p.detach().clone()
        state["m"].data = state["m"].data.t().contiguous().t()
    state["m"].sub_(LR * g)
    p.copy_(state["m"])


def slices_of_a_transposed(p: Tensor, g: Tensor, state: Any) -> None:
    p.t()[1:].sub_(LR * g.t()[1:])
    p[:, 0].sub_(LR * g[:, 0])


def diagnostic_replaced(p: Tensor, g: Tensor, state: Any) -> None:
    state["norm"] = g.norm()
    p.data.sub_(LR * g)


def held_over_a_read(p: Tensor, g: Tensor, state: Any) -> None:
    new = p - LR * g
    assert float(g.sum()) > 0
    p.copy_(new)


def alias_of_a_result(p: Tensor, g: Tensor, state: Any) -> None:
    new = p - LR * g
    view = new.view(-1)[1:]
    assert bool((g > 0).all())
    view.sub_(LR)
    p.copy_(new)


def with_gradients_inside(p: Tensor, g: Tensor, state: Any) -> None:
    with torch.enable_grad():
        x = torch.ones_like(p).requires_grad_()
        (grad,) = torch.autograd.grad((x * x * g).sum() / 2, x)
    p.sub_(LR * grad)


def by_a_compiled_helper(p: Tensor, g: Tensor, state: Any) -> None:
    torch.compile(lambda x: x.sub_(LR * g))(p.data)


def out_argument(p: Tensor, g: Tensor, state: Any) -> None:
    torch.sub(p, g, alpha=LR, out=p.data)


def power_of_its_own(p: Tensor, g: Tensor, state: Any) -> None:
    p.copy_(p.pow(1 - LR).clamp_(max=8.0))


TRAPS: list[Callable[..., None]] = [
    *(written_twice, factor_near_one, state_filled_and_replaced, strides_through_data),
    *(slices_of_a_transposed, diagnostic_replaced, held_over_a_read, alias_of_a_result),
    *(with_gradients_inside, by_a_compiled_helper, out_argument, power_of_its_own),
]
RECORDS = [True, False, "auto"]


@pytest.mark.parametrize("record", RECORDS)
@pytest.mark.parametrize("update", TRAPS)
@pytest.mark.quick(
    "written_twice-True",
    "factor_near_one-False",
    "state_filled_and_replaced-False",
    "strides_through_data-True",
    "slices_of_a_transposed-False",
    "diagnostic_replaced-auto",
    "held_over_a_read-auto",
    "alias_of_a_result-True",
    "with_gradients_inside-False",
    "by_a_compiled_helper-auto",
    "out_argument-True",
    "power_of_its_own-auto",
)
def test_nothing_is_lost(update: Callable[..., None], record: Any) -> None:
    begin, _ = train(update, torch.float64, steps=0)
    exact, _ = train(update, torch.float64)
    plain, _ = train(update, plain=True)
    found, step = train(update, record=record, storage="remainder16")
    assert off(found, exact, begin) < 0.01 < 0.5 < off(plain, exact, begin)
    report = collage_fx.report(step)
    assert not any(s.unaccounted for s in report.states)
    assert all(s.compensated for s in report.states if s.name.startswith("param")), str(report)


@pytest.mark.parametrize("update", [held_over_a_read, alias_of_a_result])
def test_low_words_between_segments_are_needed(
    update: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: values that outlive a segment keep their high words only."""
    begin, _ = train(update, torch.float64, steps=0)
    exact, _ = train(update, torch.float64)
    monkeypatch.setattr(LowWords, "keep", lambda self, t, wide: t.copy_(wide))
    options = {"record": True, "storage": "remainder16"}
    with torch.compiler.set_stance("force_eager"):
        found, _ = train(update, **options)  # type: ignore[arg-type]
    assert off(found, exact, begin) > 0.5


READERS: dict[str, Callable[[Tensor], Any]] = {
    "numpy": lambda x: x.float().numpy().sum(),
    "tolist": lambda x: sum(map(sum, x.tolist())),
    "item": lambda x: x.sum().item(),
    "deepcopy": lambda x: copy.deepcopy(x).sum(),
    "data_ptr": lambda x: torch.frombuffer(
        (ctypes.c_byte * (2 * x.numel())).from_address(x.data_ptr()),
        dtype=torch.bfloat16,
    ).sum(),
    "save": lambda x: _saved(x).sum(),
    "print": lambda x: float(str(x.sum()).split("(")[1].split(",")[0]),
    "format": lambda x: float(f"{x.sum():.6f}"),
    "bool": lambda x: 0.0 if (x < 100).all() else 1.0,
}


def _saved(x: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.parametrize("record", [True, "auto", False])
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.quick(
    "numpy-auto", "tolist-True", "item-auto", "deepcopy-False", "data_ptr-auto", "format-False"
)
def test_data_that_are_read_are_there(reader: str, record: Any) -> None:
    """Also where Dynamo traces what reads them."""
    seen: list[float] = []

    def update(p: Tensor, g: Tensor, state: Any) -> None:
        x = p * 0.0 + 2.0
        x.add_(g * 0.0)
        torch.full_like(p, 7.0)  # memory that is given up, and may be had again
        seen.append(float(READERS[reader](x)))
        p.sub_(LR * g)

    train(update, record=record, steps=3)
    expected = 0.0 if reader == "bool" else 24.0
    assert seen == [expected] * 6


@pytest.mark.filterwarnings("ignore:collage_fx. torch.compile fails")
@pytest.mark.parametrize("record", RECORDS)
def test_an_error_leaves_what_eager_pytorch_would(record: Any) -> None:
    def update(p: Tensor, g: Tensor, state: Any) -> None:
        p.data.sub_(0.25)
        state["n"] = state.get("n", 0) + 1
        if state["n"] == 3 and p.shape == (4, 3):
            g.view(5)  # raises
        p.data.sub_(LR * g)

    params = start(torch.bfloat16)
    twins = [p.detach().clone().requires_grad_() for p in params]
    for ps, options in ((params, {"record": record}), (twins, {"plain": True})):
        with pytest.raises(RuntimeError, match="shape"):
            train(update, params=ps, **options)  # type: ignore[arg-type]
    for p, q in zip(params, twins, strict=True):
        value = collage_fx.value(p).detach()
        assert float((value - q.detach().double()).abs().max()) < 0.02 < 0.25
    # The second parameter was not reached in the third step.
    moved = collage_fx.value(params[1]).detach() - start(torch.float64)[1].detach()
    assert float(moved.mean()) > -0.6


def test_versions_count_as_in_eager_pytorch() -> None:
    def update(p: Tensor, g: Tensor, state: Any) -> None:
        p.mul_(0.5).add_(g)
        p[0].zero_()

    counts = []
    for options in ({"record": True}, {"plain": True}):
        params = start(torch.bfloat16)
        train(update, params=params, **options)  # type: ignore[arg-type]
        counts.append([p._version for p in params])
    assert counts[0] == counts[1] and counts[0][0] >= 30


def test_random_numbers_are_those_of_eager_pytorch() -> None:
    def update(p: Tensor, g: Tensor, state: Any) -> None:
        p.sub_(LR * g)
        noise = torch.empty_like(p, dtype=torch.float32).normal_()
        state["noise"] = noise + torch.rand(p.shape)
        p.sub_(LR * (torch.rand_like(p) < 2))

    found = []
    for options in ({"record": True}, {"plain": True}):
        torch.manual_seed(5)
        _, step = train(update, **options)  # type: ignore[arg-type]
        states = step.__self__.state.values()
        found.append([*(s["noise"].clone() for s in states), torch.rand(3)])
    assert all(map(torch.equal, *found))


def test_flat_buffers_of_parameters_and_of_zero_dimensions() -> None:
    def run(dtype: torch.dtype, **options: Any) -> Tensor:
        flat = torch.cat([p.detach().flatten() for p in start(torch.float64)]).to(dtype)
        params = [flat[:12].view(4, 3).requires_grad_(), flat[12:].requires_grad_()]
        found, _ = train(lambda p, g, _: p.data.sub_(LR * g), dtype, params=params, **options)
        return found

    begin, _ = train(lambda *_: None, torch.float64, steps=0)
    exact = run(torch.float64)
    assert off(run(torch.bfloat16, record=True, storage="remainder16"), exact, begin) < 0.01
    assert off(run(torch.bfloat16, plain=True), exact, begin) > 0.5


@pytest.mark.parametrize("arithmetic", ["eft", "wide"])
def test_a_parameter_of_no_dimensions_under_lerp(arithmetic: str) -> None:
    def update(p: Tensor, g: Tensor, state: Any) -> None:
        p.data.lerp_(g, LR)

    def run(dtype: torch.dtype, **options: Any) -> Tensor:
        params = start(dtype, shape=())
        return train(update, dtype, params=params, **options)[0]

    exact, begin = run(torch.float64), run(torch.float64, steps=0)
    found = run(torch.bfloat16, record=True, arithmetic=arithmetic)
    assert off(found, exact, begin) < 0.05 < off(run(torch.bfloat16, plain=True), exact, begin)


def test_a_write_that_nobody_sees_is_said() -> None:
    def update(p: Tensor, g: Tensor, state: Any) -> None:
        torch.autograd.graph.increment_version(p)  # as a kernel does that is not PyTorch's

    with pytest.warns(CollageWarning, match="dispatcher saw"):
        train(update, record=True, steps=1)
