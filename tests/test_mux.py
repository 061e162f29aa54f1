"""mux.py: jobs that share workers are started, watched, ended and resumed."""

import json
import multiprocessing as mp
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from conftest import ROOT

import mux
from config import load_config
from process import launcher
from process.group_timeline import held, timeline

JOB = str(Path(__file__).with_name("mux_job.py"))


@pytest.fixture
def files(tiny_folder: Path, tmp_path: Path, monkeypatch) -> Callable[..., list[str]]:
    """Return the command line of a group of jobs with these names, in a folder of its own."""
    monkeypatch.chdir(tmp_path)  # sockets have short names

    def make(*names: str, steps: int = 4, **settings: object) -> list[str]:
        for name in names:
            text = f'[run]\ndir = "{name}"\nsteps = {steps}\ndevice = "cpu"\n[model]\npath = "{tiny_folder}"\n'
            Path(f"{name}.toml").write_text(text + "[overlap]\ntrain_ranks = 1\n[rollout]\nkv_gib = 0.01\n")
        jobs = json.dumps([f"{name}.toml" for name in names])
        return [f"--mux.jobs={jobs}", "--mux.dir=mux", *(f"--mux.{key}={value}" for key, value in settings.items())]

    return make


def steps_of(name: str) -> list[int]:
    path = Path(name) / "steps.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


def events() -> list[dict]:
    return [json.loads(line) for line in Path("mux/mux.jsonl").read_text().splitlines()]


def test_jobs_take_turns_to_their_ends(files, capsys) -> None:
    assert mux.main(files("a", "b"), JOB) == 0
    assert steps_of("a") == steps_of("b") == [1, 2, 3, 4]
    out = capsys.readouterr().out
    assert "a: done after step 4\n" in out and re.search(r"b: step 4/4, reward 0.500, .*, waited \d", out)
    assert re.search(r"\n +train 0 [ab.AB]{96} \d+%\n", out) and out.count("rollout 0 ") == 1
    spans = sorted((span.worker, span.start, span.end) for span in held(events()))
    assert len(spans) == 2 * 2 * (4 + 1)
    assert all(end <= start or a != b for (a, _, end), (b, start, _) in pairwise(spans)), "a worker had two jobs"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("crashes", "exit code 1: error: as ordered"),
        ("dies", "signal 9 ended it"),
        ("hangs", "its phase rollout took over mux.phase_seconds = 3"),
    ],
)
def test_a_job_that_ends_badly_is_named_and_the_others_go_on(files, capsys, name: str, said: str) -> None:
    arguments = files("a", name, "b", phase_seconds=3)
    assert mux.main(arguments, JOB) == 1
    assert steps_of("a") == steps_of("b") == [1, 2, 3, 4] and steps_of(name) == [1]
    told = f"{name}: ended after step 1: {said}; the others go on ({name}/console.log)\n"
    assert told in capsys.readouterr().out
    if name == "dies":
        assert mux.main([*arguments, "--resume"], JOB) == 0
        assert steps_of("a") == steps_of(name) == [1, 2, 3, 4]


def _main(arguments: list[str]) -> None:
    with open("out", "w") as sys.stdout:
        sys.exit(mux.main(arguments, JOB))


def start(arguments: list[str]) -> BaseProcess:
    """Start a group of the jobs slow and a; return its process once both have taken two steps."""
    process = mp.get_context("forkserver").Process(target=_main, args=(arguments,))
    process.start()
    until(lambda: all(2 in steps_of(name) for name in ("slow", "a")))
    return process


def until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_killed_server_ends_all_jobs_with_one_clear_error_each_and_all_resume(files) -> None:
    arguments = files("slow", "a", steps=6)
    Path("a.toml").write_text(Path("a.toml").read_text().replace("steps = 6", "steps = 600"))
    start(arguments).kill()
    for name in ("slow", "a"):
        until(Path(name, "console.log").read_text)
        text = Path(name, "console.log").read_text()
        gone = "it has gone; start the group again with mux.py --resume"
        assert text == f"error: group.server = 'mux/server/socket': {gone}\n"
    done = len(steps_of("a"))
    Path("a.toml").write_text(Path("a.toml").read_text().replace("steps = 600", f"steps = {done + 2}"))
    assert mux.main([*arguments, "--resume"], JOB) == 0
    assert steps_of("slow") == [1, 2, 3, 4, 5, 6] and steps_of("a") == [*range(1, done + 3)]


