"""`regard.huggingface.enable`: the same logits, and maps where eager has its weights."""

import sys
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.call.masks.basic import Causal, Padding, Predicate
from regard.call.masks.patterns import Window
from regard.errors import ArgumentError
from regard.huggingface.enable import forward
from regard.huggingface.masks import LazyMask, lazy_mask

pytest.importorskip("transformers")
from transformers import masking_utils as masking

from tests.families import architectures, examine
from tests.inspection.huggingface_families import FAMILIES, IN_BLOCKS, LENGTH, _field, greedy, tokens
from tests.modules import module
from tests.transformers_version import is_older_than, places

# transformers calls what torch has deprecated; nothing of it is ours.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
SINCE_5 = ["bert", "modernbert", "t5", "swin"]
UNABLE = ["deberta-v2", "mpnet", "xlnet", "gpt-neo", "bloom", "falcon", *(SINCE_5 if is_older_than(5) else [])]
UNABLE += ["gpt-j"] if is_older_than(5, 24) else []
MASKED_BY_ITSELF_BEFORE_5 = ("bart", "marian", "whisper", "clip")


def able(*names: str) -> list[Any]:
    needs_5 = pytest.mark.skipif(is_older_than(5), reason="transformers 4 does not dispatch this attention")
    return [pytest.param(name, marks=needs_5) if name in SINCE_5 else name for name in names]


def enabled(name: str) -> Any:
    model = FAMILIES[name].build()
    regard.huggingface.enable(model)
    return model


def real(tensor: Tensor, inputs: dict[str, Any]) -> Tensor:
    """The parts outside queries of padding, whose attention is uniform in eager and 0 here."""
    keep = inputs.get("attention_mask")
    if keep is None:
        return tensor
    if tensor.dim() > 1 and tensor.shape[:2] == keep.shape:
        return tensor[keep.bool()]
    if tensor.dim() == 4 and tensor.shape[-2] == keep.shape[1]:
        return tensor * keep[:, None, :, None]
    return tensor


def same(one: Any, other: Any, inputs: dict[str, Any], tolerance: float = 1e-4) -> None:
    for key, value in other.items():
        if isinstance(value, Tensor):
            torch.testing.assert_close(real(one[key], inputs), real(value, inputs), rtol=0, atol=tolerance)


def same_maps(maps: Any, expected: Any, inputs: dict[str, Any], tolerance: float = 1e-5) -> None:
    assert len(maps) == len(expected) > 0
    for weights, dense in zip(maps, expected, strict=True):
        assert isinstance(weights, regard.AttentionMap)
        torch.testing.assert_close(real(weights.dense(), inputs), real(dense, inputs), rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("name", "context"),
    [
        *((name, torch.no_grad) for name in FAMILIES if name in SINCE_5 or name not in UNABLE),
        *product(("gpt2", "t5", "bert", "gemma2", "gpt-oss"), (torch.enable_grad, torch.inference_mode)),
    ],
)
def test_logits_and_maps_are_those_of_eager(name: str, context: type[Any]) -> None:
    """No T x S mask is made, or taken for one's own function: it would still be right, and slow."""
    if name in SINCE_5 and is_older_than(5):
        pytest.skip("transformers 4 does not dispatch this attention")
    family = FAMILIES[name]
    inputs = family.inputs()
    model, eager = family.build(), family.build("eager")
    with context():
        default = model(**inputs)
        regard.huggingface.enable(model)
        ours, theirs = (m(**inputs, output_attentions=True) for m in (model, eager))
        same(ours, theirs, inputs)
        same(ours, default, inputs)
        for attentions in family.attentions:
            same_maps(_field(ours, attentions), _field(theirs, attentions), inputs)
    if is_older_than(5) and name in MASKED_BY_ITSELF_BEFORE_5:
        return  # in transformers 4 this model makes its masks itself, as T x S numbers
    for weights in (w for attentions in family.attentions for w in _field(ours, attentions)):
        mask = weights.source.call.mask
        assert weights.source.call.bias is None or name in ("t5", "swin")
        assert all(isinstance(m, Causal | Padding | Window) for m in (() if mask is None else mask.factors()))


