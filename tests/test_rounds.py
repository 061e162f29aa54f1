"""One round on a real engine: what the referee is told, whatever a replica has to do, and who plays its windows."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from conftest import ALONE, FusedEngine

from config import load_config
from core import Decision, Finished, Prompt, RoundPlan, Visit
from engine.sequence import Sequence
from job import Job
from metrics import Clock
from rollout import Engine
from rounds import Round, may_decide
from scheduler import Race
from settings import Config


class Patient:
    """Launches a second prompt two windows after the first has ended: until then the replica is dry."""

    def __init__(self, second: Visit):
        self.second, self.windows = second, 0
        self.events: list[tuple[int, Finished]] = []

    def observe(self, finished, rewards) -> Decision:
        self.windows += 1
        self.events += [(self.windows, event) for event in finished]
        launch = (self.second,) if self.windows == 3 else ()
        return Decision(launch=launch, done=len(self.events) == 2)

    def accepted_ids(self) -> list:
        return [event.id for _, event in self.events]


@pytest.fixture
def make_job(settings, tmp_path: Path) -> Callable[..., Job]:
    def make(window: int = 8, longest: int = 5) -> Job:
        limits = {"scheduler__window_iterations": window, "rollout__max_response_tokens": longest}
        (tmp_path / "run").mkdir()
        return Job(load_config(Config, None, settings(data__train="hailstone", **limits)), ALONE, resume=False)

    return make


@pytest.fixture
def job(make_job) -> Job:
    return make_job()


def test_a_dry_replica_counts_iterations_on_so_that_they_mean_the_same_everywhere(job: Job) -> None:
    first, second = job.cursor.take(2)
    referee = Patient(second)
    with job.graders:
        job.play(RoundPlan("short", (first,), 1, 1, 1), referee, Clock())
    [(_, early), (at, late)] = referee.events
    assert early.iteration <= 8 and at == 4
    assert late.iteration == 3 * 8 + late.num_tokens  # three windows, two of them dry; the prefill draws a token


def test_a_dry_replica_collects_grades_that_others_wait_for(job: Job, monkeypatch) -> None:
    first, second = job.cursor.take(2)
    referee, poll, polled = Patient(second), job.graders.poll, set()
    monkeypatch.setattr(job.graders, "poll", lambda: (polled.add(referee.windows), poll())[1])
    with job.graders:
        job.play(RoundPlan("short", (first,), 1, 1, 1), referee, Clock())
    assert polled == {0, 1, 2, 3}, "in windows 1 and 2 it decodes nothing"


def test_whoever_plays_the_windows_the_groups_are_the_same_and_a_note_goes_along(job: Job) -> None:
    plan = RoundPlan("long", tuple(job.cursor.take(2)), 2, 2, 2)
    with job.graders:
        groups, _ = job.play(plan, Race(plan), Clock())
        r, steps = Round(job.engine, job.graders, ALONE, Clock(), job.config.scheduler), 0
        r.begin(plan, Race(plan))
        while not r.decision.done:
            _, notes = r.exchange(r.decode(may_leave=True), note=r.windows)
            assert notes == [r.windows - 1]
            taken = r.take_decode_times()
            steps += taken[0]
            assert (taken[2] > 0) == (taken[1] > 0) == (taken[0] > 0) and r.take_decode_times() == (0, 0, 0.0)
        r.end()
        again = r.collect()
    assert [g.samples for g in again] == [g.samples for g in groups] and len(groups) == 2
    assert steps > 0 and r.prefill_seconds > 0


def test_sequences_that_may_move_after_a_window_have_not_ended_meanwhile(make_job, monkeypatch) -> None:
    """On a GPU the host learns one step late which sequences have ended: an ended one could not be found to move."""
    monkeypatch.setattr("job.Engine", FusedEngine)
    job, add = make_job(window=2, longest=12), Engine.add

    def add_with_length(engine: Engine, sequence: Sequence) -> None:
        sequence.max_new_tokens = 3 + sequence.response_index
        add(engine, sequence)

    monkeypatch.setattr(Engine, "add", add_with_length)
    plan = RoundPlan("long", tuple(job.cursor.take(2)), 6, 2, 6)
    with job.graders:
        whole, _ = job.play(plan, Race(plan), Clock())
        r = Round(job.engine, job.graders, ALONE, Clock(), job.config.scheduler)
        r.begin(plan, Race(plan))
        while not r.decision.done:
            r.exchange(r.decode(may_leave=True), None)
            live = {id for live in r.placement.live for id in live}
            moved = job.engine.export(live)
            assert {sequence.id for sequence in moved} == live
            for sequence in moved:
                job.engine.add(sequence)
        r.end()
        again = r.collect()
    assert r.windows > 3
    assert [[s.token_ids for s in g.samples] for g in again] == [[s.token_ids for s in g.samples] for g in whole]


def test_a_rank_that_goes_on_misses_no_decision_whatever_the_others_have() -> None:
    """Races on given lengths: where `may_decide` says no, nothing is over, and no response here has lost."""
    rng, went_on, waited = Random(0), 0, 0
    for _ in range(300):
        prompts, keep = rng.randint(1, 8), rng.randint(1, 4)
        visits = tuple(Visit(0, Prompt(i, (1,), "", "", "match")) for i in range(prompts))
        plan = RoundPlan("short", visits, keep + rng.choice((0, 0, 1, 2)), rng.randint(1, prompts), keep)
        ids = [visit.id.sample(r) for visit in visits for r in range(plan.num_responses)]
        lengths = {id: rng.randint(1, 40) for id in ids}
        here = (
            set(rng.sample(ids, rng.randint(1, len(ids)))) if rng.random() < 0.5 else {i for i in ids if i.prompt % 2}
        )
        race, window, end, decision = Race(plan), rng.randint(1, 12), 0, Decision()
        while not decision.done:
            end += window
            ended = [Finished(lengths[id], id, lengths[id]) for id in race.live if lengths[id] <= end]
            live = here.intersection(race.live) - {event.id for event in ended}
            may = may_decide(plan, prompts, Counter(id.visit for id in live))
            decision = race.observe(ended, {})
            assert may or not (decision.done or live.intersection(decision.abort))
            went_on, waited = went_on + (not may), waited + may
    assert went_on > 500 < waited


def test_a_rank_hears_of_a_window_after_the_next_unless_it_may_have_decided_something(make_job, monkeypatch) -> None:
    job, told, add = make_job(window=2, longest=12), list[str](), Engine.add

    def add_with_length(engine: Engine, sequence: Sequence) -> None:
        sequence.max_new_tokens, sequence.ignore_eos = 2 + 4 * sequence.prompt_index % 11, True
        add(engine, sequence)

    monkeypatch.setattr(Engine, "add", add_with_length)
    for name in ("decode", "tell", "hear"):
        original = getattr(Round, name)
        monkeypatch.setattr(Round, name, lambda *a, o=original, n=name, **k: (told.append(n), o(*a, **k))[1])
    plan = RoundPlan("short", tuple(job.cursor.take(3)), 2, 2, 2)
    with job.graders:
        groups, played = job.play(plan, Race(plan), Clock())
    assert told.count("hear") == told.count("tell") == played.windows == told.count("decode")
    assert told[:5] == ["decode", "tell", "decode", "hear", "tell"] and told[-2:] == ["tell", "hear"]
    assert len(groups) == 2
