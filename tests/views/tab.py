"""A page in the browser of the tests, and the words in which tests ask it."""

from pathlib import Path
from typing import Any

from tests.views.chromium import Chromium

HELP = """
const root = document.getElementById("regard"), page = regard();
await page.ready;
const line = (name) => [...root.querySelector(`.scroller[aria-label^="${name}"]`).querySelectorAll(".token")];
const keys = () => line("Keys"), queries = () => line("Queries");
const send = (target, type, more = {}) =>
  target.dispatchEvent(new PointerEvent(type, { pointerType: "mouse", bubbles: true, ...more }));
const field = (label) => [...root.querySelectorAll("label")].find((one) => one.textContent.startsWith(label));
const choose = (label, value) => {
  const select = field(label).querySelector("select");
  select.value = value;
  select.dispatchEvent(new Event("change"));
  return new Promise((done) => setTimeout(done, 30));
};
const byte = (text) => Number(text).toString(16).padStart(2, "0");
const hex = (colour) => "#" + (colour.match(/\\d+/g) ?? []).slice(0, 3).map(byte).join("");
const shades = (tokens) => tokens.map((token) => token.style.background && hex(token.style.background));
const reading = () => ({
  title: root.querySelector(".reading h2").textContent,
  text: root.querySelector(".reading").textContent,
  list: [...root.querySelectorAll(".reading li")].map((item) => [...item.children].map((part) => part.textContent)),
});
const inside = (inner, outer) => {
  const [a, b] = [inner.getBoundingClientRect(), outer.getBoundingClientRect()];
  const isAcross = a.left >= b.left - 1 && a.right <= b.right + 1;
  return a.width > 0 && isAcross && a.top >= b.top - 1 && a.bottom <= b.bottom + 1;
};
const frames = async () => { for (let n = 0; n < 3; n++) await new Promise(requestAnimationFrame); };
const inText = () => {
  const token = root.querySelector(".token.focus");
  return token && inside(token, token.closest(".scroller")) ? token.textContent : null;
};
"""


class Tab:
    def __init__(self, browser: Chromium, path: Path) -> None:
        self.browser, self.path = browser, path

    def show(self, text: str, link: str = "theme=light") -> "Tab":
        self.path.write_text(text, encoding="utf-8")
        return self.again(link)

    def again(self, link: str) -> "Tab":
        self.browser.open(f"file://{self.path}#{link}")
        self.browser.until("globalThis.regard && document.querySelector('.heads')?.dataset.drawn")
        return self

    def run(self, program: str) -> Any:
        found = self.browser.run(HELP + program)
        assert self.browser.errors == []
        return found
