"""Let several jobs share one set of workers: `python mux.py configs/mux.toml`. (RollMux, arXiv 2512.11306)

Each job is a complete `train.py` run of its own. While one trains, another decodes; `process.group_server` says whose
turn it is, and every job computes what it would compute alone.
"""

import argparse
import asyncio
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn

import torch

from checkpoint import list_checkpoints, step_of
from config import AUTO, ConfigError, describe, load_config, option
from metrics import read_records
from policies.admission import Asked, asked, recorded_phases
from policies.memory_plan import GIB
from process import command, launcher, run_folder
from process.group_admission import Resident, decide
from process.group_jobs import JobRun
from process.group_server import SIGN_SECONDS, GroupServer, Place, place_of
from process.group_timeline import timeline
from process.permits import SECRET, Connection, GroupError, Message, address_of
from settings import Config, check_run_folder, memory_plan, shape_of

HERE = Path(__file__).parent
LEAVE_SECONDS = 30.0  # for a job to end after a rank that asks for its permits,
HELD_SECONDS = 5.0  # and if that had some: others wait for them


@dataclass(frozen=True)
class MuxConfig:
    dir: str = option("runs/mux", "folder of the group: mux.jsonl, which records every phase, and the server's socket")
    jobs: tuple[str, ...] = option(
        ("configs/mux/seed0.toml", "configs/mux/seed1.toml"), "settings of each job; its name is that of its file"
    )
    train_workers: int = option(1, "cores or GPUs that train", min=1, max=1024)
    rollout_workers: int = option(1, "cores or GPUs that decode", min=1, max=1024)
    server: str = option(
        "", f"where the server listens: host:port, with a secret in {SECRET}; empty: a Unix socket in mux.dir"
    )
    phase_seconds: float = option(3600.0, "a phase that takes longer hangs: its job is killed", above=0.0, max=1e7)
    host_gib: float = option(0.0, "host memory for the states of all jobs, in GiB; 0: all there is", min=0.0, max=1e6)
    slo: float = option(2.0, "times of what a listed job takes alone that it may take, for admission", min=1.0, max=1e6)
    admission: float = option(
        1.0,
        "quantile of the durations of phases by which jobs are admitted; 1: the longest",
        above=0.0,
        max=1.0,
    )

    @property
    def workers(self) -> tuple[str, ...]:
        return place_of(range(self.train_workers), range(self.rollout_workers))["all"]

    @property
    def address(self) -> str:
        return self.server or f"{self.dir}/server/socket"


@dataclass(frozen=True)
class GroupFile:
    mux: MuxConfig = field(default_factory=MuxConfig)


# ---- jobs --------------------------------------------------------------------------------------------------------


def name_of(path: str) -> str:
    return Path(path).stem


def read_seconds(given: object) -> tuple[float, float] | None:
    """Return the seconds of a rollout and a training that a user has given, if any. Raises ConfigError."""
    match given:
        case []:
            return None
        case [float(rollout), float(train)] if 0 < rollout < math.inf and 0 < train < math.inf:
            return rollout, train
    raise ConfigError(f"{given} are no seconds; give --rollout-seconds and --train-seconds, both above 0, or neither")


def load_job(c: MuxConfig, path: str) -> Config:
    """Return the settings of a job, its number of training ranks decided. Raises ConfigError."""
    config = load_config(Config, path, [])
    training = config.overlap.train_ranks
    if training > c.train_workers:
        raise ConfigError(
            f"{path}: overlap.train_ranks = {training} is over mux.train_workers = {c.train_workers}; take auto"
        )
    return replace(config, overlap=replace(config.overlap, train_ranks=c.train_workers)) if training == AUTO else config


