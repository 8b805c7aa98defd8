"""Attention you can read, at full speed.

Three doors: `attention(...)`, models in `regard.nn` and `regard.models`, and the command line `regard`.
"""

from regard import huggingface as huggingface
from regard.biases import Bias as Bias
from regard.checks import checking as checking
from regard.errors import RegardError as RegardError
from regard.functional import Attended as Attended
from regard.functional import attention as attention
from regard.functional import explain as explain
from regard.inspection.summaries import Summarize as Summarize
from regard.inspection.watch import watch as watch
from regard.kernels import Boxcar as Boxcar
from regard.kernels import Constant as Constant
from regard.kernels import Epanechnikov as Epanechnikov
from regard.kernels import Gaussian as Gaussian
from regard.kernels import Laplacian as Laplacian
from regard.kernels import Triangular as Triangular
from regard.masks import Mask as Mask
from regard.masks import causal as causal
from regard.masks import lengths as lengths
from regard.masks import padding as padding
from regard.masks import predicate as predicate
from regard.normalizations import Entmax15 as Entmax15
from regard.normalizations import Sigmoid as Sigmoid
from regard.normalizations import Softmax as Softmax
from regard.normalizations import SoftmaxWithSink as SoftmaxWithSink
from regard.normalizations import Sparsemax as Sparsemax
from regard.normalizations import Unnormalized as Unnormalized
from regard.packing import Packed as Packed
from regard.packing import pack as pack
from regard.patterns import blocks as blocks
from regard.patterns import documents as documents
from regard.patterns import prefix as prefix
from regard.patterns import strided as strided
from regard.patterns import window as window
from regard.relative import ALiBi as ALiBi
from regard.relative import Shaw as Shaw
from regard.relative import T5Bias as T5Bias
from regard.relative import TransformerXL as TransformerXL
from regard.rotary import Rotary as Rotary
from regard.scores import Additive as Additive
from regard.scores import Bilinear as Bilinear
from regard.scores import Cosine as Cosine
from regard.scores import Dot as Dot
from regard.scores import ScaledDot as ScaledDot
from regard.scores import SoftCapped as SoftCapped
from regard.weights import AttentionMap as AttentionMap

__version__ = "0.1.0"

__all__ = [
    "ALiBi",
    "Additive",
    "Attended",
    "AttentionMap",
    "Bias",
    "Bilinear",
    "Boxcar",
    "Constant",
    "Cosine",
    "Dot",
    "Entmax15",
    "Epanechnikov",
    "Gaussian",
    "Laplacian",
    "Mask",
    "Packed",
    "RegardError",
    "Rotary",
    "ScaledDot",
    "Shaw",
    "Sigmoid",
    "SoftCapped",
    "Softmax",
    "SoftmaxWithSink",
    "Sparsemax",
    "Summarize",
    "T5Bias",
    "TransformerXL",
    "Triangular",
    "Unnormalized",
    "attention",
    "blocks",
    "causal",
    "checking",
    "documents",
    "explain",
    "lengths",
    "pack",
    "padding",
    "predicate",
    "prefix",
    "strided",
    "watch",
    "window",
]
