"""Grade responses: plain functions of (response, answer, row), with hangs and crashes kept out of the run.

A grader that always returns at once runs in this process, one with an address is asked over HTTP. Every other one
runs in worker processes, which load the graders and nothing of the trainer. Only killing a process stops a busy
grader (threads, asyncio and alarms do not), so a worker has one request at a time and is killed at the limit: a hang
costs one reward. Programs that a model wrote run in a sandbox of their own below a worker.
"""

import asyncio
import contextlib
import inspect
import itertools
import json
import logging
import math
import os
import queue
import re
import resource
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from config import ConfigError, option
from core import Prompt, Reward, Sample
from rewards import grader_files, remote, sandbox
from rewards.gradings import LARGEST_REWARD, LARGEST_WEIGHT, Job, JobQueue, PoolStats, reward_number
from rewards.timeouts import AdaptiveTimeouts, CasePlan

KEEPER_SECONDS = 10.0  # the longest wait for a worker's keeper to end all below it
WORKER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "rewards/worker.py")
# (response, answer, every field of the data row) -> reward, or its parts by name, which are added up
Grader = Callable[[str, str, dict], float | dict[str, float] | Reward]


@dataclass(frozen=True)
class RewardConfig:
    num_workers: int = option(2, "worker processes per rank, for graders that need one", min=1, max=1024)
    timeout_seconds: float = option(2.0, "time limit for one grading (RollPacker, section 4.3)", above=0, max=1e7)
    max_failures: int = option(
        3, "hangs, deaths or leaks in a row on one grader that end the run; 0 = it goes on", min=0
    )
    worker_gib: float = option(4.0, "memory at which a worker is killed and replaced", above=0, max=1e5)
    max_queue: int = option(4096, "gradings that may wait per rank; beyond them generation waits", min=1)
    concurrency: str = option("", "gradings at a time per rank and grader, as math=1,code=2; others: every worker")
    also: str = option(
        "",
        "graders that grade every sample besides its row's own, which counts once, and their weights in the sum, as "
        "mine.py:style=0.2,match=0.5",
    )
    weights: str = option("", "factor on the advantages of a grader's samples, as math=1,code=0.5; others: 1")
    case_factor: float = option(
        1.5,
        "a test case may take this times its slowest correct run (lambda; section 4.3); 0 = the longest",
        min=0,
        max=1e3,
    )
    case_quantile: float = option(
        0.99,
        "a case without a correct run: quantile of the others' slowest runs that stands for its own",
        above=0,
        max=1,
    )
    case_min_seconds: float = option(2.0, "shortest time limit of a test case (T_min)", above=0, max=1e7)
    case_max_seconds: float = option(30.0, "longest time limit of a test case (T_max)", above=0, max=1e7)
    case_audit: float = option(
        0.01, "share of responses whose cases get the longest limit, to count wrong time-outs", min=0, max=1
    )
    remote_seconds: float = option(
        30.0, "time limit for a grader at an http address, retries included", above=0, max=1e7
    )
    remote_retries: int = option(3, "times that a failed request is sent again", min=0, max=100)
    remote_concurrency: int = option(8, "requests at a time per rank", min=1, max=4096)
    startup_seconds: float = option(60.0, "time limit for a worker to load its graders", above=0, max=1e7)
    overlong_buffer: int = option(
        0, "the reward falls by 1 over this many tokens before the limit (DAPO, section 3.4); 0 = off", min=0
    )


def overlong_penalty(num_tokens: int, max_tokens: int, buffer: int) -> float:
    """Return 0 up to `max_tokens - buffer`, falling linearly to -1 at `max_tokens`. (DAPO, eq. 13)"""
    if buffer == 0:
        return 0.0
    return -min(max((num_tokens - (max_tokens - buffer)) / buffer, 0.0), 1.0)


def shaped_reward(sample: Sample, reward: Reward, limit: int, buffer: int) -> float:
    """Return the reward that advantages are made of: the grader's, and the penalty for an overlong response.

    `limit`: most tokens of a response; `buffer`: over so many last tokens the penalty rises (`overlong_penalty`).
    """
    return reward.value + overlong_penalty(len(sample.token_ids), limit, buffer)


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


