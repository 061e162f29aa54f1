"""What a run leaves behind: whole JSON lines, a console that a person can read, numbers that add up."""

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import metrics
from config import ConfigError
from metrics import (
    COLUMNS,
    Clock,
    Count,
    LogConfig,
    Period,
    Recorder,
    Trace,
    brief,
    check_loggers,
    peak_memory,
    quantiles,
    read_records,
)

TRAIN = {"loss": -0.0123, "grad_norm": 0.5, "entropy": 1.25, "logprob_diff_max": 3e-6, "skipped": ""}


def make_record(step: int, **changes) -> dict:
    record = {
        "step": step,
        "reward": 0.25,
        "length": quantiles([10, 20]),
        "train": TRAIN,
        "seconds": {"rollout": 1.0, "train": 2.0},
        "tokens_per_second": 12345.6,
        "reward_errors": 0,
        "first_reward_error": "",
    }
    return record | changes


def make_eval(score: float) -> dict:
    length = {"length": quantiles([10, 20]), "truncated": 0.125, "reward_errors": 0}
    return {"avg@4": score, "pass@4": 2 * score, "standard_error": 0.01, "num_prompts": 512, **length}


def make_recorder(run: Path, first_step: int = 0, active: bool = True, config: LogConfig = LogConfig()):  # noqa: B008
    return Recorder(run, config, {}, first_step, 9, active)


def lines(run: Path) -> list[dict]:
    """Read the file as strict JSON: Python's reader alone would take NaN."""

    def refuse(name: str):
        raise AssertionError(f"{name} is not JSON")

    text = (run / "steps.jsonl").read_text(encoding="utf-8")
    assert text.endswith("\n") or not text
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


# ---- clock -------------------------------------------------------------------------------------------------------


def test_the_clock_adds_up_spans_by_name_until_they_are_taken(monkeypatch) -> None:
    times = iter((0.0, 10.0, 11.5, 20.0, 20.25, 30.0, 31.0, 40.0, 44.0))
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: next(times))
    clock = Clock()
    with clock.span("a"):
        pass
    with clock.span("b"):
        pass
    with clock.span("a"):
        pass
    assert clock.take() == {"a": 2.5, "b": 0.25}
    with pytest.raises(KeyError), clock.span("a"):
        raise KeyError  # a span that fails took time too
    assert clock.take() == {"a": 4.0}
    assert clock.take() == {}


def test_spans_inside_each_other_both_count() -> None:
    clock = Clock()
    with clock.span("outer"), clock.span("inner"):
        pass
    taken = clock.take()
    assert 0 <= taken["inner"] <= taken["outer"]


def test_a_traced_clock_keeps_when_each_stage_was_and_joins_what_follows_its_like() -> None:
    clock = Clock(trace=True)
    for name, start, end in (("decode", 1.0, 2.0), ("decode", 2.0001, 3.0), ("idle", 3.0, 4.0), ("decode", 4.0, 5.0)):
        clock.add(name, start, end)
    clock.add("decode", 6.0, 7.0)  # after a pause
    spans, _ = clock.take_track()
    assert [s.name for s in spans] == ["decode", "idle", "decode", "decode"] and clock.take_track() == ([], [])
    assert [round(s.end - s.start, 3) for s in spans] == [2.0, 1.0, 1.0, 1.0]
    assert [round(s.start - spans[0].start, 3) for s in spans] == [0.0, 2.0, 3.0, 5.0]
    assert clock.take() == {"decode": pytest.approx(3.9999), "idle": 1.0}
    silent = Clock()
    silent.add("decode", 1.0, 2.0)
    assert silent.spans == []


# ---- the timeline ------------------------------------------------------------------------------------------------


