"""torch.distributed, directly: start-up, reductions of gradients, exchange of small Python values.

A `World` is a communicator: the ranks that take part, a group for tensors and one for Python values. Every function
here is collective over the world that it gets unless it says otherwise. Tensors travel by NCCL on GPUs and gloo on CPU;
Python values always by gloo. Every wait ends after `timeout_seconds`, in NCCL after twice as long.
"""

import gc
import itertools
import math
import os
import pickle
import platform
import queue
import re
import sys
import threading
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from config import ConfigError
from core import Elsewhere, Example, Group, Sample, SampleId
from engine import native
from engine.cpu import SharedMemory, keep_memory
from policies.placement import group_sizes

BACKENDS = {"cuda": "nccl", "cpu": "gloo"}  # of tensors; Python values always travel by gloo
BUCKET_BYTES = 64 * 2**20
ONE_SHOT_BYTES = 2**21  # that a rank reads for a sum in one kernel; above, NCCL is faster (limits of vLLM's kernel)
HEAD_BYTES, FIRST_BYTES = 8, 8 * 2**10 - 8  # of the first collective of `gather_objects`: a count, and so many bytes
T = TypeVar("T")
Response = TypeVar("Response", Sample, Example)
# torch 2.13 has renamed it.
all_gather_into_tensor = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


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
    shared: SharedMemory | None = None  # for tensors of CPU ranks of one machine (`with_shared_memory`)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def spans_machines(self) -> bool:
        return 0 < self.node_size < self.size


def own_place() -> tuple[int, int]:
    """Return this rank and the number of ranks, from torchrun; alone 0 and 1. Raises ConfigError. Not collective."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        if (text := os.environ.get(name)) is not None and not (text.isascii() and text.isdecimal()):
            raise ConfigError(f"the environment has {name} = {text!r}, which is no number; unset it")
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if rank >= size or (size > 1 and "RANK" not in os.environ):
        told = f"RANK = {os.environ.get('RANK', 'nothing')} and WORLD_SIZE = {os.environ.get('WORLD_SIZE', 'nothing')}"
        raise ConfigError(f"the environment has {told}, as of no rank; unset them, or start by --ranks or torchrun")
    return rank, size


def start(device: str, timeout_seconds: float) -> World:
    """Join the ranks that torchrun started (or run alone without torchrun). `device`: auto, cpu or cuda."""
    torch.set_flush_denormal(True)  # a denormal costs a hundred normal operations on a CPU
    world = World(*own_place(), device=own_device(device), timeout_seconds=timeout_seconds)
    if world.device.type == "cpu":
        keep_memory()
    if world.size == 1:
        return world
    store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_seconds)))
    if os.environ.get("GROUP_WORLD_SIZE") == "1":
        # torchrun keeps one store over restarts, where ranks would find the ports of dead ranks (pytorch issue 135712).
        # On one node all ranks know the same count; on several set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1.
        store = dist.PrefixStore(f"start {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    # Without `device_id`: where a device is bound, torch has every rank outside of a new group join a split of NCCL's
    # communicator that the ranks inside never begin, also for a gloo group (pytorch issue 145376).
    backend = BACKENDS[world.device.type]
    timeout = _group_timeout(world, backend)
    dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout)
    world = replace(world, tensors=dist.group.WORLD, objects=dist.group.WORLD, store=store)
    if world.device.type == "cuda":
        world = replace(world, objects=_new_group(world, range(world.size), "gloo"))
    _connect(world)
    return replace(world, node_size=math.gcd(*gather_objects(world, own_node_size(world.size))))


@cache
def _warn_of_unseen_gpus() -> None:
    if os.path.exists("/proc/driver/nvidia/version") and os.environ.get("RANK", "0") == "0":
        print("WARNING: this machine has a GPU, but torch sees none: its build is for a CPU, or for another driver")


def own_device(device: str) -> torch.device:
    """Return this rank's device, from then on torch's current one. `device`: auto, cpu or cuda. Not collective.

    A rank that asks a GPU for its memory before would open a context on the first rank's.
    """
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        if device == "auto":
            _warn_of_unseen_gpus()
        return torch.device("cpu")
    own, num_gpus = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if not num_gpus:
        raise ConfigError("run.device = cuda, but torch sees no GPU; take auto, or install torch with CUDA")
    if own >= num_gpus:
        raise ConfigError(
            f"rank {own} of this machine has no GPU: there are {num_gpus}; start that many ranks at most "
            f"(--ranks={num_gpus}; make RANKS={num_gpus}), or take --run.device=cpu"
        )
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        # Pages and training take turns with the same memory: blocks that were freed must join to serve larger tensors.
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    # With such segments NCCL may not register the buffers of CUDA graphs (illegal accesses; Megatron-LM asserts it).
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    # NCCL from 2.22 on would connect, and allocate, at the first call of each algorithm: after pages took the rest.
    os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False  # sums of bf16 products stay fp32
    torch.cuda.set_device(own)
    return torch.device("cuda", own)


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
    """Leave the other ranks after a success; after a failure call `abandon`."""
    if world.size == 1:
        return
    gc.collect()  # CUDA graphs with collectives in them: NCCL would wait for their end
    if world.device.type == "cuda":
        torch.cuda.synchronize()
    dist.destroy_process_group()


def collect() -> None:
    """Give back what nobody uses any more: objects in cycles, and the GPU memory that torch keeps for the next."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def abandon(code: int) -> None:
    """End this process at once if it is one of several ranks.

    After a failure the others may wait in a collective, and torch's ways to leave them wait for its end: with NCCL
    for ever, and before anything is printed.
    """
    if dist.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def barrier(world: World) -> None:
    if world.size > 1:
        dist.barrier(group=world.objects)


