"""Permits and admission of co-execution groups (policies/group.py, policies/admission.py), by brute force."""

import copy
import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Collection
from dataclasses import replace

import pytest
from conftest import thorough

from policies.admission import Asked, MuxGroup, Prices, admit, alone, placements
from policies.group import Member, Part, Permits, Worker, cycle, least_periods, load, most_periods, periods, play
from simulation.mux_jobs import MIXES, arrivals
from simulation.mux_orders import best, random_groups, utilisation

ONE = frozenset([0])


def members(*phases: tuple[float, float]) -> list[Member]:
    return [Member(f"job{i}", ONE, *seconds) for i, seconds in enumerate(phases)]


def test_unsaturated_groups_run_at_the_pace_of_their_longest_job():
    """The theorem's period (RollMux, Theorem 1), by the permits that the server gives."""
    unsaturated = [group for group in random_groups(0, 400) if load(group) < cycle(group)]
    assert len(unsaturated) > 100
    for group in unsaturated:
        assert periods(group) == pytest.approx([cycle(group)] * len(group))


def test_nothing_beats_the_round_robin_in_unsaturated_groups_unless_a_job_starves():
    unsaturated = [group for group in random_groups(1, 40) if load(group) < cycle(group)]
    assert len(unsaturated) > 10
    for group in unsaturated:
        round_robin = sum(member.alone for member in group) / cycle(group)
        assert utilisation(best(group, 4, starves=False)) <= round_robin + 1e-6


def test_some_saturated_groups_have_a_better_order():
    saturated = [group for group in random_groups(1, 60) if load(group) >= cycle(group)]
    gains = [utilisation(best(group, 4, starves=False)) / utilisation(group) for group in saturated]
    assert min(gains) >= 1 and max(gains) > 1.1


def test_leaving_the_longest_job_out_may_use_the_nodes_better():
    """The condition that the theorem does not name: no job starves."""
    group = members((4, 6), (16, 20), (6, 4))
    assert load(group) < cycle(group) == 36
    assert sum(member.alone for member in group) / cycle(group) == pytest.approx(56 / 36)
    word = best(group, 4, starves=True)
    assert group[1] not in word and utilisation(word) == pytest.approx(2.0)


def test_bounds_hold_for_any_nodes():
    chain = [  # a queues behind b, which waits for c on a node that a does not use
        Member("a", frozenset({0}), 10, 1),
        Member("c", frozenset({1}), 100, 1),
        Member("b", frozenset({0, 1}), 10, 1),
    ]
    assert periods(chain)[0] > 100
    for group in (chain, *random_groups(2, 150, nodes=3, most=5)):
        for least, seconds, most in zip(least_periods(group), periods(group), most_periods(group), strict=True):
            assert least * (1 - 1e-9) <= seconds <= most * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 3])
def test_periods_are_those_of_a_long_play(nodes):
    for group in random_groups(4, 60, nodes, most=3 if nodes == 1 else 5):
        ran = [phase for phase in play(group, 300) if phase.phase == "train"]
        for member, seconds in zip(group, periods(group), strict=True):
            ends = [phase.end for phase in ran if phase.job == member.name]
            assert seconds == pytest.approx((ends[-1] - ends[99]) / (len(ends) - 100), rel=0.02)


@pytest.mark.slow
def test_a_short_job_before_long_ones_hides_no_period():
    group = [Member("a", frozenset({0}), 1, 1), Member("b", frozenset({1}), 200, 3), Member("c", frozenset({2}), 9, 1)]
    ran = play(group, 300)
    for member, seconds in zip(group, periods(group), strict=True):
        ends = [phase.end for phase in ran if phase.phase == "train" and phase.job == member.name]
        assert seconds == pytest.approx((ends[-1] - ends[99]) / (len(ends) - 100), rel=0.02)


