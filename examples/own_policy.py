"""A round policy of your own: `python examples/own_policy.py --config FILE.toml --scheduler.policy=longest_first`.

It takes what train.py takes. To build it in, and to simulate it, put the class and its entry into scheduler.py.
"""

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import train
from core import RoundPlan
from scheduler import POLICIES, Synchronous, Take


class LongestFirst(Synchronous):
    """Synchronous rounds that start the longest prompts first."""

    def plan(self, take: Take, steps_left: int) -> RoundPlan:
        plan = super().plan(take, steps_left)
        prompts = sorted(plan.prompts, key=lambda visit: -len(visit.prompt.token_ids))
        return replace(plan, prompts=tuple(prompts), expected=())  # `expected` is in the order of before


POLICIES["longest_first"] = LongestFirst

if __name__ == "__main__":
    sys.exit(train.main(sys.argv[1:], script=__file__))
