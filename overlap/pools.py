"""Two pools of ranks: the first ones only train, the others only decode. (ROLL Flash, decoupled resources)

    decoding ranks                          training ranks
    decode until a batch is there           wait for it
    ------------------ the batch is handed over -----------------
    wait for the update; an endless         add up gradients, update
    rollout decodes on until it is due
    ---------------- the weights are published ------------------

Both lines are collective over all ranks; between them each pool is a world of its own.
"""

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

import parallel
from core import Elsewhere, Group, Sample
from metrics import Clock, Record
from model import Model
from overlap.weights import WeightSync
from parallel import World

POLL_SECONDS = 0.01  # between two looks whether the other pool is ready
T = TypeVar("T")
made = itertools.count()  # pools of this process: several jobs may share the ranks


@dataclass
class Pools:
    """The pools of a run, on one of its ranks. What travels is collective over all ranks."""

    world: World  # all ranks
    own: World  # of this rank's pool
    num_trainers: int
    store: Any  # of these pools alone: torch's dist.Store, whose stubs are not complete
    clock: Clock  # of this rank
    shown: float = -math.inf  # when this pool showed its newest sign of life
    synced: Record = field(default_factory=dict)  # of the newest `publish`

    @property
    def trains(self) -> bool:
        return self.world.rank < self.num_trainers

    # ---- what each waits for -------------------------------------------------------------------------------------

    def signal(self, event: str) -> None:
        """Tell the other pool of an event, by name. The first rank of a pool speaks for it."""
        if self.own.is_main:
            self.store.set(event, "told")

    def watch(self, event: str) -> Callable[[], bool]:
        """Return a function that says whether the other pool has told of an event; see `watch` below."""
        who = "the ranks that " + ("decode" if self.trains else "train")
        return watch(self.world, self.store, event, f"signs {not self.trains}", who, self.clock)

    def wait_for(self, event: str) -> None:
        """Wait for an event of the other pool; errors as those of `watch`."""
        wait_until(self.watch(event))

    def show_life(self) -> None:
        """Tell the other pool that this one goes on, whenever its first rank's clock moves."""
        now = time.monotonic()
        if self.own.is_main and now > self.shown + min(1.0, self.world.timeout_seconds / 20):
            self.shown = now
            with contextlib.suppress(RuntimeError):  # the store is gone with its rank: the next collective tells
                self.store.add(f"signs {self.trains}", 1)

    # ---- what travels --------------------------------------------------------------------------------------------

    def hand_over(self, event: str, groups: Sequence[Group], value: T, readers: int) -> tuple[list[Group], T]:
        """Return the decoding ranks' groups and their value, on every rank; training ranks wait for the event.

        The tokens of the samples are brought to the first `readers` ranks, in turns. What training ranks give is not
        looked at.
        """
        self.wait_for(event) if self.trains else self.signal(event)
        rank, samples = self.world.rank, [sample for group in groups for sample in group.samples]
        headers = [parallel.header_of(sample, _owner(sample, self.own.rank) + self.num_trainers) for sample in samples]
        headers, (told, value) = self.of_decoders((headers, (parallel.with_samples(groups, headers), value)))
        if not self.trains:
            parallel.bring_tokens(self.world, (), [s for s in samples if not isinstance(s.token_ids, Elsewhere)])
            return list(groups), value
        dealt = [parallel.header_of(sample, i % readers) for i, sample in enumerate(headers)]
        mine = slice(rank, None, readers) if rank < readers else slice(0)
        dealt[mine] = parallel.bring_tokens(self.world, headers[mine], ())
        return parallel.with_samples(told, dealt), value

    def of_decoders(self, value: T) -> T:
        """Return the first decoding rank's value on every rank."""
        is_first = self.world.rank == self.num_trainers
        return cast(T, parallel.gather_objects(self.world, value if is_first else None)[self.num_trainers])

    def publish(self, model: Model, value: T) -> T:
        """Give the training ranks' weights, the same on each, to the decoding ranks.

        Decoding ranks may have released theirs; then these arrive in host memory. Returns the first training rank's
        value. `synced` has the bytes that crossed between the pools, on all ranks the same.
        """
        weights = [*model.parameters()]
        sent = WeightSync(self.world, self.own, self.num_trainers).send(weights, self.clock.move)
        values, counts = zip(*parallel.gather_objects(self.world, (value, sent)), strict=True)
        self.synced = {"sync_bytes": sum(counts), "model_bytes": sum(weight.nbytes for weight in weights)}
        return values[0]


def watch(world: World, store: Any, event: str, signs: str, who: str, clock: Clock) -> Callable[[], bool]:
    """Return a function that says whether an event is in the store.

    Ranks may learn it at different times. `signs` names a number there that changes as long as others show life. The
    function raises TimeoutError when `who` has shown none for the world's time-out.
    """
    seen, since = 0, time.monotonic()

    def has_come() -> bool:
        nonlocal seen, since
        if store.check([event]):
            return True
        if (newest := store.add(signs, 0)) != seen:
            seen, since = newest, time.monotonic()
            clock.moves += 1  # without `move`: waiting is no sign of life
        if time.monotonic() - since > world.timeout_seconds:
            raise TimeoutError(
                f"rank {world.rank} waited for {event!r} and saw no sign of life of {who} for run.timeout_seconds = "
                f"{world.timeout_seconds:g}"
            )
        return False

    return has_come


def wait_until(has_come: Callable[[], bool]) -> None:
    while not has_come():
        time.sleep(POLL_SECONDS)


def _owner(sample: Sample, here: int) -> int:
    return sample.token_ids.rank if isinstance(sample.token_ids, Elsewhere) else here


def make_pools(world: World, num_trainers: int, clock: Clock) -> Pools:
    """Return the pools in which the first `num_trainers` ranks train; `clock` times this rank's work. Collective."""
    parts = parallel.subsets(world, [range(num_trainers), range(num_trainers, world.size)])
    [own] = [part for part in parts if part is not None]
    pools = Pools(world, own, num_trainers, dist.PrefixStore(f"pools {next(made)}", world.store), clock)
    clock.on_move = pools.show_life
    # NCCL connects two ranks, and allocates, when they first send: before pages take the rest of the device.
    WeightSync(world, own, num_trainers).send([torch.zeros(num_trainers, device=world.device)], clock.move)
    return pools
