"""An optimizer of a few parameters that stands for one of many while its step is traced."""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator

from torch import Tensor
from torch.optim import Optimizer

from collage_fx.optimizer.ownership import STAND_IN, params_of


class StandIn:
    """An optimizer that has some of another's parameters, and shares their states."""

    def __init__(self, optimizer: Optimizer, wanted: Callable[[Tensor], bool]) -> None:
        few: Optimizer = object.__new__(type(optimizer))
        few.__dict__[STAND_IN] = True
        few.param_groups = [
            {"params": [p for p in group["params"] if wanted(p)]}
            for group in optimizer.param_groups
        ]
        few.state = defaultdict(dict)
        few.state.update((p, optimizer.state[p]) for p in params_of(few) if p in optimizer.state)
        self.optimizer = few

    @contextlib.contextmanager
    def of(self, optimizer: Optimizer) -> Iterator[None]:
        """Within, it has what else the optimizer has, its rates and so on, and gives it back."""
        few = self.optimizer
        own = {k: vars(few)[k] for k in (STAND_IN, "param_groups", "state")}
        few.__dict__.update({k: v for k, v in vars(optimizer).items() if k not in (*own, "step")})
        groups = list(zip(few.param_groups, optimizer.param_groups, strict=True))
        for mine, group in groups:
            params = mine["params"]
            mine.clear()
            mine.update({**group, "params": params})
        try:
            yield
        finally:
            for mine, group in groups:
                group.update((k, v) for k, v in mine.items() if k != "params")
                params = mine["params"]
                mine.clear()  # what the user replaces is let go of
                mine["params"] = params
            for p, state in few.state.items():
                optimizer.state.setdefault(p, state)
            few.__dict__.clear()
            few.__dict__.update(own)

    def shares(self, optimizer: Optimizer) -> bool:
        """Tell whether the states of its parameters are still the optimizer's."""
        mine, its = self.optimizer.state, optimizer.state
        return all(mine.get(p) is its.get(p) for p in params_of(self.optimizer))
