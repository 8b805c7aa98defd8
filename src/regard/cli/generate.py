"""`regard generate`: let a language model write."""

import os
import sys
from dataclasses import KW_ONLY, dataclass
from functools import partial
from itertools import count
from math import inf
from typing import TYPE_CHECKING, Any

import tyro

from regard.cli.loading import loading
from regard.cli.shared import Command, Device, PositionalPath, below, refuse_first, require_task
from regard.tasks.config import LANGUAGE_MODEL

if TYPE_CHECKING:
    from regard.tasks.generation.filters import Filter
    from regard.tasks.language_modelling.causal import LanguageModel


@dataclass(frozen=True, slots=True)
class GenerateCommand(Command):
    """Let a language model write on after a prompt; the text is printed as it comes."""

    run: PositionalPath
    """the folder that `regard train language-model` made, or GPT-2's or Llama's in Hugging Face's format."""
    prompt: tyro.conf.Positional[str] = ""
    """the beginning of the text; printed too."""
    _: KW_ONLY
    max_tokens: int = 200
    """the most tokens to write."""
    samples: int = 1
    """how many texts to write; several are drawn together and printed when whole, with --- between them."""
    temperature: float = 1.0
    """below 1, likely tokens become likelier; 0 takes the most probable token each time."""
    top_k: int | None = None
    """draw from this many most probable tokens; from all unless given."""
    top_p: float = 1.0
    """draw from the fewest most probable tokens whose probabilities sum to this."""
    stop: tuple[str, ...] = ()
    """strings that end the text; it ends before the first of them."""
    seed: int = 0
    """seed of all random numbers."""
    device: Device = "auto"

    def check(self) -> None:
        refuse_first(
            below("--samples", self.samples),
            below("--max-tokens", self.max_tokens),
            (not 0 <= self.temperature < inf, f"--temperature must be 0 or more, got {self.temperature}"),
            below("--top-k", self.top_k),
            (not 0 < self.top_p <= 1, f"--top-p must be above 0 and at most 1, got {self.top_p}"),
            (not 0 <= self.seed < 2**64, f"--seed must be from 0 to 2^64 - 1, got {self.seed}"),
            ("" in self.stop, "--stop must be a text that is not empty"),
        )
        require_task(self.run, LANGUAGE_MODEL)

    def work(self) -> None:
        with loading():
            from regard.tasks.language_modelling.causal import LanguageModel
            from regard.tasks.text.lines import decoded

        prompt = decoded("the prompt", os.fsencode(self.prompt))
        model = LanguageModel.load(self.run, device=self.device)
        limits: dict[str, Any] = {"max_tokens": self.max_tokens, "stop": self.stop, "seed": self.seed}
        limits["filters"] = self._filters()
        cut_off = count(1)
        limits["cut_off"] = partial(next, cut_off)
        self._write(model, prompt, limits)
        if (cut := next(cut_off) - 1) and model.ends_texts:
            print(f"texts cut off by the limit of their tokens: {cut}; raise --max-tokens", file=sys.stderr)

    def _write(self, model: "LanguageModel", prompt: str, limits: dict[str, Any]) -> None:
        if self.samples > 1:
            for number, text in enumerate(model.samples(prompt, count=self.samples, **limits)):
                print(*(["---"] if number else []), prompt + text, sep="\n", flush=True)
            return
        sys.stdout.write(prompt)
        for piece in model.generate(prompt, **limits):
            sys.stdout.write(piece)
            sys.stdout.flush()
        print(flush=True)

    def _filters(self) -> list["Filter"]:
        from regard.tasks.generation.filters import Temperature, TopK, TopP

        filters: list[Filter] = []
        if self.temperature == 0.0:
            return [TopK(1)]
        if self.temperature != 1.0:
            filters.append(Temperature(self.temperature))
        if self.top_k is not None:
            filters.append(TopK(self.top_k))
        if self.top_p != 1.0:
            filters.append(TopP(self.top_p))
        return filters
