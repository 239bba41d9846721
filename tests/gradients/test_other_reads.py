"""Gradients that a step reads without `p.grad`, and the graphs that multiply them.

For gradients.multiplied and gradients.graph.
"""

from typing import Any

import pytest
import torch
from clipped_runs import LR, NORM, Flat, give, norm_of, params
from expecttest import assert_expected_inline
from torch import Tensor
from torch.fx import GraphModule
from torch.optim import Optimizer

import collage_fx
from collage_fx.errors import UnsupportedError
from collage_fx.gradients.graph import multiply_apart
from collage_fx.gradients.multiplied import FACTOR


@pytest.mark.parametrize("record", ["auto", True, False])
def test_another_way_to_a_gradient_is_refused(record: Any) -> None:
    optimizer = Flat(params())
    given = optimizer.param_groups[0]["params"]
    optimizer.flat = torch.randn(sum(p.numel() for p in given)).bfloat16()
    first = 0
    for p in given:
        p.grad = optimizer.flat[first : first + p.numel()].view_as(p)
        first += p.numel()
    collage_fx.compile_(optimizer, clip_grad_norm=NORM, record=record)
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="though not by way of"):
            optimizer.step()
    assert all(map(torch.equal, given, params()))
    assert not {FACTOR, "_collage_multiplied"} & vars(optimizer).keys()


def test_gradients_in_one_buffer_are_read_by_way_of_each() -> None:
    optimizer: Any = torch.optim.SGD(params(), lr=LR)
    collage_fx.compile_(optimizer, clip_grad_norm=NORM, record=True)
    found = give(optimizer, 0)
    flat = torch.cat([g.flatten() for g in found])
    first = 0
    for p in optimizer.param_groups[0]["params"]:
        p.grad = flat[first : first + p.numel()].view_as(p)
        first += p.numel()
    optimizer.step()
    pairs = zip(optimizer.param_groups[0]["params"], params(), strict=True)
    moved = norm_of([(collage_fx.value(p) - q).detach() for p, q in pairs])
    assert float(moved) == pytest.approx(LR * NORM, rel=1e-5)


@torch.library.custom_op("collage_tests::fused_descent", mutates_args={"p"})
def fused_descent(p: Tensor, g: Tensor, lr: float) -> None:
    p.sub_(g * lr)


@fused_descent.register_fake
def _(p: Tensor, g: Tensor, lr: float) -> None: ...


class Fused(Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": LR})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                torch.ops.collage_tests.fused_descent(p, p.grad, group["lr"])


def test_a_kernel_of_the_users_own_is_given_the_product() -> None:
    optimizer: Any = Fused(params())
    collage_fx.compile_(optimizer, clip_grad_norm=NORM)
    for k in range(4):
        before = [p.clone() for p in optimizer.param_groups[0]["params"]]
        given = [g.clone() for g in give(optimizer, k)]
        optimizer.step()
        scale = NORM / float(optimizer.step.grad_norm)
        for p, old, g in zip(optimizer.param_groups[0]["params"], before, given, strict=True):
            expected = old.double() - LR * scale * g.double()
            assert torch.allclose(p.double(), expected, rtol=0.0, atol=2.0**-6)
            assert not torch.allclose(p.double(), old.double() - LR * g.double(), atol=2.0**-4)


class _Source:
    def __init__(self, name: str) -> None:
        self.name = name


def traced(function: Any, *, factor: str = FACTOR) -> str:
    """Return the text of Dynamo's graph of a function of g, p and a factor, its product apart.

    The factor is an attribute of that name.
    """
    found: list[str] = []
    names = {"L_g_": "params[0].grad", "L_p_": "params[0]", "L_factor_": factor}

    def backend(gm: GraphModule, _: Any) -> Any:
        for node in gm.graph.find_nodes(op="placeholder"):
            node._dynamo_source = _Source(f"L['self'].{names[node.target]}")
        apart = multiply_apart(gm)
        text = gm.code.replace("mul_1", "mul")  # as torch 2.11 numbers it
        lines = [line.strip().partition(";")[0] for line in text.splitlines()]
        found.append("\n".join([*(x for x in lines if " = " in x), f"apart: {apart}"]))
        return gm.forward

    torch.compile(function, backend=backend)(torch.ones(3), torch.ones(3), torch.ones(()))
    return found[0]


def test_products_are_apart() -> None:
    def step(g: Tensor, p: Tensor, factor: Tensor) -> None:
        g.mul_(factor)
        p.sub_(g)
        g.zero_()

    def adds_to_it(g: Tensor, p: Tensor, factor: Tensor) -> None:
        g.mul_(factor)
        g.view(3).add_(p)
        p.add_(g)

    def reads_before(g: Tensor, p: Tensor, factor: Tensor) -> None:
        p.add_(g.sign())
        step(g, p, factor)

    def replaces_it(g: Tensor, p: Tensor, factor: Tensor) -> None:
        step(g.clone(), p, factor)

    assert traced(reads_before).endswith("apart: None")
    assert traced(replaces_it).endswith("apart: None")
    assert_expected_inline(
        traced(step),
        """\
l_g_ = L_g_
l_factor_ = L_factor_
l_p_ = L_p_
mul = torch.mul(l_g_, l_factor_)
sub_ = l_p_.sub_(mul)
zero_ = l_g_.zero_()
apart: True""",
    )
    assert_expected_inline(
        traced(adds_to_it),
        """\
l_g_ = L_g_
l_factor_ = L_factor_
l_p_ = L_p_
mul_ = l_g_.mul_(l_factor_)
view = l_g_.view(3)
add_ = view.add_(l_p_)
add__1 = l_p_.add_(l_g_)
apart: True""",
    )
    assert_expected_inline(
        traced(step, factor="lr"),
        """\
l_g_ = L_g_
l_factor_ = L_factor_
l_p_ = L_p_
mul_ = l_g_.mul_(l_factor_)
sub_ = l_p_.sub_(l_g_)
zero_ = l_g_.zero_()
apart: False""",
    )
