"""Planted faults: each is a function from True or False to a model, with or without the fault, and its arguments."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

from tests.audit_bench import models as m

Made = tuple[nn.Module, dict[str, Any]]


@dataclass(frozen=True)
class Fault:
    """A fault, the reasons that name it, and the model with it or without."""

    kind: str
    name: str
    reasons: frozenset[str]
    make: Callable[[bool], Made]
    is_of_others: bool = False
    """True for a kind that a user of the audit planted, and that it had missed."""


FAULTS: list[Fault] = []


def fault(kind: str, *reasons: str) -> Callable[[Callable[[bool], Made]], Callable[[bool], Made]]:
    def add(make: Callable[[bool], Made]) -> Callable[[bool], Made]:
        FAULTS.append(Fault(kind, make.__name__, frozenset(reasons), make))
        return make

    return add


def own(
    kind: str, reasons: str, name: str, good: Any, bad: Any, given: Callable[[], dict[str, Any]], **options: Any
) -> None:
    """A fault of a model of one's own."""
    model = m.twin(good, bad, **options)
    FAULTS.append(Fault(kind, name, frozenset(reasons.split("|")), lambda is_faulty: (model(is_faulty), given())))


# -- padding -------------------------------------------------------------------------------------------------

PADS = "padding attended"


@fault(PADS, "padding")
def a_mask_of_ones_on_the_left(is_faulty: bool) -> Made:
    given = m.batch("left")
    return m.qwen(), given | ({"attention_mask": torch.ones_like(given["input_ids"])} if is_faulty else {})


@fault(PADS, "padding")
def no_mask_for_an_encoder(is_faulty: bool) -> Made:
    given = m.batch()
    return m.bert(), {"input_ids": given["input_ids"]} if is_faulty else given


@fault(PADS, "padding")
def the_mask_is_lost_in_one_layer(is_faulty: bool) -> Made:
    model = m.bert()
    if is_faulty:
        m.meddle(m.parts(model, "layer.1.attention.self"), lambda mask: None)
    return model, m.batch()


@fault(PADS, "padding")
def the_mask_is_lost_in_the_encoder_of_a_pair(is_faulty: bool) -> Made:
    model = m.t5()
    if is_faulty:
        m.meddle(
            [
                one
                for path, one in model.named_modules()
                if path.startswith("encoder") and path.endswith("SelfAttention")
            ],
            lambda mask: None,
            "mask" if "mask" in _names(m.parts(model, "SelfAttention")[0]) else "attention_mask",
        )
    return model, m.pair()


def _names(module: nn.Module) -> Any:
    return type(module).forward.__code__.co_varnames


@fault(PADS, "padding")
def torchs_encoder_without_its_mask(is_faulty: bool) -> Made:
    return Tagger(with_mask=not is_faulty).eval(), m.batch()


class Tagger(nn.Module):
    """torch's encoder."""

    def __init__(self, *, with_mask: bool = True, is_turned: bool = False, batch_first: bool = True) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.with_mask, self.is_turned = with_mask, is_turned
        layer = nn.TransformerEncoderLayer(m.DIM, m.HEADS, 48, batch_first=batch_first)
        self.tokens, self.encoder = (
            nn.Embedding(m.VOCABULARY, m.DIM),
            nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        )

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = attention_mask == 0
        if self.is_turned:
            hidden = ~hidden & ~(~hidden).all(1, keepdim=True)
        found: Tensor = self.encoder(self.tokens(input_ids), src_key_padding_mask=hidden if self.with_mask else None)
        return found


own(PADS, "padding", "an_encoder_of_ones_own", m.both_sides, lambda layer, q, k, v, keep: sdpa(q, k, v), m.batch)
own(
    PADS,
    "padding",
    "a_decoder_padded_on_the_left",
    m.causal,
    lambda layer, q, k, v, keep: sdpa(q, k, v, is_causal=True),
    lambda: m.batch("left"),
)

CROSS = "padding attended across"


