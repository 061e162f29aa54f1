"""Rounds that begin and end on a part of the ranks: others have the rest meanwhile. (RollMux, section 5)

    rank 0    first job ........................ its tail ..|.. second job .........
    rank 1    first job ..............|.. second job ...............................

With `group.tail_share` a rollout has a permit for each replica. It begins with the first, which gets all responses; a
replica that comes later takes over its share. Once so many of the responses that the round needs have ended, most rows
are empty. If another job could begin on the last replicas, the rest moves to the first ones that have room for it
(`policies.placement.tail_replicas`), and the ranks of the others leave the device. Sequences go on token by token the
same. Ranks that have left, or not come, hear of each window with nothing to decode: what they have decoded before is
graded and collected there.

A round in which responses race has all its ranks from its beginning to its end: with fewer rows, or contexts that are
computed again, others would be first. It has no tail either: the race leaves that out.
"""

from core import RoundPlan
from engine.memory import cache_of
from overlap.phases import Phases
from policies.placement import Placement, frees, tail_replicas
from rollout import Engine
from rounds import Referee, Round
from scheduler import SchedulerConfig, races


def part_of(plan: RoundPlan | None, config: SchedulerConfig, size: int) -> int:
    """Return the ranks that can begin a round without the others: a replica's `size`; 0: all begin together."""
    return size if plan and not races(config, plan.kind) else 0


class PartialRound:
    """A round whose replicas come and go. All ranks of the pool play it, with a device or without."""

    def __init__(self, played: Round, phases: Phases):
        self.round, self.phases, self.has_shrunk = played, phases, False
        self.coming = self._replicas(phases.ranks)  # they have their state, and join after the next window
        played.placement = Placement(0)
        self._join()

    def play(self, plan: RoundPlan, referee: Referee) -> None:
        """Play the round as `Round.play` does. Collective."""
        r, ended, enough = self.round, 0, self.phases.config.tail_share * plan.keep_prompts * plan.keep_responses
        r.begin(plan, referee)
        while not r.decision.done:
            events = r.decode(may_leave=not self.has_shrunk, feeds=self.has_shrunk)
            finished, [(ranks, awaited), *_] = r.exchange(events, self.phases.news())
            ended += len(finished)
            if self.has_shrunk or r.decision.done:
                continue
            if ended >= enough:
                self._shrink(awaited)
            if not self.has_shrunk:
                self._join()
                self.coming = [new for new in self._replicas(ranks) if new not in r.placement.replicas]
            if self.coming:
                self.phases.come(ranks)
        r.end()

    def _replicas(self, ranks: list[int]) -> list[int]:
        """Return the replicas of these ranks of the pool."""
        return [*dict.fromkeys(rank // self.phases.part for rank in ranks)]

    def _join(self) -> None:
        """Have replicas that have come take their share of all sequences over. Collective."""
        for replica in self.coming:
            self.round.placement.join(replica)
        if self.coming:
            self.round.hand_over(self.round.placement.handovers())
        self.coming = []

    def _shrink(self, awaited: list[list[int]]) -> None:
        """Go on with few replicas if another job can use the ranks of the others. Collective."""
        placement, part = self.round.placement, self.phases.part
        count = tail_replicas(placement.num_live, room_of(self.round.engine), placement.num_replicas)
        kept = {replica * part + i for replica in placement.replicas[:count] for i in range(part)}
        if not frees(kept, awaited):
            return
        self.round.hand_over(placement.shrink(count))
        self.phases.leave([rank for rank in range(self.phases.own.size) if rank not in kept])
        self.has_shrunk, self.coming = True, []


def room_of(engine: Engine) -> int:
    """Return how many sequences of a replica have rows and pages to their end, however long they get."""
    longest = cache_of(engine.config, engine.model.shape, engine.model.dtype).pages_of_longest
    return min(engine.config.max_running, engine.num_pages[engine.parallel.size] // longest)
