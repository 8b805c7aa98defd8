"""Programs of torch.export: their operators are seen, whole and decomposed, by module where modules are kept."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from tests.modules import module

# torch's own passes call what torch has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.made = nn.Linear(8, 24)

    def heads(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.made(x).chunk(3, -1))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.heads(x)
        out = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return out.transpose(1, 2).flatten(2)


class WrittenOut(Fused):
    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.heads(x)
        return ((query @ key.mT).softmax(-1) @ value).transpose(1, 2).flatten(2)


class Ours(Fused):
    def forward(self, x: Tensor) -> Tensor:
        return regard.attention(*self.heads(x), mask=regard.causal()).transpose(1, 2).flatten(2)


Both = module(
    lambda m, x: m.third(m.second(m.first(x))),
    lambda: {"first": Fused(), "second": WrittenOut(), "third": Ours()},
)

FORMS: dict[str, Callable[[Any], Any]] = {
    "as it is": lambda program: program.module(),
    "decomposed": lambda program: program.run_decompositions().module(),
    "with its modules": torch.export.unflatten,
}


@pytest.mark.parametrize("form", FORMS)
def test_the_maps_of_an_exported_program_are_those_of_the_model(form: str) -> None:
    torch.manual_seed(0)
    model, x = Both().eval(), torch.randn(2, 5, 8)
    program = FORMS[form](torch.export.export(model, (x,)))
    with torch.no_grad():
        before = program(x)
        with regard.watch(program) as seen:
            during = program(x)
        with regard.watch(model) as whole:
            model(x)
    assert torch.equal(before, during)
    assert not seen.report().missed
    assert len(seen) == len(whole) == 3
    for weights, expected in zip(seen.maps, whole.maps, strict=True):
        torch.testing.assert_close(weights.dense(), expected.dense(), rtol=0, atol=1e-6)
    names = ["first", "second", "third"] if form == "with its modules" else [""] * 3
    assert [name for name, _ in seen] == names
