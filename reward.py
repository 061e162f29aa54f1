"""Grade responses: plain functions of (response, answer, row), with hangs and crashes kept out of the run.

A grader that always returns at once runs in this process. Every other one runs in worker processes, which
load the graders and nothing of the trainer. Only killing a process stops a busy grader (threads, asyncio and
alarms do not), so a worker has one request at a time and is killed at the limit: a hang costs one reward.
"""

import contextlib
import ctypes
import importlib.util
import itertools
import json
import logging
import math
import numbers
import os
import queue
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterable
from dataclasses import astuple, dataclass, replace

from config import ConfigError, option
from core import Reward

Grader = Callable[[str, str, dict], float]  # (response, answer, every field of the data row) -> reward


@dataclass(frozen=True)
class RewardConfig:
    num_workers: int = option(2, "worker processes per rank, for graders that need one", min=1)
    timeout_seconds: float = option(2.0, "time limit for one grading (RollPacker, section 4.3)", above=0)
    startup_seconds: float = option(60.0, "time limit for a worker to load its graders", above=0)
    overlong_buffer: int = option(
        0, "the reward falls by 1 over this many tokens before the limit (DAPO, section 3.4); 0 = off", min=0
    )


def overlong_penalty(num_tokens: int, max_tokens: int, buffer: int) -> float:
    """Return 0 up to `max_tokens - buffer`, falling linearly to -1 at `max_tokens`. (DAPO, eq. 13)"""
    if buffer == 0:
        return 0.0
    return -min(max((num_tokens - (max_tokens - buffer)) / buffer, 0.0), 1.0)


# ---- graders ---------------------------------------------------------------------------------------------


def exact_match(response: str, answer: str, row: dict) -> float:
    """1 if the response is the answer, but for whitespace around them."""
    return float(response.strip() == answer.strip())


def hailstone(response: str, answer: str, row: dict) -> float:
    """1 if the response is `steps = answer`, with exactly one `=`."""
    return _ends_in(answer, response, "=")


def reverse_add(response: str, answer: str, row: dict) -> float:
    """1 if the response is `steps # answer`, with exactly one `#`."""
    return _ends_in(answer, response, "#")


def _ends_in(answer: str, response: str, marker: str) -> float:
    steps, *guesses = response.split(marker)
    return float([guess.strip() for guess in guesses] == [answer.strip()])


def math_answer(response: str, answer: str, row: dict) -> float:
    """1 if the response's \\boxed{}, or without one its last formula or number, equals `answer`, bare LaTeX.

    Raises ValueError if nothing can be read from `answer`.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify  # half a second

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # each worker would warn that the alarm is off
    targets = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]

    def read(text: str) -> list:
        # A box that cannot be read is a wrong answer: no other formula of the text stands in for it.
        mode = "first_match" if "\\boxed" in text else "any_match"
        return parse(text, targets, extraction_mode=mode, parsing_timeout=None)

    # Boxed like the response, so that both are read alike: from $2^{\aleph_0}$ it would take the 2.
    gold = read(f"\\boxed{{{answer}}}")
    if not gold:
        raise ValueError(f"math-verify reads nothing from the answer {answer!r}")
    return float(verify(gold, read(response), timeout_seconds=None))


def resolve_grader(name: str) -> Grader:
    """Return the table's grader or a user's: `package.module:function` or `path/to/file.py:function`.

    Modules and paths start from the working directory. Raises ConfigError if that leads to no function.
    """
    check_grader(name)
    if name in GRADERS:
        return GRADERS[name]
    source, _, function = name.rpartition(":")
    try:
        found = getattr(_load(source), function, None)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"grader {name!r}: cannot import {source} from {os.getcwd()}: {type(error).__name__}: {error}; "
            "correct the name, or what the import runs"
        ) from error
    if not callable(found):
        raise ConfigError(f"grader {name!r}: {source} has no such function; define {function}(response, answer, row)")
    return found


def check_grader(name: str) -> None:
    """Raise ConfigError if `name` cannot be a grader. Imports nothing."""
    source, _, function = name.rpartition(":")
    if name not in GRADERS and not (source and function):
        raise ConfigError(
            f"grader {name!r} is not built in; take one of {', '.join(GRADERS)}, or name your own function "
            "as package.module:function or path/to/file.py:function"
        )
    if source.endswith(".py") and not os.path.isfile(source):
        raise ConfigError(f"grader {name!r}: there is no file {os.path.abspath(source)}; correct the path")


def try_graders(config: RewardConfig, names: Iterable[str]) -> None:
    """Load users' graders once in a worker, where a hang does no harm. Raises ConfigError if that fails."""
    for name in sorted(set(names) - GRADERS.keys()):
        worker = _Worker(config, [name], threading.Event())
        try:
            worker.start(attempts=1)
        except RuntimeError as error:
            raise ConfigError(f"{error}; correct the name, or what the import runs") from None
        finally:
            worker.kill()


