"""The endless rollout's policy on a toy engine: nothing lost or doubled, no group too old, never too far ahead."""

import json
import math
from collections import Counter
from dataclasses import dataclass, field, replace
from random import Random

import pytest

from config import ConfigError
from core import Finished, Prompt, SampleId, VisitId
from data import PromptCursor
from policies.flow import Flow, FlowStats, OverlapConfig, check_overlap
from rollout import sequence_for
from sampling import sample_key
from scheduler import SchedulerConfig, TailBatching

PROMPTS = [Prompt(i, (i,), str(i), "", "match") for i in range(60)]
SETTINGS = [
    (OverlapConfig(depth=1), SchedulerConfig(num_prompts=4, num_responses=2, eta_prompts=1, eta_responses=1)),
    (OverlapConfig(depth=1, bound=4), SchedulerConfig(num_prompts=4, num_responses=3, eta_prompts=1, eta_responses=1)),
    (OverlapConfig(depth=3, bound=4), SchedulerConfig(num_prompts=1, num_responses=2, eta_prompts=1, eta_responses=1)),
    (OverlapConfig(depth=0.5), SchedulerConfig(num_prompts=3, num_responses=2, eta_prompts=1, eta_responses=1.5)),
    (OverlapConfig(depth=1, bound=2), SchedulerConfig(num_prompts=4, num_responses=2, eta_responses=1.25)),
    (
        OverlapConfig(depth=2, sync="with_batch", train_ranks=1),
        SchedulerConfig(num_prompts=3, num_responses=2, eta_prompts=1, eta_responses=1),
    ),
]
LATE = ["wait", "drop", "keep"]


def length(id: SampleId, seed: int) -> int:
    """Most responses are short, a few very long; a prompt that is launched again has other lengths with other seeds."""
    return max(1, min(int(Random(f"{seed} {id}").lognormvariate(2.0, 1.4)), 400))


@dataclass
class Toy:
    """Stands for all engines: a response of n tokens ends n iterations after its launch; each update takes no time."""

    flow: Flow
    seed: int = 0
    window: int = 7
    now: int = 0
    ends: dict[SampleId, int] = field(default_factory=dict)
    start: dict[SampleId, int] = field(default_factory=dict)
    stopped: dict[SampleId, int] = field(default_factory=dict)
    decoded: int = 0
    trained: list[tuple[int, list[SampleId]]] = field(default_factory=list)
    stats: list[FlowStats] = field(default_factory=list)

    def carry_out(self, decision) -> None:
        for id in decision.abort:
            del self.ends[id]
            self.stopped[id] = self.now - self.start[id]
            self.decoded += self.stopped[id]
        for visit in decision.launch:
            for r in range(self.flow.num_responses):
                id = visit.id.sample(r)
                assert id not in self.ends
                self.start[id], self.ends[id] = self.now, self.now + length(id, self.seed + self.flow.version)

    def step(self) -> None:
        self.flow.fill(self.carry_out, self.play_window)
        self.trained.append((self.flow.version, self.flow.accepted_ids()))
        self.stats.append(self.flow.advance(self.stopped))
        self.stopped = {}

    def play_window(self) -> None:
        self.now += self.window
        ended = [Finished(at, id, at - self.start[id]) for id, at in self.ends.items() if at <= self.now]
        Random(self.seed).shuffle(ended)  # ranks report in any order
        for event in ended:
            del self.ends[event.id]
            self.decoded += event.num_tokens
        self.carry_out(self.flow.observe(ended))
        assert self.now < 10**6, "it waits for ever"

    def run(self) -> "Toy":
        while self.flow.version < self.flow.steps:
            self.step()
        return self


def toy(overlap: OverlapConfig, scheduler: SchedulerConfig, seed: int = 0, steps: int = 12) -> Toy:
    return Toy(Flow(overlap, scheduler, PromptCursor(PROMPTS, seed).take, steps), seed)


def with_late(config: OverlapConfig, late: str) -> OverlapConfig:
    return replace(config, late=late)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize(("overlap", "scheduler"), SETTINGS)
def test_every_prompt_is_trained_once_and_the_run_ends_empty(
    overlap: OverlapConfig, scheduler: SchedulerConfig, late: str, seed: int
) -> None:
    played = toy(with_late(overlap, late), scheduler, seed).run()
    visits = Counter(id.visit for _, batch in played.trained for id in batch)
    drawn = PromptCursor(PROMPTS, seed).take(12 * scheduler.num_prompts)
    assert visits == {visit.id: scheduler.num_responses for visit in drawn}
    assert all(len(batch) == scheduler.num_prompts * scheduler.num_responses for _, batch in played.trained)
    assert not played.flow.open and not played.ends and not played.flow.again


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("overlap", "scheduler"), SETTINGS)
def test_no_group_is_trained_too_old_unless_late_ones_are_kept(
    overlap: OverlapConfig, scheduler: SchedulerConfig, seed: int
) -> None:
    ages = {late: [s.ages for s in toy(with_late(overlap, late), scheduler, seed).run().stats] for late in LATE}
    worst = {late: max(age for batch in found for age in batch) for late, found in ages.items()}
    assert worst["wait"] <= overlap.largest_age and worst["drop"] <= overlap.largest_age
    assert all(sum(batch.values()) == scheduler.num_prompts for found in ages.values() for batch in found)


