"""The atlas: its numbers against DuckDB's, its bytes, the command, and the page in a browser."""

import csv
import io
import json
import re
import shutil
import zlib
from base64 import b64decode
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from regard.corpus import atlas, compare_statistics
from regard.corpus.settings import USUAL_STATISTICS
from regard.errors import TooLargeError
from regard.views.colours import LIGHT, hexadecimal
from tests.conftest import Call, check_one_line
from tests.views.chromium import Chromium
from tests.views.conftest import browser as browser
from tests.views.test_page_access import AXE, serious


def data_of(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="regard-data">(.*?)</script>', text, re.DOTALL)
    assert found
    data: dict[str, Any] = json.loads(found[1])
    data["table"] = unpacked(data["table"])
    data["examples"] = [{layer: unpacked(one) for layer, one in of.items()} for of in data["examples"]]
    return data


def unpacked(text: str) -> Any:
    return json.loads(zlib.decompress(b64decode(text)))


def means(stats: Path) -> list[tuple[Any, ...]]:
    of = " UNION ALL ".join(
        f"SELECT layer, head, '{name}' AS statistic, count({name}), avg({name}::DOUBLE), stddev({name}::DOUBLE) "
        f"FROM '{stats}/heads/*.parquet' WHERE error IS NULL GROUP BY ALL"
        for name in USUAL_STATISTICS
    )
    rows = duckdb.sql(of).fetchall()
    return sorted(rows, key=lambda row: (*row[:2], USUAL_STATISTICS.index(row[2])))


def test_the_table_is_that_of_the_rows(stats: Path, sharper: Path) -> None:
    expected, other = means(stats), means(sharper)
    rows = list(csv.DictReader(io.StringIO(atlas(stats, sharper).csv())))
    assert [(int(r["layer"]), int(r["head"]), r["statistic"]) for r in rows] == [row[:3] for row in expected]
    for row, one, two in zip(rows, expected, other, strict=True):
        numbers = [float(row[name]) for name in ("mean", "deviation", "other_mean", "other_deviation", "difference")]
        np.testing.assert_allclose(numbers, [*one[4:], *two[4:], two[4] - one[4]], rtol=1e-6, atol=1e-8)
        assert (int(row["count"]), int(row["other_count"])) == (one[3], two[3])
    assert {(r["layer"], r["head"]) for r in rows if r["changed"] == "1"} == {("1", "1")}
    assert atlas(stats).csv().splitlines()[0] == "layer,head,statistic,count,mean,deviation"


def test_the_page_has_the_numbers_and_examples_of_the_files(stats: Path, sharper: Path) -> None:
    text = atlas(stats, sharper).page()
    data = data_of(text)
    assert data["about"] == ["60 documents, 1,260 tokens; 2 of the documents could not be measured"] * 2
    table = data["table"]
    assert table["statistics"] == list(USUAL_STATISTICS)
    for folder, of, examples in zip((stats, sharper), table["of"], data["examples"], strict=True):
        for layer, head, name, count, mean, deviation in means(folder):
            at = table["heads"].index([layer, head]), table["statistics"].index(name)
            found = [of[part][at[0]][at[1]] for part in ("mean", "deviation")]
            np.testing.assert_allclose(found, [mean, deviation], rtol=1e-6)
            assert of["count"][at[0]][at[1]] == sum(of["histogram"][at[0]][at[1]]) == count
        shown = [
            (int(layer), *key.split(), rank, *one)
            for layer, of_layer in examples.items()
            for key, ones in of_layer.items()
            for rank, one in enumerate(ones)
        ]
        rows = parquet.read_table(folder / "examples").to_pylist()
        assert len(shown) == len(rows) == 4 * 5 * 3
        by_place = {(int(layer), int(head), name, rank): rest for layer, head, name, rank, *rest in shown}
        for row in rows:
            _, id, query, _, start, tokens, keys, key_tokens, _ = by_place[
                row["layer"], row["head"], row["statistic"], row["rank"]
            ]
            assert (id, query, start, tokens, keys, key_tokens) == tuple(
                row[name] for name in ("id", "query", "start", "tokens", "keys", "key_tokens")
            )
    assert not re.search(r"https?:|@import|src=", text)


def test_a_page_keeps_its_budget_by_leaving_out_weaker_examples(stats: Path) -> None:
    made = atlas(stats)
    whole = made.page()
    most = len(whole.encode()) / 1e6 - 0.0005
    smaller = data_of(made.page(budget_mb=most))
    assert len(made.page(budget_mb=most).encode()) <= most * 1e6
    assert smaller["note"] == "The page has the 2 strongest of 3 examples of each head."
    kept = [one for of in smaller["examples"][0].values() for one in of.values()]
    whole_kept = [one for of in data_of(whole)["examples"][0].values() for one in of.values()]
    assert kept == [one[:2] for one in whole_kept]
    with pytest.raises(TooLargeError, match="the table of 4 heads takes"):
        made.page(budget_mb=0.001)


def test_the_command_writes_a_page_and_the_table(stats: Path, tmp_path: Path, call: Call) -> None:
    page, table = tmp_path / "page.html", tmp_path / "heads.csv"
    status, out, err = call("atlas", str(stats), "--out", str(page), "--csv", str(table))
    assert (status, out, err) == (0, f"{page}\n{table}\n", "")
    assert data_of(page.read_text(encoding="utf-8"))["names"] == ["stats"]
    assert call("atlas", str(stats), "--csv", "-")[1] == atlas(stats).csv() == table.read_bytes().decode()
    for arguments, said in (
        ([str(stats)], "give --out page.html, --csv FILE, or a second folder"),
        ([str(stats), str(page)], f"{page} is no folder"),
        ([str(stats), "--out", str(tmp_path)], f"{tmp_path} is a folder"),
    ):
        check_one_line(call("atlas", *arguments), said)


HELP = """
const root = document.getElementById("regard");
const all = (name) => [...root.querySelectorAll(name)];
const rows = () => all("tbody tr").map((row) => [...row.children].map((cell) => cell.textContent));
const settled = async () => { await regard().ready; await new Promise((done) => setTimeout(done, 60)); };
const set = async (target, value) => {
  target.value = value;
  target.dispatchEvent(new Event("change"));
  await settled();
};
const field = (label) => all("label").find((one) => one.textContent.startsWith(label));
"""


def shown(browser: Chromium, path: Path, link: str = "") -> None:
    browser.open(f"file://{path}#{link}")
    browser.until("document.getElementById('regard').dataset.drawn")


def run(browser: Chromium, program: str) -> Any:
    found = browser.run(HELP + program)
    assert browser.errors == []
    return found


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory, stats: Path, sharper: Path) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pages")
    return atlas(stats).save(folder / "one.html"), atlas(stats, sharper).save(folder / "two.html")


