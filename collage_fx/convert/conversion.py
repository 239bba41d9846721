"""Conversion of a checkpoint: values out of one format, into a storage or plain fp32."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD

from collage_fx.convert import files
from collage_fx.convert.formats import LISTS, LOW, check_readable, format_of
from collage_fx.convert.matching import match, memory_of, text_of
from collage_fx.convert.structure import DROPPED, Parts, SavedOptimizer, parts_of, replaced
from collage_fx.convert.structure import Path as Place
from collage_fx.convert.values import Source, error, source_of, stored, whole
from collage_fx.errors import CheckpointError, OptionError
from collage_fx.optimizer.checkpoints.history import set_history
from collage_fx.optimizer.checkpoints.reading import ENTRY, entry_of_group
from collage_fx.optimizer.checkpoints.saved_residuals import entries_of
from collage_fx.optimizer.ownership import PARAM
from collage_fx.runtime.errors import listed
from collage_fx.runtime.progress import doing, over, work
from collage_fx.runtime.residuals.residual import Residual
from collage_fx.runtime.storage.state_name import StateName

FP32 = "fp32"
TARGETS = (FP32, "remainder16", "mcf2", "ulp8")
"""Targets of a conversion: whole fp32 values, or a storage."""


@dataclass
class Summary:
    """Account of a conversion."""

    kind: str
    formats: list[str] = field(default_factory=list)
    parameters: int = 0
    moments: int = 0
    wide: int = 0
    """States that stay wider than 16 bits."""
    left: int = 0
    """Tensors of the model that are as they were: of no optimizer, or fp32 beside 16 bits."""
    errors: dict[str, float] = field(default_factory=dict)
    """Name of a state -> the largest relative error of what is held of it, where that is not 0."""
    notes: list[str] = field(default_factory=list)
    before: int = 0
    after: int = 0

    def note_error(self, name: StateName, value: Tensor, held: Tensor) -> None:
        """Note a value that is not held exactly."""
        if found := error(value, held):
            self.errors[str(name)] = found


def convert(
    source: Path,
    out: Path,
    to: str,
    names: Sequence[str] | None = None,
    model: str | None = None,
) -> Summary:
    """Convert a checkpoint into another, of the same structure and container.

    Args:
        source: a file of torch.save or safetensors, or a folder of torch.distributed.checkpoint.
            It is not changed.
        out: does not exist yet. It is there whole once all of it is on disk, or not at all.
        to: one of TARGETS.
        names: those of the optimizer's parameters, in order, where the checkpoint does not tell.
        model: keys of the weights that the optimizer has, joined by dots, where several fit.

    Returns:
        What was done.

    Raises:
        CheckpointError: a checkpoint that cannot be read, told or written.
        StorageError: weights of a dtype that the storage cannot hold.
        OptionError: another target.
    """
    if to not in TARGETS:
        raise OptionError(f"to={to!r} is not one of {', '.join(map(repr, TARGETS))}")
    files.check_out(source, out)
    with work(lambda: f"converting {source}", "reading"), torch.no_grad():
        checkpoint = files.read(source)
        summary = Summary(checkpoint.kind, before=files.size_of(source))
        checkpoint.tree = _converted(checkpoint.tree, to, names, model, summary)
        with doing("writing"):
            files.write(checkpoint, out)
    summary.after = files.size_of(out)
    return summary


def _converted(
    tree: Any, to: str, names: Sequence[str] | None, model: str | None, summary: Summary
) -> Any:
    parts = _readable(tree, names, model)
    changes: dict[Place, Any] = {}
    places = []
    for optimizer in parts.optimizers:
        form = format_of(optimizer)
        at, found = match(optimizer, parts.models, names)
        places.append(at)
        source = source_of(form, optimizer, found, parts.models[at])
        weights = _Conversion(source, to, summary).weights()
        own = {memory_of(t): hi for t, hi in zip(source.weights, weights, strict=True)}
        for name, tensor in parts.models[at].items():
            if (new := own.get(memory_of(tensor))) is not None:
                changes[*at, name] = new
        changes[optimizer.path] = optimizer.tree()
        if form in LISTS:
            changes[*optimizer.path[:-1], form.mark] = DROPPED
    _note_left(tree, set(places), changes, summary)
    return replaced(tree, changes)


def _note_left(tree: Any, places: set[Place], changes: dict[Place, Any], summary: Summary) -> None:
    """Note what stays as it is: tensors of the models at some places, and other models."""
    models = parts_of(tree).models
    summary.left += sum((*at, name) not in changes for at in places for name in models[at])
    others = [
        text_of(path)
        for path, tensors in models.items()
        if path not in places and any(t.is_floating_point() and t.dim() for t in tensors.values())
    ]
    if others:
        summary.notes.append(f"{listed(others)}: as before, since no optimizer has it")


def _readable(tree: Any, names: Sequence[str] | None, model: str | None) -> Parts:
    """Return the parts of a checkpoint, of models the chosen one; raises CheckpointError."""
    parts = parts_of(tree)
    check_readable(parts)
    if not parts.optimizers:
        raise CheckpointError(
            "there are no states of an optimizer, in which residuals are kept: to go on from "
            "weights alone, give them to collage_fx.load_master_weights"
        )
    if names is not None and len(parts.optimizers) > 1:
        raise CheckpointError(
            f"--names is for one optimizer, and there are {len(parts.optimizers)}"
        )
    if model is not None:
        chosen = {path: t for path, t in parts.models.items() if text_of(path) == model}
        if not chosen:
            raise CheckpointError(
                f"--model {model!r} is none of {', '.join(map(repr, map(text_of, parts.models)))}"
            )
        parts.models = chosen
    return parts


class _Conversion:
    """The conversion of the parameters of one optimizer, whose states and groups it replaces."""

    def __init__(self, source: Source, to: str, summary: Summary) -> None:
        self.source, self.to, self.summary = source, to, summary
        self.states: list[dict[Any, Any]] = []
        self.entries: list[dict[str, Tensor]] = []
        summary.formats.append(source.form.title)
        if source.form.note:
            summary.notes.append(source.form.note)

    def weights(self) -> list[Tensor]:
        """Return the new weights, and leave new states and groups in the saved optimizer."""
        optimizer = self.source.optimizer
        positions = range(len(optimizer.ids))
        found = [self._parameter(index) for index in over(positions, "parameter", "conversion")]
        for index, name in enumerate(optimizer.ids):
            state = {**self.states[index], **self.entries[index]}
            if state or name in optimizer.states:
                optimizer.states[name] = state
        self._write_groups(optimizer, found)
        return found

    def _parameter(self, index: int) -> Tensor:
        """Convert a parameter and its states; return the new weight."""
        source, name = self.source, self.source.names[index]
        state: dict[Any, Any] = source.state(index)
        held: dict[str, tuple[Tensor, Residual | None]] = {}
        weight, value, moments = source.weights[index], source.weight(index), source.moments(index)
        dtype = weight.dtype if weight.dtype in LOW else torch.bfloat16
        if source.stays(index) and self.to != FP32:
            self.summary.left += 1
        else:
            held[PARAM] = self._held(StateName(None, name), value, dtype)
            weight = held[PARAM][0]
            self.summary.parameters += 1
        for key, moment in moments.items():
            own = (index, key) in source.residuals
            if own or self.to == FP32:
                kept = state.get(key, moment).dtype
                kept = kept if kept in LOW else dtype
                held[key] = self._held(StateName(key, name), moment, kept)
                self.summary.moments += 1
            elif moment.dtype not in LOW:
                self.summary.wide += 1
            state[key] = held[key][0] if key in held else moment
        self.states.append(self._kept(state, index))
        self.entries.append({})
        for key, (hi, residual) in held.items():
            if residual is not None:
                self.entries[-1].update(entries_of(key, hi, residual, weight.dtype))
        return weight

    def _held(
        self, name: StateName, value: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Residual | None]:
        """Return a value in the new dtype, with its residual if it is to have one."""
        if self.to == FP32:
            rounded = value.to(torch.float32)
            self.summary.note_error(name, value, rounded)
            return rounded, None
        hi, residual = stored(value, dtype, self.to, name)
        self.summary.note_error(name, value, whole(self.to, hi, residual.words(hi)))
        return hi, residual

    def _kept(self, state: dict[Any, Any], index: int) -> dict[Any, Any]:
        """Return a state without what the new weight, or the new moments, have in them."""
        form, optimizer = self.source.form, self.source.optimizer
        kept: dict[Any, Any] = {}
        for key, value in state.items():
            if form.mark and key == form.mark:
                if form.keeps_mark:
                    kept[key] = None
            elif not (isinstance(key, str) and key.endswith(("::quantized", "::scales"))):
                kept[key] = value
        step = optimizer.groups[optimizer.group_of(index)].get("step")
        if kept and "step" not in kept and not form.keeps_mark and isinstance(step, int | Tensor):
            return {"step": torch.tensor(float(step)), **kept}  # where torch.optim has it
        return kept

    def _write_groups(self, optimizer: SavedOptimizer, weights: list[Tensor]) -> None:
        """Leave in the groups what a run in a storage needs, or no entry for one."""
        for group in optimizer.groups:
            group.pop(ENTRY, None)
            if self.source.form.setting in group:
                group[self.source.form.setting] = False
        if self.to == FP32 or not weights:
            return
        params = [nn.Parameter(weight, requires_grad=False) for weight in weights]
        saved = SGD(params)
        for param, state in zip(params, self.states, strict=True):
            # Other states get the dtype of their parameter when they are loaded, as ever.
            kept = self.source.dtypes.keys() | {"step"}
            saved.state[param] = {key: state[key] for key in state if key in kept}
        set_history(saved, self.source.history)
        first = 0
        for group in optimizer.groups:
            own = params[first : first + len(group["params"])]
            group[ENTRY] = entry_of_group(saved, own, holds=any(self.entries))
            first += len(own)
