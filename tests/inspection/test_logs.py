"""Logs of TORCH_LOGS and TORCH_TRACE, in processes that import torch with them set.

For runtime.logs.
"""

import json
import logging
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch._logging._internal import trace_log

import collage_fx
from collage_fx.runtime import logs, torch_private
from collage_fx.runtime.torch_versions import installed

ROOT = Path(__file__).parents[2]
# Since pytorch#184919 torch reads TORCH_LOGS after the entry points by which names are registered.
NAMED = pytest.mark.skipif(installed() < (2, 13), reason="torch reads TORCH_LOGS too early")

STEPS = """
import json, sys, torch, collage_fx

def run(params, **options):
    optimizer = torch.optim.SGD(params, lr=1e-3, momentum=0.9)
    optimizer.step = collage_fx.compile(optimizer, **options)
    for p in params:
        p.grad = torch.ones_like(p)
    for _ in range(3):
        optimizer.step()
    return optimizer

optimizer = run([torch.nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16)) for _ in range(8)])
found = collage_fx.explain(optimizer)
optimizer.param_groups[0]["nesterov"] = True
optimizer.step()
run([torch.nn.Parameter(torch.ones(16, dtype=torch.bfloat16))], record=True)
texts = {k: [str(g.graph).strip() for g in getattr(found, k)] for k in ("expanded", "lowered")}
print(json.dumps({**texts, "source": str(found.before[0].graph).strip(), "kernels": found.kernels}))
"""


class Run(NamedTuple):
    stdout: str
    stderr: str
    returncode: int


def fresh(script: str, folder: Path, **settings: str) -> Run:
    """Run a script in a process that imports torch itself, with this package installed."""
    metadata = folder / "collage_fx-0.1.0.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: collage-fx\nVersion: 0.1.0\n")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [
        "\n".join([f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())])
        for group, entries in project["entry-points"].items()
    ]
    (metadata / "entry_points.txt").write_text("\n\n".join(groups))
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    env = {k: v for k, v in os.environ.items() if not k.startswith("TORCH_")}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**env, "PYTHONPATH": path, **settings},
        capture_output=True,
        text=True,
        timeout=300,
    )
    return Run(done.stdout, done.stderr, done.returncode)


class Entry(NamedTuple):
    """One artifact in a trace."""

    name: str
    frame: int | None
    stack: bool
    payload: str


