"""Translators in Hugging Face's format: folders made here, translated by their library and by ours."""

import io
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from regard.edits import ScaleHeads
from regard.errors import MissingExtraError, RunFolderError
from regard.tasks.generation.config import Beam
from regard.tasks.generation.downloaded import Downloaded
from regard.tasks.translation.translation_model import TranslationOptions
from regard.tasks.translation.translator import Translator
from tests.searches import beam_search, greedy

TEXT = ["a small cat sees the old house", "the house sees a cat", "the cats were old and small", "we see a house!"]
TEXT += [f"{a} {b} {c}" for a in ("this", "every", "no") for b in ("old", "small", "new") for c in ("cat", "tree")]
SENTENCES = ["the old cat", "we see every small house", "a tree", "Zürich sees 木 trees"]
SMALL: dict[str, Any] = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 2} | {
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 64
}  # fmt: skip


def save(model: Any, folder: Path) -> None:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed_positions" not in name:
                parameter.add_(0.4 * torch.randn_like(parameter))
    model.save_pretrained(folder)


def make_marian(folder: Path, separate: bool = False) -> Path:
    """As an opus-mt folder: two SentencePiece models, and vocabularies whose ids are not theirs."""
    spm = pytest.importorskip("sentencepiece")
    from transformers import MarianConfig, MarianMTModel

    pieces = {}
    for side in ("source", "target"):
        made = io.BytesIO()
        spm.SentencePieceTrainer.train(
            sentence_iterator=iter(TEXT if side == "source" else [line.upper() for line in TEXT]),
            model_writer=made, vocab_size=48, minloglevel=2, hard_vocab_limit=False,
        )  # fmt: skip
        (folder / f"{side}.spm").write_bytes(made.getvalue())
        processor = spm.SentencePieceProcessor(model_proto=made.getvalue())
        pieces[side] = [processor.id_to_piece(i) for i in range(3, len(processor))]

    def vocabulary(words: Iterable[str]) -> dict[str, int]:
        return {word: n for n, word in enumerate(["</s>", "<unk>", ">>fra<<", *sorted(set(words)), "<pad>"])}

    both = [*pieces["source"], *pieces["target"]]
    source, target = (vocabulary(pieces[side] if separate else both) for side in ("source", "target"))
    (folder / "vocab.json").write_text(json.dumps(source))
    if separate:
        (folder / "target_vocab.json").write_text(json.dumps(target))
    sizes: dict[str, Any] = {
        "vocab_size": len(source),
        "decoder_vocab_size": len(target),
        "share_encoder_decoder_embeddings": False,
    }
    pad = target["<pad>"]
    model: Any = MarianMTModel(
        MarianConfig(
            **SMALL, **(sizes if separate else {"vocab_size": len(source)}), activation_function="swish",
            scale_embedding=True, pad_token_id=pad, decoder_start_token_id=pad, eos_token_id=0,
            forced_eos_token_id=None, bos_token_id=None,
        )
    )  # fmt: skip
    model.generation_config.bad_words_ids = [[pad]]
    model.final_logits_bias += torch.randn(len(target), generator=torch.Generator().manual_seed(2))
    model.final_logits_bias[0, pad] = 9.0  # padding would be the most probable token
    save(model, folder)
    return folder


def byte_level(text: Sequence[str], vocab_size: int, *special: str) -> Any:
    """Byte-level BPE of Hugging Face's tokenizers, whose first tokens are special."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(text, trainer)
    return backend


def make_bart(folder: Path) -> Path:
    """As a BART folder: byte-level BPE, whose ids 0 to 3 are ordinary text, with marks before and after a text."""
    from tokenizers import processors
    from transformers import BartConfig, BartForConditionalGeneration

    backend = byte_level(TEXT, 300)
    backend.add_special_tokens(["<s>", "<pad>", "</s>"])
    begin, pad, end = (backend.token_to_id(mark) for mark in ("<s>", "<pad>", "</s>"))
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", begin), ("</s>", end)]
    )
    backend.save(str(folder / "tokenizer.json"))
    config = BartConfig(
        **SMALL, vocab_size=end + 1, pad_token_id=pad, bos_token_id=begin, eos_token_id=end,
        decoder_start_token_id=end, forced_eos_token_id=None,
    )  # fmt: skip
    save(BartForConditionalGeneration(config), folder)
    return folder


def make_t5(folder: Path) -> Path:
    """As a T5 folder: Unigram pieces in a tokenizer.json, more embeddings than tokens, and begun by padding."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import T5Config, T5ForConditionalGeneration

    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=60, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(TEXT, trainer)
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    backend.save(str(folder / "tokenizer.json"))
    start: dict[str, Any] = {"decoder_start_token_id": 0}
    config = T5Config(
        vocab_size=backend.get_vocab_size() + 5, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2,
        relative_attention_num_buckets=8, relative_attention_max_distance=20, **start,
    )  # fmt: skip
    save(T5ForConditionalGeneration(config), folder)
    return folder


