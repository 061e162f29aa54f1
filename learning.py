"""From graded groups to updates: advantages, what there is to learn, and the rest of the buffer on all ranks."""

import itertools
from collections.abc import Callable, Sequence

import torch

import parallel
from buffer import SampleBuffer
from core import Example, Group, Prompt, Sample
from loss import ADVANTAGES, LossConfig
from reward import RewardConfig, by_grader, shaped_reward
from trainer import Trainer


def group_advantages(groups: Sequence[Group], loss: LossConfig, reward: RewardConfig, limit: int) -> torch.Tensor:
    """Return advantages [P, R] float64 from the rewards, the penalty for overlong answers and the graders' weights.

    `limit`: most tokens of a response.
    """
    shaped = [
        [shaped_reward(*graded, limit, reward.overlong_buffer) for graded in zip(g.samples, g.rewards)] for g in groups
    ]
    return advantages_of(shaped, [group.prompt.task for group in groups], loss, reward)


def advantages_of(
    shaped: Sequence[Sequence[float]], tasks: Sequence[str], loss: LossConfig, reward: RewardConfig
) -> torch.Tensor:
    """Return advantages [P, R] float64 from shaped rewards and each prompt's grader."""
    # A factor on the rewards themselves would cancel where advantages are divided by their spread.
    weights = by_grader("reward.weights", reward.weights)
    weight = torch.tensor([weights.get(task, 1.0) for task in tasks], dtype=torch.float64)
    return ADVANTAGES[loss.advantage](torch.tensor(shaped, dtype=torch.float64)) * weight[:, None]


def examples_of(
    prompt: Prompt, samples: Sequence[Sample], advantages: Sequence[float], mask_truncated: bool
) -> list[Example]:
    """Return what there is to learn from samples of one prompt."""
    return [
        Example(sample.id, prompt.token_ids, sample.token_ids, sample.spans, sample.logprobs, advantage)
        for sample, advantage in zip(samples, advantages, strict=True)
        if not (mask_truncated and sample.is_truncated)
    ]


def put_groups(buffer: SampleBuffer, groups: Sequence[Group], advantages: torch.Tensor, mask_truncated: bool) -> None:
    """Feed a buffer with the groups of a round, or of a recorded one, and their advantages [P, R]."""
    for group, row in zip(groups, advantages.tolist(), strict=True):
        buffer.put(group.visit, examples_of(group.prompt, group.samples, row, mask_truncated))


def learn(trainer: Trainer, buffer: SampleBuffer, progress: Callable[[], None] = lambda: None) -> list[dict]:
    """Train all that waits in the buffer, in `updates_per_step` updates; return the statistics of each. Collective.

    `progress` is called after each micro-batch.
    """
    world, num_updates = trainer.world, trainer.config.updates_per_step
    assert not buffer.taken or num_updates == 1, "gradients of later updates were taken with the weights of the first"
    shares = [
        parallel.bring_tokens(world, batch[world.rank], itertools.chain(*batch))
        for batch in buffer.deal(world.size, num_updates)
    ]
    if trainer.loss.old_logprobs == "trainer" and num_updates > 1:
        shares = [trainer.with_old_logprobs(share) for share in shares]
    updates = []
    for share in shares:
        trainer.accumulate(share, progress)
        updates.append(trainer.update())
    return updates
