"""What the signatures say of shapes is checked in every test: of parameters before a call, of its result after it."""

from dataclasses import dataclass
from typing import Any

import jaxtyping
import pytest
import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.nn import FeedForward

beartype = pytest.importorskip("beartype")


@pytest.fixture
def called() -> list[str]:
    return []


@pytest.fixture
def weigh(called: list[str]) -> Any:
    @jaxtyping.jaxtyped(typechecker=beartype.beartype)
    def weigh(
        weights: Float[Tensor, "*b t s"], values: Float[Tensor, "*b s d"], names: "dict[str, Int[Tensor, ''] | None]"
    ) -> tuple[Float[Tensor, "*b t d"], list[int]]:
        called.append("weigh")
        return (weights @ values)[..., : 9 if not names else -1], [len(names)]

    return weigh


@pytest.mark.parametrize(
    ("weights", "values", "names"),
    [
        (torch.ones(4, 3).int(), torch.ones(3, 5), {}),
        (torch.ones(3), torch.ones(3, 5), {}),
        (torch.ones(4, 3), torch.ones(1, 5), {}),
        (torch.ones(2, 4, 3), torch.ones(1, 3, 5), {}),
        (torch.ones(4, 3), torch.ones(3, 5), {"a": 3}),
        ("ones", torch.ones(3, 5), {}),
    ],
    ids=["a dtype", "an axis less", "an axis of two lengths", "other leading axes", "in quotes", "no tensor"],
)
def test_a_wrong_parameter_ends_the_call_before_it_begins(
    weigh: Any, called: list[str], weights: Any, values: Any, names: Any
) -> None:
    with pytest.raises(beartype.roar.BeartypeCallHintParamViolation):
        weigh(weights, values, names)
    assert called == []


def test_a_result_of_another_length_than_the_parameters_say_is_refused(weigh: Any, called: list[str]) -> None:
    with pytest.raises(beartype.roar.BeartypeCallHintReturnViolation):
        weigh(torch.ones(4, 3), torch.ones(3, 5), {"a": None})
    assert called == ["weigh"]


def test_each_result_of_the_same_parameters_is_checked() -> None:
    lengths = iter([3, 3, 4, 3, 5])

    @jaxtyping.jaxtyped(typechecker=beartype.beartype)
    def next_of(first: Float[Tensor, " n"], *rest: int, **named: int) -> Float[Tensor, "n n"]:
        return torch.ones(3, next(lengths))

    for _ in range(2):
        next_of(torch.ones(3), 1, 2, last=3)
    with pytest.raises(beartype.roar.BeartypeDoorHintViolation):
        next_of(torch.ones(3), 1, 2, last=3)
    next_of(torch.ones(3), 1, 2, last=3)
    with pytest.raises(beartype.roar.BeartypeDoorHintViolation):
        next_of(torch.ones(3), 1, 2, last=3)


def test_what_a_dataclass_is_given_is_checked() -> None:
    @jaxtyping.jaxtyped(typechecker=beartype.beartype)
    @dataclass(frozen=True)
    class Kept:
        key: Float[Tensor, "s d"]
        value: Float[Tensor, "s e"]

    for _ in range(2):
        Kept(torch.ones(3, 2), torch.ones(3, 4))
        with pytest.raises(beartype.roar.BeartypeCallHintParamViolation):
            Kept(torch.ones(3, 2), torch.ones(2, 4))


def test_our_own_modules_are_checked_unless_a_test_wants_what_a_user_meets(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = FeedForward(3, 2)
    with pytest.raises(beartype.roar.BeartypeCallHintParamViolation):
        layer(torch.ones(4, 3).int())
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(RuntimeError, match="dtype"):
        layer(torch.ones(4, 3).int())
