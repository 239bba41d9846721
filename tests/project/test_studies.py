"""The studies of training: seeds in one process, shadows, tests of equivalence, a direction.

For benchmarks/studies/run.py, benchmarks/studies/tasks.py, benchmarks/studies/shadow.py,
benchmarks/studies/strategies.py, benchmarks/studies/differences.py, benchmarks/studies/analyse.py
and benchmarks/studies/equivalence.py.
"""

import random
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks/studies"))
import analyse
import run
import tasks
from cells import Cell
from differences import gaps, kept, load, margin_of
from equivalence import holm, mean_of, quantile, spearman, student, tost
from shadow import Shadow, rows
from study_runs import trained

SHORT = replace(tasks.TASKS["train"], steps=3)
Row = dict[str, Any]


@pytest.fixture(scope="module")
def model() -> tasks.Model:
    return tasks.model(SHORT)


@pytest.mark.parametrize(
    ("strategy", "optimizer"),
    [("bf16", "AdamW"), ("auto", "AdamW"), ("masters", "Lion"), ("bf16", "Adafactor")],
)
def test_seeds_of_one_process_have_the_bits_of_each_alone(
    model: tasks.Model, strategy: str, optimizer: str
) -> None:
    together = trained(model, replace(SHORT, seeds=3), strategy, optimizer)
    for seed in range(3):
        task = replace(SHORT, seeds=1, first_seed=seed)
        alone = trained(model, task, strategy, optimizer)
        assert torch.equal(together[seed], alone[0])
        # The control: another seed has other bits.
        assert not torch.equal(together[(seed + 1) % 3], alone[0])


def test_plain_bf16_falls_behind_and_the_default_does_not(model: tasks.Model) -> None:
    """The direction of the first study; its numbers are those of longer runs."""
    task = replace(tasks.TASKS["train"], steps=90, seeds=3)
    start, results = tasks.start(task, model), {}
    for strategy in ("masters", "twin 1", "twin 2", "bf16", "auto"):
        cell = Cell("train", strategy, 1e-3)
        results[cell] = run.train(cell, task, model, start, "cpu")
    margin = margin_of(results, Cell("train", "masters", 1e-3))
    assert margin is not None
    auto, plain = (mean_of(gaps(results, Cell("train", s, 1e-3))) for s in ("auto", "bf16"))
    assert abs(auto.mean) <= 3 * margin.floor, (auto, margin)
    assert plain.mean > 0.02, plain
    edq = results[Cell("train", "auto", 1e-3)]["shadow"]["cumulative"]
    assert all(abs(1 - quality) < 1e-3 for quality in edq)


def test_a_shadow_measures_what_is_lost() -> None:
    start = [torch.randn(2, 5), torch.randn(2, 3, 4)]

    def make(params: list[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=1e-2)

    exact, frozen = (Shadow(start, make, 2) for _ in range(2))
    params = [w.double().requires_grad_() for w in start]
    optimizer, still = make(params), rows(start, 2, apart=False)
    for _ in range(40):
        gradients = [torch.randn_like(w) for w in start]
        measures, before = exact.measures, rows(params, 2, apart=False).detach()
        for p, g in zip(params, gradients, strict=True):
            p.grad = g.double()
        optimizer.step()
        for one in (exact, frozen):
            one.step(gradients, 1e-2)
        if measures:
            exact.compare(rows(params, 2, apart=False).detach() - before)
            frozen.compare(torch.zeros_like(still))
    found = exact.found(rows(params, 2, apart=False).detach())
    assert found == {"error": [0, 0], "cumulative": [1, 1], "single": [1, 1], "lost": [0, 0]}
    # The control: of weights that never move all is lost.
    found = frozen.found(still)
    assert found == {"error": [1, 1], "cumulative": [0, 0], "single": [0, 0], "lost": [1, 1]}


def test_a_cast_by_chance_is_right_on_average() -> None:
    value = torch.full((1 << 16,), 1 + 2**-10)
    (found,) = run.cast([value])
    assert set(found.unique().tolist()) == {1.0, 1 + 2**-7}
    assert abs(float((found - value).mean())) < 1e-4
    assert torch.equal(run.cast([value.bfloat16()])[0].bfloat16(), value.bfloat16())


def test_quantiles_are_those_of_tables() -> None:
    """The values that tables of Student's distribution have."""
    for degrees, t in {1: 12.7062, 2: 4.30265, 4: 2.77645, 7: 2.36462, 30: 2.04227}.items():
        assert abs(quantile(0.975, degrees) - t) < 1e-4
        assert student(-t, degrees) == pytest.approx(0.025, abs=1e-6)


def test_equivalence_is_found_where_it_is() -> None:
    small = [0.1, -0.2, 0.05, 0.15, -0.1, 0.0, 0.1, -0.05]
    assert tost(small, 0.3) < 0.01
    assert tost([d + 0.3 for d in small], 0.3) == pytest.approx(0.5, abs=0.2)
    assert tost(small, 0.01) > 0.3
    assert tost([0.0, 0.0], 0.1) == 0 and tost([0.2, 0.2], 0.1) == 1
    assert holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])


