"""Options of a step, split into those of collage_fx and those that Inductor gets."""

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from torch.optim import Optimizer

from collage_fx.config import CollageConfig
from collage_fx.passes.ir.program import Arithmetic
from collage_fx.runtime.errors import OptionError, meant
from collage_fx.runtime.storage.registry import EXPANSIONS, Choice, named_in

OPTION_TYPES: dict[str, Any] = {
    **{field.name: field.type for field in dataclasses.fields(CollageConfig)},
    "arithmetic": Arithmetic | None,
    "storage": str | dict[str, str],
    "clip_over": Sequence[Optimizer],
    "mode": str | None,
}
"""Option -> what is given for it; `mode` is torch.compile's."""
_TUNED = {"max_autotune": True, "coordinate_descent_tuning": True}
MODES = {
    "reduce-overhead": {"triton.cudagraphs": True},
    "max-autotune-no-cudagraphs": _TUNED,
    "max-autotune": {**_TUNED, "triton.cudagraphs": True},
}
"""Mode of torch.compile, but for the default -> the settings of Inductor that it is."""
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def names_options(function: FunctionT) -> FunctionT:
    """Have the signature of a function name the options that it takes as `**options`.

    So do `help`, and the completion of IPython, which reads signatures.
    """
    signature = inspect.signature(function)
    *own, rest = signature.parameters.values()
    kind = inspect.Parameter.KEYWORD_ONLY
    named = [
        inspect.Parameter(f.name, kind, default=f.default, annotation=OPTION_TYPES[f.name])
        for f in dataclasses.fields(CollageConfig)
    ]
    every = [*own, *named, rest]
    function.__signature__ = signature.replace(parameters=every)  # type: ignore[attr-defined]
    return function


def split_options(
    given: dict[str, Any],
    mode: str | None = None,
    known: dict[str, Any] | None = None,
    beside: Iterable[str] = (),
) -> tuple[CollageConfig, dict[str, Any]]:
    """Return the configuration and the Inductor settings that options and mode ask for.

    Args:
        given: the options.
        mode: of torch.compile.
        known: those of a configuration that is there, where none is given.
        beside: names of what else could have been meant.

    Raises OptionError for a name that neither collage_fx nor Inductor knows.
    """
    options = {**(known or {}), **given}
    if "arithmetic" not in given and given.keys() & {"storage", "stochastic_rounding"}:
        options.pop("arithmetic", None)  # it goes with these
    chosen = {"storage", "level", "arithmetic", "stochastic_rounding"}
    if "budget" in given or ((known or {}).get("budget") is not None and given.keys() & chosen):
        for name in {"budget", *chosen} - given.keys():  # these exclude each other
            options.pop(name, None)
    fields = {field.name for field in dataclasses.fields(CollageConfig)}
    mine = {k: v for k, v in options.items() if k in fields}
    theirs = {k.replace("-", "_"): v for k, v in options.items() if k not in fields}
    if theirs:
        _refuse_unknown(theirs, sorted(fields), beside)
    if mode and mode != "default":
        theirs = {**_options_of(mode), **theirs}
    config = CollageConfig(**mine)
    if given.get("arithmetic") == "eft":
        _refuse_eft_without_floats(config.storage)
    return config, theirs


def _refuse_unknown(names: Iterable[str], mine: list[str], beside: Iterable[str]) -> None:
    """Raise OptionError for a name that is none of Inductor's settings."""
    from collage_fx.runtime.torch_private import inductor_config  # seconds, and rarely needed

    settings = inductor_config.get_config_copy()
    for name in (n for n in names if n not in settings):
        hint = meant(name, [*mine, *beside, *settings]) or ";"
        raise OptionError(
            f"unknown option {name!r}{hint} collage_fx knows {', '.join(mine)}, "
            "and any name of torch._inductor.config is passed through"
        )


def _options_of(mode: str) -> dict[str, Any]:
    if mode not in MODES:
        known = ", ".join(("default", *MODES))
        raise OptionError(f"mode={mode!r} is no mode of torch.compile that is served: {known}")
    return dict(MODES[mode])


def _refuse_eft_without_floats(choice: Choice) -> None:
    """Raise OptionError for a storage in which there is no arithmetic on sums of floats."""
    if without := [name for name in named_in(choice) if name not in EXPANSIONS]:
        raise OptionError(
            f"arithmetic='eft' with storage={without[0]!r}, which is computed in fp32; leave "
            f"arithmetic out, or pass arithmetic='wide'; eft is for {', '.join(EXPANSIONS)}"
        )
