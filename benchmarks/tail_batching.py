"""Rollout and step time of tail batching against the synchronous baseline, on two ranks of one thread each.

    python benchmarks/tail_batching.py [--quick] [--shape half]

All contenders take turns round by round, in one process a rank, with the engine, policy, placement and rounds of
train.py. They train the same number of samples and, after each period, exactly the same prompts.

task    The default task with its warm-started model, really trained: synchronous and tail batching, each with weights
        of its own. The first use makes the model: minutes, not part of any figure.
trace   Random weights and given lengths. A sample has its length whatever the policy, from a model fitted to the
        paper's 16k row (Figure 11): responses spread log-normally around their prompt's median, P75 is 1.7 times the
        median, and 3 % of them, more in some prompts than in others, run to the limit, 26 times the median.
        Contenders: synchronous, eta on prompts only, on responses only, on both; a longer window, migration.

`small` has 20 million parameters; `half` 358 million, the shape of a 0.5B Qwen2 but for its vocabulary: the largest
that fits the time. Median and limit are a fortieth of the paper's, so windows are 4 steps. A rank has 32 rows, in a
short round 50, where the paper's have at least 64: more rows make a CPU's steps slower, not yet a GPU's. Engine steps
are those of the rank that took most; the machine's moods do not change them.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
from tqdm import tqdm

import parallel
from buffer import SampleBuffer
from config import load_config
from core import Group, Prompt, SampleId, Visit, VisitId
from engine.sequence import Sequence as EngineSequence
from job import Job, Rollout
from metrics import Clock
from model import Model, parse_shape
from parallel import TensorParallel, World
from reward import RewardConfig
from rewards.pool import RewardPool
from rollout import Engine, RolloutConfig
from rounds import Round
from sampling import SamplingConfig
from scheduler import POLICIES, RoundPolicy, SchedulerConfig
from settings import Config
from warm_start import WarmStartConfig, byte_tokenizer, hf_config

RANKS = 2
PERIOD = 5  # rounds: with eta = 1.25, four short ones and the long one that trains what they put off
PAPER = {"8k": 1.74, "16k": 3.15, "32k": 3.96}  # rollout of tail batching alone, Figure 11


@dataclass(frozen=True)
class Contender:
    name: str
    scheduler: dict[str, Any]  # fields of SchedulerConfig


RACE: dict[str, Any] = {"eta_responses": 1.25}  # of a contender that says nothing else
SYNCHRONOUS = Contender("synchronous", {"policy": "synchronous"})
BOTH = Contender("eta on both", {})
BASIC = (
    SYNCHRONOUS,
    Contender("eta on prompts", {"eta_responses": 1.0}),
    Contender("eta on responses", {"eta_prompts": 1.0}),
    BOTH,
)
WINDOWS = tuple(Contender(f"both, window {n}", {"window_iterations": n}) for n in (8, 32, 64))
LONG_WINDOW = Contender("both, window 16", {"window_iterations": 16})
MIGRATION = (
    Contender("synchronous, other migration", {"policy": "synchronous"}),
    Contender("both, other migration", {}),
)


@dataclass
class Played:
    """One round of one contender, as the slowest rank saw it."""

    period: int
    seconds: float
    step_seconds: float  # rollout, training and the rest
    stages: dict[str, float]  # mean over ranks
    steps: int  # of the engine with the most
    round: dict[str, Any]  # RoundStats, windows, migrated
    prompts: list[VisitId]  # trained
    tokens: int  # trained


@dataclass
class Result:
    """All rounds of one contender."""

    contender: Contender
    rounds: list[Played] = field(default_factory=list)

    def total(self, value) -> float:
        return sum(value(r) for r in self.rounds)

    def per_period(self, value) -> list[float]:
        return [sum(value(r) for r in self.rounds if r.period == p) for p in sorted({r.period for r in self.rounds})]

    @property
    def wait_fraction(self) -> float:
        return self.total(lambda r: r.stages.get("window_wait", 0.0)) / self.total(lambda r: r.seconds)


# ---- lengths -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trace:
    """How long each response is; a pure function of its name."""

    median: float  # of those that do not run away
    prompt_spread: float = 0.23  # of the prompts' medians, in natural logarithms
    response_spread: float = 0.71  # around the median of their prompt
    runaway: float = 0.03  # share of responses that run to the limit
    gather: float = 0.05  # how much prompts differ in that share: 0 all the same, 1 all or none
    longest: float = 26.5  # limit over median; runaways raise the median by 3 %

    @property
    def limit(self) -> int:
        return round(self.longest * self.median)

    def length(self, id: SampleId) -> int:
        epoch, prompt, response = id
        nature, chance = Random(f"{epoch} {prompt}"), Random(f"{epoch} {prompt} {response}")
        center = math.log(self.median) + self.prompt_spread * nature.gauss()
        strength = 1 / self.gather - 1
        runs_away = chance.random() < nature.betavariate(self.runaway * strength, (1 - self.runaway) * strength)
        length = math.exp(center + self.response_spread * chance.gauss())
        return self.limit if runs_away else min(max(round(length), 1), self.limit)


class TraceEngine(Engine):
    """An engine that gives every sequence the length that the trace has for it."""

    trace: Trace

    def add(self, sequence: EngineSequence) -> None:
        sequence.max_new_tokens, sequence.ignore_eos = self.trace.length(sequence.id), True
        super().add(sequence)


@dataclass(frozen=True)
class Shape:
    hidden: int
    intermediate: int
    layers: int
    heads: int
    median: int = 16  # length of a response
    prompts: int = 8  # P0
    responses: int = 8  # R0
    window: int = 4


SHAPES = {
    "nano": Shape(32, 64, 1, 2, median=8),
    "small": Shape(512, 2048, 6, 8),
    "half": Shape(896, 4864, 24, 14),
}


def random_model(shape: Shape, **more: int) -> Model:
    """Return a model of bytes with small random weights. `more`: fields of its `config.json`."""
    config = hf_config(WarmStartConfig(), byte_tokenizer()) | {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
    }
    model = Model(parse_shape(config | more, "random"))
    generator = torch.Generator().manual_seed(0)
    for name, tensor, _ in model.hf_tensors():
        tensor.fill_(1.0) if name.endswith("norm.weight") else tensor.normal_(0.0, 0.02, generator=generator)
    return model


def build_engine(shape: Shape, world: World) -> TraceEngine:
    trace = Trace(shape.median)
    rollout = RolloutConfig(max_prompt_tokens=16, max_response_tokens=trace.limit, max_running=128, kv_gib=1.0)
    parts = random_model(shape), rollout, SamplingConfig(), list[int](), byte_tokenizer()
    engine = TraceEngine(*parts, TensorParallel(world))
    engine.trace = trace
    return engine


class Cursor:
    """Prompts without end, named by period, so that every contender draws the same."""

    def __init__(self, period: int):
        self.period, self.taken = period, 0

    def take(self, count: int) -> list[Visit]:
        first, self.taken = self.taken, self.taken + count
        return [
            Visit(self.period, Prompt(i, (*range(60, 70), 70 + i), "", "", "match")) for i in range(first, self.taken)
        ]


# ---- rounds ------------------------------------------------------------------------------------------------------


def play_trace(
    scheduler: SchedulerConfig, engine: TraceEngine, pool: RewardPool, policy, cursor: Cursor, left: int, world
) -> Played:
    """Play one round on given lengths."""
    clock, before = Clock(), engine.stats.decode_steps
    plan = policy.begin(cursor.take, left)
    parallel.barrier(world)
    with clock.span("step"):
        current = Round(engine, pool, world, clock, scheduler)
        with clock.span("rollout"):
            current.play(plan, policy)
        groups = current.collect()
    return record(cursor.period, groups, current, policy, clock, engine.stats.decode_steps - before)


def step_task(job: Job, period: int, left: int) -> Played:
    """Take one step of train.py's loop."""
    clock, before = job.clock, job.engine.stats.decode_steps
    plan = job.policy.begin(job.cursor.take, left)
    parallel.barrier(job.world)
    with clock.span("step"):
        groups, current = job.play(plan, job.policy, clock)
        job.learn(Rollout(groups, SampleBuffer(len(groups))))
        job.sync_weights()
    return record(period, groups, current, job.policy, clock, job.engine.stats.decode_steps - before)


