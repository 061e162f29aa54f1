"""The pool of episodes: users' environments in worker processes, and what a bad one costs: its own episode."""

import math
import os
import signal
import sys
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from random import Random

import hostile
import pytest
from conftest import thorough
from groups import until

import envs.pool as pools
from environments import EnvConfig, Episode, Played, resolve
from envs.games import ENVIRONMENTS
from envs.latency import Latency
from envs.pool import EnvPool
from process.workers import Worker, WorkerError
from reward import RewardConfig
from rewards import user_files

pytestmark = pytest.mark.slow  # processes and whole runs

USER = """
import json, os, signal, sys, time
from random import Random
from environments import Reply
from envs.adapters import run_program, tools
from rewards.graders import exact_match
from rewards.sandbox import Limits
from near import WORD

def fine(row, seed):
    import near
    rng, text, reward = Random(seed), near.WORD, 0.0
    for _ in range(row["turns"]):
        action = yield Reply(text, reward)
        text, reward = f"{action}{rng.randrange(10)}", len(action) / 10
    return 1.0

def pid(row, seed):
    while True: yield str(os.getpid())

def bad(row, seed):
    "Do what the first turn says."
    given = {"text": "fine"}
    exec((yield ""), globals(), given)
    yield given["text"]

def once(row, seed):
    "Die at the second turn, but only once."
    yield "a"
    yield "b"
    if not os.path.exists("died"):
        open("died", "w").close()
        os._exit(1)
    yield "c"

def tidy(row, seed):
    open(f"begun{seed}", "w").close()
    try:
        yield ""
    finally:
        with open(f"closed{seed}", "a") as file: file.write(".")

def clings(row, seed):
    try:
        yield ""
    finally:
        while True: time.sleep(1)

def hangs(row, seed):
    with open("tries", "a") as file: file.write(".")
    while True: time.sleep(1)
    yield ""

def stuck(row, seed):
    while True: time.sleep(1)
    yield ""

def python(program):
    "Run it."
    return run_program(program, limits=Limits(seconds=2.0, output_bytes=1000))

coder = tools(python, answer=exact_match)
"""
# What a turn does -> the error. The worker dies of all but the first two.
HARM = {
    "raise KeyError('field')": "turn 1: KeyError: 'field' (",
    "text = 5": "turn 1: TypeError: the environment yields 5, which is not text",
    "raise KeyboardInterrupt": "died (exit code",
    "raise BaseException": "died (exit code 1)",
    "os._exit(3)": "died (exit code 3)",
    "import ctypes; ctypes.string_at(0)": "died (exit code -11)",
    "os.kill(os.getppid(), signal.SIGKILL); time.sleep(60)": "died (exit code -9)",
    "os.kill(os.getpid(), signal.SIGSTOP)": "did not finish within 0.5 s",
    "time.sleep(60)": "did not finish within 0.5 s",
    "x = bytearray(2**29)\nfor i in range(0, len(x), 4096): x[i] = 1\ntime.sleep(60)": "took over 0.25 GiB of memory",
    "json.dumps = lambda *_: '[]'": "instead of a reply",
    "os.closerange(3, 10)": "died (exit code",
    """
for fd in range(3, 10):
    try: os.write(fd, b"[0, 1.0]\\n")
    except OSError: pass
time.sleep(60)""": "instead of a reply",
}
# What a turn does -> the text.
HARMLESS = {
    "text = str('torch' in sys.modules)": "False",
    "text = 'x' * 10**6": "x" * 10**6,
    "print('[1, 2]\\n' * 10000)": "fine",
    "if not os.fork(): time.sleep(1000)": "fine",
    "time.monotonic = time.perf_counter = time.time = lambda: 0": "fine",
    "row = 5; globals().clear()": "fine",
    "os.remove('mine/games.py')": "fine",
}
LIMITS = RewardConfig()
RAISES = "raise KeyError('field')"


