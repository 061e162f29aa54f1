"""Attention of one engine step, to what stands in KV pages.

Shapes: n decoding rows, T tokens, H query heads, K key/value heads, D head size. Decoding rows attend by engine/cpu.py,
or, on a GPU, in a step of their own (engine/kernels.py).
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from attention import PackedAttention, VarlenAttention
from engine.cpu import PageAttention
from engine.graphs import upload
from engine.sequence import Chunk


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


class ChunkAttention:
    """Attention of one step's chunks. Chunks that continue a context come first; all others start one."""

    def __init__(self, chunks: list[Chunk], page: int, device: torch.device, gather: bool):
        """`gather`: keys and values of all chunks are gathered from their pages for one attention kernel, on a GPU."""
        spans = [(np.asarray(chunk.prefill.leader.pages), chunk.start, chunk.end) for chunk in chunks]
        ranges = [np.arange(start, end) for _, start, end in spans]
        pages = [own[r // page] for (own, _, _), r in zip(spans, ranges, strict=True)]
        self.token_ids = upload([t for c in chunks for t in c.prefill.context[c.start : c.end]], device)
        self.positions = upload(np.concatenate(ranges), device)
        self.write_pages = upload(np.concatenate(pages), device)
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

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor) -> Tensor:
        """q [T, H, D] and k, v [T, K, D] of the chunks' tokens, already written to their pages -> [T, H, D]"""
        if self.varlen:
            key, value = (kv[self.key_page, :, self.key_offset] for kv in (k_pages, v_pages))
            return self.varlen(q, key, value)
        parts, at = [], 0
        for pages, start, end in self.continued:
            parts.append(attend_to_prefix(q[at : at + end - start], k_pages[pages], v_pages[pages], start))
            at += end - start
        if self.packed is not None:
            parts.append(self.packed(layer, q[at:], k[at:], v[at:]))
        return torch.cat(parts)


class StepAttention:
    """Attention of one forward over the decoding rows, if any, and then the chunks, if any.

    token_ids, positions [T]: what the forward computes. Writes each layer's keys and values to their pages first.
    """

    def __init__(
        self, kv: Tensor, decode: PageAttention | None, last: tuple[Tensor, Tensor], prefill: ChunkAttention | None
    ):
        """kv [layers, 2, pages, K, page, D]; last: token ids and positions [n] of the rows that `decode` is for."""
        self.kv, self.decode, self.prefill, self.n = kv, decode, prefill, len(last[0])
        inputs = [(*last, decode.write_pages)] if decode else []
        inputs += [(prefill.token_ids, prefill.positions, prefill.write_pages)] if prefill else []
        self.token_ids, self.positions, self.pages = inputs[0] if len(inputs) == 1 else map(torch.cat, zip(*inputs))
        self.offset = self.positions % kv.shape[4]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, H, D], k and v [T, K, D] -> [T, H, D]"""
        k_pages, v_pages = self.kv[layer, 0], self.kv[layer, 1]
        k_pages[self.pages, :, self.offset] = k
        v_pages[self.pages, :, self.offset] = v
        if not self.prefill:
            assert self.decode, "a step computes something"
            return self.decode(q, k_pages, v_pages)
        n = self.n
        parts = [self.decode(q[:n], k_pages, v_pages)] if self.decode else []
        return torch.cat((*parts, self.prefill(layer, q[n:], k[n:], v[n:], k_pages, v_pages)))
