"""What drafts save: rounds that wait for all of their responses, with drafts and without, on two ranks of one thread.

    python benchmarks/drafts.py [--quick]

Jobs are trained as train.py trains them, and each round that has drafts is played twice, in turns first: with them,
and without. Both draw the same tokens, which is counted. Row steps are tokens that rows have drawn in steps of their
own, rather than with others as drafts, without those drawn ahead; engine steps are those of the rank that took most.

tail batching   the default run, all of its steps; drafted are its long rounds
at GPU costs    the same; how many tokens rows draft is chosen as if steps took an H100 what the simulator says, so
                that its steps count and its seconds do not
synchronous     the same; all rounds are drafted, and a rank that is done draws the next round's prompts ahead
relay           episodes of many turns (configs/relay.toml), tail batching
always wrong    the long rounds of tail batching once more, by a source that proposes tokens which are never drawn

`long_round_speedup_first`: of the first five rounds of tail batching.
`agreement_lagN`: the chance that a token is drawn again by weights N updates older, up to the first difference of each
response of the trained model. `regain`: tokens after a difference, in the mean, until three tokens in a row stand in
the older text again; the simulator gets both for `long_round_speedup_simulated`, at the costs of an H100.
`widest_tie`: of samples that differ, the most that two logits must change for either side's token to be drawn.
`verify_8_over_1_b1`: seconds of a step of one row that verifies seven drafted tokens over those of a step that verifies
none, with random weights in the shape of a 0.5B model.
"""

import argparse
import gc
import json
import math
import statistics
import sys
import tempfile
import time
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from tail_batching import RANKS, ROOT, SHAPES, in_turn, on_ranks, progress_bar, random_model
from torch import Tensor
from tqdm import tqdm

import parallel
from attention import PackedAttention
from config import load_config
from core import Elsewhere, Group, RoundPlan, SampleId
from engine.sequence import Sequence as EngineSequence
from job import Job, Rollout
from metrics import Clock
from parallel import World
from policies.drafts import GRAM, LONGEST, SOURCES, DraftPolicy, Match, Row, Source, StepCosts
from rollout import Engine, RolloutConfig
from sampling import SamplingConfig, sample, sample_key
from scheduler import Race, SchedulerConfig
from settings import Config
from simulate import ClusterConfig, SimulationConfig, simulate
from simulation.costs import Costs, Efficiency, Hardware, Shape
from simulation.drafts import DraftsConfig
from warm_start import byte_tokenizer

LAGS = (1, 2, 4, 8)  # updates
LONG_RESPONSE = 150  # tokens
MOST = 31  # tokens of a draft
HALF_ROWS, HALF_DRAFTS = (1, 4, 8), 7
FIRST = 5  # long rounds


@dataclass(frozen=True)
class Task:
    name: str
    config: str
    settings: tuple[str, ...] = ()
    has_wrong: bool = False  # plays drafted rounds with drafts that are always wrong, too
    has_gpu_costs: bool = False


TASKS = (
    Task("tail batching", "tiny", has_wrong=True),
    Task("at GPU costs", "tiny", has_gpu_costs=True),
    Task("synchronous", "tiny", ("--scheduler.policy=synchronous", "--drafts.ahead=true")),
    Task("relay", "relay"),
)


@dataclass
class Side:
    """Drafted rounds, played in one way: what they took on the slowest rank, round by round."""

    seconds: list[float] = field(default_factory=list)
    row_steps: list[int] = field(default_factory=list)  # of all ranks
    engine_steps: list[int] = field(default_factory=list)
    drafter: list[float] = field(default_factory=list)  # seconds of Python that proposes and learns


