"""Steps that note what they change: by kernels, or by a comparison with a copy.

For changes.noted.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from replicas import Replica, bits, follow, give, model, sizes
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adafactor, AdamW, Muon, Optimizer

import collage_fx
from collage_fx.errors import OptionError
from collage_fx.runtime.residuals.changes import changes_of
from collage_fx.runtime.residuals.store import STORE


class Squashed(Optimizer):
    """Has an operation that no kernel of our own has in C++."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(torch.tanh(p.grad), alpha=-group["lr"])


class Cut(Optimizer):
    """Cuts Dynamo's graph between two writes to a parameter."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(1 - group["lr"])
                if float(p.grad.abs().max()) > 1e9:
                    raise ArithmeticError
                p.add_(p.grad, alpha=-group["lr"])


def by_kernel(module: nn.Module) -> bool:
    """Return True if kernels set bits for all changes of the parameters."""
    found = []
    for p in module.parameters():
        residual, changes = STORE.get(p), changes_of(p)
        assert changes is not None
        found.append(residual is not None and residual.changes is changes and not changes.by_copy)
    return all(found)


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "light": {"level": "light"},
    "mcf2": {"storage": "mcf2"},
    "mcf3": {"storage": "mcf3"},
    "ulp8": {"storage": "ulp8"},
    "ulp4": {"storage": "ulp4"},
    "sr": {"storage": "sr"},
    "clipped": {"clip_grad_norm": 0.5, "zero_grads": True},
    "each by itself": {"multi_tensor": False},
    "verified": {"verify": 2},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.quick("default", "mcf2", "ulp4", "sr", "each by itself")
def test_kernels_set_a_bit_for_each_element_that_changes(name: str) -> None:
    module = model()
    optimizer = AdamW(module.parameters(), lr=1e-4)
    collage_fx.compile_(optimizer, changed=True, **OPTIONS[name])
    follow(module, optimizer)
    assert by_kernel(module)


@pytest.mark.kernels
@pytest.mark.parametrize("name", ["default", "mcf2", "ulp4", "each by itself"])
@pytest.mark.quick("default", "ulp4")
def test_compiled_kernels_do_so_too(name: str) -> None:
    module = model(width=211)  # of several blocks of elements, the last not full
    optimizer = AdamW(module.parameters(), lr=1e-4)
    collage_fx.compile_(optimizer, changed=True, **OPTIONS[name])
    follow(module, optimizer, steps=3)
    assert by_kernel(module)


def test_fp16_parameters() -> None:
    module = model(dtype=torch.float16)
    optimizer = collage_fx.compile_(SGD(module.parameters(), lr=1e-4), changed=True)
    follow(module, optimizer, steps=3)
    assert by_kernel(module)


COPIED: dict[str, tuple[Callable[[Any], Optimizer], dict[str, Any]]] = {
    "on joined values": (lambda params: Adafactor(params, lr=1e-3), {}),
    "recorded": (lambda params: AdamW(params, lr=1e-4), {"record": True}),
    "cut by Dynamo": (Cut, {}),
    "by Inductor's kernels": (Squashed, {}),
}


@pytest.mark.parametrize("name", COPIED)
def test_what_has_no_such_kernel_is_compared_with_a_copy(name: str) -> None:
    make, options = COPIED[name]
    module = model()
    optimizer = make(module.parameters())
    collage_fx.compile_(optimizer, changed=True, **options)
    follow(module, optimizer)


def test_parameters_in_fp32_beside_others() -> None:
    module = model()
    module[1].float()
    optimizer = collage_fx.compile_(AdamW(module.parameters(), lr=1e-4), changed=True)
    follow(module, optimizer)
    said = str(collage_fx.report(optimizer))
    assert "those of 1.weight, 1.bias by a comparison with a copy" in said.replace("\n", " ")


@pytest.mark.filterwarnings("ignore:.*nothing needed compensation")
def test_parameters_of_other_dtypes() -> None:
    """Complex ones have two words an element, float64 one of eight bytes."""
    module = nn.Module()
    for name, dtype in (("z", torch.complex64), ("d", torch.float64), ("s", torch.float32)):
        value = torch.ones((3, 5) if name != "s" else (), dtype=dtype)
        module.register_parameter(name, nn.Parameter(value))
    optimizer = collage_fx.compile_(SGD(module.parameters(), lr=0.5), changed=True)
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    for p in module.parameters():
        p.grad = torch.zeros_like(p)
    module.z.grad[1, 2], module.d.grad[2, 4] = 1j, 1e-12
    optimizer.step()
    changes = collage_fx.take_changes(module)
    assert {name: places.tolist() for name, (places, _) in changes.items()} == {"z": [7], "d": [14]}
    for name, (places, values) in changes.items():
        before[name].view(-1)[places] = values
    assert all(torch.equal(before[n], p) for n, p in module.named_parameters())


def test_a_layout_that_is_not_of_rows() -> None:
    module = nn.Conv2d(8, 8, 3).bfloat16().to(memory_format=torch.channels_last)
    optimizer = collage_fx.compile_(AdamW(module.parameters(), lr=1e-4), changed=True)
    follow(module, optimizer, steps=4)


def test_matrices_that_are_orthogonalised() -> None:
    module = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(2))).bfloat16()
    optimizer = collage_fx.compile_(Muon(module.parameters(), lr=1e-3), changed=True)
    follow(module, optimizer, steps=3)


def test_a_closure_that_is_called_several_times() -> None:
    module, x = model(), torch.ones(3, 37, dtype=torch.bfloat16)
    optimizer = collage_fx.compile_(LBFGS(module.parameters(), max_iter=3), changed=True)
    replica = Replica(module)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = module(x).float().square().mean()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
        changed = replica.changed()
        assert replica.sync() == changed and replica.is_equal


def test_a_hook_that_writes_parameters() -> None:
    module = model()
    optimizer = AdamW(module.parameters(), lr=1e-3)

    def clamp(*_: Any) -> None:
        with torch.no_grad():
            for p in module.parameters():
                p.clamp_(-0.1, 0.1)

    optimizer.register_step_post_hook(clamp)
    collage_fx.compile_(optimizer, changed=True)
    replica = Replica(module)
    for k in range(4):
        give(module, k)
        optimizer.step()
        changed, sent = replica.changed(), replica.sync()
        assert replica.is_equal
        # What a kernel changes, and the hook puts back, may be among these.
        assert changed["0.weight"] <= sent["0.weight"] < 1.4 * changed["0.weight"]


def test_a_step_that_a_scaler_leaves_out() -> None:
    module = model()
    optimizer = collage_fx.compile_(SGD(module.parameters(), lr=1e-3), changed=True)
    scaler, replica = torch.amp.GradScaler("cpu", init_scale=8.0), Replica(module)
    scaler.scale(torch.ones(()))
    for k in range(4):
        give(module, k)
        if k == 2:
            module[0].weight.grad[0, 0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        assert bool(replica.sync()) == (k != 2) and replica.is_equal


class Averaged(Optimizer):
    """Keeps its parameters between two averages, which methods move them to."""

    def __init__(self, params: Any, *, through_data: bool) -> None:
        super().__init__(params, {})
        self.through_data = through_data

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if not self.state[p]:
                    self.state[p]["z"] = p.clone()
                self.state[p]["z"].sub_(p.grad, alpha=1e-3)
                p.lerp_(self.state[p]["z"], 0.1)

    @torch.no_grad()
    def eval(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                (p.data if self.through_data else p).lerp_(self.state[p]["z"], -0.5)


@pytest.mark.parametrize("through_data", [False, True])
def test_a_method_that_writes_parameters(through_data: bool) -> None:
    module = model()
    optimizer = Averaged(module.parameters(), through_data=through_data)
    collage_fx.compile_(optimizer, changed=True)
    follow(module, optimizer, steps=3)
    replica = Replica(module)
    optimizer.eval()
    changed = replica.changed()
    assert changed and replica.sync() == changed and replica.is_equal
    follow(module, optimizer, first=3, steps=3)


def test_bytes_are_reported() -> None:
    module = model()
    optimizer = AdamW(module.parameters(), lr=1e-4)
    explained = collage_fx.explain(optimizer, changed=True)
    expected = sum((count + 7) // 8 for count in sizes(module).values())
    assert explained.memory["changes"] == expected
    assert f"changes of parameters are noted in {expected} bytes" in str(explained)
    assert "changes" not in collage_fx.explain(optimizer).memory
    collage_fx.compile_(optimizer, changed=True)
    give(module, 0)
    optimizer.step()
    assert f"noted in {expected} bytes: changed=True" in str(collage_fx.report(optimizer))


def test_off_nothing_is_kept() -> None:
    module = model()
    optimizer = collage_fx.compile_(AdamW(module.parameters(), lr=1e-4))
    give(module, 0)
    optimizer.step()
    assert all(changes_of(p) is None for p in module.parameters())
    with pytest.raises(OptionError, match="are not noted"):
        collage_fx.take_changes(module)


def test_what_is_refused() -> None:
    p = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    with pytest.raises(OptionError, match="not calls"):
        collage_fx.compile(lambda: p.add_(1), changed=True)
    with pytest.raises(OptionError, match="changed='yes' is not one of True, False"):
        collage_fx.compile_(SGD([p]), changed="yes")
    p.grad = torch.ones_like(p)
    step = torch.compile(SGD([p]).step, backend="collage", options={"changed": True})
    with pytest.raises(Exception, match=r"changed is for collage_fx\.compile"):
        step()
    assert torch.equal(bits(p), bits(torch.ones_like(p)))
