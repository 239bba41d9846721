"""One row of the coverage table.

The class takes the same 24 gradients four times:

    plain      bf16, eager: an entry of the table is a class that works here
    exact      float64, or fp32 where it refuses float64
    nudged     float64, each gradient off by one bf16 rounding: how far the trajectory itself
               carries a rounding, large for sign, Newton-Schulz and their like
    collage    bf16, under collage_fx.compile in storage mcf2, which keeps less than the default

Errors are |value - exact| / |exact - start| over all parameters.
"""

import functools
import importlib.metadata
import math
import re
import sysconfig
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from coverage_classes import (
    PACKAGES,
    Model,
    Recipe,
    distance,
    gradient_stream,
    load,
    recipes,
)
from torch import Tensor
from torch._inductor import config as inductor_config
from torch.optim import Optimizer

import collage_fx

STEPS = 24
ROUNDING = 2.0**-9
"""The mean relative error of rounding to bf16, about."""
NOTHING = "its steps change nothing"
SAYS_LOST = re.compile("without compensation|not compensated")
"""Pattern of warnings that a state is not compensated; others are of cost, such as graphs made
in vain."""

Values = dict[str, Tensor]
Wrap = Callable[[Optimizer], Callable[..., Any]]
WRAP: Any = functools.partial(collage_fx.compile, storage="mcf2")
"""Function that compiles the steps."""


@dataclass
class Row:
    """An entry of the table."""

    package: str
    version: str
    name: str
    verdict: str = ""
    """One of coverage.VERDICTS, or `not run` for a class that does not work in eager bf16."""
    reason: str = ""
    engine: str = ""
    drive: str = ""
    """Drive of the step: gradients, closure, hessian (a graph of the gradients)."""
    parameters: str = ""
    exact: str = ""
    random: bool = False
    err_plain: float = math.nan
    err_collage: float = math.nan
    err_nudged: float = math.nan
    err_rounded: float = math.nan
    """Error of the exact result, rounded to bf16."""
    states: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    """Seconds of the run under collage_fx.compile, compilation included."""


def trained(
    recipe: Recipe, dtype: torch.dtype, stream: list[Values], wrap: Wrap | None = None
) -> tuple[Values, Callable[..., Any]]:
    """Run the steps; return the parameters in float64, residuals included, and the step."""
    torch.manual_seed(0)
    model = Model(recipe.names, dtype)
    optimizer = recipe.make(model)
    step = wrap(optimizer) if wrap else optimizer.step
    for gradients in stream:
        recipe.step(step, model, {name: g.to(dtype) for name, g in gradients.items()})
    return {name: collage_fx.value(p).clone() for name, p in model.named_parameters()}, step


def start(recipe: Recipe) -> Values:
    """Return the parameters before the first step."""
    return {
        name: p.detach().clone()
        for name, p in Model(recipe.names, torch.float64).named_parameters()
    }


def usable(values: Values, recipe: Recipe) -> str:
    """Return what is wrong with the result of a run."""
    if not all(bool(v.isfinite().all()) for v in values.values()):
        return "its result is not finite"
    return "" if distance(values, start(recipe)) else NOTHING


def choose(cls: type[Optimizer], row: Row) -> tuple[Recipe | None, Values]:
    """Return the first recipe that works in eager bf16, and its result.

    Otherwise `row.reason` says why the plainest does not.
    """
    stream = gradient_stream(STEPS)
    for recipe in recipes(cls):
        try:
            plain, _ = trained(recipe, torch.bfloat16, stream)
            drawn = torch.get_rng_state()
            row.random = not torch.equal(drawn, torch.manual_seed(0).get_state())
            problem = usable(plain, recipe)
            if problem == NOTHING:  # bf16 may lose all of them
                problem = usable(trained(recipe, torch.float32, stream)[0], recipe)
        except Exception as error:
            problem = f"{type(error).__name__}: {one_line(error)}"
        if not problem:
            row.drive, row.parameters = recipe.drive, ", ".join(recipe.names)
            return recipe, plain
        row.reason = row.reason or problem
    return None, {}


def one_line(text: object) -> str:
    """Return the start of a message, without places: what is cut off of one is not found."""
    return " ".join(_without_places(str(text)).split())[:300]


def measure(module: str, name: str) -> Row:
    """Run the class and judge it."""
    row = Row(module, importlib.metadata.version(PACKAGES[module]), name)
    cls = getattr(load(module), name)
    recipe, plain = choose(cls, row)
    if recipe is None:
        row.verdict = "not run"
        return row
    row.reason = ""
    collage = run_collage(row, recipe)
    if collage is not None:
        compare(row, recipe, plain, collage)
        judge(row)
    if row.verdict in ("failed", "silent"):
        compare_stock(row, recipe)
    return row


