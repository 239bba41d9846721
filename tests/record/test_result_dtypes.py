"""Operations of recorded steps give results of the dtypes that eager PyTorch gives.

For record.at_once.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from recorded_steps import interpreted
from torch import Tensor

from collage_fx.record import at_once

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64)
BINARY = (
    *("add", "sub", "mul", "div", "true_divide", "remainder", "fmod", "floor_divide", "pow"),
    *("atan2", "maximum", "minimum", "fmax", "fmin", "hypot", "copysign", "logaddexp", "xlogy"),
    *("nextafter", "float_power", "ldexp", "rsub", "lt", "eq", "logical_and"),
)
UNARY = (
    *("abs", "exp", "sqrt", "sign", "floor", "round", "sigmoid", "isnan", "signbit", "reciprocal"),
    *("erf", "lgamma", "logit", "frac", "nan_to_num", "angle", "square", "deg2rad"),
)
WAYS: dict[str, bool] = {"recorded": True, "at once": False}


def calls(p: Tensor) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Yield operations on a state with tensors of each dtype, 0-d ones, and numbers."""
    for name, dtype in itertools.product(BINARY, DTYPES):
        function = getattr(torch, name)
        for other in (torch.full((4,), 3, dtype=dtype), torch.tensor(3, dtype=dtype)):
            kind = f"{name} {dtype} {other.dim()}"
            yield kind, lambda f=function, y=other: f(p, y)
            yield f"{kind} first", lambda f=function, y=other: f(y, p)
    for name in UNARY:
        yield name, lambda n=name: getattr(torch, n)(p)
    for name in ("remainder", "fmod", "floor_divide", "add", "pow"):
        yield f"{name} number", lambda n=name: getattr(torch, n)(p, 2)
    for dtype in DTYPES:
        other = torch.full((4,), 3, dtype=dtype)
        condition = torch.tensor([True, False, True, False])
        yield f"where {dtype}", lambda y=other, c=condition: torch.where(c, p, y)
        yield f"sum {dtype}", lambda d=dtype: p.sum(dtype=d)
        yield f"cumsum {dtype}", lambda d=dtype: p.cumsum(0, dtype=d)
        yield f"to {dtype}", lambda d=dtype: p.to(d)
    yield "index", lambda: p.index_select(0, torch.tensor([0, 1]))
    yield "norm of lists", lambda: torch._foreach_norm([p, p.float()])[0]
    yield "norm of lists, fp32", lambda: torch._foreach_norm([p, p.float()])[1]


def dtypes(**options: Any) -> dict[str, Any]:
    """Return the dtype of each result in the third step of a bf16 parameter, or the error."""
    found: dict[str, Any] = {}

    def update(p: Tensor, g: Tensor, state: Any) -> None:
        p.add_(g, alpha=1e-4)  # it has a low word
        for name, call in calls(p.detach()):
            try:
                found[name] = call().dtype
            except (RuntimeError, TypeError) as error:
                found[name] = type(error)

    interpreted(update, 2, **options)
    return found


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    return dtypes()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.quick("recorded")
def test_dtypes_are_those_of_eager_pytorch(way: str, expected: dict[str, Any]) -> None:
    found = dtypes(record=WAYS[way])
    assert len(found) > 500
    assert {k: (v, expected[k]) for k, v in found.items() if v != expected[k]} == {}


def test_dtypes_of_the_first_operand_differ(
    expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: a result has the dtype of what was widened first."""
    monkeypatch.setattr(at_once, "_dtype_in_step", lambda dtype, *_: torch.bfloat16)
    found = dtypes(record=True)
    assert found["remainder torch.float32 1"] == torch.bfloat16
    assert expected["remainder torch.float32 1"] == torch.float32
