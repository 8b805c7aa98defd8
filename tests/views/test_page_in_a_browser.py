"""The page in a browser: pointing, clicking, typing and drawing, against the given weights."""

import csv
import io
import re
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

import regard
from regard import page
from regard.views import Example, Map
from regard.views.colours import hexadecimal, ramp
from regard.views.examples import model_example
from tests.views.chromium import CHROMIUM
from tests.views.tab import HELP, Tab
from tests.views.written_dates import EMPTY_MB

# Numbers that half precision holds exactly. Queries are digits, keys are letters.
FIRST = np.array([[0.5, 0.25, 0.125, 0.125], [0.0625, 0.0625, 0.375, 0.5], [0.25, 0.5, 0.25, 0.0]])
SECOND = FIRST[::-1, ::-1] / 2
QUERIES, KEYS, HEBREW = ["0", "1", "2"], ["a", "b", "c", "d"], ["א", "ב", "ג", "ד"]
RAMP = [hexadecimal(colour) for colour in ramp()]


def small(columns: list[str] = KEYS) -> str:
    heads = np.stack([FIRST, SECOND])
    example = Example("small", {"x.0": Map(heads, QUERIES, columns), "x.1": Map(heads[::-1], QUERIES, columns)}, "x.0")
    return page([example, Example("one", {"y": Map(FIRST.T, columns, QUERIES)})]).text


def causal(length: int, heads: int = 2, seed: int = 0) -> regard.AttentionMap:
    made = torch.Generator().manual_seed(seed)
    q, k = (2 * torch.randn(1, heads, length, 8, generator=made) for _ in range(2))
    found = regard.attention(q, k, k, mask=regard.causal(), return_weights=True).weights[0]
    assert isinstance(found, regard.AttentionMap)
    return found


def shade(weight: float, ramp: list[str] = RAMP, top: float = 0.5) -> str:
    return ramp[int(np.sqrt(weight / top) * (len(ramp) - 1) + 0.5)]


def test_a_query_shows_what_it_looks_at_and_a_key_who_looks_at_it(tab: Tab) -> None:
    nothing, query, key, again = tab.show(small(), "theme=light&heads=0").run("""
      const see = () => ({ ...reading(), keys: shades(keys()), queries: shades(queries()),
        focus: [...root.querySelectorAll(".token.focus")].map((token) => token.textContent) });
      const all = [see()];
      const leave = () => send(root.querySelectorAll(".lines")[0], "pointerleave", { bubbles: false });
      send(queries()[1], "pointermove"); all.push(see()); leave();
      send(keys()[2], "pointermove"); all.push(see()); leave(); all.push(see());
      return all;""")
    assert nothing == again
    assert (nothing["title"], nothing["keys"], nothing["queries"]) == ("Reading", [""] * 4, [""] * 3)
    assert query["title"] == "What it looks at"
    assert "1 (query 1)" in query["text"]
    assert query["list"] == [["d", "3", "0.500"], ["c", "2", "0.375"], ["a", "0", "0.063"], ["b", "1", "0.063"]]
    assert (query["keys"], query["queries"]) == ([shade(weight) for weight in FIRST[1]], [""] * 3)
    assert (query["focus"], key["focus"]) == (["1"], ["c"])
    assert key["title"] == "Who looks at it"
    assert "c (key 2)" in key["text"]
    assert "strongest key of 0 queries" in key["text"]
    assert key["list"] == [["1", "1", "0.375"], ["2", "2", "0.250"], ["0", "0", "0.125"]]
    assert (key["queries"], key["keys"]) == ([shade(weight) for weight in FIRST[:, 2]], [""] * 4)


def test_a_click_keeps_a_token_another_lets_go_and_the_link_says_so(tab: Tab) -> None:
    found = tab.show(small()).run("""
      const pinned = () => [...root.querySelectorAll(".token.pinned")].map((token) => token.textContent);
      const query = () => new URLSearchParams(location.hash.slice(1)).get("query");
      const all = [], see = () => all.push([pinned(), reading().title, query()]);
      queries()[2].click(); see();
      send(keys()[0], "pointermove"); see();
      queries()[2].click(); see();
      keys()[1].click(); see();
      const escape = new KeyboardEvent("keydown", { key: "Escape", bubbles: true });
      root.querySelector(".scroller").dispatchEvent(escape); see();
      return all;""")
    kept = [["2"], "What it looks at", "2"]
    assert found == [kept, kept, [[], "Reading", None], [["b"], "Who looks at it", None], [[], "Reading", None]]


