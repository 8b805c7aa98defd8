"""A tiny configuration for any configuration class of transformers, by the names of its fields.

The names are regular: what ends in `hidden_size` is a width, what ends in `layers` a number of layers. What these rules
get wrong stands in `by_hand.py`.
"""

import re
from collections.abc import Callable
from math import gcd
from typing import Any

WIDTH, HEADS, LAYERS, VOCABULARY, POSITIONS = 64, 4, 2, 128, 64
FIRST_SPECIAL = 100
"""Special tokens get ids from here on; what a model is fed lies below."""


def _ratio(values: list[Any], unit: int) -> list[Any]:
    step = gcd(*values)
    return [v // step * unit for v in values]


def _sections(settings: dict[str, Any], head: int, part: float) -> dict[str, Any]:
    """Settings of rotary positions with `mrope_section` as long as half of what is rotated."""
    made = {k: _sections(v, head, v.get("partial_rotary_factor", part)) if isinstance(v, dict) else v
            for k, v in settings.items()}  # fmt: skip
    if isinstance(old := made.get("mrope_section"), list | tuple):
        pairs = int(head * part) // 2
        rest = [pairs // (len(old) + 1) or 1] * (len(old) - 1)
        made["mrope_section"] = [pairs - sum(rest), *rest]
    return made


Rule = Callable[[Any], Any]


def _at_most(limit: int) -> Rule:
    return lambda v: min(v, limit)


def _always(value: Any) -> Rule:
    return lambda v: value


NUMBERS: list[tuple[str, Rule]] = [
    (r"vocab_size(_per_layer_input|s)?$|^n_vocab$|^unpadded_vocab_size$", _at_most(VOCABULARY)),
    (r"max_(source|target)_positions$", _at_most(POSITIONS)),
    (r"(max_position_embeddings|max_seq_len|n_positions|seq_length|max_sequence_length|model_max_length)$",
     _at_most(POSITIONS)),
    (r"^(sliding_window|sliding_window_size|local_attention|attention_window|swa_window_size)$", _at_most(4)),
    (r"^attention_chunk_size$", _at_most(8)),
    # How many layers.
    (r"^(first_k_dense_replace|max_window_layers|moe_layer_start_index|num_dense_layers)$", _at_most(1)),
    (r"^(num_kv_shared_layers|num_nextn_predict_layers|num_mtp_layers)$", _always(0)),
    (r"^(num_feat_extract_layers|num_feature_layers|num_conv_layers|number_of_conv_states)$", lambda v: v),
    (r"(^|_)layers$|^n_layers?$|^depth$|(^|_)depth$|^num_blocks$|layer_num$|num_layers_", _at_most(LAYERS)),
    # Heads and their widths.
    (r"^(rotary_dim|upsample_groups)$", _at_most(WIDTH // HEADS)),
    (r"^(mamba_)?n_groups$", _at_most(2)),
    (r"^mamba_(n|num)_heads$", _always(HEADS)),
    (r"^mamba_(d_head|head_dim)$", _always(2 * WIDTH // HEADS)),
    (r"(num_key_value_heads|num_kv_heads|_kv_heads|num_key_value_groups)$", lambda v: min(v, HEADS)),
    (r"linear_num_(key|value)_heads$", _at_most(HEADS)),
    (r"^(d_head|d_kv|head_dim|.*_head_dim|head_size|attention_head_size|kv_channels|.*head_hidden_dim|dim_head)$",
     _at_most(WIDTH // HEADS)),
    (r"(heads|_head|n_head|num_heads|attention_heads)$", lambda v: v if v < HEADS else HEADS),
    (r"^(q_lora_rank|kv_lora_rank|.*_lora_rank|.*_rank)$", _at_most(16)),
    (r"^(query_pre_attn_scalar)$", _at_most(8)),
    # Experts.
    (r"^(num_experts_per_tok|moe_topk|top_k_experts|num_experts_per_token|moe_k|topk_experts)$", _at_most(2)),
    (r"^(n_group|topk_group|num_expert_group)$", _always(1)),
    (r"(n_routed_experts|num_experts|num_local_experts|moe_num_experts)$", _at_most(4)),
    (r"^index_topk$", _at_most(4)),
    # Widths.
    (r"(intermediate_size|ffn_dim|d_ff|intermediate_dim|mlp_dim|feedforward_dim|ffn_hidden_size|d_inner|n_inner|"
     r"dim_feedforward|linear_units|ffn_embed_dim)$", _at_most(2 * WIDTH)),
    (r"(hidden_size|hidden_dim|d_model|n_embd|embed_dim|embedding_size|hidden_channels|embedding_dim|proj_dim|"
     r"projection_dim|projection_size|output_dim|model_dim|^dim|width|^emb_dim|_dims?|out_hidden_size|"
     r"vision_output_dim|fpn_hidden_size|pooler_output_size|emb_size|word_embed_proj_dim|d_embed)$", _at_most(WIDTH)),
    (r"^window_size$", _at_most(2)),
]  # fmt: skip

PAIRS = (("num_key_value_heads", "num_attention_heads"), ("swa_num_key_value_heads", "swa_num_attention_heads"),
         ("encoder_num_key_value_heads", "encoder_num_attention_heads"),
         ("decoder_num_key_value_heads", "decoder_num_attention_heads"),
         ("cross_num_key_value_heads", "cross_num_attention_heads"))  # fmt: skip
"""Fields that say how many heads share their keys."""

LISTS: list[tuple[str, Rule]] = [
    (r"^depths$|^num_blocks$|^stage_num_blocks$|^blocks_per_stage$|^stage_numb_of_layers$|^num_layers$",
     lambda v: [min(n, 2) for n in v]),
    (r"^(num_heads|num_attention_heads|num_attention_heads_per_stage|encoder_attention_heads)$",
     lambda v: _ratio(v, 1)),
    (r"^(hidden_sizes|encoder_hidden_sizes|embed_dims|neck_hidden_sizes|embed_dim_per_stage|embed_dim)$",
     lambda v: _ratio(v, 8)),
    (r"^(conv_dim|enc_channels)$", lambda v: [min(n, WIDTH) for n in v]),
    (r"^tdnn_dim$", lambda v: [min(n, WIDTH) for n in v]),
]  # fmt: skip

INDICES = re.compile(r"(indexes|indices|_idxs|_indexs?|layer_ids|feature_layers?|out_layers|full_attention_layers|"
                     r"cross_attention_layers|global_attention_blocks|intermediate_layers_indices)$")  # fmt: skip
"""Fields that name layers by their numbers."""

CONVOLUTIONAL = {"hgnet_v2", "rt_detr_resnet", "resnet", "bit", "pp_lcnet", "pp_lcnet_v3", "pp_lcnet_v4",
                 "efficientnet", "align_vision_model"}  # fmt: skip
"""Configurations whose sizes depend on each other, of nets without attention."""

SKIPPED = {"out_features", "stage_names", "id2label", "label2id", "num_labels", "label_names", "quantization_config",
           "return_dict", "dtype", "torch_dtype", "architectures", "model_type", "transformers_version",
           "_name_or_path"}  # fmt: skip


class Shrinking:
    def __init__(self) -> None:
        self._special: dict[str, int] = {}

    def settings(self, default: Any) -> dict[str, Any]:
        if default.model_type in CONVOLUTIONAL:
            return {"image_size": 64} if hasattr(default, "image_size") else {}
        given = {n: v for n, v in default.to_dict().items() if n not in SKIPPED}
        made: dict[str, Any] = {}
        for name in default.sub_configs:
            inner = getattr(default, name, None)
            if inner is not None and hasattr(inner, "to_dict"):
                made[name] = {"model_type": inner.model_type, **self.settings(inner)}
        keep = self._kept_layers(given)
        for name, value in given.items():
            if name in default.sub_configs or value is None or isinstance(value, bool):
                continue
            new = self._one(name, value, keep)
            if new != value:
                made[name] = new
        self._group(given, made)
        self._rotate(given, made)
        return made | self._picture(given)

    def _group(self, given: dict[str, Any], made: dict[str, Any]) -> None:
        """Half as many heads of keys as of queries, where there are fewer by default."""
        for keys, queries in PAIRS:
            if isinstance(given.get(keys), int) and isinstance(given.get(queries), int):
                heads = made.get(queries, given[queries])
                made[keys] = heads if given[keys] == given[queries] else max(1, min(given[keys], heads // 2))

    def _rotate(self, given: dict[str, Any], made: dict[str, Any]) -> None:
        """The three parts of a rotation by time, height and width, as many pairs as a head has."""
        settings = given.get("rope_parameters") or {}
        head = made.get("head_dim", given.get("head_dim")) or WIDTH // HEADS
        for name in ("rope_parameters", "rope_scaling"):
            if isinstance(given.get(name), dict):
                made[name] = _sections(given[name], head, settings.get("partial_rotary_factor", 1.0))

    def _picture(self, given: dict[str, Any]) -> dict[str, Any]:
        """A picture of four by four patches, or large enough for four halvings."""
        name = next((n for n in ("image_size", "pretrain_image_size", "img_size", "resolution") if n in given), "")
        size, patch = given.get(name), given.get("patch_size")
        if isinstance(size, list | tuple) and all(isinstance(n, int) for n in size):
            patches = list(patch) if isinstance(patch, list | tuple) else [patch] * len(size)
            fine = all(isinstance(p, int) and p > 4 for p in patches) and len(patches) == len(size)
            return {name: [4 * p for p in patches] if fine else [64] * len(size)}
        if not isinstance(size, int):
            return {}
        return {name: 4 * patch if isinstance(patch, int) and patch > 4 else min(size, 64)}

    def _kept_layers(self, given: dict[str, Any]) -> tuple[int, list[int]]:
        """How many layers there are by default, and which of them stay: one of each kind, and two at least."""
        kinds = given.get("layer_types") or given.get("layers_block_type") or given.get("attention_layers")
        if not isinstance(kinds, list):
            count = next((given[n] for n in ("num_hidden_layers", "num_layers", "n_layer", "depth")
                          if isinstance(given.get(n), int)), 0)  # fmt: skip
            return count, list(range(min(count, LAYERS)))
        first = sorted({kinds.index(kind) for kind in kinds})
        if len(first) == 1 and len(kinds) > 1:
            first.append(first[0] + 1)
        return len(kinds), first

    def _one(self, name: str, value: Any, keep: tuple[int, list[int]]) -> Any:
        count, kept = keep
        if isinstance(value, dict):
            return value
        if isinstance(value, list | tuple):
            if INDICES.search(name):
                return sorted({min(i, LAYERS - 1) if i >= 0 else i for i in value if isinstance(i, int)})
            numbers = bool(value) and all(isinstance(v, int) and not isinstance(v, bool) and v > 0 for v in value)
            for pattern, rule in LISTS:
                if numbers and re.search(pattern, name):
                    return rule(list(value))
            if count > 2 and len(value) == count:
                return [value[i] for i in kept]
            return value
        if not isinstance(value, int):
            return value
        if re.search(r"(token_id|token_index|tok_id|_id|_index)$", name):
            return self._token(name, value)
        if INDICES.search(name):
            return min(value, LAYERS - 1)
        if name in ("num_hidden_layers", "num_layers", "n_layer", "depth") and count == value:
            return len(kept)
        for pattern, rule in NUMBERS:
            if re.search(pattern, name):
                return rule(value)
        return value

    def _token(self, name: str, value: int) -> int:
        if value < FIRST_SPECIAL:
            return value
        key = re.sub(r"_(id|index)$", "", name)
        return self._special.setdefault(key, FIRST_SPECIAL + len(self._special))


def merged(settings: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Settings with others put in their places, level by level; a dictionary with `_only` in place of the old one."""
    made = dict(settings)
    for name, value in other.items():
        inner = made.get(name)
        if isinstance(value, dict) and "_only" in value:
            made[name] = {k: v for k, v in value.items() if k != "_only"}
        else:
            made[name] = merged(inner, value) if isinstance(value, dict) and isinstance(inner, dict) else value
    return made
