"""Drafts in whole runs: they change no token, each source has some that are right, and a resumed run has its texts."""

import json
import shutil
from array import array
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ALONE, ROOT, any_shape, steps_of, train_runs

from checkpoint import list_checkpoints, load_state
from config import ConfigError, load_config
from core import Group, Prompt, RoundPlan, SampleId, Visit
from data import load_groups
from engine.memory import RolloutConfig
from engine.sequence import Sequence
from job import Job
from overlap.ahead import Ahead
from parallel import World
from policies.drafts import SOURCES, StepCosts, Texts
from policies.placement import Placement
from rollout import Engine
from rounds import Round
from scheduler import SchedulerConfig
from settings import Config, check_settings

GRADERS = ROOT / "tests" / "graders.py"
STEPS = 8


@pytest.fixture
def settings(settings, tmp_path: Path) -> Callable[..., list[str]]:
    """Of a run of three epochs with short and long rounds, whose responses repeat themselves and each other."""
    rows = [{"prompt": "count " + "up " * (i % 3) + str(i), "answer": str(i)} for i in range(12)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def make(folder: str, sources: tuple[str, ...] = (), **overrides) -> list[str]:
        values = {
            "run__steps": STEPS,
            "run__eval_every": STEPS,
            "run__dump_rollouts": "true",
            "data__train": tmp_path / "prompts.jsonl",
            "data__eval": tmp_path / "prompts.jsonl",
            "data__task": f"{GRADERS}:share_of_digits",
            "scheduler__eta_prompts": 1.5,
            "scheduler__window_iterations": 2,
            "sampling__temperature": 0.1,
            "rollout__max_prompt_tokens": 32,
            "rollout__max_response_tokens": 48,
            "drafts__sources": json.dumps(sources),
        }
        return settings(folder, **(values | overrides))

    return make


@pytest.fixture(autouse=True)
def told_costs(monkeypatch) -> None:
    """Let drafts not depend on measured seconds."""
    monkeypatch.setattr(StepCosts, "observe", lambda *_: None)
    monkeypatch.setattr(StepCosts, "knows", lambda *_: True)


def train_with_told_costs(world: World, *runs: list[str]) -> None:
    """Train on a rank, which is a process of its own."""
    StepCosts.observe, StepCosts.knows = (lambda *_: None), (lambda *_: True)
    train_runs(world, *runs)


def drafts_of(folder: Path) -> list[dict]:
    return [record["drafts"] for record in steps_of(folder) if "drafts" in record]


def assert_same_groups(folder: Path, other: Path, steps: range) -> None:
    for step in steps:
        ours, theirs = (load_groups(run / "rollouts", step, any_shape()) for run in (folder, other))
        assert [[s.token_ids for s in g.samples] for g in ours] == [[s.token_ids for s in g.samples] for g in theirs]


@pytest.mark.thorough
def test_drafts_of_each_source_change_no_group_and_are_partly_right(settings, run_ranks, tmp_path: Path) -> None:
    plain = {"data__eval": "", "data__eval_prompts": 0}
    runs = {name: settings(name, (name,), **plain) for name in SOURCES} | {"none": settings("none", **plain)}
    run_ranks(2, train_with_told_costs, *runs.values())
    kinds = [record["round"]["kind"] for record in steps_of(tmp_path / "none")]
    assert {"short", "long"} == {*kinds}
    for name in SOURCES:
        assert_same_groups(tmp_path / name, tmp_path / "none", range(1, STEPS + 1))
        found = drafts_of(tmp_path / name)
        assert sum(each["accepted"] for each in found) > 0, name
        for record in steps_of(tmp_path / name):
            assert "drafts" not in record or record["round"]["kind"] == "long"
        for told in found:  # by the engine, and by the source
            assert told["by_source"] == {name: {key: told[key] for key in ("drafted", "accepted")}}


def test_replicas_that_run_dry_draw_the_drafts_of_the_next_round_and_hold_nobody_up(
    settings, run_ranks, tmp_path: Path
) -> None:
    plan = {"scheduler__policy": "synchronous", "run__steps": 4, "scheduler__window_iterations": 1, "data__eval": ""}
    plan |= {"data__eval_prompts": 0}
    run_ranks(2, train_with_a_tail, settings("ahead", ("old",), **plan, drafts__ahead="true"), settings("none", **plan))
    assert_same_groups(tmp_path / "ahead", tmp_path / "none", range(1, 5))
    found = drafts_of(tmp_path / "ahead")
    assert all(told["ahead_tokens"] > 0 for told in found[:3]) and len(found) == 4
    assert found[3]["ahead_tokens"] == 0, "after the last round there is none"
    assert not found[0]["accepted"] and all(told["accepted"] > 0.3 * told["ahead_tokens"] > 0 for told in found[1:3])
    windows = [[r["round"]["windows"] for r in steps_of(tmp_path / name)] for name in ("ahead", "none")]
    assert all(ours <= theirs for ours, theirs in zip(*windows, strict=True))


@pytest.mark.thorough
def test_an_endless_rollout_draws_the_same_responses_with_drafts(settings, run_ranks, tmp_path: Path) -> None:
    """With weights that stay: which groups come into a batch may differ, a response may not."""
    plan = {"overlap__depth": 1, "overlap__clock": "time", "trainer__lr": 0.0, "scheduler__policy": "synchronous"}
    plan |= {"scheduler__eta_prompts": 1.0, "run__steps": 6, "run__eval_every": 3, "run__checkpoint_every": 3}
    run_ranks(
        2, train_with_told_costs, settings("drafts", ("siblings", "epoch", "own"), **plan), settings("none", **plan)
    )
    drawn = [
        {s.id: s.token_ids for g in groups_of(tmp_path / name, 6) for s in g.samples} for name in ("drafts", "none")
    ]
    both = drawn[0].keys() & drawn[1].keys()
    assert len(both) > 20 and all(drawn[0][id] == drawn[1][id] for id in both)
    found = drafts_of(tmp_path / "drafts")
    assert len(found) > 2
    assert {name for told in found for name, each in told["by_source"].items() if each["accepted"]} >= {
        "siblings",
        "own",
    }


def groups_of(folder: Path, steps: int) -> list[Group]:
    return [group for step in range(1, steps + 1) for group in load_groups(folder / "rollouts", step, any_shape())]


@pytest.mark.thorough
def test_ranks_of_a_replica_draft_alike_by_what_the_first_has_measured(settings, run_ranks, tmp_path: Path) -> None:
    plan = {"scheduler__policy": "synchronous", "run__steps": 4, "run__timeout_seconds": 120, "data__eval": ""}
    plan |= {"data__eval_prompts": 0, "rollout__tensor_parallel": 2}
    run_ranks(2, train_with_own_costs, settings("drafts", (*SOURCES,), **plan), settings("none", **plan))
    assert_same_groups(tmp_path / "drafts", tmp_path / "none", range(1, 5))
    assert sum(told["accepted"] for told in drafts_of(tmp_path / "drafts")) > 0


def train_with_own_costs(world: World, *runs: list[str]) -> None:
    """Train on a rank for which drafted tokens cost more than for the others."""
    fit = StepCosts.refit

    def refit(costs: StepCosts) -> None:
        fit(costs)
        costs.weights[2] *= 1 + 50 * world.rank

    StepCosts.refit = refit
    train_with_told_costs(world, *runs)


def train_with_a_tail(world: World, *runs: list[str]) -> None:
    """Train on a rank; one replica has the longest responses of each round."""
    add = Engine.add

    def add_with_length(engine: Engine, sequence: Sequence) -> None:
        sequence.max_new_tokens = 48 if engine.parallel.replica == 0 else 8
        add(engine, sequence)

    launch = Ahead._launch

    def launch_unless_last(ahead: Ahead, played: Round) -> dict:
        assert played.engine.parallel.replica == 1, "the last replica of a round has no time to draw ahead"
        return launch(ahead, played)

    Engine.add, Ahead._launch = add_with_length, launch_unless_last
    train_with_told_costs(world, *runs)


@pytest.mark.thorough
@pytest.mark.slow
def test_a_resumed_run_repeats_the_drafts_of_one_that_went_through(settings, tmp_path: Path) -> None:
    plan = {"run__checkpoint_every": 2, "run__keep_checkpoints": 9}
    train_runs(ALONE, settings("whole", (*SOURCES,), **plan))
    shutil.copytree(tmp_path / "whole", tmp_path / "killed")
    for path in list_checkpoints(tmp_path / "killed")[2:]:
        shutil.rmtree(path)  # of step 6 and 8
    train_runs(ALONE, settings("killed", (*SOURCES,), **plan), resume=True)
    whole, killed = ([load_state(c)["drafts"] for c in list_checkpoints(tmp_path / n)] for n in ("whole", "killed"))
    assert whole == killed and all(kept for state in whole[:3] for kept in state["texts"])
    told = [[d | {"won_seconds": 0} for d in drafts_of(tmp_path / name)] for name in ("whole", "killed")]
    assert told[0] == told[1] and len(told[0]) > 1


def test_texts_are_dealt_to_the_ranks_that_resume(settings, run_ranks, tmp_path: Path) -> None:
    plan = {"run__checkpoint_every": 4, "run__keep_checkpoints": 9}
    train_runs(ALONE, settings("run", ("old", "epoch"), **plan))
    before = load_state(list_checkpoints(tmp_path / "run")[0])["drafts"]
    shutil.rmtree(list_checkpoints(tmp_path / "run")[1])
    run_ranks(2, holds_its_share, settings("run", ("old", "epoch"), **plan), before["texts"])


def holds_its_share(world: World, arguments: list[str], texts: list[list]) -> None:
    job = Job(load_config(Config, None, arguments), world, resume=True)
    with job.graders:
        for kept, told in zip((job.drafting.old, job.drafting.trained), texts, strict=True):
            assert len(told) > 1 and [*kept.texts] == [SampleId(*id) for id, _ in told[world.rank :: 2]]
        state = job.drafting.state_dict()
        assert sorted(state["texts"][0]) == sorted((tuple(id), text) for id, text in texts[0])
        job.drafting.load_state_dict(state | {"known": state["known"][:4]})  # as older code has measured


def test_texts_keep_the_longer_of_two_that_begin_alike_and_let_the_oldest_go() -> None:
    texts, ids = Texts(room=10), [SampleId(0, p, 0) for p in range(4)]
    texts.put(ids[0], (1, 2, 3, 4))
    texts.put(ids[1], (5, 6))
    texts.put(ids[0], (1, 2))  # stopped earlier than before, but drawn alike
    texts.put(ids[2], ())  # it had not begun
    assert texts.texts == {ids[1]: array("i", [5, 6]), ids[0]: array("i", [1, 2, 3, 4])} and texts.count == 6
    texts.put(ids[0], (1, 9))
    assert texts.texts[ids[0]] == array("i", [1, 9]) and texts.count == 4
    texts.put(ids[2], range(8))
    assert [*texts.texts] == [ids[0], ids[2]] and texts.count == 10
    texts.put(ids[3], range(11))  # more than there is room for
    assert not texts.texts and not texts.count


@pytest.mark.parametrize("placement", ["together", "spread"])
def test_a_dry_replica_draws_first_what_it_will_decode(placement: str) -> None:
    visits, lengths = [Visit(0, Prompt(i, (1,), "", "", "match")) for i in range(5)], (9.0, 50.0, 50.0, 90.0, 99.0)
    plan = RoundPlan("long", tuple(visits), 2, 5, 2, lengths)
    for replica in range(2):
        queued, placed = list[Sequence](), Placement(2)
        engine = SimpleNamespace(config=RolloutConfig(), parallel=SimpleNamespace(replica=replica), add=queued.append)
        played = SimpleNamespace(engine=engine, placement=placed, seed=0, config=SchedulerConfig(placement=placement))
        drawn = Ahead(None, ALONE, lambda: plan)._launch(played)
        own = Placement(2).launch([v.id for v in visits], 2, lengths, placement == "spread")[replica]
        assert [s.id for s in queued][: len(own)] == own and len(drawn) == 10


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"sources": ("old", "new")}, "'new' is not one of: old, siblings, epoch, own"),
        ({"sources": ("old", "old")}, "names a source twice"),
        ({"drafts__most": 4}, "has no effect without drafts.sources"),
        ({"sources": ("own",), "overlap__depth": 1}, "no place beside overlap.clock = steps with overlap.depth = 1"),
        ({"sources": ("own",), "overlap__train_ranks": 1}, "have no part in the exchange of texts"),
        ({"sources": ("own",), "planner__within_round": "true", "planner__rule": "paper"}, "planner.within_round"),
        ({"sources": ("own", "epoch"), "drafts__memory_mib": 0}, "keeps no text of an earlier round"),
        (
            {"sources": ("old",), "drafts__ahead": "true", "scheduler__dynamic_sampling": "true"},
            "drafts.ahead = true has no place beside scheduler.dynamic_sampling = true",
        ),
    ],
)
def test_settings_that_have_no_place_are_refused(settings, arguments: dict, message: str) -> None:
    config = load_config(Config, None, settings("run", **arguments))
    with pytest.raises(ConfigError, match=message):
        check_settings(config, 2)
