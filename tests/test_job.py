"""A job gives the device to others and takes it back: memory is really given up, and no trajectory changes."""

import importlib
import json
import os
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ALONE, ROOT, steps_of, thorough
from test_golden import trajectory
from torch.multiprocessing.reductions import StorageWeakRef

import parallel
import train
from config import ConfigError, load_config
from data import load_groups
from engine.host import OnHost
from job import Job, newest_checkpoint
from metrics import Clock
from parallel import World
from process.run_folder import guarded
from settings import Config

RACE: dict[str, Any] = dict(
    run__steps=3,
    run__eval_every=0,
    run__eval_samples=1,
    run__dump_rollouts="true",
    data__task=f"{ROOT}/tests/graders.py:share_of_digits",
    scheduler__policy="tail_batching",
    scheduler__eta_prompts=1.5,
    scheduler__window_iterations=4,
    rollout__max_response_tokens=24,
    trainer__lr=3e-3,
)


@pytest.fixture
def settings(settings, tmp_path: Path):
    rows = [{"prompt": f"count {i}", "answer": str(i)} for i in range(24)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return lambda name, **more: settings(name, data__train=tmp_path / "prompts.jsonl", **RACE | more)


def make_job(arguments: list[str]) -> Job:
    config = load_config(Config, None, arguments)
    Path(config.run.dir).mkdir()
    return Job(config, ALONE, resume=False)


@pytest.mark.parametrize("room", ["job", "profiler"])
def test_groups_are_made_before_pages_are_sized_by_the_rest(settings, monkeypatch, tiny_folder, room: str) -> None:
    """NCCL takes memory of the device for each."""
    calls: list[str] = []

    def note(owner: object, name: str) -> None:
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, **k: calls.append(name) or original(*a, **k))

    module = importlib.import_module(room)
    note(parallel if room == "job" else module, "make_tp_groups")
    note(module, "with_kv_memory")
    if room == "job":
        make_job(settings("run")).graders.close()
    else:
        monkeypatch.setattr(module, "measure", lambda *_: {})
        module.make_profile(load_config(Config, None, settings("run")), tiny_folder, ALONE)
    assert calls == ["make_tp_groups", "with_kv_memory"]


def test_a_released_job_has_given_its_memory_back_and_refuses_to_work(settings) -> None:
    job = make_job(settings("run", loss__kl_coef=0.1, run__steps=2))
    with job.graders:
        plan = job.plan()
        job.regroup(plan)
        rollout = job.roll_out(plan)
        job.learn(rollout)
        job.sync_weights()
        trainer, kv_memory = job.trainer, StorageWeakRef(job.engine.runner.memory.whole.untyped_storage())
        weights = [*trainer.params, *trainer.reference.parameters()]
        held = [*weights, *(p.grad for p in trainer.params), *trainer._moments()]
        values = [tensor.clone() for tensor in held]
        assert len(trainer._moments()) == 2 * len(trainer.params)

        job.release()
        assert kv_memory.expired() and job.engine.runner.memory.whole is None
        assert sum(tensor.untyped_storage().nbytes() for tensor in held) == 0
        given = partial(job.roll_out, plan), partial(job.learn, rollout)
        for work in (*given, job.evaluate, job.save, job.release):
            with pytest.raises(RuntimeError, match="take_back"):
                work()
        assert job.step == 1

        job.take_back()
        with pytest.raises(RuntimeError, match="release"):
            job.take_back()
        for tensor, value in zip(held, values, strict=True):
            assert torch.equal(tensor, value)
        train.take_step(job)
        assert job.step == job.config.run.steps
        with pytest.raises(ConfigError, match="has taken its run.steps = 2 steps"):
            train.take_step(job)


def test_copies_of_a_gpu_wait_in_pinned_memory(monkeypatch) -> None:
    asked, empty, tensor = [], torch.empty, torch.arange(3.0)

    def record(*sizes: int, pin_memory: bool, dtype: torch.dtype) -> torch.Tensor:
        asked.append(pin_memory)
        return empty(*sizes, dtype=dtype)

    monkeypatch.setattr(torch, "empty", record)
    for kind in ("cpu", "cuda"):
        monkeypatch.setattr(torch.UntypedStorage, "device", torch.device(kind), raising=False)
        held = OnHost([tensor])
        assert tensor.untyped_storage().nbytes() == 0
        held.bring_back()
    assert asked == [False, True] and tensor.tolist() == [0.0, 1.0, 2.0]


