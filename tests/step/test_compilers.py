"""Steps where there is no C++ compiler, where it is killed, and where its paths have spaces."""

import json
from pathlib import Path

import pytest
from processes import run_script

pytestmark = pytest.mark.kernels

STEPS = """
import json, os, warnings
os.environ.update({settings!r})
import torch, collage_fx

params = [torch.linspace(1, 2, 64 + i).bfloat16() for i in range({members})]
exact = [p.double() for p in params]
optimizers = [torch.optim.AdamW(some, lr=1e-4) for some in (params, exact)]
step = collage_fx.compile(optimizers[0])
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    for i in range(5):
        for x in params + exact:
            x.grad = torch.full_like(x, 0.25 + i / 8)
        step(), optimizers[1].step()
errors = [float((collage_fx.value(p) - x).abs().max() / 5e-4) for p, x in zip(params, exact)]
warned = [str(w.message) for w in said if issubclass(w.category, collage_fx.CollageWarning)]
print(json.dumps([max(errors), warned, os.environ["TORCHINDUCTOR_CACHE_DIR"]]))
"""
KILLED = """#!/bin/sh
[ "$1" = "--version" ] && exec g++ --version
kill -9 $$
"""


def steps(cache: Path, members: int, **settings: str) -> tuple[float, list[str], str]:
    """Return the largest error of five steps, what was warned of, and where the cache is then."""
    given = {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TORCHINDUCTOR_VEC_ISA_OK": "1", **settings}
    done = run_script(STEPS.format(settings=given, members=members))
    assert done.returncode == 0, done.stderr
    error, warned, folder = json.loads(done.stdout.splitlines()[-1])
    return error, warned, folder


@pytest.mark.parametrize("members", [3, 12])
def test_without_a_compiler_steps_are_interpreted(members: int, tmp_path: Path) -> None:
    error, warned, _ = steps(tmp_path, members, CXX="/no/such/compiler")
    assert error < 0.05
    (message,) = warned
    assert "no C++ compiler works" in message and "/no/such/compiler" in message
    assert "Install g++" in message


def test_a_compiler_that_is_killed(tmp_path: Path) -> None:
    compiler = tmp_path / "killed"
    compiler.write_text(KILLED)
    compiler.chmod(0o755)
    error, (message,), _ = steps(tmp_path / "cache", 12, CXX=str(compiler))
    assert error < 0.05 and "status -9" in message


def test_a_folder_with_a_space(tmp_path: Path) -> None:
    """Kernels of classes and Inductor's are compiled into it; the control is one without."""
    spaced = tmp_path / "a folder"
    error, warned, used = steps(spaced, 12)
    assert error < 0.05 and warned == []
    assert list(spaced.rglob("*.so")) and " " not in used
    assert steps(tmp_path / "folder", 12)[::2] == (error, str(tmp_path / "folder"))
