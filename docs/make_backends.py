"""Write the table of docs/kernels.md: which backend runs what, asked of the backends themselves.

python docs/make_backends.py
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import regard
from regard.functional import make_call
from regard.kernels import BACKENDS
from regard.tensors.guards import run_state

PAGE = Path(__file__).with_name("kernels.md")
TABLE = re.compile(r"^\| \| fused.*?(?=\n## )", re.DOTALL | re.MULTILINE)


def cases() -> dict[str, dict[str, object]]:
    """One call for each thing that can be passed in."""
    ones, learned = torch.ones(4), torch.zeros(3, 3, requires_grad=True)
    scores = {
        "ScaledDot": regard.ScaledDot(),
        "Cosine": regard.Cosine(),
        "Bilinear": regard.Bilinear(torch.eye(4)),
        "Additive": regard.Additive(ones),
        "SoftCapped": regard.SoftCapped(regard.ScaledDot(), cap=30.0),
        "Gaussian": regard.call.scores.Gaussian(),
        "Laplacian, Boxcar, Epanechnikov, Triangular, Constant": regard.call.scores.Laplacian(),
        "a function of one's own": lambda q, k: q @ k.mT,
    }
    normalizations = {
        "SoftmaxWithSink": regard.SoftmaxWithSink(),
        "Sigmoid": regard.Sigmoid(),
        "Sparsemax, Entmax15": regard.Sparsemax(),
        "Unnormalized": regard.call.normalizations.Unnormalized(),
        "Softpick": regard.call.normalizations.Softpick(),
    }
    masks = {
        "lengths, padding": regard.lengths(torch.tensor([2])),
        "causal": regard.causal(),
        "window, documents, blocks, strided, prefix": regard.window(2),
        "predicate, a bool tensor": regard.predicate(lambda b, h, q, k: q > k),
    }
    biases = {
        "a tensor": torch.zeros(3, 3),
        "a learned tensor": learned,
        "ALiBi": regard.ALiBi(1),
        "T5Bias": regard.T5Bias(torch.zeros(32, 1, requires_grad=True)),
        "Shaw": regard.call.biases.Shaw(torch.zeros(3, 4, requires_grad=True)),
    }
    found: dict[str, dict[str, object]] = {}
    for option, values in (("score", scores), ("normalization", normalizations), ("mask", masks), ("bias", biases)):
        found |= {f"`{option}=` {name}": {option: value} for name, value in values.items()}
    return found | {"`dropout=` above 0": {"dropout": 0.1}}


def table() -> str:
    """A row for each case, a column for each backend, and the reasons below."""
    lines = ["| | " + " | ".join(BACKENDS) + " |", "|---|" + "---|" * len(BACKENDS)]
    reasons: dict[str, int] = {}
    x = torch.zeros(1, 3, 4, requires_grad=True)
    for name, options in cases().items():
        given: dict[str, Any] = {
            "score": regard.ScaledDot(),
            "normalization": regard.Softmax(),
            "mask": None,
            "bias": None,
            "dropout": 0.0,
        }
        call, _ = make_call(x, x, x, **{**given, **options})
        cells = []
        for backend in BACKENDS.values():
            why = backend.why_not(replace(call, normalization=call.normalization.base), run_state(x))
            cells.append("yes" if why is None else f"no [{reasons.setdefault(why, len(reasons) + 1)}]")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    notes = [f"{number}. {why}" for why, number in reasons.items()]
    return "\n".join([*lines, "", *notes]) + "\n"


def page() -> str:
    """The page as it is, with the table of now."""
    return TABLE.sub(lambda _: table(), PAGE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
