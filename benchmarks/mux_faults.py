"""Break a group of three jobs on purpose, and see that each computes what it computes alone.

    python benchmarks/mux_faults.py [--quick]

Jobs b and c get one fault after another, job a none of its own: no job may lose a bit of its losses to them. Jobs a
and b train and decode on ranks of their own; job c is co-located: both ranks do both, in turns.

    kill      SIGKILL of one rank as a phase begins, within it, and after its end
    stop      SIGSTOP of one rank there: the server ends the job after mux.phase_seconds, or its other ranks give up
    job       SIGKILL of the launcher and all ranks at once
    message   lines that are none, sent by strangers
    socket    the socket's file is removed: nobody can join, and jobs go on
    server    SIGKILL of the server: all jobs must end with one line each; from then on it listens at host:port
    hang      SIGSTOP of the server: all jobs must end with an error after a time-out (not with --quick)
    secret    commands to host:port with the right secret, a wrong one, and none: only the first is answered

After each fault of a job it must end by itself, and is resumed; so are all after those of the server. Jobs are
`train.py` runs whose ranks are forked (forked_ranks.py). The last line: `faults`, how many of them `ended_as_told`,
whether all runs are `equal` to those alone, `hangs`: what took longer than a fault may, and `rows` by kind.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # of all processes
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import parallel  # noqa: E402
from metrics import read_records  # noqa: E402
from process.permits import SECRET, Connection, GroupError  # noqa: E402
from rewards import leftovers  # noqa: E402
from warm_start import WarmStartConfig, make_model  # noqa: E402

HERE = Path(__file__).resolve().parent
RANKS = str(HERE / "forked_ranks.py")
STEPS = dict.fromkeys("abc", 600)  # of each job: none may end before its last fault
QUICK = dict.fromkeys("abc", 60)
LIMIT = 120.0  # seconds after which something hangs
GRADER = "def digits(response, answer, row):\n    return min(sum(c.isdigit() for c in response) / 32, 1.0)\n"
JOB = """
[run]
dir = "{name}"
steps = {steps}
seed = {seed}
device = "cpu"
eval_every = 0
checkpoint_every = 1
timeout_seconds = 15.0
[model]
path = "model"
[data]
eval_prompts = 0
[scheduler]
num_prompts = 4
num_responses = 4
[overlap]
train_ranks = {train_ranks}
[rollout]
max_prompt_tokens = 16
max_response_tokens = 24
kv_gib = 0.01
[trainer]
lr = 1e-3
[reward]
also = "{folder}/digits.py:digits=1"
num_workers = 1
"""
LINES = (
    b"\n",
    b"GET / HTTP/1.1\r\n\r\n",
    b"\xff\xfe\n",
    b"[" * 70_000 + b"\n",
    b'{"request": 1}\n',
    b'{"release": [9]}\n',
)
GONE = "has gone; start the group again"  # of a job whose server was killed
Place = tuple[str, str, float]  # event of a job, its phase, seconds after it
Strike = tuple[str, str, Place, int]  # kind, job, where, rank


class Drill:
    """A group in a folder: its server, and what it has come to."""

    def __init__(self, folder: Path, steps: dict[str, int]):
        self.folder, self.steps, self.hangs = folder, steps, 0
        self.faults, self.as_told, self.slowest = Counter[str](), Counter[str](), dict[str, float]()  # by kind
        (folder / "mux").mkdir()
        self.events, self.out = open(folder / "mux" / "mux.jsonl", "a+"), open(folder / "out", "w")
        self.found = defaultdict[str | None, list[dict]](list)
        self.address, self.secret = "mux/server/socket", ""
        self.process: subprocess.Popen[bytes] | None = None
        self.begun = time.monotonic()

    def start(self) -> None:
        code = f"import sys; sys.path.insert(0, {str(HERE.parent)!r}); import mux; mux.main(sys.argv[1:], {RANKS!r})"
        jobs = json.dumps([f"{job}.toml" for job in self.steps])
        settings = ["--mux.dir=mux", f"--mux.jobs={jobs}", "--mux.phase_seconds=15", "--resume"]
        settings += [f"--mux.server={self.address}"] * bool(self.secret)
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *settings],
            stdout=self.out,
            stderr=self.out,
            env=os.environ | {SECRET: self.secret},
        )
        self.until(lambda: not self.runs or "step" in self.ask("status"))

    @property
    def runs(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def rows(self, job: str) -> list[dict]:
        """Return all events of a job."""
        for line in self.events:  # that are new
            row = json.loads(line)
            self.found[row.get("job")].append(row)
        return self.found[job]

    def until(self, holds: Callable[[], object]) -> bool:
        """Wait for something; return whether it came in time."""
        deadline = time.monotonic() + LIMIT
        while not holds():
            if time.monotonic() > deadline:
                self.hangs += 1
                return False
            time.sleep(0.01)
        return True

    def count(self, kind: str, is_as_told: bool, seconds: float = 0.0) -> None:
        self.faults[kind] += 1
        self.as_told[kind] += is_as_told
        self.slowest[kind] = max(self.slowest.get(kind, 0.0), seconds)
        took = f"{time.monotonic() - self.begun:7.1f} s  {sum(self.faults.values()):3}  {kind}"
        print(took + ": NOT AS TOLD" * (not is_as_told), file=sys.stderr, flush=True)

    def ask(self, command: str, job: str = "", secret: str | None = None) -> str:
        """Return what the server answers to a command."""
        given = self.secret if secret is None else secret
        try:
            return str(Connection(self.address, {"command": command, "job": job}, given).answer)
        except GroupError as error:
            return str(error)

    def pids(self, job: str) -> list[int]:
        """Return the process that has forked a job's ranks, and these; none if the job has ended."""
        assert self.process
        below = leftovers.processes()
        mine = [pid for pid, parent, *_ in below if parent == self.process.pid]
        own = [pid for pid in mine if f"--group.job={job}".encode() in Path(f"/proc/{pid}/cmdline").read_bytes()]
        return own + sorted(pid for pid, parent, *_ in below if parent in own)

    def go_on(self, *jobs: str) -> None:
        """Have these jobs run, or all, and the server."""
        if not self.runs:
            return self.start()
        for job in jobs or self.steps:
            self.ask("resume", job)  # is refused if it runs

    # ---- faults --------------------------------------------------------------------------------------------------

    def strike(self, kind: str, job: str, place: Place, rank: int) -> None:
        """Kill or stop a rank of a job at a place, wait for the job's end."""
        event, phase, seconds = place
        seen, is_there = len(self.rows(job)), False
        if phase == "start" and self.runs and self.pids(job):  # it comes when the job starts again
            self.ask("cancel", job)
            self.until(partial(self._came, job, seen, ("exits", None)))
        while not is_there:
            if len(trajectory(Path(job))) == self.steps[job]:
                return self.count(f"{job} had too few steps for: {kind}", False)
            seen = len(self.rows(job))
            self.go_on(job)
            if not self.until(partial(self._came, job, seen, (event, phase), ("exits", None))):
                return
            is_there = self.runs and self._came(job, seen, (event, phase))
        time.sleep(seconds)
        pids = self.pids(job)
        for pid in pids if kind == "job" else [pids[1 + rank]]:
            os.kill(pid, signal.SIGSTOP if kind == "stop" else signal.SIGKILL)
        begun = time.monotonic()
        self.count(kind, self.until(partial(self._came, job, seen, ("exits", None))), time.monotonic() - begun)

    def _came(self, job: str, seen: int, *wanted: tuple[str, str | None]) -> bool:
        """Return whether one of these events, in these phases, came to a job after `seen`; or the server ended."""
        return not self.runs or any((row["event"], row.get("phase")) in wanted for row in self.rows(job)[seen:])

    def send(self) -> None:
        """Send lines that are no messages: all are refused, and all jobs go on."""
        for line in LINES:
            self.go_on()
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.settimeout(LIMIT)
                stranger.connect(self.address)
                stranger.recv(4096)
                stranger.sendall(line)
                self.count("message", b"error" in stranger.recv(4096))

    def remove_socket(self) -> None:
        self.go_on()
        self.until_all_have_worked()
        Path(self.address).unlink()
        seen = len(self.rows("b"))
        goes_on = self.until(lambda: len(self.rows("b")) > seen + 8)
        self.count("socket", goes_on and "cannot reach it" in self.ask("status"))

    def end_server(self, number: signal.Signals) -> None:
        """Kill or stop the server: all jobs end with one line each."""
        assert self.process
        pids = {job: own for job in self.steps if (own := self.pids(job))}
        said, begun = {job: len(_errors(job)) for job in pids}, time.monotonic()
        self.process.send_signal(number)
        self.until(lambda: all(_has_ended(pid) for own in pids.values() for pid in own))
        seconds = time.monotonic() - begun
        self.process.kill()
        self.process.wait()
        ended = {job for job in said if len(trajectory(Path(job))) == self.steps[job]}  # by itself, meanwhile
        new = [_errors(job)[count:] for job, count in said.items() if job not in ended]
        if number == signal.SIGKILL:
            self.count("server", all(len(lines) == 1 and GONE in lines[0] for lines in new), seconds)
        else:
            self.count("hang", all(new), seconds)

    def until_all_have_worked(self) -> None:
        """Wait until each job has ended a phase since the server's start: all pools are connected."""
        new = {job: len(self.rows(job)) for job in self.steps}
        self.until(lambda: all(any(r["event"] == "ends" for r in self.rows(job)[new[job] :]) for job in self.steps))

    def listen_at_a_port(self) -> None:
        """Go on with a server at host:port, which answers only those who hold the secret."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address, self.secret = f"127.0.0.1:{free.getsockname()[1]}", "open sesame"
        self.start()
        self.count("secret", "step" in self.ask("status"))
        for wrong in ("", "Open Sesame"):
            self.count("secret", "a stranger" in self.ask("status", secret=wrong))


def _errors(job: str) -> list[str]:
    return [line for line in Path(job, "console.log").read_text().splitlines() if line.startswith("error: ")]


def _has_ended(pid: int) -> bool:
    """Return whether a process has gone, or waits for a parent that is stopped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def trajectory(folder: Path) -> list[tuple]:
    path = folder / "steps.jsonl"
    rows = [record for record in read_records(path) if record["step"]] if path.exists() else []
    return [(row["step"], row["reward"], row["train"]["loss"], row["train"]["grad_norm"]) for row in rows]


