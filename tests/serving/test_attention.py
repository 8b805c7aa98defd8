"""The attention that the server tells is that of the answer shown, in JSON and as the page asks for it."""

import json
from typing import Any

import msgspec
import numpy as np
import pytest

from regard.serving.application import served_addresses
from tests.serving.conftest import TRANSLATOR, WRITER, Running

TEXT = "we see two cats"


def events(body: bytes) -> list[tuple[str, Any]]:
    blocks = [dict(line.split(": ", 1) for line in block.split("\n")) for block in body.decode().strip().split("\n\n")]
    return [(block["event"], json.loads(block["data"])) for block in blocks]


def answer(server: Running, **question: Any) -> dict[str, Any]:
    status, body, headers = server.ask("/regard/v1/answer", {"text": TEXT, **question})
    assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8"), body
    *pieces, (name, done) = events(body)
    assert name == "done"
    assert len(pieces) > 1
    assert "".join(piece["text"] for _, piece in pieces) == done["text"]
    found: dict[str, Any] = done
    return found


def test_numbers_are_those_of_the_answer_shown(server: Running) -> None:
    done, one = answer(server), server.desk.models[TRANSLATOR]
    asked = {"text": TEXT, "tokens": done["tokens"], "maps": ["decoder.0.cross"], "heads": [1], "alignment": True}
    found = server.json(
        "/regard/v1/attention", asked | {"top_keys": 2, "received": True, "picture": [2, 3], "rows": [0, 2]}
    )
    translator: Any = one
    seen = translator.translator.attend(TEXT, target=done["text"])
    weights = seen.maps["decoder.0.cross"].dense()
    (head,) = found["heads"]
    queries, keys = weights.shape[-2:]
    assert (head["map"], head["head"], head["queries"], head["keys"]) == ("decoder.0.cross", 1, queries, keys)
    assert found["labels"]["decoder.0.cross"][0][-1] == "<eos>"
    np.testing.assert_allclose(head["rows"], weights[1][[0, 2]], atol=1e-5)
    np.testing.assert_allclose(head["received"], weights[1].sum(0), atol=1e-5)
    top = weights[1].topk(2, dim=-1)
    np.testing.assert_allclose(head["top_weights"], top.values, atol=1e-5)
    assert np.shape(head["picture"]) == (2, 3)
    assert found["alignment"] == [[row, int(key)] for row, key in enumerate(weights.mean(0).argmax(-1))]


@pytest.mark.parametrize("text", ["", " ", "\t \n"])
def test_a_blank_text_is_its_own_translation_at_every_door(server: Running, text: str) -> None:
    """Its attention is refused, because there is none."""
    ((name, done),) = events(server.ask("/regard/v1/answer", {"text": text})[1])
    assert (name, done["text"], done["tokens"], done["labels"], done["is_cut"]) == ("done", text, [], [], False)
    asked = {"q": [text], "source": "en", "target": "fr"}
    assert server.json("/translate", asked)["translatedText"] == [text]
    one: Any = server.desk.models[TRANSLATOR]
    assert [found.text for found in one.translator.translate([text])] == [text]
    status, body, _ = server.ask("/regard/v1/view", {"subjects": [{"text": text, "tokens": done["tokens"]}]})
    assert (status, json.loads(body)["error"]) == (400, "there is nothing to look at in an empty text")


def test_a_cut_head_changes_the_answer_and_is_gone_afterwards(server: Running) -> None:
    before = answer(server, seed=0)
    cut = [{"map": f"decoder.0.{kind}", "head": head} for kind in ("self", "cross") for head in (0, 1)]
    done = answer(server, edits=cut)
    assert done["tokens"] != before["tokens"]
    asked = {"text": TEXT, "tokens": before["tokens"], "maps": ["decoder.0.cross"], "rows": [0]}
    whole, edited = (server.json("/regard/v1/attention", asked | {"edits": some}) for some in ([], cut))
    assert np.sum(whole["heads"][0]["rows"]) == pytest.approx(1, abs=1e-5)
    assert np.sum(edited["heads"][0]["rows"]) == 0
    assert answer(server, seed=0) == before
    assert server.json("/translate", {"q": TEXT, "source": "en", "target": "fr"})["translatedText"]


def test_the_pages_questions_are_answered_in_bytes(server: Running) -> None:
    subjects = [
        {"text": TEXT, "model": TRANSLATOR, "tokens": answer(server)["tokens"]},
        {"text": "1 and 2", "model": WRITER},
    ]
    data = server.json("/regard/v1/view", {"subjects": subjects})
    assert [len(example["maps"]) for example in data["examples"]] == [3, 2]
    assert data["examples"][0]["alternatives"]
    question = {"ask": "dense", "example": 1, "map": 0, "head": 1, "temperature": 2.0, "mask": "none"}
    status, body, _ = server.ask("/regard/v1/view/weights", {"subjects": subjects, "question": question})
    assert status == 200
    length = int.from_bytes(body[:4], "little")
    content = json.loads(body[4 : 4 + length])
    _, rows, keys = data["examples"][1]["maps"][0]["shape"]
    assert content["bufferBytes"] == [4 * rows * keys]
    weights = np.frombuffer(body[4 + length :], "<f4").reshape(rows, keys)
    np.testing.assert_allclose(weights.sum(1), 1, atol=1e-5)
    assert weights[0, -1] > 0  # without the causal mask


def test_openapi_describes_every_address(server: Running) -> None:
    described = server.json("/openapi.json")
    every = served_addresses(server.desk)
    assert set(described["paths"]) == {one.path for one in every}
    schemas = described["components"]["schemas"]
    assert schemas["TranslateQuestion"]["properties"]["alternatives"]["maximum"] == 10
    text = json.dumps(described)
    assert all(f'"#/components/schemas/{name}"' in text for name in schemas)
    for one in every:
        operation = described["paths"][one.path][one.method.lower()]
        assert {"200", "400", "429"} <= set(operation["responses"])
        assert ("requestBody" in operation) == (one.takes is not None)
        other = "GET" if one.method == "POST" else "POST"
        assert server.ask(one.path.format(name="mine"), method=other)[0] == 405
    # The classes by which answers are made are those of the document.
    found = server.ask("/v1/models")[1]
    assert msgspec.json.decode(found, type=every[3].gives).data[0].languages == ["en", "fr"]
