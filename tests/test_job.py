"""A job gives the device to others and takes it back: memory is really given up, and no trajectory changes."""

import json
from pathlib import Path

import pytest
import torch
from conftest import ALONE, ROOT
from test_golden import trajectory

import train
from config import load_config
from job import Job
from parallel import World
from settings import Config

RACE = dict(
    run__steps=4,
    run__eval_every=2,
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


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_a_released_job_has_given_its_memory_back_and_refuses_to_work(settings) -> None:
    large = dict(rollout__kv_gib=0.25, rollout__max_running=8192)
    job = make_job(settings("run", loss__kl_coef=0.1, **large))
    with job.graders:
        plan = job.plan()
        job.regroup(plan)
        rollout = job.roll_out(plan)
        job.learn(rollout)
        job.sync_weights()
        trainer, kv_bytes = job.trainer, job.engine.memory.nbytes
        assert kv_bytes > 2**26
        job.engine.memory.fill_(0.0)  # zeros that are not written take no memory
        weights = [*trainer.params, *trainer.reference.parameters()]
        held = [*weights, *(p.grad for p in trainer.params), *trainer._moments()]
        values, before = [tensor.clone() for tensor in held], resident_bytes()
        assert len(trainer._moments()) == 2 * len(trainer.params)

        job.release()
        assert before - resident_bytes() > 0.9 * kv_bytes and job.engine.memory is None
        assert sum(tensor.untyped_storage().nbytes() for tensor in held) == 0
        refused = [(job.plan,), (job.regroup, plan), (job.roll_out, plan), (job.learn, rollout), (job.sync_weights,)]
        for work, *arguments in (*refused, (job.evaluate,), (job.save,), (job.release,)):
            with pytest.raises(RuntimeError, match="take_back"):
                work(*arguments)
        assert job.step == 1

        job.take_back()
        for tensor, value in zip(held, values, strict=True):
            assert torch.equal(tensor, value)
        train.take_step(job)
    assert job.step == 2


def train_all(world: World, runs: list[list[str]], rests: bool) -> None:
    """Train each run; with `rests` every job releases the device before each plan, update and evaluation."""

    def rested(method):
        def rest(job: Job, *args):
            job.release()
            job.take_back()
            return method(job, *args)

        return rest

    with pytest.MonkeyPatch.context() as patch:
        for name in ("plan", "learn", "evaluate") if rests else ():
            patch.setattr(Job, name, rested(getattr(Job, name)))
        for arguments in runs:
            config = load_config(Config, None, arguments)
            Path(config.run.dir).mkdir(exist_ok=True)
            train.train(config, world, resume=False)


VARIANTS = {  # and the ranks that play it
    "alone": (1, dict(loss__kl_coef=0.1, trainer__offload_optimizer="true")),
    "elastic": (2, dict(planner__rule="paper", rollout__kv_gib=0.0003, rollout__page_size=8)),
    "sharded": (2, dict(trainer__shard=2, rollout__tensor_parallel=2)),
}


@pytest.mark.parametrize("ranks", [1, 2])
def test_releases_change_no_trajectory(ranks: int, settings, run_ranks, tmp_path: Path) -> None:
    chosen = {name: options for name, (on, options) in VARIANTS.items() if on == ranks}
    for rests in (False, True):
        runs = [settings(f"{name} {rests}", **options) for name, options in chosen.items()]
        train_all(ALONE, runs, rests) if ranks == 1 else run_ranks(ranks, train_all, runs, rests)
    for name in chosen:
        plain, rested = (trajectory(tmp_path / f"{name} {rests}") for rests in (False, True))
        assert plain == rested and len(set(plain["tokens"])) == 4, name
