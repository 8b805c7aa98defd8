"""The kernel's side of `regard.view`: exact answers to any question, by torch and NumPy, and refusals."""

import html
import json
import re
import sys
from base64 import b64decode
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

import regard
from regard.call.scores.base import ScaledDot
from regard.errors import ArgumentError, NonFiniteError, RegardError
from regard.maps.statistics.pooling import Bins
from regard.views import Example, Map, model_example
from regard.views.widget.replies import Replier, recomputed
from tests.modules import watching
from tests.views.notebook import Carried, carried_comms
from tests.views.written_dates import embedded

HEADS, QUERIES, KEYS, DIM = 3, 70, 83, 5


def factors(*batch: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(seed)
    q = 2 * torch.randn(*batch, HEADS, QUERIES, DIM, generator=made)
    return q, 2 * torch.randn(*batch, HEADS, KEYS, DIM, generator=made)


def softmaxed(q: Tensor, k: Tensor, *, temperature: float = 1.0, is_causal: bool = True) -> np.ndarray[Any, Any]:
    scores = q.double() @ k.double().mT / DIM**0.5 / temperature
    if is_causal:
        late = torch.arange(KEYS) > torch.arange(QUERIES)[:, None] + KEYS - QUERIES
        scores = scores.masked_fill(late, -torch.inf)
    return scores.softmax(-1).numpy()


def causal_map(q: Tensor, k: Tensor) -> regard.AttentionMap:
    weights = regard.map_of(*(one if q.dim() > 3 else one[None] for one in (q, k)), mask=regard.causal())
    return weights if q.dim() > 3 else cast(regard.AttentionMap, weights[0])


def asked(answers: Replier, **question: Any) -> tuple[dict[str, Any], list[np.ndarray[Any, Any]]]:
    content, buffers = answers.to({"example": 0, "map": 0, "head": 0} | question)
    return content, [np.frombuffer(one, "<f4") for one in buffers]


@pytest.mark.parametrize("sequence", [0, 1])
@pytest.mark.parametrize("head", [0, 2, "mean"])
def test_every_answer_is_exact_for_each_head_of_each_item_of_a_batch(sequence: int, head: Any) -> None:
    q, k = factors(2)
    answers = Replier([model_example([causal_map(q, k)], sequence=sequence)])
    every = softmaxed(q[sequence], k[sequence])
    expected = every.mean(0) if head == "mean" else every[head]

    def same(found: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any]) -> None:
        np.testing.assert_allclose(found, wanted.reshape(-1), atol=1e-5)

    same(asked(answers, ask="dense", head=head)[1][0], expected)
    same(asked(answers, ask="row", head=head, at=41)[1][0], expected[41])
    same(asked(answers, ask="column", head=head, at=17)[1][0], expected[:, 17])
    for top, bottom, left, right in ((0, QUERIES, 0, KEYS), (3, 60, 11, 80), (69, 70, 82, 83)):
        window = {"ask": "tile", "head": head, "window": [top, bottom, left, right]}
        same(asked(answers, **window, cells=[100, 100])[1][0], expected[top:bottom, left:right])
        largest, mean = np.empty((2, 7, 9))
        rows, columns = Bins(bottom - top, min(7, bottom - top)), Bins(right - left, min(9, right - left))
        if rows.count < 7:
            continue
        for i, some in enumerate(rows.ranges()):
            for j, others in enumerate(columns.ranges()):
                block = expected[top + some.start : top + some.stop, left + others.start : left + others.stop]
                largest[i, j], mean[i, j] = block.max(), block.mean()
        content, (found, means) = asked(answers, **window, cells=[7, 9])
        assert content == {"window": [top, bottom, left, right], "grid": [7, 9]}
        same(found, largest), same(means, mean)
    _, buffers = answers.to({"ask": "strongest", "example": 0, "map": 0, "head": head})
    np.testing.assert_array_equal(np.frombuffer(buffers[0], "<i4"), expected.argmax(-1))
    same(np.frombuffer(buffers[1], "<f4"), expected.max(-1))


