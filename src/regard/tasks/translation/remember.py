"""Make the memory of a translator: read pairs once, and choose how much their places have to say."""

from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.errors import ArgumentError, DataError, NonFiniteError
from regard.models.fingerprint import fingerprint
from regard.models.key_lists import listed
from regard.models.token_memory import TokenMemory, Vote, read_by_output
from regard.tasks.telling import Tell, tell_nobody
from regard.tasks.text.pair_store import chunks
from regard.tasks.translation.corpus import RunPart, own_corpus
from regard.tasks.translation.memory_file import Remembered
from regard.tasks.translation.translator import Translator

TOGETHER_PAIRS = 128
SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
TEMPERATURES = (0.1, 0.2, 0.3, 0.5, 1.0)
"""The temperatures tried, as parts of the mean squared distance of the keys that vote."""
MOST_ASKED = 8_192
"""At most so many places of validation pairs, evenly spread, decide about share and temperature."""
LEAST_LISTED = 1 << 15
"""Keys are put into lists if there are so many; to look at every one of fewer takes little."""


CutSides = tuple[Sequence[Any], Sequence[Any]]
"""The tokens of the sources and of the targets of some pairs."""


class Places(NamedTuple):
    """The input of the output layer at each place of some targets, and the token there."""

    read: Float[Tensor, "E D"]
    tokens: Int[Tensor, " E"]
    pairs: Int[Tensor, " E"]


def remember_for(
    translator: Translator,
    run: Path | str,
    *,
    data: Iterable[tuple[str, str]] | None = None,
    valid: Iterable[tuple[str, str]] | None = None,
    tell: Tell = tell_nobody,
) -> Remembered:
    """Read pairs into a memory, and choose its vote by the loss on other pairs.

    Args:
        translator: the one that reads and will ask; it was loaded from `run`, without a memory or an ensemble.
        run: the run folder, or a translator's in Hugging Face's format.
        data: the pairs to remember, such as `read_pairs` gives them; None for those that the run was trained on.
        valid: pairs that should not be among them; None for those of the run.
        tell: is called with how many pairs have been read.

    Raises:
        ArgumentError: pairs of the run are wanted, and there is no run; or the translator has a memory already.
        DataError: there is no pair, or a pair cannot be read.
        NonFiniteError: the model has weights that are not finite.
        RunFolderError: the run is cut short.
    """
    if not isinstance(translator.model.output, nn.Linear):
        raise ArgumentError("a memory is made by a model without one: load the translator without memories")
    asked = _cut(translator, run, valid, part="valid")
    cut = _cut(translator, run, data, part="train")
    places = _places(translator, cut, tell)
    if not places.read.half().isfinite().all():
        raise NonFiniteError("the model's output layer reads numbers that are not finite, or too large for a memory")
    # The keys are rounded as they will be read from a file, so that both answer alike.
    keys, lists = places.read.half(), None
    if len(keys) >= LEAST_LISTED:
        order, lists = listed(keys)
        keys, places = keys[order], places._replace(tokens=places.tokens[order], pairs=places.pairs[order])
    sides = zip((translator.source_tokenizer, translator.target_tokenizer), cut, strict=True)
    texts = zip(*([codec.decode([*map(int, one)]) for one in side] for codec, side in sides), strict=True)
    memory = TokenMemory(keys, places.tokens, places.pairs, list(texts), lists)
    vote, figures = choose_vote(translator.model.output, memory, _places(translator, asked, tell_nobody))
    return Remembered(memory, vote, fingerprint(translator.model), figures)


def _cut(
    translator: Translator, run: Path | str, given: Iterable[tuple[str, str]] | None, *, part: RunPart
) -> CutSides:
    """The tokens of given pairs; without any, of a part of the run's own."""
    if given is not None:
        pairs = list(given)
        sources = translator.source_tokenizer.encode_batch([source for source, _ in pairs])
        cut: CutSides = sources, translator.target_tokenizer.encode_batch([target for _, target in pairs])
    else:
        corpus = own_corpus(Path(run), part)
        store = corpus.train if part == "train" else corpus.valid
        cut = [store.source(i) for i in range(len(store))], [store.target(i) for i in range(len(store))]
    fitting = [i for i, (a, b) in enumerate(zip(*cut, strict=True)) if _fits(translator, len(a), len(b))]
    if not fitting:
        raise DataError(f"there is no pair to {'remember' if part == 'train' else 'choose by how much is remembered'}")
    return [cut[0][i] for i in fitting], [cut[1][i] for i in fitting]


def _fits(translator: Translator, source: int, target: int) -> bool:
    most = translator.model.max_length
    return source > 0 and (most is None or max(source, target) < most)


@torch.no_grad()
def choose_vote(output: nn.Linear, memory: TokenMemory, asked: Places) -> tuple[Vote, dict[str, float]]:
    """The share and the temperature with the lowest loss where other targets stand, and that loss."""
    every = max(-(-len(asked.tokens) // MOST_ASKED), 1)
    read, tokens = asked.read[::every], asked.tokens[::every]
    own = torch.cat(
        [
            output(rows).float().log_softmax(-1).gather(-1, right[:, None])[:, 0]
            for rows, right in zip(read.split(512), tokens.split(512), strict=True)
        ]
    )
    distances, places = memory.nearest(read, Vote().count)
    is_right, mean = memory.tokens[places] == tokens[:, None], max(float(distances[distances.isfinite()].mean()), 1e-6)
    tried = []
    for part, share in product(TEMPERATURES, SHARES):
        remembered = ((-distances / (part * mean)).softmax(-1) * is_right).sum(-1)
        loss = -((1 - share) * own.exp() + share * remembered).log().mean()
        tried.append((float(loss), Vote(share, part * mean)))
    lowest, vote = min(tried, key=lambda one: one[0])
    return vote, {"without": -float(own.mean()), "with": lowest}


@torch.no_grad()
def _places(translator: Translator, cut: CutSides, tell: Tell) -> Places:
    """The input of the output layer at each target token of these pairs."""
    found: list[Places] = []
    sources, targets = cut
    done = 0
    for rows in chunks(sorted(range(len(sources)), key=lambda i: len(sources[i]) + len(targets[i])), TOGETHER_PAIRS):
        tell("pairs read", done, len(sources))
        done += len(rows)
        batch = translator.collate([sources[i] for i in rows], [targets[i] for i in rows])
        read = read_by_output(translator.model, batch.source, batch.source_lengths, batch.target_input)
        length = batch.target_output.shape[1]
        stands = torch.arange(length, device=translator.device) < batch.target_lengths[:, None]
        numbers = torch.tensor(rows, device=translator.device)[:, None].expand(-1, length)
        found.append(Places(read[stands], batch.target_output[stands], numbers[stands]))
    return Places(*(torch.cat(parts) for parts in zip(*found, strict=True)))
