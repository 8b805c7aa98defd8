"""Models and checkpoints that ranks share: the losses of one rank, whole after any death, read by any number."""

import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from regard.errors import ArgumentError, RunFolderError
from regard.models.config import DecoderOnlyConfig, RNNConfig, TransformerConfig
from regard.models.decoder_only import DecoderOnly
from regard.models.rnn import RNNSeq2Seq
from regard.models.transformer import Transformer
from regard.nn import MultiHeadAttention
from regard.training.checkpoints import Checkpoints, Position, TrainingState
from regard.training.distributed.sharding import follow, total_norm
from regard.training.distributed.shares import share
from regard.training.distributed.tensor_files import SavedTensor
from regard.training.gradient_checkpointing import recompute_layers
from regard.training.optimizers import adamw
from regard.training.qk_clip import QKClip
from regard.training.random_state import seed_everything
from tests.forked import run_ranks
from tests.training.many_ranks import look_of, train, two_attentions

# -- trainings by one, two and four processes ----------------------------------------------------------


def launch(ranks: int, *jobs: dict[str, Any]) -> None:
    for done in run_ranks(ranks, json.dumps(jobs, default=str), function="tests.training.many_ranks:main"):
        assert done.returncode == 0, done.stderr[-5000:]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """By one rank: to step 12 in one go, and to step 8. By four that share the model: the same, and on from one's."""
    folder = tmp_path_factory.mktemp("runs")
    train(folder / "one", steps=8)
    shutil.copytree(folder / "one", folder / "one-8")
    train(folder / "one", steps=12)
    sharded: dict[str, Any] = {"strategy": "fsdp"}
    launch(
        4,
        {"folder": folder / "four-8", "steps": 8, **sharded},
        {"folder": folder / "four", "copy_of": folder / "four-8", "steps": 12, **sharded},
        {"folder": folder / "four-after-one", "copy_of": folder / "one-8", "steps": 12, **sharded},
    )
    return folder


@pytest.fixture(scope="module")
def pairs(runs: Path) -> Path:
    """By two ranks, some from the checkpoint of four."""
    sharded: dict[str, Any] = {"strategy": "fsdp"}
    launch(
        2,
        {"folder": runs / "two-after-four", "copy_of": runs / "four-8", "steps": 12, **sharded},
        {"folder": runs / "copies-after-four", "copy_of": runs / "four-8", "steps": 12, "strategy": "ddp"},
        {"folder": runs / "dropping", "steps": 8, "dropout": 0.3, **sharded},
        {"folder": runs / "dropping-4", "steps": 4, "dropout": 0.3, **sharded},
        {"folder": runs / "dropping-4", "steps": 8, "dropout": 0.3, **sharded},
        {"folder": runs / "full", "copy_of": runs / "four-8", "steps": 12, "act": "full disk", "rank": 1, **sharded},
        {"folder": runs / "built", "act": "build"},
        {"folder": runs / "clipped", "act": "clip"},
    )
    return runs


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def check_same(ours: Path, theirs: Path) -> None:
    """Losses, gradient norms, validations by the average, and everything in the last checkpoint."""
    for one, other in zip(records(ours), records(theirs), strict=True):
        assert (one["event"], one["step"]) == (other["event"], other["step"])
        assert abs(one["loss"] - other["loss"]) < 1e-5
        assert one.get("gradient_norm", 0) == pytest.approx(other.get("gradient_norm", 0), rel=1e-5)
    mine, other_state = Checkpoints(ours).load_last(), Checkpoints(theirs).load_last()
    assert mine.position.step == other_state.position.step
    for part in ("model", "optimizer", "average"):
        a, b = getattr(mine, part), getattr(other_state, part)
        assert set(a) == set(b)
        assert max(float((a[name] - b[name]).abs().max()) for name in a) < 1e-5
    best = Checkpoints(ours).load_model("best"), Checkpoints(theirs).load_model("best")
    assert max(float((best[0][name] - best[1][name]).abs().max()) for name in best[0]) < 1e-5


@pytest.mark.parametrize("name", ["four", "four-after-one"])
def test_four_ranks_train_as_one(runs: Path, name: str) -> None:
    """In one go with a stop, and from a checkpoint of one rank: clipping, tied weights and the average are right."""
    check_same(runs / name, runs / "one")


@pytest.mark.parametrize("name", ["two-after-four", "copies-after-four"])
def test_two_ranks_go_on_from_four(pairs: Path, name: str) -> None:
    check_same(pairs / name, pairs / "one")


def test_one_rank_goes_on_from_four(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "four-8", tmp_path / "run")
    train(tmp_path / "run", steps=12)
    check_same(tmp_path / "run", runs / "one")


