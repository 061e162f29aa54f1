"""The scripts of examples/ do what they say: data, reward, loss and policy of a user's own train a model."""

import json
import runpy
import sys
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from itertools import count

import pytest
from conftest import ROOT, steps_of
from graders import share_of_digits

import train
from config import load_config
from core import Prompt, Visit
from envs import player
from loss import LOSSES
from process import launcher
from rewards.graders import resolve_grader
from scheduler import POLICIES, SchedulerConfig
from settings import Config

pytestmark = pytest.mark.slow  # processes and whole runs

EXAMPLES = ROOT / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator:
    """Run a script of examples/ with a command line, from the root; return its exit code. Its entries do not stay."""
    tables: tuple[dict, dict] = LOSSES, POLICIES
    before = [dict(table) for table in tables]
    monkeypatch.chdir(ROOT)

    def run(name: str, *arguments: str) -> object:
        monkeypatch.setattr(sys, "argv", [str(EXAMPLES / name), *arguments])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return ended.value.code

    yield run
    for table, entries in zip(tables, before):
        table.clear()
        table.update(entries)


@pytest.fixture
def tiny(settings, tmp_path):
    """Return own.toml and what makes it one step of a tiny model, whose reward is not always the same."""
    rows = [{"prompt": "1" * (i % 7 + 1), "answer": ""} for i in range(8)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = {"run__steps": 1, "data__train": tmp_path / "data.jsonl", "data__eval_prompts": 0}
    own["data__task"] = f"{ROOT}/tests/graders.py:share_of_digits"
    return lambda **more: ["--config", "examples/own.toml", *settings(**own | more)]


def test_own_data_and_reward(example, tiny, tmp_path, capsys) -> None:
    config = load_config(Config, str(EXAMPLES / "own.toml"), [])
    runpy.run_path(str(EXAMPLES / "own_data.py"), run_name="__main__")
    (tmp_path / "own.jsonl").write_text(capsys.readouterr().out)
    own = tiny(data__train=tmp_path / "own.jsonl", data__task=config.data.task, run__dump_rollouts="true")
    assert train.main(own) == 0
    [record] = steps_of(tmp_path / "run")
    assert record["reward_errors"] == 0 and record["reward"] < 0.1
    brief = resolve_grader(config.data.task)
    assert [brief(text, "41", {}) for text in ("=41", f"{'9' * 97}=41", "=14")] == pytest.approx([1.097, 1.0, 0.0])


def test_own_environment(tiny, tmp_path) -> None:
    name = f"{ROOT}/examples/own_environment.py:retry"
    own = tiny(data__env=name, data__task="env", run__dump_rollouts="true")
    assert player.main([name, f"--data={tmp_path}/data.jsonl", "--check"]) == 0
    assert train.main(own) == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "rollouts" / "step_000001.jsonl").read_text().splitlines()]
    assert {reward["value"] for row in rows for reward in row["rewards"]} <= {0.0, 0.5, 0.75, 1.0}


def test_own_service(tiny, tmp_path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    handler = runpy.run_path(str(EXAMPLES / "own_service.py"))["Handler"]
    handler.log_message = lambda *_: None
    with ThreadingHTTPServer(("localhost", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,)).start()
        address = f"http://localhost:{server.server_port}/"
        games = {"far": address, "near": f"{ROOT}/examples/own_environment.py:retry"}
        for name, env in games.items():
            own = tiny(run__dir=tmp_path / name, data__env=env, data__task="env", env__clock="steps")
            assert train.main([*own, "--run.dump_rollouts=true"]) == 0
        server.shutdown()
    far, near = ((tmp_path / name / "rollouts" / "step_000001.jsonl").read_text() for name in games)
    assert [json.loads(line)["samples"] for line in far.splitlines()] == [
        json.loads(line)["samples"] for line in near.splitlines()
    ]


@pytest.mark.slow
def test_own_agent(tiny, tmp_path) -> None:
    """Its calls over HTTP make the samples that the same game makes as a generator, over two updates."""
    games = {"agent": "own_agent.py:retry", "plain": "own_environment.py:retry"}
    for name, env in games.items():
        own = dict(run__dir=tmp_path / name, data__env=f"{EXAMPLES}/{env}", data__task="env", env__clock="steps")
        own |= dict(run__steps=2, reward__also=f"{ROOT}/tests/graders.py:share_of_digits=1", env__step_seconds=60)
        assert train.main([*tiny(**own), "--run.dump_rollouts=true"]) == 0
    agent, plain = (steps_of(tmp_path / name) for name in games)
    assert [record["train"]["loss"] for record in agent] == [record["train"]["loss"] for record in plain]
    assert all(record["train"]["grad_norm"] > 0 for record in agent)
    for step in (1, 2):
        texts = ((tmp_path / name / "rollouts" / f"step_{step:06d}.jsonl").read_text() for name in games)
        first, second = ([json.loads(line)["samples"] for line in text.splitlines()] for text in texts)
        assert first == second


def test_own_loss(example, tiny, tmp_path) -> None:
    """The built-in loss would clip every second update."""
    bounds = {"trainer__updates_per_step": 2, "loss__clip_low": 0, "loss__clip_high": 0}
    assert example("own_loss.py", *tiny(loss__name="unclipped", **bounds)) == 0
    [record] = steps_of(tmp_path / "run")
    assert record["train"]["grad_norm"] > 0 and record["train"]["clip_fraction"] == 0


def test_own_policy(example, tiny, tmp_path) -> None:
    assert example("own_policy.py", *tiny(scheduler__policy="longest_first")) == 0
    [record] = steps_of(tmp_path / "run")
    assert record["train"]["grad_norm"] > 0 and record["round"]["kind"] == "long"
    numbers = count()

    def take(n: int) -> list[Visit]:
        return [Visit(0, Prompt(i := next(numbers), (1,) * (i % 3 + 1), "", "", "math")) for _ in range(n)]

    plan = POLICIES["longest_first"](SchedulerConfig(num_prompts=4)).begin(take, 1)
    assert [visit.prompt.index for visit in plan.prompts] == [2, 1, 0, 3]


def test_ranks_start_the_script_that_has_the_entry(example, tiny, monkeypatch) -> None:
    started = []
    monkeypatch.setattr(launcher, "launch", lambda script, *_: started.append(script) or 0)
    assert example("own_loss.py", *tiny(loss__name="unclipped"), "--ranks=2") == 0
    assert started == [str(EXAMPLES / "own_loss.py")]


@pytest.mark.thorough
@pytest.mark.slow
def test_the_notebook_runs_and_keeps_no_outputs(settings, tmp_path, monkeypatch) -> None:
    """Every cell, on a tiny model, with two steps on one rank and a grader that gives a random model a gradient."""
    notebook = ROOT / "docs" / "first_hour.ipynb"
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    assert not [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")]
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(ROOT)
    import matplotlib

    matplotlib.use("Agg")
    own = settings(run__steps=2, run__eval_every=1, rollout__max_prompt_tokens=64)
    run = runpy.run_path(str(ROOT / "docs" / "run_notebook.py"))["run"]
    names = run(notebook, SETTINGS=own, RANKS=1, grader=share_of_digits)
    assert names["update"]["grad_norm"] > 0 and names["update"]["logprob_diff_max"] < 1e-4
    assert [old.logprobs != new.logprobs for old, new in zip(names["samples"], names["after"])] == [True] * 4
    assert [record["step"] for record in names["records"]] == [0, 1, 2]
    assert all((tmp_path / "run" / name).stat().st_size > 10_000 for name in ("learning.png", "timeline.png"))
