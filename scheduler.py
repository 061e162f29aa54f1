"""Round policies: the prompts that a step launches, the winners of the race, the queue for long rounds. Pure, no torch.

A policy is a state machine. Every rank feeds its copy with the same events in the same order, so all ranks make the
same decisions without a master. The engine and the simulator drive the same classes:

    plan = policy.begin(take, steps_left)
    while not (decision := policy.observe(events of one window)).done: carry the decision out, decode a window
    stats = policy.close(tokens of aborted responses)

A new policy is a `RoundPolicy` with its own `plan` and an entry in POLICIES.
"""

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from random import Random

from config import entry, option
from core import Decision, Finished, Prompt, RoundPlan, RoundStats, SampleId, Visit, VisitId

Take = Callable[[int], list[Visit]]
QUEUED = 64  # times num_prompts: the longest queue of a policy that may never take prompts from it


class Race:
    """One round: which responses are first, which are aborted, when it is over. (RollPacker, section 3)

    The first `keep_responses` responses complete a prompt, the first `keep_prompts` prompts complete the round, both in
    the order of (iteration, id). The speed of graders does not matter.

    With `take`, dynamic sampling (DAPO, section 3.2): only prompts whose kept responses differ in reward count. A new
    prompt replaces each other prompt while fewer than `max_prompts` have been launched; after that they fill the round.
    """

    def __init__(self, plan: RoundPlan, take: Take | None = None, max_prompts: int = 0):
        self.plan, self.take, self.max_prompts = plan, take, max_prompts
        self.prompts: dict[VisitId, Visit] = {}
        self.live: dict[SampleId, None] = {}  # in launch order
        self.kept: dict[VisitId, list[SampleId]] = {}  # the first responses of each prompt
        self.tokens: dict[SampleId, int] = {}  # of every response that has ended
        self.complete: list[VisitId] = []
        self.closed: list[VisitId] = []  # complete since the last window; dynamic sampling asks for their rewards
        self.varied: dict[VisitId, bool] = {}  # complete and graded: whether rewards differ
        self.accepted: list[VisitId] = []
        self.padded = 0
        self._launch(plan.prompts)

    @property
    def decided(self) -> bool:
        return len(self.accepted) == self.plan.keep_prompts

    @property
    def zero_variance(self) -> list[VisitId]:
        return [id for id in self.complete if not self.varied.get(id, True)]

    def accepted_ids(self) -> list[SampleId]:
        """Return the samples to train, prompt by prompt."""
        return [id for prompt in self.accepted for id in sorted(self.kept[prompt])]

    def observe(self, finished: Sequence[Finished], rewards: Mapping[SampleId, float]) -> Decision:
        """Return the decision after one window's events and the rewards that the decision before asked for."""
        graded, self.closed = self.closed if self.take and not self.decided else [], []
        for id in graded:
            self.varied[id] = len({rewards[sample] for sample in self.kept[id]}) > 1
        for event in sorted(finished, key=lambda event: (event.iteration, event.id)):
            self._finish(event)
        launch: tuple[Visit, ...] = ()
        if not self.decided:
            self.accepted = [id for id in self.complete if self.varied.get(id)][: self.plan.keep_prompts]
        if self.take and not self.decided:
            num_replaced = sum(not self.varied[id] for id in graded)
            launch = tuple(self.take(min(num_replaced, self.max_prompts - len(self.prompts))))
            self._launch(launch)
            if not self.live and not self.closed:  # max_prompts is reached
                self.padded = self.plan.keep_prompts - len(self.accepted)
                self.accepted += self.zero_variance[: self.padded]
        abort = () if self.plan.audit else self._losers()
        for loser in abort:
            del self.live[loser]
        asks = self.take and not self.decided
        grade = tuple(id for prompt in self.closed for id in self.kept[prompt]) if asks else ()
        return Decision(abort, launch, grade, done=self.decided and not self.live)

    def _launch(self, prompts: Sequence[Visit]) -> None:
        for visit in prompts:
            assert visit.id not in self.prompts, f"prompt {visit.id} was launched twice"
            self.prompts[visit.id], self.kept[visit.id] = visit, []
            self.live.update(dict.fromkeys(visit.id.sample(r) for r in range(self.plan.num_responses)))

    def _losers(self) -> tuple[SampleId, ...]:
        """Return the running responses that can no longer be kept."""
        if self.decided:
            return tuple(self.live)
        closed = (prompt.sample(r) for prompt in self.closed for r in range(self.plan.num_responses))
        return tuple(id for id in closed if id in self.live)

    def _is_complete(self, prompt: VisitId) -> bool:
        return len(self.kept[prompt]) == self.plan.keep_responses

    def _finish(self, event: Finished) -> None:
        prompt = event.id.visit
        del self.live[event.id]
        self.tokens[event.id] = event.num_tokens
        if self._is_complete(prompt):
            return  # late: the window went on after the prompt's last kept response
        self.kept[prompt].append(event.id)
        if self._is_complete(prompt):
            self.complete.append(prompt)
            self.closed.append(prompt)
            if not self.take:
                self.varied[prompt] = True


