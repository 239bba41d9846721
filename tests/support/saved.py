"""Residuals in the state dict of an optimizer."""

from typing import Any

import torch
from torch import Tensor

from collage_fx.optimizer.checkpoints.saved_residuals import (
    SavedResidual,
    is_entry,
    read_entries,
    without_entries,
)


def saved_residuals(state_dict: dict[str, Any]) -> dict[Any, dict[str, SavedResidual]]:
    """Parameter, as the state dict calls it -> key of a tensor -> its residual, if it has any."""
    states = state_dict["state"].items()
    found = {name: read_entries(state, torch.bfloat16) for name, state in states}
    return {name: residuals for name, residuals in found.items() if residuals}


def drop_saved_residuals(state_dict: dict[str, Any], part: str = "") -> None:
    """Remove the entries for residuals, or those that end so, from what was loaded from a file."""
    for state in state_dict["state"].values():
        for key in [k for k in state if is_entry(k) and k.endswith(part)]:
            del state[key]


def as_format_1(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return the same checkpoint as versions before format 2 have written it."""
    residuals: dict[int, dict[str, Any]] = {}
    for name, by_key in saved_residuals(state_dict).items():
        state = state_dict["state"][name]
        for key, saved in by_key.items():
            words = saved.parts(torch.bfloat16, torch.bfloat16)
            entry = {"storage": saved.storage, "components": words, "draws": saved.draws}
            residuals.setdefault(name, {})[key] = {**entry, "checksum": None}
            if key in state:
                residuals[name][key]["checksum"] = _total(state[key])
    states = {name: without_entries(state) for name, state in state_dict["state"].items()}
    payload = {"format": 1, "residuals": residuals}
    groups = [{**group, "collage_fx": payload} for group in state_dict["param_groups"]]
    return {"state": states, "param_groups": groups}


def _total(tensor: Tensor) -> int:
    """The checksum of a tensor in format 1: its words, each times its place, of which none is 0."""
    found = tensor.reshape(-1).view(torch.int16).to(torch.int64)
    return int((found * (2 * torch.arange(found.numel()) + 1)).sum())
