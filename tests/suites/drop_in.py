"""A plugin of pytest, `-p tests.suites.drop_in`: `torch.nn.MultiheadAttention` is ours, also in torch's encoders."""

import torch

from regard.nn.compat import MultiheadAttention


def pytest_configure() -> None:
    """Take its place before a test file is imported."""
    for place in (torch.nn, torch.nn.modules, torch.nn.modules.activation, torch.nn.modules.transformer):
        vars(place)["MultiheadAttention"] = MultiheadAttention
