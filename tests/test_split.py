"""The division of ranks into those that train and those that decode: the paper's formulas, and how well they choose."""

import math
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from test_endless import LENGTHS, MODEL, config, endless

from config import ConfigError, load_config
from job import open_split
from policies.split import SplitPolicy, SplitTimes, Work
from settings import Config, possible_splits, with_split
from simulation.costs import Efficiency


def some_times(rng: Random) -> SplitTimes:
    work = Work(1, rng.randint(1, 500), 900, rng.uniform(1, 99), 900, rng.uniform(1, 99), rng.uniform(1, 99), 9, 9.0)
    return SplitTimes.of([work], rng.randint(2, 64), rng.choice([1.5, 2.0, 3.0, 9.0, math.inf]))


def test_times_are_means_over_steps_and_count_tokens_when_they_are_decoded() -> None:
    filling = Work(1, 10, 1000, 150, 4000, 8.0, 3.0, 300, 6.0)  # the first step decodes for later ones too
    buffered = Work(1, 10, 1000, 250, 0, 0.0, 5.0, 0, 0.0)  # and the last one may decode nothing
    times = SplitTimes.of([filling, buffered], ranks=4, spread=4.0)
    assert (times.ranks, times.samples) == (4, 10)
    assert times.generate == pytest.approx(100 * 8.0 / 4000) and times.train == pytest.approx(0.4)
    assert times.longest == pytest.approx(200 * 6.0 / 300) and times.tail == times.longest / 4


@pytest.mark.parametrize("seed", range(20))
def test_proposition_2_at_the_best_share(seed: int) -> None:
    """T <= (N / K) (mu_gen + E mu_train) + L / (alpha + 1): training takes this, the rollout no longer."""
    times = some_times(Random(seed))
    bound = times.samples / times.ranks * (times.generate + times.train) + times.tail
    train = times.ranks * times.best_share
    assert times.step_seconds(train) == pytest.approx(bound) == pytest.approx(times.samples * times.train / train)
    assert times.step_seconds(train * 0.9) > bound  # fewer would train for longer
    assert times.samples * times.generate / (times.ranks - train) + times.tail <= bound * (1 + 1e-9)


def test_the_best_number_is_one_of_the_possible() -> None:
    times = SplitTimes(8, 10, generate=1.0, train=1.0, longest=0.0, tail=0.0)
    assert times.best_share == 0.5 and times.best(range(1, 8)) == 4 and times.best([2, 6]) == 2
    assert replace(times, train=7.0).best(range(1, 8)) == 7 and replace(times, tail=9.0).best(range(1, 8)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_times_of_an_even_division_find_one_near_the_best(seed: int) -> None:
    rng = Random(seed)
    costs = Efficiency(layer_seconds=1e-4, sequence_seconds=2e-4, train=rng.choice([0.02, 0.1, 0.4]))
    lengths = replace(LENGTHS, limit=rng.choice([512, 2048]))
    model = replace(MODEL, efficiency=replace(costs, rollout_seconds=0.0, train_seconds=0.0), lengths=lengths)
    late: list[dict[str, Any]] = [dict(bound=4), dict(bound=1), dict(bound=1, late="keep")]
    given = dict(depth=rng.choice([0.5, 1.0]), **rng.choice(late))
    runs = {n: endless(config(12, 8, 32, seed, train_ranks=n, **given), model) for n in range(1, 8)}
    seconds = {n: sum(r["seconds"]["step"] for r in run.records[2:-2]) for n, run in runs.items()}
    assert seconds[runs[4].split_times().best([*runs])] < 1.25 * min(seconds.values())


@pytest.mark.parametrize("is_auto", [False, True])
def test_a_number_is_chosen_after_the_first_steps_and_only_where_it_may(is_auto: bool) -> None:
    policy = SplitPolicy(8, 2.0, range(1, 8), 4, is_auto)
    for _ in range(3):
        policy.observe(Work(1, 10, 1000, 100, 1000, 30.0, 10.0, 100, 1.0))
    assert policy.review(2).startswith("4 of 8 ranks train, better 2: beta* = ") and not policy.moves
    advice = "from now on 2" if is_auto else "better 2"
    assert policy.review(3).startswith(f"4 of 8 ranks train, {advice}: beta* = ")
    assert (policy.moves, policy.chosen) == (is_auto, 2 if is_auto else 4)
    settled = SplitPolicy(8, 2.0, range(1, 8), 2, is_auto)
    settled.observe(policy.work[0])
    assert settled.review(3).startswith("2 of 8 ranks train: beta* = ") and not settled.moves
    later = SplitPolicy(8, 2.0, range(1, 8), 4, is_auto, start=5)
    later.observe(policy.work[0])
    assert later.review(3) and not later.moves and later.review(8) and later.moves == is_auto


def test_auto_takes_half_of_the_ranks_that_can_train_until_a_number_is_chosen() -> None:
    def divided(ranks: int, chosen: int = 0, *more: str) -> int:
        given = ["--overlap.depth=1", "--overlap.train_ranks=auto", *(f"--{setting}" for setting in more)]
        return with_split(load_config(Config, None, given), ranks, chosen).overlap.train_ranks

    assert [divided(ranks) for ranks in (2, 3, 4, 8)] == [1, 2, 2, 4]
    assert divided(8, 3) == 3 and divided(4, 7) == 2  # chosen on more ranks
    assert divided(8, 0, "rollout.tensor_parallel=2", "trainer.shard=2") == 2
    assert divided(8, 3, "rollout.tensor_parallel=2") == 4  # of 2, 4, 6
    with pytest.raises(ConfigError, match="1 ranks have no two pools .* more ranks, or overlap.train_ranks = 0"):
        divided(1)
    given = load_config(Config, None, ["--overlap.depth=1", "--overlap.train_ranks=3"])
    assert with_split(given, 8, 5) is given and possible_splits(given, 4) == [1, 2, 3]


def test_on_another_number_of_ranks_a_run_chooses_anew() -> None:
    def opened(ranks: int, state: dict, train_ranks: int | str = "auto", *more: str) -> tuple[int, int]:
        given = ["--overlap.depth=1", f"--overlap.train_ranks={train_ranks}", *more]
        config, policy = open_split(load_config(Config, None, given), ranks, state)
        assert config.overlap.train_ranks == policy.now == policy.chosen
        return policy.now, policy.decides

    assert opened(8, {}) == (4, 3)
    state = {"step": 6, "split": {"ranks": 8, "train_ranks": 2, "start": 0}}
    assert opened(8, state) == (2, 3), "it was chosen, and is kept"
    assert opened(4, state) == (2, 9) and opened(6, state) == (3, 9), "half of them, and three steps to choose"
    assert opened(8, state, "auto", "--rollout.tensor_parallel=4") == (4, 9), "2 of 8 are possible no more"
    assert opened(8, state, 2) == (2, 3)
    assert opened(4, state, 2) == (2, 9), "advice comes anew too"
    begun = SplitPolicy(4, 2.0, [1, 2, 3], 2, True, start=6)
    assert opened(4, {"step": 8, "split": begun.state_dict()}) == (2, 9), "killed before it has chosen"
