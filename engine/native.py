"""Loads the C++ twins of the decode step's kernels (native.cpp), compiled once for this CPU where a compiler is.

A decode step of a small model in torch is some hundred operations of a microsecond each; in these it is dozens, and all
its layers may be one call (`Layers`).
The functions have the signatures and results of their names in engine/kernels.py, which calls them where `takes` says
so. Without a compiler (`CXX`, else g++; `CXX=` for none) torch's operations stay; a compiler that fails is named.
"""

import ctypes
import hashlib
import os
import platform
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from core import ModelShape
from engine.drafts import Drafts

# Read now: the file may be another one by the time that its first kernel is wanted, and these functions fit this one.
SOURCE = Path(__file__).with_name("native.cpp").read_text(encoding="utf-8")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
HEAD_SIZES = (16, 32, 64, 80, 96, 128)
DTYPES = torch.float32, torch.bfloat16
CPU = "model name", "flags", "Features", "CPU "  # lines of /proc/cpuinfo; the last two on ARM
CAPABILITY = torch.backends.cpu.get_cpu_capability()


@cache
def cpu_maker() -> str:
    """Return "GenuineIntel", "AuthenticAMD" or what else the system calls the maker of its CPU."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    return next((line.split()[-1] for line in lines if line.startswith("vendor_id")), "unknown")


# Rows that `multiply` takes, at most, without tiles: on an Intel Xeon with AVX-512, and on an AMD EPYC with AVX2 only,
# oneDNN's products of more than 48 are as fast; on an AMD EPYC with AVX-512, of more than 8. Of a weight of fewer
# numbers than LARGE, which stays in the cache, it takes FEW_ROWS. In bfloat16 AVX2 has ALL_ROWS: torch's products take
# up to 6 times as long. Where the CPU multiplies tiles (AMX), and a row is whole ones of TILE numbers, bfloat16 has
# TILED_ROWS, and FEW_TILED_ROWS. In float32 ALL_ROWS are multiplied by a LARGE weight, unless it is NARROW or less: x
# would be split for few products.
FEW_ROWS, LARGE, NARROW = 48 if CAPABILITY == "AVX2" else 8, 2**19, 256
TILED_ROWS, FEW_TILED_ROWS, ALL_ROWS, TILE = 96, 32, 2**31, 32
FLOAT_ROWS = {"AVX2": 48, "AVX512": 8 if cpu_maker() == "AuthenticAMD" else 48}
MOST_ROWS = {
    torch.float32: FLOAT_ROWS.get(CAPABILITY, 2),
    torch.bfloat16: ALL_ROWS if CAPABILITY == "AVX2" else 3,
}
MANY, MUCH = 512, 2**25  # rows of x, and numbers of x times those of a weight, for tiles in a training step
PARTS = 16  # of the rows over which a gradient is summed
SECONDS = 120.0  # for the compiler, on a busy machine

# Of a layer: its weights, and their biases and the norms, which may be missing.
MATRICES = "qkv", "out", "gate_up", "down"
NORMS = "input_norm", "post_norm", "q_norm", "k_norm"
VECTORS = (*(f"{name}_bias" for name in MATRICES), *NORMS)

_is_given_up = False


class _Pages(ctypes.Structure):
    _fields_ = [("keys", ctypes.c_void_p), ("values", ctypes.c_void_p)] + [
        (name, ctypes.c_int64) for name in ("of_page", "of_head", "size")
    ]


class _Hash(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("golden", "mix1", "mix2", "numbers")]


class _Packed(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("q", "k", "v", "starts")] + [
        (name, ctypes.c_int64) for name in ("heads", "groups", "window")
    ]


class Rows(ctypes.Structure):
    """Where the state of the decoding rows is (engine/rows.py)."""

    TENSORS = "last_token", "length", "count", "limit", "ended", "tokens", "logprobs", "heeds_eos", "eos_ids"
    _fields_ = [(name, ctypes.c_void_p) for name in TENSORS] + [(name, ctypes.c_int64) for name in ("num_eos", "width")]

    @classmethod
    def of(cls, rows: Any) -> "Rows":
        tensors = (getattr(rows, name).data_ptr() for name in cls.TENSORS)
        return cls(*tensors, len(rows.eos_ids), rows.tokens.shape[1])


class _Weight(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("data", "bias")] + [
        (name, ctypes.c_int64) for name in ("row", "rows", "size", "least", "most")
    ]


class _Layer(ctypes.Structure):
    _fields_ = (
        [(name, _Weight) for name in MATRICES]
        + [(name, ctypes.c_void_p) for name in NORMS]
        + [("window", ctypes.c_int64)]
    )


class _Step(ctypes.Structure):
    SIZES = "hidden", "heads", "groups", "size", "blocks"
    _fields_ = [(name, ctypes.c_void_p) for name in ("cos", "sin", "positions", "table", "norm", "blas")] + [
        *((name, ctypes.c_int64) for name in ("n", "row_of_table", "of_layer", *SIZES)),
        *(("pages", _Pages), ("eps", ctypes.c_float)),
    ]


_B, _P, _I, _F = ctypes.c_bool, ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
SIGNATURES = {  # the first argument of most: whether numbers are bfloat16
    "add_rms_norm": [_B, *[_P] * 5, _I, _I, _F],
    "silu_mul": [_B, _P, _P, _I, _I, _I],
    "silu_mul_backward": [_B, _P, _P, _P, _I, _I, _I],
    "rms_norm_backward": [_B, *[_P] * 5, _I, _I, _I, _F],
    "packed_attention": [ctypes.POINTER(_Packed), _I, _I, *[_P] * 5],
    "rope": [_P] * 6 + [_I, _I, _I, _I, _B],
    "rope_and_write": [_B, *[_P] * 5, _I, ctypes.POINTER(_Pages), _P, _P, _P, _I, _I, _I, _I, _F],
    "paged_decode": [_B, _P, ctypes.POINTER(_Pages), _P, _I, _P, _P, _I, _I, _I, _I, _I],
    "multiply": [_B, _P, _I, _P, _I, _P, _P, _I, _I],
    "multiply_turned": [_P, _I, _B, _I, _P, _I, _B, _P, _P, _I, _I],
    "race": [_P] * 5 + [_I, _I, _I, _I, _F, ctypes.POINTER(_Hash)],
    "settle": [ctypes.POINTER(Rows), _I] + [_P] * 5 + [_I, _I],
    "decode": [_B, _P, _I, ctypes.POINTER(_Step)] + [_P] * 3,
}


OF_TRAINING = {"silu_mul_backward", "rms_norm_backward", "multiply_turned", "packed_attention", "rope"}


def _is_whole(path: Path) -> bool:
    """Whether a compiled file is there and ends with its checksum: to load a part of one would end the process."""
    data = path.read_bytes() if path.exists() else b""
    return hashlib.sha256(data[:-32]).digest() == data[-32:]


def _compiled() -> Path | None:
    """Return the compiled file, made now if this machine has not made it before; None where that cannot be."""
    compiler = os.environ.get("CXX", "g++")
    # Torch's own OpenMP, so that both share threads; two runtimes would spin beside each other.
    openmp = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    command = [*compiler.split(), *FLAGS, *(("-fopenmp",) if openmp else ("-fopenmp-simd",)), "-x", "c++", "-"]
    command += [f"-Wl,--no-as-needed,{openmp[0]}"] if openmp else []
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = dict.fromkeys(line for line in lines if line.startswith(CPU))  # of its cores, which are mostly alike
        key = hashlib.sha256("\n".join((*command, SOURCE, *cpu, *platform.libc_ver())).encode()).hexdigest()[:16]
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "plainroll"
        path = folder / f"native-{key}.so"
        if compiler and not _is_whole(path):
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as own:  # ranks may compile at the same time
                try:
                    command += ["-o", f"{own}/it.so"]
                    subprocess.run(command, input=SOURCE.encode(), check=True, capture_output=True, timeout=SECONDS)
                    made = Path(own, "it.so").read_bytes()
                    Path(own, "it.so").write_bytes(made + hashlib.sha256(made).digest())
                    os.replace(f"{own}/it.so", path)
                except subprocess.SubprocessError:
                    if not _is_whole(path):  # else another rank was faster: ranks of a replica should compute alike
                        raise
        return path if compiler else None
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        is_absent = isinstance(error, FileNotFoundError) and "CXX" not in os.environ  # as on many machines
        if os.environ.get("RANK", "0") == "0" and not is_absent:
            said = (getattr(error, "stderr", None) or b"").decode(errors="replace").splitlines()
            cause = next((line for line in said if "error" in line), str(error))
            print(
                f"decodes by torch's operations, which are slower, for {compiler} made no kernels: {cause}", flush=True
            )
        return None


@cache
def library() -> ctypes.CDLL | None:
    """Return the kernels, or None where there is no compiler, or no place to keep what it makes."""
    path = None if _is_given_up else _compiled()
    try:
        found = ctypes.CDLL(str(path)) if path else None
    except OSError:
        return None
    for name, types in SIGNATURES.items() if found else ():
        function = getattr(found, name)
        function.argtypes, function.restype = types, None
    return found


@cache
def has_tiles() -> bool:
    """Whether the kernels multiply by the CPU's matrix unit: bfloat16, and float32 as three of them each."""
    asked = getattr(library(), "has_tiles", None)
    if asked:
        asked.restype = _B
    return asked is not None and bool(asked())


