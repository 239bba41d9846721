"""Nested tuples, lists and dicts, such as the arguments of a call."""

import copy
from collections.abc import Callable
from typing import Any


def tree_leaves(tree: Any) -> list[Any]:
    """Return what is in nested containers, in their order, and is none itself."""
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, list | tuple):
        return [tree]
    return [leaf for part in tree for leaf in tree_leaves(part)]


def tree_map(
    function: Callable[[Any], Any], tree: Any, is_leaf: Callable[[Any], bool] = lambda tree: False
) -> Any:
    """Return new containers with the results of a function in place of the leaves.

    Args:
        function: of a leaf.
        tree: nested containers; those of other classes than these are leaves.
        is_leaf: tells of any other part of the tree that it is one.
    """
    if not isinstance(tree, dict | list | tuple) or is_leaf(tree):
        return function(tree)
    if isinstance(tree, dict):
        made = copy.copy(tree)  # of its own class
        for key, value in tree.items():  # a ModelOutput has no update()
            made[key] = tree_map(function, value, is_leaf)
        return made
    parts = [tree_map(function, part, is_leaf) for part in tree]
    if isinstance(tree, list):
        return parts
    return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)


def tree_map_only(kind: type, function: Callable[[Any], Any], tree: Any) -> Any:
    """Return new containers with the results of a function in place of leaves of a class."""
    return tree_map(lambda x: function(x) if isinstance(x, kind) else x, tree)
