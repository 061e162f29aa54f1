"""Groups that are played response by response, and the figures of single groups (simulation/mux_group.py)."""

import itertools
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from simulation.mux_group import TRAINING, Group, Job, Kind, alone

SMALL = Kind("qwen2.5-7b", 2048, prompts=8)
FIGURES = Path(__file__).parent.parent / "figures"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch):
    """Import a script of figures/, with what it imports."""
    monkeypatch.syspath_prepend(str(FIGURES))
    before = {*sys.modules}

    def load(name: str) -> ModuleType:
        return import_module(name)

    yield load
    for name in {*sys.modules} - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "").parent == FIGURES:
            del sys.modules[name]


def pair(share: float, **changes) -> Group:
    jobs = [Job(f"job{i}", replace(SMALL, **changes), seed=i) for i in range(2)]
    return Group(jobs, tail_share=share, tail_replicas=2)


@pytest.mark.parametrize("tensor_parallel", [1, 2])
@pytest.mark.parametrize("share", [1.0, 0.8])
def test_no_gpu_has_two_jobs_and_every_response_ends(share, tensor_parallel):
    group = pair(share, tensor_parallel=tensor_parallel)
    group.play(4)
    spans: dict = {}
    for held in group.held:
        for worker in held.workers:
            spans.setdefault(worker, []).append((held.start, held.end))
    assert len(spans) == 8 + 1
    for times in spans.values():
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(sorted(times)))
    for job in group.jobs:
        assert len(job.ends) >= 4
    assert any(job.is_tail for job in group.jobs) == (share < 1)


def test_a_job_alone_gives_back_nothing_and_takes_the_sum_of_its_phases():
    kept, shrunk = (Group([Job("job", SMALL)], tail_share=share) for share in (1.0, 0.5))
    seconds = kept.play(3)
    assert shrunk.play(3) == seconds and alone(SMALL, 3).period == pytest.approx(seconds[0])
    rollout, train = kept.busy()
    assert rollout + train == pytest.approx(1.0)  # one after the other


def test_a_job_that_runs_ahead_rolls_out_while_it_trains():
    behind, ahead = (Group([Job("job", SMALL, depth=depth)]) for depth in (0, 1))
    seconds = behind.play(4)[0], ahead.play(4)[0]
    assert seconds[1] < 0.95 * seconds[0]
    trainings = [held for held in ahead.held if held.workers == TRAINING]
    rollouts = [held for held in ahead.held if held.workers != TRAINING]
    assert any(a.start < b.end and b.start < a.end for a in trainings for b in rollouts)
    for number, training in enumerate(trainings):  # the rollout of batch k + 2 waits for the training of batch k
        begun = sorted({held.start for held in rollouts})
        assert len(begun) <= number + 2 or begun[number + 2] >= training.end


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("name", ["A + A", "D + D + E"])
def test_groups_cost_as_little_as_in_the_paper_and_no_less_than_they_can(name, load):
    """Within a tenth of Figure 10, under the ceiling."""
    micro = load("mux_micro")
    throughput, (shared, *_) = micro.efficiencies(name)
    assert shared == pytest.approx(micro.PAPER[name][0], rel=0.1)
    assert shared <= micro.ceiling(name) + 1e-9
    assert min(throughput) >= 0.84


@pytest.mark.thorough
@pytest.mark.slow
def test_tail_migration_gains_what_the_paper_says(load):
    """Within the range of Figure 11, for its longest pair."""
    kinds = load("mux_kinds")
    places = (("B", (0,)), ("B", (0,)))
    off, on = (sum(kinds.throughput(places, kinds.group(places, migrates=m))) for m in (False, True))
    assert 1.06 <= on / off <= 1.28


@pytest.mark.slow
def test_the_papers_bad_pair_is_slowed_down_and_refused(load):
    figure = load("mux_pair")
    for name, slowdown in figure.slowdowns().items():
        assert slowdown == pytest.approx(figure.SLOWDOWN[name], rel=0.1)
    assert "may take" in figure.on_one_node(1.2) and not figure.on_one_node(1.7)
    assert figure.admission(1.2).added > 0  # not for nothing, on the nodes that are there


def test_the_plan_of_a_training_rank_is_near_the_papers_actors(load):
    figure = load("mux_memory")
    for size, paper in zip(("7B", "14B"), figure.MEMORY["training"][1:3], strict=True):
        assert figure.GPUS * figure.state_gb(size, trains=True) == pytest.approx(paper, rel=0.05)
