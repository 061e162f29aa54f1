"""Records: what ranks counted becomes one JSON object, and nothing else changes."""

from records import grading_record
from rewards.gradings import PoolStats


def test_what_graders_did_is_added_up_over_ranks():
    ranks = [PoolStats(2, 1.0, 4.0, 3.0, 5, 1), PoolStats(6, 3.0, 4.0, 1.0, 7, 0)]
    ranks[0].causes.update({"x": 2})
    ranks[1].causes.update({"x": 1, "y": 1})
    ranks[0].cases.responses, ranks[0].cases.audited, ranks[0].cases.audited_passed = 95, 1, 1
    ranks[1].cases.responses, ranks[1].cases.audited, ranks[1].cases.timeouts = 105, 3, 3
    record = grading_record(ranks, 4.0)
    assert record["graded"] == 8 and record["per_second"] == 2.0 and record["seconds_mean"] == 0.5
    assert record["latency_mean"] == 1.0 and record["latency_max"] == 3.0 and record["queue_max"] == 7
    assert record["workers_replaced"] == 1 and record["causes"] == {"x": 3, "y": 1}
    assert record["cases"]["timeouts"] == 3
    assert record["cases"]["passes_cut_off"] == 49, "a quarter of the audited passed late; 196 were not audited"
    assert grading_record([PoolStats()], 1.0)["seconds_mean"] == 0
