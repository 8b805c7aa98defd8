"""The first glance at a page: its title, its header at every width, and the choices that are kept in sight."""

import numpy as np
import pytest
import torch

import regard
from regard import page
from regard.views import Example, Map, model_example
from regard.views.html.page import resource
from tests import ROOT
from tests.modules import watching
from tests.views.tab import Tab
from tests.views.test_page_in_a_browser import causal
from tests.views.written_dates import EMPTY_MB, embedded, sentence, softmax

LONG = 2000
TOKENS = [f"word{n}" for n in range(LONG)]


def uniform(heads: int, length: int) -> np.ndarray:
    return np.full((heads, length, length), 1 / length)


@pytest.mark.parametrize("size", [(1280, 800), (1024, 768), (768, 1024), (360, 740)])
def test_every_choice_is_reached_at_every_width(tab: Tab, size: tuple[int, int]) -> None:
    examples = [sentence("fr"), sentence("de"), sentence("ru")]
    tab.browser.size(*size)
    tab.show(page(examples, title="Attention of a run with a name (translation)").text)
    for view in ("matrix", "links", "compare"):
        found = tab.run(f"""
          await page.changed({{ view: "{view}" }});
          await new Promise(requestAnimationFrame);
          const controls = [...root.querySelectorAll("header select, header summary, .strip select, .legend select")];
          const hidden = controls.filter((one) => {{
            const {{ left, top, width, height }} = one.getBoundingClientRect();
            const at = document.elementFromPoint(left + width / 2, top + height / 2);
            return !width || left < 0 || left + width > innerWidth || (at !== one && !one.contains(at));
          }});
          return {{ count: controls.length, hidden: hidden.map((one) => one.parentNode.firstChild.textContent),
            widths: [document.documentElement.scrollWidth, root.scrollWidth] }};""")
        assert (found["count"], found["hidden"]) == (9, [] if view == "compare" else ["With"]), view
        assert max(found["widths"]) <= size[0]


def test_the_header_says_what_is_shown_of_what_by_which_head(tab: Tab) -> None:
    tab.show(page([sentence("fr"), sentence("de")], title="Attention of mine").text, "heads=1&layer=0")
    about = "return [root.querySelector('h1').textContent, root.querySelector('.about').textContent];"
    title, said = tab.run(about)
    assert title == "Attention of mine"
    assert said.startswith("Head 1 of layer 0, decoder cross attention, in “samedi 21 novembre 2026”. It ")
    assert tab.run(f"await page.changed({{ heads: [0, 1], view: 'compare' }}); {about}")[1] == (
        "Heads 0, 1 of layer 0, decoder cross attention, in “samedi 21 novembre 2026”, beside layer 0, head 0 in "
        "“Samstag, 21. November 2026”. "
    )


def test_a_page_without_a_title_names_the_model() -> None:
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    seen = watching(layer)(torch.randn(1, 5, 16))
    assert "<title>Attention of TransformerEncoderLayer</title>" in page(seen).text
    assert "<title>Attention</title>" in page([one for _, one in seen.items()]).text
    assert "<title>Mine</title>" in page(seen, title="Mine").text


def test_only_two_columns_promise_lines(tab: Tab) -> None:
    tab.show(page([Example("", {"0": Map(uniform(1, 8))})]).text)
    matrix, links = tab.run("""
      const before = reading().text;
      await page.changed({ view: "links" });
      return [before, reading().text];""")
    assert ("line" in matrix, "lines join" in links) == (False, True)
    assert "1 head of 8 queries and 8 keys." in matrix


def test_the_matrix_has_its_heading_again_after_two_columns(tab: Tab) -> None:
    tab.show(page([Example("", {"0": Map(softmax(2, 6, 6))})]).text)
    for other in ("links", "compare"):
        before, between, after = tab.run(f"""
          const caption = () => root.querySelector(".caption").textContent, all = [caption()];
          await page.changed({{ view: "{other}" }}); all.push(caption());
          await page.changed({{ view: "matrix" }}); return [...all, caption()];""")
        assert before == after == "Rows look at columns; each cell is one weight"
        assert between != before


@pytest.fixture(scope="module")
def long_page() -> str:
    words = [*"abcdefgh"]
    many = Example("many", {f"{n}": Map(softmax(12, 8, 8, seed=n), words, words) for n in range(6)})
    long = Example("long", {"0": Map(causal(LONG, heads=1), TOKENS, TOKENS)})
    return page([long, many], budget_mb=EMPTY_MB + 0.6, exact=[]).text


def test_a_clicked_cell_of_a_long_map_scrolls_the_text_to_its_token(tab: Tab, long_page: str) -> None:
    at = tab.show(long_page).run("""
      const box = root.querySelector(".matrix canvas").getBoundingClientRect();
      return [box.left + box.width * 0.4, box.top + box.height * 0.8];""")
    tab.browser.click(*at)
    row, column, seen = tab.run("""
      await frames();
      const { row, column } = page.state().focus;
      return [row, column, inText()];""")
    assert row > 1000 > column
    assert seen == TOKENS[row]


