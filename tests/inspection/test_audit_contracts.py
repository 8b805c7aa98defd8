"""The facts that arguments, configs and caches tell an audit, and the object that it gives."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention as sdpa

import regard
from regard.errors import ArgumentError, NotKeptError, NotSeenError, ShapeError
from regard.testing import assert_sound
from regard.watching.checks import Checked
from regard.watching.checks.told import PadToken
from tests.modules import module, parts, watching

T, LENGTHS = 9, (9, 6, 4)


def keep(side: str = "right") -> Tensor:
    places, real = torch.arange(T), torch.tensor(LENGTHS)[:, None]
    return places < real if side == "right" else places >= T - real


class Model(nn.Module):
    def __init__(self, mask: Tensor | None = None, **flags: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mask, self.flags = mask, flags
        self.tokens, self.into = nn.Embedding(30, 8, padding_idx=0), nn.Linear(8, 24)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **others: Any) -> Tensor:
        q, k, v = (t.unsqueeze(1) for t in self.into(4 * self.tokens(input_ids)).chunk(3, -1))
        return sdpa(q, k, v, attn_mask=self.mask, **self.flags)


def ids(side: str = "right") -> Tensor:
    found = torch.randint(1, 30, (3, T), generator=torch.Generator().manual_seed(1))
    return found.masked_fill(~keep(side), 0)


def audited(model: nn.Module, told: Any = None, **given: Any) -> Checked:
    seen = watching(model.eval())(**given)
    return seen.audit(**(told or {}))


def reasons(found: Checked) -> list[tuple[str, str]]:
    return [(one.reason, one.severity) for one in found.faults]


def test_an_audit_is_a_sequence_that_is_false_without_a_fault() -> None:
    clean = audited(Model(keep()[:, None, None]), input_ids=ids(), attention_mask=keep())
    assert not clean
    assert not clean.faults
    assert repr(clean).startswith("Model: 1 layer, ")
    assert "nothing found" in repr(clean)
    assert str(clean).splitlines()[0] == repr(clean)
    assert "not asked:" in str(clean)
    found = audited(Model(), input_ids=ids(), attention_mask=keep())
    assert found
    assert (len(found), found[0].reason, [one.reason for one in found]) == (1, "padding", ["padding"])
    assert found.errors == tuple(found)
    assert found.warnings == found.infos == ()


def test_a_finding_has_its_share_an_example_the_row_a_cause_and_a_remedy() -> None:
    model = Model()
    seen = watching(model)(input_ids=ids(), attention_mask=keep())
    (found,) = seen.audit()
    weights, hidden = seen[""].dense()[:, 0], ~keep()
    on_padding = (weights * hidden[:, None]).sum(-1)[keep()]
    assert found.numbers["share"] == pytest.approx(float(on_padding.mean()), abs=1e-6)
    faulty = weights.masked_fill(~(hidden[:, None] & keep()[..., None]), 0.0)
    assert found.example is not None
    at = (found.example.sequence, found.example.query, found.example.key)
    assert found.example.weight == pytest.approx(float(faulty.max()))
    assert at == tuple(int(n) for n in torch.unravel_index(faulty.argmax(), faulty.shape))
    torch.testing.assert_close(found.row, weights[at[:2]])
    assert found.cause == "no padding mask arrived"
    assert "True means attend" in found.remedy
    assert str(found.example) in str(found)


def test_the_record_for_programs() -> None:
    record = json.loads(audited(Model(), input_ids=ids(), attention_mask=keep()).to_json())
    (found,) = record["findings"]
    assert (record["model"], record["layers"], found["reason"], found["example"]["head"]) == ("Model", 1, "padding", 0)
    assert {one["name"] for one in record["questions"] if not one["asked"]} >= {"documents", "window"}


@pytest.mark.parametrize(
    ("mask", "cause"),
    [
        (None, "no padding mask arrived"),
        (~keep()[:, None, None], "the padding mask is upside down"),
        (keep()[:, None, :, None].expand(-1, 1, -1, T), "hides queries in place of keys"),
        (keep()[:1, None, None], "no padding mask arrived"),  # whose first sequence has no padding
        (keep().roll(1, 0)[:, None, None], "the mask of the one before it"),
        (keep().flip(-1)[:, None, None], "the mask is on the other side"),
        (keep()[:, None, None].float(), "0 and 1 are added to the scores"),
    ],
)
def test_the_cause_of_a_wrong_padding_mask(mask: Tensor | None, cause: str) -> None:
    found = audited(Model(mask), input_ids=ids(), attention_mask=keep().long())
    (finding,) = [one for one in found.errors if one.reason == "padding"]
    assert cause in finding.cause


@pytest.mark.parametrize("real", [keep(), keep()[:, None, None]], ids=["(B, S)", "(B, 1, 1, S)"])
@pytest.mark.parametrize(("name", "is_real"), [("attention_mask", True), ("key_padding_mask", False)])
def test_the_name_of_a_mask_tells_its_meaning(name: str, is_real: bool, real: Tensor) -> None:
    given = {name: real if is_real else ~real}
    assert reasons(audited(Model(), input_ids=ids().clamp_min(1), **given)) == [("padding", "error")]
    assert not audited(Model(keep()[:, None, None]), input_ids=ids().clamp_min(1), **given)


class OfFeatures(Model):
    def forward(self, features: Tensor, **others: Any) -> Tensor:  # type: ignore[override]
        q = self.into(features).unsqueeze(1)[..., :8]
        return sdpa(q, q, q, attn_mask=self.mask)


@pytest.mark.parametrize("flags", [keep(), ~keep(), keep()[:, None].long()])
def test_a_mask_of_any_name_is_known_by_the_ids_or_by_its_runs(flags: Tensor) -> None:
    features = torch.randn(3, T, 8)
    for made, given in ((Model, {"input_ids": ids()}), (OfFeatures, {"features": features})):
        found = audited(made(), word_mask=flags, **given)
        assert reasons(found) == [("padding", "error")]
        assert "by word_mask of the model" in found[0].says
        assert not audited(made(keep()[:, None, None]), word_mask=flags, **given)
    # Flags in no runs tell nothing.
    assert not audited(OfFeatures(), word_mask=torch.arange(T).expand(3, T) % 2 == 0, features=features)


def test_padding_by_its_token_where_no_mask_tells_of_any() -> None:
    # (Of a model that is told of no mask, the padding may be meant to be seen, as by the text tower of SigLIP.)
    for given, severity in (({}, "warning"), ({"attention_mask": torch.ones(3, T)}, "error")):
        found = audited(Model(), input_ids=ids("left"), **given)
        assert reasons(found) == [("padding", severity)]
        assert "the runs of padding token 0 at the ends of input_ids" in found[0].says
    # A mask that hides a part of it, or words in its place, is no better; one that hides words besides is believed, and
    # a sequence of padding alone tells nothing.
    place = torch.arange(T)
    for other in (keep("left") | (place == 2), ~keep("left") | (place == 8), keep("left").roll(-1, 1)):
        told = audited(Model(other[:, None, None]), input_ids=ids("left"), attention_mask=other)
        assert reasons(told) == [("padding", "error")], str(told)
        assert "which attention_mask of the model calls words" in told[0].says
    other = keep("left") & (place != 8)
    assert not audited(Model(other[:, None, None]), input_ids=ids("left"), attention_mask=other)
    assert not audited(Model(), input_ids=torch.zeros(3, T, dtype=torch.long))


@pytest.mark.parametrize(
    ("row", "runs", "is_sure"),
    [
        ([0, 0, 5, 6, 7], [1, 1, 0, 0, 0], True),
        ([5, 6, 7, 0, 0], [0, 0, 0, 1, 1], True),
        ([5, 6, 7, 8, 0], [0, 0, 0, 0, 1], False),
        ([0, 0, 5, 0, 7], [1, 1, 0, 0, 0], False),
    ],
)
def test_the_runs_of_the_token_of_padding(row: list[int], runs: list[int], is_sure: bool) -> None:
    found, sure = PadToken(0, False).found(torch.tensor([row]))
    assert (found.long().tolist(), sure) == ([runs], is_sure)


def test_a_token_with_another_meaning_ends_a_text_once() -> None:
    found, sure = PadToken(2, True).found(torch.tensor([[5, 6, 2, 2, 2], [5, 6, 7, 8, 2], [2, 2, 5, 6, 7]]))
    assert found.long().tolist() == [[0, 0, 0, 1, 1], [0, 0, 0, 0, 0], [1, 0, 0, 0, 0]]
    assert not sure


CAUSAL = torch.ones(T, T, dtype=torch.bool).tril()
DOCUMENTS = torch.tensor([[0] * 4 + [1] * 5])
SAME = DOCUMENTS[:, None, :, None] == DOCUMENTS[:, None, None]
TOLD: list[dict[str, Tensor]] = [
    {"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])},
    {"cu_seqlens": torch.tensor([0, 4, 9], dtype=torch.int32)},
    {"document_ids": DOCUMENTS},
    {"seq_idx": DOCUMENTS},
    {"attention_mask": DOCUMENTS + 1},
    {"padding_mask": DOCUMENTS + 1},
]


@pytest.mark.parametrize("told", TOLD, ids=[next(iter(one)) for one in TOLD])
def test_documents_by_the_arguments(told: dict[str, Tensor]) -> None:
    row = ids()[:1]
    found = audited(Model(CAUSAL), input_ids=row, **told)
    assert reasons(found) == [("documents", "error")]
    assert found[0].example is not None
    assert found[0].example.key < 4 <= found[0].example.query
    assert not audited(Model(CAUSAL & SAME), input_ids=row, **told)


def test_arguments_of_no_axis_tell_nothing() -> None:
    none: dict[str, Any] = {"cu_seqlens": torch.tensor(9), "encoder_hidden_states_mask": torch.tensor(True)}
    assert not audited(Model(CAUSAL), input_ids=ids()[:1], **none)


def test_documents_by_the_user() -> None:
    assert reasons(audited(Model(CAUSAL), {"documents": DOCUMENTS}, input_ids=ids()[:1])) == [("documents", "error")]
    assert not audited(Model(CAUSAL & SAME), {"documents": DOCUMENTS}, input_ids=ids()[:1])
    with pytest.raises(ShapeError, match="integer tensor"):
        audited(Model(CAUSAL), {"documents": DOCUMENTS.float()}, input_ids=ids()[:1])


@pytest.mark.parametrize(
    "positions",
    [[1, 1, 1, 0, 1, 2, 3, 4, 5], [0, 0, 0, 0, 1, 2, 3, 4, 5], [7, 6, 5, 0, 0, 1, 2, 3, 4], list(range(9))],
)
def test_positions_of_padding_begin_no_document(positions: list[int]) -> None:
    real = torch.arange(T) > 2
    given = {"attention_mask": real[None], "position_ids": torch.tensor([positions])}
    assert not audited(Model(CAUSAL & real | torch.eye(T, dtype=torch.bool)), input_ids=ids()[:1], **given)


def test_a_user_says_the_direction() -> None:
    assert not audited(Model(is_causal=True), input_ids=ids()[:1])
    found = audited(Model(is_causal=True), {"causal": False}, input_ids=ids()[:1])
    assert reasons(found) == [("causal encoder", "error")]
    assert reasons(audited(Model(), {"causal": True}, input_ids=ids()[:1])) == [("future", "error")]


class WrittenOut(Model):
    def __init__(self, mask: Tensor, *, is_behind: bool = False) -> None:
        super().__init__(mask)
        self.is_behind = is_behind

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **others: Any) -> Tensor:
        q, k, v = self.into(self.tokens(input_ids)).chunk(3, -1)
        scores = q @ k.mT / 8**0.5
        if self.is_behind:
            return (scores.softmax(-1) * self.mask) @ v
        return scores.masked_fill(~self.mask, -torch.inf).softmax(-1) @ v


@pytest.mark.parametrize("kind", [Model, WrittenOut])
def test_masks_that_are_off_by_one_need_no_hint(kind: type[Any]) -> None:
    later = torch.ones(T, T, dtype=torch.bool).tril(1)
    (found,) = audited(kind(later), input_ids=ids()[:1]).errors
    assert (found.reason, found.cause[:32]) == ("future", "the causal mask is off by one (a")


def test_weights_that_are_hidden_after_their_softmax() -> None:
    assert reasons(audited(WrittenOut(CAUSAL, is_behind=True), input_ids=ids()[:1])) == [("row sums", "warning")]
    assert not audited(WrittenOut(CAUSAL), input_ids=ids()[:1])


def test_a_second_stream_of_queries_is_no_cache() -> None:
    @parts(lambda: {"into": nn.Linear(8, 24), "other": nn.Linear(8, 8)}, seed=0)
    def Streams(self: Any, x: Tensor) -> Tensor:
        q, k, v = self.into(x).chunk(3, -1)
        return sdpa(q, k, v, is_causal=True) + sdpa(self.other(x), k, v)

    assert not audited(Streams(), x=torch.randn(2, 5, 8))


def test_a_strict_triangle_needs_no_hint() -> None:
    strict = torch.ones(T, T, dtype=torch.bool).tril(-1)
    strict[0, 0] = True
    (found,) = audited(Model(strict), input_ids=ids()[:1]).errors
    assert found.reason == "itself hidden"
    assert "tril(-1)" in found.cause


def test_arguments_that_the_model_overwrites_are_as_they_were() -> None:
    class Overwrites(Model):
        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **others: Any) -> Tensor:
            found = super().forward(input_ids, attention_mask)
            assert attention_mask is not None
            attention_mask.fill_(True)
            return found

    mask = keep().clone()
    mask[0, 0] = True  # a buffer, which was written before
    assert reasons(audited(Overwrites(), input_ids=ids().clamp_min(1), attention_mask=mask)) == [("padding", "error")]


def test_of_an_unread_part_an_audit_without_errors_refuses_and_with_errors_answers() -> None:
    @parts(lambda: {"into": nn.Linear(8, 24)})
    def OverHeads(self: Any, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.into(x).chunk(3, -1))
        return (q @ k.mT).softmax(1) @ v

    seen = watching(OverHeads())(torch.randn(2, 5, 8))
    (found,) = seen.audit()
    assert (found.reason, found.severity) == ("softmax over the wrong axis", "error")
    assert "axis 1 of scores (2, 2, 5, 5)" in found.says
    with pytest.raises(NotKeptError, match="no single row"):
        _ = found.row
    rnn = nn.GRU(8, 8, batch_first=True)
    seen = watching(rnn)(torch.randn(2, 5, 8))
    with pytest.raises(NotSeenError):
        seen.audit()


def test_dropout_in_evaluation_and_in_training() -> None:
    for is_trained in (False, True):
        model = Model(is_causal=True, dropout_p=0.5).train(is_trained)
        seen = watching(model)(input_ids=ids()[:1])
        assert [one.reason for one in seen.audit().faults] == ([] if is_trained else ["dropout in evaluation"])


def test_the_sequences_of_a_batch_that_attend_to_each_other() -> None:
    class Wrong(nn.Module):
        def __init__(self, *, batch_first: bool) -> None:
            super().__init__()
            self.tokens, self.attention = nn.Embedding(30, 8), nn.MultiheadAttention(8, 2, batch_first=batch_first)

        def forward(self, input_ids: Tensor) -> Tensor:
            x = self.tokens(input_ids)
            return self.attention(x, x, x)[0]

    (found,) = audited(Wrong(batch_first=False), input_ids=ids()).errors
    assert (found.reason, "batch_first=True" in found.remedy) == ("softmax over the wrong axis", True)
    assert not audited(Wrong(batch_first=True), input_ids=ids().clamp_min(1).cumsum(-1) % 30)


def test_a_check_of_a_batch_that_is_padded_on_the_left_says_so() -> None:
    checked = regard.check(Model(), {"input_ids": ids("left").clamp_min(1), "attention_mask": keep("left")})
    assert "padded left" in checked.tried
    assert "padded right" not in checked.tried
    assert {"padding"} == {one.reason for one in checked.errors}


def test_the_picture_of_a_faulty_row() -> None:
    pytest.importorskip("matplotlib")
    (found,) = audited(Model(), input_ids=ids(), attention_mask=keep())
    assert found.example is not None
    (ax,) = regard.views.faulty_row(found).axes
    heights: list[Any] = [bar.get_height() for bar in ax.patches]  # type: ignore[attr-defined]
    assert heights == pytest.approx(found.row.tolist())
    others = {bar.get_facecolor() for n, bar in enumerate(ax.patches) if n != found.example.key}
    assert ax.patches[found.example.key].get_facecolor() not in others


@parts(lambda *, hands_on: {"embedding": nn.Embedding(9, 4), "hands_on": hands_on}, seed=0)
def Tokens(self: Any, ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
    x = self.embedding(ids)[:, None]
    mask = attention_mask[:, None, None].bool() if self.hands_on else None
    return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)[:, 0]


BATCH = {"ids": torch.tensor([[1, 2, 3, 4], [5, 6, 0, 0]]), "attention_mask": torch.tensor([[1] * 4, [1, 1, 0, 0]])}


def test_a_sound_model_passes() -> None:
    assert_sound(Tokens(hands_on=True), BATCH, causal=False)


def test_a_lost_mask_is_told_with_its_module_its_share_and_its_remedy() -> None:
    with pytest.raises(AssertionError) as raised:
        assert_sound(Tokens(hands_on=False), BATCH)
    said = str(raised.value)
    found = regard.check(Tokens(hands_on=False), BATCH)
    assert said.startswith("the attention of Tokens is not sound\nerror: ")
    assert found.errors
    assert found.errors[0].says in said
    assert all(one.remedy in said for one in found.faults)


def test_only_intended_reasons_are_ignored() -> None:
    reasons = {one.reason for one in regard.check(Tokens(hands_on=False), BATCH).faults}
    assert_sound(Tokens(hands_on=False), BATCH, causal=False, ignore=reasons)
    for left in reasons:
        with pytest.raises(AssertionError):
            assert_sound(Tokens(hands_on=False), BATCH, ignore=reasons - {left})


def test_a_check_that_looked_at_nothing_passes_nothing() -> None:
    with pytest.raises(AssertionError, match="not known to be sound: whether it is causal is not known: tell causal="):
        assert_sound(Tokens(hands_on=True), BATCH)
    with pytest.raises(AssertionError, match="no attention was seen"):
        assert_sound(nn.Linear(4, 4), torch.randn(2, 5, 4), causal=False)
    with regard.watch(Tokens(hands_on=True)) as seen:
        Tokens(hands_on=True)(**BATCH)
    assert "nothing found; no attention was seen" in repr(seen.audit())
    wrong: Any
    for wrong in ("no", 1):
        for ask in (lambda of: regard.check(nn.Module(), BATCH, causal=of), lambda of: seen.audit(causal=of)):
            with pytest.raises(ArgumentError, match=f"causal= takes True, False or None, got {wrong!r}"):
                ask(wrong)
    with pytest.raises(ShapeError, match="True = a real token; got torch"):
        regard.check(nn.Module(), BATCH, padding=BATCH["attention_mask"])


def test_both_doors_take_the_same_words() -> None:
    Named = module(
        lambda m, ids, attention_mask=None: m.tokens(ids, torch.ones_like(ids)),
        lambda: {"tokens": Tokens(hands_on=True)},
    )
    keep = BATCH["attention_mask"].bool()
    checked = regard.check(Named(), {"ids": BATCH["ids"]}, causal=False, padding=keep)
    assert {one.reason for one in checked.errors} >= {"padding"}
    documents = torch.tensor([[0, 0, 1, 1], [0, 0, 1, 1]])
    checked = regard.check(Named(), {"ids": BATCH["ids"]}, causal=False, documents=documents)
    assert {one.reason for one in checked.errors} == {"documents"}


def test_a_model_without_inputs_is_refused_as_by_check() -> None:
    with pytest.raises(ArgumentError, match="give a batch"):
        assert_sound(Tokens(hands_on=True))
