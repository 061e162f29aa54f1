"""All orders in which jobs may take turns on one rollout node and one training node: what a round robin loses. Pure.

An order is a word of jobs that repeats for ever, the same on both nodes; a node waits for the job that is next.
(RollMux, arXiv 2512.11306, Theorem 1)
"""

import random
from collections.abc import Iterator, Sequence
from itertools import product

from policies.group import Member

TURNS = 24  # of a word; the second half is the steady state


def random_groups(seed: int, count: int, nodes: int = 1, most: int = 3) -> list[list[Member]]:
    """Return groups of 2 to `most` jobs whose phases take 1 to 20 seconds, on some of so many rollout nodes."""
    rng = random.Random(seed)
    return [
        [
            Member(
                f"job{i}",
                frozenset(rng.sample(range(nodes), rng.randint(1, nodes))),
                rng.randint(1, 20),
                rng.randint(1, 20),
            )
            for i in range(rng.randint(2, most))
        ]
        for _ in range(count)
    ]


def words(group: Sequence[Member], longest: int) -> Iterator[tuple[Member, ...]]:
    for length in range(1, longest + 1):
        yield from product(group, repeat=length)


def word_seconds(word: Sequence[Member]) -> float:
    """Return the seconds of a word in the steady state."""
    rolled, trained, ends = 0.0, 0.0, []
    ended = dict.fromkeys(word, 0.0)
    for _ in range(TURNS):
        for job in word:
            rolled = max(rolled, ended[job]) + job.rollout
            ended[job] = trained = max(trained, rolled) + job.train
        ends.append(trained)
    return (ends[-1] - ends[TURNS // 2 - 1]) / (TURNS - TURNS // 2)


def utilisation(word: Sequence[Member]) -> float:
    """Return the busy share of the rollout node and that of the training node, added."""
    return sum(job.alone for job in word) / word_seconds(word)


def best(group: Sequence[Member], longest: int, starves: bool) -> tuple[Member, ...]:
    """Return the word of at most so many turns that uses the nodes best. `starves`: it may leave jobs out."""
    return max((w for w in words(group, longest) if starves or {*group} <= {*w}), key=utilisation)
