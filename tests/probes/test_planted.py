"""Faults that models have had, planted again: each is found, and the same model without it has no fault."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

from regard.errors import ArgumentError
from regard.watching.checks import Checked, check
from regard.watching.checks.audited_call import UserTold
from regard.watching.checks.subject import Subject

pytest.importorskip("transformers")
import transformers

from tests.audit_bench import models
from tests.families.architectures import tiny
from tests.inspection.huggingface_families import FAMILIES, LLAMA
from tests.modules import module, parts, watching

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


def found(checked: Checked) -> set[str]:
    return {finding.reason for finding in checked.faults}


def places(checked: Checked, reason: str) -> set[str]:
    return {finding.path for finding in checked.faults if finding.reason == reason}


def sharp(model: nn.Module) -> Any:
    """The model in evaluation mode, with weights large enough for a fault to show."""
    torch.manual_seed(3)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.15)
    return model.eval()


@parts(lambda mix: {"embedding": nn.Embedding(50, 8), "mix": mix, "head": nn.Linear(8, 50)})
def Ahead(self: Any, input_ids: Tensor) -> Tensor:
    x = self.embedding(input_ids)
    if isinstance(self.mix, nn.Conv1d):
        return self.head(self.mix(x.mT).mT)
    return self.head(self.mix(x)[0] if isinstance(self.mix, nn.GRU) else self.mix(x, x, x, need_weights=False)[0])


@pytest.mark.parametrize(
    ("mix", "cause"),
    [
        (nn.Conv1d(8, 8, 3, padding=1), "its convolution reads later positions"),
        (nn.GRU(8, 4, bidirectional=True, batch_first=True), "its recurrence reads later positions"),
        (nn.MultiheadAttention(8, 2, batch_first=True), "its attention needs a causal mask on this path"),
    ],
)
def test_a_look_ahead_has_the_cause_of_its_module(mix: nn.Module, cause: str) -> None:
    checked = check(sharp(Ahead(mix)), {"input_ids": torch.randint(0, 50, (2, 12))}, causal=True)
    assert (cause, "mix") in {(one.cause, one.path) for one in checked.errors if one.reason == "future"}


def test_a_path_that_only_training_takes_forgets_the_causal_mask() -> None:
    """As keras#23038, where dropout leads past the fused kernel, to which the causal mask is left."""
    Model = module(
        lambda m, x: sdpa(x, x, x, is_causal=m.is_sound or not m.training), lambda sound: {"is_sound": sound}
    )
    x, model = torch.randn(2, 9, 8), Model(False)
    checked = check(model, x, causal=True)
    assert found(checked) == {"future"}
    assert "in training" in checked.faults[0].says
    assert model.training
    assert not check(Model(True), x, causal=True).faults


