"""Callbacks of Hugging Face's Trainer, and of Lightning."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from collage_fx.api import compile_
from collage_fx.dynamo.options import names_options, split_options
from collage_fx.errors import CheckpointError, SubjectError
from collage_fx.inspection.monitor import Monitor, check_every, monitor
from collage_fx.optimizer.master_weights import load_master_weights, master_state_dict
from collage_fx.runtime.errors import warn
from collage_fx.runtime.residuals.dtensor import is_sharded
from collage_fx.step.subject import innermost, step_made_here

WEIGHTS = "model.fp32.safetensors"
"""File name of whole weights in a checkpoint folder: `variant="fp32"` of transformers."""


def trainer_callback(every: int = 100, *, to: Any = None) -> Any:
    """Return a TrainerCallback that measures every n-th step of the optimizer of a Trainer.

    Each measurement is added to `trainer.state.log_history`, and given to what the Trainer reports
    to (TensorBoard, Weights & Biases, ...) as the losses are, but for those that print. A warning
    says so if the steps are plain ones.

    Args:
        every: in which steps, as of `monitor`.
        to: what is given each measurement besides, as of `monitor`.

    Raises:
        ImportError: transformers is not installed.
        OptionError: `every` is not a positive integer.

    Examples:
        >>> callbacks = [collage_fx.compile_callback(), collage_fx.trainer_callback(every=50)]
        >>> trainer = transformers.Trainer(model, callbacks=callbacks)
    """
    check_every(every)
    from transformers import TrainerCallback

    class MonitorCallback(TrainerCallback):
        monitor: Monitor | None = None

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            # Not when training begins: another callback may compile the step then.
            if self.monitor is None:
                self.monitor = monitor(kwargs["optimizer"], every, to=to, model=kwargs["model"])
                _warn_if_plain(kwargs["optimizer"])

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            found = self.monitor
            if found is not None and found.history and found.history[-1].step == found.steps:
                logs = found.history[-1].scalars()
                logs |= {} if state.epoch is None else {"epoch": state.epoch}
                state.log_history.append({**logs, "step": state.global_step})
                for reporter in _reporters_beside(self):
                    reporter.on_log(args, state, control, logs=dict(logs), **kwargs)

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if self.monitor is not None:
                self.monitor.remove()
                self.monitor = None

    return MonitorCallback()


def _warn_if_plain(optimizer: Optimizer) -> None:
    if step_made_here(optimizer, "_collage") is None:
        name = type(innermost(optimizer)).__name__
        warn(
            "plain-steps",
            f"the steps of {name} that are measured are plain, and "
            "nothing is compensated; collage_fx.compile_callback() has them compiled",
            stacklevel=3,
        )


def _reporters_beside(callback: Any) -> Iterator[Any]:
    """Yield the callbacks of the same Trainer that log, and do not print, in the Trainer's order.

    A callback is not given the Trainer; the garbage collector knows what calls it.
    """
    from transformers import PrinterCallback, ProgressCallback
    from transformers.trainer_callback import CallbackHandler

    for one in gc.get_objects():
        if type(one) is CallbackHandler and any(c is callback for c in one.callbacks):
            printing = callback, *(c for c in one.callbacks if isinstance(c, PrinterCallback))
            printing += tuple(c for c in one.callbacks if isinstance(c, ProgressCallback))
            yield from (c for c in one.callbacks if not any(c is p for p in printing))


@names_options
def compile_callback(*, mode: str | None = None, **options: Any) -> Any:
    """Return a TrainerCallback that has the optimizer of a Trainer take compensated steps.

    It comes before the first step, and after a checkpoint has been loaded.

    Args:
        mode: as of `compile`.
        **options: as of `compile`.

    Raises:
        ImportError: transformers is not installed.
        OptionError: an option or value that does not exist.

    Examples:
        >>> callbacks = [collage_fx.compile_callback(level="plus")]
        >>> trainer = transformers.Trainer(model, callbacks=callbacks)
    """
    split_options(options, mode)
    from transformers import TrainerCallback

    class CompileCallback(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if step_made_here(kwargs["optimizer"], "_collage") is None:
                compile_(kwargs["optimizer"], mode=mode, **options)

    return CompileCallback()


def whole_weights_callback() -> Any:
    """Return a TrainerCallback that writes whole weights into each checkpoint of a Trainer.

    They are fp32 values of parameters with their residuals, in a file `model.fp32.safetensors`,
    which `from_pretrained(folder, variant="fp32")` loads. Where the Trainer loads the best model at
    the end, which is high words only, the whole weights of that checkpoint are put into it, as by
    `load_master_weights`: `master_state_dict(model)` has them then.

    Raises:
        ImportError: transformers is not installed.

    Examples:
        >>> callbacks = [collage_fx.compile_callback(), collage_fx.whole_weights_callback()]
        >>> trainer = transformers.Trainer(model, callbacks=callbacks)
    """
    from safetensors.torch import load_file, save_file
    from transformers import TrainerCallback

    class WholeWeightsCallback(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if any(map(is_sharded, kwargs["model"].parameters())):
                raise SubjectError(
                    "whole_weights_callback writes no sharded parameters: save a checkpoint of "
                    "torch.distributed.checkpoint, which holds residuals"
                )

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if args.should_save:
                whole = master_state_dict(kwargs["model"], innermost(kwargs["optimizer"]))
                folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
                weights = {name: w.contiguous() for name, w in whole.items()}
                save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            best = state.best_model_checkpoint if args.load_best_model_at_end else None
            if best is None:
                return
            if not (file := Path(best, WEIGHTS)).exists():
                raise CheckpointError(f"{best} has no {WEIGHTS}: the best model is in 16 bits only")
            load_master_weights(kwargs["model"], load_file(file))

    return WholeWeightsCallback()


def lightning_callback(every: int = 100, *, to: Any = None) -> Any:
    """Return a Lightning callback that measures every n-th step of each optimizer of a Trainer.

    Args:
        every: in which steps, as of `monitor`.
        to: what is given each measurement, as of `monitor`; by default the loggers of the Trainer.

    Raises:
        ImportError: lightning is not installed.
        OptionError: `every` is not a positive integer.

    Examples:
        >>> callbacks = [collage_fx.lightning_callback(every=50)]
        >>> trainer = lightning.Trainer(callbacks=callbacks, logger=False)
    """
    check_every(every)
    from lightning.pytorch import Callback

    class MonitorCallback(Callback):
        def __init__(self) -> None:
            self.monitors: list[Monitor] = []

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            def log(scalars: dict[str, float], step: int) -> None:
                for logger in trainer.loggers:
                    logger.log_metrics(scalars, step)

            self.monitors = [
                monitor(one, every, to=to or log, model=pl_module) for one in trainer.optimizers
            ]

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            for one in self.monitors:
                one.remove()

    return MonitorCallback()
