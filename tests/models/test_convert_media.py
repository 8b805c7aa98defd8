"""Models of images and sounds of Hugging Face, read from their folders, against themselves."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.errors import ArgumentError, RunFolderError, ShapeError
from regard.models.convert import from_huggingface
from tests.models.foreign_models import Foreign, save

VISION: dict[str, Any] = {
    "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 12, "patch_size": 4,
}  # fmt: skip
IMAGES = {
    "vit": Foreign("ViTForImageClassification", "ViTConfig", {**VISION, "intermediate_size": 19, "num_labels": 5}),
    "vit, wide": Foreign(
        "ViTForImageClassification", "ViTConfig",
        {**VISION, "intermediate_size": 19, "image_size": [8, 12], "patch_size": [4, 3], "qkv_bias": False},
    ),
    "dinov2": Foreign("Dinov2Model", "Dinov2Config", VISION),
    "dinov2, gated": Foreign("Dinov2Model", "Dinov2Config", {**VISION, "use_swiglu_ffn": True, "qkv_bias": False}),
    "dinov2_with_registers": Foreign(
        "Dinov2WithRegistersForImageClassification", "Dinov2WithRegistersConfig", {**VISION, "num_register_tokens": 3}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", IMAGES)
def test_vectors_classes_and_attention_are_theirs(tmp_path: Path, name: str) -> None:
    theirs = IMAGES[name].build()
    ours = from_huggingface(save(theirs, tmp_path)).model
    size = IMAGES[name].settings["image_size"]
    image = torch.randn(2, 3, *(size if isinstance(size, list) else (size, size)), dtype=torch.float64)
    base = getattr(theirs, theirs.base_model_prefix, theirs)
    for dtype, close in ((torch.float32, 1e-4), (torch.float64, 1e-6)):
        with torch.no_grad():
            one, other = base.to(dtype), copy.deepcopy(ours).to(dtype)
            seen, maps = one(image.to(dtype), output_attentions=True), other.attend(image.to(dtype))
            found = other.encode(image.to(dtype))
        assert seen.last_hidden_state.std() > 0.3
        torch.testing.assert_close(found, seen.last_hidden_state, atol=close, rtol=0)
        assert len(maps) == len(seen.attentions) == 2
        for weights, expected in zip(maps.values(), seen.attentions, strict=True):
            torch.testing.assert_close(weights.dense(), expected, atol=1e-5, rtol=0)
    if name.startswith("vit"):
        expected = theirs.double()(image).logits
        torch.testing.assert_close(ours.double()(image)[:, 0], expected, atol=1e-6, rtol=0)
    else:
        with pytest.raises(ArgumentError, match="without a head"):
            ours(image.float())


@pytest.mark.parametrize("name", ["vit", "dinov2", "dinov2_with_registers"])
def test_an_image_of_another_size_gets_their_positions(tmp_path: Path, name: str) -> None:
    theirs = IMAGES[name].build()
    ours, image = from_huggingface(save(theirs, tmp_path)).model, torch.randn(1, 3, 8, 23)
    base = getattr(theirs, theirs.base_model_prefix, theirs)
    with torch.no_grad():
        expected = base(image, **({"interpolate_pos_encoding": True} if name == "vit" else {})).last_hidden_state
    torch.testing.assert_close(ours.encode(image), expected, atol=1e-4, rtol=0)
    for wrong in ((1, 1, 12, 12), (1, 3, 3, 12), (3, 12, 12)):
        with pytest.raises(ShapeError, match=r"expected images \(B, 3, at least \(4, 4\)\), got"):
            ours.encode(torch.zeros(wrong))


def test_an_image_of_as_many_patches_in_other_rows(tmp_path: Path) -> None:
    """transformers compares the height with the width alone; ours has the positions of its own rows."""
    ours = from_huggingface(save(IMAGES["vit, wide"].build(), tmp_path)).model.embedding
    wide, tall = ours(torch.zeros(1, 3, 8, 12)), ours(torch.zeros(1, 3, 16, 6))  # 2 x 4 patches, and 4 x 2
    assert wide.shape == tall.shape
    assert not torch.allclose(wide, tall)


def test_settings_of_images_that_are_not_read_are_named(tmp_path: Path) -> None:
    path = save(IMAGES["vit"].build(), tmp_path) / "config.json"
    whole = json.loads(path.read_text())
    for values, message in (
        ({"image_size": "12"}, "image_size must be a whole number or two, got '12'"),
        ({"patch_size": [4, 4, 4]}, "patch_size must be a whole number or two"),
        ({"patch_size": 0}, "patch_height"),
        ({"patch_size": 6}, "should be"),
        ({"num_channels": 1}, "should be"),
        ({"hidden_act": "mish"}, "'mish'"),
    ):
        path.write_text(json.dumps({**whole, **values}))
        with pytest.raises(RunFolderError, match=message):
            from_huggingface(tmp_path)
