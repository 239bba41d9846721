"""Random optimizer programs: what is compensated is as close to float64 as its bits allow.

For tests/support/oracle.py.
"""

import re
from dataclasses import replace
from typing import Any

import fuzz
import interpreter
import oracle
import pytest
import runs
import torch
from as_traced import differing, recorded_and_traced
from mended import MENDED
from oracle import judge
from programs import Line, Program

from collage_fx.runtime.ops import collage

CHUNKS = 6
SUBTRACTION = Program(lines=(Line("p.sub_(g, alpha=lr)"),))
AVERAGE = Program(
    lines=(
        Line('st["v"].mul_(0.999).addcmul_(g, g, value=0.001)'),
        Line('p.addcdiv_(g, st["v"].sqrt() + 1e-8, value=-lr)'),
    ),
    states=(("v", "torch.zeros_like(p)"),),
)


@pytest.mark.parametrize("count", [3, 25])
@pytest.mark.parametrize("seed", range(CHUNKS))
@pytest.mark.quick("1-3")
def test_random_programs_lose_nothing_in_silence(seed: int, count: int) -> None:
    counts = fuzz.run(seed, count)
    assert counts["programs"] > count / 2


@pytest.mark.parametrize("count", [1, pytest.param(50, marks=pytest.mark.slow)])
def test_random_programs_lose_nothing_when_they_are_recorded(count: int) -> None:
    counts = fuzz.run(100, count, fuzz.RECORDED)
    assert counts["programs"] > count / 2
    assert count == 1 or counts["recorded: the bits of Dynamo's graphs"] > 0


@pytest.mark.slow
def test_a_recorded_run_with_other_roundings_differs_from_the_traced_graphs() -> None:
    ours, theirs = AVERAGE.lines[0], Line('p.sub_(g / (st["v"].sqrt() + 1e-8), alpha=lr)')
    program = replace(AVERAGE, lines=(ours, theirs))
    recorded, traced = recorded_and_traced(program) or pytest.fail("not by the passes alone")
    assert not differing(recorded, traced)
    wide = replace(program, options=(("arithmetic", "wide"), ("storage", "mcf2")))
    other, _ = recorded_and_traced(wide) or pytest.fail("not by the passes alone")
    assert differing(other, traced)


@pytest.mark.slow
def test_a_bias_correction_is_judged_alike_in_traced_graphs_and_recorded_ones() -> None:
    """0.9**k, an operation in the one and part of a number in the other, is at most 1."""
    program = Program(
        lines=(
            Line('st["m"].mul_(0.9).add_(g.add(p, alpha=0.1))'),
            Line("p.mul_(1 - lr * 0.1)"),
            Line('p.sub_(lr * (st["m"] / (1 - 0.9**k) / (g.abs() + 1e-8)))'),
        ),
        states=(("m", "torch.zeros_like(p)"),),
        rates=((1e-3, 0.0),),
        counter="state",
        options=(("level", "light"), ("storage", "mcf2")),
    )
    recorded, traced = recorded_and_traced(program) or pytest.fail("not by the passes alone")
    assert not differing(recorded, traced)
    assert recorded.compensated == traced.compensated == {"p0"}


@pytest.mark.parametrize(
    "name",
    [
        # What was wrong with those of torch.optim others show too: test_zero_rate.py,
        # test_fp16_range.py, test_powers.py.
        pytest.param(name, marks=pytest.mark.slow if program.torch_optim else ())
        for name, program in MENDED.items()
    ],
)
@pytest.mark.quick(
    "an exchange*",
    "light leaves a decaying*",
    "eft rounds the product*",
    "a factor that changes*",
    "a sign*",
    "a graph reads*not linear",
    "a momentum*",
    "light drops a low word*not used",
    "numbers are frozen*",
    "a 0-d*",
    "light drops the first*",
    "a parameter that takes over a state*",
    "a state times*",
    "a correction*",
    "light finds*",
    "one value*",
)
def test_what_was_mended_holds(name: str) -> None:
    """The program's states are as they should be, or a warning says that they are not."""
    assert judge(MENDED[name]).failures == []


def test_a_run_resumed_before_a_state_is_first_read_has_the_bits_of_the_unbroken_one() -> None:
    turns = 'if k % 8:\n    st["slow"].lerp_(p, 0.1)\nelse:\n    p.lerp_(st["slow"], 0.2)'
    program = Program(
        lines=(*SUBTRACTION.lines, Line(turns)),
        states=(("slow", "p.detach().clone()"),),
        counter="state",
        options=(("level", "light"), ("storage", "mcf2")),
    )
    unbroken, resumed = runs.compensated(program), runs.compensated(replace(program, resumed=7))
    assert "slow0" in unbroken.compensated and resumed.compensated == unbroken.compensated
    for name, value in unbroken.values.items():
        assert torch.equal(resumed.values[name], value), name


@pytest.mark.parametrize("program", [SUBTRACTION, AVERAGE], ids=["subtraction", "average"])
@pytest.mark.parametrize("way", ["compile", "string", "engine", "function"])
@pytest.mark.quick("compile-average", "string-average", "engine-subtraction", "function-average")
def test_what_is_compensated_holds(program: Program, way: str) -> None:
    verdict = judge(replace(program, way=way), few=False)
    assert not verdict.failures and not verdict.excuse
    assert verdict.worst < 1 < verdict.lost


@pytest.mark.parametrize("way", ["compile", "function"])
def test_plain_training_fails(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "way_of", lambda _: runs.plain)
    monkeypatch.setattr(runs, "reported", lambda _: ("", 0))
    assert judge(replace(AVERAGE, way=way)).failures


def test_residuals_without_roundings_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(interpreter.LIKE_KERNELS, collage.round.default, lambda x, dtype: x)
    monkeypatch.setattr(interpreter, "READY", type(interpreter.READY)())
    assert judge(replace(AVERAGE, in_init=True)).failures


def test_a_wrong_number_fails() -> None:
    """Five percent of a rate: plain training is further off, and would not notice."""
    right, other = (replace(SUBTRACTION, rates=((lr, 0.0),)) for lr in (1e-2, 1.05e-2))
    exact, run = runs.eager(right, torch.float64), runs.compensated(other)
    wrong = float((run.values["p0"] - exact["p0"]).norm())
    plain = runs.eager(right, torch.bfloat16)
    assert oracle.limits(right, run, exact)["p0"] < wrong
    assert wrong < float((plain["p0"] - exact["p0"]).norm())


def test_a_failing_program_is_shrunk_and_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a script of a few lines, that runs."""
    monkeypatch.setattr(runs, "way_of", lambda _: runs.plain)
    monkeypatch.setattr(runs, "reported", lambda _: ("", 0))
    with pytest.raises(AssertionError, match="allowed") as failure:
        fuzz.run(0, 50, ("function",))
    script = str(failure.value).partition("\np0: error")[0]
    step = script[script.index("def step") : script.index("SHAPES")]
    assert len(step.strip().split("\n")) <= 6, step
    scope: dict[str, Any] = {}
    exec(script, scope)
    values = scope["train"](torch.bfloat16, runs.plain)
    assert re.search(r"seed\(0\)", script) and values["p0"].dtype == torch.bfloat16
