"""An `AttentionMonitor` as a callback of transformers and of Lightning; each is imported when it is asked for."""

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from regard.errors import ArgumentError

if TYPE_CHECKING:
    from regard.watching.monitor import AttentionMonitor


def trainer_callback(monitor: "AttentionMonitor", trainer: Any) -> Any:
    """See `AttentionMonitor.trainer_callback`."""
    from transformers import TrainerCallback

    class MonitorTraining(TrainerCallback):
        scalars: dict[str, float] = {}  # noqa: RUF012 (replaced, never changed)

        def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            monitor.begin(given["model"], state.global_step + 1)

        def on_substep_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            self.scalars = monitor.end() or self.scalars

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            self.scalars = monitor.end() or self.scalars

        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            # After the step, so that its number is that of the loss logged beside.
            scalars, self.scalars = self.scalars, {}
            if scalars:
                trainer.log(scalars)

        def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            monitor.close()

    return MonitorTraining()


def lightning_callback(monitor: "AttentionMonitor") -> Any:
    """See `AttentionMonitor.lightning_callback`."""
    if find_spec("lightning") is not None:
        from lightning.pytorch import Callback
    else:
        from pytorch_lightning import Callback

    class MonitorTraining(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            if trainer.loggers and monitor.every % (trainer.log_every_n_steps or 1):
                raise ArgumentError(
                    f"every={monitor.every} is no multiple of log_every_n_steps={trainer.log_every_n_steps}: loggers "
                    "would miss the scalars of the other steps"
                )

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            monitor.begin(pl_module, trainer.global_step + 1)

        def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
            if scalars := monitor.end():
                self.log_dict(scalars)

        def on_train_batch_end(self, *_: Any) -> None:
            monitor.close()

        def on_exception(self, *_: Any) -> None:
            monitor.close()

    return MonitorTraining()
