"""Processes that `torchrun` starts again find one another, and not the addresses that dead ones left.

Torch 2.13's `torchrun` keeps one store for all restarts, in which ranks leave their addresses under names that do
not tell one start from the next (pytorch/pytorch#135712): restarted ranks connect to dead ones. Here the ranks of
a start agree on a name of their own first.
"""

import json
import os
import time
import uuid
from typing import Any

import torch

PATIENCE_SECONDS = 1800.0
PAUSE_SECONDS = 0.02


def meet(device: torch.device) -> None:
    """Join the processes of this start, if `torchrun` started them and none has been joined yet.

    Raises:
        TimeoutError: the others did not come within half an hour.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or torch.distributed.is_initialized():
        return
    distributed: Any = torch.distributed  # whose stores its type hints do not know
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = distributed.TCPStore(address, port, world_size, is_master=False)
    distributed.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=distributed.PrefixStore(agree(store, rank, world_size), store),
        rank=rank,
        world_size=world_size,
    )


def agree(store: Any, rank: int, world_size: int) -> str:
    """A name that all ranks of this start have, and no rank of any other.

    Every rank says that it is here, under a name that it has just made up. The first one lists whom it sees, under a
    new name for all; whoever finds itself in the list takes that name and says so. What dead ranks left is in no list
    that the living accept.

    Args:
        store: what the ranks share, a `torch.distributed.Store`; it may hold what earlier starts left.
        rank: the number of this process.
        world_size: how many there are.

    Raises:
        TimeoutError: the others did not come within half an hour.
    """
    mine, deadline = uuid.uuid4().hex, time.monotonic() + PATIENCE_SECONDS
    others = range(1, world_size)
    while time.monotonic() < deadline:
        if rank == 0:
            here = {str(r): store.get(f"regard/here/{r}").decode() for r in others if store.check([f"regard/here/{r}"])}
            store.set("regard/start", json.dumps({"name": mine, "here": here}))
            if all(store.check([f"regard/agreed/{mine}/{r}"]) for r in others):
                return mine
        else:
            store.set(f"regard/here/{rank}", mine)
            start = json.loads(store.get("regard/start")) if store.check(["regard/start"]) else {"here": {}}
            if start["here"].get(str(rank)) == mine:
                store.set(f"regard/agreed/{start['name']}/{rank}", "")
                return str(start["name"])
        time.sleep(PAUSE_SECONDS)
    raise TimeoutError(f"rank {rank} waited {PATIENCE_SECONDS:.0f} seconds for the other {world_size - 1} ranks")
