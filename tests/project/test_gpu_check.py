"""The check of a GPU does on a CPU what needs none, and loses nothing to a part that fails."""

import ast
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from torch.autograd import DeviceType

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import gpu_check
import gpu_parts

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
QUICK = ("device", "graphs", "rates")


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in gpu_check.PARTS]
)
def test_a_part_runs_without_a_gpu(name: str, tmp_path: Path) -> None:
    gpu_check.run_here(name, dry=True, file=tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    assert found and "failed" not in found, found.get("failed")
    assert ("skipped" in found) == (name == "graphs")


def test_a_part_that_raises_leaves_what_it_found_and_the_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(setup: Any, found: Any) -> None:
        found["before"] = 1
        raise ValueError("of this part")

    monkeypatch.setattr(gpu_parts, "device", broken)
    gpu_check.run_here("device", dry=True, file=tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["before"] == 1 and "ValueError: of this part" in found["failed"]


HANGS = """
import pathlib, subprocess, sys, time
pathlib.Path(sys.argv[1]).write_text('{"before": 1}')
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
time.sleep(60)
"""
CRASHES = "import os, sys; print('last words', file=sys.stderr, flush=True); os.abort()"


def test_a_part_that_hangs_or_crashes_is_said_to() -> None:
    found = gpu_check.run_apart([sys.executable, "-c", HANGS], 2)
    assert found["before"] == 1 and found["failed"] == "not done after 2 seconds"
    found = gpu_check.run_apart([sys.executable, "-c", CRASHES], 20)
    assert found["failed"] == "ended with -6" and "last words" in found["output"]


def test_results_are_written_after_each_part(tmp_path: Path) -> None:
    out, seen = tmp_path / "results/found.json", []

    def run(name: str, seconds: float) -> dict[str, Any]:
        seen.append(sorted(json.loads(out.read_text())) if out.exists() else [])
        return {"failed": "as it should"} if name == "bits" else {"seconds": seconds}

    assert gpu_check.run_all(["device", "bits", "step"], out, 100, run) == ["bits"]
    assert [("device" in names, "bits" in names) for names in seen] == [
        (False, False),
        (True, False),
        (True, True),
    ]
    assert json.loads(out.read_text())["device"]["seconds"] == gpu_check.PARTS["device"].seconds
    assert gpu_check.run_all(["device", "bits"], out, 0, run) == ["device", "bits"]
    assert json.loads(out.read_text())["bits"]["failed"] == "left out: 0 seconds were over"


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_check.py"])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert gpu_check.main() == 1
    assert "finds no CUDA device here; with --dry" in capsys.readouterr().err


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
    assert gpu_parts.counted([*kernels, *copies, *host, *notes]) == {
        "kernels": 2,
        "multi_tensor, us": 4,
        "Memcpy HtoD (Pinned -> Device)": 1,
        "Memcpy HtoD (Pinned -> Device), us": 2,
        "cudaStreamSynchronize": 1,
    }


def imports_of(path: Path) -> set[str]:
    """The packages that a benchmark imports, by way of its neighbours too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        modules += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
        names |= {m.partition(".")[0] for m in modules}
    near = {n for n in names if (BENCHMARKS / f"{n}.py").exists() and n != path.stem}
    others = {n for n in near if n in ("gpu_parts", "gpu_steps", "memory", "steps", "ways")}
    return names - near | set().union(*(imports_of(BENCHMARKS / f"{n}.py") for n in others))


def test_it_needs_torch_and_triton_and_nothing_else() -> None:
    found = imports_of(BENCHMARKS / "gpu_check.py") | imports_of(BENCHMARKS / "gpu_steps.py")
    assert found - set(sys.stdlib_module_names) == {"torch", "triton", "collage_fx"}
