"""Ten families of Hugging Face with random small configurations: the maps against the model's own eager weights."""

from dataclasses import replace
from typing import Any

import torch
from hypothesis import note
from torch import Tensor

import regard
from regard.errors import RegardError
from tests.fuzz.drawing import Drawn
from tests.inspection.huggingface_families import FAMILIES, Family

NAMES = ("gpt2", "llama", "mistral", "gemma2", "bert", "bloom", "falcon", "deberta-v2", "gpt-neo", "gpt-j")
VARIED: dict[str, list[Any]] = {
    "num_hidden_layers": [2, 1], "num_attention_heads": [4, 2], "num_key_value_heads": [2, 1], "n_layer": [2, 1],
    "n_head": [4, 2], "num_heads": [4, 2], "sliding_window": [4, 3, 7, 8], "attn_logit_softcapping": [2.0, None],
    "alibi": [False, True], "relative_attention": [True, False], "pos_att_type": [["p2c", "c2p"], ["c2p"], []],
}  # fmt: skip
"""Settings that a family may have in other values too."""


def check_family(drawn: Drawn) -> None:
    name = drawn.of(NAMES)
    own = FAMILIES[name]
    settings = {n: drawn.of(VARIED[n]) if n in VARIED else value for n, value in own.settings.items()}
    family = replace(own, settings=settings)
    length, pad = drawn.number(2, 12), drawn.of(["none", "left", "right"])
    note(f"{name} {settings}, {length} tokens, padding {pad}")
    ids = drawn.integers(3, 40, 2, length)
    mask = torch.ones_like(ids)
    if pad != "none":
        cut = drawn.number(1, length - 1)
        mask[1, slice(0, cut) if pad == "left" else slice(length - cut, None)] = 0

    model = family.build()
    with torch.no_grad():
        reported = family.build("eager")(ids, attention_mask=mask, output_attentions=True)
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
    if "LM" in family.model:
        _check_generation(drawn, family, ids, mask, settings)


def _check_generation(drawn: Drawn, family: Family, ids: Tensor, mask: Tensor, settings: dict[str, Any]) -> None:
    """`joined` against the weights of one pass over all tokens, or a refusal with a reason."""
    model, new = family.build(), drawn.number(1, 6)
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
        eager = family.build("eager")(during[:, :-1], output_attentions=True).attentions
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
