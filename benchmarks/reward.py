"""Step time with rewards that wait for the rollout, that do not, and whose time limits adapt. For two CPU cores.

    python benchmarks/reward.py [--quick] [--workers 2]

One process with one thread decodes and trains, one worker grades: more would share its core, or take the decoding's
(`--workers` tries that, for all alike). All contenders take turns step by step on one model
(20 million parameters, random weights, really updated), with the rounds, policy and pools of train.py: tail batching,
eta 1.25 on both, given lengths of the paper's shape (see tail_batching.py). A step ends when its update is done and no
program runs any more. Periods are epochs: each meets the same prompts again, so that time limits have been learned.

programs  Answers are programs of the expression task and run in the sandbox; 5 % are endless loops. A fifth of the
          prompts have no right answer at all, so that their limits come from other prompts; of the others half are
          right. Programs of a prompt sleep as long, log-normal over prompts, some of them longer than T_min. Limits
          are 1 s at most and 0.1 s at least, for a step takes seconds here (the paper's: 30 and 2 s).
          `late`: grading starts once the last response has ended, and only of what is trained; `async`: as each
          response ends; `adaptive`: that, with the limits of rewards/timeouts.py as they are by default.
judge     A judge as large as the actor reads prompt and response, `late` or `async`. On a CPU it computes on the core
          that decodes, so that nothing can overlap: only a GPU could show a gain.
layers    One forward of a judge of which no layer is resident. `pipeline` is what a run does: a layer arrives while
          another computes; `serial` copies in line. On a CPU copies go from memory to memory, in a thread.

`speedup_async` and `speedup_adaptive` are step times of late over async and of async over adaptive; medians over
periods. `speedup_adaptive_rollout` is that of rollouts and their wait for rewards, without training, as the paper
counts. `speedup_layer_pipeline` is serial over pipeline at the length whose computation takes most nearly as long as
its copies: there a pipeline gains most, 2 x where the two share nothing.
"""

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}  # before torch is imported
sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

import torch
from tail_batching import PERIOD, SHAPES, Shape, TraceEngine, build_engine, in_turn
from texts import Scripted, program
from torch import Tensor
from tqdm import tqdm

from buffer import SampleBuffer
from core import Prompt, SampleId, Visit
from learning import group_advantages, learn, put_groups
from loss import LossConfig
from metrics import Clock
from parallel import World
from reward import RewardConfig
from rewards.judge import JudgeConfig, JudgeModel, open_graders
from rewards.timeouts import TimeoutStats
from rounds import Round
from sampling import SamplingConfig
from scheduler import POLICIES, SchedulerConfig
from tasks import TASKS
from trainer import Trainer, TrainerConfig
from warm_start import WarmStartConfig, byte_tokenizer, make_model

WORLD = World(0, 1, torch.device("cpu"))
TOKENIZER = byte_tokenizer()
FIXED = RewardConfig(num_workers=1, case_factor=0.0, case_min_seconds=0.1, case_max_seconds=1.0)
ADAPTIVE = replace(FIXED, case_factor=RewardConfig.case_factor)


# ---- contenders --------------------------------------------------------------------------------------------------


@dataclass
class Contender:
    name: str
    graders: Scripted
    policy: Any = None
    seconds: list[list[float]] = field(default_factory=list)  # of each step, by period
    stages: list[dict[str, float]] = field(default_factory=list)
    rewards: dict[SampleId, float] = field(default_factory=dict)  # of what was trained
    cases: TimeoutStats = field(default_factory=TimeoutStats)

    def mean(self, value: str) -> float:
        return statistics.mean(stage.get(value, 0.0) for stage in self.stages)


class Prompts:
    """The same prompts in every epoch."""

    def __init__(self, task: str, epoch: int):
        self.task, self.epoch, self.taken = task, epoch, 0
        self.numbers = Random(0).sample(TASKS["expression"].numbers(), 1000)

    def take(self, count: int) -> list[Visit]:
        self.taken += count
        return [Visit(self.epoch, self._prompt(i)) for i in range(self.taken - count, self.taken)]

    def _prompt(self, index: int) -> Prompt:
        source, number = TASKS["expression"], self.numbers[index]
        text = source.prompt(number)
        row = {"prompt": text, "number": number} | source.fields
        return Prompt(index, tuple(TOKENIZER.encode(text)), text, source.answer(number), self.task, row)


# ---- steps -------------------------------------------------------------------------------------------------------


def measure(task: str, shape: Shape, engine: TraceEngine, sides: list[Contender], periods: int) -> None:
    """Let the contenders train `periods` periods, taking turns after every step."""
    scheduler = SchedulerConfig(num_prompts=shape.prompts, num_responses=shape.responses, eta_responses=1.25)
    steps = periods * PERIOD * len(sides)
    settings = TrainerConfig(lr=1e-5), LossConfig(), SamplingConfig()
    trainer = Trainer(engine.model, *settings, WORLD, engine.trace.limit, steps)
    with tqdm(total=steps, desc=task, unit="step", disable=None, leave=False) as bar:
        for period in range(periods):
            cursors = {side.name: Prompts(task, period) for side in sides}
            for side in sides:
                side.policy = POLICIES[scheduler.policy](scheduler)
                side.seconds.append([])
            for turn in range(PERIOD):
                for side in in_turn(sides, turn):
                    bar.set_postfix_str(side.name)
                    step(side, scheduler, engine, trainer, cursors[side.name], PERIOD - turn)
                    bar.update()


