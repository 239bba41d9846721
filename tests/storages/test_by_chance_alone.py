"""States without residuals that are rounded by chance: unbiased, the same however they lie.

For runtime.storage.layouts.
"""

import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fp8_steps import Adam8
from storage_runs import MEMBERS, WAYS, compiled, start, steps
from torch import Tensor

import collage_fx
from collage_fx.diagnosis.tally import storages_for
from collage_fx.errors import CollageWarning, ResidualError
from collage_fx.runtime.residuals.store import STORE
from collage_fx.runtime.storage.registry import STORAGES

SEEDS, STEPS = 64, 24
BF16 = torch.bfloat16
OTHERS = [s for s in STORAGES if s not in ("sr", "double_single")]


def sum_up(x: Tensor, g: Tensor) -> None:
    x.add_(g, alpha=2.0**-12)


def average(x: Tensor, g: Tensor) -> None:
    x.mul_(1 - 2.0**-5).add_(g, alpha=2.0**-5)


def standard_errors(step: Callable[[Tensor, Tensor], None], **options: Any) -> float:
    """Mean error of the last value over 64 times as many seeds, in standard errors.

    All else is exact: the update has so few bits that fp32 holds the sum before it is rounded.
    """
    begin = 1 + torch.arange(96).to(BF16) / 128
    gradient = (torch.arange(96) % 7 + 1).to(BF16) / 8
    exact = begin.double()
    for _ in range(STEPS):
        step(exact, gradient.double())
    errors, low = [], [torch.zeros(48, dtype=torch.uint8)] * (options.get("storage") == "ulp4")
    run = collage_fx.compile(step, states=("x",), **options) if options else step
    for seed in range(SEEDS):
        x = begin.clone()
        if options:
            collage_fx.load_residuals(x, low, draws=1 + STEPS * seed)
        for _ in range(STEPS):
            run(x, gradient)
        errors.append((collage_fx.value(x) - exact).mean())
    found = torch.stack(errors)
    return float(found.mean() / (found.std() / SEEDS**0.5 + 2.0**-60))


@pytest.mark.parametrize("storage", ["sr", "ulp4"])
@pytest.mark.parametrize("step", [sum_up, average])
def test_a_sum_and_an_average_are_right_on_average(step: Any, storage: str) -> None:
    assert abs(standard_errors(step, storage=storage, level="all")) < 4
    assert abs(standard_errors(step)) > 100  # rounded to nearest, the control


@WAYS
@pytest.mark.parametrize("storage", ["sr", "ulp4"])
@pytest.mark.quick("sr-shared", "ulp4-eager")
def test_equal_elements_round_apart(way: str, storage: str) -> None:
    def rounded(**options: Any) -> list[Tensor]:
        params = [torch.ones(64, 64, dtype=BF16).requires_grad_() for _ in range(MEMBERS[way])]
        step = compiled(torch.optim.SGD(params, lr=2.0**-7 / unit / 8), way, **options)
        for p in params:
            p.grad = -torch.ones_like(p)
        step()
        return [collage_fx.value(p) for p in params]

    unit = 16 if storage == "ulp4" else 1
    found = rounded(storage=storage)
    for p in found:  # an eighth of a unit in the last place each
        assert abs(float((p > 1).double().mean()) - 0.125) < 4 * (0.125 * 0.875 / 4096) ** 0.5
    assert all(torch.equal(p, found[0]) for p in found)  # copies of a parameter stay equal
    assert not torch.equal(found[0], rounded(storage=storage, seed=1)[0])
    unit = 256
    apart = rounded(storage="ulp8", stochastic_rounding=True)[0]
    assert abs(float((apart > 1).double().mean()) - 0.125) < 4 * (0.125 * 0.875 / 4096) ** 0.5
    assert len(rounded(storage="ulp8")[0].unique()) == 1  # to nearest, the control


@WAYS
@pytest.mark.quick("shared")
def test_a_storage_beside_it_rounds_to_nearest_unless_it_is_asked_not_to(way: str) -> None:
    """Beside momenta that have nothing to be rounded: they go down by halves."""

    def weights(seed: int, **options: Any) -> list[Tensor]:
        params = start(MEMBERS[way], BF16)
        storage = {"param": "ulp8", "*": "sr"}
        optimizer = torch.optim.SGD(params, lr=1e-3, momentum=0.5)
        step = compiled(optimizer, way, storage=storage, level="all", seed=seed, **options)
        for k in range(3):
            for p in params:
                p.grad = torch.full_like(p, float(k == 0))
            step()
        return [collage_fx.value(p) for p in params]

    assert all(map(torch.equal, weights(0), weights(1)))
    asked = (weights(seed, stochastic_rounding=True) for seed in (0, 1))
    assert not all(map(torch.equal, *asked))


