"""On real text that lies beside the project, where it does."""

from pathlib import Path

import pytest

from regard.tasks.text.batches import collate, padding_share, plan_batches
from regard.tasks.text.pair_store import TokenStore
from regard.tasks.text.pairs import read_pairs
from regard.tasks.text.tokenizer_recipes import ByteLevelBPE

DATA = next((p / "shared/data" for p in Path(__file__).resolve().parents if (p / "shared/data").is_dir()), None)
# Files, pairs, and every how many-th is taken: the whole takes long to tokenise.
CORPORA = {
    "multi30k": (["multi30k/train.en.gz", "multi30k/train.de.gz"], 29_000, 4),
    "eng-fra": (["eng-fra/train.tsv.gz"], 164_232, 12),
}

pytestmark = pytest.mark.skipif(DATA is None, reason="the shared data are not beside the project")


@pytest.mark.parametrize("corpus", CORPORA)
def test_real_text_comes_back_and_is_batched_with_little_padding(corpus: str, tmp_path: Path) -> None:
    files, count, step = CORPORA[corpus]
    assert DATA is not None
    pairs = list(read_pairs([DATA / file for file in files]))
    assert len(pairs) == count
    pairs = pairs[::step]
    tokenizer = ByteLevelBPE(vocab_size=8000).train(text for pair in pairs for text in pair)
    store = TokenStore.build(tmp_path / "tokens", pairs, tokenizer, tokenizer)
    assert len(tokenizer) == 8000
    assert all(tokenizer.decode(store.target(i).tolist()) == pairs[i].target for i in range(0, len(store), 50))
    for max_tokens in (2048, 4096):
        plan = plan_batches(store.source_lengths, store.target_lengths, max_tokens=max_tokens, seed=0, epoch=0)
        batches = (collate([store.source(i) for i in k], [store.target(i) for i in k]) for k in plan)
        assert padding_share(batches) < 0.08
