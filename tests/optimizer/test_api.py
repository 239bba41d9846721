"""The public functions, as a user meets them: options, explain, warnings and errors.

For api, config, dynamo.options and inspection.explain.
"""

import warnings
from typing import Any

import pytest
import torch
from processes import run_script
from saved import saved_residuals
from tensors import bf16, with_grads
from torch import Tensor, nn

import collage_fx
from collage_fx.errors import CollageWarning, OptionError, ResidualError


def sgd_step(params: list[Tensor], grads: list[Tensor], momenta: list[Tensor]) -> None:
    """A plain function over tensors, as the README has it."""
    for p, g, m in zip(params, grads, momenta, strict=True):
        m.mul_(0.999).add_(g)
        p.add_(m, alpha=-0.01)


@pytest.mark.parametrize("arithmetic", ["eft", "wide"])
@pytest.mark.quick("eft")
def test_plain_function_is_compensated(arithmetic: str) -> None:
    params = [torch.ones(5).bfloat16(), torch.ones(3, 4).bfloat16()]
    momenta = [torch.zeros_like(p) for p in params]
    grads = [torch.full_like(p, 1e-4) for p in params]
    exact_p, exact_m = torch.tensor(1.0).double(), torch.tensor(0.0).double()
    step = collage_fx.compile(sgd_step, arithmetic=arithmetic)
    with torch.no_grad():
        for _ in range(50):
            step(params, grads, momenta)
            exact_m = exact_m * 0.999 + grads[0][0].double()
            exact_p = exact_p - 0.01 * exact_m
    for p, m in zip(params, momenta, strict=True):
        assert torch.allclose(collage_fx.value(p), exact_p.expand(p.shape), rtol=2e-5, atol=0)
        assert torch.allclose(collage_fx.value(m), exact_m.expand(m.shape), rtol=2e-3, atol=0)
        moved = 1 - exact_p
        assert abs(float((1 - collage_fx.value(p)).mean() / moved) - 1) < 0.02
    plain = torch.ones(5).bfloat16()
    for _ in range(50):
        plain.add_(torch.full_like(plain, 1e-4), alpha=-0.01)
    assert bool((plain == 1).all())  # the control: plain bf16 does not move at all


def test_plain_function_with_the_backend_string_says_who_saves_its_residuals() -> None:
    p, g = torch.ones(4).bfloat16(), torch.ones(4).bfloat16()

    @torch.compile(backend="collage")
    def descend(p: Tensor, g: Tensor) -> None:
        p.sub_(g, alpha=1e-3)

    with pytest.warns(CollageWarning, match="load_residuals"):
        descend(p, g)
    descend(p, g)
    (lo,) = collage_fx.residuals(p)
    q = p.clone()
    collage_fx.load_residuals(q, [lo])
    assert torch.equal(collage_fx.value(q), collage_fx.value(p))
    with pytest.raises(ResidualError, match="shape"):
        collage_fx.load_residuals(q, [lo[:2]])


