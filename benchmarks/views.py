"""What a page of attention takes: bytes, the time to make it beside a watched forward, and bertviz where it opens.

Run it alone: `python -m benchmarks.views 512 4096`.
"""

import sys
import time
from collections.abc import Sequence

import torch
from torch import nn

import regard
from benchmarks.harness import Row
from regard.views import model_example, page

TITLE = "Pages"
LAYERS, HEADS, WIDTH = 12, 12, 64


class Stack(nn.Module):
    """Twelve layers of twelve heads, causal."""

    def __init__(self) -> None:
        super().__init__()
        dim = HEADS * WIDTH
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, HEADS, 4 * dim, batch_first=True, dropout=0.0) for _ in range(LAYERS)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One pass."""
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return x


@torch.no_grad()
def measure(length: int, budget_mb: float) -> str:
    """A line of the table for one length."""
    torch.manual_seed(0)
    model, x = Stack().eval(), torch.randn(1, length, HEADS * WIDTH)
    start = time.perf_counter()
    with regard.watch(model) as seen:
        model(x)
    forward = time.perf_counter() - start
    start = time.perf_counter()
    made = page([model_example(seen, [f"w{n % 997}" for n in range(length)])], budget_mb=budget_mb)
    took = time.perf_counter() - start
    line = f"| {length} | {len(made.text) / 2**20:.1f} | {forward:.1f} | {took:.1f} | {took / forward:.1f} | "
    try:
        from bertviz import head_view
    except ImportError:
        return f"{line}bertviz is not installed |"
    if length > 512:
        return f"{line}not tried |"
    dense = [one.dense() for _, one in seen.items()]
    start = time.perf_counter()
    text = head_view(dense, [f"w{n}" for n in range(length)], html_action="return").data
    return f"{line}{len(text) / 2**20:.1f} MB, {time.perf_counter() - start:.1f} s |"


def run(lengths: Sequence[int] = (512, 4096)) -> tuple[list[Row], list[str]]:
    """No pairs of times to compare; the table is a note."""
    torch.set_num_threads(1)
    table = "| T | page, MB | watched forward, s | page made, s | page / forward | bertviz |\n|---|---|---|---|---|---|"
    lines = [measure(length, 12.0 if length > 8192 else 8.0) for length in lengths]
    about = f"{LAYERS} layers of {HEADS} heads of {WIDTH}, causal, one core. Bars: 8 MB (12 above 8,192), 3 forwards."
    return [], [about, "\n".join([table, *lines])]


if __name__ == "__main__":
    print("\n\n".join(run([int(length) for length in sys.argv[1:]] or (512,))[1]))
