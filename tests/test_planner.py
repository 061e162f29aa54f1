"""The planner's rules on made-up rounds, its simulator on counts that can be checked by hand, and its profile file."""

import json
from pathlib import Path
from random import Random
from statistics import mean

import pytest

from config import ConfigError
from engine.pages import LAYOUTS, Cache
from policies.planner import (
    PATIENCE,
    QUIET_ROUNDS,
    RULES,
    EngineLimits,
    Launch,
    ParallelismPlanner,
    PlannerConfig,
    Report,
    _resample,
    refuse_within_round,
    simulate_replica,
)
from policies.step_times import FittedTimes, Profile, SizeProfile, load_profile

PAGE = 64
LAUNCH = Launch(64, 32.0, 8)


def size_profile(start: float, each: float = 1e-5, read: float = 1e-8, pages: int = 1000) -> SizeProfile:
    grid = [(n, c, start + n * (each + c * read)) for n in (1, 8, 64) for c in (64, 512, 4096)]
    return SizeProfile(pages, tuple(grid), ((64, each + 1e-12), (4096, each + 1e-12)))


def planner(rule: str, sizes=(1, 2, 4), start: int = 1, profile=None, ranks: int = 4, **limits) -> ParallelismPlanner:
    settings = {"page_size": PAGE, "max_running": 256, "max_response_tokens": 1024} | limits
    pages = settings.pop("pages", {n: 1000 + n for n in sizes})
    return ParallelismPlanner(PlannerConfig(rule), EngineLimits(ranks, pages, **settings), start, profile)


def play(p: ParallelismPlanner, preemptions: list[int], kind: str = "short") -> list[int]:
    sizes = []
    for count in preemptions:
        sizes.append(p.choose(kind, LAUNCH).size)
        p.observe(kind, Report(count, 1.0, (100,) * 64))
    return sizes


def test_ranks_that_list_lengths_in_another_order_choose_alike() -> None:
    """Each lists its own aborted responses first. Ranks that chose different sizes waited for each other."""
    profile = Profile({}, {n: size_profile(0.01 * n) for n in (1, 2, 4)})
    lengths = [1000 if i % 7 == 0 else 10 + i for i in range(64)]
    ranks = [planner("predict", profile=profile) for _ in range(2)]
    for step in range(4):
        choices = [rank.choose("short", LAUNCH) for rank in ranks]
        assert choices[0] == choices[1]
        for rank, own_first in zip(ranks, (lengths, lengths[32:] + lengths[:32])):
            rank.observe("short", Report(0, 1.0 + step, tuple(own_first)))
    assert ranks[0].state_dict() == ranks[1].state_dict()


# ---- the paper's rule --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "start, preemptions, sizes",
    [
        (1, [100, 105, 110, 110], [1, 1, 1, 1]),  # a rise of 1.05 or less is none
        (1, [100, 106, 50, 0], [1, 1, 2, 2]),
        (1, [0, 1, 0, 0], [1, 1, 2, 2]),  # from nothing to something is a rise
        (1, [10, 20, 40, 80, 160], [1, 1, 2, 4, 4]),  # not past the largest
        (4, [0] * 10, [4, 4, 4, 4, 2, 2, 2, 2, 1, 1]),  # four quiet rounds each, not past the smallest
        (2, [0, 0, 0, 5, 0, 0, 0, 0], [2, 2, 2, 2, 4, 4, 4, 4]),  # a preemption starts the count again
    ],
)
def test_preemptions_that_rise_double_and_quiet_rounds_halve(start, preemptions, sizes) -> None:
    assert play(planner("paper", start=start), preemptions) == sizes


def test_short_and_long_rounds_are_judged_apart() -> None:
    p = planner("paper", start=2)
    sizes: dict[str, list[int]] = {"short": [], "long": []}
    for step in range(2 * QUIET_ROUNDS + 2):
        kind = ("short", "long")[step % 2]
        sizes[kind] += play(p, [0 if kind == "long" else 100 + 10 * step], kind)
    assert sizes == {"short": [2, 2, 4, 4, 4], "long": [2, 2, 2, 2, 1]}


