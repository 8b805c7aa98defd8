"""Whether the output layer is the embedding: config.json decides, and a file has what it says."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.errors import RunFolderError
from regard.models.convert import FAMILIES, from_huggingface
from regard.models.convert.folder import TIED
from regard.models.convert.weights import Weights
from tests.models.foreign_models import ENCODERS, LANGUAGE_MODELS, TRANSLATORS, VOCAB, Foreign, save

HEADS = ("lm_head.weight", "lm_head.decoder.weight", "cls.predictions.decoder.weight")
OF_ONE_STACK = LANGUAGE_MODELS | {name: ENCODERS[name] for name in ("bert", "roberta", "xlm-roberta")}
MODELS = OF_ONE_STACK | {name: TRANSLATORS[name] for name in ("marian", "bart", "pegasus", "blenderbot")}


def tied(model: Foreign, says: bool) -> Foreign:
    return replace(model, settings={**model.settings, TIED: says})


def logits(model: Any, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        found = model(tokens)
    return found if isinstance(found, Tensor) else found.logits


def edit(folder: Path, change: Any) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("name", OF_ONE_STACK)
def test_logits_are_theirs_where_the_family_is_the_other_way(tmp_path: Path, name: str) -> None:
    says = not OF_ONE_STACK[name].build().config.tie_word_embeddings
    theirs, tokens = tied(OF_ONE_STACK[name], says).build(), torch.randint(2, VOCAB, (2, 7))
    ours = from_huggingface(save(theirs, tmp_path)).model
    assert (ours.output.weight is ours.embedding.weight) is says
    torch.testing.assert_close(logits(ours, tokens), logits(theirs, tokens), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", MODELS)
def test_an_output_layer_in_no_file_is_an_error_that_names_it(tmp_path: Path, name: str) -> None:
    folder = save(tied(MODELS[name], False).build(), tmp_path)
    edit(folder, lambda tensors: [tensors.pop(head, None) for head in HEADS])
    with pytest.raises(RunFolderError, match=r"has no tensor (lm_head|cls\.predictions)\S*weight"):
        from_huggingface(folder)


@pytest.mark.parametrize("name", ["llama3", "gpt2", "bert", "bart"])
def test_one_matrix_too_many_is_read_as_transformers_reads_it(tmp_path: Path, name: str) -> None:
    """Where a folder has another output layer although it says tied, both stay as they are."""
    import transformers

    wanted = tied(MODELS[name], True)
    theirs = wanted.build()
    folder = save(theirs, tmp_path)
    head = "cls.predictions.decoder.weight" if name == "bert" else "lm_head.weight"
    edit(folder, lambda tensors: tensors.update({head: torch.randn(VOCAB, theirs.config.hidden_size)}))
    theirs = getattr(transformers, wanted.model).from_pretrained(folder).eval()
    ours, tokens = from_huggingface(folder).model, torch.randint(2, VOCAB, (1, 5))
    if name == "bart":
        found = ours(tokens, torch.tensor([5]), tokens)
        expected = theirs(input_ids=tokens, decoder_input_ids=tokens).logits
    else:
        found, expected = logits(ours, tokens), logits(theirs, tokens)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_a_folder_that_does_not_say_is_as_its_family(tmp_path: Path) -> None:
    import transformers

    for name, model in MODELS.items():
        folder = save(model.build(), tmp_path / name.replace(" ", "-"))
        values = json.loads((folder / "config.json").read_text())
        kind = values["model_type"]
        assert kind in FAMILIES
        says = transformers.CONFIG_MAPPING[kind]().tie_word_embeddings
        folder = save(tied(model, says).build(), tmp_path / f"{name} says".replace(" ", "-"))
        values = json.loads((folder / "config.json").read_text())
        values.pop(TIED)
        values.get("text_config", {}).pop(TIED, None)
        (folder / "config.json").write_text(json.dumps(values))
        ours = from_huggingface(folder).model
        assert (
            ours.output.weight is getattr(ours, "target_embedding", getattr(ours, "embedding", None)).weight
        ) is says


def test_two_matrices_for_one_of_ours_are_refused() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = self.two = nn.Linear(3, 3, bias=False)

    weights = Weights({}, Path("folder"))
    weights.ours |= {"one.weight": torch.ones(3, 3), "two.weight": torch.zeros(3, 3)}
    with pytest.raises(
        RunFolderError, match=r"two matrices where the model has one, as one\.weight and as two\.weight"
    ):
        weights.build(Twice)
