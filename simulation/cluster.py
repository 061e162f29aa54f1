"""Jobs that come and go over days in a cluster, by the rule that admits them: dollars, nodes, SLOs. Pure, no torch.

`admit` is the shipped rule, and `policies.group.periods` says how fast the jobs of a group go. Only modelled: jobs'
lengths and phases, and that a job goes on without a pause when its group changes. (RollMux, arXiv
2512.11306, section 7)
"""

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from statistics import fmean

from policies.admission import Admission, Asked, MuxGroup, Prices, admit, alone, placements
from policies.group import cycle, load, periods

SECONDS = {"S": ((50, 100), (25, 50)), "M": ((100, 200), (50, 100)), "L": ((200, 300), (100, 200))}  # Table 6
HEAVY = {"S": (100, 200), "M": (200, 400), "L": (400, 600)}  # the longer phase of jobs that have one


@dataclass(frozen=True)
class Arrival:
    hour: float
    hours: float  # that the job takes alone
    job: Asked


def arrivals(
    mix: str, count: int, seed: int, slo: tuple[float, float] = (1.0, 2.0), span: float = 580.0
) -> list[Arrival]:
    """Return jobs of the paper's section 7.5. `mix`: BL, RH, TH (rollout or training is heavy), or Mixed.

    Their lengths are lognormal with its mean of 14.4 and at most 142.9 hours; the paper does not give the distribution.
    """
    rng = random.Random(f"{mix} {seed}")
    found = []
    for i in range(count):
        kind, size = rng.choice(("BL", "RH", "TH")) if mix == "Mixed" else mix, rng.choice("SML")
        (both, light), heavy = SECONDS[size], HEAVY[size]
        rollout, train = {"BL": (both, both), "RH": (heavy, light), "TH": (light, heavy)}[kind]
        job = Asked(f"job{i}", rng.uniform(*rollout), rng.uniform(*train), rng.uniform(*slo))
        hours = min(rng.lognormvariate(2.067, 1.1), 142.9)  # mean exp(2.067 + 1.1 ** 2 / 2) = 14.4
        found.append(Arrival(rng.uniform(0.0, span), hours, job))
    return sorted(found, key=lambda arrival: arrival.hour)


# ---- rules ---------------------------------------------------------------------------------------------------------

Rule = Callable[[Asked, Sequence[MuxGroup], Prices, random.Random], Admission]


def solo(job: Asked, groups: Sequence[MuxGroup], prices: Prices, rng: random.Random) -> Admission:
    """Give each job nodes of its own (Solo-D)."""
    return Admission(None, alone(job), alone(job).cost(prices))


def rollmux(job: Asked, groups: Sequence[MuxGroup], prices: Prices, rng: random.Random) -> Admission:
    return admit(job, groups, prices)


def _fitting(job: Asked, groups: Sequence[MuxGroup], prices: Prices) -> list[Admission]:
    """Return the places on nodes that are there, whatever the SLOs."""
    return [
        Admission(i, after, 0.0)
        for i, group in enumerate(groups)
        for new, place in placements(group, job)
        if not new and not (after := group.joined(job, place)).shortage(prices)
    ]


def at_random(job: Asked, groups: Sequence[MuxGroup], prices: Prices, rng: random.Random) -> Admission:
    """Take any place that the states fit into, or nodes of its own, by chance."""
    return rng.choice([*_fitting(job, groups, prices), solo(job, groups, prices, rng)])


def _busy(group: MuxGroup) -> float:
    return load(group.members) / cycle(group.members)


def greedy(job: Asked, groups: Sequence[MuxGroup], prices: Prices, rng: random.Random) -> Admission:
    """Take the group with the most idle time that the states fit into, whatever the SLOs."""
    places = _fitting(job, groups, prices)
    return min(places, key=lambda place: _busy(groups[place.group or 0]), default=solo(job, groups, prices, rng))


RULES: dict[str, Rule] = {"rollmux": rollmux, "solo": solo, "random": at_random, "greedy": greedy}


# ---- a cluster over time -------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What a cluster came to."""

    dollars_per_hour: float = 0.0
    slo_attainment: float = 0.0  # share of jobs that took at most `slo` times what they take alone
    slowdown: float = 0.0  # mean
    peak_train_nodes: int = 0
    alone: int = 0  # jobs that got nodes of their own
    slowdowns: list[float] = field(default_factory=list)


@dataclass
class _Running:
    arrival: Arrival
    left: float  # hours alone that it still takes
    speed: float = 1.0  # hours alone that it does in an hour
    since: float = 0.0
    version: int = 0  # of its departure


