"""Graphs of alike parts. For passes.dedup.independent_parts and passes.dedup.single_tensors."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from interpreter import without_compiler
from recorded_steps import LR, from_state, start, train
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from collage_fx.compilation import inductor
from collage_fx.compilation.inductor import compile_divided
from collage_fx.passes.codegen import inductor_compile
from collage_fx.passes.dedup.independent_parts import LEAST, divide

COUNT = 12


@dataclass
class Inputs:
    """Operands of a step, a list of each kind."""

    params: list[Tensor]
    grads: list[Tensor]
    averages: list[Tensor]
    counts: list[Tensor]
    rate: Tensor
    count: Tensor

    @classmethod
    def make(cls) -> "Inputs":
        made = torch.Generator().manual_seed(1)
        lists = [[torch.rand(3, 5, generator=made) for _ in range(COUNT)] for _ in range(3)]
        lists.append([torch.tensor(float(i)) for i in range(COUNT)])
        return cls(*lists, torch.tensor(0.1), torch.tensor(2.0))

    def all(self) -> list[Tensor]:
        lists = self.params, self.grads, self.averages, self.counts
        return [*(t for some in lists for t in some), self.rate, self.count]

    @classmethod
    def of(cls, tensors: Any) -> "Inputs":
        lists = [list(tensors[i : i + COUNT]) for i in range(0, 4 * COUNT, COUNT)]
        return cls(*lists, *tensors[4 * COUNT :])


Update = Callable[[Inputs], tuple[list[tuple[Tensor, Tensor]], list[Any]]]
"""Function that returns the written tensors with their new values, and the results."""


def graph_of(update: Update, inputs: Inputs) -> GraphModule:
    """Return the functional graph of an update, that writes inputs at the end."""

    def step(*tensors: Tensor) -> list[Any]:
        writes, results = update(Inputs.of(tensors))
        for old, new in writes:
            old.copy_(new)
        return results

    gm = make_fx(step, tracing_mode="fake")(*inputs.all())
    gm.graph.eliminate_dead_code()
    return gm


def averaged(x: Inputs, i: int, by: float = 0.9) -> list[tuple[Tensor, Tensor]]:
    new = x.averages[i] * by + x.grads[i]
    return [(x.averages[i], new), (x.params[i], x.params[i] - new * x.rate / (x.count + 1))]


def alone(x: Inputs) -> Any:
    return [w for i in range(COUNT) for w in averaged(x, i)], []


def shared_count(x: Inputs) -> Any:
    """The count is written, and everybody reads the old one."""
    return [(x.count, x.count + 1), *alone(x)[0]], []


def own_counts(x: Inputs) -> Any:
    def one(i: int) -> list[Any]:
        count = x.counts[i] + 1
        return [(x.params[i], x.params[i] + x.grads[i] / count), (x.counts[i], count)]

    return [w for i in range(COUNT) for w in one(i)], []


def passed_on(x: Inputs) -> Any:
    """Each reads the count of the next, which is written too; one is read for a result as well."""
    new = [(p, p + x.counts[(i + 1) % COUNT]) for i, p in enumerate(x.params)]
    return [*((c, c * 2) for c in x.counts), *new], [x.counts[3] + 5]


def from_neighbor(x: Inputs) -> Any:
    """Each reads a parameter that another writes: all belong together."""
    return [(p, p + x.params[i - 1]) for i, p in enumerate(x.params)], []


def clipped(x: Inputs) -> Any:
    norm = torch.stack([g.norm() for g in x.grads]).norm()
    return [(p, p - g / norm) for p, g in zip(x.params, x.grads, strict=True)], []


def other_constant(x: Inputs) -> Any:
    return [w for i in range(COUNT) for w in averaged(x, i, 0.8 if i in (3, 7) else 0.9)], []


def other_shape(x: Inputs) -> Any:
    """Two are written as a whole, and another is read by two of them, and not written."""
    read = [(x.params[i], x.params[i] + x.grads[0].sum(0)) for i in (3, 7)]
    return [*read, *(w for i in range(COUNT) if i not in (3, 7) for w in averaged(x, i))], []


def with_results(x: Inputs) -> Any:
    """One of which is returned twice."""
    found = [g.sum(1) * x.rate for g in x.grads]
    return alone(x)[0], [found[5], None, x.rate, *found, x.count + 1, 7]


def on_lists(x: Inputs) -> Any:
    new = torch._foreach_add(torch._foreach_mul(x.params, 0.5), x.grads, alpha=0.1)
    return list(zip(x.params, torch._foreach_mul(new, x.rate), strict=True)), []


def concatenated(x: Inputs) -> Any:
    """Numbers of all parameters are computed with in one tensor."""
    norms = torch.cat([g.norm().unsqueeze(0) for g in x.grads])
    factors = torch.where(norms > 2, norms * 0.5, 1.0)
    slices = [factors[i : i + 1] for i in range(COUNT)]
    found = zip(x.params, x.grads, factors.unbind(), slices, strict=True)
    return [(p, p - g / f * s) for p, g, f, s in found], []


def put_together(x: Inputs) -> Any:
    """Inputs, from what they are put together to, are results: these have memory of their own."""
    return alone(x)[0], list(torch.cat(x.averages).split(3))


def concatenated_otherwise(x: Inputs) -> Any:
    """Some are converted as they are put together."""
    norms = [g.norm().unsqueeze(0) for g in x.grads]
    whole = torch.cat([norms[0].double(), *norms[1:]]) * 2
    return [(p, p - n) for p, n in zip(x.params, whole.unbind(), strict=True)], []


def checked(x: Inputs) -> Any:
    """Check what is computed for each, and the rate."""
    torch._assert_async(x.rate > 0, "no rate")
    new = alone(x)[0]
    for _, value in new:
        torch._assert_async(value.isfinite().all(), "not finite")
    return new, []


def with_checked_gradients(x: Inputs) -> Any:
    for g in x.grads:
        torch._assert_async(g.isfinite().all(), "not finite")
    return alone(x)


def drawn(x: Inputs) -> Any:
    return [(p, p + torch.rand_like(p)) for p in x.params], []


@pytest.mark.parametrize(
    ("update", "calls"),
    [
        (alone, [3]),
        (shared_count, [3, 1]),
        (own_counts, [3]),
        (passed_on, [11, 1]),
        (from_neighbor, None),
        (clipped, None),
        (other_constant, [5, 1]),
        (other_shape, [5, 1]),
        (with_results, [3, 11, 1]),
        (on_lists, [3]),
        (concatenated, [3]),
        (put_together, [3]),
        (checked, [3, 1]),
        (with_checked_gradients, [3, 3]),
        (concatenated_otherwise, None),
        (drawn, None),
    ],
)
def test_parts_do_what_the_graph_does(update: Update, calls: list[int] | None) -> None:
    gm = graph_of(update, Inputs.make())
    divided = divide(gm.graph)
    assert (divided and [len(part.calls) for part in divided]) == calls
    if calls is None:
        return
    expected, found, compiled = both(gm)
    assert compiled == len(calls)
    for a, b in zip(expected, found, strict=True):
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b
    assert any(not torch.equal(a, b) for a, b in zip(expected, Inputs.make().all(), strict=False))


def both(gm: GraphModule) -> tuple[list[Any], list[Any], int]:
    """Return inputs and results after a run of a graph and of its parts, and how many these are."""
    whole, parts = Inputs.make().all(), Inputs.make().all()
    expected = gm(*whole)
    with without_compiler() as compiled:
        found = compile_divided(gm, parts, {"static_input_idxs": [0]})(list(parts))
    return [*whole, *expected], [*parts, *found], len(compiled)


def test_a_number_that_all_read_is_written_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: in another order the results are others."""
    gm = graph_of(shared_count, Inputs.make())
    monkeypatch.setattr(inductor, "divide", lambda graph: (divide(graph) or [])[::-1])
    expected, found, _ = both(gm)
    same = [torch.equal(a, b) for a, b in zip(expected, found, strict=True)]
    assert same == [False] * COUNT + [True] * (len(same) - COUNT)


