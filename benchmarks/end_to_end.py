"""The whole system, really run: parts are added one by one, and all contenders take turns step by step in one run.

    python benchmarks/end_to_end.py [--quick] [--ranks 4]

graded at the end   every step waits for its longest response, then grades, with fixed limits: the paper's baseline
synchronous         the same, graded as responses end, with limits that adapt: our own synchronous step
+ tail batching     the first, with short rounds that race, a queue, long rounds; eta 1.25 on both
+ reward scheduler  responses are graded as they end, with time limits that adapt
+ planner           the tensor-parallel size of each round, by the rule `predict` and a profile measured here
+ stream trainer    half of the replicas leave long rounds to train, when that is projected to pay
+ drafts            long rounds draw several tokens in a step, from texts of earlier rounds
in-round size       after `+ planner`: the size may also change inside a long round, which the last two exclude

Ranks have one thread each and take the steps of train.py: rounds, grading in the sandbox, gradients, update, sync.
Responses have given lengths, those of the paper's 32k scaled to an eighth (`configs/simulate/qwen2.5-32b.toml`), and
given texts. A third of the prompts are graded by running code, as in the paper, the others by comparing: programs of
the expression task, 5 % of which never end (limits 0.1 to 1 s, for steps take seconds). All contenders train the same
prompts, and equally many samples. A step's time includes the wait for programs that run on though nobody wants their
result any more: in a run of its own they would take time from the next step. `speedup_all` is step time of
`synchronous` over that with all that can be combined (`+ drafts`), all steps together, and `speedup_all_paper` that of
`graded at the end`; races keep shorter responses, so `speedup_all_tokens` compares trained tokens a second. The model
is random and hardly changes, so its drafts are right more often than those of a model that learns. Sharded weights are
no part: they save memory, and here there is enough.

Before them TRL's GRPOTrainer takes the first period's steps: same model, prompts, lengths, texts, graders and cores,
with the micro-batch and the number of processes that were fastest of several in the first step. `ratio_trl` is its step
time over that of all parts, for as many samples of the same prompts: all parts race, so theirs are shorter.
`ratio_trl_synchronous` is over that of `synchronous`, whose samples have TRL's lengths. It runs before, not in turns,
and grades in its own processes, as TRL does.
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
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
import trl
from tail_batching import PERIOD, Trace, TraceEngine, in_turn, on_ranks, progress_bar, trained
from texts import Scripted, program
from tqdm import tqdm

import job
import parallel
from checkpoint import load_tokenizer
from config import load_config
from core import SampleId, Visit
from data import PromptCursor, load_prompts
from job import Job
from parallel import World
from profiler import make_profile
from settings import Config, profile_path
from simulate import load_model_file
from tasks import TASKS
from train import take_step
from warm_start import WarmStartConfig, make_model

LATE, SCHEDULED = {"reward.case_factor": 0}, {"reward.case_factor": 1.5}
# The name, the settings it adds to those before it, whether grading waits for the last response.
PARTS = (
    ("graded at the end", LATE | {"scheduler.policy": "synchronous"}, True),
    ("synchronous", SCHEDULED, False),
    ("+ tail batching", LATE | {"scheduler.policy": "tail_batching", "scheduler.eta_responses": 1.25}, True),
    ("+ reward scheduler", SCHEDULED, False),
    ("+ planner", {"planner.rule": "predict", "planner.margin": 0.25}, False),  # rounds of equal work differ by that
    ("+ stream trainer", {"stream.policy": "estimate"}, False),
    ("+ drafts", {"drafts.sources": '["old", "siblings", "epoch", "own"]'}, False),
    ("in-round size", {"drafts.sources": "[]", "stream.policy": "off", "planner.within_round": "true"}, False),
)
BEFORE = (0, 0, 0, 2, 3, 4, 5, 4)  # of each part, the one that it is added to
ALL, OURS = "+ drafts", "synchronous"
# Step speed-up over veRL, cumulative (Table 2): 7B/8k, 14B/16k, 32B/32k.
PAPER = {
    "graded at the end": (1.0, 1.0, 1.0),
    "+ tail batching": (1.30, 1.48, 2.21),
    "+ reward scheduler": (2.01, 1.99, 2.48),
    "+ planner": (2.01, 2.02, 2.52),
    "+ stream trainer": (2.03, 2.22, 2.56),
}


@dataclass(frozen=True)
class Size:
    """How large the model and a step are."""

    hidden: int
    layers: int
    scale: float  # of the paper's lengths
    prompts: int  # P0
    responses: int  # R0

    @property
    def trace(self) -> Trace:
        """The paper's 32k lengths, as `figures/fit.py` fitted them, scaled."""
        m = load_model_file("qwen2.5-32b").lengths
        median = self.scale * m.median
        return Trace(median, m.prompt_spread, m.response_spread, m.runaway, m.runaway_gather, m.limit / m.median)


