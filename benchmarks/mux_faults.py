"""Break a group of two jobs on purpose, and see that each computes what it computes alone.

    python benchmarks/mux_faults.py [--quick]

Job b gets one fault after another, job a none of its own: neither may lose a bit of its losses to them.

    kill      SIGKILL of one rank as a phase begins, within it, and after its end
    stop      SIGSTOP of one rank there: the server ends the job after mux.phase_seconds, or its other ranks give up
    job       SIGKILL of the launcher and all ranks at once
    message   lines that are none, sent by strangers and by one who holds the secret
    socket    the socket's file is removed
    server    SIGKILL of the server: both jobs must end with one line each; all are resumed

After each fault job b must end by itself, and is resumed. Jobs are `train.py` runs whose ranks are forked
(forked_ranks.py). The last line: `faults`, how many of them were `resumed`, whether both runs are `equal` to those
alone, and `hangs`: what took longer than a fault may.
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
from collections.abc import Callable
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # of all processes
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tqdm import tqdm  # noqa: E402

import parallel  # noqa: E402
from metrics import read_records  # noqa: E402
from process.permits import Connection, GroupError  # noqa: E402
from rewards import leftovers  # noqa: E402
from warm_start import WarmStartConfig, make_model  # noqa: E402

HERE = Path(__file__).resolve().parent
RANKS = str(HERE / "forked_ranks.py")
STEPS, LIMIT = {"a": 300, "b": 100}, 120.0  # steps of each job; seconds after which something hangs
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
train_ranks = 1
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
WORDS = "has gone; start the group again"  # of a job whose server was killed
Place = tuple[str, str, float]  # event of job b, its phase, seconds after it


class Drill:
    """A group in a folder: its server, and what it has come to."""

    def __init__(self, folder: Path):
        self.folder, self.faults, self.resumed, self.hangs, self.old = folder, 0, 0, 0, 0
        self.events, self.out = folder / "mux" / "mux.jsonl", open(folder / "out", "w")
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        code = f"import sys; sys.path.insert(0, {str(HERE.parent)!r}); import mux; mux.main(sys.argv[1:], {RANKS!r})"
        settings = ["--mux.dir=mux", '--mux.jobs=["a.toml", "b.toml"]', "--mux.phase_seconds=20", "--resume"]
        command = [sys.executable, "-c", code, *settings]
        self.old = len(self.rows())  # events of job b under earlier servers
        self.process = subprocess.Popen(command, stdout=self.out, stderr=self.out)
        self.until(lambda: not self.runs or "step" in self.ask("status"))

    @property
    def runs(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def rows(self, job: str = "b") -> list[dict]:
        found = read_records(self.events) if self.events.exists() else []
        return [row for row in found if row.get("job") == job]

    def until(self, holds: Callable[[], object]) -> bool:
        """Wait for something; return whether it came in time."""
        deadline = time.monotonic() + LIMIT
        while not holds():
            if time.monotonic() > deadline:
                self.hangs += 1
                return False
            time.sleep(0.01)
        return True

    def ask(self, command: str) -> str:
        """Return what the server answers to a command about job b."""
        try:
            return str(Connection("mux/server/socket", {"command": command, "job": "b"}, "").answer["answer"])
        except GroupError as error:
            return str(error)

    def pids(self, job: str = "b") -> list[int]:
        """Return the process that has forked a job's ranks, and these."""
        assert self.process
        below = leftovers.processes()
        mine = [pid for pid, parent, *_ in below if parent == self.process.pid]
        [launcher] = [pid for pid in mine if f"--group.job={job}".encode() in Path(f"/proc/{pid}/cmdline").read_bytes()]
        return [launcher, *sorted(pid for pid, parent, *_ in below if parent == launcher)]

    def go_on(self) -> None:
        """Have job b run, and both jobs if the server has ended."""
        if not self.runs:
            self.start()
        else:
            self.ask("resume")  # is refused if it runs

    # ---- faults --------------------------------------------------------------------------------------------------

    def strike(self, kind: str, place: Place, rank: int) -> None:
        """Kill or stop a rank of job b at a place, wait for the job's end."""
        event, phase, seconds = place
        seen, self.faults = len(self.rows()), self.faults + 1

        def is_there() -> bool:
            return any((row["event"], row.get("phase")) == (event, phase) for row in self.rows()[seen:])

        while not is_there():
            self.go_on()
            if not self.until(lambda: is_there() or not self.runs):
                return
        time.sleep(seconds)
        pids = self.pids()
        for pid in pids if kind == "job" else [pids[1 + rank]]:
            os.kill(pid, signal.SIGSTOP if kind == "stop" else signal.SIGKILL)
        self.resumed += self.until(lambda: not self.runs or self.rows()[-1]["event"] == "exits")

    def send(self) -> None:
        """Send lines that are no messages: all are refused, and both jobs go on."""
        for line in LINES:
            self.faults += 1
            self.go_on()
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.settimeout(LIMIT)
                stranger.connect("mux/server/socket")
                stranger.recv(4096)
                stranger.sendall(line)
                self.resumed += b"error" in stranger.recv(4096)

    def remove_socket(self) -> None:
        self.faults += 1
        self.go_on()
        self.until(lambda: any(row["event"] == "ends" for row in self.rows()[self.old :]))  # both pools are connected
        Path("mux/server/socket").unlink()
        seen = len(self.rows())
        self.until(lambda: len(self.rows()) > seen + 8)  # it goes on
        self.resumed += "cannot reach it" in self.ask("status")
        assert self.process
        self.process.terminate()  # nobody could have it resume a job
        self.until(lambda: not self.runs)

    def kill_server(self) -> None:
        self.faults += 1
        self.until(lambda: all(any(row["event"] == "ends" for row in self.rows(name)) for name in "ab"))
        assert self.process
        said = {name: _count(name) for name in "ab"}
        jobs = [pid for name in "ab" for pid in self.pids(name)]
        self.process.kill()
        self.process.wait()
        self.until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in jobs))
        self.resumed += all(_count(name) == said[name] + 1 for name in "ab")


