"""Rounds on ranks apart, alone and in a group of jobs: the run is that of ranks which do both, alone."""

import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from multiprocessing import ProcessError
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, steps_of, thorough, train_runs
from groups import LONGEST, Group, in_thread, until
from test_updates import losses, tokens_of, train_and_be_killed
from torch.multiprocessing.spawn import ProcessException

import parallel
import train
from checkpoint import list_checkpoints, load_state
from config import ConfigError, load_config
from job import Job
from metrics import Clock, read_records
from overlap.phases import GroupConfig, Phases
from parallel import World
from process.permits import Client, GroupError
from settings import Config, check_group

APART = dict(overlap__train_ranks=1)
RACES = dict(scheduler__policy="tail_batching", scheduler__eta_prompts=1.5, scheduler__eta_responses=1.5)
EPISODES = dict(data__env=f"{ROOT}/tests/worlds.py:chat", data__task="env", env__clock="steps", env__max_turn_tokens=24)
EPISODES |= dict(rollout__stop=json.dumps([*"ABCDEFGHIJKLMNOPQRSTUVWXYZ"]))
# Runs that end in a long round, with a queue before it; with an evaluation and a checkpoint on the way.
RUNS: dict[str, dict[str, Any]] = {
    "races": RACES,
    "audited": RACES | dict(scheduler__dynamic_sampling="true", scheduler__audit=0.5, trainer__updates_per_step=2),
    "episodes": RACES | EPISODES,
}


@pytest.fixture
def settings(settings, mixed_prompts: Path):
    return partial(
        settings,
        run__steps=4,
        run__eval_every=3,
        run__checkpoint_every=2,
        run__keep_best="false",
        run__dump_rollouts="true",
        data__eval_prompts=3,
        data__train=mixed_prompts,
        data__task=f"{ROOT}/tests/graders.py:share_of_digits",
        scheduler__window_iterations=4,
        rollout__stop=json.dumps([*"ABCDEFGH"]),
        rollout__max_prompt_tokens=32,
        rollout__max_response_tokens=64,
        rollout__page_size=8,
        rollout__kv_gib=0.05,
        trainer__lr=3e-3,
    )


def evaluations(folder: Path) -> list[tuple[float, dict]]:
    return [(r["eval"]["avg@4"], r["eval"]["length"]) for r in read_records(folder / "steps.jsonl") if r.get("eval")]


@pytest.mark.parametrize("names", [("races",), thorough(("audited", "episodes"))])
def test_ranks_apart_train_bit_for_bit_as_one_rank_does(
    settings, run_ranks, tmp_path: Path, names: tuple[str, ...]
) -> None:
    ways = {name: RUNS[name] for name in names}
    run_ranks(2, train_runs, *(settings(f"{name} apart", **way, **APART) for name, way in ways.items()))
    for name, way in ways.items():
        assert train.main(settings(name, **way)) == 0
        one, apart = tmp_path / name, tmp_path / f"{name} apart"
        assert tokens_of(apart) == tokens_of(one) and losses(apart) == losses(one) and len(losses(one)) == 4, name
        assert evaluations(apart) == evaluations(one) and len(evaluations(one)) == 3, name
        played = [[r["round"] | {"window_wait": 0} for r in steps_of(folder)] for folder in (one, apart)]
        assert played[0] == played[1] and len({r["kind"] for r in played[0]}) == 2, name
        engines = [[{**r["engine"], "pages": 0} for r in steps_of(folder)] for folder in (one, apart)]
        assert engines[0] == engines[1], name
        states = [load_state(list_checkpoints(folder)[-2]) for folder in (one, apart)]
        assert states[0]["policy"] == states[1]["policy"] and states[0]["policy"]["queue"], name
        assert states[0]["cursor"] == states[1]["cursor"], name


@pytest.mark.thorough
def test_pools_of_any_size_train_the_same_rounds(settings, run_ranks, tmp_path: Path) -> None:
    assert train.main(settings("one", **RACES)) == 0
    two = dict(overlap__train_ranks=2)
    runs = {"sharded": two | dict(trainer__shard=2), "by two": two | dict(rollout__tensor_parallel=2)}
    run_ranks(4, train_runs, *(settings(name, **RACES, **way) for name, way in runs.items()))
    for name in runs:
        assert tokens_of(tmp_path / name) == tokens_of(tmp_path / "one")
        for mine, theirs in zip(losses(tmp_path / name), losses(tmp_path / "one"), strict=True):
            assert mine == pytest.approx(theirs, abs=1e-5)


# ---- in a group ------------------------------------------------------------------------------------------------------

IN_GROUP = dict(group__job="a", run__steps=3, run__eval_every=2)


def take_turns(clients: dict[str, Client], over: threading.Event, look: Callable[[], None]) -> None:
    """Be another job: ask for phases again and again, and look around in each."""
    while not over.is_set():
        for phase, client in clients.items():
            client.request(phase)
            look()
            time.sleep(0.01)  # without work, it would ask as fast as a core can
            client.release()


