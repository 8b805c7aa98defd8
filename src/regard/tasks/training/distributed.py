"""The processes of one training, their communication besides gradients, their devices and precision.

lightning-fabric moves the tensors.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from regard.errors import ArgumentError, needs
from regard.tasks.training.fit_config import Precision
from regard.tensors.torch_private import has_amx

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process as one of the processes of a training."""

    rank: int = 0
    """The number of this process, from 0."""
    world_size: int = 1
    device: torch.device | str = "cpu"
    """The device for exchanged tensors."""

    @classmethod
    def of(cls, fabric: Any) -> "Ranks":
        return cls(fabric.global_rank, fabric.world_size, fabric.device)

    def gather(self, work: Callable[[], Any]) -> list[Any]:
        """The answers of `work` on every rank, in their order. Every rank must call this method, which is a barrier
        too; where one raises an OSError all do, so that none blocks."""
        if self.world_size == 1:
            return [work()]
        answer, failure = None, None
        try:
            answer = work()
        except OSError as error:
            failure = error
        found: list[Any] = [None] * self.world_size
        mine = None if failure is None else (failure.errno, failure.strerror or str(failure), failure.filename)
        torch.distributed.all_gather_object(found, (answer, mine))
        if failure is not None:
            raise failure
        for rank, (_, told) in enumerate(found):
            if told is not None:
                number, text, name = told
                text += f" (on rank {rank})"
                raise OSError(number, text, name) if number else OSError(text)
        return [answer for answer, _ in found]

    def sum(self, values: Tensor) -> Tensor:
        """The sum of a tensor over all ranks; one process returns the tensor itself. Every rank must call this method.
        Fabric's own moves its argument to the device in any case, and Apple's GPUs have no float64."""
        if self.world_size == 1:
            return values
        total = values.to(self.device, copy=True)
        torch.distributed.all_reduce(total)
        return total

    def share_out(self, items: Iterable[T]) -> Iterator[T]:
        """Every `world_size`-th item."""
        return islice(items, self.rank, None, self.world_size)

    def wait_for_the_first(self) -> None:
        """Wait for rank 0, for up to 7 days. Other waits end after half an hour: a silent rank then counts as dead."""
        if self.world_size > 1:
            group = torch.distributed.new_group(backend="gloo", timeout=timedelta(days=7))
            torch.distributed.barrier(group)
            torch.distributed.destroy_process_group(group)


ALONE = Ranks()


def start_fabric(device: str = "auto", precision: Precision = "auto") -> Any:
    """A launched `lightning_fabric.Fabric` for this process, or for all of `torchrun`: each rank has the whole model,
    and gradients are averaged (`DistributedDataParallel`)."""
    with needs("lightning-fabric", extra="train"):
        from lightning_fabric import Fabric
    chosen = find_device(device)
    join_ranks(chosen)
    local, world = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), int(os.environ.get("WORLD_SIZE", 1))
    fabric = Fabric(
        accelerator="gpu" if chosen.type == "cuda" else chosen.type,
        devices=[chosen.index] if world == 1 and chosen.index is not None else local,
        num_nodes=max(world // local, 1),
        strategy="ddp" if world > 1 else "auto",
        precision="bf16-mixed" if agreed_precision(precision, chosen) == "bf16" else "32-true",
    )
    fabric.launch()
    return fabric


def join_ranks(device: torch.device) -> None:
    """Join the other ranks, if `torchrun` started several and this process has not joined them yet."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not torch.distributed.is_initialized():
        torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")


def find_device(name: str) -> torch.device:
    """The named device; "auto" takes a GPU if there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ArgumentError(f"device must be auto, cpu, cuda, cuda:N or mps, got {name!r}") from None
    here = {
        "cpu": True,
        "cuda": (device.index or 0) < torch.cuda.device_count(),
        "mps": torch.backends.mps.is_available(),
    }
    if not here.get(device.type, False):
        raise ArgumentError(f"device {name!r} is not on this machine; use auto or cpu")
    return device


def choose_precision(wanted: Precision, device: torch.device) -> Literal["float32", "bf16"]:
    """With "auto" bf16 on processors with AMX and on newer GPUs, and else float32. Nothing is timed, so that a
    machine always chooses the same. A resumed run keeps its precision."""
    if wanted != "auto":
        return wanted
    if device.type == "cuda":
        return "bf16" if torch.cuda.get_device_capability(device) >= (8, 0) else "float32"
    # AMX is 3.5 times as fast as float32. Vectors of bf16 are faster on an AMD EPYC, but a training by them takes 1.5
    # times as long on an Intel Xeon whose AMX the virtual machine hides.
    return "bf16" if device.type == "cpu" and has_amx() else "float32"


def agreed_precision(wanted: Precision, device: torch.device) -> Literal["float32", "bf16"]:
    """The precision of all ranks, by the choice of rank 0; all call this. Without a process group each chooses."""
    is_alone = int(os.environ.get("WORLD_SIZE", 1)) == 1 or not torch.distributed.is_initialized()
    if wanted != "auto" or device.type != "cpu" or is_alone:
        return choose_precision(wanted, device)
    ranks = Ranks(torch.distributed.get_rank(), torch.distributed.get_world_size())
    chosen: Literal["float32", "bf16"] = ranks.gather(lambda: choose_precision(wanted, device))[0]
    return chosen


def place_line(asked: str, device: torch.device, precision: Precision, threads: int) -> str:
    """The line at the start of a training: its device, precision and threads, each with its reason.

    >>> place_line("cpu", torch.device("cpu"), "float32", 2).replace("the processor has no AMX", "--precision")
    'on cpu (--device), in float32 (--precision), by 2 threads (--threads)'
    """
    if device.type == "cuda":
        where, units = torch.cuda.get_device_name(device), "the GPU has {} bf16"
    else:
        where, units = "no GPU is visible" if device.type == "cpu" else "a GPU is visible", "the processor has {} AMX"
    if asked != "auto":
        where = "--device"
    by_choice = precision == choose_precision("auto", device)
    reason = units.format("" if precision == "bf16" else "no").replace("  ", " ") if by_choice else "--precision"
    return f"on {device} ({where}), in {precision} ({reason}), by {threads} threads (--threads)"


BUSY = 2.0
"""A machine is busy if the threads of a run bring its load to so many for each core."""


def line_if_busy(chosen: int | None, threads: int) -> str | None:
    """The line for threads that wait for cores on which other programs run: each waits for the slowest."""
    cores = os.cpu_count() or 1
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if chosen is not None or threads == 1 or load + threads < BUSY * cores:
        return None
    return (
        f"the machine is busy (a load of {load:.1f} on {cores} cores, and {threads} threads more): beside other work "
        "fewer threads are several times as fast, as --threads 1"
    )


def usable_cores() -> int:
    """How many cores this process may use: ranks on one machine share its cores."""
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(here // int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)