@fault(CROSS, "padding")
def cross_attention_of_a_pair(is_faulty: bool) -> Made:
    model = m.bart()
    if is_faulty:
        m.meddle(m.parts(model, "encoder_attn"), lambda mask: None)
    return model, m.pair()


@fault(CROSS, "padding")
def cross_attention_in_one_layer(is_faulty: bool) -> Made:
    model = m.bart()
    if is_faulty:
        m.meddle(m.parts(model, "layers.1.encoder_attn"), lambda mask: None)
    return model, m.pair()


class Translator(nn.Module):
    """torch's decoder over a source."""

    def __init__(self, *, memory_mask: bool = True, target_mask: bool = True) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.memory_mask, self.target_mask = memory_mask, target_mask
        self.tokens = nn.Embedding(m.VOCABULARY, m.DIM)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(m.DIM, m.HEADS, 48, batch_first=True), 2)

    def forward(self, src: Tensor, tgt: Tensor, attention_mask: Tensor) -> Tensor:
        later = ~m.triangle(tgt.shape[1]) if self.target_mask else None
        hidden = attention_mask == 0 if self.memory_mask else None
        found: Tensor = self.decoder(self.tokens(tgt), self.tokens(src), tgt_mask=later, memory_key_padding_mask=hidden)
        return found


def _translated() -> dict[str, Any]:
    given = m.pair()
    return {"src": given["input_ids"], "tgt": given["decoder_input_ids"], "attention_mask": given["attention_mask"]}


@fault(CROSS, "padding")
def torchs_decoder_without_the_memorys_mask(is_faulty: bool) -> Made:
    return Translator(memory_mask=not is_faulty).eval(), _translated()


UPSIDE = "padding mask upside down"


@fault(UPSIDE, "padding")
def torchs_flag_means_the_opposite(is_faulty: bool) -> Made:
    return Tagger(is_turned=is_faulty).eval(), m.batch(lengths=(11, 8, 5))


@fault(UPSIDE, "padding")
def the_mask_is_turned_on_its_way(is_faulty: bool) -> Made:
    model = m.bert()
    if is_faulty:
        m.meddle(m.parts(model, "attention.self"), lambda mask: mask if mask is None else ~mask)
    return model, m.batch(lengths=(11, 8, 5))


own(
    UPSIDE,
    "padding",
    "words_are_hidden",
    m.both_sides,
    lambda layer, q, k, v, keep: m.written(q, k, v, ~keep[:, None, None], low=-1e9),
    m.batch,
)

AXIS = "padding mask along the wrong axis"
own(
    AXIS,
    "padding",
    "as_many_sequences_as_queries",
    m.both_sides,
    lambda layer, q, k, v, keep: sdpa(q, k, v, attn_mask=keep),
    lambda: m.batch(lengths=(11, 8, 5, 9, 11, 6, 7, 11, 4, 3, 10)),
)
own(
    AXIS,
    "padding",
    "queries_are_hidden",
    m.both_sides,
    lambda layer, q, k, v, keep: sdpa(q, k, v, attn_mask=keep[:, None, :, None].expand(-1, 1, -1, k.shape[2])),
    m.batch,
)
own(
    AXIS,
    "padding",
    "the_mask_of_the_first_sequence",
    m.both_sides,
    lambda layer, q, k, v, keep: sdpa(q, k, v, attn_mask=keep[:1, None, None]),
    m.batch,
)
own(
    AXIS,
    "padding",
    "the_mask_of_the_next_sequence",
    m.both_sides,
    lambda layer, q, k, v, keep: sdpa(q, k, v, attn_mask=keep.roll(1, 0)[:, None, None]),
    m.batch,
)
own(
    AXIS,
    "padding",
    "the_mask_is_on_the_other_side",
    m.both_sides,
    lambda layer, q, k, v, keep: sdpa(q, k, v, attn_mask=keep.flip(-1)[:, None, None]),
    m.batch,
)
own(
    AXIS,
    "padding",
    "one_word_too_few",
    m.both_sides,
    lambda layer, q, k, v, keep: sdpa(
        q, k, v, attn_mask=(keep & keep.roll(-1, -1).index_fill(1, torch.tensor([10]), True))[:, None, None]
    ),
    lambda: m.batch(lengths=(11, 8, 5)),
)

