"""The sampled distribution is `transformers`', is really drawn from, and scores a token as it was drawn."""

import math
from itertools import product

import pytest
import torch
from conftest import thorough
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.kernels import block_size, uniforms
from sampling import COLDEST, SamplingConfig, filter_logits, sample, sample_key, score

VOCAB = 40
CONFIGS = [
    SamplingConfig(temperature, top_k, top_p)
    for temperature, top_k, top_p in product((0.3, 1.0, 2.5), (0, 1, 7, VOCAB, 1000), (1.0, 0.9, 0.35, COLDEST))
] + [
    SamplingConfig(temperature, top_k, top_p, min_p)
    for temperature, top_k, top_p, min_p in product((0.7, 1.0), (0, 7), (1.0, 0.9), (1e-3, 0.2, 1.0))
]
EVERY = pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"T{c.temperature}-k{c.top_k}-p{c.top_p}-m{c.min_p}")


def random_logits(rows: int = 64, size: int = VOCAB, seed: int = 0) -> Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * 2.0


def keys_of(count: int, seed: int = 3) -> Tensor:
    """The keys of some samples, [count] int64"""
    return torch.tensor([sample_key(seed, 1, i, 0) for i in range(count)])


def draw(logits: Tensor, config: SamplingConfig = SamplingConfig(), position: int = 0) -> tuple[Tensor, Tensor]:  # noqa: B008
    """Draw a token of each row, as of different samples."""
    return sample(logits, keys_of(len(logits)), torch.full((len(logits),), position), config)


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
    tokens, logprobs = draw(logits, config)
    assert tokens.dtype == torch.int64 and logprobs.dtype == torch.float32 and tokens.shape == logprobs.shape == (64,)
    torch.testing.assert_close(logprobs.double(), wanted.gather(-1, tokens[:, None])[:, 0], atol=1e-5, rtol=0)
    scored, entropy = score(logits, tokens, config)
    assert torch.equal(scored, logprobs)
    probs = wanted.exp()
    torch.testing.assert_close(entropy.double(), -torch.xlogy(probs, probs).sum(-1), atol=1e-4, rtol=0)


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