@pytest.mark.parametrize("columns", [KEYS, HEBREW], ids=["left to right", "right to left"])
def test_what_is_under_the_pointer_is_what_is_drawn_there(tab: Tab, columns: list[str]) -> None:
    """At many points of the map: the query and key that the reading names, and the colour of the pixel."""
    found = tab.show(small(columns), "theme=light&heads=0").run("""
      const canvas = root.querySelector(".matrix canvas"), box = canvas.getBoundingClientRect();
      const context = canvas.getContext("2d"), all = [];
      const under = (x, y) => {
        send(canvas, "pointermove", { clientX: box.left + x, clientY: box.top + y });
        const { text, title } = reading();
        if (title === "One weight") return text.match(/query (\\d+), key (\\d+)/).slice(1).map(Number).join();
        return `${title} ${text.match(/\\((query|key) \\d+\\)/)?.[0]}`;
      };
      for (let x = 4; x < box.width; x += 29) for (let y = 4; y < box.height; y += 29) {
        const here = under(x, y);
        if ([[-3, 0], [3, 0], [0, -3], [0, 3]].some(([right, down]) => under(x + right, y + down) !== here)) continue;
        all.push([here, x, y, hex([...context.getImageData(x, y, 1, 1).data].join())]);
      }
      send(canvas, "pointerleave");
      return { all, after: reading().title };""")
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
    assert {f"Who looks at it (key {j})" for j in range(4)} <= beside
    assert found["after"] == "Reading"


def test_thumbnails_are_the_maps_one_pixel_a_weight(tab: Tab) -> None:
    found = tab.show(small(HEBREW)).run("""
      return [...root.querySelectorAll(".thumb")].map((thumb) => {
        const canvas = thumb.firstChild, { width, height } = canvas;
        const data = canvas.getContext("2d").getImageData(0, 0, width, height).data;
        const pixels = Array.from({ length: width * height }, (_, i) => hex(data.slice(4 * i, 4 * i + 3).join()));
        return { width, height, pixels };
      });""")
    maps = [(FIRST + SECOND) / 2, FIRST, SECOND, (FIRST + SECOND) / 2, SECOND, FIRST]
    assert [(one["width"], one["height"]) for one in found] == [(4, 3)] * 6
    for one, weights in zip(found, maps, strict=True):
        expected = [shade(weight, top=weights.max()) for weight in weights[:, ::-1].ravel()]  # from right to left
        assert one["pixels"] == expected


def test_several_heads_stand_side_by_side_in_colours_with_numbers(tab: Tab) -> None:
    found = tab.show(small(), "heads=0,1&query=1").run("""
      return { titles: [...root.querySelectorAll(".reading h3")].map((one) => one.textContent), list: reading().list,
        pressed: root.querySelectorAll('.thumb[aria-pressed="true"]').length };""")
    assert (found["titles"], found["pressed"]) == (["head 0", "head 1"], 2)
    assert [row[2] for row in found["list"][:2]] == ["0.500", "0.375"]
    assert [row[2] for row in found["list"][4:6]] == ["0.250", "0.188"]


def test_two_maps_without_a_token_in_common_have_no_difference(tab: Tab) -> None:
    other = tab.show(small(), "heads=0&view=compare&with=1.0.0&query=1").run("""
      return [[...root.querySelectorAll(".pane")].map((one) => !one.hidden), reading().text];""")
    assert other[0] == [True, True, False]
    assert "no difference can be drawn" in other[1]


