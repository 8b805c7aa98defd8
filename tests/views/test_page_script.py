"""The page's script, run by node where it is: its numbers against NumPy's, and its state."""

import csv
import io
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from regard import page
from regard.maps.statistics.pooling import Bins
from regard.views import Example, Map
from regard.views.html.arrays import packed
from regard.views.html.page import script
from tests.views.test_scales import contrast
from tests.views.written_dates import array_of, embedded, sentence, softmax

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
globalThis.matchMedia = undefined;
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


def test_arrays_are_read_as_they_were_written(run: Callable[..., Any]) -> None:
    random = np.random.default_rng(0)
    given = {"f16": random.random(77), "f32": random.random(5) * 1e9, "u8": random.integers(0, 256, 9)}
    given |= {"u16": random.integers(0, 2**16, 13), "u32": random.integers(0, 2**32, 13)}
    for kind, values in given.items():
        one = packed(values, kind).as_json()
        found = run("await page.arrayReader([data])(0)", one)
        expected = array_of({"arrays": [one]}, 0)
        np.testing.assert_allclose(np.array(found, np.float64), expected, rtol=1e-7)
        np.testing.assert_allclose(expected, values, rtol=1e-3)


@pytest.mark.parametrize(("length", "count"), [(7, 3), (64, 64), (513, 512), (1000, 7), (5, 1)])
def test_blocks_are_those_of_python(run: Callable[..., Any], length: int, count: int) -> None:
    bins = Bins(length, count)
    edges = run(f"Array.from({{length: {count + 1}}}, (_, i) => page.edge({length}, {count}, i))")
    assert edges == [bins.edge(index) for index in range(count + 1)]
    owners = run(f"Array.from({{length: {length}}}, (_, i) => page.binOf({length}, {count}, i))")
    assert owners == [bins.index_of(place) for place in range(length)]


@pytest.mark.parametrize(
    ("weight", "text"),
    [
        (0, "0"),
        (0.5, "0.500"),
        (0.0123, "0.012"),
        (0.00456, "0.00456"),
        (0.00069, "0.000690"),
        (3e-7, "3.00e-7"),
        (12.3456, "12.346"),
        (12345, "1.235e+4"),
        (-0.25, "-0.250"),
    ],
)
def test_a_number_is_never_shown_as_a_zero(run: Callable[..., Any], weight: float, text: str) -> None:
    assert run(f"page.readable({weight})") == text


def test_a_number_and_its_noun_agree(run: Callable[..., Any]) -> None:
    nouns = [(1, "head"), (2, "head"), (0, "key"), (1, "query"), (3, "more query")]
    assert run("data.map(([count, noun]) => page.counted(count, noun))", nouns) == [
        "1 head", "2 heads", "0 keys", "1 query", "3 more queries"
    ]  # fmt: skip


def test_a_kept_token_outside_the_window_moves_it(run: Callable[..., Any]) -> None:
    """With its size; a token that is pointed at, or a window that is given, moves nothing."""
    data = embedded(page([Example("", {"0": Map(np.eye(90))})]).text)
    kept = {"focus": {"row": 70, "column": 3}, "pinned": True}
    changes = [kept, {"focus": kept["focus"]}, {**kept, "window": [0, 30, 10, 30]}, {**kept, "focus": {"row": 15}}]
    windows = run(
        """data.changes.map((change) => {
          const state = page.settled(data, page.initial(data, { zoom: "10-30x10-30" }), {});
          return page.settled(data, state, change).window;
        })""",
        {**data, "changes": changes},
    )
    assert windows == [[60.5, 80.5, 0, 20], [10, 30, 10, 30], [0, 30, 10, 30], [10, 30, 10, 30]]


def test_the_largest_places_are_those_of_numpy(run: Callable[..., Any]) -> None:
    values = np.random.default_rng(0).integers(0, 20, 100).tolist()
    expected = sorted(range(100), key=lambda place: (-values[place], place))
    for count in (1, 9, 100, 200):
        assert run(f"page.largestPlaces(data, {count})", values) == expected[:count]


def test_the_ink_on_a_colour_can_be_read(run: Callable[..., Any]) -> None:
    """WCAG: at least 4.5 : 1 on every colour of weights, in both themes; the ratio is computed here."""

    for theme in embedded(page([sentence()]).text)["colours"].values():
        inks = run("data.map((colour) => page.inkOn(colour))", theme["ramp"])
        for colour, ink in zip(theme["ramp"], inks, strict=True):
            assert contrast(to_rgb(colour), to_rgb(ink)) >= 4.5, colour


def test_files_of_csv_are_read_back(run: Callable[..., Any]) -> None:
    fields = ["a,b", 'say "yes"', "line\nbreak", "=1+1", "", "ы"]
    (found,) = csv.reader(io.StringIO(run("page.csvLine(data)", fields), newline=""))
    assert found == fields


@pytest.mark.parametrize(
    ("key", "state", "change"),
    [
        ("]", {}, {"example": 1}),
        ("[", {}, {"example": -1}),
        ("l", {}, {"layer": "1"}),
        ("L", {"map": 2}, {"layer": "0"}),
        ("h", {"heads": ["mean"]}, {"heads": [0]}),
        ("h", {"heads": [1]}, {"heads": [1]}),
        ("H", {"heads": [0]}, {"heads": ["mean"]}),
        ("Escape", {}, {"focus": None, "pinned": False}),
        ("x", {}, None),
    ],
)
def test_keys_of_the_page(run: Callable[..., Any], key: str, state: dict[str, Any], change: Any) -> None:
    data = embedded(page([sentence("fr"), sentence("he")]).text)
    found = run(
        f"""(() => {{
          const state = {{ ...page.initial(data, {{}}), ...{json.dumps(state)} }};
          const event = {{ key: {json.dumps(key)}, target: {{}} }};
          return [event, {{ ...event, ctrlKey: true }}, {{ ...event, target: {{ closest: () => ({{}}) }} }}]
            .map((one) => page.shortcut(one, data, state));
        }})()""",
        data,
    )
    assert found == [change, None, None]


