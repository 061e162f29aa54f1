"""The whole program: the step loop alone and under torchrun, resume, replay, refusals."""

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from conftest import ALONE, ROOT, any_shape, steps_of, thorough, train_runs
from test_scheduler import HalfWins, NeverAgain
from torch.multiprocessing.spawn import ProcessException

import train
from checkpoint import Checkpoints, _Writer, list_checkpoints, load_state, load_tokenizer
from config import flatten, load_config
from core import Group, Prompt, Reward, Sample
from data import PromptCursor, load_groups
from job import Job
from learning import group_advantages
from loss import LossConfig
from metrics import Recorder, read_records
from overlap.phases import Phases
from parallel import World
from policies.planner import ParallelismPlanner
from process.run_folder import write_settings
from reward import RewardConfig
from rewards.pool import RewardPool
from rewards.timeouts import AdaptiveTimeouts
from rounds import Round
from scheduler import POLICIES
from settings import Config, check_run

pytestmark = pytest.mark.slow  # processes and whole runs

GRADERS = ROOT / "tests" / "graders.py"
TRAJECTORY = ("loss", "grad_norm", "entropy", "kl")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    rows = [{"prompt": "count " + "up " * (i % 5) + str(i), "answer": str(i)} for i in range(48)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def settings(settings, prompts: Path):
    return partial(
        settings,
        run__steps=3,
        run__eval_samples=2,
        data__train=prompts,
        data__task=f"{GRADERS}:share_of_digits",
        rollout__max_prompt_tokens=32,
        rollout__max_response_tokens=32,
        rollout__page_size=8,
        trainer__lr=3e-3,
        trainer__tokens_per_microbatch=256,
    )


def trajectory(folder: Path) -> list[tuple]:
    return [(r["step"], r["reward"], r["tokens"], *(r["train"][name] for name in TRAJECTORY)) for r in steps_of(folder)]


@pytest.mark.slow
def test_a_run_learns_and_writes_what_it_promises(settings, tmp_path):
    assert train.main(settings(run__steps=25, run__eval_every=10, run__checkpoint_every=10, trainer__lr=1e-2)) == 0
    run = tmp_path / "run"
    records = read_records(run / "steps.jsonl")
    assert [r["step"] for r in records] == list(range(26))
    assert [r["step"] for r in records if "eval" in r] == [0, 10, 20, 25]
    rewards = [r["reward"] for r in records[1:]]
    assert sum(rewards[-5:]) / 5 > 2 * sum(rewards[:5]) / 5, rewards
    assert records[-1]["eval"]["avg@2"] > records[0]["eval"]["avg@2"]
    assert max(r["train"]["logprob_diff_max"] for r in records[1:]) < 1e-4
    for record in records[1:]:
        assert record["samples"] == 16
        assert {"rollout", "exchange", "train", "sync", "reward", "step"} <= record["seconds"].keys()
        assert (
            record["length"]["p50"]
            <= record["length"]["p75"]
            <= record["length"]["p99"]
            <= record["length"]["max"]
            <= 32
        )
    assert len(list_checkpoints(run)) == 2 and list_checkpoints(run)[-1].name == "step_000025"
    assert "reward" in (run / "samples" / "step_000025.txt").read_text()
    assert load_config(Config, str(run / "config.toml"), []).run.steps == 25


ROUND = ("kind", "prompts", "aborted", "queue", "wasted_tokens", "longest", "zero_variance")


def rounds_of(folder: Path) -> list[tuple]:
    return [tuple(record["round"][name] for name in ROUND) for record in steps_of(folder)]


RACE = dict(
    run__steps=4,
    run__eval_every=0,
    data__eval_prompts=0,
    scheduler__num_prompts=8,
    scheduler__num_responses=4,
    scheduler__eta_prompts=1.5,  # two short rounds fill the long one
    scheduler__eta_responses=2,
    scheduler__window_iterations=4,
    rollout__max_response_tokens=80,
    rollout__stop=json.dumps([*"ABCD"]),  # a random model ends one response in four at the limit, the others before
    rollout__kv_gib=0.05,
)


def test_migration_placement_and_the_number_of_ranks_change_no_trajectory(settings, run_ranks, tmp_path):
    """Without migration, prompts together: tests/test_golden.py."""
    moves = RACE | dict(scheduler__migrate="true")
    assert train.main(settings("ranks1", **moves)) == 0
    spread = settings("spread4", **RACE, scheduler__placement="spread")
    run_ranks(4, train_runs, settings("ranks4", **moves), spread)
    alone, rounds = trajectory(tmp_path / "ranks1"), rounds_of(tmp_path / "ranks1")
    assert any(abs(row[3]) > 1e-3 for row in alone), "a loss of zero would compare nothing"
    assert [row[0] for row in rounds] == ["short", "short", "long", "short"]
    assert all(row[2] > 10 for row in rounds if row[0] == "short"), rounds
    for other in ("ranks4", "spread4"):
        for mine, theirs in zip(alone, trajectory(tmp_path / other), strict=True):
            assert mine == pytest.approx(theirs, abs=1e-5)
        assert rounds_of(tmp_path / other) == rounds
    records = steps_of(tmp_path / "ranks4")
    assert all(record["train"]["logprob_diff_max"] < 1e-4 for record in records)
    assert sum(record["round"]["migrated"] for record in records) > 0


@pytest.mark.thorough
def test_tail_batching_with_eta_one_is_the_synchronous_run(settings, tmp_path):
    overrides = RACE | dict(run__steps=3, scheduler__eta_prompts=1, scheduler__eta_responses=1)
    assert train.main(settings("eta", **overrides)) == 0
    overrides |= dict(scheduler__policy="synchronous", scheduler__eta_prompts=2, scheduler__eta_responses=2)
    assert train.main(settings("baseline", **overrides)) == 0
    assert trajectory(tmp_path / "eta") == trajectory(tmp_path / "baseline")
    assert rounds_of(tmp_path / "eta") == rounds_of(tmp_path / "baseline")


@pytest.mark.slow
def test_windows_and_audits_change_no_trajectory(settings, tmp_path):
    variants = {
        "small": dict(scheduler__window_iterations=1),
        "large": dict(scheduler__window_iterations=1000, log__trace="true"),
        "audited": dict(scheduler__audit=1),
    }
    for name, overrides in variants.items():
        assert train.main(settings(name, **RACE | overrides)) == 0
        for mine, theirs in zip(trajectory(tmp_path / name), trajectory(tmp_path / "small"), strict=True):
            assert mine == pytest.approx(theirs, abs=1e-6)  # by rounding: batches differ
    for small, large, audited in zip(*(steps_of(tmp_path / name) for name in variants), strict=True):
        if small["round"]["kind"] == "long":
            assert "audited" not in audited["round"]
            continue
        assert small["round"]["wasted_tokens"] < large["round"]["wasted_tokens"]
        report = audited["round"]["audited"]
        assert report["accepted"]["responses"] == 32 and audited["round"]["aborted"] == 0
        assert sum(part["responses"] for part in report.values()) == audited["round"]["responses"]
        assert report["accepted"]["length"]["mean"] < report["censored_responses"]["length"]["mean"]
        assert report["accepted"]["length"]["mean"] == pytest.approx(audited["tokens"] / 32)
        weighted = [part["advantage"]["mean"] * part["responses"] for part in report.values()]
        assert sum(weighted) == pytest.approx(0, abs=1e-9) and abs(weighted[0]) > 1e-3
    events = json.loads((tmp_path / "large" / "trace.json").read_text())
    assert {"prefill", "decode", "rollout", "train", "sync"} <= {event["name"] for event in events}
    assert {event["args"]["step"] for event in events if event["ph"] == "X"} == {1, 2, 3, 4}


@pytest.mark.thorough
def test_dynamic_sampling_does_not_depend_on_how_fast_graders_are(settings, run_ranks, tmp_path):
    overrides = RACE | dict(
        data__task=f"{GRADERS}:has_many_digits", scheduler__dynamic_sampling="true", scheduler__max_draws=16
    )
    assert train.main(settings("ranks1", **overrides)) == 0
    run_ranks(2, train_runs, settings("ranks2", **overrides))
    for record in steps_of(tmp_path / "ranks1"):
        assert record["mixed_groups"] == 1 and record["round"]["padded"] == 0
    assert sum(record["round"]["zero_variance"] for record in steps_of(tmp_path / "ranks1")) > 0
    assert rounds_of(tmp_path / "ranks2") == rounds_of(tmp_path / "ranks1")
    for mine, theirs in zip(trajectory(tmp_path / "ranks1"), trajectory(tmp_path / "ranks2"), strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5)


def test_dynamic_sampling_that_finds_nothing_says_so_and_goes_on(settings, tmp_path, capfd):
    overrides = dict(scheduler__dynamic_sampling="true", scheduler__max_draws=2, data__task=f"{GRADERS}:raises")
    assert train.main(settings(run__steps=2, **overrides)) == 0
    for record in steps_of(tmp_path / "run"):
        assert record["samples"] == 16 and (record["round"]["prompts"], record["round"]["padded"]) == (8, 4)
    assert "scheduler.max_draws is reached; raise it" in capfd.readouterr().out


def test_the_planner_is_told_of_preemptions_but_not_of_the_wait_for_graders(settings, tmp_path, monkeypatch):
    told, drain = [], RewardPool.drain
    monkeypatch.setattr(ParallelismPlanner, "observe", lambda self, kind, report: told.append(report))
    monkeypatch.setattr(RewardPool, "drain", lambda pool: time.sleep(0.5) or drain(pool))
    assert train.main(settings(run__steps=1, rollout__kv_gib=1e-4)) == 0
    [record], [report] = steps_of(tmp_path / "run"), told
    assert record["seconds"]["reward"] >= 0.5
    assert report.seconds == record["seconds"]["generate"]
    assert 0 < report.seconds <= record["seconds"]["rollout"] - record["seconds"]["reward"] + 1e-6
    assert report.preemptions == record["engine"]["preemptions"] > 0


def train_and_be_killed(world: World, settings: list[str]) -> None:
    """Train, and be killed in step 3, whose rollout has begun. The checkpoint of step 2 is still being written."""
    decode, write = Round.decode, _Writer.write_data
    windows = count()

    def write_or_wait(self: _Writer, *args):
        if self.folder.name == "step_000002":
            threading.Event().wait()
        return write(self, *args)

    def decode_or_die(self: Round, *args, **options):
        if self.engine.version == 2 and next(windows) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return decode(self, *args, **options)

    Round.decode, _Writer.write_data = decode_or_die, write_or_wait
    train_runs(world, settings)


def test_a_killed_run_resumes_to_the_same_trajectory(settings, run_ranks, tmp_path):
    overrides = dict(run__steps=4, run__checkpoint_every=1, loss__kl_coef=0.01, trainer__updates_per_step=2)
    overrides |= dict(data__task=f"{GRADERS}:has_many_digits")  # which takes another time at every call
    overrides |= dict(scheduler__eta_responses=2, rollout__max_response_tokens=100, rollout__kv_gib=0.03)
    overrides |= dict(data__eval_prompts=0)
    run_ranks(2, train_runs, settings("straight", **overrides))
    args = settings("killed", **overrides)
    with pytest.raises(ProcessException):
        run_ranks(2, train_and_be_killed, args)
    assert steps_of(tmp_path / "killed")[-1]["step"] == 2
    assert [folder.name for folder in list_checkpoints(tmp_path / "killed")] == ["step_000001"]
    run_ranks(2, partial(train_runs, resume=True), args)
    assert trajectory(tmp_path / "killed") == trajectory(tmp_path / "straight")  # bit by bit
    assert rounds_of(tmp_path / "killed") == rounds_of(tmp_path / "straight")
    assert any(r["round"]["aborted"] and r["train"]["grad_norm"] for r in steps_of(tmp_path / "killed"))
    weights = "checkpoints/step_000004/model.safetensors"
    assert (tmp_path / "killed" / weights).read_bytes() == (tmp_path / "straight" / weights).read_bytes()


def wait_for(condition: Callable[[], Any], process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 600
    while not condition():
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline, "the run did not get there in time"
        time.sleep(0.02)


def ranks_of(process: subprocess.Popen) -> list[int]:
    found = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
    return [int(pid) for pid in found]


@pytest.mark.slow
@pytest.mark.thorough
def test_a_run_that_is_killed_restarted_stopped_by_a_signal_and_resumed_loses_nothing(settings, tmp_path):
    """Ranks killed in rounds without a checkpoint: tests/test_streamed.py."""
    overrides = RACE | dict(run__checkpoint_every=5, run__dump_rollouts="true")
    run, straight = tmp_path / "stopped", tmp_path / "straight"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max-restarts=1"]
    command += [str(ROOT / "train.py"), *settings("stopped", **overrides | dict(run__steps=999)), "--resume"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, **pipes)

    def last_step() -> int:
        return steps_of(run)[-1]["step"] if (run / "steps.jsonl").exists() and steps_of(run) else 0

    wait_for(lambda: list_checkpoints(run), process)
    killed = ranks_of(process)[0]
    os.kill(killed, signal.SIGKILL)  # in round 6, a long one
    wait_for(lambda: killed not in ranks_of(process), process)
    before = last_step()
    wait_for(lambda: last_step() > before, process)
    os.kill(ranks_of(process)[0], signal.SIGTERM)  # one rank hears it, both must stop together
    output = process.communicate(timeout=600)[0]
    assert process.returncode == 0, output
    last = last_step()
    assert "resumed from" in output and f"stopped after step {last} of 999; continue with --resume" in output
    assert list_checkpoints(run)[-1].name == f"step_{last:06d}"
    steps = last + 3 - last % 3
    whole = overrides | dict(run__steps=steps)
    assert train.main([*settings("stopped", **whole), "--resume"]) == train.main(settings("straight", **whole)) == 0
    assert [row[0] for row in rounds_of(run)] == ["short", "short", "long"] * (steps // 3)
    for mine, theirs in zip(trajectory(run), trajectory(straight), strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5)  # by rounding: the straight run is on one rank
    assert rounds_of(run) == rounds_of(straight)
    rows = [row for path in (run / "rollouts").glob("*.jsonl") for row in path.open()]
    trained = Counter((row["epoch"], row["prompt"]["index"]) for row in map(json.loads, rows))
    cursor = PromptCursor([Prompt(i, (i,), "", "", "") for i in range(48)], seed=0)
    assert trained == Counter(visit.id for visit in cursor.take(steps * 8))


def train_until(world: World, settings: list[str], step: int) -> None:
    """Begin or resume, and stop after `step` as on a signal. Every rank learns a time limit before each step."""
    config, take_step = load_config(Config, None, settings), train.take_step
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", str(world.size))
        check_run(config, world.size, resume=True, is_main=world.is_main)
    if world.is_main:
        Path(config.run.dir).mkdir(exist_ok=True)
        write_settings(config, Path(config.run.dir))
    first = max((int(folder.name[-6:]) for folder in list_checkpoints(Path(config.run.dir))), default=0)
    stops = iter([False] * (step - first) + [True])

    def learn(job: Job, when: str) -> Job:
        limits = job.graders.timeouts
        limits.observe(limits.plan(f"{when} on rank {world.rank}", 1, 0), [(1.0, True, False)], correct=True)
        return job

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train.StopSignal, "agreed", lambda *_: next(stops))
        patch.setattr("job.Job", lambda *args: learn(Job(*args), f"start {first}"))
        patch.setattr(train, "take_step", lambda job: take_step(learn(job, f"step {job.step}")))
        train.train(config, world, resume=True)


@pytest.mark.thorough
def test_a_run_of_four_ranks_goes_on_with_two_and_then_alone(settings, run_ranks, tmp_path):
    overrides = RACE | dict(run__checkpoint_every=0, run__dump_rollouts="true")
    assert train.main(settings("straight", **overrides)) == 0
    own = settings("elastic", **overrides)
    parts = "--trainer.shard=2", "--rollout.weights=sharded", "--rollout.tensor_parallel=2"  # weights in parts, too
    run_ranks(4, train_until, [*own, *parts], 1)
    smaller = "--trainer.tokens_per_microbatch=64", "--trainer.tokens_per_logits=16", "--rollout.kv_gib=0.1"
    run_ranks(2, train_until, [*own, *smaller, "--rollout.step_tokens=4096", "--rollout.max_running=128"], 2)
    train_until(ALONE, own, 4)
    straight, elastic = tmp_path / "straight", tmp_path / "elastic"
    assert [record["round"]["queue"] for record in steps_of(elastic)][:2] == [4, 8], "carried over both restarts"
    assert rounds_of(elastic) == rounds_of(straight)
    for mine, theirs in zip(trajectory(elastic), trajectory(straight), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)
    assert trained_samples(elastic) == trained_samples(straight)
    ranks = {"start 0": 4, "step 0": 4, "start 1": 2, "step 1": 2, "start 2": 1, "step 2": 1, "step 3": 1}
    prompts = [f"{when} on rank {rank}" for when, count in ranks.items() for rank in range(count)]
    known = load_state(list_checkpoints(elastic)[-1])["timeouts"]
    names = AdaptiveTimeouts(1.5, 2.0, 30.0, 0.0, 0.99)
    assert known.keys() == {names.plan(prompt, 1, 0).names[0] for prompt in prompts}, "what every rank has learned"


def trained_samples(folder: Path) -> list[tuple]:
    files = sorted((folder / "rollouts").glob("*.jsonl"))
    groups = [(i, json.loads(row)) for i, path in enumerate(files) for row in path.open()]
    return [(i, g["epoch"], g["prompt"]["index"], s["token_ids"]) for i, g in groups for s in g["samples"]]


def test_a_run_resumes_where_an_epoch_ends(settings, tmp_path):
    """44 prompts, 11 a step: the checkpoint of step 4 stands between two epochs, and four steps are left."""
    short = dict(scheduler__num_prompts=11, rollout__max_response_tokens=8, scheduler__policy="synchronous")
    args = settings(run__steps=8, run__checkpoint_every=4, run__eval_every=0, run__dump_rollouts="true", **short)
    assert train.main(args) == 0
    straight, run = trajectory(tmp_path / "run"), tmp_path / "run"
    shutil.rmtree(run / "checkpoints" / "step_000008")
    shutil.rmtree(run / "rollouts")
    assert train.main([*args, "--resume"]) == 0
    assert trajectory(run) == straight and [r["epoch"] for r in steps_of(run)] == [0] * 4 + [1] * 4
    rows = [json.loads(row) for path in sorted((run / "rollouts").glob("*")) for row in path.open()]
    assert sorted(row["prompt"]["index"] for row in rows) == list(range(44)) and len(rows) == 44


@pytest.mark.slow
def test_nothing_grows_from_step_to_step(settings, monkeypatch):
    """Objects (of which a step has hundreds), open files and threads of a process, while no checkpoint is written."""
    used, save = [], Checkpoints.save

    def note(self, record):
        gc.collect()
        if not used:
            gc.freeze()  # neither counted nor looked at again: this makes collections quick
        used.append((len(gc.get_objects()), len(os.listdir("/proc/self/fd")), threading.active_count()))

    monkeypatch.setattr(Recorder, "step", note)
    monkeypatch.setattr(Checkpoints, "save", lambda self, *args: (save(self, *args), self.wait()))
    short = dict(scheduler__num_prompts=2, rollout__max_response_tokens=4, run__checkpoint_every=5, run__eval_every=5)
    assert train.main(settings(run__steps=40, **short)) == 0
    gc.unfreeze()
    (objects, *early), (later, *late) = ([min(values) for values in zip(*part)] for part in (used[10:20], used[30:]))
    assert later - objects < 3 * 20 and late == early


def test_records_are_closed_while_the_job_is_in_its_group(settings, monkeypatch):
    """A package that takes long to finish its records would else be killed: see mux.LEAVE_SECONDS."""
    told, close, leave = [], Recorder.close, Phases.__exit__
    monkeypatch.setattr(Recorder, "close", lambda self: (told.append("closes"), close(self))[1])
    monkeypatch.setattr(Phases, "__exit__", lambda *args: (told.append("leaves"), leave(*args))[1])
    assert train.main(settings(run__steps=1)) == 0
    assert told == ["closes", "leaves"]


def test_a_run_cannot_be_cut_below_its_queue(settings, tmp_path, capsys):
    assert train.main(settings(**RACE | dict(run__steps=4, run__checkpoint_every=2, run__keep_checkpoints=9))) == 0
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_000004")
    assert train.main([*settings(**RACE | dict(run__steps=2, run__keep_checkpoints=9)), "--resume"]) == 2
    assert "leaves 8 prompts of the long-prompt queue untrained; take at least 3" in capsys.readouterr().err
    assert train.main([*settings(**RACE | dict(run__steps=1, run__keep_checkpoints=9)), "--resume"]) == 2
    told = "error: run.steps = 1, but the newest checkpoint is of step 2; take at least 2\n"
    assert capsys.readouterr().err == told
    assert train.main([*settings(**RACE | dict(run__steps=3, run__keep_checkpoints=9)), "--resume"]) == 0
    assert steps_of(tmp_path / "run")[-1]["round"]["queue"] == 0


@pytest.mark.thorough
def test_a_policy_with_a_plan_only_trains_and_resumes(settings, tmp_path, monkeypatch):
    monkeypatch.setitem(POLICIES, "synchronous", HalfWins)
    whole = dict(scheduler__policy="synchronous", run__steps=4, run__eval_every=0)
    assert train.main(settings("straight", **whole)) == 0
    assert train.main(settings("stopped", **whole | dict(run__steps=3))) == 0  # with prompts in the queue
    assert train.main([*settings("stopped", **whole), "--resume"]) == 0
    assert trajectory(tmp_path / "stopped") == trajectory(tmp_path / "straight")
    assert rounds_of(tmp_path / "stopped") == rounds_of(tmp_path / "straight")
    assert [row[0] for row in rounds_of(tmp_path / "stopped")] == ["short", "long", "short", "long"]


def test_a_policy_that_leaves_its_queue_resumes_to_the_end(settings, tmp_path, monkeypatch):
    monkeypatch.setitem(POLICIES, "synchronous", NeverAgain)
    whole = dict(scheduler__policy="synchronous", run__eval_every=0)
    assert train.main(settings(**whole | dict(run__steps=2))) == 0
    assert train.main([*settings(**whole | dict(run__steps=3)), "--resume"]) == 0
    assert [r["round"]["queue"] for r in steps_of(tmp_path / "run")] == [4, 8, 12]


def test_an_interrupt_before_the_first_step_is_no_traceback(settings, monkeypatch, capsys):
    monkeypatch.setattr("job.ensure_model", lambda *_: signal.default_int_handler(2, None))
    own = [arg for arg in settings(data__train="hailstone", warm_start__steps=9) if not arg.startswith("--data.task")]
    assert train.main([*own, "--model.path="]) == 130
    assert capsys.readouterr().err == "interrupted in start\n"


def test_responses_end_at_the_stop_texts_of_the_config(settings, tiny_folder, tmp_path):
    stops = [*"ABCDE0123456789"]  # rare pairs would hardly ever be drawn by a model with random weights
    options = {"run__steps": 1, "run__eval_every": 0, "data__eval_prompts": 0, "run__dump_rollouts": "true"}
    assert train.main(settings(**options, rollout__stop=json.dumps(stops))) == 0
    tokenizer = load_tokenizer(tiny_folder)
    samples = [s for g in load_groups(tmp_path / "run" / "rollouts", 1, any_shape(len(tokenizer))) for s in g.samples]
    by_text = 0
    for sample in samples:
        text = tokenizer.decode(sample.token_ids)
        assert not any(stop in text[:-1] for stop in stops)
        ends = [t for t in (*stops, tokenizer.eos_token) if text.endswith(t)]
        assert (sample.finish_reason == "stop") == bool(ends) and (ends or len(sample.token_ids) == 32)
        by_text += bool(ends) and ends[0] in stops
    assert by_text > 3


def test_several_graders_of_one_sample_add_up_and_are_recorded(settings, tmp_path):
    own = ["tests/graders.py:share_of_digits", "tests/graders.py:parts"]
    rows = [{"prompt": f"say {i}", "answer": str(i), "task": own[i % 2]} for i in range(24)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"data__train": tmp_path / "data.jsonl", "data__graders": ",".join(own), "run__steps": 2}
    options |= {"reward__also": f"{own[1]}=-0.5,match=2", "run__eval_every": 0}
    assert train.main(settings("recorded", run__dump_rollouts="true", **options)) == 0
    records = steps_of(tmp_path / "recorded")
    for record in records:
        groups = load_groups(tmp_path / "recorded" / "rollouts", record["step"], any_shape())
        seen = {}
        for group in groups:
            for reward in group.rewards:
                digits, parts = (reward.parts.get(name) for name in own)
                assert reward.value == pytest.approx((digits or 0.0) - 0.5 * parts + 2 * reward.parts["match"])
                assert parts == reward.parts[f"{own[1]}/length"] + reward.parts[f"{own[1]}/ascii"]
                assert (digits is None) == (group.prompt.task == own[1])
                for name, value in reward.parts.items():
                    seen.setdefault(name, []).append(value)
        assert record["reward_parts"] == {name: pytest.approx(sum(v) / len(v)) for name, v in sorted(seen.items())}
        assert record["reward_parts"][own[1]] > 0 and record["reward_errors"] == 0
    assert "reward_parts" in read_records(tmp_path / "recorded" / "steps.jsonl")[0]["eval"]
    assert train.main(settings("replayed", run__replay=tmp_path / "recorded" / "rollouts", **options)) == 0
    assert trajectory(tmp_path / "replayed") == trajectory(tmp_path / "recorded")


@pytest.mark.thorough
def test_a_replayed_run_trains_the_same(settings, tmp_path):
    assert train.main(settings("recorded", run__dump_rollouts="true")) == 0
    line = json.loads((tmp_path / "recorded" / "rollouts" / "step_000001.jsonl").read_text().splitlines()[0])
    assert len(line["samples"]) == len(line["rewards"]) == len(line["advantages"]) == 4
    assert train.main(settings("replayed", run__replay=tmp_path / "recorded" / "rollouts")) == 0
    assert trajectory(tmp_path / "replayed") == trajectory(tmp_path / "recorded")


@pytest.mark.parametrize(
    "overrides",
    [
        thorough(dict(loss__name="gspo", loss__normalisation="sequence", loss__clip_low=3e-4, loss__clip_high=4e-4)),
        thorough(
            dict(
                loss__name="cispo",
                loss__advantage="rloo",
                loss__clip_low=1,
                loss__clip_high=4,
                loss__entropy_coef=0.01,
            )
        ),
        dict(
            loss__advantage="grpo",
            loss__normalisation="constant",
            loss__mask_truncated="true",
            rollout__max_response_tokens=128,  # long enough for some to end by themselves
        ),
        dict(loss__advantage="reinforce_baseline", trainer__updates_per_step=3, loss__kl_coef=0.1),
        dict(loss__name="decoupled", loss__tis_cap=2, trainer__updates_per_step=2, model__dtype="bfloat16"),
        dict(sampling__top_p=0.9, sampling__top_k=50, sampling__temperature=0.8, reward__overlong_buffer=8),
        thorough(dict(rollout__kv_gib=0.00005, rollout__max_running=7)),
        thorough(dict(scheduler__eta_prompts=3, scheduler__eta_responses=2, rollout__max_running=7)),
        thorough(dict(scheduler__window_iterations=1, scheduler__migrate="true")),
    ],
    ids=lambda overrides: ",".join(f"{k.split('__')[1]}={v}" for k, v in overrides.items())[:60],
)
def test_every_choice_runs(settings, tmp_path, overrides):
    assert train.main(settings(**dict(run__steps=2, data__eval_prompts=0) | overrides)) == 0
    for record in steps_of(tmp_path / "run"):
        assert record["train"]["skipped"] == ""
        assert record["train"]["grad_norm"] > 0
        if "model__dtype" not in overrides:  # rounding can move a token over the edge of top-p, for engine or trainer
            assert record["train"]["logprob_diff_" + ("mean" if "sampling__top_p" in overrides else "max")] < 1e-4
    if "rollout__kv_gib" in overrides:
        assert sum(record["engine"]["preemptions"] for record in steps_of(tmp_path / "run")) > 0


def test_a_reward_that_raises_counts_zero_and_is_reported(settings, tmp_path, capfd):
    assert train.main(settings(run__steps=1, data__task=f"{GRADERS}:raises")) == 0
    record = steps_of(tmp_path / "run")[0]
    assert record["reward"] == 0 and record["reward_errors"] == 16
    text = capfd.readouterr().out
    assert "16 rewards failed and count 0: " in text and "prompts.jsonl:" in text and "RuntimeError: no grade" in text


def test_help_lists_every_key(capsys):
    assert train.main(["--help"]) == 0
    text = capsys.readouterr().out
    for key in flatten(Config()):
        assert f"--{key}=" in text
    assert train.main(["--help", "loss"]) == 0
    section = capsys.readouterr().out
    assert "--loss.name=" in section and "--run.dir=" not in section and len(section) < len(text)
    assert train.main(["--help", "lost"]) == 2 and "no such section" in capsys.readouterr().err


def test_check_validates_and_exits(settings, tmp_path, capsys):
    assert train.main([*settings(), "--check"]) == 0
    assert "fine" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "overrides, parts",
    [
        (dict(run__stepz=3), ("run.stepz", "run.steps")),
        (dict(run__steps="many"), ("run.steps", "'many'", "int")),
        (dict(scheduler__num_responses=1), ("scheduler.num_responses", "at least 2")),
        (dict(loss__name="pppo"), ("loss.name", "ppo, gspo")),
        (dict(loss__name="sft"), ("loss.name", "warm start")),
        (dict(model__path="/no/such/folder"), ("/no/such/folder", "model.path")),
        (dict(data__train="/no/such/file.jsonl"), ("/no/such/file.jsonl", "built-in task")),
        (dict(data__task="gess"), ("gess", "math")),
        (dict(data__task=f"{GRADERS}:nothing"), ("nothing", "graders.py")),
        (dict(rollout__kv_gib=0.00001), ("rollout.kv_gib", "at least")),
        (dict(rollout__max_response_tokens=1000), ("rollout.max_response_tokens", "256")),
        (dict(rollout__max_prompt_tokens=4), ("prompts.jsonl:2", "rollout.max_prompt_tokens = 4")),
        (dict(scheduler__num_prompts=100), ("scheduler.num_prompts = 100", "44 prompts")),
        (dict(sampling__temperature=0), ("sampling.temperature",)),
        (dict(loss__tis_cap=2), ("loss.tis_cap = 2.0", "decoupled, tis, topr")),
        (dict(loss__name="tis", loss__clip_low=0.1), ("loss.clip_low = 0.1", "loss.name = tis", "ppo, gspo")),
        (dict(loss__name="decoupled", loss__old_logprobs="rollout"), ("loss.old_logprobs", "weighs all samples alike")),
        (dict(loss__credit="turn", loss__advantage="reinforce_baseline"), ("loss.credit", "needs the whole batch")),
        (dict(warm_start__steps=9), ("warm_start.steps = 9 has no effect", "model.path")),
        (dict(reward__overlong_buffer=64), ("reward.overlong_buffer = 64", "32")),
        (dict(log__wandb="project"), ("log.wandb", "pip install wandb")),
        (dict(run__device="cuda"), ("run.device = cuda",)),
        (dict(scheduler__audit=0.5, scheduler__policy="synchronous"), ("scheduler.audit = 0.5", "tail_batching")),
        (dict(scheduler__eta_responses=1.5, scheduler__policy="synchronous"), ("eta_responses = 1.5", "has no effect")),
        (
            dict(scheduler__dynamic_sampling="true", scheduler__max_draws=1.1),
            ("scheduler.max_draws = 1.1", "scheduler.eta_prompts = 1.25"),
        ),
        (dict(run__replay="/no/such/rollouts"), ("run.replay", "/no/such/rollouts")),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_settings_are_refused_in_one_line(settings, tmp_path, capsys, overrides, parts):
    assert train.main(settings(**overrides)) == 2
    text = capsys.readouterr().err
    assert text.startswith("error: ") and text.count("\n") == 1
    for part in parts:
        assert part in text
    assert not (tmp_path / "run").exists()


def test_a_world_size_that_does_not_divide_is_refused(settings, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert train.main(settings(scheduler__num_prompts=3)) == 2
    assert "scheduler.num_prompts = 3 is not a multiple of the 2 replicas" in capsys.readouterr().err


def test_a_run_folder_is_never_overwritten_or_resumed_with_other_settings(settings, tmp_path, capsys):
    assert train.main([*settings(run__steps=1), "--resume"]) == 0  # nothing there yet: what restarts it need not know
    assert "starts afresh" in capsys.readouterr().out
    before = (tmp_path / "run" / "config.toml").read_text()
    assert train.main(settings(run__steps=1)) == 2
    assert "--resume (from Python: resume=True)" in capsys.readouterr().err
    assert train.main([*settings(run__steps=2, trainer__lr=1e-3), "--resume"]) == 2
    assert "trainer.lr is 0.001 now and was 0.003" in capsys.readouterr().err
    assert (tmp_path / "run" / "config.toml").read_text() == before
    assert train.main([*settings(run__steps=2), "--resume"]) == 0


@pytest.mark.slow
def test_several_domains_in_one_run_with_programs_among_them(settings, tmp_path, capsys):
    cases = json.dumps([{"stdin": "", "stdout": ""}])
    passes, fails = {"template": "# {program}"}, {"template": "1/0 # {program}"}  # whatever the model writes, nearly
    rows = [{"prompt": f"p {i}", "answer": cases, "task": "code", **(fails if i % 2 else passes)} for i in range(6)]
    rows += [{"prompt": f"q {i}", "answer": "a", "task": "match"} for i in range(6)]
    data = tmp_path / "mixed.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = settings(
        scheduler__policy="synchronous",
        run__steps=3,
        run__checkpoint_every=3,
        data__train=data,
        data__eval_prompts=0,
        reward__weights="code=2,match=0",
        reward__case_max_seconds=20.0,
    )
    assert train.main(arguments) == 0
    assert "sandbox: " in capsys.readouterr().out
    records = steps_of(tmp_path / "run")  # three steps of four prompts: each prompt once
    seen = {task: value for record in records for task, value in record["reward_by_task"].items()}
    assert seen.keys() == {"code", "match"} and seen["match"] == 0
    assert any(record["reward_by_task"].get("code", 0) > 0 for record in records)
    assert sum(record["rewards"]["graded"] for record in records) == 48
    assert sum(record["rewards"]["cases"]["cases"] for record in records) == 24
    state = load_state(list_checkpoints(tmp_path / "run")[-1])
    assert state["timeouts"] and all(0 < seconds < 20 for seconds in state["timeouts"].values())
    more = [a for a in arguments if "run.steps" not in a] + ["--run.steps=4", "--resume"]
    assert train.main(more) == 0
    state_after = load_state(list_checkpoints(tmp_path / "run")[-1])
    assert all(state_after["timeouts"][case] >= seconds for case, seconds in state["timeouts"].items())


def test_a_graders_weight_scales_its_advantages():
    prompts = [Prompt(i, (1,), "", "", task) for i, task in enumerate(("a", "b"))]
    samples = tuple(Sample(0, r, 0, (1,), (0.0,), "stop", ()) for r in range(2))
    groups = [Group(prompt, 0, samples, (Reward(0.0), Reward(1.0))) for prompt in prompts]
    plain = group_advantages(groups, LossConfig(), RewardConfig(), 24)
    weighted = group_advantages(groups, LossConfig(), RewardConfig(weights="b=0.5"), 24)
    assert plain[0].tolist() == plain[1].tolist() and plain.abs().min() > 0
    assert weighted[0].tolist() == plain[0].tolist() and weighted[1].tolist() == (plain[1] / 2).tolist()
