"""Runs the tests of optimizer packages twice: as they are, and with every step compiled.

    make suites        make suites ONLY=optimi        make suites ARGS="--steps kernels"

Sources are the sdists that requirements-suites.txt names, in build/suites. pytorch_optimizer, timm,
torch-optimizer and schedulefree ship their tests; timm's test_optim.py is torch's test_optim, as it
keeps that for its own optimizers. torch's wheel has none of its tests of optimizers, and the sdist
of torch-optimi none at all: what these are about is written anew in suite_torch.py, over the same
configurations (`optim_db`) that test_optim_db.py takes for numbers, and in suite_optimi.py.

A test that passes as it is has to pass compiled (suite_plugin.py), but for those of EXPECTED. It
exits with 1 if one does not, or if nothing was compiled.
"""

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build/suites"
PINNED = ROOT / "requirements-suites.txt"
OWN = "tests/support"

Outcomes = Mapping[str, Mapping[str, Any]]
"""Test -> its outcome, what it counted and its error, as suite_plugin.py writes them."""


class Suite(NamedTuple):
    """Tests of one project."""

    tests: str
    """Path within the first source, or within the repository where that begins with OWN."""
    sources: tuple[str, ...] = ()
    """Packages of requirements-suites.txt that it imports."""
    replaced: tuple[tuple[str, str], ...] = ()
    """Files of the first source that import what is not there, and what is written over them."""
    mended: tuple[tuple[str, str, str], ...] = ()
    """Files of the first source, what fails in them as it is, and what takes its place."""


WITHOUT_MODELS = (("timm/__init__.py", ""), ("timm/models/__init__.py", "group_parameters = None"))
"""timm without its models, which need torchvision; its optimizers import that one function."""
LOADED = "optimizer_c.load_state_dict(%s)"
WITH_COPIES = (
    ("tests/test_optimizer.py", LOADED % "state_dict_c", LOADED % "deepcopy(state_dict_c)"),
)
"""Tensors that are loaded are those that are stepped, in the torch of today: the test wants them as
they were."""
SUITES = {
    "torch": Suite(f"{OWN}/suite_torch.py"),
    "optimi": Suite(f"{OWN}/suite_optimi.py", ("torch-optimi",)),
    "schedulefree": Suite("schedulefree/test_schedulefree.py", ("schedulefree",)),
    "torch-optimizer": Suite("tests", ("torch-optimizer", "pytorch-ranger"), mended=WITH_COPIES),
    "timm": Suite("tests/test_optim.py", ("timm",), WITHOUT_MODELS),
    "pytorch_optimizer": Suite("tests", ("pytorch_optimizer",)),
}
EXPECTED: dict[str, str] = {
    "pytorch_optimizer::*::test_adan_low_precision_decay": "it wants the roundings of plain bf16",
    "pytorch_optimizer::*::test_training[[]spectralsphere*-torch.bfloat16-*": "it wants the path "
    "of a chaotic iteration in bf16; fp32 without its own roundings to bf16 goes ours",
    "pytorch_optimizer::*::test_sharded_updates[[]*-gram_newton_schulz]": "eager PyTorch rounds a "
    "number that a 16-bit tensor is increased by on a CPU; no compiled step does",
    "timm::*::test_optimizer_copy*": "it compares the last bits of compiled steps with those of a "
    "copy, which is plain",
    "timm::*::test_optim_factory*": "it compares the attributes of an optimizer with those of its "
    "copy, which has no compiled step",
    "pytorch_optimizer::*::test_create_compiled_optimizer*": "it counts graphs that torch.compile "
    "makes of the step, which is compiled already",
}
"""Pattern of suite and test -> why it fails compiled, and is right to."""


class Comparison(NamedTuple):
    """Two runs of one suite."""

    tests: int
    passing: list[str]
    """Tests that pass as they are."""
    failing: dict[str, str]
    """Tests that pass as they are and do not compiled -> what they say then."""
    expected: dict[str, str]
    """The same of tests that are expected to -> why."""
    counts: dict[str, int]
    """Optimizers and steps that were compiled."""

    @property
    def good(self) -> bool:
        """True if something was compiled, and nothing fails for it."""
        return not self.failing and self.counts.get("steps", 0) > 0


def compare(name: str, plain: Outcomes, compiled: Outcomes) -> Comparison:
    """Compare the outcomes of a suite's tests as they are and compiled."""
    passing = [test for test, one in plain.items() if one["outcome"] == "passed"]
    failing, expected, counts = {}, {}, dict[str, int]()
    for one in compiled.values():
        for what, n in one["counts"].items():
            counts[what] = counts.get(what, 0) + n
    for test in passing:
        other = compiled.get(test, {"outcome": "missing", "error": "it was not run"})
        if other["outcome"] == "passed":
            continue
        why = [w for p, w in EXPECTED.items() if fnmatchcase(f"{name}::{test}", p)]
        if why:
            expected[test] = why[0]
        else:
            failing[test] = f"{other['outcome']}: {other['error']}"
    return Comparison(len(plain), passing, failing, expected, counts)