def record(
    period: int, groups: Sequence[Group], current: Round, policy: RoundPolicy, clock: Clock, steps: int
) -> Played:
    """Return what a round was. Collective."""
    stages, decoded = zip(*parallel.gather_objects(current.world, (clock.take(), steps)), strict=True)
    return Played(
        period=period,
        seconds=max(s["rollout"] for s in stages),
        step_seconds=max(s["step"] for s in stages),
        stages={name: sum(s.get(name, 0.0) for s in stages) / len(stages) for name in {n for s in stages for n in s}},
        steps=max(decoded),
        round=asdict(policy.close(current.aborted)) | current.record,
        prompts=[g.visit for g in groups],
        tokens=sum(len(sample.token_ids) for g in groups for sample in g.samples),
    )


def measure_trace(shape: Shape, contenders: Sequence[Contender], periods: int, world: World) -> list[Result]:
    """Let all contenders play `periods` periods, taking turns after every round."""
    engine = build_engine(shape, world)
    results = [Result(c) for c in contenders]
    common = {"num_prompts": shape.prompts, "num_responses": shape.responses, "window_iterations": shape.window}
    bar = progress_bar("trace", periods * PERIOD * len(contenders), world)
    with RewardPool(RewardConfig(), {"match"}) as pool, bar:
        for period in range(periods):
            sides = []
            for result in results:
                scheduler = SchedulerConfig(**common | RACE | result.contender.scheduler)
                sides.append((result, scheduler, POLICIES[scheduler.policy](scheduler), Cursor(period)))
            for turn in range(PERIOD):
                for result, scheduler, policy, cursor in in_turn(sides, turn):
                    bar.set_postfix_str(result.contender.name)
                    result.rounds.append(play_trace(scheduler, engine, pool, policy, cursor, PERIOD - turn, world))
                    bar.update()
    return results


