"""Simulated rollouts that never end: nothing lost, ages within bounds, costs by hand, ROLL Flash's propositions."""

import json
import math
from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from conftest import thorough

from config import ConfigError, load_config
from core import SampleId
from policies.flow import OverlapConfig
from policies.replica import Replica, Response
from policies.scale_down import StreamConfig
from scheduler import SchedulerConfig
from settings import Config, check_endless
from simulate import ClusterConfig, EndlessSimulation, ModelFile, Simulation, SimulationConfig, main
from simulation.costs import Costs, Efficiency, Hardware, Shape
from simulation.workload import LengthModel

SHAPE = Shape(parameters=1e9, layers=10, hidden=1024, kv_heads=2, head_dim=64)
LENGTHS = LengthModel(limit=512, median=40, runaway=0.03, prompt_tokens=20, code=0, judge=0)
MODEL = ModelFile(SHAPE, Efficiency(rollout_seconds=1.0, train_seconds=0.1), LENGTHS)


def config(steps: int = 8, gpus: int = 4, prompts: int = 4, seed: int = 0, **overlap) -> SimulationConfig:
    cluster = ClusterConfig(gpus=gpus, steps=steps, seed=seed)
    scheduler = SchedulerConfig("synchronous", prompts, 2, 1.0, 1.0)
    return SimulationConfig(cluster, scheduler, overlap=OverlapConfig(**{"depth": 1.0, "clock": "time", **overlap}))


def endless(given: SimulationConfig, model: ModelFile = MODEL, hardware: Hardware | None = None) -> EndlessSimulation:
    run = EndlessSimulation(given, model, hardware or Hardware())
    run.run()
    return run


# ---- whole runs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("train", [0, 1, 2])
@pytest.mark.parametrize("seed", range(6))
def test_every_prompt_is_trained_once_within_its_bound(seed: int, train: int) -> None:
    rng = Random(seed)
    depth = rng.choice([0.5, 1.0, 2.0])
    given = config(
        steps=rng.randint(1, 12),
        seed=seed,
        train_ranks=train,
        depth=depth,
        bound=rng.choice([0, 4]),
        flight=rng.choice(["recompute", "keep", "finish"]),
        sync=rng.choice(["at_once", "with_batch"]) if train and depth >= 1 else "at_once",
        clock=rng.choice(["steps", "time"]),
    )
    run = endless(given)
    assert set(Counter(id for ids in run.trained for id in ids).values()) == {1}
    assert [len(ids) for ids in run.trained] == [8] * given.cluster.steps and not run.flow.open
    told = run.summary()
    assert told["trained_length"] == pytest.approx(1.0) and told["late"] == told["dropped"] == 0
    assert told["lag_mean"] <= told["lag_max"] <= given.overlap.largest_age
    assert (
        0 < told["best_share"] < 1
        and 0 <= told["decoders_idle"] < 1
        and 0 <= told["trainers_idle"] < 1
        and 0 <= told["recomputed"]
    )
    assert sum(r["seconds"]["step"] for r in run.records) == pytest.approx(run.rollout.seconds)


def test_what_is_late_is_dropped_or_kept() -> None:
    slow = replace(MODEL, lengths=replace(LENGTHS, limit=8192))
    told = {
        late: endless(config(steps=20, gpus=8, train_ranks=4, late=late), slow).summary()
        for late in ("wait", "drop", "keep")
    }
    assert told["wait"]["lag_max"] <= 1 and not told["wait"]["late"] and not told["wait"]["dropped"]
    assert told["drop"]["lag_max"] <= 1 and told["drop"]["dropped"] and told["drop"]["trained_length"] < 0.95
    assert told["keep"]["lag_max"] > 1 and told["keep"]["late"] and not told["keep"]["dropped"]
    assert told["drop"]["lost_length"] > 1 and told["keep"]["late_length"] > 1, "what is late is long"
    assert not {"lost_length", "late_length"} & {*told["wait"]}


def test_depth_takes_the_tail_away_and_costs_age() -> None:
    slow = replace(MODEL, lengths=replace(LENGTHS, limit=8192))
    runs = {depth: endless(config(steps=24, depth=depth, bound=4), slow) for depth in (1.0, 4.0)}
    synchronous = replace(config(steps=24), stream=StreamConfig("off"), overlap=OverlapConfig())
    alone = Simulation(synchronous, slow, Hardware())
    seconds = [sum(r["seconds"]["step"] for r in records) for records in (alone.run(), runs[1.0].records)]
    assert seconds[1] < 0.8 * seconds[0]
    assert runs[1.0].summary()["lag_mean"] < 1.1 < runs[4.0].summary()["lag_mean"]


