"""Advantages and policy losses: pure functions, one table each.

A loss returns one value per sampled token; `weighted_sum` adds them up without dividing. The trainer divides
once per update, by the global count, so streamed, packed or sharded gradients equal the plain ones.

Shapes: P prompts, R responses of each, S samples, T sampled tokens of all samples, one after another. Tokens that
were not sampled, such as the prompt, are context of the forward pass and appear nowhere here.
"""

from collections.abc import Callable, Iterable
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
    centred = rewards - rewards[..., :1]  # equal rewards give zeros, not what their mean is rounded by
    return centred - centred.mean(-1, keepdim=True)


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
BATCH_WIDE = {"reinforce_baseline"}  # a group's advantages depend on other groups: stream training refuses these


LEAST_OTHERS = 1e-6  # probability of all tokens but the k likeliest: in fp32 it has no digits below

# ---- losses: one value per sampled token -------------------------------------------------------------------------


@dataclass(frozen=True)
class Tokens:
    """Inputs of a loss. All float tensors are [T] float32."""

    logprobs: Tensor  # of the current policy, with gradient
    old_logprobs: Tensor  # of the policy that the ratio is against: `loss.old_logprobs`
    rollout_logprobs: Tensor  # of the distribution that the tokens were drawn from
    advantages: Tensor
    sample: Tensor  # [T] int64: which sample a token belongs to
    lengths: Tensor  # [S] int64: sampled tokens of each sample


def ppo(t: Tokens, config: "LossConfig") -> tuple[Tensor, Tensor]:
    """Clipped surrogate with separate bounds. (PPO, arXiv 1707.06347, eq. 7; clip-higher: DAPO, arXiv 2503.14476)"""
    ratio = (t.logprobs - t.old_logprobs).exp()
    return _clipped(ratio, t.advantages, config)


def gspo(t: Tokens, config: "LossConfig") -> tuple[Tensor, Tensor]:
    """The ratio of a whole sequence, as a geometric mean over its tokens. (GSPO, arXiv 2507.18071, eq. 5 and 7)

    In the form for tokens with advantages of their own, as those of turns (eq. 13 and 14): for equal ones the gradient
    is the same.
    """
    difference = (t.logprobs - t.old_logprobs).detach()
    mean = difference.new_zeros(len(t.lengths)).index_add(0, t.sample, difference) / t.lengths
    ratio = mean.exp()[t.sample] * (t.logprobs - t.logprobs.detach()).exp()
    return _clipped(ratio, t.advantages, config)


def _clipped(ratio: Tensor, advantages: Tensor, config: "LossConfig") -> tuple[Tensor, Tensor]:
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    loss = -torch.minimum(ratio * advantages, clipped * advantages)
    return loss, clipped * advantages < ratio * advantages


def decoupled(t: Tokens, config: "LossConfig") -> tuple[Tensor, Tensor]:
    """PPO against the weights before the step, times their importance weight. (AReaL, arXiv 2505.24298, section 5.2)

    So the clip bounds the step only, and the weight corrects for the age of the samples. With one update a step the
    clip never binds.
    """
    loss, clipped = ppo(t, config)
    weight, _ = _truncated(t.old_logprobs, t.rollout_logprobs, config.tis_cap or 5.0)
    return weight * loss, clipped


def cispo(t: Tokens, config: "LossConfig") -> tuple[Tensor, Tensor]:
    """REINFORCE with a clipped, detached importance weight: no token loses its gradient. (MiniMax-M1, 2506.13585)

    The paper, and TRL, have no lower bound: `clip_low` = 1.
    """
    ratio = (t.logprobs - t.old_logprobs).exp().detach()
    weight = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    return -weight * t.advantages * t.logprobs, weight != ratio


def tis(t: Tokens, config: "LossConfig") -> tuple[Tensor, Tensor]:
    """REINFORCE with a detached importance weight of at most 1. (truncated importance sampling, as in 2503.14286)"""
    weight, truncated = _truncated(t.logprobs, t.old_logprobs, config.tis_cap or 1.0)
    return -weight * t.advantages * t.logprobs, truncated


def topr(t: Tokens, config: "LossConfig") -> tuple[Tensor, Tensor]:
    """Plain REINFORCE for positive advantages, tis for negative ones. (TOPR, arXiv 2503.14286, eq. 8)

    The paper goes by the sign of the reward; for rewards of 0 and 1, centred within the group, it is the advantage's.
    """
    weight, truncated = _truncated(t.logprobs, t.old_logprobs, config.tis_cap or 1.0)
    is_positive = t.advantages > 0
    weight = torch.where(is_positive, config.topr_positive, config.topr_negative * weight)
    return -weight * t.advantages * t.logprobs, truncated & ~is_positive


def _truncated(logprobs: Tensor, old_logprobs: Tensor, cap: float) -> tuple[Tensor, Tensor]:
    """Return the importance weight min(ratio, cap), detached, and where the cap was reached."""
    ratio = (logprobs - old_logprobs).exp().detach()
    return ratio.clamp(max=cap), ratio > cap


