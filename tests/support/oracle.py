"""Oracle of a random program: float64, and how far from it its arithmetic may lead.

The bound on the error of a compensated run is a *model* of it: the same program in float64, where
each result of an operation is rounded to as many bits as collage_fx says that it has there:

- a state, at each update in place, to those of its storage, or of its dtype if it has no residual,
  by chance where the run does so;
- what an update adds to it, to those of the arithmetic (8 of bf16 in `eft`, 24 in `wide`);
- every other result likewise; but not what stands on the way of a state from its old value to its
  new one (`programs.Line.carried`), which holds the precision of the state.

So no update is lost in the model, a quotient of small differences is as bad there as it must be,
and the run may be FACTOR times as far from float64 as the worst of a few models that differ by
random errors of half a unit. The norms of tensors are compared, or medians where a program has
jumps (a sign that turns over). Rounding to nearest has a bias where updates are below half a unit
of a state without a residual: the model has it too, since it rounds such states as they are.
"""

import math
from dataclasses import dataclass, field, replace

import torch
from programs import Program
from rounding import modelled
from runs import KEPT, LOW_BITS, SMALLEST, Run, compensated, eager, kind_of
from torch import Tensor

FACTOR = 6.0
MODELS = 4
FEW = 4
EXCUSES = {
    "not compensated": "not compensated",
    "ran without compensation": "recompile limit",
    "no use for a residual": "updated by several graphs",
    "collage_fx.compile records that part": "handed on without its low word",
    "part of a differentiated computation": "differentiated",
    "was cleared": "residual cleared",
    "level='auto' compensates": "level light names what it leaves",
}
"""A part of a warning that says that something is not compensated -> its short name."""
JUMPS = ("sign(", "clamp", "Rprop", "Adamax")
FLOOR = 6.0
"""Error of a state, in units of the last place, that is allowed at any rate. Half a unit in each
step is five where a tenth of it is averaged away."""


@dataclass
class Verdict:
    """The comparison of a compensated run with float64."""

    program: Program
    run: Run
    failures: list[str] = field(default_factory=list)
    excuse: str = ""
    """Words of collage_fx itself, where it says that something is not compensated."""
    worst: float = 0.0
    """The largest error, as a part of what is allowed."""
    lost: float = 0.0
    """The largest error of plain 16-bit training, as a part of what is allowed."""


def judge(program: Program, *, interpreted: bool = True, few: bool = True) -> Verdict:
    """Run a program by collage_fx, and say where it is further from float64 than it may be.

    Args:
        program: the program.
        interpreted: whether its graphs are.
        few: whether to run one model where it allows all that was found: others allow more.
    """
    run = compensated(program, interpreted=interpreted)
    verdict = Verdict(program, run)
    if run.error is not None:
        verdict.excuse = type(run.error).__name__
        return verdict
    for part, name in EXCUSES.items():
        if any(part in message for message in run.warned):
            verdict.excuse = name
            return verdict
    exact, low = eager(program, torch.float64), eager(program, getattr(torch, program.dtype))
    if few:
        compare(verdict, exact, low, limits(program, run, exact, few=True))
    if not few or verdict.worst >= 1:
        compare(verdict, exact, low, limits(program, run, exact))
    verdict.failures += run.behind
    if any("none of them loses updates" in message for message in run.warned):
        verdict.failures += untrue(program, run, exact)
    return verdict


def compare(
    verdict: Verdict, exact: dict[str, Tensor], low: dict[str, Tensor], allowed: dict[str, float]
) -> None:
    """Note in a verdict how far the values of its run are from the exact ones."""
    program, run = verdict.program, verdict.run
    verdict.failures, verdict.worst, verdict.lost = [], 0.0, 0.0
    for name, x in exact.items():
        ours, theirs = run.values[name], low[name]
        verdict.failures += not_alike(name, ours, [x, theirs])
        judged = x.isfinite() & theirs.isfinite() & run.high[name].isfinite() & ours.isfinite()
        if not judged.any() and judged.numel():
            continue
        error, plain = (torch.where(judged, y - x, 0) for y in (ours, theirs))
        found, most = size(program, error), allowed[name]
        if found > most:
            verdict.failures.append(
                f"{name}: error {found:.2e}, allowed {most:.2e}, plain "
                f"{size(program, plain):.2e}, {run.bits[name]} bits"
            )
        verdict.worst = max(verdict.worst, found / most)
        verdict.lost = max(verdict.lost, size(program, plain) / most)


