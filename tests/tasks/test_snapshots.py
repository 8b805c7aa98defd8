"""Heatmaps of fixed sentences at every validation, as they arrive in TensorBoard's files."""

import io
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from regard.errors import MissingExtraError
from regard.models.config import TransformerConfig
from regard.tasks.language_modelling.train import train_language_model
from regard.tasks.pictures import save
from regard.tasks.pictures.save import Snapshots
from regard.tasks.pictures.token_maps import TextAttention
from regard.tasks.pictures.validation_examples import look_at_pairs, short_pairs
from regard.tasks.runs import run as runs
from regard.tasks.runs.run_folder import RunFolder
from regard.tasks.training.checkpoints import Checkpoints
from regard.tasks.translation.config import TranslationConfig
from regard.tasks.translation.corpus import open_corpus
from regard.tasks.translation.train import train_translation
from tests.tasks.small_runs import PAIRS, small_config, small_text_config, write_pairs


def train_translator(folder: Path, model: str) -> Path:
    config = small_config(folder, model=model, steps=4, validate_every=2, pictures=2)
    train_translation(config)
    return config.out


def train_writer(folder: Path) -> Path:
    config = small_text_config(folder, steps=4, validate_every=2, save_every=2, pictures=2)
    train_language_model(config)
    return config.out


TRAININGS: Mapping[str, Callable[[Path], Path]] = {
    "transformer": lambda folder: train_translator(folder, "transformer"),
    "rnn": lambda folder: train_translator(folder, "rnn"),
    "language-model": train_writer,
}


def images(run: Path) -> dict[int, np.ndarray]:
    from matplotlib import image
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"images": 0})
    events.Reload()
    assert events.Tags()["images"] in ([], ["attention"])
    found = events.Images("attention") if events.Tags()["images"] else []
    return {one.step: image.imread(io.BytesIO(one.encoded_image_string), format="png") for one in found}


@pytest.mark.parametrize("name", TRAININGS)
def test_every_validation_is_drawn(name: str, tmp_path: Path) -> None:
    pictures = images(TRAININGS[name](tmp_path))
    assert list(pictures) == [2, 4]
    first, second = pictures.values()
    assert first.shape == second.shape  # the same sentences
    assert min(first.shape[:2]) > 100
    assert not np.array_equal(first, second)  # and another model
    assert "no heatmaps" not in (tmp_path / "run" / "train.log").read_text()


def test_being_looked_at_changes_no_bit(tmp_path: Path) -> None:
    ends = []
    for pictures in (0, 3):
        config = small_config(
            tmp_path, out=tmp_path / f"run{pictures}", pictures=pictures, transformer=with_dropout(), steps=6
        )
        train_translation(config)
        ends.append(Checkpoints(config.out).load_last())
    for name, value in ends[0].model.items():
        assert torch.equal(ends[1].model[name], value), name
    assert torch.equal(ends[0].random["torch"], ends[1].random["torch"])


def with_dropout() -> TransformerConfig:
    return replace(TranslationConfig(data=(), out=Path()).transformer, dim=16, num_heads=2, encoder_layers=1,
                   decoder_layers=1, feed_forward_dim=16, dropout=0.3)  # fmt: skip


def test_maps_are_those_of_the_validation_pairs(tmp_path: Path) -> None:
    """Over the labels of the source and of the target that is told, whatever the model would have said itself."""
    config = small_config(tmp_path, steps=1)
    translator = train_translation(config)
    corpus = open_corpus(config, RunFolder(config.out))
    look = look_at_pairs(translator.model, corpus, 2)
    assert look is not None
    for (sentence, seen), (source, target) in zip(look(), PAIRS, strict=False):
        assert sentence == source
        rows, columns = seen.labels(seen.shown)
        assert rows is not None
        assert columns is not None
        assert spelt(columns) == f"{source}<eos>"
        assert spelt(rows) == f"{target}<eos>"


def spelt(labels: list[str]) -> str:
    return "".join(labels).replace("␣", " ")


def test_short_pairs_come_first(tmp_path: Path) -> None:
    pairs = [("long " * 60, "x"), *PAIRS[:2], ("x", "lang " * 60)]
    config = small_config(tmp_path, data=(write_pairs(tmp_path / "p.tsv", pairs),), valid=(), steps=1)
    config = replace(config, valid=config.data)
    train_translation(config)
    assert short_pairs(open_corpus(config, RunFolder(config.out)).valid, 3) == [1, 2]
    other: Any = torch.nn.Linear(1, 1)
    assert look_at_pairs(other, open_corpus(config, RunFolder(config.out)), 0) is None


def test_a_picture_that_cannot_be_drawn_ends_no_training() -> None:
    said: list[str] = []

    def look() -> Any:
        raise ValueError("something\nodd")

    draw = Snapshots(look, said.append)
    assert draw() == {}
    assert draw() == {}
    assert said == ["no heatmaps for TensorBoard: something odd"]


def test_without_matplotlib_one_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    train_translation(small_config(tmp_path, pictures=2))
    log = (tmp_path / "run" / "train.log").read_text()
    assert log.count("no heatmaps for TensorBoard: matplotlib is not installed; it comes with the extra 'view'") == 1
    assert images(tmp_path / "run") == {}


def test_without_tensorboard_one_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*arguments: Any) -> None:
        raise MissingExtraError("tensorboard", extra="train")

    monkeypatch.setattr(runs, "TensorBoard", absent)
    progress = io.StringIO()
    train_translation(small_config(tmp_path, pictures=2), progress=progress)
    assert progress.getvalue().count("no curves and heatmaps for TensorBoard: tensorboard is not installed") == 1
    assert not (tmp_path / "run" / "tensorboard").exists()


def test_the_history_has_every_figure(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    train_translation(config)
    records = [json.loads(line) for line in (config.out / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if record["event"] == "train"]
    assert {"loss", "tokens_per_second", "padding_share", "gradient_norm", "learning_rate"} <= set(steps[0])
    assert steps[-1]["skipped_batches"] == steps[-1]["device_memory_bytes"] == 0


def test_a_picture_names_the_map_that_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attention = TextAttention(["a", "b"], {"layer 0": torch.eye(2).expand(3, 2, 2)})
    figures: list[Any] = []
    monkeypatch.setattr(save, "save_figure", lambda figure, path: figures.append(figure))
    save.save_pictures(
        [save.SeenText("a b", attention)], save.PictureFiles(tmp_path / "x.png", None), title="Attention of x"
    )
    assert figures[0].texts[0].get_text() == "Attention of x · layer 0, mean of the heads"
