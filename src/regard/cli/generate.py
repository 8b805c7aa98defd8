"""`regard generate`: what a language model writes."""

import sys
from typing import Any

import tyro

from regard.cli.shared import Run
from regard.errors import ArgumentError
from regard.generation.filters import Filter, MinP, RepetitionPenalty, Temperature, TopK, TopP
from regard.tasks.language_modelling.causal import LanguageModel


def generate(
    run: Run,
    prompt: tyro.conf.Positional[str] = "",
    /,
    *,
    max_tokens: int = 200,
    samples: int = 1,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    stop: tuple[str, ...] = (),
    seed: int = 0,
    device: str = "auto",
) -> None:
    """Let a language model write on after a prompt; what it writes is printed as it comes.

    Args:
        run: the folder that `regard train language-model` made, or GPT-2's or Llama's in Hugging Face's format.
        prompt: what the text begins with; printed too.
        max_tokens: the most tokens to write.
        samples: how many texts to write; several are drawn together and printed when whole, --- between them.
        temperature: below 1 the likely becomes likelier; 0 takes the most probable token each time.
        top_k: draw from so many most probable tokens; 0 from all.
        top_p: draw from the fewest most probable tokens that come to this probability.
        min_p: draw from tokens at least so many times as probable as the most probable one.
        repetition_penalty: above 1, tokens that the text has already become less likely.
        stop: strings at which the text ends, before them.
        seed: everything random follows from it.
        device: auto, cpu, cuda, cuda:N or mps.
    """
    if samples < 1:
        raise ArgumentError(f"samples must be at least 1, got {samples}")
    filters = _filters(temperature, top_k, top_p, min_p, repetition_penalty)
    writer = LanguageModel.load(run, device=device)
    limits: dict[str, Any] = {"max_tokens": max_tokens, "filters": filters, "stop": stop, "seed": seed}
    if samples > 1:
        for number, text in enumerate(writer.samples(prompt, count=samples, **limits)):
            print(*(["---"] if number else []), prompt + text, sep="\n", flush=True)
        return
    sys.stdout.write(prompt)
    for piece in writer.generate(prompt, **limits):
        sys.stdout.write(piece)
        sys.stdout.flush()
    print(flush=True)


def _filters(temperature: float, top_k: int, top_p: float, min_p: float, repetition_penalty: float) -> list[Filter]:
    """Those that were asked for, in the order in which they are applied."""
    filters: list[Filter] = []
    if repetition_penalty != 1.0:
        filters.append(RepetitionPenalty(repetition_penalty))
    if temperature == 0.0:
        return [*filters, TopK(1)]
    if temperature != 1.0:
        filters.append(Temperature(temperature))
    if top_k:
        filters.append(TopK(top_k))
    if top_p != 1.0:
        filters.append(TopP(top_p))
    if min_p:
        filters.append(MinP(min_p))
    return filters
