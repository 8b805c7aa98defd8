"""Translation word by word: when words are written, that they never change, and how far they lag behind."""

import itertools
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.errors import ArgumentError, DataError
from regard.tasks import train_translation
from regard.tasks.generation.config import Beam
from regard.tasks.text.tokenizer_recipes import ByteLevelBPE, Characters, Words
from regard.tasks.text.tokenizers import EOS, UNK
from regard.tasks.translation.alignments import AlignmentOf
from regard.tasks.translation.simultaneous.evaluation import evaluate_interpreter, try_heads
from regard.tasks.translation.simultaneous.interpreter import Interpreted, Interpreter
from regard.tasks.translation.simultaneous.lagging import average_lagging, length_adaptive_average_lagging
from regard.tasks.translation.simultaneous.policies import AlignAtt, ReadWritePolicy, WaitK
from regard.tasks.translation.translator import Translator
from tests.conftest import Call
from tests.tasks.small_runs import PAIRS, small_config, write_pairs
from tests.tasks.test_translate_options import TARGETS, favour, make

SENTENCES = ["we see two trees", "they see two", "we", "Zoë sees Oslo"]
KINDS: dict[str, Any] = {"words": Words, "pieces": lambda: ByteLevelBPE(vocab_size=300), "characters": Characters}


# -- lagging: the formulas of the papers, written out here a second time ------------------------------------


def lagging_of_the_paper(delays: Sequence[int], source: int, target: int) -> float:
    tau = min([i for i in range(1, len(delays) + 1) if delays[i - 1] >= source] or [len(delays)])
    r = target / source
    return sum(delays[i - 1] - (i - 1) / r for i in range(1, tau + 1)) / tau


def test_lagging_is_that_of_the_papers() -> None:
    dice = random.Random(3)
    for _ in range(300):
        source, target = dice.randint(1, 9), dice.randint(1, 9)
        delays = sorted(dice.randint(1, source) for _ in range(dice.randint(1, 12)))
        assert average_lagging(delays, source, target) == pytest.approx(lagging_of_the_paper(delays, source, target))
        longest = max(target, len(delays))
        expected = lagging_of_the_paper(delays, source, longest)
        assert length_adaptive_average_lagging(delays, source, target) == pytest.approx(expected)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_wait_k_lags_k_words_behind_a_translation_of_the_same_length(k: int) -> None:
    """Ma et al. 2019, section 3.3: AL of wait-k is k if both sides are equally long."""
    delays = [min(k + t - 1, 6) for t in range(1, 5)]
    assert average_lagging(delays, 6, 6) == pytest.approx(k)


def test_a_whole_sentence_lags_by_its_length() -> None:
    assert average_lagging([5, 5, 5], 5, 3) == length_adaptive_average_lagging([5, 5, 5], 5, 3) == 5.0


def test_nothing_has_no_lagging() -> None:
    with pytest.raises(ArgumentError, match="0 delays and lengths 3 and 2"):
        average_lagging([], 3, 2)


# -- policies -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("make_policy", "message"), [(lambda: AlignAtt(0), "frames"), (lambda: WaitK(0), "k must be")])
def test_policies_refuse_numbers_below_one(make_policy: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=f"{message}.*got 0"):
        make_policy()


def test_both_are_policies() -> None:
    assert isinstance(AlignAtt(), ReadWritePolicy)
    assert isinstance(WaitK(), ReadWritePolicy)


# -- the interpreter ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=list(KINDS))
def translator(request: pytest.FixtureRequest) -> Translator:
    return make(tokenizer=KINDS[request.param], max_length=18)


def states_of(interpreter: Interpreter, sentence: str) -> list[Interpreted]:
    return list(interpreter.interpret(sentence.split()))


@pytest.mark.parametrize("policy", [AlignAtt(1), WaitK(2)], ids=str)
def test_what_is_written_stays(translator: Translator, policy: ReadWritePolicy) -> None:
    for sentence in SENTENCES[:2]:
        states = states_of(Interpreter(translator, policy), sentence)
        for before, after in itertools.pairwise(states):
            assert after.written[: len(before.written)] == before.written
            assert after.tokens[: len(before.tokens)] == before.tokens
        last = states[-1]
        assert last.read == tuple(sentence.split())
        assert len(last.delays) == len(last.written)
        assert list(last.delays) == sorted(last.delays)
        assert " ".join(translator.target_tokenizer.decode(last.tokens).split()) == last.text


def words_alone(**changes: Any) -> Translator:
    """A model that writes words alone, each of which is a token, so that it has one whenever one is due."""
    words = make(**changes)
    ((one,),) = words.target_tokenizer.encode_batch(["on"])
    for token in range(words.model.output.out_features):
        if token == UNK or (token != EOS and len(words.target_tokenizer.decode([one, token]).split()) == 1):
            favour(words, token, -1e4)
    return words


