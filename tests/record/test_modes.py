"""Steps go from one mode to a later one, by causes that logs and docs name.

For record.mode, record.steps and binding.backoff.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

import collage_fx
from collage_fx.record.mode import Cause, Mode
from collage_fx.record.recorder import Recorder
from collage_fx.runtime import logs
from collage_fx.segments.operations import OPERATIONS, Operation

DOCS = (Path(__file__).parents[2] / "docs" / "recording.md").read_text()


def steps_of(optimizer: Optimizer, count: int = 4, **options: Any) -> Any:
    """Return the runner of the steps of an optimizer, which has taken some."""
    collage_fx.compile_(optimizer, **options)
    stepped(optimizer, count)
    return optimizer.step._collage.steps()  # type: ignore[attr-defined]


def stepped(optimizer: Optimizer, count: int = 4) -> None:
    for _ in range(count):
        for p in optimizer.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)
        optimizer.step()


def params() -> list[Tensor]:
    return [torch.ones(4, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]


class Outside(SGD):
    """SGD of which Dynamo traces nothing."""

    @torch.compiler.disable
    def step(self, closure: Any = None) -> Any:
        """Take a step."""
        return super().step(closure)


def test_modes_are_entered_in_order_and_never_left(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(logs.LOG, "info", lambda text, *given: said.append(text % given))
    steps = steps_of(SGD(params(), lr=1e-3))
    assert steps.mode is Mode.COMPILED and steps.compiles
    for cause, mode in ((Cause.CUT, Mode.TRACED), (Cause.UNSEEN, Mode.RECORDED)):
        steps.enter(cause)
        assert steps.mode is mode and not steps.compiles
        assert said[-1] == f"the step of SGD: {mode} from now on: {cause}"
    count = len(said)
    steps.enter(Cause.CUT)
    assert steps.mode is Mode.RECORDED and not steps.traces and len(said) == count


@pytest.mark.parametrize(
    ("optimizer", "options", "mode"),
    [
        (SGD, {}, Mode.COMPILED),
        (SGD, {"record": True}, Mode.RECORDED),
        (Outside, {}, Mode.RECORDED),
    ],
)
def test_mode_of_a_step(optimizer: type[SGD], options: Any, mode: Mode) -> None:
    assert steps_of(optimizer(params(), lr=1e-3), **options).mode is mode


def test_a_step_that_never_runs_leaves_no_mode_to_the_next() -> None:
    optimizer = SGD(params(), lr=1e-3)
    collage_fx.compile_(optimizer, record=True)
    assert steps_of(optimizer).mode is Mode.COMPILED


def test_docs_name_each_cause_with_its_mode() -> None:
    rows = re.findall(r"^\| (.+) \| `(\w+)` \|$", DOCS, re.M)
    assert rows == [(str(cause), str(cause.mode)) for cause in Cause]


class Own(SGD):
    """SGD by a loop of its own."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take a step."""
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=1e-3)


class Pointing(Own):
    """The same beside code that has a pointer to the parameters."""

    def step(self, closure: Any = None) -> Any:
        """Take a step."""
        self.param_groups[0]["params"][0].data_ptr()
        return super().step(closure)


def alike() -> None:
    both = [SGD(params()), SGD(params())]
    for optimizer in both:
        collage_fx.compile_(optimizer)
    for optimizer in both:
        stepped(optimizer)


def without_a_compiler() -> None:
    with torch.compiler.set_stance("force_eager"):
        steps_of(Own(params()))


WAYS: dict[str, Callable[[], Any]] = {
    "repeated": lambda: steps_of(SGD(params())),
    "bound graph": lambda: steps_of(Own(params())),
    "compiled graph": alike,
    "recorded segment": lambda: steps_of(Outside(params())),
    "interpreted": without_a_compiler,
    "at once": lambda: steps_of(Pointing(params()), record=True),
}


@pytest.mark.kernels
@pytest.mark.parametrize("way", WAYS)
def test_docs_name_each_way_with_its_line(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    rows = dict(re.findall(r"^\| ([a-z ]+) \| [^|]+ \| [^|]+ \| ([^|]+) \|$", DOCS, re.M))
    assert {*WAYS} == {*rows} - {"way"}
    monkeypatch.setattr(logs.LOG, "info", lambda text, *given: said.append(text % given))
    monkeypatch.setattr(logs.LOG, "isEnabledFor", lambda level: True)
    WAYS[way]()
    for line in rows[way].split("; "):
        pattern = re.sub(r"\d+", r"\\d+", re.escape(line))
        assert re.search(pattern, "\n".join(said)), said


@torch.compiler.disable
def label() -> None:
    with torch.autograd.profiler.record_function("a part of the step"):
        pass


class Labelled(SGD):
    """SGD that labels a part of its step for profiles, where Dynamo does not see it."""

    def step(self, closure: Any = None) -> Any:
        """Take a step."""
        label()
        return super().step(closure)


@pytest.mark.parametrize("kind", ["label", "now"])
def test_labels_of_a_profile_are_no_operations_of_the_step(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that Dynamo traces is not looked at again for one; the control takes it for work."""
    for name in ("_record_function_enter_new", "_record_function_exit"):
        packet = getattr(torch.ops.profiler, name)
        for overload in packet.overloads():
            monkeypatch.setitem(OPERATIONS, getattr(packet, overload), Operation(kind))
    woken: list[Recorder] = []
    own = Recorder._wake_up
    monkeypatch.setattr(Recorder, "_wake_up", lambda self: (woken.append(self), own(self)))
    steps_of(Labelled(params(), lr=1e-3))
    assert bool(woken) is (kind == "now")


def test_torch_labels_are_known_by_themselves() -> None:
    assert OPERATIONS[torch.ops.profiler._record_function_enter_new.default].kind == "label"
