"""Adaptive time limits for test cases, learned online from correct responses. Pure. (RollPacker, section 4.3)

A case may take T = min(max(T_min, factor * anchor), T_max). The paper's anchor is the longest time that the case took
in a correct response so far. A case without an anchor uses a high quantile of all known anchors (our addition):
programs of a run are alike, and a prompt that is never solved must not cost T_max for ever. T_max holds only while
no anchor is known. A limit can cut off a program that would have passed, so a share of the responses is audited: their
cases get T_max, the result counts, and the statistics say how many passed late.
"""

import hashlib
import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

MOST_CASES = 100_000  # whose anchors are kept: about 20 MiB


@dataclass
class TimeoutStats:
    """Counters of the time limits since they were last taken."""

    responses: int = 0
    cases: int = 0  # that ran
    timeouts: int = 0  # cases that were cut off
    seconds_cut_off: float = 0.0  # time of the cases that were cut off
    limit_seconds: float = 0.0  # sum over cases of their limit; of an audited case, its limit without the audit
    audited: int = 0  # responses
    audited_over: int = 0  # audited responses with a case over its limit without the audit
    audited_passed: int = 0  # of audited_over, the correct responses: the limit would have been wrong

    def add(self, other: "TimeoutStats") -> None:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))

    @property
    def passes_cut_off(self) -> float:
        """Number of correct responses that limits have cut off, estimated from the audited responses."""
        return self.audited_passed * (self.responses - self.audited) / max(self.audited, 1)


@dataclass(frozen=True)
class CasePlan:
    """Time limits of one response's test cases, in seconds."""

    names: tuple[str, ...]
    limits: tuple[float, ...]
    allowed: list[float]  # seconds that each case may take, the audit included
    audited: bool


@dataclass
class AdaptiveTimeouts:
    """Time limits and the anchors behind them. One thread observes; any may plan.

    A `factor` of 0 gives every case T_max. Of more than `most` cases, the first by name are kept. Names are hashes, so
    this is a random sample, and ranks that have exchanged their anchors keep the same cases.
    """

    factor: float
    shortest: float
    longest: float
    audit: float  # share of responses whose cases get T_max
    quantile: float  # of all anchors; it replaces a missing anchor
    most: int = MOST_CASES
    anchors: dict[str, float] = field(default_factory=dict)  # seconds by case
    news: dict[str, float] = field(default_factory=dict)  # anchors that rose since `take`
    stats: TimeoutStats = field(default_factory=TimeoutStats)
    common: float = math.inf  # replaces a missing anchor
    _names: list[str] = field(default_factory=list)  # of anchors, sorted
    _seconds: list[float] = field(default_factory=list)  # the anchors, sorted

    def limit(self, case: str) -> float:
        if self.factor == 0:
            return self.longest
        return min(max(self.shortest, self.factor * self.anchors.get(case, self.common)), self.longest)

    def plan(self, prompt: str, num_cases: int, sample: object) -> CasePlan:
        """Return the limits of a sample's cases. `prompt` identifies the prompt; `sample` decides about the audit."""
        digest = hashlib.blake2b(prompt.encode(errors="surrogatepass"), digest_size=12).hexdigest()
        names = tuple(f"{digest}:{i}" for i in range(num_cases))
        limits, audited = tuple(map(self.limit, names)), _uniform(f"{digest} {sample}") < self.audit
        return CasePlan(names, limits, [self.longest] * num_cases if audited else list(limits), audited)

    def observe(self, plan: CasePlan, ran: Sequence[tuple[float, bool, bool]], correct: bool) -> None:
        """Learn from (seconds, passed, timed out) of the cases that ran, in order; `correct`: all cases passed."""
        is_over = False
        for name, limit, (seconds, _, timed_out) in zip(plan.names, plan.limits, ran):
            is_over = is_over or (plan.audited and seconds > limit)
            cut_off = seconds if timed_out else 0.0
            self.stats.add(TimeoutStats(cases=1, timeouts=timed_out, seconds_cut_off=cut_off, limit_seconds=limit))
            if correct and self._learn(name, seconds):
                self.news[name] = seconds
        passed = is_over and correct
        self.stats.add(TimeoutStats(1, audited=plan.audited, audited_over=is_over, audited_passed=passed))

    def merge(self, anchors: dict[str, float]) -> None:
        """Add the anchors of other ranks. The order of calls does not matter, and a rank's own anchors do no harm."""
        for name, seconds in anchors.items():
            self._learn(name, seconds)

    def take(self) -> tuple[TimeoutStats, dict[str, float]]:
        """Return the statistics since the last call, and the anchors that rose, which other ranks need."""
        taken = self.stats, self.news
        self.stats, self.news = TimeoutStats(), {}
        return taken

    def state_dict(self) -> dict[str, float]:
        return {name: self.anchors[name] for name in self._names}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.anchors, self.news, self.common, self._names, self._seconds = {}, {}, math.inf, [], []
        self.merge(state)

    def _learn(self, name: str, seconds: float) -> bool:
        """Keep the longest time of a case; return whether it rose."""
        known = self.anchors.get(name)
        if known is not None and known >= seconds:
            return False
        if known is None:
            insort(self._names, name)
        else:
            del self._seconds[bisect_left(self._seconds, known)]
        self.anchors[name] = seconds
        insort(self._seconds, seconds)
        if len(self._names) > self.most:
            last = self._names.pop()
            del self._seconds[bisect_left(self._seconds, self.anchors.pop(last))]
            self.news.pop(last, None)
        self.common = self._seconds[math.ceil(self.quantile * len(self._seconds)) - 1]
        return name in self.anchors


def _uniform(text: str) -> float:
    """Return a number in [0, 1) that depends on the text alone."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest()) / 2**56
