"""Classes of optimizers that compile their own step: those of torch.optim, and any other.

`collage_fx.optim.AdamW` and the like are for what takes a class rather than an optimizer: the
Trainer's `optimizer_cls_and_kwargs`, the `class_path` of Lightning's CLI, the registries of others.
"""

import copyreg
import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from collage_fx.classes import FIRST_USE, OPTIONS, ORIGINAL, class_of
from collage_fx.dynamo.options import OPTION_TYPES, names_options, split_options
from collage_fx.errors import OptionError, SubjectError
from collage_fx.first_use import METHODS, begin

_LOCK = threading.Lock()


@names_options
def compensated(
    cls: type[Optimizer], *, mode: str | None = None, **options: Any
) -> type[Optimizer]:
    """Return a subclass of a class of optimizers, whose step is compiled with compensation.

    It has the name and the signature of the class, and an optimizer of it does what one of the
    class does after `collage_fx.compile_(optimizer, **options)`. The step is compiled at its first
    use, or where a state dict is first asked for or loaded.

    Args:
        cls: a class of optimizers; one that was made here stands for its original, and its options
            are kept where no others are given.
        mode: as of `collage_fx.compile`.
        **options: as of `collage_fx.compile`. They are collage_fx's, also where the class has an
            argument of such a name: that is given where an optimizer is made.

    Returns:
        The class, the same one where the same is asked for again. It can be pickled where the
        original can.

    Raises:
        OptionError: an option or value that does not exist, or an argument of the class.
        SubjectError: anything that is no class of optimizers.

    Examples:
        >>> SGD = collage_fx.compensated(torch.optim.SGD, storage="remainder16")
        >>> train(SGD(model.parameters(), lr=1e-5))
        >>> len(collage_fx.residuals(model.weight))
        1
    """
    _refuse_other(cls)
    original = vars(cls).get(ORIGINAL, cls)
    given = options if mode is None else {**options, "mode": mode}
    options = {**getattr(cls, OPTIONS, {}), **given}
    own = inspect.signature(original.__init__).parameters
    if wrong := [name for name in options if name in own and name not in OPTION_TYPES]:
        raise OptionError(
            f"{wrong[0]!r} is an argument of {original.__name__} and no option of collage_fx: give "
            "it where an optimizer of the class is made"
        )
    _check(options)
    return _class(original, options)


def _refuse_other(cls: Any) -> None:
    """Raise SubjectError for what is no class of optimizers."""
    if not isinstance(cls, type) or not issubclass(cls, Optimizer) or cls is Optimizer:
        name = getattr(cls, "__name__", type(cls).__name__)
        raise SubjectError(
            f"compensated takes a class that is derived from torch.optim.Optimizer, got {name}; an "
            "optimizer is compiled by collage_fx.compile_(optimizer)"
        )


def _check(options: dict[str, Any], beside: Iterable[str] = ()) -> None:
    """Raise OptionError for an option or value that does not exist; suggest names beside those."""
    given = {name: value for name, value in options.items() if name != "mode"}
    split_options(given, options.get("mode"), beside=beside)


def _class(original: type[Optimizer], options: dict[str, Any]) -> type[Optimizer]:
    """Return the class of these options: the one that there is, of those that Python knows."""
    with _LOCK:
        for one in type.__subclasses__(original):
            known = vars(one).get(OPTIONS)
            if known is not None and not _is_public(one) and _exactly(known) == _exactly(options):
                return one
        return _make(original, options)


def _exactly(options: dict[str, Any]) -> str:
    return repr(sorted(options.items()))


def _is_public(cls: type) -> bool:
    """Return True if a class is one of this module, which take options where one is made."""
    return globals().get(cls.__name__) is cls


