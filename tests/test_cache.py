"""Inductor's cache of compiled graphs: it is used, and its key covers all that makes the code."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensors import bf16, with_grads
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

import collage_fx
from collage_fx import config
from collage_fx.passes import sweep
from collage_fx.passes.sweep import SWEEPS


@pytest.fixture(autouse=True)
def _empty_cache() -> Iterator[None]:
    with fresh_cache():
        yield


def compiled(members: int = 2, **options: Any) -> tuple[int, int]:
    """Compile a step as a new process would; return hits and misses of the cache."""
    torch.compiler.reset()
    counters.clear()
    torch.manual_seed(0)
    SWEEPS.clear()
    params = with_grads([bf16(6 - i % 2) for i in range(members)])
    step = collage_fx.compile(torch.optim.SGD(params, lr=1e-2, momentum=0.5), **options)
    step()  # makes the states, in the eager engine
    step()
    found = counters["inductor"]
    return found["fxgraph_cache_hit"], found["fxgraph_cache_miss"]


@pytest.mark.parametrize("members", [2, 9])
def test_the_second_time_comes_from_the_cache(members: int) -> None:
    """Two members have a kernel each, and nine have one together."""
    first, again = compiled(members), compiled(members)
    assert first[0] == 0 and first[1] > 0
    assert again == (first[1], 0)


def test_other_passes_or_options_are_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled()
    # The same graph, for another reason: on_unsupported changes nothing here.
    assert compiled(on_unsupported="error")[0] == 0
    assert compiled(9)[0] == 0
    monkeypatch.setattr(config, "source_digest", lambda: "passes of another version")
    monkeypatch.setattr(sweep, "source_digest", lambda: "passes of another version")
    assert compiled()[0] == 0
    assert compiled(9)[0] == 0
