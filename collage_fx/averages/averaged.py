"""Averages of the weights of a model: `EMA` and `SWA`."""

import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.compiler import disable
from torch.nn import Module
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn
from torch.utils.weak import WeakIdKeyDictionary

from collage_fx.averages import saved
from collage_fx.averages.average_step import AverageStep, move, on_device
from collage_fx.averages.exchange import exchange, reshard
from collage_fx.config import CollageConfig
from collage_fx.errors import OptionError, SubjectError
from collage_fx.inspection.values import value
from collage_fx.runtime.residuals.dtensor import fsdp_modules, place_of, placed, shard_of
from collage_fx.runtime.residuals.residual import version
from collage_fx.runtime.residuals.store import STORE
from collage_fx.runtime.storage.registry import STORAGES, chosen
from collage_fx.runtime.storage.state_name import StateName
from collage_fx.runtime.torch_private import _disable_current_modes

_Pairs = list[tuple[Tensor, Tensor]]
_BORROWED = WeakIdKeyDictionary()
"""Tensors of models -> references to the averages whose values they have."""


class Swapped:
    """Context after `swap`, at whose end model and average have their own values again."""

    def __init__(self, average: "_Average", model: Module) -> None:
        self.average, self.model = average, model

    def __enter__(self) -> None:
        """Leave the values exchanged."""

    def __exit__(self, *error: object) -> None:
        """Exchange the values again, unless that was done within the context."""
        if self.average.swapped:
            self.average.swap(self.model)


