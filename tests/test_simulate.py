"""The simulator: closed-form cases, a step-by-step twin, the engine's own decisions, conservation, cost by counting."""

import json
import math
import pickle
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ALONE, thorough

from config import ConfigError, dump_toml, load_config
from core import Group, Prompt, Reward, Sample, SampleId, Span, VisitId
from data import dump_groups
from engine.memory import RolloutConfig, num_pages_for, weight_bytes
from engine.pages import LAYOUTS
from job import Job
from metrics import Clock
from model import parse_shape
from policies.flow import OverlapConfig
from policies.planner import PlannerConfig, Report
from policies.replica import Replica, Response
from policies.scale_down import StreamConfig
from policies.step_times import Profile, SizeProfile
from reward import RewardConfig
from rewards.timeouts import AdaptiveTimeouts
from scheduler import POLICIES, RoundPolicy, SchedulerConfig, TailBatching
from settings import Config
from simulate import (
    BYTES,
    CONFIGS,
    ClusterConfig,
    EndlessSimulation,
    GradingConfig,
    ModelFile,
    Simulation,
    SimulationConfig,
    load_hardware,
    load_model_file,
    main,
    reward_times,
    run_program,
    simulate,
)
from simulation.costs import Costs, Efficiency, Hardware, Measured, Shape
from simulation.workload import Drawn, LengthModel, Recorded

SHAPE = Shape(parameters=1e9, layers=10, hidden=1024, kv_heads=2, head_dim=64)
COSTS = Costs(Hardware(), SHAPE, Efficiency(), 1)
MODEL = ModelFile(shape=SHAPE, lengths=LengthModel(limit=512, median=40, runaway=0.03, prompt_tokens=20))
PAGES = 10_000


def config(steps: int = 8, gpus: int = 4, prompts: int = 8, **sections) -> SimulationConfig:
    given = SimulationConfig(
        cluster=ClusterConfig(gpus=gpus, steps=steps, seed=3),
        scheduler=SchedulerConfig(num_prompts=prompts, eta_responses=1.25),
        stream=StreamConfig("estimate"),
    )
    return replace(given, **{name: replace(getattr(given, name), **changes) for name, changes in sections.items()})


# ---- costs and one replica ---------------------------------------------------------------------------------------


def test_many_decode_steps_cost_what_they_cost_one_by_one() -> None:
    one_by_one = sum(COSTS.decode(7, 1000 + 7 * i) for i in range(50))
    assert COSTS.decode(7, 1000, 50) == pytest.approx(one_by_one, rel=1e-12)


def test_the_roofline_of_one_step_by_hand() -> None:
    plain = Efficiency(bandwidth=1, layer_seconds=0, sequence_seconds=0)
    costs = Costs(Hardware(bandwidth=1e12, link_latency=0.0, link=1e30), SHAPE, plain, 2, pages=10)
    assert costs.decode(1, 0) == pytest.approx(1e9 * 2 / 2 / 1e12)
    kv = 2 * 10 * 2 * 64 * 2  # bytes of a token
    assert costs.decode(1, 1000) - costs.decode(1, 0) == pytest.approx(1000 * kv / 2 / 1e12)
    assert costs.capacity == 640


def test_a_lone_response_takes_its_prefill_and_its_steps() -> None:
    """The prefill draws the first token."""
    replica = Replica(COSTS, PAGES)
    replica.add(Response(SampleId(0, 0, 0), prompt_tokens=30, length=100))
    [(event, at)] = replica.run_until(math.inf)
    assert (event.iteration, event.num_tokens) == (100, 100)
    assert at == replica.clock == pytest.approx(COSTS.prefill(30) + COSTS.decode(1, 30, 99))


def test_a_measured_profile_stands_in_for_the_roofline() -> None:
    grid = [(n, c) for n in (1, 4, 16, 64) for c in (64, 256, 1024)]
    points = tuple((n, c, COSTS.decode(n, n * c)) for n, c in grid)
    prefill = tuple((c, COSTS.prefill(c) / c) for c in (64, 1024))
    measured = Measured(Hardware(), SHAPE, Efficiency(), 1, SizeProfile(10, points, prefill), 64)
    assert measured.capacity == 640
    for n, c, steps in ((1, 500, 7), (9, 300, 40), (64, 64, 1), (120, 10, 3)):  # between the points and beyond
        assert measured.decode(n, n * c, steps) == pytest.approx(COSTS.decode(n, n * c, steps), rel=1e-3)
    assert measured.prefill(300) == pytest.approx(COSTS.prefill(300), rel=1e-3)
    jump = tuple((n, c, t + (n > 4)) for n, c, t in points)  # a step that more than 4 rows make slower
    uneven = Measured(Hardware(), SHAPE, Efficiency(), 1, SizeProfile(10, jump, prefill), 64)
    assert uneven.decode(4, 400) < 0.1 < uneven.decode(10, 1000) < 1 < uneven.decode(64, 6400)