@dataclass(frozen=True, slots=True)
class Waiting:
    """A prompt in the long-prompt queue."""

    visit: Visit
    since: int  # round that first aborted it
    expected: float  # tokens of a response, at least: the mean over its aborted responses


class RoundPolicy(ABC):
    """The base of all policies. A new policy needs only `plan`: the prompts of a round, their order, how many are kept.

    Prompts that a round launches and does not keep wait in `queue`; `plan` may take them with `requeued`. Unless the
    policy `trains_all`, the queue forgets its oldest prompts beyond QUEUED x num_prompts. Every rank has its own copy
    and all must plan alike, so `plan` may use only its arguments and the state here. A policy with further state adds
    it to `state_dict` and `load_state_dict`. `plan` asks `scheduler.audit` itself, as `TailBatching` does. An `observe`
    of one's own must decide no earlier than `Race`: ranks go on where `rounds.may_decide` rules a decision out.
    """

    trains_all = False  # promises to train every prompt that it draws: a run must then be long enough for its queue

    def __init__(self, config: "SchedulerConfig", seed: int = 0):
        self.config, self.seed = config, seed
        self.queue: list[Waiting] = []  # oldest first
        self.rounds = 0
        self.wasted_tokens = 0
        self.typical = 1.0  # tokens of a trained response in the newest short round
        self._race: Race | None = None  # of the open round
        self._queued: dict[VisitId, Waiting] = {}  # prompts of this round that come from the queue

    @abstractmethod
    def plan(self, take: Take, steps_left: int) -> RoundPlan:
        """Return the next round, the first of `steps_left`. `take(n)` draws n new prompts."""

    @property
    def race(self) -> Race:
        """The open round."""
        assert self._race, "no round is open: call begin"
        return self._race

    def requeued(self, count: int) -> list[Waiting]:
        """Take the oldest `count` prompts out of the queue, or all if there are fewer, for the round being planned."""
        old, self.queue = self.queue[:count], self.queue[count:]
        self._queued |= {w.visit.id: w for w in old}
        return old

    def begin(self, take: Take, steps_left: int) -> RoundPlan:
        """Open the next round. Raises ValueError on a plan that cannot end or that contradicts itself."""
        assert self._race is None, "the round before was not closed"
        c, self._queued = self.config, {}
        plan = self.plan(take, steps_left)
        if wrong := self._wrong(plan):
            raise ValueError(f"{type(self).__name__}.plan: {wrong}")
        launched = {visit.id for visit in plan.prompts}
        self.queue = [w for id, w in self._queued.items() if id not in launched] + self.queue  # taken in vain
        self._queued = {id: w for id, w in self._queued.items() if id in launched}
        max_prompts = max(int(c.max_draws * c.num_prompts), len(plan.prompts))
        self._race = Race(plan, take if c.dynamic_sampling else None, max_prompts)
        self.rounds += 1
        return plan

    @staticmethod
    def _wrong(plan: RoundPlan) -> str:
        if not isinstance(plan, RoundPlan):
            return f"returned {plan!r}; return a RoundPlan"
        ids = Counter(visit.id for visit in plan.prompts)
        if twice := [id for id, count in ids.items() if count > 1]:
            return f"has the prompt (epoch, index) = {twice[0]} {ids[twice[0]]} times; launch each once"
        prompts, kept = (len(plan.prompts), plan.num_responses), (plan.keep_prompts, plan.keep_responses)
        if not (0 < kept[0] <= prompts[0] and 0 < kept[1] <= prompts[1]):
            return f"keeps {kept[0]} prompts x {kept[1]} responses of {prompts[0]} x {prompts[1]}"
        if plan.kind != ("long" if kept == prompts else "short"):
            return f"kind = {plan.kind!r}; a round that keeps all it launches is long, any other is short"
        if plan.expected and len(plan.expected) != prompts[0]:
            return f"{len(plan.expected)} expected lengths for {prompts[0]} prompts"
        return ""

    def peek(self, take: Take, steps_left: int) -> RoundPlan:
        """Return the round after the open one, as it will be if that leaves no prompt to the queue. Changes nothing.

        `take` must be of a copy of the cursor.
        """
        race, self._race = self._race, None  # without its responses
        ahead = deepcopy(self)
        self._race = race
        return ahead.begin(take, steps_left)

    def observe(self, finished: Sequence[Finished], rewards: Mapping[SampleId, float] | None = None) -> Decision:
        """Return the decision after one window (see `Race.observe`)."""
        return self.race.observe(finished, rewards or {})

    def accepted_ids(self) -> list[SampleId]:
        """Return the samples to train, prompt by prompt."""
        return self.race.accepted_ids()

    def close(self, aborted: Mapping[SampleId, int]) -> RoundStats:
        """End the round. `aborted`: tokens of each aborted response, from all ranks."""
        race, self._race = self.race, None
        tokens = race.tokens | dict(aborted)
        assert len(tokens) == len(race.prompts) * race.plan.num_responses, "a response ended twice or not at all"
        trained = [tokens[id] for id in race.accepted_ids()]
        wasted = sum(tokens.values()) - sum(trained)
        self.wasted_tokens += wasted
        if race.plan.kind == "short":
            self.typical = max(sum(trained) / len(trained), 1.0)
        gone = {*race.accepted, *race.zero_variance}
        losers = [self._wait(id, race, tokens) for id in {**self._queued, **race.prompts} if id not in gone]
        self.queue = sorted(losers + self.queue, key=lambda w: w.since)  # stable: the order of a round stays
        if not self.trains_all:
            self.queue = self.queue[-QUEUED * self.config.num_prompts :]
        return RoundStats(
            kind=race.plan.kind,
            audit=race.plan.audit,
            prompts=len(race.prompts),
            responses=len(tokens),
            aborted=len(aborted),
            requeued=len(losers),
            queue=len(self.queue),
            oldest=self.rounds - self.queue[0].since if self.queue else 0,
            wasted_tokens=wasted,
            wasted_tokens_total=self.wasted_tokens,
            longest=max(trained),
            zero_variance=len(race.zero_variance),
            padded=race.padded,
        )

    def _wait(self, id: VisitId, race: Race, tokens: Mapping[SampleId, int]) -> Waiting:
        seen = sum(tokens[id.sample(r)] for r in range(race.plan.num_responses)) / race.plan.num_responses
        before = self._queued.get(id)
        since = before.since if before else self.rounds
        return Waiting(race.prompts[id], since, max(seen, before.expected if before else 1.0))

    def state_dict(self) -> dict:
        """Return plain values: the state between two rounds."""
        assert self._race is None, "a round is open"
        queue = [(*w.visit.id, w.since, w.expected) for w in self.queue]
        counters = {"rounds": self.rounds, "wasted_tokens": self.wasted_tokens, "typical": self.typical}
        return {"queue": queue, **counters}

    def load_state_dict(self, state: dict, prompts: Sequence[Prompt]) -> None:
        self.queue = [Waiting(Visit(epoch, prompts[i]), *rest) for epoch, i, *rest in state["queue"]]
        self.rounds, self.wasted_tokens, self.typical = state["rounds"], state["wasted_tokens"], state["typical"]


