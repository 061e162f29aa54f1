"""Round policies on a toy engine: whatever the lengths, every prompt is trained once, and the right ones win."""

import json
import math
from collections import Counter
from collections.abc import Callable
from copy import copy, deepcopy
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import pytest
from conftest import thorough

import scheduler
from core import Decision, Finished, Prompt, RoundPlan, RoundStats, SampleId, Visit, VisitId
from data import PromptCursor
from scheduler import POLICIES, Race, RoundPolicy, SchedulerConfig, Synchronous, TailBatching, num_launched, window

PROMPTS = [Prompt(i, (i,), str(i), "", "match") for i in range(200)]


@dataclass
class Toy:
    """Stands for all engines together: a response of n tokens ends in iteration n; aborts act at window ends."""

    seed: int = 0
    spread: float = 1.0  # of lengths, log-normal
    window: int = 5
    flat: float = 0.0  # share of groups whose rewards are all equal
    most: int = 300
    shuffle: Random = field(default_factory=lambda: Random(0))

    def length(self, id: SampleId, weights: int) -> int:
        """Prompts differ by nature; newer weights give other lengths."""
        prompt = Random(f"{self.seed} {id.visit}").gauss(2.5, self.spread)
        response = Random(f"{self.seed} {id} {weights}").gauss(prompt, self.spread / 3)
        return min(max(int(2.718**response), 1), self.most)

    def reward(self, id: SampleId, weights: int) -> float:
        is_flat = Random(f"flat {self.seed} {id.visit} {weights}").random() < self.flat
        return 1.0 if is_flat else Random(f"{self.seed} {id}").random()

    def play(self, plan: RoundPlan, observe: Callable[..., Decision], weights: int) -> dict:
        """Return the tokens of each aborted response."""
        live, start, aborted, now = {}, {}, {}, 0

        def launch(prompts) -> None:
            for visit in prompts:
                for r in range(plan.num_responses):
                    id = visit.id.sample(r)
                    assert id not in live
                    live[id], start[id] = now + self.length(id, weights), now

        launch(plan.prompts)
        decision = Decision()
        for _ in range(100_000):
            now += self.window
            ended = [Finished(at, id, at - start[id]) for id, at in live.items() if at <= now]
            for event in ended:
                del live[event.id]
            self.shuffle.shuffle(ended)  # ranks report in any order
            decision = observe(ended, {id: self.reward(id, weights) for id in decision.grade})
            for id in decision.abort:
                del live[id]
                aborted[id] = now - start[id]
            launch(decision.launch)
            if decision.done:
                assert not live
                return aborted
        raise AssertionError("the round never ended")


@dataclass
class Story:
    """What a run did, step by step."""

    plans: list[RoundPlan] = field(default_factory=list)
    trained: list[list[SampleId]] = field(default_factory=list)  # ids of samples
    flat: list[list[VisitId]] = field(default_factory=list)
    stats: list[RoundStats] = field(default_factory=list)

    def prompts(self) -> Counter:
        """How often each visit was trained."""
        return Counter(key for ids in self.trained for key in {id.visit for id in ids})


def run(
    config: SchedulerConfig, steps: int, toy: Toy, num_prompts: int = 200, kill: float = 0.0
) -> tuple[Story, Any, PromptCursor]:
    """Run `steps`; after each, with probability `kill`, go on with fresh objects from the saved state."""

    def build() -> tuple[RoundPolicy, PromptCursor]:
        return POLICIES[config.policy](config, toy.seed), PromptCursor(PROMPTS[:num_prompts], toy.seed)

    (policy, cursor), story, rng = build(), Story(), Random(toy.seed)
    for step in range(steps):
        plan = policy.begin(cursor.take, steps - step)
        aborted = toy.play(plan, policy.observe, step)
        story.plans.append(plan)
        story.trained.append(policy.accepted_ids())
        story.flat.append(policy.race.zero_variance)
        story.stats.append(policy.close(aborted))
        if rng.random() < kill:
            saved = json.loads(json.dumps([policy.state_dict(), cursor.state_dict()]))
            policy, cursor = build()
            policy.load_state_dict(saved[0], cursor.prompts)
            cursor.load_state_dict(saved[1])
    return story, policy, cursor


