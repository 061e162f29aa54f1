"""torch.distributed, directly: start-up, reductions of gradients, exchange of small Python values.

A `World` is a communicator: the ranks that take part, a group for tensors and one for Python values. Every function
here is collective over the world that it gets unless it says otherwise, and every wait ends after `timeout_seconds`.
Tensors travel by NCCL on GPUs and gloo on CPU; Python values always by gloo.
"""

import itertools
import math
import os
import pickle
import platform
import queue
import re
import threading
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from config import ConfigError
from core import Elsewhere, Example, Sample, SampleId
from engine.cpu import SharedMemory, keep_memory
from policies.placement import group_sizes

BUCKET_BYTES = 64 * 2**20
FRAME_BYTES, HEAD_BYTES = 8 * 2**10, 8  # of the first collective of `gather_objects`, and its count of bytes
T = TypeVar("T")
Response = TypeVar("Response", Sample, Example)


@dataclass(frozen=True)
class World:
    """This process among the ranks of a run, or of a part of it (`subsets`)."""

    rank: int  # in this world
    size: int
    device: torch.device
    tensors: dist.ProcessGroup | None = None  # the group for tensors: NCCL on GPUs, else gloo; None: a single process
    objects: dist.ProcessGroup | None = None  # the gloo group for Python values; None: a single process
    node_size: int = 0  # ranks on each machine; their greatest common divisor where machines differ; 0: unknown
    store: Any = None  # torch's dist.Store, which all ranks reach; None: a single process. Its stubs know no `clone`
    timeout_seconds: float = 600.0  # longest wait for another rank

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def start(device: str, timeout_seconds: float) -> World:
    """Join the ranks that torchrun started (or run alone without torchrun). `device`: auto, cpu or cuda."""
    torch.set_flush_denormal(True)  # a denormal costs a hundred normal operations on a CPU
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    use_cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    torch_device = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(torch_device)
    else:
        keep_memory()
    if size == 1:
        return World(rank, size, torch_device)
    timeout = timedelta(seconds=timeout_seconds)
    store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
    if os.environ.get("GROUP_WORLD_SIZE") == "1":
        # torchrun keeps one store over restarts, where ranks would find the ports of dead ranks (pytorch issue 135712).
        # On one node all ranks know the same count; on several set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1.
        store = dist.PrefixStore(f"start {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    backend, device_id = ("nccl", torch_device) if use_cuda else ("gloo", None)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout, device_id=device_id)
    everyone = dist.group.WORLD
    objects = dist.new_group(backend="gloo", timeout=timeout) if use_cuda else everyone
    world = World(rank, size, torch_device, everyone, objects, store=store, timeout_seconds=timeout_seconds)
    return replace(world, node_size=math.gcd(*gather_objects(world, own_node_size(size))))


def own_node_size(num_ranks: int) -> int:
    """Return the number of ranks of this machine, from torchrun; 0: unknown. Not collective."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1 if num_ranks == 1 else 0))


LOST = re.compile(r"gloo|nccl|connection|socket|timed out|timeout|broken pipe", re.IGNORECASE)


def is_lost(error: Exception) -> bool:
    """Return whether an exception means that another rank or the network is gone, or that a wait took too long."""
    return isinstance(error, TimeoutError | ConnectionError | dist.DistError) or (
        type(error) is RuntimeError and bool(LOST.search(str(error)))
    )


def stop(world: World) -> None:
    if world.size > 1:
        dist.destroy_process_group()


def barrier(world: World) -> None:
    if world.size > 1:
        dist.barrier(group=world.objects)


def gather_objects(world: World, value: T) -> list[T]:
    """Return every rank's value, by rank, on every rank. Small values cost a single collective."""
    if world.size == 1:
        return [value]
    data = pickle.dumps(value)
    sizes, firsts = zip(*(_unframe(part) for part in _gather_bytes(world, _frame(data), FRAME_BYTES)), strict=True)
    if max(sizes) <= FRAME_BYTES - HEAD_BYTES:
        return [pickle.loads(part) for part in firsts]
    return [pickle.loads(part[:size]) for size, part in zip(sizes, _gather_bytes(world, data, max(sizes)), strict=True)]


def _frame(data: bytes) -> bytes:
    return len(data).to_bytes(HEAD_BYTES, "little") + data[: FRAME_BYTES - HEAD_BYTES]


def _unframe(frame: memoryview) -> tuple[int, memoryview]:
    return int.from_bytes(frame[:HEAD_BYTES], "little"), frame[HEAD_BYTES:]


def _gather_bytes(world: World, data: bytes, size: int) -> list[memoryview]:
    """Return every rank's bytes, padded to `size`."""
    own = torch.zeros(size, dtype=torch.uint8)
    own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    parts = [torch.empty_like(own) for _ in range(world.size)]
    dist.all_gather(parts, own, group=world.objects)
    return [part.numpy().data for part in parts]


def broadcast_object(world: World, value: T) -> T:
    """Return rank 0's value on every rank."""
    if world.size == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, group=world.objects, group_src=0)
    return box[0]


