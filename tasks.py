"""Built-in tasks: checkable by rule, made by code, with correct solutions whose lengths are long-tailed by nature.

A task turns a number into a prompt and a worked solution. Numbers are written least significant digit first, so
that a carry never looks ahead. One number in five, chosen by a hash, is held out for evaluation.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True)
class Task:
    numbers: Callable[[], list[int]]  # all problems
    prompt: Callable[[int], str]
    solution: Callable[[int], str]
    answer: Callable[[int], str]
    grader: str  # entry of reward.GRADERS
    slip: Callable[[str, Random, float], str]  # a solution in which each step goes wrong with some probability


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


def _reverse_add_steps(n: int) -> list[tuple[str, str, str]] | None:
    """Return (number, mirror, sum) as digit strings, least significant first; None when it takes over 24 steps."""
    steps, text = [], _digits(n)
    for _ in range(24):
        total = _digits(int(text) + int(text[::-1]))
        steps.append((text, text[::-1], total))
        if total == total[::-1]:
            return steps
        text = total
    return None


def _reverse_add_numbers() -> list[int]:
    return [n for n in range(10, 10000) if _reverse_add_steps(n) is not None]


def _reverse_add_solution(n: int) -> str:
    steps = _reverse_add_steps(n) or []
    return ",".join(f"{a}+{b}={c}" for a, b, c in steps) + "#" + steps[-1][2]


def _slip_digit(solution: str, rng: Random, probability: float) -> str:
    """Change a digit with `probability` per digit; what follows stays as it was."""
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
        answer=lambda n: (_reverse_add_steps(n) or [("", "", "")])[-1][2],
        grader="reverse_add",
        slip=_slip_digit,
    ),
}
