"""Rounds on ranks apart: some only train, others only decode, and the run is that of ranks which do both."""

import json
from functools import partial
from multiprocessing import ProcessError
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, steps_of, train_runs
from test_updates import losses, tokens_of, train_and_be_killed
from torch.multiprocessing.spawn import ProcessException

import train
from checkpoint import list_checkpoints, load_state
from metrics import read_records

APART = dict(overlap__train_ranks=1)
RACES = dict(scheduler__policy="tail_batching", scheduler__eta_prompts=1.5, scheduler__eta_responses=1.5)
EPISODES = dict(data__env=f"{ROOT}/tests/worlds.py:chat", data__task="env", env__clock="steps", env__max_turn_tokens=24)
# Runs that end in a long round, with a queue before it; with an evaluation and a checkpoint on the way.
RUNS: dict[str, dict[str, Any]] = {
    "races": RACES,
    "audited": RACES | dict(scheduler__dynamic_sampling="true", scheduler__audit=0.5, trainer__updates_per_step=2),
    "episodes": RACES | EPISODES,
}


@pytest.fixture
def settings(settings, tmp_path: Path):
    rows = [{"prompt": "count " + "up " * (i % 5) + str(i), "answer": str(i)} for i in range(48)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return partial(
        settings,
        run__steps=4,
        run__eval_every=3,
        run__checkpoint_every=2,
        run__dump_rollouts="true",
        data__eval_prompts=3,
        data__train=tmp_path / "prompts.jsonl",
        data__task=f"{ROOT}/tests/graders.py:share_of_digits",
        scheduler__window_iterations=4,
        rollout__max_prompt_tokens=32,
        rollout__max_response_tokens=64,
        rollout__page_size=8,
        rollout__kv_gib=0.05,
        trainer__lr=3e-3,
    )


def evaluations(folder: Path) -> list[tuple[float, dict]]:
    return [(r["eval"]["avg@4"], r["eval"]["length"]) for r in read_records(folder / "steps.jsonl") if r.get("eval")]


def test_ranks_apart_train_bit_for_bit_as_one_rank_does(settings, run_ranks, tmp_path: Path) -> None:
    run_ranks(2, train_runs, *(settings(f"{name} apart", **way, **APART) for name, way in RUNS.items()))
    for name, way in RUNS.items():
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


def test_pools_of_any_size_train_the_same_rounds(settings, run_ranks, tmp_path: Path) -> None:
    assert train.main(settings("one", **RACES)) == 0
    two = dict(overlap__train_ranks=2)
    runs = {"sharded": two | dict(trainer__shard=2), "by two": two | dict(rollout__tensor_parallel=2)}
    run_ranks(4, train_runs, *(settings(name, **RACES, **way) for name, way in runs.items()))
    for name in runs:
        assert tokens_of(tmp_path / name) == tokens_of(tmp_path / "one")
        for mine, theirs in zip(losses(tmp_path / name), losses(tmp_path / "one"), strict=True):
            assert mine == pytest.approx(theirs, abs=1e-5)


def test_rounds_apart_resume_bit_for_bit(settings, run_ranks, tmp_path: Path) -> None:
    make = partial(settings, **RACES, **APART)
    run_ranks(2, train_runs, make("straight"))
    with pytest.raises((ProcessError, ProcessException)):
        run_ranks(2, train_and_be_killed, make("killed"))
    assert [folder.name for folder in list_checkpoints(tmp_path / "killed")] == ["step_000002"]
    run_ranks(2, partial(train_runs, resume=True), make("killed"))
    assert losses(tmp_path / "killed") == losses(tmp_path / "straight")
    assert tokens_of(tmp_path / "killed") == tokens_of(tmp_path / "straight")
