"""The argument and the output of transformers' models that hold the cache of keys and values."""

from collections.abc import Container, Mapping
from typing import Any

CACHE_NAMES = ("cache", "past_key_values")
"""From transformers 5.24 on, and before."""


def cache_name(names: Container[str]) -> str | None:
    """The name of the cache among those of a model's arguments; None if it takes none.

    >>> cache_name({"input_ids", "past_key_values"}), cache_name({"input_ids", "cache"})
    ('past_key_values', 'cache')
    """
    return next((name for name in CACHE_NAMES if name in names), None)


def cache_in(given: Mapping[str, Any]) -> Any:
    """The cache among named arguments, or in a model's output; None if there is none.

    >>> cache_in({"past_key_values": "ours"}), cache_in({"cache": "ours"}), cache_in({"input_ids": 1})
    ('ours', 'ours', None)
    """
    return next((given[name] for name in CACHE_NAMES if given.get(name) is not None), None)