def test_a_translation_is_exported_as_pairs_and_free_words_are_counted(tab: Tab) -> None:
    found = tab.show(small(), "heads=0&view=links").run("""
      const all = [page.exported("pharaoh"), page.exported("csv")];
      await page.changed({ view: "matrix" });
      return [...all, page.exported("csv"), page.exported("svg")];""")
    assert found[0] == " ".join(f"{key}-{query}" for query, key in enumerate(FIRST.argmax(1)))
    links, rows = (list(csv.DictReader(io.StringIO(text, newline=""))) for text in found[1:3])
    assert [(int(row["query"]), int(row["key"])) for row in links] == list(enumerate(FIRST.argmax(1)))
    assert len(rows) == 12
    for row in (*links, *rows):
        assert float(row["weight"]) == FIRST[int(row["query"]), int(row["key"])]
        assert (row["query_token"], row["key_token"]) == (QUERIES[int(row["query"])], KEYS[int(row["key"])])
    drawn = ElementTree.fromstring(found[3])
    assert len(drawn.findall(".//{*}svg/{*}rect")) == 11  # a rectangle for each weight above 0
    assert [one.text for one in drawn.iter() if one.tag.endswith("text")] == [*QUERIES, *KEYS]


def test_every_query_whose_strongest_key_is_a_token_is_found(tab: Tab) -> None:
    """Of a map whose weights are not all carried; the heads in the order of a number."""
    weights = causal(200, heads=3, seed=5)
    dense = weights.dense()
    words = [f"w{n % 50}" for n in range(200)]
    one = Map(weights, words, words)
    made = page([Example("", {"0": one})], budget_mb=EMPTY_MB + 0.12, exact=[])
    assert made.carried[0].exact == 0
    strongest = dense[1].argmax(-1)
    key = int(strongest.mode().values)
    tab.show(made.text, f"heads=1&key={key}&sort=induction")
    found = tab.run("""
      const order = [...root.querySelectorAll(".thumb")].map((one) => Number(one.dataset.head));
      return { text: reading().text, order };""")
    lookers = (strongest == key).nonzero().ravel().tolist()
    assert len(lookers) > 1
    assert f"strongest key of {len(lookers)} queries: {', '.join(map(str, lookers))}" in found["text"]
    tokens = torch.arange(200) % 50
    score = regard.watching.head_table([weights], ids=tokens)["induction"][0]
    assert found["order"] == score.argsort(descending=True).tolist()


def test_what_is_not_carried_is_drawn_and_said_so(tab: Tab) -> None:
    """Of a map of which one picture was kept, zoomed beyond its blocks."""
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    with torch.no_grad(), regard.watch(layer, keep=regard.Summarize("pooled_max", rows=60, columns=60)) as seen:
        layer(torch.randn(1, 300, 16))
    made = page([model_example(seen)])
    assert not made.carried[0].of_each_query
    found = tab.show(made.text, "theme=light&heads=0&query=200&zoom=190-230x10-50").run("""
      return [reading().text, root.querySelector(".caption").textContent];""")
    assert "not carried" in found[0]
    assert "largest of its block of up to 5 × 5 weights" in found[1]


def test_a_link_to_a_token_of_a_long_text_brings_it_into_view_and_scrolling_stays(tab: Tab) -> None:
    words = [f"word{n}" for n in range(2000)]
    text = page([Example("", {"0": Map(causal(2000, heads=1), words, words)})], budget_mb=EMPTY_MB + 0.5, exact=[]).text
    tab.show(text, "query=1000").browser.until("document.querySelector('.token.focus')?.textContent === 'word1000'")
    found = tab.run("""
      const pane = [...root.querySelectorAll(".scroller")].at(-1);
      pane.scrollTop = 3000;
      await new Promise((done) => setTimeout(done, 200));
      return [pane.scrollTop, pane.querySelectorAll(".token").length];""")
    assert found[0] == 3000
    assert found[1] < 200


def test_the_page_is_one_screen_at_every_size_and_in_both_themes(tab: Tab) -> None:
    tab.show(page([Example("", {f"{n}": Map(causal(100, heads=12))}) for n in range(3)]).text)
    for width, height in ((1280, 800), (1024, 768), (360, 740)):
        tab.browser.size(width, height)
        for theme in ("light", "dark"):
            found = tab.run(f"""
              await page.changed({{ theme: "{theme}" }});
              await new Promise(requestAnimationFrame);
              const size = ({{ width, height }}) => [width, height];
              return {{ whole: [document.documentElement.scrollWidth, document.documentElement.scrollHeight],
                map: size(root.querySelector(".matrix").getBoundingClientRect()),
                text: size(root.querySelector(".scroller:last-of-type").getBoundingClientRect()) }};""")
            assert found["whole"] == [width, height]
            assert min(found["map"]) >= 100, (width, found)


