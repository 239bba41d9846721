"""Pytest plugin for the tests of other projects: each optimizer that is made has its step compiled.

    python -m pytest -p suite_plugin --steps interpreted --outcomes FILE TESTS

`tests/support/suites.py` runs it. With `--steps plain` it compiles nothing and does the rest: all
tests start from the same random numbers, and tests for a GPU run on the CPU where there is none.
"""

import contextlib
import functools
import gc
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from interpreter import untimed_guards, without_compiler
from torch.optim import Optimizer

WAYS = ("plain", "interpreted", "kernels")
COUNTS: Counter[str] = Counter()
"""Optimizers that were compiled, and steps that were taken by what was compiled, in a test."""
OUTCOMES: dict[str, dict[str, Any]] = {}
"""Test -> its outcome, what it counted, and the last line of its error."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--steps", choices=WAYS, default="plain", help="how optimizers step")
    parser.addoption("--step-options", default="{}", help="of collage_fx.compile_, in JSON")
    parser.addoption("--outcomes", type=Path, required=True, help="file to write, in JSON")


def pytest_configure(config: pytest.Config) -> None:
    gc.set_threshold(20_000, 50, 100)  # as in tests/conftest.py
    if not torch.cuda.is_available():
        torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    if config.getoption("steps") != "plain":
        compile_what_is_made(json.loads(config.getoption("step_options")))


def compile_what_is_made(options: dict[str, Any]) -> None:
    """Have `compile_` called on each optimizer from now on when its class has made it."""
    import collage_fx
    from collage_fx.step.compiled_step import CompiledStep

    making: list[Optimizer] = []

    def compiling(init: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(init)
        def made(self: Optimizer, *args: Any, **kwargs: Any) -> None:
            outermost = not any(self is one for one in making)
            making.append(self)
            try:
                init(self, *args, **kwargs)
            finally:
                making.pop()
            if outermost:
                collage_fx.compile_(self, **options)
                COUNTS["optimizers"] += 1

        return made

    def begin(cls: type[Optimizer], **kwargs: Any) -> None:
        original(**kwargs)
        if "__init__" in vars(cls):
            cls.__init__ = compiling(cls.__init__)  # type: ignore[method-assign]

    def call(self: Any, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        COUNTS["steps"] += 1
        return taken(self, optimizer, args, kwargs)

    original, taken = Optimizer.__init_subclass__, CompiledStep.call
    CompiledStep.call = call  # type: ignore[method-assign]
    for cls in {Optimizer, *below(Optimizer)}:
        if "__init__" in vars(cls):
            cls.__init__ = compiling(cls.__init__)  # type: ignore[method-assign]
    Optimizer.__init_subclass__ = classmethod(begin)  # type: ignore[assignment]


def below(cls: type) -> Iterator[type]:
    """Yield all classes that are derived from one."""
    for one in cls.__subclasses__():
        yield from (one, *below(one))


@pytest.fixture(autouse=True)
def _fresh(request: pytest.FixtureRequest) -> Iterator[None]:
    """Start without compiled code, from the same random numbers, with the compiler asked for."""
    torch.compiler.reset()
    for seed in (torch.manual_seed, numpy.random.seed, random.seed):
        seed(0)
    COUNTS.clear()
    gc.collect()
    gc.freeze()
    interpreted = request.config.getoption("steps") == "interpreted"
    with untimed_guards(), without_compiler() if interpreted else contextlib.nullcontext():
        yield
    request.node.user_properties.append(("counts", dict(COUNTS)))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep what came of a test; of its parts the one that did not pass, if any."""
    kept = OUTCOMES.setdefault(report.nodeid, {"outcome": "passed", "counts": {}, "error": ""})
    kept["counts"] = dict(report.user_properties).get("counts", kept["counts"])
    if report.outcome != "passed" and kept["outcome"] != "failed":
        crash = getattr(report.longrepr, "reprcrash", None)
        kept["outcome"] = report.outcome
        kept["error"] = str(getattr(crash, "message", report.longrepr))[:300]


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):  # a process of pytest-xdist has a part of them
        session.config.getoption("outcomes").write_text(json.dumps(OUTCOMES, indent=1))