def test_an_interrupt_ends_all_jobs_after_their_steps(files) -> None:
    arguments = files("slow", "a", steps=600)
    process = start(arguments)
    os.kill(process.pid or 0, signal.SIGINT)
    process.join(60)
    out = Path("out").read_text()
    assert process.exitcode == 130
    assert re.search(r"slow: stopped after step \d+\n", out) and re.search(r"a: stopped after step \d+\n", out)
    assert not any(Path(name, "console.log").read_text() for name in ("slow", "a"))


def test_check_looks_at_all_jobs(files, capfd) -> None:
    assert mux.main([*files("a", "b"), "--check"], JOB) == 0
    assert capfd.readouterr().out.count("fine for 2 ranks on cores") == 2
    assert not Path("mux").exists()


@pytest.mark.parametrize(
    ("jobs", "settings", "message"),
    [
        ("ab", {"host_gib": 0.00001}, r"states take 0.001 GiB of host memory \(a 0.001, b 0.001\), which has 0.000"),
        ("aa", {}, "two jobs have the name a"),
        ("a", {"server": "127.0.0.1:1"}, "give the group a secret in PLAINROLL_GROUP_SECRET"),
        ("a", {"train_workers": 0}, "mux.train_workers = 0 is too small"),
        ("a", {"dir": "x" * 120}, "cannot listen at .*AF_UNIX path too long"),
    ],
)
def test_what_cannot_work_is_refused_before_any_job_starts(files, capsys, jobs, settings, message) -> None:
    arguments = files(*jobs, **settings)
    assert mux.main(arguments, JOB) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not Path("a").exists()


def test_a_run_is_not_overwritten(files, capsys) -> None:
    arguments = files("a", "b")
    Path("b").mkdir()
    Path("b/config.toml").write_text("")
    assert mux.main(arguments, JOB) == 2
    assert "'b' already holds a run; continue it with --resume" in capsys.readouterr().err


def test_a_timeline_shows_who_had_a_worker_and_when() -> None:
    rows = [
        {"at": 0.0, "event": "begins", "job": "old", "pool": "train", "phase": "train", "workers": ["train 0"]},
        {"at": 10.0, "event": "starts", "jobs": ["fox", "owl"]},
        {"at": 10.0, "event": "begins", "job": "fox", "pool": "train", "phase": "start", "workers": ["train 0", "r 0"]},
        {"at": 12.0, "event": "shrinks", "job": "fox", "pool": "train", "phase": "start", "workers": ["train 0"]},
        {"at": 12.0, "event": "begins", "job": "owl", "pool": "rollout", "phase": "rollout", "workers": ["r 0"]},
        {"at": 14.0, "event": "left", "job": "fox", "pool": "train", "workers": []},
        {"at": 18.0, "event": "exits", "job": "fox", "code": 0},
    ]
    assert held(rows) == [
        ("r 0", "fox", "start", 0.0, 2.0),
        ("train 0", "fox", "start", 0.0, 4.0),
        ("r 0", "owl", "rollout", 2.0, 8.0),
    ]
    lines = timeline(rows, ["train 0", "r 0", "r 1"]).splitlines()
    assert lines[0].startswith("timeline, 8.0 s in 96 columns: a fox, b owl;")
    assert lines[1].endswith("." * 48 + " 50%") and lines[1].count("A") == 48
    assert lines[2].count("b") + lines[2].count("A") == 96 and lines[2].endswith(" 100%") and lines[3].endswith(" 0%")


def test_the_file_of_the_example_is_the_default() -> None:
    assert load_config(mux.GroupFile, str(ROOT / "configs/mux.toml"), []) == mux.GroupFile()


def _settle(where: str) -> None:
    os.environ |= {"TORCHELASTIC_RUN_ID": "x", "LOCAL_RANK": "1"}
    launcher.settle()
    Path(where).write_text(" ".join(map(str, os.sched_getaffinity(0))))


def test_a_rank_stays_on_its_cores(tmp_path, monkeypatch) -> None:
    last = max(os.sched_getaffinity(0))
    monkeypatch.setenv(launcher.CORES, f"0;{last}")
    rank = mp.get_context("fork").Process(target=_settle, args=(str(tmp_path / "cores"),))
    rank.start()
    rank.join(60)
    assert (tmp_path / "cores").read_text() == str(last)


def test_the_workers_of_a_group_share_the_cores() -> None:
    config = mux.MuxConfig(train_workers=2, rollout_workers=1)
    parts = mux.environment(config, mux.place_of([0, 1], [0]), False)["PLAINROLL_CORES"].split(";")
    assert len(parts) == 3 and all({*map(int, part.split(","))} <= os.sched_getaffinity(0) for part in parts)
