"""Every flag of the commands that use a model reaches it: the models here write down what they are asked for."""

import ast
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.cli import commands
from regard.cli import view as view_command
from regard.cli.train import TRAINERS
from regard.tasks.generation.config import Beam
from regard.tasks.generation.filters import Temperature, TopK, TopP
from regard.tasks.language_modelling.causal import LanguageModel, TextEvaluation
from regard.tasks.pictures import save as pictures
from regard.tasks.pictures.save import PictureFiles
from regard.tasks.runs.run_folder import RunFolder
from regard.tasks.training.metrics import CorpusScore
from regard.tasks.translation.results import Candidate, Evaluation, Translation
from regard.tasks.translation.translation_model import AlignmentOf, Request, TranslationOptions
from regard.tasks.translation.translator import Translator
from tests import ROOT
from tests.conftest import Call

Asked = dict[str, Any]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    found: Asked = {}
    monkeypatch.setitem(sys.modules, "ctranslate2", None)  # the models here have no weights that it could export

    class Writer(LanguageModel):
        def __init__(self) -> None: ...

        def generate(self, prompt: str = "", **how: Any) -> Iterator[str]:
            found.update(how, prompt=prompt)
            yield from ("a", "b")

        def samples(self, prompt: str = "", **how: Any) -> Iterator[str]:
            found.update(how, prompt=prompt)
            yield from ("a", "b", "c")

        def evaluate(self, lines: Any, **how: Any) -> TextEvaluation:
            found.update(how, lines=list(lines))
            return TextEvaluation(1.25, 3.5, 0.75, 9, 8)

    class Speaker(Translator):
        def __init__(self) -> None: ...

        device = torch.device("cpu")

        def check_options(self, options: TranslationOptions) -> None: ...

        def translate_window(self, lines: Sequence[str | Request], options: TranslationOptions) -> list[Translation]:
            found.setdefault("requests", []).extend(lines)
            found["options"] = options
            one, two = torch.tensor([[0.25, 0.75]]), None
            candidates = [Candidate("first\none", -0.5, ["first"], one), Candidate("second", -1.5, ["second"], two)]
            return [Translation("x", ["x"], candidates[: options.beam.num_best]) for _ in lines]

        def fingerprint(self) -> str:
            return "the same"

        def evaluate(self, pairs: Any, **how: Any) -> Evaluation:
            found.update(how, pairs=list(pairs))
            return Evaluation(CorpusScore(12.5, "of BLEU"), CorpusScore(25.0, "of chrF"), 37.5, 1.5, 4)

    def load_writer(folder: Path, **how: Any) -> LanguageModel:
        found.update(how)
        return Writer()

    def load_speaker(folder: Path, **how: Any) -> Translator:
        found.update(how)
        return Speaker()

    for name in ("translate", "generate"):
        monkeypatch.setattr(f"regard.cli.{name}.require_task", lambda run, task: None)
    monkeypatch.setattr(LanguageModel, "load", load_writer)
    monkeypatch.setattr(Translator, "load", load_speaker)
    found["writer"], found["speaker"] = load_writer, load_speaker
    return found


