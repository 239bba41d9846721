"""runtime/torch_private.py names all that is used of torch's private parts, and nothing else.

For runtime.torch_private.
"""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

import collage_fx
from collage_fx import api
from collage_fx.errors import CollageError, TorchVersionError
from collage_fx.hooks import optimizer_hooks
from collage_fx.record import steps
from collage_fx.runtime import torch_private
from collage_fx.runtime.torch_private import NAMES
from collage_fx.runtime.torch_versions import TESTED

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "runtime" / "torch_private.py"
LOOKED_UP = {"_stance"}
"""An attribute of a module of the table, which is read there."""


def trees() -> Iterator[tuple[Path, ast.Module]]:
    for layer in ("collage_fx", "passes", "runtime"):
        for path in sorted((ROOT / layer).rglob("*.py")):
            if path != TABLE:
                yield path, ast.parse(path.read_text())


def named(tree: ast.AST) -> Iterator[str]:
    """Yield the dotted names that a tree imports, and those that it reads of torch."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield ast.unparse(node)


def is_private(name: str) -> bool:
    """Return True if a dotted name is one of torch's private parts; operators of ATen are none."""
    first, *rest = name.split(".")
    private = any(part.startswith("_") and not part.startswith("__") for part in rest)
    return first == "torch" and private and not name.startswith("torch.ops.aten.")


def test_no_other_module_has_a_private_name_of_torch() -> None:
    found = [(str(p), n) for p, tree in trees() for n in named(tree) if is_private(n)]
    assert not found
    assert any(map(is_private, named(ast.parse(TABLE.read_text())))), "the check sees none at all"


def test_each_name_of_the_table_is_used() -> None:
    prefix = "collage_fx.runtime.torch_private."
    used = {n.removeprefix(prefix) for _, tree in trees() for n in named(tree) if prefix in n}
    assert set(NAMES) - used == LOOKED_UP


def test_type_checkers_are_told_of_the_same_names() -> None:
    tree = ast.parse(TABLE.read_text())
    (block,) = (n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test)[0] == "T")
    told = {}
    for node in block.body:
        if isinstance(node, ast.ImportFrom):
            told |= {a.asname or a.name: f"{node.module}:{a.name}" for a in node.names}
        else:
            assert isinstance(node, ast.AnnAssign)
            told[ast.unparse(node.target)] = NAMES[ast.unparse(node.target)].where
    assert told == {n: one.where for n, one in NAMES.items() if n not in LOOKED_UP}


def test_a_name_that_is_not_there_is_told_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch_private.require()
    torch_private.require.cache_clear()
    gone = torch_private.Private("torch._dynamo:no_such_name", "a test", True)
    monkeypatch.setitem(NAMES, "no_such_name", gone)
    with pytest.raises(TorchVersionError, match=r"torch\._dynamo\.no_such_name, for a test") as e:
        torch_private.require()
    assert isinstance(e.value, CollageError)
    assert all(version in str(e.value) for version in TESTED) and "install one" in str(e.value)
    found = torch_private.find("no_such_name")
    assert torch_private.is_missing(found.any_attribute)
    with pytest.raises(TorchVersionError):
        found()


