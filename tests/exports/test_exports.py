"""Runs in the formats of other runtimes, each run there, token for token against ours."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.errors import ArgumentError, MissingExtraError, RunFolderError
from regard.models.transformer import Transformer
from regard.tasks.exports import export_run
from regard.tasks.exports.ctranslate2 import to_ctranslate2
from regard.tasks.exports.huggingface import to_huggingface
from regard.tasks.exports.trained import ExportedRun
from regard.tasks.generation.config import Beam
from regard.tasks.text.codec import Marks
from regard.tasks.text.pretrained import pretrained_tokenizers
from regard.tasks.text.tokenizer_recipes import ByteLevelBPE, Characters, Words
from regard.tasks.translation.translator import Translator
from tests.exports.exported_runs import EXPRESSIBLE, LINES, STEPS, TINY, Runs, ours


def theirs(folder: Path) -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model, report = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report  # transformers would print it as a table of missing weights
    return model.eval()


@pytest.mark.parametrize("name", EXPRESSIBLE)
def test_hugging_face_writes_the_same_tokens(name: str, run_of: Runs, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    run = run_of(name)
    files = export_run(run, to="huggingface", out=tmp_path / "out")
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in files}
    translator, ids, expected = ours(run)
    model, tokenizer = theirs(tmp_path / "out"), AutoTokenizer.from_pretrained(tmp_path / "out")
    for line, source, tokens in zip(LINES, ids, expected, strict=True):
        inputs = tokenizer(line, return_tensors="pt", return_token_type_ids=False)
        assert inputs["input_ids"][0].tolist() == [*source, 2]
        output = model.generate(**inputs, max_new_tokens=STEPS, max_length=None, num_beams=1, do_sample=False)
        assert output[0, 1:].tolist() == tokens
        if translator.source_tokenizer.fingerprint() == translator.target_tokenizer.fingerprint():
            assert tokenizer.decode(tokens, skip_special_tokens=True) == translator.target_tokenizer.decode(tokens)


@pytest.mark.parametrize("name", EXPRESSIBLE)
def test_an_export_comes_back(name: str, run_of: Runs, tmp_path: Path) -> None:
    run = run_of(name)
    export_run(run, to="huggingface", out=tmp_path / "out")
    translator: Any = Translator.load(run, device="cpu")
    returned: Any = Translator.load(tmp_path / "out", device="cpu").model
    source, lengths, target = torch.randint(4, 90, (2, 7)), torch.tensor([7, 4]), torch.randint(4, 90, (2, 5))
    size = len(translator.target_tokenizer)
    source, target = source.clamp(max=len(translator.source_tokenizer) - 1), target.clamp(max=size - 1)
    expected, found = translator.model(source, lengths, target), returned(source, lengths, target)
    torch.testing.assert_close(found[..., :size], expected, atol=1e-5, rtol=1e-5)
    assert (found[..., size:] < -1e8).all()
    again = [one.text for one in Translator.load(tmp_path / "out", device="cpu").translate(LINES, beam=Beam(3))]
    assert again == [one.text for one in translator.translate(LINES, beam=Beam(3))]
    with pytest.raises(ArgumentError, match="out is a Hugging Face folder already; only runs of `regard train`"):
        export_run(tmp_path / "out", to="ctranslate2", out=tmp_path / "again")


def test_tokens_that_only_the_source_has_are_never_written(tmp_path: Path) -> None:
    source, target = Words().train(["one two three four five six"]), Words().train(["a b"])
    model = Transformer(TINY, source_vocab_size=len(source), target_vocab_size=len(target)).eval()
    with torch.no_grad():
        model.output.weight.mul_(3)
    to_huggingface(ExportedRun(model.requires_grad_(False), TINY, source, target), tmp_path)
    returned: Any = Translator.load(tmp_path, device="cpu").model
    logits = returned(*(torch.full(shape, 4) for shape in ((1, 3), (1,), (1, 2))))
    assert logits.shape[-1] == len(source) > len(target)
    assert (logits[..., len(target) :] < -1e8).all()
    output = theirs(tmp_path).generate(torch.tensor([[4, 5, 6, 2]]), max_new_tokens=9, max_length=None, num_beams=3)
    assert output.max() < len(target)


@pytest.mark.parametrize("kind", [Words, Characters, ByteLevelBPE])
def test_unknown_words_are_written_as_our_own_translation_shows_them(kind: Any, tmp_path: Path) -> None:
    """Where text without special tokens is asked for, as every program does that translates."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    source, target = kind().train(["one two"]), kind().train(["un deux deux"])
    model = Transformer(TINY, source_vocab_size=len(source), target_vocab_size=len(target)).eval()
    to_huggingface(ExportedRun(model.requires_grad_(False), TINY, source, target), tmp_path)
    written = [1, target.encode("un")[0], target.unk_id, target.encode("deux")[-1], 2, 0]
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "target_tokenizer.json"))
    assert theirs.decode(written, skip_special_tokens=True) == target.decode(written)
    assert ("\ufffd" in target.decode(written)) == (kind is not ByteLevelBPE)
    own = pretrained_tokenizers(tmp_path, Marks(0, 1, 2), Marks(0, 1, 2))[1]
    assert own.decode(written) == target.decode(written)
    both = AutoTokenizer.from_pretrained(tmp_path)
    assert both("one three")["input_ids"][:-1] == source.encode("one three")


