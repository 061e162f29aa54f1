"""Episodes beside decoding: built-in environments play in this process, users' in worker processes that may be killed.

Services with an address are asked over HTTP, each episode by a thread that stands in the place of a worker.

An episode is a function of row, seed and actions. So a worker that hangs or dies takes none along: the pool has what
the episodes have come to, and the next process replays them.
"""

import itertools
import os
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from pathlib import Path
from typing import NamedTuple

from config import ConfigError
from environments import EnvConfig, Episode, EpisodeError, Played, resolve
from envs.games import ENVIRONMENTS
from envs.latency import Latency
from process.workers import Closing, Failure, Late, Worker, WorkerError
from reward import RewardConfig
from rewards import remote, user_files

TRIES = 3  # of a turn: a service that the environment needs may be back
PATIENCE = 50  # drawn failures of an episode in a row, after which they count as those of environments
TIDY_SECONDS = 1.0  # for environments to end their episodes, at the end
WORKER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "worker.py")


class Answer(NamedTuple):
    """The answer of an environment to a turn, or to the beginning of an episode."""

    text: str = ""  # that the model reads next, unless the episode has ended
    reward: float = 0.0  # of the turn
    end: str = ""  # as in `Played`
    error: str = ""  # the environment has failed
    is_late: bool = False  # because env.step_seconds were over
    is_drawn: bool = False  # by env.latency, env.slow or env.stop: the environment is sound


class Start(NamedTuple):
    """All that it takes to begin an episode, and to replay it."""

    name: str
    row: dict
    seed: int
    max_turns: int
    texts: Sequence[str] = ()  # these as in `Played`
    actions: Sequence[str] = ()
    rewards: Sequence[float] = ()


class Request(NamedTuple):
    key: int  # of the episode; TIDY: no episode
    start: Start
    action: str | None  # None: the beginning of the episode is wanted


TIDY = -1  # episodes that were forgotten are to be ended


@dataclass
class _Entry:
    key: int
    name: str
    row: dict
    seed: int
    played: Played = field(default_factory=Played)


class Episodes:
    """The episodes that are at play in one process."""

    def __init__(self, names: Iterable[str], ask: Callable[..., bytes] = remote.ask):
        # Left to right: `resolve` enters the folder of a user's file.
        self._environments = {name: (resolve(name, ask), user_files.entered) for name in names}
        self._episodes: dict[int, tuple[str, Episode]] = {}  # with the folder of its environment

    def answer(self, key: int, start: Sequence | None, action: str | None, ended: Iterable[int]) -> Answer:
        """Take a turn of an episode. `start` is None only where the episode should be at play here."""
        for other in ended:
            if found := self._episodes.pop(other, None):
                found[1].close()
        try:
            here = self._episodes.pop(key, None)
            folder, episode = here or self._begun(start)
            user_files.enter(folder)
            if action is not None:
                episode.act(action)
        except EpisodeError as error:
            return Answer(error=str(error), is_late=isinstance(error.__cause__, remote.LateError))
        if episode.end:
            return Answer(reward=episode.rewards[-1], end=episode.end)
        self._episodes[key] = folder, episode
        return Answer(episode.texts[-1], episode.rewards[-1] if episode.rewards else 0.0)

    def _begun(self, start: Sequence | None) -> tuple[str, Episode]:
        if start is None:
            raise EpisodeError("the worker was replaced")
        name, row, seed, max_turns, *before = start
        environment, folder = self._environments[name]
        user_files.enter(folder)
        episode = Episode(environment, row, seed, max_turns)
        if before[0]:
            episode.catch_up(Played(*before))
        return folder, episode


def try_environments(limits: RewardConfig, names: Iterable[str]) -> None:
    """Have a worker import users' environments, with its time limit. Raises ConfigError if it cannot."""
    for name in names:
        if name not in ENVIRONMENTS and not remote.is_address(name):
            worker = Worker(WORKER, [name], limits.worker_gib, limits.startup_seconds, threading.Event())
            try:
                worker.start(attempts=1)
            except WorkerError as error:
                raise ConfigError(" ".join(str(error).split())) from None
            finally:
                worker.kill()


