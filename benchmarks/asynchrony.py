"""Rollout and training at the same time, really run: contenders take turns step by step on the same ranks.

    python benchmarks/asynchrony.py [--quick] [--ranks 2]

synchronous       every step waits for its longest response, then all ranks train
tail batching     short rounds that race, a queue, long rounds; eta 1.25 on both
depth 1           updates interrupt the rollout; all ranks decode and train in turns; no group older than 4 updates
n train           the same, and n ranks only train while the others decode

Ranks have one thread each and take the steps of train.py, with given lengths: those of the paper's 32k, scaled
(`configs/simulate/qwen2.5-32b.toml`), and one grader for all. All contenders train equally many samples of the same
prompts. The first step fills what runs ahead and counts too. Seconds of a step are those of all steps together. Idle is
the share of these seconds in which a rank neither prefills, decodes nor trains, for ranks that train and for ranks that
decode. Two cores limit what can be gained. In turns, the rows of other prompts decode beside the longest responses, and
a CPU's step takes longer with every row. Of two pools with a core each the busier sets the pace, and the other waits.

`speedup_depth1` and `speedup_split_best` are step time of the synchronous contender over theirs, `max_lag` the age of
the oldest trained token in updates, `samples_lost` samples of prompts that one contender trained and another did not.

Before that the default task is learnt (`configs/tiny.toml`, one warm-started model, which the first use makes in
minutes that do not count), synchronously and with depth 1, in turns step by step, for three seeds. Held-out accuracy is
evaluated every few steps, and the straight line between two evaluations says when it reached the score.
`seconds_to_score_ratio` is the seconds of steps until then, synchronous over depth 1, all seeds together; null where a
run did not get there. `resume_equal`: runs with depth 1, in turns and in pools, of which a rank was killed in an
update, went on with `--resume` to the losses of runs that were not killed, bit by bit.
"""

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import faults
from end_to_end import QUICK, Side, Size, prepare
from tail_batching import PERIOD, ROOT, TraceEngine, in_turn, on_ranks, progress_bar, trained

import job
import parallel
from config import load_config
from job import Job
from metrics import Clock
from parallel import World
from settings import Config
from train import take_step

FULL = Size(128, 4, 1 / 16, 8, 8)
SYNCHRONOUS: dict[str, Any] = {"scheduler.policy": "synchronous"}
DEPTH: dict[str, Any] = SYNCHRONOUS | {"overlap.depth": 1, "overlap.bound": 4, "overlap.clock": "time"}
BUSY = ("prefill", "decode", "train")  # stages in which a rank does not wait

SCORE, EVERY, SEEDS = 0.7, 5, 3  # held-out accuracy, 0.5 at the start; steps between evaluations
FEW = {  # steps, by which no score is reached: to see that all works
    **{"run.steps": 5, "warm_start.steps": 20, "data.eval_prompts": 16},
    **{"scheduler.num_prompts": 4, "rollout.max_response_tokens": 64},
}
Point = tuple[int, float, float]  # steps, their seconds, held-out accuracy after them


@dataclass
class Contender(Side):
    idle: dict[str, float] = field(default_factory=dict)  # share of its seconds, by what the ranks do
    curve: list[Point] = field(default_factory=list)


def contenders(ranks: int) -> dict[str, dict[str, Any]]:
    """Return the settings of each contender."""
    found: dict[str, dict[str, Any]] = {"synchronous": SYNCHRONOUS, "tail batching": {}, "depth 1": DEPTH}
    return found | {f"{n} train": DEPTH | {"overlap.train_ranks": n} for n in range(1, ranks)}


def enter(name: str, file: str | None, settings: dict[str, Any], world: World, stack: ExitStack) -> Contender:
    """Return a contender with a job of these settings, which `stack` closes. Collective."""
    config = load_config(Config, file, [f"--{key}={value}" for key, value in settings.items()])
    os.makedirs(config.run.dir, exist_ok=True)
    made = Job(config, world, resume=False, clock=Clock(config.log.trace))
    made.recorder.bar.close()
    stack.enter_context(made.graders)
    return Contender(name, made)


def step(side: Contender) -> None:
    """Take a step, timed on the slowest rank. Collective."""
    world = side.job.world
    parallel.barrier(world)
    start = time.perf_counter()
    side.records.append(take_step(side.job))
    side.seconds.append(max(parallel.gather_objects(world, time.perf_counter() - start)))


# ---- seconds of a step -------------------------------------------------------------------------------------------