def _load(source: str) -> object:
    """Import a module by its name or from a file."""
    if not source.endswith(".py"):
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        return importlib.import_module(source)
    name = f"grader:{source}"  # no import statement can spell it, so it stands in no other module's way
    spec = importlib.util.spec_from_file_location(name, source)
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def _judge(grader: Grader, response: str, answer: str, row: dict) -> Reward:
    """Call the grader; whatever is not a finite number becomes an error."""
    value, error, start = 0.0, "", time.perf_counter()
    try:
        result = grader(response, answer, row)
        if isinstance(result, numbers.Real) and math.isfinite(result):
            value = float(result)
        else:
            error = f"the grader returned {result!r}, not a finite number"
    except (Exception, SystemExit) as raised:
        error = f"{type(raised).__name__}: {raised}"
    return Reward(value, time.perf_counter() - start, error[:500])


# ---- in the trainer's process ----------------------------------------------------------------------------


class RewardPool:
    """Grades in the background: `submit` never waits, `poll` and `drain` hand rewards back in any order.

    For one caller thread. A grading that fails is a Reward of 0 with the cause in `error`; only workers that
    cannot be started raise (RuntimeError, from `poll` and `drain`). Raises ConfigError for an impossible name.
    """

    def __init__(self, config: RewardConfig, tasks: Iterable[str]):
        self._pending: dict[int, Hashable] = {}  # submitted and not yet handed back: key by id
        self._tasks = set(tasks)
        for task in self._tasks:
            check_grader(task)
        self._ids = itertools.count(1)
        self._jobs: queue.SimpleQueue = queue.SimpleQueue()  # (task, id, message); None ends a thread
        self._results: queue.SimpleQueue = queue.SimpleQueue()  # (task, id, Reward), or what ended a thread
        self._closing = threading.Event()
        worker_tasks = sorted(self._tasks - INLINE)
        self._threads = []
        for _ in range(config.num_workers if worker_tasks else 0):
            # A thread for each worker feeds it, and keeps its time, while the trainer computes.
            worker = _Worker(config, worker_tasks, self._closing)
            self._threads.append(threading.Thread(target=self._serve, args=(worker,), daemon=True))
            self._threads[-1].start()

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, key: Hashable, task: str, response: str, answer: str, row: dict) -> None:
        """Have a response graded. `row` holds what JSON can: numbers, strings, lists, dicts."""
        assert task in self._tasks, f"task {task!r} was not announced to the pool"
        assert not self._closing.is_set(), "the pool is closed"
        id = next(self._ids)
        self._pending[id] = key
        if task in INLINE:
            self._results.put((task, id, _judge(GRADERS[task], response, answer, row)))
        else:
            self._jobs.put((task, id, json.dumps([id, task, response, answer, row]).encode() + b"\n"))

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def poll(self) -> list[tuple[Hashable, Reward]]:
        """Return what has been graded since the last call. Never waits."""
        return self._collect(lambda: False)

    def drain(self) -> list[tuple[Hashable, Reward]]:
        """Wait for everything outstanding and return it. The time limits bound the wait."""
        return self._collect(lambda: True)

    def wait(self, keys: Iterable[Hashable]) -> list[tuple[Hashable, Reward]]:
        """Wait for those of `keys` that are outstanding; return them and whatever else is graded by then."""
        keys = set(keys)
        wanted = {id for id, key in self._pending.items() if key in keys}
        return self._collect(lambda: not wanted.isdisjoint(self._pending))

    def forget(self, keep: Iterable[Hashable]) -> None:
        """Hand back nothing but `keep` of what is outstanding; what no worker has begun is never graded."""
        keep = set(keep)
        self._pending = {id: key for id, key in self._pending.items() if key in keep}
        waiting = []
        with contextlib.suppress(queue.Empty):
            while True:
                waiting.append(self._jobs.get_nowait())
        for job in waiting:
            if job[1] in self._pending:
                self._jobs.put(job)

    def close(self) -> None:
        """Kill the workers; what is not graded yet is dropped."""
        self._closing.set()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._pending.clear()

    def _collect(self, must_wait: Callable[[], bool]) -> list[tuple[Hashable, Reward]]:
        graded = []
        while self._pending:
            try:
                result = self._results.get(block=must_wait())
            except queue.Empty:
                break
            if isinstance(result, Exception):
                self._results.put(result)  # for the next call too
                raise result
            task, id, reward = result
            if id not in self._pending:
                continue  # forgotten
            key = self._pending.pop(id)
            if reward.error:
                reward = replace(reward, error=f"{reward.error} (task {task}, sample {key})")
            graded.append((key, reward))
        return graded

    def _serve(self, worker: "_Worker") -> None:
        """Body of a thread: every job that it takes ends in one result."""
        try:
            while (job := self._jobs.get()) is not None:
                task, id, message = job
                self._results.put((task, id, worker.grade(id, message)))
        except _Closing:
            pass
        except Exception as error:
            self._results.put(error)
        finally:
            worker.kill()


class _Closing(Exception):
    """The pool is being closed: nobody waits for the answer."""


class _Failure(Exception):
    """The worker hung, died or wrote something that is no reply; the text says which."""


