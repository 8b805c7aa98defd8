"""The ground `requests`: bodies with fields of every type; an answer is the library's own, or a 400 that says why."""

import json
from functools import partial
from typing import Any

import torch
from hypothesis import note

from regard.tasks.generation.config import Beam
from regard.tasks.generation.filters import ForcedPrefix, Temperature, TopK, TopP
from tests.fuzz.drawing import Drawn
from tests.fuzz.serving.served import LIMITS, TRANSLATOR, WRITER, client, models
from tests.searches import sample

ANY: tuple[Any, ...] = (
    None, 0, 1, -1, 2, 2**31, 2**64, 1e-300, 0.5, 1.5, -0.5, 1e300, True, False, "", "a", "0", "1", "é", "木", [],
    ["a"], ["", "ab"], [0], [None], {}, {"a": 1}, {"include_usage": True}, [[]], "x" * 99,
)  # fmt: skip
TEXTS = ("", "a", "ab ba", "é", "木", "we see two", "a\r\nb\n\nwe see")
FIELDS: dict[str, dict[str, tuple[Any, ...]]] = {
    "/v1/completions": {
        "model": (WRITER,), "prompt": (*TEXTS[:3], ["a", "b"], ["a", "a"]), "max_tokens": (1, 2, 5, None),
        "temperature": (0, 1, 0.5, 2, 1e-300, None), "top_p": (1, 0.5, 1e-300, None), "n": (1, 2, None),
        "stop": ("a", ["b", "ab"], "é", None, []), "seed": (0, 7, -1, 2**40, None), "echo": (True, False, None),
        "best_of": (1, None), "logprobs": (None,), "suffix": ("", None), "presence_penalty": (0, 0.0, None),
        "frequency_penalty": (0, None), "logit_bias": ({}, None), "user": ("me", None), "store": (True, None),
        "metadata": ({"a": 1}, None), "stream": (False, None), "stream_options": ({"include_usage": True}, None),
    },
    "/translate": {
        "q": (*TEXTS, ["we see", "a"], []), "source": ("en", "auto"), "target": ("fr",), "format": ("text",),
        "alternatives": (0, 1, 2), "api_key": ("x", None), "secret": ("x", None),
    },
    "/regard/v1/answer": {
        "text": ("we see", "a", "é"), "model": (TRANSLATOR, WRITER, None), "prefix": ("", "a", "木"),
        "seed": (0, 7, None), "temperature": (0, 0.5, 2, 1e-300), "max_tokens": (1, 3, 9, None), "edits": ([],),
    },
}  # fmt: skip
NEEDED = {"/v1/completions": {"model"}, "/translate": {"q", "source", "target"}, "/regard/v1/answer": {"text"}}
UNKNOWN = ("top_k", "min_p", "Temperature", "", "q ", "logit_biases", "max_completion_tokens")


def case(drawn: Drawn) -> None:
    path = drawn.of(list(FIELDS))
    body, is_good = _drawn(drawn, path)
    note(f"{path} {body!r}")
    answer = client().post(path, json=body)
    if answer.status_code in (400, 404):
        error = answer.json()["error"]
        said = error["message"] if path.startswith("/v1/") else error
        assert len(said) > 10, said
        assert not any(part in said for part in ("\n", "tensor(")), said
        assert not is_good or "token" in said or "nothing" in said, f"a good request is refused: {said}"
        return
    assert answer.status_code == 200, answer.text
    assert set(body) <= set(FIELDS[path]), "an unknown field is passed over"
    {"/v1/completions": _completions, "/translate": _translations, "/regard/v1/answer": _answers}[path](body, answer)


def _drawn(drawn: Drawn, path: str) -> tuple[dict[str, Any], bool]:
    is_good, body = drawn.chance(2), dict[str, Any]()
    for name, values in FIELDS[path].items():
        if name in NEEDED[path] if is_good else drawn.chance(2):
            body[name] = drawn.of(values)
        elif drawn.chance(3):
            body[name] = drawn.of(values if is_good or drawn.chance(2) else ANY)
    if not is_good and drawn.chance(4):
        body[drawn.of(UNKNOWN)] = drawn.of(ANY)
    if not is_good:
        for name in NEEDED[path]:
            body.setdefault(name, FIELDS[path][name][0])
    return body, is_good


def _given(body: dict[str, Any], name: str, usual: Any) -> Any:
    return usual if body.get(name) is None else body[name]


