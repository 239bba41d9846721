"""monitor beside schedulers, other monitors, compiled code and failing loggers.

For inspection.monitor and step.watches.
"""

import gc
import weakref
from typing import Any

import pytest
import torch
from processes import run_script
from support.small_training import model_in_bf16, train

import collage_fx
from collage_fx.errors import CollageWarning


def test_schedulers_and_others_may_come_before_and_after() -> None:
    for order in ("before", "after"):
        model = model_in_bf16()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        found: Any = None
        if order == "before":
            found = collage_fx.monitor(optimizer, every=1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        found = found or collage_fx.monitor(optimizer, every=1)
        train(model, optimizer, 2)
        schedule.step()
        found.remove()
        train(model, optimizer, 1)
        assert found.steps == len(found.history) == 2


def test_two_on_a_plain_optimizer_are_removed_in_any_order() -> None:
    model = model_in_bf16()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    first, second = (collage_fx.monitor(optimizer, every=1) for _ in range(2))
    train(model, optimizer, 2)
    first.remove()
    second.remove()
    train(model, optimizer, 1)
    assert first.steps == second.steps == 2


@pytest.mark.parametrize("own", [False, True])
def test_a_step_that_was_bound_before_is_not_missed_in_silence(own: bool) -> None:
    model = model_in_bf16()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    bound = optimizer.step
    found = collage_fx.monitor(optimizer, every=1)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    if own:  # the control: it sees this one, and says nothing
        optimizer.step()
        bound()
        assert found.steps == 1
    else:
        with pytest.warns(CollageWarning, match="does not see the steps of SGD") as caught:
            bound()
            bound()
        assert len(caught) == 1 and found.latest is None
    assert not optimizer._optimizer_step_post_hooks  # type: ignore[attr-defined]


@pytest.mark.parametrize("compiled", [False, True])
def test_the_optimizer_goes_while_its_monitor_is_kept(compiled: bool) -> None:
    optimizer: Any = torch.optim.SGD(model_in_bf16().parameters(), lr=1e-3)
    if compiled:
        collage_fx.compile_(optimizer)
    found, gone = collage_fx.monitor(optimizer, every=1), weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    found.remove()


def test_a_step_within_compiled_code_is_measured() -> None:
    model = model_in_bf16()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    found = collage_fx.monitor(optimizer, every=1)
    train(model, optimizer, 1)
    torch.compile(optimizer.step, backend="eager")()
    assert len(found.history) == 2


class Momentum8(torch.optim.Optimizer):
    """Keeps a momentum in float8_e4m3fn."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            zero = torch.zeros_like(p).to(torch.float8_e4m3fn)
            m = self.state[p].setdefault("m", zero)
            m.copy_((m.to(p.dtype) * 0.5 + p.grad).to(m.dtype))
            p.sub_(m.to(p.dtype) * 0.1)


def test_a_logger_that_fails_ends_no_training_and_fp8_is_measured() -> None:
    def to(scalars: dict[str, float], step: int) -> None:
        if step == 2:
            raise OSError("the disk is full")

    model = model_in_bf16()
    optimizer = Momentum8(model.parameters())
    found = collage_fx.monitor(optimizer, every=1, to=to)
    with pytest.warns(CollageWarning, match="OSError: the disk is full"):
        train(model, optimizer, 3)
    assert [one.step for one in found.history] == [1, 2, 3] and not found.problem
    assert "m of 0.weight" in found.latest["states"]


def test_wide_states_are_said_to_be_left_out() -> None:
    model = model_in_bf16().float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = collage_fx.monitor(optimizer, every=1)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with pytest.warns(CollageWarning, match="none of its states is in 16 bits"):
        optimizer.step()
    assert found.latest is None


SHARDED = """
import os, socket, torch, torch.distributed as dist, collage_fx
from torch.distributed.fsdp import fully_shard
with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(s.getsockname()[1]))
dist.init_process_group("gloo", rank=0, world_size=1)
mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
found = []
for sharded in (False, True):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)).bfloat16()
    if sharded:
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    collage_fx.compile_(optimizer, verify=2)
    monitor = collage_fx.monitor(optimizer, every=4, model=model)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(8, 16).bfloat16()).float().square().mean().backward()
        optimizer.step()
    found.append(monitor.latest)
    print(*collage_fx.report(optimizer).notes, sep="\\n")
assert found[0] == found[1], found
print(found[1]["kinds"]["parameter"]["edq"])
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_shards_are_measured_with_their_residuals() -> None:
    done = run_script(SHARDED)
    assert done.returncode == 0, done.stderr
    *notes, edq = done.stdout.splitlines()
    assert abs(float(edq) - 1) < 0.01
    assert len(notes) == 2, "verify compares with the residuals too"
    assert all(note.startswith("verify: steps 1, 2 are as in float64") for note in notes)
