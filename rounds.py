"""One round on the real engines: windows of engine steps, an exchange of events after each, grading beside them.

Every rank runs the same lines. After a window all ranks learn all events by one small collective, feed them to their
own copy of the policy in the same order, and carry out the same decision. There is no master to ask or wait for.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Protocol, TypeVar, cast

import parallel
from core import Decision, Finished, Group, Reward, RoundPlan, Sample, SampleId, Tokenizer, Visit, VisitId
from engine.sequence import Sequence as EngineSequence
from environments import EnvConfig
from envs.episodes import Episodes
from metrics import Clock
from parallel import TPGroups, World
from policies.placement import Placement
from policies.planner import ParallelismPlanner
from reward import RewardConfig, shaped_reward
from rollout import Engine, sequence_for
from scheduler import SchedulerConfig, window

REPLY_SECONDS = 0.002  # between two looks whether an environment has answered, while there is nothing to decode

Note = TypeVar("Note")


Reply = tuple[Sequence[Finished], Mapping[SampleId, float], object]  # what a rank tells after a window, and a note


class Referee(Protocol):
    """Decides a round: a policy with a round open, or a bare `Race`."""

    def observe(self, finished: Sequence[Finished], rewards: Mapping[SampleId, float]) -> Decision: ...
    def accepted_ids(self) -> list[SampleId]: ...


class Graders(Protocol):
    """Grades samples beside decoding: `rewards.pool.RewardPool`, or pool and judge (`rewards.judge.AllGraders`)."""

    @property
    def num_pending(self) -> int: ...
    def submit(self, key: SampleId, task: str, response: str, answer: str, row: dict) -> None: ...
    def poll(self) -> list[tuple[SampleId, Reward]]: ...
    def wait(self, keys: Iterable[SampleId]) -> list[tuple[SampleId, Reward]]: ...
    def drain(self) -> list[tuple[SampleId, Reward]]: ...
    def forget(self, keep: Iterable[SampleId]) -> None: ...


def may_decide(plan: RoundPlan, num_prompts: int, live: Mapping[VisitId, int]) -> bool:
    """Return whether a race may be over, or have losers here, whatever has ended on other ranks. (`scheduler.Race`)

    `live`: responses that run here, by prompt. A prompt with more than the surplus of them is not complete.
    """
    incomplete = sum(count > plan.num_responses - plan.keep_responses for count in live.values())
    return incomplete < len(live) or num_prompts - incomplete >= plan.keep_prompts


def prefill_first(r: "Round", steps: int) -> list[Finished]:
    """Prefill what waits and finds room, and the replies to turns that end with it; return the events.

    With environments no step may be under way: a GPU tells a step late what has ended, but here at once, and which rank
    has a reply to prefill would count.
    """
    events = list[Finished]()
    while r.engine.batcher.waiting:
        with r.clock.span("prefill"):
            ended = r.engine.prefill()
        events += r.finish(ended, steps)
        if not ended:
            break
    return events


class Round:
    """Generates and grades what a plan launches: `play`, then `collect`. Both are collective.

    `play` is `begin`, then `decode` and `exchange` for each window, then `end`. A feeder of the buffer that works while
    the round goes on (overlap/streamed.py) calls these itself.
    """

    def __init__(
        self,
        engine: Engine,
        graders: Graders,
        world: World,
        clock: Clock,
        config: SchedulerConfig,
        seed: int = 0,
        overlong_buffer: int = 0,
        progress: Callable[[str, int, int], None] = lambda *_: None,
        sizes: tuple[ParallelismPlanner, TPGroups] | None = None,
        episodes: Episodes | None = None,
    ):
        """`overlong_buffer`: as in `reward.shaped_reward`; `sizes`: may change in the round; `episodes`: of turns."""
        self.engine, self.graders, self.world, self.clock, self.config = engine, graders, world, clock, config
        self.seed, self.overlong_buffer, self.progress, self.sizes = seed, overlong_buffer, progress, sizes
        self.episodes = episodes or Episodes(EnvConfig(), RewardConfig(), (), cast(Tokenizer, engine.tokenizer), seed)
        self.fields: dict[SampleId, dict] = {}  # what graders are told of an episode
        self.early: list[Finished] = []  # to be told with the next window
        self.prefills_first = False  # no row decodes while a context is prefilled
        self.placement = Placement(engine.parallel.num_replicas)
        self.prompts: dict[VisitId, Visit] = {}
        self.samples: dict[SampleId, Sample] = {}  # finished on this rank
        self.rewards: dict[SampleId, Reward] = {}  # graded on this rank
        self.dropped: dict[SampleId, Sequence[int]] = {}  # tokens of the responses that were stopped on this rank
        self.aborted: dict[SampleId, int] = {}  # how many each had
        self.iteration = self.windows = self.migrated = 0
        self.decision = Decision()  # after the newest window that was heard of
        self.replies: Callable[[], list[Reply]] | None = None  # to the newest window's events, unless they were heard
        self.plain, self.prefill_seconds = (0, 0, 0.0), 0.0  # steps without prefill or drafts, their tokens and seconds
        self.resized: list[dict[str, object]] = []
        self.record: dict[str, object] = {}
        self.audited: dict[SampleId, tuple[int, float]] = {}

    @property
    def is_first(self) -> bool:
        """Whether this rank stands for its replica, all of whose ranks have the same samples."""
        return self.engine.parallel.rank == 0

    # ---- the round -------------------------------------------------------------------------------------------

    def play(self, plan: RoundPlan, referee: Referee) -> None:
        """Decode until the referee says that the round is done, and wait for the grades that are needed."""
        self.begin(plan, referee)
        while not self.decision.done:
            if not self.sizes:
                self.play_window()
                continue
            looks = self.sizes[0].is_due(self.placement.num_live)
            events = self.decode(lands=looks)
            _, live = self.exchange(events, [*self.engine.batcher.live_tokens().values()] if looks else [])
            if looks and not self.decision.done:
                _resize(self, live)
        self.end()

    def play_window(self) -> None:
        """Decode a window, and hear of it at once if its events may change what this rank does next.

        Else it decodes the next window first: a window takes ranks unequal times, now longer on this rank and now on
        that. What is decided, and after which window, stays the same.
        """
        events = self.decode()
        if self.replies:  # to the window before
            self.hear()
            assert not (self.decision.done or self.decision.launch), "a window's decision was not waited for"
        self.tell(events, None)
        batcher, awaited = self.engine.batcher, self.episodes.awaited
        live = Counter(id.visit for id in (*(s.id for s in (*batcher.admitted, *batcher.waiting)), *awaited))
        waits = self.engine.is_idle or self.config.migrate or self.config.dynamic_sampling
        if waits or may_decide(self.plan, len(self.prompts), live):
            self.hear()

    def begin(self, plan: RoundPlan, referee: Referee) -> None:
        self.plan, self.referee = plan, referee
        self._launch(plan.prompts, plan.expected)

    def decode(self, may_leave: bool = False, feeds: bool = False, lands: bool = False) -> list[Finished]:
        """Take one window's steps, have finished samples graded, and return the events. (`scheduler.window`)

        `lands`: no step is under way afterwards. Sequences move only then: one that moves has not ended meanwhile.
        """
        events, self.early = self.early, []
        is_watched = feeds or (self.sizes is not None and self.sizes[0].due > 0)
        iterations, steps = window(self.config, self.plan.kind, self.placement.num_replicas, may_leave, is_watched), 0
        while steps < iterations and self._goes_on(iterations, steps, events):
            if self.prefills_first:
                events += prefill_first(self, steps)
            steps += 1
            ended = [*self._step(), *(self.engine.land() if self.prefills_first and self.episodes.names else ())]
            events += self.finish(ended, steps)
            self.rewards.update(self.graders.poll())
        if not steps:  # a replica that ran dry has grades that others wait for
            self.rewards.update(self.graders.poll())
        if lands or may_leave or self.config.migrate:
            events += self.finish(self.engine.land(), steps + 1)  # the step that would have returned them
        if self.waits_for_replies or self.config.migrate or self.sizes:
            events += self.take_replies(steps + 1, waits=True)
        # A replica that ran dry counts on, so that iterations mean the same on all.
        self.iteration += steps if iterations == math.inf else int(iterations)
        return events

    def finish(self, samples: Iterable[Sample], steps: int) -> list[Finished]:
        """Have samples graded that finished in a window's step; return their events. Other turns are to be answered."""
        events = []
        for sample in samples:
            visit = self.prompts[sample.id.visit]
            if visit.prompt.env:
                self.episodes.end_turn(visit, self.sequence(sample.id), sample)
            else:
                events += self._end(sample, steps)
        if self.waits_for_replies:
            events += self.take_replies(steps, waits=True)
        return events

    def _end(self, sample: Sample, steps: int) -> list[Finished]:
        if not self.is_first:
            return []
        self.samples[sample.id] = sample
        self.grade(sample)
        return [Finished(self.iteration + steps, sample.id, len(sample.token_ids))]

    # ---- turns (envs/episodes.py) ------------------------------------------------------------------------------

    @property
    def waits_for_replies(self) -> bool:
        return self.episodes.config.clock == "steps"

    def take_replies(self, steps: int, waits: bool = False) -> list[Finished]:
        """Let sequences go on whose environment has answered; return the events of episodes that have ended."""
        events: list[Finished] = []
        barrier = self.episodes.config.barrier
        is_early = not self.episodes.awaited or (barrier and not self.engine.is_idle)
        for reply in () if is_early else self.episodes.poll(waits or barrier):
            if isinstance(reply, EngineSequence):
                self.engine.add(reply)
            else:
                self.engine.abort([id := reply[0].id])  # frees the pages that are kept for its next turn
                self.fields |= {id: reply[1]} if self.is_first else {}  # who has it graded
                events += self._end(reply[0], steps)
        return events

    def settle(self) -> None:
        """Have no reply under way: engine, graders and environments are used by others next."""
        self.early += self.take_replies(0, waits=True)

    def _goes_on(self, iterations: float, steps: int, events: list[Finished]) -> bool:
        """Whether there is something to decode; waited for where the window has no end."""
        events += self.take_replies(steps, waits=self.waits_for_replies)
        looks = steps
        while self.engine.is_idle and self.episodes.awaited and looks < iterations:  # others may have more to do
            time.sleep(REPLY_SECONDS)
            events += self.take_replies(steps)
            looks += 1
        return not self.engine.is_idle

    def start(self, sequence: EngineSequence) -> None:
        """Have a new sequence decoded, or one that comes from another replica."""
        visit = self.prompts[sequence.id.visit]
        if visit.prompt.env and not sequence.token_ids:
            self.episodes.begin(visit, sequence)
        else:
            self.engine.add(sequence)

    def sequence(self, id: SampleId) -> EngineSequence:
        """Return a sequence before its first token."""
        config, visit = self.engine.config, self.prompts[id.visit]
        limits = config.max_response_tokens, config.stop, self.episodes.config.max_turn_tokens
        return sequence_for(visit, id.response, self.seed, *limits)

    def exchange(self, events: Sequence[Finished], note: Note) -> tuple[list[Finished], list[Note]]:
        """Tell all ranks the events of a window, and a note; carry out what the referee decides.

        Returns the events of all ranks, and each rank's note.
        """
        self.tell(events, note)
        finished, notes = self.hear()
        return finished, cast(list[Note], notes)

    def tell(self, events: Sequence[Finished], note: object) -> None:
        """Begin an exchange, which `hear` completes."""
        rewards = self._rewards_of(self.decision.grade)
        self.replies = parallel.start_gather(self.world, (events, rewards, note))

    def hear(self) -> tuple[list[Finished], list[object]]:
        """Wait for what the others tell; carry out what the referee decides. Returns what `exchange` does."""
        assert self.replies, "nothing was told"
        with self.clock.span("idle" if self.engine.is_idle else "window_wait"):
            everyone = self.replies()
        self.replies = None
        finished = [event for part, _, _ in everyone for event in part]
        self.placement.remove(event.id for event in finished)
        self.windows += 1
        self.carry_out(self.referee.observe(finished, {id: r for _, part, _ in everyone for id, r in part.items()}))
        return finished, [note for _, _, note in everyone]

    def carry_out(self, decision: Decision) -> None:
        """Stop and launch what the referee says. Collective where sequences migrate."""
        self.placement.remove(decision.abort)
        stopped = self.engine.abort(decision.abort) if decision.abort else {}
        for awaited in self.episodes.withdraw(decision.abort):
            stopped[awaited.sequence.id] = awaited.turn.token_ids if awaited.turn else ()
        self.dropped.update(stopped if self.is_first else {})
        self._launch(decision.launch)
        if self.config.migrate:
            self.hand_over(self.placement.handovers())
        self.decision = decision

    def end(self) -> None:
        """Wait for the grades of what is trained; the rest is not graded."""
        if not self.plan.audit:
            self.graders.forget(keep=self.referee.accepted_ids())
        with self.clock.span("reward"):
            self.rewards.update(self.graders.drain())

    def _launch(self, prompts: Sequence[Visit], expected: Sequence[float] = ()) -> None:
        ids = [visit.id for visit in prompts]
        self.prompts.update(zip(ids, prompts, strict=True))
        shares = self.placement.launch(ids, self.plan.num_responses, expected, self.config.placement == "spread")
        started = dict(zip(self.placement.replicas, shares, strict=True))
        for id in started.get(self.engine.parallel.replica, ()):  # nothing: it has left, or not come (overlap/tail.py)
            self.start(self.sequence(id))

    def grade(self, sample: Sample) -> None:
        """Have a finished sample graded, beside whatever comes next."""
        prompt = self.prompts[sample.id.visit].prompt
        assert self.engine.tokenizer, "graders read texts"
        text = self.engine.tokenizer.decode(sample.token_ids, skip_special_tokens=True)
        row = prompt.extra | self.fields.pop(sample.id, {})
        self.graders.submit(sample.id, prompt.task, text, prompt.answer, row)

    def _step(self) -> list[Sample]:
        stats, start = self.engine.batcher.stats, time.perf_counter()
        prefilled, decoded, drafted = stats.prefilled_tokens, stats.decoded_tokens, stats.drafted_tokens
        samples = self.engine.step()
        end, stage = time.perf_counter(), "verify" if stats.drafted_tokens > drafted else "decode"
        if stats.prefilled_tokens > prefilled:
            stage, self.prefill_seconds = "prefill", self.prefill_seconds + end - start
        elif stage == "decode":
            steps, tokens, seconds = self.plain
            self.plain = steps + 1, tokens + stats.decoded_tokens - decoded, seconds + end - start
        self.clock.add(stage, start, end)
        self.clock.count(running=len(self.engine.batcher.running), waiting=len(self.engine.batcher.waiting))
        self.progress("generated", len(self.samples), len(self.prompts) * self.plan.num_responses)
        return samples

    def take_decode_times(self) -> tuple[int, int, float]:
        """Return the steps without prefill or drafts since the last call, the tokens that they drew, their seconds."""
        taken, self.plain = self.plain, (0, 0, 0.0)
        return taken

    def _rewards_of(self, ids: Collection[SampleId]) -> dict[SampleId, float]:
        """Wait for the grades of those of `ids` that finished here."""
        mine = [id for id in ids if id in self.samples]
        if mine:
            with self.clock.span("reward"):
                self.rewards.update(self.graders.wait(mine))
        return {id: self.shaped(id) for id in mine}

    def hand_over(self, moves: Sequence[tuple[SampleId, int, int]]) -> None:
        """Carry sequences from replica to replica; they go on token by token the same."""
        if moves:
            _hand_over(self, moves)

    # ---- its groups ------------------------------------------------------------------------------------------

    def collect(self) -> list[Group]:
        """Return the accepted groups in an order that does not depend on the number of ranks.

        They are the same on all ranks but for tokens: each sample's are on the rank that decoded it.
        After this `aborted` holds the tokens of every rank's aborted responses, `record` what the records want, and
        `audited` the (sampled tokens, shaped reward) of every response when the plan is to be audited.
        """
        accepted = self.referee.accepted_ids()
        mine = {id: self.samples[id] for id in accepted if id in self.samples}
        told = {id: (parallel.header_of(sample, self.world.rank), self.rewards[id]) for id, sample in mine.items()}
        seen = {id: (s.num_sampled, self.shaped(id)) for id, s in self.samples.items()} if self.plan.audit else {}
        trained: dict[SampleId, tuple[Sample, Reward]] = {}
        own = {id: len(tokens) for id, tokens in self.dropped.items()}
        for part, aborted, audited in parallel.gather_objects(self.world, (told, own, seen)):
            trained |= part
            self.aborted |= aborted
            self.audited |= audited
        self.record = {"windows": self.windows, "migrated": self.migrated, "resized": self.resized}
        trained |= {id: (sample, self.rewards[id]) for id, sample in mine.items()}  # with their tokens
        groups = []
        for id, members in groupby(sorted(accepted), key=lambda id: id.visit):
            samples, rewards = zip(*(trained[member] for member in members), strict=True)
            groups.append(Group(self.prompts[id].prompt, id.epoch, samples, rewards))
        return groups

    def shaped(self, id: SampleId) -> float:
        limit = self.engine.config.max_response_tokens
        return shaped_reward(self.samples[id], self.rewards[id], limit, self.overlong_buffer)


