"""Attention over packed sequences (training, prefill) and over KV pages (decode), in plain torch.

Shapes: T packed tokens, n sequences, P pages in use, H query heads, K key/value heads, G = H / K, D head size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


class PackedAttention:
    """Causal attention inside each of several sequences that lie one after another. [T, H, D] -> [T, H, D]

    Sequences of similar length are padded to one batch, so that a call costs a few kernels and not one a sequence.
    Only attention sees padding; every other layer works on the packed tokens.
    """

    def __init__(self, lengths: list[int], device: torch.device):
        starts, start = [], 0
        for length in lengths:
            starts.append(start)
            start += length
        order = sorted(range(len(lengths)), key=lambda i: lengths[i])
        self.batches: list[Tensor] = []  # each [n, L]: the packed row of every padded place
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
            rows = first + torch.minimum(
                column, own - 1
            )  # [n, L]; padding repeats the last token, nobody attends to it
            inverse[rows[column < own]] = torch.arange(rows.numel()).view_as(rows)[column < own] + offset
            self.batches.append(rows.to(device))
            offset += rows.numel()
            done = end
        self.inverse = inverse.to(device)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
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


def decode_by_page(q: Tensor, k_pool: Tensor, v_pool: Tensor, owner: Tensor, bias: Tensor) -> Tensor:
    """CPU decode attention without a gather: each page is one batch element, pages are merged by log-sum-exp.

    q [n, H, D]; pools [P, K, page, D], the pages in use and no others; owner [P] int64, the sequence of each page;
    bias [P, 1, 1, page], 0 on filled places and -inf elsewhere -> [n, H, D]
    """
    n, num_heads, size = q.shape
    num_kv = k_pool.shape[1]
    folded = q.view(n, num_kv, num_heads // num_kv, size)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        folded[owner], k_pool, v_pool, 0.0, False, attn_mask=bias
    )  # [P, K, G, D], [P, K, G]
    if len(owner) == n:  # one page each: nothing to merge
        return torch.empty_like(folded).index_copy_(0, owner, out).view(n, num_heads, size)
    index = owner[:, None, None].expand_as(lse)
    peak = lse.new_full((n, *lse.shape[1:]), -torch.inf).scatter_reduce_(0, index, lse, "amax")
    weight = (lse - peak[owner]).exp_()
    total = torch.zeros_like(peak).index_add_(0, owner, weight)
    merged = lse.new_zeros(folded.shape).index_add_(0, owner, out * weight[..., None])
    return (merged / total[..., None]).to(q.dtype).view(n, num_heads, size)
