"""plainroll as an installed package: beside a user's modules of our names, over ranks, with callbacks and as a job."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT, steps_of
from test_layout import FOLDERS

import train
from config import ConfigError, load_config
from process import ending
from settings import Config

OURS = ("config", "data", "model", "metrics")  # names of modules that users have, too

SCRIPT = """
import os
import sys

import config, data, model, metrics
from plainroll.library import open_job, run, take_step

SETTINGS = {settings}
SETTINGS |= {{"run.dir": sys.argv[2], "data.task": "reward.py:score"}}


def is_apart():
    own = os.path.dirname(os.path.abspath(__file__))
    assert all(m.WHO == "the user" and m is sys.modules[m.__name__] for m in (config, data, model, metrics))
    from plainroll import ROOT
    ours = [name for name, m in sys.modules.items() if (getattr(m, "__file__", None) or "").startswith(f"{{ROOT}}/")]
    assert len(ours) > 50 and all(name.startswith("plainroll") for name in ours), ours
    from plainroll.config import ConfigError
    from plainroll import job
    assert job.ConfigError is ConfigError and job.checkpoint.__name__ == "plainroll.checkpoint"


def note(job, record):
    is_apart()
    with open("said.txt", "a") as said:
        print(f"step {{record['step']}} of rank {{job.world.rank}} {{type(job).__module__}}", file=said)


def fail(job, record):
    if record["step"] == 3 and job.world.rank == 1:
        raise ValueError("no more")


if __name__ == "__main__":
    if sys.argv[1] == "run":
        code = run(SETTINGS, [note, fail], ranks=2)
        print("ended", code)  # once
        sys.exit()
    with open_job(SETTINGS | {{"run.steps": 1}}) as job:
        record = take_step(job)
        job.recorder.write(record)
        job.save(waits=True)
    note(job, record)
"""


PIP = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of what a wheel needs."""
    source = tmp_path_factory.mktemp("copied") / "source"
    source.mkdir()
    for name in (*FOLDERS, "plainroll", "configs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (*ROOT.glob("*.py"), ROOT / "pyproject.toml", ROOT / "requirements.txt"):
        shutil.copy(path, source)
    return source


@pytest.fixture(scope="module")
def site(source: Path) -> Path:
    """Return a folder in which pip has installed plainroll; nothing else is left of the copy."""
    copy = shutil.copytree(source, source.with_name("built"))
    subprocess.run([*PIP, f"--target={source.with_name('site')}", copy], check=True, timeout=300)
    shutil.rmtree(copy)
    return source.with_name("site")


@pytest.fixture(scope="module")
def editable(source: Path) -> Path:
    """Return a folder that leads Python to an editable install of the copy."""
    prefix, leads = source.with_name("prefix"), source.with_name("leads")
    subprocess.run([*PIP, f"--prefix={prefix}", "--editable", source], check=True, timeout=300)
    [packages] = prefix.glob("lib/python*/site-packages")
    leads.mkdir()
    (leads / "sitecustomize.py").write_text(f"import site\n\nsite.addsitedir({str(packages)!r})\n")
    return leads


@pytest.fixture
def user(request, settings, mixed_prompts: Path, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess]:
    """Run a user's script, in a folder with modules of our names; return how it ended. Its parameter: the install."""
    site = request.getfixturevalue(getattr(request, "param", "site"))
    (folder := tmp_path / "user").mkdir()
    for name in OURS:
        (folder / f"{name}.py").write_text('WHO = "the user"\n')
    (folder / "reward.py").write_text(
        "import config\n\ndef score(response, answer, row):\n"
        '    assert config.WHO == "the user"\n    return sum(map(str.isdigit, response)) / 10\n'
    )
    given = dict(item.removeprefix("--").split("=", 1) for item in settings(run__steps=3, data__eval_prompts=0))
    given |= {"data.train": str(mixed_prompts), "rollout.max_prompt_tokens": "32"}
    typed = {key: value if key in TEXTS else json.loads(value) for key, value in given.items()}
    (folder / "script.py").write_text(SCRIPT.format(settings=typed))
    environment = os.environ | {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}

    def run(*arguments: str) -> subprocess.CompletedProcess:
        command = [sys.executable, *arguments]
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)

    return run


TEXTS = ("run.dir", "run.device", "model.path", "data.train")


@pytest.mark.slow
def test_two_ranks_train_beside_modules_of_our_names(user, tmp_path) -> None:
    """What ranks send each other by pickle, graders in worker processes, and callbacks."""
    done = user("script.py", "run", str(tmp_path / "run"))
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert done.stdout.splitlines().count("ended 1") == 1, "the last callback has failed"
    [line] = [line for line in done.stderr.splitlines() if "callback" in line]
    assert line.startswith("error: callback fail: ValueError: no more (") and "script.py:" in line
    said = (tmp_path / "user" / "said.txt").read_text().splitlines()
    assert {f"step {step} of rank {rank} plainroll.job" for step in (1, 2) for rank in (0, 1)} <= {*said}
    records = steps_of(tmp_path / "run")
    assert len(records) >= 2 and all(r["reward_errors"] == 0 for r in records)
    assert any(r["reward"] > 0 for r in records)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("user", ["editable"], indirect=True)
