"""The page in a browser, where one is: what is pointed at, clicked, typed and drawn, against the given weights."""

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest

from regard.views.colours import hex_ramp
from regard.views.html.page import Example, Map, page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome") or ""
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="Chromium is not installed: the page is not opened")

# Numbers that half precision holds exactly. Queries are digits, keys are letters.
FIRST = np.array([[0.5, 0.25, 0.125, 0.125], [0.0625, 0.0625, 0.375, 0.5], [0.25, 0.5, 0.25, 0.0]])
SECOND = FIRST[::-1, ::-1] / 2
QUERIES, KEYS, HEBREW = ["0", "1", "2"], ["a", "b", "c", "d"], ["א", "ב", "ג", "ד"]
RAMP = hex_ramp()

# The names that every program below may use. A module runs after those that stand before it.
HELP = """
const root = document.getElementById("regard");
const line = (name) => [...root.querySelector(`.tokens[aria-label^="${name}"]`).children];
const keys = () => line("Keys"), queries = () => line("Queries");
const send = (target, type, more = {}) =>
  target.dispatchEvent(new PointerEvent(type, { pointerType: "mouse", bubbles: true, ...more }));
const press = (key, target = document.activeElement) =>
  target.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
const choose = (label, value) => {
  const select = field(label).querySelector("select");
  select.value = value;
  select.dispatchEvent(new Event("change"));
};
const field = (label) => [...root.querySelectorAll("label")].find((one) => one.textContent.startsWith(label));
const button = (text) => [...root.querySelectorAll("button")].find((one) => one.textContent === text);
const byte = (text) => Number(text).toString(16).padStart(2, "0");
const hex = (colour) => "#" + (colour.match(/\\d+/g) ?? []).slice(0, 3).map(byte).join("");
const shades = (tokens) => tokens.map((token) => token.style.background && hex(token.style.background));
const reading = () => ({
  title: root.querySelector(".reading h2").textContent,
  text: root.querySelector(".reading").textContent,
  list: [...root.querySelectorAll(".reading li")].map((item) => [...item.children].map((part) => part.textContent)),
});
"""


