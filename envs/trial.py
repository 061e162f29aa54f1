"""Plays an environment as a run does, with a player in the place of the model, and says how the episodes went."""

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random
from statistics import mean, median

from config import ConfigError
from environments import EnvConfig, EpisodeError, Played
from envs.chat import Reader
from envs.games import Player
from envs.pool import EnvPool
from process.workers import WorkerError
from reward import RewardConfig

EPISODES = 100
SECONDS = 60.0  # no episode begins after them
ANY = -1  # the last token of a turn: not its end


@dataclass
class Trial:
    """What has come of the episodes of one environment."""

    name: str
    ended: list[Played] = field(default_factory=list)
    lengths: list[list[int]] = field(default_factory=list)  # of the texts of each: tokens, or characters
    seconds: list[float] = field(default_factory=list)  # of each turn, on its way to a worker and back
    failed: Counter[str] = field(default_factory=Counter)
    differs: Counter[str] = field(default_factory=Counter)  # replays

    @property
    def is_fine(self) -> bool:
        return not (self.failed or self.differs)

    def table(self, config: EnvConfig, max_tokens: int = 0) -> str:
        """Return it in lines. `max_tokens`: of an episode's texts and turns together; 0: lengths are characters."""
        unit, most = ("tokens", config.max_reply_tokens) if max_tokens else ("characters", 0)
        rows: list[tuple[str, list[float], float]] = [
            ("reward", [episode.reward for episode in self.ended], 0),
            ("turns", [len(episode.actions) for episode in self.ended], config.max_turns),
            (f"{unit} of a text", [n for lengths in self.lengths for n in lengths], most),
            (f"{unit} of all texts", [sum(lengths) for lengths in self.lengths], max_tokens),
            ("milliseconds of a turn", [1e3 * seconds for seconds in self.seconds], 1e3 * config.step_seconds),
        ]
        number = self.failed.total() + len(self.ended)
        heads = "".join(f"{head:>10}" for head in ("mean", "least", "median", "most", "limit"))
        within = f" within {SECONDS:g} s" if number < EPISODES else ""
        lines = [f"{number} episodes of {self.name}{within}"] + [f"{'':<26}{heads}"] * bool(self.ended)
        for label, values, largest in rows if self.ended else ():
            shown = [*map(_short, (mean(values), min(values), median(values), max(values)))]
            shown += [_short(largest)] if largest else []
            lines.append(f"  {label:<24}" + "".join(f"{value:>10}" for value in shown))
        ends = Counter(episode.end for episode in self.ended).most_common()
        lines += [f"  {'ended by':<24}  " + ", ".join(f"{end} {n}" for end, n in ends)] if ends else []
        if self.failed:
            lines.append(f"  {'failed':<24}  {self.failed.total()} of {number}")
            lines += [f"    {count} x {error}" for error, count in self.failed.most_common(5)]
        if self.differs:
            lines += [
                f"warning: {self.differs.total()} of {len(self.ended)} episodes cannot be replayed from their actions:",
                f"    {self.differs.most_common(1)[0][0]}",
                "  Those that move to another rank, lose their worker or are resumed begin again, and the run is no",
                "  function of its seed, also with env.clock = steps. Draw from random.Random(seed), keep all state in",
                "  the generator, and read no clock, file or service that changes.",
            ]
        elif self.ended:
            lines.append(f"  {'replayed':<24}  {len(self.ended)} of {len(self.ended)}, to the same texts and rewards")
        return "\n".join(lines)


def _short(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def tried(
    name: str,
    rows: Sequence[dict],
    player: Player,
    config: EnvConfig,
    limits: RewardConfig,
    reader: Reader | None = None,
    room: float = math.inf,
) -> Trial:
    """Play and replay episodes with seeds of their own. With a reader their lengths are tokens, else characters.

    `room`: tokens of an episode, at most. Raises ConfigError if no worker process can be started.
    """
    trial, end = Trial(name), time.monotonic() + SECONDS
    try:
        config = replace(config, max_failures=EPISODES + 1, latency="", slow="", stop=0.0)
        with EnvPool(config, limits, [name]) as pool:
            for seed in range(EPISODES):
                if time.monotonic() < end:
                    _try(trial, pool, rows[seed * len(rows) // EPISODES], seed, player, reader, room)
    except WorkerError as error:
        raise ConfigError(str(error)) from None
    return trial


def _length(text: str, turn: int, reader: Reader | None, room: float) -> int:
    """Return the tokens of the text after a turn, or its characters. Raises EpisodeError if it cannot be read."""
    if reader:
        return len(reader.tokens(text, ANY if turn else None, room))
    if turn and not text:
        raise EpisodeError(f"turn {turn}: gives no text, which only a chat template makes readable")
    return len(text)


def _try(trial: Trial, pool: EnvPool, row: dict, seed: int, player: Player, reader: Reader | None, room: float) -> None:
    """Play an episode to its end, and its last turn again in a replay."""
    rng = Random(seed)
    pool.begin(seed, trial.name, row, seed)
    [(_, episode, error)] = pool.wait()
    while not (error or episode.end):
        action = player(row, episode.texts, episode.actions, rng)
        start = time.perf_counter()
        pool.act(seed, action)
        [(_, episode, error)] = pool.wait()
        trial.seconds.append(time.perf_counter() - start)
    try:
        lengths = [_length(text, turn, reader, room) for turn, text in enumerate(episode.texts)]
    except EpisodeError as unread:
        error = error or str(unread)
    if error:
        trial.failed[error] += 1
        return
    trial.ended.append(episode)
    trial.lengths.append(lengths)
    pool.begin(-1, trial.name, row, seed, Played([*episode.texts], [*episode.actions], episode.rewards[:-1]))
    [(_, again, error)] = pool.wait()
    if not again.end and not error:
        pool.forget([-1])
    if error or again != episode:
        trial.differs[error or "the last turn ends otherwise"] += 1
