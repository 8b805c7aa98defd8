"""Models built from `regard.nn`: the encoder-decoder Transformer and the recurrent model."""

from regard.models.protocol import Seq2Seq as Seq2Seq
from regard.models.protocol import Step as Step
from regard.models.rnn import RNNConfig as RNNConfig
from regard.models.rnn import RNNSeq2Seq as RNNSeq2Seq
from regard.models.transformer import Transformer as Transformer
from regard.models.transformer import TransformerConfig as TransformerConfig

__all__ = ["RNNConfig", "RNNSeq2Seq", "Seq2Seq", "Step", "Transformer", "TransformerConfig"]
