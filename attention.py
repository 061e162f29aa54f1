"""Attention over packed sequences (training, prefill) and over KV pages (decode on a CPU).

Shapes: T packed tokens, n sequences, P pages in use, H query heads, K key/value heads, G = H / K, D head size.
"""

import inspect
import math
from collections.abc import Callable
from functools import cache, partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.graphs import upload

LOG2_E = math.log2(math.e)


class PackedAttention:
    """Causal attention inside each of several sequences that lie one after another. [T, H, D] -> [T, H, D]

    On a GPU, in half precision, one kernel takes them as they lie. Else sequences of similar length are padded to one
    batch, so that a call costs a few operations and not some a sequence; all other layers work on the packed tokens.
    """

    def __init__(self, lengths: list[int], device: torch.device):
        self.lengths, self.device = lengths, device
        self.varlen = VarlenAttention(lengths, lengths, device) if device.type == "cuda" else None
        self.batches: list[Tensor] = []  # each [n, L]: the packed row of every padded place
        if not self.varlen:
            self._pad()

    def _pad(self) -> None:
        """Group the sequences into padded batches."""
        lengths = self.lengths
        starts, start = [], 0
        for length in lengths:
            starts.append(start)
            start += length
        order = sorted(range(len(lengths)), key=lambda i: lengths[i])
        inverse = torch.empty(start, dtype=torch.int64)
        done = offset = 0
        while done < len(order):
            shortest = lengths[order[done]]
            end = done
            while end < len(order) and lengths[order[end]] <= shortest * 5 // 4 + 8:
                end += 1
            members, width = order[done:end], lengths[order[end - 1]]
            own = torch.tensor([lengths[i] for i in members])[:, None]
            column = torch.arange(width)[None]  # [1, L]
            first = torch.tensor([starts[i] for i in members])[:, None]
            rows = first + torch.minimum(column, own - 1)  # [n, L]; padding repeats the last token, unattended
            inverse[rows[column < own]] = torch.arange(rows.numel()).view_as(rows)[column < own] + offset
            self.batches.append(rows.to(self.device))
            offset += rows.numel()
            done = end
        self.inverse = inverse.to(self.device)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.varlen and q.dtype != torch.float32:
            return self.varlen(q, k, v)
        if not self.batches:
            self._pad()
        groups = q.shape[1] // k.shape[1]
        outputs = []
        for rows in self.batches:
            shape = rows.shape
            query, key, value = (
                x.index_select(0, rows.flatten()).view(*shape, *x.shape[1:]).transpose(1, 2) for x in (q, k, v)
            )
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
            out = F.scaled_dot_product_attention(query, key, value, is_causal=True)  # [n, H, L, D]
            outputs.append(out.transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs).index_select(0, self.inverse)


class VarlenAttention:
    """Causal attention of packed sequences whose queries are the last tokens of their keys.

    q [sum of query lengths, H, D], k and v [sum of key lengths, K, D] -> like q. Flash attention for half precision on
    a GPU (torch.nn.attention.varlen), else one call a sequence.
    """

    def __init__(self, query_lengths: list[int], key_lengths: list[int], device: torch.device):
        self.lengths = (query_lengths, key_lengths)
        self.longest = [max(lengths) for lengths in self.lengths]
        self.bounds = [upload([0, *accumulate(lengths)], device, torch.int32) for lengths in self.lengths]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        if q.is_cuda and q.dtype != torch.float32:
            return _flash_varlen()(q, k, v, *self.bounds, *self.longest)
        parts = []
        for query, key, value in zip(q.split(self.lengths[0]), k.split(self.lengths[1]), v.split(self.lengths[1])):
            mask = torch.ones(len(query), len(key), dtype=torch.bool, device=q.device).tril(len(key) - len(query))
            query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))  # heads first
            parts.append(F.scaled_dot_product_attention(query, key, value, mask)[0].transpose(0, 1))
        return torch.cat(parts)


@cache
def _flash_varlen() -> Callable[..., Any]:
    from torch.nn.attention.varlen import varlen_attn  # not on CPU builds of every torch

    is_old = "is_causal" in inspect.signature(varlen_attn).parameters  # torch 2.10
    return partial(varlen_attn, **({"is_causal": True} if is_old else {"window_size": (-1, 0)}))


def attend_to_prefix(q: Tensor, k_pages: Tensor, v_pages: Tensor, start: int) -> Tensor:
    """Causal attention of one sequence's tokens from position `start` on to everything before them.

    q [T, H, D]; its pages in order [pages, K, page, D], the tokens' own keys and values included -> [T, H, D]
    """
    end = start + len(q)
    key, value = (x.transpose(0, 1).flatten(1, 2)[:, :end] for x in (k_pages, v_pages))  # [K, end, D]
    groups = q.shape[1] // key.shape[0]
    key, value = key.repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)
    causal = torch.arange(end, device=q.device) <= torch.arange(start, end, device=q.device)[:, None]  # [T, end]
    return F.scaled_dot_product_attention(q.transpose(0, 1), key, value, attn_mask=causal).transpose(0, 1)


