"""No false alarm: families of Hugging Face models, and our own models, have no fault."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from regard.models import DecoderOnly, DecoderOnlyConfig, EncoderOnly, EncoderOnlyConfig, Transformer, TransformerConfig
from regard.models.config import RNNConfig
from regard.models.rnn import RNNSeq2Seq
from regard.watching.checks import check

pytest.importorskip("transformers")
from tests.inspection.huggingface_families import FAMILIES, IN_BLOCKS

# transformers calls what torch has deprecated; nothing of it is ours.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
CAUSAL = {
    *("gpt2", "llama", "mistral", "gemma2", "gpt-oss", "deepseek-v3", "gpt-neo", "gpt-j", "bloom", "falcon"),
    *("t5", "bart", "marian", "whisper"),
}
FAMILIES_OF_SHAPES = {name: family for name, family in (FAMILIES | IN_BLOCKS).items() if "," not in name}


@pytest.mark.parametrize("name", FAMILIES_OF_SHAPES)
def test_a_family_has_no_fault(name: str) -> None:
    checked = check(FAMILIES_OF_SHAPES[name].build())
    assert not checked.faults, str(checked)
    assert not [finding for finding in checked.findings if finding.reason in ("not checked", "random")]
    assert any("the last positions replaced" in tried for tried in checked.tried) == (name in CAUSAL)
    assert any("a cache" in tried for tried in checked.tried) == (name in CAUSAL)


SMALL = {"dim": 16, "num_heads": 2, "feed_forward_dim": 24, "dropout": 0.1}
OWN: dict[str, Callable[[], nn.Module]] = {
    "decoder": lambda: DecoderOnly(DecoderOnlyConfig(num_layers=2, **SMALL), vocab_size=31),  # type: ignore[arg-type]
    "encoder": lambda: EncoderOnly(EncoderOnlyConfig(num_layers=2, **SMALL), vocab_size=31),  # type: ignore[arg-type]
    "both": lambda: Transformer(
        TransformerConfig(encoder_layers=1, decoder_layers=2, **SMALL),  # type: ignore[arg-type]
        source_vocab_size=31,
        target_vocab_size=29,
    ),
    "bahdanau": lambda: RNNSeq2Seq(RNNConfig(), source_vocab_size=31, target_vocab_size=29),
}


@pytest.mark.parametrize("name", OWN)
def test_our_own_models_have_no_fault(name: str) -> None:
    torch.manual_seed(0)
    checked = check(OWN[name]())
    assert not checked.faults, str(checked)
    assert not [finding for finding in checked.findings if finding.reason == "not checked"], str(checked)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("gpt2", torch.float64), ("gpt2", torch.bfloat16), ("gpt-oss", torch.bfloat16), ("bert", torch.float16)],
)
def test_other_precisions(name: str, dtype: torch.dtype) -> None:
    checked = check(FAMILIES[name].build().to(dtype))
    assert not checked.faults, str(checked)
