"""Planted faults: each is a function from True or False to a model, with or without the fault, and its arguments."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

from tests.audit_bench import models as m
from tests.modules import parts

Made = tuple[nn.Module, dict[str, Any]]
Given = Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class Fault:
    """A fault, the reasons that name it, and the model with it or without."""

    kind: str
    name: str
    reasons: frozenset[str]
    make: Callable[[bool], Made]
    is_of_others: bool = False
    """True for a kind that a user of the audit planted, and that it had missed."""


PADS, CROSS = "padding attended", "padding attended across"
UPSIDE, AXIS = "padding mask upside down", "padding mask along the wrong axis"
FUTURE, OFF, TURNED = "causal mask lost", "causal mask off by one", "causal mask transposed or inverted"
CORNER, LATE = "wrong corner with a cache", "causal mask lost with a cache"
PLACES, BOTH = "positions with a cache", "encoder became causal"
PACKED, BLOCKS, WINDOW = "packed documents", "images and prefixes", "windows"
SOFTMAX, ADDED = "softmax over the wrong axis", "a mask as a number"
DROPOUT, BIAS = "dropout in evaluation", "bias and sinks"
REASONS = {
    **dict.fromkeys((PADS, CROSS, UPSIDE, AXIS), "padding"),
    **dict.fromkeys((FUTURE, OFF, LATE), "future"),
    TURNED: "inverted mask",
    CORNER: "causal from the first key",
    PLACES: "positions",
    BOTH: "causal encoder",
    PACKED: "documents",
    BLOCKS: "prefix",
    WINDOW: "window",
    SOFTMAX: SOFTMAX,
    DROPOUT: DROPOUT,
}
"""The reason of most faults of a kind."""
FAULTS: list[Fault] = []


def add(kind: str, name: str, make: Callable[[bool], Made], reasons: Iterable[str] = ()) -> None:
    FAULTS.append(Fault(kind, name, frozenset(reasons or [REASONS[kind]]), make))


def fault(kind: str, *reasons: str) -> Callable[[Callable[[bool], Made]], Callable[[bool], Made]]:
    """The same for a function of the fault's name."""
    return lambda make: add(kind, make.__name__, make, reasons) or make


def own(kind: str, name: str, good: Any, bad: Any, given: Given = m.plain, *reasons: str, **options: Any) -> None:
    model = m.twin(good, bad, **options)
    add(kind, name, lambda is_faulty: (model(is_faulty), given()), reasons)


def foreign(
    kind: str, name: str, build: Callable[[], Any], end: str, change: Any = None, given: Given = m.plain,
    *reasons: str, under: str = "", argument: str = "attention_mask", is_causal: bool | None = None,
    cuts: Iterable[int] = (),
) -> None:  # fmt: skip
    """A fault of a model of transformers, in the modules of such paths: an argument of theirs, or a flag."""

    def make(is_faulty: bool) -> Made:
        model = build()
        modules = m.parts(model, end, under) if is_faulty else []
        if change is not None:
            m.meddle(modules, change, argument)
        for one in modules if is_causal is not None else []:
            one.is_causal = is_causal  # type: ignore[assignment]
        return m.stepped(model, cuts) if cuts else model, given()

    add(kind, name, make, reasons)


def left() -> dict[str, Any]:
    return m.batch("left")


# Padding.


@fault(PADS)
def a_mask_of_ones_on_the_left(is_faulty: bool) -> Made:
    given = left()
    return m.qwen(), given | ({"attention_mask": torch.ones_like(given["input_ids"])} if is_faulty else {})


@fault(PADS)
def no_mask_for_an_encoder(is_faulty: bool) -> Made:
    given = m.batch()
    return m.bert(), {"input_ids": given["input_ids"]} if is_faulty else given


def first(layer: Any, q: Tensor, k: Tensor, v: Tensor, keep: Any) -> Tensor:
    return sdpa(q, k, v, is_causal=True)


def nothing(mask: Any) -> None:
    """In place of a mask."""


foreign(PADS, "the_mask_is_lost_in_one_layer", m.bert, "layer.1.attention.self", nothing, m.batch)
foreign(
    PADS, "the_mask_is_lost_in_the_encoder_of_a_pair", m.t5, "SelfAttention", nothing, m.pair,
    under="encoder", argument="mask|attention_mask",
)  # fmt: skip


