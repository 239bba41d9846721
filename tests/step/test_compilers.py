"""Steps where there is no C++ compiler, where it is killed, and where its paths have spaces."""

from pathlib import Path

import pytest
from compiler_runs import steps

pytestmark = pytest.mark.kernels

KILLED = """#!/bin/sh
[ "$1" = "--version" ] && exec g++ --version
kill -9 $$
"""


@pytest.mark.parametrize("members", [3, 12])
@pytest.mark.quick("12")
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
