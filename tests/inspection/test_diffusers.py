"""Tiny Transformers of diffusers, of images and videos: maps by step and word, bits, the order of joint attention."""

from typing import Any

import pytest
import torch
from torch import nn

import regard
from tests.modules import same_bits, watching

diffusers = pytest.importorskip("diffusers")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
SIZE: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "num_layers": 2}
WORDS, IMAGE, STEP = torch.randn(1, 5, 12), torch.randn(1, 4, 8, 8), torch.tensor([3])
JOINT: dict[str, Any] = {"joint_attention_dim": 12, "pooled_projection_dim": 10}
POOLED = {"encoder_hidden_states": WORDS, "pooled_projections": torch.randn(1, 10)}


def made(name: str) -> tuple[nn.Module, dict[str, Any], int | None]:
    """A model, its inputs, and where the keys of words begin; None if there are none."""
    given: dict[str, Any] = {"hidden_states": IMAGE, "timestep": STEP}
    if name == "DiT":
        model = diffusers.DiTTransformer2DModel(**SIZE, sample_size=8, num_embeds_ada_norm=10, norm_num_groups=1)
        return model, given | {"class_labels": torch.tensor([1])}, None
    if name == "SD3":
        model = diffusers.SD3Transformer2DModel(
            **SIZE, **JOINT, sample_size=8, caption_projection_dim=16, pos_embed_max_size=8, out_channels=4
        )
        return model, given | POOLED, 16
    model = diffusers.FluxTransformer2DModel(
        **SIZE, **JOINT, patch_size=1, num_single_layers=1, axes_dims_rope=(2, 2, 4)
    )
    places = {"img_ids": torch.randn(16, 3), "txt_ids": torch.zeros(5, 3)}
    return model, given | POOLED | places | {"hidden_states": IMAGE.reshape(1, 16, 16)[..., :4]}, 0


@pytest.mark.parametrize("name", ["DiT", "SD3", "Flux"])
def test_every_attention_has_a_map_and_words_have_their_places(name: str) -> None:
    torch.manual_seed(0)
    model, given, begin = made(name)
    model.eval()
    seen = same_bits(model, **given)
    with torch.no_grad():
        assert not seen.report().missed
        assert len(seen) == (3 if name == "Flux" else 2)
        assert max(call.error for call in seen.calls) < 1e-6
        if begin is None:
            assert [one.shape for one in seen.maps] == [(1, 2, 16, 16)] * 2
            return
        # In the first layer a word's vector changes its own scores alone: all other keys keep their ratios.
        other = WORDS.clone()
        other[0, 2] += 3.0
        changed = watching(model)(**given | {"encoder_hidden_states": other})
    words, patch = (slice(16, 21), 0) if begin else (slice(5), 5)
    first, last = (watched.maps[0][0, 0].dense()[patch : patch + 16] for watched in (seen, changed))
    ratios = (last / first)[:, words] / (last / first)[:, patch, None]
    assert (ratios - 1).abs().amax(0).gt(1e-4).tolist() == [n == 2 for n in range(5)]


FRAMES, PLACES = 3, 48
"""(3 frames of 4 x 4 patches)"""
VIDEOS: dict[str, tuple[dict[str, Any], dict[str, Any], list[tuple[int, int]]]] = {
    "CogVideoXTransformer3DModel": (
        {"num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4, "time_embed_dim": 8,
         "text_embed_dim": 12, "sample_width": 8, "sample_height": 8, "sample_frames": 9, "patch_size": 2,
         "temporal_compression_ratio": 4, "max_text_seq_length": 5},
        {"hidden_states": torch.randn(1, FRAMES, 4, 8, 8)}, [(53, 53)],
    ),
    "WanTransformer3DModel": (
        {"patch_size": (1, 2, 2), "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4,
         "out_channels": 4, "text_dim": 12, "freq_dim": 16, "ffn_dim": 32, "rope_max_seq_len": 32},
        {"hidden_states": torch.randn(1, 4, FRAMES, 8, 8)}, [(PLACES, PLACES), (PLACES, 5)],
    ),
    "LTXVideoTransformer3DModel": (
        {"in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 8,
         "cross_attention_dim": 16, "caption_channels": 12},
        {"hidden_states": torch.randn(1, PLACES, 4), "encoder_attention_mask": torch.ones(1, 5).bool(),
         "num_frames": FRAMES, "height": 4, "width": 4}, [(PLACES, PLACES), (PLACES, 5)],
    ),
}  # fmt: skip


