"""Kernels and their twins against float64 loops.

Without a GPU the Triton half runs in Triton's interpreter, in a process of its own: Triton reads TRITON_INTERPRET when
it is first imported, and in this process another test may have done that long ago.
"""

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from conftest import thorough
from torch import Tensor

from engine import kernels, native
from sampling import SamplingConfig, sample, sample_key

NATIVE = kernels.HAS_TRITON and torch.cuda.is_available() and not kernels.INTERPRETED
DEVICE = torch.device("cuda" if NATIVE else "cpu")
RUNNERS = ["torch", "triton"] if NATIVE or kernels.INTERPRETED else ["torch"]
RUNNERS += ["compiled"] if native.library() and RUNNERS == ["torch"] else []  # by a C++ compiler
FAR = 1 << 30  # a page number that nobody may follow
CLOSE = {torch.float32: {"rtol": 1e-5, "atol": 3e-6}, torch.bfloat16: {"rtol": 1e-2, "atol": 8e-3}}
both = pytest.mark.parametrize("runner", RUNNERS)
dtypes = pytest.mark.parametrize("dtype", CLOSE, ids=["fp32", "bf16"])


def typed(cases: Sequence[tuple]) -> list[tuple[tuple, torch.dtype]]:
    """Return cases with both types of numbers; for the interpreter, which is slow, with one, in turn."""
    pairs = [(case, dtype, (i + k) % 2) for i, case in enumerate(cases) for k, dtype in enumerate(CLOSE)]
    return [(case, dtype) for case, dtype, other in pairs if not (kernels.INTERPRETED and other)]


if kernels.INTERPRETED:  # its bfloat16 is wrong: `tl.dot` multiplies the bits as integers, and casts cut off
    from triton.runtime import interpreter

    convert_any, multiply = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot

    def convert(data: np.ndarray, source, target, rounding) -> np.ndarray:
        names = str(source), str(target)
        if names == ("bf16", "fp32"):
            return (data.astype(np.uint32) << 16).view(np.float32)
        if names == ("fp32", "bf16"):
            return torch.tensor(data).bfloat16().view(torch.uint16).numpy()
        return convert_any(data, source, target, rounding)

    def dot(self, a, b, *rest):
        a, b = (self.cast_impl(x, interpreter.tl.float32) if str(x.dtype.scalar) == "bf16" else x for x in (a, b))
        return multiply(self, a, b, *rest)

    interpreter._convert_float, interpreter.InterpreterBuilder.create_dot = convert, dot


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Fill what `torch.empty` returns with NaN, so that a place that no kernel writes is found out."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.zeros(1).new_empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def pick(name: str, runner: str):
    if runner == "compiled":  # these call the twin for what the kernels do not take
        return torch.no_grad()(getattr(kernels, name))
    assert runner == "torch" or kernels.use_triton(torch.empty(0, device=DEVICE))
    return getattr(kernels, name if runner == "triton" else f"{name}_torch")


def randn(rng: Random, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)


def check(mine: Tensor, exact: Tensor, **close) -> None:
    torch.testing.assert_close(mine.double(), exact, **(close or CLOSE[mine.dtype]))


def strided(x: Tensor) -> Tensor:
    """Return x as a view whose rows lie apart, NaN between them."""
    wide = torch.full((len(x), *x.shape[1:-1], x.shape[-1] + 16), torch.nan, device=x.device, dtype=x.dtype)
    wide = wide.flatten(1) if x.dim() == 2 else wide
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


