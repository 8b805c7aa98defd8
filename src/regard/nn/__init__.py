"""Modules: attention, embeddings, feed-forward networks, residual blocks."""

from regard.nn.additive import AdditiveAttention as AdditiveAttention
from regard.nn.cache import KeyValue as KeyValue
from regard.nn.dropout import Dropout as Dropout
from regard.nn.embeddings import LearnedPositions as LearnedPositions
from regard.nn.embeddings import NoPositions as NoPositions
from regard.nn.embeddings import RelativeBias as RelativeBias
from regard.nn.embeddings import SinusoidalPositions as SinusoidalPositions
from regard.nn.embeddings import TokenEmbedding as TokenEmbedding
from regard.nn.feed_forward import FeedForward as FeedForward
from regard.nn.feed_forward import GatedFeedForward as GatedFeedForward
from regard.nn.linear import Linear as Linear
from regard.nn.multi_head import MultiHeadAttention as MultiHeadAttention
from regard.nn.residual import PostNorm as PostNorm
from regard.nn.residual import PreNorm as PreNorm

__all__ = [
    "AdditiveAttention",
    "Dropout",
    "FeedForward",
    "GatedFeedForward",
    "KeyValue",
    "LearnedPositions",
    "Linear",
    "MultiHeadAttention",
    "NoPositions",
    "PostNorm",
    "PreNorm",
    "RelativeBias",
    "SinusoidalPositions",
    "TokenEmbedding",
]
