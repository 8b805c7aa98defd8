"""Language models in Hugging Face's format: folders made here, continued by their library and by ours."""

import codecs
import json
from pathlib import Path

import pytest
import torch

from regard.errors import ArgumentError, RunFolderError
from regard.tasks.generation.filters import TopK
from regard.tasks.language_modelling.causal import LanguageModel
from regard.tasks.registry import task_of
from regard.tasks.translation.translator import Translator
from tests.tasks.test_pretrained import byte_level, save

TEXT = ["a small cat sees the old house", "the house sees a cat", "Zürich sees 木 trees\n\nand a house"] * 3


def make_gpt2(folder: Path) -> Path:
    """Byte-level BPE, whose ids 0 to 3 are `!`, `"`, `#` and `$`."""
    from transformers import GPT2Config, GPT2LMHeadModel

    backend = byte_level(TEXT, 280)
    backend.add_special_tokens(["<|endoftext|>"])
    backend.save(str(folder / "tokenizer.json"))
    end = backend.token_to_id("<|endoftext|>")
    config = GPT2Config(
        vocab_size=end + 4, n_positions=24, n_embd=16, n_layer=2, n_head=2, bos_token_id=end, eos_token_id=end
    )
    save(GPT2LMHeadModel(config), folder)
    return folder


def make_llama(folder: Path) -> Path:
    """SentencePiece-like BPE with byte fallback; a template begins texts, and two tokens may end them."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors, trainers
    from transformers import LlamaConfig, LlamaForCausalLM

    special = ["<unk>", "<s>", "</s>", "<eot>", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    # Bytes are no special tokens: the trainer only puts them first.
    backend.train_from_iterator(
        TEXT[:2], trainers.BpeTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    )
    record = json.loads(backend.to_str())
    record["added_tokens"] = [token for token in record["added_tokens"] if not token["content"].startswith("<0x")]
    backend = Tokenizer.from_str(json.dumps(record))
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.save(str(folder / "tokenizer.json"))
    config = LlamaConfig(
        vocab_size=backend.get_vocab_size(), hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=40, bos_token_id=1, eos_token_id=[2, 3],
    )  # fmt: skip
    save(LlamaForCausalLM(config), folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {"gpt2": make_gpt2(tmp_path_factory.mktemp("gpt2")), "llama": make_llama(tmp_path_factory.mktemp("llama"))}


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_it_writes_what_theirs_writes(name: str, folders: dict[str, Path]) -> None:
    import transformers
    from tokenizers import Tokenizer

    folder = folders[name]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    writer = LanguageModel.load(folder, device="cpu")
    assert writer.block_length == {"gpt2": 24, "llama": 40}[name]
    for prompt in ("the old cat", "Zürich 木", "a house\n\nand"):
        ids = tokenizer.encode(prompt).ids
        assert writer.language.prompt(prompt) == ids
        count = min(12, writer.block_length - len(ids))
        unwritable = list(range(len(writer.language.writable), theirs.config.vocab_size))
        output = theirs.generate(
            torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), do_sample=False,
            max_new_tokens=count, suppress_tokens=unwritable or None, pad_token_id=0,
        )[0].tolist()  # fmt: skip
        ends = [n for n in range(len(ids), len(output)) if output[n] in writer.language.end_ids]
        written = output[len(ids) : ends[0] if ends else None]
        assert len(written) > 2
        text = "".join(writer.generate(prompt, max_tokens=count, filters=[TopK(1)]))
        of_bytes = codecs.getincrementaldecoder("utf-8")("replace")  # a part of a character at the end is left out
        assert text == of_bytes.decode(b"".join(map(writer.tokenizer.bytes_of, written)))
        whole = tokenizer.decode(output[: ends[0] if ends else None])
        # Of bytes that make no character theirs drops whole characters beside them too.
        assert "\N{REPLACEMENT CHARACTER}" in text or (prompt + text).split() == whole.split()


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_scores_are_theirs(name: str, folders: dict[str, Path]) -> None:
    import transformers

    writer = LanguageModel.load(folders[name], device="cpu")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folders[name]).eval()
    text = ['!! "the" old #cat', "sees!"]
    ids = writer.language.row(text).tokens
    assert ids[0] == writer.language.begin_id
    with torch.no_grad():
        loss = theirs(torch.tensor([ids]), labels=torch.tensor([ids])).loss
    found = writer.evaluate(text)
    assert (found.tokens, found.text_bytes) == (len(ids) - 1, len("\n".join(text)) + 1)
    assert found.loss == pytest.approx(float(loss), abs=1e-4)
    assert [one.shape[0] for one in writer.attend("the old cat").maps.values()] == [2, 2]


def test_samples_are_drawn_together(folders: dict[str, Path]) -> None:
    writer = LanguageModel.load(folders["llama"], device="cpu")
    greedy = list(writer.samples("the old", count=3, max_tokens=9, filters=[TopK(1)]))
    assert greedy == ["".join(writer.generate("the old", max_tokens=9, filters=[TopK(1)]))] * 3
    drawn = list(writer.samples("the old", count=40, max_tokens=60, seed=3))  # longer than a block, and two batches
    assert len(drawn) == 40
    assert len(set(drawn)) > 30
    assert drawn == list(writer.samples("the old", count=40, max_tokens=60, seed=3))
    stopped = list(writer.samples("the old", count=40, max_tokens=60, seed=3, stop=["a"]))
    assert all("a" not in text for text in stopped)
    first = list(writer.samples("", count=2, max_tokens=3, seed=1))
    assert all(first)
    with pytest.raises(ArgumentError, match="count must be at least 1"):
        next(writer.samples("x", count=0))


def test_the_task_of_a_folder(folders: dict[str, Path], tmp_path: Path) -> None:
    assert task_of(folders["gpt2"]).load is not Translator.load
    assert isinstance(task_of(folders["llama"]).load(folders["llama"], device="cpu"), LanguageModel)
    with pytest.raises(RunFolderError, match=r"holds a gpt2 model \(GPT2LMHeadModel\), which does not translate"):
        Translator.load(folders["gpt2"], device="cpu")
    (folders["gpt2"] / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    with pytest.raises(RunFolderError, match=r"expected tokenizer\.json"):
        LanguageModel.load(folders["gpt2"], device="cpu")
    (tmp_path / "tokenizer.json").rename(folders["gpt2"] / "tokenizer.json")
