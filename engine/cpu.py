"""Tricks of the CPU path, each with its gain; who reads for GPUs may skip this file.

Pages as a batch: decoding rows attend to all pages in use without a gather. Shared memory: ranks of one machine
exchange tensors without gloo. Packed weights: matrix products in oneDNN's layout. Threads: little steps are one
thread's. Kept memory: freed memory stays for the next tensors.

Shapes: n decoding rows, P pages in use, K key/value heads, H query heads, G = H / K, D head size.
"""

import ctypes
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import repeat
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine import native
from engine.pages import Holder, PageMove, Pages, compact, cut, pages_needed
from engine.sequence import Parked

LOG2_E = math.log2(math.e)
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h
LITTLE = 2**24  # multiplications of a step: some 0.7 ms of one core


# ---- pages as a batch --------------------------------------------------------------------------------------------


class BatchedPages(Pages):
    """Pages of sequences under way are always 0 .. dense - 1, each with one holder: a step reads all of them.

    `release` returns the moves that keep it so. Parked pages count as used, but their keys and values are elsewhere.
    """

    shares = False
    PARKED = -1  # instead of a page's number

    def __init__(self, num_pages: int, page_size: int):
        self.size, self.page_size, self.used, self.dense = num_pages, page_size, 0, 0
        self.holder: list[Holder | None] = [None] * num_pages
        self.start = np.zeros(num_pages, np.int64)  # position of the page's first token in its sequence
        self.row = np.zeros(num_pages, np.int64)  # of the holder; -1 while it is prefilled

    def take(self, holder: Holder) -> int:
        page = self.dense
        self.used, self.dense = self.used + 1, self.dense + 1
        self.holder[page], self.start[page] = holder, len(holder.pages) * self.page_size
        self.row[page] = holder.row
        holder.pages.append(page)
        return page

    def release(self, holders: Sequence[Holder], kept: Iterable[int] = repeat(0)) -> list[PageMove]:
        gone, moves = cut(holders, kept), []
        self.used -= len(gone)
        freed = [page for page in gone if page != self.PARKED]
        for source, target in compact(freed, self.dense):
            holder, place = self.holder[source], int(self.start[source]) // self.page_size
            assert holder, "each page in use has a holder"
            holder.pages[place] = target
            self.holder[target] = holder
            self.start[target], self.row[target] = self.start[source], self.row[source]
            moves.append(PageMove(source, target, holder, place))
        self.dense -= len(freed)
        return moves

    def park(self, holder: Holder, parked: Holder) -> None:
        assert isinstance(parked, Parked)
        count = pages_needed(parked.num_tokens, self.page_size)  # a draft may have filled more, behind a stop text
        parked.pages = [self.PARKED] * count  # the holder's own are released with its row
        self.used += count

    def resume(self, parked: Holder, holder: Holder) -> None:
        count = len(parked.pages)
        self.release([parked])
        for _ in range(count):
            self.take(holder)

    def seat(self, holder: Holder, row: int) -> None:
        self.row[holder.pages] = row


@cache
def _page_bias(page_size: int, dtype: torch.dtype) -> Tensor:
    """Return what is added to the scores of a page of 0, 1 .. `page_size` filled places. [page + 1, page]"""
    filled = torch.arange(page_size)[None] < torch.arange(page_size + 1)[:, None]
    return torch.zeros(filled.shape, dtype=dtype).masked_fill_(~filled, -torch.inf)


@cache
def _late_bias(page_size: int, dtype: torch.dtype) -> Tensor:
    """Return what is added to the scores of a page whose first 0, 1 .. `page_size` places are behind a window."""
    return _page_bias(page_size, dtype).flip(0, 1)


