"""Lazy maps in the `attentions` of Hugging Face models.

`enable(model)` runs a model's attention through `regard.attention`, at the speed of the fused kernels. Then
`model(..., output_attentions=True).attentions` is a tuple of `AttentionMap`s. `regard.watch` needs no change of a model
and leaves its results equal to the bit. `enable` is for code that already reads `outputs.attentions`, and for losses
on attention, because these maps carry gradients.
"""

from regard.huggingface.enable import Enabled as Enabled
from regard.huggingface.enable import enable as enable

__all__ = ["Enabled", "enable"]
