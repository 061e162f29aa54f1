"""Environments of the tests, named in configs by file and function."""

import time
from pathlib import Path
from random import SystemRandom

from core import Reply, Turns
from envs.games import guess  # noqa: F401 - as a user's environment


def chat(row: dict, seed: int) -> Turns:
    """Three to six turns; replies say how long a turn was, and digits are rewarded at once."""
    reward, text = 0.0, f"{seed % 7}:"
    for _ in range(3 + seed % 4):
        action = yield Reply(text, reward)
        reward, text = min(sum(c.isdigit() for c in action) / 8, 1.0), f"[{len(action)}]"
    return reward


def slow_chat(row: dict, seed: int) -> Turns:
    """`chat`, with replies that take other times in each run."""
    turns, action = chat(row, seed), None
    try:
        while True:
            reply = turns.send(action)
            time.sleep(SystemRandom().random() / 50)
            action = yield reply
    except StopIteration as ended:
        return ended.value


def many_turns(row: dict, seed: int) -> Turns:
    """One to thirty turns."""
    for turn in range(1 + seed % 30):
        yield f"{turn}" if turn else ""
    return 1.0


def breaks(row: dict, seed: int) -> Turns:
    yield ""
    raise KeyError("no such door")


def is_silent(row: dict, seed: int) -> Turns:
    yield ""
    yield ""
    return None


def fills(row: dict, seed: int) -> Turns:
    yield "x" * 500
    return None


def needs_patience(row: dict, seed: int) -> Turns:
    """`chat`, with replies that take their time, and whose first episodes of a prompt fail."""
    tries = Path(row["folder"]) / str(seed)
    with open(tries, "a", encoding="utf-8") as file:
        file.write(".")
    turns, action = chat(row, seed), None
    try:
        while True:
            text = turns.send(action)
            action = yield text
            time.sleep(SystemRandom().random() / 50)
            if tries.stat().st_size < 13:  # of four responses, each tried three times
                raise ConnectionError("nobody answers")
    except StopIteration as ended:
        return ended.value


def guesses(row: dict, seed: int) -> Turns:
    """Another text each time: an episode that cannot be replayed."""
    yield f"{SystemRandom().random()}"
    return 0.0


def stumbles(row: dict, seed: int) -> Turns:
    """Three turns. The second fails as long as there are stones in the row's folder, and takes one away."""
    yield "a"
    yield "b"
    for stone in Path(row["folder"]).iterdir():
        stone.unlink()
        raise ConnectionError("a stone")
    yield "c"
    return 1.0


def unreliable(row: dict, seed: int) -> Turns:
    """`chat`, in which this share of replies fails."""
    turns = chat(row, seed)
    reply = next(turns)
    while True:
        action = yield reply
        if SystemRandom().random() < row.get("share", 0.2):
            raise ConnectionError("nobody answers")
        try:
            reply = turns.send(action)
        except StopIteration as ended:
            return ended.value
