"""mux.py: jobs that share workers are started, watched, ended and resumed."""

import asyncio
import json
import multiprocessing as mp
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from conftest import ROOT, thorough, train_runs
from groups import until
from test_updates import tokens_of

import mux
from config import ConfigError, load_config
from metrics import read_records
from policies.admission import Asked
from process import group_jobs, launcher
from process.group_admission import Resident, decide
from process.group_timeline import held, timeline
from rewards import leftovers

RANKS = str(ROOT / "benchmarks" / "forked_ranks.py")
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


@pytest.fixture(autouse=True)
def often(monkeypatch) -> None:
    """Have a group look after its jobs, and see their end, ten times a second."""
    monkeypatch.setattr(mux, "SIGN_SECONDS", 0.1)


def steps_of(name: str) -> list[int]:
    path = Path(name) / "steps.jsonl"
    return [record["step"] for record in read_records(path)] if path.exists() else []


def events() -> list[dict]:
    return read_records("mux/mux.jsonl")


@pytest.mark.slow
def test_jobs_take_turns_to_their_ends(files, capsys) -> None:
    assert mux.main(files("a", "b"), JOB) == 0
    assert steps_of("a") == steps_of("b") == [1, 2, 3, 4]
    out = capsys.readouterr().out
    assert "a: done after step 4\n" in out and re.search(r"b: step 4/4, reward 0.500, .*, waited \d", out)
    assert re.search(r"\n +train 0 [ab.AB]{90} \d+%\n", out) and out.count("rollout 0 ") == 1
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
@pytest.mark.slow
def test_a_job_that_ends_badly_is_named_and_the_others_go_on(files, capsys, name: str, said: str) -> None:
    arguments = files("a", name, "b", phase_seconds=3)
    assert mux.main(arguments, JOB) == 1
    assert steps_of("a") == steps_of("b") == [1, 2, 3, 4] and steps_of(name) == [1]
    told = rf"{name}: ended after step 1: {said}(; the others go on)? \({name}/console.log\)\n"  # if any still runs
    assert re.search(told, capsys.readouterr().out)
    if name == "dies":
        assert mux.main([*arguments, "--resume"], JOB) == 0
        assert steps_of("a") == steps_of(name) == [1, 2, 3, 4]


@pytest.mark.parametrize("name", ["dies_with_a_part", thorough("dies_in_the_tail_of_a_part")])
@pytest.mark.slow
def test_a_job_that_dies_with_a_part_of_its_workers_holds_up_nobody(files, capsys, name: str) -> None:
    """It waits for the rest of them, or has given it back."""
    arguments = files("part", name, "other_part", steps=8, rollout_workers=2)
    assert mux.main(arguments, JOB) == 1
    assert steps_of("part") == steps_of("other_part") == [*range(1, 9)]
    assert re.search(f"{name}: ended after step [1-7]: signal 9 ended it; the others go on", capsys.readouterr().out)
    mine = [event for event in events() if event.get("job") == name and event.get("pool") == "rollout"]
    had = [event["workers"] for event in mine if "workers" in event]
    assert len(had[-2]) == 1 and had[-1] == [], "a worker of two when it died"
    assert mux.main([*arguments, "--resume"], JOB) == 0
    assert steps_of(name) == [*range(1, 9)]


def _main(arguments: list[str], *script: str) -> None:
    os.environ["OMP_NUM_THREADS"], mux.SIGN_SECONDS = "1", 0.1
    with open("out", "w") as sys.stdout:
        sys.exit(mux.main(arguments, *script))


@pytest.fixture
def begin(fork_server) -> Iterator[Callable[..., BaseProcess]]:
    """Start mux.py in a process of its own, which does not outlive the test."""
    begun = []

    def begin(arguments: list[str], script: str = JOB) -> BaseProcess:
        begun.append(mp.get_context("forkserver").Process(target=_main, args=(arguments, script)))
        begun[-1].start()
        return begun[-1]

    yield begin
    for process in begun:
        process.kill()  # its jobs end by themselves
        process.join()


