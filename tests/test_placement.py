"""Work spread over ranks: balanced, complete, and moved only when a replica runs dry."""

import itertools
from random import Random

import pytest

from core import SampleId, VisitId
from policies.placement import MARGIN, Placement, assign_by_load, frees, tail_replicas


def random_loads(rng: Random, most: int) -> list[int]:
    return [rng.choice((1, 5, rng.randint(0, 1000))) for _ in range(rng.randint(0, most))]


def test_every_item_goes_to_one_rank_and_loads_are_balanced() -> None:
    rng = Random(0)
    for _ in range(300):
        loads, ranks = random_loads(rng, 60), rng.randint(1, 9)
        shares = assign_by_load(loads, ranks)
        assert len(shares) == ranks and sorted(i for share in shares for i in share) == list(range(len(loads)))
        totals = [sum(loads[i] for i in share) for share in shares]
        assert max(totals) - min(totals) <= max(loads, default=0)
        assert shares == assign_by_load(list(loads), ranks)


def test_the_heaviest_share_is_within_graham_of_the_best_possible() -> None:
    rng = Random(1)
    for _ in range(60):
        loads, ranks = random_loads(rng, 7), rng.randint(2, 3)
        best = min(
            max(sum(load for load, owner in zip(loads, owners, strict=True) if owner == r) for r in range(ranks))
            for owners in itertools.product(range(ranks), repeat=len(loads))
        )
        heaviest = max(sum(loads[i] for i in share) for share in assign_by_load(loads, ranks))
        assert best <= heaviest <= best * (4 / 3 - 1 / (3 * ranks)) + 1e-9  # (Graham 1969, theorem 2)


def test_equal_loads_are_shared_in_order() -> None:
    assert assign_by_load([5] * 6, 3) == [[0, 3], [1, 4], [2, 5]]
    assert assign_by_load([1, 9, 5, 4], 2) == [[1, 0], [2, 3]]
    assert assign_by_load([], 2) == [[], []]


def test_what_ranks_hold_already_counts() -> None:
    assert assign_by_load([3, 3, 3], 3, held=[9, 0, 4]) == [[], [0, 1], [2]]
    assert assign_by_load([5, 1], 2, held=[4, 0]) == [[1], [0]]


# ---- sequences on replicas ---------------------------------------------------------------------------------------


def prompts_of(shares: list[list[SampleId]]) -> list[list[int]]:
    return [list(dict.fromkeys(id.prompt for id in share)) for share in shares]


def test_groups_stay_together_and_expected_lengths_balance_but_do_not_order() -> None:
    placement = Placement(2)
    ids = [VisitId(0, i) for i in range(5)]
    shares = placement.launch(ids, 3, [1.0, 9.0, 4.0, 5.0, 7.0])
    assert shares == [[(0, i, r) for i in share for r in range(3)] for share in ([1, 2], [0, 3, 4])]
    assert [list(live) for live in placement.live] == shares
    assert placement.launch([VisitId(0, 9)], 3, [1.0]) == [[(0, 9, r) for r in range(3)], []]  # as loads 39 = 39
    assert placement.launch([VisitId(1, 9)], 3, [1.0]) == [[], [(1, 9, r) for r in range(3)]]


def test_responses_are_spread_where_prompts_would_leave_replicas_without_work() -> None:
    placement = Placement(3)
    shares = placement.launch([VisitId(0, 0), VisitId(0, 1)], 3, [5.0, 1.0], spread=True)
    assert shares == [[(0, 0, 0), (0, 1, 0)], [(0, 0, 1), (0, 1, 1)], [(0, 0, 2), (0, 1, 2)]]
    assert [sum(live.values()) for live in placement.live] == [6.0, 6.0, 6.0]


def test_newcomers_of_unknown_length_are_spread_like_the_others() -> None:
    placement = Placement(2)
    placement.launch([VisitId(0, i) for i in range(4)], 2, [100.0] * 4)
    placement.remove([SampleId(0, 0, 0), SampleId(0, 0, 1)])
    assert prompts_of(placement.launch([VisitId(0, i) for i in range(5, 10)], 2)) == [[5, 6, 8], [7, 9]]