class TailBatching(RoundPolicy):
    """Short rounds that race, a queue of aborted prompts, long rounds that wait. (RollPacker, section 3)

    Every drawn prompt is trained exactly once: `plan` never draws more than the rest of the run can train, so the last
    rounds empty the queue. (With dynamic sampling it is trained or found to have zero variance.) A queued prompt keeps
    its id, so newer weights sample its responses from the same random streams.
    """

    trains_all = True

    def plan(self, take: Take, steps_left: int) -> RoundPlan:
        c, drawn = self.config, list[Visit]()
        launch = c.num_prompts
        if len(self.queue) < c.num_prompts:
            launch = num_launched(c.num_prompts, c.eta_prompts)
            drawn = take(min(launch, steps_left * c.num_prompts - len(self.queue)))
        old = self.requeued(launch - len(drawn))
        num_responses = num_launched(c.num_responses, c.eta_responses) if drawn else c.num_responses
        speculates = len(drawn) + len(old) > c.num_prompts or num_responses > c.num_responses
        known = [(w.expected, w.visit) for w in old] + [(self.typical, visit) for visit in drawn]
        known.sort(key=lambda item: -item[0])  # stable: the longest start first, then the oldest
        return RoundPlan(
            kind="short" if speculates else "long",
            prompts=tuple(visit for _, visit in known),
            num_responses=num_responses,
            keep_prompts=c.num_prompts,
            keep_responses=c.num_responses,
            expected=tuple(expected for expected, _ in known),
            audit=speculates and Random(f"audit {self.seed} {self.rounds}").random() < c.audit,
        )