def test_every_decision_has_its_reason() -> None:
    p = planner("paper", start=1)
    reasons = []
    for count in (3, 9, 9, 0, 0, 0, 0, 0):
        reasons.append(p.choose("short", LAUNCH).reason)
        p.observe("short", Report(count, 1.0, (100,)))
    assert reasons[0] == "start: no profile" and reasons[1] == "kept: 3 preemptions"
    assert reasons[2] == "preemptions rose from 3 to 9: doubled"
    assert reasons[-1] == "no preemption in 4 short rounds: halved"


def test_sizes_that_are_not_allowed_are_stepped_over() -> None:
    assert play(planner("paper", sizes=(1, 4)), [1, 2, 0, 0, 0, 0, 0]) == [1, 1, 4, 4, 4, 4, 1]


def test_the_paper_does_not_double_where_that_gains_no_pages() -> None:
    """Ranks beyond the KV heads hold copies."""
    assert play(planner("paper", pages={1: 100, 2: 200, 4: 200}), [1, 2, 4, 8, 16]) == [1, 1, 2, 2, 2]


def test_fixed_stays() -> None:
    assert play(planner("fixed", start=2), [0, 50, 100, 0, 0, 0, 0, 0]) == [2] * 8


# ---- the simulator -----------------------------------------------------------------------------------------------


def times(**costs: float) -> FittedTimes:
    return FittedTimes.of(size_profile(**{"start": 1.0, "each": 0.0, "read": 0.0, **costs}), PAGE)


def simulate(pages: int, launch: Launch, lengths: list[int], max_running: int = 256, **costs: float):
    """Return the seconds and the preemptions of one replica."""
    limits = EngineLimits(1, {1: pages}, PAGE, max_running, 1024)
    return simulate_replica(times(**costs), pages, limits, launch, [(0, n) for n in lengths])


def test_what_no_window_had_costs_nothing() -> None:
    """A window's context is that at its end, where all its rows may have ended."""
    s = FittedTimes(100)
    s.observe(8, 0, 0.1)
    assert s.decode(8, 0) == pytest.approx(0.1) and s.costs(8)[1] == 0.0


def test_the_fit_finds_the_costs_that_made_the_times() -> None:
    s = times(start=2e-3, each=3e-5, read=4e-9)
    assert s.weights == pytest.approx([2e-3, 3e-5, 4e-9], rel=1e-6)
    assert s.decode(100, 100 * 1000) == pytest.approx(2e-3 + 3e-3 + 4e-4, rel=1e-6)
    assert s.decode(100, 0, 3) == pytest.approx(s.decode(100, 0) + s.decode(100, 100) + s.decode(100, 200), rel=1e-6)


def test_noise_never_makes_more_work_cost_less() -> None:
    rng = Random(0)
    for _ in range(50):
        grid = tuple((n, c, rng.uniform(1e-3, 1.1e-3)) for n in (1, 4, 16) for c in (64, 256))
        profile = SizeProfile(10, grid, tuple((c, rng.uniform(1e-5, 2e-5)) for c in (64, 256)))
        s = FittedTimes.of(profile, PAGE)
        assert min(*s.weights, *s.prefill_weights) >= 0 and s.decode(8, 64) > 0


def test_steps_are_those_of_the_longest_while_all_fit() -> None:
    """The prefill draws the first token, so there is one step fewer than tokens."""
    assert simulate(1000, Launch(8, 10, 8), [5, 100, 300, 17]) == (pytest.approx(299), 0)
    assert simulate(1000, Launch(4, 10, 4), [100, 100, 100, 100], max_running=2) == (pytest.approx(2 * 99), 0)


def test_the_newest_is_preempted_when_pages_run_out() -> None:
    # Two sequences of 10 + 182 tokens need 3 pages each. With 5 the second starts again after the first, from 118 on.
    seconds, preemptions = simulate(5, Launch(2, 10, 1), [182, 182])
    assert preemptions == 1 and seconds == pytest.approx(181 + 181 - 118, abs=1)
    assert simulate(6, Launch(2, 10, 1), [182, 182]) == (pytest.approx(181), 0)


def test_fewer_pages_are_never_faster() -> None:
    rng = Random(1)
    lengths = [rng.randrange(1, 600) for _ in range(60)]
    runs = [simulate(pages, Launch(60, 20, 4), lengths, each=0.01) for pages in (15, 40, 80, 160, 2000)]
    assert [s for s, _ in runs] == sorted((s for s, _ in runs), reverse=True)
    assert runs[-1][1] == 0 and runs[0][1] > 5


