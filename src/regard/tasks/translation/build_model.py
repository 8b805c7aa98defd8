"""The model of a translator, made as its settings describe it."""

from regard.models.config import RNNConfig, TransformerConfig
from regard.models.rnn import RNNSeq2Seq
from regard.models.transformer import Transformer
from regard.tasks.generation.downloaded import Downloaded

Model = Transformer | RNNSeq2Seq | Downloaded


def build_model(
    sizes: TransformerConfig | RNNConfig, *, source_vocab_size: int, target_vocab_size: int
) -> Transformer | RNNSeq2Seq:
    if isinstance(sizes, RNNConfig):
        return RNNSeq2Seq(sizes, source_vocab_size=source_vocab_size, target_vocab_size=target_vocab_size)
    return Transformer(sizes, source_vocab_size=source_vocab_size, target_vocab_size=target_vocab_size)