def test_fp8_moments_have_no_residual() -> None:
    def run(storage: Any) -> tuple[list[Tensor], Any]:
        params = start(2, BF16)
        optimizer = Adam8(params, moments=torch.float8_e4m3fn)
        steps(optimizer, collage_fx.compile(optimizer, storage=storage), 0, 12)
        return [p.detach().double() for p in params], optimizer

    words = {"param": "remainder16", "*": "sr"}
    found, optimizer = run(words)
    state = optimizer.state[optimizer.param_groups[0]["params"][0]]
    moments = [t for t in state.values() if isinstance(t, Tensor) and t.itemsize == 1]
    assert moments and all(collage_fx.residuals(m) == () for m in moments)
    assert all(collage_fx.draws(m) == 12 for m in moments)
    finest, _ = run({"param": "remainder16", "*": "mcf3"})
    begin = [p.detach().double() for p in start(2, BF16)]
    for mine, best, first in zip(found, finest, begin, strict=True):
        assert float((mine - best).norm() / (best - first).norm()) < 0.3


def test_a_state_says_that_it_is_rounded_by_chance() -> None:
    params = start(9, BF16)
    optimizer = torch.optim.AdamW(params, lr=1e-4)
    step = collage_fx.compile(optimizer, storage={"param": "sr", "exp_avg_sq": "remainder16"})
    steps(optimizer, step, 0, 3)
    verdicts = {s.state_name.kind: s.verdict for s in collage_fx.report(step).states}
    assert verdicts == {"param": "by chance", "exp_avg": "plain", "exp_avg_sq": "compensated"}
    found = collage_fx.explain(step)
    assert "rounded by chance, with seed 0: 9 states, which have none" in " ".join(
        str(found).split()
    )
    by_kind = {s.state_name.kind: s for s in found.plan}
    assert by_kind["param"].residual_bytes == 0 < by_kind["exp_avg_sq"].residual_bytes
    assert {row["verdict"] for row in found.to_dict()["states"]} == set(verdicts.values())
    p = params[0]
    assert collage_fx.residuals(p) == () and collage_fx.draws(p) == 3
    assert torch.equal(collage_fx.value(p), p.double())


def test_a_write_from_outside_is_no_loss() -> None:
    params = start(2, BF16)
    optimizer = torch.optim.SGD(params, lr=1e-4)
    step = collage_fx.compile(optimizer, storage="sr")
    with warnings.catch_warnings():
        warnings.simplefilter("error", CollageWarning)
        for k in range(4):
            with torch.no_grad():
                params[0].mul_(1.5)
            params[1].data = params[1].data.clone()
            steps(optimizer, step, k, k + 1)
    for p in params:
        residual = STORE.get(p)
        assert residual is not None and (residual.checks, residual.kept) == (None, None)


def test_small_updates_are_not_warned_of() -> None:
    """Updates of which rounding to nearest loses all, in the steps that are looked at."""
    params = [torch.ones(64, dtype=BF16).requires_grad_() for _ in range(2)]
    optimizer = torch.optim.SGD(params, lr=2.0**-16)
    step = collage_fx.compile(optimizer, storage={"*": "sr"})
    with warnings.catch_warnings():
        warnings.simplefilter("error", CollageWarning)
        for _ in range(220):
            for p in params:
                p.grad = -torch.ones_like(p)
            step()
    assert "sr" not in storages_for(BF16)  # the doctor weighs those that round to nearest


WORDS: list[Any] = [
    "sr",
    "ulp4",
    {"param": "remainder16", "*": "sr"},
    {"param": "sr", "*": "ulp8"},
    {"param": "ulp4", "*": "sr"},
]


