"""`python -m collage_fx convert`: make a checkpoint into one that a run goes on from."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from collage_fx.convert.conversion import FP32, TARGETS, Summary, convert
from collage_fx.errors import CheckpointError


def add_command(commands: Any) -> None:
    """Add the command to those of `python -m collage_fx`, an object of argparse."""
    command = commands.add_parser(
        "convert",
        help="convert a checkpoint to fp32 or to a storage, from ours or other projects'",
        description="Convert a checkpoint with weights and the states of their optimizer: of "
        "collage_fx, of fp32 weights, of Transformer Engine, of Megatron's and apex's lists of "
        "fp32 weights, of optimi and AnyPrecisionAdamW (Kahan) or of flashoptim. IN is a file of "
        "torch.save or safetensors, or a folder of torch.distributed.checkpoint; OUT is of the "
        "same kind and structure. IN is not changed, and OUT is there whole or not at all.",
    )
    command.add_argument("source", type=Path, metavar="IN", help="the checkpoint")
    command.add_argument("out", type=Path, metavar="OUT", help="does not exist yet")
    command.add_argument(
        "--to",
        required=True,
        choices=TARGETS,
        help="fp32: whole values, for plain PyTorch; or the storage of the run that goes on",
    )
    command.add_argument(
        "--names",
        type=Path,
        metavar="FILE",
        help="names of the optimizer's parameters in its order, one a line, where the checkpoint "
        "does not tell",
    )
    command.add_argument(
        "--model",
        metavar="KEY",
        help="keys of the weights that the optimizer has, joined by dots, where several fit",
    )
    command.set_defaults(run=run, failed=1)


def run(options: argparse.Namespace) -> int:
    """Convert a checkpoint and print what was done; return the exit status.

    Raises:
        CheckpointError: it cannot be read, told or written.
        StorageError: weights of a dtype that the storage cannot hold.
    """
    names = None if options.names is None else _names(options.names)
    summary = convert(options.source, options.out, options.to, names, options.model)
    for line in _lines(summary, options):
        print(line)
    return 0


def _names(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"--names {file} cannot be read: {error}") from error


def _lines(summary: Summary, options: argparse.Namespace) -> Iterator[str]:
    formats = " and ".join(dict.fromkeys(summary.formats))
    yield f"{options.source}: {formats} ({summary.kind})"
    form = "whole fp32 values" if options.to == FP32 else f"storage {options.to}"
    if summary.wide:
        summary.notes.append(
            f"{summary.wide} states stay as wide as they are, and load_state_dict() gives those "
            "that the step compensates a residual"
        )
    left = f"; {summary.left} other tensors are as they were" if summary.left else ""
    yield f"{summary.parameters} parameters and {summary.moments} states to {form}{left}"
    if summary.errors:
        worst = max(summary.errors, key=lambda name: summary.errors[name])
        yield (
            f"not exact: {len(summary.errors)} of them, by {summary.errors[worst]:.1e} of a value "
            f"at most ({worst})"
        )
    else:
        yield "every value is kept exactly"
    yield from (f"note: {note}" for note in dict.fromkeys(summary.notes))
    yield f"{options.out}: {summary.after} bytes, of {summary.before} before"
