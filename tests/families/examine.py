"""One architecture, watched and enabled, against its own weights: a row of docs/families.md."""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

import regard
from regard.errors import RegardError
from regard.watching import measure_mixing
from regard.watching.report import STREAMS
from regard.watching.watch import Seen
from tests.families.architectures import architectures, build, inputs_for, library, tiny_config
from tests.families.matching import compared

Row = dict[str, Any]
NAME = "eager_attention_forward"
"""What transformers calls the eager attention of each of its models."""


def examine(key: str) -> Row:
    transformers = library()
    versions = {"torch": torch.__version__.split("+")[0], "transformers": transformers.__version__}
    row: Row = {"architecture": key, "model": architectures()[key], "versions": versions}
    try:
        kind = getattr(transformers, row["model"])
        config = tiny_config(key)
        model = build(kind, config)
    except Exception as error:
        return {**row, "why": f"not built: {told(error)}"}
    try:
        inputs = inputs_for(key, model)
    except Exception as error:
        return {**row, "why": f"not run: {told(error)}"}
    row["inputs"] = {name: list(x.shape) if isinstance(x, Tensor) else str(x) for name, x in inputs.items()}
    row |= watched(model, inputs)
    maps: list[regard.AttentionMap] = row.pop("_maps")
    own = own_weights(model, kind, key, inputs)
    row |= own.pop("_row")
    row["default"] = implementations(model)
    row |= compared(maps, own["weights"], inputs.get("attention_mask"))
    if row["wrong"]:
        row["error_float64"] = in_float64(model, own, inputs)
    if own["model"] is not None:
        with torch.no_grad():
            row["kernels"] = relative(tensors(run(model, inputs)), tensors(own["output"]), inputs.get("attention_mask"))
        row |= {f"eager_{k}": v for k, v in in_eager(own, inputs).items()}
    row["enable"] = enabled(model, own, inputs)
    return row


def told(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def run(model: nn.Module, inputs: dict[str, Any], **more: Any) -> Any:
    torch.manual_seed(0)
    return model(**inputs, **more)


def tensors(output: Any) -> list[Tensor]:
    return [x for x in tree_flatten(plain(output))[0] if isinstance(x, Tensor)]


def plain(x: Any) -> Any:
    """Model outputs as dictionaries, without the attentions, and caches left out."""
    if isinstance(x, dict):
        return {k: plain(v) for k, v in x.items() if "attention" not in k and not k.endswith("key_values")}
    if isinstance(x, list | tuple):
        return [plain(v) for v in x]
    return x


def same_bits(one: Any, other: Any) -> bool:
    pairs = list(zip(tensors(one), tensors(other), strict=True))
    return bool(pairs) and all(
        a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.nan_to_num(3.0), b.nan_to_num(3.0))
        for a, b in pairs
    )


def implementations(model: nn.Module) -> str:
    found = Counter(m.config._attn_implementation for m in model.modules() if hasattr(m, "config")
                    and hasattr(m.config, "_attn_implementation"))  # fmt: skip
    return ", ".join(sorted(str(name) for name in found))


def watched(model: nn.Module, inputs: dict[str, Any]) -> Row:
    with torch.no_grad():
        before, again = run(model, inputs), run(model, inputs)
        with regard.watch(model, verify=True) as seen:
            during = run(model, inputs)
    errors = [call.error for call in seen.calls if isinstance(call.error, float)]
    return {
        "repeatable": same_bits(before, again),
        "bits": same_bits(before, during),
        "nan": any(bool(x.isnan().any()) for x in tensors(before) if x.is_floating_point()),
        "maps": len(seen),
        "how": dict(Counter(call.how for call in seen.calls if call.map is not None)),
        "rebuilt": max(errors, default=None),
        "missed": reasons(seen, [*seen.report().missed, *seen.report().mixers]),
        "others": reasons(seen, getattr(seen.report(), "others", ())),
        "mixing": mixing(seen, lambda: run(model, inputs)),
        "_maps": seen.maps,
    }