# ---- sequences that move -----------------------------------------------------------------------------------------


def _gather(played: Round, leaving: Sequence[EngineSequence]) -> dict[SampleId, EngineSequence]:
    """Return the sequences that leave all replicas."""
    everyone = parallel.gather_objects(played.world, leaving if played.is_first else [])
    return {sequence.id: sequence for part in everyone for sequence in part}


def _resize(played: Round, live: Sequence[Sequence[int]]) -> None:
    """Deal all sequences again, over replicas of another size, if the planner says so. Collective.

    `live`: tokens so far of the sequences of every rank. Sequences go on token by token the same.
    """
    assert played.sizes
    (planner, tp_groups), engine = played.sizes, played.engine
    choice = planner.choose_again(played.plan.kind, live[:: engine.parallel.size])
    if not choice:
        return
    with played.clock.span("resize"):
        leaving = engine.export(engine.batcher.live_tokens())
        leaving += [a.sequence for a in played.episodes.withdraw([*played.episodes.open])]
        sequences = _gather(played, leaving)
        engine.regroup(tp_groups[choice.size])
        played.placement = Placement(engine.parallel.num_replicas)
        shares = played.placement.deal({id: sequence.num_tokens for id, sequence in sequences.items()})
        for id in shares[engine.parallel.replica]:
            played.start(sequences[id])
    played.resized.append({"iteration": played.iteration, "responses": len(sequences), **asdict(choice)})


def _hand_over(played: Round, moves: Sequence[tuple[SampleId, int, int]]) -> None:
    replica = played.engine.parallel.replica
    ids = {id for id, source, _ in moves if source == replica}
    leaving = [*played.engine.export(ids), *(awaited.sequence for awaited in played.episodes.withdraw(ids))]
    with played.clock.span("hand_over"):
        travelling = _gather(played, leaving)
    for id, _, target in moves:
        if target == replica:
            played.start(travelling[id])
    played.migrated += len(moves)
