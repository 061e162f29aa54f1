"""Benchmarks on their smallest shapes, what they make of what fails, and the results that the documents print."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Generator, Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from config import load_config
from metrics import Period, Trace
from parallel import World
from settings import Config, check_run

ROOT = Path(__file__).parent.parent


def load(name: str) -> Iterator[ModuleType]:
    """Import a script of benchmarks/ as a module, and forget it at the end."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[name]


@pytest.fixture(scope="module")
def gpu() -> Iterator[ModuleType]:
    yield from load("gpu")


@pytest.mark.slow
@pytest.mark.thorough
def test_the_gpu_script_runs_on_a_cpu(gpu: ModuleType, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    command = ["bash", str(ROOT / "benchmarks" / "gpu.sh"), "--device", "cpu"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    *table, last = done.stdout.splitlines()
    metrics = json.loads(last)
    assert metrics["name"] == "gpu" and metrics["failed"] == 0
    assert 0 <= metrics["logprob_diff_fp32_max"] < 1e-4 and metrics["bandwidth_gbs"] > 0
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table if line.startswith("| ")]
    assert {len(row) for row in rows} == {5} and {row[0] for row in rows[1:]} == set(gpu.SECTIONS)
    states = [row[4] for row in rows]
    assert states.count("ok") > 20 and "FAIL" not in states
    assert not list(tmp_path.iterdir())  # it cleans up after itself


def raises(s) -> None:
    s.row("first", "fine", True)
    with s.guard("second"):
        raise ValueError("what\nwhere")
    with s.guard("kernel"):
        raise ValueError("at 23:12:\n    x = a + b\nwrong type")  # as Triton says it
    with s.guard("late"):
        subprocess.run(["sleep", "600"], timeout=0.1)
    with s.guard("theirs"):
        json.loads("{")
    raise KeyError("gone")


def crashes(s) -> None:
    s.row("first", "fine", True)
    os.kill(os.getpid(), signal.SIGKILL)


def hangs(s) -> None:
    s.row("first", "fine", True)
    subprocess.run(["sleep", "600"])


def is_slow(s) -> None:
    for case in s.in_time(range(100)):
        s.row(str(case), "done")
        time.sleep(0.2)


@pytest.mark.slow
def test_what_raises_crashes_or_hangs_becomes_a_row(gpu: ModuleType, capsys: pytest.CaptureFixture) -> None:
    rows = gpu.run_section(raises, "cpu", 60, {})
    assert [row.state for row in rows] == ["ok", "FAIL", "FAIL", "skipped", "FAIL", "FAIL"]
    assert rows[1].result.startswith("ValueError: what (test_benchmarks.py:") and "KeyError" in rows[5].result
    assert rows[2].result.startswith("ValueError: wrong type (test_benchmarks.py:")
    assert "(test_benchmarks.py:" in rows[4].result, "not the place inside a library"
    assert [row.state for row in gpu.run_section(crashes, "cpu", 60, {})] == ["ok", "FAIL"]
    hung = gpu.run_section(hangs, "cpu", 0.2, {}, grace=2)
    assert [row.state for row in hung] == ["ok", "FAIL"] and "killed after" in hung[1].result
    slow = gpu.run_section(is_slow, "cpu", 0.5, {}, grace=60)
    assert slow[-1].state == "skipped" and len(slow) < 20
    gpu.print_table([("name", row) for row in rows], 1.0)
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["failed"] == 4


@pytest.fixture(scope="module")
def tail_batching() -> Iterator[ModuleType]:
    yield from load("tail_batching")


def play(world: World, name: str, folder: Path, *arguments: object) -> None:
    """Play a benchmark of several ranks; what it prints goes to a file."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    os.chdir(folder)
    with open(f"printed{world.rank}", "w") as printed, redirect_stdout(printed):
        for benchmark in load(name):
            benchmark.play(*arguments, world)


@pytest.mark.thorough
def test_tail_batching_on_the_smallest_shape(run_ranks, tmp_path: Path) -> None:
    run_ranks(2, play, "tail_batching", tmp_path, "nano", False)
    printed = (tmp_path / "printed0").read_text()
    metrics = json.loads(printed.splitlines()[-1])
    assert metrics["prompts_lost"] == metrics["prompts_doubled"] == 0
    assert metrics["engine_step_ratio_trace"] > 2  # counted, not timed
    assert 0 <= metrics["window_wait_fraction"] < 1 and metrics["step_speedup_task"] > 0
    assert printed.count("4/1") == 3  # task and trace: eta on both; trace: on prompts


@pytest.mark.thorough
def test_stream_training_on_the_smallest_shape(run_ranks, tmp_path: Path) -> None:
    spans = tmp_path / "spans.json"
    run_ranks(2, play, "stream", tmp_path, Namespace(shape="nano", rounds=1, spans=str(spans)))
    metrics = json.loads((tmp_path / "printed0").read_text().splitlines()[-1])
    assert 0 < metrics["gradient_rel_error"] < 1e-6, "nothing was streamed, or not exactly"
    assert metrics["samples_lost"] == 0 and metrics["speedup_adaptive_ours"] > 0
    names = [{(rank, name) for rank, name, *_ in track} for track in json.loads(spans.read_text()).values()]
    assert (1, "stream_train") in names[1] - names[0] and (0, "stream_train") not in names[1]


def test_faults_come_at_functions_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    [faults] = load("faults")
    assert {stage for stage, (owner, name) in faults.STAGES.items() if not hasattr(owner, name)} == set()
    for ranks in (2, 4):
        runs = faults.into_runs(faults.all_faults(ranks))
        assert sum(map(len, runs)) == len(faults.all_faults(ranks))
        assert all(len({f.step for f in run}) == len(run) and len({f.way for f in run}) == 1 for run in runs)
    quick = faults.all_faults(2)[:: faults.SHARE]
    assert {f.way for f in quick} == {*faults.WAYS} and {f.rank for f in quick if f.way == "pools"} == {0, 1}


def test_runs_that_are_broken_could_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    for faults in load("faults"):
        faults.prepare(tmp_path)
        for name, way in faults.WAYS.items():
            own = faults.settings(tmp_path, tmp_path / name, *way.settings, f"--run.timeout_seconds={faults.TIMEOUT}")
            own.remove("--resume")
            check_run(load_config(Config, None, own), 2, resume=False, is_main=False)


def test_lengths_are_shaped_like_the_papers(tail_batching: ModuleType) -> None:
    trace = tail_batching.Trace(100)
    lengths = sorted(trace.length((0, p, r)) for p in range(400) for r in range(8))
    median, p75 = lengths[len(lengths) // 2], lengths[len(lengths) * 3 // 4]
    assert 1.4 < p75 / median < 2 and 25 < lengths[-1] / median < 32
    assert lengths.count(trace.limit) / len(lengths) == pytest.approx(0.03, abs=0.01)


def test_lost_and_doubled_prompts_are_counted(tail_batching: ModuleType) -> None:
    def result(*prompts: int):
        played = tail_batching.Played(0, 1.0, 1.0, {}, 1, {}, [(0, p) for p in prompts], 1)
        return tail_batching.Result(tail_batching.BOTH, [played])

    assert tail_batching.lost_and_doubled([result(1, 2), result(2, 1)]) == (0, 0)
    assert tail_batching.lost_and_doubled([result(1, 2, 3), result(1, 1, 2)]) == (1, 1)
    assert tail_batching.lost_and_doubled([result(1, 2), result(1, 3)]) == (1, 1)


def test_a_score_is_reached_between_two_evaluations_and_waits_are_counted(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    [asynchrony] = load("asynchrony")
    curve = [(0, 0.0, 0.5), (5, 8.0, 0.6), (10, 16.0, asynchrony.SCORE + 0.1)]
    assert asynchrony.reached(curve[:2]) is None
    assert asynchrony.reached(curve) == pytest.approx((7.5, 12.0))
    trace = Trace(tmp_path / "trace.json", 0)
    tracks = [("wait_batch", 0.0, 3.0), ("train", 3.0, 4.0)], [("rollout", 0.0, 4.0), ("prefill", 0.0, 0.5)]
    trace.write(1, [([Period(*span) for span in track], []) for track in tracks])
    trace.write(2, [([], []), ([Period("decode", 4.0, 6.0)], [])])
    run = Namespace(folder=tmp_path, world=Namespace(size=2), config=Namespace(overlap=Namespace(train_ranks=1)))
    assert asynchrony.idle(run, seconds=5.0) == {"train": 0.8, "decode": 0.5}
    run.config.overlap.train_ranks = 0
    assert asynchrony.idle(run, seconds=5.0) == {"train": 0.65, "decode": 0.65}, "all ranks do both"


@pytest.mark.thorough
@pytest.mark.slow
def test_slow_environments_on_the_smallest_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    [slow] = load("slow_environments")
    for sigma, estimate in ((1, 1.16), (5, 1.6), (10, 1.9)):
        assert slow.waiting(f"normal(10,{sigma})", 256, turns=8) == pytest.approx(estimate, abs=0.05)
    monkeypatch.setattr(slow, "waiting", partial(slow.waiting, draws=1))
    monkeypatch.setattr(slow, "SCALE", 0.0005)
    monkeypatch.setitem(slow.FAILURES, "stop", 0.3)
    monkeypatch.setitem(slow.FAILURES, "step_seconds", 0.2)
    size = slow.Size(4, 4, rounds=1, failing=(1, 2), parked={4: 2}, repeats=1)
    assert [row["sigma"] for row in slow.measure_asynchrony(size)] == [1, 5, 10]
    base, *redundant = slow.measure_redundancy(size)
    assert base["failed"] > 0 and base["faster"] == 1.0 and base["short_round"] is None
    assert [row["contender"] for row in (base, *redundant)] == ["4 x 4", "4 x 4", "4 x 6"] and redundant[1][
        "short_round"
    ]
    assert slow.measure_pages(size)[0]["recomputed_ms"] > 0


@pytest.mark.thorough
@pytest.mark.slow
def test_rewards_on_the_smallest_shape(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "reward.py"), "--shape", "nano"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    metrics = json.loads(done.stdout.splitlines()[-1])
    assert {"speedup_async", "speedup_adaptive", "speedup_async_judge", "speedup_layer_pipeline"} <= metrics.keys()
    assert all(value > 0 for name, value in metrics.items() if name.startswith("speedup"))


@pytest.mark.thorough
@pytest.mark.slow
def test_a_training_step_is_that_of_transformers(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "training.py"), "--quick", "--shape", "nano"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    metrics = json.loads(done.stdout.splitlines()[-1])
    assert metrics["gradient_norms_differ"] < 1e-5 and metrics["training_ratio_hf"] > 0
    assert 0 < metrics["training_roofline_fraction"] < 1 and metrics["busy_slowdown"] > 0


@pytest.fixture
def soak() -> Iterator[ModuleType]:
    yield from load("soak")


def test_a_soak_fails_on_whatever_grows(soak: ModuleType) -> None:
    flat = dict.fromkeys(soak.LIMITS, 0.001)
    assert not soak.grown(flat) and {"step_time_slope", "cpu_slope", "memory_slope"} <= flat.keys()
    for name in flat:
        [line] = soak.grown(flat | {name: 0.04})
        assert line.startswith(f"{name}: 4.0% in 1,000 steps")


def test_step_time_that_grows_in_one_kind_of_round_is_seen(soak: ModuleType) -> None:
    def records(growth: float) -> list[dict]:
        """Steps of which every fifth is long and takes ten times as long; short ones grow."""
        steps = [(step, "long" if step % 5 == 0 else "short") for step in range(1, 2001)]
        seconds = {"long": lambda step: 10.0, "short": lambda step: 1 + growth * step / 1000}
        return [{"step": s, "round": {"kind": kind}, "seconds": {"step": seconds[kind](s)}} for s, kind in steps]

    assert soak.step_time_slope(records(0.0)) < 0.001 < 0.04 < soak.step_time_slope(records(0.05))


@pytest.fixture
def time_to_score(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ModuleType]:
    """The benchmark, with a store and entries of its own."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    for module in load("time_to_score"):
        monkeypatch.setattr(module, "STORE", tmp_path / "store.json")
        yield module


def scored(entry: str, seed: int, seconds: float, reached: bool = True, wall: int = 60) -> dict:
    """A run of the first task, as it is kept."""
    end = {"step": 10 if reached else 300, "seconds": seconds, "samples": 2560}
    curve = [{"step": 0, "seconds": 0.0, "samples": 0, "score": 0.5}, end | {"score": 0.8 if reached else 0.7}]
    own = {"task": "hailstone", "entry": entry, "seed": seed, "score": 0.8, "settings": [], "reached": reached}
    return own | end | {"wall": wall, "load": 0.0, "cpu": "a", "date": "2026-01-01", "curve": curve}


def test_a_run_ends_at_the_first_evaluation_with_the_score(time_to_score: ModuleType) -> None:
    task = time_to_score.Task("configs/tiny.toml", 0.8, steps=30, seconds=100.0)
    steps = [{"step": i, "seconds": {"step": 2.5}, "samples": 256} for i in range(1, 21)]
    records = [{"step": 0, "eval": {"avg@4": 0.9}}, *steps[:10]]
    records[-1]["eval"] = {"avg@4": 0.7}
    curve = time_to_score.curve_of([*records, *steps[10:]])
    assert curve[1] == {"step": 10, "seconds": 25.0, "samples": 2560, "score": 0.7} and len(curve) == 2
    assert not time_to_score.is_over(curve[:1], task), "before the first step nothing has been learnt"
    assert not time_to_score.is_over(curve, task) and time_to_score.is_over([curve[1] | {"score": 0.8}], task)
    assert time_to_score.is_over([curve[1] | {"step": 30}], task)
    assert time_to_score.is_over([curve[1] | {"seconds": 100.0}], task)


def test_as_many_runs_take_turns_as_memory_holds(time_to_score: ModuleType) -> None:
    made = [time_to_score.Entry(n, n, (), ("hailstone",), "trl" if n == "a" else "plainroll") for n in "abcd"]
    made.append(time_to_score.Entry("sync", "sync", (), ("hailstone",), "plainroll"))
    runs, sync = time_to_score.all_runs(made, seeds=(0, 1)), made[-1]
    contests = time_to_score.contests_of(runs, 3.5 * time_to_score.RUN_GIB, sync)
    names = [[run.entry.name for run in each] for each in contests]
    assert names == [["sync", "b", "c"], ["sync", "d", "a"]] * 2, "each time with a synchronous run"
    assert [each[0].seed for each in contests] == [0, 0, 1, 1]
    assert [len(each) for each in time_to_score.contests_of(runs[:5], 1.0, sync)] == [2] * 4, "two where there is less"
    [[first, other]] = time_to_score.contests_of([run for run in runs[:5] if run.entry.name == "c"], 99.0, sync)
    assert first.entry is sync and other.entry.name == "c", "also with what is missing alone"
    [[only]] = time_to_score.contests_of(runs[:1], 99.0, sync)
    assert only.entry is sync


def test_the_others_go_on_without_a_run_that_fails(time_to_score: ModuleType, capsys: pytest.CaptureFixture) -> None:
    entry = time_to_score.Entry("sync", "sync", (), ("hailstone",), "plainroll")

    def playing(error: Exception | None) -> Generator[None, None, dict]:
        yield
        if error:
            raise error
        return {"it": "ended"}

    errors = None, time_to_score.ConfigError("no room"), subprocess.CalledProcessError(1, ["pip"])
    runs = {time_to_score.Asked("hailstone", entry, seed): playing(error) for seed, error in enumerate(errors)}
    rows = time_to_score.play_in_turns(runs)
    assert next(rows)["it"] == "ended"
    with pytest.raises(RuntimeError, match="these have failed: hailstone, sync, seed 1; hailstone, sync, seed 2"):
        next(rows)
    said = capsys.readouterr().err
    assert "seed 1 failed: no room" in said and "seed 2 failed: Command '['pip']'" in said


@pytest.mark.parametrize(
    "options, remedy",
    [
        (["--quick", "--seed", "1"], "leave out --task, --seed"),
        (["--quick", "--limit-minutes", "0"], "leave out --task, --seed"),
        (["--quick", "--entry", "trl"], "leave out TRL's"),
        (["--forget-old", "--entry", "sync"], "leave out the other options"),
        (["--list", "--again"], "not allowed with"),
        (["--list", "--limit-minutes", "9"], "leave out --limit-minutes"),
    ],
)
def test_options_that_would_do_nothing_are_refused(
    time_to_score: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, options, remedy
) -> None:
    monkeypatch.setattr("sys.argv", ["time_to_score.py", *options])
    with pytest.raises(SystemExit):
        time_to_score.main()
    assert remedy in capsys.readouterr().err


def test_what_is_missing_is_listed_of_what_is_asked_for(
    time_to_score: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    asked = ["--task", "guess", "--seed", "2", "--entry", "sync", "async"]
    monkeypatch.setattr("sys.argv", ["time_to_score.py", "--list", *asked])
    assert time_to_score.main() == 0
    listed = [line for line in capsys.readouterr().out.splitlines() if ", seed " in line]
    assert listed == ["guess, synchronous, seed 2", "guess, asynchronous, depth 1, seed 2"]


def test_ratios_are_of_runs_on_one_cpu(time_to_score: ModuleType) -> None:
    made = {name: time_to_score.Entry(name, name, (), ("hailstone",), "plainroll") for name in ("sync", "fast", "lame")}
    made["trl"] = time_to_score.Entry("trl", "TRL", (), ("hailstone",), "trl")
    row = scored("trl", 0, 90.0, reached=False)
    early = time_to_score.best_of([row, scored("fast", 0, 5.0)], made, "hailstone")
    assert early["seconds_ratio_trl_over_best"] == 18.0 and early["trl_reached"] is False, "at least"
    apart = time_to_score.best_of([row | {"cpu": "b"}, scored("fast", 0, 5.0)], made, "hailstone")
    assert apart["seconds_ratio_trl_over_best"] is None, "another CPU"
    lucky = [scored("sync", 0, 9.0), scored("fast", 0, 5.0), scored("lame", 0, 1.0) | {"cpu": "b"}]
    assert time_to_score.best_of(lucky, made, "hailstone")["best"] == "fast", "on a CPU with synchronous runs"
    later = [
        scored(name, 0, seconds) | {"cpu": "c", "date": "2026-01-02"}
        for name, seconds in (("sync", 6.0), ("lame", 5.0))
    ]
    found = time_to_score.best_of([*lucky, *later], made, "hailstone")
    assert found["best"] == "lame" and found["cpu"] == "c" and found["seconds_ratio_best_over_sync"] == 1.2, "newest"
    found = time_to_score.best_of([*lucky, *later, scored("trl", 0, 50.0)], made, "hailstone")
    assert found["best"] == found["trl_best"] == "fast" and found["seconds_ratio_trl_over_best"] == 10.0, "most runs"
    more = [row | {"seed": seed} for row in later for seed in (1, 2)]
    found = time_to_score.best_of([*lucky, *later, *more, scored("trl", 0, 50.0)], made, "hailstone")
    assert found["best"] == "lame" and found["trl_best"] == "fast", "each of a CPU that has it"
    more = [*lucky, *(scored("trl", seed, 70.0) | {"cpu": "c"} for seed in range(2)), scored("trl", 0, 50.0)]
    found = time_to_score.best_of([*more, *later], made, "hailstone")
    assert (found["cpu"], found["trl_cpu"], found["trl_seeds"]) == ("c", "c", 2), "of that with most of TRL's"
    assert found["seconds_ratio_trl_over_best"] == 14.0


def test_the_leaderboard_is_of_what_is_kept(time_to_score: ModuleType, capsys: pytest.CaptureFixture) -> None:
    made = {name: time_to_score.Entry(name, name, (), ("hailstone",), "plainroll") for name in ("sync", "fast", "lame")}
    made["trl"] = time_to_score.Entry("trl", "TRL", (), ("hailstone",), "trl")
    runs = [("sync", 0, 100.0), ("sync", 1, 150.0), ("sync", 2, 120.0), ("fast", 0, 50.0), ("fast", 1, 60.0)]
    for name, seed, seconds in [*runs, ("fast", 2, 40.0), ("trl", 0, 500.0)]:
        time_to_score.keep(scored(name, seed, seconds), "abc", {"a.py": "1"}, made)
    time_to_score.keep(scored("lame", 0, 10.0, reached=False), "abc", {"a.py": "2"}, made)
    data = json.loads(time_to_score.STORE.read_text())
    result = data["result"]
    assert data["measured"] == {"a.py": "several"} and data == time_to_score.sealed(data)
    assert [row["entry"] for row in result["board"]] == ["fast", "sync", "trl", "lame"]
    assert result["best"] == "fast" and result["seconds_ratio_best_over_sync"] == 2.5, "the median of 2, 2.5 and 3"
    assert result["compared"] == 2
    assert result["seconds_ratio_trl_over_best"] == 10.0, "of the seed that both have"
    assert result["board"][3] | {"median": None, "reached": 0, "samples": None} == result["board"][3]
    assert [row["seconds"] for row in result["board"]] == ["50.0", "120.0", "500.0", "> 10.0"], "at least as long"
    assert result["seconds_ratio_trl_over_sync"] == 5.0 and result["trl_reached"]
    assert len(result["missing"]) == 4 and "hailstone, TRL, seed 1" in result["missing"]
    time_to_score.keep(scored("lame", 0, 10.0), "abc", {"a.py": "1"}, made)
    data = json.loads(time_to_score.STORE.read_text())
    assert len(data["result"]["runs"]) == 8 and len(data["codes"]) == 1, "a run takes the place of the one before it"
    time_to_score.keep(scored("fast", 0, 30.0) | {"cpu": "b"}, "abc", {"a.py": "1"}, made)
    data = json.loads(time_to_score.STORE.read_text())
    assert len(data["result"]["runs"]) == 9, "but for one on another CPU"
    assert {(row["cpu"], row["seeds"]) for row in data["result"]["board"] if row["entry"] == "fast"} == {
        ("a", 3),
        ("b", 1),
    }
    time_to_score.show(data["result"], "another")
    assert "9 of 9 runs are of other code" in capsys.readouterr().out
    time_to_score.keep(scored("sync", 0, 90.0), "abd", {"a.py": "2"}, made)
    time_to_score.forget(time_to_score.code_of({"a.py": "2"}), made)
    left = json.loads(time_to_score.STORE.read_text())
    assert [row["commit"] for row in left["result"]["runs"]] == ["abd"] and left["measured"] == {"a.py": "2"}
    made["fast"] = time_to_score.Entry("fast", "fast", ("trainer.lr=1",), ("hailstone",), "plainroll")
    assert not any(time_to_score.is_current(r, made) for r in data["result"]["runs"] if r["entry"] == "fast")
    made["trl"] = time_to_score.Entry("trl", "TRL", (), ("hailstone",), "trl", seconds=100.0)
    early = scored("trl", 0, 90.0, reached=False)
    early["curve"][-1]["step"] = 50
    assert not time_to_score.is_current(early, made), "it ended before the limit that the entry has now"
    early["curve"][-1]["seconds"] = 100.0
    assert time_to_score.is_current(early, made)
    run = time_to_score.Asked("hailstone", made["fast"], 0)
    assert time_to_score.expected(run, [scored("sync", 0, 1.0, wall=7)], made) == 7


def test_each_seed_has_a_ratio(time_to_score: ModuleType) -> None:
    made = {name: time_to_score.Entry(name, name, (), ("hailstone",), "plainroll") for name in ("sync", "fast")}
    rows = [scored("sync", seed, 100.0) for seed in (1, 0, 2)]
    rows += [scored("fast", 0, 50.0), scored("fast", 1, 40.0), scored("fast", 2, 70.0, reached=False)]
    assert time_to_score.best_of(rows, made, "hailstone")["best_by_seed"] == [2.0, 2.5, None]
    for row in rows:
        time_to_score.keep(row, "abc", {"a.py": "1"}, made)
    time_to_score.keep_beside(rows, made)
    kept = time_to_score.STORE.read_bytes()
    time_to_score.keep_beside([], made)  # of a contest that was stopped before a run had ended
    assert time_to_score.STORE.read_bytes() == kept
    time_to_score.STORE.unlink()
    time_to_score.keep_beside([], made)
    time_to_score.STORE.write_bytes(kept)
    time_to_score.keep(scored("sync", 0, 300.0), "abc", {"a.py": "1"}, made)
    again = json.loads(time_to_score.STORE.read_text())["result"]
    assert again["best_by_seed"] == [2.0, 2.5, None], "of what ran in turns"
    assert time_to_score.board([row | {"commit": "abc"} for row in rows], made)[0]["by_seed"] == "2.00, 2.50, -", (
        "the last did not reach the score"
    )


@pytest.mark.slow
def test_every_entry_may_be_played_quickly(time_to_score: ModuleType) -> None:
    entries = time_to_score.read_entries()
    assert {*time_to_score.QUICK_ENTRIES} <= entries.keys()
    config = str(ROOT / time_to_score.TASKS[time_to_score.FIRST].config)
    for entry in entries.values():
        keys = [f"--{key}" for key in (*time_to_score.QUICK, *entry.settings)]
        check_run(load_config(Config, config, keys), time_to_score.RANKS, resume=False, is_main=False)


def test_entries_are_files(time_to_score: ModuleType, tmp_path: Path) -> None:
    entries = time_to_score.read_entries()
    assert {"sync", "eta_prompts", "eta_both", "rollpacker", "async", "drafts", "trl"} <= entries.keys()
    assert entries["eta_prompts"].settings[-1] == "scheduler.eta_responses=1.0" and entries["trl"].tasks == (
        "hailstone",
    )
    for text, problem in {
        "[trainer]\nlr = 1": "needs a title",
        "title = 'a'\nseeds = 2": "unknown key seeds",
        "title = 'a'\n[trainer]\nspeed = 2": "unknown key trainer.speed",
        "title = 'a'\ntasks = ['chess']": "a list of some of hailstone",
        "title = 'a'\ntasks = 'relay'": "a list of some of hailstone",
        "title = 'a'\nprogram = ['trl']": "possible: plainroll, trl",
        "title = ''": "needs a title",
        "title = 'a | b'": "needs a title of one line",
        "title = 'a'\n[trainer]\nlr = 2026-01-01": "trainer.lr",
        "title = 'a'\nseconds = 'few'": "seconds = 'few'; give a number",
        "title = 'a'\nseconds = nan": "seconds = nan; give a number",
        "title = 'a'\n[data]\neval_prompts = 1": "section data is the same for all entries",
        "title = ": "not valid TOML",
    }.items():
        (tmp_path / "own.toml").write_text(text)
        with pytest.raises(time_to_score.ConfigError, match=problem):
            time_to_score.read_entry(tmp_path / "own.toml")
    with pytest.raises(time_to_score.ConfigError, match="cannot be read"):
        time_to_score.read_entry(tmp_path)


def test_two_entries_of_one_title_are_refused(
    time_to_score: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time_to_score, "ENTRIES", tmp_path)
    for name in "ab":
        (tmp_path / f"{name}.toml").write_text("title = 'same'")
    with pytest.raises(time_to_score.ConfigError, match=r"b\.toml: a\.toml has this title, too"):
        time_to_score.read_entries()


@pytest.mark.slow
@pytest.mark.thorough
def test_runs_to_a_score_take_turns(time_to_score: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As runs of train.py, with the ranks forked: three imports of torch less."""
    (script := tmp_path / "forked.py").write_text(
        f"import sys\nsys.path.insert(0, {str(ROOT / 'benchmarks')!r})\nimport taking_turns, forked_ranks\n"
        "taking_turns.take_turns()\nsys.exit(forked_ranks.main(sys.argv[1:]))\n"
    )
    monkeypatch.setattr(time_to_score, "TURNS", str(script))
    monkeypatch.setattr(time_to_score, "NAME", f"test_{os.getpid()}")
    smallest = ("run.eval_every=2", "data.eval_prompts=4", "warm_start.steps=1", "scheduler.num_prompts=4")
    smallest += ("rollout.max_response_tokens=32",)
    task = time_to_score.Task("configs/tiny.toml", 0.0, steps=4, seconds=1000.0)
    never = replace(task, score=2.0)
    sync, ahead = (time_to_score.read_entries()[name] for name in ("sync", "async"))
    runs = {time_to_score.Asked("hailstone", entry, 0): goal for entry, goal in ((sync, task), (ahead, never))}
    try:
        playing = {run: time_to_score.play(run, goal, smallest) for run, goal in runs.items()}
        rows = {row["entry"]: row for row in time_to_score.play_in_turns(playing)}
        folder = ROOT / "runs" / time_to_score.NAME
        turns = {entry: (folder / f"hailstone-{entry}-0" / "turn").read_text() for entry in rows}
    finally:
        shutil.rmtree(ROOT / "runs" / time_to_score.NAME, ignore_errors=True)
    assert [*rows] == ["sync", "async"] and turns == {"sync": "4", "async": "4"}
    assert [row["reached"] for row in rows.values()] == [True, False]
    assert [point["step"] for point in rows["async"]["curve"]] == [0, 2, 4]
    row = rows["sync"]
    assert row["step"] == 2 and row["samples"] == 2 * 4 * 8 and 0 < row["seconds"] < row["wall"]


def test_a_run_that_waits_for_its_turn_ends_with_who_gives_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    for turns in load("taking_turns"):
        monkeypatch.setenv(turns.GIVER, str(ended.pid))
        with pytest.raises(TimeoutError, match="has ended"):
            turns.wait(Namespace(folder=tmp_path), {"step": 2, "eval": {}})
        turns.go_on(tmp_path, 2)
        turns.wait(Namespace(folder=tmp_path), {"step": 2, "eval": {}})


# ---- results -----------------------------------------------------------------------------------------------------


def test_a_group_is_timed_from_its_first_rollout_to_its_last_update() -> None:
    def event(at: float, name: str, job: str = "", phase: str = "") -> dict[str, object]:
        return {"at": at, "event": name, "job": job, "phase": phase}

    events = [event(1, "starts"), event(2, "begins", "a", "start"), event(5, "ends", "a", "start")]
    events += [event(6, "begins", "b", "rollout"), event(6, "asks", "a", "rollout"), event(8, "ends", "b", "rollout")]
    events += [event(at, "ends", job, "train") for at, job in ((9, "b"), (10, "a"), (11, "b"), (14, "a"), (20, "a"))]
    for mux in load("mux"):
        assert mux.group_seconds(events, 2) == 14 - 6  # of two steps; a third phase saves the checkpoint
        assert mux.cold_seconds(events) == 4


@pytest.mark.thorough
@pytest.mark.slow
def test_an_exchanged_round_goes_the_way_of_the_simulated_one(fork_server, monkeypatch: pytest.MonkeyPatch) -> None:
    start = torch.multiprocessing.start_processes

    def forked(*args: Any, **more: Any) -> None:
        """Start ranks that need not import torch."""
        start(*args, **(more | {"start_method": "forkserver"}))

    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    for control in load("control_path"):
        monkeypatch.setattr(control.mp, "start_processes", forked)
        few, many = control.exchanged(4), control.exchanged(8)  # each asserts that its round is over at its end
        assert few["windows"] > 10 and 0 < few["kib"] < many["kib"] and few["events"] < many["events"]
        assert few["token_bytes"] > 0 and control.timed(4, 16, 2)["responses"] >= 2 * 16 * 8


@pytest.mark.thorough
@pytest.mark.slow
def test_over_a_slow_link_one_model_crosses() -> None:
    for mux_sync in load("mux_sync"):
        if problem := mux_sync.problem():
            pytest.skip(problem)
        found = mux_sync.compare(2, 2, quick=True)
        model = found["model_bytes"]
        assert (
            found["sync_bytes"] == model <= found["parts_bytes"] < 1.5 * model
        )  # a busy machine sends some bytes again
        assert found["flat_bytes"] > 1.9 * model


@pytest.fixture
def results() -> Iterator[ModuleType]:
    yield from load("results")


@pytest.mark.slow
def test_results_are_of_the_code_as_it_is_or_say_why_not(results: ModuleType) -> None:
    assert not (found := results.problems()), "\n".join(found)


def test_benchmarks_that_a_script_imports_are_measured_with_it(results: ModuleType) -> None:
    found = {
        script: {*results.companions(f"benchmarks/{script}.py")} for script in ("end_to_end", "training", "engine")
    }
    assert found["end_to_end"] == {f"benchmarks/{name}.py" for name in ("trl", "tail_batching", "texts")}
    sides = {f"benchmarks/{name}.py" for name in ("training_sides", "engine", "waiting")}
    assert found["training"] == sides and not found["engine"], "rooms have names of benchmarks, too"


@pytest.mark.slow
def test_every_measured_file_is_there_and_every_script_has_a_quick_run(results: ModuleType) -> None:
    missing = {file for b in results.BENCHMARKS.values() for file in b.files if not list(ROOT.glob(file))}
    assert not missing
    scripts = {ROOT / benchmark.files[0] for benchmark in results.BENCHMARKS.values()}
    assert all("--quick" in script.read_text(encoding="utf-8") for script in scripts)


@pytest.fixture
def house(results: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A repository with one benchmark, which measures one room and one config."""
    monkeypatch.setattr(results, "ROOT", tmp_path)
    claim = "{ratio:.1f} x, {share:.0%} of it{none}"
    monkeypatch.setattr(results, "BENCHMARKS", {"one": results.Benchmark("one.py", ("room.py", "a.toml"), claim)})
    line = "{'ratio': room.RATIO, 'share': 0.25, 'none': None, 'parts': [{'name': 'a', 's': 1}, {'name': 'b', 's': 2}]}"
    lines = "import json, room", "print('a table in', room.__file__)", f"print(json.dumps({line}))"
    (tmp_path / "one.py").write_text("\n".join(lines))
    (tmp_path / "room.py").write_text('"""A room."""\nRATIO = 1.52\n')
    (tmp_path / "a.toml").write_text("a = 1\n")
    (tmp_path / results.RESULTS).mkdir(parents=True)
    (tmp_path / results.OLD).write_text("{}")
    inline = "<!-- results:one {ratio} -->?<!-- end -->"
    rows = "<!-- results:one\n@parts | {name} | {s} | {ratio} |\n-->\n<!-- end -->"
    claims = "<!-- results:all\n@rows {command}: {claim}\n-->\n<!-- end -->"
    (tmp_path / "README.md").write_text(f"{inline}\n{rows}\n{claims}\n")
    return results


def test_a_result_is_kept_and_printed(house: ModuleType, tmp_path: Path) -> None:
    assert house.outdated("one") == ["one.py", "room.py", "a.toml"]  # there is none yet
    house.write()
    text = (tmp_path / "README.md").read_text()
    assert "{ratio} -->not measured yet<!-- end -->" in text and "-->\nNot measured yet.\n<!-- end -->" in text
    house.run("one", quick=True)
    assert not list((tmp_path / house.RESULTS).iterdir())
    house.run("one", quick=False)
    kept = json.loads((tmp_path / house.RESULTS / "one.json").read_text())
    assert kept["result"]["ratio"] == 1.52 and kept["machine"]["cores"] >= 1
    assert kept["output"] == ["a table in room.py"], "paths of this machine are left out"
    [problem] = house.problems()
    assert "README.md" in problem and "results.py write" in problem
    house.write()
    text = (tmp_path / "README.md").read_text()
    assert "-->1.52<!-- end -->" in text and "-->\n| a | 1 | 1.52 |\n| b | 2 | 1.52 |\n<!-- end -->" in text
    assert "\npython one.py: 1.5 x, 25 % of it\n" in text and not house.problems()


def test_a_result_that_lacks_a_number_is_told(house: ModuleType, tmp_path: Path) -> None:
    house.run("one", quick=False)
    (tmp_path / "room.py").write_text("RATIO = None\n")
    with pytest.raises(RuntimeError, match="kept, but without ratio, which the result before has"):
        house.run("one", quick=False)
    (tmp_path / "one.py").write_text("print('no numbers')\n")
    with pytest.raises(RuntimeError, match="its last line is no JSON, nothing is kept"):
        house.run("one", quick=False)


def test_a_change_that_a_result_did_not_run_is_spared(house: ModuleType, tmp_path: Path) -> None:
    house.run("one", quick=False)
    house.write()
    room = tmp_path / "room.py"
    for other in ("CUDA = 1", "CUDA = 2"):
        room.write_text(f"RATIO = 1.52\n{other}\n")
        assert house.outdated("one") == ["room.py"]
        assert house.spare(["one"], "it has no GPU") == [] and not house.problems()
    assert [change["why"] for change in house.spared()] == ["it has no GPU"] * 2
    assert house.spare(["one"], "again") == ["nothing has changed since these results"]
    room.write_text("RATIO = 1.53\n")
    assert house.outdated("one") == ["room.py"], "which nobody has spared"
    room.write_text('"""A room."""\nRATIO = 1.52\n')
    house.run("one", quick=False)
    assert not house.outdated("one"), "a change that was taken back, and measured"
    room.write_text("RATIO = 1.54\n")
    (tmp_path / house.OLD).write_text('{"one": "a larger ratio"}')
    assert "old already" in house.spare(["one"], "all is well")[0] and len(house.spared()) == 2
    (tmp_path / house.OLD).write_text("{}")
    (tmp_path / "new.py").write_text("")
    house.BENCHMARKS["one"] = house.Benchmark("one.py", ("room.py", "a.toml", "new.py"), "")
    room.write_text("RATIO = 1.52\n")
    assert house.spare(["one"], "a new file") == ["one has not measured new.py: run it"]
    house.BENCHMARKS.clear()
    assert any("spared_results.json: one is no benchmark" in problem for problem in house.problems())


@pytest.mark.parametrize("text", ['{"result": ', "[]", "{}"])
def test_a_damaged_result_is_one_error(house: ModuleType, tmp_path: Path, text: str) -> None:
    (tmp_path / house.RESULTS / "one.json").write_text(text)
    for use in (house.problems, house.show, house.write):
        with pytest.raises(SystemExit, match="^error: .*one.json is damaged; take it from git"):
            use()


def test_code_makes_a_result_old_and_comments_do_not(house: ModuleType, tmp_path: Path) -> None:
    house.run("one", quick=False)
    house.write()
    (tmp_path / "room.py").write_text('"""Another docstring."""\n\nRATIO = (1.52)  # a comment\n')
    (tmp_path / "a.toml").write_text("# a comment\na=1\n")
    assert not house.problems()
    (tmp_path / "room.py").write_text("RATIO = 1.53\n")
    [problem] = house.problems()
    assert problem.startswith("one is older than room.py") and "results.py run one" in problem
    (tmp_path / house.OLD).write_text('{"one": "the mend of X"}')
    house.write()
    assert not house.problems() and "before the mend of X)<!-- end" in (tmp_path / "README.md").read_text()
    with open(tmp_path / "README.md", "a") as file:
        file.write("<!-- results:notes one --><!-- end -->")
    house.write()
    text, commit = (tmp_path / "README.md").read_text(), house.fields("one")["commit"]
    assert "{ratio} -->1.52<!-- end -->" in text and text.count("(Measured at commit ") == 1  # after the block of lines
    assert f"what has changed since:\n\n- `one.py` ({commit}): the mend of X\n<!-- end -->" in text
    house.run("one", quick=False)  # measured anew: no reason is needed any more
    house.write()
    assert not house.reasons() and "before" not in (tmp_path / "README.md").read_text()


def test_a_number_that_was_edited_is_seen(house: ModuleType, tmp_path: Path) -> None:
    house.run("one", quick=False)
    path = tmp_path / house.RESULTS / "one.json"
    path.write_text(path.read_text().replace("1.52", "9.99"))
    house.write()
    [problem] = house.problems()
    assert "one.json was edited by hand" in problem


def test_a_simulated_figure_is_of_the_code_as_it_is(house: ModuleType, tmp_path: Path) -> None:
    house.run("one", quick=False)
    house.write()
    (tmp_path / "figures").mkdir()
    (tmp_path / "simulate.py").write_text("SECONDS = 1\n")
    drawn = tmp_path / house.SIMULATED
    measured = {name: house.simulators(name) for name in ("fig1", "mux_1")}
    drawn.write_text(json.dumps(house.sealed({"rows": [{"simulated": 2.5}], "measured": measured})))
    assert not house.problems()
    (tmp_path / "simulate.py").write_text("SECONDS = 2\n")
    assert house.problems() == ["figures/paper.json: fig1 is older than simulate.py: run figures/fig1.py"]
    (tmp_path / "simulate.py").write_text("SECONDS = 1\n")
    drawn.write_text(drawn.read_text().replace("2.5", "3.5"))
    assert house.problems() == ["figures/paper.json was edited by hand: make figures"]


def test_what_a_template_lacks_and_what_fails_is_said(house: ModuleType, tmp_path: Path) -> None:
    house.run("one", quick=False)
    (tmp_path / "README.md").write_text("<!-- results:one {gone} --><!-- end -->")
    for found in (house.problems(), house.write()):
        assert any(line.startswith("README.md: results:one: KeyError: 'gone': run the benchmark") for line in found)
    (tmp_path / "README.md").unlink()
    before = (tmp_path / house.RESULTS / "one.json").read_text()
    (tmp_path / "room.py").write_text("RATIO = 1 / 0\n")
    with pytest.raises(RuntimeError, match="exit code 1, nothing is kept"):
        house.run("one", quick=False)
    assert (tmp_path / house.RESULTS / "one.json").read_text() == before


@pytest.fixture
def peers() -> Iterator[ModuleType]:
    yield from load("peers")


def test_engines_are_asked_for_the_same(peers: ModuleType) -> None:
    equal, tailed, one = peers.contests(quick=False)
    assert len(equal.lengths) == len(tailed.lengths) == 32 and set(equal.lengths) == set(one.lengths)
    lengths = sorted(tailed.lengths)
    assert lengths[-1] == 400 and lengths[15] < 24 < lengths[16] and lengths[24] < 70
    prompts = json.loads(equal.spec)["prompts"]
    assert {len(ids) for ids in prompts} == {peers.PROMPT} and len(set(map(tuple, prompts))) == 32


@pytest.mark.thorough
@pytest.mark.slow
def test_a_peer_that_cannot_be_installed_is_left_out(
    peers: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    small = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=300)
    monkeypatch.setattr(peers, "SHAPE", peers.SHAPE | small)
    monkeypatch.setattr(peers, "INSTALLS", {"openvino": (("--no-index", "no-such-engine"),), "vllm": ()})
    rounds = [peers.Contest("equal", [3, 3, 4], [[5, 6, 7]] * 3), peers.Contest("one", [5])]
    setting = peers.Setting(peers.ensure_model(tmp_path), 1.0, rounds)
    versions: dict[str, str] = {}
    rows = peers.measure("float32", ["openvino"], True, setting, tmp_path, versions)
    assert versions.keys() == {"plainroll"} and [row["contest"] for row in rows] == ["equal", "one"]
    assert all(row["plainroll"] > 0 and row["drafts"] > 0 and "openvino" not in row for row in rows)
    [said] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("without")]
    assert said.startswith("without openvino: openvino was not installed: ") and "no-such-engine" in said
    peers.report(rows, versions)
    metrics = json.loads(capsys.readouterr().out)
    assert metrics["ratio_openvino_equal"] is metrics["ratio_drafts_openvino_one"] is None
    assert metrics["rows"][1]["plainroll"] > 0
    speeds = {"plainroll": 10.0, "drafts": 30.0, "openvino": 10.0, "openvino_lookup": 20.0}
    peers.report([{"dtype": "float32", "contest": "one", **speeds}], versions)
    metrics = json.loads(capsys.readouterr().out)
    assert metrics["ratio_openvino_one"] == 1.0 and metrics["ratio_drafts_openvino_one"] == 1.5, "both with drafts"


@pytest.mark.slow
def test_an_engine_that_ends_says_why_and_one_that_answers_otherwise_is_an_error(
    peers: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "contender.py"
    monkeypatch.setattr(peers, "CONTENDER", script)

    def contender() -> Any:
        return peers.Contender("vllm", sys.executable, tmp_path, tmp_path / "log", "float32", 1, 40, 0.0)

    script.write_text("raise SystemExit('no such instruction')")
    ended = contender()
    with pytest.raises(peers.Missing, match="vllm ended: no such instruction"):
        ended.read()
    with pytest.raises(peers.Missing, match="vllm ended: no such instruction"):
        ended.play(peers.Contest("one", [2]))
    ended.end()
    script.write_text('print(\'{"seconds": 1, "tokens": [[1]]}\', flush=True); input()')
    other = contender()
    with pytest.raises(AssertionError, match="gave other lengths"):
        other.play(peers.Contest("one", [2]))
    other.end()
    script.write_text("import time; time.sleep(60)")
    monkeypatch.setattr(peers, "SECONDS", 0.5)
    silent = contender()
    with pytest.raises(peers.Missing, match="vllm gave no answer in 0.5 s"):
        silent.read()
    silent.end()
    made = [contender() for _ in (peers.OURS, peers.DRAFTS, "vllm")]
    others = iter(made)
    monkeypatch.setattr(peers, "Contender", lambda *_: next(others))
    monkeypatch.setattr(peers, "peer_python", lambda *_: sys.executable)
    monkeypatch.setattr(peers, "leave_out", lambda *_: None)
    setting = peers.Setting(tmp_path, 0.0, [peers.Contest("one", [2])])
    with peers.started(["vllm"], "float32", setting, tmp_path) as there:  # one that computes on disturbs the others
        assert not there and all(each.process.poll() is not None for each in made)
