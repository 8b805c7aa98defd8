"""The page: it embeds the given weights, it loads nothing, and no token can break out of it."""

import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import regard
from regard import page
from regard.call.normalizations import Sigmoid, Softmax, SoftmaxWithSink
from regard.errors import ArgumentError, FileError, NonFiniteError, ShapeError, TooLargeError
from regard.maps import AttentionMap
from regard.views import Example, Map
from regard.views.html.page import script
from regard.views.labels import printable
from tests.views.test_page_in_a_browser import causal
from tests.views.written_dates import EMPTY_MB, LOCALES, array_of, decoded, embedded, sentence, softmax, words, written

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
    data = embedded(page([Example("", {"x.0": Map(weights)})]).text)
    (map_,) = data["examples"][0]["maps"]
    np.testing.assert_allclose(decoded(data, map_), weights, rtol=0.0005, atol=3e-8)
    assert map_["shape"] == [4, 7, 11]
    assert "0.05 %" in data["note"]


def test_weights_above_half_precision_are_scaled_by_a_power_of_two() -> None:
    weights = softmax(2, 5, 6).astype(np.float64) * 1e7
    data = embedded(page([Example("", {"x.0": Map(weights)})]).text)
    (map_,) = data["examples"][0]["maps"]
    np.testing.assert_allclose(decoded(data, map_), weights, rtol=0.0005)
    assert np.log2(map_["scale"]) % 1 == 0


def test_maps_labels_and_order_arrive() -> None:
    data = embedded(page([sentence("fr"), sentence("ar")], title="Dates").text)
    assert data["title"] == "Dates"
    french, arabic = data["examples"]
    assert [(one["kind"], one["layer"]) for one in french["maps"]] == [
        ("encoder", "0"),
        ("decoder cross", "0"),
        ("decoder cross", "1"),
    ]
    assert french["show"] == 1
    source, target = [{" ": "␣"}.get(word, word) for word in words(written("fr"))], [*"2026-11-21", "⟨/s⟩"]
    assert [one["texts"] for one in french["labels"]] == [source, target]
    assert [one["rows"] for one in french["maps"]] == [0, 1, 1]
    assert [one["columns"] for one in french["maps"]] == [0, 0, 0]
    assert [one["direction"] for one in arabic["labels"]] == ["rtl", "ltr"]


def test_the_budget_is_kept_and_spent_in_order() -> None:
    """Pictures first, then the strongest keys, then exact weights; whatever the budget, the document is within it."""
    weights = causal(200, 3)
    before: tuple[int, int] = (0, 0)
    for budget in (EMPTY_MB + more for more in (0.1, 0.15, 0.2, 0.3, 0.45, 1.0)):
        made = page([Example("", {"0": Map(weights), "1": Map(weights)}, show="1")], budget_mb=budget)
        assert len(made.text.encode()) == made.used_bytes <= budget * 1e6
        first, second = made.carried
        strongest = sum(one.of_each_query.get(16, 0) for one in made.carried)
        exact = first.exact + second.exact
        assert exact == 0 or strongest == 8, made.report()
        assert second.exact >= first.exact, "the map that is shown comes first"
        assert (strongest, exact) >= before
        before = (strongest, exact)
    assert before == (8, 8)
    with pytest.raises(TooLargeError, match=r"0\.01 MB.*budget_mb"):
        page([Example("", {"0": Map(weights)})], budget_mb=0.01)


def test_factors_are_compared_with_the_map_before_they_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = causal(150)
    made = page([Example("", {"x": Map(weights)})], factors=["x"], exact=[])
    assert made.carried[0].factors == 2
    dense = weights.dense()
    monkeypatch.setattr(AttentionMap, "block", lambda _, rows, columns, **__: dense[:, rows] * 1.001)  # planted
    with pytest.raises(ArgumentError, match=r"off by 1\.0e-03"):
        page([Example("", {"x": Map(weights)})], factors=["x"])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"bias": torch.ones(9, 9)}, "a bias"),
        ({"normalization": Sigmoid()}, "not a softmax"),
        ({"mask": regard.documents(torch.tensor([0] * 4 + [1] * 5))}, "not causal"),
    ],
)
def test_other_maps_have_no_factors(options: dict[str, Any], says: str) -> None:
    q = torch.randn(9, 4)
    weights = regard.attention(q, q, q, return_weights=True, **options).weights
    with pytest.raises(ArgumentError, match=says):
        page([Example("", {"x": Map(weights)})], factors=["x"])


def test_nothing_is_loaded_from_elsewhere() -> None:
    text = page([sentence(locale) for locale in LOCALES]).text
    reader = Reader(text)
    assert not {"link", "img", "iframe", "object", "embed", "base", "audio", "video"} & set(reader.elements)
    assert not {"src", "href", "srcset", "action"} & {name for name, _ in reader.attributes}
    assert not re.search(r"https?:|//[a-z]+\.|@import|url\(|\bfetch\(|XMLHttpRequest|import\(", text)
    # And the browser is told to refuse what the check above may have missed.
    assert any("default-src 'none'" in (value or "") for _, value in reader.attributes)


