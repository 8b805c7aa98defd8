"""Processes that `torchrun` restarts find one another, instead of the addresses of dead processes.

The `torchrun` of torch 2.13 keeps one store for all restarts. Ranks leave their addresses there under names that are
the same for every start (pytorch/pytorch#135712), so restarted ranks connect to dead ones. Here the ranks of one
start first agree on a name for this start.
"""

import json
import os
import time
import uuid
from typing import Any

import torch

from regard.errors import RendezvousError

PATIENCE_SECONDS = 1800.0
"""How long a rank waits for the others."""
PAUSE_SECONDS = 0.02
"""The pause between two looks into the store."""


def meet(device: torch.device) -> None:
    """Join the processes of this start, if `torchrun` started them and this process has not joined them yet.

    Raises:
        RendezvousError: the others did not come within half an hour.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or torch.distributed.is_initialized():
        return
    distributed: Any = torch.distributed  # the type hints of torch do not know its stores
    distributed.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", store=common_store(), rank=own_rank(), world_size=world_size()
    )


def own_rank() -> int:
    """The number of this process among those that `torchrun` started; 0 if it did not start this one."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """How many processes `torchrun` started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def was_restarted() -> bool:
    """Whether `torchrun` had started this process before, and another of them, or this one, had died."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def common_store() -> Any:
    """A `torch.distributed.Store` that the processes of this start share, and no other start.

    Raises:
        RendezvousError: the others did not come within half an hour.
    """
    distributed: Any = torch.distributed
    rank, count = own_rank(), world_size()
    is_host = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and rank == 0
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # torch's own variable; torch's builds for Windows lack this library, and a store asks for it all the same.
    has_libuv = os.environ.get("USE_LIBUV", "0" if os.name == "nt" else "1") == "1"
    store = distributed.TCPStore(address, port, count, is_master=is_host, wait_for_workers=False, use_libuv=has_libuv)
    return distributed.PrefixStore(agree(store, rank, count), store)


def agree(store: Any, rank: int, world_size: int) -> str:
    """A name on which all ranks of this start agree, and which no other start has.

    Every rank writes into the store that it is here, with a random name of its own. Rank 0 writes a list of the names
    that it sees, together with a random name for the start. A rank that finds its own name in the list accepts the
    name of the start and confirms it. Names that dead ranks left behind do no harm: no living rank accepts a list that
    has such a name in its place.

    Args:
        store: the `torch.distributed.Store` that the ranks share; it may hold entries of earlier starts.
        rank: the number of this process.
        world_size: the number of processes.

    Raises:
        RendezvousError: the others did not come within half an hour.
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
    raise RendezvousError(
        f"rank {rank} waited {PATIENCE_SECONDS:.0f} seconds for the other {world_size - 1} ranks: see why they did not "
        "start, and start all of them again"
    )
