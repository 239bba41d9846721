"""Memory of a segment's last run: nothing in it is used that is not so any more.

For segments.executors, segments.joined_compiler, segments.low_words and segments.segment_graph.
"""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from recorded_steps import LR, Each, start
from torch import Tensor

import collage_fx
from collage_fx.compilation.side_inputs import Code
from collage_fx.runtime.residuals.store import STORE, ResidualStore
from collage_fx.runtime.storage.state_name import StateName
from collage_fx.segments.low_words import LowWords
from collage_fx.segments.segment_graph import Numbers, SeenNumbers

KEPT: list[Tensor] = []
"""Tensors that outlive the segments of a step, so that they are joined."""


def adam(p: Tensor, grad: Tensor, state: dict[str, Any]) -> None:
    if not state:
        state.update(m=torch.zeros_like(p), v=torch.zeros_like(p), rate=LR)
    state["m"].lerp_(grad, 0.1)
    state["v"].mul_(0.999).addcmul_(grad, grad, value=0.001)
    p.data.addcdiv_(state["m"], state["v"].sqrt().add_(1e-8), value=-state["rate"])


def adam_that_keeps(p: Tensor, grad: Tensor, state: dict[str, Any]) -> None:
    adam(p, grad, state)
    KEPT[:] = [state["m"] * 2]


UPDATES = {"rewritten": adam, "joined": adam_that_keeps}


def new_memory(optimizer: Each) -> None:
    for p in optimizer.param_groups[0]["params"]:
        p.data = p.data.clone()


def lost_residuals(optimizer: Each) -> None:
    for p in optimizer.param_groups[0]["params"]:
        STORE.drop(p)


def loaded_residuals(optimizer: Each) -> None:
    for p in optimizer.param_groups[0]["params"]:
        collage_fx.load_residuals(p, [3 + torch.zeros_like(lo) for lo in collage_fx.residuals(p)])


def a_new_state(optimizer: Each) -> None:
    for state in optimizer.state.values():
        state["m"] = state["m"] * 0.5


def a_checkpoint(optimizer: Each) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


def other_owners(optimizer: Each) -> None:
    first, second = optimizer.param_groups[0]["params"]
    optimizer.param_groups[0]["params"][:] = [second, first]
    first.grad, second.grad = second.grad, first.grad


def a_residual_where_none_was(optimizer: Each) -> None:
    for state in optimizer.state.values():
        for t in (state["m"], state["v"]):
            if STORE.get(t) is None:
                collage_fx.load_residuals(t, [torch.ones_like(t, dtype=torch.int16)])


def nothing(optimizer: Each) -> None:
    pass


CHANGES = [
    new_memory,
    lost_residuals,
    loaded_residuals,
    a_new_state,
    a_checkpoint,
    other_owners,
    # The interpreter of graphs rounds one word of 24 otherwise where the graph is made anew.
    pytest.param(a_residual_where_none_was, marks=pytest.mark.kernels),
]


def run(way: str, change: Callable[[Each], None], *storages: str) -> list[Tensor]:
    """Take nine steps in each storage, with a change in between; return all that there is then."""
    params = start(torch.bfloat16)
    optimizer = Each(params, UPDATES[way])
    steps = [
        collage_fx.compile(optimizer, storage=one, record=True)
        for one in storages or ("remainder16",)
    ]
    for k in range(9):
        made = torch.Generator().manual_seed(k)
        for p in params:
            p.grad = torch.randn(p.shape, generator=made).bfloat16()
        if k == 5:
            change(optimizer)
        for step in steps:
            step()
    tensors = [*params, *(s[key] for s in optimizer.state.values() for key in "mv")]
    for step in steps:
        assert step._collage.steps().executors.runs[way] > 5
    found = [(t, STORE.get(t)) for t in tensors]
    lows = [lo.float() for _, r in found if r is not None for lo in r.components]
    return [*(t.detach() for t in tensors), *lows]


def remember_nothing(patch: pytest.MonkeyPatch) -> None:
    """Have each run of a segment compiled anew."""
    patch.setattr(Numbers, "have", lambda *_: False)


def see_no_residual(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Code, "misses_residual", lambda *_: False)


