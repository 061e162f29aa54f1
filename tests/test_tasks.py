"""Built-in tasks: true arithmetic, recomputed here in another way, and the shape that makes them worth training on."""

from random import Random
from statistics import mean, quantiles

import pytest

from reward import RewardConfig
from rewards.graders import GRADERS
from rewards.pool import RewardPool
from tasks import HIDDEN, SHOWN, TASKS, is_held_out

EVERY = pytest.mark.parametrize("name", TASKS)
COMPUTED = pytest.mark.parametrize("name", ("hailstone", "reverse_add"))  # whose solutions are steps of a computation


def value(text: str) -> int:
    """A number as tasks write it: least significant digit first."""
    assert text.isdigit()
    return int(text[::-1])


def check_hailstone(n: int, prompt: str, solution: str, answer: str) -> None:
    assert len(prompt) == 6 and prompt[-1] == "?" and value(prompt[:-1]) == n
    path, result = solution.split("=")
    steps = path.split(" ")
    before = n
    for step in steps:
        assert len(step) == 5
        assert value(step) == (3 * before + 1 if before & 1 else before >> 1)
        before = value(step)
    assert all(value(step) >= n for step in steps[:-1]) and value(steps[-1]) < n
    assert result == answer == steps[-1]


def check_reverse_add(n: int, prompt: str, solution: str, answer: str) -> None:
    assert prompt[-1] == "=" and value(prompt[:-1]) == n
    path, result = solution.split("#")
    before = prompt[:-1]
    for step in path.split(","):
        assert before != before[::-1] or before == prompt[:-1]  # it goes on only until the sum is a palindrome
        number, mirror, total = step.replace("=", "+").split("+")
        assert (number, mirror) == (before, before[::-1])
        assert value(number) + value(mirror) == value(total) and total[-1] != "0"
        before = total
    assert before == before[::-1] and result == answer == before


CHECKS = {"hailstone": check_hailstone, "reverse_add": check_reverse_add}


@COMPUTED
def test_every_step_of_every_solution_is_true(name):
    task = TASKS[name]
    for n in task.numbers():
        CHECKS[name](n, task.prompt(n), task.solution(n), task.answer(n))


@COMPUTED
def test_the_grader_takes_every_solution_and_no_wrong_one(name):
    task, grade, rng = TASKS[name], GRADERS[TASKS[name].grader], Random(0)
    for n in task.numbers():
        solution, answer = task.solution(n), task.answer(n)
        assert grade(solution, answer, {}) == 1.0
        assert grade(solution[:-1], answer, {}) == 0.0
        assert grade(solution + "1", answer, {}) == 0.0
        place = len(solution) - 1 - rng.randrange(len(answer))  # a digit of the final answer
        wrong = str((int(solution[place]) + rng.randrange(1, 10)) % 10)
        assert grade(solution[:place] + wrong + solution[place + 1 :], answer, {}) == 0.0
        assert grade(task.prompt(n), answer, {}) == 0.0
    assert grade("", answer, {}) == 0.0


@EVERY
def test_prompts_are_unique_and_many(name):
    task = TASKS[name]
    numbers = task.numbers()
    assert len({task.prompt(n) for n in numbers}) == len(numbers) > 4000
    assert numbers == task.numbers()


@COMPUTED
def test_solutions_are_long_tailed(name):
    task = TASKS[name]
    percentiles = quantiles([len(task.solution(n)) for n in task.numbers()], n=100)
    assert percentiles[98] >= 5 * percentiles[49]
    assert percentiles[74] <= 2.5 * percentiles[49]  # a tail, not a broad middle


@EVERY
def test_a_fifth_is_held_out_and_is_like_the_rest(name):
    task = TASKS[name]
    numbers = task.numbers()
    held_out = [n for n in numbers if is_held_out(n)]
    assert 0.15 < len(held_out) / len(numbers) < 0.25
    assert len(held_out) >= 500  # what an evaluation needs
    lengths = [mean(len(task.solution(n)) for n in part) for part in (numbers, held_out)]
    assert lengths[1] == pytest.approx(lengths[0], rel=0.1)
    for digit in "13579":  # no last digit is all here or all there
        ending = [n for n in numbers if str(n).endswith(digit)]
        assert 0.1 < sum(map(is_held_out, ending)) / len(ending) < 0.3


@EVERY
def test_a_slip_changes_digits_alone_and_as_often_as_asked(name):
    task = TASKS[name]
    solutions = [task.solution(n) for n in task.numbers()[::10]]
    changed = total = 0
    rng, twin = Random(1), Random(1)
    for solution in solutions:
        assert task.slip(solution, rng, 0.0) == task.slip(solution, twin, 0.0) == solution
        slipped = task.slip(solution, rng, 0.3)
        assert slipped == task.slip(solution, twin, 0.3)
        assert len(slipped) == len(solution)
        for old, new in zip(solution, slipped):
            assert new == old or (old.isdigit() and new.isdigit())
            changed += new != old
            total += old.isdigit()
    assert 0.25 < changed / total < 0.29  # one digit in ten is replaced by itself


# ---- expression


def test_expressions_are_told_apart_by_what_is_shown():
    task = TASKS["expression"]
    for n in task.numbers():
        shown = [int(value) for value in task.prompt(n).removesuffix("=").split(",")]
        assert shown == [eval(task.solution(n), {"x": x, "y": y}) for x, y in SHOWN]
    # With unique prompts (above), equal values shown mean the same expression.
    assert not set(SHOWN) & set(HIDDEN)


@pytest.mark.slow
def test_expressions_are_graded_by_what_they_compute():
    task = TASKS["expression"]
    right = {n: [task.solution(n)] for n in task.numbers()[7::1000]}
    first = task.numbers()[7]
    assert task.solution(first) == "1*x+2*y+7"
    right[first] += ["7+y+x+y", "sum([x, y, y], 7)", "-(-x-y-y)+0b111"]
    wrong = [
        "1*x+2*y+8",
        "1*x+2*y+7*(x<3)",
        "",
        "print(7)",
        "[7, 8, 9, 10, 11][2*y+x]",
        "x.__class__",
        "1*x+2*y+7.0",
        "while",
    ]
    jobs = [(n, text, 1.0) for n, texts in right.items() for text in texts] + [(first, text, 0.0) for text in wrong]
    with RewardPool(RewardConfig(num_workers=2, case_min_seconds=30), ["code"]) as pool:
        for i, (n, text, _) in enumerate(jobs):
            pool.submit(i, "code", text, task.answer(n), task.fields)
        rewards = dict(pool.drain())
    for i, job in enumerate(jobs):
        assert (rewards[i].value, rewards[i].error) == (job[2], ""), job
