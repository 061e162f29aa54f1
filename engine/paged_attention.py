"""Attention of one engine step, to what stands in KV pages.

Shapes: n decoding rows, T tokens, H query heads, K key/value heads, D head size. Decoding rows attend by engine/cpu.py,
or, on a GPU, in a step of their own (engine/kernels.py).
"""

import numpy as np
import torch
from torch import Tensor

from attention import PackedAttention, VarlenAttention
from engine import kernels
from engine.cpu import PageAttention
from engine.drafts import Drafts
from engine.host import upload
from engine.sequence import Chunk


class ChunkAttention:
    """Attention of one step's chunks: to themselves if all start their contexts, else to keys gathered from pages."""

    def __init__(self, chunks: list[Chunk], page: int, device: torch.device):
        pages = [np.asarray(chunk.prefill.leader.pages) for chunk in chunks]
        ends = [chunk.end for chunk in chunks]

        def places(positions: list[np.ndarray]) -> tuple[Tensor, Tensor]:
            """Return pages and positions of some of each chunk's context."""
            own = [of_chunk[p // page] for of_chunk, p in zip(pages, positions, strict=True)]
            return upload(np.concatenate(own), device), upload(np.concatenate(positions), device)

        self.token_ids = upload([t for c in chunks for t in c.prefill.context[c.start : c.end]], device)
        self.write_pages, self.positions = places([np.arange(c.start, c.end) for c in chunks])
        if continues := any(c.start for c in chunks):
            self.key_pages, positions = places([np.arange(end) for end in ends])
            self.key_offsets = positions % page
            self.varlen = VarlenAttention([c.end - c.start for c in chunks], ends, device)
        self.packed = None if continues else PackedAttention(ends, device)

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int, k_pages: Tensor, v_pages: Tensor
    ) -> Tensor:
        """q [T, H, D] and k, v [T, K, D] of the chunks' tokens, already written to their pages -> [T, H, D]"""
        if self.packed:
            return self.packed(layer, q, k, v, window)
        key, value = (kv[self.key_pages, :, self.key_offsets] for kv in (k_pages, v_pages))
        return self.varlen(q, key, value, window)


class DraftAttention:
    """Attention of rows of which some verify a draft: as if each token was a row, with the pages of those before it."""

    def __init__(self, drafts: Drafts, table: np.ndarray, length: np.ndarray, page: int, device: torch.device):
        """table [rows, pages of a sequence]; length [n], the tokens that each row has in the cache so far."""
        positions = drafts.positions(length)
        self.write_pages = upload(table[drafts.row, positions // page], device)  # [T], of the new tokens
        self.table = upload(table[drafts.row], device, torch.int32)
        self.lengths = upload(positions + 1, device, torch.int32)

    def __call__(self, q: Tensor, k_pages: Tensor, v_pages: Tensor, window: int = 0) -> Tensor:
        """q [T, H, D]; k_pages and v_pages [pages, K, page, D] -> [T, H, D]"""
        return kernels.paged_decode(q, k_pages, v_pages, self.table, self.lengths, window=window)


class StepAttention:
    """Attention of one forward over the decoding rows, if any, and then the chunks, if any.

    token_ids, positions [T]: what the forward computes. Writes each layer's keys and values to their pages first.
    """

    def __init__(
        self,
        kv: Tensor,
        decode: PageAttention | DraftAttention | None,
        rows: tuple[Tensor, Tensor],
        prefill: ChunkAttention | None,
    ):
        """kv [layers, 2, pages, K, page, D]; rows: token ids and positions [n] of the tokens that `decode` is for."""
        self.kv, self.decode, self.prefill, self.n = kv, decode, prefill, len(rows[0])
        inputs = [(*rows, decode.write_pages)] if decode else []
        inputs += [(prefill.token_ids, prefill.positions, prefill.write_pages)] if prefill else []
        self.token_ids, self.positions, self.pages = inputs[0] if len(inputs) == 1 else map(torch.cat, zip(*inputs))
        self.offset = self.positions % kv.shape[4]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
        """q [T, H, D], k and v [T, K, D] -> [T, H, D]"""
        k_pages, v_pages = self.kv[layer, 0], self.kv[layer, 1]
        k_pages[self.pages, :, self.offset] = k
        v_pages[self.pages, :, self.offset] = v
        if not self.prefill:
            assert self.decode, "a step computes something"
            return self.decode(q, k_pages, v_pages, window)
        n = self.n
        parts = [self.decode(q[:n], k_pages, v_pages, window)] if self.decode else []
        return torch.cat((*parts, self.prefill(layer, q[n:], k[n:], v[n:], window, k_pages, v_pages)))
