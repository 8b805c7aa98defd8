"""Models that no memory holds are refused before anything of their sizes is made; what fits is not."""

import builtins
import io
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from regard.cli.main import run_command
from regard.errors import ArgumentError
from regard.models.config import DecoderOnlyConfig, EncoderOnlyConfig, RNNConfig, TransformerConfig
from regard.models.decoder_only import DecoderOnly
from regard.models.encoder_only import EncoderOnly
from regard.models.rnn import RNNSeq2Seq
from regard.models.transformer import Transformer
from regard.tasks.runs import model_size
from regard.tasks.runs.model_size import chosen_optimizer, count_parameters, refuse_too_large
from regard.tasks.text.tokenizer_recipes import MOST_PIECES, ByteLevelBPE
from regard.tasks.training.averaging import MovingAverage
from regard.tasks.training.reporting.memory import most_bytes
from regard.tasks.translation.config import TranslationConfig
from regard.tasks.translation.made_model import make_model
from regard.tasks.translation.train import train_translation
from tests.tasks.small_runs import small_config

GIB = 2**30
PAIR: dict[str, Any] = {"source_vocab_size": 9, "target_vocab_size": 11}


def made(sizes: Any) -> nn.Module:
    return make_model(sizes, **PAIR)


SIZES: list[tuple[Callable[[Any], nn.Module], Any]] = [
    (partial(Transformer, **PAIR), TransformerConfig(dim=8, num_heads=2, feed_forward_dim=3, encoder_layers=5)),
    (
        partial(Transformer, source_vocab_size=9, target_vocab_size=9),
        TransformerConfig(
            dim=8, encoder_layers=1, decoder_layers=4, shared_embeddings=True, positions="learned", activation="swiglu"
        ),
    ),
    (partial(Transformer, **PAIR), TransformerConfig(dim=12, num_heads=6, num_kv_heads=2, tied_output=False)),
    (partial(RNNSeq2Seq, **PAIR), RNNConfig(hidden_dim=6, embedding_dim=5, attention_dim=3, encoder_layers=4)),
    (partial(RNNSeq2Seq, **PAIR), RNNConfig(hidden_dim=6, decoder="luong", score="dot")),
    (partial(DecoderOnly, vocab_size=9), DecoderOnlyConfig(dim=8, num_layers=6, norm="rms", tied_output=False)),
    (partial(EncoderOnly, vocab_size=9), EncoderOnlyConfig(dim=8, num_layers=3, norm_position="post")),
    (partial(DecoderOnly, vocab_size=9), DecoderOnlyConfig(dim=8, num_layers=9, layers="mamba2, 2 gated_delta, full")),
]