def listens() -> bool:
    """Whether the server takes commands: its socket is there before it does."""
    return Path("out").exists() and "jobs start; " in Path("out").read_text()


@pytest.mark.thorough
def test_a_killed_server_ends_all_jobs_with_one_clear_error_each_and_all_resume(files, begin) -> None:
    arguments = files("slow", "a", steps=600)
    process = begin(arguments)
    until(lambda: 2 in steps_of("a") and 2 in steps_of("slow"))
    process.kill()
    for name in ("slow", "a"):
        until(Path(name, "console.log").read_text)
        text = Path(name, "console.log").read_text()
        gone = "it has gone; start the group again with mux.py --resume"
        assert text == f"error: group.server = 'mux/server/socket': {gone}\n"
    done = {name: len(steps_of(name)) for name in ("slow", "a")}
    for name, steps in done.items():
        path = Path(f"{name}.toml")
        path.write_text(path.read_text().replace("steps = 600", f"steps = {steps + 2}"))
    assert mux.main([*arguments, "--resume"], JOB) == 0
    assert all(steps_of(name) == [*range(1, steps + 3)] for name, steps in done.items())


def test_an_interrupt_ends_all_jobs_after_their_steps(files, begin) -> None:
    arguments = files("slow", "a", steps=600)
    process = begin(arguments)
    until(lambda: 2 in steps_of("a") and 2 in steps_of("slow"))
    os.kill(process.pid or 0, signal.SIGINT)
    process.join(60)
    out = Path("out").read_text()
    assert process.exitcode == 130
    assert re.search(r"slow: stopped after step \d+\n", out) and re.search(r"a: stopped after step \d+\n", out)
    assert not any(Path(name, "console.log").read_text() for name in ("slow", "a"))


def test_a_job_that_ends_before_its_checkpoint_is_an_error(files, begin) -> None:
    arguments = files("forgets", "a", steps=600)
    process = begin(arguments)
    until(lambda: 2 in steps_of("a") and 2 in steps_of("forgets"))
    assert mux.main(["cancel", "forgets", arguments[1]]) == 0
    until(lambda: "forgets: ended" in Path("out").read_text())
    how = r"forgets: ended after step \d+: before its checkpoint; the newest is of step 0; the others go on"
    assert re.search(how, Path("out").read_text())
    assert mux.main(["cancel", "a", arguments[1]]) == 0
    process.join(60)
    assert process.exitcode == 1 and "a: stopped after step" in Path("out").read_text()


@pytest.mark.slow
def test_a_job_that_is_killed_and_resumed_is_the_same_as_alone_and_so_are_the_others(
    files, begin, settings, run_ranks, capsys
) -> None:
    """Two real jobs of two ranks each, on one core that trains and one that decodes."""
    own: dict[str, object] = {
        "run__steps": 4,
        "run__checkpoint_every": 1,
        "run__eval_every": 0,
        "overlap__train_ranks": 1,
    }
    own |= {"data__eval_prompts": 0, "reward__also": f"{ROOT}/tests/graders.py:share_of_digits=1"}
    for seed, name in enumerate("ab"):
        write_settings(name, settings(name, run__seed=seed, **own))
    process = begin(["--mux.jobs=[]", "--mux.dir=mux"], RANKS)
    until(listens)
    for name in "ab":
        given = ["--slo=1000", "--rollout-seconds=2", "--train-seconds=2"]  # its own steps differ, on a busy machine
        assert mux.main(["submit", f"{name}.toml", *given, "--mux.dir=mux"]) == 0
    until(lambda: 2 in steps_of("b"))
    for pid in [pid for pid in leftovers.descendants(process.pid) if b"--group.job=b" in _command(pid)]:
        os.kill(pid, signal.SIGKILL)
    until(lambda: "b: ended after step" in Path("out").read_text())
    assert mux.main(["resume", "b", "--mux.dir=mux"]) == 0
    until(lambda: all(f"{name}: done after step 4" in Path("out").read_text() for name in "ab"))
    assert mux.main(["status", "--mux.dir=mux"]) == 0
    os.kill(process.pid, signal.SIGTERM)
    process.join(60)
    assert process.exitcode == 128 + signal.SIGTERM
    assert "a: step 4/4, ended with code 0" in capsys.readouterr().out
    alone = [[*settings(f"alone_{name}", run__seed=seed, **own)] for seed, name in enumerate("ab")]
    run_ranks(2, train_runs, *alone)
    for name in "ab":
        together, solo = (losses_of(Path(folder)) for folder in (name, f"alone_{name}"))
        assert together == solo and len({loss for loss, _ in solo}) == 4
        weights = [Path(f) / "checkpoints/step_000004/model.safetensors" for f in (name, f"alone_{name}")]
        assert weights[0].read_bytes() == weights[1].read_bytes()


