"""`Translate` and `ScoreText`: tables of texts in, the same tables with a column more out, as `Measure` works."""

from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from os import PathLike
from pathlib import Path
from typing import Any

from regard.corpus.settings import ONE_AT_A_TIME, extra_package
from regard.errors import ArgumentError

NULL = "there is no text: it is null"
TextRow = tuple[Any, ...]
"""The new columns of a text, and its error last."""


@dataclass(frozen=True)
class Translate:
    """Translate the sentences of a table: a column of translations is added, and a column `error`.

    It holds names and numbers alone, and loads the model where it is first called, once in a process. The sentences of
    a table are searched together.

    Args:
        model: the run of a translator, or a translator's folder in Hugging Face's format.
        text: the column of the sentences.
        into: the name of the new column.
        beam: hypotheses of the search; 1 is greedy.
        device: auto, cpu, cuda, cuda:N or mps.

    >>> Translate("runs/mine", into="german").into
    'german'
    """

    model: str | PathLike[str]
    _: KW_ONLY
    text: str = "text"
    into: str = "translation"
    beam: int = 5
    device: str = "auto"

    def __call__(self, table: Any) -> Any:
        """The `pyarrow.Table` with the two columns; null and an error where a sentence cannot be translated.

        Raises:
            ArgumentError: there is no text column, or the model is no translator.
            RunFolderError: the folder of the model cannot be read.
            MissingExtraError: pyarrow is not installed.
        """
        texts = _texts(table, self.text)
        from regard.tasks.generation.config import Beam
        from regard.tasks.translation.options import TranslationOptions

        refusal = f"{self.model} is a language model: name a translator"
        options = TranslationOptions(beam=Beam(self.beam))
        with ONE_AT_A_TIME:
            translator = _run_of(Path(self.model), self.device, translates=True, refusal=refusal)
            answers = iter(translator.translate_window([one for one in texts if one is not None], options))
        return _with(table, (self.into,), [None if one is None else _told(next(answers)) for one in texts])


@dataclass(frozen=True)
class ScoreText:
    """Score the texts of a table under a language model: columns log_probability (nats) and tokens are added.

    Each text is read by itself, so that its score has the same bits in any table.

    Args:
        model: the run of a language model, or its folder in Hugging Face's format.
        text: the column of the texts.
        device: auto, cpu, cuda, cuda:N or mps.

    >>> ScoreText("runs/book").text
    'text'
    """

    model: str | PathLike[str]
    _: KW_ONLY
    text: str = "text"
    device: str = "auto"

    def __call__(self, table: Any) -> Any:
        """The `pyarrow.Table` with the two columns and a column `error`; null where a text cannot be scored.

        Raises:
            ArgumentError: there is no text column, or the model is a translator.
            RunFolderError: the folder of the model cannot be read.
            MissingExtraError: pyarrow is not installed.
        """
        texts = _texts(table, self.text)
        refusal = f"{self.model} is a translator, which scores pairs: name a language model"
        with ONE_AT_A_TIME:
            model = _run_of(Path(self.model), self.device, translates=False, refusal=refusal)
            found = [None if one is None else _scored(model, one) for one in texts]
        return _with(table, ("log_probability", "tokens"), found)


def _scored(model: Any, text: str) -> TextRow:
    try:
        likelihood = next(iter(model.score([text])))
    except Exception as error:  # of any kind: one text must not end the work on the others
        return None, None, " ".join(str(error).split())[:1000]
    return likelihood.log_probability, likelihood.tokens, None


def _run_of(folder: Path, device: str, *, translates: bool, refusal: str) -> Any:
    """The model of a run, which is loaded once in a process, and again if its files change."""
    from regard.corpus.reading import state_of
    from regard.tasks.translation.translator import Translator

    model = _loaded_run(folder, device, state_of(folder))
    if isinstance(model, Translator) != translates:
        raise ArgumentError(refusal)
    return model


@lru_cache(maxsize=1)
def _loaded_run(folder: Path, device: str, files: object) -> Any:
    from regard.tasks.registry import task_of

    return task_of(folder).load(folder, device=device)


def _texts(table: Any, name: str) -> list[str | None]:
    extra_package("pyarrow", extra="measure")
    from regard.corpus.documents import documents_of

    return [one.text for one in documents_of(table, text=name, id="")]


def _told(answer: Any) -> TextRow:
    return (None, answer.problem) if answer.problem is not None else (answer.text, None)


def _with(table: Any, names: tuple[str, ...], rows: list[TextRow | None]) -> Any:
    """The table with the columns, and a column `error`; None is the row of a text that is null."""
    arrow = extra_package("pyarrow", extra="measure")
    kinds = {"log_probability": arrow.float64(), "tokens": arrow.int32()}
    null = (*(None for _ in names), NULL)
    table = table.drop_columns([name for name in (*names, "error") if name in table.column_names])
    for place, name in enumerate((*names, "error")):
        values = [(null if row is None else row)[place] for row in rows]
        table = table.append_column(name, arrow.array(values, kinds.get(name, arrow.string())))
    return table
