"""Nadaraya-Watson kernel regression as a scikit-learn estimator: attention pooling over the training set."""

from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from regard.call.masks.base import Mask
from regard.call.masks.patterns import window
from regard.call.scores.base import Score
from regard.call.scores.kernels import Boxcar, Constant, Epanechnikov, Gaussian, Laplacian, Triangular
from regard.errors import ArgumentError, MissingExtraError
from regard.functional import attention
from regard.maps.attention_map import AttentionMap

try:
    from sklearn.base import BaseEstimator, RegressorMixin
    from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
except ImportError as error:
    raise MissingExtraError("scikit-learn", extra="learn") from error

KernelName = Literal["gaussian", "laplacian", "boxcar", "epanechnikov", "triangular", "constant"]
KERNELS: dict[KernelName, type[Score]] = {
    "gaussian": Gaussian,
    "laplacian": Laplacian,
    "boxcar": Boxcar,
    "epanechnikov": Epanechnikov,
    "triangular": Triangular,
    "constant": Constant,
}


class NadarayaWatson(RegressorMixin, BaseEstimator):
    r"""$\hat y(x) = \sum_i w_i K(x, x_i)\, y_i \,/ \sum_i w_i K(x, x_i)$.

    Training only stores the data. Prediction is attention with the query x, the keys $x_i$ and the values $y_i$, in
    memory linear in the number of training points. Without a training point near a query (compact kernels), the
    prediction is the weighted mean of the targets.

    Args:
        kernel: "gaussian", "laplacian", "boxcar", "epanechnikov", "triangular" or "constant".
        width: w of the kernel, in units of the features; "loo" chooses the width in `widths` with the best
            leave-one-out score.
        widths: the candidates of "loo"; by default 20 widths around the scale of the data.
        dtype: "float64", or "float32" for speed.

    Attributes:
        width_: the width in use.
        n_features_in_: the number of features.
        loo_scores_: with width="loo", the leave-one-out R^2 of each candidate.

    Source: Nadaraya 1964, equation 2; Watson 1964.

    >>> x = np.linspace(0, 3, 50)[:, None]
    >>> model = NadarayaWatson(width=0.1).fit(x, np.sin(x[:, 0]))
    >>> bool(abs(model.predict([[1.5]])[0] - np.sin(1.5)) < 0.01)
    True
    """

    def __init__(
        self,
        *,
        kernel: KernelName = "gaussian",
        width: float | Literal["loo"] = 1.0,
        widths: ArrayLike | None = None,
        dtype: Literal["float64", "float32"] = "float64",
    ) -> None:
        self.kernel = kernel
        self.width = width
        self.widths = widths
        self.dtype = dtype

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Store the training set, and find the width if it is "loo".

        Args:
            X: (n, features).
            y: (n,) or (n, outputs).
            sample_weight: (n,), not negative; by default equal.

        Raises:
            ArgumentError: the kernel or dtype is unknown, or a width is not above 0.
            ValueError: the data or the weights fail scikit-learn's own checks.
        """
        X, y = validate_data(self, X, y, multi_output=True, y_numeric=True)
        if self.kernel not in KERNELS:
            raise ArgumentError(f"kernel must be one of {', '.join(KERNELS)}; got {self.kernel!r}")
        if self.dtype not in ("float64", "float32"):
            raise ArgumentError(f"dtype must be 'float64' or 'float32', got {self.dtype!r}")
        weight = _check_sample_weight(sample_weight, X, ensure_non_negative=True)
        dtype = getattr(torch, self.dtype)
        self._keys = torch.from_numpy(np.array(X, dtype=np.float64)).to(dtype)
        targets = np.array(y, dtype=np.float64)
        self._one_output = targets.ndim == 1
        self._values = torch.from_numpy(targets.reshape(len(targets), -1)).to(dtype)
        self._log_weight = torch.from_numpy(np.array(weight, dtype=np.float64)).to(dtype).log()
        self._mean = (self._values * self._log_weight.exp()[:, None]).sum(0) / self._log_weight.exp().sum()
        self.width_ = self._find_width() if self.width == "loo" else self._given_width()
        return self

    def predict(self, X: ArrayLike) -> NDArray[np.floating[Any]]:
        """The regression function at X (m, features): (m,) or (m, outputs), like y in `fit`."""
        output = self._attend(self._queries(X), self._score(self.width_))[0].numpy()
        return output[:, 0] if self._one_output else output

    def attention_map(self, X: ArrayLike) -> AttentionMap:
        """The weight of each training point in each prediction: a lazy map (m, n)."""
        return self._attend(self._queries(X), self._score(self.width_))[1]

    def _queries(self, X: ArrayLike) -> torch.Tensor:
        check_is_fitted(self)
        X = validate_data(self, X, reset=False)
        return torch.from_numpy(np.array(X, dtype=np.float64)).to(self._keys.dtype)

    def _score(self, width: float) -> Score:
        kernel: Any = KERNELS[self.kernel]
        return kernel(width)

    def _attend(self, query: torch.Tensor, score: Score, mask: Mask | None = None) -> tuple[torch.Tensor, AttentionMap]:
        bias = self._log_weight[None]
        output, weights = attention(
            query, self._keys, self._values, score=score, mask=mask, bias=bias, return_weights=True
        )
        # Without a training point near it, a row has the log-sum-exp -inf.
        return torch.where(weights.lse[:, None] == -torch.inf, self._mean, output), weights

    def _leave_one_out(self, width: float) -> torch.Tensor:
        """The prediction of each training point from all others, (n, outputs): exact also without a near neighbour."""
        others = ~window(1, offset=0)
        output, weights = self._attend(self._keys, self._score(width), others)
        far = weights.lse[:, None] == -torch.inf
        if bool(far.any()):
            output = torch.where(far, self._attend(self._keys, Constant(width), others)[0], output)
        # A weight of 2 stands for two samples, of which one is left out; a kernel is 1 at distance 0.
        more = self._log_weight.exp() - 1
        share = torch.sigmoid(more.log() - weights.lse).where(more > 0, 0.0)[:, None]
        return output + share * (self._values - output)

    def _given_width(self) -> float:
        width = _numbers(self.width)
        if width.shape != (1,) or not width > 0:
            raise ArgumentError(f"width must be above 0 or 'loo', got {self.width!r}")
        return float(width[0])

    def _find_width(self) -> float:
        if self.widths is None:
            share = self._log_weight.softmax(0)[:, None]
            spread = (share * (self._keys - (share * self._keys).sum(0)).square()).sum(0)
            scale = float(spread.sqrt().mean()) or 1.0
            candidates = scale * np.geomspace(0.01, 3.0, 20)
        else:
            candidates = _numbers(self.widths)
        if not len(candidates) or not (candidates > 0).all():
            raise ArgumentError(f"widths must be numbers above 0, got {self.widths!r}")
        weight = self._log_weight.exp()[:, None]
        spread = (weight * (self._values - self._mean).square()).sum()
        errors = [(weight * (self._leave_one_out(float(w)) - self._values).square()).sum() for w in candidates]
        self.loo_scores_ = np.array([float(1 - error / spread) if spread else 0.0 for error in errors])
        return float(candidates[int(self.loo_scores_.argmax())])


def _numbers(given: Any) -> NDArray[np.float64]:
    try:
        return np.asarray(given, dtype=np.float64).ravel()
    except (TypeError, ValueError):
        return np.empty(0)
