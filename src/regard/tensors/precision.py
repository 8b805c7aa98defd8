"""Floating-point precision of devices."""

import torch


def widest_dtype(device: torch.device) -> torch.dtype:
    """The widest floating-point type of the device.

    >>> widest_dtype(torch.device("cpu")), widest_dtype(torch.device("mps"))
    (torch.float64, torch.float32)
    """
    return torch.float32 if device.type == "mps" else torch.float64  # Apple's GPUs have no float64