def train_all(world: World, runs: list[tuple[list[str], bool]]) -> None:
    """Train each run; with True beside it, the job releases the device before each plan and each update."""

    def rested(method):
        def rest(job: Job, *args):
            job.release()
            job.take_back()
            return method(job, *args)

        return rest

    for arguments, rests in runs:
        config = load_config(Config, None, arguments)
        Path(config.run.dir).mkdir(exist_ok=True)
        with pytest.MonkeyPatch.context() as patch:
            for name in ("plan", "learn") if rests else ():
                patch.setattr(Job, name, rested(getattr(Job, name)))
            train.train(config, world, resume=False)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(dict(trainer__shard=2, rollout__weights="sharded"), id="sharded"),
        thorough(dict(rollout__page_size=8), id="whole"),
    ],
)
def test_releases_change_no_trajectory(settings, run_ranks, tmp_path: Path, layout: dict) -> None:
    elastic = dict(planner__rule="paper", rollout__kv_gib=0.0003, **layout)
    run_ranks(2, train_all, [(settings(str(rests), **elastic), rests) for rests in (False, True)])
    plain, rested = (trajectory(tmp_path / str(rests)) for rests in (False, True))
    assert plain == rested and len(set(plain["tokens"])) == 3


@pytest.mark.slow
def test_machines_that_do_not_see_the_same_files_are_refused(settings, run_ranks, tmp_path: Path) -> None:
    """Two ranks play two machines: each has a disk of its own, on which relative paths lie."""
    run_ranks(2, refuse_other_files, tmp_path, [*settings("shared", run__steps=0), "--data.train=rows.jsonl"])


def refuse_other_files(world: World, tmp_path: Path, arguments: list[str]) -> None:
    world, own, clock = replace(world, node_size=1), tmp_path / f"machine {world.rank}", Clock()
    own.mkdir()
    os.chdir(own)
    config = load_config(Config, None, arguments)
    with pytest.raises(
        ConfigError, match="run.dir = 'run' is not on the machine of rank 1 what it is on that of rank 0"
    ):
        with guarded(config, Path("run"), world, clock):
            pass
    with guarded(config, Path(config.run.dir), world, clock):
        assert not [*Path(config.run.dir).glob(".shared*")]
    if world.is_main:
        Path("run/checkpoints/step_000003").mkdir(parents=True)
    with pytest.raises(ConfigError, match="newest checkpoint of run.dir = 'run' is not on the machine of rank 1"):
        newest_checkpoint(Path("run"), world)
    Path("rows.jsonl").write_text("".join(json.dumps({"prompt": f"{i}", "answer": "x"}) + "\n" for i in range(24)))
    Job(config, world, resume=False).graders.close()
    row = json.dumps({"prompt": "24", "answer": "xy"[world.rank]}) + "\n"
    Path("rows.jsonl").write_text(Path("rows.jsonl").read_text() + row)
    with pytest.raises(
        ConfigError, match=r"the data \(data.train, data.mix, data.eval\) is not on the machine of rank 1"
    ):
        Job(config, world, resume=False)


@pytest.mark.slow
def test_jobs_that_take_turns_train_as_they_do_alone(settings, tmp_path: Path) -> None:
    """Each rolls out while the other waits to learn."""
    options: dict[str, dict[str, Any]] = {
        "one": dict(loss__kl_coef=0.1, trainer__offload_optimizer="true"),
        "other": dict(run__seed=1, rollout__prepack="false"),
    }
    with ExitStack() as stack:
        jobs: dict[str, Job] = {}
        for name in options:
            train_all(ALONE, [(settings(f"{name} alone", **options[name]), False)])
            jobs[name] = make_job(settings(f"{name} in turns", **options[name]))
            stack.enter_context(jobs[name].graders)
            jobs[name].release()
        for step in range(1, RACE["run__steps"] + 1):
            rollouts = {}
            for name, job in jobs.items():
                job.take_back()
                plan = job.plan()
                job.regroup(plan)
                rollouts[name] = job.roll_out(plan)
                job.release()
            for name, job in jobs.items():
                job.take_back()
                _, [update] = job.learn(rollouts[name])
                job.sync_weights()
                job.release()
                alone = tmp_path / f"{name} alone"
                groups = load_groups(alone / "rollouts", step, job.trainer.model.shape)
                assert [g.samples for g in rollouts[name].groups] == [g.samples for g in groups]
                assert update["loss"] == steps_of(alone)[step - 1]["train"]["loss"]
