"""Precision of each storage: one recorded gradient stream, AdamW and SGD, four learning rates.

The stream of benchmarks/replay.py drives the optimizer in float64, in fp32 (parameters and states,
eagerly and by stock torch.compile, and in double_single), in plain bf16 and with each storage at
level all (the default at its own); AdamW besides with its moments in fp8, of one to three words.
Printed and written to benchmarks/results/storages.json and storages.md:

    E_theta = |theta - theta64| / |theta64 - theta0|,   E_v = |v - v64| / |v64|  (AdamW)
    EDQ = <d, d_hat> / |d|^2, the mean over all steps, with d the step of float64 and d_hat the
          change of the whole value (hi and residuals) that was stored; 1 if nothing is lost
    bytes = those of a parameter with its states and residuals, without the gradient; to fp32 come
            two more for the weights that a bf16 model computes with
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch
from replay import Model, conditions, record
from torch import Tensor
from torch.optim import Optimizer

import collage_fx

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/support"))
from update_metrics import edq

RATES = (1e-3, 1e-4, 1e-5, 1e-6)
RESULTS = Path(__file__).parent / "results/storages.json"


class Adam8(Optimizer):
    """AdamW with the first moment and the root of the second in fp8, times a constant.

    The gradients of this stream are at most about 0.7; fp8 has no room for their squares.
    """

    def __init__(self, params: list[Tensor], lr: float, moments: torch.dtype) -> None:
        defaults = {"lr": lr, "betas": (0.9, 0.999), "weight_decay": 0.01, "moments": moments}
        super().__init__(params, {**defaults, "scale": 2.0**9})

    def _init_group(self, group: dict[str, Any], params: list[Tensor]) -> None:
        for p in group["params"]:
            if not self.state[p]:
                self.state[p]["step"] = torch.zeros(())
                for name in ("exp_avg", "root"):
                    self.state[p][name] = torch.zeros_like(p, dtype=group["moments"])
            params.append(p)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Take a step."""
        (group,) = self.param_groups
        scale, (beta1, beta2) = group["scale"], group["betas"]
        params: list[Tensor] = []
        self._init_group(group, params)
        for p in params:
            state, grad = self.state[p], p.grad.float()
            t = state["step"].add_(1)
            m = beta1 * (state["exp_avg"].float() / scale) + (1 - beta1) * grad
            v = beta2 * (state["root"].float() / scale).square() + (1 - beta2) * grad * grad
            state["exp_avg"].copy_(m * scale)
            state["root"].copy_(v.sqrt() * scale)
            update = (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + 1e-8)
            p.mul_(1 - group["lr"] * group["weight_decay"])
            p.sub_((group["lr"] * update).to(p.dtype))


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "AdamW": lambda params, lr: torch.optim.AdamW(params, lr=lr, foreach=True),
    "SGD": lambda params, lr: torch.optim.SGD(params, lr=100 * lr, momentum=0.9, foreach=True),
}
STOCK: dict[str, Any] = {}
"""Options that stand for torch.compile without collage_fx."""
EIGHT = {"fp8 e4m3fn": torch.float8_e4m3fn, "fp8 e5m2": torch.float8_e5m2}
"""Variants of AdamW by what their names begin with: with moments in fp8."""
_WORDS = {"plain": "", "two": "mcf2", "three": "mcf3"}
VARIANTS: dict[str, tuple[torch.dtype, dict[str, Any] | None]] = {
    "fp32": (torch.float32, None),
    "fp32, compiled": (torch.float32, STOCK),
    "plain bf16": (torch.bfloat16, None),
    "sr": (torch.bfloat16, {"level": "all", "storage": "sr"}),
    "sr, ulp4": (torch.bfloat16, {"level": "all", "storage": {"param": "ulp4", "*": "sr"}}),
    "sr, ulp8, by chance": (
        torch.bfloat16,
        {
            "level": "all",
            "storage": {"param": "ulp8", "*": "sr"},
            "stochastic_rounding": True,
        },
    ),
    "sr, remainder16": (
        torch.bfloat16,
        {"level": "all", "storage": {"param": "remainder16", "*": "sr"}},
    ),
    "ulp4": (torch.bfloat16, {"level": "all", "storage": "ulp4"}),
    "ulp4, remainder16": (
        torch.bfloat16,
        {"level": "all", "storage": {"param": "remainder16", "*": "ulp4"}},
    ),
    "mcf2, eft": (torch.bfloat16, {"level": "all", "storage": "mcf2"}),
    "mcf2, wide": (torch.bfloat16, {"level": "all", "storage": "mcf2", "arithmetic": "wide"}),
    "mcf2, by chance": (
        torch.bfloat16,
        {"level": "all", "storage": "mcf2", "stochastic_rounding": True},
    ),
    "ulp8": (torch.bfloat16, {"level": "all", "storage": "ulp8"}),
    "ulp8, by chance": (
        torch.bfloat16,
        {"level": "all", "storage": "ulp8", "stochastic_rounding": True},
    ),
    "remainder16": (torch.bfloat16, {"level": "all", "storage": "remainder16"}),
    "default": (torch.bfloat16, {"level": "auto"}),
    "default, ulp4": (
        torch.bfloat16,
        {"level": "all", "storage": {"exp_avg": "ulp4", "momentum_buffer": "ulp4"}},
    ),
    "mcf3, eft": (torch.bfloat16, {"level": "all", "storage": "mcf3"}),
    "mcf3, wide": (
        torch.bfloat16,
        {"level": "all", "storage": "mcf3", "arithmetic": "wide"},
    ),
    "fp32, double_single": (torch.float32, {"level": "all", "storage": "double_single"}),
    **{
        f"{name}, {words}": (
            torch.bfloat16,
            {"storage": {"param": "remainder16", "*": storage or "mcf2"}}
            | {"level": "all" if storage else "light"},
        )
        for name in EIGHT
        for words, storage in _WORDS.items()
    },
}
"""Variants; those with moments in fp8 have parameters in remainder16: only the moments differ."""
Path_ = list[Tensor]
"""The parameters before the first step and after each, flat, in float64."""


