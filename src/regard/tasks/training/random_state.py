"""The states of all random generators of training, as tensors for a checkpoint."""

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.errors import RunFolderError

_NONE = float("nan")
"""Marks the absence of a second Gaussian value: a tensor cannot hold None."""


def seed_everything(seed: int, *, rank: int = 0) -> None:
    """Seed torch (every device), numpy and Python, differently on every rank."""
    mixed = int(np.random.SeedSequence([seed, rank]).generate_state(1)[0])
    random.seed(mixed)
    np.random.seed(mixed)
    torch.manual_seed(mixed)


def get_random_state(device: torch.device) -> dict[str, Tensor]:
    """The states of the generators of torch, numpy and Python, and of the device if it is a GPU.

    >>> state = get_random_state(torch.device("cpu"))
    >>> first = torch.rand(1)
    >>> set_random_state(state, torch.device("cpu"))
    >>> bool(torch.rand(1) == first)
    True
    """
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    _, words, gauss = random.getstate()
    state = {
        "torch": torch.get_rng_state(),
        "numpy": torch.tensor([*map(int, keys), int(position), int(has_gauss)]),
        "numpy_gauss": torch.tensor(float(cached), dtype=torch.float64),
        "python": torch.tensor(words),
        "python_gauss": torch.tensor(_NONE if gauss is None else gauss, dtype=torch.float64),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, Tensor], device: torch.device) -> None:
    """Restore the states of `get_random_state`; raises RunFolderError for others."""
    try:
        _set(state, device)
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise RunFolderError(f"the random state of the checkpoint is none that can be restored: {error!r}") from None


def _set(state: dict[str, Tensor], device: torch.device) -> None:
    *keys, position, has_gauss = state["numpy"].tolist()
    cached = state["numpy_gauss"].item()
    gauss = state["python_gauss"].item()
    words: tuple[Any, ...] = tuple(state["python"].tolist())
    # The clone is needed: given a row of a larger tensor, torch 2.13 reads at a wrong address and crashes.
    torch.set_rng_state(state["torch"].clone())
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    random.setstate((3, words, None if gauss != gauss else gauss))
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"].clone(), device)