def _count(name: str) -> int:
    return Path(name, "console.log").read_text().count(WORDS)


def trajectory(folder: Path) -> list[tuple]:
    rows = [record for record in read_records(folder / "steps.jsonl") if record["step"]]
    return [(row["step"], row["reward"], row["train"]["loss"], row["train"]["grad_norm"]) for row in rows]


def prepare(folder: Path) -> None:
    """Write the model and the settings of both jobs, and let each run alone."""
    tiny = WarmStartConfig(steps=0, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, max_positions=256)
    make_model(tiny, "hailstone", folder / "model", parallel.World(0, 1, parallel.own_device("cpu")))
    (folder / "digits.py").write_text(GRADER)
    for seed, name in enumerate("ab"):
        Path(f"{name}.toml").write_text(JOB.format(name=name, seed=seed, steps=STEPS[name], folder=folder))
        command = [sys.executable, RANKS, "--ranks=2", f"--config={name}.toml", f"--run.dir=alone_{name}"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def drill(quick: bool) -> dict[str, object]:
    with tempfile.TemporaryDirectory(prefix="mux") as name:
        os.chdir(name)
        prepare(Path(name))
        group = Drill(Path(name))
        group.start()
        places = [(event, phase, seconds) for phase in ("start", "rollout", "train") for event, seconds in MOMENTS]
        strikes = [("kill", place, i % 2) for i, place in enumerate(places)]
        strikes += [("job", places[4], 0), ("stop", places[4], 1), ("stop", places[7], 0), ("stop", places[5], 1)]
        if not quick:
            strikes = [(kind, place, rank) for kind in ("kill", "stop", "job") for place in places for rank in (0, 1)]
        group.kill_server()
        group.send()
        group.remove_socket()
        for strike in tqdm(strikes):
            group.strike(*strike)
        while any(len(trajectory(Path(job))) < STEPS[job] for job in "ab") and not group.hangs:
            group.go_on()
            group.until(lambda: not group.runs)
        equal = all(trajectory(Path(job)) == trajectory(Path(f"alone_{job}")) for job in "ab")
        if not equal or group.hangs:
            print(Path("out").read_text(), file=sys.stderr)
        if group.runs and group.process:
            group.process.kill()
        os.chdir("/")
    return {"faults": group.faults, "resumed": group.resumed, "equal": equal, "hangs": group.hangs}


MOMENTS = (("begins", 0.0), ("begins", 0.02), ("ends", 0.0))

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one strike at each place, a few minutes")
    print(json.dumps(drill(parser.parse_args().quick)))
