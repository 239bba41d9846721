"""Train a small byte-level transformer in bf16 under four strategies and compare them.

The text is the Python standard library's own source, read from this machine; whole files are held
out for validation. Weights, activations and gradients of the model are bf16 everywhere. What the
optimizer keeps differs:

    bf16          torch.optim.AdamW on the bf16 weights, both moments bf16
    collage       the same optimizer, its step compiled by collage_fx: weights and second moments
                  are exactly fp32, in bf16 and the 16 bits beyond (storage "remainder16")
    collage plus  the same with level="plus", storage="mcf2": what the Collage paper has
    fp32 master   AdamW on an fp32 copy of the weights with fp32 moments, copied down after a step

All start from the same weights and see the same batches in the same order. The setting is the
plainest there is: PyTorch's default initialisation and AdamW's defaults throughout (lr 1e-3, betas
0.9 and 0.999, weight decay 0.01), with a linear warmup and a cosine down to a tenth of the lr. In
it bf16 falls behind by itself: a bf16 weight ignores updates below 2**-9 of its size, and a bf16
second moment cannot decay by a factor of 0.999 at all. How far depends on the lr, for larger
updates are lost less often: 1e-3 is the default of AdamW and shows the effect well, it is not the
best lr for this run. Final losses at other peak lrs (seed 0, 1200 steps, one CPU thread):

    lr            5e-4     1e-3     2e-3     4e-3     8e-3
    bf16          2.297    1.992    1.731    1.604    1.614
    fp32 master   2.148    1.857    1.664    1.567    1.580

What the columns of the final table mean:

    val loss   nats per byte on the held-out files after the last step
    B/param    bytes of weights, gradients, optimizer states, residuals and master copies over the
               number of weights; counted from distinct storages, not from a formula. The master
               strategy's fp32 gradients live only during a step and are not counted.
    lost       share of the weights whose stored value, all components, did not change although
               the update was non-zero; the mean over a few probe steps spread over training. The
               intended update is computed in float64 from the gradients and stored states of that
               very step, weight decay included. The little that "collage plus" still loses is
               mostly decay alone (lr * 0.01 of a weight) on the embeddings of bytes absent from a
               batch.
    step ms    median time of an optimizer step outside the probes. All four are compiled: the two
               plain optimizers by torch.compile's default backend. For the master strategy it
               includes casting the gradients up and copying the weights down.

Run: python examples/train_bytes.py [--steps N] [--lr X] [--seed N] [--out PNG] [--device NAME]
                                    [--threads N] [--strategies NAME ...]
"""

from __future__ import annotations

import argparse
import itertools
import logging
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib
import torch
from byte_model import LAYERS, WIDTH, Batch, ByteModel, batches, loss_of, read_text
from torch import Tensor, nn

import collage_fx

matplotlib.use("Agg")
import matplotlib.pyplot as plt

EVALUATIONS, PROBES = 16, 8
WARMUP = 0.05  # share of the steps
LOOKS = {  # colour, line style and width: curves which coincide stay visible
    "bf16": ("tab:red", "-", 2.0),
    "collage": ("lightskyblue", "-", 6.0),
    "collage plus": ("tab:blue", "--", 2.5),
    "fp32 master": ("black", ":", 2.0),
}
STRATEGIES = tuple(LOOKS)


@torch.no_grad()
def validate(model: nn.Module, held_out: list[Batch]) -> float:
    """The mean loss over the held-out batches, which are the same at every call."""
    return statistics.fmean(float(loss_of(model, x, y)) for x, y in held_out)


@dataclass
class Run:
    """One strategy at work: what it trains, how it steps, and what was measured."""

    name: str
    model: nn.Module
    optimizer: torch.optim.AdamW
    step: Callable[[], object]
    weights: list[nn.Parameter]  # what the optimizer updates: the model's or the master copies
    losses: list[tuple[int, float]] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    lost: list[float] = field(default_factory=list)
    bytes_per_weight: float = 0.0