# -- causality -----------------------------------------------------------------------------------------------

FUTURE = "causal mask lost"


@fault(FUTURE, "future")
def lost_in_one_layer(is_faulty: bool) -> Made:
    model = m.llama()
    if is_faulty:
        model.model.layers[2].self_attn.is_causal = False
    return model, m.plain()


@fault(FUTURE, "future")
def lost_in_all_layers(is_faulty: bool) -> Made:
    model = m.gpt2()
    if is_faulty:
        for one in m.parts(model, "attn"):
            one.is_causal = False  # type: ignore[assignment]
    return model, m.plain()


@fault(FUTURE, "future")
def the_padding_mask_replaces_it(is_faulty: bool) -> Made:
    model = m.qwen()
    if is_faulty:
        m.meddle(m.parts(model, "self_attn"), lambda mask: mask[:, :, -1:])
    return model, m.batch()


@fault(FUTURE, "future")
def lost_in_the_decoder_of_a_pair(is_faulty: bool) -> Made:
    model = m.bart()
    if is_faulty:
        for one in model.model.decoder.layers:
            one.self_attn.is_causal = False
            m.meddle([one.self_attn], lambda mask: None)
    return model, m.pair()


@fault(FUTURE, "future")
def torchs_decoder_without_its_triangle(is_faulty: bool) -> Made:
    return Translator(target_mask=not is_faulty).eval(), _translated()


own(
    FUTURE,
    "future",
    "one_layer_of_four",
    m.causal,
    lambda layer, q, k, v, keep: sdpa(q, k, v, is_causal=layer.number != 2),
    m.plain,
)

OFF = "causal mask off by one"
own(
    OFF,
    "future",
    "sees_the_next",
    m.causal,
    lambda layer, q, k, v, keep: sdpa(q, k, v, attn_mask=m.triangle(q.shape[2], diagonal=1)),
    m.plain,
)
own(
    OFF,
    "future",
    "sees_the_next_written_out_with_padding",
    m.causal,
    lambda layer, q, k, v, keep: sdpa(q, k, v, attn_mask=m.triangle(q.shape[2], diagonal=1) & keep[:, None, None]),
    m.batch,
)


def _strict(layer: Any, q: Tensor, k: Tensor, v: Tensor, keep: Any) -> Tensor:
    mask = m.triangle(q.shape[2], diagonal=-1)
    mask[0, 0] = True
    return sdpa(q, k, v, attn_mask=mask)


own(OFF, "itself hidden", "does_not_see_itself", m.causal, _strict, m.plain)


@fault(OFF, ["itself hidden", "no key"][0])
def a_triangle_too_narrow(is_faulty: bool) -> Made:
    model = m.llama()
    if is_faulty:
        strict = m.triangle(m.LENGTH, diagonal=-1)
        strict[0, 0] = True
        m.meddle(m.parts(model, "self_attn"), lambda mask: strict[None, None])
    return model, m.plain()


TURNED = "causal mask turned"
own(
    TURNED,
    "inverted mask",
    "true_was_taken_for_hidden",
    m.causal,
    lambda layer, q, k, v, keep: sdpa(q, k, v, attn_mask=~m.triangle(q.shape[2])),
    m.plain,
)


@fault(TURNED, "inverted mask", "future")
def transposed(is_faulty: bool) -> Made:
    model = m.qwen()
    if is_faulty:
        m.meddle(m.parts(model, "self_attn"), lambda mask: mask.mT)
    return model, m.batch()


# -- caches --------------------------------------------------------------------------------------------------

CORNER = "wrong corner with a cache"


