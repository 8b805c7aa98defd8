"""Memories of runs: what remembering brings, the commands, and what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from regard.cli.main import run_command
from regard.errors import ArgumentError, DataError
from regard.models.token_memory import RememberingOutput, read_by_output
from regard.tasks.translation import memory_file, remember
from regard.tasks.translation.memory_file import FILE, give_memories, read_memory, write_memory
from regard.tasks.translation.recalled import recalled
from regard.tasks.translation.remember import remember_for
from regard.tasks.translation.train import run_translation
from regard.tasks.translation.translator import Translator
from tests.tasks.small_runs import PAIRS, changed, small_config
from tests.tasks.test_pretrained import make_bart, make_marian


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has learnt a little, and its memory."""
    folder = tmp_path_factory.mktemp("remembered")
    config = small_config(folder, steps=60, validate_every=60, save_every=60, warmup_steps=20, out=folder / "run")
    run_translation(config)
    run_translation(changed(config, out=folder / "second", seed=1, steps=30))
    for one in ("run", "second"):
        assert run_command(["remember", str(folder / one), "--device", "cpu"]) == 0
    return folder / "run"


def test_remembering_lowers_the_loss(run: Path) -> None:
    """The figures of the file are those of the translator, with its memory and without."""
    found, alone = read_memory(run / FILE), Translator.load(run, device="cpu")
    asking = Translator.load(run, device="cpu", memories=[run / FILE])
    losses = {"without": alone.loss(PAIRS), "with": asking.loss(PAIRS)}
    assert losses == pytest.approx(dict(found.figures), abs=1e-3)  # the pairs are the run's validation pairs too
    assert losses["with"] < 0.5 * losses["without"]
    assert len(found.memory) == sum(len(ids) + 1 for ids in alone.target_tokenizer.encode_batch([t for _, t in PAIRS]))
    assert asking.fingerprint() != alone.fingerprint()  # so that no file is gone on with under another memory


def test_the_places_that_vote_are_told(run: Path) -> None:
    """For each token of a training pair that is forced, the nearest place is that token in that pair."""
    asking = Translator.load(run, device="cpu", memories=[run / FILE])
    output: Any = asking.model.output
    assert isinstance(output, RememberingOutput)
    number, (source, target) = 17, PAIRS[17]
    batch = asking.collate(
        asking.source_tokenizer.encode_batch([source]), asking.target_tokenizer.encode_batch([target])
    )
    (read,) = read_by_output(asking.model, batch.source, batch.source_lengths, batch.target_input)
    places, weights = output.voters(read)
    assert output.memory.tokens[places[:, 0]].tolist() == batch.target_output[0].tolist()
    assert output.memory.pairs[places[:, 0]].tolist() == [number] * len(places)
    torch.testing.assert_close(weights.sum(-1), torch.ones(len(places)))


def test_each_token_is_traced_to_its_pairs(run: Path) -> None:
    asking = Translator.load(run, device="cpu", memories=[run / FILE])
    tokens = recalled(asking, *PAIRS[17])
    assert [one.pairs[0][2:] for one in tokens] == [PAIRS[17]] * len(tokens)
    assert all(one.pairs[0].token == one.label for one in tokens)
    loss = -sum(torch.tensor(one.probability).log() for one in tokens) / len(tokens)
    assert float(loss) == pytest.approx(asking.loss([PAIRS[17]]), abs=1e-4)
    for one in tokens:
        weights = [pair.weight for pair in one.pairs]
        assert 0 < one.vote <= 1.0001
        assert weights == sorted(weights, reverse=True)
        assert len(weights) == 3
    with pytest.raises(ArgumentError, match="has no memory"):
        recalled(Translator.load(run, device="cpu"), *PAIRS[17])
    with pytest.raises(ArgumentError, match="got an empty one"):
        recalled(asking, "", "x")