def step(
    side: Contender, config: SchedulerConfig, engine: TraceEngine, trainer: Trainer, cursor: Prompts, left: int
) -> None:
    """Take one step of train.py's loop."""
    clock, start = Clock(), time.perf_counter()
    plan = side.policy.begin(cursor.take, left)
    current = Round(engine, side.graders, WORLD, clock, config)
    with clock.span("rollout"):
        current.play(plan, side.policy)
    groups = current.collect()
    with clock.span("train"):
        advantages = group_advantages(groups, trainer.loss, FIXED, trainer.max_response_tokens)
        buffer = SampleBuffer(len(groups))
        put_groups(buffer, groups, advantages, trainer.loss, FIXED, trainer.max_response_tokens)
        learn(trainer, buffer)
        engine.load_weights(trainer.model, engine.version + 1)
    with clock.span("settle"):
        side.graders.settle()
    side.seconds[-1].append(time.perf_counter() - start)
    side.policy.close(current.aborted)
    pool, judge = side.graders.graders.take_stats()
    side.stages.append(clock.take() | {"grading": pool.seconds + judge.seconds})
    side.cases.add(pool.cases)
    side.rewards |= {s.id: r.value for g in groups for s, r in zip(g.samples, g.rewards, strict=True)}


def speedup(base: Contender, other: Contender) -> list[float]:
    """Return how many times as fast the other's steps are, by period."""
    return [sum(b) / sum(o) for b, o in zip(base.seconds, other.seconds, strict=True)]


def table(title: str, sides: Sequence[Contender]) -> None:
    print(f"\n{title}; {len(sides[0].seconds)} periods of {PERIOD} steps; mean seconds of a step")
    print(f"{'':10} step  rollout  of it waiting for rewards  train  in graders  x faster (by period)")
    for side in sides:
        times = "  ".join(f"{ratio:.2f}" for ratio in speedup(sides[0], side))
        step_seconds = statistics.mean(s for period in side.seconds for s in period)
        print(
            f"{side.name:10}{step_seconds:5.2f}{side.mean('rollout'):9.2f}{side.mean('reward'):27.2f}"
            f"{side.mean('train'):7.2f}{side.mean('grading'):12.2f}  {times}"
        )


def programs(shape: Shape, periods: int, workers: int) -> dict[str, Any]:
    engine = build_engine(shape, WORLD)
    sides = []
    for name, config, is_late in (("late", FIXED, True), ("async", FIXED, False), ("adaptive", ADAPTIVE, False)):
        config = replace(config, num_workers=workers)
        graders = open_graders(config, JudgeConfig(), ["code"], WORLD.device, torch.float32)
        sides.append(Contender(name, Scripted(graders, program, is_late)))
    measure("code", shape, engine, sides, periods)
    for side in sides:
        side.graders.graders.close()
    table("programs", sides)
    late, fixed, adaptive = sides
    assert late.rewards.keys() == fixed.rewards.keys() == adaptive.rewards.keys(), "all train the same samples"
    wrong = sum(adaptive.rewards[id] != value for id, value in fixed.rewards.items())
    print(
        f"{len(fixed.rewards)} trained samples each, {wrong} of them with another reward under adaptive limits; "
        f"programs cut off took {fixed.cases.seconds_cut_off:.1f} s, with adaptive limits "
        f"{adaptive.cases.seconds_cut_off:.1f} s; audited: {adaptive.cases.audited}, passed late: "
        f"{adaptive.cases.audited_passed}"
    )
    return {
        **spread("async", speedup(late, fixed)),
        **spread("adaptive", speedup(fixed, adaptive)),
        "speedup_adaptive_rollout": round(fixed.mean("rollout") / adaptive.mean("rollout"), 2),
        "passed_late": adaptive.cases.audited_passed,
        "rewards_changed": wrong,
        "seconds_cut_off": round(fixed.cases.seconds_cut_off, 1),
        "seconds_cut_off_adaptive": round(adaptive.cases.seconds_cut_off, 1),
    }


def spread(name: str, ratios: list[float]) -> dict[str, float]:
    """Return the median, least and most of the periods."""
    of = {"": statistics.median(ratios), "_least": min(ratios), "_most": max(ratios)}
    return {f"speedup_{name}{suffix}": round(ratio, 2) for suffix, ratio in of.items()}


