import json
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.errors import ArgumentError, DataError, NonFiniteError, RunFolderError
from regard.models.config import DecoderOnlyConfig, RNNConfig, TransformerConfig
from regard.models.one_stack import DecoderOnly
from regard.models.rnn import RNNSeq2Seq
from regard.models.transformer import Transformer
from regard.nn import MultiHeadAttention
from regard.tasks import train_translation
from regard.tasks.runs import run
from regard.tasks.runs.run import recompute_layers
from regard.tasks.training import distributed as devices
from regard.tasks.training.checkpoints import Checkpoints
from regard.tasks.training.distributed import agreed_precision, choose_precision, start_fabric
from regard.tasks.training.fit_config import FitConfig, constant
from regard.tasks.training.loop import fit
from regard.tasks.training.optimizers import adamw
from regard.tasks.training.reporting import Event, Finished, Saved, Stepped, Validated
from tests import forked
from tests.tasks.small_runs import changed, small_config
from tests.training.toy_training import Poisoned, ToyBatch, ToyBatches, ToyModel, run_in_process, toy_loss, train_toy

TOY = "tests.training.toy_training:main"
CONFIG = FitConfig(steps=40, validate_every=10, save_every=10, log_every=1)


def records(folder: Path, event: str = "train") -> list[dict[str, float]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["event"] == event]


def losses(folder: Path) -> list[tuple[float, float]]:
    return [(record["step"], record["loss"]) for record in records(folder)]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("straight")
    train_toy(folder, config=CONFIG)
    return folder


def test_loss_falls_and_validation_is_recorded(straight: Path) -> None:
    history = losses(straight)
    assert [step for step, _ in history] == list(range(1, 41))
    assert history[-1][1] < history[0][1] / 2
    assert [record["step"] for record in records(straight, "valid")] == [10, 20, 30, 40]
    shares = [record["padding_share"] for record in records(straight)]
    assert sum(shares) / len(shares) == pytest.approx(1 / 12, abs=0.03)  # a target in twelve is PAD


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="Windows has no SIGKILL")
def test_kill_9_and_resume_is_bit_identical(straight: Path, tmp_path: Path) -> None:
    killed = forked.run(str(tmp_path), "--signal", "SIGKILL", "--at", "27", function=TOY)
    assert killed.returncode == -signal.SIGKILL
    assert losses(tmp_path)[-1][0] == 27  # what is after step 20 is lost and made again
    assert Checkpoints(tmp_path).position("last").step == 20
    train_toy(tmp_path, config=CONFIG)
    assert losses(tmp_path) == losses(straight)
    assert records(tmp_path, "valid") == records(straight, "valid")
    for which in ("best", "last"):
        ours, theirs = Checkpoints(tmp_path).load_model(which), Checkpoints(straight).load_model(which)
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert Checkpoints(tmp_path).load_last().position == Checkpoints(straight).load_last().position


def test_resuming_a_finished_run_does_nothing(tmp_path: Path) -> None:
    config = replace(CONFIG, steps=10)
    train_toy(tmp_path, config=config)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.*") if path.is_file()}
    train_toy(tmp_path, config=config)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.*") if path.is_file()} == before


def test_log_windows_survive_a_resume(straight: Path, tmp_path: Path) -> None:
    """A stop in the middle of a window of eight steps leaves the mean of that window as it was."""
    coarse = replace(CONFIG, log_every=8, save_every=5)
    (tmp_path / "whole").mkdir()
    train_toy(tmp_path / "whole", config=coarse)
    (tmp_path / "cut").mkdir()

    def stop_at_10(event: Event) -> None:
        if event == Saved(step=10, which="last"):
            raise InterruptedError

    with pytest.raises(InterruptedError):
        train_toy(tmp_path / "cut", config=coarse, callbacks=(stop_at_10,))
    train_toy(tmp_path / "cut", config=coarse)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    first = [loss for _, loss in losses(straight)[:8]]
    step, loss = losses(tmp_path / "whole")[0]
    assert step == 8
    assert loss == pytest.approx(sum(first) / 8, rel=0.02)


def test_early_stopping_keeps_the_best(tmp_path: Path) -> None:
    values = iter([3.0, 2.0, 2.5, 2.6, 1.0])
    events = run_in_process(
        tmp_path, FitConfig(steps=100, validate_every=2, patience=2), lambda: {"loss": next(values)}
    )
    assert [event.is_best for event in events if isinstance(event, Validated)] == [True, True, False, False]
    assert events[-1] == Finished(step=8, reason="patience")
    assert Checkpoints(tmp_path).position("best").step == 4
    position = Checkpoints(tmp_path).position("last")
    assert (position.step, position.best_value, position.best_step, position.patience_used) == (8, 2.0, 4, 2)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_names_step_and_batch(tmp_path: Path, bad: float) -> None:
    with pytest.raises(NonFiniteError, match=r"loss is (nan|inf) at step 6 \(epoch 1, batches 2 to 3\)"):
        run_in_process(tmp_path, FitConfig(steps=20, accumulate=2, save_every=3), loss=Poisoned(10, by=bad))
    assert Checkpoints(tmp_path).position("last").step == 3


