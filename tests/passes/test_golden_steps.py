"""The whole text of slices of AdamW and of a user's own step; kernels and launches of all.

After a change on purpose: `EXPECTTEST_ACCEPT=1 pytest` on this file, and read the diff.

For passes.rewrite.expand, passes.codegen.emit and passes.codegen.scalar_kernel.
"""

import pytest
import torch
from expecttest import assert_expected_inline
from graphs import OPTIMIZERS, capture_optimizer, operations, text
from torch.optim import AdamW, Optimizer

from collage_fx.runtime.torch_versions import installed

pytestmark = pytest.mark.skipif(installed() < (2, 13), reason="torch 2.11 decomposes otherwise")


class Lion(Optimizer):
    """A user's own optimizer."""

    def __init__(self, params: list[torch.Tensor], lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})
        for p in params:
            self.state[p]["m"] = torch.zeros_like(p)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p]["m"]
                p.add_((0.9 * m + 0.1 * p.grad).sign(), alpha=-group["lr"])
                m.mul_(0.99).add_(p.grad, alpha=0.01)


def test_expanded_adamw_light() -> None:
    assert_expected_inline(
        text(capture_optimizer(AdamW).rewritten("light").expanded),
        """\
param: bf16
exp_avg: bf16
in2: bf16
exp_avg_sq: bf16
in4: fp32
in5: fp32
param_lo: bf16
decay0: fp32 = collage.decay.constant(param, param_lo, -9.99999999995449e-06)
cast0: fp32 = prims.convert_element_type(exp_avg, fp32)
cast1: fp32 = prims.convert_element_type(in2, fp32)
sub0: fp32 = aten.sub.Tensor(cast1, cast0)
mul0: fp32 = aten.mul.Tensor(sub0, 0.09999999999999998)
add0: fp32 = aten.add.Tensor(cast0, mul0)
cast2: bf16 = prims.convert_element_type(add0, bf16)
mul1: bf16 = aten.mul.Tensor(exp_avg_sq, 0.999)
cast3: fp32 = prims.convert_element_type(mul1, fp32)
cast4: fp32 = prims.convert_element_type(in2, fp32)
mul2: fp32 = aten.mul.Tensor(cast4, 0.0010000000000000009)
mul3: fp32 = aten.mul.Tensor(mul2, cast4)
add1: fp32 = aten.add.Tensor(cast3, mul3)
cast5: bf16 = prims.convert_element_type(add1, bf16)
sqrt0: bf16 = aten.sqrt(cast5)
cast6: fp32 = prims.convert_element_type(sqrt0, fp32)
div0: fp32 = aten.div.Tensor(cast6, in4)
cast7: bf16 = prims.convert_element_type(div0, bf16)
cast8: fp32 = prims.convert_element_type(cast7, fp32)
add2: fp32 = aten.add.Tensor(cast8, in5)
cast9: bf16 = prims.convert_element_type(add2, bf16)
cast10: fp32 = prims.convert_element_type(cast2, fp32)
cast11: fp32 = prims.convert_element_type(cast9, fp32)
div1: fp32 = aten.div.Tensor(cast10, cast11)
add3: fp32 = aten.add.Tensor(decay0, div1)
cast12: bf16 = prims.convert_element_type(add3, bf16)
grow0: bf16 = collage.grow(param, param_lo, cast12)
item0: bf16 = getitem(grow0, 0)
item1: bf16 = getitem(grow0, 1)
return cast2, cast5, item0, item1""",
    )


def test_expanded_adamw_plus() -> None:
    assert_expected_inline(
        text(capture_optimizer(AdamW).rewritten("plus").expanded),
        """\
param: bf16
exp_avg: bf16
in2: bf16
exp_avg_sq: bf16
in4: fp32
in5: fp32
param_lo: bf16
exp_avg_sq_lo: bf16
decay0: fp32 = collage.decay.constant(param, param_lo, -9.99999999995449e-06)
cast0: fp32 = prims.convert_element_type(exp_avg, fp32)
cast1: fp32 = prims.convert_element_type(in2, fp32)
sub0: fp32 = aten.sub.Tensor(cast1, cast0)
mul0: fp32 = aten.mul.Tensor(sub0, 0.09999999999999998)
add0: fp32 = aten.add.Tensor(cast0, mul0)
cast2: bf16 = prims.convert_element_type(add0, bf16)
decay1: fp32 = collage.decay.constant(exp_avg_sq, exp_avg_sq_lo, -0.0010000000000000009)
cast3: fp32 = prims.convert_element_type(in2, fp32)
mul1: fp32 = aten.mul.Tensor(cast3, 0.0010000000000000009)
mul2: fp32 = aten.mul.Tensor(mul1, cast3)
add1: fp32 = aten.add.Tensor(decay1, mul2)
cast4: bf16 = prims.convert_element_type(add1, bf16)
grow0: bf16 = collage.grow(exp_avg_sq, exp_avg_sq_lo, cast4)
item0: bf16 = getitem(grow0, 0)
item1: bf16 = getitem(grow0, 1)
join0: fp32 = collage.join(item0, item1)
sqrt0: fp32 = aten.sqrt(join0)
cast5: bf16 = prims.convert_element_type(sqrt0, bf16)
cast6: fp32 = prims.convert_element_type(cast5, fp32)
div0: fp32 = aten.div.Tensor(cast6, in4)
cast7: bf16 = prims.convert_element_type(div0, bf16)
cast8: fp32 = prims.convert_element_type(cast7, fp32)
add2: fp32 = aten.add.Tensor(cast8, in5)
cast9: bf16 = prims.convert_element_type(add2, bf16)
cast10: fp32 = prims.convert_element_type(cast2, fp32)
cast11: fp32 = prims.convert_element_type(cast9, fp32)
div1: fp32 = aten.div.Tensor(cast10, cast11)
add3: fp32 = aten.add.Tensor(decay0, div1)
cast12: bf16 = prims.convert_element_type(add3, bf16)
grow1: bf16 = collage.grow(param, param_lo, cast12)
item2: bf16 = getitem(grow1, 0)
item3: bf16 = getitem(grow1, 1)
return cast2, item0, item2, item3, item1""",
    )