def sum_tensors(world: World, tensors: Iterable[Tensor]) -> None:
    """Replace each tensor by its sum over the world's ranks, in flat buckets: few, large all-reduces."""
    if world.size == 1:
        return
    bucket: list[Tensor] = []
    num_bytes = 0
    for tensor in tensors:
        if bucket and (num_bytes + tensor.nbytes > BUCKET_BYTES or tensor.dtype != bucket[0].dtype):
            _sum_bucket(world, bucket)
            bucket, num_bytes = [], 0
        bucket.append(tensor)
        num_bytes += tensor.nbytes
    if bucket:
        _sum_bucket(world, bucket)


def _sum_bucket(world: World, tensors: Sequence[Tensor]) -> None:
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat, group=world.tensors)
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


def max_tensor(world: World, tensor: Tensor) -> None:
    """Replace each element of a tensor by its maximum over the world's ranks."""
    if world.size > 1:
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=world.tensors)


def broadcast_tensors(world: World, tensors: Iterable[Tensor]) -> None:
    """Overwrite each tensor with rank 0's."""
    if world.size > 1:
        for tensor in tensors:
            dist.broadcast(tensor, group=world.tensors, group_src=0)


def subsets(world: World, parts: Iterable[Sequence[int]]) -> list[World | None]:
    """Return a world of each part of all ranks, a list of them; None for a part without this rank.

    Every rank of the run takes part in making every group. A part's ranks keep their order, as torch's groups do.
    """
    assert world.tensors is dist.group.WORLD, "torch makes groups among all ranks, not among a part of them"
    timeout = timedelta(seconds=world.timeout_seconds)
    worlds: list[World | None] = []
    for part in map(sorted, parts):
        tensors = dist.new_group(part, timeout)
        objects = dist.new_group(part, timeout, "gloo") if world.device.type == "cuda" else tensors
        own = None
        if world.rank in part:
            own = replace(world, rank=part.index(world.rank), size=len(part), tensors=tensors, objects=objects)
        worlds.append(own)
    return worlds


def beside(world: World) -> World:
    """Return a world of the same ranks with a gloo group of its own: for a thread beside the work. Collective."""
    if world.size == 1:
        return world
    group = dist.new_group(timeout=timedelta(seconds=world.timeout_seconds), backend="gloo")
    return replace(world, tensors=group, objects=group)


def own_group(world: World, parts: Iterable[list[int]]) -> dist.ProcessGroup:
    """Make a process group of each list of ranks; return the group of this rank.

    Its time-out is the world's: torch's default would be 10 or 30 minutes.
    """
    timeout = timedelta(seconds=world.timeout_seconds)
    made = [(ranks, dist.new_group(ranks, timeout)) for ranks in parts]
    return next(group for ranks, group in made if world.rank in ranks)


# ---- samples that travel ------------------------------------------------------------------------------------------


def header_of(sample: Sample, rank: int) -> Sample:
    """Return a sample without its tokens, which are on `rank`."""
    there = Elsewhere(len(sample.token_ids), rank)
    return replace(sample, token_ids=there, logprobs=there)


class Parcel(NamedTuple):
    """Tokens and log-probs of a sample on their way from rank to rank."""

    target: int
    id: SampleId
    length: int
    source: int


