"""Classes that compile their own step: served as their originals are, and refused by name.

For optim, classes and first_use.
"""

import gc
import inspect
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from own_classes import RATE, Counting, Descent, by_hand, same, stepped, told
from repeated_steps import compare, counted, params, trained
from tensors import error
from torch.optim import Optimizer

import collage_fx
from collage_fx import compensated, optim
from collage_fx.errors import OptionError, SubjectError


@pytest.mark.parametrize("options", [{}, {"storage": "mcf3", "level": "all"}])
@pytest.mark.quick("options0")
def test_it_is_served_as_its_original_is(options: Any) -> None:
    betas = (0.9, 0.99)
    ours = stepped(optim.AdamW(params(0), RATE, betas, **options))
    expected = stepped(by_hand(torch.optim.AdamW, params(0), RATE, betas, options=options))
    again = stepped(compensated(torch.optim.AdamW, **options)(params(0), RATE, betas))
    assert same(ours, expected) and same(again, expected)
    assert told(ours) == told(expected) == told(again)


@pytest.mark.slow
@pytest.mark.kernels
def test_a_quiet_step_is_repeated_without_a_look_at_each_tensor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def made() -> Optimizer:
        return optim.AdamW(params(0), RATE, storage="remainder16")

    repeats = compare(monkeypatch, made, 8)
    with counted(monkeypatch, allowed=True) as by_the_function:
        trained(by_hand(torch.optim.AdamW, params(0), RATE), 8)
    assert repeats == by_the_function and len(repeats) >= 4
    function = by_hand(Descent, params(0)).step.__func__
    assert stepped(made(), 1).step.__func__.__code__ is function.__code__


def test_it_keeps_the_updates_that_its_original_loses() -> None:
    found = {}
    for name, cls, dtype in (
        ("ours", optim.SGD, torch.bfloat16),
        ("plain", torch.optim.SGD, torch.bfloat16),
        ("exact", torch.optim.SGD, torch.float64),
    ):
        p = torch.nn.Parameter(torch.full((8,), 1.5, dtype=dtype))
        optimizer = cls([p], lr=1e-3)
        for _ in range(100):
            p.grad = torch.ones_like(p)
            optimizer.step()
        found[name] = collage_fx.value(p)
    moved = {name: whole - 1.5 for name, whole in found.items()}
    assert error(moved["ours"], moved["exact"]) < 1e-4
    assert error(moved["plain"], moved["exact"]) == 1


def test_each_class_of_torch_optim_has_one_of_its_name() -> None:
    originals = [c for c in vars(torch.optim).values() if inspect.isclass(c)]
    names = {c.__name__ for c in originals if issubclass(c, Optimizer)} - {"Optimizer"}
    assert {*optim.__all__} == {"compensated", *names} and dir(optim) == sorted(optim.__all__)
    for name in names:
        ours, original = getattr(optim, name), getattr(torch.optim, name)
        assert issubclass(ours, original) and ours.__name__ == ours.__qualname__ == name
        assert ours.__module__ == "collage_fx.optim" and "OptionError" in ours.__doc__
        own = [*inspect.signature(original).parameters.values()]
        found = [*inspect.signature(ours).parameters.values()]
        assert found[: len(own)] == own and "storage" in {p.name for p in found[len(own) :]}
        assert inspect.signature(compensated(original)) == inspect.signature(original)
    with pytest.raises(AttributeError):
        optim.Adamw  # noqa: B018


