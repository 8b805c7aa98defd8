"""`AttentionMonitor`: the attention of a model in training, audited in the first batch and measured every N steps."""

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from io import BytesIO
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from regard.errors import ArgumentError, RegardError, require_whole
from regard.lazy import Displayed
from regard.maps.attention_map import AttentionMap
from regard.maps.sources.source import LinearSource
from regard.watching.checks.finding import Checked, grouped
from regard.watching.module_names import Names
from regard.watching.observed import Observed
from regard.watching.report import layers_of
from regard.watching.watch import Seen, watch

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


DEAD_SHARE = 0.95
EVEN_NATS = 0.1


class MeasuredHeads(NamedTuple):
    """The heads of one layer, (H,) each: means over the queries with a key."""

    entropy: Tensor
    """In nats: 0 for one key, ln S for all alike."""
    largest_logit: Tensor
    """The largest score of any query with any key; NaN for weights that the model computed itself."""
    first_key: Tensor
    """The share of the weight on the first key, 0..1."""
    is_uniform: Tensor
    """True if the weights of a query are alike to within 10 %: the logarithm of the largest is within 0.1 of the mean,
    weighted by attention. Queries with more than a half of their weight on one key do not count."""

    @property
    def is_dead(self) -> Tensor:
        """True if at least 95 % of the weight is on the first key: the head is dormant."""
        return self.first_key >= DEAD_SHARE


@torch.no_grad()
def measured_heads(passes: Iterable[Mapping[str, AttentionMap]]) -> dict[str, MeasuredHeads]:
    """Measure each head over all queries of several passes, by layer; `passes` have maps (batch..., H, T, S).

    Layers of linear attention are left out: they have no logits, and weights below 0.
    """
    rows: dict[str, list[Tensor]] = {}
    for maps in passes:
        for name, weights in maps.items():
            if isinstance(weights.source, LinearSource):
                continue  # (without logits)
            told = weights.summary("entropy", "top_weight")
            first = weights.block(range(weights.shape[-2]), range(1))[..., 0]
            numbers = torch.stack([told["entropy"], told["top_weight"], first, _largest_logits(weights)])
            rows.setdefault(name, []).append(numbers.movedim(-2, 1).flatten(2))
    return {name: _heads(*torch.cat(parts, 2)) for name, parts in rows.items()}


def _heads(entropy: Tensor, top: Tensor, first: Tensor, logits: Tensor) -> MeasuredHeads:
    """The means over the rows (H, rows) with a key."""
    spread = (top > 0) & (top <= 0.5)
    uneven = _mean(entropy + top.log(), spread)  # 0 where all weights of a row are alike
    live = top > 0
    return MeasuredHeads(_mean(entropy, live), logits.amax(1), _mean(first, live), uneven < EVEN_NATS)


def _mean(numbers: Tensor, counted: Tensor) -> Tensor:
    return numbers.masked_fill(~counted, 0.0).sum(1) / counted.sum(1)


def _largest_logits(weights: AttentionMap) -> Tensor:
    try:
        return weights.max_logit()
    except ArgumentError:  # the weights themselves were kept
        return torch.full(weights.shape[:-1], torch.nan, device=weights.device)


MOST_CELLS = 192
"""The most cells on a side of the picture: a longer side is pooled."""
PICTURE = "attention/worst/map"


@dataclass(frozen=True, slots=True, eq=False)
class WorstHead(Displayed):
    """The head with the largest logit of a measurement; a notebook shows its map."""

    layer: str
    head: int
    logit: float
    weights: Tensor
    """The map of its first sequence (t, s), with the largest weight of each block where a side is longer."""
    sizes: tuple[int, int]
    """T and S of the map."""

    def __str__(self) -> str:
        pooled = "" if tuple(self.weights.shape) == self.sizes else f", {self.sizes[0]} x {self.sizes[1]} pooled by max"
        return f"{self.layer or 'the model'}, head {self.head}: largest logit {self.logit:.3g}{pooled}"

    def pixels(self) -> "NDArray[np.uint8] | None":
        """The picture that a notebook shows, (height, width, 3); None without matplotlib."""
        png = self._repr_mimebundle_()[0].get("image/png")
        if png is None:
            return None
        import numpy as np
        from PIL import Image

        return np.asarray(Image.open(BytesIO(png)).convert("RGB"))


def largest_of(measured: Mapping[str, MeasuredHeads]) -> tuple[float, int, int] | None:
    worst = (-math.inf, 0, 0)
    for number, heads in enumerate(measured.values()):
        largest, head = heads.largest_logit.nan_to_num(nan=-math.inf).max(0)
        worst = max(worst, (float(largest), number, int(head)))
    return worst if worst[0] > -math.inf else None


