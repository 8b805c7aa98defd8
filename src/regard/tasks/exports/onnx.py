"""Two graphs for ONNX runtimes: encoder.onnx and decoder.onnx, of any batch and any lengths.

    encoder   source (B, S), source_lengths (B,)                  -> memory (B, S, D)
    decoder   target (B, T), memory (B, S, D), source_lengths (B,) -> logits (B, V) of the token after the last

The decoder has no cache: each step reads the whole target so far again. A target begins with id 1 and ends with id 2.
"""

import copy
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from regard.call.masks.base import Mask
from regard.call.masks.basic import Causal, Lengths
from regard.errors import MissingExtraError
from regard.models.transformer import Transformer
from regard.nn import MultiHeadAttention
from regard.tasks.exports.huggingface import write_tokenizers
from regard.tasks.exports.trained import ExportedRun


class ExplicitAttention(nn.Module):
    """Multi-head attention as products and a softmax. A graph may leave its sizes open."""

    def __init__(self, attention: MultiHeadAttention) -> None:
        super().__init__()
        self.attention = attention

    def forward(
        self, query: Tensor, key: Tensor | None = None, *, mask: Mask, bias: None = None, return_weights: bool = False
    ) -> Tensor:
        """(B, T, D) to (B, T, D)."""
        theirs = self.attention
        if key is None:
            q, k, v = theirs.project_heads(query, 0, 1, 2)
            if theirs.rotary is not None:
                q, k = (theirs.rotary.rotate(heads) for heads in (q, k))
        else:
            (q,), (k, v) = theirs.project_heads(query, 0), theirs.project_heads(key, 1, 2)
        group = theirs.num_heads // theirs.num_kv_heads
        k, v = (heads.repeat_interleave(group, dim=1) if group > 1 else heads for heads in (k, v))
        scores = q @ k.mT * theirs.head_dim**-0.5
        weights = scores.masked_fill(~_allowed(mask, query, k), -torch.inf).softmax(-1)
        return theirs.out((weights @ v).transpose(-3, -2).flatten(-2))


def _allowed(mask: Mask, query: Tensor, key: Tensor) -> Tensor:
    """The two kinds of masks of a Transformer, as tensors that broadcast to (B, H, T, S)."""
    keys = torch.arange(key.shape[-2], device=key.device)
    if isinstance(mask, Lengths):
        return (keys < mask.valid[:, None])[:, None, None, :]
    assert isinstance(mask, Causal)
    return keys <= torch.arange(query.shape[1], device=key.device)[:, None]


class Encoder(nn.Module):
    """The first graph: the encoder."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, source: Tensor, source_lengths: Tensor) -> Tensor:
        """The encoder's output."""
        return self.model.encode(source, source_lengths)


class Decoder(nn.Module):
    """The second graph: the decoder."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, target: Tensor, memory: Tensor, source_lengths: Tensor) -> Tensor:
        """Logits of the token after the last token."""
        return self.model.decode(target, memory, source_lengths)[:, -1]


def to_onnx(trained: ExportedRun, out: Path) -> None:
    """Write encoder.onnx, decoder.onnx and the tokenizers."""
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(error.name or "onnx", extra="export") from None
    model = copy.deepcopy(trained.model)
    _write_out(model)
    batch, source, target = (torch.export.Dim(name) for name in ("batch", "source_length", "target_length"))
    tokens, lengths = torch.randint(4, 5, (2, 7)), torch.tensor([7, 5])
    memory = torch.zeros(2, 7, trained.config.dim)
    _export(
        Encoder(model),
        (tokens, lengths),
        {"source": {0: batch, 1: source}, "source_lengths": {0: batch}},
        "memory",
        out / "encoder.onnx",
    )
    _export(
        Decoder(model),
        (tokens[:, :3], memory, lengths),
        {"target": {0: batch, 1: target}, "memory": {0: batch, 1: source}, "source_lengths": {0: batch}},
        "logits",
        out / "decoder.onnx",
    )
    write_tokenizers(trained, out)


def _write_out(model: Transformer) -> None:
    for layer in (*model.encoder, *model.decoder):
        for name in ("self_attention", "cross_attention"):
            attention = getattr(layer, name, None)
            if isinstance(attention, MultiHeadAttention):
                setattr(layer, name, ExplicitAttention(attention))


def _export(
    module: nn.Module, inputs: tuple[Tensor, ...], dynamic: dict[str, dict[int, object]], output: str, path: Path
) -> None:
    with _quiet():
        torch.onnx.export(
            module.eval(),
            inputs,
            path,
            input_names=list(dynamic),
            output_names=[output],
            dynamic_shapes=dynamic,
            dynamo=True,
            external_data=False,
            verbose=False,
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide the exporter's warnings about its own parts, such as a missing torchvision."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