def test_maps_are_made_of_grouped_heads_sinks_and_caps() -> None:
    kinds = {}
    for name in ("llama", "gemma2", "gpt-oss", "deepseek-v3"):
        with torch.no_grad():
            kinds[name] = enabled(name)(**FAMILIES[name].inputs(), output_attentions=True).attentions[0]
    assert kinds["llama"].source.call.key.shape[1] == 2
    assert "soft-capped at 2" in repr(kinds["gemma2"])
    assert "softmax with a sink" in repr(kinds["gpt-oss"])
    assert (kinds["gpt-oss"].dense().sum(-1) < 1).all()


@pytest.mark.parametrize("name", able("gpt2", "llama", "t5", "bert"))
def test_bfloat16_autocast(name: str) -> None:
    family = FAMILIES[name]
    inputs = family.inputs()
    model = family.build()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        theirs = model(**inputs)
        regard.huggingface.enable(model)
        ours = model(**inputs, output_attentions=True)
    same(ours, theirs, inputs, 0.2)
    first = _field(ours, family.attentions[0])[0]
    assert (first.dtype, first.source.call.query.dtype) == (torch.float32, torch.bfloat16)


def test_dropout_in_training_is_not_in_the_map() -> None:
    model = enabled("gpt2")
    with torch.no_grad():
        expected = model(**tokens(), output_attentions=True).attentions[0].dense()
        for layer in model.transformer.h:
            layer.attn.train()
            layer.attn.resid_dropout.p = 0.0
        one, other = (model(**tokens(), output_attentions=True) for _ in range(2))
    assert not torch.equal(one.logits, other.logits)
    torch.testing.assert_close(one.attentions[0].dense(), expected)


def generated(model: Any, inputs: dict[str, Any], **settings: Any) -> Any:
    with torch.no_grad():
        return model.generate(**inputs, **greedy(**settings), output_attentions=True, return_dict_in_generate=True)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padding", [None, "left"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral", "gemma2", "gpt-oss"])
def test_generation(name: str, padding: str | None, cache: str) -> None:
    settings = {} if cache == "dynamic" else {"cache_implementation": "static", "disable_compile": True}
    model, eager = enabled(name), FAMILIES[name].build("eager")
    inputs = tokens(padding)
    ours, theirs = (generated(m, inputs, **settings) for m in (model, eager))
    assert torch.equal(ours.sequences, theirs.sequences)
    assert len(ours.attentions) == len(theirs.attentions) == 5
    for step, (found, expected) in enumerate(zip(ours.attentions, theirs.attentions, strict=True)):
        for weights, dense in zip(found, expected, strict=True):
            assert weights.shape == dense.shape
            weights = weights.dense()
            dead = (weights == 0).all(-1, keepdim=True) if step == 0 else torch.zeros(1, dtype=torch.bool)
            if step == 0 and padding:
                dead[1, :, :4] = True
            torch.testing.assert_close(weights.masked_fill(dead, 0), dense.masked_fill(dead, 0), rtol=0, atol=1e-5)


def test_generation_with_an_encoder_and_beams() -> None:
    model, eager = enabled("bart"), FAMILIES["bart"].build("eager")
    ours, theirs = (generated(m, tokens(), num_beams=2) for m in (model, eager))
    assert torch.equal(ours.sequences, theirs.sequences)
    same_maps(ours.encoder_attentions, theirs.encoder_attentions, tokens())
    for name in ("cross_attentions", "decoder_attentions"):
        for found, expected in zip(ours[name], theirs[name], strict=True):
            same_maps(found, expected, {})


