"""Devices that Triton cannot be used for: no crash, and one warning.

For passes.codegen.multi_tensor_kernel and compilation.session.
"""

import inspect
from unittest import mock

import pytest
import torch
from kernels import CASES, captured
from processes import run_script
from tensors import bf16, with_grads
from torch import Tensor
from torch._inductor.exc import TritonMissing
from torch._inductor.scheduler import Scheduler
from torch._inductor.utils import fresh_cache
from virtual_gpu import on_gpu, virtual_gpu

import collage_fx
from collage_fx.compilation import session
from collage_fx.errors import CollageWarning
from collage_fx.passes.codegen import multi_tensor_kernel
from collage_fx.passes.ir.program import Rewritten

WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None  # importing it raises ImportError
import torch, collage_fx
params = [torch.ones(5, requires_grad=True, dtype=torch.bfloat16) for _ in range(9)]
step = collage_fx.compile(torch.optim.SGD(params, lr=1e-3), storage="mcf2")
for p in params:
    p.grad = torch.ones_like(p)
step()
assert 1 - collage_fx.value(params[8])[0] == torch.tensor(1e-3).bfloat16(), params[8]
engines = {line.engine for line in collage_fx.report(step).states}
assert engines == {"graph"}, engines
"""


@pytest.mark.slow
def test_a_cpu_needs_no_triton() -> None:
    done = run_script(WITHOUT_TRITON)
    assert done.returncode == 0, done.stderr[-2000:]


def classes(*, triton: bool) -> list[Rewritten]:
    """Return the classes of a step on a GPU that Triton can be used for, or not."""
    case = CASES["sgd-light"]
    capture = captured(case)
    with virtual_gpu(), mock.patch.object(multi_tensor_kernel, "find_spec", lambda _: triton):
        return on_gpu(capture, case.settings).rewritten


def test_a_gpu_without_triton_is_left_to_inductor() -> None:
    assert [r.apart for r in classes(triton=True)] == [""]
    assert [r.apart[:23] for r in classes(triton=False)] == ["Triton cannot be used: "]


def trained() -> list[Tensor]:
    """Return the values of parameters after some steps."""
    torch.compiler.reset()
    torch.manual_seed(0)
    params = with_grads([bf16(5, 3), bf16(7)])
    optimizer = torch.optim.SGD(params, lr=1e-3, momentum=0.5)
    step = collage_fx.compile(optimizer, multi_tensor=True)
    for _ in range(3):
        step()
    return [collage_fx.value(p) for p in params]


@pytest.mark.slow
@pytest.mark.kernels
def test_what_inductor_cannot_compile_is_recorded_and_that_is_said_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a CPU that is taken for a GPU without Triton."""

    def missing(self: Scheduler, device: torch.device) -> None:
        raise TritonMissing(inspect.currentframe())  # as Inductor does

    with torch.compiler.set_stance("force_eager"):
        expected = trained()
    monkeypatch.setattr(multi_tensor_kernel, "unreachable", lambda device: "Triton cannot be used")
    monkeypatch.setattr(Scheduler, "create_backend", missing)
    with fresh_cache(), pytest.warns(CollageWarning) as caught:
        found = trained()
    assert len(caught) == 1 and "TritonMissing" in str(caught[0].message)
    # The momentum is plain where the passes have judged it, and kept whole where nobody has.
    assert all(
        torch.allclose(f, e, rtol=0, atol=2e-5) for f, e in zip(found, expected, strict=True)
    )


@pytest.mark.kernels
def test_a_device_of_another_kind_is_left_to_inductor_and_that_is_said_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As it would be on Apple's GPUs, for which Inductor has a backend of its own."""
    expected = trained()
    reason = multi_tensor_kernel.unreachable(torch.device("mps"))
    assert "not for mps" in reason and not multi_tensor_kernel.unreachable(torch.device("cpu"))
    for module in (multi_tensor_kernel, session):
        monkeypatch.setattr(module, "unreachable", lambda device: reason)
    with pytest.warns(CollageWarning) as caught:
        found = trained()
    assert len(caught) == 1 and reason in str(caught[0].message)
    assert all(map(torch.equal, found, expected))
