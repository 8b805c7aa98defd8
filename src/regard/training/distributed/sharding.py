"""Models of which every rank holds a share, by torch's fully sharded data parallelism (FSDP2)."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import ArgumentError
from regard.models.building import each_layer_given_to
from regard.training.distributed.shares import is_shared_out, like, share
from regard.training.distributed.tensor_files import Place, SavedTensor, whole


def layers(model: nn.Module) -> list[nn.Module]:
    """The layers of a model's stacks. The stacks are the module lists among its direct children.

    >>> layers(nn.Sequential(nn.Embedding(3, 2), nn.ModuleList([nn.Linear(2, 2), nn.Tanh()])))
    [Linear(in_features=2, out_features=2, bias=True), Tanh()]
    """
    return [layer for child in model.children() if isinstance(child, nn.ModuleList) for layer in child]


def shard(model: nn.Module, mesh: Any) -> nn.Module:
    """Share out the rows of every parameter, in place: a whole layer exists only while it computes.

    The parameters outside the layers (embeddings and output, tied or not) are gathered together.

    Args:
        model: it has the same weights on every rank.
        mesh: the ranks, a `DeviceMesh` of one dimension.

    Source: Zhao et al. 2023 (arXiv:2304.11277); torch's `fully_shard`.
    """
    for layer in layers(model):
        shard_module(layer, mesh)
    shard_module(model, mesh)
    return model


def shard_module(module: nn.Module, mesh: Any) -> None:
    """Share out a layer, or the rest of a model after its layers; do nothing if the module is shared out already."""
    from torch.distributed.fsdp import FSDPModule, fully_shard

    if not isinstance(module, FSDPModule):
        # By default torch leaves the root whole after the forward pass. Here it holds only shares between two passes.
        fully_shard(module, mesh=mesh, reshard_after_forward=True)


@contextmanager
def layers_shared_out(fabric: Any) -> Iterator[None]:
    """Share out each layer of a model that is built inside the block, if the strategy of `fabric` shares models out."""
    mesh = getattr(fabric.strategy, "device_mesh", None)
    if mesh is None:
        yield
    else:
        with each_layer_given_to(lambda layer: shard_module(layer, mesh["data_parallel"])):
            yield


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Let every rank hold the whole model while the block runs, so that each rank can use any part of it alone."""
    parts: list[Any] = [module for module in model.modules() if hasattr(module, "unshard")]
    for part in parts:
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    try:
        yield
    finally:
        for part in parts:
            part.reshard()
            part.set_reshard_after_forward(True, recurse=False)


def follow(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Give the optimizer the present parameters of a model that was shared out after the optimizer was made.

    Raises:
        ArgumentError: the optimizer's parameters have no names.
    """
    current = dict(model.named_parameters())
    for group in optimizer.param_groups:
        if "param_names" not in group:
            raise ArgumentError("the optimizer's parameters need names: give it (name, parameter) pairs")
        group["params"] = [current[name] for name in group["param_names"]]


def placed_as(model: nn.Module) -> Place:
    """A function that reads this rank's part of a checkpoint: of a parameter that is shared out, only its own rows.

    The tensors "name" and "name:quantity" belong to the parameter `name` if they have its shape. All others are read
    whole.
    """
    own = {name: value for name, value in model.state_dict().items() if is_shared_out(value)}

    def place(name: str, saved: SavedTensor) -> Tensor:
        parameter = own.get(name.rpartition(":")[0] or name)
        if parameter is None or saved.shape != tuple(parameter.shape):
            return whole(name, saved)
        mine = share(parameter)
        return like(parameter, saved.rows(mine.first, mine.first + len(mine.rows)).to(mine.rows.device))

    return place


def total_norm(tensors: Iterable[Tensor]) -> float:
    """The Euclidean norm of all tensors together; if they are shared out, the norm over all shares."""
    norm: Any = torch.nn.utils.get_total_norm(tensors)
    return float(norm.full_tensor() if is_shared_out(norm) else norm)
