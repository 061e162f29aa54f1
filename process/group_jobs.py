"""A job of a co-execution group, as processes: started on its workers, followed by its records, ended."""

import asyncio
import json
import os
import secrets
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from process.group_server import Place

MARK = "PLAINROLL_GROUP_PROCESS"  # in the environment of all processes of a job: its value says of which start
LEFT_SECONDS = 30.0  # for what a job has started to end after its launcher; then it is killed
TAIL = 2**20  # bytes at the end of a file that are read for its newest line


@dataclass(eq=False)
class JobRun:
    name: str
    path: str  # of its settings
    place: Place
    folder: Path  # run.dir
    steps: int
    command: list[str]  # without --resume
    environment: dict[str, str]  # besides the server's own
    host: float  # bytes of host memory for its state
    takes_all: bool  # its ranks do both, so each phase takes all of its workers
    slo: float  # times of what it takes alone that it may take
    seconds: tuple[float, float] | None = None  # of a rollout and a training, as its user says
    process: asyncio.subprocess.Process | None = None
    runs: bool = False  # processes of it are there, or will be
    mark: str = ""  # of its newest start
    why: str = ""  # it was killed
    stopped: bool = False
    is_listed: bool = True  # in the group's file, else submitted
    printed: int = 0  # bytes of console.log before its newest start
    first: int = 0  # its newest step then

    def begin(self) -> None:
        """Count as a job that runs from now on: `run` comes next."""
        self.why, self.stopped, self.process, self.runs = "", False, None, True
        self.mark = f"{MARK}={secrets.token_hex(8)}"
        self.first = self.newest_record().get("step", 0)

    async def run(self, resume: bool) -> int:
        """Start the job, wait until all of its processes have ended, return its exit code.

        What it prints goes to console.log in its folder.

        Raises OSError when it cannot be started.
        """
        try:
            with open(self.folder / "console.log", "ab") as console:
                self.printed = console.tell()
                self.process = await asyncio.create_subprocess_exec(
                    *(*self.command, *["--resume"] * resume),
                    env=os.environ | self.environment | {MARK: self.mark.partition("=")[2]},
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=console,
                    stderr=console,
                    start_new_session=True,  # Ctrl-C is for the server alone, which tells its jobs
                )
            if self.why:  # told meanwhile
                self.kill(self.why)
            elif self.stopped:
                self.process.terminate()
            code = await self.process.wait()
            deadline = time.monotonic() + LEFT_SECONDS
            looks = 0  # that found none: twice, as a process that is just becoming another program shows no environment
            while looks < 2:  # ranks may outlive their launcher, and be on their devices
                looks = 0 if self._processes() else looks + 1
                if not looks and (self.why or time.monotonic() > deadline):
                    self._kill()  # again, if it was: they may have started others meanwhile
                if looks < 2:
                    await asyncio.sleep(0.05)
            return code
        finally:
            self.runs = False

    @property
    def numbers(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the numbers of its training and of its rollout workers."""
        train, rollout = (tuple(int(worker.split()[1]) for worker in self.place[pool]) for pool in ("train", "rollout"))
        return train, rollout

    def stop(self) -> None:
        """Let the job end after its step, with a checkpoint."""
        if self.runs and not self.stopped:
            self.stopped = True
            if self.process and self.process.returncode is None:
                self.process.terminate()

    def kill(self, why: str) -> None:
        """End all of its processes at once, stopped ones too. (Linux)"""
        if self.runs:
            self.why = why
            self._kill()

    def _kill(self) -> None:
        pids = self._processes()
        if self.process and self.process.returncode is None:
            pids.append(self.process.pid)  # at its very start it has no environment yet
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _processes(self) -> list[int]:
        """Return the numbers of its processes that are there, by their environments.

        Those that have ended have none any more, and one that becomes another program has none for a moment.
        """
        found = []
        for pid in filter(str.isdecimal, os.listdir("/proc")):
            with suppress(OSError):  # it has just ended, or is another user's
                if self.mark.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    found.append(int(pid))
        return found

    def newest_record(self) -> dict:
        """Return the record of its newest step, or an empty one."""
        lines = _tail(self.folder / "steps.jsonl").split(b"\n")[:-1]
        with suppress(ValueError):  # no job ends the others by what lies in its folder
            record = json.loads(lines[-1]) if lines else {}
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                return record
        return {}

    def newest_line(self) -> str:
        """Return the newest whole line that it has printed since its start, if any."""
        with suppress(OSError), open(self.folder / "console.log", "rb") as console:
            console.seek(self.printed)
            *lines, _ = console.read(TAIL).decode(errors="replace").split("\n")
            return lines[-1] if lines else ""
        return ""

    def last_words(self) -> str:
        """Return the line of its newest error."""
        lines = _tail(self.folder / "console.log").decode(errors="replace").split("\n")
        lines = [line.strip() for line in lines if line.strip()]
        return next((line for line in reversed(lines) if line.startswith("error: ")), "it has printed no error")


def _tail(path: Path) -> bytes:
    with suppress(OSError), open(path, "rb") as file:
        file.seek(max(file.seek(0, os.SEEK_END) - TAIL, 0))
        return file.read()
    return b""
