"""Public functions name the options that they take; a report names a step that is not assigned.

For api.
"""

import dataclasses
import inspect

import pytest
import torch
from tensors import bf16, with_grads

import collage_fx
from collage_fx.errors import CollageError

TAKE_OPTIONS = ["compensated", "compile", "compile_", "compile_callback", "explain"]


@pytest.mark.parametrize("name", TAKE_OPTIONS)
def test_signatures_name_the_options(name: str) -> None:
    parameters = inspect.signature(getattr(collage_fx, name)).parameters
    for field in dataclasses.fields(collage_fx.CollageConfig):
        assert parameters[field.name].default is field.default
        assert parameters[field.name].kind is inspect.Parameter.KEYWORD_ONLY
    assert parameters["options"].kind is inspect.Parameter.VAR_KEYWORD


def test_no_other_public_function_takes_options() -> None:
    public = {n: getattr(collage_fx, n) for n in collage_fx.__all__}
    functions = {n: f for n, f in public.items() if inspect.isfunction(f)}
    takes = [n for n, f in functions.items() if f.__code__.co_flags & inspect.CO_VARKEYWORDS]
    assert takes == TAKE_OPTIONS


def test_a_step_that_was_not_assigned_is_named() -> None:
    (p,) = with_grads([bf16(8)])
    optimizer = torch.optim.SGD([p])
    step = collage_fx.compile(optimizer)
    with pytest.raises(CollageError, match=r"made a step for this SGD, which is not its step"):
        collage_fx.report(optimizer)
    step()
    assert collage_fx.report(step).taken == 1
    with pytest.raises(CollageError, match=r"pass what compile returned"):
        collage_fx.report(optimizer)
    with pytest.raises(CollageError, match=r"the step of this SGD was not made by"):
        collage_fx.report(torch.optim.SGD([p]))
