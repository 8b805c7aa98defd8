"""The folders that are damaged: made once, and the readers of their files."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import regard
from regard.maps import load_summary, save_summary
from regard.maps.sources.summary import SummarySource
from regard.tasks.language_modelling.train import train_language_model
from regard.tasks.registry import task_of
from regard.tasks.text.pairs import read_judged, read_pairs, read_references
from regard.tasks.translation.train import train_translation
from tests.fuzz.commands import run
from tests.maps.dense_maps import sums_asked
from tests.tasks.small_runs import PAIRS, small_config, small_text_config, write_pairs

WORDS = "a stranger's file, which must not change"
Use = Callable[[Path], Any]
"""Reads an exhibit's folder and works with it."""


@dataclass(frozen=True)
class Exhibit:
    name: str
    make: Callable[[Path], None]
    uses: dict[str, Use]
    writes: frozenset[str] = frozenset()
    """The uses that may write to the folder itself."""


def _ask(weights: regard.AttentionMap) -> None:
    assert repr(weights)
    if not weights.source.has_blocks:
        assert weights.statistics
        return
    sums_asked(weights, 4, 4)
    _ = weights[..., :1, :2], weights.top_keys(1), weights.summary("distance", "participation_ratio")


def _maps(folder: Path) -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 4, 5, 4), torch.randn(2, 2, 7, 4)
    options: dict[str, dict[str, Any]] = {
        "plain": {},
        "masked": {"mask": regard.causal() & regard.lengths(torch.tensor([5, 7]))},
        "documents": {"mask": regard.documents(torch.randint(0, 2, (5,)), key_ids=torch.randint(0, 2, (7,)))},
        "blocks": {"mask": regard.blocks(torch.rand(3, 4) < 0.7, 2) | regard.call.masks.strided(2)},
        "additive": {"score": regard.Additive(torch.randn(3), torch.randn(3, 4), torch.randn(3, 4))},
        "sink": {"normalization": regard.SoftmaxWithSink(torch.randn(4)), "bias": torch.randn(4, 5, 7)[None]},
        "entmax": {"normalization": regard.Entmax15(), "bias": regard.T5Bias(torch.randn(8, 4))},
        "shaw": {"bias": regard.call.biases.Shaw(torch.randn(5, 4)), "keep_values": True},
        "alibi": {"bias": regard.ALiBi(4), "score": regard.Cosine(torch.ones(4)), "mask": regard.window(3)},
    }
    for name, option in options.items():
        weights = regard.attention(q, k, k, return_weights=True, **option).weights
        weights.save(folder / f"{name}.safetensors")


def _summaries(folder: Path) -> None:
    q = torch.randn(2, 4, 5, 4)
    weights = regard.attention(q, q, q, return_weights=True).weights
    save_summary(folder / "told.safetensors", weights.summary("entropy", "top_keys", "pooled_max", k=2))
    kept = SummarySource.of(weights.source, regard.Summarize("received", "top_keys", "distance", "pooled"))
    save_summary(folder / "kept.safetensors", regard.AttentionMap(kept))


def _each(read: Callable[[Path], Any]) -> Use:
    def use(folder: Path) -> None:
        for path in sorted(folder.iterdir()):
            read(path)

    return use


def _run(folder: Path) -> None:
    train_translation(small_config(folder, steps=4))
    (folder / "run/notes.txt").write_text(WORDS)
    (folder / "run/data/mine.safetensors").write_text(WORDS)


def _writer(folder: Path) -> None:

    train_language_model(small_text_config(folder))
    (folder / "run/notes.txt").write_text(WORDS)


def _command(name: str, *more: str) -> Use:
    def use(folder: Path) -> None:
        command_line(
            name, folder / "run", *(folder / word if "." in word else word for word in more), "--device", "cpu"
        )

    return use


def _resume(folder: Path) -> None:
    command_line("train", "--out", folder / "run", "--resume", "--steps", "8", "--device", "cpu")


def _translate(folder: Path) -> None:
    model = task_of(folder / "run").load(folder / "run", device="cpu")
    model.translate(["we see one cats"])


def command_line(*arguments: str | Path) -> str:
    ran = run(*arguments)
    assert ran.status in (0, 2), f"regard {arguments[0]} ends with status {ran.status}: {ran.err[-500:]}"
    if ran.status == 2:
        assert ran.errors, f"regard {arguments[0]} says nothing"
        last = ran.errors[-1].strip()
        assert last.startswith("regard: "), f"regard {arguments[0]} says no reason: {ran.err[-500:]!r}"
        assert len(last) < 1100, f"a reason of {len(last)} characters"
        assert "Traceback" not in ran.err
        reasons = [line for line in ran.errors if "a pickle: torch.load(weights_only=True)" not in line]
        assert arguments[0] != "view" or len(reasons) == 1, f"a view says more than its reason: {ran.err[-500:]!r}"
    return ran.err


