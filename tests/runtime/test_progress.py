"""Long work says what it is at, on stderr; short work, and the user's own, says nothing.

For runtime.progress.
"""

import gc
import logging
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import collage_fx
from collage_fx.passes import pipeline
from collage_fx.runtime import progress

THREAD = "collage_fx.progress"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lines after hundredths of a second, and nobody's settings."""
    monkeypatch.setattr(progress, "DELAY", 0.02)
    monkeypatch.setattr(progress, "EVERY", 0.02)
    for name in ("COLLAGE_FX_PROGRESS", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    yield
    deadline = time.perf_counter() + 5
    while any(t.name == THREAD for t in threading.enumerate()):
        assert time.perf_counter() < deadline, "a thread outlives its work"
        time.sleep(0.001)


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


def until_said(work: progress.Work | None) -> None:
    """Wait for the first line, however busy the machine is."""
    deadline = time.perf_counter() + 10
    while work is not None and not work.said and time.perf_counter() < deadline:
        time.sleep(0.001)


def test_long_work_says_its_phase_and_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.work(lambda: "compiling", "tracing"), progress.doing("pass expand"):
        until_said(progress._RUNNING.work)
    first, *_, last = said(capsys)
    assert first.startswith("collage_fx: compiling: pass expand, 0 s")
    assert last.startswith("collage_fx: compiling: done, ")


def test_what_fails_says_so_and_is_over(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyError), progress.work(lambda: "compiling", "tracing"):
        until_said(progress._RUNNING.work)
        raise KeyError
    assert said(capsys)[-1].startswith("collage_fx: compiling: failed, ")
    assert progress._RUNNING.work is None


def test_short_work_and_work_of_others_is_silent(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with progress.work(lambda: "compiling", "tracing"), progress.doing(None):
        time.sleep(0.06)
        assert progress._RUNNING.work is not None and progress._RUNNING.work.seconds < 0.06
    monkeypatch.setattr(progress, "DELAY", 60.0)
    with progress.work(lambda: "compiling", "tracing"):
        pass
    assert not said(capsys)


def test_its_clock_goes_on_in_phases_within_what_others_do() -> None:
    with progress.work(lambda: "compiling", None), progress.doing(progress.counted("kernel")):
        time.sleep(0.01)
        assert progress._RUNNING.work is not None and progress._RUNNING.work.seconds >= 0.01


def test_phases_are_counted() -> None:
    assert progress.counted("kernel") == "kernel"
    with progress.work(lambda: "compiling", "tracing"):
        progress.expect("kernel")
        progress.expect("kernel")
        found = [progress.counted("kernel") for _ in range(3)]
        assert [*found, progress.counted("graph")] == [
            *("kernel 1 of 2", "kernel 2 of 2", "kernel 3"),
            "graph 1",
        ]


@pytest.mark.parametrize(
    ("name", "value", "silent"),
    [
        ("COLLAGE_FX_PROGRESS", "0", True),
        ("RANK", "1", True),
        ("LOCAL_RANK", "3", True),
        ("RANK", "0", False),
    ],
)
def test_one_process_speaks_and_can_be_silenced(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, silent: bool
) -> None:
    monkeypatch.setenv(name, value)
    with progress.work(lambda: "compiling", "tracing"):
        assert (progress._RUNNING.work is None) is silent


def test_the_level_of_its_logger_silences_it_and_a_handler_redirects_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    records: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record.getMessage())

    monkeypatch.setattr(progress.LOGGER, "handlers", [Kept()])
    with progress.work(lambda: "compiling", "tracing"):
        until_said(progress._RUNNING.work)
    assert records and not said(capsys)
    monkeypatch.setattr(progress.LOGGER, "level", logging.WARNING)
    progress.LOGGER.manager._clear_cache()  # type: ignore[attr-defined]
    with progress.work(lambda: "compiling", "tracing"):
        assert progress._RUNNING.work is None
    monkeypatch.undo()
    progress.LOGGER.manager._clear_cache()  # type: ignore[attr-defined]


def _optimizer() -> torch.optim.Optimizer:
    params = [torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16)) for _ in range(2)]
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer = torch.optim.SGD(params, lr=1e-3, momentum=0.9)
    optimizer.step = collage_fx.compile(optimizer)  # type: ignore[method-assign]
    return optimizer


def test_a_slow_pass_of_a_first_step_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(program: Any) -> None:
        until_said(progress._RUNNING.work)
        original(program)

    original = pipeline.expand
    slow.__name__ = "expand"
    passes = [slow if p is original else p for p in pipeline.PASSES]
    monkeypatch.setattr(pipeline, "PASSES", tuple(passes))
    monkeypatch.setattr(progress, "DELAY", 0.2)
    optimizer = _optimizer()
    for _ in range(3):
        optimizer.step()
    lines = said(capsys)
    begin = "collage_fx: compiling the step of SGD (2 parameters): "
    assert lines and all(line.startswith(begin) for line in lines)
    assert lines[-1].startswith(f"{begin}done, ")


def test_closures_are_no_part_of_it_and_nothing_keeps_the_optimizer(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float] = []

    def closure() -> float:
        work = progress._RUNNING.work
        assert work is not None and work.state[0] is None
        seen.append(work.seconds)
        return 0.0

    monkeypatch.setattr(progress, "DELAY", 60.0)
    optimizer = _optimizer()
    for _ in range(2):
        optimizer.step(closure)  # type: ignore[arg-type]
    assert len(seen) == 2 and not said(capsys)
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
