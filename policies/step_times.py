"""The seconds of a replica's steps: from a profile, or from a run's own windows. Pure, no torch.

The planner's predictions, the simulator's replicas and the stream policy all ask a `StepTimes`. Those here are fitted
to measurements; simulation/costs.py has a roofline.
"""

import json
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from config import ConfigError, regular

PROFILE_NAME = "rollout_profile.json"
WINDOWS = 256  # windows whose step times are remembered

Window = Sequence[float]  # sequences that decode together, tokens of context in all, seconds of a step


class StepTimes:
    """The seconds of one replica's steps. Every token of context that a decode step reads costs the same."""

    capacity: int  # tokens in the pages of the replica
    response_seconds = 0.0  # of each response, whatever its length

    def decode(self, sequences: float, context: float, steps: int = 1) -> float:
        """Return the seconds of `steps` decode steps of the same sequences, with `context` tokens cached at first."""
        step, token = self.costs(sequences)
        read = steps * context + sequences * steps * (steps - 1) / 2
        return steps * step + read * token

    def costs(self, sequences: float) -> tuple[float, float]:
        """Return the seconds of a decode step of so many sequences but for their context, and of each token of that."""
        raise NotImplementedError

    def prefill(self, tokens: int) -> float:
        """Return the seconds of computing `tokens` of context; the first token to follow is drawn by that."""
        raise NotImplementedError


# ---- the offline profile -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SizeProfile:
    """The measured pages and step times of one replica of a tensor-parallel size."""

    pages: int
    decode: tuple[tuple[int, int, float], ...]  # (sequences, tokens of context each, seconds of a step)
    prefill: tuple[tuple[int, float], ...]  # (tokens of context, seconds of a token)


@dataclass(frozen=True)
class Profile:
    """Measured prefill and decode times of a model on a machine, by tensor-parallel size."""

    made_on: dict[str, object]  # the times depend on it: model, device, number of ranks, page size
    sizes: dict[int, SizeProfile]

    def save(self, path: Path) -> None:
        part = path.with_suffix(".part")
        part.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        part.replace(path)


REMEDY = "make it by profiler.py, started as this run is: with its settings and its ranks, by python or by torchrun"


def load_profile(path: Path, made_on: dict[str, object], sizes: Sequence[int]) -> Profile:
    """Read a profile. Raises ConfigError when there is none, or one of other conditions."""
    profile = read_profile(path)
    if profile.made_on != made_on:
        raise ConfigError(f"{path}: made on {profile.made_on}, this run is on {made_on}; {REMEDY}")
    if missing := set(sizes) - profile.sizes.keys():
        raise ConfigError(f"{path}: no times for tensor-parallel sizes {sorted(missing)}; {REMEDY}")
    return profile


def read_profile(path: Path) -> Profile:
    """Read a profile, whatever it was made on. Raises ConfigError when there is none."""
    try:
        raw = json.loads(regular(path).read_text(encoding="utf-8"))
        by_size = {
            int(n): SizeProfile(p["pages"], tuple(map(tuple, p["decode"])), tuple(map(tuple, p["prefill"])))
            for n, p in raw["sizes"].items()
        }
        return Profile(dict(raw["made_on"]), by_size)
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the rollout profile ({error.strerror}); {REMEDY}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: not a rollout profile ({error}); {REMEDY}") from None


# ---- fitted times ------------------------------------------------------------------------------------------------


class FittedTimes(StepTimes):
    """Fitted to windows, and to those that `observe` adds. Without any, everything takes no time."""

    def __init__(self, capacity: int, windows: Iterable[Window] = (), prefill: Sequence[tuple[int, float]] = ()):
        """`prefill`: (tokens of context, seconds of a token)"""
        self.capacity = capacity
        self.windows = deque(windows, maxlen=WINDOWS)
        # Seconds of a token, and of each token of its context.
        self.prefill_weights = fit([(1, n) for n, _ in prefill], [s for _, s in prefill]) if prefill else [0.0, 0.0]
        self._weights: list[float] | None = None

    @classmethod
    def of(cls, profile: SizeProfile, page_size: int) -> "FittedTimes":
        windows = [(n, n * context, seconds) for n, context, seconds in profile.decode]
        return cls(profile.pages * page_size, windows, profile.prefill)

    def observe(self, sequences: float, context: float, seconds: float) -> None:
        """Take in a window: sequences that decoded together, tokens of context in all, seconds of a step."""
        self.windows.append((sequences, context, seconds))
        self._weights = None

    @property
    def weights(self) -> list[float]:
        """Seconds of a decode step, for each sequence in it, and for each token that it reads."""
        if self._weights is None:
            points = [(1, n, tokens) for n, tokens, _ in self.windows]
            self._weights = fit(points, [seconds for *_, seconds in self.windows]) if points else [0.0, 0.0, 0.0]
        return self._weights

    def costs(self, sequences: float) -> tuple[float, float]:
        start, each, token = self.weights
        return start + sequences * each, token

    def prefill(self, tokens: int) -> float:
        token, attend = self.prefill_weights
        return tokens * (token + tokens * attend)


def fit(features: Sequence[tuple[float, ...]], seconds: Sequence[float]) -> list[float]:
    """Return a weight of at least 0 for each feature: least squares of the relative error, so that noise cancels."""
    x = np.array(features, np.float64) / np.array(seconds)[:, None]
    used = [i for i in range(x.shape[1]) if x[:, i].any()]  # what never came has no weight
    while True:
        scale = np.abs(x[:, used]).max(0)
        weights = np.linalg.lstsq(x[:, used] / scale, np.ones(len(x)), rcond=None)[0] / scale
        if weights.min() >= 0:
            found = dict(zip(used, weights.tolist()))
            return [found.get(i, 0.0) for i in range(x.shape[1])]
        del used[int(np.argmin(weights * scale))]  # time does not fall with work: that was noise
