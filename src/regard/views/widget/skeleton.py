"""The initial data of a view: tokens, names and sizes, without any weight."""

import json
import re
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from regard.maps.attention_map import AttentionMap
from regard.views.html.arrays import Arrays
from regard.views.html.contents import Example, TokenLists, contents, example_entry, layer_names
from regard.views.html.factors import why_no_softmax
from regard.views.html.page import one_module, page_colours, resource, script
from regard.views.labels import axis_labels

OWN_MODULES = ("questions.js", "kernel_weights.js", "still.js", "widget.js")
"""The files of the widget's JavaScript; each uses only those before it, and those of the page."""
EXACTLY = "Weights come from the kernel in single precision."


def skeleton(examples: Sequence[Example], maps: Sequence[Sequence[AttentionMap]], title: str) -> dict[str, Any]:
    arrays = Arrays(float("inf"))
    shown = [_entry(example, heads, arrays) for example, heads in zip(examples, maps, strict=True)]
    return {
        "title": title,
        "note": EXACTLY,
        "carried": None,
        "colours": page_colours(),
        "examples": shown,
        "arrays": [None if one is None else one.as_json() for one in arrays.held],
    }


def _entry(example: Example, maps: Sequence[AttentionMap], arrays: Arrays) -> dict[str, Any]:
    lists, names = TokenLists(arrays), layer_names(example.maps)
    entries: list[dict[str, Any]] = []
    for (name, one), heads in zip(example.maps.items(), maps, strict=True):
        count, queries, keys = heads.shape
        places = {
            "kind": names[name].kind,
            "layer": names[name].layer,
            "rows": lists.place(axis_labels(one.rows, queries, "rows"), given=one.rows is not None),
            "columns": lists.place(axis_labels(one.columns, keys, "columns"), given=one.columns is not None),
        }
        if heads.source.has_blocks:
            factors = {"heads": {str(head): -1 for head in range(count)}} if not why_no_softmax(heads) else None
            entries.append({
                **places, "name": name, "shape": [count, queries, keys], "kernel": True,
                "mean": count > 1, "scale": 1, "spans": None, "pictures": [], "largest": [], "withoutSink": [],
                "statistics": {}, "top": {}, "exact": {}, "finer": {}, "factors": factors,
            })  # fmt: skip
        else:
            found, _ = contents([Example("", {name: one})], arrays, None, ())
            entries.append({**found["examples"][0]["maps"][0], **places})
    return example_entry(example, entries, lists, len(names) - 1)


def live_sources() -> list[str]:
    return [_own(name) for name in ("questions.js", "kernel_weights.js")]


def _own(name: str) -> str:
    return files("regard.views.widget").joinpath(name).read_text(encoding="utf-8")


def front_end() -> str:
    """The JavaScript of the widget as one ES module that exports `default { render }`, as anywidget takes it.

    >>> text = front_end()
    >>> text.count("export "), "export default" in text, "import " in text
    (1, True, False)
    """
    own = map(_own, OWN_MODULES)
    style = f"const PAGE_STYLE = {json.dumps(resource('page.css'))};"
    return re.sub(r"(?m)^export (?!default)", "", one_module([script(), style, *own]))
