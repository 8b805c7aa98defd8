"""A model that is taught by another's translations."""

from pathlib import Path

from regard.cli.main import run_command
from regard.tasks.translation.translator import Translator
from tests.tasks.small_runs import PAIRS


def test_a_pupil_learns_from_what_a_run_writes(run_of_words: Path, tmp_path: Path) -> None:
    """The two commands of docs/translate.md."""
    (tmp_path / "train.en").write_text("".join(f"{source}\n" for source, _ in PAIRS), encoding="utf-8")
    distilled, pupil = tmp_path / "distilled.fr", tmp_path / "pupil"
    made = (
        f"translate {run_of_words} --input {tmp_path / 'train.en'} --output {distilled} --max-length 1000 --device cpu"
    )
    made += " --engine regard"  # a beam of CTranslate2 ends earlier
    assert run_command(made.split()) == 0
    written = distilled.read_text(encoding="utf-8").splitlines()
    assert written == [one.text for one in Translator.load(run_of_words, device="cpu").translate(s for s, _ in PAIRS)]
    sizes = "--transformer.dim 8 --transformer.num-heads 2 --vocab-size 300 --steps 1 --pictures 0 --device cpu"
    learn = f"train --out {pupil} --data {tmp_path / 'train.en'} {distilled} {sizes}"
    assert run_command(learn.split()) == 0
    assert "40 pairs to train on, 10 held out" in (pupil / "train.log").read_text()
