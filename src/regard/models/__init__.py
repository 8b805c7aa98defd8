"""Models built from `regard.nn`: Transformers of one stack and of two, the recurrent model, and named sizes of them."""

from typing import TYPE_CHECKING

from regard.lazy import on_demand

if TYPE_CHECKING:
    from regard.models.config import DECODER_ONLY_SIZES as DECODER_ONLY_SIZES
    from regard.models.config import TRANSFORMER_SIZES as TRANSFORMER_SIZES
    from regard.models.config import DecoderOnlyConfig as DecoderOnlyConfig
    from regard.models.config import EncoderOnlyConfig as EncoderOnlyConfig
    from regard.models.config import RNNConfig as RNNConfig
    from regard.models.config import TransformerConfig as TransformerConfig
    from regard.models.kernel_regression import NadarayaWatson as NadarayaWatson
    from regard.models.one_stack import DecoderOnly as DecoderOnly
    from regard.models.one_stack import EncoderOnly as EncoderOnly
    from regard.models.patches import Patches as Patches
    from regard.models.protocol import Seq2Seq as Seq2Seq
    from regard.models.protocol import Step as Step
    from regard.models.rnn import RNNSeq2Seq as RNNSeq2Seq
    from regard.models.transformer import Transformer as Transformer
else:
    __getattr__, __dir__, __all__ = on_demand(__name__)
