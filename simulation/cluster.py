"""Jobs that come and go over days in a cluster, by the rule that admits them: dollars, nodes, SLOs. Pure, no torch.

`admit` is the rule of the server too, and `policies.group` says how fast the jobs of a group go. Only modelled: the
jobs, that a job goes on without a pause when its group changes, and that `regroup` moves jobs, as no server does yet.
(RollMux, arXiv 2512.11306, section 7)
"""

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import inf
from operator import attrgetter
from statistics import fmean

from policies.admission import Admission, Asked, MuxGroup, Prices, admit, alone, placements
from policies.group import Member, PhaseName, cycle, load, periods, play
from policies.regroup import Regrouping, regroup
from simulation.mux_jobs import Arrival

# ---- rules ---------------------------------------------------------------------------------------------------------

Rule = Callable[[Asked, Sequence[MuxGroup], Prices, random.Random], Admission]


def solo(job: Asked, groups: Sequence[MuxGroup], prices: Prices, rng: random.Random) -> Admission:
    """Give each job nodes of its own (Solo-D)."""
    return Admission(None, alone(job), alone(job).cost(prices))


def colocated(job: Asked, groups: Sequence[MuxGroup], prices: Prices, rng: random.Random) -> Admission:
    """Give each job training nodes of its own for both phases, in turns (co-located veRL)."""
    group = MuxGroup(job.train_nodes).joined(job, frozenset())  # an H800 decodes about as fast (figures/mux_micro.py)
    return Admission(None, group, group.cost(prices))


def slices(job: Asked, groups: Sequence[MuxGroup], prices: Prices, rng: random.Random) -> Admission:
    """Let whole jobs take turns on their nodes (Gavel+, whose exact form the paper does not say)."""
    whole = replace(job, rollout=0.0, train=job.alone)  # nobody else works meanwhile
    for i, group in enumerate(groups):
        fits = (len(group.rollout_nodes), group.train_nodes) == (job.rollout_nodes, job.train_nodes)
        after = group.joined(whole, group.rollout_nodes)
        if fits and not after.shortage(prices) and not after.delay_now():
            return Admission(i, after, 0.0)
    return Admission(None, alone(whole), alone(whole).cost(prices))


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
RULES |= {"colocated": colocated, "slices": slices}


# ---- a cluster over time -------------------------------------------------------------------------------------------


@dataclass
class Pool:
    """Rollout nodes or training nodes."""

    hours: float = 0.0  # of nodes that a group has
    worked: float = 0.0  # of them
    peak: int = 0  # nodes

    @property
    def idle(self) -> float:
        """Return the share of the hours in bubbles."""
        return 1 - self.worked / self.hours


@dataclass
class Outcome:
    """What a cluster came to."""

    dollars: float = 0.0
    rollout: Pool = field(default_factory=Pool)
    train: Pool = field(default_factory=Pool)
    slowdowns: dict[str, float] = field(default_factory=dict)  # by job: hours over those that it takes alone
    late: list[str] = field(default_factory=list)  # jobs that took more than `slo` times what they take alone
    moved: int = 0  # jobs, by regrouping
    alone: int = 0  # jobs that got nodes of their own when they came

    @property
    def slo_attainment(self) -> float:
        return 1 - len(self.late) / len(self.slowdowns)

    @property
    def slowdown(self) -> float:
        return fmean(self.slowdowns.values())


@dataclass
class _Running:
    arrival: Arrival
    done: float = 0.0  # share of its iterations
    alone: float = 0.0  # hours that these take alone
    since: float = 0.0  # the hour until which both are counted
    period: float = inf  # seconds an iteration from then on
    paused: float = 0.0  # hours at the end of which it begins to work again, after a move
    version: int = 0  # of its departure

    @property
    def rate(self) -> float:
        """Return the share of its iterations that it does in an hour."""
        return self.arrival.job.alone / self.period / self.arrival.hours

    def ahead(self, now: float) -> float:
        """Return the hours that it has taken less than its SLO allows."""
        return self.arrival.job.slo * self.alone - (now - self.arrival.hour)

    def count(self, now: float) -> None:
        """Count the work since the last call. Phases change little meanwhile."""
        hours = max(now - max(self.since, self.paused), 0.0)
        self.alone += hours * self.arrival.now(self.done).alone / self.period
        self.done, self.since = self.done + hours * self.rate, now


