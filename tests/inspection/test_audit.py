"""Masks at the kernel: their kinds, shares of weight against the dense map, and findings of faulty models."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

import regard
from regard.call.masks.patterns import Window
from regard.call.shapes import Sizes
from regard.functional import make_call
from regard.watching.checks import facts
from regard.watching.checks.facts import facts_of, spans_of_call
from regard.watching.checks.finding import Finding
from regard.watching.kept.mask_kind import kind_of
from regard.watching.kept.mask_reading import read_mask
from regard.watching.watch import Seen
from tests.modules import parts, watching

B, H, T, D = 2, 3, 7, 5


@parts(lambda *, written_out=False, heads=H: {"written_out": written_out, "heads": heads})
def Attention(self: Any, x: Tensor, memory: Tensor | None = None, mask: Tensor | None = None, **flags: Any) -> Tensor:
    memory = x if memory is None else memory
    query, key = (t[:, None].expand(-1, self.heads, -1, -1) for t in (x, memory))
    if not self.written_out:
        return sdpa(query, key, key, attn_mask=mask, **flags)
    scores = query @ key.mT
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ key


def inputs(queries: int = T, batch: int = B) -> Tensor:
    return torch.randn(batch, queries, D, generator=torch.Generator().manual_seed(queries))


def watched(model: nn.Module, *args: Any, **kwargs: Any) -> Seen:
    return watching(model)(*args, **kwargs)


def call_of(mask: regard.Mask | Tensor, queries: int, keys: int, batch: int = B) -> Any:
    x, y = inputs(queries, batch)[:, None], inputs(keys, batch)[:, None]
    options: dict[str, Any] = {"score": regard.ScaledDot(), "normalization": regard.Softmax(), "bias": None}
    return make_call(x, y, y, mask=mask, dropout=0.0, **options)[0]


def kind(mask: regard.Mask | Tensor | None, queries: int = T, keys: int = T, batch: int = B) -> str:
    dense = None
    if mask is not None:
        call = call_of(mask, queries, keys, batch)
        given = str(kind_of(spans_of_call(call, None)))
        dense = call.allowed(call.mask, range(queries), range(keys))
    seen = watched(Attention(), inputs(queries, batch), inputs(keys, batch), mask=dense)
    found = str(facts_of(seen.calls[0]).mask)
    if mask is not None:
        assert found == given, "a mask and its dense rendering are of two kinds"
    return found


def ids(*numbers: int) -> Tensor:
    return torch.tensor(numbers)


KINDS: list[tuple[str, regard.Mask | None, str]] = [
    ("no mask", None, "none"),
    ("causal", regard.causal(), "causal"),
    ("right", regard.lengths(ids(7, 4)), "padding right (3 keys)"),
    ("left", ~regard.lengths(ids(0, 2)), "padding left (2 keys)"),
    ("inside", regard.padding(torch.tensor([[True] * 7, [True, True, False, True, True, True, True]])),
     "padding inside (1 key)"),
    ("causal, right", regard.causal() & regard.lengths(ids(7, 4)), "causal, padding right (3 keys)"),
    ("causal, left", regard.causal() & ~regard.lengths(ids(2, 0)), "causal, padding left (2 keys)"),
    ("one later", regard.causal(1), "causal, but off by one: each query sees the next key"),
    ("window", regard.window(3), "window of 3"),
    ("window, left", regard.window(3) & ~regard.lengths(ids(2, 0)), "window of 3, padding left (2 keys)"),
    ("both sides", regard.window(3, side="both"), "window of 3 to both sides"),
    ("unlike sides", Window(2, 1, None), "window of 4, of which 1 later"),
    ("unlike sides, right", Window(1, 2, None) & regard.lengths(ids(7, 4)),
     "window of 4, of which 2 later, padding right (3 keys)"),
    ("right side", regard.window(3, side="right"), "window of 3, of which 2 later"),
    ("prefix", regard.prefix(3), "prefix of 3"),
    ("prefixes", regard.prefix(ids(3, 5)), "prefix of 5"),
    ("documents", regard.documents(ids(0, 0, 1, 1, 1, 2, 2)), "documents"),
    ("packed", regard.documents(ids(0, 0, 1, 1, 1, 2, 2)) & regard.causal(), "documents, causal"),
    ("image", regard.causal() | (regard.documents(ids(0, 1, 2, 2, 2, 3, 4))),
     "causal, with blocks of both directions"),
    ("upside down", ~regard.causal(), "inverted"),
    ("holes", regard.causal() & (regard.lengths(1) | regard.call.masks.strided(2)), "dense of no known kind"),
    ("strided", regard.call.masks.strided(2), "dense of no known kind"),
    ("chosen", regard.chosen(torch.tensor([[0, -1], [0, 1], [0, 2], [1, 3], [0, 1], [3, 5], [0, 6]])),
     "2 of the causal keys, chosen for each query; 1 key chosen by no query"),
    ("unlike choices", regard.chosen(torch.tensor([[0, -1], [0, 1], [0, 2], [1, 3], [0, 1], [3, -1], [0, 6]])),
     "dense of no known kind, hidden inside (2 keys)"),
    ("empty", regard.lengths(0), "no key at all"),
]  # fmt: skip


@pytest.mark.parametrize(("mask", "expected"), [k[1:] for k in KINDS], ids=[k[0] for k in KINDS])
def test_the_kind_of_a_mask(mask: regard.Mask | None, expected: str) -> None:
    assert kind(mask) == expected


def test_kinds_where_queries_and_keys_differ() -> None:
    assert kind(regard.causal(), 3, 7) == "causal"
    assert kind(regard.causal(0), 3, 7) == "causal from the first key"
    assert kind(regard.causal(2), 3, 7) == "causal from a position"
    assert kind(regard.window(2), 3, 7) == "window of 2"
    assert kind(None, 1, 7) == "none"
    assert kind(~regard.lengths(2), 1, 7) == "hidden left (2 keys)"


@pytest.mark.parametrize("seed", range(30))
def test_a_kind_says_what_the_mask_says(seed: int) -> None:
    """Random combinations: the kind is the same for a mask and its rendering, and rebuilds the mask where it can."""
    pick = torch.Generator().manual_seed(seed)

    def upto(n: int) -> int:
        return int(torch.randint(n, (), generator=pick))

    queries = 1 + upto(8)
    keys = queries + (upto(5) if upto(2) else 0)
    patterns: list[Callable[[], regard.Mask]] = [
        regard.causal,
        lambda: regard.window(1 + upto(5)),
        lambda: Window(upto(3), 1 + upto(3), None),
        lambda: regard.prefix(1 + upto(keys)),
        lambda: regard.causal(0),
        lambda: regard.padding(torch.rand(B, keys, generator=pick) < 0.7),
    ]
    mask = patterns[upto(6)]()
    if upto(2):
        mask = mask & regard.lengths(torch.randint(1, keys + 1, (B,), generator=pick))
    if not upto(4):
        mask = mask & (torch.rand(1, 1, queries, 1, generator=pick) < 0.7)
    found = kind(mask, queries, keys)
    call = call_of(mask, queries, keys)
    dense = call.allowed(call.mask, range(queries), range(keys)).expand(B, 1, queries, keys)
    read = read_mask(call.allowed(call.mask, range(queries), range(keys)), call.sizes)
    again = torch.ones_like(dense) if read.mask is None else read.mask.dense(call.sizes).expand_as(dense)
    assert torch.equal(dense, again), found
    told = kind_of(spans_of_call(call, None))
    away = torch.arange(keys) - (torch.arange(queries) + told.offset)[:, None]
    places = away > 0
    assert bool(told.ahead) == bool((dense & places).any()), found
    shown = dense.any(-2, keepdim=True)
    rebuilt = {
        "none": lambda: torch.ones(queries, keys, dtype=torch.bool),
        "causal": lambda: ~places,
        "causal from the first key": lambda: ~places,
        "window to both sides": lambda: (told.ahead - told.size < away) & (away <= told.ahead),
        "window": lambda: ~places & (away > -told.size),
    }.get(told.pattern)
    if rebuilt is not None:
        live = dense.any(-1, keepdim=True)
        assert torch.equal(dense, rebuilt() & shown & live), found


def dense_shares(weights: Tensor, keep: Tensor | None = None, offset: int = 0) -> tuple[float, float]:
    live = (weights != 0).any(-1)
    later = torch.arange(weights.shape[-1]) > (torch.arange(weights.shape[-2]) + offset)[:, None]
    return float((weights * later).sum(-1)[live].mean()), float(weights[..., 0][live].mean())


@pytest.mark.parametrize("written_out", [False, True])
@pytest.mark.parametrize(
    "mask",
    [None, regard.prefix(3), regard.window(3, side="both"), regard.call.masks.strided(2), regard.lengths(ids(7, 4))],
)
def test_shares_are_those_of_the_dense_map(mask: regard.Mask | None, written_out: bool) -> None:
    dense = None if mask is None else mask.dense(Sizes((B,), H, H, T, T, True))
    seen = watched(Attention(written_out=written_out), inputs(), mask=dense)
    facts = facts_of(seen.calls[0])
    later, first = dense_shares(seen.maps[0].dense().double())
    assert facts.later == pytest.approx(later, abs=2e-6)
    assert facts.first == pytest.approx(first, abs=2e-6)
    assert facts.mask.of_weights == written_out


def test_rows_that_a_model_spreads_evenly_have_no_key() -> None:
    keep = torch.tensor([[True] * T, [False, False, True, True, True, True, True]])
    allowed = keep[:, None, None] & torch.ones(T, T, dtype=torch.bool).tril()
    for mask in (allowed, torch.zeros(B, 1, T, T).masked_fill(~allowed, -1e9)):
        facts = facts_of(watched(Attention(), inputs(), mask=mask).calls[0])
        assert (facts.later, facts.no_key, facts.rows) == (0.0, 2, 2 * T)


def test_what_was_kept_of_a_call_is_all_that_can_be_told() -> None:
    seen = watching(Attention(), keep="summary")(inputs())
    with pytest.raises(regard.RegardError, match="nothing was kept"):
        facts_of(seen.calls[0])
    assert [finding.severity for finding in seen.audit()] == ["info"]
    assert "mask:" not in str(seen.report())


def test_the_report_says_what_arrived() -> None:
    model = nn.ModuleDict({"one": Attention(), "two": Attention()})
    with torch.no_grad(), regard.watch(model) as seen:
        model["one"](inputs(), is_causal=True)
        model["two"](inputs())
        model["two"](inputs(), mask=torch.ones(T, T, dtype=torch.bool).triu(1))
    lines = str(seen.report()).splitlines()
    assert lines[2].strip().startswith("mask: causal; weight: 0 % on later positions, ")
    assert lines[4].strip().startswith("mask: none; weight: ")
    assert lines[4].endswith("; 1 of 2 calls")
    assert lines[5].strip().startswith("mask: inverted; weight: 100 % on later positions")
    assert "2 of 14 rows without a key" in lines[5]


def test_of_thousands_of_calls_the_report_looks_into_some(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Attention()
    with torch.no_grad(), regard.watch(model) as seen:
        for length in range(1, 41):
            model(inputs(length))
    looked: list[int] = []
    read = facts.facts_of

    def counted(call: Any, **options: Any) -> Any:
        looked.append(call.index)
        return read(call, **options)

    monkeypatch.setattr(facts, "facts_of", counted)
    assert "; read from 16 of 40 calls" in str(seen.report())
    assert len(looked) == 16
    assert (looked[0], looked[-1]) == (0, 39)


def reasons(found: Iterable[Finding]) -> list[tuple[str, str]]:
    return [(one.reason, one.path) for one in found if one.severity != "info"]


def test_findings_of_a_causal_model() -> None:
    seen = watched(Attention(), inputs())
    assert not seen.audit()
    found = seen.audit(causal=True)
    assert [(one.reason, one.severity, one.path, one.call) for one in found] == [("future", "error", "", 0)]
    assert found[0].numbers["share"] == pytest.approx(dense_shares(seen.maps[0].dense().double())[0], abs=1e-5)
    assert not watched(Attention(), inputs(), is_causal=True).audit(causal=True)
    prefix = regard.prefix(3).dense(Sizes((B,), H, H, T, T, True))
    assert [one.severity for one in watched(Attention(), inputs(), mask=prefix).audit(causal=True)] == ["info"]


def test_a_chunk_after_a_cache_must_not_be_causal_from_the_first_key() -> None:
    found = watched(Attention(), inputs(3), inputs(7), is_causal=True).audit()
    assert reasons(found) == [("causal from the first key", "")]
    # The free places of a static cache are 0, and there it is right.
    memory = torch.cat([inputs(3), torch.zeros(B, 4, D)], 1)
    assert not watched(Attention(), inputs(3), memory, is_causal=True).audit(causal=True)
    # A single query sees all keys, whatever the flag says.
    assert not watched(Attention(), inputs(1), inputs(7)).audit(causal=True)


def test_findings_of_padding() -> None:
    keep = torch.arange(T) < ids(7, 4)[:, None]
    stack = nn.Sequential(*(Attention(heads=1) for _ in range(3)))
    with torch.no_grad(), regard.watch(stack) as seen:
        for layer, mask in zip(stack, (keep, torch.ones_like(keep), keep), strict=True):
            layer(inputs(), mask=mask[:, None, None])
    found = seen.audit()
    assert [(one.reason, one.severity, one.path) for one in found] == [("padding", "warning", "1")]
    found = seen.audit(padding=keep)
    assert [(one.reason, one.severity, one.path) for one in found] == [("padding", "error", "1")]
    assert "leave out for nn.MultiheadAttention" in found[0].remedy  # whose True hides a key
    with pytest.raises(regard.RegardError, match="bool tensor"):
        seen.audit(padding=keep.long())


def test_rows_without_a_key() -> None:
    keep = torch.arange(T) >= ids(0, 3)[:, None]
    mask = keep[:, None, None] & torch.ones(T, T, dtype=torch.bool).tril()
    assert [one.severity for one in watched(Attention(), inputs(), mask=mask).audit(padding=keep)] == ["info"]
    mask[0, :, 4] = False
    found = watched(Attention(), inputs(), mask=mask).audit(padding=keep)
    assert [(one.reason, one.severity) for one in found] == [("no key", "error")]
    assert found[0].numbers["rows"] == 4
    found = watched(Attention(), inputs(), mask=mask).audit()
    assert [(one.reason, one.severity) for one in found] == [("no key", "warning")]


@pytest.mark.parametrize("causal", [None, True])
def test_a_last_token_that_does_not_see_itself_is_named(causal: bool | None) -> None:
    """A class token behind padded words (mlfoundations/open_clip, issue 549): its row was a column short."""
    keep = torch.nn.functional.pad(torch.arange(T - 1) < ids(6, 3)[:, None], (0, 1), value=True)
    mask = torch.ones(T, T, dtype=torch.bool).tril().repeat(B, 1, 1, 1)
    mask[:, 0, -1] = keep
    assert list(watched(Attention(), inputs(), mask=mask).audit(causal=causal).faults) == []
    mask[:, 0, -1, -1] = False
    (found,) = watched(Attention(), inputs(), mask=mask).audit(causal=causal).faults
    assert (found.reason, found.severity, found.numbers["rows"]) == ("itself hidden", "warning", 2)


def test_findings_are_gathered_by_module_and_the_gravest_comes_first() -> None:
    with torch.no_grad(), regard.watch(model := Attention()) as seen:
        for _ in range(3):
            model(inputs())
    found = seen.audit(causal=True)
    assert [(one.call, one.numbers["calls"]) for one in found] == [(0, 3)]
    assert "and 2 more" in str(found[0])


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-1.0, 0.0), (-10000.0, 0.0)])
def test_a_mask_that_is_added_to_the_scores_hides_nothing_and_is_named(low: float, high: float) -> None:
    """Source: huggingface/transformers PR 41443, vllm-project/speculators#691."""

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            keep = torch.ones(T, T, dtype=torch.bool).tril()
            return sdpa(x, x, x, attn_mask=torch.where(keep, high, low))

    seen = watching(Model())(torch.randn(1, 2, T, 4))
    assert f"mask: none; {low:g} and {high:g} are added to the scores; weight: " in str(seen.report())
    if low > -10:
        finding = next(one for one in seen.audit(causal=True) if one.reason == "future")
        assert f"the mask that arrived is none; {low:g} and {high:g} are added to the scores" in finding.says


