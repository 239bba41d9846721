"""Synchronisations of a step with the device: no more than those of plain PyTorch's step.

For record.recorder and runtime.kernels.left_out.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cuda_emulator import counters
from torch import Tensor, optim
from torch.optim import Optimizer

import collage_fx
from collage_fx.optimizer.checkpoints.history import history_of
from collage_fx.optimizer.discovery import OptimizerStates

COUNT = 9


def params() -> list[Tensor]:
    """Return parameters with gradients; no kernel fills what is made on the device."""
    made = [torch.zeros(8, 8, dtype=torch.bfloat16).cuda().requires_grad_() for _ in range(COUNT)]
    for p in made:
        p.grad = torch.zeros(8, 8, dtype=torch.bfloat16).cuda()
    return made


def waits(step: Callable[[], Any]) -> int:
    """Return how often one step waits."""
    counters.reset()
    step()
    return sum(n for name, n in counters.read().items() if name.startswith("sync"))


def numbers(optimizer: Optimizer) -> dict[str, str]:
    """Return where the 0-d states of the first parameter are."""
    state = next(iter(optimizer.state.values()), {})
    return {k: v.device.type for k, v in state.items() if isinstance(v, Tensor) and not v.dim()}


def made(kind: Any, **kwargs: Any) -> tuple[Optimizer, Callable[[], Any]]:
    """Return an optimizer and its step."""
    optimizer = kind(params(), **kwargs)
    return optimizer, collage_fx.compile(optimizer)


def plainly_begun() -> Optimizer:
    """Return an Adafactor whose first step was plain: its count is 1 on the device too."""
    optimizer = optim.Adafactor(params())
    optimizer.step()
    return optimizer


def begun() -> tuple[Optimizer, Callable[[], Any]]:
    """Return such an optimizer, and its step compiled."""
    optimizer = plainly_begun()
    return optimizer, collage_fx.compile(optimizer)


def test_an_optimizer_that_is_recorded_reads_its_counts_on_the_host() -> None:
    plain = plainly_begun()
    optimizer, step = begun()
    expected = waits(plain.step)
    assert expected == 2 * COUNT  # two norms of each parameter
    step()
    assert numbers(optimizer) == {"step": "cuda"} and waits(step) > expected  # Dynamo sees it
    for _ in range(3):
        step()
    assert waits(step) == expected
    assert numbers(optimizer) == numbers(plain) == {"step": "cpu"}
    assert float(optimizer.state[optimizer.param_groups[0]["params"][0]]["step"]) > 1


# Checksums are of what kernels would have written.
@pytest.mark.filterwarnings("ignore:collage_fx. the residual of")
def test_a_checkpoint_of_it_goes_on_so() -> None:
    optimizer, step = begun()
    for _ in range(4):
        step()
    saved = optimizer.state_dict()
    other, step = begun()
    other.load_state_dict(saved)
    step()
    assert numbers(other) == {"step": "cpu"} and waits(step) == 2 * COUNT


KINDS: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (optim.Adadelta, {}),
    (optim.Adafactor, {}),
    (optim.Adagrad, {}),
    (optim.Adam, {}),
    (optim.Adam, {"capturable": True}),
    (optim.Adam, {"fused": True}),
    (optim.ASGD, {}),
    (optim.NAdam, {}),
    (optim.SGD, {"momentum": 0.9}),
]
IDS = ["-".join([kind.__name__, *kwargs]) for kind, kwargs in KINDS]


@pytest.mark.parametrize(("kind", "kwargs"), KINDS, ids=IDS)
def test_numbers_of_plain_pytorch_on_the_host_are_known_before_a_step(
    kind: type[Optimizer], kwargs: dict[str, Any]
) -> None:
    optimizer: Any = kind(params(), **kwargs)
    OptimizerStates(lambda: optimizer).place_numbers(traced=True, once=False)
    (noted,) = history_of(optimizer).on_host or ()
    assert noted[0] == optimizer.param_groups[0].get("capturable")
    optimizer.step()
    assert set(noted[1]) == {name for name, at in numbers(optimizer).items() if at == "cpu"}


class Untraced(optim.NAdam):
    """Has Dynamo see its groups, and nothing of what is done to its states."""

    def step(self, closure: Any = None) -> Any:
        assert self.param_groups[0]["lr"] > 0
        return torch.compiler.disable(super().step)()


def test_all_numbers_return_from_the_device_and_once_only() -> None:
    optimizer, step = made(Untraced)
    group = optimizer.param_groups[0]
    step()
    assert set(numbers(optimizer).values()) == {"cuda"} and group["capturable"]
    for _ in range(4):
        step()
    assert numbers(optimizer) == {"mu_product": "cpu", "step": "cpu"} and not group["capturable"]
    group["capturable"] = True  # by the user
    for state in optimizer.state.values():
        state.update({name: state[name].cuda() for name in ("mu_product", "step")})
    step()
    assert set(numbers(optimizer).values()) == {"cuda"} and group["capturable"]


def scaled(count: int, **options: Any) -> tuple[Optimizer, Callable[[], Any]]:
    """Return a fused AdamW, and a step of it with GradScaler; bf16 is not for that on CUDA."""
    made = [torch.zeros(64, dtype=torch.float16).cuda().requires_grad_() for _ in range(count)]
    for p in made:
        p.grad = torch.zeros(64, dtype=torch.float16).cuda()
    optimizer = optim.AdamW(made, fused=True, capturable=True)
    optimizer.step = collage_fx.compile(optimizer, **options)  # type: ignore[method-assign]
    scaler = torch.amp.GradScaler("cuda")
    scaler.scale(torch.zeros(()).cuda())  # whose memory found_inf will have, unwritten

    def step() -> None:
        scaler.step(optimizer)
        scaler.update()

    for _ in range(3):
        step()
    return optimizer, step


def test_grad_scaler_with_a_fused_optimizer_waits_for_nothing() -> None:
    _, step = scaled(COUNT)
    assert waits(step) == 0
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        step()


@pytest.mark.parametrize(
    ("count", "options"),
    [
        pytest.param(2, {}, id="every parameter by itself"),
        pytest.param(COUNT, {"stochastic_rounding": True}, id="by chance"),
        pytest.param(COUNT, {"record": True}, id="recorded"),
    ],
)
def test_what_kernels_of_classes_do_not_do_waits_once(count: int, options: Any) -> None:
    optimizer, step = scaled(count, **options)
    assert waits(step) == 1
    optimizer.found_inf = torch.ones(()).cuda()  # type: ignore[attr-defined]
    counters.reset()
    optimizer.step()
    assert not counters.read().get("kernels")


def test_kernels_that_look_are_launched() -> None:
    optimizer, _ = scaled(COUNT)
    optimizer.found_inf = torch.ones(()).cuda()  # type: ignore[attr-defined]
    assert waits(optimizer.step) == 0 and counters.read()["kernels"] == 2
