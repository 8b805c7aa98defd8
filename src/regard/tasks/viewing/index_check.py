"""Indices of embeddings are checked before a GPU reads them: there an index too large ends the work of the process."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class IndexCheck(TorchFunctionMode):
    """Raise IndexError for an index outside a table of embeddings, as torch does on the CPU.

    On CUDA torch raises nothing there: a device-side assertion makes every later call of the process fail.
    """

    def __torch_function__(
        self, function: Callable[..., Any], types: Iterable[Any], args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in (torch.embedding, torch.nn.functional.embedding):
            indices, weight = args[:2] if function is not torch.embedding else args[1::-1]
            if indices.numel():
                least, most = (int(one) for one in indices.aminmax())
                if least < 0 or most >= len(weight):
                    raise IndexError(f"index {most if least >= 0 else least} of a table of {len(weight)} embeddings")
        return function(*args, **(kwargs or {}))