@pytest.mark.parametrize(
    ("flags", "filters"),
    [
        ((), []),
        (("--temperature", "0"), [TopK(1)]),
        (("--temperature", "0", "--top-p", "0.5"), [TopK(1)]),
        (("--top-p", "0.9", "--top-k", "7", "--temperature", "0.5"), [Temperature(0.5), TopK(7), TopP(0.9)]),
    ],
)
@pytest.mark.parametrize("several", [False, True], ids=["one text", "several texts"])
def test_generate(call: Call, asked: Asked, flags: tuple[str, ...], filters: list[Any], several: bool) -> None:
    limits = ("--max-tokens", "17", "--stop", "x", "yz", "--seed", "5", "--device", "cpu")
    status, out, err = call("generate", "run", "hello", *limits, *flags, *(("--samples", "3") if several else ()))
    assert (status, err) == (0, "")
    assert out == ("helloa\n---\nhellob\n---\nhelloc\n" if several else "helloab\n")
    given = {"prompt": "hello", "max_tokens": 17, "filters": filters, "seed": 5, "device": "cpu"}
    assert {name: asked[name] for name in given} == given
    assert tuple(asked["stop"]) == ("x", "yz")
    assert asked.get("count") == (3 if several else None)


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        ((), {}),
        (("--beam", "3", "--nbest", "2", "--length-penalty", "0.5"), {"beam": Beam(3, num_best=2, length_penalty=0.5)}),
        (("--alignments",), {"alignments": AlignmentOf()}),
        (
            ("--alignments", "--alignment-layer", "2", "--alignment-head", "1"),
            {"alignments": AlignmentOf(layer=2, head=1)},
        ),
        (("--alignments", "--alignment-layer", "mean"), {"alignments": AlignmentOf(layer=None)}),
        (("--copy-unknown",), {"copy_unknown": True}),
        (("--copy-unknown", "--alignment-head", "0"), {"copy_unknown": True, "alignments": AlignmentOf(head=0)}),
    ],
)
def test_translate(call: Call, asked: Asked, flags: tuple[str, ...], options: dict[str, Any]) -> None:
    status, out, err = call("translate", "run", "a sentence", "--device", "cpu", "--precision", "float32", *flags)
    assert (status, err) == (0, "")
    assert asked["options"] == TranslationOptions(**options, labels="--alignments" in flags)
    assert asked["requests"] == [Request("a sentence")]
    assert asked["device"] == "cpu"
    if "--alignments" in flags:
        best = {"text": "first\none", "score": -0.5, "finished": True, "tokens": ["first"], "alignment": [[0.25, 0.75]]}
        assert json.loads(out) == {"source": ["x"], "translations": [best]}
    else:  # a line break of the model is none of the output
        assert out == ("1\t-0.5000\tfirst one\n1\t-1.5000\tsecond\n" if "--nbest" in flags else "first one\n")


