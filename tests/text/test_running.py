"""Running text: documents, the store, streams of text, blocks and windows."""

import pickle
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.errors import ArgumentError, RunFolderError
from regard.tasks.text.blocks import (
    BEGIN_ONE_IN,
    BlockPlan,
    TextBlocks,
    TextWindow,
    next_token_windows,
    next_tokens,
    window_batches,
)
from regard.tasks.text.codec import UNPREDICTED, finished_text
from regard.tasks.text.pair_store import CHUNK_PAIRS
from regard.tasks.text.running_text import TextStore, TextStream, encode_text, pieces
from regard.tasks.text.tokenizer_recipes import ByteLevelBPE, Characters, Words
from regard.tasks.text.tokenizers import BOS, EOS, PAD, UNK, Tokenizer

TEXT = ["Ünë dög", "", "  日本 x", "ends here. dög dög"]
RECIPES: dict[str, Any] = {"bpe": ByteLevelBPE(vocab_size=290), "characters": Characters(), "words": Words()}


@pytest.fixture(scope="module", params=RECIPES)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return RECIPES[request.param].train(line + "\n" for line in TEXT)


@pytest.mark.parametrize("documents", ["file", "paragraphs", "lines"])
def test_a_store_holds_the_text(tokenizer: Tokenizer, documents: Any, tmp_path: Path) -> None:
    whole = documents != "file"
    store = TextStore.build(tmp_path / "x", pieces(TEXT, documents), tokenizer, is_whole=whole)
    tokens = store.tokens.tolist()
    bodies = {"file": [TEXT], "paragraphs": [TEXT[:1], TEXT[2:]], "lines": [TEXT[:1], TEXT[2:3], TEXT[3:]]}[documents]
    texts = ["\n".join(body) if documents == "lines" else "".join(f"{line}\n" for line in body) for body in bodies]
    expected = []
    for text in texts:
        expected += [BOS, *encode_text(tokenizer, text), *([EOS] if whole else [])]
    assert tokens == expected
    assert store.documents == tokens.count(BOS) == len(texts)
    assert store.text_bytes == sum(len(text.encode()) + whole for text in texts)
    assert store.unknown == 0
    again = TextStore.open(tmp_path / "x", tokenizer)
    assert again.tokens.tolist() == pickle.loads(pickle.dumps(again)).tokens.tolist() == tokens


def test_documents_over_several_chunks_and_unknown_tokens(tmp_path: Path) -> None:
    tokenizer, lines = Characters().train(["ab"]), ["ab", "xa"] * CHUNK_PAIRS
    store = TextStore.build(tmp_path / "x", pieces(lines, "lines"), tokenizer, is_whole=True)
    assert store.documents == len(lines)
    assert store.unknown == CHUNK_PAIRS
    a, b = tokenizer.encode("ab")
    assert store.tokens.tolist() == [BOS, a, b, EOS, BOS, UNK, a, EOS] * CHUNK_PAIRS


def test_stores_that_are_not_ours(tmp_path: Path) -> None:
    tokenizer, path = Characters().train(["ab"]), tmp_path / "x"
    with pytest.raises(RunFolderError, match="no such folder"):
        TextStore.open(path, tokenizer)
    TextStore.build(path, pieces(["ab"], "file"), tokenizer, is_whole=False)
    with pytest.raises(RunFolderError, match="other tokenizers"):
        TextStore.open(path, Characters().train(["abc"]))
    about = (path / "about.json").read_text()
    for record in (about.replace('"documents": 1', '"documents": 2'), '{"fingerprints": []}', "[]"):
        (path / "about.json").write_text(record)
        with pytest.raises(RunFolderError, match=r"about\.json"):
            TextStore.open(path, tokenizer)
    with pytest.raises(ArgumentError, match="documents must be one of file, paragraphs, lines, got 'page'"):
        list(pieces(["a"], cast(Any, "page")))


@given(text=st.text("dögx日 .\n", max_size=20))
def test_the_bytes_of_tokens_are_the_decoded_text(tokenizer: Tokenizer, text: str) -> None:
    ids = [BOS, *encode_text(tokenizer, text), EOS]
    written = b"".join(map(tokenizer.bytes_of, ids)).decode()
    if tokenizer.encode("dög  dög") == tokenizer.encode("dög dög"):  # words begin with their space
        written = written.removeprefix(" ")
    assert written == tokenizer.decode(ids)


@given(text=st.text("ab日é", max_size=12), stops=st.lists(st.text("ab日é", min_size=1, max_size=3), max_size=3))
@settings(max_examples=80)
def test_streams_hand_out_the_text_before_the_first_stop(text: str, stops: list[str]) -> None:
    """A stop ends the text as soon as it is whole; the pieces so far are always a prefix of the answer."""
    tokenizer = ByteLevelBPE(vocab_size=260).train(["no merges"])  # a byte a token
    found = [
        n - len(stop) for n in range(len(text) + 1) for stop in sorted(stops, key=len)[::-1] if text[:n].endswith(stop)
    ]
    expected = text[: found[0]] if found else text
    stream, out = TextStream(tokenizer, stop=stops), ""
    for token in tokenizer.encode(text):
        out += stream.add(token)
        assert expected.startswith(out)
    assert out + stream.finish() == expected
    assert stream.stopped == bool(found)


