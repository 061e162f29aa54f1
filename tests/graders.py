"""User reward functions of the tests, named in configs by file and function."""

import random
import time


def share_of_digits(response: str, answer: str, row: dict) -> float:
    """Share of digits among 32 characters: a random model has some of it, so there is a gradient from the start."""
    return min(sum(c.isdigit() for c in response) / 32, 1.0)


def has_many_digits(response: str, answer: str, row: dict) -> float:
    """0 or 1, so that many groups are all equal; takes a time of its own at every call."""
    time.sleep(random.SystemRandom().random() * 0.003)
    return float(sum(c.isdigit() for c in response) > 2)


def raises(response: str, answer: str, row: dict) -> float:
    """Passes the trial before the start, which grades the answer itself."""
    if response != answer:
        raise RuntimeError("no grade today")
    return 1.0


def of_turns(response: str, answer: str, row: dict) -> float:
    return sum(row["turn_rewards"])


def parts(response: str, answer: str, row: dict) -> dict[str, float]:
    return {"length": min(len(response), 8) / 8, "ascii": float(response.isascii())}
