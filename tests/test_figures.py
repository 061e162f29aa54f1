"""Figures are drawn from what is committed beside them, and from what a run writes."""

import argparse
import functools
import importlib.util
import json
import os
import runpy
import signal
import sys
from pathlib import Path
from types import ModuleType

import pytest

from metrics import Period, Trace

FIGURES = Path(__file__).parent.parent / "figures"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch):
    """Import a script of figures/ as a module."""
    monkeypatch.syspath_prepend(str(FIGURES))

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"figure_{name}", FIGURES / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    yield load
    for name in ("training_runs", "run", "timeline", "paper", "fig04", "fig11", "flash", "flash_split", "flash_queue"):
        sys.modules.pop(name, None)


def committed(name: str):
    return json.loads((FIGURES / f"{name}.json").read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.parametrize("name", [path.stem for path in sorted(FIGURES.glob("*.py"))])
def test_help_draws_nothing(name: str, load, capsys: pytest.CaptureFixture, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(FIGURES / f"{name}.py"), run_name="__main__")
    assert "usage:" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["accuracy", "bias", "timeline", "timeline_asynchrony", "stream"])
def test_the_committed_data_is_drawn(name: str, load, tmp_path: Path) -> None:
    drawn, *caption = (committed(name),) if name == "accuracy" else load("training_runs").kept(FIGURES / f"{name}.json")
    load(name).draw(drawn, tmp_path / "out.png", *caption)
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_the_figure_of_drafts_is_of_the_stored_run() -> None:
    stored = json.loads((FIGURES.parent / "benchmarks" / "results" / "drafts.json").read_text())
    drawn = (FIGURES / "drafts.png").read_bytes()
    assert stored["checksum"].encode() in drawn, "draw it again: python figures/drafts.py"


def test_on_a_bandit_only_the_race_between_responses_is_biased(load) -> None:
    none, fast, corrected = load("bias").bandit(trials=5000)
    assert none["bias"] < 0.05 and corrected["bias"] < 0.05 and fast["bias"] > 0.2
    assert corrected["variance"] > 1.5 > fast["variance"]