@fault(CORNER, "causal from the first key")
def the_kernel_gets_the_oldest_keys(is_faulty: bool) -> Made:
    model = m.qwen()
    if is_faulty:
        m.meddle(m.parts(model, "self_attn"), lambda mask: None)
    return m.Stepwise(model, lambda model, input_ids: m.in_steps(model, input_ids, (6, 4, 1))), m.plain()


def _first(layer: Any, q: Tensor, k: Tensor, v: Tensor, keep: Any) -> Tensor:
    return sdpa(q, k, v, is_causal=True)


own(CORNER, "causal from the first key", "a_chunk", m.causal, _first, m.plain, cuts=(6, 4, 1))
own(CORNER, "causal from the first key", "a_single_query", m.causal, _first, m.plain, cuts=(6, 1, 1, 1, 1, 1))
own(
    CORNER,
    "causal from the first key|earlier keys lost|itself hidden",
    "written_out",
    m.causal,
    lambda layer, q, k, v, keep: sdpa(q, k, v, attn_mask=torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()),
    m.plain,
    cuts=(6, 4, 1),
)


def _cut(keys: slice) -> Any:
    """A prompt, and then single queries with some of the keys in the cache."""

    def attend(layer: Any, q: Tensor, k: Tensor, v: Tensor, keep: Any) -> Tensor:
        return m.causal(layer, q, k, v, keep) if q.shape[2] > 1 else sdpa(q, k[:, :, keys], v[:, :, keys])

    return attend


own(
    CORNER,
    "itself hidden",
    "a_cut_cache_without_the_newest_key",
    _cut(slice(-7, None)),
    _cut(slice(7)),
    m.plain,
    cuts=(6, 1, 1, 1, 1, 1),
)


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
            return m.in_steps(model, input_ids, (6, 1, 1, 1, 1, 1))
        finally:
            Rolled.update = update

    return m.Stepwise(m.phi3(), run), m.plain()


LATE = "causal mask lost with a cache"


@fault(LATE, "future")
def a_chunk_sees_its_end(is_faulty: bool) -> Made:
    model = m.llama()
    if is_faulty:
        m.meddle(m.parts(model, "self_attn"), lambda mask: mask if mask is None else torch.ones_like(mask))
    return m.Stepwise(model, lambda model, input_ids: m.in_steps(model, input_ids, (6, 4, 1))), m.plain()


own(
    LATE,
    "future",
    "a_chunk_of_ones_own",
    m.causal,
    lambda layer, q, k, v, keep: sdpa(q, k, v, is_causal=q.shape[2] == k.shape[2]),
    m.plain,
    cuts=(6, 4, 1),
)
own(
    LATE,
    "future",
    "at_prefill_alone",
    m.causal,
    lambda layer, q, k, v, keep: sdpa(q, k, v),
    m.plain,
    cuts=(6, 1, 1, 1, 1, 1),
)
own(
    LATE,
    "earlier keys lost|itself hidden",
    "the_mask_has_the_length_of_the_prompt",
    m.causal,
    lambda layer, q, k, v, keep: sdpa(
        q, k, v, attn_mask=(torch.arange(k.shape[2]) < 6) & m.triangle(q.shape[2], k.shape[2])
    ),
    m.plain,
    cuts=(6, 1, 1, 1, 1, 1),
)


@fault(LATE, "earlier keys lost")
def old_keys_are_hidden(is_faulty: bool) -> Made:
    model = m.llama()
    if is_faulty:
        m.meddle(
            m.parts(model, "self_attn"),
            lambda mask: mask if mask is None else mask & (torch.arange(mask.shape[-1]) > 2),
        )
    return m.Stepwise(model, lambda model, input_ids: m.in_steps(model, input_ids, (6, 4, 1))), m.plain()


PLACES = "positions with a cache"


