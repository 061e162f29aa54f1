"""Advantages and policy losses: pure functions, one table each.

A loss returns one value per sampled token; `weighted_sum` adds them up without dividing. The trainer divides
once per update, by the global count, so streamed, packed or sharded gradients equal the plain ones.

Shapes: P prompts, R responses of each, S samples, T sampled tokens of all samples, one after another. Tokens that
were not sampled, such as the prompt, are context of the forward pass and appear nowhere here.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from config import entry, option

# ---- advantages: rewards [P, R] float -> [P, R] ------------------------------------------------------------------


def grpo(rewards: Tensor) -> Tensor:
    """(r - mean) / std of the group; equal rewards give zeros. (DeepSeekMath, arXiv 2402.03300, section 4.1.2)

    The std is the population's, plus 1e-6; TRL's is the sample's, plus 1e-4. docs/losses.md lists such differences.
    """
    return dr_grpo(rewards) / (rewards.std(-1, keepdim=True, correction=0) + 1e-6)


def dr_grpo(rewards: Tensor) -> Tensor:
    """r - mean of the group: no bias towards easy and hard prompts. (Dr. GRPO, arXiv 2503.20783, section 3)"""
    return rewards - rewards.mean(-1, keepdim=True)


def rloo(rewards: Tensor) -> Tensor:
    """r - mean of the other responses. (RLOO, arXiv 2402.14740, section 2)"""
    num_responses = rewards.shape[-1]
    return dr_grpo(rewards) * num_responses / max(num_responses - 1, 1)


def reinforce_baseline(rewards: Tensor) -> Tensor:
    """(r - group mean) / std of all differences of the batch. (REINFORCE++-baseline, arXiv 2501.03262)"""
    centred = dr_grpo(rewards)
    return centred / (centred.std(correction=0) + 1e-6)


ADVANTAGES: dict[str, Callable[[Tensor], Tensor]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce_baseline": reinforce_baseline,
}
BATCH_WIDE = {"reinforce_baseline"}  # a group's advantages depend on other groups


# ---- losses: one value per sampled token -------------------------------------------------------------------------


@dataclass(frozen=True)
class Tokens:
    """Inputs of a loss. All float tensors are [T] float32."""

    logprobs: Tensor  # of the current policy, with gradient
    old_logprobs: Tensor
    advantages: Tensor
    sample: Tensor  # [T] int64: which sample a token belongs to
    lengths: Tensor  # [S] int64: sampled tokens of each sample


def ppo(t: Tokens, config: "LossConfig") -> tuple[Tensor, Tensor]:
    """Clipped surrogate with separate bounds. (PPO, arXiv 1707.06347, eq. 7; clip-higher: DAPO, arXiv 2503.14476)"""
    ratio = (t.logprobs - t.old_logprobs).exp()
    return _clipped(ratio, t.advantages, config)


def gspo(t: Tokens, config: "LossConfig") -> tuple[Tensor, Tensor]:
    """The ratio of a whole sequence, as a geometric mean over its tokens. (GSPO, arXiv 2507.18071, eq. 5 and 7)"""
    difference = t.logprobs - t.old_logprobs
    mean = difference.new_zeros(len(t.lengths)).index_add(0, t.sample, difference) / t.lengths
    return _clipped(mean.exp()[t.sample], t.advantages, config)


def _clipped(ratio: Tensor, advantages: Tensor, config: "LossConfig") -> tuple[Tensor, Tensor]:
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    loss = -torch.minimum(ratio * advantages, clipped * advantages)
    return loss, clipped * advantages < ratio * advantages


def cispo(t: Tokens, config: "LossConfig") -> tuple[Tensor, Tensor]:
    """REINFORCE with a clipped, detached importance weight: no token loses its gradient. (MiniMax-M1, 2506.13585)

    The paper, and TRL, have no lower bound: `clip_low` = 1.
    """
    ratio = (t.logprobs - t.old_logprobs).exp().detach()
    weight = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    return -weight * t.advantages * t.logprobs, weight != ratio


def sft(t: Tokens, config: "LossConfig") -> tuple[Tensor, Tensor]:
    """Negative log-likelihood of the response; the warm start uses it."""
    return -t.logprobs, torch.zeros_like(t.logprobs, dtype=torch.bool)


LOSSES: dict[str, Callable[[Tokens, "LossConfig"], tuple[Tensor, Tensor]]] = {
    "ppo": ppo,
    "gspo": gspo,
    "cispo": cispo,
    "sft": sft,
}


def kl_to_reference(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Per-token unbiased, non-negative estimate of KL(policy | reference). (k3; Schulman 2020) [T]"""
    difference = ref_logprobs - logprobs
    return difference.exp() - difference - 1


def weighted_sum(loss: Tensor, t: Tokens, normalisation: str, max_response_tokens: int) -> tuple[Tensor, int]:
    """Return the un-normalised sum, and this part's share of the global divisor."""
    if normalisation == "token":
        return loss.sum(), len(loss)
    if normalisation == "sequence":
        return (loss / t.lengths[t.sample]).sum(), len(t.lengths)
    return loss.sum() / max_response_tokens, len(t.lengths)  # constant (Dr. GRPO)


# ---- settings, last because they list the tables --------------------------------------------------------------------


@dataclass(frozen=True)
class LossConfig:
    name: str = entry("ppo", "policy loss", LOSSES)
    advantage: str = entry("dr_grpo", "advantage", ADVANTAGES)
    normalisation: str = option(
        "token",
        "an update is the mean over: token (all sampled tokens), sequence (mean of sequence means, as in GSPO), "
        "constant (sequence sums over rollout.max_response_tokens)",
        choices=("token", "sequence", "constant"),
    )
    clip_low: float = option(0.2, "ratio may fall to 1 - clip_low (for gspo about 3e-4, cispo 1)", min=0.0, max=1.0)
    clip_high: float = option(0.28, "ratio may rise to 1 + clip_high (for gspo about 4e-4, cispo 4)", min=0.0, max=1e6)
    kl_coef: float = option(
        0.0, "weight of the KL term to the reference (the model at the start); 0 is off", min=0.0, max=1e6
    )
    entropy_coef: float = option(
        0.0, "weight of a bonus for the entropy of the sampled distribution; 0 is off", min=0.0, max=1e6
    )
    mask_truncated: bool = option(
        False, "leave samples cut at the length limit out of the loss and its divisor (DAPO, section 3.4)"
    )
    old_logprobs: str = option(
        "auto",
        "ratio's denominator: rollout (as sampled), trainer (recomputed), or auto: trainer in bfloat16, else rollout",
        choices=("auto", "rollout", "trainer"),
    )
    tis_cap: float = option(
        0.0,
        "with old_logprobs = trainer: weight tokens by min(trainer / rollout probability, cap); 0 is off",
        min=0.0,
        max=1e6,
    )

    def for_dtype(self, dtype: torch.dtype) -> "LossConfig":
        """Decide `old_logprobs = auto`: in bf16, rounding in rollout and trainer moves ratios as updates do."""
        found = "trainer" if dtype == torch.bfloat16 else "rollout"
        return replace(self, old_logprobs=found) if self.old_logprobs == "auto" else self
