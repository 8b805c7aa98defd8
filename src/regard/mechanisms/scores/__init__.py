"""Scores: functions of a query and a key that give one number."""

from regard.mechanisms.scores.additive import Additive as Additive
from regard.mechanisms.scores.base import Bilinear as Bilinear
from regard.mechanisms.scores.base import Cosine as Cosine
from regard.mechanisms.scores.base import Dot as Dot
from regard.mechanisms.scores.base import ScaledDot as ScaledDot
from regard.mechanisms.scores.base import Score as Score
from regard.mechanisms.scores.base import SoftCapped as SoftCapped
from regard.mechanisms.scores.custom import as_score as as_score
from regard.mechanisms.scores.kernels import Boxcar as Boxcar
from regard.mechanisms.scores.kernels import Constant as Constant
from regard.mechanisms.scores.kernels import Epanechnikov as Epanechnikov
from regard.mechanisms.scores.kernels import Gaussian as Gaussian
from regard.mechanisms.scores.kernels import Laplacian as Laplacian
from regard.mechanisms.scores.kernels import Triangular as Triangular

__all__ = [
    "Additive",
    "Bilinear",
    "Boxcar",
    "Constant",
    "Cosine",
    "Dot",
    "Epanechnikov",
    "Gaussian",
    "Laplacian",
    "ScaledDot",
    "Score",
    "SoftCapped",
    "Triangular",
    "as_score",
]
