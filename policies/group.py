"""Which job of a co-execution group works where: permits for phases. Pure. (RollMux, arXiv 2512.11306, section 4)

A phase asks for all of its workers at once: the rollout of a job for the nodes that it is pinned to, its training for
all training nodes of the group. Requests queue at each worker in the order in which they came. A part of the workers,
such as a replica of a rollout, is granted when the job is the first at all workers of the part; a training is one part.

    granted = permits.request(job, [workers])    # each call returns the parts that are granted now
    granted = permits.release(job)               # or some of its workers early: release(job, workers)

A request joins all its queues at once, and what has some parts can go on to its end without the others, so no two
phases wait for each other. A job asks for one phase at a time, so it waits for at most one phase of each other job: the
order is a round robin, and no job starves. The paper's theorem needs that: without it, leaving a job out may use the
workers better (tests/test_group.py has such a group).
"""

import heapq
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Worker = Hashable
Part = tuple[Worker, ...]  # workers that are of use only together


class Permits:
    """Says which jobs may begin their phase, or go on with more workers. It knows no time and no process."""

    def __init__(self) -> None:
        self.queues: defaultdict[Worker, list[str]] = defaultdict(list)  # jobs; the first may work, or waits for others
        self.parts: dict[str, list[Part]] = {}  # by the phase of each job, until it gives them back
        self.granted: dict[str, set[Worker]] = {}  # by the jobs that have some

    def request(self, job: str, parts: Iterable[Iterable[Worker]]) -> list[tuple[str, Part]]:
        """Queue for all workers of a phase. Raises ValueError if the job is in a phase, or waits for another."""
        if job in self.parts:
            raise ValueError(
                f"job {job} asks for a phase and {'is in' if job in self.granted else 'waits for'} another"
            )
        self.parts[job] = [*map(tuple, parts)]
        for part in self.parts[job]:
            for worker in part:
                self.queues[worker].append(job)
        return self._grant([job])

    def release(self, job: str, workers: Collection[Worker] | None = None) -> list[tuple[str, Part]]:
        """Give some workers back, or all: the phase has ended, or the job has. What it waits for is withdrawn."""
        parts = self.parts.pop(job, [])
        given = [worker for part in parts for worker in part if workers is None or worker in workers]
        for worker in given:
            self.queues[worker].remove(job)
        if left := [kept for part in parts if (kept := tuple(worker for worker in part if worker not in given))]:
            self.parts[job] = left
        if held := self.granted.pop(job, set()).difference(given):
            self.granted[job] = held
        return self._grant([job, *(self.queues[worker][0] for worker in given if self.queues[worker])])

    def awaited(self, job: str) -> list[Part]:
        """Return sets of a job's workers: if it gave one back, some other job would have a part more at once."""
        found = []
        for other, part in ((other, part) for other, parts in self.parts.items() if other != job for part in parts):
            held = tuple(worker for worker in part if self.queues[worker][0] == job)
            if held and all(self.queues[worker][worker in held] == other for worker in part):
                found.append(held)
        return found

    def _grant(self, jobs: Iterable[str]) -> list[tuple[str, Part]]:
        granted = [
            (job, part)
            for job in dict.fromkeys(jobs)
            for part in self.parts.get(job, ())
            if part[0] not in self.granted.get(job, ()) and all(self.queues[worker][0] == job for worker in part)
        ]
        for job, part in granted:
            self.granted.setdefault(job, set()).update(part)
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


class Ran(NamedTuple):
    """A phase that a job has run."""

    job: str
    phase: PhaseName
    start: float
    end: float