def test_the_numbers_of_heads_come_with_their_own_pictures() -> None:
    q, k = factors()
    every = softmaxed(q, k)
    answers = Replier([Example("", {"0": Map(causal_map(q, k))})])
    content, buffers = answers.to({"ask": "numbers", "example": 0, "map": 0, "head": 1})
    assert (content["heads"], content["grid"], content["pictures"]) == ([0, 3], [64, 64], ["largest", "mean"])
    np.testing.assert_allclose(content["largest"], every.max((1, 2)), rtol=1e-5)
    np.testing.assert_allclose(content["withoutSink"], every[..., 1:].max((1, 2)), rtol=1e-5)
    largest = np.frombuffer(buffers[0], "<f4").reshape(3, 64, 64)
    assert largest[1].max() == pytest.approx(every[1].max(), rel=1e-5)
    spans = np.frombuffer(buffers[2], "<u4").reshape(-1, 2)
    np.testing.assert_array_equal(spans[:, 1], np.arange(QUERIES) + KEYS - QUERIES + 1)


@pytest.mark.parametrize("temperature", [0.05, 1.0, 3.0])
@pytest.mark.parametrize("mask", ["own", "none", "causal"])
@pytest.mark.parametrize("head", [1, "mean"])
def test_another_temperature_and_mask_are_computed_as_torch_does(temperature: float, mask: str, head: Any) -> None:
    q, k = factors()
    answers = Replier([Example("", {"0": Map(causal_map(q, k))})])
    every = softmaxed(q, k, temperature=temperature, is_causal=mask != "none")
    expected = every.mean(0) if head == "mean" else every[head]
    _, (found,) = asked(answers, ask="dense", head=head, temperature=temperature, mask=mask)
    np.testing.assert_allclose(found, expected.reshape(-1), atol=1e-5)
    _, (colder,) = asked(answers, ask="row", at=69, head=head, temperature=0.5, mask=mask)
    sharper = softmaxed(q, k, temperature=0.5, is_causal=mask != "none")
    np.testing.assert_allclose(colder, (sharper.mean(0) if head == "mean" else sharper[head])[69], atol=1e-5)
    _, (own,) = asked(answers, ask="dense", head=1)
    np.testing.assert_allclose(own, softmaxed(q, k)[1].reshape(-1), atol=1e-5)


def test_grouped_heads_and_a_watched_model_can_be_recomputed() -> None:
    q, k = factors()
    grouped = regard.map_of(q[:2], k[:1], mask=regard.causal())
    found = recomputed(grouped, 2.0, "none").dense().numpy()
    np.testing.assert_allclose(found, softmaxed(q[:2], k[:1], temperature=2.0, is_causal=False), atol=1e-5)
    layer = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    x = torch.randn(1, 5, 8)
    seen = watching(layer)(x, x, x)
    (entry,) = regard.view(seen).data["examples"][0]["maps"]  # type: ignore[attr-defined]
    assert entry["factors"] is not None


@pytest.mark.parametrize(
    "other",
    [
        lambda q, k: regard.map_of(q[None], k[None], bias=torch.zeros(QUERIES, KEYS))[0],
        lambda q, k: regard.map_of(q[None], k[None], normalization=regard.Sparsemax())[0],
        lambda q, k: torch.full((2, 3, 3), 1 / 3),
    ],
)
def test_what_is_no_softmax_of_dot_products_is_not_offered(other: Callable[..., Any]) -> None:
    answers = Replier([Example("", {"0": Map(other(*factors()))})])
    with pytest.raises(ArgumentError, match="only a softmax of scaled dot products"):
        answers.to({"ask": "row", "example": 0, "map": 0, "head": 0, "at": 0, "temperature": 2.0})


@pytest.mark.parametrize(
    ("question", "message"),
    [
        ({"ask": "weights"}, "got 'weights'"),
        ({}, "got 'None'"),
        ({"ask": "row", "at": QUERIES}, f"from 0 to {QUERIES - 1}; got {QUERIES}"),
        ({"ask": "row", "at": -1}, "got -1"),
        ({"ask": "row", "at": True}, "got True"),
        ({"ask": "row", "at": "3"}, "got '3'"),
        ({"ask": "column", "at": KEYS}, f"got {KEYS}"),
        ({"ask": "row", "at": 0, "head": HEADS}, f"head must be .* got {HEADS}"),
        ({"ask": "row", "at": 0, "head": "median"}, "got 'median'"),
        ({"ask": "row", "at": 0, "map": 1}, "map must be"),
        ({"ask": "row", "at": 0, "example": None}, "example must be"),
        ({"ask": "tile", "window": [0, 0, 0, 5], "cells": [2, 2]}, "a window lies within"),
        ({"ask": "tile", "window": [0, 9, 0, KEYS + 1], "cells": [2, 2]}, "a window lies within"),
        ({"ask": "tile", "window": [0, 9, 0], "cells": [2, 2]}, "window must be 4 whole numbers"),
        ({"ask": "tile", "window": [0, 9, 0, 9], "cells": [2, 5000]}, "got 2 x 5000"),
        ({"ask": "tile", "window": [0, 9, 0, 9], "cells": "22"}, "cells must be 2 whole numbers"),
        ({"ask": "row", "at": 0, "temperature": float("nan")}, "temperature must be"),
        ({"ask": "row", "at": 0, "temperature": 0.0}, "temperature must be"),
        ({"ask": "row", "at": 0, "temperature": "warm"}, "got 'warm' and 'own'"),
        ({"ask": "row", "at": 0, "mask": "future"}, "'future'"),
        ({"ask": "row", "at": 0, "mask": ["none"]}, "the mask one of own, none, causal"),
    ],
)
def test_a_question_beyond_the_map_is_refused(question: dict[str, Any], message: str) -> None:
    answers = Replier([Example("", {"0": Map(causal_map(*factors()))})])
    with pytest.raises(ArgumentError, match=message):
        answers.to({"example": 0, "map": 0, "head": 0} | question)


