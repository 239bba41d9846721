"""The monitor in Hugging Face's Trainer and in Lightning, on the models of the examples.

For callbacks.
"""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

import collage_fx

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
def test_a_trainer_logs_what_its_updates_lose(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    trainer = runpy.run_path(str(EXAMPLES / "hf_trainer.py"))["trainer"](str(tmp_path))
    trainer.add_callback(collage_fx.trainer_callback(every=5))
    trainer.train()
    key = "collage/parameter/lost"
    logged = [row for row in trainer.state.log_history if key in row]
    assert [row["step"] for row in logged] == [5, 10, 15, 20]
    assert all(row[key] <= row["collage/parameter/lost_plain"] for row in logged)
    assert sum(row["collage/parameter/lost_plain"] for row in logged) > 0.01, "it is measured"
    assert any(name.startswith("collage/layer/transformer.h.0.attn") for name in logged[0])


def counted(example: dict[str, Any], folder: Path) -> int:
    """Return the number of graphs that Dynamo makes for four epochs of an example."""
    torch.compiler.reset()
    stats = torch._dynamo.utils.counters["stats"]
    before = stats["unique_graphs"]
    example["fit"](str(folder), 4)
    return int(stats["unique_graphs"] - before)


@pytest.mark.slow
def test_lightning_logs_what_its_updates_lose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lightning = pytest.importorskip("lightning", reason="lightning is not installed")
    example = runpy.run_path(str(EXAMPLES / "lightning_module.py"))
    found: list[tuple[dict[str, float], int]] = []
    real = lightning.Trainer

    def watched(**options: Any) -> Any:
        to = lambda scalars, step: found.append((scalars, step))  # noqa: E731
        return real(**options, callbacks=[collage_fx.lightning_callback(every=4, to=to)])

    monkeypatch.setattr(lightning, "Trainer", watched)
    counted(example, tmp_path)  # the first run of a process makes graphs that no later one does
    found.clear()
    graphs = [counted(example, tmp_path)]
    assert [step for _, step in found] == [4, 8, 12, 16]
    assert all(scalars["collage/parameter/lost"] < 0.1 for scalars, _ in found)
    monkeypatch.undo()
    graphs.append(counted(example, tmp_path))
    assert graphs[0] == graphs[1], "measured steps run the graphs that others run"
