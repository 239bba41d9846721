"""Stochastic rounding of the last residual: unbiased, seeded, the same after a resume.

For runtime.expansion.stochastic.
"""

import dataclasses
import io
from typing import Any

import pytest
import torch
from saved import drop_saved_residuals
from storage_runs import MEMBERS, WAYS, compiled, start, steps
from torch import Tensor

import collage_fx
from collage_fx.errors import OptionError
from collage_fx.runtime.expansion import stochastic
from collage_fx.runtime.expansion.stochastic import chance, round_by_chance, seed_of
from collage_fx.runtime.storage.registry import STORAGES

FORMATS = [
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.float64, torch.float32),
    (torch.float32, torch.float8_e4m3fn),
    (torch.float32, torch.float8_e5m2),
]
FP16 = torch.float16
VALUES = [1.2345678, -3.3e-5, 1e-7, -6.1e-5, 1.37 * 2.0**-130, 0.75 * 2.0**-24, -300.7, 0.0, -2.5]
BY_CHANCE = [s.name for s in STORAGES.values() if s.split_by_chance]


def of(draw: int) -> Tensor:
    return torch.tensor(seed_of(0, draw), dtype=torch.int32)


def all_of(draws: int) -> Tensor:
    return torch.stack([of(d) for d in range(draws)])


@pytest.mark.parametrize(("wide", "dtype"), FORMATS)
def test_the_mean_over_all_chances_is_the_value(wide: torch.dtype, dtype: torch.dtype) -> None:
    every = torch.arange(1 << 16, dtype=torch.int32)
    for value in VALUES:
        x = torch.full((1 << 16,), value, dtype=wide)
        found = round_by_chance(x, dtype, every).double()
        x = x.double()
        around = found.unique()
        unit = float(around[-1] - around[0])
        assert len(around) == (1 if x[0] in x.to(dtype).double() or unit == 0 else 2)
        smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        assert abs(float(found.mean() - x[0])) <= max(unit, smallest) * 2.0**-13
        nearest = x[0].to(dtype).double()  # the control: rounding to nearest is off where this is
        if len(around) == 2 and unit / 64 < abs(float(nearest - x[0])):
            assert abs(float(nearest - x[0])) > unit * 2.0**-13


def uniform(found: Tensor) -> bool:
    """Return True if 16-bit numbers are spread evenly, and independent of the ones before them."""
    counts = torch.bincount(found.flatten() >> 10, minlength=64).double()
    expected = found.numel() / 64
    centred = found.double() - found.double().mean()
    serial = float((centred[1:] * centred[:-1]).mean() / centred.var())
    spread = float(((counts - expected) ** 2 / expected).sum())
    return spread < 63 + 5 * (2 * 63) ** 0.5 and abs(serial) < 5 / len(found) ** 0.5


def same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(
        one.nan_to_num(0), other.nan_to_num(0)
    )


def test_chance_is_uniform_over_draws_and_over_neighbours() -> None:
    neighbours = (torch.arange(1 << 14, dtype=torch.int32) + 0x3F800000).view(torch.float32)
    coarse = (torch.arange(0x3000, 0x4F00, dtype=torch.int32) << 16).view(torch.float32)
    here = torch.zeros((), dtype=torch.int32)
    for x in (neighbours, coarse, coarse.double()):
        at = torch.arange(len(x), dtype=torch.int32)
        assert uniform(chance(x, of(3), at))
        turned = chance(x.flip(0), of(1), at.flip(0)).flip(0)
        assert torch.equal(chance(x, of(1), at), turned)
    constant = torch.full((8192,), 3.14159)
    assert uniform(chance(constant, all_of(8192), here))
    at = torch.arange(8192, dtype=torch.int32) + 2**31 - 4096  # of more positions than int32 has
    assert uniform(chance(constant, of(1), at)) and not uniform(chance(constant, of(1), here))
    assert not uniform(neighbours.view(torch.int32) & 0xFFFF)
    at = torch.arange(len(neighbours), dtype=torch.int32)
    draws = torch.stack([chance(neighbours, of(d), at).double() for d in range(4)])
    assert float((torch.corrcoef(draws) - torch.eye(4)).abs().max()) < 0.05