class Descent(torch.optim.Optimizer):
    """An optimizer that a user wrote, without _init_group."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"])
        return loss


def test_own_optimizer_with_closure_and_checkpoint() -> None:
    model = nn.Linear(4, 3).bfloat16()
    optimizer = Descent(model.parameters())
    step = collage_fx.compile(optimizer)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4).bfloat16()).square().mean()
        loss.backward()
        return loss

    losses = [float(step(closure).detach()) for _ in range(3)]
    assert losses[0] > 0
    assert sorted(saved_residuals(optimizer.state_dict())) == [0, 1]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"level": "max"}, "'light', 'plus', 'auto', 'all'"),
        ({"arithmetic": "fp8"}, "'eft', 'wide'"),
        ({"storage": "mcf9"}, "'mcf2'"),
        ({"storage": {"param": "mcf9"}}, "'mcf2'"),
        ({"storage": {1: "mcf2"}}, "pattern"),
        ({"storage": 3}, "neither"),
        ({"levle": "plus"}, "unknown option 'levle', did you mean 'level'?"),
        ({"level": "plsu"}, "'all', did you mean 'plus'?"),
        ({"storage": "mfc2"}, "storage='mfc2', did you mean 'mcf2'?"),
        ({"storage": {"param": "ulp"}}, "did you mean 'ulp8'?"),
    ],
)
def test_unknown_options_name_what_is_allowed(options: dict[str, Any], named: str) -> None:
    with pytest.raises(OptionError, match=named):
        collage_fx.compile(torch.optim.SGD([bf16(2)]), **options)
    step = torch.compile(
        torch.optim.SGD(with_grads([bf16(2)])).step, backend="collage", options=options
    )
    with pytest.raises(Exception, match=named):
        step()


@pytest.mark.kernels
def test_inductor_options_pass_through() -> None:
    (p,) = with_grads([bf16(8)])
    step = collage_fx.compile(torch.optim.SGD([p]), **{"cpp.threads": 1})
    step()
    assert collage_fx.residuals(p)


@pytest.mark.kernels
def test_explain_reports_and_changes_nothing() -> None:
    params = with_grads([bf16(8, 4), bf16(4)])
    optimizer = torch.optim.AdamW(params, lr=1e-3)
    before = [p.detach().clone() for p in params]
    options: dict[str, Any] = {"level": "plus", "storage": "mcf2", "multi_tensor": False}
    found = collage_fx.explain(optimizer, verbose=True, **options)
    assert not optimizer.state
    assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))
    assert not any(collage_fx.residuals(p) for p in params)
    verdicts = {s.name: s for s in found.plan}
    v = verdicts["exp_avg_sq of param_groups[0].params[0]"]
    assert v.compensated and v.storage == "mcf2" and v.residual_bytes == 2 * 32
    assert v.recurrence == "x' = 0.999*x + B"
    assert not verdicts["exp_avg of param_groups[0].params[1]"].compensated
    assert found.residual_bytes == 2 * 2 * (32 + 4)
    assert len(found.expanded) == len(found.lowered) == 1 and found.members == [2]
    assert "collage.grow" in found.expanded[0].code
    assert "collage.round" in found.lowered[0].code and "grow" not in found.lowered[0].code
    assert "aten" in found.before[0].code and found.output_code[0].strip()
    assert "exp_avg_sq of param_groups[0].params[1]" in str(found)


def test_explain_a_function_and_a_compiled_step() -> None:
    args = ([torch.ones(3).bfloat16()], [torch.ones(3).bfloat16()], [torch.zeros(3).bfloat16()])
    found = collage_fx.explain(sgd_step, *args)
    assert {s.name: s.compensated for s in found.plan} == {"params[0]": True, "momenta[0]": True}
    assert torch.equal(args[0][0], torch.ones(3).bfloat16())
    optimizer = torch.optim.SGD(with_grads([bf16(4)]), momentum=0.9)
    step = collage_fx.compile(optimizer, level="all", arithmetic="wide")
    found = collage_fx.explain(step)
    assert found.config == collage_fx.CollageConfig(level="all", arithmetic="wide")
    assert all(s.compensated for s in found.plan) and len(found.plan) == 2


def test_fp32_optimizer_works_and_says_that_nothing_was_needed() -> None:
    p = torch.randn(6).requires_grad_()
    q = p.detach().clone().requires_grad_()
    p.grad = q.grad = torch.randn(6)
    step = collage_fx.compile(torch.optim.AdamW([p]))
    with pytest.warns(CollageWarning, match="nothing needed compensation.*float32"):
        step()
    torch.optim.AdamW([q]).step()
    assert torch.allclose(p, q) and not collage_fx.residuals(p)


def test_complex_and_integer_states_are_named() -> None:
    def step(p: Tensor, z: Tensor, n: Tensor) -> None:
        p.mul_(0.999)
        z.mul_(0.5)
        n.add_(1)

    args = (torch.ones(4).bfloat16(), torch.ones(4, dtype=torch.complex64), torch.zeros(4).int())
    found = collage_fx.explain(step, *args)
    reasons = {s.name: s.reason for s in found.plan}
    assert "complex64" in reasons["z"] and "int32" in reasons["n"]
    assert [s.name for s in found.refused] == ["z"]


def test_overlapping_views_are_refused_by_name() -> None:
    def step(a: Tensor, b: Tensor) -> None:
        a.mul_(0.999)
        b.add_(1)

    base = torch.ones(8).bfloat16()
    with pytest.warns(CollageWarning, match="overlap"):
        collage_fx.compile(step)(base[:6], base[2:])
    assert not collage_fx.residuals(base)


def test_exception_in_a_step_leaves_states_and_residuals_whole() -> None:
    p = bf16(4)
    optimizer = Descent([p])
    step = collage_fx.compile(optimizer)
    p.grad = torch.ones_like(p)
    step()
    before = [p.detach().clone(), *(r.clone() for r in collage_fx.residuals(p))]

    def closure() -> Tensor:
        raise RuntimeError("the user's own")

    with pytest.raises(RuntimeError, match="the user's own"):
        step(closure)
    after = [p.detach(), *collage_fx.residuals(p)]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error", CollageWarning)
        step()


def test_residual_bytes_are_two_per_element_and_no_wide_copy_lives() -> None:
    import gc

    n = 12_345
    params = with_grads([bf16(n)])
    optimizer = torch.optim.AdamW(params)
    step = collage_fx.compile(optimizer, level="plus")
    step()
    step()
    gc.collect()
    sizes = sorted(
        {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for t in gc.get_objects()
            if type(t) in (Tensor, nn.Parameter) and t.numel() == n and t.device.type == "cpu"
        }.values()
    )
    # parameter, gradient, exp_avg, exp_avg_sq and two residuals, all in bf16
    assert sizes == [2 * n] * 6


@pytest.mark.slow  # test_state.py has it, with a checkpoint
def test_backend_string_works_in_a_process_that_never_imported_collage_fx() -> None:
    script = """
import sys, torch
p = torch.ones(8).bfloat16().requires_grad_()
p.grad = torch.full_like(p, 1e-3)
sgd = torch.optim.SGD([p], lr=1e-2)
step = torch.compile(sgd.step, backend="collage", options={"level": "light"})
for _ in range(3):
    step()
import collage_fx
assert float(1 - collage_fx.value(p)[0]) > 2.9e-5, collage_fx.value(p)
"""
    done = run_script(script)
    assert done.returncode == 0, done.stderr


def test_value_of_a_tensor_without_residual_is_converted() -> None:
    x = torch.tensor([1.5, -2.0]).bfloat16()
    assert collage_fx.residuals(x) == ()
    assert collage_fx.value(x).dtype == torch.float64
    assert torch.equal(collage_fx.value(x, torch.float32), x.float())
