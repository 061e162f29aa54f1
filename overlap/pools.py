"""Two pools of ranks: the first ones train while the others decode without end. (ROLL Flash, decoupled resources)

    decoding ranks                          training ranks
    decode until a batch is there           wait for it
    ------------------ the batch is handed over -----------------
    decode on, until the update is due      add up gradients, update
    ---------------- the weights are published ------------------

Both lines are collective over all ranks; between them each pool is a world of its own.
"""

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch.distributed as dist

import parallel
from core import Elsewhere, Group, Sample
from metrics import Clock
from model import Model
from parallel import World

POLL_SECONDS = 0.01  # between two looks whether the other pool is ready
T = TypeVar("T")
made = itertools.count()  # pools of this process: several jobs may share the ranks


@dataclass(frozen=True)
class Pools:
    """The pools of a run, on one of its ranks. All methods but `signal` and `has` are collective over all ranks."""

    world: World  # all ranks
    own: World  # of this rank's pool
    num_trainers: int
    store: Any  # of these pools alone: torch's dist.Store, whose stubs are not complete

    @property
    def trains(self) -> bool:
        return self.world.rank < self.num_trainers

    # ---- what each waits for -------------------------------------------------------------------------------------

    def signal(self, event: str) -> None:
        """Tell the other pool of an event, by name. The first rank of a pool speaks for it."""
        if self.own.is_main:
            self.store.set(event, "told")

    def has(self, event: str) -> bool:
        """Return whether the other pool has told of an event. Ranks of a pool may learn it at different times."""
        return self.store.check([event])

    def wait_for(self, event: str, clock: Clock) -> None:
        """Wait for an event of the other pool, for as long as that shows signs of life: `beat`."""
        beats, since = -1, time.monotonic()
        while not self.has(event):
            if (newest := self.store.add("beats", 0)) != beats:
                beats, since = newest, time.monotonic()
                clock.move()
            if time.monotonic() - since > self.world.timeout_seconds:
                waited = f"rank {self.world.rank} waited {self.world.timeout_seconds:g} s"
                raise TimeoutError(f"{waited} for {event!r} and a sign of life of the other pool's ranks")
            time.sleep(POLL_SECONDS)

    def beat(self) -> None:
        """Show that this pool goes on."""
        if self.own.is_main:
            self.store.add("beats", 1)

    # ---- what travels --------------------------------------------------------------------------------------------

    def hand_over(self, groups: Sequence[Group], value: T, readers: int) -> tuple[list[Group], T]:
        """Return the decoding ranks' groups and their value, on every rank.

        The tokens of the samples are brought to the first `readers` ranks, in turns. What training ranks give is not
        looked at.
        """
        rank, first = self.world.rank, self.num_trainers
        told = [_at(group, [_owner(s, self.own.rank) + first for s in group.samples]) for group in groups]
        told, value = self.of_decoders((told, value))
        if not self.trains:
            samples = [sample for group in groups for sample in group.samples]
            parallel.bring_tokens(self.world, (), [s for s in samples if not isinstance(s.token_ids, Elsewhere)])
            return list(groups), value
        headers = [sample for group in told for sample in group.samples]
        mine = [i for i in range(len(headers)) if i % readers == rank]
        brought = parallel.bring_tokens(self.world, [headers[i] for i in mine], ())
        dealt = [parallel.header_of(sample, i % readers) for i, sample in enumerate(headers)]
        for i, sample in zip(mine, brought, strict=True):
            dealt[i] = sample
        rest = iter(dealt)
        return [replace(group, samples=tuple(itertools.islice(rest, len(group.samples)))) for group in told], value

    def of_decoders(self, value: T) -> T:
        """Return the first decoding rank's value on every rank."""
        is_first = self.world.rank == self.num_trainers
        return cast(T, parallel.gather_objects(self.world, value if is_first else None)[self.num_trainers])

    def publish(self, model: Model, value: T) -> T:
        """Give the first training rank's weights to all; return its value."""
        parallel.broadcast_tensors(self.world, [weight.detach() for weight in model.parameters()])
        return parallel.broadcast_object(self.world, value)


def _owner(sample: Sample, here: int) -> int:
    return sample.token_ids.rank if isinstance(sample.token_ids, Elsewhere) else here


def _at(group: Group, ranks: Sequence[int]) -> Group:
    """Return a group without tokens, which are on `ranks`."""
    headers = (parallel.header_of(sample, rank) for sample, rank in zip(group.samples, ranks, strict=True))
    return replace(group, samples=tuple(headers))


def make_pools(world: World, num_trainers: int) -> Pools:
    """Return the pools in which the first `num_trainers` ranks train. Collective."""
    parts = parallel.subsets(world, [range(num_trainers), range(num_trainers, world.size)])
    [own] = [part for part in parts if part is not None]
    return Pools(world, own, num_trainers, dist.PrefixStore(f"pools {next(made)}", world.store))
