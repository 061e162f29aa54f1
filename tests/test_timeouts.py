"""Adaptive time limits: the paper's formula, learned from correct responses alone, whatever the order."""

from itertools import permutations
from random import Random

import pytest

from rewards.timeouts import AdaptiveTimeouts, TimeoutStats


def make(factor=1.5, shortest=2.0, longest=30.0, audit=0.0, quantile=0.9, **more) -> AdaptiveTimeouts:
    return AdaptiveTimeouts(factor, shortest, longest, audit, quantile, **more)


def observe(timeouts: AdaptiveTimeouts, prompt: str, *seconds: float, correct: bool = True, sample=0) -> None:
    plan = timeouts.plan(prompt, len(seconds), sample)
    timeouts.observe(plan, [(s, correct, False) for s in seconds], correct)


@pytest.mark.parametrize(
    "anchor, limit", [(0.0, 2.0), (1.0, 2.0), (4 / 3, 2.0), (2.0, 3.0), (10.0, 15.0), (25.0, 30.0)]
)
def test_the_formula(anchor, limit):
    timeouts = make()
    assert timeouts.plan("p", 2, 0).limits == (30.0, 30.0)
    observe(timeouts, "p", anchor)
    assert timeouts.plan("p", 2, 0).limits == (limit, limit)  # all that is known is one case
    assert timeouts.plan("other", 1, 0).limits == (limit,)


@pytest.mark.parametrize("quantile, anchor", [(0.01, 1.0), (0.5, 5.0), (0.9, 9.0), (0.91, 10.0), (1.0, 10.0)])
def test_a_case_without_a_correct_run_takes_a_quantile_of_the_others(quantile, anchor):
    timeouts = make(shortest=0.1, quantile=quantile)
    slowest = [float(n) for n in range(1, 11)]
    for n, prompt in enumerate(Random(0).sample(range(10), 10)):
        observe(timeouts, f"p{prompt}", slowest[n])
        observe(timeouts, f"p{prompt}", 0.5)  # the slowest of a case counts, once
    for _ in range(30):
        observe(timeouts, "never solved", 29.0, correct=False)
    assert timeouts.plan("never solved", 1, 0).limits == (1.5 * anchor,)
    observe(timeouts, "p0", 20.0)
    assert timeouts.plan("p0", 1, 0).limits == (30.0,)
    assert timeouts.plan("never solved", 1, 0).limits[0] >= 1.5 * anchor


def test_memory_is_bounded_and_what_is_kept_forgets_no_order():
    seen = [(f"p{i % 40}", float(Random(i).randrange(1, 30))) for i in range(200)]
    longest = {name: max(s for n, s in seen if n == name) for name, _ in seen}
    kept = []
    for seed in range(5):
        timeouts = make(most=10)
        for prompt, seconds in Random(seed).sample(seen, len(seen)):
            observe(timeouts, prompt, seconds)
            assert timeouts.news.keys() <= timeouts.anchors.keys() and len(timeouts.anchors) <= 10
        kept.append((timeouts.state_dict(), timeouts.common))
    assert all(each == kept[0] for each in kept)
    assert kept[0][0] == {n: longest[p] for p in longest for n in make().plan(p, 1, 0).names if n in kept[0][0]}
    assert list(kept[0][0]) == sorted(make().plan(p, 1, 0).names[0] for p in longest)[:10]
    assert kept[0][1] == sorted(kept[0][0].values())[8]  # the ninth of ten
    smaller = make(most=3)
    smaller.load_state_dict(kept[0][0])
    assert list(smaller.anchors) == list(kept[0][0])[:3]


def test_only_correct_responses_set_anchors():
    timeouts = make()
    observe(timeouts, "p", 4.0, 6.0, correct=False)
    assert not timeouts.anchors
    observe(timeouts, "p", 4.0, 6.0)
    observe(timeouts, "p", 3.0, 8.0)
    observe(timeouts, "p", 20.0, correct=False)
    assert timeouts.plan("p", 2, 0).limits == (6.0, 12.0)


def test_a_factor_of_zero_is_a_fixed_limit():
    timeouts = make(factor=0.0)
    observe(timeouts, "p", 1.0)
    assert timeouts.plan("p", 1, 0).limits == (30.0,)