def test_every_change_ends_in_a_state_that_exists(run: Callable[..., Any]) -> None:
    """Of two examples, the second of which has one head and another kind."""
    one = Example("one", {"other": Map(softmax(3, 4))})
    data = embedded(page([sentence("fr"), one]).text)

    def settled(change: dict[str, Any], start: dict[str, Any] | None = None) -> dict[str, Any]:
        begun = f"page.initial(data, {json.dumps({'heads': 'mean'} | (start or {}))})"
        state: dict[str, Any] = run(f"page.settled(data, {begun}, {json.dumps(change)})", data)
        return {name: state[name] for name in ("example", "kind", "layer", "map", "heads", "focus")}

    first = {"example": 0, "kind": "decoder cross", "layer": "0", "map": 1, "heads": ["mean"], "focus": None}
    assert settled({"example": -1}) == first
    assert settled({"heads": ["9"]}) == {**first, "heads": [1]}
    assert settled({"heads": [0, 0, "x", 1]}) == {**first, "heads": [0, 1]}
    assert settled({"layer": "1"}) == {**first, "layer": "1", "map": 2}
    assert settled({"layer": "7"}) == {**first, "layer": "1", "map": 2}
    other = {"example": 1, "kind": "other", "layer": "", "map": 0, "heads": [0], "focus": None}
    assert settled({"example": 5}) == other
    assert settled({"kind": "encoder"}, {"query": "3"}) == {**first, "kind": "encoder", "map": 0}
    assert settled({"layer": "1"}, {"query": "3", "key": "2"})["focus"] == {"row": 3, "column": 2}


@pytest.mark.parametrize("wish", ["9999", "-1", "abc", "", "1e99", "NaN", "0x10"])
def test_a_link_can_wish_for_anything(run: Callable[..., Any], wish: str) -> None:
    names = [
        "example",
        "query",
        "key",
        "heads",
        "layer",
        "kind",
        "zoom",
        "threshold",
        "temperature",
        "with",
        "view",
        "scale",
        "sort",
        "theme",
        "side",
        "mask",
    ]
    data = embedded(page([sentence("fr"), sentence("he")]).text)
    state = run(f"page.initial(data, {json.dumps(dict.fromkeys(names, wish))})", data)
    map_ = data["examples"][state["example"]]["maps"][state["map"]]
    for side, length in zip(("row", "column"), map_["shape"][1:], strict=True):
        assert 0 <= state["focus"][side] < length
    assert all(head == "mean" or 0 <= head < map_["shape"][0] for head in state["heads"])
    assert (state["view"], state["scale"], state["sort"], state["mask"]) == ("matrix", "sqrt", "layer", "own")
    assert 0 <= state["threshold"] <= 1


def test_a_link_leads_back_to_what_was_shown(run: Callable[..., Any]) -> None:
    data = embedded(page([sentence("fr"), sentence("he")]).text)
    change = {
        "example": 1, "kind": "decoder cross", "layer": "1", "heads": ["mean", 1], "focus": {"row": 3, "column": 2},
        "pinned": True, "view": "compare", "other": {"example": 0, "map": 2, "head": 1}, "scale": "log",
        "withoutSink": True, "threshold": 0.01, "sort": "entropy", "side": "to", "find": "a b&=",
        "window": [1, 4, 0, 3.5],
    }  # fmt: skip
    found = run(
        f"""(() => {{
          const state = page.settled(data, page.initial(data, {{}}), {json.dumps(change)});
          const link = page.linkOf(data, state);
          return [state, page.initial(data, Object.fromEntries(new URLSearchParams(link)))];
        }})()""",
        data,
    )
    assert found[0] == found[1]
    assert found[0]["heads"] == ["mean", 1]


ROOT = Path(__file__).parents[2]
ESLINT = ROOT / "node_modules/eslint/bin/eslint.js"


def ran(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([NODE, *map(str, command)], cwd=ROOT, capture_output=True, text=True)


def test_the_script_passes_its_own_tests() -> None:
    files = sorted((ROOT / "tests/views/script").glob("*.test.js"))
    assert files
    done = ran("--test", *files)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "# pass 0" not in done.stdout


@pytest.mark.skipif(not ESLINT.is_file(), reason="eslint is not installed: `make browser` installs it")
def test_eslint_finds_nothing(tmp_path: Path) -> None:
    # Only the folders that hold scripts: in the others, tests that run beside this one make and remove folders, and
    # eslint fails where one is gone before it is read.
    done = ran(ESLINT, "eslint.config.js", "src/regard/views", "tests/views/script")
    assert done.returncode == 0, done.stdout + done.stderr
    # It does read these files: a variable that nothing uses is found in a copy of one.
    copy = tmp_path / "src/regard/views/html/page_numbers.js"
    copy.parent.mkdir(parents=True)
    source = ROOT / "src/regard/views/html/page_numbers.js"
    copy.write_text(f"{source.read_text(encoding='utf-8')}\nconst unused = 1;\n", encoding="utf-8")
    planted = subprocess.run(
        [NODE, str(ESLINT), "--config", str(ROOT / "eslint.config.js"), str(copy)],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert "no-unused-vars" in planted.stdout, planted.stdout + planted.stderr