def test_no_two_positions_or_tensors_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """At distances that are powers of two; and of other values at one position."""
    count = 1 << 20
    at, seed = torch.arange(count, dtype=torch.int32), of(0)

    def together(one: Tensor, other: Tensor) -> float:
        """Return a correlation in standard errors."""
        pairs = torch.stack([one.double(), other.double()])
        return abs(float(torch.corrcoef(pairs)[0, 1])) * pairs.shape[1] ** 0.5

    def furthest() -> float:
        found = chance(torch.zeros(count), seed, at)
        return max(together(found[1 << k :], found[: -1 << k]) for k in range(17))

    assert furthest() < 5
    x, y = torch.rand(2, count, generator=torch.Generator().manual_seed(0)) + 1
    ups = [(round_by_chance(t, torch.bfloat16, chance(t, seed, at)) - t).float() for t in (x, y)]
    assert together(*ups) < 5
    bits = chance(torch.zeros(count), seed, at)  # the same for both: the control
    ups = [(round_by_chance(t, torch.bfloat16, bits) - t).float() for t in (x, y)]
    assert together(*ups) > 100
    monkeypatch.setattr(stochastic, "_SPREAD", 1)
    assert furthest() > 10


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("storage", BY_CHANCE)
@pytest.mark.quick("mcf2-dtype1", "ulp8-dtype0")
def test_a_storage_keeps_the_value_on_average(storage: str, dtype: torch.dtype) -> None:
    s = STORAGES[storage]
    x = torch.randn(64, generator=torch.Generator().manual_seed(1)) * 3
    assert s.split_by_chance is not None
    draws = 4096
    at = torch.arange(64, dtype=torch.int32)
    found = s.join(*s.split_by_chance(x.expand(draws, 64), dtype, all_of(draws)[:, None], at))
    bound = 5 * 2.0 ** -s.precision[dtype] * x.abs() / draws**0.5 + 2.0**-24 / draws**0.5
    assert bool(((found.double().mean(0) - x.double()).abs() <= bound).all())
    nearest = s.join(*s.split(x, dtype))
    assert not bool(((nearest.double() - x.double()).abs() <= bound).all())
    assert bool(((found - x).abs() <= 4 * 2.0 ** -s.precision[dtype] * x.abs() + 2.0**-24).all())
    for special in (float("inf"), -float("inf"), float("nan"), 3.4e38, 0.0):
        hi, *lows = s.split_by_chance(torch.tensor([special]), dtype, of(0), at[:1])
        assert same(hi, torch.tensor([special]).to(dtype))
        assert all(bool(lo.isfinite().all()) for lo in lows)
        beyond = special == 3.4e38 and lows and lows[0].dtype == torch.int8 and dtype != FP16
        assert bool(hi.isfinite().all()) or beyond or not any(lo.any() for lo in lows)


@WAYS
@pytest.mark.quick("shared")
def test_steps_too_small_for_the_storage_are_kept_on_average(way: str) -> None:
    """Updates of an eighth of what ulp8 keeps: nothing, or all on average."""
    begin = [(torch.arange(128) / 128 + 1).bfloat16() for _ in range(MEMBERS[way])]

    def moved(**options: Any) -> Tensor:
        params = [b.clone().requires_grad_() for b in begin]
        step = compiled(torch.optim.SGD(params, lr=2.0**-19), way, storage="ulp8", **options)
        for _ in range(64):
            for p in params:
                p.grad = -torch.ones_like(p)
            step()
        found = torch.stack([collage_fx.value(p).detach() for p in params])
        return (found - torch.stack(begin)) / (64 * 2.0**-19)

    first, again = (moved(stochastic_rounding=True, seed=7) for _ in range(2))
    assert abs(float(first.mean()) - 1) < 0.2
    assert abs(float(moved().mean())) < 0.02
    assert torch.equal(first, again)
    assert not torch.equal(first, moved(stochastic_rounding=True, seed=8))


