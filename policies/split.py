"""How many ranks train while the others decode, by measured times. Pure. (ROLL Flash, Proposition 2)"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass

RECENT = 10  # steps of a run whose work counts
TRIAL = 3  # steps on a number of ranks after which `overlap.train_ranks` = auto decides


@dataclass(frozen=True)
class Work:
    """What all ranks did in one or more steps of an endless rollout: sums, except where it says otherwise."""

    batches: int
    samples: int  # trained
    tokens: int  # of their responses, and of those that were stopped or dropped
    longest: float  # tokens of each batch's longest response
    decoded: int  # tokens
    decode_seconds: float
    train_seconds: float
    engine_steps: int  # of the rank with the most
    engine_seconds: float  # of the slowest rank


@dataclass(frozen=True)
class SplitTimes:
    """The times that decide. The paper's symbols are in brackets; a worker there is a rank here."""

    ranks: int  # that train or decode (K)
    samples: float  # of a batch (N)
    generate: float  # seconds of a rank to decode a sample, on average (mu_gen)
    train: float  # seconds of a rank to train a sample, all its epochs together, on average (E mu_train)
    longest: float  # seconds of a batch's longest response, on average (L_gen)
    tail: float  # seconds of a step that decode nothing but the longest: L_gen / (alpha + 1)

    @classmethod
    def of(cls, steps: Iterable[Work], ranks: int, spread: float) -> "SplitTimes":
        """Return the means over some steps. A token counts when it is decoded, though a later batch may train it.

        `spread`: as in `OverlapConfig`.
        """
        w = Work(*map(sum, zip(*map(astuple, steps), strict=True)))
        generate = w.decode_seconds / max(w.decoded, 1) * w.tokens / w.samples
        longest = w.longest / w.batches * w.engine_seconds / max(w.engine_steps, 1)
        return cls(ranks, w.samples / w.batches, generate, w.train_seconds / w.samples, longest, longest / spread)

    @property
    def best_share(self) -> float:
        """The share of ranks that should train (beta*): then neither side takes longer than all ranks in turns."""
        train = self.samples * self.train
        return train / (self.samples * self.generate + self.ranks * self.tail + train)

    def step_seconds(self, train_ranks: float) -> float:
        """Return the bound of a step's seconds while so many ranks train: that of the slower side."""
        rollout = self.samples * self.generate / (self.ranks - train_ranks) + self.tail
        return max(rollout, self.samples * self.train / train_ranks)

    def best(self, possible: Sequence[int]) -> int:
        """Return the number of training ranks with the smallest bound."""
        return min(possible, key=self.step_seconds)


class SplitPolicy:
    """Measures the steps of an endless rollout, and says how many ranks should train; where it may, it chooses."""

    def __init__(self, ranks: int, spread: float, possible: Sequence[int], now: int, is_auto: bool, start: int = 0):
        """`spread`: as in `OverlapConfig`; `now`: the number of ranks that train; `is_auto`: another one may be chosen;
        `start`: step of the first.
        """
        self.ranks, self.spread, self.possible, self.is_auto = ranks, spread, possible, is_auto
        self.start, self.decides = start, start + TRIAL  # steps: with so many ranks since, and when it decides
        self.now = self.chosen = now
        self.work = deque[Work](maxlen=RECENT)

    def state_dict(self) -> dict[str, int]:
        return {"ranks": self.ranks, "train_ranks": self.chosen, "start": self.start}

    @property
    def moves(self) -> bool:
        """Whether another number of ranks is to train from here on."""
        return self.chosen != self.now

    def observe(self, work: Work) -> SplitTimes:
        """Take in a step; return the times over the last ones."""
        self.work.append(work)
        return SplitTimes.of(self.work, self.ranks, self.spread)

    def review(self, step: int) -> str:
        """Return the advice of the last steps, for the console; choose after the first ones."""
        t = SplitTimes.of(self.work, self.ranks, self.spread)
        best = t.best(self.possible)
        if self.is_auto and step == self.decides:
            self.chosen = best
        advice = "" if best == self.now else f", from now on {best}" if self.moves else f", better {best}"
        times = f"sample: decode {t.generate:.3g} s, train {t.train:.3g} s; longest {t.longest:.3g} s"
        return f"{self.now} of {self.ranks} ranks train{advice}: beta* = {t.best_share:.2f} ({times})"
