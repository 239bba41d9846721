"""Names of an optimizer's parameters: those that its model gives them, where that is known."""

import gc
import re
from collections.abc import Callable, Iterator, Mapping

from torch import Tensor
from torch.fx import GraphModule
from torch.nn import Module, ModuleDict, ModuleList, ParameterDict, ParameterList
from torch.optim import Optimizer

from collage_fx.errors import SubjectError
from collage_fx.optimizer.ownership import groups_of, owned_tensors, params_of
from collage_fx.runtime.storage.state_name import StateName

_BY_POSITION = re.compile(r"(?:\w+\.)*param_groups\[\d+\]\.params\[\d+\]")
_WRAPPERS = re.compile(r"\b(?:_orig_mod|module|_fsdp_wrapped_module)\.")
"""Parts that torch.compile and the wrappers of torch.distributed put into a module's names."""

_NO_MODELS = (GraphModule, ModuleList, ModuleDict, ParameterList, ParameterDict)
"""Modules that are parts of a model, or that Dynamo has made of one."""


def names_of(optimizer: Optimizer, model: Module | None = None) -> dict[str, str]:
    """Return position of each parameter, as `param_groups[0].params[3]` -> its name in the model.

    They are, in this order, those of `model`; those that the optimizer was given, as
    `AdamW(model.named_parameters())` does; those of the smallest module in the process that has all
    its parameters. Without any of them the parameters keep their positions.

    Raises:
        SubjectError: `model` is not a module, or has not all parameters of the optimizer.
    """
    positions = {o.name: o for o in owned_tensors(optimizer) if o.owner == "param"}
    params = {name: owned.whole for name, owned in positions.items()}
    if model is not None:
        return _in_model(params, model, type(optimizer).__name__)
    given = _given(optimizer)
    if not given:
        found = _smallest_owner({id(p) for p in params.values()})
        given = _by_identity(found) if found is not None else {}
    return {place: given[id(p)] for place, p in params.items() if id(p) in given}


def renamed(text: str, names: Mapping[str, str]) -> str:
    """Return a text in which positions of parameters are replaced by their names."""
    return _BY_POSITION.sub(lambda found: names.get(found[0], found[0]), text) if names else text


def renamed_state(name: StateName, names: Mapping[str, str]) -> StateName:
    """Return the name of a state with the name of its parameter in place of the position."""
    own = None if name.own is None else renamed(name.own, names)
    return StateName(own, renamed(name.parameter, names))


def naming(optimizer: Callable[[], Optimizer | None]) -> Callable[[str], str]:
    """Return a function that replaces, in a text, positions of parameters by their names.

    Args:
        optimizer: returns it when there is a text; None leaves it as it is.
    """

    def named(text: str) -> str:
        found = optimizer()
        return text if found is None else renamed(text, names_of(found))

    return named


def _in_model(params: dict[str, Tensor], model: Module, optimizer: str) -> dict[str, str]:
    if not isinstance(model, Module):
        raise SubjectError(f"model= takes a torch.nn.Module, got {type(model).__name__}")
    known = _by_identity(model)
    missing = [place for place, p in params.items() if id(p) not in known]
    if missing:
        raise SubjectError(
            f"{type(model).__name__} does not have {missing[0]} of {optimizer}"
            + (f", nor {len(missing) - 1} more of its parameters" if missing[1:] else "")
            + ": give the model that the optimizer was made for"
        )
    return {place: known[id(p)] for place, p in params.items()}


def _by_identity(model: Module) -> dict[int, str]:
    named = [(id(p), name) for name, p in model.named_parameters()]
    short = [_WRAPPERS.sub("", name) for _, name in named]
    if len(set(short)) < len(named):  # one of the user's modules is called `module`
        return dict(named)
    return dict(zip((key for key, _ in named), short, strict=True))


def _given(optimizer: Optimizer) -> dict[int, str]:
    """Return the names that came with the parameters of an optimizer."""
    found = {}
    for group in groups_of(optimizer):
        for p, name in zip(group["params"], group.get("param_names", ()), strict=False):
            found[id(p)] = _WRAPPERS.sub("", str(name))
    return found


def _smallest_owner(params: set[int]) -> Module | None:
    """Return the module with the fewest parameters, and parts, of those that have all of these.

    One of a class of its own comes first: while Dynamo compiles it has a bare one.
    """
    return min(_owners(params), key=lambda found: found[0], default=(None, None))[1]


def largest_owner(optimizer: Optimizer) -> Module | None:
    """Return the module with the most parameters of those that have all of an optimizer.

    Of several, the one with the fewest parts, which is in the others.
    """
    params = {id(p) for p in params_of(optimizer)}

    def size(found: tuple[tuple[bool, int, int], Module]) -> tuple[int, bool, int]:
        (bare, count, parts), _ = found
        return -count, bare, parts

    return min(_owners(params), key=size, default=(None, None))[1]


def _owners(params: set[int]) -> Iterator[tuple[tuple[bool, int, int], Module]]:
    """Yield the modules that have all of these parameters.

    Each after whether it is of no class of its own, and the numbers of its parameters and parts.
    """
    for one in gc.get_objects() if params else ():
        # Not isinstance, which asks proxies and lazy modules for their class and may load them.
        kind = type(one)
        if not issubclass(kind, Module) or issubclass(kind, _NO_MODELS):
            continue
        if "_parameters" not in vars(one):  # before its __init__
            continue
        try:
            own = {id(p) for p in one.parameters()}
            size = kind is Module, len(own), sum(1 for _ in one.modules())
        except Exception:  # a module of somebody else's that does not let itself be looked at
            continue
        if params <= own:
            yield size, one