@dataclass(frozen=True, slots=True)
class Unread(ScaledDot):
    def block(self, query: Tensor, key: Tensor) -> Tensor:
        raise AssertionError("a weight was read")


def test_making_a_view_and_its_repr_compute_nothing() -> None:
    q = torch.randn(1, 2, 2000, 4)
    made = regard.view(regard.map_of(q, q, score=Unread()), title="long")
    assert repr(made) == "View('long', 1 map: 0 (2 heads, 2000 x 2000))"
    assert made.still is None
    many = regard.view([regard.map_of(q, q, score=Unread())] * 9)
    assert repr(many).endswith("3 (2 heads, 2000 x 2000), and 5 more)")


def test_bad_input_is_refused_with_one_line() -> None:
    one = Map(torch.eye(2), ["a", "b"], ["a", "b"])
    for call, message in (
        (lambda: regard.view([]), "there are no maps"),
        (lambda: regard.view([np.eye(2)]), "got ndarray"),  # type: ignore[arg-type]
        (lambda: regard.view([Example("", {})]), "at least one map"),
        (lambda: regard.view([Example("", {"0": one}, "1")]), "one of the maps 0; got '1'"),
        (lambda: regard.view([Example("", {"0": one})], ["a", "b"]), "leave tokens, source and sequence out"),
        (
            lambda: regard.view([Example("", {"0": Map(torch.eye(2), ["a"], ["b"])})]),
            "must hold one label a token: 2 expected, 1 came",
        ),
        (lambda: regard.view(causal_map(*factors()), ["one"]), "1 labels came for maps of 70, 83"),
        (lambda: regard.view(causal_map(*factors()), sequence=1), r"in \[0, 1\), got 1"),
        (lambda: regard.view([Example("", {"0": one})], sequence=1), "leave tokens, source and sequence out"),
        (lambda: regard.view(causal_map(*factors()), height=20), "from 300 up; got 20"),
        (lambda: regard.view(causal_map(*factors()), link=7), "link must be text; got 7"),  # type: ignore[arg-type]
    ):
        with pytest.raises(RegardError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_without_anywidget_a_picture_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "anywidget", None)
    made: Any = regard.view(causal_map(*factors()), title="mine", link="heads=2")
    data, _ = made._repr_mimebundle_()
    assert data["text/html"].count("<img ") == 1
    install = "anywidget is not installed; it comes with the extra 'notebook': pip install 'regard[notebook]'"
    assert html.unescape(data["text/html"]).endswith(f"<p>No interactive view: {install}</p>")
    assert data["text/plain"] == f"{made!r}\nNo interactive view: {install}"
    assert repr(made) == "View('mine', 1 map: 0 (3 heads, 70 x 83))"
    assert made.link == "heads=2"
    assert "mine" in made.save(tmp_path / "page.html").read_text(encoding="utf-8")
    made.close()
    with pytest.raises(ArgumentError, match="there are no maps"):
        regard.view([])
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert re.search(r"no picture: .*regard\[view\].*\n.*regard\[notebook\]", made._repr_mimebundle_()[0]["text/plain"])


def test_the_picture_of_a_view_shows_words() -> None:
    """Below the grid of every head stands one map with its labels."""
    maps = [one.weights for one in (regard.attention(*torch.randn(3, 1, 2, 3, 4), return_weights=True),) * 2]
    with carried_comms():
        worded: Any = regard.view(maps, ["le", "chat", "dort"])
        bare: Any = regard.view(maps)
    assert [one.picture().count("<img ") for one in (worded, bare)] == [2, 1]
    assert 'alt="1, mean of 2 heads"' in worded.picture()


