"""`regard.edit`: a model runs with edited attention, at the speed of its kernels."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from regard.edits.base import Edit
    from regard.edits.edit_run import EditRun


def edit(model: nn.Module, edits: "Mapping[Any, Edit | Sequence[Edit]]") -> "EditRun":
    """Edit a model's attention: inside the `with` block its calls run with other weights, in the same fused kernels.

        with regard.edit(model, {"transformer.h.*.attn": regard.edits.Reweight(keys=slice(4, 9), factor=20.0)}) as run:
            outputs = model.generate(**inputs)
        print(run.report())

    The model stays unchanged, so nothing has to be restored, even after an exception. A call without an edit keeps its
    bits. A watch, inside the block or around it, sees the edited weights. Gradients flow through the edits: a tensor in
    an edit can be learned. Edits hold in the thread of the block; in another thread, `with run.attach():` adds one.

    Args:
        model: any module on `F.scaled_dot_product_attention`, `nn.MultiheadAttention` and the layers made of it, or
            `regard.attention`. Edited layers of torch do not run fused as a whole.
        edits: an edit, or a list of them, by name, as for `regard.watch`: a path means the module and all inside it,
            `*` is a wildcard, and ("path", 2) is the third call of a module alone. Edits of one module are applied in
            order.

    Returns:
        The run: `report()` gives the plans of the edited calls.

    Raises:
        ArgumentError: no module has a name; something is no edit; or a named module cannot be edited
            (exported and TorchScript models; transformers' eager, flex and flash attention). When a module runs: its
            attention is written out, so it can only be watched. At the end of the block: no call was reached by an
            edit.

    Source: PASTA (arXiv:2311.02262), attention knockout (arXiv:2304.14767), activation patching (arXiv:2211.00593).

    >>> import torch
    >>> from regard.edits import Knockout
    >>> class Block(nn.Module):
    ...     def forward(self, x):
    ...         return torch.nn.functional.scaled_dot_product_attention(0 * x, x, x)
    >>> model = nn.Sequential(Block(), Block())
    >>> with edit(model, {"0": Knockout(keys=0)}) as run:
    ...     output = model(torch.eye(3))
    >>> output[0]
    tensor([0.0000, 0.5000, 0.5000])
    >>> print(run.report())
    Sequential: edits of 1 module
      0: fused: cut key 0, by a mask
    """
    # Imported here, because `import regard` stays light.
    from regard.edits.edit_run import EditRun

    return EditRun.of(model, edits)
