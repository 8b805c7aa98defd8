"""The effect of each token of a target on the words before and behind it."""

from typing import NamedTuple

import torch
from torch import Tensor

from regard.tasks.text.codec import Codec
from regard.tasks.text.words import is_spaced, lengthens


class TokenKinds(NamedTuple):
    """The tensors (V,) of the same names of `regard.tasks.generation.whole_words.WholeWords`."""

    begins: Tensor
    lengthens: Tensor
    closes: Tensor

    @classmethod
    def of(cls, codec: Codec, size: int) -> "TokenKinds":
        (anchor,) = codec.encode_batch(["a"])
        base = len(codec.decode(anchor))
        pieces = [codec.decode([*anchor, token])[base:] for token in range(min(len(codec), size))]
        pieces += [""] * (size - len(pieces))
        # U+FFFD is a part of a character, which may be a letter.
        first = torch.tensor([lengthens(piece) or piece.startswith("\ufffd") for piece in pieces])
        last = torch.tensor([is_spaced(f"a{piece}") or piece.endswith("\ufffd") for piece in pieces])
        prints = torch.tensor([bool(piece) for piece in pieces])
        begins = prints & ~first
        begins[codec.marks.end_id] = True
        return cls(begins, first, prints & ~last)
