"""Dates as 25 languages write them, weights to draw over them, and a page of both."""

import base64
import datetime
import json
import re
import zlib
from typing import Any

import numpy as np
from babel.dates import format_date

from regard import page
from regard.views import Example, Map

EMPTY_MB = len(page([Example("", {"x": Map(np.eye(1))})]).text) / 1e6
"""A page that shows one weight."""
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


def array_of(data: Any, place: int) -> np.ndarray:
    found = data["arrays"][place]
    dtype = np.dtype({"f16": "<f2", "f32": "<f4", "u8": "u1", "u16": "<u2", "u32": "<u4"}[found["kind"]])
    planes = np.frombuffer(zlib.decompress(base64.b64decode(found["data"])), np.uint8)
    values = np.ascontiguousarray(planes.reshape(dtype.itemsize, found["length"]).T).view(dtype).ravel()
    return values.astype(np.float64) if dtype.kind == "f" else values


def decoded(data: Any, map_: dict[str, Any]) -> np.ndarray:
    picture = map_["pictures"][0]
    return array_of(data, picture["largest"]).reshape(-1, *picture["grid"]) * map_["scale"]


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
