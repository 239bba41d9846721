"""A recorded step beside the graphs that Dynamo traces of the same program: bit for bit."""

from dataclasses import replace
from unittest.mock import patch

import torch
from programs import Program
from runs import Run, compensated
from torch import Tensor

from collage_fx.segments.executors import Executors


def recorded_and_traced(program: Program) -> tuple[Run, Run] | None:
    """Run a program recorded, and by Dynamo's graphs; None where other passes served them.

    That is where collage_fx refuses it, and where more of it runs on whole values than the first
    step of states. Rates do not change: they are constants of a recorded segment until they have.
    So is a count in Python, which Dynamo has as an input in each new
    graph once it has changed in one: there are new ones where gradients are missing by turns. Of a
    resumed run only the end is reported. Other programs where Dynamo looks at them are torch's
    optimizers, and `addcdiv_`, which it makes three operations. And a tensor's rate times a decay
    is 0 in a Dynamo graph if the decay is, and small if it is written out; a recorded segment has
    one 0-d tensor there, the product being done at once, and takes it for a factor near one: it is
    computed on whole values. And a number that is read of a parameter, and scales it, ends a
    recorded segment, which rounds the parameter to its storage, where Dynamo's graph has the number
    in it. And a decay that a count in Python divides is a constant in Dynamo's first graph, and a
    factor that may be near one in a recorded segment, which has the number as an input.
    """
    program = replace(program, schedule="")
    apart = program.torch_optim or program.resumed
    apart = apart or "p.sum().item()" in program.script()
    decays = any("wd" in line.text for line in program.lines)
    counted = program.counter in ("state", "group")
    divided = counted and any("**k" in line.text for line in program.lines)
    apart = apart or program.wrapped or (counted and program.by_turns) or (divided and decays)
    no_decay = decays and any(wd == 0 for _, wd in program.rates)
    subtracted = any("lr * wd * p" in line.text for line in program.lines)
    if apart or (program.tensor_lr and (no_decay or subtracted)) or "addcdiv" in program.script():
        return None
    first = 0 if program.in_init else 1
    begin, begun = Executors.begin, list[Executors]()

    def begin_as_traced(self: Executors, *, interpreted: str, at_once: bool) -> None:
        """Do the first step of states on whole values, and the others by the passes at first."""
        anew = first == 1 and not begun  # of a resumed run there are states
        begun.append(self)
        begin(self, interpreted=interpreted or "begins" * anew, at_once=True)

    runs = []
    for way in ("record", "compile"):
        with patch.object(Executors, "begin", begin_as_traced):
            runs.append(compensated(replace(program, way=way)))
        begun.clear()
    if any(run.error is not None or run.joined != first for run in runs):
        return None
    return runs[0], runs[1]


def differing(one: Run, other: Run) -> list[str]:
    """Return the states that have other bits in one run than in the other."""
    return [name for name, x in one.values.items() if not _same(x, other.values[name])]


def _same(x: Tensor, y: Tensor) -> bool:
    return torch.equal(x.nan_to_num(), y.nan_to_num()) and torch.equal(x.isnan(), y.isnan())