@dataclass
class Result:
    """A task: its rounds without drafts, with them, and with drafts that are always wrong."""

    task: Task
    sides: dict[str, Side] = field(default_factory=lambda: {name: Side() for name in ("off", "on", "wrong")})
    step_seconds: float = 0.0  # of all steps, drafted rounds counted with drafts
    drafted: Counter[str] = field(default_factory=Counter)  # by source
    accepted: Counter[str] = field(default_factory=Counter)
    num_equal: int = 0  # samples with the same tokens on both sides
    num_samples: int = 0
    ties: list[float] = field(default_factory=list)  # of the others (`tie`)

    def ratio(self, value: str, side: str = "on", rounds: int | None = None) -> float:
        """Return what a side took in the first `rounds` over what these take without drafts; None: in all."""
        whole = sum(getattr(self.sides["off"], value)[:rounds])
        return sum(getattr(self.sides[side], value)[:rounds]) / whole if whole else math.nan  # no round had drafts

    @property
    def speedup(self) -> float:
        return 1 / self.ratio("seconds")

    @property
    def speedup_free_search(self) -> float:
        """What the speedup would be if all that drafters do took no time."""
        on = self.sides["on"]
        return sum(self.sides["off"].seconds) / (sum(on.seconds) - sum(on.drafter)) if on.seconds else math.nan

    @property
    def step_speedup(self) -> float:
        saved = sum(self.sides["off"].seconds) - sum(self.sides["on"].seconds)
        return (self.step_seconds + saved) / self.step_seconds if self.step_seconds else math.nan


class Wrong(Source):
    """Proposes tokens that are never drawn, and claims to be as sure as the oldest text."""

    name, prior = "wrong", 0.9
    text = array("i", [0] * 64)

    def key(self, sample: SampleId) -> tuple[int, ...]:
        return sample

    def propose(self, row: Row) -> Match:
        return Match(self.text, 0, len(row.text), LONGEST)


class Timed:
    """Sums the seconds in some methods of an object, from now on."""

    def __init__(self, of: object, names: Sequence[str]):
        self.seconds = 0.0
        for name in names:
            setattr(of, name, self._timed(getattr(of, name)))

    def _timed(self, method: Callable) -> Callable:
        def call(*given: object) -> object:
            start = time.perf_counter()
            result = method(*given)
            self.seconds += time.perf_counter() - start
            return result

        return call