def test_an_error_of_ours_in_an_untested_torch_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of a call that a user has made wrongly stays what it is."""

    def step(**arguments: int) -> None:
        p = torch.ones(3).bfloat16().requires_grad_()
        collage_fx.compile(torch.optim.SGD([p], lr=0.1))(**arguments)

    monkeypatch.setattr(torch_private, "untested_warning", lambda version: "never tested")
    with pytest.raises(TypeError, match="unexpected keyword") as wrong:
        step(nope=1)
    assert not isinstance(wrong.value, CollageError)
    changed = partial(len, no_such_argument=1)
    monkeypatch.setattr(steps, "history_of", changed)
    with pytest.raises(TorchVersionError, match=r"TypeError: .*; never tested"):
        step()
    monkeypatch.setattr(torch_private, "untested_warning", lambda version: "")
    with pytest.raises(TypeError):
        step()


def test_so_does_one_of_a_hook_of_the_backend_string(monkeypatch: pytest.MonkeyPatch) -> None:
    p = torch.ones(3).bfloat16().requires_grad_()
    optimizer = torch.optim.SGD([p], lr=0.1)
    torch.compile(optimizer.step, backend="collage")()  # installs the hook
    monkeypatch.setattr(optimizer_hooks, "get_eval_frame_callback", partial(len, no_such_one=1))
    with pytest.raises(TypeError):
        optimizer.step()
    monkeypatch.setattr(torch_private, "untested_warning", lambda version: "never tested")
    with pytest.raises(TorchVersionError, match=r"TypeError: .*; never tested"):
        optimizer.step()


@pytest.fixture
def no_guards(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A torch that lacks a name which only steps that Dynamo traces need."""
    find, name = torch_private.find, "GuardBuilder"
    gone = torch_private._Missing(name, (Exception,), {})
    with monkeypatch.context() as patch:
        patch.setattr(torch_private, "find", lambda n: gone if n == name else find(n))
        patch.setattr(torch_private, name, gone)
        for cached in (torch_private.traces, torch_private.require):
            cached.cache_clear()
        yield
    for cached in (torch_private.traces, torch_private.require):
        cached.cache_clear()


def stepped() -> tuple[str, int]:
    """Return the report of a step, and how many graphs Dynamo has made of it."""
    counters.clear()
    p = torch.ones(3).bfloat16().requires_grad_()
    step = collage_fx.compile(torch.optim.SGD([p], lr=1e-3))
    for _ in range(3):
        p.grad = torch.ones_like(p)
        step()
    assert torch.allclose(collage_fx.value(p), torch.tensor(0.997, dtype=torch.float64), atol=1e-5)
    return str(collage_fx.report(step)), counters["stats"]["unique_graphs"]


def test_without_a_name_of_dynamo_all_steps_are_recorded(no_guards: None) -> None:
    report, graphs = stepped()
    assert "torch has no torch._dynamo.guards.GuardBuilder: without steps traced" in report
    assert "compensated: " in report and not graphs
    with pytest.raises(TorchVersionError, match=r"GuardBuilder.*records them instead"):
        _ = api.collage  # as torch.compile looks for the backend


def test_with_all_names_steps_are_traced() -> None:
    """The control."""
    report, graphs = stepped()
    assert "torch has no" not in report and graphs == 1


@pytest.mark.slow
def test_a_module_that_nobody_has_imported_is_found() -> None:
    code = (
        "from collage_fx.runtime import torch_private as t; import sys;"
        "assert 'torch._inductor.inductor_prims' not in sys.modules;"
        "assert not t.is_missing(t.inductor_prims); t.require()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def outcomes(*arguments: str) -> dict[str, str]:
    """Return what becomes of each name when it is hidden."""
    command = [sys.executable, str(ROOT / "tests/support/canary.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    wrong = [row for row in rows if row["outcome"] not in ("right", "warned", "refused")]
    assert not wrong and not done.returncode, wrong or done.stderr
    return {row["name"]: row["outcome"] for row in rows}


def test_ten_names_are_missed() -> None:
    """One of each kind; `make canary` hides all."""
    others = ["a_name_that_nobody_uses", "trace_structured", "V", "c_guards", "GuardBuilder"]
    required = ["dynamo_config", "TracingContext", "lowerings", "FakeTensorMode"]
    required += ["TorchDispatchMode"]
    found = outcomes("--ways", "1", *others, *required)
    assert found == dict.fromkeys(others, "right") | dict.fromkeys(required, "refused")


@pytest.mark.slow
def test_each_name_is_missed() -> None:
    assert set(outcomes()) == {"a_name_that_nobody_uses", *NAMES}
