"""Each kind of program that the fuzz draws beside plain steps is judged, and faults in it are seen.

Each has an example which holds, and of which plain training would fail; and faults of its kind.

For tests/support/programs.py.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import odd_lines
import oracle
import programs
import pytest
import runs
import surroundings
import torch
from generated import drawn
from oracle import judge
from program_helpers import HELPERS
from programs import Line, Program
from torch import Tensor

from collage_fx.optimizer.checkpoints import copying
from collage_fx.passes.analysis import escape
from collage_fx.record import at_once
from collage_fx.runtime.residuals.residual import Residual
from collage_fx.runtime.residuals.store import ResidualStore
from collage_fx.step import compiled_step

UPDATE = Line("p.sub_(u, alpha=lr)")
STEP = Program(
    lines=(Line('st["m"].mul_(0.9).add_(g, alpha=0.1)\nu = st["m"]'), UPDATE),
    states=(("m", "torch.zeros_like(p)"),),
    way="record",
)


def kept(begin: str, text: str, carried: bool = False) -> Program:
    """Return a program with a state."""
    lines = (Line("u = g"), Line(text, carried=carried), UPDATE)
    return replace(STEP, lines=lines, states=(("q", begin),))


def between(*events: str) -> Program:
    return replace(STEP, events=tuple((3 + i, text) for i, text in enumerate(events)))


LOADED, _, FROM_FILE, COPIED, PICKLED = surroundings.LOADS
AVERAGE = 'st["q"].mul_(0.999).add_(u, alpha=0.001)\nu = u + st["q"]'
SWAPPED = replace(
    STEP,
    lines=(*STEP.lines, Line('st["slow"].lerp_(p, 0.01)')),
    states=(*STEP.states, ("slow", "torch.zeros_like(p)")),
    events=tuple((t, surroundings.EVALUATION) for t in range(2, 10)),
    methods=surroundings.methods("slow", 0.2, -0.25, "p.data.lerp_(s, weight)"),
)
HELD = Line("m = enclosed(st, p)\nm.mul_(0.999).add_(u, alpha=0.1)\nu = m", carried=True)
MASKED = Line("p[g != 0] -= (lr * u)[g != 0]", carried=True)
CLONED = 'for st in opt.state.values():\n    st["m"] = st["m"].clone()'
EXAMPLES = {
    "noise": replace(
        STEP,
        lines=(
            Line('st["q"].add_(g).uniform_(-1, 1)'),
            Line('u = torch.nn.functional.dropout(g + st["q"], 0.25)'),
            Line("u = torch.where(torch.rand(u.shape, generator=GEN) < 0.5, u, 0)"),
            UPDATE,
        ),
        states=(("q", "torch.zeros_like(p)"),),
    ),
    "a class": replace(
        kept("torch.zeros_like(p).as_subclass(Named)", AVERAGE),
        shapes=((4, 3),) * 9,
        way="compile",
    ),
    "a box": replace(kept("Boxed(torch.zeros_like(p))", AVERAGE), gradients="Boxed"),
    "shared": replace(kept("shared(p)", AVERAGE), shapes=((4, 3), (4, 3))),
    "replaced": kept(
        "torch.zeros_like(p)", 'st["q"] = 0.999 * st["q"] + 0.001 * u\nu = u + st["q"]', True
    ),
    "rows": kept(
        "torch.zeros_like(p).sum(-1, keepdim=True)",
        'st["q"].lerp_(u.mean(-1, keepdim=True), 0.01)\nu = u + st["q"]',
    ),
    "magnitudes": kept(
        "p.detach().abs().amax(-1, keepdim=True)",
        'st["q"].sub_(lr * u.mean(-1, keepdim=True))\n'
        'p.copy_(st["q"] * p / p.abs().amax(-1, keepdim=True))',
        True,
    ),
    "a pick": replace(
        kept(
            "torch.zeros_like(p)",
            'st["q"].lerp_(g * g, 0.01)\nu = g / (st["q"].sqrt() + 0.1)\n'
            + odd_lines.KINDS["picked elements"][0],
        ),
        way="compile",
        options=(*STEP.options, ("arithmetic", "wide")),
    ),
    "a holder": replace(STEP, lines=(Line("u = g"), HELD, UPDATE), states=()),
    "a mask": replace(
        STEP,
        lines=(Line("u = g.clone()\nu[g > 0] *= 0.5"), MASKED),
        states=(),
        zero_rows=True,
    ),
    "loads": between(*[LOADED, FROM_FILE] * 3),
    "copies": between(*[COPIED, PICKLED] * 3),
    "restored": between(*surroundings.RESTORED),
    "resumed by the backend string": replace(
        STEP, way="string", shapes=((4, 3), (5,)), in_init=True, resumed=4
    ),
    "a cast": between(programs.WIDE_CAST),
    "a cast to the low dtype": replace(
        between(programs.LOW_CAST),
        lines=(Line('st["m"] *= 0.999\nst["m"] += 0.001 * g.to(F32)\nu = g + st["m"]'), UPDATE),
        states=(("m", "torch.zeros_like(p, dtype=F32)"),),
        shapes=((4, 3), (4, 3), (5,)),
        dtypes=("bfloat16", "float32", "float16"),
        steps=50,
    ),
    "methods": SWAPPED,
    "joins": replace(STEP, shapes=((4, 3), (5,)), joins=4),
    "dtypes": replace(
        STEP, shapes=((4, 3), (4, 3), (5,)), dtypes=("bfloat16", "float16", "float32")
    ),
    "layout": replace(STEP, layout="sliced", gradients="transposed"),
    "memory of gradients": replace(STEP, gradients="kept"),
    "infinite": replace(STEP, infinite="inf"),
}


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.quick(
    "a box",
    "a pick",
    "a holder",
    "a cast",
    "shared",
    "replaced",
    "restored",
    "rows",
    "loads",
    "methods",
    "joins",
    "dtypes",
    "layout",
    "memory of gradients",
    "infinite",
)
def test_an_example_holds_that_plain_training_would_fail(name: str) -> None:
    verdict = judge(EXAMPLES[name])
    assert not verdict.failures and not verdict.excuse
    assert verdict.worst < 1 < verdict.lost


def _without_low_words(patch: pytest.MonkeyPatch) -> None:
    """Let residuals that are loaded be zeros."""
    load = Residual.load

    def wiped(self: Residual, tensor: Tensor, components: Any, expected: Any) -> None:
        load(self, tensor, [torch.zeros_like(c) for c in components], None)

    patch.setattr(Residual, "load", wiped)


def _instead(**fields: Any) -> Callable[[pytest.MonkeyPatch], None]:
    """Let another program run in its place."""

    def other(patch: pytest.MonkeyPatch) -> None:
        run = runs.compensated
        patch.setattr(oracle, "compensated", lambda p, interpreted: run(replace(p, **fields)))

    return other


def _scrambled(patch: pytest.MonkeyPatch) -> None:
    """Let elements have each other's places where the compiled step runs."""
    run, text = runs.compensated, HELPERS["laid_out"]

    def other(*program: Any, **how: Any) -> Any:
        with patch.context() as within:
            wrong = text.replace(".contiguous().movedim(-1, 0)", ".contiguous().view(x.shape)")
            within.setitem(HELPERS, "laid_out", wrong)
            return run(*program, **how)

    patch.setattr(oracle, "compensated", other)


