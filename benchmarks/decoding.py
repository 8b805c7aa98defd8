"""Searches of a small translator against Hugging Face's generate and CTranslate2, all with the same weights.

    python -m benchmarks decoding        with REGARD_MULTI30K naming a folder with train and test_2016_flickr, en and de

A Marian of 3 + 3 layers of 256, 4 heads, feed-forward 1,024 and a joint vocabulary of 8,000 with random weights, made
here in a temporary folder and read by all three. The first 200 lines of test_2016_flickr.en, sorted by length, exactly
20 steps each; the search alone is timed. Both sides have two threads; batches of a file by what is fastest there. glibc
is told to keep its memory, on both sides. Tokens are compared too.
"""

import gzip
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Row, compare, keeping_memory
from regard.generation.config import Beam
from regard.generation.protocol import Decodable
from regard.tasks.translation.pretrained import load_pretrained
from regard.tasks.translation.search_job import SearchJob, search

TITLE = "Searches against Hugging Face's generate and CTranslate2"
LINES, ONE_BY_ONE, STEPS, VOCABULARY, BEAMS = 200, 10, 20, 8000, (1, 5)
PEER_BATCHES, OUR_BATCHES = (16, 32, 64), {1: (50, 100), 5: (25, 34)}
"""Sentences of a batch that are tried before the fastest is timed, by the size of the beam for ours."""
Ids = list[list[int]]
Found = list[list[int]]


def read(folder: Path, name: str) -> str:
    packed = folder / f"{name}.gz"
    return gzip.decompress(packed.read_bytes()).decode() if packed.exists() else (folder / name).read_text("utf-8")


class Marian:
    """The model in Hugging Face's folder and CTranslate2's, and the sentences as its tokens."""

    def __init__(self, folder: Path, corpus: Path) -> None:
        import ctranslate2
        import sentencepiece
        from transformers import MarianConfig, MarianMTModel
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        self.folder, self.for_ctranslate2 = folder / "marian", folder / "ctranslate2"
        (folder / "text").write_text(read(corpus, "train.en") + read(corpus, "train.de"), "utf-8")
        sentencepiece.SentencePieceTrainer.train(
            input=str(folder / "text"), model_prefix=str(folder / "pieces"), vocab_size=VOCABULARY, model_type="bpe",
            unk_id=0, pad_id=1, bos_id=2, eos_id=3, minloglevel=2,
        )  # fmt: skip
        cutter = sentencepiece.SentencePieceProcessor(model_file=str(folder / "pieces.model"))
        words = [cutter.id_to_piece(n) for n in range(4, cutter.get_piece_size())]
        self.pieces = ["</s>", "<unk>", *words, "<pad>"]
        self.places = {piece: place for place, piece in enumerate(self.pieces)}
        self.end, self.pad = 0, len(self.pieces) - 1
        lines = read(corpus, "test_2016_flickr.en").splitlines()[:LINES]
        cut = [cutter.encode(line, out_type=str) for line in lines]
        self.sources: Ids = sorted(
            ([*(self.places.get(piece, 1) for piece in line), self.end] for line in cut), key=len, reverse=True
        )
        torch.manual_seed(1)
        sizes: dict[str, Any] = {
            "d_model": 256, "encoder_layers": 3, "decoder_layers": 3, "encoder_attention_heads": 4,
            "decoder_attention_heads": 4, "encoder_ffn_dim": 1024, "decoder_ffn_dim": 1024,
            "max_position_embeddings": 256, "static_position_embeddings": True,
        }  # fmt: skip
        config = MarianConfig(
            vocab_size=len(self.pieces), decoder_vocab_size=len(self.pieces), activation_function="relu",
            scale_embedding=True, pad_token_id=self.pad, eos_token_id=self.end,
            bos_token_id=self.end, decoder_start_token_id=self.pad, forced_eos_token_id=None, **sizes,
        )  # fmt: skip
        model = MarianMTModel(config).eval()
        torch.nn.init.normal_(model.model.shared.weight, std=0.06)
        torch.nn.init.normal_(model.final_logits_bias, std=0.01)
        with torch.no_grad():
            model.model.shared.weight[self.pad] = 0
            model.final_logits_bias[0, self.pad] = -1e4
        model.save_pretrained(self.folder)
        for name in ("source.spm", "target.spm"):
            shutil.copy(folder / "pieces.model", self.folder / name)
        (self.folder / "vocab.json").write_text(json.dumps(self.places))
        kind = {"tokenizer_class": "MarianTokenizer", "source_lang": "en", "target_lang": "de"}
        (self.folder / "tokenizer_config.json").write_text(json.dumps(kind))
        ctranslate2.converters.TransformersConverter(str(self.folder)).convert(str(self.for_ctranslate2))
        # For ours the end mark is banned, which is what the peers' least length comes to for 20 steps of 20.
        self.endless = folder / "endless"
        shutil.copytree(self.folder, self.endless)
        with torch.no_grad():
            model.final_logits_bias[0, self.end] = -1e9
        model.save_pretrained(self.endless)


