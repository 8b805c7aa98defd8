"""Hugging Face models at tiny size, saved as their library saves them: what `regard.models.convert` reads."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

VOCAB, PAD, END = 37, 0, 1


@dataclass(frozen=True)
class Foreign:
    """How to build a model of theirs."""

    model: str
    config: str
    settings: dict[str, Any] = field(default_factory=dict)

    def build(self) -> Any:
        """In evaluation mode, every tensor away from its initial value, so that none goes unseen."""
        import transformers

        config = getattr(transformers, self.config)(**self.settings)
        torch.manual_seed(3)
        plain = {"attn_implementation": "eager", "experts_implementation": "eager"}  # their products want wide experts
        model = getattr(transformers, self.model)._from_config(config, **plain).eval()
        with torch.no_grad():
            for name, tensor in model.state_dict().items():
                if "embed_positions" not in name or self.config in ("BartConfig", "BlenderbotConfig"):
                    tensor.add_(0.3 * torch.randn_like(tensor))
        return model


def save(model: Any, folder: Path, **how: Any) -> Path:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder, **how)
    return folder


BART_LIKE: dict[str, Any] = {
    "vocab_size": VOCAB, "d_model": 12, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 3,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 19, "decoder_ffn_dim": 17, "max_position_embeddings": 29,
    "pad_token_id": PAD, "eos_token_id": END, "bos_token_id": None, "decoder_start_token_id": PAD,
    "forced_eos_token_id": None,
}  # fmt: skip
T5_LIKE: dict[str, Any] = {
    "vocab_size": VOCAB, "d_model": 12, "d_kv": 5, "d_ff": 19, "num_layers": 2, "num_decoder_layers": 3,
    "num_heads": 2, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 13,
    "pad_token_id": PAD, "eos_token_id": END, "decoder_start_token_id": PAD,
}  # fmt: skip
SEPARATE: dict[str, Any] = {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": VOCAB + 4}

MARIAN = Foreign(
    "MarianMTModel", "MarianConfig", {**BART_LIKE, "activation_function": "swish", "scale_embedding": True}
)
TRANSLATORS = {
    "marian": MARIAN,
    "marian, two vocabularies": Foreign("MarianMTModel", "MarianConfig", {**BART_LIKE, **SEPARATE}),
    "marian, three matrices": Foreign(
        "MarianMTModel", "MarianConfig", {**BART_LIKE, **SEPARATE, "tie_word_embeddings": False}
    ),
    "bart": Foreign("BartForConditionalGeneration", "BartConfig", BART_LIKE),
    "bart, scaled": Foreign(
        "BartForConditionalGeneration", "BartConfig",
        {**BART_LIKE, "scale_embedding": True, "activation_function": "relu"},
    ),
    "pegasus": Foreign(
        "PegasusForConditionalGeneration", "PegasusConfig", {**BART_LIKE, "scale_embedding": True}
    ),
    "pegasus, three matrices": Foreign(
        "PegasusForConditionalGeneration", "PegasusConfig", {**BART_LIKE, "tie_word_embeddings": False}
    ),
    "blenderbot": Foreign("BlenderbotForConditionalGeneration", "BlenderbotConfig", BART_LIKE),
    "t5": Foreign("T5ForConditionalGeneration", "T5Config", T5_LIKE),
    "t5, version 1.1": Foreign(
        "T5ForConditionalGeneration", "T5Config",
        # T5 does not scale its scores: with a factor of 1 the last digits of float32 decide some rows of this model.
        {**T5_LIKE, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "initializer_factor": 0.45},
    ),
}  # fmt: skip

BERT_LIKE = {
    "vocab_size": VOCAB, "hidden_size": 12, "intermediate_size": 19, "num_hidden_layers": 2, "num_attention_heads": 3,
    "max_position_embeddings": 29, "pad_token_id": PAD,
}  # fmt: skip
BERT = Foreign("BertForMaskedLM", "BertConfig", BERT_LIKE)


ENCODERS = {
    "bert": BERT,
    "roberta": Foreign("RobertaForMaskedLM", "RobertaConfig", {**BERT_LIKE, "pad_token_id": 1, "type_vocab_size": 1}),
    "xlm-roberta": Foreign(
        "XLMRobertaForMaskedLM", "XLMRobertaConfig", {**BERT_LIKE, "pad_token_id": 1, "type_vocab_size": 1}
    ),
}
BERT_BASE = Foreign("BertModel", "BertConfig", BERT_LIKE)

GPT2_LIKE: dict[str, Any] = {
    "vocab_size": VOCAB, "n_embd": 12, "n_layer": 2, "n_head": 3, "n_inner": 19, "n_positions": 32,
    "bos_token_id": END, "eos_token_id": END, "pad_token_id": PAD,
}  # fmt: skip
LLAMA_LIKE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 19, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 12, "bos_token_id": 2, "eos_token_id": END,
    "pad_token_id": PAD,
}  # fmt: skip
GPT2 = Foreign("GPT2LMHeadModel", "GPT2Config", GPT2_LIKE)


def llama(**more: Any) -> Foreign:
    return Foreign("LlamaForCausalLM", "LlamaConfig", {**LLAMA_LIKE, **more})


def rope(kind: str, **values: Any) -> Foreign:
    """Sequences of the tests are longer than 8: what was trained on, as far as these say."""
    return llama(rope_parameters={"rope_type": kind, "rope_theta": 500.0, **values})


DEEPSEEK: dict[str, Any] = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "n_shared_experts": 2,
    "moe_intermediate_size": 9, "first_k_dense_replace": 1, "kv_lora_rank": 6, "q_lora_rank": 7, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6, "v_head_dim": 3, "head_dim": 4, "num_key_value_heads": 4, "sliding_window": None,
}  # fmt: skip


def modern(kind: str, **more: Any) -> Foreign:
    """A decoder of a family with four layers, whose window is shorter than the sequences of the tests."""
    many = {**LLAMA_LIKE, "num_hidden_layers": 4, "sliding_window": 4, "max_position_embeddings": 32, **more}
    return Foreign(f"{kind}ForCausalLM", f"{kind.removesuffix('Text')}{'Text' if kind == 'Gemma3' else ''}Config", many)


MODERN_DECODERS = {
    "mistral": modern("Mistral"),
    "mistral, no window": modern("Mistral", sliding_window=None),
    "qwen2": modern("Qwen2", use_sliding_window=True, max_window_layers=2),
    "qwen2, no window": modern("Qwen2"),
    "qwen3": modern("Qwen3", tie_word_embeddings=True),
    "gemma2": modern("Gemma2", query_pre_attn_scalar=9, attn_logit_softcapping=3.0, final_logit_softcapping=5.0),
    "gemma3": modern(
        "Gemma3", query_pre_attn_scalar=9, num_hidden_layers=6, attn_logit_softcapping=3.0, final_logit_softcapping=5.0
    ),
    "gemma3, scaled": modern(
        "Gemma3", layer_types=["full_attention", "sliding_attention"] * 2,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 999.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 77.0},
        },
    ),
    "olmo2": modern("Olmo2", sliding_window=None),
    "olmo3": modern("Olmo3"),
    "phi3": modern("Phi3", partial_rotary_factor=0.5),
    "glm4": modern("Glm4", sliding_window=None, attention_bias=True),
    "smollm3": modern("SmolLM3"),
    "mixtral": modern("Mixtral", num_local_experts=4),
    "qwen3_moe": modern("Qwen3Moe", num_experts=4, num_experts_per_tok=3, moe_intermediate_size=9, mlp_only_layers=[1]),
    "qwen3_moe, normalised": modern("Qwen3Moe", num_experts=4, num_experts_per_tok=3, norm_topk_prob=True),
    "gpt_oss": modern("GptOss", num_local_experts=4, num_experts_per_tok=2),
    "deepseek_v2": modern("DeepseekV2", **{**DEEPSEEK, "q_lora_rank": None}),
    "deepseek_v2, groups": modern(
        "DeepseekV2", **DEEPSEEK, topk_method="group_limited_greedy", routed_scaling_factor=3.0
    ),
    "deepseek_v3": modern("DeepseekV3", **DEEPSEEK),
    "deepseek_v3, halves": modern("DeepseekV3", **DEEPSEEK, rope_interleave=False),
    "deepseek_v3, biases": modern("DeepseekV3", **DEEPSEEK, attention_bias=True),
    "deepseek_v2, biases": modern("DeepseekV2", **{**DEEPSEEK, "q_lora_rank": None}, attention_bias=True),
    "deepseek_v3, scaled": modern(
        "DeepseekV3", **DEEPSEEK,
        rope_parameters={
            "rope_type": "yarn", "factor": 8.0, "mscale": 0.9, "mscale_all_dim": 0.7, "rope_theta": 999.0,
            "original_max_position_embeddings": 4,
        },
    ),
    "smollm3, window": modern("SmolLM3", use_sliding_window=True, no_rope_layers=[1, 0, 1, 0]),
}  # fmt: skip
LANGUAGE_MODELS = {
    **MODERN_DECODERS,
    "gpt2": GPT2,
    "gpt2, not scaled": Foreign("GPT2LMHeadModel", "GPT2Config", {**GPT2_LIKE, "scale_attn_weights": False}),
    "gpt2, untied": Foreign("GPT2LMHeadModel", "GPT2Config", {**GPT2_LIKE, "tie_word_embeddings": False}),
    "llama": llama(),
    "llama, tied": llama(tie_word_embeddings=True),
    "llama, biases": llama(attention_bias=True, mlp_bias=True, hidden_act="gelu"),
    "linear": rope("linear", factor=3.0),
    "dynamic": rope("dynamic", factor=3.0),
    "yarn": rope(
        "yarn", factor=4.0, original_max_position_embeddings=8, beta_fast=0.9, beta_slow=0.05, truncate=False
    ),
    "llama3": rope(
        "llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8
    ),
    "longrope": rope(
        "longrope", short_factor=[1.0, 1.1, 1.3, 1.5], long_factor=[1.0, 2.0, 3.0, 5.0], factor=4.0,
        original_max_position_embeddings=8,
    ),
}  # fmt: skip
