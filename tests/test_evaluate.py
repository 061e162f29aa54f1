"""The command that scores a folder: the very responses that a run drew, for a checkpoint, a run or any model."""

import json
import os
import signal
import tempfile
from functools import partial
from pathlib import Path

import pytest
from conftest import ROOT, steps_of

import train
from checkpoint import list_checkpoints
from config import ConfigError, load_config
from loss import LOSSES
from metrics import read_records
from process import ending, evaluate
from scheduler import POLICIES
from settings import Config

pytestmark = pytest.mark.slow  # processes and whole runs

SCORES = ("avg@2", "pass@2", "standard_error", "num_prompts", "truncated", "length", "reward_parts")


@pytest.fixture
def settings(settings, mixed_prompts):
    rollout = dict(rollout__max_prompt_tokens=32, rollout__max_response_tokens=32)
    return partial(settings, run__eval_samples=2, data__train=mixed_prompts, data__task="match", **rollout)


def scores(record: dict) -> dict:
    return {name: record[name] for name in SCORES if name in record}


@pytest.fixture(scope="module")
def greedy() -> list[str]:
    return ["--run.eval_samples=1", "--sampling.temperature=0"]


def test_a_checkpoint_draws_what_its_run_drew_there(settings, tmp_path, capsys):
    options = dict(run__steps=2, run__eval_every=1, run__checkpoint_every=1, trainer__lr=1e-2)
    grader = f"{ROOT / 'tests' / 'graders.py'}:share_of_digits"
    assert train.main(settings(**options, data__task=grader, reward__also="match=0.5", trainer__lora__rank=2)) == 0
    run, out = tmp_path / "run", tmp_path / "scores.json"
    before = sorted(path.relative_to(run) for path in run.rglob("*"))
    for folder, record in zip([*list_checkpoints(run), run], [*steps_of(run), steps_of(run)[-1]], strict=True):
        assert evaluate.main([str(folder), f"--out={out}", "--samples=2"]) == 0
        told = json.loads(out.read_text())
        assert scores(told["eval"]) == scores(record["eval"]), folder
        assert "reward_parts" in told["eval"] and told["model"] == str(list_checkpoints(run)[record["step"] - 1])
    printed = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("--- prompt") for line in printed) == 3 * 2
    [*_, row] = (line.split() for line in printed if line.startswith("all "))
    assert row[1] == "4" and float(row[2]) == pytest.approx(told["eval"]["avg@2"], abs=5e-4)
    assert sorted(path.relative_to(run) for path in run.rglob("*")) == before, "an evaluation leaves the run alone"
    assert scores(steps_of(run)[0]["eval"]) != scores(steps_of(run)[1]["eval"]), "else nothing is compared"


def test_a_model_folder_takes_settings_and_may_be_greedy(settings, tiny_folder, tmp_path, greedy):
    data = [text for text in settings() if text.startswith(("--data.", "--rollout.", "--reward.", "--run.device"))]
    out = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, seed in zip(out, (1, 2)):
        assert evaluate.main([str(tiny_folder), *data, *greedy, f"--run.seed={seed}", f"--out={path}"]) == 0
    first, second = (json.loads(path.read_text())["eval"] for path in out)
    assert first["length"] == second["length"] and "avg@1" in first


def test_the_best_checkpoint_is_kept_after_a_resume_and_named_to_the_end(settings, tmp_path, capsys):
    (tmp_path / "taste.py").write_text(
        "def score(response, answer, row):\n    n = len(response)\n    return n / 40 if n < 25 else 1 / n\n"
    )
    options = dict(run__eval_every=1, run__checkpoint_every=3, run__keep_checkpoints=1, trainer__lr=3e-2)
    options |= dict(data__task=f"{tmp_path / 'taste.py'}:score")
    assert train.main(settings(**options, run__steps=2)) == 0
    assert train.main([*settings(**options, run__steps=6), "--resume"]) == 0
    run = tmp_path / "run"
    records = [record["eval"] for record in read_records(run / "steps.jsonl")]
    scores = [record["avg@2"] for record in records]
    assert len(scores) == 7
    for step, record in enumerate(records):
        score = max(scores[: step + 1])
        assert record["best"] == {"step": scores.index(score), "score": score}
    best = records[-1]["best"]
    assert best["step"], "the model of the start has no checkpoint"
    kept = {f"step_{best['step']:06d}", "step_000006"}
    assert {folder.name for folder in list_checkpoints(run)} == kept
    last = f"best evaluation: step {best['step']}, avg@2 {best['score']:.3f}"
    assert last in capsys.readouterr().out
    out = tmp_path / "best.json"
    assert evaluate.main([str(run / "checkpoints" / "best"), f"--out={out}"]) == 0
    assert json.loads(out.read_text())["eval"]["avg@2"] == best["score"]


