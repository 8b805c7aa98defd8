"""The page's script, run by node where it is: its numbers against NumPy's, and its state."""

import json
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from regard.views.html.page import Example, Map, page, script
from tests.views.written_dates import decoded, embedded, sentence, softmax

NODE = shutil.which("node") or ""
pytestmark = pytest.mark.skipif(not NODE, reason="node is not installed: the page's script is not run")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Run an expression over the page's module `page` and JSON `data`; its value comes back as JSON."""
    folder = tmp_path_factory.mktemp("script")
    # The inner functions are exported too, so that they can be called one by one.
    (folder / "page.mjs").write_text(
        script().replace("\nfunction ", "\nexport function ").replace("\nexport export ", "\nexport "), encoding="utf-8"
    )

    def call(expression: str, data: Any = None) -> Any:
        program = f"""
import * as page from "./page.mjs";
import {{ readFileSync }} from "node:fs";
const data = JSON.parse(readFileSync(0, "utf-8"));
const plain = (value) => ArrayBuffer.isView(value) ? [...value].map(Number) : value;
process.stdout.write(JSON.stringify({expression}, (_, value) => plain(value)));
"""
        (folder / "main.mjs").write_text(program, encoding="utf-8")
        ran = subprocess.run([NODE, "main.mjs"], cwd=folder, input=json.dumps(data), capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        return json.loads(ran.stdout)

    return call


def test_every_half_precision_number(run: Callable[..., Any]) -> None:
    expected = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float64)
    values = run("Array.from({length: 65536}, (_, bits) => String(page.halfToNumber(bits)))")
    np.testing.assert_array_equal(np.array([float(value) for value in values]), expected)


@pytest.mark.parametrize("precision", ["float16", "uint8"])
def test_the_script_reads_what_was_written(run: Callable[..., Any], precision: Any) -> None:
    weights = softmax(2, 5, 7) * 3
    (map_,) = embedded(page([Example("", {"x": Map(weights)})], precision=precision))["examples"][0]["maps"]
    values = np.array(run("page.decodeMap(data)", map_)).reshape(2, 5, 7)
    np.testing.assert_allclose(values, decoded(map_), rtol=1e-7)
    for head, expected in ((1, values[1]), ("mean", values.mean(0))):
        read = run("page.headWeights(page.decodeMap(data.map), data.map.shape, data.head)", {"map": map_, "head": head})
        np.testing.assert_allclose(np.array(read).reshape(5, 7), expected, rtol=1e-6)


def test_rows_columns_and_peaks(run: Callable[..., Any]) -> None:
    weights = softmax(5, 7).astype(np.float64)
    data = weights.ravel().tolist()
    np.testing.assert_array_equal(run("page.rowOf(data, 7, 3)", data), weights[3])
    np.testing.assert_allclose(run("page.columnOf(data, 7, 4)", data), weights[:, 4], rtol=1e-7)
    top = run("page.strongest(page.rowOf(data, 7, 3), 3)", data)
    order = np.argsort(-weights[3])
    assert [one["index"] for one in top["top"]] == order[:3].tolist()
    assert top["others"] == 4
    assert top["sum"] == pytest.approx(weights[3, order[3:]].sum())


def test_thumbnails_keep_the_peaks(run: Callable[..., Any]) -> None:
    weights = softmax(12, 20)
    small = run("page.shrink(data, 12, 20, 4)", weights.ravel().tolist())
    assert (small["height"], small["width"]) == (4, 4)
    expected = weights.reshape(4, 3, 4, 5).max((1, 3))
    np.testing.assert_allclose(np.array(small["weights"]).reshape(4, 4), expected, rtol=1e-6)
    narrow = run("page.shrink(data, 3, 20, 5)", weights[:3].ravel().tolist())
    assert (narrow["height"], narrow["width"]) == (3, 5)
    expected = weights[:3].reshape(3, 5, 4).max(-1)
    np.testing.assert_allclose(np.array(narrow["weights"]).reshape(3, 5), expected, rtol=1e-6)


def test_weights_are_readable_and_coloured_by_their_share(run: Callable[..., Any]) -> None:
    assert run("[0, 1e-9, 0.0012, 0.5, 1].map(page.readable)") == ["0", "< 0.001", "0.001", "0.500", "1.000"]
    assert run("[0, 0.5, 1, 2, -1].map((weight) => page.step(weight, 1, 256))") == [0, 128, 255, 255, 0]
    assert run("page.step(0, 0, 256)") == 0
    assert run("[0, 1, 2, 3, 4].map((weight) => page.step(weight, 4, 11))") == [0, 3, 5, 8, 10]


def test_the_start_is_what_is_asked_for_as_far_as_it_exists(run: Callable[..., Any]) -> None:
    data = embedded(page([sentence("fr"), sentence("he")]))
    first = run("page.initial(data, {})", data)
    assert (first["example"], first["map"], first["kind"], first["head"]) == (0, 1, "decoder cross", "mean")
    asked = {"example": "1", "kind": "encoder", "head": "1", "query": "2", "theme": "dark"}
    second = run(f"page.initial(data, {json.dumps(asked)})", data)
    assert (second["example"], second["map"], second["head"], second["theme"]) == (1, 0, 1, "dark")
    assert second["focus"] == {"row": 2}
    assert second["pinned"]
    stretched = [
        run(f"page.initial(data, {json.dumps(start)}).stretch", data)
        for start in ({"stretch": "1"}, {"stretch": "0"}, {})
    ]
    assert stretched == [True, False, False]
    odd = run('page.initial(data, {example: "99", kind: "no such", layer: "7", head: "-3"})', data)
    assert (odd["example"], odd["map"], odd["head"]) == (1, 2, 0)


