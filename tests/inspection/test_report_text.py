"""The text of explain and report: rows that say the same, names of the model, widths, machines.

For optimizer.state_table and optimizer.parameter_names.
"""

import json
from typing import Any

import pytest
import torch
from support.interpreter import without_compiler
from support.tensors import bf16, with_grads

import collage_fx
from collage_fx.errors import SubjectError
from collage_fx.optimizer import state_table
from collage_fx.optimizer.parameter_names import names_of
from collage_fx.optimizer.state_table import table


def _layers(n: int) -> torch.nn.Module:
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, n, enable_nested_tensor=False).bfloat16()
    for p in model.parameters():
        p.grad = torch.full_like(p, 0.01)
    return model


def _lines(found: object) -> list[str]:
    return str(found).splitlines()


def test_the_layers_of_a_model_fit_a_screen() -> None:
    model = _layers(4)
    optimizer = torch.optim.AdamW(model.parameters())
    found = collage_fx.explain(optimizer)
    lines = _lines(found)
    assert len(lines) <= 40 and max(map(len, lines)) <= 120
    assert any(line.startswith("48 x exp_avg_sq") and "remainder16" in line for line in lines)
    assert found.plan[0].name == "layers.0.self_attn.in_proj_weight"
    found.verbose = True
    rows = [line for line in _lines(found) if "layers.3.norm2.bias" in line]
    assert len(rows) == 4, "the parameter, its two moments and its step"


def test_groups_differ_where_they_say_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "90")
    params = with_grads([bf16(4), bf16(4), bf16(4)])
    groups = [{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.0}]
    found = collage_fx.explain(torch.optim.SGD(groups, 0.01, momentum=0.9, weight_decay=0.1))
    lines = _lines(found)
    assert any(line.startswith("2 x parameter, ") for line in lines)
    assert any(line.startswith("param_groups[1]") for line in lines)
    assert sum(line.startswith("2 x ") for line in lines) == 2, "the momenta differ too"
    assert max(map(len, lines)) <= 90


def test_for_machines_there_is_a_row_for_each_state() -> None:
    params = with_grads([bf16(4), bf16(4)])
    found = collage_fx.explain(torch.optim.AdamW(params))
    told = json.loads(json.dumps(found.to_dict()))
    assert told == found.to_dict(), "nothing that JSON changes"
    states = {state["name"]: state for state in told["states"]}
    assert len(states) == len(found.plan) == 8
    second = states["exp_avg_sq of param_groups[0].params[1]"]
    assert second["kind"] == "exp_avg_sq" and second["verdict"] == "compensated"
    assert second["residual_bytes"] == 8 and second["shape"] == [4]
    assert told["classes"] and told["residual_bytes"] == found.residual_bytes


@pytest.mark.parametrize("how", ["model", "given", "found", "wrapped"])
def test_names_are_those_of_the_model(how: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)).bfloat16()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    wrapped = torch.nn.ModuleDict({"module": model}) if how == "wrapped" else model
    named = model.named_parameters() if how == "given" else model.parameters()
    step = collage_fx.compile(torch.optim.SGD(named, 0.1))
    step()
    options = {} if how in ("given", "found") else {"model": wrapped}
    names = {state.name for state in collage_fx.explain(step, **options).plan}
    assert names == {"0.weight", "0.bias", "1.weight", "1.bias"}
    report = collage_fx.report(step, **options)
    assert {s["name"] for s in json.loads(json.dumps(report.to_dict()))["states"]} == names


def test_names_that_clash_stay_whole_and_strange_modules_are_left_alone() -> None:
    class Clashing(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = torch.nn.Linear(4, 4)
            self.weight = torch.nn.Parameter(torch.ones(4, 4))

    class Strange(torch.nn.Module):
        def parameters(self, recurse: bool = True) -> Any:
            raise RuntimeError("not to be looked at")

    model, strange = Clashing().bfloat16(), Strange()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    names = set(names_of(optimizer).values())
    assert names == {"weight", "module.weight", "module.bias"} and strange is not None


@pytest.mark.slow
def test_sizes_that_are_symbols_in_a_graph_are_numbers() -> None:
    for size in (8, 6, 10):
        p = torch.nn.Parameter(torch.ones(size, size).bfloat16())
        p.grad = torch.ones_like(p)
        found = collage_fx.explain(torch.optim.AdamW([p]))
        assert found.plan[0].shape == (size, size)
        assert f"{2 * size * size:,}" in str(found)


def test_a_model_of_other_parameters_is_refused() -> None:
    model, other = torch.nn.Linear(4, 4).bfloat16(), torch.nn.Linear(4, 4).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(SubjectError, match=r"Linear does not have param_groups\[0\].params\[0\]"):
        collage_fx.explain(optimizer, model=other)
    with pytest.raises(SubjectError, match=r"takes a torch\.nn\.Module, got str"):
        collage_fx.explain(optimizer, model="model")


class Halting(torch.optim.Optimizer):
    """Reads the norm of each gradient, which Dynamo cannot trace."""

    def __init__(self, params: list[torch.Tensor]) -> None:
        super().__init__(params, {"lr": 1e-3})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if (n := p.grad.norm().item()) > 0:
                p.add_(p.grad / n, alpha=-1e-3)


def test_a_report_before_the_first_step_says_so() -> None:
    step = collage_fx.compile(torch.optim.SGD(with_grads([bf16(4)]), 0.1))
    assert _lines(collage_fx.report(step))[-1] == "no step has been taken yet"


def test_what_is_not_in_graphs_is_said_with_the_place() -> None:
    with without_compiler():
        step = collage_fx.compile(Halting(with_grads([bf16(4), bf16(4)])))
        for _ in range(4):
            step()
    text = " ".join(str(collage_fx.report(step)).split())
    assert "parts of the step run on whole values, outside the graphs of the passes" in text
    assert "p.grad.norm().item()" in text and "test_report_text.py:" in text
    assert "reads no data of its tensors" in text


def test_wide_tables_wrap_and_long_ones_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [("name", "text"), ("a" * 50, "word " * 40)]
    assert max(map(len, table(rows, 80, wraps={0: 10, 1: 10}))) <= 80
    assert max(map(len, table(rows))) > 200, "the control: unwrapped"
    monkeypatch.setattr(state_table, "ROWS", 4)
    params = with_grads([bf16(2) for _ in range(4 + 6)])
    groups = [{"params": [p], "weight_decay": 0.01 * k} for k, p in enumerate(params)]
    found = collage_fx.explain(torch.optim.SGD(groups, 0.01))
    assert "... and 6 rows more, which verbose=True shows" in _lines(found)
    found.verbose = True
    assert sum("param_groups" in line for line in _lines(found)) == 4 + 6
