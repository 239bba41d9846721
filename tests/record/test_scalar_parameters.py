"""Parameters and states that are 0-d tensors: their values are no numbers of the host.

For record.recorder and segments.low_words.
"""

from typing import Any

import pytest
import torch
from recorded_steps import LR, off, start, train
from torch import Tensor
from torch._dynamo import graph_break

from collage_fx.record.recorder import Recorder
from collage_fx.segments.low_words import LowWords


def wide(t: Tensor) -> Tensor:
    return t.to(torch.promote_types(torch.float32, t.dtype))


def put_in_place(p: Tensor, g: Tensor, state: Any) -> None:
    new = wide(p) - LR * wide(g)
    if not bool(new.isnan()):  # so that what was recorded is done
        p.data = new.to(p.dtype)


def copied(p: Tensor, g: Tensor, state: Any) -> None:
    new = wide(p) - LR * wide(g)
    if not bool(new.isnan()):
        p.copy_(new.to(p.dtype))


def behind_a_cut(p: Tensor, g: Tensor, state: Any) -> None:
    new = wide(p) - LR * wide(g)
    graph_break()
    p.copy_(new)


def state_made_anew(p: Tensor, g: Tensor, state: Any) -> None:
    new = wide(state["x"] if state else p) - LR * wide(g)
    if not bool(new.isnan()):
        state["x"] = new.to(p.dtype)
        p.copy_(state["x"])


def scaled_by_a_number(p: Tensor, g: Tensor, state: Any) -> None:
    u = g / max(float(g.norm()), 0.5)  # of the dtype of g, which a 0-d float64 would promote
    p.lerp_(p - u, LR)


def error(update: Any, **options: Any) -> float:
    """Return the error of 0-d parameters as a share of the way."""
    exact, _ = train(update, torch.float64, params=start(torch.float64, ()))
    found, _ = train(update, params=start(torch.bfloat16, ()), **options)
    begin = torch.stack([p.detach().double() for p in start(torch.bfloat16, ())])
    return off(found, exact, begin)


UPDATES = [put_in_place, copied, behind_a_cut, state_made_anew, scaled_by_a_number]


@pytest.mark.parametrize(
    ("update", "record"),
    [
        *((update, "auto") for update in UPDATES),
        *((put_in_place, record) for record in (True, False)),
    ],
)
@pytest.mark.quick("copied-auto", "put_in_place-True")
def test_a_value_of_one_element_keeps_its_low_word(update: Any, record: Any) -> None:
    assert error(update, record=record) < 0.01


def test_it_loses_it_where_it_is_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    of_host = Recorder._on_host
    monkeypatch.setattr(Recorder, "_on_host", lambda self, op, args, _: of_host(self, op, args, {}))
    assert error(put_in_place, record=True) > 0.5


def test_it_loses_it_over_a_cut_where_it_is_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LowWords, "may_be_state", lambda _, t: t.is_floating_point() and t.dim())
    assert error(behind_a_cut, record=False) > 0.5