@pytest.mark.parametrize("seed", range(20))
def test_limits_are_bounded_grow_and_forget_no_order(seed):
    rng = Random(seed)
    seen = [(f"p{rng.randrange(3)}", rng.expovariate(0.2), rng.random() < 0.7) for _ in range(60)]
    one, other = make(), make()
    for prompt, seconds, correct in seen:
        name = one.plan(prompt, 1, 0).names[0]
        is_known, before = name in one.anchors, one.limit(name)
        observe(one, prompt, seconds, correct=correct)
        assert 2.0 <= one.limit(name) <= 30.0 and 2.0 <= one.limit("never solved") <= 30.0
        if is_known:
            assert one.limit(name) >= before
    rng.shuffle(seen)
    for prompt, seconds, correct in seen:
        observe(other, prompt, seconds, correct=correct)
    assert one.anchors == other.anchors and one.common == other.common


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_ranks_that_tell_their_news_agree_whatever_the_order(order):
    ranks = [make() for _ in range(3)]
    for i, rank in enumerate(ranks):
        observe(rank, "shared", 1.0 + i)
        observe(rank, f"own {i}", 5.0)
    news = [rank.take()[1] for rank in ranks]
    for rank in ranks:
        for i in order:
            rank.merge(news[i])
        assert rank.take()[1] == {}  # the others have it
    assert ranks[0].state_dict() == ranks[1].state_dict() == ranks[2].state_dict() and len(ranks[0].anchors) == 4
    assert sorted(ranks[0].anchors.values()) == [3.0, 5.0, 5.0, 5.0]
    assert {rank.common for rank in ranks} == {5.0}
    observe(ranks[0], "shared", 2.0)
    assert ranks[0].take()[1] == {}


def test_state_survives():
    timeouts, again = make(), make()
    observe(timeouts, "p", 7.0, 9.0)
    observe(again, "before", 25.0)
    again.load_state_dict(timeouts.state_dict())
    assert again.plan("p", 3, 0).limits == timeouts.plan("p", 3, 0).limits == (10.5, 13.5, 13.5)
    assert again.plan("before", 1, 0).limits == (13.5,) and not again.news
    empty = make()
    again.load_state_dict(empty.state_dict())
    assert again.plan("p", 1, 0).limits == (30.0,)
    again.load_state_dict(timeouts.state_dict())
    observe(again, "p", 20.0)
    assert again.plan("p", 1, 0).limits != timeouts.plan("p", 1, 0).limits


def test_an_audit_gives_the_longest_limit_to_its_share_and_counts():
    timeouts = make(audit=0.2)
    observe(timeouts, "p", 1.0, sample=-1)
    timeouts.take()
    plans = [timeouts.plan("p", 2, (0, 0, i)) for i in range(2000)]
    assert plans == [timeouts.plan("p", 2, (0, 0, i)) for i in range(2000)]
    audited = [plan for plan in plans if plan.audited]
    assert 320 < len(audited) < 480
    assert all(plan.limits == (2.0, 2.0) for plan in plans)
    # All cases of an audited response: one with two slow cases would never be seen to pass else.
    assert all(plan.allowed == ([30.0, 30.0] if plan.audited else [2.0, 2.0]) for plan in plans)
    plain = next(plan for plan in plans if not plan.audited)
    timeouts.observe(plain, [(2.0, False, True)], False)
    timeouts.observe(audited[0], [(1.5, True, False)], True)  # would have passed anyway
    timeouts.observe(audited[0], [(9.0, False, False)], False)  # the limit would have been right
    timeouts.observe(audited[0], [(30.0, False, True)], False)
    assert timeouts.plan("p", 1, 0).limits == (2.25,)
    timeouts.observe(audited[0], [(8.0, True, False)], True)  # it would have been wrong
    assert timeouts.plan("p", 1, 0).limits == (12.0,)
    stats, _ = timeouts.take()
    assert (stats.cases, stats.timeouts, stats.seconds_cut_off) == (5, 2, 32.0)
    assert (stats.responses, stats.audited, stats.audited_over, stats.audited_passed) == (5, 4, 3, 1)
    assert stats.passes_cut_off == 1 / 4  # of the one that was not audited
    assert TimeoutStats().passes_cut_off == 0
    assert timeouts.take()[0].cases == 0


def test_no_audit_when_its_share_is_zero_and_always_when_it_is_one():
    assert not any(make(audit=0.0).plan("p", 50, i).audited for i in range(20))
    assert all(make(audit=1.0).plan("p", 50, i).audited for i in range(20))
