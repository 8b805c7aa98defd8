"""NadarayaWatson against scikit-learn's contract, numpy written out, and statsmodels."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn")

from sklearn.utils.estimator_checks import parametrize_with_checks

from regard.errors import ArgumentError
from regard.models.kernel_regression import KERNELS, NadarayaWatson


@parametrize_with_checks([NadarayaWatson(), NadarayaWatson(kernel="epanechnikov"), NadarayaWatson(width="loo")])
def test_the_contract_of_scikit_learn(estimator: NadarayaWatson, check: Callable[..., Any]) -> None:
    check(estimator)


def kernel(name: str, u: np.ndarray) -> np.ndarray:
    return {
        "gaussian": np.exp(-(u**2) / 2),
        "laplacian": np.exp(-u),
        "boxcar": (u < 1).astype(float),
        "epanechnikov": np.clip(1 - u**2, 0, None),
        "triangular": np.clip(1 - u, 0, None),
        "constant": np.ones_like(u),
    }[name]


@pytest.fixture
def data() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(31, 3)), rng.normal(size=(31, 2)), rng.normal(size=(7, 3)), rng.random(31)


def _left_out(model: NadarayaWatson) -> np.ndarray:
    return model._leave_one_out(model.width_).numpy().squeeze(-1 if model._one_output else ())


@pytest.mark.parametrize("name", KERNELS)
def test_predictions_and_weights_are_the_formula(
    name: Any, data: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
) -> None:
    x, y, new, weight = data
    u = np.linalg.norm(new[:, None] - x[None], axis=-1) / 1.3
    k = kernel(name, u) * weight
    total = k.sum(1, keepdims=True)
    mean = (weight[:, None] * y).sum(0) / weight.sum()
    expected = np.where(total > 0, k @ y / np.where(total > 0, total, 1), mean)
    model = NadarayaWatson(kernel=name, width=1.3).fit(x, y, sample_weight=weight)
    np.testing.assert_allclose(model.predict(new), expected, atol=1e-10)
    weights = model.attention_map(new).dense().numpy()
    np.testing.assert_allclose(weights, k / np.where(total > 0, total, 1), atol=1e-10)


@pytest.mark.parametrize("name", ["gaussian", "laplacian", "epanechnikov"])
@pytest.mark.parametrize("offset", [0.0, 1e6])
@pytest.mark.parametrize("width", [1.5, 0.1, 0.003])
def test_leaving_one_out_is_fitting_without_it(
    name: Any, offset: float, width: float, data: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
) -> None:
    """Also of points without a near neighbour, where the weight of the others is a difference of rounding."""
    x, y, _, weight = data
    y = y + offset
    found = _left_out(NadarayaWatson(kernel=name, width=width).fit(x, y, sample_weight=weight))
    for i in range(len(x)):
        rest = np.arange(len(x)) != i
        without = NadarayaWatson(kernel=name, width=width).fit(x[rest], y[rest], sample_weight=weight[rest])
        np.testing.assert_allclose(found[i], without.predict(x[i : i + 1])[0], atol=1e-8 * max(offset, 1.0))


@pytest.mark.parametrize("width", [1.5, 0.003])
def test_a_weight_of_two_is_two_samples_of_which_one_is_left_out(
    width: float, data: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
) -> None:
    x, y, _, _ = data
    weight = np.arange(len(x)) % 3 + 1
    found = _left_out(NadarayaWatson(width=width).fit(x, y, sample_weight=weight))
    apart = _left_out(NadarayaWatson(width=width).fit(np.repeat(x, weight, 0), np.repeat(y, weight, 0)))
    np.testing.assert_allclose(np.repeat(found, weight, 0), apart, atol=1e-8)


def test_the_width_with_the_best_leave_one_out_score_is_taken() -> None:
    rng = np.random.default_rng(1)
    x = rng.uniform(0, 6, size=(200, 1))
    y = np.sin(2 * x[:, 0]) + 0.1 * rng.normal(size=200)
    model = NadarayaWatson(width="loo", widths=[0.001, 0.1, 3.0]).fit(x, y)
    assert model.width_ == 0.1
    assert model.loo_scores_.argmax() == 1
    errors = y - _left_out(model)
    assert model.loo_scores_[1] == pytest.approx(1 - errors @ errors / ((y - y.mean()) @ (y - y.mean())))


@pytest.mark.filterwarnings("ignore:After 0.17:FutureWarning")
def test_statsmodels_agrees(data: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]) -> None:
    kernel_regression = pytest.importorskip("statsmodels.nonparametric.kernel_regression")
    x, y, new, _ = data
    theirs = kernel_regression.KernelReg(y[:, 0], x, "ccc", reg_type="lc", bw=[0.8] * 3).fit(new)[0]
    ours = NadarayaWatson(width=0.8).fit(x, y[:, 0]).predict(new)
    np.testing.assert_allclose(ours, theirs, atol=1e-8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel": "cubic"}, "one of gaussian.*got 'cubic'"),
        ({"width": 0.0}, "above 0 or 'loo', got 0.0"),
        ({"width": "wide"}, "above 0 or 'loo', got 'wide'"),
        ({"width": "loo", "widths": [1.0, -1.0]}, "numbers above 0"),
        ({"width": "loo", "widths": ["wide"]}, "numbers above 0"),
        ({"dtype": "int8"}, "got 'int8'"),
    ],
)
def test_a_wrong_option_is_named(
    options: dict[str, Any], message: str, data: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
) -> None:
    with pytest.raises(ArgumentError, match=message):
        NadarayaWatson(**options).fit(data[0], data[1])


def test_no_weight_at_all_is_named(data: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]) -> None:
    with pytest.raises(ValueError, match="at least one non-zero number"):
        NadarayaWatson().fit(data[0], data[1], sample_weight=np.zeros(31))
