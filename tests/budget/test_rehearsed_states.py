"""States that an optimizer will make, found on copies without data; where its steps begin.

For budget.rehearsal.
"""

from typing import Any

import pytest
import torch
from small_training import model_in_bf16
from torch.optim import SGD, Adam, AdamW, Optimizer

from collage_fx.budget.plan import beginning
from collage_fx.budget.rehearsal import states_to_come
from collage_fx.config import CollageConfig


class ReadsNumbers(SGD):
    """Copies without data have none."""

    def step(self) -> None:  # type: ignore[override]
        if all(p.grad.norm().item() > 0 for p in self.param_groups[0]["params"]):
            super().step()


@pytest.mark.parametrize(
    ("kind", "options", "count"),
    [
        (AdamW, {"foreach": True}, 2),
        (Adam, {"amsgrad": True}, 3),
        (SGD, {"momentum": 0.9}, 1),
        (SGD, {}, 0),
        (ReadsNumbers, {"momentum": 0.9}, None),
    ],
)
def test_states_are_known_before_they_are_made(
    kind: type[Optimizer], options: dict[str, Any], count: int | None
) -> None:
    params = list(model_in_bf16().parameters())
    optimizer: Any = kind(params, lr=1e-3, **options)
    state = torch.get_rng_state()
    found = states_to_come(optimizer)
    assert (None if found is None else len(found) / len(params)) == count
    assert all(t.is_meta for t in found or ())
    # It has done nothing to the optimizer, and knows states that are there.
    assert not optimizer.state
    assert all(p.grad is None for p in params)
    assert torch.equal(state, torch.get_rng_state())
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    if optimizer.state:
        assert not any(t.is_meta for t in states_to_come(optimizer) or ())


@pytest.mark.parametrize(
    ("kind", "options", "budget", "begins"),
    [
        (AdamW, {}, 6, ("sr", "sr")),
        (AdamW, {}, 9, ("remainder16", "ulp4")),
        (AdamW, {}, 12, ("remainder16", "remainder16")),
        (SGD, {"momentum": 0.9}, 6, ("remainder16", "sr")),
        (SGD, {}, "2.5KiB", ("remainder16", "sr")),
        (ReadsNumbers, {"momentum": 0.9}, 5, ("remainder16", "sr")),  # not known
    ],
)
def test_parameters_begin_in_the_finest_storage_that_fits(
    kind: type[Optimizer], options: dict[str, Any], budget: Any, begins: tuple[str, str]
) -> None:
    optimizer: Any = kind(model_in_bf16().parameters(), lr=1e-3, **options)
    config = beginning(CollageConfig(budget=budget), optimizer)
    assert config.storage == (("param", begins[0]), ("*", begins[1]))
    assert beginning(CollageConfig(), optimizer) == CollageConfig()


def test_bytes_of_other_dtypes_count_and_their_elements_do_not() -> None:
    params = [torch.nn.Parameter(torch.ones(64, dtype=d)) for d in (torch.bfloat16, torch.float32)]
    config = beginning(CollageConfig(budget=12.0), AdamW(params, lr=1e-3))
    assert config.storage == (("param", "remainder16"), ("*", "remainder16"))
    config = beginning(CollageConfig(budget=10.0), AdamW(params, lr=1e-3))
    assert config.storage == (("param", "remainder16"), ("*", "sr"))
