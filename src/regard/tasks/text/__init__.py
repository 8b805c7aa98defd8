"""Text: tokenizers, parallel text, tokens on disk, batches, and the built-in corpus of dates."""

from typing import TYPE_CHECKING

from regard.lazy import on_demand

if TYPE_CHECKING:
    from regard.tasks.text.batches import Batch as Batch
    from regard.tasks.text.batches import collate as collate
    from regard.tasks.text.batches import plan_batches as plan_batches
    from regard.tasks.text.codec import Codec as Codec
    from regard.tasks.text.codec import Label as Label
    from regard.tasks.text.codec import Marks as Marks
    from regard.tasks.text.lines import Reader as Reader
    from regard.tasks.text.lines import read_lines as read_lines
    from regard.tasks.text.pair_store import TokenStore as TokenStore
    from regard.tasks.text.pairs import Pair as Pair
    from regard.tasks.text.pairs import read_pairs as read_pairs
    from regard.tasks.text.tokenizer_recipes import ByteLevelBPE as ByteLevelBPE
    from regard.tasks.text.tokenizer_recipes import Characters as Characters
    from regard.tasks.text.tokenizer_recipes import Words as Words
    from regard.tasks.text.tokenizer_recipes import recipe as recipe
    from regard.tasks.text.tokenizers import Tokenizer as Tokenizer
    from regard.tasks.text.unicode import normalise as normalise
else:
    __getattr__, __dir__, __all__ = on_demand(__name__)