@pytest.mark.parametrize("way", ["shared", "eager"])
@pytest.mark.quick("eager")
def test_a_resumed_run_draws_what_it_would_have_drawn(way: str) -> None:
    options = {"stochastic_rounding": True, "seed": 3, "level": "all"}

    def make(params: list[Tensor]) -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.AdamW(params, lr=1e-5, foreach=way != "eager")
        return optimizer, compiled(optimizer, way, **options)

    whole = start(MEMBERS[way], torch.bfloat16)
    optimizer, step = make(whole)
    steps(optimizer, step, 0, 4)
    checkpoint = io.BytesIO()
    torch.save(optimizer.state_dict(), checkpoint)
    halfway = [p.detach().clone() for p in whole]
    steps(optimizer, step, 4, 8)

    def resumed(forget: bool) -> list[Tensor]:
        params = [p.clone().requires_grad_() for p in halfway]
        optimizer, step = make(params)
        checkpoint.seek(0)
        state = torch.load(checkpoint, weights_only=True)
        if forget:
            drop_saved_residuals(state, ".draws")
        optimizer.load_state_dict(state)
        steps(optimizer, step, 4, 8)
        return [collage_fx.value(p).detach() for p in params]

    expected = [collage_fx.value(p).detach() for p in whole]
    assert all(torch.equal(a, b) for a, b in zip(resumed(False), expected, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(resumed(True), expected, strict=True))


def test_a_function_goes_on_with_its_draws() -> None:
    """Saved and given back at each step: without the count an element moves in each, or in none."""

    def moved(*, counted: bool) -> Tensor:
        p, g = (torch.arange(128) / 128 + 1).bfloat16(), torch.full((128,), -1.0).bfloat16()
        begin = p.double()
        step = collage_fx.compile(_descend, storage="ulp8", stochastic_rounding=True)
        with torch.compiler.set_stance("force_eager"):
            for _ in range(64):
                step(p, g)
                lows, draws = collage_fx.residuals(p), collage_fx.draws(p)
                p = p.clone()
                collage_fx.load_residuals(p, lows, draws=draws if counted else None)
        return (collage_fx.value(p) - begin) / (64 * 2.0**-19)

    found = moved(counted=True)
    assert abs(float(found.mean()) - 1) < 0.2 and float(found.std()) < 1
    assert float(moved(counted=False).std()) > 3


def _descend(p: Tensor, g: Tensor) -> None:
    p.sub_(g, alpha=2.0**-19)


def test_explain_says_what_is_rounded_by_chance() -> None:
    p = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    p.grad = torch.ones_like(p)
    optimizer = torch.optim.SGD([p], lr=1e-6)
    found = str(collage_fx.explain(optimizer, stochastic_rounding=True, seed=5))
    assert "rounded by chance, with seed 5: the residuals of 1 states" in found
    assert "keeps changes of" not in found
    assert "keeps changes of" in str(collage_fx.explain(optimizer, storage="ulp8"))


def test_storages_that_round_nothing_are_refused_and_seeds_are_integers() -> None:
    for storage in ("remainder16", "mcf3"):
        with pytest.raises(OptionError, match="rounds nothing; it is for 'mcf2', 'ulp8'"):
            collage_fx.compile(lambda p: p, storage=storage, stochastic_rounding=True)
    with pytest.raises(OptionError, match=r"seed=1\.5"):
        collage_fx.compile(lambda p: p, seed=1.5)
    with pytest.raises(OptionError, match="stochastic_rounding='yes'"):
        collage_fx.compile(lambda p: p, stochastic_rounding="yes")


def test_arithmetic_that_rounds_to_nearest_is_refused_at_once() -> None:
    for storage in ("mcf2", "ulp8"):
        options: dict[str, Any] = {"storage": storage, "stochastic_rounding": True}
        with pytest.raises(OptionError, match=r"arithmetic='eft'.*pass arithmetic='wide'"):
            collage_fx.compile(lambda p: p, arithmetic="eft", **options)
        wide = collage_fx.CollageConfig(**options)
        assert wide == collage_fx.CollageConfig(arithmetic="wide", **options)
        assert wide.arithmetic == "wide"
    by_chance = collage_fx.CollageConfig(stochastic_rounding=True)
    assert (by_chance.storage, by_chance.arithmetic) == ("mcf2", "wide")


@pytest.mark.parametrize(
    ("options", "storage", "arithmetic"),
    [
        ({}, "auto", "wide"),
        ({"level": "plus"}, "auto", "wide"),
        ({"arithmetic": "wide"}, "auto", "wide"),
        ({"arithmetic": "eft"}, "mcf2", "eft"),
        ({"storage": "mcf2"}, "mcf2", "eft"),
        ({"storage": "mcf3"}, "mcf3", "eft"),
        ({"storage": "ulp8"}, "ulp8", "wide"),
    ],
    ids=str,
)
def test_arithmetic_and_storage_go_together(
    options: dict[str, Any], storage: str, arithmetic: str
) -> None:
    config = collage_fx.CollageConfig(**options)
    assert (config.storage, config.arithmetic) == (storage, arithmetic)
    assert config == dataclasses.replace(config)


@pytest.mark.slow
def test_a_storage_that_is_asked_for_takes_its_arithmetic_with_it() -> None:
    """Of `explain`, and of words in remainder16 for which `eft` or chance is asked."""
    p = torch.nn.Parameter(torch.ones(8).bfloat16())
    optimizer = torch.optim.SGD([p], lr=1e-4)
    step = collage_fx.compile(optimizer)
    p.grad = torch.ones_like(p)
    step()
    found = collage_fx.explain(step, storage="mcf2")
    assert found.config.arithmetic == "eft" and found.plan[0].storage == "mcf2"
    for options in ({"arithmetic": "eft"}, {"stochastic_rounding": True}):
        (state,) = collage_fx.explain(step, **options).plan  # type: ignore[arg-type]
        assert state.storage == "mcf2"