def test_every_mask_that_transformers_makes_is_the_predicates_own() -> None:
    keep = torch.ones(2, 9, dtype=torch.bool)
    keep[1, :2] = False
    ids = torch.tensor([[0, 0, 0, 1, 1, 1, 2, 2, 2], [0, 0, 0, 0, 1, 1, 1, 1, 1]])
    functions: dict[str, tuple[Any, set[type]]] = {
        "causal": (masking.causal_mask_function, {Causal}),
        "window": (masking.sliding_window_causal_mask_function(3), {Causal, Window}),
        "chunks": (masking.chunked_causal_mask_function(4, torch.tensor([0, 2])), {Causal, Predicate}),
        "packed": (masking.and_masks(masking.causal_mask_function, masking.packed_sequence_mask_function(ids)),
                   {Causal, Predicate}),
        "prefix": (masking.or_masks(masking.causal_mask_function, lambda b, h, q, k: (k < 2) & (q >= 0)), {Predicate}),
    }  # fmt: skip
    if not is_older_than(5):
        functions["both ways"] = (masking.sliding_window_bidirectional_mask_function(2), {Window})
        functions["everything"] = (masking.bidirectional_mask_function, set())
    for name, (function, kinds) in functions.items():
        for start, queries in ((0, 9), (4, 5)):
            for padding in (None, keep):
                settings: dict[str, Any] = {
                    "batch_size": 2, "kv_length": 9, "kv_offset": 0, "mask_function": function,
                    "attention_mask": padding, **places(start, queries),
                }  # fmt: skip
                expected = masking.sdpa_mask(**settings, allow_is_causal_skip=False)
                found = lazy_mask(**settings)
                assert isinstance(found, LazyMask)
                assert found.shape == (2, 1, queries, 9)
                assert torch.equal(found & True, expected.expand(2, 1, queries, 9)), name
                factors = () if found.allowed is None else found.allowed.factors()
                assert {type(m) for m in factors} == kinds | ({Padding} if padding is not None else set()), name


def test_functions_that_are_not_written_for_tensors_are_rendered_by_transformers() -> None:
    settings: dict[str, Any] = {
        "batch_size": 1,
        "kv_length": 4,
        "mask_function": masking.causal_mask_function,
        **places(0, 4),
    }
    found = lazy_mask(**settings, use_vmap=True)
    assert not isinstance(found, LazyMask)
    assert torch.equal(found[0, 0], torch.ones(4, 4, dtype=torch.bool).tril())


def test_a_lazy_mask_is_the_tensor_that_it_stands_for() -> None:
    causal: Any = masking.causal_mask_function
    mask = lazy_mask(2, 3, 4, 1, 0, causal)
    dense = torch.ones(3, 4, dtype=torch.bool).tril(1).expand(2, 1, 3, 4)
    assert torch.equal(mask[..., :2], dense[..., :2])
    assert torch.equal(torch.where(mask, 1.0, 0.0), dense.float())
    assert mask.to(mask.device) is mask
    assert not isinstance(mask[..., :2], LazyMask)
    assert repr(mask) == "LazyMask((2, 1, 3, 4), causal)"


@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
def test_masks_of_ones_own(kind: torch.dtype) -> None:
    model, eager = enabled("llama"), FAMILIES["llama"].build("eager")
    keep = torch.rand(2, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(1)) > 0.4
    keep |= torch.eye(LENGTH, dtype=torch.bool)
    added = torch.zeros(keep.shape).masked_fill(~keep, torch.finfo(torch.float32).min)
    ids = tokens(None)["input_ids"]
    with torch.no_grad():
        theirs = eager(ids, attention_mask=added, output_attentions=True)
        ours = model(ids, attention_mask=keep if kind == torch.bool else added, output_attentions=True)
    same(ours, theirs, {})
    same_maps(ours.attentions, theirs.attentions, {})


