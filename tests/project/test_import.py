"""Importing collage_fx costs nothing and changes nothing; what is in it is found all the same.

For collage_fx.
"""

import ast
import inspect
from pathlib import Path

import pytest
from processes import run_script

import collage_fx

IMPORT = """
import sys, time, torch
before = set(sys.modules)
start = time.perf_counter()
import collage_fx
took = time.perf_counter() - start
print(took, len(set(sys.modules) - before))
"""

STATE = """
import builtins, importlib.metadata, math, sys, torch
from torch.optim import Optimizer, optimizer

def state():
    hooks = optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks
    places = torch, math, builtins, torch.Tensor, Optimizer, torch.optim.AdamW, torch.nn.Module
    stance = torch._dynamo.eval_frame._callback_from_stance
    return [*map(len, hooks), stance, sys.excepthook, *({**vars(p)} for p in places)]

before = state()
import collage_fx
assert state() == before, "the import changed something"
assert {"compile", "value", "explain"} <= set(dir(collage_fx))
assert "collage" in torch._dynamo.list_backends() and "collage_fx.dynamo.backend" not in sys.modules
collage_fx.CollageWarning, collage_fx.value(torch.ones(2)), collage_fx.report, collage_fx.explain
sgd = torch.optim.SGD([torch.ones(2)])
collage_fx.compile(lambda p: p.mul_(2))
assert state()[:2] == [0, 0], "there are hooks, and nobody has asked for the backend"
torch.compile(sgd.step, backend="collage")
assert state()[:2] == [1, 0], "no step is watched"
torch.compile(sgd.step, backend=sys.modules["collage_fx.api"].collage)
assert state()[:2] == [1, 0], "steps are watched twice"
"""


def run(script: str) -> str:
    done = run_script(script)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_takes_a_fifth_of_a_second_at_most() -> None:
    found = [run(IMPORT).split() for _ in range(3)]
    assert min(float(took) for took, _ in found) <= 0.2
    assert {int(modules) for _, modules in found} <= {0, 1, 2}


def test_nothing_is_patched_and_no_step_is_watched_before_the_backend_is_used() -> None:
    run(STATE)


def test_every_public_name_is_found_and_is_what_its_module_has() -> None:
    for name in collage_fx.__all__:
        found = getattr(collage_fx, name)
        assert not inspect.ismodule(found) and vars(collage_fx)[name] is found
        assert found.__name__ == name
    assert sorted(collage_fx._HOME) == sorted(collage_fx.__all__)
    with pytest.raises(AttributeError, match="comple"):
        collage_fx.comple  # noqa: B018
    assert not hasattr(collage_fx, "__path_that_is_none__")
    assert dir(collage_fx) == sorted(collage_fx.__all__) and collage_fx.__version__


def test_type_checkers_are_told_the_same_names() -> None:
    source = ast.parse(Path(collage_fx.__file__).read_text())
    (told,) = (node for node in source.body if isinstance(node, ast.If) and not _negated(node))
    imports = [node for node in told.body if isinstance(node, ast.ImportFrom)]
    names = {f"{node.module}": {a.name for a in node.names} for node in imports}
    homes = collage_fx._HOMES.items()
    assert names == {f"collage_fx.{module}": set(names) for module, names in homes}


def _negated(node: ast.If) -> bool:
    return isinstance(node.test, ast.UnaryOp)
