"""Copies of an optimizer have its residuals; plain steps beside a compiled one are named.

For optimizer.checkpoints.copying and optimizer.plain_steps.
"""

import copy
import gc
import io
import pickle
import warnings
import weakref
from typing import Any

import pytest
import torch
from checkpoints import take_steps, words
from saved import saved_residuals
from tensors import bf16, with_grads
from test_state import adamw, compiled, make, same
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim import Optimizer

import collage_fx
from collage_fx.errors import CollageWarning
from collage_fx.runtime.residuals.store import STORE


def deeply(pair: Any) -> Any:
    return copy.deepcopy(pair)


def pickled(pair: Any) -> Any:
    return pickle.loads(pickle.dumps(pair))


def saved(pair: Any) -> Any:
    file = io.BytesIO()
    torch.save(pair, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def twice(pair: Any) -> Any:
    return deeply(saved(pair))


@pytest.mark.parametrize(
    ("duplicate", "way"),
    [
        *((one, "compile") for one in (deeply, pickled, saved, twice)),
        (twice, "string"),
        *(pytest.param(one, "string", marks=pytest.mark.slow) for one in (deeply, pickled, saved)),
    ],
)
@pytest.mark.quick("deeply-compile")
def test_a_copy_goes_on_as_its_original(duplicate: Any, way: str) -> None:
    model = make()
    optimizer = adamw(model)
    step = compiled(optimizer, way)
    take_steps(model, step, 0, 3)
    before = words((model, optimizer))
    other, again = duplicate((model, optimizer))
    assert same(words((other, again)), before) and same(words((model, optimizer)), before)
    assert next(other.parameters()) is again.param_groups[0]["params"][0]
    assert len(saved_residuals(again.state_dict())) == len(list(model.parameters()))
    with warnings.catch_warnings():
        warnings.simplefilter("error", CollageWarning)
        take_steps(other, compiled(again, way), 3, 6)
        take_steps(model, step, 3, 6)
    assert same(words((other, again)), words((model, optimizer)))
    last, without = duplicate((model, optimizer))
    for t in (t for p in last.parameters() for t in (p, *without.state[p].values())):
        if STORE.get(t) is not None:
            STORE.drop(t)
    take_steps(last, compiled(without, way), 6, 7)
    take_steps(model, step, 6, 7)
    assert not same(words((last, without)), words((model, optimizer)))


def test_a_rollback_to_a_copy_takes_its_residuals() -> None:
    model = make()
    optimizer = adamw(model)
    step = compiled(optimizer, "compile")
    take_steps(model, step, 0, 3)
    before, weights = copy.deepcopy(optimizer), copy.deepcopy(model.state_dict())
    take_steps(model, step, 3, 6)
    after = words((model, optimizer))
    model.load_state_dict(weights)
    optimizer.load_state_dict(before.state_dict())
    take_steps(model, step, 3, 6)
    assert same(words((model, optimizer)), after)


def test_residuals_that_do_not_belong_are_not_copied() -> None:
    model = make()
    optimizer = adamw(model)
    take_steps(model, compiled(optimizer, "compile"), 0, 3)
    first, *others = model.parameters()
    with torch.no_grad():
        first.zero_()
    copied = copy.deepcopy(optimizer).param_groups[0]["params"]
    assert STORE.get(copied[0]) is None and all(STORE.get(p) is not None for p in copied[1:])
    assert len(others) == len(copied) - 1


def test_residuals_of_a_checkpoint_wait_in_a_copy_too() -> None:
    model = make()
    optimizer = adamw(model)
    take_steps(model, compiled(optimizer, "compile"), 0, 3)
    other = make(seed=5)
    again = adamw(other)
    compiled(again, "compile")
    again.load_state_dict(optimizer.state_dict())
    third, final = copy.deepcopy((other, again))
    third.load_state_dict(model.state_dict())
    assert same(words((third, final)), words((model, optimizer)))


def test_a_copy_that_is_not_compiled_says_so_once() -> None:
    model = make()
    optimizer = adamw(model)
    optimizer.step = compiled(optimizer, "compile")  # type: ignore[method-assign]
    untouched = copy.deepcopy(optimizer)  # it has no residuals yet
    take_steps(model, optimizer.step, 0, 1)
    copied = copy.deepcopy(optimizer)
    for p in (p for o in (untouched, copied) for p in o.param_groups[0]["params"]):
        p.grad = torch.ones_like(p)
    with warnings.catch_warnings():
        warnings.simplefilter("error", CollageWarning)
        untouched.step()
    with pytest.warns(CollageWarning, match="a copy of AdamW.*compile the copy") as caught:
        copied.step()
        copied.step()
    assert sum(issubclass(w.category, CollageWarning) for w in caught) == 1


@pytest.mark.slow
def test_explaining_a_trained_optimizer_gives_the_reasons() -> None:
    model = make()
    optimizer = adamw(model)
    take_steps(model, compiled(optimizer, "compile"), 0, 2)
    kept = words((model, optimizer))
    assert all("residual" not in s.reason for s in collage_fx.explain(optimizer).plan)
    assert same(words((model, optimizer)), kept)


def sgd(count: int = 2) -> Optimizer:
    return torch.optim.SGD(with_grads([bf16(4) for _ in range(count)]), lr=1e-3)


def steps(step: Any, count: int = 3) -> list[str]:
    """Take steps; return the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(count):
            step()
    return [str(w.message) for w in caught if issubclass(w.category, CollageWarning)]


@pytest.mark.parametrize("kept", [True, False])
def test_a_compiled_step_that_is_never_called_is_named_once(kept: bool) -> None:
    optimizer = sgd()
    step = collage_fx.compile(optimizer)
    if not kept:  # the usual mistake
        del step
        gc.collect()
    (message,) = steps(optimizer.step)
    assert "SGD.step was called" in message and "collage_fx.compile_(optimizer)" in message


def test_the_hook_is_of_each_optimizer_and_knows_a_scaler() -> None:
    optimizer, other = sgd(), sgd()
    collage_fx.compile(optimizer)
    assert not steps(other.step)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.ones(()))
    assert len(steps(lambda: scaler.step(optimizer), 1)) == 1


def test_steps_that_are_called_give_no_warning() -> None:
    optimizer = sgd()
    optimizer.step = collage_fx.compile(optimizer)  # type: ignore[method-assign]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert not steps(lambda: (optimizer.step(), scheduler.step()))
    assert collage_fx.residuals(optimizer.param_groups[0]["params"][0])
    spare = collage_fx.compile(optimizer, level="light")  # not used, beside one that is
    assert not steps(optimizer.step)
    del spare
    assert not steps(lambda: type(optimizer).step(optimizer), 1)  # a plain one, later
    second = sgd()
    step = collage_fx.compile(second)
    closure = lambda: torch.zeros(())  # noqa: E731
    assert not steps(lambda: step(closure))
    assert not second._optimizer_step_post_hooks  # which Dynamo would trace


def test_a_step_that_primes_a_checkpoint_is_no_mistake() -> None:
    model = nn.Linear(3, 2).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    step = collage_fx.compile(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error", CollageWarning)
        get_optimizer_state_dict(model, optimizer)
    assert optimizer.state
    take_steps(model, step, 0, 1)


def test_optimizers_that_were_compiled_and_copied_are_let_go() -> None:
    optimizer = sgd()
    step = collage_fx.compile(optimizer)
    step()
    copied = copy.deepcopy(optimizer)
    references = [weakref.ref(one) for one in (optimizer, copied)]
    del optimizer, copied, step
    torch.compiler.reset()
    gc.collect()
    assert [r() for r in references] == [None, None]
