"""Training a GPT in bf16: tokens per second and memory, by how the optimizer keeps its states.

The model and its text are those of examples/byte_model.py, at another size: on a CPU a small one
over bytes, on a GPU 1.5 billion parameters over pairs of bytes (65536 tokens), which is close to
GPT-3's 1.3B; `--preset` and the options after it choose. On a GPU the model is compiled. The ways
are those of ways.py, each in a process of its own with the same weights and batches. For each:

    tokens/s      of whole steps (forward, backward, optimizer): 20th, 50th, 80th percentile
    optimizer     the median of its step alone, in some steps more that wait for the device
    held          bytes between steps for each parameter: weights, states, residuals, no gradients
                  but the fp32 ones of `master`
    peak          the most bytes in a step, activations and gradients among them
    loss          of the first and of the last step: that it is training

On a GPU memory is what its allocator has given out, on a CPU what the process has more than before
the model. Written to benchmarks/results/train_gpt_<device>.json.
"""

import argparse
import dataclasses
import itertools
import json
import logging
import multiprocessing
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from memory import held_now, peak
from steps import conditions, parameters
from torch import Tensor
from ways import WAYS

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from byte_model import ByteModel, Size, batches, loss_of, read_text
from train_bytes import synchronize

PRESETS = {
    "small": Size(layers=6, width=512, heads=8, context=64, batch=8),
    "1.3B": Size(layers=24, width=2048, heads=16, context=1024, batch=8, vocabulary=1 << 16),
}
NAMES = (
    "plain",
    "light eft",
    "plus eft",
    "plus wide",
    "remainder16",
    "master compiled",
    "master",
)
WARMUP, PROBES = 4, 5
"""Steps before the measured ones, in which all is compiled, and after them, with two clocks."""


def tokens(size: Size) -> Tensor:
    """Return the text: bytes, or pairs of them where the vocabulary has room."""
    text = read_text()[0]
    if size.vocabulary == 256:
        return text
    return text[:-1:2].int() * 256 + text[1::2]


def measure(way: str, size: Size, args: argparse.Namespace) -> dict[str, Any]:
    """Train in one way; return its row. Runs in a process of its own."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(args.threads)
    text = tokens(size)
    _settle(way, args.device)
    before = held_now(args.device)
    try:
        return _train(way, size, text, before, args)
    except torch.OutOfMemoryError:
        return {"error": "out of memory"}


def _settle(way: str, device: str) -> None:
    """Compile a small step: what compiling leaves in the process is nobody's state."""
    step = WAYS[way].make(parameters([(2, 2)] * 10, device))
    for _ in range(3):
        step()
    torch.compiler.reset()


def _train(
    way: str, size: Size, text: Tensor, before: int, args: argparse.Namespace
) -> dict[str, Any]:
    torch.manual_seed(0)
    with torch.device(args.device):
        model = ByteModel(size).bfloat16()
    params = list(model.parameters())
    count = sum(p.numel() for p in params)
    step = WAYS[way].make([p.requires_grad_() for p in params])
    run = torch.compile(model) if args.compile else model
    order = batches(text, 0, args.device, size)
    end = "\r" if sys.stdout.isatty() else "\n"

    def train(steps: int, times: list[float], apart: list[float] | None = None) -> list[float]:
        losses = []
        for inputs, targets in itertools.islice(order, steps):
            synchronize(args.device)
            begin = time.perf_counter()
            loss = loss_of(run, inputs, targets)
            loss.backward()
            if apart is not None:
                synchronize(args.device)
                middle = time.perf_counter()
            step()
            model.zero_grad()
            synchronize(args.device)
            times.append(time.perf_counter() - begin)
            if apart is not None:
                apart.append(time.perf_counter() - middle)
            losses.append(loss.item())
            print(f"{way:16} loss {losses[-1]:.3f}, {times[-1] * 1e3:9.1f} ms", end=end, flush=True)
        return losses

    first = train(WARMUP, [])[0]
    held = held_now(args.device) - before
    times: list[float] = []
    last = train(args.steps, times)[-1]
    most = peak(args.device) - before
    apart: list[float] = []
    train(PROBES, [], apart)
    print()
    seen = size.batch * size.context
    fast, median, slow = (sorted(times)[int(q * len(times))] for q in (0.2, 0.5, 0.8))
    return {
        "parameters": count,
        "tokens_per_s": {
            k: round(seen / t, 1) for k, t in (("p20", slow), ("p50", median), ("p80", fast))
        },
        "optimizer_ms": round(1e3 * sorted(apart)[len(apart) // 2], 3),
        "held_bytes": round(held / count, 2),
        "peak_MiB": round(most / 2**20, 1),
        "first_loss": round(first, 4),
        "last_loss": round(last, 4),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as text, beside fp32 master weights where those ran."""
    base = next((r for r in rows if r["way"] == "master compiled" and "error" not in r), None)
    lines = ["way               tokens/s  optimizer ms  B/param  peak MiB      loss  beside master"]
    for row in rows:
        if "error" in row:
            lines.append(f"{row['way']:16} {row['error']}")
            continue
        speed = row["tokens_per_s"]["p50"]
        line = f"{row['way']:16} {speed:9,.0f} {row['optimizer_ms']:13.2f} {row['held_bytes']:8.2f}"
        line += f" {row['peak_MiB']:9,.0f} {row['last_loss']:9.4f}"
        if base is not None:
            faster = speed / base["tokens_per_s"]["p50"]
            line += f"  {faster:.2f}x, {row['peak_MiB'] / base['peak_MiB'] - 1:+.1%} memory"
        lines.append(line)
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="a GPT's training by the states of its optimizer")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--preset", choices=PRESETS, help="small on a CPU, 1.3B on a GPU")
    for field in dataclasses.fields(Size):
        if field.name != "vocabulary":
            parser.add_argument(f"--{field.name}", type=int, help="instead of the preset's")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="the model")
    parser.add_argument("--only", nargs="+", choices=WAYS, default=NAMES)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.compile is None:
        args.compile = args.device == "cuda"
    return args


def main() -> None:
    """Train in each way, print and write the table."""
    args = arguments()
    size = PRESETS[args.preset or ("1.3B" if args.device == "cuda" else "small")]
    chosen = {f.name: getattr(args, f.name, None) for f in dataclasses.fields(Size)}
    size = dataclasses.replace(size, **{k: v for k, v in chosen.items() if v is not None})
    torch.set_num_threads(args.threads)
    out = args.out or Path(__file__).parent / f"results/train_gpt_{args.device}.json"
    rows: list[dict[str, Any]] = []
    for way in args.only:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            rows.append({"way": way, **pool.apply(measure, (way, size, args))})
        out.parent.mkdir(exist_ok=True)
        result = {"conditions": conditions(args.device), "size": dataclasses.asdict(size)}
        out.write_text(json.dumps({**result, "rows": rows}, indent=1) + "\n")
    print(f"\n{table(rows)}")


if __name__ == "__main__":
    main()