def settings(size: Size, folder: Path, name: str, steps: int) -> dict[str, Any]:
    return {
        "run.dir": folder / name.replace(" ", "-"),
        "run.steps": steps,
        "run.device": "cpu",
        "run.dump_rollouts": "true",
        "log.trace": "true",
        "model.path": folder / "model",
        "data.train": "hailstone",
        "data.eval_prompts": 0,
        "scheduler.num_prompts": size.prompts,
        "scheduler.num_responses": size.responses,
        "scheduler.window_iterations": max(round(size.trace.median / 4), 1),
        "rollout.max_prompt_tokens": 64,
        "rollout.max_response_tokens": size.trace.limit,
        "trainer.lr": 1e-5,
        "loss.entropy_coef": 1e-6,  # else nothing would have a gradient: the rewards of a random model are all 0
        "trainer.tokens_per_microbatch": 1024,
    }


def play(size: Size, steps: int, world: World) -> list[Contender]:
    """Let all contenders take so many steps, taking turns after each. Engines give all responses their lengths."""
    with ExitStack() as stack:
        folder = Path(parallel.broadcast_object(world, stack.enter_context(tempfile.TemporaryDirectory())))
        prepare(size, folder, world)
        TraceEngine.trace = size.trace
        job.Engine = TraceEngine  # type: ignore[misc]
        sides = [
            enter(name, None, settings(size, folder, name, steps) | added, world, stack)
            for name, added in contenders(world.size).items()
        ]
        bar = stack.enter_context(progress_bar("asynchrony", steps * len(sides), world))
        for turn in range(steps):
            for side in in_turn(sides, turn):
                bar.set_postfix_str(side.name)
                step(side)
                bar.update()
        for side in sides if world.is_main else ():
            side.trained = trained(side.job.folder)
            side.idle = idle(side.job, sum(side.seconds))
        parallel.barrier(world)  # before rank 0 removes the folder
    return sides


def idle(made: Job, seconds: float) -> dict[str, float]:
    """Return the share of `seconds` in which ranks that train, and ranks that decode, waited, from the run's trace."""
    busy = [0.0] * made.world.size
    for line in (made.folder / "trace.json").read_text(encoding="utf-8").splitlines()[1:]:
        event = json.loads(line.rstrip(","))
        if event["ph"] == "X" and event["name"] in BUSY:
            busy[event["tid"]] += event["dur"] / 1e6
    trainers = made.config.overlap.train_ranks
    pools = {"train": busy[:trainers] or busy, "decode": busy[trainers:]}
    return {name: round(1 - statistics.mean(pool) / seconds, 3) for name, pool in pools.items()}


def row_of(side: Contender, base: Contender) -> dict[str, Any]:
    """Return seconds of a step and of its stages, how much faster it is, and what asynchrony costs it."""
    rounds, engines = [r["round"] for r in side.records], [r["engine"] for r in side.records]
    return {
        "contender": side.name,
        "step": round(statistics.mean(side.seconds), 3),
        **{name: round(statistics.mean(r["seconds"][name] for r in side.records), 3) for name in ("rollout", "train")},
        **{f"idle_{name}": share for name, share in side.idle.items()},
        "faster": round(sum(base.seconds) / sum(side.seconds), 3),
        "lag": round(statistics.mean(r["lag"]["mean"] if "lag" in r else 0.0 for r in rounds), 2),
        "max_lag": max(r["lag"]["max"] if "lag" in r else 0 for r in rounds),
        "prefilled_over_decoded": round(
            sum(e["prefilled_tokens"] for e in engines) / sum(e["decoded_tokens"] for e in engines), 3
        ),
    }


def report(sides: list[Contender], title: str) -> dict[str, Any]:
    base, rows = sides[0], [row_of(side, sides[0]) for side in sides]
    print(f"\n{title}; {len(base.seconds)} steps each; seconds of a step, means; stages of the slowest rank")
    print(f"{'':14} step s  rollout   train   idle: train  decode   times as fast   lag  largest  prefilled / decoded")
    for row in rows:
        print(
            f"{row['contender']:14}{row['step']:7.2f}{row['rollout']:9.2f}{row['train']:8.2f}{row['idle_train']:14.0%}"
            f"{row['idle_decode']:8.0%}{row['faster']:16.2f}{row['lag']:6.2f}{row['max_lag']:9}"
            f"{row['prefilled_over_decoded']:21.2f}"
        )
    split = [row["faster"] for row in rows if row["contender"].endswith(" train")]
    apart: Counter = sum(((base.trained - s.trained) + (s.trained - base.trained) for s in sides), Counter())
    return {
        "steps": len(base.seconds),
        "speedup_depth1": rows[2]["faster"],
        "speedup_split_best": max(split, default=None),
        "max_lag": max(row["max_lag"] for row in rows),
        "samples_lost": apart.total() * base.job.config.scheduler.num_responses,
        "contenders": rows,
    }


# ---- seconds to a score ------------------------------------------------------------------------------------------


