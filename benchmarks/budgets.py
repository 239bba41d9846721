"""Budgets: the error of what is chosen for so many bytes, beside the error that is predicted.

The stream of benchmarks/replay.py drives AdamW, SGD, Lion and Adafactor with `budget=`, at four
learning rates. Printed and written to benchmarks/results/budgets.json and budgets.md:

    E_theta = |theta - theta64| / |theta64 - theta0| after the last step
    predicted = what `explain` says of the steps from the first that was looked at to the last one,
                to which the error that fp32 makes comes (their squares add up)
    bytes = those of a parameter with its states and residuals, without the gradient
"""

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from replay import Model, conditions, record
from steps import Lion
from storages import RATES, whole
from torch import Tensor
from torch.optim import Optimizer

import collage_fx

RESULTS = Path(__file__).parent / "results/budgets.json"


def lion(params: list[Tensor], lr: float) -> Optimizer:
    """Return Lion with the weight decay of the AdamW here."""
    optimizer = Lion(params, lr)
    optimizer.param_groups[0]["weight_decay"] = 0.01
    return optimizer


OPTIMIZERS: dict[str, tuple[Callable[..., Optimizer], tuple[float, ...]]] = {
    "AdamW": (
        lambda params, lr: torch.optim.AdamW(params, lr=lr, foreach=True),
        (6, 6.5, 7, 7.5, 8, 9, 10, 12),
    ),
    "SGD": (
        lambda params, lr: torch.optim.SGD(params, lr=100 * lr, momentum=0.9, foreach=True),
        (4.5, 5, 6, 6.5, 8),
    ),
    "Lion": (lion, (4.5, 5, 6, 6.5, 8)),
    "Adafactor": (
        lambda params, lr: torch.optim.Adafactor(params, lr=lr, eps=(1e-7, 1e-3)),
        (2.6, 3.1, 4.2),
    ),
}
"""Optimizer -> how it is made, and the budgets it is given."""


def run(
    params: list[Tensor], stream: list[list[Tensor]], optimizer: Optimizer, budget: float | None
) -> dict[str, Any]:
    """Take the steps; return what `explain` says of the budget, if there is one."""
    if budget is not None:
        collage_fx.compile_(optimizer, budget=budget)
    for gradients in stream:
        for p, g in zip(params, gradients, strict=True):
            p.grad = g.to(p.dtype)
        optimizer.step()
    if budget is None:
        return {}
    found: dict[str, Any] = collage_fx.explain(optimizer).to_dict()["budget"]
    return found


def measured(steps: int, only: str) -> Iterator[dict[str, Any]]:
    """Yield a row for each optimizer, rate and budget."""
    start, stream = record(steps)
    for name, (make, budgets) in OPTIMIZERS.items():
        for lr in RATES if only in ("", name) else ():
            exact = [s.clone().double().requires_grad_() for s in start]
            run(exact, stream, make(exact, lr), None)
            way = whole(exact) - whole(start)
            single = [s.clone().float().requires_grad_() for s in start]
            run(single, stream, make(single, lr), None)
            fp32 = float((whole(single) - whole(exact)).norm() / way.norm())
            for budget in budgets:
                torch.compiler.reset()
                params = [s.clone().requires_grad_() for s in start]
                about = run(params, stream, make(params, lr), budget)
                error = float((whole(params) - whole(exact)).norm() / way.norm())
                row = {"optimizer": name, "lr": lr, "budget": budget, "E_theta": error}
                row |= {
                    "fp32": fp32,
                    "predicted": about["error"],
                    "bytes": about["bytes_per_element"],
                }
                print(
                    ", ".join(f"{k} {v:.3g}" if k != "optimizer" else v for k, v in row.items()),
                    flush=True,
                )
                yield row


def table(rows: list[dict[str, Any]]) -> str:
    """Return measured and predicted errors, a row for each budget."""
    lines = []
    for name in OPTIMIZERS:
        lines += [f"| {name} | " + " | ".join(f"{lr:.0e}" for lr in RATES) + " |"]
        lines += ["|---" * (1 + len(RATES)) + "|"]
        for budget in dict.fromkeys(r["budget"] for r in rows if r["optimizer"] == name):
            mine = [r for r in rows if (r["optimizer"], r["budget"]) == (name, budget)]
            cells = [f"{r['E_theta']:.1e} ({r['predicted']:.1e})" for r in mine]
            lines.append(f"| {budget:g} bytes | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    """Run every combination, print it and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--only", default="", help="one of the optimizers; other rows are kept")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    known = json.loads(args.out.read_text())["rows"] if args.out.exists() else []
    rows = [r for r in known if args.only and r["optimizer"] != args.only]
    rows += measured(args.steps, args.only)
    rows.sort(key=lambda r: (list(OPTIMIZERS).index(r["optimizer"]), -r["lr"], r["budget"]))
    about = conditions(args.steps, list(Model().parameters()))
    args.out.write_text(json.dumps({"conditions": about, "rows": rows}, indent=1) + "\n")
    notes = "\n".join(f"- {k}: {v}" for k, v in about.items())
    head = "E_theta after the last step, in brackets what is predicted of it."
    args.out.with_suffix(".md").write_text(f"{head}\n\n{table(rows)}\n{notes}\n")


if __name__ == "__main__":
    main()
