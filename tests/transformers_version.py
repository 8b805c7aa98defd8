"""Which transformers is installed: a test that needs a newer one is passed over, with the reason."""

from importlib.metadata import version
from inspect import signature
from typing import Any

import torch


def is_older_than(*release: int) -> bool:
    return tuple(map(int, version("transformers").split(".")[: len(release)])) < release


def places(start: int, queries: int) -> dict[str, Any]:
    """Where the queries are, as the masks of this transformers are told."""
    from transformers.masking_utils import sdpa_mask

    if "cache_position" in signature(sdpa_mask).parameters:
        return {"cache_position": torch.arange(start, start + queries)}
    return {"q_length": queries, "q_offset": start}
