"""Lazy maps in the `attentions` of Hugging Face models.

`enable(model)` runs a model's attention through `regard.attention`, at the speed of the fused kernels. Then `model(...,
output_attentions=True).attentions` is a tuple of `AttentionMap`s with gradients. Use it for code that reads
`outputs.attentions`, and for losses on attention. `regard.watch` leaves the model unchanged and its results equal to
the bit.
"""

from regard.huggingface.enable import Enabled as Enabled
from regard.huggingface.enable import enable as enable

__all__ = ["Enabled", "enable"]
