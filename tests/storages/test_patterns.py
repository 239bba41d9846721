"""Patterns that fit no state are named, with the states that there are; others are not.

For optimizer.storage_patterns.
"""

import warnings
from typing import Any

import pytest
import torch
from tensors import bf16, with_grads
from torch import Tensor, nn

import collage_fx
from collage_fx.dynamo.backend import _SESSIONS
from collage_fx.errors import CollageWarning


def said(step: Any, count: int = 4) -> list[list[str]]:
    """Take steps; return the warnings of each."""
    found = []
    for _ in range(count):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step()
        found.append([str(w.message) for w in caught if issubclass(w.category, CollageWarning)])
    return found


def adamw(count: int) -> torch.optim.Optimizer:
    return torch.optim.AdamW(with_grads([bf16(4) for _ in range(count)]))


def compiled(optimizer: torch.optim.Optimizer, way: str, **options: Any) -> Any:
    if way == "string":
        _SESSIONS.clear()
        return torch.compile(optimizer.step, backend="collage", options=options)
    step = collage_fx.compile(optimizer, **options)
    if way != "eager":
        return step

    def run() -> None:
        with torch.compiler.set_stance("force_eager"):
            step()

    return run


WAYS = pytest.mark.parametrize(
    ("way", "count"), [("graph", 2), ("shared", 9), ("eager", 1), ("string", 2)]
)


KIND = ({"storage": {"params": "ulp8"}}, "storage.*'params' fits no state.*mean 'param'")
STATE = ({"storage": {"exp_avg_sqq": "ulp8", "*": "mcf2"}}, "mean 'exp_avg_sq'.*param, step, exp")
NAMED = ({"states": ("*.runing_mean",)}, r"states.*runing_mean.*param_groups\[0\]")
LATE = ({"storage": {"*": "ulp8", "param": "mcf2"}}, "'param' decides for no state.*put it first")


@pytest.mark.parametrize(
    ("way", "count", "options", "words"),
    [
        *(("graph", 2, *one) for one in (KIND, STATE, NAMED, LATE)),
        ("shared", 9, *STATE),
        ("eager", 1, *KIND),
        ("string", 2, *KIND),
    ],
)
@pytest.mark.quick("graph-2-options0-*", "shared-9-*", "eager-1-*")
def test_a_pattern_that_fits_no_state_is_named_once(
    way: str, count: int, options: Any, words: str
) -> None:
    found = said(compiled(adamw(count), way, **options))
    assert found[0] == [] and found[2:] == [[], []]
    with pytest.warns(CollageWarning, match=words):
        warnings.warn(found[1][0], CollageWarning, stacklevel=1)
    assert len(found[1]) == 1


@WAYS
@pytest.mark.quick("shared-9", "string-2")
def test_patterns_that_fit_are_not_named(way: str, count: int) -> None:
    by_kind = {"param": "remainder16", "exp_avg*": "ulp8", "*": "mcf2"}
    assert not any(said(compiled(adamw(count), way, storage=by_kind, level="all")))


@pytest.mark.slow
def test_the_name_of_a_parameter_that_another_stands_for_is_known() -> None:
    count = 9
    last = {f"param_groups[[]0].params[[]{count - 1}]": "ulp8", "step": "mcf2", "*": "mcf2"}
    assert not any(said(compiled(adamw(count), "graph", storage=last, level="all")))


@pytest.mark.parametrize("way", ["graph", "string"])
def test_states_that_the_second_step_finds_are_waited_for(way: str) -> None:
    optimizer = torch.optim.SGD(with_grads([bf16(4)]), momentum=0.9)
    storage = {"momentum_buffer": "ulp8", "*": "mcf2"}
    assert not any(said(compiled(optimizer, way, storage=storage)))


def test_states_of_functions_and_modules_go_by_their_names() -> None:
    norm = nn.BatchNorm1d(3).bfloat16()
    x = torch.randn(5, 3).bfloat16()

    def track(momentum: Tensor) -> None:
        with torch.no_grad():
            norm(x)
            momentum.mul_(0.999)

    options = {"states": ("*running_mean",), "storage": {"momentum": "ulp8", "*": "mcf2"}}
    momentum = torch.ones(3).bfloat16()
    step = collage_fx.compile(track, **options)
    assert not any(said(lambda: step(momentum)))
    wrong = collage_fx.compile(track, states=("momentums",))
    found = said(lambda: wrong(momentum))
    assert [len(f) for f in found] == [0, 1, 0, 0] and "mean 'momentum'" in found[1][0]


def test_explaining_and_converting_name_them_too() -> None:
    optimizer = adamw(1)
    found = collage_fx.explain(optimizer, storage={"exp_avq": "ulp8"})
    assert any("did you mean 'exp_avg'" in note for note in found.notes)
    collage_fx.compile(optimizer)()
    with pytest.warns(CollageWarning, match="'params' fits no state"):
        collage_fx.convert_residuals(optimizer, {"params": "mcf3", "*": "mcf2"})
    with warnings.catch_warnings():
        warnings.simplefilter("error", CollageWarning)
        collage_fx.convert_residuals(optimizer, {"exp_avg": "mcf3", "*": "mcf2"})
