"""Graders, and what a bad one costs: its own sample's reward and bounded time, nothing else."""

import json
import math
import os
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path

import hostile
import numpy as np
import pytest
from conftest import thorough

import reward
from config import ConfigError
from core import Prompt, Reward
from process.workers import WorkerError
from reward import RewardConfig, overlong_penalty
from rewards import graders, leftovers, user_files
from rewards.graders import GRADERS, INLINE, check_grader, check_rewards, math_answer, resolve_grader
from rewards.pool import WORKER, RewardPool, try_graders

USER_GRADERS = (
    hostile.HEADLESS
    + r"""
import asyncio, os, signal, subprocess, sys, threading, time

def good(response, answer, row): return 2 * (response == answer) + row["bonus"]
def size(response, answer, row): return len(response)
def pid(response, answer, row): return os.getpid()
def child(response, answer, row): return subprocess.Popen(["sleep", "60"]).pid
def loads_trainer(response, answer, row): return "torch" in sys.modules or "transformers" in sys.modules
def prints(response, answer, row): print("[1, 9.0, 0, '']\n" * 60000); return len(sys.stdin.read()) + 0.5
def dies_later(response, answer, row): threading.Timer(0.05, os._exit, [3]).start(); return os.getpid()
def has_math(response, answer, row): return "math_verify" in sys.modules

def hangs(response, answer, row):
    while True: pass
def stops(response, answer, row): os.kill(os.getpid(), signal.SIGSTOP)
def exits(response, answer, row): os._exit(3)
def killed(response, answer, row): os.kill(os.getpid(), signal.SIGKILL)
def raises(response, answer, row): return row["no such field"]
def no_exception(response, answer, row): raise asyncio.CancelledError("late")
class Mute(Exception):
    def __str__(self): return 7
def mute(response, answer, row): raise Mute
def no_room(response, answer, row):
    from rewards.sandbox import SandboxError
    raise SandboxError("no room")
def quits(response, answer, row): sys.exit("enough")
def nan(response, answer, row): return float("nan")
def huge(response, answer, row): return 10**400
def large(response, answer, row): return -1e39
class Odd:
    def __repr__(self): raise RuntimeError("no name")
def nameless(response, answer, row): return Odd()
def own(response, answer, row):
    from core import Reward
    import numpy
    values = {"nan": float("nan"), "inf": float("inf"), "None": None, "text": "1", "10000": 10**400, "1e+39": 1e39}
    values |= {"numpy": numpy.float32("inf"), "1j": 1j, "Reward": Reward(1.0), "right": numpy.float32(0.5)}
    if response == "cases": return Reward(1.0, cases=object())
    if response == "error": return Reward(float("nan"), error=Odd)
    if response == "why": return Reward(1.0, seconds=object(), error="why")
    return Reward(values[response], "soon")
def session(response, answer, row): return subprocess.Popen(["sleep", "60"], start_new_session=True).pid
def daemon(response, answer, row):
    read, write = os.pipe()
    if not (child := os.fork()):
        os.setsid()
        if os.fork(): os._exit(0)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT): signal.signal(number, signal.SIG_IGN)
        os.write(write, str(os.getpid()).encode())
        time.sleep(60)
    os.waitpid(child, 0)
    return int(os.read(read, 99))
def headless(response, answer, row):
    if not (child := os.fork()): end_first_thread(0)
    while b") Z" not in open(f"/proc/{child}/stat", "rb").read(): time.sleep(0.01)
    return child
def text(response, answer, row): return "1.0"
def garbage(response, answer, row):
    for fd in range(3, 10):
        try: os.write(fd, b"[0, 1.0, 0.0, \"\"]\n")
        except OSError: pass
    time.sleep(60)

def moody(response, answer, row):
    if response == "hang": hangs(response, answer, row)
    if response == "exit": exits(response, answer, row)
    if response == "garbage": garbage(response, answer, row)
    while response == "swell": kept.append(bytearray(32 << 20)); time.sleep(0.01)
    return 1
kept = []
def leaks(response, answer, row): kept.append(bytearray(b"x") * (64 << 20)); return os.getpid()
async def waits(response, answer, row): await asyncio.sleep(0.01); return len(response)
async def waits_in_vain(response, answer, row): await asyncio.sleep(1000)
def alone(response, answer, row):
    open("taken", "x").close()
    time.sleep(0.05)
    os.remove("taken")
    return 1
def in_pairs(response, answer, row):
    open("here" + response, "x").close()
    while sum(name.startswith("here") for name in os.listdir()) < 2: time.sleep(0.01)
    return 1

def alarm(response, answer, row):
    def ring(*_): raise TimeoutError("alarm")
    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    while True: pass
def at_the_gate(response, answer, row):
    with open("begun", "a") as file: file.write(response)
    while not os.path.exists("gate"): time.sleep(0.01)
    return 1

not_callable = 7
"""
)