def random_case(seed: int, **changes) -> tuple[SchedulerConfig, int, Toy, int]:
    rng = Random(seed)
    eta = rng.choice([1.0, 1.125, 1.25, 1.5, 2.0, 3.0])
    config = SchedulerConfig(
        num_prompts=rng.randint(1, 12),
        num_responses=rng.randint(2, 6),
        eta_prompts=eta,
        eta_responses=rng.choice([1.0, 1.25, 1.6]),
    )
    toy = Toy(seed, spread=rng.choice([0.0, 0.3, 1.0, 2.0]), window=rng.choice([1, 3, 16, 1000]), shuffle=rng)
    return replace(config, **changes), rng.randint(1, 30), toy, rng.randint(12, 120)


# ---- every prompt exactly once -----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [*range(30), *map(thorough, range(30, 60))])
def test_every_drawn_prompt_is_trained_exactly_once_by_the_end(seed: int) -> None:
    config, steps, toy, num_prompts = random_case(seed)
    story, policy, cursor = run(config, steps, toy, num_prompts)
    budget = steps * config.num_prompts
    drawn = [visit.id for visit in PromptCursor(PROMPTS[:num_prompts], seed).take(budget)]
    assert story.prompts() == Counter(drawn)  # the cursor's first, each once: epoch by epoch
    assert policy.queue == [] and cursor.epoch * num_prompts + cursor.position == budget
    for ids in story.trained:
        assert len(ids) == config.num_prompts * config.num_responses
        assert set(Counter(id.visit for id in ids).values()) == {config.num_responses}


@pytest.mark.parametrize("seed", [*range(20), *map(thorough, range(20, 40))])
def test_a_run_killed_after_any_step_goes_on_as_if_it_had_not_been(seed: int) -> None:
    config, steps, toy, num_prompts = random_case(seed, audit=0.3, dynamic_sampling=seed % 4 == 0)
    toy.flat = 0.3 if config.dynamic_sampling else 0.0
    assert run(config, steps, toy, num_prompts, kill=0.5)[0] == run(config, steps, toy, num_prompts)[0]


def test_a_longer_run_after_a_finished_one_still_trains_each_once() -> None:
    config, toy = SchedulerConfig(num_prompts=4, num_responses=2), Toy(1)
    policy, cursor = TailBatching(config), PromptCursor(PROMPTS, 0)
    trained: Counter = Counter()
    for steps in (7, 12):
        for left in range(steps, 0, -1):
            aborted = toy.play(policy.begin(cursor.take, left), policy.observe, left)
            trained.update({id.visit for id in policy.accepted_ids()})
            policy.close(aborted)
        assert policy.queue == []
    assert set(trained.values()) == {1} and len(trained) == 19 * 4


# ---- the race ----------------------------------------------------------------------------------------------------


def ids_of(plan: RoundPlan) -> list[SampleId]:
    return [visit.id.sample(r) for visit in plan.prompts for r in range(plan.num_responses)]


def winners(plan: RoundPlan, ends: dict) -> list[tuple]:
    """The definition, without windows: each prompt's first responses, then the first prompts."""
    done = {}
    for visit in plan.prompts:
        ids = [visit.id.sample(r) for r in range(plan.num_responses)]
        first = sorted((ends[id], id) for id in ids)[: plan.keep_responses]
        done[visit.id] = first
    order = sorted(done, key=lambda key: done[key][-1])[: plan.keep_prompts]
    return sorted(id for key in order for _, id in done[key])