def test_a_prompt_is_computed_once_for_all_its_responses() -> None:
    assert simulate(1000, Launch(16, 64.0, 8), [1] * 16, each=1e-3) == (pytest.approx(2 * 64 * 1e-3, rel=1e-3), 0)


def test_lengths_of_another_number_of_sequences_keep_their_quantiles() -> None:
    assert _resample([4, 1, 3, 2], 4) == [1, 2, 3, 4] and _resample(range(1, 11), 2) == [3, 8]
    assert _resample([7], 3) == [7, 7, 7]


# ---- the rule that predicts --------------------------------------------------------------------------------------


def profile_of(seconds: dict[int, float]) -> Profile:
    return Profile({"device": "cpu"}, {n: size_profile(s) for n, s in seconds.items()})


def test_the_fastest_size_is_taken_from_the_start() -> None:
    assert play(planner("predict", profile=profile_of({1: 3e-3, 2: 1e-3, 4: 2e-3})), [0, 0]) == [2, 2]
    paper = planner("paper", profile=profile_of({1: 3e-3, 2: 1e-3, 4: 2e-3}))
    choice = paper.choose("short", LAUNCH)
    assert (choice.size, choice.reason) == (2, "start: the profile's best") and set(choice.predicted) == {1, 2, 4}


def test_a_gain_under_the_margin_changes_nothing() -> None:
    """Sizes 1 and 2 differ by 3 %, and which is faster depends on the lengths."""
    profile = Profile({}, {1: size_profile(1e-3, each=3e-6, read=0), 2: size_profile(1.03e-3, each=0, read=0)})
    limits = EngineLimits(2, {1: 1000, 2: 1000}, PAGE, 64, 1024)
    nervous, calm = (ParallelismPlanner(PlannerConfig("predict", margin=m), limits, 1, profile) for m in (0.0, 0.08))
    sizes: dict[ParallelismPlanner, list[int]] = {}
    for p in (nervous, calm):
        sizes[p] = []
        for step in range(8):
            launch = Launch(4, 10.0, 4) if step % 2 else Launch(64, 10.0, 4)
            sizes[p].append(p.choose("short", launch).size)
            lengths = (200,) * launch.num_sequences
            p.observe("short", Report(0, p._seconds(sizes[p][-1], launch, lengths), lengths))
    assert len(set(sizes[nervous])) == 2 and len(set(sizes[calm])) == 1


def test_a_wrong_profile_is_found_out_but_not_by_one_slow_round() -> None:
    p = planner("predict", sizes=(1, 2), ranks=2, profile=profile_of({1: 1.6e-3, 2: 1e-3}))
    wrong = {1: 1.0, 2: 2.0}  # size 2 is twice as slow as the profile says
    sizes = []
    for step in range(PATIENCE + 15):
        choice = p.choose("short", LAUNCH)
        sizes.append(choice.size)
        simulated = p._seconds(choice.size, LAUNCH, (300,) * 64)
        p.observe("short", Report(0, simulated * wrong[choice.size] * (3 if step == PATIENCE + 10 else 1), (300,) * 64))
    first = sizes.index(1)
    assert set(sizes[:first]) == {2} and first == PATIENCE and set(sizes[first:]) == {1}, sizes


def sizes_when_the_profile_is_wrong_by(factor: dict[int, float], rounds: int) -> list[int]:
    """Return the sizes that are chosen where rounds take `factor` times what a profile of equal sizes says."""
    p = planner("predict", sizes=(1, 2), ranks=2, profile=profile_of({1: 1e-3, 2: 1e-3}))
    sizes = []
    for _ in range(rounds):
        sizes.append(p.choose("short", LAUNCH).size)
        simulated = p._seconds(sizes[-1], LAUNCH, (300,) * 64)
        p.observe("short", Report(0, factor[sizes[-1]] * simulated, (300,) * 64))
    return sizes


def test_a_wrong_profile_is_found_out_on_a_machine_that_is_faster_than_it() -> None:
    sizes = sizes_when_the_profile_is_wrong_by({1: 0.5, 2: 0.05}, PATIENCE + 5)
    assert sizes[:PATIENCE] == [1] * PATIENCE and sizes[-1] == 2, sizes


def test_a_size_that_was_tried_in_vain_is_left_after_one_round() -> None:
    assert sizes_when_the_profile_is_wrong_by({1: 2.0, 2: 6.0}, PATIENCE + 8) == [1] * PATIENCE + [2] + [1] * 7


