"""When each token of a text is said: cross-attention of a speech model and dynamic time warping, as in Whisper."""

import logging
from typing import Any

import torch
from torch import Tensor

import regard
from benchmarks.consumers.frame import Report, measure
from benchmarks.harness import Run
from regard.maps import align

TITLE = "Consumers: words in time"
LAYERS, HEADS, WIDTH, FRAMES_PER_TOKEN = 2, 8, 256, 8
ALIGNMENT_HEADS = ((0, 1), (0, 5), (1, 2), (1, 3))


def setting(length: int, implementation: str) -> tuple[torch.nn.Module, dict[str, Tensor]]:
    """A speech model with so many frames of the encoder, and a text of an eighth of that."""
    import transformers

    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.manual_seed(0)
    kind: Any = transformers.WhisperForConditionalGeneration
    tokens = length // FRAMES_PER_TOKEN
    config = transformers.WhisperConfig(
        vocab_size=200, d_model=WIDTH, encoder_layers=LAYERS, decoder_layers=LAYERS, encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS, encoder_ffn_dim=4 * WIDTH, decoder_ffn_dim=4 * WIDTH, num_mel_bins=16,
        max_source_positions=length, max_target_positions=tokens, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1,
    )  # fmt: skip
    model = kind._from_config(config, attn_implementation=implementation).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    batch = {"input_features": torch.randn(1, 16, 2 * length), "decoder_input_ids": torch.randint(3, 200, (1, tokens))}
    return model, batch


def eager(length: int) -> Run:
    from transformers.models.whisper import generation_whisper

    warping: Any = generation_whisper._dynamic_time_warping
    smoothed: Any = generation_whisper._median_filter
    model, batch = setting(length, "eager")

    @torch.no_grad()
    def run() -> Tensor:
        maps = model(**batch, output_attentions=True, use_cache=False).cross_attentions
        weights = torch.stack([maps[layer][0, head] for layer, head in ALIGNMENT_HEADS])
        deviation, mean = torch.std_mean(weights, dim=-2, keepdim=True, unbiased=False)
        scores = smoothed((weights - mean) / deviation, 7).mean(0)
        queries, keys = warping(-scores.double().numpy())
        begins = torch.ones(len(queries), dtype=torch.bool)
        begins[1:] = torch.from_numpy(queries[1:] > queries[:-1])
        return torch.from_numpy(keys.copy())[begins]

    return run


def ours(length: int) -> Run:
    model, batch = setting(length, "sdpa")
    wanted = sorted({f"model.decoder.layers.{layer}.encoder_attn" for layer, _ in ALIGNMENT_HEADS})

    @torch.no_grad()
    def run() -> Tensor:
        with regard.watch(model, wanted) as seen:
            model(**batch, use_cache=False)
        heads: list[Any] = [
            seen[f"model.decoder.layers.{layer}.encoder_attn"][0, head] for layer, head in ALIGNMENT_HEADS
        ]
        return align.dtw(torch.stack(heads)).first

    return run


def run() -> Report:
    return measure(
        __name__,
        note=f"A random speech model of {LAYERS} + {LAYERS} layers, T frames and T / {FRAMES_PER_TOKEN} tokens: one "
        "forward pass and the alignment of all tokens. The eager side is transformers' own filter and warping; the "
        "difference is in frames.",
    )
