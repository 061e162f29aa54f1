"""Graders that get given texts instead of what random weights write. Shared by benchmarks."""

import math
import time
from collections.abc import Hashable, Iterable
from random import Random
from typing import Any

from core import Reward, SampleId
from rewards.judge import AllGraders
from tasks import HIDDEN, SHOWN, TASKS

ENDLESS = "sum(iter(int, 1))"
SHARE_ENDLESS = 0.05  # of responses
SHARE_UNSOLVED = 0.2  # of prompts: none of their responses is right, so nothing tells how long one would take
MEDIAN_SECONDS, SPREAD = 0.02, 0.7  # what a prompt's programs take beside their start: log-normal over prompts


class Scripted:
    """A contender's graders. They get given texts, for random weights write nothing; `late`, only when all is known."""

    def __init__(self, graders: AllGraders, text: Any, late: bool):
        self.graders, self.text, self.late = graders, text, late
        self.held: list[tuple] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.graders, name)  # what does not concern the texts

    def submit(self, key: SampleId, task: str, response: str, answer: str, row: dict) -> None:
        self.held.append((key, task, self.text(key, row), answer, row))
        if not self.late:
            self._release()

    def _release(self) -> None:
        for arguments in self.held:
            self.graders.submit(*arguments)
        self.held = []

    def forget(self, keep: Iterable[Hashable]) -> None:
        keep = set(keep)
        self.held = [arguments for arguments in self.held if arguments[0] in keep]
        self.graders.forget(keep)

    def drain(self) -> list[tuple[Hashable, Reward]]:
        self._release()
        return self.graders.drain()

    def settle(self) -> None:
        """Wait for what nobody wants any more and yet runs: else it would run in the next contender's turn."""
        while any(self.graders.pool._queue._running.values()):
            time.sleep(0.002)


def program(key: SampleId, row: dict) -> str:
    """Return the program that the trace has for this sample: half are right for prompts that are solved at all."""
    rng, nature, task = Random(f"program {key}"), Random(f"nature {row['number']}"), TASKS["expression"]
    if rng.random() < SHARE_ENDLESS:
        return ENDLESS
    solution = task.solution(row["number"])
    is_solved = nature.random() >= SHARE_UNSOLVED
    solution = task.slip(solution, rng, rng.choice((0, 1))) if is_solved else f"{solution}+1"
    seconds = MEDIAN_SECONDS * math.exp(SPREAD * nature.gauss()) / len(SHOWN + HIDDEN)  # at each place
    return f"__import__('time').sleep({seconds:.4f}) or {solution}"
