"""Tests of the host's part of GPU code, on the emulated device; elsewhere they are skipped."""

from collections.abc import Iterator
from pathlib import Path

import cuda_emulator
import pytest
import torch
from cuda_emulator.probe import leave_out_probe
from torch._inductor import cpu_vec_isa

HERE = Path(__file__).parent
if cuda_emulator.running():
    leave_out_probe()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = ""
    if not cuda_emulator.running():
        reason = cuda_emulator.missing() or "not on the CUDA emulator"
        reason += ": run make test-cuda-emulated"
    for item in items:
        if HERE in item.path.parents:
            # Kernels are compiled as for a GPU, where other tests interpret graphs.
            item.add_marker(pytest.mark.kernels)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _quiet_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave to the device what a test is about.

    Dynamo of torch 2.11 prints tensors that it guards, which reads them from the device. cuDNN is
    not emulated. Inductor tries out the host's vector instructions, which takes half a minute, for
    kernels of single numbers.
    """
    monkeypatch.setattr(torch._tensor_str, "_str", lambda *_, **__: "tensor(...)")
    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", lambda: [])
    monkeypatch.setattr(torch.backends.cudnn, "enabled", False)
    yield
    torch.cuda.empty_cache()
