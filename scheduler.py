"""Round policies: which prompts a step launches. Pure state machines, no torch.

One entry in POLICIES for each; a policy sees the data set only through `take`, so it cannot lose a prompt.
"""

from collections.abc import Callable
from dataclasses import dataclass

from config import option
from core import Prompt, RoundPlan

Take = Callable[[int], list[tuple[int, Prompt]]]


class Synchronous:
    """The baseline: every step launches exactly P0 prompts with R0 responses each and waits for all of them."""

    def __init__(self, config: "SchedulerConfig"):
        self.config = config

    def plan(self, take: Take) -> RoundPlan:
        return RoundPlan("long", tuple(take(self.config.num_prompts)), self.config.num_responses)


POLICIES = {"synchronous": Synchronous}


@dataclass(frozen=True)
class SchedulerConfig:
    policy: str = option(
        "synchronous", "round policy: synchronous (launch P0 x R0, wait for all)", choices=tuple(POLICIES)
    )
    num_prompts: int = option(
        32, "prompts trained per step over all ranks (P0); a multiple of the number of ranks", min=1
    )
    num_responses: int = option(
        8, "responses trained per prompt (R0); a step trains num_prompts x num_responses samples", min=2
    )