class Cluster:
    """Admits arrivals by a rule, and lets jobs depart when they have done their work.

    It admits a job by `plan`; jobs with recorded phases then take these by chance. With `regrouping` jobs move each
    hour, where that rule says so.
    """

    def __init__(
        self,
        rule: Rule,
        prices: Prices,
        seed: int = 0,
        regrouping: Regrouping | None = None,
        plan: Callable[[Arrival], Asked] = attrgetter("job"),
    ):
        self.rule, self.prices, self.rng = rule, prices, random.Random(seed)
        self.regrouping, self.plan = regrouping, plan
        self.groups: list[MuxGroup] = []
        self.running: dict[str, _Running] = {}
        self.departures: list[tuple[float, str, int]] = []
        self.now = 0.0
        self.outcome = Outcome()

    def run(self, jobs: Sequence[Arrival]) -> Outcome:
        """Play all jobs to their end. Raises ValueError where a rule has other phases than those that were recorded."""
        if self.rule in (colocated, slices) and any(arrival.recorded[0] for arrival in jobs):
            raise ValueError(
                f"the rule {self.rule.__name__} changes a job's phases; give it jobs without recorded ones"
            )
        coming, self.now = list(jobs)[::-1], jobs[0].hour
        hour = self.now + 1 if any(arrival.growth for arrival in jobs) else inf
        while coming or self.running:
            comes, leaves = coming[-1].hour if coming else inf, self.departures[0][0] if self.departures else inf
            self._advance(min(comes, leaves, hour))
            if comes == self.now:
                self._arrive(coming.pop())
            elif leaves == self.now:
                _, name, version = heapq.heappop(self.departures)
                if name in self.running and self.running[name].version == version:
                    self._depart(name)
            else:
                self._look_again()
                hour += 1
        return self.outcome

    def _advance(self, hour: float) -> None:
        hours, self.now, out = hour - self.now, hour, self.outcome
        out.dollars += hours * sum(group.cost(self.prices) for group in self.groups)
        rollout, train = (sum(len(g.rollout_nodes) for g in self.groups), sum(g.train_nodes for g in self.groups))
        for pool, nodes in ((out.rollout, rollout), (out.train, train)):
            pool.hours, pool.peak = pool.hours + hours * nodes, max(pool.peak, nodes)

    def _arrive(self, arrival: Arrival) -> None:
        admission = self.rule(self.plan(arrival), self.groups, self.prices, self.rng)
        self.outcome.alone += admission.group is None
        self.running[arrival.job.name] = _Running(arrival, since=self.now)
        admission.carry_out(self.groups)
        self._repace(admission.after)

    def _depart(self, name: str) -> None:
        index = next(i for i, group in enumerate(self.groups) if any(job.name == name for job in group.jobs))
        self.groups[index] = self.groups[index].without(name)
        self._repace(self.groups[index])
        if not self.groups[index].jobs:
            del self.groups[index]
        mine, out = self.running.pop(name), self.outcome
        mine.count(self.now)
        job, hours = mine.arrival.job, mine.alone / mine.arrival.job.alone
        out.rollout.worked += hours * job.rollout * job.rollout_nodes
        out.train.worked += hours * job.train * job.train_nodes
        out.slowdowns[name] = (self.now - mine.arrival.hour) / mine.alone
        if out.slowdowns[name] > job.slo * (1 + 1e-6):
            out.late.append(name)

    def _look_again(self) -> None:
        """Take the jobs' phases as they are now, and move jobs."""
        for mine in self.running.values():
            mine.count(self.now)
        for i, group in enumerate(self.groups):
            jobs = (self.running[job.name] for job in group.jobs)
            self.groups[i] = replace(group, jobs=tuple(mine.arrival.now(mine.done) for mine in jobs))
        if self.regrouping:
            ahead = {name: mine.ahead(self.now) for name, mine in self.running.items()}
            found = regroup(self.groups, self.prices, self.regrouping, ahead)
            self.groups, self.outcome.moved = found.groups, self.outcome.moved + len(found.moved)
            for name in found.moved:
                self.running[name].paused = self.now + self.regrouping.moving_hours
        for group in self.groups:
            self._repace(group)

    def _repace(self, group: MuxGroup) -> None:
        """Let the jobs of a group that has changed go at their new speeds."""
        for job, seconds in zip(group.jobs, self._periods(group.members) if group.jobs else (), strict=True):
            mine = self.running[job.name]
            mine.count(self.now)
            mine.period, mine.version = seconds, mine.version + 1
            leaves = max(self.now, mine.paused) + max(1 - mine.done, 0.0) / mine.rate
            heapq.heappush(self.departures, (leaves, job.name, mine.version))

    def _periods(self, members: Sequence[Member]) -> list[float]:
        """Return the jobs' seconds an iteration, which are a mean of some dozens if they differ."""
        arrivals = {member.name: self.running[member.name].arrival for member in members}
        if not any(arrival.recorded[0] for arrival in arrivals.values()):
            return periods(members)

        def draw(member: Member, phase: PhaseName) -> float:
            return self.rng.choice(arrivals[member.name].recorded[phase == "train"])

        worked, slower = dict.fromkeys(arrivals, 0.0), dict.fromkeys(arrivals, 1.0)
        for ran in play(members, DRAWN, draw):
            worked[ran.job] += ran.end - ran.start
            slower[ran.job] = ran.end / worked[ran.job]  # over the same draws alone
        return [slower[name] * arrival.job.alone for name, arrival in arrivals.items()]


DRAWN = 48  # iterations


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
