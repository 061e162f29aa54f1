"""A worker process of `rewards.pool.RewardPool`: it is asked for rewards."""

import os
import sys
from collections.abc import Callable
from dataclasses import astuple

sys.path[0] = os.path.dirname(sys.path[0])  # not rewards/, where Python starts this file
from process import serving
from rewards import user_files
from rewards.graders import WARM_UP, grade, resolve_grader


def load(tasks: list[str]) -> Callable[[str, str, str, dict], tuple]:
    """Return the function that grades. Raises ConfigError for a task without a grader."""
    graders, folders = {}, {}
    for task in tasks:
        graders[task], folders[task] = resolve_grader(task), user_files.entered
        if task in WARM_UP:
            WARM_UP[task]()

    def graded(task: str, response: str, answer: str, row: dict) -> tuple:
        user_files.enter(folders[task])
        return astuple(grade(graders[task], response, answer, row))

    return graded


if __name__ == "__main__":
    serving.serve(lambda: load(sys.argv[1:]))