def test_windows_and_responses_cost_what_is_said() -> None:
    def rollouts(**costs: float) -> list[tuple[float, dict]]:
        model = replace(MODEL, efficiency=Efficiency(**costs))
        return [
            (r["seconds"]["rollout"], r["round"])
            for r in simulate(config(gpus=1, stream={"policy": "off"}), model).records
        ]

    for (plain, told), (slower, _), (started, _) in zip(
        rollouts(), rollouts(window_seconds=3.0), rollouts(response_seconds=3.0), strict=True
    ):
        windows = told["windows"] if told["kind"] == "short" else 0  # one replica exchanges nothing in a long round
        assert slower - plain == pytest.approx(windows * 3.0, abs=1e-6)
        assert started - plain == pytest.approx(told["responses"] * 3.0)


def test_a_group_pays_for_its_prompt_once() -> None:
    replica = Replica(COSTS, PAGES)
    for r in range(4):
        replica.add(Response(SampleId(0, 0, r), 30, 10))
    replica.run_until(1)
    assert replica.clock == pytest.approx(COSTS.prefill(30))


def test_a_response_that_can_never_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"= 1: a response of 532 tokens does not fit; no size of this cluster"):
        Simulation(config(gpus=1), MODEL, Hardware(memory=2.35e9))


# ---- whole runs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_every_prompt_is_trained_once_and_time_goes_forward(seed: int) -> None:
    rng = Random(seed)
    c = config(
        steps=rng.randint(1, 12),
        gpus=rng.choice([1, 2, 4, 8]),
        prompts=rng.choice([4, 8, 9]),
        scheduler={
            "eta_prompts": rng.choice([1.0, 1.25, 2.0]),
            "migrate": rng.random() < 0.5,
            "window_iterations": rng.choice([1, 16, 100]),
            "dynamic_sampling": rng.random() < 0.3,
            "max_draws": 16.0,
        },
        grading={"overlap": rng.random() < 0.5},
        stream={"policy": rng.choice(["off", "fixed", "paper", "estimate"])},
    )
    if c.scheduler.dynamic_sampling:  # may still drop a group that is complete: refused together
        c = replace(c, stream=replace(c.stream, policy="off"))
    run = simulate(c, replace(MODEL, lengths=replace(MODEL.lengths, limit=rng.choice([30, 2000]))))
    names = Counter(key for ids in run.trained for key in {id.visit for id in ids})
    assert set(names.values()) == {1} and len(names) == c.cluster.steps * c.scheduler.num_prompts
    assert not run.policy.queue
    assert all(len(ids) == c.scheduler.num_prompts * c.scheduler.num_responses for ids in run.trained)
    if not c.scheduler.dynamic_sampling:
        drawn = {VisitId(run.cursor.epoch, i) for i in run.cursor._order}
        assert run.cursor.position == len(names) and names.keys() <= drawn
    fastest = Costs(load_hardware("h800"), SHAPE, Efficiency(), 1).decode(1, 0)
    for record in run.records:
        assert all(seconds >= 0 for seconds in record["seconds"].values())
        assert record["seconds"]["rollout"] >= record["round"]["longest"] * fastest
        assert 0 < record["engine"]["busy"] <= 1 + 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("limit", [32, 128, 512])
def test_sizes_change_within_rounds_of_dynamic_sampling(limit: int) -> None:
    """The last responses may end in the window after which the planner looks, and their rewards come one later."""
    for seed in range(5):
        c = config(
            gpus=2,
            cluster={"seed": seed},
            scheduler={"policy": "synchronous", "dynamic_sampling": True, "max_draws": 16.0},
            stream={"policy": "off"},
            planner={"rule": "predict", "within_round": True},
        )
        run = simulate(c, replace(MODEL, lengths=replace(MODEL.lengths, limit=limit)))
        assert len(run.records) == c.cluster.steps


def test_the_papers_rule_reads_a_profile_that_is_there() -> None:
    points = tuple((n, c, COSTS.decode(n, n * c)) for n in (1, 64) for c in (64, 1024))
    sizes = {n: SizeProfile(PAGES, points, ((64, 1e-3), (1024, 1e-3))) for n in (1, 2)}
    c = config(planner={"rule": "paper"}, stream={"policy": "off"})
    for profile, known in ((Profile({}, sizes), {1, 2}), (None, set())):
        planner = Simulation(c, MODEL, Hardware(), profile=profile).planner
        assert planner and {*planner.times} == known


def test_no_response_ends_before_its_tokens_nor_is_graded_before_its_end() -> None:
    run = simulate(config(stream={"policy": "paper"}), MODEL)
    fastest = run.costs.decode(1, 0)
    for rollout in [run.newest]:
        assert all(at >= rollout.lengths[id] * fastest for id, at in rollout.ended.items())
        assert all(run.graded[id] > rollout.ended[id] for id in run.graded)
        assert {*rollout.ended}.isdisjoint(rollout.aborted)


