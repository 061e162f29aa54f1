"""From graded groups to one update: advantages, what is learnt from, and who learns what."""

from collections.abc import Collection, Sequence

import torch

from core import Group, Prompt, Sample, SampleId
from loss import ADVANTAGES
from policies.placement import assign_by_load
from reward import by_grader
from rounds import shaped_reward
from settings import Config
from trainer import Example, Trainer


def group_advantages(groups: Sequence[Group], config: Config) -> torch.Tensor:
    """Return advantages [P, R] float64 from the rewards, the penalty for overlong answers and the graders' weights."""
    rewards = [[shaped_reward(config, *graded) for graded in zip(g.samples, g.rewards)] for g in groups]
    return advantages_of(rewards, [group.prompt.task for group in groups], config)


def advantages_of(rewards: Sequence[Sequence[float]], tasks: Sequence[str], config: Config) -> torch.Tensor:
    """Return advantages [P, R] float64 from shaped rewards and each prompt's grader."""
    # A factor on the rewards themselves would cancel where advantages are divided by their spread.
    weights = by_grader("reward.weights", config.reward.weights)
    weight = torch.tensor([weights.get(task, 1.0) for task in tasks], dtype=torch.float64)
    return ADVANTAGES[config.loss.advantage](torch.tensor(rewards, dtype=torch.float64)) * weight[:, None]


def examples_of(
    prompt: Prompt, samples: Sequence[Sample], advantages: Sequence[float], config: Config
) -> list[tuple[SampleId, Example]]:
    """Return what there is to learn from samples of one prompt."""
    return [
        (sample.id, Example(prompt.token_ids, sample.token_ids, sample.logprobs, advantage))
        for sample, advantage in zip(samples, advantages, strict=True)
        if not (config.loss.mask_truncated and sample.finish_reason == "length")
    ]


def learn(
    trainer: Trainer,
    groups: Sequence[Group],
    advantages: torch.Tensor,
    config: Config,
    done: Collection[SampleId] = (),
) -> list[dict]:
    """Turn a step's groups into gradients and `updates_per_step` updates; return the statistics of each. Collective.

    Samples in `done` have their gradients in some rank's sums already.
    """
    world, num_updates = trainer.world, config.trainer.updates_per_step
    assert not done or num_updates == 1, "gradients of later updates were taken with the weights of the first"
    shares = []
    for part in range(num_updates):
        examples = [
            example
            for group, row in list(zip(groups, advantages.tolist()))[part::num_updates]
            for id, example in examples_of(group.prompt, group.samples, row, config)
            if id not in done
        ]
        own = assign_by_load([e.num_tokens for e in examples], world.size)[world.rank]
        shares.append([examples[i] for i in own])
    if config.loss.old_logprobs == "trainer" and num_updates > 1:
        shares = [trainer.with_old_logprobs(share) for share in shares]
    updates = []
    for share in shares:
        trainer.accumulate(share)
        updates.append(trainer.update())
    return updates
