"""Folders of transformers at tiny size, one for each architecture, with what reads their inputs."""

import warnings
import wave
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.families.architectures import architectures, build, library, tiny_config

DECODERS = (
    "gpt2", "llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3", "gpt_neox", "opt", "bloom",
    "olmo2", "mixtral", "gpt_oss", "smollm3",
)  # fmt: skip
ENCODERS = ("bert", "roberta", "albert", "distilbert", "electra", "deberta-v2", "modernbert", "esm")
PAIRS = ("t5", "bart", "marian", "pegasus")
VISION = ("vit", "dinov2", "beit", "swin", "siglip_vision_model")
AUDIO = ("wav2vec2", "hubert", "whisper")
FRAMES = 50
"""The positions of Whisper's encoder: one second."""


def _library() -> Any:
    with warnings.catch_warnings():  # `library` turns them off, for a process of its own
        transformers = library()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def save_model(key: str, folder: Path) -> Any:
    transformers = _library()
    config = tiny_config(key)
    if key == "whisper":
        config.max_source_positions = FRAMES
    kind = "WhisperForConditionalGeneration" if key == "whisper" else architectures().get(key, "SiglipVisionModel")
    model: Any = build(getattr(transformers, kind), config)
    model.save_pretrained(folder)
    return model


def save_reader(key: str, folder: Path, config: Any) -> None:
    transformers = _library()
    if key in VISION:
        size = {"height": config.image_size, "width": config.image_size}
        transformers.ViTImageProcessorPil(size=size).save_pretrained(folder)
    elif key == "whisper":
        transformers.WhisperFeatureExtractor(config.num_mel_bins, chunk_length=1).save_pretrained(folder)
    elif key in AUDIO:
        transformers.Wav2Vec2FeatureExtractor().save_pretrained(folder)


def _words() -> Any:
    words = Tokenizer(models.WordLevel({"<unk>": 0, "<image>": 100, "a": 1, "cat": 2, "on": 3}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.add_special_tokens(["<image>"])
    return _library().PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")


def save_llava(folder: Path) -> Any:
    transformers, fast = _library(), _words()
    config = tiny_config("llava")
    config.image_token_id = config.image_token_index = 100
    config.vision_config.image_size, config.vision_config.patch_size = 28, 14
    model: Any = build(transformers.LlavaForConditionalGeneration, config)
    model.save_pretrained(folder)
    size = {"height": 28, "width": 28}
    transformers.LlavaProcessor(
        image_processor=transformers.CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size=size),
        tokenizer=fast, patch_size=14, vision_feature_select_strategy="default", image_token="<image>",
        num_additional_image_tokens=1,
    ).save_pretrained(folder)  # fmt: skip
    return model


def save_llava_next(folder: Path) -> Any:
    """A model of tiles of 4 x 4 patches, padded, whose rows have a token at their end."""
    transformers, config = _library(), tiny_config("llava_next")
    config.image_token_id = config.image_token_index = 100
    config.vision_config.image_size, config.vision_config.patch_size = 56, 14
    config.image_grid_pinpoints = [[56, 112], [112, 56], [112, 112]]
    model: Any = build(transformers.LlavaNextForConditionalGeneration, config)
    model.save_pretrained(folder)
    size = {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}}
    transformers.LlavaNextProcessor(
        transformers.LlavaNextImageProcessorPil(**size, image_grid_pinpoints=config.image_grid_pinpoints), _words(),
        patch_size=14, vision_feature_select_strategy="default", num_additional_image_tokens=1,
    ).save_pretrained(folder)  # fmt: skip
    return model


def save_idefics3(folder: Path) -> Any:
    transformers, config = _library(), tiny_config("idefics3")
    config.image_token_id = 100
    model: Any = build(transformers.Idefics3ForConditionalGeneration, config)
    model.save_pretrained(folder)
    images = transformers.Idefics3ImageProcessorPil(size={"longest_edge": 256}, max_image_size={"longest_edge": 128})
    transformers.Idefics3Processor(images, _words(), image_seq_len=4).save_pretrained(folder)
    return model


def save_in_another_order(key: str, folder: Path) -> Path:
    """A model whose positions are as many as its patches (or frames) would be, in another order."""
    transformers, config = _library(), tiny_config(key)
    config.image_size = [32, 32] if key == "yolos" else 32
    config.patch_size, config.num_detection_tokens, config.max_image_length = 8, 10, -1
    if key.startswith("audio"):
        config.patch_size, config.num_mel_bins, config.max_length = 16, 32, 64
        config.frequency_stride = config.time_stride = 16
        transformers.ASTFeatureExtractor(num_mel_bins=32, max_length=64).save_pretrained(folder)
    elif key == "vilt":
        images = transformers.ViltImageProcessorPil(size={"shortest_edge": 32}, size_divisor=8)
        transformers.ViltProcessor(images, _words()).save_pretrained(folder)
    else:
        transformers.ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(folder)
    made: Any = build(transformers.MODEL_MAPPING[type(config)], config)
    made.save_pretrained(folder)
    return folder


OF_BOTH = {"llava": save_llava, "llava_next": save_llava_next, "idefics3": save_idefics3}
"""Models of images and texts."""


def byte_level_tokenizer(folder: Path) -> None:
    own = {piece: n for n, piece in enumerate(["Ġ", "a", "Ġa", "Ċ", "ĉ", "Ã", "©", "b"])}
    backend = Tokenizer(models.BPE(own, [("Ġ", "a")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.Sequence([decoders.ByteLevel()])
    _library().PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(folder)


def metaspace_tokenizer(folder: Path) -> None:
    own = {piece: n for n, piece in enumerate(["<unk>", "▁a", "b", "<0xC3>", "<0xA9>", "<0x0A>", "▁", "a"])}
    backend = Tokenizer(models.BPE(own, [("▁", "a")], unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    _library().PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>").save_pretrained(folder)


def word_piece_tokenizer(folder: Path) -> None:
    own = {piece: n for n, piece in enumerate(["[UNK]", "pro", "##ce", "##ed", "a"])}
    backend = Tokenizer(models.WordPiece(own, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    _library().PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]").save_pretrained(folder)


def write_sound(path: Path, *, rate: int = 22_050, width: int = 2, channels: int = 2, seconds: float = 1.0) -> None:
    """A tone of 440 Hz at half of the largest amplitude."""
    tone = np.sin(2 * np.pi * 440 * np.arange(int(rate * seconds)) / rate) / 2
    top = {1: 127, 2: 2**15 - 1, 3: 2**23 - 1, 4: 2**31 - 1}[width]
    whole = np.round(np.repeat(tone[:, None], channels, 1) * top).astype("<i4") + (128 if width == 1 else 0)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(whole.view(np.uint8).reshape(-1, 4)[:, :width].tobytes())
