"""Rollout time with the tensor-parallel size fixed and chosen by each rule, on CPU ranks that run out of pages.

    python benchmarks/elastic_tp.py [--quick] [--ranks 4]

Short rounds (many sequences) and long ones (few, long) take turns while lengths grow, as in training. Contenders take
turns round by round on one engine; each has a planner of its own, which learns of its own rounds only. What is timed is
what a run does: the planner chooses, the engine regroups when that is another size than the contender's last, and
decodes the round. Before, the engine is brought to the contender's last size, untimed. Every contender plays all rounds
several times, each time with a new planner; of each round the time of the middle turn counts. All this is done twice:
with whole weights, and with sharded ones, which come from masters that lie over all ranks. A rank that waits for others
keeps its core busy: where ranks share cores the others would else decode faster, as no GPU does that has idle
neighbours.

Two more contenders play long rounds only, and change the size inside them: as `planner.within_round` predicts, and
doubled whenever half of the responses have ended.

    regret_vs_best_fixed            time of `predict` over that of the best fixed size in hindsight, less 1; the worse
                                    of both layouts
    preemption_ratio                preemptions of `predict` over those of the fixed size 1, with whole weights
    regroup_seconds_over_broadcast  dearest change of size over a plain broadcast of all weights; the dearer of both
                                    layouts. On a CPU a change packs the weights, as a new version of them is packed at
                                    any size; regroup_views_... and regroup_sharded_...: without packing. With sharded
                                    weights the dearest change is that to size 1, where every rank receives as much as
                                    in the broadcast, and packs all of it besides
    pages_gain_tp2                  pages at size 2 with sharded weights over those with whole ones
    within                          of both contenders that change the size inside long rounds: seconds of these rounds
                                    with and without that, median turns; changes of a turn; responses that then have
                                    other tokens (of rounding)
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from collections.abc import Sequence as List
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from tail_batching import in_turn, on_ranks, progress_bar

import parallel
from core import Sample, SampleId
from engine.pages import LAYOUTS
from engine.sequence import Sequence
from model import Model, parse_shape
from parallel import TensorParallel, TPGroups, World, make_tp_groups
from policies.placement import assign_by_load
from policies.planner import Choice, EngineLimits, Launch, ParallelismPlanner, PlannerConfig, Report
from policies.step_times import Profile
from profiler import measure
from rollout import Engine, RolloutConfig
from sampling import SamplingConfig
from weights.sharding import shard_groups, shard_model

PROMPT = 16  # tokens
RESPONSES = 4  # of one prompt
WINDOW = 16  # engine steps between two looks at what is left of a round
SHAPE: dict[str, Any] = {
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
    """What one round came to."""

    size: int
    seconds: float  # of choosing, regrouping and decoding, on the slowest rank
    preemptions: int
    changes: int  # of the size, within the round
    tokens: dict[SampleId, int]  # a hash of each response's


@dataclass
class Contender:
    """A rule with what its planner knows, and what its rounds came to."""

    name: str
    planner: ParallelismPlanner
    size: int
    without: str = ""  # the contender that does the same but for changes within long rounds, which are all it plays
    rounds: dict[int, Played] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return sum(played.seconds for played in self.rounds.values())

    @property
    def preemptions(self) -> int:
        return sum(played.preemptions for played in self.rounds.values())


@dataclass(frozen=True)
class Scale:
    rounds: int
    longest: int  # tokens
    turns: int  # of all rounds


FULL, QUICK = Scale(8, 192, 3), Scale(4, 128, 1)


def rounds(scale: Scale, ranks: int) -> list[Round]:
    """Return short and long rounds in turns; their lengths double over the run."""
    rng, result, half = Random(0), [], scale.longest // 2
    for step in range(scale.rounds):
        limit = half + half * step // (scale.rounds - 1)
        if step % 2:
            lengths = [rng.randint(limit // 2, limit) for _ in range(2 * ranks)]
        else:
            lengths = [min(int(limit / 8 * rng.lognormvariate(0, 0.9)) + 1, limit) for _ in range(20 * ranks)]
        result.append(Round(("short", "long")[step % 2], tuple(lengths)))
    return result


Meet = Callable[[], object]  # waits for all ranks


# ---- on each rank ------------------------------------------------------------------------------------------------


class Doubling(ParallelismPlanner):
    """Doubles the size whenever half of a long round's responses have ended."""

    def choose_again(self, kind: str, live: List[List[int]]) -> Choice | None:
        self.due = sum(map(len, live)) // 2
        larger = [n for n in self.sizes if n > self.size]
        self.size = min(larger, default=self.size)
        return Choice(self.size, "doubled") if larger else None


