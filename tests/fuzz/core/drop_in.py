"""The drop-in `MultiheadAttention` beside torch's: with random arguments both refuse, or both say the same."""

from typing import Any

import torch
from hypothesis import note
from torch import Tensor, nn

import regard.nn.compat
from regard.errors import RegardError
from tests.fuzz.drawing import Drawn


def check_drop_in(drawn: Drawn) -> None:
    """Parameters, inputs and masks that fit, and now and then some that do not."""
    options = _random_options(drawn)
    torch.manual_seed(drawn.number(0, 99))
    theirs = nn.MultiheadAttention(**options).double()
    ours = regard.nn.compat.MultiheadAttention(**options).double()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.5)
    ours.load_state_dict(theirs.state_dict())
    training = drawn.chance(3)
    ours.train(training), theirs.train(training)
    inputs, given = _random_inputs(drawn, options)
    shapes = {name: tuple(t.shape) for name, t in inputs.items()}
    note(f"nn.MultiheadAttention({options}) {'training' if training else 'eval'}, {shapes}, {given}")
    grad = drawn.chance()
    # Where keys are added and no weights are asked for, torch's causality counts from the first key, and so hides the
    # added ones from the rows that its mask shows them to.
    by_mask = {name: value for name, value in given.items() if name != "is_causal"}
    is_longer = options["add_bias_kv"] or options["add_zero_attn"]
    mine, right = _answer(ours, inputs, given, grad), _answer(theirs, inputs, by_mask if is_longer else given, grad)
    if isinstance(right, Exception):
        if all(t.numel() for t in inputs.values()):  # of empty tensors torch takes some, and trips over others
            assert isinstance(mine, RegardError), f"torch refuses ({right}), and the drop-in {_told(mine)}"
        return
    if isinstance(mine, RegardError) and _are_of_two_batches(inputs, options):
        return  # of no keys, which torch takes of any batch
    assert not isinstance(mine, Exception), f"torch takes it, and the drop-in refuses: {mine}"
    _compare(mine, right, inputs, given)


def _are_of_two_batches(inputs: dict[str, Tensor], options: dict[str, Any]) -> bool:
    batches = {t.shape[0 if options["batch_first"] else 1] for t in inputs.values() if t.dim() == 3}
    return len(batches) > 1 and not all(t.numel() for t in inputs.values())


def _told(answer: object) -> str:
    return f"raises {type(answer).__name__}: {answer}" if isinstance(answer, Exception) else "takes it"


def _random_options(drawn: Drawn) -> dict[str, Any]:
    heads = drawn.of([2, 1, 3])
    return {
        "embed_dim": heads * drawn.of([2, 1, 4]), "num_heads": heads, "bias": not drawn.chance(4),
        "add_bias_kv": drawn.chance(4), "add_zero_attn": drawn.chance(4), "kdim": drawn.of([None, None, 5]),
        "vdim": drawn.of([None, None, 3]), "batch_first": drawn.chance(), "dropout": 0.0,
    }  # fmt: skip


def _random_inputs(drawn: Drawn, options: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Query, key and value; masks and switches."""
    batch, queries, keys = drawn.of([2, 1, 3, 0]), drawn.of([3, 1, 5, 0]), drawn.of([4, 1, 3, 0])
    embed, heads = options["embed_dim"], options["num_heads"]
    is_batched = not drawn.chance(4)
    widths = {"query": embed, "key": options["kdim"] or embed, "value": options["vdim"] or embed}

    def odd(size: int) -> int:
        return size + 1 if drawn.chance(40) else 1 if drawn.chance(40) else size

    inputs = {}
    for name, width in widths.items():
        length = queries if name == "query" else keys
        lead = [odd(length)]
        if is_batched:
            lead.insert(0 if options["batch_first"] else 1, odd(batch))
        inputs[name] = drawn.normal(*lead, odd(width))
    given: dict[str, Any] = {"need_weights": drawn.chance(), "average_attn_weights": drawn.chance()}
    if drawn.chance(3):
        shape = (odd(batch), odd(keys)) if is_batched else (odd(keys),)
        given["key_padding_mask"] = _random_mask(drawn, shape)
    if drawn.chance(3):
        each = drawn.of([(), (odd((batch if is_batched else 1) * heads),)])
        given["attn_mask"] = _random_mask(drawn, (*each, odd(queries), odd(keys)))
        if given["attn_mask"].dim() == 2 and queries == keys and drawn.chance():
            given["attn_mask"] = torch.ones(queries, keys, dtype=torch.bool).triu(1)
            given["is_causal"] = True
    return inputs, given


def _random_mask(drawn: Drawn, shape: tuple[int, ...]) -> Tensor:
    """Bools (True = drop) or floats that are added, now and then of another kind."""
    drop = drawn.bools(*shape, share=drawn.of([0.3, 0.0, 0.9]))
    match drawn.of(["bool", "bool", "float", "finite", "integer"]):
        case "float":
            return torch.zeros(shape, dtype=torch.float64).masked_fill(drop, -torch.inf)
        case "finite":
            return drawn.normal(*shape)
        case "integer" if drawn.chance(10):
            return drop.long()
    return drop


def _answer(module: nn.Module, inputs: dict[str, Tensor], given: dict[str, Any], grad: bool) -> Any:
    """Output, weights and gradients; or the error."""
    leaves = {name: t.clone().requires_grad_(grad) for name, t in inputs.items()}
    try:
        with torch.set_grad_enabled(grad):
            output, weights = module(*leaves.values(), **given)
            has_grad = grad and output.requires_grad
            found = torch.autograd.grad(output.sum(), list(leaves.values())) if has_grad else ()
    except Exception as error:
        return error
    return output.detach(), None if weights is None else weights.detach(), list(found)


def _compare(mine: Any, right: Any, inputs: dict[str, Tensor], given: dict[str, Any]) -> None:
    """To rounding, but where torch has not-a-number: a row whose keys are all masked is 0 here."""
    (output, weights, grads), (their_output, their_weights, their_grads) = mine, right
    assert (weights is None) == (their_weights is None)
    assert output.isfinite().all(), "the drop-in's output is not finite"
    for name, one, other in (("output", output, their_output), ("weights", weights, their_weights)):
        if one is not None:
            assert one.shape == other.shape, f"{name}: {tuple(one.shape)}, and not {tuple(other.shape)}"
            _require_close(name, one, other, 1e-9)
    if grads and not their_output.isnan().any():
        for name, one, other in zip(inputs, grads, their_grads, strict=True):
            assert one.isfinite().all(), f"the gradient of {name} is not finite"
            _require_close(f"gradient of {name}", one, other, 1e-8)


def _require_close(name: str, one: Tensor, other: Tensor, tolerance: float) -> None:
    """Where torch has a number."""
    told = ~other.isnan()
    off = (one - other)[told].abs() - tolerance * other[told].abs()
    assert not off.numel() or float(off.max()) <= tolerance, f"{name}: off by {float(off.max())}"