def judge(shape: Shape, periods: int, folder: Path) -> dict[str, Any]:
    engine = build_engine(shape, WORLD)
    make_model(actor_shape(shape), "hailstone", folder, WORLD)
    config = JudgeConfig(str(folder), "{question}{response}?", accept="y", reject="n")
    sides = []
    for name, late in (("late", True), ("async", False)):
        graders = open_graders(FIXED, config, ["judge"], WORLD.device, torch.float32)
        sides.append(Contender(name, Scripted(graders, lambda key, row: "x" * engine.trace.length(key), late)))
    measure("judge", shape, engine, sides, periods)
    for side in sides:
        side.graders.graders.close()
    table("judge", sides)
    return spread("async_judge", speedup(*sides))


def actor_shape(shape: Shape) -> WarmStartConfig:
    """Return the shape of a judge as large as the actor."""
    sizes = {"hidden_size": shape.hidden, "num_layers": shape.layers, "num_heads": shape.heads}
    return WarmStartConfig(steps=0, **sizes, num_kv_heads=shape.heads)


# ---- layers ------------------------------------------------------------------------------------------------------


class SerialCopies:
    """Copies in line with the computation: in the caller's thread."""

    def mark(self) -> None: ...

    def start(self, target: Tensor, source: Tensor, after: None) -> bool:
        target.copy_(source)
        return True

    def wait(self, copied: bool) -> None: ...

    def finish(self) -> None: ...


def layers(width: int, depth: int, sizes: Sequence[int], rounds: int, folder: Path) -> dict[str, Any]:
    """Compare one forward's seconds, the best of each contender's turns."""
    make_model(WarmStartConfig(steps=0, hidden_size=width, num_layers=depth, num_heads=16), "hailstone", folder, WORLD)
    config = JudgeConfig(path=str(folder), accept="y", reject="n", batch_tokens=max(sizes))
    model = JudgeModel(config, WORLD.device, torch.float32)
    pipeline, serial = model.layers.copies, SerialCopies()
    contenders = {"resident": (pipeline, depth), "pipeline": (pipeline, 0), "serial": (serial, 0)}
    copying, best, speedups = copy_seconds(model), {}, {}
    size = model.layers.layer_bytes / 2**20
    print(f"\nlayers; {depth} of {size:.0f} MiB; copying all takes {1000 * copying:.1f} ms")
    for tokens in tqdm(sizes, desc="layers", disable=None, leave=False):
        texts = [[40 + i % 50] * 16 for i in range(tokens // 16)]
        seconds: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(rounds):
            for name, (copies, resident) in contenders.items():
                seconds[name] += forwards(model, copies, resident, texts, 2)
        best[tokens] = {name: min(times) for name, times in seconds.items()}
        speedups[tokens] = best[tokens]["serial"] / best[tokens]["pipeline"]
        shown = "  ".join(f"{name} {1000 * value:.1f}" for name, value in best[tokens].items())
        tqdm.write(f"{tokens:6} tokens, ms: {shown}  serial / pipeline {speedups[tokens]:.2f}")
    pipeline.close()
    balanced = min(sizes, key=lambda tokens: abs(math.log(best[tokens]["resident"] / copying)))
    return {
        "balanced_tokens": balanced,
        "speedup_layer_pipeline": round(speedups[balanced], 2),
        "most_tokens": sizes[-1],
        "speedup_layer_pipeline_most_tokens": round(speedups[sizes[-1]], 2),
    }


def forwards(model: JudgeModel, copies: Any, resident: int, texts: list[list[int]], turns: int) -> list[float]:
    """Return the seconds of `turns` forwards, after one that warms up."""
    model.layers.release()
    model.layers.copies = copies
    model.layers.place(resident)
    times = []
    for _ in range(turns + 1):
        start = time.perf_counter()
        model(texts).tolist()
        times.append(time.perf_counter() - start)
    return times[1:]


def copy_seconds(model: JudgeModel) -> float:
    """Return the seconds of copying every layer, and nothing else."""
    target, times = torch.empty_like(model.layers.host[0]), []
    for _ in range(4):
        start = time.perf_counter()
        for block in model.layers.host:
            target.copy_(block)
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer steps and turns: under 2 minutes on 2 cores")
    parser.add_argument("--shape", choices=("nano", "small"), default="small", help="the model; nano is for tests")
    parser.add_argument("--workers", type=int, default=1, help="reward workers of every contender")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    size, periods, judged = {"nano": (2, 1, 1), "small": (3, 2, 1) if flags.quick else (6, 3, 1)}[flags.shape]
    shape = replace(SHAPES[flags.shape], prompts=size, responses=size)
    metrics: dict[str, Any] = {"name": "reward", "shape": flags.shape, "workers": flags.workers}
    with tempfile.TemporaryDirectory() as folder:
        metrics |= programs(shape, periods, flags.workers)
        metrics |= judge(shape, judged, Path(folder) / "judge")
        width, rounds = (64, 1) if flags.shape == "nano" else (768, 2) if flags.quick else (1024, 6)
        metrics |= layers(width, 8, (16, 32, 64, 128, 256), rounds, Path(folder) / "layers")
    print(json.dumps(metrics))


if __name__ == "__main__":
    main()
