"""Two small models behind the server's application, in this process."""

from functools import cache
from typing import Any

from starlette.testclient import TestClient

from regard.serving.application import application
from regard.serving.asking import Desk
from regard.serving.served import ServedLanguageModel, ServedTranslator
from regard.serving.settings import Entrance, RequestLimits
from regard.tasks.text import ByteLevelBPE
from tests.exports.test_text_engine import model_of
from tests.tasks.test_translate_options import make

TRANSLATOR, WRITER = "mine", "book"
LIMITS = RequestLimits(max_length=40)


@cache
def models() -> tuple[ServedTranslator, ServedLanguageModel]:
    """A translator whose tokenizer splits characters, and a writer."""
    translator = make(tokenizer=lambda: ByteLevelBPE(vocab_size=280), max_length=64)
    return ServedTranslator(TRANSLATOR, translator, ("en", "fr"), LIMITS), ServedLanguageModel(
        WRITER, model_of("rotary", "lines"), LIMITS
    )


@cache
def client() -> TestClient:
    """A client of both."""
    desk = Desk({one.name: one for one in models()}, LIMITS, version="test")
    app: Any = application(desk, Entrance(hosts=frozenset({"127.0.0.1"})))
    return TestClient(app, base_url="http://127.0.0.1").__enter__()