class _Worker:
    """Keeps a worker process going. For one thread: the process also dies with the thread that started it."""

    def __init__(self, config: RewardConfig, tasks: list[str], closing: threading.Event):
        self._config, self._tasks, self._closing = config, tasks, closing
        self._process: subprocess.Popen | None = None

    def grade(self, id: int, message: bytes) -> Reward:
        """Have one request graded. Raises RuntimeError if no process can be started."""
        # A quiet pipe reads None. Otherwise the process died, or wrote, after its last reply.
        if self._process is None or self._process.stdout.read(1) is not None:
            self.start()
        start = time.perf_counter()
        try:
            return self._exchange(id, message, self._config.timeout_seconds)
        except _Failure as failure:
            self.kill()
            return Reward(0.0, time.perf_counter() - start, str(failure))

    def kill(self) -> int:
        """End the process and the children it left in its group; return its exit code."""
        if self._process is None:
            return 0
        with self._process as process:  # closes the pipes and reaps
            with contextlib.suppress(PermissionError):  # macOS, when only a zombie is left
                os.killpg(process.pid, signal.SIGKILL)
        self._process = None
        return process.returncode

    def start(self, attempts: int = 3) -> None:
        """Have a fresh process with all graders loaded. Raises RuntimeError if there is none after `attempts`."""
        command = [sys.executable, "-u", os.path.abspath(__file__), "--worker", *self._tasks]
        env = os.environ | {"PYTHONHASHSEED": "0"}  # sympy's results may depend on the order of sets
        pipe = subprocess.PIPE
        for _ in range(attempts):
            self.kill()
            try:
                self._process = subprocess.Popen(
                    command, bufsize=0, stdin=pipe, stdout=pipe, env=env, start_new_session=True
                )
                os.set_blocking(self._process.stdin.fileno(), False)
                os.set_blocking(self._process.stdout.fileno(), False)
                error = self._exchange(0, b"", self._config.startup_seconds).error
            except (_Failure, OSError) as failure:
                error = str(failure)
            if not error:
                return
        times = f" {attempts} times" if attempts > 1 else ""
        raise RuntimeError(f"a reward worker for {', '.join(self._tasks)} failed to start{times}: {error}")

    def _exchange(self, id: int, message: bytes, seconds: float) -> Reward:
        """Send a line and return the reply to it. Raises _Failure unless that comes within `seconds`."""
        deadline = time.perf_counter() + seconds
        stdin, stdout = self._process.stdin, self._process.stdout
        reply = b""
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            if message:
                selector.register(stdin, selectors.EVENT_WRITE)
            while not reply.endswith(b"\n") and len(reply) < 65536:  # ours have 4 kB at most
                left = deadline - time.perf_counter()
                ready = [key.fileobj for key, _ in selector.select(min(max(left, 0.0), 0.1))]
                if self._closing.is_set():  # seen within 0.1 s
                    raise _Closing
                if stdout in ready:  # ahead of the deadline: where this thread was late, the worker was not
                    chunk = stdout.read(65536)
                    if not chunk:
                        raise _Failure(f"the worker died (exit code {self.kill()})")
                    reply += chunk
                elif left <= 0:
                    raise _Failure(f"the worker did not finish within {seconds:g} s")
                elif stdin in ready:
                    with contextlib.suppress(BrokenPipeError):  # it is dying: stdout ends next
                        message = message[stdin.write(message) or 0 :]
                    if not message:
                        selector.unregister(stdin)
        with contextlib.suppress(ValueError, TypeError):
            replied, *fields = json.loads(reply)
            if replied == id:
                return Reward(*fields)
        raise _Failure(f"the worker wrote {reply[:80]!r} instead of a reply")


# ---- in a worker process ---------------------------------------------------------------------------------


def _work(tasks: list[str]) -> None:
    """Load the graders and say so, then grade until the requests end."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a hung worker dies with its parent too
    requests, replies = os.fdopen(os.dup(0), "rb"), os.dup(1)
    # Graders read an empty stdin and print to stderr, so that they cannot break into the exchange.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)

    def reply(id: int, reward: Reward) -> None:
        os.write(replies, json.dumps([id, *astuple(reward)]).encode() + b"\n")

    graders, error = {}, ""
    try:
        for task in tasks:
            graders[task] = resolve_grader(task)
            if task in GRADERS:
                graders[task]("\\boxed{1}", "1", {})  # the first call imports: not at a sample's expense
    except (Exception, SystemExit) as raised:
        error = f"{type(raised).__name__}: {raised}"[:500]
    reply(0, Reward(0.0, error=error))
    for line in requests:
        id, task, response, answer, row = json.loads(line)
        reply(id, _judge(graders[task], response, answer, row))


# A grader in INLINE is called in the trainer's process; all others may hang or crash.
GRADERS: dict[str, Grader] = {
    "match": exact_match,
    "hailstone": hailstone,
    "reverse_add": reverse_add,
    "math": math_answer,
}
INLINE = {"match", "hailstone", "reverse_add"}

if __name__ == "__main__" and sys.argv[1:2] == ["--worker"]:
    _work(sys.argv[2:])