def in_turn(sides: list[Any], turn: int) -> list[Any]:
    """Who goes first changes, so that nobody profits from its place."""
    return sides[turn % len(sides) :] + sides[: turn % len(sides)]


# ---- the default task --------------------------------------------------------------------------------------------


def measure_task(contenders: Sequence[Contender], periods: int, overrides: Sequence[str], world: World) -> list[Result]:
    """Let all contenders train the warm-started model of configs/tiny.toml, taking turns after every step."""
    results = [Result(c) for c in contenders]
    with ExitStack() as stack:
        folder = parallel.broadcast_object(world, stack.enter_context(tempfile.TemporaryDirectory()))
        jobs = []
        for i, contender in enumerate(contenders):
            own = [f"--scheduler.{key}={value}" for key, value in (RACE | contender.scheduler).items()]
            own += [f"--run.dir={folder}/{i}", f"--run.steps={periods * PERIOD}", "--data.eval_prompts=0"]
            config = load_config(Config, str(ROOT / "configs" / "tiny.toml"), [*overrides, *own])
            os.makedirs(config.run.dir, exist_ok=True)
            job = Job(config, world, resume=False)
            job.recorder.bar.close()
            stack.enter_context(job.graders)
            jobs.append(job)
        bar = stack.enter_context(progress_bar("task", periods * PERIOD * len(jobs), world))
        for turn in range(periods * PERIOD):
            for result, job in in_turn(list(zip(results, jobs)), turn):
                bar.set_postfix_str(result.contender.name)
                period, left = turn // PERIOD, PERIOD - turn % PERIOD
                result.rounds.append(step_task(job, period, left))
                bar.update()
        parallel.barrier(world)  # before rank 0 removes the folder
    return results


def progress_bar(name: str, total: int, world: World) -> tqdm:
    return tqdm(total=total, desc=name, unit="round", disable=None if world.is_main else True, leave=False)


# ---- results -----------------------------------------------------------------------------------------------------


def lost_and_doubled(results: Sequence[Result]) -> tuple[int, int]:
    """Count prompts that a contender never trained though the synchronous one did, and those it trained twice."""
    expected = {id for r in results[0].rounds for id in r.prompts}
    lost = doubled = 0
    for result in results:
        trained = Counter(id for r in result.rounds for id in r.prompts)
        lost += len(expected - trained.keys())
        doubled += sum(count - 1 for count in trained.values()) + len(trained.keys() - expected)
    return lost, doubled


