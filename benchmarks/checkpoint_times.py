"""Size and time of a checkpoint of model and AdamW, beside one with fp32 master weights.

For each way: bytes for a parameter, and the median of the seconds to save and to load, relative to
fp32 master weights (fp32 weights and states), the ways taking turns. Saving begins with
state_dict(), which computes the checksums; loading ends with the first step's look at them.
Written to benchmarks/results/checkpoint_times.json.
"""

import argparse
import json
import logging
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from steps import conditions
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import AdamW

import collage_fx
from collage_fx.optimizer.ownership import owned_tensors
from collage_fx.runtime.residuals.residual import clear_stale
from collage_fx.runtime.residuals.store import STORE

Run = tuple[nn.Module, AdamW]
OPTIONS: dict[str, dict[str, Any] | None] = {
    "fp32 master weights": None,
    "plain bf16": None,
    "plus, mcf2": {"level": "plus", "storage": "mcf2"},
    "plus, remainder16": {"level": "plus", "storage": "remainder16"},
}


def made(way: str, layers: int, width: int) -> Run:
    """Return a model and its optimizer after one step."""
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    if not way.startswith("fp32"):
        model = model.bfloat16()
    optimizer = AdamW(model.parameters(), lr=1e-3)
    options = OPTIONS[way]
    if options is not None:
        collage_fx.compile_(optimizer, **options)
    for p in model.parameters():
        p.grad = torch.full_like(p, 1e-3)
    optimizer.step()
    return model, optimizer


def by_file(run: Run, folder: Path) -> None:
    """Save both by torch.save."""
    torch.save([one.state_dict() for one in run], folder / "file")


def from_file(run: Run, folder: Path) -> None:
    """Load both by torch.load."""
    parts = torch.load(folder / "file", weights_only=True)
    for one, part in zip(run, parts, strict=True):
        one.load_state_dict(part)
    look(run)


def by_dcp(run: Run, folder: Path) -> None:
    """Save both by torch.distributed.checkpoint."""
    model, states = get_state_dict(*run)
    dcp.save({"model": model, "optimizer": states}, checkpoint_id=folder / "dcp")


def from_dcp(run: Run, folder: Path) -> None:
    """Load both by torch.distributed.checkpoint."""
    model, states = get_state_dict(*run)
    dcp.load({"model": model, "optimizer": states}, checkpoint_id=folder / "dcp")
    set_state_dict(*run, model_state_dict=model, optim_state_dict=states)
    look(run)


def look(run: Run) -> None:
    """Compare the checksums, as the next step would."""
    found = [(o.tensor, r) for o in owned_tensors(run[1]) if (r := STORE.get(o.tensor))]
    clear_stale(found)


CALLS: dict[str, Callable[[Run, Path], None]] = {
    "torch.save": by_file,
    "torch.load": from_file,
    "dcp.save": by_dcp,
    "dcp.load": from_dcp,
}


def seconds(call: Callable[[Run, Path], None], run: Run, folder: Path) -> float:
    """Return how long a call takes."""
    start = time.perf_counter()
    call(run, folder)
    return time.perf_counter() - start


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=25)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    results = Path(__file__).parent / "results"
    parser.add_argument("--out", type=Path, default=results / "checkpoint_times.json")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    warnings.filterwarnings("ignore", message="Detected an existing checkpoint")
    folders = {way: Path(tempfile.mkdtemp()) for way in OPTIONS}
    runs = {way: made(way, options.layers, options.width) for way in OPTIONS}
    count = sum(p.numel() for p in runs["plain bf16"][0].parameters())
    times: dict[str, dict[str, list[float]]] = {w: {c: [] for c in CALLS} for w in OPTIONS}
    for turn in range(options.rounds):
        print(f"round {turn + 1} of {options.rounds}", flush=True)
        for way, run in runs.items():
            for name, call in CALLS.items():
                times[way][name].append(seconds(call, run, folders[way]))
    medians = {w: {c: statistics.median(t) for c, t in by.items()} for w, by in times.items()}
    yardstick = medians["fp32 master weights"]
    found = {
        way: {
            "bytes for a parameter": round((folders[way] / "file").stat().st_size / count, 2),
            "seconds": {c: round(t, 3) for c, t in medians[way].items()},
            "of fp32 master weights": {
                c: round(t / yardstick[c], 2) for c, t in medians[way].items()
            },
        }
        for way in OPTIONS
    }
    for way, row in found.items():
        print(way, row)
    result = {**conditions(), "parameters": count, "ways": found}
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    for folder in folders.values():
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
