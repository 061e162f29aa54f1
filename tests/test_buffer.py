"""The buffer: every sample comes out once, in order, whoever takes it; copies that were apart agree again."""

from random import Random

import pytest

from buffer import Batch, SampleBuffer
from core import Example, SampleId, VisitId

Groups = dict[VisitId, Batch]


def example(visit: VisitId, response: int, num_tokens: int = 2) -> Example:
    return Example(visit.sample(response), (1,), (2,) * (num_tokens - 1), (), (), 0.0)


def some_groups(rng: Random, count: int) -> Groups:
    """Groups of several epochs with up to 5 samples to learn from; some have none."""
    visits = rng.sample([VisitId(epoch, prompt) for epoch in range(3) for prompt in range(20)], count)
    return {v: [example(v, i, rng.randint(2, 30)) for i in range(5) if rng.random() < 0.7] for v in visits}


def filled(groups: Groups) -> SampleBuffer:
    buffer = SampleBuffer(len(groups))
    for visit, examples in groups.items():
        buffer.put(visit, examples)
    return buffer


def names(*batches: Batch) -> list[SampleId]:
    return [example.id for batch in batches for example in batch]


@pytest.mark.parametrize("seed", range(20))
def test_every_sample_comes_out_once_and_in_order(seed: int) -> None:
    rng = Random(seed)
    groups = some_groups(rng, rng.randint(1, 12))
    wanted, buffer = names(*groups.values()), filled(groups)
    taken: list[Batch] = []
    for _ in range(rng.randint(0, 6)):
        room = rng.randint(1, 60)
        taken.append(buffer.take(room))
        assert sum(e.num_tokens for e in taken[-1]) <= room or len(taken[-1]) == 1
    assert names(*taken) == sorted(names(*taken)) and buffer.taken == set(names(*taken))
    assert len(buffer) + len(buffer.taken) == len(wanted)
    rest = names(*(share for batch in buffer.deal(rng.randint(1, 4), rng.randint(1, 3)) for share in batch))
    assert sorted(names(*taken) + rest) == sorted(wanted) and all(
        late > early for late in rest for early in buffer.taken
    )
    assert not len(buffer) and buffer.take(100) == []


@pytest.mark.parametrize("seed", range(20))
def test_copies_that_were_apart_share_what_nobody_has_taken(seed: int) -> None:
    rng, num_ranks = Random(seed), 4
    groups = some_groups(rng, 10)
    copies = [SampleBuffer(10) for _ in range(num_ranks)]
    for visit, examples in groups.items():  # ranks 2 and 3 train; each gets a part of a group, or nothing
        parts: list[Batch] = [[], []]
        for e in examples:
            rng.choice([parts[0], parts[1], []]).append(e)
        for copy, part in zip(copies[2:], parts, strict=True):
            copy.put(visit, part)
    for copy in copies[2:]:
        for _ in range(rng.randint(1, 3)):
            copy.take(40)
    own = [set(copy.taken) for copy in copies]
    shares = []
    for rank, copy in enumerate(copies):
        copy.agree(own)
        for visit in rng.sample(list(groups), len(groups)):  # in any order
            copy.put(visit, groups[visit])
        [batch] = copy.deal(num_ranks)
        shares.append(batch[rank])
    everything = [*names(*shares), *(id for ids in own for id in ids)]
    assert sorted(everything) == sorted(names(*groups.values()))
    assert all(own[2:]) and any(shares)


def test_a_deal_is_the_same_in_whatever_order_groups_came() -> None:
    groups = some_groups(Random(1), 8)
    backwards = dict(reversed(groups.items()))
    assert filled(groups).deal(3, 2) == filled(backwards).deal(3, 2)


def test_groups_go_in_turn_into_batches_those_without_samples_too() -> None:
    visits = [VisitId(0, i) for i in range(5)]
    groups = {v: [example(v, 0)] if v.prompt != 2 else [] for v in visits}
    batches = filled(groups).deal(1, 2)
    assert [[id.prompt for id in names(*batch)] for batch in batches] == [[0, 4], [1, 3]]


def test_ranks_that_hold_less_are_dealt_more() -> None:
    visit = VisitId(0, 0)
    buffer = filled({visit: [example(visit, i, 10) for i in range(5)]})
    [shares] = buffer.deal(2, held=[30, 0])
    assert [len(share) for share in shares] == [1, 4]


def test_no_more_groups_wait_than_there_is_room_for() -> None:
    buffer = SampleBuffer(2)
    for prompt in range(2):
        buffer.put(VisitId(0, prompt), [example(VisitId(0, prompt), 0)])
    buffer.put(VisitId(0, 1), [example(VisitId(0, 1), 1)])  # another part of a group
    with pytest.raises(AssertionError, match=r"\(0, 2\) is one group more than 2"):
        buffer.put(VisitId(0, 2), [])
    buffer = filled({VisitId(0, 0): [example(VisitId(0, 0), 0)]})
    buffer.take(1)
    buffer.put(VisitId(0, 1), [])


def test_nothing_is_put_or_taken_twice() -> None:
    visit = VisitId(0, 0)
    buffer = filled({visit: [example(visit, 0)]})
    with pytest.raises(AssertionError, match=r"\(0, 0, 0\) is there already"):
        buffer.put(visit, [example(visit, 0)])
    with pytest.raises(AssertionError, match="a sample was taken twice"):
        buffer.agree([{visit.sample(0)}, {visit.sample(0)}])
