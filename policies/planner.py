"""Tensor-parallel size of the next round: fixed, by page pressure, or by predicted time. Pure, no torch.

(RollPacker, section 4.2.) Every rank feeds its own planner the same reports and comes to the same choice:

    choice = planner.choose(kind, launch)
    regroup to choice.size, play the round; with `within_round`, whenever planner.is_due(responses that are left):
        another = planner.choose_again(kind, tokens of these responses)
    planner.observe(kind, report)

One entry in RULES for each rule. State is kept apart for short and long rounds: the first run out of pages, the second
wait for their longest response.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from random import Random
from statistics import median

from config import ConfigError, entry, option
from core import RoundPlan, SampleId
from policies.placement import assign_by_load
from policies.replica import Replica, Response
from policies.step_times import PROFILE_NAME, FittedTimes, Profile, StepTimes

RISE = 1.05  # a rise of preemptions over this doubles (section 4.2)
QUIET_ROUNDS = 4  # so many rounds without preemption halve (section 4.2)
RECENT_ROUNDS = 3  # rounds of one kind whose lengths, and of one size whose measured over predicted times, count
PATIENCE = 20  # rounds at one size until others get the benefit of the doubt


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Ranks, pages and limits of the rollout."""

    num_ranks: int
    pages: dict[int, int]  # of one replica, by the tensor-parallel sizes that are allowed
    page_size: int  # tokens
    max_running: int  # sequences of one replica that decode together
    max_response_tokens: int
    shares_prompts: bool = False  # responses share their prompt's pages, as on a GPU


@dataclass(frozen=True, slots=True)
class Launch:
    """The work that a round starts with."""

    num_sequences: int
    prompt_tokens: float  # of one prompt, on average
    num_responses: int  # sequences that share a prompt

    @classmethod
    def of(cls, plan: RoundPlan) -> "Launch":
        tokens = [len(visit.prompt.token_ids) for visit in plan.prompts]
        return cls(len(tokens) * plan.num_responses, sum(tokens) / len(tokens), plan.num_responses)


@dataclass(frozen=True, slots=True)
class Report:
    """Preemptions, seconds and lengths of a round, over all replicas."""

    preemptions: int
    seconds: float  # of the slowest replica
    lengths: tuple[int, ...]  # response tokens of every sequence, aborted ones included
    resize_seconds: float | None = None  # of a change of the size within it; None: there was none


@dataclass(frozen=True, slots=True)
class Choice:
    """A decision and its reason, for the records."""

    size: int
    reason: str
    predicted: dict[int, float] = field(default_factory=dict)  # seconds of the round, by size


Share = Sequence[
    tuple[int, int]
]  # a replica's responses, a prompt's one after the other: tokens so far, and at the end


def simulate_replica(
    times: StepTimes, pages: int, limits: EngineLimits, launch: Launch, share: Share, is_cached: bool = False
) -> tuple[float, int]:
    """Return (seconds, preemptions) of a replica that decodes a share; `is_cached`: it has the contexts already."""
    c, prompt = limits, round(launch.prompt_tokens)
    replica = Replica(times, pages, c.page_size, c.max_running, c.shares_prompts)
    for i, (done, length) in enumerate(share):
        replica.add(Response(SampleId(0, *divmod(i, launch.num_responses)), prompt, length, done))
    if is_cached:
        replica.run_until(1)  # the step that computes contexts
        replica.clock = 0.0
    replica.run_until(math.inf)
    return replica.clock, replica.preemptions


# ---- the planner -------------------------------------------------------------------------------------------------


@dataclass
class Track:
    """The known past of one kind of round."""

    size: int
    preemptions: int | None = None  # in the newest round
    rose_from: int | None = None  # before it, when it rose by more than RISE
    quiet: int = 0  # rounds without preemption, in a row
    lengths: list[list[int]] = field(default_factory=list)  # of the newest rounds
    slowness: dict[int, list[float]] = field(default_factory=dict)  # by size: measured over predicted seconds
    resize_seconds: float = 0.0  # of the newest change of the size within a round


