import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.cli.main import run_command
from regard.errors import ArgumentError, DataError, NonFiniteError, RunFolderError
from regard.models import DecoderOnly, DecoderOnlyConfig
from regard.tasks import LanguageModel, Translator, train_language_model
from regard.tasks.generation.filters import TopK
from regard.tasks.language_modelling.corpus import open_text
from regard.tasks.language_modelling.train import next_token_loss
from regard.tasks.pictures.save import PictureFiles, look_at, save_pictures
from regard.tasks.runs.run_folder import RunFolder
from regard.tasks.text.blocks import next_token_windows, window_batches
from regard.tasks.text.tokenizer_recipes import Characters
from regard.tasks.text.tokenizers import BOS, EOS
from regard.tasks.viewing.own_model import OwnModel
from regard.tasks.viewing.view_input import ViewInput
from tests.tasks.small_runs import LAYERS, LINES, small_text_config


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    folder = tmp_path_factory.mktemp("lines")
    length: dict[str, Any] = {"steps": 250, "schedule": "cosine", "validate_every": 50, "save_every": 250}
    return train_language_model(small_text_config(folder, documents="lines", **length))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = small_text_config(tmp_path_factory.mktemp("short"), tokenizer="bpe", vocab_size=260)
    train_language_model(config)
    return config.out


def test_a_hybrid_trains_writes_and_is_drawn_by_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "run"
    text.write_text("".join(f"{line}\n" for line in LINES), encoding="utf-8")
    sizes = "--model.dim 16 --model.num-heads 2 --model.feed-forward-dim 16 --model.num-layers 4 --batch-tokens 128"
    command = f"train language-model --data {text} --out {out} --tokenizer characters --block-length 32 {sizes}"
    layers = ["--model.layers", "mamba2, lightning, full, gated_delta"]
    assert run_command([*command.split(), "--steps", "2", "--device", "cpu", *layers]) == 0
    assert run_command(["generate", str(out), "3 and", "--max-tokens", "4"]) == 0
    # The last layer, of which a picture is drawn, has signs; the page has shares of sizes in the place of these.
    assert run_command(["view", str(out), "3 and 4", "--out", str(tmp_path / "seen")]) == 0
    assert (tmp_path / "seen" / "attention.png").stat().st_size > 1000
    assert "decoder.3 (shares of sizes)" in (tmp_path / "seen" / "attention.html").read_text(encoding="utf-8")
    assert "3 and" in capsys.readouterr().out


def test_the_tail_is_for_validation_and_never_seen(tmp_path: Path) -> None:
    config = small_text_config(tmp_path, steps=1, valid_share=0.25)
    train_language_model(config)
    corpus = open_text(RunFolder(config.out))
    trained, held_out = (corpus.tokenizer.decode(store.tokens.tolist()) for store in (corpus.train, corpus.valid))
    text = config.data[0].read_text(encoding="utf-8")
    assert trained + held_out.replace("\N{REPLACEMENT CHARACTER}", "1") == text
    assert 0.2 < len(held_out.encode()) / len(text.encode()) <= 0.25
    assert trained.endswith("\n")
    # Nor does the tokenizer know a character that the tail alone has.
    (tmp_path / "tail.txt").write_text(text + "ß\n" * 3, encoding="utf-8")
    config = replace(config, data=(tmp_path / "tail.txt",), out=tmp_path / "other")
    train_language_model(config)
    corpus = open_text(RunFolder(config.out))
    assert corpus.tokenizer.encode("ß") == [3]
    assert corpus.valid.unknown == 3
    assert "3 of them unknown" in (config.out / "train.log").read_text()


