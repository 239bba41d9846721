"""Random optimizer programs, as the source text of a script that anyone can run.

A `Program` is data: a few statements of a step, and how it is called and compiled. `script` is its
text, with a function `train` that the tests run as it stands: what is printed is what was run.
"""

from dataclasses import dataclass, field
from typing import Any

from program_helpers import helpers_of
from step_text import function_text, optimizer_text
from train_text import main_text, train_text

CAST = 'for st in opt.state.values():\n    st["m"] = HIGH(st["m"]).to({})'
LOW_CAST, WIDE_CAST = CAST.format("dtype"), CAST.format("F32")
"""Events: what is cast stays in its dtype; in float64 it stays in float64."""


@dataclass(frozen=True)
class Line:
    """One statement of a step, for one parameter."""

    text: str
    each: str = ""
    """The same for lists of all parameters of a group (ps, gs, ms, ...); "" if it has none."""
    carried: bool = False
    """True if what it computes is on the way of a state from its old value to its new one, though
    it updates nothing in place: it holds the state's precision, as the state does."""


@dataclass(frozen=True)
class Program:
    """An optimizer, the tensors and numbers that it is given, and how it is compiled."""

    lines: tuple[Line, ...] = ()
    states: tuple[tuple[str, str], ...] = ()
    """Name of each state of a parameter, and an expression for what it begins with."""
    torch_optim: str = ""
    """An optimizer of torch.optim in place of the lines: `AdamW(GROUPS, betas=(0.9, 0.99))`."""
    dtype: str = "bfloat16"
    shapes: tuple[tuple[int, ...], ...] = ((4, 3),)
    rates: tuple[tuple[float, float], ...] = ((1e-3, 0.0),)
    """Rate and weight decay of each group; parameters go to the groups in turn."""
    schedule: str = ""
    """An expression for the factor of the rates in step t."""
    tensor_lr: bool = False
    counter: str = ""
    """`state`, `group` or `tensor`: where the step counts its calls, as k."""
    listed: bool = False
    """True if the step is of _foreach_ operations on lists, where all statements have such."""
    in_init: bool = False
    """True if states are made with the optimizer, and not in its first step."""
    near_one: bool = True
    """True if parameters are about 1 in size, False if about 0.05."""
    zero_rows: bool = False
    """True if some elements have gradients of zero in every step."""
    by_turns: bool = False
    """True if a parameter has no gradient in every third step."""
    resumed: int = 0
    """The step before which the run is saved and resumed; 0 for never."""
    events: tuple[tuple[int, str], ...] = ()
    """Events between two steps: the number of the second, and a text of `events`."""
    methods: str = ""
    """Methods of the optimizer beside its step."""
    cut: bool = False
    """True if each parameter is updated by a method, in which Dynamo cuts the step."""
    wrapped: bool = False
    """True if another optimizer hands its steps on, and is what is compiled."""
    frozen: bool = False
    """True if there is a group before all others, of a parameter that never has a gradient."""
    joins: int = 0
    """The step before which the last parameter joins, in a group of its own; 0 for none."""
    dtypes: tuple[str, ...] = ()
    """dtypes of the parameters, in turn, where they are of several."""
    layout: str = ""
    """Layout of parameters in memory (`laid_out`)."""
    gradients: str = ""
    """Layout of gradients; or `kept` in one memory, or of a class `Named` or `Boxed`."""
    infinite: str = ""
    """A number that some elements of gradients are in step 4."""
    steps: int = 10
    seed: int = 0
    way: str = "compile"
    """`compile`, `string`, `engine` (the eager one alone) or `function`."""
    options: tuple[tuple[str, Any], ...] = field(default=(("level", "auto"), ("storage", "mcf2")))

    def script(self, *, model: bool = False) -> str:
        """Return the text of a script that runs the program.

        Args:
            model: whether states and statements that hold more precision than the dtype are marked
                by `STATE(...)` and `with EXACT`, for `rounding.modelled`.
        """
        step = function_text if self.way == "function" else optimizer_text
        text = step(self, model) + train_text(self, model)
        return _HEAD.format(dtype=self.dtype) + helpers_of(text) + text + main_text(self)

    def dtype_of(self, name: str) -> str:
        """Return the dtype of the parameter that a state, p0 or m12, belongs to; of one that was
        cast to LOW, that."""
        kind = name.rstrip("0123456789")
        if self.casts_low and kind == "m":
            return self.dtype
        number = int(name[len(kind) :])
        return self.dtypes[number % len(self.dtypes)] if self.dtypes else self.dtype

    @property
    def statements(self) -> str:
        """The text of what a step does, and of its states."""
        own = [*(line.text for line in self.lines), *(begin for _, begin in self.states)]
        return self.torch_optim + "\n".join(own)

    @property
    def casts_low(self) -> bool:
        """True if m becomes LOW between two steps, beside parameters of any dtype."""
        return any(text == LOW_CAST for _, text in self.events)

    @property
    def draws(self) -> bool:
        """True if a step draws random numbers."""
        return any(word in self.statements for word in _DRAWS)

    @property
    def lists(self) -> bool:
        """True if the step is of operations on lists."""
        able = self.way != "function" and self.counter in ("", "group") and bool(self.lines)
        able &= not self.cut
        return self.listed and able and all(line.each for line in self.lines)


_DRAWS = ("rand", "bernoulli", "uniform_", "normal_", "dropout")
_HEAD = """\
import copy
import io
import pickle

import torch

import collage_fx

LOW, F32 = torch.{dtype}, torch.float32


"""
