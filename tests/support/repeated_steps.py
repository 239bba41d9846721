"""Optimizers whose steps may be repeated, and the same steps when they may not."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

import collage_fx
from collage_fx.record.steps import Steps
from collage_fx.stand_in.repeated_step import RepeatedStep

SIZES = [(3,), (5, 2), (16,), (4, 4), (33,), (7,), (2, 3), (64,), (9,)]


def params(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(n, generator=generator).bfloat16()) for n in SIZES]


def made(kind: Any, storage: str, by_chance: bool = False, **options: Any) -> Optimizer:
    optimizer: Optimizer = kind(params(0), **options)
    optimizer.step = collage_fx.compile(  # type: ignore[method-assign]
        optimizer, storage=storage, stochastic_rounding=by_chance
    )
    return optimizer


def params_of(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def give_gradients(optimizer: Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in params_of(optimizer):
        p.grad = torch.randn(p.shape, generator=generator).bfloat16()


def values(optimizer: Optimizer) -> list[Tensor]:
    """All bits that a step may change."""
    found = []
    for p in params_of(optimizer):
        for t in (p, *optimizer.state[p].values()):
            if isinstance(t, Tensor):
                found += [t, *collage_fx.residuals(t)]
    return [t.detach().clone() for t in found]


@contextlib.contextmanager
def counted(monkeypatch: pytest.MonkeyPatch, *, allowed: bool) -> Iterator[list[int]]:
    """Within, steps may be repeated or not; yields one list with an item for each that was."""
    repeats: list[int] = []
    own = Steps.repeated
    with monkeypatch.context() as patch:
        patch.setattr(Steps, "repeated", lambda steps: (repeats.append(steps.steps), own(steps)))
        if not allowed:
            patch.setattr(RepeatedStep, "run", lambda *_: False)
        yield repeats


def trained(
    optimizer: Optimizer, steps: int, change: Callable[[Optimizer, int], Any] = lambda *_: None
) -> list[str]:
    """Take steps; return what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(steps):
            give_gradients(optimizer, i)
            with change(optimizer, i) or contextlib.nullcontext():
                optimizer.step()
    return [str(w.message) for w in caught if w.category is collage_fx.CollageWarning]


def compare(
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[], Optimizer],
    steps: int,
    change: Callable[[Optimizer, int], Any] = lambda *_: None,
) -> list[int]:
    """Assert that steps which may be repeated do what others do; return which were repeated."""
    results = []
    for allowed in (True, False):
        torch.compiler.reset()  # it remembers which numbers have changed
        with counted(monkeypatch, allowed=allowed) as repeats:
            optimizer = make()
            said = trained(optimizer, steps, change)
        versions = [p._version for p in params_of(optimizer)]
        report = str(collage_fx.report(optimizer.step))
        results.append((values(optimizer), versions, said, report, repeats))
    (bits, *same, repeats), (other_bits, *other_same, none) = results
    assert len(bits) == len(other_bits)
    assert all(torch.equal(a, b) for a, b in zip(bits, other_bits, strict=True))
    assert same == other_same
    assert not none
    return repeats
