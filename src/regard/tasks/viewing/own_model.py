"""A run of ours, looked at like any other model."""

from typing import Any

from regard.errors import ArgumentError
from regard.tasks.language_modelling.causal import LanguageModel
from regard.tasks.pictures.token_maps import TextMaps
from regard.tasks.text.codec import Codec
from regard.tasks.translation.translator import Translator
from regard.tasks.viewing.view_input import ViewInput


class OwnModel:
    doubt: str | None = None  # a run has the tokenizer of its model

    def __init__(self, model: Translator | LanguageModel, *, sequence: int = 0) -> None:
        if sequence != 0:
            raise ArgumentError(f"--sequence must be 0, got {sequence}: a run reads one sequence at a time")
        self.model: Any = model

    def encode(self, text: str) -> list[int]:
        if isinstance(self.model, LanguageModel):
            return self.model.language.prompt(text)
        raise ArgumentError("a translator of a run reads pairs: name a language model, or a folder of transformers")

    @property
    def unknown_id(self) -> int | None:
        return self._tokenizer.unknown_id

    def tokens(self, text: str) -> list[int]:
        return self._tokenizer.encode_batch([text])[0]

    @property
    def _tokenizer(self) -> Codec:
        model = self.model
        return model.source_tokenizer if isinstance(model, Translator) else model.tokenizer

    def attend(self, asked: ViewInput) -> TextMaps:
        if isinstance(self.model, Translator):
            if asked.text is None or any(one is not None for one in (asked.tokens, asked.image, asked.audio)):
                raise ArgumentError("a translator of a run reads text: give a sentence")
            found: TextMaps = self.model.attend(asked.text, target=asked.target)
            return found
        if asked.target is not None:
            raise ArgumentError("--target is for a translator; this is a language model")
        if asked.image is not None or asked.audio is not None:
            raise ArgumentError("a run reads text: give a sentence, and no image or sound")
        if asked.tokens is not None:
            self.model.tokenizer.label_of_each(asked.tokens)  # refuses those that it does not have
        seen: TextMaps = self.model.attend(asked.text if asked.tokens is None else asked.tokens)
        return seen