def bring_tokens(world: World, wanted: Sequence[Response], here: Iterable[Sample | Example]) -> list[Response]:
    """Return `wanted` with the tokens that other ranks have. Collective; `here`: what others may want of this rank."""
    if world.size == 1:
        return list(wanted)
    missing = [
        Parcel(world.rank, item.id, there.length, there.rank)
        for item in wanted
        if isinstance(there := item.token_ids, Elsewhere)
    ]
    parcels = [parcel for part in gather_objects(world, missing) for parcel in part]
    known = {item.id: item for item in here}
    arrived: dict[SampleId, dict[str, Any]] = {}
    sums = itertools.accumulate((8 * parcel.length for parcel in parcels), initial=0)
    for _, bucket in itertools.groupby(zip(sums, parcels), key=lambda item: item[0] // BUCKET_BYTES):
        arrived |= _carry(world, [parcel for _, parcel in bucket], known)
    return [replace(item, **arrived.get(item.id, {})) for item in wanted]


def _carry(
    world: World, parcels: Sequence[Parcel], known: Mapping[SampleId, Sample | Example]
) -> dict[SampleId, dict[str, Any]]:
    """Carry parcels, sorted by target; return the `token_ids` and `logprobs` that arrive here."""
    leaving = [parcel for parcel in parcels if parcel.source == world.rank]
    arriving = sorted((p for p in parcels if p.target == world.rank), key=lambda parcel: parcel.source)
    out, into, packed = [0] * world.size, [0] * world.size, bytearray()
    for parcel in leaving:
        out[parcel.target] += 8 * parcel.length
        packed += array("i", known[parcel.id].token_ids)
        packed += array("f", known[parcel.id].logprobs)
    for parcel in arriving:
        into[parcel.source] += 8 * parcel.length
    data = torch.empty(sum(into), dtype=torch.uint8)
    sent = torch.frombuffer(packed, dtype=torch.uint8) if packed else torch.empty_like(data[:0])
    dist.all_to_all_single(data, sent, into, out, group=world.objects)
    rest, arrived = data.numpy().data, {}
    for parcel in arriving:
        ids, values = array("i"), array("f")
        arrived[parcel.id] = {"token_ids": ids, "logprobs": values}
        for part in (ids, values):
            part.frombytes(rest[: 4 * parcel.length])
            rest = rest[4 * parcel.length :]
    return arrived


Outbox = queue.SimpleQueue[tuple[int, bytes | None]]  # target and message; None: the end for this target


class SampleStream:
    """Python values on their way from some ranks to others, while both go on with their work. Making one is collective.

    A rank either feeds (`open_to`, `send`) or is fed by one other (`open_from`, `take`), until `close`. One thread does
    all transfers of a rank, and no other uses the stream's own group: gloo cannot tell whether a send or receive is
    complete, a thread must wait for it. Each message is acknowledged when it has arrived; `send` refuses a message
    while `in_flight` messages are not acknowledged. An error in the thread, also a wait over `timeout_seconds`, is
    raised by the next call.
    """

    END = -1  # in the place of a message's size

    def __init__(self, world: World, timeout_seconds: float, in_flight: int = 4):
        self.rank, self.seconds, self.in_flight = world.rank, timeout_seconds, in_flight
        self.group = dist.new_group(timeout=timedelta(seconds=timeout_seconds), backend="gloo")
        self.thread: threading.Thread | None = None

    def open_to(self, targets: Sequence[int]) -> None:
        """Begin to feed the ranks `targets`."""
        self.targets, self.sent = targets, Counter[int]()
        self.arrived = Counter[int]()  # counted by the thread alone
        self.outbox: Outbox | None = queue.SimpleQueue()
        self._start(self._feed, self.outbox)

    def open_from(self, source: int) -> None:
        """Begin to be fed by the rank `source`."""
        self.outbox, self.is_over = None, False
        self.inbox: queue.SimpleQueue = queue.SimpleQueue()
        self._start(self._receive, source)

    def _start(self, work: Callable[..., None], *args: object) -> None:
        assert self.thread is None, "the stream is open"
        self.error: Exception | None = None
        self.thread = threading.Thread(target=work, args=args, daemon=True)
        self.thread.start()

    def has_room(self, target: int) -> bool:
        """Return whether a value may be sent to this rank now: not too many are on their way to it."""
        self._check()
        return self.sent[target] - self.arrived[target] < self.in_flight

    def send(self, target: int, value: object) -> bool:
        """Send a value. Never waits: False without room; offer the value again later."""
        assert self.outbox is not None, "the stream is not open to other ranks"
        if not self.has_room(target):
            return False
        self.sent[target] += 1
        self.outbox.put((target, pickle.dumps(value)))
        return True

    def take(self, seconds: float = 0.0) -> list[Any]:
        """Return the values that have arrived since the last call; if there are none, wait `seconds` for one."""
        arrived = []
        try:
            arrived.append(self.inbox.get(timeout=seconds) if seconds else self.inbox.get_nowait())
            while True:
                arrived.append(self.inbox.get_nowait())
        except queue.Empty:
            self._check()
        return arrived

    def close(self) -> None:
        """End the stream: a feeder's once everything has arrived, other streams once their feeder has ended."""
        assert self.thread, "the stream is not open"
        if self.outbox is not None:
            for target in (*self.targets, self.END):
                self.outbox.put((target, None))
        self.thread.join()  # each of its waits is bounded
        self.thread = None
        self._check()

    def _check(self) -> None:
        if self.error:
            raise self.error

    def _feed(self, outbox: "Outbox") -> None:
        """Send the messages of the outbox. (thread)"""
        while (message := outbox.get())[0] != self.END:
            target, data = message
            try:
                size = torch.tensor(self.END if data is None else len(data))
                dist.send(size, target, self.group)
                if data is not None:
                    dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), target, self.group)
                dist.recv(size, target, self.group)
                self.arrived[target] += 1
            except Exception as error:  # of any kind: the next call must raise it
                self.error = self._explain(error, target, "acknowledge samples")
                return

    def _receive(self, source: int) -> None:
        """Fill the inbox until the feeder ends the stream. (thread)"""
        size = torch.tensor(0)
        while not self.is_over:
            try:
                dist.recv(size, source, self.group)
                if int(size) != self.END:
                    data = torch.empty(int(size), dtype=torch.uint8)
                    dist.recv(data, source, self.group)
                    self.inbox.put(pickle.loads(data.numpy().data))
                dist.send(size, source, self.group)
            except Exception as error:
                self.error = self._explain(error, source, "send samples or the end of the rollout")
                return
            self.is_over = int(size) == self.END

    def _explain(self, error: Exception, other: int, what: str) -> Exception:
        if not is_lost(error):
            return error
        if "timed out" in str(error).lower():
            return TimeoutError(f"rank {self.rank} waited {self.seconds:g} s for rank {other} to {what}")
        return ConnectionError(f"rank {self.rank} waited for rank {other} to {what}, and lost it: {error}")


