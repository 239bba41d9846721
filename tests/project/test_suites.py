"""`make suites`: a test of another project that fails only with its step compiled is found.

For tests/support/suites.py, tests/support/suite_plugin.py and requirements-suites.txt.
"""

from pathlib import Path
from typing import Any

import pytest
import suites

TESTS = """
import pytest
import torch

def trained(make, **given):
    p = torch.ones(4, dtype=torch.bfloat16, requires_grad=True)
    p.grad = torch.full_like(p, 2**-10)
    optimizer = make([p], lr=1.0, **given)
    for _ in range(8):
        optimizer.step()
    return p.detach()

class Own(torch.optim.SGD):
    def __init__(self, params, lr):
        super().__init__(params, lr=lr)

def test_weights_are_finite():
    assert trained(Own).isfinite().all()

def test_small_updates_are_lost():
    assert trained(torch.optim.SGD).eq(1).all()

def test_small_updates_are_kept():
    assert trained(torch.optim.SGD, foreach=True).ne(1).all()

def test_no_step():
    with pytest.raises(ValueError):
        torch.optim.SGD([torch.ones(2)], lr=-1.0)

def test_gpu():
    assert torch.ones(2).cuda().sum() == 2

@pytest.mark.skip
def test_left_out():
    pass
"""


def outcome(result: str, steps: int = 0) -> dict[str, Any]:
    return {"outcome": result, "counts": {"steps": steps}, "error": f"it is {result}"}


def test_a_test_that_fails_compiled_alone_is_found(tmp_path: Path) -> None:
    """The control is the run as it is: the same tests, of which another one fails."""
    tests = tmp_path / "test_of_another_project.py"
    tests.write_text(TESTS)
    plain, compiled = (
        suites.run(tests, tmp_path, [], ["--steps", way]) for way in ("plain", "interpreted")
    )
    assert not any(one["counts"] for one in plain.values())
    found = suites.compare("suite", plain, compiled)
    names = {test.partition("::")[2] for test in found.passing}
    assert names == {
        "test_weights_are_finite",
        "test_small_updates_are_lost",
        "test_no_step",
        "test_gpu",
    }
    (failing,) = found.failing
    assert failing.endswith("::test_small_updates_are_lost") and not found.good
    assert found.tests == 6 and found.counts == {"optimizers": 3, "steps": 24}
    assert "1 of them fail compiled" in next(iter(suites.lines_of("suite", found)))


def test_two_runs_are_compared_test_by_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suites, "EXPECTED", {"suite::a*": "it wants what is lost"})
    plain = {"a[1]": outcome("passed"), "b": outcome("passed"), "c": outcome("failed")}
    compiled = {"a[1]": outcome("failed", 2), "b": outcome("passed", 3), "c": outcome("failed")}
    found = suites.compare("suite", plain, compiled)
    assert found.good and found.expected == {"a[1]": "it wants what is lost"}
    assert found.counts["steps"] == 5
    assert not suites.compare("other", plain, compiled).good


@pytest.mark.parametrize(
    "compiled",
    [
        {"a": outcome("failed", 1)},
        {"a": outcome("skipped", 1)},
        {"b": outcome("passed", 1)},
        {"a": outcome("passed")},
    ],
    ids=["fails", "is skipped", "is not run", "no step is compiled"],
)
def test_each_difference_is_a_fault(compiled: dict[str, Any]) -> None:
    plain = {"a": outcome("passed")}
    assert suites.compare("suite", plain, {"a": outcome("passed", 1)}).good
    found = suites.compare("suite", plain, compiled)
    assert not found.good and len(list(suites.lines_of("suite", found))) == 2


def test_a_suite_that_cannot_be_run_is_no_suite_without_tests(tmp_path: Path) -> None:
    (tmp_path / "test_broken.py").write_text("import a_module_that_nobody_has")
    with pytest.raises(RuntimeError, match="a_module_that_nobody_has"):
        suites.run(tmp_path / "test_broken.py", tmp_path, [], [])


def test_what_fails_as_it_is_is_mended_once(tmp_path: Path) -> None:
    """The control is a source in which the text is not: it is not passed over in silence."""
    file = tmp_path / "one.py"
    file.write_text("load(a) or load(a)")
    suite = suites.Suite("tests", mended=(("one.py", "load(a)", "load(copy(a))"),))
    for _ in range(2):
        suites.prepare(suite, tmp_path)
        assert file.read_text() == "load(copy(a)) or load(copy(a))"
    file.write_text("other")
    with pytest.raises(ValueError, match=r"one.py has no load\(a\)"):
        suites.prepare(suite, tmp_path)


def test_sources_are_pinned() -> None:
    lines = suites.PINNED.read_text().splitlines()
    pinned = [line.partition("==")[0] for line in lines if not line.startswith("#")]
    needed = {source for suite in suites.SUITES.values() for source in suite.sources}
    assert needed == {*pinned} and len(needed) == len(pinned)
    assert {pattern.partition("::")[0] for pattern in suites.EXPECTED} <= {*suites.SUITES}
