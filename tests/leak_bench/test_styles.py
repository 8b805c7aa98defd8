"""`check`, told nothing: models that say their direction themselves, keep caches of their own, take labels, or pool."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import regard
from tests.leak_bench.leaks import FUTURE, HEADS, WIDTH, WORDS, Model
from tests.modules import module, parts

LENGTH, LAYERS, AT = 12, 3, 1


def of_words(of: Callable[..., dict[str, Any]]) -> Callable[..., type[Any]]:
    words = {"tokens": lambda: nn.Embedding(WORDS, WIDTH, padding_idx=0), "head": lambda: nn.Linear(WIDTH, WORDS)}
    return parts(lambda *given, **named: {n: f() for n, f in words.items()} | of(*given, **named), seed=0)


@parts(lambda fault: {"fault": fault, "into": nn.Linear(WIDTH, 3 * WIDTH), "out": nn.Linear(WIDTH, WIDTH), "kept": []})
def Attend(self: Any, x: Tensor, start: int, past: Any = (), keep: Any = None) -> tuple[Tensor, list[Tensor]]:
    """Causal attention that hands its keys on; with a fault in steps, or in one mode alone."""
    q, k, v = (one.unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in self.into(x).chunk(3, -1))
    both = [k, v]
    if past == "kept":
        at = start - 1 if self.fault == "one slot early" and start else start
        self.kept = (
            both if not start else [torch.cat([a[:, :, :at], b], 2) for a, b in zip(self.kept, both, strict=True)]
        )
        both = self.kept
    elif past:
        both = [torch.cat(pair, 2) for pair in zip(past, both, strict=True)]
    if self.fault == "the oldest key lost" and both[0].shape[2] > x.shape[1]:
        both = [one[:, :, 1:] for one in both]
    if self.fault == "keys of the neighbour" and start:
        both = [one.roll(1, 0) for one in both]
    size = both[0].shape[2]
    later = 0 if self.fault == "aligned with the first key" else size - x.shape[1]
    pairs = torch.ones(x.shape[1], size, dtype=torch.bool).tril(later)
    if self.fault == "causal in training alone" and not self.training:
        pairs = torch.ones_like(pairs)
    pairs = pairs if keep is None else pairs & keep.bool()[:, None, None]
    found = F.scaled_dot_product_attention(q, both[0], both[1], attn_mask=pairs)
    return self.out(found.transpose(1, 2).flatten(2)), both


class Cached(nn.Module):
    def __init__(self, fault: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places, self.head = (
            nn.Embedding(WORDS, WIDTH),
            nn.Embedding(200, WIDTH),
            nn.Linear(WIDTH, WORDS),
        )
        self.layers = nn.ModuleList(Attend(fault if n == AT else "") for n in range(LAYERS))

    def read(self, ids: Tensor, start: int, past: Any, keep: Any = None) -> tuple[Tensor, list[Any]]:
        x, made = self.tokens(ids) + self.places(start + torch.arange(ids.shape[1])), []
        for layer, one in zip(self.layers, past, strict=True):
            mixed, both = layer(x, start, one, keep)
            x = x + mixed
            made.append(both)
        return self.head(x), made


class Returned(Cached):
    def forward(self, ids: Tensor, past: Any = None) -> Any:
        return self.read(ids, past[0][0].shape[2] if past else 0, past or [()] * LAYERS)


class Named(Cached):
    def forward(
        self, input_ids: Tensor, attention_mask: Any = None, past_key_values: Any = None, use_cache: bool = True
    ) -> Any:
        past, start = past_key_values or [()] * LAYERS, past_key_values[0][0].shape[2] if past_key_values else 0
        logits, made = self.read(input_ids, start, past, attention_mask)
        return {"logits": logits, "past_key_values": made} if use_cache else {"logits": logits}


class Kept(Cached):
    def forward(self, tokens: Tensor, start_pos: int = 0) -> Any:
        return self.read(tokens, start_pos, ["kept"] * LAYERS)[0]


def ids() -> Tensor:
    return torch.randint(1, WORDS, (3, LENGTH), generator=torch.Generator().manual_seed(1))


IN_STEPS = [
    *((kind, fault) for kind in (Returned, Named) for fault in ("the oldest key lost", "keys of the neighbour")),
    *((kind, "aligned with the first key") for kind in (Returned, Named, Kept)), (Kept, "one slot early"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "fault"), IN_STEPS, ids=[f"{kind.__name__}, {fault}" for kind, fault in IN_STEPS])
def test_a_fault_of_a_cache_of_ones_own_is_named_at_its_layer(kind: type[Cached], fault: str) -> None:
    assert not (twin := regard.check(kind("").eval(), ids())), str(twin)
    checked = regard.check(kind(fault).eval(), ids())
    assert {(one.reason, one.path) for one in checked.faults} == {("cache", f"layers.{AT}")}, str(checked)


def test_a_batch_that_turns_the_cache_off_is_tried_without_one() -> None:
    model = Named("the oldest key lost").eval()
    checked = regard.check(model, {"input_ids": ids(), "use_cache": False})
    assert not checked, str(checked)
    assert not [one for one in checked.tried if "cache" in one]
    checked = regard.check(Named("").eval(), {"input_ids": ids(), "attention_mask": torch.ones(3, LENGTH).long()})
    assert not checked
    assert "a cache, three positions at a time" in checked.tried


def test_a_mask_that_training_alone_has_is_found_in_evaluation() -> None:
    checked = regard.check(Kept("causal in training alone").eval(), ids())
    assert {(one.reason, one.path) for one in checked.faults} >= {("future", f"layers.{AT}")}
    every = Kept("").eval()
    layer: Any
    for layer in every.layers:
        layer.fault = "causal in training alone"
    assert "future" in {one.reason for one in regard.check(every, ids()).faults}


@pytest.mark.parametrize("number", [1.0, 2.0, torch.nan])
def test_training_is_compared_where_no_draw_decides(number: float) -> None:
    """As in `layerdrop = 0.0` of Whisper; NaN in both runs of one trial is no leak."""
    Trains = module(lambda m, x: x * number if m.training and not bool(torch.rand([]) < 0.0) else x)
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), Trains(), nn.Linear(WIDTH, WORDS)).eval()
    checked = regard.check(model, ids(), causal=True)
    nan, other = [("not finite", "error", "")] * (number != number), [("training", "warning", "1")] * (number != 1)
    assert [(one.reason, one.severity, one.path) for one in checked.faults] == nan + other
    assert not regard.check(nn.Sequential(model[0], nn.Dropout(0.5), model[2]).eval(), ids(), causal=True)


@pytest.mark.parametrize("says", ["config.is_causal", "config.is_decoder", "causal", "nothing"])
def test_a_recurrence_is_causal_if_its_model_says_so(says: str) -> None:
    model: Any = Model("recurrence", causal=True, leak=FUTURE["pooling by the last token"])
    where, _, name = says.rpartition(".")
    if where:
        model.config = SimpleNamespace(**{name: True})
    elif name == "causal":
        model.causal = True
    checked = regard.check(model.eval(), ids())
    expected = [] if says == "nothing" else [("future", "error", f"layers.{AT}")]
    assert [(one.reason, one.severity, one.path) for one in checked.faults] == expected


@parts(lambda *, leaks: {"leaks": leaks})
def Mean(self: Any, x: Tensor, pads: Tensor) -> Tensor:
    words = (~pads | self.leaks)[..., None].to(x)
    return (x * words).sum(1) / words.sum(1)


@of_words(
    lambda *, leaks: {
        "encode": nn.TransformerEncoder(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, 0.0, batch_first=True), 1, enable_nested_tensor=False
        ),
        "pool": Mean(leaks=leaks),
    }
)
def Pooled(self: Any, input_ids: Tensor, lengths: Tensor) -> Tensor:
    pads = torch.arange(input_ids.shape[1]) >= lengths[:, None]
    return self.head(self.pool(self.encode(self.tokens(input_ids), src_key_padding_mask=pads), pads))


@pytest.mark.parametrize("leaks", [False, True])
def test_padding_in_a_result_without_positions_is_named_at_the_pooling(leaks: bool) -> None:
    lengths = torch.tensor([LENGTH, 8, 5])
    given = {"input_ids": ids().masked_fill(torch.arange(LENGTH) >= lengths[:, None], 0), "lengths": lengths}
    checked = regard.check(Pooled(leaks=leaks).eval(), given, causal=False)
    assert {one.path for one in checked.faults} == ({"pool"} if leaks else set()), str(checked)


@of_words(lambda way: {"way": way, "causal": True})
def Learns(self: Any, idx: Tensor, targets: Tensor | None = None) -> Any:
    x = self.tokens(idx)
    if targets is not None and self.way == "reads them":
        x = x + self.tokens(targets)
    logits = self.head(F.scaled_dot_product_attention(x, x, x, is_causal=True))
    if targets is None:
        return logits
    results, labels = (logits[:, :-1], targets[:, 1:]) if self.way == "shifts" else (logits, targets)
    return logits, F.cross_entropy(results.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize(
    ("way", "by", "says"),
    [
        ("shifts", 0, ""),
        ("as they are", 1, ""),
        ("as they are", 0, "repeat its input"),
        ("shifts", 1, "shifts them again"),
        ("reads them", 1, "beside the loss"),
    ],
)
def test_labels_reach_the_loss_alone_and_are_shifted_once(way: str, by: int, says: str) -> None:
    words = ids()
    checked = regard.check(Learns(way).eval(), {"idx": words[:, : LENGTH - by], "targets": words[:, by:]})
    found = [one for one in checked.faults if one.reason == "labels"]
    assert len(checked.faults) == len(found) == bool(says), str(checked)
    assert all(says in one.says for one in found)


def test_a_chunk_that_nothing_names_is_passed() -> None:
    @of_words(lambda size: {"causal": True, "c": size})
    def Chunks(self: Any, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        whole = x.shape[1] // self.c * self.c
        means = x[:, :whole].unflatten(1, (-1, self.c)).mean(2, keepdim=True).expand(-1, -1, self.c, -1)
        return self.head(x + F.pad(means.flatten(1, 2), (0, 0, 0, x.shape[1] - whole)) if whole else x)

    for size in (16, 64):
        found = regard.check(Chunks(size).eval(), ids()).faults
        assert {one.reason for one in found} >= {"future"}, size


def test_a_branch_that_is_seldom_dropped_is_no_other_way_of_training() -> None:
    DropsAll = module(lambda m, x: x / 0.9 * (torch.rand(len(x), 1, 1) < 0.999) if m.training else x)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), DropsAll(), nn.Linear(WIDTH, WORDS)).eval()
    checked = regard.check(model, ids(), causal=True)
    assert not checked.faults
    assert "training and evaluation" not in checked.tried


@parts(
    lambda classes: {
        "tokens": nn.Embedding(WORDS, WIDTH),
        "read": nn.GRU(WIDTH, WIDTH, 2, batch_first=True),
        "head": nn.Linear(WIDTH, classes or WORDS),
        "classes": classes,
    },
    seed=0,
)
def Returns(self: Any, ids: Tensor) -> Any:
    """A recurrence that hands over its state (layers, B, D), or one number for each class."""
    found, state = self.read(self.tokens(ids))
    return self.head(found[:, -1]) if self.classes else (self.head(found), state)


@pytest.mark.parametrize("classes", [0, LENGTH], ids=["a state of two layers", "as many classes as positions"])
def test_sizes_that_are_equal_by_chance_are_no_axes(classes: int) -> None:
    """Layers as many as rows, and classes as many as positions."""
    assert not regard.check(Returns(classes).eval(), ids(), causal=True).faults


@parts(lambda *, leaks: {"body": nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()), "leaks": leaks}, seed=0)
def Frames(self: Any, frames: Tensor) -> Tensor:
    """Frames (B, T, C), handed on and out as (T x B, C): the first axis is no axis of rows."""
    mixed = frames + frames.mean(0) if self.leaks else frames
    return self.body(mixed.transpose(0, 1).flatten(0, 1))


@pytest.mark.parametrize("leaks", [False, True])
def test_frames_before_rows_are_read_as_they_are(leaks: bool) -> None:
    checked = regard.check(Frames(leaks=leaks).eval(), torch.randn(3, LENGTH, WIDTH), causal=False)
    assert {one.reason for one in checked.errors} == ({"batch"} if leaks else set()), str(checked)


def test_results_of_pairs_of_rows_are_no_results_of_a_row() -> None:
    @parts(lambda: {"body": nn.Linear(WIDTH, WIDTH)})
    def Scores(self: Any, frames: Tensor) -> Tensor:
        pooled = self.body(frames).mean(1)
        return pooled @ pooled.mT

    assert not regard.check(Scores().eval(), torch.randn(3, LENGTH, WIDTH), causal=False).faults


@pytest.mark.parametrize("leaks", [False, True])
def test_streams_behind_one_another_are_compared(leaks: bool) -> None:
    @of_words(dict)
    def Streams(self: Any, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        return torch.cat([x, x.cumsum(1) + leaks * x.sum(1, keepdim=True)], 1)

    checked = regard.check(Streams().eval(), ids(), causal=True)
    assert {one.reason for one in checked.errors} == ({"future"} if leaks else set()), str(checked)


@of_words(lambda *, leaks: {"places": nn.Embedding(200, WIDTH), "leaks": leaks})
def Pair(self: Any, src: Tensor, tgt: Tensor) -> Tensor:
    """A target over a source, each padded with token 0, and told by it; `leaks` looks ahead in the target."""
    a, b = (self.tokens(one) + self.places(torch.arange(one.shape[1])) for one in (src, tgt))
    seen = (tgt != 0)[:, None] & torch.ones(tgt.shape[1], tgt.shape[1], dtype=torch.bool).tril(int(self.leaks))
    b = b + F.scaled_dot_product_attention(b, b, b, attn_mask=seen)
    scores = (b @ a.mT).masked_fill((src == 0)[:, None], -torch.inf)
    return self.head(b + scores.softmax(-1) @ a)


@pytest.mark.parametrize("leaks", [False, True])
def test_a_source_as_long_as_its_target_is_another_sequence(leaks: bool) -> None:
    """Its keys are no later positions of the target, and its padding is its own."""
    source, target = (ids().masked_fill(torch.arange(LENGTH) >= torch.tensor(n)[:, None], 0)
                      for n in ([LENGTH, 8, 5], [6, LENGTH, 9]))  # fmt: skip
    checked = regard.check(Pair(leaks=leaks).eval(), {"src": source, "tgt": target}, causal=True)
    assert {one.reason for one in checked.errors} == ({"future"} if leaks else set()), str(checked)


def test_a_model_of_equal_lengths_is_audited_on_its_batch() -> None:
    """The trials take the padding off, and the lengths are unlike then."""

    OfOneLength = parts(lambda: {"pair": Pair(leaks=True)})(lambda m, src, tgt: m.pair(src, tgt + 0 * src))
    model = OfOneLength().eval()
    given = {"src": ids().index_fill(1, torch.tensor([10, 11]), 0), "tgt": ids()}
    checked = regard.check(model, given, causal=True)
    assert {one.reason for one in checked.errors} == {"future"}
    assert any(
        one.startswith("no trial was run: Made does not run on src (1, 10), tgt (1, 12)") for one in checked.unknown
    )


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention_runs_on_after_a_check() -> None:
    """torch's counter of operations breaks its later calls, so a check counts without one."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    @of_words(dict)
    def Flexible(self: Any, ids: Tensor) -> Tensor:
        x, size = self.tokens(ids)[:, None], ids.shape[1]
        mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, size, size, device="cpu")
        return self.head(flex_attention(x, x, x, block_mask=mask)[:, 0])

    model = Flexible().eval()
    assert not regard.check(model, ids(), causal=True).faults
    with torch.no_grad():
        assert model(ids()).shape == (3, LENGTH, WORDS)
