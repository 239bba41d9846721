"""Members that reduce or multiply matrices: one is compiled, and called for each of the others.

For compilation.aot and compilation.side_inputs.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from interpreter import without_compiler
from torch import Tensor
from torch.optim import Adafactor, Muon, Optimizer

import collage_fx
from collage_fx.compilation import aot
from collage_fx.passes.dedup import independent_parts
from collage_fx.passes.dedup.deduplicate import Narrow

SHAPES = [(3, 4)] * 8 + [(5,)] * 2
TWICE = [*SHAPES, *[(7, 2)] * 9]
"""Two shapes of eight and more."""
RATE = 1e-2


class Lamb(Optimizer):
    """A step whose updates are scaled by norms: of each parameter, and of all gradients."""

    def __init__(self, params: list[Tensor], clips: torch.dtype | None = None) -> None:
        super().__init__(params, {"lr": RATE})
        self.clips = clips

    def scale(self, params: list[Tensor]) -> Any:
        if self.clips is None:
            return 1.0
        norm = torch.stack([p.grad.to(self.clips).norm() for p in params]).norm()
        return (1.0 / (norm + 1e-6)).clamp(max=1.0)

    @torch.no_grad()
    def step(self) -> None:
        params = [p for p in self.param_groups[0]["params"] if p.grad is not None]
        scale = self.scale(params)
        for p in params:
            state = self.state[p]
            if not state:
                state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
            g = p.grad * scale
            state["m"].mul_(0.9).add_(g, alpha=0.1)
            state["v"].mul_(0.999).addcmul_(g, g, value=0.001)
            update = state["m"] / (state["v"].sqrt() + 1e-6) + 0.01 * p
            p.add_(update * (p.norm() / update.norm()), alpha=-RATE)


class Groups(Lamb):
    """Two groups, of which each has a rate of its own that changes from step to step."""

    def __init__(self, params: list[Tensor], clips: torch.dtype | None = None) -> None:
        super().__init__(params[:8], clips)
        self.add_param_group({"params": params[8:], "lr": 2 * RATE})

    @torch.no_grad()
    def step(self) -> None:
        every = [p for group in self.param_groups for p in group["params"]]
        scale = self.scale([p for p in every if p.grad is not None])
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                u = p.grad * scale
                p.mul_(1 - group["lr"] * 0.1)
                p.add_(u * (p.norm() / u.norm()), alpha=-group["lr"])


class GivesBack(Lamb):
    """A step whose new states are the old tensors, written in place and assigned again."""

    @torch.no_grad()
    def step(self) -> None:
        for p in (p for p in self.param_groups[0]["params"] if p.grad is not None):
            state = self.state[p]
            if "m" not in state:
                state["m"] = torch.zeros_like(p)
            state["m"] = state["m"].mul_(0.9).add_(p.grad, alpha=0.1)
            p.add_(state["m"] * (p.norm() / (state["m"].norm() + 1e-3)), alpha=-RATE)


def adafactor(params: list[Tensor]) -> Optimizer:
    """Return an optimizer that reads numbers back, and calls torch.norm, which is Python code."""
    return Adafactor(params, lr=RATE)


def muon(params: list[Tensor]) -> Optimizer:
    return Muon(params, lr=RATE, weight_decay=0.01)


Make = Callable[[list[Tensor]], Optimizer]


def states_after(
    make: Make,
    shapes: list[Any] = SHAPES,
    *,
    steps: int = 6,
    scheduled: bool = False,
    **options: Any,
) -> list[Tensor]:
    """Return parameters, states and residuals after steps; gradients are missing in the fifth.

    Args:
        scheduled: whether the rates change, and no gradient is missing.
    """
    torch.compiler.reset()
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(s, generator=generator).bfloat16().requires_grad_() for s in shapes]
    optimizer = make(params)
    step = collage_fx.compile(optimizer, **options)
    for i in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).bfloat16() * 0.1
        if scheduled:
            for group in optimizer.param_groups:
                group["lr"] *= 0.9
        elif i == 4:
            params[1].grad = params[-1].grad = None
        step()
    tensors = [t for p in params for t in (p, *optimizer.state[p].values())]
    lows = [r for t in tensors for r in collage_fx.residuals(t)]
    return [t.detach().clone() for t in (*tensors, *lows)]


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """For each narrow graph that was compiled, of how many members its parts are."""
    found: list[list[int]] = []
    original = aot._compile_parts

    def spy(session: Any, inputs: Any, narrow: Narrow, *args: Any) -> Any:
        code = original(session, inputs, narrow, *args)
        if isinstance(code, aot.Code):
            found.append([len(one.groups[0].inputs) for one in narrow.apart])
        return code

    monkeypatch.setattr(aot, "_compile_parts", spy)
    return found


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (Lamb, {}),
        (Lamb, {"storage": "remainder16"}),
        (Lamb, {"arithmetic": "eft"}),
        (lambda params: Lamb(params, clips=torch.float32), {}),
        (GivesBack, {}),
        (adafactor, {}),
    ],
    ids=["lamb", "remainder16", "eft", "clipped", "gives back", "adafactor"],
)
@pytest.mark.quick("gives back")
def test_members_have_the_bits_of_the_whole_graph(
    parts: list[list[int]], make: Make, options: dict[str, Any]
) -> None:
    shapes, sizes = (TWICE, [8, 9]) if make is Lamb else (SHAPES, [8])
    with without_compiler():
        found = states_after(make, shapes, **options)
        assert sizes in parts
        count = len(parts)
        expected = states_after(make, shapes, without=("deduplicate",), **options)
    assert len(parts) == count
    assert len(found) > 2 * len(shapes) and all(map(torch.equal, found, expected))


@pytest.mark.slow
@pytest.mark.parametrize("clips", [None, torch.float32], ids=["apart", "clipped"])
def test_rates_that_change_compile_nothing_anew(
    parts: list[list[int]], clips: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part takes the rate of its own group, and leaves that of the other an input."""
    graphs: list[Any] = []
    original = aot.compile_graph

    def spy(*args: Any, **kwargs: Any) -> Any:
        graphs.append(args)
        return original(*args, **kwargs)

    monkeypatch.setattr("collage_fx.dynamo.backend.compile_graph", spy)
    make, shapes = (lambda params: Groups(params, clips)), [(3, 4)] * 16
    with without_compiler():
        found = states_after(make, shapes, steps=4, scheduled=True)
        assert parts[-1] == [8, 8] and len(graphs) <= 2
        expected = states_after(make, shapes, steps=4, scheduled=True, without=("deduplicate",))
    assert all(map(torch.equal, found, expected))