def cut_up(sources: Ids, size: int) -> list[Ids]:
    return [sources[n : n + size] for n in range(0, len(sources), size)]


def generate(marian: Marian, sources: Ids, beam: int, size: int) -> Callable[[], Found]:
    from transformers import MarianMTModel

    model = MarianMTModel.from_pretrained(marian.folder).eval()

    def run() -> Found:
        found: Found = []
        for batch in cut_up(sources, size):
            longest = max(map(len, batch))
            ids = torch.tensor([[*row, *[marian.pad] * (longest - len(row))] for row in batch])
            with torch.inference_mode():
                answer = model.generate(
                    input_ids=ids, attention_mask=(ids != marian.pad).long(), num_beams=beam, do_sample=False,
                    min_new_tokens=STEPS, max_new_tokens=STEPS, max_length=None, early_stopping=False,
                )  # fmt: skip
            found += answer[:, 1:].tolist()
        return found

    return run


def translate_batch(translator: Any, marian: Marian, beam: int, size: int) -> Callable[[], Found]:
    tokens = [[marian.pieces[n] for n in row] for row in marian.sources]

    def run() -> Found:
        found = translator.translate_batch(
            tokens, max_batch_size=size, beam_size=beam, min_decoding_length=STEPS, max_decoding_length=STEPS,
            length_penalty=1.0,
        )  # fmt: skip
        return [[marian.places[piece] for piece in one.hypotheses[0]] for one in found]

    return run


def jobs(marian: Marian, sources: Ids, beam: int, size: int) -> list[SearchJob]:
    marks: dict[str, Any] = {"begin_id": marian.pad, "end_id": marian.end, "max_steps": STEPS}
    return [SearchJob(sources=batch, **marks, beam=Beam(beam)) for batch in cut_up(sources, size)]


def ours(decoder: Decodable, todo: list[SearchJob]) -> Callable[[], Found]:
    return lambda: [best[0].tokens for job in todo for best in search(decoder, job)]


def same(some: Found, others: Found) -> str:
    return f"{sum(one == other for one, other in zip(some, others, strict=True))} of {len(some)}"


def fastest(candidates: Sequence[tuple[int, Callable[[], Found]]]) -> tuple[int, Callable[[], Found]]:
    """Of runs with batches of several sizes, by the better of two times."""
    from benchmarks.harness import _once

    return min(candidates, key=lambda one: (one[1](), min(_once(one[1]) for _ in range(2)))[1])


def against_generate(marian: Marian) -> tuple[list[Row], list[str]]:
    model = load_pretrained(marian.endless).model.eval()
    some, rows, agreeing = marian.sources[:: LINES // ONE_BY_ONE], [], []
    for beam in BEAMS:
        search = "greedy" if beam == 1 else f"beam {beam}"
        for kind, size, sources in (("one by one", 1, some), ("batches of 32", 32, marian.sources)):
            run, peer = ours(model, jobs(marian, sources, beam, size)), generate(marian, sources, beam, size)
            rows.append(compare(f"generate: {search}, {kind}, {len(sources)} sentences", peer, run, seconds=1, pairs=3))
            agreeing.append(f"{search}, {kind}: {same(run(), peer())}")
    return rows, ["Hypotheses equal to generate's: " + "; ".join(agreeing) + "."]


def against_ctranslate2(marian: Marian) -> tuple[list[Row], list[str]]:
    import ctranslate2

    translator = ctranslate2.Translator(
        str(marian.for_ctranslate2), device="cpu", compute_type="float32", intra_threads=1, inter_threads=2
    )
    rows, notes = [], []
    torch.set_num_threads(2)  # CTranslate2 has set those of the whole process to its own
    model = load_pretrained(marian.endless).model.eval()
    for beam in BEAMS:
        theirs, peer = fastest([(size, translate_batch(translator, marian, beam, size)) for size in PEER_BATCHES])
        size, run = fastest(
            [(size, ours(model, jobs(marian, marian.sources, beam, size))) for size in OUR_BATCHES[beam]]
        )
        kind = "greedy" if beam == 1 else f"beam {beam}"
        row = compare(f"CTranslate2: {kind}, a file of {LINES} lines, two threads", peer, run, seconds=3)
        rows.append(row)
        notes.append(
            f"{kind}: {LINES / row.ours:.0f} sentences/s in batches of {size} against "
            f"{LINES / row.peer:.0f} in batches of {theirs} ({same(run(), peer())} hypotheses equal)"
        )
    return rows, ["Against CTranslate2: " + "; ".join(notes) + "."]


def measure() -> tuple[list[Row], list[str]]:
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory() as folder:
        marian = Marian(Path(folder), Path(os.environ["REGARD_MULTI30K"]))
        # CTranslate2 sets the threads of the whole process to its own.
        found = [against_generate(marian), against_ctranslate2(marian)]
    return [row for rows, _ in found for row in rows], [note for _, notes in found for note in notes]


def run() -> tuple[list[Row], list[str]]:
    """In a process that the allocator's settings hold for."""
    return keeping_memory("decoding", TOKENIZERS_PARALLELISM="false")


if __name__ == "__main__":
    run()
