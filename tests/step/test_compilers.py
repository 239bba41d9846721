"""Steps where there is no C++ compiler, where it is killed, and where its paths have spaces.

For runtime.cpp_compiler.
"""

from pathlib import Path
from unittest import mock

import pytest
import torch
from compiler_runs import steps
from torch._inductor import config as inductor_config

import collage_fx
from collage_fx.passes.codegen.multi_tensor_kernel import MULTI_TENSOR_KERNELS

pytestmark = pytest.mark.kernels

KILLED = """#!/bin/sh
[ "$1" = "--version" ] && exec g++ --version
kill -9 $$
"""


def test_without_a_compiler_steps_of_this_process_are_interpreted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    params = [torch.linspace(1, 2, 64 + i).bfloat16() for i in range(9)]
    exact = [p.double() for p in params]
    optimizers = [torch.optim.AdamW(some, lr=1e-4) for some in (params, exact)]
    step = collage_fx.compile(optimizers[0], multi_tensor=True)
    nowhere = inductor_config.patch({"cpp.cxx": ("/no/such/compiler",)})
    unknown = mock.patch.dict(MULTI_TENSOR_KERNELS, clear=True)
    with nowhere, unknown, pytest.warns(collage_fx.CollageWarning) as caught:
        for i in range(5):
            for x in params + exact:
                x.grad = torch.full_like(x, 0.25 + i / 8)
            step(), optimizers[1].step()
    (message,) = [str(w.message) for w in caught]
    assert "no C++ compiler works" in message and "/no/such/compiler" in message
    for p, x in zip(params, exact, strict=True):
        assert float((collage_fx.value(p) - x).abs().max()) < 0.05 * 5e-4


@pytest.mark.slow
@pytest.mark.parametrize("members", [3, 12])
def test_without_a_compiler_steps_are_interpreted(members: int, tmp_path: Path) -> None:
    error, warned, *_ = steps(tmp_path, members, CXX="/no/such/compiler")
    assert error < 0.05
    (message,) = warned
    assert "no C++ compiler works" in message and "/no/such/compiler" in message
    assert "Install g++" in message


@pytest.mark.slow
def test_a_compiler_that_is_killed(tmp_path: Path) -> None:
    compiler = tmp_path / "killed"
    compiler.write_text(KILLED)
    compiler.chmod(0o755)
    error, (message,), *_ = steps(tmp_path / "cache", 12, CXX=str(compiler))
    assert error < 0.05 and "status -9" in message


@pytest.mark.slow
def test_a_folder_with_a_space(tmp_path: Path) -> None:
    """Kernels of classes and Inductor's are compiled into it."""
    spaced = tmp_path / "a folder"
    error, warned, used, *_ = steps(spaced, 12)
    assert error < 0.05 and warned == []
    assert list(spaced.rglob("*.so")) and " " not in used


@pytest.mark.slow
def test_a_folder_without_one_is_the_one_that_is_used(tmp_path: Path) -> None:
    """The control."""
    error, warned, used, *_ = steps(tmp_path / "folder", 12)
    assert error < 0.05 and warned == []
    assert used == str(tmp_path / "folder")
