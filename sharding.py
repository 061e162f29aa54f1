"""Training weights spread over several ranks by torch's FSDP2, set up to add exact sums."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from parallel import World, own_group


def shard_mesh(world: World, size: int) -> DeviceMesh:
    """Return the (replicate, shard) mesh whose shard groups are `size` neighbouring ranks."""
    ranks = torch.arange(world.size).view(-1, size)
    process_groups = [own_group(world, rows.tolist()) for rows in (ranks.T, ranks)]
    return DeviceMesh.from_group(process_groups, world.device.type, ranks, mesh_dim_names=("replicate", "shard"))


def shard_model(model: Any, mesh: DeviceMesh) -> Any:
    """Return a second module like `model` whose fp32 weights are spread over the shard group's ranks.

    It computes in the model's dtype. Every backward sums gradients within the shard group, in fp32, and keeps a part on
    each rank; `set_requires_all_reduce` decides when they are summed over the groups. Every rank has the whole `model`
    and takes its part without communication.
    """
    dtype = next(model.parameters()).dtype
    with torch.device("meta"):
        learner = type(model)(model.shape).float()
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    if dtype == torch.float32:
        policy = MixedPrecisionPolicy()
    for module in (*learner.layers, learner):
        fully_shard(module, mesh=mesh, mp_policy=policy)
        module.set_force_sum_reduction_for_comms(True)  # gloo cannot scale
        module.set_gradient_divide_factor(1.0)
    learner.to_empty(device=next(model.parameters()).device)
    with torch.no_grad():
        for own, whole in zip(learner.parameters(), model.parameters(), strict=True):
            own.copy_(part_like(whole.detach().float(), own))
    learner.set_requires_all_reduce(False)
    return learner


def whole(tensor: Tensor) -> Tensor:
    """Return a sharded tensor whole on every rank; return other tensors unchanged. Collective in the shard group."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor; return other tensors unchanged."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor


def part_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Return this rank's part of a tensor that every rank has, sharded as `like` is."""
    tensor = tensor.to(like.device)
    if not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)
