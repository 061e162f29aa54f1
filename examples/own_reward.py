"""A reward of your own: own.toml names it as data.task = "examples/own_reward.py:brief"."""


def brief(response: str, answer: str, row: dict) -> float:
    """1 for the right answer, up to 0.1 more for a brief one. `row` has all fields of the data, such as `number`."""
    right = response.rpartition("=")[2] == answer
    return right * (1.1 - min(len(response), 100) / 1000)
