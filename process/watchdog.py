"""Says who holds up a run: ranks show signs of life, and a wait that gets long is reported before it times out."""

import contextlib
import faulthandler
import json
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Protocol

from parallel import World

REPORT = 0.8  # share of the time-out after which a wait is reported


class Place(Protocol):
    """Where a rank is in its work."""

    stages: list[str]  # the innermost is last
    moves: int  # changes whenever the rank gets on
    step: int


class Watchdog:
    """A thread of each rank: posts where the rank is, and reports a wait that is close to the time-out.

    The report names every rank that shows no life and what the others do. It comes from the first rank that can still
    speak, once for each wait; then all ranks write the stacks of their threads to `folder`. Where a call holds the
    interpreter for so long that this thread cannot run, the stacks are written all the same.
    """

    def __init__(self, world: World, place: Place, folder: Path):
        """A `world` without a store, such as a process alone, has no watchdog."""
        self.rank, self.size, self.timeout, self.place = world.rank, world.size, world.timeout_seconds, place
        # A connection of its own: the main thread may wait on the other.
        self.store = world.store.clone() if world.store else None
        self.path = folder / f"rank_{self.rank}.txt"
        self.every = min(1.0, self.timeout / 20)
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self.seen: dict[int, tuple[dict, float]] = {}  # each rank's newest sign of life and when it was new

    def __enter__(self) -> "Watchdog":
        if self.store:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.file = open(self.path, "w", encoding="utf-8")  # noqa: SIM115 - faulthandler keeps it
            self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        if not self.store:
            return
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
        except Exception as error:  # the store has gone with the machine that held it: the main thread will hear of it
            print(f"rank {self.rank}: the watchdog has ended: {error}", file=sys.stderr, flush=True)

    def _watch(self) -> None:
        count, moves, still_since, reported, dumped = 0, -1, time.monotonic(), False, b"0"
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
                self.store.add("dumps", 1)
                reported = True
            if (asked := self.store.get("dumps") if self.store.check(["dumps"]) else b"0") != dumped:
                dumped = asked
                faulthandler.dump_traceback(self.file)

    def _post(self, count: int, still: float) -> None:
        stage = self.place.stages[-1] if self.place.stages else "between stages"
        beat = {"count": count, "stage": stage, "step": self.place.step, "still": round(still, 1)}
        beat |= {"host": socket.gethostname(), "pid": os.getpid()}
        self.store.set(f"rank {self.rank}", json.dumps(beat))

    def _look(self, now: float) -> None:
        """Read everybody's newest sign of life. Only a change counts: clocks of machines differ."""
        for rank in range(self.size):
            if self.store.check([f"rank {rank}"]):
                beat = json.loads(self.store.get(f"rank {rank}"))
                if rank not in self.seen or self.seen[rank][0]["count"] != beat["count"]:
                    self.seen[rank] = beat, now

    def _silent(self, rank: int, now: float) -> bool:
        return rank not in self.seen or now - self.seen[rank][1] > 3 * self.every

    def _is_first(self, now: float) -> bool:
        """Whether all ranks before this one are silent or get on."""
        return all(self._silent(r, now) or self.seen[r][0]["still"] < self.timeout / 2 for r in range(self.rank))

    def report(self, still: float, now: float) -> str:
        """Return who waits, who is silent and what the others do."""
        lines, silent = [], [r for r in range(self.size) if self._silent(r, now)]
        for rank in range(self.size):
            if rank not in self.seen:
                lines.append(f"  rank {rank}: never heard of")
                continue
            beat, heard = self.seen[rank]
            where = f"{beat['stage']} of step {beat['step']}"
            what = f"in {where}, no progress for {beat['still']:.0f} s"
            if rank in silent:
                what = f"NO SIGN OF LIFE for at least {now - heard:.0f} s; was in {where}"
            elif beat["still"] < self.timeout / 2:
                what = f"gets on, in {where}"
            lines.append(f"  rank {rank} ({beat['host']}, process {beat['pid']}): {what}")
        busy = [r for r in range(self.size) if r not in silent and self._stage(r) != self._stage(self.rank)]
        culprit = f"for ranks {silent}, which show no life" if silent else f"perhaps for {busy}, which are elsewhere"
        return "\n".join(
            [
                f"rank {self.rank} has waited {still:.0f} s in {self._stage(self.rank)} of step {self.place.step} "
                f"{culprit if silent or busy else 'together with all others'}; "
                f"it gives up after run.timeout_seconds = {self.timeout:g}",
                *lines,
                f"  stacks of all ranks that can still write: {self.path.parent}",
            ]
        )

    def _stage(self, rank: int) -> str:
        return self.seen[rank][0]["stage"] if rank in self.seen else ""
