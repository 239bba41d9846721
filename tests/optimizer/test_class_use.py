"""Classes that compile their own step, in use: odd classes, wrapped steps, copies, checkpoints.

For optim and first_use.
"""

import abc
import copy
import dataclasses
import functools
import inspect
import multiprocessing
import pickle
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from own_classes import RATE, Counting, Descent, by_hand, same, spawned, stepped, told
from repeated_steps import give_gradients, params, params_of
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim.lr_scheduler import StepLR

import collage_fx
from collage_fx import compensated, optim


class Abstract(Descent, abc.ABC):
    @abc.abstractmethod
    def name(self) -> str: ...


class Slotted(Descent):
    __slots__ = ("extra",)


@dataclasses.dataclass(eq=True)
class Data(Descent):
    params: Any
    lr: float = RATE

    def __post_init__(self) -> None:
        Descent.__init__(self, self.params, self.lr)


@pytest.mark.slow
def test_odd_classes_are_classes_too() -> None:
    expected = stepped(by_hand(Descent, params(0)))
    with pytest.raises(TypeError, match="abstract"):
        compensated(Abstract)(params(0))
    concrete = type("Concrete", (compensated(Abstract),), {"name": lambda self: "it"})
    for cls in (concrete, compensated(Slotted), compensated(Data), compensated(Descent)):
        assert same(stepped(cls(params(0), lr=RATE)), expected), cls


@pytest.mark.slow
def test_a_class_that_is_derived_from_one_has_its_own_step_compiled() -> None:
    class Original(torch.optim.AdamW):
        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(params, lr=lr)
            self.count = 0

        step = torch.no_grad()(lambda self, closure=None: Original.counted(self, closure))

        def counted(self, closure: Any) -> Any:
            self.count += 1
            return super().step(closure)

    ours = stepped(Counting(params(0), RATE))
    expected = stepped(by_hand(Original, params(0), RATE, options={"storage": "mcf3"}))
    assert ours.count == 4 and same(ours, expected)
    assert same(stepped(compensated(Counting)(params(0), RATE)), expected)
    more = stepped(compensated(Counting, level="all", storage="ulp8")(params(0), RATE))
    assert "level=all, arithmetic=eft, storage=mcf3" in told(more)[1]  # its own go before


def _called(kind: str, optimizer: Any, step: Any) -> Any:
    if kind == "within a step":
        return torch.compile(lambda: optimizer.step(), backend="eager")
    if kind in ("eager", "collage"):
        return torch.compile(step, backend=kind)
    return optimizer.step if kind == "wrapped" else step


@pytest.mark.parametrize("kind", ["held", "wrapped", "eager", "collage", "within a step"])
@pytest.mark.quick("within a step")
def test_the_step_may_be_held_wrapped_and_compiled_before_its_first_use(kind: str) -> None:
    expected = stepped(by_hand(torch.optim.SGD, params(0), RATE))
    torch.compiler.reset()
    optimizer: Any = optim.SGD(params(0), RATE)
    step = optimizer.step
    assert step.__func__ and "closure" in inspect.signature(step).parameters
    if kind == "wrapped":
        wrapper = functools.wraps(step.__func__)(lambda _, step=step: step())
        optimizer.step = types.MethodType(wrapper, optimizer)
    call = _called(kind, optimizer, step)
    for seed in range(4):
        give_gradients(optimizer, seed)
        call()
    assert same(optimizer, expected)
    assert kind != "wrapped" or optimizer.step.__func__ is wrapper
    assert told(optimizer) == told(expected)


@pytest.mark.slow
def test_schedulers_scalers_and_closures_work_with_it() -> None:
    optimizer = optim.AdamW(params(0), RATE, fused=True)
    scheduler, scaler = StepLR(optimizer, 2), torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # PyTorch has one where no step went by the scheduler
        for seed in range(4):
            give_gradients(optimizer, seed)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(RATE / 100)
    assert float(optimizer.step(lambda: torch.tensor(3.0))) == 3
    assert all(s.steps == 5 for s in collage_fx.report(optimizer).states)


def test_groups_may_come_and_monitors_look_before_the_first_use() -> None:
    expected = stepped(by_hand(torch.optim.SGD, params(0), RATE))
    first, *others = params(0)
    optimizer = optim.SGD([first], RATE)
    optimizer.add_param_group({"params": others})
    assert not collage_fx.report(optimizer).states
    with collage_fx.monitor(optimizer, every=1) as monitor:
        stepped(optimizer)
    assert same(optimizer, expected) and len(monitor.history) == 4


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
}


