"""Hugging Face models at tiny size, with random weights, and their own eager attention as the oracle."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LENGTH = 11
VISION: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
SMALL: dict[str, Any] = {"vocab_size": 61, **VISION}
LLAMA: dict[str, Any] = {**SMALL, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0}


def tokens(padding: str | None = "right", length: int = LENGTH) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    inputs = {"input_ids": torch.randint(3, 61, (2, length), generator=generator)}
    if padding is not None:
        mask = torch.ones(2, length, dtype=torch.long)
        mask[1, slice(-4, None) if padding == "right" else slice(4)] = 0
        inputs["attention_mask"] = mask
    return inputs


def both_sides() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(6)
    return {**tokens(), "decoder_input_ids": torch.randint(3, 61, (2, 7), generator=generator)}


def pixels(size: int = 16) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(7))}


def greedy(steps: int = 5, **settings: Any) -> dict[str, Any]:
    return {"max_new_tokens": steps, "min_new_tokens": steps, "do_sample": False, "pad_token_id": 0, **settings}


@dataclass(frozen=True)
class Family:
    model: str
    settings: dict[str, Any]
    inputs: Callable[[], dict[str, Tensor]] = tokens
    attentions: tuple[str, ...] = ("attentions",)
    how: str = "F.scaled_dot_product_attention"
    implementation: str | None = None
    """None leaves the choice to transformers."""
    first: int = 0
    """The first observed call that the model reports itself,"""
    every: int = 1
    """and how far it is to the next."""

    def build(self, implementation: str | None = None) -> torch.nn.Module:
        """The model in eval mode, the same weights each time."""
        transformers = _transformers()
        implementation = implementation or self.implementation
        kind = getattr(transformers, self.model)
        config = kind.config_class(**self.settings)
        torch.manual_seed(3)
        model = kind._from_config(config, attn_implementation=implementation) if implementation else kind(config)
        for parameter in model.parameters():
            # Random weights of transformers' size make every map nearly uniform, and faults hard to see.
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.15)
        return model.eval()

    def maps_of(self, outputs: Any) -> list[Tensor]:
        """The weights that a model reports, in the order in which a watch sees them."""
        found = [_field(outputs, name) for name in self.attentions]
        if len(found) == 3:
            return [*found[0], *(weights for pair in zip(*found[1:], strict=True) for weights in pair)]
        return [weights for maps in found for weights in maps]

    def eager(self) -> list[Tensor]:
        model = self.build("eager")
        with torch.no_grad():
            return self.maps_of(model(**self.inputs(), output_attentions=True))


def built(model: str, settings: dict[str, Any], implementation: str = "sdpa", seed: int = 0) -> Any:
    kind = getattr(_transformers(), model)
    torch.manual_seed(seed)
    return kind._from_config(kind.config_class(**settings), attn_implementation=implementation).eval()


def _field(outputs: Any, name: str) -> Any:
    for part in name.split("."):
        outputs = getattr(outputs, part)
    return outputs


def _transformers() -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    return transformers


SEQ2SEQ = ("encoder_attentions", "decoder_attentions", "cross_attentions")
BART: dict[str, Any] = {
    "vocab_size": 61, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "dropout": 0.0,
}  # fmt: skip
IMAGES = VISION | {"image_size": 16, "patch_size": 4}
WRITTEN = "the model's own softmax, T x S weights kept"
GPT2 = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
PLACED = SMALL | {"max_position_embeddings": 64}
MARKED = PLACED | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WINDOWED = LLAMA | {"head_dim": 8, "sliding_window": 4}
CAPPED = WINDOWED | {"query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0}
LATENT = SMALL | {
    "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "pad_token_id": 0,
}  # fmt: skip
MODERN = MARKED | {"local_attention": 4, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2}
T5 = {"vocab_size": 61, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
SOUND = BART | {"num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 32}
SWIN = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 4], "window_size": 2}
RELATIVE = PLACED | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "type_vocab_size": 0}
LOCAL = {
    "vocab_size": 61, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "window_size": 4,
    "attention_types": [[["global", "local"], 1]], "max_position_embeddings": 64,
}  # fmt: skip
FALCON = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": False}
BLOOM = {"vocab_size": 61, "hidden_size": 32, "n_layer": 2, "n_head": 4}
XLNET = {"vocab_size": 61, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48}


def spoken() -> dict[str, Tensor]:
    features = torch.randn(2, 8, 20, generator=torch.Generator().manual_seed(1))
    return {"input_features": features, "decoder_input_ids": both_sides()["decoder_input_ids"]}


FAMILIES = {
    "gpt2": Family("GPT2LMHeadModel", GPT2),
    "gpt2, left": Family("GPT2LMHeadModel", GPT2, lambda: tokens("left")),
    "gpt2, whole": Family("GPT2LMHeadModel", GPT2, lambda: tokens(None)),
    "llama": Family("LlamaForCausalLM", LLAMA),
    "mistral": Family("MistralForCausalLM", LLAMA | {"sliding_window": 4}),
    # transformers 4 takes sdpa, which leaves the cap out.
    "gemma2": Family("Gemma2ForCausalLM", CAPPED, how=WRITTEN, implementation="eager"),
    "gpt-oss": Family("GptOssForCausalLM", WINDOWED | {"num_local_experts": 2, "num_experts_per_tok": 1}, how=WRITTEN),
    "deepseek-v3": Family("DeepseekV3ForCausalLM", LATENT),
    "bert": Family("BertModel", PLACED),
    "modernbert": Family("ModernBertModel", MODERN),
    "t5": Family("T5ForConditionalGeneration", T5 | {"decoder_start_token_id": 0}, both_sides, SEQ2SEQ),
    "bart": Family("BartForConditionalGeneration", BART, both_sides, SEQ2SEQ),
    "marian": Family("MarianMTModel", BART | {"forced_eos_token_id": 2}, both_sides, SEQ2SEQ),
    "whisper": Family("WhisperModel", SOUND, spoken, SEQ2SEQ),
    "vit": Family("ViTModel", IMAGES, pixels),
    "clip": Family(
        "CLIPModel",
        {"text_config": MARKED, "vision_config": IMAGES},
        lambda: {**tokens(), **pixels()},
        ("vision_model_output.attentions", "text_model_output.attentions"),
    ),
    "swin": Family("SwinModel", SWIN, pixels, first=1, every=2),
    "deberta-v2": Family("DebertaV2Model", RELATIVE, how=WRITTEN),
    "mpnet": Family("MPNetModel", PLACED, how=WRITTEN),
    "xlnet": Family("XLNetModel", XLNET, how=WRITTEN),
    "gpt-neo": Family("GPTNeoForCausalLM", LOCAL, how=WRITTEN),
    "gpt-j": Family("GPTJForCausalLM", GPT2 | {"rotary_dim": 4, "attn_implementation": "eager"}, how=WRITTEN),
    "bloom": Family("BloomForCausalLM", BLOOM, how=WRITTEN),
    "falcon": Family("FalconForCausalLM", FALCON),
}
IN_BLOCKS = {
    "longformer": Family("LongformerModel", PLACED | {"attention_window": 4, "pad_token_id": 1}),
    "bigbird": Family("BigBirdModel", PLACED | {"block_size": 2, "num_random_blocks": 1}),
}
