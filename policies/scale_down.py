"""When half of the replicas leave the rollout to train what is complete. Pure, no torch. (RollPacker, section 4.4)

Every rank feeds its copy with the same progress after each window, so all come to the same decision:

    policy.begin(kind)                    # whether replicas may leave this round at all
    decision = policy.observe(progress)   # None, or how many replicas go on decoding, and why
    policy.close(lengths)                 # at the end of such a round: the lengths that it came to
"""

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate

from config import ConfigError, option
from policies.step_times import StepTimes

HISTORY = 8192  # responses whose lengths are remembered
EVERY = 0.05  # step between the shares at which the policy decides (section 4.4)


@dataclass(frozen=True)
class StreamConfig:
    # Off by default: what is streamed depends on time, so runs of one seed differ by rounding.
    policy: str = option(
        "off",
        "off; fixed (scale down once fixed_share of the responses is complete); paper (between first and last, when "
        "the rest fits the remaining memory); estimate (as paper, and only when that makes the step shorter)",
        choices=("off", "fixed", "paper", "estimate"),
    )
    first: float = option(
        0.2, "smallest share of complete responses at which half of the replicas may leave", min=0, max=1
    )
    last: float = option(0.5, "largest share at which they may leave", min=0, max=1)
    fixed_share: float = option(0.3, "share of complete responses at which policy = fixed scales down", min=0, max=1)


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a round stands after a window."""

    total: int  # responses that the round will train
    ended: Collection[int]  # tokens of those that have ended
    live: Sequence[int]  # tokens so far of those that have not
    prompt_tokens: int  # tokens of a prompt, on average
    replicas: int
    token_seconds: float  # in which all ranks together train a token


@dataclass(frozen=True, slots=True)
class ScaleDown:
    """What is decided, and the projections it rests on, for the records."""

    replicas: int  # that go on decoding
    at: float  # share of responses that was complete
    peak_tokens: float  # projected tokens in their pages
    rest_seconds: float  # projected until the rollout ends
    seconds_saved: float  # projected for the whole step


def refuse_dynamic_sampling(config: StreamConfig, dynamic_sampling: bool) -> None:
    if config.policy != "off" and dynamic_sampling:
        raise ConfigError(
            f"stream.policy = {config.policy} has no effect with scheduler.dynamic_sampling, which may still drop a "
            "complete group; take stream.policy = off"
        )


def replicas_together(shard: int, size: int) -> int:
    """Return how many replicas of `size` ranks each stay or leave together, so that no shard group is split."""
    return math.lcm(shard, size) // size


def half(replicas: int, together: int) -> int:
    """Return how many replicas go on when half of them leave, rounded down; 0: that would split a shard group."""
    keep = replicas // 2
    return 0 if keep % together or replicas % together else keep


class StreamPolicy:
    """Tries at each milestone, scales down at most once in a step. It is told to `begin` each round."""

    def __init__(
        self, config: StreamConfig, times: StepTimes, limit: int, shard_replicas: int = 1, switch: float = 3.0
    ):
        """`limit`: most tokens of a response; `switch`: seconds from the decision to the first gradient."""
        self.config, self.times, self.limit = config, times, limit
        self.shard_replicas, self.switch = shard_replicas, switch
        self.history: deque[int] = deque(maxlen=HISTORY)
        self._sorted: list[int] = []
        self._above: list[float] = []  # sums of the i longest
        self.milestone, self.is_done = 0.0, True  # no round is open

    def begin(self, kind: str) -> bool:
        """Be ready for a round; return whether replicas may leave it: only one that waits for every response."""
        self.milestone = self.config.fixed_share if self.config.policy == "fixed" else self.config.first
        self.is_done = self.config.policy == "off" or kind != "long"
        return not self.is_done

    def close(self, lengths: Sequence[int]) -> None:
        """End a round that replicas might leave: remember what its responses came to."""
        self.is_done = True
        self.history.extend(lengths)
        self._sorted = sorted(self.history)
        self._above = [0, *accumulate(reversed(self._sorted))]

    def state_dict(self) -> dict:
        return {"lengths": list(self.history), "switch": self.switch}

    def load_state_dict(self, state: dict) -> None:
        self.close(state["lengths"])
        self.switch = state["switch"]

    def is_due(self, completed: int, total: int) -> bool:
        """Whether `observe` would look further than at how many of the responses are complete."""
        return not self.is_done and completed / total >= self.milestone

    def observe(self, progress: Progress) -> ScaleDown | None:
        """Decide after a window. Algorithm 1 of the paper; `estimate` adds our own question whether it pays."""
        p, share = progress, len(progress.ended) / progress.total
        if not self.is_due(len(p.ended), p.total):
            return None
        if self.config.policy != "fixed":
            if share > self.config.last:
                self.is_done = True
                return None
            while self.milestone <= share:
                self.milestone += EVERY
        keep = half(p.replicas, self.shard_replicas)
        if not keep:
            return None
        peak = sum(self.expected(tokens) + p.prompt_tokens for tokens in p.live)
        rest, saved = self.project(p, keep)
        fits = peak <= keep * self.times.capacity
        if self.config.policy != "fixed" and not fits:
            return None
        if self.config.policy == "estimate" and (saved <= 0 or not self.history):  # with no lengths it is a guess
            return None
        self.is_done = True
        return ScaleDown(keep, share, peak, rest, saved)

    def expected(self, tokens: int) -> float:
        """Return the mean length of past responses that were longer than `tokens`."""
        longer = len(self._sorted) - bisect_right(self._sorted, tokens)
        return self._above[longer] / longer if longer else self.limit

    def project(self, progress: Progress, keep: int) -> tuple[float, float]:
        """Return the seconds that `keep` replicas need for the rest, and by how many the step gets shorter by that."""
        p, freed = progress, (progress.replicas - keep) / progress.replicas
        tokens = sum(p.ended) + sum(map(self.expected, p.live)) + (len(p.ended) + len(p.live)) * p.prompt_tokens
        before, after = self._rest(p, p.replicas), self._rest(p, keep) + self.switch
        trained = min(freed * max(after - self.switch, 0.0), tokens * p.token_seconds)
        return after, before - after + trained

    def _rest(self, progress: Progress, replicas: int) -> float:
        """Seconds until less than one response is expected to run still, decoded by `replicas`."""
        seconds, step, size = 0.0, 0, 16
        while step < self.limit:
            running = sum(self._outlives(tokens, tokens + step) for tokens in progress.live)
            if running < 0.5:
                break
            each = max(running / replicas, 1.0)
            mean = sum(progress.live) / max(len(progress.live), 1) + progress.prompt_tokens + step
            seconds += size * self.times.decode(each, each * mean)
            step, size = step + size, size * 2 if size < 1024 else size
        return seconds

    def _outlives(self, tokens: int, later: int) -> float:
        """Probability that a response of `tokens` grows beyond `later`."""
        if later >= self.limit:
            return 0.0
        count = len(self._sorted)
        longer = count - bisect_right(self._sorted, tokens)
        return (count - bisect_right(self._sorted, later)) / longer if longer else 1.0
