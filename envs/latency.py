"""Seconds that environments take to answer, drawn: to measure the cost of waiting for real ones. Pure.

The pool holds replies back for these seconds (pool.py); the simulator adds them to its clock.
"""

import json
import math
import re
from collections.abc import Callable, Hashable
from pathlib import Path
from random import Random

from config import ConfigError, regular

NUMBER = r"\s*(\d+\.?\d*(?:e-?\d+)?)\s*"


class Latency:
    """The seconds of every turn, for the options env.latency, env.slow and env.stop. Raises ConfigError.

    An episode has an environment of its own (a container, say). So it is slow, or stops, in all its turns.
    """

    def __init__(self, latency: str, slow: str = "", stop: float = 0.0):
        self._draw, self._stop = _distribution(latency), stop
        match = re.fullmatch(NUMBER + "x" + NUMBER, slow or "0x1")
        self._share, self._factor = map(float, match.groups()) if match else (math.nan, math.nan)
        if not (self._share <= 1 and 1 <= self._factor < math.inf):
            raise ConfigError(
                f"env.slow = {slow}: give the share of episodes that are slow, and how many times as slow, as 0.01x10"
            )
        if slow and not latency:
            raise ConfigError(f"env.slow = {slow} has no effect without env.latency; give it, or leave env.slow out")

    def seconds(self, seed: int, id: Hashable, turn: int, attempt: int = 0) -> float:
        """Return the seconds from the end of a turn (0, 1, ...) to its answer; inf: there is none.

        A function of its arguments, so that a run can be repeated: a prompt that is launched anew waits as it did at
        first. `id`: of the sample; `attempt`: how often its episode has failed and begun again.
        """
        episode = Random(f"environment {seed} {id} {attempt}")
        if episode.random() < self._stop:
            return math.inf
        factor = self._factor if episode.random() < self._share else 1.0
        return factor * max(self._draw(Random(f"latency {seed} {id} {attempt} {turn}")), 0.0)


def _distribution(text: str) -> Callable[[Random], float]:
    """Return the function that draws seconds from the distribution that env.latency names."""
    if not text:
        return lambda _: 0.0
    if text.startswith("recorded "):
        recorded = _recorded(text.removeprefix("recorded ").strip())
        return lambda rng: rng.choice(recorded)
    match = re.fullmatch(rf"(normal|lognormal)\({NUMBER},{NUMBER}\)", text)
    name, mean, deviation = (match[1], float(match[2]), float(match[3])) if match else ("", 0.0, 0.0)
    if not (0 < mean < math.inf and deviation < math.inf):
        raise ConfigError(
            f"env.latency = {text}: give normal(10,5) or lognormal(10,5), mean and standard deviation in seconds, or "
            "recorded FILE"
        )
    if name == "normal":
        return lambda rng: rng.gauss(mean, deviation)
    variance = math.log1p((deviation / mean) ** 2)  # of the logarithm
    return lambda rng: rng.lognormvariate(math.log(mean) - variance / 2, math.sqrt(variance))


def _recorded(path: str) -> list[float]:
    """Return the seconds in a file: a number, or an object with `seconds`, in every line."""
    try:
        lines = Path(regular(path)).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"env.latency: cannot read {path} ({error})") from None
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            value = json.loads(line)
            found.append(float(value["seconds"] if isinstance(value, dict) else value))
        except (ValueError, KeyError, TypeError):
            found.append(math.nan)
        if not 0 <= found[-1] < math.inf:
            raise ConfigError(f"env.latency: {path}:{number} is {line!r:.60}, not a number of seconds")
    if not found:
        raise ConfigError(f"env.latency: {path} is empty; give the seconds of a turn in every line")
    return found
