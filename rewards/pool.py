"""Grade in the background: a grader that hangs or crashes costs one reward, never the run.

Only killing a process stops a busy grader: threads, asyncio and alarms do not. So graders run in worker processes,
which load nothing of the trainer; a worker has one request at a time and is killed at the time limit. Graders that
always return at once run in this process, and graders with an address are asked over HTTP. Programs that a model wrote
run in a sandbox of their own below a worker.
"""

import itertools
import json
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import replace

from config import ConfigError
from core import Prompt, Reward
from process.workers import Closing, Failure, Worker, WorkerError
from reward import Graded, RewardConfig, by_grader
from rewards import remote, sandbox
from rewards.graders import GRADERS, INLINE, check_grader, grade
from rewards.gradings import Grading, GradingQueue, PoolStats
from rewards.timeouts import AdaptiveTimeouts, CasePlan

WORKER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "worker.py")
CLOSE_SECONDS = 1.0  # for requests over HTTP, at the end: they have a limit of their own
Result = tuple[Grading, CasePlan | None, Reward, bool]  # True: the worker or service failed


class RewardPool:
    """Grades in the background: `submit` waits only for a full queue, `poll` and `drain` return rewards in any order.

    For one caller thread. A grading that fails is a Reward of 0 with the cause in `error`. Only workers that cannot
    be started, and a grader that fails `max_failures` times in a row, raise (WorkerError, from `poll` and `drain`).
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
        self._queue, self._remote_queue = (GradingQueue(config.max_queue, concurrency) for _ in range(2))
        self._results: queue.SimpleQueue[Result | Exception] = queue.SimpleQueue()  # an exception ended a thread
        self._closing = threading.Event()
        services = set(filter(remote.is_address, self._tasks))
        programs = sorted(self._tasks - INLINE - services)
        servers: list[tuple[GradingQueue, _Grader | _Client]] = []
        for _ in range(config.num_workers if programs else 0):
            servers.append((self._queue, _Grader(config, programs, self._closing)))
        for _ in range(config.remote_concurrency if services else 0):
            servers.append((self._remote_queue, _Client(config, self._closing)))
        # The thread of a worker feeds it and watches the time while the trainer computes.
        self._threads = [threading.Thread(target=self._serve, args=server, daemon=True) for server in servers]
        self._asks_services = [isinstance(server, _Client) for _, server in servers]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, key: Hashable, task: str, response: str, answer: str, row: dict) -> None:
        """Have a response graded. `row` holds values that JSON can: numbers, strings, lists, dicts."""
        assert task in self._tasks, f"task {task!r} was not announced to the pool"
        assert not self._closing.is_set(), "the pool is closed"
        id, seconds, request = next(self._ids), self._config.timeout_seconds, (response, answer, row)
        self._pending[id] = key
        if task in INLINE:
            self._results.put((Grading(id, task, request, seconds), None, grade(GRADERS[task], *request), False))
        elif remote.is_address(task):
            self._remote_queue.put(Grading(id, task, request, self._config.remote_seconds))
        else:
            self._queue.put(Grading(id, task, request, seconds))

    def _with_limits(self, grading: Grading) -> tuple[Grading, CasePlan | None]:
        """Give a program's cases their time limits only when it is about to run: limits are learned while it waits."""
        response, answer, row = grading.request
        if grading.task != "code":
            return grading, None
        try:
            num_cases = len(sandbox.read_cases(answer))
        except ValueError:  # the worker reports the error
            return grading, None
        plan = self.timeouts.plan(json.dumps([row.get("prompt"), answer]), num_cases, self._pending.get(grading.id))
        seconds = grading.seconds + sum(plan.allowed) + num_cases * sandbox.OVERHEAD_SECONDS
        return replace(grading, request=(response, answer, row | {"case_seconds": plan.allowed}), seconds=seconds), plan

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def poll(self) -> list[Graded]:
        """Return the rewards that have arrived since the last call. Never waits."""
        return self._collect(lambda: False)

    def drain(self) -> list[Graded]:
        """Wait for every pending grading and return the rewards. The time limits bound the wait."""
        return self._collect(lambda: True)

    def wait(self, keys: Iterable[Hashable]) -> list[Graded]:
        """Wait for the pending gradings of `keys`; return them and all others that have ended by then."""
        keys = set(keys)
        wanted = {id for id, key in self._pending.items() if key in keys}
        return self._collect(lambda: not wanted.isdisjoint(self._pending))

    def forget(self, keep: Iterable[Hashable]) -> None:
        """Forget every pending grading but those of `keep`: its reward is dropped, and if it waits it never runs."""
        keep = set(keep)
        self._pending = {id: key for id, key in self._pending.items() if key in keep}
        for waiting in (self._queue, self._remote_queue):
            waiting.drop_all_but(self._pending)

    def take_stats(self) -> PoolStats:
        """Return the statistics since the last call."""
        taken, self._stats = self._stats, PoolStats()
        taken.queue_max = max(waiting.take_longest() for waiting in (self._queue, self._remote_queue))
        taken.cases, taken.anchors = self.timeouts.take()
        return taken

    def close(self) -> None:
        """Kill the workers and drop all pending gradings."""
        self._closing.set()
        self._queue.close()
        self._remote_queue.close()
        deadline = time.monotonic() + CLOSE_SECONDS
        for thread, asks_services in zip(self._threads, self._asks_services, strict=True):
            thread.join(max(deadline - time.monotonic(), 0.0) if asks_services else None)
        self._pending.clear()

    def _collect(self, must_wait: Callable[[], bool]) -> list[Graded]:
        graded = []
        while self._pending:
            try:
                result = self._results.get(block=must_wait())
            except queue.Empty:
                break
            if isinstance(result, Exception):
                self._results.put(result)  # for the next call too
                raise result
            grading, plan, reward, failed = result
            self._count(grading, reward, failed)
            if grading.id not in self._pending:
                continue  # forgotten
            if plan:
                self.timeouts.observe(plan, reward.cases, correct=reward.value == 1.0)
            key = self._pending.pop(grading.id)
            if reward.error:
                reward = replace(reward, error=f"{reward.error} (task {grading.task}, sample {key})")
            graded.append((key, reward))
        return graded

    def _count(self, grading: Grading, reward: Reward, failed: bool) -> None:
        """Add a grading to the statistics. Raises WorkerError at the last of `max_failures` failures in a row."""
        latency = time.perf_counter() - grading.submitted
        cause = Counter([reward.error.partition(":")[0]] if reward.error else [])
        self._stats.add(PoolStats(1, reward.seconds, latency, latency, replaced=int(failed), causes=cause))
        failed |= reward.error.startswith(f"{sandbox.SandboxError.__name__}:")  # the machine's fault
        self._failures[grading.task] = self._failures[grading.task] + 1 if failed else 0
        if failed and self._failures[grading.task] == self._config.max_failures:
            error = WorkerError(
                f"grader {grading.task} failed {self._config.max_failures} times in a row, the last time: "
                f"{reward.error}; correct the grader or the machine, or raise reward.timeout_seconds; with "
                "reward.max_failures = 0 the run goes on"
            )
            self._results.put(error)
            raise error

    def _serve(self, waiting: GradingQueue, server: "_Grader | _Client") -> None:
        """Body of a thread: every grading that it takes ends in one result."""
        try:
            while (grading := waiting.get()) is not None:
                grading, plan = self._with_limits(grading)
                self._results.put((grading, plan, *server.grade(grading)))
                waiting.done(grading)
        except Closing:
            pass
        except Exception as error:
            self._results.put(error)
            waiting.close()  # else `submit` could wait for room for ever
        finally:
            server.kill()


