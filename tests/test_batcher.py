"""The batcher without an engine: whom it admits, preempts and ends, against the replica that plays it."""

from array import array
from collections import deque
from dataclasses import replace
from random import Random

import pytest
from conftest import thorough

from core import SampleId
from engine.batcher import Batcher
from engine.cpu import BatchedPages
from engine.pages import Admission, Pages
from engine.sequence import EngineStats, Parked, Sequence
from policies.replica import Response
from policies.step_times import FittedTimes
from simulation.episodes import EpisodeReplica, Episodes, EpisodesConfig

PAGE = 8
TIMES = FittedTimes(0, [(1, 0, 1.1), (2, 0, 1.2), (2, 100, 1.7)], [(1, 0.02), (100, 0.03)])


def make_batcher(pages: Pages, rows: int, longest: int, step_tokens: int = 10**6) -> Batcher:
    batcher = Batcher(rows, step_tokens, longest)
    batcher.use(pages, EngineStats())
    return batcher


def step(batcher: Batcher) -> tuple[list[Sequence], float]:
    """Do the books of one engine step; return who has drawn all its tokens, and what the step takes."""
    batcher.admit()
    for newest in batcher.make_room():
        if newest.row >= 0:
            newest.token_ids = [newest.key] * batcher.num_drawn(newest)  # no two resumed contexts are equal
        batcher.evict([newest])
    chunks, n = batcher.plan_chunks(), len(batcher.running)
    seconds = sum(TIMES.prefill(chunk.end) - TIMES.prefill(chunk.start) for chunk in chunks)
    seconds += TIMES.decode(n, int(batcher.length[:n].sum())) if n else 0.0
    batcher.count_decoded(n)
    batcher.count_prefilled(chunks)
    ended = [s for s in batcher.running if batcher.num_drawn(s) == s.max_new_tokens]
    for sequence in ended:
        if sequence.has_turns:
            batcher.park(sequence, Parked(sequence.prompt_ids, array("i", [sequence.key] * sequence.max_new_tokens)))
    batcher.remove(ended)
    return ended, seconds