def ratios(base: Result, other: Result, value) -> list[float]:
    return [b / o for b, o in zip(base.per_period(value), other.per_period(value), strict=True)]


def table(title: str, results: Sequence[Result], with_steps: bool) -> None:
    base, num_periods = results[0], len(results[0].per_period(lambda r: 1))
    print(f"\n{title}; {num_periods} periods of {PERIOD} rounds; seconds, steps and tokens of a period")
    head = f"{'':30} rollout s   x faster (periods)   " + ("step s  x faster   " if with_steps else "")
    print(
        head + "engine steps   x fewer   short/long   longest in short   trained   wasted   window wait   idle   moved"
    )
    for result in results:
        rollout = ratios(base, result, lambda r: r.seconds)
        line = f"{result.contender.name:30} {result.total(lambda r: r.seconds) / num_periods:9.2f}"
        line += f"   {statistics.median(rollout):5.2f} ({min(rollout):5.2f} ..{max(rollout):5.2f})"
        if with_steps:
            steps = ratios(base, result, lambda r: r.step_seconds)
            line += f"  {result.total(lambda r: r.step_seconds) / num_periods:7.2f}  {statistics.median(steps):8.2f}"
        short = [r for r in result.rounds if r.round["kind"] == "short"]
        count, longest = len(short), max((r.round["longest"] for r in short), default=0)
        fewer = base.total(lambda r: r.steps) / result.total(lambda r: r.steps)
        seconds = result.total(lambda r: r.seconds)
        line += f"{result.total(lambda r: r.steps) / num_periods:15.0f}{fewer:10.2f}"
        line += f"{count:9d}/{len(result.rounds) - count:<4d}{longest:16.0f}"
        line += f"{result.total(lambda r: r.tokens) / num_periods:11.0f}"
        line += f"{result.total(lambda r: r.round['wasted_tokens']) / num_periods:9.0f}{result.wait_fraction:13.1%}"
        line += f"{result.total(lambda r: r.stages.get('idle', 0.0)) / seconds:8.1%}"
        line += f"{result.total(lambda r: r.round['migrated']):8.0f}"
        print(line)


def profile(results: Sequence[Result]) -> None:
    """Print where the seconds of a round go, by kind: what stands between the engine steps saved and the time saved."""
    print("\nseconds of a round, mean over ranks, by kind")
    for result in results:
        for kind in ("short", "long"):
            rounds = [r for r in result.rounds if r.round["kind"] == kind]
            if not rounds:
                continue
            seconds = sum(r.seconds for r in rounds)
            names = ("prefill", "decode", "window_wait", "idle", "hand_over", "reward")
            parts = [(name, sum(r.stages.get(name, 0.0) for r in rounds)) for name in names]
            shown = "   ".join(f"{name} {part / len(rounds):.3f}" for name, part in parts)
            per_step = 1000 * dict(parts)["decode"] / sum(r.steps for r in rounds)
            print(
                f"{result.contender.name:30} {kind:5} {seconds / len(rounds):7.3f}   {shown}   "
                f"{sum(r.steps for r in rounds) / len(rounds):.0f} engine steps of {per_step:.1f} ms"
            )


def trace_row(result: Result, base: Result) -> dict[str, Any]:
    """Return what the README shows of a contender: of a period, but for the longest response."""
    faster = ratios(base, result, lambda r: r.seconds)
    short = [r.round["longest"] for r in result.rounds if r.round["kind"] == "short"]
    return {
        "contender": result.contender.name,
        "faster": round(statistics.median(faster), 2),
        "least": round(min(faster), 2),
        "most": round(max(faster), 2),
        "fewer_steps": round(base.total(lambda r: r.steps) / result.total(lambda r: r.steps), 2),
        "longest_short": max(short, default=None),
        "tokens": round(statistics.mean(result.per_period(lambda r: r.tokens))),
        "window_wait": round(result.wait_fraction, 3),
    }