@pytest.mark.parametrize("slow", [{0}, {1}, {0, 1}])
def test_replicas_may_differ_in_speed(slow: set[int]) -> None:
    class Uneven(Simulation):
        def costs_at(self, replica: int, size: int) -> Costs:
            twice = replace(self.hardware, bandwidth=self.hardware.bandwidth / 2)
            given = twice, SHAPE, self.model.efficiency, size, self.costs.pages
            return Costs(*given) if replica in slow else super().costs_at(replica, size)

    c = config(steps=1, gpus=2, scheduler={"policy": "synchronous"})
    even, uneven = (kind(c, MODEL, Hardware()) for kind in (Simulation, Uneven))
    before, after = even.run()[0], uneven.run()[0]
    assert after["tokens"] == before["tokens"]
    busy = [[r.busy for r in run.newest.replicas] for run in (even, uneven)]
    assert {i for i, (a, b) in enumerate(zip(*busy, strict=True)) if b > a} == slow


def test_eta_one_is_the_synchronous_baseline() -> None:
    one = {"eta_prompts": 1.0, "eta_responses": 1.0}
    assert (
        simulate(config(scheduler=one), MODEL).records
        == simulate(config(scheduler={"policy": "synchronous"}), MODEL).records
    )


def test_two_runs_of_one_seed_are_equal_and_of_two_seeds_are_not() -> None:
    first, again = simulate(config(), MODEL), simulate(config(), MODEL)
    assert first.records == again.records
    assert first.records != simulate(config(cluster={"seed": 4}), MODEL).records


def test_work_is_kept_when_half_of_the_replicas_leave() -> None:
    long = config(scheduler={"policy": "synchronous"}, cluster={"gpus": 8})
    slow = replace(MODEL, lengths=replace(MODEL.lengths, median=400.0, limit=16_384))
    off = simulate(replace(long, stream=StreamConfig("off")), slow)
    on = simulate(replace(long, stream=StreamConfig("fixed", fixed_share=0.5)), slow)
    assert on.trained == off.trained
    assert [r["tokens"] for r in on.records] == [r["tokens"] for r in off.records]
    assert all(r["stream"]["prompts"] > 0 and r["round"]["migrated"] > 0 for r in on.records)
    assert all(0.5 <= r["stream"]["at"] < 0.6 for r in on.records)  # within a window or two
    decoded = [sum(r["engine"]["decoded_tokens"] for r in run.records) for run in (on, off)]
    assert decoded[0] == decoded[1]


def test_a_size_that_changes_within_long_rounds_trains_the_same_sooner() -> None:
    """In the tail a step takes as long as reading the weights does, which a larger group reads faster."""
    tail = replace(MODEL, lengths=replace(MODEL.lengths, median=60.0, limit=8192, runaway=0.02))
    tail = replace(
        tail, shape=replace(SHAPE, kv_heads=8), efficiency=Efficiency(layer_seconds=1e-6, rollout_seconds=0.0)
    )
    base = config(steps=3, gpus=8, prompts=64, scheduler={"policy": "synchronous"}, stream={"policy": "off"})
    off, on = (
        simulate(replace(base, planner=PlannerConfig("predict", within_round=within)), tail) for within in (False, True)
    )
    assert on.trained == off.trained and [r["tokens"] for r in on.records] == [r["tokens"] for r in off.records]
    decoded = [[r["engine"]["decoded_tokens"] for r in run.records] for run in (on, off)]
    assert decoded[0] == decoded[1]
    changed = [r for r in on.records if r["round"]["resized"]]
    assert changed and all(
        change["size"] > r["engine"]["tensor_parallel"] for r in changed for change in r["round"]["resized"][:1]
    )
    assert sum(r["seconds"]["rollout"] for r in on.records) < 0.9 * sum(r["seconds"]["rollout"] for r in off.records)
    assert all(0 < r["engine"]["busy"] <= 1 + 1e-9 for r in on.records)


def test_replicas_leave_only_rounds_that_wait_for_all_and_windows_go_on_for_those_who_left() -> None:
    run = simulate(config(gpus=2, stream={"policy": "fixed"}), MODEL)
    for record in run.records:
        assert ("at" in record["stream"]) == (record["round"]["kind"] == "long")
    assert {record["round"]["kind"] for record in run.records} == {"short", "long"}
    long = simulate(config(gpus=2, steps=1, scheduler={"policy": "synchronous"}, stream={"policy": "fixed"}), MODEL)
    assert long.newest.freed and long.newest.iteration == long.newest.replicas[0].iteration


@pytest.mark.slow
def test_cost_grows_with_responses_not_with_tokens_and_about_linearly_with_gpus() -> None:
    base = simulate(config(steps=6, gpus=4, prompts=16), MODEL).events
    assert simulate(config(steps=12, gpus=4, prompts=16), MODEL).events < 2.4 * base
    assert simulate(config(steps=6, gpus=16, prompts=64), MODEL).events < 4.8 * base
    longer = replace(MODEL, lengths=replace(MODEL.lengths, median=640.0, limit=8192))
    wide = config(steps=6, gpus=4, prompts=16, scheduler={"window_iterations": 256})
    assert simulate(wide, longer).events < 1.5 * base


