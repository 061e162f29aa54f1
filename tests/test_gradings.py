"""The queue of gradings: order, room, and how many of a grader run at a time."""

import threading
from random import Random

import pytest

from rewards.gradings import Grading, GradingQueue


def grading(id: int, task: str = "a") -> Grading:
    return Grading(id, task, ("", "", {}), 1.0)


@pytest.mark.parametrize("seed", range(20))
def test_order_within_a_grader_and_no_more_than_allowed(seed):
    rng = Random(seed)
    limits = {"a": 1, "b": 2}
    gradings = GradingQueue(1000, limits)
    for id in range(60):
        gradings.put(grading(id, rng.choice("abc")))
    running, taken = [], []
    while len(taken) < 60:
        counts = {task: sum(g.task == task for g in running) for task in "abc"}
        if running and (rng.random() < 0.4 or counts["a"] + counts["b"] == 3):
            gradings.done(running.pop(rng.randrange(len(running))))
            continue
        tasks = {g.task for g in gradings._waiting}
        if not any(counts[task] < limits.get(task, 99) for task in tasks):
            gradings.done(running.pop())
            continue
        running.append(gradings.get())
        taken.append(running[-1])
        assert all(sum(g.task == task for g in running) <= limit for task, limit in limits.items())
    for task in "abc":
        ids = [g.id for g in taken if g.task == task]
        assert ids == sorted(ids)


def test_a_full_queue_makes_the_caller_wait():
    gradings = GradingQueue(2, {})
    for id in range(2):
        gradings.put(grading(id))
    third = threading.Thread(target=gradings.put, args=(grading(2),), daemon=True)
    third.start()
    third.join(0.2)
    assert third.is_alive()
    assert gradings.get().id == 0
    third.join(60)
    assert not third.is_alive() and gradings.take_longest() == 2


@pytest.mark.parametrize("full", [True, False])
def test_a_closed_queue_lets_everybody_go(full):
    gradings = GradingQueue(1, {})
    if full:
        gradings.put(grading(0))
    waits = threading.Thread(
        target=gradings.put if full else gradings.get, args=(grading(1),) if full else (), daemon=True
    )
    waits.start()
    gradings.close()
    waits.join(60)
    assert not waits.is_alive() and gradings.get() is None


def test_what_nobody_has_begun_can_be_dropped():
    gradings = GradingQueue(10, {})
    for id in range(5):
        gradings.put(grading(id))
    gradings.drop_all_but({1, 4})
    assert [gradings.get().id, gradings.get().id] == [1, 4]