def test_a_trace_is_json_with_one_track_a_replica_and_a_resumed_run_goes_on_in_it(tmp_path) -> None:
    def make(first_step: int) -> Recorder:
        return make_recorder(tmp_path, first_step, config=LogConfig(trace=True))

    recorder = make(0)
    for step in (1, 2, 3):
        rows = [Count(step + 0.5, {"running": 8, "waiting": 2})]
        tracks = [([Period("rollout", step + 0.5, step + 0.75)], rows), ([Period("idle", step + 0.5, step + 1.0)], [])]
        recorder.timeline(step, tracks, {"kind": "short", "queue": step})
    assert len((tmp_path / "trace.json").read_text().splitlines()) == 18  # readable while the run goes on
    resumed = make(2)
    resumed.timeline(3, [([Period("train", 9.0, 9.5)], []), ([], [])], {"kind": "long"})
    resumed.write(make_record(3))
    resumed.finish(tmp_path, 3, 9)
    whole = json.loads((tmp_path / "trace.json").read_text())
    rounds = [(e["name"], e["step"], e["dur"]) for e in whole if e["ph"] == "X" and e["pid"] == Trace.ROUNDS]
    assert rounds == [("short round", 1, 250_000), ("short round", 2, 250_000)]
    counters = [(e["name"], e["args"]) for e in whole if e["ph"] == "C"]
    assert counters[:2] == [
        ("sequences of replica 0", {"running": 8, "waiting": 2}),
        ("long-prompt queue", {"prompts": 1}),
    ]
    names = [e["args"]["name"] for e in whole if e["ph"] == "M"]
    assert {"replica 0", "replica 1"} <= set(names) and names[-2:] == ["replicas", "rounds"]
    events = [e for e in whole if e["ph"] == "X" and e["pid"] == Trace.REPLICAS]
    assert [(e["name"], e["tid"], e["args"]["step"]) for e in events] == [
        ("rollout", 0, 1),
        ("idle", 1, 1),
        ("rollout", 0, 2),
        ("idle", 1, 2),
        ("train", 0, 3),
    ]
    assert (events[1]["ts"], events[1]["dur"]) == (1_500_000, 500_000)
    again = make(3)  # of a run that had ended
    again.timeline(4, [([Period("sync", 11.0, 12.0)], [])], {})
    again.finish(tmp_path, 4, 9)
    assert sum(e["ph"] == "X" for e in json.loads((tmp_path / "trace.json").read_text())) == 8


