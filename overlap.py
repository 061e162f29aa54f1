"""Stream training: half of the replicas leave a long round and train what is complete. (RollPacker, section 4.4)

Every rank runs the same lines and feeds its copy of the policy (policies/overlap.py) with what all ranks exchange
after a window. When it scales down, the first replicas take over all sequences and the samples that are not ready to
train; the ranks of the others add up gradient sums of complete, graded groups, which the first ones keep sending,
until the rollout ends. What is left is learnt by all ranks as ever, in `learning.learn`: one reduction, one division,
one update.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import parallel
from core import Example, Finished, Group, Reward, RoundPlan, Sample, SampleId, VisitId
from learning import advantages_of, examples_of
from parallel import World
from policies.overlap import DecodeTimes, Progress, ScaleDown, StreamConfig, StreamPolicy, replicas_together
from policies.placement import assign_by_load
from reward import RewardConfig
from rollout import Engine
from rounds import Round
from trainer import Trainer

POLL_SECONDS = 0.01  # between two looks for samples and for the end of the rollout


@dataclass(frozen=True, slots=True)
class Told:
    """What a rank tells all others after a window."""

    graded: dict[SampleId, float]  # shaped rewards that are new
    live: tuple[int, ...]  # response tokens so far of each sequence in its engine
    context: int  # tokens that its pages can hold, as far as they are in use
    window: tuple[float, float, float] | None  # sequences that decoded together, their context, seconds of a step
    trained: tuple[float, int]  # seconds and tokens of its gradients since it last told


@dataclass(slots=True)
class Came:
    """What came of a scale-down on one rank."""

    trained: set[SampleId]
    tokens: int
    train_seconds: float
    wait_seconds: float
    rest_seconds: float  # from the decision to the end of the rollout
    switch_seconds: float  # of the move, and of computing again what was moved
    peak_tokens: int  # in the pages of all that went on decoding


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
        self.decoding = dict(zip(kept, parallel.subsets(world, [range(n) for n in kept]), strict=True))
        self.stream = parallel.SampleStream(world, world.timeout_seconds)
        page = engine.config.page_size
        self.times = {n: DecodeTimes(pages * page) for n, pages in engine.num_pages.items()}
        self.rate = 0.0  # seconds in which one rank trains a token; 0: unknown
        limit = engine.config.max_response_tokens
        self.policy = StreamPolicy(config, self.times[engine.parallel.size], limit, switch=0.0)

    def begin(self, plan: RoundPlan) -> "StreamedRound | None":
        """Be ready for a round that ranks may leave: one that waits for every response. None for any other."""
        size = self.engine.parallel.size
        self.policy.profile = self.times[size]
        self.policy.shard_replicas = replicas_together(self.trainer.config.shard, size)
        return StreamedRound(self, plan) if self.policy.begin(plan.kind) else None

    def state_dict(self) -> dict[str, Any]:
        times = {n: list(known.windows) for n, known in self.times.items()}
        return {"policy": self.policy.state_dict(), "times": times, "rate": self.rate}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.policy.load_state_dict(state["policy"])
        self.times |= {n: DecodeTimes(self.times[n].capacity, w) for n, w in state["times"].items() if n in self.times}
        self.rate = state["rate"]


class StreamedRound:
    """A round that ranks may leave: `tell` and `observe` after each window, then `train` or `end`."""

    def __init__(self, run: StreamTraining, plan: RoundPlan):
        assert plan.num_responses == plan.keep_responses and len(plan.prompts) == plan.keep_prompts
        self.run, self.plan, self.policy, self.world = run, plan, run.policy, run.world
        self.prompts = {visit.id: visit.prompt for visit in plan.prompts}
        self.prompt_tokens = sum(len(p.token_ids) for p in self.prompts.values()) // len(self.prompts)
        self.lengths: dict[SampleId, int] = {}  # tokens of every response that has ended
        self.rewards: dict[SampleId, float] = {}  # shaped, of those that are graded
        self.missing = dict.fromkeys(self.prompts, plan.num_responses)  # responses without a reward
        self.decision: ScaleDown | None = None
        self.decided = self.prefilled = 0.0
        self.before = (0, 0, 0.0)
        self.missed: list[Sequence[Finished]] = []  # by those who have left, window by window
        self.came = Came(set(), 0, 0.0, 0.0, 0.0, 0.0, 0)

    @property
    def may_leave(self) -> bool:
        return not self.policy.is_done

    @property
    def has_left(self) -> bool:
        return self.decision is not None

    # ---- after each window -----------------------------------------------------------------------------------

    def tell(self, r: Round) -> Told:
        engine, trainer = r.engine, self.run.trainer
        context = engine.pages_used * engine.config.page_size
        now = r.decode_steps, r.decoded, r.clock.seconds["decode"]
        steps, drawn, seconds = (a - b for a, b in zip(now, self.before, strict=True))
        self.before = now
        window = (drawn / steps, context, seconds / steps) if steps and drawn else None
        graded = {id: r.shaped(id) for id in r.rewards if id not in self.rewards and id in r.samples}
        live = tuple(n for _, n in sorted(engine.live_tokens().items())) if r.speaks else ()
        return Told(graded, live, context if r.speaks else 0, window, trainer.take_times())

    def observe(self, r: Round, finished: Sequence[Finished], told: Sequence[Told], is_last: bool) -> bool:
        """Take in what all ranks told; return whether this one leaves the rollout. Collective when they scale down."""
        self.lengths.update({event.id: event.num_tokens for event in finished})
        ready = self._take_rewards([item for part in told for item in part.graded.items()])
        windows = [part.window for part in told if part.window]
        if windows:  # the slowest replica is the one that all wait for
            self.run.times[self.run.engine.parallel.size].observe(*max(windows, key=lambda window: window[-1]))
        if tokens := sum(part.trained[1] for part in told):
            self.run.rate = sum(part.trained[0] for part in told) / tokens
        if self.decision:
            self.missed.append(finished)
            self.came.peak_tokens = max(self.came.peak_tokens, sum(part.context for part in told))
        if is_last:
            return False
        if self.decision:
            self._send(r, ready)
            return False
        self.decision = self.policy.observe(self._progress([n for part in told for n in part.live]))
        return self.decision is not None and self._scale_down(r)

    def _take_rewards(self, graded: Iterable[tuple[SampleId, float]]) -> list[VisitId]:
        """Note new rewards; return the prompts that they make ready to train."""
        ready = []
        for id, reward in sorted(graded):
            if id not in self.rewards:
                self.rewards[id] = reward
                self.missing[id.visit] -= 1
                ready += [] if self.missing[id.visit] else [id.visit]
        return ready

    def _progress(self, live: Sequence[int]) -> Progress:
        total, ended = self.plan.keep_prompts * self.plan.keep_responses, self.lengths.values()
        replicas, token_seconds = self.run.engine.parallel.num_replicas, self.run.rate / self.world.size
        return self.policy.progress(total, ended, live, self.prompt_tokens, replicas, token_seconds)

    # ---- the scale-down --------------------------------------------------------------------------------------

    def _scale_down(self, r: Round) -> bool:
        """Move what the last replicas have to the first ones; return whether this rank is free now. Collective."""
        self.decided, self.prefilled = time.perf_counter(), r.clock.seconds["prefill"]
        size, replicas = r.engine.parallel.size, self.decision.replicas
        first_freed = replicas * size
        leaves = self.world.rank >= first_freed
        r.hand_over(r.placement.shrink(replicas))
        held = {id: s for id, s in r.samples.items() if leaves or not self.missing[id.visit]}
        with r.clock.span("hand_over"):
            everyone = parallel.gather_objects(self.world, {id: (s, r.rewards.get(id)) for id, s in held.items()})
        if leaves:
            self._leave(r, everyone, first_freed)
            self.run.stream.open_from((self.world.rank - first_freed) % replicas * size)
        else:
            self._take_over(r, [part for part in everyone[first_freed::size]])
            r.world = self.run.decoding[first_freed]
            freed = range(first_freed, self.world.size)
            mine = [rank for rank in freed if (rank - first_freed) % replicas * size == self.world.rank]
            self.waiting: dict[int, list[Example]] = {rank: [] for rank in mine}  # for the stream to have room
            self.sent = [0] * len(mine)  # tokens
            self.run.stream.open_to(mine)
        self.came.switch_seconds = time.perf_counter() - self.decided
        return leaves

    def _leave(self, r: Round, everyone: Sequence[dict[SampleId, tuple[Sample, Reward | None]]], first: int) -> None:
        """Keep one's share of what is ready to train, forget the rest, free the pages."""
        samples = {id: sample for part in everyone for id, (sample, _) in part.items() if not self.missing[id.visit]}
        ready = self._examples(samples)
        share = assign_by_load([e.num_tokens for e in ready], self.world.size - first)[self.world.rank - first]
        self.backlog = [ready[i] for i in share]
        r.samples = {id: sample for id, sample in r.samples.items() if not self.missing[id.visit]}
        r.graders.forget(keep=())
        r.graders.drain()
        r.engine.free_memory()

    def _take_over(self, r: Round, left: Sequence[dict[SampleId, tuple[Sample, Reward | None]]]) -> None:
        """Have the finished samples of those who leave; what they have not graded is graded here, from the start."""
        mine = left[r.engine.parallel.replica :: self.decision.replicas] if r.speaks else ()
        for id, (sample, reward) in ((id, held) for part in mine for id, held in part.items()):
            if not self.missing[id.visit]:
                continue
            r.samples[id] = sample
            if reward:
                r.rewards[id] = reward
            else:
                r.grade(sample)

    def _examples(self, samples: dict[SampleId, Sample]) -> list[Example]:
        """Return what there is to learn from samples whose groups are graded, in one order on all ranks."""
        ready: list[Example] = []
        loss, count = self.run.trainer.loss, self.plan.num_responses
        for id in sorted({id.visit for id in samples}):
            rewards = [self.rewards[id.sample(i)] for i in range(count)]
            [advantages] = advantages_of([rewards], [self.prompts[id].task], loss, self.run.reward).tolist()
            here = [i for i in range(count) if id.sample(i) in samples]
            own = [samples[id.sample(i)] for i in here], [advantages[i] for i in here]
            ready += examples_of(self.prompts[id], *own, loss.mask_truncated)
        return ready

    # ---- on the ranks that go on decoding --------------------------------------------------------------------

    def _send(self, r: Round, prompts: Sequence[VisitId]) -> None:
        """Send the samples that became ready, or that there are none: who waits knows that the rollout goes on."""
        ready = set(prompts)
        examples = self._examples({id: s for id, s in r.samples.items() if id.visit in ready})
        loads = [e.num_tokens for e in examples]
        shares = assign_by_load(loads, len(self.waiting), self.sent) if self.waiting else []
        for i, (target, share) in enumerate(zip(self.waiting, shares, strict=True)):
            self.sent[i] += sum(loads[j] for j in share)
            self.waiting[target] += [examples[j] for j in share]
            if self.run.stream.send(target, self.waiting[target]):
                self.waiting[target] = []

    def end(self, r: Round) -> None:
        """End the rollout: tell those who train."""
        if not self.decision:
            return
        self.run.stream.close()
        self.came.switch_seconds += r.clock.seconds["prefill"] - self.prefilled
        self._close(r)

    def _close(self, r: Round) -> None:
        """Bring all ranks together again, and those that left up to date. Collective."""
        self.came.rest_seconds = time.perf_counter() - self.decided
        left, r.world = r.world is self.world, self.world
        run, size = self.run, self.run.engine.parallel.size
        [(missed, windows, rate), *_] = parallel.gather_objects(
            self.world, (self.missed, list(run.times[size].windows), run.rate)
        )
        # Those who left have missed windows, and all must project the same from now on.
        run.times[size], run.rate = DecodeTimes(run.times[size].capacity, windows), rate
        for finished in missed if left else ():
            r.referee.observe(finished, {})

    # ---- on the ranks that train -----------------------------------------------------------------------------

    def train(self, r: Round) -> None:
        """Add up gradients of what is there and of what arrives until the rollout ends. Collective in a shard group."""
        stream, trainer, came = self.run.stream, self.run.trainer, self.came
        while True:
            start = time.perf_counter()
            for examples in stream.take(0.0 if self.backlog else POLL_SECONDS):
                self.backlog += examples
            is_over, has_some = trainer.agree(stream.is_over, bool(self.backlog))
            if is_over:
                break
            if has_some:
                chunk = self._take_chunk()
                trainer.accumulate(chunk)
                came.trained.update(example.id for example in chunk)
                came.tokens += sum(example.num_tokens for example in chunk)
                came.train_seconds += time.perf_counter() - start
            else:
                came.wait_seconds += time.perf_counter() - start
            # Waiting is no progress, or the watchdog would never speak.
            r.clock.add("stream_train" if has_some else "stream_wait", start, time.perf_counter(), moves=has_some)
        stream.close()
        self._close(r)

    def _take_chunk(self) -> list[Example]:
        """Return the first samples of the backlog that make a micro-batch: one at least, if there is any."""
        room, count = self.run.trainer.config.tokens_per_microbatch, 0
        while count < len(self.backlog) and (room := room - self.backlog[count].num_tokens) >= 0:
            count += 1
        chunk, self.backlog = self.backlog[: max(count, 1)], self.backlog[max(count, 1) :]
        return chunk

    # ---- afterwards ------------------------------------------------------------------------------------------

    def settle(self, groups: Sequence[Group]) -> tuple[set[SampleId], dict[str, Any]]:
        """Return which samples of the round some rank has trained, and the round's record. Collective."""
        ids = {sample.id for group in groups for sample in group.samples}
        self.policy.close([len(sample.token_ids) for group in groups for sample in group.samples])
        if not self.decision:
            return set(), {"samples": 0}
        came = parallel.gather_objects(self.world, self.came)
        done = set().union(*(c.trained for c in came))
        assert len(done) == sum(len(c.trained) for c in came), "a sample was trained twice"
        assert done <= ids, "a sample was trained that the round does not have"
        first = self.decision.replicas * self.run.engine.parallel.size
        decoding, freed = came[:first], came[first:]
        self.policy.switch = max(c.switch_seconds for c in decoding)
        train_seconds = sum(c.train_seconds for c in freed)
        return done, {
            "samples": len(done),
            "tokens": sum(c.tokens for c in freed),
            "train_seconds": train_seconds / len(freed),
            "wait_seconds": sum(c.wait_seconds for c in freed) / len(freed),
            "switch_seconds": self.policy.switch,
            "projected": asdict(self.decision),
            "true": {
                "peak_tokens": decoding[0].peak_tokens,
                "rest_seconds": max(c.rest_seconds for c in decoding),
                "trained_seconds": train_seconds / self.world.size,  # of a step in which all ranks train
            },
        }