def test_with_nothing_known_prompts_are_dealt_in_turn() -> None:
    shares = Placement(3).launch([VisitId(0, i) for i in range(7)], 4)
    assert prompts_of(shares) == [[0, 3, 6], [1, 4], [2, 5]]


def test_sequences_are_dealt_anew_over_replicas_by_their_tokens() -> None:
    placement = Placement(2)
    ids = [SampleId(0, i, r) for i in (0, 1) for r in (0, 1)]
    assert placement.deal(dict(zip(reversed(ids), (3.0, 9.0, 5.0, 4.0)))) == [[ids[2], ids[3]], [ids[1], ids[0]]]
    assert placement.num_live == 4 and placement.live[0] == {ids[2]: 9.0, ids[3]: 3.0}
    assert Placement(3).deal({ids[0]: 1.0}) == [[ids[0]], [], []]


@pytest.mark.parametrize("seed", range(50))
def test_a_dry_replica_gets_its_share_and_nothing_is_lost(seed: int) -> None:
    rng = Random(seed)
    placement = Placement(rng.randint(1, 6))
    placement.launch([VisitId(0, i) for i in range(rng.randint(1, 40))], rng.randint(1, 8))
    everyone = [id for live in placement.live for id in live]
    gone = {id for id in everyone if rng.random() < id.prompt / 40}
    placement.remove([*gone, SampleId(7, 7, 7)])
    before = [list(live) for live in placement.live]
    counts = [len(live) for live in before]
    moves = placement.handovers()
    after = [list(live) for live in placement.live]
    assert sorted(id for live in after for id in live) == sorted(set(everyone) - gone)
    for id, source, target in moves:
        assert id in before[source] and id in after[target]
    assert len({id for id, _, _ in moves}) == len(moves)
    if max(counts) - min(counts) >= MARGIN and 2 * min(counts) <= max(counts):
        assert moves and max(map(len, after)) - min(map(len, after)) <= 1
        for old, new in zip(before, after, strict=True):
            assert old[: len(new)] == new[: len(old)]  # the oldest stay where they are
    else:
        assert not moves


@pytest.mark.parametrize(
    ("live", "room", "replicas", "expected"),
    [(0, 8, 4, 1), (1, 8, 4, 1), (8, 8, 4, 1), (9, 8, 4, 2), (31, 8, 4, 4), (40, 8, 4, 4), (5, 1, 3, 3), (3, 8, 1, 1)],
)
def test_a_tail_goes_on_with_as_few_replicas_as_have_room(live: int, room: int, replicas: int, expected: int) -> None:
    assert tail_replicas(live, room, replicas) == expected


def test_handovers_and_shrinking_choose_as_a_look_at_all_replicas_would() -> None:
    rng = Random(4)
    for _ in range(100):
        count = rng.randint(2, 9)
        placement = Placement(count)
        placement.launch([VisitId(0, i) for i in range(rng.randint(1, 30))], rng.randint(1, 4))
        gone = [id for live in placement.live[1:] for id in live if rng.random() < 0.8]
        assert {id for ids in placement.by_replica(gone).values() for id in ids} == {*gone}
        placement.remove(gone)
        counts = [len(live) for live in placement.live]
        for _, source, target in placement.handovers():
            assert source == counts.index(max(counts)) and target == counts.index(min(counts))
            counts[source], counts[target] = counts[source] - 1, counts[target] + 1
        keep = rng.randint(1, count)
        counts = counts[:keep]
        for _, source, target in placement.shrink(keep):
            assert source >= keep and target == counts.index(min(counts))
            counts[target] += 1
        assert counts == [len(live) for live in placement.live] and sum(counts) == placement.num_live
        assert all(id in placement.live[place] for id, place in placement.place.items())


def test_a_tail_leaves_workers_on_which_another_job_can_begin() -> None:
    assert frees({0, 1}, [[1, 2], [2, 3]]) and frees(set(), [[0]])
    assert not frees({0, 1}, [[1, 2], [0]]) and not frees({0, 1}, [])
