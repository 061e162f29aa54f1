"""The queue of gradings: order, room, and how many of a grader run at a time."""

import threading
from random import Random

import pytest

from rewards.gradings import Job, JobQueue, PoolStats, merge_stats


def job(id: int, task: str = "a") -> Job:
    return Job(id, task, ("", "", {}), 1.0)


@pytest.mark.parametrize("seed", range(20))
def test_order_within_a_grader_and_no_more_than_allowed(seed):
    rng = Random(seed)
    limits = {"a": 1, "b": 2}
    jobs = JobQueue(1000, limits)
    for id in range(60):
        jobs.put(job(id, rng.choice("abc")))
    running, taken = [], []
    while len(taken) < 60:
        counts = {task: sum(j.task == task for j in running) for task in "abc"}
        if running and (rng.random() < 0.4 or counts["a"] + counts["b"] == 3):
            jobs.done(running.pop(rng.randrange(len(running))))
            continue
        waiting = {j.task for j in jobs._jobs}
        if not any(counts[task] < limits.get(task, 99) for task in waiting):
            jobs.done(running.pop())
            continue
        running.append(jobs.get())
        taken.append(running[-1])
        assert all(sum(j.task == task for j in running) <= limit for task, limit in limits.items())
    for task in "abc":
        ids = [j.id for j in taken if j.task == task]
        assert ids == sorted(ids)


def test_a_full_queue_makes_the_caller_wait():
    jobs = JobQueue(2, {})
    for id in range(2):
        jobs.put(job(id))
    third = threading.Thread(target=jobs.put, args=(job(2),), daemon=True)
    third.start()
    third.join(0.2)
    assert third.is_alive()
    assert jobs.get().id == 0
    third.join(10)
    assert not third.is_alive() and jobs.take_longest() == 2


@pytest.mark.parametrize("full", [True, False])
def test_a_closed_queue_lets_everybody_go(full):
    jobs = JobQueue(1, {})
    if full:
        jobs.put(job(0))
    waits = threading.Thread(target=jobs.put if full else jobs.get, args=(job(1),) if full else (), daemon=True)
    waits.start()
    jobs.close()
    waits.join(10)
    assert not waits.is_alive() and jobs.get() is None


def test_what_nobody_has_begun_can_be_dropped():
    jobs = JobQueue(10, {})
    for id in range(5):
        jobs.put(job(id))
    jobs.keep({1, 4})
    assert [jobs.get().id, jobs.get().id] == [1, 4]


def test_ranks_are_merged():
    ranks = [PoolStats(2, 1.0, 4.0, 3.0, 5, 1), PoolStats(6, 3.0, 4.0, 1.0, 7, 0)]
    ranks[0].causes.update({"x": 2})
    ranks[1].causes.update({"x": 1, "y": 1})
    ranks[0].cases.responses, ranks[0].cases.audited, ranks[0].cases.audited_passed = 95, 1, 1
    ranks[1].cases.responses, ranks[1].cases.audited, ranks[1].cases.timeouts = 105, 3, 3
    record = merge_stats(ranks, 4.0)
    assert record["graded"] == 8 and record["per_second"] == 2.0 and record["seconds_mean"] == 0.5
    assert record["latency_mean"] == 1.0 and record["latency_max"] == 3.0 and record["queue_max"] == 7
    assert record["workers_replaced"] == 1 and record["causes"] == {"x": 3, "y": 1}
    assert record["cases"]["timeouts"] == 3
    assert record["cases"]["passes_cut_off"] == 49, "a quarter of the audited passed late; 196 were not audited"
    assert merge_stats([PoolStats()], 1.0)["seconds_mean"] == 0
