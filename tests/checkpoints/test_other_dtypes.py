"""State dicts whose states have other dtypes than those of the optimizer that loads them.

For optimizer.checkpoints.saved_residuals and optimizer.checkpoints.giving.
"""

import copy
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import permutations
from typing import Any

import pytest
import torch
from checkpoints import Run, compiled, plain, train, words
from interpreter import without_compiler
from torch import Tensor

import collage_fx
from collage_fx.errors import CheckpointError, CollageWarning

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(autouse=True, scope="module")
def _interpreted() -> Iterator[None]:
    with without_compiler():
        yield


def in_fp32(*, ours: bool) -> Run:
    """Return a run of fp32 weights; the option is whether collage_fx compiles it, too."""
    model, _ = plain(0)
    run = model.float(), torch.optim.AdamW(model.named_parameters(), lr=1e-3)
    train_fp32(run if not ours else compiled(run), 0, 3)
    return run


def train_fp32(run: Run, first: int, last: int) -> None:
    for k in range(first, last):
        generator = torch.Generator().manual_seed(k)
        for p in run[0].parameters():
            p.grad = torch.randn(p.shape, generator=generator).bfloat16().to(p.dtype)
        run[1].step()


def values(run: Run) -> dict[str, Tensor]:
    return {
        f"{key} of {name}": collage_fx.value(t)
        for name, p in run[0].named_parameters()
        for key, t in [("p", p), *run[1].state[p].items()]
    }


@pytest.mark.filterwarnings("ignore:.*nothing needed compensation")
@pytest.mark.parametrize("ours", [False, True])
@pytest.mark.quick("False")
def test_a_run_with_fp32_weights_goes_on_here_in_any_order(ours: bool) -> None:
    old = in_fp32(ours=ours)
    weights, states = old[0].state_dict(), old[1].state_dict()
    compiles, loads = 1, 2
    for order in permutations(range(3)):
        if order.index(loads) < order.index(compiles):
            continue  # PyTorch has cast them before anybody knew
        new = plain(1)
        steps: list[Callable[[], Any]] = [
            partial(collage_fx.load_master_weights, new[0], weights),
            partial(compiled, new, storage="remainder16", level="all"),
            partial(new[1].load_state_dict, copy.deepcopy(states)),
        ]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", CollageWarning)
            for k in order:
                steps[k]()
        (said,) = [str(w.message) for w in caught if w.category is CollageWarning]
        assert "exp_avg, exp_avg_sq from float32 to bfloat16" in said and order.count(0) == 1
        found, want = values(new), values(old)
        assert all(torch.equal(found[name], want[name]) for name in want), order
        assert all(s.dtype == BF16 for s in new[1].state[new[0][0].weight].values() if s.dim())
    end = copy.deepcopy(old)
    train_fp32(end, 3, 8)
    train(new, 3, 8)
    late = plain(1)
    late[0].load_state_dict(weights)  # the control: high words only
    late[1].load_state_dict(copy.deepcopy(states))
    train(late, 3, 8)
    for name, want in values(end).items():
        moved = (want - values(old)[name]).abs().max() if "step" not in name else torch.tensor(1)
        assert (values(new)[name] - want).abs().max() <= 1e-4 * moved, name
    off = [(values(late)[n] - w).abs().max() for n, w in values(end).items() if n.startswith("p ")]
    assert max(off) > 1e-3


def test_moments_keep_in_any_storage_that_a_step_has_what_that_holds() -> None:
    old = in_fp32(ours=False)
    new = compiled(plain(1), storage="mcf2", level="plus", arithmetic="wide")
    with pytest.warns(CollageWarning, match="has cast"):
        new[1].load_state_dict(copy.deepcopy(old[1].state_dict()))
    with warnings.catch_warnings():
        warnings.simplefilter("error", CollageWarning)  # nothing of coarser storages
        train(new, 3, 4)
    state = new[1].state[new[0][0].weight]
    assert len(collage_fx.residuals(state["exp_avg_sq"])) == 1, "which the level compensates"
    again = copy.deepcopy(old)
    train_fp32(again, 3, 4)
    want = again[1].state[again[0][0].weight]["exp_avg_sq"].double()
    assert (collage_fx.value(state["exp_avg_sq"]) - want).abs().max() < 2.0**-15 * want.max()
    assert (state["exp_avg_sq"].double() - want).abs().max() > 2.0**-12 * want.max(), "the control"


@pytest.fixture(scope="module")
def run() -> Run:
    found = compiled(plain(0))
    train(found, 0, 3)
    return found