def test_the_tokenizer_of_another_run(run: Path, tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("!?\n" * 99)
    config = small_text_config(tmp_path, data=(tmp_path / "other.txt",), steps=1)
    alone: Any = train_language_model(config)
    ours: Any = train_language_model(replace(config, out=tmp_path / "of another", tokenizers_of=run))
    theirs: Any = LanguageModel.load(run)
    assert ours.tokenizer.fingerprint() == theirs.tokenizer.fingerprint() != alone.tokenizer.fingerprint()


def test_several_files_and_files_of_their_own_for_validation(tmp_path: Path) -> None:
    config = small_text_config(tmp_path, steps=1)
    other = tmp_path / "other.txt"
    other.write_text("1 and 2 make 3\n", encoding="utf-8")
    train_language_model(replace(config, data=(*config.data, other), valid=(other,)))
    corpus = open_text(RunFolder(config.out))
    assert corpus.train.text_bytes == len(config.data[0].read_bytes()) + corpus.valid.text_bytes
    assert corpus.tokenizer.decode(corpus.valid.tokens.tolist()) == "1 and 2 make 3\n"


def losses(folder: Path) -> list[tuple[str, int, float]]:
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(record["event"], record["step"], record["loss"]) for record in records]


def test_what_is_predicted_can_be_predicted(writer: LanguageModel) -> None:
    """Of `n and m make sum; 木 n` the sum, the fixed words and the last number follow; n and m are a guess."""
    found = writer.evaluate(LINES)
    assert found.loss < 0.65  # with n and m a guess, and every sum known: about 0.5
    assert found.perplexity == pytest.approx(math.exp(found.loss))
    assert found.text_bytes == len("\n".join(LINES).encode()) + 1
    assert found.tokens == sum(len(line) + 1 for line in LINES)
    assert found.bits_per_byte == pytest.approx(found.loss * found.tokens / found.text_bytes / math.log(2))
    assert "".join(writer.generate("3 and 4 m", filters=[TopK(1)])).startswith("ake ")


def test_validation_and_evaluation_agree(run: Path) -> None:
    writer, corpus = LanguageModel.load(run, device="cpu"), open_text(RunFolder(run))
    best = min(loss for event, _, loss in losses(run) if event == "valid")
    batches = window_batches(next_token_windows(corpus.valid.tokens, length=32, stride=32), places=999)
    with torch.no_grad():
        sums = [next_token_loss(writer.model, batch) for batch in batches]
    loss = sum(float(part.total) for part in sums) / sum(int(part.count) for part in sums)
    assert loss == pytest.approx(best, abs=1e-5)
    tail = corpus.tokenizer.decode(corpus.valid.tokens.tolist()).splitlines()
    assert writer.evaluate(tail, stride=32).loss == pytest.approx(best, abs=1e-5)
    assert writer.evaluate(tail).tokens == corpus.valid.text_bytes


def test_a_seed_gives_the_same_text_again_and_stop_strings_end_it(writer: LanguageModel) -> None:
    draw = lambda seed: "".join(writer.generate("", seed=seed, max_tokens=30))  # noqa: E731
    texts = [draw(seed) for seed in range(6)]
    assert texts == [draw(seed) for seed in range(6)]
    assert len(set(texts)) > 3
    for text in texts:
        assert text  # a text may begin from nothing
    whole = "".join(writer.generate("3 and 4 ", filters=[TopK(1)]))
    assert "make" in whole
    assert "".join(writer.generate("3 and 4 ", filters=[TopK(1)], stop=["ke", ";"])) == whole.split("ke")[0]


def test_running_text_never_ends_and_no_text_begins_twice(writer: LanguageModel, run: Path) -> None:
    """Whatever the model makes of them: all but the special tokens' logits are pulled down."""

    def tempt(logits: Tensor, progress: Any) -> Tensor:
        return torch.cat([logits[:, :4] + 99, logits[:, 4:]], 1)

    text = "".join(LanguageModel.load(run, device="cpu").generate("x", max_tokens=50, filters=[tempt]))
    assert len(text.encode()) >= 50  # a byte a token; what is no character prints as three
    assert "".join(writer.generate("3", filters=[tempt])) == ""  # documents may end


