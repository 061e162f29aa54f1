"""Simulated against measured seconds: training steps on two ranks of one thread each.

    python benchmarks/validate_simulator.py [--quick]

Really run: train.py's step (plan, regroup, rollout with windows and grading, training, weight sync) with a model of
random weights. Each response has a length of its own, whatever the policy, shaped like the paper's
(benchmarks/tail_batching.py). Runs take turns, step by step. Simulated: simulate.py with the same settings, prompts,
lengths and policies, the sizes that the real planner chose, the seconds of a stream trainer's move, and with what was
measured before and after each turn of all kinds, for a shared machine's speed changes: profiler.py's decode and
prefill times of each rank, batches of training, an exchange of events, a weight sync, a round of short responses.
From the steps themselves come only the sizes chosen and the seconds of the newest move. Training is a line through two
updates of as many samples, so of it little is predicted. Most times, those of runs too, are medians of some. Run it
alone: on a busy machine errors are several times as large.

A kind's error is that of each step's seconds, without sign, in the mean over its steps; `..._rollout` that of rollouts.
Its bias is that of all its steps together, with sign: below 0 they are simulated too fast.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from collections.abc import Sequence as List
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tail_batching import PERIOD, RANKS, Trace, in_turn, on_ranks, progress_bar

import parallel
from config import load_config
from core import Example, Prompt, RoundPlan, SampleId, Span, Visit, VisitId
from engine.sequence import Sequence
from job import Job
from metrics import Clock
from parallel import World
from policies.placement import assign_by_load
from policies.planner import Choice, Launch, ParallelismPlanner, Report
from policies.step_times import Profile, SizeProfile
from profiler import make_profile, measure
from scheduler import Race
from settings import MODELS, Config
from simulate import ClusterConfig, GradingConfig, ModelFile, SimulatedRound, Simulation, SimulationConfig
from simulation.costs import BYTES, Costs, Efficiency, Hardware, Shape
from simulation.workload import Lengths
from trainer import work_of
from warm_start import ensure_model

SETTINGS = [
    "--run.device=cpu",
    "--data.train=hailstone",
    "--data.eval_prompts=0",
    "--warm_start.steps=0",
    "--warm_start.hidden_size=128",
    "--warm_start.num_layers=6",
    "--scheduler.num_prompts=8",
    "--scheduler.num_responses=8",
    "--scheduler.window_iterations=4",
    "--rollout.max_prompt_tokens=16",
    "--rollout.max_running=64",
    "--reward.num_workers=1",
    "--loss.entropy_coef=1e-6",  # else nothing would have a gradient: the rewards of an untrained model are all 0
]
RACE = "--scheduler.eta_responses=1.25"
KINDS = {  # another kind is another line: the settings of its run
    "synchronous": ["--scheduler.policy=synchronous"],
    "tail_batching": [RACE],
    "elastic": [RACE, "--planner.rule=predict"],
    "elastic, always 2": [RACE, "--rollout.tensor_parallel=2"],
    "stream": ["--scheduler.policy=synchronous", "--stream.policy=fixed"],
}


class Recalled(ParallelismPlanner):
    """A planner that repeats the choices of another."""

    due = 0  # no size changes within a round

    def __init__(self, sizes: list[int]):
        self.choices = (Choice(size, "as before") for size in sizes)  # `sizes` may still grow

    def choose(self, kind: str, launch: Launch) -> Choice:
        return next(self.choices)

    def observe(self, kind: str, report: Report) -> None: ...


@dataclass
class Side:
    """One contender: the same run several times over, and the median of what each of its steps took."""

    name: str
    jobs: list[Job]
    seconds: list[dict[str, float]] = field(default_factory=list)  # by stage, of the slowest rank
    sizes: list[int] = field(default_factory=list)


class Given:
    """Lengths that only depend on the names of responses, for the prompts of a real run."""

    def __init__(self, length: Callable[[SampleId], int], prompts: list[Prompt], limit: int):
        self.length, self.known, self.limit = length, prompts, limit

    def prompts(self, count: int) -> list[Prompt]:
        return self.known

    def lengths(self, id: VisitId, count: int, step: int) -> list[int]:
        return [self.length(id.sample(r)) for r in range(count)]


def contexts(trace: Trace) -> tuple[int, ...]:
    return 16, trace.limit // 4, trace.limit // 2


def give_lengths(job: Job, length: Callable[[SampleId], int]) -> None:
    """Let every response of a run have the length that its name stands for."""
    add = type(job.engine).add

    def add_with_length(sequence: Sequence) -> None:
        sequence.max_new_tokens, sequence.ignore_eos = length(sequence.id), True
        add(job.engine, sequence)

    job.engine.add = add_with_length


# ---- real ---------------------------------------------------------------------------------------------------------


def play_step(side: Side, left: int) -> None:
    """Take the next step of a contender, in each of its runs. Collective."""
    taken = []
    for i, job in enumerate(side.jobs):
        if i and not isinstance(job.planner, Recalled):
            job.planner = Recalled(side.sizes)
        taken.append(step(job, left))
        if not i:
            assert job.choice
            side.sizes.append(job.choice.size)
    side.seconds.append({stage: median(one[stage] for one in taken) for stage in taken[0]})


def step(job: Job, left: int) -> dict[str, float]:
    """Take one step of train.py's loop; return the seconds of its stages, of the slowest rank. Collective."""
    plan = job.policy.begin(job.cursor.take, left)
    parallel.barrier(job.world)
    with job.clock.span("step"):
        job.regroup(plan)
        rollout = job.roll_out(plan)
        job.learn(rollout)
        job.sync_weights()
    reports = job.take_reports()
    job.observe(plan, rollout, reports)
    return {name: max(r.seconds[name] for r in reports) for name in ("step", "rollout", "train", "sync")}


