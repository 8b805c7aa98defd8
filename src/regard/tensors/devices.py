"""Capabilities of a GPU."""

import torch


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """The compute capability of a CUDA device; None before CUDA starts, as under `FakeTensorMode`.

    >>> capability_of(torch.device("cpu")) is None
    True
    """
    if device.type != "cuda" or not torch.cuda.is_initialized():
        return None
    return torch.cuda.get_device_capability(device)