def code(response: str, answer: str, row: dict) -> Reward:
    """1 if the response's program passes every test case of `answer` in the sandbox (see rewards/sandbox.py), else 0.

    The program is the last fenced block, or without one the whole response, put into the row's `template` at
    {program}. Cases run in order until one fails. Raises ValueError for an answer that is no list of cases.
    """
    cases = sandbox.read_cases(answer)
    blocks = re.findall(r"```[^\n]*\n(.*?)```", response, re.DOTALL)
    program = row.get("template", "{program}").replace("{program}", blocks[-1] if blocks else response)
    ran = []
    for case, seconds in zip(cases, row.get("case_seconds") or [RewardConfig.case_max_seconds] * len(cases)):
        outcome = sandbox.run(program, case, sandbox.Limits(seconds=seconds))
        ran.append((outcome.seconds, outcome.passed, outcome.timed_out))
        if not outcome.passed:
            return Reward(0.0, cases=tuple(ran))
    return Reward(1.0, cases=tuple(ran))


def by_grader(key: str, text: str) -> dict[str, float]:
    """Return the numbers of a setting like `math=1,code=0.5`. Raises ConfigError naming the `key`."""
    numbers = {}
    for part in filter(None, text.split(",")):
        name, equals, number = part.strip().rpartition("=")
        try:
            numbers[name] = float(number)
            if not equals or not math.isfinite(numbers[name]):
                raise ValueError
        except ValueError:
            raise ConfigError(
                f"{key}: cannot read {part.strip()!r}; write GRADER=NUMBER, separated by commas"
            ) from None
    return numbers


def add_up(rewards: Mapping[str, Reward], weights: Mapping[str, float]) -> Reward:
    """Return the weighted sum of several graders' rewards of one sample; one that failed counts 0 and is reported."""
    parts: dict[str, float] = {}
    for name, reward in rewards.items():
        parts |= {name: reward.value} | {f"{name}/{part}": value for part, value in reward.parts.items()}
    value = sum(weights[name] * reward.value for name, reward in rewards.items())
    errors = [reward.error for reward in rewards.values() if reward.error]
    if (number := reward_number(value)) is None:
        errors.append(f"the graders' weighted sum is {value:g}, not a finite number of at most {LARGEST_REWARD:g}")
    return Reward(
        number or 0.0,
        sum(reward.seconds for reward in rewards.values()),
        next(iter(errors), ""),
        next((reward.cases for reward in rewards.values() if reward.cases), ()),
        parts,
    )


def resolve_grader(name: str) -> Grader:
    """Return the table's grader or a user's: `package.module:function` or `path/to/file.py:function`.

    Modules and paths start from the working directory. For workers: it enters the grader's folder (grader_files.py).
    Raises ConfigError if that leads to no function.
    """
    check_grader(name)
    if name in GRADERS:
        grader_files.enter("")
        return GRADERS[name]
    source, _, function = name.rpartition(":")
    try:
        found = getattr(grader_files.load(source), function, None)
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
    if remote.is_address(name):
        try:
            address = urlsplit(name)
            is_sound = bool(address.hostname and address.hostname.encode("idna")) and address.port != 0
            is_sound &= "@" not in address.netloc  # a name and password would not be sent
            is_sound &= bool(re.fullmatch(r"[\w.-]*|[0-9a-f.]*:[0-9a-f:.]*(%[\w.-]+)?", address.hostname or ""))
            is_sound &= bool(re.fullmatch("[!-~]*", address.path + address.query))
        except ValueError:
            is_sound = False
        if not is_sound or re.search(r"\s", name):
            raise ConfigError(
                f"grader {name!r} is no address that can be asked; write http://host:port/path, with other characters "
                "of the path as in %20 and %C3%A9"
            )
        return
    source, _, function = name.rpartition(":")
    if name not in GRADERS and not (source and function):
        raise ConfigError(
            f"grader {name!r} is not built in; take one of {', '.join(GRADERS)}, or name your own function "
            "as package.module:function or path/to/file.py:function, or the http address of a service"
        )
    if source.endswith(".py") and not os.path.isfile(source):
        raise ConfigError(f"grader {name!r}: there is no file {os.path.abspath(source)}; correct the path")