def test_expanded_of_a_users_own() -> None:
    assert_expected_inline(
        text(capture_optimizer(Lion).rewritten("plus").expanded),
        """\
args_0_state_list_dict_keys_l_args_0_state_0_m: bf16
in1: bf16
param: bf16
param_lo: bf16
mul0: bf16 = aten.mul.Tensor(args_0_state_list_dict_keys_l_args_0_state_0_m, 0.9)
mul1: bf16 = aten.mul.Tensor(in1, 0.1)
add0: bf16 = aten.add.Tensor(mul0, mul1)
sign0: bf16 = aten.sign(add0)
cast0: fp32 = prims.convert_element_type(sign0, fp32)
mul2: fp32 = aten.mul.Tensor(cast0, -0.001)
cast1: bf16 = prims.convert_element_type(mul2, bf16)
grow0: bf16 = collage.grow(param, param_lo, cast1)
item0: bf16 = getitem(grow0, 0)
item1: bf16 = getitem(grow0, 1)
mul3: bf16 = aten.mul.Tensor(args_0_state_list_dict_keys_l_args_0_state_0_m, 0.99)
cast2: fp32 = prims.convert_element_type(mul3, fp32)
cast3: fp32 = prims.convert_element_type(in1, fp32)
mul4: fp32 = aten.mul.Tensor(cast3, 0.01)
add1: fp32 = aten.add.Tensor(cast2, mul4)
cast4: bf16 = prims.convert_element_type(add1, bf16)
return item0, cast4, item1""",
    )


def test_a_class_is_one_operation() -> None:
    """Two operations for nine parameters: one does what each does with its step count."""
    program = capture_optimizer(AdamW, shapes=((2, 2),) * 9).program()
    calls = (n for n in program.result.graph.nodes if n.op == "call_function")  # type: ignore[union-attr]
    lines = [
        f"{n.target}({', '.join(map(_operand, n.args[: min(3, len(n.args) - 1)]))})" for n in calls
    ]
    assert_expected_inline(
        "\n".join(lines),
        """\
aten.empty_strided.default(1 tensors)
aten.empty_strided.default(1 tensors)
collage.multi_tensor.default(9 tensors, 0 tensors, 2 tensors)
collage.multi_tensor.default(45 tensors, 9 tensors, 2 tensors)""",
    )


def _operand(x: object) -> str:
    return f"{len(x)} tensors" if isinstance(x, list | tuple) else str(x)


@pytest.mark.slow
def test_kernels_and_launches() -> None:
    """Of eight parameters: classes, launches for all, kernels that Inductor makes beside."""
    rows = []
    for kind, options in (one for one in OPTIMIZERS if one[1]["foreach"]):
        program = capture_optimizer(kind, shapes=((4, 3),) * 8, **options).program()
        found = operations(program.result) if program.result is not None else []
        launches = sum(op.startswith("collage.multi_tensor") for op in found)
        alone = sum(op.startswith("collage.region") for op in found)
        rounds = [operations(r.lowered).count("collage.round.default") for r in program.rewritten]
        name = f"{kind.__name__}"
        rows.append(
            f"{name}: {len(program.classes)} classes, {launches} launches, {alone} alone, {rounds}"
        )
    assert_expected_inline(
        "\n".join(rows),
        """\
Adadelta: 1 classes, 1 launches, 0 alone, [39]
Adagrad: 1 classes, 2 launches, 0 alone, [25]
Adam: 1 classes, 2 launches, 0 alone, [29]
Adamax: 1 classes, 2 launches, 0 alone, [27]
AdamW: 1 classes, 2 launches, 0 alone, [27]
ASGD: 1 classes, 1 launches, 0 alone, [4]
NAdam: 1 classes, 2 launches, 0 alone, [28]
RAdam: 1 classes, 2 launches, 0 alone, [28]
RMSprop: 1 classes, 1 launches, 0 alone, [38]
Rprop: 1 classes, 1 launches, 0 alone, [5]
SGD: 1 classes, 1 launches, 0 alone, [14]""",
    )
