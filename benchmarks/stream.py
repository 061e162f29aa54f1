"""Step time of long rounds with and without stream training, on ranks of one thread each.

    python benchmarks/stream.py [--quick] [--ranks 2] [--shape nano] [--spans FILE.json]

Contenders take turns round by round, on one engine and one trainer, with the rounds, policies and streams of train.py
and the same prompts: no scale-down; half of the ranks leave at 20, 30, 40 %; the paper's rule; ours, which scales down
only when it projects a gain from what it has measured in the rounds before. Every round waits for all responses.

Lengths are given, by the trace of benchmarks/tail_batching.py: P75 1.7 times the median, 3 % of the responses at the
limit, 26 times the median. Weights are random and stay (the learning rate is 0), so every contender draws the same
tokens and its gradient can be compared: `gradient_rel_error` is |streamed - plain| / |plain| over a round of its own.
`samples_lost` counts samples that a step should have trained and did not, or trained twice.
A step is rollout and training, as its slowest rank saw them; the first round of each is not counted.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from tail_batching import SHAPES, Cursor, Shape, TraceEngine, build_engine, in_turn, on_ranks, progress_bar

import parallel
from buffer import SampleBuffer
from learning import group_advantages, learn, put_groups
from loss import LossConfig
from metrics import Clock
from overlap.streamed import StreamTraining
from parallel import World
from policies.scale_down import StreamConfig
from reward import RewardConfig
from rewards.graders import GRADERS
from rewards.pool import RewardPool
from rounds import Round
from scheduler import POLICIES, SchedulerConfig
from trainer import Trainer, TrainerConfig
from weights.sharding import whole

STREAM_SHAPES = {
    "nano": replace(SHAPES["nano"], prompts=16, window=2),
    "small": Shape(256, 1024, 4, 8, prompts=16, window=2),
}
CONTENDERS = {
    "off": StreamConfig("off"),
    "fixed 20 %": StreamConfig("fixed", fixed_share=0.2),
    "fixed 30 %": StreamConfig("fixed", fixed_share=0.3),
    "fixed 40 %": StreamConfig("fixed", fixed_share=0.4),
    "adaptive (paper)": StreamConfig("paper"),
    "adaptive (ours)": StreamConfig("estimate"),
}
FREED = ("samples", "train_seconds", "wait_seconds", "switch_seconds")  # of what a round records
PAPER = (
    "the paper, 7B/8k long rounds (Table 4): off 124.2 s, 20 % 122.7, 30 % 118.2, 40 % 119.8, adaptive 115.2 (1.08x)"
)


def parity(response: str, answer: str, row: dict) -> float:
    """A reward that differs within groups, and costs nothing."""
    return float(len(response) % 2)


@dataclass
class Played:
    """One step, as the slowest rank saw it."""

    rollout: float
    train: float
    stream: dict[str, Any]  # as in the records; empty when off
    lost: int

    @property
    def seconds(self) -> float:
        return self.rollout + self.train


@dataclass
class Side:
    """A contender with what it knows from round to round."""

    name: str
    scheduler: SchedulerConfig
    streaming: StreamTraining | None
    steps: list[Played] = field(default_factory=list)


class CountingTrainer(Trainer):
    """A trainer that counts the samples whose gradients it adds."""

    added = 0

    def accumulate(self, examples: Sequence, *progress: Callable[[], None]) -> None:
        self.added += len(examples)
        super().accumulate(examples, *progress)


def make_sides(shape: Shape, engine: TraceEngine, world: World) -> tuple[list[Side], CountingTrainer]:
    scheduler = SchedulerConfig(
        policy="synchronous",
        num_prompts=shape.prompts,
        num_responses=shape.responses,
        window_iterations=shape.window,
    )
    settings = TrainerConfig(lr=0.0, tokens_per_microbatch=512), LossConfig(), engine.sampling
    trainer = CountingTrainer(engine.model, *settings, world, engine.config.max_response_tokens, 1)
    sides = []
    for name, stream in CONTENDERS.items():
        made = StreamTraining(stream, RewardConfig(), engine, trainer, world, [1]) if stream.policy != "off" else None
        sides.append(Side(name, scheduler, made))
    return sides, trainer


def step(
    side: Side, engine: TraceEngine, trainer: CountingTrainer, pool: RewardPool, turn: int, clock: Clock
) -> Played:
    """Take one step of train.py's loop on the prompts of `turn`."""
    world, policy, trainer.added = trainer.world, POLICIES["synchronous"](side.scheduler), 0
    plan = policy.begin(Cursor(turn).take, 1)
    parallel.barrier(world)
    with clock.span("rollout"):
        current, buffer = Round(engine, pool, world, clock, side.scheduler), SampleBuffer(plan.keep_prompts)
        streamed = side.streaming.begin(plan, buffer) if side.streaming else None
        if streamed:
            streamed.play(current, policy)
        else:
            current.play(plan, policy)
        groups = current.collect()
    with clock.span("train"):
        advantages = group_advantages(groups, trainer.loss, RewardConfig(), trainer.max_response_tokens)
        put_groups(buffer, groups, advantages, trainer.loss, RewardConfig(), trainer.max_response_tokens)
        learn(trainer, buffer)
    seconds, added = zip(*parallel.gather_objects(world, (clock.take(), trainer.added)), strict=True)
    rollout, train = (max(s[name] for s in seconds) for name in ("rollout", "train"))
    return Played(
        rollout, train, streamed.record if streamed else {}, abs(sum(len(g.samples) for g in groups) - sum(added))
    )


