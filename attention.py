"""Attention over packed sequences, for training and prefill; what only the engine uses is in engine/paged_attention.py.

Shapes: T packed tokens, n sequences, H query heads, K key/value heads, D head size.
"""

import inspect
from collections.abc import Callable
from functools import cache, partial
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine import gradients, native
from engine.host import upload


class PackedAttention:
    """Causal attention inside each of several sequences that lie one after another. [T, H, D] -> [T, H, D]

    On a GPU, in half precision, one kernel takes them as they lie, as does one on a CPU with a compiler. Else sequences
    of similar length are padded to one batch, so that a call costs a few operations and not some a sequence.
    """

    def __init__(self, lengths: list[int], device: torch.device):
        self.lengths, self.device = lengths, device
        self.varlen = VarlenAttention(lengths, lengths, device) if device.type == "cuda" else None
        self.starts: Tensor | None = None  # [n + 1], of compiled kernels
        self.batches: list[Tensor] = []  # each [n, L]: the packed row of every padded place

    def _pad(self) -> None:
        """Group the sequences into padded batches."""
        lengths = self.lengths
        *starts, total = accumulate(lengths, initial=0)
        order = sorted(range(len(lengths)), key=lambda i: lengths[i])
        inverse = torch.empty(total, dtype=torch.int64)
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

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int = 0) -> Tensor:
        """`window`: newest tokens that a token attends to, itself included; 0: all."""
        if self.varlen and takes_flash(q):
            return self.varlen(q, k, v, window)
        if native.can_attend(q):
            if self.starts is None:
                self.starts = torch.tensor([*accumulate(self.lengths, initial=0)])
            return gradients.attend(q, k, v, self.starts, window)
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
            narrow = 0 < window < shape[1]
            mask = _causal_mask(shape[1], shape[1], window, q.device) if narrow else None
            out = F.scaled_dot_product_attention(query, key, value, mask, is_causal=not narrow)  # [n, H, L, D]
            outputs.append(out.transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs).index_select(0, self.inverse)


def takes_flash(q: Tensor) -> bool:
    """Whether flash attention takes queries [T, H, D]: half precision on a GPU, heads of 8, 16 .. 256 numbers."""
    return q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and q.shape[2] % 8 == 0 and q.shape[2] <= 256


class VarlenAttention:
    """Causal attention of packed sequences whose queries are the last tokens of their keys.

    q [sum of query lengths, H, D], k and v [sum of key lengths, K, D] -> like q. Flash attention for half precision on
    a GPU (torch.nn.attention.varlen), else one call a sequence.
    """

    def __init__(self, query_lengths: list[int], key_lengths: list[int], device: torch.device):
        self.lengths = (query_lengths, key_lengths)
        self.longest = [max(lengths) for lengths in self.lengths]
        self.bounds = [upload([*accumulate(lengths, initial=0)], device, torch.int32) for lengths in self.lengths]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, window: int = 0) -> Tensor:
        if takes_flash(q):
            return _flash_varlen()(q, k, v, *self.bounds, *self.longest, window_size=(window - 1, 0))
        groups, parts = q.shape[1] // k.shape[1], []
        for query, *kv in zip(q.split(self.lengths[0]), k.split(self.lengths[1]), v.split(self.lengths[1])):
            mask = _causal_mask(len(query), len(kv[0]), window, q.device)
            key, value = (x.repeat_interleave(groups, 1).transpose(0, 1)[None] for x in kv)  # heads first
            out = F.scaled_dot_product_attention(query.transpose(0, 1)[None], key, value, mask)  # [1, H, queries, D]
            parts.append(out[0].transpose(0, 1))
        return torch.cat(parts)


def _causal_mask(num_queries: int, num_keys: int, window: int, device: torch.device) -> Tensor:
    """Return which keys each query attends to, the queries being the last of the keys. [queries, keys] bool"""
    behind = num_keys - num_queries
    mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril(behind)
    return mask.triu(behind - window + 1) if window else mask


@cache
def _flash_varlen() -> Callable[..., Any]:
    from torch.nn.attention.varlen import varlen_attn  # not on CPU builds of every torch

    # Several query heads share a head of keys: torch 2.11 takes them so, later ones must be told.
    told: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    return partial(varlen_attn, **told)
