"""Advantages against hand numbers, losses against loops over single tokens, sums against their definitions."""

import math
import re
from dataclasses import replace
from random import Random

import pytest
import torch
from torch import Tensor

from loss import ADVANTAGES, LOSSES, OWN_OPTIONS, LossConfig, Tokens, kl_to_reference, weighted_sum

NORMALISATIONS = ("token", "sequence", "constant")
MAX_RESPONSE = 50


# ---- advantages --------------------------------------------------------------------------------------------------


def slow_advantages(name: str, rewards: list[list[float]]) -> list[list[float]]:
    """The definitions, sample by sample."""
    centred = [[r - sum(group) / len(group) for r in group] for group in rewards]
    if name == "rloo":
        return [[r - (sum(group) - r) / (len(group) - 1) for r in group] for group in rewards]
    if name == "grpo":
        deviations = [math.sqrt(sum(c * c for c in group) / len(group)) for group in centred]
        return [[c / (s + 1e-6) for c in group] for group, s in zip(centred, deviations, strict=True)]
    if name == "reinforce_baseline":
        everything = [c for group in centred for c in group]
        deviation = math.sqrt(sum(c * c for c in everything) / len(everything))
        return [[c / (deviation + 1e-6) for c in group] for group in centred]
    assert name == "dr_grpo"
    return centred


HAND = {  # of the groups (1, 0, 0, 1) and (3, 0, 0, 1)
    "dr_grpo": [[0.5, -0.5, -0.5, 0.5], [2, -1, -1, 0]],
    "grpo": [[1, -1, -1, 1], [2 / 1.5**0.5, -1 / 1.5**0.5, -1 / 1.5**0.5, 0]],
    "rloo": [[2 / 3, -2 / 3, -2 / 3, 2 / 3], [8 / 3, -4 / 3, -4 / 3, 0]],
    "reinforce_baseline": [[0.5 / 0.875**0.5, -0.5 / 0.875**0.5] + [-0.5 / 0.875**0.5, 0.5 / 0.875**0.5]]
    + [[2 / 0.875**0.5, -1 / 0.875**0.5, -1 / 0.875**0.5, 0]],
}


