"""The searches, from the sources and limits that tests spread over their calls."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor

from regard.tasks import generation
from regard.tasks.generation import SearchOf

SHARED = ("bos_id", "eos_id", "max_steps", "constraints")


def _of(search: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(search)
    def call(model: Any, source: Tensor, lengths: Tensor, **options: Any) -> Any:
        asked = SearchOf(source, lengths, **{name: options.pop(name) for name in SHARED if name in options})
        return search(model, asked, **options)

    return call


greedy, beam_search = _of(generation.greedy), _of(generation.beam_search)
sample, sample_steps = _of(generation.sample), _of(generation.sample_steps)
