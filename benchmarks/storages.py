"""What each storage keeps: one recorded gradient stream, AdamW and SGD, four learning rates.

The stream of benchmarks/replay.py drives the optimizer in float64, in fp32 (parameters and states,
eagerly and by stock torch.compile), in plain bf16 and with each storage at level all. Printed and
written to benchmarks/results/storages.json and storages.md:

    E_theta = |theta - theta64| / |theta64 - theta0|,   E_v = |v - v64| / |v64|  (AdamW)
    EDQ = <d, d_hat> / |d|^2, the mean over all steps, with d the step of float64 and d_hat the
          change of the whole value (hi and residuals) that was stored; 1 if nothing is lost
    bytes = those of a parameter with its states and residuals, without the gradient; to fp32 come
            two more for the weights that a bf16 model computes with
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from replay import conditions, record
from torch import Tensor
from torch.optim import Optimizer

import collage_fx
from collage_fx.runtime.metrics import edq

RATES = (1e-3, 1e-4, 1e-5, 1e-6)
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "AdamW": lambda params, lr: torch.optim.AdamW(params, lr=lr, foreach=True),
    "SGD": lambda params, lr: torch.optim.SGD(params, lr=100 * lr, momentum=0.9, foreach=True),
}
STOCK: dict[str, Any] = {}
"""Options that stand for torch.compile without collage_fx."""
VARIANTS: dict[str, tuple[torch.dtype, dict[str, Any] | None]] = {
    "fp32": (torch.float32, None),
    "fp32, compiled": (torch.float32, STOCK),
    "plain bf16": (torch.bfloat16, None),
    "mcf2, eft": (torch.bfloat16, {"level": "all"}),
    "mcf2, wide": (torch.bfloat16, {"level": "all", "arithmetic": "wide"}),
    "mcf2, by chance": (torch.bfloat16, {"level": "all", "stochastic_rounding": True}),
    "ulp8": (torch.bfloat16, {"level": "all", "storage": "ulp8"}),
    "ulp8, by chance": (
        torch.bfloat16,
        {"level": "all", "storage": "ulp8", "stochastic_rounding": True},
    ),
    "remainder16": (torch.bfloat16, {"level": "all", "storage": "remainder16"}),
    "mcf3, eft": (torch.bfloat16, {"level": "all", "storage": "mcf3"}),
    "mcf3, wide": (
        torch.bfloat16,
        {"level": "all", "storage": "mcf3", "arithmetic": "wide"},
    ),
}
Path_ = list[Tensor]
"""The parameters before the first step and after each, flat, in float64."""


def run(
    start: list[Tensor],
    stream: list[list[Tensor]],
    make: Callable[[list[Tensor]], Optimizer],
    dtype: torch.dtype,
    options: dict[str, Any] | None,
) -> tuple[Path_, Tensor, int]:
    """Return the way of the parameters, the second moments, and bytes per parameter."""
    params = [s.clone().to(dtype).requires_grad_() for s in start]
    optimizer = make(params)
    step: Callable[[], object] = optimizer.step
    if options is not None:
        step = collage_fx.compile(optimizer, **options) if options else torch.compile(step)
    way = [whole(params)]
    for gradients in stream:
        for p, g in zip(params, gradients, strict=True):
            p.grad = g.to(dtype)
        step()
        way.append(whole(params))
    v = [s for p in params if (s := optimizer.state[p].get("exp_avg_sq")) is not None]
    kept = [t for p in params for t in (p, *optimizer.state[p].values()) if _is_full(t)]
    size = sum(t.nbytes + sum(r.nbytes for r in collage_fx.residuals(t)) for t in kept)
    return way, whole(v) if v else torch.zeros(1), size // sum(p.numel() for p in params)


def _is_full(t: Any) -> bool:
    return isinstance(t, Tensor) and t.dim() > 0


def whole(tensors: list[Tensor]) -> Tensor:
    """Return the values with residuals, as one vector."""
    return torch.cat([collage_fx.value(t).detach().flatten() for t in tensors])


def row(exact: tuple[Path_, Tensor, int], found: tuple[Path_, Tensor, int]) -> dict[str, Any]:
    """Return the numbers of one variant."""
    (path64, v64, _), (path, v, size) = exact, found
    steps = range(len(path) - 1)
    qualities = [
        edq(d, path[k + 1] - path[k]) / float(d.norm())
        for k in steps
        if (d := path64[k + 1] - path64[k]).norm() > 0
    ]
    return {
        "bytes": size,
        "E_theta": float((path[-1] - path64[-1]).norm() / (path64[-1] - path64[0]).norm()),
        **({"E_v": float((v - v64).norm() / v64.norm())} if v64.any() else {}),
        "EDQ": sum(qualities) / len(qualities),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Return E_theta and EDQ of every variant (rows) at every learning rate (columns)."""
    lines = []
    for name in OPTIMIZERS:
        head = [f"{name}: E_theta, EDQ", "bytes", *(f"lr {lr:.0e}" for lr in RATES)]
        lines += ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
        for variant in VARIANTS:
            mine = [r for r in rows if r["optimizer"] == name and r["variant"] == variant]
            cells = [f"{r['E_theta']:.1e}, {r['EDQ']:.3f}" for r in mine]
            lines.append("| " + " | ".join([variant, str(mine[0]["bytes"]), *cells]) + " |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    """Run every combination, print it and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/storages.json")
    args = parser.parse_args()
    start, stream = record(args.steps)
    rows = []
    for name, make in OPTIMIZERS.items():
        for lr in RATES:
            at_rate = partial(make, lr=lr)
            exact = run(start, stream, at_rate, torch.float64, None)
            for variant, (dtype, options) in VARIANTS.items():
                torch.compiler.reset()
                numbers = row(exact, run(start, stream, at_rate, dtype, options))
                rows.append({"optimizer": name, "lr": lr, "variant": variant, **numbers})
                shown = ", ".join(f"{k} {v:.3g}" for k, v in numbers.items())
                print(f"{name} lr {lr:.0e} {variant:15} {shown}", flush=True)
    measured = conditions(args.steps, start)
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(json.dumps({"conditions": measured, "rows": rows}, indent=1) + "\n")
    listed = "\n".join(f"- {k}: {v}" for k, v in measured.items())
    args.out.with_suffix(".md").write_text(f"{table(rows)}\n{listed}\n")
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
