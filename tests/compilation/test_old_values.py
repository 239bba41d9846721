"""Inputs that take over the old value of another input, which is overwritten first.

PyTorch 2.13 itself stores the new value there: it leaves out `clone` (`torch.compile` of a swap).

For passes.codegen.inductor_compile.
"""

from typing import Any

import pytest
import torch
from interpreter import without_compiler
from recorded_steps import Each
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule

import collage_fx
from collage_fx.passes.codegen import inductor_compile
from collage_fx.runtime.torch_versions import installed

aten = torch.ops.aten


def swapped(p: Tensor, g: Tensor, state: Any) -> None:
    if not state:
        state["slow"] = p + 1
    fast = p.clone()
    p.copy_(state["slow"])
    state["slow"].copy_(fast)


def shifted(p: Tensor, g: Tensor, state: Any) -> None:
    if not state:
        state |= {"old": p + 1, "older": p + 2}
    state["older"].copy_(state["old"])
    state["old"].copy_(p)
    p.add_(g, alpha=-0.01)


def remembered(p: Tensor, g: Tensor, state: Any) -> None:
    if not state:
        state["old"] = p + 1
    d = p - state["old"]
    state["old"].copy_(p)
    p.add_(g, alpha=-0.01).add_(d, alpha=0.5)


pytestmark = pytest.mark.filterwarnings("ignore:.*nothing needed compensation")
STEPS = [swapped, shifted, remembered]


def trained(update: Any, *dtypes: torch.dtype, record: bool | str | None) -> list[Tensor]:
    """Return the fp32 parameter and its states after some steps; in plain PyTorch for None."""
    torch.manual_seed(0)
    params = [torch.randn(3, 3).to(dtype) for dtype in dtypes]
    opt = Each(params, update)
    step = opt.step if record is None else collage_fx.compile(opt, record=record, storage="mcf2")  # type: ignore[arg-type]
    for _ in range(5):
        for p in params:
            p.grad = torch.randn(3, 3).to(p.dtype)
        step()
    return [params[-1], *opt.state[params[-1]].values()]


@pytest.mark.parametrize("update", STEPS)
@pytest.mark.parametrize("record", ["auto", True])
def test_old_values_are_taken_over(update: Any, record: Any) -> None:
    torch.compiler.reset()
    # What is recorded is compiled where a state has a low word: beside a parameter of bf16.
    dtypes = (torch.bfloat16, torch.float32) if record is True else (torch.float32,)
    plain = trained(update, *dtypes, record=None)
    with without_compiler() as graphs:
        ours = trained(update, *dtypes, record=record)
    assert graphs
    for x, y in zip(ours, plain, strict=True):
        assert torch.allclose(x, y, rtol=1e-6, atol=1e-6)


@pytest.mark.skipif(installed() >= (2, 15), reason="torch keeps old values by itself there")
@pytest.mark.parametrize("record", ["auto", True])
def test_without_the_copy_they_are_not(record: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    monkeypatch.setattr(inductor_compile, "keep_old_values", lambda gm: None)
    dtypes = (torch.bfloat16, torch.float32) if record is True else (torch.float32,)
    plain = trained(remembered, *dtypes, record=None)
    with without_compiler():
        ours = trained(remembered, *dtypes, record=record)
    assert not torch.allclose(ours[1], plain[1], rtol=1e-3)


def exchanged(*, kept: bool) -> list[list[list[float]]]:
    """Return p, q, r = q, p, the transposed p, as Inductor compiles what writes p first."""
    given = [torch.tensor([[1.0, 2.0], [3.0, 4.0]]) + 10 * i for i in range(3)]
    graph, mode = Graph(), FakeTensorMode()
    p, q, r = nodes = [graph.placeholder(f"arg{i}_1") for i in range(3)]
    for node, x in zip(nodes, given, strict=True):
        node.meta["val"] = mode.from_tensor(x)
    turned = graph.call_function(aten.permute.default, (p, [1, 0]))
    with mode:
        turned.meta["val"] = p.meta["val"].t()
    for to, value in ((p, q), (q, p), (r, turned)):
        graph.call_function(aten.copy_.default, (to, value)).meta["val"] = to.meta["val"]
    graph.output(())
    gm = GraphModule(torch.nn.Module(), graph)
    if kept:
        inductor_compile.keep_old_values(gm)
    with tracing(TracingContext(mode)):
        made = inductor_compile._compiled(gm, [n.meta["val"] for n in nodes])
    made(given.copy())
    return [x.tolist() for x in given]


def test_inductor_compiles_the_copy() -> None:
    q = [[11.0, 12.0], [13.0, 14.0]]
    assert exchanged(kept=True) == [q, [[1.0, 2.0], [3.0, 4.0]], [[1.0, 3.0], [2.0, 4.0]]]
    assert exchanged(kept=False)[1] == q