def test_a_trace_that_a_kill_has_cut_anywhere_goes_on(tmp_path) -> None:
    path = tmp_path / "trace.json"
    trace = Trace(path, 0)
    for step in (1, 2):
        trace.write(step, [([Period("rollout", step, step + 0.5)], [Count(step + 0.5, {"running": 8})])], "short")
    text = path.read_text()
    for end in range(text.index("\n", len(text) // 2), len(text)):
        path.write_text(text[:end])
        Trace(path, 1)
        rows = path.read_text().splitlines()
        assert rows[0] == "[" and {json.loads(row[:-1])["step"] for row in rows[1:]} <= {1} and len(rows) > 3


def test_a_traced_clock_keeps_counts_when_they_change() -> None:
    clock, silent = Clock(trace=True), Clock()
    for running in (4, 4, 3):
        clock.count(running=running)
        silent.count(running=running)
    assert [count.values for count in clock.take_track()[1]] == [{"running": 4}, {"running": 3}]
    assert silent.take_track() == ([], [])


# ---- steps.jsonl -------------------------------------------------------------------------------------------------


def test_records_are_readable_at_once_one_to_a_line(tmp_path) -> None:
    recorder = make_recorder(tmp_path)
    for step in range(3):
        recorder.write(make_record(step, note="two\nlines, \u2028 and ü"))
        assert [r["step"] for r in lines(tmp_path)] == list(range(step + 1))
    assert lines(tmp_path)[0] == make_record(0, note="two\nlines, \u2028 and ü")
    assert read_records(tmp_path / "steps.jsonl") == lines(tmp_path)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_skipped_step_is_valid_json_too(tmp_path, value: float) -> None:
    make_recorder(tmp_path).write(make_record(1, train=TRAIN | {"loss": value, "skipped": f"loss {value}"}))
    [record] = lines(tmp_path)
    assert record["train"]["skipped"] == f"loss {value}"


@pytest.mark.parametrize("cut", ["", '{"step": 5, "rew', '{"step": 5}'])
@pytest.mark.parametrize("first_step, kept", [(3, [0, 1, 2, 3]), (4, [0, 1, 2, 3, 4]), (0, [])])
def test_a_resumed_run_drops_what_it_writes_again_and_a_cut_line(tmp_path, first_step, kept, cut: str) -> None:
    recorder = make_recorder(tmp_path)
    for step in range(5):
        recorder.write(make_record(step))
    with open(tmp_path / "steps.jsonl", "a") as file:
        file.write(cut)  # the kill came here
    resumed = make_recorder(tmp_path, first_step)
    assert [r["step"] for r in lines(tmp_path)] == kept
    resumed.write(make_record(first_step + 1, reward=0.75))
    assert [r["step"] for r in lines(tmp_path)] == [*kept, first_step + 1] and lines(tmp_path)[-1]["reward"] == 0.75


def test_the_console_tells_what_the_round_did(tmp_path, capfd) -> None:
    played = {"kind": "short", "queue": 8, "aborted": 70, "wasted_tokens": 300, "padded": 0}
    make_recorder(tmp_path).step(make_record(1, tokens=700, round=played))
    header, row = (line.split() for line in capfd.readouterr().out.splitlines())
    assert row[:3] == ["1", "short", "0.250"] and row[header.index("wasted") - 1] == "30%"  # "mean 10" is two words
    played |= {"padded": 3, "zero_variance": 5, "prompts": 9}
    make_recorder(tmp_path).step(make_record(1, tokens=700, round=played))
    text = capfd.readouterr().out
    assert "5 of 9 prompts with equal rewards and trains 3 of them" in text and "scheduler.max_draws" in text


def test_other_ranks_write_and_say_nothing(tmp_path, capfd) -> None:
    recorder = make_recorder(tmp_path, active=False)
    recorder.write(make_record(1))
    recorder.step(make_record(1))
    recorder.progress("generated", 1, 2)
    recorder.evaluation(1, make_eval(0.5))
    recorder.finish(tmp_path, 1, 9)
    assert capfd.readouterr() == ("", "") and list(tmp_path.iterdir()) == []


# ---- console -----------------------------------------------------------------------------------------------------


def test_a_step_is_one_line_that_names_its_numbers(tmp_path, capsys) -> None:
    recorder = make_recorder(tmp_path)
    recorder.step(make_record(7))
    header, line = capsys.readouterr().out.splitlines()
    assert len(header) == len(line) == sum(COLUMNS.values()) <= 110
    cells, at = {}, 0
    for name, width in COLUMNS.items():
        cells[name], at = line[at : at + width].strip(), at + width
    assert (cells["step"], cells["reward"], cells["length"], cells["longest"]) == ("7", "0.250", "15.00", "20.00")
    assert (cells["diff"], cells["rollout"], cells["train"], cells["tokens/s"]) == ("3e-06", "1.000", "2.000", "12346")
    recorder.step(make_record(8, eval=make_eval(0.3)))
    step, evaluation = capsys.readouterr().out.splitlines()
    assert step.startswith("     8") and evaluation.startswith("eval    8 | avg@4 0.300 pass@4 0.600")
    recorder.step(make_record(9, train=TRAIN | {"logprob_diff_max": math.nan}))  # of no token
    assert "-" in capsys.readouterr().out.split()


@pytest.mark.parametrize(
    "value", [0.0, 1.0, -1.0, 9.9996, 99.996, 999.96, 99_999.9, 1e300, -1e-300, math.nan, -math.inf]
)
def test_a_step_line_stays_in_its_columns_whatever_the_numbers_are(tmp_path, capsys, value: float) -> None:
    assert len(brief(value)) <= 6 + (value < 0)
    numbers = {"reward": value, "length": dict.fromkeys(("mean", "max"), value), "tokens_per_second": value}
    train = {**dict.fromkeys(TRAIN, value), "skipped": ""}
    seconds = dict.fromkeys(("rollout", "train"), value)
    played = {"kind": "unusual", "wasted_tokens": 10**12, "padded": 0}
    record = make_record(99_999, **numbers, train=train, seconds=seconds, tokens=0, round=played)
    recorder = make_recorder(tmp_path)
    recorder.steps, recorder.began = 10**7, recorder.began - 1e6
    recorder.step(record)
    _, line = capsys.readouterr().out.splitlines()
    assert len(line) <= 110 and len(line.split()) == len(COLUMNS)


def test_each_kind_of_round_has_a_moving_mean_that_outlives_a_resume(tmp_path, capsys) -> None:
    played = {"kind": "short", "wasted_tokens": 0, "padded": 0}

    def rewards(first: int, last: int, recorder: Recorder) -> list[str]:
        for i in range(first, last):
            kind = "long" if i % 5 == 4 else "short"
            record = make_record(i + 1, tokens=1, reward=float(kind == "short"), round=played | {"kind": kind})
            recorder.write(record)
            recorder.step(record)
        lines = capsys.readouterr().out.splitlines()
        return [line.split()[3] for line in lines if line.split()[1] in ("short", "long")]

    assert rewards(0, 7, make_recorder(tmp_path)) == ["1.000"] * 4 + ["0"] + ["1.000"] * 2
    resumed = make_recorder(tmp_path, 7)
    assert sum(resumed.means["short"]) == 6 and list(resumed.means["long"]) == [0.0]


def test_warnings_are_one_line_each_and_no_traceback(tmp_path, capsys) -> None:
    error = "ValueError: first\nTraceback (most recent call last):\n  File 'x', line 1\nKeyError: 3 (task math)"
    train = TRAIN | {"skipped": "loss nan, gradient norm nan", "loss": math.nan, "grad_norm": math.nan}
    make_recorder(tmp_path).step(make_record(7, train=train, reward_errors=2, first_reward_error=error))
    _, step, skipped, failed = capsys.readouterr().out.splitlines()
    assert step.startswith("     7") and " nan " in step
    assert skipped == "WARNING: step 7: update skipped: loss nan, gradient norm nan"
    assert failed.startswith("WARNING: step 7: 2 rewards failed and count 0: ValueError: first")
    assert "(task math)" in failed


def test_a_line_may_quote_half_a_character(tmp_path, capsys) -> None:
    recorder = make_recorder(tmp_path)
    recorder.say("the grader failed: '\ud83d'")
    assert r"the grader failed: '\ud83d'" in capsys.readouterr().out


def test_a_run_ends_with_a_table_of_its_evaluations(tmp_path, capsys) -> None:
    recorder = make_recorder(tmp_path)
    recorder.write({"step": 0, "eval": make_eval(0.25), "seconds": {}})
    recorder.write(make_record(1))
    recorder.write(make_record(2, eval=make_eval(0.5)))
    (tmp_path / "checkpoints" / "step_000002").mkdir(parents=True)
    recorder.finish(tmp_path, 2, 9)
    header, first, second, stopped, files = filter(None, capsys.readouterr().out.splitlines())
    assert header.split()[:3] == ["step", "avg@4", "pass@4"]
    assert first.split() == ["0", "0.250", "0.500", "15.0", "20", "12.5%"]
    assert second.split()[:3] == ["2", "0.500", "1.000"]
    assert stopped == "stopped after step 2 of 9; continue with --resume"
    assert str(tmp_path / "steps.jsonl") in files and "step_000002" in files and "transcripts" not in files
    (tmp_path / "samples").mkdir()
    recorder.finish(tmp_path, 2, 9)
    assert f"transcripts {tmp_path / 'samples'}" in capsys.readouterr().out


def test_a_judge_that_does_not_answer_by_its_words_is_told_of(tmp_path, capsys) -> None:
    recorder = make_recorder(tmp_path)
    for step, judge in ((1, {"verdict_mass": 0.02}), (2, {"verdict_mass": 0.9}), (3, {})):
        recorder.step(make_record(step, judge=judge))
    said = capsys.readouterr().out
    assert said.count("the judge gives") == 1 and "WARNING: step 1: the judge gives judge.accept and judge.rej" in said


def test_a_run_with_environments_says_how_its_episodes_went(tmp_path, capsys) -> None:
    recorder = make_recorder(tmp_path)
    for step, failed in ((1, 2), (2, 0)):
        episodes = {"turns": quantiles([1, step]), "reply_seconds": quantiles([0.25]), "failed": failed}
        engine = {"resumed_tokens": 30, "recomputed_tokens": 4, "peak_parked_pages": 9 - step}
        record = make_record(step, episodes=episodes, engine=engine, eval=make_eval(0.5) | {"turns": quantiles([3, 7])})
        recorder.write(record)
        recorder.step(record)
    said = capsys.readouterr().out
    assert said.count("began again") == 1 and "WARNING: step 1: 2 episodes began again" in said
    assert said.count("held-out prompts | turns P50 5 P99 6.96") == 2
    recorder.finish(tmp_path, 9, 9)
    assert (
        "episodes: turns P50 1.5 P99 1.99, replies P50 0.250 s P99 0.250 s in the last step; 2 failed\n"
        "tokens of earlier turns: 60 kept (in 8 pages at most), 8 computed again\n"
    ) in capsys.readouterr().out


def test_a_run_that_reached_its_end_or_evaluated_nothing_says_no_more(tmp_path, capsys) -> None:
    recorder = make_recorder(tmp_path)
    recorder.write({"step": 0, "eval": {}, "seconds": {}})
    recorder.evaluation(0, {})
    recorder.finish(tmp_path, 9, 9)
    [files] = filter(None, capsys.readouterr().out.splitlines())
    assert files.startswith("records ")


# ---- loggers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config, package", [(LogConfig(tensorboard=True), "tensorboard"), (LogConfig(wandb="project"), "wandb")]
)
def test_a_logger_that_is_not_installed_is_refused_by_name(monkeypatch, config: LogConfig, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=f"log.{package}.*pip install {package}"):
        check_loggers(config)
    check_loggers(LogConfig())
    monkeypatch.setitem(sys.modules, package, SimpleNamespace())
    check_loggers(config)


@pytest.mark.parametrize(("first", "purged"), [(0, 0), (25, 26)])
def test_tensorboard_forgets_the_steps_that_are_told_again(first: int, purged: int, tmp_path, monkeypatch) -> None:
    told = []
    writer = lambda _, purge_step: told.append(purge_step) or SimpleNamespace(close=lambda: None)  # noqa: E731
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=writer))
    make_recorder(tmp_path, first, config=LogConfig(tensorboard=True)).close()
    assert told == [purged]