def test_kept_groups_get_older_than_the_bound_and_are_counted() -> None:
    overlap, scheduler = SETTINGS[0]
    stats = toy(with_late(overlap, "keep"), scheduler, 1).run().stats
    assert max(age for s in stats for age in s.ages) > 1
    assert sum(s.late for s in stats) == sum(n for s in stats for age, n in s.ages.items() if age > 1) > 0
    assert not any(s.late for s in toy(overlap, scheduler, 1).run().stats)


@pytest.mark.parametrize(("overlap", "scheduler"), SETTINGS)
def test_the_rollout_is_never_further_ahead_than_its_depth(overlap: OverlapConfig, scheduler: SchedulerConfig) -> None:
    played, most = toy(overlap, scheduler), 0
    launch = played.carry_out

    def carry_out(decision) -> None:
        nonlocal most
        launch(decision)
        most = max(most, len(played.flow.open))

    played.carry_out = carry_out  # type: ignore[method-assign]
    played.run()
    ahead = overlap.depth - overlap.lag + scheduler.eta_prompts - 1
    assert most == played.flow.capacity and scheduler.num_prompts * ahead <= most - scheduler.num_prompts < (
        scheduler.num_prompts * ahead + 1
    )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("depth", [0.5, 1.5, 2.0])
def test_the_depth_is_the_mean_age_also_where_it_is_a_fraction(depth: float, seed: int) -> None:
    """The credit is that of ROLL's code: depth batches more at the start, rounded up, and one batch after each."""
    scheduler = SchedulerConfig(num_prompts=4, num_responses=2, eta_prompts=1, eta_responses=1)
    played, launched = toy(OverlapConfig(depth=depth), scheduler, seed, steps=14), []
    carry_out = played.carry_out
    played.carry_out = lambda decision: launched.append(len(decision.launch)) or carry_out(decision)  # type: ignore
    played.run()
    assert [n for n in launched if n] == [round(4 * depth) + 4, *[4] * 11, *[n for n in launched if n][12:]]
    left = [stats.running + stats.buffered for stats in played.stats]
    assert left[:10] == [round(4 * depth)] * 10
    # Each batch makes all groups that it leaves older by one.
    ages = [age * count for stats in played.stats for age, count in stats.ages.items()]
    assert sum(ages) == sum(left) and max(age for stats in played.stats for age in stats.ages) <= math.ceil(depth)


@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize(("overlap", "scheduler"), SETTINGS)
def test_all_that_is_decoded_is_trained_or_wasted_and_lengths_tell_what(
    overlap: OverlapConfig, scheduler: SchedulerConfig, late: str
) -> None:
    overlap = with_late(overlap, late)
    played, lengths = toy(overlap, scheduler, 1, steps=20), []
    while played.flow.version < played.flow.steps:
        played.flow.fill(played.carry_out, played.play_window)
        groups = [played.flow.open[visit] for visit in played.flow.batch]
        lengths += [n for group in groups for n in group.kept.values()]
        old = [group for group in groups if played.flow.version - group.start > overlap.largest_age]
        played.step()
        assert played.stats[-1].late_length == [n for group in old for n in group.kept.values()]
    dropped = [n for stats in played.stats for n in stats.dropped_length]
    assert bool(dropped) == any(stats.dropped for stats in played.stats) and (late == "drop" or not dropped)
    wasted = sum(stats.wasted_tokens for stats in played.stats)
    if scheduler.eta_responses == 1:
        assert wasted == sum(dropped)
    if scheduler.eta_responses == 1 or late != "drop":  # else a response may be stopped twice between two updates
        assert sum(lengths) + wasted == played.decoded
    if len(dropped) > 20:
        assert sum(dropped) / len(dropped) > sum(lengths) / len(lengths)


def test_waiting_starts_before_it_is_too_late() -> None:
    """With one group a batch, three that must all be trained at version 4 could not be."""
    flow = Flow(*SETTINGS[2], PromptCursor(PROMPTS, 0).take, 12)
    launched = [visit.id for visit in flow.begin().launch]
    assert len(launched) == 4

    def finish(visit: VisitId) -> bool:
        return flow.observe([Finished(1, visit.sample(r), 1) for r in range(2)]).done

    assert finish(launched[0]) and [id.visit for id in flow.accepted_ids()] == [launched[0]] * 2
    flow.advance({})
    [newer] = [visit.id for visit in flow.begin().launch]
    assert finish(newer)  # three groups of version 0 are left, and versions 2, 3, 4
    flow.advance({})
    [newest] = [visit.id for visit in flow.begin().launch]
    assert not finish(newest) and flow.waited == 1
    assert finish(launched[2]) and flow.accepted_ids()[0].visit == launched[2]
    assert flow.advance({}).waited == 1
    assert not flow.observe([]).done  # a window beside the update
    assert not flow.begin().done and flow.waited == 1