def check_rewards(config: RewardConfig, prompts: Iterable[Prompt]) -> None:
    """Raise ConfigError on settings that do not fit together and on test cases that are none."""
    if config.case_min_seconds > config.case_max_seconds:
        raise ConfigError(
            f"reward.case_min_seconds = {config.case_min_seconds:g} is over reward.case_max_seconds = "
            f"{config.case_max_seconds:g}; lower it"
        )
    also = by_grader("reward.also", config.also)
    for name, weight in also.items():
        if name != TASK_OF_JUDGE:
            check_grader(name)
        if abs(weight) > LARGEST_REWARD:
            raise ConfigError(f"reward.also: {name} = {weight:g} must be at most {LARGEST_REWARD:g}")
    tasks = {prompt.task for prompt in prompts}
    for key, least, most, known in (
        ("concurrency", 1, math.inf, tasks | also.keys()),
        ("weights", 0, LARGEST_WEIGHT, tasks),
    ):
        for name, number in by_grader(f"reward.{key}", getattr(config, key)).items():
            if name not in known:
                raise ConfigError(f"reward.{key} names {name!r}; the graders here are {', '.join(sorted(known))}")
            if number < least:
                raise ConfigError(f"reward.{key}: {name} = {number:g} must be at least {least}")
            if number > most:
                raise ConfigError(f"reward.{key}: {name} = {number:g} must be at most {most:g}")
    for prompt in prompts:
        if "math" in (prompt.task, *also) and not prompt.answer.strip():
            raise ConfigError(f"{prompt.where}: the answer is empty; the grader math has nothing to compare with")
        if "code" in (prompt.task, *also):
            template = prompt.extra.get("template", "{program}")
            if not isinstance(template, str) or "{program}" not in template:
                raise ConfigError(
                    f"{prompt.where}: template = {repr(template)[:60]} must be text with {{program}} where the program "
                    "goes; correct it, or leave it out"
                )
            try:
                sandbox.read_cases(prompt.answer)
            except ValueError as error:
                raise ConfigError(f"{prompt.where}: {error}") from None


def try_graders(config: RewardConfig, rows: Mapping[str, Prompt]) -> None:
    """Have users' graders grade a first row's own answer in a worker, and look for a sandbox if one is needed.

    `rows`: a row of each grader. Raises ConfigError if that fails.
    """
    if "code" in rows:
        try:
            sandbox.isolation()
        except sandbox.SandboxError as error:
            raise ConfigError(f"grader 'code': {error}") from None
    for name in sorted(name for name in rows.keys() - GRADERS.keys() if not remote.is_address(name)):
        worker = _Worker(config, [name], threading.Event())
        try:
            worker.start(attempts=1)
            row = rows[name]
            reward, _ = worker.grade(Job(1, name, (row.answer, row.answer, row.extra), config.timeout_seconds))
        except GraderError as error:
            raise ConfigError(" ".join(str(error).split())) from None
        finally:
            worker.kill()
        if reward.error:
            said = " ".join(reward.error.split())
            raise ConfigError(f"{row.where}: grader {name!r} fails on the row's own answer: {said}; correct it")


def grade(grader: Grader, response: str, answer: str, row: dict) -> Reward:
    """Call the grader; whatever is no number that can be trained on becomes an error."""
    value, error, start = 0.0, "", time.perf_counter()
    parts: dict[str, float] = {}
    cases: tuple[tuple[float, bool, bool], ...] = ()
    try:
        result = grader(response, answer, row)
        if inspect.isawaitable(result):
            result = asyncio.run(_wait_for(result))
        if isinstance(result, Reward):
            error, cases, result = str(result.error), result.cases if grader is code else (), result.value
        numbers = {str(k): reward_number(v) for k, v in (result if isinstance(result, dict) else {"": result}).items()}
        number = None if None in numbers.values() or not numbers else reward_number(sum(numbers.values()))
        if number is None:
            error = f"the grader returned {repr(result)[:200]}, not a finite number of at most {LARGEST_REWARD:g}"
        elif not error:
            value, parts = number, numbers if isinstance(result, dict) else {}
    except (Exception, SystemExit) as raised:
        error = f"{type(raised).__name__}: {raised}"
    return Reward(value, time.perf_counter() - start, error[:500], cases, parts)


async def _wait_for(result: Any) -> Any:
    return await result


# ---- in the trainer's process ----------------------------------------------------------------------------


class GraderError(RuntimeError):
    """A grader or its workers fail again and again: the run cannot go on."""