def phases_of(group: Group, job: str) -> list[str]:
    return [event["phase"] for event in group.came("begins") if event["job"] == job]


@pytest.mark.slow
def test_a_job_leaves_the_device_between_its_phases(settings, group: Group, tmp_path: Path, monkeypatch) -> None:
    """Its ranks do both, so each phase takes all workers."""
    make = partial(settings, **RACES | IN_GROUP)
    assert train.main(settings("alone", **RACES, run__steps=3, run__eval_every=2)) == 0
    jobs, held, over, join = list[Job](), list[int](), threading.Event(), Phases.join

    def note(phases: Phases, job: Job, own: World) -> None:
        jobs.append(job)
        join(phases, job, own)

    def look() -> None:
        for job in jobs:
            kept = [*job.trainer.params, *(p.grad for p in job.trainer.params), *job.trainer._moments()]
            pages = job.engine.runner.memory.whole
            held.extend(tensor.untyped_storage().nbytes() for tensor in kept)
            held.append(0 if pages is None else pages.nbytes)

    monkeypatch.setattr(Phases, "join", note)
    other = in_thread(partial(take_turns, {"rollout": group.connect("b", "all")}, over, look))
    try:
        assert train.main(make("shared", group__server=group.server)) == 0
    finally:
        over.set()
        other.join(LONGEST)
    step = ["rollout", "train"]
    evaluated_and_saved = ["rollout", "train"]
    assert phases_of(group, "a") == [
        "start",
        "rollout",
        *step,
        *step,
        *evaluated_and_saved,
        *step,
        *evaluated_and_saved,
    ]
    assert len(held) >= 10 and not any(held), "each time the other had the device for itself"
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    assert losses(shared) == losses(alone) and tokens_of(shared) == tokens_of(alone)
    assert evaluations(shared) == evaluations(alone) and len(evaluations(alone)) == 3
    saved = [load_state(list_checkpoints(folder)[-1]) for folder in (alone, shared)]
    assert saved[0]["policy"] == saved[1]["policy"]
    times = {f"{part}_{phase}" for part in ("permit", "switch", "phase") for phase in ("rollout", "train")}
    assert all(times <= r["seconds"].keys() for r in steps_of(shared))
    assert not any(times & r["seconds"].keys() for r in steps_of(alone))


@pytest.mark.parametrize("way", ["races", thorough("episodes")])
def test_pools_that_others_use_too_train_as_alone(settings, run_ranks, group: Group, tmp_path: Path, way: str) -> None:
    """New weights arrive while the decoding ranks have none on the device.

    A killed job goes on in its group: one of episodes here, one of single responses in tests/test_mux.py.
    """
    given, over = RUNS[way], threading.Event()
    in_group = partial(settings, **APART, group__server=group.server, group__job="a")
    others = [
        in_thread(partial(take_turns, {phase: group.connect("b", phase)}, over, lambda: None))
        for phase in ("rollout", "train")
    ]
    try:
        run_ranks(2, train_runs, in_group("shared", **given))
        assert phases_of(group, "a").count("rollout") == 4 + 3 and phases_of(group, "a").count("train") == 6
        if way == "episodes":
            with pytest.raises((ProcessError, ProcessException)):
                run_ranks(2, train_and_be_killed, in_group("killed", **given))
            assert [folder.name for folder in list_checkpoints(tmp_path / "killed")] == ["step_000002"]
            run_ranks(2, partial(train_runs, resume=True), in_group("killed", **given))
    finally:
        over.set()
        for other in others:
            other.join(LONGEST)
    assert train.main(settings("alone", **given)) == 0
    for name in ("shared", "killed") if way == "episodes" else ("shared",):
        folders = [tmp_path / "alone", tmp_path / name]
        assert losses(folders[1]) == losses(folders[0]) and len(losses(folders[0])) == 4
        assert tokens_of(folders[1]) == tokens_of(folders[0])
        assert evaluations(folders[1])[-2:] == evaluations(folders[0])[-2:]
        files = [list_checkpoints(folder)[-1] / "model.safetensors" for folder in folders]
        assert files[0].read_bytes() == files[1].read_bytes()


def have_long_tails(group: Group, client: Client, over: threading.Event) -> None:
    """Be a job with the same workers: it leaves the first when it has both, and the second when job a is back."""

    def count(event: str) -> int:
        return sum(fields["job"] == "a" and fields["phase"] != "train" for fields in group.came(event))

    while not over.is_set():
        client.request("rollout", part=1)
        until(lambda: (client.look(), len(client.ranks) == 2)[1])
        client.release([0])
        until(lambda: over.is_set() or count("asks") > count("ends"))
        client.release()


IN_PARTS: dict[str, dict[str, Any]] = RUNS | {"long rounds": dict(scheduler__policy="synchronous")}


