"""Ranks that leave a round to train: the same tokens, the same gradient, the same training; nothing lost or doubled."""

import json
import os
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from test_trainer import gradient

import parallel
import stream_training
import train
from config import ConfigError, load_config
from loss import LOSSES, LossConfig
from metrics import Clock, read_records
from parallel import SampleStream, World
from settings import Config, check_stream

GRADERS = ROOT / "tests" / "graders.py"


@pytest.fixture
def settings(tiny_folder: Path, tmp_path: Path):
    rows = [{"prompt": f"say {i}", "answer": str(i), "task": f"{GRADERS}:share_of_digits"} for i in range(48)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def make(folder: str, **overrides) -> list[str]:
        values = {
            "run.dir": tmp_path / folder,
            "model.path": tiny_folder,
            "data.train": tmp_path / "data.jsonl",
            "run.steps": 3,
            "run.eval_every": 0,
            "data.eval_prompts": 2,
            "scheduler.policy": "synchronous",
            "scheduler.num_prompts": 8,
            "scheduler.num_responses": 4,
            "scheduler.window_iterations": 2,  # of which a long round makes 16
            "rollout.max_prompt_tokens": 16,
            "rollout.max_response_tokens": 160,  # half of a random model's responses run to it
            "rollout.kv_gib": 0.02,
            "rollout.page_size": 8,
            "trainer.lr": 1e-3,
            "trainer.tokens_per_microbatch": 256,
            "reward.num_workers": 1,
            "stream.policy": "fixed",
            "stream.fixed_share": 0.2,
        } | {key.replace("__", "."): value for key, value in overrides.items()}
        return [f"--{key}={value}" for key, value in values.items()]

    return make


def steps_of(folder: Path) -> list[dict]:
    return [r for r in read_records(folder / "steps.jsonl") if r["step"]]


# ---- gradients ---------------------------------------------------------------------------------------------------


def streamed_gradients(world: World, settings: list[str]) -> None:
    """For every loss: stream a round, and learn the same groups again without what was streamed."""
    config = load_config(Config, None, settings)
    Path(config.run.dir).mkdir(exist_ok=True)
    run, seen = train.build(config, world, resume=False), []
    run.trainer._step = lambda lr: seen.append(gradient(run.trainer).clone())
    with run.pool:
        for name in LOSSES:
            run.trainer.loss = LossConfig(name=name, kl_coef=0.1)
            plan = run.policy.plan(run.stream.take, 9)
            streaming = run.streaming.begin(plan)
            groups, current = train.roll_out(run, plan, run.policy, Clock(), streaming)
            run.policy.close(current.aborted)
            done, record = streaming.settle(groups)
            assert record["samples"] == len(done) > 4, record
            own = streaming.came.trained
            assert own <= done and bool(own) == (world.rank >= world.size // 2)
            advantages = train.group_advantages(groups, config)
            streamed = train.learn(run.trainer, groups, advantages, config, done)[0]
            plain = train.learn(run.trainer, groups, advantages, config)[0]
            mine, expected = seen[-2:]
            assert expected.norm() > 1e-3
            assert (mine - expected).norm() / expected.norm() < 1e-6, name
            for key in ("loss", "entropy", "kl", "trained_tokens", "clip_fraction"):
                assert streamed[key] == pytest.approx(plain[key], rel=1e-5, abs=1e-7), (name, key)
            assert streamed["kl"] == 0 or streamed["trained_tokens"] > 0
    assert len(seen) == 2 * len(LOSSES)


@pytest.mark.parametrize("ranks, shard", [(2, 1), (4, 2)])
def test_the_streamed_gradient_is_that_of_the_plain_step(run_ranks, settings, ranks: int, shard: int) -> None:
    run_ranks(ranks, streamed_gradients, settings("run", loss__kl_coef=0.1, trainer__shard=shard))
