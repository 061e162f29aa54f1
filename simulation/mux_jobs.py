"""Jobs that come to a cluster: the paper's mixes, and how their phases change. Pure. (RollMux, arXiv 2512.11306)

Not in the paper, and so assumed here: a job has one rollout and one training node, its memory fits, and lengths of jobs
are lognormal.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from policies.admission import Asked, asked

SECONDS = {"S": ((50, 100), (25, 50)), "M": ((100, 200), (50, 100)), "L": ((200, 300), (100, 200))}  # Table 6
HEAVY = {"S": (100, 200), "M": (200, 400), "L": (400, 600)}  # the longer phase of jobs that have one
MIXES = {"BL": ("BL",), "RH": ("RH",), "TH": ("TH",), "Mixed": ("BL", "RH", "TH")}  # balanced; one phase is heavy
PRODUCTION = {  # seconds of an iteration (Figure 2); S: one turn, M: several
    **{"7B-8K-S": 247, "8B-8K-M": 431, "8B-16K-M": 822, "14B-8K-S": 436, "4B-4K-M": 173, "4B-16K-M": 676},
    **{"32B-8K-S": 539, "8B-32K-M": 1448, "7B-4K-S": 158, "4B-8K-M": 349},
}
TURNS = {"S": (1.0, 1.0), "M": (2.5, 6.0)}  # seconds of a rollout over those of its training: jobs A, D and E
SPREAD = 0.95  # of jobs' lengths, in natural logarithms: the longest of 300 is 10 times the mean, as in section 7.5


@dataclass(frozen=True)
class Arrival:
    hour: float
    hours: float  # that the job takes alone
    job: Asked
    growth: float = 0.0  # of its phases' seconds, from its first iteration to its last
    recorded: tuple[Sequence[float], Sequence[float]] = ((), ())  # seconds of rollouts and of trainings, if they differ

    def now(self, done: float) -> Asked:
        """Return the job as it is after a share of its iterations."""
        longer = 1 + self.growth * done
        return replace(self.job, rollout=self.job.rollout * longer, train=self.job.train * longer)


def phases(kind: str, rng: random.Random) -> tuple[float, float]:
    """Draw the seconds of rollout and training of a job of MIXES, or of PRODUCTION."""
    if kind in PRODUCTION:
        ratio = rng.uniform(*TURNS[kind[-1]])
        return PRODUCTION[kind] * ratio / (1 + ratio), PRODUCTION[kind] / (1 + ratio)
    size = rng.choice("SML")
    (both, light), heavy = SECONDS[size], HEAVY[size]
    rollout, train = {"BL": (both, both), "RH": (heavy, light), "TH": (light, heavy)}[kind]
    return rng.uniform(*rollout), rng.uniform(*train)


def arrivals(
    kinds: Sequence[str],
    count: int,
    seed: int,
    slo: tuple[float, float] = (1.0, 2.0),
    span: float = 580.0,
    mean: float = 14.4,
    by_day: bool = False,
) -> list[Arrival]:
    """Return jobs that come within `span` hours and take `mean` hours each, alone: by default those of section 7.5.

    With `by_day` they come from 9 to 19 o'clock on working days, from a Monday on.
    """
    rng = random.Random(f"{' '.join(kinds)} {seed}")
    days, found = [day for day in range(round(span / 24)) if day % 7 < 5], []
    for i in range(count):
        job = Asked(f"job{i}", *phases(rng.choice(kinds), rng), rng.uniform(*slo))
        hour = 24 * rng.choice(days) + rng.uniform(9, 19) if by_day else rng.uniform(0.0, span)
        found.append(Arrival(hour, rng.lognormvariate(0.0, SPREAD), job))
    scale = mean * count / sum(arrival.hours for arrival in found)
    return sorted((replace(a, hours=a.hours * scale) for a in found), key=lambda arrival: arrival.hour)


def by_quantile(quantile: float) -> Callable[[Arrival], Asked]:
    """Return a plan: jobs by this quantile of their recorded phases."""
    return lambda arrival: asked(arrival.job.name, arrival.job.slo, *arrival.recorded, quantile)


def drifting(jobs: Sequence[Arrival], seed: int, low: float, high: float) -> list[Arrival]:
    """Return jobs whose phases grow by a share between these two, or shrink where it is below 0."""
    rng = random.Random(f"drift {seed}")
    return [replace(arrival, growth=rng.uniform(low, high)) for arrival in jobs]


def varied(jobs: Sequence[Arrival], seed: int, count: int = 200) -> list[Arrival]:
    """Return jobs with recorded phases, whose means are the jobs' own seconds. Some jobs vary little, others much.

    Rollouts are lognormal, as their longest responses are, and trainings vary half as much.
    """
    rng, found = random.Random(f"varied {seed}"), []
    for arrival in jobs:
        sigma = rng.uniform(0.05, 0.5)
        drawn = [
            [mean * rng.lognormvariate(-(s**2) / 2, s) for _ in range(count)]
            for mean, s in ((arrival.job.rollout, sigma), (arrival.job.train, sigma / 2))
        ]
        job = replace(arrival.job, rollout=fmean(drawn[0]), train=fmean(drawn[1]))
        found.append(replace(arrival, job=job, recorded=(drawn[0], drawn[1])))
    return found
