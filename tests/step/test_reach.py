"""Functions that update what they refer to: an optimizer, a model, or tensors around them.

For optimizer.discovery and step.subject.
"""

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tensors import bf16, with_grads
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import collage_fx
from collage_fx.runtime.errors import CollageWarning

RATE = 2.0**-10


def move(p: Tensor) -> None:
    """Write outside of compiled graphs, through a view."""
    if p.sum().item() < 1e9:
        p.view(-1)[1:].sub_(RATE)


@dataclass(slots=True)
class Bag:
    params: list[Tensor]
    whole: Any = None

    def __post_init__(self) -> None:
        self.whole = self


class Owner:
    def __init__(self, p: nn.Parameter) -> None:
        self.model = nn.ParameterList([p])

    def update(self) -> None:
        for p in self.model:
            move(p)


class Wrapper:
    """Holds an optimizer, and is none."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def __call__(self) -> None:
        self.optimizer.step()


def each(params: Any) -> None:
    for p in params:
        move(p)


def around(p: nn.Parameter) -> Callable[[], None]:
    def update() -> None:
        move(p)

    return update


REACHED: dict[str, Callable[[nn.Parameter], tuple[Any, tuple[Any, ...]]]] = {
    "a list": lambda p: (each, ([p],)),
    "a model": lambda p: (lambda m: each(m.parameters()), (nn.ParameterList([p]),)),
    "a dataclass": lambda p: (lambda bag: each(bag.params), (Bag([p]),)),
    "a closure": lambda p: (around(p), ()),
    "a method": lambda p: (Owner(p).update, ()),
    "an optimizer": lambda p: (lambda o: o.step(), (SGD([p], lr=RATE, fused=True),)),
    "a closure over one": lambda p: (Wrapper(SGD([p], lr=RATE, fused=True)).__call__, ()),
    "an object": lambda p: (Wrapper(SGD([p], lr=RATE, fused=True)), ()),
}


@pytest.mark.parametrize("how", REACHED)
@pytest.mark.quick("a closure", "a closure over one", "an object")
def test_what_a_function_reaches_is_compensated(how: str) -> None:
    p = nn.Parameter(torch.ones(4).bfloat16())
    p.grad = torch.ones_like(p)
    function, args = REACHED[how](p)
    # Recorded, which has to know the parameters beforehand.
    step = collage_fx.compile(function, without=("join",))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", CollageWarning)
        for _ in range(4):
            step(*args)
    assert torch.equal(collage_fx.value(p)[1:], torch.full((3,), 1 - 4 * RATE).double())


def test_a_parameter_out_of_reach_is_named() -> None:
    p = nn.Parameter(torch.ones(4).bfloat16())
    step = collage_fx.compile(torch.no_grad()(each), without=("join",))
    with pytest.warns(CollageWarning, match=r"writes a parameter of shape \(4,\).*as an argument"):
        for _ in range(2):
            step(iter([p]))


class Halves(Optimizer):
    """A graph break cuts its step after which the optimizer is not in sight."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        (p,) = self.param_groups[0]["params"]
        v, g = self.state[p].setdefault("v", torch.zeros_like(p)), p.grad
        p.addcdiv_(g, v.sqrt().add_(1e-3), value=-1e-4)
        torch._dynamo.graph_break()
        v.mul_(0.999).addcmul_(g, g, value=0.001)


@pytest.mark.parametrize("frozen", [False, True])
def test_patterns_and_residuals_of_a_step_in_pieces(frozen: bool) -> None:
    (p,) = with_grads([bf16(4)])
    optimizer = Halves([p], {})
    options = {"storage": {"param": "mcf2", "v": "ulp8"}}
    step = torch.compile(optimizer.step, backend="collage", options=options)
    with freeze() if frozen else contextlib.nullcontext(), warnings.catch_warnings():
        warnings.simplefilter("error", CollageWarning)
        for _ in range(3):
            step()
        saved = optimizer.state_dict()["param_groups"][0]
    (of_p,), (of_v,) = (collage_fx.residuals(x) for x in (p, optimizer.state[p]["v"]))
    assert (of_p.dtype, of_v.dtype) == (torch.bfloat16, torch.int8)
    assert any("collage" in key for key in saved)


@contextlib.contextmanager
def freeze() -> Iterator[None]:
    """Hide all objects from who looks for them among the garbage collector's, as servers do."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def test_two_functions_of_one_name_are_warned_of() -> None:
    def made() -> list[Callable[[Tensor], None]]:
        def update(p: Tensor) -> None:
            p[1:].sub_(RATE)

        first = update

        def update(p: Tensor) -> None:  # type: ignore[no-redef]
            p[1:].add_(RATE)

        return [first, update]

    for function in made():
        with pytest.warns(CollageWarning, match="not compensated: p"):
            torch.compile(function, backend="collage")(torch.ones(4).bfloat16())


class Average(SGD):
    """Has an average of its model's weights, in a model."""

    def __init__(self, model: nn.Module, average: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.5)
        self.average = average

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for p, a in zip(self.param_groups[0]["params"], self.average.parameters(), strict=True):
            a.lerp_(p, 2.0**-10)


def test_an_average_of_the_weights_in_a_model_is_compensated() -> None:
    ones = nn.Parameter(torch.ones(4).bfloat16())
    average = nn.ParameterList([torch.ones(4).bfloat16()])
    optimizer = Average(nn.ParameterList([ones]), average)
    step, exact = collage_fx.compile(optimizer), torch.ones(4).double()
    for k in range(4):
        ones.grad = torch.ones_like(ones)
        step()
        exact.lerp_(torch.full((4,), 1 - 0.5 * (k + 1)).double(), 2.0**-10)
    found = collage_fx.value(average[0]).detach() - 1
    assert (found - (exact - 1)).norm() < 1e-2 * (exact - 1).norm()
    assert any("average" in state.name for state in collage_fx.report(step).states)


class Equal(SGD):
    """Compares by identity, and so has no hash."""

    def __eq__(self, other: object) -> bool:
        return self is other


@pytest.mark.parametrize("way", ["compile", "string"])
def test_an_optimizer_without_a_hash(way: str) -> None:
    (p,) = with_grads([bf16(4)])
    optimizer = Equal([p], lr=1e-4)
    string = way == "string"
    step: Any = (
        torch.compile(optimizer.step, backend="collage")
        if string
        else collage_fx.compile(optimizer)
    )
    for _ in range(2):
        step()
    assert collage_fx.residuals(p)
