"""Text: tokenizers, parallel text, tokens on disk, batches, and the built-in corpus of dates."""

from typing import TYPE_CHECKING

from regard.lazy import on_demand

if TYPE_CHECKING:
    from regard.text.batches import Batch as Batch
    from regard.text.batches import collate as collate
    from regard.text.batches import padding_share as padding_share
    from regard.text.batches import plan_batches as plan_batches
    from regard.text.codec import Codec as Codec
    from regard.text.codec import Marks as Marks
    from regard.text.labels import Label as Label
    from regard.text.lines import Reader as Reader
    from regard.text.lines import read_lines as read_lines
    from regard.text.pair_store import TokenStore as TokenStore
    from regard.text.pairs import Pair as Pair
    from regard.text.pairs import read_pairs as read_pairs
    from regard.text.tokenizers import ByteLevelBPE as ByteLevelBPE
    from regard.text.tokenizers import Characters as Characters
    from regard.text.tokenizers import Tokenizer as Tokenizer
    from regard.text.tokenizers import Words as Words
    from regard.text.tokenizers import recipe as recipe
    from regard.text.unicode import normalise as normalise
else:
    __getattr__, __dir__, __all__ = on_demand(
        __name__,
        {
            "regard.text.batches": ("Batch", "collate", "padding_share", "plan_batches"),
            "regard.text.codec": ("Codec", "Marks"),
            "regard.text.labels": ("Label",),
            "regard.text.lines": ("Reader", "read_lines"),
            "regard.text.pair_store": ("TokenStore",),
            "regard.text.pairs": ("Pair", "read_pairs"),
            "regard.text.tokenizers": ("ByteLevelBPE", "Characters", "Tokenizer", "Words", "recipe"),
            "regard.text.unicode": ("normalise",),
        },
    )
