"""Hugging Face's Trainer as it comes: fused AdamW, a cosine schedule that warms up from 0.

For optimizer.fused.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import collage_fx

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed (requirements.txt has it)"
)
pytest.importorskip("accelerate", reason="accelerate is not installed; Trainer needs it")

STEPS = 40
SIZES = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 32}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


class Compensated(transformers.TrainerCallback):  # type: ignore[misc]
    """Has the trainer's optimizer take compensated steps."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_train_begin(self, *args: Any, optimizer: Any, **kwargs: Any) -> None:
        self.inner = optimizer.optimizer  # accelerate's wrapper has it
        self.inner.step = collage_fx.compile(self.inner)

    def on_pre_optimizer_step(self, *args: Any, optimizer: Any, **kwargs: Any) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])


def trained(dtype: torch.dtype, place: Path, *callbacks: Any) -> tuple[dict[str, Tensor], Any]:
    """Return the parameters of a small model, and the trainer."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(**SIZES, **NO_DROPOUT, loss_type="ForCausalLM")
    model = transformers.GPT2LMHeadModel(config).to(dtype)
    rows = [(torch.arange(16) * step + begin) % 61 for step in (1, 2, 3) for begin in range(20)]
    trainer = transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(
            output_dir=str(place),
            max_steps=STEPS,
            learning_rate=3e-3,
            lr_scheduler_type="cosine",  # get_cosine_schedule_with_warmup
            warmup_steps=5,
            per_device_train_batch_size=8,
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        callbacks=list(callbacks),
    )
    trainer.train()
    return {name: collage_fx.value(p) for name, p in model.named_parameters()}, trainer


def apart(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    return float(torch.cat([(found[k] - exact[k]).flatten() for k in exact]).norm())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:(?!collage_fx)")
def test_trainer_with_its_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    callback = Compensated()
    exact, _ = trained(torch.float32, tmp_path)
    plain, _ = trained(torch.bfloat16, tmp_path)
    found, trainer = trained(torch.bfloat16, tmp_path, callback)
    assert callback.inner.param_groups[0]["fused"], "Trainer's default is another optimizer now"
    assert callback.rates[:2] == [0.0, pytest.approx(6e-4)] and len(callback.rates) == STEPS
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert losses[-1] < 0.9 * losses[0]
    # Gradients are those of a bf16 model, so that the rest is their noise.
    assert apart(found, exact) < 0.75 * apart(plain, exact)
    states = collage_fx.report(callback.inner).states
    assert len(states) == 3 * len(exact)
    assert all(s.graph == STEPS and not (s.joined or s.unaccounted) for s in states)
