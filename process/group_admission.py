"""Whether a job joins those that run on a server's workers, and where. The rule is `policies.admission.admit`."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from config import ConfigError
from policies.admission import Asked, MuxGroup, Prices, admit


@dataclass(frozen=True)
class Resident:
    """A job that runs, and the numbers of its workers."""

    asked: Asked
    train: tuple[int, ...]
    rollout: tuple[int, ...]


def decide(
    job: Asked, residents: Sequence[Resident], num_train: int, num_rollout: int
) -> tuple[tuple[int, ...], tuple[int, ...], str]:
    """Return the training and rollout workers of a job, and why those. Raises ConfigError when it cannot run now."""
    groups = {train: [r for r in residents if r.train == train] for train in sorted({r.train for r in residents})}
    fitting = [train for train in groups if len(train) == job.train_nodes and not _shares(train, groups)]
    muxed = [
        MuxGroup(len(train), tuple(r.asked for r in groups[train]), tuple(frozenset(r.rollout) for r in groups[train]))
        for train in fitting
    ]
    found = admit(job, muxed, replace(Prices(), host_gib=math.inf))  # one machine has one memory, which mux.py counts
    others = "".join(f"; not with {_names(groups[fitting[i]])}: {why}" for i, why in found.refused.items())
    free = [i for i in range(num_rollout) if not any(i in r.rollout for r in residents)]
    if found.group is None:
        idle = [i for i in range(num_train) if not any(i in train for train in groups)]
        train, had, why = tuple(idle[: job.train_nodes]), frozenset[int](), "a group of its own"
    else:
        train, had = fitting[found.group], muxed[found.group].rollout_nodes
        why = f"with {_names(groups[train])}, so that all keep their SLOs"
    place = found.after.places[-1]
    rollout = (*sorted(place & had), *free[: len(place - had)])
    if len(train) < job.train_nodes or len(rollout) < job.rollout_nodes:
        raise ConfigError(
            f"{job.name} is not admitted, too few workers are free: {len(train)} of {job.train_nodes} to train and "
            f"{len(rollout)} of {job.rollout_nodes} to decode{others}"
        )
    return train, rollout, why + others


def _shares(train: tuple[int, ...], groups: Mapping[tuple[int, ...], Sequence[Resident]]) -> bool:
    """Whether a group has workers in common with another, as a listed job that goes on has: its rule knows one."""
    mine, *others = (
        {*(("train", i) for i in group), *(("rollout", i) for r in groups[group] for i in r.rollout)}
        for group in sorted(groups, key=lambda group: group != train)
    )
    return any(mine & other for other in others)


def _names(residents: Sequence[Resident]) -> str:
    return ", ".join(resident.asked.name for resident in residents)
