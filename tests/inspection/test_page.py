"""The page of an explanation: its contents, and the links between its values.

For inspection.page.page, inspection.page.classes, inspection.page.kernels, inspection.page.member,
inspection.page.operations, inspection.page.readable, inspection.page.sources and
inspection.page.states.
"""

import html
import os
from pathlib import Path
from typing import Any

import pages
import pytest
import torch

import collage_fx
from collage_fx.errors import CollageError, PageError
from collage_fx.inspection.page.classes import ClassView
from collage_fx.runtime.torch_versions import installed

ONE_SUM = pytest.mark.skipif(installed() < (2, 13), reason="torch 2.11 adds 1 * exp_avg / denom")


@pytest.fixture(scope="module")
def adamw() -> tuple[collage_fx.Explanation, str]:
    return pages.explained(pages.optimizer(), storage="mcf2", replay=2)


def test_every_state_is_on_it(adamw: Any) -> None:
    explanation, text = adamw
    rows, layers = (pages.data(text)["states"][k] for k in ("rows", "layers"))
    found = set()
    for _, kind, verdict, reason, members, shapes in rows:
        assert sum(count for _, count in shapes) == len(members)
        for layer in members:
            found.add((kind, layers[layer], verdict, reason))
    expected = set()
    for state in explanation.plan:
        first, _, owner = state.name.partition(" of ")
        verdict = "compensated" if state.compensated else "refused" if state.refused else "plain"
        kind = first if owner else "parameter"
        expected.add((kind, owner or first, verdict, state.reason))
    assert found == expected
    assert all(
        html.escape(s.recurrence).replace("&#x27;", "&#39;") in text for s in explanation.plan
    )


def test_code_reads_like_the_optimizer(adamw: Any) -> None:
    _, text = adamw
    found = pages.lines(text)
    assert "exp_avg_sq = 0.999 * exp_avg_sq + 0.001 * (grad * grad)" in found
    old = installed() < (2, 13)
    new = "bf16(param + 1 * exp_avg / denom)" if old else "param + exp_avg / denom"
    assert f"param = {new}" in found
    assert "bias_correction1 = 1 - 0.9 ** step" in found
    assert "param, param_lo = grow(param, param_lo, t6)" in found
    assert "exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)" in text
    assert not any("convert_element_type" in line or "torch.ops" in line for line in found)