class ParallelismPlanner:
    """Chooses the size of each round, from the reports of earlier rounds. (RollPacker, section 4.2)

    `profile` is needed by `predict`; with it the rule of the paper starts from the size that is predicted fastest,
    without it from `start`.
    """

    def __init__(self, config: "PlannerConfig", limits: EngineLimits, start: int, profile: Profile | None = None):
        assert start in limits.pages and (profile or config.rule != "predict")
        self.config, self.limits, self.start, self.sizes = config, limits, start, sorted(limits.pages)
        # Nothing is known of lengths at first: any is as likely.
        self.guess = [max(limits.max_response_tokens * i // 16, 1) for i in range(1, 17)]
        sizes = {n: profile.sizes[n] for n in limits.pages} if profile else {}
        self.times = {n: FittedTimes.of(measured, limits.page_size) for n, measured in sizes.items()}
        self.tracks: dict[str, Track] = {}
        # Of the open round: its launch, its size now, and at how many responses `choose_again` is due.
        self.launch, self.size, self.due = Launch(0, 0.0, 1), start, 0

    def choose(self, kind: str, launch: Launch) -> Choice:
        """Return the size of the next round of `kind`."""
        is_first = kind not in self.tracks
        track = self.tracks.setdefault(kind, Track(self.start))
        choice = RULES[self.config.rule](self, kind, launch, is_first)
        assert choice.size in self.sizes
        if choice.size != track.size:
            track.quiet, track.rose_from = 0, None
        track.size, self.size, self.launch = choice.size, choice.size, launch
        self.due = launch.num_sequences // 2 if self.config.within_round and kind == "long" else 0
        return choice

    def is_due(self, num_live: int) -> bool:
        """Whether to ask `choose_again` when so many responses run or wait: once they have halved."""
        return 0 < num_live <= self.due

    def choose_again(self, kind: str, live: Sequence[Sequence[int]]) -> Choice | None:
        """Return another size for the rest of the open round, or None: go on. (as PAT, arXiv 2605.23945)

        `live`: tokens so far of each response that runs or waits, by replica. Their ends are predicted from the lengths
        of earlier rounds. Another size computes their contexts again.
        """
        track, tokens = self.tracks[kind], [n for replica in live for n in replica]
        self.due = len(tokens) // 2
        if not tokens:  # all have ended since `is_due`; the round waits for their rewards
            return None
        ends, slowness, places = self._predict_ends(track, tokens), self._slowness(track), iter(range(len(tokens)))
        stay, predicted = [[next(places) for _ in replica] for replica in live], {}
        for n in self.sizes:
            owned = stay if n == self.size else assign_by_load(tokens, self.limits.num_ranks // n)
            shares = [[(tokens[i], ends[i]) for i in share] for share in owned]
            predicted[n] = slowness[n] * self._slowest(n, self.launch, shares, is_cached=n == self.size)
            predicted[n] += 0.0 if n == self.size else track.resize_seconds
        best = min(predicted, key=predicted.__getitem__)
        gain = 1 - predicted[best] / predicted[self.size]
        if best == self.size or gain < self.config.margin:
            return None
        reason = f"with {len(tokens)} responses left predicted to gain {gain:.1%} of the rest over {self.size}"
        self.size = best
        return Choice(best, reason, predicted)

    def _predict_ends(self, track: Track, tokens: Sequence[int]) -> list[int]:
        """Return the lengths that responses of so many tokens come to: the quantiles of earlier ones that were longer.

        Any of those with equally many tokens may be the longest, whatever its replica.
        """
        known, ends = self._known(track), [0] * len(tokens)
        anyhow = Random(0).sample(range(len(tokens)), len(tokens))
        for place, i in enumerate(sorted(anyhow, key=tokens.__getitem__)):
            longer = known[bisect_right(known, tokens[i]) :] or [self.limits.max_response_tokens]
            ends[i] = longer[(2 * place + 1) * len(longer) // (2 * len(tokens))]
        return ends

    def observe(self, kind: str, report: Report) -> None:
        """Take in the report of the round of the newest `choose`."""
        track = self.tracks[kind]
        before, now = track.preemptions, report.preemptions
        track.rose_from = before if before is not None and now > RISE * before else None
        track.preemptions, track.quiet = now, 0 if now else track.quiet + 1
        lengths = sorted(report.lengths)  # each rank lists what was aborted in an order of its own
        track.lengths = [*track.lengths, lengths][-RECENT_ROUNDS:]
        self.due = 0
        if report.resize_seconds is not None:
            track.resize_seconds = report.resize_seconds
        elif self.times:  # the seconds of two sizes would tell little of either
            expected = self._seconds(track.size, self.launch, lengths)
            known = track.slowness.setdefault(track.size, [])
            known[:] = [*known, max(report.seconds, 1e-9) / max(expected, 1e-9)][-PATIENCE:]

    def predict(self, kind: str, launch: Launch) -> dict[int, float]:
        """Return the seconds that a round would take, by size: simulated, times how wrong that was before."""
        track = self.tracks[kind]
        lengths, slowness = _resample(self._known(track), launch.num_sequences), self._slowness(track)
        return {n: slowness[n] * self._seconds(n, launch, lengths) for n in self.sizes}

    def _known(self, track: Track) -> list[int]:
        """Return the lengths of the newest rounds, the shortest first.

        Lengths of the other kind say little: a race cuts the longest off, for which a long round is made.
        """
        return sorted(n for lengths in track.lengths or [self.guess] for n in lengths)

    def _slowness(self, track: Track) -> dict[int, float]:
        """Return by which factor predictions are corrected, by size.

        A size has a correction of its own after RECENT_ROUNDS, half of it (in logarithms) before: one slow round is
        little reason to leave it. The rest is what was measured everywhere, for most errors are the machine's. After
        PATIENCE rounds at one size half of an error is taken to be that size's own, to the others' good: so a wrong
        profile is found out, by trying.
        """
        everything = [x for known in track.slowness.values() for x in known] or [1.0]
        others = median(everything)
        if any(len(known) >= PATIENCE for known in track.slowness.values()):
            others *= min(others, 1 / others) ** 0.5
        slowness = {}
        for n in self.sizes:
            known = track.slowness.get(n, [])
            own = median(known[-RECENT_ROUNDS:]) if known else others
            slowness[n] = own if len(known) >= RECENT_ROUNDS else (own * others) ** 0.5
        return slowness

    def _seconds(self, size: int, launch: Launch, lengths: Sequence[int]) -> float:
        """Return the seconds of a whole round, but for its correction."""
        dealt, replicas = Random(0).sample(list(lengths), len(lengths)), self.limits.num_ranks // size
        return self._slowest(size, launch, [[(0, n) for n in dealt[i::replicas]] for i in range(replicas)])

    def _slowest(self, size: int, launch: Launch, shares: Iterable[Share], is_cached: bool = False) -> float:
        """Return the seconds of the slowest replica: that of the most tokens, or that of the longest response."""
        busy = [tuple(share) for share in shares if share]
        most = max(busy, key=lambda share: sum(end - done for done, end in share))
        longest = max(busy, key=lambda share: max(end - done for done, end in share))
        given = self.times[size], self.limits.pages[size], self.limits, launch
        return max(simulate_replica(*given, share, is_cached)[0] for share in {most, longest})

    def state_dict(self) -> dict[str, dict]:
        return {kind: asdict(track) for kind, track in self.tracks.items()}

    def load_state_dict(self, state: dict[str, dict]) -> None:
        """Go on from a saved state. A size that is not allowed here becomes the next smaller one that is."""
        self.tracks = {kind: Track(**track) for kind, track in state.items()}
        for track in self.tracks.values():
            track.slowness = {int(n): ratios for n, ratios in track.slowness.items()}  # JSON made texts of the sizes
            track.size = max((n for n in self.sizes if n <= track.size), default=self.sizes[0])


def _resample(lengths: Sequence[int], count: int) -> list[int]:
    """Return `count` lengths with the quantiles of `lengths`."""
    ordered = sorted(lengths)
    return [ordered[(2 * i + 1) * len(ordered) // (2 * count)] for i in range(count)]


# ---- rules -------------------------------------------------------------------------------------------------------


def fixed(planner: ParallelismPlanner, kind: str, launch: Launch, is_first: bool) -> Choice:
    """Stay at rollout.tensor_parallel, the size that the run was started with."""
    return Choice(planner.start, "fixed")


def paper(planner: ParallelismPlanner, kind: str, launch: Launch, is_first: bool) -> Choice:
    """Double when preemptions rise by over 5 %, halve after four rounds without any. (Section 4.2)"""
    if is_first and planner.times:
        predicted = planner.predict(kind, launch)
        return Choice(min(predicted, key=predicted.__getitem__), "start: the profile's best", predicted)
    track, sizes = planner.tracks[kind], planner.sizes
    # Where ranks outnumber KV heads these are copied, and more ranks have no more pages together.
    pages = planner.limits.pages
    larger = [n for n in sizes if n > track.size and pages[n] > pages[track.size]]
    smaller = [n for n in sizes if n < track.size]
    if is_first:
        return Choice(track.size, "start: no profile")
    if track.rose_from is not None:
        rise = f"preemptions rose from {track.rose_from} to {track.preemptions}"
        return (
            Choice(larger[0], f"{rise}: doubled") if larger else Choice(track.size, f"{rise}: no size with more pages")
        )
    if track.quiet >= QUIET_ROUNDS and smaller:
        return Choice(smaller[-1], f"no preemption in {track.quiet} {kind} rounds: halved")
    return Choice(track.size, f"kept: {track.preemptions} preemptions")


def predict(planner: ParallelismPlanner, kind: str, launch: Launch, is_first: bool) -> Choice:
    """Take the size that is fastest by profile and lengths, but leave the current one only for a gain of `margin`.

    Differs from the paper: page pressure counts as the time that it costs, and so does the number of replicas.
    """
    predicted = planner.predict(kind, launch)
    best, current = min(predicted, key=predicted.__getitem__), planner.tracks[kind].size
    if is_first or best == current:
        return Choice(best, "predicted fastest", predicted)
    gain = 1 - predicted[best] / predicted[current]
    if gain < planner.config.margin:
        return Choice(current, f"kept: {best} would gain {gain:.1%}, under the margin", predicted)
    return Choice(best, f"predicted to gain {gain:.1%} over {current}", predicted)


RULES: dict[str, Callable[[ParallelismPlanner, str, Launch, bool], Choice]] = {
    "fixed": fixed,
    "paper": paper,
    "predict": predict,
}


@dataclass(frozen=True)
class PlannerConfig:
    rule: str = entry("fixed", "tensor-parallel size of each round", RULES)
    profile: str = option("", f"times measured by profiler.py; empty: {PROFILE_NAME} in the model folder")
    margin: float = option(0.05, "predict changes the size for a gain of this share of the time", min=0.0, max=0.9)
    within_round: bool = option(
        False, "predict also changes the size inside a long round, whenever half of its responses have ended"
    )


def refuse_within_round(config: PlannerConfig, stream: str) -> None:
    """Raise ConfigError when no size can be chosen inside a round. `stream`: its policy."""
    needs = {
        f"planner.rule = predict, not {config.rule}, which knows no step times": config.rule != "predict",
        f"stream.policy = off, not {stream}, which halves replicas of one size": stream != "off",
    }
    if config.within_round and any(needs.values()):
        missing = "; ".join(text for text, is_missing in needs.items() if is_missing)
        raise ConfigError(f"planner.within_round = true needs {missing}; set that, or planner.within_round = false")
