"""Gradings that wait for a worker, and the statistics of a rank's pool."""

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Container, Mapping
from dataclasses import dataclass, field

from rewards.timeouts import TimeoutStats


@dataclass
class PoolStats:
    """Counters of one rank's pool since the last record."""

    graded: int = 0
    seconds: float = 0.0  # in graders, summed
    latency: float = 0.0  # from submit to result, summed
    latency_max: float = 0.0
    queue_max: int = 0  # most gradings that waited for a worker at the same time
    replaced: int = 0  # workers
    causes: Counter = field(default_factory=Counter)  # of failed gradings, by the start of the message
    cases: TimeoutStats = field(default_factory=TimeoutStats)
    anchors: dict[str, float] = field(default_factory=dict)  # that rose, in seconds by test case

    def add(self, other: "PoolStats") -> None:
        for name in ("graded", "seconds", "latency", "replaced"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("latency_max", "queue_max"):
            setattr(self, name, max(getattr(self, name), getattr(other, name)))
        self.causes += other.causes
        self.cases.add(other.cases)


@dataclass(frozen=True)
class Grading:
    """One response for one grader."""

    id: int
    task: str
    request: tuple[str, str, dict]  # response, answer, row
    seconds: float  # limit
    submitted: float = field(default_factory=time.perf_counter)


class GradingQueue:
    """Gradings in their order, but never more of a grader at a time than its limit. Several threads take from it."""

    def __init__(self, capacity: int, concurrency: Mapping[str, float]):
        self._capacity, self._concurrency = capacity, concurrency
        self._waiting: deque[Grading] = deque()
        self._running: Counter = Counter()
        self._changed = threading.Condition()
        self._is_closed, self._longest = False, 0

    def put(self, grading: Grading) -> None:
        """Add a grading; wait while the queue is full. A closed queue drops it."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or len(self._waiting) < self._capacity)
            if not self._is_closed:
                self._waiting.append(grading)
            self._longest = max(self._longest, len(self._waiting))
            self._changed.notify_all()

    def take_longest(self) -> int:
        """Return the largest length of the queue since the last call."""
        with self._changed:
            longest, self._longest = self._longest, len(self._waiting)
            return longest

    def get(self) -> Grading | None:
        """Wait for a grading that may run. None when the queue is closed."""
        with self._changed:
            while not self._is_closed:
                for grading in self._waiting:
                    if self._running[grading.task] < self._concurrency.get(grading.task, math.inf):
                        self._waiting.remove(grading)
                        self._running[grading.task] += 1
                        self._changed.notify_all()
                        return grading
                self._changed.wait()
            return None

    def done(self, grading: Grading) -> None:
        with self._changed:
            self._running[grading.task] -= 1
            self._changed.notify_all()

    def drop_all_but(self, ids: Container[int]) -> None:
        with self._changed:
            self._waiting = deque(grading for grading in self._waiting if grading.id in ids)
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