@pytest.mark.slow
def test_a_row_too_few_is_seen(parts: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the one before: the call of one member is left out."""
    original = independent_parts.calls_of_members

    def fewer(program: Any) -> Any:
        made = original(program)
        made.calls.pop()
        return made

    with without_compiler():
        expected = states_after(Lamb, steps=3, without=("deduplicate",))
        monkeypatch.setattr(aot, "calls_of_members", fewer)
        assert not all(map(torch.equal, states_after(Lamb, steps=3), expected))


@pytest.mark.slow
def test_rounded_values_are_not_handed_on(parts: list[list[int]]) -> None:
    """A norm in 16 bits is kept in fp32 within a graph; parts would get it rounded."""
    with without_compiler():
        states_after(lambda params: Lamb(params, clips=torch.bfloat16), steps=3)
    assert not parts


@pytest.mark.slow
@pytest.mark.parametrize("make", [muon, adafactor])
def test_one_matrix_of_a_shape_is_traced(
    parts: list[list[int]], monkeypatch: pytest.MonkeyPatch, make: Make
) -> None:
    shapes = [(4, 3)] * 8 + [(2, 6)] * 2
    sizes: list[int] = []
    original = aot.compile_graph

    def spy(session: Any, gm: Any, *args: Any, **kwargs: Any) -> Any:
        sizes.append(len(gm.graph.nodes))
        return original(session, gm, *args, **kwargs)

    monkeypatch.setattr("collage_fx.dynamo.backend.compile_graph", spy)
    with without_compiler():
        found = states_after(make, shapes, steps=3)
        assert parts[0] == [8]
        expected = states_after(make, shapes, steps=3, without=("deduplicate",))
    assert all(map(torch.equal, found, expected))
    # Three matrices of ten: the first of eight, and two.
    assert sizes[0] < 0.4 * sizes[-1]


@pytest.mark.slow
def test_compiled_members_are_as_exact(parts: list[list[int]]) -> None:
    """Against the interpreted step, which rounds roots and norms otherwise in the last place."""
    found = states_after(Lamb)
    assert parts
    with without_compiler():
        expected = states_after(Lamb)
    params = [pair for pair in zip(found, expected, strict=True) if pair[0].dim()][: len(SHAPES)]
    assert all(torch.allclose(a.double(), b.double(), rtol=2**-7, atol=1e-4) for a, b in params)
