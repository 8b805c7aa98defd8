"""The ground `paths`: torch's own attention in training and evaluation, with each mask, flag and `need_weights`.

Which path torch takes decides what a mask means. So the weights of the maps are put into the module in their place: the
output is computed again from them, in float64, and has to be the output of the model.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from hypothesis import note, reject
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import regard
from tests.fuzz.drawing import Drawn
from tests.fuzz.paths.rebuilt import Weights, decoder_output, encoder_output, multi_head_output, of_heads

CONTEXTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad, "grad": torch.enable_grad, "inference": torch.inference_mode,
}  # fmt: skip
TOLERANCE = 2e-5
DIM = 12


def case(drawn: Drawn) -> None:
    warnings.simplefilter("ignore")
    check = drawn.of([multi_head, multi_head, multi_head, encoder, encoder, decoder, transformer, sdpa])
    with _fast_path(enabled=not drawn.chance(6)):
        check(drawn)


def multi_head(drawn: Drawn) -> None:
    # Torch runs a module fused only without any of these options: half of the cases have none.
    is_bare = drawn.chance()

    def has(one_in: int) -> bool:
        return drawn.chance(one_in) and not is_bare

    heads, batch_first, is_cross = 2 if is_bare else drawn.of([2, 1, 3, 4]), not has(3), has(3)
    widths = {"kdim": 8, "vdim": 6} if is_cross and drawn.chance() else {}
    module = nn.MultiheadAttention(
        DIM, heads, bias=not has(5), add_bias_kv=has(6), add_zero_attn=has(6), batch_first=batch_first, **widths
    )
    batch, t = drawn.of([2, 1, 3]), drawn.of([5, 1, 3, 8])
    s = drawn.of([t, 4, 7]) if is_cross else t
    x = _input(drawn, batch, t, DIM)
    key = _input(drawn, batch, s, widths.get("kdim", DIM)) if is_cross else x
    value = _input(drawn, batch, s, widths["vdim"]) if widths else key
    is_batched = not has(6)
    laid = {id(one): _laid(one, batch_first, is_batched) for one in (x, key, value)}
    given = [laid[id(one)] for one in (x, key, value)]
    options: dict[str, Any] = {"need_weights": drawn.chance(), "average_attn_weights": drawn.chance()}
    mask = _mask(drawn, t, s)
    if mask is not None:
        options["attn_mask"] = mask
        options["is_causal"] = drawn.chance()
    if drawn.chance(4):
        options["key_padding_mask"] = _padding(drawn, batch, s) if is_batched else _padding(drawn, batch, s)[0]
    output, weights = _watched(drawn, module, given, options)

    def rebuilt(by_name: Weights) -> Tensor:
        found = multi_head_output(module, value[: batch if is_batched else 1], of_heads(by_name[""]))
        return _laid(found, batch_first, is_batched)

    _require(output[0], rebuilt(weights))


def encoder(drawn: Drawn) -> None:
    activation: Any = drawn.of(["relu", "gelu", torch.tanh])
    layer = nn.TransformerEncoderLayer(
        DIM, drawn.of([2, 3, 4]), 16, 0.0, activation, batch_first=not drawn.chance(3),
        norm_first=drawn.chance(), bias=not drawn.chance(5),
    )  # fmt: skip
    batch, t = drawn.of([2, 1]), drawn.of([5, 2, 7])
    x, mask = _input(drawn, batch, t, DIM), _mask(drawn, t, t)
    padding = _padding(drawn, batch, t) if drawn.chance(4) else None
    is_layer = drawn.chance()
    module = layer if is_layer else nn.TransformerEncoder(layer, 2, enable_nested_tensor=drawn.chance())
    options: dict[str, Any] = {"src_mask" if is_layer else "mask": mask, "src_key_padding_mask": padding}
    if mask is not None:
        options["is_causal"] = drawn.chance()
    first = layer.self_attn.batch_first
    output, weights = _watched(drawn, module, [_laid(x, first, True)], options)
    again = encoder_output(module, x, weights)
    output = output if first else output.transpose(0, 1)
    if padding is not None:
        # What stands at padded positions is the path's own: zeros after a nested tensor, and rows otherwise.
        real = ~padding if padding.dtype == torch.bool else padding == 0
        output, again = output[real], again[real]
    _require(output, again)


def decoder(drawn: Drawn) -> None:
    layer = nn.TransformerDecoderLayer(
        DIM, drawn.of([2, 3]), 16, 0.0, batch_first=not drawn.chance(3), norm_first=drawn.chance()
    )
    batch, t, s = drawn.of([2, 1]), drawn.of([5, 2, 7]), drawn.of([4, 6])
    x, memory, mask = _input(drawn, batch, t, DIM), _input(drawn, batch, s, DIM), _mask(drawn, t, t)
    is_layer, first = drawn.chance(), layer.self_attn.batch_first
    module = layer if is_layer else nn.TransformerDecoder(layer, 2)
    options: dict[str, Any] = {"tgt_mask": mask, "memory_mask": _mask(drawn, t, s)}
    if mask is not None:
        options["tgt_is_causal"] = drawn.chance()
    if drawn.chance(4):
        options["memory_key_padding_mask"] = _padding(drawn, batch, s)
    output, weights = _watched(drawn, module, [_laid(one, first, True) for one in (x, memory)], options)
    _require(output if first else output.transpose(0, 1), decoder_output(module, x, memory, weights))


def transformer(drawn: Drawn) -> None:
    first = not drawn.chance(3)
    module = nn.Transformer(DIM, drawn.of([2, 3]), 1, 1, 16, 0.0, batch_first=first, norm_first=drawn.chance())
    batch, t, s = drawn.of([2, 1]), drawn.of([5, 2]), drawn.of([4, 6])
    x, source, mask = _input(drawn, batch, t, DIM), _input(drawn, batch, s, DIM), _mask(drawn, t, t)
    options: dict[str, Any] = {"tgt_mask": mask, "src_mask": _mask(drawn, s, s)}
    if mask is not None:
        options["tgt_is_causal"] = drawn.chance()
    output, weights = _watched(drawn, module, [_laid(one, first, True) for one in (source, x)], options)
    memory = encoder_output(module.encoder, source, weights, "encoder.")
    _require(
        output if first else output.transpose(0, 1), decoder_output(module.decoder, x, memory, weights, "decoder.")
    )


class Sdpa(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, **options)


def sdpa(drawn: Drawn) -> None:
    t, s, heads = drawn.of([5, 1, 3]), drawn.of([5, 7, 3]), drawn.of([2, 4])
    lead = drawn.of([(2, heads), (heads,), (), (2, 3, heads)])
    few, whole = _broadcast(drawn, lead), drawn.chance(3)
    q = drawn.normal(*(few if whole else lead), t, 4).float()
    k, v = (drawn.normal(*(lead if whole else few), s, n).float() for n in (4, drawn.of([4, 3])))
    if k.dim() > 2 and len(k) == len(v) == 1:
        k, v = k[0], v[0]
    options: dict[str, Any] = {"scale": drawn.of([None, 0.5])}
    match drawn.of(["none", "mask", "causal", "upper left", "lower right"]):
        case "mask":
            options["attn_mask"] = _mask(drawn, t, s)
            if options["attn_mask"] is not None and options["attn_mask"].dtype == torch.bool:
                options["attn_mask"] = ~options["attn_mask"]
        case "causal":
            options["is_causal"] = True
        case "upper left":
            options["attn_mask"] = causal_upper_left(t, s)
        case "lower right" if s >= t:
            options["attn_mask"] = causal_lower_right(t, s)
    output, weights = _watched(drawn, Sdpa(), [q, k, v], options)
    _require(output, weights[""] @ v.double())


def _broadcast(drawn: Drawn, lead: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(1 if drawn.chance(4) else size for size in lead)


def _watched(drawn: Drawn, module: nn.Module, given: list[Tensor], options: dict[str, Any]) -> tuple[Any, Weights]:
    module.train(drawn.chance(3))
    mode = drawn.of(list(CONTEXTS))
    said = {name: _said(value) for name, value in options.items()}
    shapes = [tuple(one.shape) for one in given]
    note(f"{module}\n{'training' if module.training else 'eval'}, {mode}, {shapes}, {said}")
    with CONTEXTS[mode]():
        try:
            plain = module(*given, **options)
        except (AssertionError, RuntimeError) as error:
            with regard.watch(module):
                _require_raises(type(error), module, given, options)
            reject()
        with regard.watch(module, copy=drawn.chance(5)) as seen:
            output = module(*given, **options)
    for one, other in zip(_tensors(plain), _tensors(output), strict=True):
        assert torch.equal(one.isnan(), other.isnan()), "a watch changes which outputs are NaN"
        assert torch.equal(one.nan_to_num(), other.nan_to_num()), "a watch changes the bits of the output"
        if one.isnan().any():
            reject()  # The fused layer drops each key whose added mask is not 0: such rows have no keys.
    report = seen.report()
    assert not report.missed, f"not seen: {report.missed}"
    return output, {key[0]: one.dense().detach().double() for key, one in seen.items()}


def _require_raises(kind: type[Exception], module: nn.Module, given: list[Tensor], options: dict[str, Any]) -> None:
    try:
        module(*given, **options)
    except kind:
        return
    raise AssertionError(f"torch raises {kind.__name__} without a watch, and nothing with one")


def _require(output: Tensor, rebuilt: Tensor) -> None:
    miss = float((output.detach().double() - rebuilt).abs().max())
    assert miss <= TOLERANCE * max(1.0, float(rebuilt.abs().max())), (
        f"the weights of the map give another output: {miss}"
    )


def _input(drawn: Drawn, batch: int, length: int, dim: int) -> Tensor:
    return drawn.normal(batch, length, dim).float()


def _laid(x: Tensor, batch_first: bool, is_batched: bool) -> Tensor:
    if not is_batched:
        return x[0]
    return x if batch_first else x.transpose(0, 1).contiguous()


def _mask(drawn: Drawn, t: int, s: int) -> Tensor | None:
    i, j = torch.arange(t)[:, None], torch.arange(s)
    kinds = {
        "none": None, "causal": j > i, "upside down": j < i - max(t - s, 0), "window": (j > i) | (j <= i - 3),
        "nothing": torch.zeros(t, s, dtype=torch.bool), "random": drawn.bools(t, s, share=0.4) & (j != i % s),
    }  # fmt: skip
    drop = kinds[drawn.of(list(kinds))]
    if drop is None or drawn.chance():
        return drop
    added = torch.zeros(t, s).masked_fill(drop, -torch.inf)
    return added + drawn.normal(t, s).float() if drawn.chance(3) else added


def _padding(drawn: Drawn, batch: int, s: int) -> Tensor:
    lengths = drawn.integers(max(1, s - 2), s, batch)
    lengths[0] = s
    drop = torch.arange(s) >= lengths[:, None]
    return drop if not drawn.chance(3) else torch.zeros(drop.shape).masked_fill(drop, -torch.inf)


def _tensors(output: Any) -> Iterator[Tensor]:
    yield from [output] if isinstance(output, Tensor) else [one for one in output if one is not None]


def _said(value: Any) -> str:
    return f"{type(value).__name__} {value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)


@contextmanager
def _fast_path(*, enabled: bool) -> Iterator[None]:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(enabled)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
