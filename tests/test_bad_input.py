"""What a user gets wrong ends before any rank works, in one line of error and exit code 2. Never a traceback."""

import json
import os
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import thorough
from safetensors.torch import load_file, save_file
from test_config import limits
from transformers import PreTrainedTokenizerFast

import data
import profiler
import train
from checkpoint import INDEX, WEIGHTS, eos_ids, load_tokenizer
from config import load_config
from model import Model, parse_shape
from process import run_folder
from scheduler import POLICIES, SchedulerConfig, TailBatching
from settings import Config

GOOD = [{"prompt": f"count {i}", "answer": str(i)} for i in range(12)]


@pytest.fixture
def base(tiny_folder: Path, tmp_path: Path, monkeypatch) -> dict[str, str]:
    """The command line of a run that is fine, key by key; files are in the current folder, which is its own."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_folder, "model")
    Path("data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in GOOD), encoding="utf-8")
    Path("grader.py").write_text("def good(response, answer, row):\n    return 1.0\n")
    return {
        "run.dir": "run",
        "run.device": "cpu",
        "model.path": "model",
        "data.train": "data.jsonl",
        "data.task": "grader.py:good",
        "data.eval_prompts": "2",
        "scheduler.num_prompts": "4",
        "scheduler.num_responses": "2",
        "rollout.max_prompt_tokens": "32",
        "rollout.max_response_tokens": "32",
        "rollout.kv_gib": "0.01",
        "reward.num_workers": "1",
    }


def check(capsys, base: dict[str, str], *more: str, **changes: str | None) -> tuple[int, str]:
    """Return (exit code, what was said on stderr) of `train.py --check`."""
    values = base | {key.replace("__", "."): value for key, value in changes.items()}
    args = [f"--{key}={value}" for key, value in values.items() if value is not None]
    code = train.main([*args, "--check", *more])
    return code, capsys.readouterr().err


def refused(capsys, base: dict[str, str], *more: str, **changes: str | None) -> str:
    code, said = check(capsys, base, *more, **changes)
    assert code == 2, (more, changes, said)
    assert said.startswith("error: ") and said.count("\n") == 1 and len(said) > 30, said
    assert not Path("run").exists(), "nothing is written before all is checked"
    return said


@pytest.mark.slow
def test_the_run_that_all_of_this_is_about_is_fine(capsys, base) -> None:
    assert check(capsys, base) == (0, "")


# ---- every option ------------------------------------------------------------------------------------------------


def bad_values(default: object, limits: dict) -> list[str]:
    if isinstance(default, bool):
        return ["7", "maybe", "[]"]
    if isinstance(default, str):
        return ["no such choice", "{ a = 1 }"] if limits["choices"] else ["{ a = 1 }", "[1, 2]"]
    if isinstance(default, tuple):
        return ["{ a = 1 }", "[1, 2]", '[""]', "[[]]"]
    low = limits["min"] - 1 if limits["min"] is not None else limits["above"]
    values = ["many", "true", "[1]", str(low if isinstance(default, float) else int(low)), "nan", "-1e999"]
    return values + ([str(limits["max"] + 1)] if limits["max"] is not None else [])


@pytest.mark.parametrize("key, default, limits", limits(), ids=[key for key, *_ in limits()])
def test_a_bad_value_of_any_option_is_refused_by_name(key, default, limits, capsys) -> None:
    for value in bad_values(default, limits):
        said = refused(capsys, {}, f"--{key}={value}")
        assert key in said, (value, said)


# ---- command lines and config files ------------------------------------------------------------------------------

COMMANDS = {
    "no dashes": ["run.steps=3"],
    "no value": ["--run.steps"],
    "no section": ["--steps=3"],
    "no key": ["--run.=3"],
    "a section": ["--run=3"],
    "three levels": ["--run.steps.more=3"],
    "misspelt": ["--run.stpes=3"],
    "misspelt section": ["--rnu.steps=3"],
    "flag": ["--reusme"],
    "short flag": ["-r"],
    "file as argument": ["configs/tiny.toml"],
    "spaces": ["--run.steps", "3"],
    "huge": ["--trainer.lr=1" + "0" * 400],
    "no such config": ["--config", "nowhere.toml"],
    "folder as config": ["--config", "model"],
    "ranks that do not divide": ["--scheduler.num_prompts=3", "--rollout.tensor_parallel=2"],
    "size without ranks": ["--rollout.tensor_parallel=4"],
    "odd size": ["--rollout.tensor_parallel=3"],
    "shard without ranks": ["--trainer.shard=2"],
    "sharded rollout of whole masters": ["--rollout.weights=sharded"],
    "no gpu": ["--run.device=cuda"],
    "sft": ["--loss.name=sft"],
    "more updates than prompts": ["--trainer.updates_per_step=5"],
    "setting of another loss": ["--loss.tis_cap=2"],
    "decoupled from nothing": ["--loss.name=decoupled", "--loss.old_logprobs=rollout"],
    "a ratio that is one": ["--loss.name=tis", "--loss.old_logprobs=trainer"],
    "bounds that nothing reads": ["--loss.name=sft", "--run.replay=.", "--loss.clip_low=0.1"],
    "greedy": ["--sampling.temperature=0"],
    "a seed beyond all": ["--warm_start.seed=99999999999999999999"],
    "a seed of adapters beyond all": ["--trainer.lora.rank=4", "--trainer.lora.seed=99999999999999999999"],
    "buffer over limit": ["--reward.overlong_buffer=33"],
    "no such replay": ["--run.replay=nowhere"],
    "context": ["--rollout.max_response_tokens=4096"],
    "pool for no sequence": ["--rollout.kv_gib=0.000001"],
    "no profile": ["--planner.rule=predict"],
    "profile that is none": ["--planner.rule=paper", "--planner.profile=data.jsonl"],
    "a size within rounds without times": ["--planner.within_round=true"],
    "audit without race": ["--scheduler.audit=0.1", "--scheduler.policy=synchronous"],
    "turns and whole rewards": ["--scheduler.dynamic_sampling=true", "--loss.credit=turn"],
    "draws under eta": ["--scheduler.dynamic_sampling=true", "--scheduler.eta_prompts=4", "--scheduler.max_draws=2"],
    "grader for a built-in task": ["--data.train=hailstone", "--data.task=grader.py:good"],
    "judge without task": ["--judge.path=model"],
    "a judge's settings without a judge": ["--judge.template=no place for the response"],
    "grader over the wait of ranks": ["--data.task=grader.py:good", "--reward.timeout_seconds=601"],
    "service over the wait of ranks": ["--data.task=http://localhost:1/", "--reward.remote_seconds=601"],
    "task judge without judge": ["--data.task=judge"],
    "too many prompts": ["--scheduler.num_prompts=64"],
    "weights unreadable": ["--reward.weights=math"],
    "weights not a number": ["--reward.weights=math=high"],
    "weights of nobody": ["--reward.weights=math=2"],
    "weights twice": ["--reward.weights=match=1,match=2"],
    "concurrency unreadable": ["--reward.concurrency=good:3"],
}


def test_two_configs_are_refused(capsys, base) -> None:
    Path("a.toml").write_text("[run]\nsteps = 3\n")
    assert "--config is given 2 times" in refused(capsys, base, "--config", "a.toml", "--config=a.toml")


@pytest.mark.parametrize("name", COMMANDS)
def test_a_bad_command_line_is_refused(name, capsys, base) -> None:
    refused(capsys, base, *COMMANDS[name])


FILES = {
    "not toml": "run: {steps: 3}",
    "python": "import os",
    "binary": "\x00\x01",
    "key twice": "[run]\nsteps = 1\nsteps = 2",
    "no section": "steps = 3",
    "wrong section": "[runs]\nsteps = 3",
    "wrong key": "[run]\nstep = 3",
    "wrong type": '[run]\nsteps = "3"',
    "table as value": "[run.steps]\nn = 3",
    "value as section": "run = 3",
    "array of sections": "[[run]]\nsteps = 3",
    "float for whole": "[run]\nsteps = 3.5",
    "date": "[run]\nsteps = 2026-01-01",
}


@pytest.mark.parametrize("name", FILES)
def test_a_bad_config_file_is_refused_by_name(name, capsys, base) -> None:
    Path("my.toml").write_text(FILES[name])
    assert "my.toml" in refused(capsys, base, "--config", "my.toml")


# ---- data --------------------------------------------------------------------------------------------------------

CASES = json.dumps([{"test": "assert f"}])
LINES = {
    "not json": "prompt: 1 + 1",
    "python": "{'prompt': 'a', 'answer': 'b'}",
    "half a line": '{"prompt": "a", "ans',
    "two rows": '{"prompt": "a", "answer": "b"} {"prompt": "c", "answer": "d"}',
    "list": '["a", "b"]',
    "text": '"a"',
    "null": "null",
    "empty row": "{}",
    "no prompt": '{"answer": "b"}',
    "no answer": '{"prompt": "a"}',
    "empty prompt": '{"prompt": "", "answer": "b"}',
    "number as prompt": '{"prompt": 3, "answer": "b"}',
    "null prompt": '{"prompt": null, "answer": "b"}',
    "number as answer": '{"prompt": "a", "answer": 3}',
    "null answer": '{"prompt": "a", "answer": null}',
    "long prompt": json.dumps({"prompt": "a" * 100, "answer": "b"}),
    "messages without role": '{"prompt": [{"content": "a"}], "answer": "b"}',
    "messages without content": '{"prompt": [{"role": "user"}], "answer": "b"}',
    "messages that are texts": '{"prompt": ["a"], "answer": "b"}',
    "no messages": '{"prompt": [], "answer": "b"}',
    "no such task": '{"prompt": "a", "answer": "b", "task": "maths"}',
    "number as task": '{"prompt": "a", "answer": "b", "task": 3}',
    "no such grader file": '{"prompt": "a", "answer": "b", "task": "nowhere.py:f"}',
    "code without cases": '{"prompt": "a", "answer": "b", "task": "code"}',
    "code with odd cases": json.dumps({"prompt": "a", "answer": json.dumps([{"in": 1}]), "task": "code"}),
    "math without answer": json.dumps({"prompt": "a", "answer": "", "task": "math"}),
    "nan": '{"prompt": "a", "answer": NaN}',
    "deep": '{"prompt": "a", "answer": "b", "more": ' + "[" * 60 + "]" * 60 + "}",
    "deep objects": '{"prompt": "a", "answer": "b", "more": ' + '{"a": ' * 60 + "1" + "}" * 61,
    "code with deep cases": json.dumps({"prompt": "a", "answer": "[" * 10**5, "task": "code"}),
    "code with deep case": json.dumps({"prompt": "a", "answer": "[" * 900 + "]" * 900, "task": "code"}),
    "template a number": json.dumps({"prompt": "a", "answer": CASES, "task": "code", "template": 3}),
    "template null": json.dumps({"prompt": "a", "answer": CASES, "task": "code", "template": None}),
    "template a list": json.dumps({"prompt": "a", "answer": CASES, "task": "code", "template": ["{program}"]}),
    "template without program": json.dumps({"prompt": "a", "answer": CASES, "task": "code", "template": "f()"}),
}


@pytest.mark.parametrize("name", LINES)
def test_a_bad_row_is_refused_with_file_and_line(name, capsys, base) -> None:
    rows = [json.dumps(row) for row in GOOD]
    rows.insert(5, LINES[name])
    Path("data.jsonl").write_text("\n".join(rows) + "\n")
    assert "data.jsonl:6" in refused(capsys, base, "--data.eval_prompts=0")


@pytest.mark.parametrize("file", ["train", "eval"])
@pytest.mark.parametrize("task", ["timeit:timeit", "mine.py:f", "http://127.0.0.1:1/"])
def test_a_row_does_not_choose_the_code_that_runs(task, file, capsys, base) -> None:
    Path("mine.py").write_text("open('pwned', 'w')\ndef f(*_): return 1.0")
    row = {"prompt": "12?", "answer": "open('pwned', 'w').write('x')", "task": task}
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*GOOD, row]))
    said = refused(capsys, base, f"--data.{file}=rows.jsonl", "--data.eval_prompts=99")
    assert f"rows.jsonl:13: task = '{task}'" in said and "data.graders" in said and not Path("pwned").exists()


DATA = {
    "missing": lambda path: path.unlink(),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "empty": lambda path: path.write_text(""),
    "blank": lambda path: path.write_text("\n \n"),
    "latin-1": lambda path: path.write_bytes('{"prompt": "é", "answer": "b"}\n'.encode("latin-1")),
    "gzip": lambda path: path.write_bytes(b"\x1f\x8b\x08\x00\x00\x00"),
    "csv": lambda path: path.write_text("prompt,answer\na,b\n"),
    "an array": lambda path: path.write_text(json.dumps(GOOD)),
    "parquet": lambda path: path.write_bytes(b"PAR1\x15\x04"),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "a device": lambda path: (path.unlink(), path.symlink_to("/dev/zero")),
    "a link to nothing": lambda path: (path.unlink(), path.symlink_to("nowhere")),
}


@pytest.mark.parametrize("name", DATA)
def test_a_bad_data_file_is_refused_by_name(name, capsys, base) -> None:
    DATA[name](Path("data.jsonl"))
    assert "data.jsonl" in refused(capsys, base)


@pytest.mark.slow
def test_rows_left_out_for_held_out_prompts_are_told_of(capsys, base) -> None:
    rows = [*GOOD[:3], *[GOOD[3]] * 17]
    Path("data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = refused(capsys, base)  # holds out rows 0 and 10
    assert (
        "data.train has 2 prompts, " in said
        and "as they equal held-out prompts: 18)" in said
        and "lower scheduler.num" in said
    )
    Path("data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[3:]))
    said = refused(capsys, base)
    assert (
        "data.train has 0 prompts, " in said
        and "as they equal held-out prompts: 17)" in said
        and "lower scheduler" not in said
    )
    assert "(data.eval)" in said and "data.eval_prompts" in said
    assert "left out" not in refused(capsys, base, "--data.eval=hailstone", "--scheduler.num_prompts=64")


@pytest.mark.parametrize("key", ["--config", "--data.eval", "--planner.profile"])
def test_nobody_waits_for_a_pipe(key, capsys, base) -> None:
    os.mkfifo("pipe")
    more = ["--planner.rule=paper"] if "profile" in key else []
    assert "not a regular file" in refused(capsys, base, f"{key}=pipe", *more)


def test_a_prompt_far_too_long_is_refused_before_it_has_tokens(capsys, base, monkeypatch) -> None:
    def encode(*_, **__):
        raise AssertionError("nobody makes tokens of this")

    with open("data.jsonl", "w") as file:
        file.write(json.dumps({"prompt": "a" * (data.TOKEN_CHARACTERS * 32 + 1), "answer": "b"}) + "\n")
    monkeypatch.setattr(PreTrainedTokenizerFast, "encode", encode)
    for chat in ("true", "false"):
        said = refused(capsys, base, f"--data.chat={chat}", "--data.eval_prompts=0")
        assert "data.jsonl:1" in said and "16385 characters" in said and "max_prompt_tokens = 32" in said


TEMPLATES = {
    "no end": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "no end of text": "{% for i in range(99999) %}{% for j in range(99999) %}{{ i }}{% endfor %}{% endfor %}",
    "reaches out": "{{ messages.__class__.__mro__[1].__subclasses__() }}",
    "wrong": "{% for %}",
    "half a character": "{{ '\\ud800' }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_chat_template_that_does_not_end_or_fails_is_refused_with_the_row(name, capsys, base, monkeypatch) -> None:
    monkeypatch.setattr(data, "TEMPLATE_SECONDS", 0.3)
    for path in Path("model").glob("chat_template*"):
        path.unlink()
    settings = json.loads(Path("model/tokenizer_config.json").read_text())
    Path("model/tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATES[name]}))
    said = refused(capsys, base)
    assert "data.jsonl:" in said and "chat template" in said and ("0.3 s" in said) == ("no end" in name)


@pytest.mark.parametrize("chat", ["true", "false"])
def test_a_tokenizer_that_fails_is_refused_with_the_row(chat, capsys, base) -> None:
    settings = json.loads(Path("model/tokenizer_config.json").read_text())
    Path("model/tokenizer_config.json").write_text(json.dumps(settings | {"model_max_length": "x"}))
    said = refused(capsys, base, f"--data.chat={chat}")
    assert "data.jsonl:" in said and "tokenizer" in said and "'<' not supported" in said or "'>' not supported" in said


@pytest.mark.slow
def test_a_tokenizer_brings_no_code(capsys, base) -> None:
    Path("model/own.py").write_text("open('pwned', 'w')\nclass Own: pass")
    settings = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}}
    Path("model/tokenizer_config.json").write_text(json.dumps(settings))
    code, said = check(capsys, base)
    assert code in (0, 2) and said.count("\n") == (code == 2) and not Path("pwned").exists()


# ---- model folders -----------------------------------------------------------------------------------------------


def set_config(**changes):
    def change(folder: Path) -> None:
        path = folder / "config.json"
        config = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))

    return change


def store_as(kind: str):
    def change(folder: Path) -> None:
        weights = load_file(folder / WEIGHTS)
        save_file({name: weight.to(getattr(torch, kind)) for name, weight in weights.items()}, folder / WEIGHTS)

    return change


MODELS = {
    "missing": shutil.rmtree,
    "empty": lambda folder: (shutil.rmtree(folder), folder.mkdir()),
    "a file": lambda folder: (shutil.rmtree(folder), folder.write_text("x")),
    "no config": lambda folder: (folder / "config.json").unlink(),
    "config not json": lambda folder: (folder / "config.json").write_text("{"),
    "config a list": lambda folder: (folder / "config.json").write_text("[]"),
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "weights cut": lambda folder: (folder / "model.safetensors").write_bytes(
        (folder / "model.safetensors").read_bytes()[:-9]
    ),
    "weights empty": lambda folder: (folder / "model.safetensors").write_bytes(b""),
    "weights of a pickle": lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
    "no tokenizer": lambda folder: [p.unlink() for p in folder.glob("tokenizer*")],
    "tokenizer cut": lambda folder: (folder / "tokenizer.json").write_text('{"version":'),
    "no family": set_config(model_type=None),
    "other family": set_config(model_type="mamba"),
    "vision model": set_config(model_type="qwen2_vl"),
    "no width": set_config(hidden_size=None),
    "wrong width": set_config(hidden_size=48),
    "width a text": set_config(hidden_size="32"),
    "no layers": set_config(num_hidden_layers=0),
    "more layers": set_config(num_hidden_layers=9),
    "heads that do not divide": set_config(num_key_value_heads=3),
    "other vocabulary": set_config(vocab_size=7),
    "other layers": set_config(use_sliding_window=True, layer_types=["linear_attention"] * 2),
    "odd rope": set_config(rope_scaling={"rope_type": "magic", "factor": 2}, rope_parameters=None),
    "short context": set_config(max_position_embeddings=40),
    "index without files": lambda folder: (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}})
    ),
    "index empty": lambda folder: (folder / "model.safetensors.index.json").write_text("{}"),
    "end token beyond the vocabulary": lambda folder: set_config(
        eos_token_id=json.loads((folder / "config.json").read_text())["vocab_size"]
    )(folder),
    "a width beyond all memory": set_config(hidden_size=2**30),
    "all sizes beyond all memory": set_config(hidden_size=2**30, intermediate_size=2**31 - 1, head_dim=2**30),
    "a link to nothing": lambda folder: (folder / "chat_template.json").symlink_to("nowhere"),
    "a link to itself": lambda folder: (folder / "vocab.txt").symlink_to("vocab.txt"),
    "a folder as file": lambda folder: (folder / "merges.txt").mkdir(),
    "a pipe": lambda folder: os.mkfifo(folder / "added_tokens.json"),
    "a pipe as config": lambda folder: ((folder / "config.json").unlink(), os.mkfifo(folder / "config.json")),
    "a pipe as weights": lambda folder: ((folder / WEIGHTS).unlink(), os.mkfifo(folder / WEIGHTS)),
    "a file from elsewhere": lambda folder: (folder / "vocab.json").symlink_to("/etc/hostname"),
    "config from elsewhere": lambda folder: (
        shutil.move(folder / "config.json", "elsewhere.json"),
        (folder / "config.json").symlink_to(Path("elsewhere.json").resolve()),
    ),
    "deep config": lambda folder: (folder / "config.json").write_text("[" * 10**5),
    "index that leads away": lambda folder: (folder / INDEX).write_text(
        json.dumps({"weight_map": {"a": f"../{folder.name}/{WEIGHTS}"}})
    ),
    **{f"weights of {kind}": store_as(kind) for kind in ("int8", "bool", "complex64", "float8_e4m3fn")},
    "generation config broken": lambda folder: (folder / "generation_config.json").write_text("{"),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_bad_model_folder_is_refused_by_name(name, capsys, base) -> None:
    MODELS[name](Path("model"))
    said = refused(capsys, base)
    assert "model" in said or "context" in said


@pytest.mark.slow
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e300])
def test_weights_that_are_not_finite_are_refused_before_the_first_step(value, capsys, base) -> None:
    weights = load_file("model/model.safetensors")
    name = next(n for n in weights if n.endswith("q_proj.weight"))
    weights[name] = weights[name].double()
    weights[name][3, 4] = value
    save_file(weights, "model/model.safetensors")
    assert train.main([f"--{key}={value}" for key, value in base.items()]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: model/model.safetensors") and name in said and said.count("\n") == 1


@pytest.mark.slow
def test_a_folder_of_the_cache_trains_and_no_file_but_the_models_goes_into_checkpoints(capsys, base) -> None:
    """Its files are links to blobs, as huggingface_hub lays them out; what else lies there is left alone."""
    snapshot, blobs = Path("hub/models--a--b/snapshots/0f"), Path("hub/models--a--b/blobs")
    snapshot.mkdir(parents=True)
    shutil.move("model", blobs)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    (snapshot / "x.json").mkdir()
    (snapshot / "y.json").symlink_to("nowhere")
    (snapshot / "secret.txt").symlink_to("/etc/hostname")
    os.mkfifo(snapshot / "z.json")
    base["model.path"] = str(snapshot)
    assert train.main([*(f"--{key}={value}" for key, value in base.items()), "--run.steps=1"]) == 0
    folder = Path("run/checkpoints/step_000001")
    added = {path.name for path in folder.iterdir()} - {path.name for path in blobs.iterdir()}
    assert added == {"state.json", "optimizer", "checksums.json"} and not any(
        path.is_symlink() for path in folder.iterdir()
    )
    assert {path.name for path in blobs.iterdir()} <= {path.name for path in folder.iterdir()}


# ---- rewards -----------------------------------------------------------------------------------------------------

GRADERS = {
    "lines": ("mine.py:lines", "def lines(response, answer, row):\n    raise ValueError('a\\nb\\nc')"),
    "lines at import": ("mine.py:lines", "raise ValueError('a\\nb\\nc')"),
    "no such file": ("nowhere.py:f", ""),
    "no such function": ("mine.py:other", "def f(r, a, row): return 1"),
    "not a function": ("mine.py:f", "f = 3"),
    "does not compile": ("mine.py:f", "def f(r, a, row) return 1"),
    "does not import": ("mine.py:f", "import no_such_package\ndef f(r, a, row): return 1"),
    "raises": ("mine.py:f", "def f(r, a, row): raise RuntimeError('mine')"),
    "two arguments": ("mine.py:f", "def f(r, a): return 1"),
    "a text": ("mine.py:f", "def f(r, a, row): return 'good'"),
    "nothing": ("mine.py:f", "def f(r, a, row): pass"),
    "nan": ("mine.py:f", "def f(r, a, row): return float('nan')"),
    "no colon": ("mine.py", "def f(r, a, row): return 1"),
    "exits": ("mine.py:f", "import os\nos._exit(0)"),
    "unknown": ("mathematics", ""),
    "bad address": ("http://", ""),
}
ADVISED = ("lines at import", "does not compile", "does not import")


@pytest.mark.slow
@pytest.mark.parametrize("name", GRADERS)
def test_a_bad_grader_is_refused_by_name(name, capsys, base) -> None:
    task, code = GRADERS[name]
    Path("mine.py").write_text(code + "\n")
    said = refused(capsys, base, data__task=task)
    assert task.partition(":")[0] in said and said.count("correct the name, or") == (name in ADVISED)


# ---- templates and run folders -----------------------------------------------------------------------------------


@pytest.mark.parametrize("template", ["no place", "{prompt", "{answer}", "{prompt:d}", "{}", "{0}", "{prompt}\udcff"])
def test_a_bad_template_is_refused(template, capsys, base) -> None:
    assert "data.template" in refused(capsys, base, data__template=template)


@pytest.mark.slow
def test_a_run_folder_in_use_or_of_other_settings_is_refused_and_left_alone(capsys, base) -> None:
    folder = Path("run")
    folder.mkdir()
    args = [f"--{key}={value}" for key, value in base.items()]
    assert train.main([*args, "--run.steps=1"]) == 0
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    capsys.readouterr()
    for more in ([], ["--resume", "--trainer.lr=0.5"], ["--resume", "--scheduler.num_responses=4"]):
        code, said = check(capsys, base, "--run.steps=1", *more)
        assert code == 2 and said.count("\n") == 1 and "'run'" in said or "run was started" in said, said
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_folder_with_damage_is_refused_by_name(capsys, base) -> None:
    Path("run").mkdir()
    Path("run/checkpoints").write_text("x")
    code, said = check(capsys, base)
    assert code == 2 and said.startswith("error: run/checkpoints is not a folder")
    Path("run/checkpoints").unlink()
    Path("run/checkpoints/step_000004").mkdir(parents=True)
    for how in ((), ("--resume",)):  # else its weights might be resumed as those of the new run
        code, said = check(capsys, base, *how)
        assert code == 2 and said.startswith("error: run.dir = 'run' holds step_000004 but no config.toml")
    shutil.rmtree("run/checkpoints")
    Path("run/config.toml").write_text("[run\nsteps")
    code, said = check(capsys, base, "--resume")
    assert (
        code == 2 and said.startswith("error: --resume: run/config.toml: not valid TOML") and "correct the file" in said
    )


def test_a_run_without_checkpoints_begins_anew_with_corrected_settings(capsys, base) -> None:
    """As after an error in its first step: there is no trajectory to keep."""
    Path("run").mkdir()
    run_folder.write_settings(
        load_config(Config, None, [f"--{key}={value}" for key, value in base.items()]), Path("run")
    )
    assert check(capsys, base, "--resume", "--scheduler.num_prompts=1")[0] == 0
    code, said = check(capsys, base, "--scheduler.num_prompts=1")
    assert code == 2 and "continue it with --resume" in said
    Path("run/steps.jsonl").write_text('{"step": 0}\n{"step": 1}\n')  # of a run whose checkpoints are gone
    code, said = check(capsys, base, "--resume", "--scheduler.num_prompts=1")
    assert code == 2 and "scheduler.num_prompts is 1 now and was " in said


@pytest.mark.slow
def test_two_runs_do_not_share_a_folder(capsys, base, monkeypatch) -> None:
    monkeypatch.setattr(run_folder, "LOCK_SECONDS", 0.0)
    args = [f"--{key}={value}" for key, value in base.items()]
    with run_folder.locked(Path("run")):
        assert train.main([*args, "--run.steps=1", "--resume"]) == 2
        assert "another run is using it" in capsys.readouterr().err
        assert not Path("run", "config.toml").exists()
    assert train.main([*args, "--run.steps=1", "--resume"]) == 0


@pytest.mark.parametrize("kind", ["a file", "no permission"])
def test_a_run_folder_that_cannot_be_made_is_refused(kind, capsys, base) -> None:
    Path("taken").write_text("x")
    args = [f"--{key}={value}" for key, value in (base | {"run.dir": "taken/run"}).items()]
    if kind == "no permission":
        args = [f"--{key}={value}" for key, value in (base | {"run.dir": "/proc/run"}).items()]
    assert train.main([*args, "--run.steps=1"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: run.dir") and said.count("\n") == 1


# ---- kinds of values that nobody expects in a model folder -------------------------------------------------------

ODD = [None, "x", "", -1, 0, 1.5, True, [], [[1]], {}, {"a": 3}, 10**18]
KEYS = """model_type architectures eos_token_id num_hidden_layers num_attention_heads num_key_value_heads head_dim
hidden_size max_position_embeddings rope_theta rope_parameters rope_scaling rms_norm_eps tie_word_embeddings""".split()


@pytest.mark.parametrize("key", [*KEYS[:4], *map(thorough, KEYS[4:])])
@pytest.mark.slow
def test_a_value_of_another_kind_in_a_model_is_refused_or_trains(key, capsys, base) -> None:
    path = Path("model/config.json")
    plain, refusals = json.loads(path.read_text()), 0
    for value in ODD:
        path.write_text(json.dumps(plain | {key: value}))
        code, said = check(capsys, base)
        assert code in (0, 2) and (not code or said.startswith("error: ") and said.count("\n") == 1), (value, said)
        refusals += code == 2
        if not code:
            shape = parse_shape(json.loads(path.read_text()), "config.json")
            with torch.device("meta"):
                Model(shape)
            assert all(type(i) is int for i in eos_ids("model", load_tokenizer("model"), 10**6)), value
    assert refusals or key in ("architectures", "rope_theta", "rope_scaling", "tie_word_embeddings")


@pytest.mark.parametrize("map", [[], "x", {}, {"a": 3}, {"a": None}, 7])
def test_an_odd_weight_map_is_refused(map, capsys, base) -> None:
    Path("model/model.safetensors.index.json").write_text(json.dumps({"weight_map": map}))
    assert "weight_map" in refused(capsys, base)


@pytest.mark.parametrize(
    "setting",
    [
        "--run.steps=" + "9" * 5000,
        "--run.steps=" + "[" * 5000,
        "--run.dir=" + "x" * 5000,
        "--run.dir=",
        "--model.path=" + "x" * 5000,
        "--data.train=a\0b",
        "--rollout.kv_gib=1e300",
        "--run.timeout_seconds=1e300",
        "--trainer.lr=1e300",
        "--reward.num_workers=1000000000",
        "--rollout.max_running=1000000000",
        "--reward.timeout_seconds=1e300",
        "--reward.worker_gib=1e300",
        "--data.task=http://[::1/x",
        "--data.task=http://h:abc/x",
        "--data.task=http://h:0/x",
        "--data.task=http://a..b/x",
        "--data.task=http://" + "a" * 64 + "/x",
        "--data.task=http://name:word@h/x",
        "--data.task=http://h/ä",
        "--data.task=http://h/x?a=ä",
        "--data.task=http://h/a b",
        "--data.task=http://a b/x",
        "--data.graders=match,http://a..b/x",
    ],
)
def test_an_absurd_setting_is_refused(setting, capsys, base) -> None:
    refused(capsys, base, setting)


@pytest.mark.slow
def test_an_audit_of_a_policy_that_races_by_itself(base, capsys, monkeypatch) -> None:
    def raced(config: SchedulerConfig, seed: int = 0) -> TailBatching:
        return TailBatching(replace(config, eta_responses=1.5), seed)

    monkeypatch.setitem(POLICIES, "raced", raced)
    args = ["--scheduler.audit=0.1", "--scheduler.eta_prompts=1"]
    assert "nothing to audit" in refused(capsys, base, *args)
    assert check(capsys, base, *args, "--scheduler.policy=raced") == (0, "")


@pytest.mark.slow
def test_turns_have_credit_only_by_the_grader_that_knows_their_rewards(base, capsys) -> None:
    Path("game.py").write_text("def play(row, seed):\n    yield ''\n    return 1.0\n")
    args = ["--data.env=game.py:play", "--loss.credit=turn"]
    assert "loss.credit = turn has no effect with the grader" in refused(capsys, base, *args)
    for more in (["--reward.also=env=1"], ["--data.task=env"]):
        code, said = check(capsys, base, *args, *more)
        assert code == 0, said


def test_a_template_for_texts_is_refused_beside_messages(base, capsys) -> None:
    rows = [{"prompt": [{"role": "user", "content": f"{n}?"}], "answer": "1"} for n in range(8)]
    Path("chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = refused(capsys, base, "--data.template=Be brief. {prompt}", data__train="chats.jsonl")
    assert "data.template = 'Be brief. {prompt}' has no effect" in said


def test_the_profiler_takes_the_file_of_a_run_with_a_loss_of_its_own(base, capsys) -> None:
    Path("own.toml").write_text('[loss]\nname = "mine"\n\n[scheduler]\npolicy = "mine"\n')
    assert profiler.main(["--config=own.toml", "--model.path=missing"]) == 2
    assert "no such model" in capsys.readouterr().err


def test_the_profiler_refuses_what_it_cannot_read_or_write(capsys, base) -> None:
    args = [f"--{key}={value}" for key, value in base.items()]
    for bad in ("--planner.profile=/proc/x/y", "--config=missing.toml", "--model.path=missing", "--no.such=1"):
        assert profiler.main([*args, bad]) == 2
        said = capsys.readouterr().err
        assert said.startswith("error: ") and said.count("\n") == 1, said
    with pytest.raises(SystemExit, match="0"):
        profiler.main(["--help"])


# ---- fuzz --------------------------------------------------------------------------------------------------------


def mutate(data: bytes, rng: random.Random) -> bytes:
    cut = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        i = rng.randrange(len(cut))
        what = rng.randrange(4)
        if what == 0:
            cut[i] = rng.randrange(256)
        elif what == 1:
            del cut[i : i + rng.randint(1, 20)]
        elif what == 2:
            cut[i:i] = bytes(rng.choices(b'{}[]",:\\\n0-e\xff', k=rng.randint(1, 3)))
        else:
            j = rng.randrange(len(cut))
            cut[i:i] = cut[j : j + 10]
        cut = cut or bytearray(b" ")
    return bytes(cut)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["data.jsonl", "my.toml", "model/config.json", "model/tokenizer.json", "grader.py"])
def test_files_with_random_damage_are_fine_or_refused(name, capsys, base) -> None:
    Path("my.toml").write_text('[run]\nsteps = 3\n[loss]\nname = "ppo"\n[scheduler]\neta_prompts = 1.5\n')
    original, rng, codes = Path(name).read_bytes(), random.Random(name), []
    for _ in range(4 if name == "grader.py" else 10):
        Path(name).write_bytes(mutate(original, rng))
        code, said = check(capsys, base, "--config", "my.toml")
        assert code in (0, 2) and said.count("\n") == (code == 2), said
        codes.append(code)
    assert 2 in codes, "the damage must have mattered"
