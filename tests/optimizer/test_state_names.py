"""A state has a kind and a parameter, whatever words their names have.

For runtime.storage.state_name.
"""

import copy
import pickle
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

import collage_fx
from collage_fx.diagnosis.stats import UpdateStats
from collage_fx.inspection.page.states import states_of
from collage_fx.inspection.update_stats import Measurement
from collage_fx.optimizer.checkpoints.copying import _restore
from collage_fx.optimizer.checkpoints.history import history_of
from collage_fx.runtime.residuals.store import STORE
from collage_fx.runtime.storage.state_name import StateName

GATE = "weight of gate"
MIXED = {"param": "remainder16", "exp_avg": "mcf3", "*": "mcf2"}
WORDS = {"remainder16": [torch.int16], "mcf3": [torch.bfloat16] * 2, "mcf2": [torch.bfloat16]}


def split(name: str) -> tuple[str, str]:
    """The control: the kind and the parameter by the text, as it is split from the left."""
    first, _, owner = name.partition(" of ")
    return (first, owner) if owner else ("param", first)


def module() -> nn.Module:
    made = nn.Module()
    made.register_parameter(GATE, nn.Parameter(torch.ones(8, dtype=torch.bfloat16)))
    made.get_parameter(GATE).grad = torch.full((8,), 2**-9, dtype=torch.bfloat16)
    return made


def words(tensor: Tensor) -> list[torch.dtype]:
    return [r.dtype for r in collage_fx.residuals(tensor)]


def test_a_name_is_shown_as_ever() -> None:
    assert str(StateName("exp_avg", "w")) == "exp_avg of w" and str(StateName("m")) == "m"
    assert str(StateName(None, "w")) == "w" and StateName(None, "w").kind == "param"
    assert StateName("param", "w") != StateName(None, "w") != StateName("", "w")
    assert split("exp_avg of w") == ("exp_avg", "w") and split("w") == ("param", "w")


def test_a_parameter_with_words_in_its_name_is_of_the_kind_param() -> None:
    gate = module()
    p = gate.get_parameter(GATE)
    optimizer = AdamW(gate.parameters(), lr=1e-3)
    step = collage_fx.compile(optimizer, storage=MIXED, level="all")
    for _ in range(3):
        step()
    for key, storage in (("exp_avg", "mcf3"), ("exp_avg_sq", "mcf2")):
        assert words(optimizer.state[p][key]) == WORDS[storage]
    assert words(p) == WORDS["remainder16"]
    kinds = {"param": GATE, "exp_avg": GATE, "exp_avg_sq": GATE}
    states = collage_fx.report(step, model=gate).states
    assert {s.state_name.kind: s.state_name.parameter for s in states} == kinds
    assert [s.name for s in states] == [GATE, f"exp_avg of {GATE}", f"exp_avg_sq of {GATE}"]
    assert split(states[0].name) == ("weight", "gate"), "the control"
    found = collage_fx.explain(step, model=gate)
    rows = [(r["kind"], r["parameter"]) for r in found.to_dict()["states"]]
    assert rows[:2] == [("parameter", GATE), ("exp_avg", GATE)]
    page = states_of(found, [])
    assert page.layers == [GATE] and {"parameter", "exp_avg"} < {r.kind for r in page.rows}
    saved = optimizer.state_dict()["state"][0]
    assert any("mcf3" in key for key in saved) and any("remainder16" in key for key in saved)


def test_statistics_of_it_are_those_of_a_parameter() -> None:
    stats = {StateName(None, GATE): UpdateStats(2.0), StateName("exp_avg", GATE): UpdateStats(1.0)}
    measured = Measurement(1, stats)
    assert measured.states.keys() == {GATE, f"exp_avg of {GATE}"}
    assert {kind: s.count for kind, s in measured.kinds().items()} == {"parameter": 2, "exp_avg": 1}
    assert measured.layers().keys() == {GATE}


def test_a_function_gives_it_the_storage_of_parameters_compiled_and_recorded() -> None:
    def step(params: dict[str, Tensor], m: Tensor) -> None:
        with torch.no_grad():
            m.mul_(0.999).add_(params[GATE], alpha=0.001)
            params[GATE].add_(m, alpha=-0.01)

    found = {}
    for way in ("default", "force_eager"):
        p = torch.ones(8, dtype=torch.bfloat16, requires_grad=True)
        m = torch.zeros(8, dtype=torch.bfloat16)
        compiled = collage_fx.compile(step, storage={"param": "remainder16", "*": "mcf2"})
        with torch.compiler.set_stance(way):
            for _ in range(3):
                compiled({GATE: p}, m)
        found[way] = words(p), words(m)
    assert found["default"] == found["force_eager"] == (WORDS["remainder16"], WORDS["mcf2"])


class Sums(Optimizer):
    """An optimizer with words in the name of a state, and one called as parameters are."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            for key in ("sum of squares", "param"):
                state.setdefault(key, torch.zeros_like(p)).mul_(0.999).add_(p.grad, alpha=0.001)
            p.sub_(state["sum of squares"], alpha=0.01)


def test_the_key_of_a_state_may_have_words_or_that_of_parameters() -> None:
    p = module().get_parameter(GATE)
    optimizer = Sums([p])
    storage = {"sum of squares": "mcf3", "param": "remainder16"}
    step = collage_fx.compile(optimizer, storage=storage, level="all")
    for _ in range(3):
        step()
    assert words(optimizer.state[p]["sum of squares"]) == WORDS["mcf3"]
    assert split("sum of squares of w")[0] == "sum", "the control: no pattern would fit it"
    names = [s.state_name for s in collage_fx.report(step).states]
    assert [n.is_param for n in names] == [True, False, False] and len(set(map(str, names))) == 3


def test_copies_and_pickles_keep_the_kind() -> None:
    optimizer = AdamW(module().parameters(), lr=1e-3)
    with torch.compiler.set_stance("force_eager"):
        step = collage_fx.compile(optimizer, storage=MIXED, level="all")
        step()
        step()
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        (p,) = other.param_groups[0]["params"]
        residual = STORE.get(other.state[p]["exp_avg"])
        assert residual is not None and residual.name.kind == "exp_avg"
        old = (p, "a name", "remainder16", collage_fx.residuals(p), 0, None)
        STORE.drop(p)
        _restore(other, [old], history_of(other))  # a pickle of an earlier version has text
        assert STORE.get(p).name == StateName("a name")  # type: ignore[union-attr]
