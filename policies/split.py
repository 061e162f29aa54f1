"""How many ranks train while the others decode, by measured times. Pure. (ROLL Flash, Proposition 2)"""

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass

RECENT = 10  # steps of a run whose work counts
TRIAL = 3  # steps after which `overlap.train_ranks` = auto decides


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
    def of(cls, steps: Iterable[Work], ranks: int, depth: float) -> "SplitTimes":
        """Return the means over some steps. A token counts when it is decoded, though a later batch may train it."""
        w = Work(*map(sum, zip(*map(astuple, steps), strict=True)))
        generate = w.decode_seconds / max(w.decoded, 1) * w.tokens / w.samples
        longest = w.longest / w.batches * w.engine_seconds / max(w.engine_steps, 1)
        return cls(ranks, w.samples / w.batches, generate, w.train_seconds / w.samples, longest, longest / (depth + 1))

    @property
    def best_share(self) -> float:
        """The share of ranks that should train (beta*): training takes the bound of all work on all ranks."""
        train = self.samples * self.train
        return train / (self.samples * self.generate + self.ranks * self.tail + train)

    def step_seconds(self, train_ranks: float) -> float:
        """Return the bound of a step's seconds while so many ranks train: that of the slower side."""
        rollout = self.samples * self.generate / (self.ranks - train_ranks) + self.tail
        return max(rollout, self.samples * self.train / train_ranks)

    def best(self, possible: Sequence[int]) -> int:
        """Return the number of training ranks with the smallest bound."""
        return min(possible, key=self.step_seconds)

    def reason(self) -> str:
        """Return beta* and the times, for the console."""
        sample = f"a sample decodes {self.generate:.3g} s, trains {self.train:.3g} s"
        return f"beta* = {self.best_share:.2f} ({sample}; longest {self.longest:.3g} s)"