def _translator(kind: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        from tests.tasks import test_pretrained

        {"marian": test_pretrained.make_marian, "bart": test_pretrained.make_bart}[kind](folder)

    return make


def _translate_foreign(folder: Path) -> None:
    command_line("translate", folder, "a small cat", "--device", "cpu", "--beam", "1")


def _viewed(kind: str, tensors: str) -> Callable[[Path], None]:

    def make(folder: Path) -> None:
        from tests.viewing import foreign_folders as foreign

        model = foreign.save_model(kind, folder)
        if kind == "vit":
            foreign.save_reader(kind, folder, model.config)
            _picture(folder / "cat.png")
        else:
            foreign.byte_level_tokenizer(folder)
        if tensors == "pytorch_model.bin":
            (folder / "model.safetensors").unlink()
            torch.save(dict(model.state_dict()), folder / tensors)

    return make


def _picture(path: Path) -> None:
    from PIL import Image

    Image.new("RGB", (40, 50), (200, 100, 50)).save(path)


def _view(*arguments: str) -> Use:
    def view(folder: Path) -> None:
        given = [str(folder / name) if name.endswith(".png") else name for name in arguments]
        command_line("view", folder, *given, "--terminal", "--device", "cpu")

    return view


def _texts(folder: Path) -> None:
    import gzip
    import json

    write_pairs(folder / "pairs.tsv")
    lines = [json.dumps({"source": s, "target": t}, ensure_ascii=False) for s, t in PAIRS[:9]]
    (folder / "pairs.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "source.txt").write_text("\n".join(s for s, _ in PAIRS[:9]) + "\n", encoding="utf-8")
    (folder / "target.txt").write_text("\n".join(t for _, t in PAIRS[:9]) + "\n", encoding="utf-8")
    judged = [json.dumps({"source": s, "references": [t, t]}, ensure_ascii=False) for s, t in PAIRS[:9]]
    (folder / "judged.jsonl").write_text("\n".join(judged) + "\n", encoding="utf-8")
    with gzip.open(folder / "pairs.tsv.gz", "wt", encoding="utf-8") as file:
        file.write((folder / "pairs.tsv").read_text(encoding="utf-8"))


def _read_texts(folder: Path) -> None:
    for name in ("pairs.tsv", "pairs.jsonl", "pairs.tsv.gz"):
        list(read_pairs((folder / name,)))
    list(read_pairs((folder / "source.txt", folder / "target.txt")))


def _read_references(folder: Path) -> None:
    list(read_references(folder / "source.txt", [folder / "target.txt", folder / "target.txt"]))
    list(read_judged([folder / "judged.jsonl"]))


EXHIBITS = (
    Exhibit("maps", _maps, {"load": _each(lambda path: _ask(regard.AttentionMap.load(path)))}),
    Exhibit(
        "summaries",
        _summaries,
        {"load_summary": _each(load_summary), "load": lambda f: _ask(regard.AttentionMap.load(f / "kept.safetensors"))},
    ),
    Exhibit(
        "a run",
        _run,
        {
            "translate": _translate,
            "regard translate": _command("translate", "we see one cats"),
            "regard train --resume": _resume,
            "regard evaluate": _command("evaluate", "--data", "pairs.tsv", "--beam", "1"),
            "regard view": _command("view", "we see one cats", "--terminal"),
            "regard export": lambda f: command_line(
                "export", f / "run", "--to", "huggingface", "--out", f / "exported"
            ),
        },
        frozenset({"regard train --resume", "regard export"}),
    ),
    Exhibit(
        "a language model",
        _writer,
        {
            "regard generate": _command("generate", "3 and", "--max-tokens", "3"),
            "regard train --resume": _resume,
            "regard evaluate": _command("evaluate", "--data", "text.txt"),
            "regard view": _command("view", "3 and 4", "--terminal"),
        },
        frozenset({"regard train --resume"}),
    ),
    *(Exhibit(kind, _translator(kind), {"regard translate": _translate_foreign}) for kind in ("marian", "bart")),
    *(
        Exhibit(f"{kind} to view, {tensors}", _viewed(kind, tensors), {"regard view": _view(*given)})
        for kind, tensors, given in (
            ("gpt2", "model.safetensors", ("a b",)),
            ("bert", "pytorch_model.bin", ("--tokens", "1", "2")),
            ("t5", "model.safetensors", ("a", "--target", "b")),
            ("vit", "pytorch_model.bin", ("--image", "cat.png")),
        )
    ),
    Exhibit("texts", _texts, {"pairs": _read_texts, "references": _read_references}),
)