@pytest.mark.parametrize("name", able("gpt2", "t5", "clip"))
def test_disable_gives_back_what_was(name: str) -> None:
    family = FAMILIES[name]
    inputs = family.inputs()
    model = family.build()
    with torch.no_grad():
        before = model(**inputs)
        with regard.huggingface.enable(model) as enabled:
            assert repr(enabled) == f"Enabled({type(model).__name__})"
            _field(model(**inputs, output_attentions=True), family.attentions[0])[0].entropy()
        after = model(**inputs)
    assert all(torch.equal(before[key], after[key]) for key, value in before.items() if isinstance(value, Tensor))
    assert {m.config._attn_implementation for m in model.modules() if hasattr(m, "config")} == {"sdpa"}


@pytest.mark.parametrize("name", [*UNABLE, *IN_BLOCKS])
def test_models_that_do_not_dispatch_are_refused_and_left_as_they_were(name: str) -> None:
    family = {**FAMILIES, **IN_BLOCKS}[name]
    model = family.build()
    before = model.config._attn_implementation
    with pytest.raises(ArgumentError, match=rf"{family.model} writes its attention"):
        regard.huggingface.enable(model)
    assert model.config._attn_implementation == before


def test_configs_without_a_model_are_given_back_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FAMILIES["clip"].build()
    del model.vision_model
    model.config.vision_config._attn_implementation = "eager"
    with regard.huggingface.enable(model):
        assert model.config.vision_config._attn_implementation == "regard"
    assert model.config.vision_config._attn_implementation == "eager"
    bloom = FAMILIES["bloom"].build()
    monkeypatch.setattr(type(bloom.config), "sub_configs", {"inner": type(model.config)})
    bloom.config.inner = model.config.vision_config
    with pytest.raises(ArgumentError, match="BloomForCausalLM writes its attention out"):
        regard.huggingface.enable(bloom)
    assert bloom.config.inner._attn_implementation == "eager"


def test_parts_that_do_not_dispatch_are_named() -> None:
    model = FAMILIES["llama"].build()
    model.inner = FAMILIES["bloom"].build()
    enabled = regard.huggingface.enable(model)
    assert enabled.left == ("BloomForCausalLM",)
    assert repr(enabled) == "Enabled(LlamaForCausalLM; left as they were: BloomForCausalLM)"


def test_arguments_that_regard_does_not_run_are_refused() -> None:
    q = torch.ones(1, 1, 2, 4)
    with pytest.raises(ArgumentError, match="paged cache"):
        forward(torch.nn.Identity(), q, q, q, None, cache=object())
    with pytest.raises(ArgumentError, match=r"head_mask is not run by regard, got one of shape \(1, 1, 1, 1\)"):
        forward(torch.nn.Identity(), q, q, q, None, head_mask=torch.zeros(1, 1, 1, 1))


@pytest.mark.parametrize("lacks", ["AttentionInterface", "masking_utils"])
def test_a_transformers_without_a_choice_of_attention_is_refused(lacks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = FAMILIES["llama"].build()
    if lacks == "masking_utils":
        monkeypatch.delitem(sys.modules, "transformers.masking_utils")
    else:
        monkeypatch.delattr(sys.modules["transformers.modeling_utils"], lacks)
    with pytest.raises(ArgumentError, match=r"4\.57 or newer, and this is \d.*regard\.watch"):
        regard.huggingface.enable(model)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.float16])
def test_a_lazy_mask_stands_for_bools_or_for_numbers_to_add(dtype: torch.dtype) -> None:
    mask = LazyMask(Causal(0), (2, 1, 3, 3), torch.device("cpu"), dtype)
    keep = torch.ones(2, 1, 3, 3).tril().bool()
    added = torch.zeros(2, 1, 3, 3, dtype=dtype).masked_fill(
        ~keep, 0 if dtype == torch.bool else torch.finfo(dtype).min
    )
    assert mask.dtype == dtype
    assert torch.equal(mask + 0 if dtype != torch.bool else mask & True, keep if dtype == torch.bool else added)
    padded = torch.nn.functional.pad(mask, (0, 1), value=0.0)
    assert torch.equal(padded[..., :3], keep if dtype == torch.bool else added)


