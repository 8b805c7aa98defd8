"""`regard generate`: let a language model write."""

import sys
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

import tyro

from regard.cli.engines import EngineFlags
from regard.cli.loading import loading
from regard.cli.shared import Run, refuse_first, require_task
from regard.tasks.exports.formats import Engine, SearchPrecision
from regard.tasks.names import LANGUAGE_MODEL

if TYPE_CHECKING:
    from regard.tasks.generation.filters import Filter


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
    engine: Engine | None = None,
    precision: SearchPrecision | None = None,
) -> None:
    """Let a language model write on after a prompt; what it writes is printed as it comes.

    Args:
        run: the folder that `regard train language-model` made, or GPT-2's or Llama's in Hugging Face's format.
        prompt: what the text begins with; printed too.
        max_tokens: the most tokens to write.
        samples: how many texts to write; several are drawn together and printed when whole, with --- between them.
        temperature: below 1, likely tokens become likelier; 0 takes the most probable token each time.
        top_k: draw from this many most probable tokens; 0 draws from all.
        top_p: draw from the fewest most probable tokens whose probabilities sum to this.
        min_p: draw from tokens whose probability is at least this share of the highest.
        repetition_penalty: above 1, tokens that the text already has become less likely.
        stop: strings that end the text; it ends before the first of them.
        seed: seed of all random numbers; each engine draws others from it.
        device: auto, cpu, cuda, cuda:N or mps.
        engine: who writes, regard or ctranslate2, as for `translate`.
        precision: of the products of CTranslate2, as for `translate`.
    """
    refuse_first(
        (samples < 1, f"--samples must be at least 1, got {samples}"),
        (max_tokens < 1, f"--max-tokens must be at least 1, got {max_tokens}"),
        (not 0 <= temperature < inf, f"--temperature must be 0 or more, got {temperature}"),
        (top_k < 0, f"--top-k must be 0 or more, got {top_k}"),
        (not 0 < top_p <= 1, f"--top-p must be above 0 and at most 1, got {top_p}"),
        (not 0 <= min_p <= 1, f"--min-p must be from 0 to 1, got {min_p}"),
        (not 0 < repetition_penalty < inf, f"--repetition-penalty must be above 0, got {repetition_penalty}"),
        (seed < 0, f"--seed must be 0 or more, got {seed}"),
        ("" in stop, "--stop must be a text that is not empty"),
    )
    flags = EngineFlags(engine, precision, {"--min-p": min_p > 0, "--repetition-penalty": repetition_penalty != 1.0})
    require_task(run, LANGUAGE_MODEL)
    with loading():
        from regard.tasks.exports.text_engine import refuse_text_run
        from regard.tasks.language_modelling.causal import LanguageModel
        from regard.tasks.training.distributed.devices import find_device

    search = flags.chosen(find_device(device), partial(refuse_text_run, run))
    filters = _filters(temperature, top_k, top_p, min_p, repetition_penalty)
    model = LanguageModel.load(run, device=device)
    limits: dict[str, Any] = {"max_tokens": max_tokens, "filters": filters, "stop": stop, "seed": seed}
    with search.writing(model, run):
        if samples > 1:
            for number, text in enumerate(model.samples(prompt, count=samples, **limits)):
                print(*(["---"] if number else []), prompt + text, sep="\n", flush=True)
            return
        sys.stdout.write(prompt)
        for piece in model.generate(prompt, **limits):
            sys.stdout.write(piece)
            sys.stdout.flush()
        print(flush=True)


def _filters(temperature: float, top_k: int, top_p: float, min_p: float, repetition_penalty: float) -> list["Filter"]:
    """The filters that were asked for, in the order in which they are applied."""
    from regard.tasks.generation.filters import MinP, RepetitionPenalty, Temperature, TopK, TopP

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
