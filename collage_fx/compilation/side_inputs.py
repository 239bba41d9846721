"""Bring the tensors of members that a graph leaves out around AOTAutograd, to its kernels."""

from collections.abc import Callable
from typing import Any

import torch

from collage_fx.compilation.residual_binding import Locate
from collage_fx.passes.dedup.deduplicate import Narrow


class Members:
    """Brings the tensors of the members that were left out past AOTAutograd, to and fro.

    AOTAutograd hands on what the narrow graph takes and returns, and nothing else.
    """

    def __init__(self, narrow: Narrow, count: int) -> None:
        self.narrow = narrow
        self.count = count
        """How many results the whole graph has."""
        self.locate: list[Locate] = []
        """How to find the inputs of the members that were left out."""
        self.written: list[int] = []
        """Which of them are written in a way that autograd should know of."""
        self.made: dict[int, int] = {}
        """Result of the whole graph -> the additional result of the narrow one that it is."""
        self.returned: dict[int, Locate] = {}
        """Result of the whole graph -> how to find the input that it is."""
        self.inputs: list[Any] = []
        self.results: list[Any] = []

    def bind(self, inner: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        """Return a boxed callable that adds the tensors to the inputs of inner."""

        def run(args: list[Any]) -> Any:
            full = [*args, *self.inputs]
            args.clear()
            results = inner(full)
            self.results = list(results[len(self.narrow.results) :])
            return results[: len(self.narrow.results)]

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the whole graph's callable, of the narrow one's."""

        def call(*args: Any) -> Any:
            self.inputs = [find(args) for find in self.locate]
            try:
                kept = function(*(args[i] for i in self.narrow.inputs))
                if self.written:
                    torch.autograd.graph.increment_version([self.inputs[i] for i in self.written])
                results: list[Any] = [None] * self.count
                for k, result in zip(self.narrow.results, kept, strict=True):
                    results[k] = result
                for k, at in self.made.items():
                    results[k] = self.results[at]
                for k, find in self.returned.items():
                    results[k] = find(args)
                return tuple(results)
            finally:
                self.inputs, self.results = [], []

        return call