def gather_objects(world: World, value: T) -> list[T]:
    """Return every rank's value, by rank, on every rank. Small values cost a single collective."""
    return start_gather(world, value)()


def start_gather(world: World, value: T) -> Callable[[], list[T]]:
    """Send a value; return the rest of `gather_objects`, before which the world does nothing else. Does not wait."""
    if world.size == 1:
        return lambda: [value]
    data = pickle.dumps(value)
    head = len(data).to_bytes(HEAD_BYTES, "little")
    first = _start_bytes(world, head + data[:FIRST_BYTES], HEAD_BYTES + FIRST_BYTES)

    def finish() -> list[T]:
        parts = first()
        largest = max(int.from_bytes(part[:HEAD_BYTES], "little") for part in parts)
        small = largest <= FIRST_BYTES
        parts = [part[HEAD_BYTES:] for part in parts] if small else _start_bytes(world, data, largest)()
        return [pickle.loads(part) for part in parts]

    return finish


def _start_bytes(world: World, data: bytes, size: int) -> Callable[[], list[memoryview]]:
    """Send bytes; return a function that waits for every rank's, padded to `size`."""
    own = torch.zeros(size, dtype=torch.uint8)
    own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    if world.shared and size <= world.shared.slot_bytes:
        parts, wait = world.shared.post(own), world.shared.wait
    else:
        parts = torch.empty(world.size, size, dtype=torch.uint8)
        wait = all_gather_into_tensor(parts.flatten(), own, group=world.objects, async_op=True).wait

    def finish() -> list[memoryview]:
        wait()
        return [part.numpy().data for part in parts]

    return finish


def check_alike(world: World, seen: Mapping[str, object]) -> None:
    """Raise ConfigError, on all ranks, if a rank sees what has a name here otherwise than rank 0 does. Collective.

    For files that all machines need alike (`spans_machines`); the ranks of one have the same.
    """
    first, *others = gather_objects(world, seen)
    for rank, theirs in enumerate(others, start=1):
        if differ := [name for name in first if theirs.get(name) != first[name]]:
            raise ConfigError(
                f"{differ[0]} is not on the machine of rank {rank} what it is on that of rank 0; have it in a folder "
                "that all machines share, or the same files at the same path"
            )


def broadcast_object(world: World, value: T) -> T:
    """Return rank 0's value on every rank."""
    if world.size == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, group=world.objects, group_src=0)
    return box[0]


