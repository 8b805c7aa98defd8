"""A plugin of pytest: `torch.nn.MultiheadAttention` is ours, also in torch's encoders and decoders."""

import torch

from regard.nn.compat import MultiheadAttention

for place in (torch.nn, torch.nn.modules, torch.nn.modules.activation, torch.nn.modules.transformer):
    vars(place)["MultiheadAttention"] = MultiheadAttention
