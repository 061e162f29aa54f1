"""Triton kernels for the decode step, each with a plain-torch twin (`*_torch`) of the same signature and result.

The public functions choose: Triton for CUDA tensors and inside Triton's interpreter (TRITON_INTERPRET=1 before the
first import of triton), on a CPU with a compiler those of engine/native.py, else the twin. Inference only. All can be
captured in a CUDA graph: grids and buffers depend on shapes alone and nothing waits for the device; first calls
compile, so warm up before capturing.

Shapes: n rows, H query heads, K key/value heads, G = H / K, D head size. Sums are float32 whatever the inputs are.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from engine import native

try:
    import triton
    import triton.language as tl
    from triton import knobs

    INTERPRETED = knobs.runtime.interpret  # as of now, when the kernels below are decorated
    HAS_TRITON = True
except ImportError:  # CPU builds of torch come without it: the kernels only have to parse
    triton = tl = type("Absent", (), {"jit": staticmethod(lambda function: function), "constexpr": int})
    HAS_TRITON = INTERPRETED = False

MIN_PART = 128  # keys of one split, at least: a shorter part costs more to write and merge than it saves
MAX_PART = 2048  # keys of one split, at most, while splits last: one long row must not hold up a whole batch
CANDIDATES = 1024  # likeliest tokens that hold top_p of the mass nearly always
MAX_SPLITS = 64  # the merge holds all splits of a head in registers
GOLDEN, MIX1, MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # of splitmix64 (Steele 2014)
NUMBERS = 1 << 20  # of that generator for each position of a response
_GOLDEN, _MIX1, _MIX2, _NUMBERS = map(tl.constexpr, (GOLDEN, MIX1, MIX2, NUMBERS))  # for kernels


def use_triton(x: Tensor) -> bool:
    return HAS_TRITON and (x.is_cuda or INTERPRETED)


def is_fused(x: Tensor) -> bool:
    """Whether the functions below take `x` by a kernel: then a caller saves operations by them."""
    return use_triton(x) or native.takes(x)


@triton.jit
def _part_length(length, splits, MIN_PART: tl.constexpr, BLOCK_N: tl.constexpr):
    """Keys per split. A row uses as many splits as its own length pays for, whatever its table could hold."""
    return tl.maximum(MIN_PART, tl.cdiv(tl.cdiv(length, splits), BLOCK_N) * BLOCK_N)


@triton.jit
def _paged_decode(q, k_pages, v_pages, table, lengths, out, lse, scale, q_row, q_head, table_row, kv_page, kv_head,
                  WINDOW, G: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, MIN_PART: tl.constexpr,
                  BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """One program: the G query heads of one KV head of one row, over one part of the row's keys."""
    row, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + row).to(tl.int32)
    first = tl.maximum(length - WINDOW, 0)
    part = _part_length(length - first, tl.num_programs(2), MIN_PART, BLOCK_N)
    begin = first + split * part
    if (split > 0) & (begin >= length):  # the merge ignores this split; split 0 stays to give zeros for padding
        return
    end = tl.minimum(begin + part, length)
    g, d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    heads, query_mask = head * G + g, (g < G)[:, None] & (d < D)[None, :]
    query = tl.load(q + row * q_row + heads[:, None] * q_head + d[None, :], mask=query_mask, other=0.0)
    peak = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total, acc = tl.zeros([BLOCK_G], tl.float32), tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for start in range(begin, end, BLOCK_N):
        t = start + tl.arange(0, BLOCK_N)
        inside = t < end
        page = tl.load(table + row * table_row + t // PAGE, mask=inside, other=0).to(tl.int64)
        at = (page * kv_page + head * kv_head + t % PAGE * D)[:, None] + d[None, :]
        mask = inside[:, None] & (d < D)[None, :]
        key = tl.load(k_pages + at, mask=mask, other=0.0)
        scores = tl.where(inside[None, :], tl.dot(query, tl.trans(key), input_precision="ieee") * scale, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        weights, shrink = tl.exp2(scores - new_peak[:, None]), tl.exp2(peak - new_peak)
        value = tl.load(v_pages + at, mask=mask, other=0.0)  # masked: 0 * NaN from an unused place would be NaN
        acc = acc * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        total, peak = total * shrink + tl.sum(weights, 1), new_peak
    total = tl.where(total > 0, total, 1.0)  # no keys: zeros
    slot = (row * tl.num_programs(1) * G + heads) * tl.num_programs(2) + split
    tl.store(out + slot[:, None] * D + d[None, :], (acc / total[:, None]).to(out.dtype.element_ty), mask=query_mask)
    if lse is not None:
        tl.store(lse + slot, peak + tl.log2(total), mask=g < G)


@triton.jit
def _merge_splits(parts, lse, lengths, out, WINDOW, D: tl.constexpr, SPLITS: tl.constexpr, MIN_PART: tl.constexpr,
                  BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """One program: one query head of one row, its splits weighted by their share of the softmax sum."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length = tl.minimum(tl.load(lengths + row).to(tl.int32), WINDOW)
    split, d = tl.arange(0, SPLITS), tl.arange(0, BLOCK_D)
    live = split * _part_length(length, SPLITS, MIN_PART, BLOCK_N) < length
    slot = (row * tl.num_programs(1) + head) * SPLITS + split
    weight = tl.load(lse + slot, mask=live, other=float("-inf"))
    weight = tl.exp2(weight - tl.where(length > 0, tl.max(weight, 0), 0.0))
    part = tl.load(parts + slot[:, None] * D + d[None, :], mask=live[:, None] & (d < D)[None, :], other=0.0)
    merged = tl.sum(part * weight[:, None], 0) / tl.where(length > 0, tl.sum(weight, 0), 1.0)
    tl.store(out + (row * tl.num_programs(1) + head) * D + d, merged.to(out.dtype.element_ty), mask=d < D)


def _num_splits(n: int, num_kv: int, context: int, device: torch.device) -> int:
    """Return how many programs share a row's keys: enough to fill the GPU; powers of two, for each compiles a merge.

    `context`: keys that a row may have. A CUDA graph keeps the number while rows grow; splits without keys end at once.
    """
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
    wanted = max(triton.cdiv(4 * processors, max(1, n * num_kv)), triton.cdiv(context, MAX_PART))
    return triton.next_power_of_2(min(wanted, triton.cdiv(context, MIN_PART), MAX_SPLITS))


def paged_decode(q: Tensor, k_pages: Tensor, v_pages: Tensor, table: Tensor, lengths: Tensor,
                 out: Tensor | None = None, window: int = 0) -> Tensor:  # fmt: skip
    """Attention of one new token per row over that row's pages. -> [n, H, D] like q

    q [n, H, D], head j * G + g reads KV head j; k_pages, v_pages [pages, K, page, D] of one layer, page a power of two;
    table [n, max_pages] int; lengths [n] int, keys of each row, the new one included. A row of length 0 is padding: it
    gives zeros and reads nothing. Entries of `table` beyond a row's length are never followed. `window`: a row reads
    its newest keys only, so many; 0: all.
    """
    if not use_triton(q):
        takes = out is None and lengths.dtype == torch.int32 and lengths.is_contiguous() and native.takes(q)
        if takes and native.can_page(q, k_pages, v_pages, table):
            return native.paged_decode(q, k_pages, v_pages, table, lengths, window)
        return paged_decode_torch(q, k_pages, v_pages, table, lengths, out, window)
    (n, num_heads, size), (num_kv, page) = q.shape, k_pages.shape[1:3]
    out = q.new_empty(q.shape) if out is None else out
    assert page & (page - 1) == 0 and num_heads % num_kv == 0, f"page {page}, {num_heads} heads over {num_kv}"
    assert k_pages.stride() == v_pages.stride() and k_pages.stride()[2:] == (size, 1), k_pages.stride()
    assert q.stride(2) == table.stride(1) == lengths.stride(0) == 1 and out.is_contiguous(), (q.stride(), out.stride())
    # Tiles of at most 16 KiB (float32 multiplies in registers: a quarter of the keys), two in flight for keys and for
    # values: 5 stages, since the load of the table takes every other one. About 3 programs fit an SM.
    block_d, block_g = max(16, triton.next_power_of_2(size)), max(16, triton.next_power_of_2(num_heads // num_kv))
    block_n = max(16, min(64, 32768 // (block_d * q.element_size() ** 2)))
    context = table.shape[1] * page  # keys that a row may have
    window = min(window or context, context)
    splits = _num_splits(n, num_kv, window, q.device)
    scale = size**-0.5 * 1.4426950408889634  # log2(e): the kernels take powers of two
    parts = q.new_empty(n, num_heads, splits, size, dtype=torch.float32) if splits > 1 else out
    lse = q.new_empty(n, num_heads, splits, dtype=torch.float32) if splits > 1 else None
    sizes = {"D": size, "MIN_PART": MIN_PART, "BLOCK_D": block_d, "BLOCK_N": block_n}
    _paged_decode[(n, num_kv, splits)](
        q, k_pages, v_pages, table, lengths, parts, lse, scale, q.stride(0), q.stride(1), table.stride(0),
        k_pages.stride(0), k_pages.stride(1), window, G=num_heads // num_kv, PAGE=page, BLOCK_G=block_g, **sizes,
        num_warps=4, num_stages=5 if block_g == 16 else 3)  # fmt: skip
    if splits > 1:
        warps = max(1, min(8, splits * block_d // 512))
        _merge_splits[(n, num_heads)](parts, lse, lengths, out, window, SPLITS=splits, **sizes, num_warps=warps)
    return out


def paged_decode_torch(q: Tensor, k_pages: Tensor, v_pages: Tensor, table: Tensor, lengths: Tensor,
                       out: Tensor | None = None, window: int = 0) -> Tensor:  # fmt: skip
    page, size = k_pages.shape[2:]
    if not lengths.is_cuda:  # where reading a length waits for nothing
        table = table[:, : max(-(-int(lengths.max()) // page), 1)]
    place = torch.arange(table.shape[1] * page, device=q.device)
    inside = place < lengths[:, None]  # [n, L]
    pages = table.masked_fill(~inside[:, ::page], 0).long()
    inside = inside & (place >= lengths[:, None] - window) if window else inside
    key, value = (x[pages].transpose(2, 3).flatten(1, 2).float() for x in (k_pages, v_pages))  # [n, L, K, D]
    value = value.masked_fill(~inside[:, :, None, None], 0.0)  # 0 * NaN from an unused place would be NaN
    scores = torch.einsum("nkgd,nlkd->nkgl", q.float().view(len(q), k_pages.shape[1], -1, size), key) * size**-0.5
    weights = scores.masked_fill(~inside[:, None, None], -torch.inf).softmax(-1)
    weights = weights.masked_fill(lengths[:, None, None, None] == 0, 0.0)  # a softmax over no keys is NaN
    result = torch.einsum("nkgl,nlkd->nkgd", weights, value).to(q.dtype).view(q.shape)
    return result if out is None else out.copy_(result)


@triton.jit
def _rms_norm(x, residual, weight, normed, summed, x_row, residual_row, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    values = tl.load(x + row * x_row + i, mask=i < SIZE, other=0.0).to(tl.float32)
    if residual is not None:
        values += tl.load(residual + row * residual_row + i, mask=i < SIZE, other=0.0).to(tl.float32)
        rounded = values.to(summed.dtype.element_ty)  # the norm sees what later layers will see
        tl.store(summed + row * SIZE + i, rounded, mask=i < SIZE)
        values = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / SIZE + eps)
    scaled = values * scale * tl.load(weight + i, mask=i < SIZE, other=0.0).to(tl.float32)
    tl.store(normed + row * SIZE + i, scaled.to(normed.dtype.element_ty), mask=i < SIZE)


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (torch's RMSNorm of x + residual, x + residual), [n, size] each. residual None adds nothing."""
    if not use_triton(x):
        of_cpu = native.add_rms_norm if native.takes(x, residual, weight) else add_rms_norm_torch
        return of_cpu(x, residual, weight, eps)
    (n, size), block = x.shape, triton.next_power_of_2(x.shape[1])
    assert x.stride(1) == weight.stride(0) == 1 and (residual is None or residual.stride(1) == 1), x.stride()
    normed, summed = x.new_empty(n, size), x if residual is None else x.new_empty(n, size)
    args = (x, residual, weight, normed, summed, x.stride(0), 0 if residual is None else residual.stride(0), eps)
    _rms_norm[(n,)](*args, SIZE=size, BLOCK=block, num_warps=max(1, min(16, block // 512)))
    return normed, summed


def add_rms_norm_torch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    summed = x if residual is None else x + residual
    return F.rms_norm(summed, weight.shape, weight, eps), summed


@triton.jit
def _rope_and_write(qkv, cos, sin, positions, table, k_pages, v_pages, q_norm, k_norm, q, eps,
                    qkv_row, table_row, kv_page, kv_head, G: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr,
                    BLOCK_G: tl.constexpr, BLOCK_HALF: tl.constexpr):  # fmt: skip
    """One program: one KV head of one row with its G query heads, its key and its value, each as two halves."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions + row).to(tl.int32)
    g, i = tl.arange(0, BLOCK_G)[:, None], tl.arange(0, BLOCK_HALF)[None, :]
    column, mask = i < HALF, (g < G + 2) & (i < HALF)
    at = qkv + row * qkv_row + (head * (G + 2) + g) * (2 * HALF) + i
    first, second = tl.load(at, mask=mask, other=0.0), tl.load(at + HALF, mask=mask, other=0.0)
    x, y = first.to(tl.float32), second.to(tl.float32)
    if q_norm is not None:
        scale = tl.rsqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / (2 * HALF) + eps)[:, None]
        qx, qy = tl.load(q_norm + i, mask=column, other=0.0), tl.load(q_norm + HALF + i, mask=column, other=0.0)
        kx, ky = tl.load(k_norm + i, mask=column, other=0.0), tl.load(k_norm + HALF + i, mask=column, other=0.0)
        x = (x * scale * tl.where(g < G, qx, kx)).to(first.dtype).to(tl.float32)
        y = (y * scale * tl.where(g < G, qy, ky)).to(first.dtype).to(tl.float32)  # rounded where torch rounds
    turn = tl.maximum(position, 0).to(tl.int64) * HALF + i
    c, s = tl.load(cos + turn, mask=column, other=0.0), tl.load(sin + turn, mask=column, other=0.0)
    first = tl.where(g <= G, (x * c - y * s).to(first.dtype), first)  # the value is not turned
    second = tl.where(g <= G, (y * c + x * s).to(second.dtype), second)
    query = q + ((row * tl.num_programs(1) + head) * G + g) * (2 * HALF) + i
    tl.store(query, tl.where(position >= 0, first, 0.0), mask=(g < G) & column)
    tl.store(query + HALF, tl.where(position >= 0, second, 0.0), mask=(g < G) & column)
    if position >= 0:
        page = tl.load(table + row * table_row + position // PAGE).to(tl.int64)
        place = page * kv_page + head * kv_head + position % PAGE * (2 * HALF) + i + g * 0  # one g is stored
        tl.store(k_pages + place, first, mask=(g == G) & column)
        tl.store(k_pages + place + HALF, second, mask=(g == G) & column)
        tl.store(v_pages + place, first, mask=(g == G + 1) & column)
        tl.store(v_pages + place + HALF, second, mask=(g == G + 1) & column)


def rope_and_write(qkv: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, table: Tensor, k_pages: Tensor,
                   v_pages: Tensor, num_heads: int, num_kv_heads: int, q_norm: Tensor | None = None,
                   k_norm: Tensor | None = None, eps: float = 1e-6) -> Tensor:  # fmt: skip
    """Turn queries and keys, write keys and values to their pages, return the queries. -> [n, H, D], contiguous

    qkv [n, (H + 2K) * D], for each KV head its G query heads, its key, its value; cos, sin [max_positions, D / 2], for
    pairs (i, i + D / 2); positions [n] int; table and pages as in `paged_decode`. `q_norm`, `k_norm` [D]: RMSNorm of
    each head first (Qwen3). A row of negative position is padding: it writes nothing and its queries are zero.
    """
    args = (qkv, cos, sin, positions, table, k_pages, v_pages)
    if not use_triton(qkv):
        takes = native.takes(qkv, cos, sin, q_norm, k_norm) and native.can_page(qkv, k_pages, v_pages, table)
        takes = takes and positions.dtype == torch.int64 and positions.is_contiguous()
        of_cpu = native.rope_and_write if takes else rope_and_write_torch
        return of_cpu(*args, num_heads, num_kv_heads, q_norm, k_norm, eps)
    n, groups, (page, size) = len(qkv), num_heads // num_kv_heads, k_pages.shape[2:]
    assert page & (page - 1) == 0 and num_heads % num_kv_heads == size % 2 == 0, (page, num_heads, size)
    assert qkv.shape[1] == (num_heads + 2 * num_kv_heads) * size and (q_norm is None) == (k_norm is None), qkv.shape
    assert k_pages.stride() == v_pages.stride() and k_pages.stride()[2:] == (size, 1), k_pages.stride()
    assert cos.is_contiguous() and sin.is_contiguous() and qkv.stride(1) == table.stride(1) == positions.stride(0) == 1
    q = qkv.new_empty(n, num_heads, size)
    block_g, block_half = triton.next_power_of_2(groups + 2), triton.next_power_of_2(size // 2)
    _rope_and_write[(n, num_kv_heads)](
        *args, q_norm, k_norm, q, eps, qkv.stride(0), table.stride(0), k_pages.stride(0), k_pages.stride(1), G=groups,
        HALF=size // 2, PAGE=page, BLOCK_G=block_g, BLOCK_HALF=block_half,
        num_warps=max(1, min(8, block_g * block_half // 256)))  # fmt: skip
    return q


def rope_and_write_torch(qkv: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, table: Tensor, k_pages: Tensor,
                         v_pages: Tensor, num_heads: int, num_kv_heads: int, q_norm: Tensor | None = None,
                         k_norm: Tensor | None = None, eps: float = 1e-6) -> Tensor:  # fmt: skip
    page, size = k_pages.shape[2:]
    live = (positions >= 0).nonzero()[:, 0]
    heads = qkv.view(len(qkv), num_kv_heads, -1, size)
    qk, v = heads[:, :, :-1], heads[:, :, -1]  # [n, K, G + 1, D], [n, K, D]
    if q_norm is not None:
        q, k = qk[:, :, :-1], qk[:, :, -1:]
        qk = torch.cat((F.rms_norm(q, (size,), q_norm, eps), F.rms_norm(k, (size,), k_norm, eps)), 2)
    c, s = (x[positions.clamp(min=0)][:, None, None].float() for x in (cos, sin))
    first, second = qk.float().chunk(2, -1)
    qk = torch.cat((first * c - second * s, second * c + first * s), -1).to(qkv.dtype)
    at = positions[live]
    pages = table[live, at // page].long()
    k_pages[pages, :, at % page], v_pages[pages, :, at % page] = qk[live, :, -1], v[live]
    return qk[:, :, :-1].masked_fill((positions < 0)[:, None, None, None], 0.0).reshape(len(qkv), num_heads, size)


@triton.jit
def _silu_mul(gate_up, out, row_length, width, BLOCK: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    at = gate_up + row * row_length + part * 2 * width + i
    gate, up = tl.load(at, mask=i < width, other=0.0), tl.load(at + width, mask=i < width, other=0.0)
    x = gate.to(tl.float32)
    x = (x / (1.0 + tl.exp(-x))).to(gate.dtype).to(tl.float32)  # rounded where torch rounds
    result = (x * up.to(tl.float32)).to(gate.dtype)
    tl.store(out + (row * tl.num_programs(1) + part) * width + i, result, mask=i < width)


def silu_mul(gate_up: Tensor, num_blocks: int = 1) -> Tensor:
    """Return silu(gate) * up. [n, 2 * I], which is `num_blocks` times (gate, up) of I / num_blocks each -> [n, I]"""
    if not use_triton(gate_up):
        return (native.silu_mul if native.takes(gate_up) else silu_mul_torch)(gate_up, num_blocks)
    n, width = len(gate_up), gate_up.shape[1] // (2 * num_blocks)
    assert gate_up.stride(1) == 1 and gate_up.shape[1] == 2 * num_blocks * width, (gate_up.shape, num_blocks)
    out, block = gate_up.new_empty(n, num_blocks * width), min(1024, triton.next_power_of_2(width))
    _silu_mul[(n, num_blocks, triton.cdiv(width, block))](gate_up, out, gate_up.stride(0), width, BLOCK=block)
    return out


def silu_mul_torch(gate_up: Tensor, num_blocks: int = 1) -> Tensor:
    gate, up = gate_up.view(len(gate_up), num_blocks, 2, -1).unbind(2)
    return (F.silu(gate) * up).flatten(1)


def uniforms(keys: Tensor, positions: Tensor, count: int) -> Tensor:
    """Return numbers in (0, 1), each a pure function of (key, position, place). [n] int64 x 2 -> [n, count] float64

    They are outputs of splitmix64 with the key as its seed, the first `count` of each position's.
    """
    x = keys + (positions * NUMBERS + 1) * signed(GOLDEN)
    x = x[:, None] + torch.arange(count, device=keys.device) * signed(GOLDEN)
    x = (x ^ _shift(x, 30)) * signed(MIX1)
    x = (x ^ _shift(x, 27)) * signed(MIX2)
    return (_shift(x ^ _shift(x, 31), 12).double() + 0.5) * 2.0**-52


def _shift(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)  # int64 shifts are arithmetic; the hash needs logical shifts


def signed(x: int) -> int:
    """Return the int64 with the bits of an unsigned one."""
    return x - (1 << 64) if x >> 63 else x


def block_size(vocab: int) -> int:
    """Return how many tokens make a block of a race: about as many as there are blocks, a power of 2."""
    return 1 << vocab.bit_length() // 2


@triton.jit
def _race_time(key, position, place):
    """Return the exponential variable of a place in a race, -log of `uniforms`. float64"""
    x = key.to(tl.uint64) + (position.to(tl.uint64) * _NUMBERS + place.to(tl.uint64) + 1) * _GOLDEN
    x = (x ^ (x >> 30)) * _MIX1
    x = (x ^ (x >> 27)) * _MIX2
    return -tl.log((((x ^ (x >> 31)) >> 12).to(tl.float64) + 0.5) * 2.0**-52)


@triton.jit
def _block_masses(logits, peaks, masses, row_length, vocab, temperature, blocks,
                  BLOCKS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """One program: the largest logit of each of some blocks of a row, and the block's softmax sum relative to it."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    i = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(logits + row * row_length + i, mask=i < vocab, other=float("-inf")).to(tl.float32) / temperature
    peak = tl.max(x, 1)
    mass = tl.sum(tl.exp(x - tl.where(peak == float("-inf"), 0.0, peak)[:, None]), 1)  # a block may be banned
    tl.store(peaks + row * blocks + block, peak, mask=block < blocks)
    tl.store(masses + row * blocks + block, mass, mask=block < blocks)


@triton.jit
def _race(logits, peaks, masses, keys, positions, tokens, logprobs, row_length, vocab, temperature, blocks,
          BLOCKS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """One program: one row. A race of its blocks, then of the tokens in the first block."""
    row, block, offset = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCKS), tl.arange(0, BLOCK)
    key, position = tl.load(keys + row), tl.load(positions + row)
    block_peak = tl.load(peaks + row * blocks + block, mask=block < blocks, other=float("-inf"))
    peak = tl.max(block_peak, 0)
    mass = tl.load(masses + row * blocks + block, mask=block < blocks, other=0.0) * tl.exp(block_peak - peak)
    first = tl.argmax(mass / _race_time(key, position, block), 0)
    i = first * BLOCK + offset
    x = tl.load(logits + row * row_length + i, mask=i < vocab, other=float("-inf")).to(tl.float32) / temperature
    inside = tl.argmax(tl.exp(x - peak) / _race_time(key, position, blocks + offset), 0)
    token = tl.minimum(first * BLOCK + inside, vocab - 1)  # logits that are NaN would name one beyond
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(logprobs + row, tl.sum(tl.where(offset == inside, x, 0.0), 0) - peak - tl.log(tl.sum(mass, 0)))


def race(logits: Tensor, keys: Tensor, positions: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Draw the token that is first in a race at rates softmax(logits / temperature). temperature > 0

    logits [n, V], keys [n] int64, positions [n] int64 -> tokens [n] int64, log-probs [n] float32

    A token that runs at rate p arrives at time -log(uniform) / p, so it is the first with probability p (Gumbel's trick
    in other words), and a change of the rates changes few winners. The race has two levels: blocks run at the sums of
    their tokens' rates, then the tokens of the first block run. So about 2 * sqrt(V) numbers are hashed and not V.
    """
    if not use_triton(logits):
        if native.takes(logits[:1]):  # rows may be apart, as with a vocabulary that does not divide into shards
            constants = (GOLDEN, MIX1, MIX2, NUMBERS)
            return native.race(logits.float(), keys, positions, temperature, block_size(logits.shape[1]), constants)
        return race_torch(logits, keys, positions, temperature)
    n, vocab = logits.shape
    assert logits.stride(1) == keys.stride(0) == positions.stride(0) == 1 and keys.dtype == torch.int64, keys.dtype
    size = block_size(vocab)
    blocks, together = triton.cdiv(vocab, size), max(1, 4096 // size)
    peaks, masses = logits.new_empty(2, n, blocks, dtype=torch.float32)
    tokens, logprobs = logits.new_empty(n, dtype=torch.int64), logits.new_empty(n, dtype=torch.float32)
    sizes = logits.stride(0), vocab, temperature, blocks
    _block_masses[(n, triton.cdiv(blocks, together))](logits, peaks, masses, *sizes, BLOCKS=together, BLOCK=size)
    args = (logits, peaks, masses, keys, positions, tokens, logprobs, *sizes)
    _race[(n,)](*args, BLOCKS=triton.next_power_of_2(blocks), BLOCK=size)
    return tokens, logprobs


def race_torch(logits: Tensor, keys: Tensor, positions: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logits = logits.float() if temperature == 1.0 else logits.float() / temperature
    logprobs = logits.log_softmax(-1)
    n, vocab = logprobs.shape
    size = block_size(vocab)
    rates = F.pad(logprobs.exp(), (0, -vocab % size)).view(n, -1, size)
    blocks = rates.shape[1]
    times = -uniforms(keys, positions, blocks + size).log()  # at rate 1; first of the blocks, then inside a block
    first = (rates.sum(-1) / times[:, :blocks]).argmax(-1)
    inside = (rates[torch.arange(n, device=logits.device), first] / times[:, blocks:]).argmax(-1)
    tokens = first * size + inside
    return tokens, logprobs.gather(-1, tokens[:, None])[:, 0]


@triton.jit
def _in_order(x):
    """Turn the bits of a float32 into an int32 of the same order, and back."""
    return x ^ ((x >> 31) & 0x7FFFFFFF)


@triton.jit
def _least_in_nucleus(logits, least, row_length, vocab, reach, top_p, BLOCK: tl.constexpr):
    """One program: one row. Bisects between the largest logit and one with more than top_p of the mass above it."""
    row, i = logits + tl.program_id(0).to(tl.int64) * row_length, tl.arange(0, BLOCK)
    peaks = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, vocab, BLOCK):
        peaks = tl.maximum(peaks, tl.load(row + start + i, mask=start + i < vocab, other=float("-inf")))
    peak = tl.max(peaks, 0)
    masses = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab, BLOCK):
        masses += tl.exp(tl.load(row + start + i, mask=start + i < vocab, other=float("-inf")) - peak)
    goal = tl.sum(masses, 0) * top_p
    low = _in_order((peak - reach).to(tl.int32, bitcast=True)).to(tl.int64)
    high = _in_order(peak.to(tl.int32, bitcast=True)).to(tl.int64)
    while high - low > 1:
        middle = low + (high - low) // 2
        masses = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, vocab, BLOCK):
            x = tl.load(row + start + i, mask=start + i < vocab, other=float("-inf"))
            masses += tl.where(_in_order(x.to(tl.int32, bitcast=True)) > middle, tl.exp(x - peak), 0.0)
        is_inside = tl.sum(masses, 0) < goal
        high, low = tl.where(is_inside, middle, high), tl.where(is_inside, low, middle)
    tl.store(least + tl.program_id(0), _in_order(high.to(tl.int32)).to(tl.float32, bitcast=True))


def least_in_nucleus(logits: Tensor, top_p: float) -> Tensor:
    """Return the least logit of the smallest set with probability top_p < 1. [n, V] float32 -> [n, 1]

    It is the least logit above which there is less than top_p: found by bisection, without a sort of the vocabulary.
    """
    if not use_triton(logits):
        return least_in_nucleus_torch(logits, top_p)
    (n, vocab), least = logits.shape, logits.new_empty(len(logits), 1)
    assert logits.dtype == torch.float32 and logits.stride(1) == 1, (logits.dtype, logits.stride())
    # All tokens that are less likely than the first by e ** -reach have less than 1 - top_p of the mass together.
    sizes, block = (logits.stride(0), vocab, math.log(vocab / (1 - top_p)) + 1), triton.next_power_of_2(vocab)
    _least_in_nucleus[(n,)](logits, least, *sizes, top_p, BLOCK=min(8192, block), num_warps=8)
    return least


def least_in_nucleus_torch(logits: Tensor, top_p: float) -> Tensor:
    if logits.shape[1] <= 4 * CANDIDATES:
        return _least_by_sort(logits, top_p)
    ordered = logits.topk(CANDIDATES).values  # in a tenth of the time that a sort of 150k logits takes
    probs = (ordered - logits.logsumexp(-1, keepdim=True)).exp()
    before = probs.cumsum(-1) - probs
    least = ordered.masked_fill(before >= top_p, torch.inf).amin(-1, keepdim=True)
    unsure = (before[:, -1] < top_p) | ((before - top_p).abs() < 1e-5).any(-1)  # goes on, or ends as rounding has it
    if unsure.any():
        least[unsure] = _least_by_sort(logits[unsure], top_p)
    return least


def _least_by_sort(logits: Tensor, top_p: float) -> Tensor:
    ordered = logits.sort(descending=True).values
    probs = ordered.softmax(-1)
    before = probs.cumsum(-1) - probs  # mass before a token; the first is always inside
    return ordered.masked_fill(before >= top_p, torch.inf).amin(-1, keepdim=True)
