"""Modes of steps, from compiled to recorded, and the causes that move steps to a later one."""

from enum import Enum, IntEnum


class Mode(IntEnum):
    """Part of Dynamo in a step, from all of the work to none; steps never go back."""

    COMPILED = 0
    """Dynamo traces, and its graphs are compiled; what is outside of them is recorded."""
    TRACED = 1
    """Dynamo traces, and its graphs are recorded with the rest: that notes more at a time."""
    RECORDED = 2
    """Dynamo is not asked: all operations are recorded."""

    def __str__(self) -> str:
        """Return the name as logs and docs show it."""
        return self.name.lower()


class Cause(Enum):
    """Cause of another mode: the mode that it leads to, and what is said of it."""

    ASKED = Mode.RECORDED, "record=True"
    NO_TRACING = Mode.RECORDED, "torch lacks private names that only traced steps need"
    NEW_GRAPHS = Mode.RECORDED, "call after call needs a new graph"
    EACH_PARAMETER = Mode.RECORDED, "Dynamo would trace a method for each parameter by itself"
    TRACED_WRONG = Mode.RECORDED, "the step does what torch.compile does wrong"
    OUTSIDE = (
        Mode.RECORDED,
        "a write of a state, and more than a third of all operations, outside of Dynamo's graphs",
    )
    GRADIENTS_APART = (
        Mode.RECORDED,
        "gradients are clipped or zeroed, and no graph has all of them as the step begins",
    )
    UNSEEN = Mode.RECORDED, "a state was written, by no graph and no operation that was seen"
    RESUMED = Mode.RECORDED, "the run that saved the checkpoint was recorded"
    PARTLY_OUTSIDE = (
        Mode.TRACED,
        "a write of a state, and at most a third of all operations, outside of Dynamo's graphs",
    )
    CUT = Mode.TRACED, "a graph ends, and others go on from values that it would round"
    CHAINED = Mode.TRACED, "a graph stores in a state what another has computed"
    REPLACED = Mode.TRACED, "a tensor that a graph made takes the place of a state"
    MOVED = Mode.TRACED, "a state takes the memory of another"
    RESUMED_TRACED = Mode.TRACED, "the run that saved the checkpoint was traced"

    @property
    def mode(self) -> Mode:
        """The mode that it leads to."""
        return self.value[0]

    def __str__(self) -> str:
        """Return what is said of it."""
        return self.value[1]
