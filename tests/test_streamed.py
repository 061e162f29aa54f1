"""Ranks that leave a round to train: the same tokens, the same gradient, the same training; nothing lost or doubled."""

import json
import os
import signal
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import steps_of, thorough, train_runs
from graders import share_of_digits
from test_trainer import gradient
from torch.multiprocessing.spawn import ProcessException

import parallel
from buffer import SampleBuffer
from checkpoint import list_checkpoints
from config import ConfigError, load_config
from core import Prompt
from data import PromptCursor
from engine.sequence import Sequence
from job import Job
from learning import group_advantages, learn, put_groups
from loss import LOSSES, LossConfig
from metrics import Clock
from overlap.streamed import StreamedRound, StreamTraining
from parallel import SampleStream, World
from policies.scale_down import StreamPolicy
from policies.step_times import FittedTimes
from rewards.graders import GRADERS
from rollout import Engine
from settings import Config, check_stream


@pytest.fixture
def settings(settings, tmp_path: Path):
    rows = [{"prompt": f"say {i}", "answer": str(i), "task": "match"} for i in range(48)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return partial(
        settings,
        run__steps=3,
        run__eval_every=0,
        data__train=tmp_path / "data.jsonl",
        data__eval_prompts=2,
        scheduler__policy="synchronous",
        scheduler__num_prompts=8,
        scheduler__window_iterations=2,  # 16 once ranks have left
        rollout__max_response_tokens=160,  # half of a random model's responses run to it
        rollout__kv_gib=0.02,
        rollout__page_size=8,
        trainer__tokens_per_microbatch=256,
        stream__policy="fixed",
        stream__fixed_share=0.2,
    )


WHOLE = dict(run__dump_rollouts="true", data__eval_prompts=0)


def make_tail() -> None:
    """Give responses the lengths of a long tail, grades at once, and time to those who train beside a tiny model."""
    GRADERS["match"], add, send = share_of_digits, Engine.add, StreamedRound._send

    def add_with_length(engine: Engine, sequence: Sequence) -> None:
        _, prompt, response = sequence.id
        sequence.max_new_tokens = 150 if prompt % 3 == 0 and not response else 5 + (prompt * 7 + response * 5) % 40
        sequence.ignore_eos = True
        add(engine, sequence)

    Engine.add = add_with_length
    StreamedRound._send = lambda *args: (send(*args), time.sleep(0.02))


# ---- gradients ---------------------------------------------------------------------------------------------------


def streamed_gradients(world: World, settings: list[str], losses: list[str]) -> None:
    """For each loss: stream a round, learn what is left, and learn the same groups again without streaming."""
    config = load_config(Config, None, settings)
    Path(config.run.dir).mkdir(exist_ok=True)
    job, seen, take, arrived = Job(config, world, resume=False), [], SampleStream.take, []
    SampleStream.take = lambda *args: arrived.append(take(*args)) or arrived[-1]
    job.trainer._step = lambda lr: seen.append(gradient(job.trainer).clone())
    with job.graders:
        for name in losses:
            # At a cap of 1, rounding would decide which weights reach it.
            job.trainer.loss = LossConfig(name=name, kl_coef=0.1, tis_cap=2.0).for_dtype(torch.float32)
            plan = job.policy.begin(job.cursor.take, 9)
            buffer, again = SampleBuffer(plan.keep_prompts), SampleBuffer(plan.keep_prompts)
            streamed = job.streaming.begin(plan, buffer)
            size, shard = config.rollout.tensor_parallel, config.trainer.shard
            assert job.streaming.policy.shard_replicas == max(shard // size, 1)
            groups, current = job.play(plan, job.policy, Clock(), streamed)
            job.policy.close(current.aborted)
            assert streamed.record["samples"] == len(buffer.taken) > 4 and not len(buffer), streamed.record
            has_trained = streamed.outcome.tokens > 0
            assert has_trained == (world.rank >= world.size // 2)
            assert any(map(any, arrived)) == has_trained, "some were complete before the scale-down, some later"
            arrived.clear()
            advantages = group_advantages(groups, config.loss, config.reward, config.rollout.max_response_tokens)
            for each in (buffer, again):
                put_groups(each, groups, advantages, config.loss, config.reward, config.rollout.max_response_tokens)
            assert len(again) == len(buffer) + len(buffer.taken) == 32
            mixed, plain = learn(job.trainer, buffer)[0], learn(job.trainer, again)[0]
            mine, expected = seen[-2:]
            assert expected.norm() > 1e-3
            assert (mine - expected).norm() / expected.norm() < 1e-6, name
            for key in ("loss", "entropy", "kl", "trained_tokens", "clip_fraction"):
                assert mixed[key] == pytest.approx(plain[key], rel=1e-5, abs=1e-7), (name, key)
            assert mixed["trained_tokens"] > 0
    assert len(seen) == 2 * len(losses)
    SampleStream.take = take
    times = {n: [list(window) for window in known.windows] for n, known in job.streaming.times.items()}
    state = json.loads(json.dumps(job.streaming.state_dict()))  # as a checkpoint keeps it
    job.streaming.times = {n: FittedTimes(known.capacity) for n, known in job.streaming.times.items()}
    job.streaming.load_state_dict(state)
    assert {n: list(known.windows) for n, known in job.streaming.times.items()} == times and any(times.values())


# ---- whole runs --------------------------------------------------------------------------------------------------


def check_ranks(world: World, settings: list[str], losses: list[str], runs: list[list[str]]) -> None:
    make_tail()
    streamed_gradients(world, settings, losses)
    train_runs(world, *runs)


def trained(folder: Path) -> list[list[tuple]]:
    """Return (name, tokens, reward) of every trained sample, step by step."""
    steps = []
    for path in sorted((folder / "rollouts").glob("*.jsonl")):
        rows = [json.loads(line) for line in path.open()]
        steps.append(
            sorted(
                (row["epoch"], row["prompt"]["index"], i, s["token_ids"], r["value"])
                for row in rows
                for i, (s, r) in enumerate(zip(row["samples"], row["rewards"]))
            )
        )
    return steps


SOME = ["gspo", "decoupled", "sft"]


@pytest.mark.parametrize(
    "ranks, losses, variants",
    [
        (2, SOME, [{}]),
        thorough(2, [name for name in LOSSES if name not in SOME], [{}]),
        thorough(
            4,
            ["gspo"],
            [
                {"trainer__shard": 2, "rollout__weights": "sharded"},
                {"rollout__tensor_parallel": 2, "stream__policy": "paper"},
            ],
        ),
    ],
)
def test_gradients_and_training_are_those_of_the_plain_run(
    run_ranks, settings, tmp_path, ranks: int, losses: list[str], variants: list[dict]
) -> None:
    whole = WHOLE | dict(run__steps=4, log__trace="true")
    runs = [settings(f"run{i}", **whole, **variant) for i, variant in enumerate(variants)]
    runs.append(settings("plain", **whole, stream__policy="off"))
    run_ranks(ranks, check_ranks, settings("gradients", loss__kl_coef=0.1, **variants[0]), losses, runs)
    plain = steps_of(tmp_path / "plain")
    assert any(abs(record["train"]["loss"]) > 1e-3 for record in plain)
    assert not any("stream" in record["round"] for record in plain)
    for i in range(len(variants)):
        assert trained(tmp_path / f"run{i}") == trained(tmp_path / "plain")
        records = steps_of(tmp_path / f"run{i}")
        assert sum(record["round"]["stream"]["samples"] > 0 for record in records) > 2
        assert sum(record["round"]["migrated"] for record in records) > 6
        for mine, theirs in zip(records, plain, strict=True):
            assert (mine["reward"], mine["tokens"]) == (theirs["reward"], theirs["tokens"])
            for name in ("loss", "grad_norm", "entropy"):
                assert mine["train"][name] == pytest.approx(theirs["train"][name], abs=1e-5), name
            assert mine["train"]["logprob_diff_max"] < 1e-4
        check_record(next(r for r in records if r["round"]["stream"]["samples"]))
        names = {
            (e["tid"], e["name"]) for e in json.loads((tmp_path / f"run{i}" / "trace.json").read_text()) if "tid" in e
        }
        last = 1 if ranks == 2 or i else 3
        assert (last, "stream_train") in names and (0, "stream_train") not in names


def estimate_together(world: World, settings: list[str]) -> None:
    """All ranks must know the same before each round, or they decide differently; every scale-down is made to pay."""
    make_tail()
    begin, project = StreamTraining.begin, StreamPolicy.project
    slow = GRADERS["match"]
    GRADERS["match"] = lambda *args: time.sleep(0.01) or slow(*args)

    def checked(self: StreamTraining, *args):
        states = parallel.gather_objects(self.world, self.state_dict())
        assert all(state == states[0] for state in states)
        return begin(self, *args)

    StreamTraining.begin = checked
    StreamPolicy.project = lambda *args: (project(*args)[0], 1.0)
    train_runs(world, settings)


def test_ranks_that_estimate_know_the_same(run_ranks, settings, tmp_path) -> None:
    run_ranks(2, estimate_together, settings("run", run__steps=6, stream__policy="estimate", data__eval_prompts=0))
    records = steps_of(tmp_path / "run")
    assert len(records) == 6 and sum(record["round"]["stream"]["samples"] > 0 for record in records) > 2


def check_record(record: dict) -> None:
    stream = record["round"]["stream"]
    assert 0 < stream["samples"] < record["samples"] and 0 < stream["tokens"]
    assert stream["projected"]["replicas"] * 2 in (2, 4) and 0.2 <= stream["projected"]["at"] < 1
    assert stream["projected"]["peak_tokens"] > 0 and stream["true"]["peak_tokens"] > 0
    assert stream["train_seconds"] > 0 and stream["wait_seconds"] >= 0
    assert 0 < stream["switch_seconds"] < stream["true"]["rest_seconds"] < record["seconds"]["rollout"]
    assert stream["true"]["trained_seconds"] == pytest.approx(stream["train_seconds"] / 2)


# ---- the stream --------------------------------------------------------------------------------------------------


def use_stream(world: World) -> None:
    """Rank 0 feeds rank 1, twice; then rank 2 goes, and rank 1 stops to listen."""
    stream, hasty = (SampleStream(replace(world, timeout_seconds=s), in_flight=3) for s in (60.0, 1.0))
    [pair] = parallel.subsets(world, [[0, 1]])
    for _ in range(2):
        if world.rank == 0:
            stream.open_to([1, 2])
            for i in range(200):
                while not stream.send(1, (i, b"x" * 1000 * (i % 7))):
                    time.sleep(0.001)
            stream.close()
        else:
            stream.open_from(0)
            got = []
            while not stream.is_over:
                got += stream.take(0.01)
            stream.close()
            got += stream.take()
            assert [(i, len(data)) for i, data in got] == [(i, 1000 * (i % 7)) for i in range(200) if world.rank == 1]
    parallel.barrier(world)
    if world.rank == 2:
        os._exit(0)
    if world.rank == 1:
        stream.open_from(2)
        with pytest.raises(ConnectionError, match="rank 1 waited for rank 2 to send samples or the end.* and lost it"):
            stream.close()
        parallel.barrier(pair)
        os._exit(0)
    hasty.open_to([1])
    assert [hasty.send(1, i) for i in range(5)] == [True] * 3 + [False] * 2, "nobody takes any"
    with pytest.raises(TimeoutError, match="rank 0 waited 1 s for rank 1 to acknowledge samples"):
        while True:
            hasty.send(1, 0)
            time.sleep(0.01)
    with pytest.raises(TimeoutError):
        hasty.close()
    parallel.barrier(pair)
    os._exit(0)


def test_a_stream_keeps_order_and_bounds_and_says_who_is_missing(run_ranks) -> None:
    run_ranks(3, use_stream)


# ---- killed ranks ------------------------------------------------------------------------------------------------


def train_and_be_killed(world: World, settings: list[str], method: str, rank: int, step: int) -> None:
    """Begin or resume, and let `rank` be killed where it first calls this method of its streamed round in `step`."""
    make_tail()
    original = getattr(StreamedRound, method)

    def call_or_die(self: StreamedRound, *args):
        if (world.rank, self.run.engine.version) == (rank, step - 1):
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, *args)

    setattr(StreamedRound, method, call_or_die)
    train_runs(world, settings, resume=True)


@pytest.mark.thorough
def test_ranks_killed_while_streaming_lose_nothing(run_ranks, settings, tmp_path) -> None:
    args = settings("killed", **WHOLE, run__steps=4, run__checkpoint_every=2)
    run = tmp_path / "killed"
    # The rank that trains, while it streams, before there is a checkpoint; then the rank that decodes.
    for method, rank, step, kept in (("_train_batch", 1, 2, []), ("_send", 0, 4, ["step_000002"])):
        with pytest.raises(ProcessException):
            run_ranks(2, train_and_be_killed, args, method, rank, step)
        assert steps_of(run)[-1]["step"] == step - 1
        assert [folder.name for folder in list_checkpoints(run)] == kept
    run_ranks(2, train_and_be_killed, args, "_send", 0, 5)  # there is no step 5
    names = [[row[:2] for row in step if row[2] == 0] for step in trained(run)]
    assert [len(step) for step in names] == [8] * 4
    cursor = PromptCursor([Prompt(i, (i,), "", "", "") for i in range(48)], seed=0)
    assert Counter(sum(names, [])) == Counter(visit.id for visit in cursor.take(32))
    assert [r["step"] for r in steps_of(run)] == [1, 2, 3, 4]


# ---- refusals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ranks, overrides, message",
    [
        (2, ["trainer.updates_per_step=2"], "trainer.updates_per_step = 2 changes them in between; take 1"),
        (2, ["loss.advantage=reinforce_baseline"], "needs all groups; take one of grpo, dr_grpo, rloo"),
        (2, ["loss.credit=turn"], "knows the advantages of whole episodes only; take loss.credit = episode"),
        (2, ["scheduler.dynamic_sampling=true"], "may still drop a complete group"),
        (2, ["stream.first=0.6"], "stream.first = 0.6 is over stream.last = 0.5"),
        (2, ["trainer.shard=2"], "2 ranks with rollout.tensor_parallel = 1 and trainer.shard = 2 have no two halves"),
        (4, ["rollout.tensor_parallel=4"], "4 ranks with rollout.tensor_parallel = 4"),
        (6, ["trainer.shard=2"], "have no two halves of whole groups"),
    ],
)
def test_what_cannot_be_streamed_is_refused(ranks: int, overrides: list[str], message: str) -> None:
    streams = load_config(Config, None, [f"--{o}" for o in (*overrides, "stream.policy=estimate")])
    with pytest.raises(ConfigError, match=message):
        check_stream(streams, ranks)
    check_stream(replace(streams, stream=replace(streams.stream, policy="off")), ranks)


def test_what_can_be_streamed_is_not_refused() -> None:
    for ranks, overrides in ((1, []), (2, []), (5, []), (4, ["trainer.shard=2"]), (8, ["rollout.tensor_parallel=4"])):
        check_stream(load_config(Config, None, [f"--{o}" for o in (*overrides, "stream.policy=paper")]), ranks)