@pytest.mark.parametrize("storage", WORDS, ids=str)
@pytest.mark.quick("sr", "ulp4")
def test_a_resumed_run_draws_what_it_would_have_drawn(storage: Any) -> None:
    def make(params: list[Tensor], **options: Any) -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.AdamW(params, lr=1e-5)
        return optimizer, collage_fx.compile(optimizer, level="all", **options)

    def words(optimizer: Any) -> list[Tensor]:
        states = [t for s in optimizer.state.values() for t in s.values()]
        every = [*optimizer.param_groups[0]["params"], *states]
        return [w.detach().clone() for t in every for w in (t, *collage_fx.residuals(t))]

    whole = start(3, BF16)
    optimizer, step = make(whole, storage=storage)
    steps(optimizer, step, 0, 4)
    checkpoint = io.BytesIO()
    torch.save([optimizer.state_dict(), [p.detach() for p in whole]], checkpoint)
    steps(optimizer, step, 4, 8)

    def resumed(forget: bool, **options: Any) -> list[Tensor]:
        checkpoint.seek(0)
        state, halfway = torch.load(checkpoint, weights_only=True)
        other, again = make([p.requires_grad_() for p in halfway], **options)
        if forget:
            for entries in state["state"].values():
                for key in (k for k in entries if k.endswith(".draws")):
                    entries[key].zero_()
        other.load_state_dict(state)
        steps(other, again, 4, 8)
        return words(other)

    expected = words(optimizer)
    for options in ({"storage": storage}, {}):  # which goes on in the storage of the checkpoint
        assert all(map(torch.equal, resumed(False, **options), expected))
    assert not all(map(torch.equal, resumed(True, storage=storage), expected))


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.quick("remainder16")
def test_it_is_converted_to_and_from_every_other_storage(other: str) -> None:
    def trained(storage: str) -> tuple[list[Tensor], Any]:
        params = [torch.full((64, 64), 1.0, dtype=BF16).requires_grad_() for _ in range(2)]
        optimizer = torch.optim.SGD(params, lr=2.0**-10)
        step = collage_fx.compile(optimizer, storage=storage)
        for p in params:
            p.grad = -torch.ones_like(p)
        step()
        return params, optimizer

    params, optimizer = trained("sr")
    before = [collage_fx.value(p) for p in params]
    collage_fx.convert_residuals(optimizer, other)
    assert all(torch.equal(collage_fx.value(p), b) for p, b in zip(params, before, strict=True))
    assert all(collage_fx.residuals(p) for p in params)
    params, optimizer = trained(other)
    (before, _) = (collage_fx.value(p) for p in params)
    collage_fx.convert_residuals(optimizer, "sr")
    found = collage_fx.value(params[0])
    assert collage_fx.residuals(params[0]) == ()
    # All elements are one and an eighth of a unit in the last place, and stay so on average.
    assert float((found - before).abs().max()) < 2.0**-7
    assert abs(float((found - before).mean())) < 4 * 2.0**-7 * (0.125 * 0.875 / 4096) ** 0.5
    assert abs(float((before.to(BF16) - before).mean())) > 2.0**-11  # to nearest, the control


class Replaces(torch.optim.Optimizer):
    """An average in a new tensor in each step."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state["m"] = 0.99 * state.get("m", torch.zeros_like(p)) + 0.01 * p.grad
            p.add_(state["m"], alpha=-1e-3)


@pytest.mark.parametrize("record", ["auto", True])
def test_a_state_that_is_replaced_takes_another_seed_in_each_step(record: Any) -> None:
    p = torch.ones(1024, dtype=BF16).requires_grad_()
    optimizer, count = Replaces([p], {}), 120
    step = collage_fx.compile(optimizer, storage="sr", level="all", record=record)
    for _ in range(count):
        p.grad = torch.ones_like(p)
        step()
    average = optimizer.state[p]["m"]
    assert collage_fx.draws(average) == count
    assert abs(float(average.double().mean()) / (1 - 0.99**count) - 1) < 0.01


def test_a_checkpoint_of_a_plain_run_loses_nothing() -> None:
    plain, other = ([torch.ones(8, dtype=BF16).requires_grad_()] for _ in range(2))
    before, after = torch.optim.AdamW(plain), torch.optim.AdamW(other)
    steps(before, before.step, 0, 1)
    step = collage_fx.compile(after, storage="sr", level="all")
    with warnings.catch_warnings():
        warnings.simplefilter("error", CollageWarning)
        after.load_state_dict(before.state_dict())
        steps(after, step, 1, 2)


def test_residuals_of_nothing_are_given_with_their_draws_only() -> None:
    p = torch.ones(3, dtype=BF16)
    with pytest.raises(ResidualError, match="no residual, and no draws"):
        collage_fx.load_residuals(p, ())
    with pytest.raises(ResidualError, match="-3 draws"):
        collage_fx.load_residuals(p, (), draws=-3)
    collage_fx.load_residuals(p, (), draws=7)
    assert collage_fx.draws(p) == 7 and collage_fx.residuals(p) == ()
