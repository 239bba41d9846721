"""The whole text of one small rewritten slice: SGD without momentum, in bf16.

After a change on purpose: `EXPECTTEST_ACCEPT=1 pytest` on this file, and read the diff.

For passes.rewrite.expand and passes.rewrite.lower.
"""

from expecttest import assert_expected_inline
from graphs import capture_optimizer, text
from torch.optim import SGD

from collage_fx.passes.ir.program import Arithmetic, Rewritten


def sgd(arithmetic: Arithmetic = "eft") -> Rewritten:
    return capture_optimizer(SGD, lr=0.1).rewritten("auto", arithmetic)


def test_expanded() -> None:
    assert_expected_inline(
        text(sgd().expanded),
        """\
param: bf16
in1: bf16
param_lo: bf16
cast0: fp32 = prims.convert_element_type(in1, fp32)
mul0: fp32 = aten.mul.Tensor(cast0, -0.1)
cast1: bf16 = prims.convert_element_type(mul0, bf16)
grow0: bf16 = collage.grow(param, param_lo, cast1)
item0: bf16 = getitem(grow0, 0)
item1: bf16 = getitem(grow0, 1)
return item0, item1""",
    )


def test_lowered() -> None:
    assert_expected_inline(
        text(sgd().lowered),
        """\
param: bf16
in1: bf16
param_lo: bf16
cast0: fp32 = prims.convert_element_type(in1, fp32)
mul0: fp32 = aten.mul.Tensor(cast0, -0.1)
round0: fp32 = collage.round(mul0, bf16)
cast1: fp32 = prims.convert_element_type(param, fp32)
add0: fp32 = aten.add.Tensor(cast1, round0)
round1: fp32 = collage.round(add0, bf16)
sub0: fp32 = aten.sub.Tensor(round1, round0)
round2: fp32 = collage.round(sub0, bf16)
sub1: fp32 = aten.sub.Tensor(round1, round2)
round3: fp32 = collage.round(sub1, bf16)
sub2: fp32 = aten.sub.Tensor(cast1, round2)
round4: fp32 = collage.round(sub2, bf16)
sub3: fp32 = aten.sub.Tensor(round0, round3)
round5: fp32 = collage.round(sub3, bf16)
add1: fp32 = aten.add.Tensor(round4, round5)
round6: fp32 = collage.round(add1, bf16)
cast2: fp32 = prims.convert_element_type(param_lo, fp32)
add2: fp32 = aten.add.Tensor(cast2, round6)
round7: fp32 = collage.round(add2, bf16)
abs0: fp32 = aten.abs(round7)
lt0: bool = aten.lt.Scalar(abs0, inf)
where0: fp32 = aten.where.ScalarOther(lt0, round7, 0.0)
add3: fp32 = aten.add.Tensor(round1, where0)
round8: fp32 = collage.round(add3, bf16)
sub4: fp32 = aten.sub.Tensor(round8, round1)
round9: fp32 = collage.round(sub4, bf16)
sub5: fp32 = aten.sub.Tensor(where0, round9)
round10: fp32 = collage.round(sub5, bf16)
abs1: fp32 = aten.abs(round10)
lt1: bool = aten.lt.Scalar(abs1, inf)
where1: fp32 = aten.where.ScalarOther(lt1, round10, 0.0)
cast3: bf16 = prims.convert_element_type(round8, bf16)
cast4: bf16 = prims.convert_element_type(where1, bf16)
return cast3, cast4""",
    )


def test_expanded_wide() -> None:
    assert_expected_inline(
        text(sgd("wide").expanded),
        """\
param: bf16
in1: bf16
param_lo: bf16
join0: fp32 = collage.join(param, param_lo)
cast0: fp32 = prims.convert_element_type(in1, fp32)
mul0: fp32 = aten.mul.Tensor(cast0, -0.1)
add0: fp32 = aten.add.Tensor(join0, mul0)
split0: bf16 = collage.split(add0, bf16)
item0: bf16 = getitem(split0, 0)
item1: bf16 = getitem(split0, 1)
return item0, item1""",
    )


def test_lowered_wide() -> None:
    assert_expected_inline(
        text(sgd("wide").lowered),
        """\
param: bf16
in1: bf16
param_lo: bf16
cast0: fp32 = prims.convert_element_type(param, fp32)
cast1: fp32 = prims.convert_element_type(param_lo, fp32)
add0: fp32 = aten.add.Tensor(cast0, cast1)
cast2: fp32 = prims.convert_element_type(in1, fp32)
mul0: fp32 = aten.mul.Tensor(cast2, -0.1)
add1: fp32 = aten.add.Tensor(add0, mul0)
round0: fp32 = collage.round(add1, bf16)
sub0: fp32 = aten.sub.Tensor(add1, round0)
abs0: fp32 = aten.abs(sub0)
lt0: bool = aten.lt.Scalar(abs0, inf)
where0: fp32 = aten.where.ScalarOther(lt0, sub0, 0.0)
round1: fp32 = collage.round(where0, bf16)
cast3: bf16 = prims.convert_element_type(round0, bf16)
cast4: bf16 = prims.convert_element_type(round1, bf16)
return cast3, cast4""",
    )


def test_expanded_with_weight_decay() -> None:
    rewritten = capture_optimizer(SGD, lr=0.1, weight_decay=0.01).rewritten()
    assert_expected_inline(
        text(rewritten.expanded),
        """\
in0: bf16
param: bf16
param_lo: bf16
cast0: fp32 = prims.convert_element_type(in0, fp32)
join0: fp32 = collage.join(param, param_lo)
mul0: fp32 = aten.mul.Tensor(join0, 0.01)
add0: fp32 = aten.add.Tensor(cast0, mul0)
cast1: bf16 = prims.convert_element_type(add0, bf16)
cast2: fp32 = prims.convert_element_type(cast1, fp32)
mul1: fp32 = aten.mul.Tensor(cast2, -0.1)
cast3: bf16 = prims.convert_element_type(mul1, bf16)
grow0: bf16 = collage.grow(param, param_lo, cast3)
item0: bf16 = getitem(grow0, 0)
item1: bf16 = getitem(grow0, 1)
return item0, item1""",
    )
