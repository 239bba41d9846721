"""Parts that need no GPU run on a CPU, and fail alone. For benchmarks/gpu_check.py."""

import argparse
import ast
import itertools
import json
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import gpu_check
import gpu_rows
import gpu_steps
import gpu_timing
import gpu_words
from gpu_rows import Rows
from gpu_timing import Setup

BENCHMARKS = Path(gpu_check.__file__).parent
QUICK = ("A1 device", "C3 profile, plus eft", "C5 graphs of Inductor")
SKIPPED = ("C3 profile, plus eft", "C3 profile, mcf3", "C5 graphs of Inductor")
PEERS = ("optimi", "flashoptim", "torchao", "heavyball")
CONDITIONS = {"copy, GB/s", *gpu_rows.CONDITIONS}


def run_here(name: str, folder: Path) -> list[dict[str, Any]]:
    """Run a part in this process without CUDA; return its rows."""
    args = argparse.Namespace(
        dry=True,
        at_once=True,
        out=folder / "out.json",
        words=folder / "words.pt",
        command="python x",
    )
    args.commit = "85bc725"
    gpu_check.run_here(name, args, folder / "rows.json")
    found: list[dict[str, Any]] = json.loads((folder / "rows.json").read_text())
    return found


@pytest.mark.parametrize(
    "name",
    [
        n if n in QUICK else pytest.param(n, marks=pytest.mark.slow)
        for n in gpu_check.PARTS
        if not any(peer in n for peer in PEERS)
    ],
)
def test_a_part_runs_without_a_gpu(name: str, tmp_path: Path) -> None:
    rows = run_here(name, tmp_path)
    assert rows and not gpu_rows.wrong(rows), gpu_rows.wrong(rows)
    assert all(set(row) >= CONDITIONS and row["commit"] == "85bc725" for row in rows)
    assert all({"median", "p10", "p90", "repeats", "unit"} <= set(r) for r in rows if "median" in r)
    assert any("skipped" in row for row in rows) == (name in SKIPPED or name == "A6 limits")


def test_a_part_that_raises_leaves_its_rows_and_the_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(setup: Setup, rows: Rows) -> None:
        rows.measure("before", [1.0, 2.0, 4.0])
        raise ValueError("of this part")

    monkeypatch.setattr(gpu_steps, "device", broken)
    before, error = run_here("A1 device", tmp_path)
    assert before["median"] == 2.0 and before["repeats"] == 3
    assert "ValueError" in error["error"] and "of this part" in error["traceback"]
    assert gpu_rows.wrong([before, error]) == [error]


WRITES = "import sys; sys.stdin.readline(); f = open(sys.argv[1], 'w'); "
WRITES += """f.write('[{"part": "p", "name": "n"}]'); f.flush(); """
HANGS = WRITES + "import subprocess, time; sleep = 'import time; time.sleep(60)'; "
HANGS += "subprocess.Popen([sys.executable, '-c', sleep]); time.sleep(60)"
CRASHES = WRITES + "import os; print('last words', file=sys.stderr, flush=True); os.abort()"


def run_apart(program: str, seconds: float) -> list[dict[str, Any]]:
    process = gpu_check.Process("p", [sys.executable, "-c", program])
    try:
        return process.run(seconds)
    finally:
        process.end()


@pytest.mark.slow
def test_a_part_that_hangs_or_dies_leaves_its_rows_and_an_error() -> None:
    row, error = run_apart(HANGS, 2)
    assert row["name"] == "n" and error["error"] == "not done after 2 seconds"
    row, error = run_apart(CRASHES, 20)
    assert row["name"] == "n" and error["error"] == "ended with -6"
    assert "last words" in error["output"]
    assert run_apart(WRITES, 20) == [row]


class Made:
    """A part that is made up."""

    def __init__(self, name: str, log: list[str], rows: Callable[[float], list[Any]]) -> None:
        self.name, self.log, self.rows = name, log, rows
        log.append(f"{name} waits")

    def run(self, seconds: float) -> list[Any]:
        self.log.append(f"{self.name} runs")
        return self.rows(seconds)

    def end(self) -> None:
        self.log.append(f"{self.name} ended")


