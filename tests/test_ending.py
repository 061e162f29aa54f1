"""How ranks end: after a failure each says why and ends at once; NCCL is left only when nothing holds it any more."""

import gc
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from conftest import ALONE, ROOT, thaw

import parallel
import train
from config import ConfigError, load_config
from engine.graphs import DecodeGraphs
from job import Job, open_job
from metrics import Clock
from parallel import World
from process import ending
from settings import Config

# ---- ranks that fail ---------------------------------------------------------------------------------------------


def wait(world: World) -> None:
    parallel.gather_objects(world, world.rank)
    parallel.barrier(world)


def fail(world: World) -> None:
    if world.rank == 0:
        wait(world)
    raise ZeroDivisionError("ours")


def kill(world: World) -> None:
    if world.rank == 0:
        wait(world)
    os.kill(os.getpid(), signal.SIGKILL)


def leave_or_fail(work: Callable[[World], None], folder: Path) -> int:
    destroy = parallel.dist.destroy_process_group

    def leave() -> None:
        (folder / f"left{os.environ['RANK']}").touch()
        destroy()

    parallel.dist.destroy_process_group = leave
    return ending.exit_code(work, "cpu", 1200.0, Clock())  # longer than a test waits for the ranks


@pytest.fixture
def end(run_mains, tmp_path: Path):
    """Do `work` on two ranks; return each one's exit code and printed errors, and whether it left its group."""

    def run(work: Callable[[World], None]) -> list[tuple[int, str, bool]]:
        ranks = enumerate(run_mains(2, leave_or_fail, work, tmp_path))
        return [(ended.code, ended.err, (tmp_path / f"left{rank}").exists()) for rank, ended in ranks]

    return run


def test_a_rank_that_fails_prints_its_traceback_and_ends_all(end) -> None:
    [waits, fails] = end(fail)
    assert fails[0] == 1 and "in fail\n" in fails[1] and fails[1].endswith("ZeroDivisionError: ours\n")
    assert waits[0] == 1 and waits[1].startswith("error: rank 0 lost the others in start of step 0: ")
    assert "Traceback" not in waits[1] and not waits[2] and not fails[2], "NCCL would wait for ever"


def test_a_rank_that_is_killed_ends_all(end) -> None:
    [waits, killed] = end(kill)
    assert killed[0] == -signal.SIGKILL and waits[0] == 1
    assert waits[1].startswith("error: rank 0 lost the others in") and waits[1].count("\n") == 1 and not waits[2]


def test_ranks_that_succeed_leave_their_group(end) -> None:
    assert end(wait) == [(0, "", True), (0, "", True)]


def test_a_closed_output_is_said_in_a_line(monkeypatch, capsys) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        assert ending.exit_code(lambda world: print("step 1", flush=True), "cpu", 5.0, Clock()) == 1
        print("more", flush=True)  # as the interpreter does at its end
        monkeypatch.undo()
    assert capsys.readouterr().err == "error: start of step 0: the program that reads the output has ended\n"