def test_half_a_character_at_the_end() -> None:
    tokenizer = ByteLevelBPE(vocab_size=260).train(["no merges"])
    stream = TextStream(tokenizer)
    assert [stream.add(token) for token in tokenizer.encode("a日")[:3]] == ["a", "", ""]
    assert stream.finish() == ""
    for text, cut in (("a日", 1), ("a日", 2), ("日", 2), ("日b", 0), ("", 0)):
        ids = tokenizer.encode(text)[: -cut or None]
        assert finished_text(tokenizer, [*ids, tokenizer.eos_id]) == (text[:-1] if cut else text)
    with pytest.raises(ArgumentError, match="at least one character"):
        TextStream(tokenizer, stop=[""])


@given(
    size=st.integers(12, 90), length=st.integers(2, 9), batch=st.integers(1, 40), overlap=st.integers(0, 1),
    seed=st.integers(0, 9),
)  # fmt: skip
def test_an_epoch_reads_the_text_once_in_blocks(size: int, length: int, batch: int, overlap: int, seed: int) -> None:
    tokens = np.arange(size)
    plan = BlockPlan(tokens, length=length, overlap=overlap, batch_tokens=batch, seed=seed)
    for epoch in range(3):
        blocks = list(plan.epoch(epoch, 0))
        rows = [row for one in blocks for row in one.tokens]
        assert rows
        assert all(row.tolist() == list(range(row[0], row[0] + length + overlap)) for row in rows)
        starts = sorted(int(row[0]) for row in rows)
        assert len(set(starts)) == len(starts)
        assert all((start - starts[0]) % length == 0 for start in starts)
        # What is left out is less than a block at each end, and less than a batch.
        assert len(rows) > (size - overlap - length + 1) // length - plan.rows
        for start in (1, len(blocks)):
            later = list(plan.epoch(epoch, start))
            assert [one.tokens.tolist() for one in later] == [one.tokens.tolist() for one in blocks[start:]]
            assert [one.seeds.tolist() for one in later] == [one.seeds.tolist() for one in blocks[start:]]


def test_epochs_differ_and_each_block_has_a_seed_of_its_own() -> None:
    tokens, sizes = np.arange(4, 400), {"length": 10, "overlap": 1, "batch_tokens": 40, "seed": 3}
    whole = list(BlockPlan(tokens, **sizes).epoch(0, 0))
    other = [one.tokens.tolist() for one in BlockPlan(tokens, **sizes).epoch(1, 0)]
    assert [one.tokens.tolist() for one in whole] != other
    starts = [int(row[0]) for one in whole for row in one.tokens]
    assert starts != sorted(starts)
    assert len({seed for one in whole for seed in one.seeds.tolist()}) == len(starts)
    phases = {int(next(iter(BlockPlan(tokens, **sizes).epoch(e, 0))).tokens[0, 0]) % 10 for e in range(20)}
    assert len(phases) > 5


def test_texts_and_batches_that_are_too_small() -> None:
    sizes: dict[str, Any] = {"overlap": 1, "batch_tokens": 10, "seed": 0}
    with pytest.raises(ArgumentError, match="the text has 5 tokens, and a block needs 6"):
        BlockPlan(np.arange(5), length=5, **sizes)
    with pytest.raises(ArgumentError, match="a batch has 2"):
        BlockPlan(np.arange(50), length=5, **sizes, rank=2, world_size=3)


def test_next_tokens() -> None:
    blocks = TextBlocks(np.array([[5, 6, 7, EOS, BOS], [8, 9, 4, 5, 6]]), np.array([1, 5 * BEGIN_ONE_IN]))
    batch = next_tokens(blocks)
    assert batch.tokens.tolist() == [[5, 6, 7, EOS], [BOS, 9, 4, 5]]
    assert batch.targets.tolist() == [
        [6, 7, EOS, UNPREDICTED],
        [9, 4, 5, 6],
    ]  # where a document begins is not predicted
    assert blocks.tokens[1, 0] == 8


@given(size=st.integers(2, 40), length=st.integers(1, 12), data=st.data())
def test_windows_predict_every_token_once_with_at_least_the_overlap_before_it(
    size: int, length: int, data: st.DataObject
) -> None:
    stride, tokens = data.draw(st.integers(1, length)), np.arange(size)
    windows = list(next_token_windows(tokens, length=length, stride=stride))
    predicted = [int(t) for window in windows for t in window.targets if t != UNPREDICTED]
    assert predicted == list(range(1, size))
    for number, window in enumerate(windows):
        assert len(window.tokens) == len(window.targets) <= length
        assert all(
            target in (UNPREDICTED, token + 1) for token, target in zip(window.tokens, window.targets, strict=True)
        )
        if number:
            assert int((window.targets != UNPREDICTED).argmax()) >= length - stride
    with pytest.raises(ArgumentError, match="the stride must be from 1 to"):
        next(next_token_windows(tokens, length=length, stride=length + 1))


def test_batches_of_windows() -> None:
    ends = [slice(0, 3), slice(0, 3), slice(3, 6), slice(3, 6), slice(6, 7)]
    windows = [TextWindow(*[np.array([BOS, 5, 6, 7, 8, EOS, 9])[part]] * 2) for part in ends]
    batches = list(window_batches(windows, places=7))
    assert [tuple(batch.tokens.shape) for batch in batches] == [(2, 3), (2, 3), (1, 1)]
    (one,) = window_batches(windows[3:], places=99)
    assert one.tokens.tolist() == [[7, 8, EOS], [9, PAD, PAD]]
    assert one.targets.tolist() == [[7, 8, EOS], [9, UNPREDICTED, UNPREDICTED]]