def test_both_tokens_of_a_kept_cell_are_marked_in_the_text(tab: Tab) -> None:
    tab.show(page([Example("", {"0": Map(causal(8, heads=1), [*"abcdefgh"], [*"abcdefgh"])})]).text, "query=6&key=2")
    focus, shaded = tab.run("""
      const tokens = [...root.querySelectorAll(".token")];
      return [tokens.filter((one) => one.matches(".focus")), tokens.filter((one) => one.style.background)]
        .map((some) => some.map((one) => one.textContent));""")
    assert (focus, shaded) == (["g"], ["c"])


def test_the_two_columns_show_the_kept_query(tab: Tab, long_page: str) -> None:
    for link in ("query=1500&view=links", "query=1500"):
        drawn = tab.show(long_page, link).run("""
          const written = [], draw = CanvasRenderingContext2D.prototype.fillText;
          CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
            written.push([text, y]);
            return draw.call(this, text, x, y);
          };
          await page.changed({ view: "matrix" }); written.length = 0;
          await page.changed({ view: "links" }); await frames();
          const height = root.querySelector(".links").clientHeight;
          return written.filter(([, y]) => y > 30 && y < height).map(([text]) => text);""")
        assert "word1500" in drawn


def test_the_window_of_a_zoomed_map_follows_the_kept_token(tab: Tab, long_page: str) -> None:
    window, seen = tab.show(long_page, "query=10&zoom=0-40x0-40").run("""
      const find = root.querySelector("input[type=search]");
      Object.assign(find, { value: "word1500" });
      find.dispatchEvent(new Event("input"));
      find.dispatchEvent(new KeyboardEvent("keydown", { key: "Enter", bubbles: true }));
      await frames();
      return [page.state().window, inText()];""")
    assert window[0] <= 1500 < window[1] == window[0] + 40
    assert seen == "word1500"


def test_the_chosen_head_is_inside_the_strip(tab: Tab, long_page: str) -> None:
    chosen = """
      await frames();
      const thumb = root.querySelector('.thumb[aria-pressed="true"]');
      return [thumb.textContent, inside(thumb, root.querySelector(".heads"))];"""
    assert tab.show(long_page, "example=1&layer=5&heads=11").run(chosen) == ["5.11", True]
    assert tab.run("await page.changed({ layer: '0', heads: [0] });" + chosen) == ["0.0", True]
    text, is_seen = tab.run("await page.changed({ layer: '3', heads: [7], sort: 'entropy' });" + chosen)
    assert (text.partition(":")[0], is_seen) == ("3.7", True)


def looks_at(keys: list[int]) -> np.ndarray:
    """Nine tenths of each query's weight on one key, the rest on all that it may see."""
    length = len(keys)
    even = np.tril(np.ones((length, length)))
    weights = 0.1 * even / even.sum(-1, keepdims=True)
    weights[np.arange(length), keys] += 0.9
    return weights


def patterned() -> tuple[list[str], dict[str, np.ndarray]]:
    count = 20
    words, every = [f"w{n}" for n in range(count)] * 2, range(2 * count)
    heads = {
        "previous": looks_at([max(0, n - 1) for n in every]),
        "first": looks_at([0 for n in every]),
        "self": looks_at([*every]),
        "duplicate": looks_at([n - count if n >= count else 0 for n in every]),
        "induction": looks_at([n - count + 1 if n >= count else 0 for n in every]),
        "entropy": np.tril(np.ones((2 * count,) * 2)) / np.arange(1, 2 * count + 1)[:, None],
    }
    return words, heads


def test_filters_find_the_heads_that_do_it(tab: Tab) -> None:
    words, heads = patterned()
    tab.show(page([Example("", {"0": Map(np.stack([*heads.values()]), words, words)})]).text)
    for place, (name, _) in enumerate(heads.items()):
        found, note, offered = tab.run(f"""
          await page.changed({{ sort: "{name}" }});
          const sort = root.querySelector(".sorting select");
          return [[...root.querySelectorAll(".thumb")].map((one) => Number(one.dataset.head)),
            root.querySelector(".sorting small").textContent, [...sort.options].map((one) => one.value)];""")
        assert found[0] == place, name
        assert place == 5 or len(found) < len(heads), name
        assert note.startswith(f"{len(found)} of 6 heads"), note
    assert {"near", "distance", "sharp", "telling", "largest", *heads} < set(offered)
    for name, passing in (("near", {0, 2}), ("sharp", {0, 1, 2, 3, 4}), ("largest", {*range(6)})):
        some = tab.run(f"""
          await page.changed({{ sort: "{name}" }});
          return [...root.querySelectorAll(".thumb")].map((one) => Number(one.dataset.head));""")
        assert set(some) == passing, name
    said = tab.run("""
      const all = [];
      for (let head = 0; head < 6; head++) {
        await page.changed({ heads: [head] });
        all.push(root.querySelector(".about").textContent.match(/It .*/)[0]);
      }
      return all;""")
    patterns = [
        "the token before",
        "the first token",
        "its own token",
        "earlier copies of its token",
        "the token after",
    ]
    for one, words_ in zip(said, patterns, strict=False):
        assert one.startswith(f"It looks mostly at {words_}"), one
    assert said[5].startswith("It spreads its weight over about 1")