def make_job(c: MuxConfig, path: str, config: Config, place: Place, script: str) -> JobRun:
    """Return a job with these settings on its workers. Raises ConfigError."""
    name, ranks, training = name_of(path), len(place["all"]), config.overlap.train_ranks
    flags = [f"--config={path}", f"--group.server={c.address}", f"--group.job={name}"]
    flags += [f"--overlap.train_ranks={training}"]
    is_gpu = config.run.device != "cpu" and torch.cuda.is_available()
    dtype = "bfloat16" if is_gpu and config.model.dtype == "auto" else config.model.dtype
    typed = replace(config, model=replace(config.model, dtype=dtype))
    plans = memory_plan(typed, shape_of(config), ranks, ranks, torch.device("cpu"))  # no GPU is opened here
    host = sum(plans[0 if rank < training else -1].host for rank in range(ranks))
    command = [sys.executable, script, f"--ranks={ranks}", *flags]
    # A step that a signal ends may wait for phases of all others; the server limits what each phase takes.
    env = environment(c, place, is_gpu) | {launcher.SHUTDOWN: os.environ.get(launcher.SHUTDOWN, str(10**7))}
    return JobRun(name, path, place, Path(config.run.dir), config.run.steps, command, env, host, not training, c.slo)


def environment(c: MuxConfig, place: Place, is_gpu: bool) -> dict[str, str]:
    """Return what keeps the ranks of a job on its workers. Raises ConfigError when there are too few GPUs."""
    mine = [c.workers.index(worker) for worker in place["all"]]
    if is_gpu:
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        gpus = gpus if gpus != [""] else [str(i) for i in range(torch.cuda.device_count())]
        if len(gpus) < len(c.workers):
            raise ConfigError(
                f"mux.train_workers + mux.rollout_workers = {len(c.workers)}, but there are {len(gpus)} GPUs"
            )
        return {"CUDA_VISIBLE_DEVICES": ",".join(gpus[i] for i in mine)}
    cores = sorted(os.sched_getaffinity(0))
    each = max(len(cores) // len(c.workers), 1)
    parts = [[cores[(i * each + k) % len(cores)] for k in range(each)] for i in mine]
    threads = os.environ.get("OMP_NUM_THREADS", str(each))
    return {launcher.CORES: ";".join(",".join(map(str, part)) for part in parts), "OMP_NUM_THREADS": threads}


def make_jobs(c: MuxConfig, script: str, resume: bool) -> list[JobRun]:
    """Return the jobs that a group's file lists: all on all workers. Raises ConfigError."""
    made = [make_listed(c, path, script, resume) for path in c.jobs]
    check_together(c, made)
    return made


def make_listed(c: MuxConfig, path: str, script: str, resume: bool) -> JobRun:
    """Return a job of the group's file, on all workers. Raises ConfigError."""
    config = load_job(c, path)
    if config.overlap.train_ranks not in (0, c.train_workers):
        raise ConfigError(
            f"{path}: overlap.train_ranks = {config.overlap.train_ranks} beside mux.train_workers = "
            f"{c.train_workers}; take auto, or 0 for a job that has all workers in each of its phases"
        )
    check_run_folder(config, resume)
    return make_job(c, path, config, place_of(range(c.train_workers), range(c.rollout_workers)), script)


def check_together(c: MuxConfig, jobs: Sequence[JobRun]) -> None:
    """Raise ConfigError for jobs that are in each other's way: names, folders, host memory."""
    named = {"name": [job.name for job in jobs], "run.dir": [str(job.folder) for job in jobs]}
    for what, values in named.items():
        if len({*values}) < len(values):
            raise ConfigError(f"two jobs have the {what} {max(values, key=values.count)}; change one")
    have = c.host_gib * GIB or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if (wanted := sum(job.host for job in jobs)) > have:
        each = ", ".join(f"{job.name} {job.host / GIB:.3f}" for job in jobs)
        raise ConfigError(
            f"the jobs' states take {wanted / GIB:.3f} GiB of host memory ({each}), which has {have / GIB:.3f}; take "
            "fewer jobs, or smaller models"
        )


# ---- the group ---------------------------------------------------------------------------------------------------


def whole_lines(path: Path) -> Path:
    """Return the path of a file of lines, after what a full disk or a kill left of its last line is cut off."""
    if path.is_file():
        with open(path, "rb+") as file:
            file.truncate(file.read().rfind(b"\n") + 1)
    return path


class Mux:
    """A server, and the jobs that it has started."""

    def __init__(self, config: MuxConfig, script: str, resume: bool):
        self.config, self.script, self.resume, self.jobs = config, script, resume, dict[str, JobRun]()
        secret = os.environ.get(SECRET, "") if isinstance(address_of(config.address), tuple) else ""
        runs = lambda name: self.jobs[name].runs  # noqa: E731
        self.server = GroupServer({}, self.record, secret, config.phase_seconds, self.end_job, self.command, runs)
        self.events = open(whole_lines(Path(config.dir) / "mux.jsonl"), "a", encoding="utf-8")
        self.tasks, self.codes = set[asyncio.Task[None]](), dict[str, int]()
        self.steps, self.lines = dict[str, int](), dict[str, str]()  # the newest that were printed, by job
        self.left, self.signal = dict[str, float](), 0
        self.asked, self.waited, self.phase = dict[str, float](), defaultdict[str, float](float), dict[str, str]()
        self.error: OSError | None = None  # the events cannot be written any more

    async def run(self, jobs: Sequence[JobRun]) -> int:
        """Run all jobs to their ends; return the exit code. Raises ConfigError when the server cannot listen."""
        try:
            await self.server.listen(self.config.address)
        except OSError as error:
            why = error.strerror or error
            raise ConfigError(f"cannot listen at {self.config.address!r} ({why}); change it") from None
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self.stop, number)
        print(f"{len(jobs)} jobs start; each prints into console.log in its folder", flush=True)
        self.record("starts", jobs=[job.name for job in jobs])
        for job in jobs:
            self.start(job, self.resume)
        while self.tasks or not (self.config.jobs or self.signal):
            await asyncio.sleep(SIGN_SECONDS)
            if self.error:
                raise self.error
            self.server.look_after()
            self.end_abandoned()
            self.report()
        return (
            128 + self.signal
            if self.signal
            else int(any(code for name, code in self.codes.items() if not self.jobs[name].stopped))
        )

    def start(self, job: JobRun, resume: bool) -> None:
        """Start a job. Raises ConfigError when nothing can be written into its folder."""
        try:
            job.folder.mkdir(parents=True, exist_ok=True)
            (job.folder / "console.log").touch()
        except OSError as error:
            why = error.strerror or error
            raise ConfigError(f"{job.path}: run.dir = {str(job.folder)!r}: {why}; choose another folder") from None
        self.jobs[job.name] = job
        self.server.places[job.name] = job.place
        self.left = {pool: due for pool, due in self.left.items() if pool.rpartition("/")[0] != job.name}
        job.begin()
        task = asyncio.create_task(self._follow(job, resume))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _follow(self, job: JobRun, resume: bool) -> None:
        try:
            code = self.codes[job.name] = await job.run(resume)
        except OSError as error:
            code = self.codes[job.name] = 1
            job.stopped, job.why = False, f"it cannot be started: {error}"
        self.record("exits", job=job.name, code=code)
        self.server.forget(job.name)
        step = job.newest_record().get("step", 0)
        saved = max((step_of(path) or 0 for path in list_checkpoints(job.folder)), default=0)
        if job.stopped and (saved < step != job.first or job.why):
            job.stopped, job.why = False, job.why or f"before its checkpoint; the newest is of step {saved}"
        if code and not job.stopped:
            how = job.why or (f"signal {-code} ended it" if code < 0 else f"exit code {code}: {job.last_words()}")
            others = "; the others go on" * any(other.runs for other in self.jobs.values())
            self.say(job, f"ended after step {step}: {how}{others} ({job.folder / 'console.log'})")
        else:
            self.say(job, f"{'done' if step >= job.steps else 'stopped'} after step {step}")

    def stop(self, number: int) -> None:
        """End all jobs: after their steps, the second time at once."""
        if self.signal:
            self.kill_all("killed by a second signal")
        else:
            print("all jobs end after their steps, with checkpoints; once more ends them at once", flush=True)
            for job in self.jobs.values():
                job.stop()
        self.signal = self.signal or number

    def kill_all(self, why: str) -> None:
        for job in self.jobs.values():
            job.kill(why)

    def end_abandoned(self) -> None:
        """End jobs of which a rank that asks for permits has gone: others may wait for it for run.timeout_seconds."""
        for pool, due in self.left.items():
            job = self.jobs[pool.rpartition("/")[0]]
            if job.runs and time.time() > due:
                job.kill(f"the rank that asked for its permits has gone: {job.last_words()}")

    def end_job(self, name: str, why: str) -> None:
        self.record("hangs", job=name, why=why)
        self.jobs[name].kill(why)

    # ---- commands that come by the server's socket ---------------------------------------------------------------

    def command(self, message: Message) -> str:
        """Do as a user of mux.py says; return the answer. Raises ValueError, such as ConfigError, when it cannot."""
        match message:
            case {"command": "submit", "path": str(path), "slo": float(slo), "rollout": rollout, "seconds": given} if (
                rollout is None or type(rollout) is int
            ):
                workers = self.config.rollout_workers if rollout is None else rollout
                return self.submit(path, slo, workers, read_seconds(given))
            case {"command": "status"}:
                return "\n".join(map(self._state, self.jobs.values())) or "no job"
            case {"command": "cancel", "job": str(name)}:
                job = self._job(name, runs=True)
                if job.stopped:
                    job.kill("cancelled twice")
                    return f"{name} ends at once; mux.py resume {name} goes on from its newest checkpoint"
                job.stop()
                return f"{name} ends after its step, with a checkpoint; mux.py resume {name} goes on with it"
            case {"command": "resume", "job": str(name)}:
                job = self._job(name, runs=False)
                if not job.is_listed:
                    return self.submit(job.path, job.slo, len(job.place["rollout"]), job.seconds)
                self._refuse_at_end()
                job = make_listed(self.config, job.path, self.script, resume=True)
                check_together(self.config, [*filter(lambda other: other.runs, self.jobs.values()), job])
                self.start(job, resume=True)
                return f"{name} goes on from its newest checkpoint"
        raise ValueError("not a command of a group")

    def submit(self, path: str, slo: float, rollout_workers: int, seconds: tuple[float, float] | None) -> str:
        """Start a job where it fits beside those that run; return where, and why. Raises ConfigError if it does not."""
        self._refuse_at_end()
        c, running = self.config, [job for job in self.jobs.values() if job.runs]
        if not (math.isfinite(slo) and slo >= 1):
            raise ConfigError(f"--slo={slo:g} asks for less time than a job takes alone; take 1 or more")
        if not 1 <= rollout_workers <= c.rollout_workers:
            raise ConfigError(f"--rollout-workers={rollout_workers}: the group has {c.rollout_workers}; take 1 or more")
        if name_of(path) in [job.name for job in running]:
            raise ConfigError(f"{name_of(path)} runs already; a job has the name of its file")
        if whole := [job.name for job in running if job.takes_all]:
            raise ConfigError(f"{whole[0]} takes all workers in each of its phases: no job is admitted beside it")
        config, name = load_job(c, path), name_of(path)
        if not config.overlap.train_ranks:
            raise ConfigError(f"{path}: overlap.train_ranks = 0 takes all workers in every phase; take auto")
        check_run_folder(config, resume=True)
        residents = [
            Resident(self._asked(job.name, job.folder, job.seconds, job.slo, *map(len, job.numbers)), *job.numbers)
            for job in running
        ]
        wanted = config.overlap.train_ranks, rollout_workers
        job_asked = self._asked(name, Path(config.run.dir), seconds, slo, *wanted)
        train, rollout, why = decide(job_asked, residents, c.train_workers, c.rollout_workers)
        job = make_job(c, path, config, place_of(train, rollout), self.script)
        job.slo, job.seconds, job.is_listed = slo, seconds, False
        check_together(c, [*running, job])
        self.start(job, resume=True)
        return f"{name} is admitted on {', '.join(job.place['all'])}: {why}"

    def _asked(
        self,
        name: str,
        folder: Path,
        given: tuple[float, float] | None,
        slo: float,
        train_nodes: int,
        rollout_nodes: int,
    ) -> Asked:
        """Return a job, on so many workers, by its given seconds of rollout and training or those of its steps."""
        path = folder / "steps.jsonl"
        recorded = recorded_phases(read_records(path) if path.exists() else ())
        rollouts, trains = ([given[0]], [given[1]]) if given and not recorded[0] else recorded
        if not rollouts:
            raise ConfigError(
                f"nobody knows how long the phases of {name} take: no step is in {folder}; give --rollout-seconds and "
                "--train-seconds when you submit it, or submit later"
            )
        job = asked(name, slo, rollouts, trains, self.config.admission)
        return replace(job, rollout_nodes=rollout_nodes, train_nodes=train_nodes)

    def _refuse_at_end(self) -> None:
        if self.signal:
            raise ConfigError("the group ends: it was asked to stop")

    def _state(self, job: JobRun) -> str:
        state = (
            self.phase.get(job.name, "waits")
            if job.runs
            else "stopped"
            if job.stopped
            else f"ended with code {self.codes.get(job.name)}"
        )
        step, waited, workers = job.newest_record().get("step", 0), self.waited[job.name], ", ".join(job.place["all"])
        return f"{job.name}: step {step}/{job.steps}, {state}, waited {waited:.1f} s, on {workers}"

    def _job(self, name: str, runs: bool) -> JobRun:
        if name not in self.jobs or self.jobs[name].runs != runs:
            names = ", ".join(other for other, job in self.jobs.items() if job.runs == runs) or "none"
            raise ConfigError(
                f"no job {name!r} {'runs' if runs else 'has ended'}; those that {'run' if runs else 'have'}: {names}"
            )
        return self.jobs[name]

    # ---- what is told --------------------------------------------------------------------------------------------

    def record(self, event: str, **fields: object) -> None:
        """Write an event to mux.jsonl, and count what jobs wait."""
        now = time.time()
        try:
            self.events.write(json.dumps({"at": round(now, 4), "event": event} | fields) + "\n")
            self.events.flush()
        except OSError as error:  # no connection's fault; `run` ends
            self.error = error
        job, pool = str(fields.get("job")), f"{fields.get('job')}/{fields.get('pool')}"
        if event == "asks":
            self.asked[pool] = now
        elif event == "begins":
            self.waited[job] += now - self.asked[pool]
            self.phase[job] = str(fields["phase"])
        elif event in ("ends", "left"):
            self.phase.pop(job, None)
            if event == "left" and "done" not in fields:
                self.left[pool] = now + (HELD_SECONDS if fields["workers"] else LEAVE_SECONDS)
        elif event == "joined":
            self.left.pop(pool, None)
        elif event == "refused":
            print(f"closed a connection{f' of {job}' * bool(fields['job'])}: {fields['why']}", flush=True)

    def say(self, job: JobRun, text: str) -> None:
        print(f"{job.name}: {text}", flush=True)

    def report(self) -> None:
        """Print a line for each job that has taken a step, or says how its start goes on."""
        for name, job in self.jobs.items():
            record = job.newest_record()
            if isinstance(record.get("reward"), (int, float)) and record["step"] != self.steps.get(name):
                self.steps[name] = record["step"]
                phase, waited = self.phase.get(name, "waits"), self.waited[name]
                self.say(
                    job,
                    f"step {record['step']}/{job.steps}, reward {record['reward']:.3f}, {phase}, waited {waited:.1f} s",
                )
            elif self.phase.get(name) == "start" and (line := job.newest_line()) not in ("", self.lines.get(name)):
                self.lines[name] = line
                self.say(job, line)


