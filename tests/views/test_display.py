"""What a notebook shows of an object: one picture or table, in every state of matplotlib, beside the plain repr."""

import json
import re
import subprocess
import sys
from typing import Any

import pytest
import torch

import regard
from regard.errors import ArgumentError
from regard.lazy import Displayed
from regard.views import head_panels, heatmap, heatmap_grid, model_grid, save_figure
from regard.views.display import MOST_LABELLED, bundle
from regard.watching import head_table

PNG = b"\x89PNG\r\n"
STATES = {"nothing imported": "", "pyplot imported": "import matplotlib.pyplot", "inline": "%matplotlib inline"}
CELLS = ["heatmap(w[0, 0])", "heatmap_grid(head_panels(w[0]))", "model_grid([w])", "w", "w[0, 0]", "regard.causal()"]
NOTEBOOK = """
import base64, json, sys
from IPython.terminal.interactiveshell import TerminalInteractiveShell as InteractiveShell
from IPython.utils.capture import capture_output
shell = InteractiveShell.instance()
setup = '''import torch, regard
from regard.views import *
w = regard.map_of(*torch.randn(2, 1, 2, 5, 4))'''
said = {}
for state, line in json.loads(sys.argv[1]).items():
    with capture_output() as quiet:
        shell.run_cell(setup + "\\n" + line).raise_error()
    for cell in json.loads(sys.argv[2]):
        with capture_output() as shown:
            done = shell.run_cell(cell)
        done.raise_error()
        data, _ = shell.display_formatter.format(done.result)
        said[f"{state}: {cell}"] = [sorted(data), *(sorted(output.data) for output in shown.outputs)]
print(json.dumps(said))
"""


def weights(*leading: int, tokens: int = 5) -> regard.AttentionMap:
    return regard.map_of(*torch.randn(2, *leading, tokens, 4))


def seen() -> Any:
    layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
    with torch.no_grad(), regard.watch(layer) as found:
        layer(torch.randn(1, 6, 8))
    return found


def test_a_cell_shows_a_picture_once_in_every_state() -> None:
    pytest.importorskip("IPython", reason="IPython is not installed")
    command = [sys.executable, "-W", "ignore", "-c", NOTEBOOK, json.dumps(STATES), json.dumps(CELLS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert len(said) == len(STATES) * len(CELLS)
    for cell, outputs in said.items():
        assert outputs == [["image/png", "text/plain"]], cell


@pytest.mark.parametrize(
    "shown",
    [
        weights(),
        weights(2),
        weights(2, 3),
        weights(2, 1, 3),
        regard.causal(),
        regard.window(2) & regard.causal(),
        seen(),
    ],
    ids=repr,
)
def test_maps_masks_and_watches_are_pictures(shown: Displayed) -> None:
    plain = repr(shown)
    data, metadata = shown._repr_mimebundle_()
    assert data["image/png"].startswith(PNG)
    assert data["text/plain"] == plain
    assert len(data["image/png"]) < 300_000
    assert 100 < metadata["image/png"]["width"] < 1200


def test_many_heads_are_a_small_picture() -> None:
    data, _ = bundle(weights(2, 3 * MOST_LABELLED, tokens=200))
    assert len(data["image/png"]) < 300_000


def test_tables_and_reports_are_text_that_follows_the_page() -> None:
    found = seen()
    table = bundle(head_table(found))[0]["text/html"]
    assert re.findall("<th>(.*?)</th>", table)[:2] == ["layer", "head"]
    assert table.count("<tr>") == 1 + 2
    report = bundle(found.report())[0]
    assert "1 map of 1 module" in report["text/html"]
    assert len(report["text/plain"].splitlines()) == 1
    explained = regard.explain(*torch.randn(3, 4, 4))
    assert "<script" not in bundle(explained)[0]["text/html"]
    assert "chosen" in bundle(explained)[0]["text/html"]


def test_an_object_without_a_picture_says_why() -> None:
    data, _ = bundle(regard.lengths(torch.tensor([2, 3])))
    assert list(data) == ["text/plain"]
    assert "no picture: lengths must have shape" in data["text/plain"]


def test_without_matplotlib_a_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    shown = weights()
    data, _ = bundle(shown)
    assert data["text/plain"].startswith(repr(shown))
    assert "pip install 'regard[view]'" in data["text/plain"]


def test_figures_and_axes_are_saved_alike(tmp_path: Any) -> None:
    ax: Any = heatmap(weights())
    assert save_figure(ax, tmp_path / "a.png").read_bytes() == save_figure(ax.figure, tmp_path / "b.png").read_bytes()
    ax.remove()
    with pytest.raises(ArgumentError, match="removed from their figure"):
        save_figure(ax, tmp_path / "c.png")
    figure: Any
    for figure in (heatmap_grid(head_panels(weights(2))), model_grid([weights(2)])):
        data, _ = figure._repr_mimebundle_()
        assert data["image/png"].startswith(PNG)
