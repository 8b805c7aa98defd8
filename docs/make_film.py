"""Film the page that `regard serve` shows: a token pointed at, two heads compared, a head cut.

    regard demo --out demo && python docs/make_film.py demo

It needs Chromium. The frames are pictures of the real page; a pointer is drawn where the mouse is.
"""

import io
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from tests.views.chromium import Chromium

FILM = Path(__file__).parent / "images" / "page.webp"
TEXT, ANSWER, CHANGED = "14 июля 1987 г.", "1987-07-14", "1987-06-14"
"""A date of July; the letter that tells it from June is the fourth of the word."""
SIZE, MOST_BYTES = (960, 800), 1_000_000
DRAWN = "document.querySelector('#regard .heads')?.dataset.drawn && document.getElementById('stop').disabled"
POINTER = ((0, 0), (0, 17), (4, 13), (7, 20), (10, 19), (7, 12), (13, 12))


class Film:
    """Frames of a browser's window, each with the milliseconds that it is shown."""

    def __init__(self, browser: Chromium) -> None:
        self.browser, self.at = browser, (SIZE[0] - 60.0, SIZE[1] - 60.0)
        self.frames: list[Image.Image] = []
        self.lasting: list[int] = []

    def point(self, selector: str) -> None:
        """Move the mouse to the middle of an element."""
        found = f"document.querySelector({selector!r}).getBoundingClientRect()"
        self.at = tuple(
            self.browser.run(f"const box = {found}; return [box.x + box.width / 2, box.y + box.height / 2];")
        )
        self.browser.mouse("mouseMoved", *self.at)

    def choose(self, **chosen: object) -> None:
        """Choose a view of the maps, as its menus do."""
        said = ", ".join(f"{name}: {value}" for name, value in chosen.items())
        self.browser.run(f"regard().changed({{ {said} }}); await regard().ready;")

    def settle(self) -> None:
        self.browser.run("await new Promise((done) => setTimeout(done, 400));")
        self.browser.until(DRAWN)
        self.browser.run("await regard().ready; await new Promise((done) => setTimeout(done, 400));")

    def show(self, milliseconds: int) -> None:
        self.browser.run("await new Promise((done) => setTimeout(done, 250));")
        frame = Image.open(io.BytesIO(self.browser.picture())).convert("RGB")
        x, y = self.at
        ImageDraw.Draw(frame).polygon([(x + a, y + b) for a, b in POINTER], fill="black", outline="white")
        self.frames.append(frame)
        self.lasting.append(milliseconds)

    def save(self, path: Path) -> None:
        first, *others = self.frames
        options: dict[str, Any] = {"lossless": True, "method": 6, "minimize_size": True}
        first.save(path, save_all=True, append_images=others, duration=self.lasting, loop=0, **options)


def answers(browser: Chromium) -> list[str]:
    found: list[str] = browser.run("return [...document.querySelectorAll('.said > p')].map((one) => one.textContent);")
    return found


def play(film: Film, address: str) -> None:
    browser = film.browser
    browser.size(*SIZE)
    browser.dark(False)
    browser.open(address)
    browser.run("await regardStarted;")
    film.settle()
    browser.run(f"document.getElementById('text').value = {TEXT!r}; document.getElementById('go').click();")
    film.settle()
    assert answers(browser) == [ANSWER]
    film.choose(kind="'decoder cross'", layer="'0'", heads="[0]")
    film.show(1500)
    for token in (3, 5, 6, 8, 9):
        film.point(f".texts .text [data-place='{token}']")
        film.show(1900 if token == 6 else 900)
    film.choose(view="'compare'")
    film.show(2200)
    film.choose(view="'matrix'", heads="[0]")
    film.point("#cut")
    film.show(1200)
    browser.click(*film.at)
    film.settle()
    assert answers(browser) == [ANSWER, CHANGED]
    film.show(3500)


def main(demo: Path) -> None:
    command = [sys.executable, "-m", "regard", "serve", str(demo / "run"), "--port", "0"]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        browser = Chromium(Path(profile))
        try:
            assert server.stdout is not None
            serving = next(line for line in server.stdout if "serving at" in line)
            film = Film(browser)
            play(film, serving.split("serving at ")[1].split()[0])
            film.save(FILM)
        finally:
            browser.close()
            server.terminate()
    size = FILM.stat().st_size
    print(f"{FILM}: {size:,} bytes")
    assert size <= MOST_BYTES


if __name__ == "__main__":
    main(Path(sys.argv[1]))
