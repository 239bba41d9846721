"""Residuals live as long as their tensors: over recompilations, checkpoints, foreign writes.

For runtime.residuals.store and runtime.residuals.residual.
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import take_steps, words
from processes import run_script
from saved import drop_saved_residuals
from torch import Tensor, nn

import collage_fx
from collage_fx.errors import CheckpointError, CollageWarning
from collage_fx.runtime.residuals.store import STORE
from collage_fx.runtime.storage.layouts import join_remainder16

Step = Callable[[], Any]


def make(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 2)).bfloat16()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def compiled(optimizer: torch.optim.Optimizer, how: str) -> Step:
    if how == "string":
        return torch.compile(optimizer.step, backend="collage", options={"level": "plus"})
    return collage_fx.compile(optimizer, level="plus")


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Tensor]]:
    """A checkpoint after 4 steps, and everything after 8 steps of the same run."""
    path = tmp_path_factory.mktemp("run") / "checkpoint.pt"
    model = make()
    optimizer = adamw(model)
    step = compiled(optimizer, "compile")
    take_steps(model, step, 0, 4)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    take_steps(model, step, 4, 8)
    return path, words((model, optimizer))


@pytest.mark.parametrize("how", ["compile", "string"])
@pytest.mark.parametrize("order", [("model", "optimizer"), ("optimizer", "model")])
@pytest.mark.quick("order0-string", "order1-compile")
def test_resumed_run_is_bit_equal(
    uninterrupted: tuple[Path, list[Tensor]], how: str, order: tuple[str, str]
) -> None:
    path, expected = uninterrupted
    checkpoint = torch.load(path, weights_only=True)
    model = make(seed=5)
    optimizer = adamw(model)
    step = compiled(optimizer, how)
    for part in order:
        {"model": model, "optimizer": optimizer}[part].load_state_dict(checkpoint[part])
    take_steps(model, step, 4, 8)
    assert same(words((model, optimizer)), expected)


def test_resumed_run_differs_without_residuals(uninterrupted: tuple[Path, list[Tensor]]) -> None:
    """The negative control, and one warning."""
    path, expected = uninterrupted
    checkpoint = torch.load(path, weights_only=True)
    drop_saved_residuals(checkpoint["optimizer"])
    for group in checkpoint["optimizer"]["param_groups"]:
        del group["collage_fx"]
    model = make()
    optimizer = adamw(model)
    step = compiled(optimizer, "compile")
    model.load_state_dict(checkpoint["model"])
    with pytest.warns(CollageWarning, match="holds no residuals") as caught:
        optimizer.load_state_dict(checkpoint["optimizer"])
    assert len(caught) == 1
    take_steps(model, step, 4, 8)
    assert not same(words((model, optimizer)), expected)


@pytest.mark.slow
def test_resumed_in_a_new_process_that_knows_only_the_backend_string(
    uninterrupted: tuple[Path, list[Tensor]], tmp_path: Path
) -> None:
    path, expected = uninterrupted
    script = f"""
import sys, torch
sys.path[:0] = [{str(Path(__file__).parents[1] / "support")!r}]
assert "collage_fx.api" not in sys.modules  # torch loads the names of the logs only
model = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Linear(9, 2)).bfloat16()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
step = torch.compile(optimizer.step, backend="collage", options={{"level": "plus"}})
checkpoint = torch.load({str(path)!r}, weights_only=True)
model.load_state_dict(checkpoint["model"])
optimizer.load_state_dict(checkpoint["optimizer"])
from checkpoints import take_steps, words
from interpreter import without_compiler
with without_compiler():
    take_steps(model, step, 4, 8)