def test_the_command_line(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    memory, source = ["--memory", str(run / FILE)], PAIRS[3][0]
    asking = Translator.load(run, device="cpu", memories=[run / FILE])
    assert run_command(["translate", str(run), source, *memory, "--device", "cpu"]) == 0
    assert capsys.readouterr().out.strip() == next(asking.translate([source])).text
    data = run.parent / "pairs.tsv"
    assert run_command(["evaluate", str(run), "--data", str(data), *memory, "--device", "cpu"]) == 0
    assert f"loss\t{asking.loss(PAIRS):.4f}" in capsys.readouterr().out
    other = tmp_path / "other.safetensors"
    command = ["remember", str(run), "--data", str(data), "--valid", str(data), "--out", str(other), "--device", "cpu"]
    assert run_command(command) == 0
    said = capsys.readouterr().err
    assert f"with it, {Translator.load(run, device='cpu').loss(PAIRS):.4f} without" in said
    assert torch.equal(read_memory(other).memory.keys, read_memory(run / FILE).memory.keys)


def test_each_run_of_an_ensemble_has_its_own(run: Path) -> None:
    """A memory finds its model whatever the order is in which files are named."""
    second = run.parent / "second"
    files = [second / FILE, run / FILE]
    both: Any = Translator.load(run, device="cpu", ensemble=[second], memories=files).model
    for member, place in zip(both.members, (run, second), strict=True):
        assert torch.equal(member.output.memory.keys, read_memory(place / FILE).memory.keys)
    one: Any = Translator.load(run, device="cpu", ensemble=[second], memories=files[:1]).model
    assert isinstance(one.members[0].output, torch.nn.Linear)
    assert isinstance(one.members[1].output, RememberingOutput)


def test_what_does_not_belong_together_is_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    second, own = run.parent / "second", run / FILE
    whole = own.read_bytes()
    (tmp_path / "cut").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "weights").write_bytes(next((run / "best").glob("*.safetensors")).read_bytes())
    wrongs = [
        (["--memory", str(second / FILE)], "was made by another model"),
        (["--memory", str(own), str(own)], "is one too many"),
        (["--memory", str(tmp_path / "cut")], "is not a whole safetensors file"),
        (["--memory", str(tmp_path / "weights")], "is not a memory: regard remember makes one"),
        (["--memory", str(tmp_path / "nowhere")], "nowhere"),
        (["--memory", str(own), "--engine", "ctranslate2"], "has no memory: leave out --memory"),
    ]
    for command in (["translate", str(run), "a word"], ["evaluate", str(run), "--data", str(run.parent / "pairs.tsv")]):
        for flags, message in wrongs:
            assert run_command([*command, *flags, "--device", "cpu"]) == 2
            said = capsys.readouterr()
            assert said.out == ""
            assert message in said.err
            assert len(said.err.splitlines()) == 1
    for command, message in (
        (["remember", str(run)], "is there already: give --overwrite"),
        (["remember", str(run), "--out", str(tmp_path)], "is a folder; name a file"),
        (["remember", str(run), "--out", str(tmp_path / "no" / "file")], "there is no folder"),
        (["remember", str(run), "--data", str(tmp_path / "none.tsv"), "--overwrite"], "none.tsv"),
    ):
        assert run_command([*command, "--device", "cpu"]) == 2
        said = capsys.readouterr()
        assert message in said.err
        assert len(said.err.splitlines()) == 1
    assert own.read_bytes() == whole


def test_a_translator_with_a_memory_makes_none(run: Path) -> None:
    asking = Translator.load(run, device="cpu", memories=[run / FILE])
    with pytest.raises(ArgumentError, match="load the translator without memories"):
        remember_for(asking, run)


def test_a_damaged_vote_is_refused(run: Path, tmp_path: Path) -> None:
    found = read_memory(run / FILE)
    write_memory(tmp_path / "m", found._replace(model=""))
    content = (tmp_path / "m").read_bytes()
    for old, new in ((b'share\\"', b'shave\\"'), (b'\\"count\\": 32', b'\\"count\\": -2')):
        assert old in content
        (tmp_path / "damaged").write_bytes(content.replace(old, new))
        with pytest.raises(DataError, match="is a damaged memory"):
            read_memory(tmp_path / "damaged")