def test_all_files_of_hardware_and_models_load() -> None:
    names = {path.stem for path in CONFIGS.glob("*.toml")}
    hardware = {"h800", "h100", "h200", "h20", "a100"}
    assert hardware < names
    for name in names - hardware:
        assert load_model_file(name).lengths.limit >= 8192
    assert load_hardware("h200").bandwidth > load_hardware("a100").bandwidth


# ---- graders -----------------------------------------------------------------------------------------------------


def test_programs_get_the_limits_of_real_runs() -> None:

    real = RewardConfig()
    assert GradingConfig().timeouts() == AdaptiveTimeouts(
        real.case_factor, real.case_min_seconds, real.case_max_seconds, real.case_audit, real.case_quantile
    )
    ends, hangs = GradingConfig(audit=0.0, hanging=0.0, code_seconds=9.0), GradingConfig(audit=0.0, hanging=1.0)
    prompts = [Prompt(i, (), "", "", "code") for i in range(2)]

    def run(i: int, config: GradingConfig, timeouts: AdaptiveTimeouts, solves: bool = True) -> tuple[float, bool]:
        seconds, *learned = run_program(prompts[i], SampleId(0, i, 0), solves, config, timeouts, 0)
        timeouts.observe(*learned)
        return seconds, bool(learned[2])

    timeouts = ends.timeouts()
    assert run(0, hangs, timeouts) == (30.0, False)  # nothing is known
    seconds, passed = run(1, ends, timeouts, solves=False)
    assert not passed and not timeouts.anchors and 2.0 < seconds < 20.0
    assert run(1, ends, timeouts) == (seconds, True)
    for prompt in (0, 1):  # one by what it took itself, one by what is known of others
        assert run(prompt, hangs, timeouts) == (1.5 * seconds, False)
    assert run(0, replace(ends, code_seconds=1000.0), timeouts) == (1.5 * seconds, False)
    fixed = replace(hangs, adaptive=False)
    assert [run(1, c, fixed.timeouts()) for c in (ends, hangs)] == [(seconds, True), (30.0, False)]


def test_a_program_teaches_nothing_before_it_has_ended() -> None:
    grading = GradingConfig(code_spread=0.0, code_seconds=4.0, hanging=0.5, audit=0.0, sandboxes=9)
    prompts = {(0, i): Prompt(i, (1,), "", "", "code") for i in range(9)}
    ended = {SampleId(0, i, 0): float(i) for i in range(9)}
    rollout = SimpleNamespace(seconds=9.0, ended=ended, prompts=prompts, run=SimpleNamespace(reward=lambda id: 1.0))
    timeouts = grading.timeouts()
    done = reward_times(rollout, list(ended), grading, timeouts, 0)
    taken = [done[id] - at for id, at in ended.items()]
    first = taken.index(4.0)
    assert set(taken) == {4.0, 6.0, 30.0}, "correct, cut off by what was known, cut off before"
    assert all((seconds == 6.0) == (i >= first + 4) for i, seconds in enumerate(taken) if seconds != 4.0)
    assert len(timeouts.anchors) == taken.count(4.0)


def test_what_a_round_does_not_need_is_dropped_when_it_ends() -> None:
    grading = GradingConfig(rule_seconds=4.0, sandboxes=1)
    prompts = {(0, i): Prompt(i, (1,), "", "", "rule") for i in range(4)}
    ended = {SampleId(0, i, 0): float(i) for i in range(4)}
    rollout = SimpleNamespace(seconds=5.0, ended=ended, prompts=prompts)
    done = reward_times(rollout, [SampleId(0, 0, 0), SampleId(0, 3, 0)], grading, grading.timeouts(), 0)
    assert done == {(0, 0, 0): 4.0, (0, 1, 0): 8.0, (0, 3, 0): 12.0}  # the second had begun, the third had not


def test_what_freed_ranks_train_by_hand() -> None:
    """Two freed replicas of two GPUs each, of eight; half of a token's training can be hidden."""
    sim = Simulation(config(gpus=8), MODEL, Hardware())
    sim.model = replace(MODEL, efficiency=replace(MODEL.efficiency, streamable=0.5))
    sim.costs = SimpleNamespace(tp=2, train=lambda lengths, gpus: sum(lengths) / gpus)
    sim.stream = SimpleNamespace(switch=1.0)
    rollout = SimpleNamespace(freed=[None, None], freed_at=3.0, seconds=20.0)
    ids = [SampleId(0, *divmod(i, 2)) for i in range(5)]
    lengths = dict(zip(ids, [8, 8, 16, 16, 99], strict=True))
    graded = dict(zip(ids, [5.0, 6.0, 10.0, 18.0, 25.0], strict=True))
    streamed, late = sim._stream(rollout, lengths, graded)
    assert streamed == {(0, 0), (0, 1)}  # the first from 6 to 8, the second from 18 to 22, two seconds after the end
    assert late == 2.0 * 4 / 8 + 0.5 * 48 / 8
    rollout.seconds, graded = 5.0, dict.fromkeys(ids[:2], 3.0)
    streamed, late = sim._stream(
        rollout, {id: lengths[id] for id in graded}, graded
    )  # ready at once: from 4, after the switch, to 6
    assert streamed == {(0, 0)} and late == 1.0 * 4 / 8 + 0.5 * 16 / 8