def seconds_of(world: World, work: Callable[[], Any], times: int = 3) -> float:
    """Return the seconds of a collective piece of work on the slowest rank, the median of some."""
    taken = []
    for _ in range(times):
        parallel.barrier(world)
        start = time.perf_counter()
        work()
        taken.append(max(parallel.gather_objects(world, time.perf_counter() - start)))
    return median(taken)


@dataclass(frozen=True)
class Machine:
    """What was measured of it, in seconds, all but the profiles on the slowest rank."""

    ranks: list[dict[int, SizeProfile]]  # of each rank, by tensor-parallel size: cores of a shared machine differ
    train: tuple[float, float]  # an update of COUNT responses without their tail, and with it
    sync: float
    exchange: float
    short_round: dict[int, float]  # a round of short responses, at each tensor-parallel size


def mean_of(machines: list[Machine]) -> Machine:
    """Return the mean of each time."""
    ranks = [mean_profile(own) for own in zip(*(m.ranks for m in machines), strict=True)]
    train = tuple(map(mean, zip(*(m.train for m in machines))))
    short_round = {n: mean(m.short_round[n] for m in machines) for n in machines[0].short_round}
    return Machine(ranks, train, mean(m.sync for m in machines), mean(m.exchange for m in machines), short_round)


def mean_profile(known: List[dict[int, SizeProfile]]) -> dict[int, SizeProfile]:
    sizes = {}
    for n in known[0]:
        profiles = [profile[n] for profile in known]
        decode = ((*rows[0][:2], mean(t for *_, t in rows)) for rows in zip(*(p.decode for p in profiles)))
        prefill = ((rows[0][0], mean(t for _, t in rows)) for rows in zip(*(p.prefill for p in profiles)))
        sizes[n] = replace(profiles[0], decode=tuple(decode), prefill=tuple(prefill))
    return sizes


COUNT = 64  # responses of an update


def short(id: SampleId) -> int:
    return 2 + (id.prompt + id.response) % 16


def short_plan(job: Job) -> RoundPlan:
    """Return what a short round launches, with nobody to lose it."""
    prompts = tuple(Visit(-1, prompt) for prompt in job.cursor.prompts[:10])
    return RoundPlan("short", prompts, 10, keep_prompts=10, keep_responses=10)


