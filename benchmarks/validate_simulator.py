"""Simulated against measured seconds: whole training steps on two ranks of one thread each, and the same rounds simulated.

    python benchmarks/validate_simulator.py [--quick]

Really run: train.py's step (plan, regroup, rollout with windows and grading, training, weight sync) with a model of
random weights. Each response has a length of its own, whatever the policy, shaped like the paper's
(benchmarks/tail_batching.py). Runs take turns, step by step. Simulated: simulate.py with the same settings, prompts,
lengths and policies, and with what was measured before the first step: profiler.py's decode and prefill times, a few
batches of training, an exchange of events and a weight sync. Nothing is fitted to the steps themselves.

A kind's error is that of each step's seconds, without sign, in the mean over its steps; `..._rollout` that of rollouts.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402
from tail_batching import PERIOD, RANKS, Trace, in_turn, progress_bar  # noqa: E402

import parallel  # noqa: E402
from config import load_config  # noqa: E402
from core import Prompt, PromptId  # noqa: E402
from costs import Efficiency, Hardware, Shape  # noqa: E402
from loss import ADVANTAGES  # noqa: E402, F401
from metrics import Clock  # noqa: E402
from parallel import World  # noqa: E402
from planner import Profile, Report  # noqa: E402
from profiler import make_profile  # noqa: E402
from rollout import EngineStats  # noqa: E402
from settings import MODELS, Config  # noqa: E402
from simulate import ClusterConfig, GradingConfig, ModelFile, Simulation, SimulationConfig  # noqa: E402
from streaming import StreamConfig  # noqa: E402
from train import Run, build, group_advantages, learn, regroup, roll_out  # noqa: E402
from trainer import Example  # noqa: E402
from warm_start import ensure_model  # noqa: E402

SETTINGS = [
    "--run.device=cpu",
    "--data.train=hailstone",
    "--data.eval_prompts=0",
    "--warm_start.steps=0",
    "--warm_start.hidden_size=256",
    "--warm_start.num_layers=6",
    "--scheduler.num_prompts=8",
    "--scheduler.num_responses=8",
    "--scheduler.window_iterations=4",
    "--rollout.max_prompt_tokens=16",
    "--rollout.max_running=64",
]
KINDS = {  # one more is one more line: its settings in train.py and, where they differ, in the simulator
    "synchronous": ["--scheduler.policy=synchronous"],
    "tail_batching": [],
    "elastic": ["--planner.rule=predict"],
    "elastic, always 2": ["--rollout.tensor_parallel=2"],
}


@dataclass
class Side:
    """One contender: its real run and what each of its steps took."""

    name: str
    run: Run
    seconds: list[dict[str, float]] = field(default_factory=list)  # by stage, of the slowest rank
    sizes: list[int] = field(default_factory=list)


class Given:
    """The trace's lengths for the prompts of a real run."""

    def __init__(self, trace: Trace, prompts: list[Prompt]):
        self.trace, self.known, self.limit = trace, prompts, trace.limit

    def prompts(self, count: int) -> list[Prompt]:
        return self.known

    def lengths(self, id: PromptId, count: int, visit: int) -> list[int]:
        return [self.trace.length((*id, r)) for r in range(count)]


def give_lengths(run: Run, trace: Trace) -> None:
    """Let every response of a run have its length of the trace."""
    add = run.engine.add

    def add_traced(sequence: Any) -> None:
        sequence.max_new_tokens, sequence.ignore_eos = trace.length(sequence.id), True
        add(sequence)

    run.engine.add = add_traced


# ---- real ---------------------------------------------------------------------------------------------------------


