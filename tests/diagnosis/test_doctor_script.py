"""collage_fx/diagnosis/script: `python -m collage_fx doctor`, of scripts of all kinds.

For diagnosis.script and __main__.
"""

import json
import sys
from pathlib import Path

import pytest
from processes import run_script

from collage_fx.__main__ import main

TRAIN = """
import sys
import torch

torch.manual_seed(0)
dtype = torch.float32 if "wide" in sys.argv else torch.bfloat16
model = torch.nn.Linear(8, 8).to(dtype)

def train(optimizer):
    for step in range(5):
        optimizer.zero_grad()
        model(torch.ones(4, 8, dtype=dtype)).float().square().mean().backward()
        optimizer.step()
        if step == 3 and "crash" in sys.argv:
            raise ValueError("no more data")
        if step == 3 and "stop" in sys.argv:
            raise KeyboardInterrupt

if "nothing" not in sys.argv:
    train(torch.optim.AdamW(model.parameters(), lr=1e-6))
if "both" in sys.argv:
    train(torch.optim.SGD(model.parameters(), lr=1e-6))
print("trained", sys.argv[1:], float(model.weight.detach().sum()))
if "exit" in sys.argv:
    sys.exit(3)
if "leave" in sys.argv:
    sys.exit()
if "say" in sys.argv:
    sys.exit("it did not work")
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    place = tmp_path / "train.py"
    place.write_text(TRAIN)
    return place


@pytest.mark.parametrize(
    ("arguments", "status", "said", "error"),
    [
        ([], 1, "parameters lose more than 5%", ""),
        (["wide"], 0, "Nothing is lost here: the weights are float32.", ""),
        (["nothing"], 2, "No step of an optimizer was seen.", ""),
        (["leave"], 1, "4 of 5 steps looked at", ""),
        (["both"], 1, "AdamW (2 in bfloat16), 4 of 5 steps looked at; SGD (2 in", ""),
        (["crash"], 2, "4 of 4 steps looked at", 'raise ValueError("no more data")'),
        (["stop"], 1, "4 of 4 steps looked at", "was interrupted"),
        (["exit"], 2, "parameters lose", "train.py ended with status 3"),
        (["say"], 2, "parameters lose", "it did not work"),
    ],
    ids=lambda given: given[0] if isinstance(given, list) and given else None,
)
def test_a_script_is_run_and_judged(
    arguments: list[str],
    status: int,
    said: str,
    error: str,
    script: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = list(sys.argv), list(sys.path)
    assert main(["doctor", str(script), *arguments]) == status
    assert before == (sys.argv, sys.path)
    out, err = capsys.readouterr()
    if "crash" not in arguments and "stop" not in arguments:
        assert out.startswith(f"trained {arguments}")  # what it prints itself comes first
    assert said in out and error in err
    assert "runpy" not in err and ("Traceback" in err) == ("crash" in arguments)
    assert len(out.splitlines()) <= 32


def test_the_finding_is_written_to_files(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["doctor", "--json", "found.json", "--html", "found.html", str(script)]
    assert main(arguments) == 1
    found = json.loads(Path("found.json").read_text())
    assert found["status"] == "losing" and found["seen"][0]["steps"] == 5
    assert "<table>" in Path("found.html").read_text()
    assert main(["doctor", "--json", "no/where.json", str(script)]) == 2
    assert "no/where.json cannot be written" in capsys.readouterr().err
    assert main(["doctor", "absent.py"]) == 2
    assert "absent.py is no file" in capsys.readouterr().err


def test_a_script_with_a_syntax_error_shows_it(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.write_text("def f(:")
    assert main(["doctor", str(script)]) == 2
    assert "SyntaxError" in capsys.readouterr().err


@pytest.mark.slow
def test_weights_are_those_of_the_script_alone_and_one_process_tells(script: Path) -> None:
    alone = run_script(f"import sys; sys.argv = ['train.py']\n{TRAIN}")
    line = "import sys; from collage_fx.__main__ import main; sys.exit(main(['doctor', {!r}]))"
    looked = run_script(line.format(str(script)))
    assert looked.returncode == 1 and looked.stdout.startswith(alone.stdout)
    assert not looked.stderr
    text = TRAIN.replace("import torch\n", "import torch\nimport collage_fx\n", 1)
    script.write_text(
        text.replace(
            "train(torch.optim.AdamW", "train(collage_fx.compile_(torch.optim.AdamW"
        ).replace("lr=1e-6))", "lr=1e-6)))", 1)
    )
    ours = run_script(line.format(str(script)))  # in which threads of Inductor do not end
    assert ours.returncode == 2 and "or collage_fx" in ours.stdout
    script.write_text(TRAIN)
    other = run_script("import os; os.environ['RANK'] = '1'\n" + line.format(str(script)))
    assert other.returncode == 1 and other.stdout == alone.stdout