@pytest.mark.parametrize("name", [*EXPRESSIBLE, "post, learned", "pre, modern"])
def test_ctranslate2_writes_the_same_tokens(name: str, run_of: Runs, tmp_path: Path) -> None:
    engine = pytest.importorskip("ctranslate2", reason="CTranslate2 is not installed")
    run = run_of(name)
    export_run(run, to="ctranslate2", out=tmp_path / "out")
    translator, ids, expected = ours(run)
    model = engine.Translator(str(tmp_path / "out"), device="cpu", compute_type="float32", intra_threads=1)
    sources = [[translator.source_tokenizer.piece(i) for i in one] for one in ids]
    found = model.translate_batch(
        sources, beam_size=1, max_decoding_length=STEPS, min_decoding_length=0, return_end_token=True
    )
    for result, tokens in zip(found, expected, strict=True):
        assert result.hypotheses[0] == [translator.target_tokenizer.piece(i) for i in tokens]


@pytest.mark.parametrize(("norm", "epsilon"), [("layer", 1e-5), ("rms", torch.finfo(torch.float32).eps)])
def test_ctranslate2_is_told_the_epsilon_of_the_norms(norm: Any, epsilon: float, tmp_path: Path) -> None:
    pytest.importorskip("ctranslate2", reason="CTranslate2 is not installed")
    config, words = replace(TINY, norm=norm), Words().train(["one two three"])
    model = Transformer(config, source_vocab_size=len(words), target_vocab_size=len(words)).eval()
    to_ctranslate2(ExportedRun(model.requires_grad_(False), config, words, words), tmp_path)
    told = json.loads((tmp_path / "config.json").read_text())["layer_norm_epsilon"]
    assert told == pytest.approx(epsilon, rel=1e-6)


@pytest.mark.parametrize(
    ("to", "changes", "message"),
    [
        (to_huggingface, {"norm": "rms"}, "huggingface cannot express norm=rms; it can layer"),
        (to_huggingface, {"activation": "swiglu"}, "activation=swiglu; it can relu, gelu"),
        (to_huggingface, {"positions": "rotary"}, "positions=rotary"),
        (to_huggingface, {"num_kv_heads": 1}, "num_kv_heads=1: there each head has its own"),
        (
            to_huggingface,
            {"positions": "learned", "norm_position": "post"},
            "norm_position=post with positions=learned",
        ),
        (to_ctranslate2, {"positions": "rotary"}, "ctranslate2 cannot express positions=rotary"),
        (to_ctranslate2, {"num_kv_heads": 1}, "num_kv_heads=1"),
    ],
)
def test_what_a_format_cannot_express_is_said(
    to: Callable[..., Any], changes: dict[str, Any], message: str, run_of: Runs, tmp_path: Path
) -> None:
    config = replace(TINY, **changes)
    model = Transformer(config, source_vocab_size=300, target_vocab_size=300)
    tokenizer: Any = Translator.load(run_of("pre"), device="cpu").source_tokenizer
    with pytest.raises(ArgumentError, match=message):
        to(ExportedRun(model, config, tokenizer, tokenizer), tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_refusal_leaves_no_folder(run_of: Runs, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="norm=rms"):
        export_run(run_of("pre, modern"), to="huggingface", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_full_folder_another_model_and_a_missing_library(
    run_of: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of("pre")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(RunFolderError, match="not an empty folder"):
        export_run(run, to="huggingface", out=tmp_path)
    assert (tmp_path / "file").read_text() == "mine"
    with pytest.raises(RunFolderError, match="not a folder"):
        export_run(tmp_path / "nowhere", to="huggingface", out=tmp_path / "out")
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    with pytest.raises(MissingExtraError, match=r"regard\[train\]"):
        export_run(run, to="ctranslate2", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
