"""A wait that gets long is reported once, with who is missing and where the others are."""

import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import parallel
import train
from job import Job
from metrics import Clock
from parallel import World
from process import run_folder, watchdog
from process.watchdog import Watchdog
from settings import Config

pytestmark = pytest.mark.slow  # processes and whole runs

TIMEOUT = 1.0


@pytest.fixture
def store() -> dist.Store:
    return dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


def dogs(store, folder: Path, places: list[Clock], size: int) -> list[Watchdog]:
    return [Watchdog(world(rank, size, store), place, folder) for rank, place in enumerate(places)]


def world(rank: int, size: int, store) -> World:
    return World(rank, size, torch.device("cpu"), store=store, timeout_seconds=TIMEOUT)


def waiting(stage: str) -> Clock:
    clock = Clock()
    clock.stages.append(stage)
    return clock


@pytest.mark.slow
def test_a_rank_without_life_is_named_once_and_all_stacks_are_written(store, tmp_path, capfd) -> None:
    first, second = dogs(store, tmp_path, [waiting("exchange"), waiting("exchange")], size=3)
    with first, second:
        time.sleep(3 * TIMEOUT)
        assert all("test_watchdog.py" in (tmp_path / f"rank_{r}.txt").read_text() for r in range(2))
    said = capfd.readouterr().err
    assert said.count("has waited") == 1 and "rank 0 has waited" in said and "error" not in said
    assert "for ranks [2], which show no life" in said and "rank 2: no sign of life yet" in said


def test_a_rank_that_stops_in_the_middle_is_told_from_one_that_is_elsewhere(store, tmp_path, capfd) -> None:
    first, second, third = dogs(store, tmp_path, [waiting("exchange"), waiting("decode"), waiting("train")], size=3)
    with first, third:
        with second:
            time.sleep(0.55 * TIMEOUT)
        time.sleep(TIMEOUT)
    said = capfd.readouterr().err
    assert "for ranks [1], which show no life" in said and "was in decode of step 0" in said
    assert "in train of step 0, no progress" in said


def test_ranks_that_live_but_are_elsewhere_are_named(store, tmp_path, capfd) -> None:
    busy = waiting("train")
    first, second = dogs(store, tmp_path, [waiting("window_wait"), busy], size=2)
    with first, second:
        for _ in range(30):
            time.sleep(TIMEOUT / 20)
            busy.move()
    said = capfd.readouterr().err
    assert "perhaps for [1], which are in other stages" in said and "makes progress, in train" in said


def test_a_rank_on_a_gpu_ends_when_another_has_failed(store, tmp_path, capfd, monkeypatch) -> None:
    """NCCL waits for the lost rank for ever, and in a call that no signal interrupts."""
    ended = threading.Event()
    monkeypatch.setattr(parallel, "abandon", lambda code: ended.set())
    monkeypatch.setattr(watchdog, "FAILED_SECONDS", 0.1)
    watchdog.tell_failure(world(2, 3, store))  # before a restart
    on_cpu, on_gpu = dogs(store, tmp_path, [waiting("train"), waiting("train")], size=3)
    on_gpu.ends_process = True
    with on_cpu, on_gpu:
        assert not ended.wait(0.5)
        with pytest.raises(ValueError, match="mine"):
            with run_folder.guarded(Config(), tmp_path / "run", world(2, 3, store), Clock()):
                raise ValueError("mine")
        assert ended.wait(60)
    said = capfd.readouterr().err
    assert "error: rank 1 ends, for rank 2 has failed" in said and "rank 0 ends" not in said


def test_who_gets_on_is_not_reported_and_leaves_no_file(store, tmp_path, capfd) -> None:
    clock, inner = Clock(), None
    with Watchdog(world(0, 2, store), clock, tmp_path / "stacks"):
        for _ in range(30):
            time.sleep(TIMEOUT / 20)
            inner = inner or Clock(parent=clock)
            with inner.span("evaluate"):
                pass
    assert not capfd.readouterr().err and not list(tmp_path.iterdir())


def test_on_a_gpu_a_wait_for_a_lost_rank_ends_the_process(store, tmp_path, capfd, monkeypatch) -> None:
    """NCCL would wait for ever in a CUDA graph; gloo ends its waits itself."""
    ended = threading.Event()
    monkeypatch.setattr(parallel, "abandon", lambda code: ended.set())
    with Watchdog(replace(world(0, 2, store), device=torch.device("cuda")), waiting("decode"), tmp_path):
        assert ended.wait(60)
    said = capfd.readouterr().err
    assert said.index("rank 0 has waited") < said.index("error: rank 0 lost ranks [1] in decode of step 0\n")


def train_and_stop(arguments: list[str]) -> int:
    """Train; the second rank stops where its second step begins."""
    take_step = train.take_step

    def take_or_stop(job: Job) -> dict:
        if job.step == 1 and not job.world.is_main:
            os.kill(os.getpid(), signal.SIGSTOP)
        return take_step(job)

    train.take_step = take_or_stop
    return train.main(arguments)


def test_a_stopped_rank_ends_the_run_in_one_clear_error(run_mains, settings) -> None:
    limits = dict(data__train="hailstone", data__eval_prompts=0, run__timeout_seconds=8)
    arguments = [arg for arg in settings(**limits) if not arg.startswith("--data.task")]
    first, second = run_mains(2, train_and_stop, arguments, awaited=[0])
    assert first.code == 1 and second.code is None
    assert "for ranks [1], which show no life" in first.err and "error: rank 0 lost the others in" in first.err
    assert "Traceback (most recent call last)" not in first.err
