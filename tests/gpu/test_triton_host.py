"""The host's work for statistics on a card: operators, waits and launches, for a card that is not there."""

import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard

pytest.importorskip("triton", reason="Triton comes with the builds of torch for CUDA: make interpret")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter launches nothing", allow_module_level=True)

from regard.tensors.triton_use import Launch
from tests.gpu.absent_card import AbsentCard, absent_card
from tests.operators import WAITS, operators_of

pytestmark = pytest.mark.filterwarnings("ignore")
FIVE = ("received", "entropy", "top_keys", "pooled_mean", "pooled_max")
MOST_OPERATORS, MOST_BESIDE = 6, 19
VIEWS = {
    "view", "_unsafe_view", "reshape", "expand", "slice", "select", "unsqueeze", "transpose", "as_strided", "alias",
    "detach", "_reshape_alias", "empty", "empty_strided", "promote_types",
}  # fmt: skip
"""Operators that launch nothing."""


def counted(ask: Callable[[], object]) -> Counter[str]:
    ask()
    return Counter({name: count for name, count in operators_of(ask).items() if name not in VIEWS})


def names_of(card: AbsentCard) -> list[str]:
    return [name for name, _ in card.launched]


MASKS: dict[str, Any] = {
    "none": None, "causal": regard.causal(), "window": regard.window(9), "lengths": regard.lengths(torch.tensor([30])),
    "padding": regard.padding(torch.arange(64)[None] > 3) & regard.causal(),
}  # fmt: skip


@pytest.mark.parametrize("name", MASKS)
def test_few_operators_and_no_wait(name: str) -> None:
    q, k = torch.randn(1, 4, 64, 16).bfloat16(), torch.randn(1, 2, 64, 16).bfloat16()
    questions: dict[str, Callable[[], object]] = {
        "five": lambda: regard.map_of(q, k, mask=MASKS[name]).summary(*FIVE),
        "columns": lambda: regard.map_of(q, k, mask=MASKS[name]).received(),
        "entropy": lambda: regard.map_of(q, k, mask=MASKS[name]).entropy(),
    }
    launches = {
        "five": ["read_rows", "rank_groups", "read_columns", "pool_keys"],
        "columns": ["read_rows", "read_columns"],
        "entropy": ["read_rows"],
    }
    with absent_card(90) as card, torch.no_grad():
        for asked, ask in questions.items():
            seen = counted(ask)
            assert seen.total() <= MOST_OPERATORS, (asked, seen)
            assert not WAITS & set(seen), (asked, seen)
            assert names_of(card) == 2 * launches[asked], asked
            card.launched.clear()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(64, 192)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        return x + F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)


def test_a_summary_as_the_model_runs() -> None:
    """It waits for nothing, and launches two programs and their small ones a layer beside the proof of its row."""
    model, x = nn.Sequential(Layer(), Layer()).bfloat16().eval(), torch.randn(1, 64, 64).bfloat16()

    def watched() -> Any:
        with regard.watch(model, keep="summary") as seen:
            model(x)
        return seen

    with absent_card(90) as card, torch.no_grad():
        plain, seen = counted(lambda: model(x)), counted(watched)
        assert not WAITS & set(seen), seen
        assert names_of(card) == 4 * ["read_rows", "rank_groups", "read_columns", "pool_keys"]
        assert seen.total() - plain.total() <= 2 * MOST_BESIDE, seen - plain
        assert "2 maps of 2 modules" in str(watched().report())


def test_a_kernel_is_kept_for_what_it_was_decided_from() -> None:
    """The launch of a program has one kernel for each alignment; another offset of the mask is another plan."""
    whole = torch.randn(1, 4, 65, 16).bfloat16()
    odd = torch.randn(1 + whole.numel()).bfloat16()[1:].view_as(whole)
    with absent_card(90) as card, torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        made: list[Launch] = []
        real = Launch.__init__

        def watched(self: Launch, *given: Any) -> None:
            real(self, *given)
            made.append(self)

        patch.setattr(Launch, "__init__", watched)
        for at, offset, plans, kernels in ((whole, 3, 1, 1), (whole, 3, 1, 1), (odd, 3, 1, 2), (whole, 4, 2, 1)):
            regard.map_of(at, at, mask=regard.causal(offset)).entropy()
            assert len(made) == plans
            assert len(made[-1].kept) == kernels
            name, given = card.launched[-1]
            assert name == "read_rows"
            assert given[0].data_ptr() == at.data_ptr()
            assert dict(zip(made[-1].program.arg_names, given, strict=True))["upper"] == offset + 1
