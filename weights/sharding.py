"""Training weights spread over several ranks by torch's FSDP2, set up to add exact sums."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from model import Model, empty_model
from parallel import World, gather_tensor, own_subset, with_shared_memory


def shard_groups(world: World, size: int) -> tuple[World, World]:
    """Return this rank's shard group, of `size` neighbours, and the ranks that have the same part in other groups."""
    groups = [range(first, first + size) for first in range(0, world.size, size)]
    return own_subset(world, groups), own_subset(world, list(zip(*groups, strict=True)))


def shard_model(model: Model, group: World) -> Model:
    """Return a second module like `model` whose fp32 weights are spread over the ranks of a shard group.

    It computes in the model's dtype; weights of which none is trained have that dtype too. Every backward sums
    gradients within the group, in fp32, and keeps a part on each rank. Every rank has the whole `model` and takes its
    part without communication; of one on the meta device, which has no weights, only the shape is taken.
    """
    assert group.tensors, "a single rank has nothing to share"
    # Of one dimension: with a second one, of replicas, FSDP keeps gradients that are not summed over it in a private
    # place, where a release of the device would not find them.
    mesh = DeviceMesh.from_group(group.tensors, group.device.type, mesh_dim_names=("shard",))
    dtype = model.dtype
    kept = torch.float32 if any(weight.requires_grad for weight in model.parameters()) else dtype
    learner = empty_model(model.shape, kept)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    if dtype == kept:
        policy = MixedPrecisionPolicy()
    for module in (*learner.layers, learner):
        fully_shard(module, mesh=mesh, mp_policy=policy)
        module.set_force_sum_reduction_for_comms(True)  # gloo cannot scale
        module.set_gradient_divide_factor(1.0)
    learner.to_empty(device=group.device)
    learner.compute_dtype, learner.shards = dtype, with_shared_memory(group)
    for own, whole in zip(learner.parameters(), model.parameters(), strict=True):
        if not whole.is_meta:
            take_part(own, whole)
        own.requires_grad_(whole.requires_grad)
    return learner


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Have a module's own weights whole while inside, in the dtype that it computes in. Collective in the shard group.

    Modules inside it that are sharded by themselves are not among them. A module that is not sharded stays as it is.
    """
    if not isinstance(module, FSDPModule):
        yield
        return
    module.unshard()
    try:
        yield
    finally:
        module.reshard()


def gather(model: Model, weights: Sequence[Tensor]) -> list[Tensor]:
    """Return weights of a model whole, in the dtype that it computes in; those of a model that is whole as they are.

    One collective in the shard group for all of them. Copies less than FSDP's own gathering, which has a place of its
    own for each weight: half of its time on a CPU.
    """
    if not (group := model.shards):
        return [*weights]
    parts = [own_part(w).flatten() for w in weights]
    sizes = [-(-len(w) // group.size) * math.prod(w.shape[1:]) for w in weights]  # of a rank's rows; the last has fewer
    own = torch.cat([F.pad(part, (0, size - len(part))) for part, size in zip(parts, sizes, strict=True)])
    everyone = gather_tensor(group, own.to(model.dtype)).split(sizes, 1)  # of each weight [ranks, size]
    return [torch.cat([*rows]).view(-1, *w.shape[1:])[: len(w)] for w, rows in zip(weights, everyone, strict=True)]


def whole(tensor: Tensor) -> Tensor:
    """Return a sharded tensor whole on every rank; return other tensors unchanged. Collective in the shard group."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor; return other tensors unchanged."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor


def own_rows(like: Tensor, whole: Tensor) -> Tensor:
    """Return the rows of a tensor that every rank has which this rank has of a sharded tensor with as many rows."""
    if not isinstance(like, DTensor):
        return whole
    rows = -(-len(like) // like.device_mesh.size())
    return whole[like.device_mesh.get_local_rank() * rows :][: len(like.to_local())]


@torch.no_grad()
def take_part(own: Tensor, whole: Tensor) -> None:
    """Fill a sharded tensor with this rank's part of a tensor that every rank has."""
    assert isinstance(own, DTensor)
    whole = whole.to(own.device, own.dtype)
    own.copy_(distribute_tensor(whole, own.device_mesh, own.placements, src_data_rank=None))
