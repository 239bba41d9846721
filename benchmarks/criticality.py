"""How wrong a plain 16-bit average becomes, against its distance from pure accumulation.

x' = a*x + (1-a)*g^2 with normal g, for 8 / (1-a) steps, in bf16 and fp16 as eager PyTorch computes
it, against float64. Printed and written to benchmarks/results/criticality.json: the mean relative
bias over 4096 elements, beside 1-a in units of the roundoff u of the dtype. The thresholds of
`passes/plan.py` (8 u for level auto, 16 u for level plus) are read off this table.
"""

import json
import platform
import sys
import time
from pathlib import Path

import torch

GAPS = (0.2, 0.1, 0.05, 0.03, 0.02, 0.01, 0.005, 0.002, 0.001)


def bias(gap: float, dtype: torch.dtype) -> float:
    """Return the mean of x / x64 - 1 at the end."""
    generator = torch.Generator().manual_seed(0)
    plain, exact = torch.zeros(4096, dtype=dtype), torch.zeros(4096, dtype=torch.float64)
    for _ in range(round(8 / gap)):
        g = torch.randn(4096, generator=generator).to(dtype)
        plain.mul_(1 - gap).addcmul_(g, g, value=gap)
        exact.mul_(1 - gap).addcmul_(g.double(), g.double(), value=gap)
    return float((plain.double() / exact - 1).mean())


def main() -> None:
    """Print and write the table."""
    rows = []
    print(f"{'dtype':>9} {'1-a':>6} {'units of u':>10} {'bias':>8}")
    for dtype in (torch.bfloat16, torch.float16):
        for gap in GAPS:
            units = gap / (torch.finfo(dtype).eps / 2)
            found = bias(gap, dtype)
            name = str(dtype).removeprefix("torch.")
            rows.append({"dtype": name, "gap": gap, "units": round(units, 2), "bias": found})
            print(f"{name:>9} {gap:6} {units:10.2f} {found:8.2%}", flush=True)
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
