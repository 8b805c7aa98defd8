"""What guided alignment brings and costs: the alignment error rate on held-out pairs, and the time of a training step.

    python -m benchmarks alignment        with REGARD_DATA naming a folder with multi30k/, and `pip install eflomal`

No corpus here has links that people drew. A statistical aligner that shares nothing with ours, eflomal (Östling and
Tiedemann 2016), links training and validation pairs together; the links of both directions are brought together. So
the rate says how far a head agrees with that aligner, not with people.
"""

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.harness import Row, compare
from regard.models.config import TransformerConfig
from regard.tasks.runs.run_folder import RunFolder
from regard.tasks.text.links import as_line, links_of, read_links
from regard.tasks.text.pairs import read_pairs
from regard.tasks.training.fit_config import FitConfig
from regard.tasks.translation.alignment_error import error_of, symmetrised
from regard.tasks.translation.alignments import AlignmentOf
from regard.tasks.translation.config import TranslationConfig
from regard.tasks.translation.corpus import open_corpus, prepare_corpus
from regard.tasks.translation.forcing import GuidedAlignment, TeacherForcing
from regard.tasks.translation.made_model import make_model
from regard.tasks.translation.token_batches import TokenBatches
from regard.tasks.translation.train import train_translation

TITLE = "Guided alignment: the error rate of a taught head, and its cost"
PAIRS, STEPS = 29_000, 1_500
MODEL = TransformerConfig(
    dim=128, num_heads=4, encoder_layers=3, decoder_layers=3, feed_forward_dim=256, dropout=0.1, embedding_gain=3.0
)
Pairs = Sequence[tuple[str, str]]


def run() -> tuple[list[Row], list[str]]:
    try:
        import eflomal  # noqa: F401
    except ImportError:
        return [], ["Not run: pip install eflomal."]
    if "REGARD_DATA" not in os.environ:
        return [], ["Not run: REGARD_DATA names no folder with multi30k/."]
    corpus = Path(os.environ["REGARD_DATA"]) / "multi30k"
    train = list(read_pairs([corpus / "train.en.gz", corpus / "train.de.gz"]))[:PAIRS]
    valid = list(read_pairs([corpus / "val.en", corpus / "val.de"]))
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write(folder, train, valid)
        plain = config(folder, "plain")
        taught = replace(
            config(folder, "taught"), alignment_data=folder / "train.links", alignment_valid=folder / "valid.links"
        )
        rows = [step_by_step(taught)]
        gold = read_links(folder / "valid.links")
        lines = ["| run | attention | AER | validation loss |", "|---|---|---|---|"]
        for settings in (plain, taught):
            translator = train_translation(settings)
            of_last = [AlignmentOf(), *(AlignmentOf(head=head) for head in range(MODEL.num_heads))]
            asked = [translator.alignment] if settings is taught else of_last
            for which in asked:
                rate = error_of(translator, valid, gold, which)
                lines.append(f"| {settings.out.name} | {which} | {rate:.1f} | {best_loss(settings.out):.3f} |")
    note = (
        f"{len(train):,} pairs of Multi30k en-de, {STEPS:,} updates, validation on {len(valid):,} pairs; links by "
        "eflomal, both directions, grow-diagonal. Words are what spaces part."
    )
    return rows, [note, "\n".join(lines)]


def write(folder: Path, train: Pairs, valid: Pairs) -> None:
    """Pairs, and the links that eflomal finds when it sees all of them together."""
    from eflomal import Aligner

    for name, pairs in (("train", train), ("valid", valid)):
        (folder / f"{name}.tsv").write_text("".join(f"{a}\t{b}\n" for a, b in pairs), encoding="utf-8")
    every, found = [*train, *valid], [folder / "forward", folder / "backward"]
    sides = [[" ".join(pair[side].split()) for pair in every] for side in (0, 1)]
    Aligner().align(*sides, links_filename_fwd=str(found[0]), links_filename_rev=str(found[1]))
    directions = [[links_of(line, "eflomal").sure for line in path.read_text().splitlines()] for path in found]
    links = [as_line(symmetrised(*both)) for both in zip(*directions, strict=True)]
    for name, some in (("train", links[: len(train)]), ("valid", links[len(train) :])):
        (folder / f"{name}.links").write_text("".join(f"{line}\n" for line in some))


def config(folder: Path, name: str) -> TranslationConfig:
    return TranslationConfig(
        data=(folder / "train.tsv",), valid=(folder / "valid.tsv",), out=folder / name, transformer=MODEL,
        vocab_size=4_000, batch_tokens=2_048, learning_rate=3e-3, warmup_steps=STEPS // 5, pictures=0, device="cpu",
        precision="float32", fit=FitConfig(steps=STEPS, validate_every=STEPS, save_every=STEPS),
    )  # fmt: skip


def best_loss(run: Path) -> float:
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return min(float(record["loss"]) for record in records if record["event"] == "valid")


def step_by_step(settings: TranslationConfig) -> Row:
    """Forward and backward pass of the same batches, without and with the loss of the head."""
    folder = RunFolder(settings.out.with_name("timed"))
    folder.path.mkdir()
    prepare_corpus(settings, folder, print)
    stored = open_corpus(settings, folder)
    sizes = {"source_vocab_size": len(stored.source_tokenizer), "target_vocab_size": len(stored.target_tokenizer)}
    model = make_model(settings.sizes, **sizes)
    limits: dict[str, Any] = {"max_length": settings.max_length, "max_tokens": settings.batch_tokens, "seed": 0}
    batches = iter(list(TokenBatches(stored.train, stored.links, **limits).epoch(0, 0)) * 99)
    plain = TeacherForcing(settings.label_smoothing)
    guided = GuidedAlignment(plain, AlignmentOf(layer=-1, head=0), model.alignment_names, settings.alignment_weight)

    def step(loss: Any) -> None:
        found = loss(model, next(batches))
        (found.total / found.count).backward()
        model.zero_grad(set_to_none=True)

    return compare("forward and backward, without / with the taught head", lambda: step(plain), lambda: step(guided))