@pytest.fixture(scope="module")
def marian(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_marian(tmp_path_factory.mktemp("marian"))


@pytest.fixture(scope="module")
def bart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bart(tmp_path_factory.mktemp("bart"))


def translated_by_theirs(
    folder: Path, tokenizer: Any, model_class: Any, lines: Sequence[str]
) -> tuple[list[list[int]], Any]:
    import transformers

    model = getattr(transformers, model_class).from_pretrained(folder).eval()
    ids, found = [], []
    for line in lines:
        inputs = tokenizer(line, return_tensors="pt", return_token_type_ids=False)
        steps = 2 * inputs["input_ids"].shape[1] + 50  # Translator's own limit
        output = model.generate(**inputs, num_beams=1, do_sample=False, max_new_tokens=min(steps, 64), max_length=None)
        ids.append(inputs["input_ids"][0].tolist())
        found.append(tokenizer.decode(output[0], skip_special_tokens=True))
    return ids, found


def fast_tokenizer(folder: Path, **marks: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), eos_token="</s>", **marks)


def marian_tokenizer(folder: Path) -> Any:
    from transformers import MarianTokenizer

    separate = (folder / "target_vocab.json").exists()
    names = ["source.spm", "target.spm", "vocab.json", *(["target_vocab.json"] if separate else [])]
    make: Any = MarianTokenizer
    return make(*(str(folder / name) for name in names), separate_vocabs=separate)


