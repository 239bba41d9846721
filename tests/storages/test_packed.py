"""Residuals of four bits: two elements to a byte, whatever is done to the tensor.

For runtime.storage.nibbles.
"""

import copy
import io
import math
import warnings
from typing import Any

import pytest
import torch
from interpreter import without_compiler
from storage_runs import start, steps
from torch import Tensor
from torch.optim import Optimizer

import collage_fx
from collage_fx.errors import CollageWarning, OptionError, ResidualError
from collage_fx.runtime.residuals.store import STORE
from collage_fx.runtime.storage.nibbles import packed, size_of, unpacked
from collage_fx.runtime.storage.registry import STORAGES

BF16, FP16 = torch.bfloat16, torch.float16
OTHERS = [name for name in STORAGES if name not in ("sr", "ulp4", "double_single")]
SHAPES = [(), (0, 3), (1,), (5,), (3, 5), (4, 2, 3)]


def adamw(tensors: list[Tensor], count: int = 3, **options: Any) -> tuple[Optimizer, Any]:
    """An optimizer of copies of tensors, after some steps, and its compiled step."""
    optimizer = torch.optim.AdamW([t.clone().requires_grad_() for t in tensors], lr=1e-3)
    options = {"storage": "ulp4", "level": "all"} | options
    step = collage_fx.compile(optimizer, **options)
    steps(optimizer, step, 0, count)
    return optimizer, step


def words(optimizer: Optimizer) -> list[Tensor]:
    """Copies of all states and their residuals."""
    states = [t for s in optimizer.state.values() for t in s.values()]
    every = [*optimizer.param_groups[0]["params"], *states]
    return [w.detach().clone() for t in every for w in (t, *collage_fx.residuals(t))]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_two_elements_are_in_a_byte_in_the_order_of_rows(shape: tuple[int, ...]) -> None:
    word = torch.randint(-8, 8, shape).to(torch.int8) * 16
    bytes_ = packed(word)
    assert bytes_.dtype == torch.uint8 and bytes_.shape == (size_of(word.numel()),)
    assert torch.equal(unpacked(bytes_, word), word)
    turned = word.mT.contiguous().mT if word.dim() > 1 else word
    assert torch.equal(packed(turned), bytes_)
    if word.numel() % 2:
        assert int(bytes_[-1]) >> 4 == 0
    below = word + 15  # what is below the four bits is dropped
    assert torch.equal(packed(below), bytes_) and (not word.numel() or not torch.equal(below, word))


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.quick("dtype0")
def test_kernels_of_classes_inductors_and_the_interpreter_are_one(dtype: torch.dtype) -> None:
    """Beyond a block of 1,024 and a chunk of 16,384 elements, of odd and even sizes."""
    sizes = [(3, 1), (1025,), (2, 512), (163, 101), (16384,)]
    begin = [torch.randn(s, generator=torch.Generator().manual_seed(1)).to(dtype) for s in sizes]
    ours = words(adamw(begin)[0])
    torch.compiler.reset()
    assert all(map(torch.equal, ours, words(adamw(begin, multi_tensor=False)[0])))
    torch.compiler.reset()
    with without_compiler():
        assert all(map(torch.equal, ours, words(adamw(begin)[0])))
    assert not all(map(torch.equal, ours, words(adamw(begin, seed=1)[0])))


def test_memory_is_half_a_byte_for_each_element() -> None:
    optimizer, step = adamw([torch.ones(7, 5, dtype=BF16)] * 2)
    (first, _) = optimizer.param_groups[0]["params"]
    (low,) = collage_fx.residuals(first)
    assert low.nbytes == 18 and low.dtype == torch.uint8
    assert collage_fx.explain(step).residual_bytes == 6 * 18
    assert {s.verdict for s in collage_fx.report(step).states} == {"compensated"}


@pytest.mark.parametrize("laid_out", ["channels last", "transposed", "within"])
def test_a_layout_in_memory_makes_no_difference(laid_out: str) -> None:
    values = torch.randn(4, 3, 5, 3, generator=torch.Generator().manual_seed(0)).to(BF16)
    other = {
        "channels last": values.to(memory_format=torch.channels_last),
        "transposed": values.transpose(0, 2).contiguous().transpose(0, 2),
        "within": torch.stack([values, values], 1)[:, 1],
    }[laid_out]

    def trained(x: Tensor) -> list[Tensor]:
        p = x.clone().requires_grad_() if laid_out != "within" else x.requires_grad_()
        optimizer = torch.optim.SGD([p], lr=1e-3, momentum=0.9)
        steps(optimizer, collage_fx.compile(optimizer, storage="ulp4"))
        return [p.detach().contiguous(), *collage_fx.residuals(p)]

    assert all(map(torch.equal, trained(other.detach()), trained(values)))


