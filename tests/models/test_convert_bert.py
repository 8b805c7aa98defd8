"""BERT of Hugging Face, read from its folder, against itself."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from regard.errors import ArgumentError, RunFolderError
from regard.models.convert import from_huggingface
from tests.models.foreign_models import BERT, BERT_BASE, ENCODERS, PAD, VOCAB, save

LENGTHS = torch.tensor([11, 6])


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    tokens, segments = torch.randint(2, VOCAB, (2, 11)), torch.randint(0, 2, (2, 11))
    mask = (torch.arange(11) < LENGTHS[:, None]).long()
    return tokens.masked_fill(mask == 0, PAD), segments, mask


@pytest.mark.parametrize("name", ENCODERS)
def test_logits_and_attention_are_theirs(tmp_path: Path, name: str) -> None:
    theirs, (tokens, segments, mask) = ENCODERS[name].build(), inputs()
    tokens = tokens.masked_fill(mask == 0, theirs.config.pad_token_id)
    ours = from_huggingface(save(theirs, tmp_path)).model
    has_segments = getattr(theirs.config, "type_vocab_size", 1) > 1
    named = {"token_type_ids": segments} if has_segments else {}
    given = (tokens, LENGTHS, segments) if has_segments else (tokens, LENGTHS)
    with torch.no_grad():
        seen = theirs(tokens, attention_mask=mask, output_attentions=True, **named)
        found, maps = ours(*given), ours.attend(*given)
    real = mask.bool()
    assert seen.logits.std() > 0.3
    torch.testing.assert_close(found[real], seen.logits[real], atol=1e-4, rtol=0)
    assert list(maps) == [f"encoder.{number}" for number in range(len(seen.attentions))]
    for weights, expected in zip(maps.values(), seen.attentions, strict=True):
        rows = real[:, None, :, None]
        torch.testing.assert_close(weights.dense() * rows, expected * rows, atol=1e-5, rtol=0)
    with torch.no_grad():
        seen, found = theirs.double()(tokens, attention_mask=mask, **named), ours.double()(*given)
    torch.testing.assert_close(found[real], seen.logits[real], atol=1e-9, rtol=0)


def test_the_base_alone_has_vectors_and_no_logits(tmp_path: Path) -> None:
    theirs, (tokens, _, mask) = BERT_BASE.build(), inputs()
    ours = from_huggingface(save(theirs, tmp_path)).model
    with torch.no_grad():
        expected = theirs(tokens, attention_mask=mask).last_hidden_state
        found = ours.encode(tokens, LENGTHS)
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], atol=1e-4, rtol=0)
    with pytest.raises(ArgumentError, match="without a head"):
        ours(tokens, LENGTHS)


def rewrite(folder: Path, edit: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(edit(tensors), folder / "model.safetensors")


def test_the_names_of_the_first_folders_are_read(tmp_path: Path) -> None:
    theirs = BERT.build()
    new, old = save(theirs, tmp_path / "new"), save(theirs, tmp_path / "old")

    def age(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        renamed = {
            name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
            for name, tensor in tensors.items()
        }
        word = tensors["bert.embeddings.word_embeddings.weight"].clone()
        return renamed | {
            "cls.seq_relationship.weight": torch.ones(2, 12),
            "bert.pooler.dense.weight": torch.ones(12, 12),
            "cls.predictions.decoder.weight": word,
        }

    rewrite(old, age)
    one, two = (from_huggingface(folder).model.state_dict() for folder in (new, old))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_bert_that_decodes_is_refused(tmp_path: Path) -> None:
    path = save(BERT.build(), tmp_path) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"is_decoder": True}))
    with pytest.raises(RunFolderError, match="decodes"):
        from_huggingface(tmp_path)
