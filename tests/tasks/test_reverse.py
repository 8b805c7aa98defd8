"""A translator of the other direction that has a say, and what `regard tune` finds."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from regard.cli.engines import Ranking
from regard.cli.main import run_command
from regard.errors import ArgumentError, DataError
from regard.tasks.generation.config import Beam
from regard.tasks.training.bleu import bleu
from regard.tasks.translation.options import TranslationOptions
from regard.tasks.translation.reverse import Reverse, log_probabilities_back
from regard.tasks.translation.terms import Term, Terms
from regard.tasks.translation.train import run_translation
from regard.tasks.translation.translator import Translator
from regard.tasks.translation.tune import REWARDS, WEIGHTS, tune
from tests.tasks.small_runs import PAIRS, changed, small_config, write_pairs

SOURCES = [source for source, _ in PAIRS[::7]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run that has learnt a little, and one of the other direction that has learnt more."""
    folder = tmp_path_factory.mktemp("both")
    config = small_config(folder, steps=25, validate_every=25, save_every=25, warmup_steps=5, out=folder / "forward")
    run_translation(config)
    turned = write_pairs(folder / "turned.tsv", [(target, source) for source, target in PAIRS])
    run_translation(changed(config, steps=60, data=(turned,), valid=(turned,), out=folder / "back"))
    return folder / "forward", folder / "back"


@pytest.fixture(scope="module")
def both(runs: tuple[Path, Path]) -> tuple[Translator, Translator]:
    forward, back = (Translator.load(run, device="cpu") for run in runs)
    return forward, back


def told(translator: Translator, **how: Any) -> list[list[tuple[str, float]]]:
    return [[(one.text, one.score) for one in each.candidates] for each in translator.translate(SOURCES, **how)]


@pytest.mark.parametrize(("penalty", "reward"), [(1.0, 0.0), (0.0, 0.4), (0.6, 0.2)])
def test_the_score_is_the_formula(both: tuple[Translator, Translator], penalty: float, reward: float) -> None:
    """Found again from each hypothesis of the search and the log-probability that the other gives to going back."""
    forward, back = both
    numbers: dict[str, Any] = {"length_penalty": penalty, "length_reward": reward}
    alone = forward.hypotheses(SOURCES, TranslationOptions(beam=Beam(4, num_best=4, **numbers)))
    weighed = told(forward, beam=Beam(4, num_best=3, **numbers), reverse=Reverse(back, 0.5))
    for source, before, after in zip(SOURCES, alone, weighed, strict=True):
        texts = [forward.target_tokenizer.decode(one.tokens) for one in before]
        gains = [one.log_probability for one in back.score([(text, source) for text in texts])]
        ended = [one.tokens[-1] == forward.target_tokenizer.marks.end_id for one in before]
        scores = [one.score + 0.5 * gain / len(one.tokens) ** penalty for one, gain in zip(before, gains, strict=True)]
        expected = sorted(zip(ended, scores, texts, strict=True), reverse=True)[:3]
        assert [text for text, _ in after] == [text for _, _, text in expected]
        assert [score for _, score in after] == pytest.approx([score for _, score, _ in expected], abs=1e-4)
    best = [forward.target_tokenizer.decode(each[0].tokens) for each in alone]
    assert [each[0][0] for each in weighed] != best, "the reverse translator changes nothing"


def test_beside_a_reverse_translator_length_is_rewarded_unless_it_is_told_how(tmp_path: Path) -> None:
    flags: dict[str, Any] = {"length_penalty": None, "length_reward": None, "reverse": tmp_path, "reverse_weight": None}
    assert Ranking(**flags).beam(5) == Beam(5, length_penalty=0.0, length_reward=0.4)
    assert Ranking(**flags | {"length_penalty": 1.0}).beam(5) == Beam(5)
    assert Ranking(**flags | {"length_reward": 0.0}).beam(5) == Beam(5)
    assert Ranking(**flags | {"reverse": None}).beam(5, num_best=2) == Beam(5, num_best=2)


