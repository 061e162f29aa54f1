"""Replicas whose rows draw several tokens in a step, because they draft them. Pure.

How many tokens a row drafts is chosen by the rule of real runs (`policies.drafts.choose`). The model: a response has
its text of older weights; a token differs from it with a given chance, and after that the row drafts nothing until its
text agrees with some older text again. Rates are known here; a real run has to learn them.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

from config import ConfigError, option
from core import SampleId
from policies.drafts import MOST, choose
from policies.replica import Replica
from simulation.costs import Costs


@dataclass(frozen=True)
class DraftsConfig:
    most: int = option(
        0, "tokens that a row drafts in a step of a round without a race, at most; 0: none", min=0, max=MOST
    )
    agreement: float = option(
        0.996, "chance that weights which are one update older draw the same token", above=0.0, max=1.0
    )
    lag: float = option(1.0, "updates since the older text was drawn", min=0.0)
    known: float = option(1.0, "share of each response that the older text reaches", min=0.0, max=1.0)
    regain: float = option(
        32.0, "tokens after a difference, in the mean, until some older text agrees again; 0: none does", min=0.0
    )

    @property
    def rate(self) -> float:
        """The chance that a drafted token is right."""
        return min(self.agreement**self.lag, 1 - 1e-9)


def check_drafts(config: DraftsConfig, others: Mapping[str, bool]) -> None:
    """Raise ConfigError on settings without effect, and on `others` that are on but not played with drafts."""
    if not config.most and config != DraftsConfig():
        raise ConfigError(
            "[drafts] has no effect with drafts.most = 0; give the most tokens of a draft, or leave it out"
        )
    for rule in (rule for rule, is_on in others.items() if config.most and is_on):
        raise ConfigError(f"drafts.most = {config.most}: the simulator plays no drafts with {rule}")


class DraftingReplica(Replica):
    """A replica that goes on step by step. A row that has drawn n drafted tokens is as if admitted n steps earlier."""

    def __init__(self, config: DraftsConfig, random: Random, costs: Costs, *given: Any):
        """`given`: the arguments of `Replica` behind its step times."""
        super().__init__(costs, *given)
        self.config, self.costs, self.rng = config, costs, np.random.default_rng(random.getrandbits(64))
        self.agrees: dict[SampleId, bool] = {}
        self.reach = config.rate ** np.arange(1, config.most + 1)
        self.drafted = self.accepted = 0

    def next_event(self) -> float:
        """Return the next iteration, if anything decodes: how far a row gets is drawn as it goes."""
        return self.iteration + 1 if super().next_event() < math.inf else math.inf

    def _advance(self, iteration: int) -> None:
        if self.new:  # a step that computes contexts drafts nothing
            super()._advance(iteration)
            return
        c, rows = self.config, [*self.running.values()]
        drawn = np.array([s.done + self.iteration - s.start for s in rows])
        length = np.array([s.length for s in rows])
        agrees = np.array([self.agrees.setdefault(s.id, True) for s in rows])
        left = np.where(agrees, np.minimum(length * c.known - drawn, length - drawn - 1), 0)
        if self.num_pages - self.pages_used < len(rows):
            left[:] = 0  # nobody is preempted for a draft
        reach = np.where(np.arange(1, c.most + 1) <= left[:, None], self.reach, 0.0)
        context = self.base + len(rows) * self.iteration
        tokens = np.arange(reach.size + 1)
        drafted = choose(reach, len(rows), self.times.decode(len(rows), context) + self.costs.beside(len(rows), tokens))
        # Tokens that older text and new have in common from here on.
        common = np.floor(np.log1p(-self.rng.random(len(rows))) / np.log(c.rate))
        accepted = np.minimum(common, drafted).astype(int)
        again = self.rng.random(len(rows)) * c.regain < 1 if c.regain else np.zeros(len(rows), bool)
        agrees = np.where(agrees, common > drafted, again)
        self.agrees.update(zip((s.id for s in rows), agrees.tolist(), strict=True))
        plain = self.plain
        super()._advance(iteration)
        if drafted.any():  # not the step time that others are fitted to: rounds.py leaves it out too
            self.plain = plain
        self._spend(float(self.costs.beside(len(rows), drafted.sum())))
        for i in accepted.nonzero()[0]:
            self._jump(rows[i].id, int(accepted[i]))
        self.drafted, self.accepted = self.drafted + int(drafted.sum()), self.accepted + int(accepted.sum())

    def _jump(self, id: SampleId, tokens: int) -> None:
        """Let a row have drawn more tokens than the steps that it took."""
        sequence = self.running[id]
        self._hold(sequence, -1)
        sequence.start -= tokens
        self._hold(sequence, 1)
        self.decoded += tokens
        self._expect(sequence)
        self.has_begun = False  # it ends earlier


def drafts_record(replicas: Iterable[Replica]) -> dict[str, dict[str, int]]:
    """Return the tokens that were drafted and accepted in a round, if it had drafts."""
    drafting = [each for each in replicas if isinstance(each, DraftingReplica)]
    totals = {"drafted": sum(r.drafted for r in drafting), "accepted": sum(r.accepted for r in drafting)}
    return {"drafts": totals} if drafting else {}