@pytest.mark.slow
def test_nothing_of_the_compiler_is_imported_before_the_first_use() -> None:
    script = """
import sys, torch
from collage_fx.optim import AdamW
p = torch.nn.Parameter(torch.ones(8).bfloat16())
optimizer = AdamW([p], lr=1e-3, storage="remainder16")
torch.optim.lr_scheduler.StepLR(optimizer, 2)
names = "collage_fx.api", "collage_fx.passes.pipeline", "collage_fx.dynamo.backend"
assert not [name for name in names if name in sys.modules]
optimizer.step()
assert all(name in sys.modules for name in names)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["LBFGS", "SparseAdam"])
@pytest.mark.quick("LBFGS")
def test_what_dynamo_does_not_trace_is_recorded_as_by_the_function(name: str) -> None:
    def run(optimizer: Any) -> Any:
        (p,) = optimizer.param_groups[0]["params"]

        def closure() -> Any:
            p.grad = p.detach() * 0.5
            p.grad = p.grad.to_sparse() if name == "SparseAdam" else p.grad
            return p.detach().float().square().sum()

        for _ in range(3):
            loss = closure()
            assert torch.is_tensor(optimizer.step(closure)) and torch.is_tensor(loss)
        return optimizer

    original = getattr(torch.optim, name)
    run(by_hand(original, params(0, [(4, 2)]), lr=1e-3))  # Dynamo tries the first of a process
    ours = run(getattr(optim, name)(params(0, [(4, 2)]), lr=1e-3))
    expected = run(by_hand(original, params(0, [(4, 2)]), lr=1e-3))
    reports = [str(collage_fx.report(o)) for o in (ours, expected)]
    assert "joined" in reports[0] and reports[0] == reports[1]
    assert torch.equal(
        *(collage_fx.value(o.param_groups[0]["params"][0]) for o in (ours, expected))
    )


def test_asked_twice_it_is_one_class_while_anybody_has_it() -> None:
    chosen = {"param": "remainder16", "*": "ulp8"}
    cls = compensated(Descent, storage=chosen, verify=0)
    assert compensated(Descent, verify=0, storage=dict(chosen)) is cls
    assert compensated(cls) is cls and compensated(cls, storage="mcf3") is not cls
    assert compensated(cls, storage="mcf3") is compensated(Descent, verify=0, storage="mcf3")
    assert compensated(optim.AdamW) is compensated(torch.optim.AdamW) is not optim.AdamW
    seen = weakref.ref(compensated(Descent, seed=3))
    gc.collect()
    assert seen() is None, "the original holds on to what was made of it"


def test_an_optimizer_goes_with_what_refers_to_it() -> None:
    for count in (0, 1):
        optimizer = stepped(optim.SGD(params(0), RATE), count)
        seen = weakref.ref(optimizer)
        del optimizer
        gc.collect()
        assert seen() is None, f"after {count} steps"


def test_a_name_that_both_have_is_an_option_of_the_class_and_an_argument_of_it() -> None:
    options = {"seed": 7, "storage": "mcf2", "stochastic_rounding": True}
    optimizer = stepped(compensated(Descent, **options)(params(0), seed=5, other=3))
    assert optimizer.param_groups[0]["seed"] == 5 and optimizer.param_groups[0]["other"] == 3
    assert same(optimizer, stepped(by_hand(Descent, params(0), seed=5, options=options)))
    assert not same(optimizer, stepped(by_hand(Descent, params(0), options=options | {"seed": 5})))


WRONG: list[tuple[type[Exception], str, Callable[[], Any]]] = [
    (SubjectError, "got Linear", lambda: compensated(torch.nn.Linear)),
    (SubjectError, "got int", lambda: compensated(3)),  # type: ignore[arg-type]
    (SubjectError, "got Optimizer", lambda: compensated(Optimizer)),
    (SubjectError, "got Descent", lambda: compensated(Descent(params(0)))),  # type: ignore[arg-type]
    (OptionError, "'storge', did you mean 'storage'", lambda: compensated(Descent, storge="ulp8")),
    (OptionError, "storage='x'", lambda: compensated(Descent, storage="x")),
    (OptionError, "mode='fast'", lambda: compensated(Descent, mode="fast")),
    (OptionError, "'lr' is an argument of Descent", lambda: compensated(Descent, lr=1e-3)),
    (OptionError, "'carries'", lambda: compensated(Descent, carries=("p",))),
    (OptionError, "'lrr', did you mean 'lr'", lambda: optim.AdamW(params(0), lrr=1e-3)),
    (OptionError, "'storge'", lambda: optim.AdamW(params(0), storge=None)),
    (OptionError, "verify=-1", lambda: optim.AdamW(params(0), verify=-1)),
    (TypeError, "lrr", lambda: compensated(torch.optim.SGD)(params(0), lrr=1)),
    (SubjectError, "AdamW is of a class", lambda: collage_fx.compile(optim.AdamW(params(0)))),
    (SubjectError, "Counting is of", lambda: collage_fx.compile_(Counting(params(0), RATE))),
    (SubjectError, "leave .* out", lambda: collage_fx.compile(optim.AdamW(params(0)).step)),
]


@pytest.mark.parametrize(("kind", "message", "call"), WRONG)
def test_mistakes_are_named(kind: type[Exception], message: str, call: Any) -> None:
    Descent(params(0))  # PyTorch changes a class where its first optimizer is made
    before = {**vars(Descent)}
    made = len(Descent.__subclasses__())
    with pytest.raises(kind, match=message):
        call()
    assert {**vars(Descent)} == before and len(Descent.__subclasses__()) == made