def cast(states: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    states = copy.deepcopy(states)
    for state in states["state"].values():
        for key, value in state.items():
            if key != "step" and value.is_floating_point():
                state[key] = value.to(dtype)
    return states


def loaded(run: Run, states: dict[str, Any]) -> Run:
    other = compiled(plain(1))
    other[0].load_state_dict(run[0].state_dict())
    other[1].load_state_dict(states)
    return other


def test_states_that_were_cast_to_fp32_come_back_bit_for_bit(run: Run) -> None:
    """Residuals of integers too, which stand there as bits of bf16, and of those NaNs."""
    states = run[1].state_dict()
    bits = states["state"][0]["collage_fx.<param>.remainder16.0"]
    assert bits.dtype == BF16
    with pytest.warns(CollageWarning, match="from float32 to bfloat16") as caught:
        other = loaded(run, cast(states, FP32))
    assert len(caught) == 1
    assert all(map(torch.equal, words(other), words(run)))
    with warnings.catch_warnings():
        warnings.simplefilter("error", CollageWarning)
        train(other, 3, 5)
    unbroken = copy.deepcopy(run)
    train(compiled(unbroken), 3, 5)
    assert all(map(torch.equal, words(other), words(unbroken)))


def test_any_bits_of_a_residual_survive_a_cast_to_fp32() -> None:
    from collage_fx.optimizer.checkpoints import saved_residuals as saved

    bits = torch.arange(-(2**15), 2**15).to(torch.int16)
    stored = saved._as_bits(bits, BF16).float()
    assert torch.equal(saved._from_bits(stored, torch.int16, BF16), bits)
    # The control: as numbers, those of NaNs are gone.
    assert not torch.equal(stored.bfloat16().view(torch.int16), bits)
    assert saved._from_bits(stored + 1e-3, torch.int16, BF16).dtype == FP32, "nothing of ours"


def test_states_that_were_cast_to_fp16_are_cast_back_as_pytorch_does(run: Run) -> None:
    states = cast(run[1].state_dict(), FP16)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CollageWarning)
        other = loaded(run, states)
        train(other, 3, 4)
    assert "from float16 to bfloat16" in str(caught[0].message)
    for p, state in other[1].state.items():
        assert {s.dtype for s in state.values() if s.dim()} == {p.dtype}
    bare = plain(1)
    bare[1].load_state_dict(states)  # the control: nobody is there but PyTorch
    assert all(s.dtype == BF16 for s in bare[1].state[bare[0][0].weight].values() if s.dim())


def test_states_kept_in_fp32_beside_bf16_weights_stay_fp32(run: Run) -> None:
    mixed = compiled(plain(0))
    train(mixed, 0, 2)
    for state in mixed[1].state.values():
        state["extra"] = {"sum": torch.full((3,), 1 / 3)}
    other = compiled(plain(1))
    other[0].load_state_dict(mixed[0].state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error", CollageWarning)
        other[1].load_state_dict(copy.deepcopy(mixed[1].state_dict()))
    found = other[1].state[other[0][0].weight]["extra"]["sum"]
    assert found.dtype == FP32 and torch.equal(found, torch.full((3,), 1 / 3))


def test_states_with_residuals_go_on_whole_beside_fp32_weights(run: Run) -> None:
    model, _ = plain(0)
    wide = model.float(), torch.optim.AdamW(model.named_parameters(), lr=1e-3)
    compiled(wide)
    with pytest.warns(CollageWarning, match=r"bfloat16 to float32.*weight and 3 more|residuals of"):
        wide[1].load_state_dict(copy.deepcopy(run[1].state_dict()))
    for p, q in zip(wide[0].parameters(), run[0].parameters(), strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            want = collage_fx.value(run[1].state[q][key])
            assert torch.equal(wide[1].state[p][key].double(), want.float().double())
            assert not torch.equal(want, run[1].state[q][key].double()), "the control"


def test_a_load_that_fails_changes_nothing(run: Run) -> None:
    other = compiled(plain(1))
    train(other, 0, 2)
    before, groups = words(other), copy.deepcopy(other[1].state_dict()["param_groups"])
    states = cast(run[1].state_dict(), FP32)
    states["state"][0]["collage_fx.exp_avg.mcf2.0"] = torch.zeros(3)
    with pytest.raises(CheckpointError, match=r"exp_avg of parameter 0\.weight"):
        other[1].load_state_dict(states)
    few = copy.deepcopy(run[1].state_dict())
    few["param_groups"][0]["params"].pop()
    with pytest.raises(ValueError, match="doesn't match the size"):
        other[1].load_state_dict(few)
    assert all(map(torch.equal, words(other), before))
    assert other[1].state_dict()["param_groups"] == groups
    train(other, 2, 3)
