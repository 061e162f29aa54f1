"""Responses of several turns, and the seconds in which environments answer them. Pure.

At a turn's end a response leaves its row; its pages are parked as the engine parks them (policies/replica.py). The
seconds of the answer, drawn as in real runs, are added to the clock; then the response waits for a row again.
"""

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from random import Random
from typing import Any

from config import ConfigError, option
from core import Finished, SampleId
from envs.latency import Latency
from policies.replica import Replica, Response


@dataclass(frozen=True)
class EpisodesConfig:
    turns: int = option(0, "median turns of an episode, which share its sampled tokens; 0: no environment", min=0)
    turn_spread: float = option(0.0, "spread of turns over episodes, in natural logarithms", min=0)
    max_turns: int = option(128, "turns of an episode, at most", min=1)
    reply_tokens: int = option(64, "tokens of a reply", min=1)
    latency: str = option("", "seconds of a reply: normal(10,5), lognormal(10,5) or recorded FILE; empty: none")
    slow: str = option("", "share of episodes whose latency is longer, and how many times: 0.01x10; empty: none")
    stop: float = option(0.0, "share of episodes that are never answered", min=0, max=0.9)
    step_seconds: float = option(600.0, "time limit of a reply; an episode that reaches it begins again", above=0)
    barrier: bool = option(False, "replies take effect together, once all episodes have ended their turns")


def check_episodes(config: EpisodesConfig, others: Mapping[str, bool]) -> None:
    """Raise ConfigError on settings without effect, and on `others` that are on but not played with episodes."""
    if not config.turns and config != EpisodesConfig():
        raise ConfigError("[env] has no effect with env.turns = 0; give the turns of an episode, or leave it out")
    for rule in (rule for rule, is_on in others.items() if config.turns and is_on):
        raise ConfigError(f"env.turns = {config.turns}: the simulator plays no episodes with {rule}")


@dataclass(slots=True, eq=False)
class Episode(Response):
    """A response of several turns. `length` is that of all together."""

    turns: Sequence[range] = field(kw_only=True)  # the places of each one's tokens; those between are given
    seed: int = field(kw_only=True)  # of its latency
    turn: int = 0
    attempt: int = 0  # how often it has begun again

    @property
    def sampled(self) -> int:
        return sum(map(len, self.turns))

    @property
    def ends(self) -> int:
        return self.start + self.turns[self.turn].stop - self.done

    @property
    def is_last(self) -> bool:
        return self.turn + 1 == len(self.turns)

    def go_on(self) -> None:
        self.turn += 1
        self.done = self.turns[self.turn].start

    def begin_again(self) -> None:
        self.turn = self.done = 0
        self.attempt += 1


class Episodes:
    """Draws the episodes of a run, and the seconds of their replies."""

    def __init__(self, config: EpisodesConfig, seed: int, limit: int):
        """`limit`: tokens of an episode, replies included."""
        self.config, self.seed, self.limit = config, seed, limit
        self.latency = Latency(config.latency, config.slow, config.stop)

    def episode(self, id: SampleId, prompt_tokens: int, sampled: int, step: int) -> Episode:
        """Return an episode whose turns share `sampled` tokens evenly; the last is that after which none has room."""
        c, rng = self.config, Random(f"turns {self.seed} {id} {step}")
        wanted = round(c.turns * math.exp(c.turn_spread * rng.gauss()))
        count = max(min(wanted, c.max_turns, sampled), 1)
        turns: list[range] = []
        for i in range(count):
            start = turns[-1].stop + c.reply_tokens if turns else 0
            if start >= self.limit:
                break
            tokens = sampled * (i + 1) // count - sampled * i // count
            turns.append(range(start, min(start + tokens, self.limit)))
        return Episode(id, prompt_tokens, turns[-1].stop, turns=turns, seed=rng.getrandbits(32))

    def seconds(self, episode: Episode) -> tuple[float, bool]:
        """Return the seconds from the end of a turn to the reply, and whether it comes within the time limit."""
        seconds = self.latency.seconds(episode.seed, episode.id, episode.turn, episode.attempt)
        return min(seconds, self.config.step_seconds), seconds <= self.config.step_seconds


