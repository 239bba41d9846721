"""Every test starts without compiled code, and GPU tests are skipped where there is no GPU."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    torch.manual_seed(0)
    yield
    torch.compiler.reset()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device: unverified here"))