CASE_SECONDS = 1.0  # the longest that a test case may take
TRL_MICRO_BATCHES, TRL_PROCESSES = (1, 2, 4, 16), (2, 4)
FULL, QUICK = Size(128, 4, 1 / 8, 8, 8), Size(128, 4, 1 / 64, 8, 8)


@dataclass
class Side:
    """A contender."""

    name: str
    job: Job
    seconds: list[float] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)
    trained: Counter = field(default_factory=Counter)  # prompts


def settings(size: Size, folder: Path, index: int, periods: int) -> Config:
    values: dict[str, Any] = {
        "run.dir": folder / str(index),
        "run.steps": periods * PERIOD,
        "run.device": "cpu",
        "run.dump_rollouts": "true",
        "model.path": folder / "model",
        "data.train": folder / "prompts.jsonl",
        "data.eval_prompts": 0,
        "scheduler.num_prompts": size.prompts,
        "scheduler.num_responses": size.responses,
        "scheduler.window_iterations": max(round(size.trace.median / 4), 1),  # at full size the default, 16
        "rollout.max_prompt_tokens": 64,
        "rollout.max_response_tokens": size.trace.limit,
        "trainer.lr": 1e-5,
        "trainer.tokens_per_microbatch": 1024,
        "reward.max_failures": 0,
        "reward.case_min_seconds": 0.1,
        "reward.case_max_seconds": CASE_SECONDS,
    }
    for _, added, _ in PARTS[: index + 1]:
        values |= added
    return load_config(Config, None, [f"--{key}={value}" for key, value in values.items()])


def write_prompts(path: Path) -> None:
    """Write rows of both kinds: one of code, two of the rule."""
    rows = []
    for i, (program_of, path_of) in enumerate(zip(TASKS["expression"].numbers(), TASKS["hailstone"].numbers())):
        task, n = (TASKS["hailstone"], path_of) if i % 3 else (TASKS["expression"], program_of)
        rows.append(
            {"prompt": task.prompt(n), "answer": task.answer(n), "task": task.grader, "number": n, **task.fields}
        )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def text(key: SampleId, row: dict[str, Any]) -> str:
    if row["task"] == "code":
        return program(key, row)
    task, rng = TASKS["hailstone"], Random(f"text {key}")
    return task.slip(task.solution(row["number"]), rng, rng.choice((0, 1)))  # half are right, so most groups teach


def prepare(size: Size, folder: Path, world: World) -> None:
    """Write the prompts and the model of a run in `folder`. Collective."""
    if world.is_main:
        write_prompts(folder / "prompts.jsonl")
    shape = WarmStartConfig(
        steps=0,
        hidden_size=size.hidden,
        num_layers=size.layers,
        num_heads=8,
        num_kv_heads=1,
        max_positions=8192,
    )
    make_model(shape, "expression", folder / "model", world)