def test_a_job_is_stepped_by_hand(user, tmp_path) -> None:
    done = user("script.py", "step", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "user" / "said.txt").read_text() == "step 1 of rank 0 plainroll.job\n"
    assert len(steps_of(tmp_path / "run")) == 1 and (tmp_path / "run/checkpoints/step_000001/state.json").exists()


@pytest.mark.thorough
@pytest.mark.slow
def test_the_example_trains_on_two_ranks(user, tmp_path) -> None:
    text = (ROOT / "examples" / "library.py").read_text()
    for setting, value in {"steps": 2, "warm_start.steps": 1, "eval_prompts": 0, "max_response_tokens": 32}.items():
        text, found = re.subn(f'"{setting}": \\d+', f'"{setting}": {value}', text)
        assert found == 1, setting
    (tmp_path / "user" / "example.py").write_text(text)
    done = user("example.py")
    assert done.returncode == 0, done.stderr
    [line] = [line for line in done.stdout.splitlines() if line.startswith("rewards by step: ")]
    assert len(line.split()) == 3 + 2
    by_hand = user("example.py", "by-hand")
    assert by_hand.returncode == 0, by_hand.stderr
    assert [line[:7] for line in by_hand.stdout.splitlines() if line.startswith("step ")] == ["step 1:", "step 2:"]
    assert len(steps_of(tmp_path / "user" / "runs" / "by_hand")) == 2
    assert (tmp_path / "user/runs/by_hand/checkpoints/step_000002/state.json").exists()


@pytest.mark.slow
@pytest.mark.thorough
def test_scripts_and_their_files_are_installed(user) -> None:
    done = user("-m", "plainroll", "train", "--help")
    assert done.returncode == 0 and "--run.steps" in done.stdout, done.stderr
    assert "NAME is one of: train" in user("-m", "plainroll", "nothing").stderr
    assert "write python -m plainroll train" in user("-m", "plainroll.train").stderr
    code = "import threading; from plainroll import simulate; from plainroll.engine.native import SOURCE; "
    code += "from plainroll.library import run; print(len(SOURCE) > 0, simulate.CONFIGS.exists()); "
    code += "print(run({}, ['fail']), run({}, ranks=2)); "
    done = user("-c", f"{code}threading.Thread(target=run, args=({{}},)).start()")
    assert done.stdout.split() == ["True", "True", "2", "2"] and "callbacks: 'fail' is no function" in done.stderr
    assert "torchrun starts a script, and there is none here" in done.stderr and "main thread only" in done.stderr


def test_the_wheel_has_every_folder() -> None:
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert packages == ["plainroll", "plainroll._flat", *(f"plainroll._flat.{folder}" for folder in FOLDERS)]


@pytest.mark.slow
def test_callbacks_get_each_record_and_end_the_run(settings, capfd) -> None:
    seen = list[tuple[int, int, bool]]()

    def note(job, record) -> None:
        seen.append((job.step, record["step"], "eval" in record))

    def fail(job, record) -> None:
        raise KeyError("mine")

    config = load_config(Config, None, settings(run__steps=2, run__eval_every=2))
    assert train.run(config, False, [note, note]) == 0
    assert seen == [(1, 1, False)] * 2 + [(2, 2, True)] * 2
    assert train.run(load_config(Config, None, settings("other", run__steps=1)), False, [fail]) == 1
    said = capfd.readouterr().err
    assert "fail: KeyError: 'mine' (" in said and f"{Path(__file__).name}:" in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("callbacks", "text"), [(print, "one function"), ([print, "note"], "'note'"), (7, "7"), ("note", "'n'")]
)
def test_callbacks_that_cannot_be_called_are_refused(callbacks, text) -> None:
    with pytest.raises(ConfigError, match=f"callbacks: .*{text}"):
        ending.check_callbacks(callbacks)


def test_settings_are_a_dict() -> None:
    config = load_config(Config, {"run.steps": 7, "run": {"dir": "x"}, "trainer.lora.rank": 3, "trainer.lr": 1})
    assert (config.run.steps, config.run.dir, config.trainer.lora.rank, config.trainer.lr) == (7, "x", 3, 1.0)
    for given, text in (
        ({"run.stesp": 1}, "unknown key run.stesp; did you mean run.steps"),
        ({"runs": {}}, "unknown key runs"),
        ({"run": 3}, "run is a section"),
        ({"run.steps.more": 1}, "run.steps"),
        ({"run.steps": "3"}, "wrong type"),
        ({3: 1}, "unknown key 3"),
        ({"run": {3: 1}}, "unknown key run.3"),
        ({"run.steps": 1, "run": {"steps": 2}}, "run.steps is given twice"),
        ({"trainer": {"lora": {"rank": 1}}, "trainer.lora": {"rank": 1}}, "trainer.lora.rank is given twice"),
    ):
        with pytest.raises(ConfigError, match=text):
            load_config(Config, given)
