"""Every part of the GPU check runs whole on the emulated device: benchmarks/gpu_check.py."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import gpu_check

BENCHMARKS = Path(gpu_check.__file__).parent
QUICK = ("A1 device", "A6 limits", "B3 batch, plus eft", "B3 batch, master")
PEERS = {"flashoptim": "flashoptim", "optimi": "optimi", "torchao": "torchao"}
PEERS |= {"heavyball": "heavyball"}


def run(name: str, folder: Path) -> list[dict[str, Any]]:
    """Run a part in a process of its own; return its rows."""
    command = [sys.executable, str(BENCHMARKS / "gpu_check.py"), "--at-once", "--part", name]
    command += ["--out", str(folder / "out.json"), "--commit", "85bc725", "--command", "python x"]
    file = folder / "rows.json"
    env = {**os.environ, "CUDA_EMULATOR_ZEROS": "1"}
    done = subprocess.run([*command, str(file)], env=env, capture_output=True, text=True)
    assert file.exists(), done.stderr
    found: list[dict[str, Any]] = json.loads(file.read_text())
    return found


@pytest.mark.parametrize(
    "name",
    [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in gpu_check.PARTS],
)
def test_a_part_runs_whole(name: str, tmp_path: Path) -> None:
    for word, module in PEERS.items():
        if word in name:
            pytest.importorskip(module, reason="its wheel is for `make gpu-emulated`")
    rows = run(name, tmp_path)
    assert rows and not [row["error"] for row in rows if "error" in row]
    assert all("(emulated)" in row["device"] for row in rows)


def test_fp32_master_weights_leave_room_for_a_smaller_batch(tmp_path: Path) -> None:
    """By the allocator of the real code: 12 bytes for each parameter, and 20."""
    ours, masters = (
        run(f"B3 batch, {way}", tmp_path)[0]["batch"] for way in ("plus eft", "master")
    )
    assert ours > masters > 0