def report(task: Sequence[Result], trace: Sequence[Result], shape: str) -> None:
    """Print the tables and, as the last line, the metrics in JSON."""
    metrics: dict[str, Any] = {"name": "tail_batching", "shape": shape}
    if task:
        table("task: the default task, really trained", task, with_steps=True)
        profile(task)
        by_name = {r.contender.name: r for r in task}
        rollout = ratios(task[0], by_name["eta on both"], lambda r: r.seconds)
        step = ratios(task[0], by_name["eta on both"], lambda r: r.step_seconds)
        metrics["rollout_speedup_task"] = round(statistics.median(rollout), 2)
        metrics["step_speedup_task"] = round(statistics.median(step), 2)
        metrics["window_wait_fraction_task"] = round(by_name["eta on both"].wait_fraction, 3)
    table(f"trace: given lengths, shape {shape}", trace, with_steps=False)
    profile(trace)
    paper = ", ".join(f"{value} at {name}" for name, value in PAPER.items())
    print(f"\nthe paper's rollout with eta = 1.25 on both: {paper}")
    by_name = {r.contender.name: r for r in trace}
    for name, key in (("eta on prompts", "_prompts"), ("eta on responses", "_responses"), ("eta on both", "")):
        rollout = ratios(trace[0], by_name[name], lambda r: r.seconds)
        metrics[f"rollout_speedup_trace{key}"] = round(statistics.median(rollout), 2)
    fewer = trace[0].total(lambda r: r.steps) / by_name["eta on both"].total(lambda r: r.steps)
    metrics["engine_step_ratio_trace"] = round(fewer, 2)
    metrics["window_wait_fraction"] = round(by_name["eta on both"].wait_fraction, 3)
    metrics["periods"] = len(trace[0].per_period(lambda r: 1))
    metrics["contenders"] = [trace_row(result, trace[0]) for result in trace]
    lost, doubled = map(sum, zip(*(lost_and_doubled(part) for part in (task, trace) if part)))
    print(json.dumps(metrics | {"prompts_lost": lost, "prompts_doubled": doubled}))


def play(shape: str, quick: bool, world: World) -> None:
    task: list[Result] = []
    if shape == "nano":
        overrides = ["--warm_start.steps=0", "--rollout.max_response_tokens=32", "--scheduler.num_prompts=4"]
        task = measure_task((SYNCHRONOUS, BOTH), 1, overrides, world)
    elif shape == "small":
        task = measure_task((SYNCHRONOUS, BOTH) + (() if quick else WINDOWS), 1 if quick else 4, [], world)
    other = {"migrate": not SchedulerConfig().migrate}
    migration = tuple(replace(c, scheduler=c.scheduler | other) for c in MIGRATION)
    contenders = BASIC + (() if quick or shape != "small" else (LONG_WINDOW, *migration))
    periods = 3 if shape == "small" and not quick else 1
    trace = measure_trace(SHAPES[shape], contenders, periods, world)
    if world.is_main:
        report(task, trace, shape)


def on_ranks(count: int, play: Callable[[World], None]) -> int:
    """Run this script again under torchrun, on ranks of one thread each that `play`; return the exit code."""
    if "RANK" not in os.environ:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}"]
        env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        return subprocess.run([*launch, *sys.argv], env=env).returncode
    world = parallel.start("cpu", 600.0)
    torch.set_num_threads(1)
    play(world)
    parallel.barrier(world)  # a rank that leaves early can abort another's exit in gloo's threads
    parallel.stop(world)
    return 0


def trained(folder: Path) -> Counter:
    """Return how often a run has trained each visit, (epoch, index of the prompt): `run.dump_rollouts` tells."""
    rows = [json.loads(row) for path in (folder / "rollouts").glob("*.jsonl") for row in path.open(encoding="utf-8")]
    return Counter((row["epoch"], row["prompt"]["index"]) for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer periods and contenders: under 2 minutes on 2 cores")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="small", help="model of the trace; nano is for tests")
    arguments = parser.parse_args()
    return on_ranks(RANKS, lambda world: play(arguments.shape, arguments.quick, world))


if __name__ == "__main__":
    sys.exit(main())
