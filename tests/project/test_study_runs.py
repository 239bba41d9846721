"""Runs of the studies: those that are interrupted, truncated, hang or fail, and those on a GPU.

For benchmarks/studies/run.py and benchmarks/studies/cells.py.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks/studies"))
import run
from cells import STUDIES, Cell
from differences import load


class FakeRunner:
    """A runner whose cells are done at once, until one is interrupted."""

    done: list[str]
    interrupted_at = 99

    def __init__(self, out: Path, **_: Any) -> None:
        self.out = out

    def run(self, cells: Iterable[Cell]) -> Iterator[tuple[Cell, bool]]:
        for cell in cells:
            if len(self.done) == self.interrupted_at:
                raise KeyboardInterrupt
            self.done.append(cell.name)
            run.write(self.out / cell.file, {"cell": asdict(cell), "whole": [1.0], "seconds": 1.0})
            yield cell, True


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(run, "Runner", FakeRunner)
    monkeypatch.setattr(run, "missing", lambda _: "")  # no text is read
    monkeypatch.setattr(sys, "argv", ["run.py", "--only", "try", "--out", str(tmp_path)])
    monkeypatch.setattr(run.logging, "disable", lambda _: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(FakeRunner, "done", [], raising=False)
    return tmp_path


def test_an_interrupted_run_goes_on(study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    every = [cell.name for cell in STUDIES["try"].cells]
    monkeypatch.setattr(FakeRunner, "interrupted_at", 3)
    with pytest.raises(KeyboardInterrupt):
        run.main()
    assert FakeRunner.done == every[:3]
    monkeypatch.setattr(FakeRunner, "interrupted_at", 99)
    run.main()
    assert FakeRunner.done == every
    run.main()
    assert FakeRunner.done == every


def test_a_gpu_runs_the_larger_model_into_a_folder_of_its_own(
    study: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "RESULTS", study)
    for arguments, name in ((), "gpu"), (("--only", "digits"), "digits"):
        FakeRunner.done.clear()
        monkeypatch.setattr(sys, "argv", ["run.py", "--device", "cuda", *arguments])
        run.main()
        assert FakeRunner.done == [cell.name for cell in STUDIES[name].cells]
        assert load(study / "gpu").keys() >= {*STUDIES[name].cells} and not load(study)
    # The control: a CPU does not run it.
    assert not [c for c in run.chosen("", quick=False) if c.task == "gpu"]


def test_a_cell_that_fails_on_a_gpu_is_no_end_of_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def failed(*_: Any) -> None:
        raise RuntimeError("out of memory")

    cells = STUDIES["gpu"].cells[:3]
    runner = run.Runner(tmp_path, quick=False, device="cuda")
    monkeypatch.setattr(runner, "prepare", lambda _: (None, None))
    monkeypatch.setattr(run, "run_cell", lambda *_: None)
    assert [*runner.run(cells)] == [(cell, True) for cell in cells]
    monkeypatch.setattr(run, "run_cell", failed)
    assert [*runner.run(cells)] == [(cell, False) for cell in cells]
    assert "out of memory" in capsys.readouterr().err


@pytest.mark.parametrize("jobs", [1, 3])
def test_cells_run_as_many_at_a_time_as_is_said(
    jobs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = STUDIES["gpu"].cells[:6]

    def run_cell(cell: Cell, *_: Any) -> None:
        (tmp_path / f"{cells.index(cell)}").touch()
        time.sleep(99 if cell == cells[2] else 0.2)
        if cell == cells[1]:
            raise SystemExit(1)
        if cell == cells[4]:
            os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(run, "run_cell", run_cell)
    monkeypatch.setattr(run, "LIMIT", 5.0)
    runner = run.Runner(tmp_path, quick=False, device="cpu", jobs=jobs)
    monkeypatch.setattr(runner, "prepare", lambda _: (None, None))
    begun: list[int] = []
    found = {}
    for cell, done in runner.run(cells):
        found[cell] = done
        begun.append(len(list(tmp_path.iterdir())))
    assert found == {cell: i not in (1, 2, 4) for i, cell in enumerate(cells)}
    assert all(there <= i + jobs for i, there in enumerate(begun))
    assert (list(found)[-1] == cells[2]) is (jobs > 1)


def test_a_truncated_file_is_run_again(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run.main()
    first, second, *others = STUDIES["try"].cells
    text = (study / first.file).read_text()
    (study / first.file).write_text(text[: len(text) // 2])
    (study / second.file).write_text("")
    assert load(study).keys() == {*others}
    FakeRunner.done.clear()
    capsys.readouterr()
    run.main()
    assert FakeRunner.done == [first.name, second.name]
    assert (
        f"{len(others)} of {len(others) + 2} cells are there, 2 to run" in capsys.readouterr().out
    )
    assert run.whole(study / first.file) == json.loads(text)


def test_a_file_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.json"
    run.write(path, {"seconds": 1.0})

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run.os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        run.write(path, {"seconds": 2.0})
    assert run.whole(path) == {"seconds": 1.0}
