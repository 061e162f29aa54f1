"""Environments: what an episode is, what a bad environment costs, adapters, the built-in games, the player."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import mean

import pytest
from conftest import ROOT

from config import ConfigError, load_config
from core import Environment, Reply
from environments import EnvConfig, Episode, EpisodeError, reply_tokens, resolve
from envs import trial
from envs.adapters import from_gym, tools
from envs.games import ENVIRONMENTS, Player
from envs.player import main, played, transcript, write_anything
from envs.pool import try_environments
from reward import RewardConfig
from rewards import user_files
from rewards.graders import exact_match
from settings import Config, check_run
from tasks import is_held_out
from warm_start import byte_tokenizer

MAX_TURNS = EnvConfig.max_turns
EVERY = pytest.mark.parametrize("name", ENVIRONMENTS)


def after(environment: Environment, actions: str, row: dict | None = None, max_turns: int = MAX_TURNS) -> Episode:
    """Return an episode after these actions of a character each."""
    episode = Episode(environment, row or {}, 0, max_turns)
    for action in actions:
        episode.act(action)
    return episode


# ---- an episode --------------------------------------------------------------------------------------------------


def count(row, seed):
    """Reward each "1" with a tenth, and the end with what the row says."""
    text, reward = f"seed {seed}", 0.0
    for turn in range(3):
        action = yield Reply(text, reward)
        text, reward = f"{turn}{action}", 0.1 * (action == "1")
    return reward + row.get("bonus", 0)


def test_an_episode_keeps_texts_actions_and_a_reward_of_each_turn() -> None:
    episode = after(count, "12")
    assert (episode.texts, episode.actions, episode.end) == (["seed 0", "01", "12"], ["1", "2"], "")
    assert episode.rewards == [0.1, 0.0]
    episode.act("1")
    assert (episode.texts, episode.rewards, episode.end) == (["seed 0", "01", "12"], [0.1, 0.0, 0.1], "stop")
    assert episode.reward == pytest.approx(0.2)
    given, written = [("seed 0", False), ("01", False), ("12", False)], [("1", True), ("2", True), ("1", True)]
    assert episode.transcript() == [given[0], written[0], given[1], written[1], given[2], written[2]]


def test_the_transcript_has_empty_turns_of_the_model_but_no_empty_texts() -> None:
    def silent(row, seed):
        yield ""
        yield ""

    episode = Episode(silent, {}, 0, MAX_TURNS)
    assert episode.transcript() == []
    episode.act("")
    episode.act("x")
    assert episode.transcript() == [("", True), ("x", True)] and episode.reward == 0.0


@pytest.mark.parametrize("max_turns, end", [(1, "turns"), (2, "turns"), (3, "stop"), (4, "stop")])
def test_the_last_allowed_turn_is_rewarded_and_its_reply_is_not_read(max_turns: int, end: str) -> None:
    turns = min(max_turns, 3)
    episode = after(count, "1" * turns, max_turns=max_turns)
    assert episode.end == end and episode.rewards == [0.1] * turns and len(episode.texts) == turns
    with pytest.raises(AssertionError):
        episode.act("1")


@pytest.mark.parametrize("reply, max_turns", [("go on", 2), (5, 9)])
def test_an_environment_that_is_ended_early_or_fails_cleans_up(reply: object, max_turns: int) -> None:
    ended = []

    def careful(row, seed):
        try:
            yield ""
            while True:
                yield reply
        finally:
            ended.append(seed)
            yield "one more word"

    episode = Episode(careful, {}, 0, max_turns)
    with pytest.raises(EpisodeError) if reply == 5 else nullcontext():
        episode.act("1")
        episode.act("2")
    assert ended == [0]


def test_replay_rebuilds_an_episode_in_the_middle_and_notices_a_difference() -> None:
    before = after(count, "12")
    again = Episode(count, {}, 0, MAX_TURNS)
    again.catch_up(before)
    again.act("1")
    before.act("1")
    assert (again.texts, again.rewards, again.end) == (before.texts, before.rewards, before.end)
    with pytest.raises(EpisodeError, match="turn 0: a replay gives the text 'seed 1', and gave 'seed 0' before"):
        Episode(count, {}, 1, MAX_TURNS).catch_up(before)
    with pytest.raises(EpisodeError, match="a replay gives rewards"):
        Episode(count, {"bonus": 1}, 0, MAX_TURNS).catch_up(before)
    with pytest.raises(EpisodeError, match="turn 2: a replay gives the text None"):
        Episode(count, {}, 0, 2).catch_up(before)


# ---- environments that misbehave ---------------------------------------------------------------------------------


class Nameless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no name")

    __repr__ = __str__


def ends(value: object) -> Environment:
    def environment(row, seed):
        yield ""
        return value

    return environment


def says(*replies: object) -> Environment:
    def environment(row, seed):
        yield ""
        for reply in replies:
            _ = yield reply

    return environment


def raises(error: BaseException) -> Environment:
    def environment(row, seed):
        yield ""
        raise error

    return environment


def early(row, seed):
    if False:
        yield ""


BAD = {
    "a number": (says(5), "yields 5, which is not text"),
    "nothing": (says(None), "yields None, which is not text"),
    "bytes": (says(b"x"), "yields b'x', which is not text"),
    "half a character": (says("\ud800"), "UnicodeEncodeError"),
    "three values": (says(("x", 1.0, 2)), "TypeError"),
    "a nameless text": (says(Nameless()), "no name"),
    "nan": (ends(float("nan")), "the reward nan is not a finite number"),
    "infinity for a turn": (says(("x", float("inf"))), "the reward inf is not a finite number"),
    "a text as reward": (ends("1"), "the reward '1' is not a finite number"),
    "too large": (ends(1e10), "the reward 10000000000.0 is not a finite number of at most 1e"),
    "too large together": (says(*[("x", 6e8)] * 2), "the reward 600000000.0 is not"),
    "an error": (raises(KeyError("field")), "KeyError: 'field' (" + __file__),
    "an error without a text": (raises(Nameless()), "Nameless: <exception str() failed>"),
    "an exit": (raises(SystemExit(3)), "SystemExit: 3"),
    "an exit of the generator": (raises(GeneratorExit()), "GeneratorExit"),
    "an end": (raises(StopIteration()), "generator raised StopIteration"),
    "no end of calls": (lambda row, seed: raise_recursion(), "RecursionError"),
    "no generator": (lambda row, seed: 1.0, "nothing in it yields"),
    "no turn": (early, "before its first turn"),
    "a reward for no turn": (lambda row, seed: (reply for reply in [("x", 1.0)]), "before its first turn"),
}


def raise_recursion():
    return raise_recursion()


@pytest.mark.parametrize("environment, said", BAD.values(), ids=BAD)
def test_a_failed_environment_says_how_and_has_no_reward(environment: Environment, said: str) -> None:
    with pytest.raises(EpisodeError) as failure:
        after(environment, "ab")
    assert said in str(failure.value) and str(failure.value).startswith("turn ") and len(str(failure.value)) < 500


def test_rows_are_copies_and_prints_do_no_harm(capsys) -> None:
    def changes(row, seed):
        print("[1, 2]")
        row["list"].append(row.pop("answer"))
        yield ""
        return len(row["list"])

    row: dict = {"answer": "7", "list": []}
    assert [after(changes, "a", row).reward for _ in range(2)] == [1.0, 1.0] and row == {"answer": "7", "list": []}


@pytest.mark.parametrize("length, is_cut", [(99, False), (100, False), (101, True), (10**6, True)])
def test_a_long_reply_loses_its_middle_and_says_so(length: int, is_cut: bool) -> None:
    tokenizer = byte_tokenizer()
    text = "".join(chr(97 + i % 26) for i in range(length))
    ids = reply_tokens(text, tokenizer, 100)
    assert len(ids) == min(length, 100)
    cut = tokenizer.decode(ids)
    assert (cut != text) == is_cut and cut[:20] == text[:20] and cut[-20:] == text[-20:]
    assert not is_cut or "[... cut ...]" in cut


# ---- adapters ----------------------------------------------------------------------------------------------------


class Corridor:
    """Three steps to the right; as Gymnasium has it."""

    closed = 0

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[str, dict]:
        self.place = int((options or {}).get("place", seed))
        return f"at {self.place}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        self.place += action == "r"
        return f"at {self.place}", 0.25, self.place == 3, action == "stop", {}

    def close(self) -> None:
        Corridor.closed += 1


class Plain:
    """The same with as little as possible."""

    def reset(self, seed: int) -> str:
        self.inner = Corridor()
        return self.inner.reset(seed=seed)[0]

    def step(self, action: str) -> tuple[str, float, bool]:
        return self.inner.step(action)[:3]


def test_a_class_as_gymnasium_has_them_is_an_environment() -> None:
    environment = from_gym(Corridor)
    Corridor.closed = 0
    episode = after(environment, "rrr")
    assert (episode.texts, episode.rewards, episode.end) == (["at 0", "at 1", "at 2"], [0.25] * 3, "stop")
    assert after(environment, "r", {"place": 2}).end == "stop"
    stopped = Episode(environment, {}, 0, MAX_TURNS)
    stopped.act("stop")
    assert stopped.end == "stop" and Corridor.closed == 3
    assert after(environment, "lll", max_turns=3).end == "turns" and Corridor.closed == 4
    assert after(from_gym(Plain), "rrr").rewards == [0.25] * 3


def calc(expression: str) -> int:
    """Add and multiply."""
    return eval(expression)


def power(base: int, exponent: int = 2) -> int:
    """Raise a number."""
    return base**exponent


def test_tools_are_called_and_their_errors_are_texts() -> None:
    environment, answered = tools(calc, power, answer=exact_match), "<tool_response>\n{}\n</tool_response>".format
    calls = {
        "so <calc>6*7</calc> it is": "42",
        "<power>[3]</power>": "9",
        '<power>{"base": 2, "exponent": 5}</power>': "32",
        "<search>6</search>": "NameError: there is no search, only calc, power",
        "<power>3</power>": "ValueError: the arguments are not the JSON of (base: int, exponent: int = 2) -> int",
        "<calc>6*8</calc>": "48",
        "<think><calc>6*7</calc></think> no, <calc>6*6</calc>": "36",
        '<tool_call>{"name": "calc", "arguments": {"expression": "6*8"}}</tool_call>': answered("48"),
        '<tool_call>\n{"name": "power", "arguments": {"base": 2}}\n</tool_call>': answered("4"),
        '<tool_call>{"name": "calc"}</tool_call>': answered('ValueError: a call is {"name": .., "arguments": {..}}'),
        "<calc>6*9</calc>": "54",
        "<power>[1, 2, 3]</power>": "ValueError: the arguments are not the JSON",
        "<calc>1/0</calc>": "ZeroDivisionError: division by zero",
    }
    episode = Episode(environment, {"answer": "42"}, 0, MAX_TURNS)
    assert episode.texts == [""]
    assert (environment.__doc__ or "").startswith(
        "<calc>..</calc>: calc(expression: str) -> int: Add and multiply.\n<power>.."
    )
    for call, result in calls.items():
        episode.act(call)
        assert episode.texts[-1].startswith(result) and not episode.end
    episode.act(" 42 ")
    assert episode.end == "stop" and episode.reward == 1.0


def now() -> str:
    """Tell the time."""
    return "noon"


def total(*numbers: int) -> int:
    """Add all."""
    return sum(numbers)


def leave(text: str) -> str:
    """End."""
    raise SystemExit(text)


def test_tools_take_what_their_parameters_say() -> None:
    calls = {
        "<now></now>": "noon",
        "<now>[]</now>": "noon",
        "<total>[1, 2, 3]</total>": "6",
        '<power>"23"</power>': "ValueError: the arguments are not the JSON",
        "<total></total>": "ValueError: the arguments are not the JSON",
        "<calc>1+1</calc>": "2",
        "<leave>now</leave>": "SystemExit: now",
    }
    episode = Episode(tools(now, total, power, calc, leave), {"answer": ""}, 0, MAX_TURNS)
    for call, result in calls.items():
        episode.act(call)
        assert episode.texts[-1].startswith(result) and not episode.end, call
    for wrong in ((calc, calc), (lambda text: text,), (partial(power, 2),)):
        with pytest.raises(ValueError, match="names of their own"):
            tools(*wrong)


@pytest.mark.parametrize(
    "said, reward", [("<answer>42</answer>", 1.0), ("<b>no</b> <answer>41</answer>", 0.0), ("<b>42</b>", None)]
)
def test_an_answer_may_stand_between_tags(said: str, reward: float | None) -> None:
    episode = Episode(tools(calc, answer=exact_match), {"answer": "42"}, 0, MAX_TURNS)
    episode.act("<math>6*7</math> is <calc>6*7</calc>")
    assert episode.texts[-1] == "42"
    episode.act(said)
    assert (episode.end == "stop") == (reward is not None) and episode.reward == (reward or 0.0)


def test_the_third_bad_call_in_a_row_ends_the_episode() -> None:
    ungraded = Episode(tools(calc), {"answer": "42"}, 0, MAX_TURNS)
    ungraded.act("42")
    assert (ungraded.end, ungraded.reward) == ("stop", 0.0)
    episode = Episode(tools(calc, answer=exact_match), {"answer": "42"}, 0, MAX_TURNS)
    for end in ("", "", "stop"):
        episode.act("<calc>(</calc>")
        assert episode.end == end
    assert episode.reward == 0.0


# ---- the built-in environments -----------------------------------------------------------------------------------


def rewards_of(name: str, player: str | Player, episodes: int) -> list[float]:
    game = ENVIRONMENTS[name]
    numbers = game.numbers()
    act = game.players[player] if isinstance(player, str) else player
    rows = [game.row(numbers[i * len(numbers) // episodes]) for i in range(episodes)]
    return [played(game.environment, row, act, seed).reward for seed, row in enumerate(rows)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, player, reward",
    [
        ("guess", "random", 0.07),
        ("guess", "teacher", 0.51),
        ("guess", "expert", 1.0),
        ("relay", "random", 0.0),
        ("relay", "expert", 1.0),
        ("relay", ENVIRONMENTS["relay"].sloppy(0.02), 0.56),
        ("lake", "random", 0.011),
        ("lake", "teacher", 0.87),
        ("lake", "expert", 1.0),
        ("lake", ENVIRONMENTS["lake"].sloppy(0.15), 0.72),
        ("bandit", "random", 0.5),
        ("bandit", "teacher", 0.54),
        ("bandit", "expert", 0.64),
        ("bandit", lambda row, texts, actions, rng: row["answer"], 0.8),
    ],
)
def test_players_get_the_reward_that_they_should(name: str, player: str | Player, reward: float) -> None:
    rewards = rewards_of(name, player, 2000)
    error = 4 * (reward * (1 - reward) / len(rewards)) ** 0.5  # of a mean of zeros and ones
    assert mean(rewards) == pytest.approx(reward, abs=error + 0.005)


@EVERY
def test_games_hold_problems_out_and_repeat_themselves(name: str) -> None:
    game = ENVIRONMENTS[name]
    numbers = game.numbers()
    assert len(set(numbers)) == len(numbers) and 0.1 < mean(map(is_held_out, numbers)) < 0.3
    for seed, n in enumerate(numbers[:: len(numbers) // 20]):
        row = game.row(n)
        assert row == game.row(n) == json.loads(json.dumps(row)) and row["prompt"] and isinstance(row["answer"], str)
        for player in (*game.players.values(), game.sloppy(0.3), write_anything):
            episode = played(game.environment, row, player, seed)
            again = Episode(game.environment, row, seed, MAX_TURNS)
            again.catch_up(episode)
            assert again.end == episode.end


@EVERY
def test_a_transcript_for_a_warm_start_says_what_is_to_be_learned(name: str) -> None:
    game = ENVIRONMENTS[name]
    n = game.numbers()[7]
    pieces = transcript(name, n, 3, 0.2)
    episode, written = Episode(game.environment, game.row(n), 3, MAX_TURNS), [text for text, flag in pieces if flag]
    for text in written:
        episode.act(text)
    assert episode.end and pieces == episode.transcript() == transcript(name, n, 3, 0.2)
    assert len({str(transcript(name, n, seed, 0.5)) for seed in range(20)}) > 1


@pytest.mark.slow
@EVERY
def test_the_config_of_a_game_lets_every_problem_be_solved(name: str, tmp_path) -> None:
    config = load_config(Config, str(ROOT / "configs" / f"{name}.toml"), [f"--run.dir={tmp_path / 'run'}"])
    check_run(config, 1, resume=False, is_main=True)
    game, limits = ENVIRONMENTS[name], config.env
    for n in game.numbers():
        episode = played(game.environment, game.row(n), game.players["expert"], n, limits.max_turns)
        lengths = [len(text) + is_written for text, is_written in episode.transcript()]  # bytes, and the end of a turn
        assert episode.end == "stop" and max(map(len, episode.actions)) < limits.max_turn_tokens
        assert sum(lengths) <= config.rollout.max_response_tokens


def test_training_asks_for_every_number_that_the_evaluation_asks_for() -> None:
    """Else the model would learn, rightly, which numbers are never asked for, and lose held-out games by that."""
    game = ENVIRONMENTS["guess"]
    trained, held_out = ({game.row(n)["answer"] for n in game.numbers() if is_held_out(n) == x} for x in (False, True))
    assert trained == held_out and len(trained) == 100


def test_the_relay_has_a_long_tail_of_turns() -> None:
    game = ENVIRONMENTS["relay"]
    turns = sorted(len(played(game.environment, game.row(n), game.players["expert"]).actions) for n in game.numbers())
    assert [turns[len(turns) * share // 100] for share in (50, 75, 90, 99)] == [3, 8, 13, 37] and turns[-1] == 96


def test_the_relay_reads_what_it_must_and_no_more() -> None:
    relay, row = ENVIRONMENTS["relay"].environment, {"prompt": "70000?", "answer": "50000"}
    actions = ["3n+1 of 70000", "n/2 of 22000", "n/2 of 2200", "3n+1 of 99999", "n/2 of 11000"]
    episode = Episode(relay, row, 0, MAX_TURNS)
    for action in actions:
        episode.act(action)
    assert episode.texts == ["", "22000", "11000", "?", "?"] and (episode.end, episode.reward) == ("stop", 1.0)
    assert after(relay, "???", row).end == "stop" and after(relay, "??", row).end == ""


# ---- loading and playing -----------------------------------------------------------------------------------------


@pytest.fixture
def own(tmp_path, monkeypatch) -> Iterator[Callable[[str], list[str]]]:
    """Write mine.py and rows into a working directory; give the command line that plays `mine.py:name`."""
    (tmp_path / "helper.py").write_text("LIMIT = 2")
    (tmp_path / "mine.py").write_text(
        "import os, random\nfrom core import Reply\nfrom helper import LIMIT\n"
        "def fine(row, seed):\n    for _ in range(LIMIT):\n        action = yield Reply('a\\nb')\n    return 0.5\n"
        "def fails(row, seed):\n    yield ''\n    return row['nothing']\n"
        "def stops_talking(row, seed):\n    yield 'a'\n    yield ''\n"
        "def rolls(row, seed):\n    yield str(random.random())\n"
        "def hangs(row, seed):\n    yield ''\n    while True: pass\n"
        "def dies(row, seed):\n    yield ''\n    os._exit(3)\n"
        "def lucky(row, seed):\n    yield ''\n    return random.random()\n"
        "def player(row, texts, actions, rng):\n    return f'my {len(texts)}'\n"
    )
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Play!", "answer": "7"}\n' * 3)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    yield lambda name: [f"mine.py:{name}", "--data=rows.jsonl"]
    user_files.enter("")


def test_the_player_plays_with_a_person_a_script_and_at_random(own, tmp_path, capsys, monkeypatch) -> None:
    assert main([*own("fine"), "--by=mine.py:player"]) == 0
    lines = ["prompt  | Play!", "given   | a", "        | b", "turn 1  | my 1", "given   | a", "        | b"]
    assert capsys.readouterr().out.splitlines() == [*lines, "turn 2  | my 2", "reward 0.5 after 2 turns (stop)"]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Play!"}]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": messages, "answer": ""}))
    assert main([*own("fine"), "--by=mine.py:player", "--turns=1"]) == 0
    first, second, *_, end = capsys.readouterr().out.splitlines()
    assert (first, second) == ("prompt  | system: Be brief.", "prompt  | user: Play!")
    assert end == "reward 0 after 1 turn (turns)"
    monkeypatch.setattr("builtins.input", lambda prompt: "0")  # below every number of the game
    assert main(["guess", "--turns=2"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("after 2 turns (turns)")
    assert main(["relay", "--by=expert", "--seed=1"]) == 0
    first = capsys.readouterr().out
    assert main(["relay", "--by=expert", "--seed=1"]) == 0
    assert capsys.readouterr().out == first and "reward 1 after" in first


def test_half_a_character_in_a_call_is_the_models_mistake() -> None:
    def echo(text: str) -> str:
        """Give back."""
        return text

    episode = Episode(tools(echo), {"answer": ""}, 0, MAX_TURNS)
    episode.act('<tool_call>{"name": "\\ud83d", "arguments": {}}</tool_call>')
    episode.act('<tool_call>{"name": "echo", "arguments": {"text": "\\ud83d"}}</tool_call>')
    assert "there is no" in episode.texts[1] and "\\ud83d" in episode.texts[2] and not episode.end


def test_the_player_reads_rows_as_a_run_does(own, tmp_path, capsys) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "Play!", "gold": "7", "task": "env"}))
    fields = ["--data.prompt_field=question", "--data.answer_field=gold"]
    assert main([*own("fine"), "--by=mine.py:player"]) == 2
    assert "set data.prompt_field" in capsys.readouterr().err
    assert main([*own("fine"), "--by=mine.py:player", *fields]) == 0
    assert capsys.readouterr().out.startswith("prompt  | Play!")


def test_a_person_is_told_what_the_environment_does(capsys, monkeypatch) -> None:
    monkeypatch.setattr("builtins.input", lambda prompt: "2")
    assert main(["bandit", "--seed=1"]) == 0
    about, prompt, *turns, end = capsys.readouterr().out.splitlines()
    assert about.startswith("about   | Reply 1 or 0 to the pull of an arm") and prompt == "prompt  | bandit"
    assert "reward  | 0.0833333" in turns and end.endswith("after 12 turns (stop)")


@pytest.mark.slow
def test_a_check_says_what_episodes_are_like_and_whether_they_can_be_replayed(own, capsys) -> None:
    assert main([*own("fine"), "--check", "--seed=7"]) == 2
    assert "--seed has no effect with --check" in capsys.readouterr().err
    assert main([*own("fine"), "--check"]) == 0
    said = capsys.readouterr().out
    rows = {line[2:26].strip(): line[26:].split() for line in said.splitlines()}
    assert rows["reward"] == ["0.5"] * 4 and rows["turns"] == ["2"] * 4 + ["128"]
    assert rows["characters of a text"] == ["3"] * 4 and rows["characters of all texts"] == ["6"] * 4
    assert "ended by                  stop 100" in said and "replayed                  100 of 100, to" in said
    assert main([*own("fails"), "--check"]) == 1
    said = capsys.readouterr().out
    assert (
        "100 episodes of mine.py:fails" in said
        and "100 x turn 1: KeyError: 'nothing' (" in said
        and "mine.py:10)" in said
    )
    assert "reward" not in said
    assert main([*own("stops_talking"), "--check"]) == 1
    assert "100 x turn 1: gives no text, which only a chat template makes readable" in capsys.readouterr().out
    assert main([*own("rolls"), "--check"]) == 1
    said = capsys.readouterr().out
    assert "warning: 100 of 100 episodes cannot be replayed from their actions:\n    turn 0: a replay gives" in said
    assert "random.Random(seed)" in said and max(map(len, said.splitlines())) <= 110


@pytest.mark.slow
def test_an_environment_is_tried_in_a_worker_with_its_time_limit(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = "import time\ntime.sleep(600)\ndef f(row, seed):\n    yield ''\n"
    (tmp_path / "waits.py").write_text(text)
    (tmp_path / "raises.py").write_text("import nowhere\n")
    (tmp_path / "fine.py").write_text("from environments import Reply\ndef f(row, seed):\n    yield Reply('')\n")
    try_environments(RewardConfig(), ["guess", "fine.py:f"])
    for name, said, seconds in (
        ("waits", "did not finish within 1 s", 1.0),
        ("raises", "No module named 'nowhere'", 60.0),
    ):
        with pytest.raises(ConfigError, match=f"{name}.py:f failed to start: .*{said}"):
            try_environments(RewardConfig(startup_seconds=seconds), [f"{name}.py:f"])
    assert not [name for name in sys.modules if name.startswith("user:") and name.endswith(("fine.py", "waits.py"))]


@pytest.mark.parametrize("beside", ["README", "secret"])
def test_a_folder_that_may_not_be_read_is_no_module(tmp_path, monkeypatch, beside: str) -> None:
    """As lost+found beside a grader: Python before 3.14 raises there."""
    (tmp_path / beside).mkdir()
    (tmp_path / "a.py").touch()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "__init__.py").touch()

    def refuses(path: object) -> bool:
        raise PermissionError(path)

    monkeypatch.setattr(Path, "is_file", refuses)
    assert user_files.names_in(str(tmp_path)) == {"a", "b"}


@pytest.mark.slow
def test_a_check_plays_in_workers_and_ends(own, capsys, monkeypatch) -> None:
    """An environment that hangs, dies, or draws its reward anew."""
    monkeypatch.setattr(trial, "EPISODES", 1)
    config = EnvConfig(step_seconds=0.3, num_workers=1)
    for name, said in (("hangs", "did not finish within 0.3 s"), ("dies", "died (exit code 3)")):
        tried = trial.tried(own(name)[0], [{"answer": ""}], write_anything, config, RewardConfig())
        assert not tried.ended and not tried.is_fine and tried.failed.total() == 1
        assert said in tried.table(config) and tried.table(config).startswith("1 episodes of mine.py:")
    tried = trial.tried(own("lucky")[0], [{"answer": ""}], write_anything, config, RewardConfig())
    assert tried.differs == {"the last turn ends otherwise": 1} and not tried.is_fine and len(tried.ended) == 1
    monkeypatch.setattr(trial, "SECONDS", 0.0)  # after which no episode begins
    tried = trial.tried(own("fine")[0], [{"answer": ""}], write_anything, config, RewardConfig())
    assert tried.table(config) == "0 episodes of mine.py:fine within 0 s"


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["chess"], "environment 'chess' is not built in; take one of guess, relay"),
        (["nowhere.py:f"], "there is no file"),
        (["mine.py:g"], "define g(row, seed)"),
        (["mine.py:fine"], "--data: give the rows"),
        (["mine.py:fine", "--data=none.jsonl"], "cannot read this file"),
        (["guess", "--by=nobody"], "player 'nobody' is not built in; take one of human, random, expert"),
        (["guess", "--by=mine.py:nobody"], "define nobody(row, texts, actions, rng)"),
        (["guess", "--turns=0"], "too small"),
        (["guess", "--rollout.seed=1"], "rollout"),
    ],
)
def test_a_mistake_gets_one_line(own, capsys, arguments: list[str], said: str) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert said in captured.err and captured.err.count("\n") == 1 and not captured.out


def test_the_example_is_an_environment_and_the_tutorial_shows_it() -> None:
    path = ROOT / "examples" / "own_environment.py"
    retry = resolve(f"{path}:retry")
    user_files.enter("")
    answers = ["1 2=2", "1=3", "4=7"]
    rewards = [
        played(retry, {"answer": answer}, lambda row, texts, *_: answers[len(texts) - 1]).reward for answer in "2378"
    ]
    assert rewards == [1.0, 0.75, 0.5, 0.0]
    code = path.read_text().partition("\n\n\n")[2]
    assert len(code.splitlines()) == 7, "as the README says"
    assert f"```python\n{code}```" in (ROOT / "docs" / "tutorial.md").read_text()
