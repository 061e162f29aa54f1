"""From graded groups to updates: advantages, what there is to learn, and the rest of the buffer on all ranks."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

import parallel
from buffer import SampleBuffer
from core import Example, Group, Prompt, Sample, SampleId, VisitId, turns_of
from loss import ADVANTAGES, LossConfig
from reward import RewardConfig, by_grader, shaped_reward
from trainer import Trainer, work_of


def group_advantages(groups: Sequence[Group], loss: LossConfig, reward: RewardConfig, limit: int) -> torch.Tensor:
    """Return advantages [P, R] float64 from the rewards, the penalty for overlong answers and the graders' weights.

    `limit`: most tokens of a response.
    """
    shaped = [_shaped(group, reward, limit) for group in groups]
    return advantages_of(shaped, [group.prompt.task for group in groups], loss, reward)


def _shaped(group: Group, reward: RewardConfig, limit: int) -> list[float]:
    return [shaped_reward(*graded, limit, reward.overlong_buffer) for graded in zip(group.samples, group.rewards)]


def turn_advantages(
    groups: Sequence[Group], loss: LossConfig, reward: RewardConfig, limit: int
) -> dict[SampleId, tuple[float, ...]]:
    """Return an advantage for each turn of each sample, for `loss.credit` = turn.

    A turn's return is the reward, penalty included, less what the turns before it have earned. `loss.advantage`
    compares it with the returns of the same turn in the group's other samples, of those that have so many turns.
    """
    found: dict[SampleId, tuple[float, ...]] = {}
    for group in groups:
        own: list[list[float]] = [[] for _ in group.samples]
        for returns in _returns(group, reward, limit):
            [row] = advantages_of([[*returns.values()]], [group.prompt.task], loss, reward).tolist()
            for i, advantage in zip(returns, row, strict=True):
                own[i].append(advantage)
        found |= {sample.id: tuple(values) for sample, values in zip(group.samples, own, strict=True)}
    return found


def _returns(group: Group, reward: RewardConfig, limit: int) -> list[dict[int, float]]:
    """Return, for each turn, the returns of the samples that have so many turns, by their place in the group."""
    turns: list[dict[int, float]] = []
    for i, (sample, graded, total) in enumerate(zip(group.samples, group.rewards, _shaped(group, reward, limit))):
        earned = itertools.accumulate(itertools.chain(graded.turns, itertools.repeat(0.0)), initial=0.0)
        for turn, (_, before) in enumerate(zip(turns_of(sample.spans), earned)):
            if turn == len(turns):
                turns.append({})
            turns[turn][i] = total - before
    return turns


def visits_of(groups: Sequence[Group], loss: LossConfig, reward: RewardConfig, limit: int) -> dict[VisitId, bool]:
    """Return the visits of these groups, and whether what advantages are made of differs within the group."""

    def varies(group: Group) -> bool:
        if loss.credit == "turn":
            return any(len({*returns.values()}) > 1 for returns in _returns(group, reward, limit))
        return len({*_shaped(group, reward, limit)}) > 1

    return {group.visit: varies(group) for group in groups}


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
        Example(
            sample.id,
            prompt.token_ids,
            sample.token_ids,
            sample.spans,
            sample.logprobs,
            advantage,
            experts=sample.experts,
        )
        for sample, advantage in zip(samples, advantages, strict=True)
        if not (mask_truncated and sample.is_truncated)
    ]


def told_advantages(
    groups: Sequence[Group], advantages: torch.Tensor, loss: LossConfig, reward: RewardConfig, limit: int
) -> list[list[float | tuple[float, ...]]]:
    """Return the advantage of each sample, in lists [P][R]; for `loss.credit` = turn those of its turns."""
    by_turn = turn_advantages(groups, loss, reward, limit) if loss.credit == "turn" else {}
    return [
        [by_turn.get(sample.id, advantage) for sample, advantage in zip(group.samples, row, strict=True)]
        for group, row in zip(groups, advantages.tolist(), strict=True)
    ]


def put_groups(
    buffer: SampleBuffer,
    groups: Sequence[Group],
    advantages: torch.Tensor,
    loss: LossConfig,
    reward: RewardConfig,
    limit: int,
) -> None:
    """Feed a buffer with the groups of a round, or of a recorded one, and their advantages [P, R]."""
    told = told_advantages(groups, advantages, loss, reward, limit)
    for group, row, own in zip(groups, advantages.tolist(), told, strict=True):
        by_turn = {s.id: a for s, a in zip(group.samples, own, strict=True) if isinstance(a, tuple)}
        examples = examples_of(group.prompt, group.samples, row, loss.mask_truncated)
        buffer.put(group.visit, [replace(e, turn_advantages=by_turn.get(e.id, ())) for e in examples])


def learn(trainer: Trainer, buffer: SampleBuffer, progress: Callable[[], None] = lambda: None) -> list[dict]:
    """Train all that waits in the buffer, in `updates_per_step` updates; return the statistics of each. Collective.

    `progress` is called after each micro-batch.
    """
    world, num_updates = trainer.world, trainer.config.updates_per_step
    assert not buffer.taken or num_updates == 1, "gradients of later updates were taken with the weights of the first"
    shares = [
        parallel.bring_tokens(world, batch[world.rank], itertools.chain(*batch))
        for batch in buffer.deal(world.size, num_updates, work_of=partial(work_of, trainer))
    ]
    if trainer.loss.old_logprobs == "trainer" and num_updates > 1:
        shares = [trainer.with_old_logprobs(share, progress) for share in shares]
    updates = []
    for share in shares:
        trainer.accumulate(share, progress)
        updates.append(trainer.update())
    return updates
