"""Faults of the kinds that users planted and the audit had missed: in the bench beside those of its writers."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

from tests.audit_bench import faults as f
from tests.audit_bench import models as m
from tests.audit_bench.faults import Made
from tests.modules import parts

OURS = len(f.FAULTS)

# Padding: the mask is compared with the tokens, and with the calls before.


def _handed(name: str, change: Callable[[Tensor], Tensor]) -> None:
    def make(is_faulty: bool) -> Made:
        given = m.batch(lengths=(10, 8, 5))
        given = {key: torch.nn.functional.pad(one, (0, 1)) for key, one in given.items()}
        return m.bert(), given | ({"attention_mask": change(given["attention_mask"])} if is_faulty else {})

    f.add(f.UPSIDE, name, make)


_handed("handed_over_upside_down", lambda mask: 1 - mask)
_handed("handed_over_shifted", lambda mask: mask.roll(1, -1))
_handed("handed_over_for_the_next_sequence", lambda mask: mask.roll(1, 0))
_handed("handed_over_with_one_zero_too_few", lambda mask: mask | (torch.arange(11) == 9))
f.own(
    f.AXIS, "queries_are_hidden_written_out", m.both_sides,
    lambda layer, q, k, v, keep: m.written(q, k, v, keep[:, None, :, None], low=-3e38), m.batch,
)  # fmt: skip


@parts(
    lambda *, is_faulty: {
        "is_faulty": is_faulty,
        "query": nn.Parameter(torch.randn(1, 1, m.DIM)),
        "pool": nn.MultiheadAttention(m.DIM, m.HEADS, batch_first=True),
    },
    seed=5,
)
def Pooled(self: Any, features: Tensor, lengths: Tensor) -> Tensor:
    hidden = None if self.is_faulty else torch.arange(features.shape[1]) >= lengths[:, None]
    return self.pool(self.query.expand(len(features), -1, -1), features, features, hidden)[0]


@f.fault(f.CROSS)
def pooled_without_its_lengths(is_faulty: bool) -> Made:
    features = torch.randn(3, 11, m.DIM, generator=torch.Generator().manual_seed(1))
    return Pooled(is_faulty=is_faulty).eval(), {"features": features, "lengths": torch.tensor([11, 8, 5])}


@parts(lambda *, is_faulty: {"layer": m.Layer(m.both_sides, 0), "is_faulty": is_faulty}, seed=5)
def Joint(self: Any, patches: Tensor, encoder_hidden_states: Tensor, encoder_hidden_states_mask: Tensor) -> Tensor:
    keep = torch.nn.functional.pad(encoder_hidden_states_mask, (0, patches.shape[1]), value=True)
    return self.layer(torch.cat([encoder_hidden_states, patches], 1), None if self.is_faulty else keep, None)


@f.fault(f.PADS)
def words_beside_patches(is_faulty: bool) -> Made:
    patches, words = torch.randn(3, 16, m.DIM, generator=torch.Generator().manual_seed(1)).split((5, 11), 1)
    mask = m.batch()["attention_mask"].bool()
    given = {"patches": patches, "encoder_hidden_states": words, "encoder_hidden_states_mask": mask}
    return Joint(is_faulty=is_faulty).eval(), given


@f.fault(f.CROSS)
def the_memory_of_an_encoder_that_ran_before(is_faulty: bool) -> Made:
    def run(model: Any, input_ids: Tensor, attention_mask: Tensor, decoder_input_ids: Tensor) -> Tensor:
        memory = model.get_encoder()(input_ids=input_ids, attention_mask=attention_mask)
        mask = {} if is_faulty else {"attention_mask": attention_mask}
        return model(encoder_outputs=memory, decoder_input_ids=decoder_input_ids, **mask).logits

    return m.Stepwise(m.t5(), run), m.pair()


@f.fault(f.CROSS)
def the_mask_is_repeated_in_another_order(is_faulty: bool) -> Made:
    def run(model: Any, input_ids: Tensor, attention_mask: Tensor, decoder_input_ids: Tensor) -> Tensor:
        memory = model.model.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.repeat(2, 1) if is_faulty else attention_mask.repeat_interleave(2, 0)
        given = {"encoder_hidden_states": memory.repeat_interleave(2, 0), "encoder_attention_mask": mask}
        return model.model.decoder(input_ids=decoder_input_ids.repeat(2, 1), **given).last_hidden_state

    return m.Stepwise(m.bart(), run), m.pair()


@f.fault(f.PADS)
def forgotten_in_the_next_step(is_faulty: bool) -> Made:
    def run(model: Any, input_ids: Tensor) -> Tensor:
        mask = (input_ids != 0).long()
        first = model(input_ids=input_ids[:, :10], attention_mask=mask[:, :10], use_cache=True)
        mask = torch.ones_like(mask) if is_faulty else mask
        cache = first.past_key_values
        return model(input_ids=input_ids[:, 10:], attention_mask=mask, past_key_values=cache).logits

    return m.Stepwise(m.llama(), run), {"input_ids": m.batch("left")["input_ids"]}


# Causality.

f.own(
    f.FUTURE, "one_layer_of_four_written_out", f.triangular,
    lambda layer, q, k, v, keep: m.written(q, k, v, None if layer.number == 2 else f.ALL),
)  # fmt: skip
f.own(
    f.FUTURE, "a_window_without_its_causal_half", m.masked(lambda q, k, keep: f.window(4)),
    m.masked(lambda q, k, keep: ~m.triangle(11, diagonal=-4)),
)  # fmt: skip
for low in (0.0, -1.0, -10.0):
    f.own(
        f.ADDED, f"later_scores_are_{low:g}", f.triangular,
        lambda layer, q, k, v, keep, low=low: m.written(q, k, v, f.ALL, low=low), m.plain, "mask added",
    )  # fmt: skip
f.own(
    f.ADDED, "minus_ten_written_out", f.triangular,
    lambda layer, q, k, v, keep: (q @ k.mT / 8**0.5 + torch.where(f.ALL, 0.0, -10.0)).softmax(-1) @ v,
    m.plain, "hidden by a finite number",
)  # fmt: skip
f.own(
    f.SOFTMAX, "averaged_over_queries", f.written,
    lambda layer, q, k, v, keep: (q @ k.mT / 8**0.5).softmax(-1).mean(-2, keepdim=True).expand(-1, -1, 11, -1) @ v,
    m.plain, "row sums",
)  # fmt: skip


@parts(
    lambda *, is_faulty: {
        "is_faulty": is_faulty,
        "tokens": nn.Embedding(m.VOCABULARY, m.DIM),
        "both": nn.Transformer(m.DIM, m.HEADS, 2, 2, 48, batch_first=True),
    },
    seed=5,
)
def Pair(self: Any, src: Tensor, tgt: Tensor) -> Tensor:
    later = nn.Transformer.generate_square_subsequent_mask
    mask = later(src.shape[1]) if self.is_faulty else None
    return self.both(self.tokens(src), self.tokens(tgt), src_mask=mask, tgt_mask=later(tgt.shape[1]))


@f.fault(f.BOTH)
def the_encoder_of_torchs_pair(is_faulty: bool) -> Made:
    return Pair(is_faulty=is_faulty).eval(), {"src": m.plain()["input_ids"], "tgt": m.plain(2, 7)["input_ids"]}


# Caches and positions.

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
            return model(input_ids=input_ids[:, 8:], past_key_values=past, use_cache=True).logits

        return m.Stepwise(model(), run), m.plain(3)

    f.add(CACHES, name, make, [reason])


_cached("one_layer_is_not_reordered", "cache", lambda layer: None)


def _shorter(layer: Any, q: Tensor, k: Tensor, v: Tensor, keep: Any) -> Tensor:
    cut = slice(1 if layer.number == 1 and q.shape[2] < k.shape[2] else 0, None)
    return m.causal(layer, q, k[:, :, cut], v[:, :, cut], keep)


f.own(CACHES, "one_layer_lost_its_oldest_key", m.causal, _shorter, m.plain, "earlier keys lost", cuts=(7, 4))


def _early(layer: Any, q: Tensor, k: Tensor, v: Tensor, keep: Any) -> Tensor:
    if q.shape[2] < k.shape[2]:
        k, v = (torch.nn.functional.pad(one[:, :, 1:], (0, 0, 0, 1)) for one in (k, v))
    return m.causal(layer, q, k, v, keep)


f.own(CACHES, "written_one_place_early", m.causal, _early, m.plain, "itself hidden", cuts=f.CHUNK)


@f.fault(f.PLACES)
def positions_that_are_handed_over_count_padding(is_faulty: bool) -> Made:
    given = m.batch("left")
    positions = (given["attention_mask"].cumsum(-1) - 1).clamp_min(0)
    return m.gpt2(), given | {"position_ids": torch.arange(11)[None].expand(3, 11) if is_faulty else positions}


@parts(lambda *, is_faulty: {"model": m.Text(m.causal), "is_faulty": is_faulty})
def Ends(self: Any, input_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
    place, model = torch.arange(input_ids.shape[1]), self.model
    of = torch.bucketize(place, cu_seqlens[1:], right=True)
    x = 3 * model.tokens(input_ids) + model.places(place if self.is_faulty else place - cu_seqlens[of])
    mask = m.triangle(len(place)) & (of[:, None] == of)
    for layer in model.layers:
        layer.attend = lambda layer, q, k, v, keep: sdpa(q, k, v, attn_mask=mask)
        x = layer(x, None, None)
    return model.head(x)


@f.fault(f.PACKED, "positions")
def positions_go_on_from_document_to_document(is_faulty: bool) -> Made:
    return Ends(is_faulty=is_faulty).eval(), m.plain(1) | {"cu_seqlens": torch.tensor([0, 6, 11])}


def _recurrent(name: str, settings: dict[str, Any]) -> None:
    """transformers 5.23 has the fault itself; its twin reads one document."""

    def make(is_faulty: bool) -> Made:
        model = m.huggingface(f"{name}ForCausalLM", m.TEXT | settings)
        places = f.RESTART if is_faulty else torch.arange(11)[None]
        return model, {**m.plain(1), "position_ids": places, "use_cache": False}

    f.add(f.PACKED, f"the_state_of_{name}", make)


_recurrent("Qwen3_5", {
    "num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 8, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
})  # fmt: skip
_recurrent("Lfm2", {"num_key_value_heads": 2, "layer_types": ["conv", "full_attention", "conv"]})


# Prefixes, pictures, chunks.


@f.fault(f.BLOCKS)
def a_prefix_that_is_one_token_too_long(is_faulty: bool) -> Made:
    def mask(prefix_len: Tensor) -> Tensor:
        return m.triangle(11) | (torch.arange(11) < prefix_len[:, None, None, None] + int(is_faulty))

    return m.Told(mask).eval(), m.plain() | {"prefix_len": torch.tensor([4, 6])}


@f.fault(f.BLOCKS, "image tokens")
def the_pictures_of_gemma4_in_one_layer(is_faulty: bool) -> Made:
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    text = m.GROUPED | {"sliding_window": 6, "layer_types": kinds, "use_bidirectional_attention": "vision"}
    text |= {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "vocab_size_per_layer_input": m.VOCABULARY}
    settings = {"text_config": text, "vision_config": None, "audio_config": None, "image_token_id": 59}
    model = m.huggingface("Gemma4ForConditionalGeneration", settings)
    if is_faulty:
        mask = (m.triangle(11) & ~m.triangle(11, diagonal=-6))[None, None].expand(2, 1, -1, -1)
        m.meddle(m.parts(model, "layers.0.self_attn"), lambda _: mask)
    types = ((torch.arange(11) > 2) & (torch.arange(11) < 7)).long()[None].expand(2, 11)
    return model, m.plain() | {"mm_token_type_ids": types}


@f.fault(f.WINDOW)
def the_chunks_of_llama4_in_one_layer(is_faulty: bool) -> Made:
    more = {"attention_chunk_size": 4, "layer_types": ["chunked_attention", "chunked_attention", "full_attention"]}
    more |= {"intermediate_size_mlp": 48, "num_local_experts": 2, "no_rope_layers": [1, 1, 0]}
    model = m.huggingface("Llama4ForCausalLM", m.GROUPED | more)
    if is_faulty:
        m.meddle(m.parts(model, "layers.1.self_attn"), lambda _: f.ALL.expand(2, 1, -1, -1))
    return model, m.plain()


OTHERS = [replace(one, is_of_others=True) for one in f.FAULTS[OURS:]]
del f.FAULTS[OURS:]
