"""Modules: attention, embeddings, feed-forward networks, residual blocks."""

from typing import TYPE_CHECKING

from regard.lazy import on_demand

if TYPE_CHECKING:
    from regard.nn.additive import AdditiveAttention as AdditiveAttention
    from regard.nn.cache import KeyValue as KeyValue
    from regard.nn.cache import RecurrentState as RecurrentState
    from regard.nn.differential import DifferentialAttention as DifferentialAttention
    from regard.nn.embeddings import LearnedPositions as LearnedPositions
    from regard.nn.embeddings import NoPositions as NoPositions
    from regard.nn.embeddings import SinusoidalPositions as SinusoidalPositions
    from regard.nn.embeddings import TokenEmbedding as TokenEmbedding
    from regard.nn.feed_forward import FeedForward as FeedForward
    from regard.nn.feed_forward import GatedFeedForward as GatedFeedForward
    from regard.nn.forget_gate import ForgetGate as ForgetGate
    from regard.nn.head_norms import AcrossHeads as AcrossHeads
    from regard.nn.latent import LatentAttention as LatentAttention
    from regard.nn.multi_head import MultiHeadAttention as MultiHeadAttention
    from regard.nn.recurrent_mixers import GatedDeltaNet as GatedDeltaNet
    from regard.nn.recurrent_mixers import LightningAttention as LightningAttention
    from regard.nn.recurrent_mixers import Mamba2 as Mamba2
    from regard.nn.residual import PostNorm as PostNorm
    from regard.nn.residual import PreNorm as PreNorm
    from regard.nn.residual import SandwichNorm as SandwichNorm
    from regard.nn.short_convolution import ShortConvolution as ShortConvolution
else:
    __getattr__, __dir__, __all__ = on_demand(__name__)
