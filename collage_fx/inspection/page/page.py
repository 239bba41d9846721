"""The page of an explanation: everything that it shows is gathered here, for the template."""

import contextlib
import os
import tempfile
from collections import Counter
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
from markupsafe import Markup, escape

from collage_fx.errors import PageError
from collage_fx.inspection.page.classes import ClassView
from collage_fx.inspection.page.kernels import LARGEST
from collage_fx.inspection.page.plot import HEIGHT, LEFT, RIGHT, WIDTH, panels_of
from collage_fx.inspection.page.readable import Piece
from collage_fx.inspection.page.states import PLAIN, States, states_of

if TYPE_CHECKING:
    from collage_fx.inspection.explanation import Explanation


def save(explanation: "Explanation", path: str | os.PathLike[str]) -> Path:
    """Write an explanation to one HTML file; return where.

    Raises:
        PageError: the file cannot be written.
    """
    place = Path(path)
    text = render(explanation)
    temporary = ""
    try:
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=place.parent, prefix=f".{place.name}.", delete=False
        ) as file:
            temporary = file.name
            file.write(text)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)  # as any file, and not for the user alone
        os.replace(temporary, place)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise PageError(f"the page cannot be written to {place}: {error.strerror}") from error
    return place


def render(explanation: "Explanation") -> str:
    """Return the page of an explanation."""
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_template),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["code"] = code
    environment.filters["bytes"] = in_bytes
    return environment.get_template("page.html.jinja").render(_content(explanation))


def _template(name: str) -> str:
    return (resources.files(__package__) / name).read_text(encoding="utf-8")


def code(pieces: Iterable[Piece]) -> Markup:
    """Return pieces of code as HTML, each value in an element that says which it is."""
    parts = []
    for piece in pieces:
        if isinstance(piece, str):
            parts.append(escape(piece))
            continue
        kind = Markup(' class="def" tabindex="-1" role="button"') if piece.defines else ""
        inner = code(piece.pieces)
        parts.append(Markup('<span data-v="{}"{}>{}</span>').format(piece.value, kind, inner))
    return Markup("").join(parts)


def in_bytes(count: int) -> str:
    """Return a number of bytes with a unit that fits."""
    if count < 1024:
        return f"{count:,} bytes"
    size = count / 1024
    for unit in ("KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.3g} {unit}" if size < 1000 else f"{size:.0f} {unit}"


def _content(explanation: "Explanation") -> dict[str, Any]:
    from collage_fx import __version__

    classes = _classes(explanation)
    states = states_of(explanation, [view.rewritten for view in classes])
    config = explanation.config
    return {
        "version": __version__,
        "explanation": explanation,
        "arithmetic": config.arithmetic,
        "classes": classes,
        "states": states,
        "plain": PLAIN,
        "groups": _groups(classes, states),
        "counts": Counter(state.verdict for state in explanation.plan),
        "links": {view.number: view.stems for view in classes},
        "panels": _panels(explanation, classes, states),
        "plot": {"width": WIDTH, "height": HEIGHT, "left": LEFT, "right": WIDTH - RIGHT},
        "memory": _memory(explanation, states),
        "output_code": [_cut(text) for text in explanation.output_code if text],
    }


def _classes(explanation: "Explanation") -> list[ClassView]:
    found = [(r, one) for one in explanation.compiled for r in one.program.rewritten if r.lowered]
    return [ClassView(r, one.program, one.source_code, i) for i, (r, one) in enumerate(found)]


def _groups(classes: list[ClassView], states: States) -> list[dict[str, Any]]:
    """Return the classes, and what is in none, each with the rows of its states."""
    found: list[dict[str, Any]] = [
        {
            "number": view.number,
            "title": f"Class {view.number + 1}",
            "about": view.title,
            "kernel": f"a kernel for each member: {view.rewritten.apart}"
            if view.rewritten.apart
            else "one kernel for all members",
            "rows": states.of(view.number),
        }
        for view in classes
    ]
    left = states.of(PLAIN)
    if left:
        about = "states of which nothing had to be rewritten"
        found.append(
            {"number": PLAIN, "title": "In no class", "about": about, "kernel": "", "rows": left}
        )
    return found


def _panels(
    explanation: "Explanation", classes: list[ClassView], states: States
) -> list[tuple[str, str, list[Any]]]:
    replayed = explanation.replayed
    if replayed is None or replayed.failure:
        return []
    numbered = [(f"Class {v.number + 1}", v.title, v.number) for v in classes]
    numbered = numbered or [("All states", "", PLAIN)]
    return [(t, about, panels_of(replayed, states, n)) for t, about, n in numbered]


def _memory(explanation: "Explanation", states: States) -> list[tuple[str, int, str]]:
    """Return kinds of memory with their bytes, and of which sort each is."""
    sort = {"parameters": "param", "gradients": "grad"}
    found = [(k, n, sort.get(k, "state")) for k, n in explanation.memory.items() if n]
    residuals: dict[str, int] = {}
    for row in states.rows:
        residuals[row.kind] = residuals.get(row.kind, 0) + row.residual_bytes
    found += [(f"residuals of {kind}", n, "residual") for kind, n in residuals.items() if n]
    order = ("param", "grad", "state", "residual")
    return sorted(found, key=lambda one: (order.index(one[2]), -one[1]))


def _cut(text: str) -> str:
    if len(text) <= LARGEST:
        return text
    return text[:LARGEST] + "\n# Cut here; all of it is in Explanation.output_code."
