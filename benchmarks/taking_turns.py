"""`train.py` that waits after each evaluation until others have had their turn: for contests that last minutes, on
machines whose speed changes meanwhile. Who runs it calls `go_on`; without that it gives up after an hour.
"""

import os
import sys
import time
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from process.threads import before_torch

if __name__ == "__main__":
    before_torch()

import train
from job import Job
from metrics import Record
from process import command

LOOK_SECONDS, PATIENCE_SECONDS = 0.2, 3600.0
GIVER = "TURNS_GIVEN_BY"  # the process that calls `go_on`, an environment variable


def go_on(folder: Path, step: int) -> None:
    """Let a run go on that has evaluated after `step`."""
    new = folder / "turn.new"
    new.write_text(str(step), encoding="utf-8")
    new.replace(folder / "turn")


def wait(job: Job, record: Record) -> None:
    """A callback. Raises TimeoutError where nobody lets the run go on."""
    file, end = job.folder / "turn", time.monotonic() + PATIENCE_SECONDS
    giver = Path("/proc", os.environ.get(GIVER, "self"))
    while "eval" in record and not (file.exists() and int(file.read_text()) >= record["step"]):
        if not giver.exists():
            raise TimeoutError(f"the process that lets {job.folder} go on has ended")
        if time.monotonic() > end:
            raise TimeoutError(f"nobody has written {record['step']} to {file} for {PATIENCE_SECONDS:g} s")
        time.sleep(LOOK_SECONDS)


def take_turns() -> None:
    """Let all runs of this process wait after their evaluations."""
    train.run = partial(train.run, callbacks=(wait,))


if __name__ == "__main__":
    take_turns()
    command.run(partial(train.main, script=__file__))
