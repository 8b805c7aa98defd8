"""Draw the pictures of the uses, from the scripts of their pages: `python docs/make_use_pictures.py sources relevance`.

Without a name, those of all pages but atoms, which needs rxnmapper: `make consumers ONLY=rxnmapper`, and its Python.
"""

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import torch

from regard.views import Panel, heatmap, heatmap_grid, save_figure

DOCS = Path(__file__).parent.absolute()
BARE: dict[str, Any] = {"scale": "linear", "colour_bar": False, "annotate": True}


def picture(names: dict[str, Any]) -> Any:
    """The mean weights of both words on the tokens of the picture, cell by cell."""
    rows, columns = [[f"{n}" for n in range(names[side])] for side in ("HIGH", "WIDE")]
    words = names["text"][0, -2:].tolist()
    titles = [f"word {word}: {of}" for word, of in zip(words, ("row 1", "column 3"), strict=True)]
    grids = names["heat"].unflatten(1, (len(rows), len(columns)))
    return heatmap_grid([Panel(one, rows, columns, title) for title, one in zip(titles, grids, strict=True)], **BARE)


def sources(names: dict[str, Any]) -> Any:
    documents = [f"{n}" for n in range(names["DOCUMENTS"])]
    pairs = torch.cat([names["answer"], names["source"]], 1).tolist()
    asked = [f"{word}/{n}" for word, n in pairs]
    titles = "answer / its document", "weight on document"
    return heatmap(names["read"][:5], asked[:5], documents, axis_titles=titles, figsize=(4, 3.2), **BARE).figure


def retrieval(names: dict[str, Any]) -> Any:
    layers, heads = [f"L{n}" for n in range(2)], [f"H{n}" for n in range(4)]
    titles = {"retrieval score": names["scores"], "weight on the first token": names["sinks"]}
    return heatmap_grid([Panel(one, layers, heads, title) for title, one in titles.items()], **BARE)


def relevance(names: dict[str, Any]) -> Any:
    both = torch.stack([names["rolled"][0, 1:], names["row"].detach()])
    shares = both / both.sum(-1, keepdim=True)
    return heatmap(shares, ["rollout", "relevance"], names["words"][1:], axis_titles=("", ""), **BARE).figure


def time(names: dict[str, Any]) -> Any:
    """Each token of the first recording from its begin to its end, and the begin that transformers tells."""
    (begins, ends), theirs = names["times"][0], names["theirs"]["token_timestamps"][0]
    figure, axes = plt.subplots(figsize=(7, 2.8), layout="constrained")
    places = range(len(begins))
    axes.barh(places, ends - begins, left=begins, color="#6c8ebf", label="by align.dtw")
    axes.plot(theirs[: len(begins)], places, "k|", markersize=11, label="begins by transformers")
    axes.set(xlabel="seconds", yticks=places, yticklabels=[f"token {n}" for n in names["text"][0, : len(begins)]])
    axes.invert_yaxis()
    axes.legend()
    return figure


def atoms(names: dict[str, Any]) -> Any:
    labels = [[names["tokens"][n] for n in names[side]] for side in ("product", "reactants")]
    part = names["weights"].only(rows=names["product"], columns=names["reactants"])
    return heatmap(part, *labels, axis_titles=("atoms of the amide", "atoms of its reactants"), scale="linear").figure


PAGES: dict[str, tuple[str, Callable[[dict[str, Any]], Any]]] = {
    "where-a-picture": ("picture", picture),
    "sources": ("sources", sources),
    "retrieval-heads": ("retrieval", retrieval),
    "relevance": ("relevance", relevance),
    "words-in-time": ("time", time),
    "atoms": ("atoms", atoms),
}

if __name__ == "__main__":
    for page in sys.argv[1:] or [page for page in PAGES if page != "atoms"]:
        name, draw = PAGES[page]
        text, names = (DOCS / f"uses/{page}.md").read_text(encoding="utf-8"), dict[str, object]()
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            exec(text.partition("```python\n")[2].partition("```")[0], names)
            print(save_figure(draw(names), DOCS / f"images/use-{name}.png"))
            os.chdir(DOCS)