def measure(shape: Shape, num_rounds: int, spans: str, world: World) -> tuple[list[Side], float, int]:
    """Play all rounds; return the contenders, the gradient's relative error and how many threads' worth it took."""
    GRADERS["match"] = parity
    engine = build_engine(shape, world)
    sides, trainer = make_sides(shape, engine, world)
    bar = progress_bar("step", (num_rounds + 1) * len(sides), world)
    with RewardPool(RewardConfig(), {"match"}) as pool, bar:
        for turn in range(num_rounds + 1):
            for side in in_turn(sides, turn):
                bar.set_postfix_str(side.name)
                side.steps.append(step(side, engine, trainer, pool, turn, Clock()))
                bar.update()
        error = gradient_error(sides, engine, trainer, pool, num_rounds + 1)
        if spans:
            write_spans(spans, sides, engine, trainer, pool, num_rounds)
    for side in sides:
        del side.steps[0]  # nothing was known, and nothing warm
    return sides, error, engine.model.embed.weight.shape[1]


def gradient_error(sides: Sequence[Side], engine: TraceEngine, trainer: CountingTrainer, pool, turn: int) -> float:
    """Return |streamed - plain| / |plain| of the reduced gradient, the plain one being that of "off"."""
    seen: list[torch.Tensor] = []

    def keep(lr: float) -> None:
        seen.append(torch.cat([whole(m.grad).flatten() for m in trainer.masters if m.grad is not None]).clone())

    with patch.object(trainer, "_step", keep):
        for side in (sides[0], next(s for s in sides if s.name == "fixed 30 %")):
            played = step(side, engine, trainer, pool, turn, Clock())
    assert played.stream["samples"] and seen[0].norm() > 0, "nothing was streamed"
    return ((seen[1] - seen[0]).norm() / seen[0].norm()).item()


def write_spans(
    path: str, sides: Sequence[Side], engine: TraceEngine, trainer: CountingTrainer, pool, turn: int
) -> None:
    """Write when each rank did what in one step, without and with a scale-down, for figures/stream.py."""
    timelines = {}
    for side in (sides[0], next(s for s in sides if s.name == "fixed 30 %")):
        clock = Clock(trace=True)
        step(side, engine, trainer, pool, turn, clock)
        tracks = parallel.gather_objects(trainer.world, clock.take_track()[0])
        zero = min(span.start for track in tracks for span in track)
        timelines[side.name] = [
            (rank, s.name, s.start - zero, s.end - zero, 1)
            for rank, track in enumerate(tracks)
            for s in track
            if s.name != "rollout"  # it encloses others
        ]
    if trainer.world.is_main:
        Path(path).write_text(json.dumps(timelines), encoding="utf-8")