def start(name: str, model: nn.Module, lr: float) -> Run:
    """The run of one strategy on a model which already holds the starting weights."""
    weights = list(model.parameters())
    if name == "fp32 master":
        return start_master(name, model, lr)
    optimizer = torch.optim.AdamW(weights, lr=lr)
    if name == "bf16":
        return Run(name, model, optimizer, torch.compile(optimizer.step), weights)
    if name == "collage":
        collage_fx.compile_(optimizer)
    else:
        collage_fx.compile_(optimizer, level="plus", storage="mcf2")
    return Run(name, model, optimizer, optimizer.step, weights)


def start_master(name: str, model: nn.Module, lr: float) -> Run:
    """The usual mixed precision: fp32 weights and moments, a bf16 model which computes."""
    weights = list(model.parameters())
    masters = [nn.Parameter(weight.detach().float()) for weight in weights]
    optimizer = torch.optim.AdamW(masters, lr=lr)
    update = torch.compile(optimizer.step)

    def step() -> None:
        for master, weight in zip(masters, weights, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
        update()
        torch._foreach_copy_([weight.data for weight in weights], [m.data for m in masters])
        for master in masters:
            master.grad = None

    return Run(name, model, optimizer, step, masters)


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warmup, then a cosine down to a tenth of the peak."""
    warmup = max(1, round(WARMUP * steps))
    if step < warmup:
        return peak * (step + 1) / warmup
    cosine = 0.5 * (1.0 + math.cos(math.pi * (step - warmup) / (steps - warmup)))
    return peak * (0.1 + 0.9 * cosine)


def intended_updates(run: Run) -> list[Tensor]:
    """AdamW's next update of every weight in float64, from the gradients and states as stored.

    States and weights count with all their components. The stored gradient is taken as exact: its
    rounding is the backward pass's affair and the same in every strategy.
    """
    group = run.optimizer.param_groups[0]
    (beta1, beta2), lr = group["betas"], group["lr"]
    updates = []
    for master, weight in zip(run.weights, run.model.parameters(), strict=True):
        assert weight.grad is not None
        grad, state = weight.grad.double(), run.optimizer.state[master]
        count = float(state["step"]) + 1
        first = beta1 * collage_fx.value(state["exp_avg"]) + (1 - beta1) * grad
        second = beta2 * collage_fx.value(state["exp_avg_sq"]) + (1 - beta2) * grad.square()
        spread = (second / (1 - beta2**count)).sqrt() + group["eps"]
        decay = group["weight_decay"] * collage_fx.value(master)
        updates.append(-lr * (first / (1 - beta1**count) / spread + decay))
    return updates


def probed_step(run: Run) -> float:
    """Take one step; the share of the weights that should have changed and did not."""
    intended = intended_updates(run)
    before = [collage_fx.value(weight).clone() for weight in run.weights]
    run.step()
    after = [collage_fx.value(weight) for weight in run.weights]
    flat = (torch.cat([t.flatten() for t in tensors]) for tensors in (before, after, intended))
    old, new, update = flat
    meant = update != 0
    return float((meant & (old == new)).sum() / meant.sum().clamp(min=1))


def timed_step(run: Run, device: str) -> float:
    """Take one step; its wall time in milliseconds."""
    synchronize(device)
    begin = time.perf_counter()
    run.step()
    synchronize(device)
    return 1e3 * (time.perf_counter() - begin)


def synchronize(device: str) -> None:
    """Wait for the device, so that a clock read next has seen all work."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def bytes_per_weight(run: Run) -> float:
    """Bytes of all distinct storages of weights, gradients, states and residuals, per weight."""
    parameters = list(run.model.parameters())
    tensors: list[Tensor] = [*parameters, *run.weights]
    tensors += [p.grad for p in itertools.chain(parameters, run.weights) if p.grad is not None]
    for state in run.optimizer.state.values():
        tensors += [entry for entry in state.values() if isinstance(entry, Tensor)]
    tensors += [part for tensor in tensors for part in collage_fx.residuals(tensor)]
    storages = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in tensors)}
    return sum(storages.values()) / sum(p.numel() for p in parameters)


def spread_over(steps: int, count: int) -> set[int]:
    """About ``count`` steps spread evenly over training, the last one among them."""
    return {round((i + 1) * steps / count) - 1 for i in range(count)}