def sum_tensors(world: World, tensors: Iterable[Tensor]) -> None:
    """Replace each tensor by its sum over the world's ranks, in flat buckets: few, large all-reduces."""
    bucket: list[Tensor] = []
    for tensor in tensors if world.size > 1 else ():
        if bucket and (tensor.dtype != bucket[0].dtype or sum(t.nbytes for t in (*bucket, tensor)) > BUCKET_BYTES):
            _sum_bucket(world, bucket)
            bucket = []
        bucket.append(tensor)
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


def any_up(world: World, *flags: bool) -> list[bool]:
    """Return which of the flags any rank of the world has up. Collective."""
    ups = torch.tensor(flags, dtype=torch.int32, device=world.device)
    max_tensor(world, ups)
    return ups.bool().tolist()


def broadcast_tensors(world: World, tensors: Iterable[Tensor], source: int = 0) -> None:
    """Overwrite each tensor with that of the rank `source`."""
    if world.size > 1:
        for tensor in tensors:
            dist.broadcast(tensor, group=world.tensors, group_src=source)


def gather_tensor(world: World, own: Tensor) -> Tensor:
    """Return every rank's tensor, all of one shape, on every rank. [n, ...] -> [size, n, ...]

    Of shared memory it may be a part, valid until the call after the next.
    """
    rows = max((world.shared.slot_bytes if world.shared else 1) * len(own) // max(own.nbytes, 1), 1)
    if world.shared and rows >= len(own):
        return world.shared.exchange(own)
    everyone = own.new_empty(world.size, *own.shape)
    if world.shared:
        for i in range(0, len(own), rows):
            everyone[:, i : i + rows] = world.shared.exchange(own[i : i + rows])
    else:
        all_gather_into_tensor(everyone.flatten(0, 1), own.contiguous(), group=world.tensors)
    return everyone


def subsets(world: World, parts: Iterable[Sequence[int]], by_gloo: bool = False) -> list[World | None]:
    """Return a world of each part, a list of the run's ranks; None for a part without this rank.

    Every rank of the run takes part in making every group. A part's ranks keep their order, as torch's groups do.
    `by_gloo`: tensors, of which there will be few, travel by gloo too; NCCL would take half a GiB of the device.
    """
    backend = "gloo" if by_gloo else BACKENDS[world.device.type]
    return [_subset(world, sorted(part), backend) for part in parts]


def own_subset(world: World, parts: Iterable[Sequence[int]]) -> World:
    """Return the world of the part that has this rank: `parts` divide the ranks of the run."""
    [own] = filter(None, subsets(world, parts))
    return own


def with_shared_memory(world: World, slot_bytes: int = SharedMemory.SLOT_BYTES, naps: bool = False) -> World:
    """Return the world with memory that its ranks share, where they are neighbours on one machine, and CPU ranks.

    What has room in a slot passes through it in a tenth of the time of gloo. `naps`: ranks may wait long, and leave
    their cores to others meanwhile.
    """
    is_local = world.size > 1 and world.node_size > 0 and world.node_size % world.size == 0
    if not is_local or world.device.type != "cpu" or platform.machine() not in ("x86_64", "AMD64"):
        return world
    path = broadcast_object(world, SharedMemory.make_file(world.size, slot_bytes) if world.is_main else "")
    if not path:
        return world
    try:
        shared = SharedMemory(path, world.rank, world.size, world.timeout_seconds, slot_bytes, naps)
        barrier(world)
    finally:
        if world.is_main:
            os.unlink(path)  # the memory stays until the last process has ended
    return replace(world, shared=shared)


def symmetric_memory(world: World) -> Tensor | None:
    """Return bytes that the GPUs of all ranks can read, to sum through; None where torch or the machine has none.

    Collective. A sum by one kernel, in which each rank reads from all, waits less than NCCL's where rows are few.
    """
    if not world.tensors or world.device.type != "cuda":
        return None
    memory, problem = None, ""
    try:
        from torch.distributed import _symmetric_memory  # alpha in torch 2.11 and 2.13

        memory = _symmetric_memory.empty(ONE_SHOT_BYTES // world.size, dtype=torch.uint8, device=world.device)
        _symmetric_memory.rendezvous(memory, world.tensors)
    except (ImportError, RuntimeError) as error:
        problem = str(error).partition("\n")[0]
    problems = [*filter(None, gather_objects(world, problem))]
    if problems and world.is_main:
        print(f"ranks of a replica sum by NCCL, which is slower for few rows: {problems[0]}")
    return None if problems else memory


def beside(world: World) -> World:
    """Return a world of all the run's ranks with a gloo group of its own: for a thread beside the work. Collective."""
    group = _new_group(world, range(world.size), "gloo") if world.size > 1 else None
    return replace(world, tensors=group, objects=group)


def _subset(world: World, ranks: Sequence[int], backend: str) -> World | None:
    if len(ranks) == world.size:
        return world  # without a second communicator of the same ranks
    tensors = objects = None
    if len(ranks) > 1:
        tensors = _new_group(world, ranks, backend)
        objects = tensors if backend == "gloo" else _new_group(world, ranks, "gloo")
    if world.rank not in ranks:
        return None
    own = replace(world, rank=ranks.index(world.rank), size=len(ranks), tensors=tensors, objects=objects)
    _connect(own)
    return own


def _new_group(world: World, ranks: Sequence[int], backend: str) -> dist.ProcessGroup:
    """Make a process group. Every rank of the run takes part."""
    assert world.tensors is dist.group.WORLD, "torch makes groups among all ranks of the run, not among a part of them"
    group = dist.new_group(ranks, _group_timeout(world, backend), backend)
    if backend == "gloo" and world.rank in ranks:
        dist.barrier(
            group=group
        )  # a rank that ends early, refused perhaps, would cut the others off while they connect
    return group


def _group_timeout(world: World, backend: str) -> timedelta:
    """Return the time-out of a group: the world's; torch's default would be 10 or 30 minutes.

    NCCL's is twice as long. When it is over, torch aborts the process without a word of ours; by then the watchdog has
    named the missing ranks, and the ranks that wait by gloo have ended in an error that torchrun sees.
    """
    return timedelta(seconds=world.timeout_seconds * (2 if backend == "nccl" else 1))


def _connect(world: World) -> None:
    """Use the group for tensors once: NCCL connects the ranks then, which the capture of a CUDA graph cannot wait for.

    All groups are connected where they are made, in one order on all ranks: so no two ranks wait in different groups.
    """
    max_tensor(world, torch.zeros(1, device=world.device))


# ---- samples that travel ------------------------------------------------------------------------------------------


def header_of(sample: Sample, rank: int) -> Sample:
    """Return a sample without its tokens, which are on `rank`."""
    there = Elsewhere(len(sample.token_ids), rank)
    experts = Elsewhere(len(sample.experts), rank) if sample.experts else ()
    return replace(sample, token_ids=there, logprobs=there, experts=experts)


def with_samples(groups: Iterable[Group], samples: Iterable[Sample]) -> list[Group]:
    """Return groups with other samples, one after the other, in the place of theirs."""
    rest = iter(samples)
    return [replace(group, samples=tuple(itertools.islice(rest, len(group.samples)))) for group in groups]


class Parcel(NamedTuple):
    """Tokens and log-probs of a sample, and its choices of experts, on their way from rank to rank."""

    target: int
    id: SampleId
    length: int
    source: int
    experts: int  # bytes

    @property
    def num_bytes(self) -> int:
        return 8 * self.length + self.experts


def bring_tokens(world: World, wanted: Sequence[Response], here: Iterable[Sample | Example]) -> list[Response]:
    """Return `wanted` with the tokens that other ranks have. Collective; `here`: what others may want of this rank."""
    if world.size == 1:
        return list(wanted)
    missing = [
        Parcel(world.rank, item.id, there.length, there.rank, len(item.experts))
        for item in wanted
        if isinstance(there := item.token_ids, Elsewhere)
    ]
    parcels = [parcel for part in gather_objects(world, missing) for parcel in part]
    known = {item.id: item for item in here}
    arrived: dict[SampleId, dict[str, Any]] = {}
    sums = itertools.accumulate((parcel.num_bytes for parcel in parcels), initial=0)
    for _, bucket in itertools.groupby(zip(sums, parcels), key=lambda item: item[0] // BUCKET_BYTES):
        arrived |= _carry(world, [parcel for _, parcel in bucket], known)
    return [replace(item, **arrived.get(item.id, {})) for item in wanted]


def _carry(
    world: World, parcels: Sequence[Parcel], known: Mapping[SampleId, Sample | Example]
) -> dict[SampleId, dict[str, Any]]:
    """Carry parcels, sorted by target; return the `token_ids`, `logprobs` and `experts` that arrive here."""
    leaving = [parcel for parcel in parcels if parcel.source == world.rank]
    arriving = sorted((p for p in parcels if p.target == world.rank), key=lambda parcel: parcel.source)
    out, into, packed = [0] * world.size, [0] * world.size, bytearray()
    for parcel in leaving:
        out[parcel.target] += parcel.num_bytes
        packed += array("i", known[parcel.id].token_ids)
        packed += array("f", known[parcel.id].logprobs)
        packed += bytes(known[parcel.id].experts)
    for parcel in arriving:
        into[parcel.source] += parcel.num_bytes
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
        if parcel.experts:
            arrived[parcel.id]["experts"] = bytes(rest[: parcel.experts])
            rest = rest[parcel.experts :]
    return arrived


Outbox = queue.SimpleQueue[tuple[int, bytes | None]]  # target and message; None: the end for this target


class SampleStream:
    """Python values on their way from some ranks to others, while both go on with their work. Making one is collective.

    A rank either feeds (`open_to`, `send`) or is fed by one other (`open_from`, `take`), until `close`. One thread does
    all transfers of a rank, and no other uses the stream's own group: gloo cannot tell whether a send or receive is
    complete, a thread must wait for it. Each message is acknowledged when it has arrived; `send` refuses a message
    while `in_flight` messages are not acknowledged. An error in the thread, also a wait over the world's time-out, is
    raised by the next call.
    """

    END = -1  # in the place of a message's size

    def __init__(self, world: World, in_flight: int = 4):
        self.rank, self.seconds, self.in_flight = world.rank, world.timeout_seconds, in_flight
        self.group = beside(world).tensors
        self.thread: threading.Thread | None = None

    def open_to(self, targets: Sequence[int]) -> None:
        """Begin to feed the ranks `targets`."""
        self.targets, self.sent = targets, Counter[int]()
        self.arrived = Counter[int]()  # counted by the thread alone
        self.outbox: Outbox | None = queue.SimpleQueue()
        self._start_thread(self._feed, self.outbox)

    def open_from(self, source: int) -> None:
        """Begin to be fed by the rank `source`."""
        self.outbox, self.is_over = None, False
        self.inbox: queue.SimpleQueue = queue.SimpleQueue()
        self._start_thread(self._receive, source)

    def _start_thread(self, work: Callable[..., None], *args: object) -> None:
        assert self.thread is None, "the stream is open"
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._run, args=(work, *args), daemon=True)
        self.thread.start()

    def has_room(self, target: int) -> bool:
        """Return whether a value may be sent to this rank now: not too many are on their way to it."""
        self._raise_error()
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
            self._raise_error()
        return arrived

    def close(self) -> None:
        """End the stream: a feeder's once everything has arrived, other streams once their feeder has ended."""
        assert self.thread, "the stream is not open"
        if self.outbox is not None:
            for target in (*self.targets, self.END):
                self.outbox.put((target, None))
        self.thread.join()  # each of its waits is bounded
        self.thread = None
        self._raise_error()

    def _raise_error(self) -> None:
        if self.error:
            raise self.error

    def _run(self, work: Callable[..., None], *args: object) -> None:
        """Do the thread's work; keep an error of any kind for the next call to raise. (thread)"""
        try:
            work(*args)
        except Exception as error:
            self.error = error
            if is_lost(error) and "timed out" in str(error).lower():
                self.error = TimeoutError(f"rank {self.rank} waited {self.seconds:g} s for {self.waits_for}")
            elif is_lost(error):
                self.error = ConnectionError(f"rank {self.rank} waited for {self.waits_for}, and lost it: {error}")

    def _feed(self, outbox: Outbox) -> None:
        """Send the messages of the outbox. (thread)"""
        while (message := outbox.get())[0] != self.END:
            target, data = message
            self.waits_for = f"rank {target} to acknowledge samples"
            size = torch.tensor(self.END if data is None else len(data))
            dist.send(size, target, group=self.group)
            if data is not None:
                dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), target, group=self.group)
            dist.recv(size, target, group=self.group)
            self.arrived[target] += 1

    def _receive(self, source: int) -> None:
        """Fill the inbox until the feeder ends the stream. (thread)"""
        self.waits_for = f"rank {source} to send samples or the end of the rollout"
        size = torch.tensor(0)
        while not self.is_over:
            dist.recv(size, source, group=self.group)
            if int(size) != self.END:
                data = torch.empty(int(size), dtype=torch.uint8)
                dist.recv(data, source, group=self.group)
                self.inbox.put(pickle.loads(data.numpy().data))
            dist.send(size, source, group=self.group)
            self.is_over = int(size) == self.END


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


