"""One round on a real engine: what the referee is told, whatever a replica has to do, and who plays its windows."""

from pathlib import Path

import pytest
from conftest import ALONE

from config import load_config
from core import Decision, Finished, RoundPlan, Visit
from job import Job
from metrics import Clock
from rounds import Round
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
def job(settings, tmp_path: Path) -> Job:
    given = settings(data__train="hailstone", scheduler__window_iterations=8, rollout__max_response_tokens=5)
    (tmp_path / "run").mkdir()
    return Job(load_config(Config, None, given), ALONE, resume=False)


def test_a_dry_replica_counts_iterations_on_so_that_they_mean_the_same_everywhere(job: Job) -> None:
    first, second = job.cursor.take(2)
    referee = Patient(second)
    with job.graders:
        job.play(RoundPlan("short", (first,), 1, 1, 1), referee, Clock())
    [(_, early), (at, late)] = referee.events
    assert early.iteration <= 8 and at == 4
    assert late.iteration == 3 * 8 + late.num_tokens  # three windows, two of them dry; the prefill draws a token


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