def mixing(seen: Seen, again: Callable[[], Any]) -> dict[str, Any]:
    """The modules that mix tokens, by kind, and how many of them are read: by their calls, and by another run."""
    with suppress(RegardError):
        measure_mixing(seen, again)
    kinds = seen.report().kinds
    read = {name for name, _ in seen} | {path for path, kind in kinds.items() if kind == STREAMS}
    return {"read": len(read & kinds.keys()), "all": len(kinds), "kinds": dict(Counter(kinds.values())),
            "unread": dict(Counter(kind for path, kind in kinds.items() if path not in read))}  # fmt: skip


def reasons(seen: Seen, told: Iterable[tuple[str, str]]) -> list[str]:
    """What the report names as not seen, or as no attention, modules of one kind counted together."""
    found: Counter[str] = Counter()
    for path, reason in told:
        module = seen.modules.get(path.split(", call")[0])
        found[f"{type(module).__name__ if module is not None else path}: {reason}"] += 1
    return [f"{reason} (x {n})" if n > 1 else reason for reason, n in found.items()]


@contextmanager
def recorded() -> Iterator[list[Tensor]]:
    """Collect the weights of every eager attention that a model of transformers runs."""
    collected: list[Tensor] = []
    replaced: list[tuple[Any, Any]] = []

    def around(function: Any) -> Any:
        def attend(*args: Any, **kwargs: Any) -> Any:
            output = function(*args, **kwargs)
            if isinstance(output, tuple) and len(output) > 1 and isinstance(output[1], Tensor):
                collected.append(output[1])
            return output

        return attend

    for name, module in list(sys.modules.items()):
        if name.startswith("transformers.models.") and hasattr(module, NAME):
            replaced.append((module, getattr(module, NAME)))
            setattr(module, NAME, around(getattr(module, NAME)))
    try:
        yield collected
    finally:
        for module, function in replaced:
            setattr(module, NAME, function)


def attentions(output: Any) -> list[Any]:
    found: list[Any] = []
    if isinstance(output, dict):
        for name, value in output.items():
            inner = [x for x in tree_flatten(value)[0] if isinstance(x, Tensor | regard.AttentionMap)]
            found += inner if "attentions" in name else attentions(value)
    return found


def own_weights(of: nn.Module, kind: Any, key: str, inputs: dict[str, Any]) -> dict[str, Any]:
    own: dict[str, Any] = {"model": None, "weights": [], "_row": {}}
    row = own["_row"]
    try:
        model = build(kind, tiny_config(key), "eager")
        model.load_state_dict(of.state_dict())
        own["model"] = model
        with torch.no_grad(), recorded() as ran:
            try:
                output = run(model, inputs, output_attentions=True)
                reported = attentions(output)
            except Exception as error:
                row["reports"] = told(error)
                ran.clear()
                output, reported = run(model, inputs), []
    except Exception as error:
        row["why_no_eager"] = told(error)
        return own
    own["output"] = output
    row["no_weights"] = len([x for x in reported if not are_weights(x)])
    reported = [x for x in reported if are_weights(x)]
    known = {x.data_ptr() for x in reported}
    more = [x for x in ran if are_weights(x) and x.data_ptr() not in known and not any(equal(x, y) for y in reported)]
    own["reported"] = reported
    own["weights"] = [*reported, *more]
    row |= {"reported": len(reported), "run": len(reported) + len(more)}
    return own


def are_weights(x: Tensor) -> bool:
    """Whether a tensor that a model calls attentions can be: some models report states, or what they attended to."""
    if x.dim() < 3 or not x.is_floating_point() or not x.numel():
        return False
    return bool((x >= 0).all()) and float(x.sum(-1).max()) < 1.001


def equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)


def in_float64(model: nn.Module, own: dict[str, Any], inputs: dict[str, Any]) -> float | str | None:
    """The error when all is computed in float64, which tells rounding from what is wrong."""
    try:
        exact = {k: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for k, x in inputs.items()}
        with torch.no_grad(), recorded() as ran:
            try:
                output = run(own["model"].double(), exact, output_attentions=True)
            except TypeError:
                output = run(own["model"], exact)
        with torch.no_grad(), regard.watch(model.double()) as seen:
            run(model, exact)
        weights = [x for x in (attentions(output) or ran) if are_weights(x)]
        return compared(seen.maps, weights, inputs.get("attention_mask"))["error"]
    except Exception as error:
        return told(error)
    finally:
        model.float(), own["model"].float()