@pytest.mark.parametrize("k", [1, 2, 3])
def test_wait_k_writes_a_word_for_each_word(translator: Translator, k: int) -> None:
    for sentence in SENTENCES:
        states = states_of(Interpreter(translator, WaitK(k)), sentence)
        for number, state in enumerate(states[:-1], start=1):
            if translator.target_tokenizer.unknown_id is None or "\ufffd" not in state.text:
                assert len(state.written) <= max(number - k + 1, 0)
        delays = states[-1].delays
        assert all(delay >= min(k + t, len(sentence.split())) for t, delay in enumerate(delays))
    words = words_alone()
    states = states_of(Interpreter(words, WaitK(k)), "we see one red house")
    assert [len(state.written) for state in states[:-1]] == [max(n - k + 1, 0) for n in range(1, 6)]


def test_waiting_for_the_end_is_to_translate_as_ever(translator: Translator) -> None:
    """Neither policy has any effect if it waits for longer than the sentence."""
    for policy in (AlignAtt(99), WaitK(99)):
        for sentence in SENTENCES:
            *before, last = states_of(Interpreter(translator, policy), sentence)
            assert not any(state.written for state in before)
            whole = next(translator.translate([sentence], beam=Beam(1))).text
            assert last.text == " ".join(whole.split())


def dense_alignment(translator: Any, state: Interpreted, tokens: Sequence[int], which: AlignmentOf) -> Tensor:
    """(T, S) of a source that has been read so far, by a teacher-forced pass of this sentence alone."""
    ids = translator.source_tokenizer.encode(" ".join(state.read))
    source, target = torch.tensor([[*ids, 2]]), torch.tensor([[1, *tokens[:-1]]])
    with torch.no_grad():
        maps = translator.model.attend(source, torch.tensor([len(ids) + 1]), target)
    return which.of(maps, translator.model.alignment_names)[0][:, :-1]  # without the end mark


@pytest.mark.parametrize("which", [AlignmentOf(layer=0, head=1), AlignmentOf(layer=2), AlignmentOf(layer=-2, head=0)])
def test_align_att_writes_what_is_aligned_with_old_words(which: AlignmentOf) -> None:
    """Asked of each written word alone, from attention that was computed anew."""
    translator, checked = make(), 0
    for frames in (1, 2):
        for sentence in SENTENCES:
            states = states_of(Interpreter(translator, AlignAtt(frames), which), sentence)
            for before, state in itertools.pairwise(states):
                new = state.tokens[len(before.tokens) :]
                if state.has_ended or not new:
                    continue
                rows = dense_alignment(translator, state, state.tokens, which)[-len(new) :]
                assert (rows.argmax(-1) < len(state.read) - frames).all()
                checked += 1
    assert checked or which.layer == 2


class LooksAt(AlignmentOf):
    """Attention that is mostly on the end mark, and then on one source token."""

    def of(self, maps: Any, names: Sequence[str]) -> Tensor:
        weights = torch.zeros_like(maps[names[-1]].dense().mean(1))
        weights[..., -1], weights[..., 0] = 0.9, 0.1
        return weights


def test_the_end_mark_is_no_word() -> None:
    """However much it is looked at, what is looked at next decides: here the first word, so that words are written."""
    translator = words_alone(max_length=18)
    favour(translator, EOS, -8.0)
    *before, last = states_of(Interpreter(translator, AlignAtt(1), LooksAt()), SENTENCES[0])
    first, *others = (len(state.written) for state in before)
    assert first == 0  # there is no other word yet than the newest
    assert others[0] > 0
    assert last.written


def test_tokens_of_a_word_are_that_word() -> None:
    """A tokenizer of characters has several tokens a word: all that belong to the newest word are too new."""
    translator = make(tokenizer=Characters, max_length=18)
    for state in states_of(Interpreter(translator, AlignAtt(1)), SENTENCES[0]):
        counts = [len(translator.source_tokenizer.encode_batch([" ".join(state.read[:n])])[0]) for n in range(1, 5)]
        assert list(state.tokens_read) == counts[: len(state.read)]


def test_sentences_read_together_are_as_each_alone(translator: Translator) -> None:
    for policy in (AlignAtt(1), WaitK(2)):
        interpreter = Interpreter(translator, policy)
        pairs = [(sentence, "on voit une maison") for sentence in SENTENCES]
        found = evaluate_interpreter(interpreter, pairs)
        alone = [states_of(interpreter, sentence)[-1] for sentence in SENTENCES]
        assert found.translations == [state.text for state in alone]
        lags = [average_lagging(s.delays, len(s.read), 4) for s in alone if s.delays]
        assert found.al == pytest.approx(sum(lags) / max(len(lags), 1))
        assert found.laal >= found.al


def test_a_sentence_that_is_too_long_is_refused() -> None:
    translator = make(max_length=4)
    with pytest.raises(DataError, match="the sentence has 5 tokens, and the model takes 4"):
        states_of(Interpreter(translator, WaitK(1)), "we see one red house")


def test_a_layer_that_is_not_there_is_refused() -> None:
    with pytest.raises(ArgumentError, match="expected a layer from -3 to 2"):
        Interpreter(make(), AlignAtt(), AlignmentOf(layer=7))


