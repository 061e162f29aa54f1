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
from policies.memory_plan import GATHERED_TOKENS


class ChunkAttention:
    """Attention of one step's chunks: to themselves if all start their contexts, else to keys gathered from pages.

    A few chunks at a time, so that what is gathered stays small beside many short turns of long contexts.
    """

    def __init__(self, chunks: list[Chunk], page: int, device: torch.device):
        pages = [np.asarray(chunk.prefill.leader.pages) for chunk in chunks]
        ends = [chunk.end for chunk in chunks]

        def places(positions: list[np.ndarray], first: int = 0) -> tuple[Tensor, Tensor]:
            """Return pages and positions of some of the contexts of chunks, from the `first` on."""
            own = [of_chunk[p // page] for of_chunk, p in zip(pages[first:], positions)]
            return upload(np.concatenate(own), device), upload(np.concatenate(positions), device)

        self.token_ids = upload([t for c in chunks for t in c.prefill.context[c.start : c.end]], device)
        self.write_pages, self.positions = places([np.arange(c.start, c.end) for c in chunks])
        continues = any(c.start for c in chunks)
        self.packed = None if continues else PackedAttention(ends, device)
        self.parts: list[tuple[slice, Tensor, Tensor, VarlenAttention]] = []  # rows, pages and offsets of keys
        first = row = gathered = 0
        for i, end in enumerate(ends if continues else ()):
            gathered += end
            if i + 1 < len(ends) and gathered + ends[i + 1] <= GATHERED_TOKENS:
                continue
            part = slice(first, i + 1)
            lengths = [c.end - c.start for c in chunks[part]]
            key_pages, positions = places([np.arange(end) for end in ends[part]], first)
            varlen = VarlenAttention(lengths, ends[part], device)
            self.parts.append((slice(row, row + sum(lengths)), key_pages, positions % page, varlen))
            first, row, gathered = i + 1, row + sum(lengths), 0

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int, k_pages: Tensor, v_pages: Tensor
    ) -> Tensor:
        """q [T, H, D] and k, v [T, K, D] of the chunks' tokens, already written to their pages -> [T, H, D]"""
        if self.packed:
            return self.packed(layer, q, k, v, window)
        outputs = []
        for rows, pages, offsets, varlen in self.parts:
            outputs.append(varlen(q[rows], k_pages[pages, :, offsets], v_pages[pages, :, offsets], window))
        return torch.cat(outputs)


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
