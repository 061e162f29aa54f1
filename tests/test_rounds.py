"""One round on a real engine: what the referee is told, whatever a replica has to do."""

from pathlib import Path

from conftest import ALONE

from config import load_config
from core import Decision, RoundPlan, Visit
from job import Job
from metrics import Clock
from settings import Config


class Patient:
    """Launches a second prompt two windows after the first has ended: until then the replica is dry."""

    def __init__(self, second: Visit):
        self.second, self.events, self.windows = second, [], 0

    def observe(self, finished, rewards) -> Decision:
        self.windows += 1
        self.events += [(self.windows, event) for event in finished]
        launch = (self.second,) if self.windows == 3 else ()
        return Decision(launch=launch, done=len(self.events) == 2)

    def accepted_ids(self) -> list:
        return [event.id for _, event in self.events]


def test_a_dry_replica_counts_iterations_on_so_that_they_mean_the_same_everywhere(settings, tmp_path: Path) -> None:
    given = settings(data__train="hailstone", scheduler__window_iterations=8, rollout__max_response_tokens=5)
    (tmp_path / "run").mkdir()
    job = Job(load_config(Config, None, given), ALONE, resume=False)
    first, second = job.cursor.take(2)
    referee = Patient(second)
    with job.graders:
        job.play(RoundPlan("short", (first,), 1, 1, 1), referee, Clock())
    [(_, early), (at, late)] = referee.events
    assert early.iteration <= 8 and at == 4
    assert late.iteration == 3 * 8 + late.num_tokens  # three windows, two of them dry; the prefill draws a token
