"""States of fp32 as two words of fp32, and only where they are asked for.

For runtime.storage.registry and runtime.storage.layouts.
"""

import copy
from fractions import Fraction
from typing import Any

import pytest
import torch
from graphs import capture_optimizer, differing, random_inputs
from storage_runs import MEMBERS, WAYS, compiled, lost, start, steps
from torch import Tensor
from torch._inductor import config as inductor_config
from torch.optim import SGD, AdamW, Optimizer

import collage_fx
from collage_fx.errors import CollageWarning, StorageError
from collage_fx.passes.codegen.multi_tensor_kernel import (
    MULTI_TENSOR_KERNELS,
    register_multi_tensor,
)
from collage_fx.passes.ir.program import graph_of
from collage_fx.runtime.kernels import cpp_loop
from collage_fx.runtime.residuals.store import STORE
from collage_fx.runtime.storage.registry import chosen
from collage_fx.runtime.storage.state_name import StateName

DOUBLE = "double_single"


def drifted(way: str, dtype: torch.dtype, **options: Any) -> list[Tensor]:
    """Steps far smaller than fp32 can add to a parameter of about one, with momentum."""
    params = start(MEMBERS[way], dtype)
    optimizer = SGD(params, lr=1e-8, momentum=0.9, foreach=way != "eager")
    steps(optimizer, compiled(optimizer, way, **options) if options else optimizer.step)
    return [collage_fx.value(p).detach() for p in params]


@pytest.mark.parametrize("level, bound", [("light", 1e-6), ("all", 1e-8)])
@WAYS
@pytest.mark.quick("each-light-1e-06", "shared-all-1e-08")
def test_two_words_keep_what_one_rounds_away(way: str, level: str, bound: float) -> None:
    exact = drifted(way, torch.float64)
    assert lost(drifted(way, torch.float32), exact) > 0.1  # the control
    assert lost(drifted(way, torch.float32, storage=DOUBLE, level=level), exact) < bound


class Kernel:
    """The kernel of SGD with momentum over all members, and inputs near one for it."""

    def __init__(self) -> None:
        options = {"momentum": 0.9, "weight_decay": 0.01, "lr": 1e-8}
        shapes = ((4, 3),) * 8
        captured = capture_optimizer(SGD, shapes=shapes, dtype=torch.float32, **options)
        self.of_class = captured.rewritten("all", storage=DOUBLE)
        self.inputs = random_inputs(self.of_class.expanded)

    def differences(self) -> int:
        """At how many elements the compiled kernel differs from the eager functions."""
        kernel = MULTI_TENSOR_KERNELS[register_multi_tensor(self.of_class)]
        kernel.runners.clear()
        ours = [x.clone() for x in self.inputs]
        kernel.runner(torch.device("cpu")).run([[x] for x in ours], [ours[0].numel()])
        results = graph_of(self.of_class.expanded)(*self.inputs)
        pairs = zip(kernel.stored, kernel.results, strict=True)
        self.source = kernel.sources["cpu"]
        return sum(differing(ours[i], results[k]) for i, k in pairs)


@pytest.mark.kernels
def test_the_kernel_is_the_eager_functions_bit_for_bit_and_contracts_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel = Kernel()
    assert kernel.differences() == 0
    assert "double" in kernel.source and "fma" not in kernel.source
    flags = [*cpp_loop.FLAGS, "-ffp-contract=fast"]
    monkeypatch.setattr(cpp_loop, "FLAGS", flags)
    with inductor_config.patch(force_disable_caches=True):
        assert kernel.differences() > 0  # the comparison can fail


