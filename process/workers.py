"""Processes that answer requests, one at a time: one that hangs, dies, grows or writes something else is replaced."""

import contextlib
import json
import os
import resource
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, TypeVar

KEEPER_SECONDS = 10.0  # the longest wait for a worker's keeper to end all processes below it
MAX_REPLY = 2**24  # bytes

T = TypeVar("T")


class WorkerError(RuntimeError):
    """Workers, or what they do, fail again and again: the run cannot go on."""


class Closing(Exception):
    """The pool is being closed: nobody waits for the answer."""


class Failure(Exception):
    """The worker hung, died or sent no valid reply; the text says which."""


class Late(Failure):
    """It did not finish in time."""


class Worker:
    """Keeps a worker process going. For one thread: the process also dies with the thread that started it."""

    def __init__(
        self,
        script: str,
        names: list[str],
        gib: float,
        startup_seconds: float,
        closing: threading.Event,
        log: Path | None = None,
    ):
        """`log`: the file that takes all that is printed there; None: it is printed here, to stderr."""
        self._script, self._names, self._gib, self._startup_seconds = script, names, gib, startup_seconds
        self._closing, self._log, self._num_requests = closing, log, 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_running(self) -> bool:
        return self._process is not None

    def ask(self, make: Callable[..., T], request: Sequence[object], seconds: float) -> T:
        """Return what `make` makes of the reply. Raises Failure, and WorkerError if no worker can be started."""
        # A quiet pipe reads None. Otherwise the process died, or wrote, after its last reply.
        if self._process is None or self._pipes()[1].read(1) is not None:
            self.start()
        self._num_requests += 1
        try:
            message = json.dumps([self._num_requests, *request]).encode() + b"\n"
            reply = self._exchange(make, self._num_requests, message, seconds)
        except Failure:
            self.kill()
            raise
        if self._is_too_large():
            self.kill()  # it leaks, but this reply is good
        return reply

    def _pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        """Return the process's stdin and stdout."""
        assert self._process and self._process.stdin and self._process.stdout, "`start` makes it with both pipes"
        return self._process.stdin, self._process.stdout

    def _is_too_large(self) -> bool:
        assert self._process, "only a worker that runs has a size"
        try:
            keeper = self._process.pid
            with open(f"/proc/{keeper}/task/{keeper}/children", "rb") as file:
                worker = int(file.read().split()[0])  # its eldest
            with open(f"/proc/{worker}/statm", "rb") as file:
                return int(file.read().split()[1]) * resource.getpagesize() > self._gib * 2**30
        except (OSError, IndexError):  # it is dying, or this is no Linux
            return False

    def kill(self) -> int:
        """End the process and everything below it; return its exit code."""
        if self._process is None:
            return 0
        # On Linux its keeper ends everything below it (process/serving.py).
        signals = [signal.SIGTERM, signal.SIGKILL] if sys.platform == "linux" else [signal.SIGKILL]
        with self._process as process:  # closes the pipes and reaps
            while process.returncode is None and signals:
                # Permission: macOS, when only a zombie is left.
                with contextlib.suppress(PermissionError, ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(process.pid, signals.pop(0))
                    process.wait(KEEPER_SECONDS)
        self._process = None
        return process.returncode

    def start(self, attempts: int = 3) -> None:
        """Start a fresh process that loads all names. Raises WorkerError if `attempts` fail."""
        command = [sys.executable, "-u", self._script, *self._names]
        env = os.environ | {"PYTHONHASHSEED": "0"}  # sympy's results may depend on the order of sets
        pipe = subprocess.PIPE
        for _ in range(attempts):
            self.kill()
            try:
                with open(self._log, "ab") if self._log else contextlib.nullcontext() as log:
                    self._process = subprocess.Popen(
                        command, bufsize=0, stdin=pipe, stdout=pipe, stderr=log, env=env, start_new_session=True
                    )
                for end in self._pipes():
                    os.set_blocking(end.fileno(), False)
                error = self._exchange(str, 0, b"", self._startup_seconds)
            except (Failure, OSError) as failure:
                error = str(failure)
            if not error:
                return
        times = f" {attempts} times" if attempts > 1 else ""
        raise WorkerError(f"a worker for {', '.join(self._names)} failed to start{times}: {error}")

    def _exchange(self, make: Callable[..., T], id: int, message: bytes, seconds: float) -> T:
        """Send a line and return the reply to it. Raises Failure unless that comes within `seconds`."""
        deadline = time.perf_counter() + seconds
        stdin, stdout = self._pipes()
        reply = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            if message:
                selector.register(stdin, selectors.EVENT_WRITE)
            while not reply.endswith(b"\n") and len(reply) < MAX_REPLY:
                left = deadline - time.perf_counter()
                ready = [key.fileobj for key, _ in selector.select(min(max(left, 0.0), 0.1))]
                if self._closing.is_set():  # seen within 0.1 s
                    raise Closing
                if stdout in ready:  # ahead of the deadline: where this thread was late, the worker was not
                    chunk = stdout.read(65536)
                    if not chunk:
                        raise Failure(f"the worker died (exit code {self.kill()})")
                    reply += chunk
                elif left <= 0:
                    raise Late(f"the worker did not finish within {seconds:g} s")
                elif self._is_too_large():
                    raise Failure(f"the worker took over {self._gib:g} GiB of memory")
                elif stdin in ready:
                    with contextlib.suppress(BrokenPipeError):  # it is dying: stdout ends next
                        message = message[stdin.write(message) or 0 :]
                    if not message:
                        selector.unregister(stdin)
        with contextlib.suppress(ValueError, TypeError):
            replied, *fields = json.loads(reply)
            if replied == id:
                return make(*fields)
        raise Failure(f"the worker wrote {bytes(reply[:80])!r} instead of a reply")