class EnvPool:
    """Plays episodes: `begin` and `act` never wait, `poll` and `wait` return those that have been answered.

    For one caller thread. An environment that fails is tried again, then ends its own episode. Only workers that cannot
    be started, and `max_failures` failed episodes in a row, raise (WorkerError, from `poll` and `wait`).
    """

    def __init__(self, config: EnvConfig, limits: RewardConfig, names: Iterable[str], log: Path | None = None):
        """`log`: the file that takes all that users' environments print; None: it is printed to stderr."""
        names = set(names)
        self._config, self._keys, self._failures = config, itertools.count(), 0
        self._entries: dict[Hashable, _Entry] = {}
        self._asked: dict[int, tuple[Hashable, float]] = {}  # by key: ids of episodes, and when an answer may count
        self._latency = Latency(config.latency, config.slow, config.stop)
        self._held: list[tuple[float, int, Answer]] = []  # a heap: answers by the time at which they count
        self._again: Counter[Hashable] = Counter()  # how often episodes failed, until they end
        self._here = Episodes(names & ENVIRONMENTS.keys())
        self._results: queue.SimpleQueue[tuple[int, Answer] | Exception] = queue.SimpleQueue()
        self._queues: list[queue.SimpleQueue[Request | None]] = []
        self._threads: list[tuple[threading.Thread, bool]] = []  # and whether it asks services
        self._closing = threading.Event()
        services = sorted(filter(remote.is_address, names))
        users = sorted(names - ENVIRONMENTS.keys() - {*services})
        servers: list[Worker | _Client] = []
        for _ in range(config.num_workers if users else 0):
            servers.append(Worker(WORKER, users, limits.worker_gib, limits.startup_seconds, self._closing, log))
        of_services = range(len(servers), len(servers) + bool(services))
        if services:
            servers.append(_Client(services, config.step_seconds, limits.remote_retries, self._closing))
        #: The servers of an environment, by their places; the built-in ones are played here.
        self._places = dict.fromkeys(users, range(config.num_workers)) | dict.fromkeys(services, of_services)
        self._ended = [deque[int]() for _ in range(len(servers) + 1)]  # forgotten: each server, then `_here`, is told
        for place, server in enumerate(servers):
            self._queues.append(queue.SimpleQueue())
            held = set[int]()  # episodes at play there
            for _ in range(limits.remote_concurrency if place in of_services else 1):
                thread = threading.Thread(target=self._serve, args=(place, server, held), daemon=True)
                self._threads.append((thread, place in of_services))
                thread.start()

    def __enter__(self) -> "EnvPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin(self, id: Hashable, name: str, row: dict, seed: int, before: Played | None = None) -> None:
        """Begin an episode. With `before` it goes on from there, by a replay when a turn is to be answered."""
        entry = self._entries[id] = _Entry(next(self._keys), name, row, seed, before or Played())
        if not entry.played.texts:
            self._ask(id, None)
        elif len(entry.played.actions) == len(entry.played.texts):  # the answer to the last one was awaited
            self._ask(id, entry.played.actions.pop())

    def act(self, id: Hashable, action: str) -> None:
        """Send the text of a turn."""
        self._ask(id, action)

    def _ask(self, id: Hashable, action: str | None) -> None:
        entry = self._entries[id]
        played = entry.played
        now = [*played.texts], [*played.actions], [*played.rewards]  # copies: a thread reads them later
        start = Start(entry.name, entry.row, entry.seed, self._config.max_turns, *now)
        seconds, turn, limit = 0.0, len(played.actions), self._config.step_seconds
        if action is not None:
            seconds = self._latency.seconds(entry.seed, id, turn, self._again[id])
            played.actions.append(action)
        due = time.monotonic() + min(seconds, limit)
        self._asked[entry.key] = id, due
        place = self._place(entry)
        if seconds > limit:
            why = f"turn {turn + 1}: env.latency is over env.step_seconds = {limit:g}"
            late = Answer(error=why, is_late=True, is_drawn=True)
            heappush(self._held, (due, entry.key, late))
        elif place < 0:
            self._results.put((entry.key, self._here.answer(entry.key, start, action, self._take_ended(place))))
        else:
            self._queues[place].put(Request(entry.key, start, action))

    def _place(self, entry: _Entry) -> int:
        """Return the place of the server that plays the episode; -1: it is played here."""
        places = self._places.get(entry.name)
        return places[entry.key % len(places)] if places else -1

    def _take_ended(self, place: int) -> list[int]:
        ended = self._ended[place]
        taken = list[int]()
        with suppress(IndexError):  # several threads may take from one place
            while True:
                taken.append(ended.popleft())
        return taken

    @property
    def num_pending(self) -> int:
        return len(self._asked)

    def played(self, id: Hashable) -> Played:
        """Return what an episode has come to; its last action may not be answered yet."""
        return self._entries[id].played

    def poll(self) -> list[tuple[Hashable, Played, str]]:
        """Return the episodes that have been answered, with "" or the error that ended them. Never waits."""
        return self._collect(waits=False)

    def wait(self) -> list[tuple[Hashable, Played, str]]:
        """Wait until an episode is answered, unless none will be."""
        return self._collect(waits=True)

    def _collect(self, waits: bool) -> list[tuple[Hashable, Played, str]]:
        answered: list[tuple[Hashable, Played, str]] = []
        while self._asked and (result := self._next(waits and not answered)):
            key, answer = result
            if key not in self._asked:
                continue  # forgotten
            id, _ = self._asked.pop(key)
            entry = self._entries[id]
            played = entry.played
            if played.actions and not answer.error:
                played.rewards.append(answer.reward)
            if answer.end or answer.error:
                played.end = answer.end
                del self._entries[id]
                if answer.error:
                    self._end([entry])  # it may be at play still
                self._count(id, entry, answer.error, answer.is_late, answer.is_drawn)
            else:
                played.texts.append(answer.text)
            answered.append((id, played, answer.error))
        return answered

    def _next(self, waits: bool) -> tuple[int, Answer] | None:
        """Return an answer whose latency is over."""
        while True:
            seconds = self._held[0][0] - time.monotonic() if self._held else None
            if seconds is not None and seconds <= 0:
                return heappop(self._held)[1:]
            try:
                result = self._results.get(waits, seconds)
            except queue.Empty:
                if waits:
                    continue
                return None
            if isinstance(result, Exception):
                self._results.put(result)  # for the next call too
                raise result
            key, answer = result
            if key in self._asked:  # else forgotten
                heappush(self._held, (self._asked[key][1], key, answer))

    def fail(self, id: Hashable, error: str) -> None:
        """End an episode whose text cannot be read. Raises WorkerError as `poll` does."""
        entry = self._entries.pop(id)
        self._end([entry])
        self._count(id, entry, error)

    def _count(self, id: Hashable, entry: _Entry, error: str, is_late: bool = False, is_drawn: bool = False) -> None:
        """Count episodes that fail in a row. Raises WorkerError at the last of `max_failures`."""
        if error:
            self._again[id] += 1
            counts = not is_drawn or self._again[id] > PATIENCE
            self._failures += counts
        else:
            del self._again[id]
            self._failures, counts = 0, False
        if counts and self._failures == self._config.max_failures:
            failure = WorkerError(
                f"environments failed in {self._failures} episodes in a row, the last time: {error}, after the prompt "
                f"{str(entry.row.get('prompt'))[:60]!r}; correct them{', or raise env.step_seconds' * is_late}; where "
                f"they may fail more often, raise env.max_failures = {self._failures}"
            )
            self._results.put(failure)
            raise failure

    def forget(self, ids: Collection[Hashable], are_sound: bool = False) -> None:
        """End these episodes, whose answers are not wanted. `are_sound`: their environments have not failed."""
        entries = [self._entries.pop(id) for id in ids]
        for id in ids:
            del self._again[id]
        for entry in entries:
            self._asked.pop(entry.key, None)
        self._failures *= not are_sound
        self._end(entries)

    def _end(self, entries: Iterable[_Entry]) -> None:
        """Have servers end episodes, if they have them, before whatever else they do."""
        places = {entry.key: self._place(entry) for entry in entries}
        for key, place in places.items():
            self._ended[place].append(key)
        for place in {*places.values()} - {-1}:
            self._queues[place].put(Request(TIDY, Start("", {}, 0, 0), None))

    def close(self) -> None:
        """End all episodes, and kill the workers."""
        self.forget([*self._entries])
        for waiting in self._queues * len(self._threads):  # more than are taken
            waiting.put(None)
        deadline = time.monotonic() + TIDY_SECONDS
        for thread, _ in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        self._closing.set()
        deadline += TIDY_SECONDS  # for requests over HTTP, which have a limit of their own
        for thread, asks_services in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0) if asks_services else None)
        self._asked.clear()

    def _serve(self, place: int, server: "Worker | _Client", held: set[int]) -> None:
        """Body of a thread: every request that it takes, unless the episode is forgotten, ends in one result."""
        try:
            while (request := self._queues[place].get()) is not None:
                if request.key == TIDY:
                    self._tidy(place, server, held)
                elif request.key in self._asked:
                    answer = self._answered(request, self._take_ended(place), server, held)
                    if request.key not in self._asked:  # forgotten meanwhile, and perhaps before it was held
                        self._ended[place].append(request.key)
                        self._tidy(place, server, held)
                    self._results.put((request.key, answer))
        except Closing:
            pass
        except Exception as error:
            self._results.put(error)
        finally:
            server.kill()

    def _tidy(self, place: int, server: "Worker | _Client", held: set[int]) -> None:
        ended = self._take_ended(place)
        if held.intersection(ended):
            held.difference_update(ended)
            try:
                server.ask(Answer, (TIDY, None, None, ended), self._config.step_seconds)
            except Failure:
                held.clear()

    def _answered(self, request: Request, ended: list[int], server: "Worker | _Client", held: set[int]) -> Answer:
        key, start, action = request
        held.difference_update(ended)
        answer = Answer(error="it is not wanted")
        for tries in range(TRIES):
            if tries and key not in self._asked:
                break
            # A replay by itself: then this turn, if it hangs, has the time of one.
            messages: list[tuple] = [] if key in held else [(key, start, None, ended)]
            messages += [] if action is None else [(key, None, action, ended)]
            held.discard(key)
            try:
                for message in messages:
                    turns = 1 + len(start.actions) if message[1] else 1
                    answer = server.ask(Answer, message, turns * self._config.step_seconds)
                    if not server.is_running:  # it was good, but took too much memory
                        held.clear()
                        if message is not messages[-1]:
                            answer = Answer(error="to begin the episode takes more memory than reward.worker_gib")
                    if answer.error:
                        break
                else:
                    break
            except Failure as failure:
                held.clear()
                answer = Answer(error=str(failure), is_late=isinstance(failure, Late))
        if server.is_running and not (answer.end or answer.error):
            held.add(key)
        return answer


class _Client:
    """Plays the episodes of services, in the place of a worker."""

    is_running = True

    def __init__(self, names: list[str], seconds: float, retries: int, closing: threading.Event):
        self._closing = closing
        self._episodes = Episodes(names, partial(remote.ask, seconds=seconds, retries=retries, closing=closing))

    def ask(self, make: Callable[..., Answer], request: Sequence, seconds: float) -> Answer:
        """Take a turn. Each POST has a limit of its own, so `seconds` for all of them are not needed."""
        if self._closing.is_set():
            raise Closing
        return self._episodes.answer(*request)

    def kill(self) -> None:
        """Nothing outlives a request."""
