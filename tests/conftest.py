"""Every test starts without compiled code; tests that cannot run here are skipped."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from interpreter import without_compiler
from torch import Tensor

from collage_fx.dynamo import backend
from collage_fx.runtime.torch_versions import installed


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    torch.manual_seed(0)
    gc.collect()
    gc.freeze()
    yield
    torch.compiler.reset()


@pytest.fixture
def interpreted(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run compiled graphs by the interpreter: for tests whose subject is not a kernel.

    Modules name it in `pytestmark`; their tests of kernels carry the marker `kernels`.
    """
    if request.node.get_closest_marker("kernels"):
        yield
        return
    with without_compiler():
        yield


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Return, for each graph of Dynamo's, how many tensors it takes."""
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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    old = installed() < (2, 13)
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device: unverified here"))
        if old and "test_golden.py" in item.nodeid:
            item.add_marker(pytest.mark.skip(reason="it has the graphs that torch 2.13 makes"))
