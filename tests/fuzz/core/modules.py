"""Our multi-head attention reads a text in pieces, from a cache, as it reads it at once."""

from typing import Any

import torch
from hypothesis import note

import regard
from regard.call.biases import Forgetting
from regard.nn import MultiHeadAttention
from tests.fuzz.drawing import Drawn

HEADS, LENGTH, DIM = 2, 7, 4
MODULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "sink": {"sink": True},
    "a gate a head": {"gate": "head"},
    "grouped": {"num_kv_heads": 1},
    "window": {"window": 2},
    "rotary": {"rotary": regard.Rotary(DIM)},
    **{name: {"normalization": name} for name in ("sigmoid", "softpick", "sparsemax", "entmax15")},
}
BESIDE = ("nothing", "a hook", "a gate", "alibi", "autocast")


def check_modules(drawn: Drawn) -> None:
    name, beside = drawn.of([*MODULES]), drawn.of(BESIDE)
    note(f"{name} x a cache and {beside}")
    torch.manual_seed(drawn.number(0, 99))
    attend = MultiHeadAttention(HEADS * DIM, HEADS, **MODULES[name]).double().eval()
    x, sums = drawn.normal(2, LENGTH, HEADS * DIM), -drawn.normal(2, HEADS, 1, LENGTH).abs().cumsum(-1)

    def bias(length: int) -> Any:
        return {"a gate": Forgetting(sums[..., :length]), "alibi": regard.ALiBi(HEADS)}.get(beside)

    with torch.no_grad():
        right = attend(x, mask=regard.causal(), bias=bias(LENGTH), backend="reference")
        if beside == "a hook":
            attend.register_forward_hook(lambda module, given, output: 2 * output)
            right = 2 * right
        found, cache, start = [], None, 0
        while start < LENGTH:
            stop = drawn.number(start + 1, LENGTH)
            with torch.autocast("cpu", torch.bfloat16, enabled=beside == "autocast"):
                output, cache = attend.extend(x[:, start:stop], cache, bias=bias(stop))
            found.append(output)
            start = stop
    torch.testing.assert_close(torch.cat(found, 1), right, rtol=0, atol=1e-9 * max(1.0, float(right.abs().max())))