def run(
    start: list[Tensor],
    stream: list[list[Tensor]],
    make: Callable[[list[Tensor]], Optimizer],
    dtype: torch.dtype,
    options: dict[str, Any] | None,
) -> tuple[Path_, Tensor, float]:
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
    roots = [s for p in params if (s := optimizer.state[p].get("root")) is not None]
    kept = [t for p in params for t in (p, *optimizer.state[p].values()) if _is_full(t)]
    size = sum(t.nbytes + sum(r.nbytes for r in collage_fx.residuals(t)) for t in kept)
    second = whole(v) if v else torch.zeros(1)
    if roots:
        second = (whole(roots) / optimizer.param_groups[0]["scale"]).square()
    return way, second, round(size / sum(p.numel() for p in params), 1)


def _is_full(t: Any) -> bool:
    return isinstance(t, Tensor) and t.dim() > 0


def whole(tensors: list[Tensor]) -> Tensor:
    """Return the values with residuals, as one vector."""
    return torch.cat([collage_fx.value(t).detach().flatten() for t in tensors])


def row(exact: tuple[Path_, Tensor, float], found: tuple[Path_, Tensor, float]) -> dict[str, Any]:
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
            if not mine:
                continue
            cells = [f"{r['E_theta']:.1e}, {r['EDQ']:.3f}" for r in mine]
            lines.append("| " + " | ".join([variant, f"{mine[0]['bytes']:g}", *cells]) + " |")
        lines.append("")
    return "\n".join(lines)


def measured(only: str, steps: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of the variants that a pattern fits, as they are measured."""
    start, stream = record(steps)
    for name, make in OPTIMIZERS.items():
        for lr in RATES:
            at_rate = partial(make, lr=lr)
            exact = run(start, stream, at_rate, torch.float64, None)
            for variant, (dtype, options) in VARIANTS.items():
                moments = EIGHT.get(variant.partition(",")[0])
                if not fnmatchcase(variant, only) or (moments is not None and name != "AdamW"):
                    continue
                build = at_rate if moments is None else partial(Adam8, lr=lr, moments=moments)
                torch.compiler.reset()
                numbers = row(exact, run(start, stream, build, dtype, options))
                shown = ", ".join(f"{k} {v:.3g}" for k, v in numbers.items())
                print(f"{name} lr {lr:.0e} {variant:15} {shown}", flush=True)
                date = conditions(steps, start)["date"]
                yield {"optimizer": name, "lr": lr, "variant": variant, **numbers, "date": date}


def write(out: Path, rows: list[dict[str, Any]], steps: int) -> None:
    """Put rows into the results, in the place of those of the same combination."""
    known = json.loads(out.read_text()) if out.exists() else {"conditions": {}, "rows": []}
    first = known["conditions"].get("date", "")
    found = {_key(r): {"date": first, **r} for r in known["rows"]}
    found |= {_key(r): r for r in rows}
    size = sum(p.numel() for p in Model().parameters())
    about = {**conditions(steps, []), "parameters": size, "rows": "each has the date of its own"}
    out.parent.mkdir(exist_ok=True)
    listed = [found[key] for key in sorted(found)]
    out.write_text(json.dumps({"conditions": about, "rows": listed}, indent=1) + "\n")
    lines = "\n".join(f"- {k}: {v}" for k, v in about.items())
    out.with_suffix(".md").write_text(f"{table(listed)}\n{lines}\n")


def _key(row: dict[str, Any]) -> tuple[int, float, int]:
    return (
        list(OPTIMIZERS).index(row["optimizer"]),
        -row["lr"],
        list(VARIANTS).index(row["variant"]),
    )


def main() -> None:
    """Run every combination, print it and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--only", default="*", help="pattern of variants; other rows are kept")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    rows = []
    for one in measured(args.only, args.steps):
        rows.append(one)
        write(args.out, rows, args.steps)
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