def make_sides(size: Size, folder: Path, periods: int, world: World, stack: ExitStack) -> list[Side]:
    prepare(size, folder, world)
    base = settings(size, folder, 0, periods)
    profile = make_profile(base, Path(base.model.path), world, contexts=(size.trace.limit // 16, size.trace.limit // 4))
    if world.is_main:
        profile.save(profile_path(base))
    parallel.barrier(world)
    TraceEngine.trace = size.trace
    job.Engine = TraceEngine  # type: ignore[misc]
    sides = []
    for index, (name, _, late) in enumerate(PARTS):
        config = settings(size, folder, index, periods)
        os.makedirs(config.run.dir, exist_ok=True)
        made = Job(config, world, resume=False)
        made.recorder.bar.close()
        stack.enter_context(made.graders)
        made.graders = Scripted(made.graders, text, late)
        sides.append(Side(name, made))
    return sides


def play(size: Size, periods: int, world: World) -> list[Side]:
    """Let all contenders train `periods` periods, taking turns after every step."""
    with ExitStack() as stack:
        folder = Path(parallel.broadcast_object(world, stack.enter_context(tempfile.TemporaryDirectory())))
        sides = make_sides(size, folder, periods, world, stack)
        bar = stack.enter_context(progress_bar("end to end", periods * PERIOD * len(sides), world))
        for turn in range(periods * PERIOD):
            for side in in_turn(sides, turn + turn // PERIOD):  # else one side would begin every long round
                bar.set_postfix_str(side.name)
                parallel.barrier(world)
                start = time.perf_counter()
                record = take_step(side.job)
                stepped = time.perf_counter()
                side.job.graders.settle()
                end = time.perf_counter()
                took, waited = zip(*parallel.gather_objects(world, (end - start, end - stepped)), strict=True)
                record["seconds"]["settle"] = max(waited)
                side.records.append(record)
                side.seconds.append(max(took))
                bar.update()
        for side in sides if world.is_main else ():
            side.trained = trained(side.job.folder)
        parallel.barrier(world)  # before rank 0 removes the folder
    return sides


def part_row(side: Side, base: Side, before: Side, ours: Side) -> dict[str, Any]:
    """Return mean seconds of a step and of its stages, and how much faster it is, over all steps and by period."""
    stages = ("rollout", "reward", "train", "settle")
    mean = {k: round(statistics.mean(r["seconds"].get(k, 0.0) for r in side.records), 2) for k in stages}
    starts = range(0, len(base.seconds), PERIOD)
    periods = [sum(base.seconds[i : i + PERIOD]) / sum(side.seconds[i : i + PERIOD]) for i in starts]
    return {
        "part": side.name,
        "step": round(statistics.mean(side.seconds), 2),
        **mean,
        "faster": round(sum(base.seconds) / sum(side.seconds), 3),
        "least": round(min(periods), 2),
        "most": round(max(periods), 2),
        "over_before": round(sum(before.seconds) / sum(side.seconds), 3),
        "over_ours": round(sum(ours.seconds) / sum(side.seconds), 3),
        "tokens": round(statistics.mean(r["train"]["trained_tokens"] for r in side.records)),
        "paper": ", ".join(f"{ratio:.2f}" for ratio in PAPER.get(side.name, ())),
    }


def report(sides: list[Side], title: str) -> dict[str, Any]:
    base, steps, named = sides[0], len(sides[0].seconds), {side.name: side for side in sides}
    print(f"\n{title}; {steps} steps each; seconds of a step, means; in brackets the periods' least and most")
    print(
        f"{'':20} step s  rollout  rewards  train  programs  times as fast    over the one before   synchronous"
        "   tokens   the paper"
    )
    rows: list[dict[str, Any]] = []
    for side, before in zip(sides, BEFORE, strict=True):
        row = part_row(side, base, sides[before], named[OURS])
        rows.append(row)
        print(
            f"{side.name:20}{row['step']:7.2f}{row['rollout']:9.2f}{row['reward']:9.2f}{row['train']:7.2f}"
            f"{row['settle']:10.2f}  {row['faster']:5.2f} ({row['least']:5.2f} ..{row['most']:5.2f})"
            f"{row['over_before']:12.2f}{row['over_ours']:17.2f}{row['tokens']:12,}   {row['paper']}"
        )
    for side in sides[4:]:
        chosen = ((r["planner"], r["seconds"]["generate"]) for r in side.records)
        rounds = (f"{p['kind']} {p['size']} ({p['predicted'][str(p['size'])]:.1f}, {took:.1f})" for p, took in chosen)
        print(f"{side.name}: sizes of the rounds (seconds of decoding predicted, taken): {', '.join(rounds)}")
    for side in sides[5:7]:
        scaled = sum("projected" in r["round"].get("stream", {}) for r in side.records)
        print(f"{side.name}: rounds that replicas left to train: {scaled}")
    drafts = [r["drafts"] for side in sides for r in side.records if r.get("drafts")]
    print(f"drafted: {sum(d['drafted'] for d in drafts)} tokens, accepted: {sum(d['accepted'] for d in drafts)}")
    [whole], [own] = ([row for row in rows if row["part"] == part] for part in (ALL, OURS))
    records = named[ALL].records
    waited = sum(r["round"]["window_wait"] for r in records) / sum(r["seconds"]["rollout"] for r in records)
    print(f"{ALL}: {waited:.1%} of the rollout is wait at the ends of windows, a mean over ranks")
    names = ("tail_batching", "reward_scheduler", "planner", "stream_trainer", "drafts")
    return {
        "name": "end_to_end",
        "ranks": sides[0].job.world.size,
        "steps": steps,
        "speedup_all": whole["over_ours"],
        "speedup_all_tokens": round(whole["over_ours"] * whole["tokens"] / own["tokens"], 3),
        "speedup_all_paper": whole["faster"],
        "window_wait_fraction": round(waited, 4),
        **{f"speedup_{name}": row["over_before"] for name, row in zip(names, rows[2:])},
        "parts": rows,
        "prompts_lost": sum(len(base.trained - s.trained) for s in sides),
        "prompts_doubled": sum(n - 1 for s in sides for n in s.trained.values()),
    }


# ---- TRL ---------------------------------------------------------------------------------------------------------


def trl_row(visit: Visit, size: Size, short: bool) -> dict[str, Any]:
    """Return a row of TRL's dataset, with the lengths and the texts of its responses."""
    prompt, ids = visit.prompt, [visit.id.sample(r) for r in range(size.responses)]
    cases = len(json.loads(prompt.answer)) if prompt.task == "code" else 0
    given = {"template": prompt.extra.get("template", ""), "case_seconds": [CASE_SECONDS] * cases}
    return {
        "prompt": prompt.text,
        "answer": prompt.answer,
        "task": prompt.task,
        "row": given,
        "lengths": [8 if short else size.trace.length(id) for id in ids],
        "texts": [text(id, prompt.extra) for id in ids],
    }


def play_trl(size: Size, ranks: int) -> dict[str, Any]:
    """Let TRL take the first period's steps; return their seconds and the micro-batch, the fastest in the first."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(size, folder, World(0, 1, torch.device("cpu")))
        config = settings(size, folder, 0, 1)
        prompts, _ = load_prompts(config.data, load_tokenizer(config.model.path), config.rollout.max_prompt_tokens)
        taken = PromptCursor(prompts, config.run.seed).take(PERIOD * size.prompts)
        warm_up = [trl_row(visit, size, short=True) for visit in taken[: size.prompts]]
        rows = warm_up + [trl_row(visit, size, short=False) for visit in taken]
        tried: dict[tuple[int, int], float] = {}  # by processes and micro-batch
        for size_of in TRL_MICRO_BATCHES:
            tried[ranks, size_of] = trl_steps(config, rows, ranks, size_of, 1)[0]
        micro_batch = min(tried, key=tried.__getitem__)[1]
        for processes in set(TRL_PROCESSES) - {ranks}:
            tried[processes, micro_batch] = trl_steps(config, rows, processes, micro_batch, 1)[0]
        told = {f"{processes} processes, micro-batch {n}": round(s, 1) for (processes, n), s in tried.items()}
        print(f"TRL: first step: {', '.join(f'{way} {s} s' for way, s in told.items())}", flush=True)
        processes, micro_batch = min(tried, key=tried.__getitem__)
        seconds = trl_steps(config, rows, processes, micro_batch, PERIOD)
    took = ", ".join(f"{s:.1f}" for s in seconds)
    print(f"TRL: steps of {took} s with {processes} processes, micro-batches of {micro_batch}", flush=True)
    return {"seconds": seconds, "processes": processes, "micro_batch": micro_batch, "tried": told}


def trl_steps(config: Config, rows: list[dict], ranks: int, micro_batch: int, count: int) -> list[float]:
    """Return the seconds of TRL's first `count` steps, after one that warms up."""
    with tempfile.TemporaryDirectory() as name, tqdm(total=1 + count, desc="TRL", unit="step", leave=False) as bar:
        arguments = trl.trl_arguments(config, ranks, micro_batch) | {"max_steps": 1 + count}
        arguments["transformers_continuous_batching_config"] |= {"num_blocks": 4096}
        spec = Path(name) / "spec.json"
        spec.write_text(json.dumps({"model": config.model.path, "rows": rows, "arguments": arguments}))
        side = trl.Side(f"TRL, micro-batch {micro_batch}", ranks, 1, warm_up=1)
        trl.take_turn(side, [trl.trl_python(), trl.__file__, "--trl-worker", str(spec)], Path(name), bar)
    return side.seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="one period, an eighth of the lengths, no TRL: under 2 minutes"
    )
    parser.add_argument("--ranks", type=int, default=2, help="processes of one thread (default 2)")
    arguments = parser.parse_args()
    if "RANK" not in os.environ and not arguments.quick:
        os.environ["TRL"] = json.dumps(play_trl(FULL, arguments.ranks))

    def run(world: World) -> None:
        size = QUICK if arguments.quick else FULL
        sides = play(size, 1 if arguments.quick else 4, world)
        if world.is_main:
            lengths = f"{size.trace.median:.0f} tokens in the median, {size.trace.limit} at most"
            samples = f"{size.prompts} x {size.responses} samples of {lengths}"
            metrics = report(sides, f"{world.size} ranks, {size.layers} layers of {size.hidden}, {samples}")
            if not arguments.quick:
                theirs = json.loads(os.environ["TRL"])
                for key, name in (("ratio_trl", ALL), ("ratio_trl_synchronous", OURS)):
                    [side] = [side for side in sides if side.name == name]
                    metrics[key] = round(sum(theirs["seconds"]) / sum(side.seconds[:PERIOD]), 2)
                metrics["trl"] = theirs | {"step": round(statistics.mean(theirs["seconds"]), 1)}
            print(json.dumps(metrics))

    return on_ranks(arguments.ranks, run)


if __name__ == "__main__":
    sys.exit(main())