def test_heads_are_sorted_filtered_and_saved(browser: Chromium, pages: tuple[Path, Path], stats: Path) -> None:
    browser.size(1280, 800)
    shown(browser, pages[0], "theme=light")
    by_entropy = sorted(
        ((mean, f"{layer}.{head}") for layer, head, name, _, mean, _ in means(stats) if name == "entropy"), reverse=True
    )
    names = [name for _, name in by_entropy]
    sorted_, turned, filtered, link, saved = run(
        browser,
        f"""
        const seen = [rows()];
        const heading = () => all("thead button").find((one) => one.textContent.startsWith("entropy"));
        heading().click(); await settled(); seen.push(rows().map((row) => row[0]));
        await set(field("From").querySelector("input"), {by_entropy[1][0] - 1e-6});
        seen.push(rows().map((row) => row[0]), location.hash);
        await set(field("From").querySelector("input"), "");
        let blob = null;
        URL.createObjectURL = (one) => {{ blob = one; return "#"; }};
        heading().click(); await settled();
        all("thead button")[0].click(); await settled();
        all(".more button").find((one) => one.textContent === "CSV").click();
        seen.push(await blob.text());
        return seen;""",
    )
    assert [row[0] for row in sorted_] == names
    assert [row[1] for row in sorted_] == [f"{mean:.3f}" for mean, _ in by_entropy]
    assert turned == names[::-1]
    assert filtered == names[:2][::-1]
    assert "from=" in link
    assert list(csv.reader(io.StringIO(saved))) == [
        [str(float(cell)) if re.fullmatch(r"[\d.e-]+", cell) and "." in cell else cell for cell in row]
        for row in csv.reader(io.StringIO(atlas(stats).csv()))
    ]