# ---- tensor parallelism of the rollout ---------------------------------------------------------------------------


def check_group_size(size: int, num_ranks: int, node_size: int) -> None:
    """Raise ConfigError when ranks cannot be grouped by `size`. Pure."""
    possible = group_sizes(num_ranks, node_size)
    if size in possible:
        return
    where = f"{num_ranks} ranks with {node_size} on each machine"
    if not node_size:
        where = f"{num_ranks} ranks on unknown machines (LOCAL_WORLD_SIZE is not set; start by torchrun)"
    raise ConfigError(f"rollout.tensor_parallel = {size} does not divide {where}; possible here: {possible}")


class TPGroups:
    """The tensor-parallel groups of each size. All are made and used once at the start, none later. Collective."""

    def __init__(self, world: World, sizes: Iterable[int]):
        self.by_size: dict[int, TensorParallel] = {}
        for size in sorted(set(sizes)):
            check_group_size(size, world.size, world.node_size)
            self.by_size[size] = TensorParallel(world, size)

    def __getitem__(self, size: int) -> "TensorParallel":
        return self.by_size[size]


class TensorParallel:
    """Ranks `rank // size * size` and the next `size - 1` compute every layer together. Making one is collective.

    `reduce` and `gather` return the same bits on all ranks of a group, so they sample the same tokens. Between CPU
    ranks of one machine, small tensors go through shared memory: a tenth of the time of gloo.
    """

    def __init__(self, world: World, size: int = 1):
        self.size, self.rank = size, world.rank % size
        self.replica, self.num_replicas = world.rank // size, world.size // size
        self.group, self.shared = None, None
        if size == 1:
            return
        self.group = own_group(world, [list(range(i, i + size)) for i in range(0, world.size, size)])
        if world.device.type == "cpu" and platform.machine() in ("x86_64", "AMD64"):
            shared = SharedMemory(self.group, self.rank, size, world.timeout_seconds)
            self.shared = shared if shared.memory is not None else None
        # The first use connects the ranks, which a CUDA graph's capture could not wait for.
        dist.all_reduce(torch.zeros(1, device=world.device), group=self.group)

    def reduce(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' `x`."""
        if self.size == 1:
            return x
        if self.shared is not None and x.nbytes <= SharedMemory.SLOT_BYTES:
            return self.shared.exchange(x).sum(0)
        x = x.contiguous()
        dist.all_reduce(x, group=self.group)
        return x

    def gather(self, x: Tensor) -> Tensor:
        """Join all ranks' `x` along the last dimension. [T, n] -> [T, size * n]"""
        if self.size == 1:
            return x
        if self.shared is not None and x.nbytes <= SharedMemory.SLOT_BYTES:
            parts = list(self.shared.exchange(x).unbind())
        else:
            parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
            dist.all_gather(parts, x.contiguous(), group=self.group)
        return torch.cat(parts, -1)
