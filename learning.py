"""From graded groups to updates: advantages, what there is to learn, and the rest of the buffer on all ranks."""

from collections.abc import Mapping, Sequence

import torch

from buffer import SampleBuffer
from core import Example, Group, Prompt, Sample, SampleId
from loss import ADVANTAGES, LossConfig
from metrics import Record, quantiles
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
        if not (mask_truncated and sample.finish_reason == "length")
    ]


def put_groups(buffer: SampleBuffer, groups: Sequence[Group], advantages: torch.Tensor, mask_truncated: bool) -> None:
    """Feed a buffer with the groups of a round, or of a recorded one, and their advantages [P, R]."""
    for group, row in zip(groups, advantages.tolist(), strict=True):
        buffer.put(group.visit, examples_of(group.prompt, group.samples, row, mask_truncated))


def learn(trainer: Trainer, buffer: SampleBuffer) -> list[dict]:
    """Train all that waits in the buffer, in `updates_per_step` updates; return the statistics of each. Collective."""
    world, num_updates = trainer.world, trainer.config.updates_per_step
    assert not buffer.taken or num_updates == 1, "gradients of later updates were taken with the weights of the first"
    shares = [batch[world.rank] for batch in buffer.deal(world.size, num_updates)]
    if trainer.loss.old_logprobs == "trainer" and num_updates > 1:
        shares = [trainer.with_old_logprobs(share) for share in shares]
    updates = []
    for share in shares:
        trainer.accumulate(share)
        updates.append(trainer.update())
    return updates


def audit_report(
    accepted: Sequence[SampleId], responses: Mapping[SampleId, tuple[int, float]], loss: LossConfig
) -> Record:
    """Compare what a race keeps with what it leaves out, all having run to their end.

    `responses`: (tokens, reward) of every launched response. Advantages are those within all launched responses of a
    prompt. Sets: `accepted` is trained; `censored_responses`, of the same prompts, are lost and bias the groups towards
    short responses; the responses of `censored_prompts` are only put off to another round.
    """
    ids = sorted(responses)
    prompts = sorted({id.visit for id in ids})
    rewards = torch.tensor([responses[id][1] for id in ids], dtype=torch.float64).view(len(prompts), -1)  # [P, R]
    advantages = dict(zip(ids, ADVANTAGES[loss.advantage](rewards).flatten().tolist(), strict=True))
    kept, kept_prompts = set(accepted), {id.visit for id in accepted}
    sets = {
        "accepted": [id for id in ids if id in kept],
        "censored_responses": [id for id in ids if id not in kept and id.visit in kept_prompts],
        "censored_prompts": [id for id in ids if id.visit not in kept_prompts],
    }
    return {
        name: {
            "responses": len(part),
            "length": quantiles([responses[id][0] for id in part]),
            "reward": quantiles([responses[id][1] for id in part]),
            "advantage": quantiles([advantages[id] for id in part]),
        }
        for name, part in sets.items()
    }
