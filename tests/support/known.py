"""Defects that are known and open, by a narrow switch for each."""

from collections.abc import Callable

from programs import Program
from runs import Run

KNOWN: dict[str, Callable[[Program, Run], bool]] = {
    "light rounds a state once, before the graph that a parameter is computed in anew is traced": (
        lambda program, run: (
            program.way in ("compile", "string", "at once")
            and dict(program.options)["level"] == "light"
            and any(line.text.startswith("if k % 2") for line in program.lines)
        )
    ),
    "a clipped gradient of one number is rounded where there is no compiler": (
        lambda program, run: (
            bool(dict(program.options).get("clip_grad_norm")) and () in program.shapes
        )
    ),
}
"""A defect that is open -> whether a run, with what it was seen to do, may have it, and does not
count then. Delete the entry when the defect is mended, and put a program into mended.py."""


def of_stock(program: Program, error: Exception) -> str:
    """Return the defect of stock torch.compile that an error is; "" for none.

    See docs/stock-defects.md: a tensor of a class of its own that is made behind a graph break.
    """
    makes = "as_subclass(Named)" in program.script()
    return "NameError for a class of its own" if makes and type(error) is NameError else ""


def known(program: Program, run: Run) -> str:
    """Return the first defect that a run may have; "" for none."""
    return next((name for name, has in KNOWN.items() if has(program, run)), "")
