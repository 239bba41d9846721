"""An average of compensated weights in Lightning, used for validation, saved and resumed.

Lightning's own WeightAveraging makes an AveragedModel, whose bf16 weights lose what they average.
"""

import logging
import tempfile

import lightning
import torch
from lightning_module import Autoencoder

import collage_fx

EPOCHS = 4


class Averaging(lightning.Callback):
    """Updates an average after each step of the optimizer, and validates it."""

    loaded = None

    def on_fit_start(self, trainer, module):
        """Begin when the model has its dtype and device, and its weights, if these are loaded."""
        self.average, self.steps = collage_fx.EMA(module, 0.99), 0
        if self.loaded is not None:
            self.average.load_state_dict(self.loaded["average"])
            self.steps = self.loaded["steps"]

    def on_train_batch_end(self, trainer, module, *args):
        """Take the weights into the average, once for each step."""
        if trainer.global_step > self.steps:
            self.steps = trainer.global_step
            self.average.update_parameters(module)

    def on_validation_epoch_start(self, trainer, module):
        """Give the model the average."""
        self.average.swap(module)

    on_validation_epoch_end = on_validation_epoch_start
    """The same again gives the model its weights."""

    def state_dict(self):
        """Return the average with its residuals, for the checkpoint of the trainer."""
        return {"average": self.average.state_dict(), "steps": self.steps}

    def load_state_dict(self, state):
        """Keep what Lightning loads before it makes the model ready."""
        self.loaded = state


class Validated(Autoencoder):
    """The model, with a validation."""

    def validation_step(self, batch, index):
        """Log the loss of the average."""
        self.log("loss", self.training_step(batch, index))


def fit(folder, epochs, checkpoint=None):
    """Train for some epochs, from a checkpoint if there is one."""
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    options = {"precision": "bf16-true", "enable_checkpointing": False, **quiet}
    averaging = Averaging()
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        default_root_dir=folder,
        callbacks=[averaging],
        **options,
    )
    data = torch.randn(32, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    batches = torch.utils.data.DataLoader(data, batch_size=8)
    trainer.fit(Validated(), batches, batches, ckpt_path=checkpoint)
    return trainer, averaging.average


if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as place:
        (whole, average), (half, _) = fit(place, EPOCHS), fit(place, EPOCHS // 2)
        half.save_checkpoint(f"{place}/half.ckpt")
        _, resumed = fit(place, EPOCHS, f"{place}/half.ckpt")
    pairs = zip(average.parameters(), resumed.parameters(), strict=True)
    assert all(torch.equal(collage_fx.value(p), collage_fx.value(q)) for p, q in pairs)
    assert not torch.equal(whole.model.net[0].weight, average.module.net[0].weight)
    print("the average of the resumed run has the same bits")
