"""Ten families of Hugging Face with random small configurations: the maps against the model's own eager weights."""

from typing import Any

import torch
from hypothesis import note
from torch import Tensor

import regard
from regard.errors import RegardError
from tests.fuzz.drawing import Drawn

SMALL = {"vocab_size": 41, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def _decoder(drawn: Drawn, **more: Any) -> dict[str, Any]:
    heads = drawn.of([4, 2])
    return {
        **SMALL, "hidden_size": 16, "num_hidden_layers": drawn.of([2, 1]), "num_attention_heads": heads,
        "num_key_value_heads": drawn.of([heads, 1, 2]), "intermediate_size": 24, "max_position_embeddings": 64,
        "head_dim": 16 // heads, **more,
    }  # fmt: skip


def _encoder(drawn: Drawn, **more: Any) -> dict[str, Any]:
    return {
        **SMALL, "hidden_size": 16, "num_hidden_layers": drawn.of([2, 1]), "num_attention_heads": drawn.of([4, 2]),
        "intermediate_size": 24, "max_position_embeddings": 64, **more,
    }  # fmt: skip


def _gpt2(drawn: Drawn) -> dict[str, Any]:
    return {
        **SMALL, "n_embd": 16, "n_layer": drawn.of([2, 1]), "n_head": drawn.of([4, 2]), "n_positions": 64,
        "scale_attn_by_inverse_layer_idx": drawn.chance(3),
    }  # fmt: skip


def _windowed(drawn: Drawn) -> dict[str, Any]:
    return _decoder(drawn, sliding_window=drawn.of([None, 4, 3, 7]))


def _gemma2(drawn: Drawn) -> dict[str, Any]:
    return _decoder(
        drawn, sliding_window=drawn.of([4, 8]), attn_logit_softcapping=drawn.of([None, 5.0]), query_pre_attn_scalar=16
    )


FAMILIES: dict[str, Any] = {
    "GPT2": ("GPT2LMHeadModel", _gpt2),
    "Llama": ("LlamaForCausalLM", _decoder),
    "Mistral": ("MistralForCausalLM", _windowed),
    "Qwen2": ("Qwen2ForCausalLM", lambda d: {k: v for k, v in _decoder(d).items() if k != "head_dim"}),
    "Gemma2": ("Gemma2ForCausalLM", _gemma2),
    "GPTNeoX": ("GPTNeoXForCausalLM", lambda d: _encoder(d, use_parallel_residual=d.chance())),
    "Bloom": ("BloomForCausalLM", lambda d: {**SMALL, "hidden_size": 16, "n_layer": 2, "n_head": d.of([4, 2])}),
    "Falcon": (
        "FalconForCausalLM",
        lambda d: {
            **SMALL,
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": d.of([4, 2]),
            "alibi": d.chance(),
            "multi_query": d.chance(),
            "new_decoder_architecture": False,
        },
    ),
    "Bert": ("BertModel", _encoder),
    "DebertaV2": (
        "DebertaV2Model",
        lambda d: _encoder(d, relative_attention=d.chance(), pos_att_type=d.of([["p2c", "c2p"], ["c2p"], []])),
    ),
}


def check_family(drawn: Drawn) -> None:
    """A forward pass and, of decoders, a generation."""
    import transformers

    transformers.logging.set_verbosity_error()
    name = drawn.of(sorted(FAMILIES))
    kind, settings_of = FAMILIES[name]
    settings = settings_of(drawn)
    length, pad = drawn.number(2, 12), drawn.of(["none", "left", "right"])
    note(f"{name} {settings}, {length} tokens, padding {pad}")
    ids = drawn.integers(3, 40, 2, length)
    mask = torch.ones_like(ids)
    if pad != "none":
        cut = drawn.number(1, length - 1)
        mask[1, slice(0, cut) if pad == "left" else slice(length - cut, None)] = 0

    def build(how: str | None) -> Any:
        torch.manual_seed(3)
        config = getattr(transformers, f"{name}Config")(**settings)
        model = getattr(transformers, kind)
        made = model._from_config(config, attn_implementation=how) if how else model(config)
        for parameter in made.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.15)
        return made.eval()

    model = build(None)
    with torch.no_grad():
        reported = build("eager")(ids, attention_mask=mask, output_attentions=True)
        eager = reported.attentions
        before = model(ids, attention_mask=mask)[0]
        with regard.watch(model, verify=True) as seen:
            during = model(ids, attention_mask=mask)[0]
    assert torch.equal(before, during), "the model gives other bits while it is watched"
    if settings.get("alibi"):
        errors = [call.error for call in seen.calls]
        assert all(isinstance(error, float) and error < 1e-5 for error in errors), f"rebuilt outputs are off: {errors}"
        return  # the library's own two attentions scale ALiBi differently
    if float((before - reported[0]).detach()[mask.bool()].abs().max()) > 2e-5:
        note("the library's two attentions differ themselves")
        return
    maps = seen.maps
    if len(maps) != len(eager):
        assert seen.report().missed, f"{len(maps)} maps of {len(eager)} attentions, and nobody says so\n{seen.report()}"
        return
    real = mask.bool()
    for n, (found, right) in enumerate(zip(maps, eager, strict=True)):
        dense = found.dense()
        assert dense.shape == right.shape, f"layer {n}: a map {tuple(dense.shape)}, and not {tuple(right.shape)}"
        rows = real[:, None, :, None].expand(right.shape)
        off = float((dense - right)[rows].abs().max())
        assert off < 3e-5, f"layer {n}: off by {off}"
    if "CausalLM" in kind or "LMHead" in kind:
        _check_generation(drawn, build, ids, mask, settings)


def _check_generation(drawn: Drawn, build: Any, ids: Tensor, mask: Tensor, settings: dict[str, Any]) -> None:
    """`joined` against the weights of one pass over all tokens, or a refusal with a reason."""
    model, new = build(None), drawn.number(1, 6)
    options = {
        "max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "use_cache": not drawn.chance(5),
        **drawn.of([{}, {"cache_implementation": "static"}]),
    }  # fmt: skip
    if not options["use_cache"]:
        options.pop("cache_implementation", None)
    ids, mask = ids[:1], mask[:1]
    note(f"generate {options}")
    with torch.no_grad():
        before = model.generate(ids, attention_mask=mask, **options)
        with regard.watch(model) as seen:
            during = model.generate(ids, attention_mask=mask, **options)
        eager = build("eager")(during[:, :-1], output_attentions=True).attentions
    assert torch.equal(before, during), "the model generates other tokens while it is watched"
    for n, name in enumerate(dict.fromkeys(call.name for call in seen.calls)):
        try:
            joined = seen.joined(name)
        except RegardError as error:
            note(f"{name}: joined refuses: {error}")
            continue
        right = eager[n]
        dense = joined.dense()
        if dense.shape[-1] > right.shape[-1]:  # places of a static cache that are not yet filled
            assert (dense[..., right.shape[-1] :] == 0).all(), f"{name}: weight on keys that are not there yet"
            dense = dense[..., : right.shape[-1]]
        assert dense.shape == right.shape, f"{name}: joined is {tuple(dense.shape)}, and not {tuple(right.shape)}"
        off = float((dense - right).abs().max())
        assert off < 3e-5, f"{name}: joined is off by {off}"