@fault(PLACES, "positions")
def positions_begin_anew(is_faulty: bool) -> Made:
    def read(model: Any, input_ids: Tensor) -> Tensor:
        return m.in_steps(
            model,
            input_ids,
            (6, 4, 1),
            positions=lambda at, n: torch.arange(0 if is_faulty else at, (0 if is_faulty else at) + n)[None],
        )

    return m.Stepwise(m.gpt2(), read), m.plain()


@fault(PLACES, "positions")
def positions_are_one_behind(is_faulty: bool) -> Made:
    def read(model: Any, input_ids: Tensor) -> Tensor:
        return m.in_steps(
            model,
            input_ids,
            (6, 4, 1),
            positions=lambda at, n: torch.arange(at, at + n)[None] - int(is_faulty and at > 6),
        )

    return m.Stepwise(m.qwen(), read), m.plain()


FAULTS.append(
    Fault(
        PLACES,
        "a_table_of_ones_own",
        frozenset({"positions"}),
        lambda is_faulty: (
            m.Text(m.causal, cuts=(6, 4, 1), start=(lambda at: 0) if is_faulty else int).eval(),
            m.plain(),
        ),
    )
)

# -- encoders ------------------------------------------------------------------------------------------------

BOTH = "encoder became causal"


def _causal_encoder(
    name: str, make: Callable[[], Any], end: str, given: Callable[[], dict[str, Any]], under: str = ""
) -> None:
    def made(is_faulty: bool) -> Made:
        model = make()
        for path, one in model.named_modules():
            if path.endswith(end) and path.startswith(under) and is_faulty:
                one.is_causal = True
        return model, given()

    FAULTS.append(Fault(BOTH, name, frozenset({"causal encoder"}), made))


_causal_encoder("a_vision_model", m.vit, "attention", m.image)
_causal_encoder("a_vision_tower", m.siglip, "self_attn", m.image)
_causal_encoder(
    "the_encoder_of_a_pair",
    m.bart,
    "self_attn",
    lambda: m.pair(attention_mask=torch.ones(3, 11).long(), input_ids=m.plain(3)["input_ids"]),
    "model.encoder",
)
_causal_encoder("an_encoder_of_text", m.bert, "self", m.plain)
own(
    BOTH,
    "causal encoder",
    "one_layer_of_four",
    m.both_sides,
    lambda layer, q, k, v, keep: sdpa(q, k, v, is_causal=layer.number == 1),
    m.plain,
)


@fault(BOTH, "causal cross-attention")
def causal_across(is_faulty: bool) -> Made:
    model = m.bart()
    if is_faulty:
        mask = torch.ones(6, 11, dtype=torch.bool).tril()[None, None]
        m.meddle(m.parts(model, "encoder_attn"), lambda given: mask)
    return model, m.pair(attention_mask=torch.ones(3, 11).long(), input_ids=m.plain(3)["input_ids"])


# -- documents, images, prefixes -----------------------------------------------------------------------------

PACKED = "packed documents"
RESTART = torch.cat([torch.arange(6), torch.arange(5)])[None]


@fault(PACKED, "documents")
def a_mask_of_ones_beside_positions(is_faulty: bool) -> Made:
    ones = {"attention_mask": torch.ones(1, 11).long()} if is_faulty else {}
    return m.llama(), {**m.plain(1), "position_ids": RESTART, "use_cache": False, **ones}


