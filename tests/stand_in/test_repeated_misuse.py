"""Steps that may not be repeated, or not so: what a first version got wrong.

For stand_in.repeated_step.
"""

import warnings
import weakref
from typing import Any

import pytest
import torch
from repeated_steps import compare, counted, give_gradients, made, params_of, trained, values
from torch.optim import SGD, AdamW, Optimizer

import collage_fx
from collage_fx.runtime.kernels.cpp_loop import Loop

pytestmark = pytest.mark.kernels


def test_a_sparse_gradient_is_refused_as_by_the_optimizer_itself() -> None:
    optimizer = made(AdamW, "mcf2", lr=1e-3)
    trained(optimizer, 6)
    give_gradients(optimizer, 6)
    p = params_of(optimizer)[1]
    p.grad = torch.zeros_like(p).to_sparse(1)
    warned = pytest.warns(collage_fx.CollageWarning, match="sparse")
    with pytest.raises(RuntimeError, match="sparse"), warned:
        optimizer.step()


@pytest.mark.slow
def test_a_list_in_a_group_may_change_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> Optimizer:
        optimizer = made(AdamW, "mcf2", lr=1e-3)
        optimizer.param_groups[0]["betas"] = [0.9, 0.999]
        return optimizer

    def change(optimizer: Optimizer, i: int) -> None:
        if i == 7:
            optimizer.param_groups[0]["betas"][0] = 0.1

    compare(monkeypatch, make, 10, change)


def test_two_optimizers_of_one_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both know of the other's writes: residuals are not cleared, and the bits are those of old."""
    order = "abababaaaabbbbab"
    results = []
    for allowed in (True, False):
        torch.compiler.reset()
        with counted(monkeypatch, allowed=allowed):
            both = {name: made(AdamW, "mcf2", lr=1e-3) for name in "ab"}
            both["b"].param_groups[0]["params"][:] = params_of(both["a"])
            for i, name in enumerate(order):
                give_gradients(both["a"], i)
                with warnings.catch_warnings():
                    warnings.simplefilter("error", collage_fx.CollageWarning)
                    both[name].step()
        results.append([t for one in both.values() for t in values(one)])
    assert all(map(torch.equal, *results))


def test_gradients_are_kept_until_the_kernels_have_read_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another thread takes them away while the kernels run."""
    optimizer = made(SGD, "mcf2", lr=1e-2)
    trained(optimizer, 6)
    give_gradients(optimizer, 6)
    seen: list[Any] = [weakref.ref(p.grad) for p in params_of(optimizer)]
    launch = Loop.launch

    def taken(self: Loop, *args: Any) -> None:
        optimizer.zero_grad()
        assert all(reference() is not None for reference in seen)
        launch(self, *args)

    monkeypatch.setattr(Loop, "launch", taken)
    with counted(monkeypatch, allowed=True) as repeats:
        optimizer.step()
    assert len(repeats) == 1 and not any(reference() is not None for reference in seen)