def kimi15(t: Tokens, config: "LossConfig") -> tuple[Tensor, Tensor]:
    """REINFORCE and a squared log-ratio, which holds the policy near the old one. (Kimi k1.5, 2501.12599, eq. 3)"""
    penalty = config.kimi_tau / 2 * (t.logprobs - t.old_logprobs) ** 2
    return penalty - t.advantages * t.logprobs, torch.zeros_like(t.logprobs, dtype=torch.bool)


def sft(t: Tokens, config: "LossConfig") -> tuple[Tensor, Tensor]:
    """Negative log-likelihood of the response; the warm start uses it."""
    return -t.logprobs, torch.zeros_like(t.logprobs, dtype=torch.bool)


LOSSES: dict[str, Callable[[Tokens, "LossConfig"], tuple[Tensor, Tensor]]] = {
    "ppo": ppo,
    "gspo": gspo,
    "decoupled": decoupled,
    "cispo": cispo,
    "tis": tis,
    "topr": topr,
    "kimi15": kimi15,
    "sft": sft,
}
PROXIMAL = {"decoupled"}  # the ratio is against the trainer's weights; another weight corrects for older samples
SCALED = {"ppo", "gspo", "decoupled", "cispo", "tis", "topr"}  # a token's loss is a multiple of its advantage
CLIP = {"clip_low", "clip_high"}
OWN_OPTIONS = {  # settings that only some losses read; one of a user's own may read any
    "ppo": CLIP,
    "gspo": CLIP,
    "decoupled": {*CLIP, "tis_cap"},
    "cispo": CLIP,
    "tis": {"tis_cap"},
    "topr": {"tis_cap", "topr_positive", "topr_negative"},
    "kimi15": {"kimi_tau"},
    "sft": set(),
}
OF_RATIO = {"cispo", "tis", "topr", "kimi15"}  # do nothing but REINFORCE at a ratio of 1
RATIOS = {"ppo", "gspo"}  # clip a ratio, which rounding in bf16 moves; other weights correct for rounding, too


def kl_to_reference(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Per-token unbiased, non-negative estimate of KL(policy | reference). (k3; Schulman 2020) [T]"""
    difference = ref_logprobs - logprobs
    return difference.exp() - difference - 1


def kl_to_teacher(logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
    """KL(policy | teacher) over k tokens and one event for all others; over all tokens it is exact. [T, k] -> [T]

    It is at most the KL over all tokens, and 0 only where both agree on the k. (TA-OPD, arXiv 2608.14728; the direction
    on the student's own text: GKD, arXiv 2306.13649, MiniLLM, arXiv 2306.08543)
    """
    likely = logprobs.exp() * (logprobs.masked_fill(logprobs == -torch.inf, 0.0) - teacher_logprobs)
    others, theirs = ((1 - x.exp().sum(-1)).clamp(min=LEAST_OTHERS) for x in (logprobs, teacher_logprobs))
    return likely.sum(-1) + others * (others / theirs).log()


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
    credit: str = option(
        "episode",
        "a turn's advantage comes from the rewards of the whole episode, or of this turn and those after it, against "
        "the same turn of the group's other samples",
        choices=("episode", "turn"),
    )
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
        False, "leave samples cut at a limit out of the loss and its divisor (DAPO, section 3.4)"
    )
    old_logprobs: str = option(
        "auto",
        "ratio's denominator: rollout (as sampled), trainer (recomputed before a step's first update), or auto: "
        "trainer in decoupled, and for a bfloat16 model in ppo and gspo unless samples are of older weights; else "
        "rollout",
        choices=("auto", "rollout", "trainer"),
    )
    tis_cap: float = option(
        0.0,
        "largest importance weight of a token in tis, topr (0: 1) and decoupled (0: 5)",
        min=0.0,
        max=1e6,
    )
    topr_positive: float = option(1.0, "weight of samples with a positive advantage in topr", min=0.0, max=1e6)
    topr_negative: float = option(1.0, "weight of samples with a negative advantage in topr", min=0.0, max=1e6)
    kimi_tau: float = option(0.1, "weight of the squared log-ratio in kimi15", min=0.0, max=1e6)

    def teaches(self, advantages: Iterable[float]) -> bool:
        """Whether a sample with these advantages has a gradient. In most losses it has none where all are 0."""
        return any(advantages) or self.name not in SCALED or bool(self.kl_coef or self.entropy_coef)

    def for_dtype(self, dtype: torch.dtype, are_older: bool = False) -> "LossConfig":
        """Decide `old_logprobs = auto`: in bf16, rounding in rollout and trainer moves ratios as updates do.

        `are_older`: samples may be of older weights, or of another run, for which the ratio has to correct.
        """
        recomputed = self.name in PROXIMAL or (self.name in RATIOS and dtype == torch.bfloat16 and not are_older)
        found = "trainer" if recomputed else "rollout"
        return replace(self, old_logprobs=found) if self.old_logprobs == "auto" else self