@pytest.mark.parametrize("make", [make_marian, make_bart])
def test_a_downloaded_translator_remembers(
    make: Callable[[Path], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, data, memory = make(tmp_path), tmp_path / "pairs.tsv", tmp_path / "m.safetensors"
    pairs = [("the old cat", "THE OLD CAT"), ("we see trees", "WE SEE")]
    data.write_text("".join(f"{source}\t{target}\n" for source, target in pairs), encoding="utf-8")
    command = ["remember", str(folder), "--out", str(memory), "--device", "cpu"]
    for flags, message in (([], "name some by --valid"), (["--valid", str(data)], "name some by --data")):
        assert run_command([*command, *flags]) == 2
        assert message in capsys.readouterr().err
    assert run_command([*command, "--data", str(data), "--valid", str(data)]) == 0
    capsys.readouterr()
    asking = Translator.load(folder, device="cpu", memories=[memory])
    assert recalled(asking, *pairs[1])[0].pairs[0][2:] == pairs[1]
    assert run_command(["translate", str(folder), pairs[0][0], "--memory", str(memory), "--device", "cpu"]) == 0
    assert capsys.readouterr().out.strip() == next(asking.translate([pairs[0][0]])).text


def test_memories_of_many_places_stand_in_lists(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Looking into all lists answers as looking at all places does; the file has them, and damaged ones are refused."""
    monkeypatch.setattr(remember, "LEAST_LISTED", 10)
    listed, data = tmp_path / "listed.safetensors", str(run.parent / "pairs.tsv")
    assert run_command(["remember", str(run), "--out", str(listed), "--device", "cpu"]) == 0
    assert "lists a search on the CPU looks at 32" in capsys.readouterr().err
    found, plain = read_memory(listed), read_memory(run / FILE)
    assert found.memory.lists is not None
    assert plain.memory.lists is None
    assert len(found.memory.lists.sizes) <= 32  # so that all are looked at
    for one in (found.memory, plain.memory):
        assert sorted(zip(one.tokens.tolist(), one.pairs.tolist(), strict=True)) == sorted(
            zip(plain.memory.tokens.tolist(), plain.memory.pairs.tolist(), strict=True)
        )
    query = plain.memory.keys[::7] + 0.01
    for got, expected in zip(found.memory.nearest(query, 8)[:1], plain.memory.nearest(query, 8)[:1], strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)
    asking = Translator.load(run, device="cpu", memories=[listed])
    tokens = recalled(asking, *PAIRS[17])
    assert [one.pairs[0][2:] for one in tokens] == [PAIRS[17]] * len(tokens)
    assert asking.loss(PAIRS) == pytest.approx(found.figures["with"], abs=1e-3)
    assert run_command(["evaluate", str(run), "--data", data, "--memory", str(listed), "--device", "cpu"]) == 0
    capsys.readouterr()
    centres, sizes = found.memory.lists
    write_memory(tmp_path / "plain", found._replace(memory=plain.memory))
    with safe_open(tmp_path / "plain", "pt") as file:
        metadata = file.metadata()
    wrongs = [
        (centres, sizes - 1),
        (centres, sizes * 0),
        (centres, sizes.float()),
        (centres, sizes[:, None]),
        (centres, torch.full_like(sizes, 2**62)),
        (centres.to(torch.complex64), sizes),
        (centres.double() + 1e300, sizes),
    ]
    for some in wrongs:
        tensors = load_file(tmp_path / "plain") | dict(zip(("centres", "sizes"), some, strict=True))
        save_file(tensors, tmp_path / "wrong", metadata=metadata)
        with pytest.raises(DataError, match="is a damaged memory"):
            read_memory(tmp_path / "wrong")


def test_a_memory_is_where_its_model_is(run: Path) -> None:
    """A model on a GPU asks a memory on the same; here a device stands for it that has no numbers."""
    model = Translator.load(run, device="cpu").model
    there = torch.nn.Module()
    there.output = torch.nn.Linear(model.output.in_features, model.output.out_features, device="meta")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_file, "fingerprint", lambda _: read_memory(run / FILE).model)
        give_memories([(run, there)], [run / FILE])
    output: Any = there.output
    assert {output.memory.keys.device.type, output.memory._half_squares.device.type} == {"meta"}
