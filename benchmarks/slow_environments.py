"""What slow environments cost: with a turn barrier and without, when some fail, and when pages are not kept.

    python benchmarks/slow_environments.py [--quick]

One rank with one thread and a small random model plays `guess`, which takes seven turns of two tokens in the mean: so
nearly all time is the environments'. Latencies are the papers', divided by 100 and really waited for (env.latency).
Contenders play the same prompts, with the same latencies, round by round in turns.

barrier    replies take effect together, once all sequences have ended their turn and all are answered (env.barrier)
async      every sequence goes on with its own reply: the default

`speedup_async_sigmaN` is the rollout's seconds with the barrier over those without, for latencies of normal(10, N)
seconds. `waiting` is the same ratio of the latencies alone, if a model took no time: the sum over turns of the longest
latency, over the longest sum of an episode; `waiting_long` that of 512 episodes of 30 turns.

32 x 8     all samples are waited for; some environments are slow, some never answer and begin again at their time-out
36 x 9     32 x 8 of 36 x 9 samples are kept (eta 1.125 on both); late prompts wait for a long round, which counts too
36 x 12    the same with eta 1.5 on responses

`samples_trained_equal`: training steps on the steps' clock have the same tokens, with the barrier and without.
`keep_over_recompute_N`: seconds of episodes with eight turns of N tokens in the mean, where each turn computes all that
is before it again, over seconds with the engine's pages kept.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from tail_batching import ROOT, SHAPES, Shape, in_turn, progress_bar, random_model

from core import Prompt, SampleId, Visit, turns_of
from engine.sequence import Sequence as EngineSequence
from engine.sequence import continued
from environments import EnvConfig
from envs.episodes import Episodes
from envs.latency import Latency
from metrics import Clock
from parallel import World
from reward import RewardConfig
from rewards.pool import RewardPool
from rollout import Engine, RolloutConfig
from rounds import Round
from sampling import SamplingConfig, sample_key
from scheduler import POLICIES, SchedulerConfig
from warm_start import WarmStartConfig, byte_tokenizer, make_model

WORLD = World(0, 1, torch.device("cpu"))
SCALE = 0.01  # real seconds of a second of latency
SIGMAS, MEAN = (1, 5, 10), 10  # seconds
PAPER = {10: 2.46}
TURNS = 7  # of `guess`
ETA = 1.125
FAILURES: dict[str, Any] = {"slow": "0.01x10", "stop": 0.003, "step_seconds": 600 * SCALE, "max_failures": 10**6}
REPLY = (70, 71, 72, 73)  # tokens


@dataclass(frozen=True)
class Size:
    prompts: int
    responses: int
    rounds: int  # with each latency
    failing: tuple[int, int]  # periods, and rounds in each: the last one may be long
    parked: dict[int, int]  # episodes, by the tokens of a turn
    repeats: int  # of these


# Eight short rounds put off 4 of 36 prompts each, and the long one trains them.
FULL = Size(32, 8, rounds=16, failing=(2, 9), parked={8: 64, 200: 8}, repeats=3)
QUICK = Size(16, 8, rounds=2, failing=(1, 3), parked={8: 16, 200: 1}, repeats=1)


@dataclass
class Contender:
    """One way to play, and the rounds that it has played."""

    name: str
    scheduler: SchedulerConfig
    episodes: Episodes
    seconds: list[float] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    failed: int = 0  # episodes

    def mean(self, kind: str = "") -> float:
        """Return the seconds of a round of a kind."""
        return statistics.mean(s for s, k in zip(self.seconds, self.kinds, strict=True) if k.startswith(kind))


class Cursor:
    """Prompts without end, which every contender draws alike. No random text answers them."""

    def __init__(self, epoch: int):
        self.epoch, self.taken = epoch, 0

    def take(self, count: int) -> list[Visit]:
        first, self.taken = self.taken, self.taken + count
        like = Prompt(0, (60, 61, 62, 63), "", "", "env", {"answer": "answer"}, env="guess")
        return [Visit(self.epoch, replace(like, index=i)) for i in range(first, self.taken)]


def environments(latency: str, **more: Any) -> Episodes:
    """Return the episodes of a contender."""
    config = EnvConfig(latency=latency, **more)
    return Episodes(config, RewardConfig(), [v.prompt for v in Cursor(0).take(1)], byte_tokenizer(), seed=0)


def scaled(mean: float, deviation: float) -> str:
    return f"normal({mean * SCALE:g},{deviation * SCALE:g})"


# ---- rounds -------------------------------------------------------------------------------------------------------


def build_engine(rows: int) -> Engine:
    """Return a small engine in which half of the tokens end a turn."""
    model = random_model(SHAPES["nano"])
    config = RolloutConfig(max_prompt_tokens=16, max_response_tokens=128, max_running=rows, kv_gib=0.5)
    return Engine(model, config, SamplingConfig(), range(0, model.shape.vocab_size, 2), byte_tokenizer())


def play(side: Contender, engine: Engine, pool: RewardPool, policy: Any, cursor: Cursor, left: int) -> None:
    """Play a round, timed."""
    plan = policy.begin(cursor.take, left)
    start = time.perf_counter()
    current = Round(engine, pool, WORLD, Clock(), side.scheduler, episodes=side.episodes)
    current.play(plan, policy)
    side.seconds.append(time.perf_counter() - start)
    side.kinds.append(plan.kind)
    current.collect()
    policy.close(current.aborted)
    side.failed += side.episodes.take_stats().failed


def play_periods(sides: Sequence[Contender], periods: int, rounds: int, name: str) -> None:
    """Let all contenders play `periods` periods of `rounds` rounds, in turns."""
    engine = build_engine(max(math.prod(launched(side.scheduler)) for side in sides))
    total = periods * rounds * len(sides)
    with RewardPool(RewardConfig(), {"env"}) as pool, progress_bar(name, total, WORLD) as bar:
        for period in range(periods):
            playing = [(side, POLICIES[side.scheduler.policy](side.scheduler), Cursor(period)) for side in sides]
            for turn in range(rounds):
                for side, policy, cursor in in_turn(playing, turn):
                    bar.set_postfix_str(side.name)
                    play(side, engine, pool, policy, cursor, rounds - turn)
                    bar.update()


def launched(config: SchedulerConfig) -> tuple[int, int]:
    """Return the prompts, and the responses to each, of a round that is not long."""
    if config.policy == "synchronous":
        return config.num_prompts, config.num_responses
    return round(config.num_prompts * config.eta_prompts), round(config.num_responses * config.eta_responses)


def waiting(latency: str, episodes: int, turns: int, draws: int = 10) -> float:
    """Return how much longer a barrier waits than no barrier, where nothing but latencies takes time."""
    drawn, ratios = Latency(latency), []
    for seed in range(draws):
        table = [[drawn.seconds(seed, i, turn) for turn in range(turns)] for i in range(episodes)]
        ratios.append(sum(map(max, zip(*table))) / max(map(sum, table)))
    return statistics.mean(ratios)


def measure_asynchrony(size: Size) -> list[dict[str, Any]]:
    """Return a row for each sigma."""
    scheduler = SchedulerConfig(policy="synchronous", num_prompts=size.prompts, num_responses=size.responses)
    rows = []
    for sigma in SIGMAS:
        latency = scaled(MEAN, sigma)
        with ExitStack() as stack:
            sides = [
                Contender(name, scheduler, stack.enter_context(environments(latency, barrier=name == "barrier")))
                for name in ("barrier", "async")
            ]
            play_periods(sides, 1, size.rounds, f"sigma {sigma}")
        barrier, free = sides
        rows.append(
            {
                "sigma": sigma,
                "barrier": round(barrier.mean(), 3),
                "async": round(free.mean(), 3),
                "faster": round(barrier.mean() / free.mean(), 2),
                "waiting": round(waiting(latency, size.prompts * size.responses, TURNS), 2),
                "waiting_long": round(waiting(latency, 512, 30), 2),
                "paper": PAPER.get(sigma),
            }
        )
    return rows


def measure_redundancy(size: Size) -> list[dict[str, Any]]:
    """Return a row for each number of redundant environments."""
    plain = SchedulerConfig(policy="synchronous", num_prompts=size.prompts, num_responses=size.responses)
    redundant = replace(plain, policy="tail_batching", eta_prompts=ETA, eta_responses=ETA)
    with ExitStack() as stack:
        sides = []
        for scheduler in (plain, redundant, replace(redundant, eta_responses=1.5)):
            episodes = stack.enter_context(environments(scaled(MEAN, 5), **FAILURES))
            name = " x ".join(map(str, launched(scheduler)))
            sides.append(Contender(name, scheduler, episodes))
        play_periods(sides, *size.failing, "redundancy")
    base = sides[0].mean()
    return [
        {
            "contender": side.name,
            "round": round(side.mean(), 3),
            "faster": round(base / side.mean(), 2),
            "short_round": round(side.mean("short"), 3) if "short" in side.kinds else None,
            "short_faster": round(base / side.mean("short"), 2) if "short" in side.kinds else None,
            "failed": side.failed,
        }
        for side in sides
    ]


# ---- the same samples -----------------------------------------------------------------------------------------------


def trains_the_same(steps: int) -> bool:
    """Whether runs with the barrier and without train the same samples, where the clock is that of engine steps."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shape = WarmStartConfig(steps=0, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, max_positions=256)
        make_model(shape, "guess", folder / "model", WORLD)
        eos = {"eos_token_id": list(range(64))}  # one token in four ends a turn of a random model
        (folder / "model" / "generation_config.json").write_text(json.dumps(eos))
        settings = {
            **{"run.device": "cpu", "run.steps": steps, "run.eval_every": 0, "run.dump_rollouts": "true"},
            **{"model.path": folder / "model", "data.train": "guess", "data.eval_prompts": 0},
            **{"env.clock": "steps", "env.latency": scaled(MEAN, 10)},
            **{"rollout.max_prompt_tokens": 16, "rollout.max_response_tokens": 64},
            **{"scheduler.policy": "synchronous", "scheduler.num_prompts": 4, "scheduler.num_responses": 4},
        }
        trained = []
        for barrier in ("false", "true"):
            own = settings | {"run.dir": folder / barrier, "env.barrier": barrier}
            command = [sys.executable, str(ROOT / "train.py"), *(f"--{key}={value}" for key, value in own.items())]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            files = sorted((folder / barrier / "rollouts").glob("*.jsonl"))
            groups = [json.loads(line) for path in files for line in path.read_text(encoding="utf-8").splitlines()]
            trained.append([(g["prompt"]["index"], s["token_ids"], s["spans"]) for g in groups for s in g["samples"]])
        assert len(trained[0]) == steps * 4 * 4
        return trained[0] == trained[1]


