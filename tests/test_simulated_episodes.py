"""Episodes in the simulator: work and time of their turns, the engine's rules for their pages, replies, whole runs."""

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from test_simulate import MODEL, PAGES, config

from config import ConfigError
from core import Finished, SampleId
from policies.step_times import FittedTimes, StepTimes
from simulate import EndlessSimulation, SimulationConfig, simulate
from simulation.episodes import EpisodeReplica, Episodes, EpisodesConfig, skip_idle

IDS = [SampleId(0, p, r) for p in range(4) for r in range(4)]
TIMES = FittedTimes(0, [(1, 0, 1.1), (2, 0, 1.2), (2, 100, 1.7)], [(1, 0.02), (100, 0.03)])


class Wide(StepTimes):
    """A step takes a second, whatever it decodes or computes."""

    def costs(self, sequences: float) -> tuple[float, float]:
        return 1.0, 0.0

    def prefill(self, tokens: int) -> float:
        return 0.0


def play(
    times: StepTimes, env: EpisodesConfig, until: Callable[[], float] = lambda: math.inf, num_pages: int = PAGES
) -> tuple[EpisodeReplica, list[tuple[Finished, float]]]:
    """Play 16 episodes on one replica, by windows that end `until` steps later."""
    replica = EpisodeReplica(Episodes(env, 1, 4000), times, num_pages, 8)
    for i, id in enumerate(IDS):
        replica.add(replica.episodes.episode(id, 20, 30 + 7 * i, 0))
    ended: list[tuple[Finished, float]] = []
    while replica.running or replica.waiting or replica.awaited:
        skip_idle([replica])
        ended += replica.run_until(replica.iteration + until())
    return replica, ended


@pytest.fixture
def seconds(tmp_path: Path) -> str:
    """Latencies of whole seconds, which are whole steps of `Wide`."""
    (tmp_path / "seconds").write_text("\n".join(json.dumps(n) for n in (0, 1, 2, 3, 5, 8, 40)))
    return f"recorded {tmp_path / 'seconds'}"


@pytest.mark.parametrize("barrier", [False, True])
def test_an_episode_takes_its_turns_and_its_replies(barrier: bool, seconds: str) -> None:
    env = EpisodesConfig(5, latency=seconds, barrier=barrier, reply_tokens=9)
    replica, ended = play(Wide(), env)
    episodes = {id: Episodes(env, 1, 4000).episode(id, 20, 30 + 7 * i, 0) for i, id in enumerate(IDS)}
    turns: list[list[float]] = []  # of each episode: the seconds of its turns and replies
    for i, episode in enumerate(episodes.values()):
        assert len(episode.turns) == 5 and sum(map(len, episode.turns)) == 30 + 7 * i
        assert episode.length == 30 + 7 * i + 4 * 9
        times = []
        for turn in episode.turns:
            times.append(len(turn) + replica.episodes.seconds(episode)[0])
            episode.turn += 1
        turns.append(times)
    # Of a turn whose context is computed while nobody decodes, the first token takes no time in `Wide`.
    wanted = sum(map(max, zip(*turns, strict=True))) if barrier else max(map(sum, turns))
    assert wanted - 5 <= max(at for _, at in ended) <= wanted
    assert replica.decoded == sum(sum(map(len, e.turns)) for e in episodes.values()), "each turn is decoded once"
    assert {event.id: event.num_tokens for event, _ in ended} == {id: e.length for id, e in episodes.items()}
    assert replica.resumed > 0 and not replica.recomputed and replica.pages_used == replica.base == 0


@pytest.mark.parametrize("seed", range(5))
def test_without_a_barrier_no_rollout_is_slower(seed: int) -> None:
    latency = Random(seed).choice(("normal(10,10)", "lognormal(3,9)"))
    env = EpisodesConfig(6, 0.5, latency=latency, slow="0.1x5", stop=0.2, step_seconds=60.0, reply_tokens=3 + seed)
    (free, _), (barrier, _) = (play(Wide(), replace(env, barrier=b, turn_spread=0.1 * seed)) for b in (False, True))
    assert free.clock < barrier.clock and free.decoded == barrier.decoded and free.failed == barrier.failed > 0


@pytest.mark.parametrize("num_pages", [50, 120, PAGES])
def test_ends_of_windows_change_nothing(num_pages: int) -> None:
    env, rng = EpisodesConfig(4, latency="normal(1,2)"), Random(num_pages)
    whole, ended = play(TIMES, env, num_pages=num_pages)
    parts, again = play(TIMES, env, lambda: rng.choice((1, 7, 60)), num_pages)
    assert parts.clock == pytest.approx(whole.clock) and parts.busy == pytest.approx(whole.busy)
    assert dict((e.id, pytest.approx(at)) for e, at in ended) == {e.id: at for e, at in again}
    assert (parts.recomputed, parts.resumed) == (whole.recomputed, whole.resumed)
    assert (whole.recomputed > 0) == (num_pages < PAGES), "pages that are needed are not kept"


def test_replies_wait_for_a_step_to_end() -> None:
    env = EpisodesConfig(2, latency="lognormal(5,3)")
    replica, _ = play(TIMES, env)
    replica.add(replica.episodes.episode(IDS[0], 20, 1000, 0))
    replica.awaited = [(replica.clock + 100.0, IDS[1], replica.episodes.episode(IDS[1], 20, 8, 0), True)]
    before = replica.clock
    while replica.awaited:
        at = replica.awaited[0][0]
        last, step = replica.clock, replica.step_seconds
        replica.run_until(replica.next_event())
    assert at <= replica.clock < at + 2 * max(step, 1.2) and last < at and replica.clock > before


