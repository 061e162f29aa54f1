"""What a reward is: the settings of grading, and the way from graders' numbers to the number that is trained.

The graders are in rewards/graders.py; rewards/pool.py runs them beside decoding.
"""

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from config import ConfigError, option
from core import Reward, Sample

LARGEST_REWARD = 1e9  # float32 squares it and sums over all weights
LARGEST_WEIGHT = 1e5  # of advantages: float32 squares its product with a reward, too
Graded = tuple[Any, Reward]  # a reward, after the key that `submit` was given


@dataclass(frozen=True)
class RewardConfig:
    num_workers: int = option(2, "worker processes per rank, for graders that need them", min=1, max=1024)
    timeout_seconds: float = option(2.0, "time limit of a grading (RollPacker, section 4.3)", above=0, max=1e7)
    max_failures: int = option(
        3,
        "hangs, crashes or leaks in a row of a grader, or sandboxes that cannot be made, which end the run; 0: the run "
        "never ends for them",
        min=0,
    )
    worker_gib: float = option(
        4.0,
        "memory of its own at which a worker is killed and replaced; processes that it starts do not count",
        above=0,
        max=1e5,
    )
    max_queue: int = option(4096, "gradings that may wait per rank; when the queue is full, generation waits", min=1)
    concurrency: str = option(
        "", "gradings at a time per rank and grader, as math=1,code=2; other graders may use every worker"
    )
    also: str = option(
        "",
        "graders that grade every sample in addition to the grader of its row, and their weights in the sum, as "
        "mine.py:style=0.2,match=0.5; the row's own grader has weight 1",
    )
    weights: str = option("", "factor on the advantages of a grader's samples, as math=1,code=0.5; others: 1")
    case_factor: float = option(
        1.5,
        "limit of a test case over its slowest correct run (lambda; section 4.3); 0: always case_max_seconds",
        min=0,
        max=1e3,
    )
    case_quantile: float = option(
        0.99,
        "a case without a correct run uses this quantile of the other cases' slowest correct runs",
        above=0,
        max=1,
    )
    case_min_seconds: float = option(2.0, "shortest time limit of a test case (T_min)", above=0, max=1e7)
    case_max_seconds: float = option(30.0, "longest time limit of a test case (T_max)", above=0, max=1e7)
    case_audit: float = option(
        0.01, "share of responses whose cases get the longest limit, to count wrong time-outs", min=0, max=1
    )
    remote_seconds: float = option(
        30.0, "time limit of a grading by a grader with an http address, retries included", above=0, max=1e7
    )
    remote_retries: int = option(3, "how often a failed request is sent again", min=0, max=100)
    remote_concurrency: int = option(8, "requests at a time per rank", min=1, max=4096)
    startup_seconds: float = option(60.0, "time limit for a worker to load its graders", above=0, max=1e7)
    overlong_buffer: int = option(
        0, "the reward falls by 1 over this many tokens before the limit (DAPO, section 3.4); 0 = off", min=0
    )


def reward_number(value: object) -> float | None:
    """Return a grader's number, or None for a value that cannot be trained on: no number, not finite, or too large."""
    try:
        # As float64: LARGEST_REWARD as float16 is infinite, and nothing is over that.
        number = float(value) if isinstance(value, numbers.Real) else math.nan
    except OverflowError:
        return None
    return number if abs(number) <= LARGEST_REWARD else None  # nan is not


def overlong_penalty(num_tokens: int, max_tokens: int, buffer: int) -> float:
    """Return 0 up to `max_tokens - buffer`, falling linearly to -1 at `max_tokens`. (DAPO, eq. 13)"""
    if buffer == 0:
        return 0.0
    return -min(max((num_tokens - (max_tokens - buffer)) / buffer, 0.0), 1.0)


def shaped_reward(sample: Sample, reward: Reward, limit: int, buffer: int) -> float:
    """Return the reward that advantages are made of: the grader's, and the penalty for an overlong response.

    `limit`: most tokens of a response; `buffer`: over so many last tokens the penalty rises (`overlong_penalty`).
    """
    return reward.value + overlong_penalty(sample.num_sampled, limit, buffer)


def by_grader(key: str, text: str, kind: str = "GRADER") -> dict[str, float]:
    """Return the numbers of a setting like `math=1,code=0.5`. Raises ConfigError naming the `key`."""
    parsed = {}
    for part in filter(None, text.split(",")):
        name, equals, number = part.strip().rpartition("=")
        if name in parsed:
            raise ConfigError(f"{key}: {name} stands there twice; give it one number")
        try:
            parsed[name] = float(number)
            if not equals or not math.isfinite(parsed[name]):
                raise ValueError
        except ValueError:
            raise ConfigError(
                f"{key}: cannot read {part.strip()!r}; write {kind}=NUMBER, separated by commas"
            ) from None
    return parsed


def add_up(rewards: Mapping[str, Reward], weights: Mapping[str, float]) -> Reward:
    """Return the weighted sum of several graders' rewards of one sample. A failed grader counts 0 and is reported."""
    parts: dict[str, float] = {}
    for name, reward in rewards.items():
        parts |= {name: reward.value} | {f"{name}/{part}": value for part, value in reward.parts.items()}
    value = sum(weights[name] * reward.value for name, reward in rewards.items())
    errors = [reward.error for reward in rewards.values() if reward.error]
    if (number := reward_number(value)) is None:
        errors.append(f"the graders' weighted sum is {value:g}, not a finite number of at most {LARGEST_REWARD:g}")
    return Reward(
        number or 0.0,
        sum(reward.seconds for reward in rewards.values()),
        next(iter(errors), ""),
        next((reward.cases for reward in rewards.values() if reward.cases), ()),
        parts,
        next((tuple(weights[n] * turn for turn in reward.turns) for n, reward in rewards.items() if reward.turns), ()),
    )
