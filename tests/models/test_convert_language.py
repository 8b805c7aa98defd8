"""Decoders of Hugging Face, with each scaling of rotary positions, against themselves."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from regard.errors import RunFolderError
from regard.models.convert import Pretrained, from_huggingface
from regard.tasks.training.output_loss import output_cross_entropy
from tests import by_day
from tests.models.foreign_models import END, GPT2, LANGUAGE_MODELS, MODERN_DECODERS, VOCAB, Foreign, llama, save

LENGTH = 15


@pytest.fixture(scope="module", params=LANGUAGE_MODELS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Pretrained]:
    """A model of theirs, and ours from its folder."""
    theirs = LANGUAGE_MODELS[request.param].build()
    return theirs, from_huggingface(save(theirs, tmp_path_factory.mktemp("model")))


@pytest.mark.parametrize("length", by_day([LENGTH], [5, LENGTH]))
def test_logits_and_attention_are_theirs(pair: tuple[Any, Pretrained], length: int) -> None:
    theirs, ours = pair
    tokens = torch.randint(2, VOCAB, (2, length))
    with torch.no_grad():
        seen = theirs(tokens, output_attentions=True, use_cache=False)
        found, maps = ours.model(tokens), ours.model.attend(tokens)
    assert seen.logits.std() > 0.3
    torch.testing.assert_close(found, seen.logits, atol=1e-4, rtol=0)
    assert list(maps) == [f"decoder.{number}" for number in range(len(seen.attentions))]
    for weights, expected in zip(maps.values(), seen.attentions, strict=True):
        torch.testing.assert_close(weights.dense(), expected, atol=1e-5, rtol=0)


def greedily(model: Any, prompt: Tensor, steps: int) -> list[int]:
    """The most probable tokens after a prompt, with the cache."""
    state, tokens = model.start(prompt[None, :-1], torch.tensor([len(prompt) - 1])), [prompt[-1:]]
    for _ in range(steps):
        logits, _, state = model.step(state, tokens[-1])
        tokens.append(logits.argmax(-1))
    return torch.cat(tokens[1:]).tolist()


def test_greedy_decoding_is_generate(pair: tuple[Any, Pretrained]) -> None:
    theirs, ours = pair
    for length in (1, 4, 9):
        prompt = torch.randint(2, VOCAB, (length,))
        # Past 8 or 12 tokens some scalings turn keys anew; both leave those in the cache as they are.
        expected = theirs.generate(prompt[None], max_new_tokens=10, num_beams=1, do_sample=False)[0, length:].tolist()
        found = greedily(ours.model, prompt, 10)
        assert found[: len(expected)] == expected
        assert len(expected) == 10 or expected[-1] == END


def test_cached_decoding_is_uncached(pair: tuple[Any, Pretrained]) -> None:
    theirs, ours = pair
    if theirs.config.to_dict().get("rope_parameters", {}).get("rope_type") in ("dynamic", "longrope"):
        length = 8  # beyond, the angles depend on the length at hand
    else:
        length = LENGTH
    tokens = torch.randint(2, VOCAB, (2, length))
    with torch.no_grad():
        expected, state = ours.model(tokens), ours.model.start(tokens[:, :2], torch.tensor([2, 2]))
        for place in range(2, length):
            logits, _, state = ours.model.step(state, tokens[:, place])
            torch.testing.assert_close(logits, expected[:, place], atol=1e-5, rtol=1e-5)


def test_padded_prompts_are_read_as_each_alone(pair: tuple[Any, Pretrained]) -> None:
    """To their right stands padding, and after some steps the first tokens have left every window."""
    theirs, ours = pair
    if theirs.config.to_dict().get("rope_parameters", {}).get("rope_type") in ("dynamic", "longrope"):
        pytest.skip("the angles of a batch depend on its longest sequence")
    prompts, lengths, new = torch.randint(2, VOCAB, (3, 6)), [6, 1, 3], torch.randint(2, VOCAB, (5, 3))
    with torch.no_grad():
        state, logits = ours.model.start(prompts, torch.tensor(lengths)), []
        for tokens in new:
            found, _, state = ours.model.step(state, tokens)
            logits.append(found)
        for row, length in enumerate(lengths):
            alone = theirs(torch.cat([prompts[row, :length], new[:, row]])[None], use_cache=False).logits[0, length:]
            torch.testing.assert_close(torch.stack(logits)[:, row], alone, atol=1e-4, rtol=0)


def test_a_loss_of_capped_logits_is_theirs(tmp_path: Path) -> None:
    theirs, tokens = MODERN_DECODERS["gemma2"].build(), torch.randint(2, VOCAB, (2, 9))
    ours = from_huggingface(save(theirs, tmp_path)).model
    loss = partial(output_cross_entropy, targets=tokens[:, 1:], ignore_index=-100)
    total, count = ours(tokens[:, :-1], loss=loss)
    torch.testing.assert_close(total / count, theirs(tokens, labels=tokens).loss, atol=1e-5, rtol=1e-5)


def test_special_tokens(tmp_path: Path) -> None:
    assert from_huggingface(save(llama().build(), tmp_path))[1:] == ("llama", 2, (END,), 0, ())


def test_older_folders_are_read(tmp_path: Path) -> None:
    """Llama's rope_theta and rope_scaling, GPT-2 without a prefix and with its masks."""
    theirs = LANGUAGE_MODELS["llama3"].build()
    new, old = save(theirs, tmp_path / "new"), save(theirs, tmp_path / "old")
    config = json.loads((old / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"], config["rope_scaling"] = rope.pop("rope_theta"), {**rope, "type": rope["rope_type"]}
    (old / "config.json").write_text(json.dumps(config))
    tokens = torch.randint(2, VOCAB, (1, LENGTH))
    assert torch.equal(*(from_huggingface(folder).model(tokens) for folder in (new, old)))
    for name, base in (
        ("gemma3", {"rope_theta": 999.0, "rope_local_base_freq": 77.0}),
        ("olmo3", {"rope_theta": 99.0}),
    ):
        full = {"rope_type": "linear", "factor": 8.0, "rope_theta": base["rope_theta"]}
        sliding = {"rope_type": "default", "rope_theta": base.get("rope_local_base_freq", base["rope_theta"])}
        rotations = {"full_attention": full, "sliding_attention": sliding}
        theirs = replace(
            MODERN_DECODERS[name], settings=MODERN_DECODERS[name].settings | {"rope_parameters": rotations}
        )
        new, old = save(theirs.build(), tmp_path / name), save(theirs.build(), tmp_path / f"old {name}")
        config = json.loads((old / "config.json").read_text())
        del config["rope_parameters"], config["layer_types"]
        config |= base | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
        (old / "config.json").write_text(json.dumps(config))
        assert torch.equal(*(from_huggingface(folder).model(tokens) for folder in (new, old)))
    theirs = GPT2.build()
    new, old = save(theirs, tmp_path / "gpt2"), save(theirs, tmp_path / "older")
    tensors = {n.removeprefix("transformer."): t for n, t in load_file(old / "model.safetensors").items()}
    save_file(tensors | {"h.0.attn.bias": torch.ones(1, 1, 4, 4)}, old / "model.safetensors")
    assert torch.equal(*(from_huggingface(folder).model(tokens) for folder in (new, old)))


def test_variants_that_are_not_read_are_named(tmp_path: Path) -> None:
    def refused(name: str, theirs: Any, message: str, **values: Any) -> None:
        path = save(theirs.build(), tmp_path / name) / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))
        with pytest.raises(RunFolderError, match=message):
            from_huggingface(tmp_path / name)

    mixed = {"layer_types": ["full_attention", "linear_attention"] * 2}
    refused("mixed", MODERN_DECODERS["qwen3"], "layer 1 is of the kind 'linear_attention'", **mixed)
    both = {"use_bidirectional_attention": True}
    refused("both", MODERN_DECODERS["gemma3"], "no decoder with use_bidirectional_attention", **both)
    quantized = {"quantization_config": {"quant_method": "mxfp4"}}
    refused("mxfp4", MODERN_DECODERS["gpt_oss"], r"quantized \('mxfp4'\).*dequantize them", **quantized)
    refused("scaled", GPT2, "scale_attn_by_inverse_layer_idx", scale_attn_by_inverse_layer_idx=True)
    refused("rope", llama(), "'proportional'.*llama3", rope_parameters={"rope_type": "proportional"})
    refused("factor", llama(), "no factor", rope_parameters={"rope_type": "linear"})
    for number, bad in enumerate((True, "linear", 8.0, ["linear"])):
        for name in ("rope_parameters", "rope_scaling"):
            others: dict[str, Any] = {"rope_parameters": None, name: bad}
            refused(f"{name}{number}", llama(), rf"config\.json: {name} must be a dict, got", **others)
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8}
    refused(
        "attention",
        llama(),
        "attention_factor must be a float, got True",
        rope_parameters=yarn | {"attention_factor": True},
    )
    long = {"rope_type": "longrope", "factor": 2.0, "original_max_position_embeddings": 8, "long_factor": [1.0] * 8}
    refused(
        "list",
        llama(),
        r"short_factor\[1\] must be a float, got '2'",
        rope_parameters=long | {"short_factor": [1, "2"]},
    )
    refused("number", llama(), "short_factor must be a list, got 1", rope_parameters=long | {"short_factor": 1})