@pytest.fixture
def mine(tmp_path, monkeypatch) -> Iterator[str]:
    """Write the user's environments into a folder of the working directory; give their prefix."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "games.py").write_text(USER)
    (tmp_path / "mine" / "near.py").write_text("WORD = 'begin'")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    yield "mine/games.py:"
    user_files.enter("")


Act = Callable[[Hashable, Played], str]


def play(pool: EnvPool, act: Act, ended: dict | None = None) -> dict[Hashable, tuple[Played, str]]:
    """Answer texts by `act` until no episode is left; return what they came to, with their errors."""
    ended = {} if ended is None else ended
    while pool.num_pending:
        for id, played, error in pool.wait():
            if played.end or error:
                ended[id] = played, error
            else:
                pool.act(id, act(id, played))
    return ended


def test_episodes_in_workers_are_those_of_this_process(mine) -> None:
    def act(id: Hashable, played: Played) -> str:
        rng = Random(f"{id} {len(played.texts)}")
        return f"{rng.randrange(100):02d}"

    rows: dict[Hashable, tuple[str, dict]] = {i: (mine + "fine", {"turns": i % 4 + 1}) for i in range(8)}
    rows |= {i: ("guess", {"answer": "50"}) for i in range(8, 12)}
    with EnvPool(EnvConfig(), LIMITS, ["guess", mine + "fine"]) as pool:
        for i, (name, row) in rows.items():
            pool.begin(i, name, row, seed=i)
        ended = play(pool, act)
        assert ended.keys() == rows.keys() and not pool.poll() and not pool.wait()
    for i, (name, row) in rows.items():
        alone = Episode(resolve(name), row, i, EnvConfig.max_turns)
        while not alone.end:
            alone.act(act(i, alone))
        played, error = ended[i]
        assert not error and vars(played).items() <= vars(alone).items() and played.end == "stop"


@pytest.mark.parametrize("action, said", [(thorough(*harm), harm)[i % 3 == 0] for i, harm in enumerate(HARM.items())])
@pytest.mark.slow
def test_a_bad_environment_costs_its_own_episode(mine, action: str, said: str) -> None:
    """One worker, so that the others are replayed in the next process."""
    config = EnvConfig(num_workers=1, step_seconds=0.5 if "0.5 s" in said else 30.0)
    with EnvPool(config, replace(LIMITS, worker_gib=0.25), [mine + "fine", mine + "bad"]) as pool:
        for i in range(2):
            pool.begin(i, mine + "fine", {"turns": 3}, seed=i)
        pool.begin("bad", mine + "bad", {}, seed=0)
        ended = play(pool, lambda id, played: action if id == "bad" else "ok")
    assert said in ended["bad"][1] and ended["bad"][0].end == ""
    for i in range(2):
        played, error = ended[i]
        assert not error and played.end == "stop" and played.rewards == [0.2, 0.2, 1.0]


def test_an_environment_that_forks_and_answers_twice_costs_nobody_else_an_episode(mine) -> None:
    with EnvPool(EnvConfig(num_workers=1), LIMITS, [mine + "fine", mine + "bad"]) as pool:
        pool.begin("bad", mine + "bad", {}, seed=0)
        for i in range(2):
            pool.begin(i, mine + "fine", {"turns": 3}, seed=i)
        ended = play(pool, lambda id, played: "os.fork()" if id == "bad" else "ok")
    assert [ended[i][0].rewards for i in range(2)] == [[0.2, 0.2, 1.0]] * 2 and not ended[0][1] + ended[1][1]


def test_an_environment_too_large_for_its_worker_is_told_so(mine, monkeypatch) -> None:
    """Each reply is good, and then the worker is too large."""
    monkeypatch.setattr(Worker, "_is_too_large", lambda self: sys._getframe(1).f_code.co_name == "ask")
    with EnvPool(EnvConfig(num_workers=1), LIMITS, [mine + "fine"]) as pool:
        pool.begin(0, mine + "fine", {"turns": 3}, seed=0)
        [(played, error)] = play(pool, lambda id, played: "ok").values()
    assert played.texts == ["begin"] and "takes more memory than reward.worker_gib" in error


def test_an_environment_that_never_begins_fails_in_time(mine) -> None:
    with EnvPool(EnvConfig(num_workers=1, step_seconds=0.1), LIMITS, [mine + "stuck"]) as pool:
        pool.begin(0, mine + "stuck", {}, seed=0)
        [(_, _, error)] = pool.wait()
    assert "did not finish within 0.1 s" in error


@pytest.mark.parametrize("action, text", HARMLESS.items())
def test_what_does_no_harm_does_none(mine, action: str, text: str) -> None:
    with EnvPool(EnvConfig(num_workers=1), LIMITS, [mine + "bad"]) as pool:
        for i in range(2):
            pool.begin(i, mine + "bad", {}, seed=0)
        ended = play(pool, lambda id, played: "" if id or len(played.texts) > 1 else action)
    for (played, error), last in zip((ended[0], ended[1]), (text, "fine"), strict=True):
        assert not error and played.texts[:2] == ["", last]


def test_what_is_written_after_an_answer_is_not_taken_for_the_next(mine) -> None:
    late = """