def not_alike(name: str, ours: Tensor, plain: list[Tensor]) -> list[str]:
    """Return where a value is infinite, or no number, and is not in both of plain PyTorch's runs;
    and where it is finite and both are not.

    Where these are no numbers it may be infinite: a `lerp` of an infinity to another is no number.
    """
    found = []
    for kind, of in {"not finite": _infinite, "NaN": torch.isnan}.items():
        each = torch.stack([of(x) for x in plain])
        if n := int((of(ours) & ~each.any(0)).sum()):
            found.append(f"{name}: {n} elements are {kind}")
        if n := int((ours.isfinite() & each.all(0)).sum()):
            found.append(f"{name}: {n} elements are not {kind}, and plain PyTorch's are")
    return found


def _infinite(x: Tensor) -> Tensor:
    return ~x.isfinite()


def untrue(program: Program, run: Run, exact: dict[str, Tensor]) -> list[str]:
    """Return the states that hardly move, though a warning says that none loses updates."""
    first = eager(replace(program, steps=1), torch.float64)
    found = []
    for name, x in exact.items():
        if name not in first:
            continue  # made in a later step
        judged = x.isfinite() & run.values[name].isfinite() & first[name].isfinite()
        ways = (x - first[name], run.values[name] - x)
        moved, missing = (size(program, torch.where(judged, way, 0)) for way in ways)
        if run.bits[name] == LOW_BITS[program.dtype_of(name)] and missing > 0.5 * moved > 0:
            found.append(f"{name}: lost {missing:.2e} of {moved:.2e}, though none is said to lose")
    return found


def size(program: Program, x: Tensor) -> float:
    """Return the norm of an error; of programs with jumps, the median times the root of the count.

    A jump is an error of some elements that says nothing.
    """
    if any(word in program.statements for word in JUMPS):
        return float(x.abs().flatten().median() * x.numel() ** 0.5)
    return float(x.norm())


def limits(
    program: Program, run: Run, exact: dict[str, Tensor], *, few: bool = False
) -> dict[str, float]:
    """Return how large the error of each state may be, by all models or by the first alone.

    A parameter may be off by what its residual does not hold, whether it has one or not. So may
    any other state without one, where the level leaves that to what is lost; but for a few units of
    its last place, of which rounding to nearest averages out.
    """
    light = dict(program.options)["level"] == "light"
    low = {k: LOW_BITS[program.dtype_of(k)] for k in run.bits}
    least = {k: min(KEPT[program.dtype_of(k)].values()) for k in run.bits}
    rest = {k: n for k, n in run.bits.items() if k not in run.by_chance}
    parameters = run.bits | {k: max(n, least[k]) for k, n in rest.items() if kind_of(k) == "p"}
    whole = run.bits | {k: max(n, least[k]) for k, n in rest.items()}

    # Of few elements a few models are lucky together.
    count = MODELS * (3 if any(x.numel() < FEW for x in exact.values()) else 1)
    count = 1 if few else count

    def errors(bits: dict[str, int]) -> dict[str, float]:
        models = [modelled(program, run, bits, seed) for seed in range(count)]
        found = {}
        for k, x in exact.items():
            sizes = [size(program, torch.where(x.isfinite(), m[k] - x, 0)) for m in models]
            found[k] = max(sizes) if all(map(math.isfinite, sizes)) else math.inf
        return found

    as_said = errors(parameters)
    at_best = as_said if light or whole == parameters else errors(whole)
    found = {}
    for name, x in exact.items():
        plain_state = run.bits[name] == low[name] and kind_of(name) != "p"
        most = (at_best if plain_state else as_said)[name]
        bits = low[name] if plain_state else parameters[name]
        norm = float(x.nan_to_num(0, 0, 0).norm())
        unit = max(norm * 2.0**-bits, 2.0 ** SMALLEST[program.dtype_of(name)])
        # The model rounds nothing of what is no state of 16 bits: it may lose a unit in each step.
        once = name in run.compensated or run.bits[name] == low[name]
        factor = FACTOR * (2 if x.numel() < FEW else 1)
        found[name] = factor * most + FLOOR * unit * (1 if once else program.steps)
        if plain_state and x.numel() < FEW:  # it may have come near zero by chance, just now
            found[name] = max(found[name], FACTOR * as_said[name])
    return found