@fault(PACKED, "documents")
def ends_of_documents_are_not_read(is_faulty: bool) -> Made:
    ends = torch.tensor([0, 6, 11], dtype=torch.int32)
    right = {} if is_faulty else {"position_ids": RESTART}
    return m.qwen(), {**m.plain(1), "cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "use_cache": False, **right}


class Packed(nn.Module):
    """A model that takes the number of each document."""

    def __init__(self, *, is_faulty: bool) -> None:
        super().__init__()
        self.model, self.is_faulty = m.Text(m.causal), is_faulty

    def forward(self, input_ids: Tensor, document_ids: Tensor) -> Tensor:
        same = document_ids[:, None, :, None] == document_ids[:, None, None]
        mask = m.triangle(input_ids.shape[1]) & (torch.tensor(True) if self.is_faulty else same)
        for layer in self.model.layers:
            layer.attend = lambda layer, q, k, v, keep: sdpa(q, k, v, attn_mask=mask)  # type: ignore[assignment]
        found: Tensor = self.model(input_ids)
        return found


@fault(PACKED, "documents")
def numbers_of_documents_are_not_read(is_faulty: bool) -> Made:
    numbers = torch.tensor([[0] * 4 + [1] * 7, [0] * 6 + [1] * 3 + [2] * 2])
    return Packed(is_faulty=is_faulty).eval(), {**m.plain(), "document_ids": numbers}


BLOCKS = "images and prefixes"


class Prefixed(nn.Module):
    """A language model that sees its prefix both ways."""

    def __init__(self, *, is_faulty: bool) -> None:
        super().__init__()
        self.model, self.is_faulty = m.Text(m.causal), is_faulty

    def forward(self, input_ids: Tensor, token_type_ids: Tensor) -> Tensor:
        mask = m.triangle(input_ids.shape[1]) | (
            torch.tensor(False) if self.is_faulty else (token_type_ids == 0)[:, None, None]
        )
        for layer in self.model.layers:
            layer.attend = lambda layer, q, k, v, keep: sdpa(q, k, v, attn_mask=mask)  # type: ignore[assignment]
        found: Tensor = self.model(input_ids)
        return found


@fault(BLOCKS, "prefix")
def a_prefix_of_ones_own(is_faulty: bool) -> Made:
    kinds = (torch.arange(11) >= 4).long()[None].expand(2, 11)
    return Prefixed(is_faulty=is_faulty).eval(), {**m.plain(), "token_type_ids": kinds}


def described() -> dict[str, Any]:
    """An image of 4 tokens, and a text; the kinds say where the prefix ends."""
    ids = torch.tensor([[59, 59, 59, 59, 5, 6, 7, 8, 9, 10]])
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": m.image()["pixel_values"][:1]}
    return given | {"token_type_ids": (torch.arange(10) >= 7).long()[None]}


@fault(BLOCKS, "prefix")
def the_prefix_of_paligemma(is_faulty: bool) -> Made:
    model = m.paligemma()
    if is_faulty:
        m.meddle(m.parts(model.model.language_model, "self_attn"), lambda mask: m.triangle(10)[None, None])
    return model, described()


# -- windows -------------------------------------------------------------------------------------------------

WINDOW = "windows"
ALL = m.triangle(m.LENGTH)[None, None]


def _window(size: int) -> Tensor:
    return ALL & ~m.triangle(m.LENGTH, diagonal=-size)


def _windowed(name: str, make: Callable[[], Any], end: str, mask: Tensor) -> None:
    def made(is_faulty: bool) -> Made:
        model = make()
        if is_faulty:
            m.meddle(m.parts(model, end), lambda given: mask)
        return model, m.plain()

    FAULTS.append(Fault(WINDOW, name, frozenset({"window"}), made))


_windowed("one_key_more", m.phi3, "self_attn", _window(6))
_windowed("one_key_fewer", m.phi3, "self_attn", _window(4))
_windowed("ignored", m.phi3, "self_attn", ALL)
_windowed("ignored_in_one_layer", m.gemma3, "layers.1.self_attn", ALL)
_windowed("in_a_layer_of_full_attention", m.gemma3, "layers.2.self_attn", _window(5))
own(
    WINDOW,
    "window",
    "one_layer_of_four",
    lambda layer, q, k, v, keep: sdpa(q, k, v, attn_mask=_window(4)),
    lambda layer, q, k, v, keep: sdpa(q, k, v, attn_mask=_window(4) if layer.number != 1 else ALL),
    m.plain,
)

# -- the call itself -----------------------------------------------------------------------------------------

SOFTMAX = "softmax over the wrong axis"
own(
    SOFTMAX,
    "softmax over the wrong axis",
    "over_heads",
    lambda layer, q, k, v, keep: m.written(q, k, v),
    lambda layer, q, k, v, keep: m.written(q, k, v, dim=1),
    m.plain,
)
own(
    SOFTMAX,
    "softmax over the wrong axis",
    "over_queries",
    lambda layer, q, k, v, keep: m.written(q, k, v),
    lambda layer, q, k, v, keep: m.written(q, k, v, dim=-2),
    m.plain,
)


@fault(SOFTMAX, "softmax over the wrong axis")
def over_the_sequences_of_a_batch(is_faulty: bool) -> Made:
    return Tagger(with_mask=False, batch_first=not is_faulty).eval(), m.plain(3) | {
        "attention_mask": torch.ones(3, 11).long()
    }


ADDED = "a mask as a number"
own(
    ADDED,
    "mask added|padding",
    "zeros_and_ones_are_added",
    m.both_sides,
    lambda layer, q, k, v, keep: sdpa(q, k, v, attn_mask=keep[:, None, None].to(q.dtype)),
    m.batch,
)
own(
    ADDED,
    "mask added|padding",
    "scores_are_multiplied",
    m.both_sides,
    lambda layer, q, k, v, keep: (q @ k.mT / 8**0.5 * keep[:, None, None]).softmax(-1) @ v,
    m.batch,
)
own(
    ADDED,
    "hidden by a finite number|padding",
    "minus_ten",
    m.both_sides,
    lambda layer, q, k, v, keep: sdpa(4 * q, 4 * k, v, attn_mask=torch.where(keep, 0.0, -10.0)[:, None, None]),
    m.batch,
)
own(
    ADDED,
    "hidden by a finite number|future",
    "a_triangle_of_minus_eight",
    m.causal,
    lambda layer, q, k, v, keep: sdpa(4 * q, 4 * k, v, attn_mask=torch.where(ALL, 0.0, -8.0)),
    m.plain,
)

DROPOUT = "dropout in evaluation"


@fault(DROPOUT, "dropout in evaluation")
def a_part_in_training_mode(is_faulty: bool) -> Made:
    model = m.qwen(attention_dropout=0.4)
    for one in m.parts(model, "self_attn") if is_faulty else []:
        one.train()
    return model, m.plain()


own(
    DROPOUT,
    "dropout in evaluation",
    "without_asking_for_the_mode",
    m.causal,
    lambda layer, q, k, v, keep: sdpa(q, k, v, is_causal=True, dropout_p=0.4),
    m.plain,
)
own(
    DROPOUT,
    "dropout in evaluation",
    "written_out",
    lambda layer, q, k, v, keep: m.written(q, k, v, ALL),
    lambda layer, q, k, v, keep: (
        nn.functional.dropout((q @ k.mT / 8**0.5).masked_fill(~ALL, -torch.inf).softmax(-1), 0.4) @ v
    ),
    m.plain,
)

BIAS = "bias and sinks"


@fault(BIAS, "bias")
def a_relative_bias_is_not_handed_on(is_faulty: bool) -> Made:
    model, none = m.t5(), torch.zeros(3, m.HEADS, 11, 11)
    if is_faulty:
        m.meddle([model.encoder.block[1].layer[0].SelfAttention], lambda bias: none, "position_bias")
    return model, m.pair(attention_mask=torch.ones(3, 11).long(), input_ids=m.plain(3)["input_ids"])


@fault(BIAS, "sink")
def sinks_are_not_loaded(is_faulty: bool) -> Made:
    more = {"num_local_experts": 2, "num_experts_per_tok": 1, "layer_types": ["full_attention"] * 3}
    model = m.huggingface("GptOssForCausalLM", "GptOssConfig", m.GROUPED | more, "eager")
    for one in m.parts(model, "self_attn") if is_faulty else []:
        one.sinks.data.fill_(-1e9)
    return model, m.plain()
