"""Lightning in bf16-true with compensated steps, and a run resumed in the middle: the same bits."""

import logging
import tempfile

import lightning
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

import collage_fx

EPOCHS = 4


class Autoencoder(lightning.LightningModule):
    """A small model, its parameters in bf16."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 16))

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        """Return the loss."""
        return (self.net(batch) - batch).square().mean()

    def configure_optimizers(self):
        """Return an optimizer with compensated steps, and a schedule."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        collage_fx.compile_(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": CosineAnnealingLR(optimizer, EPOCHS)}


def fit(folder: str, epochs: int, checkpoint: str | None = None) -> lightning.Trainer:
    """Train for some epochs, from a checkpoint if there is one."""
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(
        accelerator="cpu",
        precision="bf16-true",
        max_epochs=epochs,
        default_root_dir=folder,
        enable_checkpointing=False,
        **quiet,
    )
    data = torch.randn(32, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    batches = torch.utils.data.DataLoader(data, batch_size=8)
    trainer.fit(Autoencoder(), batches, ckpt_path=checkpoint)
    return trainer


if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as place:
        whole, half = fit(place, EPOCHS), fit(place, EPOCHS // 2)
        half.save_checkpoint(f"{place}/half.ckpt")
        resumed = fit(place, EPOCHS, f"{place}/half.ckpt")
    pairs = zip(whole.model.parameters(), resumed.model.parameters(), strict=True)
    assert all(torch.equal(collage_fx.value(p), collage_fx.value(q)) for p, q in pairs)
    print("the resumed run has the same bits")