torch.save(words((model, optimizer)), {str(tmp_path / "end.pt")!r})
"""
    done = run_script(script)
    assert done.returncode == 0, done.stderr
    assert same(torch.load(tmp_path / "end.pt", weights_only=True), expected)


def test_plain_torch_loads_the_checkpoint_and_goes_on(
    uninterrupted: tuple[Path, list[Tensor]],
) -> None:
    model = make()
    optimizer = adamw(model)
    optimizer.load_state_dict(torch.load(uninterrupted[0], weights_only=True)["optimizer"])
    take_steps(model, optimizer.step, 4, 5)


def test_reset_and_missing_gradients_and_new_groups_keep_residuals() -> None:
    model, other = make(), make(1)
    optimizer = adamw(model)
    step = compiled(optimizer, "compile")
    take_steps(model, step, 0, 2)
    first = next(model.parameters())
    (before,) = (r.clone() for r in collage_fx.residuals(first))
    assert bool(before.any())
    torch.compiler.reset()
    for p in model.parameters():
        p.grad = None if p is first else torch.ones_like(p)
    with warnings.catch_warnings():
        warnings.simplefilter("error", CollageWarning)
        step()
        assert torch.equal(collage_fx.residuals(first)[0], before)
        optimizer.add_param_group({"params": list(other.parameters())})
        take_steps(other, step, 2, 4)
    take_steps(model, step, 4, 5)
    assert not torch.equal(collage_fx.residuals(first)[0], before)
    assert all(collage_fx.residuals(p) for p in other.parameters())


def test_scheduler_on_a_float_rate_keeps_every_residual() -> None:
    """A float lr becomes symbolic in a second graph; nothing may be dropped or added then."""
    model = make()
    optimizer = adamw(model)
    optimizer.step = step = compiled(optimizer, "compile")  # type: ignore[method-assign]
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    kept = []
    for k in range(4):
        with warnings.catch_warnings():
            warnings.simplefilter("error", CollageWarning)
            take_steps(model, step, k, k + 1)
            scheduler.step()
        kept.append(
            [
                len(collage_fx.residuals(t))
                for p in model.parameters()
                for t in (p, *optimizer.state[p].values())
            ]
        )
    assert kept == [kept[0]] * 4
    assert sum(kept[0]) == 2 * len(list(model.parameters()))


def test_write_from_outside_clears_with_one_warning() -> None:
    model = make()
    step = compiled(adamw(model), "compile")
    take_steps(model, step, 0, 2)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.ones_like(p))
    with pytest.warns(CollageWarning, match="written from outside") as caught:
        take_steps(model, step, 2, 3)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", CollageWarning)
        take_steps(model, step, 3, 4)


def test_replaced_storage_clears_with_a_warning() -> None:
    model = make()
    step = compiled(adamw(model), "compile")
    take_steps(model, step, 0, 2)
    first = next(model.parameters())
    first.data = torch.ones_like(first)
    with pytest.warns(CollageWarning, match=r"residual of 0\.weight was cleared"):
        take_steps(model, step, 2, 3)


def test_checkpoint_that_does_not_fit_is_refused_before_anything_is_loaded(
    uninterrupted: tuple[Path, list[Tensor]],
) -> None:
    checkpoint = torch.load(uninterrupted[0], weights_only=True)["optimizer"]
    checkpoint["state"][0]["collage_fx.exp_avg_sq.remainder16.0"] = torch.zeros(3).bfloat16()
    model = make()
    optimizer = adamw(model)
    compiled(optimizer, "compile")
    with pytest.raises(CheckpointError, match="exp_avg_sq of parameter 0"):
        optimizer.load_state_dict(checkpoint)
    assert not optimizer.state


def test_residuals_of_a_checkpoint_do_not_count_beside_other_values(
    uninterrupted: tuple[Path, list[Tensor]],
) -> None:
    checkpoint = torch.load(uninterrupted[0], weights_only=True)
    model = make(seed=5)
    optimizer = adamw(model)
    compiled(optimizer, "compile")
    optimizer.load_state_dict(checkpoint["optimizer"])
    for p in model.parameters():
        assert collage_fx.residuals(p) == ()
        assert torch.equal(collage_fx.value(p), p.detach().double())
        v = optimizer.state[p]["exp_avg_sq"]  # which came with them
        assert collage_fx.residuals(v) and not torch.equal(collage_fx.value(v), v.double())
    model.load_state_dict(checkpoint["model"])
    for p in model.parameters():
        (lo,) = collage_fx.residuals(p)
        assert bool(lo.any())
        assert torch.equal(collage_fx.value(p), join_remainder16(p.detach(), lo).double())


def test_residual_goes_with_its_tensor() -> None:
    import gc

    from collage_fx.runtime.residuals.store import STORE

    def count() -> int:
        gc.collect()
        return len(list(STORE))

    before = count()
    model = make()
    step = compiled(adamw(model), "compile")
    take_steps(model, step, 0, 1)
    assert count() >= 8
    del model, step
    torch.compiler.reset()
    assert count() <= before


@pytest.mark.parametrize(("level", "kept"), [("auto", False), ("all", True)])
def test_a_momentum_made_with_both_words_keeps_them_where_the_verdict_says_so(
    level: str, kept: bool
) -> None:
    torch.compiler.reset()
    p = torch.ones(8).bfloat16().requires_grad_()
    p.grad = torch.linspace(0.1, 0.9, 8).bfloat16()
    optimizer = torch.optim.SGD([p], lr=1e-3, momentum=0.9, weight_decay=1e-3)
    step = collage_fx.compile(optimizer, level=level)
    step()
    made = STORE.get(optimizer.state[p]["momentum_buffer"])
    assert made is not None and made.provisional
    step()
    momentum = STORE.get(optimizer.state[p]["momentum_buffer"])
    assert (momentum is made and not momentum.provisional) if kept else momentum is None
    verdicts = {s.name.partition(" ")[0]: s.compensated for s in collage_fx.report(step).states}
    assert verdicts == {"param_groups[0].params[0]": True, "momentum_buffer": kept}
