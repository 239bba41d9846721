"""collage_fx: compensated optimizer steps in bf16 and fp16, for any optimizer.

A backend for torch.compile that finds the states which an optimizer step carries from call to call,
gives those that lose updates in bf16 or fp16 a residual, and rewrites their arithmetic as
multi-component floats (Collage, arXiv 2405.03637).

Importing it costs nothing and changes nothing: the public names are loaded when they are first
asked for, since the compiler that they need takes seconds to import.
"""

import importlib
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collage_fx.accumulation.accumulate import Accumulation, accumulate
    from collage_fx.api import compile, compile_, report
    from collage_fx.averages.averaged import EMA, SWA
    from collage_fx.callbacks import (
        compile_callback,
        lightning_callback,
        trainer_callback,
        whole_weights_callback,
    )
    from collage_fx.changes.taken import take_changes
    from collage_fx.config import CollageConfig
    from collage_fx.diagnosis.doctor import Doctor, doctor
    from collage_fx.diagnosis.finding import Finding
    from collage_fx.errors import CollageError, CollageWarning
    from collage_fx.inspection.explain import explain
    from collage_fx.inspection.explanation import Explanation
    from collage_fx.inspection.gradients import GradientRecorder, record_gradients
    from collage_fx.inspection.monitor import Monitor, monitor
    from collage_fx.inspection.values import draws, load_residuals, residuals, value
    from collage_fx.optim import compensated
    from collage_fx.optimizer.master_weights import (
        convert_residuals,
        load_master_weights,
        master_state_dict,
    )

__version__ = "0.2.0"

__all__ = [
    "EMA",
    "SWA",
    "Accumulation",
    "CollageConfig",
    "CollageError",
    "CollageWarning",
    "Doctor",
    "Explanation",
    "Finding",
    "GradientRecorder",
    "Monitor",
    "accumulate",
    "compensated",
    "compile",
    "compile_",
    "compile_callback",
    "convert_residuals",
    "doctor",
    "draws",
    "explain",
    "lightning_callback",
    "load_master_weights",
    "load_residuals",
    "master_state_dict",
    "monitor",
    "record_gradients",
    "report",
    "residuals",
    "take_changes",
    "trainer_callback",
    "value",
    "whole_weights_callback",
]

_HOMES = {
    "accumulation.accumulate": ("Accumulation", "accumulate"),
    "diagnosis.doctor": ("Doctor", "doctor"),
    "diagnosis.finding": ("Finding",),
    "api": ("compile", "compile_", "report"),
    "averages.averaged": ("EMA", "SWA"),
    "changes.taken": ("take_changes",),
    "callbacks": (
        "compile_callback",
        "lightning_callback",
        "trainer_callback",
        "whole_weights_callback",
    ),
    "config": ("CollageConfig",),
    "errors": ("CollageError", "CollageWarning"),
    "inspection.explain": ("explain",),
    "inspection.explanation": ("Explanation",),
    "inspection.gradients": ("GradientRecorder", "record_gradients"),
    "inspection.monitor": ("Monitor", "monitor"),
    "inspection.values": ("draws", "load_residuals", "residuals", "value"),
    "optim": ("compensated",),
    "optimizer.master_weights": ("convert_residuals", "load_master_weights", "master_state_dict"),
}
"""Module -> the public names that are defined there."""
_HOME = {name: module for module, names in _HOMES.items() for name in names}


if not TYPE_CHECKING:  # which would take every name for one that exists

    def __getattr__(name: str) -> Any:
        """Load a public name, or a module; from then on it is an ordinary attribute."""
        module = f"{__name__}.{_HOME.get(name, name)}"
        if name not in _HOME and (name.startswith("_") or not find_spec(module)):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = importlib.import_module(module)
        if name in _HOME:
            found = globals()[name] = getattr(found, name)
        return found


def __dir__() -> list[str]:
    return sorted(__all__)