def test_the_text_part_of_a_model_of_images_is_read(tmp_path: Path) -> None:
    """Also from a config.json without the sizes that Gemma's own folders leave out, under both of its prefixes."""
    text = {**MODERN_DECODERS["gemma3"].settings, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
    sight = {"hidden_size": 12, "intermediate_size": 9, "num_hidden_layers": 1, "num_attention_heads": 2}
    sight |= {"image_size": 8, "patch_size": 4}
    config = {"text_config": text, "vision_config": sight, "mm_tokens_per_image": 4, "image_token_index": 30}
    theirs = Foreign("Gemma3ForConditionalGeneration", "Gemma3Config", config).build()
    folder, tokens = save(theirs, tmp_path), torch.randint(2, 30, (2, 9))
    path = folder / "config.json"
    values = json.loads(path.read_text())
    for name in ("num_attention_heads", "num_key_value_heads", "head_dim"):
        del values["text_config"][name]
    path.write_text(json.dumps(values))
    with torch.no_grad():
        expected = theirs(input_ids=tokens, token_type_ids=torch.zeros_like(tokens)).logits
    for _ in range(2):
        read = from_huggingface(folder)
        torch.testing.assert_close(read.model(tokens), expected, atol=1e-4, rtol=0)
        assert read[1:] == ("gemma3", 2, (END,), 0, ())
        tensors = load_file(folder / "model.safetensors")
        newer = {n.replace("language_model.model.", "model.language_model."): t for n, t in tensors.items()}
        save_file(newer, folder / "model.safetensors")
