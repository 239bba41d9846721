"""The error classes of collage_fx: one per cause, all derived from CollageError."""

from collage_fx.runtime.errors import (
    BudgetError,
    CaptureError,
    CheckpointError,
    CollageError,
    CollageWarning,
    ComponentError,
    LegalityError,
    OptionError,
    PageError,
    ResidualError,
    RuleError,
    ScriptError,
    StorageError,
    SubjectError,
    TorchVersionError,
    UnsupportedError,
)

__all__ = [
    "BudgetError",
    "CaptureError",
    "CheckpointError",
    "CollageError",
    "CollageWarning",
    "ComponentError",
    "LegalityError",
    "OptionError",
    "PageError",
    "ResidualError",
    "RuleError",
    "ScriptError",
    "StorageError",
    "SubjectError",
    "TorchVersionError",
    "UnsupportedError",
]