def ended(script: str, *arguments: str) -> tuple[int, str]:
    """Run a script whose output nobody reads; return its exit code and what it says of errors."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, script, *arguments]
    done = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(writer)
    return done.returncode, done.stderr


@pytest.mark.slow
def test_a_script_whose_output_nobody_reads_ends_without_a_word(settings) -> None:
    for call in (
        *(["environments.py", "--help"], ["train.py", "--check", *settings()]),
        ["simulate.py", "--cluster.steps=1", "--cluster.gpus=1"],
    ):
        code, said = ended(*call)
        assert code in (0, 141) and said == "", call  # argparse passes over a closed output


def test_another_broken_pipe_is_said_as_it_is(capsys) -> None:
    def break_pipe(world: World) -> None:
        raise BrokenPipeError("a worker's")

    assert ending.exit_code(break_pipe, "cpu", 5.0, Clock()) == 1
    assert capsys.readouterr().err == "error: start of step 0: a worker's\n"


@pytest.mark.parametrize(("starter", "waits"), [({}, []), ({"TORCHELASTIC_RUN_ID": "x"}, [10.0])])
def test_only_ranks_of_torchrun_wait_for_the_first_to_say_why(starter, waits, monkeypatch, capsys) -> None:
    slept: list[float] = []
    monkeypatch.setattr(ending.time, "sleep", slept.append)
    for rank in (0, 1):
        monkeypatch.setattr(os, "environ", {"RANK": str(rank), **starter})
        assert ending.refuse(ConfigError("no")) == 2
    assert slept == waits and capsys.readouterr().err == 2 * "error: no\n"


# ---- NCCL, by recorded calls -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_nothing_keeps_an_engine_after_its_run(settings, monkeypatch) -> None:
    engines, dump = [], Job.dump
    monkeypatch.setattr(Job, "dump", lambda job, *a: engines.append(weakref.ref(job.engine)) or dump(job, *a))
    arguments = settings(run__steps=1, run__eval_every=0, data__eval_prompts=0, data__train="hailstone")
    config = load_config(Config, None, [a for a in arguments if not a.startswith("--data.task")])
    Path(config.run.dir).mkdir()
    train.train(config, ALONE, resume=False)
    thaw()
    gc.collect()
    assert [engine() for engine in engines] == [None], "its CUDA graphs would hold NCCL's communicators"


@pytest.mark.slow
def test_a_job_that_is_kept_keeps_no_graphs(settings) -> None:
    config = load_config(Config, None, settings(run__steps=1, data__eval_prompts=0))
    Path(config.run.dir).mkdir()
    with open_job(config, ALONE, False) as job:
        graphs = job.engine.runner.graphs = DecodeGraphs(torch.zeros(2, dtype=torch.int32), 2, 8)
        graphs.graphs[1, 2] = object()
    assert not graphs.graphs, "NCCL would wait for their end"


def test_graphs_are_gone_and_the_device_is_idle_before_nccl_goes(monkeypatch) -> None:
    calls: list[str] = []
    for module, name in ((gc, "collect"), (torch.cuda, "synchronize"), (parallel.dist, "destroy_process_group")):
        monkeypatch.setattr(module, name, lambda name=name: calls.append(name))
    parallel.stop(World(0, 2, torch.device("cuda", 0)))
    assert calls == ["collect", "synchronize", "destroy_process_group"]


def test_groups_are_made_without_a_bound_device_and_connected_in_order(monkeypatch) -> None:
    """With one, torch has each rank that is no member of a new group wait in NCCL for those that are."""
    monkeypatch.setattr(os, "environ", {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"})
    calls: list[tuple] = []

    def init(backend: str, **options: object) -> None:
        assert "device_id" not in options
        calls.append((backend, 4, options["timeout"]))

    def new_group(ranks, timeout: timedelta, backend: str) -> str:
        calls.append((backend, len(ranks), timeout))
        return f"group of {len(ranks)}"

    dist = parallel.dist
    monkeypatch.setattr(dist, "rendezvous", lambda *_, **__: iter([(None, 1, 4)]))
    monkeypatch.setattr(dist, "init_process_group", init)
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "barrier", lambda group: calls.append(("barrier", group)))
    monkeypatch.setattr(parallel, "_connect", lambda world: calls.append(("connect", world.size)))
    monkeypatch.setattr(parallel, "gather_objects", lambda world, value: [2] * world.size)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(("device", device)))
    world = parallel.start("cuda", 10.0)
    own = parallel.own_subset(world, [[0, 1], [2, 3]])
    assert (world.device, own.rank, own.size) == (torch.device("cuda", 1), 1, 2)
    short, long = timedelta(seconds=10), timedelta(seconds=20)
    pair = [("nccl", 2, long), ("gloo", 2, short)]  # of the other two ranks: this one does not wait in it
    assert calls == [
        *(("device", 1), ("nccl", 4, long), ("gloo", 4, short), ("barrier", "group of 4"), ("connect", 4)),
        *(*pair, ("barrier", "group of 2"), ("connect", 2), *pair),
    ]
    monkeypatch.setitem(os.environ, "LOCAL_RANK", "2")
    with pytest.raises(ConfigError, match="rank 2 of this machine has no GPU: there are 2"):
        parallel.start("cuda", 10.0)


def test_freed_memory_serves_tensors_of_any_size_unless_the_user_says_otherwise(monkeypatch) -> None:
    """And NCCL takes its memory at once, and registers none of CUDA graphs, which may be taken away."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    nccl = {"NCCL_GRAPH_REGISTER": "0", "NCCL_RUNTIME_CONNECT": "0"}
    set_before = {name: "1" for name in nccl}
    old, new = ({name: "max_split_size_mb:64"} for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"))
    for given, found in (
        ({}, nccl | {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        (old, old | nccl),
        (new | set_before, new | set_before),
    ):
        seen: list[dict] = []
        monkeypatch.setattr(os, "environ", dict(given))
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: seen.append(dict(os.environ)))  # noqa: B023
        parallel.own_device("cuda")
        assert seen == [found], "torch and NCCL read them once"
