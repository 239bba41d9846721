"""Loggers and artifacts that TORCH_LOGS and TORCH_TRACE show of collage_fx, under its names.

torch calls `register` at the end of its own import, before it reads TORCH_LOGS: by the entry point
`torch.backends` in pyproject.toml, which is there for such names since torch 2.13. Nothing of torch
is imported here before it is needed.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any

LOG = logging.getLogger("collage_fx")
"""Logger with one line for each compilation, at INFO: TORCH_LOGS="collage"."""
VERDICTS, GRAPHS, CODE = "collage_verdicts", "collage_graphs", "collage_code"
_ARTIFACTS = {
    VERDICTS: "The verdict of collage_fx on each state of a step, and the reason",
    GRAPHS: "The graphs of collage_fx: source, each class expanded and lowered, and the result",
    CODE: "The kernels that collage_fx generates, and Inductor's output code of the rest",
}
"""Name -> what `TORCH_LOGS=help` says of it."""
_OFF_BY_DEFAULT = {CODE}
"""Artifact that TORCH_LOGS="+collage" does not show; it is long, as torch's `output_code` is."""
_LOGGERS: dict[str, logging.Logger] = {}
"""Artifact -> its logger; empty as long as torch does not know the names."""


def register() -> None:
    """Tell torch the names that TORCH_LOGS may have. Idempotent.

    It never fails: torch could not be imported then, by any program that has collage_fx installed.
    """
    if _LOGGERS:
        return
    try:
        from collage_fx.runtime.torch_private import (
            getArtifactLogger,
            register_artifact,
            register_log,
        )

        register_log("collage", LOG.name)
        for name, description in _ARTIFACTS.items():
            register_artifact(
                name, description, visible=True, off_by_default=name in _OFF_BY_DEFAULT
            )
        _LOGGERS.update({name: getArtifactLogger(LOG.name, name) for name in _ARTIFACTS})
    except (ImportError, AttributeError, TypeError) as error:  # another torch than was tested
        LOG.debug("torch takes no names of logs: %s", error)


def show(artifact: str, title: str, text: Callable[[], str], compile_id: Any = None) -> None:
    """Log a text, and put it into the trace that tlparse reads, if anybody wants to see it.

    Args:
        artifact: VERDICTS, GRAPHS or CODE.
        title: what it is; in the trace it is called so, with underscores.
        text: makes it.
        compile_id: of the compilation that it belongs to, where that is not the one under way.
    """
    from collage_fx.runtime.torch_private import is_missing, trace_structured

    register()
    logger, text = _LOGGERS.get(artifact, LOG), functools.cache(text)
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("%s\n%s", title, text(), stacklevel=2)
    if is_missing(trace_structured):
        return
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": f"collage_{title.replace(' ', '_')}", "encoding": "string"},
        payload_fn=text,
        # Recorded segments are compiled outside of Dynamo, which numbers compilations.
        expect_trace_id=False,
        compile_id=compile_id,
    )


def compilation() -> Any:
    """Return the number that Dynamo has given to the compilation under way; None outside of one."""
    from collage_fx.runtime.torch_private import CompileContext, is_missing

    return None if is_missing(CompileContext) else CompileContext.current_compile_id()
