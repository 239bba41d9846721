"""Explanations, reports and monitors in a REPL and in a notebook; names of storages.

For inspection.explanation and runtime.storage.registry.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

import collage_fx
from collage_fx.config import CollageConfig
from collage_fx.errors import OptionError
from collage_fx.runtime.storage.registry import ALIASES


def optimizer() -> Any:
    params = [torch.linspace(1, 2, 8).bfloat16().requires_grad_() for _ in range(2)]
    return torch.optim.AdamW(params, lr=1e-4)


def test_what_is_shown_of_an_object_is_its_table() -> None:
    one = optimizer()
    explanation = collage_fx.explain(one)
    collage_fx.compile_(one)
    found = collage_fx.monitor(one, every=1)
    assert repr(found) == "collage_fx monitor: nothing measured in 0 steps"
    for _ in range(2):
        for p in one.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)
        one.step()
    report = collage_fx.report(one)
    for shown in (explanation, report):
        assert repr(shown) == str(shown) and "exp_avg_sq" in repr(shown)
        assert len(repr(shown)) < 2000
    lines = repr(found).splitlines()
    assert lines[0] == "collage_fx monitor: step 2" and lines[3].startswith("parameter")
    for shown in (explanation, report, found):
        page = shown._repr_html_()  # type: ignore[attr-defined]
        assert page.startswith("<pre>") and "exp_avg_sq" in page
    assert "&#x27;" in explanation._repr_html_() and "x' = " not in explanation._repr_html_()


@pytest.mark.parametrize("alias", ALIASES)
def test_a_storage_has_a_name_that_says_what_it_is(alias: str) -> None:
    name = ALIASES[alias]
    assert CollageConfig(storage=alias) == CollageConfig(storage=name)
    pairs = CollageConfig(storage={"param": alias, "*": "auto"}).storage  # type: ignore[arg-type]
    assert pairs == (("param", name), ("*", "auto"))
    p = torch.ones(4).bfloat16().requires_grad_()
    weights: list[Tensor] = [torch.full((4,), 1.001)]
    other = torch.optim.SGD([p], lr=1.0)
    collage_fx.load_master_weights(other, weights, storage=alias)
    exact = collage_fx.value(p)
    collage_fx.load_master_weights(other, weights, storage=name)
    assert torch.equal(exact, collage_fx.value(p))
    with pytest.raises(OptionError, match="fp33"):
        CollageConfig(storage="fp33")
