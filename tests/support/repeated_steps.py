"""Optimizers whose steps may be repeated, and the same steps when they may not."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

import collage_fx
from collage_fx.binding.bound_graph import BoundGraph
from collage_fx.record.steps import Steps
from collage_fx.stand_in.repeated_step import RepeatedStep


class Passing(TorchDispatchMode):
    """Does what it is asked for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


SIZES = [(3,), (5, 2), (16,), (4, 4), (33,), (7,), (2, 3), (64,), (9,)]


def params(seed: int, sizes: Any = SIZES) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(n, generator=generator).bfloat16()) for n in sizes]


def made(
    kind: Any, storage: str, by_chance: bool = False, sizes: Any = SIZES, **options: Any
) -> Optimizer:
    optimizer: Optimizer = kind(params(0, sizes), **options)
    optimizer.step = collage_fx.compile(  # type: ignore[method-assign]
        optimizer, storage=storage, stochastic_rounding=by_chance
    )
    return optimizer


def params_of(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def give_gradients(optimizer: Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in params_of(optimizer):
        p.grad = torch.randn(p.shape, generator=generator).bfloat16().to(p.dtype)


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
            patch.setattr(BoundGraph, "run", lambda *_: None)
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
    # Assertions of this folder are not rewritten: they say by themselves what differs.
    assert len(bits) == len(other_bits), (len(bits), len(other_bits))
    unlike = [
        k for k, pair in enumerate(zip(bits, other_bits, strict=True)) if not torch.equal(*pair)
    ]
    assert not unlike, f"values {unlike} have other bits"
    for what, ours, other in zip(
        ("versions", "warnings", "reports"), same, other_same, strict=True
    ):
        assert ours == other, f"{what} differ: {ours} and {other}"
    assert not none, f"steps {none} were repeated"
    return repeats


def write(optimizer: Optimizer) -> None:
    with torch.no_grad():
        params_of(optimizer)[3].mul_(0.5)


def give_data(optimizer: Optimizer) -> None:
    p = params_of(optimizer)[3]
    p.data = p.detach() * 0.5


def give_transposed(optimizer: Optimizer) -> None:
    p = params_of(optimizer)[1]
    p.grad = p.grad.t().contiguous().t()  # type: ignore[union-attr]


def replace_state(optimizer: Optimizer) -> None:
    state = optimizer.state[params_of(optimizer)[2]]
    state["exp_avg_sq"] = state["exp_avg_sq"] * 0.5


def add_group(optimizer: Optimizer) -> None:
    p = torch.nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
    p.grad = torch.ones_like(p)
    optimizer.add_param_group({"params": [p]})


def load_residual(optimizer: Optimizer) -> None:
    p = params_of(optimizer)[2]
    collage_fx.load_residuals(p, [torch.full_like(r, 1e-4) for r in collage_fx.residuals(p)])


def hook(optimizer: Optimizer) -> None:
    optimizer.register_step_post_hook(lambda one, *_: write(one))


def call_wrongly(optimizer: Optimizer) -> None:
    with pytest.raises(TypeError):
        optimizer.step(None, None)  # type: ignore[call-arg]


CHANGES: dict[str, Callable[[Optimizer], Any]] = {
    "written": write,
    "data": give_data,
    "no gradient": lambda o: setattr(params_of(o)[4], "grad", None),
    "transposed gradient": give_transposed,
    "state": replace_state,
    "state lost": lambda o: o.state.pop(params_of(o)[-3]),
    "group": add_group,
    "rate": lambda o: o.param_groups[0].update(lr=3e-3),
    "betas": lambda o: o.param_groups[0].update(betas=(0.8, 0.99)),
    "maximize": lambda o: o.param_groups[0].update(maximize=True),
    "loaded": lambda o: o.load_state_dict(o.state_dict()),
    "residual": load_residual,
    "hook": hook,
    "mode": lambda o: Passing(),
    "stance": lambda o: torch.compiler.set_stance("force_eager"),
    "another backend": lambda o: torch.compiler.set_stance("default", force_backend="eager"),
    "gradients off": lambda o: torch.no_grad(),
    "wrong call": call_wrongly,
}


def changing(name: str, at: int) -> Callable[[Optimizer, int], Any]:
    """Return a change for `trained`: one of `CHANGES`, before this step, and in it only."""

    return by_turns({at: name})


def by_turns(names: dict[int, str]) -> Callable[[Optimizer, int], Any]:
    """Return several such changes, by the numbers of their steps."""

    def change(optimizer: Optimizer, i: int) -> Any:
        entered = CHANGES[names[i]](optimizer) if i in names else None
        return entered if hasattr(entered, "__enter__") else None

    return change