def ask_no_storage(patch: pytest.MonkeyPatch) -> None:
    own = LowWords.ensure
    patch.setattr(LowWords, "ensure", lambda self, o: STORE.get(o.tensor) or own(self, o))


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


@pytest.mark.filterwarnings("ignore::collage_fx.runtime.errors.CollageWarning")
@pytest.mark.parametrize("way", UPDATES)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.quick("new_memory-rewritten", "lost_residuals-joined", "a_checkpoint-rewritten")
def test_a_change_between_steps_is_seen(
    way: str, change: Callable[[Each], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = run(way, change)
    remember_nothing(monkeypatch)
    assert same(found, run(way, change))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::collage_fx.runtime.errors.CollageWarning")
@pytest.mark.parametrize("way", UPDATES)
def test_two_steps_of_other_storages_do_not_take_what_the_other_has_left(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = run(way, nothing, "remainder16", "mcf2")
    remember_nothing(monkeypatch)
    assert same(found, run(way, nothing, "remainder16", "mcf2"))


@pytest.mark.filterwarnings("ignore::collage_fx.runtime.errors.CollageWarning")
@pytest.mark.parametrize(
    ("way", "change", "storages", "blind"),
    [
        ("rewritten", a_residual_where_none_was, (), see_no_residual),
        ("joined", nothing, ("mcf2",), ask_no_storage),
    ],
)
@pytest.mark.quick("joined-nothing-*")
def test_what_does_not_look_is_wrong(
    way: str, change: Any, storages: tuple[str, ...], blind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run(way, change, "remainder16", *storages)
    blind(monkeypatch)
    try:
        found = run(way, change, "remainder16", *storages)
    except TypeError:  # a low word is missing
        return
    assert not same(found, expected)


def words_of(state: Tensor) -> LowWords:
    owned: Any = SimpleNamespace(tensor=state)
    words = LowWords([torch.bfloat16], False, lambda _: "", lambda _: False, 0, print)
    words.begin([owned])
    return words


def test_a_residual_that_comes_or_goes_in_the_middle_of_a_step_is_seen() -> None:
    state = torch.zeros(3, dtype=torch.bfloat16)
    words = words_of(state)
    (owned,) = words.states_in(state)
    assert words.of_state(owned) is None
    residual = STORE.ensure(state, "mcf2", StateName("a state"))
    assert words.of_state(owned) is residual
    assert words.wrote(state) and words.of_state(owned) is residual
    STORE.drop(state)
    assert words.of_state(owned) is None


def test_a_state_has_moved_if_anything_of_its_layout_is_another() -> None:
    memory = torch.zeros(5, 4, dtype=torch.bfloat16)
    state = memory[:4].detach()
    words = words_of(state)
    (piece,) = words.input(state).pieces
    assert not piece.moved
    for other in (memory[1:], memory[:4].t(), memory[:4].clone(), memory[:4].view(torch.float16)):
        state.data = other
        assert piece.moved
    state.data = memory[:4]
    assert not piece.moved


def test_numbers_are_compared_bit_for_bit() -> None:
    seen = SeenNumbers()
    one, other = (float("nan") for _ in range(2))
    for floats in ([0.0, 1.0, 1.0], [0.0, 2.0, 2.0], [0.0, one, other]):
        seen.see(floats)
    numbers = seen.with_inputs(seen.floats)
    assert numbers.changing == [1] and seen.runs == 3
    assert numbers.have([0.0, 4.0, 4.0]) and numbers.have([0.0, math.nan, math.nan])
    assert not numbers.have([-0.0, 4.0, 4.0]) and not numbers.have([0.0, 4.0, 5.0])
    seen.see([0.0, 4.0, 5.0])
    seen.see([-0.0, 4.0, 6.0])
    assert seen.with_inputs(seen.floats).changing == [0, 1, 2]


def test_a_residual_that_is_found_by_its_memory_is_asked_for() -> None:
    store = ResidualStore()
    tensor = torch.zeros(3, dtype=torch.bfloat16)
    residual = store.ensure(tensor, "mcf2", "a tensor")
    before = store.generation
    store.share_by_memory(tensor)
    assert store.generation > before
    assert store.get(tensor.detach()) is residual