def test_ranks_translate_no_file(call: Call, asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    status, out, err = call("translate", "run", "a sentence")
    assert (status, out) == (2, "")
    assert "not by the ranks of torchrun: cut it up (split), and join the translations (cat)" in err


def test_lines_with_prefixes(call: Call, asked: Asked) -> None:
    stdin = b"a\tb\nc\n"
    call("translate", "run", "--prefix-column", stdin=stdin)
    assert asked["requests"] == [Request("a", "b"), Request("c", "")]
    del asked["requests"]
    call("translate", "run", "--prefix", "y", stdin=stdin)
    assert asked["requests"] == [Request("a\tb", "y"), Request("c", "y")]


@pytest.mark.parametrize(
    "flags",
    [
        ("--beam", "3"), ("--nbest", "2"), ("--length-penalty", "0.5"), ("--alignments",), ("--copy-unknown",),
        ("--alignments", "--alignment-layer", "0"), ("--alignments", "--alignment-head", "0"), ("--prefix", "y"),
        ("--prefix-column",),
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_file_is_gone_on_with_under_the_same_flags_alone(
    call: Call, asked: Asked, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    source, target = tmp_path / "in.txt", tmp_path / "out"
    source.write_bytes(b"a\n\xff\n")
    command = ("translate", "run", "--input", str(source), "--output", str(target))
    assert "in.txt:2: expected UTF-8" in call(*command)[2]  # it stops there, and the work so far is kept
    status, _, err = call(*command, "--resume", *flags)
    assert status == 2
    assert "was begun with" in err
    assert call(*command, "--resume", "--bad-lines", "skip")[0] == 0  # this one decides no answer
    assert target.read_text().count("\n") == 2


def test_a_file_of_text_is_not_gone_on_with_in_json(call: Call, asked: Asked, tmp_path: Path) -> None:
    """Both copy by the alignments of one head; only one of them prints the alignments."""
    source, target = tmp_path / "in.txt", tmp_path / "out"
    source.write_bytes(b"a\n\xff\n")
    command = ("translate", "run", "--input", str(source), "--output", str(target))
    copying = ("--copy-unknown", "--alignment-head", "0")
    assert "in.txt:2: expected UTF-8" in call(*command, *copying)[2]
    assert "was begun with json False, not True" in call(*command, *copying, "--resume", "--alignments")[2]


@pytest.fixture
def of_run(monkeypatch: pytest.MonkeyPatch, asked: Asked) -> Callable[[str], None]:
    def set_kind(kind: str) -> None:
        monkeypatch.setattr(RunFolder, "task", lambda self: kind)

    return set_kind


def test_evaluate_a_translator(call: Call, asked: Asked, of_run: Callable[[str], None], tmp_path: Path) -> None:
    of_run("translation")
    (tmp_path / "pairs.tsv").write_text("a\tb\nc\td\n")
    command = ("evaluate", "run", "--data", str(tmp_path / "pairs.tsv"), "--device", "cpu")
    status, out, _ = call(*command, "--beam", "3", "--length-penalty", "0.5")
    assert (status, asked["beam"]) == (0, Beam(3, length_penalty=0.5))
    assert asked["pairs"] == [("a", "b"), ("c", "d")]
    assert asked["device"] == "cpu"
    assert [line.split("\t")[:2] for line in out.splitlines()] == [
        ["pairs", "4"], ["BLEU", "12.50"], ["chrF", "25.00"], ["exact match", "37.50"], ["loss", "1.5000"],
    ]  # fmt: skip
    call(*command)
    assert asked["beam"] == Beam()
    assert "--stride is not for a run of the task translation" in call(*command, "--stride", "4")[2]


def test_evaluate_a_language_model(call: Call, asked: Asked, of_run: Callable[[str], None], tmp_path: Path) -> None:
    of_run("language-model")
    for name in ("one", "two"):
        (tmp_path / f"{name}.txt").write_text(f"{name}\n")
    command = ("evaluate", "run", "--data", str(tmp_path / "one.txt"), str(tmp_path / "two.txt"))
    status, out, _ = call(*command, "--stride", "4")
    assert (status, asked["stride"], asked["lines"]) == (0, 4, ["one", "two"])
    assert [line.split("\t")[:2] for line in out.splitlines()] == [
        ["tokens", "9"], ["loss", "1.2500"], ["perplexity", "3.500"], ["bits per byte", "0.7500"],
    ]  # fmt: skip
    call(*command)
    assert asked["stride"] is None
    assert "--beam is not for a run of the task language-model" in call(*command, "--beam", "4")[2]


class Doubtless(str):
    """A device in the place of a model whose tokenizer is its own."""

    doubt, unknown_id = "", None


def test_view_writes_where_it_is_told(call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []

    def save(seen: Any, files: PictureFiles, **how: Any) -> list[Path]:
        asked.append((seen, files, how["scale"]))
        return files.paths[:1]

    def look(model: Any, inputs: Any, say: Any, **how: Any) -> Any:
        return model, tuple(one.text for one in inputs)

    monkeypatch.setattr(view_command, "task_of", lambda run: None)
    monkeypatch.setattr(view_command.ViewCommand, "_model", lambda command, tell: Doubtless(command.device))
    monkeypatch.setattr(pictures, "look_at", look)
    monkeypatch.setattr(view_command, "task_name_of", lambda run: "translation")
    monkeypatch.setattr(pictures, "save_pictures", save)
    assert call("view", "run", "a", "b", "--out", str(tmp_path), "--device", "cpu")[1] == f"{tmp_path}/attention.png\n"
    call("view", "run", "a", "--out", "v.svg", "--scale", "row")
    call("view", "run", "a")
    both = PictureFiles(tmp_path / "attention.png", tmp_path / "attention.html")
    assert asked == [
        (("cpu", ("a", "b")), both, "sqrt"),
        (("auto", ("a",)), PictureFiles(Path("v.svg"), None), "row"),
        (("auto", ("a",)), PictureFiles(Path("run/attention.png"), Path("run/attention.html")), "sqrt"),
    ]
    assert "leave out --out or --terminal" in call("view", "run", "a", "--terminal", "--out", "v.png")[2]


def test_every_flag_in_a_message_exists() -> None:
    """In texts of the package, but for docstrings, each word that begins with -- is a flag of some command."""
    asked = [[name] for name in commands.COMMANDS] + [["train", task] for task in TRAINERS]
    flags = {flag for arguments in asked for flag in commands._known(arguments).flags}
    flags |= {"--help", "--help-all", "--version", "--verbose", "--debug", "--compare"}  # before or beside a command
    said: dict[str, Path] = {}
    for path in (ROOT / "src/regard").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
                said |= dict.fromkeys(re.findall(r"(?<![\w-])--[a-z][\w.-]*\w", node.value), path)
    assert len(said) > 50
    assert {word: path for word, path in said.items() if word not in flags} == {}
