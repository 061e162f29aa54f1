"""Built-in tasks: made by code and checked by rule, with correct solutions whose lengths have a long tail.

A task turns a number into a prompt and a worked solution. Where numbers are computed digit by digit they are written
least significant digit first, so that a carry never looks ahead. One number in five, chosen by a hash, is held out
for evaluation.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random


@dataclass(frozen=True)
class Task:
    numbers: Callable[[], list[int]]  # all problems
    prompt: Callable[[int], str]
    solution: Callable[[int], str]
    answer: Callable[[int], str]
    grader: str  # entry of rewards.graders.GRADERS
    slip: Callable[[str, Random, float], str]  # changes a solution: each step goes wrong with a probability
    fields: dict = field(default_factory=dict)  # further fields of every row, for the grader


def is_held_out(number: int) -> bool:
    return (number * 2654435761 >> 8) % 5 == 0


def _digits(number: int, width: int = 0) -> str:
    return str(number).zfill(width)[::-1]


# ---- hailstone: iterate the Collatz map from an odd n until the value falls below n ------------------------------


def _hailstone_steps(n: int) -> list[int]:
    steps, value = [], n
    while value >= n:
        value = 3 * value + 1 if value % 2 else value // 2
        steps.append(value)
    return steps


def _hailstone_numbers() -> list[int]:
    """Odd n up to 9999 whose path stays within five digits (solution characters: P50 23, P99 227, max 581)."""
    return [n for n in range(3, 10000, 2) if max(_hailstone_steps(n)) < 10**5]


def _hailstone_solution(n: int) -> str:
    steps = [_digits(value, 5) for value in _hailstone_steps(n)]
    return " ".join(steps) + "=" + steps[-1]


# ---- reverse_add: add a number to its mirror image until the sum is a palindrome ---------------------------------


def _reverse_add_steps(n: int) -> list[tuple[str, str, str]]:
    """Return (number, mirror, sum) as digit strings, least significant first; nothing when it takes over 24 steps."""
    steps, text = [], _digits(n)
    for _ in range(24):
        total = _digits(int(text) + int(text[::-1]))
        steps.append((text, text[::-1], total))
        if total == total[::-1]:
            return steps
        text = total
    return []


def _reverse_add_numbers() -> list[int]:
    return [n for n in range(10, 10000) if _reverse_add_steps(n)]


def _reverse_add_solution(n: int) -> str:
    steps = _reverse_add_steps(n)
    return ",".join(f"{a}+{b}={c}" for a, b, c in steps) + "#" + steps[-1][2]


# ---- expression: write a Python expression of x and y that gives the values shown, and other values too ----------

FORMS = (
    "{a}*x+{b}*y+{c}",
    "{a}*x*x+{b}*y+{c}",
    "{a}*x*y+{b}*x+{c}",
    "max({a}*x,{b}*y)+{c}",
    "{a}*x-{b}*y+{c}",
    "abs({a}*x-{b}*y)+{c}",
)
SHOWN = ((0, 0), (1, 0), (0, 1), (1, 1), (2, 1))  # x and y; their values identify the expression
HIDDEN = ((3, 2), (2, 5), (7, 3), (-4, 6), (5, -9))
PROGRAM = "import sys\nfor line in sys.stdin:\n    x, y = map(int, line.split())\n    print({program})\n"


def _expression_numbers() -> list[int]:
    """Digits of a number: the form; a and b, from 1 to 9 and not equal; c."""
    return [n for n in range(1000 * len(FORMS)) if n // 100 % 10 and n // 10 % 10 and n // 100 % 10 != n // 10 % 10]


def _expression(n: int) -> str:
    return FORMS[n // 1000].format(a=n // 100 % 10, b=n // 10 % 10, c=n % 10)


def _expression_values(n: int, places: tuple[tuple[int, int], ...]) -> list[int]:
    code = compile(_expression(n), "expression", "eval")  # our own text, not a model's
    return [eval(code, {"x": x, "y": y, "max": max, "abs": abs}) for x, y in places]


def _expression_answer(n: int) -> str:
    places = SHOWN + HIDDEN
    stdin = "".join(f"{x} {y}\n" for x, y in places)
    stdout = "".join(f"{value}\n" for value in _expression_values(n, places))
    return json.dumps([{"stdin": stdin, "stdout": stdout}])


def _slip_digit(solution: str, rng: Random, probability: float) -> str:
    """Change each digit with `probability`; the rest of the solution stays."""
    return "".join(str(rng.randrange(10)) if c.isdigit() and rng.random() < probability else c for c in solution)


TASKS: dict[str, Task] = {
    "hailstone": Task(
        numbers=_hailstone_numbers,
        prompt=lambda n: _digits(n, 5) + "?",
        solution=_hailstone_solution,
        answer=lambda n: _digits(_hailstone_steps(n)[-1], 5),
        grader="hailstone",
        slip=_slip_digit,
    ),
    "reverse_add": Task(
        numbers=_reverse_add_numbers,
        prompt=lambda n: _digits(n) + "=",
        solution=_reverse_add_solution,
        answer=lambda n: _reverse_add_steps(n)[-1][2],
        grader="reverse_add",
        slip=_slip_digit,
    ),
    "expression": Task(
        numbers=_expression_numbers,
        prompt=lambda n: ",".join(map(str, _expression_values(n, SHOWN))) + "=",
        solution=_expression,
        answer=_expression_answer,
        grader="code",
        slip=_slip_digit,
        fields={"template": PROGRAM},
    ),
}
