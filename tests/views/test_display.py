"""A notebook shows of an object one picture or table, beside the plain repr."""

import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import page
from regard.call.biases import Shaw
from regard.call.normalizations import Normalization
from regard.call.rotary.rotary import Layout
from regard.call.rotary.scalings import Scaling
from regard.call.scores.base import ScaledDot, Score
from regard.edits import Edit
from regard.errors import ArgumentError
from regard.functional import Attended
from regard.maps.align import dtw
from regard.nn import LearnedPositions, SinusoidalPositions
from regard.tasks import Translation
from regard.tasks.pictures.token_maps import TextAttention
from regard.tasks.text.tokenizers import Tokenizer
from regard.tasks.translation.results import Attention, Candidate
from regard.views import (
    ColourScale,
    Map,
    Panel,
    Printing,
    head_panels,
    heatmap,
    heatmap_grid,
    model_example,
    model_grid,
    save_figure,
)
from regard.views.display import MOST_LABELLED, bundle
from regard.watching import AttentionStep, attn_lrp, head_table
from regard.watching.running.observed_call import Interceptor
from tests.core import house
from tests.core.test_structure import ON_DEMAND, PUBLIC_PACKAGES

PNG = b"\x89PNG\r\n"


def weights(*leading: int, tokens: int = 5) -> regard.AttentionMap:
    return regard.map_of(*torch.randn(2, *leading, tokens, 4))


def seen() -> Any:
    layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
    with torch.no_grad(), regard.watch(layer) as found:
        layer(torch.randn(1, 6, 8))
    return found


def attended() -> Any:
    return regard.attention(*torch.randn(3, 2, 5, 4), return_weights=True, keep_values=True)


def pictures() -> dict[str, Any]:
    return {
        **{f"map {shape}": weights(*shape) for shape in ((), (2,), (2, 3), (2, 1, 3))},
        "causal": regard.causal(), "joined masks": regard.window(2) & regard.causal(), "watch": seen(),
        "ALiBi": regard.ALiBi(8), "T5": regard.T5Bias(torch.randn(8, 2)), "Shaw": Shaw(torch.randn(9, 8)),
        "sines": SinusoidalPositions(16), "learned positions": LearnedPositions(9, 8),
        "rotary": regard.Rotary(8), "attended": attended(),
        "example": model_example([weights(2)]), "map of a page": Map(weights(2).dense(), list("abcde")),
        "panel": head_panels(weights(2))[0], "share": attn_lrp(attended().weights, torch.ones(2, 5, 4)),
        "step": AttentionStep(weights(2)), "translation": Translation("a b", ["a", "b"], [candidate()]),
        "candidate": candidate(), "attention": Attention(["a"], ["A"], ["<s>"], {"0": weights(2, tokens=1)}, ["0"]),
        "text": TextAttention(list("abcde"), {"0": weights(2)}),
    }  # fmt: skip


def candidate() -> Candidate:
    return Candidate("A <B>", -0.5, ["A", "<B>"], torch.eye(2))


PICTURES = pictures()


@pytest.mark.parametrize("shown", PICTURES.values(), ids=PICTURES)
def test_maps_masks_biases_and_positions_are_pictures(shown: Any) -> None:
    plain = repr(shown)
    data, metadata = shown._repr_mimebundle_()
    assert data["text/html"].count('<img alt="') == data["text/html"].count("<img ") == 1
    assert "<script" not in data["text/html"]
    assert data["image/png"].startswith(PNG)
    assert data["text/plain"] == plain
    assert len(data["image/png"]) < 100_000
    assert 100 < metadata["image/png"]["width"] < 1200


def test_a_dark_page_turns_the_picture_dark() -> None:
    page = bundle(regard.causal())[0]["text/html"]
    for told in ("data-jp-theme-light=false", "vscode-dark", "quarto-dark", "html[theme=dark]", "body.dark"):
        assert re.search(rf":is\([^)]*{re.escape(told)}[^)]*\) .regard-picture {{ filter: invert", page), told


def test_the_picture_of_a_bias_has_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(
        "regard.views.display.heatmap_grid", lambda panels, **_: drawn.extend(panels) or heatmap_grid(panels)
    )
    bundle(regard.ALiBi(8))
    assert [panel.title for panel in drawn] == ["head 0", "head 2", "head 4", "head 6"]
    distance = (torch.arange(12) - torch.arange(12)[:, None]).abs()
    for panel, slope in zip(drawn, (1 / 2, 1 / 8, 1 / 32, 1 / 128), strict=True):
        torch.testing.assert_close(panel.weights, -slope * distance)


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


def test_records_are_tables_of_numbers() -> None:
    top = bundle(attended().weights.top_keys(2))[0]["text/html"]
    assert top.count("<tr>") == 1 + 5
    assert "head 0 of 2 x 5 x 2" in top
    path = bundle(dtw(torch.eye(3)))[0]["text/html"]
    assert "query  keys\n    0  0\n    1  1" in path
    assert "<td>A &lt;B&gt;</td>" in bundle(Translation("a", [], [Candidate("A <B>", 0.0, [], None)]))[0]["text/html"]
    assert "every weight" in bundle(page([weights(2)]))[0]["text/html"]


