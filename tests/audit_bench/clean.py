"""Clean models in their ordinary use beside the twins of the faults: no audit may find an error in them, and hardly a
warning."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

import regard
from tests.audit_bench import models as m
from tests.audit_bench.faults import Made, Tagger, described, kinds, left, window
from tests.inspection.huggingface_families import FAMILIES, IN_BLOCKS, Family
from tests.modules import parts

CLEAN: dict[str, Callable[[], Made]] = {}


def _generated(name: str, make: Callable[[], Any], given: Callable[[], dict[str, Any]], **settings: Any) -> None:
    def generate(model: Any, **given: Any) -> Tensor:
        return model.generate(**given, max_new_tokens=4, min_new_tokens=4, do_sample=False, **settings)

    CLEAN[f"generate: {name}"] = lambda: (m.Stepwise(make(), generate), given())


_generated("left padding", m.llama, left)
_generated("one sequence", m.gpt2, lambda: m.plain(1))
_generated("learned positions, left padding", m.gpt2, left)
_generated("beams", m.qwen, left, num_beams=3)
_generated("a static cache", m.llama, left, cache_implementation="static")
_generated("a window and left padding", m.phi3, left)
_generated("windows and all keys in turns", m.gemma3, left)
_generated("a hybrid static cache", m.gemma3, lambda: m.plain(1), cache_implementation="static")
_generated("caps under eager attention", m.gemma2, left)
_generated("two drafts at a time", m.llama, lambda: m.plain(1), prompt_lookup_num_tokens=2)
_generated("a pair", m.bart, m.batch)
_generated("a pair with beams", m.bart, m.batch, num_beams=2)
_generated("relative biases", m.t5, m.batch)


def _read(name: str, make: Callable[[], Any], given: Callable[[], dict[str, Any]]) -> None:
    CLEAN[name] = lambda: (make(), given())


_read("gpt2, right padding", m.gpt2, m.batch)
_read("phi3, left padding", m.phi3, left)
_read("gemma2, left padding", m.gemma2, left)
_read("gemma3, right padding", m.gemma3, m.batch)
_read("granite_swa, sinks after the softmax", m.granite_swa, m.batch)
_read("bert, left padding", m.bert, left)
_read("bert, a mask of floats", m.bert, lambda: {**m.batch(), "attention_mask": m.batch()["attention_mask"].float()})
_read(
    "bert, kinds of tokens",
    m.bert,
    lambda: {**m.batch(), "token_type_ids": (torch.arange(11) > 4).long()[None].expand(3, 11)},
)
_read("bert as a decoder", lambda: m.huggingface("BertLMHeadModel", m.TEXT, is_decoder=True), m.batch)
_read(
    "bart, target and source padded",
    m.bart,
    lambda: m.pair(decoder_attention_mask=torch.arange(6)[None] < torch.tensor([[6], [4], [3]])),
)
_read("bart, equal lengths", m.bart, lambda: {**m.batch(), "decoder_input_ids": m.plain(3)["input_ids"]})
_read("paligemma, a prompt alone", m.paligemma, lambda: {n: t for n, t in described().items() if n != "token_type_ids"})
_read(
    "positions that begin anew",
    m.qwen,
    lambda: {**m.plain(1), "position_ids": torch.cat([torch.arange(4), torch.arange(7)])[None], "use_cache": False},
)
_read("no padding token", lambda: m.llama(pad_token_id=None), lambda: {"input_ids": torch.arange(11)[None]})
_read(
    "the padding token begins and ends a text",
    lambda: m.gpt2(bos_token_id=0, eos_token_id=0),
    lambda: {"input_ids": torch.tensor([[0, *range(5, 14), 0]])},
)
_read("a model of text in training mode", lambda: m.qwen(attention_dropout=0.2).train(), m.batch)
_read(
    "embeddings from a decoder",
    lambda: m.huggingface("Gemma3TextModel", m.GROUPED, use_bidirectional_attention=True, sliding_window=64),
    m.batch,
)
_read("torch's encoder", Tagger, m.batch)
_read("dialogue with a table of speakers", lambda: m.Text(m.causal, kinds=2).eval(), lambda: {**m.plain(), **kinds()})


def _own(
    name: str, attend: Callable[..., Tensor], given: Callable[[], dict[str, Any]] = m.plain, **options: Any
) -> None:
    CLEAN[f"one's own: {name}"] = lambda: (m.Text(attend, **options).eval(), given())


_own(
    "a single query without a mask",
    lambda layer, q, k, v, keep: sdpa(q, k, v, is_causal=q.shape[2] > 1),
    cuts=(7, 1, 1, 1, 1),
)
_own("windows that grow", lambda layer, q, k, v, keep: sdpa(q, k, v, attn_mask=window(2 + 2 * layer.number)))
_own(
    "windows in turns",
    lambda layer, q, k, v, keep: sdpa(q, k, v, attn_mask=window(3 if layer.number % 2 else 11)),
)
_own(
    "a window to both sides",
    m.masked(lambda q, k, keep: (torch.arange(11)[:, None] - torch.arange(11)).abs() < 4),
)
_own(
    "a window with a cache",
    m.masked(lambda q, k, keep: m.triangle(q.shape[2], k.shape[2]) & ~m.triangle(q.shape[2], k.shape[2], diagonal=-5)),
    cuts=(3, 1, 3, 1, 1, 1, 1),
)
_own(
    "strided",
    lambda layer, q, k, v, keep: regard.attention(q, k, v, mask=regard.causal() & regard.call.masks.strided(3)),
)
_own(
    "a slope", lambda layer, q, k, v, keep: regard.attention(q, k, v, mask=regard.causal(), bias=regard.ALiBi(m.HEADS))
)
_own("written out, -1e9", lambda layer, q, k, v, keep: m.written(q, k, v, keep[:, None, None], low=-1e9), m.batch)
_own("cosines", lambda layer, q, k, v, keep: regard.attention(q, k, v, score=regard.Cosine(), mask=regard.causal()))
_own("a mask of -10,000", m.masked(lambda q, k, keep: torch.where(keep, 0.0, -1e4)[:, None, None]), m.batch)
_own(
    "sigmoids",
    lambda layer, q, k, v, keep: regard.attention(q, k, v, mask=regard.causal(), normalization=regard.Sigmoid()),
)


@parts(
    lambda: {
        "tokens": nn.Embedding(m.VOCABULARY, m.DIM),
        "queries": nn.Parameter(torch.randn(1, 3, m.DIM)),
        "attention": nn.MultiheadAttention(m.DIM, m.HEADS, batch_first=True),
    },
    seed=5,
)
def Pooled(self: Any, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    x = self.tokens(input_ids)
    return self.attention(self.queries.expand(len(x), -1, -1), x, x, key_padding_mask=attention_mask == 0)[0]


_read("learned queries", lambda: Pooled().eval(), m.batch)


def _family(of: Family) -> Callable[[], Made]:
    return lambda: (of.build(), of.inputs())


CLEAN |= {f"family: {name}": _family(family) for name, family in (FAMILIES | IN_BLOCKS).items()}