def test_an_example_is_a_text_in_the_colours_of_its_weights(
    browser: Chromium, pages: tuple[Path, Path], stats: Path
) -> None:
    browser.size(1024, 768)
    shown(browser, pages[0], "theme=light&statistic=induction&head=1.1")
    row = next(
        one
        for one in parquet.read_table(stats / "examples").to_pylist()
        if (one["layer"], one["head"], one["statistic"], one["rank"]) == (1, 1, "induction", 0)
    )
    title, label, about, tokens, query, coloured, looked = run(
        browser,
        """
        const example = root.querySelector(".examples li"), spans = [...example.querySelectorAll(".token")];
        return [root.querySelector(".one h2").textContent, root.querySelector(".one canvas").getAttribute("aria-label"),
          example.querySelector(".about").textContent, spans.map((one) => one.textContent),
          spans.findIndex((one) => one.classList.contains("focus")),
          spans.flatMap((one, at) => (one.style.background ? [[at, one.style.background]] : [])),
          example.querySelector(".quiet").textContent];""",
    )
    assert title == "Head 1.1: induction over documents"
    assert "51 documents: mean" in label
    assert row["id"] in about
    assert f"{row['value']:.3f}" in about
    assert tokens == row["tokens"]
    assert query == row["query"] - row["start"]
    weights = {key - row["start"]: weight for key, weight in zip(row["keys"], row["weights"], strict=True) if weight}
    assert {at for at, _ in coloured} == set(weights)
    colours = [hexadecimal(one) for one in LIGHT.colours()]
    for at, colour in coloured:
        share = weights[at] ** 0.5  # from 0 to 1 in every example
        assert colour == "rgb({}, {}, {})".format(*bytes.fromhex(colours[int(share * (len(colours) - 1) + 0.5)][1:]))
    assert looked.startswith(f"Token {row['query']} looks at {row['key_tokens'][0]} ({row['keys'][0]}) ")