def test_every_head_is_tried_and_the_best_comes_first() -> None:
    translator = make(decoder_layers=1, num_heads=2, max_length=10)
    pairs = list(zip(SENTENCES[:2], TARGETS, strict=False))
    found = try_heads(translator, pairs)
    assert len(found) == 2 + 1
    assert len({str(one.alignment) for one in found}) == len(found)
    assert [one.gain for one in found] == sorted((one.gain for one in found), reverse=True)
    best = found[0]
    again = evaluate_interpreter(Interpreter(translator, AlignAtt(2), best.alignment), pairs)
    assert (again.bleu.value, again.laal) == (best.bleu, best.laal)


def test_a_recurrent_model_interprets_too() -> None:
    states = states_of(Interpreter(make("rnn"), AlignAtt(1)), SENTENCES[0])
    assert states[-1].has_ended


# -- the command line ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("simultaneous")
    config = small_config(folder, steps=60, validate_every=60, save_every=60, tokenizer="words", max_length=8)
    train_translation(config)
    return folder / "run"


@pytest.fixture
def typed(call: Call) -> Call:
    """A command on the CPU."""
    return lambda *arguments, **given: call(*arguments, "--device", "cpu", **given)


def test_lines_from_a_pipe_are_those_of_the_interpreter(run: Path, typed: Call) -> None:
    lines = ["we see one cats", "", "we  see two trees"]
    status, out, _ = typed("translate", str(run), "--simultaneous", "--wait-k", "1", stdin="\n".join(lines).encode())
    interpreter = Interpreter(Translator.load(run, device="cpu"), WaitK(1))
    expected = [list(interpreter.interpret(line.split()))[-1].text for line in lines]
    assert (status, out.splitlines()) == (0, expected)


def test_a_bad_line_stops_or_is_cut_short(run: Path, typed: Call) -> None:
    long, good = "we see " * 9, "we see two cats"
    data = f"{long}\n{good}\n".encode() + b"we \xff see\n" + good.encode()
    status, _, err = typed("translate", str(run), "--simultaneous", stdin=data)
    limit = "9 tokens, and the limit is 8: cut it, or raise the limit (--max-length)"
    assert (status, err.splitlines()[-1]) == (2, f"regard: standard input:1: the sentence has {limit}")
    status, out, err = typed("translate", str(run), "--simultaneous", "--bad-lines", "skip", stdin=data)
    assert status == 0
    assert len(out.splitlines()) == 4
    assert out.splitlines()[1] == out.splitlines()[3] != ""
    assert err.splitlines()[-1].startswith("bad lines cut short: 2; the first: standard input:1: the sentence has 9")
    longer = ["translate", str(run), "--simultaneous", "--max-length", "30"]  # as the message advises
    assert typed(*longer, stdin=f"{long}\n".encode())[0] == 0


def test_each_word_is_printed_before_the_next_is_there(run: Path) -> None:
    """A pipe that waits for the first word of the translation before it sends the rest of the sentence."""
    command = [sys.executable, "-m", "regard", "translate", str(run), "--simultaneous", "--wait-k", "1"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [*command, "--device", "cpu"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, bufsize=0
    ) as process:
        process.stdin.write(b"we see ")
        first = process.stdout.read(1)
        assert first
        assert process.poll() is None
        process.stdin.write(b"two cats\n")
        process.stdin.close()
        rest = process.stdout.read()
    interpreter = Interpreter(Translator.load(run, device="cpu"), WaitK(1))
    assert (first + rest).decode() == list(interpreter.interpret(["we", "see", "two", "cats"]))[-1].text + "\n"


def test_evaluate_prints_the_scores(run: Path, typed: Call) -> None:
    data = str(run.parent / "few.tsv")
    pairs = PAIRS[:4]
    write_pairs(Path(data), pairs)
    status, out, _ = typed("evaluate", str(run), "--data", data, "--simultaneous", "--wait-k", "2")
    found = evaluate_interpreter(Interpreter(Translator.load(run, device="cpu"), WaitK(2)), pairs)
    cells = dict(line.split("\t")[:2] for line in out.splitlines())
    assert status == 0
    assert cells["policy"] == "WaitK(k=2)"
    assert (cells["AL"], cells["LAAL"]) == (f"{found.al:.3f}", f"{found.laal:.3f}")
    assert cells["BLEU"] == f"{found.bleu.value:.2f}"
    status, out, _ = typed("evaluate", str(run), "--data", data, "--try-heads")
    assert status == 0
    assert len(out.splitlines()) == 1 + 3  # a line of names, the mean over heads, two heads


def test_a_test_set_may_have_sentences_longer_than_those_of_training(run: Path, typed: Call, tmp_path: Path) -> None:
    """There is no flag to raise the limit of training; only the model's own counts, and the pair is named."""
    data = str(write_pairs(tmp_path / "long.tsv", [("we see", "on y"), ("we " * 9, "on")]))
    for policy in (["--simultaneous", "--wait-k", "9"], ["--try-heads", "--frames", "9"]):
        assert typed("evaluate", str(run), "--data", data, *policy)[0] == 0
    with pytest.raises(DataError, match="pair 2: 5 tokens, and the model takes 4 at most"):
        evaluate_interpreter(Interpreter(make(max_length=4), WaitK(1)), [("we", "on"), ("we see one red", "on")])
