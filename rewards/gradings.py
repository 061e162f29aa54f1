"""Gradings that wait for a worker, and what a record tells of them."""

import math
import numbers
import threading
import time
from collections import Counter, deque
from collections.abc import Container, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from rewards.timeouts import TimeoutStats

LARGEST_REWARD = 1e9  # float32 squares it and sums over all weights
LARGEST_WEIGHT = 1e5  # of advantages: float32 squares its product with a reward, too


def reward_number(value: Any) -> float | None:
    """Return a grader's number, or None for what a step cannot train on: no number, or none of a sensible size."""
    try:
        # As float64: LARGEST_REWARD as float16 is infinite, and nothing is over that.
        number = float(value) if isinstance(value, numbers.Real) else math.nan
    except OverflowError:
        return None
    return number if abs(number) <= LARGEST_REWARD else None  # nan is not


@dataclass
class PoolStats:
    """What one rank's pool did since the last record."""

    graded: int = 0
    seconds: float = 0.0  # in graders, summed
    latency: float = 0.0  # from submit to result, summed
    latency_max: float = 0.0
    queue_max: int = 0  # gradings that waited for a worker at a time
    replaced: int = 0  # workers
    causes: Counter = field(default_factory=Counter)  # of rewards that failed, by the start of the message
    cases: TimeoutStats = field(default_factory=TimeoutStats)
    anchors: dict[str, float] = field(default_factory=dict)  # that rose, in seconds by test case

    def add(self, other: "PoolStats") -> None:
        for name in ("graded", "seconds", "latency", "replaced"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("latency_max", "queue_max"):
            setattr(self, name, max(getattr(self, name), getattr(other, name)))
        self.causes += other.causes
        self.cases.add(other.cases)


def merge_stats(ranks: Iterable[PoolStats], seconds: float) -> dict[str, Any]:
    """Return the record of a step that took `seconds`, over all ranks."""
    total = PoolStats()
    for stats in ranks:
        total.add(stats)
    graded = max(total.graded, 1)
    return {
        "graded": total.graded,
        "per_second": total.graded / seconds,
        "seconds_mean": total.seconds / graded,
        "latency_mean": total.latency / graded,
        "latency_max": total.latency_max,
        "queue_max": total.queue_max,
        "workers_replaced": total.replaced,
        "causes": dict(total.causes.most_common(10)),
        "cases": asdict(total.cases) | {"passes_cut_off": total.cases.passes_cut_off},
    }


@dataclass(frozen=True)
class Job:
    id: int
    task: str
    request: tuple[str, str, dict]  # response, answer, row
    seconds: float  # limit
    submitted: float = field(default_factory=time.perf_counter)


class JobQueue:
    """Jobs in their order, but never more of a grader at a time than its limit. Several threads take from it."""

    def __init__(self, capacity: int, concurrency: dict[str, float]):
        self._capacity, self._concurrency = capacity, concurrency
        self._jobs: deque[Job] = deque()
        self._running: Counter = Counter()
        self._changed = threading.Condition()
        self._is_closed, self._longest = False, 0

    def put(self, job: Job) -> None:
        """Add a job, once there is room for it. A closed queue drops it."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or len(self._jobs) < self._capacity)
            if not self._is_closed:
                self._jobs.append(job)
            self._longest = max(self._longest, len(self._jobs))
            self._changed.notify_all()

    def take_longest(self) -> int:
        """Return how many jobs have waited at a time since the last call."""
        with self._changed:
            longest, self._longest = self._longest, len(self._jobs)
            return longest

    def get(self) -> Job | None:
        """Wait for a job that may run. None when the queue is closed."""
        with self._changed:
            while not self._is_closed:
                for job in self._jobs:
                    if self._running[job.task] < self._concurrency.get(job.task, math.inf):
                        self._jobs.remove(job)
                        self._running[job.task] += 1
                        self._changed.notify_all()
                        return job
                self._changed.wait()
            return None

    def done(self, job: Job) -> None:
        with self._changed:
            self._running[job.task] -= 1
            self._changed.notify_all()

    def keep(self, ids: Container[int]) -> None:
        """Drop every job but these that nobody has begun."""
        with self._changed:
            self._jobs = deque(job for job in self._jobs if job.id in ids)
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