def writers_of_trainer(trainer: Any) -> Iterator[Any]:
    for callback in trainer.callback_handler.callbacks:
        for name in ("tb_writer", "_wandb", "_trackio"):
            if (writer := getattr(callback, name, None)) is not None:
                yield writer


def writers_of_lightning(trainer: Any) -> Iterator[Any]:
    for logger in trainer.loggers if trainer.is_global_zero else ():
        yield logger if hasattr(logger, "log_image") else logger.experiment


def write_picture(worst: WorstHead, writers: Iterator[Any], step: int) -> int:
    """Return the number of writers that took it; 0 without matplotlib. A writer has `add_image` (TensorBoard),
    `log_image` (Lightning's W&B logger), or is a module with `Image` and `log` (W&B, trackio)."""
    taking = [one for one in writers if any(hasattr(one, name) for name in ("add_image", "log_image", "Image"))]
    pixels = worst.pixels() if taking else None
    if pixels is None:
        return 0
    for writer in taking:
        if hasattr(writer, "add_image"):
            writer.add_image(PICTURE, pixels, global_step=step, dataformats="HWC")
        elif hasattr(writer, "log_image"):
            writer.log_image(key=PICTURE, images=[pixels], step=step)
        else:
            writer.log({PICTURE: writer.Image(pixels), "train/global_step": step})
    return len(taking)