def test_heads_are_bounded_by_the_largest_logits_of_both_ranks(pairs: Path) -> None:
    """As one process that saw what both saw; also in the module that only one of them ran."""
    model = two_attentions()
    clip, before = QKClip(model, 1.0), {name: value.clone() for name, value in model.state_dict().items()}
    with clip.watching():
        for rank in (0, 1):
            model["each"](look_of(rank))
        model["last"](look_of(1))
    assert set(clip.step()) == {"each", "last"}
    for rank in (0, 1):
        found = load_file(pairs / "clipped" / f"clipped-{rank}.safetensors")
        for name, largest in clip.largest.items():
            torch.testing.assert_close(found.pop(f"largest {name}"), largest, rtol=1e-5, atol=1e-5)
        assert set(found) == set(before)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert {name.partition(".")[0] for name in changed} == {"each", "last"}


def test_each_rank_writes_its_share_and_tied_weights_once(runs: Path) -> None:
    manifest = json.loads((runs / "four" / "last" / "checkpoint.json").read_text())
    model = manifest["files"]["model"]
    assert [file["name"][:21] for file in model["shards"]] == [f"model-0000{rank}-of-00004-" for rank in range(4)]
    assert model["aliases"] == {"out.weight": "embedding.weight"}
    assert model["tensors"]["embedding.weight"] == {"shape": [13, 11], "offsets": [0, 4, 8, 12]}
    assert model["tensors"]["scale"] == {"shape": [3, 11], "offsets": [0, 1, 2, 3]}  # nothing is left for the last
    assert model["tensors"]["shift"]["offsets"] == [0, 11, 11, 11]  # a buffer, which all have
    sizes = [file["bytes"] for file in model["shards"]]
    assert max(sizes) < 0.6 * sum(file.stat().st_size for file in (runs / "one" / "last").glob("model-*"))
    assert not list((runs / "four").rglob("*.tmp"))
    assert len(list((runs / "four" / "last").iterdir())) == 1 + 3 * 4 + 1  # the manifest, the parts, random states


def test_stopped_and_gone_on_with_by_as_many_ranks_is_the_same_to_the_bit(pairs: Path) -> None:
    """With dropout: every rank has its random state back."""
    ours, theirs = records(pairs / "dropping-4"), records(pairs / "dropping")
    assert [(r["step"], r["loss"]) for r in ours] == [(r["step"], r["loss"]) for r in theirs]
    assert len(ours) == 10
    a, b = (Checkpoints(pairs / name).load_last() for name in ("dropping-4", "dropping"))
    assert all(torch.equal(a.model[name], b.model[name]) for name in b.model)
    assert not torch.equal(a.random["torch"][0], a.random["torch"][1])


def test_a_full_disk_of_one_rank_stops_all_and_loses_nothing(pairs: Path) -> None:
    told = [(pairs / "full" / f"told-{rank}.txt").read_text() for rank in range(2)]
    assert all("No space left on device" in one for one in told)
    assert ["on rank 1" in one for one in told] == [True, False]
    state = Checkpoints(pairs / "full").load_last()
    assert state.position.step == 8
    assert all(torch.equal(value, state.model[name]) for name, value in last(pairs / "four-8").model.items())


def last(folder: Path) -> TrainingState:
    return Checkpoints(folder).load_last()


