"""Folders whose config.json does not fit their tensors: refused in words, before anything of that size is built."""

import json
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from regard.errors import LONGEST, RunFolderError
from regard.models.convert import from_huggingface
from tests.models.foreign_models import BERT, GPT2, MARIAN, TRANSLATORS, llama, save

FAMILIES = {"marian": MARIAN, "t5": TRANSLATORS["t5"], "bart": TRANSLATORS["bart"], "gpt2": GPT2, "llama": llama()}
SIZES = {
    "vocab_size": ("marian", "t5", "bart", "gpt2", "llama"),
    "d_model": ("marian", "t5", "bart"),
    "encoder_layers": ("marian", "bart"),
    "decoder_layers": ("marian", "bart"),
    "encoder_attention_heads": ("marian", "bart"),
    "encoder_ffn_dim": ("marian", "bart"),
    "max_position_embeddings": ("bart",),
    "num_layers": ("t5",),
    "d_kv": ("t5",),
    "num_heads": ("t5",),
    "n_embd": ("gpt2",),
    "n_layer": ("gpt2",),
    "n_head": ("gpt2",),
    "n_positions": ("gpt2",),
    "hidden_size": ("llama",),
    "num_hidden_layers": ("llama",),
    "num_key_value_heads": ("llama",),
    "num_attention_heads": ("llama",),
    "intermediate_size": ("llama",),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    kinds = {**FAMILIES, "bert": BERT}
    return {name: save(model.build(), tmp_path_factory.mktemp(name)) for name, model in kinds.items()}


@pytest.fixture
def bounded_memory() -> Iterator[None]:
    """An allocation of a size that a config claims would fail here, rather than take the machine's memory."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (48 * 2**30, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def with_values(folder: Path, copy: Path, **values: object) -> Path:
    copy.mkdir()
    for path in folder.iterdir():
        if path.name != "generation_config.json":
            (copy / path.name).symlink_to(path)
    config = json.loads((copy / "config.json").read_text(encoding="utf-8"))
    (copy / "config.json").unlink()
    (copy / "config.json").write_text(json.dumps({**config, **values}), encoding="utf-8")
    return copy


@pytest.mark.parametrize(
    ("name", "family"), [(name, family) for name, families in SIZES.items() for family in families]
)
@pytest.mark.usefixtures("bounded_memory")
def test_sizes_that_the_tensors_do_not_have(name: str, family: str, folders: dict[str, Path], tmp_path: Path) -> None:
    for number, value in enumerate((0, -1, 10**9, 10**12, 10**30)):
        copy = with_values(folders[family], tmp_path / str(number), **{name: value})
        with pytest.raises(RunFolderError) as caught:
            from_huggingface(copy)
        assert str(copy) in str(caught.value)
        assert len(str(caught.value)) <= LONGEST


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": ["marian"]}, r"model_type is \['marian'\]; regard reads bart"),
        ({"model_type": "x" * 100_000}, "regard reads bart"),
        ({"eos_token_id": "x"}, "eos_token_id must name tokens from 0 to 36, got 'x'"),
        ({"eos_token_id": [1, 37]}, "eos_token_id must name tokens from 0 to 36, got 37"),
        ({"eos_token_id": [[1]]}, r"eos_token_id must name tokens .*, got \[1\]"),
        ({"pad_token_id": -5}, "pad_token_id must name tokens from 0 to 36, got -5"),
        ({"pad_token_id": True}, "pad_token_id must name tokens from 0 to 36, got True"),
        ({"bad_words_ids": [["x"]]}, "bad_words_ids must name tokens from 0 to 36, got 'x'"),
        ({"decoder_start_token_id": 1e300}, r"decoder_start_token_id must name tokens .*, got 1e\+300"),
        ({"d_model": "x" * 100_000}, "d_model must be a int, got 'xxx"),
    ],
)
def test_values_of_another_kind(
    values: dict[str, object], message: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(RunFolderError, match=message) as caught:
        from_huggingface(with_values(folders["marian"], tmp_path / "copy", **values))
    assert len(str(caught.value)) <= LONGEST


def test_json_that_is_too_deep(folders: dict[str, Path], tmp_path: Path) -> None:
    copy = with_values(folders["bert"], tmp_path / "copy")
    (copy / "config.json").write_text("[" * 100_000, encoding="utf-8")
    with pytest.raises(RunFolderError, match="not whole JSON"):
        from_huggingface(copy)


def test_folders_that_are_as_they_were(folders: dict[str, Path], tmp_path: Path) -> None:
    for name, folder in folders.items():
        assert from_huggingface(with_values(folder, tmp_path / name, pad_token_id=-1)).pad_id is None
