"""Make the pictures of docs/page.md and docs/corpus.md, with Chromium: python docs/make_page_pictures.py

With a folder, every one of these pages is drawn there in both themes and at four sizes, to be looked at.
"""

import sys
import tempfile
from pathlib import Path

import torch

import regard
from regard import page
from regard.corpus import atlas
from regard.views import Example, Map
from tests.corpus.conftest import documents, measure_into, save_sharp, save_words, write_jsonl
from tests.families.architectures import library
from tests.views.chromium import Chromium

IMAGES = Path(__file__).parent / "images"
SENTENCE = (
    "The quick brown fox jumps over the lazy dog while seven wizards quietly mix a jug of potion , and nobody asks why "
    "the fox did so ."
)
CHANGED = SENTENCE.replace("quietly", "loudly and gladly")
SOURCE = [
    "Nul",
    "ne",
    "sait",
    "pourquoi",
    "le",
    "renard",
    "a",
    "sauté",
    "par-dessus",
    "le",
    "chien",
    "ce",
    "soir-là",
    ".",
]
TARGET = ["Nobody", "knows", "why", "the", "fox", "jumped", "over", "the", "dog", "that", "evening", "."]
ALIGNED = [0, 2, 3, 4, 5, 7, 8, 9, 10, 11, 12, 13]
"""The source word of each target word."""
SIZES = (1280, 800), (1024, 768), (768, 1024), (360, 740)
SHOWN = {
    "words": "example=0&layer=1&heads=0&query=10&theme=light",
    "zoomed": "example=2&heads=0&query=1503&key=1471&zoom=1494-1514x1464-1484&theme=light",
    "heads": "example=3&heads=0,1&query=5&view=links&theme=dark",
    "compared": "example=0&layer=1&heads=0&query=10&view=compare&with=1.1.0&theme=light",
}
"""The links of the pictures, by name."""


def attention(length: int, heads: int, seed: int, rounds: int = 1) -> regard.AttentionMap:
    """A causal map of queries and keys at random; with more `rounds` its heads are sharper."""
    made = torch.Generator().manual_seed(seed)
    q, k = (1.6 * rounds * torch.randn(1, heads, length, 8, generator=made) for _ in range(2))
    found = regard.attention(q, k, k, mask=regard.causal(), return_weights=True).weights[0]
    assert isinstance(found, regard.AttentionMap)
    return found


def alignment() -> torch.Tensor:
    """Two heads of a translation: one sharp, one that looks around."""
    places = torch.arange(len(SOURCE))
    apart = (places - torch.tensor(ALIGNED)[:, None]).abs()
    return torch.stack([(-apart * scale).softmax(-1) for scale in (1.6, 0.6)])


def document() -> str:
    """One page that all pictures show a part of."""
    words, changed, tokens = SENTENCE.split(), CHANGED.split(), [f"w{n % 97}" for n in range(2000)]
    others = [[(f"{word[:3]}…", 0.21), ("it", 0.08), ("this", 0.05)] for word in TARGET]
    return page(
        [
            Example("words", {f"{n}": Map(attention(len(words), 4, n), words, words) for n in range(2)}),
            Example("other words", {f"{n}": Map(attention(len(changed), 4, n), changed, changed) for n in range(2)}),
            Example("two thousand tokens", {"0": Map(attention(2000, 4, 5, 2), tokens, tokens)}),
            Example("a translation", {"decoder.0.cross": Map(alignment(), TARGET, SOURCE, others)}),
        ],
        title="Attention of random queries and keys",
        budget_mb=4,
    ).text


def atlases(folder: Path) -> dict[str, Path]:
    """The page of a small model's heads, and that of two models that differ in one head."""
    transformers, found = library(), []
    sizes = {"vocab_size": 16, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 48}
    docs = write_jsonl(folder / "docs.jsonl", documents(200))
    for name in ("before", "after"):
        torch.manual_seed(0)
        save_words(folder / name)
        config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
        model = transformers.GPT2LMHeadModel(config)
        save_sharp(model, folder / name)
        if name == "after":
            with torch.no_grad():
                model.transformer.h[3].attn.c_attn.weight[:, 16:24] *= 1.2
            model.save_pretrained(folder / name)
        found.append(measure_into(folder / f"stats-{name}", folder / name, docs))
    return {
        "heads": atlas(found[0]).save(folder / "heads.html"),
        "compared": atlas(*found).save(folder / "compared.html"),
    }


def main(folder: Path | None) -> None:
    """Draw the four pictures of the docs, or every page, theme and size into a folder."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as made:
        path, browser = Path(made, "page.html"), Chromium(Path(made, "profile"))
        path.write_text(document(), encoding="utf-8")
        try:
            for name, link in SHOWN.items():
                drawn = [(link, SIZES[0], IMAGES / f"page-{name}.png")]
                if folder is not None:
                    folder.mkdir(parents=True, exist_ok=True)
                    themed = {theme: link.rpartition("=")[0] + f"={theme}" for theme in ("light", "dark")}
                    drawn = [
                        (themed[theme], size, folder / f"{name}-{theme}-{size[0]}.png")
                        for theme in themed for size in SIZES
                    ]  # fmt: skip
                for shown, size, target in drawn:
                    browser.size(*size)
                    browser.open(f"file://{path}#{shown}")
                    browser.until("document.querySelector('.heads')?.dataset.drawn")
                    browser.until("!document.getElementById('regard').dataset.busy")
                    browser.run("await new Promise((done) => setTimeout(done, 200));")
                    target.write_bytes(browser.picture())
            for name, made_page in atlases(Path(made)).items():
                browser.size(*SIZES[0])
                browser.open(f"file://{made_page}#theme={'dark' if name == 'compared' else 'light'}")
                browser.until("document.getElementById('regard').dataset.drawn")
                (IMAGES / f"atlas-{name}.png").write_bytes(browser.picture())
        finally:
            browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else None)
