"""Fine-tune bf16 weights at a rate of 1e-5 in four ways: the picture of README.

A byte-level transformer (examples/byte_model.py, width 64, 135,488 weights) is trained in fp32 on
the standard library's source, rounded to bf16, and fine-tuned on the prose of `pydoc`'s topics by
AdamW at a constant rate of 1e-5, 600 steps. For each seed all ways begin with the same weights and
take the same batches in the same order; the loss is that of one set of 40 batches held out.

    bf16      torch.optim.AdamW on bf16 weights, as PyTorch runs it
    default   the same after `collage_fx.compile_(optimizer)`
    paper     the same after `collage_fx.compile_(optimizer, level="plus", storage="mcf2")`
    fp32      AdamW on fp32 copies of the weights, from which the bf16 weights are copied each step

Of each run: the losses, the share of the weights that are after all steps what they were before
(residuals included), and the bytes for each weight. Written to
benchmarks/results/loss_curves_cpu.json, a seed at a time, and drawn to loss_curves_light.png and
loss_curves_dark.png in docs/images; with --draw only drawn, from that file.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pictures import IMAGES, THEMES, picture
from steps import conditions
from torch import Tensor, nn

import collage_fx

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))
import byte_model  # noqa: E402
import train_bytes  # noqa: E402

STEPS, PRETRAINING, HELD_OUT, EVERY = 600, 1500, 40, 40
LR, SIZE = 1e-5, byte_model.Size(width=64)
WAYS = ("bf16", "default", "paper", "fp32")
LINES = (("-", 2.6), ("-", 7.0), ("--", 2.6), (":", 2.2))
"""Style and width: lines that lie on each other stay visible."""
RESULTS = ROOT / "benchmarks/results/loss_curves_cpu.json"


def prose() -> tuple[Tensor, Tensor]:
    """Return the text of `help()`'s topics: to train on, and a tenth to validate on."""
    from pydoc_data import topics

    data = "".join(text for _, text in sorted(topics.topics.items())).encode()
    cut = len(data) * 9 // 10
    whole = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return whole[:cut], whole[cut:]


def batches(text: Tensor, seed: int, count: int) -> list[byte_model.Batch]:
    """Return the first batches of a seed."""
    return list(itertools.islice(byte_model.batches(text, seed, "cpu", SIZE), count))


