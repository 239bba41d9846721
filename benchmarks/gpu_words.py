"""The words of kernels and of whole steps on a device beside those that a CPU makes beforehand.

    python benchmarks/gpu_words.py --out build/gpu_words.pt

writes the expected words: for each case of tests/support/kernels.py those of the eager reference
after three launches, and for whole steps of AdamW, SGD and Lion those of ten steps on the CPU, of
parameters, states and all residuals. gpu_check.py reads the file, which is carried to the machine
with the GPU. Where it is missing or does not fit, the words are made there: what PyTorch's own
operations are in a graph, and so their roundings, is another thing in each version of torch.
"""

import argparse
import hashlib
import os
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from gpu_rows import Rows
from gpu_timing import Setup, free
from steps import Lion, parameters
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer

import collage_fx
from collage_fx.passes.ir.cache_key import digest_of, sources
from collage_fx.runtime.torch_versions import minor

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/support"))
from interpreted import members_of, reference, renewed
from kernel_memory import columns_of
from kernels import CASES, NO_REFERENCE, Case, kernel_of, misaligned, rewritten

SUPPORT = Path(__file__).parents[1] / "tests/support"
LAUNCHES, STEPS = 3, 10
SHAPES = [(64, 48), (7,), (130, 131), (1,), (3, 5, 7), (1024,), (33, 3), (9, 9)]
Words = dict[str, Tensor]
PLUS: dict[str, Any] = {"level": "plus", "storage": "mcf2"}
ONE = {"foreach": False}
"""PyTorch's default is another on a GPU than on a CPU, with another formula."""
R16 = PLUS | {"storage": "remainder16"}
REFERRED = tuple(name for name in CASES if name not in NO_REFERENCE)
"""Cases of kernels whose words are compared."""
WHOLE: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "AdamW, plus": (AdamW, ONE, PLUS),
    "AdamW, remainder16": (AdamW, ONE, R16),
    "AdamW, remainder16, capturable": (AdamW, {"capturable": True, **ONE}, R16),
    "AdamW, light": (AdamW, ONE, PLUS | {"level": "light"}),
    "AdamW, wide": (AdamW, ONE, PLUS | {"arithmetic": "wide"}),
    "AdamW, all": (AdamW, ONE, PLUS | {"level": "all"}),
    "AdamW, mcf3": (AdamW, ONE, PLUS | {"storage": "mcf3"}),
    "AdamW, ulp8": (AdamW, ONE, PLUS | {"storage": "ulp8"}),
    "AdamW, ulp4": (AdamW, ONE, PLUS | {"storage": "ulp4"}),
    "AdamW, sr": (AdamW, ONE, PLUS | {"storage": "sr"}),
    # A norm that leaves gradients as they are: its sum has other last bits on a GPU.
    "AdamW, clips and zeroes": (AdamW, ONE, R16 | {"clip_grad_norm": 1e30, "zero_grads": True}),
    "AdamW, by chance": (AdamW, ONE, PLUS | {"arithmetic": "wide", "stochastic_rounding": True}),
    "AdamW, plus, foreach": (AdamW, {"foreach": True}, PLUS),
    "SGD, plus": (SGD, {"momentum": 0.9, **ONE}, PLUS),
    "SGD, remainder16": (SGD, {"momentum": 0.9, **ONE}, R16),
    "Lion, plus": (Lion, {}, PLUS),
    "Lion, remainder16": (Lion, {}, R16),
}
"""Class, its options, and those of collage_fx."""


def _made_of() -> str:
    """Return a digest of the sources that the expected words follow from."""
    own = [Path(__file__), *(SUPPORT / name for name in ("kernels.py", "interpreted.py"))]
    return digest_of([*sources(), *own])


def words_of(optimizer: Optimizer) -> Words:
    """Return parameters, states and all residuals by name, not copied.

    A residual belongs to a tensor itself: an alias of a parameter, as `detach` makes, has none.
    """
    found: Words = {}
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for i, p in enumerate(params):
        held = {"param": p, **{k: t for k, t in optimizer.state[p].items() if torch.is_tensor(t)}}
        for key, tensor in held.items():
            found[f"{i} {key}"] = tensor.data
            for n, low in enumerate(collage_fx.residuals(tensor)):
                found[f"{i} {key}, residual {n}"] = low.data
    return found


def steps_of(device: str, name: str) -> Words:
    """Return all words after ten steps, on the CPU; gradients have other addresses in each."""
    kind, own, options = WHOLE[name]
    params = [p.detach().to(device).requires_grad_() for p in parameters(SHAPES)]
    optimizer = kind(params, lr=1e-3, **own)
    step = collage_fx.compile(optimizer, multi_tensor=True, **options)
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype).to(device)
        step()
    return {key: t.cpu() for key, t in words_of(optimizer).items()}


def _launched(case: Case, device: str, *, aligned: bool) -> tuple[list[list[Tensor]], str]:
    """Return the members of a class after three launches, and a digest of what they began with."""
    of_class = rewritten(case)
    kernel, members = kernel_of(of_class), members_of(of_class)
    begun = _digest(t for inputs in members for t in inputs)
    place = (lambda x: x) if aligned else (lambda x: misaligned(x) if x.dim() else x)
    members = [[place(x.clone().to(device)) for x in inputs] for inputs in members]
    for step in range(LAUNCHES):
        sizes = [max(x.numel() for x in inputs) for inputs in members]
        with columns_of(kernel, members) as columns:
            kernel.run(columns, sizes)
        for inputs in members:
            for i in kernel.read:
                renewed(inputs[i], step)
    return [[x.cpu() for x in inputs] for inputs in members], begun


