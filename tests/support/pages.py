"""Pages of explanations, and what is in them."""

import html
import json
import re
from typing import Any

import torch
from torch.optim import Optimizer

import collage_fx
from collage_fx import Explanation
from collage_fx.inspection.page.page import render


def optimizer(count: int = 9, kind: Any = torch.optim.AdamW, **options: Any) -> Optimizer:
    """An optimizer of small bf16 parameters that have gradients."""
    generator = torch.Generator().manual_seed(0)
    params = []
    for i in range(count):
        p = torch.nn.Parameter(torch.randn(4, 3 + i % 2, generator=generator).bfloat16())
        p.grad = torch.randn(p.shape, generator=generator).bfloat16()
        params.append(p)
    return kind(params, **options)


def page(explanation: Explanation) -> str:
    return render(explanation)


def explained(*args: Any, **options: Any) -> tuple[Explanation, str]:
    explanation = collage_fx.explain(*args, **options)
    return explanation, render(explanation)


def data(text: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found
    return json.loads(found[1])


def values(text: str, letter: str) -> set[str]:
    """The numbers of values in a column: b before, e expanded, l lowered, c C++, g Triton."""
    return set(re.findall(rf'data-v="(\d+{letter}\w+)"', text))


def lines(text: str) -> list[str]:
    """The lines of code of a page, as text."""
    found = re.findall(r'<div class="line[^"]*">(.*?)</div>', text)
    return [html.unescape(re.sub(r"<[^>]+>", "", one)) for one in found]


def stored(text: str) -> dict[str, set[str]]:
    """State -> the values in the lines of kernels that store it."""
    found: dict[str, set[str]] = {}
    for line in re.findall(r'<div class="line store">(.*?)</div>', text):
        name = re.search(r"stores (\w+)</span>", line)
        assert name
        found.setdefault(name[1], set()).update(re.findall(r'data-v="(\w+)"', line))
    return found


def reach(start: str, links: dict[str, list[str]]) -> set[str]:
    """Return what a value stems from, itself included."""
    found, waiting = {start}, [start]
    while waiting:
        for stem in links.get(waiting.pop(), []):
            if stem not in found:
                found.add(stem)
                waiting.append(stem)
    return found