def tensor(values: list) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("name", HAND)
def test_advantages_of_two_groups_by_hand(name: str) -> None:
    ours = ADVANTAGES[name](tensor([[1, 0, 0, 1], [3, 0, 0, 1]]))
    torch.testing.assert_close(ours, tensor(HAND[name]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", HAND)
@pytest.mark.parametrize("num_responses", [2, 3, 8])
def test_advantages_follow_their_definition(name: str, num_responses: int) -> None:
    rng = Random(num_responses)
    for _ in range(20):
        rewards = [[rng.choice((0.0, 1.0, -0.5, 0.1)) for _ in range(num_responses)] for _ in range(rng.randint(1, 5))]
        expected = tensor(slow_advantages(name, rewards))
        torch.testing.assert_close(ADVANTAGES[name](tensor(rewards)), expected, rtol=1e-9, atol=1e-9)


def test_advantages_of_a_pair_by_hand() -> None:
    expected = {"dr_grpo": 0.5, "grpo": 1.0, "rloo": 1.0, "reinforce_baseline": 1.0}
    for name, value in expected.items():
        torch.testing.assert_close(ADVANTAGES[name](tensor([[1, 0]])), tensor([[value, -value]]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_equal_rewards_teach_nothing(name: str) -> None:
    for value in (0.0, 1.0, 0.1, 1 / 3, -7.7):
        for num_responses in (2, 3, 7, 8):
            ours = ADVANTAGES[name](tensor([[value] * num_responses] * 3))
            assert not ours.any(), "not what their mean is rounded by"
    mixed = ADVANTAGES[name](tensor([[0.1, 0.1, 0.1], [0, 1, 0]]))
    assert not mixed[0].any() and mixed[1].all()


@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages_are_finite_shaped_and_follow_a_permutation(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    rewards = torch.rand(5, 6, generator=generator, dtype=torch.float64)
    ours = ADVANTAGES[name](rewards)
    assert ours.shape == rewards.shape and ours.dtype == rewards.dtype and ours.isfinite().all()
    groups, responses = torch.randperm(5, generator=generator), torch.randperm(6, generator=generator)
    torch.testing.assert_close(ADVANTAGES[name](rewards[groups][:, responses]), ours[groups][:, responses])
    best = rewards.argmax(1, keepdim=True)
    assert (ours.gather(1, best) > 0).all() and (ours.argmax(1) == best[:, 0]).all()


# ---- losses ------------------------------------------------------------------------------------------------------

CONFIG = LossConfig(clip_low=0.1, clip_high=0.3, tis_cap=1.2, topr_positive=0.7, topr_negative=0.4, kimi_tau=0.5)


def make_tokens(seed: int, noise: float = 0.4) -> Tokens:
    """Random samples of 1 to 9 tokens, off-policy by `noise`; float64, so that comparisons are sharp."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 10, (6,), generator=generator)
    sample = torch.repeat_interleave(torch.arange(6), lengths)
    logprobs = -3 * torch.rand(len(sample), generator=generator, dtype=torch.float64) - 0.5
    old = logprobs + noise * torch.randn(len(sample), generator=generator, dtype=torch.float64)
    advantages = torch.randn(6, generator=generator, dtype=torch.float64)[sample]
    rollout = old + noise * torch.randn(len(sample), generator=generator, dtype=torch.float64)
    return Tokens(logprobs.requires_grad_(), old, rollout, advantages, sample, lengths)


def slow_loss(name: str, t: Tokens, config: LossConfig) -> tuple[tuple, tuple, tuple]:
    """Each token's loss, whether it is clipped, and the gradient of the sum of losses, from the papers' formulas."""
    given = t.logprobs, t.old_logprobs, t.rollout_logprobs, t.advantages, t.sample
    new, old, rollout, advantages, owner = (x.tolist() for x in given)
    low, high = 1 - config.clip_low, 1 + config.clip_high
    rows = []
    for i, a in enumerate(advantages):
        own = [j for j in range(len(new)) if owner[j] == owner[i]]
        ratio = math.exp(new[i] - old[i])
        if name == "gspo":  # the token's own gradient, by the ratio of its sample
            ratio = math.prod(math.exp(new[j] - old[j]) for j in own) ** (1 / len(own))
        bounded = min(max(ratio, low), high)
        too_far = ratio > high if a > 0 else ratio < low
        if name == "sft":
            rows.append((-new[i], False, -1.0))
        elif name == "cispo":
            rows.append((-bounded * a * new[i], not low <= ratio <= high, -bounded * a))
        elif name in ("tis", "topr"):
            weight, is_capped = min(ratio, config.tis_cap), ratio > config.tis_cap
            if name == "topr":
                weight = config.topr_positive if a > 0 else config.topr_negative * weight
                is_capped = is_capped and a < 0
            rows.append((-weight * a * new[i], is_capped, -weight * a))
        elif name == "kimi15":
            gap = new[i] - old[i]
            rows.append((-a * new[i] + config.kimi_tau / 2 * gap * gap, False, -a + config.kimi_tau * gap))
        else:
            weight = min(math.exp(old[i] - rollout[i]), config.tis_cap) if name == "decoupled" else 1.0
            loss, slope = -a * (bounded if too_far else ratio), 0.0 if too_far else -a * ratio
            rows.append((weight * loss, too_far, weight * slope))
    losses, flags, gradients = zip(*rows, strict=True)
    return losses, flags, gradients


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("seed", range(8))
def test_losses_follow_their_formula_and_so_do_their_gradients(name: str, seed: int) -> None:
    t = make_tokens(seed)
    losses, clipped, gradient = slow_loss(name, t, CONFIG)
    values, flags = LOSSES[name](t, CONFIG)
    torch.testing.assert_close(values.detach(), tensor(losses))
    assert flags.tolist() == list(clipped)
    values.sum().backward()
    torch.testing.assert_close(t.logprobs.grad, tensor(gradient))


def one_token(name: str, ratio: float, advantage: float, **settings: float) -> tuple:
    """Return the loss of a lone token, its gradient and whether it was clipped."""
    new, zero = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True), torch.tensor([0])
    old = new.detach() - math.log(ratio)
    t = Tokens(new, old, old, tensor([advantage]), zero, zero + 1)
    value, clipped = LOSSES[name](t, LossConfig(**{"clip_low": 0.0, "clip_high": 0.0, **settings}))
    value.sum().backward()
    return pytest.approx(value.item()), pytest.approx(new.grad.item()), clipped.item()


@pytest.mark.parametrize("name", ["ppo", "gspo", "decoupled"])
def test_low_and_high_bounds_clip_each_on_its_side(name: str) -> None:
    assert one_token(name, 1.6, 2.0, clip_high=0.5) == (-3.0, 0.0, True)
    assert one_token(name, 1.4, 2.0, clip_high=0.5) == (-2.8, -2.8, False)
    assert one_token(name, 0.6, -2.0, clip_low=0.25) == (1.5, 0.0, True)
    assert one_token(name, 0.8, -2.0, clip_low=0.25) == (1.6, 1.6, False)
    # The pessimistic side is never clipped.
    assert one_token(name, 1.6, -2.0, clip_high=0.5) == (3.2, 3.2, False)
    assert one_token(name, 0.6, 2.0, clip_low=0.25) == (-1.2, -1.2, False)


def test_cispo_bounds_the_weight_and_keeps_the_gradient() -> None:
    assert one_token("cispo", 1.6, 2.0, clip_high=0.5) == (3.0, -3.0, True)  # -1.5 * 2 * log-prob -1
    assert one_token("cispo", 1.6, -2.0, clip_high=0.5) == (-3.0, 3.0, True)
    assert one_token("cispo", 0.5, 2.0, clip_low=0.25) == (1.5, -1.5, True)
    assert one_token("cispo", 0.8, 2.0, clip_low=0.25) == (1.6, -1.6, False)
    assert [one_token(name, 1.6, 2.0)[1:] for name in ("ppo", "cispo")] == [(0.0, True), (-2.0, True)]


def test_the_weight_of_tis_is_at_most_one_and_topr_has_it_for_negative_advantages_only() -> None:
    for ratio in (0.5, 1.0, 3.0):
        weight, capped = min(ratio, 1.0), ratio > 1
        for advantage in (2.0, -2.0):
            assert one_token("tis", ratio, advantage)[1:] == (pytest.approx(-weight * advantage), capped)
        assert one_token("topr", ratio, -2.0)[1:] == (pytest.approx(2 * weight), capped)
        assert one_token("topr", ratio, 2.0) == (2.0, -2.0, False), "free of the ratio"
    assert one_token("tis", 3.0, 1.0, tis_cap=2) == (2.0, -2.0, True)
    assert one_token("topr", 0.5, -2.0, topr_negative=3) == (-3.0, 3.0, False)
    assert one_token("topr", 0.5, 2.0, topr_positive=3) == (6.0, -6.0, False)


def test_the_advantage_has_the_sign_of_a_score_of_0_or_1() -> None:
    """topr goes by it. Without a right and a wrong response a group teaches nothing, so no sign matters."""
    rewards = torch.tensor([[int(digit) for digit in f"{i:04b}"] for i in range(1, 15)], dtype=torch.float64)
    for advantages in ADVANTAGES.values():
        assert torch.equal(advantages(rewards) > 0, rewards > 0) and advantages(rewards).all()


@pytest.mark.parametrize("difference, weight", [(0.0, 1.0), (0.5, math.exp(0.5)), (-1.0, math.exp(-1.0)), (2.0, 5.0)])
def test_decoupled_is_ppo_times_a_capped_importance_weight(difference: float, weight: float) -> None:
    t = make_tokens(1)
    t = replace(t, rollout_logprobs=t.old_logprobs - difference)
    config = replace(CONFIG, tis_cap=0.0)
    (plain, plain_clipped), (ours, clipped) = (LOSSES[name](t, config) for name in ("ppo", "decoupled"))
    torch.testing.assert_close(ours, weight * plain)
    assert torch.equal(clipped, plain_clipped) and clipped.any()


def permuted(t: Tokens, order: list[int]) -> tuple[Tokens, Tensor]:
    """Return the samples of `t` in another order, and which token went where."""
    rows = torch.cat([(t.sample == i).nonzero()[:, 0] for i in order])
    sample = torch.repeat_interleave(torch.arange(len(order)), t.lengths[order])
    old, rollout, advantages = t.old_logprobs[rows], t.rollout_logprobs[rows], t.advantages[rows]
    return Tokens(t.logprobs.detach()[rows].requires_grad_(), old, rollout, advantages, sample, t.lengths[order]), rows


@pytest.mark.parametrize("normalisation", NORMALISATIONS)
@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_finite_shaped_differentiable_and_follow_a_permutation(name: str, normalisation: str) -> None:
    t = make_tokens(3, noise=0.05)
    values, clipped = LOSSES[name](t, LossConfig())
    assert values.shape == clipped.shape == t.logprobs.shape and clipped.dtype == torch.bool
    total, count = weighted_sum(values, t, normalisation, MAX_RESPONSE)
    total.backward()
    assert values.isfinite().all() and t.logprobs.grad.isfinite().all() and t.logprobs.grad.abs().min() > 0
    other, rows = permuted(t, [4, 0, 5, 2, 1, 3])
    other_values, other_clipped = LOSSES[name](other, LossConfig())
    other_total, other_count = weighted_sum(other_values, other, normalisation, MAX_RESPONSE)
    other_total.backward()
    torch.testing.assert_close(other_values, values[rows])
    assert t.logprobs.grad is not None
    torch.testing.assert_close(other.logprobs.grad, t.logprobs.grad[rows])
    assert torch.equal(other_clipped, clipped[rows])
    assert count == other_count and total.item() == pytest.approx(other_total.item())


@pytest.mark.parametrize("name", LOSSES)
def test_losses_look_at_no_other_sample(name: str) -> None:
    """Sums over parts of a batch must add up to the sum over the batch."""
    t = make_tokens(5)
    values, _ = LOSSES[name](t, CONFIG)
    for i in range(len(t.lengths)):
        alone, rows = permuted(t, [i])
        torch.testing.assert_close(LOSSES[name](alone, CONFIG)[0], values[rows])


@pytest.mark.parametrize("normalisation", NORMALISATIONS)
@pytest.mark.parametrize("name", [name for name in LOSSES if name != "sft"])
def test_on_policy_every_loss_has_the_gradient_of_reinforce(name: str, normalisation: str) -> None:
    t = make_tokens(7, noise=0.0)
    total, count = weighted_sum(LOSSES[name](t, LossConfig())[0], t, normalisation, MAX_RESPONSE)
    total.backward()
    plain = t.logprobs.detach().clone().requires_grad_()
    expected, expected_count = weighted_sum(
        -t.advantages * plain, replace(t, logprobs=plain), normalisation, MAX_RESPONSE
    )
    expected.backward()
    torch.testing.assert_close(t.logprobs.grad, plain.grad)
    assert count == expected_count


def test_the_sequence_ratio_leaves_each_token_its_own_advantage() -> None:
    """As of turns; with one gradient for all they would cancel."""
    advantages, new = tensor([1.0, 1.0, -1.0, -1.0]), torch.full((4,), -1.0, dtype=torch.float64, requires_grad=True)
    t = Tokens(new, new.detach(), new.detach(), advantages, torch.zeros(4, dtype=torch.int64), torch.tensor([4]))
    LOSSES["gspo"](t, LossConfig())[0].sum().backward()
    torch.testing.assert_close(t.logprobs.grad, -advantages)


def test_off_policy_the_sequence_ratio_differs_from_the_token_ratio() -> None:
    gradients: list[torch.Tensor] = []
    for name in ("ppo", "gspo"):
        t = make_tokens(7)
        LOSSES[name](t, LossConfig(clip_low=1.0, clip_high=100.0))[0].sum().backward()
        gradients.append(t.logprobs.grad)
    assert (gradients[0] - gradients[1]).abs().max() > 0.1


# ---- what an update averages over --------------------------------------------------------------------------------


def two_samples() -> tuple[Tensor, Tokens]:
    """Losses 1, 2, 3 of one sample and 10 of another."""
    sample = torch.tensor([0, 0, 0, 1])
    zeros = torch.zeros(4, dtype=torch.float64)
    return tensor([1.0, 2.0, 3.0, 10.0]), Tokens(zeros, zeros, zeros, zeros, sample, torch.tensor([3, 1]))


@pytest.mark.parametrize(
    "normalisation, total, count", [("token", 16.0, 4), ("sequence", 2.0 + 10.0, 2), ("constant", 16.0 / 50, 2)]
)
def test_the_three_sums_by_hand(normalisation: str, total: float, count: int) -> None:
    loss, t = two_samples()
    ours, divisor = weighted_sum(loss, t, normalisation, MAX_RESPONSE)
    assert ours.item() == pytest.approx(total) and divisor == count


def test_every_normalisation_of_the_config_is_covered() -> None:
    assert LossConfig.__dataclass_fields__["normalisation"].metadata["choices"] == NORMALISATIONS


# ---- KL ----------------------------------------------------------------------------------------------------------


def test_kl_estimate_is_never_negative_and_zero_only_where_both_agree() -> None:
    generator = torch.Generator().manual_seed(0)
    policy, reference = (-5 * torch.rand(1000, generator=generator, dtype=torch.float64) for _ in range(2))
    assert (kl_to_reference(policy, reference) > 0).all()
    assert kl_to_reference(policy, policy).abs().max() == 0


def test_kl_estimate_has_the_true_kl_as_its_mean() -> None:
    policy, reference = tensor([0.5, 0.3, 0.15, 0.05]), tensor([0.1, 0.2, 0.3, 0.4])
    true = sum(p * math.log(p / q) for p, q in zip(policy.tolist(), reference.tolist(), strict=True))
    mean = (policy * kl_to_reference(policy.log(), reference.log())).sum()
    assert mean.item() == pytest.approx(true)


# ---- tables ------------------------------------------------------------------------------------------------------


def test_published_losses_and_advantages_name_their_source() -> None:
    for name, function in (LOSSES | ADVANTAGES).items():
        assert name == "sft" or re.search(r"\d{4}\.\d{5}", function.__doc__ or ""), name  # arXiv


def test_every_loss_reads_the_settings_that_are_said_to_be_its_own() -> None:
    assert OWN_OPTIONS.keys() == LOSSES.keys()
    t = make_tokens(2)
    for name, own in OWN_OPTIONS.items():
        for key in set[str]().union(*OWN_OPTIONS.values()):
            other = replace(CONFIG, **{key: getattr(CONFIG, key) / 2})
            is_read = not torch.equal(LOSSES[name](t, CONFIG)[0], LOSSES[name](t, other)[0])
            assert is_read == (key in own), (name, key)
