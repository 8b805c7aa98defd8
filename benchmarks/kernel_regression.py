"""Nadaraya-Watson regression with a Gaussian kernel, against statsmodels and, where it is installed, KeOps."""

from typing import Any

import numpy as np
import torch

from benchmarks.harness import Row, compare, peak_memory_mib
from regard.models import NadarayaWatson

TITLE = "Nadaraya-Watson, Gaussian kernel, 8 features"


def run() -> tuple[list[Row], list[str]]:
    from statsmodels.nonparametric.kernel_regression import KernelReg

    rng = np.random.default_rng(0)
    x, y, new = rng.normal(size=(100_000, 8)), rng.normal(size=100_000), rng.normal(size=(10_000, 8))
    rows, notes = [], []
    model = NadarayaWatson(width=0.5).fit(x, y)
    # statsmodels takes minutes for 10,000 queries; its time is proportional to their number.
    few = new[:100]
    theirs = KernelReg(y, x, "c" * 8, reg_type="lc", bw=[0.5] * 8)
    rows.append(
        compare(
            "100,000 points, 100 queries, float64: statsmodels",
            lambda: theirs.fit(few),
            lambda: model.predict(few),
            target=1.0,
        )
    )
    fast = NadarayaWatson(width=0.5, dtype="float32").fit(x, y)
    try:
        from pykeops.torch import LazyTensor
    except ImportError:
        notes.append("KeOps is not installed here: `pip install --group bench` adds it to this table.")
    else:
        a, b, t = (torch.from_numpy(z).float() for z in (new, x, y[:, None]))

        def keops() -> Any:
            weights = (-((LazyTensor(a[:, None]) - LazyTensor(b[None])) ** 2).sum(-1) / (2 * 0.25)).exp()
            return (weights @ t) / weights.sum(1)

        rows.append(
            compare(
                "100,000 points, 10,000 queries, float32: KeOps",
                keops,
                lambda: fast.predict(new),
                target=1.0,
                seconds=30,
            )
        )
    mib = peak_memory_mib(MEMORY)
    notes.append(
        f"A million points and 10,000 queries in 8 dimensions: {mib:.0f} MiB at the peak above the inputs "
        "(asked: under 2 GiB)."
    )
    return rows, notes


MEMORY = """
import numpy as np
from regard.models import NadarayaWatson
rng = np.random.default_rng(0)
x, y, new = rng.normal(size=(1_000_000, 8)), rng.normal(size=1_000_000), rng.normal(size=(10_000, 8))
def run():
    NadarayaWatson(width=0.5, dtype="float32").fit(x, y).predict(new)
"""
