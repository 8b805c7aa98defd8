"""Models built from `regard.nn`: Transformers of one stack and of two, the recurrent model, and named sizes of them."""

from regard.models.decoder_only import DecoderOnly as DecoderOnly
from regard.models.decoder_only import DecoderOnlyConfig as DecoderOnlyConfig
from regard.models.encoder_only import EncoderOnly as EncoderOnly
from regard.models.encoder_only import EncoderOnlyConfig as EncoderOnlyConfig
from regard.models.protocol import Seq2Seq as Seq2Seq
from regard.models.protocol import Step as Step
from regard.models.rnn import RNNConfig as RNNConfig
from regard.models.rnn import RNNSeq2Seq as RNNSeq2Seq
from regard.models.sizes import DECODER_ONLY_SIZES as DECODER_ONLY_SIZES
from regard.models.sizes import ENCODER_ONLY_SIZES as ENCODER_ONLY_SIZES
from regard.models.sizes import TRANSFORMER_SIZES as TRANSFORMER_SIZES
from regard.models.transformer import Transformer as Transformer
from regard.models.transformer import TransformerConfig as TransformerConfig

__all__ = [
    "DECODER_ONLY_SIZES",
    "ENCODER_ONLY_SIZES",
    "TRANSFORMER_SIZES",
    "DecoderOnly",
    "DecoderOnlyConfig",
    "EncoderOnly",
    "EncoderOnlyConfig",
    "RNNConfig",
    "RNNSeq2Seq",
    "Seq2Seq",
    "Step",
    "Transformer",
    "TransformerConfig",
]
