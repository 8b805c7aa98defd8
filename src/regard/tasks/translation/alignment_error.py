"""How well a translator's attention aligns words, compared with links people drew."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest

import torch

from regard.errors import DataError
from regard.tasks.text.batches import collate
from regard.tasks.text.codec import Marks
from regard.tasks.text.links import GoldLinks, Links, check_links
from regard.tasks.text.pair_store import chunks
from regard.tasks.translation.aligned_corpus import CutPair, cut_pairs
from regard.tasks.translation.alignments import AlignmentOf
from regard.tasks.translation.made_model import Model
from regard.tasks.translation.translator import WINDOW_LINES, Translator

TOGETHER_PAIRS = 32


def alignment_error_rate(found: Iterable[Links], gold: Iterable[GoldLinks]) -> float:
    r"""AER in percent, 0..100, over all pairs of a corpus together; lower is better.

    $$\mathrm{AER} = 1 - \frac{|A \cap S| + |A \cap P|}{|A| + |S|}$$

    Args:
        found: A, the links found in each pair.
        gold: S and P, those that people drew.

    Source: Och and Ney 2003, "A systematic comparison of various statistical alignment models", section 5.

    >>> gold = GoldLinks(frozenset({(0, 0), (1, 1)}), frozenset({(0, 0), (1, 1), (2, 1)}), "x:1")
    >>> alignment_error_rate([frozenset({(0, 0), (2, 1), (2, 2)})], [gold])
    40.0
    """
    right, total = links_counted(found, gold)
    if not total:
        raise DataError("there is no link in the alignment data, and none was found")
    return 100.0 * (1 - right / total)


def links_counted(found: Iterable[Links], gold: Iterable[GoldLinks]) -> tuple[int, int]:
    """|A and S| + |A and P|, and |A| + |S|: both can be added up over parts of a corpus."""
    right, total = 0, 0
    for links, (sure, possible, _) in zip(found, gold, strict=True):
        right += len(links & sure) + len(links & possible)
        total += len(links) + len(sure)
    return right, total


def words_aligned(translator: Translator, pairs: Iterable[tuple[str, str]], alignment: AlignmentOf) -> Iterator[Links]:
    """Each target word with the source word its tokens attend to most while the target is forced.

    Spaces part words. Pairs are read a window at a time, so that memory does not grow with their number.
    """
    model, codecs = translator.model, (translator.source_tokenizer, translator.target_tokenizer)
    done = 0
    for window in chunks(pairs, WINDOW_LINES):
        cut = cut_pairs(window, codecs)
        for number, (source, target, *_) in enumerate(cut, start=done + 1):
            longest = max(len(source), len(target)) + 1
            if model.max_length is not None and longest > model.max_length:
                raise DataError(f"pair {number}: {longest} tokens, and the model takes {model.max_length} at most")
        found: dict[int, Links] = {}
        for rows in chunks(sorted(range(len(cut)), key=lambda n: len(cut[n].source)), TOGETHER_PAIRS):
            some = links_found(model, [cut[n] for n in rows], alignment, marks=(codecs[0].marks, codecs[1].marks))
            found.update(zip(rows, some, strict=True))
        yield from (found[n] for n in range(len(cut)))
        done += len(cut)


def symmetrised(forward: Links, backward: Links) -> Links:
    """The links both directions found, grown by those of one that touch them: grow-diagonal.

    A link of one direction is added if it stands beside a link, also diagonally, and one of its words has no link yet.

    Args:
        forward: links of source and target words, where each target word has one.
        backward: the same links of source and target words, where each source word has one.

    Source: Koehn, Och and Marcu 2003, section 4.3; Koehn et al. 2005 name it so.

    >>> sorted(symmetrised(frozenset({(0, 0), (1, 1), (1, 2), (5, 9)}), frozenset({(0, 0), (1, 1), (2, 2)})))
    [(0, 0), (1, 1), (1, 2), (2, 2)]
    """
    grown, either = set(forward & backward), forward | backward
    while True:
        words, targets = {source for source, _ in grown}, {target for _, target in grown}
        added = {
            (source, target)
            for source, target in either - grown
            if (source not in words or target not in targets)
            and any((source + i, target + j) in grown for i in (-1, 0, 1) for j in (-1, 0, 1))
        }
        if not added:
            return frozenset(grown)
        grown.add(min(added))


def links_found(
    model: Model, pairs: Sequence[CutPair], alignment: AlignmentOf, *, marks: tuple[Marks, Marks] = (Marks(), Marks())
) -> list[Links]:
    """The same of pairs that are tokens already, in one pass of a model in evaluation mode."""
    sides = [pair.source for pair in pairs], [pair.target for pair in pairs]
    batch, device = collate(*sides, source_marks=marks[0], target_marks=marks[1]), next(model.parameters()).device
    with torch.no_grad():
        maps = model.attend(*(part.to(device) for part in batch[:3]))
        weights = alignment.of(maps, model.alignment_names).cpu()
    return [_most_looked_at(row, pair) for row, pair in zip(weights, pairs, strict=True)]


def _most_looked_at(weights: torch.Tensor, pair: CutPair) -> Links:
    rows, columns = (torch.tensor(words, dtype=torch.long) for words in (pair.target_words, pair.source_words))
    sums = weights.new_zeros([int(words.max()) + 1 if len(words) else 0 for words in (rows, columns)])
    if not sums.numel():
        return frozenset()
    places = [(words >= 0).nonzero()[:, 0] for words in (rows, columns)]
    block = weights[places[0]][:, places[1]]
    sums.index_put_((rows[places[0]][:, None], columns[places[1]][None]), block, accumulate=True)
    return frozenset((word, of) for of, word in enumerate(sums.argmax(-1).tolist()))


def error_of(
    translator: Translator, pairs: Sequence[tuple[str, str]], gold: Sequence[GoldLinks], alignment: AlignmentOf
) -> float:
    """The alignment error rate of a translator on pairs whose links are known."""
    for pair, links in zip_longest(pairs, gold):
        if pair is None or links is None:
            raise DataError(f"expected a line of links for each pair, got {len(gold):,} lines and {len(pairs):,} pairs")
        check_links(pair[0], pair[1], links)
    return alignment_error_rate(words_aligned(translator, pairs, alignment), gold)
