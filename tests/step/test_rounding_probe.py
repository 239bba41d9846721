"""Steps where the compiler leaves out roundings: what is compiled is tried before it is trusted.

For passes.codegen.rounding_probe.
"""

from pathlib import Path

import pytest
import torch
from compiler_runs import steps

pytestmark = pytest.mark.kernels

COUNTED = """
from collage_fx.passes.codegen import inductor_lowering, rounding_probe
differing = rounding_probe._differing
rounding_probe._differing = lambda *a: probed.append(1) or differing(*a)
"""
ELIDED = (
    COUNTED
    + """
class Eliding:
    # The operations of a torch that ignores `use_compute_types=False`.
    def __getattr__(self, name):
        return getattr(original, name)
    def to_dtype(self, x, dtype, src_dtype=None, use_compute_types=True):
        return original.to_dtype(x, dtype, src_dtype=src_dtype)

original = inductor_lowering.ops
inductor_lowering.ops = Eliding()
"""
)
UNSAFE = """#!/bin/sh
exec g++ "$@" -funsafe-math-optimizations
"""


@pytest.mark.slow
def test_where_inductor_leaves_roundings_out_steps_are_interpreted(tmp_path: Path) -> None:
    error, (message,), _, probed, report = steps(tmp_path, 3, ELIDED)
    assert error < 0.05 and probed == 1
    assert f"torch {torch.__version__} leaves out roundings of bfloat16, float16" in message
    assert "by Inductor" in message and "interpreted" in message
    assert "interpreted" in report, report


@pytest.mark.slow
def test_where_the_compiler_reorders_sums_steps_are_interpreted(tmp_path: Path) -> None:
    """Kernels of classes are our own text, and the compiler's as much as Inductor's are."""
    compiler = tmp_path / "unsafe"
    compiler.write_text(UNSAFE)
    compiler.chmod(0o755)
    error, warned, _, probed, _ = steps(tmp_path / "cache", 12, COUNTED, CXX=str(compiler))
    (message,) = warned
    assert error < 0.05 and probed == 1
    assert "float32" in message and "printed in C++" in message


@pytest.mark.slow
def test_where_they_are_kept_steps_are_compiled(tmp_path: Path) -> None:
    """The control; another process finds the result on disk."""
    first, second = (steps(tmp_path, 3, COUNTED) for _ in range(2))
    assert first.error == second.error < 0.05
    assert first.warned == second.warned == []
    assert (first.probed, second.probed) == (1, 0)
    assert "interpreted" not in first.report
