"""Registries that take a class of optimizers: each is given one of collage_fx, with equal bits.

For optim.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from own_classes import by_hand, same, stepped, told
from repeated_steps import params
from torch import Tensor

import collage_fx
from collage_fx import compensated, optim

pytestmark = pytest.mark.filterwarnings("ignore:(?!collage_fx)")

RATE = 1e-4


class Line(torch.nn.Module):
    """A loss with constant gradients, of which each update is below the last place of a weight."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((8,), 1.5, dtype=dtype))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.weight * x.to(self.weight.dtype)).sum()}


def moved(model: Any) -> Tensor:
    return collage_fx.value(model.weight) - 1.5


@pytest.mark.slow
def test_the_trainer_of_hugging_face_takes_a_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed; Trainer needs it")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def trained(cls: Any, dtype: torch.dtype, callbacks: Any = (), **more: Any) -> Tensor:
        model = Line(dtype)
        args = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=8,
            lr_scheduler_type="linear",
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = transformers.Trainer(
            model=model,
            args=args,
            train_dataset=[{"x": torch.ones(8)}] * 64,
            optimizer_cls_and_kwargs=(cls, {"lr": 1e-3, **more}),
            callbacks=list(callbacks),
        )
        trainer.train()
        return moved(model)

    exact = trained(torch.optim.SGD, torch.float64)
    ours = trained(optim.SGD, torch.bfloat16, storage="remainder16")
    made = collage_fx.compile_callback(storage="remainder16")
    assert torch.equal(ours, trained(torch.optim.SGD, torch.bfloat16, [made]))
    assert float((ours - exact).norm() / exact.norm()) < 1e-3
    assert not trained(torch.optim.SGD, torch.bfloat16).any(), "the control loses all"
    left = collage_fx.compile_callback(storage="ulp8")  # as a step that is compiled already
    assert torch.equal(ours, trained(optim.SGD, torch.bfloat16, [left], storage="remainder16"))


@pytest.mark.slow
def test_accelerate_prepares_it_before_its_first_use() -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")

    def trained(optimizer_of: Any, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Any]:
        model = Line(dtype)
        optimizer = optimizer_of(model.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4)
        prepared = accelerate.Accelerator(cpu=True)
        model, optimizer, scheduler = prepared.prepare(model, optimizer, scheduler)
        for _ in range(6):
            optimizer.zero_grad()
            prepared.backward(model(torch.ones(8))["loss"])
            optimizer.step()
            scheduler.step()
        assert scheduler.get_last_lr() == [pytest.approx(1e-4)]
        return moved(model), optimizer

    exact, _ = trained(torch.optim.SGD, torch.float64)
    ours, optimizer = trained(optim.SGD)
    expected, other = trained(lambda *args, **kwargs: by_hand(torch.optim.SGD, *args, **kwargs))
    assert torch.equal(ours, expected) and told(optimizer) == told(other)
    assert float((ours - exact).norm() / exact.norm()) < 1e-3
    assert not trained(torch.optim.SGD)[0].any(), "the control loses all"


@pytest.mark.parametrize("path", ["collage_fx.optim.SGD", "torch.optim.SGD"])
def test_the_cli_of_lightning_takes_a_class_path(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("jsonargparse", reason="jsonargparse, of Lightning's CLI, is not installed")
    lightning = pytest.importorskip("lightning", reason="lightning is not installed")
    from lightning.pytorch.cli import LightningCLI

    class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.line = Line()

        def training_step(self, batch: Tensor, _: int) -> Tensor:
            loss: Tensor = self.line(batch[0])["loss"]
            return loss

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(list(torch.ones(4, 8)))

    ours = path.startswith("collage_fx")
    given = ["--optimizer.init_args.storage=remainder16"] if ours else []
    options = ["accelerator=cpu", "precision=bf16-true", "max_epochs=2", "logger=false"]
    options += ["enable_checkpointing=false", "enable_progress_bar=false"]
    options += [f"default_root_dir={tmp_path}"]
    args = ["fit", f"--optimizer={path}", "--optimizer.init_args.lr=1e-3", *given]
    monkeypatch.setattr(sys, "argv", ["train.py"])
    cli = LightningCLI(Module, args=[*args, *(f"--trainer.{one}" for one in options)])
    found = moved(cli.model.line)
    if ours:
        torch.testing.assert_close(found, torch.full_like(found, -8e-3), rtol=1e-3, atol=0)
        assert "storage=remainder16" in told(cli.trainer.optimizers[0])[1]
    else:
        assert not found.any(), "the control loses all"


def test_a_class_of_another_package_is_one_too() -> None:
    package = pytest.importorskip("pytorch_optimizer", reason="pytorch_optimizer is not installed")
    ours = stepped(compensated(package.Lion, storage="remainder16")(params(0), lr=RATE))
    options = {"storage": "remainder16"}
    expected = stepped(by_hand(package.Lion, params(0), lr=RATE, options=options))
    assert same(ours, expected) and told(ours) == told(expected)
    assert type(ours).__name__ == "Lion" and isinstance(ours, package.Lion)


@pytest.mark.slow
def test_a_registry_of_modules_and_names_finds_it() -> None:
    """As that of verl: `optimizer_impl`, `optimizer` and `override_optimizer_config`."""
    cls = getattr(importlib.import_module("collage_fx.optim"), "AdamW")  # noqa: B009
    given = {"lr": RATE, "weight_decay": 0.0, "betas": (0.9, 0.99), "storage": "mcf3"}
    assert "storage=mcf3" in told(stepped(cls(params(0), **given), 1))[1]
