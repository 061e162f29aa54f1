"""A cluster over time, by the rules that admit jobs (simulation/cluster.py)."""

from statistics import fmean

import pytest

from policies.admission import Asked, Prices, admit
from simulation.cluster import RULES, Arrival, Cluster, arrivals, optimum

PRICES = Prices()


def outcomes(mix: str, seed: int, count: int = 60) -> dict:
    jobs = arrivals(mix, count, seed, span=120.0)
    return {name: Cluster(rule, PRICES, seed).run(jobs) for name, rule in RULES.items()}


@pytest.mark.parametrize("mix", ["BL", "RH", "TH", "Mixed"])
def test_sharing_costs_less_and_keeps_every_slo(mix):
    found = outcomes(mix, seed=0)
    assert found["rollmux"].slo_attainment == found["solo"].slo_attainment == 1.0
    assert found["solo"].slowdown == pytest.approx(1.0)
    assert found["rollmux"].dollars_per_hour < found["solo"].dollars_per_hour
    assert found["random"].slo_attainment < 0.9 and found["greedy"].slo_attainment < 0.9


def test_a_job_alone_takes_its_hours_and_costs_its_nodes():
    job = Asked("job", 100, 50, 1.5)
    outcome = Cluster(RULES["rollmux"], PRICES).run([Arrival(3.0, 10.0, job)])
    assert outcome.slowdowns == [pytest.approx(1.0)]
    assert outcome.dollars_per_hour == pytest.approx(PRICES.rollout_node + PRICES.train_node)


def test_two_jobs_that_fit_share_a_group_and_speed_up_when_one_leaves():
    jobs = [Arrival(0.0, 10.0, Asked("a", 100, 100, 1.6)), Arrival(0.0, 5.0, Asked("b", 100, 200, 1.6))]
    outcome = Cluster(RULES["rollmux"], PRICES).run(jobs)
    assert outcome.peak_train_nodes == 1 and outcome.alone == 1
    b, a = outcome.slowdowns  # b leaves first, at its own pace of 300 s; a has been held to that until then
    assert b == pytest.approx(1.0)
    assert a == pytest.approx((5.0 + 10.0 - 5.0 * 200 / 300) / 10.0)


def test_one_after_another_jobs_come_near_the_optimum():
    ratios = []
    for seed in range(4):
        jobs = [arrival.job for arrival in arrivals("Mixed", 5, seed)]
        groups: list = []
        for job in jobs:
            admit(job, groups, PRICES).carry_out(groups)
        best = optimum(jobs, PRICES)
        ratios.append(sum(group.cost(PRICES) for group in groups) / best)
        assert ratios[-1] >= 1 - 1e-9
    assert fmean(ratios) <= 1.12  # the paper's worst mix
