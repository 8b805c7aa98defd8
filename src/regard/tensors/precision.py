"""How precisely a device can compute."""

import torch


def widest_dtype(device: torch.device) -> torch.dtype:
    """The most precise floating-point type that the device has.

    >>> widest_dtype(torch.device("cpu")), widest_dtype(torch.device("mps"))
    (torch.float64, torch.float32)
    """
    return torch.float32 if device.type == "mps" else torch.float64  # Apple's GPUs have no float64