def test_a_gradient_that_is_no_number_leaves_the_parameters_alone(tmp_path: Path) -> None:
    model = ToyModel()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(NonFiniteError, match="gradient's length is nan at step 1"):
        run_in_process(tmp_path, FitConfig(steps=20), loss=Poisoned(1, is_steep=True), model=model)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_no_data_is_an_error_and_no_endless_loop(tmp_path: Path) -> None:
    class Nothing(ToyBatches):
        def epoch(self, epoch: int, start: int) -> Iterator[ToyBatch]:
            return iter(())

    with pytest.raises(DataError, match="no batch"):
        run_in_process(tmp_path, FitConfig(steps=3), batches=Nothing())


def test_a_group_may_have_a_rate_of_its_own() -> None:
    model = ToyModel(0.0)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    groups = [
        {"params": [pair], **({"rate": 3.0} if pair[0] == "out.bias" else {})} for pair in model.named_parameters()
    ]
    sgd = torch.optim.SGD(groups, lr=0.0)
    config = FitConfig(steps=1, clip_norm=1e-3)
    fit(model, ToyBatches(), toy_loss, sgd, constant(2.0), config=config, fabric=start_fabric("cpu", "float32"))
    moved = {name: value.detach() - before[name] for name, value in model.named_parameters()}
    whole = torch.cat([change.flatten() / (3 if name == "out.bias" else 1) for name, change in moved.items()])
    assert float(moved["out.bias"].norm()) > 0
    assert float(whole.norm()) == pytest.approx(2e-3, rel=1e-3)


def test_accumulating_equals_one_large_batch() -> None:
    class Whole(ToyBatches):
        def epoch(self, epoch: int, start: int) -> Iterator[ToyBatch]:
            parts = list(super().epoch(epoch, 0))
            yield ToyBatch(torch.cat([p.source for p in parts]), torch.cat([p.target for p in parts]))

    ends = []
    for batches, accumulate in ((ToyBatches(), 7), (Whole(), 1)):
        torch.manual_seed(1)
        model = ToyModel(0.0).double()
        config = FitConfig(steps=3, accumulate=accumulate)
        fabric = start_fabric("cpu", "float32")
        fit(model, batches, toy_loss, adamw(model), constant(0.01), config=config, fabric=fabric)
        ends.append(nn.utils.parameters_to_vector(model.parameters()).detach())
    torch.testing.assert_close(*ends, rtol=0, atol=1e-10)


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    train_toy(tmp_path, config=replace(CONFIG, steps=1))
    other = ToyModel()
    other.hidden = nn.Linear(11, 19)
    with pytest.raises(RunFolderError, match=r"hidden.weight is \(19, 11\) in the model and \(17, 11\)"):
        run_in_process(tmp_path, FitConfig(steps=2), model=other)


@pytest.mark.parametrize("field", ["steps", "accumulate", "validate_every", "save_every", "log_every"])
def test_settings_out_of_range(field: str) -> None:
    nothing: dict[str, Any] = {field: 0}
    with pytest.raises(ArgumentError, match=f"{field} must be at least 1, got 0"):
        FitConfig(**nothing)


def test_reports_count_time_left_down(tmp_path: Path) -> None:
    events = run_in_process(tmp_path, FitConfig(steps=10, log_every=5))
    first, last = (event for event in events if isinstance(event, Stepped))
    assert first.seconds_left > 0
    assert last.seconds_left == 0
    assert first.tokens_per_second > 0


CPU = torch.device("cpu")


@pytest.mark.parametrize(("amx", "expected"), [(True, "bf16"), (False, "float32")])
def test_auto_takes_bf16_by_tiles_alone(monkeypatch: pytest.MonkeyPatch, amx: bool, expected: str) -> None:
    monkeypatch.setattr(devices, "has_amx", lambda: amx)
    assert choose_precision("auto", CPU) == expected


def test_all_ranks_take_the_answer_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(found: list[Any], mine: Any) -> None:
        assert mine == ("float32", None)
        found[:] = [("bf16", None), mine]

    monkeypatch.setattr(devices, "has_amx", lambda: False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert agreed_precision("auto", CPU) == "float32"  # they cannot speak yet
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    assert agreed_precision("auto", CPU) == "bf16"
    assert choose_precision("auto", CPU) == "float32"  # a translator on one rank waits for no other


def test_a_run_keeps_its_precision(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A run that goes on asks neither the processor nor the file of the machine again."""
    config = small_config(tmp_path, precision="auto", steps=3)
    monkeypatch.setattr(run, "agreed_precision", lambda *_: "bf16")
    train_translation(config)
    assert 'precision = "bf16"' in (config.out / "run.toml").read_text()
    monkeypatch.setattr(run, "agreed_precision", lambda *_: "float32")
    train_translation(changed(config, steps=4), resume=True)
    assert 'precision = "bf16"' in (config.out / "run.toml").read_text()


def steps(model: torch.nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
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
    calls = [0]

    def note(*_: Any) -> None:
        calls[0] += 1

    next(m for m in model.modules() if isinstance(m, MultiHeadAttention)).register_forward_pre_hook(note)
    return calls


def test_a_model_without_layers_has_nothing_to_recompute() -> None:
    with pytest.raises(ArgumentError, match="RNNSeq2Seq has no stack"):
        recompute_layers(RNNSeq2Seq(RNNConfig(), source_vocab_size=9, target_vocab_size=9))
