"""Tail migration: the last responses of a round go on together, and other jobs have the ranks that are free. (RollMux)

Once `group.tail_share` of the responses that a round needs are there, most rows are empty. Then the rest moves to the
first replicas that have room for it (`policies.placement.tail_replicas`), token by token the same. The ranks of the
other replicas leave the device and give back their part of the permit. They still hear of each window, with nothing to
decode: what they have decoded before is graded and collected there. (RollMux, section 5)
"""

from core import RoundPlan
from engine.memory import cache_of
from overlap.phases import Phases
from policies.placement import tail_replicas
from rollout import Engine
from rounds import Referee, Round


def play_with_tail(r: Round, plan: RoundPlan, referee: Referee, phases: Phases) -> None:
    """Play a round as `Round.play` does, its tail on few replicas. Collective."""
    r.begin(plan, referee)
    needed, ended, has_moved = plan.keep_prompts * plan.keep_responses, 0, False
    while not r.decision.done:
        finished, _ = r.exchange(r.decode(feeds=has_moved, lands=not has_moved), None)
        ended += len(finished)
        if has_moved or r.decision.done or ended < phases.config.tail_share * needed:
            continue
        count = tail_replicas(r.placement.num_live, room_of(r.engine), r.placement.num_replicas)
        if count < r.placement.num_replicas:
            r.hand_over(r.placement.shrink(count))
            phases.leave(count * r.engine.parallel.size)
            has_moved = True
    r.end()


def room_of(engine: Engine) -> int:
    """Return how many sequences of a replica have rows and pages to their end, however long they get."""
    longest = cache_of(engine.config, engine.model.shape, engine.model.dtype).pages_of_longest
    return min(engine.config.max_running, engine.pages.size // longest)