@pytest.mark.parametrize("place", [1, -1])
def test_what_is_checked_before_all_writes_is_checked_first(
    place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then nothing is written. Control: the other way around everything is."""
    gm = graph_of(with_checked_gradients, Inputs.make())
    inputs = Inputs.make()
    inputs.grads[-1][0] = torch.nan
    monkeypatch.setattr(inductor, "divide", lambda graph: (divide(graph) or [])[::place])
    with without_compiler(), pytest.raises(RuntimeError, match="not finite"):
        compile_divided(gm, inputs.all(), {})(inputs.all())
    same = map(torch.equal, inputs.params, Inputs.make().params)
    assert [*same] == [place == 1] * COUNT


def test_inputs_that_do_not_change_are_told_to_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs of a part are static if they do not change in any of its calls."""
    given: list[Any] = []

    def compiled(gm: GraphModule, inputs: list[Any], **kwargs: Any) -> Any:
        names = [n.name for n in gm.graph.find_nodes(op="placeholder")]
        given.append((len(names), len(inputs), kwargs))
        return lambda args: ()

    monkeypatch.setattr(inductor_compile, "compile_functional", compiled)
    inputs = Inputs.make()
    gm = graph_of(alone, inputs)
    static = [*range(COUNT - 1), 4 * COUNT]  # all parameters but the last, and the rate
    compile_divided(gm, inputs.all(), {"static_input_idxs": static, "is_inference": True})
    (count, same, kwargs), *others = given
    assert count == same == 3 * 4 + 2 and not others
    # The rate comes first, then those of four parameters; the last is in the place of the fourth.
    assert kwargs == {"static_input_idxs": kwargs["static_input_idxs"], "is_inference": True}
    assert len(kwargs["static_input_idxs"]) == 1 + 3


def rows(p: Tensor, g: Tensor, state: Any) -> None:
    """Update by an average that goes through a mean over rows, which no slice has."""
    m = state["m"] = state.get("m", torch.zeros_like(p))
    m.copy_(m.mul(0.9).add(g.square(), alpha=0.1).mean(1, keepdim=True).expand_as(m))
    p.sub_(LR * g / (m.sqrt() + 1))


@pytest.mark.slow
@pytest.mark.parametrize("record", [False, True])
@pytest.mark.parametrize("update", [from_state, rows])
def test_steps_have_the_same_bits(update: Any, record: bool) -> None:
    """Of rewritten graphs, of graphs on joined values and of recorded segments."""
    found, sizes = [], []
    for without in (("deduplicate",), ()):
        with without_compiler() as compiled:
            params = start(torch.bfloat16, (4, 3), LEAST)
            values, _ = train(update, params=params, record=record, steps=4, without=without)
        found.append(values)
        sizes.append([len(gm.graph.find_nodes(op="placeholder")) for gm in compiled])
    assert torch.equal(*found)
    whole, parts = sizes
    assert len(parts) == len(whole) and parts[-1] == whole[-1] // 2, sizes
    assert all(some in (all_, all_ // 2) for some, all_ in zip(parts, whole, strict=True)), sizes


@pytest.mark.slow
@pytest.mark.kernels
def test_compiled_parts_have_the_bits_of_the_whole_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []

    def divided(graph: Any) -> Any:
        parts = divide(graph)
        counts.append([len(part.calls) for part in parts or ()])
        return parts

    monkeypatch.setattr(inductor, "divide", divided)
    for name, fewer in ("LEAST", 4), ("MOST", 2):  # the compiler takes its time
        monkeypatch.setattr(f"collage_fx.passes.dedup.independent_parts.{name}", fewer)
    params = [start(torch.bfloat16, (4, 40), 4) for _ in range(2)]
    found, _ = train(rows, params=params[0], steps=3)
    expected, _ = train(rows, params=params[1], steps=3, without=("deduplicate",))
    assert torch.equal(found, expected)
    assert counts == [[2]]
