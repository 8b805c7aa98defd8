"""The attention of served models: views for the page, and numbers; both are kept for the next question."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec
import torch

from regard.maps.attention_map import AttentionMap
from regard.serving.served import Served
from regard.serving.shapes import AttentionNumbers, AttentionQuestion, LookedAt, MapNumbers
from regard.serving.worker import Refused
from regard.tasks.pictures.save import page_example
from regard.tasks.pictures.token_maps import TextMaps
from regard.views.html.numbers import as_heads
from regard.views.labels import axis_labels
from regard.views.widget.replies import Replier, Reply
from regard.views.widget.skeleton import skeleton

MOST_WEIGHTS = 2**20
"""The most weights of rows in an answer."""


class RecentViews:
    def __init__(self, models: Mapping[str, Served]) -> None:
        self._models = models
        self._seen, self._views = lru_cache(16)(self._look), lru_cache(16)(self._drawn)

    def seen(self, asked: LookedAt) -> TextMaps:
        one = LookedAt(text=asked.text, model=asked.model, tokens=asked.tokens, target=asked.target, edits=asked.edits)
        return self._seen(msgspec.json.encode(one))

    def view(self, subjects: Sequence[LookedAt]) -> dict[str, Any]:
        return self._views(msgspec.json.encode(subjects))[1]

    def weights(self, subjects: Sequence[LookedAt], question: Mapping[str, Any]) -> Reply:
        return self._views(msgspec.json.encode(subjects))[0].to(question)

    def _look(self, asked: bytes) -> TextMaps:
        one = msgspec.json.decode(asked, type=LookedAt)
        return self._models[one.model or ""].look(one)

    def _drawn(self, asked: bytes) -> tuple[Replier, dict[str, Any]]:
        examples = [
            page_example(_title(one), self.seen(one)) for one in msgspec.json.decode(asked, type=list[LookedAt])
        ]
        replier = Replier(examples)
        return replier, skeleton(examples, replier.maps, "What it looks at")

    @torch.no_grad()
    def numbers(self, asked: AttentionQuestion) -> AttentionNumbers:
        assert asked.model is not None
        seen = self.seen(asked)
        names = [seen.shown] if asked.maps is None else asked.maps
        if unknown := [name for name in names if name not in seen.maps]:
            raise Refused(400, f"maps of this model are {', '.join(seen.maps)}; got {', '.join(unknown)}")
        found: list[MapNumbers] = []
        labels = {}
        for name in names:
            heads = as_heads(name, seen.maps[name])
            count, queries, keys = heads.shape
            rows, columns = seen.labels(name)
            labels[name] = axis_labels(rows, queries, "rows"), axis_labels(columns, keys, "columns")
            chosen = list(range(count)) if asked.heads is None else asked.heads
            for wanted, most, word in ((chosen, count, "heads"), (asked.rows, queries, "rows")):
                if wrong := [one for one in wanted if one >= most]:
                    raise Refused(400, f"{word} of {name} are below {most}, got {wrong[0]}")
            if len(asked.rows) * len(chosen) * keys > MOST_WEIGHTS:
                raise Refused(400, f"rows of {MOST_WEIGHTS:,} weights are given at most: ask for fewer heads or rows")
            found += [_of_head(name, head, heads, asked) for head in chosen]
        return AttentionNumbers(model=asked.model, heads=found, labels=labels, alignment=_alignment(seen, asked))


def _of_head(name: str, head: int, heads: AttentionMap, asked: AttentionQuestion) -> MapNumbers:
    one = heads.only(heads=slice(head, head + 1))
    _, queries, keys = heads.shape
    made = MapNumbers(map=name, head=head, queries=queries, keys=keys)
    k = min(asked.top_keys, keys)
    wanted = [*(["received"] if asked.received else []), *(["top_keys"] if k else [])]
    sizes: dict[str, Any] = {"k": k} if k else {}
    if asked.picture is not None:
        wanted.append("pooled_mean")
        sizes |= zip(("rows", "columns"), asked.picture, strict=True)
    if wanted:
        numbers: dict[str, Any] = one.summary(*wanted, **sizes)
        if asked.received:
            made.received = _rounded(numbers["received"][0])
        if k:
            made.top_keys = numbers["top_keys"].indices[0].tolist()
            made.top_weights = _rounded(numbers["top_keys"].values[0])
        if asked.picture is not None:
            made.picture = _rounded(numbers["pooled_mean"][0])
    if asked.rows:
        made.rows = [_rounded(one.block(range(row, row + 1), range(keys)).flatten()) for row in asked.rows]
    return made


def _rounded(values: Any) -> Any:
    whole = values.float().tolist()

    def digits(one: Any) -> Any:
        return [digits(each) for each in one] if isinstance(one, list) else float(f"{one:.6g}")

    return digits(whole)


def _alignment(seen: TextMaps, asked: AttentionQuestion) -> list[tuple[int, int]] | None:
    if not asked.alignment:
        return None
    if not hasattr(seen, "alignment_names"):
        raise Refused(400, "a language model aligns nothing: leave out alignment")
    heads = as_heads(seen.shown, seen.maps[seen.shown])
    mean = heads.dense().mean(0)  # of a sentence and its translation, whose lengths are bounded
    return [(row, int(column)) for row, column in enumerate(mean.argmax(-1))]


def _title(asked: LookedAt) -> str:
    changes = [f"× {one.factor:g}" if one.factor else "cut" for one in asked.edits]
    heads = [f" · {one.map} head {one.head} {change}" for one, change in zip(asked.edits, changes, strict=True)]
    return f"{asked.model}: {asked.text[:60]}{''.join(heads)}"


def reply_bytes(reply: Reply) -> bytes:
    """A reply of the page's kernel: the length of its JSON (4 bytes, little end first), the JSON, the buffers.

    >>> whole = reply_bytes(Reply({"largest": 1}, [b"abcd"]))
    >>> whole[:4] == len(whole[4:-4]).to_bytes(4, "little"), whole[4:-4].strip(), whole[-4:]
    (True, b'{"largest":1,"bufferBytes":[4]}', b'abcd')
    """
    text = msgspec.json.encode({**reply.content, "bufferBytes": [len(one) for one in reply.buffers]})
    text += b" " * (-len(text) % 4)
    return len(text).to_bytes(4, "little") + text + b"".join(reply.buffers)