class RewardPool:
    """Grades in the background: `submit` waits only for a full queue, `poll` and `drain` return rewards in any order.

    For one caller thread. A grading that fails is a Reward of 0 with the cause in `error`. Only workers that cannot
    be started, and a grader that fails `max_failures` times in a row, raise (GraderError, from `poll` and `drain`).
    Raises ConfigError for an impossible name.
    """

    def __init__(self, config: RewardConfig, tasks: Iterable[str]):
        self._config, self._tasks = config, set(tasks)
        for task in self._tasks:
            check_grader(task)
        concurrency = by_grader("reward.concurrency", config.concurrency)
        limits = config.case_min_seconds, config.case_max_seconds
        self.timeouts = AdaptiveTimeouts(config.case_factor, *limits, config.case_audit, config.case_quantile)
        self._pending: dict[int, Hashable] = {}  # submitted and not yet handed back: key by id
        self._stats, self._failures = PoolStats(), Counter[str]()
        self._ids = itertools.count(1)
        self._jobs, self._remote_jobs = (JobQueue(config.max_queue, concurrency) for _ in range(2))
        self._results: queue.SimpleQueue = queue.SimpleQueue()  # (job, plan, Reward, failed), or what ended a thread
        self._closing = threading.Event()
        self._threads = []
        worker_tasks = sorted(task for task in self._tasks - INLINE if not remote.is_address(task))
        for _ in range(config.num_workers if worker_tasks else 0):
            # A thread for each worker feeds it, and keeps its time, while the trainer computes.
            worker = _Worker(config, worker_tasks, self._closing)
            self._threads.append(threading.Thread(target=self._serve, args=(self._jobs, worker), daemon=True))
        for _ in range(config.remote_concurrency if any(map(remote.is_address, self._tasks)) else 0):
            client = _Client(config, self._closing)
            self._threads.append(threading.Thread(target=self._serve, args=(self._remote_jobs, client), daemon=True))
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, key: Hashable, task: str, response: str, answer: str, row: dict) -> None:
        """Have a response graded. `row` holds what JSON can: numbers, strings, lists, dicts."""
        assert task in self._tasks, f"task {task!r} was not announced to the pool"
        assert not self._closing.is_set(), "the pool is closed"
        id, seconds, request = next(self._ids), self._config.timeout_seconds, (response, answer, row)
        self._pending[id] = key
        if task in INLINE:
            self._results.put((Job(id, task, request, seconds), None, grade(GRADERS[task], *request), False))
        elif remote.is_address(task):
            self._remote_jobs.put(Job(id, task, request, self._config.remote_seconds))
        else:
            self._jobs.put(Job(id, task, request, seconds))

    def _with_limits(self, job: Job) -> tuple[Job, CasePlan | None]:
        """Give a program's cases their time limits, with what is known when it is run: it may have waited for long."""
        response, answer, row = job.request
        try:
            num_cases = len(sandbox.read_cases(answer)) if job.task == "code" else 0
        except ValueError:  # the worker says what is wrong with them
            num_cases = 0
        if not num_cases:
            return job, None
        plan = self.timeouts.plan(json.dumps([row.get("prompt"), answer]), num_cases, self._pending.get(job.id))
        seconds = job.seconds + sum(plan.allowed) + num_cases * sandbox.OVERHEAD_SECONDS
        return replace(job, request=(response, answer, row | {"case_seconds": plan.allowed}), seconds=seconds), plan

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
        for jobs in (self._jobs, self._remote_jobs):
            jobs.keep(self._pending)

    def take_stats(self) -> PoolStats:
        """Return the statistics since the last call."""
        taken, self._stats = self._stats, PoolStats()
        taken.queue_max = max(jobs.take_longest() for jobs in (self._jobs, self._remote_jobs))
        taken.cases, taken.anchors = self.timeouts.take()
        return taken

    def close(self) -> None:
        """Kill the workers; what is not graded yet is dropped."""
        self._closing.set()
        self._jobs.close()
        self._remote_jobs.close()
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
            job, plan, reward, failed = result
            self._count(job, reward, failed)
            if job.id not in self._pending:
                continue  # forgotten
            if plan:
                self.timeouts.observe(plan, reward.cases, correct=reward.value == 1.0)
            key = self._pending.pop(job.id)
            if reward.error:
                reward = replace(reward, error=f"{reward.error} (task {job.task}, sample {key})")
            graded.append((key, reward))
        return graded

    def _count(self, job: Job, reward: Reward, failed: bool) -> None:
        """Keep the statistics. Raises GraderError at the last of `max_failures` failures in a row."""
        latency = time.perf_counter() - job.submitted
        cause = Counter([reward.error.partition(":")[0]] if reward.error else [])
        self._stats.add(PoolStats(1, reward.seconds, latency, latency, replaced=int(failed), causes=cause))
        self._failures[job.task] = self._failures[job.task] + 1 if failed else 0
        if failed and self._failures[job.task] == self._config.max_failures:
            error = GraderError(
                f"grader {job.task} failed {self._config.max_failures} times in a row, at last: {reward.error}; "
                "correct the grader or raise reward.timeout_seconds; reward.max_failures = 0 goes on whatever happens"
            )
            self._results.put(error)
            raise error

    def _serve(self, jobs: JobQueue, worker: "_Worker | _Client") -> None:
        """Body of a thread: every job that it takes ends in one result."""
        try:
            while (job := jobs.get()) is not None:
                job, plan = self._with_limits(job)
                self._results.put((job, plan, *worker.grade(job)))
                jobs.done(job)
        except _Closing:
            pass
        except Exception as error:
            self._results.put(error)
            jobs.close()  # nobody waits for room in it any more
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

    def grade(self, job: Job) -> tuple[Reward, bool]:
        """Have one request graded; tell also whether the worker failed. Raises GraderError if none can be started."""
        # A quiet pipe reads None. Otherwise the process died, or wrote, after its last reply.
        if self._process is None or self._process.stdout.read(1) is not None:
            self.start()
        start = time.perf_counter()
        try:
            message = json.dumps([job.id, job.task, *job.request]).encode() + b"\n"
            reward = self._exchange(job.id, message, job.seconds)
            if self._is_too_large():
                self.kill()  # it leaks, but this reward is good
            return reward, False
        except _Failure as failure:
            self.kill()
            return Reward(0.0, time.perf_counter() - start, str(failure)), True

    def _is_too_large(self) -> bool:
        try:
            keeper = self._process.pid
            with open(f"/proc/{keeper}/task/{keeper}/children", "rb") as file:
                worker = int(file.read().split()[0])  # its eldest
            with open(f"/proc/{worker}/statm", "rb") as file:
                return int(file.read().split()[1]) * resource.getpagesize() > self._config.worker_gib * 2**30
        except (OSError, IndexError):  # it is dying, or this is no Linux
            return False

    def kill(self) -> int:
        """End the process and all that it left; return its exit code."""
        if self._process is None:
            return 0
        with self._process as process:  # closes the pipes and reaps
            with contextlib.suppress(subprocess.TimeoutExpired):
                # On Linux its keeper ends all below it (rewards/worker.py).
                self._end(signal.SIGTERM if sys.platform == "linux" else signal.SIGKILL)
                process.wait(KEEPER_SECONDS)
            if process.returncode is None:
                self._end(signal.SIGKILL)
        self._process = None
        return process.returncode

    def _end(self, number: int) -> None:
        with contextlib.suppress(PermissionError, ProcessLookupError):  # macOS, when only a zombie is left
            os.killpg(self._process.pid, number)

    def start(self, attempts: int = 3) -> None:
        """Have a fresh process with all graders loaded. Raises GraderError if there is none after `attempts`."""
        command = [sys.executable, "-u", WORKER, *self._tasks]
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
        raise GraderError(f"a reward worker for {', '.join(self._tasks)} failed to start{times}: {error}")

    def _exchange(self, id: int, message: bytes, seconds: float) -> Reward:
        """Send a line and return the reply to it. Raises _Failure unless that comes within `seconds`."""
        deadline = time.perf_counter() + seconds
        stdin, stdout = self._process.stdin, self._process.stdout
        reply = b""
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            if message:
                selector.register(stdin, selectors.EVENT_WRITE)
            while not reply.endswith(b"\n") and len(reply) < 2**20:  # ours are far smaller
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
                elif self._is_too_large():
                    raise _Failure(f"the worker took over {self._config.worker_gib:g} GiB of memory")
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