def run_group(config: MuxConfig, script: str, resume: bool) -> int:
    """Run a group to its end, and show who worked when; return the exit code. Raises ConfigError."""
    address = address_of(config.address)
    if config.server and not (isinstance(address, tuple) and 0 < address[1] < 2**16):
        raise ConfigError(f"mux.server = {config.server!r} is not host:port with a port from 1 to 65535; correct it")
    if config.server and not os.environ.get(SECRET):
        raise ConfigError(f"mux.server = {config.server!r}: give the group a secret in {SECRET}, for all its machines")
    jobs = make_jobs(config, script, resume)
    with run_folder.locked(Path(config.dir)):
        mux = Mux(config, script, resume)
        try:
            code = asyncio.run(mux.run(jobs))
        except OSError as error:  # such as a closed output, a full disk
            raise ConfigError(f"the group has ended: {error}; go on with --resume") from None
        finally:
            with suppress(OSError):  # what could not be written before
                mux.events.close()
    events = Path(config.dir) / "mux.jsonl"
    print(timeline(read_records(events), config.workers))
    print(f"python figures/mux_timeline.py {events} draws it")
    return code


def check(jobs: Sequence[JobRun], resume: bool) -> int:
    """Check all jobs as `train.py --check` does; return the exit code."""
    codes = []
    for job in jobs:
        print(f"{job.name}:", flush=True)
        command = [*job.command, "--check", *["--resume"] * resume]
        codes.append(subprocess.run(command, env=os.environ | job.environment).returncode)
    return next((code for code in codes if code), 0)