# A grader: no round ends before both jobs are there, or the first could be done before the second has begun.
BOTH_ARE_THERE = """
import sys
import time

sys.path.insert(0, {tests!r})
import graders

EVENT = '"event": "%s", "job": "%s", "pool": "all", "phase": "%s"'

def is_absent():
    said = open({events!r}).read()
    builds = (EVENT % ("ends", job, "start") in said and EVENT % ("asks", job, "rollout") not in said for job in "ab")
    return said.count('"joined"') < 2 or any(builds)  # one that waits for its start gets it after this round

def share_of_digits(response, answer, row):
    while response != answer and is_absent():  # equal: in the trial before the start
        time.sleep(0.02)
    return graders.share_of_digits(response, answer, row)
"""


@pytest.mark.thorough
@pytest.mark.slow
def test_the_next_job_decodes_beside_the_tail_of_another(
    files, settings, run_ranks, mixed_prompts: Path, tmp_path: Path
) -> None:
    """Two real jobs on the same two workers, on which they train too."""
    grader = tmp_path / "grader.py"
    grader.write_text(BOTH_ARE_THERE.format(events=str(tmp_path / "mux" / "mux.jsonl"), tests=str(ROOT / "tests")))
    own: dict[str, object] = {"run__eval_every": 0, "run__dump_rollouts": "true"}
    own |= {"data__train": mixed_prompts, "data__task": f"{grader}:share_of_digits", "reward__timeout_seconds": 600}
    own |= {"data__eval_prompts": 0, "scheduler__policy": "synchronous", "scheduler__window_iterations": 4}
    own |= {"rollout__stop": json.dumps([*"ABCDEFGH"]), "rollout__max_prompt_tokens": 32}
    own |= {"rollout__max_response_tokens": 96, "trainer__lr": 3e-3}
    alone: list[list[str]] = []
    for seed, name in enumerate("ab"):
        mine = {"run__seed": seed, "run__steps": 6 + 2 * seed}  # the last rounds of b have no tail: nobody waits
        write_settings(name, settings(name, group__tail_share=0.5, **mine, **own))
        alone.append(settings(f"alone_{name}", **mine, **own))
    assert mux.main(['--mux.jobs=["a.toml", "b.toml"]', "--mux.dir=mux"], RANKS) == 0
    rows = [row for row in events() if row["event"] in ("begins", "grows", "shrinks", "ends")]
    tails = [(tail, after) for tail, after in pairwise(rows) if tail["event"] == "shrinks"]
    assert len(tails) >= 2
    for tail, after in tails:  # it has a worker still
        assert after["event"] == "begins" and after["phase"] == "rollout" and after["job"] != tail["job"]
        assert sorted(tail["workers"] + after["workers"]) == ["rollout 0", "train 0"]
    assert any(row["event"] == "grows" for row in rows)
    run_ranks(2, train_runs, *alone)
    for name in "ab":
        folders = Path(name), Path(f"alone_{name}")
        assert tokens_of(folders[0]) == tokens_of(folders[1])
        for together, solo in zip(*map(losses_of, folders), strict=True):
            assert together == pytest.approx(solo, abs=1e-5)


