"""The page: what it embeds is what was given, it loads nothing, and no token can break out of it."""

import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import regard
from regard.errors import ArgumentError, NonFiniteError, ShapeError, TooLargeError
from regard.views.html.page import PRECISIONS, Example, Map, page, save_page, script
from regard.views.labels import printable
from tests.views.written_dates import LOCALES, decoded, embedded, sentence, softmax, words, written

EVIL = [
    "</script><script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "<!--",
    "'\"&amp;",
    "\ud800",
    "\u2028",
    "",
]


class Reader(HTMLParser):
    """The elements of a document, as a browser would find them: scripts end at the first end tag."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self.attributes += attributes
        self.texts.append("")

    def handle_data(self, data: str) -> None:
        if self.texts:
            self.texts[-1] += data


def test_half_precision_is_as_close_as_the_page_says() -> None:
    weights = np.concatenate([softmax(3, 7, 11), np.geomspace(1e-9, 1, 77).reshape(1, 7, 11)]).astype(np.float64)
    (map_,) = embedded(page([Example("", {"x.0": Map(weights)})]))["examples"][0]["maps"]
    np.testing.assert_allclose(decoded(map_), weights, rtol=0.0005, atol=3e-8)
    assert map_["shape"] == [4, 7, 11]


def test_eight_bits_are_as_close_as_the_page_says() -> None:
    weights = softmax(3, 7, 11) * 5
    data = embedded(page([Example("", {"x.0": Map(weights)})], precision="uint8"))
    (map_,) = data["examples"][0]["maps"]
    np.testing.assert_allclose(decoded(map_), weights, rtol=0, atol=0.002 * weights.max())
    assert map_["top"] == pytest.approx(weights.max())
    assert data["note"] == PRECISIONS["uint8"]


def test_eight_bits_halve_the_page() -> None:
    example = Example("", {"x.0": Map(softmax(4, 100, 100))})
    half, eighth = (len(page([example], precision=precision)) for precision in ("float16", "uint8"))
    assert half - eighth == pytest.approx(4 * 100 * 100 * 4 / 3, rel=0.001)


def test_maps_labels_and_order_arrive() -> None:
    data = embedded(page([sentence("fr"), sentence("ar")], title="Dates"))
    assert data["title"] == "Dates"
    french, arabic = data["examples"]
    assert [(one["kind"], one["layer"]) for one in french["maps"]] == [
        ("encoder", "0"),
        ("decoder cross", "0"),
        ("decoder cross", "1"),
    ]
    assert french["show"] == 1
    assert french["labels"] == [[{" ": "␣"}.get(word, word) for word in words(written("fr"))], [*"2026-11-21", "⟨/s⟩"]]
    assert [one["rows"] for one in french["maps"]] == [0, 1, 1]
    assert [one["columns"] for one in french["maps"]] == [0, 0, 0]
    assert arabic["directions"] == ["rtl", "ltr"]


def test_lazy_maps_are_read_head_by_head() -> None:
    query, key = torch.randn(1, 3, 5, 4), torch.randn(1, 3, 7, 4)
    weights = regard.attention(query, key, key, return_weights=True).weights
    (map_,) = embedded(page([Example("", {"x": Map(weights[0])})]))["examples"][0]["maps"]
    np.testing.assert_allclose(decoded(map_), weights.dense()[0].numpy(), rtol=0.0005, atol=5e-6)


def test_a_matrix_is_one_head_and_long_maps_are_pooled() -> None:
    weights = softmax(20, 30)
    (map_,) = embedded(page([Example("", {"x": Map(weights)})], max_cells=10))["examples"][0]["maps"]
    assert map_["shape"] == [1, 10, 10]
    assert map_["block"] == [2, 3]
    expected = weights.reshape(10, 2, 10, 3).max((1, 3))[None]
    np.testing.assert_allclose(decoded(map_), expected, rtol=0.0005)


def test_nothing_is_loaded_from_elsewhere() -> None:
    text = page([sentence(locale) for locale in LOCALES])
    reader = Reader(text)
    assert not {"link", "img", "iframe", "object", "embed", "base", "audio", "video"} & set(reader.elements)
    assert not {"src", "href", "srcset", "action"} & {name for name, _ in reader.attributes}
    assert not re.search(r"https?:|//[a-z]+\.|@import|url\(|\bfetch\(|XMLHttpRequest|import\(", text)
    # And the browser is told to refuse what the check above may have missed.
    assert any("default-src 'none'" in (value or "") for _, value in reader.attributes)


def test_tokens_and_titles_cannot_break_out() -> None:
    example = Example(EVIL[0], {"x": Map(softmax(len(EVIL), len(EVIL)), EVIL, EVIL)})
    plain = Example("a", {"x": Map(softmax(len(EVIL), len(EVIL)), None, None)})
    text = page([example], title="</title>" + EVIL[1])
    assert Reader(text).elements == Reader(page([plain])).elements
    data = embedded(text)
    assert data["examples"][0]["labels"] == [[printable(token) for token in EVIL]]
    assert data["examples"][0]["title"] == EVIL[0]
    assert "</title>&quot;" not in text
    assert re.search(r"<title>&lt;/title&gt;&quot;&gt;&lt;img", text)


def test_slots_in_a_token_are_not_filled() -> None:
    text = page([Example("{{script}}", {"x": Map(np.eye(1), ["{{style}}"], ["{{data}}"])})], title="{{data}}")
    assert embedded(text)["examples"][0]["labels"] == [["{{style}}"], ["{{data}}"]]
    assert "<title>{{data}}</title>" in text


def test_the_script_is_one_module_and_builds_no_markup() -> None:
    code = script()
    assert "</" not in code
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", code)
    names = re.findall(r"^(?:export )?(?:function|const|let) (\w+)", code, re.MULTILINE)
    assert len(names) == len(set(names)), [a for a, b in pairwise(sorted(names)) if a == b]


def test_a_page_too_large_is_refused_before_a_weight_is_computed() -> None:
    class Never:
        shape = (12, 4096, 4096)

        def __getitem__(self, index: Any) -> Any:
            raise AssertionError("computed")

    with pytest.raises(TooLargeError, match=r"384\.0 MiB.*64\.0 MiB.*uint8") as caught:
        page([Example("", {str(layer): Map(Never()) for layer in range(48)})])
    assert "limit" in str(caught.value)
    with pytest.raises(TooLargeError):
        page([sentence()], limit_bytes=100)
    assert page([sentence()], limit_bytes=2**20)


@pytest.mark.parametrize(
    ("examples", "options", "error", "says"),
    [
        ([], {}, ArgumentError, "at least one example"),
        ([Example("", {})], {}, ArgumentError, "at least one map"),
        ([sentence()], {"precision": "float8"}, ArgumentError, "float8"),
        ([sentence()], {"max_cells": 0}, ArgumentError, "max_cells"),
        ([Example("", {"a": Map(np.eye(2))}, show="b")], {}, ArgumentError, "maps a; got 'b'"),
        ([Example("", {"a": Map(-np.eye(2))})], {}, ArgumentError, r"'a'.*-1\.0"),
        ([Example("", {"a": Map(np.full((1, 1), 1e5))})], {}, ArgumentError, "uint8"),
        ([Example("", {"a": Map(np.ones((1, 1, 2, 2)))})], {}, ShapeError, r"'a'.*\(1, 1, 2, 2\)"),
        ([Example("", {"a": Map(np.ones((1, 0, 2)))})], {}, ShapeError, r"\(1, 0, 2\)"),
        ([Example("", {"a": Map(np.ones((1, 2, 2)), ["x"])})], {}, ShapeError, "2 expected, 1 came"),
        ([Example("", {"a": Map(np.full((1, 2, 2), np.nan))})], {}, NonFiniteError, "nan"),
    ],
)
def test_what_cannot_be_shown_is_refused(
    examples: list[Example], options: dict[str, Any], error: type[regard.RegardError], says: str
) -> None:
    with pytest.raises(error, match=says):
        page(examples, **options)


def test_save_writes_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "page.html"
    assert save_page(path, [sentence("th")], title="ชื่อ") == path
    before = path.read_text(encoding="utf-8")
    with path.open(encoding="utf-8") as reader:
        save_page(path, [sentence("ko")])
        assert reader.read() == before, "the file was written over, not replaced"
    save_page(path, [sentence("th")], title="ชื่อ")
    assert before == page([sentence("th")], title="ชื่อ")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save_page(path, [sentence("he")])
    assert path.read_text(encoding="utf-8") == before
    assert [file.name for file in tmp_path.iterdir()] == ["page.html"]