def tiny(name: str, kind: str) -> tuple[Any, Any, dict[str, Any]]:
    library = architectures.library()
    if is_older_than(5) and not hasattr(library, kind):
        pytest.skip(f"transformers 4 has no {kind}")
    model = architectures.build(getattr(library, kind), architectures.tiny_config(name))
    return model, getattr(library, kind), architectures.inputs_for(name, model)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("git", "GitModel"),  # pads its mask with zeros, which are to mean "keep"
        ("bridgetower", "BridgeTowerModel"),  # gives no mask where it sees all keys
        ("deepseek_v32", "DeepseekV32Model"),  # gives the keys that an indexer has chosen
    ],
)
def test_outputs_maps_and_gradients_are_those_of_eager(name: str, kind: str) -> None:
    model, of, inputs = tiny(name, kind)
    if is_older_than(5) and not hasattr(sys.modules[of.__module__], "ALL_ATTENTION_FUNCTIONS"):
        pytest.skip(f"transformers 4 does not dispatch the attention of {kind}")
    told = examine.enabled(model, examine.own_weights(model, of, name, inputs), inputs)
    assert told["taken"]
    assert told["error"] < 1e-5
    assert told["gradient"] < 1e-5
    assert not told["maps_wrong"]


def test_an_argument_that_is_not_computed_is_refused() -> None:
    model, _, inputs = tiny("inkling2_text", "Inkling2TextModel")
    with torch.no_grad():
        before = model(**inputs).last_hidden_state
        with pytest.raises(ArgumentError, match=r"argument that is not computed here .*sinks"):
            regard.huggingface.enable(model)
        assert torch.equal(model(**inputs).last_hidden_state, before)
    q = torch.ones(1, 1, 2, 4)
    with pytest.raises(ArgumentError, match="blocks of keys"):
        forward(torch.nn.Identity(), q, q, q, None, block_indices=torch.zeros(1))


def whisper() -> Any:
    import transformers

    family = FAMILIES["whisper"]
    config = transformers.WhisperConfig(**{**family.settings, "vocab_size": 80, "median_filter_width": 3})
    torch.manual_seed(3)
    model = transformers.WhisperForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    settings = {
        "no_timestamps_token_id": 70, "alignment_heads": [[0, 1], [1, 2]], "is_multilingual": False, "pad_token_id": 0,
        "eos_token_id": 2, "decoder_start_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None,
        "forced_decoder_ids": None, "max_length": 20, "return_timestamps": False,
    }  # fmt: skip
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    return model


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_whispers_times_of_tokens_come_from_our_weights() -> None:
    """transformers asks for eager attention here, for this generation and for all that follow."""
    features = torch.randn(2, 8, 20, generator=torch.Generator().manual_seed(1))
    options = {"return_token_timestamps": True, "max_new_tokens": 6, "min_new_tokens": 6}
    plain, model = whisper(), whisper()
    ids = torch.tensor([[1, 5, 6]] * 2)
    enabled = regard.huggingface.enable(model)
    with torch.no_grad(), regard.watch(model) as seen:
        theirs, ours = (m.generate(features, **options) for m in (plain, model))
    assert {call.how for call in seen.calls} == {"regard.attention"}
    assert torch.equal(ours["sequences"], theirs["sequences"])
    assert torch.equal(ours["token_timestamps"], theirs["token_timestamps"])
    assert theirs["token_timestamps"].max() > 0
    with torch.no_grad():
        after = model(features, decoder_input_ids=ids, output_attentions=True).cross_attentions
    assert all(isinstance(weights, regard.AttentionMap) for weights in after)
    enabled.disable()
    assert model.config._attn_implementation == "sdpa"
    with torch.no_grad():
        model.set_attn_implementation("eager")
        after = model(features, decoder_input_ids=ids, output_attentions=True).cross_attentions
    assert all(isinstance(weights, Tensor) for weights in after)