def losses_of(folder: Path) -> list[tuple[float, float]]:
    records = read_records(folder / "steps.jsonl")
    return [(record["train"]["loss"], record["train"]["grad_norm"]) for record in records if record["step"]]


def write_settings(name: str, flags: list[str]) -> None:
    """Write a command line as a job's file."""
    text = ""
    for section in sorted({flag.partition(".")[0][2:] for flag in flags}):
        keys = [flag.partition(".")[2] for flag in flags if flag.startswith(f"--{section}.")]
        text += f"[{section}]\n" + "".join(map(_toml_line, keys))
    Path(f"{name}.toml").write_text(text)


def _toml_line(key: str) -> str:
    name, _, value = key.partition("=")
    is_text = not (value == "true" or value[0] in "[0123456789")
    return f'{name} = "{value}"\n' if is_text else f"{name} = {value}\n"


def _command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


@pytest.mark.slow
def test_check_looks_at_all_jobs(files, capfd) -> None:
    assert mux.main([*files("a", "b"), "--check"], JOB) == 0
    told = capfd.readouterr().out.splitlines()[1::2]
    assert len(told) == 2
    for line in told:
        assert re.fullmatch(r"fine for 2 ranks on cores \d+;\d+; 10000000 s to end", line), "others' phases take long"
    assert not Path("mux").exists()
    assert mux.main([*files("a"), "--check", "--resume"], JOB) == 0
    assert capfd.readouterr().out.endswith("s to end, resumed\n")


def test_a_flag_that_a_word_does_not_take_is_refused(files, capsys) -> None:
    group, job = files("a"), ["submit", "a.toml", "--mux.dir=mux"]
    for arguments, flag in (
        ([*job, "--check"], "check"),
        ([*job, "--resume"], "resume"),
        (["resume", "a", "--slo=1.2"], "slo"),
        (["status", "--train-seconds=1"], "train-seconds"),
        ([*group, "--rollout-workers=1"], "rollout-workers"),
    ):
        assert mux.main(arguments, JOB) == 2
        assert f"error: --{flag} has no effect here" in capsys.readouterr().err
    assert not Path("a").exists()