@pytest.mark.parametrize("record", ["auto", True])
def test_a_write_from_outside_clears_what_it_changes(record: Any) -> None:
    optimizer, step = adamw([torch.ones(7, 5, dtype=BF16)] * 2, record=record)
    p = optimizer.param_groups[0]["params"][0]
    for first in (True, False):
        low = unpacked(*collage_fx.residuals(p), p).clone()
        assert int(low.count_nonzero()) > 20
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", CollageWarning)
            p[2, 3] = 4.0 if first else 8.0
            optimizer.param_groups[0]["lr"], draws = 0.0, collage_fx.draws(p)
            steps(optimizer, step, 3, 4)
        optimizer.param_groups[0]["lr"] = 1e-3
        assert collage_fx.draws(p) > draws
        found = unpacked(*collage_fx.residuals(p), p)
        if not first:  # from then on it is known which elements were written
            low[2, 3] = 0
            assert torch.equal(found, low)
        steps(optimizer, step, 4, 8)


class Turns(Optimizer):
    """A step that turns its parameters in place, and back in the next."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad)
            p.t_()


def test_a_tensor_that_is_turned_in_place_takes_its_residual_along() -> None:
    """Of updates that four bits more hold: nothing is left to chance."""
    p = torch.full((5, 3), 0.9375, dtype=BF16).requires_grad_()
    step = collage_fx.compile(Turns([p], {}), storage="ulp4", record=True)
    exact, generator = p.detach().double(), torch.Generator().manual_seed(0)
    for _ in range(41):
        p.grad = torch.randint(1, 4, p.shape, generator=generator).to(BF16) * 2.0**-12
        exact = (exact - p.grad.double()).t()
        step()
    assert torch.equal(collage_fx.value(p), exact) and p.shape == (3, 5)
    assert not torch.equal(p.detach().double(), exact)


@pytest.mark.parametrize("storage", ["ulp4", "ulp8", "remainder16", "sr"])
@pytest.mark.parametrize("record", ["auto", True])
@pytest.mark.quick("auto-ulp4", "auto-ulp8", "True-ulp4")
def test_strides_that_change_leave_no_element_another_ones_residual(
    storage: str, record: Any
) -> None:
    """Through `.data`, which changes no version and no address."""
    begin = torch.randn(6, 6, generator=torch.Generator().manual_seed(0)).to(BF16)
    optimizer, step = adamw([begin] * 2, storage=storage, record=record)
    p = optimizer.param_groups[0]["params"][0]
    p.data = p.data.t()
    stored = p.detach().double()
    assert torch.equal(collage_fx.value(p), stored)
    optimizer.param_groups[0]["lr"] = 0.0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CollageWarning)
        steps(optimizer, step, 3, 4)
    assert torch.equal(collage_fx.value(p), stored)
    assert any("was cleared" in str(w.message) for w in caught) or storage == "sr"


@pytest.mark.parametrize("storage", ["ulp4", "remainder16"])
def test_a_part_of_a_tensor_has_not_the_residuals_of_its_first_elements(storage: str) -> None:
    model = torch.nn.Linear(8, 6, bias=False, dtype=BF16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    steps(optimizer, collage_fx.compile(optimizer, storage=storage), 0, 3)
    p = model.weight
    p.data = p.data[:, :3]
    assert torch.equal(collage_fx.value(p), p.detach().double())
    with pytest.warns(CollageWarning, match="another shape"):
        found = collage_fx.master_state_dict(model, optimizer)["weight"]
    assert torch.equal(found, p.detach().float())
    assert not [k for s in optimizer.state_dict()["state"].values() for k in s if "collage" in k]


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.quick("remainder16", "ulp8")
def test_it_is_converted_to_and_from_every_other_storage(other: str) -> None:
    optimizer, _ = adamw([torch.randn(33, 5).to(BF16)] * 2)
    params = optimizer.param_groups[0]["params"]
    before = [collage_fx.value(p) for p in params]
    collage_fx.convert_residuals(optimizer, other)
    assert all(map(torch.equal, map(collage_fx.value, params), before))
    collage_fx.convert_residuals(optimizer, "ulp4")
    assert all(map(torch.equal, map(collage_fx.value, params), before))
    optimizer, _ = adamw([torch.randn(33, 5).to(BF16)] * 2, storage=other)
    params = optimizer.param_groups[0]["params"]
    before = [collage_fx.value(p) for p in params]
    collage_fx.convert_residuals(optimizer, "ulp4")
    for p, b in zip(params, before, strict=True):
        assert bool(((collage_fx.value(p) - b).abs() <= 2.0**-11 * b.abs()).all())
        assert not torch.equal(collage_fx.value(p), b)


def test_a_checkpoint_has_a_byte_for_each_element() -> None:
    optimizer, _ = adamw([torch.ones(7, 5, dtype=BF16)] * 2)
    state = optimizer.state_dict()["state"][0]
    names = [n for n in state if n.endswith(".ulp4.0")]
    assert len(names) == 3 and {state[n].shape for n in names} == {(7, 5)}
    assert {state[n].dtype for n in names} == {torch.int8}


def test_residuals_are_loaded_as_bytes_and_as_elements() -> None:
    optimizer, _ = adamw([torch.ones(7, 5, dtype=BF16)] * 2)
    p = optimizer.param_groups[0]["params"][0]
    (bytes_,) = collage_fx.residuals(p)
    for given, storage in (
        (bytes_, None),
        (unpacked(bytes_, p), None),
        (unpacked(bytes_, p), "ulp4"),
    ):
        tensor = p.detach().clone()
        collage_fx.load_residuals(tensor, [given], draws=3, storage=storage)
        assert torch.equal(collage_fx.value(tensor), collage_fx.value(p))
        known = STORE.get(tensor)
        elements = given.dtype == torch.int8 and storage is None
        assert known is not None and known.storage == ("ulp8" if elements else "ulp4")
    collage_fx.load_residuals(p, [unpacked(bytes_, p)], draws=3)  # which is in ulp4 by now
    assert torch.equal(collage_fx.residuals(p)[0], bytes_)
    with pytest.raises(OptionError, match="'ulp4'"):
        collage_fx.load_residuals(p, [bytes_], storage="ulp5")
    for wrong in (bytes_[:-1], bytes_.view(torch.int8), unpacked(bytes_, p)[:6], p.detach()[0]):
        with pytest.raises(ResidualError):
            collage_fx.load_residuals(p.detach().clone(), [wrong])


def test_copies_and_pickles_go_on_as_it_does() -> None:
    optimizer, step = adamw([torch.ones(7, 5, dtype=BF16)] * 2)
    saved = io.BytesIO()
    torch.save(optimizer, saved)
    saved.seek(0)
    others = [copy.deepcopy(optimizer), torch.load(saved, weights_only=False)]
    steps(optimizer, step, 3, 5)
    for other in others:
        steps(other, collage_fx.compile(other, storage="ulp4", level="all"), 3, 5)
        assert all(map(torch.equal, words(other), words(optimizer)))


def test_its_error_is_a_quarter_of_that_of_sr() -> None:
    """Of many roundings by chance it goes as the root of a unit in the last place."""

    def error(storage: str, count: int = 200) -> float:
        params, exact = start(4, BF16), [p.detach().double() for p in start(4, BF16)]
        for p in exact:
            p.requires_grad_()
        runs = [torch.optim.AdamW(ps, lr=1e-4) for ps in (params, exact)]
        ours = {"param": storage, "*": "remainder16"}
        steps(runs[0], collage_fx.compile(runs[0], storage=ours, level="all"), 0, count)
        steps(runs[1], runs[1].step, 0, count)
        begin = start(4, BF16)
        pairs = list(zip(params, exact, begin, strict=True))
        off = sum(float((collage_fx.value(p) - e).detach().square().sum()) for p, e, _ in pairs)
        way = sum(float((e - b.double()).detach().square().sum()) for _, e, b in pairs)
        return math.sqrt(off / way)

    four, none = error("ulp4"), error("sr")
    assert 3 < none / four < 6


def test_the_store_drops_it_where_the_shape_changes() -> None:
    """Of a shape of as many elements too, which the bytes would fit."""
    optimizer, _ = adamw([torch.ones(6, 4, dtype=BF16)] * 2)
    p = optimizer.param_groups[0]["params"][0]
    residual = STORE.get(p)
    assert residual is not None and residual.fits(p) and residual.has_content()
    assert not residual.fits(p.detach().view(4, 6))


@pytest.mark.parametrize("storage", ["ulp4", "remainder16"])
def test_what_was_loaded_for_another_shape_is_not_read(storage: str) -> None:
    optimizer, _ = adamw([torch.ones(6, 6, dtype=BF16)] * 2, storage=storage)
    optimizer.load_state_dict(optimizer.state_dict())
    p = optimizer.param_groups[0]["params"][0]
    for shape in ((9, 9), (2, 2)):
        p.data = torch.ones(shape, dtype=BF16)
        assert collage_fx.residuals(p) == ()
        assert torch.equal(collage_fx.value(p), p.detach().double())
