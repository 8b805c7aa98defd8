"""Every number that the page shows is one weight of the map, or is named as a statistic of a block, in a browser."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from regard import page
from regard.views import Example, Map
from tests.views.chromium import Chromium
from tests.views.test_page_in_a_browser import causal
from tests.views.written_dates import EMPTY_MB

HEBREW = [*"יום שבת 21 בנובמבר 2046"]
LONG, HEADS = 300, 3
BLOCK = r"(largest|mean) of (\d+) × (\d+) \(tokens (\d+)(?: to (\d+))? × (\d+)(?: to (\d+))?\)"
TOLERANCE = 2e-3
"""Half precision and three digits."""


MAPS = {
    name: causal(length, HEADS, seed)
    for seed, (name, length) in enumerate({"exact": 40, "pooled": LONG, "hebrew": len(HEBREW)}.items())
}


def document(*, budget_mb: float = EMPTY_MB + 0.14) -> str:
    """Three sentences. Of the long one the budget has pictures and the strongest keys of its queries, and no more."""
    words = [f"w{n}" for n in range(LONG)]
    examples = [
        Example("exact", {"0": Map(MAPS["exact"], words[:40], words[:40])}),
        Example("pooled", {"0": Map(MAPS["pooled"], words, words)}),
        Example("hebrew", {"0": Map(MAPS["hebrew"], HEBREW, HEBREW)}),
    ]
    made = page(examples, budget_mb=budget_mb, exact=[])
    assert made.carried[1].exact == 0, made.report()
    assert made.carried[1].of_each_query.get(16) == HEADS + 1
    return made.text


READ = """
const page = regard();
await page.ready;
await page.changed({ example: %d, heads: [%s], window: %s, view: "matrix", focus: null, pinned: false });
const root = document.getElementById("regard"), canvas = root.querySelector(".matrix canvas");
const box = canvas.getBoundingClientRect(), all = [];
let seed = %d;
const random = () => (seed = (seed * 48271) %% 2147483647) / 2147483647;
while (all.length < %d) {
  const [clientX, clientY] = [box.left + random() * box.width, box.top + random() * box.height];
  canvas.dispatchEvent(new PointerEvent("pointermove", { clientX, clientY, bubbles: true, pointerType: "mouse" }));
  const reading = root.querySelector(".reading"), title = reading.querySelector("h2").textContent;
  if (title === "Reading") continue;
  all.push({
    title, text: reading.textContent, place: page.state().focus,
    exact: [...reading.querySelectorAll("[data-exact]")].map((one) => one.textContent),
    block: [...reading.querySelectorAll("[data-block]")].map((one) => one.textContent),
    items: [...reading.querySelectorAll("li small")].map((one) => Number(one.textContent)),
  });
}
return all;
"""


def read_off(browser: Chromium, path: Path, example: int, head: int | str, window: Any, count: int) -> list[Any]:
    if browser.run("return location.href;") != f"file://{path}":
        browser.open(f"file://{path}")
        browser.until("globalThis.regard?.()")
    named = f'"{head}"' if isinstance(head, str) else head
    where = "null" if window is None else list(window)
    found: list[Any] = browser.run(READ % (example, named, where, 7 + example, count))
    assert browser.errors == []
    return found


def number(text: str) -> float:
    return float(text.replace("< ", ""))


def close(said: str, weight: float) -> None:
    assert number(said) == pytest.approx(weight, rel=TOLERANCE, abs=6e-4), said


def check(found: list[Any], weights: np.ndarray) -> int:
    count = 0
    for one in found:
        row, column = (one["place"].get(name) for name in ("row", "column"))
        if one["title"] == "One weight":
            assert f"query {row}, key {column}" in one["text"]
            for said in one["exact"]:
                close(said, weights[row, column])
                count += 1
            for said in one["block"]:
                what = re.search(BLOCK, one["text"])
                assert what, one["text"]
                r0, r1, c0, c1 = int(what[4]), int(what[5] or what[4]), int(what[6]), int(what[7] or what[6])
                assert r0 <= row <= r1
                assert c0 <= column <= c1
                block = weights[r0 : r1 + 1, c0 : c1 + 1]
                assert block.shape == (int(what[2]), int(what[3]))
                close(said, block.max() if what[1] == "largest" else block.mean())
                count += 1
            if bound := re.search(r"at most ([\d.e-]+)", one["text"]):
                assert weights[row, column] <= number(bound[1]) * (1 + TOLERANCE) + 6e-4
        else:
            line = weights[row] if row is not None else weights[:, column]
            for place, said in zip(one["items"], one["exact"], strict=True):
                close(said, line[place])
                count += 1
            if row is not None:
                sums = re.search(r"share ([\d.e-]+); sum ([\d.]+)", one["text"])
                assert sums, one["text"]
                close(sums[2], 1.0)
                shown = sum(line[place] for place in one["items"])
                assert number(sums[1]) == pytest.approx(1 - shown, abs=2e-3)
                count += 1
    return count


VIEWS: list[tuple[str, int | str, Any]] = [
    ("exact", 1, None), ("exact", "mean", None), ("pooled", 2, None), ("pooled", "mean", None),
    ("pooled", 0, (100, 140, 60, 100)), ("pooled", "mean", (200, 230, 180, 220)),
    ("hebrew", 0, None), ("hebrew", "mean", (2, 14, 5, 17)),
]  # fmt: skip


def of(name: str, head: int | str) -> np.ndarray:
    dense = MAPS[name].dense().double().numpy()
    return dense.mean(0) if head == "mean" else dense[int(head)]


def test_200_numbers_of_every_view_are_those_of_the_map(browser: Chromium, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(document(), encoding="utf-8")
    counts = {}
    for name, head, window in VIEWS:
        found = read_off(browser, path, list(MAPS).index(name), head, window, 45)
        counts[name, head, window] = check(found, of(name, head))
    assert min(counts.values()) >= 25, counts
    assert sum(counts.values()) >= 200