def test_the_workers_of_a_group_are_drawn(load, tmp_path: Path) -> None:
    rows = [
        {"at": 10.0, "event": "starts", "jobs": ["fox"]},
        {"at": 10.0, "event": "begins", "job": "fox", "pool": "train", "phase": "start", "workers": ["train 0", "r 0"]},
        {"at": 12.0, "event": "shrinks", "job": "fox", "pool": "train", "phase": "start", "workers": ["train 0"]},
        {"at": 18.0, "event": "exits", "job": "fox", "code": 0},
    ]
    (tmp_path / "mux.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    assert load("mux_timeline").draw(tmp_path / "mux.jsonl").read_bytes().startswith(b"\x89PNG")


def test_adapters_are_drawn_beside_all_weights(load, tmp_path: Path) -> None:
    script = load("adapters")
    points = [{"step": step, "avg@4": step / 4, "standard_error": 0.01} for step in (1, 2)]
    row = {"seed": 0, "train_seconds": 3.0, "trained_tokens": 2000.0, "evaluations": points}
    rows = [row | {"way": way} for way in script.WAYS]
    script.draw(rows, tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    found = script.summary(rows)
    assert found["first_adapters"] == [0.25] and found["last_all_weights"] == [0.5]
    assert found["train_seconds_adapters"] == 1.5


@pytest.mark.slow
def test_asynchronous_runs_are_drawn_and_compared_with_the_synchronous_ones(load, tmp_path: Path) -> None:
    script = load("asynchrony_learning")
    made = {"commit": "0" * 40, "date": "2026-11-22", "reward": [0.1, 0.2]}
    last = {("ppo", 0): (0.6, 0.8), ("tis", 2): (0.7, 0.7), ("topr", 2): (0.4, 0.6)}
    rows = [
        made
        | {"loss": loss, "alpha": alpha, "seed": seed, "lag": alpha / 2}
        | {"evaluations": [{"step": 2, "avg@4": accuracy, "standard_error": 0.03, "num_prompts": 8}]}
        for (loss, alpha), accuracies in last.items()
        for seed, accuracy in enumerate(accuracies)
    ]
    found = script.compare(rows)
    assert found["synchronous"] == (0.6, 0.8) and found["worst"] == -0.2
    assert [(r["loss"], r["difference"], r["inside"], r["lag"]) for r in found["rows"]] == [
        ("tis", 0.0, True, 1.0),
        ("topr", -0.2, False, 1.0),
    ]
    assert found["rows"][0]["standard_error"] == 0.03  # of four means of 0.03, each with a weight of a half
    script.draw(rows, tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_runs_of_games_are_drawn_beside_players_and_told_where_they_miss_the_target(load, tmp_path: Path) -> None:
    script = load("environments_learning")
    players = functools.cache(script.players)
    made = {
        "commit": "0" * 40,
        "date": "2026-11-22",
        "samples": 8,
        "seconds": 60,
        "logprob_diff_max": 1e-5,
        "failed": 0,
    }
    rows = [
        made
        | {"game": name, "seed": seed, "players": players(script.game_of(name)), "reward": [0.3, last]}
        | {
            "evaluations": [
                {"step": step, "avg@4": score, "standard_error": 0.03, "num_prompts": 8, "turns": {"mean": 5.0}}
                for step, score in ((0, 0.5), (2, last))
            ]
        }
        for name, lasts in {
            "guess": (0.97, 0.5),
            "relay": (0.9, 0.4),
            "bandit": (0.6,),
            "bandit-episode": (0.5,),
        }.items()
        for seed, last in enumerate(lasts)
    ]
    found = script.summary(rows)
    assert [(r["game"], r["reached"]) for r in found["rows"]] == [
        ("guess", "yes"),
        ("guess", "no"),
        ("relay", "yes"),
        ("relay", "no"),
        ("bandit", "yes"),
        ("bandit-episode", "no"),
    ]
    assert found["rows"][1]["standard_errors"] == 0 and found["rows"][3]["standard_errors"] < 0
    guess, relay, bandit = found["players"]
    assert guess["expert"] == relay["expert"] == 1 and guess["random"] == pytest.approx(0.07, abs=0.03)
    assert guess["random"] < guess["teacher with slips"] < 0.51 and relay["random"] < 0.01
    assert relay["teacher with slips"] == pytest.approx(0.53, abs=0.05)
    assert bandit["random"] == pytest.approx(0.5, abs=0.03) and bandit["expert"] == pytest.approx(0.63, abs=0.03)
    script.draw(rows, tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["out.pdf", "out.png"])
def test_a_run_is_drawn(name: str, load, tmp_path: Path) -> None:
    run = load("run")
    assert run.moving([4.0, 2.0]) == [4.0, 3.0] and run.moving([1.0] * 20 + [2.0])[-1] == 1.1
    whole = {"length": {"mean": 5.0, "max": 9}, "seconds": {"rollout": 1.0}, "samples": 8}
    train = {"entropy": 1.0, "grad_norm": None, "logprob_diff_max": 1e-6}  # of a skipped step
    records = [{"step": 0, "eval": {"avg@4": 0.5, "standard_error": 0.01}}]
    for step in (1, 2):
        kind = {"round": {"kind": "long"}} if step == 2 else {}
        records.append({"step": step, "reward": 0.5, "train": train, **whole, **kind})
    (tmp_path / "steps.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    run.draw([tmp_path], tmp_path / name)
    assert (tmp_path / name).read_bytes()[1:4] in (b"PDF", b"PNG")


def test_a_table_shows_what_really_ran(load, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch) -> None:
    paper = load("paper")
    monkeypatch.setattr(paper, "DATA", tmp_path / "paper.json")
    assert paper.measured("end_to_end")["speedup_all"] > 1 and paper.measured("no such benchmark") == {}
    table = paper.Table("title", "unit")
    table.add("one", 2.0, 3.0, 1.75)
    table.add("two", 2.0, 2.0)
    table.end("table")
    rows = capsys.readouterr().out.splitlines()
    assert rows[2].split() == ["one", "2", "3", "+50.0%", "1.75"] and rows[3].split() == ["two", "2", "2", "+0.0%"]
    assert json.loads(rows[4])["max_rel_error"] == 0.5
    kept = json.loads(paper.DATA.read_text())
    assert [row["name"] for row in kept["rows"]] == ["one", "two"] and [m["name"] for m in kept["misses"]] == ["one"]


def test_every_miss_has_a_reason_and_32b_says_its_layout(load, capsys: pytest.CaptureFixture) -> None:
    paper = load("paper")
    kept = json.loads(paper.DATA.read_text())
    assert {row["table"] for row in kept["rows"]} >= {"Table 1", "Table 2", "Table 3", "Table 4", "Figure 4"}
    assert [m["name"] for m in kept["misses"] if not paper.why(m)] == [] and kept["misses"]
    assert [model for model in paper.MODELS if paper.misfit(model)] == ["32B/32k"]
    assert "a response of 32968 tokens does not fit" in paper.misfit("32B/32k")
    paper.Table("title", "unit").add("32B/32k  part", 2.0, 2.0)
    assert "whole weights: does not fit; here sharded" in capsys.readouterr().out


def test_seeds_are_compared_in_pairs(load, capsys: pytest.CaptureFixture) -> None:
    accuracy = load("accuracy")
    scores = {"synchronous": (0.5, 0.6), "tail_batching": (0.55, 0.7), "all": (0.5, 0.6), "eta_on_prompts": (0.7, 0.8)}
    points = [
        {"curve": curve, "seed": seed, "samples": n, "step_seconds": n * score, "avg@4": score, "standard_error": 0.01}
        for curve, pair in scores.items()
        for seed, score in enumerate(pair)
        for n in (0, 256)
    ]
    result = {row["curve"]: row for row in accuracy.compare(points)["curves"]}
    rows = [line for line in capsys.readouterr().out.splitlines() if line.lstrip().startswith("256")]
    assert ["yes" in rows[0], "yes" in rows[1], "NO" in rows[2]] == [True, True, True]
    assert "+0.075 (standard error 0.010)" in rows[0] and "+0.000" in rows[1] and "+0.200" in rows[2]
    tail = result["tail batching, eta 1.25 on both"]
    assert (tail["least"], tail["overlaps"], tail["faster"]) == (7.5, "1 of 1", [0.86, 0.91, 0.91])


def test_a_panel_is_of_one_code_and_others_stay(load, tmp_path: Path, monkeypatch) -> None:
    runs = load("training_runs")
    monkeypatch.setattr(runs, "ROOT", tmp_path)

    def draw(rows: list[dict], path: Path) -> None:
        assert path == tmp_path / "figures" / "games.png"

    def made(**code: str) -> list[tuple[str, str]]:
        rows = [{"game": game, "code": of, "commit": of, "date": "today"} for game, of in code.items()]
        arguments = argparse.Namespace(quick=False, draw=False, seeds=1)
        runs.make("games", arguments, lambda *_: rows, draw, lambda _: {}, lambda row: row["game"][0])
        return [(row["game"], row["code"]) for row in json.loads((tmp_path / "figures" / "games.json").read_text())]

    assert made(guess="a", lake="a") == [("guess", "a"), ("lake", "a")]
    assert made(lake="b") == [("guess", "a"), ("lake", "b")]
    with pytest.raises(SystemExit, match="train them again"):
        made(lake="b", lake2="c")


@pytest.mark.slow
def test_a_run_ends_with_the_script_that_started_it(load, tmp_path: Path, monkeypatch) -> None:
    runs = load("training_runs")
    monkeypatch.setattr(runs, "ROOT", tmp_path)
    monkeypatch.setattr(runs, "LOOK_SECONDS", 0.05)
    (tmp_path / "sleeps.py").write_text(
        "import os, time\nopen('part', 'w').write(str(os.getpid()))\nos.rename('part', 'pid')\ntime.sleep(600)\n"
    )

    def ended() -> bool:
        if (tmp_path / "pid").exists():
            os.kill(os.getpid(), signal.SIGTERM)
        return False

    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        runs.launch(1, "sleeps.py", until=ended)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    assert signal.getsignal(signal.SIGTERM) is handler


def test_runs_of_different_code_are_not_mixed(load, tmp_path: Path, monkeypatch) -> None:
    runs = load("training_runs")
    of_one = [{"code": "a", "commit": "1" * 40, "date": "2026-01-01", "seed": seed} for seed in (0, 1)]
    runs.refuse_mixed(of_one)
    with pytest.raises(SystemExit, match="1111111 of 2026-01-01, 2222222 of 2026-01-02.*train them again"):
        runs.refuse_mixed([*of_one, {"code": "b", "commit": "2" * 40, "date": "2026-01-02", "seed": 2}])
    monkeypatch.setattr(runs, "ROOT", tmp_path)
    (tmp_path / "configs").mkdir()
    (tmp_path / runs.CONFIG).write_text("a = 1")
    (tmp_path / "rewards").mkdir()
    (tmp_path / "rewards" / "room.py").write_text("A = 1")
    folder = tmp_path / "runs" / "one"
    folder.mkdir(parents=True)
    (folder / "config.toml").touch()  # a run that began
    runs.beside(folder).write_text(json.dumps(runs.stamp(quick=True)))
    (tmp_path / "rewards" / "room.py").write_text("A = 2")
    with pytest.raises(SystemExit, match="runs/one was trained by other code"):
        runs.run("one", quick=False)


@pytest.mark.parametrize("ended", [True, False])
def test_a_timeline_reads_what_a_run_wrote(ended: bool, load, tmp_path: Path) -> None:
    timeline, trace = load("timeline"), Trace(tmp_path / "trace.json", 0)
    for step in (1, 2, 3):
        spans = [
            Period("rollout", step, step + 1.0),
            Period("decode", step, step + 0.5),
            Period("idle", step + 0.5, step + 1),
        ]
        trace.write(step, [(spans, []), (spans, [])])
    if ended:
        trace.close()
    spans = timeline.read_trace(tmp_path / "trace.json", 2)
    assert [s[:4] for s in spans[:2]] == [(0, "decode", 0.0, 0.5), (0, "idle", 0.5, 1.0)]
    assert {s[4] for s in spans} == {2, 3} and {s[0] for s in spans} == {0, 1} and len(spans) == 8
    assert len(timeline.read_trace(tmp_path / "trace.json")) == 12
    with open(tmp_path / "trace.json", "a") as file:
        file.write('{"name": "dec')  # a kill
    assert len(timeline.read_trace(tmp_path / "trace.json")) == 12
    (tmp_path / "trace.json").write_text("[\n")
    with pytest.raises(SystemExit, match="no step is in it yet"):
        timeline.read_trace(tmp_path / "trace.json", 2)


def test_a_timeline_of_an_asynchronous_run_has_the_versions_that_drew_each_batch(load, tmp_path: Path) -> None:
    trace = Trace(tmp_path / "trace.json", 0)
    windows = [(1.0, 1.5), (1.501, 2.0), (2.5, 3.0)]  # the second begins at once
    decoding = [Period("decode", *window) for window in windows] + [Period("window_wait", 2.0, 2.5)]
    trace.write(1, [([Period("wait_batch", 1.0, 3.0), Period("train", 3.0, 4.0)], []), (decoding, [])])
    trace.close()
    record = {"step": 5, "round": {"lag": {"tokens": {"0": 10, "3": 30}}}}
    (tmp_path / "steps.jsonl").write_text(json.dumps({"step": 0, "eval": {}}) + "\n" + json.dumps(record))
    made = load("timeline_asynchrony").read(tmp_path, 1)
    assert made["tokens"] == {5: {4: 10, 1: 30}}, "the weights of step 5 are version 4"
    assert made["spans"] == [(0, "train", 2.0, 3.0, 1), (1, "decode", 0.0, 1.0, 1), (1, "decode", 1.5, 2.0, 1)]


def test_the_mean_of_an_audit_weighs_rounds_by_their_responses(load) -> None:
    rows = [{"responses": 1, "length": 10.0}, {"responses": 3, "length": 20.0}]
    assert load("bias").mean(rows, "length")[0] == 17.5


def test_distillation_is_drawn_over_seconds(load, tmp_path: Path) -> None:
    script = load("distillation")
    steps = [
        {"step": step, "seconds": {"step": 2.0}, "eval": {"avg@4": step / 5, "standard_error": 0.01}}
        for step in range(4)
    ]
    (tmp_path / "steps.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in steps), encoding="utf-8")
    points = script.evaluations(tmp_path, [3.0, 4.0, 5.0])
    assert [point["seconds"] for point in points] == [0.0, 5.0, 11.0, 18.0]  # with those of writing the texts
    assert script.is_over(tmp_path) and not script.is_over(tmp_path / "none")
    rows = [{"way": way, "seed": 0, "evaluations": points} for way in script.WAYS]
    script.draw(rows, tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    found = script.summary(rows)
    assert found["seconds_teacher_s_texts"] == [[11.0, 11.0, 18.0]] and found["best_rewards"] == [0.6]
