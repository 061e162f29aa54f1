"""Tensor-parallel size of the next round: fixed, by page pressure, or by predicted time. Pure, no torch.

(RollPacker, section 4.2.) Every rank feeds its own planner the same reports and comes to the same choice:

    choice = planner.choose(kind, launch)
    regroup to choice.size, play the round
    planner.observe(report)

One entry in RULES for each rule. State is kept apart for short and long rounds: the first run out of pages, the second
wait for their longest response.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import numpy as np

from config import ConfigError, entry, option, regular
from core import RoundPlan, SampleId
from policies.replica import Replica, Response

RISE = 1.05  # a rise of preemptions over this doubles (section 4.2)
QUIET_ROUNDS = 4  # so many rounds without preemption halve (section 4.2)
HISTORY = 3  # rounds of one kind whose lengths, and of one size whose measured over predicted times, count
PATIENCE = 20  # rounds at one size until others get the benefit of the doubt
PROFILE_NAME = "rollout_profile.json"


@dataclass(frozen=True, slots=True)
class Limits:
    """What the rollout has."""

    num_ranks: int
    pages: dict[int, int]  # of one replica, by the tensor-parallel sizes that are allowed
    page_size: int  # tokens
    max_running: int  # sequences of one replica that decode together
    max_response_tokens: int
    shares_prompts: bool = False  # responses share their prompt's pages, as on a GPU


@dataclass(frozen=True, slots=True)
class Launch:
    """What a round starts with."""

    num_sequences: int
    prompt_tokens: float  # of one prompt, on average
    num_responses: int  # sequences that share a prompt

    @classmethod
    def of(cls, plan: RoundPlan) -> "Launch":
        tokens = [len(visit.prompt.token_ids) for visit in plan.prompts]
        return cls(len(tokens) * plan.num_responses, sum(tokens) / len(tokens), plan.num_responses)


@dataclass(frozen=True, slots=True)
class Report:
    """What a round came to, over all replicas."""

    preemptions: int
    seconds: float  # of the slowest replica
    lengths: tuple[int, ...]  # response tokens of every sequence, aborted ones included


@dataclass(frozen=True, slots=True)
class Choice:
    """A decision and its reason, for the records."""

    size: int
    reason: str
    predicted: dict[int, float] = field(default_factory=dict)  # seconds of the round, by size


# ---- the offline profile -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SizeProfile:
    """What one replica of a tensor-parallel size can do, as measured."""

    pages: int
    decode: tuple[tuple[int, int, float], ...]  # (sequences, tokens of context each, seconds of a step)
    prefill: tuple[tuple[int, float], ...]  # (tokens of context, seconds of a token)

    @property
    def decode_windows(self) -> list[tuple[float, float, float]]:
        """(sequences, tokens of context in all, seconds of a step)"""
        return [(n, n * context, seconds) for n, context, seconds in self.decode]


@dataclass(frozen=True)
class Profile:
    """Measured prefill and decode times of a model on a machine, by tensor-parallel size."""

    made_on: dict[str, Any]  # what the times depend on: model, device, number of ranks, page size
    sizes: dict[int, SizeProfile]

    def save(self, path: Path) -> None:
        part = path.with_suffix(".part")
        part.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        part.replace(path)


REMEDY = "make it by profiler.py, started as this run is: with its settings and its ranks, by python or by torchrun"


def load_profile(path: Path, made_on: dict[str, Any], sizes: Sequence[int]) -> Profile:
    """Read a profile. Raises ConfigError when there is none, or one of other conditions."""
    profile = read_profile(path)
    if profile.made_on != made_on:
        raise ConfigError(f"{path}: made on {profile.made_on}, this run is on {made_on}; {REMEDY}")
    if missing := set(sizes) - profile.sizes.keys():
        raise ConfigError(f"{path}: no times for tensor-parallel sizes {sorted(missing)}; {REMEDY}")
    return profile


def read_profile(path: Path) -> Profile:
    """Read a profile, whatever it was made on. Raises ConfigError when there is none."""
    try:
        raw = json.loads(regular(path).read_text(encoding="utf-8"))
        by_size = {
            int(n): SizeProfile(p["pages"], tuple(map(tuple, p["decode"])), tuple(map(tuple, p["prefill"])))
            for n, p in raw["sizes"].items()
        }
        return Profile(dict(raw["made_on"]), by_size)
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the rollout profile ({error.strerror}); {REMEDY}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: not a rollout profile ({error}); {REMEDY}") from None


class Simulator:
    """Predicts how long one replica of a size takes: the engine, played with the profile's times."""

    response_seconds = 0.0

    def __init__(self, profile: SizeProfile, limits: Limits, pages: int):
        self.pages, self.limits = pages, limits
        self.weights, self.prefill_weights = fit_decode(profile.decode_windows), fit_prefill(profile.prefill)

    def decode(self, sequences: float, context: float, steps: int = 1) -> float:
        start, each, read = self.weights
        return steps * (start + sequences * each + read * (context + sequences * (steps - 1) / 2))

    def prefill(self, tokens: int) -> float:
        token, attend = self.prefill_weights
        return tokens * (token + tokens * attend)

    def run(self, launch: Launch, lengths: Sequence[int]) -> tuple[float, int]:
        """Return (seconds, preemptions) of decoding responses of `lengths`, a prompt's one after the other."""
        c, prompt = self.limits, round(launch.prompt_tokens)
        replica = Replica(self, self.pages, c.page_size, c.max_running, c.shares_prompts)
        for i, length in enumerate(lengths):
            replica.add(Response(SampleId(0, *divmod(i, launch.num_responses)), prompt, length))
        replica.run_until(math.inf)
        return replica.clock, replica.preemptions