def test_tokens_that_were_not_kept_are_striped_with_their_share(
    browser: Chromium, stats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two keys are kept of each example: the rest is no blank."""
    folder = tmp_path / "stats"
    shutil.copytree(stats, folder)
    for path in (folder / "examples").glob("*.parquet"):
        table = parquet.read_table(path)
        cut = {name: [one[:2] for one in table[name].to_pylist()] for name in ("keys", "key_tokens", "weights")}
        rows = [{**row, **{name: cut[name][at] for name in cut}} for at, row in enumerate(table.to_pylist())]
        parquet.write_table(pa.Table.from_pylist(rows, schema=table.schema), path)
    monkeypatch.setattr("regard.corpus.examples.STRONGEST", 2)
    atlas(folder).save(tmp_path / "cut.html")
    shown(browser, tmp_path / "cut.html", "theme=light&statistic=entropy&head=0.0")
    row = next(one for one in parquet.read_table(folder / "examples").to_pylist() if one["statistic"] == "entropy")
    striped, said, scale = run(
        browser,
        """
        const example = root.querySelector(".examples li"), spans = [...example.querySelectorAll(".token")];
        return [spans.flatMap((one, at) => (one.classList.contains("unkept") ? [at] : [])),
          example.querySelector(".quiet").textContent, root.querySelector(".scale").textContent];""",
    )
    there = {key - row["start"] for key in row["keys"]}
    assert striped == [at for at in range(len(row["tokens"])) if at not in there]
    assert f"{100 * (1 - sum(row['weights'])):.1f}"[:3] in said
    assert scale.startswith("weight 0  1, by its square root, alike in every example")


def test_folders_of_unlike_models_say_so(stats: Path, sharper: Path, tmp_path: Path) -> None:
    assert data_of(atlas(stats, sharper).page())["unlike"] == "" == compare_statistics(stats, sharper).unlike
    shutil.copytree(sharper, other := tmp_path / "other")
    settings = (other / "run.toml").read_text()
    (other / "run.toml").write_text(re.sub(r'tokenizer = ".', 'tokenizer = "z', settings))
    assert "unlike in their tokenizer" in data_of(atlas(stats, other).page())["unlike"]
    assert "unlike in their tokenizer" in str(compare_statistics(stats, other))


def test_two_folders_stand_side_by_side(browser: Chromium, pages: tuple[Path, Path]) -> None:
    browser.size(1280, 800)
    shown(browser, pages[1])
    first, found, changed, examples = run(
        browser,
        """
        const seen = [rows()[0], root.querySelector('[role="status"]').textContent];
        root.querySelector('input[type="checkbox"]').click(); await settled();
        seen.push(rows().map((row) => row[0]), all(".folders h3").map((one) => one.textContent));
        return seen;""",
    )
    assert first[0] == "1.1"
    assert " to " in first[4]
    assert found == "4 of 4 heads; 1 changed in entropy, by 95 % intervals that hold together"
    assert changed == ["1.1"]
    assert [one.endswith(": largest entropy") for one in examples] == [True, True]
    browser.size(360, 800)
    wide, seen = run(
        browser,
        "const frame = root.querySelector('.rows'); await settled(); return [frame.scrollWidth, frame.clientWidth];",
    )
    assert wide <= seen


def test_folders_of_long_names_keep_within_the_page(
    browser: Chromium, stats: Path, sharper: Path, tmp_path: Path
) -> None:
    folders = [
        shutil.copytree(one, tmp_path / f"statistics_of_every_head_over_the_whole_corpus_{name}")
        for one, name in ((stats, "before"), (sharper, "after"))
    ]
    path = atlas(*folders).save(tmp_path / "long.html")
    for width in (1280, 500, 360):
        browser.size(width, 800)
        shown(browser, path)
        cut = run(
            browser,
            """
            await settled();
            const found = all(".rows, thead button, .one, .legend, .legend > span, h3");
            const wide = (one) => one.clientWidth && one.scrollWidth > one.clientWidth;
            return found.filter(wide).map((one) => one.outerHTML.slice(0, 99));""",
        )
        assert cut == [], width


def test_the_keyboard_walks_through_the_heads(browser: Chromium, pages: tuple[Path, Path]) -> None:
    shown(browser, pages[0], "sort=head&up=1&head=0.0")
    run(browser, "root.querySelector('tr.chosen button').focus();")
    seen = []
    for key in ("ArrowDown", "ArrowDown", "End", "Home", "ArrowUp"):
        browser.press(key)
        chosen = "[root.querySelector('.chosen th').textContent, document.activeElement.textContent]"
        seen.append(run(browser, f"await settled(); return {chosen};"))
    assert seen == [["0.1", "0.1"], ["1.0", "1.0"], ["1.1", "1.1"], ["0.0", "0.0"], ["0.0", "0.0"]]


@pytest.mark.parametrize("link", ["head=9.9&statistic=x&sort=y&from=z", "from=1e99", "theme=x&up=2&changed=1"])
def test_a_link_to_an_atlas_can_wish_for_anything(browser: Chromium, pages: tuple[Path, Path], link: str) -> None:
    shown(browser, pages[1], link)
    assert run(browser, "return root.querySelector('.one h2').textContent;").startswith("Head ")


@pytest.mark.skipif(not AXE.is_file(), reason="axe-core is not installed: `make browser` installs it")
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_serious_in_an_atlas(browser: Chromium, pages: tuple[Path, Path], theme: str) -> None:
    for width in (1280, 768, 360):
        browser.size(width, 800)
        for page in pages:
            shown(browser, page, f"theme={theme}")
            browser.run("document.querySelector('.more').open = true;")
            assert serious(browser) == [], (width, page)
            assert run(browser, "return document.documentElement.scrollWidth <= innerWidth;")
