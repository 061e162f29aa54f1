"""Drafts in the rounds of a run: which rounds have some, and how texts of earlier rounds come to where they help.

A response that is aborted, or that ends in a round without its prompt, will be drawn again from the same random stream
(scheduler.py). Each replica keeps the texts that it has decoded; before a round with drafts all ranks tell which they
have of its prompts, and those that decode a sample next get its text. What a draft is, and how much of it is verified,
says policies/drafts.py.

Only rounds in which nothing races have drafts. A race counts engine steps: with drafts others would win it, and the
same run would train other samples each time. In an endless rollout which groups are trained always is such a race: it
has drafts where nobody asks for the same race each time (overlap.clock = time).
"""

import base64
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import parallel
from core import RoundPlan, Sample, SampleId, VisitId
from metrics import Record
from parallel import World
from policies.drafts import BINS, LAST_EPOCH, DraftPolicy, DraftsConfig, Known, Texts, Tokens
from policies.placement import Placement
from rollout import Engine
from rounds import Round
from scheduler import SchedulerConfig, races

TOKEN_BYTES = 4


class Drafting:
    """What lasts from round to round on one rank: the policy with what it has measured, and texts."""

    def __init__(self, config: DraftsConfig, engine: Engine, world: World, scheduler: SchedulerConfig):
        self.config, self.engine, self.world, self.scheduler = config, engine, world, scheduler
        self.policy = DraftPolicy(config.sources, config.most)
        kept = [name in config.sources for name in ("old", "epoch")]
        room = int(config.memory_mib * 2**20 / TOKEN_BYTES / world.size / max(sum(kept), 1))
        self.old, self.trained = (Texts(room * is_kept) for is_kept in kept)

    @contextmanager
    def __call__(self, played: Round, plan: RoundPlan) -> Iterator[None]:
        """Have drafts in a round, unless responses race in it; remember its texts afterwards. Collective."""
        if not self.config.sources:
            yield
            return
        is_evaluation = plan.prompts[0].epoch < 0
        try:
            if is_evaluation or not races(self.scheduler, plan.kind):
                with played.clock.span("drafts"):
                    tp, launched = self.engine.parallel, [visit.id for visit in plan.prompts]
                    args = plan.num_responses, plan.expected, self.scheduler.placement == "spread"
                    self._begin(launched, Placement(tp.num_replicas).launch(launched, *args)[tp.replica])  # as it will
                self.engine.drafter = self.policy
            yield
        finally:
            self.engine.drafter = None
        self._remember(played, is_evaluation)
        if is_evaluation:
            self.policy.take_stats()  # the next step counts from zero

    def go_on(self, played: Round) -> None:
        """Have drafts in an endless rollout, which has launched what it could, until `pause`. Collective."""
        if self.config.sources:
            is_alone = self.engine.parallel.size == 1  # else the replica's first rank has the samples, others have none
            ended = {id: sample.token_ids for id, sample in played.samples.items()} if is_alone else {}
            with played.clock.span("drafts"):
                self._begin(played.prompts, self.engine.batcher.live_tokens(), ended)
            self.engine.drafter = self.policy

    def pause(self, trained: Iterable[Sample]) -> None:
        """Have none until `go_on`; remember the texts that are trained."""
        self.engine.drafter = None
        for sample in trained:
            self.trained.put(sample.id._replace(epoch=LAST_EPOCH), sample.token_ids)

    def _begin(
        self,
        launched: Iterable[VisitId],
        own: Iterable[SampleId],
        ended: Mapping[SampleId, Sequence[int]] | None = None,
    ) -> None:
        """Give the policy what all ranks know and the texts that help `own`, the samples of this rank. Collective.

        `launched`: the prompts of all ranks. `ended`: responses to these that this rank has drawn before.
        """
        tp, visits = self.engine.parallel, {*launched}
        held = {id: _sample(id, text) for id, text in self.old.texts.items() if id.visit in visits}
        prompts = {id.prompt for id in visits if id.epoch >= 0}  # an evaluation's are others
        held |= {id: _sample(id, text) for id, text in self.trained.texts.items() if id.prompt in prompts}
        headers = [parallel.header_of(sample, self.world.rank) for sample in held.values()]
        everyone = parallel.gather_objects(self.world, (self.policy.tell(), headers))
        self.policy.agree(everyone[self.world.rank - tp.rank][0], is_alone=tp.size == 1)
        told = [(sample, rank) for rank, (_, part) in enumerate(everyone) for sample in part]
        told.sort(key=lambda item: len(item[0].token_ids))  # of two ranks that stopped a sample, the longer text counts
        ids = {*own}
        prompts = {id.prompt for id in ids}
        wanted = {
            sample.id: held[sample.id] if rank == self.world.rank else sample
            for sample, rank in told
            if sample.id in ids or (sample.epoch == LAST_EPOCH and sample.prompt_index in prompts)
        }
        brought = parallel.bring_tokens(self.world, [*wanted.values()], held.values())
        texts = {sample.id: array("i", sample.token_ids) for sample in brought}
        old = {id: text for id, text in texts.items() if id in ids}
        self.policy.begin(old, {id: text for id, text in texts.items() if id not in ids}, ended or {})
        self.policy.stats.brought_tokens += sum(len(text) for id, text in texts.items() if id not in held)

    def _remember(self, played: Round, is_evaluation: bool) -> None:
        """Keep the texts of a round that may come again, on the rank that has decoded them."""
        accepted = set(played.referee.accepted_ids())
        visits = {id.visit for id in accepted}
        for id in [id for id in self.old.texts if id.visit in visits]:
            self.old.forget(id)
        texts = played.dropped | {id: sample.token_ids for id, sample in played.samples.items()}
        for id, text in texts.items():
            if id in accepted and not is_evaluation:
                self.trained.put(id._replace(epoch=LAST_EPOCH), text)
            elif id in accepted or id.visit not in visits:
                self.old.put(id, text)

    def state_dict(self) -> Record:
        """Return plain values: texts, oldest first, and what the policy has measured. Collective."""
        own = [
            [(id, base64.b85encode(text).decode()) for id, text in kept.texts.items()]
            for kept in (self.old, self.trained)
        ]
        everyone = parallel.gather_objects(self.world, own)
        texts = [[text for part in kind for text in part] for kind in zip(*everyone, strict=True)]
        return {"sources": self.config.sources, "known": self.policy.tell(), "texts": texts}

    def load_state_dict(self, state: Record) -> None:
        """Go on from there; texts are dealt to the ranks, however many there are now."""
        known = state["known"]  # else by older code: it is measured anew
        is_known = len(known) == len(Known._fields) and all(len(rates) == len(BINS) for rates in known[0])
        if is_known and state["sources"] == list(self.config.sources):
            self.policy.agree(Known(*state["known"]), is_alone=True)
        for kept, texts in zip((self.old, self.trained), state["texts"], strict=True):
            for id, text in texts[self.world.rank :: self.world.size]:
                kept.put(SampleId(*id), array("i", base64.b85decode(text)))


def _sample(id: SampleId, text: Tokens) -> Sample:
    """Return a text as a sample: only these travel (parallel.py), with log-probs, which nobody reads here."""
    return Sample(id.prompt, id.response, id.epoch, text, array("f", bytes(4 * len(text))), "", ())