def fit_decode(windows: Sequence[Sequence[float]]) -> list[float]:
    """Return the seconds of a decode step, for each sequence in it, and for each token that it reads.

    `windows`: (sequences, tokens of context in all, seconds of a step).
    """
    return fit([(1, n, tokens) for n, tokens, _ in windows], [seconds for *_, seconds in windows])


def fit_prefill(points: Sequence[tuple[int, float]]) -> list[float]:
    """Return the seconds of a token, and of each token of its context. `points`: (context, seconds of a token)."""
    return fit([(1, context) for context, _ in points], [seconds for _, seconds in points])


def fit(features: Sequence[tuple[float, ...]], seconds: Sequence[float]) -> list[float]:
    """Return a weight of at least 0 for each feature: least squares of the relative error, so that noise cancels."""
    x, used = np.array(features, np.float64) / np.array(seconds)[:, None], list(range(len(features[0])))
    while True:
        scale = np.abs(x[:, used]).max(0)
        weights = np.linalg.lstsq(x[:, used] / scale, np.ones(len(x)), rcond=None)[0] / scale
        if weights.min() >= 0:
            found = dict(zip(used, weights.tolist()))
            return [found.get(i, 0.0) for i in range(len(features[0]))]
        del used[int(np.argmin(weights * scale))]  # time does not fall with work: that was noise


# ---- the planner -------------------------------------------------------------------------------------------------


@dataclass
class Track:
    """What is known of one kind of round."""

    size: int
    preemptions: int | None = None  # in the newest round
    rose_from: int | None = None  # before it, when it rose by more than RISE
    quiet: int = 0  # rounds without preemption, in a row
    lengths: list[list[int]] = field(default_factory=list)  # of the newest rounds
    slowness: dict[int, list[float]] = field(default_factory=dict)  # by size: measured over predicted seconds


