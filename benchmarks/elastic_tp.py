"""Rollout time with the tensor-parallel size fixed and chosen by each rule, on four CPU ranks that run out of pages.

    python benchmarks/elastic_tp.py [--quick]

Short rounds (many sequences) and long ones (few, long) take turns while lengths grow, as in training. All runs are
replayed on one set of measurements: each round is decoded once at every size, the best of `--turns`, and a rule is
charged for the size that it chose, and for the regroup when it changed. (A round starts from an idle engine and its
tokens do not depend on the size, so this is what a run of its own would take.) Planners learn of their own rounds only.

    regret_vs_best_fixed            time of `predict` over that of the best fixed size in hindsight, less 1
    preemption_ratio                preemptions of `predict` over those of the fixed size 1
    regroup_seconds_over_broadcast  dearest change of size over a plain broadcast of all weights. On a CPU a change
                                    packs the weights, as a new version of them is packed at any size;
                                    regroup_views_...: without packing
"""

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

os.environ["OMP_NUM_THREADS"] = "1"  # four ranks; before torch is imported
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tqdm import tqdm

import parallel
from model import Model, parse_shape
from parallel import Groups, World
from planner import Launch, Limits, ParallelismPlanner, PlannerConfig, Profile, Report
from profiler import measure
from rollout import Engine, EngineStats, RolloutConfig
from sampling import SamplingConfig
from sequence import Sequence