def prepare(folder: Path, steps: dict[str, int]) -> None:
    """Write the model and the settings of all jobs, and let each run alone."""
    tiny = WarmStartConfig(steps=0, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, max_positions=256)
    make_model(tiny, "hailstone", folder / "model", parallel.World(0, 1, parallel.own_device("cpu")))
    (folder / "digits.py").write_text(GRADER)
    alone = []
    for seed, job in enumerate(steps):
        own = {"name": job, "seed": seed, "steps": steps[job], "train_ranks": int(job != "c")}
        Path(f"{job}.toml").write_text(JOB.format(folder=folder, **own))
        command = [sys.executable, RANKS, "--ranks=2", f"--config={job}.toml", f"--run.dir=alone_{job}"]
        alone.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
    assert not any(process.wait() for process in alone)


def strikes(quick: bool) -> list[Strike]:
    """Return kinds, jobs, places and ranks of all faults that a job gets."""
    places = [(event, phase, seconds) for phase in ("start", "rollout", "train") for event, seconds in MOMENTS]
    within = places[1::3]
    if quick:
        return [("job", "c", within[2], 0), ("kill", "b", places[3], 1), ("stop", "b", within[2], 0)]
    found = [("kill", job, place, (i + k) % 2) for i, place in enumerate(places) for k, job in enumerate("bc")]
    # In turns: the one that was not struck last goes on, and must not end before its next fault.
    return found + [(kind, job, place, 0) for kind in ("stop", "job") for place in within for job in "bc"]