@pytest.mark.parametrize(
    ("jobs", "settings", "message"),
    [
        ("ab", {"host_gib": 0.00001}, r"states take 0.001 GiB of host memory \(a 0.001, b 0.001\), which has 0.000"),
        ("aa", {}, "two jobs have the name a"),
        ("a", {"server": "127.0.0.1:1"}, "give the group a secret in PLAINROLL_GROUP_SECRET"),
        ("a", {"train_workers": 0}, "mux.train_workers = 0 is too small"),
        ("a", {"server": "localhost"}, "mux.server = 'localhost' is not host:port with a port from 1 to 65535"),
        ("a", {"server": "[]:80"}, r"mux.server = '\[\]:80' is not host:port"),
        ("a", {"server": "localhost:70000"}, "mux.server = 'localhost:70000' is not host:port"),
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


def sleeper(folder: Path) -> mux.JobRun:
    return mux.JobRun("a", "a.toml", mux.place_of([0], [0]), folder, 1, ["sleep", "60"], {}, 0.0, False, 2.0)


def test_a_name_of_no_machine_is_one_clear_error(files, capsys, monkeypatch) -> None:
    monkeypatch.setenv(mux.SECRET, "secret")
    assert mux.main(files("a", server="a..b:80"), JOB) == 2
    assert "error: cannot listen at 'a..b:80' (" in capsys.readouterr().err
    assert mux.main(["status", "--mux.server=a..b:80"]) == 1
    assert "error: the group at 'a..b:80': cannot reach it (" in capsys.readouterr().err


def test_a_check_that_a_signal_has_ended_is_not_well(tmp_path, monkeypatch) -> None:
    jobs = [sleeper(tmp_path) for _ in range(2)]
    jobs[0].command, jobs[1].command = ["sh", "-c", "kill -9 $$"], ["true"]
    assert mux.check(jobs, False) == -signal.SIGKILL and mux.check(jobs[1:], False) == 0


def test_a_job_that_starts_runs_and_hears_of_its_end(tmp_path, capsys) -> None:
    """Between its start and its process, too."""
    group = mux.Mux(mux.MuxConfig(dir=str(tmp_path)), JOB, False)

    async def live(job: mux.JobRun, end: Callable[[], object]) -> int:
        group.start(job, False)
        assert job.runs
        end()
        await asyncio.gather(*group.tasks)
        assert not job.runs
        return group.codes["a"]

    job = sleeper(tmp_path)
    assert asyncio.run(live(job, job.stop)) == -signal.SIGTERM and job.stopped
    assert asyncio.run(live(job, partial(job.kill, "it hangs"))) == -signal.SIGKILL
    assert asyncio.run(live(job, lambda: (job.stop(), job.kill("it hangs")))) == -signal.SIGKILL
    assert not job.stopped and "a: ended after step 0: it hangs" in capsys.readouterr().out
    job.command = ["no such program"]
    assert asyncio.run(live(job, lambda: None)) == 1
    assert "a: ended after step 0: it cannot be started: " in capsys.readouterr().out


def test_events_that_cannot_be_written_end_the_group(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mux").mkdir()
    Path("mux/mux.jsonl").symlink_to("/dev/full")
    assert mux.main(["--mux.jobs=[]", "--mux.dir=mux"], JOB) == 2
    said = "error: the group has ended: [Errno 28] No space left on device; go on with --resume\n"
    assert capsys.readouterr().err == said


def test_what_a_job_leaves_behind_is_killed_in_time(tmp_path, monkeypatch) -> None:
    """Else a daemon of its own would hold up the group for ever."""
    monkeypatch.setattr(group_jobs, "LEFT_SECONDS", 0.2)
    group, job = mux.Mux(mux.MuxConfig(dir=str(tmp_path)), JOB, False), sleeper(tmp_path)
    job.command = ["sh", "-c", "setsid sleep 1000 & exit 0"]
    found, looks = job._processes, [False, True]
    monkeypatch.setattr(job, "_processes", lambda: found() if not looks or looks.pop(0) else [])  # not while it starts

    async def live() -> None:
        group.start(job, False)
        await asyncio.gather(*group.tasks)

    asyncio.run(live())
    assert group.codes["a"] == 0 and not job.runs and not looks and not found()


def test_what_a_kill_left_of_the_newest_event_is_cut_off(tmp_path) -> None:
    events = tmp_path / "mux.jsonl"
    for text, whole in (('{"at": 1}\n{"at": 2, "ev', '{"at": 1}\n'), ('{"at"', ""), ("", "")):
        events.write_text(text)
        assert mux.whole_lines(events).read_text() == whole
    events.unlink()
    assert not mux.whole_lines(events).exists()


def test_no_folder_of_a_job_ends_the_others(tmp_path) -> None:
    (tmp_path / "steps.jsonl").mkdir()
    assert sleeper(tmp_path).newest_record() == {}


def test_a_resumed_job_that_is_cancelled_before_its_first_step_has_lost_nothing(tmp_path, capsys) -> None:
    group, job = mux.Mux(mux.MuxConfig(dir=str(tmp_path)), JOB, False), sleeper(tmp_path)
    (tmp_path / "steps.jsonl").write_text('{"step": 7, "reward": 0.5}\n')
    (tmp_path / "checkpoints" / "step_000004").mkdir(parents=True)

    async def live() -> None:
        group.start(job, True)
        job.stop()
        await asyncio.gather(*group.tasks)

    asyncio.run(live())
    assert job.stopped and "ended after" not in capsys.readouterr().out
    job.command = ["sh", "-c", "trap 'exit 143' TERM; while true; do sleep 0.1; done"]

    async def lose() -> None:
        group.start(job, True)
        while not job.process:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)  # for its trap; without it -15 is the code, and the message the same
        (tmp_path / "steps.jsonl").write_text('{"step": 6, "reward": 0.5}\n')  # its steps 5 and 6
        job.stop()
        await asyncio.gather(*group.tasks)

    asyncio.run(lose())
    assert "before its checkpoint; the newest is of step 4" in capsys.readouterr().out


def test_a_job_runs_until_its_last_process_has_ended(tmp_path) -> None:
    """Ranks that outlive their launcher, too."""
    group, job = mux.Mux(mux.MuxConfig(dir=str(tmp_path)), JOB, False), sleeper(tmp_path)
    job.command = ["sh", "-c", f"setsid sleep 60 & echo $! > {tmp_path}/rank; exit 3"]

    async def live() -> tuple[bool, int]:
        group.start(job, False)
        while not job.process or job.process.returncode is None:
            await asyncio.sleep(0.01)
        still = job.runs
        os.kill(int((tmp_path / "rank").read_text()), signal.SIGKILL)
        await asyncio.gather(*group.tasks)
        return still, group.codes["a"]

    assert asyncio.run(live()) == (True, 3) and not job.runs


def test_a_listed_job_is_resumed_as_its_file_says_by_then(files) -> None:
    arguments = files("a", steps=4)
    config = load_config(mux.GroupFile, None, arguments).mux
    Path("mux").mkdir()

    async def live() -> str:
        group = mux.Mux(config, JOB, False)
        group.jobs["a"] = mux.make_listed(config, "a.toml", JOB, False)
        Path("a.toml").write_text(Path("a.toml").read_text().replace("steps = 4", "steps = 100"))
        group.command({"command": "resume", "job": "a"})
        told = group.command({"command": "status"})
        group.kill_all("enough")
        await asyncio.gather(*group.tasks)
        return told

    assert asyncio.run(live()).startswith("a: step 0/100, waits")


def test_recorded_seconds_say_more_than_those_of_the_submission(tmp_path) -> None:
    group = mux.Mux(mux.MuxConfig(dir=str(tmp_path)), JOB, False)
    found = group._asked("a", tmp_path, (2.0, 1.0), 2.0, 1, 1)
    assert (found.rollout, found.train) == (2.0, 1.0)
    seconds = {"rollout": 200.0, "train": 90.0, "step": 300.0}
    (tmp_path / "steps.jsonl").write_text(json.dumps({"step": 1, "seconds": seconds}) + "\n")
    found = group._asked("a", tmp_path, (2.0, 1.0), 2.0, 1, 1)
    assert (found.rollout, found.train) == (200.0, 100.0)


def test_a_job_that_is_cancelled_twice_ends_at_once(tmp_path, capsys) -> None:
    group, job = mux.Mux(mux.MuxConfig(dir=str(tmp_path)), JOB, False), sleeper(tmp_path)
    job.command = ["sh", "-c", "trap '' TERM; sleep 60"]

    async def live() -> list[str]:
        group.start(job, False)
        told = [group.command({"command": "cancel", "job": "a"}) for _ in range(2)]
        await asyncio.gather(*group.tasks)
        return told

    first, second = asyncio.run(live())
    assert "ends after its step" in first and "ends at once" in second
    assert "a: ended after step 0: cancelled twice" in capsys.readouterr().out


def test_a_submitted_job_takes_all_rollout_workers_unless_it_says_how_many(tmp_path, monkeypatch) -> None:
    group = mux.Mux(mux.MuxConfig(dir=str(tmp_path), rollout_workers=3), JOB, False)
    monkeypatch.setattr(group, "submit", lambda path, slo, workers, seconds: str(workers))
    told = {"command": "submit", "path": "a.toml", "slo": 2.0, "seconds": []}
    assert [group.command(told | {"rollout": number}) for number in (None, 2)] == ["3", "2"]


def test_a_start_says_how_far_it_is(tmp_path, capsys) -> None:
    group = mux.Mux(mux.MuxConfig(dir=str(tmp_path)), JOB, False)
    group.jobs["a"] = job = sleeper(tmp_path)
    (tmp_path / "console.log").write_text("error: of an earlier start\n")
    job.printed = (tmp_path / "console.log").stat().st_size
    for text in ("", "warm start: step 1", " of 2\n", ""):
        with open(tmp_path / "console.log", "a") as console:
            console.write(text)
        group.phase["a"] = "start"
        group.report()
    (tmp_path / "steps.jsonl").write_text('{"step": 1, "reward": 0.5}\n')
    for _ in range(3):
        group.report()
    step = "a: step 1/1, reward 0.500, start, waited 0.0 s\n"
    assert capsys.readouterr().out == "a: warm start: step 1 of 2\n" + step


def test_a_job_that_was_abandoned_ends_but_not_when_it_has_been_resumed(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(mux, "LEAVE_SECONDS", -1.0)
    group = mux.Mux(mux.MuxConfig(dir=str(tmp_path)), JOB, False)
    job = sleeper(tmp_path)
    (tmp_path / "steps.jsonl").write_bytes(b"\xff no record\n")
    assert job.newest_record() == {}

    async def live() -> list[str]:
        group.record("left", job="a", pool="train", workers=[])
        group.start(job, False)
        while not job.runs:
            await asyncio.sleep(0.01)
        group.end_abandoned()
        said = [job.why]
        group.record("left", job="a", pool="rollout", workers=[], done=True)  # while others of its ranks end
        group.end_abandoned()
        said.append(job.why)
        group.record("left", job="a", pool="train", workers=[])
        group.end_abandoned()
        await asyncio.gather(*group.tasks)
        return [*said, job.why]

    resumed, done, abandoned = asyncio.run(live())
    assert not resumed and not done
    assert abandoned == "the rank that asked for its permits has gone: it has printed no error"


def test_a_job_that_had_a_worker_is_ended_sooner(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(mux, "LEAVE_SECONDS", 1e6)
    group, due = mux.Mux(mux.MuxConfig(dir=str(tmp_path)), JOB, False), []
    for workers in ([], ["train 0"]):
        group.record("left", job="a", pool="train", workers=workers)
        due.append(group.left["a/train"])
    assert due[1] < due[0] - 1e5


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
    assert lines[0].startswith("timeline, 8.0 s in 90 columns: a fox, b owl;")
    assert lines[1].endswith("." * 45 + " 50%") and lines[1].count("A") == 45
    assert lines[2].count("b") + lines[2].count("A") == 90 and lines[2].endswith(" 100%") and lines[3].endswith(" 0%")


# ---- admission ---------------------------------------------------------------------------------------------------


def resident(name: str, rollout: float, train: float, slo: float = 2.0, on: tuple[int, ...] = (0,)) -> Resident:
    return Resident(Asked(name, rollout, train, slo, len(on)), (0,), on)


def test_a_job_joins_where_all_keep_their_slos() -> None:
    job = Asked("new", 10, 10, 1.2)
    assert decide(job, [], 1, 1) == ((0,), (0,), "a group of its own")
    assert decide(job, [resident("a", 10, 10)], 1, 1) == ((0,), (0,), "with a, so that all keep their SLOs")
    assert decide(job, [resident("a", 30, 10)], 1, 2)[:2] == ((0,), (1,)), "with a node more it need not wait"
    long = [resident("a", 10, 30)]
    train, rollout, why = decide(job, long, 2, 2)
    assert (train, rollout) == ((1,), (1,)) and re.fullmatch(
        r"a group of its own; not with a: job new would take \d+ s an iteration, and may take 24", why
    )
    with pytest.raises(ConfigError, match="too few workers are free: 0 of 1 to train and 1 of 1 to decode; not with a"):
        decide(job, long, 1, 2)
    listed = replace(resident("l", 10, 100), train=(0, 1))  # it went on, and nobody asked whether it fits
    with pytest.raises(ConfigError, match="0 of 1 to train"):
        decide(job, [resident("a", 10, 10), listed], 2, 2)
    wide = Asked("new", 10, 10, 2.0, rollout_nodes=2)
    assert decide(wide, [resident("a", 10, 10, on=(1,))], 1, 3)[:2] == ((0,), (1, 0))
    with pytest.raises(ConfigError, match="1 of 1 to train and 1 of 2 to decode"):
        decide(wide, [resident("a", 10, 10)], 1, 1)


def test_commands_go_to_the_server_that_runs(files, begin, capsys) -> None:
    folder = files("slow", "a", "b", steps=600)[1]
    begin(["--mux.jobs=[]", folder])
    until(listens)

    def ask(*words: str) -> tuple[int, str]:
        code, (out, err) = mux.main([*words, folder]), capsys.readouterr()
        return code, out + err

    assert ask("status") == (0, "no job\n")
    assert "nobody knows how long the phases of slow take" in ask("submit", "slow.toml")[1]
    given = "--rollout-seconds=2", "--train-seconds=1"
    assert ask("submit", "slow.toml", *given) == (0, "slow is admitted on train 0, rollout 0: a group of its own\n")
    assert "slow runs already" in ask("submit", "slow.toml", *given)[1]
    for wrong, why in (
        (["--rollout-seconds=-1", "--train-seconds=1"], "both above 0"),
        (["--rollout-seconds=nan", "--train-seconds=1"], "both above 0"),
        (["--rollout-seconds=1"], "both above 0, or neither"),
        ([*given, "--slo=0.5"], "take 1 or more"),
        ([*given, "--rollout-workers=0"], "the group has 1"),
        (["--slo=soon"], "error: --slo: invalid float value: 'soon'; --help shows"),
    ):
        assert why in ask("submit", "a.toml", *wrong)[1]
    Path("garbage.toml").write_text("this is [ not")
    Path("folder.toml").mkdir()
    text = Path("a.toml").read_text()
    for change in (
        ("train_ranks = 1", "train_ranks = 5"),
        ('dir = "a"', 'dir = "a.toml/a"'),
        ('path = "', 'path = "/no'),
    ):
        Path(f"{change[0][:3]}.toml").write_text(text.replace(*change))
    for wrong_file, why in (
        ("garbage", f"error: {Path.cwd()}/garbage.toml: not valid TOML"),
        ("folder", "folder.toml: cannot read it (Is a directory)"),
        ("missing", "missing.toml: cannot read it (No such file or directory)"),
        ("tra", "overlap.train_ranks = 5 is over mux.train_workers = 1"),
        ("dir", "run.dir = 'a.toml/a': Not a directory; choose another folder"),
        ("pat", "no such folder"),
    ):
        code, told = ask("submit", f"{wrong_file}.toml", *given, "--slo=1e6")
        assert code == 1 and why in told and told.count("\n") == 1
    assert ask("submit", "a.toml", *given)[0] == 0
    code, told = ask("submit", "b.toml", *given, "--slo=1.0")
    assert code == 1 and "b is not admitted" in told and "not with slow, a: " in told
    until(lambda: 2 in steps_of("slow"))
    assert re.search(r"slow: step \d+/600, \w+, waited \d", ask("status")[1])
    assert ask("resume", "slow") == (1, "error: no job 'slow' has ended; those that have: none\n")
    assert ask("cancel", "slow")[0] == 0
    until(lambda: "slow: stopped after step" in Path("out").read_text())
    done = len(steps_of("slow"))
    assert "slow is admitted on train 0, rollout 0" in ask("resume", "slow")[1]
    until(lambda: len(steps_of("slow")) > done)
    assert ask("dance")[0] == ask("cancel")[0] == 2
    assert "closed a connection" not in Path("out").read_text(), "its users are no strangers"


def test_a_command_without_a_server_is_refused(files, capsys) -> None:
    assert mux.main(["status", files("a")[1]]) == 1
    told = capsys.readouterr().err
    assert told.startswith(
        "error: the group at 'mux/server/socket': cannot reach it (No such file or directory); start"
    )


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