def test_the_oldest_are_trained_first() -> None:
    flow = Flow(*SETTINGS[1], PromptCursor(PROMPTS, 0).take, 12)
    first = [visit.id for visit in flow.begin().launch]
    flow.observe([Finished(2, visit.sample(r), 2) for visit in first[:4] for r in range(3)])
    flow.advance({})
    newer = [visit.id for visit in flow.begin().launch]
    quick = [Finished(3, visit.sample(r), 1) for visit in newer for r in range(3)]
    slow = [Finished(4, visit.sample(r), 4) for visit in first[4:6] for r in range(3)]
    assert flow.observe(quick + slow).done
    assert {id.visit for id in flow.accepted_ids()} == {*first[4:6], *sorted(newer)[:2]}


def test_surplus_responses_are_stopped_once_a_group_has_enough() -> None:
    flow = Flow(*SETTINGS[4], PromptCursor(PROMPTS, 0).take, 12)
    first = flow.begin().launch[0].id
    decision = flow.observe([Finished(2, first.sample(2), 2), Finished(1, first.sample(1), 1)])
    assert decision.abort == (first.sample(0),) and [*flow.open[first].kept] == [first.sample(1), first.sample(2)]
    other = flow.begin, [v for v in flow.open if v != first][0]
    events = [Finished(i, other[1].sample(r), 5) for i, r in enumerate((2, 0, 1))]
    assert flow.observe(events).abort == () and flow.open[other[1]].kept == {
        other[1].sample(2): 5,
        other[1].sample(0): 5,
    }
    assert flow.surplus_tokens == 5


def test_sequences_under_way_finish_before_an_update_where_that_is_asked_for() -> None:
    overlap = OverlapConfig(depth=1, flight="finish")
    played = toy(overlap, SETTINGS[0][1])
    for _ in range(12):
        played.step()
        assert not played.ends, "sequences ran on through an update"


@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize(("overlap", "scheduler"), SETTINGS)
def test_it_goes_on_from_a_checkpoint(overlap: OverlapConfig, scheduler: SchedulerConfig, late: str) -> None:
    overlap = with_late(overlap, late)
    whole, before, after = toy(overlap, scheduler).run(), toy(overlap, scheduler), toy(overlap, scheduler)
    for _ in range(5):
        before.step()
    cursor = PromptCursor(PROMPTS, 0)
    cursor.take(len({id.visit for _, batch in before.trained for id in batch}) + len(before.flow.open))
    cursor.take(len(before.flow.again))
    after.flow = Flow(overlap, scheduler, cursor.take, 12)
    after.flow.load_state_dict(json.loads(json.dumps(before.flow.state_dict())), PROMPTS)
    after.now, after.ends, after.start = before.now, before.ends, before.start
    assert before.trained + after.run().trained == whole.trained


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("late", LATE)
def test_it_goes_on_from_a_checkpoint_behind_the_next_batch(late: str, seed: int) -> None:
    """With `sync` = with_batch the next batch is filled before the update, and the checkpoint comes after both."""
    overlap, scheduler = with_late(SETTINGS[5][0], late), SETTINGS[5][1]
    whole = toy(overlap, scheduler, seed).run()
    for steps in range(1, 12):
        played = toy(overlap, scheduler, seed)
        for _ in range(steps):
            played.step()
        played.flow.fill(played.carry_out, played.play_window)
        state = json.loads(json.dumps(played.flow.state_dict()))
        played.flow = Flow(overlap, scheduler, played.flow.take, 12)
        played.flow.load_state_dict(state, PROMPTS)
        assert played.run().trained == whole.trained, steps


def test_a_bound_that_the_depth_breaks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"overlap.bound = 1 .* take overlap.bound = 2"):
        check_overlap(OverlapConfig(depth=2, bound=1), TailBatching(SETTINGS[0][1]), "off", "fixed")
    with pytest.raises(ConfigError, match=r"eta_prompts = 1.25.* take overlap.bound = 2"):
        check_overlap(OverlapConfig(depth=1), TailBatching(SchedulerConfig(num_prompts=4)), "off", "fixed")
    check_overlap(OverlapConfig(depth=2, bound=1, late="drop"), TailBatching(SETTINGS[0][1]), "off", "fixed")


def test_what_is_given_up_for_its_age_is_drawn_anew() -> None:
    overlap, scheduler = SETTINGS[0]
    played = toy(with_late(overlap, "drop"), scheduler, 1, steps=30)
    launches = Counter[int]()
    for _ in range(24):
        played.step()
        launches.update(group.visit.launch for group in played.flow.open.values())
    assert launches[0] and launches[1]
    state = played.flow.state_dict()
    again = Flow(played.flow.config, scheduler, played.flow.take, 30)
    again.load_state_dict(state, PROMPTS)
    assert again.state_dict() == state
    visit = next(iter(played.flow.open.values())).visit
    keys = [sequence_for(replace(visit, launch=n), 0, 0, 9).key for n in range(3)]
    assert len(set(keys)) == 3 and keys[0] == sample_key(0, *visit.id, 0)
