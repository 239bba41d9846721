"""Operations that move values: each component moves as PyTorch moves it, bit for bit.

For passes.rules.structural.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from floats import BF16, FP16, Format
from rule_builder import Call, Checked, run_rule, whole
from torch import Tensor

from collage_fx.passes.ir.program import Value
from collage_fx.passes.rules import RULES
from collage_fx.passes.rules.structural import STRUCTURE

aten, prims = torch.ops.aten, torch.ops.prims
SHAPE = (2, 3, 4)
ROWS = torch.tensor([1, 0, 1])

CASES: dict[Any, tuple[Any, ...]] = {
    aten.alias.default: (),
    aten.clone.default: (),
    aten.contiguous.default: (),
    aten.detach.default: (),
    aten.diagonal.default: (0, 1, 2),
    aten.expand.default: ([5, *SHAPE],),
    aten.flip.default: ([0, 2],),
    aten.gather.default: (0, Value(ROWS.expand(1, 1, 3).clone())),
    aten.index.Tensor: ([None, Value(ROWS)],),
    aten.index_select.default: (1, Value(ROWS)),
    aten.permute.default: ([2, 0, 1],),
    aten.repeat.default: ([2, 1, 1],),
    aten.reshape.default: ([-1],),
    aten.roll.default: ([1], [2]),
    aten.select.int: (1, 2),
    aten.slice.Tensor: (2, 1, 3),
    aten.squeeze.default: (),
    aten.squeeze.dim: (0,),
    aten.squeeze.dims: ([0, 1],),
    aten.t.default: (),
    aten.transpose.int: (0, 2),
    aten.unsqueeze.default: (1,),
    aten.view.default: ([6, 4],),
    aten._unsafe_view.default: ([4, 6],),
    prims.rev.default: ([1],),
    prims.convert_element_type.default: (torch.float32,),
    aten.cat.default: (1,),
    aten.stack.default: (1,),
}
LISTS = {aten.cat.default, aten.stack.default}
KEPT = {prims.convert_element_type.default}
FORMATS = pytest.mark.parametrize("f", [BF16, FP16], ids=["bf16", "fp16"])


def tensors(target: Any, f: Format) -> tuple[Tensor, Tensor, Tensor]:
    """An expansion of any bits, of a shape that suits the operation, and a plain tensor."""
    g = torch.Generator().manual_seed(0)
    shape = SHAPE[1:] if target is aten.t.default else SHAPE
    hi = f.random(24, g)[: torch.Size(shape).numel()]
    lo, plain = f.residuals(hi, g), f.random(len(hi), g)
    return hi.view(shape), lo.view(shape), plain.view(shape)


def same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(
        a.contiguous().view(torch.int16), b.contiguous().view(torch.int16)
    )


def test_structure_is_the_registered_family() -> None:
    assert set(CASES) | {aten.where.self} == STRUCTURE
    assert set(RULES) >= STRUCTURE


@FORMATS
@pytest.mark.parametrize("target", [t for t in CASES if t not in LISTS | KEPT], ids=str)
def test_each_component_moves_by_itself(target: Callable[..., Tensor], f: Format) -> None:
    hi, lo, _ = tensors(target, f)
    found = run_rule(Call(target, (whole(hi, lo), *CASES[target])), f.dtype)
    plain = [
        [a.meta["val"] if isinstance(a, Value) else a for a in v]
        if isinstance(v, list)
        else v.meta["val"]
        if isinstance(v, Value)
        else v
        for v in CASES[target]
    ]
    assert same(found[0], target(hi, *plain))
    assert same(found[1], target(lo, *plain))


@FORMATS
def test_a_conversion_keeps_both_words(f: Format) -> None:
    hi, lo, _ = tensors(None, f)
    call = Call(prims.convert_element_type.default, (whole(hi, lo), torch.float32))
    found = run_rule(call, f.dtype)
    assert same(found[0], hi) and same(found[1], lo)


@FORMATS
@pytest.mark.parametrize("target", sorted(LISTS, key=str), ids=str)
def test_plain_members_of_a_list_have_a_low_word_of_zero(target: Any, f: Format) -> None:
    hi, lo, plain = tensors(target, f)
    call = Call(target, ([whole(hi, lo), Value(plain), whole(-hi, -lo)], 1))
    found = run_rule(call, f.dtype)
    assert same(found[0], target([hi, plain, -hi], 1))
    assert same(found[1], target([lo, torch.zeros_like(plain), -lo], 1))


@FORMATS
def test_where_chooses_the_words_of_one_side(f: Format) -> None:
    hi, lo, plain = tensors(None, f)
    chosen = torch.arange(24).view(SHAPE) % 2 == 0
    sides = whole(hi, lo), Value(plain)
    for args, signs in ((sides, (hi, plain)), (sides[::-1], (plain, hi))):
        call = Call(aten.where.self, (Value(chosen), *args))
        builder = Checked(f.dtype)
        at = 1 if args is sides else 2
        a, b = RULES[call.target](builder, call, sides[0].expanded, at)
        assert same(a.meta["val"], torch.where(chosen, *signs))
        zero = torch.zeros_like(lo)
        words = (lo, zero) if at == 1 else (zero, lo)
        assert same(b.meta["val"], torch.where(chosen, *words))