import threading
def write():
    for fd in range(3, 10):
        try: os.write(fd, b'[3, "", 1.0, "stop", ""]\\n')  # as an answer to the third request
        except OSError: pass
    open("late", "w").close()
threading.Timer(0.05, write).start()"""
    with EnvPool(EnvConfig(num_workers=1), LIMITS, [mine + "bad", mine + "fine"]) as pool:
        pool.begin("late", mine + "bad", {}, seed=0)
        for text in ("", "fine"):
            [(_, played, error)] = pool.wait()
            assert played.texts[-1] == text and not error
            if not text:
                pool.act("late", late)
        while not os.path.exists("late"):
            time.sleep(0.01)
        pool.begin("next", mine + "fine", {"turns": 3}, seed=0)
        played, error = play(pool, lambda id, played: "ok")["next"]
    assert not error and played.rewards == [0.2, 0.2, 1.0]


def test_an_environment_that_does_not_close_costs_nobody_an_episode(mine) -> None:
    with EnvPool(EnvConfig(num_workers=1, step_seconds=0.5), LIMITS, [mine + "clings", mine + "fine"]) as pool:
        pool.begin("clings", mine + "clings", {}, seed=0)
        pool.begin("fine", mine + "fine", {"turns": 2}, seed=0)
        assert {id for _ in range(2) for id, _, _ in pool.wait()} == {"clings", "fine"}
        pool.forget(["clings"])
        pool.act("fine", "ok")
        assert play(pool, lambda id, played: "ok")["fine"][0].end == "stop"


@pytest.mark.slow
def test_programs_of_a_model_harm_nobody(mine, tmp_path) -> None:
    """They run in the sandbox, below a worker: each turn attacks, and the worker goes on."""
    (tmp_path / "secret.txt").write_text("ANSWER 42")
    names = ("fork bomb", "memory bomb", "output of a gigabyte", "reads outside files", "writes outside files")
    names += ("deletes outside files", "reads the environment", "signals to its parents", "daemon")
    attacks = [hostile.PROGRAMS[name].replace("FOLDER", str(tmp_path)).replace("MARK", "mark") for name in names]
    turns = [f"<python>{program}</python>" for program in (*attacks, "input()", "pass", "print(6 * 7)")]
    with EnvPool(EnvConfig(step_seconds=60.0), LIMITS, [mine + "coder", mine + "pid"]) as pool:
        pool.begin("pid", mine + "pid", {}, seed=0)
        [(_, before, _)] = pool.wait()
        pool.begin("none", mine + "pid", {}, seed=0)  # on the other worker, so that the next is where the first is
        pool.wait()
        pool.begin("coder", mine + "coder", {"answer": "42"}, seed=0)
        played, error = play(pool, lambda id, played: [*turns, "42"][len(played.actions)])["coder"]
        pool.act("pid", "")
        [(_, after, _)] = pool.wait()
        assert len({*after.texts}) == 1, "its worker lives"
    assert not error and (played.end, played.reward) == ("stop", 1.0) and len(played.texts) == len(turns) + 1
    *attacked, refused, silent, right = played.texts[1:]
    assert all(len(text) < 1200 and "ANSWER" not in text for text in attacked), attacked
    assert refused.startswith("exit code 1: EOFError") and (silent, right) == ("(no output)", "42")
    assert {path.name for path in tmp_path.iterdir()} == {"mine", "secret.txt"}


def test_a_worker_that_is_killed_loses_no_episode(mine) -> None:
    config = EnvConfig(num_workers=1, max_turns=4)
    with EnvPool(config, LIMITS, [mine + "pid", mine + "fine"]) as pool:
        pool.begin("fine", mine + "fine", {"turns": 4}, seed=3)
        pool.begin("pid", mine + "pid", {}, seed=0)
        first = {id: played.texts[0] for _ in range(2) for id, played, _ in pool.wait()}
        os.kill(int(first["pid"]), signal.SIGKILL)
        pool.act("fine", "x")
        assert not play(pool, lambda id, played: "x")["fine"][1]


def test_a_turn_is_tried_again(mine) -> None:
    with EnvPool(EnvConfig(num_workers=1), LIMITS, [mine + "once"]) as pool:
        pool.begin(0, mine + "once", {}, seed=0)
        [(played, error)] = play(pool, lambda id, played: "x").values()
    assert (played.texts, played.end, error) == (["a", "b", "c"], "stop", "") and os.path.exists("died")


def test_what_an_environment_prints_goes_to_a_log(mine, capfd) -> None:
    action = "print('said'); os.write(1, b'one\\n'); os.write(2, b'two\\n'); os.system('echo three')"
    with EnvPool(EnvConfig(num_workers=1), LIMITS, [mine + "bad"], log=Path("prints.log")) as pool:
        pool.begin(0, mine + "bad", {}, seed=0)
        [(played, error)] = play(pool, lambda id, played: action if len(played.texts) == 1 else "").values()
    assert not error and played.texts == ["", "fine"] and capfd.readouterr() == ("", "")
    assert Path("prints.log").read_text() == "said\none\ntwo\nthree\n"


@pytest.mark.parametrize(
    ("config", "action", "is_late"),
    [
        (dict(step_seconds=0.3), "time.sleep(60)", True),
        (dict(), RAISES, False),
        (dict(), "os._exit(1)", False),
    ],
)
def test_more_time_is_advised_only_where_time_was_over(mine, config: dict, action: str, is_late: bool) -> None:
    with EnvPool(EnvConfig(num_workers=1, max_failures=1, **config), LIMITS, [mine + "bad"]) as pool:
        pool.begin(0, mine + "bad", {}, seed=0)
        with pytest.raises(WorkerError, match="in 1 episodes in a row") as raised:
            play(pool, lambda id, played: action)
    assert ("or raise env.step_seconds" in str(raised.value)) == is_late
    assert "env.max_failures" in str(raised.value)


def test_drawn_seconds_end_no_run_unless_no_episode_can_end(monkeypatch) -> None:
    config = EnvConfig(max_failures=2, step_seconds=0.01, latency="normal(1,0)")
    for patience, ends in ((50, False), (0, True)):
        monkeypatch.setattr(pools, "PATIENCE", patience)
        with EnvPool(config, LIMITS, ["guess"]) as pool:
            for i in range(5):
                pool.begin(i, "guess", {"answer": "50"}, seed=0)
            with pytest.raises(WorkerError, match="or raise env.step_seconds") if ends else nullcontext():
                failed = play(pool, lambda id, played: "50")
                assert all("env.latency is over" in error for _, error in failed.values()) and len(failed) == 5


def test_failures_are_in_a_row_only_if_no_sound_episode_is_between(mine) -> None:
    with EnvPool(EnvConfig(num_workers=1, max_failures=2), LIMITS, [mine + "bad"]) as pool:
        for i, action in enumerate((RAISES, "", RAISES)):
            pool.begin(i, mine + "bad", {}, seed=0)
            assert pool.wait()
            if action:
                pool.act(i, action)
                assert pool.wait()
            else:  # it is cut for want of room
                pool.forget([i], are_sound=True)


def test_an_environment_that_keeps_failing_ends_the_run(mine) -> None:
    with EnvPool(EnvConfig(num_workers=1, max_failures=2), LIMITS, [mine + "bad", "guess"]) as pool:
        ended: dict = {}
        actions = iter([RAISES, "", "", RAISES])
        for i in range(3):
            pool.begin(i, mine + "bad", {}, seed=0)
            play(pool, lambda id, played: next(actions), ended)
        assert [bool(error) for _, error in ended.values()] == [True, False, True]
        pool.begin(3, mine + "bad", {}, seed=0)
        with pytest.raises(WorkerError, match="in 2 episodes in a row, the last time: turn 1: KeyError"):
            play(pool, lambda id, played: RAISES)
        pool.begin(4, "guess", {"answer": "50"}, seed=0)
        with pytest.raises(WorkerError):
            pool.poll()


@pytest.mark.parametrize("name", ["guess", "mine"])
def test_an_episode_goes_on_from_what_another_pool_had_of_it(mine, name: str) -> None:
    name, row = (name, {"answer": "99"}) if name in ENVIRONMENTS else (mine + "fine", {"turns": 4})
    alone = Episode(resolve(name), row, 5, EnvConfig.max_turns)
    while not alone.end:
        alone.act("40")
    for turns, is_awaited in ((0, False), (2, False), (2, True)):
        texts, rewards, actions = alone.texts[: turns + 1], alone.rewards[:turns], ["40"] * (turns + is_awaited)
        with EnvPool(EnvConfig(), LIMITS, [name]) as pool:
            pool.begin("again", name, row, 5, Played(texts, actions, rewards))
            if not is_awaited:
                assert not pool.num_pending
                pool.act("again", "40")
            [(played, error)] = play(pool, lambda id, played: "40").values()
        assert not error and vars(played).items() <= vars(alone).items()
    with EnvPool(EnvConfig(), LIMITS, [name]) as pool:
        pool.begin("again", name, row, 5, Played(["another"], [], []))
        pool.act("again", "40")
        [(_, error)] = play(pool, lambda id, played: "40").values()
        assert "a replay gives the text" in error


def test_forgotten_episodes_are_closed_and_not_answered(mine) -> None:
    with EnvPool(EnvConfig(num_workers=1), LIMITS, [mine + "tidy", "guess"]) as pool:
        for seed in range(2):
            pool.begin(seed, mine + "tidy", {}, seed)
        assert {id for _ in range(2) for id, _, _ in pool.wait()} == {0, 1}
        pool.begin("guess", "guess", {"answer": "50"}, 0)
        pool.forget([0, "guess"])
        assert not pool.num_pending
        until(lambda: os.path.exists("closed0"))
        assert not os.path.exists("closed1")
    assert os.path.exists("closed1"), "at the end open ones are closed, too"


def test_an_episode_that_is_not_wanted_is_not_tried_again(mine) -> None:
    with EnvPool(EnvConfig(num_workers=1, step_seconds=0.5), LIMITS, [mine + "hangs", mine + "pid"]) as pool:
        pool.begin("hangs", mine + "hangs", {}, 0)
        until(lambda: os.path.exists("tries"))
        pool.forget(["hangs"])
        pool.begin("pid", mine + "pid", {}, 0)
        [(id, _, error)] = pool.wait()
        assert id == "pid" and not error and Path("tries").read_text() == "."


def test_a_forgotten_episode_that_waits_for_a_worker_is_never_played(mine) -> None:
    with EnvPool(EnvConfig(num_workers=1), LIMITS, [mine + "tidy", mine + "pid"]) as pool:
        for seed in range(4):  # the worker is still starting
            pool.begin(seed, mine + "tidy", {}, seed)
        pool.forget(range(4))
        pool.begin("pid", mine + "pid", {}, 0)
        [(id, _, error)] = pool.wait()
        pool.act("pid", "x")
        assert id == "pid" and not error and pool.wait()
        assert not [seed for seed in (1, 2, 3) if os.path.exists(f"begun{seed}")]


def test_no_answer_counts_before_its_latency_is_over(mine) -> None:
    config = EnvConfig(latency="normal(0.2,0.1)", num_workers=1)
    rows = {0: ("guess", {"answer": "50"}), 1: ("guess", {"answer": "50"}), 2: (mine + "fine", {"turns": 9})}
    with EnvPool(config, LIMITS, [name for name, _ in rows.values()]) as pool:
        for id, (name, row) in rows.items():
            pool.begin(id, name, row, seed=4)
        while pool.num_pending:
            pool.wait()  # for the texts before the first turn, which are there at once
        start = time.monotonic()
        seconds: dict[Hashable, float] = {id: Latency(config.latency).seconds(4, id, turn=0) for id in rows}
        for id in rows:
            pool.act(id, "00")
        pool.forget([1])
        answered: dict[Hashable, float] = {}
        while pool.num_pending:
            for id, _, error in pool.wait():
                answered[id] = time.monotonic() - start
                assert not error
        assert answered.keys() == {0, 2} and all(answered[id] >= seconds[id] > 0.05 for id in answered)


def test_an_episode_that_is_never_answered_fails_and_begins_again_as_another(mine) -> None:
    config = EnvConfig(stop=0.5, step_seconds=0.5, max_failures=100, num_workers=1)
    stops = {seed: math.isinf(Latency("", stop=0.5).seconds(seed, seed, turn=0)) for seed in range(6)}
    with EnvPool(config, LIMITS, [mine + "tidy"]) as pool:
        again, ended = [*stops], dict.fromkeys(stops, 0)
        while again:
            for seed in again:
                pool.begin(seed, mine + "tidy", {}, seed)
            failed = {id: error for id, (_, error) in play(pool, lambda id, played: "x").items() if error}
            assert all("env.latency is over env.step_seconds = 0.5" in error for error in failed.values())
            again = [id for id in again if id in failed]
            for id in again:
                ended[id] += 1
        assert {id: failures > 0 for id, failures in ended.items()} == stops and {*stops.values()} == {True, False}
        sizes = {seed: os.path.getsize(f"closed{seed}") for seed in stops}
        assert sizes == {seed: 1 + failures for seed, failures in ended.items()}, "those that were not answered too"


def test_what_cannot_be_loaded_ends_the_run(mine) -> None:
    with EnvPool(EnvConfig(), LIMITS, [mine + "nothing"]) as pool:
        pool.begin(0, mine + "nothing", {}, 0)
        with pytest.raises(WorkerError, match="failed to start 3 times: ConfigError: .*define nothing"):
            pool.wait()
