"""How much padding batches of pairs have that BPE dropout cuts anew, and how long the cutting takes.

    python -m benchmarks bpe_dropout        with REGARD_DATA naming a folder with multi30k/

Padding does not depend on how fast the machine is; the seconds are those of one core.
"""

import os
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.harness import Row
from regard.tasks.text.batches import padding_share, plan_batches
from regard.tasks.text.bpe_dropout import BPEDropout, NewCuts
from regard.tasks.text.pair_store import TokenStore
from regard.tasks.text.pairs import read_pairs
from regard.tasks.text.tokenizer_recipes import ByteLevelBPE
from regard.tasks.translation.token_batches import FreshPairs, TokenBatches

TITLE = "BPE dropout: padding, and the time of cutting"
MAX_TOKENS, MAX_LENGTH = 4_096, 256


def run() -> tuple[list[Row], list[str]]:
    if "REGARD_DATA" not in os.environ:
        return [], ["Not run: REGARD_DATA names no folder with multi30k/."]
    folder = Path(os.environ["REGARD_DATA"]) / "multi30k"
    pairs = list(read_pairs([folder / "train.en.gz", folder / "train.de.gz"]))
    tokenizer = ByteLevelBPE(vocab_size=8_000).train(text for pair in pairs for text in pair)
    dropout = BPEDropout(tokenizer, 0.1)
    cuts = NewCuts(dropout, dropout, seed=0, max_length=MAX_LENGTH, max_tokens=MAX_TOKENS)
    rows, epoch = np.arange(len(pairs)), 1
    with tempfile.TemporaryDirectory() as place:
        store = TokenStore.build(Path(place, "pairs"), pairs, tokenizer, tokenizer)
        begun = time.process_time()
        fresh = FreshPairs.of(store, rows, cuts, epoch)
        seconds = time.process_time() - begun
        usual = plan_batches(*store.lengths(rows), max_tokens=MAX_TOKENS, seed=0, epoch=epoch)
        found = {
            "none": list(batches(store, None).epoch(epoch, 0)),
            "0.1, planned by the usual cuts": [fresh.batch(chosen) for chosen in usual],
            "0.1, planned by the new cuts": list(batches(store, cuts).epoch(epoch, 0)),
        }
    lines = ["| BPE dropout | batches | places of the largest | padding |", "|---|---|---|---|"]
    for name, some in found.items():
        most = max(batch.padded_tokens for batch in some)
        lines.append(f"| {name} | {len(some)} | {most:,} | {padding_share(some):.1%} |")
    note = (
        f"{len(pairs):,} pairs of Multi30k en-de, one vocabulary of 8,000, batches of {MAX_TOKENS:,} places, epoch "
        f"{epoch}. Cutting all of them takes {seconds:.1f} s of one core, {len(pairs) / seconds:,.0f} pairs a second."
    )
    return [], [note, "\n".join(lines)]


def batches(store: TokenStore, cuts: NewCuts | None) -> TokenBatches:
    return TokenBatches(store, max_length=MAX_LENGTH, max_tokens=MAX_TOKENS, seed=0, cuts=cuts)
