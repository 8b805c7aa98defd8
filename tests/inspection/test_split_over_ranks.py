"""Parameters that are split over ranks: a rank has its own heads, and a question about all of them is refused."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import regard
from regard.errors import NotSeenError
from regard.watching import compare, head_table, relevance, rollout
from regard.watching.observed import OF_ONE_RANK
from tests.modules import parts, watching

REFUSED = "would be about a part of the heads: the parameters of 0 are split over 2 ranks"


@parts(lambda: {name: nn.Linear(16, 16) for name in ("q", "k", "v", "o")})
def Attend(self: Any, x: Tensor) -> Tensor:
    q, k, v = (one(x).unflatten(-1, (-1, 4)).transpose(1, 2) for one in (self.q, self.k, self.v))
    return self.o(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@pytest.fixture
def two_ranks() -> Iterator[DeviceMesh]:
    from torch.testing._internal.distributed.fake_pg import FakeStore  # torch's own ranks that say nothing

    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
def test_heads_of_one_rank_are_named_and_answer_for_themselves(two_ranks: DeviceMesh) -> None:
    plan = {"0.q": ColwiseParallel(), "0.k": ColwiseParallel(), "0.v": ColwiseParallel(), "0.o": RowwiseParallel()}
    model = parallelize_module(nn.Sequential(Attend()).eval(), two_ranks, plan)
    with regard.watch(model, values=True, gradients=True) as seen:
        model(torch.randn(1, 5, 16)).sum().backward()
    assert seen["0"].shape == (1, 2, 5, 5)
    assert OF_ONE_RANK.format(2) in str(seen.report())
    for ask in (
        lambda: rollout(seen, -1),
        lambda: head_table(seen),
        lambda: compare(seen, seen),
        lambda: relevance(seen),
    ):
        with pytest.raises(NotSeenError, match=REFUSED):
            ask()


@pytest.mark.filterwarnings("ignore")
def test_parameters_that_are_gathered_to_run_give_all_heads(two_ranks: DeviceMesh) -> None:
    model = nn.Sequential(Attend()).eval()
    fully_shard(model[0], mesh=two_ranks)
    fully_shard(model, mesh=two_ranks)
    seen = watching(model, context=nullcontext)(torch.randn(1, 5, 16))
    assert seen["0"].shape == (1, 4, 5, 5)
    assert "rank" not in str(seen.report())
    head_table(seen)