def test_rows_are_written_after_each_part_while_the_next_one_waits(tmp_path: Path) -> None:
    out, log, seen = tmp_path / "results/rows.json", [], []
    names = ["A1 device", "A2 launches", "A4 steps"]

    def made(name: str) -> Made:
        def rows(seconds: float) -> list[Any]:
            seen.append(sorted(json.loads(out.read_text())["seconds"]) if out.exists() else [])
            verdict = {"error": "as it should"} if name == "A2 launches" else {"seconds": seconds}
            return [{"part": name, "name": "r", **verdict}]

        return Made(name, log, rows)

    rows = gpu_check.run_all(names, out, 1000, made)
    assert [row["name"] for row in gpu_rows.wrong(rows)] == ["r"]
    assert seen == [[], ["A1 device"], ["A1 device", "A2 launches"]]
    assert json.loads(out.read_text())["rows"] == rows
    assert rows[0]["seconds"] == gpu_check.PARTS["A1 device"].seconds
    assert log[:5] == [
        *(
            "A1 device waits",
            "A2 launches waits",
            "A1 device runs",
            "A1 device ended",
            "A4 steps waits",
        )
    ]
    rows = gpu_check.run_all(names, out, 0, made)
    assert [row["skipped"] for row in rows] == ["no time was left"] * 3


def test_the_exit_status_is_that_of_the_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for verdict, status in (({"ok": True}, 0), ({"ok": False}, 1), ({"error": "why"}, 1)):
        rows = [{"part": "A1 device", "name": "r", "device": "cpu", **verdict}]
        monkeypatch.setattr(gpu_check, "run_all", lambda *_, rows=rows: rows)
        monkeypatch.setattr(
            sys, "argv", ["gpu_check.py", "--dry", "--out", str(tmp_path / "o.json")]
        )
        assert gpu_check.main() == status
        said = capsys.readouterr().out
        assert f"A1 device: r: {next(iter(verdict))}" in said and "device cpu" not in said


def test_without_a_gpu_or_with_an_unknown_part_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_check.py"])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert gpu_check.main() == 1
    assert "finds no CUDA device here; with --dry" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--dry", "--parts", "D1"])
    with pytest.raises(SystemExit, match="no part begins with 'D1'"):
        gpu_check.main()


def test_results_go_where_out_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--run", "A"])
    monkeypatch.delenv("OUT", raising=False)
    assert gpu_check.arguments().out == BENCHMARKS / "results/gpu_check_A.json"
    monkeypatch.setenv("OUT", str(tmp_path))
    assert gpu_check.arguments().out == tmp_path / "gpu_check_A.json"


SGD = "SGD, remainder16"


def one_bit(words: dict[str, torch.Tensor]) -> None:
    """Change the last bit of one element of a parameter's low word."""
    low = words["0 param, residual 0"].view(torch.int16).flatten()
    low[7] ^= 1


@pytest.mark.slow
def test_one_bit_of_a_parameters_low_word_fails_the_words(tmp_path: Path) -> None:
    setup = Setup("cpu", dry=True, folder=tmp_path, words=tmp_path / "words.pt")
    known = gpu_words.expected([SGD])
    for planted in (False, True):
        if planted:
            one_bit(known[SGD]["words"])
        torch.save(known, setup.words)
        rows = Rows(tmp_path / "rows.json", "A2 launches", "cpu", "python x", folder=tmp_path)
        gpu_words.whole_steps(setup, rows, [SGD])
        found = {row["name"]: row for row in rows.rows}
        assert found[SGD]["ok"] is not planted
        assert found["control: one bit of a low word is found"]["ok"]
    assert found[SGD]["differing"] == 1 and found[SGD]["where"] == {"0 param, residual 0": 1}
    kept = torch.load(tmp_path / "differing_A2_launches.pt")[SGD]
    (at, ours, theirs) = kept["0 param, residual 0"]
    assert at.tolist() == [7] and (ours ^ theirs).tolist() == [1]