RANKS = 4
PROMPT = 16  # tokens
RESPONSES = 4  # of one prompt
SHAPE = {
    "model_type": "qwen3",
    "vocab_size": 2048,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Round:
    kind: str
    lengths: tuple[int, ...]

    @property
    def launch(self) -> Launch:
        return Launch(len(self.lengths), PROMPT, RESPONSES)


@dataclass(frozen=True)
class Played:
    """What one round came to at one size."""

    seconds: float  # of the slowest rank
    preemptions: int


def rounds(count: int, longest: int) -> list[Round]:
    """Return short and long rounds in turns; their lengths double over the run."""
    rng, result = Random(0), []
    for step in range(count):
        limit = longest // 2 + longest // 2 * step // max(count - 1, 1)
        if step % 2:
            lengths = [rng.randint(limit // 2, limit) for _ in range(2 * RANKS)]
        else:
            lengths = [min(int(limit / 8 * rng.lognormvariate(0, 0.9)) + 1, limit) for _ in range(20 * RANKS)]
        result.append(Round(("short", "long")[step % 2], tuple(lengths)))
    return result


# ---- on each rank ------------------------------------------------------------------------------------------------


def play(engine: Engine, world: World, current: Round) -> Played:
    """Decode a round's share, prompt by prompt as training deals them."""
    tp, engine.stats = engine.parallel, EngineStats()
    parallel.barrier(world)
    start = time.perf_counter()
    for i, length in enumerate(current.lengths):
        prompt = i // RESPONSES
        if prompt % tp.num_replicas == tp.replica:
            ids = tuple(Random(prompt).randrange(2048) for _ in range(PROMPT))
            engine.add(Sequence(prompt, i % RESPONSES, 0, ids, i, length, ignore_eos=True))
    while not engine.is_idle:
        engine.step()
    own = time.perf_counter() - start, engine.stats.preemptions
    seconds, preemptions = zip(*parallel.gather_objects(world, own), strict=True)
    return Played(max(seconds), sum(preemptions[:: tp.size]))


def regroup_seconds(engine: Engine, groups: Groups, world: World, turns: int) -> dict[int, float]:
    """Return the seconds of a change to each size, on the slowest rank; the best of `turns`."""
    best: dict[int, float] = {}
    for _ in range(turns):
        for size in sorted(groups.by_size):
            engine.regroup(groups[1 if size > 1 else max(groups.by_size)])
            parallel.barrier(world)
            start = time.perf_counter()
            engine.regroup(groups[size])
            seconds = max(parallel.gather_objects(world, time.perf_counter() - start))
            best[size] = min(best.get(size, seconds), seconds)
    return best


def broadcast_seconds(model: Model, world: World, turns: int) -> float:
    """Return the seconds of sending all weights from one rank to the others."""
    copies, best = [p.detach().clone() for p in model.parameters()], float("inf")
    for _ in range(turns + 1):
        parallel.barrier(world)
        start = time.perf_counter()
        parallel.broadcast_tensors(world, copies)
        best = min(best, max(parallel.gather_objects(world, time.perf_counter() - start)))
    return best


def run_rank(rank: int, store: str, out: str, largest: int, count: int, longest: int, turns: int) -> None:
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    world = World(rank, RANKS, torch.device("cpu"), dist.group.WORLD, node_size=RANKS)
    torch.manual_seed(0)
    model = Model(parse_shape(SHAPE, "benchmark")).requires_grad_(False)
    groups = Groups(world, [n for n in (1, 2, 4) if n <= largest])
    # A rank alone holds one and a half of the longest sequences.
    token_bytes = 2 * 4 * SHAPE["num_hidden_layers"] * SHAPE["num_key_value_heads"] * SHAPE["head_dim"]
    config = RolloutConfig(
        max_prompt_tokens=PROMPT,
        max_response_tokens=longest,
        max_running=32,
        page_size=32,
        kv_gib=1.5 * (PROMPT + longest) * token_bytes / 2**30,
    )
    engine = Engine(model, config, SamplingConfig(), (), parallel=groups[1], sizes=groups.by_size)
    sizes = measure(engine, groups, world)
    work = rounds(count, longest)
    played: list[dict[int, Played]] = [{} for _ in work]
    for turn in range(turns):
        bar = tqdm(work, desc=f"turn {turn + 1} of {turns}", unit="round", disable=None if world.is_main else True)
        for current, own in zip(bar, played):
            for size in groups.by_size:
                engine.regroup(groups[size])
                own[size] = min(play(engine, world, current), own.get(size, Played(1e9, 0)), key=lambda p: p.seconds)
    regroup = regroup_seconds(engine, groups, world, turns + 2)
    plain = replace(config, prepack=False)
    engine = Engine(model, plain, SamplingConfig(), (), parallel=groups[1], sizes=groups.by_size)
    views = regroup_seconds(engine, groups, world, turns + 2)
    broadcast = broadcast_seconds(model, world, turns + 2)
    if world.is_main:
        limits = Limits(RANKS, engine.num_pages, config.page_size, config.max_running, longest)
        Path(out).write_text(json.dumps(report(work, played, limits, Profile({}, sizes), regroup, views, broadcast)))
    parallel.stop(world)


# ---- what the rules would have done ------------------------------------------------------------------------------


def replay(
    rule: str,
    start: int,
    work: list[Round],
    played: list[dict[int, Played]],
    limits: Limits,
    profile: Profile | None,
    regroup: dict[int, float],
) -> tuple[float, int, list[int]]:
    """Return (seconds, preemptions, sizes) of one rule over all rounds."""
    planner = ParallelismPlanner(PlannerConfig(rule), limits, start, profile)
    seconds, preemptions, chosen = 0.0, 0, []
    for current, by_size in zip(work, played, strict=True):
        size = planner.choose(current.kind, current.launch).size
        if chosen and size != chosen[-1]:
            seconds += regroup[size]
        result = by_size[size]
        planner.observe(current.kind, Report(result.preemptions, result.seconds, current.lengths))
        seconds, preemptions = seconds + result.seconds, preemptions + result.preemptions
        chosen.append(size)
    return seconds, preemptions, chosen


def report(
    work: list[Round],
    played: list[dict[int, Played]],
    limits: Limits,
    profile: Profile,
    regroup: dict[int, float],
    views: dict[int, float],
    broadcast: float,
) -> dict:
    """Print the table; return the metrics."""
    for i, (current, by_size) in enumerate(zip(work, played)):
        row = "   ".join(f"TP {n} {p.seconds:6.2f} s {p.preemptions:4d} preempted" for n, p in by_size.items())
        print(f"round {i:2d} {current.kind:5} {len(current.lengths):3d} x at most {max(current.lengths):4d}   {row}")
    contenders = {f"fixed {n}": ("fixed", n, None) for n in limits.pages}
    contenders |= {"paper": ("paper", 1, None), "predict": ("predict", 1, profile)}
    results = {
        name: replay(rule, start, work, played, limits, known, regroup)
        for name, (rule, start, known) in contenders.items()
    }
    for name, (seconds, preemptions, chosen) in results.items():
        print(f"{name:8} {seconds:8.2f} s   {preemptions:5d} preemptions   sizes {''.join(map(str, chosen))}")
    hindsight = sum(min(p.seconds for p in by_size.values()) for by_size in played)
    print(f"best size of every round in hindsight {hindsight:.2f} s")
    for name, costs in (("copies packed for a CPU", regroup), ("views", views)):
        row = ", ".join(f"{1000 * seconds:.2f} ms to {n}" for n, seconds in costs.items())
        print(f"regroup, {name}: {row}; broadcast of all weights {1000 * broadcast:.1f} ms")
    best_fixed = min(results[f"fixed {n}"][0] for n in limits.pages)
    return {
        "name": "elastic_tp",
        "regret_vs_best_fixed": round(results["predict"][0] / best_fixed - 1, 4),
        "regret_of_paper_vs_best_fixed": round(results["paper"][0] / best_fixed - 1, 4),
        "preemption_ratio": round(results["predict"][1] / max(results["fixed 1"][1], 1), 3),
        "preemption_ratio_of_paper": round(results["paper"][1] / max(results["fixed 1"][1], 1), 3),
        "regroup_seconds_over_broadcast": round(max(regroup.values()) / broadcast, 3),
        "regroup_views_seconds_over_broadcast": round(max(views.values()) / broadcast, 5),
        **{f"seconds_{name.replace(' ', '_')}": round(seconds, 2) for name, (seconds, _, _) in results.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds: under 2 minutes on 2 cores")
    quick = parser.parse_args().quick
    scale = (2, 4, 128, 1) if quick else (4, 12, 512, 3)  # largest size, rounds, tokens of the longest, turns
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "report.json"
        mp.spawn(run_rank, (f"{folder}/store", str(out), *scale), nprocs=RANKS)
        print(out.read_text())


if __name__ == "__main__":
    main()
