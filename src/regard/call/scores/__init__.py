"""Scores: scalar functions of a query and a key."""

from regard.call.scores.additive import Additive as Additive
from regard.call.scores.base import Bilinear as Bilinear
from regard.call.scores.base import Cosine as Cosine
from regard.call.scores.base import Dot as Dot
from regard.call.scores.base import ScaledDot as ScaledDot
from regard.call.scores.base import Score as Score
from regard.call.scores.base import SoftCapped as SoftCapped
from regard.call.scores.custom import as_score as as_score
from regard.call.scores.kernels import Boxcar as Boxcar
from regard.call.scores.kernels import Constant as Constant
from regard.call.scores.kernels import Epanechnikov as Epanechnikov
from regard.call.scores.kernels import Gaussian as Gaussian
from regard.call.scores.kernels import Laplacian as Laplacian
from regard.call.scores.kernels import Triangular as Triangular

__all__ = [
    "Additive", "Bilinear", "Boxcar", "Constant", "Cosine", "Dot", "Epanechnikov", "Gaussian", "Laplacian",
    "ScaledDot", "Score", "SoftCapped", "Triangular", "as_score",
]  # fmt: skip