# The kernel attends where its mask is True, and masked_fill hides where it is.
@parts(
    lambda *, kernel, is_inverted: {
        "kernel": kernel,
        "qkv": nn.Linear(8, 24, bias=False),
        "out": nn.Linear(8, 8),
        "mask": torch.ones(16, 16, dtype=torch.bool).triu(1) ^ (kernel != is_inverted),
    }
)
def BookAttention(self: Any, x: Tensor) -> Tensor:
    query, key, value = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
    mask = self.mask[: x.shape[1], : x.shape[1]]
    if self.kernel:
        context = sdpa(query, key, value, attn_mask=mask)
    else:
        # A row without a key would be NaN: the book's own code has no such row, and neither has this.
        context = ((query @ key.mT).masked_fill(mask, -1e9) / 2).softmax(-1) @ value
    return self.out(context.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("kernel", [True, False])
def test_the_mask_of_a_book_is_upside_down(kernel: bool) -> None:
    """LLMs-from-scratch PR 1062: True hides a key in the book, and torch's kernel attends where its mask is True."""
    x = torch.randn(2, 9, 8)
    assert not check(BookAttention(kernel=kernel, is_inverted=False), x, causal=True).faults
    model = BookAttention(kernel=kernel, is_inverted=True)
    checked = check(model, x, causal=True)
    assert {"future", "inverted mask"} == found(checked), str(checked)
    # The audit is not told that the model should be causal.
    assert found(check(model, x)) == {"inverted mask"}
    seen = watching(model)(x)
    assert [finding.reason for finding in seen.audit() if finding.severity == "error"] == ["inverted mask"]


def test_a_chunk_that_is_causal_from_the_first_key(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    create = vars(modeling_llama)["create_causal_mask"]

    def by_flag(**given: Any) -> Any:
        is_kernels = given["attention_mask"] is None and given["config"]._attn_implementation != "eager"
        return None if is_kernels else create(**given)

    monkeypatch.setattr(modeling_llama, "create_causal_mask", by_flag)
    checked = check(FAMILIES["llama"].build())
    assert [finding.reason for finding in checked.faults] == ["cache"]
    assert "three positions" in checked.faults[0].says


def test_a_kernel_with_another_scale_than_eager() -> None:
    model = FAMILIES["llama"].build()
    attention = model.model.layers[1].self_attn
    forward = attention.forward

    def scaled(*args: Any, **kwargs: Any) -> Any:
        is_eager = attention.config._attn_implementation == "eager"
        attention.scaling = 8**-0.5 * (1.0 if is_eager else 1.1)
        return forward(*args, **kwargs)

    attention.forward = scaled
    assert found(check(model)) == {"kernel and eager"}


def test_results_in_one_buffer_are_compared_as_they_were() -> None:
    @parts(lambda beside=torch.zeros_like: {"beside": beside, "kept": {}})
    def Reuses(self: Any, x: Tensor) -> Tensor:
        found = sdpa(x, x, x, is_causal=True) + self.beside(x)
        return self.kept.setdefault((found.shape, found.dtype), torch.empty_like(found)).copy_(found)

    x = torch.randn(2, 9, 8)
    assert not check(Reuses(), x, causal=True)
    assert found(check(Reuses(lambda x: x.mean(1, keepdim=True)), x, causal=True)) == {"future"}
    assert "random, so no results were compared" in str(check(Reuses(torch.randn_like), x, causal=True))


class Moving(nn.Linear):
    """A linear module that divides by a mean of what it has read, which moves in training, or always."""

    def __init__(self, *, always: bool) -> None:
        super().__init__(8, 8)
        self.always, self.read = always, [1.0]

    def forward(self, x: Tensor, *_: Tensor, need_weights: bool = False) -> Any:
        scale = sum(self.read) / len(self.read)
        if self.always or self.training:
            self.read.append(1 + 9 * float(x.abs().mean()))
        return super().forward(x) / scale, None


@pytest.mark.parametrize("always", [True, False])
def test_a_state_that_is_kept_between_calls(always: bool) -> None:
    model = sharp(Ahead(Moving(always=always)))
    checked = check(model, {"input_ids": torch.randint(0, 50, (2, 12))}, causal=True)
    assert (found(checked), places(checked, "cache")) == (({"cache"}, {"mix"}) if always else (set(), set()))
    assert always or model.mix.read == [1.0]


def test_a_model_without_numbers_in_float64_is_judged_in_its_own_dtype() -> None:
    @parts(lambda: {"embedding": nn.Embedding(50, 8)})
    def Single(self: Any, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        return x.flip(1).cumsum(1).flip(1) * (torch.nan if x.dtype == torch.float64 else 1.0)

    assert found(check(sharp(Single()), {"input_ids": torch.randint(0, 50, (2, 12))}, causal=True)) == {"future"}


def test_results_that_are_not_numbers() -> None:
    hidden = torch.ones(9, 9, dtype=torch.bool).tril(-1).logical_not()
    Sees = module(lambda m, x: (x @ x.mT).masked_fill(hidden[: x.shape[1], : x.shape[1]], -torch.inf).softmax(-1) @ x)

    assert "not finite" in found(check(Sees(), torch.randn(2, 9, 8)))


class Translator(nn.Module):
    def __init__(self, *lost: str) -> None:
        super().__init__()
        self.lost = lost
        self.tokens, self.pair = nn.Embedding(20, 8, padding_idx=0), nn.Transformer(8, 2, 1, 1, 16, batch_first=True)

    def forward(self, src: Tensor, tgt: Tensor, **masks: Tensor) -> Tensor:
        later = torch.ones(tgt.shape[1], tgt.shape[1], dtype=torch.bool).triu(1)
        masks = {name: mask for name, mask in masks.items() if name not in self.lost}
        return self.pair(self.tokens(src), self.tokens(tgt), tgt_mask=later, tgt_is_causal=True, **masks)


def translated(source: int, target: int) -> dict[str, Tensor]:
    given: dict[str, Tensor] = {}
    for name, lengths in (("src", [source, source - 3]), ("tgt", [target, target - 1])):
        pads = torch.arange(max(lengths)) >= torch.tensor(lengths)[:, None]
        ids = torch.randint(1, 20, pads.shape, generator=torch.Generator().manual_seed(1))
        given |= {name: ids.masked_fill(pads, 0), f"{name}_key_padding_mask": pads}
    return {**given, "memory_key_padding_mask": given["src_key_padding_mask"]}


def test_a_decoder_of_torch_that_sees_the_padding_of_its_memory() -> None:
    for lost in ((), ("memory_key_padding_mask",)):
        seen = watching(sharp(Translator(*lost)))(**translated(9, 7))
        faults = [(one.reason, one.path) for one in seen.audit().errors]
        assert faults == [("padding", "pair.decoder.layers.0.multihead_attn")] * len(lost)


def test_two_sequences_of_one_length_have_masks_of_their_own() -> None:
    checked = check(sharp(Translator()), translated(8, 8), causal=True)
    assert not checked, str(checked)
    assert "the last positions replaced, padded right" in checked.tried
    assert not [one for one in checked.infos if one.reason == "not checked"]
    kept = Subject(Translator(), translated(8, 8), UserTold()).arguments.keeps
    assert [int(kept[name].sum()) for name in ("src", "tgt")] == [13, 15]


@pytest.mark.parametrize("name", ["seen", "mask"])
def test_a_mask_for_all_sequences_is_known_by_its_shape_and_by_no_name(name: str) -> None:
    allowed, ids = torch.ones(4, 4, dtype=torch.bool).tril(), torch.randint(3, 61, (2, 4))
    assert set(Subject(nn.Identity(), {"x": ids, name: allowed}, UserTold()).rows.long) == {"x"}
    with pytest.raises(ArgumentError, match=rf"{name}: \(4, 4\) may be a mask \(T, T\) for all sequences"):
        Subject(torch.nn.Identity(), {"x": ids.repeat(2, 1), name: allowed}, UserTold())
    padding = {"x": ids.repeat(2, 1), "attention_mask": allowed}
    assert set(Subject(torch.nn.Identity(), padding, UserTold()).tells) == {"attention_mask"}


@parts(
    lambda *, uses_sinks: {"uses_sinks": uses_sinks, "into": nn.Linear(8, 24), "sinks": nn.Parameter(torch.zeros(2))},
    seed=0,
)
def AfterSoftmax(self: Any, x: Tensor) -> Tensor:
    q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.into(x).chunk(3, -1))
    scores = q @ k.mT / 2
    scale = (scores.logsumexp(-1) - self.sinks[:, None]).sigmoid()[..., None] if self.uses_sinks else 1.0
    return ((scores.softmax(-1) @ v) * scale).transpose(1, 2).flatten(2)


def test_sinks_that_scale_the_output_afterwards_are_no_fault_and_unused_ones_are() -> None:
    x = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(1))
    model = AfterSoftmax(uses_sinks=True)
    checked = check(model, x)
    assert not checked, str(checked)
    assert "other sinks, module by module" in checked.tried
    assert bool((model.sinks == 0).all())
    checked = check(AfterSoftmax(uses_sinks=False), x)
    assert [(one.reason, one.severity, one.path) for one in checked.faults] == [("sink", "error", "")]


def test_rotary_positions_of_keys_alone_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    model = FAMILIES["llama"].build()
    checked = check(model)
    assert "all positions shifted" in checked.tried
    assert not checked
    turn = modeling_llama.apply_rotary_pos_emb
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda q, k, *more: (q, turn(q, k, *more)[1]))
    (finding,) = [one for one in check(model).errors if one.reason == "positions"]
    assert finding.numbers["difference"] > 1e-2
    assert "queries and keys that are not both turned" in finding.says