@dataclass(frozen=True, slots=True)
class FewRows(ScaledDot):
    def block(self, query: Tensor, key: Tensor) -> Tensor:
        assert query.shape[-2] <= 8, "the repr of a map reads it"
        return ScaledDot.block(self, query, key)


def test_the_plain_repr_computes_a_few_rows_at_most() -> None:
    long = regard.map_of(*torch.randn(2, 1, 2, 3000, 4), score=FewRows())
    shown: list[Any] = [
        long, long[0, 0], long.mT, AttentionStep(long), model_example([long]), Map(long), Panel(long),
        Attended(torch.ones(3), long), page([weights(2)]), Attention([], [], [], {"0": long}, ["0"]),
    ]  # fmt: skip
    for one in shown:
        assert len(repr(one)) < 2_000, type(one)


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


KINDS: dict[type, str] = {
    torch.nn.Module: "torch prints its layers",
    Exception: "it is raised",
    Score: "a formula: its repr says all of it", Normalization: "a formula", Layout: "a rule", Scaling: "a rule",
    Edit: "an argument; the report of the run tells of it", ColourScale: "an argument", Printing: "an argument",
    Interceptor: "a handle, whose report or maps show themselves",
    Tokenizer: "a handle, whose repr says its kind",
}  # fmt: skip
NAMES = {
    "a handle, whose answers show themselves": "Enabled LanguageModel Translator TokenStore Reader "
    "Measure Atlas MeasuredFolder AttentionMonitor",
    "an argument, which the caller wrote": "Beam FitConfig AlignmentOf Request Limits Upsampling Theme Summarize Grid "
    "ForcedPrefix Temperature TopK TopP Vocabulary ByteLevelBPE Characters Words "
    "Sizes Dimensions Statistic AcrossHeads",
    "the state of a computation, which goes back into it": "KeyValue Step DecoderOnlyState RNNState TransformerState "
    "Progress Batch Pair Hypothesis RecurrentState Mixed SearchOf",
    "given to a function of the caller, during a call": "EditedCall EditedWeights CallEdits",
    "a line of a report or a table, which shows itself": "Observed Alternative Label Marks AuditQuestion FaultyWeight",
    "its mask shows itself, and `unpack` gives tensors": "Packed",
    "it is a widget": "NotebookView",
}


def reason(one: type) -> str:
    if getattr(one, "_is_protocol", False) and one.__name__ != "NotebookView":
        return "an interface"
    if one.__name__.endswith("Config"):
        return "a configuration: its repr names each field"
    of_kind = next((why for kind, why in KINDS.items() if issubclass(one, kind)), "")
    return of_kind or next((why for why, names in NAMES.items() if one.__name__ in names.split()), "")


def functions(one: Any) -> Iterator[Any]:
    if not inspect.isclass(one):
        yield from [one] if inspect.isfunction(one) else []
        return
    for base in one.__mro__:
        for name, method in vars(base).items() if base.__module__.startswith("regard.") else ():
            plain = method.fget if isinstance(method, property) else getattr(method, "__func__", method)
            if not name.startswith("_") and inspect.isfunction(plain):
                yield plain


@cache
def handed_back() -> frozenset[type]:
    homes = {found.name: found.file for found in house.definitions(house.files())}
    packages = [
        import_module(name) for name in ("regard", *(f"regard.{one}" for one in (*ON_DEMAND, *PUBLIC_PACKAGES)))
    ]
    waiting = [getattr(package, name) for package in packages for name in package.__dict__["__all__"]]
    known: dict[int, Any] = {}
    while waiting:
        one = waiting.pop()
        if id(one) in known:
            continue
        known[id(one)] = one
        for function in functions(one):
            for name in re.findall(r"\w+", str(function.__annotations__.get("return", ""))):
                if (
                    name in homes
                    and name[0].isupper()
                    and inspect.isclass(found := vars(import_module(homes[name]))[name])
                ):
                    waiting.append(found)
    return frozenset(one for one in known.values() if inspect.isclass(one) and one.__module__.startswith("regard."))


def test_every_result_shows_itself_or_has_a_reason() -> None:
    silent = [one for one in handed_back() if not hasattr(one, "_repr_mimebundle_")]
    assert [one.__name__ for one in silent if not reason(one)] == []
    assert len(handed_back()) - len(silent) > 40


def test_no_reason_is_left_over() -> None:
    silent = [one for one in handed_back() if not hasattr(one, "_repr_mimebundle_")]
    assert {name for names in NAMES.values() for name in names.split()} <= {one.__name__ for one in silent}
    assert [kind.__name__ for kind in KINDS if not any(issubclass(one, kind) for one in silent)] == []
