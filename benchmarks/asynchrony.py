"""Rollout and training at the same time, really run: contenders take turns step by step on the same ranks.

    python benchmarks/asynchrony.py [--quick] [--ranks 2]

synchronous       every step waits for its longest response, then all ranks train
tail batching     short rounds that race, a queue, long rounds; eta 1.25 on both
depth 1           updates interrupt the rollout; all ranks decode and train in turns; no group older than 4 updates
n train           the same, and n ranks only train while the others decode

Ranks have one thread each and take the steps of train.py, with given lengths: those of the paper's 32k, scaled
(`configs/simulate/qwen2.5-32b.toml`), and one grader for all. All contenders train equally many samples of the same
prompts. The first step fills what runs ahead and counts too. Seconds of a step are those of all steps together; on two
cores training and decoding can gain little from each other, since neither leaves its core idle.

`speedup_depth1` and `speedup_split_best` are step time of the synchronous contender over theirs, `max_lag` the age of
the oldest trained token in updates, `samples_lost` prompts that one contender trained and another did not.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from end_to_end import QUICK, Side, Size, prepare
from tail_batching import PERIOD, TraceEngine, in_turn, on_ranks, progress_bar, trained

import job
import parallel
from config import load_config
from job import Job
from parallel import World
from settings import Config
from train import take_step

FULL = Size(128, 4, 1 / 16, 8, 8)
DEPTH: dict[str, Any] = {
    "scheduler.policy": "synchronous",
    "overlap.depth": 1,
    "overlap.bound": 4,
    "overlap.clock": "time",
}


def contenders(ranks: int) -> dict[str, dict[str, Any]]:
    """Return the settings of each contender."""
    found: dict[str, dict[str, Any]] = {"synchronous": {"scheduler.policy": "synchronous"}, "tail batching": {}}
    found["depth 1"] = DEPTH
    return found | {f"{n} train": DEPTH | {"overlap.train_ranks": n} for n in range(1, ranks)}


def settings(size: Size, folder: Path, name: str, added: dict[str, Any], steps: int) -> Config:
    values: dict[str, Any] = {
        "run.dir": folder / name.replace(" ", "-"),
        "run.steps": steps,
        "run.device": "cpu",
        "run.dump_rollouts": "true",
        "model.path": folder / "model",
        "data.train": "hailstone",
        "data.eval_prompts": 0,
        "scheduler.num_prompts": size.prompts,
        "scheduler.num_responses": size.responses,
        "scheduler.window_iterations": max(round(size.trace.median / 4), 1),
        "rollout.max_prompt_tokens": 64,
        "rollout.max_response_tokens": size.trace.limit,
        "trainer.lr": 1e-5,
        "trainer.tokens_per_microbatch": 1024,
    }
    return load_config(Config, None, [f"--{key}={value}" for key, value in (values | added).items()])


def play(size: Size, steps: int, world: World) -> list[Side]:
    """Let all contenders take so many steps, taking turns after each."""
    with ExitStack() as stack:
        folder = Path(parallel.broadcast_object(world, stack.enter_context(tempfile.TemporaryDirectory())))
        prepare(size, folder, world)
        TraceEngine.trace = size.trace
        job.Engine = TraceEngine  # type: ignore[misc]
        sides = []
        for name, added in contenders(world.size).items():
            config = settings(size, folder, name, added, steps)
            os.makedirs(config.run.dir, exist_ok=True)
            made = Job(config, world, resume=False)
            made.recorder.bar.close()
            stack.enter_context(made.graders)
            sides.append(Side(name, made))
        bar = stack.enter_context(progress_bar("asynchrony", steps * len(sides), world))
        for turn in range(steps):
            for side in in_turn(sides, turn):
                bar.set_postfix_str(side.name)
                parallel.barrier(world)
                start = time.perf_counter()
                side.records.append(take_step(side.job))
                side.seconds.append(max(parallel.gather_objects(world, time.perf_counter() - start)))
                bar.update()
        for side in sides if world.is_main else ():
            side.trained = trained(side.job.folder)
        parallel.barrier(world)  # before rank 0 removes the folder
    return sides


def row_of(side: Side, base: Side) -> dict[str, Any]:
    """Return seconds of a step and of its stages, how much faster it is, and what asynchrony costs it."""
    rounds, engines = [r["round"] for r in side.records], [r["engine"] for r in side.records]
    stages = ("rollout", "train", "wait_batch", "publish")
    return {
        "contender": side.name,
        "step": round(statistics.mean(side.seconds), 3),
        **{name: round(statistics.mean(r["seconds"].get(name, 0.0) for r in side.records), 3) for name in stages},
        "faster": round(sum(base.seconds) / sum(side.seconds), 3),
        "lag": round(statistics.mean(r["lag"]["mean"] if "lag" in r else 0.0 for r in rounds), 2),
        "max_lag": max(r["lag"]["max"] if "lag" in r else 0 for r in rounds),
        "prefilled_over_decoded": round(
            sum(e["prefilled_tokens"] for e in engines) / sum(e["decoded_tokens"] for e in engines), 3
        ),
    }


def report(sides: list[Side], title: str) -> dict[str, Any]:
    base, rows = sides[0], [row_of(side, sides[0]) for side in sides]
    print(f"\n{title}; {len(base.seconds)} steps each; seconds of a step, means; stages of the slowest rank")
    print(f"{'':14} step s  rollout   train  wait for a batch  times as fast   lag  largest  prefilled / decoded")
    for row in rows:
        print(
            f"{row['contender']:14}{row['step']:7.2f}{row['rollout']:9.2f}{row['train']:8.2f}{row['wait_batch']:18.2f}"
            f"{row['faster']:15.2f}{row['lag']:6.2f}{row['max_lag']:9}{row['prefilled_over_decoded']:21.2f}"
        )
    split = [row["faster"] for row in rows if row["contender"].endswith(" train")]
    apart: Counter = sum(((base.trained - s.trained) + (s.trained - base.trained) for s in sides), Counter())
    return {
        "name": "asynchrony",
        "ranks": base.job.world.size,
        "steps": len(base.seconds),
        "speedup_depth1": rows[2]["faster"],
        "speedup_split_best": max(split, default=None),
        "max_lag": max(row["max_lag"] for row in rows),
        "samples_lost": apart.total() * base.job.config.scheduler.num_responses,
        "contenders": rows,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a quarter of the lengths, one period: under 2 minutes")
    parser.add_argument("--ranks", type=int, default=2, help="processes of one thread (default 2)")
    arguments = parser.parse_args()

    def run(world: World) -> None:
        size = QUICK if arguments.quick else FULL
        sides = play(size, PERIOD * (1 if arguments.quick else 4), world)
        if world.is_main:
            lengths = f"{size.trace.median:.0f} tokens in the median, {size.trace.limit} at most"
            samples = f"{size.prompts} x {size.responses} samples of {lengths}"
            print(json.dumps(report(sides, f"{world.size} ranks, {size.layers} layers of {size.hidden}, {samples}")))

    return on_ranks(arguments.ranks, run)


if __name__ == "__main__":
    sys.exit(main())
