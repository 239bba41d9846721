"""Optimizers constructed with fused=True are served by compiled graphs. For optimizer.fused."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensors import bf16
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

import collage_fx
from collage_fx.optimizer import fused

KINDS: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (AdamW, {}),
    (Adam, {"amsgrad": True, "weight_decay": 0.1}),
    (SGD, {"momentum": 0.99, "nesterov": True}),
    (Adagrad, {"lr": 1e-4}),
]
STEPS = 30


def params(count: int, dtype: torch.dtype = torch.bfloat16) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(7, generator=generator).to(dtype)) for _ in range(count)]


def gradients(count: int, steps: int = STEPS) -> Iterator[list[Tensor]]:
    generator = torch.Generator().manual_seed(2)
    for _ in range(steps):
        yield [(torch.randn(7, generator=generator) * 1e-2).bfloat16() for _ in range(count)]


def trained(
    kind: type[Optimizer], kwargs: dict[str, Any], *, count: int, way: str, **options: Any
) -> tuple[list[Tensor], Optimizer]:
    """Return the values of parameters and the optimizer after some steps."""
    exact = way == "float64"
    ps = params(count, torch.float64 if exact else torch.bfloat16)
    if exact:  # from the same values
        for p, q in zip(ps, params(count), strict=True):
            p.data.copy_(q.detach())
    optimizer = kind(ps, fused=way == "fused", **{"lr": 1e-4, **kwargs})
    step = optimizer.step if exact else collage_fx.compile(optimizer, **options)
    for gs in gradients(count):
        for p, g in zip(ps, gs, strict=True):
            p.grad = g.to(p.dtype)
        step()
    optimizer.step = step  # type: ignore[method-assign]
    return [collage_fx.value(p) for p in ps], optimizer


def worst(found: list[Tensor], exact: list[Tensor]) -> float:
    return max(float((f - e).abs().max()) for f, e in zip(found, exact, strict=True))


@pytest.mark.parametrize(("kind", "kwargs"), KINDS, ids=[k.__name__ for k, _ in KINDS])
@pytest.mark.parametrize("count", [pytest.param(2, marks=pytest.mark.slow), 9])
@pytest.mark.quick("9-AdamW")
def test_all_states_are_updated_in_graphs_in_wide(
    kind: type[Optimizer], kwargs: dict[str, Any], count: int
) -> None:
    exact, _ = trained(kind, kwargs, count=count, way="float64")
    found, optimizer = trained(kind, kwargs, count=count, way="fused")
    plain, other = trained(kind, kwargs, count=count, way="not fused", arithmetic="wide")
    assert worst(found, exact) <= 1.1 * worst(plain, exact)
    moved = worst([p.detach().double() for p in params(count)], exact)
    assert worst(found, exact) < 0.05 * moved
    report = collage_fx.report(optimizer)
    served = [(s.name, s.graph, s.joined) for s in collage_fx.report(other).states]
    assert [(s.name, s.graph, s.joined) for s in report.states] == served
    assert all(graph >= STEPS - 1 for _, graph, _ in served)
    assert sum("fused=True" in note and "fp32" in note for note in report.notes) == 1
    assert collage_fx.explain(optimizer).config.arithmetic == "wide"


def test_eft_is_used_where_it_is_asked_for() -> None:
    _, optimizer = trained(AdamW, {}, count=2, way="fused", arithmetic="eft")
    found = collage_fx.explain(optimizer)
    assert found.config.arithmetic == "eft"
    assert any("eft" in note for note in collage_fx.report(optimizer).notes)


@pytest.mark.parametrize(("kind", "kwargs"), KINDS, ids=[k.__name__ for k, _ in KINDS])
@pytest.mark.quick("AdamW", "SGD")
def test_groups_defaults_and_state_dict_are_as_of_the_kernel(
    kind: type[Optimizer], kwargs: dict[str, Any]
) -> None:
    _, optimizer = trained(kind, kwargs, count=2, way="fused")
    ps = params(2)
    stock = kind(ps, fused=True, **{"lr": 1e-4, **kwargs})
    for gs in gradients(2):
        for p, g in zip(ps, gs, strict=True):
            p.grad = g
        stock.step()
    mine, its = optimizer.state_dict(), stock.state_dict()
    for group in mine["param_groups"]:
        group.pop("collage_fx", None)  # where a checkpoint has the residuals
    assert mine["param_groups"] == its["param_groups"]
    assert optimizer.defaults == stock.defaults and optimizer.defaults["fused"]
    assert list(mine["state"]) == list(its["state"])
    for k, state in its["state"].items():
        found = {n: v for n, v in mine["state"][k].items() if not n.startswith("collage")}
        assert list(found) == list(state)
        for name, value in state.items():
            assert found[name].dtype == value.dtype and found[name].shape == value.shape
            assert (found[name] - value).abs().max() <= 0.05 * value.abs().max()
    twin = kind(params(2), fused=True, **{"lr": 1e-4, **kwargs})
    twin.load_state_dict(its)  # of the kernel's checkpoint
    assert twin.param_groups[0]["fused"]


def test_a_step_that_fails_leaves_the_groups_as_they_were() -> None:
    ps = params(2)
    optimizer = AdamW(ps, fused=True)
    step = collage_fx.compile(optimizer)

    def closure() -> Tensor:
        assert not fused.is_fused(optimizer)
        raise ValueError("no loss")

    with pytest.raises(ValueError, match="no loss"):
        step(closure)
    assert optimizer.param_groups[0]["fused"] is True
    assert optimizer.param_groups[0]["capturable"] is False


@pytest.mark.slow
def test_groups_of_which_one_is_fused_and_optimizers_that_wrap_one() -> None:
    class Every(Optimizer):
        def __init__(self, inner: Optimizer) -> None:
            self.inner = inner
            super().__init__(inner.param_groups, {})

        def step(self, closure: Any = None) -> None:
            self.inner.step()

    ps = params(3)
    groups = [{"params": ps[:2], "fused": True}, {"params": ps[2:], "fused": False}]
    for optimizer in (AdamW(groups, lr=1e-4), Every(AdamW(groups, lr=1e-4))):
        step = collage_fx.compile(optimizer)
        for gs in gradients(3, 3):
            for p, g in zip(ps, gs, strict=True):
                p.grad = g
            step()
        assert [bool(g["fused"]) for g in optimizer.param_groups] == [True, False]
        report = collage_fx.report(step)
        assert all(s.graph == 3 and not s.joined for s in report.states), str(report)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("kind", "kwargs"), KINDS, ids=[k.__name__ for k, _ in KINDS])
@pytest.mark.quick("AdamW-dtype0", "SGD-dtype0")
def test_grad_scaler_as_by_the_kernel(
    kind: type[Optimizer], kwargs: dict[str, Any], dtype: torch.dtype
) -> None:
    """True gradients of 1e-9 are 0 in fp16, scaled by 2^20 they are not; one step is skipped."""
    start = torch.linspace(-2e-3, 2e-3, 12).to(dtype)
    ways = {}
    for way in ("kernel", "collage"):
        # The kernel with fp32 weights and states, of the same gradients.
        p = nn.Parameter(start.clone().to(torch.float32 if way == "kernel" else dtype))
        optimizer = kind([p], fused=True, **({"lr": 1e5} if kind is SGD else kwargs))
        if dtype is torch.float16 and not hasattr(optimizer, "_step_supports_amp_scaling"):
            pytest.skip("before 2.13 GradScaler unscales Adagrad's gradients, and refuses fp16")
        if way == "collage":
            optimizer.step = collage_fx.compile(  # type: ignore[method-assign]
                optimizer, storage="auto", level="all"
            )
        scaler = GradScaler("cpu", init_scale=2.0**20, growth_interval=4)
        generator = torch.Generator().manual_seed(3)
        left = []
        for k in range(6):
            scale = scaler.scale(torch.ones(()))
            g = torch.randn(12, generator=generator) * 1e-9 * scale
            p.grad = g.to(dtype).to(p.dtype)
            if k == 3:
                p.grad[0] = torch.inf
            before = p.detach().clone()
            scaler.step(optimizer)
            assert torch.equal(before, p.detach()) or k != 3
            scaler.update()
            left.append(p.grad.to(dtype))
        assert not {"grad_scale", "found_inf", fused.SCALE} & set(vars(optimizer))
        ways[way] = collage_fx.value(p), left, scaler.get_scale(), optimizer.state[p].get("step")
        assert not collage_fx.residuals(p.grad)
        if way == "collage":
            names = [s.name for s in collage_fx.report(optimizer.step).states]
            assert names and not any(name.endswith(".grad") for name in names)
    (exact, grads, scale, count), (found, mine, other, steps) = ways["kernel"], ways["collage"]
    moved = (exact - start.double()).abs().max()
    if kind is SGD:  # fp16 cannot hold Adam's second moments of such gradients, scaled or not
        assert (found - exact).abs().max() < 0.02 * moved
    assert all(map(torch.equal, grads, mine))
    assert scale == other and count == steps


class Derived(SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class ScalesInside(Optimizer):
    """Has a GradScaler step the optimizer that it wraps, as accelerate's wrapper does."""

    def __init__(self, inner: Optimizer, scaler: GradScaler) -> None:
        self.inner, self.scaler = inner, scaler
        super().__init__(inner.param_groups, {})

    def step(self, closure: Any = None) -> None:
        self.scaler.step(self.inner)
        self.scaler.update()