def shuffled_table(lengths: list[int], page: int, rng: Random, spare: int = 2) -> tuple[Tensor, int]:
    """Return a table of pages in random order and the number of pages; entries without keys lead far away."""
    counts = [-(-length // page) for length in lengths]
    pages = rng.sample(range(sum(counts) + spare), sum(counts))
    table = torch.full((len(lengths), max(counts) + spare), FAR, dtype=torch.int32)
    for i, count in enumerate(counts):
        table[i, :count] = torch.tensor([pages.pop() for _ in range(count)], dtype=torch.int32)
    return table.to(DEVICE), sum(counts) + spare


# ---- attention over KV pages -------------------------------------------------------------------------------------


def decode_case(
    lengths: list[int],
    heads: int,
    groups: int,
    size: int,
    page: int,
    dtype: torch.dtype,
    rng: Random,
    scale: float = 1,
    window: int = 0,
):
    """Return the arguments of `paged_decode` and the exact answer. Every place without a key is NaN."""
    table, num_pages = shuffled_table(lengths, page, rng)
    kv_pages = torch.full((2, 2, num_pages, heads, page, size), torch.nan, device=DEVICE, dtype=dtype)
    q = randn(rng, len(lengths), heads * groups, size, dtype=dtype) * scale
    exact = torch.zeros(q.shape, dtype=torch.float64, device=DEVICE)
    for i, length in enumerate(lengths):
        keys, values = randn(rng, 2, length, heads, size, dtype=dtype)
        for t in range(length):
            kv_pages[1, :, table[i, t // page], :, t % page] = torch.stack((keys[t], values[t]))
        keys, values = keys[-window:], values[-window:]
        for h in range(heads * groups if length else 0):
            scores = keys[:, h // groups].double() @ q[i, h].double() / size**0.5
            exact[i, h] = scores.softmax(0) @ values[:, h // groups].double()
    return (q, kv_pages[1, 0], kv_pages[1, 1], table, torch.tensor(lengths, dtype=torch.int32, device=DEVICE)), exact


DECODE = [  # lengths, K, G, D, page, splits
    ([1], 1, 1, 32, 16, 1),
    ([16, 1, 0, 33], 2, 2, 64, 16, 1),
    ([64, 200, 7], 1, 7, 64, 32, 4),
    ([0, 65, 128, 129, 31], 1, 7, 64, 64, 2),
    ([300], 2, 1, 32, 16, 8),
    ([150, 48], 1, 8, 80, 16, 2),
    ([96, 3], 2, 2, 96, 32, 4),
    ([64, 0, 190], 1, 8, 128, 64, 16),
    ([70, 32], 1, 2, 256, 32, 4),
    ([257], 1, 1, 128, 32, 64),
    ([256, 300], 1, 2, 32, 256, 2),
    ([40], 1, 17, 20, 16, 1),  # more query heads than one tensor-core tile, and a head smaller than one
]


def random_case(seed: int) -> tuple:
    rng = Random(seed)
    shape = [rng.choice(x) for x in ((1, 2), (1, 2, 7, 8), (32, 64, 80, 96, 128), (16, 32, 64), (1, 2, 4, 8, 16))]
    lengths = [rng.choice((0, 1, shape[3], 4 * shape[3], rng.randint(1, 300))) for _ in range(rng.randint(1, 3))]
    return (lengths, *shape)


@both
@pytest.mark.parametrize(
    "case, dtype", typed([*DECODE, *map(random_case, range(3 if kernels.INTERPRETED else 12))]), ids=str
)
def test_decode_equals_loops(case: tuple, dtype: torch.dtype, runner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, heads, groups, size, page, splits = case
    monkeypatch.setattr(kernels, "_num_splits", lambda *shape: splits)
    monkeypatch.setattr(kernels, "MIN_PART", 16)  # many short parts
    args, exact = decode_case(lengths, heads, groups, size, page, dtype, Random(str(case)))
    around = torch.full((len(lengths) + 2, *exact.shape[1:]), torch.nan, device=DEVICE, dtype=dtype)
    out = pick("paged_decode", runner)(*args, out=around[1:-1])
    assert out.data_ptr() == around[1].data_ptr() and out.dtype == dtype
    check(out, exact)
    assert around[0].isnan().all() and around[-1].isnan().all()
    assert not out[args[-1] == 0].any()


@both
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("window", [1, 16, 37, 200, 1000])
def test_decode_reads_the_newest_keys(splits: int, window: int, runner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_num_splits", lambda *shape: splits)
    monkeypatch.setattr(kernels, "MIN_PART", 16)
    args, exact = decode_case([5, 300, 0, 38, 200], 1, 2, 32, 16, torch.float32, Random(window), window=window)
    check(pick("paged_decode", runner)(*args, window=window), exact)


@both
@pytest.mark.parametrize("lengths", [[1], [128, 129, 500], [0, 0]], ids=str)
def test_decode_chooses_splits_itself(lengths: list[int], runner: str) -> None:
    args, exact = decode_case(lengths, 1, 2, 32, 16, torch.float32, Random(1))
    q, *rest, sizes = args
    out = pick("paged_decode", runner)(strided(q), *rest, sizes.long())
    assert out.is_contiguous()
    check(out, exact)


@both
@pytest.mark.parametrize("splits", [1, 4])
def test_decode_survives_scores_that_overflow_exp(splits: int, runner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_num_splits", lambda *shape: splits)
    monkeypatch.setattr(kernels, "MIN_PART", 16)
    args, exact = decode_case([200, 64], 1, 2, 32, 16, torch.float32, Random(2), scale=1e3)
    check(pick("paged_decode", runner)(*args), exact, rtol=0, atol=1e-3)


@both
def test_a_table_may_be_far_wider_than_rows_are_long(runner: str) -> None:
    """As in a CUDA graph, which has splits for the longest row that may come."""
    (q, k_pages, v_pages, table, lengths), exact = decode_case([5, 300, 0], 1, 2, 32, 16, torch.float32, Random(6))
    wide = torch.cat((table, torch.full((3, 512), FAR, dtype=table.dtype, device=DEVICE)), 1)
    check(pick("paged_decode", runner)(q, k_pages, v_pages, wide, lengths), exact)


@pytest.mark.skipif(not kernels.HAS_TRITON, reason="triton is not installed")
def test_splits_fill_the_gpu_and_no_more() -> None:
    def splits(n: int, num_kv: int, context: int) -> int:
        return kernels._num_splits(n, num_kv, context, torch.device("cpu"))  # counts as an H100

    assert splits(1, 2, 128) == splits(256, 8, 2048) == 1
    assert splits(1, 2, 512) == 4  # no part under MIN_PART keys
    assert splits(1, 1, 1 << 17) == 64
    assert splits(32, 4, 8192) == 8 and splits(512, 8, 8192) == 4  # enough programs; then MAX_PART alone
    assert all(bin(splits(n, k, c)).count("1") == 1 for n in (1, 7, 100) for k in (1, 8) for c in (16, 1000, 40000))


# ---- norms, activation -------------------------------------------------------------------------------------------


def exact_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@both
@dtypes
@pytest.mark.parametrize("n, size", [(1, 32), (3, 96), (5, 1000)])
def test_norm_equals_formula(n: int, size: int, dtype: torch.dtype, runner: str) -> None:
    rng, eps = Random(size), 0.05  # an eps that shows
    x, residual, weight = (randn(rng, *shape, dtype=dtype) for shape in ((n, size), (n, size), (size,)))
    normed, summed = pick("add_rms_norm", runner)(strided(x), residual, weight, eps)
    assert torch.equal(summed, x + residual) and normed.dtype == dtype
    check(normed, exact_norm(x + residual, weight, eps), rtol=CLOSE[dtype]["rtol"], atol=1e-6)
    alone, same = pick("add_rms_norm", runner)(x, None, weight, eps)
    assert torch.equal(same, x)
    check(alone, exact_norm(x, weight, eps), rtol=CLOSE[dtype]["rtol"], atol=1e-6)
    if runner == "triton":
        differ = (normed != kernels.add_rms_norm_torch(x, residual, weight, eps)[0]).float().mean()
        assert differ < 0.01 or dtype == torch.float32  # rounded where torch rounds


@both
@dtypes
@pytest.mark.parametrize("n, size, blocks", [(1, 64, 1), (3, 2304, 2), (5, 36, 4)])
def test_silu_mul_equals_formula(n: int, size: int, blocks: int, dtype: torch.dtype, runner: str) -> None:
    gate, up = randn(Random(size), 2, n, blocks, size // blocks, dtype=dtype) * 3
    both_halves = torch.stack((gate, up), 2).flatten(1)
    out = pick("silu_mul", runner)(strided(both_halves), blocks)
    exact = (gate.double() / (1 + (-gate.double()).exp()) * up.double()).flatten(1)
    assert out.shape == (n, size)
    check(out, exact, rtol=CLOSE[dtype]["rtol"], atol=1e-6)
    if runner == "triton":
        differ = (out != kernels.silu_mul_torch(both_halves, blocks)).float().mean()
        assert differ < 0.01 or dtype == torch.float32  # rounded where torch rounds


# ---- rotary embedding and the KV write ---------------------------------------------------------------------------

ROPE = [  # positions, K, G, D, page
    ([0], 1, 1, 32, 16),
    ([15, 16, -1, 31], 2, 2, 64, 16),
    ([63, 64, 5], 2, 7, 64, 32),
    ([-1, 20], 1, 8, 80, 16),
    ([33, 100, 2, 64, 7], 1, 2, 96, 64),
    ([40, 1], 2, 1, 128, 32),
    ([17], 1, 4, 256, 16),
]


@both
@pytest.mark.parametrize("case, dtype", typed([(normalised, *case) for normalised in (0, 1) for case in ROPE]), ids=str)
def test_rope_and_write_equals_loops(case: tuple, dtype: torch.dtype, runner: str) -> None:
    (normalised, positions, heads, groups, size, page), rng, eps = case, Random(str(case)), 0.05
    table, num_pages = shuffled_table([p + 1 for p in positions], page, rng)
    kv_pages = torch.full((2, 2, num_pages, heads, page, size), torch.nan, device=DEVICE, dtype=dtype)
    x = randn(rng, len(positions), heads, groups + 2, size, dtype=dtype)
    angles = torch.arange(128, dtype=torch.float64)[:, None] * 100.0 ** -(torch.arange(size // 2) * 2 / size)
    cos, sin = (t.to(DEVICE, torch.float32 if normalised else dtype) for t in (angles.cos(), angles.sin()))
    norms: tuple[Any, Any] = (
        (randn(rng, size, dtype=dtype), randn(rng, size, dtype=dtype)) if normalised else (None, None)
    )

    expected, exact = kv_pages.double(), torch.zeros(len(positions), heads * groups, size, dtype=torch.float64)
    for i, position in enumerate(positions):
        for j in range(heads if position >= 0 else 0):
            place = (table[i, position // page], j, position % page)
            for r in range(groups + 2):
                row = x[i, j, r].double()
                if normalised and r <= groups:
                    row = exact_norm(row, norms[int(r == groups)], eps)
                first, second = row.chunk(2)
                c, s = cos[position].double(), sin[position].double()
                turned = torch.cat((first * c - second * s, second * c + first * s))
                if r < groups:
                    exact[i, j * groups + r] = turned
                else:
                    expected[(1, r - groups, *place)] = turned if r == groups else row

    at = torch.tensor(positions, device=DEVICE)
    inputs = strided(x.flatten(1)), cos, sin, at, table
    counts, other = (heads * groups, heads), kv_pages.clone()
    q = pick("rope_and_write", runner)(*inputs, kv_pages[1, 0], kv_pages[1, 1], *counts, *norms, eps)
    assert q.is_contiguous() and q.dtype == dtype
    close = {"rtol": 1e-5, "atol": 3e-6} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 2e-2}
    check(q, exact.to(DEVICE), **close)
    check(kv_pages, expected, equal_nan=True, **close)  # nothing else was written, in this layer or another
    theirs = kernels.rope_and_write_torch(*inputs, other[1, 0], other[1, 1], *counts, *norms, eps)
    assert (q != theirs).float().mean() < 0.02 or dtype == torch.float32  # rounded where torch rounds
    for i, position in enumerate(positions):
        if position >= 0:
            assert torch.equal(kv_pages[1, 1, table[i, position // page], :, position % page], x[i, :, -1])


# ---- sampling ----------------------------------------------------------------------------------------------------


# Vocabulary, temperature. The interpreter plays each with one type, in turn: both, with each of them.
RACES = [(1, 0.6), (1, 1.0), (3, 1.0), (3, 0.6), (100, 0.6), (100, 1.0), (9000, 1.0), (9000, 0.6)]


@both
@pytest.mark.parametrize("case, dtype", typed(RACES), ids=str)
def test_a_race_draws_by_its_rule(case: tuple[int, float], dtype: torch.dtype, runner: str) -> None:
    """tests/test_sampling.py has the twin's distribution."""
    vocab, temperature = case
    rng, rows = Random(vocab), 16 if NATIVE else 8
    logits = randn(rng, rows, vocab, dtype=dtype) * 4
    logits[3, vocab // 2] = 60.0  # one token takes all
    logits[:5, : vocab // 2] = -torch.inf  # whole blocks are banned
    logits[1:3, vocab // 2 + 1 :] = -torch.inf  # all but one token
    keys = torch.tensor([sample_key(1, row) for row in range(rows)], device=DEVICE)
    positions = torch.arange(rows, device=DEVICE) * 40
    tokens, logprobs = pick("race", runner)(strided(logits), keys, positions, temperature)
    assert tokens.dtype == torch.int64 and logprobs.dtype == torch.float32
    exact = (logits.double() / temperature).log_softmax(-1)
    torch.testing.assert_close(logprobs.double(), exact.gather(1, tokens[:, None])[:, 0], rtol=1e-5, atol=1e-5)
    assert (tokens[1:4] == vocab // 2).all()
    drawn = sample(logits, keys, positions, SamplingConfig(temperature=temperature))
    assert torch.equal(tokens, drawn[0])  # ties, which rounding may turn, are rare
    torch.testing.assert_close(logprobs, drawn[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("runner", [name for name in RUNNERS if NATIVE or name != "triton"])
def test_a_race_of_logits_that_are_not_numbers_names_a_token(runner: str) -> None:
    """One beyond the vocabulary would end a GPU's process soon. The interpreter's NumPy finds no largest NaN."""
    logits = torch.full((2, 9000), torch.nan, device=DEVICE)
    logits[1, :4000] = 0.0
    tokens, logprobs = pick("race", runner)(logits, *torch.ones(2, 2, dtype=torch.int64, device=DEVICE), 1.0)
    assert (tokens >= 0).all() and (tokens < 9000).all() and logprobs.isnan().all()


@pytest.mark.skipif("triton" not in RUNNERS, reason="the twin is the sort itself")
@pytest.mark.parametrize("vocab, top_p", [(3, 0.5), (300, 0.01), (300, 0.999), (9000, 0.95)])
def test_the_nucleus_by_triton_is_that_of_a_sort(vocab: int, top_p: float) -> None:
    rng = Random(f"{vocab} {top_p}")
    scales = [0.1, 1.0, 4.0, 20.0] if NATIVE else [1.0, 20.0]  # the interpreter takes its time
    moves = [-40.0, 40.0, -1e4, 1e4][-len(scales) :]
    plain, ties, moved, banned, single = (
        randn(rng, 5, len(scales), vocab) * torch.tensor(scales, device=DEVICE)[:, None]
    )
    ties = (ties * 2).round() / 2
    moved = moved + torch.tensor(moves, device=DEVICE)[:, None]
    banned[:, vocab // 2 :] = -torch.inf
    single[:, : vocab - 1] = -torch.inf  # one token has all
    logits = torch.cat([plain, ties, moved, banned, single])
    least = kernels.least_in_nucleus(strided(logits), top_p)
    assert torch.isin(least, logits).all()
    theirs, probs = kernels.least_in_nucleus_torch(logits, top_p), logits.double().softmax(-1)
    for mine, other, row, p in zip(least, theirs, logits, probs, strict=True):
        edge = p[row > min(mine, other)].sum()  # they differ only where rounding moves this sum across top_p
        assert torch.equal(mine, other) or abs(edge - top_p) < 1e-5
    keys = torch.arange(len(logits), device=DEVICE)
    kept = (logits.masked_fill(logits < threshold, -torch.inf) for threshold in (least, theirs))
    mine, other = (sample(rest, keys, keys, SamplingConfig())[0] for rest in kept)
    assert torch.equal(mine, other)


# ---- which code runs ---------------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.skipif("triton" in RUNNERS or not kernels.HAS_TRITON, reason="needs triton, and runs its kernels itself")
def test_kernels_in_the_interpreter() -> None:
    engine = f"{Path(__file__).parent}/test_rollout.py::test_other_families_draw_the_same_tokens_by_fused_kernels"
    tests = ["-k", "triton or splits or qwen3-3-5", __file__, engine]
    command = [sys.executable, "-m", "pytest", "-n0", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout, done.stdout


class Compiled:
    """Stands in for a kernel: compiles for an H100 what would be launched, and keeps what comes out."""

    found: ClassVar[list] = []

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid: tuple):
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource, compile

        def launch(*args, num_warps: int = 4, num_stages: int = 3, **constants) -> None:
            types, aligned = {}, {}
            for i, (name, value) in enumerate(zip(self.kernel.arg_names, args, strict=False)):
                if value is None or (isinstance(value, int) and value == 1):
                    constants[name] = value
                elif isinstance(value, Tensor):
                    types[name] = "*" + TYPE_NAMES[value.dtype]
                else:
                    types[name] = "i32" if isinstance(value, int) else "fp32"
                if isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0):
                    aligned[(i,)] = [["tt.divisibility", 16]]
            signature = {name: types.get(name, "constexpr") for name in self.kernel.arg_names}
            source = ASTSource(fn=self.kernel, signature=signature, constexprs=constants, attrs=aligned)
            options = {"num_warps": num_warps, "num_stages": num_stages}
            self.found.append((self.kernel.__name__, compile(source, GPUTarget("cuda", 90, 32), options)))

        return launch


TYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float64: "fp64"}
TYPE_NAMES |= {torch.int32: "i32", torch.int64: "i64"}


@pytest.mark.slow
@pytest.mark.skipif(not kernels.HAS_TRITON or kernels.INTERPRETED, reason="needs triton, and not its interpreter")
@pytest.mark.parametrize(
    "dtype, groups, size",
    [
        (torch.bfloat16, 4, 256),
        thorough(torch.bfloat16, 7, 64),
        thorough(torch.float32, 2, 80),
    ],
)
def test_compiles_for_an_h100(
    dtype: torch.dtype, groups: int, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter takes what the compiler refuses. No GPU is needed to compile for one."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # 3.9 warns when nobody chooses
    monkeypatch.setattr(kernels, "use_triton", lambda x: True)
    found: list = []
    monkeypatch.setattr(Compiled, "found", found)
    names = "_paged_decode _merge_splits _rms_norm _rope_and_write _silu_mul _block_masses _race _least_in_nucleus"
    for name in names.split():
        monkeypatch.setattr(kernels, name, Compiled(getattr(kernels, name)))
    args, _ = decode_case([40, 500], 4, groups, size, 16, dtype, Random(4))
    x, table = torch.zeros(2, 4 * (groups + 2) * size, dtype=dtype), torch.zeros(64, size // 2)
    kernels.paged_decode(*args)
    norms = (x[0, :size], x[0, :size]) if size == 256 else (None, None)
    kernels.rope_and_write(x, table, table, args[4], args[3], args[1], args[2], 4 * groups, 4, *norms)
    kernels.add_rms_norm(x, x, x[0], 1e-6)
    kernels.silu_mul(x, 2)
    kernels.race(x, torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), 1.0)
    kernels.least_in_nucleus(x.float(), 0.9)
    assert len(found) == 8
    for name, made in found:
        assert made.metadata.shared <= 99 * 1024, name  # what one program may use on every recent GPU
        assert "tf32" not in made.asm["ptx"], name
        if name == "_paged_decode":  # keys and values arrive in pieces of 16 bytes, while earlier ones are used
            assert re.search(r"cp\.async\.cg.*(0x10|16)", made.asm["ptx"]), made.asm["ptx"]


@pytest.mark.skipif(not NATIVE, reason="needs a GPU")
def test_a_captured_step_follows_its_inputs() -> None:
    rng, dtype = Random(5), torch.bfloat16
    (q, k_pages, v_pages, table, lengths), _ = decode_case([300, 7, 0, 64], 2, 7, 64, 32, dtype, rng)
    x, residual, qkv = (randn(rng, 4, size, dtype=dtype) for size in (1024, 1024, 18 * 64))
    positions, keys = lengths - 1, torch.arange(4, device=DEVICE)
    cos, sin = torch.rand(2, 512, 32, device=DEVICE)

    def step() -> tuple[Tensor, ...]:
        query = kernels.rope_and_write(qkv, cos, sin, positions, table, k_pages, v_pages, 14, 2)
        attended = kernels.paged_decode(query, k_pages, v_pages, table, lengths)
        normed = kernels.add_rms_norm(x, residual, x[0], 1e-6)
        drawn = kernels.race(normed[0], keys, positions, 0.7)
        return attended, *normed, kernels.silu_mul(x, 2), *drawn, kernels.least_in_nucleus(normed[0].float(), 0.7)

    step()  # compile
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for tensor in (x, residual, qkv):
        tensor.copy_(randn(rng, *tensor.shape, dtype=dtype))
    lengths.copy_(torch.tensor([299, 0, 0, 63]))  # a sequence has left the bucket
    positions.copy_(lengths - 1)
    eager = step()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, eager, strict=True))


def test_without_triton_the_twins_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)  # `import triton` fails
    spec = importlib.util.spec_from_file_location("kernels_alone", Path(kernels.__file__))
    alone = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(alone)
    assert not alone.HAS_TRITON
    args, exact = decode_case([5, 20], 1, 2, 32, 16, torch.float32, Random(3))
    check(alone.paged_decode(*args), exact)
