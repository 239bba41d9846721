"""Every test starts without compiled code; tests that cannot run here are skipped."""

import contextlib
import gc
import os
from collections.abc import Generator, Iterator
from fnmatch import fnmatchcase
from typing import Any

import pytest

# Without it Inductor compiles, and loads, programs for all vectors that a CPU has in every process.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# What reports are printed for.
os.environ["COLUMNS"] = "120"
# Every test collects garbage when it begins; Dynamo would after each frame.
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")

import torch
from interpreter import untimed_guards, without_compiler
from poison import poisoned
from torch import Tensor

from collage_fx.dynamo import backend
from collage_fx.runtime.torch_versions import installed

# A compilation makes a hundred thousand objects, few of which go before it ends.
gc.set_threshold(20_000, 50, 100)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--compiler",
        action="store_true",
        help="run all graphs by the kernels that Inductor compiles, not those of `kernels` only",
    )
    parser.addoption(
        "--few",
        type=int,
        metavar="N",
        help="of each file run the first case of its first N tests, of those that -m has left",
    )


@pytest.fixture(autouse=True)
def _fresh_compiler(request: pytest.FixtureRequest) -> Iterator[None]:
    """Start without compiled code; run what is compiled by the interpreter of graphs.

    A test whose subject is what Inductor makes carries the marker `kernels`.
    """
    kernels = request.node.get_closest_marker("kernels") or request.config.getoption("compiler")
    torch.compiler.reset()
    torch.manual_seed(0)
    gc.collect()
    gc.freeze()
    compiler = contextlib.nullcontext() if kernels else without_compiler()
    with untimed_guards(), poisoned(), compiler:
        yield
    torch.compiler.reset()


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Return, for each Dynamo graph, how many tensors it takes."""
    found: list[int] = []
    original = backend._Step.__init__

    def spy(self: Any, session: Any, gm: Any, inputs: Any) -> None:
        nodes = (n for op in ("placeholder", "get_attr") for n in gm.graph.find_nodes(op=op))
        tensors = [n for n in nodes if isinstance(n.meta["example_value"], Tensor)]
        found.append(sum(n.meta["example_value"].dim() > 0 for n in tensors))
        original(self, session, gm, inputs)

    with monkeypatch.context() as patch:
        patch.setattr(backend._Step, "__init__", spy)
        yield found


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem() -> Generator[None, Any, Any]:
    """Mark the cases of a test slow that its marker `quick` does not name."""
    made = yield
    for item in made if isinstance(made, list) else ():
        for marker in item.iter_markers("quick"):
            if not any(fnmatchcase(item.callspec.id, case) for case in marker.args):
                item.add_marker(pytest.mark.slow)
            cases = [other.callspec.id for other in made]
            gone = [c for c in marker.args if not any(fnmatchcase(case, c) for case in cases)]
            if gone:
                raise pytest.UsageError(f"{item.nodeid}: no case is {gone}, of {cases}")
    return made


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if few := config.getoption("few"):
        left = _beyond(items, few)
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]
    old = installed() < (2, 13)
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device: unverified here"))
        if old and "test_golden.py" in item.nodeid:
            item.add_marker(pytest.mark.skip(reason="it has the graphs that torch 2.13 makes"))


def _beyond(items: list[pytest.Item], few: int) -> set[pytest.Item]:
    """Return all but the first case of the first few tests of each file."""
    first: dict[Any, dict[str, pytest.Item]] = {}
    for item in items:
        tests = first.setdefault(item.path, {})
        if len(tests) < few:
            tests.setdefault(item.name.partition("[")[0], item)
    return {*items} - {item for tests in first.values() for item in tests.values()}


@pytest.fixture
def doctors() -> Iterator[list[Any]]:
    """A list of doctors, which stop when the test is over."""
    found: list[Any] = []
    yield found
    for one in found:
        one.stop()
