"""`regard check`: its output, its exit status, and its imports."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

from regard.models import DecoderOnlyConfig
from regard.tasks import FitConfig, train_language_model
from regard.tasks.language_modelling.config import LanguageModelConfig
from tests.conftest import Call
from tests.modules import module

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
MODULE = "tests.probes.test_command"


@module
def SeesAll(self: Any, x: Tensor) -> Tensor:
    return sdpa(x, x, x)


def everywhere() -> tuple[nn.Module, Tensor]:
    return SeesAll(), torch.randn(2, 7, 4, generator=torch.Generator().manual_seed(0))


Unscaled = module(lambda m, x: sdpa(x, x, x, scale=1.0))
"""The same without its scale."""


def unscaled() -> tuple[nn.Module, Tensor]:
    return Unscaled(), everywhere()[1]


def alone() -> nn.Module:
    return SeesAll()


def nothing() -> int:
    return 3


def broken() -> tuple[nn.Module, Tensor]:
    return nn.Linear(3, 3), torch.randn(2, 7, 4)


@pytest.fixture
def check(call: Call) -> Call:
    return lambda *arguments: call("check", *arguments, *(["--device", "cpu"] if arguments else []))


def test_a_function(check: Call) -> None:
    status, out, err = check(f"{MODULE}:everywhere")
    assert (status, err) == (2, "")
    first = "SeesAll: 1 layer, 6 questions, 4 trials, nothing found"
    assert out.startswith(f"{first}; whether it is causal is not known: tell causal=\nasked: numbers, ")
    assert "\ntried: the same inputs after other calls, two together, " in out
    status, out, err = check(f"{MODULE}:everywhere", "--no-causal")
    assert (status, err) == (0, "")
    assert out.startswith("SeesAll: 1 layer, 7 questions, 4 trials, nothing found\n")
    assert len(out.splitlines()) <= 6
    status, out, err = check(f"{MODULE}:everywhere", "--causal")
    assert (status, err) == (1, "")
    first, second, _, third = out.splitlines()[:4]
    assert first == "SeesAll: 1 layer, 7 questions, 5 trials, 2 errors"
    assert second.startswith("  error: the model: what comes later changes earlier results")
    assert third.startswith("  error: the model, call 0 and 1 more: ")
    status, out, err = check(f"{MODULE}:everywhere", "--causal", "--json")
    record = json.loads(out)
    assert (status, record["model"], record["layers"]) == (1, "SeesAll", 1)
    assert [one["reason"] for one in record["findings"]] == ["future", "future"]


@pytest.mark.parametrize("width", [80, 100])
def test_findings_are_as_wide_as_a_terminal(check: Call, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    piped = check(f"{MODULE}:everywhere", "--causal")[1]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(width))
    shown = check(f"{MODULE}:everywhere", "--causal")[1]
    assert max(map(len, piped.splitlines())) > width >= max(map(len, shown.splitlines())) > width - 12
    assert shown.split() == piped.split()
    assert shown.count("\n  error: ") == 2, "the rest of a line stands to its right"


def test_a_reference(check: Call) -> None:
    status, out, err = check(f"{MODULE}:unscaled", "--reference", f"{MODULE}:everywhere")
    assert (status, err) == (1, "")
    assert "error: the model, call 0: it is the first call to depart from the reference" in out
    assert "cause: 1/sqrt(4) is missing" in out
    assert check(f"{MODULE}:everywhere", "--reference", f"{MODULE}:alone")[0] == 0
    status, _, err = check(f"{MODULE}:everywhere", "--reference", "no-such-folder")
    assert (status, len(err.splitlines())) == (2, 1)
    assert "'no-such-folder' is no folder" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (f"{MODULE}:alone", "give a batch"),
        (f"{MODULE}:nothing", "it returned int"),
        (f"{MODULE}:broken", "Linear does not run on input (1, 7, 4), one sequence without padding: RuntimeError: "),
        (f"{MODULE}:absent", "AttributeError: "),
        ("no.such.module:f", "ModuleNotFoundError: "),
        ("no-such-folder", "is no folder; give a folder of a model, or module:function"),
    ],
)
def test_mistakes_are_one_line(check: Call, words: str, message: str) -> None:
    status, out, err = check(words)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_a_folder_of_hugging_face(check: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("transformers").utils.logging.disable_progress_bar()
    from transformers.models.llama import modeling_llama

    from tests.inspection.huggingface_families import FAMILIES

    FAMILIES["llama"].build().save_pretrained(tmp_path)
    status, out, err = check(str(tmp_path))
    assert (status, err) == (0, ""), out
    assert out.startswith("LlamaForCausalLM: 2 layers, 10 questions, 26 trials, nothing found (2 infos)\n")
    assert len(out.splitlines()) <= 6
    command = [sys.executable, "-m", "regard", "check", str(tmp_path), "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, out, ""), "nothing of transformers comes before it"
    create: Any = vars(modeling_llama)["create_causal_mask"]
    monkeypatch.setattr(
        modeling_llama,
        "create_causal_mask",
        lambda **given: None if (mask := create(**given)) is None else torch.ones_like(mask),
    )
    status, out, _ = check(str(tmp_path))
    assert status == 1
    assert "error: model.layers.0.self_attn: what stands in the padding" in out
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    status, out, err = check(str(tmp_path))
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "model.safetensors cannot be read" in err


def test_a_folder_of_a_run(check: Call, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("She sells sea shells by the sea shore.\n" * 20, encoding="utf-8")
    train_language_model(
        LanguageModelConfig(
            data=(tmp_path / "text.txt",),
            out=tmp_path / "run",
            model=DecoderOnlyConfig(dim=16, num_heads=2, num_layers=1, feed_forward_dim=16),
            tokenizer="characters",
            block_length=16,
            batch_tokens=64,
            fit=FitConfig(steps=2),
            warmup_steps=1,
            device="cpu",
        )
    )
    status, out, _ = check(str(tmp_path / "run"))
    assert status == 0, out
    assert out.startswith("DecoderOnly: 1 layer, 8 questions, 14 trials, nothing found\n")


def test_help(call: Call) -> None:
    status, out, _ = call("check", "--help")
    assert status == 0
    assert "usage: regard check" in out
    assert "module:function" in out
