"""Adaptive time limits: the paper's formula, learned from correct responses alone, whatever the order."""

from random import Random

import pytest

from timeouts import AdaptiveTimeouts


def make(factor=1.5, shortest=2.0, longest=30.0, audit=0.0) -> AdaptiveTimeouts:
    return AdaptiveTimeouts(factor, shortest, longest, audit)


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
    assert timeouts.plan("p", 2, 0).limits == (limit, 30.0)
    assert timeouts.plan("other", 1, 0).limits == (30.0,)


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
        assert 2.0 <= one.limit(name) <= 30.0
        if is_known:
            assert one.limit(name) >= before
    rng.shuffle(seen)
    for prompt, seconds, correct in seen:
        observe(other, prompt, seconds, correct=correct)
    assert one.anchors == other.anchors


def test_ranks_that_tell_their_news_agree():
    ranks = [make() for _ in range(3)]
    for i, rank in enumerate(ranks):
        observe(rank, "shared", 1.0 + i)
        observe(rank, f"own {i}", 5.0)
    news = [rank.take()[1] for rank in ranks]
    for rank in ranks:
        for part in news:
            rank.merge(part)
        rank.take()
    assert ranks[0].anchors == ranks[1].anchors == ranks[2].anchors and len(ranks[0].anchors) == 4
    assert max(ranks[0].anchors.values()) == 5.0 and 3.0 in ranks[0].anchors.values()
    observe(ranks[0], "shared", 2.0)
    assert ranks[0].take()[1] == {}


def test_state_survives():
    timeouts, again = make(), make()
    observe(timeouts, "p", 7.0, 9.0)
    again.load_state_dict(timeouts.state_dict())
    assert again.plan("p", 3, 0).limits == timeouts.plan("p", 3, 0).limits == (10.5, 13.5, 30.0)
    observe(again, "p", 20.0)
    assert again.plan("p", 1, 0).limits != timeouts.plan("p", 1, 0).limits


def test_an_audit_gives_the_longest_limit_to_its_share_and_counts():
    timeouts = make(audit=0.2)
    observe(timeouts, "p", 1.0, sample=-1)
    timeouts.take()
    plans = [timeouts.plan("p", 1, (0, 0, i)) for i in range(2000)]
    assert plans == [timeouts.plan("p", 1, (0, 0, i)) for i in range(2000)]
    audited = [plan for plan in plans if plan.audited[0]]
    assert 320 < len(audited) < 480
    assert all(plan.limits == (2.0,) for plan in plans)
    assert all(plan.allowed == ([30.0] if plan.audited[0] else [2.0]) for plan in plans)
    plain = next(plan for plan in plans if not plan.audited[0])
    timeouts.observe(plain, [(2.0, False, True)], False)
    timeouts.observe(audited[0], [(1.5, True, False)], True)  # would have passed anyway
    timeouts.observe(audited[0], [(9.0, False, False)], False)  # the limit would have been right
    timeouts.observe(audited[0], [(30.0, False, True)], False)
    assert timeouts.plan("p", 1, 0).limits == (2.25,)
    timeouts.observe(audited[0], [(8.0, True, False)], True)  # it would have been wrong
    assert timeouts.plan("p", 1, 0).limits == (12.0,)
    stats, _ = timeouts.take()
    assert (stats.cases, stats.timeouts, stats.seconds_cut_off) == (5, 2, 32.0)
    assert (stats.audited, stats.audited_over, stats.audited_passed) == (4, 3, 1)
    assert timeouts.take()[0].cases == 0


def test_no_audit_when_its_share_is_zero_and_always_when_it_is_one():
    assert not any(make(audit=0.0).plan("p", 50, i).audited.count(True) for i in range(20))
    assert all(all(make(audit=1.0).plan("p", 50, i).audited) for i in range(20))