class Cluster:
    """Admits arrivals by a rule, and lets jobs depart when they have done their work."""

    def __init__(self, rule: Rule, prices: Prices, seed: int = 0):
        self.rule, self.prices, self.rng = rule, prices, random.Random(seed)
        self.groups: list[MuxGroup] = []
        self.running: dict[str, _Running] = {}
        self.departures: list[tuple[float, str, int]] = []

    def run(self, jobs: Sequence[Arrival]) -> Outcome:
        outcome, now, dollars, coming = Outcome(), jobs[0].hour, 0.0, list(jobs)[::-1]
        begin = now
        while coming or self.running:
            leaves = self.departures[0][0] if self.departures else float("inf")
            at = min(coming[-1].hour if coming else float("inf"), leaves)
            dollars += (at - now) * sum(group.cost(self.prices) for group in self.groups)
            now = at
            if coming and coming[-1].hour <= leaves:
                outcome.alone += self._arrive(coming.pop(), now)
            else:
                _, name, version = heapq.heappop(self.departures)
                if name in self.running and self.running[name].version == version:
                    arrival = self._depart(name, now)
                    outcome.slowdowns.append((now - arrival.hour) / arrival.hours)
                    outcome.slo_attainment += outcome.slowdowns[-1] <= arrival.job.slo * (1 + 1e-6)
            outcome.peak_train_nodes = max(outcome.peak_train_nodes, sum(g.train_nodes for g in self.groups))
        outcome.dollars_per_hour, outcome.slowdown = dollars / (now - begin), fmean(outcome.slowdowns)
        outcome.slo_attainment /= len(jobs)
        return outcome

    def _arrive(self, arrival: Arrival, now: float) -> bool:
        """Admit a job; return whether it gets nodes of its own."""
        admission = self.rule(arrival.job, self.groups, self.prices, self.rng)
        self.running[arrival.job.name] = _Running(arrival, arrival.hours, since=now)
        admission.carry_out(self.groups)
        self._repace(admission.after, now)
        return admission.group is None

    def _depart(self, name: str, now: float) -> Arrival:
        index = next(i for i, group in enumerate(self.groups) if any(job.name == name for job in group.jobs))
        self.groups[index] = self.groups[index].without(name)
        self._repace(self.groups[index], now)
        if not self.groups[index].jobs:
            del self.groups[index]
        return self.running.pop(name).arrival

    def _repace(self, group: MuxGroup, now: float) -> None:
        """Let the jobs of a group that has changed go at their new speeds."""
        for job, seconds in zip(group.jobs, periods(group.members) if group.jobs else (), strict=True):
            mine = self.running[job.name]
            mine.left -= (now - mine.since) * mine.speed
            mine.since, mine.speed, mine.version = now, job.alone / seconds, mine.version + 1
            heapq.heappush(self.departures, (now + mine.left / mine.speed, job.name, mine.version))


# ---- the best that can be ----------------------------------------------------------------------------------------


def optimum(jobs: Sequence[Asked], prices: Prices) -> float:
    """Return the least dollars an hour of groups that keep all SLOs, by trying all of them. For at most 8 jobs.

    Jobs have one rollout node each. The round robin takes them in the order in which they stand.
    """
    assert len(jobs) <= 8 and all(job.rollout_nodes == 1 for job in jobs)
    best = {0: 0.0}  # by the set of jobs, as bits
    cheapest = {
        mask: _one_group([job for i, job in enumerate(jobs) if mask >> i & 1], prices) for mask in _sets(len(jobs))
    }
    for mask in _sets(len(jobs)):
        last = 1 << mask.bit_length() - 1  # in one of the groups: no partition is tried twice
        best[mask] = min(
            cost + best[mask ^ block] for block, cost in cheapest.items() if block & last and block & mask == block
        )
    return best[(1 << len(jobs)) - 1]


def _sets(count: int) -> range:
    return range(1, 1 << count)


def _one_group(jobs: Sequence[Asked], prices: Prices) -> float:
    """Return the dollars of the jobs as one group with as few rollout nodes as it takes; infinite if it cannot be."""
    if len(jobs) > prices.max_jobs:
        return float("inf")
    for nodes in range(1, len(jobs) + 1):
        for places in product(range(nodes), repeat=len(jobs)):
            group = MuxGroup(max(job.train_nodes for job in jobs), tuple(jobs), tuple(frozenset([p]) for p in places))
            is_new = all(place <= max(places[:i], default=-1) + 1 for i, place in enumerate(places))  # no other numbers
            if is_new and len({*places}) == nodes and not group.shortage(prices) and not group.delay():
                return group.cost(prices)
    return float("inf")
