"""Reports which ranks hold up a run: each shows signs of life, and a long wait is reported before its time-out."""

import contextlib
import faulthandler
import json
import math
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Protocol

import torch.distributed as dist

import parallel
from parallel import World

REPORT = 0.8  # share of the time-out after which a wait is reported
FAILED, FAILED_SECONDS = "failed", 10.0  # the key of a rank that has failed, and how long others go on on a GPU


def tell_failure(world: World) -> None:
    """Let the watchdogs of the other ranks know that this one ends by an error."""
    assert world.store, "a rank among others has a store"
    world.store.set(FAILED, f"{world.rank} {time.time_ns()}")


def told_failure(store: dist.Store) -> str:
    """Return what `tell_failure` has said last, perhaps before torchrun's restart; "" for nothing."""
    return store.get(FAILED).decode() if store.check([FAILED]) else ""


class Place(Protocol):
    """The stage of a rank's work."""

    stages: list[str]  # the innermost is last
    moves: int  # changes as work goes on
    step: int


class Watchdog:
    """A thread of each rank: posts the rank's stage, and reports a wait that is close to the time-out.

    The report names every rank that shows no life, and the stages of all others. The first rank that is alive and waits
    prints it, once for each wait; then all ranks write the stacks of their threads to `folder`, even if a call holds
    the interpreter for so long that this thread cannot run. On a GPU it also ends a rank whose wait for a lost rank is
    over the time-out, and one that goes on though another rank has failed: NCCL would wait for that for ever.
    """

    def __init__(self, world: World, place: Place, folder: Path):
        """`world` has a store, as every one of several ranks."""
        self.rank, self.size, self.timeout, self.place = world.rank, world.size, world.timeout_seconds, place
        # A connection of its own: the main thread may wait on the world's.
        self.store: dist.Store = world.store.clone()
        self.before = told_failure(self.store)
        self.path = folder / f"rank_{self.rank}.txt"
        self.every = min(1.0, self.timeout / 20)
        # Gloo ends a wait with an error. NCCL never ends the wait for a collective that a CUDA graph holds.
        self.ends_process = world.device.type == "cuda"
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self.seen: dict[int, tuple[dict, float]] = {}  # each rank's newest sign of life and when it was new

    def __enter__(self) -> "Watchdog":
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.file = open(self.path, "w", encoding="utf-8")  # noqa: SIM115 - faulthandler needs it open
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join()
        faulthandler.cancel_dump_traceback_later()
        self.file.close()
        with contextlib.suppress(OSError):  # others have not ended yet, or have written
            if not self.path.stat().st_size:
                self.path.unlink()
                self.path.parent.rmdir()

    def _run(self) -> None:
        try:
            self._watch()
        except Exception as error:  # the store's machine is gone: with gloo the main thread will notice it
            print(f"rank {self.rank}: the watchdog has ended: {error}", file=sys.stderr, flush=True)
            if self.ends_process and not self.ended.wait(FAILED_SECONDS):
                parallel.abandon(code=1)

    def _watch(self) -> None:
        store, count, moves, still_since, reported, dumped = self.store, 0, -1, time.monotonic(), False, b"0"
        ends = math.inf  # when this rank ends for another's failure
        while not self.ended.wait(self.every):
            faulthandler.dump_traceback_later(REPORT * self.timeout, file=self.file)
            count, now = count + 1, time.monotonic()
            if self.place.moves != moves:
                moves, still_since, reported = self.place.moves, now, False
            still = now - still_since
            self._post(count, still)
            if still > self.timeout / 2:
                self._look(now)
            if still > REPORT * self.timeout and not reported and self._is_first(now):
                print(self.report(still, now), file=sys.stderr, flush=True)
                store.add("dumps", 1)
                reported = True
            gone = [rank for rank in range(self.size) if self._silence(rank, now) > 0.4 * self.timeout]
            if self.ends_process and still > self.timeout and gone:
                where = f"{self._stage()} of step {self.place.step}"
                print(f"error: rank {self.rank} lost ranks {gone} in {where}", file=sys.stderr, flush=True)
                parallel.abandon(code=1)
            if self.ends_process and ends == math.inf and told_failure(store) != self.before:
                ends = now + FAILED_SECONDS
            if now >= ends:
                failed, _ = told_failure(store).split()
                print(f"error: rank {self.rank} ends, for rank {failed} has failed", file=sys.stderr, flush=True)
                parallel.abandon(code=1)
            if (asked := store.get("dumps") if store.check(["dumps"]) else b"0") != dumped:
                dumped = asked
                faulthandler.dump_traceback(self.file)

    def _stage(self) -> str:
        return self.place.stages[-1] if self.place.stages else "between stages"

    def _post(self, count: int, still: float) -> None:
        beat = {"count": count, "stage": self._stage(), "step": self.place.step, "still": round(still, 1)}
        beat |= {"host": socket.gethostname(), "pid": os.getpid()}
        self.store.set(f"rank {self.rank}", json.dumps(beat))

    def _look(self, now: float) -> None:
        """Read all ranks' newest signs of life. Only a change counts: clocks of machines differ."""
        for rank in range(self.size):
            if self.store.check([f"rank {rank}"]):
                beat = json.loads(self.store.get(f"rank {rank}"))
                if rank not in self.seen or self.seen[rank][0]["count"] != beat["count"]:
                    self.seen[rank] = beat, now

    def _silence(self, rank: int, now: float) -> float:
        """Return the seconds since the newest sign of life."""
        return now - self.seen[rank][1] if rank in self.seen else math.inf

    def _silent(self, rank: int, now: float) -> bool:
        return self._silence(rank, now) > 3 * self.every

    def _is_first(self, now: float) -> bool:
        """Return whether all ranks before this one are silent or make progress."""
        return all(self._silent(r, now) or self.seen[r][0]["still"] < self.timeout / 2 for r in range(self.rank))

    def report(self, still: float, now: float) -> str:
        """Return the text of a report: the wait, the silent ranks and the stages of all others."""
        lines, stages = [], {rank: beat["stage"] for rank, (beat, _) in self.seen.items()}
        silent = [rank for rank in range(self.size) if self._silent(rank, now)]
        for rank in range(self.size):
            if rank not in self.seen:
                lines.append(f"  rank {rank}: no sign of life yet")
                continue
            beat, heard = self.seen[rank]
            where = f"{beat['stage']} of step {beat['step']}"
            state = f"in {where}, no progress for {beat['still']:.0f} s"
            if rank in silent:
                state = f"NO SIGN OF LIFE for at least {now - heard:.0f} s; was in {where}"
            elif beat["still"] < self.timeout / 2:
                state = f"makes progress, in {where}"
            lines.append(f"  rank {rank} ({beat['host']}, process {beat['pid']}): {state}")
        busy = [rank for rank, stage in stages.items() if rank not in silent and stage != self._stage()]
        culprit = f"perhaps for {busy}, which are in other stages" if busy else "together with all others"
        if silent:
            culprit = f"for ranks {silent}, which show no life"
        return "\n".join(
            [
                f"rank {self.rank} has waited {still:.0f} s in {self._stage()} of step {self.place.step} "
                f"{culprit}; it gives up after run.timeout_seconds = {self.timeout:g}",
                *lines,
                f"  stacks of all ranks that can still write: {self.path.parent}",
            ]
        )
