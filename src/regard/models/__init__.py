"""Models built from `regard.nn`: the encoder-decoder Transformer, the encoder alone, and the recurrent model."""

from regard.models.encoder import TransformerEncoder as TransformerEncoder
from regard.models.parts import EncoderParts as EncoderParts
from regard.models.parts import StackParts as StackParts
from regard.models.parts import TransformerParts as TransformerParts
from regard.models.protocol import Seq2Seq as Seq2Seq
from regard.models.protocol import Step as Step
from regard.models.rnn import RNNConfig as RNNConfig
from regard.models.rnn import RNNSeq2Seq as RNNSeq2Seq
from regard.models.transformer import Transformer as Transformer
from regard.models.transformer import TransformerConfig as TransformerConfig

__all__ = [
    "EncoderParts",
    "RNNConfig",
    "RNNSeq2Seq",
    "Seq2Seq",
    "StackParts",
    "Step",
    "Transformer",
    "TransformerConfig",
    "TransformerEncoder",
    "TransformerParts",
]
