"""Error of a plain 16-bit average, against its distance from pure accumulation.

x' = a*x + (1-a)*g^2 with normal g, for 8 / (1-a) steps, in bf16 and fp16 as eager PyTorch computes
it, against float64, over 4096 elements. Printed as a curve, with the thresholds of
`passes/analysis/criticality.py` (8 u for level auto, 16 u for level plus) where they lie on it, and
written to benchmarks/results/criticality.json: the mean of x / x64 - 1 (bias) and of its magnitude
(error), beside 1-a in units of the roundoff u of the dtype. Bias alone may be small by chance,
where some elements stall above their value and others below it.
"""

import json
import math
import platform
import sys
import time
from pathlib import Path

import torch

from collage_fx.passes.analysis.criticality import AUTO_THRESHOLD, PLUS_THRESHOLD

GAPS = (0.2, 0.1, 0.07, 0.05, 0.04, 0.03, 0.02, 0.01, 0.005, 0.002, 0.001)
THRESHOLDS = {
    AUTO_THRESHOLD: "from here on at level auto",
    PLUS_THRESHOLD: "from here on at level plus",
}


def measured(gap: float, dtype: torch.dtype) -> tuple[float, float]:
    """Return the mean of x / x64 - 1 at the end, and of its magnitude."""
    generator = torch.Generator().manual_seed(0)
    plain, exact = torch.zeros(4096, dtype=dtype), torch.zeros(4096, dtype=torch.float64)
    for _ in range(round(8 / gap)):
        g = torch.randn(4096, generator=generator).to(dtype)
        plain.mul_(1 - gap).addcmul_(g, g, value=gap)
        exact.mul_(1 - gap).addcmul_(g.double(), g.double(), value=gap)
    off = plain.double() / exact - 1
    return float(off.mean()), float(off.abs().mean())


def bar(error: float) -> str:
    """Return a bar on a logarithmic scale, 0.1% being empty and 100% full."""
    return "#" * max(0, min(30, round(10 * math.log10(max(error, 1e-9) / 1e-3))))


def main() -> None:
    """Print and write the table."""
    rows = []
    for dtype in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        print(f"{name:>9} {'1-a':>6} {'units of u':>10} {'bias':>9} {'error':>8}")
        before = math.inf
        for gap in GAPS:
            units = gap / (torch.finfo(dtype).eps / 2)
            for threshold, meaning in sorted(THRESHOLDS.items(), reverse=True):
                if units <= threshold < before:
                    print(f"{'':>9} {'-' * 6} {threshold:10.2f} {meaning}")
            before = units
            bias, error = measured(gap, dtype)
            rows.append(
                {"dtype": name, "gap": gap, "units": round(units, 2), "bias": bias, "error": error}
            )
            print(
                f"{'':>9} {gap:6} {units:10.2f} {bias:9.2%} {error:8.2%} {bar(error)}", flush=True
            )
    conditions = {
        "command": " ".join(["python", *sys.argv]),
        "date": time.strftime("%Y-%m-%d"),
        "device": f"cpu, {platform.machine()}",
        "torch": torch.__version__,
    }
    out = Path(__file__).parent / "results/criticality.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps({"conditions": conditions, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