@pytest.mark.parametrize(("width", "more"), [*((n, 1) for n in (760, 900, 1000, 1200, 1280)), (390, 13)])
def test_the_title_and_the_labels_of_columns_are_whole(tab: Tab, width: int, more: int) -> None:
    """Where cells are drawn smaller than the room is wide, a label that would fit that room is turned."""
    digits = [*"19631227", "-", "-"]
    keys = [*digits, *["x"] * more, "<eos>"]
    maps = {"decoder cross": Map(np.full((11, len(keys)), 1 / len(keys)), [*digits, "<eos>"], keys)}
    title = "What each character of the answer looked at"
    tab.show(page([Example("1963", maps), Example("a second of them", maps)], title=title).text)
    tab.browser.size(width, 700 if width > 390 else 844)
    found = tab.run("""
      const written = [], draw = CanvasRenderingContext2D.prototype.fillText;
      CanvasRenderingContext2D.prototype.fillText = function (text, ...place) {
        written.push(text);
        return draw.call(this, text, ...place);
      };
      await page.changed({ scale: "linear" });
      await new Promise(requestAnimationFrame);
      const title = root.querySelector("h1");
      return { written, title: [title.scrollWidth, title.clientWidth] };""")
    assert sorted(found["written"]) == sorted([*digits, "<eos>", *keys]), "each row and each column, once"
    assert not [text for text in found["written"] if "…" in text or "⋮" in text]
    assert found["title"][0] <= found["title"][1]


