"""`regard.on_attention`: a function called after each attention call, which may prune keys or tokens."""

from typing import TYPE_CHECKING

from torch import nn

from regard.errors import ArgumentError
from regard.watching.handed_back import OnAttention
from regard.watching.module_names import Names, chooser, modules_of

if TYPE_CHECKING:
    from regard.watching.pruning.attention_hook import AttentionHook


def on_attention(model: nn.Module, function: OnAttention, names: Names = None) -> "AttentionHook":
    """Call a function after each attention call of a model, before the next layer runs; it may prune keys or tokens.

        with regard.on_attention(model, function):
            model.generate(ids)

    `function(name, weights, query, key, value)` gets the path of the attending module, its exact lazy map, and the
    tensors of the call: query (batch..., H, T, D), key (batch..., G, S, D) and value (batch..., G, S, E). For
    written-out attention, query and key are None, and value may be. The function runs without gradients. The map can be
    read until the function returns; to keep maps, use `regard.watch`. The function returns

    - None: everything stays. The outputs of the model are then the same bits as without the hook.
    - `KeepKeys(indices)`: these keys stay in the layer's cache (H2O, TOVA, SnapKV, PyramidKV). The cache has to be a
      `DynamicCache` of transformers, and keys stay where they are in the text: new tokens get the positions that
      follow those of all tokens the cache has seen.
    - `KeepTokens(indices)`: these tokens go on to the next layer (FastV, EViT). The layer is the innermost module
      around the call that stands in an `nn.ModuleList` or `nn.Sequential`.

    Args:
        model: any module that `regard.watch` can watch. It is not changed; compiled, it runs uncompiled meanwhile.
        function: the function to call. `regard.maps.selection` has published scores.
        names: the modules, as for `regard.watch`; None means all.

    Raises:
        ArgumentError: no module has one of the names, or `function` cannot be called.
        FunctionError: while the model runs: the function raised, or returned an unusable value. The cache the
            model was given has the keys then it had before the model was called.
        NotSeenError: at the end of the `with` block: the model ran, and no attention call was seen.

    >>> import torch
    >>> def show(name, weights, query, key, value):
    ...     print(name, weights.shape, weights.received()[0, 0])
    >>> class Block(nn.Module):
    ...     def forward(self, x):
    ...         return torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
    >>> with on_attention(nn.Sequential(Block()), show) as hook:
    ...     output = hook.model(torch.zeros(1, 1, 2, 4))
    0 torch.Size([1, 1, 2, 2]) tensor([1.5000, 0.5000])
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"on_attention() takes a torch.nn.Module, got {type(model).__name__}")
    if not callable(function):
        raise ArgumentError(f"on_attention() takes a function, got {type(function).__name__}")
    chooser(names, modules_of(model))
    # Imported on first use: `import regard` stays light.
    from regard.watching.pruning.attention_hook import AttentionHook

    return AttentionHook(model, function, names)