def test_another_sentence_lets_go_of_the_token_and_another_layer_does_not(run: Callable[..., Any]) -> None:
    data = embedded(page([sentence("fr"), sentence("he")]))
    begin = 'page.initial(data, {query: "10", head: "1"})'
    layer = run(f"page.settled(data, {begin}, {{ layer: '1' }})", data)
    assert (layer["map"], layer["head"], layer["focus"]) == (2, 1, {"row": 10})
    other = run(f"page.settled(data, {begin}, {{ example: 1 }})", data)
    assert (other["example"], other["focus"], other["pinned"]) == (1, None, False)


@pytest.mark.parametrize(
    ("key", "state", "change"),
    [
        ("]", {}, {"example": 1}),
        ("[", {}, {"example": -1}),  # which `settled` brings back to 0
        ("l", {}, {"layer": "1"}),
        ("l", {"map": 2}, {"layer": "1"}),
        ("L", {"map": 2}, {"layer": "0"}),
        ("L", {}, {"layer": "0"}),
        ("h", {}, {"head": 0}),
        ("h", {"head": 0}, {"head": 1}),
        ("h", {"head": 1}, {"head": 1}),
        ("H", {"head": 1}, {"head": 0}),
        ("H", {"head": 0}, {"head": "mean"}),
        ("H", {}, {"head": "mean"}),
        ("Escape", {}, {"focus": None, "pinned": False}),
        ("x", {}, None),
    ],
)
def test_keys_of_the_whole_page(run: Callable[..., Any], key: str, state: dict[str, Any], change: Any) -> None:
    data = embedded(page([sentence("fr"), sentence("he")]))
    found = run(
        f"""(() => {{
          const all = [], event = {{ key: {json.dumps(key)}, target: {{}}, preventDefault: () => all.push("taken") }};
          const state = {{ ...page.initial(data, {{}}), ...{json.dumps(state)} }};
          page.shortcut(event, data, state, (change) => all.push(change));
          page.shortcut({{ ...event, ctrlKey: true }}, data, state, (change) => all.push(change));
          page.shortcut({{ ...event, target: {{ closest: () => ({{}}) }} }}, data, state, (change) => all.push(change));
          return all;
        }})()""",
        data,
    )
    assert found == ([] if change is None else ["taken", change])


def test_every_change_ends_in_a_state_that_exists(run: Callable[..., Any]) -> None:
    """Of two examples, the second of which has one head and another kind."""
    one = Example("one", {"other": Map(softmax(3, 4))})
    data = embedded(page([sentence("fr"), one]))

    def settled(change: dict[str, Any], start: dict[str, Any] | None = None) -> dict[str, Any]:
        begun = f"page.initial(data, {json.dumps(start or {})})"
        state: dict[str, Any] = run(f"page.settled(data, {begun}, {json.dumps(change)})", data)
        return {name: state[name] for name in ("example", "kind", "layer", "map", "head", "focus")}

    first = {"example": 0, "kind": "decoder cross", "layer": "0", "map": 1, "head": "mean", "focus": None}
    assert settled({"example": -1}) == first
    assert settled({"head": "9"}) == {**first, "head": 1}
    assert settled({"layer": "1"}) == {**first, "layer": "1", "map": 2}
    assert settled({"layer": "7"}) == {**first, "layer": "1", "map": 2}
    other = {"example": 1, "kind": "other", "layer": "", "map": 0, "head": 0, "focus": None}
    assert settled({"example": 5}) == other
    assert settled({"example": 0}, {"example": "1"}) == {**first, "layer": "1", "map": 2, "head": 0}
    assert settled({"kind": "encoder"}, {"query": "3"}) == {**first, "kind": "encoder", "map": 0}
    assert settled({"layer": "1"}, {"query": "3", "key": "2"})["focus"] == {"row": 3, "column": 2}


def test_lines_join_the_focus_with_all_and_each_query_with_its_strongest_key(run: Callable[..., Any]) -> None:
    weights = softmax(3, 4).astype(np.float64)
    now = {"rows": 3, "columns": 4, "weights": weights.ravel().tolist(), "top": 0.5, "state": {"focus": None}}

    def links(focus: dict[str, int] | None) -> list[tuple[int, int]]:
        found = run("page.links(data)", {**now, "state": {"focus": focus}})
        for query, key, share in found:
            assert share == pytest.approx(weights[query, key] / 0.5)
        return [(query, key) for query, key, _ in found]

    assert links(None) == [(i, int(weights[i].argmax())) for i in range(3)]
    assert links({"row": 1}) == [(1, j) for j in range(4)]
    assert links({"column": 2}) == [(i, 2) for i in range(3)]
    assert links({"row": 1, "column": 2}) == [(1, 2)]
