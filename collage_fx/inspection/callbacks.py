"""The monitor as a callback of Hugging Face's Trainer and of Lightning."""

from typing import Any

from collage_fx.inspection.monitor import Monitor, check_every, monitor


def trainer_callback(every: int = 100, *, to: Any = None) -> Any:
    """Return a TrainerCallback that measures every n-th step of the optimizer of a Trainer.

    Each measurement is added to `trainer.state.log_history`.

    Args:
        every: in which steps, as of `monitor`.
        to: what is given each measurement besides, as of `monitor`.

    Raises:
        ImportError: transformers is not installed.
    """
    check_every(every)
    from transformers import TrainerCallback

    class MonitorCallback(TrainerCallback):
        monitor: Monitor | None = None

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            # Not when training begins: another callback may compile the step then.
            if self.monitor is None:
                self.monitor = monitor(kwargs["optimizer"], every, to=to, model=kwargs["model"])

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            found = self.monitor
            if found is not None and found.history and found.history[-1].step == found.steps:
                row = {**found.history[-1].scalars(), "step": state.global_step}
                state.log_history.append(row)

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if self.monitor is not None:
                self.monitor.remove()
                self.monitor = None

    return MonitorCallback()


def lightning_callback(every: int = 100, *, to: Any = None) -> Any:
    """Return a Lightning callback that measures every n-th step of each optimizer of a Trainer.

    Args:
        every: in which steps, as of `monitor`.
        to: what is given each measurement, as of `monitor`; by default the loggers of the Trainer.

    Raises:
        ImportError: lightning is not installed.
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