def in_eager(own: dict[str, Any], inputs: dict[str, Any]) -> Row:
    found = watched(own["model"], inputs)
    maps = found.pop("_maps")
    both = {**found, **compared(maps, own["weights"], inputs.get("attention_mask"))}
    return {k: both[k] for k in ("bits", "maps", "matched", "error", "wrong", "without_a_map", "missed")}


def enabled(model: nn.Module, own: dict[str, Any], inputs: dict[str, Any]) -> Row:
    """Whether `enable` takes the model, and how far its outputs, maps and gradients are then from eager's."""
    try:
        change = regard.huggingface.enable(model)
    except RegardError as error:
        return {"taken": False, "why": " ".join(str(error).split())}
    except Exception as error:
        return {"taken": False, "wrong": True, "why": f"not a RegardError: {told(error)}"}
    row: Row = {"taken": True, "left": list(change.left)}
    try:
        with torch.no_grad():
            output = run(model, inputs)
            try:
                with_maps = run(model, inputs, output_attentions=True)
            except Exception as error:
                row["reports"] = told(error)
                with_maps = None
        if own["model"] is None:
            return row
        with torch.no_grad():
            expected = run(own["model"], inputs)
        keep = inputs.get("attention_mask")
        row["error"] = relative(tensors(output), tensors(expected), keep)
        maps = attentions(with_maps)
        row["lazy"] = sum(isinstance(m, regard.AttentionMap) for m in maps)
        row["maps"] = len(maps)
        row |= {"maps_" + k: v for k, v in compared(
            [m for m in maps if isinstance(m, regard.AttentionMap)], own.get("reported", []), keep).items()
            if k in ("error", "wrong", "without_a_map")}  # fmt: skip
        row["gradient"] = gradients(model, own["model"], inputs)
    except Exception as error:
        row["why"] = told(error)
        row["wrong"] = True
    finally:
        change.disable()
    return row


def real(x: Tensor, keep: Tensor | None) -> Tensor:
    """What does not belong to a query of padding, which may have no key: it is 0 here and even in eager."""
    return x[keep.bool()] if keep is not None and x.shape[: keep.dim()] == keep.shape else x


def relative(ours: list[Tensor], own: list[Tensor], keep: Tensor | None) -> float | str | None:
    worst: float | None = None
    for one, other in zip(ours, own, strict=True):
        one, other = real(one, keep), real(other, keep)
        if one.shape != other.shape:
            return float("inf")
        if one.is_floating_point() and one.numel():
            if bool(other.isnan().any()):
                return "NaN in eager"
            one, other = one.nan_to_num(0.0).clamp(-1e30, 1e30), other.nan_to_num(0.0).clamp(-1e30, 1e30)
            scale = other.abs().max().clamp(min=1e-6)
            worst = max(worst or 0.0, float((one - other).abs().max() / scale))
    return worst


def gradients(model: nn.Module, eager: nn.Module, inputs: dict[str, Any]) -> float | str | None:
    found = []
    for part in (model, eager):
        part.zero_grad()
        keep = inputs.get("attention_mask")
        learned = [real(x, keep) for x in tensors(run(part, inputs)) if x.requires_grad and x.is_floating_point()]
        if not learned:
            return "no output has a gradient"
        generator = torch.Generator().manual_seed(11)
        loss = sum((x * torch.randn(x.shape, generator=generator)).sum() for x in learned)
        assert isinstance(loss, Tensor)
        try:
            loss.backward()
        except Exception as error:
            return told(error)
        found.append([p.grad.clone() if p.grad is not None else torch.zeros_like(p) for p in part.parameters()])
        part.zero_grad()
    largest = max((float(g.abs().max()) for g in found[1] if g.numel()), default=0.0)
    difference = max((float((a - b).abs().max()) for a, b in zip(*found, strict=True) if a.numel()), default=0.0)
    return difference / max(largest, 1e-12) if largest == largest else "NaN in eager"