def test_pointing_is_followed_within_a_twentieth_of_a_second(tab: Tab) -> None:
    weights = causal(512, heads=4, seed=3)
    words = [f"w{n}" for n in range(512)]
    tab.show(page([Example("", {"0": Map(weights, words, words)})]).text, "heads=mean")
    times = tab.run("""
      const canvas = root.querySelector(".matrix canvas"), box = canvas.getBoundingClientRect(), all = [];
      for (let n = 0; n < 40; n++) {
        const start = performance.now();
        send(canvas, "pointermove", { clientX: box.left + 100 + 9 * n, clientY: box.top + 100 + 9 * n });
        await new Promise(requestAnimationFrame);
        all.push(performance.now() - start);
      }
      return all.sort((a, b) => a - b);""")
    assert times[len(times) // 2] < 50, times


def test_maps_of_unlike_length_are_compared_where_their_tokens_are_the_same(tab: Tab) -> None:
    """A word in the middle has become two: what is before and behind it is compared, and nothing else."""
    one, two = [*"abcXyz"], [*"abcPQyz"]
    a, b = (weights_of(length, seed) for length, seed in ((6, 1), (7, 2)))
    examples = [Example("A", {"0": Map(a, one, one)}), Example("B", {"0": Map(b, two, two)})]
    tab.show(page(examples).text, "heads=0&view=compare&with=1.0.0&query=4")
    found = tab.run("""
      const items = [...root.querySelectorAll(".other")].at(-1).querySelectorAll("li");
      return { differences: [...items].map((item) => [...item.children].map((part) => part.textContent)),
        panes: [...root.querySelectorAll(".pane")].map((one) => !one.hidden), text: reading().text };""")
    assert found["panes"] == [True] * 3
    assert "others are striped" in found["text"]
    pairs = {0: 0, 1: 1, 2: 2, 4: 5, 5: 6}  # A's keys and their counterparts in B; query 4 is B's 5
    said = {int(place): float(number) for _, place, number in found["differences"]}
    assert said == {i: pytest.approx(a[4, i] - b[5, j], abs=6e-4) for i, j in pairs.items()}
    tab.again("heads=0&view=compare&with=1.0.0&query=3")
    assert "no counterpart" in tab.run("return reading().text;")


def weights_of(length: int, seed: int) -> np.ndarray:
    scores = np.random.default_rng(seed).random((length, length))
    return scores / scores.sum(-1, keepdims=True)


def test_steps_show_what_is_not_written_yet(tab: Tab) -> None:
    words = ["the", "cat", "sat", "on", "the", "mat", "and", "slept"]
    tab.show(page([Example("", {"0": Map(causal(8, heads=1), words, words)})]).text, "query=2")
    found = tab.run("""
      const later = () => [...root.querySelectorAll(".token.later")].map((token) => Number(token.dataset.place));
      const all = [later()];
      const next = [...root.querySelectorAll(".steps button")].find((one) => one.textContent === "▶");
      next.click(); all.push([page.state().focus.row, later()]);
      next.click(); all.push([page.state().focus.row, later()]);
      keys()[6].click(); all.push(later());
      return all;""")
    assert found == [[], [3, [4, 5, 6, 7]], [4, [5, 6, 7]], []]


def test_the_wheel_and_dragging_zoom_to_single_cells_with_exact_values(tab: Tab) -> None:
    """With the mouse of the browser itself: in at a token, then along, and out again."""
    weights = causal(300, heads=1, seed=4)
    words = [f"w{n}" for n in range(300)]
    made = page([Example("", {"0": Map(weights, words, words)})], budget_mb=EMPTY_MB + 0.09, exact=[])
    assert made.carried[0].exact == 0
    tab.show(made.text)
    place = """
      const box = root.querySelector(".matrix canvas").getBoundingClientRect();
      const { window } = page.state(), { textContent } = root.querySelector(".caption");
      return { x: box.left + box.width * 0.5, y: box.top + box.height * 0.8, window, caption: textContent };"""
    begun = tab.run(place)
    assert begun["window"] is None
    assert "largest of its block" in begun["caption"]
    tab.browser.mouse("mouseMoved", begun["x"], begun["y"])
    before = tab.run("return page.state().focus;")
    for _ in range(14):
        tab.browser.mouse("mouseWheel", begun["x"], begun["y"], deltaX=0, deltaY=-100)
    near = tab.run(place)
    r0, r1, c0, c1 = near["window"]
    assert r1 - r0 < 20
    assert r0 - 8 <= before["row"] <= r1 + 8, "the wheel zooms where the pointer is"
    assert c0 - 8 <= before["column"] <= c1 + 8
    assert "each cell is one weight" in near["caption"]
    tab.browser.mouse("mousePressed", begun["x"], begun["y"], button="left", buttons=1, clickCount=1)
    for step in range(1, 9):
        tab.browser.mouse("mouseMoved", begun["x"] + 10 * step, begun["y"] + 10 * step, button="left", buttons=1)
    tab.browser.mouse("mouseReleased", begun["x"] + 80, begun["y"] + 80, button="left", clickCount=1)
    moved = tab.run(place)["window"]
    assert moved[0] < r0
    assert moved[2] < c0, "the map follows the hand"
    assert moved[1] - moved[0] == pytest.approx(r1 - r0)
    tab.browser.mouse("mouseMoved", 2, 2)
    found = tab.run("return [page.state().pinned, page.exported('csv')];")
    assert found[0] is False, "a drag is no click"
    rows = list(csv.DictReader(io.StringIO(found[1], newline="")))
    assert rows
    dense = weights.dense()[0]
    for row in rows:
        assert float(row["weight"]) == pytest.approx(
            float(dense[int(row["query"]), int(row["key"])]), rel=1e-3, abs=1e-6
        )
    for _ in range(20):
        tab.browser.mouse("mouseWheel", begun["x"], begun["y"], deltaX=0, deltaY=100)
    assert tab.run(place)["window"] is None


def test_tiles_say_what_they_are(tab: Tab) -> None:
    """A pyramid of two levels, zoomed to the finer one; each number that is read off it, against the map."""
    length = 700
    weights = causal(length, heads=1, seed=6)
    made = page([Example("", {"0": Map(weights)})], budget_mb=EMPTY_MB + 0.42)
    assert made.carried[0].tiles == {256: 1}, made.report()
    tab.show(made.text, "heads=0&zoom=300-500x100-300")
    tab.browser.until("document.querySelector('.caption').textContent.includes('up to 3 × 3')")
    found = tab.run("""
      const canvas = root.querySelector(".matrix canvas"), box = canvas.getBoundingClientRect(), all = [];
      for (let n = 0; n < 30; n++) {
        const clientX = box.left + 90 + (box.width - 300) * ((n * 7) % 30) / 30;
        send(canvas, "pointermove", { clientX, clientY: box.top + 90 + (box.height - 150) * n / 30 });
        const { text, title } = reading(), block = root.querySelector(".reading [data-block]");
        const share = root.querySelector("[data-share]");
        if (title === "One weight" && block) all.push([text, block.textContent, share.textContent]);
      }
      return all;""")
    assert len(found) >= 5
    dense = weights.dense()[0].double()
    for text, largest, share in found:
        named = re.search(r"largest of \d+ × \d+ \(tokens (\d+)(?: to (\d+))? × (\d+)(?: to (\d+))?\)", text)
        assert named, text
        r0, r1, c0, c1 = (int(named[n] or named[n - 1]) for n in range(1, 5))
        block = dense[r0 : r1 + 1, c0 : c1 + 1]
        assert max(block.shape) <= 3
        assert float(largest) == pytest.approx(float(block.max()), rel=2e-3, abs=6e-4)
        assert float(share) == pytest.approx(float(block.sum(-1).mean()), rel=2e-3, abs=6e-4)


@pytest.mark.parametrize("policy", ["worker-src blob:", "worker-src 'none'"])
def test_a_page_whose_threads_are_forbidden_decodes_itself(tab: Tab, policy: str) -> None:
    text = page([Example("", {"0": Map(causal(400, heads=1))})]).text
    assert text.count("worker-src blob:") == 1
    tab.path.write_text(text.replace("worker-src blob:", policy), encoding="utf-8")
    tab.again("query=50")
    where, title, count = tab.browser.run(
        HELP
        + """
      return [page.decodedIn(), reading().title, reading().list.length];"""
    )
    assert (where, title, count) == ("worker" if "blob" in policy else "page", "What it looks at", 9)
    assert tab.show(small()).run("return page.decodedIn()") == "page"


@pytest.mark.usefixtures("browser")  # which says so if there is none
def test_a_small_page_is_drawn_when_it_has_loaded(tmp_path: Path) -> None:
    """Programs that take a picture of a page, or print it, wait no longer than that."""
    path = tmp_path / "page.html"
    path.write_text(page([Example("", {"0": Map(causal(200, heads=8))})]).text, encoding="utf-8")
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--dump-dom", path.as_uri()]
    document = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    assert re.search(r'class="heads"[^>]* data-drawn="1"', document)


def test_a_translator_sees_sources_alternatives_and_free_words(tab: Tab) -> None:
    """Sixty words, a target word clicked; the words that nothing was made of; the alignment as pairs."""
    source, target = [f"s{n}" for n in range(60)], [f"t{n}" for n in range(50)]
    scores = np.random.default_rng(3).random((2, 50, 60))
    heads = scores**8 / (scores**8).sum(-1, keepdims=True)
    others = [[(f"{word}a", 0.3), (f"{word}b", 0.2), (f"{word}c", 0.1)] for word in target]
    one = Example("sixty", {"decoder.0.cross": Map(heads, target, source, others)})
    tab.show(page([one]).text, "heads=mean&view=links")
    mean = heads.mean(0)
    free = sorted(set(range(60)) - set(mean.argmax(-1).tolist()))
    found = tab.run("""
      const said = root.querySelector(".reading .free").textContent, pairs = page.exported("pharaoh");
      await page.changed({ view: "matrix" });
      queries()[7].click();
      const { list, text } = reading();
      return { said, pairs, list, text };""")
    assert found["said"].endswith(": " + ", ".join(f"s{key} ({key})" for key in free))
    assert found["pairs"] == " ".join(f"{key}-{query}" for query, key in enumerate(mean.argmax(-1)))
    best = np.argsort(-mean[7])[:9]
    assert [int(place) for _, place, _ in found["list"][:9]] == best.tolist()
    for _, place, number in found["list"][:9]:
        assert float(number) == pytest.approx(mean[7, int(place)], abs=6e-4)
    assert [(text, number) for text, _, number in found["list"][9:]] == [
        ("t7a", "0.300"),
        ("t7b", "0.200"),
        ("t7c", "0.100"),
    ]
