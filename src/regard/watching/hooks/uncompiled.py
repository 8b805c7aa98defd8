"""Compiled modules run uncompiled while a watch of one is open: the observers see the calls of the model's own code."""

import threading
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import cast

import torch

from regard.watching.running.interceptor import Interceptor

_lock = threading.RLock()
_stances: list[AbstractContextManager[None]] = []
"""torch's stance while watches of compiled models are open, and a place for each further watch."""
HOOKS_RUN_TWICE = "Using `torch.compile"
"""The beginning of torch's warning that global hooks run for a compiled module too."""


def run_uncompiled() -> None:
    """Let compiled modules run uncompiled, in all threads. What was compiled stays, and is not compiled again."""
    with _lock:
        if not _stances:
            _stances.append(torch.compiler.set_stance("force_eager"))
            # The module around the compiled one runs our hooks too, which know it and pass it by.
            warnings.filterwarnings("ignore", HOOKS_RUN_TWICE)
        else:
            _stances.append(nullcontext())


def run_compiled() -> None:
    with _lock:
        if len(_stances) == 1:
            _stances[0].__exit__(None, None, None)
            own = [one for one in warnings.filters if getattr(one[1], "pattern", "") == HOOKS_RUN_TWICE]
            for one in own:
                cast("list[object]", warnings.filters).remove(one)
            _stances.clear()
        else:
            _stances.pop()


@contextmanager
def uncompiled(watch: Interceptor) -> Iterator[None]:
    if not watch.is_compiled:
        yield
        return
    run_uncompiled()
    try:
        yield
    finally:
        run_compiled()
