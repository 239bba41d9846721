"""One member of each class goes through AOTAutograd; what it stands for is updated all the same.

For passes.dedup.deduplicate, passes.dedup.graph_scan and passes.codegen.replicas.
"""

from collections.abc import Callable
from typing import Any

import narrow_steps
import pytest
import torch
from narrow_steps import (
    ALIKE,
    UNLIKE,
    Written,
    clipped,
    counted,
    from_a_master,
    in_fp32,
    sizes,
    sums,
    through_data,
)
from tensors import bf16, with_grads
from torch import Tensor

import collage_fx
from collage_fx.compilation import aot
from collage_fx.passes.dedup.deduplicate import Narrow, narrow


def states_after(
    update: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    *,
    whole: bool,
    multi_tensor: bool = True,
    one_buffer: bool = False,
) -> Any:
    """Return all that three steps leave, and the narrow graphs that were compiled.

    Args:
        one_buffer: whether all gradients are views of one tensor, as DDP and FSDP2 have them.
    """
    made: list[Narrow] = []

    def spy(*args: Any, **kwargs: Any) -> Narrow | None:
        return None if whole else narrow(*args, **kwargs)

    def run(self: Any, *args: Any) -> Any:
        code = original(self, *args)
        made.extend([self.narrow] if self.narrow is not None else [])
        return code

    original = aot.Compilation.run
    torch.compiler.reset()
    generator = torch.Generator().manual_seed(0)
    params = [
        torch.randn(s, generator=generator).bfloat16().requires_grad_()
        for s in narrow_steps.SHAPES * 2
    ]
    with monkeypatch.context() as patch:
        patch.setattr(aot, "narrow", spy)
        patch.setattr(aot.Compilation, "run", run)
        optimizer = Written(params, update)
        step = collage_fx.compile(optimizer, level="all", multi_tensor=multi_tensor, storage="mcf2")
        torch.manual_seed(1)
        for i in range(3):
            grads = [torch.randn(p.shape, generator=generator).bfloat16() for p in params]
            pieces = torch.cat([g.flatten() for g in grads]).split([g.numel() for g in grads])
            for p, g, piece in zip(params, grads, pieces, strict=True):
                p.grad = piece.view_as(g) if one_buffer else g
            if i == 2:
                params[1].grad = params[-3].grad = None
            step()
    left: list[Tensor] = []
    for p in params:
        for x in (p, *optimizer.state[p].values()):
            left += [x, *(collage_fx.residuals(x) if x.dtype == torch.bfloat16 else ())]
    versions = [x._version for p in params for x in (p, *optimizer.state[p].values())]
    return [x.detach().clone() for x in left], versions, made


@pytest.mark.parametrize(
    "update",
    [
        *(ALIKE[1:3] + UNLIKE[1:2]),
        pytest.param(ALIKE[0], marks=[pytest.mark.kernels, pytest.mark.slow]),
        *(
            pytest.param(update, marks=pytest.mark.slow)
            for update in ALIKE[3:] + UNLIKE[:1] + UNLIKE[2:]
        ),
    ],
)
@pytest.mark.slow
def test_equal_to_the_whole_graph(
    update: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, versions included; and members leave the graph only where they are alike."""
    expected, counts, _ = states_after(update, monkeypatch, whole=True)
    found, versions, made = states_after(update, monkeypatch, whole=False)
    assert all(map(torch.equal, found, expected))
    assert versions == counts
    # A sum over a dimension of size 1 is one of elements.
    assert bool(made) == (update in (*ALIKE, sizes, sums))
    left_out = sum(len(group.inputs) - 1 for one in made[:1] for group in one.groups)
    assert left_out >= (6 if update is sums else 14) or not made


@pytest.mark.slow
def test_gradients_in_one_buffer_do_not_tie_members(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("narrow_steps.SHAPES", [(4, 3), (7,)] * 4)
    update = ALIKE[2]
    expected, *_ = states_after(update, monkeypatch, whole=True)
    found, _, made = states_after(update, monkeypatch, whole=False, one_buffer=True)
    assert all(map(torch.equal, found, expected)) and made


@pytest.mark.slow
def test_that_members_are_unlike_is_found_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph is compiled whole at the second attempt where Inductor could not help.

    So it is with a parameter that is computed anew.
    """
    attempts: list[str] = []
    original = aot.Compilation.run

    def run(self: Any, *args: Any) -> Any:
        attempts.append("whole" if self.narrow is None else "alone" if self.alone else "narrow")
        return original(self, *args)

    monkeypatch.setattr(aot.Compilation, "run", run)
    shapes = narrow_steps.SHAPES * 2
    for update, of, expected in (
        (from_a_master, shapes, ["alone", "whole"]),
        (clipped, shapes, ["alone", "narrow"]),
        (through_data, [(4, 3)] * 9, ["alone"]),
    ):
        attempts.clear()
        torch.compiler.reset()
        optimizer = Written(with_grads([bf16(*s) for s in of]), update)
        collage_fx.compile(optimizer, level="all", storage="mcf2")()
        assert attempts == expected, update


@pytest.mark.slow
def test_one_layout_that_shares_a_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared values are no work of the member that stands for all."""
    monkeypatch.setattr("narrow_steps.SHAPES", [(4, 3)] * 9)
    expected, _, _ = states_after(counted, monkeypatch, whole=True)
    found, _, made = states_after(counted, monkeypatch, whole=False)
    assert made and all(map(torch.equal, found, expected))


@pytest.mark.parametrize("update", [in_fp32, pytest.param(from_a_master, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_one_kernel_updates_states_that_are_not_compensated_too(
    update: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Averages or weights in fp32 beside 16 bits; equal to a kernel for each parameter."""
    monkeypatch.setattr("narrow_steps.SHAPES", [(4, 3), (7,)] * 4)
    together, _, made = states_after(update, monkeypatch, whole=False)
    each, _, _ = states_after(update, monkeypatch, whole=False, multi_tensor=False)
    assert made and all(map(torch.equal, together, each))