def test_a_slow_machine_is_no_reason_to_try_what_the_profile_says_is_slower() -> None:
    p = planner("predict", sizes=(1, 2), ranks=2, profile=profile_of({1: 1e-3, 2: 1.2e-3}))
    for step in range(PATIENCE):
        assert p.choose("short", LAUNCH).size == 1, step
        p.observe("short", Report(0, 3 * p._seconds(1, LAUNCH, (300,) * 64), (300,) * 64))


@pytest.mark.parametrize(
    "ones, twos, factor",
    [
        ([1.0] * 9, [4.0], 2.0),  # half of it, in logarithms
        ([1.0] * 9, [4.0] * 2, 2.0),
        ([1.0] * 9, [4.0] * 3, 4.0),
        ([1.0] * 9, [1.0] * 4 + [4.0] * 3, 4.0),  # the newest count
        ([1.0], [4.0] * 2, 4.0),  # its own are of those that were measured everywhere
        ([2.0] * (PATIENCE - 1), [], 2.0),  # slow everywhere, as far as is known
        ([2.0] * PATIENCE, [], 2.0**0.5),  # half of it may be size 1's own
        ([0.5] * PATIENCE, [], 0.5**1.5),
    ],
)
def test_what_a_size_is_corrected_by(ones, twos, factor) -> None:
    p = planner("predict", sizes=(1, 2), profile=Profile({}, {1: size_profile(0.01), 2: size_profile(0.01)}))
    p.choose("long", LAUNCH)
    plain = p.predict("long", LAUNCH)[2]
    p.tracks["long"].slowness = {1: ones, 2: twos}
    assert p.predict("long", LAUNCH)[2] == pytest.approx(factor * plain)


def test_lengths_of_a_race_tell_nothing_of_a_long_round() -> None:
    p = planner("predict", profile=profile_of({1: 1e-3, 2: 1e-3, 4: 1e-3}))
    guess = p.choose("short", LAUNCH).predicted
    p.observe("short", Report(0, p._seconds(1, LAUNCH, (5,) * 64), (5,) * 64))
    assert p.choose("long", LAUNCH).predicted == guess
    assert p.choose("short", LAUNCH).predicted[1] < guess[1]


@pytest.mark.parametrize("rule", RULES)
def test_a_restored_planner_goes_on_as_the_first_would(rule) -> None:
    def fresh() -> ParallelismPlanner:
        return planner(rule, profile=profile_of({1: 1.3e-3, 2: 1.1e-3, 4: 1e-3}))

    rng, one, two = Random(2), fresh(), fresh()
    for step in range(30):
        kind = ("short", "short", "long")[step % 3]
        report = Report(rng.choice((0, 0, 0, 9, 50)), rng.uniform(0.05, 0.5), tuple(rng.sample(range(1, 900), 64)))
        assert one.choose(kind, LAUNCH) == two.choose(kind, LAUNCH)
        one.observe(kind, report)
        two.observe(kind, report)
        state, two = json.dumps(two.state_dict()), fresh()
        two.load_state_dict(json.loads(state))


def test_a_restored_size_that_is_not_allowed_gives_way_to_a_smaller_one() -> None:
    p = planner("paper", start=4)
    play(p, [1])
    other = planner("paper", sizes=(1, 2), start=1)
    other.load_state_dict(p.state_dict())
    assert other.choose("short", LAUNCH).size == 2


# ---- inside a round ----------------------------------------------------------------------------------------------


def tail_planner(prefill: float = 1e-6, **settings) -> ParallelismPlanner:
    """Return a planner of four ranks, where a larger group is faster for few sequences only, with a round begun."""
    grid = [(n, c) for n in (1, 8, 64) for c in (64, 4096)]
    profile = {
        size: SizeProfile(
            1000, tuple((n, c, 4e-3 / size + 1e-3 * n) for n, c in grid), ((64, prefill), (4096, prefill))
        )
        for size in (1, 2, 4)
    }
    config = PlannerConfig("predict", **{"within_round": True} | settings)
    p = ParallelismPlanner(
        config, EngineLimits(4, dict.fromkeys(profile, 1000), PAGE, 256, 1024), 1, Profile({}, profile)
    )
    assert p.choose("long", LAUNCH).size == 1
    return p


