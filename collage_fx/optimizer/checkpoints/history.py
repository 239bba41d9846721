"""History of an optimizer's steps, on which its later graphs depend."""

from dataclasses import dataclass, field
from typing import Any

from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary


@dataclass
class History:
    """Observations of an optimizer's steps, kept in checkpoints so that runs go on bit for bit."""

    recorded: list[list[int]] | None = None
    """Numbers of its last step that change, for an optimizer whose steps are recorded whole; see
    `Executors.changing`."""
    traced: bool = False
    """True if Dynamo traces steps that are recorded whole."""
    hand_on: list[int] | None = None
    """The positions in a step of segments that write a gradient which later ones read; None where
    that is not known."""
    at_once: str = ""
    """Reason why the operations of recorded steps are done one by one, see
    `Recorder.see_unknown_reader`; empty where they are not."""
    began: list[dict[str, Any]] | None = None
    """The numbers of the parameter groups in a first step of which Dynamo has seen nothing."""
    numbers: dict[str, float | None] = field(default_factory=dict)
    """Dynamo's name of a number, such as a rate -> the value that is a constant in the graphs
    so far, None once it has changed and is an input."""
    taken: int = 0
    """Number of steps it has taken."""
    budget: dict[str, Any] | None = None
    """Observations for a `budget`: `steps`, `moves` of the states by name, and whether all is
    `planned`; None without one."""
    on_host: list[tuple[Any, list[str]]] | None = None
    """`capturable` of each group, and the names of the numbers that plain PyTorch has on the
    host, such as step counts; None before the first step."""


_HISTORIES = WeakIdKeyDictionary()


def history_of(optimizer: Optimizer) -> History:
    """Return the history of an optimizer; an empty one if it has taken no step."""
    found: History = _HISTORIES.setdefault(optimizer, History())
    return found


def set_history(optimizer: Optimizer, history: History) -> None:
    """Have an optimizer, and those that share its history, go on from another history."""
    vars(history_of(optimizer)).update(vars(history))


def share_history(optimizer: Optimizer, inner: Optimizer) -> None:
    """Give an optimizer that another wraps the history of that one, whose steps they are."""
    _HISTORIES[inner] = history_of(optimizer)