@pytest.mark.parametrize("share", [1e-6, 1.0])
def test_the_slower_side_sets_the_pace(share: float) -> None:
    """Of trainers that never wait the seconds are those of the training, of fast ones those of the rollout."""
    model = replace(MODEL, efficiency=replace(MODEL.efficiency, train=share, train_seconds=0.0))
    run = endless(config(steps=12, train_ranks=2), model)
    inner = [r["seconds"] for r in run.records[2:-2]]
    if share < 1:
        assert all(s["wait"] == 0 and s["train"] / s["step"] > 0.99 for s in inner)
        assert run.summary()["trainers_idle"] < 0.05 < 0.9 < run.summary()["decoders_idle"]
    else:
        assert run.summary()["trainers_idle"] > 0.9


def test_in_turns_all_gpus_decode_and_then_all_train() -> None:
    run = endless(config())
    assert len(run.rollout.replicas) == 4 and {*run.records[0]["seconds"]} == {"step", "rollout", "train", "sync"}
    [ids], e = run.trained[:1], MODEL.efficiency
    lengths = [run.rollout.lengths[id] + 20 for id in ids]
    expected = run.costs.train(lengths, 4) + e.train_seconds + e.rollout_seconds
    assert run.records[0]["seconds"]["train"] == pytest.approx(expected)
    assert run.records[0]["seconds"]["sync"] == pytest.approx(run.costs.weight_sync())


# ---- an update ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [16, 64])
def test_on_the_steps_clock_an_update_takes_as_many_engine_steps_as_is_said(count: int) -> None:
    given, taken = config(12, 8, 8, train_ranks=4, clock="steps", update_iterations=count), []
    run = EndlessSimulation(given, MODEL, Hardware())
    decode_on = run._decode_on

    def counted(step: int, ready: float) -> None:
        before = run.rollout.iteration
        decode_on(step, ready)
        taken.append((run.rollout.iteration - before, run.rollout.placement.num_live))

    run._decode_on = counted  # type: ignore[method-assign]
    run.run()
    assert {steps for steps, live in taken if live} == {count} and all(steps <= count for steps, _ in taken)
    assert sum(live > 0 for _, live in taken) > 3


def test_contexts_are_computed_again_and_the_responses_go_on() -> None:
    ended, clocks = [], []
    for evicts in (False, True):
        costs = Costs(Hardware(), SHAPE, Efficiency(), 1)
        replica = Replica(costs, 1000, max_running=2)
        for r in range(3):
            replica.add(Response(SampleId(0, 0, r), 30, 50 + r))
        found = replica.run_until(20)
        if evicts:
            replica.evict()
            assert replica.pages_used == 0 and [s.done for s in replica.waiting] == [20, 20, 0]
        found += replica.run_until(math.inf)
        ended.append([(event.iteration, event.id) for event, _ in found])
        clocks.append(replica.clock)
    assert ended[0] == ended[1] and replica.recomputed == 2 * (30 + 20)
    # The step that computes them draws their next tokens too.
    assert clocks[1] - clocks[0] == pytest.approx(2 * costs.prefill(50) - costs.decode(2, 2 * 49), rel=1e-6)


def test_an_update_pays_for_what_is_under_way() -> None:
    told = {flight: endless(config(flight=flight)).summary()["recomputed"] for flight in ("recompute", "keep")}
    assert told["recompute"] > 0 == told["keep"]


# ---- propositions of the paper -----------------------------------------------------------------------------------

WORKERS = Shape(parameters=1.0, layers=1, hidden=1, kv_heads=1, head_dim=1)  # costs nothing but a second a step


def workers(rng: Random, alpha: int, train: float = 0.0) -> tuple[SimulationConfig, ModelFile, Hardware]:
    """Return a random run on one replica of K rows, each a worker that draws a token a second.

    `train`: seconds of the training of a sample. An update takes no time.
    """
    scheduler = SchedulerConfig("synchronous", rng.randint(1, 6), 2, 1.0, 1.0, window_iterations=1)
    cluster = ClusterConfig(gpus=1 + (train > 0), steps=rng.randint(10, 30), seed=rng.randint(0, 10**6))
    cluster = replace(cluster, max_running=rng.choice([2, 5, 20, 100]))
    spreads, runaway = (rng.uniform(0, 1), rng.uniform(0, 1)), rng.choice([0.05, 0.3])
    lengths = LengthModel(rng.uniform(3, 30), *spreads, runaway, limit=300, prompt_tokens=1)
    flops, padded = 1e30, 1000  # every sample is padded to one length
    passes = train * flops / (padded * (2 + 2 * padded))
    costs = {"sequence_seconds": 0.0, "train_seconds": 0.0, "rollout_seconds": 0.0, "train": 1.0}
    efficiency = Efficiency(layer_seconds=1.0, padded=padded, passes=passes, **costs)
    overlap = OverlapConfig(depth=float(alpha), train_ranks=int(train > 0), flight="keep", clock="time")
    given = SimulationConfig(cluster, scheduler, stream=StreamConfig("off"), overlap=overlap)
    hardware = Hardware(flops=flops, bandwidth=1e30, network=1e30)
    return given, ModelFile(WORKERS, efficiency, lengths), hardware