def break_all(group: Drill, quick: bool) -> None:
    """Have all faults come, one after the other; then have all jobs go on to their ends."""
    group.start()
    todo = strikes(quick)
    group.send()
    for strike in todo[: len(todo) // 2 + 1]:
        group.strike(*strike)
    group.remove_socket()
    group.end_server(signal.SIGKILL)
    group.listen_at_a_port()
    for strike in todo[len(todo) // 2 + 1 :]:
        group.strike(*strike)
    if not quick:
        group.go_on()
        group.until_all_have_worked()
        group.end_server(signal.SIGSTOP)
    while any(len(trajectory(Path(job))) < steps for job, steps in group.steps.items()) and not group.hangs:
        group.go_on()
        group.until(partial(_has_gone_on, group, _written(group)))


def _has_gone_on(group: Drill, written: int) -> bool:
    return not group.runs or _written(group) > written + 2**14


def _written(group: Drill) -> int:
    """Return the bytes of all jobs' records: they grow while jobs go on, however long that takes."""
    return sum(Path(job, "steps.jsonl").stat().st_size for job in group.steps)


def drill(quick: bool) -> dict[str, object]:
    steps = QUICK if quick else STEPS
    with tempfile.TemporaryDirectory(prefix="mux") as name:
        os.chdir(name)
        prepare(Path(name), steps)
        group = Drill(Path(name), steps)
        try:
            break_all(group, quick)
        finally:
            if group.runs and group.process:
                group.process.kill()  # its jobs end by themselves
                group.process.wait()
            os.chdir("/")
        folder = Path(name)
        equal = all(trajectory(folder / job) == trajectory(folder / f"alone_{job}") for job in steps)
        if not equal or group.hangs or group.as_told != group.faults:
            print((folder / "out").read_text(), file=sys.stderr)
    rows = [
        {
            "fault": kind,
            "times": times,
            "as_told": group.as_told[kind],
            "slowest_seconds": round(group.slowest[kind], 1),
        }
        for kind, times in group.faults.items()
    ]
    totals = {"faults": group.faults.total(), "ended_as_told": group.as_told.total()}
    return {"name": "mux_faults", **totals, "equal": int(equal), "hangs": group.hangs, "rows": rows}


MOMENTS = (("begins", 0.0), ("begins", 0.02), ("ends", 0.0))

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one fault of each kind: under two minutes")
    print(json.dumps(drill(parser.parse_args().quick)))