@pytest.mark.parametrize(("make", "sizes"), SIZES, ids=[type(sizes).__name__ for _, sizes in SIZES])
def test_parameters_are_counted_without_the_model(make: Callable[[Any], nn.Module], sizes: Any) -> None:
    random = torch.get_rng_state()
    counted = count_parameters(make, sizes)
    assert torch.equal(torch.get_rng_state(), random)  # so that a run has the weights that it would have had
    assert counted == sum(parameter.numel() for parameter in make(sizes).parameters())


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("ema_decay", [0.0, 0.5])
def test_what_training_holds_is_what_is_asked_for(
    optimizer: str, ema_decay: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tensors of a step of training are counted. What fits to the byte is not refused, and one byte less is."""
    config = small_config(tmp_path, optimizer=optimizer, ema_decay=ema_decay)
    model = make_model(config.sizes, **PAIR)
    chosen = chosen_optimizer(config, model, model.output)
    sum(parameter.sum() for parameter in model.parameters()).backward()
    chosen.step()
    held = [*model.parameters(), *(parameter.grad for parameter in model.parameters())]
    held += [value for state in chosen.state.values() for value in state.values() if value.ndim]
    held += MovingAverage(model, ema_decay).state_dict().values() if ema_decay else []
    used = sum({value.data_ptr(): value.nbytes for value in held if value is not None}.values())
    if optimizer == "muon":  # AdamW keeps a number more of what is no hidden matrix; that is not counted
        hidden = sum(value.numel() for value in chosen.param_groups[0]["params"])
        used -= 4 * (sum(value.numel() for value in model.parameters()) - hidden)
    monkeypatch.setattr(model_size, "most_bytes", lambda device: used)
    refuse_too_large(made, config.sizes, config)
    monkeypatch.setattr(model_size, "most_bytes", lambda device: used - 1)
    with pytest.raises(ArgumentError, match="take a smaller model"):
        refuse_too_large(made, config.sizes, config)


HUGE = [
    ("translation", "--transformer.dim 65536"),
    ("translation", "--transformer.feed-forward-dim 1000000000"),
    ("translation", "--transformer.encoder-layers 1000000000"),
    ("translation", "--transformer.positions learned --transformer.max-length 1000000000"),
    ("translation", "--model rnn --rnn.hidden-dim 65536"),
    ("translation", "--model rnn --rnn.encoder-layers 1000000000"),
    ("translation", "--transformer.dim 4000000000"),
    ("language-model", "--model.dim 65536"),
    ("language-model", "--model.num-layers 1000000000"),
]


@pytest.mark.parametrize(("task", "flags"), HUGE, ids=[f"{task} {flags}" for task, flags in HUGE])
def test_huge_sizes_are_refused_in_one_line(
    task: str, flags: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_size, "most_bytes", lambda device: 64 * GIB)
    data = tmp_path / "data.tsv"
    data.write_text("a line\teine Zeile\n" * 20)
    line = ["train", task, "--data", str(data), "--out", str(tmp_path / "run"), "--device", "cpu", *flags.split()]
    assert run_command(line) == 2
    (said,) = capsys.readouterr().err.splitlines()  # one line; so the data were not read
    assert "parameters" in said or "overflowed" in said, said
    assert not (tmp_path / "run").exists()


def test_the_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_size, "most_bytes", lambda device: 24 * GIB)
    config = small_config(tmp_path, transformer=TransformerConfig(dim=65536), ema_decay=0.9)
    with pytest.raises(ArgumentError) as refused:
        train_translation(config)
    count = count_parameters(partial(make_model, source_vocab_size=8, target_vocab_size=8), config.sizes)
    assert str(refused.value) == (
        f"a model of these sizes has at least {count:,} parameters, whose training takes at least "
        f"{20 * count / 2**40:.1f} TiB (weights, gradients, their average, and what adamw keeps), but this machine, "
        "with its swap, has 24.0 GiB of memory: take a smaller model"
    )


def test_a_vocabulary_counts_as_soon_as_it_is_known(config: TranslationConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fits with the few words with which it is asked at first, and not with those of the data."""
    few = count_parameters(partial(make_model, source_vocab_size=8, target_vocab_size=8), config.sizes)
    monkeypatch.setattr(model_size, "most_bytes", lambda device: 16 * few)
    with pytest.raises(ArgumentError, match=r"at least [\d,]+ parameters"):
        train_translation(config)
    assert not config.out.exists()


def test_nothing_is_refused_where_the_memory_is_not_told(
    config: TranslationConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_size, "most_bytes", lambda device: 0)
    sizes = TransformerConfig(dim=65536)
    refuse_too_large(made, sizes, replace(config, transformer=sizes))


@pytest.mark.parametrize(("device", "copies"), [("cpu", 4), ("cuda", 1)])
def test_ranks_share_a_machine(
    device: str, copies: int, config: TranslationConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = 16 * count_parameters(made, config.sizes) * copies
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setattr(model_size, "find_device", lambda name: torch.device(device))
    monkeypatch.setattr(model_size, "most_bytes", lambda found: needed)
    refuse_too_large(made, config.sizes, config)
    monkeypatch.setattr(model_size, "most_bytes", lambda found: needed - 1)
    with pytest.raises(ArgumentError, match="cuda has" if device == "cuda" else "this machine"):
        refuse_too_large(made, config.sizes, config)


MEMORY = "MemTotal:       24684184 kB\nMemFree: 1 kB\nSwapTotal:       1000 kB\n"
MACHINES = {
    "plain": ({"/proc/meminfo": MEMORY}, 24_685_184 * 1024),
    "a container": (
        {"/proc/meminfo": MEMORY, "/proc/self/cgroup": "0::/\n", "/sys/fs/cgroup/memory.max": f"{2**31}\n"},
        2**31 + 1000 * 1024,
    ),
    "a group within a group": (
        {
            "/proc/meminfo": MEMORY,
            "/proc/self/cgroup": "0::/a/b\n",
            "/sys/fs/cgroup/a/b/memory.max": "max\n",
            "/sys/fs/cgroup/a/memory.max": f"{2**30}\n",
        },
        2**30 + 1000 * 1024,
    ),
    "the first version of groups": (
        {
            "/proc/meminfo": MEMORY,
            "/proc/self/cgroup": "4:cpu,cpuacct:/x\n3:memory:/x\n",
            "/sys/fs/cgroup/memory/x/memory.limit_in_bytes": f"{2**32}\n",
            "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
        2**32 + 1000 * 1024,
    ),
    "no swap": ({"/proc/meminfo": "MemTotal: 8 kB\n"}, 8192),
    "no Linux": ({}, 0),
    "an unknown form": ({"/proc/meminfo": "Memory: much\n"}, 0),
}


@pytest.mark.parametrize("name", MACHINES)
def test_the_memory_of_a_machine(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    files, expected = MACHINES[name]

    def opened(path: str, **_: Any) -> io.StringIO:
        if path not in files:
            raise FileNotFoundError(2, "No such file or directory", path)
        return io.StringIO(files[path])

    monkeypatch.setattr(builtins, "open", opened)
    found = most_bytes(torch.device("cpu"))
    monkeypatch.undo()
    assert found == expected


def test_the_memory_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=device.index))
    assert most_bytes(torch.device("cuda:7")) == 7
    assert most_bytes(torch.device("mps")) == 0


def test_a_vocabulary_for_which_no_trainer_has_room_is_refused() -> None:
    ByteLevelBPE(vocab_size=MOST_PIECES)
    with pytest.raises(ArgumentError, match="must be at most 16,777,216, got 16,777,217"):
        ByteLevelBPE(vocab_size=MOST_PIECES + 1)