def test_a_full_block_goes_on_from_its_second_half() -> None:
    tokenizer = Characters().train(["abcdefgh"])
    model = DecoderOnly(DecoderOnlyConfig(**LAYERS, tied_output=False), vocab_size=len(tokenizer))
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for parameter in model.parameters():  # drawn here, so that what it writes depends on what it reads
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    writer = LanguageModel(model, tokenizer, block_length=8)
    kept = ids = [BOS, *tokenizer.encode("abc")]
    for _ in range(40):
        kept = kept if len(kept) <= 8 else ids[-4:]
        token = int(model(torch.tensor([kept]))[0, -1, 4:].argmax()) + 4
        kept, ids = [*kept, token], [*ids, token]
    written = "".join(writer.generate("abc", max_tokens=40, filters=[TopK(1)]))
    assert "abc" + written == tokenizer.decode(ids)
    assert len(set(written)) > 2


def test_a_text_outgrows_the_block_and_goes_on(run: Path) -> None:
    """A byte a token, 32 at once: characters come whole."""
    writer: Any = LanguageModel.load(run, device="cpu")
    assert sum(map(len, writer.generate("x" * 50, max_tokens=100))) > 20
    pieces = list(writer.generate("木", max_tokens=80, seed=1))
    assert all(piece for piece in pieces)


def test_a_line_is_evaluated_with_its_end(writer: Any) -> None:
    for line in LINES[:3]:
        found, ids = writer.evaluate([line]), torch.tensor([[BOS, *writer.tokenizer.encode(line), EOS]])
        own = writer.model(ids[:, :-1]).log_softmax(-1).gather(2, ids[:, 1:, None]).mean()
        assert (found.tokens, found.loss) == (len(line) + 1, pytest.approx(-float(own), abs=1e-5))


def test_attention_is_drawn(writer: LanguageModel, tmp_path: Path) -> None:
    text = "3 and 4"
    seen = writer.attend(text)
    assert seen.texts == ["<bos>", *text.replace(" ", "␣")]
    assert list(seen.maps)[-1] == seen.shown
    looks = look_at(OwnModel(writer), [ViewInput(text), ViewInput("木")], pytest.fail)
    picture, page = save_pictures(looks, PictureFiles.at(tmp_path / "out"), title="test")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert text in page.read_text(encoding="utf-8")
    for wrong in ("", "x" * 40):
        with pytest.raises(DataError, match="expected 1 to 31"):
            writer.attend(wrong)
    assert not seen.maps["decoder.0"].dense().triu(1).any()
    spoiled = seen._replace(maps={**seen.maps, "decoder.0": seen.maps["decoder.0"].dense() * torch.nan})
    with pytest.raises(NonFiniteError, match="nan came in head 0 at query 0, key 0"):  # JSON has no word for it
        save_pictures([looks[0]._replace(attention=spoiled)], PictureFiles.at(tmp_path / "x.json"), title="test")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "expected text, got nothing"),
        (b"\n\n", "text"),
        (b"short\n", "too little text"),
        (b"a\n" * 20 + b"\xff\n", r"bad\.txt:21: expected UTF-8"),
    ],
)
def test_bad_text_leaves_nothing_behind(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "bad.txt").write_bytes(content)
    config = small_text_config(tmp_path, data=(tmp_path / "bad.txt",))
    with pytest.raises(DataError, match=message):
        train_language_model(config)
    assert not config.out.exists()


def test_bad_lines_are_counted(tmp_path: Path) -> None:
    config = small_text_config(tmp_path, bad_lines="skip", steps=1)
    with config.data[0].open("ab") as file:
        file.write(b"\xff\n")
    train_language_model(config)
    assert "1 bad lines left out; the first: " in (config.out / "train.log").read_text()


def test_damaged_and_other_runs(run: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(run, tmp_path / "copy"))
    Characters().train(["abc"]).save(copied / "tokenizer.json")
    with pytest.raises(RunFolderError, match="is not the tokenizer that"):
        LanguageModel.load(copied)
    with pytest.raises(RunFolderError, match="holds a run of language-model, and this needs one of translation"):
        Translator.load(run)
    writer = LanguageModel.load(run, device="cpu")
    with pytest.raises(DataError, match="no text"):
        writer.evaluate([])
    with pytest.raises(ArgumentError, match="max_tokens must be at least 1"):
        next(writer.generate("x", max_tokens=0))
    with pytest.raises(ArgumentError, match="the stride must be from 1 to 32"):
        writer.evaluate(LINES, stride=40)
