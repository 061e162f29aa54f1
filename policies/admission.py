"""Which co-execution group a job joins. Pure. (RollMux, arXiv 2512.11306, Algorithm 1)

A job joins where that costs the least: nothing in a group whose idle times it fits into, some more rollout nodes, or a
group of its own. The paper leaves open, and here it is so:
- A group whose nodes have no idle time left (T_load >= T_cycle) before the job comes is not looked at.
- Of two placements that cost the same the first one is taken.
- A job's training on another number of training nodes takes in proportion longer or shorter.
- Groups never move a job that they have; a node that no job uses any more is given back.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from operator import gt, le
from statistics import fmean

from policies.group import Member, cycle, least_periods, load, most_periods, periods


@dataclass(frozen=True)
class Asked:
    """A job that asks to be admitted. Seconds of an iteration are its longest, or a quantile of them."""

    name: str
    rollout: float  # seconds, on its own rollout nodes
    train: float  # seconds, on its own training nodes
    slo: float  # times of what it takes alone that it may take in a group, at most; below 1 it will not share
    rollout_nodes: int = 1
    train_nodes: int = 1
    rollout_gib: float = 0.0  # of host memory on each of its nodes, which its state takes between its phases
    train_gib: float = 0.0

    @property
    def alone(self) -> float:
        return self.rollout + self.train


def asked(name: str, slo: float, rollouts: Sequence[float], trains: Sequence[float], quantile: float = 1.0) -> Asked:
    """Return a job by the recorded seconds of its phases: it is planned by their longest, or by a quantile of them.

    `slo` is of the seconds that it takes alone in the mean. Where it takes more than that alone, by plan, it will not
    share its nodes.
    """
    if not (rollouts and trains and 0 < quantile <= 1):
        raise ValueError(
            f"job {name}: {len(rollouts)} rollouts and {len(trains)} trainings recorded, quantile {quantile}: "
            "record at least one of each; a quantile is above 0 and at most 1"
        )
    rollout, train = (sorted(seconds)[math.ceil(quantile * len(seconds)) - 1] for seconds in (rollouts, trains))
    mean = fmean(rollouts) + fmean(trains)
    return Asked(name, rollout, train, slo * mean / (rollout + train))


def recorded_phases(records: Iterable[Mapping[str, Mapping[str, float]]]) -> tuple[list[float], list[float]]:
    """Return the seconds of a run's rollouts and trainings, by the records of its steps.jsonl.

    Those of a job in a group are what its phases and the switches to them took, without the waits for permits.
    """
    steps = [record["seconds"] for record in records if "train" in record.get("seconds", {})]
    alone = [(seconds["rollout"], seconds["step"] - seconds["rollout"]) for seconds in steps]
    shared = [
        tuple(seconds[f"phase_{name}"] + seconds[f"switch_{name}"] for name in ("rollout", "train"))
        for seconds in steps
        if "phase_train" in seconds
    ]
    rollouts, trains = zip(*(shared or alone), strict=True) if steps else ((), ())
    return [*rollouts], [*trains]


@dataclass(frozen=True)
class Prices:
    """What nodes cost an hour, and what they hold."""

    rollout_node: float = 8 * 1.85  # dollars; H20 and H800 as in the paper's section 7.1
    train_node: float = 8 * 5.28
    host_gib: float = 2048.0  # of a node, for the jobs' states
    max_jobs: int = 5  # of a group


@dataclass(frozen=True)
class MuxGroup:
    """Jobs that share nodes, and where each one's rollout runs."""

    train_nodes: int
    jobs: tuple[Asked, ...] = ()
    places: tuple[frozenset[int], ...] = ()  # rollout nodes, by job

    @cached_property
    def rollout_nodes(self) -> frozenset[int]:
        return frozenset[int]().union(*self.places)

    @cached_property
    def members(self) -> list[Member]:
        return [
            Member(job.name, place, job.rollout, job.train * job.train_nodes / self.train_nodes)
            for job, place in zip(self.jobs, self.places, strict=True)
        ]

    @cached_property
    def is_full(self) -> bool:
        """Whether its busiest node has no idle time."""
        return load(self.members) >= cycle(self.members)

    def cost(self, prices: Prices) -> float:
        """Return dollars an hour."""
        return len(self.rollout_nodes) * prices.rollout_node + self.train_nodes * prices.train_node

    def joined(self, job: Asked, place: frozenset[int]) -> "MuxGroup":
        return replace(self, jobs=(*self.jobs, job), places=(*self.places, place))

    def of(self, indices: Iterable[int]) -> "MuxGroup":
        """Return the group with some of its jobs."""
        indices = [*indices]
        return replace(self, jobs=tuple(self.jobs[i] for i in indices), places=tuple(self.places[i] for i in indices))

    def without(self, name: str) -> "MuxGroup":
        return self.of(i for i, job in enumerate(self.jobs) if job.name != name)

    def shortage(self, prices: Prices) -> str:
        """Return why these jobs do not fit on these nodes, or ""."""
        if len(self.jobs) > prices.max_jobs:
            return f"it has {prices.max_jobs} jobs"
        if (taken := sum(job.train_gib for job in self.jobs)) > prices.host_gib:
            return f"the states would take {taken:.0f} GiB on a training node, which has {prices.host_gib:.0f}"
        for node in self.rollout_nodes:
            taken = sum(job.rollout_gib for job, place in zip(self.jobs, self.places, strict=True) if node in place)
            if taken > prices.host_gib:
                return f"the states would take {taken:.0f} GiB on a rollout node, which has {prices.host_gib:.0f}"
        return ""

    def delay(self) -> str:
        """Return which job would be slower than its SLO, now or after others have left, or "".

        That a job leaves may slow down another one, which then finds the training nodes taken each time that it comes.
        So every set of jobs that may be left is tried; those without the newest were when its members came.
        """
        last = len(self.jobs) - 1
        left = (kept for size in range(last, -1, -1) for kept in combinations(range(last), size))
        return next((why for kept in left if (why := self.of((*kept, last)).delay_now())), "")

    def delay_now(self) -> str:
        """Return which job others make slower than its SLO as long as nobody leaves, or ""."""
        if len(self.jobs) == 1:
            return ""
        members, limits = self.members, [job.slo * job.alone * (1 + 1e-9) for job in self.jobs]
        least, most = least_periods(members), most_periods(members)
        seconds = least if any(map(gt, least, limits)) else most if all(map(le, most, limits)) else periods(members)
        late = [(job.name, took, limit) for job, took, limit in zip(self.jobs, seconds, limits) if took > limit]
        return "".join(f"job {name} would take {t:.0f} s an iteration, and may take {m:.0f}" for name, t, m in late[:1])