class GpuCosts(StepCosts):
    """Seconds of an H100's steps, as the simulator has them: a token more costs next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.gpu = Costs(Hardware(), Shape(), Efficiency())
        self.is_fitted = True

    def observe(self, rows: int, drafted: int, seconds: float) -> None:
        self.count += 1

    def refit(self) -> None: ...

    def knows(self, rows: int) -> bool:
        return True

    def alone(self, rows: float) -> float:
        return self.gpu.costs(max(rows, 1))[0]

    def seconds(self, rows: int, drafted: np.ndarray) -> np.ndarray:
        return self.alone(rows) + self.gpu.beside(rows, drafted)


# ---- rounds ------------------------------------------------------------------------------------------------------


def measured(side: Side, job: Job, drafter: Timed, play: Callable[[], list[Group]]) -> dict[SampleId, Sequence[int]]:
    """Play a round, timed; return the tokens of its samples that this rank has drawn. Collective."""
    stats = job.drafting.policy.stats
    others = stats.ahead_tokens - stats.ahead_accepted  # row steps of the next round's drafts, which hold up nobody
    before = replace(job.engine.stats)
    parallel.barrier(job.world)
    start, drafter.seconds = time.perf_counter(), 0.0
    groups, now = play(), job.engine.stats
    seconds = time.perf_counter() - start
    steps, drawn, accepted = (
        getattr(now, name) - getattr(before, name) for name in ("decode_steps", "decoded_tokens", "accepted_tokens")
    )
    others = stats.ahead_tokens - stats.ahead_accepted - others
    everyone = parallel.gather_objects(job.world, (seconds, drawn - accepted - others, steps, drafter.seconds))
    side.seconds.append(max(part[0] for part in everyone))
    side.row_steps.append(sum(part[1] for part in everyone))
    side.engine_steps.append(max(part[2] for part in everyone))
    side.drafter.append(min(part[3] for part in everyone))  # the rank that all wait for saves this at least
    samples = (sample for group in groups for sample in group.samples)
    return {s.id: s.token_ids for s in samples if not isinstance(s.token_ids, Elsewhere)}


def play_bare(job: Job, plan: RoundPlan, drafter: DraftPolicy | None = None) -> list[Group]:
    """Play a plan that nothing remembers, without drafts or with those of another drafter. Collective."""
    played = job.make_round(Clock())
    if drafter:
        drafter.agree(drafter.tell(), is_alone=True)
        drafter.begin({}, {})
    job.engine.drafter = drafter
    played.play(plan, Race(plan))
    job.engine.drafter = None
    return played.collect()


def step(result: Result, job: Job, drafter: Timed, wrong: DraftPolicy | None) -> None:
    """Take one step of train.py's loop; play its round without drafts too, if it has drafts. Collective."""
    start, plan = time.perf_counter(), job.plan()
    job.regroup(plan)
    rollouts, tokens, extra = list[Rollout](), dict[str, dict[SampleId, Sequence[int]]](), 0.0

    def drafted() -> list[Group]:
        rollouts.append(job.roll_out(plan))
        return rollouts[0].groups

    ways: dict[str, Callable[[], list[Group]]] = {"off": lambda: play_bare(job, plan), "on": drafted}
    if wrong:
        ways["wrong"] = lambda: play_bare(job, plan, wrong)
    order = in_turn([*ways], len(result.sides["on"].seconds))
    for name in order if plan.kind == "long" else ["on"]:
        began = time.perf_counter()
        side = result.sides[name] if plan.kind == "long" else Side()
        tokens[name] = measured(side, job, drafter, ways[name])
        extra += time.perf_counter() - began if name != "on" else 0.0
    if plan.kind == "long":
        pairs = [(id, off, tokens[name][id]) for name in ways for id, off in tokens["off"].items() if name != "off"]
        ties = {id: tie(job, plan, id, off, drawn) for id, off, drawn in pairs if off != drawn}
        for others, count in parallel.gather_objects(job.world, (list(ties.values()), len(tokens["off"]))):
            result.ties += others
            result.num_equal += count - len(others)
            result.num_samples += count
    job.learn(rollouts[0])
    job.sync_weights()
    result.step_seconds += time.perf_counter() - start - extra
    for report in job.take_reports():
        result.drafted.update(report.drafts.drafted)
        result.accepted.update(report.drafts.accepted)


def tie(job: Job, plan: RoundPlan, id: SampleId, one: Sequence[int], other: Sequence[int]) -> float:
    """Return how little two logits must change for either side's token to be drawn where two texts differ first."""
    played, place = job.make_round(Clock()), common(one, other)
    played.prompts = {visit.id: visit for visit in plan.prompts}
    sequence = played.sequence(id)
    context, model = torch.tensor([*sequence.prompt_ids, *one[:place]]), job.trainer.model
    attend = PackedAttention([len(context)], context.device)
    with torch.no_grad():
        logits = model.logits(model(context, torch.arange(len(context)), attend)[-1:])
    key, at = torch.tensor([sequence.key]), torch.tensor([place])

    def draws(token: int, instead_of: int, change: float) -> bool:
        moved = logits.clone()
        moved[0, token] += change
        moved[0, instead_of] -= change
        return int(sample(moved, key, at, job.config.sampling)[0]) == token

    change, a, b = 1e-9, one[place], other[place]
    while change < 1 and not (draws(a, b, change) and draws(b, a, change)):
        change *= 2
    return change


def open_job(task: Task, folder: str, steps: int, world: World, stack: ExitStack) -> Job:
    own = [f"--run.dir={folder}/{task.name}", f"--run.steps={steps}", "--data.eval_prompts=0"]
    own.append('--drafts.sources=["old", "siblings", "epoch", "own"]')
    config = load_config(Config, str(ROOT / "configs" / f"{task.config}.toml"), [*task.settings, *own])
    Path(config.run.dir).mkdir(exist_ok=True)
    job = Job(config, world, resume=False)
    job.recorder.bar.close()
    stack.enter_context(job.graders)
    gc.collect()
    gc.freeze()  # as `job.open_job`
    stack.callback(gc.unfreeze)
    return job


