"""The steps of generations, joined: each against the same model's own eager weights of the whole sequence at once."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import regard
from regard.errors import ArgumentError, NotKeptError, OverwrittenError, ShapeError
from regard.watching.kept import evidence
from regard.watching.watch import Seen

pytest.importorskip("transformers")
import transformers

from tests.inspection import huggingface_families as families
from tests.inspection.huggingface_families import FAMILIES, LLAMA, Family, greedy, tokens
from tests.modules import module, watching

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

STATIC: dict[str, Any] = {"cache_implementation": "static", "disable_compile": True}
WINDOWED = {
    "mistral": FAMILIES["mistral"],
    "gemma3": Family("Gemma3ForCausalLM", families.WINDOWED | {"layer_types": ["sliding_attention", "full_attention"]}),
    "phi3": Family("Phi3ForCausalLM", LLAMA | {"sliding_window": 4}),
    "gpt-oss": FAMILIES["gpt-oss"],
}


def generated(model: Any, inputs: dict[str, Any], *, keep: Any = "factors", steps: int = 4, **more: Any) -> Any:
    with torch.no_grad(), regard.watch(model, keep=keep) as seen:
        ids = model.generate(**inputs, **greedy(steps, **more))
    return ids, seen


def whole(family: Family, inputs: dict[str, Any], ids: Tensor, field: str = "attentions", repeat: int = 1) -> Any:
    given = {name: one.repeat_interleave(repeat, 0) for name, one in inputs.items()}
    if field == "attentions":
        keep = given.get("attention_mask", torch.ones_like(given["input_ids"]))
        more = torch.ones(len(ids), ids.shape[1] - 1 - keep.shape[1], dtype=keep.dtype)
        given = {"input_ids": ids[:, :-1], "attention_mask": torch.cat([keep, more], 1)}
    else:
        given["decoder_input_ids"] = ids[:, :-1]
    with torch.no_grad():
        return getattr(family.build("eager")(**given, output_attentions=True, use_cache=False), field)


def names_of(seen: Seen, part: str = "") -> list[str]:
    return [name for name in dict.fromkeys(name for name, _ in seen) if part in name]


def require_joined(seen: Seen, family: Family, inputs: dict[str, Any], ids: Tensor) -> None:
    for path, expected in zip(names_of(seen), whole(family, inputs, ids), strict=True):
        same(seen.joined(path).dense(), expected)


def same_beams(found: Tensor, expected: Tensor, beams: int) -> None:
    """The model sorts its beams once more at the end."""
    assert found.shape == expected.shape
    for row, truth in enumerate(expected):
        assert min((one - truth).abs().max() for one in found[row // beams * beams :][:beams]) < 1e-5


def same(found: Tensor, expected: Tensor) -> None:
    """Rows of padding have no key here; eager spreads them evenly."""
    assert found.shape == expected.shape
    dead = (found == 0).all(-1, keepdim=True)
    assert ((found - expected).abs() * ~dead).max() < 1e-5
    assert dead.float().mean() < 0.5


@pytest.mark.parametrize("padding", [None, "left"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", WINDOWED)
def test_a_sliding_window_keeps_the_places_of_its_keys(name: str, cache: str, padding: str | None) -> None:
    family, inputs = WINDOWED[name], tokens(padding)
    ids, seen = generated(family.build(), inputs, **(STATIC if cache == "static" else {}))
    for path, expected in zip(names_of(seen), whole(family, inputs, ids), strict=True):
        joined = seen.joined(path)
        same(joined.dense(), expected)
        if padding is None:
            torch.testing.assert_close(joined.received(), expected.sum(-2), rtol=0, atol=1e-5)
            values, indices = joined.top_keys(2)
            named = expected.gather(-1, indices.clamp_min(0)) * (indices >= 0)
            torch.testing.assert_close(named, values, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("name", "cache"), [("llama", STATIC), ("mistral", STATIC), ("mistral", {})])
def test_a_cache_of_prompts_of_any_length_has_room_for_no_key(name: str, cache: dict[str, Any]) -> None:
    family = FAMILIES[name]
    model = family.build()
    for length, steps in ((5, 9), (2, 4), (1, 1), (5, 1)):
        ids, seen = generated(model, tokens(None, length), steps=steps, **cache)
        require_joined(seen, family, tokens(None, length), ids)


@pytest.mark.parametrize("length", [1, 5])
@pytest.mark.parametrize("steps", [1, 4])
def test_statistics_alone_have_room_for_no_key(length: int, steps: int) -> None:
    what = regard.Summarize("received", "entropy", "top_key", "distance", "pooled")
    model, inputs = FAMILIES["llama"].build(), tokens(None, length)
    generated(model, inputs, steps=9, **STATIC)
    ids, seen = generated(model, inputs, steps=steps, keep=what, **STATIC)
    for path, expected in zip(names_of(seen), whole(FAMILIES["llama"], inputs, ids), strict=True):
        joined = seen.joined(path)
        assert joined.shape == expected.shape
        torch.testing.assert_close(joined.received(), expected.sum(-2), rtol=0, atol=1e-5)
        assert torch.equal(joined.summary("top_key")["top_key"], expected.argmax(-1))
        if seen.calls[0].map.shape[-1] > length + steps - 1:
            assert set(joined.source.kept) == {"received", "entropy", "top_key"}


@torch.no_grad()
@pytest.mark.parametrize("prompt", [[0], [5, 0], [5, 6, 0, 0], [5, 6, 7]], ids=str)
@pytest.mark.parametrize("written", [[4, 5], [0, 5], [5, 0, 0, 6], [0, 0, 0]], ids=str)
def test_a_token_of_padding_may_have_a_key_of_zeros(prompt: list[int], written: list[int]) -> None:
    model = FAMILIES["llama"].build()
    model.model.embed_tokens.weight[0] = 0.0
    cache = None
    with regard.watch(model) as seen:
        for ids in (prompt, *([token] for token in written)):
            cache = model(torch.tensor([ids]), past_key_values=cache, use_cache=True).past_key_values
    at_once = watching(model)(torch.tensor([prompt + written]))
    for path in names_of(seen):
        same(seen.joined(path).dense(), at_once[path].dense())


@pytest.mark.parametrize("name", ["mistral", "gpt-oss"])
def test_statistics_alone_are_joined_at_the_same_places(name: str) -> None:
    what = regard.Summarize("received", "entropy", "top_key", "top_keys", "distance", k=3)
    family, inputs = WINDOWED[name], tokens(None)
    ids, seen = generated(family.build(), inputs, keep=what)
    for path, expected in zip(names_of(seen), whole(family, inputs, ids), strict=True):
        joined = seen.joined(path)
        torch.testing.assert_close(joined.received(), expected.sum(-2), rtol=0, atol=1e-5)
        assert torch.equal(joined.top_keys(1).indices[..., 0], expected.argmax(-1))
        apart = (torch.arange(14)[:, None] - torch.arange(14)).abs()
        torch.testing.assert_close(joined.distance(), (expected * apart).sum(-1), rtol=0, atol=1e-4)


def test_a_watch_that_begins_in_the_middle() -> None:
    model: Any = FAMILIES["llama"].build()
    ids = tokens(None, 14)["input_ids"]
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :6], past_key_values=cache)
        with regard.watch(model) as seen:
            for a, b in ((6, 9), (9, 10), (10, 11)):
                model(ids[:, a:b], past_key_values=cache)
    truth = whole(FAMILIES["llama"], {"input_ids": ids[:, :1]}, ids[:, :12])[1]
    same(seen.joined("model.layers.1.self_attn").dense(), truth[..., 6:, :])


def test_a_generation_without_a_cache_is_as_many_maps() -> None:
    _, seen = generated(FAMILIES["llama"].build(), tokens(None), use_cache=False)
    path = "model.layers.1.self_attn"
    said = r"4 sequences.*call 1 \(all its keys are new: another input, or a run without a cache"
    with pytest.raises(ShapeError, match=said):
        seen.joined(path)
    maps = seen.generations(path)
    assert [one.shape[-2:] for one in maps] == [(n, n) for n in range(11, 15)]
    assert all(torch.equal(one.dense(), seen[path, n].dense()) for n, one in enumerate(maps))


@pytest.mark.parametrize("other", ["another", "the same", "a beginning"])
def test_two_inputs_are_two_maps(other: str) -> None:
    ids = tokens(None)["input_ids"]
    second = {"another": ids.flip(1), "the same": ids, "a beginning": ids[:, :7]}[other]
    with torch.no_grad(), regard.watch(FAMILIES["llama"].build()) as seen:
        seen.modules[""](ids)
        seen.modules[""](second)
    with pytest.raises(
        ShapeError, match=r"2 sequences.*call 0; call 1 \((all its keys are new: another input|it asks)"
    ):
        seen.joined("model.layers.1.self_attn")
    with pytest.raises(ArgumentError, match="name must be the path of a module, got tuple"):
        seen.joined(("model.layers.1.self_attn", 0))  # type: ignore[arg-type]
    assert len(seen.generations("model.layers.1.self_attn")) == 2


@pytest.mark.parametrize("settings", [{}, STATIC])
def test_two_generations_are_two_maps_even_of_one_prompt(settings: dict[str, Any]) -> None:
    family, inputs = FAMILIES["mistral"], tokens(None)
    model = family.build()
    with torch.no_grad(), regard.watch(model) as seen:
        for steps in (4, 1, 6):
            ids = model.generate(**inputs, max_new_tokens=steps, min_new_tokens=steps, do_sample=False, **settings)
    expected = whole(family, inputs, ids)
    for path, truth in zip(names_of(seen), expected, strict=True):
        maps = seen.generations(path)
        assert [one.shape[-2] for one in maps] == [14, 11, 16]
        same(maps[2].dense(), truth)


def test_two_calls_a_step_are_two_maps() -> None:
    family = Family("DiffLlamaForCausalLM", LLAMA)
    ids, seen = generated(family.build(), tokens(None))
    path = "model.layers.1.self_attn"
    with pytest.raises(ShapeError, match=r"calls 0, 2, \.\.\., 6; calls 1, 3, \.\.\., 7 \(it asks the same queries"):
        seen.joined(path)
    at_once = watching(family.build())(ids[:, :-1])
    for number, joined in enumerate(seen.generations(path)):
        same(joined.dense(), at_once[path, number].dense())


Twice = module(
    lambda m, q, past, causal: torch.cat(
        [F.scaled_dot_product_attention(f(q), f(past), past, is_causal=causal) for f in (m.first, m.second)]
    ),
    lambda: {"first": nn.Linear(6, 6), "second": nn.Linear(6, 6)},
)
"""Two softmaxes of other queries and keys, one after the other, as differential attention has them."""


def test_two_calls_a_step_of_other_keys() -> None:
    x, model = torch.randn(2, 3, 9, 6), Twice()
    with torch.no_grad(), regard.watch(model) as seen:
        for a, b in ((0, 4), (4, 5), (5, 6), (6, 9)):
            model(x[:, :, a:b], x[:, :, :b], causal=False)
    with pytest.raises(ShapeError, match="2 sequences"):
        seen.joined("")
    for f, joined in zip((model.first, model.second), seen.generations(""), strict=True):
        scores = f(x) @ f(x).mT / 6**0.5
        keys = torch.arange(9)
        stop = torch.tensor([4, 4, 4, 4, 5, 6, 9, 9, 9])
        truth = scores.masked_fill(keys >= stop[:, None], -torch.inf).softmax(-1)
        torch.testing.assert_close(joined.dense(), truth, rtol=0, atol=1e-5)


class Rounded(transformers.DynamicCache):
    def update(self, key_states: Tensor, value_states: Tensor, *rest: Any, **more: Any) -> tuple[Tensor, Tensor]:
        known = self.get_seq_length(rest[0])
        keys, values = super().update(key_states, value_states, *rest, **more)
        unit = keys.abs().amax() / 127
        old, new = keys[:, :, :known], keys[:, :, known:]
        return torch.cat([(old / unit).round() * unit, new], 2), values


def test_a_cache_that_changes_keys_is_refused() -> None:
    ids = tokens(None)["input_ids"]
    model: Any = FAMILIES["llama"].build()
    cache = Rounded(config=model.config)
    with torch.no_grad(), regard.watch(model) as seen:
        for a, b in ((0, 8), (8, 9), (9, 10)):
            model(ids[:, a:b], past_key_values=cache)
    with pytest.raises(ShapeError, match=r"call 1 \(its keys neither .* a cache that changes keys"):
        seen.joined("model.layers.1.self_attn")


def test_meta_tensors_have_no_keys_to_compare() -> None:
    Attends = module(lambda m, x: F.scaled_dot_product_attention(x, x, x))

    with torch.no_grad(), regard.watch(Attends()) as seen:
        for n in (2, 3):
            seen.modules[""](torch.empty(1, 2, n, 4, device="meta"))
    with pytest.raises(ShapeError, match="nothing is known of its keys"):
        seen.joined("")


Cached = module(lambda m, q, k: F.scaled_dot_product_attention(q, k, k))
"""Attention over keys that are handed in."""


def test_fingerprints_wait_for_a_second_call_or_a_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    print_of = evidence._print
    monkeypatch.setattr(evidence, "_print", lambda vectors: made.append(vectors.shape[-2]) or print_of(vectors))
    x, model = torch.randn(1, 2, 6, 4), Cached()
    with torch.no_grad(), regard.watch(model) as seen:
        model(x[:, :, :3], x[:, :, :3])
        assert made == []
        model(x[:, :, 3:4], x[:, :, :4])
        assert sorted(made) == [1, 3, 3, 4]
    assert seen.joined("").shape[-2:] == (4, 4)
    once = watching(model)(x, x)
    assert len(made) == 4
    assert once.joined("").shape[-2:] == (6, 6)
    made.clear()
    with torch.no_grad(), regard.watch(model, keep="summary"):
        model(x, x)
    assert made == [6, 6], "statistics let the vectors go, so that nothing can wait"


def test_a_first_call_whose_keys_were_overwritten_is_continued_by_none() -> None:
    x, model = torch.randn(1, 2, 6, 4), Cached()
    buffer = x.clone()
    with torch.no_grad(), regard.watch(model) as seen:
        model(x[:, :, :3], buffer[:, :, :5])
        buffer.mul_(2)
        model(x[:, :, 3:4], buffer[:, :, :6])
    with pytest.raises(ShapeError, match="a cache that changes keys"):
        seen.joined("")
    with pytest.raises(OverwrittenError, match="the keys of"):
        seen["", 0].dense()
    copied = regard.watch(model, copy=True)
    with torch.no_grad(), copied as whole:
        model(x[:, :, :3], x[:, :, :3])
        x.add_(0)
        model(x[:, :, 3:4], x[:, :, :4])
    assert whole.joined("").shape[-2:] == (4, 4)


@pytest.mark.parametrize("settings", [{}, STATIC])
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt-oss"])
def test_beams_are_followed_back(name: str, settings: dict[str, Any]) -> None:
    family, inputs = FAMILIES[name], tokens(None)
    ids, seen = generated(family.build(), inputs, steps=8, num_beams=3, num_return_sequences=3, **settings)
    for path, expected in zip(names_of(seen), whole(family, inputs, ids, repeat=3), strict=True):
        same_beams(seen.joined(path).dense(), expected, 3)


def test_a_token_that_is_written_again_may_ask_the_same_again() -> None:
    """T5 has no absolute positions: where self-attention adds nothing, equal tokens have equal queries."""
    family, inputs = FAMILIES["t5"], tokens(None)
    model = family.build()
    for block in model.decoder.block:
        block.layer[0].SelfAttention.o.weight.data.zero_()
    given = {**inputs, "decoder_input_ids": torch.tensor([[0, 7, 7, 7, 9, 9]]).expand(len(inputs["input_ids"]), -1)}
    path = "decoder.block.1.layer.1.EncDecAttention"
    at_once = watching(model)(**given, use_cache=False)
    with torch.no_grad(), regard.watch(model) as seen:
        encoded, cache = model.encoder(**inputs), None
        for token in given["decoder_input_ids"].split(1, 1):
            step = model(encoder_outputs=encoded, decoder_input_ids=token, past_key_values=cache, use_cache=True)
            cache = step.past_key_values
    same(seen.joined(path).dense(), at_once[path].dense())


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", ["bart", "t5"])
def test_cross_attention_has_a_row_for_each_step(name: str, beams: int) -> None:
    family = FAMILIES[name]
    inputs = {name: one for name, one in family.inputs().items() if name != "decoder_input_ids"}
    ids, seen = generated(family.build(), inputs, steps=6, num_beams=beams, num_return_sequences=beams)
    paths = names_of(seen, "ncoder_attn" if name == "bart" else "EncDec")
    for path, expected in zip(paths, whole(family, inputs, ids, "cross_attentions", beams), strict=True):
        same_beams(seen.joined(path).dense(), expected, beams)


def test_cross_attention_of_other_targets_or_of_a_second_generation() -> None:
    family = FAMILIES["bart"]
    model, given = family.build(), family.inputs()
    other = {**given, "decoder_input_ids": given["decoder_input_ids"].flip(1)}
    path = "model.decoder.layers.1.encoder_attn"
    with torch.no_grad(), regard.watch(model) as seen:
        model(**given)
        model(**other)
    with pytest.raises(ShapeError, match="equal to those of an earlier call, but were made anew"):
        seen.joined(path)
    del given["decoder_input_ids"]
    with torch.no_grad(), regard.watch(model) as seen:
        for _ in range(2):
            model.generate(**given, max_new_tokens=5, min_new_tokens=5, do_sample=False, pad_token_id=0)
    one, two = seen.generations(path)
    assert one.shape == two.shape == (2, 4, 5, 11)
    assert torch.equal(one.dense(), two.dense())


def test_rows_that_cannot_be_told_apart_are_refused() -> None:
    memory = torch.randn(1, 2, 5, 4).expand(3, -1, -1, -1).contiguous()
    q = torch.randn(3, 3, 2, 1, 4)
    with torch.no_grad(), regard.watch(Cached()) as seen:
        for step in q:
            seen.modules[""](step, memory)
    with pytest.raises(ShapeError, match="cannot be told which of them each row continues"):
        seen.joined("")


def test_rows_that_change_places_leave_and_are_copied() -> None:
    q, k = torch.randn(4, 2, 6, 4), torch.randn(4, 2, 6, 4)
    orders = [torch.tensor(o) for o in ([2, 0, 1, 3], [1, 1, 0], [2, 0])]
    with torch.no_grad(), regard.watch(Cached()) as seen:
        keys, queries = k[:, :, :3], q[:, :, :3]
        seen.modules[""](queries, keys)
        for order in orders:
            new = torch.randn(2, len(order), 2, 1, 4)
            keys, queries = (torch.cat([old[order], more], 2) for old, more in zip((keys, queries), new, strict=True))
            seen.modules[""](queries[:, :, -1:], keys)
    stop = torch.tensor([3, 3, 3, 4, 5, 6])
    hidden = torch.arange(6) >= stop[:, None]
    truth = (queries @ keys.mT / 2).masked_fill(hidden, -torch.inf).softmax(-1)
    torch.testing.assert_close(seen.joined("").dense(), truth, rtol=0, atol=1e-5)


def test_rows_of_a_batch_that_come_to_have_the_same_window_stay_in_place() -> None:
    family, inputs = FAMILIES["mistral"], tokens(None)
    ids, seen = generated(family.build(), inputs, steps=12)
    assert torch.equal(ids[0, -4:-1], ids[1, -4:-1]), "the test needs two rows whose last tokens are the same"
    require_joined(seen, family, inputs, ids)


def test_assisted_decoding_keeps_the_rows_that_were_accepted() -> None:
    family, ids = FAMILIES["llama"], tokens(None)["input_ids"][:1]
    model: Any = family.build()
    assistant: Any = family.build()
    with torch.no_grad():
        for parameter in assistant.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(8)) * 0.02)
    written, seen = generated(model, {"input_ids": ids}, steps=12, assistant_model=assistant)
    # The assistant runs inside the model's own `generate`, and its calls are filed under the model itself.
    for path, expected in zip(names_of(seen, "layers"), whole(family, {"input_ids": ids}, written), strict=True):
        assert any(one.shape[-2] > 1 for one in seen.calls_of(path)[1:])
        found = seen.joined(path).dense()
        length = min(found.shape[-2], expected.shape[-2])
        same(found[..., :length, :length], expected[..., :length, :length])
        assert length >= written.shape[1] - 2


def test_statistics_of_rows_that_were_cut_are_left_out() -> None:
    what = regard.Summarize("received", "entropy", "top_keys")
    x = torch.randn(1, 2, 9, 4)
    calls = [x[:, :, a:b] for a, b in ((0, 4), (4, 7))] + [torch.randn(1, 2, 2, 4)]
    maps = {}
    for keep in ("factors", what):
        with torch.no_grad(), regard.watch(Cached(), keep=keep) as seen:
            keys = calls[0][:, :, :0]
            for call, cut in zip(calls, (0, 4, 5), strict=True):
                keys = torch.cat([keys[:, :, :cut], call], 2)
                seen.modules[""](call, keys)
        maps[str(keep)] = seen.joined("")
    one, other = maps.values()
    assert one.shape == other.shape == (1, 2, 7, 7)
    torch.testing.assert_close(one.entropy(), other.entropy(), rtol=0, atol=1e-5)
    assert torch.equal(one.top_keys(2).indices, other.top_keys(2).indices)
    with pytest.raises(NotKeptError, match="received"):
        other.received()


def test_two_ends_of_one_beginning_are_two_maps() -> None:
    begun, ends = torch.randn(1, 2, 5, 4), torch.randn(2, 1, 2, 3, 4)
    with torch.no_grad(), regard.watch(Cached()) as seen:
        seen.modules[""](begun, begun)
        for end in ends:
            seen.modules[""](end, torch.cat([begun, end], 2))
        seen.modules[""](begun[:, :, :1], torch.cat([begun, ends[0], begun[:, :, :1]], 2))
    with pytest.raises(ShapeError, match=r"calls 0, 1, 3; calls 0, 2 \(its cache was cut back to 5 keys"):
        seen.joined("")
    first, second = seen.generations("")
    assert (first.shape[-2:], second.shape[-2:]) == ((9, 9), (8, 8))
    assert torch.equal(first.dense()[..., :5, :8], second.dense()[..., :5, :])
    assert torch.equal(second.dense()[..., 5:, :], seen["", 2].dense())
