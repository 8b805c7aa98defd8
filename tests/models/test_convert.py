"""Encoder-decoder models of Hugging Face, read from their folders, against themselves."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.errors import RunFolderError
from regard.models.convert import Pretrained, from_huggingface
from regard.tasks.generation.greedy_search import greedy
from tests.models.foreign_models import END, MARIAN, PAD, TRANSLATORS, VOCAB, save
from tests.transformers_version import is_older_than

LENGTHS = torch.tensor([11, 6])


@pytest.fixture(scope="module", params=TRANSLATORS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Pretrained]:
    """A model of theirs, and ours from its folder."""
    if "decoder_vocab_size" in TRANSLATORS[request.param].settings and is_older_than(5):
        pytest.skip("transformers 4 gives Marian's decoder as many embeddings as the source has words")
    theirs = TRANSLATORS[request.param].build()
    folder = save(theirs, tmp_path_factory.mktemp("model"))
    return theirs, from_huggingface(folder)


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """The same in every release of torch: how far float32 is off depends on what is drawn."""
    drawn = torch.Generator().manual_seed(0)
    source, target = (torch.randint(2, VOCAB, (2, length), generator=drawn) for length in (11, 7))
    mask = (torch.arange(11) < LENGTHS[:, None]).long()
    return source.masked_fill(mask == 0, PAD), target, mask


def test_logits_are_theirs(pair: tuple[Any, Pretrained]) -> None:
    theirs, ours = pair
    source, target, mask = inputs()
    for dtype in (torch.float32, torch.float64):
        with torch.no_grad():
            one, other = (copy.deepcopy(model).to(dtype) for model in (theirs, ours.model))
            expected = one(input_ids=source, attention_mask=mask, decoder_input_ids=target).logits
            found = other(source, LENGTHS, target)
        assert expected.std() > 0.3
        # Their T5 computes weights and norms in float32 whatever it is asked for.
        is_exact = dtype == torch.float64 and ours.family != "t5"
        torch.testing.assert_close(found, expected, atol=1e-6 if is_exact else 1e-4, rtol=0)


def test_attention_is_theirs(pair: tuple[Any, Pretrained]) -> None:
    theirs, ours = pair
    source, target, mask = inputs()
    with torch.no_grad():
        seen = theirs(input_ids=source, attention_mask=mask, decoder_input_ids=target, output_attentions=True)
        maps = ours.model.attend(source, LENGTHS, target)
    expected = {f"encoder.{n}": weights for n, weights in enumerate(seen.encoder_attentions)}
    expected |= {f"decoder.{n}.self": weights for n, weights in enumerate(seen.decoder_attentions)}
    expected |= {f"decoder.{n}.cross": weights for n, weights in enumerate(seen.cross_attentions)}
    assert set(maps) == set(expected)
    for name, weights in expected.items():
        found = maps[name].dense()
        if name.startswith("encoder"):  # what padding looks at is nobody's business
            real = mask.bool()[:, None, :, None]
            found, weights = found * real, weights * real
        torch.testing.assert_close(found, weights, atol=1e-5, rtol=0, msg=f"{name}: {{}}".format)


def test_greedy_decoding_is_generate(pair: tuple[Any, Pretrained]) -> None:
    theirs, ours = pair
    source, _, mask = inputs()
    with torch.no_grad():
        # Without their cache, which in 5.23 counts a T5's encoder layers where it means its decoder's.
        settings: dict[str, Any] = {"max_new_tokens": 12, "num_beams": 1, "do_sample": False, "use_cache": False}
        expected = theirs.generate(input_ids=source, attention_mask=mask, **settings)
    (end,), begin = ours.end_ids, ours.begin_id
    assert end == END
    assert begin is not None
    found = greedy(ours.model, source, LENGTHS, bos_id=begin, eos_id=end, max_steps=12)
    for hypothesis, row in zip(found, expected[:, 1:].tolist(), strict=True):
        kept = row[: row.index(END) + 1] if END in row else row
        assert hypothesis.tokens == kept
    assert sum(len(hypothesis.tokens) for hypothesis in found) > 9


def test_cached_decoding_is_uncached(pair: tuple[Any, Pretrained]) -> None:
    source, target, _ = inputs()
    for dtype, close in ((torch.float32, 1e-5), (torch.float64, 1e-12)):
        model = copy.deepcopy(pair[1].model).to(dtype)
        with torch.no_grad():
            expected, state = model(source, LENGTHS, target), model.start(source, LENGTHS)
            for place in range(target.shape[1]):
                logits, _, state = model.step(state, target[:, place])
                torch.testing.assert_close(logits, expected[:, place], atol=close, rtol=close)


def test_shards_of_an_index_are_one_model(tmp_path: Path) -> None:
    theirs = MARIAN.build()
    whole, parts = save(theirs, tmp_path / "whole"), save(theirs, tmp_path / "parts", max_shard_size="4KB")
    assert len(list(parts.glob("*.safetensors"))) > 1
    one, many = (from_huggingface(folder).model.state_dict() for folder in (whole, parts))
    assert one.keys() == many.keys()
    assert all(torch.equal(one[name], many[name]) for name in one)


@pytest.mark.parametrize("name", ["bart", "t5"])  # (Marian rounds its positions too)
def test_weights_of_half_the_size_become_float32(name: str, tmp_path: Path) -> None:
    theirs = TRANSLATORS[name].build().bfloat16()
    ours = from_huggingface(save(theirs, tmp_path)).model
    assert {parameter.dtype for parameter in ours.parameters()} == {torch.float32}
    source, target, _ = inputs()
    with torch.no_grad():
        expected = theirs.float()(input_ids=source[:1], decoder_input_ids=target[:1]).logits
    torch.testing.assert_close(ours(source[:1], LENGTHS[:1], target[:1]), expected, atol=1e-4, rtol=0)


def test_special_tokens_come_from_either_file(tmp_path: Path) -> None:
    folder = save(MARIAN.build(), tmp_path)
    change(folder / "generation_config.json", bad_words_ids=[[PAD], [5, 6]], eos_token_id=[END, 3])
    assert from_huggingface(folder)[1:] == ("marian", PAD, (END, 3), PAD, (PAD,))
    (folder / "generation_config.json").unlink()
    assert from_huggingface(folder)[1:] == ("marian", PAD, (END,), PAD, ())


# -- folders that are not what they should be ------------------------------------------------------------


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_what_is_wrong_with_a_folder_is_one_clear_line(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    theirs = MARIAN.build()

    def refused(spoil: Callable[[Path], object], *words: str) -> None:
        folder = save(theirs, tmp_path / f"{words[0][:9]}{len(list(tmp_path.iterdir()))}")
        spoil(folder)
        with pytest.raises(RunFolderError) as error:
            from_huggingface(folder)
        line = str(error.value)
        assert str(folder) in line
        assert all(word in line for word in words), line
        assert "\n" not in line

    def tensors(edit: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
        def spoil(folder: Path) -> None:
            loaded = load_file(folder / "model.safetensors")
            edit(loaded)
            save_file(loaded, folder / "model.safetensors")

        return spoil

    def cut(folder: Path) -> None:
        content = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(content[: len(content) // 2])

    refused(cut, "model.safetensors", "cannot be read")
    refused(lambda f: (f / "model.safetensors").unlink(), "no model.safetensors")
    refused(lambda f: (f / "config.json").unlink(), "no config.json")
    refused(lambda f: (f / "config.json").write_text('{"model_type": "mar'), "not whole JSON")
    refused(lambda f: (f / "config.json").write_text("[]"), "a JSON list")
    refused(lambda f: change(f / "config.json", model_type="deberta"), "'deberta'", "marian")
    refused(lambda f: change(f / "config.json", model_type="t5"), "no num")
    refused(lambda f: change(f / "config.json", d_model="12"), "d_model must be a int, got '12'")
    refused(lambda f: change(f / "config.json", activation_function="mish"), "'mish'", "swish")
    refused(lambda f: change(f / "config.json", decoder_layers=4), "no tensor decoder.layers.3")
    refused(lambda f: change(f / "config.json", decoder_layers=2), "does not account for", "decoder.layers.2")
    refused(lambda f: change(f / "config.json", encoder_ffn_dim=20), "(19, 12)", "(20, 12)")
    refused(tensors(lambda t: t.pop("model.encoder.layers.0.fc1.bias")), "encoder.0.feed_forward.up.bias is absent")
    refused(tensors(lambda t: t.update(more=torch.ones(1))), "does not account for", "more")


def test_no_folder_and_shards_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="not a folder"):
        from_huggingface(tmp_path / "nowhere")
    folder = save(MARIAN.build(), tmp_path / "parts", max_shard_size="4KB")
    next(folder.glob("*.safetensors")).unlink()
    with pytest.raises(RunFolderError, match="cannot be read"):
        from_huggingface(folder)
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(RunFolderError, match="no weight_map"):
        from_huggingface(folder)


@pytest.mark.filterwarnings("always:.*, a pickle:UserWarning")
def test_tensors_of_torch_are_read_and_code_is_not_run(tmp_path: Path) -> None:
    folder = save(MARIAN.build(), tmp_path / "marian")
    from safetensors.torch import load_file

    before = from_huggingface(folder).model.state_dict()
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    with pytest.warns(UserWarning, match=r"weights_only=True\) reads it and runs no code"):
        after = from_huggingface(folder).model.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    for wrong, message in (({"a": Path("x")}, "names pathlib"), ([1], "holds a list"), ({"a": 1}, "holds int for 'a'")):
        torch.save(wrong, folder / "pytorch_model.bin")
        with pytest.warns(UserWarning, match="a pickle"), pytest.raises(RunFolderError, match=message):
            from_huggingface(folder)
    for content in (b"", b"x" * 99, b"PK\x03\x04"):
        (folder / "pytorch_model.bin").write_bytes(content)
        with pytest.warns(UserWarning, match="a pickle"), pytest.raises(RunFolderError, match="not a whole file"):
            from_huggingface(folder)
