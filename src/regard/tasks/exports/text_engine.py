"""CTranslate2 as the writer for a `LanguageModel`."""

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from regard.errors import ArgumentError, EngineError
from regard.tasks.exports.ctranslate2 import library, vocabulary_of
from regard.tasks.exports.ctranslate2_text import exported_text, text_config_of
from regard.tasks.exports.formats import SearchPrecision
from regard.tasks.exports.kept_export import Export, with_kept_export
from regard.tasks.exports.trained import PlainModel
from regard.tasks.generation.filters import Filter, Temperature, TopK, TopP
from regard.tasks.language_modelling.causal import LanguageModel
from regard.tasks.language_modelling.text_format import TextFormat
from regard.tasks.text.tokenizers import Tokenizer

MODEL_FILES = ("model.bin", "config.json", "vocabulary.json")
SEEDS = 2**32
"""CTranslate2 has so many seeds; larger ones count from 0 again."""


def refuse_text_run(run: Path) -> None:
    """Check that CTranslate2 can write for a run, before its model is loaded."""
    library()
    text_config_of(run)


class CTranslate2Writer:
    """A language model in CTranslate2."""

    def __init__(
        self,
        folder: Path,
        language: TextFormat,
        *,
        plain: PlainModel | None = None,
        device: torch.device,
        precision: SearchPrecision,
    ) -> None:
        assert isinstance(language.tokenizer, Tokenizer)
        self._plain = plain
        self._pieces = vocabulary_of(language.tokenizer)
        writable = set(language.writable)
        self._banned = [[piece] for number, piece in enumerate(self._pieces) if number not in writable]
        self._ends = [self._pieces[number] for number in language.end_ids]
        # CTranslate2 seeds a thread when it starts: each seed needs a model of its own, which is made of these bytes.
        self._make = partial(
            library().Generator, str(folder), files={name: (folder / name).read_bytes() for name in MODEL_FILES},
            device=device.type, device_index=device.index or 0, compute_type=precision,
            inter_threads=1, intra_threads=1,
        )  # fmt: skip
        try:
            self._generator = self._make()
        except (ValueError, RuntimeError) as error:
            raise ArgumentError(f"CTranslate2 cannot write on {device} in {precision}: {error}") from None

    def __str__(self) -> str:
        return f"CTranslate2 {library().__version__}: {self._generator.compute_type} on {self._generator.device}"

    def begin(self, seed: int) -> None:
        library().set_random_seed(seed % SEEDS)
        self._generator = self._make()

    def write(
        self, contexts: Sequence[Sequence[int]], *, most: int, filters: Sequence[Filter]
    ) -> Generator[tuple[int, int], None, None]:
        if self._plain and (reason := self._plain.why_changed()):
            raise ArgumentError(f"CTranslate2 {reason}: write with regard")
        prompts = [[self._pieces[number] for number in ids] for ids in contexts]
        try:
            with closing(
                self._generator.generate_tokens(
                    prompts, max_length=most, end_token=self._ends, suppress_sequences=self._banned or None,
                    **sampling_of(filters),
                )
            ) as steps:  # fmt: skip
                for step in steps:
                    yield step.batch_id, step.token_id
        except (RuntimeError, ValueError) as error:
            raise EngineError(f"CTranslate2 failed: {error}") from None


def sampling_of(filters: Sequence[Filter]) -> dict[str, Any]:
    """CTranslate2's options for some filters.

    >>> sampling_of([Temperature(0.5), TopP(0.9)])
    {'sampling_topk': 0, 'sampling_temperature': 0.5, 'sampling_topp': 0.9}
    """
    options: dict[str, Any] = {"sampling_topk": 0}
    order = (Temperature, TopK, TopP)
    places = [order.index(type(one)) if type(one) in order else len(order) for one in filters]
    if len(order) in places or places != sorted(set(places)):
        raise ArgumentError(f"CTranslate2 draws by a temperature, top-k and top-p, in this order; got {list(filters)}")
    for one in filters:
        match one:
            case Temperature():
                options["sampling_temperature"] = one.divisor
            case TopK():
                options["sampling_topk"] = one.k
            case TopP():
                options["sampling_topp"] = max(one.p, 1e-20)  # CTranslate2 reads it as float32
    return options


@contextmanager
def writing_by_ctranslate2(
    model: LanguageModel, run: Path, *, precision: SearchPrecision
) -> Iterator[CTranslate2Writer]:
    """Let CTranslate2 write for a language model loaded from `run`, by the export kept there.

    Args:
        model: a run's; its own model still evaluates and shows attention.
        run: the run folder.
        precision: as for `CTranslate2Writer`.

    Raises:
        ArgumentError: CTranslate2 does not have the device or the precision here, or the model has hooks, adapters or
            other layers than its configuration.
        MissingExtraError: ctranslate2 is not installed.
        RunFolderError: something else is in the place of the export.
        OSError: the disk is full.
    """
    trained = exported_text(model, text_config_of(run))
    make = partial(
        CTranslate2Writer, language=model.language, plain=trained.plain, device=model.device, precision=precision
    )
    model.writer = writer = with_kept_export(Export.of(trained), run, make)
    try:
        yield writer
    finally:
        model.writer = None