# What each bad grader's error must tell.
BAD = {
    "hangs": "did not finish within 1 s",
    "stops": "did not finish within 1 s",
    "exits": "died (exit code 3)",
    "killed": "died (exit code -9)",
    "raises": "KeyError: 'no such field'",
    "quits": "SystemExit: enough",
    "nan": "returned nan",
    "huge": "returned 1000",
    "large": "returned -1e+39",
    "nameless": "RuntimeError: no name",
    "text": "returned '1.0'",
    "garbage": "instead of a reply",
    "alarm": "TimeoutError: alarm",
}
CHILDREN = ("child", "session", "daemon", "headless")  # graders that leave one behind
CONFIG = RewardConfig(num_workers=2, timeout_seconds=1.0)
# A selection for speed, and none that reaches for what mere resource limits leave open.
NAMES = ("endless loop", "fork bomb", "memory bomb", "output of a gigabyte", "daemon", "os._exit", "fake verdict")
HOSTILE = [(name, hostile.PROGRAMS[name]) for name in NAMES]


@pytest.fixture
def user(tmp_path, monkeypatch):
    """The user's graders in mine/graders.py of the working directory; gives their prefix."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "graders.py").write_text(USER_GRADERS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    yield "mine/graders.py:"
    user_files.enter("")
    for name in ("mine", "mine.graders", "broken"):  # the next test's are in another folder
        sys.modules.pop(name, None)


def is_running(pid: float) -> bool:
    try:
        return leftovers.look(int(pid))[1] is not None
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_gone(pids: list[float]) -> bool:
    return wait_for(lambda: not any(map(is_running, pids)))


def wait_for(condition) -> bool:
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def grade_one(pool: RewardPool, task: str, response: str = "", answer: str = "", row: dict | None = None):
    pool.submit("key", task, response, answer, row or {})
    [(key, graded)] = pool.drain()
    assert key == "key"
    return graded


# ---- graders


@pytest.mark.parametrize(
    "task, response, answer, value",
    [
        ("match", " yes\n", "yes", 1.0),
        ("match", "yes it is", "yes", 0.0),
        ("match", "Yes", "yes", 0.0),
        ("hailstone", "70000 22000=50000", "50000", 1.0),
        ("hailstone", "70000 = 50000 \n", "50000", 1.0),
        ("hailstone", "=50000", "50000", 1.0),
        ("hailstone", "70000=5000", "50000", 0.0),
        ("hailstone", "70000 50000", "50000", 0.0),
        ("hailstone", "50000", "50000", 0.0),
        ("hailstone", "7=5=50000", "50000", 0.0),
        ("hailstone", "50000=50000=", "50000", 0.0),
        ("hailstone", "", "50000", 0.0),
        ("reverse_add", "56 121 # 121", "121", 1.0),
        ("reverse_add", "56 121 = 121", "121", 0.0),
        ("reverse_add", "56 # 121 # 121", "121", 0.0),
        ("reverse_add", "121 #", "121", 0.0),
    ],
)
def test_inline_graders(task, response, answer, value):
    with RewardPool(CONFIG, [task]) as pool:
        pool.submit(0, task, response, answer, {})
        [(_, graded)] = pool.poll()  # at once
    assert graded.value == value and graded.error == ""


def test_a_grader_file_imports_its_neighbours(user, tmp_path):
    (tmp_path / "mine" / "loss.py").write_text("VALUE = 0.5")  # as a room of ours is called
    (tmp_path / "mine" / "two.py").write_text("import loss\ndef f(response, answer, row): return loss.VALUE")
    with RewardPool(CONFIG, ["mine/two.py:f"]) as pool:
        assert grade_one(pool, "mine/two.py:f").value == 0.5


@pytest.mark.slow
def test_each_grader_has_its_own_neighbours_when_it_is_loaded_and_when_it_is_called(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = "import config, helper\ndef f(response, answer, row):\n    import pack, late, core\n"
    text += "    return helper.A + config.A + late.A + core.Reward(len(pack.A)).value"
    for number, folder in enumerate(("a", "b", ".")):
        (tmp_path / folder / "pack").mkdir(parents=True)
        (tmp_path / folder / "g.py").write_text(text)
        (tmp_path / folder / "pack" / "__init__.py").write_text("from pack.part import A")
        (tmp_path / folder / "pack" / "part.py").write_text(f"A = 'x' * {number}")
        for name, factor in (("helper", 10), ("config", 100), ("late", 1000)):  # `config` is also a room of ours
            (tmp_path / folder / f"{name}.py").write_text(f"A = {number * factor}")
    tasks = ["a/g.py:f", "b/g.py:f", "g:f", "math"]
    with RewardPool(CONFIG, tasks) as pool:
        for _ in range(2):
            assert [grade_one(pool, task, "1", "1").value for task in tasks] == [0, 1111, 2222, 1]
    (tmp_path / "a" / "helper.py").write_text("import random")
    (tmp_path / "a" / "random.py").write_text("A = 1")
    both = r"a/helper.py imports random, which is .*a/random.py and also a module of Python; rename"
    with pytest.raises(ConfigError, match=both):
        try_graders(CONFIG, {"a/g.py:f": Prompt(0, (), "", "1", "a/g.py:f")})
    (tmp_path / "envs.py").write_text("from envs.adapters import tools\ndef f(response, answer, row):\n    return 1.0")
    with pytest.raises(ConfigError, match="envs.py imports envs, and would find itself; rename the file"):
        try_graders(CONFIG, {"envs.py:f": Prompt(0, (), "", "1", "envs.py:f")})


def test_inline_names_are_graders():
    assert INLINE < GRADERS.keys()


@pytest.mark.parametrize(
    "answer, response",
    [
        (r"\dfrac{11}{16}", r"\boxed{\frac{11}{16}}"),
        (r"\dfrac{11}{16}", "The probability is 11/16."),
        (r"\frac12", r"Half of them, so $\boxed{0.5}$."),
        ("0.5", r"\boxed{\frac12}"),
        (r"\frac{1}{2}", r"\boxed{50\%}"),
        (r"50\%", r"\boxed{0.5}"),
        (r"2\sqrt2", r"\boxed{\sqrt{8}}"),
        ("x^2+2x+1", r"\[ \boxed{(x+1)^2} \]"),
        ("1000", r"\boxed{1{,}000}"),
        ("5", r"\boxed{x = 5}"),
        ("x = 5", r"\boxed{5}"),
        ("5", r"\boxed{5 \text{ cm}}"),
        ("5", "At first \\boxed{4}.\nBut a check of all cases shows that one is missing.\n\\boxed{5}"),
        ("5", r"The final answer is $7$? No: \boxed{5}. (It is not 8.)"),
        ("$5$", r"\boxed{5}"),
        (r"\{1, 2\}", r"\boxed{\{2, 1\}}"),
        ("[0, 1)", r"\boxed{[0,1)}"),
        (r"(-\infty, 2]", r"so $x \in \boxed{(-\infty,2]}$"),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\boxed{\begin{bmatrix}1&2\\3&4\end{bmatrix}}"),
        (r"\text{Yes}", r"\boxed{Yes}"),
        ("Yes", r"\boxed{\text{yes}}"),
        ("C", r"\boxed{\text{C}}"),
        (r"2^{\aleph_0}", r"\boxed{2^{\aleph_0}}"),
        (r"\infty", r"\boxed{\infty}"),
    ],
)
def test_math_equal(answer, response):
    assert math_answer(response, answer, {}) == 1.0


@pytest.mark.parametrize(
    "answer, response",
    [
        (r"\frac12", r"\boxed{0.51}"),
        (r"\frac13", r"\boxed{0.33}"),
        ("5", ""),
        ("5", "I do not know."),
        ("5", r"\boxed{}"),
        ("5", r"\boxed{-5}"),
        ("5", r"It is 5. No, \boxed{6}. Or 5."),
        ("5", r"It is 5, in $\boxed{\mathbb{Z}_b}$."),  # no formula stands in for an unreadable box
        ("5", r"\boxed{1, 2, 3, 4, 5}"),
        ("5", r"\boxed{4} or \boxed{5}"),
        ("5", r"\boxed{\frac{0}{0}}"),
        ("5", r"\boxed{" * 500),
        (r"\{1, 2\}", r"\boxed{\{1, 2, 3\}}"),
        ("[0, 1)", r"\boxed{(0, 1)}"),
        ("[0, 1)", r"\boxed{[0, 1]}"),
        (r"\infty", r"\boxed{-\infty}"),
        (r"\text{Yes}", r"\boxed{No}"),
        (r"2^{\aleph_0}", r"\boxed{2}"),  # what is read from $2^{\aleph_0}$
        ("x^2+2x+1", r"\boxed{(x-1)^2}"),
    ],
)
def test_math_different(answer, response):
    assert math_answer(response, answer, {}) == 0.0


def test_math_without_an_answer_is_an_error():
    with pytest.raises(ValueError, match="reads nothing from the answer ''"):
        math_answer(r"\boxed{5}", "", {})


def test_overlong_penalty_is_equation_13():
    assert [overlong_penalty(n, 100, 20) for n in (0, 80, 85, 90, 100, 120)] == [0, 0, -0.25, -0.5, -1, -1]
    assert overlong_penalty(100, 100, 0) == 0


# ---- users' graders


@pytest.mark.parametrize("source", ["mine/graders.py", "{folder}/mine/graders.py", "mine.graders"])
def test_users_function_from_file_and_module(user, tmp_path, source):
    task = source.format(folder=tmp_path) + ":good"
    assert resolve_grader(task)("a", "a", {"bonus": 1}) == 3
    with RewardPool(CONFIG, [task]) as pool:
        assert grade_one(pool, task, "a", "a", {"bonus": 0.25}).value == 2.25


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, cause",
    [
        ("maths", "take one of match,"),
        ("", "take one of match,"),
        (":good", "take one of match,"),
        ("mine/graders.py", "take one of match,"),
        ("mine/graders.py:", "take one of match,"),
        ("mine/grader.py:good", "there is no file"),
        ("mine.grader:good", "No module named 'mine.grader'"),
        ("mine/graders.py:goods", "define goods(response, answer, row)"),
        ("mine/graders.py:not_callable", "define not_callable(response, answer, row)"),
        ("broken.py:good", "ZeroDivisionError"),
        ("broken:good", "ZeroDivisionError"),
        ("unreadable.py:good", "SyntaxError"),
        ("script.py:good", "SystemExit"),
        ("hangs.py:good", "did not finish within"),
        ("dies.py:good", "died"),
    ],
)
def test_bad_names_are_config_errors(user, name, cause):
    Path("broken.py").write_text("def good(response, answer, row): return 1\n1 / 0")
    Path("unreadable.py").write_text("def good(")
    Path("script.py").write_text("import sys; sys.exit(2)")
    Path("hangs.py").write_text("while True: pass")
    Path("dies.py").write_text("import os; os._exit(0)")
    with pytest.raises(ConfigError) as raised:
        check_grader(name)
        rows = {task: Prompt(0, (), "1 + 1", "2", task) for task in ("match", name)}
        try_graders(RewardConfig(startup_seconds=1.0 if name.startswith("hangs") else 60.0), rows)
    assert name in str(raised.value) and cause in str(raised.value)


# ---- the pool


@pytest.mark.slow
def test_bad_graders_cost_only_their_own_sample(user):
    jobs = [(("bad", name), user + name, "", "") for name in BAD]
    jobs += [(("good", i), user + "good", str(i), str(i // 2 * 2)) for i in range(60)]
    jobs += [(("match", i), "match", str(i), "3") for i in range(5)]
    random.Random(0).shuffle(jobs)
    config = RewardConfig(num_workers=3, timeout_seconds=1.0)
    with RewardPool(config, {job[1] for job in jobs}) as pool:
        for key, task, response, answer in jobs:
            pool.submit(key, task, response, answer, {"bonus": 0.5})
        rewards = dict(pool.drain())
        assert pool.num_pending == 0 and pool.poll() == [] and pool.drain() == []
    assert rewards.keys() == {job[0] for job in jobs}
    for (kind, name), graded in rewards.items():
        if kind == "bad":
            assert graded.value == 0 and BAD[name] in graded.error
            assert f"(task {user}{name}, sample ('bad', '{name}'))" in graded.error
        else:
            wanted = (2.5 if name % 2 == 0 else 0.5) if kind == "good" else float(name == 3)
            assert graded.value == wanted and graded.error == ""
    assert rewards["bad", "hangs"].seconds >= 1


def test_print_and_input_do_not_reach_the_replies(user):
    with RewardPool(CONFIG, [user + "prints"]) as pool:
        assert [grade_one(pool, user + "prints").value for _ in range(3)] == [0.5] * 3


def test_a_worker_that_dies_between_requests_costs_nothing(user):
    tasks = [user + "dies_later", user + "good"]
    with RewardPool(RewardConfig(num_workers=1), tasks) as pool:
        assert wait_until_gone([grade_one(pool, tasks[0]).value])
        graded = grade_one(pool, tasks[1], "a", "b", {"bonus": 3})
    assert graded.value == 3.0 and graded.error == ""


def test_what_no_exception_ends_ends_no_worker(user):
    tasks = [user + "no_exception", user + "mute", user + "pid"]
    with RewardPool(RewardConfig(num_workers=1), tasks) as pool:
        before = grade_one(pool, tasks[2]).value
        assert grade_one(pool, tasks[0]).error.startswith("CancelledError: late")
        assert grade_one(pool, tasks[1]).error.startswith("Mute: ")
        assert grade_one(pool, tasks[2]).value == before


def test_a_machine_that_can_run_no_program_ends_the_run(user):
    """The model would learn from rewards of 0 otherwise, to the end."""
    task = user + "no_room"
    with RewardPool(RewardConfig(num_workers=1, max_failures=3), [task]) as pool:
        for i in range(3):
            pool.submit(i, task, "", "", {})
        with pytest.raises(WorkerError, match="failed 3 times in a row, the last time: SandboxError: no room.*machine"):
            pool.drain()


def test_large_responses_and_rows(user):
    task = user + "size"
    texts = ['\u00e9\n"\ud800\0' * 20_000 + "x" * i for i in range(8)]  # far more than a pipe holds
    with RewardPool(RewardConfig(num_workers=2, timeout_seconds=10.0), [task, "match"]) as pool:
        for i, text in enumerate(texts):
            pool.submit(i, task, text, text, {"prompt": text})
        pool.submit("match", "match", texts[3], texts[3], {})
        rewards = dict(pool.drain())
    assert rewards.pop("match").value == 1.0
    assert [rewards[i].value for i in range(8)] == [len(text) for text in texts]


def test_math_outside_the_main_thread(user):
    """Only a main thread can have an alarm, which other graders and math-verify by default set."""
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(math_answer, r"\boxed{\frac12}", "0.5", {}).result() == 1.0
        with RewardPool(RewardConfig(num_workers=1, timeout_seconds=10.0), [user + "alarm"]) as pool:
            graded = thread.submit(grade_one, pool, user + "alarm").result()
    assert graded.value == 0 and "TimeoutError: alarm" in graded.error


def test_poll_does_not_wait(user):
    config = RewardConfig(num_workers=1, timeout_seconds=60.0)
    with RewardPool(config, [user + "at_the_gate", user + "good"]) as pool:
        pool.submit("waits", user + "at_the_gate", "", "", {})
        pool.submit("queued", user + "good", "", "", {"bonus": 0})
        assert pool.poll() == [] and pool.num_pending == 2  # a call that waits returns the time-out
        assert wait_for(Path("begun").exists)
    assert pool._results.empty()  # closing has not waited for the worker either
    assert pool.num_pending == 0 and pool.drain() == []


@pytest.mark.slow
def test_math_in_workers(user):
    with RewardPool(RewardConfig(num_workers=1), ["math", user + "has_math"]) as pool:
        assert grade_one(pool, user + "has_math").value == 1  # no sample pays for the import
        for i in range(20):
            pool.submit(i, "math", rf"So it is \boxed{{\frac{{{i}}}{{2}}}}.", str(i / 2 if i % 2 else 77), {})
        pool.submit("tower", "math", r"\boxed{9^{9^{9^{9^9}}}}", "5", {})
        rewards = dict(pool.drain())
    assert {i: rewards[i].value for i in range(20)} == {i: float(i % 2) for i in range(20)}
    assert rewards["tower"].value == 0 and "did not finish within 2 s" in rewards["tower"].error


@pytest.mark.slow
def test_workers_do_not_load_the_trainer(user):
    with RewardPool(CONFIG, [user + "loads_trainer", "math"]) as pool:
        assert grade_one(pool, user + "loads_trainer").value == 0.0


@pytest.mark.slow
@pytest.mark.parametrize(
    "trouble, limit, cause",
    [
        ("if sys.argv[0].endswith('worker.py'): raise ImportError('only here')", 60.0, "ImportError: only here"),
        ("if sys.argv[0].endswith('worker.py'): os._exit(5)", 60.0, "died (exit code 5)"),
        ("while sys.argv[0].endswith('worker.py'): pass", 0.3, "did not finish within 0.3 s"),
    ],
)
def test_workers_that_cannot_start_end_the_run(user, trouble, limit, cause):
    Path("moody.py").write_text(f"import os, sys\ndef good(*_): return 1\n{trouble}\n")
    with RewardPool(RewardConfig(startup_seconds=limit), ["moody.py:good", "match"]) as pool:
        pool.submit(0, "moody.py:good", "", "", {})
        for _ in range(2):  # the second call does not wait for ever either
            with pytest.raises(RuntimeError, match="moody.py:good failed to start 3 times") as raised:
                pool.drain()
            assert cause in str(raised.value)


def test_close_leaves_no_process(user):
    tasks = [user + name for name in ("pid", *CHILDREN, "hangs")]
    with RewardPool(RewardConfig(num_workers=1, timeout_seconds=30.0), tasks) as pool:
        pids = [grade_one(pool, task).value for task in tasks[:-1]]
        pool.submit("hang", tasks[-1], "", "", {})
        time.sleep(0.2)
        assert all(map(is_running, pids))
    assert wait_until_gone(pids)


@pytest.mark.parametrize("how", ["exits", "killed", "hangs"])
@pytest.mark.slow
def test_a_worker_that_fails_leaves_no_process(user, how):
    with RewardPool(RewardConfig(num_workers=1, timeout_seconds=1.0), [user + n for n in (*CHILDREN, how)]) as pool:
        pids = [grade_one(pool, user + name).value for name in CHILDREN]
        assert all(map(is_running, pids)) and BAD[how] in grade_one(pool, user + how).error
        assert wait_until_gone(pids)


@pytest.mark.slow
@pytest.mark.parametrize("state", ["idle", "busy"])
def test_workers_and_their_children_die_with_a_killed_parent(user, state):
    script = f"""
