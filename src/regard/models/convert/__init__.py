"""Hugging Face folders as readable models of this package.

    pretrained = from_huggingface("opus-mt-en-de")
    pretrained.model.attend(source, source_lengths, target_input)

config.json names the family, and model.safetensors (or the shards of its index) holds the tensors. Pickled weights are
never loaded, and no code of the folder is run.
"""

import reprlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from regard.errors import ArgumentError, RunFolderError, ShapeError
from regard.models.convert.bart import bart, blenderbot, marian, pegasus
from regard.models.convert.bert import BERT, ROBERTA, bert
from regard.models.convert.decoders import DECODERS, decoder, gemma3
from regard.models.convert.folder import Settings, read_object, read_settings, read_tensors
from regard.models.convert.gpt2 import gpt2
from regard.models.convert.t5 import t5
from regard.models.convert.vit import DINOV2, DINOV2_REGISTERS, VIT, vision
from regard.models.convert.weights import Weights

ReadFamily = Callable[[Settings, Weights], nn.Module]


class Family(NamedTuple):
    """A family of models that is read."""

    read: ReadFamily
    becomes: str
    """The class of `regard.models` it becomes."""
    parts: str
    """Its parts, for docs/convert.md."""


FAMILIES: dict[str, Family] = {
    "marian": Family(
        marian,
        "Transformer",
        "post-norm; sinusoidal positions, sines first; a bias per token on the logits; one, two or three embedding "
        "matrices",
    ),
    "bart": Family(
        bart, "Transformer", "post-norm; learned positions; the embeddings normalised; a bias per token on the logits"
    ),
    "pegasus": Family(pegasus, "Transformer", "Marian with the norm before each sublayer"),
    "blenderbot": Family(blenderbot, "Transformer", "learned positions, the norm before each sublayer"),
    "t5": Family(
        t5,
        "Transformer",
        "RMSNorm before each sublayer; no biases; scores not scaled; one relative bias for all layers of a stack; "
        "plain feed-forward, or gated (version 1.1)",
    ),
    "gpt2": Family(gpt2, "DecoderOnly", "LayerNorm before each sublayer, learned positions, GELU by tanh; tied or not"),
    **{name: Family(partial(decoder, family), "DecoderOnly", family.parts) for name, family in DECODERS.items()},
    "gemma3": Family(gemma3, "DecoderOnly", "the text part of a Gemma 3 that reads images too"),
    "bert": Family(
        partial(bert, BERT),
        "EncoderOnly",
        "post-norm, learned positions, segments, the head for masked tokens if the folder has it",
    ),
    "roberta": Family(partial(bert, ROBERTA), "EncoderOnly", "BERT, whose positions count from the padding token on"),
    "xlm-roberta": Family(partial(bert, ROBERTA), "EncoderOnly", "RoBERTa of many languages"),
    "vit": Family(
        partial(vision, VIT),
        "EncoderOnly",
        "patches of an image and a token of the class, LayerNorm before each sublayer, the classes if the folder has "
        "them",
    ),
    "dinov2": Family(partial(vision, DINOV2), "EncoderOnly", "ViT with LayerScale; plain feed-forward, or gated"),
    "dinov2_with_registers": Family(
        partial(vision, DINOV2_REGISTERS), "EncoderOnly", "DINOv2 with tokens that are no patch"
    ),
}
"""From the `model_type` of config.json."""


class Pretrained(NamedTuple):
    """A pretrained model, with the meaning of its special tokens."""

    model: Any
    """In evaluation mode, float32: a `Transformer`, a `DecoderOnly` or an `EncoderOnly`."""
    family: str
    """The `model_type` of config.json."""
    begin_id: int | None
    """The first token of a target, or of a generated text."""
    end_ids: tuple[int, ...]
    """The tokens that end a text."""
    pad_id: int | None
    banned_ids: tuple[int, ...]
    """Tokens that must never be generated."""


def from_huggingface(folder: Path | str) -> Pretrained:
    """Read a model folder of Hugging Face's `save_pretrained`.

    Args:
        folder: has config.json and model.safetensors, or model.safetensors.index.json and its shards.

    Raises:
        RunFolderError: the folder is foreign or truncated, its family or variant is not supported, its weights are
            pickled, or its tensors do not fit its configuration.
        MissingExtraError: safetensors is not installed.
    """
    settings = read_settings(Path(folder))
    folder = settings.source.parent
    family = settings.values.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise RunFolderError(f"{settings.source}: model_type is {reprlib.repr(family)}; regard reads {known}")
    if quantized := settings.part("quantization_config"):
        raise RunFolderError(
            f"{settings.source}: the weights are quantized ({quantized.get('quant_method')!r:.80}), and regard reads "
            "none of that: have transformers dequantize them, and save them in bfloat16"
        )
    weights = Weights(read_tensors(folder), folder)
    try:
        model = FAMILIES[family].read(settings, weights)
    except (ArgumentError, ShapeError, ArithmeticError, RuntimeError) as error:
        # Impossible sizes, such as 0 heads, or more elements than torch can count.
        raise RunFolderError(
            f"{settings.source} is the configuration of no model: {str(error).splitlines()[0]}"
        ) from error
    return Pretrained(model.eval(), family, *_tokens(folder, settings, len(weights.ours["output.weight"])))


def _tokens(
    folder: Path, settings: Settings, vocab_size: int
) -> tuple[int | None, tuple[int, ...], int | None, tuple[int, ...]]:
    path = folder / "generation_config.json"
    values = {**settings.part("text_config"), **settings.values} | (
        {name: value for name, value in read_object(path).items() if value is not None} if path.is_file() else {}
    )

    def tokens(name: str, found: object) -> tuple[int, ...]:
        for token in (listed := found if isinstance(found, list) else [] if found is None else [found]):
            if type(token) is not int or not 0 <= token < vocab_size:
                raise RunFolderError(
                    f"{folder}: {name} must name tokens from 0 to {vocab_size - 1}, got {reprlib.repr(token)}"
                )
        return tuple(listed)

    def token(name: str) -> int | None:
        found = values.get(name)
        # Old Llama folders have -1 for no such token.
        return next(iter(tokens(name, None if found == -1 else found)), None)

    banned = values.get("bad_words_ids") or []
    words = [word for word in banned if isinstance(word, list)] if isinstance(banned, list) else []
    begin, pad = token("decoder_start_token_id"), token("pad_token_id")
    if begin is None:
        # T5 begins with its padding token; a decoder-only model with its begin token.
        begin = pad if settings.values.get("is_encoder_decoder") else token("bos_token_id")
    ends = tokens("eos_token_id", values.get("eos_token_id"))
    return begin, ends, pad, tuple(tokens("bad_words_ids", [word[0] for word in words if len(word) == 1]))
