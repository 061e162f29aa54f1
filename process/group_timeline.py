"""Which job had which worker of a co-execution group when, from the events of its server (mux.jsonl)."""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

WIDTH = 90  # columns of the timeline


class Held(NamedTuple):
    """A worker, and the phase of a job that had it. Seconds since the server's start."""

    worker: str
    job: str
    phase: str
    start: float
    end: float


def held(events: Sequence[dict]) -> list[Held]:
    """Return who held which worker, by end, since the newest start of the server."""
    newest = max((i for i, event in enumerate(events) if event.get("event") == "starts"), default=-1)
    if newest < 0:
        return []
    zero, last, now = events[newest]["at"], events[-1]["at"], defaultdict[str, dict[str, tuple[str, float]]](dict)
    found = []
    for event in events[newest + 1 :]:
        if "workers" in event:  # that the pool has from now on
            mine = now[f"{event['job']}/{event['pool']}"]
            for worker in {*mine}.difference(event["workers"]):
                phase, start = mine.pop(worker)
                found.append(Held(worker, event["job"], phase, start, event["at"] - zero))
            mine |= {w: (event["phase"], event["at"] - zero) for w in event["workers"] if w not in mine}
    for pool, mine in now.items():
        found += [Held(w, pool.rpartition("/")[0], phase, start, last - zero) for w, (phase, start) in mine.items()]
    return found


def timeline(events: Sequence[dict], workers: Sequence[str]) -> str:
    """Return a line for each worker: a letter for each job, capital at its start, "." where the worker was idle."""
    spans = held(events)
    seconds = max((span.end for span in spans), default=0.0)
    letters = {job: chr(ord("a") + i % 26) for i, job in enumerate(sorted({span.job for span in spans}))}
    names = ", ".join(f"{letter} {job}" for job, letter in letters.items())
    lines = [f"timeline, {seconds:.1f} s in {WIDTH} columns: {names}; capital: starts; . idle"]
    for worker in workers:
        row, busy = ["."] * WIDTH, 0.0
        for span in spans:
            if span.worker == worker:
                first, last = (int(at / seconds * (WIDTH - 1)) for at in (span.start, span.end))
                letter = letters[span.job].upper() if span.phase == "start" else letters[span.job]
                row[first : last + 1] = letter * (last + 1 - first)
                busy += span.end - span.start
        lines.append(f"{worker:>12} {''.join(row)} {busy / max(seconds, 1e-9):.0%}")
    return "\n".join(lines)