def test_a_run_with_a_loss_and_a_grader_that_fails_is_evaluated(settings, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(LOSSES, "mine", LOSSES["ppo"])
    monkeypatch.setitem(POLICIES, "own", POLICIES["synchronous"])
    grader = f"{ROOT / 'tests' / 'graders.py'}:raises"
    own = dict(loss__name="mine", scheduler__policy="own", data__task=grader, run__steps=1, run__eval_every=1)
    assert train.main(settings(**own)) == 0
    monkeypatch.undo()
    told = f"{steps_of(tmp_path / 'run')[-1]['eval']['reward_errors']} rewards failed and count 0: "
    assert "WARNING: eval 1: " + told in capsys.readouterr().out
    assert evaluate.main([str(tmp_path / "run")]) == 0
    assert "WARNING: " + told in (out := capsys.readouterr().out) and "no grade today" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["name one folder", "not 0"]),
        (["{tiny}", "{tiny}"], ["name one folder", "not 2"]),
        (["nowhere"], ["nowhere: no such folder"]),
        (["{tmp}"], ["neither a model", "config.json"]),
        (["{tiny}", "--samples=-1"], ["--samples=-1", "a number from 0"]),
        (["{tiny}", "--out={tmp}/no/x.json"], ["/no/x.json", "a folder that is there"]),
        (["{tiny}", "--out={tmp}"], ["no file can be written there"]),
        (["{tiny}", "--loss.name=ppo"], ["loss.name has no place", "it changes nothing"]),
        (["{tiny}", "--trainer.lr=1"], ["trainer.lr has no place"]),
        (["{tiny}", "--data.curriculum=pass_rate"], ["data.curriculum has no place"]),
        (["{tiny}", "--reward.weights=match=0.5"], ["reward.weights has no place"]),
        (["{tiny}", "--reward.overlong_buffer=4"], ["reward.overlong_buffer has no place"]),
        (["{tiny}", "--run.steps=3"], ["run.steps has no place"]),
        (["{tiny}", "--model.path=x"], ["model.path has no place", "FOLDER"]),
        (["{tiny}", "--data.eval_prompts=0"], ["data.eval_prompts = 0", "raise it"]),
        (["{tiny}", "--data.eval_promts=9"], ["unknown key data.eval_promts", "eval_prompts"]),
        (["{tiny}", "--data.train={tmp}/two.jsonl"], ["too short", "give data.eval"]),
    ],
)
def test_what_cannot_be_evaluated_is_refused_in_one_line(arguments, words, tiny_folder, tmp_path, capsys):
    rows = '{"prompt": "a", "answer": "b", "task": "match"}\n' * 2
    (tmp_path / "two.jsonl").write_text(rows)
    small = [
        "--run.device=cpu",
        "--rollout.max_response_tokens=8",
        "--rollout.kv_gib=0.01",
        "--rollout.max_prompt_tokens=8",
    ]
    filled = [text.format(tiny=tiny_folder, tmp=tmp_path) for text in arguments]
    assert evaluate.main([*filled, *small]) == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith("error: ") and "\n" not in said and [w for w in words if w not in said] == [], said


