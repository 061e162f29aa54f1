"""Collectives among real gloo processes."""

import os
import platform
import re
import resource
import socket
import time
from array import array
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random

import pytest
import torch
import torch.multiprocessing as mp
from conftest import ALONE, thorough
from torch import Tensor

import parallel
from core import Sample
from engine.cpu import SharedMemory
from parallel import World
from weights.sharding import shard_groups

# ---- collectives -------------------------------------------------------------------------------------------------


def tensors_of(rank: int) -> list[Tensor]:
    """Mixed dtypes and shapes, an empty one, a strided one; bf16 values that add up exactly."""
    generator = torch.Generator().manual_seed(rank)
    shapes = [(3, 5), (), (0,), (40,), (2, 2, 2), (7,), (1,)]
    dtypes = [torch.float32, torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.bfloat16, torch.int64]
    tensors = [torch.randint(-8, 8, s, generator=generator).to(d) for s, d in zip(shapes, dtypes, strict=True)]
    return [*tensors, torch.randn(4, 6, generator=generator).T, torch.randn(9, generator=generator)[::2]]


def check_collectives(world: World) -> None:
    everyone = [tensors_of(rank) for rank in range(world.size)]
    expected = [torch.stack(parts).sum(0, dtype=parts[0].dtype) for parts in zip(*everyone, strict=True)]
    calls = []
    all_reduce = torch.distributed.all_reduce
    parallel.dist.all_reduce = lambda flat, **group: (calls.append(flat.nbytes), all_reduce(flat, **group))
    for bucket_bytes, least in ((1, 8), (100, 5), (2**20, 5)):
        parallel.BUCKET_BYTES = bucket_bytes
        calls.clear()
        mine = tensors_of(world.rank)
        views = [tensor.data_ptr() for tensor in mine]
        parallel.sum_tensors(world, iter(mine))
        for tensor, total, view in zip(mine, expected, views, strict=True):
            torch.testing.assert_close(tensor, total, rtol=1e-6, atol=1e-6)
            assert tensor.data_ptr() == view  # in place
        largest = max(tensor.nbytes for tensor in mine)
        assert len(calls) >= least and max(calls) <= max(bucket_bytes, largest)
    assert len(calls) == 5  # float32, float64, bfloat16, int64, float32
    parallel.dist.all_reduce = all_reduce
    parallel.sum_tensors(world, [])

    for size in (0, parallel.FIRST_BYTES // 2, *range(parallel.FIRST_BYTES - 60, parallel.FIRST_BYTES + 9, 4), 10**6):
        data = os.urandom(size) if world.rank == 1 else bytes(world.rank)
        gathered = parallel.gather_objects(world, data)
        assert gathered[world.rank] == data and [len(d) for d in gathered] == [
            size if rank == 1 else rank for rank in range(world.size)
        ]
    begun = parallel.start_gather(world, world.rank)
    if world.is_main:
        time.sleep(0.02)  # the others need not wait for this
    assert begun() == [*range(world.size)]
    value = {"rank": world.rank, "text": "ü" * world.rank, "tuple": (1, 2.5)}
    values = parallel.gather_objects(world, value)
    assert [v["rank"] for v in values] == list(range(world.size)) and values[world.rank] == value
    assert [len(v["text"]) for v in values] == list(range(world.size))
    assert parallel.broadcast_object(world, value) == {"rank": 0, "text": "", "tuple": (1, 2.5)}
    assert parallel.broadcast_object(world, None if world.is_main else "mine") is None

    theirs = [torch.full((3,), float(world.rank)), torch.tensor(world.rank)]
    parallel.broadcast_tensors(world, theirs)
    assert all((tensor == 0).all() for tensor in theirs)

    highest = torch.tensor([world.rank, -world.rank])
    parallel.max_tensor(world, highest)
    assert highest.tolist() == [world.size - 1, 0]

    check_samples(world)
    if world.rank == 1:
        time.sleep(0.5)
    before = time.time()
    parallel.barrier(world)
    arrived = parallel.gather_objects(world, (before, time.time()))
    assert min(after for _, after in arrived) >= max(before for before, _ in arrived) - 0.01


def check_samples(world: World) -> None:
    """Each rank gets the tokens of its share from the ranks that have them, however many travel at a time."""
    rng = Random(5)  # the same on all ranks
    whole = [
        Sample(i, 0, 0, array("i", range(n)), array("f", [-rng.random() for _ in range(n)]), "stop", (), took)
        for i, n in enumerate(rng.choices(range(1, 40), k=23))
        for took in [bytes(range(3 * n)) if i % 3 else ()]  # which experts
    ]
    known = [
        sample if rank == world.rank else parallel.header_of(sample, rank)
        for sample, rank in zip(whole, rng.choices(range(world.size), k=len(whole)), strict=True)
    ]
    shares: list[list[int]] = [[] for _ in range(world.size)]
    for i in range(len(whole)):
        shares[rng.randrange(world.size)].append(i)
    assert [len(sample.token_ids) for sample in known] == [len(sample.token_ids) for sample in whole]
    for parallel.BUCKET_BYTES in (1, 200, 2**20):
        for share in (shares[world.rank], range(23) if world.is_main else (), ()):
            brought = parallel.bring_tokens(world, [known[i] for i in share], known)
            assert brought == [whole[i] for i in share]


def check_subsets(world: World) -> None:
    """A part of the ranks is a world like any other; the others take no part."""
    pair, others = parallel.subsets(world, [[2, 0], [1, 3]])  # in any order
    mine = pair or others
    assert (pair is None) == (world.rank in (1, 3)) and mine.size == 2
    check_collectives(mine)
    assert parallel.gather_objects(mine, world.rank) == ([0, 2] if pair else [1, 3])
    assert parallel.broadcast_object(mine, world.rank) == (0 if pair else 1)
    if pair:
        check_collectives(pair)
    [alone, _, _, _] = parallel.subsets(world, [[0], [1], [2], [3]])
    assert (alone is None) == (not world.is_main) and (alone is None or (alone.size, alone.tensors) == (1, None))
    assert parallel.subsets(world, [[3, 1, 0, 2]]) == [world], "no second group of all ranks"
    for make in (parallel.SampleStream, lambda part: parallel.TensorParallel(replace(part, size=4), 2)):
        with pytest.raises(AssertionError, match="among all ranks of the run"):
            make(mine)


@pytest.mark.parametrize("size", [thorough(2), 4])
def test_sums_and_exchanges_among_ranks(run_ranks, size: int) -> None:
    run_ranks(size, check_collectives)


def test_a_part_of_the_ranks_is_a_world(run_ranks) -> None:
    run_ranks(4, check_subsets)


def test_a_process_alone_needs_no_group() -> None:
    mine = tensors_of(0)
    parallel.sum_tensors(ALONE, mine)
    parallel.broadcast_tensors(ALONE, mine)
    parallel.barrier(ALONE)
    parallel.stop(ALONE)
    assert all(torch.equal(a, b) for a, b in zip(mine, tensors_of(0), strict=True))
    assert parallel.gather_objects(ALONE, "x") == ["x"] and parallel.broadcast_object(ALONE, "x") == "x"


def test_start_without_torchrun_is_a_world_of_one(monkeypatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    world = parallel.start("cpu", 5.0)
    assert (world.rank, world.size, world.device.type, world.is_main) == (0, 1, "cpu", True)


# ---- time-outs ---------------------------------------------------------------------------------------------------

COLLECTIVES = {
    "sum_tensors": lambda world: parallel.sum_tensors(world, [torch.ones(3)]),
    "gather_objects": lambda world: parallel.gather_objects(world, 1),
}


def wait_in_vain(rank: int, port: int, name: str, folder: Path) -> None:
    """Rank 0 calls the collective `name`; rank 1 lives on and never joins it."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    (folder / f"imported{rank}").touch()
    wait_for(folder / f"imported{1 - rank}")
    world = parallel.start("cpu", 2.0)
    parallel.gather_objects(world, "both are here")
    if rank == 1:
        wait_for(folder / "waited")
    else:
        with pytest.raises(RuntimeError) as caught:
            COLLECTIVES[name](world)
        (folder / "waited").write_text(str(caught.value))
    os._exit(0)  # no orderly end with a rank that does not answer


def wait_for(path: Path) -> None:
    deadline = time.perf_counter() + 600
    while not path.exists() and time.perf_counter() < deadline:
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_rank_that_never_joins_costs_the_others_no_more_than_the_time_out(fork_server, tmp_path, name: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.start_processes(wait_in_vain, (port, name, tmp_path), nprocs=2, start_method="forkserver")
    error = (tmp_path / "waited").read_text()  # of a lost connection if rank 1 has gone before
    assert re.search("time.?out|timed out", error, re.IGNORECASE)


def wait_in_groups(world: World, done: Path) -> None:
    """Rank 0 calls a collective of each kind of group; the other ranks live on and join none."""
    world = replace(world, timeout_seconds=0.5)
    tensor_parallel, (shards, replicas) = parallel.TensorParallel(world, 2), shard_groups(world, 2)
    assert (shards.rank, replicas.rank) == (world.rank % 2, world.rank // 2) and shards.size == replicas.size == 2
    collectives: list[Callable[[], object]] = [
        partial(tensor_parallel.reduce, torch.ones(SharedMemory.SLOT_BYTES)),
        partial(parallel.max_tensor, shards, torch.ones(3)),
        partial(parallel.gather_objects, replicas, 1),
    ]
    for collective in collectives if world.rank == 0 else ():
        with pytest.raises(RuntimeError, match="(?i)timed out"):
            collective()
    if world.rank == 0:
        done.touch()
    wait_for(done)
    assert done.exists(), "rank 0 still waits"


def test_groups_have_the_time_out_of_the_run(run_ranks, tmp_path) -> None:
    run_ranks(4, wait_in_groups, tmp_path / "done")


def leave_at_once(world: World) -> None:
    for _ in range(100):
        torch.distributed.destroy_process_group(parallel.beside(world).tensors)


def test_a_rank_that_leaves_a_new_group_at_once_does_not_cut_the_others_off(run_ranks) -> None:
    """As one that is refused right after does; the others may still connect."""
    run_ranks(2, leave_at_once)


def count_page_faults(keep: bool) -> int:
    """Print how many pages of five large tensors are new to the process."""
    if keep:
        parallel.start("cpu", 60.0)
    for _ in range(3):  # after those of the first tensors
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(5):
            torch.ones(2**23)
        found = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    print(found)
    return 0


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="an option of glibc")
def test_memory_of_large_tensors_is_kept_for_the_next(run_mains) -> None:
    kept, given_back = (int(run_mains(1, count_page_faults, keep)[0].out) for keep in (True, False))
    assert 10 * kept < given_back