class Around(nn.Module):
    """A module around models of transformers, as a PeftModel is around one, with a `generate` of its own."""

    def __init__(self, *models: nn.Module) -> None:
        super().__init__()
        self.base_model = nn.ModuleList(models)

    def forward(self, **inputs: Any) -> Any:
        return self.base_model[0](**inputs)

    def generate(self, **inputs: Any) -> Any:
        return self.base_model[0].generate(**inputs)


def test_a_model_within_another_module_is_enabled() -> None:
    model, inputs = FAMILIES["llama"].build(), tokens("left")
    with torch.no_grad():
        expected = model(**inputs).logits
        with regard.huggingface.enable(Around(Around(model))) as enabled:
            found = Around(model)(**inputs, output_attentions=True)
            assert isinstance(found.attentions[0], regard.AttentionMap)
            assert Around(model).generate(**inputs, max_new_tokens=2, do_sample=False).shape[1] == LENGTH + 2
    assert repr(enabled) == f"Enabled({type(model).__name__})"
    assert model.config._attn_implementation != "regard"
    same(found, {"logits": expected}, inputs)
    others = FAMILIES["llama"].build(), FAMILIES["llama"].build()
    with pytest.raises(ArgumentError, match=r"got Around with 2 of them \(\w+, \w+\) inside: enable each of them"):
        regard.huggingface.enable(Around(*others))
    with pytest.raises(ArgumentError, match=r"a module around one, got Linear with none inside$"):
        regard.huggingface.enable(nn.Linear(2, 2))


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("kind", ["causal", "window"])
def test_a_cache_that_begins_at_a_later_key(kind: str, is_padded: bool, queries: int) -> None:
    """The keys 4 to 9 of ten are left, and the last queries ask."""
    function = masking.causal_mask_function if kind == "causal" else masking.sliding_window_causal_mask_function(3)
    padding = torch.ones(2, 10, dtype=torch.bool)
    padding[0, :2] = False
    padding[1, :6] = False
    options: dict[str, Any] = {
        "batch_size": 2, "kv_length": 6, "kv_offset": 4, "mask_function": function,
        "attention_mask": padding if is_padded else None, **places(10 - queries, queries),
    }  # fmt: skip
    theirs = masking.sdpa_mask(**options, allow_is_causal_skip=False)
    ours = lazy_mask(**options)
    assert torch.equal(ours & True, theirs.expand(ours.shape))


@pytest.mark.parametrize(("queries", "is_causal"), [(1, True), (1, False), (5, True), (5, False)])
def test_without_a_mask_the_layer_says_whether_it_is_causal_and_one_query_sees_every_key(
    queries: int, is_causal: bool
) -> None:
    query, key = torch.randn(1, 2, queries, 4), torch.randn(1, 2, 5, 4)
    layer = module(lambda m: None, lambda: {"is_causal": is_causal})()
    output, weights = forward(layer, query, key, key, None)
    expected = nn.functional.scaled_dot_product_attention(query, key, key, is_causal=is_causal and queries > 1)
    torch.testing.assert_close(output, expected.transpose(1, 2))
    assert (weights.dense()[0, 0, 0] > 0).sum() == (1 if is_causal and queries > 1 else 5)


def test_numbers_for_more_keys_than_there_are_are_cut() -> None:
    query, key, added = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 5, 4), torch.randn(1, 2, 3, 8)
    output, _ = forward(nn.Module(), query, key, key, None, is_causal=False, position_bias=added)
    expected = nn.functional.scaled_dot_product_attention(query, key, key, attn_mask=added[..., :5])
    torch.testing.assert_close(output, expected.transpose(1, 2))
