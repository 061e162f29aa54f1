"""Which job of a co-execution group works where: permits for phases. Pure. (RollMux, arXiv 2512.11306, section 4)

A phase needs all of its workers at once: the rollout of a job the nodes that it is pinned to, its training all training
nodes of the group. Requests queue at each worker in the order in which they came, and a phase begins when it is the
first at all of its workers.

    granted = permits.request(job, workers)    # each call returns the jobs whose phase may begin now
    granted = permits.release(job)             # or some of its workers early: release(job, workers)

A request joins all its queues at once, so no two phases wait for each other. A job asks for one phase at a time, so it
waits for at most one phase of each other job: the order is a round robin, and no job starves. The paper's theorem needs
that: without it, leaving a job out may use the workers better (tests/test_group.py has such a group).
"""

import heapq
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Worker = Hashable


class Permits:
    """Says which jobs may begin their phase. It knows no time and no process."""

    def __init__(self) -> None:
        self.queues: defaultdict[Worker, list[str]] = defaultdict(list)  # jobs; the first may work, or waits for others
        self.wanted: dict[str, set[Worker]] = {}  # by the phase of each job, until it gives them back
        self.begun: set[str] = set()  # jobs whose phase has all its workers

    def request(self, job: str, workers: Collection[Worker]) -> list[str]:
        """Queue for a phase's workers. Raises ValueError if the job is in a phase, or waits for another."""
        if job in self.wanted:
            raise ValueError(f"job {job} asks for a phase and {'is in' if job in self.begun else 'waits for'} another")
        self.wanted[job] = set(workers)
        for worker in workers:
            self.queues[worker].append(job)
        return self._grant([job])

    def release(self, job: str, workers: Collection[Worker] | None = None) -> list[str]:
        """Give some workers back, or all: the phase has ended, or the job has. A request that waits is withdrawn."""
        given = self.wanted.get(job, set()).intersection(self.wanted.get(job, ()) if workers is None else workers)
        for worker in given:
            self.queues[worker].remove(job)
            self.wanted[job].remove(worker)
        if not self.wanted.get(job):
            self.wanted.pop(job, None)
            self.begun.discard(job)
        return self._grant(self.queues[worker][0] for worker in given if self.queues[worker])

    def _grant(self, jobs: Iterable[str]) -> list[str]:
        granted = [
            job
            for job in dict.fromkeys(jobs)
            if job not in self.begun and all(self.queues[worker][0] == job for worker in self.wanted[job])
        ]
        self.begun.update(granted)
        return granted


# ---- a group at play, by the same permits ------------------------------------------------------------------------

PhaseName = Literal["rollout", "train"]


@dataclass(frozen=True)
class Member:
    """A job of a group: where its rollout runs, and how long its phases take there."""

    name: str
    rollout_nodes: frozenset[int]
    rollout: float  # seconds
    train: float  # seconds, on all training nodes of the group

    @property
    def alone(self) -> float:
        return self.rollout + self.train


@dataclass(frozen=True)
class Ran:
    """A phase that a job has run."""

    job: str
    phase: PhaseName
    start: float
    end: float


def play(members: Sequence[Member], iterations: int) -> list[Ran]:
    """Return all phases of a group until each job has run so many iterations, in the order in which they end.

    All jobs ask for a rollout at the start, in their order. A job that is done with its share goes on, so that the
    others are not measured in a group that has grown smaller.
    """
    permits, by_name = Permits(), {member.name: member for member in members}
    ends: list[tuple[float, int, Ran]] = []
    ran: list[Ran] = []
    done = dict.fromkeys(by_name, 0)
    phase: dict[str, PhaseName] = {}

    def begin(jobs: Iterable[str], now: float) -> None:
        for job in jobs:
            end = now + (by_name[job].rollout if phase[job] == "rollout" else by_name[job].train)
            heapq.heappush(ends, (end, len(ran) + len(ends), Ran(job, phase[job], now, end)))

    def ask(job: str, name: PhaseName, now: float) -> None:
        phase[job] = name
        begin(permits.request(job, by_name[job].rollout_nodes if name == "rollout" else ["train"]), now)

    for name in by_name:
        ask(name, "rollout", 0.0)
    while min(done.values()) < iterations:
        now, _, ended = heapq.heappop(ends)
        ran.append(ended)
        begin(permits.release(ended.job), now)
        done[ended.job] += ended.phase == "train"
        ask(ended.job, "train" if ended.phase == "rollout" else "rollout", now)
    return ran


def periods(members: Sequence[Member], iterations: int = 16) -> list[float]:
    """Return the members' seconds an iteration in the steady state: the mean over the second half of `iterations`."""
    ended: defaultdict[str, list[float]] = defaultdict(list)
    for phase in play(members, iterations):
        if phase.phase == "train":
            ended[phase.job].append(phase.end)
    first = {name: len(at) // 2 - 1 for name, at in ended.items()}
    return [(at[-1] - at[first[m.name]]) / (len(at) - 1 - first[m.name]) for m in members for at in [ended[m.name]]]


def least_periods(members: Sequence[Member]) -> list[float]:
    """Return seconds an iteration that no member can stay below.

    Jobs that share a rollout node iterate equally often: each other job queues for the training behind the first one,
    and so for its next rollout too.
    """
    least = []
    for member in members:
        sharing = [other for other in members if member.rollout_nodes & other.rollout_nodes]
        least.append(max(cycle(sharing), load(sharing)))
    return least


def most_periods(members: Sequence[Member]) -> list[float]:
    """Return seconds an iteration that no member can exceed: it waits for each other job's phase at most once."""
    trains = sum(member.train for member in members)
    return [
        trains + sum(other.rollout for other in members if member.rollout_nodes & other.rollout_nodes)
        for member in members
    ]


def cycle(members: Sequence[Member]) -> float:
    """Return T_cycle: seconds of the longest job alone, below which no period can be."""
    return max(member.alone for member in members)


def load(members: Sequence[Member]) -> float:
    """Return T_load: seconds of work of the busiest node, if each job iterates once."""
    rollouts: defaultdict[int, float] = defaultdict(float)
    for member in members:
        for node in member.rollout_nodes:
            rollouts[node] += member.rollout
    return max(sum(member.train for member in members), *rollouts.values())