def step(side: Side, left: int) -> None:
    """Take one step of train.py's loop. Collective."""
    run, clock = side.run, Clock()
    plan = run.policy.plan(run.stream.take, left)
    parallel.barrier(run.world)
    with clock.span("step"):
        regroup(run, plan, clock)
        groups, current = roll_out(run, plan, run.policy, clock)
        tokens = run.policy.race.tokens | current.aborted
        run.policy.close(current.aborted)
        with clock.span("train"):
            learn(run.trainer, groups, group_advantages(groups, run.config), run.config)
        with clock.span("sync"):
            run.step += 1
            run.engine.load_weights(run.trainer.model, run.step)
    own, run.engine.stats = (clock.take(), run.engine.stats.preemptions), EngineStats()
    stages, preemptions = zip(*parallel.gather_objects(run.world, own), strict=True)
    slowest = {name: max(s.get(name, 0.0) for s in stages) for name in stages[0]}
    tp = run.engine.parallel
    run.planner.observe(plan.kind, Report(sum(preemptions[:: tp.size]), slowest["rollout"], tuple(tokens.values())))
    side.seconds.append(slowest)
    side.sizes.append(tp.size)


def seconds_of(world: World, work: Callable[[], Any], times: int = 5) -> float:
    """Return the median seconds of a collective piece of work, each time those of the slowest rank."""
    taken = []
    for _ in range(times):
        parallel.barrier(world)
        start = time.perf_counter()
        work()
        taken.append(max(parallel.gather_objects(world, time.perf_counter() - start)))
    return median(taken)