def play_task(task: Task, steps: int, world: World, progress: tqdm) -> tuple[Result, dict[str, float]]:
    """Train a task by so many steps; return its rounds, and how often older weights agree. Collective."""
    result, versions = Result(task), dict[int, list[Tensor]]()
    wrong = DraftPolicy(["wrong"], MOST) if task.has_wrong else None
    with ExitStack() as stack:
        folder = parallel.broadcast_object(world, stack.enter_context(tempfile.TemporaryDirectory()))
        job = open_job(task, folder, steps, world, stack)
        if task.has_gpu_costs:
            job.drafting.policy.costs = GpuCosts()
        drafter = Timed(job.drafting.policy, ("wants_rows", "propose", "learn", "observe"))
        for _ in range(steps):
            progress.set_postfix_str(task.name)
            step(result, job, drafter, wrong)
            versions[job.step] = [weight.detach().clone() for weight in job.trainer.model.parameters()]
            versions.pop(job.step - max(LAGS) - 1, None)
            progress.update()
        agreed = agreement(job, versions) if task.has_wrong else {}
        parallel.barrier(world)  # before rank 0 removes the folder
    return result, agreed


# ---- weights of before -------------------------------------------------------------------------------------------


def agreement(job: Job, versions: dict[int, list[Tensor]]) -> dict[str, float]:
    """Return how often older weights draw the newest weights' tokens from the same random streams. Collective."""
    prompts = [list(visit.prompt.token_ids) for visit in job.cursor.take(64)][job.world.rank :: job.world.size]
    texts = {}
    for lag in (0, *(lag for lag in LAGS if job.step - lag in versions)):
        with torch.no_grad():
            for weight, old in zip(job.trainer.model.parameters(), versions[job.step - lag], strict=True):
                weight.copy_(old)
        job.engine.load_weights(job.trainer.model, job.step - lag)
        done = job.engine.generate(prompts, 8, seed=1)
        texts[lag] = [list(sample.token_ids) for samples in done for sample in samples]
    found: dict[str, float] = {}
    for lag in (lag for lag in texts if lag):
        same = [common(new, old) for new, old in zip(texts[0], texts[lag], strict=True)]
        lost = [n for new, old in zip(texts[0], texts[lag], strict=True) for n in lost_tokens(new, old)]
        long = [(n, len(new)) for n, new in zip(same, texts[0], strict=True) if len(new) > LONG_RESPONSE]
        differ = sum(new != old for new, old in zip(texts[0], texts[lag], strict=True))
        sums = [sum(same), differ, sum(map(len, texts[0])), sum(lost), len(lost)]
        sums += [sum(n for n, _ in long), sum(n for _, n in long), len(long)]
        total = [sum(part) for part in zip(*parallel.gather_objects(job.world, sums), strict=True)]
        found |= {
            f"agreement_lag{lag}": total[0] / max(total[0] + total[1], 1),
            f"prefix_lag{lag}": total[0] / total[2],
        }
        found |= {f"regain_lag{lag}": total[3] / max(total[4], 1), f"long_prefix_lag{lag}": total[5] / max(total[7], 1)}
        found["long_length"] = total[6] / max(total[7], 1)
    return found


def common(new: Sequence[int], old: Sequence[int]) -> int:
    """Return how many tokens two texts have in common at their beginning."""
    return next((i for i, (a, b) in enumerate(zip(new, old)) if a != b), min(len(new), len(old)))


def lost_tokens(new: Sequence[int], old: Sequence[int]) -> list[int]:
    """Return, for each difference, how many tokens later the last three stand in the older text again."""
    places = {tuple(old[i - GRAM : i]): i for i in range(GRAM, len(old))}
    lost, at, place = list[int](), common(new, old), 0
    while at < len(new) - GRAM:
        found = next((i for i in range(at + GRAM, len(new)) if tuple(new[i - GRAM : i]) in places), None)
        if found is None:
            return [*lost, len(new) - at]
        lost.append(found - at)
        place = places[tuple(new[found - GRAM : found])]
        at = found + common(new[found:], old[place:])
    return lost