def _referred(case: Case) -> tuple[list[list[Tensor]], str]:
    """Return the same by the eager reference on the CPU."""
    of_class = rewritten(case)
    kernel, members = kernel_of(of_class), members_of(of_class)
    begun = _digest(t for inputs in members for t in inputs)
    for step in range(LAUNCHES):
        for inputs in members:
            reference(of_class, inputs)
            for i in kernel.read:
                renewed(inputs[i], step)
    return members, begun


def _flat(members: list[list[Tensor]]) -> Words:
    return {f"{m} input {i}": x for m, row in enumerate(members) for i, x in enumerate(row)}


def _digest(tensors: Any) -> str:
    found = hashlib.sha256()
    for t in tensors:
        found.update(t.contiguous().view(torch.uint8).numpy().tobytes() if t.dim() else _bytes(t))
    return found.hexdigest()[:16]


def _bytes(number: Tensor) -> bytes:
    return repr((number.item(), number.dtype)).encode()


def differing(ours: Tensor, theirs: Tensor) -> Tensor:
    """Return the flat indices of elements of other bits; any NaN is another's equal."""
    a, b = ours.cpu().flatten(), theirs.cpu().flatten()
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    unequal = a.view(integers) != b.view(integers)
    if a.is_floating_point():
        unequal &= ~(a.float().isnan() & b.float().isnan())
    return unequal.nonzero().flatten()


def _some(at: Tensor, ours: Tensor, theirs: Tensor) -> tuple[Tensor, ...]:
    """Return up to 200 of the indices, and the elements there."""
    at = at[:200].clone()  # of a view all of its memory would be written
    return at, ours.cpu().flatten()[at], theirs.cpu().flatten()[at]


def compare(rows: Rows, name: str, ours: Words, theirs: Words, **more: Any) -> bool:
    """Add the verdict on words that should be equal, and dump up to 200 of each that differ.

    Args:
        rows: to which it is added.
        name: of the row.
        ours: words by name.
        theirs: those that are expected.
        more: what else the row has.
    """
    absent = sorted(set(ours) ^ set(theirs))
    found = {key: differing(ours[key], theirs[key]) for key in ours if key not in absent}
    unequal = {key: at for key, at in found.items() if len(at)}
    ok = not (unequal or absent)
    more |= {
        "differing": sum(map(len, unequal.values())),
        "words": sum(t.numel() for t in ours.values()),
    }
    if not ok:
        more["where"] = {key: len(at) for key, at in [*unequal.items()][:4]} | dict.fromkeys(
            absent, "absent"
        )
    if unequal:
        rows.dump(name, {k: _some(at, ours[k], theirs[k]) for k, at in unequal.items()})
    rows.check(name, ok, **more)
    return ok


def expected(names: Sequence[str] = (*REFERRED, *WHOLE)) -> dict[str, Any]:
    """Make the expected words on the CPU.

    Args:
        names: of cases and whole steps.
    """
    found: dict[str, Any] = {"sources": _made_of(), "torch": minor(torch.__version__)}
    for name in names:
        if name in CASES:
            members, begun = _referred(CASES[name])
            found[name] = {"words": _flat(members), "begun": begun}
        else:
            found[name] = {"words": steps_of("cpu", name), "begun": ""}
        torch.compiler.reset()
    return found


def _known(setup: Setup, rows: Rows, names: Sequence[str]) -> dict[str, Any]:
    """Return the expected words, from the file if that was made of these sources."""
    found: dict[str, Any] = torch.load(setup.words) if setup.words.is_file() else {}
    known = {key: found.get(key) for key in ("sources", "torch")}
    if known == {"sources": _made_of(), "torch": minor(torch.__version__)}:
        return found
    rows.add("expected words", note=f"made here: the file has {known}")
    return expected(names)


def whole_steps(setup: Setup, rows: Rows, names: Sequence[str] = tuple(WHOLE)) -> None:
    """Compare the words of ten steps with the expected ones."""
    known = _known(setup, rows, names)
    for name in names:
        compare(rows, name, steps_of(setup.device, name), known[name]["words"])
        free(setup)
    control = {key: t.clone() for key, t in known[names[0]]["words"].items()}
    control["0 param, residual 0"].view(torch.int16).flatten()[0] ^= 1
    unequal = sum(len(differing(control[k], t)) for k, t in known[names[0]]["words"].items())
    rows.check("control: one bit of a low word is found", unequal == 1, differing=unequal)


def launches(setup: Setup, rows: Rows, names: Sequence[str] = REFERRED) -> None:
    """Compare the words of three launches, aligned and not, with the expected ones."""
    known = _known(setup, rows, names)
    for name in names:
        for aligned in (True, False):
            members, begun = _launched(CASES[name], setup.device, aligned=aligned)
            if begun != known[name]["begun"]:
                rows.add(name, note="made here: this torch draws other random numbers")
                known[name] = expected([name])[name]
            title = f"{name}, {'aligned' if aligned else 'misaligned'}"
            compare(rows, title, _flat(members), known[name]["words"])


def main() -> None:
    """Write the expected words."""
    parser = argparse.ArgumentParser(description="expected words for gpu_check.py")
    parser.add_argument("--out", type=Path, default=Path("build/gpu_words.pt"))
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
    begun = time.monotonic()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    torch.save(expected(), args.out)
    size = args.out.stat().st_size / 1e6
    print(f"{args.out}: {size:.1f} MB, {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
