"""How OpenMP's threads should wait for each other: steps alone and beside a process that keeps one of two cores busy.

    python benchmarks/waiting.py [--quick]

A thread that is done with its part of an operation waits for the others. libgomp, which torch brings, has it spin for
milliseconds (`as it is`), or sleep at once (`OMP_WAIT_POLICY=PASSIVE`); ours spins for some microseconds
(process/threads.py). Each way is a process of its own, they take turns, and seconds are medians. Steps: decode steps of
the 0.5B shape of engine.py, of its small one, and of the small one with so few rows that one thread takes all of it
(`engine.cpu.threads_for`); training steps of the small one.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from process.threads import GIVEN, SPINS

OWN = {name: value for name, value in os.environ.items() if name not in GIVEN}
WAYS: dict[str, dict[str, str]] = {
    "as it is": {"KMP_BLOCKTIME": "0"},  # which only other runtimes read, but it is the user's word
    "PASSIVE": {"OMP_WAIT_POLICY": "PASSIVE"},
    "briefly": {"GOMP_SPINCOUNT": SPINS},
}
STEPS = {"decode, 0.5B": 4, "decode, small": 50, "decode, little": 50, "training, small": 2}  # of one turn
QUICK = {"decode, 0.5B": 2, "decode, small": 20, "decode, little": 20, "training, small": 1}
TURNS = 5


def work() -> None:
    """Be a way to wait: for each kind of step that comes in, take as many as a turn has and tell how long one took."""
    import training
    from training_sides import make_ours, samples_of

    from benchmarks import engine as bench
    from core import SampleId

    bench.torch.set_num_threads(int(bench.THREADS))
    bench.torch.set_flush_denormal(True)

    def decoding(shape: str, rows: int) -> Callable[[int], float]:
        engine = bench.Engine(bench.build(shape)[0], bench.ROLLOUT, bench.GREEDY, [])

        def play(steps: int) -> float:
            for i, ids in enumerate(bench.prompts(rows)):
                engine.add(bench.Sequence(i, 0, 0, tuple(ids), i, steps + 3, ignore_eos=True))
            for _ in range(2):  # prefill, and what others have driven out of the caches
                engine.step()
            start = time.perf_counter()
            for _ in range(steps):
                engine.step()
            seconds = time.perf_counter() - start
            engine.abort([SampleId(0, i, 0) for i in range(rows)])
            return seconds / steps

        return play

    samples = samples_of(bench.long_tailed(16, training.MEDIAN), training.PROMPT, bench.SHAPES["tiny"]["vocab_size"])
    step = make_ours(bench.build("tiny")[0], samples)

    def train(steps: int) -> float:
        step(4096)
        start = time.perf_counter()
        for _ in range(steps):
            step(4096)
        return (time.perf_counter() - start) / steps

    plays = dict(zip(STEPS, (decoding("half", 4), decoding("tiny", 32), decoding("tiny", 4), train), strict=True))
    for line in sys.stdin:
        kind, count = json.loads(line)
        print(plays[kind](count), flush=True)


class Contender:
    """A process that waits in one of the ways."""

    def __init__(self, way: str):
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--worker"],
            env=OWN | WAYS[way],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def play(self, kind: str, steps: int) -> float:
        """Return the seconds of a step. Raises RuntimeError when the process has ended."""
        assert self.process.stdin and self.process.stdout
        with suppress(BrokenPipeError):  # it has ended: there will be no line
            print(json.dumps([kind, steps]), file=self.process.stdin, flush=True)
        if not (line := self.process.stdout.readline()):
            raise RuntimeError(f"a contender ended with exit code {self.process.wait()}")
        return float(line)


def race(what: str, contenders: dict[str, Contender], steps: dict[str, int], turns: int) -> dict[str, dict[str, float]]:
    """Return the seconds of a step by kind and way, medians of turns."""
    found: dict[str, dict[str, list[float]]] = {kind: {way: [] for way in contenders} for kind in steps}
    for turn, kind in tqdm([(turn, kind) for turn in range(turns) for kind in steps], desc=what, disable=None):
        for way in (*contenders,)[turn % len(contenders) :] + (*contenders,)[: turn % len(contenders)]:
            found[kind][way].append(contenders[way].play(kind, steps[kind]))
    return {kind: {way: statistics.median(s) for way, s in ways.items()} for kind, ways in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer steps: under 2 minutes on 2 cores")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return work()
    from benchmarks.engine import busy_core

    steps, turns = (QUICK, 1) if options.quick else (STEPS, TURNS)
    contenders = {way: Contender(way) for way in WAYS}
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        race("first steps", contenders, dict.fromkeys(steps, 1), 1)
        alone = race("alone", contenders, steps, turns)
        with busy_core():
            beside = race("beside a busy core", contenders, steps, turns)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except RuntimeError as error:
        raise SystemExit(f"error: {error}") from None
    finally:
        for contender in contenders.values():
            contender.process.kill()
            contender.process.wait()
    rows: list[dict[str, Any]] = []
    print(f"{'milliseconds of a step':28}" + "".join(f"{way:>12}" for way in WAYS))
    for place, seconds in (("alone", alone), ("beside a busy core", beside)):
        for kind, ways in seconds.items():
            print(f"{kind + ', ' + place:28}" + "".join(f"{1e3 * ways[way]:12.2f}" for way in WAYS))
            ms = {way.replace(" ", "_").lower(): round(1e3 * value, 2) for way, value in ways.items()}
            rows.append({"step": kind, "place": place, **ms})
    faster = [ways["as it is"] / ways["briefly"] for ways in beside.values()]
    slower = [ways["briefly"] / ways["as it is"] - 1 for ways in alone.values()]
    metrics = {"busy_faster_least": round(min(faster), 2), "busy_faster_most": round(max(faster), 2)}
    print(json.dumps({"name": "waiting", **metrics, "alone_slower_most": round(max(slower), 3), "rows": rows}))


if __name__ == "__main__":
    main()
