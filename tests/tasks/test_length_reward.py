"""The flags of a length reward, and those that do not go with it; a model that is taught by another's translations."""

from pathlib import Path

import pytest

from regard.cli.main import run_command
from regard.tasks.translation.translator import Translator
from tests.tasks.small_runs import PAIRS, run

__all__ = ["run"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--length-reward", "-1"], "--length-reward must be at least 0, got -1.0"),
        (["--length-reward", "nan"], "--length-reward must be at least 0, got nan"),
        (["--length-reward", "0.5", "--length-penalty", "1"], "--length-reward changes nothing at a"),
        (["--length-reward", "0.5", "--beam", "1"], "--length-reward is for a beam"),
        (["--length-reward", "1e308"], "--length-penalty and --length-reward must be at most 50, got 1e+308"),
        (["--length-penalty", "400"], "--length-penalty and --length-reward must be at most 50, got 400.0"),
        (
            ["--length-reward", "0.5", "--engine", "ctranslate2"],
            "--engine ctranslate2 has no length reward: leave out --length-reward",
        ),
    ],
)
@pytest.mark.parametrize("command", ["translate", "evaluate"])
def test_what_does_not_go_together_is_refused(
    run: Path, capsys: pytest.CaptureFixture[str], command: str, flags: list[str], message: str
) -> None:
    data = ["--data", str(run.parent / "pairs.tsv")] if command == "evaluate" else ["a word"]
    assert run_command([command, str(run), *data, *flags]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert message in said.err
    assert len(said.err.splitlines()) == 1


def test_a_pupil_learns_from_what_a_run_writes(run: Path, tmp_path: Path) -> None:
    """The two commands of docs/translate.md."""
    (tmp_path / "train.en").write_text("".join(f"{source}\n" for source, _ in PAIRS), encoding="utf-8")
    distilled, pupil = tmp_path / "distilled.fr", tmp_path / "pupil"
    made = f"translate {run} --input {tmp_path / 'train.en'} --output {distilled} --max-length 1000 --device cpu"
    made += " --engine regard"  # a beam of CTranslate2 ends earlier
    assert run_command(made.split()) == 0
    written = distilled.read_text(encoding="utf-8").splitlines()
    assert written == [one.text for one in Translator.load(run, device="cpu").translate(s for s, _ in PAIRS)]
    sizes = "--transformer.dim 8 --transformer.num-heads 2 --vocab-size 300 --steps 1 --pictures 0 --device cpu"
    learn = f"train --out {pupil} --data {tmp_path / 'train.en'} {distilled} {sizes}"
    assert run_command(learn.split()) == 0
    assert "40 pairs to train on, 10 held out" in (pupil / "train.log").read_text()