class TensorParallel:
    """Ranks `rank // size * size` and the next `size - 1` compute every layer together. Making one is collective.

    `reduce` and `gather` return the same bits on all ranks of a group, so they sample the same tokens.
    """

    def __init__(self, world: World, size: int = 1, first: int = 0):
        """`first`: the first rank that decodes; replicas count from it."""
        self.size, self.rank = size, world.rank % size
        self.replica, self.num_replicas = (world.rank - first) // size, (world.size - first) // size
        own = own_subset(world, [range(i, i + size) for i in range(0, world.size, size)])
        self.world, self.symmetric = with_shared_memory(own), symmetric_memory(own)

    def reduce(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' `x`, which it may overwrite."""
        if self.size == 1:
            return x
        if self.world.shared and x.nbytes <= self.world.shared.slot_bytes:
            return self.world.shared.exchange(x).sum(0)
        x, group = x.contiguous(), self.world.tensors
        if group and self.symmetric is not None and x.nbytes <= self.symmetric.nbytes:
            place = self.symmetric[: x.nbytes].view(x.dtype).view_as(x)
            # Copied by a kernel of its own: torch's form that copies too tells other ranks before all of it is written.
            place.copy_(x)
            return torch.ops.symm_mem.one_shot_all_reduce(place, "sum", group.group_name)
        dist.all_reduce(x, group=group)
        return x

    def gather(self, x: Tensor) -> Tensor:
        """Join all ranks' `x` along the last dimension. [T, n] -> [T, size * n]"""
        return x if self.size == 1 else torch.cat([*gather_tensor(self.world, x)], -1)


TPGroups = dict[int, TensorParallel]  # by size


def make_tp_groups(world: World, sizes: Collection[int], first: int = 0) -> TPGroups:
    """Return the groups of each size. All are made and used once here, at the start, and none later. Collective."""
    for size in sizes:
        check_group_size(size, world.size, world.node_size)
    if world.size > 1 and world.device.type == "cpu":
        _agree_on_kernels(world)
    return {size: TensorParallel(world, size, first) for size in sorted(sizes)}


def _agree_on_kernels(world: World) -> None:
    """Decode by compiled kernels on all ranks or on none: they round otherwise, and a group must draw the same tokens.

    One rank of each machine compiles, and the others find what it made.
    """
    if world.rank % (world.node_size or 1) == 0:
        native.library()
    barrier(world)
    has = gather_objects(world, native.library() is not None)
    if any(has) and not all(has):
        native.give_up()
        if world.is_main:
            lacking = [rank for rank, its in enumerate(has) if not its]
            print(
                f"decodes by torch's operations, which are slower: ranks {lacking} have no compiled kernels", flush=True
            )
