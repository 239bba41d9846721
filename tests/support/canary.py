"""Canary: each private name of torch that collage_fx uses is hidden in turn, and steps are tried.

    python tests/support/canary.py [--changed] [NAME ...]

One process imports torch and forks for each name of `runtime.torch_private`, in which it is as if
torch had none of that name, or, with `--changed`, had a function of another signature there. Each
child trains by AdamW, by Adafactor and by the backend string, and goes on from a checkpoint. It
prints a line of JSON for each name: `right`, `warned` (right, and something was said), `refused`
(an error of our own class before anything was written) or what went wrong: it exits with 1 then.
"""

import argparse
import functools
import importlib
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
NOBODY = "a_name_that_nobody_uses"
"""The control: to hide it changes nothing."""


def train(make: Callable[[list[torch.Tensor]], Any], way: str, start: torch.Tensor) -> None:
    """Take steps compensated, and in float64; raise AssertionError where they differ, or are half.

    An error is let through if no parameter was written.
    """
    import collage_fx

    exact = [start.double().clone().requires_grad_()]
    params = [start.clone().requires_grad_()]
    optimizer, reference = make(params), make(exact)
    if way == "string":
        step: Callable[[], Any] = torch.compile(optimizer.step, backend="collage")
    else:
        step = collage_fx.compile(optimizer)
    for number in range(12):
        if way == "load" and number == 6:
            saved = optimizer.state_dict()
            params = [params[0].detach().clone().requires_grad_()]
            optimizer = make(params)
            step = collage_fx.compile(optimizer)
            optimizer.load_state_dict(saved)
        generator = torch.Generator().manual_seed(number)
        gradient = torch.randn(start.shape, generator=generator).bfloat16()
        params[0].grad, exact[0].grad = gradient, gradient.double()
        before = params[0].detach().clone()
        try:
            step()
        except Exception:
            assert torch.equal(before, params[0]), "a step that raised has written"
            raise
        type(reference).step(reference)
    moved = (exact[0].detach() - start.double()).norm()
    error = (collage_fx.value(params[0]) - exact[0].detach()).norm() / moved
    assert error < 0.02, f"{way}: {float(error):.3f} of the way is lost"


def adamw(params: list[torch.Tensor]) -> Any:
    return torch.optim.AdamW(params, lr=1e-4)


def adafactor(params: list[torch.Tensor]) -> Any:
    return torch.optim.Adafactor(params, lr=1e-4, eps=(1e-7, 1e-3))


WAYS = ((adamw, "compile"), (adafactor, "compile"), (adamw, "load"), (adamw, "string"))


def outcome(ways: int) -> tuple[str, str]:
    """Return what becomes of the first so many ways, and what was said, in which of them."""
    from collage_fx.errors import CollageError, CollageWarning

    start, way = torch.linspace(-2, 2, 40).reshape(8, 5).bfloat16(), "import"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            from interpreter import without_compiler

            for make, way in WAYS[:ways]:
                torch.compiler.reset()
                with without_compiler():
                    train(make, way, start)
        except CollageError as error:
            return "refused", f"{way}: {error}"
        except AssertionError as error:
            return "wrong", str(error)
        except BaseException as error:
            return "raw error", "".join(traceback.format_exception(error))[-1500:]
    said = [str(w.message) for w in caught if issubclass(w.category, CollageWarning)]
    return ("warned", said[0]) if said else ("right", "")


def hide(name: str, *, changed: bool) -> None:
    """Have torch lack a name, as far as collage_fx sees, or have something else there."""
    from collage_fx.runtime import torch_private

    find = torch_private.find

    other = functools.partial(len, no_such_argument=1)  # a TypeError, from no frame of its own
    if changed:
        torch_private.untested_warning = lambda version: f"torch {version} was never tested"

    def found(wanted: str) -> Any:
        original = find(wanted)
        if wanted != name:
            return original
        is_function = callable(original) and not isinstance(original, type)
        return other if changed and is_function else torch_private._Missing(name, (Exception,), {})

    torch_private.find = found
    vars(torch_private).pop(name, None)  # torch has had the names for its logs asked for


def child(name: str, ways: int, *, changed: bool) -> bool:
    """Hide a name, and print what becomes of it; return whether that is as it should be."""
    hide(name, changed=changed)
    kind, text = outcome(ways)
    print(json.dumps({"name": name, "outcome": kind, "said": text}), flush=True)
    return kind in ("right", "warned", "refused")


def main() -> None:
    """Try names, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--changed", action="store_true", help="have functions of other signatures")
    parser.add_argument("--ways", type=int, default=len(WAYS), help="how many are tried")
    parser.add_argument("names", nargs="*")
    given = parser.parse_args()
    importlib.import_module("torch._inductor.compile_fx")  # once, before the forks
    from collage_fx.runtime.torch_private import NAMES

    all_right = True
    for name in given.names or [NOBODY, *NAMES]:
        sys.stdout.flush()
        process = os.fork()
        if not process:
            right = False
            try:
                right = child(name, given.ways, changed=given.changed)
            finally:
                os._exit(not right)
        all_right &= os.waitpid(process, 0)[1] == 0
    sys.exit(not all_right)


if __name__ == "__main__":
    main()