@parts(
    lambda *, has_table: {"tokens": nn.Embedding(20, 8), "places": nn.Embedding(20, 8) if has_table else None}, seed=0
)
def Placed(self: Any, input_ids: Tensor, position_ids: Tensor) -> Tensor:
    x = self.tokens(input_ids) + (0 if self.places is None else self.places(position_ids))
    return sdpa(x, x, x)


@pytest.mark.parametrize(("has_table", "kind"), [(True, "absolute"), (False, "relative, or not used")])
def test_a_shift_of_all_positions_tells_their_kind(has_table: bool, kind: str) -> None:
    given = {"input_ids": torch.randint(0, 20, (2, 7)), "position_ids": torch.arange(7).expand(2, 7).clone()}
    checked = check(Placed(has_table=has_table), given)
    assert not checked
    (info,) = [one for one in checked.infos if one.reason == "positions"]
    assert f"positions are {kind}: " in info.says


def test_a_rolled_cache_of_the_oldest_keys_is_told_from_positions_that_stand_still() -> None:
    from regard.watching.checks.rules.cached import OLDEST
    from tests.audit_bench.faults import a_rolled_cache_keeps_its_oldest_keys as rolled

    model, given = rolled(True)
    seen = watching(model)(**given)
    faults = [one for one in seen.audit().errors if one.reason == "positions"]
    assert {one.cause for one in faults} == {OLDEST}
    assert "follows the oldest 4 keys" in faults[0].says


