"""What `--log-attention` costs beside the steps between two validations."""

from typing import Any

import torch

from benchmarks.harness import Row, Run, compare, seconds_of
from regard.models.config import DecoderOnlyConfig
from regard.models.decoder_only import DecoderOnly
from regard.tasks.training.fit_config import FitConfig
from regard.tasks.training.reporting.attention_log import head_statistics

TITLE = "Training with a log of the heads"
MODEL = DecoderOnlyConfig(dim=256, num_heads=8, num_layers=4, feed_forward_dim=1024)


def run() -> tuple[list[Row], list[str]]:
    one, log, every = seconds_of(step()), seconds_of(logged), FitConfig().validate_every
    note = (
        f"4 layers of 8 heads, width 256, blocks of 256 tokens: one look at the heads in 1,024 tokens takes "
        f"{log:.2f} s, a training step of 2,048 tokens {one:.2f} s. With a validation every {every} steps, the "
        f"default, the log is "
        f"{log / (log + every * one):.2%} of the time of training (at most 3 %); a validation every "
        f"{log / one / 0.03:.0f} steps would make it 3 %."
    )
    return [compare("a step of 2,048 tokens / a look at the heads in 1,024", step(), logged, seconds=5.0, pairs=3)], [
        note
    ]


def logged() -> object:
    """One look at the heads."""
    torch.manual_seed(0)
    model = DecoderOnly(MODEL, vocab_size=100).eval()
    with torch.no_grad():
        return head_statistics([model.attend(torch.randint(3, 100, (4, 256)))])


def step() -> Run:
    """One training step."""
    torch.manual_seed(0)
    model: Any = DecoderOnly(MODEL, vocab_size=100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(3, 100, (8, 257))

    def run() -> None:
        logits = model(tokens[:, :-1])
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return run