# The maker of a folder, its tokenizer, the class of its model, and lines of its own.
THERE: dict[str, tuple[Callable[[Path], Path], Callable[[Path], Any], str, list[str]]] = {
    "marian": (make_marian, marian_tokenizer, "MarianMTModel", [">>fra<< the old cat"]),
    "marian, separate": (
        lambda folder: make_marian(folder, separate=True), marian_tokenizer, "MarianMTModel", [">>fra<< the old cat"]
    ),
    "bart": (
        make_bart, lambda folder: fast_tokenizer(folder, bos_token="<s>", pad_token="<pad>"),
        "BartForConditionalGeneration", ['!!! "#" $'],
    ),
    "t5": (
        make_t5, lambda folder: fast_tokenizer(folder, pad_token="<pad>", unk_token="<unk>"),
        "T5ForConditionalGeneration", [],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", THERE)
def test_a_folder_translates_as_it_does_there(name: str, tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    make, tokenizer_of, model_class, more = THERE[name]
    folder, lines = make(tmp_path), [*SENTENCES, *more]
    tokenizer = tokenizer_of(folder)
    recwarn.clear()  # Marian's recommends a package
    ids, expected = translated_by_theirs(folder, tokenizer, model_class, lines)
    translator = Translator.load(folder, device="cpu")
    assert [[*one, tokenizer.eos_token_id] for one in translator.source_tokenizer.encode_batch(lines)] == ids
    for ours, theirs in zip(translator.translate(lines, beam=Beam(1)), expected, strict=True):
        assert len(theirs) > 3
        assert ours.text[:40] == theirs.strip().replace("<unk>", "\ufffd")[:40]  # theirs stops at its positions
    assert translator.attend("the old cat").source_labels[-1] == "</s>"


@pytest.mark.parametrize("name", ["marian", "bart"])
def test_the_loss_is_theirs(name: str, request: pytest.FixtureRequest) -> None:
    """With their begin mark before the target, their end mark after it, and their padding left out."""
    import transformers

    folder = request.getfixturevalue(name)
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    translator = Translator.load(folder, device="cpu")
    assert isinstance(translator.model, Downloaded)
    translator.model.banned = ()  # their loss knows none
    end, total, count = translator.target_tokenizer.marks.end_id, 0.0, 0
    pairs = list(zip(SENTENCES, ["THE OLD CAT", "A", "!!! WE SEE!", "TREES AND TREES"], strict=True))
    for source, target in pairs:
        inputs, labels = (
            torch.tensor([[*side.encode_batch([text])[0], end]])
            for side, text in ((translator.source_tokenizer, source), (translator.target_tokenizer, target))
        )
        with torch.no_grad():
            loss = model(input_ids=inputs, labels=labels).loss
        total, count = total + float(loss) * labels.numel(), count + labels.numel()
    assert translator.loss(pairs) == pytest.approx(total / count, abs=1e-4)
    scores = list(translator.score(pairs))
    assert -sum(one.log_probability for one in scores) == pytest.approx(total, abs=1e-3)
    assert sum(one.tokens for one in scores) == count


@pytest.mark.parametrize("make", [make_marian, make_t5])
def test_unknown_pieces_are_copied(make: Callable[..., Any], tmp_path: Path) -> None:
    translator = Translator.load(make(tmp_path), device="cpu")
    model, unknown = translator.model, translator.target_tokenizer.unknown_id
    assert isinstance(model, Downloaded)
    model.banned = tuple(token for token in range(len(model.output.weight)) if token != unknown)
    (plain,) = translator.translate(["Zürich sees 木 trees"], beam=Beam(1))
    (copied,) = translator.translate(["Zürich sees 木 trees"], beam=Beam(1), copy_unknown=True)
    assert "\ufffd" in plain.text or not plain.text  # theirs drops special tokens
    assert copied.text
    pieces = "".join(translator.source_tokenizer.surfaces("Zürich sees 木 trees"))
    assert set(copied.text) <= set(pieces)
    assert pieces.strip() == "Zürich sees 木 trees"
    # What a vocabulary writes in another form is copied as it was given.
    assert "".join(translator.source_tokenizer.surfaces("a ｔree … ①")).strip() == "a ｔree … ①"


def test_banned_tokens_are_never_written(marian: Path) -> None:
    translator = Translator.load(marian, device="cpu")
    pad = translator.target_tokenizer.marks.pad_id
    assert isinstance(translator.model, Downloaded)
    assert translator.model.banned == (pad,)
    for beam_size in (1, 3):
        found = translator.hypotheses(SENTENCES, TranslationOptions(beam=Beam(beam_size)))
        assert all(pad not in best.tokens for (best, *_) in found)


def test_what_is_wrong_with_a_folder_is_one_clear_line(
    marian: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    def refused(spoil: Callable[[Path], object], message: str, error: type[Exception] = RunFolderError) -> None:
        folder = tmp_path / f"copy{len(list(tmp_path.iterdir()))}"
        shutil.copytree(marian, folder)
        spoil(folder)
        with pytest.raises(error, match=message) as raised:
            Translator.load(folder, device="cpu")
        assert "\n" not in str(raised.value)

    def edit(path: Path, **values: Any) -> None:
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    refused(lambda f: (f / "source.spm").unlink(), "has no tokenizer that regard reads")
    refused(lambda f: (f / "target.spm").write_bytes(b"nothing"), r"target\.spm is not a SentencePiece model")
    refused(lambda f: (f / "vocab.json").write_text("{"), r"vocab\.json is not a vocabulary that can be read")
    refused(lambda f: (f / "vocab.json").write_text('{"a": "b"}'), "expected an object of pieces")
    refused(lambda f: (f / "vocab.json").write_text('{"a": 1}'), "has no <unk>")
    numbered = r"an object of pieces and their ids, 0 to 2\^31"
    refused(lambda f: edit(f / "vocab.json", more=2**31), numbered)
    refused(lambda f: edit(f / "vocab.json", more=2**63), numbered)
    refused(lambda f: edit(f / "vocab.json", more=-1), numbered)
    refused(lambda f: (f / "tokenizer.json").write_text("{}"), r"tokenizer\.json is not a tokenizer")
    refused(lambda f: edit(f / "vocab.json", more=9999), "tokenizer has 10000 tokens and the model")

    def without_ends(folder: Path) -> None:
        edit(folder / "config.json", eos_token_id=None)
        edit(folder / "generation_config.json", eos_token_id=None)

    refused(without_ends, "does not say which tokens begin and end")
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    refused(lambda f: None, r"regard\[train\]", MissingExtraError)


T5_LIKE: dict[str, Any] = {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
BART_LIKE: dict[str, Any] = {"vocab_size": 40, **SMALL, "pad_token_id": 0, "eos_token_id": 2} | {
    "decoder_start_token_id": 0, "forced_eos_token_id": None
}  # fmt: skip
TRIED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {
        "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": 2, "bos_token_id": 1,
    }),
    "bart": ("BartForConditionalGeneration", "BartConfig", BART_LIKE),
    "t5": ("T5ForConditionalGeneration", "T5Config", T5_LIKE | {"eos_token_id": 2, "decoder_start_token_id": 0}),
    "marian": ("MarianMTModel", "MarianConfig", BART_LIKE),
    "m2m_100": ("M2M100ForConditionalGeneration", "M2M100Config", BART_LIKE),
}  # fmt: skip
FIRST = {"m2m_100": 7}
STEPS, LENGTHS = 12, [9, 5, 7, 3]


def tried(name: str, end: float = 0.0) -> Any:
    import transformers

    kind, config, settings = TRIED[name]
    model = getattr(transformers, kind)(getattr(transformers, config)(**settings)).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for path, one in model.named_parameters():
            if one.dim() > 1 and "embed_positions" not in path:
                one.copy_(0.3 * torch.randn(one.shape, generator=generator))
    added = end * torch.nn.functional.one_hot(torch.tensor(2), 40)
    model.get_output_embeddings().register_forward_hook(lambda *called: called[2] + added)
    model.generation_config.forced_bos_token_id = FIRST.get(name)
    return model


def generated(model: Any, source: torch.Tensor, beam: int, begin: int | None) -> list[list[tuple[list[int], float]]]:
    """The hypotheses of transformers alone, with scores on our scale: divided by the length with the end mark."""
    best = min(2, beam)
    rows = torch.arange(source.shape[1]) < torch.tensor(LENGTHS)[:, None]
    if begin is not None:  # a decoder alone: the text, its begin mark last, with the padding first
        source = torch.cat([source, torch.full((len(source), 1), begin)], 1)
        rows = torch.cat([rows, torch.ones(len(source), 1, dtype=torch.bool)], 1)
        order = rows.long().argsort(dim=1, stable=True)
        source, rows = source.gather(1, order), rows.gather(1, order)
    out = model.generate(
        source, attention_mask=rows.long(), num_beams=beam, num_return_sequences=best, max_new_tokens=STEPS,
        do_sample=False, early_stopping="never", return_dict_in_generate=True, output_scores=True, length_penalty=1.0,
    )  # fmt: skip
    indices = getattr(out, "beam_indices", None)
    gains = model.compute_transition_scores(out.sequences, out.scores, indices, normalize_logits=beam == 1)
    found = []
    for ids, gained in zip(out.sequences[:, out.sequences.shape[1] - gains.shape[1] :].tolist(), gains, strict=True):
        count = ids.index(2) + 1 if 2 in ids else len(ids)
        total = float(gained[:count].double().sum())
        found.append((ids[:count], total if beam == 1 else total / count))
    return [found[n : n + best] for n in range(0, len(found), best)]


@pytest.mark.parametrize("end", [-30.0, 9.0])
@pytest.mark.parametrize("beam", [1, 5])
@pytest.mark.parametrize("name", TRIED)
def test_hypotheses_are_those_of_transformers(name: str, beam: int, end: float) -> None:
    """Where all texts are cut off, and where all end: transformers lets both compete, and regard prefers the ended."""
    theirs = tried(name, end)
    ours, generator = Downloaded(theirs, first=FIRST.get(name)), torch.Generator()
    source = torch.randint(4, 40, (4, 9), generator=generator.manual_seed(2))
    begin = 1 if name == "llama" else 0
    expected = generated(theirs, source, beam, None if ours.is_pair else begin)
    common: dict[str, Any] = {"bos_id": begin, "eos_id": 2, "max_steps": STEPS}
    given = ours, source, torch.tensor(LENGTHS)
    if beam == 1:
        found = [[one] for one in greedy(*given, **common)]
    else:
        found = beam_search(*given, beam=Beam(beam, num_best=2), **common)
    assert [[one.tokens for one in best] for best in found] == [[ids for ids, _ in best] for best in expected]
    scores = [one.score for best in found for one in best]
    assert scores == pytest.approx([score for best in expected for _, score in best], abs=1e-5)
    assert all((one.tokens[-1] == 2) is (end > 0) for best in found for one in best)


@pytest.mark.parametrize("name", TRIED)
def test_attention_is_named_as_edit_names_it(name: str) -> None:
    ours, given = Downloaded(tried(name)), [torch.tensor([[4, 5, 6]])]
    if ours.is_pair:
        given += [torch.tensor([2]), torch.tensor([[0, 7]])]
        assert len(ours.alignment_names) == 2
        assert {ours.sides[one] for one in ours.attend(*given)} == {"encoder", "cross", "decoder"}
    maps = ours.attend(*given)
    with torch.no_grad():
        before = ours(*given)
        for path, one in maps.items():
            assert one.dense().sum(-1) == pytest.approx(torch.ones(one.shape[:-1]), abs=1e-5)
            with regard.edit(ours.model, {path: ScaleHeads(heads=[0, 1], factor=0.0)}):
                assert not torch.equal(ours(*given), before)
