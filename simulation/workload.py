"""Prompts and the lengths of their responses: from a fitted model, or from a recorded run. Pure.

The length model has two parts. A body: a prompt has a median length, log-normal over prompts, and its responses spread
around it, log-normal again. A tail: with a probability of its prompt, a response never stops by itself.
"""

import json
import math
import tomllib
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Protocol

from config import ConfigError, option
from core import Prompt, VisitId


class Lengths(Protocol):
    """A source of prompts and lengths of their responses."""

    limit: int  # most tokens of a response

    def prompts(self, count: int) -> list[Prompt]: ...
    def lengths(self, id: VisitId, count: int, step: int) -> list[int]: ...


@dataclass(frozen=True)
class LengthModel:
    median: float = option(500.0, "median response tokens (fitted)", above=0)
    prompt_spread: float = option(0.8, "spread of the prompts' medians, in natural logarithms (fitted)", min=0)
    response_spread: float = option(0.6, "spread of a prompt's responses around its median (fitted)", min=0)
    runaway: float = option(0.02, "share of responses that run to the limit (fitted)", min=0, max=0.9)
    runaway_gather: float = option(
        0.5, "how much prompts differ in the share runaway: 0 all the same, 1 all or none (fitted)", min=0, max=1
    )
    limit: int = option(8192, "most tokens of a response", min=1)
    prompt_tokens: int = option(200, "tokens of a prompt", min=1)
    code: float = option(1 / 3, "share of prompts graded by running code", min=0, max=1)
    judge: float = option(1 / 3, "share of prompts graded by a judge model; the rest by a rule", min=0, max=1)
    solved: float = option(0.5, "share of responses with reward 1", min=0, max=1)


class Drawn:
    """Lengths drawn from the model. A prompt keeps its median and tail; each visit draws its responses anew."""

    def __init__(self, model: LengthModel, seed: int = 0):
        self.model, self.seed, self.limit = model, seed, model.limit

    def prompts(self, count: int) -> list[Prompt]:
        ids = (0,) * self.model.prompt_tokens
        rng = Random(f"tasks {self.seed}")
        code, judge = self.model.code, self.model.judge
        tasks = [
            "code" if (u := rng.random()) < code else "judge" if u < code + judge else "rule" for _ in range(count)
        ]
        return [Prompt(i, ids, "", "", task) for i, task in enumerate(tasks)]

    def lengths(self, id: VisitId, count: int, step: int) -> list[int]:
        m, nature = self.model, Random(f"{self.seed} {id}")
        center = math.log(m.median) + m.prompt_spread * nature.gauss()
        runaway = m.runaway
        if 0 < m.runaway and 0 < m.runaway_gather < 1:
            strength = 1 / m.runaway_gather - 1  # a + b of a beta distribution whose classes correlate by `gather`
            runaway = nature.betavariate(m.runaway * strength, (1 - m.runaway) * strength)
        elif m.runaway_gather == 1:
            runaway = float(nature.random() < m.runaway)
        rng = Random(f"{self.seed} {id} {step}")
        return [self._one(rng, center, runaway) for _ in range(count)]

    def _one(self, rng: Random, center: float, runaway: float) -> int:
        length = math.exp(center + self.model.response_spread * rng.gauss())
        return self.model.limit if rng.random() < runaway else min(max(round(length), 1), self.model.limit)


class Recorded:
    """Lengths of the trained responses of a run with run.dump_rollouts, visit by visit; without replies to their turns.

    An aborted response has no recorded length; it takes the length of a trained response, the longest first.
    """

    def __init__(self, folder: str | Path):
        files = sorted(Path(folder, "rollouts").glob("step_*.jsonl"))
        if not files:
            raise ConfigError(f"{folder}: no rollouts/step_*.jsonl; record the run with --run.dump_rollouts=true")
        self.groups: dict[VisitId, list[int]] = {}
        self.known: dict[int, Prompt] = {}
        try:
            for file in files:
                for line in file.read_text(encoding="utf-8").splitlines():
                    self._add(json.loads(line))
            saved = tomllib.loads(Path(folder, "config.toml").read_text(encoding="utf-8"))
            rollout = {key: saved["rollout"][key] for key in ("tensor_parallel", "max_running", "page_size")}
            parts = {"scheduler": saved["scheduler"], "cluster": rollout, "planner": {"rule": saved["planner"]["rule"]}}
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{folder}: not a run folder of train.py ({error!r})") from None
        self.limit = int(saved["rollout"].get("max_response_tokens", max(map(max, self.groups.values()))))
        parts |= {"stream": saved.get("stream", {"policy": "off"}), "overlap": saved.get("overlap", {})}
        self.settings = [f"--{s}.{k}={_text(v)}" for s, values in parts.items() for k, v in values.items()]

    def _add(self, group: dict) -> None:
        prompt = group["prompt"]
        index = prompt["index"]
        self.known[index] = Prompt(index, tuple(prompt["token_ids"]), "", "", prompt["task"])
        self.groups[VisitId(group["epoch"], index)] = [
            sum(span["end"] - span["start"] for span in sample["spans"]) for sample in group["samples"]
        ]

    def prompts(self, count: int) -> list[Prompt]:
        return list(self.known.values())

    def lengths(self, id: VisitId, count: int, step: int) -> list[int]:
        seen = self.groups.get(id) or self.groups[self._nearest(id)]
        return [*seen, *sorted(seen, reverse=True) * (count // len(seen) + 1)][:count]

    def _nearest(self, id: VisitId) -> VisitId:
        return min((key for key in self.groups if key.prompt == id.prompt), key=lambda key: abs(key.epoch - id.epoch))


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
