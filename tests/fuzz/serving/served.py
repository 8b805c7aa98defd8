"""Two small models behind the server's application, in this process."""

from functools import cache
from typing import Any

import torch
from starlette.testclient import TestClient

from regard.models.config import DecoderOnlyConfig
from regard.models.one_stack import DecoderOnly
from regard.serving.application import application
from regard.serving.asking import Desk
from regard.serving.served import ServedLanguageModel, ServedTranslator
from regard.serving.settings import Entrance, RequestLimits
from regard.tasks.language_modelling.causal import LanguageModel
from regard.tasks.text import ByteLevelBPE, Characters
from tests.tasks.test_translate_options import make

TRANSLATOR, WRITER = "mine", "book"
LIMITS = RequestLimits(max_length=40)


def written_model() -> LanguageModel:
    torch.manual_seed(1)
    tokenizer = Characters().train(["".join(f"{n} times {m} is {n * m}.\n" for n in range(9) for m in range(9))])
    sizes = DecoderOnlyConfig(dim=16, num_heads=2, num_layers=2, feed_forward_dim=24, max_length=24, dropout=0.0)
    model = DecoderOnly(sizes, vocab_size=len(tokenizer))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return LanguageModel(model, tokenizer, block_length=24, documents="lines")


@cache
def models() -> tuple[ServedTranslator, ServedLanguageModel]:
    translator = make(tokenizer=lambda: ByteLevelBPE(vocab_size=280), max_length=64)
    return ServedTranslator(TRANSLATOR, translator, ("en", "fr"), LIMITS), ServedLanguageModel(
        WRITER, written_model(), LIMITS
    )


@cache
def client() -> TestClient:
    desk = Desk({one.name: one for one in models()}, LIMITS, version="test")
    app: Any = application(desk, Entrance(hosts=frozenset({"127.0.0.1"})))
    return TestClient(app, base_url="http://127.0.0.1").__enter__()
