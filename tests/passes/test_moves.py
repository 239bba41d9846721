"""Moves: what a step indexes, flips or transposes is not rounded first, in arithmetic `wide`.

For passes.frontend.moves and passes.frontend.canonicalize.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from graphs import capture
from recorded_steps import Each, off, start, train
from torch import Tensor
from torch.fx import Graph

import collage_fx
from collage_fx.passes.ir.program import Program, Settings, graph_of, is_tensor

F64 = torch.float64
LR = 0.02
"""Rate at which fp32 weights of about one lose 1e-5 of an update."""


def scaled(g: Tensor) -> Tensor:
    """Return numbers that bf16 rounds: each operation does."""
    return g * 0.37 / (g.abs() + 0.9)


def indexed(u: Tensor) -> Tensor:
    return u.flatten()[torch.arange(u.numel() - 1, -1, -1)].view(u.shape)


def flipped(u: Tensor) -> Tensor:
    return u.flip(0)


def transposed(u: Tensor) -> Tensor:
    return u.t().contiguous().view(u.shape) + u


def put_together(u: Tensor) -> Tensor:
    return torch.cat([u[2:], u[:2]])


def with_a_gap(u: Tensor) -> Tensor:
    x = u.flatten().clone()
    x[:1] = 0
    return x.view(u.shape)


def filled(u: Tensor) -> Tensor:
    return u.flatten().index_fill(0, torch.arange(2), 0).view(u.shape)


def moved_twice(u: Tensor) -> Tensor:
    return u.roll(1, 0) * (u.t().reshape(u.shape) * 1.3).flip(1)


def in_chunks(u: Tensor) -> Tensor:
    return torch.cat([x * 0.5 for x in u.chunk(2)])


def by_columns(u: Tensor) -> Tensor:
    return torch.stack([x.flip(0) for x in u.unbind(1)], 1)


EACH = [
    indexed,
    flipped,
    transposed,
    put_together,
    with_a_gap,
    filled,
    moved_twice,
    in_chunks,
    by_columns,
]


def update(move: Callable[[Tensor], Tensor]) -> Callable[..., None]:
    def each(p: Tensor, g: Tensor, state: Any) -> None:
        p.sub_(move(scaled(g)), alpha=LR)

    return each


@pytest.mark.parametrize("move", EACH)
@pytest.mark.quick("moved_twice", "in_chunks", "by_columns")
def test_what_is_moved_is_not_rounded_first(move: Callable[[Tensor], Tensor]) -> None:
    exact, _ = train(update(move), F64)
    begin = torch.cat([x.detach().double().flatten() for x in start(F64)])

    def error(**options: Any) -> float:
        return off(train(update(move), storage="remainder16", **options)[0], exact, begin)

    assert error() < 2e-5 < 1e-4 < error(without=("moves",))
    assert error(record=True) < 2e-5


@pytest.mark.filterwarnings("error")
def test_parts_whose_sizes_are_symbols() -> None:
    def update(p: Tensor, g: Tensor) -> None:
        parts = (g * 0.37).split([2, len(g) - 2])
        p.sub_(torch.cat([*reversed(parts)]), alpha=LR)

    call = collage_fx.compile(update)
    for rows in (6, 8, 10):
        p, g = torch.ones(rows, 2).bfloat16(), torch.full((rows, 2), 1.1).bfloat16()
        call(p, g)
        wanted = 1 - LR * 0.37 * g.double()
        assert torch.allclose(collage_fx.value(p).double(), wanted, rtol=0, atol=5e-5)
        assert not torch.equal(p, torch.ones_like(p)), "the control: it moves"


def test_a_view_of_the_same_shape_is_no_move() -> None:
    """As what Dynamo makes of a product in an array of NumPy."""

    def each(p: Tensor, g: Tensor, state: Any) -> None:
        a = torch.zeros(g.shape).numpy()
        torch.from_numpy(a).copy_(g * state["m"])
        a *= 0.5
        p.sub_(torch.from_numpy(a).to(p.dtype))

    program = captured(each)
    expand = torch.ops.aten.expand.default
    found = [g.find_nodes(op="call_function", target=expand) for g in graphs_of(program)]
    assert list(map(len, found)) == [1, 0]


def test_in_eft_its_bits_are_the_same() -> None:
    found = [train(update(indexed), storage="mcf2", without=w)[0] for w in ((), ("moves",))]
    assert torch.equal(*found)


def captured(each: Callable[..., None]) -> Program:
    """Return the program of an update of a parameter with a state."""
    p = torch.nn.Parameter(torch.ones(4, 3, dtype=torch.bfloat16))
    p.grad = torch.ones_like(p)
    optimizer = Each([p], each)
    optimizer.state[p]["m"] = torch.zeros_like(p)
    return capture(optimizer.step).of(Settings(arithmetic="wide"))


def graphs_of(program: Program) -> tuple[Graph, Graph]:
    """Return the graph of AOTAutograd, and the canonical one."""
    return program.source.graph, graph_of(program.canonical).graph


def canonical(each: Callable[..., None]) -> str:
    """Return the operations of the canonical graph, with the dtypes of their results."""
    return "\n".join(
        f"{node.target}: {str(node.meta['val'].dtype).removeprefix('torch.')}"
        for node in graphs_of(captured(each))[1].nodes
        if node.op == "call_function" and is_tensor(node)
    )


def test_the_rounding_comes_after_the_move() -> None:
    def each(p: Tensor, g: Tensor, state: Any) -> None:
        state["m"].add_(g)
        p.sub_((g * state["m"]).flip(0))

    assert_expected_inline(
        canonical(each),
        """\
aten.add.Tensor: bfloat16
prims.convert_element_type.default: float32
prims.convert_element_type.default: float32
aten.mul.Tensor: float32
prims.rev.default: float32
prims.convert_element_type.default: bfloat16
aten.sub.Tensor: bfloat16
aten.copy_.default: bfloat16
aten.copy_.default: bfloat16""",
    )


def test_what_is_stored_is_moved_as_it_is() -> None:
    def each(p: Tensor, g: Tensor, state: Any) -> None:
        p.sub_(state["m"].mul_(g).flip(0))

    assert_expected_inline(
        canonical(each),
        """\
aten.mul.Tensor: bfloat16
prims.rev.default: bfloat16
aten.sub.Tensor: bfloat16
aten.copy_.default: bfloat16
aten.copy_.default: bfloat16""",
    )
