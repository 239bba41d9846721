"""Files of checkpoints: read whole, and written so that there is a whole one or none."""

import os
import pickle
import shutil
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from collage_fx.convert import containers
from collage_fx.errors import CheckpointError

FILE, SAFETENSORS, FOLDER = "torch.save", "safetensors", "DCP"
"""The kinds of containers."""
_SUFFIX = ".safetensors"


@dataclass
class Checkpoint:
    """A checkpoint that was read: what it holds, and the container that it came in."""

    kind: str
    tree: Any
    """Dicts, lists and tuples, down to tensors, numbers and texts."""


def read(path: Path) -> Checkpoint:
    """Read a checkpoint. Tensors of a file of torch.save stay on disk until they are used.

    Args:
        path: a file of torch.save, a `.safetensors` file, or a folder that
            torch.distributed.checkpoint has written.

    Returns:
        All that it holds, on the CPU.

    Raises:
        CheckpointError: it is not there, damaged, or holds objects that only unpickling restores.
    """
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    kind = kind_of(path)
    reader: Callable[[Path], Any] = {
        FILE: _read_file,
        SAFETENSORS: containers.read_safetensors,
        FOLDER: containers.read_folder,
    }[kind]
    try:
        return Checkpoint(kind, reader(path))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


def kind_of(path: Path) -> str:
    """Return the kind of the container at a path, by its form and its name."""
    if path.is_dir():
        return FOLDER
    return SAFETENSORS if path.suffix == _SUFFIX else FILE


def _read_file(path: Path) -> Any:
    try:
        zipped = zipfile.is_zipfile(path)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} is damaged, or holds more than dicts, lists, tensors, numbers and texts, and "
            f"nothing else is unpickled ({containers.cause(error)}): save state dicts alone, such "
            'as {"model": model.state_dict(), "optimizer": optimizer.state_dict()}'
        ) from error
    except (RuntimeError, EOFError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is damaged, or no file of torch.save: {containers.cause(error)}"
        ) from error


def check_out(source: Path, out: Path) -> None:
    """Raise CheckpointError where a conversion would overwrite something, or has no place."""
    if out.exists() or out.is_symlink():
        raise CheckpointError(f"{out} exists: nothing is overwritten, name another OUT")
    if not source.is_dir() and kind_of(source) != (FILE if out.suffix != _SUFFIX else SAFETENSORS):
        raise CheckpointError(
            f"{out} would be of the kind of {source}, {kind_of(source)}: name it accordingly"
        )
    if source.is_dir() and source.resolve() in out.resolve().parents:
        raise CheckpointError(f"{out} would be a part of {source}, which is left as it is")
    if not out.parent.is_dir():
        raise CheckpointError(f"{out} cannot be written: there is no folder {out.parent}")
    if not os.access(out.parent, os.W_OK | os.X_OK):
        raise CheckpointError(f"{out} cannot be written: no permission to write in {out.parent}")


def write(checkpoint: Checkpoint, out: Path) -> None:
    """Write a checkpoint beside its place, and move it there once all of it is on disk.

    Raises:
        CheckpointError: it cannot be written. There is nothing at `out` then, as after an
            interrupt; a process that is killed may leave a `.partial` file beside it.
    """
    with _beside(out) as partial:
        try:
            _write(checkpoint, partial)
            _sync(partial)
            if out.exists():
                raise CheckpointError(f"{out} is there by now: nothing is overwritten")
            os.replace(partial, out)
            _sync_one(out.parent)
        except OSError as error:
            raise CheckpointError(f"{out} cannot be written: {error.strerror or error}") from error


def _write(checkpoint: Checkpoint, place: Path) -> None:
    if checkpoint.kind == FOLDER:
        containers.write_folder(checkpoint.tree, place)
    elif checkpoint.kind == SAFETENSORS:
        containers.write_safetensors(checkpoint.tree, place)
    else:
        torch.save(checkpoint.tree, place)


@contextmanager
def _beside(out: Path) -> Iterator[Path]:
    """Yield a path beside another; whatever is there afterwards is removed."""
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        yield partial
    finally:
        if partial.is_dir():
            shutil.rmtree(partial)
        else:
            partial.unlink(missing_ok=True)


def _sync(place: Path) -> None:
    """Have a file, or a folder with all that is in it, on disk."""
    for inside in sorted(place.rglob("*")) if place.is_dir() else ():
        _sync_one(inside)
    _sync_one(place)


def _sync_one(place: Path) -> None:
    handle = os.open(place, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def size_of(path: Path) -> int:
    """Return the bytes of a file, or of all files in a folder."""
    if path.is_dir():
        return sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
    return path.stat().st_size