@pytest.fixture
def browse(tmp_path: Path) -> Callable[..., Any]:
    """Open a page, run a program in it, and return what the program returns."""

    def run(text: str, program: str, start: str = "") -> Any:
        script = f"""<script type="module">{HELP}
const found = (() => {{ {program} }})();
const answer = {{ id: "found", textContent: encodeURIComponent(JSON.stringify(found)) }};
document.body.append(Object.assign(document.createElement("pre"), answer));
</script></body>"""
        path = tmp_path / "page.html"
        path.write_text(text.replace("</body>", script), encoding="utf-8")
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--virtual-time-budget=4000",
            "--window-size=1000,900",
        ]
        done = subprocess.run(
            [CHROMIUM, *options, f"--user-data-dir={tmp_path}/profile", "--dump-dom", f"file://{path}{start}"],
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        answer = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
        assert answer is not None, done.stderr[-2000:]
        return json.loads(unquote(answer[1]))

    return run


def small(columns: list[str] = KEYS) -> str:
    heads = np.stack([FIRST, SECOND])
    example = Example("small", {"x.0": Map(heads, QUERIES, columns), "x.1": Map(heads[::-1], QUERIES, columns)}, "x.0")
    return page([example, Example("one", {"y": Map(FIRST.T, columns, QUERIES)})])


def shade(weight: float, ramp: list[str] = RAMP, top: float = 1.0) -> str:
    return ramp[round(weight / top * (len(ramp) - 1))]


def test_a_query_shows_what_it_looks_at_and_a_key_who_looks_at_it(browse: Callable[..., Any]) -> None:
    found = browse(small(), """
      choose("Head", "0");
      const see = () => ({ ...reading(), keys: shades(keys()), queries: shades(queries()),
        focus: [...root.querySelectorAll(".token.focus")].map((token) => token.textContent) });
      const all = [see()];
      send(queries()[1], "pointerenter"); all.push(see()); send(queries()[1], "pointerleave");
      send(keys()[2], "pointerenter"); all.push(see()); send(keys()[2], "pointerleave"); all.push(see());
      return all;""")  # fmt: skip
    nothing, query, key, again = found
    assert nothing == again
    assert (nothing["title"], nothing["keys"], nothing["queries"]) == ("Reading", [""] * 4, [""] * 3)
    assert query["title"] == "What it looks at"
    assert "1 (query 1)" in query["text"]
    assert query["list"] == [["d", "3", "0.500"], ["c", "2", "0.375"], ["a", "0", "0.063"], ["b", "1", "0.063"]]
    assert (query["keys"], query["queries"]) == ([shade(weight) for weight in FIRST[1]], [""] * 3)
    assert (query["focus"], key["focus"]) == (["1"], ["c"])
    assert key["title"] == "Who looks at it"
    assert "c (key 2)" in key["text"]
    assert key["list"] == [["1", "1", "0.375"], ["2", "2", "0.250"], ["0", "0", "0.125"]]
    assert (key["queries"], key["keys"]) == ([shade(weight) for weight in FIRST[:, 2]], [""] * 4)


def test_a_click_keeps_a_token_and_another_lets_go(browse: Callable[..., Any]) -> None:
    found = browse(small(), """
      const pinned = () => [...root.querySelectorAll(".token.pinned")].map((token) => token.textContent);
      const all = [];
      queries()[2].click(); all.push([pinned(), reading().title]);
      send(keys()[0], "pointerenter"); all.push([pinned(), reading().title]);
      send(keys()[0], "pointerleave"); all.push([pinned(), reading().title]);
      queries()[2].click(); all.push([pinned(), reading().title]);
      keys()[1].click(); all.push([pinned(), reading().title]);
      press("Escape", document.body); all.push([pinned(), reading().title]);
      return all;""")  # fmt: skip
    kept = [["2"], "What it looks at"]
    assert found == [kept, kept, kept, [[], "Reading"], [["b"], "Who looks at it"], [[], "Reading"]]


@pytest.mark.parametrize("columns", [KEYS, HEBREW], ids=["left to right", "right to left"])
def test_arrow_keys_follow_the_line_on_the_screen_and_cross_to_the_strongest(
    browse: Callable[..., Any], columns: list[str]
) -> None:
    found = browse(small(columns), """
      choose("Head", "1");
      const at = () => document.activeElement.textContent;
      const all = [], go = (key) => { press(key); all.push(at()); };
      queries()[1].focus();
      ["ArrowRight", "ArrowRight", "ArrowLeft", "ArrowLeft", "End", "Home"].forEach(go);
      go("ArrowUp"); go("ArrowLeft"); go("ArrowRight"); go("End"); go("ArrowDown");
      const stops = [keys(), queries()].map((tokens) => tokens.filter(({ tabIndex }) => tabIndex === 0));
      return {
        all, stops: stops.map((tokens) => tokens.map((token) => token.textContent)),
        directions: [keys(), queries()].map((tokens) => tokens[0].parentNode.dir),
      };
    """)  # fmt: skip
    _, b, c, d = columns
    assert found["directions"] == ["rtl" if columns is HEBREW else "ltr", "ltr"]
    assert found["all"][:7] == ["2", "2", "1", "0", "2", "0", c]  # query 0 of head 1 looks at key 2 most
    assert found["all"][7:9] == ([d, c] if columns is HEBREW else [b, c])
    assert found["all"][9:] == [d, "2"]  # key 3 is looked at most by query 2
    assert found["stops"] == [[d], ["2"]]


@pytest.mark.parametrize("columns", [KEYS, HEBREW], ids=["left to right", "right to left"])
def test_what_is_under_the_pointer_is_what_is_drawn_there(browse: Callable[..., Any], columns: list[str]) -> None:
    """At many points of the map: the query and key that the reading names, and the colour of the pixel."""
    found = browse(small(columns), """
      choose("Head", "0");
      const canvas = root.querySelector(".map canvas"), box = canvas.getBoundingClientRect();
      const context = canvas.getContext("2d"), all = [];
      const under = (x, y) => {
        send(canvas, "pointermove", { clientX: box.left + x, clientY: box.top + y });
        const { text, title } = reading();
        if (title === "One weight") return text.match(/query (\\d+), key (\\d+)/).slice(1).map(Number).join();
        return `${title} ${text.match(/\\((query|key) \\d+\\)/)?.[0]}`;
      };
      for (let x = 3; x < box.width; x += 6) for (let y = 3; y < box.height; y += 6) {
        const here = under(x, y);
        if ([[-2, 0], [2, 0], [0, -2], [0, 2]].some(([right, down]) => under(x + right, y + down) !== here)) continue;
        all.push([here, x, y, hex([...context.getImageData(x, y, 1, 1).data].join())]);
      }
      send(canvas, "pointerleave");
      return { all, after: reading().title };""")  # fmt: skip
    cells = [
        (tuple(map(int, here.split(","))), x, y, colour) for here, x, y, colour in found["all"] if here[0].isdigit()
    ]
    assert {cell for cell, *_ in cells} == {(i, j) for i in range(3) for j in range(4)}
    for (i, j), _, _, colour in cells:
        assert colour == shade(FIRST[i, j])
    across = [np.mean([x for (_, j), x, _, _ in cells if j == column]) for column in range(4)]
    down = [np.mean([y for (i, _), _, y, _ in cells if i == row]) for row in range(3)]
    assert across == sorted(across, reverse=columns is HEBREW)
    assert down == sorted(down)
    beside = {here for here, *_ in found["all"] if not here[0].isdigit()}
    assert {f"What it looks at (query {i})" for i in range(3)} <= beside
    assert {f"Who looks at it (key {j})" for j in range(4)} <= beside
    assert found["after"] == "Reading"


def test_the_controls_choose_among_what_there_is(browse: Callable[..., Any]) -> None:
    found = browse(small(), """
      const see = () => {
        queries()[0].click();
        const seen = {
          keys: shades(keys()),
          pressed: [...root.querySelectorAll('.thumb[aria-pressed="true"]')].map((thumb) => thumb.title),
          hidden: ["Attention", "Layer", "Head"].map((label) => field(label).hidden),
          options: [...field("Head").querySelectorAll("option")].map((option) => option.value),
          values: ["Attention", "Layer", "Head"].map((label) => field(label).querySelector("select").value) };
        press("Escape", document.body);
        return seen;
      };
      const all = [see()];
      choose("Head", "1"); all.push(see());
      choose("Layer", "1"); all.push(see());
      root.querySelector('.thumb[data-map="0"][data-head="0"]').click(); all.push(see());
      choose("Sentence", "1"); all.push(see());
      return { all, overview: root.querySelector(".heads").parentNode.hidden };""")  # fmt: skip
    mean, head, layer, thumb, other = found["all"]
    assert mean["keys"] == [shade(weight) for weight in (FIRST + SECOND)[0] / 2]
    assert head["keys"] == [shade(weight) for weight in SECOND[0]]
    assert layer["keys"] == [shade(weight) for weight in FIRST[0]]  # there the heads stand the other way round
    assert thumb["keys"] == [shade(weight) for weight in FIRST[0]]
    assert other["keys"] == [shade(weight) for weight in FIRST.T[0]]
    seen = (mean, head, layer, thumb)
    values = [("0", "mean"), ("0", "1"), ("1", "1"), ("0", "0")]
    assert [one["values"] for one in seen] == [["x", *value] for value in values]
    assert [one["pressed"] for one in seen] == [["mean of all heads"], ["head 1"], ["head 1"], ["head 0"]]
    assert mean["options"] == ["mean", "0", "1"]
    assert (mean["hidden"], other["hidden"]) == ([False, False, False], [False, True, True])
    assert found["overview"]


def test_thumbnails_are_the_maps_one_pixel_a_weight(browse: Callable[..., Any]) -> None:
    found = browse(small(HEBREW), """
      return [...root.querySelectorAll(".thumb")].map((thumb) => {
        const canvas = thumb.firstChild, { width, height } = canvas;
        const data = canvas.getContext("2d").getImageData(0, 0, width, height).data;
        const pixels = Array.from({ length: width * height }, (_, i) => hex(data.slice(4 * i, 4 * i + 3).join()));
        return { width, height, pixels };
      });""")  # fmt: skip
    maps = [(FIRST + SECOND) / 2, FIRST, SECOND, (FIRST + SECOND) / 2, SECOND, FIRST]
    assert [(one["width"], one["height"]) for one in found] == [(4, 3)] * 6
    for one, weights in zip(found, maps, strict=True):
        assert one["pixels"] == [shade(weight) for weight in weights[:, ::-1].ravel()]  # from right to left


def test_colours_are_those_of_the_theme_and_of_the_largest_weight(browse: Callable[..., Any]) -> None:
    found = browse(small(), """
      const canvas = root.querySelector(".map canvas"), corner = [canvas.width - 8, canvas.height - 8, 1, 1];
      const pixel = () => hex([...canvas.getContext("2d").getImageData(...corner).data].join());
      const see = () => [root.dataset.theme, shades(keys()), root.querySelector(".legend").textContent, pixel()];
      choose("Head", "1");
      queries()[0].click();
      const all = [see()];
      field("Stretch").querySelector("input").click(); all.push(see());
      button("Light / dark").click(); all.push(see());
      return all;""", start="#theme=light")  # fmt: skip
    dark, last = hex_ramp(dark=True), SECOND[2, 3]
    assert found == [
        ["light", [shade(weight) for weight in SECOND[0]], "01", shade(last)],
        ["light", [shade(weight, top=0.25) for weight in SECOND[0]], "00.25", shade(last, top=0.25)],
        ["dark", [shade(weight, dark, 0.25) for weight in SECOND[0]], "00.25", shade(last, dark, 0.25)],
    ]


def test_the_lines_join_each_query_with_its_strongest_key_or_the_token_with_all(browse: Callable[..., Any]) -> None:
    """Counted are the columns of pixels, between the two lines of tokens, under which something is drawn."""
    found = browse(small(), """
      choose("Head", "0");
      const canvas = root.querySelector(".sentence canvas"), context = canvas.getContext("2d");
      const edge = canvas.getBoundingClientRect();
      const touched = (tokens, edgeOf, inset) => tokens.map((token) => {
        const box = token.getBoundingClientRect();
        const y = Math.round(box[edgeOf] - edge.top + inset), x = Math.round(box.left - edge.left);
        const data = context.getImageData(x, y, Math.round(box.width), 1).data;
        return data.some((value, place) => place % 4 === 3 && value > 0);
      });
      const see = () => ({ keys: touched(keys(), "bottom", 2), queries: touched(queries(), "top", -3) });
      const all = [see()];
      queries()[2].click(); all.push(see()); queries()[2].click();
      keys()[3].click(); all.push(see());
      return all;""")  # fmt: skip
    assert found == [
        {"keys": [True, True, False, True], "queries": [True, True, True]},
        {"keys": [True, True, True, False], "queries": [False, False, True]},  # the weight of key 3 is 0
        {"keys": [False, False, False, True], "queries": [True, True, False]},
    ]


@pytest.mark.parametrize(
    ("shape", "pooling", "says"),
    [
        ((3, 3), "max", ""),
        ((6, 3), "max", "; each cell the largest of 2 × 1 weights"),
        ((3, 6), "max", "; each cell the largest of 1 × 2 weights"),
        ((7, 6), "max", "; each cell the largest of up to 3 × 2 weights"),
        ((6, 6), "mass", "; each cell the mass of 2 × 2 weights"),
    ],
)
def test_the_title_of_the_map_says_what_a_cell_is(
    browse: Callable[..., Any], shape: tuple[int, int], pooling: Any, says: str
) -> None:
    text = page([Example("", {"x": Map(np.full(shape, 0.125))})], max_cells=3, pooling=pooling)
    title = browse(
        text, 'return [...root.querySelectorAll("h2")].map((one) => one.textContent).find((one) => /Map/.test(one));'
    )
    assert title == f"Map: queries down, keys across{says}"


@pytest.mark.parametrize("columns", [KEYS, HEBREW], ids=["left to right", "right to left"])
def test_a_cell_that_is_clicked_stays_in_its_frame_and_one_beside_the_map_lets_go(
    browse: Callable[..., Any], columns: list[str]
) -> None:
    found = browse(small(columns), """
      choose("Head", "0");
      const [canvas, cross] = root.querySelectorAll(".map canvas"), box = canvas.getBoundingClientRect();
      const at = (type, x, y) => send(canvas, type, { clientX: box.left + x, clientY: box.top + y });
      const named = () => reading().text.match(/query \\d+, key \\d+/)?.[0] ?? reading().title;
      const all = [], see = () => all.push(named());
      at("click", box.width - 5, box.height - 5); see();
      at("pointermove", box.width - 40, box.height - 40); see();
      const shown = [shades(keys()), shades(queries())];
      // The frame of the key crosses the first row of cells at two places, and the key is named between them.
      const y = box.height - 2.5 * 34, data = cross.getContext("2d").getImageData(0, y, cross.width, 1).data;
      const frame = [...Array(cross.width).keys()].filter((x) => data[4 * x + 3] > 0);
      const [left, right] = [Math.min(...frame), Math.max(...frame)];
      at("click", 1, 1); see();
      for (const x of [left + 4, right - 4, left - 4, box.width - 0.5]) { at("pointermove", x, y); see(); }
      at("pointermove", box.width - 60, box.height - 0.5); see();
      return { all, shown, width: right - left };""")  # fmt: skip
    kept = f"query 2, key {0 if columns is HEBREW else 3}"
    inside, beside = kept.replace("2", "0", 1), f"query 0, key {1 if columns is HEBREW else 2}"
    assert found["all"] == [kept, kept, "Reading", inside, inside, beside, "Reading", "Reading"]
    assert found["shown"] == [[shade(weight) for weight in FIRST[2]], [""] * 3]
    assert 33 <= found["width"] <= 37


def test_what_is_not_listed_is_summed_and_each_layer_offers_its_own_heads(browse: Callable[..., Any]) -> None:
    many = np.full((1, 12), 1 / 16)
    maps = {"x.0": Map(many[None]), "x.1": Map(np.stack([many] * 3))}
    found = browse(page([Example("", maps, "x.0")]), """
      queries()[0].click();
      const heads = () => [...field("Head").querySelectorAll("option")].map((option) => option.value);
      const all = [reading().list.length, reading().text, heads(), field("Head").hidden];
      choose("Layer", "1");
      return [...all, heads(), field("Head").hidden];""")  # fmt: skip
    assert found[0] == 9
    assert found[1].endswith("3 more share 0.188")
    assert found[2:] == [["0"], True, ["mean", "0", "1", "2"], False]