def ask(config: MuxConfig, words: Sequence[str], flags: argparse.Namespace) -> int:
    """Send a command to the group's server and print its answer; return the exit code."""
    message: Message = {"command": words[0]}
    if words[0] == "submit":
        given = [seconds for seconds in (flags.rollout_seconds, flags.train_seconds) if seconds is not None]
        slo = SLO if flags.slo is None else flags.slo
        message |= {"path": str(Path(words[1]).resolve()), "slo": slo, "seconds": given}
        message["rollout"] = flags.rollout_workers
    elif words[0] != "status":
        message["job"] = words[1]
    try:
        answer = Connection(config.address, message, os.environ.get(SECRET, "")).answer
    except GroupError as error:
        answer = {"refused": error}
    if "refused" in answer:
        print(f"error: {answer['refused']}", file=sys.stderr)
        return 1
    print(answer["answer"])
    return 0


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message.removeprefix('argument ')}; --help shows what mux.py takes")


def main(argv: list[str], script: str = str(HERE / "train.py")) -> int:
    """Run the command line; return the exit code. `script` is what jobs run."""
    parser = Parser(add_help=False, allow_abbrev=False)
    for flag in ("--check", "--resume"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--help", "-h", action="store_true")
    for flag, kind in OF_SUBMIT.items():
        parser.add_argument(f"--{flag.replace('_', '-')}", type=kind)
    try:
        flags, rest = parser.parse_known_args(argv)
        words = [text for text in rest if not text.startswith("--")]
        overrides = [text for text in rest if text.startswith("--")]
        if flags.help:
            print(USAGE + describe(GroupFile()))
            return 0
        wanted = COMMANDS.get(words[0], 0) if words else 0
        if len(words) > 1 + wanted or (words and words[0] in COMMANDS and len(words) < 1 + wanted):
            raise ConfigError(f"cannot read {' '.join(words)!r}; --help shows what mux.py takes")
        is_command = bool(words) and words[0] in COMMANDS
        without_effect = [name for name in ("check", "resume") if is_command and getattr(flags, name)]
        if words[:1] != ["submit"]:
            without_effect += [name for name in OF_SUBMIT if getattr(flags, name) is not None]
        if without_effect:
            raise ConfigError(f"--{without_effect[0].replace('_', '-')} has no effect here; --help says what takes it")
        if is_command:
            return ask(load_config(GroupFile, None, overrides).mux, words, flags)
        config = load_config(GroupFile, words[0] if words else None, overrides).mux
        if flags.check:
            return check(make_jobs(config, script, flags.resume), flags.resume)
        return run_group(config, script, flags.resume)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


OF_SUBMIT = {"slo": float, "rollout_workers": int, "rollout_seconds": float, "train_seconds": float}
SLO = 2.0  # of a job that is submitted without one
COMMANDS = {"submit": 1, "status": 0, "cancel": 1, "resume": 1}  # words that follow
USAGE = """plainroll: several jobs on one set of workers

usage: python mux.py [FILE.toml] [--mux.key=value ...]
       python mux.py submit JOB.toml [--slo=1.5] | status | cancel JOB | resume JOB [--mux.dir=...]

  FILE.toml       the group's settings, such as configs/mux.toml; without it two tiny jobs on two cores
  --check         check all jobs as train.py does, and that their states fit into host memory, then exit
  --resume        continue each job from its newest checkpoint, or begin it if there is none
  --help          this text

Ctrl-C ends all jobs after their steps. Without jobs the server waits for some. To a server that runs:

  submit          start a job where it slows nobody below its SLO, or say why not
    --slo=2.0                times of what the job takes alone that it may take
    --rollout-workers=N      workers that it decodes on (default: all)
    --rollout-seconds=S --train-seconds=S   of its phases, if its run folder has no steps that say it
  status          a line for each job
  cancel, resume  end a job after its step, the second time at once; go on with one that has ended

Every key, its default and its meaning:
"""

if __name__ == "__main__":
    command.run(main)
