"""Leaves of nested containers, and containers with other leaves. For runtime.trees."""

from collections import OrderedDict, deque
from typing import Any, NamedTuple

import pytest
import torch

from collage_fx.runtime.trees import tree_leaves, tree_map, tree_map_only, tree_pairs


class Pair(NamedTuple):
    """A tuple whose class takes its items one by one."""

    first: Any
    second: Any


TREE = {"a": [1, (2.0, None)], "b": OrderedDict(c=Pair(3, [])), "d": torch.Size([4, 5])}


def test_leaves_are_in_their_order() -> None:
    assert tree_leaves(TREE) == [1, 2.0, None, 3, 4, 5]
    assert tree_leaves("text") == ["text"] and tree_leaves({}) == []


def test_new_containers_are_of_the_same_classes() -> None:
    made = tree_map_only(int, lambda x: -x, TREE)
    assert made == {"a": [-1, (2.0, None)], "b": {"c": Pair(-3, [])}, "d": (-4, -5)}
    assert type(made["b"]) is OrderedDict and type(made["b"]["c"]) is Pair
    assert type(made["d"]) is torch.Size
    assert made["b"]["c"].second is not TREE["b"]["c"].second, "a list of its own"


def test_parts_that_are_said_to_be_leaves_stay() -> None:
    made = tree_map(lambda x: x, TREE, is_leaf=lambda part: isinstance(part, OrderedDict))
    assert made == TREE and made is not TREE
    assert made["b"] is TREE["b"] and made["a"] is not TREE["a"]


class Two(tuple[Any, ...]):
    """A tuple that cannot be made of a list."""

    def __new__(cls, one: Any, other: Any) -> "Two":
        return super().__new__(cls, (one, other))


def test_objects_of_other_classes_are_leaves() -> None:
    two = Two(1, 2)
    assert tree_leaves([two]) == [two]
    assert tree_map(lambda x: x, deque([two], 3))[0] is two
    assert tree_map(lambda x: x + 1, deque([1], 3)).maxlen == 3


def test_pairs_are_of_the_same_places() -> None:
    pairs = tree_pairs({"a": 1, "b": (2, [3])}, {"b": (5, [6]), "a": 4})
    assert pairs == [(1, 4), (2, 5), (3, 6)], "whatever the order of keys"
    for other in ({"a": 4}, {"a": 4, "b": (5, [])}, {"a": 4, "b": 5}, [4, 5]):
        with pytest.raises(ValueError, match=r".+"):
            tree_pairs({"a": 1, "b": (2, [3])}, other)
