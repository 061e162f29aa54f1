"""Which jobs of co-execution groups change places, since their phases take other seconds than when they came. Pure.

Beyond the paper (RollMux, arXiv 2512.11306), whose groups are static, and played on paper only. A job moves where
Algorithm 1 puts it now. It moves if its group no longer keeps the SLO of each member, or if that pays: nodes that
become free save more within a horizon than the nodes of the job cost while they wait for its new start, and the job is
so far ahead of its SLO that it has the time.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from policies.admission import Asked, MuxGroup, Prices, admit, alone


@dataclass(frozen=True)
class Regrouping:
    """What a move costs and how long it is thought to help."""

    moving_hours: float  # of a job that is stopped and starts elsewhere
    horizon_hours: float = 4.0  # for which groups are thought to stay as they are


@dataclass(frozen=True)
class Regrouped:
    groups: list[MuxGroup]
    moved: tuple[str, ...]  # jobs
    saved: float  # dollars an hour


def regroup(
    groups: Sequence[MuxGroup], prices: Prices, rule: Regrouping, ahead_hours: Mapping[str, float]
) -> Regrouped:
    """Return the groups, whose jobs are as they are now, after the moves that SLOs need and those that pay.

    `ahead_hours`: that each job has taken less than its SLO allows for the iterations that it has done.
    """

    def has_time(jobs: Iterable[str]) -> bool:
        return all(ahead_hours[job] >= rule.moving_hours for job in jobs)

    now, moved = [*groups], list[str]()
    while late := [i for i, group in enumerate(now) if group.delay_now()]:
        moves = [_moved(now, late[0], [job], prices) for job in now[late[0]].jobs]
        best = max(moves, key=lambda move: (has_time(move.moved), move.saved))
        now, moved = best.groups, [*moved, *best.moved]
    for name in [group.jobs[0].name for group in now]:  # a move may put others behind, but ends no other group
        at = next(i for i, group in enumerate(now) if any(job.name == name for job in group.jobs))
        for leaving in _leaving(now[at]):
            waiting = rule.moving_hours * sum(alone(job).cost(prices) for job in leaving)
            freed = _dollars(now, prices) - _dollars(_without(now, at, leaving), prices)
            if not has_time(job.name for job in leaving) or freed * rule.horizon_hours <= waiting:
                continue  # whatever their new places cost
            move = _moved(now, at, leaving, prices)
            if move.saved * rule.horizon_hours > waiting + 1e-6:
                now, moved = move.groups, [*moved, *move.moved]
                break
    return Regrouped(now, tuple(dict.fromkeys(moved)), _dollars(groups, prices) - _dollars(now, prices))


def _leaving(group: MuxGroup) -> Iterator[Sequence[Asked]]:
    """Yield the jobs of a group that may leave together: all, so that none of its nodes is needed, or one of them."""
    yield group.jobs
    if len(group.jobs) > 1:
        yield from ([job] for job in group.jobs)


def _moved(groups: Sequence[MuxGroup], at: int, leaving: Sequence[Asked], prices: Prices) -> Regrouped:
    """Return the groups with some jobs of one of them admitted anew."""
    after = _without(groups, at, leaving)
    for job in leaving:
        admit(job, after, prices).carry_out(after)
    return Regrouped(after, tuple(job.name for job in leaving), _dollars(groups, prices) - _dollars(after, prices))


def _without(groups: Sequence[MuxGroup], at: int, leaving: Sequence[Asked]) -> list[MuxGroup]:
    rest = groups[at].of(i for i, job in enumerate(groups[at].jobs) if job not in leaving)
    return [*groups[:at], *([rest] if rest.jobs else []), *groups[at + 1 :]]


def _dollars(groups: Sequence[MuxGroup], prices: Prices) -> float:
    return sum(group.cost(prices) for group in groups)
