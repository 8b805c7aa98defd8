"""Lazy maps in the `attentions` of Hugging Face models.

`enable(model)` runs a model's attention through `regard.attention`, at the speed of the fused kernels;
`model(..., output_attentions=True).attentions` is then a tuple of `AttentionMap`s. `regard.watch` asks nothing of
a model and changes none of its bits; this is for code that reads `outputs.attentions` already, and for losses
on attention, since these maps carry gradients.
"""

from regard.huggingface.enable import Enabled as Enabled
from regard.huggingface.enable import enable as enable

__all__ = ["Enabled", "enable"]
