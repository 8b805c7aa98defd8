"""What the rules of `shrink.py` and `feed.py` get wrong, by architecture."""

from typing import Any

import torch

from tests.families.feed import Feed

ROTATED = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
HALF_ROTATED = {**ROTATED, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
BOTH_ROTATED = {"rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), ROTATED)}
RESNET = {
    "_only": True, "model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1],
    "layer_type": "basic", "out_indices": [1, 2, 3, 4],
}  # fmt: skip
BY_RESNET = {"backbone_config": RESNET, "backbone": None}
FORECAST = {"prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2], "num_time_features": 1}
SECTIONS = {"text_config": {"rope_parameters": ROTATED}}
HEAD = {"head_dim": 16}

BY_RT_RESNET = {
    "backbone_config": {"_only": True, "model_type": "rt_detr_resnet", "out_indices": [2, 3, 4]},
    "decoder_in_channels": [64, 64, 64], "num_queries": 10,
}  # fmt: skip
SAM = {"vision_config": {"output_channels": 64, "num_pos_feats": 32}}

SETTINGS: dict[str, dict[str, Any]] = {
    "align": {"projection_dim": 640},
    "autoformer": {**FORECAST, "label_length": 4, "moving_average": 3},
    "bamba": {"attn_layer_indices": [1], "num_hidden_layers": 2},
    "chameleon": {"vocabulary_map": {"<image>": 100, "IMGIMGA": 101}},
    "cohere_compass": {"text_config": BOTH_ROTATED},
    "cohere_compass_text": BOTH_ROTATED,
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8}},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "depth_anything": {
        "backbone_config": {"out_indices": [1, 2], "num_hidden_layers": 2, "reshape_hidden_states": False,
                            "apply_layernorm": True},
        "neck_hidden_sizes": [8, 8], "reassemble_factors": [4, 2], "head_hidden_size": 8, "fusion_hidden_size": 8,
    },
    "diffusion_gemma": {"text_config": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "esm": {"vocab_size": 100, "pad_token_id": 1, "mask_token_id": 32},
    "falcon_h1": {"mamba_d_ssm": 128},
    "fastspeech2_conformer_with_hifigan": {"vocoder_config": {"model_in_dim": 80}},
    "glm4v_moe_text": {"rope_parameters": HALF_ROTATED},
    "glm4v_moe": {"text_config": {"rope_parameters": HALF_ROTATED}},
    "glm5_next": {"text_config": {"index_topk": 16}},
    "glm5_next_text": {"index_topk": 16},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "grounding-dino": {"backbone_config": {"_only": True, **{k: v for k, v in RESNET.items() if k != "_only"}},
                       "num_queries": 10},
    "hiera": {"image_size": [64, 64], "embed_dim": 16, "depths": [1, 1, 1, 1]},
    "hunyuan_v1_dense": HEAD,
    "hunyuan_v1_moe": {**HEAD, "num_experts": 4, "moe_topk": 2},
    "informer": {**FORECAST},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "layoutlmv3": {"coordinate_size": 8, "shape_size": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lilt": {"hidden_size": 48},
    "longcat_flash": {"qk_head_dim": 32},
    "mamba2": {"head_dim": 32, "n_groups": 1},
    "ministral": HEAD,
    "mistral4": {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "mm-grounding-dino": {"backbone_config": RESNET, "num_queries": 10},
    "mobilebert": {"hidden_size": 64, "intra_bottleneck_size": 32, "true_hidden_size": 32, "embedding_size": 32},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "nemotron": {"num_key_value_heads": 2, **HEAD},
    "perceiver": {"d_latents": 64, "num_latents": 8, "num_self_attends_per_block": 2},
    "reformer": {"axial_pos_shape": [8, 8], "axial_pos_embds_dim": [32, 32], "num_buckets": 2,
                 "local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4},
    "swinv2": {"pretrained_window_sizes": [0, 0, 0, 0]},
    "time_series_transformer": FORECAST,
    "blip-2": {"image_token_index": 100},
    "instructblip": {"image_token_index": 100},
    **dict.fromkeys(("rt_detr", "rt_detr_v2"), BY_RT_RESNET),
    "mask2former": {"backbone_config": RESNET},
    "oneformer": {"backbone_config": RESNET},
    "levit": {"image_size": 224, "hidden_sizes": [128, 256, 384], "num_attention_heads": [4, 8, 12]},
    "qwen2_5_vl": {**SECTIONS, "vision_config": {"window_size": 112}},
    "qwen2_5_vl_vision": {"window_size": 112},
    "qwen2_5_omni_thinker": {**SECTIONS, "vision_config": {"window_size": 112}},
    "exaone4_5_vision": {"window_size": 112},
    "recurrent_gemma": {"num_hidden_layers": 3, "attention_window_size": 4},
    "sam": SAM,
    "sam_hq": SAM,
    "shieldgemma2": {"mm_tokens_per_image": 4, "yes_token_index": 5, "no_token_index": 6},
    "xmod": {"default_language": "en_XX"},
    **dict.fromkeys(("conditional_detr", "dab-detr", "deformable_detr", "detr", "table-transformer"), BY_RESNET),
    **dict.fromkeys(("glm4v", "glm46v", "glmga", "glm_image", "glm_ocr", "qwen2_vl"), SECTIONS),
    **{f"{key}_text": {"rope_parameters": ROTATED}
       for key in ("glm4v", "glm_image", "glm_ocr", "qwen2_vl", "qwen2_5_vl")},
}  # fmt: skip

PAST = {
    "past_values": lambda f: f.normal(2, 10), "past_time_features": lambda f: f.normal(2, 10, 1),
    "past_observed_mask": torch.ones(2, 10), "future_values": lambda f: f.normal(2, 4),
    "future_time_features": lambda f: f.normal(2, 4, 1),
}  # fmt: skip
PATCHES = {
    "pixel_values": lambda f: f.normal(2, 16, 768), "pixel_attention_mask": torch.ones(2, 16, dtype=torch.long),
    "spatial_shapes": torch.tensor([[4, 4]] * 2),
}  # fmt: skip

INPUTS: dict[str, dict[str, Any]] = {
    "audio-spectrogram-transformer": {"input_values": lambda f: f.normal(2, 1024, 128)},
    "decision_transformer": {
        "states": lambda f: f.normal(2, 5, f.config.state_dim), "actions": lambda f: f.normal(2, 5, f.config.act_dim),
        "rewards": lambda f: f.normal(2, 5, 1), "returns_to_go": lambda f: f.normal(2, 5, 1),
        "timesteps": torch.arange(5).repeat(2, 1), "input_ids": None, "attention_mask": None,
    },
    "dia": {"decoder_input_ids": lambda f: torch.randint(3, 90, (2, 7, 9), generator=f.random)},
    "gemma3n_audio": {"audio_mel": lambda f: f.normal(2, 48, 128),
                      "audio_mel_mask": torch.zeros(2, 48, dtype=torch.bool)},
    "instructblip": {"qformer_input_ids": lambda f: f.tokens(6)},
    "lxmert": {"visual_feats": lambda f: f.normal(2, 5, f.config.visual_feat_dim),
               "visual_pos": lambda f: f.normal(2, 5, 4)},
    "oneformer": {"task_inputs": lambda f: f.normal(2, 77)},
    "patchtst": {"past_values": lambda f: f.normal(2, f.config.context_length, f.config.num_input_channels)},
    "patchtsmixer": {"past_values": lambda f: f.normal(2, f.config.context_length, f.config.num_input_channels)},
    "perceiver": {"inputs": lambda f: f.normal(2, 9, f.config.d_model)},
    "pix2struct": {"flattened_patches": lambda f: f.normal(2, 9, 66).abs(), "decoder_input_ids": lambda f: f.tokens(7)},
    **dict.fromkeys(("time_series_transformer", "informer", "autoformer"), PAST),
    **{key: {"pixel_values": Feed.video} for key in ("timesformer", "vivit", "videomae", "xclip")},
    "speecht5": {"input_values": lambda f: f.normal(2, 9, 64), "decoder_input_values": lambda f: f.normal(2, 7, 64)},
    "siglip2": PATCHES,
    "siglip2_vision_model": PATCHES,
    "idefics": {"pixel_values": lambda f: f.normal(2, 1, 3, *f.size()),
                "image_attention_mask": torch.ones(2, 11, 1, dtype=torch.long)},
    "kyutai_speech_to_text": {
        "input_ids": lambda f: torch.randint(3, 90, (2, 11, f.config.num_codebooks + 1), generator=f.random),
    },
}  # fmt: skip
"""A function makes its input from a `Feed`; None leaves an input out."""
