"""Environments answer the model's turns. An environment is a generator function, here one that has a number guessed:

    def guess(row, seed):  # row: a copy of the data row; seed: the same for all responses to a prompt
        text = ""  # the model reads it after the prompt
        for _ in range(7):
            action = yield text  # the text of the model's turn, without its end token
            if action == row["answer"]:
                return 1.0  # the reward
            text = "<" if action < row["answer"] else ">"
        return 0.0

`yield Reply(text, reward)` rewards a turn at once; the reward of an episode is the sum. Its state must be a function of
row, seed and actions: then an episode can be replayed. `python environments.py guess` plays it without a model.
"""

import argparse
import sys
import time
import traceback
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import zip_longest
from random import Random, SystemRandom
from statistics import mean, median

from config import ConfigError, load_config, option
from core import Environment, Reply, Tokenizer, Turns
from data import DataConfig, read_jsonl
from envs.games import ENVIRONMENTS, Player
from reward import LARGEST_REWARD, reward_number
from rewards import user_files


@dataclass(frozen=True)
class EnvConfig:
    max_turns: int = option(128, "turns of an episode, at most; it ends there with its rewards so far", min=1)
    max_reply_tokens: int = option(
        512, "tokens of a text that an environment gives; a longer one loses its middle", min=64
    )


class EpisodeError(RuntimeError):
    """The environment failed: the episode has no reward. The text says how and where."""


def resolve(name: str) -> Environment:
    """Return a built-in environment or a user's: `package.module:function` or `path/to/file.py:function`.

    Raises ConfigError if the name leads to no function. A user's file imports its neighbours at its top only.
    """
    if name in ENVIRONMENTS:
        return ENVIRONMENTS[name].environment
    user_files.check_name("environment", name, ENVIRONMENTS)
    found = user_files.load_function("environment", name, "(row, seed)")
    user_files.enter("")
    return found


class Episode:
    """An environment at play: `act` sends it the text of a turn, until `end` says why the episode has ended.

    Raises EpisodeError when the environment raises, or gives what is not text or not a finite reward.
    """

    def __init__(self, environment: Environment, row: dict, seed: int, max_turns: int):
        self.texts: list[str] = []  # that the model reads: after the prompt, and after each turn but the last
        self.actions: list[str] = []
        self.rewards: list[float] = []  # one a turn
        self.end = ""  # "stop": by the environment; "turns": there are `max_turns`
        self._max_turns = max_turns
        try:
            self._turns: Turns = environment(deepcopy(row), seed)
            if not isinstance(self._turns, Generator):
                raise TypeError("the environment is no generator function: nothing in it yields")
            self._advance(None)
        except (Exception, SystemExit, GeneratorExit) as error:
            raise self._failure(error) from error

    @property
    def reward(self) -> float:
        return sum(self.rewards)

    def act(self, action: str) -> None:
        """Send the text of a turn, its end token stripped."""
        assert not self.end, "the episode has ended"
        self.actions.append(action)
        try:
            self._advance(action)
        except (Exception, SystemExit, GeneratorExit) as error:
            self.close()
            raise self._failure(error) from error

    def _advance(self, action: str | None) -> None:
        """Send an action, or None to begin."""
        try:
            given = next(self._turns) if action is None else self._turns.send(action)
            text, reward = Reply(*given) if isinstance(given, tuple) else Reply(given)
        except StopIteration as stopped:
            text, reward, self.end = "", 0.0 if stopped.value is None else stopped.value, "stop"
        if not isinstance(text, str):
            raise TypeError(f"the environment yields {text!r:.60}, which is not text")
        text.encode()  # no half of a character
        number = reward_number(reward)
        if number is None or reward_number(self.reward + number) is None:
            raise ValueError(f"the reward {reward!r:.60} is not a finite number of at most {LARGEST_REWARD:g}")
        if self.actions:
            self.rewards.append(number)
        elif self.end or number:
            raise ValueError("the environment rewards or ends an episode before its first turn")
        if not self.end and len(self.actions) == self._max_turns:
            self.end = "turns"
            self.close()
        if not self.end:
            self.texts.append(text)

    def _failure(self, error: BaseException) -> EpisodeError:
        said = traceback.format_exception_only(error)[-1].strip()  # also where the error's own __str__ raises
        places = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]
        theirs = [place for place in places if not place.startswith(__file__)]
        return EpisodeError(f"turn {len(self.actions)}: {said[:300]}" + "".join(f" ({place})" for place in theirs[-1:]))

    def close(self) -> None:
        """End the environment early, so that it cleans up. It has no more say: whatever it raises or yields is lost."""
        with suppress(Exception, SystemExit, GeneratorExit):
            self._turns.close()

    def catch_up(self, texts: Sequence[str], actions: Sequence[str], rewards: Sequence[float]) -> None:
        """Replay an earlier episode's actions. Raises EpisodeError unless its texts and rewards come again."""
        for action in actions:
            if not self.end:
                self.act(action)
        for turn, (old, new) in enumerate(zip_longest(texts, self.texts)):
            if old != new:
                raise EpisodeError(f"turn {turn}: a replay gives the text {new!r:.60}, and gave {old!r:.60} before")
        if self.rewards != [*rewards]:
            raise EpisodeError(f"a replay gives the rewards {self.rewards!r:.60}, and gave {rewards!r:.60} before")

    def transcript(self) -> list[tuple[str, bool]]:
        """Return the texts after the prompt in order, each with whether the model wrote it."""
        given, written = [(text, False) for text in self.texts], [(action, True) for action in self.actions]
        return [piece for turn in zip_longest(given, written) for piece in turn if piece and piece != ("", False)]


