"""What a page of attention takes: bytes, the time to make it beside a watched forward, to open it and to point at a
token; and bertviz where it opens.

Run it for some lengths, in tokens, or in tokens and layers: `python -m benchmarks.views 512 4096 32768:1`.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

import regard
from benchmarks.harness import Row
from regard import page
from regard.views import Example, Map, Page, model_example
from tests.views.chromium import CHROMIUM, Chromium

TITLE = "Pages"
LAYERS, HEADS, WIDTH = 12, 12, 64
LONG, WINDOW = 32_768, 64
BERTVIZ_OPENS = 256
"""The most tokens of twelve layers at which a browser opens bertviz: its page of 512 has 1 GB."""
POINTED = 60
"""How often a token is pointed at."""


class Layer(nn.Module):
    """A layer of a causal Transformer, which makes no T x T tensor."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.feed = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One pass."""
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norms[0](x)).chunk(3, -1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.feed(self.norms[1](x))


@torch.no_grad()
def measure(length: int, layers: int, browser: Chromium | None) -> str:
    """A line of the table for one length."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(HEADS * WIDTH) for _ in range(layers))).eval()
    x = torch.randn(1, length, HEADS * WIDTH)
    start = time.process_time()
    with regard.watch(model) as seen:
        model(x)
    forward = time.process_time() - start
    start = time.process_time()
    made = page([model_example(seen, words(length))], budget_mb=12.0 if length > 8192 else 8.0)
    took = time.process_time() - start
    size = f"{made.used_bytes / 1e6:.2f}"
    line = f"| {length} | {layers} x {HEADS} | {size} | {forward:.1f} | {took:.1f} | {took / forward:.1f} | "
    line += f"{opened(made, browser)} | "
    try:
        from bertviz import head_view
    except ImportError:
        return f"{line}bertviz is not installed |"
    if length > BERTVIZ_OPENS:
        return f"{line}does not open |"
    dense = [one.dense() for _, one in seen.items()]
    start = time.process_time()
    text = head_view(dense, words(length), html_action="return").data
    return f"{line}{len(text) / 1e6:.1f} MB, made in {time.process_time() - start:.1f} s |"


def words(length: int) -> list[str]:
    """As many labels, of which some repeat."""
    return [f"w{n % 997}" for n in range(length)]


def opened(made: Page, browser: Chromium | None) -> str:
    """Columns of the table: when the first picture stands, and from pointing at a token to the next frame."""
    if browser is None:
        return "no Chromium | "
    with tempfile.TemporaryDirectory() as folder:
        path = made.save(Path(folder, "page.html"))
        first, worst = [], []
        for _ in range(3):
            browser.open(f"file://{path}")
            browser.until("performance.getEntriesByName('regard-drawn').length")
            first.append(browser.run("return performance.getEntriesByName('regard-drawn')[0].startTime;"))
        browser.until("document.querySelector('.heads').dataset.drawn")
        for _ in range(POINTED // 20):
            worst += browser.run("""
              const canvas = document.querySelector(".matrix canvas"), box = canvas.getBoundingClientRect(), all = [];
              const tokens = document.querySelectorAll(".token");
              for (let n = 0; n < 20; n++) {
                const start = performance.now();
                const [clientX, clientY] = [box.left + 100 + 15 * n, box.top + 100 + 17 * n];
                const to = n % 2 ? canvas : tokens[(7 * n) % tokens.length];
                const at = { clientX, clientY, bubbles: true, pointerType: "mouse" };
                to.dispatchEvent(new PointerEvent("pointermove", at));
                await new Promise(requestAnimationFrame);
                all.push(performance.now() - start);
              }
              return all;""")
    return f"{statistics.median(first):.0f} | {statistics.median(worst):.0f} ({max(worst):.0f})"


@torch.no_grad()
def under_a_window(browser: Chromium | None) -> str:
    """A line of the table for the longest texts, whose full maps take long on one core: maps of a window."""
    torch.manual_seed(0)
    mask = regard.window(WINDOW) & regard.causal()
    maps = {}
    for layer in range(LAYERS):
        q, k = (torch.randn(1, HEADS, LONG, WIDTH) for _ in range(2))
        weights = regard.attention(q, k, k, mask=mask, return_weights=True).weights[0]
        maps[str(layer)] = Map(weights, words(LONG), words(LONG))
    start = time.process_time()
    made = page([Example("window", maps)], budget_mb=12.0)
    took = time.process_time() - start
    return (
        f"| {LONG}, window of {WINDOW} | {LAYERS} x {HEADS} | {made.used_bytes / 1e6:.2f} | | {took:.1f} | | "
        f"{opened(made, browser)} | does not open |"
    )


@contextmanager
def browsing() -> Iterator[Chromium | None]:
    """A browser; None where there is none."""
    if not CHROMIUM:
        yield None
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        one = Chromium(Path(profile))
        one.size(1280, 800)
        try:
            yield one
        finally:
            one.close()


def run(lengths: Sequence[str] = ("200", "512", "4096", "window")) -> tuple[list[Row], list[str]]:
    """No pairs of times to compare; the table is a note."""
    torch.set_num_threads(1)
    head = ["T", "heads", "page, MB", "watched forward, CPU s", "page made, CPU s", "page / forward", "painted, ms"]
    head += ["hover to frame, ms (worst)", "bertviz"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    with browsing() as browser:
        for wanted in lengths:
            length, _, layers = wanted.partition(":")
            lines.append(
                under_a_window(browser) if length == "window"
                else measure(int(length), int(layers or LAYERS), browser)
            )  # fmt: skip
    about = (
        f"Heads of {WIDTH}, causal, one thread, in seconds of its CPU; a window of 1280 x 800. Asked: at most 8 MB of "
        "10^6 bytes (12 above 8,192), made in 3 forwards, painted in 1 s at 512, 50 ms from pointing to the frame. "
        "bertviz (head view) needs the web to draw."
    )
    return [], [about, "\n".join(lines)]


if __name__ == "__main__":
    print("\n\n".join(run(sys.argv[1:] or ("512",))[1]))
