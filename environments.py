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

import runpy
import traceback
from collections.abc import Callable, Generator
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import zip_longest

from config import option
from core import Environment, Reply, Tokenizer, Turns
from envs.games import ENVIRONMENTS
from envs.service import service
from reward import LARGEST_REWARD, reward_number
from rewards import remote, user_files

CUT = " [... cut ...] "  # in a given text, instead of its middle
MAX_TOKEN_CHARACTERS = 64  # of a given text, on average


@dataclass(frozen=True)
class EnvConfig:
    max_turns: int = option(128, "turns of an episode, at most; it ends there with its rewards so far", min=1)
    max_turn_tokens: int = option(
        0,
        "tokens that the model may sample in a turn; the episode ends there with its rewards so far; 0: only "
        "rollout.max_response_tokens, for all turns and texts together, is the limit",
        min=0,
    )
    max_reply_tokens: int = option(
        512, "tokens of a text that an environment gives; a longer one loses its middle", min=64
    )
    step_seconds: float = option(
        10.0,
        "time limit of a try of a turn: of a user's environment, or of a service's reply, repeated requests included",
        above=0,
        max=1e7,
    )
    clock: str = option(
        "time",
        "time: a reply takes effect when it is there, and nobody waits for it; steps: at its turn's end, which makes a "
        "run a function of its seed",
        choices=("time", "steps"),
    )
    barrier: bool = option(
        False,
        "for comparison only: replies take effect together, once all sequences of the rank have ended their turns",
    )
    latency: str = option(
        "",
        "seconds that every turn takes at least, drawn: to measure what slow environments cost; normal(10,5) or "
        "lognormal(10,5), by mean and standard deviation, or recorded FILE, with a number in every line; empty: none",
    )
    slow: str = option("", "share of episodes whose latency is longer, and how many times: 0.01x10; empty: none")
    stop: float = option(0.0, "share of episodes that are never answered; env.step_seconds ends them", min=0, max=0.9)
    num_workers: int = option(2, "worker processes per rank, for users' environments", min=1, max=1024)
    max_failures: int = option(
        3, "episodes in a row that the environment fails in, which end the run; before, each is played again", min=1
    )


class EpisodeError(RuntimeError):
    """The environment failed: the episode has no reward. The text says how and where."""


def check_environment(name: str, kind: str = "environment") -> None:
    """Raise ConfigError if `name` cannot be an environment. Imports nothing."""
    if remote.is_address(name):
        remote.check_address(kind, name)
    elif name not in ENVIRONMENTS:
        user_files.check_name(kind, name, ENVIRONMENTS, ", or the http address of a service")


def resolve(name: str, ask: Callable[[str, bytes], bytes] = remote.ask) -> Environment:
    """Return an environment: built in, a user's `package.module:function` or `path/to/file.py:function`, or a service.

    `ask`: as in envs/service.py. It enters the folder of a user's file (user_files.py). Raises ConfigError if the name
    leads to none.
    """
    check_environment(name)
    if name not in ENVIRONMENTS and not remote.is_address(name):
        return user_files.load_function("environment", name, "(row, seed)")
    user_files.enter("")
    return ENVIRONMENTS[name].environment if name in ENVIRONMENTS else service(name, ask)


@dataclass
class Played:
    """What an episode has come to: with row and seed, all that it takes to replay it."""

    texts: list[str] = field(default_factory=list)  # after the prompt, and after each turn but the last
    actions: list[str] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)  # one a turn
    end: str = ""  # "stop": the environment has ended it; "turns": it has had all its turns

    @property
    def reward(self) -> float:
        return sum(self.rewards)

    def transcript(self) -> list[tuple[str, bool]]:
        """Return the texts after the prompt in order, each with whether the model wrote it."""
        given, written = [(text, False) for text in self.texts], [(action, True) for action in self.actions]
        return [piece for turn in zip_longest(given, written) for piece in turn if piece and piece != ("", False)]


class Episode(Played):
    """An environment at play: `act` sends it the text of a turn, until `end` says why the episode has ended.

    Raises EpisodeError when the environment raises, or gives what is not text or not a finite reward.
    """

    def __init__(self, environment: Environment, row: dict, seed: int, max_turns: int):
        super().__init__()
        self._max_turns = max_turns
        try:
            self._turns: Turns = environment(deepcopy(row), seed)
            if not isinstance(self._turns, Generator):
                raise TypeError("the environment is no generator function: nothing in it yields")
            self._advance(None)
        except (Exception, SystemExit, GeneratorExit) as error:
            raise self._failure(error) from error

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

    def catch_up(self, before: Played) -> None:
        """Replay the actions of an earlier episode. Raises EpisodeError unless its texts and rewards come again."""
        for action in before.actions:
            if not self.end:
                self.act(action)
        for turn, (old, new) in enumerate(zip_longest(before.texts, self.texts)):
            if old != new:
                raise EpisodeError(f"turn {turn}: a replay gives the text {new!r:.60}, and gave {old!r:.60} before")
        if self.rewards != before.rewards:
            raise EpisodeError(f"a replay gives rewards {self.rewards!r:.60}, and gave {before.rewards!r:.60} before")


def reply_tokens(text: str, tokenizer: Tokenizer, limit: int) -> list[int]:
    """Return the tokens of a given text, tokenised alone; if they are over `limit`, their middle is cut out.

    The text cannot spell special tokens, such as the end of a turn: it may come from anywhere.
    """
    most = limit * MAX_TOKEN_CHARACTERS
    if len(text) > most:
        text = text[: most // 2] + CUT + text[-most // 2 :]  # a megabyte would take seconds to tokenise
    ids, note = (tokenizer.encode(t, add_special_tokens=False, split_special_tokens=True) for t in (text, CUT))
    if len(ids) <= limit:
        return ids
    rest = limit - len(note)
    return [*ids[: rest - rest // 2], *note, *ids[len(ids) - rest // 2 :]]


if __name__ == "__main__":
    runpy.run_module("envs.player", run_name="__main__")  # no import: it imports this file
