"""The stream policy: milestones, whole groups, memory, at most one scale-down, and whether it pays."""

from random import Random

import pytest

from core import VisitId
from policies.placement import Placement
from policies.scale_down import Progress, StreamConfig, StreamPolicy
from policies.step_times import FittedTimes, StepTimes


class Flat(StepTimes):
    """A machine on which a step takes 1 second, whatever it decodes, plus `each` seconds a sequence."""

    def __init__(self, capacity: int = 10**9, each: float = 0.0):
        self.capacity, self.each = capacity, each

    def costs(self, sequences: float) -> tuple[float, float]:
        return 1.0 + self.each * sequences, 0.0


def policy(name: str = "paper", times: Flat | None = None, history=range(1, 101), **changes) -> StreamPolicy:
    made = StreamPolicy(StreamConfig(name), times or Flat(), limit=100, **changes)
    made.close(list(history))
    made.begin("long")
    return made


def progress(share: float, replicas: int = 4, tokens: int = 10, train: float = 1000.0) -> Progress:
    """Return where a round stands whose other responses of `tokens` make 55.5 in the mean; `train`: seconds of all."""
    completed = round(share * 100)
    live = 100 - completed
    return Progress(100, (tokens,) * completed, (tokens,) * live, 5, replicas, train / (completed * 15 + live * 60.5))


def test_nothing_happens_before_the_first_and_after_the_last_milestone() -> None:
    made = policy()
    assert made.observe(progress(0.19)) is None
    assert made.observe(progress(0.20)).replicas == 2
    late = policy()
    assert late.observe(progress(0.51)) is None
    assert late.observe(progress(0.50)) is None  # a round does not go back; the policy has given up


def test_at_most_one_scale_down_in_a_round_and_again_in_the_next() -> None:
    made = policy()
    assert made.observe(progress(0.3)) and made.observe(progress(0.4)) is None
    made.close([1, 2, 3])
    assert made.observe(progress(0.3)) is None  # between two rounds
    assert made.begin("long") and made.observe(progress(0.3))


def test_nobody_leaves_a_race() -> None:
    made = policy()
    assert not made.begin("short") and made.observe(progress(0.3)) is None
    assert not policy("off").begin("long")


def test_it_tries_once_at_each_milestone() -> None:
    made = policy(times=Flat(capacity=1))
    assert made.observe(progress(0.22)) is None  # does not fit
    made.times = Flat()
    assert made.observe(progress(0.24)) is None  # between two milestones
    assert made.observe(progress(0.25)).at == 0.25


def test_milestones_that_one_window_jumps_over_are_one_try() -> None:
    made = policy(times=Flat(capacity=1))
    assert made.observe(progress(0.34)) is None  # over those of 20, 25 and 30 %
    made.times = Flat()
    assert made.observe(progress(0.34)) is None
    assert made.observe(progress(0.36)).at == 0.36


@pytest.mark.parametrize(
    ("replicas", "shard", "kept"), [(1, 1, None), (4, 1, 2), (5, 1, 2), (4, 4, None), (6, 2, None)]
)
def test_no_shard_group_is_split(replicas: int, shard: int, kept: int | None) -> None:
    decision = policy(shard_replicas=shard).observe(progress(0.3, replicas))
    assert (decision.replicas if decision else None) == kept


def test_the_projected_peak_has_to_fit() -> None:
    peak = 70 * (sum(range(11, 101)) / 90 + 5)  # 70 responses of 10 tokens, each as long as longer ones were
    assert policy(times=Flat(capacity=int(peak / 2) + 1)).observe(progress(0.3)).peak_tokens == pytest.approx(peak)
    assert policy(times=Flat(capacity=int(peak / 2) - 1)).observe(progress(0.3)) is None


def test_an_unknown_length_is_taken_to_be_the_limit() -> None:
    assert policy(history=[]).expected(10) == 100
    assert policy(history=[5, 6]).expected(10) == 100
    assert policy(history=[5, 20, 40]).expected(10) == 30


def test_the_estimate_weighs_slower_decoding_against_training() -> None:
    free, dear = Flat(), Flat(each=1.0)
    assert policy("estimate", free).observe(progress(0.3)).seconds_saved > 0
    assert policy("estimate", dear).observe(progress(0.3)) is None
    assert policy("estimate", free).observe(progress(0.3, train=0.0)) is None  # nothing to gain
    assert policy("paper", dear).observe(progress(0.3)).seconds_saved < 0  # the paper does not ask


def test_what_a_free_scale_down_saves_is_what_the_freed_ranks_train() -> None:
    decision = policy("estimate", Flat(), switch=0.0).observe(progress(0.3, train=20.0))
    assert decision.seconds_saved == pytest.approx(20.0)  # the rest takes some 90 steps, half of the ranks have 45 s


def test_freed_ranks_train_nothing_during_the_switch() -> None:
    at_once, later = (policy("paper", Flat(), switch=switch).observe(progress(0.3)) for switch in (0.0, 10.0))
    assert later.rest_seconds == at_once.rest_seconds + 10
    assert later.seconds_saved == pytest.approx(at_once.seconds_saved - 10)  # the rollout's, none of training


def test_fixed_and_off() -> None:
    assert policy("off").observe(progress(0.3)) is None
    fixed = policy("fixed", Flat(capacity=1))
    assert fixed.observe(progress(0.29)) is None and fixed.observe(progress(0.9)).replicas == 2


def test_without_lengths_the_estimate_does_not_guess() -> None:
    assert policy("estimate", Flat(), history=[]).observe(progress(0.3)) is None
    assert policy("paper", Flat(), history=[]).observe(progress(0.3))


def test_times_are_those_of_the_windows_and_what_lies_between() -> None:
    times = FittedTimes(100)
    assert times.decode(4, 100) == 0
    for rows, context in ((1, 50), (4, 100), (8, 900), (16, 300)):
        times.observe(rows, context, 2 + 0.5 * rows + 0.01 * context)
    assert times.decode(6, 200, 3) == pytest.approx(3 * (2 + 3 + 2) + 0.01 * (6 + 12))
    again = FittedTimes(100, list(times.windows))
    assert again.decode(6, 200) == times.decode(6, 200)
    times.observe(6, 200, 70.0)
    assert times.decode(6, 200) > again.decode(6, 200)


def test_a_policy_goes_on_from_its_state() -> None:
    first, second = policy(history=[5, 20, 40]), policy(history=[])
    first.switch = 0.7
    second.load_state_dict(first.state_dict())
    second.begin("long")
    assert second.expected(10) == 30 and second.switch == 0.7
    assert second.observe(progress(0.3)) == first.observe(progress(0.3))


def test_shrinking_a_placement_moves_every_sequence_of_those_that_leave() -> None:
    placement, rng = Placement(6), Random(0)
    placement.launch([VisitId(0, i) for i in range(20)], 3, [rng.random() for _ in range(20)])
    before = {id for live in placement.live for id in live}
    left = [id for live in placement.live[3:] for id in live]
    moves = placement.shrink(3)
    assert [id for id, _, _ in moves] == left and all(source >= 3 > target for _, source, target in moves)
    assert {id for live in placement.live for id in live} == before
    counts = [len(live) for live in placement.live]
    assert len(counts) == 3 and max(counts) - min(counts) <= 3
