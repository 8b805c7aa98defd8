"""Leaks in the middle of models of transformers: hooks that change what one module gets or gives."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.watching.checks.made_up import made_up
from regard.watching.interference import STATES, results_of
from tests.families.architectures import tiny
from tests.leak_bench.leaks import BATCH, DOCUMENTS, FUTURE, LENGTH, PADDING, Change

Hook = Callable[[nn.Module], Any]


def gives(change: Change) -> Hook:
    def changed(_: Any, __: Any, y: Any) -> Any:
        return (change(y[0], {}), *y[1:]) if isinstance(y, tuple) else change(y, {})

    return partial(nn.Module.register_forward_hook, hook=changed)


def gets(change: Callable[[Any, Tensor, Mapping[str, Any]], Mapping[str, Any]]) -> Hook:
    def changed(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, kwargs | change(module, args[0] if args else kwargs["hidden_states"], kwargs)

    return partial(nn.Module.register_forward_pre_hook, hook=changed, with_kwargs=True)


def next_rows(_: Any, x: Tensor, given: Mapping[str, Any]) -> dict[str, Any]:
    causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()[None, None]
    mask = causal if given["attention_mask"] is None else given["attention_mask"]
    return {"attention_mask": torch.cat([mask[..., 1:, :], mask[..., -1:, :]], -2)}


def forgets(module: Any, _: Tensor, given: Mapping[str, Any]) -> dict[str, Any]:
    past = next((given[name] for name in ("past_key_values", "cache_params", "layer_past") if name in given), None)
    for layer in getattr(getattr(past, "self_attention_cache", past), "layers", ())[module.layer_idx :][:1]:
        for kept in (getattr(layer, "values", None), *getattr(layer, "recurrent_states", {}).values()):
            if kept is not None and kept.numel():
                kept[:, :, 0] = 0
    return {}


FORGETS = {"a cache without its oldest value": gets(forgets)}
HIDDEN = {"the mask of the next query": gets(next_rows)} | FORGETS
BESIDE = {name: gives(change) for name, change in BATCH.items()}
BESIDE["a table from the end"] = gives(lambda y, _: y * (1 + torch.arange(y.shape[1]).flip(0)[:, None] / LENGTH))
# (A norm takes off the same number for all features.)
PADS = BESIDE | {
    n: gives(PADDING[n]) for n in PADDING if n not in ("mask upside down", "positions from the padded end")
}
EVEN, ODD = (BESIDE | {name: gives(FUTURE[name]) for name in list(FUTURE)[n::2]} for n in (0, 1))
PACKED = {n: gives(DOCUMENTS[n]) for n in ("state across documents", "convolution across documents")}
PLANTED: Mapping[tuple[str, str], Mapping[str, Mapping[str, Hook]]] = {
    ("llama", "LlamaForCausalLM"): {"model.layers.1.mlp": EVEN | PACKED, "model.layers.1.self_attn": HIDDEN},
    ("mixtral", "MixtralForCausalLM"): {"model.layers.1.mlp": ODD | PACKED, "model.layers.1.self_attn": HIDDEN},
    ("deepseek_v3", "DeepseekV3ForCausalLM"): {"model.layers.1.mlp": EVEN, "model.layers.1.self_attn": HIDDEN},
    ("gemma3_text", "Gemma3ForCausalLM"): {"model.layers.0": ODD, "model.layers.1.self_attn": HIDDEN},
    ("lfm2", "Lfm2ForCausalLM"): {"model.layers.1.feed_forward": EVEN | PACKED},
    ("gpt2", "GPT2LMHeadModel"): {"transformer.h.1.mlp": ODD | PACKED, "transformer.h.1.attn": HIDDEN},
    ("bloom", "BloomForCausalLM"): {"transformer.h.0.mlp": ODD, "transformer.h.1.self_attention": FORGETS},
    ("mamba2", "Mamba2ForCausalLM"): {"backbone.layers.1.mixer": EVEN | FORGETS},
    ("bert", ""): {"encoder.layer.1.intermediate": PADS},
    ("modernbert", ""): {"layers.1.mlp": PADS},
    ("vit", ""): {"layers.1.mlp": {name: BESIDE[name] for name in BATCH}},
    ("bart", "BartForConditionalGeneration"): {
        "model.encoder.layers.1.fc2": PADS, "model.decoder.layers.1.fc2": ODD,
        "model.decoder.layers.1.self_attn": HIDDEN,
    },
    ("t5", "T5ForConditionalGeneration"): {
        "encoder.block.1.layer.1.DenseReluDense": PADS, "decoder.block.1.layer.2.DenseReluDense": EVEN,
        "decoder.block.1.layer.0.SelfAttention": FORGETS,
    },
}  # fmt: skip


class FamilyLeak(NamedTuple):
    family: tuple[str, str]
    path: str
    mechanism: str
    hook: Hook
    causal: bool | None = None
    """Told nothing but the config."""

    def make(self, faulty: bool) -> tuple[nn.Module, None]:
        model = tiny(*self.family)
        if faulty:
            self.hook(model.get_submodule(self.path))
        return model, None

    def differs(self) -> float:
        """Of results over sequences one behind the other, or of a step after them."""
        found = []
        for model in (self.make(True)[0], self.make(False)[0]):
            rows = {n: x if n == "pixel_values" else x[:2].repeat(1, 3) for n, x in made_up(model).batch.items()
                    if n in ("input_ids", "decoder_input_ids", "pixel_values")}  # fmt: skip
            name = list(rows)[-1]
            if output := self.mechanism in FORGETS and model(**rows | {name: rows[name][:, :-1]}):
                rows |= {n: x for n, x in output.items() if n in STATES} | {name: rows[name][:, -1:]}
            found.append(next(iter(results_of(model(**rows)).values())))
        return float((found[0] - found[1]).abs().max())


LEAKS = [FamilyLeak(*one) for family, of in PLANTED.items() for path, hooks in of.items()
         for one in ((family, path, *hook) for hook in hooks.items())]  # fmt: skip
