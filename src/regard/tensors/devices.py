"""What a GPU can do, as far as code here depends on it."""

import torch


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """The compute capability of a device of CUDA; None if CUDA was not started, as with tensors without numbers.

    >>> capability_of(torch.device("cpu")) is None
    True
    """
    if device.type != "cuda" or not torch.cuda.is_initialized():
        return None
    return torch.cuda.get_device_capability(device)