def num_launched(kept: int, eta: float) -> int:
    return math.ceil(kept * eta - 1e-9)  # 10 * 1.1 is 11


class Synchronous(TailBatching):
    """The baseline: every step launches exactly P0 prompts with R0 responses each and waits for all of them."""

    def __init__(self, config: "SchedulerConfig", seed: int = 0):
        super().__init__(replace(config, eta_prompts=1.0, eta_responses=1.0), seed)


POLICIES: dict[str, type[RoundPolicy]] = {"tail_batching": TailBatching, "synchronous": Synchronous}


@dataclass(frozen=True)
class SchedulerConfig:
    policy: str = entry("tail_batching", "round policy", POLICIES)
    num_prompts: int = option(
        32, "prompts trained per step over all ranks (P0); a multiple of the number of replicas", min=1, max=2**20
    )
    num_responses: int = option(
        8, "responses trained per prompt (R0); a step trains num_prompts x num_responses samples", min=2, max=65536
    )
    eta_prompts: float = option(1.25, "a short round launches num_prompts times this", min=1.0, max=16.0)
    eta_responses: float = option(
        1.0,
        "a short round launches num_responses times this for each prompt (paper: 1.25); over 1 the longest responses "
        "are not trained, which biases the gradient",
        min=1.0,
        max=16.0,
    )
    window_iterations: int = option(
        16, "engine steps between two exchanges of events; a larger number waits less and aborts later", min=1
    )
    placement: str = option(
        "together",
        "the responses to a prompt: together on one replica, where they share its prefill, or spread over replicas, "
        "which balances long prompts (ROLL Flash's prompt replication)",
        choices=("together", "spread"),
    )
    migrate: bool = option(
        False,
        "replicas with at most half of another's sequences, and 8 fewer, take some; gains little, in long tails only",
    )
    dynamic_sampling: bool = option(
        False, "replace prompts whose rewards are all equal by new prompts (DAPO, section 3.2)"
    )
    max_draws: float = option(
        4.0, "dynamic sampling launches at most num_prompts times this in a step", min=1.0, max=1e3
    )
    audit: float = option(
        0.0, "share of short rounds that finish every response, to record what the race leaves out", min=0.0, max=1.0
    )


def races(config: SchedulerConfig, kind: str) -> bool:
    """Return whether the engine steps in which responses end decide which of them a round keeps, or launches."""
    return kind != "long" or config.dynamic_sampling


RELAXED = 8  # factor on the window's length where nothing races


def window(
    config: SchedulerConfig, kind: str, num_replicas: int, may_leave: bool = False, is_watched: bool = False
) -> float:
    """Return the engine steps until the next exchange of events; infinite: only at the round's end.

    `may_leave`: replicas may leave the round to train at a share of complete responses, which windows should not miss.
    `is_watched`: replicas have left and wait for complete groups, or the size may change once few responses are left.
    """
    decides_soon = races(config, kind) or may_leave
    if num_replicas == 1 and not decides_soon and not is_watched:
        return math.inf  # no other replica, and no decision before the end
    # A replica may run out of work long before the others: it must not wait for them until the time-out.
    return config.window_iterations * (1 if decides_soon else RELAXED)