class _Client:
    """Asks a service, in the place of a worker."""

    def __init__(self, config: RewardConfig, closing: threading.Event):
        self._config, self._closing = config, closing

    def grade(self, job: Job) -> tuple[Reward, bool]:
        """Have one request graded; tell also whether the service failed."""
        start = time.perf_counter()
        try:
            message = json.dumps(dict(zip(("response", "answer", "row"), job.request))).encode()
            value = remote.ask(job.task, message, job.seconds, self._config.remote_retries, self._closing)
            return Reward(value, time.perf_counter() - start), False
        except remote.RemoteError as error:
            return Reward(0.0, time.perf_counter() - start, str(error)[:500]), True

    def kill(self) -> None:
        """Nothing outlives a request."""


TASK_OF_JUDGE = "judge"  # rows that name it are graded by a language model (rewards/judge.py)

# A grader in INLINE is called in the trainer's process; all others may hang or crash.
GRADERS: dict[str, Grader] = {
    "match": exact_match,
    "hailstone": hailstone,
    "reverse_add": reverse_add,
    "math": math_answer,
    "code": code,
}
INLINE = {"match", "hailstone", "reverse_add"}
WARM_UP: dict[str, Callable] = {"math": lambda: math_answer("\\boxed{1}", "1", {}), "code": sandbox.isolation}
