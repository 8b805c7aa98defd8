"""The ranks of a start agree on a name, whatever the ranks of earlier starts left behind."""

import os
import threading
import time
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from regard.errors import RendezvousError
from regard.training.distributed import rendezvous
from regard.training.distributed.rendezvous import agree


@pytest.fixture(autouse=True)
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that do not agree fail instead of waiting for minutes."""
    monkeypatch.setattr(rendezvous, "PATIENCE_SECONDS", 5.0)


def start(store: torch.distributed.Store, late: int, world_size: int = 3) -> list[str]:
    """What each rank was told; one of them comes late."""
    found = [""] * world_size

    def act(rank: int) -> None:
        time.sleep(0.2 if rank == late else 0.0)
        found[rank] = agree(store, rank, world_size)

    threads = [threading.Thread(target=act, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_every_start_has_a_name_of_its_own() -> None:
    store = HashStore()
    names = [start(store, late) for late in (0, 2, 1, 0, 2)]
    assert all(len(set(told)) == 1 for told in names)
    assert len({told[0] for told in names}) == len(names)


@pytest.mark.parametrize(("said", "has_libuv"), [(None, os.name != "nt"), ("0", False)])
def test_a_store_without_libuv(said: str | None, has_libuv: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's builds for Windows have none."""
    variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if said is None:
        monkeypatch.delenv("USE_LIBUV", raising=False)
    else:
        monkeypatch.setenv("USE_LIBUV", said)
    store: Any = rendezvous.common_store()
    store.set("a", "1")
    assert (store.get("a"), store.underlying_store.libuvBackend) == (b"1", has_libuv)


def test_one_rank_waits_for_nobody() -> None:
    assert agree(HashStore(), 0, 1)


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_do_not_come_are_not_waited_for_forever(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    start(store, 0)
    monkeypatch.setattr(rendezvous, "PATIENCE_SECONDS", 0.1)
    with pytest.raises(RendezvousError, match=f"rank {rank} waited"):
        agree(store, rank, 3)