class AttentionMonitor:
    """Audit the first batch of a training run before the model's first change, and measure its heads every N steps.

    It watches the passes of training themselves: no batch is run twice, and outputs and gradients keep their bits. A
    compiled model runs uncompiled in these steps. `trainer_callback` hands it to transformers, `lightning_callback` to
    Lightning; a loop of one's own calls `begin` before the forward pass of a step, and `end` before the optimizer.

    Args:
        every: N, the steps between two measurements.
        on_fault: "stop" raises at an error of the audit, "warn" warns. A warning of the audit always warns, and so does
            an audit that saw nothing, or does not know whether the model is causal.
        sequences: how many sequences of a batch are measured, the first ones; the audit reads all of them.
        causal: the expected causality, as of `Seen.audit`.
        names: the modules to watch, as of `regard.watch`.

    Raises:
        ArgumentError: a number is below 1, or `on_fault` is unknown.

    >>> layer = nn.TransformerEncoderLayer(8, 2, dropout=0.0, batch_first=True)
    >>> monitor = AttentionMonitor(every=100, causal=False)
    >>> monitor.begin(layer, step=1)
    >>> loss = layer(torch.ones(2, 4, 8)).sum()
    >>> loss.backward()
    >>> scalars = monitor.end()
    >>> monitor.audited
    TransformerEncoderLayer: 1 layer, 7 questions, nothing found
    >>> scalars["attention/self_attn/uniform"]
    2.0
    """

    audited: Checked | None = None
    """The audit of the first batch; None before it."""
    measured: dict[str, MeasuredHeads]
    """The last measurement, by layer."""
    unread: dict[str, str]
    """The layers that it left out, with the reasons."""
    worst: WorstHead | None = None
    """The head with the largest logit of the last measurement; a notebook shows its map."""

    def __init__(
        self,
        *,
        every: int = 100,
        on_fault: Literal["stop", "warn"] = "stop",
        sequences: int = 1,
        causal: bool | None = None,
        names: Names = None,
    ) -> None:
        require_whole(every=every, sequences=sequences)
        if every < 1 or sequences < 1 or on_fault not in ("stop", "warn"):
            raise ArgumentError(
                "AttentionMonitor() needs every and sequences of at least 1, and on_fault of 'stop' or 'warn'; got "
                f"{every}, {sequences} and {on_fault!r}"
            )
        self.every, self.on_fault, self.sequences, self.causal, self.names = every, on_fault, sequences, causal, names
        self.measured, self.unread = {}, {}
        self._open: Seen | None = None
        self._told: dict[str, Tensor | None] = {}
        self._last = 0

    def begin(
        self, model: nn.Module, step: int, *, padding: Tensor | None = None, documents: Tensor | None = None
    ) -> None:
        """Open the watch if this step, counted from 1, is the first one or every N-th. Where no argument of the model
        tells them, `padding` and `documents` tell the audit of the step's batch, as of `Seen.audit`."""
        self.close()
        self._told = {"padding": padding, "documents": documents}
        if self.audited is None or (step % self.every == 0 and step != self._last):
            self._last = step
            self._open = watch(model, self.names)
            self._open.__enter__()

    @torch.no_grad()
    def end(self) -> dict[str, float]:
        """Close the watch, audit the first batch, and measure; the scalars by name, none between two measurements.

        Raises:
            AssertionError: the audit found an error, and `on_fault` is "stop".
        """
        seen, told = self._open, self._told
        self.close()
        if seen is None:
            return {}
        if self.audited is None:
            audited = seen.audit(causal=self.causal, skip="*", **told)
            # Without the calls, whose tensors would be held as long as the monitor.
            self.audited = replace(audited, findings=tuple(replace(one, observed=None) for one in audited))
            self._say(self.audited)
        self.measured, self.unread, self.worst = {}, {}, None
        calls = layers_of(seen.record, crossing=True)
        for name in dict.fromkeys(call.name for call in calls):
            try:
                passes = [{name: self._some(call.over_tokens)} for call in calls if call.name == name]
                self.measured |= measured_heads(passes)
            except RegardError as error:  # (no reason to end a training run)
                self.unread[name] = str(error)
        self.worst = self._worst([call for call in calls if call.name in self.measured])
        return scalars_of(self.measured)

    def close(self) -> None:
        """Close the watch without reading it, as after an interrupted step."""
        seen, self._open, self._told = self._open, None, {}
        if seen is not None:
            seen.__exit__()

    def trainer_callback(self, trainer: Any) -> Any:
        """The `TrainerCallback` of transformers: `trainer.add_callback(monitor.trainer_callback(trainer))`. The scalars
        go through `trainer.log` to every logger in `report_to`."""
        return _of_transformers(self, trainer)

    def lightning_callback(self) -> Any:
        """The `Callback` of Lightning: `Trainer(callbacks=[monitor.lightning_callback()])`. The scalars go through
        `log_dict` to every logger, and the picture of the worst head to those that take pictures: TensorBoard, W&B.

        Raises:
            ArgumentError: when training begins: N is no multiple of the trainer's `log_every_n_steps`, and its loggers
                would miss the scalars.
        """
        return _of_lightning(self)

    def _some(self, weights: AttentionMap | None) -> AttentionMap:
        assert weights is not None
        with_heads = weights.with_heads()
        return with_heads[: self.sequences] if len(with_heads.leading) > 1 else with_heads

    def _worst(self, calls: list[Observed]) -> WorstHead | None:
        if (worst := largest_of(self.measured)) is None:
            return None
        logit, number, head = worst
        layer = list(self.measured)[number]
        weights = self._some(next(call for call in calls if call.name == layer).over_tokens)
        while len(weights.leading) > 1:
            weights = weights[0]
        sizes = weights.shape[-2], weights.shape[-1]
        picture = weights.only(heads=[head]).pooled(MOST_CELLS, MOST_CELLS, "max")[0]
        return WorstHead(layer, head, logit, picture.float().cpu(), sizes)

    def _say(self, audited: Checked) -> None:
        if audited.errors and self.on_fault == "stop":
            raise AssertionError("\n".join([repr(audited), *grouped(audited.faults)]))
        if audited or audited.unknown:
            warnings.warn("\n".join([repr(audited), *grouped(audited.faults)]), stacklevel=2)


def scalars_of(measured: Mapping[str, MeasuredHeads]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, heads in measured.items():
        found |= {
            f"attention/{name}/entropy": float(heads.entropy.mean()),
            f"attention/{name}/largest_logit": float(heads.largest_logit.amax()),
            f"attention/{name}/first_key": float(heads.first_key.mean()),
            f"attention/{name}/dead": float(heads.is_dead.sum()),
            f"attention/{name}/uniform": float(heads.is_uniform.sum()),
        }
    if (worst := largest_of(measured)) is not None:
        names = (f"attention/worst/{name}" for name in ("largest_logit", "layer", "head"))
        found |= dict(zip(names, worst, strict=True))
    return {name: number for name, number in found.items() if not math.isnan(number)}


def _of_transformers(monitor: AttentionMonitor, trainer: Any) -> Any:
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
                if monitor.worst is not None:
                    write_picture(monitor.worst, writers_of_trainer(trainer), state.global_step)

        def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            monitor.close()

    return MonitorTraining()


def _of_lightning(monitor: AttentionMonitor) -> Any:
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
                if monitor.worst is not None:
                    write_picture(monitor.worst, writers_of_lightning(trainer), trainer.global_step)

        def on_train_batch_end(self, *_: Any) -> None:
            monitor.close()

        def on_exception(self, *_: Any) -> None:
            monitor.close()

    return MonitorTraining()
