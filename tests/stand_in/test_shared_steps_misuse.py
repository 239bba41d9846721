"""Optimizers that share what was compiled: odd tensors, threads, and what comes and goes.

For stand_in.shared_graph and stand_in.alike.
"""

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from shared_runs import SHAPES, bits, compiled, loss, parameters, params_of, same, step_all, train
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, AdamW, Optimizer

import collage_fx
from collage_fx.passes.codegen.multi_tensor_kernel import MULTI_TENSOR_KERNELS

ALONE = {"without": ("share",)}


def adamw(params: list[Tensor]) -> Optimizer:
    return AdamW(params, lr=1e-3)


def odd() -> list[Tensor]:
    """Beside those that are alike: transposed, of one element, 0-d, empty, of another dtype."""
    base = parameters([*SHAPES[:2], (3, 1), (), (0,), (6, 2)])
    base[-1] = Parameter(base[-1].detach().t())
    return [*base, Parameter(torch.ones(3)), Parameter(torch.ones(4, dtype=torch.float16))]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::collage_fx.CollageWarning")  # of fp32
def test_odd_tensors_among_them(traced: list[int]) -> None:
    found = []
    for options in ({}, ALONE):
        optimizers = compiled(lambda ps: SGD(ps, lr=1e-3), odd(), **options)
        for i in range(3):
            step_all(optimizers, i)
        found.append(bits(optimizers))
    assert same(*found)
    assert len(traced) < 2 * len(odd())


@pytest.mark.slow
def test_a_tied_parameter_in_two_optimizers() -> None:
    """The second goes on from the residual that the first has left."""
    found = []
    for options in ({}, ALONE):
        params = parameters()
        optimizers = compiled(adamw, [*params, params[0]], **options)
        for i in range(3):
            step_all(optimizers, i)
        found.append(bits(optimizers))
    assert same(*found)


@pytest.mark.slow
def test_gradients_that_are_summed_up(traced: list[int]) -> None:
    found = train(compiled(adamw, parameters()), 6, every=2)
    assert len(traced) == 1
    one = collage_fx.compile_(adamw(parameters()))
    for i in range(6):
        loss(params_of([one]), i).backward()
        if i % 2:
            one.step()
            one.zero_grad()
    assert same(bits(found), bits([one]))


@pytest.mark.slow
def test_steps_in_another_thread(traced: list[int]) -> None:
    """As autograd calls hooks of parameters on a GPU."""
    optimizers = compiled(adamw, parameters())
    one = collage_fx.compile_(adamw(parameters()))
    for i in range(3):
        worker = threading.Thread(target=step_all, args=(optimizers, i))
        worker.start()
        worker.join()
    assert len(traced) == 1
    for i in range(3):
        step_all([one], i)
    assert same(bits(optimizers), bits([one]))


def test_the_first_may_go_and_its_tensors_with_it() -> None:
    optimizers = compiled(adamw, parameters())
    train(optimizers, 2)
    (p,) = params_of(optimizers[:1])
    tensors = [weakref.ref(t) for t in (p, *optimizers[0].state[p].values())]
    expected = compiled(adamw, parameters())
    train(expected, 2)
    del p, optimizers[0]
    gc.collect()
    assert not any(t() is not None for t in tensors)
    for one in (optimizers, expected):
        step_all(one[-7:], 5)
    assert same(bits(optimizers), bits(expected[1:]))


def test_a_reset_of_the_compiler_is_for_shared_graphs_too(traced: list[int]) -> None:
    optimizers = train(compiled(adamw, parameters()), 1)
    torch.compiler.reset()
    train(optimizers, 1)
    assert len(traced) == 2


def test_few_optimizers_share_what_is_compiled_too(traced: list[int]) -> None:
    train(compiled(adamw, parameters(SHAPES[:3])), 2)
    assert len(traced) == 1


def test_hooks_of_an_optimizer_are_called(traced: list[int]) -> None:
    """One with a hook takes its steps by itself, the others together."""
    optimizers = compiled(adamw, parameters([*SHAPES, (8, 8)]))
    called: list[Any] = []
    optimizers[-1].register_step_post_hook(lambda *_: called.append(1))
    train(optimizers, 3)
    assert len(called) == 3
    assert len(traced) == 2


def test_a_gradient_that_is_missing_at_times() -> None:
    optimizers = compiled(adamw, parameters())
    one = collage_fx.compile_(adamw(parameters()))
    for i in range(4):
        for found in (optimizers, [one]):
            loss(params_of(found)[i % 2 :], i).backward()
            for optimizer in found:
                optimizer.step()
                optimizer.zero_grad()
    assert same(bits(optimizers), bits([one]))


@pytest.mark.slow
def test_no_size_is_in_a_kernel() -> None:
    """Sizes are therefore no part of what optimizers have to agree in: nor are dimensions."""
    keys = []
    for shape in [(7,), (4, 3), (2, 3, 2), (5, 1)]:
        torch.compiler.reset()
        before = dict(MULTI_TENSOR_KERNELS)
        MULTI_TENSOR_KERNELS.clear()
        train(compiled(adamw, parameters([shape]), multi_tensor=True), 1)
        keys.append(set(MULTI_TENSOR_KERNELS))
        MULTI_TENSOR_KERNELS.update(before)
    assert keys[0] and all(found == keys[0] for found in keys)


def test_rounding_by_chance_is_each_ones_own() -> None:
    def by_chance(**options: Any) -> list[Tensor]:
        optimizers = compiled(
            lambda ps: SGD(ps, lr=1e-5),
            parameters(SHAPES[:3]),
            stochastic_rounding=True,
            **options,
        )
        return bits(train(optimizers))

    found = by_chance()
    assert same(found, by_chance(**ALONE))
    assert not same(found, by_chance(seed=1))