def lines_of(name: str, found: Comparison) -> Iterator[str]:
    """Yield what there is to say of a suite."""
    counts = found.counts
    yield (
        f"{name}: {found.tests} tests, {len(found.passing)} pass as they are, "
        f"{len(found.failing)} of them fail compiled, {len(found.expected)} are expected to; "
        f"{counts.get('optimizers', 0)} optimizers compiled, {counts.get('steps', 0)} steps"
    )
    if not counts.get("steps"):
        yield "  nothing was compiled: the plugin did nothing"
    for test, why in found.expected.items():
        yield f"  expected: {test}: {why}"
    for test, error in found.failing.items():
        yield f"  fails compiled: {test}: {' '.join(error.split())}"


def fetched(package: str) -> Path:
    """Return the folder with the source of a package, taken out of its sdist if need be."""
    (pin,) = (w for w in PINNED.read_text().splitlines() if w.startswith(f"{package}=="))
    folder = BUILD / pin.replace("==", "-")
    if folder.exists():
        return folder
    BUILD.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BUILD) as part:
        pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps")
        subprocess.run((*pip, "--no-binary", package, pin), cwd=part, check=True)
        (archive,) = Path(part).glob("*.tar.gz")
        with tarfile.open(archive) as tar:
            tar.extractall(part, filter="data")
        (source,) = (p for p in Path(part).iterdir() if p.is_dir())
        source.rename(folder)
    return folder


def prepare(suite: Suite, source: Path) -> None:
    """Write into the first source of a suite what has to be other than in its sdist."""
    for file, text in suite.replaced:
        (source / file).write_text(text)
    for file, old, new in suite.mended:
        text = (source / file).read_text()
        if new not in text:
            if old not in text:
                raise ValueError(f"{file} has no {old}")
            (source / file).write_text(text.replace(old, new))


def run(tests: Path, at: Path, paths: list[Path], arguments: list[str]) -> Outcomes:
    """Run the tests of a suite in a process of its own, and return what came of each.

    Args:
        tests: file or folder with the tests.
        at: folder to run them in.
        paths: where modules are looked for.
        arguments: of pytest and suite_plugin.py.
    """
    with tempfile.TemporaryDirectory() as folder:
        outcomes = Path(folder) / "outcomes.json"
        given = [*paths, ROOT / OWN, ROOT]
        surroundings = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(map(str, given)),
            "TORCH_DEVICE": "cpu",  # timm's tests ask for it
            "TORCHINDUCTOR_VEC_ISA_OK": "1",  # as in tests/conftest.py, as the next one
            "TORCH_DYNAMO_RUN_GC_AFTER_COMPILE": "0",
        }
        without = ("logging", "cacheprovider", "hypothesispytest")
        command = [sys.executable, "-m", "pytest", str(tests), "--quiet", "-W", "ignore"]
        command += ["--override-ini", "addopts=", "--rootdir", str(at), "-p", "suite_plugin"]
        command += [word for plugin in without for word in ("-p", f"no:{plugin}")]
        if tests.is_relative_to(ROOT / OWN):
            command.append("--noconftest")
        command += ["--outcomes", str(outcomes), *arguments]
        done = subprocess.run(command, cwd=at, env=surroundings, capture_output=True, text=True)
        if done.returncode > 1:  # of 0 and 1 all tests were run
            raise RuntimeError(f"pytest ended early:\n{(done.stdout + done.stderr)[-3000:]}")
        found: Outcomes = json.loads(outcomes.read_text())
        return found


def compared(name: str, steps: str, arguments: list[str]) -> Comparison:
    """Run a suite as it is, and compiled."""
    suite = SUITES[name]
    paths = [fetched(package) for package in suite.sources]
    if paths:
        prepare(suite, paths[0])
    own = suite.tests.startswith(OWN)
    tests = (ROOT if own else paths[0]) / suite.tests
    at = ROOT if own else paths[0]
    plain, compiled = (
        run(tests, at, paths, ["--steps", way, *arguments]) for way in told(name, "plain", steps)
    )
    return compare(name, plain, compiled)


def told(name: str, *ways: str) -> Iterator[str]:
    """Yield the ways of running a suite, and say on stderr which one is under way."""
    for way in ways:
        print(f"{time.strftime('%H:%M')} {name}, steps {way}", file=sys.stderr, flush=True)
        yield way


def main() -> None:
    """Run suites, and say of each what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", choices=SUITES, help="one suite")
    parser.add_argument("--steps", choices=("interpreted", "kernels"), default="interpreted")
    parser.add_argument("--jobs", default="2", help="how many processes")
    parser.add_argument("--options", default="{}", help="of collage_fx.compile_, in JSON")
    parser.add_argument("--tests", default="", help="those whose names match, as pytest's -k")
    given = parser.parse_args()
    arguments = ["-n", given.jobs, "--dist", "worksteal", "--step-options", given.options]
    good = True
    for name in [given.only] if given.only else SUITES:
        found = compared(name, given.steps, [*arguments, "-k", given.tests])
        print(*lines_of(name, found), sep="\n", flush=True)
        good &= found.good
    raise SystemExit(not good)


if __name__ == "__main__":
    main()