def run_collage(row: Row, recipe: Recipe) -> Values | None:
    """Run under collage_fx.compile and fill in what it says of itself."""
    begin = time.perf_counter()
    try:
        with (
            warnings.catch_warnings(record=True) as caught,
            inductor_config.patch(fallback_random=True),
        ):
            warnings.simplefilter("always")
            collage, step = trained(recipe, torch.bfloat16, gradient_stream(STEPS), WRAP)
    except Exception as error:
        row.verdict, row.reason = "failed", f"raises {type(error).__name__}: {_cause(error)}"
        row.notes = [_without_places(traceback.format_exc()[-1500:])]
        return None
    finally:
        row.seconds = round(time.perf_counter() - begin, 2)
    said = [
        one_line(w.message) for w in caught if issubclass(w.category, collage_fx.CollageWarning)
    ]
    report = collage_fx.report(step)
    row.states = report.to_dict()["states"]
    notes = [*said, *(f"collage_fx: {one_line(n)}" for n in report.notes)]
    row.notes = list(dict.fromkeys(notes))
    used = [e for e in ("graph", "joined") if any(s[e] for s in row.states)]
    row.engine = "both" if len(used) == 2 else "".join(used) or "none"
    return collage


def _without_places(text: str) -> str:
    """Return a text in which files are named from their package or this repository on."""
    root = Path(__file__).resolve().parents[1]
    for place in (*map(sysconfig.get_path, ("purelib", "stdlib")), root):
        text = text.replace(f"{place}/", "")
    return text


def _cause(error: BaseException) -> str:
    """Return the message of a compiler's error without the backend's repr before it."""
    return one_line(str(error).partition(" raised:")[2] or error)


def compare(row: Row, recipe: Recipe, plain: Values, collage: Values) -> None:
    """Fill in the errors against the exact run."""
    for dtype in (torch.float64, torch.float32):
        try:
            exact, _ = trained(recipe, dtype, gradient_stream(STEPS))
            nudged, _ = trained(recipe, dtype, gradient_stream(STEPS, ROUNDING))
        except Exception as error:
            row.exact = f"none: {one_line(error)}"
            continue
        moved = distance(exact, start(recipe))
        if moved == 0 or usable(exact, recipe):
            row.exact = f"none: in {str(dtype).removeprefix('torch.')} {usable(exact, recipe)}"
            continue
        row.exact = str(dtype).removeprefix("torch.")
        rounded = {name: v.bfloat16().double() for name, v in exact.items()}
        row.err_plain, row.err_collage, row.err_nudged, row.err_rounded = (
            distance(v, exact) / moved for v in (plain, collage, nudged, rounded)
        )
        return


def compare_stock(row: Row, recipe: Recipe) -> None:
    """Note it where stock torch.compile fails too, or changes the result of eager bf16 as much."""
    stream = gradient_stream(STEPS)
    try:
        stock, _ = trained(recipe, torch.bfloat16, stream, lambda o: torch.compile(o.step))
    except Exception:
        if row.verdict == "failed":
            row.reason = f"as stock torch.compile does, it {row.reason}"
        return
    if row.verdict == "silent" and row.exact == "float64":
        exact, _ = trained(recipe, torch.float64, stream)
        error = distance(stock, exact) / distance(exact, start(recipe))
        if error > 2 * row.err_plain and error > 0.5 * row.err_collage:
            row.verdict = "failed"
            row.reason = f"stock torch.compile changes the result as much: its error is {error:.2f}"


def judge(row: Row) -> None:
    """Fill in the verdict, from what was said and from the numbers."""
    compensated = [s for s in row.states if s["compensated"]]
    unaccounted = [s["name"] for s in row.states if s["unaccounted"]]
    numbers, why = _numbers(row)
    lost = [n for n in row.notes if SAYS_LOST.search(n)]
    if lost:
        row.verdict, row.reason = "partly" if compensated else "refused", lost[0]
    elif unaccounted:
        row.verdict = "partly"
        row.reason = f"writes that nobody accounted for: {', '.join(unaccounted[:3])}"
    elif numbers:
        row.verdict, row.reason = "full", why
    elif compensated and row.err_collage < 0.9 * row.err_plain:
        row.verdict, row.reason = "partly", why
    else:
        row.verdict, row.reason = "silent", why


def _numbers(row: Row) -> tuple[bool, str]:
    """Return True if the errors are those of a compensated run, and why."""
    compensated = any(s["compensated"] for s in row.states)
    if math.isnan(row.err_rounded):
        return compensated, f"by structure: no exact run ({row.exact})"
    ratio = row.err_collage / row.err_plain if row.err_plain else float(row.err_collage > 0)
    if ratio < 0.5:
        return True, ""
    if max(row.err_collage, row.err_plain) <= 1.5 * row.err_rounded < 0.5:
        return True, "plain bf16 is at rounding level here, and so is the compensated run"
    if row.random:
        return compensated, "by structure: random numbers differ between dtypes"
    if row.err_collage <= 8 * row.err_nudged:
        return compensated, "by structure: one rounding of the gradients carries as far"
    return False, f"the error is {ratio:.2f} of that of plain bf16, and nothing is said"
