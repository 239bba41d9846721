"""Train a small byte-level transformer in bf16 under four strategies and compare them.

The text is the Python standard library's own source, read from this machine; whole files are held out
for validation. Model weights, activations and gradients are bf16 everywhere. The strategies differ in
what the optimizer keeps:

    bf16          torch.optim.AdamW on the bf16 weights, both moments bf16
    collage auto  the same optimizer, its step compiled by collage_fx
    collage wide  the same, with arithmetic="wide"
    fp32 master   AdamW on an fp32 copy of the weights with fp32 moments, copied down after each step

All start from the same weights and see the same batches in the same order. The setting is the ordinary
one: PyTorch's default initialisation, AdamW's default betas (0.9, 0.999), eps and weight decay, linear
warmup and a cosine to a tenth of the peak. Nothing in it was made hard for bf16; a bf16 weight ignores updates below
about 2**-9 of its size, which a decaying learning rate meets sooner or later, and a bf16 second moment
cannot decay by a factor of 0.999 at all.

What the columns of the final table mean:

    val loss   nats per byte on the held-out files after the last step
    B/param    bytes of weights, gradients and optimizer states, residuals and master copies included,
               over the number of weights; counted from distinct storages, not from a formula. The fp32
               gradients which the master strategy casts for each step live only during it: not counted.
    lost       share of the weights whose stored value, all components, did not change although the
               update was non-zero; averaged over a few probe steps spread over training. The intended
               update is computed in float64 from that step's gradients and the stored states.
    step ms    median time of one optimizer step. All four are compiled, the bf16 and the master
               optimizer by torch.compile's default backend; master includes its casts and copies.

Run: python examples/train_bytes.py [--steps N] [--lr X] [--seed N] [--out PNG] [--device cpu|cuda]
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib
import torch
import torch.nn.functional as F
from collage_fx.runtime.metrics import lost_update_share
from torch import Tensor, nn

import collage_fx

matplotlib.use("Agg")
import matplotlib.pyplot as plt

CONTEXT, BATCH, WIDTH, HEADS, LAYERS = 64, 16, 128, 4, 3
PACKAGES = ("asyncio", "collections", "concurrent", "email", "http", "importlib", "json", "logging")
HELD_OUT_EVERY = 10  # one file in ten is for validation
EVALUATIONS, PROBES = 16, 8
WARMUP = 0.05  # share of the steps
STRATEGIES = ("bf16", "collage auto", "collage wide", "fp32 master")


class Block(nn.Module):
    """Attention and a feed-forward part, each behind a norm and added to the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH, bias=False), nn.LayerNorm(WIDTH, bias=False)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.project = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        split = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        # written out: at this length on a CPU several times as fast as the fused backward pass
        future = torch.full((length, length), -math.inf, dtype=x.dtype, device=x.device).triu(1)
        scores = (q * (WIDTH // HEADS) ** -0.5) @ k.transpose(-1, -2) + future
        mixed = scores.softmax(-1) @ v
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        hidden: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + hidden


class ByteModel(nn.Module):
    """Next-byte prediction; every layer with PyTorch's default initialisation."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.bytes(tokens) + self.places.weight[: tokens.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def read_text() -> tuple[Tensor, Tensor]:
    """Training and validation bytes (uint8, 1-d) from disjoint files of the standard library."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(root.glob("*.py"))
    files += [path for package in PACKAGES for path in sorted((root / package).rglob("*.py"))]
    held_out = files[::HELD_OUT_EVERY]
    train = [path for i, path in enumerate(files) if i % HELD_OUT_EVERY]

    def joined(paths: list[Path]) -> Tensor:
        return torch.frombuffer(
            bytearray(b"".join(p.read_bytes() for p in paths)), dtype=torch.uint8
        )

    return joined(train), joined(held_out)


def batches(text: Tensor, seed: int, device: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (inputs, targets), int64 (BATCH, CONTEXT); one order per seed on every device."""
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(CONTEXT + 1)
    while True:
        starts = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=generator)
        rows = text[starts + offsets].long().to(device)
        yield rows[:, :-1], rows[:, 1:]


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten())


@torch.no_grad()
def validate(model: nn.Module, held_out: list[tuple[Tensor, Tensor]]) -> float:
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
    step: Callable[[], object]
    if name == "bf16":
        step = torch.compile(optimizer.step)
    elif name == "collage auto":
        step = collage_fx.compile(optimizer)
    else:
        step = collage_fx.compile(optimizer, arithmetic="wide")
    return Run(name, model, optimizer, step, weights)


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

    The states count with all their components. The stored gradient is taken as the exact one, for its
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
    flat = [torch.cat([t.flatten() for t in tensors]) for tensors in (before, after, intended)]
    return lost_update_share(*flat)


def timed_step(run: Run, device: str) -> float:
    """Take one step; its wall time in milliseconds."""
    synchronize(device)
    begin = time.perf_counter()
    run.step()
    synchronize(device)
    return 1e3 * (time.perf_counter() - begin)


def synchronize(device: str) -> None:
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


def train(
    run: Run, text: Tensor, held_out: list[tuple[Tensor, Tensor]], args: argparse.Namespace
) -> None:
    """Train to the end, recording losses, times and probes in ``run``."""
    probes = spread_over(args.steps, PROBES) - {0}  # the states appear in the first step
    evaluations = spread_over(args.steps, EVALUATIONS)
    begin = time.perf_counter()
    for i, (inputs, targets) in enumerate(batches(text, args.seed, args.device)):
        if i == args.steps:
            break
        for group in run.optimizer.param_groups:
            group["lr"] = learning_rate(i, args.steps, args.lr)
        run.optimizer.zero_grad(set_to_none=True)
        run.model.zero_grad(set_to_none=True)
        loss_of(run.model, inputs, targets).backward()
        if i in probes:
            run.lost.append(probed_step(run))
        else:
            run.step_ms.append(timed_step(run, args.device))
        if i in evaluations:
            run.losses.append((i + 1, validate(run.model, held_out)))
            taken = time.perf_counter() - begin
            progress = f"{run.name:13} step {i + 1:5}/{args.steps}"
            print(
                f"\r{progress}  val loss {run.losses[-1][1]:.4f}  {taken:4.0f} s",
                end="",
                flush=True,
            )
    run.bytes_per_weight = bytes_per_weight(run)
    print()


def table(runs: list[Run]) -> str:
    lines = [f"{'strategy':13} {'val loss':>9} {'B/param':>8} {'lost':>7} {'step ms':>8}"]
    for run in runs:
        lost, step = statistics.fmean(run.lost), statistics.median(run.step_ms)
        lines.append(
            f"{run.name:13} {run.losses[-1][1]:9.4f} {run.bytes_per_weight:8.2f} {lost:7.1%} {step:8.3f}"
        )
    return "\n".join(lines)


def plot(runs: list[Run], setting: str, path: Path) -> None:
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    styles = itertools.cycle(("-", "--", ":", "-."))  # curves which coincide stay visible
    for run, style in zip(runs, styles, strict=False):
        steps, losses = zip(*run.losses, strict=True)
        axes.plot(steps, losses, style, label=f"{run.name} ({losses[-1]:.3f})", linewidth=2)
    axes.set_xlabel("step")
    axes.set_ylabel("validation loss (nats per byte)")
    axes.set_title(setting, fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(title="strategy (final loss)")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="bf16 training under four optimizer strategies")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--lr", type=float, default=1e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the batches")
    parser.add_argument("--out", type=Path, default=Path("loss_curves.png"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=STRATEGIES)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    text, validation = read_text()
    held_out = list(itertools.islice(batches(validation, args.seed + 1, args.device), 24))
    runs = []
    for name in args.strategies:
        torch.manual_seed(args.seed)  # every strategy starts from the same weights
        model = ByteModel().to(args.device, torch.bfloat16)
        if not runs:
            count = sum(p.numel() for p in model.parameters())
            setting = (
                f"bytes of the Python standard library, {count / 1e6:.2f} M weights in bf16\n"
                f"AdamW, default init and betas, lr {args.lr:g} (warmup, cosine), {args.steps} steps"
            )
            print(f"{setting}\n{len(text):,} bytes to train on, {len(validation):,} held out")
        runs.append(start(name, model, args.lr))
        train(runs[-1], text, held_out, args)
        torch.compiler.reset()  # the next strategy's graphs are not to meet this one's guards
    print("\n" + table(runs))
    plot(runs, setting, args.out)
    print(f"loss curves: {args.out}")


if __name__ == "__main__":
    main()