@pytest.mark.parametrize("kind", [Derived, ScalesInside])
@pytest.mark.quick("ScalesInside")
def test_grad_scaler_of_subclasses_and_wrappers(kind: Any) -> None:
    (p,) = params(1)
    start = p.detach().double()
    scaler = GradScaler("cpu", init_scale=2.0**10)
    inner = (
        SGD([p], lr=0.25, fused=True) if kind is ScalesInside else Derived([p], 0.25, fused=True)
    )
    optimizer = ScalesInside(inner, scaler) if kind is ScalesInside else inner
    optimizer.step = collage_fx.compile(optimizer)  # type: ignore[method-assign]
    for _ in range(3):
        scale = float(scaler.scale(torch.ones(())))
        p.grad = torch.full((7,), 2.0**-6 * scale).bfloat16()
        if kind is ScalesInside:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
    assert torch.equal(collage_fx.value(p), start - 3 * 0.25 * 2.0**-6)
    assert inner._step_supports_amp_scaling  # type: ignore[attr-defined]


def test_capturable_beside_fused_where_nothing_is_compiled() -> None:
    (p,) = params(1)
    step = collage_fx.compile(AdamW([p], fused=True, capturable=True))
    before = p.detach().clone()
    with torch.compiler.set_stance("force_eager"):
        p.grad = torch.ones(7).bfloat16()
        step()
    assert (collage_fx.value(p) != before).all()


def test_a_residual_of_a_gradient_is_not_made_by_unscaling() -> None:
    p = bf16(4).requires_grad_()
    optimizer = AdamW([p], fused=True)
    optimizer.step = collage_fx.compile(optimizer, level="all")  # type: ignore[method-assign]
    before = copy.deepcopy(optimizer.param_groups[0]["betas"])
    scaler = GradScaler("cpu")
    for _ in range(3):
        p.grad = torch.ones(4).bfloat16()
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.update()
        assert not collage_fx.residuals(p.grad)
    assert optimizer.param_groups[0]["betas"] == before