@pytest.mark.thorough
def test_rounds_begin_and_end_on_a_part_of_their_ranks_and_their_tokens_stay(
    settings, run_ranks, group: Group, tmp_path: Path
) -> None:
    """Two ranks decode, and another job shares their workers. Rounds in which responses race have both all the time."""
    given = IN_GROUP | APART | dict(group__tail_share=0.5, group__server=group.server)
    over = threading.Event()
    other = in_thread(partial(have_long_tails, group, group.connect("b"), over))
    try:
        run_ranks(3, train_runs, *(settings(f"{name} shared", **given | way) for name, way in IN_PARTS.items()))
    finally:
        over.set()
        other.join(LONGEST)
    for name, way in IN_PARTS.items():
        assert train.main(settings(name, **way, run__steps=3, run__eval_every=2)) == 0
        alone, shared = tmp_path / name, tmp_path / f"{name} shared"
        assert tokens_of(shared) == tokens_of(alone) and len(losses(shared)) == 3, name
        assert any(r["seconds"].get("phase_evaluate") for r in steps_of(shared)), "not counted as a step's rollout"
        for mine, theirs in zip(losses(shared), losses(alone), strict=True):
            assert mine == pytest.approx(theirs, abs=1e-5), name
        assert evaluations(shared) == evaluations(alone), name
        moved = [r["round"]["kind"] for r in steps_of(shared) if r["round"]["migrated"]]
        assert {*moved} == ({"long"} if name != "audited" else set()), "dynamic sampling is a race too"
    assert max(r["round"]["migrated"] for r in steps_of(shared)) > 8, "half of all, when the second rank came"
    mine = [
        (event, fields["workers"]) for event, fields in group.events if fields["job"] == "a" and "workers" in fields
    ]
    assert mine.count(("grows", ["rollout 0", "rollout 1"])) > 3
    assert mine.count(("shrinks", ["rollout 0"])) + mine.count(("shrinks", ["rollout 1"])) > 3
    order = [(event, fields["job"]) for event, fields in group.events if event in ("begins", "shrinks", "ends")]
    assert all(after == ("begins", "b") for event, after in pairwise(order) if event == ("shrinks", "a"))


class Nothing:
    """A job that has nothing on the device."""

    is_released = False

    def release(self) -> None: ...
    def take_back(self) -> None: ...


def wait_long(world: World, server: str) -> None:
    [own] = [part for part in parallel.subsets(world, [[0], [1]]) if part]
    patient = replace(world, timeout_seconds=3.0)
    with Phases(GroupConfig(server, "a"), patient, Path(), 1, Clock()) as phases:
        phases.join(Nothing(), own)
        with phases("rollout"):
            pass


def lose_server(world: World, server: str) -> None:
    [own] = [part for part in parallel.subsets(world, [[0], [1]]) if part]
    with Phases(GroupConfig(server, "a"), replace(world, timeout_seconds=20.0), Path(), 1, Clock()) as phases:
        phases.join(Nothing(), own)
        with phases("rollout"):
            pass
        with pytest.raises(GroupError, match="it has gone; start the group again"), phases("train"):
            pass


def test_a_server_that_goes_ends_the_ranks_that_only_wait_for_others_too(run_ranks, group: Group) -> None:
    other = group.connect("b", "train")
    other.request("train")

    def stop() -> None:
        until(lambda: len(group.came("asks")) == 3)
        group.stop()

    stops = in_thread(stop)
    run_ranks(2, lose_server, group.server)
    stops.join(LONGEST)
    assert [event["phase"] for event in group.came("begins")] == ["train", "rollout"]


def test_a_permit_may_take_longer_than_ranks_wait_for_each_other(run_ranks, group: Group) -> None:
    other = group.connect("b")
    other.request("rollout")

    def give_back() -> None:
        until(lambda: len(group.came("asks")) == 2)
        time.sleep(5.0)
        other.release()

    waits = in_thread(give_back)
    run_ranks(2, wait_long, group.server)
    waits.join(LONGEST)
    assert phases_of(group, "a") == ["rollout"]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (["group.server=g", "overlap.depth=1", "overlap.bound=4"], "no place in an endless rollout"),
        (["group.tail_share=0.5", "group.server=g"], "no place beside rollout.tensor_parallel = 1: 1 ranks are one"),
        (["group.tail_share=0.5", "group.server=g", "stream.policy=paper"], "beside stream.policy = paper"),
        (["group.tail_share=0.5", "group.server=g", "planner.rule=paper", "planner.within_round=true"], "within_round"),
        (["group.tail_share=0.5", "group.server=g", "judge.path=j"], "beside judge.path = 'j'"),
        (["group.tail_share=0.5", "group.server=g", "trainer.shard=2"], "beside rollout.weights = auto over 2 ranks"),
    ],
)
def test_settings_without_a_place_in_a_group_are_refused(given: list[str], reason: str) -> None:
    config = load_config(Config, None, [f"--{setting}" for setting in given])
    with pytest.raises(ConfigError, match=reason):
        check_group(config, 1)
    check_group(replace(config, group=replace(config.group, server="")), 1)  # its file serves alone too
