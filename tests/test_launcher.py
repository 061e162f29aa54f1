"""Ranks started by `--ranks`: what torchrun is told, what a check sees, and no traceback of torchrun's."""

import logging
import os
import signal
import subprocess
import sys
from typing import Any

import pytest
import torch
from conftest import ROOT, thorough

import train
from config import ConfigError
from process import launcher
from process.threads import GIVEN, HUGE_PAGES, SPINS


def test_options_of_torchrun_are_kept_apart_from_settings(alone) -> None:
    settings = ["--config", "a.toml", "--run.steps=3", "--resume"]
    flags, rest = launcher.parse(["--nproc-per-node=8", "--nnodes", "4", "--rdzv-backend=c10d", *settings])
    assert rest == settings and flags.ranks == "8" and launcher.is_wanted(flags)
    assert launcher.given(flags) == ["--nnodes=4", "--rdzv_backend=c10d"]
    assert not launcher.is_wanted(launcher.parse(settings)[0])
    assert not launcher.is_wanted(launcher.parse(["--ranks=1"])[0])
    alone.setenv("RANK", "0")
    with pytest.raises(ConfigError, match="--ranks=2: .* give the option to torchrun"):
        launcher.is_wanted(launcher.parse(["--ranks=2"])[0])


@pytest.mark.parametrize(
    "wrong",
    "ranks=0 ranks=two ranks=1025 ranks= nnodes=x nnodes=0 nnodes=3:2 nnodes= node_rank=-1 max_restarts=-1 "
    "max_restarts=abc monitor_interval=soon monitor_interval=0 master_port=70000 tee=x rdzv_id= "
    "redirects=4 nproc_per_node=gpu".split(),
)
def test_options_that_torchrun_would_not_take_are_refused_in_a_line(alone, settings, capsys, wrong: str) -> None:
    for more in ([], ["--check"]):
        assert train.main([*settings(), f"--{wrong}", *more]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"error: --{wrong} is not ") and said.count("\n") == 1


def test_options_that_torchrun_takes_pass_and_are_documented(alone) -> None:
    given = "nnodes=2:4 node_rank=0 max_restarts=0 monitor_interval=0.5 master_port=29500 tee=3"
    given += " redirects=0:1,1:2 rdzv_backend=c10d rdzv_endpoint=a:1 rdzv_id=a rdzv_conf=a=1 master_addr=a"
    given += " local_addr=a log_dir=a"
    flags = launcher.parse([f"--{option}" for option in given.split()])[0]
    assert launcher.is_wanted(flags) and len(launcher.given(flags)) == len(launcher.OPTIONS)
    text = (ROOT / "docs" / "running.md").read_text(encoding="utf-8")
    assert [name for name in launcher.OPTIONS if f"`--{name.replace('_', '-')}`" not in text] == []


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"RANK": ""}, "RANK = ''"),
        ({"RANK": "0", "WORLD_SIZE": "two"}, "WORLD_SIZE = 'two'"),
        ({"LOCAL_WORLD_SIZE": ""}, "LOCAL_WORLD_SIZE = ''"),
        ({"RANK": "1"}, "RANK = 1 and WORLD_SIZE = nothing"),
        ({"RANK": "3", "WORLD_SIZE": "2"}, "RANK = 3 and WORLD_SIZE = 2"),
        ({"WORLD_SIZE": "2"}, "RANK = nothing and WORLD_SIZE = 2"),
    ],
)
def test_a_place_that_no_rank_has_is_refused_in_a_line(alone, settings, capsys, given: dict, said: str) -> None:
    for name, value in given.items():
        alone.setenv(name, value)
    assert train.main(["--help"]) == 0 and "usage" in capsys.readouterr().out
    assert train.main([*settings(), "--check"]) == 2
    line = capsys.readouterr().err
    assert line.startswith("error: the environment has ") and said in line and line.count("\n") == 1


def test_a_script_goes_on_after_its_ranks_as_it_was(alone, monkeypatch) -> None:
    numbers = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT
    monkeypatch.setattr("torch.distributed.run.main", lambda _: [signal.signal(s, signal.SIG_IGN) for s in numbers])
    before, handlers = dict(os.environ), [*map(signal.getsignal, numbers)]
    assert launcher.launch("script.py", launcher.parse(["--ranks=2"])[0], []) == 0
    assert os.environ == before and logging.root.manager.disable == 0
    assert [*map(signal.getsignal, numbers)] == handlers