@pytest.mark.slow
def test_words_of_another_torch_are_made_anew(tmp_path: Path) -> None:
    setup = Setup("cpu", dry=True, folder=tmp_path, words=tmp_path / "words.pt")
    others = {"sources": gpu_words._made_of(), "torch": (2, 0)}  # a version of other graphs
    torch.save(others, setup.words)
    rows = Rows(tmp_path / "rows.json", "A2 launches", "cpu", "python x", folder=tmp_path)
    gpu_words.whole_steps(setup, rows, [SGD])
    assert "made here: the file has" in rows.rows[0]["note"] and not gpu_rows.wrong(rows.rows)


@pytest.mark.parametrize("planted", [False, True])
@pytest.mark.quick("True")
def test_one_bit_of_a_parameters_low_word_fails_the_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planted: bool
) -> None:
    made = []
    optimizer_of = gpu_steps._optimizer

    def noted(setup: Setup, name: str) -> Any:
        made.append(optimizer_of(setup, name))
        return made[-1]

    def replay_of(setup: Setup, step: Callable[[], Any]) -> Callable[[], Any]:
        taken = itertools.count(1)

        def replay() -> None:
            step()
            if planted and next(taken) == 8:  # the last of those that are compared
                one_bit(gpu_words.words_of(made[-1][0]))

        return replay

    monkeypatch.setattr(gpu_steps, "_optimizer", noted)
    monkeypatch.setattr(gpu_steps, "graph_of", replay_of)
    rows = Rows(tmp_path / "rows.json", "A5 graphs", "cpu", "python x", folder=tmp_path)
    gpu_steps.replays(Setup("cpu", dry=True, folder=tmp_path), rows, SGD)
    as_launched, again = rows.rows
    # Done again, from the words of before, it has no planted bit.
    assert as_launched["ok"] is again["ok"] is not planted


def test_the_middle_and_the_tenths_of_what_was_measured() -> None:
    found = gpu_rows.spread([float(x) for x in range(11)])
    assert found == {"median": 5.0, "p10": 1.0, "p90": 9.0, "repeats": 11}


def event(name: str, cuda: bool, annotation: bool = False) -> Any:
    """Return what the profiler has of a piece of work."""
    took = types.SimpleNamespace(elapsed_us=lambda: 2.0)
    device = DeviceType.CUDA if cuda else DeviceType.CPU
    return types.SimpleNamespace(
        name=name, device_type=device, is_user_annotation=annotation, time_range=took
    )


def test_launches_copies_and_waits_are_counted_by_what_the_profiler_saw() -> None:
    kernels = [event("multi_tensor", True), event("multi_tensor", True)]
    copies = [event("Memcpy HtoD (Pinned -> Device)", True)]
    host = [event("cudaLaunchKernel", False), event("cudaStreamSynchronize", False)]
    notes = [event("Optimizer.step#AdamW.step", True, annotation=True)]
    assert gpu_timing.counted([*kernels, *copies, *host, *notes]) == {
        "kernels": 2,
        "multi_tensor, us": 4,
        "Memcpy HtoD (Pinned -> Device)": 1,
        "Memcpy HtoD (Pinned -> Device), us": 2,
        "cudaStreamSynchronize": 1,
    }


def imports_of(paths: Sequence[Path]) -> set[str]:
    """The packages that files import, by way of files beside them and of the tests' support too."""
    places = (BENCHMARKS, BENCHMARKS.parent / "tests/support", BENCHMARKS.parent / "examples")
    known, found, waiting = set(paths), set(), [*paths]
    while waiting:
        for node in ast.walk(ast.parse(waiting.pop().read_text())):
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            modules += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            for name in (m.partition(".")[0] for m in modules):
                near = [p / f"{name}.py" for p in places if (p / f"{name}.py").exists()]
                found |= set() if near else {name}
                waiting += [p for p in near if p not in known]
                known.update(near)
    return found


def test_it_needs_what_the_machine_with_the_gpu_has() -> None:
    found = imports_of([*BENCHMARKS.glob("gpu_*.py")]) - set(sys.stdlib_module_names)
    # pynvml says what the clocks are, matplotlib is for the example's own plot: both may be absent.
    needed = {"torch", "triton", "numpy", "pytest", "collage_fx", "pynvml", "matplotlib"}
    assert found <= needed, found - needed
