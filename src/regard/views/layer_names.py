"""Short names of layers: the parts of their paths that differ."""

from collections.abc import Sequence


def short_names(paths: Sequence[str]) -> list[str]:
    """The parts of each path that differ from the others; one number alone is "layer" with that number.

    >>> short_names(["encoder.layer.0.attention.self", "encoder.layer.1.attention.self"])
    ['layer 0', 'layer 1']
    >>> short_names(["encoder.0.self_attention", "decoder.0.self_attention", "decoder.0.cross_attention"])
    ['encoder.0.self_attention', 'decoder.0.self_attention', 'decoder.0.cross_attention']
    >>> short_names(["model.layers.3.attn"])
    ['layer 3']
    """
    parts = [path.split(".") for path in paths]
    if len(set(paths)) == 1:
        numbers = [part for part in parts[0] if part.isdigit()]
        return [f"layer {numbers[0]}" if len(numbers) == 1 else paths[0]] * len(paths)
    shortest = min(map(len, parts))
    start = next((n for n in range(shortest) if len({one[n] for one in parts}) > 1), shortest)
    end = next((n for n in range(shortest - start) if len({one[-1 - n] for one in parts}) > 1), shortest - start)
    short = [one[start : len(one) - end] for one in parts]
    if shortest > 1 and all(len(one) == 1 and one[0].isdigit() for one in short):
        return [f"layer {one[0]}" for one in short]
    return [".".join(one) or path for one, path in zip(short, paths, strict=True)]
