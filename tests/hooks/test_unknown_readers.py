"""Nobody reads memory that has no data yet: where a reader is not known, nothing is put off.

All tests run with such memory filled with NaN (`poison`); the controls let it be read.

For hooks.data_reads and segments.operations.
"""

import copy
import ctypes
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy
import pytest
import torch
from recorded_steps import LR, Each, off, start, train
from torch import Tensor

import collage_fx
from collage_fx.hooks import data_reads
from collage_fx.record.recorder import Recorder
from collage_fx.segments.operations import OPERATIONS, Operation

aten = torch.ops.aten


class Coded(Tensor):
    """A state kept as integers and a scale, which converts by `how` within its own dispatch."""

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor, how: Any) -> "Coded":
        """Return a wrapper of what holds the state."""
        made: Coded = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, codes.shape, dtype=torch.bfloat16
        )
        return made

    def __init__(self, codes: Tensor, scale: Tensor, how: Any) -> None:
        self.codes, self.scale, self.how = codes, scale, how

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        """Do the three operations that a step needs."""
        if func is aten._to_copy.default:
            return args[0].codes.mul(1.0) * args[0].scale
        if func is aten.detach.default:
            return Coded(args[0].codes, args[0].scale, args[0].how)
        assert func is aten.copy_.default
        state, x = args
        scale = x.abs().amax().clip(1e-12) / 100
        state.codes.copy_(state.how((x / scale).round()))
        state.scale.copy_(scale)
        return state


CONVERSIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "to": lambda c: c.to(torch.int32),
    "contiguous": lambda c: c.t().contiguous().t(),
    "reshape": lambda c: c.t().reshape(c.shape[::-1]).t(),
    "flatten": lambda c: c.t().flatten().view(c.shape[::-1]).t(),
}


def coded(how: Callable[[Tensor], Tensor]) -> Callable[..., None]:
    """Return an update by an average of gradients in such a state."""

    def update(p: Tensor, g: Tensor, state: Any) -> None:
        if not state:
            codes = torch.zeros(p.shape, dtype=torch.int32)
            state["m"] = Coded(codes, torch.ones(()), how)
        m = state["m"].float().lerp(g.float(), 0.1)
        state["m"].copy_(m)
        p.copy_(p.to(torch.promote_types(p.dtype, torch.float32)) - LR * m)

    return update


def out_to_numpy_and_back(p: Tensor, g: Tensor, state: Any) -> None:
    """Compute the update in a NumPy array, of which PyTorch writes a part."""
    a = numpy.zeros(tuple(p.shape), dtype=numpy.float32)
    torch.from_numpy(a).copy_(g * LR)
    p.sub_(torch.from_numpy(a * 1.0))


def a_sum_that_numpy_shares(p: Tensor, g: Tensor, state: Any) -> None:
    """Sum up gradients in memory that is read as an array."""
    if not state:
        state["array"] = numpy.zeros(tuple(p.shape), dtype=numpy.float32)
        state["sum"] = torch.from_numpy(state["array"])
    state["sum"].add_(g.float())
    p.sub_(LR * torch.from_numpy(state["array"] * 1.0).to(p.dtype))


def by_an_array_of_the_gradient(p: Tensor, g: Tensor, state: Any) -> None:
    """Read through an array that was taken before what it shows was written."""
    u = g.float() * 1.0
    a = u.numpy()
    u.mul_(LR)
    p.sub_(torch.tensor(a.tolist()))


def by_a_pointer(p: Tensor, g: Tensor, state: Any) -> None:
    """Read through a pointer that is kept from the first step."""
    if not state:
        state["u"] = torch.zeros(p.shape)
        state["pointer"] = state["u"].data_ptr()
    state["u"].copy_(g).mul_(LR)
    read = (ctypes.c_float * p.numel()).from_address(state["pointer"])
    p.sub_(torch.tensor(list(read)).view(p.shape))


def by_a_thread(p: Tensor, g: Tensor, state: Any) -> None:
    """Have another thread read what this one computes."""
    u = g * LR
    with ThreadPoolExecutor(1) as pool:
        p.sub_(pool.submit(lambda: u.clone()).result())


def in_inference_mode(p: Tensor, g: Tensor, state: Any) -> None:
    """Do what autograd would decompose, and inference mode does not."""
    with torch.inference_mode():
        u = (g * LR).t().reshape(-1).view(p.shape[::-1]).t()
        p.data.sub_((u * 1.0).to(torch.float64).contiguous().to(p.dtype))


def by_apply(p: Tensor, g: Tensor, state: Any) -> None:
    """Write by a function of Python for each element, which no operation shows."""
    u = torch.zeros(p.shape)
    u.apply_(lambda _: LR)
    p.sub_(g * u)


READERS: dict[str, Callable[..., None]] = {
    **{f"a subclass: {name}": coded(how) for name, how in CONVERSIONS.items()},
    **{
        f.__name__: f
        for f in (
            out_to_numpy_and_back,
            a_sum_that_numpy_shares,
            by_an_array_of_the_gradient,
            by_a_pointer,
            by_a_thread,
            in_inference_mode,
            by_apply,
        )
    },
}


def error(update: Callable[..., None], **options: Any) -> tuple[float, Any]:
    """Return the error as a share of the way, and the step."""
    exact, _ = train(update, torch.float64)
    found, step = train(update, **options)
    begin = torch.cat([p.detach().double().flatten() for p in start(torch.bfloat16)])
    return off(found, exact, begin), step