def test_the_whole_value_is_that_of_rationals_to_49_bits() -> None:
    p = torch.tensor([1.0, -3.1, 1e-20, 7e30]).requires_grad_()
    optimizer = SGD([p], lr=1e-9)
    step = collage_fx.compile(optimizer, storage=DOUBLE)
    exact = [Fraction(v) for v in p.tolist()]
    for k in range(8):
        p.grad = torch.tensor([1.1, 0.3, 2e-20, 3e30]) * (k + 1)
        pairs = zip(exact, p.grad.tolist(), strict=True)
        exact = [x - Fraction(1e-9) * Fraction(g) for x, g in pairs]
        step()
    for value, high, x in zip(collage_fx.value(p).tolist(), p.tolist(), exact, strict=True):
        assert abs(Fraction(value) - x) <= 8 * abs(x) / 2**49
        assert abs(Fraction(high) - x) > 64 * abs(x) / 2**49  # the control: one word


@pytest.mark.parametrize("storage", ["mcf2", "auto", "remainder16", {"exp_avg": "mcf3"}])
@pytest.mark.quick("auto", "storage3")
def test_fp32_states_are_left_alone_where_it_is_not_named(storage: Any) -> None:
    params = start(1, torch.float32)
    plain = start(1, torch.float32)
    optimizer, reference = (AdamW(p, lr=1e-3) for p in (params, plain))
    with pytest.warns(CollageWarning, match="nothing needed compensation"):
        steps(optimizer, compiled(optimizer, "eager", storage=storage), 0, 3)
    steps(reference, reference.step, 0, 3)
    assert not any(STORE.get(p) for p in params) and torch.equal(params[0], plain[0])


def test_a_count_of_steps_is_left_alone_unless_it_is_named() -> None:
    def storage(choice: Any, own: str | None, of: str = "p") -> str:
        choice = choice if isinstance(choice, str) else tuple(choice.items())
        return chosen(choice, StateName(own, of), torch.float32, scalar=True)

    assert storage(DOUBLE, "step") == storage({"*": DOUBLE}, "step") == ""
    assert storage({"step": DOUBLE}, "step") == DOUBLE
    assert storage(DOUBLE, None, "temperature") == DOUBLE
    count = torch.tensor(2.0**24 - 1)
    assert count + 1 == 2**24 and count + 2 == 2**24  # where it is not exact any more


@pytest.mark.slow
@pytest.mark.parametrize("way", ["each", "shared"])
@pytest.mark.quick("each")
def test_a_count_that_is_named_goes_on_beyond_24_bits(way: str) -> None:
    params = start(MEMBERS[way], torch.float32)
    optimizer = AdamW(params, lr=1e-6)
    steps(optimizer, optimizer.step, 0, 1)
    for p in params:
        optimizer.state[p]["step"].fill_(2.0**24)
    step = collage_fx.compile(optimizer, storage={"step": DOUBLE, "param": DOUBLE})
    steps(optimizer, step, 0, 3)
    for p in params:
        state = optimizer.state[p]
        assert collage_fx.value(state["step"]) == 2**24 + 3 and state["step"].item() != 2**24 + 3
        assert not collage_fx.residuals(state["exp_avg"]) and collage_fx.residuals(p)


MIXED = {"param": "remainder16", "exp_avg*": DOUBLE}


class MasterMoments(Optimizer):
    """bf16 parameters with moments in fp32."""

    def __init__(self, params: list[Tensor]) -> None:
        super().__init__(params, {})
        for p in params:
            dtype = torch.float64 if p.dtype == torch.float64 else torch.float32
            self.state[p]["exp_avg"] = torch.zeros_like(p, dtype=dtype)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            exp_avg = self.state[p]["exp_avg"].mul_(0.9999).add_(p.grad.float(), alpha=1e-4)
            p.sub_((1e-5 * exp_avg).to(p.dtype))


