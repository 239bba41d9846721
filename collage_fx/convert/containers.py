"""Containers beside files of torch.save: folders of torch.distributed.checkpoint, safetensors.

A file of safetensors has names of tensors, which say where in a state dict each belongs.
"""

import io
import json
import pickle
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from collage_fx.errors import CheckpointError

_STATE, _GROUPS, _MODEL = "state.", "param_groups.", "model."
_KEY = "collage_fx.param_groups"
"""The entry of the metadata of a file of safetensors with what is no tensor."""


class _Planner(DefaultLoadPlanner):
    """Plan of a load in which nothing but tensors, numbers and texts is unpickled."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Keep one object that is no tensor."""
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


def read_folder(path: Path) -> Any:
    """Return what a folder holds, in the dicts and lists that it was saved from.

    Raises:
        CheckpointError: a folder that torch.distributed.checkpoint has not written whole, or with
            objects that only unpickling restores.
    """
    if not (path / ".metadata").is_file():
        raise CheckpointError(
            f"{path} has no file .metadata: it is no folder of torch.distributed.checkpoint, or "
            "the save was not finished"
        )
    reader = FileSystemReader(path)
    try:
        metadata = reader.read_metadata()
        flat: dict[str, Any] = {
            name: _empty(about) for name, about in metadata.state_dict_metadata.items()
        }
        planner = _Planner(flatten_state_dict=False, flatten_sharded_tensors=False)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is")
            load(flat, storage_reader=reader, planner=planner, no_dist=True)
        found: dict[str, Any] = planner.state_dict
    except (CheckpointException, pickle.UnpicklingError, EOFError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged, or cannot be read: {cause(error)}") from error
    except (RuntimeError, KeyError, AttributeError, ImportError) as error:
        raise CheckpointError(f"{path} is damaged, or cannot be read: {cause(error)}") from error
    paths = metadata.planner_data if isinstance(metadata.planner_data, Mapping) else {}
    return _nested({tuple(paths.get(name, (name,))): found[name] for name in flat})


def cause(error: BaseException) -> str:
    """Return the words of an error in a line: the name of what is not unpickled, if it is that."""
    if isinstance(error, CheckpointException):
        inner = [found[0] for found in error.failures.values()]
        error = inner[0] if inner else error
    text = str(error).strip() or type(error).__name__
    if named := re.search(r"GLOBAL (\S+)", text):
        return f"it holds an object of {named[1]}, and objects are not unpickled"
    return text.splitlines()[0][:200]


def _empty(about: Any) -> Any:
    """Return what an entry is loaded into: a tensor, or something in the place of an object."""
    if isinstance(about, TensorStorageMetadata):
        return torch.empty(about.size, dtype=about.properties.dtype)
    return ""


def _nested(leaves: Mapping[tuple[Any, ...], Any]) -> Any:
    """Return dicts and lists by the paths of their leaves; numbers in a path are those of lists."""
    root: dict[Any, Any] = {}
    for path, leaf in leaves.items():
        node = root
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = leaf
    return _with_lists(root)


def _with_lists(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    items = {key: _with_lists(value) for key, value in node.items()}
    if items and all(isinstance(key, int) for key in items):
        return [items[key] for key in sorted(items)]
    return items


def write_folder(tree: Any, path: Path) -> None:
    """Write dicts, lists and tensors as a folder."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        save(tree, checkpoint_id=path, no_dist=True)


def read_safetensors(path: Path) -> Any:
    """Return the tensors of a file, those of an optimizer apart from the others.

    An optimizer's are named `state.<parameter>.<state>`, after at most one word such as
    `optimizer.`; the others are a model's, perhaps after `model.`.

    Raises:
        CheckpointError: the file is damaged, or safetensors is not installed.
    """
    safetensors = _imported()
    try:
        with safetensors.safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            flat = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except safetensors.SafetensorError as error:
        raise CheckpointError(f"{path} is damaged, or no file of safetensors: {error}") from error
    return _apart(flat, json.loads(metadata.get(_KEY, "{}")))


def _imported() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise CheckpointError(
            "a .safetensors file needs the package safetensors: pip install safetensors"
        ) from error
    return safetensors


def _apart(flat: dict[str, Any], groups: Mapping[str, Any]) -> dict[str, Any]:
    """Return {prefix: {"weights": ..., "states": ...}}, of which each may be missing."""
    tree: dict[str, Any] = {}
    for name, value in (*flat.items(), *groups.items()):
        prefix, part, rest = _split(name)
        tree.setdefault(prefix, {}).setdefault(part, {})[rest] = value
    return tree


def _split(name: str) -> tuple[str, str, str]:
    """Return prefix and part of the tree that a name belongs to, and its name there."""
    if name.startswith((_STATE, _GROUPS)):
        return "", "states", name
    first, _, rest = name.partition(".")
    if rest.startswith((_STATE, _GROUPS)):
        return f"{first}.", "states", rest
    if name.startswith(_MODEL):
        return _MODEL, "weights", name.removeprefix(_MODEL)
    return "", "weights", name


def write_safetensors(tree: Mapping[str, Any], path: Path) -> None:
    """Write tensors by their names, and what else the states need as text beside them."""
    safetensors = _imported()
    tensors: dict[str, Tensor] = {}
    texts: dict[str, Any] = {}
    for prefix, parts in tree.items():
        for rest, value in (item for part in parts.values() for item in part.items()):
            if isinstance(value, Tensor):
                tensors[prefix + rest] = value.contiguous()
            elif rest.startswith(_GROUPS):
                texts[prefix + rest] = value
    metadata = {"format": "pt", **({_KEY: json.dumps(texts)} if texts else {})}
    safetensors.torch.save_file(tensors, str(path), metadata=metadata)