def test_no_job_starves_and_no_worker_has_two():
    for group in random_groups(3, 50, nodes=3, most=5):
        ran = play(group, 10)
        done = Counter(phase.job for phase in ran if phase.phase == "train")
        assert min(done.values()) >= 10 and set(done) == {member.name for member in group}
        places = {member.name: member.rollout_nodes for member in group}
        for name in {*itertools.chain(*places.values()), "train"}:
            mine = sorted(
                (phase.start, phase.end)
                for phase in ran
                if (
                    phase.phase == "train"
                    if name == "train"
                    else phase.phase == "rollout" and name in places[phase.job]
                )
            )
            assert all(end <= start for (_, end), (start, _) in itertools.pairwise(mine))


def test_permits_go_in_the_order_of_requests():
    permits, both = Permits(), ("node0", "node1")
    assert permits.request("a", [both]) == [("a", both)]
    assert permits.request("b", [["node1"]]) == []
    assert permits.request("c", [["node0"]]) == []
    assert permits.release("a", ["node0"]) == [("c", ("node0",))]  # early: its tail goes on elsewhere
    assert permits.release("a") == [("b", ("node1",))]
    assert permits.release("a") == []
    with pytest.raises(ValueError, match="job b asks for a phase and is in another"):
        permits.request("b", [["node0"]])


def test_a_request_that_is_withdrawn_holds_up_nobody():
    permits = Permits()
    permits.request("a", [["node0"]])
    permits.request("b", [["node0", "node1"]])
    assert permits.request("c", [["node1"]]) == []  # behind b
    assert permits.release("b") == [("c", ("node1",))]
    with pytest.raises(ValueError, match="job d asks for a phase and waits for another"):
        permits.request("d", [["node0"]])
        permits.request("d", [["node0"]])


def test_a_phase_in_parts_begins_on_the_first_and_withdraws_the_rest():
    permits, parts = Permits(), [("node0", "node1"), ("node2", "node3")]
    assert permits.request("a", parts) == [("a", part) for part in parts]
    assert permits.request("b", parts) == permits.request("c", [["node1", "node2"]]) == []
    assert permits.awaited("a") == parts and permits.awaited("b") == []  # c waits for b
    assert permits.release("a", ["node2"]) == []
    assert permits.awaited("a") == [parts[0], ("node3",)]
    assert permits.release("a", ["node3"]) == [("b", parts[1])]
    assert permits.release("b") == [] and permits.awaited("a") == [("node1",)]
    assert permits.release("a", ["node1"]) == [("c", ("node1", "node2"))]


