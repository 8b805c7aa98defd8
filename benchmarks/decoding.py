"""Searches of a small translator by the default engine against Hugging Face's generate, with the same weights.

    python -m benchmarks decoding        with REGARD_MULTI30K naming a folder with train and test_2016_flickr, en and de

A Transformer of 3 + 3 layers of 256, 4 heads, feed-forward 1,024 and a joint vocabulary of 8,000 with random weights,
exported for both in a temporary folder. Its end mark never comes. The first 200 lines of test_2016_flickr.en, sorted by
length, exactly 20 steps each; the search alone is timed. Ours is CTranslate2 in float32 and int8, with one thread for a
sentence and two threads for batches; generate has two threads. The last rows are regard's own search, which does what
CTranslate2 lacks. glibc is told to keep its memory, on both sides. Tokens are compared too.
"""

import gzip
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Row, compare, keeping_memory
from regard.models.config import TransformerConfig
from regard.models.transformer import Transformer
from regard.tasks.exports.ctranslate2 import to_ctranslate2
from regard.tasks.exports.engine import CTranslate2Engine
from regard.tasks.exports.huggingface import to_huggingface
from regard.tasks.exports.trained import ExportedRun
from regard.tasks.generation.config import Beam, SearchPrecision
from regard.tasks.text.tokenizer_recipes import ByteLevelBPE
from regard.tasks.text.tokenizers import BOS, EOS, PAD
from regard.tasks.translation.search_job import SearchJob, search

TITLE = "Searches by the default engine against Hugging Face's generate"
LINES, ONE_BY_ONE, STEPS, VOCABULARY, BEAMS, BATCH = 200, 10, 20, 8000, (1, 5), 32
TARGETS: dict[SearchPrecision, float] = {"float32": 2.2, "int8": 4.2}
SIZES = TransformerConfig(
    dim=256, num_heads=4, feed_forward_dim=1024, encoder_layers=3, decoder_layers=3, norm_position="post",
    shared_embeddings=True, tied_output=False, dropout=0.0,
)  # fmt: skip
Ids = list[list[int]]
Run = Callable[[], Ids]


def read(folder: Path, name: str) -> str:
    packed = folder / f"{name}.gz"
    return gzip.decompress(packed.read_bytes()).decode() if packed.exists() else (folder / name).read_text("utf-8")


def made(corpus: Path) -> tuple[ExportedRun, Ids]:
    """A model whose end mark never comes, and the sentences as its tokens."""
    texts = [line for side in ("en", "de") for line in read(corpus, f"train.{side}").splitlines()]
    tokenizer = ByteLevelBPE(vocab_size=VOCABULARY).train(texts)
    lines = read(corpus, "test_2016_flickr.en").splitlines()[:LINES]
    sources = sorted(([*ids, EOS] for ids in tokenizer.encode_batch(lines)), key=len, reverse=True)
    torch.manual_seed(1)
    size = len(tokenizer)
    model = Transformer(SIZES, source_vocab_size=size, target_vocab_size=size).eval().requires_grad_(False)
    last: Any = model.decoder[-1].get_submodule("residuals.2.norm")
    # A norm of 256 is between -16 and 16 before its offset. Of what the output layer reads, the end mark alone sees
    # the first place, and gets -400 at most.
    last.bias[0] = 20.0
    torch.nn.init.normal_(model.output.weight, std=0.06)
    model.output.weight[:, 0] = 0.0
    model.output.weight[EOS] = 0.0
    model.output.weight[EOS, 0] = -100.0
    return ExportedRun(model, SIZES, tokenizer, tokenizer), sources


def jobs(sources: Ids, beam: int, size: int) -> list[SearchJob]:
    marks: dict[str, Any] = {"begin_id": BOS, "end_id": EOS, "max_steps": STEPS, "beam": Beam(beam)}
    return [SearchJob(sources=sources[n : n + size], **marks) for n in range(0, len(sources), size)]


def by_generate(folder: Path, todo: list[SearchJob]) -> Run:
    from transformers import AutoModelForSeq2SeqLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = AutoModelForSeq2SeqLM.from_pretrained(folder).eval()

    def run() -> Ids:
        found: Ids = []
        for job in todo:
            longest = max(map(len, job.sources))
            ids = torch.tensor([[*row, *[PAD] * (longest - len(row))] for row in job.sources])
            with torch.inference_mode():
                answer = model.generate(
                    input_ids=ids, attention_mask=(ids != PAD).long(), num_beams=job.beam.size, do_sample=False,
                    max_new_tokens=STEPS, max_length=None, early_stopping=False,
                )  # fmt: skip
            found += answer[:, 1:].tolist()
        return found

    return run


def by_engine(engine: CTranslate2Engine, todo: list[SearchJob], *, singly: bool) -> Run:
    """All jobs at once, as a file has them, or one after the other, as sentences that are typed come."""
    groups = [[job] for job in todo] if singly else [todo]
    return lambda: [best[0].tokens for group in groups for found in engine.search(group) for best in found]


def by_ours(model: Transformer, todo: list[SearchJob]) -> Run:
    return lambda: [best[0].tokens for job in todo for best in search(model, job)]


def same(some: Ids, others: Ids) -> str:
    return f"{sum(one == other for one, other in zip(some, others, strict=True))} of {len(some)}"


def cases(sources: Ids) -> Iterator[tuple[str, list[SearchJob], bool]]:
    """The kinds of search: their names, their jobs, and whether these come one by one."""
    for beam in BEAMS:
        kind = "greedy" if beam == 1 else f"beam {beam}"
        yield f"{kind}, one by one, {ONE_BY_ONE} sentences", jobs(sources[:: LINES // ONE_BY_ONE], beam, 1), True
        yield f"{kind}, batches of {BATCH}, {LINES} sentences", jobs(sources, beam, BATCH), False


def measure() -> tuple[list[Row], list[str]]:
    torch.set_num_threads(2)
    rows, agreeing = [], []
    trained, sources = made(Path(os.environ["REGARD_MULTI30K"]))
    with tempfile.TemporaryDirectory() as place:
        folders = {name: Path(place) / name for name in ("huggingface", "ctranslate2")}
        for folder in folders.values():
            folder.mkdir()
        to_huggingface(trained, folders["huggingface"])
        to_ctranslate2(trained, folders["ctranslate2"])
        device = torch.device("cpu")
        for precision, target in TARGETS.items():
            engine = CTranslate2Engine(folders["ctranslate2"], trained, device=device, precision=precision, threads=2)
            for kind, todo, singly in cases(sources):
                peer = by_generate(folders["huggingface"], todo)
                run = by_engine(engine, todo, singly=singly)
                rows.append(
                    compare(f"generate: {kind}, ours in {precision}", peer, run, target=target, seconds=1, pairs=3)
                )
                agreeing.append(f"{kind}, {precision}: {same(run(), peer())}")
        for kind, todo, _ in cases(sources):
            peer, run = by_generate(folders["huggingface"], todo), by_ours(trained.model, todo)
            rows.append(compare(f"generate: {kind}, regard's own search", peer, run, seconds=1, pairs=3))
            agreeing.append(f"{kind}, own search: {same(run(), peer())}")
    return rows, ["Hypotheses equal to generate's: " + "; ".join(agreeing) + "."]


def run() -> tuple[list[Row], list[str]]:
    """In a process that the allocator's settings hold for."""
    return keeping_memory("decoding", TOKENIZERS_PARALLELISM="false")


if __name__ == "__main__":
    run()