@dataclass(frozen=True)
class Admission:
    """Where a job goes: `group` is the index of a group, or None for a new one."""

    group: int | None
    after: MuxGroup  # the group with the job
    added: float  # dollars an hour
    refused: dict[int, str] = field(default_factory=dict)  # why it does not join others

    def carry_out(self, groups: list[MuxGroup]) -> None:
        """Put the job into its group of these, or into a new one."""
        if self.group is None:
            groups.append(self.after)
        else:
            groups[self.group] = self.after


def placements(group: MuxGroup, job: Asked) -> Iterator[tuple[int, frozenset[int]]]:
    """Yield each set of nodes for a job's rollout, with how many of them are new: fewer new ones first.

    Of nodes that have the same jobs the first ones stand for all: others would change nothing.
    """
    nodes, alike = sorted(group.rollout_nodes), defaultdict[tuple[bool, ...], list[int]](list)
    for node in nodes:
        alike[tuple(node in place for place in group.places)].append(node)
    for new in range(job.rollout_nodes + 1):
        fresh = range(max(nodes, default=-1) + 1, max(nodes, default=-1) + 1 + new)
        for old in sorted(_first_of([*alike.values()], job.rollout_nodes - new)):
            yield new, frozenset((*old, *fresh))


def _first_of(kinds: Sequence[Sequence[int]], count: int) -> Iterator[list[int]]:
    """Yield each choice of so many nodes, the first ones of each kind; sorted."""
    if not kinds:
        yield from [[]] * (not count)
        return
    rest = sum(map(len, kinds[1:]))
    for taken in range(max(count - rest, 0), min(count, len(kinds[0])) + 1):
        for others in _first_of(kinds[1:], count - taken):
            yield sorted([*kinds[0][:taken], *others])


def alone(job: Asked) -> MuxGroup:
    return MuxGroup(job.train_nodes).joined(job, frozenset(range(job.rollout_nodes)))


def admit(job: Asked, groups: Sequence[MuxGroup], prices: Prices) -> Admission:
    """Return the cheapest place for a job that keeps every member's SLO. (Algorithm 1)"""
    best, refused = Admission(None, alone(job), alone(job).cost(prices)), dict[int, str]()
    for index, group in enumerate(groups):
        if group.is_full:
            refused[index] = "its nodes have no idle time left"
            continue
        for new, place in placements(group, job):
            added = new * prices.rollout_node
            if added >= best.added:
                break
            after = group.joined(job, place)
            if why := after.shortage(prices) or after.delay():
                refused.setdefault(index, why)
            else:
                best = Admission(index, after, added)
        if not best.added:
            break
    return replace(best, refused={index: why for index, why in refused.items() if index != best.group})
