"""Steps where the compiler leaves out roundings: what is compiled is tried before it is trusted."""

import json
from pathlib import Path

import pytest
import torch
from processes import run_script

pytestmark = pytest.mark.kernels

STEPS = """
import json, os, time, warnings
os.environ.update({settings!r})
import torch, collage_fx
from collage_fx.passes.codegen import inductor_lowering, rounding_probe

class Eliding:
    # The operations of a torch that ignores `use_compute_types=False`.
    def __getattr__(self, name):
        return getattr(original, name)
    def to_dtype(self, x, dtype, src_dtype=None, use_compute_types=True):
        return original.to_dtype(x, dtype, src_dtype=src_dtype)

original = inductor_lowering.ops
if {elides}:
    inductor_lowering.ops = Eliding()
probed, differing = [], rounding_probe._differing
rounding_probe._differing = lambda *a: probed.append(1) or differing(*a)
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
print(json.dumps([max(errors), warned, len(probed), str(collage_fx.report(step))]))
"""


UNSAFE = """#!/bin/sh
exec g++ "$@" -funsafe-math-optimizations
"""


def steps(
    cache: Path, members: int, *, elides: bool = False, **settings: str
) -> tuple[float, list[str], int, str]:
    """Return the largest error of five steps, the warnings, how often was tried, the report."""
    given = {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TORCHINDUCTOR_VEC_ISA_OK": "1", **settings}
    done = run_script(STEPS.format(settings=given, members=members, elides=elides))
    assert done.returncode == 0, done.stderr
    error, warned, probed, report = json.loads(done.stdout.splitlines()[-1])
    return error, warned, probed, report


def test_where_inductor_leaves_roundings_out_steps_are_interpreted(tmp_path: Path) -> None:
    error, (message,), probed, report = steps(tmp_path, 3, elides=True)
    assert error < 0.05 and probed == 1
    assert f"torch {torch.__version__} leaves out roundings of bfloat16, float16" in message
    assert "by Inductor" in message and "interpreted" in message
    assert "interpreted" in report, report


def test_where_the_compiler_reorders_sums_steps_are_interpreted(tmp_path: Path) -> None:
    """Kernels of classes are our own text, and the compiler's as much as Inductor's are."""
    compiler = tmp_path / "unsafe"
    compiler.write_text(UNSAFE)
    compiler.chmod(0o755)
    error, warned, probed, _ = steps(tmp_path / "cache", 12, CXX=str(compiler))
    (message,) = warned
    assert error < 0.05 and probed == 1
    assert "float32" in message and "printed in C++" in message


def test_where_they_are_kept_steps_are_compiled(tmp_path: Path) -> None:
    """The control; another process finds the result on disk."""
    first, second = (steps(tmp_path, 3) for _ in range(2))
    assert first[0] == second[0] < 0.05
    assert first[1] == second[1] == []
    assert (first[2], second[2]) == (1, 0)
    assert "interpreted" not in first[3]