@parts(
    lambda *, with_mask=True, is_turned=False, batch_first=True: {
        "with_mask": with_mask,
        "is_turned": is_turned,
        "encoder": nn.TransformerEncoder(
            nn.TransformerEncoderLayer(m.DIM, m.HEADS, 48, batch_first=batch_first), 2, enable_nested_tensor=False
        ),
        "tokens": nn.Embedding(m.VOCABULARY, m.DIM),
    },
    seed=5,
)
def Tagger(self: Any, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    hidden = attention_mask == 0
    if self.is_turned:
        hidden = ~hidden & ~(~hidden).all(1, keepdim=True)
    return self.encoder(self.tokens(input_ids), src_key_padding_mask=hidden if self.with_mask else None)


@fault(PADS)
def torchs_encoder_without_its_mask(is_faulty: bool) -> Made:
    return Tagger(with_mask=not is_faulty).eval(), m.batch()


own(PADS, "an_encoder_of_ones_own", m.both_sides, m.masked(lambda q, k, keep: None), m.batch)
own(PADS, "a_decoder_padded_on_the_left", m.causal, first, left)
foreign(CROSS, "cross_attention_of_a_pair", m.bart, "encoder_attn", nothing, m.pair)
foreign(CROSS, "cross_attention_in_one_layer", m.bart, "layers.1.encoder_attn", nothing, m.pair)


@parts(
    lambda *, memory_mask=True, target_mask=True: {
        "memory_mask": memory_mask,
        "target_mask": target_mask,
        "tokens": nn.Embedding(m.VOCABULARY, m.DIM),
        "decoder": nn.TransformerDecoder(nn.TransformerDecoderLayer(m.DIM, m.HEADS, 48, batch_first=True), 2),
    },
    seed=5,
)
def Translator(self: Any, src: Tensor, tgt: Tensor, attention_mask: Tensor) -> Tensor:
    later = ~m.triangle(tgt.shape[1]) if self.target_mask else None
    hidden = attention_mask == 0 if self.memory_mask else None
    return self.decoder(self.tokens(tgt), self.tokens(src), tgt_mask=later, memory_key_padding_mask=hidden)


def translated() -> dict[str, Any]:
    given = m.pair()
    return {"src": given["input_ids"], "tgt": given["decoder_input_ids"], "attention_mask": given["attention_mask"]}


@fault(CROSS)
def torchs_decoder_without_the_memorys_mask(is_faulty: bool) -> Made:
    return Translator(memory_mask=not is_faulty).eval(), translated()


@fault(UPSIDE)
def torchs_flag_means_the_opposite(is_faulty: bool) -> Made:
    return Tagger(is_turned=is_faulty).eval(), m.batch()


foreign(
    UPSIDE, "the_mask_is_turned_on_its_way", m.bert, "attention.self",
    lambda mask: mask if mask is None else ~mask, m.batch,
)  # fmt: skip
own(
    UPSIDE, "words_are_hidden", m.both_sides,
    lambda layer, q, k, v, keep: m.written(q, k, v, ~keep[:, None, None], low=-1e9), m.batch,
)  # fmt: skip


def encoded(name: str, mask: Callable[[Tensor], Tensor], given: Given = m.batch) -> None:
    own(AXIS, name, m.both_sides, m.masked(lambda q, k, keep: mask(keep)), given)


encoded(
    "as_many_sequences_as_queries", lambda keep: keep,
    lambda: m.batch(lengths=(11, 8, 5, 9, 11, 6, 7, 11, 4, 3, 10)),
)  # fmt: skip
encoded("queries_are_hidden", lambda keep: keep[:, None, :, None].expand(-1, 1, -1, m.LENGTH))
encoded("the_mask_of_the_first_sequence", lambda keep: keep[:1, None, None])
encoded("the_mask_of_the_next_sequence", lambda keep: keep.roll(1, 0)[:, None, None])
encoded("the_mask_is_on_the_other_side", lambda keep: keep.flip(-1)[:, None, None])
encoded(
    "one_word_too_few",
    lambda keep: (keep & keep.roll(-1, -1).index_fill(1, torch.tensor([10]), True))[:, None, None],
)

# Causality.

foreign(FUTURE, "lost_in_one_layer", m.llama, "layers.2.self_attn", is_causal=False)
foreign(FUTURE, "lost_in_all_layers", m.gpt2, "attn", is_causal=False)
foreign(FUTURE, "the_padding_mask_replaces_it", m.qwen, "self_attn", lambda mask: mask[:, :, -1:], m.batch)
foreign(
    FUTURE, "lost_in_the_decoder_of_a_pair", m.bart, "self_attn", nothing, m.pair,
    under="model.decoder", is_causal=False,
)  # fmt: skip


@fault(FUTURE)
def torchs_decoder_without_its_triangle(is_faulty: bool) -> Made:
    return Translator(target_mask=not is_faulty).eval(), translated()


own(
    FUTURE, "one_layer_of_four", m.causal,
    lambda layer, q, k, v, keep: sdpa(q, k, v, is_causal=layer.number != 2),
)  # fmt: skip

STRICT = m.triangle(m.LENGTH, diagonal=-1)
STRICT[0, 0] = True
own(OFF, "sees_the_next", m.causal, m.masked(lambda q, k, keep: m.triangle(q.shape[2], diagonal=1)))
own(
    OFF, "sees_the_next_written_out_with_padding", m.causal,
    m.masked(lambda q, k, keep: m.triangle(q.shape[2], diagonal=1) & keep[:, None, None]), m.batch,
)  # fmt: skip
own(OFF, "does_not_see_itself", m.causal, m.masked(lambda q, k, keep: STRICT), m.plain, "itself hidden")
foreign(OFF, "a_triangle_too_narrow", m.llama, "self_attn", lambda mask: STRICT[None, None], m.plain, "itself hidden")
own(TURNED, "true_was_taken_for_hidden", m.causal, m.masked(lambda q, k, keep: ~m.triangle(q.shape[2])))
foreign(TURNED, "transposed", m.qwen, "self_attn", lambda mask: mask.mT, m.batch, "inverted mask", "future")

# Caches.

CHUNK, STEPS = (6, 4, 1), (6, 1, 1, 1, 1, 1)
foreign(CORNER, "the_kernel_gets_the_oldest_keys", m.qwen, "self_attn", nothing, cuts=CHUNK)
own(CORNER, "a_chunk", m.causal, first, cuts=CHUNK)
own(CORNER, "a_single_query", m.causal, first, cuts=STEPS)
own(
    CORNER, "written_out", m.causal,
    m.masked(lambda q, k, keep: torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()),
    m.plain, "causal from the first key", "earlier keys lost", "itself hidden", cuts=CHUNK,
)  # fmt: skip


def cut(keys: slice) -> Any:
    def attend(layer: Any, q: Tensor, k: Tensor, v: Tensor, keep: Any) -> Tensor:
        return m.causal(layer, q, k, v, keep) if q.shape[2] > 1 else sdpa(q, k[:, :, keys], v[:, :, keys])

    return attend


own(
    CORNER, "a_cut_cache_without_the_newest_key", cut(slice(-7, None)), cut(slice(7)), m.plain, "itself hidden",
    cuts=STEPS,
)  # fmt: skip


@fault(CORNER, "positions")
def a_rolled_cache_keeps_its_oldest_keys(is_faulty: bool) -> Made:
    def run(model: Any, input_ids: Tensor) -> Tensor:
        from transformers.cache_utils import DynamicSlidingWindowLayer as Rolled

        update = Rolled.update

        def oldest(self: Any, *given: Any, **more: Any) -> Any:
            every = update(self, *given, **more)
            self.keys, self.values = (one[..., : self.sliding_window - 1, :] for one in every)
            return every

        Rolled.update = oldest if is_faulty else update
        try:
            return m.in_steps(model, input_ids, STEPS)
        finally:
            Rolled.update = update

    return m.Stepwise(m.phi3(), run), m.plain()


foreign(
    LATE, "a_chunk_sees_its_end", m.llama, "self_attn",
    lambda mask: mask if mask is None else torch.ones_like(mask), cuts=CHUNK,
)  # fmt: skip
own(
    LATE, "a_chunk_of_ones_own", m.causal,
    lambda layer, q, k, v, keep: sdpa(q, k, v, is_causal=q.shape[2] == k.shape[2]), cuts=CHUNK,
)  # fmt: skip
own(LATE, "at_prefill_alone", m.causal, m.masked(lambda q, k, keep: None), cuts=STEPS)
own(
    LATE, "the_mask_has_the_length_of_the_prompt", m.causal,
    m.masked(lambda q, k, keep: (torch.arange(k.shape[2]) < 6) & m.triangle(q.shape[2], k.shape[2])),
    m.plain, "earlier keys lost", "itself hidden", cuts=STEPS,
)  # fmt: skip
foreign(
    LATE, "old_keys_are_hidden", m.llama, "self_attn",
    lambda mask: mask if mask is None else mask & (torch.arange(mask.shape[-1]) > 2),
    m.plain, "earlier keys lost", cuts=CHUNK,
)  # fmt: skip


def positions(name: str, build: Callable[[], Any], shift: Callable[[int], int]) -> None:
    def make(is_faulty: bool) -> Made:
        def of(at: int, n: int) -> Tensor:
            return torch.arange(at, at + n)[None] + (shift(at) if is_faulty else 0)

        return m.stepped(build(), CHUNK, positions=of), m.plain()

    add(PLACES, name, make)


positions("positions_begin_anew", m.gpt2, lambda at: -at)
positions("positions_are_one_behind", m.qwen, lambda at: -int(at > 6))


@fault(PLACES)
def a_table_of_ones_own(is_faulty: bool) -> Made:
    return m.Text(m.causal, cuts=CHUNK, start=(lambda at: 0) if is_faulty else int).eval(), m.plain()


# Encoders.


def whole_pair() -> dict[str, Any]:
    return m.pair(attention_mask=torch.ones(3, 11).long(), input_ids=m.plain(3)["input_ids"])


foreign(BOTH, "a_vision_model", m.vit, "attention", given=m.image, is_causal=True)
foreign(BOTH, "a_vision_tower", m.siglip, "self_attn", given=m.image, is_causal=True)
foreign(BOTH, "the_encoder_of_a_pair", m.bart, "self_attn", given=whole_pair, under="model.encoder", is_causal=True)
foreign(BOTH, "an_encoder_of_text", m.bert, "self", is_causal=True)
own(
    BOTH, "one_layer_of_four", m.both_sides,
    lambda layer, q, k, v, keep: sdpa(q, k, v, is_causal=layer.number == 1),
)  # fmt: skip
foreign(
    BOTH, "causal_across", m.bart, "encoder_attn",
    lambda given: torch.ones(6, 11, dtype=torch.bool).tril()[None, None], whole_pair, "causal cross-attention",
)  # fmt: skip

# Documents, images, prefixes.

RESTART = torch.cat([torch.arange(6), torch.arange(5)])[None]


@fault(PACKED)
def a_mask_of_ones_beside_positions(is_faulty: bool) -> Made:
    ones = {"attention_mask": torch.ones(1, 11).long()} if is_faulty else {}
    return m.llama(), {**m.plain(1), "position_ids": RESTART, "use_cache": False, **ones}


@fault(PACKED)
def ends_of_documents_are_not_read(is_faulty: bool) -> Made:
    ends = torch.tensor([0, 6, 11], dtype=torch.int32)
    right = {} if is_faulty else {"position_ids": RESTART}
    return m.qwen(), {**m.plain(1), "cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "use_cache": False, **right}


def packed(document_ids: Tensor, *, is_faulty: bool = False) -> Made:
    def mask(document_ids: Tensor) -> Tensor:
        same = document_ids[:, None, :, None] == document_ids[:, None, None]
        return m.triangle(m.LENGTH) & (is_faulty | same)

    return m.Told(mask).eval(), {**m.plain(), "document_ids": document_ids}


@fault(PACKED)
def numbers_of_documents_are_not_read(is_faulty: bool) -> Made:
    return packed(torch.tensor([[0] * 4 + [1] * 7, [0] * 6 + [1] * 3 + [2] * 2]), is_faulty=is_faulty)


@fault(BLOCKS)
def a_prefix_of_ones_own(is_faulty: bool) -> Made:
    def mask(token_type_ids: Tensor) -> Tensor:
        return m.triangle(m.LENGTH) | ((token_type_ids == 0)[:, None, None] & (not is_faulty))

    return m.Told(mask).eval(), {**m.plain(), **kinds()}


def kinds() -> dict[str, Tensor]:
    """The first four tokens of two sequences are of another kind than the others."""
    return {"token_type_ids": (torch.arange(11) >= 4).long()[None].expand(2, 11)}


def described() -> dict[str, Any]:
    """An image of 4 tokens, and a text; the kinds say where the prefix ends."""
    ids = torch.tensor([[59, 59, 59, 59, 5, 6, 7, 8, 9, 10]])
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": m.image()["pixel_values"][:1]}
    return given | {"token_type_ids": (torch.arange(10) >= 7).long()[None]}


foreign(
    BLOCKS, "the_prefix_of_paligemma", m.paligemma, "self_attn", lambda mask: m.triangle(10)[None, None], described,
    under="model.language_model",
)  # fmt: skip

# Windows.

ALL = m.triangle(m.LENGTH)[None, None]


def window(size: int) -> Tensor:
    return ALL & ~m.triangle(m.LENGTH, diagonal=-size)


foreign(WINDOW, "one_key_more", m.phi3, "self_attn", lambda mask: window(6))
foreign(WINDOW, "one_key_fewer", m.phi3, "self_attn", lambda mask: window(4))
foreign(WINDOW, "ignored", m.phi3, "self_attn", lambda mask: ALL)
foreign(WINDOW, "ignored_in_one_layer", m.gemma3, "layers.1.self_attn", lambda mask: ALL)
foreign(WINDOW, "in_a_layer_of_full_attention", m.gemma3, "layers.2.self_attn", lambda mask: window(5))
own(
    WINDOW, "one_layer_of_four", m.masked(lambda q, k, keep: window(4)),
    lambda layer, q, k, v, keep: sdpa(q, k, v, attn_mask=window(4) if layer.number != 1 else ALL),
)  # fmt: skip

# The call itself.


def written(layer: Any, q: Tensor, k: Tensor, v: Tensor, keep: Any) -> Tensor:
    return m.written(q, k, v)


def triangular(layer: Any, q: Tensor, k: Tensor, v: Tensor, keep: Any) -> Tensor:
    return m.written(q, k, v, ALL)


own(SOFTMAX, "over_heads", written, lambda layer, q, k, v, keep: m.written(q, k, v, dim=1))
own(SOFTMAX, "over_queries", written, lambda layer, q, k, v, keep: m.written(q, k, v, dim=-2))


@fault(SOFTMAX)
def over_the_sequences_of_a_batch(is_faulty: bool) -> Made:
    given = m.plain(3) | {"attention_mask": torch.ones(3, 11).long()}
    return Tagger(with_mask=False, batch_first=not is_faulty).eval(), given


own(
    ADDED, "zeros_and_ones_are_added", m.both_sides, m.masked(lambda q, k, keep: keep[:, None, None].to(q.dtype)),
    m.batch, "mask added", "padding",
)  # fmt: skip
own(
    ADDED, "scores_are_multiplied", m.both_sides,
    lambda layer, q, k, v, keep: (q @ k.mT / 8**0.5 * keep[:, None, None]).softmax(-1) @ v,
    m.batch, "mask added", "padding",
)  # fmt: skip
own(
    ADDED, "minus_ten", m.both_sides,
    lambda layer, q, k, v, keep: sdpa(4 * q, 4 * k, v, attn_mask=torch.where(keep, 0.0, -10.0)[:, None, None]),
    m.batch, "hidden by a finite number", "padding",
)  # fmt: skip
own(
    ADDED, "a_triangle_of_minus_eight", m.causal,
    lambda layer, q, k, v, keep: sdpa(4 * q, 4 * k, v, attn_mask=torch.where(ALL, 0.0, -8.0)),
    m.plain, "hidden by a finite number", "future",
)  # fmt: skip


@fault(DROPOUT)
def a_part_in_training_mode(is_faulty: bool) -> Made:
    model = m.qwen(attention_dropout=0.4)
    for one in m.parts(model, "self_attn") if is_faulty else []:
        one.train()
    return model, m.plain()


own(
    DROPOUT, "without_asking_for_the_mode", m.causal,
    lambda layer, q, k, v, keep: sdpa(q, k, v, is_causal=True, dropout_p=0.4),
)  # fmt: skip
own(
    DROPOUT, "written_out", triangular,
    lambda layer, q, k, v, keep: (
        nn.functional.dropout((q @ k.mT / 8**0.5).masked_fill(~ALL, -torch.inf).softmax(-1), 0.4) @ v
    ),
)  # fmt: skip
foreign(
    BIAS, "a_relative_bias_is_not_handed_on", m.t5, "encoder.block.1.layer.0.SelfAttention",
    lambda bias: torch.zeros(3, m.HEADS, 11, 11), whole_pair, "bias", argument="position_bias",
)  # fmt: skip


@fault(BIAS, "sink")
def sinks_are_not_loaded(is_faulty: bool) -> Made:
    more = {"num_local_experts": 2, "num_experts_per_tok": 1, "layer_types": ["full_attention"] * 3}
    model = m.huggingface("GptOssForCausalLM", m.GROUPED | more, kernel="eager")
    for one in m.parts(model, "self_attn") if is_faulty else []:
        one.sinks.data.fill_(-1e9)
    return model, m.plain()