def _lost_in_clones(patch: pytest.MonkeyPatch) -> None:
    """Let clones of states, which begin without low words, take their places."""
    patch.setattr(ResidualStore, "hand_on", lambda *_: True)
    _instead(events=((3, programs.LOW_CAST), *((t, CLONED) for t in range(4, 50))))(patch)


def _nothing(*_: object) -> None:
    """Take the place of what would be done."""


FAULTS: dict[tuple[str, str], Callable[[pytest.MonkeyPatch], Any]] = {
    ("noise", "drawn in float64"): lambda patch: patch.setattr(at_once, "draws", lambda f: False),
    ("shared", "each has one"): _instead(states=(("q", "torch.zeros_like(p)"),)),
    ("replaced", "not in one step"): _instead(lines=(EXAMPLES["shared"].lines)),
    ("rows", "of another rate"): _instead(
        lines=(
            Line("u = g"),
            Line('st["q"].lerp_(u.mean(-1, keepdim=True), 0.02)\nu = u + st["q"]'),
            UPDATE,
        )
    ),
    ("magnitudes", "not moved"): _instead(lines=(Line("u = g"), UPDATE)),
    ("a pick", "of the rounding"): lambda patch: patch.setattr(
        escape, "chosen", lambda program: iter(())
    ),
    ("a holder", "begun anew"): _instead(
        lines=(Line("u = g"), replace(HELD, text=HELD.text.replace("p)", "p) * 0")), UPDATE)
    ),
    ("a mask", "of the others"): _instead(lines=(Line("u = g.clone()\nu[g <= 0] *= 0.5"), MASKED)),
    ("loads", "without low words"): _without_low_words,
    ("copies", "without low words"): lambda patch: patch.setattr(copying, "_restore", _nothing),
    ("restored", "to other values"): _instead(
        events=((3, "for p in params:\n    p.data.mul_(1.01)"),)
    ),
    ("a cast", "to other values"): _instead(
        events=((3, 'for st in opt.state.values():\n    st["m"] = torch.zeros_like(st["m"])'),)
    ),
    ("a cast to the low dtype", "without low words"): _lost_in_clones,
    ("methods", "outside of the package"): lambda patch: patch.setattr(
        compiled_step, "serve_methods", _nothing
    ),
    ("joins", "a step late"): _instead(joins=5),
    ("layout", "in another order"): _scrambled,
    ("memory of gradients", "not begun anew"): _instead(
        events=((5, "opt.zero_grad = lambda **_: None"),)
    ),
    ("infinite", "left out"): _instead(infinite=""),
    ("infinite", "another"): _instead(infinite="nan"),
}


@pytest.mark.parametrize("fault", FAULTS, ids=": ".join)
@pytest.mark.quick(
    "a holder: *",
    "a pick: *",
    "a cast: *",
    "noise: *",
    "copies: *",
    "magnitudes: *",
    "replaced: *",
    "methods: *",
    "memory of gradients: *",
    "infinite: *",
)
def test_a_fault_is_seen(fault: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[fault](monkeypatch)
    assert judge(EXAMPLES[fault[0]]).failures


def test_what_is_exact_has_no_state_of_a_low_dtype() -> None:
    """A run that rounds as plain training does would say that this is not off at all."""
    program = EXAMPLES["a cast to the low dtype"]
    runs.eager(program, torch.float64)
    with pytest.raises(AssertionError, match="rounded in float64 too: m0, m1, m2"):
        runs.eager(replace(program, events=((3, programs.CAST.format("LOW")),)), torch.float64)


@pytest.mark.slow
def test_statements_of_each_kind_are_made() -> None:
    texts = [program.statements for program in drawn(4, 1200, ("compile", "record"))]

    def missing(kinds: dict[str, tuple[str, ...]]) -> list[str]:
        return [n for n, of in kinds.items() if not any(x in text for x in of for text in texts)]

    assert missing(odd_lines.KINDS) == []
    assert missing({"of none": ("p.of_none()",)}) == ["of none"]
