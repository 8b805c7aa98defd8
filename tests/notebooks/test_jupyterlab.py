"""`regard.view` in a real JupyterLab, in Chromium: `make notebooks`.

Two views in one notebook, a cell run again, keys beside JupyterLab's own, and the notebook opened without a kernel.
"""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jupyterlab", reason="JupyterLab is not installed: run `make notebooks`")

from tests.views.chromium import CHROMIUM, Chromium

WORDS = ["eight", "words", "and", "one", "head", "to", "look", "at"]
SETUP = """
import torch
import regard

def made(times):
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 2, 8, 8, generator=generator)
    return regard.attention(times * q, k, k, mask=regard.causal(), return_weights=True).weights

words = "eight words and one head to look at".split()
times = 5
"""
CELLS = (SETUP, "a = regard.view(made(1), words, link='heads=0&query=6')\na",
         "b = regard.view(made(times), words, link='heads=1&query=6')\nb")  # fmt: skip
HELP = """
const shell = jupyterapp.shell.currentWidget;
const cellsOf = () => [...document.querySelectorAll(".jp-Notebook .jp-CodeCell")];
const hosts = "[data-lm-suppress-shortcuts]";
const hostsIn = (cell) => [...cellsOf()[cell].querySelectorAll(hosts)].filter((one) => one.shadowRoot);
const rootIn = (cell) => hostsIn(cell)[0]?.shadowRoot.querySelector(".regard");
const reading = (cell) => rootIn(cell)?.querySelector(".reading")?.textContent ?? "";
const items = (cell) => [...(rootIn(cell)?.querySelectorAll(".reading li") ?? [])];
const list = (cell) => items(cell).map((item) => [...item.children].map((part) => part.textContent));
"""


class Lab:
    def __init__(self, folder: Path) -> None:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        self.folder, self.address = folder / "work", f"http://127.0.0.1:{port}"
        self.folder.mkdir()
        settings = ["--no-browser", "--allow-root", f"--ServerApp.root_dir={self.folder}", f"--port={port}"]
        settings += [
            "--IdentityProvider.token=",
            "--ServerApp.disable_check_xsrf=True",
            "--LabApp.expose_app_in_browser=True",
        ]
        own = {
            name: str(folder / name.lower())
            for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")
        }
        # The server takes the JupyterLab of this environment, and nothing of this machine's user.
        with (folder / "log").open("wb") as log:
            command = [sys.executable, "-m", "jupyterlab", *settings]
            self.process = subprocess.Popen(command, env={**os.environ, **own}, stdout=log, stderr=subprocess.STDOUT)
        self.browser = Chromium(folder / "profile")
        self.browser.size(1280, 1500)
        end = time.monotonic() + 60
        while time.monotonic() < end:
            try:
                urllib.request.urlopen(f"{self.address}/api", timeout=2).read()
                return
            except OSError:
                time.sleep(0.2)
        raise TimeoutError((folder / "log").read_text())

    def close(self) -> None:
        self.browser.close()
        self.process.terminate()
        self.process.wait(timeout=30)

    def write(self, name: str, cells: tuple[str, ...]) -> None:
        empty: dict[str, Any] = {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None}
        entries = [{**empty, "id": str(n), "source": text} for n, text in enumerate(cells)]
        spec = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
        book = {"cells": entries, "metadata": spec, "nbformat": 4, "nbformat_minor": 5}
        (self.folder / name).write_text(json.dumps(book), encoding="utf-8")

    def open(self, name: str) -> None:
        self.browser.open(f"{self.address}/lab/tree/{name}?reset")
        self.until("globalThis.jupyterapp && document.querySelector('.jp-Notebook .jp-CodeCell')")

    def run(self, program: str) -> Any:
        return self.browser.run(HELP + program)

    def until(self, condition: str, seconds: float = 90) -> None:
        end = time.monotonic() + seconds
        while True:
            try:
                if self.run(f"return Boolean({condition});"):
                    return
            except AssertionError:
                if time.monotonic() > end:
                    raise
            if time.monotonic() > end:
                (self.folder / "failed.png").write_bytes(self.browser.picture())
                raise TimeoutError(f"{condition}; {self.browser.errors[:5]}; {self.folder / 'failed.png'}")
            time.sleep(0.1)

    def picture(self, name: str) -> None:
        if folder := os.environ.get("PICTURES"):
            (Path(folder) / name).write_bytes(self.browser.picture())


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    if not CHROMIUM:
        pytest.skip("Chromium is not installed: JupyterLab is not opened")
    one = Lab(tmp_path_factory.mktemp("lab"))
    yield one
    one.close()