def simulated(agreed: dict[str, float], steps: int) -> float:
    """Return the seconds of synchronous rollouts of the simulator over those with drafts of the measured rates."""

    def seconds(most: int) -> float:
        cluster = ClusterConfig(hardware="h100", gpus=8, steps=steps)
        drafts = (
            DraftsConfig(most, agreement=agreed["agreement_lag1"], regain=agreed["regain_lag1"])
            if most
            else DraftsConfig()
        )
        sizes = SchedulerConfig(policy="synchronous", num_prompts=64)
        run = simulate(SimulationConfig(cluster=cluster, scheduler=sizes, drafts=drafts))
        return sum(record["seconds"]["rollout"] for record in run.records)

    return seconds(0) / seconds(MOST)


# ---- the shape of a 0.5B model -----------------------------------------------------------------------------------


class Told:
    """Proposes the tokens that will be drawn."""

    def __init__(self, texts: dict[SampleId, Sequence[int]], count: int):
        self.texts, self.count = texts, count

    def wants_rows(self, num_rows: int) -> bool:
        return True

    def propose(self, rows: Sequence[tuple[EngineSequence, np.ndarray]]) -> list[Sequence[int]]:
        return [self.texts[s.id][len(drawn) : len(drawn) + self.count] for s, drawn in rows]

    def learn(self, outcome: Sequence[tuple[EngineSequence, int, int]]) -> None: ...

    def observe(self, tokens: int, seconds: float) -> None: ...


def verify_costs(rows: int, tokens: int) -> float:
    """Return the seconds of a step that verifies HALF_DRAFTS tokens in each row over those of one without drafts."""
    config = RolloutConfig(max_prompt_tokens=16, max_response_tokens=tokens, max_running=rows, kv_gib=0.2)
    engine = Engine(random_model(SHAPES["half"]), config, SamplingConfig(), [], byte_tokenizer())
    seconds = dict[bool, float]()
    texts = dict[SampleId, Sequence[int]]()
    for tells in (False, True):
        engine.drafter = Told(texts, HALF_DRAFTS) if tells else None
        for i in range(rows):
            engine.add(EngineSequence(i, 0, 0, tuple(range(60, 76)), sample_key(0, i), tokens, ignore_eos=True))
        samples, each = engine.step(), list[float]()  # the prefill
        while not engine.is_idle:
            start = time.perf_counter()
            samples += engine.step()
            each.append(time.perf_counter() - start)
        seconds[tells] = statistics.median(each)
        texts |= {sample.id: sample.token_ids for sample in samples}
    return seconds[True] / seconds[False]


# ---- results -----------------------------------------------------------------------------------------------------


