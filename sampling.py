"""One distribution, for drawing tokens and for scoring them.

Rollout and trainer share `filter_logits`, so that the log-prob of a sampled token is the log-prob under the
distribution it was really drawn from, temperature, top-k, top-p and min-p included.
"""

import math
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from config import option
from engine import kernels
from engine.kernels import GOLDEN, MIX1, MIX2, signed

_MASK = (1 << 64) - 1
COLDEST = 1e-30  # a smaller temperature would overflow fp32 logits, and a smaller top_p could be 0 in fp32


@dataclass(frozen=True)
class SamplingConfig:
    temperature: float = option(1.0, "softmax temperature; 0 is greedy", min=0.0, max=100.0)
    top_k: int = option(0, "draw only from the k likeliest tokens; 0 is off", min=0)
    top_p: float = option(1.0, "draw from the smallest set of tokens with this probability", min=COLDEST, max=1.0)
    min_p: float = option(
        0.0,
        "draw from tokens whose probability is at least this share of the likeliest token's; 0 is off",
        min=0.0,
        max=1.0,
    )

    @property
    def scale(self) -> float:
        """What logits are divided by; greedy decoding leaves them as they are."""
        return max(self.temperature, COLDEST) if self.temperature else 1.0

    @property
    def truncates(self) -> bool:
        return bool(self.top_k or self.top_p < 1.0 or self.min_p)


def _mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * MIX1) & _MASK
    x = ((x ^ (x >> 27)) * MIX2) & _MASK
    return x ^ (x >> 31)


def sample_key(*parts: int) -> int:
    """Return a signed 64-bit key for (seed, epoch, prompt index, response index): the stream of one sample."""
    key = 0
    for part in parts:
        key = _mix((key + GOLDEN + part) & _MASK)
    return signed(key)


def filter_logits(logits: Tensor, config: SamplingConfig) -> Tensor:
    """Return fp32 logits of the sampled distribution: temperature, top-k, top-p, min-p, in this order. [n, V] -> [n, V]

    Ties at a threshold are kept, so the result does not depend on the order of a sort.
    """
    logits = logits.float()
    if config.scale != 1.0:
        logits = logits / config.scale
    if 0 < config.top_k < logits.shape[-1]:
        threshold = logits.detach().topk(config.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < threshold, -torch.inf)
    if config.top_p < 1.0:
        threshold = kernels.least_in_nucleus(logits.detach(), config.top_p)
        logits = logits.masked_fill(logits < threshold, -torch.inf)
    if config.min_p:
        threshold = logits.detach().amax(-1, keepdim=True) + math.log(config.min_p)
        logits = logits.masked_fill(logits < threshold, -torch.inf)
    return logits


def sample(
    logits: Tensor, keys: Tensor | None, positions: Tensor | None, config: SamplingConfig
) -> tuple[Tensor, Tensor]:
    """Draw one token per row by a race. [n, V], [n] int64, [n] int64 -> tokens [n] int64, log-probs [n] float32

    keys: of the samples (`sample_key`); positions: of the tokens to draw in their responses. A token is a pure function
    of its distribution, key and position: it depends neither on the rest of the batch nor on engine or order. Greedy
    (temperature 0) draws from a point mass: it needs neither key nor position, and its log-probs are 0.
    """
    if config.temperature == 0.0:
        tokens = logits.max(-1).indices  # as argmax, but faster on a CPU
        return tokens, torch.zeros(tokens.shape, device=logits.device)
    assert keys is not None and positions is not None, "only greedy decoding needs no keys"
    if config.truncates:
        return kernels.race(filter_logits(logits, config), keys, positions, 1.0)
    return kernels.race(logits, keys, positions, config.scale)


def score(
    logits: Tensor, targets: Tensor, config: SamplingConfig, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies of the sampled distribution. [n, V], [n] or [n, m] -> as targets, [n]; float32

    The target, of several the first, always counts as inside top-p: it was drawn, even if rounding now puts it just
    outside. Entropies have a gradient only with `entropy_gradient`: it keeps one more tensor of the logits' size.
    """
    kept, wanted = filter_logits(logits, config), targets.view(len(targets), -1)
    if config.truncates:
        drawn = wanted[:, :1]
        kept = kept.scatter(-1, drawn, logits.float().gather(-1, drawn) / config.scale)
    logprobs = kept.log_softmax(-1)
    with nullcontext() if entropy_gradient else torch.no_grad():
        entropy = -(logprobs.exp() * logprobs.clamp(-1e4)).sum(-1)  # of -inf, too, 0: float32 has no exp(-1e4)
    return logprobs.gather(-1, wanted).view(targets.shape), entropy
