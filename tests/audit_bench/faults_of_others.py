"""Faults of the kinds that users planted and the audit had missed: in the bench beside those of its writers."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

from tests.audit_bench import faults as f
from tests.audit_bench import models as m
from tests.audit_bench.faults import Fault, Made

OTHERS: list[Fault] = []


def other(kind: str, *reasons: str) -> Callable[[Callable[[bool], Made]], None]:
    def add(make: Callable[[bool], Made]) -> None:
        OTHERS.append(Fault(kind, make.__name__, frozenset(reasons), make, is_of_others=True))

    return add


def own(kind: str, reasons: str, name: str, good: Any, bad: Any, given: Any = m.plain, **options: Any) -> None:
    f.own(kind, reasons, name, good, bad, given, **options)
    OTHERS.append(replace(f.FAULTS.pop(), is_of_others=True))


# -- padding: the mask is compared with the tokens, and with the calls before ----------------------------------------


def _handed(name: str, change: Callable[[Tensor], Tensor]) -> None:
    def make(is_faulty: bool) -> Made:
        given = m.batch(lengths=(10, 8, 5))
        given = {key: torch.nn.functional.pad(one, (0, 1)) for key, one in given.items()}
        return m.bert(), given | ({"attention_mask": change(given["attention_mask"])} if is_faulty else {})

    OTHERS.append(Fault(f.UPSIDE, name, frozenset({"padding"}), make, is_of_others=True))


_handed("handed_over_upside_down", lambda mask: 1 - mask)
_handed("handed_over_shifted", lambda mask: mask.roll(1, -1))
_handed("handed_over_for_the_next_sequence", lambda mask: mask.roll(1, 0))
_handed("handed_over_with_one_zero_too_few", lambda mask: mask | (torch.arange(11) == 9))
own(f.AXIS, "padding", "queries_are_hidden_written_out", m.both_sides,
    lambda layer, q, k, v, keep: m.written(q, k, v, keep[:, None, :, None], low=-3e38), m.batch)  # fmt: skip


class Pooled(nn.Module):
    """Pools features (B, T, D) of some lengths by one learned query."""

    def __init__(self, *, is_faulty: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.query, self.is_faulty = nn.Parameter(torch.randn(1, 1, m.DIM)), is_faulty
        self.pool = nn.MultiheadAttention(m.DIM, m.HEADS, batch_first=True)

    def forward(self, features: Tensor, lengths: Tensor) -> Tensor:
        hidden = None if self.is_faulty else torch.arange(features.shape[1]) >= lengths[:, None]
        found: Tensor = self.pool(self.query.expand(len(features), -1, -1), features, features, hidden)[0]
        return found


@other(f.CROSS, "padding")
def pooled_without_its_lengths(is_faulty: bool) -> Made:
    features = torch.randn(3, 11, m.DIM, generator=torch.Generator().manual_seed(1))
    return Pooled(is_faulty=is_faulty).eval(), {"features": features, "lengths": torch.tensor([11, 8, 5])}


class Joint(nn.Module):
    """One attention over words and the patches behind them, as of diffusion models."""

    def __init__(self, *, is_faulty: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layer, self.is_faulty = m.Layer(m.both_sides, 0), is_faulty

    def forward(self, patches: Tensor, encoder_hidden_states: Tensor, encoder_hidden_states_mask: Tensor) -> Tensor:
        keep = torch.nn.functional.pad(encoder_hidden_states_mask, (0, patches.shape[1]), value=True)
        found: Tensor = self.layer(
            torch.cat([encoder_hidden_states, patches], 1), None if self.is_faulty else keep, None
        )
        return found


@other(f.PADS, "padding")
def words_beside_patches(is_faulty: bool) -> Made:
    patches, words = torch.randn(3, 16, m.DIM, generator=torch.Generator().manual_seed(1)).split((5, 11), 1)
    mask = m.batch()["attention_mask"].bool()
    given = {"patches": patches, "encoder_hidden_states": words, "encoder_hidden_states_mask": mask}
    return Joint(is_faulty=is_faulty).eval(), given


@other(f.CROSS, "padding")
def the_memory_of_an_encoder_that_ran_before(is_faulty: bool) -> Made:
    def run(model: Any, input_ids: Tensor, attention_mask: Tensor, decoder_input_ids: Tensor) -> Tensor:
        memory = model.get_encoder()(input_ids=input_ids, attention_mask=attention_mask)
        mask = {} if is_faulty else {"attention_mask": attention_mask}
        found: Tensor = model(encoder_outputs=memory, decoder_input_ids=decoder_input_ids, **mask).logits
        return found

    return m.Stepwise(m.t5(), run), m.pair()


@other(f.CROSS, "padding")
def the_mask_is_repeated_in_another_order(is_faulty: bool) -> Made:
    def run(model: Any, input_ids: Tensor, attention_mask: Tensor, decoder_input_ids: Tensor) -> Tensor:
        memory = model.model.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.repeat(2, 1) if is_faulty else attention_mask.repeat_interleave(2, 0)
        given = {"encoder_hidden_states": memory.repeat_interleave(2, 0), "encoder_attention_mask": mask}
        found: Tensor = model.model.decoder(input_ids=decoder_input_ids.repeat(2, 1), **given).last_hidden_state
        return found

    return m.Stepwise(m.bart(), run), m.pair()


@other(f.PADS, "padding")
def forgotten_in_the_next_step(is_faulty: bool) -> Made:
    def run(model: Any, input_ids: Tensor) -> Tensor:
        mask = (input_ids != 0).long()
        first = model(input_ids=input_ids[:, :10], attention_mask=mask[:, :10], use_cache=True)
        mask = torch.ones_like(mask) if is_faulty else mask
        cache = first.past_key_values
        found: Tensor = model(input_ids=input_ids[:, 10:], attention_mask=mask, past_key_values=cache).logits
        return found

    return m.Stepwise(m.llama(), run), {"input_ids": m.batch("left")["input_ids"]}


# -- causality -------------------------------------------------------------------------------------------------------

own(f.FUTURE, "future", "one_layer_of_four_written_out", lambda layer, q, k, v, keep: m.written(q, k, v, f.ALL),
    lambda layer, q, k, v, keep: m.written(q, k, v, None if layer.number == 2 else f.ALL))  # fmt: skip
own(f.FUTURE, "future", "a_window_without_its_causal_half",
    lambda layer, q, k, v, keep: sdpa(q, k, v, attn_mask=f.ALL & ~m.triangle(11, diagonal=-4)),
    lambda layer, q, k, v, keep: sdpa(q, k, v, attn_mask=~m.triangle(11, diagonal=-4)))  # fmt: skip
for low in (0.0, -1.0, -10.0):
    own(f.ADDED, "mask added", f"later_scores_are_{low:g}", lambda layer, q, k, v, keep: m.written(q, k, v, f.ALL),
        lambda layer, q, k, v, keep, low=low: m.written(q, k, v, f.ALL, low=low))  # fmt: skip
own(f.ADDED, "hidden by a finite number", "minus_ten_written_out",
    lambda layer, q, k, v, keep: m.written(q, k, v, f.ALL),
    lambda layer, q, k, v, keep: (q @ k.mT / 8**0.5 + torch.where(f.ALL, 0.0, -10.0)).softmax(-1) @ v)  # fmt: skip
own(f.SOFTMAX, "row sums", "averaged_over_queries", lambda layer, q, k, v, keep: m.written(q, k, v),
    lambda layer, q, k, v, keep: (q @ k.mT / 8**0.5).softmax(-1).mean(-2, keepdim=True).expand(-1, -1, 11, -1) @ v,
    )  # fmt: skip


class Pair(nn.Module):
    """torch's encoder with its decoder."""

    def __init__(self, *, is_faulty: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.tokens, self.is_faulty = nn.Embedding(m.VOCABULARY, m.DIM), is_faulty
        self.both = nn.Transformer(m.DIM, m.HEADS, 2, 2, 48, batch_first=True)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        later = nn.Transformer.generate_square_subsequent_mask
        mask = later(src.shape[1]) if self.is_faulty else None
        found: Tensor = self.both(self.tokens(src), self.tokens(tgt), src_mask=mask, tgt_mask=later(tgt.shape[1]))
        return found


@other(f.BOTH, "causal encoder")
def the_encoder_of_torchs_pair(is_faulty: bool) -> Made:
    return Pair(is_faulty=is_faulty).eval(), {"src": m.plain()["input_ids"], "tgt": m.plain(2, 7)["input_ids"]}


# -- caches and positions --------------------------------------------------------------------------------------------

CACHES = "caches of layers"


def _cached(name: str, reason: str, change: Callable[[Any], None], model: Any = m.qwen) -> None:
    def make(is_faulty: bool) -> Made:
        def run(model: Any, input_ids: Tensor) -> Tensor:
            past = model(input_ids=input_ids[:, :8], use_cache=True).past_key_values
            order = torch.tensor([0, 0, 1])
            for n, one in enumerate(past.layers):
                if not is_faulty or n != 1:
                    one.keys, one.values = one.keys[order], one.values[order]
                else:
                    change(one)
            found: Tensor = model(input_ids=input_ids[:, 8:], past_key_values=past, use_cache=True).logits
            return found

        return m.Stepwise(model(), run), m.plain(3)

    OTHERS.append(Fault(CACHES, name, frozenset({reason}), make, is_of_others=True))


_cached("one_layer_is_not_reordered", "cache", lambda layer: None)


def _shorter(layer: Any, q: Tensor, k: Tensor, v: Tensor, keep: Any) -> Tensor:
    cut = slice(1 if layer.number == 1 and q.shape[2] < k.shape[2] else 0, None)
    return m.causal(layer, q, k[:, :, cut], v[:, :, cut], keep)


own(CACHES, "earlier keys lost", "one_layer_lost_its_oldest_key", m.causal, _shorter, cuts=(7, 4))


def _early(layer: Any, q: Tensor, k: Tensor, v: Tensor, keep: Any) -> Tensor:
    if q.shape[2] < k.shape[2]:
        k, v = (torch.nn.functional.pad(one[:, :, 1:], (0, 0, 0, 1)) for one in (k, v))
    return m.causal(layer, q, k, v, keep)


own(CACHES, "itself hidden", "written_one_place_early", m.causal, _early, cuts=(6, 4, 1))


@other(f.PLACES, "positions")
def positions_that_are_handed_over_count_padding(is_faulty: bool) -> Made:
    given = m.batch("left")
    positions = (given["attention_mask"].cumsum(-1) - 1).clamp_min(0)
    return m.gpt2(), given | {"position_ids": torch.arange(11)[None].expand(3, 11) if is_faulty else positions}


class Ends(nn.Module):
    """A model of text that takes the ends of documents."""

    def __init__(self, *, is_faulty: bool) -> None:
        super().__init__()
        self.model, self.is_faulty = m.Text(m.causal), is_faulty

    def forward(self, input_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
        place, model = torch.arange(input_ids.shape[1]), self.model
        of = torch.bucketize(place, cu_seqlens[1:], right=True)
        x = 3 * model.tokens(input_ids) + model.places(place if self.is_faulty else place - cu_seqlens[of])
        mask = m.triangle(len(place)) & (of[:, None] == of)
        for layer in model.layers:
            layer.attend = lambda layer, q, k, v, keep: sdpa(q, k, v, attn_mask=mask)  # type: ignore[assignment]
            x = layer(x, None, None)
        found: Tensor = model.head(x)
        return found


@other(f.PACKED, "positions")
def positions_go_on_from_document_to_document(is_faulty: bool) -> Made:
    return Ends(is_faulty=is_faulty).eval(), m.plain(1) | {"cu_seqlens": torch.tensor([0, 6, 11])}


def _recurrent(name: str, settings: dict[str, Any]) -> None:
    """transformers 5.23 has the fault itself; its twin reads one document."""

    def make(is_faulty: bool) -> Made:
        model = m.huggingface(f"{name}ForCausalLM", f"{name}{'Text' * (name == 'Qwen3_5')}Config", m.TEXT | settings)
        places = f.RESTART if is_faulty else torch.arange(11)[None]
        return model, {**m.plain(1), "position_ids": places, "use_cache": False}

    OTHERS.append(Fault(f.PACKED, f"the_state_of_{name}", frozenset({"documents"}), make, is_of_others=True))


_recurrent("Qwen3_5", {
    "num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 8, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
})  # fmt: skip
_recurrent("Lfm2", {"num_key_value_heads": 2, "layer_types": ["conv", "full_attention", "conv"]})


# -- prefixes, pictures, chunks --------------------------------------------------------------------------------------


class OfLength(nn.Module):
    """A model that sees a prefix of a told length both ways."""

    def __init__(self, *, is_faulty: bool) -> None:
        super().__init__()
        self.model, self.more = m.Text(m.causal), int(is_faulty)

    def forward(self, input_ids: Tensor, prefix_len: Tensor) -> Tensor:
        mask = m.triangle(11) | (torch.arange(11) < prefix_len[:, None, None, None] + self.more)
        for layer in self.model.layers:
            layer.attend = lambda layer, q, k, v, keep: sdpa(q, k, v, attn_mask=mask)  # type: ignore[assignment]
        found: Tensor = self.model(input_ids)
        return found


@other(f.BLOCKS, "prefix")
def a_prefix_that_is_one_token_too_long(is_faulty: bool) -> Made:
    return OfLength(is_faulty=is_faulty).eval(), m.plain() | {"prefix_len": torch.tensor([4, 6])}


@other(f.BLOCKS, "image tokens")
def the_pictures_of_gemma4_in_one_layer(is_faulty: bool) -> Made:
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    text = m.GROUPED | {"sliding_window": 6, "layer_types": kinds, "use_bidirectional_attention": "vision"}
    text |= {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "vocab_size_per_layer_input": m.VOCABULARY}
    settings = {"text_config": text, "vision_config": None, "audio_config": None, "image_token_id": 59}
    model = m.huggingface("Gemma4ForConditionalGeneration", "Gemma4Config", settings)
    if is_faulty:
        mask = (m.triangle(11) & ~m.triangle(11, diagonal=-6))[None, None].expand(2, 1, -1, -1)
        m.meddle(m.parts(model, "layers.0.self_attn"), lambda _: mask)
    types = ((torch.arange(11) > 2) & (torch.arange(11) < 7)).long()[None].expand(2, 11)
    return model, m.plain() | {"mm_token_type_ids": types}


@other(f.WINDOW, "window")
def the_chunks_of_llama4_in_one_layer(is_faulty: bool) -> Made:
    more = {"attention_chunk_size": 4, "layer_types": ["chunked_attention", "chunked_attention", "full_attention"]}
    more |= {"intermediate_size_mlp": 48, "num_local_experts": 2, "no_rope_layers": [1, 1, 0]}
    model = m.huggingface("Llama4ForCausalLM", "Llama4TextConfig", m.GROUPED | more)
    if is_faulty:
        m.meddle(m.parts(model, "layers.1.self_attn"), lambda _: f.ALL.expand(2, 1, -1, -1))
    return model, m.plain()