# ---- pages that are kept --------------------------------------------------------------------------------------------


def play_turns(engine: Engine, episodes: int, keeps: bool) -> float:
    """Play episodes of eight turns; return the seconds of a sampled token."""
    limit, sampled = engine.config.max_response_tokens, 0
    sequences = {
        SampleId(0, i, 0): EngineSequence(i, 0, 0, (60 + i,), sample_key(0, 0, i, 0), limit, has_turns=True)
        for i in range(episodes)
    }
    engine.stats.take()
    start = time.perf_counter()
    for sequence in sequences.values():
        engine.add(sequence)
    while not engine.is_idle:
        for turn in engine.step():
            if not keeps:
                engine.batcher.forget([turn.id])
            goes_on = turn.finish_reason == "stop" and len(turns_of(turn.spans)) < 8
            if goes_on and len(turn.token_ids) + len(REPLY) < limit:
                engine.add(continued(sequences[turn.id], turn, REPLY))
            else:
                engine.abort([turn.id])
                sampled += turn.num_sampled
    seconds = time.perf_counter() - start
    assert keeps == (engine.stats.resumed_tokens > 0) and keeps != (engine.stats.recomputed_tokens > 0)
    return seconds / sampled


def measure_pages(size: Size) -> list[dict[str, Any]]:
    """Return a row for each length of a turn."""
    rows = []
    for tokens, episodes in size.parked.items():
        limit, vocab = 24 * tokens, 400  # the sum of eight geometric lengths is hardly longer
        more = {"vocab_size": vocab, "max_position_embeddings": limit + 16}
        model = random_model(Shape(256, 1024, 4, 8), **more)
        config = RolloutConfig(max_prompt_tokens=16, max_response_tokens=limit, max_running=episodes, kv_gib=1.0)
        engine = Engine(model, config, SamplingConfig(), range(vocab // tokens))
        took: dict[bool, list[float]] = {True: [], False: []}
        with progress_bar(f"turns of {tokens}", 2 * size.repeats, WORLD) as bar:
            for turn in range(size.repeats):
                for keeps in in_turn([*took], turn):
                    took[keeps].append(play_turns(engine, episodes, keeps))
                    bar.update()
        kept, dropped = (1000 * sum(took[keeps]) / size.repeats for keeps in (True, False))
        ratio = round(dropped / kept, 2)
        rows.append({"tokens": tokens, "kept_ms": round(kept, 3), "recomputed_ms": round(dropped, 3), "faster": ratio})
    return rows


# ---- results --------------------------------------------------------------------------------------------------------


def lines_of(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Return a table of rows that have the same fields."""
    cells = [[*rows[0]], *([str("-" if value is None else value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        yield "   ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))


def run(size: Size) -> dict[str, Any]:
    """Measure all; print tables, and return the metrics."""
    equal = trains_the_same(steps=2)
    asynchrony, redundancy, pages = measure_asynchrony(size), measure_redundancy(size), measure_pages(size)
    samples = f"{size.prompts} x {size.responses} samples"
    failures = f"slow {FAILURES['slow']}, stop {FAILURES['stop']:g}, time-out 600"
    for title, rows in (
        (f"{samples} of {TURNS} turns, latency normal({MEAN}, sigma) / 100; seconds of a rollout", asynchrony),
        (f"{samples}, latency normal({MEAN}, 5) / 100, {failures}; seconds of a round", redundancy),
        ("eight turns, pages kept or all computed again; milliseconds of a sampled token", pages),
    ):
        print(f"\n{title}", *lines_of(rows), sep="\n")
    return {
        "name": "slow_environments",
        **{f"speedup_async_sigma{row['sigma']}": row["faster"] for row in asynchrony},
        "speedup_redundant": redundancy[1]["faster"],
        "samples_trained_equal": equal,
        **{f"keep_over_recompute_{row['tokens']}": row["faster"] for row in pages},
        **{"prompts": size.prompts, "responses": size.responses, "turns": TURNS, "rounds": size.rounds},
        **{"slow": FAILURES["slow"], "stop": FAILURES["stop"], "failing": size.failing},
        **{"asynchrony": asynchrony, "redundancy": redundancy, "pages": pages},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds: under 2 minutes on 2 cores")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps(run(QUICK if arguments.quick else FULL)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