def test_layers_are_shared_out_as_they_are_made(pairs: Path) -> None:
    """No rank holds two whole layers at a time; weights, answers and gradients are those of one process."""
    seed_everything(3)
    model = DecoderOnly(
        DecoderOnlyConfig(dim=12, num_heads=2, num_layers=2, feed_forward_dim=20, dropout=0.0), vocab_size=17
    )
    whole, made = dict(model.named_parameters()), load_file(pairs / "built" / "made.safetensors")
    for name, value in made.items():
        rows = -(-len(whole[name]) // 2) if name.startswith("layers.") else len(whole[name])
        assert torch.equal(value, whole[name][:rows]), name
    answer = load_file(pairs / "built" / "answer.safetensors")
    logits = model(torch.arange(6)[None])
    logits.sum().backward()
    for name in ("logits", "after"):
        torch.testing.assert_close(answer[name], logits.detach(), rtol=0, atol=1e-6)
    torch.testing.assert_close(answer["stepped"], model(torch.arange(7)[None]).detach()[:, -1], rtol=0, atol=1e-6)
    assert float(answer["norm"]) == pytest.approx(
        total_norm([cast(Tensor, p.grad) for p in model.parameters()]), rel=1e-5
    )


# -- files of shares, without processes ----------------------------------------------------------------


class Shared:
    """A tensor whose rows are shared out, as torch's `DTensor` shows itself."""

    def __init__(self, whole: Tensor, rank: int, world_size: int) -> None:
        self._whole, self._rank, self._world_size = whole, rank, world_size
        self.shape, self.placements, self.device_mesh = whole.shape, (self,), self

    def is_shard(self, dim: int) -> bool:
        return dim == 0

    def size(self) -> int:
        return self._world_size

    def get_local_rank(self) -> int:
        return self._rank

    def to_local(self) -> Tensor:
        parts = self._whole.chunk(self._world_size)
        return parts[self._rank] if self._rank < len(parts) else self._whole[:0]


class Together:
    """Ranks that are threads."""

    def __init__(self, rank: int, answers: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.world_size, self._answers, self._barrier = rank, len(answers), answers, barrier

    def gather(self, work: Callable[[], Any]) -> list[Any]:
        try:
            self._answers[self.rank] = work()
        except BaseException:
            self._barrier.abort()
            raise
        self._barrier.wait()
        found = list(self._answers)
        self._barrier.wait()
        return found


def save(folder: Path, tensors: dict[str, Tensor], world_size: int, position: Position) -> list[BaseException]:
    """A checkpoint by so many threads, and what went wrong in them."""
    answers: list[Any] = [None] * world_size
    barrier, wrong = threading.Barrier(world_size), []

    def act(rank: int) -> None:
        shares: Any = {name: Shared(value, rank, world_size) for name, value in tensors.items()}
        state = TrainingState({**shares, "again": shares["w"]}, {"w:step": torch.ones(())}, {}, position)
        try:
            Checkpoints(folder).save_last(state, Together(rank, answers, barrier))  # type: ignore[arg-type]
        except threading.BrokenBarrierError:
            pass
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=act, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong


def rows_of(rank: int, world_size: int) -> Callable[[str, SavedTensor], Tensor]:
    """What a rank of another number reads, of what has rows."""

    def place(_name: str, saved: SavedTensor) -> Tensor:
        if not saved.shape:
            return saved.read()
        mine = share(Shared(torch.empty(saved.shape), rank, world_size))  # type: ignore[arg-type]
        return saved.rows(mine.first, mine.first + len(mine.rows))

    return place


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 9), other=st.integers(0, 5), writers=st.integers(1, 5), readers=st.integers(1, 5))
def test_any_number_of_ranks_reads_what_any_number_wrote(
    tmp_path_factory: pytest.TempPathFactory, rows: int, other: int, writers: int, readers: int
) -> None:
    folder = tmp_path_factory.mktemp("shares")
    tensors = {"w": torch.randn(rows, 3), "b": torch.arange(other).to(torch.bfloat16)}
    assert not save(folder, tensors, writers, Position(step=7))
    whole = Checkpoints(folder).load_last()
    parts = [Checkpoints(folder).load_last(rows_of(rank, readers)) for rank in range(readers)]
    for name, value in (tensors | {"again": tensors["w"]}).items():
        assert torch.equal(whole.model[name], value)
        assert whole.model[name].dtype == value.dtype
        assert torch.equal(torch.cat([part.model[name] for part in parts]), value)
    assert all(float(part.optimizer["w:step"]) == 1.0 and part.position.step == 7 for part in parts)


@pytest.mark.parametrize("fatal", range(0, 20))
def test_death_of_a_rank_at_any_write_leaves_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fatal: int
) -> None:
    """Four ranks wrote the old one, three the new: whichever rename or sync is the last, one of them is whole."""
    folder, frozen = tmp_path / "run", tmp_path / "frozen"
    old, new = ({"w": torch.full((7, 3), fill)} for fill in (1.0, 2.0))
    assert not save(folder, old, 4, Position(step=7))
    calls, lock = 0, threading.Lock()

    def count(real: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any) -> Any:
            nonlocal calls
            with lock:
                calls += 1
                if calls == fatal + 1:  # what a kill of all would leave: the folder as it is now
                    shutil.copytree(folder, frozen)
                    raise KeyboardInterrupt
                return real(*arguments)

        return wrapped

    monkeypatch.setattr(os, "fsync", count(os.fsync))
    monkeypatch.setattr(os, "replace", count(os.replace))
    assert len(save(folder, new, 3, Position(step=8))) == (fatal < calls)
    for left in (frozen, folder) if fatal < calls else (folder,):
        state = Checkpoints(left).load_last()
        assert (state.position.step, *state.model["w"].unique().tolist()) in [(7, 1.0), (8, 2.0)]
    monkeypatch.undo()
    assert not save(folder, old, 2, Position(step=9))  # and what was left lying about is gone
    assert len(list((folder / "last").iterdir())) == 1 + 2 + 1 + 1


def damage(path: Path, content: Callable[[bytes], bytes]) -> None:
    path.write_bytes(content(path.read_bytes()))


