from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from regard.errors import ArgumentError, RunFolderError
from regard.tasks import Translator, train_translation
from regard.tasks.language_modelling.train import run_language_model
from regard.tasks.training.checkpoints import Checkpoints
from regard.tasks.translation.train import run_translation
from tests.tasks.small_runs import PAIRS, SMALL, changed, small_config, small_text_config, write_pairs


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("choosing")
    config = small_config(folder, steps=120, validate_every=30, save_every=30)
    train_translation(config)
    return config.out


def test_warm_start_begins_with_another_run(run: Path, tmp_path: Path) -> None:
    """The first validation of the new run is as good as the old run's best, on other data with its tokenizers."""
    data = write_pairs(tmp_path / "other.tsv", PAIRS[::-1])
    config = small_config(
        tmp_path, data=(data,), valid=(data,), steps=1, validate_every=1, learning_rate=1e-6, warm_start=run
    )
    warm: Any = train_translation(config)
    before: Any = Translator.load(run)
    assert warm.source_tokenizer.fingerprint() == before.source_tokenizer.fingerprint()
    assert warm.loss(PAIRS) == pytest.approx(before.loss(PAIRS), rel=1e-2, abs=1e-3)
    # A run that has a checkpoint goes on from that, though the other one be gone.
    train_translation(changed(config, steps=2, warm_start=run), resume=True)
    other = replace(SMALL["transformer"], dim=16)
    with pytest.raises(RunFolderError, match=r"does not fit: it has --transformer\.dim 32, not 16"):
        train_translation(replace(config, out=tmp_path / "other", transformer=other))


def test_a_model_of_another_size_with_the_tokenizers_of_a_run_translates_with_it(run: Path, tmp_path: Path) -> None:
    data = write_pairs(tmp_path / "other.tsv", [(source.upper(), target) for source, target in PAIRS])
    smaller = replace(SMALL["transformer"], dim=16)
    config = small_config(tmp_path, data=(data,), valid=(data,), steps=1, validate_every=1, transformer=smaller)
    alone: Any = train_translation(config)
    config = replace(config, out=tmp_path / "of another", tokenizers_of=run)
    ours: Any = train_translation(config)
    theirs: Any = Translator.load(run)
    assert ours.source_tokenizer.fingerprint() == theirs.source_tokenizer.fingerprint()
    assert ours.source_tokenizer.fingerprint() != alone.source_tokenizer.fingerprint()
    # The tokenizers are copied: the run goes on though the other one be gone.
    train_translation(changed(config, steps=2, tokenizers_of=run), resume=True)
    with pytest.raises(ArgumentError, match="warm_start uses the tokenizers of its own run"):
        replace(config, warm_start=run)
    with pytest.raises(
        ArgumentError, match=r"have a vocabulary each for source and target: add --no-shared-vocabulary"
    ):
        train_translation(replace(config, out=tmp_path / "third", shared_vocabulary=True))
    with pytest.raises(RunFolderError, match="expected one that `regard train --out` made"):
        train_translation(replace(config, out=tmp_path / "third", tokenizers_of=tmp_path / "absent"))


def test_what_taken_tokenizers_can_do_is_asked_of_themselves(tmp_path: Path) -> None:
    """The run that they are taken from may have taken them too, and its settings then say nothing of them."""
    words = small_config(tmp_path, steps=1, tokenizer="words", lowercase=True, out=tmp_path / "words")
    train_translation(words)
    second = small_config(tmp_path, steps=1, tokenizers_of=words.out, out=tmp_path / "second")
    train_translation(second)
    third = small_config(tmp_path, steps=1, tokenizers_of=second.out, out=tmp_path / "third")
    train_translation(replace(third, lowercase=True))
    cased = small_config(tmp_path, steps=1, tokenizer="words", out=tmp_path / "cased")
    train_translation(cased)
    fourth = small_config(tmp_path, steps=1, tokenizers_of=cased.out, out=tmp_path / "fourth", lowercase=True)
    with pytest.raises(ArgumentError, match=r"those of .*cased, which it would take, read both cases: leave it out"):
        train_translation(fourth)


def tensors_of(folder: Path) -> dict[str, bytes]:
    """The bits of all tensors of the checkpoints, but for Python's generator: beartype draws from it in tests."""
    paths = (Checkpoints(folder).path(which) for which in ("best", "last"))
    return {
        f"{path.stem}/{name}": tensor.numpy().tobytes()
        for path in paths
        for name, tensor in load_file(path).items()
        if not name.startswith("random/python")
    }


@pytest.mark.parametrize(
    ("make", "part", "train", "more"),
    [
        (small_config, "transformer", run_translation, {"muon_rate": 2.0}),
        (small_config, "rnn", run_translation, {"model": "rnn"}),
        (small_text_config, "model", run_language_model, {}),
    ],
)
def test_a_run_is_another_and_resumes_bit_for_bit(
    make: Callable[..., Any], part: str, train: Callable[..., Any], more: dict[str, Any], tmp_path: Path
) -> None:
    """Runs of four steps with dropout in their model."""
    found = []
    for name in ("plain", "whole", "parted"):
        (tmp_path / name).mkdir()
        options = {name: value for name, value in more.items() if name == "model"} if name == "plain" else more
        config = make(
            tmp_path / name, steps=4, validate_every=2, save_every=2, optimizer="adamw" if name == "plain" else "muon",
            **options,
        )  # fmt: skip
        config = replace(config, **{part: replace(getattr(config, part), dropout=0.2)})
        for steps in (1, 4) if name == "parted" else (4,):
            train(changed(config, steps=steps), resume=True)
        found.append(tensors_of(config.out))
    plain, whole, parted = found
    assert parted == whole
    weights = [name for name in whole if name.startswith("last/model")]
    assert weights
    assert any(plain[name] != whole[name] for name in weights)
