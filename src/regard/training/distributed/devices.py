"""The devices on which training runs, and its precision; lightning-fabric moves the tensors."""

import os
from typing import Any, Literal

import torch

from regard.errors import ArgumentError, MissingExtraError
from regard.torch_private import has_amx
from regard.training.distributed.choices import Precision, Strategy
from regard.training.distributed.rendezvous import meet
from regard.training.distributed.sharding import shard


def start_fabric(device: str = "auto", precision: Precision = "auto", strategy: Strategy = "auto") -> Any:
    """A launched `lightning_fabric.Fabric` for this process, or for all processes that `torchrun` started.

    Args:
        device: "auto" (a GPU if there is one), "cpu", "cuda", "cuda:1" or "mps".
        precision: "float32", "bf16" (autocast; parameters stay float32), or "auto": see `choose_precision`.
        strategy: how much of a model each rank holds if `torchrun` started several: with "ddp" and "auto" all of it,
            with "fsdp" a share of it and of its optimizer.

    Raises:
        ArgumentError: the device is unknown or not on this machine.
        MissingExtraError: lightning-fabric is not installed.
    """
    try:
        from lightning_fabric import Fabric
    except ImportError:
        raise MissingExtraError("lightning-fabric", extra="text") from None
    chosen = find_device(device)
    meet(chosen)
    local, world = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), int(os.environ.get("WORLD_SIZE", 1))
    fabric = Fabric(
        accelerator="gpu" if chosen.type == "cuda" else chosen.type,
        devices=[chosen.index] if world == 1 and chosen.index is not None else local,
        num_nodes=max(world // local, 1),
        strategy=_strategy(strategy, world),
        precision="bf16-mixed" if agreed_precision(precision, chosen) == "bf16" else "32-true",
    )
    fabric.launch()
    return fabric


def has_whole_model(fabric: Any) -> bool:
    """Whether this process has all of the model's weights, so that it can use the model without the other ranks.

    This is true for one process, and with DDP. Strategies that share out the weights need all ranks for every call.
    """
    from lightning_fabric.strategies.ddp import DDPStrategy

    return fabric.world_size == 1 or isinstance(fabric.strategy, DDPStrategy)


def _strategy(name: Strategy, world_size: int) -> Any:
    if world_size == 1:
        return "auto"
    if name != "fsdp":
        return "ddp"
    from lightning_fabric.strategies.model_parallel import ModelParallelStrategy

    return ModelParallelStrategy(
        lambda model, mesh: shard(model, mesh["data_parallel"]), data_parallel_size=world_size, tensor_parallel_size=1
    )


def find_device(name: str) -> torch.device:
    """The device of that name; "auto" takes a GPU if there is one.

    Raises:
        ArgumentError: the device is unknown or not on this machine.

    >>> find_device("cpu")
    device(type='cpu')
    """
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


def device_of_rank(name: str) -> str:
    """The name of a device; of several ranks on one machine each has a GPU of its own, where "auto" or "cuda" is asked.

    >>> device_of_rank("cpu")
    'cpu'
    """
    is_shared = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1
    if is_shared and (name == "cuda" or (name == "auto" and torch.cuda.is_available())):
        return f"cuda:{os.environ['LOCAL_RANK']}"
    return name


def choose_precision(wanted: Precision, device: torch.device) -> Literal["float32", "bf16"]:
    """The precision for a device. "auto" means bf16 on processors with AMX and on newer GPUs, and else float32.

    Nothing is timed, so that a machine always chooses the same. A run keeps its precision wherever it goes on.

    >>> choose_precision("bf16", torch.device("cpu"))
    'bf16'
    """
    if wanted != "auto":
        return wanted
    if device.type == "cuda":
        return "bf16" if torch.cuda.get_device_capability(device) >= (8, 0) else "float32"
    # AMX is 3.5 times as fast as float32. Vectors of bf16 are faster on an AMD EPYC, but a training by them takes 1.5
    # times as long on an Intel Xeon whose AMX the virtual machine hides.
    return "bf16" if device.type == "cpu" and has_amx() else "float32"


def agreed_precision(wanted: Precision, device: torch.device) -> Literal["float32", "bf16"]:
    """The precision that all ranks of a training take, which rank 0 chooses; every rank has to call this.

    Ranks that cannot speak with one another yet choose for themselves.
    """
    is_alone = int(os.environ.get("WORLD_SIZE", 1)) == 1 or not torch.distributed.is_initialized()
    if wanted != "auto" or device.type != "cpu" or is_alone:
        return choose_precision(wanted, device)
    is_first = torch.distributed.get_rank() == 0
    answer = torch.tensor(is_first and choose_precision(wanted, device) == "bf16", dtype=torch.uint8)
    torch.distributed.broadcast(answer, 0)
    return "bf16" if answer else "float32"