CHANGES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "bool": lambda scores, keep: scores + keep,
    "first": lambda scores, keep: keep.float() + scores,
    "padding": lambda scores, keep: scores.add_(keep[2:3].long()),
    "times": lambda scores, keep: scores * keep,
    "times 0/1": lambda scores, keep: (keep.float() * scores).float(),
    "baddbmm": lambda scores, keep: torch.baddbmm(keep.float(), scores.a, scores.b),  # type: ignore[attr-defined]
    "both": lambda scores, keep: scores * keep.float() - 1e4 * (1 - keep.float()),
    "bias": lambda scores, keep: scores + keep / 2,
    "no padding": lambda scores, keep: scores + torch.zeros(T),
}


@pytest.mark.parametrize("how", CHANGES)
def test_a_mask_that_changes_written_out_scores_hides_nothing_and_is_named(how: str) -> None:
    @parts(lambda: {"q": nn.Linear(4, 4), "k": nn.Linear(4, 4)})
    def Model(self: Any, x: Tensor) -> Tensor:
        q, k = self.q(x), self.k(x)
        scores: Any = q @ k.mT
        scores.a, scores.b = q, k.mT
        return CHANGES[how](scores, torch.ones(T, T, dtype=torch.bool).tril()).softmax(-1) @ x

    seen = watching(Model())(torch.randn(2, T, 4))
    clause = "the scores are multiplied by 0 and 1" if "times" in how else "0 and 1 are added to the scores"
    said = {"both": "causal (read", "bias": "none (read", "no padding": "none (read"}.get(how, f"none; {clause} (read")
    assert f"mask: {said} from the weights)" in str(seen.report())