def tail(run: Simulation, lengths: list[int]) -> tuple[float, int, int]:
    """Return the seconds of all samples spread over the workers, the longest, and how many batches there were."""
    return sum(lengths) / run.config.cluster.max_running, max(lengths), run.config.cluster.steps


@pytest.mark.parametrize("seed", [*range(20), *map(thorough, range(20, 40))])
def test_proposition_1_time_of_a_sample(seed: int) -> None:
    """T <= mu / K + L / Q: the tail is paid once for each Q = N samples in rounds, for (alpha + 1) N without rounds."""
    rng = Random(seed)
    alpha = rng.randint(1, 4)
    given, model, hardware = workers(rng, alpha)
    run = endless(given, model, hardware)
    spread, longest, batches = tail(run, run.rollout.drawn)
    assert run.rollout.seconds <= spread + math.ceil(batches / (alpha + 1)) * longest + 1e-6
    rounds = Simulation(replace(given, overlap=OverlapConfig()), model, hardware)
    seconds = sum(r["seconds"]["rollout"] for r in rounds.run())
    each = sum(r["tokens"] for r in rounds.records) / given.cluster.max_running
    assert seconds <= each + sum(r["round"]["longest"] for r in rounds.records) + 1e-6


@pytest.mark.parametrize("seed", [*range(20), *map(thorough, range(20, 40))])
def test_proposition_2_training_beside_the_rollout(seed: int) -> None:
    """A step takes max(tau, N mu / K + (L + tau) / (alpha + 1)), tau the training of a batch, or less.

    The paper has L where L + tau stands: its rollout has (alpha + 1) N samples under way while a batch is trained. Here
    the batch in training is one of the alpha + 1, because its successor is drawn by the weights that it makes.
    """
    rng = Random(seed)
    alpha, train = rng.randint(1, 4), rng.choice([0.1, 0.5, 2.0, 10.0])
    given, model, hardware = workers(rng, alpha, train)
    run = endless(given, model, hardware)
    spread, longest, batches = tail(run, run.rollout.drawn)
    tau = run.records[0]["samples"] * train
    assert run.training == pytest.approx(batches * tau)
    step = max(tau, spread / batches + (longest + tau) / (alpha + 1))
    filling = (alpha + 1) * spread / batches + longest + tau  # of the first batches
    assert run.rollout.seconds <= batches * (step + 1) + filling  # an update waits for the end of a window, a second


# ---- the command -------------------------------------------------------------------------------------------------


def test_the_command_plays_an_endless_rollout(capsys) -> None:
    cluster = ["--cluster.gpus=4", "--cluster.steps=4", "--scheduler.num_prompts=4"]
    even = ["--scheduler.eta_prompts=1", "--scheduler.eta_responses=1"]
    overlap = ["--overlap.depth=1", "--overlap.bound=4"]
    assert main([*cluster, *even, *overlap, "--overlap.train_ranks=2"]) == 0
    *records, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert {*records[0]["seconds"]} == {"step", "wait", "train", "sync"} and last["lag_max"] <= 4 and last["events"]
    assert main([*cluster, *overlap, "--overlap.train_ranks=4"]) == 2
    assert "overlap.train_ranks = 4 leaves none of 4 GPUs to decode" in capsys.readouterr().err
    assert main([*cluster, "--overlap.train_ranks=2"]) == 2
    assert "overlap.train_ranks = 2 with overlap.depth = 0 is for real runs" in capsys.readouterr().err


REFUSED = [
    ["stream.policy=paper"],
    ["planner.rule=paper"],
    ["scheduler.dynamic_sampling=true"],
    ["scheduler.audit=0.5"],
    ["overlap.update_iterations=8"],
    ["overlap.update_iterations=8", "overlap.train_ranks=1", "overlap.clock=time"],
    ["overlap.sync=with_batch"],
    ["overlap.depth=2", "overlap.bound=1"],
    ["overlap.depth=0", "overlap.bound=0", "overlap.late=keep"],
]


@pytest.mark.parametrize("settings", REFUSED)
def test_the_simulator_refuses_what_a_run_refuses_in_the_same_words(settings: list[str]) -> None:
    flags = ["--overlap.depth=1", "--overlap.bound=4", *(f"--{setting}" for setting in settings)]
    with pytest.raises(ConfigError) as real:
        check_endless(load_config(Config, None, flags), 2)
    with pytest.raises(ConfigError) as simulated:
        Simulation(load_config(SimulationConfig, None, flags), MODEL, Hardware())
    assert str(simulated.value) == str(real.value)