@pytest.mark.filterwarnings("ignore:.*neither a compiled graph nor PyTorch's dispatcher saw")
@pytest.mark.parametrize("name", READERS)
@pytest.mark.quick("a subclass: to", "in_*", "by_*", "a_sum*", "out_*")
def test_who_reads_behind_our_back_reads_data(name: str) -> None:
    off_by, step = error(READERS[name], storage="remainder16", record=True)
    assert off_by < 0.01
    (note,) = [n for n in collage_fx.report(step).notes if "done operation by operation" in n]
    assert "test_unknown_readers.py:" in note or "_tensor.py" in note
    torch.compiler.set_stance("force_eager")
    try:
        assert error(READERS[name], storage="remainder16", record=False)[0] < 0.01
    finally:
        torch.compiler.set_stance("default")


def test_dynamo_takes_an_array_for_other_memory() -> None:
    off_by, step = error(a_sum_that_numpy_shares, storage="remainder16")
    assert off_by < 0.01
    assert any("NumPy array and a tensor on the same" in n for n in collage_fx.report(step).notes)


@pytest.mark.parametrize("name", ["by_an_array_of_the_gradient", "by_a_thread"])
def test_it_would_not_if_operations_were_put_off(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Recorder, "_note_no_more", lambda *_: None)
    monkeypatch.setattr(Recorder, "flush_outside", lambda *_: None)
    off_by, _ = error(READERS[name], record=True)
    assert not off_by < 0.1


def conjugates(p: Tensor, g: Tensor, state: Any) -> None:
    """Multiply a complex tensor by its conjugate, which is a view of the same layout."""
    z = torch.view_as_complex(torch.stack([g.to(F64), 0.5 * g.to(F64)], -1))
    size, down = (z * z.conj()).real, (z.conj().imag * -2).to(F64)
    p.sub_((LR * down / (size.sqrt() + 1e-3)).to(p.dtype))


def grown(p: Tensor, g: Tensor, state: Any) -> None:
    """Make a tensor of which the size is a float that changes from step to step."""
    state["t"] = state.get("t", 0) + 1
    ramp = torch.arange(0.0, 1.0 + state["t"] % 3)
    p.sub_(LR * g * float(ramp.sum()) + LR * g * ramp.mean().to(p.dtype))


F64 = torch.float64


@pytest.mark.parametrize("update", [conjugates, grown], ids=["conjugates", "grown"])
def test_views_of_the_same_layout_and_sizes_by_floats_are_not_mixed_up(update: Any) -> None:
    with torch.compiler.set_stance("force_eager"):
        assert error(update, record=True, storage="remainder16")[0] < 0.01


def test_plain_operations_are_put_off() -> None:
    """Of a step that does none of this nothing is said."""
    _, step = error(lambda p, g, _: p.sub_(g.float().mul(LR).to(p.dtype)), record=True)
    # On a busy machine the profiler's mark may take a tenth of such a step, which is noted.
    assert not [n for n in collage_fx.report(step).notes if not n.startswith("profiler.")]
    assert not step._collage.steps().recorder.all_at_once


def test_a_thread_that_torch_starts_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """To note a graph of Dynamo's FX makes a bar of tqdm, of which the first has a thread."""
    bars = pytest.importorskip("tqdm").tqdm

    def update(p: Tensor, g: Tensor, state: Any) -> None:
        u = g.float().mul(LR)
        torch._dynamo.graph_break()
        p.sub_(u.to(p.dtype))

    def at_once() -> bool:
        torch.compiler.reset()
        monkeypatch.setattr(bars, "monitor", None)
        p = torch.ones(4, dtype=torch.bfloat16, requires_grad=True)
        step = collage_fx.compile(Each([p], update))
        for _ in range(4):
            p.grad = torch.ones_like(p)
            step()
        assert bars.monitor is not None
        found: bool = step._collage.steps().recorder.all_at_once
        return found

    data_reads._begin_bars.cache_clear()
    assert not at_once()
    monkeypatch.setattr(data_reads, "_begin_bars", lambda: None)
    assert at_once()


def test_a_resumed_run_knows_it() -> None:
    """A resumed run does from its first step on what the run before did: bit for bit the same."""
    runs = []
    for resumed in (False, True):
        p = start(torch.bfloat16, count=1)[0]
        optimizer = Each([p], out_to_numpy_and_back)
        step = collage_fx.compile(optimizer, record=True)
        for k in range(6):
            if resumed and k == 3:
                optimizer = copy.deepcopy(optimizer)
                optimizer.update = out_to_numpy_and_back
                step = collage_fx.compile(optimizer, record=True)
                (p,) = optimizer.param_groups[0]["params"]
                torch.compiler.reset()
            p.grad = torch.full_like(p, 0.3 + k)
            step()
            if k >= 3:
                assert step._collage.steps().recorder.all_at_once
        runs.append(collage_fx.value(p))
    assert torch.equal(*runs)


@pytest.fixture
def library() -> Iterator[Any]:
    """Make an operator of a user's library that returns a tensor it has kept."""
    kept: list[Tensor] = []
    with torch.library._scoped_library("collage_readers", "DEF") as made:
        made.define("kept_plus(Tensor x) -> Tensor")
        made.impl("kept_plus", lambda x: kept[0] + x, "CompositeExplicitAutograd")
        yield kept, torch.ops.collage_readers.kept_plus


@pytest.mark.parametrize("put_off", [False, True])
def test_an_operator_of_a_library_reads_what_it_is_not_given(
    library: Any, put_off: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, kept_plus = library

    def update(p: Tensor, g: Tensor, state: Any) -> None:
        if not state:
            state["zero"] = torch.zeros(p.shape)
            return
        kept[:] = [g * LR]
        p.sub_(kept_plus(state["zero"]))

    if put_off:  # as an operation that reads its operands only
        monkeypatch.setitem(OPERATIONS, kept_plus.default, Operation("now"))
    assert (error(update, record=True)[0] < 0.01) is not put_off