def give_up() -> None:
    """Decode by torch's operations from now on, as without a compiler. (Child processes would inherit `CXX`.)"""
    global _is_given_up
    _is_given_up = True
    library.cache_clear()
    has_tiles.cache_clear()


def takes(*tensors: Tensor | None) -> bool:
    """Whether the kernels are here, and take these: of one of `DTYPES`, contiguous, on a CPU, without gradients."""
    return not torch.is_grad_enabled() and fits(*tensors)


def fits(*tensors: Tensor | None) -> bool:
    """The same, of tensors that may have gradients (engine/gradients.py)."""
    first = tensors[0]
    if first is None or not first.is_cpu or (dtype := first.dtype) not in DTYPES or library() is None:
        return False  # a run on a GPU never compiles them
    for x in tensors:  # a decode step asks dozens of times: a generator would take twice as long
        if x is not None and not (x.dtype == dtype and x.is_contiguous() and x.is_cpu):
            return False
    return True


def _is_half(x: Tensor) -> bool:
    return x.dtype == torch.bfloat16


def _at(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _call(name: str, *args: object) -> None:
    getattr(library(), name)(*args)


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    normed, summed = torch.empty_like(x), x if residual is None else torch.empty_like(x)
    args = (_at(x), _at(residual), _at(weight), _at(normed), _at(summed))
    _call("add_rms_norm", _is_half(x), *args, *x.shape, eps)
    return normed, summed


def silu_mul(gate_up: Tensor, num_blocks: int = 1) -> Tensor:
    n, width = gate_up.shape[0], gate_up.shape[1] // (2 * num_blocks)
    out = gate_up.new_empty(n, num_blocks * width)
    _call("silu_mul", _is_half(gate_up), _at(gate_up), _at(out), n, num_blocks, width)
    return out


def silu_mul_backward(gradient: Tensor, gate_up: Tensor, num_blocks: int) -> Tensor:
    """The gradient of `gate_up`, from that of `silu_mul`'s result."""
    out, n, width = torch.empty_like(gate_up), len(gate_up), gate_up.shape[1] // (2 * num_blocks)
    _call("silu_mul_backward", _is_half(gate_up), _at(gradient), _at(gate_up), _at(out), n, num_blocks, width)
    return out


def rms_norm_backward(gradient: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The gradients of x and of the weight, from that of their RMSNorm."""
    out, (n, size) = torch.empty_like(x), x.shape
    of_weight = torch.empty(PARTS, size)
    args = (_at(gradient), _at(x), _at(weight), _at(out), _at(of_weight))
    _call("rms_norm_backward", _is_half(x), *args, n, size, PARTS, eps)
    return out, of_weight.sum(0).to(weight.dtype)


def can_rope(heads: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Whether `rope` takes these."""
    is_each = cos.numel() == sin.numel() == len(heads) * heads.shape[3]  # no table for all rows
    return is_each and heads.dtype == torch.float32 and fits(heads, cos, sin)


def rope(heads: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[T, K, groups + 2, D]; cos and sin as for `model.apply_rope` -> [T, K * groups, D], [T, K, D] twice"""
    (n, kv, groups, size), groups = heads.shape, heads.shape[2] - 2
    q, k, v = (heads.new_empty(n, number, size) for number in (kv * groups, kv, kv))
    _call("rope", *map(_at, (heads, cos, sin, q, k, v)), n, kv, groups, size, False)
    return q, k, v


def rope_backward(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The gradient of `heads`, from those of q, k and v."""
    (n, kv, size), groups = k.shape, q.shape[1] // k.shape[1]
    heads = q.new_empty(n, kv, groups + 2, size)
    _call("rope", *map(_at, (heads, cos, sin, q, k, v)), n, kv, groups, size, True)
    return heads


def can_attend(q: Tensor) -> bool:
    """Whether `packed_attention` takes queries [T, H, D]."""
    return q.dtype == torch.float32 and q.is_cpu and q.shape[2] in HEAD_SIZES and library() is not None


def packed_attention(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, window: int) -> Tensor:
    """Causal attention inside each of several sequences. [T, H, D], [T, K, D] twice, [n + 1] int64 -> [T, H, D]"""
    out = torch.empty_like(q)
    _attend(q, k, v, starts, window, None, out)
    return out


def packed_attention_backward(
    gradient: Tensor, out: Tensor, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v."""
    found = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    _attend(q, k, v, starts, window, gradient, out, *found)
    return found


def _attend(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, window: int, gradient: Tensor | None, out: Tensor, *found: Tensor
) -> None:
    heads = k.shape[1]
    given = _Packed(q.data_ptr(), k.data_ptr(), v.data_ptr(), starts.data_ptr(), heads, q.shape[1] // heads, window)
    places = map(_at, (gradient, out, *(found or (None,) * 3)))
    _call("packed_attention", given, len(starts) - 1, q.shape[2], *places)


def _pages(k_pages: Tensor, v_pages: Tensor) -> _Pages:
    return _Pages(k_pages.data_ptr(), v_pages.data_ptr(), k_pages.stride(0), k_pages.stride(1), k_pages.shape[2])


def can_page(q: Tensor, k_pages: Tensor, v_pages: Tensor, table: Tensor) -> bool:
    """Whether `rope_and_write` and `paged_decode` take these pages for such queries."""
    is_dense = q.dtype == k_pages.dtype == v_pages.dtype
    is_dense &= k_pages.stride() == v_pages.stride() and k_pages.stride()[2:] == (k_pages.shape[3], 1)
    return is_dense and table.stride(1) == 1 and table.dtype == torch.int32 and can_decode(k_pages)


def can_decode(kv: Tensor) -> bool:
    """Whether attention to this memory of pages [..., D] can be by `paged_decode`."""
    return kv.shape[-1] in HEAD_SIZES and kv.dtype in DTYPES and kv.is_cpu and library() is not None


def rope_and_write(qkv: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, table: Tensor, k_pages: Tensor,
                   v_pages: Tensor, num_heads: int, num_kv_heads: int, q_norm: Tensor | None = None,
                   k_norm: Tensor | None = None, eps: float = 1e-6) -> Tensor:  # fmt: skip
    n, size = qkv.shape[0], k_pages.shape[3]
    q = qkv.new_empty(n, num_heads, size)
    args = (_at(qkv), _at(cos), _at(sin), _at(positions), _at(table), table.stride(0), _pages(k_pages, v_pages))
    sizes = (n, num_kv_heads, num_heads // num_kv_heads, size)
    _call("rope_and_write", _is_half(qkv), *args, _at(q_norm), _at(k_norm), _at(q), *sizes, eps)
    return q


def paged_decode(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, table: Tensor, lengths: Tensor, window: int = 0
) -> Tensor:
    out, heads = torch.empty_like(q), k_pages.shape[1]
    args = (_at(q), _pages(k_pages, v_pages), _at(table), table.stride(0), _at(lengths), _at(out))
    _call("paged_decode", _is_half(q), *args, q.shape[0], heads, q.shape[1] // heads, q.shape[2], window)
    return out


def can_multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether `multiply` takes a weight, or a part of its columns, for x [n, in]."""
    return 0 < len(x) <= most_rows(weight) and x.dtype == weight.dtype and weight.stride(1) == 1 and takes(x, bias)


def most_rows(weight: Tensor) -> int:
    """Return how many rows `multiply` takes for such a weight, at most."""
    most, is_large = MOST_ROWS.get(weight.dtype, 0) if min(weight.shape) >= 16 else 0, weight.numel() >= LARGE
    if most and weight.is_cpu and weight.shape[1] % TILE == 0 and has_tiles():
        if weight.dtype == torch.bfloat16:
            return TILED_ROWS if is_large else FEW_TILED_ROWS
        if is_large and min(weight.shape) > NARROW:
            return ALL_ROWS
    return most if is_large or most == ALL_ROWS else min(most, FEW_ROWS)


def multiplies_all(dtype: torch.dtype) -> bool:
    """Whether large weights of the usual sizes multiply any number of rows as they are."""
    return MOST_ROWS.get(dtype) == ALL_ROWS or dtype == torch.float32 and has_tiles()


def can_turn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Whether `multiply_turned` takes x [n, in] and a weight [out, in], and is worth it."""
    if len(x) * weight.numel() < MUCH and weight.numel() < LARGE:
        return False  # asked for each product of a decode step: a small model's should know soon
    if x.dtype != torch.float32 or not (x.is_cpu and has_tiles()) or x.dim() != 2 or x.shape[1] != weight.shape[1]:
        return False
    is_turned = _is_turned(x, weight)
    is_many = is_turned and len(x) >= TILE or len(x) >= MANY or min(weight.shape) > NARROW
    is_whole = x.shape[1] % TILE == 0 or is_turned and x.shape[1] > TILE
    if not (is_many and is_whole and len(weight) >= TILE):
        return False
    return fits(x if x.is_contiguous() else x.t(), weight if weight.is_contiguous() else weight.t(), bias)


def _is_turned(*matrices: Tensor) -> bool:
    return all(matrix.stride(0) == 1 for matrix in matrices)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear`: [n, in], [out, in] -> [n, out]"""
    rows, size = weight.shape
    out = x.new_empty(len(x), rows)
    _call("multiply", _is_half(x), _at(x), len(x), _at(weight), weight.stride(0), _at(bias), _at(out), size, rows)
    return out


def multiply_turned(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` of float32 matrices of which both may be transposed: [n, in], [out, in] -> [n, out]

    By tiles. `in` is whole ones unless both are transposed; out >= 32.
    """
    is_whole = x.shape[1] % TILE == 0 or _is_turned(x, weight)
    assert has_tiles() and is_whole and len(weight) >= 32
    out = x.new_empty(len(x), len(weight))
    own, others = ((_at(m), max(m.stride()), m.stride(1) != 1) for m in (x, weight))
    _call("multiply_turned", *own, len(x), *others, _at(bias), _at(out), x.shape[1], len(weight))
    return out


def can_fuse(norm: Tensor) -> bool:
    """Whether `Layers` may take the model of such a norm."""
    return norm.is_cpu and norm.dtype in DTYPES and library() is not None and _blas() is not None


def can_decode_all(x: Tensor, positions: Tensor, table: Tensor, kv: Tensor) -> bool:
    """Whether `Layers.decode` takes these."""
    is_known = positions.dtype == torch.int64 and positions.is_contiguous()
    return is_known and takes(x) and can_page(x, kv[0, 0], kv[0, 1], table)


@cache
def _blas() -> int | None:
    """Return the address of torch's own product of float32 matrices, `F.linear`'s for small weights; None: not known.

    It is MKL's. Torch's builds without MKL multiply in several ways.
    """
    try:
        if not torch.backends.mkl.is_available():
            return None
        return ctypes.cast(ctypes.CDLL(str(Path(torch.__file__).parent / "lib/libtorch_cpu.so")).sgemm_, _P).value
    except (OSError, AttributeError):
        return None


class Way(NamedTuple):
    """A weight of a decode step, and from and up to how many rows of x `multiply` takes it; others are BLAS's."""

    weight: Tensor
    least: int
    most: int


class Layers:
    """All layers of a model, as one call takes them.

    Its operations are those of `Shard.decode`, with the same results: calls from Python take a tenth to a quarter of a
    step (benchmarks/profile_decode.py), and threads fall asleep in between.
    """

    GAPS = 96  # numbers between what lies in its memory, at most

    def __init__(
        self,
        shape: ModelShape,
        matrices: Sequence[Sequence[Way]],
        others: Sequence[Mapping[str, Tensor | None]],
        norm: Tensor,
    ):
        """Of each layer the `matrices` in the order of MATRICES, and `others` by VECTORS; `norm`: the last one."""
        self.kept = [[way.weight for way in ways] for ways in matrices], others, norm  # where the addresses point
        self.table, heads, size = (_Layer * len(matrices))(), shape.num_kv_heads, shape.head_dim
        for index, (entry, ways, tensors) in enumerate(zip(self.table, matrices, others, strict=True)):
            for name, (weight, least, most) in zip(MATRICES, ways, strict=True):
                places = _at(weight), _at(tensors[f"{name}_bias"])
                setattr(entry, name, _Weight(*places, weight.stride(0), *weight.shape, least, most))
            for name in NORMS:
                setattr(entry, name, _at(tensors[name]))
            entry.window = shape.window(index)
        sizes = shape.hidden_size, heads, shape.num_heads // heads, size, shape.mlp_blocks
        self.step = _Step(norm=_at(norm), eps=shape.norm_eps, blas=_blas(), **dict(zip(_Step.SIZES, sizes)))
        attended, inner = shape.num_heads * size, shape.intermediate_size
        self.width = shape.hidden_size + max(attended + 2 * heads * size, 2 * inner) + attended + max(attended, inner)

    def decode(self, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, table: Tensor, kv: Tensor) -> Tensor:
        """Return what `Shard.decode` does of embedded tokens x [n, hidden], which are overwritten."""
        step, out, memory = self.step, torch.empty_like(x), x.new_empty(len(x) * self.width + self.GAPS)
        step.cos, step.sin, step.positions, step.table = map(_at, (cos, sin, positions, table))
        step.n, step.row_of_table, step.of_layer = len(x), table.stride(0), kv.stride(0)
        step.pages = _pages(kv[0, 0], kv[0, 1])
        _call("decode", _is_half(x), self.table, len(self.table), step, *map(_at, (x, out, memory)))
        return out


def race(
    logits: Tensor, keys: Tensor, positions: Tensor, temperature: float, block: int, constants: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """`constants`: of the hash, in the order of `_Hash`."""
    n, vocab = logits.shape
    keys, positions = keys.contiguous(), positions.contiguous()  # copies that live as long as the call
    tokens, logprobs = logits.new_empty(n, dtype=torch.int64), logits.new_empty(n)
    args = (_at(logits), _at(keys), _at(positions), _at(tokens), _at(logprobs))
    _call("race", *args, n, vocab, logits.stride(0), block, temperature, _Hash(*constants))
    return tokens, logprobs


def settle(rows: Rows, first: int, tokens: Tensor, logprobs: Tensor, drafts: Drafts | None = None) -> None:
    """Record what rows from the `first` on have drawn, up to what their drafts did not foresee; mark those that end.

    tokens, logprobs [T]: without drafts one for each row. A row that has ended draws nothing. See engine/rows.py.
    """
    n = len(drafts.kept) if drafts else len(tokens)
    known = (drafts.start, drafts.tokens, drafts.kept) if drafts else (None,) * 3
    arrays = [array.ctypes.data if isinstance(array, np.ndarray) else None for array in known]
    _call("settle", rows, first, *arrays[:2], _at(tokens), _at(logprobs), arrays[2], n, len(tokens))
