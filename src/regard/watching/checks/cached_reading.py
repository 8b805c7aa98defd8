"""Sequences that are read with a cache, part by part.

A cache is known by the name of its argument, and found in the output under that name, or as the only part of a tuple
beside the results. Models that count their positions by `start_pos` keep their cache inside.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from regard.models.one_stack import DecoderOnly, EncoderOnly
from regard.models.protocol import Seq2Seq
from regard.watching.checks.roles import is_huggingface_model, is_pair
from regard.watching.checks.runs import Sample, Side, SubjectRun, UnsupportedError
from regard.watching.checks.subject import Subject
from regard.watching.checks.told import IDS
from regard.watching.interference import STATES
from regard.watching.kept.arguments import cache_in

TAKEN = (*STATES, "kv_cache", "past", "past_kv", "layer_past", "state", "states", "hidden")
"""The arguments of caches and states."""
START = "start_pos"
"""The argument with the number of positions before, of models that keep their cache."""


def static_cache(model: Any, length: int) -> Any:
    """A cache of a fixed length, of transformers, for the models that say that they can take it."""
    takes_it = is_huggingface_model(model) and model._can_compile_fullgraph
    if not takes_it or is_pair(model.config):
        raise UnsupportedError("it takes no static cache")
    from transformers import StaticCache

    return StaticCache(config=model.config, max_cache_len=length + 3)  # (Three places stay free.)


def read_with_cache(
    subject: Subject, rows: Sequence[Sample], last: int, chunk: int, *, side: Side = "right", turned: bool = False,
    begin: Callable[[Any, int], Any] | None = None,
) -> SubjectRun:  # fmt: skip
    """Read rows with a cache: all but the `last` positions at once, padded on a side, and these `chunk` at a time;
    `turned` exchanges two rows of one length, and their caches, after the prompt."""
    model, ahead = subject.model, subject.ahead
    if ahead is None or subject.causal is False or subject.shared.get("use_cache") is False or subject.is_packed:
        raise UnsupportedError("it has no cache that is known")
    if is_huggingface_model(model) and subject.arguments.has_target and not subject.causal:
        raise UnsupportedError("its cache is that of its source")
    if isinstance(model, DecoderOnly | EncoderOnly | Seq2Seq):
        if len(rows) > 1 or chunk > 1 or isinstance(model, EncoderOnly) or begin is not None:
            raise UnsupportedError("it reads one row, one position at a time")
        return _by_steps(subject, rows[0], last)
    takes = inspect.signature(model.forward).parameters
    name = next((n for n in TAKEN if n in takes and takes[n].default is None), None)
    is_started = name is None and START in takes
    # (States of another sequence are handed over once, and then kept.)
    is_read = all(any(n in IDS for n in subject.inputs_of(of)) for of in subject.sequences)
    if not (name or is_started) or not (is_read or subject.made_up is not None):
        raise UnsupportedError("it has no cache that is known")
    starts = [len(row[ahead]) - last for row in rows]
    prompts = [subject.cut(row, slice(n)) for row, n in zip(rows, starts, strict=True)]
    whole = [subject.cut(row, slice(n, None)) for row, n in zip(rows, starts, strict=True)]
    (prompt, keeps), (ends, _) = subject.together(prompts, side), subject.together(whole, side)
    keep = torch.cat([keeps[ahead], keeps[ahead].new_ones(len(rows), last)], 1)
    masks = [n for n, tells in subject.tells.items() if tells.of == ahead and n in prompt]
    # (A model of one's own counts them by the mask of the caller's padding.)
    counts = masks and not is_huggingface_model(model) and not bool(subject.arguments.keeps[ahead].all())
    if "position_ids" not in prompt and not (counts and side == "right") and not bool(keep.all()):
        raise UnsupportedError("the positions of its padded rows cannot be given")
    own = [n for n in subject.inputs_of(ahead) if n in ends]
    width = max(starts)
    if turned:
        ends = {n: one.flip(0) if n in own else one for n, one in ends.items()}

    def step(cut: slice, past: Any) -> Any:
        given = dict(prompt)
        if cut.start:
            given |= {n: ends[n][:, cut.start - width : cut.stop - width] for n in own}
            # (Beside the cache of Mamba's models, a mask is of the new positions.)
            read = slice(cut.start if name == "cache_params" else 0, cut.stop)
            given |= {n: subject.tells[n].given(keep[:, read]) for n in masks}
        more: dict[str, Any] = {"use_cache": True} if "use_cache" in takes else {}
        if is_started:
            more[START] = cut.start
        elif past is not None:
            more[str(name)] = past
        return subject.called(given, **more)

    past = begin and begin(model, width + last)
    bounds = [0, *range(width, width + last, chunk), width + last]
    for cut in map(slice, bounds, bounds[1:]):
        output = step(cut, past)
        past = None if is_started else _cache_of(output, str(name))
        if turned and not cut.start:
            if past is None or not hasattr(past, "reorder_cache"):
                raise UnsupportedError("its cache does not reorder its rows")
            past.reorder_cache(torch.tensor([1, 0], device=keep.device))
    return SubjectRun(output, subject.places(len(rows), {**keeps, ahead: keep}, side))


def _cache_of(output: Any, name: str) -> Any:
    """The cache in an output: under its name, or the only part of a tuple that is no results."""
    found = None
    if isinstance(output, Mapping):
        found = output[name] if name in output else cache_in(output)
    elif isinstance(output, tuple) and len(output) > 1:
        others = [one for one in output[1:] if one is not None and not isinstance(one, Tensor)]
        found = others[0] if len(others) == 1 else output[1] if len(output) == 2 else None
    if found is None:
        raise UnsupportedError("its output has no cache")
    return found


def _by_steps(subject: Subject, row: Sample, last: int) -> SubjectRun:
    model: Any = subject.model
    assert subject.ahead is not None
    tokens, others = row[subject.ahead], [n for n in subject.sequences if n != subject.ahead]
    read = row[others[0]] if others else tokens[: len(tokens) - last]
    first = 0 if others else len(read)
    state, logits = model.start(read[None], torch.tensor([len(read)], device=tokens.device)), list[Tensor]()
    for token in tokens[first:]:
        found = model.step(state, token[None])
        state = found.state
        logits.append(found.logits)
    keeps = subject.together([row], "right")[1]
    return SubjectRun(pad(torch.stack(logits, 1), (0, 0, first, 0)), subject.places(1, keeps, "right"))
