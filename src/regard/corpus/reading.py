"""A model reads documents, one forward pass each, and its heads become numbers."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.corpus.documents import Document
from regard.corpus.examples import STRONGEST, Examples
from regard.corpus.measured_document import LayerNumbers, MeasuredDocument
from regard.corpus.settings import MEANS, ONE_AT_A_TIME, MeasureSettings, Own, named_function
from regard.errors import ArgumentError, DataError, MissingExtraError, NotSeenError, RegardError, RunFolderError
from regard.files.model_folder import is_huggingface
from regard.maps.attention_map import AttentionMap
from regard.tasks.pictures.token_maps import TextMaps
from regard.tasks.registry import task_of
from regard.tasks.viewing.foreign_model import ForeignModel
from regard.tasks.viewing.own_model import OwnModel
from regard.tasks.viewing.places import Choice
from regard.tasks.viewing.view_input import ViewInput
from regard.views.html.contents import layer_names
from regard.watching.analysis.head_table import QueryValues, TopOfQueries, query_values_and_top
from regard.watching.analysis.tables import named

OF_THE_MODEL = (ArgumentError, RunFolderError, NotSeenError, MissingExtraError)
"""Errors that another document would meet too."""


ReadsTokens = ForeignModel | OwnModel


def measure_documents(
    measure: MeasureSettings, documents: Iterable[Document], examples: Examples | None = None
) -> Iterator[MeasuredDocument]:
    with ONE_AT_A_TIME:
        model = model_of(measure)
    for one in documents:
        with ONE_AT_A_TIME, _on_threads(measure.threads):
            found = _measured(measure, model, one, examples)
        yield found


def model_of(measure: MeasureSettings) -> ReadsTokens:
    """The model, which is loaded once in a process, and again if its files change."""
    folder = Path(measure.model)
    return _loaded(folder, measure.device, state_of(folder))


def state_of(folder: Path) -> object:
    """The files of a model's folder with their sizes and times: the key of a cache of loaded models."""
    files = sorted(path for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else []
    return tuple((str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files)


@lru_cache(maxsize=1)
def _loaded(folder: Path, device: str, files: object) -> ReadsTokens:
    if is_huggingface(folder):
        return ForeignModel(folder, device=device)
    return OwnModel(task_of(folder).load(folder, device=device))


@contextmanager
def _on_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@torch.no_grad()
def _measured(
    measure: MeasureSettings, model: ReadsTokens, document: Document, examples: Examples | None
) -> MeasuredDocument:
    if document.text is None:
        return MeasuredDocument(document.id, None, [], document.error)
    count = None
    try:
        ids = model.encode(document.text)[: measure.max_tokens]
        count = len(ids)
        if not ids:
            raise DataError("there is no token in it")
        attention = model.attend(ViewInput(tokens=tuple(ids)))
        layers, unknown = _of_layers(measure, attention, ids, document.id, examples), model.unknown_id
        return MeasuredDocument(document.id, count, layers, n_unknown=0 if unknown is None else ids.count(unknown))
    except OF_THE_MODEL:
        raise
    except Exception as error:  # of any kind: one document must not end the work on the others
        said = str(error) if isinstance(error, RegardError) else f"{type(error).__name__}: {error}"
        return MeasuredDocument(document.id, count, [], " ".join(said.split())[:1000])


def _of_layers(
    measure: MeasureSettings, attention: TextMaps, ids: list[int], name: str, examples: Examples | None
) -> list[LayerNumbers]:
    chosen, tokens = Choice(measure.layers, measure.heads).of(attention), torch.tensor(ids)
    layers, strong = [], []
    numbers = {path: layer.number for path, layer in layer_names(attention.maps).items()}
    if len(set(numbers.values())) < len(numbers):  # several kinds have a layer of one number
        numbers = {path: number for number, path in enumerate(attention.maps)}
    for path, given in chosen.maps.items():
        ((_, weights),) = named({path: given})
        most = STRONGEST if examples is not None else 0
        of_heads, by_query, top, keys = _numbers(measure, weights, tokens.to(weights.device), most)
        count = attention.maps[path].shape[0]
        heads = np.array([head % count for head in measure.heads] or range(count), np.int32)
        layers.append(LayerNumbers(numbers[path], heads, of_heads, keys))
        if examples is not None and top is not None:
            axes, size = attention.labels(path), weights.shape[-1]
            strong.append(partial(examples.add, name, layers[-1], by_query, top, axes, size))
    for add in strong:  # when all layers have been measured: a document with an error is no example
        add()
    return layers


def _numbers(
    measure: MeasureSettings, weights: AttentionMap, ids: Tensor, most: int
) -> tuple[Any, Mapping[str, QueryValues], TopOfQueries | None, list[list[int]] | None]:
    """Numbers (H, statistics) of a map (H, T, S), values by query and the `most` largest weights, and the top keys."""
    names = [name for name in MEANS if name in measure.statistics]
    by_query, top = query_values_and_top(weights, ids, names, most)
    means = {name: one.mean() for name, one in by_query.items()}
    keys = None
    if not {"received", "top_keys"}.isdisjoint(measure.statistics):
        received = weights.received()
        means["received"] = received.amax(-1) / received.sum(-1)
        if "top_keys" in measure.statistics:
            order = received.argsort(stable=True, dim=-1, descending=True)
            keys = order[:, : measure.keys].tolist()
    for name in measure.numbers:
        if name not in means:
            own = own_function(name)(weights, ids)
            if own.dim() == 2:
                by_query = {**by_query, name: QueryValues(own, torch.ones_like(own, dtype=torch.bool))}
                own = own.mean(-1)
            means[name] = own
    columns = [means[name].float().cpu().numpy() for name in measure.numbers]
    return np.stack([np.zeros(weights.shape[0], np.float32), *columns], -1)[:, 1:], by_query, top, keys


@lru_cache
def own_function(words: str) -> Own:
    try:
        found: Own = named_function(words)
    except Exception as error:
        raise ArgumentError(f"statistics: {words} is no function ({type(error).__name__}: {error})") from error
    return found