def play(contender: Contender, engine: Engine, tp_groups: TPGroups, world: World, meet: Meet, current: Round) -> Played:
    """Let a contender choose its size and decode a round. Collective."""
    move(engine, tp_groups, contender.size)
    engine.stats.take()
    parallel.barrier(world)
    start = time.perf_counter()
    size = contender.planner.choose(current.kind, current.launch).size
    move(engine, tp_groups, size)
    moved = time.perf_counter()
    add(engine, current)
    samples, changes = decode(contender.planner, engine, tp_groups, world, meet, current.kind)
    end = time.perf_counter()
    meet()
    tokens = {sample.id: hash(tuple(sample.token_ids)) for sample in samples}
    own = end - start, end - moved, engine.stats.preemptions, tokens, changes
    seconds, decoding, preemptions, parts, all_changes = zip(*parallel.gather_objects(world, own), strict=True)
    everything = {id: text for part in parts for id, text in part.items()}
    played = Played(size, max(seconds), sum(preemptions[::size]), len(changes), everything)
    resize = max(map(sum, all_changes)) / len(changes) if changes else None
    contender.planner.observe(current.kind, Report(played.preemptions, max(decoding), current.lengths, resize))
    contender.size = engine.parallel.size
    return played


def meeting(world: World) -> Meet:
    """Return a call that waits for all ranks without giving the core away. Collective."""
    shared = parallel.with_shared_memory(world).shared
    if not shared:
        return partial(parallel.barrier, world)
    shared.patience = sys.maxsize
    return partial(shared.exchange, torch.zeros(1))


def move(engine: Engine, tp_groups: TPGroups, size: int) -> None:
    if engine.parallel.size != size:
        engine.regroup(tp_groups[size])


def add(engine: Engine, current: Round) -> None:
    """Queue this replica's share, prompt by prompt as training deals them."""
    tp = engine.parallel
    for i, length in enumerate(current.lengths):
        prompt = i // RESPONSES
        if prompt % tp.num_replicas == tp.replica:
            ids = tuple(Random(prompt).randrange(2048) for _ in range(PROMPT))
            engine.add(Sequence(prompt, i % RESPONSES, 0, ids, i, length, ignore_eos=True))


def decode(
    planner: ParallelismPlanner, engine: Engine, tp_groups: TPGroups, world: World, meet: Meet, kind: str
) -> tuple[list[Sample], list[float]]:
    """Decode to the end; return this replica's samples, and the seconds of each change of the size. Collective."""
    samples, changes = list[Sample](), list[float]()
    while True:
        steps = WINDOW if planner.due else sys.maxsize
        while steps and not engine.is_idle:
            samples += engine.step()
            steps -= 1
        if not planner.due:
            return samples, changes
        meet()
        live = parallel.gather_objects(world, [*engine.batcher.live_tokens().values()])[:: engine.parallel.size]
        if not any(live):
            return samples, changes
        if planner.is_due(sum(map(len, live))) and (choice := planner.choose_again(kind, live)):
            start = time.perf_counter()
            deal_again(engine, tp_groups[choice.size], world)
            changes.append(time.perf_counter() - start)


def deal_again(engine: Engine, group: TensorParallel, world: World) -> None:
    """Go on in groups of another size, as `Round._resize` does. Collective."""
    own = engine.export(engine.batcher.live_tokens())
    parts = parallel.gather_objects(world, own if engine.parallel.rank == 0 else [])
    engine.regroup(group)
    sequences = [sequence for part in parts for sequence in part]
    for i in assign_by_load([sequence.num_tokens for sequence in sequences], group.num_replicas)[group.replica]:
        engine.add(sequences[i])


def regroup_seconds(engine: Engine, tp_groups: TPGroups, world: World, turns: int) -> dict[int, float]:
    """Return the seconds of a change to each size, on the slowest rank; the best of `turns`."""
    best: dict[int, float] = {}
    for _ in range(turns):
        for size in sorted(tp_groups):
            engine.regroup(tp_groups[1 if size > 1 else max(tp_groups)])
            parallel.barrier(world)
            start = time.perf_counter()
            engine.regroup(tp_groups[size])
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


def build(longest: int, world: World, tp_groups: TPGroups, layout: str, prepack: bool = True) -> Engine:
    """Return an engine whose ranks alone hold, beside whole weights, one and a half of the longest sequences."""
    torch.manual_seed(0)
    model = Model(parse_shape(SHAPE, "benchmark")).requires_grad_(False)
    if layout == "sharded":
        model = shard_model(model, shard_groups(world, world.size)[0]).requires_grad_(False)
    token_bytes = 2 * 4 * SHAPE["num_hidden_layers"] * SHAPE["num_key_value_heads"] * SHAPE["head_dim"]
    config = RolloutConfig(
        max_prompt_tokens=PROMPT,
        max_response_tokens=longest,
        max_running=32,
        page_size=32,
        prepack=prepack,
        weights=layout,
        kv_gib=1.5 * (PROMPT + longest) * token_bytes / 2**30,
    )
    return Engine(model, config, SamplingConfig(), (), parallel=tp_groups[1], sizes=tp_groups)