class _Average(AveragedModel):
    """Base of both averages: an AveragedModel whose parameters have residuals."""

    def __init__(
        self,
        model: Module,
        storage: str | Mapping[str, str] | None,
        device: int | torch.device | None,
        use_buffers: bool,
    ) -> None:
        self._check(model)
        reshard(model)
        options = {} if storage is None else {"storage": storage}
        choice = CollageConfig(**options).storage  # type: ignore[arg-type]
        copied = _Weights(model) if fsdp_modules(model) else model
        super().__init__(copied, device, use_buffers=use_buffers)
        self.options, self.storage = options, choice
        self._partners: list[weakref.ref[Tensor]] = []
        """The tensors of the model that it has exchanged values with, between two swaps."""
        self._counted = 0, _state_of(self.n_averaged)
        """The number of updates, and what `n_averaged`, on a device maybe, was when it was that."""
        self._step: AverageStep | None = None
        self.ensure_residuals()
        self._begin(self._pairs(model)[0])
        saved.watch(self)

    def _share(self, count: int) -> float:
        """Return the share of the way to the next value, after a number of values."""
        raise NotImplementedError

    @property
    def swapped(self) -> bool:
        """True between two calls of `swap`."""
        return bool(self._partners)

    def ensure_residuals(self) -> None:
        """Give averages that have none a residual, of zero."""
        for name, p in self.module.named_parameters():
            called = StateName(None, name)
            kept = chosen(self.storage, called, p.dtype, scalar=p.dim() == 0)
            if kept and p.dtype in STORAGES[kept].residuals and STORE.get(shard_of(p)) is None:
                STORE.ensure(shard_of(p), kept, called, place=place_of(p))

    @property
    def optimizer(self) -> AverageStep:
        """The optimizer whose step moves the averages: `report` takes it."""
        own = {n: t for n, t in self._named(self.module) if t.is_floating_point()}
        known = [] if self._step is None else self._step.param_groups[0]["params"]
        # A load may have put other tensors in their places.
        if self._step is None or list(map(id, own.values())) != list(map(id, known)):
            self._step = AverageStep(own.items(), **self.options)
        return self._step

    @disable
    def update_parameters(self, model: Module) -> None:
        """Take the values that a model has now into the average.

        The first ones are taken as they are. Buffers are copied, unless `use_buffers` is true.

        Args:
            model: of the parameters, and buffers, of the one that it was made for.

        Raises:
            SubjectError: another model, or one that has its values exchanged with the average.
        """
        self._refuse_swapped("update it")
        pairs, copied = self._pairs(model)  # all fit, or nothing is written
        _refuse_borrowed(their for _, their in pairs)
        count, before = self._counted
        if before != _state_of(self.n_averaged):
            count = int(self.n_averaged)  # which was loaded, say
        if count:
            self._move(pairs, self._share(count))
        else:
            self._begin(pairs)
        for own, their in copied:
            own.detach().copy_(their.detach())
        self.n_averaged += 1
        self._counted = count + 1, _state_of(self.n_averaged)

    @disable
    def swap(self, model: Module) -> Swapped:
        """Exchange the values of the model and the average, with their residuals, in place.

        A second call exchanges them again: all words are what they were before the first. The
        optimizer of the model goes on as if nothing had been.

        Args:
            model: as of `update_parameters`.

        Returns:
            A context at whose end they are exchanged again: `with average.swap(model): ...`

        Raises:
            SubjectError: another model, or one that has the values of another average.
        """
        averaged, copied = self._pairs(model)
        pairs = averaged + copied
        theirs = [their for _, their in pairs]
        if not self.swapped:
            _refuse_borrowed(theirs)
            exchange(pairs)
            self._partners = list(map(weakref.ref, theirs))
            for their in theirs:
                _BORROWED[their] = weakref.ref(self)
            return Swapped(self, model)
        if list(map(id, theirs)) != [id(find()) for find in self._partners]:
            raise SubjectError("the average is swapped with another model: swap it back with that")
        exchange(pairs[::-1])  # tensors may lie in the same memory
        for their in theirs:
            _BORROWED.pop(their, None)
        self._partners = []
        return Swapped(self, model)

    def _refuse_swapped(self, why: str) -> None:
        if self.swapped:
            raise SubjectError(f"the average and its model are swapped: swap them back to {why}")

    def state_dict(self, *args: Any, residuals: bool = True, **kwargs: Any) -> Any:
        """Return the state dict, with the residuals of parameters as further entries.

        Args:
            *args: as of `torch.nn.Module.state_dict`.
            residuals: False for what `torch.optim.swa_utils.AveragedModel` loads strictly.
            **kwargs: as of `torch.nn.Module.state_dict`.

        Raises:
            SubjectError: its values are exchanged with those of the model.
        """
        self._refuse_swapped("save it")
        result = super().state_dict(*args, **kwargs)
        if residuals:
            prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
            result |= saved.entries(self, prefix)
        return result

    def _named(self, module: Module) -> Iterator[tuple[str, Tensor]]:
        yield from module.named_parameters()
        if self.use_buffers:
            yield from module.named_buffers()

    def _pairs(self, model: Module) -> tuple[_Pairs, _Pairs]:
        """Return the averages with what is averaged in each, and the buffers that are copied.

        Raises SubjectError for another model.
        """
        self._check(model)
        reshard(model)
        ours, theirs = list(self._named(self.module)), [t for _, t in self._named(model)]
        count = len(ours)
        if not self.use_buffers:
            ours += self.module.named_buffers()
            theirs += model.buffers()
        if len(ours) != len(theirs):
            raise SubjectError(
                f"the average is of {len(ours)} tensors and the model has {len(theirs)}: pass the "
                "model that it was made for"
            )
        for (name, own), their in zip(ours, theirs, strict=True):
            alike = own.shape == their.shape and own.dtype is their.dtype
            if not alike or placed(own) != placed(their):
                raise SubjectError(
                    f"the average of {name} is {own.dtype} of shape {tuple(own.shape)}"
                    f"{_where(own)}, and that of the model {their.dtype} of shape "
                    f"{tuple(their.shape)}{_where(their)}: pass the model that it was made for"
                )
        pairs = [(own, their) for (_, own), their in zip(ours, theirs, strict=True)]
        return pairs[:count], pairs[count:]

    @staticmethod
    def _check(model: Any) -> None:
        if not isinstance(model, Module):
            raise SubjectError(f"an average is of a torch.nn.Module, got {type(model).__name__}")

    @torch.no_grad()
    def _begin(self, pairs: _Pairs) -> None:
        """Take over values, in the storages of the averages."""
        with _disable_current_modes():  # a recorder's, say
            for own, their in pairs:
                shard = shard_of(own)
                residual = STORE.get(shard)
                if residual is None:
                    shard.copy_(shard_of(their))
                else:
                    whole = shard_of(value(their)).to(shard.device)
                    STORE.assign(shard, whole, residual.storage, residual.name, place_of(own))

    @torch.no_grad()
    def _move(self, pairs: _Pairs, share: float) -> None:
        floats = [(a, v) for a, v in pairs if a.is_floating_point()]
        move(self.optimizer, [on_device(v, a.device) for a, v in floats], share)
        for a, v in pairs:
            if not a.is_floating_point():  # a counter, say: as AveragedModel has it
                self._of_integers([a.detach()], [v.detach().to(a.device)], self.n_averaged)

    def _of_integers(self, averages: Any, values: Any, count: Any) -> None:
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy is made of: with residuals, without the compiled step."""
        self._refuse_swapped("copy it")
        own = {**vars(self), "_step": None}
        return {**own, "_saved": {k: t.clone() for k, t in saved.entries(self, "").items()}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Be the copy."""
        state = dict(state)
        entries = state.pop("_saved")
        super().__setstate__(state)
        saved.restore(self, saved.read(self, entries), ())