def test_names_of_values_that_live_on_are_not_taken() -> None:
    """A difference to the old value, which is needed after the new one is there."""

    class Kept(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

        @torch.no_grad()
        def step(self) -> None:  # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                state = self.state[p]
                if not state:
                    state["before"] = torch.zeros_like(p)
                new = p * 0.999 + p.grad
                state["before"].copy_(new - p)
                p.copy_(new)

    _, text = pages.explained(pages.optimizer(2, lambda params: Kept(params)))
    found = pages.lines(text)
    assert "param = 0.999 * param + grad" not in found
    assert "new_param = 0.999 * param + grad" in found
    assert "before = new_param - param" in found


@ONE_SUM
@pytest.mark.kernels
@pytest.mark.parametrize("arithmetic", ["eft", "wide"])
@pytest.mark.quick("eft")
def test_all_values_are_linked(adamw: Any, arithmetic: str) -> None:
    if arithmetic == "eft":
        explanation, text = adamw
    else:
        explanation, text = pages.explained(pages.optimizer(), arithmetic="wide")
    links = pages.data(text)["links"]["0"]
    (program,) = (one.program for one in explanation.compiled)
    (rewritten,) = program.rewritten
    view = ClassView(rewritten, program, "", 0)
    for column, module in ((view.expanded, rewritten.expanded), (view.lowered, rewritten.lowered)):
        assert module is not None
        assert {n for n in module.graph.nodes if n.op != "output"} <= set(column.ids)
    shown = {letter: pages.values(text, letter) for letter in "belcg"}
    assert all(shown.values())
    for value in shown["e"] | shown["l"] | shown["c"]:
        stems = pages.reach(value, links) - {value}
        assert stems and stems <= set().union(*shown.values()), value
    # A step count that is updated beside the class is in no other graph; all else is.
    linked = {stem for value in links for stem in pages.reach(value, links)}
    alone = {view.before.names.get(n) for n, i in view.before.ids.items() if i not in linked}
    assert alone <= {"step", "bias_correction1", "bias_correction2", "step_size", None}


@ONE_SUM
def test_what_is_stored_reaches_its_line(adamw: Any) -> None:
    explanation, text = adamw
    links = pages.data(text)["links"]["0"]
    names = {"param", "exp_avg", "exp_avg_sq", "param_lo", "exp_avg_sq_lo"}
    stored = pages.stored(text)
    assert stored.keys() == names
    (program,) = (one.program for one in explanation.compiled)
    before = ClassView(program.rewritten[0], program, "", 0).before
    last = {name: i for n, name in before.names.items() if (i := before.ids[n])}
    for name, values in stored.items():
        assert {"c", "g"} <= {v[1] for v in values}, f"{name}: in C++ and in Triton"
        for value in values:
            assert last[name.removesuffix("_lo")] in pages.reach(value, links)


@pytest.mark.kernels
def test_lines_of_inductors_kernels() -> None:
    optimizer = pages.optimizer(2, torch.optim.SGD, lr=0.1)
    explanation, text = pages.explained(optimizer, multi_tensor=False)
    assert explanation.apart and "a kernel for each member" in text
    assert pages.stored(text).keys() == {"param", "param_lo"}


def test_lists_are_shown_as_one_member() -> None:
    optimizer = pages.optimizer(2, torch.optim.SGD, lr=0.1, momentum=0.5, foreach=True)
    _, text = pages.explained(optimizer, multi_tensor=False)
    found = pages.lines(text)
    assert "bufs = 0.5 * momentum_buffer" in found
    assert "param = param - 0.1 * momentum_buffer" in found


def test_names_are_escaped() -> None:
    class Odd(torch.optim.SGD):
        pass

    Odd.__name__ = "<script>alert(1)</script>"
    _, text = pages.explained(pages.optimizer(2, Odd, lr=0.1))
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(1)" in text


@pytest.mark.slow
def test_a_thousand_parameters() -> None:
    optimizer = pages.optimizer(1000)
    explanation, text = pages.explained(optimizer)
    assert len(explanation.plan) == 4000
    assert len(text) < 250_000
    assert text.count("<tr data-row") == 4
    assert len(pages.data(text)["states"]["layers"]) == 1000


def test_a_function_and_nothing_rewritten() -> None:
    def step(p: Any, g: Any) -> None:
        p.sub_(g)

    p = torch.ones(8, dtype=torch.bfloat16)
    _, text = pages.explained(step, p, p.clone())
    assert "p = p - g" in pages.lines(text)
    wide = torch.ones(8)
    _, text = pages.explained(step, wide, wide.clone())
    assert "No state is compensated in a graph" in text


def test_no_network_is_needed(adamw: Any) -> None:
    _, text = adamw
    assert "http" not in text.replace("http-equiv", "").partition("<body>")[0]
    assert "default-src 'none'" in text


def test_saved(adamw: Any, tmp_path: Path) -> None:
    explanation, _ = adamw
    place = explanation.save(tmp_path / "step.html")
    assert place.read_text(encoding="utf-8") == pages.page(explanation)
    explanation.save(str(place))
    assert os.listdir(tmp_path) == ["step.html"]


def test_what_cannot_be_written(adamw: Any, tmp_path: Path, monkeypatch: Any) -> None:
    explanation, _ = adamw
    with pytest.raises(PageError, match=r"cannot be written to .*missing"):
        explanation.save(tmp_path / "missing" / "step.html")
    (tmp_path / "folder").mkdir()
    with pytest.raises(PageError):
        explanation.save(tmp_path / "folder")
    old = tmp_path / "old.html"
    old.write_text("old")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(CollageError, match="No space left"):
        explanation.save(old)
    assert old.read_text() == "old"
    assert sorted(os.listdir(tmp_path)) == ["folder", "old.html"]
