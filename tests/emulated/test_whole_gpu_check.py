"""Every part of the GPU check runs whole on the emulated device: benchmarks/gpu_check.py.

For benchmarks/gpu_check.py.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import gpu_check
import gpu_words

from collage_fx.passes.codegen.multi_tensor_kernel import MULTI_TENSOR_KERNELS

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


@pytest.mark.parametrize("name", ["AdamW, plus", "AdamW, remainder16, capturable", "SGD, plus"])
def test_expected_words_are_of_the_same_kernels(name: str) -> None:
    """PyTorch's formula may be another on a GPU: no word would be the CPU's then."""
    texts = []
    for device in ("cpu", "cuda"):
        MULTI_TENSOR_KERNELS.clear()
        torch.compiler.reset()
        gpu_words.steps_of(device, name)
        texts.append(sorted(kernel.triton() for kernel in MULTI_TENSOR_KERNELS.values()))
    assert texts[0] == texts[1]


def test_fp32_master_weights_leave_room_for_a_smaller_batch(tmp_path: Path) -> None:
    """By the allocator of the real code: 12 bytes for each parameter, and 20."""
    ours, masters = (
        run(f"B3 batch, {way}", tmp_path)[-1]["batch"] for way in ("plus eft", "master")
    )
    assert ours > masters > 0