FEW = [[500], [], [500], []]  # tokens of two responses on two of four replicas


def test_the_size_grows_within_a_round_once_few_responses_are_left() -> None:
    p = tail_planner()
    assert [p.is_due(n) for n in (33, 32, 0)] == [False, True, False]
    assert p.choose_again("long", [[100] * 8] * 4) is None, "8 rows on each replica are faster than 32 on one"
    assert [p.is_due(n) for n in (17, 16)] == [False, True]
    choice = p.choose_again("long", FEW)
    assert choice.size == 4 and choice.predicted[4] < choice.predicted[2] < choice.predicted[1]
    # A step of one takes 4 + 1 ms, on four ranks one of both 1 + 2; nothing is known: one ends at 640, one at 896.
    assert choice.predicted[1] == pytest.approx(395 * 5e-3, rel=0.01)
    assert choice.predicted[4] == pytest.approx(139 * 3e-3 + 256 * 2e-3, rel=0.01)
    assert "2 responses left predicted to gain" in choice.reason and p.is_due(1)
    assert p.choose_again("long", [[700]]) is None, "the best size stays"
    assert p.choose_again("long", [[]]) is None, "the last have ended, and the round waits for their rewards"
    p.observe("long", Report(0, 1.0, (600,) * 64, resize_seconds=0.1))
    assert not p.is_due(1) and p.choose("long", LAUNCH).size == 1, "the next round starts anew"


@pytest.mark.parametrize("of", [{"kind": "short"}, {"within_round": False}])
def test_no_other_round_changes_its_size(of) -> None:
    p = tail_planner(within_round=of.get("within_round", True))
    p.choose(of.get("kind", "long"), LAUNCH)
    assert not any(p.is_due(n) for n in range(65))


def test_a_change_must_pay_for_contexts_and_weights() -> None:
    assert tail_planner(prefill=2e-3).choose_again("long", FEW) is None  # a second for each context
    assert tail_planner(margin=0.7).choose_again("long", FEW) is None
    p = tail_planner()
    for seconds, size in ((0.1, 4), (5.0, None)):
        p.observe("long", Report(0, 1.0, (640, 896) * 32, resize_seconds=seconds))
        p.choose("long", LAUNCH)
        choice = p.choose_again("long", FEW)
        assert (choice and choice.size) == size
    again = tail_planner()
    again.load_state_dict(p.state_dict())
    again.choose("long", LAUNCH)
    assert again.choose_again("long", FEW) is None


def test_a_round_of_two_sizes_corrects_no_prediction() -> None:
    p = tail_planner()
    p.observe("long", Report(0, 1e6, (600,) * 64, resize_seconds=0.0))
    assert p.tracks["long"].slowness == {} and p.tracks["long"].lengths == [[600] * 64]
    p.observe("long", Report(0, 1e6, (600,) * 64))
    assert p.tracks["long"].slowness[1][0] > 1000


def test_equally_long_responses_may_all_be_the_longest() -> None:
    """If ends went by replica, one would have all long ones, and any other way to deal them looked better."""
    p = tail_planner(margin=0.0)
    p.observe("long", Report(0, 1.0, tuple(range(101, 1001))))
    ends = p._predict_ends(p.tracks["long"], [100] * 60)
    assert sorted(ends) == _resample(range(101, 1001), 60)
    assert max(map(mean, (ends[:30], ends[30:]))) < 1.2 * mean(ends)
    assert p._predict_ends(p.tracks["long"], [1000, 1010]) == [1024, 1024]  # beyond all that is known


@pytest.mark.parametrize(("rule", "stream"), [("paper", "off"), ("predict", "fixed"), ("fixed", "paper")])
def test_what_cannot_change_within_a_round_is_refused(rule: str, stream: str) -> None:
    refuse_within_round(PlannerConfig("predict", within_round=True), "off")
    refuse_within_round(PlannerConfig(rule), stream)
    with pytest.raises(ConfigError) as refusal:
        refuse_within_round(PlannerConfig(rule, within_round=True), stream)
    assert (f"rule = predict, not {rule}" in str(refusal.value)) == (rule != "predict")
    assert (f"stream.policy = off, not {stream}" in str(refusal.value)) == (stream != "off")


# ---- the paper's Figure 12 ---------------------------------------------------------------------------------------


