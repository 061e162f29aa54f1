"""Stream training: half of the replicas leave a long round and train what is complete. (RollPacker, section 4.4)

`StreamedRound` plays the windows of a round, as `Round.play` does, and after each asks the policy
(policies/scale_down.py): every rank asks its own copy, fed with what all ranks report. When it scales down, the first
replicas take over all sequences and all samples of groups that are not complete. The other ranks train: each fills its
copy of the buffer with complete groups, which the first replicas keep sending, and adds up gradient sums, batch by
batch. When the rollout ends, the copies agree on what was trained, and `learning.learn` trains the rest on all ranks:
one reduction, one division, one update.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

import parallel
from buffer import Batch, SampleBuffer
from core import Finished, Reward, RoundPlan, Sample, SampleId, VisitId
from learning import advantages_of, examples_of
from metrics import Record
from parallel import World
from policies.scale_down import Progress, ScaleDown, StreamConfig, StreamPolicy, replicas_together
from policies.step_times import FittedTimes
from reward import RewardConfig
from rollout import Engine
from rounds import Referee, Round
from trainer import Trainer

POLL_SECONDS = 0.01  # between two looks for samples and for the end of the rollout
GRADING_SECONDS = 0.05  # between two looks for grades, once nothing is decoded any more
Held = dict[SampleId, tuple[Sample, Reward | None]]  # finished samples of a rank; None: not graded yet


@dataclass(frozen=True, slots=True)
class WindowReport:
    """What a rank tells all others after a window."""

    graded: dict[SampleId, float]  # shaped rewards that are new
    live: tuple[int, ...]  # response tokens so far of each sequence in its engine
    context: int  # tokens that its pages can hold, as far as they are in use
    step: tuple[float, float, float] | None  # a decode step: sequences, tokens of their context, seconds
    trained: tuple[float, int]  # seconds and tokens of its gradients since its last report


@dataclass(slots=True)
class ScaleDownCost:
    """Costs and gains of a scale-down on one rank."""

    tokens: int = 0  # trained
    train_seconds: float = 0.0
    wait_seconds: float = 0.0
    rest_seconds: float = 0.0  # from the decision to the end of the rollout
    switch_seconds: float = 0.0  # of the move, and of computing again what was moved
    peak_tokens: int = 0  # in the pages of all that went on decoding


class StreamTraining:
    """What lasts from round to round: the policy, what it knows of the machine, and all groups. Collective to make."""

    def __init__(
        self,
        config: StreamConfig,
        reward: RewardConfig,
        engine: Engine,
        trainer: Trainer,
        world: World,
        sizes: Iterable[int],
    ):
        self.reward, self.engine, self.trainer, self.world = reward, engine, trainer, world
        kept = sorted({world.size // n // 2 * n for n in sizes} - {0})  # ranks that may go on decoding
        decoding = parallel.subsets(world, [range(n) for n in kept], by_gloo=True)  # they exchange events only
        self.decoding = dict(zip(kept, decoding, strict=True))
        self.stream = parallel.SampleStream(world)
        page = engine.config.page_size
        self.times = {n: FittedTimes(pages * page) for n, pages in engine.num_pages.items()}
        self.rate = 0.0  # seconds in which one rank trains a token; 0: unknown
        limit = engine.config.max_response_tokens
        self.policy = StreamPolicy(config, self.times[engine.parallel.size], limit, switch=0.0)

    def begin(self, plan: RoundPlan, buffer: SampleBuffer) -> "StreamedRound | None":
        """Be ready for a round that ranks may leave: one that waits for every response. None for any other."""
        size = self.engine.parallel.size
        self.policy.times = self.times[size]
        self.policy.shard_replicas = replicas_together(self.trainer.config.shard, size)
        return StreamedRound(self, plan, buffer) if self.policy.begin(plan.kind) else None

    def state_dict(self) -> Record:
        times = [(n, list(known.windows)) for n, known in self.times.items()]
        return {"policy": self.policy.state_dict(), "times": times, "rate": self.rate}

    def load_state_dict(self, state: Record) -> None:
        self.policy.load_state_dict(state["policy"])
        self.times |= {n: FittedTimes(self.times[n].capacity, w) for n, w in state["times"] if n in self.times}
        self.rate = state["rate"]


class StreamedRound:
    """A round that ranks may leave to train. Afterwards `record` has what was trained, projected and measured."""

    def __init__(self, run: StreamTraining, plan: RoundPlan, buffer: SampleBuffer):
        assert plan.num_responses == plan.keep_responses and len(plan.prompts) == plan.keep_prompts
        self.run, self.plan, self.buffer, self.policy, self.world = run, plan, buffer, run.policy, run.world
        self.prompts = {visit.id: visit.prompt for visit in plan.prompts}
        self.prompt_tokens = sum(len(p.token_ids) for p in self.prompts.values()) // len(self.prompts)
        self.lengths: dict[SampleId, int] = {}  # tokens of every response that has ended
        self.rewards: dict[SampleId, float] = {}  # shaped, of those that are graded
        self.missing = dict.fromkeys(self.prompts, plan.num_responses)  # responses without a reward
        self.decision: ScaleDown | None = None
        self.missed: list[Sequence[Finished]] = []  # by those who have left, window by window
        self.sent: dict[int, int] = {}  # tokens, to each rank that this one feeds
        self.outcome = ScaleDownCost()
        self.record: Record = {"samples": 0}

    def play(self, r: Round, referee: Referee) -> None:
        """Play the round to its end, on the ranks that do not leave it. Collective."""
        self.round = r
        r.begin(self.plan, referee)
        leaves = False
        while not (leaves or r.decision.done):
            events = r.decode(may_leave=not self.policy.is_done, feeds=self.decision is not None)
            finished, reports = r.exchange(events, self._report())
            leaves = self._observe(finished, reports, is_last=r.decision.done)
        if leaves:
            self._train()
        else:
            self._end()
        if self.decision:
            self._reunite(self.decision, left=leaves)
        self.policy.close([self.lengths[id] for id in sorted(self.lengths)])

    # ---- after each window -----------------------------------------------------------------------------------

    def _report(self) -> WindowReport:
        r, engine = self.round, self.round.engine
        context = engine.pages.used * engine.config.page_size
        steps, drawn, seconds = r.take_decode_times()
        step = (drawn / steps, context, seconds / steps) if steps and drawn else None
        graded = {id: r.shaped(id) for id in r.rewards if id not in self.rewards and id in r.samples}
        live = tuple(n for _, n in sorted(engine.batcher.live_tokens().items())) if r.is_first else ()
        return WindowReport(graded, live, context if r.is_first else 0, step, self.run.trainer.take_times())

    def _observe(self, finished: Sequence[Finished], reports: Sequence[WindowReport], is_last: bool) -> bool:
        """Take in what all ranks report; return whether this one leaves the round. Collective when they scale down."""
        self.lengths.update({event.id: event.num_tokens for event in finished})
        complete = self._note_rewards(item for report in reports for item in report.graded.items())
        if steps := [report.step for report in reports if report.step]:
            slowest = max(steps, key=lambda step: step[-1])  # all wait for it
            self.run.times[self.run.engine.parallel.size].observe(*slowest)
        if tokens := sum(report.trained[1] for report in reports):
            self.run.rate = sum(report.trained[0] for report in reports) / tokens
        if self.decision:
            self.missed.append(finished)
            self.outcome.peak_tokens = max(self.outcome.peak_tokens, sum(report.context for report in reports))
            self._put(complete, self.round.samples)
            if not is_last:
                self._send()
        elif not is_last:
            self.decision = self.policy.observe(self._progress([n for report in reports for n in report.live]))
            return self.decision is not None and self._scale_down(self.decision)
        return False

    def _note_rewards(self, graded: Iterable[tuple[SampleId, float]]) -> list[VisitId]:
        """Note new rewards; return the groups that they make complete."""
        complete = []
        for id, reward in sorted(graded):
            if id not in self.rewards:
                self.rewards[id] = reward
                self.missing[id.visit] -= 1
                complete += [] if self.missing[id.visit] else [id.visit]
        return complete

    def _progress(self, live: Sequence[int]) -> Progress:
        total, ended = self.plan.keep_prompts * self.plan.keep_responses, self.lengths.values()
        replicas, token_seconds = self.run.engine.parallel.num_replicas, self.run.rate / self.world.size
        return Progress(total, ended, live, self.prompt_tokens, replicas, token_seconds)

    def _put(self, visits: Iterable[VisitId], samples: Mapping[SampleId, Sample]) -> None:
        """Put complete groups into the buffer, as far as their samples are here."""
        loss = self.run.trainer.loss
        for visit in visits:
            prompt, ids = self.prompts[visit], [visit.sample(i) for i in range(self.plan.num_responses)]
            rewards = [[self.rewards[id] for id in ids]]
            [advantages] = advantages_of(rewards, [prompt.task], loss, self.run.reward).tolist()
            here = [i for i, id in enumerate(ids) if id in samples]
            own = [samples[ids[i]] for i in here], [advantages[i] for i in here]
            self.buffer.put(visit, examples_of(prompt, *own, loss.mask_truncated))

    # ---- the scale-down --------------------------------------------------------------------------------------

    def _scale_down(self, decision: ScaleDown) -> bool:
        """Move what the last replicas have to the first ones; return whether this rank is free now. Collective."""
        r, replicas, size = self.round, decision.replicas, self.round.engine.parallel.size
        self.decided, self.prefilled = time.perf_counter(), r.prefill_seconds
        first_freed = replicas * size
        leaves = self.world.rank >= first_freed
        r.hand_over(r.placement.shrink(replicas))
        held = {id: s for id, s in r.samples.items() if leaves or not self.missing[id.visit]}
        told = {id: (parallel.header_of(s, self.world.rank), r.rewards.get(id)) for id, s in held.items()}
        with r.clock.span("hand_over"):
            everyone = parallel.gather_objects(self.world, told)
        if leaves:
            self._leave(everyone, held.values(), first_freed)
            self.run.stream.open_from((self.world.rank - first_freed) % replicas * size)
        else:
            self._take_over(everyone[first_freed::size], held.values(), replicas)
            decoding = self.run.decoding[first_freed]
            assert decoding, "this rank goes on decoding"
            r.world = decoding
            freed = range(first_freed, self.world.size)
            fed = [rank for rank in freed if (rank - first_freed) % replicas * size == self.world.rank]
            self.sent = dict.fromkeys(fed, 0)
            self.run.stream.open_to(fed)
        self.outcome.switch_seconds = time.perf_counter() - self.decided
        return leaves

    def _leave(self, everyone: Sequence[Held], held: Iterable[Sample], first_freed: int) -> None:
        """Keep one's share of the groups that are complete, forget the rest.

        Collective with `_take_over` of those who stay: `held` has the samples of this rank that others may want.
        """
        r, complete = self.round, [visit for visit, count in self.missing.items() if not count]
        self._put(complete, {id: sample for held in everyone for id, (sample, _) in held.items()})
        [shares] = self.buffer.deal(self.world.size - first_freed)  # on each freed rank the same
        self._put_share(parallel.bring_tokens(self.world, shares[self.world.rank - first_freed], held))
        r.samples = {id: sample for id, sample in r.samples.items() if not self.missing[id.visit]}
        r.graders.forget(keep=())
        r.graders.drain()

    def _take_over(self, left: Sequence[Held], held: Iterable[Sample], replicas: int) -> None:
        """Have the finished samples of those who leave; what they have not graded is graded here, from the start.

        Collective with `_leave`.
        """
        r = self.round
        mine = left[r.engine.parallel.replica :: replicas] if r.is_first else ()
        known = [row for part in mine for id, row in part.items() if self.missing[id.visit]]
        samples = parallel.bring_tokens(self.world, [sample for sample, _ in known], held)
        for sample, (_, reward) in zip(samples, known, strict=True):
            r.samples[sample.id] = sample
            if reward:
                r.rewards[sample.id] = reward
            else:
                r.grade(sample)

    # ---- on the ranks that go on decoding --------------------------------------------------------------------

    def _send(self) -> None:
        """Deal what waits to the ranks that have room for it: nothing, too, tells them that the rollout goes on."""
        stream = self.run.stream
        targets = [rank for rank in self.sent if stream.has_room(rank)]
        if not targets:
            return
        [shares] = self.buffer.deal(len(targets), held=[self.sent[rank] for rank in targets])
        for target, share in zip(targets, shares, strict=True):
            stream.send(target, share)
            self.sent[target] += sum(example.num_tokens for example in share)

    def _end(self) -> None:
        """Wait for all grades, then tell those who train that the rollout is over."""
        if self.decision:
            self._grade_the_rest()
        self.round.end()
        if self.decision:
            self.run.stream.close()
            self.outcome.switch_seconds += self.round.prefill_seconds - self.prefilled

    def _grade_the_rest(self) -> None:
        """Wait for grades in windows without steps, so that those who train get the groups that become complete."""
        r, waits = self.round, True
        with r.clock.span("reward"):
            while waits:
                r.rewards.update(r.graders.poll())
                own = self._report(), r.graders.num_pending
                reports, pending = zip(*parallel.gather_objects(r.world, own), strict=True)
                waits = any(pending)
                self._observe((), reports, is_last=not waits)
                if waits:
                    time.sleep(GRADING_SECONDS)

    # ---- on the ranks that train -----------------------------------------------------------------------------

    def _train(self) -> None:
        """Add up gradients of what waits and of what arrives until the rollout ends. Collective in a shard group."""
        stream, trainer, outcome = self.run.stream, self.run.trainer, self.outcome
        while True:
            start = time.perf_counter()
            for share in stream.take(0.0 if len(self.buffer) else POLL_SECONDS):
                self._put_share(share)
            is_over, has_some = parallel.any_up(trainer.shards, stream.is_over, len(self.buffer) > 0)
            if is_over:
                break
            if has_some:
                self._train_batch()
                outcome.train_seconds += time.perf_counter() - start
            else:
                outcome.wait_seconds += time.perf_counter() - start
            # Waiting is no progress, or the watchdog would never speak.
            stage = "stream_train" if has_some else "stream_wait"
            self.round.clock.add(stage, start, time.perf_counter(), moves=has_some)
        stream.close()

    def _put_share(self, share: Batch) -> None:
        for example in share:
            self.buffer.put(example.id.visit, [example])

    def _train_batch(self) -> None:
        trainer = self.run.trainer
        batch = self.buffer.take(trainer.config.tokens_per_microbatch)
        trainer.accumulate(batch)
        self.outcome.tokens += sum(example.num_tokens for example in batch)

    # ---- afterwards ------------------------------------------------------------------------------------------

    def _reunite(self, decision: ScaleDown, left: bool) -> None:
        """Bring all ranks together again, and those that left up to date. Collective."""
        self.outcome.rest_seconds = time.perf_counter() - self.decided
        run, r, size = self.run, self.round, self.run.engine.parallel.size
        r.world = self.world
        own = self.missed, list(run.times[size].windows), run.rate, self.outcome, self.buffer.taken
        missed, windows, rates, outcomes, taken = zip(*parallel.gather_objects(self.world, own), strict=True)
        self.buffer.agree(taken)
        # Those who left have missed windows, and all must project the same from now on.
        run.times[size], run.rate = FittedTimes(run.times[size].capacity, windows[0]), rates[0]
        for finished in missed[0] if left else ():
            r.referee.observe(finished, {})
            self.lengths.update({event.id: event.num_tokens for event in finished})
        assert self.buffer.taken <= self.lengths.keys(), "a sample was trained that the round does not have"
        first_freed = decision.replicas * size
        decoding, freed = outcomes[:first_freed], outcomes[first_freed:]
        self.policy.switch = max(o.switch_seconds for o in decoding)
        train_seconds = sum(o.train_seconds for o in freed)
        self.record = {
            "samples": len(self.buffer.taken),
            "tokens": sum(o.tokens for o in freed),
            "train_seconds": train_seconds / len(freed),
            "wait_seconds": sum(o.wait_seconds for o in freed) / len(freed),
            "switch_seconds": self.policy.switch,
            "projected": asdict(decision),
            "true": {
                "peak_tokens": decoding[0].peak_tokens,
                "rest_seconds": max(o.rest_seconds for o in decoding),
                "trained_seconds": train_seconds / self.world.size,  # of a step in which all ranks train
            },
        }
