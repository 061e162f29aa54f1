"""The sampled distribution is `transformers`', is really drawn from, and scores a token as it was drawn."""

import math
from itertools import product

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from sampling import SamplingConfig, filter_logits, sample, sample_inverse_cdf, sample_key, score, uniforms

VOCAB = 40
CONFIGS = [
    SamplingConfig(temperature, top_k, top_p)
    for temperature, top_k, top_p in product((0.3, 1.0, 2.5), (0, 1, 7, VOCAB, 1000), (1.0, 0.9, 0.35, 1e-6))
] + [
    SamplingConfig(temperature, top_k, top_p, min_p)
    for temperature, top_k, top_p, min_p in product((0.7, 1.0), (0, 7), (1.0, 0.9), (1e-3, 0.2, 1.0))
]
EVERY = pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"T{c.temperature}-k{c.top_k}-p{c.top_p}-m{c.min_p}")


def random_logits(rows: int = 64, size: int = VOCAB, seed: int = 0) -> Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * 2.0


def reference(logits: Tensor, config: SamplingConfig) -> Tensor:
    """Log-probs of the distribution that `transformers` would sample, in float64. [n, V]"""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(config.temperature)])
    if config.top_k:
        warpers.append(TopKLogitsWarper(config.top_k))
    if config.top_p < 1.0:
        warpers.append(TopPLogitsWarper(config.top_p))
    if config.min_p:
        warpers.append(MinPLogitsWarper(config.min_p))
    return warpers(None, logits.double()).log_softmax(-1)


def chance(observed: Tensor, expected: Tensor) -> float:
    """How likely counts are to lie this far from what is expected or farther. (Pearson's chi-square test)"""
    statistic = ((observed - expected) ** 2 / expected).sum()
    return torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2).double(), statistic / 2).item()


# ---- one distribution, equal to transformers'


@EVERY
def test_the_filtered_distribution_is_that_of_transformers(config):
    wanted = reference(random_logits(), config)
    found = filter_logits(random_logits(), config)
    assert found.dtype == torch.float32
    assert torch.equal(found == -torch.inf, wanted == -torch.inf)
    torch.testing.assert_close(found.log_softmax(-1).double(), wanted, atol=1e-5, rtol=0)


@EVERY
def test_drawing_and_scoring_agree_with_the_reference(config):
    logits = random_logits()
    wanted = reference(logits, config)
    tokens, logprobs = sample(logits, torch.arange(64), torch.zeros(64, dtype=torch.int64), config)
    assert tokens.dtype == torch.int64 and logprobs.dtype == torch.float32 and tokens.shape == logprobs.shape == (64,)
    torch.testing.assert_close(logprobs.double(), wanted.gather(-1, tokens[:, None])[:, 0], atol=1e-5, rtol=0)
    scored, entropy = score(logits, tokens, config)
    assert torch.equal(scored, logprobs)
    probs = wanted.exp()
    torch.testing.assert_close(entropy.double(), -torch.xlogy(probs, probs).sum(-1), atol=1e-4, rtol=0)


@EVERY
def test_the_drawn_token_is_the_one_whose_stretch_of_the_cdf_holds_the_uniform(config):
    logits = random_logits()
    cdf = reference(logits, config).exp().cumsum(-1)
    for uniform in torch.linspace(0.001, 0.999, 30, dtype=torch.float64):
        tokens, _ = sample_inverse_cdf(logits, uniform.expand(64), config)
        upper = cdf.gather(-1, tokens[:, None])[:, 0]
        lower = torch.where(tokens > 0, cdf.gather(-1, (tokens - 1).clamp(min=0)[:, None])[:, 0], 0.0)
        assert (lower - 1e-6 <= uniform).all() and (uniform <= upper + 1e-6).all()


def test_temperature_comes_before_top_k_and_top_k_before_top_p():
    logits = torch.tensor([[0.40, 0.25, 0.20, 0.15]]).log()
    kept = [
        (SamplingConfig(1.0, 0, 0.6), 2),
        (SamplingConfig(0.5, 0, 0.6), 2),
        (SamplingConfig(0.25, 0, 0.6), 1),  # sharper first: 0.40 ** 4 is 0.79 of the mass
        (SamplingConfig(4.0, 0, 0.6), 3),
        (SamplingConfig(1.0, 2, 0.6), 1),  # of two, the first has 0.62
        (SamplingConfig(1.0, 3, 0.6), 2),
    ]
    for config, count in kept:
        assert (filter_logits(logits, config) > -torch.inf).sum() == count, config


