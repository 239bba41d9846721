"""Models of several seeds in one: the loss of each, as a function of the weights of all."""

import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import byte_model

Named = dict[str, Tensor]
"""Name of a parameter of the model -> its values of all seeds, (seeds, ...)."""
Batch = tuple[Tensor, ...]
Loss = Callable[..., Tensor]
"""Function of the weights of one seed by name and the tensors of a batch; returns the loss."""


class Model:
    """The losses of all seeds."""

    def __init__(self, loss: Loss, *, frozen: Named | None = None, compiled: bool = False) -> None:
        """Make a model of several seeds.

        Args:
            loss: the loss of one.
            frozen: weights that are not trained, which `loss` gets with the others.
            compiled: True to compile it.
        """
        self._frozen = frozen or {}

        def one(weights: Named, frozen: Named, *batch: Tensor) -> Tensor:
            return loss({**frozen, **weights}, *batch)

        def each(weights: Named, frozen: Named, *batch: Tensor) -> Tensor:
            found: Tensor = vmap(one)(weights, frozen, *batch)
            return found

        def shared(weights: Named, frozen: Named, *batch: Tensor) -> Tensor:
            places = (0, 0, *(None for _ in batch))
            found: Tensor = vmap(one, in_dims=places)(weights, frozen, *batch)
            return found

        self._each = torch.compile(each) if compiled else each
        self._shared = torch.compile(shared) if compiled else shared

    def losses(self, weights: Named, *batch: Tensor) -> Tensor:
        """Return the loss of each seed on a batch of its own, whose tensors are (seeds, ...)."""
        return self._each(weights, self._frozen, *batch)

    @torch.no_grad()
    def validate(self, weights: Named, batches: Sequence[Batch]) -> Tensor:
        """Return the mean loss of each seed (in nats), computed in fp32, on batches for all."""
        values = {name: w.detach().float() for name, w in weights.items()}
        frozen = {name: w.float() for name, w in self._frozen.items()}
        return torch.stack([self._shared(values, frozen, *b) for b in batches]).double().mean(0)


def loss_of_bytes(model: nn.Module) -> Loss:
    """Return the loss of a byte model (nats a byte)."""

    def loss(weights: Named, inputs: Tensor, targets: Tensor) -> Tensor:
        def forward(tokens: Tensor) -> Tensor:
            logits: Tensor = functional_call(model, weights, (tokens,))
            return logits

        return byte_model.loss_of(forward, inputs, targets)  # type: ignore[arg-type]

    return loss


class Adapted(nn.Module):
    """A linear layer with an adapter of low rank (LoRA, arXiv 2106.09685), whose scale is 2."""

    def __init__(self, layer: byte_model.Linear, rank: int) -> None:
        super().__init__()
        self.weight = layer.weight
        self.down = nn.Parameter(torch.empty(rank, layer.in_features))
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        """Bf16 (..., inputs) to bf16 (..., outputs), with sums in fp32."""
        wide, (weight, down, up) = x.float(), (w.float() for w in self.parameters())
        return (F.linear(wide, weight) + 2 * F.linear(F.linear(wide, down), up)).to(x.dtype)


def adapted(size: byte_model.Size, rank: int) -> byte_model.ByteModel:
    """Return a byte model whose blocks have adapters; the names of other weights are as before."""
    model = byte_model.ByteModel(size)
    for block in model.blocks:
        for name, layer in list(block.named_children()):
            if isinstance(layer, byte_model.Linear):
                setattr(block, name, Adapted(layer, rank))
    return model


ADAPTERS = (".down", ".up")
"""Ends of the names of adapters; the weight of a layer of that name is `.down.weight`."""


def adapters(model: nn.Module) -> Named:
    """Return the weights of adapters alone."""
    return {n: w for n, w in model.named_parameters() if n.endswith(ADAPTERS)}
