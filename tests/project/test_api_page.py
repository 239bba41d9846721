"""Every public name is in docs/api.md, with its arguments and errors, and an example that runs.

For collage_fx, errors and docs/api.md.
"""

import doctest
import importlib
import inspect
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import collage_fx
from collage_fx import errors, optim

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "api.md").read_text()
BEFORE = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)[0]
SHOWN = re.findall(r"^::: ([\w.]+)$", PAGE, re.M)
NAMES = sorted(collage_fx.__all__)
CLASSES = sorted(set(optim.__all__) - {"compensated"})
NEEDED = {
    "compile_callback": "transformers",
    "lightning_callback": "lightning",
    "trainer_callback": "transformers",
    "whole_weights_callback": "transformers",
}
"""Name -> the package that its example uses."""
PASSED_ON = {
    *("CollageConfig", "Finding", "Explanation"),  # their fields say it
    *("Doctor", "GradientRecorder", "Monitor"),  # which functions make
    *("CollageError", "CollageWarning"),
}
"""Classes whose arguments are no part of what is public."""
UNSEEN = {
    "CaptureError": "needs a GPU",
    "ComponentError": "a defect",
    "LegalityError": "a defect",
    "RuleError": "a defect",
    "ScriptError": "of the command line",
    "TorchVersionError": "needs another torch",
}
"""Errors that no example can show, and why."""


def run(text: str, before: str = BEFORE, **known: Any) -> str:
    """Run the examples of a docstring; return what is wrong with them, if they have any."""
    module = types.ModuleType("example")
    exec(compile(before, "api.md", "exec"), module.__dict__)
    vars(module).update(known)
    test = doctest.DocTestParser().get_doctest(text, vars(module), "example", None, 0)
    if not test.examples:
        return "no example"
    said: list[str] = []
    flags = doctest.IGNORE_EXCEPTION_DETAIL  # modules, and long texts
    runner = doctest.DocTestRunner(verbose=False, optionflags=flags)
    sys.modules["example"] = module  # Dynamo of torch 2.11 imports it
    runner.run(test, out=said.append, clear_globs=False)
    return "".join(said)


def unexplained(found: Any) -> list[str]:
    """Return the arguments of a public name that its docstring leaves out.

    Options are explained once, by CollageConfig.
    """
    text = inspect.getdoc(found) or ""
    wanted = set(inspect.signature(found).parameters)
    if "options" in wanted:
        wanted -= inspect.signature(collage_fx.CollageConfig).parameters.keys()
    return [n for n in wanted if not re.search(rf"^    \**{n}: ", text, re.M)]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Examples write files."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.quick("*[!k]")  # all but the callbacks, for which others are imported
def test_its_example_runs(name: str) -> None:
    known = {}
    if needed := NEEDED.get(name):
        pytest.importorskip(needed)
        known = {needed: importlib.import_module(needed)}
    assert not run(inspect.getdoc(getattr(collage_fx, name)) or "", **known)


@pytest.mark.parametrize("name", CLASSES)
def test_an_optimizer_of_each_class_is_made(name: str) -> None:
    own = (inspect.getdoc(getattr(optim, name)) or "").partition("The original:")[0]
    assert not run(own)


@pytest.mark.parametrize("name", NAMES)
def test_its_arguments_are_explained(name: str) -> None:
    found = getattr(collage_fx, name)
    if name not in PASSED_ON:
        assert not unexplained(found)


def test_every_public_name_is_on_the_page() -> None:
    own = {f"collage_fx.{name}" for name in NAMES}
    kinds = {f"collage_fx.errors.{n}" for n in errors.__all__ if n not in collage_fx.__all__}
    assert sorted(SHOWN) == sorted(own | kinds)
    assert set(CLASSES) <= set(re.findall(r"`(\w+)`", PAGE))


@pytest.mark.parametrize("name", errors.__all__)
def test_an_error_says_its_cause(name: str) -> None:
    found = getattr(errors, name)
    assert issubclass(found, errors.CollageError | errors.CollageWarning)
    assert "__doc__" in vars(found) and found.__doc__
    said = run(inspect.getdoc(found) or "")
    assert said == ("no example" if name in UNSEEN else "")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("Text alone.", "no example"),
        (">>> 1 + 1\n3", "Got:\n    2"),
        (">>> collage_fx.compiles(optimizer)", "AttributeError"),
    ],
)
def test_a_fault_is_found(text: str, fault: str) -> None:
    assert fault in run(text)


def test_an_argument_that_is_left_out_is_found() -> None:
    def added(first: int, second: int) -> None:
        """Do something.

        Args:
            first: a number.
        """

    assert unexplained(added) == ["second"]