def test_a_pair_that_is_said_to_be_causal_has_an_encoder_that_sees_both_sides() -> None:
    seen = watching(models.bart())(**models.pair())
    found = seen.audit(causal=True)
    assert not found, str(found)
    (both,) = [one for one in found.questions if one.name == "both sides"]
    assert {path.split(".")[1] for path in both.asked} == {"encoder"}


def test_a_model_of_ones_own_that_generates_is_causal() -> None:
    class Config(transformers.LlamaConfig):
        model_type = "of_ones_own"

    class Own(transformers.LlamaForCausalLM):
        config_class = Config

    checked = check(sharp(Own(Config(**LLAMA))))
    assert not checked, str(checked)
    assert "the last positions replaced" in checked.tried
    assert len(next(one for one in checked.questions if one.name == "future").asked) == 2


def test_the_text_of_a_model_that_writes_about_images_is_causal() -> None:
    from tests.audit_bench import models

    model = tiny("qwen2_vl")
    for is_faulty in (False, True):
        if is_faulty:
            models.meddle(models.parts(model, "self_attn"), lambda mask: torch.ones(1, 1, 9, 9, dtype=torch.bool))
        seen = watching(model)(input_ids=torch.randint(5, 60, (2, 9), generator=torch.Generator().manual_seed(1)))
        (future,) = [one for one in seen.audit().questions if one.name == "future"]
        assert len(future.asked) == 2
        assert {one.reason for one in seen.audit().errors} == ({"future"} if is_faulty else set())


@parts(lambda: {"experts": nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)) for _ in range(2))}, seed=0)
def Experts(self: Any, x: Tensor) -> Tensor:
    x = x + sdpa(x, x, x, is_causal=True)
    flat, chosen = x.flatten(0, 1), x.flatten(0, 1)[:, 0] > 0
    for expert, choice in zip(self.experts, (chosen, ~chosen), strict=True):
        flat = flat.index_add(0, choice.nonzero()[:, 0], expert(x.flatten(0, 1)[choice]))
    return flat.view_as(x)


def test_experts_that_drop_in_training_read_nothing_later() -> None:
    model = Experts().eval()
    checked = check(model, torch.randn(2, 9, 8, generator=torch.Generator().manual_seed(3)), causal=True)
    assert "the last positions replaced, in training" in checked.tried
    assert not checked, str(checked)
    assert [one[1].p for one in model.experts] == [0.5, 0.5]


class Chooses(nn.Module):
    """Attention to 8 keys of equal scores, as relu makes them; its noise has the length of the batch."""

    noise = 0.0

    def forward(self, x: Tensor, attention_mask: Tensor) -> Any:
        scores = (x @ x.mT * 0).masked_fill(attention_mask[:, None] == 0, -torch.inf)
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, scores.topk(8).indices, True)
        x = sdpa(x, x, x, attn_mask=chosen) + self.noise * torch.randn_like(x)
        return x if not self.noise else x[:, :, None].expand(-1, -1, 2 + int(torch.rand(()) * 99), -1)


def test_ties_of_a_choice_and_noise_are_no_leaks() -> None:
    x = torch.randn(2, 24, 4, generator=torch.Generator().manual_seed(0))
    batch = {"x": x, "attention_mask": torch.arange(24) < torch.tensor([[24], [15]])}
    assert not check(Chooses(), batch, causal=False)
    noisy = Chooses()
    noisy.noise = 1.0
    assert "random, so no results were compared" in str(check(noisy, batch, causal=False))


@pytest.mark.parametrize(("name", "missing"), [("qwen2_5_vl_vision", "vocab_size"), ("wav2vec2-bert", "num_mel_bins")])
def test_a_model_whose_inputs_cannot_be_made_up_asks_for_a_batch(name: str, missing: str) -> None:
    with pytest.raises(ArgumentError, match=f"says no {missing}: give a batch"):
        check(tiny(name))


def test_a_mask_beside_the_states_of_mamba_is_of_the_new_positions() -> None:
    given = {"input_ids": torch.randint(3, 61, (2, 9)), "attention_mask": torch.ones(2, 9, dtype=torch.long)}
    assert "a cache, three positions at a time" in check(sharp(tiny("mamba")), given).tried


def test_a_pooled_result_that_reads_padding_is_a_warning() -> None:
    """Whole models of transformers pool so by design (SigLIP), and others by mistake."""
    model = sharp(tiny("bert"))
    assert not check(model)
    model.pooler.forward = lambda states: states.mean(1)
    assert [(one.path, one.reason, one.severity) for one in check(model)[:1]] == [("pooler", "padding", "warning")]