def test_the_planner_is_told_of_every_sequence_and_preemption() -> None:
    sim = Simulation(config(planner={"rule": "predict"}), MODEL, Hardware())
    asked, choose = [], sim.planner.choose
    told, observe = [], sim.planner.observe
    sim.planner.choose = lambda kind, launch: asked.append(launch) or choose(kind, launch)
    sim.planner.observe = lambda kind, report: told.append(report.preemptions) or observe(kind, report)
    for costs in sim.costs_of.values():
        costs.pages = 1000 // 64
    sim.step(0)
    assert told == [sim.newest.preemptions] and told[0] > 0
    assert [(a.num_sequences, a.num_responses, a.prompt_tokens) for a in asked] == [(100, 10, 20)]


def test_grading_after_the_rollout_is_what_overlap_hides() -> None:
    every = {"policy": "synchronous"}  # nothing is graded in vain
    after = simulate(config(scheduler=every, grading={"overlap": False}), MODEL).records
    beside = simulate(config(scheduler=every), MODEL).records
    for a, b in zip(after, beside, strict=True):
        assert a["round"]["longest"] == b["round"]["longest"]
        assert a["seconds"]["reward"] >= b["seconds"]["reward"]
    assert sum(a["seconds"]["reward"] for a in after) > sum(b["seconds"]["reward"] for b in beside)


# ---- the same decisions as the engine ----------------------------------------------------------------------------


class Listening:
    """A policy that writes down what it is told and what it answers."""

    def __init__(self, policy: RoundPolicy):
        self.policy, self.plan_made = policy, None
        self.log: list[tuple] = []

    def __getattr__(self, name: str):
        return getattr(self.policy, name)

    def begin(self, take, steps_left):
        self.plan_made = self.policy.begin(take, steps_left)
        return self.plan_made

    def observe(self, finished, rewards=None):
        decision = self.policy.observe(finished, rewards)
        if finished or decision.abort or decision.done:
            self.log.append((sorted(finished, key=lambda e: (e.iteration, e.id)), decision))
        return decision


class FromLog:
    """Lengths that the engine's log tells; what was aborted would have gone on."""

    def __init__(self, prompts: list[Prompt], known: list[dict]):
        self.given, self.known, self.limit = prompts, known, 10_000

    def prompts(self, count: int) -> list[Prompt]:
        return self.given

    def lengths(self, id, count: int, step: int) -> list[int]:
        return [self.known[step].get((*id, r), 10_000) for r in range(count)]


STEPS = 6
UNLIMITED = replace(MODEL, lengths=replace(MODEL.lengths, limit=10_000))


def told_by(folder, out, rows: int, size: int, kv_gib: float, *more: str) -> Config:
    return load_config(
        Config,
        None,
        [
            f"--model.path={folder}",
            f"--run.dir={out}",
            f"--run.steps={STEPS}",
            "--data.train=hailstone",
            "--scheduler.num_prompts=8",
            "--scheduler.num_responses=3",
            "--scheduler.eta_responses=1.25",
            "--scheduler.window_iterations=4",
            "--scheduler.migrate=true",
            "--rollout.max_prompt_tokens=32",
            "--sampling.temperature=1.5",
            "--rollout.max_response_tokens=100",
            f"--rollout.max_running={rows}",
            "--rollout.page_size=8",
            f"--rollout.kv_gib={kv_gib}",
            f"--rollout.tensor_parallel={size}",
            "--reward.num_workers=1",
            "--run.device=cpu",
            *more,
        ],
    )


def record_run(world, folder, out, rows: int, size: int, kv_gib: float) -> None:
    """Play real steps; rank 0 writes down what the policies were told and what they answered."""
    config = told_by(folder, out, rows, size, kv_gib, "--planner.rule=paper")
    job, rounds = Job(config, world, resume=False), []
    with job.graders:
        for step in range(STEPS):
            plan = job.policy.begin(job.cursor.take, STEPS - step)
            judge = Listening(job.policy)
            job.regroup(plan)
            _, played = job.play(plan, judge, Clock())
            preemptions = job.engine.stats.take().preemptions
            decided = job.choice.size, played.migrated, preemptions
            rounds.append((plan, judge.log, job.policy.accepted_ids(), decided))
            job.planner.observe(plan.kind, Report(preemptions, 1.0, tuple(job.policy.race.tokens.values())))
            job.policy.close(played.aborted)
    if world.is_main:
        (Path(out) / "rounds").write_bytes(pickle.dumps((rounds, job.cursor.prompts, job.engine.num_pages)))