def contenders(limits: EngineLimits, profile: Profile) -> list[Contender]:
    """Return every fixed size and all rules, which start at size 1; `paper` without a profile."""
    rules: list[tuple[str, str, int, Profile | None]] = [(f"fixed {n}", "fixed", n, None) for n in limits.pages]
    rules += [("paper", "paper", 1, None), ("predict", "predict", 1, profile)]
    predict = ParallelismPlanner(PlannerConfig("predict", within_round=True), limits, 1, profile)
    doubling = Doubling(PlannerConfig("fixed", within_round=True), limits, 1)
    return [
        *(Contender(name, ParallelismPlanner(PlannerConfig(r), limits, n, known), n) for name, r, n, known in rules),
        Contender("predict, also within", predict, 1, "predict"),
        Contender("fixed 1, doubled within", doubling, 1, "fixed 1"),
    ]


@dataclass(frozen=True)
class Measured:
    """What one layout of the weights came to."""

    turns: list[list[Contender]]
    pages: dict[int, int]  # by size
    regroup: dict[int, float]  # seconds of a change to each size, with weights packed for a CPU
    plain_regroup: dict[int, float]  # without packing


def run_layout(layout: str, scale: Scale, work: list[Round], tp_groups: TPGroups, world: World) -> Measured:
    engine, meet = build(scale.longest, world, tp_groups, layout), meeting(world)
    profile = Profile({}, measure(engine, tp_groups, world))
    config, pages = engine.config, engine.num_pages
    limits = EngineLimits(world.size, pages, config.page_size, config.max_running, scale.longest)
    turns = [contenders(limits, profile) for _ in range(scale.turns)]
    with progress_bar(f"elastic, {layout}", scale.turns * len(work), world) as bar:
        for turn, sides in enumerate(turns):
            for i, current in enumerate(work):
                playing = [side for side in sides if current.kind == "long" or not side.without]
                for side in in_turn(playing, turn + i):
                    bar.set_postfix_str(side.name)
                    side.rounds[i] = play(side, engine, tp_groups, world, meet, current)
                bar.update()
    packed = regroup_seconds(engine, tp_groups, world, 4)
    engine = build(scale.longest, world, tp_groups, layout, prepack=False)
    return Measured(turns, pages, packed, regroup_seconds(engine, tp_groups, world, 4))


def run(scale: Scale, world: World) -> None:
    largest, work = min(world.size, SHAPE["num_key_value_heads"]), rounds(scale, world.size)
    tp_groups = make_tp_groups(world, [n for n in (1, 2, 4) if n <= largest])
    found = {layout: run_layout(layout, scale, work, tp_groups, world) for layout in LAYOUTS}
    broadcast = broadcast_seconds(Model(parse_shape(SHAPE, "benchmark")), world, 4)
    if world.is_main:
        print(json.dumps(report(found, work, broadcast)))


# ---- results -----------------------------------------------------------------------------------------------------


def report(found: dict[str, Measured], work: list[Round], broadcast: float) -> dict:
    """Print the tables; return the metrics."""
    whole, sharded = (compare(found[layout].turns, work, layout) for layout in LAYOUTS)
    dearest = {}
    for layout, m in found.items():
        for how, seconds in (("packed for a CPU", m.regroup), ("plain", m.plain_regroup)):
            row = ", ".join(f"{1000 * s:.2f} ms to {n}" for n, s in seconds.items())
            print(f"regroup, {layout}, {how}: {row}; broadcast of all weights {1000 * broadcast:.1f} ms")
            dearest[layout, how] = round(max(seconds.values()) / broadcast, 5)
    return {
        "name": "elastic_tp",
        "ranks": found["whole"].turns[0][0].planner.limits.num_ranks,
        "regret_vs_best_fixed": max(whole["regret"]["predict"], sharded["regret"]["predict"]),
        "regret_of_paper_vs_best_fixed": max(whole["regret"]["paper"], sharded["regret"]["paper"]),
        "preemption_ratio": whole["preemptions"]["predict"],
        "preemption_ratio_of_paper": whole["preemptions"]["paper"],
        "regroup_seconds_over_broadcast": max(dearest[layout, "packed for a CPU"] for layout in LAYOUTS),
        "regroup_views_seconds_over_broadcast": dearest["whole", "plain"],
        "regroup_sharded_seconds_over_broadcast": dearest["sharded", "plain"],
        "pages_gain_tp2": round(found["sharded"].pages[2] / found["whole"].pages[2], 3),
        "seconds_in_hindsight": whole["hindsight"],
        "seconds_in_hindsight_sharded": sharded["hindsight"],
        "contenders": whole["rows"] + sharded["rows"],
        "within": [row for layout in LAYOUTS for row in compare_within(found[layout].turns, layout)],
    }