def test_damaged_shares_are_refused(tmp_path: Path) -> None:
    save(tmp_path, {"w": torch.randn(7, 3)}, 3, Position())
    second = next((tmp_path / "last").glob("model-00001-of-00003-*"))
    good = second.read_bytes()
    damage(second, lambda content: content[:-4])
    with pytest.raises(RunFolderError, match="was cut short"):
        Checkpoints(tmp_path).load_model("last")
    Checkpoints(tmp_path).load_last(rows_of(0, 3))  # whose rows are elsewhere
    damage(second, lambda content: good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(RunFolderError, match="was altered"):
        Checkpoints(tmp_path).load_model("last")
    second.unlink()
    with pytest.raises(RunFolderError, match="is missing"):
        Checkpoints(tmp_path).load_model("last")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda model: model["tensors"]["w"].update(shape=[8, 3]), "not of one checkpoint"),
        (lambda model: model["tensors"]["w"].update(offsets=[0, 2, 6]), "not of one checkpoint"),
        (lambda model: model["tensors"].update(w=None), "holds no model"),
        (lambda model: model.update(shards=3), "holds no model"),
        (lambda model: model["shards"].pop(), "holds no model"),
        (lambda model: model.pop("aliases"), "holds no model"),
        (lambda model: model["shards"][2].pop("crc32"), "holds no model"),
    ],
)
def test_an_index_that_does_not_fit(tmp_path: Path, edit: Callable[[Any], Any], message: str) -> None:
    save(tmp_path, {"w": torch.randn(7, 3)}, 3, Position())
    path = tmp_path / "last" / "checkpoint.json"
    manifest = json.loads(path.read_text())
    del manifest["crc32"]  # the seal of what it said
    edit(manifest["files"]["model"])
    path.write_text(json.dumps(manifest))
    with pytest.raises(RunFolderError, match=message):
        Checkpoints(tmp_path).load_model("last")


def test_a_folder_that_ranks_do_not_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another machine wrote to a disk of its own is missed before it is named."""
    save(tmp_path, {"w": torch.ones(4, 3)}, 2, Position(step=1))
    real = os.replace

    def replace(source: Path, target: Path) -> None:
        if "00001-of" in Path(target).name:
            os.unlink(source)
        else:
            real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    (error,) = save(tmp_path, {"w": torch.zeros(4, 3)}, 2, Position(step=2))
    assert "all ranks need one folder" in str(error)
    assert float(Checkpoints(tmp_path).load_last().model["w"].sum()) == 12.0


def test_an_optimizer_without_names_cannot_follow() -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ArgumentError, match="need names"):
        follow(torch.optim.SGD(model.parameters(), lr=1.0), model)


# -- gradient checkpointing ----------------------------------------------------------------------------


def steps(model: torch.nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    """The losses of a few steps, with dropout."""
    torch.manual_seed(5)
    optimizer = adamw(model)
    for group in optimizer.param_groups:
        group["lr"] = 0.01
    losses = []
    for _ in range(3):
        loss = model(*inputs).logsumexp(-1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


@pytest.mark.parametrize("attention_dropout", [0.0, 0.2])
def test_recomputed_layers_give_the_same_bits(attention_dropout: float) -> None:
    sizes: dict[str, Any] = {
        "dim": 12,
        "num_heads": 2,
        "feed_forward_dim": 20,
        "dropout": 0.3,
        "attention_dropout": attention_dropout,
    }
    tokens, lengths = torch.randint(4, 17, (3, 7)), torch.tensor([7, 2, 5])

    def make(name: str) -> tuple[torch.nn.Module, tuple[Tensor, ...]]:
        torch.manual_seed(2)
        if name == "decoder":
            return DecoderOnly(DecoderOnlyConfig(num_layers=2, **sizes), vocab_size=17), (tokens,)
        config = TransformerConfig(encoder_layers=2, decoder_layers=2, **sizes)
        return Transformer(config, source_vocab_size=17, target_vocab_size=17), (tokens, lengths, tokens[:, :5])

    for name in ("decoder", "translator"):
        plain, inputs = make(name)
        again, _ = make(name)
        recompute_layers(again)
        runs_of_attention = count_calls(again)
        assert torch.equal(steps(plain, inputs), steps(again, inputs))
        assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), again.parameters(), strict=True))
        assert runs_of_attention[0] == 2 * 3  # there and back, in each step


def count_calls(model: torch.nn.Module) -> list[int]:
    """How often the first attention module is called."""
    calls = [0]

    def note(*_: Any) -> None:
        calls[0] += 1

    next(m for m in model.modules() if isinstance(m, MultiHeadAttention)).register_forward_pre_hook(note)
    return calls


def test_a_model_without_layers_has_nothing_to_recompute() -> None:
    with pytest.raises(ArgumentError, match="RNNSeq2Seq has no stack"):
        recompute_layers(RNNSeq2Seq(RNNConfig(), source_vocab_size=9, target_vocab_size=9))