class EMA(_Average):
    """Exponential moving average of the weights of a model, in their dtype, with residuals.

    After each `update_parameters(model)` it is decay * average + (1 - decay) * weights, of whole
    values: it takes the residuals that `collage_fx.compile` gives the weights, and has its own. It
    is a torch.optim.swa_utils.AveragedModel, called as the model is.

    Args:
        model: the module whose copy it begins as; of modules that FSDP2 has sharded it holds the
            weights alone, to be used by `swap`.
        decay: from 0 to 1.
        storage: as of CollageConfig.
        device: where it is to be, if not where the model is.
        use_buffers: whether floating buffers are averaged too, and not copied.

    Raises:
        OptionError: a decay that is no number from 0 to 1; a storage that does not exist.
        SubjectError: anything that is no module.

    Examples:
        >>> average = collage_fx.EMA(model, decay=0.9999)
        >>> train(optimizer)
        >>> average.update_parameters(model)
        >>> with average.swap(model):
        ...     loss = model(torch.ones(64, dtype=torch.bfloat16)).sum()
    """

    def __init__(
        self,
        model: Module,
        decay: float = 0.999,
        *,
        storage: str | Mapping[str, str] | None = None,
        device: int | torch.device | None = None,
        use_buffers: bool = False,
    ) -> None:
        _check_decay(decay)
        super().__init__(model, storage, device, use_buffers)
        self.decay = decay
        """The decay of the next update: it may change."""

    def update_parameters(self, model: Module) -> None:
        """Take the values of a model into the average, as `SWA` does, by the decay of now."""
        _check_decay(self.decay)
        super().update_parameters(model)

    def _share(self, count: int) -> float:
        return 1 - self.decay

    def _of_integers(self, averages: Any, values: Any, count: Any) -> None:
        get_ema_multi_avg_fn(self.decay)(averages, values, count)


class SWA(_Average):
    """Equal average of the weights that a model had at each `update_parameters(model)`.

    Whole values are averaged, as by `EMA`, and each average has a residual.

    Args:
        model: as of `EMA`.
        storage: as of `EMA`.
        device: as of `EMA`.
        use_buffers: as of `EMA`.

    Raises:
        OptionError: a storage that does not exist.
        SubjectError: anything that is no module.

    Examples:
        >>> average = collage_fx.SWA(model)
        >>> for _ in range(3):
        ...     train(optimizer)
        ...     average.update_parameters(model)
        >>> int(average.n_averaged)
        3
    """

    def __init__(
        self,
        model: Module,
        *,
        storage: str | Mapping[str, str] | None = None,
        device: int | torch.device | None = None,
        use_buffers: bool = False,
    ) -> None:
        super().__init__(model, storage, device, use_buffers)

    def _share(self, count: int) -> float:
        return 1 / (count + 1)

    def _of_integers(self, averages: Any, values: Any, count: Any) -> None:
        get_swa_multi_avg_fn()(averages, values, count)


class _Weights(Module):
    """Parameters and buffers of a module that cannot be copied, by the names that they have there.

    They are the module's own, until this is copied.
    """

    def __init__(self, module: Module, made: dict[int, "_Weights"] | None = None) -> None:
        super().__init__()
        made = {} if made is None else made
        made[id(module)] = self
        for name, child in module._modules.items():
            if child is not None:
                self.add_module(name, made.get(id(child)) or _Weights(child, made))
        for name, p in module._parameters.items():
            self.register_parameter(name, p)
        for name, buffer in module._buffers.items():
            kept = name not in module._non_persistent_buffers_set
            self.register_buffer(name, buffer, persistent=kept)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse to be called."""
        raise SubjectError(
            "the average of a model that FSDP2 has sharded holds its weights alone: call the model "
            "within `with average.swap(model):`"
        )


def _check_decay(decay: Any) -> None:
    known = isinstance(decay, int | float) and not isinstance(decay, bool)
    if not known or not 0 <= decay <= 1:
        raise OptionError(f"decay={decay!r} is no number from 0 to 1")


def _refuse_borrowed(tensors: Iterable[Tensor]) -> None:
    found = (_BORROWED.get(t) for t in tensors)
    if any(find is not None and find() is not None for find in found):
        raise SubjectError("the model has the values of an average: swap that back before")


def _state_of(tensor: Tensor) -> tuple[int, int]:
    """Return what is another if a tensor was written, or replaced."""
    return id(tensor), version(tensor)


def _where(tensor: Tensor) -> str:
    found = placed(tensor)
    return f", {found}" if found else ""