def growing_rounds() -> list[tuple[int, ...]]:
    """Rounds of 1024 responses whose limit grows from 8k to 32k tokens; many more of them come near it."""
    rng, rounds = Random(0), []
    for step in range(10):
        limit = 8192 + step * 24576 // 9
        rounds.append(tuple(min(int(rng.lognormvariate(0, 0.9) * limit / 5) + 1, limit) for _ in range(1024)))
    return rounds


def replay(rule: str, layout: str, start: int = 1) -> tuple[list[int], float]:
    """Play the growing rounds on 8 GPUs that hold an 8B model; return the sizes and the total seconds.

    A GPU has 72 GB for 16 GB of weights and for pages. A step reads its shard of the weights and keys at 3 TB/s a GPU;
    two reductions a layer cost 30 us beyond one GPU.
    """
    sizes, pages, cache = {}, {}, Cache(36, 8, 128, 2, PAGE, 1024, 512 + 32768)
    for n in (1, 2, 4, 8):
        pages[n] = cache.num_pages(72e9, n, 16e9, layout)
        start_seconds = 16e9 / n / 3e12 + 36 * 2 * 30e-6 * (n > 1) * n**0.3
        grid = [
            (b, c, start_seconds + b * (1e-5 + c * 147e3 / n / 3e12)) for b in (1, 64, 512) for c in (256, 4096, 16384)
        ]
        sizes[n] = SizeProfile(pages[n], tuple(grid), ((256, 2e-5 / n), (16384, 2e-5 / n)))
    limits = EngineLimits(8, pages, PAGE, 1024, 32768)
    world = ParallelismPlanner(PlannerConfig("predict"), limits, 1, Profile({}, sizes))  # its times play the GPUs
    p = ParallelismPlanner(PlannerConfig(rule), limits, start, Profile({}, sizes) if rule == "predict" else None)
    chosen, total, launch = [], 0.0, Launch(1024, 512.0, 8)
    for lengths in growing_rounds():
        size = p.choose("short", launch).size
        replicas = 8 // size
        given = world.times[size], pages[size], limits, launch
        runs = [simulate_replica(*given, [(0, n) for n in lengths[i::replicas]]) for i in range(replicas)]
        seconds, preemptions = max(s for s, _ in runs), sum(n for _, n in runs)
        p.observe("short", Report(preemptions, seconds, lengths))
        chosen.append(size)
        total += seconds
    return chosen, total


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "steps"), [("whole", [1, 2, 4, 8]), ("sharded", [1, 2, 4])])
def test_growing_lengths_raise_the_size_step_by_step(layout: str, steps: list[int]) -> None:
    """Figure 12: from 1 to 2 and from 2 to 4 while lengths grow from 8k to 32k, for less time than at 1."""
    sizes, seconds = replay("paper", layout)
    assert sizes == sorted(sizes) and [n for i, n in enumerate(sizes) if n not in sizes[:i]] == steps, sizes
    assert seconds < replay("fixed", layout)[1]


@pytest.mark.thorough
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.slow
def test_the_prediction_is_close_to_the_best_fixed_size_in_hindsight(layout: str) -> None:
    best = min(replay("fixed", layout, n)[1] for n in (1, 2, 4, 8))
    assert replay("predict", layout)[1] < 1.05 * best


# ---- the profile's file ------------------------------------------------------------------------------------------


def test_a_profile_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    profile = profile_of({1: 1e-3, 2: 2e-3})
    profile.save(tmp_path / "p.json")
    assert load_profile(tmp_path / "p.json", {"device": "cpu"}, [1, 2]) == profile


def test_a_profile_of_other_conditions_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    with pytest.raises(ConfigError, match="cannot read .* make it by profiler.py"):
        load_profile(path, {}, [1])
    profile_of({1: 1e-3}).save(path)
    with pytest.raises(ConfigError, match=r"made on \{'device': 'cpu'\}, this run is on \{'device': 'H100'\}"):
        load_profile(path, {"device": "H100"}, [1])
    with pytest.raises(ConfigError, match=r"no times for tensor-parallel sizes \[2, 4\]"):
        load_profile(path, {"device": "cpu"}, [1, 2, 4])
    path.write_text("[]")
    with pytest.raises(ConfigError, match="not a rollout profile"):
        load_profile(path, {}, [1])


def test_rules_are_chosen_by_name() -> None:
    assert {"fixed", "paper", "predict"} <= RULES.keys()