@pytest.mark.parametrize("keeps", [False, True])
def test_new_weights_compute_earlier_turns_again(keeps: bool) -> None:
    replica = EpisodeReplica(Episodes(EpisodesConfig(3, latency="normal(50,1)"), 1, 4000), TIMES, PAGES, 8)
    replica.add(replica.episodes.episode(IDS[0], 20, 90, 0))
    replica.run_until(math.inf)
    assert replica.parked and replica.pages_used > 0
    update = replica.change_weights if keeps else replica.evict
    update()
    assert not replica.parked and replica.pages_used == 0
    skip_idle([replica])
    replica.run_until(replica.iteration + 5)
    assert replica.resumed == 0 < replica.recomputed
    update()
    replica.run_until(math.inf)
    assert bool(replica.parked) != keeps, "KV of older weights is not kept for the next turn"


# ---- whole runs --------------------------------------------------------------------------------------------------


def with_env(c: SimulationConfig, *turns: float, **env: object) -> SimulationConfig:
    return replace(c, stream=replace(c.stream, policy="off"), env=EpisodesConfig(*turns, **env))


@pytest.mark.parametrize("overlap", [{}, {"depth": 1.0, "bound": 2}, {"depth": 1.0, "bound": 2, "train_ranks": 2}])
def test_one_turn_without_latency_is_the_response_of_always(overlap: dict) -> None:
    for seed, eta in ((0, 1.0), (1, 1.5)):
        c = config(gpus=4, overlap=overlap, scheduler={"eta_responses": eta}, cluster={"seed": seed})
        plain, one = simulate(with_env(c), MODEL), simulate(with_env(c, 1), MODEL)
        told = [record.pop("episodes", {"failed": 0}) for record in one.records]
        assert one.trained == plain.trained and one.records == plain.records
        assert all(each["failed"] == 0 and not each.get("resumed_tokens") for each in told)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_every_prompt_is_trained_once_with_all_its_turns(seed: int) -> None:
    rng = Random(seed)
    c = config(
        steps=rng.randint(2, 6),
        gpus=rng.choice([2, 4]),
        scheduler={"eta_prompts": rng.choice([1.0, 1.5]), "eta_responses": rng.choice([1.0, 1.5])},
        overlap=rng.choice([{}, {"depth": 1.0, "bound": 2}, {"depth": 2.0, "late": "drop", "train_ranks": 1}]),
    )
    barrier = not c.overlap.depth and rng.random() < 0.5
    c = with_env(c, 3, 0.5, latency="normal(5,5)", slow="0.1x10", stop=0.05, step_seconds=90.0, barrier=barrier)
    run = simulate(c, MODEL)
    names = Counter(key for ids in run.trained for key in {id.visit for id in ids})
    assert set(names.values()) == {1} and len(names) == c.cluster.steps * c.scheduler.num_prompts
    assert all(len(ids) == c.scheduler.num_prompts * c.scheduler.num_responses for ids in run.trained)
    assert all(seconds >= 0 for record in run.records for seconds in record["seconds"].values())


def test_replies_are_nothing_that_a_rank_decodes() -> None:
    """beta* of a run is by tokens that are drawn, as `records.work_of` counts them."""
    overlap = {"depth": 1.0, "bound": 2, "train_ranks": 2}
    run = simulate(with_env(config(gpus=4, steps=5, overlap=overlap), 4, 0.5, reply_tokens=100), MODEL)
    assert isinstance(run, EndlessSimulation)
    drawn = sum(max(run.rollout.sampled[id] for id in batch) for batch in run.trained) / len(run.trained)
    step = max(r.busy for r in run.rollout.replicas) / max(r.iteration for r in run.rollout.replicas)
    assert run.split_times().longest == pytest.approx(drawn * step)
    assert all(run.rollout.sampled[id] <= n for id, n in run.rollout.lengths.items())
    assert sum(run.rollout.sampled.values()) < sum(run.rollout.lengths.values())


@pytest.mark.slow
@pytest.mark.parametrize("clock", ["steps", "time"])
def test_an_update_comes_while_all_episodes_wait_for_replies(clock: str) -> None:
    overlap = {"depth": 1.0, "bound": 2, "train_ranks": 2, "clock": clock}
    c = with_env(config(gpus=4, steps=5, overlap=overlap), 3, 0.5, latency="normal(5,5)", stop=0.05, step_seconds=90.0)
    run = simulate(c, MODEL)
    assert len(run.records) == 5 and all(record["seconds"]["train"] >= 0 for record in run.records)
    assert set(Counter(id for ids in run.trained for id in ids).values()) == {1}


def test_a_race_does_not_wait_for_an_environment_that_never_answers() -> None:
    c = config(gpus=1, steps=2, scheduler={"policy": "synchronous"})
    tail = replace(c, scheduler=replace(c.scheduler, policy="tail_batching", eta_prompts=1.5, eta_responses=1.25))
    env = {"latency": "normal(10,1)", "stop": 0.05, "step_seconds": 5000.0}
    waits, races = (simulate(with_env(each, 3, **env), MODEL) for each in (c, tail))
    assert waits.records[0]["episodes"]["failed"] > 0 and waits.records[0]["episodes"]["resumed_tokens"] > 0
    assert waits.records[0]["seconds"]["rollout"] > 5000 > 500 > races.records[0]["seconds"]["rollout"]
    assert all(isinstance(r, EpisodeReplica) and not r.awaited and not r.parked for r in races.newest.replicas)


def test_what_is_not_played_with_episodes_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"env.turns = 2: the simulator plays no episodes with stream.policy = paper"):
        simulate(replace(config(stream={"policy": "paper"}), env=EpisodesConfig(2)), MODEL)
    with pytest.raises(ConfigError, match=r"\[env\] has no effect with env.turns = 0"):
        simulate(with_env(config(), latency="normal(1,1)"), MODEL)