def pretrained(steps: int) -> nn.Module:
    """Train on source code, in fp32."""
    torch.manual_seed(0)
    model = byte_model.ByteModel(SIZE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step, batch in enumerate(batches(byte_model.read_text()[0], 1, steps)):
        optimizer.param_groups[0]["lr"] = train_bytes.learning_rate(step, steps, 3e-3)
        optimizer.zero_grad()
        byte_model.loss_of(model, *batch).backward()
        optimizer.step()
    return model


def optimizer_of(way: str, model: nn.Module) -> train_bytes.Run:
    """Return what trains a bf16 model in one way, with its step."""
    weights = list(model.parameters())
    if way == "fp32":
        masters = [nn.Parameter(p.detach().float()) for p in weights]
        optimizer = torch.optim.AdamW(masters, lr=LR)
        return train_bytes.Run(way, model, optimizer, _on_copies(optimizer, weights), masters)
    optimizer = torch.optim.AdamW(weights, lr=LR)
    if way == "default":
        collage_fx.compile_(optimizer)
    elif way == "paper":
        collage_fx.compile_(optimizer, level="plus", storage="mcf2")
    return train_bytes.Run(way, model, optimizer, optimizer.step, weights)


def _on_copies(optimizer: torch.optim.Optimizer, weights: list[Tensor]) -> Callable[[], None]:
    masters = optimizer.param_groups[0]["params"]

    def step() -> None:
        for master, weight in zip(masters, weights, strict=True):
            master.grad = weight.grad.float()
        optimizer.step()
        torch._foreach_copy_([p.data for p in weights], [m.data for m in masters])
        optimizer.zero_grad()

    return step


def finetune(way: str, weights: dict[str, Tensor], seed: int, steps: int) -> dict[str, Any]:
    """Train in one way; return its row."""
    text, other = prose()
    held_out = batches(other, 7, HELD_OUT)
    model = byte_model.ByteModel(SIZE)
    model.load_state_dict(weights)
    run = optimizer_of(way, model.bfloat16())
    before = [collage_fx.value(p).clone() for p in run.weights]
    losses = [(0, train_bytes.validate(model, held_out))]
    for i, batch in enumerate(batches(text, 100 + seed, steps), 1):
        model.zero_grad()
        byte_model.loss_of(model, *batch).backward()
        run.step()
        if i % EVERY == 0 or i == steps:
            losses.append((i, train_bytes.validate(model, held_out)))
    after = [collage_fx.value(p) for p in run.weights]
    still = sum(int((a == b).sum()) for a, b in zip(after, before, strict=True))
    return {
        "way": way,
        "seed": seed,
        "losses": losses,
        "unmoved": still / sum(p.numel() for p in before),
        "bytes": train_bytes.bytes_per_weight(run),
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return for each way the mean of the last losses, their range, and what stood still."""
    found = {}
    for way in WAYS:
        ours = [row for row in rows if row["way"] == way]
        ends = [row["losses"][-1][1] for row in ours]
        found[way] = {
            "before": ours[0]["losses"][0][1],
            "after": statistics.fmean(ends),
            "range": [min(ends), max(ends)],
            "unmoved": statistics.fmean(row["unmoved"] for row in ours),
            "bytes": statistics.fmean(row["bytes"] for row in ours),
        }
    return found


def draw(found: dict[str, Any], theme: str, axes: Any) -> None:
    """Draw the mean loss of each way, and a band from the least to the most of all seeds."""
    _, text, colors = THEMES[theme]
    for way, color, (style, width) in zip(WAYS, colors, LINES, strict=True):
        curves = [row["losses"] for row in found["runs"] if row["way"] == way]
        steps = [step for step, _ in curves[0]]
        columns = list(zip(*([loss for _, loss in curve] for curve in curves), strict=True))
        least, most = [min(c) for c in columns], [max(c) for c in columns]
        axes.fill_between(steps, least, most, color=color, alpha=0.25, lw=0)
        axes.plot(steps, [statistics.fmean(c) for c in columns], style, color=color, lw=width)
    ends = found["summary"]
    last, drop = found["runs"][0]["losses"][-1][0], ends["bf16"]["before"] - ends["fp32"]["after"]
    x, (_, high) = last * 1.03, axes.get_ylim()
    labels = {
        "bf16": f"bf16 weights, {ends['bf16']['bytes']:.0f} bytes each:\n"
        f"{ends['bf16']['unmoved']:.0%} of them never change",
        "default": f"bf16 weights and one line, {ends['default']['bytes']:.0f} bytes",
        "paper": f"the Collage paper's method, {ends['paper']['bytes']:.0f} bytes",
        "fp32": f"fp32 weights with bf16 copy, {ends['fp32']['bytes']:.0f} bytes",
    }
    y = ends["fp32"]["after"] + 0.15 * drop
    for way, color, (style, width) in zip(WAYS, colors, LINES, strict=True):
        height = ends["bf16"]["after"] if way == "bf16" else y
        if way != "bf16":
            axes.plot([x, x + last * 0.06], [y, y], style, color=color, lw=width, clip_on=False)
            y -= 0.15 * drop
        offset = 0 if way == "bf16" else last * 0.08
        axes.text(
            x + offset, height, labels[way], va="center", color=color if way == "bf16" else text
        )
    axes.set_xlim(0, last)
    axes.set_ylim(ends["fp32"]["after"] - 0.22 * drop, high)
    axes.set_xticks(range(0, last + 1, 200))
    axes.set_xlabel("step", color=text)
    axes.set_title(
        f"Fine-tune at a rate of {found['lr']:.0e}: loss on text that was held out".replace(
            "e-0", "e-"
        ),
        loc="left",
        fontsize=15,
    )


def main() -> None:
    """Train, and draw."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--pretraining", type=int, default=PRETRAINING)
    parser.add_argument("--draw", action="store_true", help="draw what the results file has")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--images", type=Path, default=IMAGES)
    args = parser.parse_args()
    if not args.draw:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        begin, rows = time.perf_counter(), []
        weights = pretrained(args.pretraining).state_dict()
        for seed, way in itertools.product(range(args.seeds), WAYS):
            rows.append(finetune(way, weights, seed, args.steps))
            spent, loss = time.perf_counter() - begin, rows[-1]["losses"][-1][1]
            print(f"seed {seed} {way:8} loss {loss:.4f}  {spent:4.0f} s", flush=True)
            if way == WAYS[-1]:
                found = conditions() | {"lr": LR, "cpu_seconds": round(time.process_time())}
                found |= {"summary": summary(rows), "runs": rows}
                args.out.write_text(json.dumps(found, indent=1) + "\n")
    for theme in THEMES:
        with picture(args.images / f"loss_curves_{theme}.png", theme, 4.6, 15) as axes:
            draw(json.loads(args.out.read_text()), theme, axes)


if __name__ == "__main__":
    main()