def _filters(temperature: float, top_p: float = 1.0) -> list[Any]:
    return [TopK(1)] if temperature == 0 else [Temperature(temperature), TopP(top_p)]


def _completions(body: dict[str, Any], answer: Any) -> None:
    found, model = answer.json(), models()[1].model
    prompt, n, stop = _given(body, "prompt", ""), _given(body, "n", 1), _given(body, "stop", [])
    prompts = [prompt] if isinstance(prompt, str) else prompt
    most, seed = _given(body, "max_tokens", 16), found["seed"]
    assert body.get("seed") is None or seed == body["seed"] % 2**32
    assert len(found["choices"]) == n * len(prompts)
    drawn = 0
    for index, choice in enumerate(found["choices"]):
        tokens, cut = list[int](), list[int]()
        text = "".join(
            model.generate(
                prompts[index // n], max_tokens=most, stop=[stop] if isinstance(stop, str) else stop,
                filters=_filters(_given(body, "temperature", 1.0), _given(body, "top_p", 1.0)),
                seed=(seed + index) % 2**32, drawn=tokens.append, cut_off=partial(cut.append, 1),
            )
        )  # fmt: skip
        drawn += len(tokens)
        assert choice["text"] == (prompts[index // n] if body.get("echo") else "") + text
        assert choice["finish_reason"] == ("length" if cut else "stop")
        assert "\ufffd" not in text or model.tokenizer.unknown_id in tokens
    assert found["usage"]["completion_tokens"] == drawn


def _translations(body: dict[str, Any], answer: Any) -> None:
    found, more = answer.json(), body.get("alternatives", 0)
    beam = Beam(max(Beam().size, more + 1), num_best=more + 1)
    texts = [body["q"]] if isinstance(body["q"], str) else body["q"]
    expected, others = [], []
    for text in texts:
        lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
        limits: dict[str, Any] = {"max_length": LIMITS.max_length, "max_target_length": LIMITS.max_length}
        candidates = [one.candidates for one in models()[0].translator.translate(lines, beam=beam, **limits)]
        expected.append("\n".join(some[0].text for some in candidates))
        others.append(sum(len(some) > 1 for some in candidates))
    told = found["translatedText"]
    told = [told] if isinstance(body["q"], str) else told
    assert [one.replace("\r\n", "\n") for one in told] == expected
    assert [one.count("\r\n") for one in told] == [one.count("\r\n") for one in texts]
    if more:
        alternatives = [found["alternatives"]] if isinstance(body["q"], str) else found["alternatives"]
        assert all(len(some) <= more for some in alternatives)
        assert all(has or not some for some, has in zip(alternatives, others, strict=True))


def _answers(body: dict[str, Any], answer: Any) -> None:
    done = json.loads(answer.text.split("event: done\ndata: ")[1])
    pieces = [json.loads(part.split("data: ")[1])["text"] for part in answer.text.split("\n\n") if "piece\n" in part]
    filters, seed, prefix = _filters(body.get("temperature", 0)), done["seed"], body.get("prefix", "")
    assert body.get("seed") is None or seed == body["seed"]
    if body.get("model") == WRITER:
        text = body["text"] + prefix
        most = _given(body, "max_tokens", 64)
        assert done["text"] == "".join(
            models()[1].model.generate(text, max_tokens=most, filters=filters, seed=seed)
        ) == "".join(pieces)  # fmt: skip
        return
    one = models()[0].translator
    (ids,), (begun,) = one.source_tokenizer.encode_batch([body["text"]]), one.target_tokenizer.encode_batch([prefix])
    source = torch.tensor([[*ids, one.source_tokenizer.marks.end_id]])
    usual = min(2 * source.shape[1] + 50 + len(begun), LIMITS.max_length)
    (best,) = sample(
        one.model, source, torch.tensor([source.shape[1]]), bos_id=one.target_tokenizer.marks.begin_id,
        eos_id=one.target_tokenizer.marks.end_id, max_steps=min(_given(body, "max_tokens", usual), usual),
        filters=filters, constraints=[ForcedPrefix([begun])], generator=torch.Generator().manual_seed(seed),
    )  # fmt: skip
    assert done["tokens"] == best.tokens
    whole = one.target_tokenizer.decode(best.tokens)
    assert whole.startswith(done["text"])
    assert not whole[len(done["text"]) :].strip("\ufffd")
    assert done["text"].startswith("".join(pieces))
