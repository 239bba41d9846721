"""The `collage::` operators: expansion arithmetic and storages as graph nodes.

All but `round` are composite: run eagerly they are the functions themselves, and a tracer goes
through them. `round` is opaque to the compiler, which is its purpose.
"""

from typing import Any

import torch

from collage_fx.runtime.expansion import components
from collage_fx.runtime.storage import layouts, registry

_LIBRARY = torch.library.Library("collage", "DEF")


def _define(schema: str, implementation: object) -> Any:
    """Define an operator, and return it."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, implementation, "CompositeImplicitAutograd")
    return _operator(name)


def _operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.collage, packet), overload or "default")


THREE: dict[Any, Any] = {}
"""Operation on expansions of two components -> the same on three."""


def _define_arithmetic(n: int) -> None:
    """Define the operations on expansions of n components, as they are named for two."""
    names, digit = (("hi", "mid", "lo"), "3") if n == 3 else (("hi", "lo"), "")
    x = ", ".join(f"Tensor {c}" for c in names)
    y = ", ".join(f"Tensor b_{c}" for c in names)
    numbers = ", ".join(f"float b_{c}" for c in names)
    result = f"({', '.join(['Tensor'] * n)})"

    def define(name: str, operands: str, function: Any, result: str = result) -> None:
        packet, dot, overload = name.partition(".")
        made = _define(f"{packet}{digit}{dot}{overload}({operands}) -> {result}", function)
        if n == 3:
            THREE[_operator(name)] = made

    define("grow", f"{x}, Tensor a", lambda *c: components.add(c[:n], c[n:]))
    define("add", f"{x}, {y}", lambda *c: components.add(c[:n], c[n:]))
    define("mul", f"{x}, {y}", lambda *c: components.mul(c[:n], c[n:]))
    define("mul.constant", f"{x}, {numbers}", lambda *c: components.mul(c[:n], c[n:]))
    define("mul.float", f"{x}, Tensor b", lambda *c: components.mul(c[:n], c[n:]))
    define("div", f"{x}, {y}", lambda *c: components.div(c[:n], c[n:]))
    define("div.constant", f"{x}, {numbers}", lambda *c: components.div(c[:n], c[n:]))
    define("div.float", f"{x}, Tensor b", lambda *c: components.div(c[:n], c[n:]))
    define("div.into", f"Tensor a, {x}", lambda *c: components.div(c[:1], c[1:]))
    define("sqrt", x, lambda *c: components.sqrt(c))
    define("neg", x, lambda *c: components.neg(c))
    for overload, gap in (("", "Tensor gap"), (".constant", "float gap")):
        operands = f"{x}, {gap}"
        define(f"decay{overload}", operands, lambda *c: layouts.decay(c[:n], c[n]), "Tensor")


for _n in (2, 3):
    _define_arithmetic(_n)

JOIN: dict[str, Any] = {}
"""Storage -> the operation (hi, *residuals) -> value; `collage::join` is that of mcf2."""
SPLIT: dict[str, Any] = {}
"""Storage -> the operation (value, dtype of hi) -> (hi, *residuals)."""
SPLIT_BY_CHANCE: dict[str, Any] = {}
"""Storage -> the operation (value, dtype of hi, seed, positions) -> (hi, *residuals), where it has
one."""


def _define_storage(s: registry.Storage) -> None:
    # With one more overload of `join` PyTorch's registry fails as the process ends.
    packets = {"mcf2": "", "sr": "_alone", "ulp4": "_ulp4"}
    overload = packets.get(s.name, f".{s.name}")
    (count,) = {len(r) for r in s.residuals.values()}
    low = "".join(f", Tensor lo{i or ''}" for i in range(count))
    JOIN[s.name] = _define(f"join{overload}(Tensor hi{low}) -> Tensor", s.join)
    results = f"({', '.join(['Tensor'] * (1 + count))})"

    def words(split: Any) -> Any:
        """Return the function that splits, as an operation has it: one word is no tuple."""
        return split if count else lambda *operands: split(*operands)[0]

    SPLIT[s.name] = _define(
        f"split{overload}(Tensor x, ScalarType dtype) -> {results}", words(s.split)
    )
    if s.split_by_chance is not None:
        operands = "Tensor x, ScalarType dtype, Tensor seed, Tensor position"
        split = f"split_by_chance{overload}({operands}) -> {results}"
        SPLIT_BY_CHANCE[s.name] = _define(split, words(s.split_by_chance))


for _storage in registry.STORAGES.values():
    _define_storage(_storage)

JOINS = frozenset(JOIN.values())
"""The same operations, by which a node is known."""

_define("changed(Tensor old, Tensor new) -> Tensor", layouts.changed)

# round(x, dtype): x, of a wide dtype, rounded to the nearest value of dtype; the result stays wide.
_LIBRARY.define("round(Tensor x, ScalarType dtype) -> Tensor", tags=(torch.Tag.pointwise,))


_LIBRARY.impl("round", lambda x, dtype: x.to(dtype).to(x.dtype), "CompositeExplicitAutograd")
_LIBRARY.impl("round", lambda x, dtype: torch.empty_like(x), "Meta")

# narrow(x, dtype): x rounded to dtype, to be stored; compiled it is one operation with `round`.
_LIBRARY.define("narrow(Tensor x, ScalarType dtype) -> Tensor", tags=(torch.Tag.pointwise,))
_LIBRARY.impl("narrow", lambda x, dtype: x.to(dtype), "CompositeExplicitAutograd")
_LIBRARY.impl("narrow", lambda x, dtype: torch.empty_like(x, dtype=dtype), "Meta")

collage = torch.ops.collage