def reply_tokens(text: str, tokenizer: Tokenizer, limit: int) -> list[int]:
    """Return the tokens of a given text, tokenised alone; if they are over `limit`, their middle is cut out."""
    ids = tokenizer.encode(text)
    if len(ids) <= limit:
        return ids
    note = tokenizer.encode(f" [... cut: {len(ids)} tokens ...] ")
    rest = limit - len(note)
    return [*ids[: rest - rest // 2], *note, *ids[len(ids) - rest // 2 :]]


# ---- play without a model ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlayConfig:
    env: EnvConfig = field(default_factory=EnvConfig)
    data: DataConfig = field(default_factory=DataConfig)


def ask_human(row: dict, texts: Sequence[str], actions: Sequence[str], rng: Random) -> str:
    return input(f"turn {len(texts):<3}| ")


def write_anything(row: dict, texts: Sequence[str], actions: Sequence[str], rng: Random) -> str:
    """Write a few characters, or now and then the row's answer: about as good as an untrained model."""
    return (
        row["answer"] if rng.random() < 0.1 else "".join(chr(rng.randrange(32, 127)) for _ in range(rng.randrange(9)))
    )


def player_named(name: str, environment: str) -> Player:
    """Return a player for an environment. Raises ConfigError naming those that there are."""
    players = {"human": ask_human, "random": write_anything}
    if environment in ENVIRONMENTS:
        game = ENVIRONMENTS[environment]
        players |= game.players | {"sloppy": game.sloppy(0.04)}
    if name in players:
        return players[name]
    user_files.check_name("player", name, players)
    return user_files.load_function("player", name, "(row, texts, actions, rng)")


def play(environment: Environment, row: dict, seed: int, max_turns: int, player: Player) -> None:
    """Play an episode and print it."""

    def say(label: str, text: str) -> None:
        print(f"{label:<8}| " + f"\n{'':<8}| ".join(text.splitlines()))

    say("prompt", str(row["prompt"]))
    episode, rng = Episode(environment, row, seed, max_turns), Random(seed)
    while not episode.end:
        if episode.texts[-1]:
            say("given", episode.texts[-1])
        action = player(row, episode.texts, episode.actions, rng)
        if player is not ask_human:
            say(f"turn {len(episode.texts)}", action)
        episode.act(action)
    print(f"reward {episode.reward:g} after {len(episode.actions)} turns ({episode.end})")


def check(environment: Environment, rows: Sequence[dict], max_turns: int, player: Player, episodes: int = 100) -> bool:
    """Play and replay episodes with seeds of their own, print what they are like; return whether none has failed."""
    seconds, played, failures = [0.0], [], Counter[str]()
    for seed in range(episodes):
        row, rng = rows[seed * len(rows) // episodes], Random(seed)
        try:
            episode = Episode(environment, row, seed, max_turns)
            while not episode.end:
                action = player(row, episode.texts, episode.actions, rng)
                start = time.perf_counter()
                episode.act(action)
                seconds.append(time.perf_counter() - start)
            Episode(environment, row, seed, max_turns).catch_up(episode.texts, episode.actions, episode.rewards)
            played.append(episode)
        except EpisodeError as error:
            failures[str(error)] += 1
    if played:
        rewards, turns = [episode.reward for episode in played], [len(episode.actions) for episode in played]
        texts = [len(text) for episode in played for text in episode.texts]
        print(f"reward    mean {mean(rewards):g}, from {min(rewards):g} to {max(rewards):g}")
        print(f"turns     median {median(turns):g}, at most {max(turns)}")
        print(f"texts     median {median(texts):g} characters, at most {max(texts)}")
        print(f"ends      {', '.join(f'{end} {n}' for end, n in Counter(e.end for e in played).most_common())}")
    print(f"step      median {median(seconds) * 1e3:.3g} ms, at most {max(seconds) * 1e3:.3g} ms")
    print(f"fine      {len(played)} of {episodes} episodes, and a replay of their actions gives the same")
    for failure, count in failures.most_common(5):
        print(f"failed    {count} x {failure}")
    return not failures


def main(argv: list[str]) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="environments.py", description="Play an environment without a model.", allow_abbrev=False
    )
    parser.add_argument("environment", help=f"{', '.join(ENVIRONMENTS)}, or your own as FILE:NAME")
    parser.add_argument("--by", help="human (default), random; expert, teacher, sloppy of built-in ones; or FILE:NAME")
    parser.add_argument("--data", help="JSONL file of rows; --data.KEY=VALUE and --env.KEY=VALUE as for train.py")
    parser.add_argument("--seed", type=int, default=SystemRandom().randrange(10**6), help="of row, environment, player")
    parser.add_argument("--check", action="store_true", help="play 100 episodes (by random), and say how they went")
    flags, overrides = parser.parse_known_args(argv)
    try:
        config = load_config(PlayConfig, None, overrides)
        environment = resolve(flags.environment)
        player = player_named(flags.by or ("random" if flags.check else "human"), flags.environment)
        if flags.data:
            rows = [row.fields for row in read_jsonl(flags.data, "--data", config.data)]
        elif game := ENVIRONMENTS.get(flags.environment):
            rows = [game.row(n) for n in game.numbers()]
        else:
            raise ConfigError("--data: give the rows of your own environment, a JSONL file")
        if flags.check:
            return 0 if check(environment, rows, config.env.max_turns, player) else 1
        play(environment, Random(flags.seed).choice(rows), flags.seed, config.env.max_turns, player)
        return 0
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except EpisodeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except (EOFError, KeyboardInterrupt):
        print()
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
