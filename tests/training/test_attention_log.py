"""The log of heads: what is written against dense weights, in every task, and training keeps its bits."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import regard
from regard.errors import ArgumentError
from regard.tasks.language_modelling.train import run_language_model
from regard.tasks.names import LANGUAGE_MODEL, TRANSLATION
from regard.tasks.registry import TASKS
from regard.tasks.runs.run_folder import RunFolder
from regard.tasks.training.distributed.devices import start_fabric
from regard.tasks.training.reporting.attention_log import AttentionLog, head_statistics
from regard.tasks.training.reporting.events import Event, HeadsMeasured, Started, Validated
from regard.tasks.translation.train import run_translation
from tests.tasks import small_runs
from tests.tasks.test_language_model import small_config as text_config


def translation(folder: Path, **changes: Any) -> Any:
    return small_runs.small_config(folder, **changes)


def recurrent(folder: Path, **changes: Any) -> Any:
    return small_runs.small_config(folder, model="rnn", **changes)


def next_token(folder: Path, **changes: Any) -> Any:
    return text_config(folder, **changes)


RUNS: dict[str, tuple[Callable[..., Any], Callable[..., str], str]] = {
    "translation": (translation, run_translation, TRANSLATION),
    "recurrent translation": (recurrent, run_translation, TRANSLATION),
    "language model": (next_token, run_language_model, LANGUAGE_MODEL),
}
DROPOUT = {"translation": "transformer", "language model": "model"}


def lines(folder: Path, event: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if line["event"] == event]


def tensors_of(folder: Path) -> dict[str, bytes]:
    """The bits of all tensors of the checkpoints, but for Python's generator: beartype draws from it in tests."""
    found = {}
    for path in (path for which in ("best", "last") for path in (folder / which).glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            if not name.startswith("python"):
                kind = path.name.partition("-")[0]
                found[f"{path.parent.name}/{kind}/{name}"] = tensor.numpy().tobytes()
    return found


@pytest.mark.parametrize("task", RUNS)
def test_training_keeps_its_bits_and_every_validation_is_logged(task: str, tmp_path: Path) -> None:
    make, run, name = RUNS[task]
    folders = []
    for logs in (False, True):
        (tmp_path / str(logs)).mkdir()
        config = make(tmp_path / str(logs), steps=4, validate_every=2, save_every=2, log_attention=logs)
        if task in DROPOUT:  # random numbers of training, which the log may not take
            config = replace(config, **{DROPOUT[task]: replace(getattr(config, DROPOUT[task]), dropout=0.2)})
        run(config)
        folders.append(config.out)
    plain, logged = map(tensors_of, folders)
    assert plain.keys() == logged.keys() >= {"last/random/torch", "last/random/numpy"}
    assert [name for name in plain if plain[name] != logged[name]] == []
    assert lines(folders[0], "attention") == []
    found = lines(folders[1], "attention")
    assert [line["step"] for line in found] == [2, 4]
    # The last line is what the last model says, read from dense weights.
    folder = RunFolder(folders[1])
    job = TASKS[name].job(folder.read_config(name, TASKS[name].config), folder, start_fabric("cpu", "float32"))
    job.model.load_state_dict(folder.checkpoints.load_model("last"))
    assert job.attend is not None
    passes = list(job.attend())
    assert len(passes) == (8 if "translation" in task else 1)
    assert set(found[-1]["entropy"]) == set(passes[0])
    for layer in passes[0]:
        dense = [maps[layer].detach().dense().movedim(1, 0).flatten(1, 2) for maps in passes]  # (H, queries, keys)
        entropy = torch.cat([torch.special.entr(rows).sum(-1) for rows in dense], 1).mean(1)
        torch.testing.assert_close(torch.tensor(found[-1]["entropy"][layer]), entropy, rtol=1e-4, atol=1e-5)
        sink = torch.cat([rows[..., 0] for rows in dense], 1).mean(1)
        torch.testing.assert_close(torch.tensor(found[-1]["sink_share"][layer]), sink, rtol=1e-4, atol=1e-6)
        largest = torch.stack([maps[layer].max_logit().amax((0, 2)) for maps in passes]).amax(0)
        torch.testing.assert_close(torch.tensor(found[-1]["largest_logit"][layer]), largest, rtol=1e-4, atol=1e-5)


def test_a_run_goes_on_with_the_log_or_without(tmp_path: Path) -> None:
    config = next_token(tmp_path, steps=2, validate_every=2, save_every=2)
    run_language_model(config)
    longer = replace(config, fit=replace(config.fit, steps=4), log_attention=True)
    run_language_model(longer, resume=True)
    assert [line["step"] for line in lines(config.out, "attention")] == [4]
    run_language_model(replace(longer, fit=replace(config.fit, steps=6)), resume=True)
    assert [line["step"] for line in lines(config.out, "attention")] == [4, 6]


def test_layers_of_linear_attention_have_no_line(tmp_path: Path) -> None:
    config = next_token(tmp_path, steps=2, validate_every=2, save_every=2, log_attention=True)
    run_language_model(replace(config, model=replace(config.model, layers="gated_delta, full")))
    (line,) = lines(config.out, "attention")
    assert list(line["entropy"]) == list(line["largest_logit"]) == ["decoder.1"]
    alone = replace(config, model=replace(config.model, layers="mamba2"), out=tmp_path / "alone")
    with pytest.raises(ArgumentError, match="cannot be logged, because it has none"):
        run_language_model(alone)


def test_curves_for_tensorboard(tmp_path: Path) -> None:
    accumulator: Any = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard comes with the extras"
    )
    config = next_token(tmp_path, steps=2, validate_every=2, save_every=2, log_attention=True)
    run_language_model(config)
    read = accumulator.EventAccumulator(str(config.out / "tensorboard"))
    read.Reload()
    line = lines(config.out, "attention")[0]
    for statistic in ("entropy", "largest_logit", "sink_share"):
        for layer, heads in line[statistic].items():
            for number, value in enumerate(heads):
                (scalar,) = read.Scalars(f"attention/{statistic}/{layer}/head {number}")
                assert (scalar.step, scalar.value) == (2, pytest.approx(value, rel=1e-6))


def test_by_hand_on_two_passes() -> None:
    q = torch.zeros(2, 3, 4, 8)
    passes = [{"a": regard.map_of(q, q, mask=regard.causal())}, {"a": regard.map_of(q[:, :, :1], q[:, :, :1])}]
    found = head_statistics(passes, 7)
    assert found.step == 7
    expected = sum(torch.arange(1.0, 5).log()) / 5
    torch.testing.assert_close(torch.tensor(found.entropy["a"]), torch.tensor([float(expected)] * 3))
    torch.testing.assert_close(
        torch.tensor(found.sink_share["a"]), torch.tensor([(1 + 1 / 2 + 1 / 3 + 1 / 4 + 1) / 5] * 3)
    )
    assert found.largest_logit["a"] == [0.0] * 3


def test_a_model_without_attention_is_refused_before_the_first_step() -> None:
    told: list[Event] = []
    with pytest.raises(ArgumentError, match="cannot be logged, because it has none"):
        AttentionLog(lambda: [{}], [told.append])(Started(step=0, total_steps=3))
    q = torch.zeros(1, 1, 2, 4)
    log = AttentionLog(lambda: [{"a": regard.map_of(q, q)}], [told.append])
    log(Started(step=0, total_steps=3))
    assert told == []
    log(Validated(step=2, metrics={"loss": 1.0}, is_best=True, patience_used=0))
    assert [type(event) for event in told] == [HeadsMeasured]