def test_wandb_gets_every_number_under_a_flat_name(tmp_path, monkeypatch) -> None:
    logged, begun = [], []
    run = SimpleNamespace(log=lambda numbers, step: logged.append((step, numbers)), finish=lambda: logged.append("end"))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **settings: begun.append(settings) or run))
    make_recorder(tmp_path, config=LogConfig(wandb="project")).close()
    logged.clear()
    recorder = make_recorder(tmp_path, config=LogConfig(wandb="project"))
    assert begun[0]["id"] == begun[1]["id"] and begun[1]["resume"] == "allow", "a resumed run is one run there"
    recorder.write(make_record(3))
    recorder.finish(tmp_path, 9, 9)
    [(step, numbers), end] = logged
    assert (step, end) == (3, "end")
    assert numbers["replay/reward"] == numbers["replay/reward_mean_10"] == 0.25  # kinds of rounds are kept apart
    assert numbers["train/loss"] == TRAIN["loss"] and numbers["length/p99"] == pytest.approx(19.9)
    assert "step" not in numbers and "train/skipped" not in numbers


# ---- numbers -----------------------------------------------------------------------------------------------------


def test_quantiles_by_hand() -> None:
    assert quantiles(list(range(101))) == {"p50": 50.0, "p75": 75.0, "p99": 99.0, "max": 100.0, "mean": 50.0}
    assert quantiles([7]) == dict.fromkeys(("p50", "p75", "p99", "max", "mean"), 7.0)
    assert quantiles([4, 1]) == pytest.approx({"p50": 2.5, "p75": 3.25, "p99": 3.97, "max": 4.0, "mean": 2.5})
    assert quantiles([]) == dict.fromkeys(("p50", "p75", "p99", "max", "mean"), 0.0)
    assert all(type(value) is float for value in quantiles([1, 2]).values())  # numpy's would not be JSON


def test_peak_memory_is_in_mib_and_never_falls() -> None:
    before = peak_memory()["host_mib"]
    assert 50 < before < 50_000  # a process with torch in it
    held = b"x" * (64 * 2**20)
    assert peak_memory()["host_mib"] >= before and len(held)
