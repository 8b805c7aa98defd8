"""The share of a training run that `--log-attention` takes, and how much longer a step with `--qk-clip` is.

The log works after validations alone, so its time is measured within the run and divided by the run's.
"""

import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Row, compare
from regard.models.decoder_only import DecoderOnly, DecoderOnlyConfig
from regard.tasks.language_modelling.config import LanguageModelConfig
from regard.tasks.language_modelling.train import run_language_model
from regard.training.fit_config import FitConfig
from regard.training.qk_clip import QKClip
from regard.training.reporting.attention_log import AttentionLog
from regard.training.reporting.events import Event

TITLE = "Training with a log of the heads, and with bounded logits"
MODEL = DecoderOnlyConfig(dim=256, num_heads=8, num_layers=4, feed_forward_dim=1024)
STEPS = 12


def run() -> tuple[list[Row], list[str]]:
    share, seconds, total = share_of_log()
    default = FitConfig().validate_every
    at_default = seconds / (seconds + (total - seconds) / STEPS * default)
    note = (
        f"4 layers of 8 heads, width 256, blocks of 256 tokens, 2,048 tokens a step: a run of {STEPS} steps with one "
        f"validation took {total:.0f} s, of which the log took {seconds:.2f} s, {share:.1%}; with a validation every "
        f"{default} steps, the default, it is {at_default:.2%} (at most 3 %). Steps without a validation are as they "
        "were. The table has one training step of that model without QKClip and with it."
    )
    return [compare("a step, T = 256, without / with qk_clip", step(clipped=False), step(clipped=True), seconds=15.0)], [note]


def share_of_log() -> tuple[float, float, float]:
    """The share of the log in a run, its seconds, and those of the run without what comes before training."""
    spent: list[float] = []
    began: list[float] = []
    plain = AttentionLog.__call__

    def timed(log: AttentionLog, event: Event) -> None:
        start = time.perf_counter()
        began.append(start)
        plain(log, event)
        spent.append(time.perf_counter() - start)

    AttentionLog.__call__ = timed  # type: ignore[method-assign]
    try:
        with tempfile.TemporaryDirectory() as folder:
            text = Path(folder, "text.txt")
            text.write_text("".join(f"{n} and {n + 1} make {2 * n + 1}\n" for n in range(8000)), encoding="utf-8")
            settings: Any = {"fit": FitConfig(steps=STEPS, validate_every=STEPS, save_every=STEPS, log_every=STEPS)}
            run_language_model(
                LanguageModelConfig(
                    data=(text,),
                    out=Path(folder, "run"),
                    model=MODEL,
                    tokenizer="characters",
                    block_length=256,
                    batch_tokens=2048,
                    pictures=0,
                    device="cpu",
                    precision="float32",
                    log_attention=True,
                    warmup_steps=10,
                    **settings,
                )
            )
            total = time.perf_counter() - began[0]
    finally:
        AttentionLog.__call__ = plain  # type: ignore[method-assign]
    return sum(spent) / total, sum(spent), total


def step(*, clipped: bool) -> Any:
    torch.manual_seed(0)
    model = DecoderOnly(MODEL, vocab_size=100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if clipped:
        QKClip(model, 100.0).attach(optimizer)
    tokens = torch.randint(3, 100, (8, 257))

    def run() -> None:
        logits = model(tokens[:, :-1])
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return run
