"""The versions of torch that were tested: one list, and all that names them agrees with it.

For runtime.torch_versions.
"""

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from processes import run_script
from tensors import bf16, with_grads

import collage_fx
from collage_fx.errors import CollageWarning
from collage_fx.runtime import torch_versions
from collage_fx.runtime.torch_versions import TESTED, minor, untested_warning, warn_if_untested

ROOT = Path(__file__).parents[2]


@pytest.fixture
def _first_use() -> Iterator[None]:
    warn_if_untested.cache_clear()
    yield
    warn_if_untested.cache_clear()


def test_no_other_place_names_the_versions() -> None:
    known = [minor(v) for v in TESTED]
    assert known == sorted(set(known))
    package = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (wanted,) = (d for d in package if d.startswith("torch"))
    assert wanted == f"torch>={known[0][0]}.{known[0][1]}"  # and no upper bound
    (pinned,) = re.findall(r"^torch==(.*)$", (ROOT / "requirements.txt").read_text(), re.M)
    assert pinned in TESTED
    (pinned,) = re.findall(r"^torch==(.*)$", (ROOT / "requirements-torch.txt").read_text(), re.M)
    assert pinned == "${VERSION}"


def test_readme_names_them() -> None:
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"tested with torch {', '.join(TESTED[:-1])} and {TESTED[-1]}" in readme
    assert f"`torch>={'.'.join(map(str, minor(TESTED[0])))}`" in readme


def test_the_file_runs_where_there_is_no_torch() -> None:
    file = ROOT / "runtime" / "torch_versions.py"
    code = "import runpy, sys; sys.modules['torch'] = None\n"
    code += f"runpy.run_path({str(file)!r}, {{}}, '__main__')"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == list(TESTED)


@pytest.mark.parametrize("version", ["2.12.0", ""])
def test_no_environment_is_made_for_a_version_that_was_not_tested(version: str) -> None:
    command = ["make", "test-torch", f"VERSION={version}", f"PYTHON={sys.executable}"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode and "is none of the versions that were tested" in found.stdout
    assert all(v in found.stdout for v in TESTED)
    assert not (ROOT / "build" / f"torch-{version}").exists()


@pytest.mark.parametrize("version", [*TESTED, "2.13.1+cpu", "2.15.0a0+git1234567", "2.14.9"])
def test_a_release_of_a_tested_minor_is_as_good(version: str) -> None:
    assert not untested_warning(version)


@pytest.mark.parametrize(
    ("version", "rank"),
    [("2.10.1", "older"), ("2.12.0", "between"), ("2.16.0+cu130", "newer"), ("3.0.0", "newer")],
)
def test_any_other_is_named_beside_those_that_were_tested(version: str, rank: str) -> None:
    message = untested_warning(version)
    assert f"torch {version} was never tested" in message and rank in message
    assert all(v in message for v in TESTED)


@pytest.mark.usefixtures("_first_use")
def test_an_untested_torch_is_named_once_at_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.99.1")
    with pytest.warns(CollageWarning, match=r"torch 2\.99\.1 was never tested") as caught:
        for _ in range(2):
            (p,) = with_grads([bf16(4)])
            collage_fx.compile(torch.optim.SGD([p]))
            torch.compile(torch.optim.SGD([p]).step, backend="collage")()
    assert sum("never tested" in str(w.message) for w in caught) == 1
    assert caught[0].filename == __file__


@pytest.mark.slow
def test_the_backend_string_warns_too_and_an_import_does_not() -> None:
    code = (
        f"import sys; sys.path.append({str(Path(__file__).parents[1] / 'support')!r})\n"
        "import torch, warnings; torch.__version__ = '2.99.1'\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    import collage_fx, collage_fx.dynamo.backend\n"
        "assert not any('never tested' in str(w.message) for w in caught)\n"
        "p = torch.nn.Parameter(torch.ones(4).bfloat16()); p.grad = p.detach().clone()\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    from interpreter import without_compiler\n"
        "    with without_compiler():\n"
        "        torch.compile(torch.optim.SGD([p]).step, backend='collage')()\n"
        "print(sum('2.99.1 was never tested' in str(w.message) for w in caught))\n"
    )
    found = run_script(code)
    assert found.stdout.split() == ["1"], found.stderr


@pytest.mark.usefixtures("_first_use")
def test_the_torch_of_this_environment_is_tested(recwarn: pytest.WarningsRecorder) -> None:
    torch_versions.warn_if_untested()
    assert not recwarn.list
