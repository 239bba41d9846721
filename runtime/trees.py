"""Nested containers, such as the arguments of a call: tuples, lists, deques and dicts.

Named tuples and the results of operations are tuples, and a ModelOutput is a dict. Objects of other
classes derived from these are leaves, as nobody knows how to make one.
"""

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx.immutable_collections import immutable_dict, immutable_list

_SEQUENCES = (list, tuple, deque, immutable_list, torch.Size)
_DICTS = (dict, defaultdict, immutable_dict)


def _is_sequence(tree: Any) -> bool:
    named = isinstance(tree, tuple) and (hasattr(tree, "_fields") or hasattr(tree, "n_fields"))
    return named or type(tree) in _SEQUENCES


def _is_dict(tree: Any) -> bool:
    return type(tree) in _DICTS or isinstance(tree, OrderedDict)


def tree_leaves(tree: Any) -> list[Any]:
    """Return what is in nested containers, in their order, and is none itself."""
    if _is_dict(tree):
        tree = tree.values()
    elif not _is_sequence(tree):
        return [tree]
    return [leaf for part in tree for leaf in tree_leaves(part)]


def tree_pairs(tree: Any, other: Any) -> list[tuple[Any, Any]]:
    """Return the leaves of nested containers, each with what is in its place in others.

    Raises:
        ValueError: the others have more or fewer places, or other keys.
    """
    if _is_dict(tree) and _is_dict(other):
        if tree.keys() != other.keys():
            raise ValueError(f"{list(tree)} are not {list(other)}")
        return [pair for key in tree for pair in tree_pairs(tree[key], other[key])]
    if _is_sequence(tree) and _is_sequence(other):
        parts: Sequence[Any] = list(zip(tree, other, strict=True))
        return [pair for one, two in parts for pair in tree_pairs(one, two)]
    if _is_dict(tree) or _is_sequence(tree):
        raise ValueError(f"{type(tree).__name__} is not {type(other).__name__}")
    return [(tree, other)]


def tree_map(
    function: Callable[[Any], Any], tree: Any, is_leaf: Callable[[Any], bool] = lambda tree: False
) -> Any:
    """Return new containers with the results of a function in place of the leaves.

    Args:
        function: of a leaf.
        tree: nested containers.
        is_leaf: tells of any other part of the tree that it is one.
    """
    if is_leaf(tree) or not (_is_dict(tree) or _is_sequence(tree)):
        return function(tree)
    if _is_dict(tree):
        made = {} if isinstance(tree, immutable_dict) else copy.copy(tree)  # of its own class
        for key, value in tree.items():  # a ModelOutput has no update()
            made[key] = tree_map(function, value, is_leaf)
        return made
    parts = [tree_map(function, part, is_leaf) for part in tree]
    if isinstance(tree, list):
        return parts
    if isinstance(tree, deque):
        return deque(parts, tree.maxlen)
    return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)


def tree_map_only(kind: type, function: Callable[[Any], Any], tree: Any) -> Any:
    """Return new containers with the results of a function in place of leaves of a class."""
    return tree_map(lambda x: function(x) if isinstance(x, kind) else x, tree)


def replace_functions(
    given: Any, is_function: Callable[[Any], bool], replace: Callable[[Any], Any]
) -> Any:
    """Return arguments with the functions in them, closures say, replaced.

    Lists and dicts without any stay the same objects: who is given them may write to them.
    """

    def has_none(tree: Any) -> bool:
        return not any(map(is_function, tree_leaves(tree)))

    return tree_map(lambda a: replace(a) if is_function(a) else a, given, is_leaf=has_none)