# With 6 rows responses wait for others to end, with few pages they are preempted. On two ranks the planner halves its
# size after four quiet short rounds.
@pytest.mark.parametrize(("ranks", "rows", "kv_gib"), [thorough(1, 6, 0.25), thorough(1, 64, 3e-4), (2, 64, 0.25)])
def test_engine_and_simulator_come_to_the_same_decisions(tiny_folder, tmp_path, run_ranks, ranks, rows, kv_gib) -> None:
    given = tiny_folder, tmp_path, rows, ranks, kv_gib
    if ranks == 1:
        record_run(ALONE, *given)
    else:
        run_ranks(ranks, record_run, *given)
    rounds, prompts, num_pages = pickle.loads((tmp_path / "rounds").read_bytes())
    assert {plan.kind for plan, *_ in rounds} == {"short", "long"}
    assert any(decision.abort and not decision.done for _, log, *_ in rounds for _, decision in log)
    if ranks == 2:
        assert [size for *_, (size, *_) in rounds] == [2, 2, 2, 2, 2, 1]
    assert any(preemptions for *_, (*_, preemptions) in rounds) == (kv_gib < 0.25)

    told = told_by(*given, "--planner.rule=paper")
    known = [{event.id: event.num_tokens for events, _ in log for event in events} for _, log, *_ in rounds]
    cluster = ClusterConfig(gpus=ranks, tensor_parallel=ranks, max_running=rows, steps=STEPS, seed=told.run.seed)
    cluster = replace(cluster, page_size=told.rollout.page_size, shared_prompts=False)
    config = SimulationConfig(cluster, told.scheduler, stream=StreamConfig("off"), planner=told.planner)
    simulated = Simulation(config, UNLIMITED, load_hardware("h800"), FromLog(prompts, known))
    for size, costs in simulated.costs_of.items():
        costs.pages = num_pages[size]
    listening = simulated.policy = Listening(simulated.policy)
    for step, (plan, log, accepted, decided) in enumerate(rounds):
        listening.log = []
        simulated.step(step)
        assert (listening.plan_made, listening.log) == (plan, log)
        assert simulated.trained[step] == accepted
        engine, migrated = simulated.records[step]["engine"], simulated.records[step]["round"]["migrated"]
        assert (engine["tensor_parallel"], migrated, engine["preemptions"]) == decided


@pytest.mark.parametrize(
    ("flight", "rows", "kv_gib"), [("recompute", 64, 0.25), thorough("recompute", 6, 0.25), ("finish", 64, 3e-4)]
)
@pytest.mark.slow
def test_an_endless_rollout_comes_to_the_same_decisions(tiny_folder, tmp_path, flight, rows, kv_gib) -> None:
    """In turns, where seconds decide nothing: the same ends, batches and ages, with surplus and sequences under way."""
    ahead = "--overlap.depth=1", "--overlap.bound=3", "--overlap.clock=time", f"--overlap.flight={flight}"
    told = told_by(tiny_folder, tmp_path, rows, 1, kv_gib, "--rollout.step_tokens=100000", *ahead)
    job, steps = Job(told, ALONE, resume=False), []
    listening = job.endless.round.referee = Listening(job.endless.flow)
    with job.graders:
        for _ in range(STEPS):
            rollout = job.next_batch()
            job.learn(rollout)
            job.sync_weights()
            steps.append((listening.log, [s.id for g in rollout.groups for s in g.samples], rollout.record["round"]))
            listening.log = []
    known = {event.id: event.num_tokens for log, *_ in steps for events, _ in log for event in events}
    cluster = ClusterConfig(gpus=1, max_running=rows, steps=STEPS, seed=told.run.seed)
    cluster = replace(cluster, page_size=told.rollout.page_size, shared_prompts=False)
    config = SimulationConfig(cluster, told.scheduler, overlap=told.overlap)
    source = FromLog(job.cursor.prompts, [known] * STEPS)
    simulated = EndlessSimulation(config, UNLIMITED, load_hardware("h800"), source)
    simulated.costs.pages = job.engine.num_pages[1]
    listening = simulated.flow = Listening(simulated.flow)  # type: ignore[assignment]
    for step, (log, trained, real) in enumerate(steps):
        listening.log = []
        simulated.step(step)
        assert listening.log == log
        assert simulated.trained[step] == trained
        mine = simulated.records[step]["overlap"]
        assert {str(age): n for age, n in mine["ages"].items()} == real["ages"]
        for key in ("late", "dropped", "running", "buffered"):
            assert mine[key] == real[key]
    assert sum(len(decision.abort) for log, *_ in steps for _, decision in log) > 0
    assert any(r["running"] for *_, r in steps) == (flight == "recompute")