def decode_by_page(q: Tensor, k_pages: Tensor, v_pages: Tensor, owner: Tensor | None, bias: Tensor) -> Tensor:
    """CPU decode attention without a gather: each page is one batch element, pages are merged by their softmax sums.

    q [n, H, D]; k_pages, v_pages [P, K, page, D], the pages in use and no others; owner [P] int64, the sequence of each
    page, or None when page i is all of sequence i; bias [P * K, 1, places], 0 on filled places and -inf elsewhere;
    later places of all pages are empty -> [n, H, D]

    Two batched products: 2 to 4 times faster than one call of torch's flash attention for so few queries a page.
    """
    n, num_heads, size = q.shape
    num_pages, num_kv = k_pages.shape[:2]
    places = bias.shape[2]
    keys, values = (pages[:, :, :places].flatten(0, 1) for pages in (k_pages, v_pages))  # views [P * K, places, D]
    groups, scale, of_page = num_heads // num_kv, size**-0.5, (num_pages, num_heads)
    flat = q.reshape(n, -1)
    query = (flat if owner is None else flat.index_select(0, owner)).view(-1, groups, size)
    if owner is None:  # nothing to merge: a tenth of a small step
        weights = torch.baddbmm(bias, query, keys.transpose(1, 2), alpha=scale).softmax(-1)
        return torch.bmm(weights, values).view(n, num_heads, size)
    # Powers of two: torch's exp2 takes a third of the time of its exp, less still where scores are -inf.
    scores = torch.baddbmm(bias, query, keys.transpose(1, 2), alpha=scale * LOG2_E)  # [P * K, G, places]
    peak = torch.full((n, num_heads), -torch.inf, dtype=q.dtype).scatter_reduce_(
        0, owner[:, None].expand(of_page), scores.amax(-1).view(of_page), "amax"
    )
    weights = scores.sub_(peak.index_select(0, owner).view(-1, groups, 1)).exp2_()
    total = torch.zeros_like(peak).index_add_(0, owner, weights.sum(-1).view(of_page))
    out = torch.zeros_like(flat).index_add_(0, owner, torch.bmm(weights, values).view(num_pages, -1))
    return out.view(n, num_heads, size).div_(total[:, :, None])


# ---- attention of one engine step --------------------------------------------------------------------------------


class PageAttention:
    """Decode attention of the CPU path, with what is the same for all layers computed once."""

    def __init__(self, engine: Any, n: int, beside_prefill: bool):
        """All but the bias on the host, where these small steps cost a third of what they cost as tensors."""
        used, page = engine.pages.used, engine.config.page_size
        owner, position = engine.page_row[:used], engine.host_length[:n]
        self.page = torch.from_numpy(engine.table[np.arange(n), position // page])
        if beside_prefill:  # pages in prefill belong to one row too many, whose result is dropped
            owner, position = np.minimum(owner, n), np.append(position, 0)
        filled = (position[owner] + 1 - engine.pages.start[:used]).clip(1, page)
        is_simple = used == n and bool((owner == np.arange(n)).all())
        self.used, self.extra, self.n = used, int(beside_prefill), n
        self.owner = None if is_simple else torch.from_numpy(owner)
        bias = engine.bias[torch.from_numpy(filled), : int(filled.max())]  # [P, places]: young pages are not read whole
        self.bias = bias.repeat_interleave(engine.pool.shape[3], 0)[:, None]

    def __call__(self, q: Tensor, k_pages: Tensor, v_pages: Tensor) -> Tensor:
        q = F.pad(q, (0, 0, 0, 0, 0, self.extra)) if self.extra else q
        return decode_by_page(q, k_pages[: self.used], v_pages[: self.used], self.owner, self.bias)[: self.n]


class Chunks:
    """The prefill part of one forward. Chunks that continue a context come first; all others start one.

    `gather` is for a GPU: keys and values of all chunks are gathered from their pages for one attention kernel.
    """

    def __init__(self, chunks: list[tuple[Any, int, int]], page: int, device: torch.device, gather: bool):
        spans = [(np.asarray(p.leader.pages), start, end) for p, start, end in chunks]
        ranges = [np.arange(start, end) for _, start, end in spans]
        pages = [own[r // page] for (own, _, _), r in zip(spans, ranges, strict=True)]
        self.token_ids = upload([t for p, start, end in chunks for t in p.context[start:end]], device)
        self.positions = upload(np.concatenate(ranges), device)
        self.page = upload(np.concatenate(pages), device)
        self.varlen = None
        if gather:
            whole = [np.arange(end) for _, _, end in spans]
            key_pages = [own[r // page] for (own, _, _), r in zip(spans, whole, strict=True)]
            self.key_page = upload(np.concatenate(key_pages), device)
            self.key_offset = upload(np.concatenate(whole) % page, device)
            lengths = [end - start for _, start, end in spans], [end for _, _, end in spans]
            self.varlen = VarlenAttention(*lengths, device)
            return
        self.continued = [span for span in spans if span[1]]
        fresh = [end for _, start, end in spans if not start]
        self.packed = PackedAttention(fresh, device) if fresh else None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor) -> Tensor:
        """q [T, H, D] and k, v [T, K, D] of the chunks' tokens, already written to their pages -> [T, H, D]"""
        if self.varlen:
            key, value = (pages[self.key_page, :, self.key_offset] for pages in (k_pages, v_pages))
            return self.varlen(q, key, value)
        parts, at = [], 0
        for pages, start, end in self.continued:
            parts.append(attend_to_prefix(q[at : at + end - start], k_pages[pages], v_pages[pages], start))
            at += end - start
        if self.packed is not None:
            parts.append(self.packed(layer, q[at:], k[at:], v[at:]))
        return torch.cat(parts)