def expected(times: float, head: int, query: int) -> dict[int, float]:
    import torch

    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 2, 8, 8, generator=generator)
    scores = times * q[0, head, query] @ k[0, head, : query + 1].T / 8**0.5
    return dict(enumerate(scores.softmax(-1).tolist()))


def read(lab: Lab, cell: int) -> dict[int, float]:
    return {int(place): float(weight) for _, place, weight in lab.run(f"return list({cell});")}


def same(found: dict[int, float], wanted: dict[int, float]) -> bool:
    return found.keys() == wanted.keys() and all(abs(found[place] - wanted[place]) < 6e-4 for place in wanted)


def test_a_notebook_from_its_first_run_to_its_opening_without_a_kernel(lab: Lab) -> None:
    lab.write("two.ipynb", CELLS)
    lab.open("two.ipynb")
    lab.until("shell?.context?.sessionContext?.session?.kernel?.status === 'idle'")
    lab.run("jupyterapp.commands.execute('notebook:run-all-cells');")
    lab.until("list(1).length && list(2).length")
    assert same(read(lab, 1), expected(1, 0, 6))
    assert same(read(lab, 2), expected(5, 1, 6))
    lab.picture("lab-two.png")

    # Keys mean something in the view alone: "h" is the next head, and no help of JupyterLab; "dd" deletes no cell.
    lab.run("rootIn(1).querySelector('.scroller[aria-label^=Keys]').focus();")
    for key in ("h", "d", "d", "a"):
        lab.browser.press(key)
    lab.until("hostsIn(1)[0].regard().state().heads[0] === 1")
    assert lab.run("return [cellsOf().length, document.querySelectorAll('.jp-Dialog').length];") == [3, 0]
    lab.until("list(1).length === 7 && !rootIn(1).dataset.busy")
    assert same(read(lab, 1), expected(1, 1, 6))

    # A cell that is run again shows the new map, and the other cell stays.
    lab.run("""
      const source = shell.content.widgets[0].model.sharedModel;
      source.setSource(source.getSource().replace("times = 5", "times = 9"));
      for (const cell of [0, 2]) {
        shell.content.activeCellIndex = cell;
        await jupyterapp.commands.execute("notebook:run-cell");
      }""")
    lab.until(
        "hostsIn(2).length === 1 && list(2).length && !rootIn(2).dataset.busy && reading(2).includes('(query 6)')"
    )
    end = time.monotonic() + 20
    while not same(read(lab, 2), expected(9, 1, 6)) and time.monotonic() < end:
        time.sleep(0.1)
    assert same(read(lab, 2), expected(9, 1, 6))
    assert same(read(lab, 1), expected(1, 1, 6))

    # The last view is in the notebook as a picture, hidden while the view is there.
    lab.until("[1, 2].every((cell) => cellsOf()[cell].querySelector('[class^=regard-still] img[alt$=seen]'))")
    assert lab.run("return getComputedStyle(cellsOf()[1].querySelector('[class^=regard-still]')).display;") == "none"
    lab.run("await jupyterapp.commands.execute('docmanager:save');")
    saved = json.loads((lab.folder / "two.ipynb").read_text(encoding="utf-8"))
    for cell in saved["cells"][1:]:
        (still,) = (one for one in cell["outputs"] if "text/html" in one["data"])
        assert "as last seen" in "".join(still["data"]["text/html"])
        assert "data:image/png;base64," in "".join(still["data"]["text/html"])

    # Opened without a kernel, and as another user's notebook, the pictures are there.
    kernels = json.load(urllib.request.urlopen(f"{lab.address}/api/kernels"))
    for kernel in kernels:
        urllib.request.urlopen(urllib.request.Request(f"{lab.address}/api/kernels/{kernel['id']}", method="DELETE"))
    saved["metadata"] = {"kernelspec": {"name": "elsewhere", "display_name": "Elsewhere", "language": "elsewhere"}}
    (lab.folder / "later.ipynb").write_text(json.dumps(saved), encoding="utf-8")
    lab.open("later.ipynb")
    without = "[...document.querySelectorAll('.jp-Dialog button')].find((one) => /no kernel/i.test(one.textContent))"
    lab.until(without)
    lab.run(f"{without}.click();")
    lab.until("document.querySelectorAll('.jp-Notebook img').length === 2")
    seen = lab.run("""
      const images = [...document.querySelectorAll(".jp-Notebook img")];
      return images.map((one) => [one.naturalWidth > 200, one.clientWidth > 200, one.alt]);""")
    assert [one[:2] for one in seen] == [[True, True]] * 2
    assert all(alt.startswith("View(") and alt.endswith("as last seen") for _, _, alt in seen)
    assert json.load(urllib.request.urlopen(f"{lab.address}/api/kernels")) == []
    lab.picture("lab-later.png")