def test_a_notebook_without_widgets_has_a_picture_of_all_but_long_maps() -> None:
    with carried_comms():
        short: Any = regard.view(causal_map(*factors()))
        long: Any = regard.view(regard.map_of(*torch.randn(2, 1, 1, 5000, 4), score=Unread()))
    assert short.picture().count("<img ") == 1
    assert "<img" not in long.picture()
    for one in (short, long):
        assert "run the cell to point at its words" in one.picture()


def test_each_view_answers_over_its_own_comm_and_outlives_a_bad_question() -> None:
    q, k = factors()
    with carried_comms():
        views = [regard.view(causal_map(n * q, k)) for n in (1, 2)]
    comms: list[Carried] = [one.comm for one in views]  # type: ignore[attr-defined]
    for one in comms:
        one.taken()
    for question in ({"ask": "row", "at": -5}, {"ask": "row", "at": 3}):
        content = {"kind": "question", "id": "x", "example": 0, "map": 0, "head": 0, **question}
        comms[1].handle_msg({"content": {"data": {"method": "custom", "content": content}}, "buffers": []})
    assert comms[0].taken() == []
    (_, refused, _), (_, answered, buffers) = comms[1].taken()
    assert refused["content"]["error"].startswith("ArgumentError: at must be a whole number")
    assert answered["content"] == {"kind": "answer", "id": "x"}
    np.testing.assert_allclose(np.frombuffer(buffers[0], "<f4"), softmaxed(2 * q, k)[0, 3], atol=1e-5)


def test_a_cell_gets_the_view_and_after_it_the_last_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    from IPython.core import display_functions
    from IPython.core.interactiveshell import InteractiveShell

    published: list[dict[str, Any]] = []
    monkeypatch.setattr(InteractiveShell, "initialized", lambda: True)
    monkeypatch.setattr(display_functions, "publish_display_data", lambda **given: published.append(given))
    with carried_comms():
        made: Any = regard.view(causal_map(*factors()))
    made._ipython_display_()
    made.comm.handle_msg({"content": {"data": {"method": "custom", "content": {"kind": "still"}}}, "buffers": [b"PNG"]})
    shown, still, again = published
    for one in published:
        assert isinstance(one["data"], dict)
        assert isinstance(one.get("metadata") or {}, dict)
    assert shown["data"]["application/vnd.jupyter.widget-view+json"]["model_id"] == made.model_id
    assert (still["transient"], again["transient"]) == ({"display_id": made.place},) * 2
    assert "data:image/png;base64,UE5H" not in still["data"]["text/html"]
    assert again["update"] is True
    assert "data:image/png;base64,UE5H" in again["data"]["text/html"]


def test_a_weight_that_is_not_finite_is_an_error_and_no_picture() -> None:
    answers = Replier([Example("", {"x": Map(torch.tensor([[0.5, float("nan")]]))})])
    for ask in ("numbers", "dense"):
        with pytest.raises(NonFiniteError, match="weights must be finite"):
            answers.to({"ask": ask, "example": 0, "map": 0, "head": 0})


def test_statistics_that_were_kept_are_carried_whole() -> None:
    layer = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    x = torch.randn(1, 90, 8)
    seen = watching(layer, keep="summary")(x, x, x)
    made = regard.view(seen)
    data = made.data  # type: ignore[attr-defined]
    (entry,) = data["examples"][0]["maps"]
    assert "kernel" not in entry
    places = [one for picture in entry["pictures"] for one in (picture["largest"], picture["mass"]) if one is not None]
    assert places
    assert max(places) < len(data["arrays"])
    assert all(b64decode(data["arrays"][place]["data"]) for place in places)


def test_the_page_that_a_view_saves_can_be_recomputed_where_it_is_short(tmp_path: Path) -> None:
    short, long = (regard.map_of(*(torch.randn(1, 2, n, 8),) * 2, mask=regard.causal()) for n in (9, 3000))
    made = regard.view([Example("one", {"short": Map(short[0])})], title="saved")
    data = embedded(made.save(tmp_path / "page.html").read_text(encoding="utf-8"))
    assert data["title"] == "saved"
    assert set(data["examples"][0]["maps"][0]["factors"]["heads"]) == {"0", "1"}
    from regard.views.widget.view import maps_with_factors

    assert maps_with_factors([Example("", {"short": Map(short[0]), "long": Map(long[0])})], 1.0) == ["short"]
    assert json.dumps(made.data)  # type: ignore[attr-defined]
