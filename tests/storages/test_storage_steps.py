"""Steps whose states have another storage than mcf2: in graphs, of classes, interpreted.

For runtime.storage.registry.
"""

from typing import Any

import pytest
import torch
from storage_runs import BITS, LR, MEMBERS, WAYS, compiled, lost, start, steps, trained
from torch import Tensor
from torch.optim import Optimizer

import collage_fx


@pytest.mark.parametrize("way", MEMBERS)
@pytest.mark.quick("eager")
def test_precision_of_a_step_is_that_of_its_storage(way: str) -> None:
    exact, fp32 = trained(way, torch.float64), trained(way, torch.float32)
    found = {s: lost(trained(way, storage=s, level="all"), exact) for s in BITS}
    assert found["remainder16"] < 1.05 * lost(fp32, exact)
    # eft rounds the update to bf16, and sums up beyond what fp32 keeps of it.
    assert found["mcf3"] < 0.7 * found["remainder16"]
    if way == "eager":
        wide = trained(way, storage="mcf3", arithmetic="wide", level="all")
        assert lost(wide, exact) == found["remainder16"]
    assert found["remainder16"] < 0.7 * found["mcf2"] < 0.7 * 0.05 * found["ulp8"]
    assert found["ulp8"] < 0.8 * lost(trained(way), exact)  # plain bf16, the control


MIXED = {"param": "remainder16", "exp_avg_sq*": "ulp8", "*": "mcf3"}


@WAYS
@pytest.mark.quick("shared")
def test_each_state_has_the_storage_that_its_pattern_says(way: str) -> None:
    exact, fp32 = trained(way, torch.float64), trained(way, torch.float32)
    params = start(MEMBERS[way], torch.bfloat16)
    optimizer = torch.optim.AdamW(params, lr=LR, foreach=way != "eager", weight_decay=0.0)
    steps(optimizer, compiled(optimizer, way, storage=MIXED, level="all"))
    assert lost([collage_fx.value(p).detach() for p in params], exact) < 1.05 * lost(fp32, exact)
    for p in params:
        state = optimizer.state[p]
        assert [r.dtype for r in collage_fx.residuals(p)] == [torch.int16]
        assert [r.dtype for r in collage_fx.residuals(state["exp_avg_sq"])] == [torch.int8]
        assert [r.dtype for r in collage_fx.residuals(state["exp_avg"])] == [torch.bfloat16] * 2


@WAYS
@pytest.mark.quick("each")
def test_auto_is_remainder16_for_bf16_and_mcf2_for_fp16(way: str) -> None:
    for dtype, word in ((torch.bfloat16, torch.int16), (torch.float16, torch.float16)):
        params = start(MEMBERS[way], dtype)
        optimizer = torch.optim.SGD(params, lr=1e-4)
        steps(optimizer, compiled(optimizer, way, storage="auto"), 0, 2)
        assert all(r.dtype == word for p in params for r in collage_fx.residuals(p))


@WAYS
@pytest.mark.parametrize("storage", ["remainder16", "ulp8"])
@pytest.mark.quick("remainder16-eager", "ulp8-eager")
def test_weights_that_are_pruned_through_data_stay_zero(way: str, storage: str) -> None:
    """Nothing shows the write, so that the low words stay: beside a zero they are none."""
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        params = start(MEMBERS[way], dtype)
        optimizer = torch.optim.SGD(params, lr=1e-4)
        wrapped = dtype == torch.bfloat16
        step = compiled(optimizer, way, storage=storage) if wrapped else optimizer.step
        for i in range(3):
            steps(optimizer, step, i, i + 1)
            for p in params:
                p.data.view(-1)[::2] = 0
        steps(optimizer, step, 3, 4)
        found.append([collage_fx.value(p).detach().double() for p in params])
    for exact, ours in zip(*found, strict=True):
        assert torch.allclose(ours, exact, rtol=2.0**-8, atol=1e-9)


def test_ulp8_holds_fp16_in_a_graph_of_its_own_and_shared() -> None:
    for way in ("each", "shared"):
        params = start(MEMBERS[way], torch.float16)
        exact = [p.detach().double().requires_grad_() for p in params]
        optimizer, reference = (torch.optim.SGD(p, lr=1e-4) for p in (params, exact))
        step = collage_fx.compile(optimizer, storage="ulp8")
        steps(optimizer, step)
        steps(reference, reference.step)
        found = [collage_fx.value(p).detach() for p in params]
        assert lost(found, [p.detach() for p in exact]) < 0.05
        assert all(s.joined == 0 for s in collage_fx.report(step).states)


class Chase(Optimizer):
    """A slow copy of the parameter, which the parameter jumps to now and then."""

    def __init__(self, params: list[Tensor]) -> None:
        super().__init__(params, {"lr": LR})
        for p in params:
            self.state[p].update(slow=p.detach().clone(), t=0)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state["t"] += 1
            p.sub_(p.grad.sign(), alpha=self.param_groups[0]["lr"])
            state["slow"].lerp_(p, 0.3)
            if state["t"] % 4 == 0:
                p.copy_(state["slow"])
            p.copy_(torch.where(p.grad > 1, p, torch.stack([p, p])[1]))


def test_a_value_goes_from_a_state_of_one_storage_to_one_of_another() -> None:
    def chased(dtype: torch.dtype, **options: Any) -> list[Tensor]:
        optimizer = Chase(start(2, dtype))
        params = optimizer.param_groups[0]["params"]
        steps(optimizer, compiled(optimizer, "eager", **options) if options else optimizer.step)
        return [collage_fx.value(p).detach() for p in params]

    exact, fp32 = chased(torch.float64), chased(torch.float32)
    mixed = chased(torch.bfloat16, storage={"param": "mcf3", "slow": "remainder16"})
    assert lost(mixed, exact) < 1.05 * lost(fp32, exact)
    coarse = chased(torch.bfloat16, storage={"param": "mcf2", "slow": "ulp8"})
    assert 4 * lost(fp32, exact) < lost(coarse, exact) < 0.8 * lost(chased(torch.bfloat16), exact)


def test_remainder16_is_fp32_bit_for_bit_without_a_compiler() -> None:
    fp32 = trained("eager", torch.float32)
    found = trained("eager", storage="remainder16", level="all")
    assert all(torch.equal(f, e) for f, e in zip(found, fp32, strict=True))
    other = trained("eager", storage="mcf2", level="all")
    assert not any(torch.equal(f, e) for f, e in zip(other, fp32, strict=True))


def test_a_state_keeps_its_storage_between_graphs_and_joined_values() -> None:
    """Every other step without a compiler; the residual goes from one to the other."""
    exact = trained("each", torch.float64)
    params = start(2, torch.bfloat16)
    optimizer = torch.optim.AdamW(params, lr=LR, weight_decay=0.0)
    step = collage_fx.compile(optimizer, storage="remainder16", level="all")
    for k in range(20):
        with torch.compiler.set_stance("force_eager" if k % 2 else "default"):
            steps(optimizer, step, k, k + 1)
    assert lost([collage_fx.value(p).detach() for p in params], exact) < 0.02
    served = collage_fx.report(step).states
    assert all(s.graph == s.joined == 10 for s in served if "exp_avg" not in s.name)
    assert all(r.dtype == torch.int16 for p in params for r in collage_fx.residuals(p))