import time
from reward import RewardConfig
from rewards.pool import RewardPool
config = RewardConfig(num_workers=1, timeout_seconds=60.0)
tasks = [{user!r} + name for name in {("pid", *CHILDREN)!r}]
pool = RewardPool(config, [*tasks, {user!r} + "hangs"])
for task in tasks:
    pool.submit(task, task, "", "", {{}})
pids = [reward.value for _, reward in pool.drain()]
if {state!r} == "busy":
    pool.submit("hang", {user!r} + "hangs", "", "", {{}})
    time.sleep(0.2)
print(*pids, flush=True)
time.sleep(60)
"""
    env = os.environ | {"PYTHONPATH": str(Path(reward.__file__).parent)}
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=env)
    try:
        pids = list(map(float, parent.stdout.readline().split()))
        assert len(pids) == 5 and all(map(is_running, pids))
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    assert wait_until_gone(pids)


def test_a_worker_whose_parent_is_gone_ends_without_a_word():
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, WORKER, "--worker"]
    # In a group of its own, which it kills when it ends.
    options = dict(stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)
    done = subprocess.run(command, stdout=write, timeout=60, **options)
    os.close(write)
    assert done.stderr == b""


def test_a_reward_of_a_users_own_making_is_no_way_around_the_checks(user):
    with RewardPool(RewardConfig(num_workers=1, timeout_seconds=30.0), [user + "own"]) as pool:
        for response in ("nan", "inf", "None", "text", "10000", "1e+39", "numpy", "1j", "Reward", "error"):
            reward = grade_one(pool, user + "own", response)
            said = {"text": "'1'", "numpy": "inf", "error": "nan"}.get(response, response)
            assert reward.value == 0 and "the grader returned" in reward.error and said in reward.error
        assert grade_one(pool, user + "own", "right").value == 0.5
        assert grade_one(pool, user + "own", "cases").value == 1
        assert grade_one(pool, user + "own", "why").error.startswith("why (task")


# ---- waiting for some, forgetting others


def test_wait_returns_when_the_wanted_are_graded(user):
    with RewardPool(
        RewardConfig(num_workers=1, timeout_seconds=30.0), [user + "good", user + "hangs", "match"]
    ) as pool:
        pool.submit("inline", "match", "a", "a", {})
        for key, task in (("wanted", "good"), ("hang", "hangs"), ("behind it", "good")):
            pool.submit(key, user + task, "x", "x", {"bonus": 0})
        assert dict(pool.wait(iter(["wanted", "graded before"]))).keys() == {"inline", "wanted"}
        assert pool.num_pending == 2


@pytest.mark.slow
def test_what_is_forgotten_is_not_handed_back_and_its_name_is_free(user):
    with RewardPool(RewardConfig(num_workers=1, timeout_seconds=1.0), [user + "good", user + "hangs"]) as pool:
        pool.submit("hang", user + "hangs", "", "", {})
        for bonus in range(2000):
            pool.submit(bonus % 7, user + "good", "x", "x", {"bonus": bonus})
        pool.forget(keep=[])
        assert pool.num_pending == 0 and pool.drain() == []
        pool.submit("kept", user + "good", "x", "y", {"bonus": 3})
        pool.submit("hang", user + "hangs", "", "", {})
        pool.submit(1, user + "good", "x", "y", {"bonus": 4})
        pool.forget(keep=iter(["kept", 1]))
        assert {key: graded.value for key, graded in pool.drain()} == {"kept": 3.0, 1: 4.0}


def test_what_is_forgotten_is_not_graded_any_more(user):
    task = user + "at_the_gate"
    with RewardPool(RewardConfig(num_workers=1, timeout_seconds=60.0), [task]) as pool:
        for key in "abcdef":
            pool.submit(key, task, key, "", {})
        assert wait_for(Path("begun").exists)
        pool.forget(keep=["f"])
        Path("gate").touch()
        assert [key for key, _ in pool.drain()] == ["f"] and Path("begun").read_text() == "af"


# ---- what ends a run, what it records, and limits of a grader


@pytest.mark.parametrize("trouble", ["hang", *map(thorough, ("exit", "garbage", "swell"))])
@pytest.mark.slow
def test_failures_in_a_row_on_one_grader_end_the_run(user, trouble):
    limits = dict(num_workers=1, timeout_seconds=0.5 if trouble == "hang" else 5.0, worker_gib=0.25)
    moody, other = user + "moody", user + "good"
    with RewardPool(RewardConfig(max_failures=2, **limits), [moody, other]) as pool:
        for key, word in enumerate([trouble, "fine", trouble]):  # "fine" breaks the row
            pool.submit(key, moody, word, "", {})
        rewards = dict(pool.drain())
        assert [rewards[key].value for key in range(3)] == [0, 1, 0]
        assert [bool(rewards[key].error) for key in range(3)] == [True, False, True]
        pool.submit(3, other, "a", "a", {"bonus": 0})  # another grader does not
        pool.submit(4, moody, trouble, "", {})
        for _ in range(2):
            with pytest.raises(WorkerError, match="moody failed 2 times in a row, the last time: the worker"):
                pool.drain()


@pytest.mark.slow
def test_failures_may_be_allowed_for_ever(user):
    with RewardPool(RewardConfig(num_workers=2, max_failures=0), [user + "exits"]) as pool:
        for key in range(5):
            pool.submit(key, user + "exits", "", "", {})
        assert len(pool.drain()) == 5


@pytest.mark.slow
def test_a_worker_that_leaks_is_replaced_and_its_rewards_count(user):
    task = user + "leaks"
    with RewardPool(RewardConfig(num_workers=1, timeout_seconds=10.0, worker_gib=0.2), [task]) as pool:
        pids = [grade_one(pool, task).value for _ in range(6)]
    assert 1 < len(set(pids)) < 6


@pytest.mark.slow
def test_async_graders(user):
    with RewardPool(CONFIG, [user + name for name in ("waits", "waits_in_vain")]) as pool:
        assert grade_one(pool, user + "waits", "abc").value == 3
        assert "did not finish within 1 s" in grade_one(pool, user + "waits_in_vain").error


@pytest.mark.slow
def test_a_grader_keeps_to_its_concurrency(user):
    task, free = user + "alone", user + "in_pairs"
    config = RewardConfig(num_workers=4, timeout_seconds=60.0, concurrency=f"{task}=1")
    with RewardPool(config, [task, free]) as pool:
        for key in range(6):
            pool.submit(("one", key), task, "", "", {})
            pool.submit(("free", key), free, str(key), "", {})
        assert [reward.value for _, reward in pool.drain()] == [1.0] * 12


def test_a_full_queue_makes_submit_wait_and_loses_nothing(user):
    config = RewardConfig(num_workers=1, max_queue=2)
    with RewardPool(config, [user + "good"]) as pool:
        for i in range(50):
            pool.submit(i, user + "good", "a", "b", {"bonus": i})
        assert {key: reward.value for key, reward in pool.drain()} == {i: i for i in range(50)}
        assert pool.take_stats().queue_max <= 2


def test_a_full_queue_without_workers_does_not_wait_for_ever(user):
    Path("moody.py").write_text(
        "import os, sys\ndef good(*_): return 1\nif sys.argv[0].endswith('worker.py'): os._exit(5)"
    )
    with RewardPool(RewardConfig(max_queue=1), ["moody.py:good"]) as pool:
        for i in range(9):
            pool.submit(i, "moody.py:good", "", "", {})
        with pytest.raises(WorkerError, match="failed to start"):
            pool.drain()


def test_statistics(user):
    with RewardPool(RewardConfig(num_workers=1), [user + "good", user + "exits", user + "raises", "match"]) as pool:
        for name in ("good", "exits", "raises", "raises"):
            pool.submit(name, user + name, "a", "a", {"bonus": 0})
        pool.submit("m", "match", "", "", {})
        pool.drain()
        stats, empty = pool.take_stats(), pool.take_stats()
    assert stats.graded == 5 and stats.replaced == 1 and 1 <= stats.queue_max <= 4
    assert stats.causes == {"the worker died (exit code 3)": 1, "KeyError": 2}
    assert 0 < stats.seconds and 0 < stats.latency_max < stats.latency
    assert empty.graded == 0 and empty.queue_max == 0 and not empty.causes


# ---- programs

DOUBLE = '[{"stdin": "2", "stdout": "4"}, {"stdin": "5", "stdout": "10"}]'


@pytest.fixture(scope="module")
def code_pool():
    with RewardPool(RewardConfig(num_workers=1), ["code"]) as pool:
        yield pool


@pytest.mark.parametrize(
    "response, answer, row, value, num_cases",
    [
        ("print(2 * int(input()))", DOUBLE, {}, 1.0, 2),
        ("Here:\n```python\nprint(0)\n```\nno,\n```\nprint(2 * int(input()))\n```\nso.", DOUBLE, {}, 1.0, 2),
        ("print(4)", DOUBLE, {}, 0.0, 2),
        ("print(5)", DOUBLE, {}, 0.0, 1),
        ("x + x", DOUBLE, {"template": "x = int(input())\nprint({program})"}, 1.0, 2),
        ("def f(x): return 2 * x", '[{"test": "assert f(2) == 4"}]', {}, 1.0, 1),
        ("class f(int): __eq__ = lambda *_: True", '[{"test": "assert f(2) == 4"}]', {}, 0.0, 1),
    ],
)
def test_programs_are_graded_by_running_them(code_pool, response, answer, row, value, num_cases):
    code_pool.timeouts.load_state_dict({})
    code_pool.take_stats()
    graded = grade_one(code_pool, "code", response, answer, row)
    assert (graded.value, graded.error, len(graded.cases)) == (value, "", num_cases)
    assert len(code_pool.timeouts.anchors) == (num_cases if value else 0)
    assert code_pool.take_stats().cases.cases == num_cases


@pytest.mark.parametrize("answer", ["", "4", "[]", "{}", '["a"]', '[{"stdin": "a"}]'])
def test_an_answer_that_is_no_list_of_cases_is_an_error(code_pool, answer):
    assert "Error" in grade_one(code_pool, "code", "", answer).error
    prompt = Prompt(0, (1,), "", answer, "code", {}, "data.jsonl:7")
    with pytest.raises(ConfigError, match="data.jsonl:7"):
        check_rewards(RewardConfig(), [prompt])


@pytest.mark.slow
def test_time_limits_adapt_and_a_program_that_hangs_costs_no_worker():
    answer = '[{"stdin": "", "stdout": "1"}]'
    config = RewardConfig(num_workers=1, case_min_seconds=0.5, case_max_seconds=20.0, case_audit=0.0)
    with RewardPool(config, ["code"]) as pool:
        for program, slowest in (("print(1)", None), ("while True: pass", "known")):
            graded = grade_one(pool, "code", program, answer)
            [(seconds, passed, timed_out)], stats = graded.cases, pool.take_stats()
            assert graded.error == "" and passed == (program == "print(1)") and graded.value == passed
            [limit] = [max(0.5, 1.5 * anchor) for anchor in pool.timeouts.anchors.values()] if slowest else [20.0]
            assert stats.cases.limit_seconds == pytest.approx(limit) and stats.replaced == 0
            assert timed_out != passed and (passed or seconds >= limit)


@pytest.mark.slow
def test_a_program_that_waits_gets_the_limit_of_the_time_when_it_runs():
    answer = '[{"stdin": "", "stdout": "1"}]'
    config = RewardConfig(num_workers=1, case_min_seconds=0.5, case_max_seconds=2.0, case_audit=0.0)
    with RewardPool(config, ["code"]) as pool:
        for key, text, prompt in (
            ("good", "print(1)", "a"),
            ("between", "while 1: pass", "b"),
            ("hangs", "while 1: pass", "a"),
        ):
            pool.submit(key, "code", text, answer, {"prompt": prompt})
        [(_, good)] = pool.wait(["good"])
        assert good.value == 1 and len(pool.drain()) == 2
        assert pool.take_stats().cases.limit_seconds < 3 * 2.0


@pytest.mark.slow
def test_hostile_programs_through_the_pool():
    """All at once on two workers, with good programs among them: only those score, and no worker is lost."""
    case = json.dumps([{"stdin": hostile.STDIN, "stdout": hostile.EXPECTED}])
    config = RewardConfig(num_workers=2, case_max_seconds=2.0)
    with RewardPool(config, ["code"]) as pool:
        for name, text in HOSTILE:
            pool.submit(name, "code", text, case, {"prompt": name})
            pool.submit(("good", name), "code", hostile.GOOD, case, {})
        rewards = dict(pool.drain())
        stats = pool.take_stats()
    assert {name for name, reward in rewards.items() if reward.value} == {("good", name) for name, _ in HOSTILE}
    assert not any(reward.error for reward in rewards.values()) and stats.replaced == 0


@pytest.mark.slow
def test_boxes_die_with_a_killed_pool(user, tmp_path):
    """SIGKILL of the trainer ends the program that a worker runs, and removes its folder."""
    (tmp_path / "boxes").mkdir()
    (tmp_path / "boxes").chmod(0o777)
    script = """