def test_the_reverse_translator_reads_words_that_the_other_does_not_know(
    both: tuple[Translator, Translator], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is given the source as it stands, and not what is left of it in tokens of the other."""
    forward, back = both
    monkeypatch.setattr(forward.source_tokenizer, "decode", lambda ids: "lost")
    asked: list[str] = []
    score = back.score
    monkeypatch.setattr(back, "score", lambda pairs: score(asked.append(pair[1]) or pair for pair in pairs))
    list(forward.translate(["we see ten cats"], beam=Beam(2), reverse=Reverse(back)))
    terms = Terms([Term("cats", "木々")])
    list(forward.translate(["we see ten cats"], beam=Beam(2), reverse=Reverse(back), terms=terms))
    assert {*asked} == {"we see ten cats"}
    # Sentences that are the same in tokens keep each its own text.
    cut = forward.source_tokenizer.encode_batch
    monkeypatch.setattr(forward.source_tokenizer, "encode_batch", lambda texts: cut([text.lower() for text in texts]))
    asked.clear()
    same = ["we see ten cats", "We see ten cats"]
    list(forward.translate(same, beam=Beam(2), reverse=Reverse(back), terms=terms))
    assert asked.count(same[0]) == asked.count(same[1]) > 2


def test_a_small_weight_changes_nothing_but_the_last_digits(both: tuple[Translator, Translator]) -> None:
    forward, back = both
    beam = Beam(3, num_best=3)
    assert [[text for text, _ in each] for each in told(forward, beam=beam, reverse=Reverse(back, 1e-9))] == [
        [text for text, _ in each] for each in told(forward, beam=beam)
    ]


def test_terms_and_empty_lines_go_with_it(both: tuple[Translator, Translator]) -> None:
    forward, back = both
    how: dict[str, Any] = {"beam": Beam(3), "reverse": Reverse(back)}
    lines = ["", "we see one cats"]
    empty, forced = forward.translate(lines, terms=Terms([Term("cats", "木々")]), alignments=forward.alignment, **how)
    assert empty.text == ""
    assert "木々" in forced.text


def test_sentences_that_the_reverse_translator_cannot_read_keep_their_order(
    both: tuple[Translator, Translator], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, back = both
    short, long = "on y voit un chats", "on y voit un chats " * 9
    monkeypatch.setattr(back.model, "max_length", 40)
    found = log_probabilities_back(back, ["we", "see", "we"], [[short, long], [long, long], [short]])
    (one,) = back.score([(short, "we")])
    assert [len(each) for each in found] == [2, 2, 1]
    assert found[1] == [0.0, 0.0]
    assert [*found[0], *found[2]] == pytest.approx([one.log_probability] * 3, abs=1e-4)


def test_a_beam_of_one_has_nothing_to_choose_from(both: tuple[Translator, Translator]) -> None:
    forward, back = both
    with pytest.raises(ArgumentError, match="give a beam of 2 at least, got 1"):
        next(forward.translate(SOURCES, beam=Beam(1), reverse=Reverse(back)))
    for weight in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ArgumentError, match="must be above 0 and finite"):
            Reverse(back, weight)


def test_tuning_finds_the_best_of_all_choices(
    both: tuple[Translator, Translator], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looked for again by whole translations: the hypotheses of one search, ranked by each setting, scored by BLEU."""
    forward, back = both
    pairs = [*PAIRS[::3], ("", "")]
    found = tune(forward, pairs, beam_size=4, reverse=back)
    options = TranslationOptions(beam=Beam(4, num_best=4))
    pools = forward.hypotheses([source for source, _ in pairs], options)
    texts = [[forward.target_tokenizer.decode(one.tokens) for one in best] for best in pools]
    end_id = forward.target_tokenizer.marks.end_id
    gains = log_probabilities_back(back, [source for source, _ in pairs], texts)

    def scored(penalty: float, reward: float, weight: float) -> float:
        chosen = []
        for best, written, others in zip(pools, texts, gains, strict=True):
            ranks = [
                (one.tokens[-1] == end_id, (one.score * n + reward * n + weight * gain) / n**penalty)
                for one, gain in zip(best, others, strict=True)
                for n in [len(one.tokens)]
            ]
            chosen.append(written[ranks.index(max(ranks))] if ranks else "")
        return bleu(chosen, [target for _, target in pairs]).value

    every = {(reward, weight): scored(0.0, reward, weight) for reward, weight in product(REWARDS, (0.0, *WEIGHTS))}
    assert found[0].bleu == pytest.approx(max(every.values()))
    assert found[0].bleu == pytest.approx(scored(*found[0][:3]))
    assert found[0].weight > 0
    alone = max(found[1:], key=lambda one: one.bleu)
    assert alone.bleu == pytest.approx(max(scored(1.0, 0.0, 0.0), *(every[reward, 0.0] for reward in REWARDS)))
    usual = next(one for one in found if one.length_penalty == 1)
    told_nothing = [one.text for one in forward.translate([source for source, _ in pairs], beam=Beam(4))]
    assert usual.bleu == pytest.approx(bleu(told_nothing, [target for _, target in pairs]).value)
    assert [one.bleu for one in found] == sorted((one.bleu for one in found), reverse=True)
    monkeypatch.setattr(forward.model, "max_length", 30)
    with pytest.raises(DataError, match=r"pair 2: \d+ tokens, and the model takes 30 at most"):
        tune(forward, [("we", "on"), ("we see " * 30, "on")])
    with pytest.raises(DataError, match="no pairs to tune on"):
        tune(forward, [])
    with pytest.raises(ArgumentError, match="a beam of 2 at least, got 1"):
        tune(forward, pairs, beam_size=1)


def test_the_command_line(
    runs: tuple[Path, Path], both: tuple[Translator, Translator], capsys: pytest.CaptureFixture[str]
) -> None:
    """What `tune` prints is what `translate` takes, and what `evaluate` then finds is what a translator does."""
    (run, back), (forward, other) = (str(one) for one in runs), both
    assert run_command(["tune", run, "--reverse", back, "--beam", "4", "--device", "cpu"]) == 0
    said = capsys.readouterr()
    best = tune(forward, PAIRS, beam_size=4, reverse=other)[0]
    assert said.out.splitlines()[0] == "BLEU\tflags"
    assert said.out.splitlines()[1].startswith(f"{best.bleu:.2f}\t")
    (command,) = (line for line in said.err.splitlines() if line.startswith("use it: regard translate "))
    flags = command.removeprefix("use it: regard translate ").split()
    assert flags[flags.index("--reverse-weight") + 1] == str(best.weight)
    how: dict[str, Any] = {
        "beam": Beam(4, length_penalty=best.length_penalty, length_reward=best.length_reward),
        "reverse": Reverse(other, best.weight),
    }
    assert run_command(["translate", *flags, SOURCES[2], "--device", "cpu"]) == 0
    assert capsys.readouterr().out.strip() == next(forward.translate([SOURCES[2]], **how)).text
    data = str(Path(run).parent / "pairs.tsv")
    assert run_command(["evaluate", *flags, "--data", data, "--device", "cpu"]) == 0
    assert f"BLEU\t{forward.evaluate(PAIRS, **how).bleu.value:.2f}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--reverse-weight", "0.2"], "--reverse-weight goes with --reverse"),
        (["--reverse", "{back}", "--reverse-weight", "0"], "--reverse-weight must be above 0, got 0.0"),
        (["--reverse", "{back}", "--beam", "1"], "give a --beam of 2 at least"),
        (["--reverse", "{back}-not"], "{back}-not"),
        (["--length-reward", "-1"], "--length-reward must be at least 0, got -1.0"),
        (["--length-reward", "nan"], "--length-reward must be at least 0, got nan"),
        (["--length-reward", "0.5", "--length-penalty", "1"], "--length-reward changes nothing at a"),
        (["--length-reward", "0.5", "--beam", "1"], "--length-reward is for a beam"),
        (["--length-reward", "1e308"], "--length-penalty and --length-reward must be at most 50, got 1e+308"),
        (["--length-penalty", "400"], "--length-penalty and --length-reward must be at most 50, got 400.0"),
        (["--reverse", "{run}"], "is the run itself"),
        (
            ["--length-reward", "0.5", "--engine", "ctranslate2"],
            "--engine ctranslate2 has no length reward: leave out --length-reward",
        ),
    ],
)
@pytest.mark.parametrize("command", ["translate", "evaluate"])
def test_what_does_not_go_together_is_refused(
    runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str], command: str, flags: list[str], message: str
) -> None:
    run, back = runs
    data = ["--data", str(run.parent / "pairs.tsv")] if command == "evaluate" else ["a word"]
    assert run_command([command, str(run), *data, *(flag.format(back=back, run=run) for flag in flags)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert message.format(back=back) in said.err
    assert len(said.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--beam", "1"], "--beam must be at least 2"),
        (["--valid", "nowhere.tsv"], "nowhere.tsv"),
        (["--reverse", "nowhere"], "nowhere"),
        (["--reverse", "{run}"], "is the run itself"),
    ],
)
def test_tuning_refuses(
    runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert run_command(["tune", str(runs[0]), *(flag.format(run=runs[0]) for flag in flags), "--device", "cpu"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert message in said.err
    assert len(said.err.splitlines()) == 1


def test_where_bleu_tells_nothing_no_flags_are_recommended(
    runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write_pairs(tmp_path / "other.tsv", [(source, "x y z w v") for source, _ in PAIRS])
    assert run_command(["tune", str(runs[0]), "--valid", str(other), "--beam", "2", "--device", "cpu"]) == 0
    said = capsys.readouterr().err
    assert "no choice reaches 1 BLEU, where BLEU tells nothing" in said
    assert "use it" not in said
