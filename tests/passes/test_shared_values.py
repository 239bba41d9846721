"""Values that several operations read: one value, rounded, in the kernels of Inductor.

For passes.rewrite.roundings.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs import capture
from recorded_steps import Each
from torch import Tensor

import collage_fx
from collage_fx.compilation import aot
from collage_fx.passes.codegen import emit
from collage_fx.passes.rewrite import roundings
from collage_fx.runtime.ops import collage

BF16 = torch.bfloat16
aten = torch.ops.aten
SHAPE, STEPS = (16, 24), 8
HOLDS: dict[str, Callable[[Tensor], Tensor]] = {
    "largest": lambda x: (1 - x / x.max()).sqrt() >= 0,
    "smallest": lambda x: (x / x.min() - 1).sqrt() >= 0,
    "of its row": lambda x: (1 - x / x.amax(1, keepdim=True)).sqrt() >= 0,
    "of some": lambda x: (1 - x / torch.where(x > 1, x, 0).amax()).sqrt() >= 0,
    "computed again": lambda x: (1 - (x * 0.7) / (x * 0.7).max()).sqrt() >= 0,
    "its own": lambda x: (x == x.max()).any().expand(SHAPE),
    "softmax": lambda x: (x - x.max()).exp() <= 1,
}
"""Conditions that hold in eager PyTorch for all elements of any positive tensor."""


def failures(name: str, *, with_parameter: bool = True, **options: Any) -> int:
    """Return for how many elements a condition does not hold, in some steps of a function."""

    def step(p: Tensor, g: Tensor, found: Tensor) -> None:
        found.copy_(torch.where(HOLDS[name](g.norm() * g.abs() * 0.3), 0.0, 1.0))
        if with_parameter:
            p.sub_(g, alpha=1e-3)

    torch.compiler.reset()
    generator = torch.Generator().manual_seed(0)
    p, call, count = torch.ones(SHAPE, dtype=BF16), collage_fx.compile(step, **options), 0
    found = torch.zeros_like(p)
    for _ in range(STEPS):
        call(p, torch.randn(SHAPE, generator=generator).to(BF16), found)
        count += int(found.sum())
    assert bool(collage_fx.residuals(p)) is with_parameter
    return count


OTHERS: list[dict[str, Any]] = [
    {"arithmetic": "wide"},
    {"storage": "remainder16"},
    {"with_parameter": False},
]


@pytest.mark.kernels
@pytest.mark.filterwarnings("ignore:.*nothing needed compensation")
@pytest.mark.parametrize(
    ("name", "options"), [*((n, {}) for n in HOLDS), *(("of its row", o) for o in OTHERS)]
)
@pytest.mark.quick("of its row-options2")
def test_a_value_and_what_is_chosen_from_it_have_the_same_digits(
    name: str, options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert failures(name, **options) == 0
    for module in (emit, aot):
        monkeypatch.setattr(module, "keep_shared_roundings", lambda gm: None)
    assert failures(name, **options) > 0


def rounded(of: Callable[[Tensor], Tensor]) -> int:
    """Return how many roundings there are outside of regions where a state is made of 0.3 * g."""

    def each(p: Tensor, g: Tensor, state: Any) -> None:
        state["u"].copy_(of(g).sum(1, keepdim=True).expand_as(g))
        p.sub_(g, alpha=1e-3)

    p = torch.nn.Parameter(torch.ones(SHAPE, dtype=BF16))
    p.grad, optimizer = torch.ones_like(p), Each([p], each)
    optimizer.state[p] = {"u": torch.zeros_like(p)}
    result = capture(optimizer.step).program().result
    assert result is not None
    return len(result.graph.find_nodes(op="call_function", target=collage.round.default))


@pytest.mark.parametrize(
    ("of", "expected"),
    [
        (lambda g: g * 0.3 * 0.7, 0),  # whole, as each is read once
        (lambda g: (g * 0.3).abs() - (g * 0.3).max(), 2),  # one value, though computed twice
        (lambda g: (x := g * 0.3).abs().t().t() - x.max(), 1),
    ],
)
def test_what_one_operation_reads_stays_whole(of: Any, expected: int) -> None:
    assert rounded(of) == expected


def test_random_numbers_are_not_one_value() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    for made in (aten.bernoulli.default, aten.sin.default):
        for read in (aten.cos.default, aten.tan.default):
            graph.call_function(read, (graph.call_function(made, (x,)),))
    assert {n.target for n in roundings._shared(graph)} == {"x", aten.sin.default}


MOVES: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda u: u.t().contiguous().t(),
    "flipped": lambda u: u.flip(0).flip(0),
    "rolled": lambda u: u.roll(3, 0).roll(-3, 0),
    "put together": lambda u: torch.cat([u[:2], u[2:]]),
}


def turned(move: str, storage: str) -> int:
    """Return at how many elements a step turns over what equals itself, in some steps."""

    def step(p: Tensor, g: Tensor) -> None:
        u = g / 0.271
        first = torch.arange(u.numel()).view(u.shape) == 0
        p.sub_(MOVES[move](torch.where(first & (u != u.flatten()[0]), -u, u)))

    torch.compiler.reset()
    generator = torch.Generator().manual_seed(0)
    run, count = collage_fx.compile(step, storage=storage), 0
    for _ in range(STEPS):
        p, g = torch.zeros(SHAPE, dtype=BF16), torch.randn(SHAPE, generator=generator).to(BF16)
        run(p, g)
        count += int(((p > 0) != (g < 0)).sum())
    return count


@pytest.mark.parametrize("storage", ["remainder16", "ulp8", "ulp4", "sr"])
@pytest.mark.parametrize("move", MOVES)
@pytest.mark.quick("transposed-*", "rolled-sr")
def test_a_value_is_one_of_its_own_elements_where_it_is_moved_later(
    move: str, storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert turned(move, storage) == 0
    if move == "transposed":  # of the others the comparison is done on joined values, or recorded
        monkeypatch.setattr(roundings, "_moved", lambda node: (node, node))
        assert turned(move, storage) > 0