def decode_by_page(q: Tensor, k_pages: Tensor, v_pages: Tensor, owner: Tensor | None, bias: Tensor) -> Tensor:
    """CPU decode attention without a gather: each page is one batch element, pages are merged by their softmax sums.

    q [n, H, D]; k_pages and v_pages [P, K, page, D], those in use and no others; owner [P] int64, the sequence of each
    page, or None when page i is all of sequence i; bias [P * K, 1, places], 0 on filled places and -inf elsewhere;
    later places of all pages are empty -> [n, H, D]

    Two batched products: 2 to 4 times faster than one call of torch's flash attention for so few queries a page.
    """
    n, num_heads, size = q.shape
    pages, num_kv = k_pages.shape[:2]
    places = bias.shape[2]
    keys, values = k_pages[:, :, :places].flatten(0, 1), v_pages[:, :, :places].flatten(0, 1)  # [P * K, places, D]
    groups, scale, of_page = num_heads // num_kv, size**-0.5, (pages, num_heads)
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
    out = torch.zeros_like(flat).index_add_(0, owner, torch.bmm(weights, values).view(pages, -1))
    return out.view(n, num_heads, size).div_(total[:, :, None])


class PageAttention:
    """Attention of the decoding rows in one step, with all that is the same for its layers computed once."""

    def __init__(
        self,
        pages: BatchedPages,
        owner: np.ndarray,
        table: np.ndarray,
        length: np.ndarray,
        kv: Tensor,
        are_others: bool,
    ):
        """What stands on the `pages`; `kv` [layers, 2, pages, K, page, D] is their memory.

        owner [pages in use], each page's row; table [rows, pages of a sequence]; length [n], the tokens that each row
        has in the cache so far. `are_others`: some pages belong to none of the rows; their owner is negative.
        """
        # All but the bias on the host, where these small steps cost a third of what they cost as tensors.
        n, used, page_size = len(length), pages.dense, pages.page_size
        position = length
        self.write_pages = torch.from_numpy(table[np.arange(n), position // page_size])  # [n], of the new tokens
        if are_others:  # their pages belong to one row too many, whose result is dropped
            owner, position = np.where(owner < 0, n, owner), np.append(position, 0)
        filled = (position[owner] + 1 - pages.start[:used]).clip(1, page_size)
        is_simple = used == n and bool((owner == np.arange(n)).all())
        self.used, self.extra, self.n = used, int(are_others), n
        self.owner = None if is_simple else torch.from_numpy(owner)
        places = int(filled.max())  # young pages are not read whole

        def bias(window: int) -> Tensor:
            bias = _page_bias(page_size, kv.dtype)[torch.from_numpy(filled), :places]
            if window:
                late = (position[owner] + 1 - window - pages.start[:used]).clip(0, page_size)
                bias = bias + _late_bias(page_size, kv.dtype)[torch.from_numpy(late), :places]
            return bias.repeat_interleave(kv.shape[3], 0)[:, None]  # [P * K, 1, places]

        self.bias = cache(bias)  # of layers with a window, and of those without

    def __call__(self, q: Tensor, k_pages: Tensor, v_pages: Tensor, window: int = 0) -> Tensor:
        """q [n, H, D]; k_pages and v_pages [pages, K, page, D] -> [n, H, D]"""
        q = F.pad(q, (0, 0, 0, 0, 0, self.extra)) if self.extra else q
        return decode_by_page(q, k_pages[: self.used], v_pages[: self.used], self.owner, self.bias(window))[: self.n]


# ---- between the ranks of one machine ----------------------------------------------------------------------------


class SharedMemory:
    """Exchange of tensors between processes of one machine: write a slot, raise a counter, wait for all counters.

    Slots alternate. A rank that has seen all counters of round k knows that all ranks have left round k - 1, so it may
    overwrite that round's slot in round k + 1. x86 makes stores visible in order: data before the counter.
    """

    SLOT_BYTES = 4 * 2**20
    NAP_SECONDS = 5e-5, 5e-3  # between two looks at the counters, at first and at most: a twentieth of the wait
    LOOK_SECONDS = 0.5  # between two looks whether other ranks have died

    def __init__(self, path: str, rank: int, size: int, timeout_seconds: float, slot_bytes: int, naps: bool):
        """`path`: a file of `make_file`; it can go as soon as all ranks are here. `naps`: waits may be long."""
        self.rank, self.size, self.timeout_seconds, self.round, self.naps = rank, size, timeout_seconds, 0, naps
        # Looks at the counters before a rank gives its core away: none where ranks outnumber cores, for others need it.
        self.patience = (100 if naps else 1000) if size <= len(os.sched_getaffinity(0)) else 0
        memory = torch.from_file(path, shared=True, size=self.num_bytes(size, slot_bytes), dtype=torch.uint8)
        lines = memory[: 64 * size].view(torch.int64).numpy()
        self.counters, self.pids = lines[::8], lines[1::8]  # a cache line for each rank
        self.pids[rank] = os.getpid()
        self.slot_bytes, self.slots = slot_bytes, memory[64 * size :].view(2, size, slot_bytes)

    @classmethod
    def num_bytes(cls, size: int, slot_bytes: int) -> int:
        return 64 * size + 2 * size * slot_bytes

    @classmethod
    def make_file(cls, size: int, slot_bytes: int) -> str:
        """Return the path of a file of memory for `size` ranks; "" without room, as in a small container."""
        folder = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
        handle, path = -1, ""
        try:
            handle, path = tempfile.mkstemp(dir=folder)
            # A file that is only truncated kills a writer for want of room.
            os.posix_fallocate(handle, 0, cls.num_bytes(size, slot_bytes))
            return path
        except OSError as error:
            if path:
                os.unlink(path)
            print(f"ranks exchange tensors by gloo, which is slower: {folder}: {error.strerror}")
            return ""
        finally:
            if handle >= 0:
                os.close(handle)

    def exchange(self, x: Tensor) -> Tensor:
        """Return all ranks' `x`, [size, *x.shape], valid until the call after the next."""
        slot = self.post(x)
        self.wait()
        return slot

    def post(self, x: Tensor) -> Tensor:
        """Begin an exchange; return what `wait` completes. Nothing else is exchanged in between."""
        slot = self.slots[self.round % 2, :, : x.nbytes].view(x.dtype).view(self.size, *x.shape)
        slot[self.rank] = x
        self.round += 1
        self.counters[self.rank] = self.round
        return slot

    def wait(self) -> None:
        """Wait until all ranks have posted."""
        spins = 0
        while self.counters.min() < self.round:
            spins += 1
            if spins > self.patience:
                self._wait_on()
                break

    def _wait_on(self) -> None:
        """Wait for a rank that is far behind, perhaps for want of a core. Raises TimeoutError or ConnectionError."""
        begin = now = time.monotonic()
        deadline = begin + self.timeout_seconds
        look = min(begin + self.LOOK_SECONDS, deadline)
        while self.counters.min() < self.round:
            if self.naps:
                time.sleep(min(max((now - begin) / 20, self.NAP_SECONDS[0]), self.NAP_SECONDS[1]))
            else:
                os.sched_yield()
            if (now := time.monotonic()) < look:
                continue
            look = min(now + self.LOOK_SECONDS, deadline)
            late = [r for r in range(self.size) if self.counters[r] < self.round]
            # One may have come and ended since the look at the counters.
            if dead := [r for r in late if not is_alive(int(self.pids[r])) and self.counters[r] < self.round]:
                raise ConnectionError(f"rank {self.rank} of a group of {self.size}: {dead} have ended")
            if now >= deadline:
                raise TimeoutError(
                    f"rank {self.rank} of a group of {self.size} waited {self.timeout_seconds:g} s for {late}"
                )


def is_alive(pid: int) -> bool:
    """Return whether there is such a process; of another user too."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


# ---- weights ----------------------------------------------------------------------------------------------------


class Packed:
    """A weight in oneDNN's own layout, for a CPU: faster than `F.linear`, but for small products.

    A copy beside the weight, which itself multiplies few rows, or all: then there is none (`most_rows` in native.py).
    The operations are private to torch, hence the check of `can_pack`.
    """

    MIN_WORK = 3 * 2**18  # multiplications in float32, below which a call costs more than the layout gains
    SMALL = 2**18  # numbers of a weight, below which MKL's own products are faster on some CPUs (`packed`)
    MIN_ROWS = 4  # oneDNN's products of fewer rows take longer than of these

    def __init__(self, weight: Tensor):
        self.pack(weight)

    def pack(self, weight: Tensor) -> None:
        self.plain, self.packed = weight, None
        # Fewer rows of x than these are left to `F.linear`.
        self.least = -(-self.MIN_WORK // max(weight.numel(), 1)) if weight.dtype == torch.float32 else 0
        if native.most_rows(weight) < native.ALL_ROWS:
            self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 16)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if len(x) < self.least:
            return F.linear(x, self.plain, bias)
        if native.can_multiply(x, self.plain, bias):
            return native.multiply(x, self.plain, bias)
        if self.packed is None:
            return F.linear(x, self.plain, bias)
        rows = len(x)
        x = F.pad(x, (0, 0, 0, self.MIN_ROWS - rows)) if rows < self.MIN_ROWS else x
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, bias, "none", [], "")[:rows]


def way(weight: Tensor | Packed) -> native.Way:
    """Return how a decode step of one call multiplies by a weight: as `Packed`, or as `F.linear` does."""
    if isinstance(weight, Packed):
        return native.Way(weight.plain, weight.least, native.most_rows(weight.plain))
    return native.Way(weight, native.ALL_ROWS, 0)


def most_fused(weight: Tensor | Packed) -> int:
    """Return up to how many rows a weight can be part of such a step."""
    plain, least, most = way(weight)
    if plain.stride(1) != 1:
        return 0
    if isinstance(weight, Packed):
        return max(most, least - 1)
    is_small = weight.dtype == torch.float32 and 0 < weight.numel() < native.LARGE
    return (native.MUCH - 1) // weight.numel() if is_small else 0  # with more rows tiles may take it


def few_sizes(rows: int) -> int:
    """Return a number of rows, not smaller, less than a sixteenth larger, of which there are few.

    oneDNN takes a quarter of a millisecond for a product of a size that it has not seen, of each packed weight. Numbers
    of decoding rows come again and again; those of drafted and of prefilled tokens do not.
    """
    step = 1 << max(rows.bit_length() - 5, 0)
    return -(-rows // step) * step


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies such numbers faster than torch, in its layout; bfloat16 where the CPU itself has it."""
    is_here = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    if dtype == torch.bfloat16:
        has: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()  # newer than torch 2.11
        return is_here and any(has.get(name) for name in ("avx512_bf16", "amx_bf16"))
    return is_here and dtype == torch.float32


def packed(weight: Tensor) -> "Tensor | Packed":
    """Return a weight in that layout, where that can be and pays; else as it is."""
    is_matrix = weight.device.type == "cpu" and weight.numel() > 0 and weight.dim() == 2
    is_small = weight.dtype == torch.float32 and weight.numel() < Packed.SMALL and torch.backends.mkl.is_available()
    if not is_matrix or is_small and (native.CAPABILITY == "AVX512" or native.cpu_maker() == "GenuineIntel"):
        return weight
    return Packed(weight) if can_pack(weight.dtype) or native.most_rows(weight) == native.ALL_ROWS else weight


# ---- the process -------------------------------------------------------------------------------------------------


@contextmanager
def threads_for(multiplications: int) -> Iterator[None]:
    """Have this thread do little work alone: to wake others that sleep (process/threads.py) takes longer.

    Other threads keep the number that they have, unlike with `torch.set_num_threads`.
    """
    threads, setters = torch.get_num_threads(), thread_setters()
    if threads == 1 or multiplications >= LITTLE or setters is None:
        yield
        return
    of_openmp, of_mkl = setters
    mkls = of_mkl(1)
    of_openmp(1)
    try:
        yield
    finally:
        of_openmp(threads)
        of_mkl(mkls)


@cache
def thread_setters() -> tuple[Callable[[int], None], Callable[[int], int]] | None:
    """Return what sets the calling thread's number of threads, OpenMP's and MKL's; None in builds of torch without.

    The second returns the number before.
    """
    try:
        torchs = ctypes.CDLL(str(Path(torch.__file__).parent / "lib/libtorch_cpu.so"))
        return torchs.omp_set_num_threads, torchs.MKL_Set_Num_Threads_Local
    except (OSError, AttributeError):
        return None


def keep_memory() -> None:
    """Have glibc keep freed memory for the next tensors, unless the user has set MALLOC_... variables.

    Else glibc takes each large tensor from the system, page fault by page fault: up to a third of a large update (7,400
    tokens, 6M parameters). The price: between steps a process holds as much memory as at its peak.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version") and not any(name.startswith("MALLOC_") for name in os.environ):
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, -1)
