"""The part of gpu_check.py at the limits: a tensor of more than 2^31 elements, and a sanitizer."""

import subprocess
import sys
from typing import Any

import torch
from gpu_rows import Rows
from gpu_timing import Setup, free, tool_of_cuda
from gpu_words import Words, compare, words_of
from torch import Tensor
from torch.optim import AdamW

import collage_fx

LENGTH = 4101
"""Elements of each stretch that is compared."""
VARIANTS: dict[str, dict[str, Any]] = {
    "plus": {"level": "plus", "storage": "mcf2"},
    "remainder16": {"level": "plus", "storage": "remainder16"},
}


def _stepped(params: list[Tensor], grads: list[Tensor], **options: Any) -> Words:
    """Return the words after three steps."""
    for p, grad in zip(params, grads, strict=True):
        p.requires_grad_().grad = grad
    optimizer = AdamW(params, lr=1e-3, capturable=params[0].is_cuda)
    step = collage_fx.compile(optimizer, multi_tensor=True, **options)
    for _ in range(3):
        step()
    return words_of(optimizer)


def large(setup: Setup, rows: Rows) -> None:
    """Compare stretches of a tensor of 2^31 + 5 elements with small tensors of the same values."""
    size = (1 << 16) + 5 if setup.dry else (1 << 31) + 5
    starts = [0, size // 2 - 7, size - 5 - LENGTH // 2 - 3, size - LENGTH]
    for name, options in VARIANTS.items():
        p, g = (torch.empty(size, dtype=torch.bfloat16, device=setup.device) for _ in "pg")
        for i, x in enumerate((p, g)):
            x.normal_(generator=torch.Generator(setup.device).manual_seed(i))
        pieces = [[x[at : at + LENGTH].clone() for at in starts] for x in (p, g)]
        # With a second, small tensor, so that there is a class.
        whole = _stepped([p, p[:8].clone()], [g, g[:8].clone()], **options)
        ours = {
            f"{i} {key[2:]}": t[at : at + LENGTH].clone()
            for i, at in enumerate(starts)
            for key, t in whole.items()
            if key.startswith("0 ") and t.dim()
        }
        theirs = {key: t for key, t in _stepped(*pieces, **options).items() if t.dim()}
        compare(rows, f"{name}, {size} elements", ours, theirs)
        del p, g, whole
        free(setup)
    sanitized(setup, rows)


def sanitized(setup: Setup, rows: Rows) -> None:
    """Run a small step under compute-sanitizer, which finds accesses outside of tensors."""
    tool = tool_of_cuda("compute-sanitizer")
    if setup.device != "cuda" or tool is None:
        rows.add("compute-sanitizer", skipped="it and a CUDA device are needed")
        return
    command = [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, __file__]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if "ERROR SUMMARY" in line]
    said = lines[-1] if lines else (done.stdout + done.stderr)[-500:]
    rows.check("compute-sanitizer over a small step", done.returncode == 0, said=said)


def main() -> None:
    """Take small steps, for compute-sanitizer: sizes around a chunk, aligned and not."""
    sizes = [1, 5, 1023, 1025, 4096, 4097, 16384]
    for options in VARIANTS.values():
        params = [torch.ones(n, dtype=torch.bfloat16, device="cuda") for n in sizes]
        params.append(torch.ones(1026, dtype=torch.bfloat16, device="cuda")[1:])
        _stepped(params, [torch.ones_like(p) for p in params], **options)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
