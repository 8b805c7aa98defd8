"""Draw the pictures of docs/pictures.md, and that of the README: `python docs/make_pictures.py`.

With the folder that `regard demo` made, it draws the attention of that model to six dates:
`python docs/make_pictures.py demo`.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

import regard
from regard.tasks.pictures.save import panel
from regard.tasks.translation.translator import Translator
from regard.views import DARK, LIGHT, Theme, alignment, heatmap, heatmap_grid, model_grid, overlay, save_figure

IMAGES = Path(__file__).parent / "images"
SCRIPTS = [
    *"2046年11月21日",
    "<eos>",
    *"יום 5",
    " नव",
    "सौ",
    "土曜日",
    "σάββατο",
    "вода",
    "토",
    "ฝน",
    "👨\u200d👩\u200d👧",
    "\u200d",
    "",
]


DATES = (
    "1963年12月27日", "17 de jun. de 2059", "14 июля 1987 г.",
    "2083년 2월 23일", "יום 5 במרץ 2046", "14 अप्रैल 2070",
)  # fmt: skip
"""One of each of six scripts; those below one another are about as long."""


def causal_map(length: int, heads: int, seed: int) -> regard.AttentionMap:
    """Random queries that prefer near keys and the first one, under a causal mask."""
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, 1, heads, length, 16, generator=generator)
    places = torch.arange(length)
    near = -(places[:, None] - places).abs() * torch.linspace(0.02, 0.6, heads)[:, None, None]
    bias = near + 2.0 * (places == 0)
    return regard.attention(q, k, k, mask=regard.causal(), bias=bias[None], return_weights=True).weights


def rings(height: int, width: int) -> np.ndarray:
    """An image, (height, width, 3) in 0..1."""
    y, x = np.mgrid[:height, :width]
    circles = 0.5 + 0.5 * np.sin(np.hypot(x - width / 3, y - height / 2) / 7)
    return np.stack([x / width, y / height, circles], -1)


def six_dates(demo: Path) -> Any:
    """The alignment of each answer of the demonstration's model to its date, the mean of the heads."""
    translator = Translator.load(demo / "run")
    panels = [panel(date, translator.attend(date)) for date in DATES]
    return heatmap_grid(panels, across=3, title="Each digit of an answer, and the characters of its date")


def main(demo: Path | None) -> None:
    if demo is not None:
        print(save_figure(six_dates(demo), IMAGES / "attention.png"))
        return
    for theme, shown in ((LIGHT, ("scripts-light", "alignment-light")), (DARK, ("heads-dark", "overlay-dark"))):
        figures = pictures(theme)
        for name in shown:
            print(save_figure(figures[name.split("-")[0]], IMAGES / f"pictures-{name}.png"))
    print(save_figure(first_picture(), IMAGES / "it-animal.png"))


def first_picture() -> Any:
    """The head of the README's first example, as its lines make it."""
    readme = (IMAGES.parents[1] / "README.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    exec(readme.partition("```python\n")[2].partition("```")[0], names)
    words, rows = names["words"], [6, 10, 11]
    look: dict[str, Any] = {
        "scale": "linear",
        "annotate": True,
        "colour_bar": False,
        "axis_titles": ("", ""),
        "figsize": (8.8, 1.4),
    }
    return heatmap(names["head"][rows], [words[row] for row in rows], words, **look).figure


def pictures(theme: Theme) -> dict[str, Any]:
    """The four pictures of the page, by name."""
    text = causal_map(len(SCRIPTS), 1, 0)[0, 0]
    noise = torch.randn(6, 7, generator=torch.Generator().manual_seed(2))
    pair = torch.softmax(5 * torch.eye(7)[[0, 1, 2, 5, 3, 4]] + noise, -1)  # German says "yesterday" before "very nice"
    source, target = (
        ["das", "Wetter", "war", "gestern", "sehr", "schön"],
        ["the", "weather", "was", "very", "nice", "yesterday", "."],
    )
    layers = [causal_map(200, 6, seed) for seed in range(3)]
    q = torch.randn(1, 5 + 12 * 18, 8, generator=torch.Generator().manual_seed(3))
    patches = regard.attention(q, q, q, return_weights=True).weights[0]
    return {
        "scripts": heatmap(text, SCRIPTS, SCRIPTS, title="Eight scripts, one causal head", theme=theme).figure,
        "heads": model_grid(layers, title="Three layers of six heads, 200 tokens", theme=theme),
        "alignment": alignment(pair, source, target, title="An alignment with its margins", theme=theme),
        "overlay": overlay(rings(168, 252), patches, title="The class token", theme=theme).figure,
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else None)
