"""Edits of transformers' models against their eager attention with the same edit written into it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard.edits import AddBias, Edit, Knockout, ReplaceWeights, Reweight, ScaleHeads
from regard.errors import ArgumentError
from tests.edits import eager
from tests.inspection.huggingface_families import FAMILIES

transformers = pytest.importorskip("transformers")
L = 9


def made(name: str) -> Any:
    return FAMILIES[name].build().double()


def inputs(model: Any, *, padded: bool = False) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    if isinstance(model, transformers.ViTModel):
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator).double()}
    ids = torch.randint(3, 50, (2, L), generator=generator)
    mask = torch.ones(2, L, dtype=torch.long)
    if padded:
        mask[1, :3] = 0
    given = {"input_ids": ids, "attention_mask": mask}
    if model.config.is_encoder_decoder:
        given["decoder_input_ids"] = torch.randint(3, 50, (2, 6), generator=generator)
    return given


@pytest.fixture(scope="module", autouse=True)
def known_to_transformers() -> None:
    """The oracle is an implementation among those of transformers, which is told anew for each model."""
    masks: Any = transformers.masking_utils
    masks.AttentionMaskInterface.register("edited_eager", masks.eager_mask)


def by_eager(model: Any, edits: dict[str, list[Edit]], run: Callable[[], Any]) -> Any:
    transformers.AttentionInterface.register("edited_eager", eager.into(model, edits))
    before = model.config._attn_implementation
    model.set_attn_implementation("edited_eager")
    try:
        with torch.no_grad():
            return run()
    finally:
        model.set_attn_implementation(before)


def final(outputs: Any) -> Tensor:
    return outputs.logits if "logits" in outputs else outputs.last_hidden_state


CHAIN: list[Edit] = [
    Reweight([1, 4], 7.0, heads=[0, 3], queries=slice(2, None)),
    Knockout(keys=2, heads=[0, 2]),
    AddBias(torch.tensor([1.5, -2.0]), keys=[0, 3], batch=1),
    ScaleHeads([1, 3], 0.5, queries=slice(1, 5)),
]
MODELS = [
    pytest.param("gpt2", ["transformer.h.0.attn", "transformer.h.1.attn"], id="gpt2"),
    pytest.param("llama", ["model.layers.1.self_attn"], id="llama, grouped heads"),
    pytest.param("mistral", ["model.layers.0.self_attn"], id="mistral, a window"),
    pytest.param("bert", ["encoder.layer.0.attention.self", "encoder.layer.1.attention.self"], id="bert"),
    pytest.param(
        "t5", ["encoder.block.0.layer.0.SelfAttention", "decoder.block.1.layer.1.EncDecAttention"], id="t5, cross"
    ),
    pytest.param("bart", ["model.decoder.layers.0.encoder_attn", "model.decoder.layers.1.self_attn"], id="bart, cross"),
    pytest.param("vit", ["layers.0.attention"], id="vit"),
]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("name", "paths"), MODELS)
def test_edits_are_those_written_into_eager_attention(name: str, paths: list[str], padded: bool) -> None:
    model = made(name)
    names = [path for path, _ in model.named_modules()]
    paths = [next(one for one in names if one.endswith(path)) for path in paths]
    given, edits = inputs(model, padded=padded), dict.fromkeys(paths, CHAIN)
    with torch.no_grad():
        plain = final(model(**given))
        with regard.edit(model, edits) as run, regard.watch(model, verify=True) as seen:
            output = final(model(**given))
        again = final(model(**given))
    expected = final(by_eager(model, edits, lambda: model(**given)))
    real = given["attention_mask"].bool() if padded and output.shape[1] == L else torch.ones(output.shape[:2]).bool()
    torch.testing.assert_close(output[real], expected[real], atol=1e-5, rtol=1e-5)
    assert (output - plain).abs().max() > 1e-3, "the edits change too little to be seen"
    assert torch.equal(plain, again)
    assert set(run.report().plans) == set(paths)
    assert max(call.error for call in seen.calls if isinstance(call.error, float)) < 1e-5
    assert all(isinstance(call.error, float) for call in seen.calls)


STEPS: list[Edit] = [
    Reweight([1, 4], 7.0, heads=[0, 3]),
    Knockout(keys=slice(8, 11), queries=slice(10, None), heads=[1, 2]),
    ScaleHeads(2, 0.25, queries=slice(3, 12)),
]


def generated(model: Any, given: dict[str, Tensor], **settings: Any) -> Any:
    with torch.no_grad():
        return model.generate(
            **given, max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0, output_logits=True,
            return_dict_in_generate=True, **settings,
        )  # fmt: skip


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        pytest.param("gpt2", {}, id="gpt2"),
        pytest.param("llama", {}, id="llama"),
        pytest.param("llama", {"cache_implementation": "static", "disable_compile": True}, id="llama, a static cache"),
        pytest.param("mistral", {}, id="mistral, a sliding window"),
    ],
)
def test_edits_hold_in_every_step_at_positions_of_the_whole_text(name: str, settings: Any, padded: bool) -> None:
    model = made(name)
    path = next(name for name, m in model.named_modules() if name.endswith((".attn", ".self_attn")))
    given = inputs(model, padded=padded)
    with regard.edit(model, {path: STEPS}) as run, regard.watch(model, path) as seen:
        steps = generated(model, given, **settings)
    plans = run.report().plans[path]
    assert sum(plans.values()) == 6
    text = steps.sequences
    attention_mask = torch.cat([given["attention_mask"], torch.ones(2, 6, dtype=torch.long)], 1)
    positions = (attention_mask.cumsum(1) - 1).clamp_min(0)
    whole = by_eager(
        model, {path: STEPS},
        lambda: model(input_ids=text, attention_mask=attention_mask, position_ids=positions, use_cache=False).logits,
    )  # fmt: skip
    plain = generated(model, given).logits[-1]
    for step, logits in enumerate(steps.logits):
        torch.testing.assert_close(logits.double(), whole[:, L + step - 1], atol=1e-5, rtol=1e-5)
    assert (plain - steps.logits[-1]).abs().max() > 1e-3
    if not settings:
        joined = seen.joined(path)
        assert joined.shape == (2, 4, L + 5, L + 5)
        assert float(joined[0, 1, 11, 8:11].abs().max()) == 0.0, "a key that was cut has a weight in a later step"


def test_cross_attention_counts_its_queries_from_the_first_step() -> None:
    model = made("bart")
    path = "model.decoder.layers.1.encoder_attn"
    edits: list[Edit] = [Reweight(2, 50.0, queries=[2, 3]), Knockout(keys=4, queries=slice(1, 3), heads=0)]
    given = inputs(model)
    given.pop("decoder_input_ids")
    # The call of a step asks for one query; the first steps have none that is named, which only a slice may say.
    named: list[Edit] = [Reweight(2, 50.0, queries=slice(2, 4)), edits[1]]
    with regard.edit(model, {path: named}) as run:
        steps = generated(model, given)
    assert run.report().plans[path]["unchanged"] == 3
    whole = by_eager(
        model, {path: edits},
        lambda: model(**given, decoder_input_ids=steps.sequences[:, :-1], use_cache=False).logits,
    )  # fmt: skip
    for step, logits in enumerate(steps.logits):
        torch.testing.assert_close(logits.double(), whole[:, step], atol=1e-5, rtol=1e-5)


def test_a_position_that_does_not_exist_yet_is_refused_unless_a_slice_names_it() -> None:
    model, path = made("gpt2"), "transformer.h.0.attn"
    given = inputs(model)
    match = "there is no key 10, but 0 to 8 so far; a slice takes"
    with pytest.raises(ArgumentError, match=match), regard.edit(model, {path: Knockout(keys=10)}):
        generated(model, given)
    with regard.edit(model, {path: Knockout(keys=slice(10, 11), heads=1)}) as run, regard.watch(model, path) as seen:
        generated(model, given)
    assert run.report().plans[path]["unchanged"] == 2
    joined = seen.joined(path)
    assert float(joined[:, 1, :, 10].abs().max()) == 0.0 < float(joined[:, 0, 10:, 10].min())


def test_edits_of_an_enabled_model_reach_its_attentions() -> None:
    model = made("llama")
    given, path = inputs(model), "model.layers.0.self_attn"
    expected = final(by_eager(model, {path: CHAIN}, lambda: model(**given)))
    with regard.huggingface.enable(model), regard.edit(model, {path: CHAIN}), torch.no_grad():
        outputs = model(**given, output_attentions=True)
    torch.testing.assert_close(final(outputs), expected, atol=1e-5, rtol=1e-5)
    assert float(outputs.attentions[0][:, 2, 2:, 2].abs().max()) == 0.0


def test_weights_of_another_run_are_put_into_this_one() -> None:
    model, path = made("gpt2"), "transformer.h.1.attn"
    clean, changed = inputs(model)["input_ids"], inputs(model)["input_ids"].flip(0)
    with torch.no_grad(), regard.watch(model) as seen:
        model(clean)
    weights = seen[path, 0].dense()
    with torch.no_grad():
        with regard.edit(model, {path: ReplaceWeights(seen, heads=[1, 2])}), regard.watch(model) as after:
            lazy = final(model(changed))
        with regard.edit(model, {path: ReplaceWeights(weights[:, [1, 2]], heads=[1, 2])}):
            dense = final(model(changed))
        with regard.edit(model, {path: ReplaceWeights(seen[path, 0], heads=[1, 2])}):
            by_map = final(model(changed))
    expected = final(by_eager(model, {path: [ReplaceWeights(weights, heads=[1, 2])]}, lambda: model(changed)))
    for output in (lazy, dense, by_map):
        torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(after[path].dense()[:, 1:3], weights[:, 1:3])
    assert not torch.allclose(after[path].dense()[:, 0], weights[:, 0])


@pytest.mark.parametrize("implementation", ["eager", "flex_attention"])
def test_what_transformers_runs_otherwise_is_refused_before_anything_runs(implementation: str) -> None:
    model = made("llama")
    model.set_attn_implementation(implementation)
    with pytest.raises(ArgumentError, match=rf"'model.layers.0.self_attn' runs transformers' '{implementation}' att"):
        regard.edit(model, {"model.layers.*": Reweight(0, 2.0)})