def test_the_file_is_written_though_the_console_fails(tmp_path, monkeypatch):
    def fails(*_: object, **__: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(evaluate, "print", fails, raising=False)
    monkeypatch.setattr(evaluate, "table", lambda record: "")
    with pytest.raises(BrokenPipeError):
        evaluate.report(load_config(Config, None), {"seconds": 1.0}, "", str(tmp_path / "out.json"))
    assert json.loads((tmp_path / "out.json").read_text())["eval"] == {"seconds": 1.0}


def test_ranks_that_are_launched_may_share_a_model(tiny_folder, monkeypatch):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(
        evaluate.launcher, "launch", lambda *arguments: 7 * Path(os.environ.pop(evaluate.SCRATCH)).is_dir()
    )
    short = ["--rollout.max_prompt_tokens=64", "--rollout.max_response_tokens=64", "--run.device=cpu"]
    for key in ("rollout.tensor_parallel", "trainer.shard"):
        assert evaluate.main([str(tiny_folder), "--ranks=2", f"--{key}=2", *short]) == 7


def test_a_checkpoint_beside_the_working_directory_has_the_settings_of_its_run(tmp_path, monkeypatch):
    for step in (1, 2):
        (own := tmp_path / f"checkpoints/step_{step:06d}").mkdir(parents=True)
        (own / "config.json").write_text("{}")
    (tmp_path / "config.toml").write_text("")
    monkeypatch.chdir(tmp_path / "checkpoints/step_000001")
    assert evaluate.model_of(Path("../step_000002"))[1] == tmp_path / "config.toml"


def test_a_signal_leaves_no_folder(tiny_folder, tmp_path, monkeypatch):
    def end(*args, **kwargs):
        assert [*tmp_path.iterdir()]
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(evaluate, "evaluate", end)
    before = signal.getsignal(signal.SIGTERM)
    try:
        short = ["--rollout.max_prompt_tokens=64", "--rollout.max_response_tokens=64"]
        with pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)):
            evaluate.main([str(tiny_folder), "--run.device=cpu", *short])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not [*tmp_path.iterdir()]


def test_ranks_score_as_one_does(settings, tiny_folder, tmp_path, run_mains):
    data = [text for text in settings() if text.startswith(("--data.", "--rollout.", "--reward.", "--run."))]
    data = [text for text in data if not text.startswith(("--run.dir", "--run.steps"))]
    out = [tmp_path / "one.json", tmp_path / "two.json"]
    assert evaluate.main([str(tiny_folder), *data, f"--out={out[0]}"]) == 0
    ended = run_mains(2, evaluate.main, [str(tiny_folder), *data, f"--out={out[1]}"])
    assert [rank.code for rank in ended] == [0, 0], ended
    one, two = (scores(json.loads(path.read_text())["eval"]) for path in out)
    assert one == two


@pytest.mark.parametrize("step", ["check_run", "evaluate"])
def test_a_rank_that_fails_has_removed_its_folder_before_it_says_so(step, tiny_folder, tmp_path, monkeypatch):
    """For then it may be ended at any moment."""
    left = []
    (scratch := tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    monkeypatch.setattr(ending, "refuse", lambda error: left.append([*scratch.iterdir()]) or 2)

    def fail(*args, **kwargs):
        assert [*scratch.iterdir()]
        raise ConfigError("no")

    monkeypatch.setattr(evaluate, step, fail)
    short = ["--rollout.max_prompt_tokens=64", "--rollout.max_response_tokens=64"]
    assert evaluate.main([str(tiny_folder), "--run.device=cpu", *short]) == 2 and left == [[]]


def test_an_interrupt_of_the_check_leaves_no_folder_and_no_traceback(tiny_folder, tmp_path, monkeypatch, capsys):
    def interrupt(*args, **kwargs):
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler and [*tmp_path.iterdir()]
        raise KeyboardInterrupt

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(evaluate, "check_run", interrupt)
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        short = ["--rollout.max_prompt_tokens=64", "--rollout.max_response_tokens=64"]
        assert evaluate.main([str(tiny_folder), "--run.device=cpu", *short]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert not [*tmp_path.iterdir()] and capsys.readouterr().err == ""
