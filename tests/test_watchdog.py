"""A wait that gets long is reported once, with who is missing and where the others are."""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT

import parallel
from metrics import Clock, read_records
from parallel import World
from process.watchdog import Watchdog

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


@pytest.mark.slow
def test_a_stopped_rank_ends_the_run_in_one_clear_error(tmp_path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += [str(ROOT / "train.py"), "--config", str(ROOT / "configs" / "tiny.toml")]
    command += ["--warm_start.steps=0", "--run.steps=1000", "--data.eval_prompts=0", "--run.timeout_seconds=8"]
    command += ["--scheduler.num_prompts=4", "--rollout.max_response_tokens=32"]
    run = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    records = tmp_path / "runs" / "tiny" / "steps.jsonl"
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline and not (records.exists() and len(read_records(records)) > 1):
        time.sleep(0.1)
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    ranks = {p: Path(f"/proc/{p}/environ").read_bytes().split(b"\0") for p in children}
    stopped = next(int(p) for p, variables in ranks.items() if b"RANK=1" in variables)
    os.kill(stopped, signal.SIGSTOP)
    said = ""
    while "error: rank 0" not in said and (line := run.stdout.readline()):
        said += line
    os.kill(stopped, signal.SIGKILL)  # torchrun would give it 30 s
    said += run.communicate(timeout=600)[0]
    assert run.returncode == 1
    assert "for ranks [1], which show no life" in said and "error: rank 0 lost the others in" in said
    assert "Traceback (most recent call last)" not in said.split("error: rank 0")[0]
