"""collage_fx: low-precision training whose optimizer step loses nothing.

A backend for torch.compile that finds the states which an optimizer step carries from call to call,
gives those that lose updates in bf16 or fp16 a residual, and rewrites their arithmetic as
multi-component floats (Collage, arXiv 2405.03637).
"""

from collage_fx.api import compile, draws, load_residuals, report, residuals, value
from collage_fx.config import CollageConfig
from collage_fx.errors import CollageError, CollageWarning
from collage_fx.explain import Explanation, explain
from collage_fx.master import convert_residuals, load_master_weights, master_state_dict

__all__ = [
    "CollageConfig",
    "CollageError",
    "CollageWarning",
    "Explanation",
    "compile",
    "convert_residuals",
    "draws",
    "explain",
    "load_master_weights",
    "load_residuals",
    "master_state_dict",
    "report",
    "residuals",
    "value",
]