class ParallelismPlanner:
    """Chooses the size of each round and remembers what came of it. (RollPacker, section 4.2)

    `profile` is needed by `predict`; with it the rule of the paper starts from the size that is predicted fastest,
    without it from `start`.
    """

    def __init__(self, config: "PlannerConfig", limits: Limits, start: int, profile: Profile | None = None):
        assert start in limits.pages and (profile or config.rule != "predict")
        self.config, self.limits, self.start, self.sizes = config, limits, start, sorted(limits.pages)
        # Nothing is known of lengths at first: any is as likely.
        self.guess = [max(limits.max_response_tokens * i // 16, 1) for i in range(1, 17)]
        known = limits.pages.items() if profile else ()
        self.simulators = {n: Simulator(profile.sizes[n], limits, pages) for n, pages in known}
        self.tracks: dict[str, Track] = {}
        self.asked: Launch | None = None  # by the newest `choose`

    def choose(self, kind: str, launch: Launch) -> Choice:
        """Return the size of the next round of `kind`."""
        is_first = kind not in self.tracks
        track = self.tracks.setdefault(kind, Track(self.start))
        choice = RULES[self.config.rule](self, kind, launch, is_first)
        assert choice.size in self.sizes
        if choice.size != track.size:
            track.quiet, track.rose_from = 0, None
        track.size, self.asked = choice.size, launch
        return choice

    def observe(self, kind: str, report: Report) -> None:
        """Take in what became of the round of the newest `choose`."""
        track = self.tracks[kind]
        before, now = track.preemptions, report.preemptions
        track.rose_from = before if before is not None and now > RISE * before else None
        track.preemptions, track.quiet = now, 0 if now else track.quiet + 1
        lengths = sorted(report.lengths)  # each rank lists what was aborted in an order of its own
        track.lengths = [*track.lengths, lengths][-HISTORY:]
        if self.simulators:
            expected = self._seconds(track.size, self.asked, lengths)
            known = track.slowness.setdefault(track.size, [])
            known[:] = [*known, max(report.seconds, 1e-9) / max(expected, 1e-9)][-PATIENCE:]

    def predict(self, kind: str, launch: Launch) -> dict[int, float]:
        """Return the seconds that a round would take, by size: simulated, times how wrong that was before.

        A size has a correction of its own after HISTORY rounds, half of it (in logarithms) before: one slow round is
        little reason to leave it. The rest is what was measured everywhere, for most errors are the machine's. After
        PATIENCE rounds at one size half of an error is taken to be that size's own, to the others' good: so a wrong
        profile is found out, by trying.
        """
        track = self.tracks[kind]
        # Lengths of the other kind say little: a race cuts the longest off, for which a long round is made.
        lengths = _resample([n for r in track.lengths or [self.guess] for n in r], launch.num_sequences)
        everything = [x for known in track.slowness.values() for x in known] or [1.0]
        others = median(everything)
        if any(len(known) >= PATIENCE for known in track.slowness.values()):
            others *= min(others, 1 / others) ** 0.5
        seconds = {}
        for n in self.sizes:
            known = track.slowness.get(n, [])
            own = median(known[-HISTORY:]) if known else others
            slowness = own if len(known) >= HISTORY else (own * others) ** 0.5
            seconds[n] = slowness * self._seconds(n, launch, lengths)
        return seconds

    def _seconds(self, size: int, launch: Launch, lengths: Sequence[int]) -> float:
        """Return the seconds of the slowest replica: that of the most tokens, or that of the longest response."""
        dealt, replicas = Random(0).sample(list(lengths), len(lengths)), self.limits.num_ranks // size
        shares = [share for i in range(replicas) if (share := dealt[i::replicas])]
        slowest = {shares.index(max(shares, key=sum)), shares.index(max(shares, key=max))}
        return max(self.simulators[size].run(launch, shares[i])[0] for i in slowest)

    def state_dict(self) -> dict[str, Any]:
        return {kind: asdict(track) for kind, track in self.tracks.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state. A size that is not allowed here becomes the next smaller one that is."""
        self.tracks = {kind: Track(**track) for kind, track in state.items()}
        for track in self.tracks.values():
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
    """Double when preemptions rise by more than RISE, halve after QUIET_ROUNDS without any. (section 4.2)"""
    if is_first and planner.simulators:
        predicted = planner.predict(kind, launch)
        return Choice(min(predicted, key=predicted.get), "start: the profile's best", predicted)
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
    best, current = min(predicted, key=predicted.get), planner.tracks[kind].size
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
