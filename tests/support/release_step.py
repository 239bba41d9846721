"""Take a compensated step with the collage_fx that is installed, for `make release`.

python -I tests/support/release_step.py
"""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import torch

import collage_fx

LR = 1e-3
"""Rate too small for bf16, whose numbers below 1 are 0.0039 apart."""


def stepped(compiled: bool) -> torch.Tensor:
    """Return a parameter after one step from 1 by SGD, with its residual."""
    parameter = torch.ones(8, dtype=torch.bfloat16, requires_grad=True)
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.SGD([parameter], lr=LR)
    step = torch.compile(optimizer.step, backend="collage") if compiled else optimizer.step
    step()
    return collage_fx.value(parameter)


place = Path(collage_fx.__file__)
assert place.is_relative_to(sys.prefix), f"{place} is not what was installed"
assert version("collage_fx") == collage_fx.__version__
command = [sys.executable, "-I", "-m", "collage_fx", "--version"]
said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
assert said == f"collage_fx {collage_fx.__version__}\n", said
assert bool((stepped(False) == 1).all()), "the control: plain bf16 loses the step"
error = (stepped(True) - (1 - LR)).abs().max().item()
assert error < 1e-6, f"the step is lost: {error}"
print(f"collage_fx {collage_fx.__version__}, torch {torch.__version__}: a step is compensated")
