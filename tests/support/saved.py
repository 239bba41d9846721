"""Residuals in the state dict of an optimizer."""

from typing import Any

from collage_fx.optimizer.saved_residuals import SavedResidual, is_entry, read_entries


def saved_residuals(state_dict: dict[str, Any]) -> dict[Any, dict[str, SavedResidual]]:
    """Parameter, as the state dict calls it -> key of a tensor -> its residual, if it has any."""
    found = {name: read_entries(state) for name, state in state_dict["state"].items()}
    return {name: residuals for name, residuals in found.items() if residuals}


def drop_saved_residuals(state_dict: dict[str, Any], part: str = "") -> None:
    """Remove the entries for residuals, or those that end so, from what was loaded from a file."""
    for state in state_dict["state"].values():
        for key in [k for k in state if is_entry(k) and k.endswith(part)]:
            del state[key]
