"""All parts of RollPacker in one run: its config, four ranks, and every part seen at work in the records."""

import json
import os
from pathlib import Path

import pytest
import torch
from conftest import ROOT, steps_of
from test_judge import TEMPLATE, tiny

import train
from checkpoint import list_checkpoints, load_state
from config import load_config
from model import Model
from parallel import World
from policies.scale_down import StreamPolicy
from policies.step_times import Profile, SizeProfile
from settings import Config, check_run, profile_conditions

CONFIG = str(ROOT / "configs" / "rollpacker.toml")
RANKS = 4


def rows() -> list[dict]:
    """Programs that pass or never end whatever the model writes, questions for the judge, answers by rule."""
    code = {"task": "code", "answer": json.dumps([{"stdin": "", "stdout": ""}])}
    kinds = [
        code | {"template": "# {program}"},
        code | {"template": "while True: pass # {program}"},
        {"task": "judge", "answer": "a"},
        {"task": "match", "answer": "a"},
    ]
    return [{"prompt": f"p{i}", **kinds[i % 4]} for i in range(32)]


@pytest.fixture
def arguments(settings, tiny_folder: Path, tiny_model: Model, tmp_path: Path) -> list[str]:
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
    given = settings(
        run__steps=4,
        run__eval_every=0,
        run__checkpoint_every=4,
        data__train=tmp_path / "data.jsonl",
        data__eval_prompts=0,
        scheduler__eta_prompts=2,  # what one round queues fills the next
        scheduler__window_iterations=2,
        rollout__max_response_tokens=100,
        rollout__kv_gib=0.02,
        planner__profile=tmp_path / "profile.json",
        stream__first=0.05,  # of 16 responses half run to the limit
        reward__case_min_seconds=0.1,
        reward__case_max_seconds=5,
        reward__case_audit=0,
        judge__path=tiny("qwen3", tmp_path / "judge", tiny_folder),
        judge__template=TEMPLATE,
        judge__accept="y",
        judge__reject="n",
    )
    config = load_config(Config, CONFIG, given)
    made_on = profile_conditions(config, tiny_model.shape, RANKS, torch.device("cpu"))
    sizes = {  # more ranks are slower, by far
        n: SizeProfile(1000, ((1, 16, 0.01 * n**3), (8, 64, 0.02 * n**3)), ((16, 1e-4), (64, 1e-4))) for n in (1, 2, 4)
    }
    Profile(made_on, sizes).save(tmp_path / "profile.json")
    return given


def train_with_all_parts(world: World, arguments: list[str]) -> None:
    # Whether it pays to let ranks go is a matter of time, which no test may rely on: here it always does.
    project = StreamPolicy.project
    StreamPolicy.project = lambda *args: (project(*args)[0], 1.0)
    os.environ["LOCAL_WORLD_SIZE"] = str(world.size)  # as torchrun does
    config = load_config(Config, CONFIG, arguments)
    check_run(config, world.size, resume=False, is_main=world.is_main)
    Path(config.run.dir).mkdir(exist_ok=True)
    train.train(config, world, resume=False)


def test_all_parts_in_one_run_of_four_ranks(run_ranks, arguments, tmp_path: Path) -> None:
    run_ranks(RANKS, train_with_all_parts, arguments)
    records = steps_of(tmp_path / "run")
    assert [r["round"]["kind"] for r in records] == ["short", "long"] * 2
    assert [r["round"]["queue"] for r in records] == [4, 0] * 2 and records[0]["round"]["wasted_tokens"] > 0
    for record in records:
        assert record["planner"]["size"] == 1 and set(record["planner"]["predicted"]) == {"1", "2", "4"}
        assert record["reward_errors"] == 0 and record["samples"] == 16
    assert records[1]["round"]["stream"] == {"samples": 0}, "no lengths are known yet"
    streamed = records[3]["round"]["stream"]
    assert streamed["projected"]["replicas"] == 2 and streamed["projected"]["seconds_saved"] == 1
    assert sum(r["judge"].get("texts", 0) for r in records) > 0
    assert sum(r["rewards"]["cases"]["timeouts"] for r in records) > 0
    state = load_state(list_checkpoints(tmp_path / "run")[-1])
    assert state["timeouts"], "limits follow what correct programs took"
    tasks = {task for record in records for task in record["reward_by_task"]}
    assert tasks == {"code", "judge", "match"}