class Play:
    """A group at play, for ever: `step` returns the next phase that ends.

    All jobs ask for a rollout at the start, in their order, and go on after any number of iterations. `seconds` may
    draw what a phase takes each time that it begins.
    """

    def __init__(self, members: Sequence[Member], seconds: Callable[[Member, PhaseName], float] = getattr):
        self.permits, self.seconds = Permits(), seconds
        self.members = {member.name: member for member in members}
        self.now = 0.0
        self.phase: dict[str, PhaseName] = {}
        self.ends: list[tuple[float, int, Ran]] = []  # of the phases that run, a heap; of equal ones the first to begin
        self.begun = 0
        for name in self.members:
            self._ask(name, "rollout")

    def step(self) -> Ran:
        self.now, _, ended = heapq.heappop(self.ends)
        self._begin(self.permits.release(ended.job))
        self._ask(ended.job, "train" if ended.phase == "rollout" else "rollout")
        return ended

    def state(self) -> Hashable:
        """Return everything that decides what follows, if phases take the same seconds each time."""
        left = sorted((ran.job, ran.phase, round(end - self.now, 6)) for end, _, ran in self.ends)
        return (*left, *map(tuple, self.permits.queues.values()))

    def _ask(self, job: str, phase: PhaseName) -> None:
        self.phase[job] = phase
        nodes = self.members[job].rollout_nodes if phase == "rollout" else ("train",)
        self._begin(self.permits.request(job, [nodes]))

    def _begin(self, granted: Iterable[tuple[str, Part]]) -> None:
        for job, _ in granted:
            phase, self.begun = self.phase[job], self.begun + 1
            end = self.now + self.seconds(self.members[job], phase)
            heapq.heappush(self.ends, (end, self.begun, Ran(job, phase, self.now, end)))


def play(
    members: Sequence[Member], iterations: int, seconds: Callable[[Member, PhaseName], float] = getattr
) -> list[Ran]:
    """Return all phases of a group until each job has run so many iterations, in the order in which they end.

    A job that is done with its share goes on, so that the others are not measured in a group that has grown smaller.
    """
    playing, ran, done = Play(members, seconds), list[Ran](), dict.fromkeys((member.name for member in members), 0)
    while min(done.values()) < iterations:
        ran.append(playing.step())
        done[ran[-1].job] += ran[-1].phase == "train"
    return ran


def periods(members: Sequence[Member], iterations: int = 64) -> list[float]:
    """Return the members' seconds an iteration in the steady state.

    They are exact if the group comes back to a state within so many iterations of its longest job, which it does soon,
    since whoever waits falls into step with whom it waits for. Otherwise they are the mean over the second half.
    """
    if len({member.rollout_nodes for member in members}) == 1:  # then no job overtakes another, on either kind of node
        return [max(cycle(members), load(members))] * len(members)
    playing, done = Play(members), dict.fromkeys((member.name for member in members), 0)
    longest = max(members, key=lambda member: member.alone).name
    marks: dict[Hashable, tuple[float, list[int]]] = {}
    while done[longest] < iterations:
        ran = playing.step()
        done[ran.job] += ran.phase == "train"
        if ran.job == longest and ran.phase == "train":
            if (state := playing.state()) in marks:
                break
            marks[state] = playing.now, [*done.values()]
    else:
        state = [*marks][iterations // 2 - 1]
    since, before = marks[state]
    return [(playing.now - since) / (now - then) for now, then in zip(done.values(), before, strict=True)]


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
    """Return seconds an iteration that no member can exceed: it waits for each other job's phase at most once.

    So it does for a rollout with which it shares no node, where one that is queued before it waits for that.
    """
    trains = sum(member.train for member in members)
    return [trains + sum(other.rollout for other in _linked(member, members)) for member in members]


def _linked(member: Member, members: Sequence[Member]) -> list[Member]:
    """Return the jobs whose rollouts may hold up that of `member`, itself too: by nodes that they share, in chains."""
    nodes, count = member.rollout_nodes, 0
    while len(nodes) > count:
        count = len(nodes)
        nodes = nodes.union(*(other.rollout_nodes for other in members if other.rollout_nodes & nodes))
    return [other for other in members if other.rollout_nodes & nodes]


def cycle(members: Sequence[Member]) -> float:
    """Return T_cycle: seconds of the longest job alone, below which no period can be."""
    return max(member.alone for member in members)


def load(members: Sequence[Member]) -> float:
    """Return T_load: seconds of work of the busiest node, if each job iterates once."""
    rollouts: defaultdict[int, float] = defaultdict(float)
    for member in members:
        for node in member.rollout_nodes:
            rollouts[node] += member.rollout
    return max([sum(member.train for member in members), *rollouts.values()])