def test_the_docs_state_the_limits_of_the_filters() -> None:
    script, text = resource("page_words.js"), (ROOT / "docs/page.md").read_text(encoding="utf-8")
    assert "const FOLLOWS = 0.3;\n" in script
    assert "| 0.3 of their weight or more |" in text
    assert "const FEW = 4, PART = 1 / 4;\n" in script
    assert text.count("of at most 4 tokens; of at least a quarter of the text") == 2


def test_of_no_head_that_does_it_the_nearest_come_first(tab: Tab) -> None:
    words, back = [*"abcdefgh"], [[max(0, n - by) for n in range(8)] for by in (3, 1)]
    heads = np.stack([0.8 * uniform(1, 8)[0] + 0.2 * looks_at(keys) for keys in back])
    tab.show(page([Example("", {"0": Map(heads, words, words)})]).text, "sort=previous")
    order, note = tab.run("""
      const order = [...root.querySelectorAll(".thumb")].map((one) => one.dataset.head);
      return [order, root.querySelector(".sorting small").textContent];""")
    assert (order, note) == (["1", "0"], "none of 2 heads does: all, the nearest first")


def test_the_statistics_of_the_page_are_those_of_the_head_table() -> None:
    for length in (30, 150):
        weights, words = causal(length, heads=3), [f"w{n % 11}" for n in range(length)]
        (entry,) = embedded(page([Example("", {"0": Map(weights, words, words)})]).text)["examples"][0]["maps"]
        table = regard.watching.head_table([weights], ids=torch.arange(length) % 11)
        for name in ("distance", "entropy", "self", "previous", "first", "induction", "duplicate"):
            np.testing.assert_allclose(entry["statistics"][name][:3], table[name][0], rtol=1e-3, atol=1e-6)


def test_queries_of_another_text_have_no_patterns() -> None:
    maps = {"cross": Map(softmax(2, 4, 4), [*"abca"], [*"xyzx"]), "own": Map(softmax(2, 4, 4), [*"abca"], [*"abca"])}
    cross, own = embedded(page([Example("", maps)]).text)["examples"][0]["maps"]
    assert {*own["statistics"]} - {*cross["statistics"]} == {"self", "previous", "induction", "duplicate"}


def test_the_most_telling_head_is_shown_first(tab: Tab) -> None:
    """Neither a sink, nor a head that looks at itself, nor an even one; of all layers of the kind, or of `show`."""
    words, heads = patterned()
    sure, unsure = heads["duplicate"], 0.5 * heads["duplicate"] + 0.5 * heads["entropy"]
    dull = Map(np.stack([heads["first"], heads["self"], heads["entropy"]]), words, words)
    maps = {"0": dull, "1": Map(np.stack([unsure, heads["first"], sure]), words, words), "2": dull, "other.0": dull}
    for show, expected in (("2", ["2", 2]), ("", ["1", 2])):
        made = page([Example("", {name: maps[name] for name in ("other.0", "0", "1", "2")}, show)])
        assert tab.show(made.text).run("return [page.state().layer, page.state().heads[0]];") == expected
        entries = embedded(made.text)["examples"][0]["maps"]
        for entry in entries:
            dense = maps[entry["name"]].weights
            entropy = -(dense * np.log(np.where(dense > 0, dense, 1))).sum(-1).mean(-1)
            mean = dense.mean(1)
            of_mean = -(mean * np.log(np.where(mean > 0, mean, 1))).sum(-1)
            own = np.diagonal(dense, axis1=1, axis2=2).mean(-1)
            np.testing.assert_allclose(entry["statistics"]["telling"][:3], (1 - own) * (of_mean - entropy), atol=1e-3)
    # A link says otherwise.
    assert tab.again("heads=mean&layer=0").run("return page.state().heads;") == ["mean"]


def test_without_statistics_the_mean_comes_first(tab: Tab) -> None:
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    seen = watching(layer, keep=regard.Summarize("pooled_mean", rows=8, columns=8))(torch.randn(1, 30, 16))
    assert tab.show(page([model_example(seen)]).text).run("return page.state().heads;") == ["mean"]


def test_more_says_once_that_maps_have_the_same(tab: Tab) -> None:
    made = page([sentence(locale) for locale in ("fr", "de", "ru", "ar")])
    lines = tab.show(made.text).run("return [...root.querySelectorAll('.more li')].map((one) => one.textContent);")
    assert lines == ["12 maps (encoder.0, decoder.0.cross, decoder.1.cross): every weight of every head"]
    assert made.report().splitlines()[1:] == lines