@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_engine_and_simulator_have_the_same_pages(kv_heads: int) -> None:
    """Whole weights leave every size the same room on a GPU; sharded ones leave more."""
    sizes = dict(vocab_size=100, hidden_size=512, intermediate_size=64, num_hidden_layers=10, num_attention_heads=8)
    real_shape = parse_shape(sizes | dict(model_type="qwen3", num_key_value_heads=kv_heads, head_dim=64), "")
    weights = weight_bytes(real_shape, torch.bfloat16)
    shape = replace(SHAPE, kv_heads=kv_heads, parameters=weights / BYTES)
    rollout = RolloutConfig(max_prompt_tokens=20, max_response_tokens=512, kv_gib=(80e9 * 0.85 - weights) / 2**30)
    for max_running in (4, 10**6):
        cluster = {"gpus": 8, "max_running": max_running}
        sim = Simulation(config(cluster=cluster), replace(MODEL, shape=shape), Hardware())
        real = replace(rollout, max_running=max_running)
        for n in (1, 2, 4, 8):
            whole, sharded = (
                num_pages_for(replace(real, weights=layout), real_shape, torch.bfloat16, torch.device("cpu"), n)
                for layout in LAYOUTS
            )
            assert [sim.num_pages(n, layout) for layout in LAYOUTS] == [whole, sharded]
            assert sharded > whole if n > 1 and max_running > 4 else sharded == whole


# ---- recorded runs, and the command line -------------------------------------------------------------------------


def test_the_command_replays_the_lengths_and_the_scheduler_of_a_run(tmp_path, capsys, monkeypatch) -> None:
    rng, trained, train, seen = Random(0), {}, Costs.train, list[int]()
    monkeypatch.setattr(Costs, "train", lambda self, n, gpus: (seen.append(sum(n)), train(self, n, gpus))[1])
    for step in range(3):
        groups = []
        for i in range(4):
            prompt = Prompt(4 * step + i, (1,) * (1 + i), "", "", "match")
            ids = [tuple(range(rng.randint(1, 60))) for _ in range(2)]
            given = [(i + r) % 2 for r in range(2)]  # tokens of a reply, which nobody decodes
            spans = [(Span(0, len(ids[r]), 0),) if not given[r] else (Span(1, len(ids[r]), 0),) for r in range(2)]
            samples = tuple(Sample(prompt.index, r, 0, ids[r], (), "stop", spans[r]) for r in range(2))
            trained[0, prompt.index] = [len(n) - cut for n, cut in zip(ids, given, strict=True)]
            groups.append(Group(prompt, 0, samples, (Reward(1.0), Reward(0.0))))
        dump_groups(tmp_path / "rollouts", step + 1, groups, np.zeros((4, 2)).tolist())
    told = replace(Config(), scheduler=SchedulerConfig("synchronous", num_prompts=4, num_responses=2))
    (tmp_path / "config.toml").write_text(dump_toml(told))
    recorded = Recorded(tmp_path)
    assert {"--stream.policy=off", "--overlap.depth=0.0", "--overlap.late=wait"} <= {*recorded.settings}
    assert recorded.lengths(VisitId(0, 5), 2, 0) == trained[0, 5]
    again = recorded.lengths(VisitId(1, 5), 3, 0)  # in another epoch, with one response more
    assert sorted(again[:2]) == sorted(trained[0, 5])
    assert main([f"--replay={tmp_path}", "--cluster.steps=3", "--cluster.gpus=1"]) == 0
    *records, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert sum(r["tokens"] for r in records) == (tokens := sum(map(sum, trained.values())))
    assert sum(seen) == 2 * (tokens + 3 * 2 * (1 + 2 + 3 + 4)), "all samples with their prompts, asked for twice"
    assert last["mean_step_seconds"] == pytest.approx(np.mean([r["seconds"]["step"] for r in records]))
    assert last["weights"] == "whole" and last["pages"]["whole"] == last["pages"]["sharded"] > 0  # at size 1
    assert recorded.limit == told.rollout.max_response_tokens
    (tmp_path / "other.toml").write_text("[scheduler]\nnum_prompts = 2\n")
    assert (
        main([f"--replay={tmp_path}", f"--config={tmp_path}/other.toml", "--cluster.steps=1", "--cluster.gpus=1"]) == 0
    )
    assert json.loads(capsys.readouterr().out.splitlines()[0])["samples"] == 4, "a file of one's own wins"


def test_a_replay_takes_another_policy_than_that_of_a_file_that_is_not_loaded(tmp_path, capsys) -> None:
    prompt = Prompt(0, (1,), "", "", "match")
    samples = tuple(Sample(0, r, 0, (1, 2), (), "stop", (Span(0, 2, 0),)) for r in range(2))
    dump_groups(tmp_path / "rollouts", 1, [Group(prompt, 0, samples, (Reward(1.0), Reward(0.0)))], [[0.0, 0.0]])
    told = replace(Config(), scheduler=SchedulerConfig("synchronous", num_prompts=1, num_responses=2))
    (tmp_path / "config.toml").write_text(dump_toml(told).replace('policy = "synchronous"', 'policy = "mine"'))
    args = [f"--replay={tmp_path}", "--cluster.steps=1", "--cluster.gpus=1"]
    assert main(args) == 2 and "scheduler.policy" in capsys.readouterr().err
    assert main([*args, "--scheduler.policy=synchronous"]) == 0


