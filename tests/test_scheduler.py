"""Round policies over a real cursor: whatever they launch, every prompt is trained once per epoch."""

from collections import Counter

import pytest

from core import Prompt
from data import PromptStream
from scheduler import POLICIES, SchedulerConfig


def make_stream(count: int, seed: int = 0) -> PromptStream:
    return PromptStream([Prompt(i, (i,), str(i), "", "match") for i in range(count)], seed)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("num_prompts, count", [(1, 5), (4, 12), (5, 12), (12, 12), (20, 12)])
def test_every_prompt_is_launched_once_per_epoch(name: str, num_prompts: int, count: int) -> None:
    epochs, stream = 5, make_stream(count)
    policy = POLICIES[name](SchedulerConfig(name, num_prompts, 3))
    launched: Counter = Counter()
    while min((epoch for epoch, _ in launched), default=0) < epochs and stream.epoch <= epochs:
        plan = policy.plan(stream.take)
        launched.update((epoch, prompt.index) for epoch, prompt in plan.prompts)
    assert set(launched.values()) == {1}
    assert {name for name in launched if name[0] < epochs} == {(e, i) for e in range(epochs) for i in range(count)}


def test_synchronous_launches_exactly_what_it_trains_and_waits_for_all() -> None:
    stream = make_stream(10)
    policy = POLICIES["synchronous"](SchedulerConfig("synchronous", 4, 8))
    plans = [policy.plan(stream.take) for _ in range(5)]
    assert all(len(plan.prompts) == 4 and plan.num_responses == 8 and plan.kind == "long" for plan in plans)
    assert [pair for plan in plans for pair in plan.prompts] == make_stream(10).take(20)  # in the cursor's order


def test_two_copies_of_a_policy_make_the_same_plans() -> None:
    def plans() -> list:
        policy, stream = POLICIES["synchronous"](SchedulerConfig("synchronous", 3, 2)), make_stream(7, seed=4)
        return [policy.plan(stream.take) for _ in range(6)]

    assert plans() == plans()


def test_a_config_can_name_every_policy() -> None:
    field = SchedulerConfig.__dataclass_fields__["policy"]
    assert field.metadata["choices"] == tuple(POLICIES) and all(name in field.metadata["help"] for name in POLICIES)