@pytest.mark.parametrize("seed", [*range(30), *map(thorough, range(30, 60))])
def test_the_first_responses_of_the_first_prompts_win_whatever_the_window(seed: int) -> None:
    config, steps, toy, num_prompts = random_case(seed)
    story, _, _ = run(config, steps, toy, num_prompts)
    for step, (plan, trained) in enumerate(zip(story.plans, story.trained, strict=True)):
        ids = ids_of(plan)
        assert sorted(trained) == winners(plan, {id: toy.length(id, step) for id in ids})


@pytest.mark.parametrize("window", [1, 7, 50])
def test_losers_are_aborted_at_the_end_of_the_window_that_decides(window: int) -> None:
    config = SchedulerConfig(num_prompts=8, num_responses=4, eta_prompts=1.5, eta_responses=1.5)
    policy, cursor, toy = TailBatching(config), PromptCursor(PROMPTS, 0), Toy(3, window=window)
    plan = policy.begin(cursor.take, 10)
    aborted = toy.play(plan, policy.observe, 0)
    ends = {id: toy.length(id, 0) for id in ids_of(plan)}
    trained = policy.accepted_ids()

    def window_end(iteration: int) -> int:
        return -(-iteration // window) * window

    over = window_end(max(ends[id] for id in trained))
    for key in {id.visit for id in ends}:
        end = min(over, window_end(sorted(ends[key.sample(r)] for r in range(6))[3]))  # of the round, or of this prompt
        for r in range(6):
            if ends[key.sample(r)] > end:
                assert aborted.pop(key.sample(r)) == end
    assert not aborted


def test_wasted_tokens_are_what_was_decoded_and_not_trained() -> None:
    config = SchedulerConfig(num_prompts=6, num_responses=3, eta_prompts=1.5, eta_responses=1.5)
    policy, cursor, toy = TailBatching(config), PromptCursor(PROMPTS, 0), Toy(5)
    total = 0
    for left in range(9, 0, -1):
        plan = policy.begin(cursor.take, left)
        aborted = toy.play(plan, policy.observe, left)
        ids = ids_of(plan)
        trained = set(policy.accepted_ids())
        lost = sum(aborted.get(id, toy.length(id, left)) for id in ids if id not in trained)
        stats = policy.close(aborted)
        total += lost
        assert (stats.wasted_tokens, stats.wasted_tokens_total) == (lost, total)
        assert stats.aborted == len(aborted) and stats.responses == len(ids)
        assert stats.longest == max(toy.length(id, left) for id in trained)
    assert total > 0


def test_two_copies_fed_in_different_orders_decide_the_same() -> None:
    config, steps, toy, num_prompts = random_case(7, num_prompts=8, eta_prompts=1.5)
    toy.spread = 0.1  # many end in one iteration
    other = replace(toy, shuffle=Random(99))
    assert run(config, steps, toy, num_prompts)[0] == run(config, steps, other, num_prompts)[0]


# ---- rounds and the queue ----------------------------------------------------------------------------------------


def test_a_period_has_four_short_rounds_and_a_long_one() -> None:
    """eta = 1.25 queues P0 / 4 prompts in each short round. (RollPacker, section 3)"""
    story, _, _ = run(SchedulerConfig(num_prompts=8, num_responses=4, eta_responses=1.25), 21, Toy(2))
    assert [plan.kind for plan in story.plans][:20] == (["short"] * 4 + ["long"]) * 4
    assert [stats.queue for stats in story.stats][:10] == [2, 4, 6, 8, 0] * 2
    assert [stats.oldest for stats in story.stats][:5] == [0, 1, 2, 3, 0]
    for plan, stats in zip(story.plans, story.stats, strict=True):
        short = plan.kind == "short"
        assert (len(plan.prompts), plan.num_responses) == ((10, 5) if short else (8, 4)) or plan is story.plans[-1]
        assert short or (stats.aborted == stats.wasted_tokens == 0)


@pytest.mark.parametrize("name", ["tail_batching", "synchronous"])
def test_a_peek_from_a_long_round_is_the_next_round_and_changes_nothing(name: str) -> None:
    config = SchedulerConfig(policy=name, num_prompts=4, num_responses=2)
    policy, cursor, toy, steps, seen = POLICIES[name](config), PromptCursor(PROMPTS, 0), Toy(0), 12, 0
    for step in range(steps):
        plan, peeked = policy.begin(cursor.take, steps - step), None
        if plan.kind == "long" and step + 1 < steps:
            before = cursor.state_dict(), [*policy.queue], policy.rounds, policy.race
            peeked = policy.peek(copy(cursor).take, steps - step - 1)
            assert before == (cursor.state_dict(), policy.queue, policy.rounds, policy.race)
        policy.close(toy.play(plan, policy.observe, step))
        if peeked:
            assert deepcopy(policy).begin(copy(cursor).take, steps - step - 1) == peeked
            seen += 1
    assert seen


def test_launched_numbers_are_not_off_by_a_rounding_error() -> None:
    assert [num_launched(10, eta) for eta in (1.0, 1.1, 1.25, 1.2)] == [10, 11, 13, 12]


def test_the_queue_is_first_in_first_out_and_long_rounds_know_what_to_expect() -> None:
    story, _, _ = run(SchedulerConfig(num_prompts=8, num_responses=4, eta_prompts=1.5), 30, Toy(4))
    queue: list = []
    for plan, ids in zip(story.plans, story.trained, strict=True):
        names = [visit.id for visit in plan.prompts]
        if plan.kind == "long" and queue:
            assert sorted(names) == sorted(queue[:8])
        assert plan.expected == tuple(sorted(plan.expected, reverse=True))  # the longest start first
        old = [name for name in queue if name in names]
        assert old == queue[: len(old)]
        queue = [name for name in queue if name not in old]
        lost = [name for name in names if name not in {id.visit for id in ids}]
        queue = [name for name in old if name in lost] + queue + [name for name in lost if name not in old]
    long = next(plan for plan in story.plans if plan.kind == "long")
    assert len(set(long.expected)) > 1 and min(long.expected) > 1


def test_expected_lengths_are_the_means_of_the_aborted_run() -> None:
    config = SchedulerConfig(num_prompts=1, num_responses=2, eta_prompts=2.0, eta_responses=1.0)
    policy, cursor = TailBatching(config), PromptCursor(PROMPTS, 0)
    (a, b) = [visit.id for visit in policy.begin(cursor.take, 9).prompts]
    decision = policy.observe([Finished(3, a.sample(1), 3), Finished(2, b.sample(0), 2), Finished(5, a.sample(0), 5)])
    assert decision.abort == (b.sample(1),) and decision.done
    policy.close({b.sample(1): 8})
    assert [(w.visit.id, w.expected) for w in policy.queue] == [(b, 5.0)]
    long = policy.begin(cursor.take, 8)
    assert [visit.id for visit in long.prompts] == [b] and long.expected == (5.0,) and long.kind == "long"


def test_a_queued_prompt_that_loses_again_near_the_end_keeps_its_place_and_what_is_known() -> None:
    config = SchedulerConfig(num_prompts=4, num_responses=2, eta_prompts=1.75, eta_responses=1.0)
    policy, cursor = TailBatching(config), PromptCursor(PROMPTS, 0)

    def play(steps_left: int, slow: set) -> list:
        plan = policy.begin(cursor.take, steps_left)
        names = [visit.id for visit in plan.prompts]
        slow = slow or set(names[4:])
        events = [Finished(5, name.sample(r), 5) for name in names if name not in slow for r in range(2)]
        assert policy.observe(events).done
        policy.close({name.sample(r): 4 + steps_left for name in slow for r in range(2)})
        return names

    first = play(3, set())[4:]
    assert [(w.visit.id, w.since, w.expected) for w in policy.queue] == [(name, 1, 7.0) for name in first]
    second = play(2, {first[1], *(drawn_id(i) for i in (7, 8))})
    assert second[:2] == first[:2] and second[2:] == [drawn_id(i) for i in range(7, 12)]
    # Five draws were left, so two of the queue raced along; one lost, with 6 tokens this time.
    waiting = [(w.visit.id, w.since, w.expected) for w in policy.queue]
    assert waiting == [(first[1], 1, 7.0), (first[2], 1, 7.0), (second[2], 2, 6.0), (second[3], 2, 6.0)]


def drawn_id(i: int) -> VisitId:
    return PromptCursor(PROMPTS, 0).take(i + 1)[i].id


@pytest.mark.parametrize("seed", range(10))
def test_eta_one_is_the_synchronous_baseline(seed: int) -> None:
    config, steps, toy, num_prompts = random_case(seed, eta_prompts=1.0, eta_responses=1.0, audit=0.5)
    story = run(config, steps, toy, num_prompts)[0]
    baseline = run(replace(config, policy="synchronous", eta_prompts=1.7, eta_responses=1.7), steps, toy, num_prompts)[
        0
    ]
    assert story == baseline
    cursor = PromptCursor(PROMPTS[:num_prompts], toy.seed)
    for plan, stats in zip(story.plans, story.stats, strict=True):
        assert plan.kind == "long" and not plan.audit and plan.num_responses == plan.keep_responses
        assert list(plan.prompts) == cursor.take(config.num_prompts)  # in the cursor's order
        assert stats.wasted_tokens == stats.aborted == stats.queue == 0


# ---- dynamic sampling --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [*range(20), *map(thorough, range(20, 40))])
def test_dynamic_sampling_trains_only_groups_that_differ_and_loses_none(seed: int) -> None:
    config, steps, toy, num_prompts = random_case(seed, dynamic_sampling=True, max_draws=100.0)
    toy.flat = Random(seed).choice([0.0, 0.2, 0.6])
    story, policy, cursor = run(config, steps, toy, num_prompts)
    trained, flat = story.prompts(), Counter(key for keys in story.flat for key in keys)
    assert not set(trained) & set(flat) and policy.queue == []
    drawn = PromptCursor(PROMPTS[:num_prompts], seed).take(len(trained) + len(flat))
    assert trained + flat == Counter(visit.id for visit in drawn)
    assert cursor.epoch * num_prompts + cursor.position == len(drawn)
    for step, (ids, keys) in enumerate(zip(story.trained, story.flat, strict=True)):
        assert len({id.visit for id in ids}) == config.num_prompts
        for key in {id.visit for id in ids}:
            assert len({toy.reward(id, step) for id in ids if id.visit == key}) > 1
        assert all(toy.reward(key.sample(0), step) == 1.0 for key in keys)
    assert bool(flat) or not toy.flat or len(trained) < 10


@pytest.mark.parametrize("window", [1, 4, 1000])
def test_dynamic_sampling_asks_for_the_rewards_of_what_the_last_window_completed(window: int) -> None:
    config = SchedulerConfig(num_prompts=6, num_responses=3, dynamic_sampling=True)
    policy, cursor = TailBatching(config), PromptCursor(PROMPTS, 0)
    toy = Toy(6, window=window, flat=0.5)
    asked: list = []

    def observe(finished, rewards) -> Decision:
        assert list(rewards) == (asked[-1] if asked else [])
        decision = policy.observe(finished, rewards)
        asked.append(list(decision.grade))
        return decision

    toy.play(policy.begin(cursor.take, 5), observe, 0)
    everything = [id for ids in asked for id in ids]
    assert len(everything) == len(set(everything)) and set(policy.accepted_ids()) <= set(everything)


def test_dynamic_sampling_stops_at_its_bound_and_fills_up() -> None:
    config = SchedulerConfig(num_prompts=4, num_responses=3, dynamic_sampling=True, max_draws=2.5)
    story, policy, _ = run(config, 6, Toy(0, flat=1.0))
    for ids, stats in zip(story.trained, story.stats, strict=True):
        assert len({id.visit for id in ids}) == 4 and stats.padded == 4
        assert stats.prompts == stats.zero_variance == 10 and stats.requeued == 0
    story, _, _ = run(replace(config, max_draws=1.25), 30, Toy(0, flat=0.5))
    assert {0, 1, 2} <= {stats.padded for stats in story.stats}
    assert all(len(ids) == 12 for ids in story.trained)


# ---- audit -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [*range(10), *map(thorough, range(10, 20))])
def test_an_audit_trains_the_same_samples_and_aborts_nothing(seed: int) -> None:
    config, steps, toy, num_prompts = random_case(seed, dynamic_sampling=seed % 2 == 0)
    toy.flat = 0.3 if config.dynamic_sampling else 0.0
    plain = run(config, steps, toy, num_prompts)[0]
    audited = run(replace(config, audit=1.0), steps, toy, num_prompts)[0]
    assert audited.trained == plain.trained and audited.prompts() == plain.prompts()
    for plan, stats in zip(audited.plans, audited.stats, strict=True):
        assert plan.audit == (plan.kind == "short") and stats.aborted == 0


def test_the_share_of_audited_rounds_follows_the_seed_and_the_round() -> None:
    config, toy = SchedulerConfig(num_prompts=2, num_responses=2, audit=0.3), Toy(8, spread=0.0)
    first = [plan.audit for plan in run(config, 300, toy)[0].plans if plan.kind == "short"]
    assert 0.2 < sum(first) / len(first) < 0.4
    assert first == [plan.audit for plan in run(config, 300, toy)[0].plans if plan.kind == "short"]
    toy.seed = 9
    assert first != [plan.audit for plan in run(config, 300, toy)[0].plans if plan.kind == "short"]


# ---- a policy of one's own ---------------------------------------------------------------------------------------


class HalfWins(RoundPolicy):
    """Has `plan` only: launches twice the prompts, trains the faster half, and in the next round the others."""

    def plan(self, take, steps_left: int) -> RoundPlan:
        c = self.config
        prompts = [w.visit for w in self.requeued(c.num_prompts)]
        kind = "long" if prompts else "short"
        prompts = prompts or take(2 * c.num_prompts)
        return RoundPlan(kind, tuple(prompts), c.num_responses, c.num_prompts, c.num_responses)


@pytest.mark.parametrize("kill", [0.0, 0.7])
def test_a_policy_needs_a_plan_only(monkeypatch, kill: float) -> None:
    monkeypatch.setitem(POLICIES, "half_wins", HalfWins)
    config = SchedulerConfig("half_wins", num_prompts=4, num_responses=3)
    story, policy, _ = run(config, 8, Toy(1), kill=kill)
    assert [plan.kind for plan in story.plans] == ["short", "long"] * 4
    drawn = [visit.id for visit in PromptCursor(PROMPTS, 1).take(32)]
    assert story.prompts() == Counter(drawn) and policy.queue == []
    assert [stats.queue for stats in story.stats] == [4, 0] * 4
    assert all(bool(stats.aborted) == (stats.kind == "short") for stats in story.stats)


class Choosy(HalfWins):
    """Looks at all that waits and launches two of them, once so many wait."""

    def plan(self, take, steps_left: int) -> RoundPlan:
        c, waiting = self.config, self.requeued(len(self.queue))
        prompts = [w.visit for w in waiting[1:3]] if len(waiting) >= 4 else take(c.num_prompts + 1)
        kept = min(len(prompts), c.num_prompts)
        kind = "long" if kept == len(prompts) else "short"
        return RoundPlan(kind, tuple(prompts), c.num_responses, kept, c.num_responses)


def test_what_a_plan_takes_from_the_queue_and_leaves_waits_on(monkeypatch) -> None:
    monkeypatch.setitem(POLICIES, "choosy", Choosy)
    story, policy, cursor = run(SchedulerConfig("choosy", num_prompts=4, num_responses=3), 9, Toy(1))
    assert [plan.kind for plan in story.plans[:6]] == ["short"] * 4 + ["long", "short"]
    trained, drawn = story.prompts(), [id for plan in story.plans if plan.kind == "short" for id in ids_of(plan)]
    assert {w.visit.id for w in policy.queue} == {id.visit for id in drawn} - trained.keys(), "none is lost"
    assert [stats.queue for stats in story.stats[:6]] == [1, 2, 3, 4, 2, 3]


class NeverAgain(HalfWins):
    """Leaves in the queue what lost."""

    def requeued(self, count: int) -> list:
        return []


def test_a_policy_that_takes_nothing_from_the_queue_does_not_hoard(monkeypatch) -> None:
    monkeypatch.setattr(scheduler, "QUEUED", 3)
    monkeypatch.setitem(POLICIES, "never_again", NeverAgain)
    story, policy, _ = run(SchedulerConfig("never_again", num_prompts=4, num_responses=3), 8, Toy(1))
    assert [plan.kind for plan in story.plans] == ["short"] * 8
    assert [len(rounds) for rounds in ({w.since for w in policy.queue}, policy.queue)] == [3, 12]  # the newest
    assert TailBatching.trains_all and Synchronous.trains_all and not NeverAgain.trains_all


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(keep_prompts=5), "Bad.plan: keeps 5 prompts x 2 responses of 4 x 2"),
        (dict(keep_responses=0), "keeps 4 prompts x 0 responses of 4 x 2"),
        (dict(keep_prompts=3), "kind = 'long'; a round that keeps all it launches is long, any other is short"),
        (dict(kind="mine"), "kind = 'mine'"),
        (dict(expected=(1.0,)), "1 expected lengths for 4 prompts"),
        (
            dict(prompts=(Visit(0, PROMPTS[0]), Visit(0, PROMPTS[1])) * 2),
            r"has the prompt \(epoch, index\) = \(0, 0\) 2 times",
        ),
        (None, "Bad.plan: returned None; return a RoundPlan"),
    ],
)
def test_a_plan_that_cannot_end_or_contradicts_itself_is_refused(changes: dict | None, message: str) -> None:
    class Bad(RoundPolicy):
        def plan(self, take, steps_left: int) -> Any:
            return None if changes is None else replace(RoundPlan("long", tuple(take(4)), 2, 4, 2), **changes)

    with pytest.raises(ValueError, match=message):
        Bad(SchedulerConfig()).begin(PromptCursor(PROMPTS, 0).take, 1)


# ---- a race alone, the config ------------------------------------------------------------------------------------


def test_a_bare_race_that_keeps_all_waits_for_all() -> None:
    plan = RoundPlan("long", tuple(Visit(-1, p) for p in PROMPTS[:5]), 3, 5, 3)
    race = Race(plan)
    assert Toy(1).play(plan, race.observe, 0) == {}
    assert sorted(race.accepted_ids()) == [(-1, i, r) for i in range(5) for r in range(3)]


def test_windows_are_short_where_something_is_decided_and_never_endless_where_others_wait() -> None:
    config = SchedulerConfig(window_iterations=16)
    assert window(config, "short", 4) == window(config, "short", 1) == 16
    assert window(config, "long", 4) == window(replace(config, migrate=True), "long", 4) == 128
    assert window(config, "long", 4, may_leave=True) == 16  # at a share that windows should not miss
    assert window(config, "long", 2, is_watched=True) == window(config, "long", 1, is_watched=True) == 128
    assert window(config, "long", 1) == math.inf
    assert window(replace(config, dynamic_sampling=True), "long", 1) == 16


def test_the_baseline_is_tail_batching_without_its_race() -> None:
    assert issubclass(Synchronous, TailBatching)
