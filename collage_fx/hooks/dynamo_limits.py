"""How many graphs Dynamo has compiled, and how many it may keep for one function."""

from contextlib import AbstractContextManager

from torch._dynamo import config as dynamo_config
from torch._dynamo.utils import counters

RECOMPILE_LIMIT = 256
"""How many graphs Dynamo may keep for the step of one class of optimizers.

All of them share one function, whose graphs Dynamo counts together: its default limit of 8 is soon
reached.
"""


def many_graphs() -> AbstractContextManager[None]:
    """Return a context within which Dynamo keeps as many graphs of a function."""
    return dynamo_config.patch(recompile_limit=RECOMPILE_LIMIT)


def graphs_compiled() -> int:
    """Return how many graphs Dynamo has made in this process."""
    return int(counters["stats"]["unique_graphs"])