@pytest.mark.parametrize("rule", ["plan", "begin", "observe", "close"])
def test_rounds_of_ones_own_have_no_place_in_an_endless_rollout(monkeypatch, rule: str) -> None:
    own = type("Own", (TailBatching,), {rule: lambda *args: getattr(TailBatching, rule)(*args)})
    monkeypatch.setitem(POLICIES, "own", own)
    config = SimulationConfig(scheduler=SchedulerConfig("own"), overlap=OverlapConfig(depth=1))
    with pytest.raises(ConfigError, match=f"scheduler.policy = own .* ask its {rule}; take"):
        simulate(config)


def test_the_command_says_what_is_wrong(tmp_path, capsys) -> None:
    assert main(["--cluster.gpus=15", "--cluster.tensor_parallel=2"]) == 2
    assert "does not divide" in capsys.readouterr().err
    assert main([f"--replay={tmp_path}"]) == 2
    assert "dump_rollouts" in capsys.readouterr().err
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "step_000001.jsonl").write_text("")
    assert main([f"--replay={tmp_path}"]) == 2
    assert "not a run folder of train.py" in capsys.readouterr().err
    assert main(["--planner.within_round=true", "--stream.policy=off"]) == 2
    assert "planner.within_round = true needs planner.rule = predict, not fixed" in capsys.readouterr().err
    assert main(["--stream.policy=paper", "--scheduler.dynamic_sampling=true"]) == 2
    assert "has no effect with scheduler.dynamic_sampling" in capsys.readouterr().err
    big = ["--cluster.gpus=8", "--cluster.model=qwen2.5-32b", "--scheduler.num_prompts=4"]
    for layout, sizes in (("whole", "[4, 8]"), ("sharded", "[2, 4, 8]")):
        for rule in ("fixed", "paper", "predict"):
            assert main([*big, f"--planner.rule={rule}", f"--cluster.weights={layout}"]) == 2
            said = capsys.readouterr().err
            assert "cluster.tensor_parallel = 1: a response of" in said and f"it fits into the sizes {sizes}" in said
    for gpus, size in ((48, 3), (16, 16)):
        assert main([f"--cluster.gpus={gpus}", f"--cluster.tensor_parallel={size}"]) == 2
        assert "the sizes of groups inside a node of 8 GPUs" in capsys.readouterr().err
    assert main(["--overlap.depth=1", "--overlap.bound=4", "--grading.sandboxes=1"]) == 2
    assert "[grading] has no effect with overlap.depth" in capsys.readouterr().err
    one = {"pages": 9, "decode": [[1, 64, 0.1]], "prefill": [[64, 0.1]]}
    profile = {"made_on": {"page_size": 16}, "sizes": {"1": one}}
    (tmp_path / "profile.json").write_text(json.dumps(profile))
    assert main([f"--profile={tmp_path}/profile.json"]) == 2
    assert "the profile counts pages of 16 tokens, cluster.page_size = 64; take 16" in capsys.readouterr().err
    assert main([*big, "--cluster.tensor_parallel=2"]) == 2
    assert "sharded weights would fit: cluster.weights = sharded" in capsys.readouterr().err


def test_a_profile_of_an_engine_of_one_row_is_played() -> None:
    one = SizeProfile(10, ((1, 64, 0.01), (1, 128, 0.011)), ((64, 0.001),))
    costs = Measured(Hardware(), Shape(), Efficiency(), 1, one, 64)
    assert costs.decode(1, 64) == pytest.approx(0.01, rel=0.2)
    assert costs.beside(1, np.array([0, 1]))[1] > 0


def test_at_the_most_all_responses_of_a_prompt_run_to_the_limit_or_none() -> None:
    drawn = Drawn(LengthModel(median=10, runaway=0.3, runaway_gather=1.0, limit=9000))
    counts = Counter(sum(n == 9000 for n in drawn.lengths(VisitId(0, i), 8, 0)) for i in range(500))
    assert {*counts} == {0, 8} and 100 < counts[8] < 200


def test_drawn_lengths_are_what_the_model_says() -> None:
    model = LengthModel(median=300, prompt_spread=0.5, response_spread=0.5, runaway=0.1, runaway_gather=0.2, limit=9000)
    drawn = [Drawn(model).lengths(VisitId(0, i), 8, 0) for i in range(4000)]
    ordered = sorted(n for group in drawn for n in group)
    assert sum(n == 9000 for n in ordered) / len(ordered) == pytest.approx(0.1, abs=0.01)
    body = [math.log(n) for n in ordered if n < 9000]
    assert math.exp(np.median(body)) == pytest.approx(300, rel=0.05)
    assert np.std(body) == pytest.approx(math.sqrt(0.5), rel=0.05)
    run = [[n == 9000 for n in group] for group in drawn]
    together = np.mean([group[0] and group[1] for group in run])
    assert (together - 0.01) / 0.09 == pytest.approx(0.2, abs=0.06)  # their correlation
    assert Drawn(model).lengths(VisitId(0, 1), 8, 0) != Drawn(model).lengths(VisitId(0, 1), 8, 1)