class _Grader:
    """Has a worker process grade."""

    def __init__(self, config: RewardConfig, tasks: list[str], closing: threading.Event):
        self.worker = Worker(WORKER, tasks, config.worker_gib, config.startup_seconds, closing)

    def grade(self, grading: Grading) -> tuple[Reward, bool]:
        """Return the reward, and whether the worker failed. Raises WorkerError if no worker can be started."""
        start = time.perf_counter()
        try:
            return self.worker.ask(Reward, (grading.task, *grading.request), grading.seconds), False
        except Failure as failure:
            return Reward(0.0, time.perf_counter() - start, str(failure)), True

    def kill(self) -> None:
        self.worker.kill()


class _Client:
    """Asks a service, in the place of a worker."""

    def __init__(self, config: RewardConfig, closing: threading.Event):
        self._config, self._closing = config, closing

    def grade(self, grading: Grading) -> tuple[Reward, bool]:
        """Return the reward, and whether the service failed."""
        start = time.perf_counter()
        try:
            message = json.dumps(dict(zip(("response", "answer", "row"), grading.request))).encode()
            reply = remote.ask(grading.task, message, grading.seconds, self._config.remote_retries, self._closing)
            return Reward(remote.reward_in(reply), time.perf_counter() - start), False
        except remote.RemoteError as error:
            return Reward(0.0, time.perf_counter() - start, str(error)[:500]), True

    def kill(self) -> None:
        """Nothing outlives a request."""


def try_graders(config: RewardConfig, rows: Mapping[str, Prompt]) -> None:
    """Have users' graders grade a row's own answer in a worker, and check that a sandbox can run if one is needed.

    `rows`: a row of each grader. Raises ConfigError if that fails.
    """
    if "code" in rows:
        try:
            sandbox.isolation()
        except sandbox.SandboxError as error:
            raise ConfigError(f"grader 'code': {error}") from None
    for name in sorted(name for name in rows.keys() - GRADERS.keys() if not remote.is_address(name)):
        grader = _Grader(config, [name], threading.Event())
        try:
            grader.worker.start(attempts=1)
            row = rows[name]
            reward, _ = grader.grade(Grading(1, name, (row.answer, row.answer, row.extra), config.timeout_seconds))
        except WorkerError as error:
            raise ConfigError(" ".join(str(error).split())) from None
        finally:
            grader.kill()
        if reward.error:
            said = " ".join(reward.error.split())
            raise ConfigError(f"{row.where}: grader {name!r} fails on the row's own answer: {said}; correct it")