def measure_rest(run: Run, trace: Trace) -> tuple[Hardware, Shape, Efficiency]:
    """Measure what the profile does not tell: training, an exchange of events, a weight sync. Collective."""
    world, trainer, shape = run.world, run.trainer, run.trainer.model.shape
    size = Shape(
        sum(p.numel() for p in trainer.model.parameters()),
        shape.num_layers,
        shape.hidden_size,
        shape.num_kv_heads,
        shape.head_dim,
    )

    def train(count: int) -> None:
        lengths = [trace.length((-1, i // 8, i % 8)) for i in range(world.rank, count * world.size, world.size)]
        trainer.accumulate([Example((65,) * 8, (66,) * n, (-5.0,) * n, 0.1) for n in lengths])
        trainer.update()

    few, many = (seconds_of(world, lambda: train(count), 3) for count in (4, 32))
    del few
    exchange = seconds_of(world, lambda: [parallel.gather_objects(world, ([], {})) for _ in range(50)]) / 50
    sync = seconds_of(world, lambda: run.engine.load_weights(trainer.model, 0))
    plain = Efficiency(train=1.0, passes=3.0, train_seconds=0.0, rollout_seconds=0.0, window_seconds=exchange)
    from costs import Costs

    lengths = [[8 + trace.length((-1, i // 8, i % 8)) for i in range(n * world.size)] for n in (4, 32)]
    hardware = Hardware(flops=1.0, network=1.0)
    operations = [Costs(hardware, size, plain).train(n, world.size) for n in lengths]
    hardware = replace(hardware, flops=operations[1] / many, network=size.parameters * 2 / sync)
    return hardware, size, plain


def play(world: World, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure the machine, run all kinds for real; return the table's rows."""
    trace, periods = Trace(12 if arguments.quick else 20), 1 if arguments.quick else 2
    settings = [*SETTINGS, f"--rollout.max_response_tokens={trace.limit}", f"--run.steps={periods * PERIOD}"]
    with ExitStack() as stack:
        folder = parallel.broadcast_object(world, stack.enter_context(tempfile.TemporaryDirectory()))
        base = load_config(Config, None, settings)
        profile = make_profile(base, ensure_model(base.warm_start, base.data.train, MODELS, world), world)
        if world.is_main:
            profile.save(Path(folder, "profile.json"))
        parallel.barrier(world)
        sides = []
        for i, (name, own) in enumerate(KINDS.items()):
            own = [*own, f"--run.dir={folder}/{i}", f"--planner.profile={folder}/profile.json"]
            os.makedirs(f"{folder}/{i}", exist_ok=True)
            run = build(load_config(Config, None, [*settings, *own]), world, resume=False)
            run.recorder.bar.close()
            give_lengths(run, trace)
            sides.append(Side(name, run))
            stack.enter_context(run.pool)
        given = measure_rest(sides[0].run, trace)
        bar = stack.enter_context(progress_bar("steps", periods * PERIOD * len(sides), world))
        for turn in range(periods * PERIOD):
            for side in in_turn(sides, turn):
                bar.set_postfix_str(side.name)
                step(side, periods * PERIOD - turn)
                bar.update()
        result = report(sides, given, profile, trace) if world.is_main else {}
        parallel.barrier(world)  # before rank 0 removes the folder
        return result


# ---- simulated ----------------------------------------------------------------------------------------------------


def simulated(
    side: Side, given: tuple[Hardware, Shape, Efficiency], profile: Profile, trace: Trace
) -> list[dict[str, Any]]:
    """Return the simulator's records of a contender's steps."""
    config, (hardware, shape, efficiency) = side.run.config, given
    cluster = ClusterConfig(
        gpus=side.run.world.size,
        tensor_parallel=config.rollout.tensor_parallel,
        max_running=config.rollout.max_running,
        page_size=config.rollout.page_size,
        steps=config.run.steps,
        seed=config.run.seed,
    )
    grading = GradingConfig(sandboxes=1, rule_seconds=1e-3)
    parts = SimulationConfig(cluster, config.scheduler, grading, StreamConfig("off"), config.planner)
    workload = Given(trace, side.run.stream.prompts)
    return Simulation(parts, ModelFile(shape, efficiency), hardware, workload, profile).run()


def report(
    sides: list[Side], given: tuple[Hardware, Shape, Efficiency], profile: Profile, trace: Trace
) -> dict[str, Any]:
    """Print the table; return the metrics."""
    metrics: dict[str, Any] = {"name": "validate_simulator"}
    print(f"{'':20} {'simulated / measured seconds of a step, and of its rollout':60}  error of steps, rollouts, training")
    errors: dict[str, list[tuple[float, float]]] = {}
    for side in sides:
        records = simulated(side, given, profile, trace)
        pairs = {
            stage: [(r["seconds"][stage], s[stage]) for r, s in zip(records, side.seconds, strict=True)]
            for stage in ("step", "rollout", "train")
        }
        off = {stage: [abs(a / b - 1) for a, b in rows] for stage, rows in pairs.items()}
        for i, record in enumerate(records):
            kind, size = record["round"]["kind"], record["engine"]["tensor_parallel"]
            row = "   ".join(f"{stage} {pairs[stage][i][0]:6.2f} / {pairs[stage][i][1]:6.2f}" for stage in pairs)
            print(f"{side.name:20} {kind:5} TP {size} (really {side.sizes[i]})   {row}")
        sums = {stage: sum(a for a, _ in rows) / sum(b for _, b in rows) for stage, rows in pairs.items()}
        print(f"{side.name:20} " + "   ".join(f"{k} {v:.3f} in all, {mean(off[k]):.1%} off" for k, v in sums.items()))
        errors.setdefault(side.name.partition(",")[0], []).extend(zip(off["step"], off["rollout"]))
    for name, rows in errors.items():
        metrics[f"mean_error_{name}"] = round(mean(a for a, _ in rows), 4)
        metrics[f"mean_error_{name}_rollout"] = round(mean(b for _, b in rows), 4)
    return metrics


def worker(arguments: argparse.Namespace) -> None:
    world = parallel.start("cpu", 600.0)
    torch.set_num_threads(1)
    try:
        metrics = play(world, arguments)
        if world.is_main:
            print(json.dumps(metrics))
    finally:
        parallel.stop(world)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="shorter responses, one period: under 2 minutes on 2 cores")
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        worker(arguments)
        return 0
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={RANKS}"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run([*launch, __file__, *sys.argv[1:]], env=env).returncode


if __name__ == "__main__":
    sys.exit(main())
