"""Run-ahead: a replica with nothing left to decode draws the next round's responses, for drafts only.

In a round that waits for its longest response most replicas run dry before the end. If nothing races in the next round
either, its prompts are known (`RoundPolicy.peek`), and so are the random streams of its responses. A dry replica draws
them with the weights of today, until all others have ended their window, and begins again in the next window. At the
round's end it stops. The texts are never samples: the next round draws with its own weights, and has them as drafts.
"""

from collections.abc import Callable, Sequence
from itertools import count
from time import perf_counter

import torch.distributed as dist

from core import RoundPlan, SampleId
from overlap.drafting import Drafting
from parallel import World
from policies.placement import Placement
from rollout import sequence_for
from rounds import Referee, Round

POLL_SECONDS = 0.002  # at least, between two questions to the store
made = count()  # of this process: several jobs may share a store


class Ahead:
    """What lasts from round to round: how many windows the replicas, of one rank each, have told."""

    def __init__(self, drafting: Drafting, world: World, peek: Callable[[], RoundPlan | None]):
        """`peek` returns the plan of the next round, if nothing races in it; on all ranks the same."""
        self.drafting, self.peek = drafting, peek
        self.store = dist.PrefixStore(f"ahead {next(made)}", world.store or dist.HashStore())
        self.told = 0

    def play(self, r: Round, plan: RoundPlan, referee: Referee) -> None:
        """Play a round in which nothing races, as `Round.play` does. Collective."""
        texts: dict[SampleId, Sequence[int]] | None = None  # of the next round; None: not begun
        r.begin(plan, referee)
        while not r.decision.done:
            if is_live := bool(r.placement.live[r.engine.parallel.replica]):
                r.play_window()
            else:
                r.tell([], None)
            self.told += r.placement.num_replicas
            self.store.add("told", 1)
            if is_live:
                continue
            if texts is None and any(r.placement.live) and self._others_decode():
                texts = self._launch(r)
            if texts is not None:
                self._draw(r, texts)
            r.hear()
        texts = {**(texts or {}), **r.engine.abort(texts or ())}
        for id, text in texts.items():
            self.drafting.old.put(id, text)
        self.drafting.policy.stats.ahead_tokens += sum(map(len, texts.values()))
        r.end()

    def _others_decode(self) -> bool:
        """Whether a replica has not told its window."""
        return self.store.add("told", 0) < self.told

    def _launch(self, r: Round) -> dict[SampleId, Sequence[int]]:
        """Queue the next round's responses: first those that this replica will decode. Return them without a text."""
        if not (plan := self.peek()):
            return {}
        config, own = r.engine.config, r.engine.parallel.replica
        visits = {visit.id: visit for visit in plan.prompts if not visit.prompt.env}
        limits = config.max_response_tokens, config.stop
        placed = [visit.id for visit in plan.prompts], plan.num_responses, plan.expected, r.config.placement == "spread"
        shares = Placement(r.placement.num_replicas).launch(*placed)
        ids = [id for share in (*shares[own:], *shares[:own]) for id in share if id.visit in visits]
        for id in ids:
            r.engine.add(sequence_for(visits[id.visit], id.response, r.seed, *limits))
        return dict.fromkeys(ids, ())

    def _draw(self, r: Round, texts: dict[SampleId, Sequence[int]]) -> None:
        """Draw until all replicas have told their window, or there is nothing left to draw."""
        accepted = r.engine.stats.accepted_tokens
        while not r.engine.is_idle and self._others_decode():
            start = now = perf_counter()
            while not r.engine.is_idle and now - start < POLL_SECONDS:
                texts |= {sample.id: sample.token_ids for sample in r.engine.step()}
                now = perf_counter()
            r.clock.add("ahead", start, now)
            r.rewards.update(r.graders.poll())
        self.drafting.policy.stats.ahead_accepted += r.engine.stats.accepted_tokens - accepted