def _make(
    original: type[Optimizer], options: dict[str, Any], *, takes_options: bool = False
) -> type[Optimizer]:
    """Make a class.

    Args:
        original: the class that it is derived from.
        options: of the steps of its optimizers.
        takes_options: whether it takes options beside the arguments of the original.
    """
    init: Any = original.__init__
    own = inspect.signature(init)

    @functools.wraps(init)
    def __init__(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        given = _taken(kwargs, own.parameters) if takes_options else {}
        _hook(original)
        init(self, *args, **kwargs)
        begin(self, given)

    def __reduce_ex__(self: Optimizer, protocol: Any) -> Any:
        reduced: Any = original.__reduce_ex__(self, protocol)
        first_use = vars(self).get(FIRST_USE)
        if first_use is None:  # our copy, whose steps are plain
            return reduced
        make, args, *rest = reduced
        if rest and isinstance(rest[0], dict):
            rest[0] = {k: v for k, v in rest[0].items() if k not in (FIRST_USE, *METHODS)}
        return _remade, (make, args, first_use.given), *rest

    _sign(__init__, _with_options(own) if takes_options else own)
    members = {
        "__doc__": _doc(original, takes_options=takes_options),
        "__init__": __init__,
        "__module__": __name__,
        "__qualname__": original.__qualname__,
        "__reduce_ex__": __reduce_ex__,
        ORIGINAL: original,
        OPTIONS: options,
    }
    kind: Any = type(original)
    cls: type[Optimizer] = _kind(kind)(original.__name__, (original,), members)
    return cls


def _sign(init: Any, signature: inspect.Signature) -> None:
    """Give a function that stands for another's `__init__` a signature, types of options too."""
    given = signature.parameters
    types = {n: given[n].annotation for n in OPTION_TYPES if n in given}
    types = {n: kind for n, kind in types.items() if kind is not inspect.Parameter.empty}
    init.__signature__ = signature
    init.__annotations__ = types | getattr(init, "__annotations__", {})


def _hook(cls: type[Optimizer]) -> None:
    """Put what calls hooks around the step of a class, as the first optimizer of it does.

    Of an optimizer whose class was made here that is to be the original, whose step it is.
    """
    if not getattr(cls.step, "hooked", False):
        step: Any = Optimizer.profile_hook_step(cls.step)
        step.hooked = True
        cls.step = step  # type: ignore[method-assign]


def _taken(kwargs: dict[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Take the options out of the arguments of a class that are not its own; None is not given."""
    given = {name: kwargs.pop(name) for name in [*kwargs] if name not in own}
    given = {n: value for n, value in given.items() if value is not None or n not in OPTION_TYPES}
    _check(given, own)
    return given


def _with_options(own: inspect.Signature) -> inspect.Signature:
    """Return a signature with the options behind what there is."""
    more = [
        inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind | None)
        for n, kind in OPTION_TYPES.items()
        if n not in own.parameters
    ]
    return own.replace(parameters=[*own.parameters.values(), *more])


def _doc(original: type[Optimizer], *, takes_options: bool) -> str:
    """Return the docstring of a class: what it adds, and what the original is."""
    options = (
        "\n\nBeside its arguments it takes, by keyword, the options of `collage_fx.compile`: "
        f"{', '.join(OPTION_TYPES)}, and settings of torch._inductor.config. None stands for one "
        "that is not given; one that does not exist raises an OptionError."
    )
    name = original.__name__
    example = f"\n\nExamples:\n    >>> optimizer = collage_fx.optim.{name}(model.parameters())"
    return (
        f"`{original.__module__}.{original.__qualname__}`, its step compiled with compensation.\n\n"
        "It is compiled at its first use, as by `collage_fx.compile_(optimizer)`."
        f"{options if takes_options else ''}{example if takes_options else ''}\n\nThe original:\n\n"
        f"{inspect.getdoc(original) or ''}"
    )


@functools.cache
def _kind(kind: Any) -> Any:
    """Return a type of classes like another, whose classes can be pickled under no name."""
    made = type("Compensated", (kind,), {"__module__": __name__})
    copyreg.pickle(made, _reduce_class)
    return made


def _reduce_class(cls: Any) -> Any:
    if ORIGINAL not in vars(cls) or _is_public(cls):
        return cls.__qualname__
    return _remade_class, (vars(cls)[ORIGINAL], vars(cls)[OPTIONS])


def _remade_class(original: type[Optimizer], options: dict[str, Any]) -> type[Optimizer]:
    return compensated(original, **options)


def _remade(make: Callable[..., Optimizer], args: Any, given: dict[str, Any]) -> Optimizer:
    """Return a copy of an optimizer, which gets its state next."""
    optimizer = make(*args)
    _hook(class_of(optimizer))
    begin(optimizer, given)
    return optimizer


__all__ = ["compensated"]
for _name in torch.optim.__all__:
    _found = getattr(torch.optim, _name)
    if isinstance(_found, type) and issubclass(_found, Optimizer) and _found is not Optimizer:
        globals()[_name] = _make(_found, {}, takes_options=True)
        __all__.append(_name)

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...


def __dir__() -> list[str]:
    return sorted(__all__)