# ---- results -----------------------------------------------------------------------------------------------------


def ratios(base: Side, other: Side) -> list[float]:
    return [b.seconds / o.seconds for b, o in zip(base.steps, other.steps, strict=True)]


def contender_row(side: Side, base: Side) -> dict[str, Any]:
    """Return mean seconds of a step, how much faster it is, and what freed ranks did in the rounds that they left."""
    names, faster = ("seconds", "rollout", "train"), ratios(base, side)
    left = [p.stream for p in side.steps if p.stream.get("projected")]
    return {
        "contender": side.name,
        **{name: round(statistics.mean(getattr(p, name) for p in side.steps), 2) for name in names},
        "faster": round(statistics.median(faster), 3),
        "least": round(min(faster), 2),
        "most": round(max(faster), 2),
        "left": len(left),
        **{key: round(statistics.mean(s[key] for s in left), 2) if left else None for key in FREED},
    }


def report(sides: Sequence[Side], error: float, title: str) -> None:
    """Print the table and, as the last line, the metrics in JSON."""
    base = sides[0]
    print(
        f"\n{title}; {len(base.steps)} rounds each; seconds of a step, means; x: median (least .. most) of the rounds"
    )
    print(
        f"{'':18} step s  rollout    train   times as fast         scaled down   streamed   train s   wait s   switch s"
    )
    rows = [contender_row(side, base) for side in sides]
    for row in rows:
        line = f"{row['contender']:18}{row['seconds']:7.2f}{row['rollout']:9.2f}{row['train']:9.2f}"
        line += f"   {row['faster']:5.2f} ({row['least']:5.2f} ..{row['most']:5.2f})"
        line += f"{row['left']:8d}/{len(base.steps)}"
        if row["left"]:
            line += f"{row['samples']:13.0f}" + "".join(f"{row[key]:10.2f}" for key in FREED[1:])
        print(line)
    print("\nprojected when it scaled down, and what came true (means)")
    for side in sides:
        streamed = [p.stream for p in side.steps if p.stream.get("projected")]
        for key in ("rest_seconds", "peak_tokens") if streamed else ():
            ahead, true = (statistics.mean(s[when][key] for s in streamed) for when in ("projected", "true"))
            print(f"{side.name:18}{key:14}{ahead:10.2f}{true:10.2f}")
    print(f"\n{PAPER}")
    speedups = {s.name: round(statistics.median(ratios(base, s)), 3) for s in sides}
    train_share = statistics.mean(p.train / p.seconds for p in base.steps)
    metrics = {
        "name": "stream",
        "speedup_adaptive_paper": speedups["adaptive (paper)"],
        "speedup_adaptive_ours": speedups["adaptive (ours)"],
        "speedup_fixed": max(v for name, v in speedups.items() if name.startswith("fixed")),
        "train_share": round(train_share, 3),
        "gradient_rel_error": error,
        "rounds": len(base.steps),
        "contenders": rows,
        "samples_lost": sum(p.lost for s in sides for p in s.steps),
    }
    print(json.dumps(metrics))


def play(arguments: argparse.Namespace, world: World) -> None:
    shape, rounds = STREAM_SHAPES[arguments.shape], arguments.rounds or (1 if arguments.quick else 5)
    sides, error, width = measure(shape, rounds, arguments.spans, world)
    if world.is_main:
        samples = f"{shape.prompts} x {shape.responses} samples of {shape.median} tokens in the median"
        report(sides, error, f"{world.size} ranks, width {width}, {samples}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a single round: under 2 minutes on 2 cores")
    parser.add_argument("--rounds", type=int, default=0, help="rounds of each contender (default 5)")
    parser.add_argument("--ranks", type=int, default=4, help="processes (default 4)")
    parser.add_argument("--shape", choices=tuple(STREAM_SHAPES), default="small", help="nano is for tests")
    parser.add_argument("--spans", default="", help="also write the timelines of one step here, for figures/stream.py")
    arguments = parser.parse_args()
    return on_ranks(arguments.ranks, lambda world: play(arguments, world))


if __name__ == "__main__":
    sys.exit(main())