class Watched(Permits):
    """Permits that are looked at after each call."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: defaultdict[Worker, list[str]] = defaultdict(list)  # who waits or works, first come first

    def ask(self, job: str, parts: list[Part]) -> None:
        for worker in itertools.chain(*parts):
            self.asked[worker].append(job)
        self.request(job, parts)
        self.look()

    def give(self, job: str, workers: Collection[Worker]) -> None:
        for worker in workers:
            self.asked[worker].remove(job)
        self.release(job, workers)
        self.look()

    def look(self) -> None:
        for worker, queue in self.asked.items():
            assert self.queues[worker] == queue
            holders = [job for job, held in self.granted.items() if worker in held]
            assert holders in ([], queue[:1]), "a worker has two jobs, or another than the first"
        for job, parts in self.parts.items():
            for part in parts:
                is_first = all(self.queues[worker][0] == job for worker in part)
                assert is_first == ({*part} <= self.granted.get(job, set())), "a part waits for nobody, or is early"
            for part in self.awaited(job):
                assert any(other != job for other, _ in copy.deepcopy(self).release(job, part)), "given for nothing"


@pytest.mark.parametrize("seed", [*range(16), *map(thorough, range(16, 40))])
def test_every_request_is_granted_in_the_end_and_each_worker_serves_in_order(seed: int):
    """Random groups, phases in parts or all at once, workers that are given back early, and jobs that die."""
    rng, permits = random.Random(seed), Watched()
    workers, jobs = range(rng.randint(1, 6)), [f"job{i}" for i in range(rng.randint(1, 6))]
    for _ in range(100):
        job = rng.choice(jobs)
        held = [*itertools.chain(*permits.parts.get(job, ()))]
        if not held:
            mine, size = rng.sample(workers, rng.randint(1, len(workers))), rng.randint(1, 3)
            permits.ask(job, [tuple(mine[i : i + size]) for i in range(0, len(mine), size)])
        elif job in permits.granted or rng.random() < 0.1:  # else it waits, and may die
            permits.give(job, rng.sample(held, rng.choice([len(held), rng.randint(1, len(held))])))
    while permits.parts:  # all end, and ask for no more
        job = rng.choice(sorted(permits.granted))  # there is always one, until all have had their turn
        permits.give(job, [*itertools.chain(*permits.parts[job])])


# ---- admission ---------------------------------------------------------------------------------------------------

PRICES = Prices(rollout_node=1.0, train_node=3.0, host_gib=1000.0)


def test_a_job_joins_where_its_phases_fit_and_costs_nothing():
    first, second = Asked("first", 100, 100, 1.2), Asked("second", 90, 100, 1.2)
    admission = admit(second, [alone(first)], PRICES)
    assert (admission.group, admission.added) == (0, 0)
    assert admission.after.cost(PRICES) == 4.0


def test_a_job_that_needs_the_training_nodes_alone_gets_rollout_nodes_of_its_own():
    first, second = Asked("first", 200, 50, 1.1), Asked("second", 210, 50, 1.1)
    admission = admit(second, [alone(first)], PRICES)
    assert (admission.group, admission.added) == (0, 1.0)
    assert admission.after.places == (frozenset([0]), frozenset([1]))


def test_the_papers_bad_pair_is_refused():
    """Two jobs of 349 and 431 s on one node, slowed down 1.64 and 1.40 times (Figure 3), under an SLO of 1.2."""
    first, second = Asked("4B-8K-M", 290, 59, 1.2), Asked("8B-8K-M", 280, 151, 1.2)
    admission = admit(second, [alone(first)], Prices(rollout_node=100.0, train_node=1.0))
    assert admission.group is None
    assert "may take" in admission.refused[0]


def test_states_that_do_not_fit_a_node_are_refused_with_the_numbers():
    jobs = [Asked(f"job{i}", 100, 100, 2.0, rollout_gib=10, train_gib=600) for i in range(2)]
    admission = admit(jobs[1], [alone(jobs[0])], PRICES)
    assert admission.refused == {0: "the states would take 1200 GiB on a training node, which has 1000"}


def by_trying(job: Asked, groups: list[MuxGroup], prices: Prices) -> tuple[float, int | None, frozenset[int]]:
    """Return what Algorithm 1 finds: dollars, group and nodes, by playing each set of jobs that may be left."""
    best = (alone(job).cost(prices), None, alone(job).places[0])
    for index, group in enumerate(groups):
        for new, place in placements(group, job):
            joined = group.joined(job, place)
            left = itertools.product([False, True], repeat=len(group.jobs))
            rests = [joined.of([i for i, stays in enumerate((*stay, True)) if stays]) for stay in left]
            if group.is_full or joined.shortage(prices) or new * prices.rollout_node >= best[0]:
                continue
            if all(
                seconds <= asked.slo * asked.alone * (1 + 1e-9)
                for rest in rests
                for asked, seconds in zip(rest.jobs, periods(rest.members), strict=True)
            ):
                best = (new * prices.rollout_node, index, place)
    return best


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *map(thorough, (1, 2))])
def test_admission_finds_the_cheapest_place_that_there_is(seed):
    rng, groups = random.Random(f"cheapest {seed}"), list[MuxGroup]()
    shared = 0
    for i in range(25):
        job = Asked(f"job{i}", rng.uniform(50, 300), rng.uniform(20, 150), rng.uniform(1, 2), rng.randint(1, 2))
        admission = admit(job, groups, PRICES)
        assert (admission.added, admission.group, admission.after.places[-1]) == by_trying(job, groups, PRICES)
        admission.carry_out(groups)
        shared += admission.group is not None
    assert shared > 8


def test_the_work_of_a_decision_grows_no_faster_than_the_groups(monkeypatch):
    """The paper decides in 0.6 s among 2,000 jobs, linearly (section 7.5); benchmarks print seconds."""
    played = Counter[str]()

    def counted(members):
        played["groups"] += 1
        return periods(members)

    monkeypatch.setattr("policies.admission.periods", counted)
    groups = list[MuxGroup]()
    for arrival in arrivals(MIXES["BL"], 40, 0):
        admit(arrival.job, groups, PRICES).carry_out(groups)
    played.clear()
    admit(Asked("refused everywhere", 100, 100, 1.0), groups, PRICES)
    once = played["groups"]
    admit(Asked("refused everywhere", 100, 100, 1.0), groups * 10, PRICES)
    assert 0 < once < 5 * len(groups) and played["groups"] - once <= 10 * once


@pytest.mark.parametrize("seed", range(5))
def test_no_member_is_ever_slower_than_its_slo(seed):
    rng, groups = random.Random(seed), list[MuxGroup]()
    for i in range(40):
        if groups and rng.random() < 0.3:
            leaving = rng.choice(rng.choice(groups).jobs).name
            groups = [left for group in groups if (left := group.without(leaving)).jobs]
        job = Asked(f"job{i}", rng.uniform(50, 300), rng.uniform(50, 300), rng.uniform(1, 2), rng.randint(1, 2))
        admission = admit(job, groups, PRICES)
        before = sum(group.cost(PRICES) for group in groups)
        admission.carry_out(groups)
        assert admission.added == pytest.approx(sum(group.cost(PRICES) for group in groups) - before)
        for group in groups:
            for asked, seconds in zip(group.jobs, periods(group.members), strict=True):
                assert seconds <= asked.slo * asked.alone * (1 + 1e-6)


def test_a_group_whose_member_would_be_slowed_down_by_a_departure_is_refused():
    jobs = (Asked("a", 169, 183, 1.45), Asked("b", 332, 96, 1.49), Asked("c", 165, 77, 1.29))
    group = MuxGroup(1, jobs, (ONE, ONE, frozenset([1])))
    for job, seconds in zip(jobs, periods(group.members), strict=True):
        assert seconds <= job.slo * job.alone
    assert group.delay() == group.without("b").delay() == "job c would take 352 s an iteration, and may take 312"


def test_nodes_with_the_same_jobs_stand_for_each_other():
    """The first accepted of all sets of nodes, in their order, is the first of each kind."""
    jobs = [Asked(f"job{i}", 1, 1, 9.0, rollout_nodes=n) for i, n in enumerate((3, 2, 4))]
    places = frozenset({0, 1, 2}), frozenset({2, 5}), frozenset({3, 4, 6, 7})
    group = MuxGroup(1, tuple(jobs), places)
    kinds = [tuple(node in place for place in places) for node in range(8)]
    for wanted in range(1, 10):
        known, first = set(), []
        for new in range(wanted + 1):
            for old in itertools.combinations(range(8), wanted - new):
                kind = new, tuple(sorted(kinds[node] for node in old))
                first += [] if kind in known else [(new, frozenset((*old, *range(8, 8 + new))))]
                known.add(kind)
        assert [*placements(group, replace(jobs[0], rollout_nodes=wanted))] == first
    wide = MuxGroup(1, (replace(jobs[0], rollout_nodes=500),), (frozenset(range(1000)),))
    assert len([*placements(wide, replace(jobs[0], rollout_nodes=500))]) == 501