def entries(folder: Path) -> list[Entry]:
    """Read what torch has written, as tlparse does: a line of JSON, then indented lines."""
    (log,) = folder.glob("dedicated_log_torch_trace_*.log")
    found: list[Entry] = []
    for line in log.read_text().split("\n"):
        if line.startswith("\t") and found:
            last = found[-1]
            text = f"{last.payload}\n{line[1:]}" if last.payload else line[1:]
            found[-1] = last._replace(payload=text)
        elif (at := line.find("] {")) >= 0:
            record: dict[str, Any] = json.loads(line[at + 2 :])
            name = record.get("artifact", {}).get("name", "")
            found.append(Entry(name, record.get("frame_id"), "stack" in record, ""))
    return [e for e in found if e.name.startswith("collage_")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def logged(folder: Path) -> Run:
    names = "collage,collage_verdicts,collage_graphs,collage_code" if installed() >= (2, 13) else ""
    settings = {"TORCH_LOGS": names} if names else {}
    done = fresh(STEPS, folder, TORCH_TRACE=str(folder / "trace"), **settings)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.slow
def test_trace_has_the_graphs_and_kernels_that_explain_shows(logged: Run, folder: Path) -> None:
    told = json.loads(logged.stdout)
    found = entries(folder / "trace")
    first = next(e.frame for e in found if e.frame is not None)
    mine = {e.name: e.payload for e in reversed(found) if e.frame == first}
    assert mine["collage_source"] == told["source"]
    for kind in ("expanded", "lowered"):
        shown = {n: text for n, text in mine.items() if n.startswith(f"collage_{kind}_class_")}
        assert shown == {f"collage_{kind}_class_{i}": t for i, t in enumerate(told[kind], 1)}
    kernels = {text for name, text in mine.items() if name.startswith("collage_kernel_")}
    assert {k for k in map(str.strip, told["kernels"]) if k} <= set(map(str.strip, kernels))
    assert "compensated" in mine["collage_verdicts"] and "collage_result" in mine
    assert not any(e.stack for e in found), "torch takes it for a mistake"


@pytest.mark.slow
def test_trace_has_recorded_segments_which_have_no_number(logged: Run, folder: Path) -> None:
    recorded = {e.name for e in entries(folder / "trace") if e.frame is None}
    assert {"collage_verdicts", "collage_expanded_class_1", "collage_result"} <= recorded


@NAMED
@pytest.mark.slow
def test_logs_have_a_line_for_each_compilation(logged: Run) -> None:
    lines = [line for line in logged.stderr.splitlines() if line.startswith("I")]
    (first, *_) = [line for line in lines if "states compensated" in line]
    assert "the step of SGD: " in first
    assert re.search(r"8 of 16 states compensated; classes of 8 members, 1 with one ke", first)
    assert re.search(r"passes \d\.\d\d s; \d+\.\d\d s$", first)
    assert any("a recorded segment of" in line for line in lines)
    assert any("traced again; TORCH_LOGS=recompiles says why" in line for line in lines), lines
    assert any(re.search(r"kernel \w{16} for cpu: ", line) for line in lines)


@NAMED
@pytest.mark.slow
def test_artifacts_are_logged_under_their_names(logged: Run) -> None:
    verdict = (
        r"\[__collage_verdicts\] param_groups\[0\].params\[0\] and 7 more: bfloat16, x' = x \+ B, "
        r"compensated: .*, storage remainder16$"
    )
    assert re.search(verdict, logged.stderr, re.MULTILINE)
    for name, text in (
        ("graphs", "lowered class 1"),
        ("graphs", "collage.round"),
        ("code", "void"),
    ):
        assert re.search(rf"\[__collage_{name}\].*{text}", logged.stderr), name


@NAMED
@pytest.mark.slow
def test_code_is_shown_where_it_is_asked_for_only(folder: Path) -> None:
    script = """
import torch
import collage_fx
from collage_fx.runtime import logs, torch_private
shown = [l.isEnabledFor(10) and l.propagate for l in logs._LOGGERS.values()]
print(shown, logs.LOG.level)
"""
    assert fresh(script, folder, TORCH_LOGS="+collage").stdout == "[True, True, False] 10\n"
    assert fresh(script, folder).stdout == "[False, False, False] 0\n"


@pytest.mark.slow
@NAMED
def test_a_name_that_is_none_is_refused_by_torch_with_ours_among_the_valid(folder: Path) -> None:
    done = fresh("import torch", folder, TORCH_LOGS="collage_verdict")
    assert done.returncode and "collage_verdicts" in done.stderr


@pytest.mark.slow
def test_the_module_is_a_name_without_the_entry_point(folder: Path) -> None:
    script = "import torch, logging; print(logging.getLogger('collage_fx').level)"
    off = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    assert fresh(script, folder, TORCH_LOGS="collage_fx", **off).stdout.split() == ["20"]
    assert fresh(script, folder, TORCH_LOGS="collage", **off).returncode, "document that it works"


class Kept(logging.Handler):
    """Has what is logged, as a list."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


def test_what_is_compiled_in_this_process_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines, artifacts and the trace, of a step that is traced and of one that is recorded."""
    shown, traced = Kept(), Kept()
    logs.register()
    monkeypatch.setattr(trace_log, "handlers", [traced])
    monkeypatch.setattr(trace_log, "level", logging.DEBUG)
    loggers = [logs.LOG, *logs._LOGGERS.values()]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(shown)
        logger.setLevel(logging.DEBUG)
    try:
        for record, count in (("auto", 8), (True, 1)):
            params = [nn.Parameter(torch.ones(4).bfloat16()) for _ in range(count)]
            step = collage_fx.compile(torch.optim.SGD(params, lr=1e-3), record=record)
            for p in params:
                p.grad = torch.ones_like(p)
            for _ in range(3):
                step()
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.removeHandler(shown)
            logger.setLevel(level)
    lines = "\n".join(r.getMessage() for r in shown.records)
    assert re.search(r"the step of SGD: 8 of 8 states compensated; classes of 8 members", lines)
    assert "a recorded segment of" in lines and "x' = x + B, compensated: " in lines
    assert re.search(r"lowered_class_1|lowered class 1", lines) and "collage.round" in lines
    metadata = [getattr(r, "metadata", {}) for r in traced.records]
    for recorded in (False, True):
        names = {
            m["artifact"]["name"]
            for m in metadata
            if "artifact" in m and ("frame_id" not in m) is recorded
        }
        assert {"collage_verdicts", "collage_expanded_class_1", "collage_result"} <= names


def test_nothing_is_written_down_that_nobody_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_log, "handlers", [])
    logs.register()
    made: list[str] = []
    logs.show(logs.GRAPHS, "source", lambda: made.append("text") or "")  # type: ignore[func-returns-value]
    assert not made
    logger = logs._LOGGERS[logs.GRAPHS]
    monkeypatch.setattr(logger, "isEnabledFor", lambda level: True)
    logs.show(logs.GRAPHS, "source", lambda: made.append("text") or "")  # type: ignore[func-returns-value]
    assert made


def test_a_torch_without_such_names_is_imported_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logs, "_LOGGERS", {})
    monkeypatch.delattr(torch._logging._internal, "register_artifact")
    monkeypatch.delitem(vars(torch_private), "register_artifact")
    logs.register()
    assert not logs._LOGGERS
