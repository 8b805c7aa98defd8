"""Dates as 25 languages write them, weights to draw over them, and what a page holds of both."""

import base64
import datetime
import json
import re
from typing import Any

import numpy as np
from babel.dates import format_date

from regard.views.html.page import Example, Map

LOCALES = ["en_US", "en_GB", "de", "fr", "es", "it", "pt", "nl", "sv", "pl", "ru", "uk", "tr", "el", "fi", "cs"]
LOCALES += ["hu", "vi", "id", "zh", "ja", "ko", "ar", "he", "hi", "th"]


def written(locale: str) -> str:
    return format_date(datetime.date(2026, 11, 21), "full", locale=locale)


def words(text: str) -> list[str]:
    return re.findall(r"\S+|\s", text)


def softmax(*shape: int, seed: int = 0) -> np.ndarray:
    scores = np.random.default_rng(seed).normal(size=shape).astype(np.float32) * 2
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def embedded(text: str) -> Any:
    (data,) = re.findall(r'<script type="application/json" id="regard-data">(.*?)</script>', text, re.DOTALL)
    return json.loads(data)


def decoded(map_: dict[str, Any]) -> np.ndarray:
    """The weights of an embedded map in float64, decoded by NumPy rather than by the page's own script."""
    raw = base64.b64decode(map_["data"])
    if map_["precision"] == "float16":
        return np.frombuffer(raw, "<f2").reshape(map_["shape"]).astype(np.float64)
    return np.frombuffer(raw, np.uint8).reshape(map_["shape"]) / 255 * map_["scale"]


def sentence(locale: str = "fr", heads: int = 2) -> Example:
    source, target = words(written(locale)), [*"2026-11-21", "⟨/s⟩"]
    return Example(
        written(locale),
        {
            "encoder.0": Map(softmax(heads, len(source), len(source)), source, source),
            "decoder.0.cross": Map(softmax(heads, len(target), len(source)), target, source),
            "decoder.1.cross": Map(softmax(heads, len(target), len(source), seed=1), target, source),
        },
        show="decoder.0.cross",
    )
