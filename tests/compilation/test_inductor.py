"""Calls of Inductor: again, and without fusion, where its fusion of a graph fails.

For compilation.inductor.
"""

from typing import Any

import pytest
import torch
from torch._inductor import config as inductor_config
from torch._inductor.exc import InductorError
from torch.fx import GraphModule, symbolic_trace

from collage_fx.compilation.inductor import compile_exactly
from collage_fx.passes.codegen import inductor_compile


class Failing:
    """Inductor's compiler, that fails with an error wherever it may fuse."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.sizes: list[int] = []
        """The limits of fusion that it was called with."""
        self.graphs: list[str] = []

    def __call__(self, gm: GraphModule, inputs: Any, **kwargs: Any) -> Any:
        self.sizes.append(inductor_config.max_fusion_size)
        self.graphs.append(str(gm.graph))
        if self.sizes[-1] == 1:
            return kwargs
        gm.graph.create_node("call_function", torch.neg)  # it rewrites what it is given
        raise self.error


def compiled(error: Exception, monkeypatch: pytest.MonkeyPatch) -> tuple[Failing, Any]:
    failing = Failing(error)
    monkeypatch.setattr(inductor_compile, "compile_functional", failing)
    gm = symbolic_trace(lambda x: x + 1)
    return failing, compile_exactly(gm, [torch.ones(2)], {"static_input_idxs": (0,)})


def test_a_graph_whose_fusion_fails_is_compiled_without(monkeypatch: pytest.MonkeyPatch) -> None:
    before = inductor_config.max_fusion_size
    failing, made = compiled(InductorError(KeyError("buf0"), None), monkeypatch)
    assert failing.sizes == [before, 1] and before > 1
    assert failing.graphs[0] == failing.graphs[1]  # as it was before the first attempt
    assert made == {"static_input_idxs": (0,)}
    assert inductor_config.max_fusion_size == before


def test_other_errors_come_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="no graph"):
        compiled(ValueError("no graph"), monkeypatch)