def test_tokens_and_titles_cannot_break_out() -> None:
    example = Example(EVIL[0], {"x": Map(softmax(len(EVIL), len(EVIL)), EVIL, EVIL)})
    plain = Example("a", {"x": Map(softmax(len(EVIL), len(EVIL)), None, None)})
    text = page([example], title="</title>" + EVIL[1]).text
    assert Reader(text).elements == Reader(page([plain]).text).elements
    data = embedded(text)
    assert [one["texts"] for one in data["examples"][0]["labels"]] == [[printable(token) for token in EVIL]]
    assert data["examples"][0]["title"] == EVIL[0]
    assert "</title>&quot;" not in text
    assert re.search(r"<title>&lt;/title&gt;&quot;&gt;&lt;img", text)


def test_slots_in_a_token_are_not_filled() -> None:
    text = page([Example("{{script}}", {"x": Map(np.eye(1), ["{{style}}"], ["{{data}}"])})], title="{{data}}").text
    assert [one["texts"] for one in embedded(text)["examples"][0]["labels"]] == [["{{style}}"], ["{{data}}"]]
    assert "<title>{{data}}</title>" in text


def test_the_script_is_one_module_and_builds_no_markup() -> None:
    code = script()
    assert "</" not in code
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", code)
    names = re.findall(r"^(?:export )?(?:async )?(?:function|const|let) (\w+)", code, re.MULTILINE)
    assert len(names) == len(set(names)), [a for a, b in pairwise(sorted(names)) if a == b]


@pytest.mark.parametrize(
    ("examples", "options", "error", "says"),
    [
        ([], {}, ArgumentError, "no maps to look at"),
        ([Example("", {})], {}, ArgumentError, "at least one map"),
        ([sentence()], {"budget_mb": 0}, ArgumentError, "budget_mb"),
        ([sentence()], {"exact": ["other"]}, ArgumentError, "other"),
        ([sentence()], {"factors": ["encoder.0"]}, ArgumentError, "given weights"),
        ([Example("", {"a": Map(np.eye(2))}, show="b")], {}, ArgumentError, "maps a; got 'b'"),
        ([Example("", {"a": Map(-np.eye(2))})], {}, ArgumentError, r"'a'.*below 0"),
        ([Example("", {"a": Map(np.ones((1, 1, 2, 2)))})], {}, ShapeError, r"'a'.*\(1, 1, 2, 2\)"),
        ([Example("", {"a": Map(np.ones((1, 0, 2)))})], {}, ShapeError, r"\(1, 0, 2\)"),
        ([Example("", {"a": Map(np.ones((1, 2, 2)), ["x"])})], {}, ShapeError, "2 expected, 1 came"),
        ([Example("", {"a": Map(np.full((1, 2, 2), np.nan))})], {}, NonFiniteError, "'a'.*nan.*query 0, key 0"),
        ([Example("", {"a": Map(np.array([[0.0, 1.0], [0.5, np.inf]]))})], {}, NonFiniteError, "inf.*query 1, key 1"),
        ([Example("", {"a": Map(np.array([["x"]]))})], {}, ShapeError, "<U1"),
    ],
)
def test_what_cannot_be_shown_is_refused(
    examples: list[Example], options: dict[str, Any], error: type[regard.RegardError], says: str
) -> None:
    with pytest.raises(error, match=says):
        page(examples, **options)


def test_save_writes_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "page.html"
    assert "every weight" in page([sentence("th")], path=path, title="ชื่อ").report()
    before = path.read_text(encoding="utf-8")
    with path.open(encoding="utf-8") as reader:
        page([sentence("ko")], path=path)
        assert reader.read() == before, "the file was written over, not replaced"
    page([sentence("th")], path=path, title="ชื่อ")
    assert before == page([sentence("th")], title="ชื่อ").text

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(FileError, match=r"cannot write .*page.html.*No space left"):
        page([sentence("he")], path=path)
    assert path.read_text(encoding="utf-8") == before
    assert [file.name for file in tmp_path.iterdir()] == ["page.html"]


@pytest.mark.parametrize("name", ["absent/page.html", "page.html/page.html", ".", "x" * 300 + ".html", "a\0b.html"])
def test_a_path_that_cannot_be_written_is_one_clear_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "page.html").write_text("before")
    with pytest.raises(FileError, match=r"^cannot write '.*': .+; check the path[^\n]*$"):
        page([sentence("fr")], path=f"{tmp_path}/{name}")
    assert [one.name for one in tmp_path.iterdir()] == ["page.html"]
    assert (tmp_path / "page.html").read_text() == "before"