@pytest.mark.parametrize(
    ("how", "before", "kind"),
    [
        ("deepcopy", 0, "derived"),
        ("deepcopy", 2, "of torch.optim"),
        ("pickle", 0, "of torch.optim"),
        ("pickle", 2, "compensated"),
        ("pickle", 2, "derived"),
    ],
)
@pytest.mark.quick("pickle-2-compensated")
def test_a_copy_is_of_the_class_and_has_options_and_residuals(
    how: str, before: int, kind: str
) -> None:
    made: dict[str, Any] = {
        "of torch.optim": lambda: optim.AdamW(params(0), RATE, storage="mcf3"),
        "compensated": lambda: compensated(torch.optim.AdamW, storage="mcf3")(params(0), RATE),
        "derived": lambda: Counting(params(0), RATE),
    }
    original = stepped(made[kind](), before)
    twin = COPIES[how](original)
    twin.count = 0  # which no class of PyTorch's copies
    assert type(twin) is type(original) and COPIES[how](type(twin)) is type(twin)
    for one in (original, twin):
        for seed in range(before, 4):
            give_gradients(one, seed)
            one.step()
    assert same(twin, original) and "storage=mcf3" in told(twin)[1]


@pytest.mark.slow
def test_a_process_that_is_spawned_is_given_classes_and_optimizers() -> None:
    cls = compensated(torch.optim.SGD, storage="mcf3")
    optimizer = stepped(cls(params(0, [(8,)]), lr=RATE), 2)
    expected = stepped(copy.deepcopy(optimizer), 2)
    optimizer.zero_grad()  # gradients of parameters are not pickled
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    process = context.Process(target=spawned, args=(cls, optim.SGD, optimizer, answers))
    process.start()
    found = answers.get()
    process.join()
    (p,) = expected.param_groups[0]["params"]
    assert found == collage_fx.value(p).tolist() != p.tolist()


MAKERS: dict[str, Any] = {
    "ours": lambda: optim.AdamW(params(0), RATE),
    "by hand": lambda: by_hand(torch.optim.AdamW, params(0), RATE),
    "plain": lambda: torch.optim.AdamW(params(0), RATE),
}


def resumed(first: str, then: str) -> tuple[Any, list[str]]:
    """Return an optimizer that goes on where another has stopped, and what was warned of."""
    run, again = stepped(MAKERS[first](), 2), MAKERS[then]()
    with torch.no_grad():
        for p, q in zip(params_of(run), params_of(again), strict=True):
            q.copy_(p)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        again.load_state_dict(copy.deepcopy(run.state_dict()))
        for seed in (2, 3):
            give_gradients(again, seed)
            again.step()
    return again, [str(w.message) for w in caught if w.category is collage_fx.CollageWarning]


def test_checkpoints_go_both_ways() -> None:
    unbroken = stepped(MAKERS["ours"]())
    for first, then in (("ours", "ours"), ("ours", "by hand"), ("by hand", "ours")):
        found, said = resumed(first, then)
        assert same(found, unbroken) and not said, (first, then)
    found, said = resumed("plain", "ours")
    expected, also = resumed("plain", "by hand")
    assert same(found, expected) and said == also and "holds no residuals" in said[0]
    plain, said = resumed("ours", "plain")
    (p, *_), (q, *_) = (o.param_groups[0]["params"] for o in (plain, resumed("plain", "plain")[0]))
    assert torch.equal(p, q) and not said, "the high words are those that PyTorch goes on with"


@pytest.mark.parametrize("cls", [optim.AdamW, optim.SGD])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.quick("SGD")
def test_dcp_loads_before_the_first_use(cls: Any, tmp_path: Path) -> None:
    def made(seed: int) -> Any:
        torch.manual_seed(seed)
        model = torch.nn.Linear(4, 4).bfloat16()
        return model, cls(model.parameters(), lr=RATE)

    def train(model: Any, optimizer: Any) -> None:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 4).bfloat16()).sum().backward()
            optimizer.step()

    run, again = made(0), made(1)
    train(*run)
    dcp.save(dict(enumerate(get_state_dict(*run))), checkpoint_id=tmp_path)
    found = dict(enumerate(get_state_dict(*again)))
    dcp.load(found, checkpoint_id=tmp_path)
    set_state_dict(*again, model_state_dict=found[0], optim_state_dict=found[1])
    for one in (run, again):
        train(*one)
    assert torch.equal(*(collage_fx.value(model.weight) for model, _ in (run, again)))