# With more siblings two may have a copy of the prompt; the order of rows, which no replica has, says whose is shared.
@pytest.mark.parametrize("turns", [1, 4])
@pytest.mark.parametrize("kind, siblings", [(Pages, 2), (BatchedPages, 4)])
@pytest.mark.parametrize("seed", [*range(10), *map(thorough, range(10, 40))])
def test_a_replica_plays_the_batcher_to_the_step_and_the_page(
    seed: int, kind: type[Pages], siblings: int, turns: int
) -> None:
    rng = Random(seed)
    rows, num_pages = rng.choice((3, 8, 100)), rng.choice((60, 90, 200, 1200))
    prompts = [rng.choice((16, rng.randint(1, 90))) for _ in range(12)]
    lengths = {SampleId(0, p, r): rng.randint(1, 300) for p in range(24 // siblings) for r in range(siblings)}
    batcher, episodes = make_batcher(kind(num_pages, PAGE), rows, num_pages), {}
    drawn = Episodes(EpisodesConfig(turns, (turns - 1) / 6), 0, 390)
    replica = EpisodeReplica(drawn, TIMES, num_pages, PAGE, rows, kind.shares)
    for i, (id, length) in enumerate(lengths.items()):
        episodes[id] = episode = drawn.episode(id, prompts[id.prompt], length, 0)
        given = (id.prompt,) * prompts[id.prompt], 100 + i, episode.turns[0].stop
        batcher.waiting.append(Sequence(id.prompt, id.response, 0, *given, has_turns=not episode.is_last))
        replica.add(drawn.episode(id, prompts[id.prompt], length, 0))
    wanted, found, clock, steps, until = [], [], 0.0, 0, 0
    while not batcher.is_idle:
        ended, seconds = step(batcher)
        steps, clock = steps + 1, clock + seconds
        for sequence in sorted(ended, key=lambda s: s.id):
            if not sequence.has_turns:
                wanted.append((steps, sequence.id, clock))
                continue
            (episode := episodes[sequence.id]).go_on()
            turn, text = episode.turns[episode.turn], array("i", [sequence.key] * episode.done)
            batcher.waiting.append(
                replace(sequence, token_ids=text, max_new_tokens=turn.stop, has_turns=not episode.is_last)
            )
    while replica.running or replica.waiting:  # ends of windows change nothing
        until += rng.choice((1, 16, 500))
        found += [(event.iteration, event.id, at) for event, at in replica.run_until(until)]
    assert [x[:2] for x in sorted(found)] == [x[:2] for x in sorted(wanted)]
    assert [x[2] for x in sorted(found)] == pytest.approx([x[2] for x in sorted(wanted)])
    assert replica.preemptions == batcher.stats.preemptions and replica.clock == pytest.approx(clock)
    assert replica.resumed == batcher.stats.resumed_tokens and (replica.resumed > 0 or turns == 1 or num_pages < 1200)
    assert batcher.pages.used == replica.pages_used == replica.base == 0
    assert num_pages > 90 or rows == 3 or replica.preemptions > 0


def test_the_newest_leaves_and_waits_in_front() -> None:
    batcher = make_batcher(Pages(4, PAGE), rows=4, longest=4)
    first, second, third = (Sequence(i, 0, 0, (i,) * 9, i, 30) for i in range(3))
    batcher.waiting.extend((first, second, third))
    step(batcher)
    assert batcher.running == [first, second] and [*batcher.waiting] == [third]
    while batcher.pages.used == 4:
        step(batcher)
        if len(batcher.running) == 1:
            break
    assert batcher.running == [first] and [*batcher.waiting] == [second, third] and batcher.stats.preemptions == 1


def test_a_hundredth_of_the_pages_stays_free_once_somebody_is_in() -> None:
    def admitted(num_pages: int, taken: int, num_admitted: int) -> int:
        waiting = deque([Response(SampleId(0, 0, 0), 1, 9) for _ in range(num_pages)])
        rule = Admission(num_pages, PAGE, 10**6, shares_prompts=False)
        return len([*rule.admit(waiting, num_admitted, num_pages - taken, lambda s: None, lambda s: None)])

    assert admitted(400, 0, 0) == 396 and admitted(400, 300, 5) == 96 and admitted(99, 0, 0) == 99


@pytest.mark.parametrize("kind", [Pages, BatchedPages])
def test_parked_pages_go_before_anybody_waits_or_is_preempted(kind: type[Pages]) -> None:
    batcher = make_batcher(kind(7, PAGE), rows=4, longest=7)

    def parked(index: int, drawn: int) -> Sequence:
        sequence = Sequence(index, 0, 0, (index,) * 9, index, 60)
        batcher.waiting.append(sequence)
        while sequence.row < 0 or batcher.num_drawn(sequence) < drawn:
            step(batcher)
        batcher.park(sequence, Parked(sequence.prompt_ids, array("i", [7] * drawn)))
        batcher.remove([sequence])
        return replace(sequence, token_ids=array("i", [7] * drawn + [8] * 9), logprobs=[0.0] * (drawn + 9))

    first, second, third = parked(0, 2), parked(1, 3), parked(2, 4)
    assert [*batcher.parked] == [first.id, second.id, third.id] and batcher.pages.used == 6
    batcher.waiting.append(second)  # it has two pages and needs three
    step(batcher)
    assert [*batcher.parked] == [first.id, third.id] and batcher.pages.used == 7 and batcher.running == [second]
    assert batcher.stats.resumed_tokens == 9 + 3 - 1 and batcher.stats.peak_parked_pages == 6
    newcomer = Sequence(3, 0, 0, (3,) * 9, 3, 60)
    batcher.waiting.append(newcomer)
    step(batcher)
    assert [*batcher.parked] == [third.id] and batcher.running == [second, newcomer], "parked longest, gone first"
    while batcher.parked:
        step(batcher)
    assert len(batcher.running) == 2 and not batcher.stats.preemptions and batcher.pages.used == 6
    batcher.waiting.append(first)
    step(batcher)
    assert batcher.stats.resumed_tokens == 11 and batcher.stats.recomputed_tokens == 0, "it waits"


def test_chunks_fill_a_step_beside_the_rows_and_contexts_go_on_first() -> None:
    batcher = make_batcher(Pages(100, PAGE), rows=8, longest=10, step_tokens=20)
    for i, length in enumerate((30, 5, 12)):
        batcher.waiting.append(Sequence(i, 0, 0, (i,) * length, i, 9))
    batcher.admit()
    plans = []
    while batcher.prefills:
        chunks = batcher.plan_chunks()
        plans.append([(chunk.prefill.leader.prompt_index, chunk.start, chunk.end) for chunk in chunks])
        batcher.count_decoded(len(batcher.running))
        batcher.count_prefilled(chunks)
    assert plans == [[(0, 0, 20)], [(0, 20, 30), (1, 0, 5), (2, 0, 5)], [(2, 5, 12)]]
