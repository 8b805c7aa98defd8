"""The model of a translator, made as its settings describe it."""

from regard.models.ensemble import Ensemble
from regard.models.rnn import RNNSeq2Seq
from regard.models.transformer import Transformer
from regard.tasks.translation.config import TranslationConfig

Model = Transformer | RNNSeq2Seq | Ensemble


def make_model(
    config: TranslationConfig, *, source_vocab_size: int, target_vocab_size: int
) -> Transformer | RNNSeq2Seq:
    """The model that the configuration describes, with fresh weights."""
    if config.model == "rnn":
        return RNNSeq2Seq(config.rnn, source_vocab_size=source_vocab_size, target_vocab_size=target_vocab_size)
    return Transformer(config.transformer, source_vocab_size=source_vocab_size, target_vocab_size=target_vocab_size)
