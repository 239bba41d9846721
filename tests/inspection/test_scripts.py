"""`python -m collage_fx explain`, of scripts and of files. For inspection.scripts and __main__."""

import sys
from pathlib import Path
from typing import Any

import pages
import pytest
import torch

from collage_fx.__main__ import main

TRAIN = """
import sys
import torch
import collage_fx

def train(optimizer, step):
    for _ in range(3):
        optimizer.zero_grad()
        for p in optimizer.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)
        step()

def weights():
    return [torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))]

plain = torch.optim.SGD(weights(), lr=0.1)
train(plain, plain.step)
if "compiled" in sys.argv:
    other = torch.optim.AdamW(weights())
    train(other, collage_fx.compile(other))
if "fails" in sys.argv:
    raise ValueError("no data")
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    place = tmp_path / "train.py"
    place.write_text(TRAIN)
    return place


def test_a_script(script: Path, capsys: Any) -> None:
    before = torch.optim.Optimizer.__init__, torch.optim.Optimizer.zero_grad, list(sys.argv)
    assert main(["explain", str(script)]) == 0
    assert "step.html: SGD, 1 of 1 states compensated" in capsys.readouterr().out
    assert "2 steps" in Path("step.html").read_text().split('id="errors"')[1]
    assert main(["explain", "--out", "other.html", "--last", "0", str(script), "compiled"]) == 0
    assert "other.html: AdamW, 2 of 4 states compensated" in capsys.readouterr().out
    assert "Not measured" in Path("other.html").read_text()
    after = torch.optim.Optimizer.__init__, torch.optim.Optimizer.zero_grad, list(sys.argv)
    assert after == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.py"], "missing.py is no file"),
        (["train.py", "fails"], "train.py failed with ValueError: no data"),
        (["empty.py"], "no optimizer took a step in empty.py"),
        (["ends.py"], "ends.py ended with status 3"),
        (["--out", "no/step.html", "train.py"], "cannot be written to no/step.html"),
        (["saved.pt"], "pass --unpickle"),
        (["--unpickle", "train.py"], "train.py cannot be unpickled"),
        (["--unpickle", "state.pt"], "state.pt has no optimizer in it"),
    ],
)
def test_what_cannot_be_explained(
    script: Path, capsys: Any, arguments: list[str], message: str
) -> None:
    Path("empty.py").write_text("")
    Path("ends.py").write_text("raise SystemExit(3)")
    torch.save({}, "saved.pt")
    torch.save({"state": {}}, "state.pt")
    assert main(["explain", *arguments]) == 1
    assert message in capsys.readouterr().err
    assert not Path("step.html").exists()


def test_a_pickled_optimizer(script: Path, capsys: Any) -> None:
    torch.save({"step": 3, "optimizers": [pages.optimizer(2)]}, "saved.pt")
    assert main(["explain", "--unpickle", "--text", "saved.pt"]) == 0
    out = capsys.readouterr().out
    assert "2 x exp_avg_sq" in out
    assert "step.html: AdamW, 4 of 8 states compensated" in out
