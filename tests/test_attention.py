"""Packed and paged attention against loops over single sequences in float64."""

from random import Random

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import attention
from attention import PackedAttention, VarlenAttention, takes_flash
from engine.cpu import decode_by_page
from engine.kernels import paged_decode
from engine.paged_attention import ChunkAttention
from engine.sequence import Chunk, Prefill, Sequence

CPU = torch.device("cpu")
HEADS = [(4, 4), (4, 2), (6, 2), (3, 1)]  # query heads, key/value heads
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6}


def attend_one(q: Tensor, k: Tensor, v: Tensor, *, window: int = 0) -> Tensor:
    """The last `len(q)` positions of one sequence attend causally, head by head. q [n, H, D], k and v [L, K, D]"""
    groups, past = q.shape[1] // k.shape[1], len(k) - len(q)
    ago = torch.arange(len(q))[:, None] + past - torch.arange(len(k))
    future = (ago < 0) | (ago >= (window or len(k)))
    heads = []
    for h in range(q.shape[1]):
        scores = q[:, h] @ k[:, h // groups].T / q.shape[2] ** 0.5
        heads.append(scores.masked_fill(future, -torch.inf).softmax(-1) @ v[:, h // groups])
    return torch.stack(heads, 1)


def attend_each(lengths: list[int], q: Tensor, k: Tensor, v: Tensor, *, window: int) -> Tensor:
    return torch.cat(
        [attend_one(*part, window=window) for part in zip(*(x.split(lengths) for x in (q, k, v)), strict=True)]
    )


def random_lengths(rng: Random) -> list[int]:
    kind = rng.choice(("ones", "short", "wide", "equal", "mixed"))
    count = rng.randint(1, 12)
    if kind == "equal":
        return [rng.randint(1, 40)] * count
    longest = {"ones": 1, "short": 9, "wide": 90}.get(kind)
    return [rng.randint(1, longest or rng.choice((1, 4, 70))) for _ in range(count)]


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_packed_equals_one_sequence_at_a_time(seed: int, dtype: torch.dtype) -> None:
    rng = Random(seed)
    lengths, (num_heads, num_kv), size = random_lengths(rng), HEADS[seed % len(HEADS)], rng.choice((2, 8, 16))
    generator = torch.Generator().manual_seed(seed)
    total, window = sum(lengths), rng.choice((0, 0, 1, 7, 40))
    shapes = [(total, heads, size) for heads in (num_heads, num_kv, num_kv, num_heads)]
    *qkv, weight = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    exact = [x.clone().requires_grad_() for x in qkv]
    (attend_each(lengths, *exact, window=window) * weight).sum().backward()
    ours = [x.to(dtype).requires_grad_() for x in qkv]
    out = PackedAttention(lengths, CPU)(0, ours[0], ours[1], ours[2], window)
    (out * weight.to(dtype)).sum().backward()
    assert out.shape == (total, num_heads, size) and out.dtype == dtype
    close = {"rtol": 0, "atol": TOLERANCE[dtype] * 10}
    torch.testing.assert_close(out.double(), attend_each(lengths, *qkv, window=window), **close)
    for mine, theirs in zip(ours, exact, strict=True):
        torch.testing.assert_close(mine.grad.double(), theirs.grad, **close)


def test_packed_pads_sparingly() -> None:
    rng = Random(0)
    lengths = [rng.randint(1, 300) for _ in range(200)]

    def batches_of(lengths: list[int]) -> list[Tensor]:
        attend = PackedAttention(lengths, CPU)
        attend(0, *torch.zeros(3, sum(lengths), 1, 2))  # no head that the compiled kernel takes
        return attend.batches

    batches = batches_of(lengths)
    assert sum(rows.numel() for rows in batches) <= sum(length * 5 // 4 + 8 for length in lengths)
    assert len(batches) <= 12
    assert len(batches_of([50] * 64)) == 1


def paged(lengths: list[int], page: int, num_kv: int, size: int, rng: Random, dtype: torch.dtype):
    """Return keys and values of each sequence, pages in random order that hold them, the table and the owners.

    Places that hold no token are huge: whoever looks at one is found out.
    """
    counts = [-(-length // page) for length in lengths]
    order = rng.sample(range(sum(counts)), sum(counts))
    generator = torch.Generator().manual_seed(rng.randrange(1000))
    keys, values = (
        [torch.randn(length, num_kv, size, generator=generator, dtype=torch.float64).to(dtype) for length in lengths]
        for _ in range(2)
    )
    k_pages, v_pages = (torch.full((sum(counts), num_kv, page, size), 1e4, dtype=dtype) for _ in range(2))
    table = torch.tensor([[rng.choice(order) for _ in range(max(counts))] for _ in lengths])
    owner, start = torch.zeros(len(order), dtype=torch.int64), torch.zeros(len(order), dtype=torch.int64)
    for i, length in enumerate(lengths):
        for j in range(counts[i]):
            at = order.pop()
            table[i, j], owner[at], start[at] = at, i, j * page
        for t in range(length):
            k_pages[table[i, t // page], :, t % page] = keys[i][t]
            v_pages[table[i, t // page], :, t % page] = values[i][t]
    filled = (torch.tensor(lengths)[owner] - start).clamp(max=page)
    empty = torch.arange(int(filled.max())) >= filled[:, None]  # [P, places]
    bias = torch.zeros(empty.shape, dtype=dtype).masked_fill_(empty, -torch.inf)
    bias = bias.repeat_interleave(num_kv, 0)[:, None]  # [P * K, 1, places]
    return keys, values, k_pages, v_pages, table, owner, bias


def check_decode(lengths: list[int], page: int, rng: Random, dtype: torch.dtype, scale: float = 1.0) -> None:
    (num_heads, num_kv), size = rng.choice(HEADS), rng.choice((4, 16))
    keys, values, k_pages, v_pages, table, owner, bias = paged(lengths, page, num_kv, size, rng, dtype)
    generator = torch.Generator().manual_seed(rng.randrange(1000))
    q = scale * torch.randn(len(lengths), num_heads, size, generator=generator, dtype=torch.float64).to(dtype)
    exact = torch.cat(
        [attend_one(q[i : i + 1].double(), keys[i].double(), values[i].double()) for i in range(len(lengths))]
    )
    close = {"rtol": 0, "atol": TOLERANCE[dtype] * max(scale, 1.0)}
    by_table = paged_decode(q, k_pages, v_pages, table.int(), torch.tensor(lengths, dtype=torch.int32))
    by_table_atol = max(close["atol"], 2e-6 * max(scale, 1.0))  # it sums in float32
    torch.testing.assert_close(by_table.double(), exact, rtol=0, atol=by_table_atol)
    by_page = decode_by_page(q, k_pages, v_pages, owner, bias)
    torch.testing.assert_close(by_page.double(), exact, **close)
    assert by_page.dtype == by_table.dtype == dtype
    if torch.equal(owner, torch.arange(len(lengths))):
        by_row = decode_by_page(q, k_pages, v_pages, None, bias)
        torch.testing.assert_close(by_row.double(), exact, **close)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("page", [1, 2, 3, 8, 16, 17, 32])
def test_decode_equals_one_sequence_at_a_time(page: int, dtype: torch.dtype) -> None:
    rng = Random(page)
    for _ in range(6):
        check_decode([rng.randint(1, rng.choice((2, 5, 100))) for _ in range(rng.randint(1, 9))], page, rng, dtype)


@pytest.mark.parametrize("page", [1, 4, 32])
def test_decode_with_one_page_each_in_any_order(page: int) -> None:
    rng = Random(page)
    for count in (1, 2, 7, 20):
        check_decode([rng.randint(1, page) for _ in range(count)], page, rng, torch.float64)


def test_merging_pages_survives_scores_that_overflow_exp() -> None:
    for seed in range(8):
        check_decode([33, 5, 64, 1], 4, Random(seed), torch.float32, scale=300.0)


@pytest.mark.parametrize("gathered", [1, 70, 2**16])
@pytest.mark.parametrize("page", [1, 4, 32])
def test_chunks_attend_to_what_came_before_them(monkeypatch: pytest.MonkeyPatch, page: int, gathered: int) -> None:
    monkeypatch.setattr("engine.paged_attention.GATHERED_TOKENS", gathered)
    rng = Random(page)
    for lengths in ([1, 40], [2, 1], [31], [32, 7, 33], [90, 40], [8, 8]):
        (num_heads, num_kv), starts = rng.choice(HEADS), [rng.choice((0, rng.randrange(n))) for n in lengths]
        keys, values, k_pages, v_pages, table, *_ = paged(lengths, page, num_kv, 8, rng, torch.float64)
        chunks = []
        for i, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            own = table[i, : -(-length // page)].tolist()
            leader = Sequence(i, 0, 0, tuple(range(length)), key=0, max_new_tokens=1)
            leader.pages = own
            chunks.append(Chunk(Prefill(leader, leader.context), start, length))
        attention = ChunkAttention(chunks, page, CPU)
        copied = [len(pages) for _, pages, *_ in attention.parts]
        if any(starts):
            assert sum(copied) == sum(lengths) and max(copied) <= max(gathered, *lengths), "few at a time"
            assert len(copied) == {1: len(lengths), 2**16: 1}.get(gathered, len(copied))
        assert attention.positions.tolist() == [p for c in chunks for p in range(c.start, c.end)]
        sizes = [c.end - c.start for c in chunks]
        q = torch.randn(sum(sizes), num_heads, 8, dtype=torch.float64)
        k, v = (torch.cat([x[c.start :] for x, c in zip(kv, chunks, strict=True)]) for kv in (keys, values))
        for window in (0, 5):
            outputs = attention(0, q, k, v, window, k_pages, v_pages).split(sizes)
            for out, *part in zip(outputs, q.split(sizes), keys, values, strict=True):
                torch.testing.assert_close(out, attend_one(*part, window=window), rtol=0, atol=1e-12)


def test_a_gpu_takes_flash_attention_for_heads_that_it_knows() -> None:
    """Heads of other sizes, as of some small models, go to torch's own choice of kernels."""
    with FakeTensorMode():
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for size in (8, 12, 256, 264):
                is_known = dtype != torch.float32 and size in (8, 256)
                assert takes_flash(torch.empty(5, 4, size, device="cuda", dtype=dtype)) == is_known
                assert not takes_flash(torch.empty(5, 4, size, dtype=dtype))


@pytest.mark.parametrize("is_told", [True, False])
@pytest.mark.parametrize("window", [0, 3])
def test_a_gpu_gets_no_copy_of_keys_for_each_query_head(
    monkeypatch: pytest.MonkeyPatch, is_told: bool, window: int
) -> None:
    """Recorded calls: torch 2.11 takes fewer heads of keys as they are, later ones have an argument for it."""

    def earlier(q, k, v, *bounds, window_size):
        assert k.shape == v.shape == (7, 2, 8) and window_size == (window - 1, 0)
        assert [bounds[0].tolist(), bounds[1].tolist(), *bounds[2:]] == [[0, 3, 5], [0, 4, 7], 3, 4]
        return q

    def later(*inputs, window_size, enable_gqa=False):
        assert enable_gqa
        return earlier(*inputs, window_size=window_size)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", later if is_told else earlier)
    attention._flash_varlen.cache_clear()
    attend = VarlenAttention([3, 2], [4, 3], CPU)
    with FakeTensorMode():
        q, k, v = (torch.empty(shape, device="cuda", dtype=torch.bfloat16) for shape in ((5, 4, 8), *[(7, 2, 8)] * 2))
        assert attend(q, k, v, window) is q
    attention._flash_varlen.cache_clear()
