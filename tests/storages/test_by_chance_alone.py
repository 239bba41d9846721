"""States without residuals that are rounded by chance: unbiased, the same however they lie.

For runtime.storage.positions and runtime.storage.layouts.
"""

import io
import itertools
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
from collage_fx.runtime.storage.positions import Place, place_in_order, positions
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
    x, errors = begin.clone(), []
    run = collage_fx.compile(step, states=("x",), **options) if options else step
    for _ in range(SEEDS):
        x.copy_(begin)
        for _ in range(STEPS):
            run(x, gradient)
        errors.append((x.double() - exact).mean())
    found = torch.stack(errors)
    return float(found.mean() / (found.std() / SEEDS**0.5 + 2.0**-60))


@pytest.mark.parametrize("step", [sum_up, average])
def test_a_sum_and_an_average_are_right_on_average(step: Any) -> None:
    assert abs(standard_errors(step, storage="sr", level="all")) < 4
    assert abs(standard_errors(step)) > 100  # rounded to nearest, the control


@WAYS
@pytest.mark.quick("shared")
def test_equal_elements_round_apart(way: str) -> None:
    def rounded(**options: Any) -> list[Tensor]:
        params = [torch.ones(64, 64, dtype=BF16).requires_grad_() for _ in range(MEMBERS[way])]
        step = compiled(torch.optim.SGD(params, lr=2.0**-10), way, **options)
        for p in params:
            p.grad = -torch.ones_like(p)
        step()
        return [p.detach() for p in params]

    found = rounded(storage="sr")
    for p in found:  # an eighth of a unit in the last place each
        assert abs(float((p > 1).double().mean()) - 0.125) < 4 * (0.125 * 0.875 / 4096) ** 0.5
    assert all(torch.equal(p, found[0]) for p in found)  # copies of a parameter stay equal
    assert not torch.equal(found[0], rounded(storage="sr", seed=1)[0])
    by_value = rounded(storage="ulp8", stochastic_rounding=True)[0]
    assert len(by_value.unique()) == 1  # the control


def stepped(
    tensors: list[Tensor], kind: Any = torch.optim.AdamW, *, plain: bool = False, **options: Any
) -> list[Tensor]:
    """The parameters and states after four steps."""
    params = [t.clone().requires_grad_() for t in tensors]
    options = {"storage": "sr", "level": "all"} | options
    optimizer = kind(params, lr=1e-4)
    step = optimizer.step if plain else collage_fx.compile(optimizer, **options)
    for k in range(4):
        generator = torch.Generator().manual_seed(k)
        for p in params:
            p.grad = torch.empty_like(p).copy_(torch.randn(p.shape, generator=generator))
        step()
    return [t.detach() for p in params for t in (p, *optimizer.state[p].values())]


@pytest.mark.kernels
def test_kernels_of_classes_and_of_inductor_round_alike() -> None:
    """Positions are counted in the one, and computed by operations in the other."""
    whole = [torch.randn(5, 3, generator=torch.Generator().manual_seed(k)).to(BF16) for k in (0, 1)]
    one, other = (stepped(whole, multi_tensor=many) for many in (True, False))
    assert all(map(torch.equal, one, other))
    assert not all(map(torch.equal, one, stepped(whole, seed=3)))


def test_elements_round_by_their_place_and_not_by_their_memory() -> None:
    values = torch.randn(4, 3, 5, 2, generator=torch.Generator().manual_seed(0)).to(BF16)
    for laid_out in (
        values.to(memory_format=torch.channels_last),
        values.transpose(0, 2).contiguous().transpose(0, 2),
        torch.stack([values, values])[1],
    ):
        assert all(map(torch.equal, stepped([laid_out] * 2), stepped([values] * 2)))
    turned = values.transpose(0, 2)
    found, expected = stepped([turned])[0].transpose(0, 2), stepped([values])[0]
    assert not torch.equal(found, expected)  # the control: other places


@pytest.mark.parametrize("dtype", [torch.float16, BF16])
@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (7, 5)], ids=str)
def test_any_shape_and_dtype_is_as_near_as_its_neighbours(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = stepped([values] * 2, torch.optim.SGD)[0]
    exact = stepped([values.double()], torch.optim.SGD, plain=True)[0]
    off = (found.double() - exact).abs()
    assert bool((off <= 4 * torch.finfo(dtype).eps * exact.abs()).all())
    assert found.shape == shape and found.dtype == dtype


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
    """Those of which rounding to nearest loses all, in the steps that are looked at."""
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


WORDS: list[Any] = ["sr", {"param": "remainder16", "*": "sr"}, {"param": "sr", "*": "ulp8"}]


@pytest.mark.parametrize("storage", WORDS, ids=str)
@pytest.mark.quick("sr")
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


def test_residuals_of_nothing_are_given_with_their_draws_only() -> None:
    p = torch.ones(3, dtype=BF16)
    with pytest.raises(ResidualError, match="no residual, and no draws"):
        collage_fx.load_residuals(p, ())
    collage_fx.load_residuals(p, (), draws=7)
    assert collage_fx.draws(p) == 7 and collage_fx.residuals(p) == ()


SHAPE = (6, 5, 4)


@pytest.mark.parametrize("cut", [(slice(2, 5),), (slice(None), slice(1, 4)), (slice(1, 6), 2)])
def test_positions_of_a_shard_are_those_that_it_has_in_the_whole(cut: Any) -> None:
    whole = torch.arange(120, dtype=torch.int32).view(SHAPE)
    shard = whole[cut]
    keeps = [isinstance(c, slice) for c in (*cut, *[slice(None)] * (3 - len(cut)))]
    strides = tuple(itertools.compress(whole.stride(), keeps))
    place = Place(int(shard.flatten()[0]), strides)
    assert torch.equal(positions(shard, place), shard)
    first, in_order = int(shard.flatten()[0]), torch.arange(shard.numel()).view(shard.shape)
    follows = torch.equal(shard - first, in_order.to(torch.int32))
    assert place_in_order(shard.shape, place) == (first if follows else None)
    assert not torch.equal(positions(shard), shard)  # the control
    assert torch.equal(positions(whole), whole) and place_in_order(SHAPE, None) == 0
