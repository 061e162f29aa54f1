"""Phases of a job whose devices other jobs use too: it works when it has the permit for them. (RollMux, section 6)

    with phases("rollout"):
        ...                  # has the permit of all workers of the rollout, and its state on the device

Between two phases all that lasts waits in host memory (`Job.release`), but processes, communicators and environments
stay: another phase begins as soon as the state is back. Without a group a phase is nothing at all.
"""

import itertools
import json
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch.distributed as dist

import parallel
from config import option
from metrics import Clock
from overlap.pools import wait_until, watch
from parallel import World
from process.permits import SECRET, Client, GroupError

made = itertools.count()  # of this process: several jobs may share a store


@dataclass(frozen=True)
class GroupConfig:
    server: str = option(
        "", "server of the jobs that share devices, which mux.py starts: path of its socket, or host:port; empty: alone"
    )
    job: str = option("", "name of this job there; empty: that of the folder run.dir")
    wait_seconds: float = option(86_400.0, "longest wait for a permit", above=0.0, max=1e7)
    tail_share: float = option(
        0.0,
        "share of a round's responses after which the rest moves to few replicas, if other jobs wait for the ranks of "
        "the others; rounds then begin on a part of the ranks too; 0: all begin and end together (the paper's is 0.8)",
        min=0.0,
        max=1.0,
    )


class Shared(Protocol):
    """A job that can leave the device."""

    is_released: bool

    def release(self) -> None: ...
    def take_back(self) -> None: ...


class Phases:
    """The phases of a job, on one of its ranks. All ranks enter a phase together.

    Where ranks train and decode apart, each pool has a permit of its own. In a phase the ranks of the other pool have
    only waited for the permit too: never inside a collective, whose time-out may be shorter than that wait.

    A rollout in parts begins as soon as the first replica has its permit; more come later, and some leave early.
    """

    def __init__(self, config: GroupConfig, world: World, folder: Path, num_trainers: int, clock: Clock):
        """Join the group. `num_trainers`: the first ranks that only train; 0: all do both. Raises GroupError."""
        self.config, self.world, self.clock = config, world, clock
        self.askers = {"start": 0, "train": 0, "rollout": num_trainers}  # the rank that asks for each phase's permit
        self.pool = "all" if not num_trainers else "train" if world.rank < num_trainers else "rollout"
        self.store = dist.PrefixStore(f"phases {next(made)}", world.store or dist.HashStore())
        self.client: Client | None = None
        self.job: Shared | None = None  # until it is made nothing can be on the device
        self.own = world  # ranks of this one's pool
        self.name = ""  # of the newest phase
        self.part = 0  # ranks of a replica, in a phase that has begun in parts
        self.ranks: list[int] = []  # of the pool, that have their permit
        self.count = 0
        if config.server and world.rank in self.askers.values():
            name = config.job or folder.resolve().name
            given = os.environ.get(SECRET, ""), config.wait_seconds, self._show_life
            self.client = Client(config.server, name, self.pool, *given)

    def join(self, job: Shared, own: World) -> None:
        """Have a job leave the device at the end of each phase. `own`: the ranks of this one's pool."""
        self.job, self.own = job, own

    @contextmanager
    def __call__(self, phase: str, part: int = 0, name: str = "") -> Iterator[None]:
        """Be in a phase: start, rollout or train. Collective over all ranks of the job. Raises GroupError.

        `part`: ranks of a replica, which can begin without the others if `group.tail_share` says so; 0: never.
        `name`: under which its seconds are recorded, if it is no step's: admission plans with steps.
        """
        if not self.config.server:
            yield
            return
        part = part if self.config.tail_share else 0
        self.name = name = name or phase
        with self.clock.span(f"permit_{name}"):
            self._wait_for_permit(phase, part)
        if phase != "start" and self.pool not in ("all", phase):
            yield
            return
        self.part = part
        with self.clock.span(f"switch_{name}"):
            self._take_back()
        with self.clock.span(f"phase_{name}"):
            yield
        with self.clock.span(f"switch_{name}"):
            assert self.job, "no job has joined"
            if not self.job.is_released:  # else this rank has left, or has not come
                self.job.release()
            parallel.barrier(self.world if phase == "start" else self.own)
        self.part = 0
        if self.client and self.world.rank == self.askers[phase]:
            self.client.release()

    # ---- a rollout in parts ---------------------------------------------------------------------------------------

    def news(self) -> tuple[list[int], list[list[int]]]:
        """Return the ranks that have their permits by now, and sets of them that would let another job begin.

        Only the pool's first rank knows them. It does not wait.
        """
        if not self.client:
            return [], []
        self.client.look()
        return self.client.ranks, self.client.awaited

    def come(self, ranks: list[int]) -> None:
        """Have the ranks of the pool with a permit on the device. No collective: others go on."""
        self.ranks = ranks
        with self.clock.span(f"switch_{self.name}"):
            self._take_back()

    def leave(self, ranks: Collection[int]) -> None:
        """Have ranks of the pool leave the device before the others, or never come. Collective in the pool."""
        with self.clock.span(f"switch_{self.name}"):
            assert self.job, "no job has joined"
            if self.own.rank in ranks and not self.job.is_released:
                self.job.release()
            parallel.barrier(self.own)
        if self.client:
            self.client.release([*ranks])

    def _take_back(self) -> None:
        if self.job and self.job.is_released and self.own.rank in self.ranks:
            self.job.take_back()

    def _wait_for_permit(self, phase: str, part: int) -> None:
        self.count += 1
        event = f"permit {self.count}, {phase}"
        if self.client and self.world.rank == self.askers[phase]:
            try:
                self.client.request(phase, part)
            except GroupError as error:
                self.store.set("lost", str(error))
                raise
            self.store.set(event, json.dumps(self.client.ranks))
        else:
            has_come = watch(self.world, self.store, event, "signs", f"rank {self.askers[phase]}", self.clock)
            wait_until(lambda: self.store.check(["lost"]) or has_come())
            if self.store.check(["lost"]):  # or these ranks would wait for the others until their time-out
                raise GroupError(self.store.get("lost").decode())
        self.ranks = json.loads(self.store.get(event))

    def _show_life(self) -> None:
        """Tell the ranks of both pools that this one waits, with a server that shows life."""
        self.store.add("signs", 1)
        self.clock.move()

    def __enter__(self) -> "Phases":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.client and kind:
            self.client.close()
        elif self.client:
            self.client.leave()