def test_a_page_is_within_its_budget_whatever_its_labels_are() -> None:
    """Signs that HTML or JSON write with several bytes are counted as they stand in the document."""
    labels = ["<eos>", "שלום", '"\\', "\u2028"] * 60
    for budget in (0.3, 0.45, 1.0):
        made = page([Example("<" * 500, {"0": Map(causal(240), labels, labels)})], budget_mb=budget)
        assert len(made.text.encode()) == made.used_bytes <= budget * 1e6


def test_the_strongest_keys_are_paid_before_tiles_and_these_before_factors() -> None:
    """The order of the budget: what comes later is not carried before all of what comes earlier."""
    weights, seen = causal(300, 4), []
    for more in (0.1, 0.2, 0.3, 0.5, 0.8, 1.2, 1.7, 2.4):
        maps = {name: Map(weights) for name in ("a", "b", "c")}
        made = page([Example("", maps)], budget_mb=EMPTY_MB + more, exact=["a"], factors=["b"])
        a, b, c = made.carried
        strongest = all(one.of_each_query.get(16, 0) == 5 for one in made.carried)
        tiles = a.exact + sum(a.tiles.values())
        assert strongest or not tiles, made.report()
        assert (strongest and tiles == 5) or not b.factors, made.report()
        assert b.factors == 4 or not c.exact, made.report()
        seen.append((strongest, tiles, b.factors, c.exact))
    assert seen[0] == (False, 0, 0, 0)
    assert seen[-1] == (True, 5, 4, 5), seen


@pytest.mark.parametrize("normalization", [Softmax(), SoftmaxWithSink()], ids=["softmax", "sink"])
def test_what_is_left_of_a_query_is_what_its_other_keys_have(normalization: Any) -> None:
    """With rows that have no key in one head alone, and a sink that takes its share: of the heads and of their mean."""
    length, mask = 120, regard.causal() & ~regard.predicate(lambda b, h, q, k: (h == 1) & (q < 9) & (k > -1))
    q, k = torch.randn(2, 1, 3, length, 8).unbind()
    weights = regard.attention(2 * q, k, k, mask=mask, normalization=normalization, return_weights=True).weights[0]
    dense = weights.dense().double().numpy()
    data = embedded(page([Example("", {"x": Map(weights)})]).text)
    (map_,) = data["examples"][0]["maps"]
    for head, expected in enumerate([*dense, dense.mean(0)]):
        top = map_["top"][str(head)]
        shares, rest = (array_of(data, top["place"] + n) for n in (1, 2))
        np.testing.assert_allclose(shares.reshape(length, -1).sum(-1) + rest, expected.sum(-1), atol=2e-3)


def named_arrays(data: Any) -> set[int]:
    found: set[int | None] = set()
    for example in data["examples"]:
        found |= {labels["order"] for labels in example["labels"]}
        for one in example["maps"]:
            found |= {one["spans"], *(picture[name] for picture in one["pictures"] for name in ("largest", "mass"))}
            found |= {top["place"] + n for top in one["top"].values() for n in range(3)} | set(one["exact"].values())
            places = [place for levels in one["tiles"].values() for level in levels for place in level["places"]]
            found |= {place + n for place in places if place is not None for n in range(2)}
            found |= {place + n for place in (one["factors"] or {"heads": {}})["heads"].values() for n in range(3)}
    return {place for place in found if place is not None}


def test_a_page_holds_no_array_that_nothing_reads() -> None:
    """Sixteen keys of a query take the place of one; the arrays of that one are gone."""
    for more in (0.1, 0.2, 0.5, 1.5):
        maps = {name: Map(causal(300, 3)) for name in "ab"}
        data = embedded(page([Example("", maps)], budget_mb=EMPTY_MB + more, factors=["b"]).text)
        held = {place for place, one in enumerate(data["arrays"]) if one is not None}
        assert held == named_arrays(data)


def test_alternatives_are_one_list_for_each_query() -> None:
    weights, some = softmax(2, 3, 4), [[("x", 0.5)]] * 3
    data = embedded(
        page([Example("", {"0": Map(weights, None, None, some), "1": Map(weights, None, None, some)})]).text
    )
    assert data["examples"][0]["alternatives"] == [[[["x", 0.5]]] * 3]
    assert [one["alternatives"] for one in data["examples"][0]["maps"]] == [0, 0]
    with pytest.raises(ShapeError, match="each of its 3 queries; 2 came"):
        page([Example("", {"0": Map(weights, None, None, some[:2])})])
    with pytest.raises(ArgumentError, match=r"0\.\.1; got \('x', 2\.0\)"):
        page([Example("", {"0": Map(weights, None, None, [[("x", 2)]] * 3)})])
