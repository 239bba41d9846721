"""Callbacks of Hugging Face's Trainer, with a model of two tensors. For callbacks."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import collage_fx
from collage_fx.errors import CheckpointError, CollageWarning, OptionError

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
KEY = "collage/parameter/lost"


@pytest.fixture(autouse=True)
def _eager() -> Iterator[None]:
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


class Line(nn.Linear):
    """A model as the Trainer wants one."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(4, 4)
        self.bfloat16()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:  # type: ignore[override]
        found = super().forward(x.bfloat16())
        return {"loss": (found - 1).square().mean(), "logits": found}


class Reporter(transformers.TrainerCallback):  # type: ignore[name-defined, misc]
    """Stands for TensorBoard and the like: takes numbers and texts."""

    def __init__(self) -> None:
        self.logs: list[tuple[int, dict[str, Any]]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        assert "model" in kwargs and all(isinstance(v, int | float) for v in logs.values())
        self.logs.append((state.global_step, dict(logs)))


def trainer(folder: Path, *callbacks: Any, **options: Any) -> Any:
    given = {"max_steps": 6, "logging_steps": 2, "save_strategy": "no", **options}
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        learning_rate=1e-4,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **given,
    )
    rows = [{"x": torch.full((4,), 1.0 + i), "labels": torch.ones(1)} for i in range(16)]
    return transformers.Trainer(
        model=Line(), args=arguments, train_dataset=rows, eval_dataset=rows, callbacks=[*callbacks]
    )


@pytest.mark.parametrize("later", [False, True])
def test_measurements_reach_what_the_trainer_reports_to(
    later: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reporter, measures = Reporter(), collage_fx.trainer_callback(every=3)
    given = [collage_fx.compile_callback(storage="remainder16"), measures]
    run = trainer(tmp_path, *([*given, reporter] if later else [reporter, *given]))
    with warnings.catch_warnings():
        warnings.simplefilter("error", CollageWarning)  # nothing of plain steps
        run.train()
    assert [step for step, logs in reporter.logs if KEY in logs] == [3, 6]
    assert [row["step"] for row in run.state.log_history if KEY in row] == [3, 6]
    for step, logs in reporter.logs:
        if KEY in logs:
            row = next(r for r in run.state.log_history if r["step"] == step and KEY in r)
            assert {**logs, "step": step} == row and logs[KEY] < 0.01 and "epoch" in logs
    losses = [step for step, logs in reporter.logs if "loss" in logs]
    assert losses == [2, 4, 6], "the losses are logged as they were"
    assert KEY not in capsys.readouterr().out, "and not printed"
    assert all(s.compensated for s in collage_fx.report(run.optimizer).states[:2])


def test_it_says_that_the_steps_are_plain(tmp_path: Path) -> None:
    reporter = Reporter()
    run = trainer(tmp_path, collage_fx.trainer_callback(every=3), reporter)
    with pytest.warns(CollageWarning, match="AdamW that are measured are plain") as caught:
        run.train()
    assert len([w for w in caught if w.category is CollageWarning]) == 1
    found = [logs[KEY] for _, logs in reporter.logs if KEY in logs]
    assert len(found) == 2 and max(found) > 0.5, "the control: plain bf16 loses most of them"


def test_options_are_looked_at_before_there_is_a_trainer() -> None:
    with pytest.raises(OptionError, match="storag"):
        collage_fx.compile_callback(storag="mcf2")


def test_the_best_model_comes_back_whole(tmp_path: Path) -> None:
    saved: dict[int, dict[str, Tensor]] = {}

    class Look(transformers.TrainerCallback):  # type: ignore[name-defined, misc]
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            saved[state.global_step] = collage_fx.master_state_dict(kwargs["model"])

    options = {
        "save_strategy": "steps",
        "save_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "greater_is_better": True,  # so that it is the first
    }
    compiles = collage_fx.compile_callback(storage="remainder16")
    run = trainer(tmp_path, compiles, Look(), collage_fx.whole_weights_callback(), **options)
    run.train()
    best = saved[2]
    whole = collage_fx.master_state_dict(run.model)
    assert Path(run.state.best_model_checkpoint).name == "checkpoint-2"
    assert all(torch.equal(whole[name], w) for name, w in best.items())
    high = {name: p.detach().float() for name, p in run.model.named_parameters()}
    assert not torch.equal(high["weight"], best["weight"]), "the control: high words only"
    assert not torch.equal(saved[6]["weight"], best["weight"]), "it is not the last"
    from safetensors.torch import load_file

    file = load_file(tmp_path / "checkpoint-4" / "model.fp32.safetensors")
    assert all(torch.equal(file[name], w) for name, w in saved[4].items())
    (tmp_path / "checkpoint-2" / "model.fp32.safetensors").unlink()
    whole_weights = collage_fx.whole_weights_callback()
    with pytest.raises(CheckpointError, match="checkpoint-2 has no model"):
        whole_weights.on_train_end(run.args, run.state, run.control, model=run.model)