def batch(trace: Trace, with_tail: bool) -> list[int]:
    longest = trace.limit if with_tail else 2 * trace.median
    return [round(min(trace.length(SampleId(-1, i // 8, i % 8)), longest)) for i in range(COUNT)]


def update(job: Job, trace: Trace, with_tail: bool) -> None:
    """Learn a batch, as after a rollout. Collective."""
    lengths = batch(trace, with_tail)
    examples = [
        Example(SampleId(0, 0, i), (65,) * 8, (66,) * n, (Span(0, n, 0),), (-5.0,) * n, 0.1)
        for i, n in enumerate(lengths)
    ]
    shares = assign_by_load([work_of(job.trainer, example) for example in examples], job.world.size)
    job.trainer.accumulate([examples[i] for i in shares[job.world.rank]])
    job.trainer.update()


def sync(job: Job) -> None:
    """Give the engine the new weights, packed for a CPU, which a run does in its next rollout."""
    job.engine.load_weights(job.trainer.model, 0)
    job.engine.regroup(job.engine.parallel)


def measure_machine(job: Job, trace: Trace) -> Machine:
    """Measure the profile and what it does not tell: training, weight sync, events, short rounds. Collective."""
    world = job.world
    sizes = measure(job.engine, job.tp_groups, world, contexts(trace), of_ranks=lambda seconds: seconds[world.rank])
    plan = short_plan(job)

    def short_round(size: int) -> float:
        job.engine.regroup(job.tp_groups[size])
        give_lengths(job, short)
        clocks = [Clock() for _ in range(3)]
        for clock in clocks:
            parallel.barrier(world)
            job.play(plan, Race(plan), clock)
        del job.engine.add
        return median(max(parallel.gather_objects(world, clock.take()["rollout"])) for clock in clocks)

    def training(with_tail: bool) -> float:
        return seconds_of(world, lambda: update(job, trace, with_tail))

    return Machine(
        parallel.gather_objects(world, sizes),
        short_round={size: short_round(size) for size in sorted(sizes, reverse=True)},
        train=(training(with_tail=False), training(with_tail=True)),
        sync=seconds_of(world, lambda: sync(job)),  # of replicas of one rank
        exchange=seconds_of(world, lambda: [parallel.gather_objects(world, ([], {})) for _ in range(50)]) / 50,
    )


def costs_of(machine: Machine, job: Job, trace: Trace) -> tuple[Hardware, ModelFile]:
    """Return what the simulator is told of a machine beside its profile."""
    shape, ranks = job.trainer.model.shape, job.world.size
    parameters = sum(p.numel() for p in job.trainer.model.parameters())
    dense = Shape(parameters, shape.num_layers, shape.hidden_size, shape.num_kv_heads, shape.head_dim)
    plain = Efficiency(train=1.0, passes=3.0, train_seconds=0.0, rollout_seconds=0.0, streamable=1.0)
    one = Costs(Hardware(flops=1.0), dense, plain)
    work = [one.train([n + 8 for n in batch(trace, with_tail)], ranks) for with_tail in (False, True)]
    slope = max(machine.train[1] - machine.train[0], 1e-3) / (work[1] - work[0])
    hardware = Hardware(flops=1 / slope, network=parameters * BYTES / machine.sync)
    known = replace(plain, train_seconds=max(machine.train[1] - work[1] * slope, 0.0), window_seconds=machine.exchange)
    return hardware, ModelFile(dense, known)


def play(world: World, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure the machine, run all kinds for real and simulated; return the metrics."""
    trace = Trace(10 if arguments.quick else 20)
    periods, repeats = (1, 2) if arguments.quick else (2, 3)
    settings = [*SETTINGS, f"--rollout.max_response_tokens={trace.limit}", f"--run.steps={periods * PERIOD}"]
    with ExitStack() as stack:
        folder = Path(parallel.broadcast_object(world, stack.enter_context(tempfile.TemporaryDirectory())))
        base = load_config(Config, None, settings)
        source = ensure_model(base.warm_start, base.data.train, MODELS, world)
        profile = make_profile(base, source, world, contexts(trace))
        if world.is_main:
            profile.save(folder / "profile.json")
        parallel.barrier(world)

        def start(name: str) -> Job:
            place = folder / str(len(started))
            place.mkdir(exist_ok=True)
            own = [*KINDS[name], f"--run.dir={place}", f"--planner.profile={folder}/profile.json"]
            job = Job(load_config(Config, None, [*settings, *own]), world, resume=False)
            job.recorder.bar.close()
            stack.enter_context(job.graders)
            started.append(job)
            update(job, trace, with_tail=True)  # the first one makes the optimizer's state: once in a run
            return job

        started: list[Job] = []
        spare = start("elastic")
        machines = [measure_machine(spare, trace)]
        sides = [Side(name, [start(name) for _ in range(repeats)]) for name in KINDS]
        for job in started[1:]:
            give_lengths(job, trace.length)
        bar = stack.enter_context(progress_bar("steps", periods * PERIOD * len(sides), world))
        for turn in range(periods * PERIOD):
            for side in in_turn(sides, turn + turn // PERIOD):  # else one side would begin every long round
                bar.set_postfix_str(side.name)
                play_step(side, periods * PERIOD - turn)
                bar.update()
            machines.append(measure_machine(spare, trace))
        result = report(sides, machines, spare, trace) if world.is_main else {}
        parallel.barrier(world)  # before rank 0 removes the folder
        return result


# ---- simulated ----------------------------------------------------------------------------------------------------


class Uneven(Simulation):
    """A simulation whose replicas are as fast as the ranks that they stand for."""

    def __init__(
        self, machine: Machine, config: SimulationConfig, model: ModelFile, hardware: Hardware, workload: Lengths
    ):
        given = config, model, hardware, workload
        self.own = [Simulation(*given, Profile({}, sizes)).costs_of for sizes in machine.ranks]
        super().__init__(*given, Profile({}, mean_profile(machine.ranks)))

    def costs_at(self, replica: int, size: int) -> Costs:
        return self.own[replica * size][size]


def simulation_of(job: Job, sizes: list[int], length: Callable, machine: Machine, trace: Trace) -> Uneven:
    """Return a simulation of a run's settings and prompts on what was measured, with the planner's choices."""
    config = job.config
    cluster = ClusterConfig(
        gpus=job.world.size,
        tensor_parallel=config.rollout.tensor_parallel,
        max_running=config.rollout.max_running,
        page_size=config.rollout.page_size,
        shared_prompts=False,
        steps=config.run.steps,
        seed=config.run.seed,
    )
    grading = GradingConfig(rule_seconds=1e-3)
    parts = SimulationConfig(cluster, config.scheduler, grading, config.stream, config.planner)
    hardware, model = costs_of(machine, job, trace)
    lengths = Given(length, list(job.cursor.prompts), trace.limit)
    simulation = Uneven(machine, parts, model, hardware, lengths)
    simulation.planner = Recalled(sizes)
    return simulation


def simulated(side: Side, machine: Machine, spare: Job, trace: Trace) -> list[dict[str, Any]]:
    """Return the simulator's records of a contender's steps."""
    job = side.jobs[0]
    simulation = simulation_of(job, side.sizes, trace.length, machine, trace)
    plan = short_plan(spare)
    for size in machine.short_round:
        # What a short round took beyond what is simulated is put down to its responses: admission, end, text, events.
        rollout = SimulatedRound(simulation_of(spare, [size], short, machine, trace), plan, 0)
        rollout.play(Race(plan))
        beyond = max(machine.short_round[size] - rollout.seconds, 0.0) * (spare.world.size // size)
        for own in simulation.own:
            own[size].efficiency = replace(own[size].efficiency, response_seconds=beyond / len(rollout.lengths))
    if job.streaming:
        assert simulation.stream
        simulation.stream.switch = job.streaming.policy.switch  # seconds of the newest move
    return simulation.run()


def report(sides: list[Side], machines: list[Machine], spare: Job, trace: Trace) -> dict[str, Any]:
    """Print simulated and measured seconds of every step; return the metrics."""
    errors: dict[str, list[tuple[float, float]]] = {}
    biases: dict[str, float] = {}  # of all steps together; above 0: simulated too slow
    m = mean_of(machines)
    shorts = ", ".join(f"{1000 * t:.0f} ms at TP {n}" for n, t in m.short_round.items())
    print(f"measured, means: an update {m.train[0]:.2f} and {m.train[1]:.2f} s, an exchange ", end="")
    print(f"{1000 * m.exchange:.2f} ms, a sync {1000 * m.sync:.0f} ms, a short round {shorts}")
    print("simulated / measured seconds")
    turns = [mean_of([*pair]) for pair in zip(machines, machines[1:])]
    for side in sides:
        records = [simulated(side, machine, spare, trace)[i] for i, machine in enumerate(turns)]
        pairs = {
            stage: [(r["seconds"][stage], s[stage]) for r, s in zip(records, side.seconds, strict=True)]
            for stage in ("step", "rollout", "train")
        }
        for i, record in enumerate(records):
            row = "   ".join(f"{stage} {rows[i][0]:6.2f} /{rows[i][1]:6.2f}" for stage, rows in pairs.items())
            print(f"{side.name:18} {record['round']['kind']:5} TP {side.sizes[i]}   {row}")
        ratio = {stage: sum(a for a, _ in rows) / sum(b for _, b in rows) for stage, rows in pairs.items()}
        print(f"{side.name:18} in all        " + "   ".join(f"{stage} {x:14.3f}" for stage, x in ratio.items()))
        biases.setdefault(f"bias_{side.name.partition(',')[0]}", round(ratio["step"] - 1, 4))
        off = ([abs(a / b - 1) for a, b in pairs[stage]] for stage in ("step", "rollout"))
        errors.setdefault(side.name.partition(",")[0], []).extend(zip(*off))
    metrics: dict[str, Any] = {"name": "validate_simulator"} | biases
    for name, rows in errors.items():
        metrics[f"mean_error_{name}"] = round(mean(a for a, _ in rows), 4)
        metrics[f"mean_error_{name}_rollout"] = round(mean(b for _, b in rows), 4)
    return metrics


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="shorter responses, one period: under 2 minutes on 2 cores"
    )
    arguments = parser.parse_args()

    def run(world: World) -> None:
        metrics = play(world, arguments)
        if world.is_main:
            print(json.dumps(metrics))

    return on_ranks(RANKS, run)


if __name__ == "__main__":
    sys.exit(main())