@WAYS
@pytest.mark.quick("shared")
def test_bf16_parameters_beside_moments_of_two_fp32_words(way: str) -> None:
    def run(dtype: torch.dtype, **options: Any) -> tuple[list[Tensor], Tensor]:
        params = start(MEMBERS[way], dtype)
        optimizer = MasterMoments(params)
        steps(optimizer, compiled(optimizer, way, **options) if options else optimizer.step)
        moments = [collage_fx.value(optimizer.state[p]["exp_avg"]) for p in params]
        return params, torch.cat([m.flatten() for m in moments])

    _, exact = run(torch.float64)
    params, found = run(torch.bfloat16, storage=MIXED, level="all")
    _, plain = run(torch.bfloat16, storage="remainder16", level="all")
    assert (found - exact).norm() < 1e-3 * (plain - exact).norm()
    assert all(r.dtype == torch.int16 for p in params for r in collage_fx.residuals(p))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:collage_fx. nothing needed")
def test_a_resumed_run_is_bit_equal_and_one_without_the_storage_says_what_it_drops() -> None:
    whole, first = start(2, torch.float32), start(2, torch.float32)
    optimizer = AdamW(whole, lr=1e-7)
    steps(optimizer, collage_fx.compile(optimizer, storage=DOUBLE, level="all"), 0, 6)
    optimizer = AdamW(first, lr=1e-7)
    steps(optimizer, collage_fx.compile(optimizer, storage=DOUBLE, level="all"), 0, 3)
    saved = copy.deepcopy(optimizer.state_dict())

    def resumed(storage: str) -> list[Tensor]:
        again = [p.detach().clone().requires_grad_() for p in first]
        other = AdamW(again, lr=1e-7)
        other.load_state_dict(saved)
        steps(other, collage_fx.compile(other, storage=storage, level="all"), 3, 6)
        return again

    for a, b in zip(resumed(DOUBLE), whole, strict=True):
        assert torch.equal(collage_fx.value(a), collage_fx.value(b))
    with pytest.warns(CollageWarning, match=r"dropped, the first .*params\[0\]"):
        dropped = resumed("mcf2")
    assert not any(collage_fx.residuals(p) for p in dropped)


def test_master_weights_in_float64_go_in_and_out() -> None:
    model = torch.nn.Linear(5, 3)
    weights = {k: v.double() + 1e-12 for k, v in model.state_dict().items()}
    collage_fx.load_master_weights(model, weights)
    assert not any(collage_fx.residuals(p) for p in model.parameters())
    collage_fx.load_master_weights(model, weights, storage=DOUBLE)
    found = collage_fx.master_state_dict(model, dtype=torch.float64)
    for name, exact in weights.items():
        assert ((found[name] - exact).abs() <= 2.0**-49 * exact.abs()).all()
        assert not torch.equal(model.state_dict()[name].double(), exact)


def test_what_it_cannot_hold_is_refused_by_name() -> None:
    params = start(1, torch.bfloat16)
    optimizer = SGD(params, lr=0.1)
    with pytest.raises(StorageError, match=r"double_single.*bfloat16; 'mcf2'"):
        steps(optimizer, collage_fx.compile(optimizer, storage=DOUBLE), 0, 1)
    optimizer = SGD(start(1, torch.float32), lr=0.1)
    step = collage_fx.compile(optimizer, storage=DOUBLE)
    steps(optimizer, step, 0, 1)
    with pytest.raises(StorageError, match=r"mcf3.*float32; 'double_single' can"):
        collage_fx.convert_residuals(optimizer, "mcf3")


def test_a_graph_does_not_remember_the_default_dtype_of_an_earlier_one() -> None:
    """An integer times a Python float is of the default dtype, which models in bf16 change."""

    def compiled() -> Tensor:
        torch.compiler.reset()
        p, n = torch.zeros(64, dtype=torch.float32), torch.arange(64)

        def step(p: Tensor, n: Tensor) -> None:
            p.sub_(n * 1.1)

        collage_fx.compile(step, level="all", storage="double_single")(p, n)
        return collage_fx.value(p)

    torch.set_default_dtype(torch.bfloat16)
    try:
        compiled()
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.allclose(compiled(), -1.1 * torch.arange(64).double(), rtol=1e-6)