import time
from reward import RewardConfig
from rewards.pool import RewardPool
pool = RewardPool(RewardConfig(num_workers=1), ["code"])
case = '[{"stdin": "", "stdout": ""}]'
pool.submit(0, "code", "", case, {})
print(pool.drain()[0][1].value, flush=True)  # the search for an isolation is over
pool.submit(1, "code", "import os, time; os.fork(); time.sleep(1000)", case, {})
time.sleep(1000)
"""
    root = str(Path(reward.__file__).parent)
    env = os.environ | {"PYTHONPATH": root, "TMPDIR": str(tmp_path / "boxes")}
    parent = subprocess.Popen([sys.executable, "-c", script], env=env, stdout=subprocess.PIPE)
    try:
        assert parent.stdout.readline() == b"1.0\n"
        # A worker, a keeper and two programs.
        assert wait_for(lambda: len(leftovers.descendants(parent.pid)) >= 4)
        everyone = list(leftovers.descendants(parent.pid))
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    assert wait_until_gone(everyone)
    assert wait_for(lambda: not list((tmp_path / "boxes").iterdir()))


@pytest.mark.parametrize(
    "config, cause",
    [
        (RewardConfig(case_min_seconds=31.0), "case_min_seconds = 31 is over"),
        (RewardConfig(weights="code"), "cannot read 'code'"),
        (RewardConfig(weights="code=1,math=2"), "names 'math'; the graders here are code"),
        (RewardConfig(weights="code=-1"), "code = -1 must be at least 0"),
        (RewardConfig(weights="code=nan"), "cannot read"),
        (RewardConfig(weights="code=1e300"), "code = 1e\\+300 must be at most"),
        (RewardConfig(concurrency="code=0"), "code = 0 must be at least 1"),
        (RewardConfig(also="match=1", weights="match=1"), "names 'match'; the graders here are code"),
        (RewardConfig(also="matsch=1"), "'matsch' is not built in"),
        (RewardConfig(also="match=1e30"), "must be at most"),
        (RewardConfig(also="math=1"), "the answer is empty"),
    ],
)
def test_reward_settings_that_do_not_fit(config, cause):
    prompt = Prompt(0, (1,), "", '[{"test": ""}]', "code")
    blank = Prompt(0, (1,), "", " ", "match")
    with pytest.raises(ConfigError, match=cause):
        check_rewards(config, [blank if "math=" in config.also else prompt])
    check_rewards(RewardConfig(also="match=-1", concurrency="match=2"), [prompt])
    check_rewards(RewardConfig(weights="code=0.5", concurrency="code=2"), [prompt])


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("kind", ["float16", "float32", "float64", "longdouble"])
def test_no_kind_of_number_brings_in_what_is_not_finite_or_beyond_the_largest(kind):
    kind = getattr(np, kind)
    assert reward.reward_number(kind(0.5)) == 0.5 and type(reward.reward_number(kind(0.5))) is float
    for value in (math.inf, -math.inf, math.nan, 1e10):  # float16 makes an infinity of the last
        assert reward.reward_number(kind(value)) is None
    assert reward.reward_number(10**400) is None and reward.reward_number(Fraction(10**400)) is None


def test_the_sum_of_several_graders_is_checked_as_each_of_them_is():
    rewards = {"a": Reward(1e9, 1.0), "b": Reward(1.0, 2.0)}
    assert reward.add_up(rewards, {"a": 0.5, "b": 2.0}).value == 5e8 + 2
    for weight in (1e9, -1e9):
        whole = reward.add_up(rewards, {"a": weight, "b": 1.0})
        assert whole.value == 0 and "not a finite number of at most 1e+09" in whole.error and whole.seconds == 3.0


@pytest.mark.parametrize("host", ["a", "a.b-c.d", "my_host:80", "127.0.0.1:8000", "[::1]:8000", "bücher.de"])
def test_addresses_of_services(host):
    check_grader(f"http://{host}/score?a=1")


@pytest.mark.parametrize(
    "host",
    ["", "a\x01b", "a\x00b", "a\x7fb", "a b", "a\tb", 'a"b', "a<b", "a%62", "a\\b", "a,b", "a:x", "u:p@a", "[::1"],
)
def test_hosts_that_are_none(host):
    with pytest.raises(ConfigError, match="is not a valid address"):
        check_grader(f"http://{host}/score")


def test_a_grader_may_return_parts_by_name():
    def graded(result):
        return graders.grade(lambda *_: result, "", "", {})

    both = graded({"right": 1, "style": 0.25})
    assert (both.value, both.parts, both.error) == (1.25, {"right": 1.0, "style": 0.25}, "")
    assert graded(0.5).parts == {}
    for bad in ({}, {"a": None}, {"a": float("nan")}, {"a": 1, "b": "1"}, {"a": {"b": 1}}):
        assert graded(bad).value == 0 and "not a finite number" in graded(bad).error
