"""User reward functions of the tests, named in configs by file and function."""


def share_of_digits(response: str, answer: str, row: dict) -> float:
    """Share of digits among 32 characters: a random model has some of it, so there is a gradient from the start."""
    return min(sum(c.isdigit() for c in response) / 32, 1.0)


def always_raises(response: str, answer: str, row: dict) -> float:
    raise RuntimeError("no grade today")
