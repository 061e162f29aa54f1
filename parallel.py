"""torch.distributed, directly: start-up, reductions of gradients, exchange of small Python values.

Every function here is collective over all ranks unless it says otherwise, and every wait ends after
`timeout_seconds`. Tensors travel by NCCL on GPUs and gloo on CPU; Python values always by gloo.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

BUCKET_BYTES = 64 * 2**20


@dataclass(frozen=True)
class World:
    """This process among all ranks."""

    rank: int
    size: int
    device: torch.device
    objects: Any = None  # the gloo group for Python values; None: a single process

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def start(device: str, timeout_seconds: float) -> World:
    """Join the ranks that torchrun started (or run alone without torchrun). `device`: auto, cpu or cuda."""
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    use_cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    torch_device = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(torch_device)
    if size == 1:
        return World(rank, size, torch_device)
    timeout = timedelta(seconds=timeout_seconds)
    dist.init_process_group(
        "nccl" if use_cuda else "gloo", timeout=timeout, device_id=torch_device if use_cuda else None
    )
    objects = dist.new_group(backend="gloo", timeout=timeout) if use_cuda else dist.group.WORLD
    return World(rank, size, torch_device, objects)


def stop(world: World) -> None:
    if world.size > 1:
        dist.destroy_process_group()


def barrier(world: World) -> None:
    if world.size > 1:
        dist.barrier(group=world.objects)


def gather_objects(world: World, value: Any) -> list[Any]:
    """Return every rank's value, by rank, on every rank."""
    if world.size == 1:
        return [value]
    values: list[Any] = [None] * world.size
    dist.all_gather_object(values, value, group=world.objects)
    return values


def broadcast_object(world: World, value: Any) -> Any:
    """Return rank 0's value on every rank."""
    if world.size == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, group=world.objects)
    return box[0]


def sum_tensors(world: World, tensors: Iterable[Tensor]) -> None:
    """Replace each tensor by its sum over all ranks, in flat buckets: few, large all-reduces."""
    if world.size == 1:
        return
    bucket: list[Tensor] = []
    num_bytes = 0
    for tensor in tensors:
        if bucket and (num_bytes + tensor.nbytes > BUCKET_BYTES or tensor.dtype != bucket[0].dtype):
            _sum_bucket(bucket)
            bucket, num_bytes = [], 0
        bucket.append(tensor)
        num_bytes += tensor.nbytes
    if bucket:
        _sum_bucket(bucket)


def _sum_bucket(tensors: Sequence[Tensor]) -> None:
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat)
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


def broadcast_tensors(world: World, tensors: Iterable[Tensor]) -> None:
    """Overwrite each tensor with rank 0's."""
    if world.size > 1:
        for tensor in tensors:
            dist.broadcast(tensor, src=0)


def assign_by_load(loads: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Spread items over ranks: the heaviest first, each to the lightest rank. Pure, the same on every rank."""
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    totals = [0] * num_ranks
    for i in sorted(range(len(loads)), key=lambda i: (-loads[i], i)):
        rank = totals.index(min(totals))
        shares[rank].append(i)
        totals[rank] += loads[i]
    return shares
