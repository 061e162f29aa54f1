"""The policy of an endless rollout: what it launches, and which groups are trained next. Pure, no torch. (ROLL Flash)

The rollout runs ahead of training: an update interrupts sequences, and they go on with the new weights. The age of a
group is the number of updates between its launch and the update that trains it. Every rank feeds its copy alike:

    flow.fill(carry_out, play_window)     # launches prompts and plays windows until a batch is there; each of them
                                          # decodes, then carry_out(flow.observe(its events))
    train flow.accepted_ids(), then flow.advance(what was stopped)

`depth` says how far the rollout runs ahead, and so the usual age; `bound` how old a group may get, and so how long the
longest response is waited for. The paper's asynchronous ratio alpha is both.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from config import Auto, ConfigError, option
from core import Decision, Finished, Prompt, RoundPlan, SampleId, Visit, VisitId
from scheduler import RoundPolicy, SchedulerConfig, TailBatching, Take, num_launched


@dataclass(frozen=True)
class OverlapConfig:
    depth: float = option(
        0.0, "batches that the rollout runs ahead of training; 0: it ends first (the paper's alpha)", min=0.0, max=64.0
    )
    bound: int = option(
        0, "largest age of a trained group, in updates since its launch; 0: depth, rounded up", min=0, max=1024
    )
    late: str = option(
        "wait",
        "groups that would get older than bound: wait (training waits for them; nothing is lost), drop (stop them and "
        "launch their prompts again; fast, because long responses are censored) or keep (train them all the same)",
        choices=("wait", "drop", "keep"),
    )
    flight: str = option(
        "recompute",
        "sequences under way at an update: recompute (go on with their tokens, KV is computed again), keep (go on with "
        "the KV of older weights, which a checkpoint has not: a run that is stopped elsewhere draws other tokens) or "
        "finish (no update before they have ended, so each has one version; unless sync = with_batch nothing decodes "
        "beside training then, and depth gains no time)",
        choices=("recompute", "keep", "finish"),
    )
    clock: str = option(
        "steps",
        "steps: no response decodes while another is prefilled, so that all count the same engine steps on any number "
        "of ranks; time: prefill and decode together, which is faster",
        choices=("steps", "time"),
    )
    train_ranks: int = option(
        0,
        "the first so many ranks only train, the others only decode; with depth over 0 both at the same time; 0: all "
        "ranks do both, in turns; auto: half of them train, until the times of the first steps say how many should",
        min=0,
        auto=True,
    )
    sync: str = option(
        "at_once",
        "with train_ranks, when the others take new weights: at_once (as soon as the update is ready) or with_batch ("
        "once the next batch is complete, the paper's order; the batch that is trained then counts as one of depth)",
        choices=("at_once", "with_batch"),
    )
    update_iterations: int = option(
        64,
        "with train_ranks, clock = steps, sync = at_once: engine steps that the others take during an update, in whole "
        "windows (scheduler.window_iterations)",
        min=1,
    )

    @property
    def largest_age(self) -> int:
        return self.bound or math.ceil(self.depth)

    @property
    def spread(self) -> float:
        """Batches over which a response may take its time before training waits for it (alpha + 1 in the paper)."""
        return self.largest_age + 1 if self.late == "wait" else math.inf

    @property
    def lag(self) -> int:
        """Batches that are complete before new weights are taken, and so the age of a group that is trained next."""
        return int(self.sync == "with_batch")


@dataclass(slots=True)
class OpenGroup:
    """A prompt whose responses are decoded, or wait to be trained."""

    visit: Visit
    start: int  # version of the weights when it was launched
    live: set[SampleId]
    kept: dict[SampleId, int] = field(default_factory=dict)  # the first that ended, with their tokens


@dataclass(frozen=True, slots=True)
class FlowStats:
    """The numbers of a batch, for the records."""

    version: int  # of the weights that it was trained with
    ages: dict[int, int]  # updates since its launch -> groups of the batch
    late: int  # groups of the batch that are older than the bound
    dropped: int  # groups that got too old and were launched again
    late_length: list[int]  # tokens of each response of those that are late
    dropped_length: list[int]  # and of those that were dropped, as far as it had come
    wasted_tokens: int  # decoded and not trained: of surplus responses and of dropped groups
    waited: int  # windows that a full batch waited for a group that would get too old
    running: int  # groups that are not complete after it
    buffered: int  # groups that are complete and wait for a later batch


class Flow:
    """Launches prompts as far ahead as `depth` allows; picks complete groups for the next update, the oldest first.

    With `late` = wait no group is trained at a greater age than the bound, and none is lost: a batch waits as long as
    the batches that remain could not take all groups in time. The run's last batches empty the buffer, since no more is
    launched than they can train.
    """

    def __init__(self, config: OverlapConfig, scheduler: SchedulerConfig, take: Take, steps: int):
        """`take(n)` draws n new prompts; `steps`: updates of the whole run, one batch each."""
        self.config, self.scheduler, self.take, self.steps = config, scheduler, take, steps
        self.num_responses = num_launched(scheduler.num_responses, scheduler.eta_responses)
        #: Groups that may be open at a time: the batch, those ahead of it, and `eta_prompts`' surplus.
        ahead = config.depth - config.lag + scheduler.eta_prompts
        self.capacity = math.ceil(ahead * scheduler.num_prompts - 1e-9)
        self.version = 0
        self.open: dict[VisitId, OpenGroup] = {}  # in the order of their launch, so the oldest first
        self.complete: list[VisitId] = []  # in the order of completion
        self.batch: list[VisitId] = []  # the next to train, once it is decided
        self.again: list[Visit] = []  # dropped, to be launched again
        self.is_filled = False  # the next batch is decided, and what it leaves room for is launched
        self._reset()

    def _reset(self) -> None:
        self.dropped = self.surplus_tokens = 0
        self.dropped_length: list[int] = []  # of responses that had ended
        self.stopped: list[SampleId] = []  # with their groups, while they were decoded

    @property
    def plan(self) -> RoundPlan:
        """The shape of what is launched, as of a round: how many responses, and how many are kept."""
        c = self.scheduler
        return RoundPlan("async", (), self.num_responses, c.num_prompts, c.num_responses)

    # ---- the referee of a rollout ----------------------------------------------------------------------------

    def fill(self, carry_out: Callable[[Decision], None], play_window: Callable[[], object]) -> None:
        """Launch prompts and play windows until a batch is there, unless it is, or the run has no more.

        `play_window` gives what ended to `observe`, and carries out the decision.
        """
        if self.is_filled or self.version == self.steps:
            return
        carry_out(self.begin())
        while not self.batch:
            play_window()
        self.is_filled = True

    def begin(self) -> Decision:
        """Return what to stop and to launch at the start and after an update, and whether a batch is there already."""
        self.waited = 0  # no batch waits in windows beside an update
        abort = self._drop() if self.config.late == "drop" else []
        room = min(self.capacity, (self.steps - self.version) * self.scheduler.num_prompts) - len(self.open)
        old, self.again = self.again[:room], self.again[room:]
        launch = [*old, *self.take(room - len(old))]
        for visit in launch:
            live = {visit.id.sample(r) for r in range(self.num_responses)}
            self.open[visit.id] = OpenGroup(visit, max(self.version - self.config.lag, 0), live)
        return Decision(tuple(abort), tuple(launch), done=self._decide())

    def observe(self, finished: Sequence[Finished], rewards: Mapping[SampleId, float] | None = None) -> Decision:
        """Return the decision after one window. The speed of graders does not matter."""
        for event in sorted(finished, key=lambda event: (event.iteration, event.id)):
            group = self.open[event.id.visit]
            group.live.remove(event.id)
            if len(group.kept) == self.scheduler.num_responses:  # late: the window went on after the last that is kept
                self.surplus_tokens += event.num_tokens
                continue
            group.kept[event.id] = event.num_tokens
            if len(group.kept) == self.scheduler.num_responses:
                self.complete.append(event.id.visit)
        surplus = [self.open[visit] for visit in self.complete if self.open[visit].live]
        abort = tuple(id for group in surplus for id in sorted(group.live))
        for group in surplus:
            group.live.clear()
        return Decision(abort, done=self._decide())

    def accepted_ids(self) -> list[SampleId]:
        """Return the samples of the next batch."""
        return [id for visit in self.batch for id in sorted(self.open[visit].kept)]

    def advance(self, stopped: Mapping[SampleId, int]) -> FlowStats:
        """The batch has been trained: the weights are one version newer. `stopped`: tokens of aborted responses."""
        assert self.batch, "no batch was decided"
        groups = [self.open.pop(visit) for visit in self.batch]
        self.complete = [visit for visit in self.complete if visit in self.open]
        late = [group for group in groups if group.start < self._oldest]
        stats = FlowStats(
            version=self.version,
            ages=dict(sorted(Counter(self.version - group.start for group in groups).items())),
            late=len(late),
            dropped=self.dropped,
            late_length=[tokens for group in late for tokens in group.kept.values()],
            dropped_length=self.dropped_length + [stopped[id] for id in self.stopped if id in stopped],
            wasted_tokens=self.surplus_tokens + sum(self.dropped_length) + sum(stopped.values()),
            waited=self.waited,
            running=len(self.open) - len(self.complete),
            buffered=len(self.complete),
        )
        self.version, self.batch, self.is_filled = self.version + 1, [], False
        self._reset()
        return stats

    # ---- its rules -------------------------------------------------------------------------------------------

    def _decide(self) -> bool:
        """Choose the next batch: complete groups, the oldest first. False while it must wait."""
        done, num_prompts, self.batch = set(self.complete), self.scheduler.num_prompts, []
        by_age = sorted(self.complete, key=lambda visit: self.open[visit].start)  # stable: then by completion
        batch = by_age[:num_prompts]
        if len(batch) < num_prompts:
            return False
        if self.config.flight == "finish" and len(done) < len(self.open):
            return False
        if self.config.late == "wait" and not self._leaves_in_time(batch):
            self.waited += 1
            return False
        self.batch = sorted(batch)
        return True

    def _leaves_in_time(self, batch: Sequence[VisitId]) -> bool:
        """Whether later batches can train all that this one leaves before it is too old."""
        taken, bound, size = set(batch), self.config.largest_age, self.scheduler.num_prompts
        left = [group.start + bound - self.version for visit, group in self.open.items() if visit not in taken]
        # Sorted by what is left of their time: the i-th must be in one of the next `left` batches.
        return all(i < max(updates, 0) * size for i, updates in enumerate(sorted(left)))

    @property
    def _oldest(self) -> int:
        """The first version whose groups are not too old now."""
        return self.version - self.config.largest_age

    def _drop(self) -> list[SampleId]:
        """Forget the groups that got too old; return their responses that are still decoded."""
        late = [self.open.pop(visit) for visit in [v for v, group in self.open.items() if group.start < self._oldest]]
        self.complete = [visit for visit in self.complete if visit in self.open]
        self.again += [replace(group.visit, launch=group.visit.launch + 1) for group in late]
        self.dropped += len(late)
        self.dropped_length += [tokens for group in late for tokens in group.kept.values()]
        stopped = sorted(id for group in late for id in group.live)
        self.stopped += stopped  # which has others already behind a checkpoint, launched again since
        return stopped

    # ---- checkpoints -----------------------------------------------------------------------------------------

    def state_dict(self) -> dict:
        """Return plain values: the state between two updates."""
        return {  # without `batch`: `begin` decides it again
            "version": self.version,
            "groups": [
                (
                    *id,
                    g.visit.launch,
                    g.start,
                    [s.response for s in sorted(g.live)],
                    [(s.response, tokens) for s, tokens in g.kept.items()],
                )
                for id, g in self.open.items()
            ],
            "complete": self.complete,
            "again": [(*visit.id, visit.launch) for visit in self.again],
            "wasted": (self.surplus_tokens, self.dropped, self.dropped_length, self.stopped),
        }

    def load_state_dict(self, state: dict, prompts: Sequence[Prompt]) -> None:
        self.version = state["version"]
        self.surplus_tokens, self.dropped, self.dropped_length, stopped = state.get("wasted", (0, 0, [], []))
        self.stopped = [SampleId(*id) for id in stopped]
        self.complete = [VisitId(*id) for id in state["complete"]]
        self.again = [Visit(epoch, prompts[i], launch) for epoch, i, launch in state["again"]]
        for epoch, i, launch, start, live, kept in state["groups"]:
            id = VisitId(epoch, i)
            ended = {id.sample(r): tokens for r, tokens in kept}
            self.open[id] = OpenGroup(Visit(epoch, prompts[i], launch), start, {id.sample(r) for r in live}, ended)


def check_steps(state: dict, num_prompts: int, steps: int) -> None:
    """Raise ConfigError when a run of so many steps cannot train the prompts under way in a `Flow.state_dict`."""
    last = state["version"] + math.ceil((len(state["groups"]) + len(state["again"])) / num_prompts)
    if last > steps:
        raise ConfigError(
            f"run.steps = {steps} leaves prompts untrained that are under way at step {state['version']}; take "
            f"run.steps = {last}"
        )


ROUNDS = ("plan", "begin", "observe", "close")  # what a policy may do in its own way, in rounds only


def check_overlap(config: OverlapConfig, policy: RoundPolicy, stream: str, planner: str, replay: str = "") -> None:
    """Raise ConfigError on settings without effect or without a place, and on a bound that the depth itself breaks.

    Real runs and simulations ask it. `stream`: stream.policy; `planner`: planner.rule; `replay`: run.replay.
    """
    scheduler = policy.config
    given = {key: value for key, value in asdict(config).items() if value != getattr(OverlapConfig, key)}
    if not config.depth:
        for key, value in given.items():
            if isinstance(value, Auto):
                raise ConfigError(
                    "overlap.train_ranks = auto compares two sides that work at the same time, but with overlap.depth "
                    "= 0 they take turns; give a number of ranks, or take overlap.depth = 1"
                )
            if key != "train_ranks":
                raise ConfigError(
                    f"overlap.{key} = {value} has no effect with overlap.depth = 0: the rollout ends before training; "
                    "take overlap.depth = 1, or leave it out"
                )
    _refuse_without_place(config, scheduler, stream, planner, replay)
    if not config.depth:
        return
    if own := [rule for rule in ROUNDS if getattr(type(policy), rule) is not getattr(TailBatching, rule)]:
        raise ConfigError(
            f"scheduler.policy = {scheduler.policy} has rounds of its own, and an endless rollout (overlap.depth = "
            f"{config.depth:g}) has none: nobody would ask its {own[0]}; take a policy of scheduler.py, or depth = 0"
        )
    if config.lag and not config.train_ranks:
        raise ConfigError(
            "overlap.sync = with_batch needs overlap.train_ranks > 0: ranks in turns have no next batch yet"
        )
    if config.lag and config.depth < 1:
        raise ConfigError(
            f"overlap.sync = with_batch needs overlap.depth >= 1 (it is {config.depth:g}): the others decode the next "
            "batch while one is trained"
        )
    if "update_iterations" in given and not (config.train_ranks and config.clock == "steps" and not config.lag):
        raise ConfigError(
            f"overlap.update_iterations = {config.update_iterations} has no effect with overlap.train_ranks = "
            f"{config.train_ranks}, overlap.clock = {config.clock}, overlap.sync = {config.sync}; it is for ranks "
            "apart, steps, at_once"
        )
    ahead = config.depth + scheduler.eta_prompts - 1
    if config.late == "wait" and ahead > config.largest_age:
        raise ConfigError(
            f"overlap.bound = {config.bound or 'depth'} with overlap.depth = {config.depth:g}, scheduler.eta_prompts = "
            f"{scheduler.eta_prompts:g}: the rollout runs {ahead:g} batches ahead, so groups get older than "
            f"{config.largest_age}; take overlap.bound = {math.ceil(ahead)} or more"
        )


def _refuse_without_place(
    config: OverlapConfig, scheduler: SchedulerConfig, stream: str, planner: str, replay: str
) -> None:
    """Raise ConfigError on settings of other rooms that an endless rollout, or ranks apart, have no place for."""
    endless = f"an endless rollout (overlap.depth = {config.depth:g})" if config.depth else ""
    apart = f"a run of ranks apart (overlap.train_ranks = {config.train_ranks})" if config.train_ranks else ""
    for setting, is_given, reasons in (
        (
            f"stream.policy = {stream}",
            stream != "off",
            {endless: "no round waits for its longest responses", apart: "ranks that decode cannot train"},
        ),
        (
            f"planner.rule = {planner}",
            planner != "fixed",
            {endless: "there is no moment without sequences under way", apart: "it plans for all ranks of a run"},
        ),
        (
            "scheduler.dynamic_sampling = true",
            scheduler.dynamic_sampling,
            {endless: "a batch takes the oldest groups, all alike"},
        ),
        (f"scheduler.audit = {scheduler.audit}", scheduler.audit, {endless: "no round ends"}),
        (
            "scheduler.migrate = true",
            scheduler.migrate and config.clock == "steps",
            {
                f"{endless} with overlap.clock = steps"
                * bool(endless): "a response that moves draws one token more in "
                "that step, so the run would depend on the number of ranks"
            },
        ),
        (f"run.replay = {replay!r}", replay, dict.fromkeys((endless, apart), "recorded groups are not rolled out")),
    ):
        for where, reason in reasons.items():
            if is_given and where:
                raise ConfigError(f"{setting} has no place in {where}: {reason}; leave it out")