def middle_seconds(same: List[Contender], rounds: List[int]) -> float:
    """Return the seconds of a contender's rounds, each of the middle one of its turns."""
    return sum(median(side.rounds[i].seconds for side in same) for i in rounds)


def compare_within(turns: list[list[Contender]], layout: str) -> list[dict[str, Any]]:
    """Print and return what changes of the size within long rounds came to."""
    by_name, rows = {same[0].name: same for same in zip(*turns)}, []
    for name, same in by_name.items():
        if not (others := by_name.get(same[0].without)):
            continue
        long = [*same[0].rounds]
        with_, without = middle_seconds(same, long), middle_seconds(others, long)
        changes = median(sum(played.changes for played in side.rounds.values()) for side in same)
        pairs = [(a.rounds[i].tokens, b.rounds[i].tokens) for a, b in zip(same, others) for i in long]
        changed = sum(theirs[id] != mine[id] for mine, theirs in pairs for id in mine)
        assert all(mine.keys() == theirs.keys() for mine, theirs in pairs), "responses were lost or doubled"
        row = {"contender": f"{name}{', sharded' * (layout == 'sharded')}", "changes": changes}
        row |= {"seconds": round(with_, 2), "without": round(without, 2), "over_without": round(with_ / without, 3)}
        rows.append(row | {"responses": sum(len(mine) for mine, _ in pairs), "responses_changed": changed})
        print(json.dumps(rows[-1]))
    return rows


def compare(turns: list[list[Contender]], work: list[Round], layout: str) -> dict[str, Any]:
    """Print the table of one layout; return its rows, and by rule the regret and the ratio of preemptions."""
    all_rounds = (same for same in zip(*turns) if not same[0].without)
    by_name = {same[0].name: sorted(same, key=lambda c: c.seconds) for same in all_rounds}
    middle = {name: same[len(same) // 2] for name, same in by_name.items()}
    fixed = [name for name in middle if name.startswith("fixed")]
    for i, current in enumerate(work):
        played = ((side.name, side.rounds[i]) for side in middle.values())
        row = "   ".join(f"{name} {p.seconds:5.2f} s, TP {p.size}, {p.preemptions:3d} preempted" for name, p in played)
        print(f"round {i:2d} {current.kind:5} {len(current.lengths):3d} x at most {max(current.lengths):4d}   {row}")
    rows, took = [], {name: middle_seconds(same, range(len(work))) for name, same in by_name.items()}
    for name, side in middle.items():
        sizes = " ".join(str(played.size) for played in side.rounds.values())
        seconds = [same.seconds for same in by_name[name]]
        row_name = name + ", sharded" * (layout == "sharded")
        print(
            f"{row_name:16} {took[name]:8.2f} s ({min(seconds):.2f} .. {max(seconds):.2f})   "
            f"{side.preemptions:5d} preemptions   sizes {sizes}"
        )
        times = {"seconds": round(took[name], 2), "least": round(min(seconds), 2), "most": round(max(seconds), 2)}
        rows.append({"contender": row_name, **times, "preemptions": side.preemptions, "sizes": sizes})
    hindsight = sum(min(middle_seconds(by_name[name], [i]) for name in fixed) for i in range(len(work)))
    print(f"best fixed size of every round in hindsight, {layout} weights: {hindsight:.2f} s")
    best_fixed, preemptions = min(took[name] for name in fixed), max(middle["fixed 1"].preemptions, 1)
    rules = [(name, middle[name]) for name in ("predict", "paper")]
    return {
        "regret": {name: round(took[name] / best_fixed - 1, 4) for name, _ in rules},
        "preemptions": {name: round(side.preemptions / preemptions, 3) for name, side in rules},
        "hindsight": round(hindsight, 2),
        "rows": rows,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds: on 2 cores 4 minutes, not 25")
    parser.add_argument("--ranks", type=int, choices=(2, 4), default=4, help="processes of one thread (default 4)")
    arguments = parser.parse_args()
    return on_ranks(arguments.ranks, lambda world: run(QUICK if arguments.quick else FULL, world))


if __name__ == "__main__":
    sys.exit(main())