def test_ties_at_a_threshold_are_kept_whatever_their_order():
    logits = torch.tensor([[1.0, 3.0, 1.0, 1.0, 0.0]])
    for config in (SamplingConfig(top_k=2), SamplingConfig(top_p=0.75)):
        for order in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [1, 0, 4, 2, 3]):
            kept = filter_logits(logits[:, order], config) > -torch.inf
            assert torch.equal(kept, (logits > 0.5)[:, order])


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.99, 0.9999])
@pytest.mark.parametrize("scale, is_narrow", [(0.1, False), (2.0, False), (6.0, True), (9.0, True)])
def test_top_p_sorts_a_large_vocabulary_only_where_it_must(scale, is_narrow, top_p, monkeypatch):
    """The same tokens are drawn as from the sorted vocabulary."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(40, 20_000, generator=generator) * scale
    logits[:20] = (logits[:20] * 4).round() / 4  # ties
    ordered = logits.sort(descending=True).values
    before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
    least = ordered.masked_fill(before >= top_p, torch.inf).amin(-1, keepdim=True)
    uniform = torch.rand(40, generator=generator, dtype=torch.float64)
    exact = sample_inverse_cdf(logits.masked_fill(logits < least, -torch.inf), uniform, SamplingConfig())
    rows, sort = [0], Tensor.sort
    monkeypatch.setattr(Tensor, "sort", lambda x, **how: rows.append(len(x)) or sort(x, **how))
    drawn = sample_inverse_cdf(logits, uniform, SamplingConfig(top_p=top_p))
    if is_narrow and top_p < 0.99:  # few tokens have most of the mass
        assert sum(rows) < 4
    assert all(torch.equal(mine, other) for mine, other in zip(drawn, exact, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_filtered_and_drawn_in_fp32(dtype):
    logits, uniform = random_logits().to(dtype), torch.full((64,), 0.4, dtype=torch.float64)
    config = SamplingConfig(0.7, 10, 0.9)
    half, full = (sample_inverse_cdf(x, uniform, config) for x in (logits, logits.float()))
    assert all(torch.equal(mine, other) for mine, other in zip(half, full, strict=True))
    tokens = logits.argmax(-1)
    assert torch.equal(score(logits, tokens, config)[0], score(logits.float(), tokens, config)[0])


@pytest.mark.parametrize("temperature", [1e-45, 1e-37, 1e-20, 1e-3, 100.0])
def test_an_extreme_temperature_gives_numbers(temperature):
    logits, uniform = random_logits(), torch.full((64,), 0.4, dtype=torch.float64)
    tokens, logprobs = sample_inverse_cdf(logits, uniform, SamplingConfig(temperature))
    assert torch.isfinite(logprobs).all()
    if temperature < 1e-2:
        assert torch.equal(tokens, logits.argmax(-1))


# ---- draws


CHI_SQUARE = [SamplingConfig(), SamplingConfig(0.6), SamplingConfig(1.5, 5), SamplingConfig(1.0, 0, 0.8)]


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("config", CHI_SQUARE, ids=str)
def test_frequencies_follow_the_distribution(config, seed):
    count = 100_000
    logits = random_logits(1, 12, seed)
    keys = torch.tensor([sample_key(seed, 0, i) for i in range(count // 100)]).repeat_interleave(100)
    tokens, _ = sample(logits.expand(count, -1), keys, torch.arange(100).repeat(count // 100), config)
    expected = reference(logits, config)[0].exp() * count
    observed = torch.bincount(tokens, minlength=12).double()
    inside = expected > 0
    assert observed[~inside].sum() == 0
    assert chance(observed[inside], expected[inside]) > 1e-4


@EVERY
def test_a_token_outside_the_support_is_never_drawn(config):
    logits = random_logits()
    logits[:, ::3] = -torch.inf  # the first token is impossible, and so is the last
    assert VOCAB % 3 == 1
    support = reference(logits, config) > -torch.inf
    edges = [0.0, 2.0**-53, 1e-12, 0.5, 1.0 - 1e-7, 1.0 - 1e-12, 1.0 - 2.0**-53]
    for uniform in [*edges, *torch.linspace(0, 1, 50, dtype=torch.float64).tolist()[:-1]]:
        tokens, logprobs = sample_inverse_cdf(logits, torch.full((64,), uniform, dtype=torch.float64), config)
        assert support.gather(-1, tokens[:, None]).all(), uniform
        assert torch.isfinite(logprobs).all()


def test_uniforms_near_zero_and_one_draw_the_first_and_the_last_token():
    logits = random_logits()
    for uniform, token in ((0.0, 0), (1.0 - 2.0**-53, VOCAB - 1)):
        tokens, _ = sample_inverse_cdf(logits, torch.full((64,), uniform, dtype=torch.float64), SamplingConfig())
        assert (tokens == token).all()


@pytest.mark.parametrize("size", [8191, 8192, 8193, 150_000])
def test_a_large_vocabulary_is_drawn_to_its_ends(size):
    logits = random_logits(4, size)
    cdf = logits.double().softmax(-1).cumsum(-1)
    for uniform in (0.0, 0.3, 0.9, 1.0 - 2.0**-53):
        tokens, logprobs = sample_inverse_cdf(logits, torch.full((4,), uniform, dtype=torch.float64), SamplingConfig())
        upper = cdf.gather(-1, tokens[:, None])[:, 0]
        assert (upper - logprobs.exp() - 1e-5 <= uniform).all() and (uniform <= upper + 1e-5).all()


def test_a_large_vocabulary_is_searched_by_blocks_for_the_same_token():
    logits = random_logits(64, 20_000)
    logits[:, 3_000:9_000] = logits[:, 19_000:] = -torch.inf  # empty blocks inside and at the end
    uniform = uniforms(torch.arange(64), torch.zeros(64, dtype=torch.int64))
    uniform[0], uniform[1] = 0.0, 1.0 - 2.0**-53
    cdf = logits.double().softmax(-1).cumsum(-1)
    tokens, logprobs = sample_inverse_cdf(logits, uniform, SamplingConfig())
    upper = cdf.gather(-1, tokens[:, None])[:, 0]
    assert torch.isfinite(logprobs).all()
    assert (upper - logprobs.double().exp() - 1e-6 <= uniform).all() and (uniform <= upper + 1e-6).all()


@pytest.mark.parametrize("config", [SamplingConfig(0.0), SamplingConfig(0.0, 3, 0.5)], ids=str)
def test_greedy_takes_the_likeliest_token_for_certain(config):
    logits = random_logits()
    tokens, logprobs = sample(logits, None, None, config)
    assert torch.equal(tokens, logits.argmax(-1))
    assert torch.equal(logprobs, torch.zeros(64))


# ---- scores


@pytest.mark.parametrize(
    "config", [SamplingConfig(), SamplingConfig(0.7), SamplingConfig(1.5, 9), CONFIGS[-2]], ids=str
)
def test_the_gradient_of_a_score_is_that_of_log_softmax(config):
    targets = sample_inverse_cdf(random_logits(), torch.full((64,), 0.6, dtype=torch.float64), config)[0]
    weights = torch.linspace(-1, 2, 64)
    found, wanted = random_logits().requires_grad_(), random_logits().requires_grad_()
    (score(found, targets, config)[0] * weights).sum().backward()
    outside = reference(random_logits(), config) == -torch.inf
    plain = (wanted / config.temperature).masked_fill(outside, -torch.inf).log_softmax(-1)
    (plain.gather(-1, targets[:, None])[:, 0] * weights).sum().backward()
    torch.testing.assert_close(found.grad, wanted.grad, atol=1e-6, rtol=1e-5)
    assert found.grad.abs().max() > 0.1
    found, wanted = random_logits().requires_grad_(), random_logits().double().requires_grad_()
    entropy = score(found, targets, config, entropy_gradient=True)[1]
    (entropy * weights).sum().backward()
    probs = (wanted / config.temperature).masked_fill(outside, -torch.inf).softmax(-1)
    (-torch.xlogy(probs, probs + outside).sum(-1) * weights).sum().backward()
    torch.testing.assert_close(found.grad.double(), wanted.grad, atol=1e-5, rtol=1e-4)


@EVERY
def test_a_target_just_outside_the_filter_has_a_finite_score_and_gradient(config):
    logits = random_logits().requires_grad_()
    targets = logits.detach().argmin(-1)
    logprobs, entropy = score(logits, targets, config)
    logprobs.sum().backward()
    assert torch.isfinite(logprobs).all() and torch.isfinite(entropy).all() and torch.isfinite(logits.grad).all()
    assert not entropy.requires_grad
    inside = reference(logits.detach(), config).exp().gather(-1, targets[:, None])[:, 0]
    assert (logprobs.exp().double() >= inside - 1e-6).all()


def test_entropy_is_that_of_the_distribution_and_not_of_the_target():
    logits = torch.zeros(3, 8)
    for config, size in ((SamplingConfig(), 8), (SamplingConfig(0.5), 8)):
        _, entropy = score(logits, torch.tensor([0, 3, 7]), config)
        torch.testing.assert_close(entropy, torch.full((3,), math.log(size)))


# ---- uniforms and keys


def grid(keys: int, positions: int) -> Tensor:
    """Uniforms of some samples at some positions, [keys, positions]"""
    key = torch.tensor([sample_key(3, 1, k, 0) for k in range(keys)])
    return uniforms(key.repeat_interleave(positions), torch.arange(positions).repeat(keys)).view(keys, positions)


def correlation(x: Tensor, y: Tensor) -> float:
    return torch.corrcoef(torch.stack((x.flatten(), y.flatten())))[0, 1].item()


def test_uniforms_are_uniform_and_unrelated():
    x = grid(1000, 200)
    n = x.numel()
    assert x.dtype == torch.float64 and x.min() >= 0.0 and x.max() < 1.0
    assert x.min() < 20 / n and x.max() > 1 - 20 / n
    assert abs(x.mean().item() - 0.5) < 5 * math.sqrt(1 / 12 / n)
    assert abs(x.var().item() - 1 / 12) < 5 * math.sqrt(1 / 180 / n)
    for neighbours in (
        (x[:, 1:], x[:, :-1]),  # the next position
        (x[:, 2:], x[:, :-2]),
        (x[1:], x[:-1]),  # the next sample
        (x[1:, :-1], x[:-1, 1:]),  # the next sample, one position before
    ):
        assert abs(correlation(*neighbours)) < 5 / math.sqrt(n)
    assert chance(torch.histc(x, 64, 0.0, 1.0), torch.full((64,), n / 64).double()) > 1e-4
    low = (x * 2**20).frac()  # low bits count too
    assert abs(correlation(low[:, 1:], low[:, :-1])) < 5 / math.sqrt(n)
    assert x.unique().numel() == n


def test_a_uniform_depends_on_its_key_and_position_alone():
    keys = torch.tensor([sample_key(0, 0, i, 0) for i in range(50)])
    positions = torch.arange(50) * 3
    x = uniforms(keys, positions)
    assert torch.equal(uniforms(keys, positions), x)
    order = torch.randperm(50, generator=torch.Generator().manual_seed(0))
    assert torch.equal(uniforms(keys[order], positions[order]), x[order])
    for i in range(0, 50, 7):
        assert torch.equal(uniforms(keys[i : i + 1], positions[i : i + 1]), x[i : i + 1])
    assert not torch.equal(uniforms(keys + 1, positions), x) and not torch.equal(uniforms(keys, positions + 1), x)


def test_uniforms_are_splitmix64():
    """The outputs that are published for seed 1234567 (Rosetta Code, pseudo-random numbers, splitmix64)."""
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    found = uniforms(torch.full((5,), 1234567), torch.arange(5))
    assert found.tolist() == [(x >> 11) * 2.0**-53 for x in published]


def test_keys_of_many_samples_are_distinct():
    keys = {
        sample_key(seed, epoch, prompt, response)
        for seed, epoch, prompt, response in product((0, 1, 2, 2**40), (-1, 0, 1, 2), range(300), range(32))
    }
    assert len(keys) == 4 * 4 * 300 * 32
    assert all(-(2**63) <= key < 2**63 for key in keys)
    assert torch.tensor(sorted(keys)).numel() == len(keys)


def test_the_order_of_a_keys_parts_matters():
    assert len({sample_key(1, 2, 3), sample_key(3, 2, 1), sample_key(2, 1, 3), sample_key(1, 2, 3, 0)}) == 4
    assert sample_key(0, 0, 1, 0) != sample_key(0, 1, 0, 0) and sample_key(1, -1) != sample_key(0, 0)
    assert sample_key(1, 2, 3) == sample_key(1, 2, 3)
