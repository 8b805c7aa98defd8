"""The effect of each token of a target on the words before and behind it."""

from typing import NamedTuple

import torch
from torch import Tensor

from regard.tasks.text.codec import Codec
from regard.tasks.translation.terms import is_letter


class TokenKinds(NamedTuple):
    """The tensors (V,) of the same names of `regard.tasks.generation.whole_words.WholeWords`."""

    begins: Tensor
    lengthens: Tensor
    closes: Tensor

    @classmethod
    def of(cls, codec: Codec, size: int) -> "TokenKinds":
        """Those of a tokenizer, for a model that knows `size` tokens."""
        (anchor,) = codec.encode_batch(["a"])
        base = len(codec.decode(anchor))
        pieces = [codec.decode([*anchor, token])[base:] for token in range(min(len(codec), size))]
        pieces += [""] * (size - len(pieces))
        first, last = (torch.tensor([_is_in_word(piece, at) for piece in pieces]) for at in (0, -1))
        prints = torch.tensor([bool(piece) for piece in pieces])
        begins = prints & ~first
        begins[codec.marks.end_id] = True
        return cls(begins, first, prints & ~last)


def _is_in_word(piece: str, at: int) -> bool:
    # U+FFFD is a part of a character, which may be a letter.
    return bool(piece) and (is_letter(piece[at]) or piece[at] == "\ufffd")