def test_a_difference_as_large_as_the_margin_passes_in_one_of_twenty() -> None:
    """The control: at the margin the test errs as often as it says."""
    draw = random.Random(0)
    samples = ([draw.gauss(1, 0.5) for _ in range(8)] for _ in range(2000))
    passed = sum(tost(sample, 1.0) <= 0.05 for sample in samples)
    assert 70 <= passed <= 130


def test_ranks_correlate_whatever_the_scale() -> None:
    assert spearman([1, 2, 3, 4], [1, 10, 100, 1000]) == pytest.approx(1)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert spearman([1, 1, 1], [1, 2, 3]) == 0


def result(loss: float, seeds: int = 4) -> Row:
    far = {"cumulative": [1.0], "single": [1.0], "lost": [0.0], "error": [0.0]}
    whole = [loss + 0.01 * s for s in range(seeds)]
    return {"before": [4.0] * seeds, "whole": whole, "high": whole, "shadow": far}


def test_gaps_and_shares_are_to_the_masters_of_the_same_seed() -> None:
    base = Cell("tune", "masters", 1e-6)
    losses = {"masters": 2.0, "twin 1": 2.001, "twin 2": 1.9995, "bf16": 3.0, "auto": 2.0002}
    results = {replace(base, strategy=s): result(loss) for s, loss in losses.items()}
    assert gaps(results, replace(base, strategy="bf16")) == pytest.approx([1.0] * 4)
    assert kept(results, replace(base, strategy="bf16"))[0] == pytest.approx(0.5)
    margin = margin_of(results, base)
    assert margin is not None and margin.floor == pytest.approx(0.001, abs=1e-6)
    assert margin.margin == pytest.approx(margin.spread / 10, abs=1e-6)
    said = {row[0]: row[2] for row in analyse.compared(results, list(results))}
    assert said["auto"].startswith("yes") and said["plain bf16"].startswith("no")


def test_the_best_beta2_is_told_beside_the_usual_one() -> None:
    """By pairs of the same seed, at the rate that the task has."""
    losses = {0.9: 2.0, 0.95: 1.98, 0.99: 1.99, 0.999: 1.99, 0.9999: 2.1}
    results = {Cell("train 468k", "masters", 1e-3, beta2=b): result(x) for b, x in losses.items()}
    results[Cell("train 468k", "auto", 1e-3)] = result(1.995)
    masters, auto = analyse.beta2(results, "train 468k").splitlines()[2:4]
    assert masters.endswith("| 0.95 | -0.0100 ± 0.0000 |") and "loss 1.9950" in masters
    assert auto == "| auto |  |  |  | +0.00500 ± 0.00000 |  | 0.999 |  |"
    assert analyse.beta2(results, "tune") == ""


def test_tables_of_the_page_are_made_anew() -> None:
    page = "a\n<!-- table state -->\nold\n<!-- end -->\nb\n"
    found = analyse.filled(page, {})
    assert "old" not in found and "not run yet" in found
    assert analyse.filled(found, {}) == found and found.startswith("a\n") and found.endswith("b\n")


def test_readme_has_the_gaps_of_the_results() -> None:
    results, readme = load(run.RESULTS), (run.ROOT / "README.md").read_text()
    auto, plain = (mean_of(gaps(results, Cell("train", s, 1e-3))) for s in ("auto", "bf16"))
    named = re.findall(r"less that of fp32: ([\d.]+); in plain bf16 ([\d.]+)", readme)
    assert named == [(f"{auto.mean:.5f}", f"{plain.mean:.3f}")]


def test_the_page_has_the_tables_of_the_results() -> None:
    page = analyse.PAGE.read_text()
    assert analyse.filled(page, load(run.RESULTS)) == page
