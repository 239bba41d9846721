"""Dynamo graphs in recorded steps: noted as a whole, with the bits of their operations.

For record.graphs.effects and record.graphs.notes.
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from recorded_steps import LR, start
from torch import Tensor
from torch.optim import Optimizer

import collage_fx
from collage_fx.record.graphs import effects, notes
from collage_fx.segments.executors import Executors

SCALE = torch.full((3,), 0.5)


def average(p: Tensor, g: Tensor, m: Tensor, z: Tensor) -> Tensor:
    m.lerp_(g, 0.1)
    return m * 2 - z


def views(p: Tensor, g: Tensor, m: Tensor, z: Tensor) -> Tensor:
    m.view(-1)[:4].add_(g.view(-1)[:4], alpha=0.5)
    z.t().mul_(0.5)
    return m.clone().mul_(0.5)


def random_bits(p: Tensor, g: Tensor, m: Tensor, z: Tensor) -> Tensor:
    noise = torch.rand_like(g, dtype=torch.float32) - 0.5
    m.add_((g + noise.bfloat16()) * 0.1)  # `alpha` is another operation in graphs of torch 2.11
    return m * torch.rand_like(m)


def own_tensor(p: Tensor, g: Tensor, m: Tensor, z: Tensor) -> Tensor:
    m.add_(g * SCALE * 0.1)
    return m + SCALE


def host_numbers(p: Tensor, g: Tensor, m: Tensor, z: Tensor) -> Tensor:
    share = 1 - torch.full((), 0.75) ** 2
    return m.add_(g * 0.1) * share.to(m.dtype)


UPDATES = [average, views, random_bits, own_tensor, host_numbers]


class Nested(Optimizer):
    """Has a part of its step compiled by itself, and goes on with the results in Python."""

    def __init__(self, params: list[Tensor], update: Callable[..., Tensor]) -> None:
        super().__init__(params, {"lr": LR})

        def all_updates(*lists: list[Tensor]) -> list[Tensor]:
            # Some results are arguments.
            return [*(update(*one) for one in zip(*lists, strict=True)), *lists[2]]

        self.updates = torch.compile(all_updates, fullgraph=True)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        self._step()

    @torch.compiler.disable(recursive=False)
    def _step(self) -> None:
        params = [p for p in self.param_groups[0]["params"] if p.grad is not None]
        for p in params:
            if not self.state[p]:
                self.state[p].update(m=torch.zeros_like(p), z=torch.zeros_like(p))
        states = [self.state[p] for p in params]
        grads = [p.grad for p in params]
        moves = self.updates(params, grads, *([s[k] for s in states] for k in "mz"))
        for p, move in zip(params, moves, strict=False):
            p.data.add_(move, alpha=-LR)


def train(optimizer: Optimizer, step: Any, first: int, last: int, missing: int = -1) -> list[int]:
    """Take steps; return how many operations were noted one by one in each."""
    params, counts = optimizer.param_groups[0]["params"], []
    for k in range(first, last):
        made = torch.Generator().manual_seed(k)
        torch.manual_seed(k)
        for i, p in enumerate(params):
            grad = (0.5 + torch.rand(p.shape, generator=made)).to(p.dtype)
            p.grad = None if k == missing and i == 0 else grad
        before = step._collage.steps().recorder.noted
        step()
        counts.append(step._collage.steps().recorder.noted - before)
    return counts


def found_in(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield parameters and states, each with its residuals."""
    for p in optimizer.param_groups[0]["params"]:
        for t in (p, *optimizer.state[p].values()):
            yield t.detach().clone()
            yield from (lo.clone() for lo in collage_fx.residuals(t) or ())


def run(update: Callable[..., Tensor], *, missing: int = -1) -> tuple[list[Any], list[int]]:
    torch.compiler.reset()
    optimizer = Nested(start(torch.bfloat16), update)
    step = collage_fx.compile(optimizer, arithmetic="wide")
    counts = train(optimizer, step, 0, 7, missing)
    versions = [p._version for p in optimizer.param_groups[0]["params"]]
    return [*found_in(optimizer), versions], counts


