"""Plays an environment without a model: `python environments.py FILE:NAME --by human`, 100 episodes with `--check`."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from inspect import getdoc
from random import Random, SystemRandom

from config import ConfigError, load_config
from core import Environment
from data import DataConfig, labelled, read_rows
from environments import EnvConfig, Episode, EpisodeError, resolve
from envs.games import ENVIRONMENTS, Player
from envs.trial import EPISODES, tried
from process import command
from reward import RewardConfig
from rewards import user_files


@dataclass(frozen=True)
class Rows:
    data: DataConfig = field(default_factory=DataConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)


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


def played(
    environment: Environment, row: dict, player: Player, seed: int = 0, max_turns: int = EnvConfig.max_turns
) -> Episode:
    """Return an episode that the player has played to its end."""
    episode, rng = Episode(environment, row, seed, max_turns), Random(seed)
    while not episode.end:
        episode.act(player(row, episode.texts, episode.actions, rng))
    return episode


def transcript(name: str, number: int, seed: int, slip: float) -> list[tuple[str, bool]]:
    """Return the texts of a teacher who slips, each with whether it is to be learned: an example for a warm start."""
    game = ENVIRONMENTS[name]
    return played(game.environment, game.row(number), game.sloppy(slip), seed).transcript()


def play(environment: Environment, row: dict, seed: int, max_turns: int, player: Player) -> None:
    """Play an episode and print it, to a person with the environment's docstring."""
    if player is ask_human and environment.__doc__:
        print(labelled("about", getdoc(environment) or ""))
    for message in [row["prompt"]] if isinstance(row["prompt"], str) else row["prompt"]:
        print(labelled("prompt", message if isinstance(message, str) else f"{message['role']}: {message['content']}"))
    episode, rng = Episode(environment, row, seed, max_turns), Random(seed)
    while not episode.end:
        if episode.texts[-1]:
            print(labelled("given", episode.texts[-1]))
        action = player(row, episode.texts, episode.actions, rng)
        if player is not ask_human:
            print(labelled(f"turn {len(episode.texts)}", action))
        episode.act(action)
        if not episode.end and episode.rewards[-1]:
            print(labelled("reward", f"{episode.rewards[-1]:g}"))
    turns = len(episode.actions)
    print(f"reward {episode.reward:g} after {turns} turn{'s' * (turns > 1)} ({episode.end})")


def main(argv: list[str]) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="environments.py", description="Play an environment without a model.", allow_abbrev=False
    )
    parser.add_argument("environment", help=f"{', '.join(ENVIRONMENTS)}, or your own as FILE:NAME")
    parser.add_argument("--by", help="human (default), random; expert, teacher, sloppy of built-in ones; or FILE:NAME")
    parser.add_argument("--data", help="file of rows (JSONL, parquet), which your own environment needs")
    parser.add_argument(
        "--data.KEY",
        help="as for train.py, where rows need it: --data.prompt_field=question; so are --env.KEY and --reward.KEY",
        dest="_",
        metavar="VALUE",
    )
    parser.add_argument("--turns", type=int, help="of an episode, at most (env.max_turns)")
    parser.add_argument("--seed", type=int, help="of row, environment, player; drawn unless it is given")
    parser.add_argument(
        "--check", action="store_true", help=f"play {EPISODES} episodes (by random), and say how they went"
    )
    flags, overrides = parser.parse_known_args(argv)
    try:
        if flags.turns is not None and flags.turns < 1:
            raise ConfigError(f"--turns = {flags.turns} is too small: at least 1")
        environment = resolve(flags.environment)
        told = load_config(Rows, None, [f"--data.env={flags.environment}", *overrides])
        data, turns = told.data, flags.turns or told.env.max_turns
        player = player_named(flags.by or ("random" if flags.check else "human"), flags.environment)
        if flags.data:
            rows = [row.fields for row in read_rows(flags.data, "--data", data)]
        elif game := ENVIRONMENTS.get(flags.environment):
            rows = [game.row(n) for n in game.numbers()]
        else:
            raise ConfigError("--data: give the rows of your own environment, a JSONL or parquet file")
        if flags.check and flags.seed is not None:
            raise ConfigError(f"--seed has no effect with --check, which plays seeds 0 to {EPISODES - 1}; leave it out")
        seed = SystemRandom().randrange(10**6) if flags.seed is None else flags.seed
        if flags.check:
            config = replace(told.env, max_turns=turns)
            trial = tried(flags.environment, rows, player, config, told.reward)
            print(trial.table(config))
            return 0 if trial.is_fine else 1
        play(environment, Random(seed).choice(rows), seed, turns, player)
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
    command.run(main)
