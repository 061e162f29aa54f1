"""Mixtures of experts: which experts each token takes, as drawn or as the rollout recorded it, and their products.

Shapes: T tokens, E experts of which a token takes k; a tensor-parallel rank has E / size of them, all of these whole.
"""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from core import Example, ModelShape

# (layer, own choice [T, k]) -> the choice to take [T, k], int64
Choose = Callable[[int, Tensor], Tensor]


def own_choice(layer: int, chosen: Tensor) -> Tensor:
    return chosen


def weigh(logits: Tensor, top_k: int, normalise: bool, layer: int, choose: Choose) -> tuple[Tensor, Tensor]:
    """Return the experts of each token and their weights, in the dtype of the router's logits. [T, E] -> [T, k] each

    Whoever chooses, the weights are the probabilities that this router gives: it learns about those experts.
    """
    probabilities = logits.softmax(-1, dtype=torch.float32)
    chosen = choose(layer, probabilities.topk(top_k, -1).indices)
    weights = probabilities.gather(1, chosen)
    weights = weights / weights.sum(-1, keepdim=True) if normalise else weights
    return chosen, weights.to(logits.dtype)


def mix(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    chosen: Tensor,
    weights: Tensor,
    first: int,
    silu_mul: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return the weighted sum of what the experts make of each token; of those that this rank has. [T, hidden]

    x [T, hidden]; gate_up [experts here, 2 * I, hidden]; down [experts here, hidden, I]; chosen, weights [T, k];
    `first`: the first expert here. Depends on shapes only where grouped products do, so a CUDA graph can hold it.
    """
    (num_tokens, top_k), here = chosen.shape, len(gate_up)
    expert = chosen.flatten() - first
    expert = expert.where((expert >= 0) & (expert < here), here)  # other ranks' experts come last
    ordered, order = expert.sort(stable=True)
    ends = torch.searchsorted(ordered, torch.arange(here, device=x.device), right=True).int()
    hidden = grouped(x.index_select(0, order // top_k), gate_up, ends)
    parts = grouped(silu_mul(hidden), down, ends)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
    parts = parts.index_select(0, back).view(num_tokens, top_k, -1)
    return (parts * weights[:, :, None]).sum(1)


def waits(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether `grouped` waits for the GPU, so that no CUDA graph can hold it.

    torch 2.13 has a kernel that does not for bfloat16 on Hopper (9.0) and Blackwell's B200 (10.0) only.
    """
    if device.type != "cuda":
        return False
    return dtype != torch.bfloat16 or torch.cuda.get_device_capability(device)[0] not in (9, 10)


def grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply rows ends[e - 1] .. ends[e] - 1 of x [n, in] by weight[e] [out, in]; rows after the last end give 0.

    On a GPU one kernel; on a CPU a product for each expert that has rows.
    """
    if x.is_cuda:
        out = F.grouped_mm(x, weight.transpose(1, 2), offs=ends)  # leaves the rows after the last end as they are
        return out.masked_fill(torch.arange(len(x), device=x.device)[:, None] >= ends[-1], 0.0)
    parts, start = [], 0
    for own, end in zip(weight.unbind(), ends.tolist()):  # unbind: its backward makes one gradient of all
        if end > start:
            parts.append(F.linear(x[start:end], own))
        start = end
    return torch.cat([*parts, x.new_zeros(len(x) - start, weight.shape[1])])


def record(memory: Tensor | None, pages: Tensor, places: Tensor) -> Choose:
    """Choose as the router does, and write it to each token's place in a page. [pages, page, layers, k], [T], [T]"""
    if memory is None:
        return own_choice

    def choose(layer: int, chosen: Tensor) -> Tensor:
        memory[pages, places, layer] = chosen.to(memory.dtype)
        return chosen

    return choose


def record_rows(memory: Tensor | None, positions: Tensor, table: Tensor) -> Choose:
    """As `record`, of rows with a table of pages [n, max_pages]. Dead rows, of position -1, write to the last page."""
    if memory is None:
        return own_choice
    at = positions.clamp(min=0)
    pages = table.gather(1, (at // memory.shape[1])[:, None].long())[:, 0].long()
    return record(memory, pages.where(positions >= 0, len(memory) - 1), at % memory.shape[1])


class Replay:
    """Takes the experts that the rollout took, where it recorded them, and adds to `counts` what was taken.

    counts [layers, 2 + E]: choices that were recorded; of these, those that the router would make now; tokens of each
    expert. A layer that is computed again counts again.
    """

    def __init__(self, shape: ModelShape, examples: Sequence[Example], counts: Tensor):
        layers, top_k, lengths = shape.num_layers, shape.experts_per_token, [e.num_tokens for e in examples]
        total = sum(lengths)
        taken, known = torch.zeros(total, layers, top_k, dtype=torch.uint8), torch.zeros(total, 1, dtype=torch.bool)
        for example, start in zip(examples, accumulate(lengths, initial=0)):
            if example.experts:
                own = torch.frombuffer(bytearray(example.experts), dtype=torch.uint8).view(-1, layers, top_k)
                taken[start : start + len(own)], known[start : start + len(own)] = own, True
        self.taken, self.known = taken.to(counts.device), known.to(counts.device)
        self.counts = counts

    def __call__(self, layer: int, chosen: Tensor) -> Tensor:
        recorded = self.taken[:, layer].long()
        same = (recorded.sort(-1).values == chosen.sort(-1).values).all(-1, keepdim=True)
        chosen, counts = recorded.where(self.known, chosen), self.counts[layer]
        counts[0] += self.known.sum()
        counts[1] += (same & self.known).sum()
        counts[2:].scatter_add_(0, chosen.flatten(), counts.new_ones(chosen.numel()))
        return chosen


def replay(shape: ModelShape, examples: Sequence[Example], counts: Tensor | None) -> Choose:
    """Return the choices of packed examples; the router's own where the model is no mixture, or without counts."""
    return own_choice if counts is None or not len(counts) else Replay(shape, examples, counts)


def no_counts(shape: ModelShape, device: torch.device) -> Tensor:
    """Return counts of `Replay`, all 0; of a model that is no mixture none."""
    layers = shape.num_layers if shape.num_experts else 0
    return torch.zeros(layers, 2 + shape.num_experts, dtype=torch.float64, device=device)


def routing_record(counts: Tensor) -> dict[str, float]:
    """Return from the sum of all counts how uneven the load of experts is, and how many choices the trainer shares.

    expert_load: tokens of the busiest expert over the mean, 1 where all have as many; the mean over layers, and the
    worst. experts_same: share of the rollout's choices that the router of the trainer would make too.
    """
    if not len(counts):
        return {}
    (replayed, same), load = counts[:, :2].sum(0).tolist(), counts[:, 2:]
    busiest = load.max(-1).values / load.mean(-1).clamp(min=1e-9)
    same = same / replayed if replayed else math.nan
    return {"expert_load": busiest.mean().item(), "expert_load_max": busiest.max().item(), "experts_same": same}