class EpisodeReplica(Replica):
    """A replica whose responses are episodes: they have no row while their environment answers."""

    def __init__(self, episodes: Episodes, *given: Any):
        """`given`: the arguments of `Replica`."""
        super().__init__(*given)
        self.episodes = episodes
        self.awaited: list[tuple[float, SampleId, Episode, bool]] = []  # heap by the clock of the reply; see `seconds`
        self.released = 0.0  # with a barrier: replies take effect up to this clock
        self.failed = 0  # episodes that began again

    def remove(self, ids: Set[SampleId]) -> list[Response]:
        gone: list[Response] = [episode for _, id, episode, _ in self.awaited if id in ids]
        self.awaited = [reply for reply in self.awaited if reply[1] not in ids]
        heapify(self.awaited)
        return gone + super().remove(ids)

    def next_event(self) -> float:
        """Also the iteration at whose end a reply is there."""
        event = super().next_event()
        if event == math.inf or not self.awaited or self.episodes.config.barrier:
            return event
        return min(event, self.iteration + self._steps_until(self.awaited[0][0]))

    def run_until(self, iteration: float) -> list[tuple[Finished, float]]:
        return self._take_replies() + super().run_until(iteration)

    def _end(self) -> list[tuple[Finished, float]]:
        for episode in self._take_ended():
            assert isinstance(episode, Episode)
            self.park(episode)
            seconds, answers = self.episodes.seconds(episode)
            heappush(self.awaited, (self.clock + seconds, episode.id, episode, answers))
        return self._take_replies()

    def _take_replies(self) -> list[tuple[Finished, float]]:
        """Let episodes go on whose reply is there; return those that have ended."""
        ended = []
        until = self.released if self.episodes.config.barrier else self.clock
        while self.awaited and self.awaited[0][0] <= until:
            _, id, episode, answers = heappop(self.awaited)
            if answers and not episode.is_last:
                episode.go_on()
                self.add(episode)
                continue
            self.forget([id])
            self.has_begun = False
            if answers:
                ended.append((Finished(self.iteration, id, episode.length), self.clock))
            else:
                episode.begin_again()
                self.failed += 1
                self.add(episode)
        return ended

    def _steps_until(self, clock: float) -> float:
        """Return the steps after which the replica's clock is there."""
        if self.new:
            return 1  # a step that computes contexts
        rows = len(self.running)
        step, token = self.times.costs(rows)
        growth = token * rows / 2  # n steps take n * first + n * n * growth seconds
        first = step + token * (self.base + rows * self.iteration) - growth
        seconds = max(clock - self.clock, 0.0)
        pace = (first + math.sqrt(first * first + 4 * growth * seconds)) / 2
        return max(math.ceil(seconds / pace), 1) if pace > 0 else math.inf


def skip_idle(replicas: Iterable[Replica], until: float = math.inf) -> bool:
    """Where no replica has anything to decode, let time pass until a reply is there; with a barrier, until all are.

    Returns whether replies are awaited.
    """
    idle = [r for r in replicas if isinstance(r, EpisodeReplica)]
    replies = [at for r in idle for at, *_ in r.awaited]
    if replies and all(r.next_event() == math.inf for r in idle):
        last = max(replies) if idle[0].episodes.config.barrier else min(replies)
        clock = max(max(r.clock for r in idle), min(last, until))
        for replica in idle:
            replica.clock = replica.released = clock
    return bool(replies)


def episodes_record(replicas: Iterable[Replica]) -> dict[str, dict[str, int]]:
    """Return what the record of a round says of its episodes: nothing where there are none."""
    played = [r for r in replicas if isinstance(r, EpisodeReplica)]
    tokens = {"resumed_tokens": sum(r.resumed for r in played), "recomputed_tokens": sum(r.recomputed for r in played)}
    return {"episodes": {"failed": sum(r.failed for r in played), **tokens}} if played else {}