def test_the_cores_are_divided_unless_the_user_did(alone) -> None:
    torch.set_num_threads(6)
    assert launcher.pretend(launcher.parse(["--ranks=3", "--nnodes=1:4"])[0]) == 12
    assert os.environ["OMP_NUM_THREADS"] == "2" and os.environ["LOCAL_WORLD_SIZE"] == "3"
    assert torch.get_num_threads() == 2
    launcher.divide_cores(6)
    assert os.environ["OMP_NUM_THREADS"] == "2"
    del os.environ["OMP_NUM_THREADS"]
    launcher.divide_cores(64)
    assert os.environ["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize("given", ["", *GIVEN])
def test_threads_spin_briefly_unless_the_user_says_how_they_wait(alone, given: str) -> None:
    for name in GIVEN:
        alone.delenv(name, raising=False)
    if given:
        alone.setenv(given, "7")
    launcher.divide_cores(2)
    assert {name: os.environ[name] for name in GIVEN if name in os.environ} == (
        {given: "7"} if given else {"GOMP_SPINCOUNT": SPINS}
    )


@pytest.mark.parametrize("given", ["", "0"])
def test_tensors_lie_in_huge_pages_unless_the_user_says_otherwise(alone, given: str) -> None:
    alone.delenv(HUGE_PAGES, raising=False)
    if given:
        alone.setenv(HUGE_PAGES, given)
    launcher.divide_cores(2)
    assert os.environ[HUGE_PAGES] == (given or "1")


@pytest.mark.slow
@pytest.mark.parametrize("script", ["train.py", "serve.py", "profiler.py", "process/evaluate.py"])
def test_a_script_says_how_threads_wait_before_torch_reads_it(script: str) -> None:
    code = (
        "import os, runpy, sys\nfrom process import threads\n"
        "said = lambda: print('early' if 'torch' not in sys.modules else 'late', flush=True)\n"
        "threads.before_torch = lambda: (said(), os._exit(0))\n"
        f"sys.argv = [{str(ROOT / script)!r}, '--help']\nrunpy.run_path(sys.argv[0], run_name='__main__')"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout == "early\n", done.stderr


@pytest.mark.slow
def test_a_check_sees_the_ranks_that_it_is_told(alone, settings, capsys) -> None:
    assert train.main([*settings(), "--check"]) == 0 and "fine for 1 rank (--ranks=N" in capsys.readouterr().out
    assert train.main([*settings(), "--check", "--ranks=2"]) == 0 and "fine for 2 ranks" in capsys.readouterr().out
    assert train.main([*settings(), "--check", "--ranks=3"]) == 2
    assert "not a multiple of the 3 replicas" in capsys.readouterr().err
    whole = settings(rollout__tensor_parallel=2)
    assert train.main([*whole, "--check"]) == 2 and "does not divide 1 ranks" in capsys.readouterr().err
    assert train.main([*whole, "--check", "--ranks=2"]) == 0


SCRIPT = """
import os, signal, sys, time
rank, how = os.environ["RANK"], sys.argv[1]
if how == "refuse":
    if rank == "0":
        sys.exit(print("error: no", file=sys.stderr) or 2)
elif how == "die" and rank == "1":
    os.kill(os.getpid(), signal.SIGKILL)
elif how == "stop":
    from process.launcher import settle
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit(os.write(1, b"saved\\n") and 0))
    settle()  # a signal that comes while torchrun starts us ends torchrun alone; its end then ends us
    os.write(1, f"threads {os.environ['OMP_NUM_THREADS']}\\n".encode())  # whole: two ranks share the pipe
time.sleep(120)
"""


def start(folder, how: str) -> subprocess.Popen:
    (folder / "script.py").write_text(SCRIPT)
    code = "import sys; from process.launcher import launch, parse; sys.exit(launch('script.py', *parse(sys.argv[1:])))"
    (folder / "temporary").mkdir()
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"} | {"PYTHONPATH": str(ROOT)}
    environment["TMPDIR"] = str(folder / "temporary")
    command = [sys.executable, "-c", code, "--ranks=2", how]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True, **pipes)


@pytest.mark.parametrize("script", ["train.py", "serve.py", "profiler.py", "process/evaluate.py"])
@pytest.mark.slow
def test_an_interrupt_while_modules_are_imported_is_no_traceback(tmp_path, script: str) -> None:
    (tmp_path / "torch.py").write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)")
    code = f"import runpy, sys; sys.path[:0] = ['process', {str(tmp_path)!r}, '.']"
    code += f"; runpy.run_path({script!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


@pytest.mark.slow
@pytest.mark.parametrize(
    "how, code, line", [thorough("refuse", 2, "error: no"), ("die", 137, "error: SIGKILL ended rank 1 ")]
)
def test_a_failure_is_one_line(tmp_path, how: str, code: int, line: str) -> None:
    process = start(tmp_path, how)
    _, said = process.communicate(timeout=120)
    assert process.returncode == code and said.startswith(line) and len(said.splitlines()) == 1, said
    assert not [*(tmp_path / "temporary").iterdir()]


@pytest.mark.slow
def test_an_interrupt_reaches_the_ranks_and_leaves_no_traceback(tmp_path) -> None:
    process = start(tmp_path, "stop")
    ready = [process.stdout.readline() for _ in range(2)]
    assert all(line.startswith("threads ") for line in ready)
    process.send_signal(signal.SIGINT)
    out, said = process.communicate(timeout=120)
    assert (process.returncode, out, said) == (130, "saved\nsaved\n", "")


@pytest.mark.parametrize("is_late", [False, True])
def test_a_rank_that_begins_after_its_launchers_end_ends_too(alone, is_late: bool) -> None:
    """No signal tells it: the one at a parent's death comes to those that asked for it before."""
    alone.setenv("TORCHELASTIC_RUN_ID", "a")
    alone.setenv(launcher.LAUNCHER, str(os.getpid() + is_late))
    code = "from process.launcher import settle; settle(); settle(); print('goes on')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == ((1, "") if is_late else (0, "goes on\n"))
    assert ("launcher has ended" in done.stderr) == is_late