def equal(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(
        torch.equal(x, y) if isinstance(x, Tensor) else x == y for x, y in zip(a, b, strict=True)
    )


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("missing", [-1, 5], ids=["", "a gradient is missing"])
@pytest.mark.quick("-random_bits", "-host_numbers")
def test_a_line_does_what_its_operations_do(
    update: Callable[..., Tensor], missing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, counts = run(update, missing=missing)
    assert counts[-1] == 2, "what Python does, and no more"
    monkeypatch.setattr(notes, "MOST", 0)
    one_by_one, all_counts = run(update, missing=missing)
    assert all_counts[-1] > 2
    assert equal(found, one_by_one)


@pytest.mark.slow
def test_another_update_leaves_other_bits() -> None:
    assert not equal(run(average)[0], run(views)[0])


def by_count(p: Tensor, g: Tensor, m: Tensor, z: Tensor, lr: float, k: int) -> tuple[Tensor, int]:
    m.lerp_(g, 1 - 0.9**k)
    z.mul_(0.5).addcmul_(g, g, value=0.5)
    return m.mul(lr / (1 - 0.9**k)).sub_(z, alpha=1e-3 * lr), k + 1


def rolled(p: Tensor, g: Tensor, m: Tensor, z: Tensor, lr: float, k: int) -> tuple[Tensor, int]:
    m.add_(g.roll(k // 6, 0), alpha=0.1)  # the same for six steps, and then another
    return m * lr, k + 1


def equal_at_first(
    p: Tensor, g: Tensor, m: Tensor, z: Tensor, lr: float, k: int
) -> tuple[Tensor, int]:
    m.add_(g.clamp(max=2500 * lr * k, min=0.25 * k), alpha=0.1)
    return m * lr, k + 1


def read_back(p: Tensor, g: Tensor, m: Tensor, z: Tensor, lr: float, k: int) -> tuple[Tensor, int]:
    return m.add_(g, alpha=0.1) * (lr * g.float().sum().item()), k + 1


class Numbered(Nested):
    """Gives the part that is compiled its rate and the count of steps, and takes this back."""

    def __init__(self, params: list[Tensor], update: Callable[..., Any]) -> None:
        super().__init__(params, update)

        def all_updates(lr: float, k: int, *lists: list[Tensor]) -> tuple[list[Tensor], int]:
            found = [update(*one, lr, k) for one in zip(*lists, strict=True)]
            return [move for move, _ in found], found[0][1]

        self.updates = torch.compile(all_updates, fullgraph=True)
        self.counts = [1]

    @torch.compiler.disable(recursive=False)
    def _step(self) -> None:
        (group,) = self.param_groups
        for p in group["params"]:
            if not self.state[p]:
                self.state[p].update(m=torch.zeros_like(p), z=torch.zeros_like(p))
        states = [self.state[p] for p in group["params"]]
        lists = group["params"], [p.grad for p in group["params"]], [s["m"] for s in states]
        zeros = [s["z"] for s in states]
        moves, self.counts[0] = self.updates(group["lr"], self.counts[0], *lists, zeros)
        for p, move in zip(group["params"], moves, strict=True):
            p.data.add_(move, alpha=-1)


def numbered(update: Callable[..., Any]) -> tuple[list[Any], list[int]]:
    torch.compiler.reset()
    optimizer = Numbered(start(torch.bfloat16), update)
    step = collage_fx.compile(optimizer, arithmetic="wide")
    counts = []
    for k in range(16):
        optimizer.param_groups[0]["lr"] = LR if k in (0, 1, 7, 8, 9) else LR / (1 + k)
        counts += train(optimizer, step, k, k + 1)
    return list(found_in(optimizer)), counts


@pytest.mark.parametrize("update", [by_count, rolled, equal_at_first, read_back])
@pytest.mark.quick("by_count")
def test_numbers_of_a_graph_are_those_of_each_step(
    update: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A compiled kernel, which a run may get a step earlier than the other, may round otherwise.
    monkeypatch.setattr(Executors, "interpreted", property(lambda e: "asked", lambda e, v: None))
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        found, counts = numbered(update)
        assert (counts[-1] == 2) == (update is not read_back)
        monkeypatch.setattr(notes, "MOST", 0)
        one_by_one, all_counts = numbered(update)
    assert all_counts[-1] > 2
    assert equal(found, one_by_one)


@pytest.mark.slow
def test_a_float_that_is_taken_for_a_constant_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(effects, "same_number", lambda a, b: False)  # none is recognised
    assert numbered(by_count)[1][-1] > 2
    monkeypatch.undo()
    assert numbered(by_count)[1][-1] == 2


class Measured(Nested):
    """Makes a tensor of numbers out of a result."""

    def __init__(self, params: list[Tensor]) -> None:
        super().__init__(params, average)
        self.made: list[float] = []
        self.norms = torch.compile(lambda gs: [torch.stack([g.norm() for g in gs]).sum()])

    @torch.compiler.disable(recursive=False)
    def _step(self) -> None:
        super()._step()
        (norm,) = self.norms([p.grad for p in self.param_groups[0]["params"]])
        self.made.append(float(torch.tensor([norm, 2.0])[0]))


def test_what_is_read_behind_the_dispatcher_has_its_data() -> None:
    optimizer = Measured(start(torch.bfloat16))
    step, expected = collage_fx.compile(optimizer, arithmetic="wide"), []
    for k in range(6):
        train(optimizer, step, k, k + 1)
        expected.append(sum(float(p.grad.norm()) for p in optimizer.param_groups[0]["params"]))
    assert optimizer.made == pytest.approx(expected, rel=0.01)


class Shares(Nested):
    """Multiplies a tensor that its graph has as its own, or another."""

    def __init__(self, params: list[Tensor]) -> None:
        super().__init__(params, average)
        self.own = torch.full((3,), 0.5)
        other = torch.full((3,), 0.25)
        self.turns = [self.own, other, self.own, self.own, other] * 2
        constant = torch.compiler.assume_constant_result(lambda: self.own)

        def all_updates(*lists: list[Tensor]) -> list[Tensor]:
            found = [m.lerp_(g, 0.1) * constant() - z for _, g, m, z in zip(*lists, strict=True)]
            return [f + 0.5 * f * f for f in found]

        self.updates = torch.compile(all_updates, fullgraph=True)

    @torch.compiler.disable(recursive=False)
    def _step(self) -> None:
        self.turns.pop().mul_(1.25)
        super()._step()


@pytest.mark.slow
def test_a_tensor_of_the_graph_s_own_is_what_it_is_in_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run() -> list[Any]:
        torch.compiler.reset()
        optimizer = Shares(start(torch.bfloat16, count=1))
        train(optimizer, collage_fx.compile(optimizer, arithmetic="wide"), 0, 10)
        return list(found_in(optimizer))

    found = run()
    monkeypatch.setattr(notes, "MOST", 0)
    assert equal(found, run())


@pytest.mark.slow
def test_a_loaded_run_goes_on_as_the_unbroken_one() -> None:
    torch.compiler.reset()
    optimizer = Nested(start(torch.bfloat16), average)
    step = collage_fx.compile(optimizer, arithmetic="wide")
    train(optimizer, step, 0, 5)
    saved = copy.deepcopy(optimizer.state_dict())
    values = [p.detach().clone() for p in optimizer.param_groups[0]["params"]]
    train(optimizer, step, 5, 8)
    torch.compiler.reset()
    again = Nested([v.requires_grad_() for v in values], average)
    step_again = collage_fx.compile(again, arithmetic="wide")
    again.load_state_dict(saved)
    counts = train(again, step_again, 5, 8)
    assert counts[-1] == 2, "Dynamo is asked again"
    assert equal(list(found_in(optimizer)), list(found_in(again)))