def learn(seed: int, added: dict[str, Any], world: World) -> list[Contender]:
    """Let a synchronous run and one with depth 1 learn the default task, in turns, until both have the score."""
    with ExitStack() as stack:
        folder = Path(parallel.broadcast_object(world, stack.enter_context(tempfile.TemporaryDirectory())))
        sides = []
        for name in ("synchronous", "depth 1"):
            own = contenders(world.size)[name] | {"run.dir": folder / name.replace(" ", "-"), "run.seed": seed}
            sides.append(enter(name, str(ROOT / "configs" / "tiny.toml"), added | own, world, stack))
        most = sides[0].job.config.run.steps
        bar = stack.enter_context(progress_bar(f"seed {seed}", most, world))
        for turn in range(most + 1):
            if turn % EVERY == 0:
                for side in sides:
                    side.curve.append((turn, sum(side.seconds), side.job.evaluate()["avg@4"]))
            if turn == most or all(reached(side.curve) for side in sides):
                break
            for side in in_turn(sides, turn):
                step(side)
            bar.update()
        parallel.barrier(world)  # before rank 0 removes the folder
    return sides


def reached(curve: list[Point]) -> tuple[float, float] | None:
    """Return after how many steps and seconds the line through the points has the score."""
    for (steps, seconds, low), (more_steps, more_seconds, high) in pairwise(curve):
        if high >= SCORE:
            share = (SCORE - low) / (high - low)
            return steps + share * (more_steps - steps), seconds + share * (more_seconds - seconds)
    return None


def report_scores(runs: list[list[Contender]]) -> dict[str, Any]:
    """Print how each seed learnt; return the ratio of seconds, null where a run did not reach the score."""
    print(f"\nsteps and their seconds until a held-out accuracy of {SCORE:g}")
    rows, total = [], {"synchronous": 0.0, "depth1": 0.0}
    for seed, sides in enumerate(runs):
        row: dict[str, Any] = {"seed": seed}
        for key, side in zip(total, sides, strict=True):
            steps, seconds = reached(side.curve) or (math.nan, math.nan)
            last, took, accuracy = side.curve[-1]
            at = f"{steps:5.0f} steps{seconds:8.1f} s" if not math.isnan(steps) else "not reached"
            print(f"seed {seed}, {side.name:12}{at:20} {accuracy:.3f} after {last} steps, {took:.1f} s")
            row |= {f"steps_{key}": finite(steps), f"seconds_{key}": finite(seconds)}
            total[key] += seconds
        rows.append(row)
    return {
        "score": SCORE,
        "seeds": rows,
        "seconds_to_score_ratio": finite(total["synchronous"] / total["depth1"], 3),
    }


def finite(value: float, digits: int = 1) -> float | None:
    """Return a rounded number, null in JSON for what was not reached."""
    return None if math.isnan(value) else round(value, digits)


# ---- resumption --------------------------------------------------------------------------------------------------


def resumes_exactly() -> bool:
    """Whether runs of two ranks that were killed in an update have the losses of undisturbed ones after `--resume`."""
    kill = faults.Fault("kill", "update", rank=0, step=7)
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        faults.prepare(base)

        def losses(run: str, lives: list[faults.Fault | None], *more: str) -> list[tuple]:
            """Return the losses of a run that was started once for each of its lives, and broken in the first."""
            arguments = faults.settings(base, base / run, *more)
            places = base / f"{run}.fired", base / f"{run}.log"
            failed = [any(faults.live(2, arguments, fault, *places)[0]) for fault in lives]
            assert failed == [fault is not None for fault in lives], places[1].read_text()
            return faults.trajectory(base / run)

        ways = {way: faults.WAYS[way].settings for way in ("turns", "pools")}
        return all(
            losses(f"{way} killed", [kill, None], *more) == losses(way, [None], *more) for way, more in ways.items()
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="an eighth of the work: under 2 minutes; no score")
    parser.add_argument(
        "--ranks", type=int, help="processes of one thread (default: 4 where there are as many cores, else 2)"
    )
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        os.environ["RESUME_EQUAL"] = json.dumps(resumes_exactly())

    def run(world: World) -> None:
        seeds, added, size, periods = (1, FEW, QUICK, 1) if arguments.quick else (SEEDS, {}, FULL, 4)
        learnt = [learn(seed, added, world) for seed in range(seeds)]  # first: `play` takes another engine
        sides = play(size, PERIOD * periods, world)
        if world.is_main:
            lengths = f"{size.trace.median:.0f} tokens in the median, {size.trace.limit} at most"
            samples = f"{size.prompts} x {size.responses} samples of {lengths}"
            steps = report(sides, f"{world.size} ranks, {size.layers} layers of {size.hidden}, {samples}")
            equal = {"resume_equal": json.loads(os.environ["RESUME_EQUAL"])}
            print(json.dumps({"name": "asynchrony", "ranks": world.size} | steps | report_scores(learnt) | equal))

    cores = len(os.sched_getaffinity(0))
    return on_ranks(arguments.ranks or (4 if cores >= 4 else 2), run)


if __name__ == "__main__":
    sys.exit(main())