HUNYUAN: dict[str, Any] = {
    "in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 10, "num_single_layers": 1,
    "num_refiner_layers": 1, "patch_size": 1, "text_embed_dim": 16, "pooled_projection_dim": 8,
    "rope_axes_dim": (2, 4, 4),
}  # fmt: skip
HUNYUAN_GIVEN: dict[str, Any] = {
    "hidden_states": torch.randn(1, 4, FRAMES, 4, 4), "encoder_attention_mask": torch.ones(1, 5),
    "pooled_projections": torch.randn(1, 8), "guidance": torch.tensor([100.0]),
}  # fmt: skip


@pytest.mark.parametrize("name", VIDEOS)
def test_attention_from_places_of_a_video_to_words(name: str) -> None:
    torch.manual_seed(0)
    sizes, given, shapes = VIDEOS[name]
    model = getattr(diffusers, name)(**sizes, num_layers=1).eval()
    given = given | {"encoder_hidden_states": WORDS, "timestep": STEP}
    seen = same_bits(model, **given)
    assert not seen.report().missed
    assert max(call.error for call in seen.calls) < 1e-6
    assert [one.shape[-2:] for one in seen.maps] == shapes
    assert [call.crosses for call in seen.calls] == [False, True][: len(shapes)]


@pytest.mark.parametrize(
    ("name", "first"), [("CogVideoXTransformer3DModel", 0), ("HunyuanVideoTransformer3DModel", 48)]
)
def test_the_places_of_words_beside_those_of_a_video(name: str, first: int) -> None:
    torch.manual_seed(0)
    sizes, given, _ = VIDEOS.get(name, (HUNYUAN, HUNYUAN_GIVEN, []))
    model = getattr(diffusers, name)(**sizes, num_layers=1).eval()
    words = torch.randn(1, 5, sizes["text_embed_dim"])
    maps = []
    for moved in (0.0, 3.0):
        other = words.clone()
        other[0, 2] += moved
        seen = watching(model, "transformer_blocks.0.*")(**given, encoder_hidden_states=other, timestep=STEP)
        maps.append(seen.maps[0][0, 0].dense())
    patch = 48 if first == 0 else 0
    row, ratios = slice(5, 53) if first == 0 else slice(48), maps[1] / maps[0]
    changed = (ratios[row] / ratios[row, patch, None] - 1).abs().amax(0).gt(1e-4)
    expected = [first + 2] if first == 0 else list(range(first, first + 5))  # (a refiner mixes the words before)
    assert changed.nonzero().flatten().tolist() == expected


@pytest.mark.parametrize("size", [1, 3])
def test_slices_of_sequences_and_heads_are_named_as_such(size: int) -> None:
    """And a slice has no dimension of heads, so that no mean over heads is advised."""
    from diffusers.models.attention_processor import Attention, SlicedAttnProcessor

    attention = Attention(16, cross_attention_dim=12, heads=5, dim_head=8).eval()
    attention.set_processor(SlicedAttnProcessor(size))  # type: ignore[arg-type]
    model = nn.ModuleDict({"attn2": attention})
    x, words = torch.randn(2, 6, 16), torch.randn(2, 5, 12)
    seen = same_bits(attention, x, of=model, encoder_hidden_states=words)
    report = str(seen.report())
    assert f"a slice: {size} of the 10 (sequence x head) maps of its module, 2 sequences of 5 heads" in report
    with pytest.raises(regard.errors.ShapeError, match=rf"needs to know the heads .*: a slice: {size} of the 10"):
        seen.maps[0].average()