@pytest.mark.slow
@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.99, 0.9999])
@pytest.mark.parametrize("scale, is_narrow", [thorough(0.1, False), (2.0, False), (6.0, True), thorough(9.0, True)])
def test_top_p_sorts_a_large_vocabulary_only_where_it_must(scale, is_narrow, top_p, monkeypatch):
    """The same tokens are drawn as from the sorted vocabulary."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(40, 20_000, generator=generator) * scale
    logits[:20] = (logits[:20] * 4).round() / 4  # ties
    ordered = logits.sort(descending=True).values
    before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
    least = ordered.masked_fill(before >= top_p, torch.inf).amin(-1, keepdim=True)
    exact = draw(logits.masked_fill(logits < least, -torch.inf))
    rows, sort = [0], Tensor.sort
    monkeypatch.setattr(Tensor, "sort", lambda x, **how: rows.append(len(x)) or sort(x, **how))
    drawn = draw(logits, SamplingConfig(top_p=top_p))
    if is_narrow and top_p < 0.99:  # few tokens have most of the mass
        assert sum(rows) < 4
    assert all(torch.equal(mine, other) for mine, other in zip(drawn, exact, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_filtered_and_drawn_in_fp32(dtype):
    logits = random_logits().to(dtype)
    config = SamplingConfig(0.7, 10, 0.9)
    half, full = (draw(x, config) for x in (logits, logits.float()))
    assert all(torch.equal(mine, other) for mine, other in zip(half, full, strict=True))
    tokens = logits.argmax(-1)
    assert torch.equal(score(logits, tokens, config)[0], score(logits.float(), tokens, config)[0])


@pytest.mark.parametrize("temperature", [1e-45, 1e-37, 1e-20, 1e-3, 100.0])
def test_an_extreme_temperature_gives_numbers(temperature):
    logits = random_logits()
    tokens, logprobs = draw(logits, SamplingConfig(temperature))
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
def test_the_drawn_token_wins_a_race_of_the_blocks_and_one_inside_the_block(config):
    """By the definition, in float64; where two are nearly equal, rounding may decide."""
    logits, keys, position = random_logits(), keys_of(64), 5
    tokens, _ = draw(logits, config, position)
    size, probs = block_size(VOCAB), reference(logits, config).exp()
    blocks = -(-VOCAB // size)
    luck = -uniforms(keys, torch.full((64,), position), blocks + size).log()
    for token, row, times in zip(tokens.tolist(), probs, luck, strict=True):
        arrivals = [times[i] / part.sum() for i, part in enumerate(row.split(size))]
        assert arrivals[token // size] <= min(arrivals) * (1 + 1e-5)
        inside = row[token // size * size :][:size]
        arrivals = [times[blocks + i] / p for i, p in enumerate(inside)]
        assert arrivals[token % size] <= min(arrivals) * (1 + 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3, 255, 256, 8191, 20_000])
def test_frequencies_in_a_larger_vocabulary_follow_the_distribution(size):
    """Of the likeliest tokens, of all blocks, and of all places inside a block."""
    count = 20_000 if size < 1000 else 5_000
    logits = random_logits(1, size, 4) - 0.3 * (torch.arange(size) + 1).log()
    keys = keys_of(count // 100).repeat_interleave(100)
    tokens, _ = sample(logits.expand(count, -1), keys, torch.arange(100).repeat(count // 100), SamplingConfig())
    probs, i, block = logits.double().softmax(-1)[0], torch.arange(size), block_size(size)
    likeliest = torch.empty(size, dtype=torch.int64)
    likeliest[probs.argsort(descending=True)] = i.clamp(max=60)
    for kind in (likeliest, i // block, i % block):
        expected = torch.zeros(size).double().index_add(0, kind, probs) * count
        observed = torch.bincount(kind[tokens], minlength=size).double()
        rare = expected < 10
        pairs = [
            [x[~rare], x[rare].sum()[None]] if expected[rare].sum() > 5 else [x[~rare]] for x in (observed, expected)
        ]
        assert len(pairs[0][0]) == 1 or chance(*map(torch.cat, pairs)) > 1e-4


def test_tokens_of_neighbours_are_independent():
    """Of the next position, of the next sample, and of both."""
    samples, positions, vocab = 500, 200, 6
    logits = torch.tensor([[0.3, 0.25, 0.2, 0.12, 0.08, 0.05]]).log()
    keys = keys_of(samples).repeat_interleave(positions)
    drawn, _ = sample(logits.expand(len(keys), -1), keys, torch.arange(positions).repeat(samples), SamplingConfig())
    x = drawn.view(samples, positions)
    probs = logits[0].double().exp()
    for one, other in ((x[:, 1:], x[:, :-1]), (x[1:], x[:-1]), (x[1:, :-1], x[:-1, 1:])):
        pairs = torch.bincount((one * vocab + other).flatten(), minlength=vocab**2).double()
        expected = torch.outer(probs, probs).flatten() * one.numel()
        assert chance(pairs, expected) > 1e-4
    assert x.unique(dim=0).shape == x.shape  # no two samples alike


@pytest.mark.parametrize("config", [SamplingConfig(), SamplingConfig(0.7, 10, 0.9)], ids=str)
@pytest.mark.parametrize("size", [VOCAB, 20_000])
def test_a_token_depends_on_its_own_row_key_and_position_alone(size, config):
    logits, keys, positions = random_logits(32, size), keys_of(32), torch.arange(32) * 3
    tokens, logprobs = sample(logits, keys, positions, config)
    order = torch.randperm(32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(sample(logits[order], keys[order], positions[order], config)[0], tokens[order])
    for i in range(0, 32, 7):
        one = slice(i, i + 1)
        alone = sample(logits[one], keys[one], positions[one], config)
        assert torch.equal(alone[0], tokens[one])
        torch.testing.assert_close(alone[1], logprobs[one])
    for other in (sample(logits, keys + 1, positions, config), sample(logits, keys, positions + 1, config)):
        assert not torch.equal(other[0], tokens)


@EVERY
def test_a_token_outside_the_support_is_never_drawn(config):
    logits = random_logits()
    logits[:, ::3] = -torch.inf  # the first token is impossible, and so is the last
    assert VOCAB % 3 == 1
    support = reference(logits, config) > -torch.inf
    for position in range(20):
        tokens, logprobs = draw(logits, config, position)
        assert support.gather(-1, tokens[:, None]).all(), position
        assert torch.isfinite(logprobs).all()


@pytest.mark.parametrize("size", [1, 2, 3, 8191, 8192, 8193, 150_000])
def test_every_token_can_be_drawn_to_the_ends_of_a_vocabulary(size):
    for token in {0, size // 2, size - 1}:
        logits = torch.full((4, size), -torch.inf)  # blocks are empty but for one
        logits[:, token] = 1.0
        tokens, logprobs = draw(logits)
        assert tokens.tolist() == [token] * 4 and logprobs.tolist() == [0.0] * 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "size, spread, floor", [(258, 5.0, 2.0), (258, 0.5, 5.0), thorough(20_000, 5.0, 3.0), thorough(20_000, 0.5, 10.0)]
)
def test_slightly_different_weights_draw_the_same_token_more_often_than_by_inverse_cdf(size, spread, floor):
    """Peaked and flat distributions. No draw can differ less often than the distributions do: TV.

    A race differs at most about twice as often, the inverse of the CDF at least `floor` times as often as a race.
    """
    rows = 1000
    logits = random_logits(rows, size) / 2.0 * spread
    pair = logits, logits + 0.02 * random_logits(rows, size, seed=1)
    probs = [x.double().softmax(-1) for x in pair]
    distance = (probs[0] - probs[1]).abs().sum(-1).mean().item() / 2
    rounds, race, inverse = 5 if size > 1000 else 20, 0, 0
    for position in range(rounds):
        old, new = (draw(x, position=position)[0] for x in pair)
        u = uniforms(keys_of(rows), torch.full((rows,), position), 1)
        by_cdf, other = (torch.searchsorted(p.cumsum(-1), u) for p in probs)
        race, inverse = race + (old != new).sum().item(), inverse + (by_cdf != other).sum().item()
    draws = rounds * rows
    noise = 4 * math.sqrt(2 * distance / draws)
    assert distance - noise < race / draws < 2 * distance + noise
    assert inverse > floor * race > 0


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
    targets = draw(random_logits(), config)[0]
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


def correlation(x: Tensor, y: Tensor) -> float:
    return torch.corrcoef(torch.stack((x.flatten(), y.flatten())))[0, 1].item()


def test_uniforms_are_uniform_and_unrelated():
    x = uniforms(keys_of(200).repeat_interleave(40), torch.arange(40).repeat(200), 30).view(200, 40, 30)
    n = x.numel()
    assert x.dtype == torch.float64 and x.min() > 0.0 and x.max() < 1.0
    assert x.min() < 20 / n and x.max() > 1 - 20 / n
    assert abs(x.mean().item() - 0.5) < 5 * math.sqrt(1 / 12 / n)
    assert abs(x.var().item() - 1 / 12) < 5 * math.sqrt(1 / 180 / n)
    low = (x * 2**20).frac()  # low bits count too
    for numbers in (x, low):
        for neighbours in (
            (numbers[..., 1:], numbers[..., :-1]),  # the next place
            (numbers[:, 1:], numbers[:, :-1]),  # the next position
            (numbers[1:], numbers[:-1]),  # the next sample
            (numbers[:, 1:, :-1], numbers[:, :-1, 1:]),  # the next position, one place before
            (numbers[1:, :-1], numbers[:-1, 1:]),  # the next sample, one position before
        ):
            assert abs(correlation(*neighbours)) < 5 / math.sqrt(n)
    assert chance(torch.histc(x, 64, 0.0, 1.0), torch.full((64,), n / 64).double()) > 1e-4
    assert x.unique().numel() == n


def test_numbers_of_a_place_do_not_depend_on_how_many_are_asked_for():
    keys, positions = keys_of(5), torch.arange(5) * 1000
    assert torch.equal(uniforms(keys, positions, 900)[:, :7], uniforms(keys, positions, 7))


def test_uniforms_are_splitmix64():
    """The outputs that are published for seed 1234567 (Rosetta Code, pseudo-random numbers, splitmix64)."""
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    found = uniforms(torch.tensor([1234567]), torch.tensor([0]), 5)
    assert found[0].tolist() == [((x >> 12) + 0.5) * 2.0**-52 for x in published]


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