def train(run: Run, text: Tensor, held_out: list[Batch], args: argparse.Namespace) -> None:
    """Train to the end, recording losses, times and probes in ``run``."""
    probes = spread_over(args.steps, PROBES) - {0}  # the states appear in the first step
    evaluations = spread_over(args.steps, EVALUATIONS)
    begin = time.perf_counter()
    end = "" if sys.stdout.isatty() else "\n"  # one line which updates, or a log
    print(f"{run.name:13} compiling", end=end, flush=True)
    order = batches(text, args.seed, args.device)
    for i, (inputs, targets) in enumerate(itertools.islice(order, args.steps)):
        for group in run.optimizer.param_groups:
            group["lr"] = learning_rate(i, args.steps, args.lr)
        run.model.zero_grad()
        loss_of(run.model, inputs, targets).backward()
        if i in probes:
            run.lost.append(probed_step(run))
        else:
            run.step_ms.append(timed_step(run, args.device))
        if i in evaluations:
            run.losses.append((i + 1, validate(run.model, held_out)))
            taken = time.perf_counter() - begin
            line = f"{run.name:13} step {i + 1:5}/{args.steps}  val loss {run.losses[-1][1]:.4f}"
            print(f"\r{line}  {taken:4.0f} s", end=end, flush=True)
    run.bytes_per_weight = bytes_per_weight(run)
    print(end="" if end else "\n")


def table(runs: list[Run]) -> str:
    """One line per strategy; the module's docstring explains the columns."""
    lines = [f"{'strategy':13} {'val loss':>9} {'B/param':>8} {'lost':>7} {'step ms':>8}"]
    for run in runs:
        measured = f"{run.losses[-1][1]:9.4f} {run.bytes_per_weight:8.2f}"
        lost, step = statistics.fmean(run.lost), statistics.median(run.step_ms)
        lines.append(f"{run.name:13} {measured} {lost:7.1%} {step:8.3f}")
    return "\n".join(lines)


def plot(runs: list[Run], title: str, path: Path) -> None:
    """Write the validation losses over the steps to a PNG."""
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for run in runs:
        color, style, width = LOOKS[run.name]
        steps, losses = zip(*run.losses, strict=True)
        label = f"{run.name} ({losses[-1]:.3f})"
        axes.plot(steps, losses, style, color=color, linewidth=width, label=label)
    axes.set_xlabel("step")
    axes.set_ylabel("validation loss (nats per byte)")
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(title="strategy (final loss)")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="bf16 training under four optimizer strategies")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--lr", type=float, default=1e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the batches")
    parser.add_argument("--out", type=Path, default=Path("loss_curves.png"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    # tensors this small gain little from a second thread, which a busy machine makes a great loss
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=STRATEGIES)
    return parser.parse_args()


def main() -> None:
    """Train under every strategy, then print the table and draw the curves."""
    args = arguments()
    # Dynamo notes once per graph that it skips the optimizer's profiler label; nothing to act on.
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    torch.set_num_threads(args.threads)
    text, validation = read_text()
    held_out = list(itertools.islice(batches(validation, args.seed + 1, args.device), 24))
    where = f"{args.device}, {torch.get_num_threads()} CPU thread(s), torch {torch.__version__}"
    setting = (
        f"{LAYERS} transformer layers of width {WIDTH} in bf16 on the standard library's source\n"
        f"AdamW with PyTorch's defaults, lr {args.lr:g} (warmup, cosine), {args.steps} steps"
    )
    print(f"{setting}\n{len(text):,} bytes to train on, {len(validation):,} held out\n{where}")
    runs = []
    for name in args.strategies:
        torch.manual_seed(args.seed)  # every strategy starts from the same weights
        run = start(name, ByteModel().to(args.device, torch.bfloat16), args.lr)
        train(run, text, held_out, args)
        runs.append(run)
        torch.compiler.reset()  # the next strategy's graphs are not to meet this one's guards
    print(f"\n{table(runs)}\n")
    print("how far bf16 falls behind depends on the lr: this file's docstring has the numbers")
    plot(runs, setting, args.out)
    print(f"loss curves: {args.out}")


if __name__ == "__main__":
    main()
