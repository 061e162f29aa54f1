"""Adaptive time limits for test cases, learned online from correct responses. Pure. (RollPacker, section 4.3)"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields


@dataclass
class TimeoutStats:
    """What one step's limits came to. Audited cases run to the longest limit, whatever theirs is."""

    cases: int = 0  # that ran
    timeouts: int = 0  # that were cut off
    seconds_cut_off: float = 0.0  # what those took
    limit_seconds: float = 0.0  # sum over cases of the limit that held
    audited: int = 0
    audited_over: int = 0  # of those, over the limit that would have held
    audited_passed: int = 0  # of those, passed all the same: a time-out would have been wrong

    def add(self, other: "TimeoutStats") -> None:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


@dataclass(frozen=True)
class CasePlan:
    """Time limits of one response's test cases, in seconds."""

    names: tuple[str, ...]
    limits: tuple[float, ...]
    audited: tuple[bool, ...]
    longest: float

    @property
    def allowed(self) -> list[float]:
        """What each case may really take."""
        return [self.longest if audited else limit for limit, audited in zip(self.limits, self.audited)]


@dataclass
class AdaptiveTimeouts:
    """T = min(max(T_min, factor * anchor), T_max) for each test case of each prompt.

    The anchor is the longest time that the case took in a correct response so far; without one, T = T_max.
    A `factor` of 0 gives every case T_max.
    """

    factor: float
    shortest: float
    longest: float
    audit: float  # share of cases that get T_max whatever their limit
    anchors: dict[str, float] = field(default_factory=dict)  # seconds by case
    news: dict[str, float] = field(default_factory=dict)  # anchors that rose since `take`
    stats: TimeoutStats = field(default_factory=TimeoutStats)

    def limit(self, case: str) -> float:
        if self.factor == 0 or case not in self.anchors:
            return self.longest
        return min(max(self.shortest, self.factor * self.anchors[case]), self.longest)

    def plan(self, prompt: str, num_cases: int, sample: object) -> CasePlan:
        """Return the limits of a sample's cases. `prompt` tells prompts apart; `sample` decides what is audited."""
        digest = hashlib.blake2b(prompt.encode(errors="surrogatepass"), digest_size=12).hexdigest()
        names = tuple(f"{digest}:{i}" for i in range(num_cases))
        limits = tuple(map(self.limit, names))
        audited = tuple(_uniform(f"{name} {sample}") < self.audit for name in names)
        return CasePlan(names, limits, audited, self.longest)

    def observe(self, plan: CasePlan, ran: Sequence[tuple[float, bool, bool]], correct: bool) -> None:
        """Learn from (seconds, passed, timed out) of the cases that ran, in order; `correct`: all cases passed."""
        for name, limit, audited, (seconds, passed, timed_out) in zip(plan.names, plan.limits, plan.audited, ran):
            is_over = audited and seconds > limit
            self.stats.add(
                TimeoutStats(
                    cases=1,
                    timeouts=timed_out,
                    seconds_cut_off=seconds if timed_out else 0.0,
                    limit_seconds=limit,
                    audited=audited,
                    audited_over=is_over,
                    audited_passed=is_over and passed,
                )
            )
            if correct and seconds > self.anchors.get(name, -1.0):
                self.anchors[name] = self.news[name] = seconds

    def merge(self, anchors: dict[str, float]) -> None:
        """Take over what other ranks have learned."""
        for name, seconds in anchors.items():
            self.anchors[name] = max(seconds, self.anchors.get(name, 0.0))

    def take(self) -> tuple[TimeoutStats, dict[str, float]]:
        """Return the statistics, and the anchors that rose, since the last call: what other ranks have to be told."""
        taken = self.stats, self.news
        self.stats, self.news = TimeoutStats(), {}
        return taken

    def state_dict(self) -> dict[str, float]:
        return dict(self.anchors)

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.anchors, self.news = dict(state), {}


def _uniform(text: str) -> float:
    """Return a number in [0, 1) that depends on the text alone."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest()) / 2**56
