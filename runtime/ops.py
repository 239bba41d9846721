"""The `collage::` operators: `runtime/arithmetic.py` and `runtime/storage.py` as graph nodes.

All but `round` are composite: run eagerly they are the functions themselves, and a tracer goes
through them. `round` is opaque to the compiler, which is its purpose.
"""

from typing import Any

import torch
from torch import Tensor

from collage_fx.runtime import arithmetic, storage

_LIBRARY = torch.library.Library("collage", "DEF")


def _define(schema: str, implementation: object) -> None:
    _LIBRARY.define(schema)
    _LIBRARY.impl(schema.partition("(")[0], implementation, "CompositeImplicitAutograd")


_define("grow(Tensor hi, Tensor lo, Tensor a) -> (Tensor, Tensor)", arithmetic.grow)
_define("add(Tensor hi, Tensor lo, Tensor b_hi, Tensor b_lo) -> (Tensor, Tensor)", arithmetic.add)
_define("mul(Tensor hi, Tensor lo, Tensor b_hi, Tensor b_lo) -> (Tensor, Tensor)", arithmetic.mul)
_define(
    "mul.constant(Tensor hi, Tensor lo, float b_hi, float b_lo) -> (Tensor, Tensor)",
    arithmetic.mul,
)
_define(
    "mul.float(Tensor hi, Tensor lo, Tensor b) -> (Tensor, Tensor)",
    lambda hi, lo, b: arithmetic.mul(hi, lo, b, 0.0),
)
_define("div(Tensor hi, Tensor lo, Tensor b_hi, Tensor b_lo) -> (Tensor, Tensor)", arithmetic.div)
_define(
    "div.constant(Tensor hi, Tensor lo, float b_hi, float b_lo) -> (Tensor, Tensor)",
    arithmetic.div,
)
_define(
    "div.float(Tensor hi, Tensor lo, Tensor b) -> (Tensor, Tensor)",
    lambda hi, lo, b: arithmetic.div(hi, lo, b, 0.0),
)
_define(
    "div.into(Tensor a, Tensor hi, Tensor lo) -> (Tensor, Tensor)",
    lambda a, hi, lo: arithmetic.div(a, 0.0, hi, lo),
)
_define("sqrt(Tensor hi, Tensor lo) -> (Tensor, Tensor)", arithmetic.sqrt)
_define("neg(Tensor hi, Tensor lo) -> (Tensor, Tensor)", arithmetic.neg)
_define("decay(Tensor hi, Tensor lo, Tensor gap) -> Tensor", storage.decay)
_define("decay.constant(Tensor hi, Tensor lo, float gap) -> Tensor", storage.decay)

JOIN: dict[str, Any] = {}
"""Storage -> the operation (hi, *residuals) -> value; `collage::join` is that of mcf2."""
SPLIT: dict[str, Any] = {}
"""Storage -> the operation (value, dtype of hi) -> (hi, *residuals)."""
SPLIT_BY_CHANCE: dict[str, Any] = {}
"""Storage -> the operation (value, dtype of hi, seed) -> (hi, *residuals), where it has one."""


def _define_storage(s: storage.Storage) -> None:
    overload = "" if s.name == "mcf2" else f".{s.name}"
    (count,) = {len(r) for r in s.residuals.values()}
    low = "".join(f", Tensor lo{i or ''}" for i in range(count))
    _define(f"join{overload}(Tensor hi{low}) -> Tensor", s.join)
    results = "Tensor" + ", Tensor" * count
    _define(f"split{overload}(Tensor x, ScalarType dtype) -> ({results})", s.split)
    JOIN[s.name] = getattr(torch.ops.collage.join, overload[1:] or "default")
    SPLIT[s.name] = getattr(torch.ops.collage.split, overload[1:] or "default")
    if s.split_by_chance is not None:
        signature = f"(Tensor x, ScalarType dtype, Tensor seed) -> ({results})"
        _define(f"split_by_chance{overload}{signature}", s.split_by_chance)
        named = getattr(torch.ops.collage.split_by_chance, overload[1:] or "default")
        SPLIT_BY_CHANCE[s.name] = named


for _storage in storage.STORAGES.values():
    _define_storage(_storage)

# round(x, dtype): x, of a wide dtype, rounded to the nearest value of dtype; the result stays wide.
_LIBRARY.define("round(Tensor x, ScalarType dtype) -> Tensor", tags=(torch.Tag.pointwise,))


def _round(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).to(x.dtype)


def _round_meta(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x)


_LIBRARY.impl("round", _round, "CompositeExplicitAutograd")
_LIBRARY.impl("round", _round_meta, "Meta")

collage = torch.ops.collage