def report(results: Sequence[Result], agreed: dict[str, float], half: dict[int, float], speedup: float) -> None:
    """Print the tables and, as the last line, the metrics in JSON."""
    print("\nrounds that wait for all, with drafts over without (at GPU costs the seconds are those of this CPU)")
    print(f"{'':16} rounds   row steps   engine steps   seconds   steps of training   accepted of drafted, by source")
    for r in results:
        sources = ", ".join(f"{name} {r.accepted[name]}/{n}" for name, n in sorted(r.drafted.items()))
        row = f"{r.ratio('row_steps'):12.2f}{r.ratio('engine_steps'):15.2f}"
        row += f"{r.ratio('seconds'):10.2f}{1 / r.step_speedup:20.2f}"
        print(f"{r.task.name:16}{len(r.sides['on'].seconds):7}{row}   {sources}")
    tail, ties = results[0], [tie for r in results for tie in r.ties]
    told = ", ".join(f"{x:.0e}" for x in ties)
    print(f"\nsamples that differ: {len(ties)}" + f"; logits that decide differ by {told}" * bool(ties))
    first = min(FIRST, len(tail.sides["on"].seconds))
    print(f"the first {first} rounds of tail batching: {tail.ratio('seconds', rounds=FIRST):.2f} of the seconds")
    print(f"if drafters took no time, tail batching: {1 / tail.speedup_free_search:.2f} of the seconds")
    print(f"always wrong: {tail.ratio('seconds', 'wrong'):.3f} of the seconds without drafts")
    for lag in (lag for lag in LAGS if f"agreement_lag{lag}" in agreed):
        print(
            f"weights {lag} updates older draw {agreed[f'agreement_lag{lag}']:.2%} of tokens again; "
            f"{agreed[f'prefix_lag{lag}']:.0%} of all tokens stand before the first difference; three tokens agree "
            f"again after {agreed[f'regain_lag{lag}']:.0f}"
        )
    print("verifying 8 tokens over 1, 0.5B shape: " + ", ".join(f"{n} rows {x:.2f}" for n, x in half.items()))
    tasks = [
        {
            "task": r.task.name,
            "row_steps": round(r.ratio("row_steps"), 2),
            "engine_steps": round(r.ratio("engine_steps"), 2),
            "speedup": round(r.speedup, 2),
            "step_speedup": round(r.step_speedup, 2),
            "rounds": len(r.sides["on"].seconds),
            "sources": {n: {"drafted": r.drafted[n], "accepted": r.accepted[n]} for n in sorted(r.drafted)},
        }
        for r in results
        if not r.task.has_gpu_costs
    ]
    metrics = {
        "name": "drafts",
        "long_round_row_steps_ratio": round(tail.ratio("row_steps"), 3),
        "long_round_engine_steps_ratio": round(tail.ratio("engine_steps"), 3),
        "long_round_row_steps_ratio_gpu_costs": round(results[1].ratio("row_steps"), 3),
        "long_round_engine_steps_ratio_gpu_costs": round(results[1].ratio("engine_steps"), 3),
        "long_round_speedup": round(tail.speedup, 2),
        "long_round_speedup_first": round(1 / tail.ratio("seconds", rounds=FIRST), 2),
        "long_round_speedup_free_search": round(tail.speedup_free_search, 2),
        "long_round_speedup_simulated": round(speedup, 2),
        "step_speedup": round(tail.step_speedup, 2),
        "worst_source_slowdown": round(tail.ratio("seconds", "wrong"), 3),
        "worst_source_cost": round(tail.ratio("seconds", "wrong") - 1, 3),
        "tokens_equal": sum(r.num_equal for r in results) / max(sum(r.num_samples for r in results), 1),
        "samples": sum(r.num_samples for r in results),
        "samples_that_differ": len(ties),
        "widest_tie": max(ties, default=0.0),
        **{name: round(value, 4) for name, value in agreed.items()},
        **{f"verify_8_over_1_b{n}": round(x, 2) for n, x in half.items()},
        "tasks": tasks,
    }
    print(json.dumps(metrics))


def play(quick: bool, world: World) -> None:
    SOURCES["wrong"] = Wrong
    steps = (
        {"tail batching": 10, "at GPU costs": 5, "synchronous": 3, "relay": 5}
        if quick
        else {"tail batching": 100, "at GPU costs": 25, "synchronous": 10, "relay": 15}
    )
    results, agreed = list[Result](), dict[str, float]()
    with progress_bar("drafts", sum(steps.values()), world) as bar:
        for task in TASKS:
            result, found = play_task(task, steps[task.name], world, bar)
            results.append(result)
            agreed |= found
    if world.is_main:
        torch.set_num_threads(RANKS)  # the other rank waits
        half = {rows: verify_costs(rows, 33 if quick else 65) for rows in (HALF_ROWS[:1] if quick else HALF_ROWS)}
        report(results, agreed, half, simulated(agreed, steps=2 if quick else 5))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer steps: under 2 minutes on 2 cores")
    arguments = parser.parse_args()
    return on_ranks(RANKS, lambda world: play(arguments.quick, world))


if __name__ == "__main__":
    sys.exit(main())
