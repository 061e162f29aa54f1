"""The pool of episodes: users' environments in worker processes, and what a bad one costs: its own episode."""

import os
import signal
import sys
from collections.abc import Callable, Hashable, Iterator
from random import Random

import pytest

from environments import EnvConfig, Episode, Played, resolve
from envs.games import ENVIRONMENTS
from envs.pool import EnvPool
from process.workers import WorkerError
from reward import RewardConfig
from rewards import user_files

USER = """
import os, sys, time
from random import Random
from environments import Reply
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
    action = yield ""
    if action == "hang":
        while True: time.sleep(1)
    if action == "exit": os._exit(3)
    if action == "raise": raise KeyError("field")
    if action == "number": yield 5
    if action == "loads": yield str("torch" in sys.modules)
    if action == "large": yield "x" * 10**6
    if action == "fork" and not os.fork():
        while True: time.sleep(1)
    if action == "print": print("[1, 2]\\n" * 10000)
    if action == "garbage":
        for fd in range(3, 10):
            try: os.write(fd, b"[0, 1.0]\\n")
            except OSError: pass
        while True: time.sleep(1)
    yield "fine"

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
        open(f"closed{seed}", "w").close()
"""
LIMITS = RewardConfig()


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


@pytest.mark.parametrize(
    "action, said",
    [
        ("hang", "did not finish within 2 s"),
        ("exit", "died (exit code 3)"),
        ("raise", "turn 1: KeyError: 'field' ("),
        ("number", "turn 1: TypeError: the environment yields 5, which is not text"),
        ("garbage", "instead of a reply"),
    ],
)
def test_a_bad_environment_costs_its_own_episode(mine, action: str, said: str) -> None:
    """One worker, so that the others are replayed in the next process."""
    with EnvPool(EnvConfig(num_workers=1, step_seconds=1.0), LIMITS, [mine + "fine", mine + "bad"]) as pool:
        for i in range(2):
            pool.begin(i, mine + "fine", {"turns": 3}, seed=i)
        pool.begin("bad", mine + "bad", {}, seed=0)
        ended = play(pool, lambda id, played: action if id == "bad" else "ok")
    assert said in ended["bad"][1] and ended["bad"][0].end == ""
    for i in range(2):
        played, error = ended[i]
        assert not error and played.end == "stop" and played.rewards == [0.2, 0.2, 1.0]


@pytest.mark.parametrize(
    "action, text", [("fork", "fine"), ("print", "fine"), ("large", "x" * 10**6), ("loads", "False")]
)
def test_what_does_no_harm_does_none(mine, action: str, text: str) -> None:
    with EnvPool(EnvConfig(num_workers=1), LIMITS, [mine + "bad"]) as pool:
        pool.begin(0, mine + "bad", {}, seed=0)
        [(played, error)] = play(pool, lambda id, played: "end" if len(played.texts) > 1 else action).values()
    assert not error and played.texts[:2] == ["", text]


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


def test_an_environment_that_keeps_failing_ends_the_run(mine) -> None:
    with EnvPool(EnvConfig(num_workers=1, max_failures=2), LIMITS, [mine + "bad", "guess"]) as pool:
        ended: dict = {}
        actions = iter(["raise", "end", "end", "raise"])
        for i in range(3):
            pool.begin(i, mine + "bad", {}, seed=0)
            play(pool, lambda id, played: next(actions), ended)
        assert [bool(error) for _, error in ended.values()] == [True, False, True]
        pool.begin(3, mine + "bad", {}, seed=0)
        with pytest.raises(WorkerError, match="in 2 episodes in a row, the last time: turn 1: KeyError"):
            play(pool, lambda id, played: "raise")
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
        assert not pool.num_pending and not os.path.exists("closed0")
        pool.act(1, "x")
        assert [(id, played.end) for id, played, _ in pool.wait()] == [(1, "stop")] and os.path.exists("closed0")


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


def test_what_cannot_be_loaded_ends_the_run(mine) -> None:
    with EnvPool(EnvConfig(), LIMITS, [mine + "nothing"]) as pool:
        pool.begin(0, mine + "nothing", {}, 0)
        with pytest.raises(WorkerError, match="failed to start 3 times: ConfigError: .*define nothing"):
            pool.wait()
