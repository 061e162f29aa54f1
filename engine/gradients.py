"""Operations of a training step on a CPU whose forward and backward passes read and write memory once.

In torch the activation of an MLP and the norms are a dozen passes over large tensors, attention pads its sequences, and
matrix products may be slower than oneDNN's. Each function computes what its plain form does, but for rounding, and is
that form where there is no compiler, on a GPU, and in other dtypes.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from engine import native
from engine.cpu import can_pack
from engine.kernels import silu_mul_torch

Context = Any  # of a Function, with attributes of its own
MIN_ROWS = 64  # oneDNN brings the weight into a layout of its own in each call


class _SiluMul(Function):
    @staticmethod
    def forward(ctx: Context, gate_up: Tensor, num_blocks: int) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.num_blocks = num_blocks
        return native.silu_mul(gate_up, num_blocks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor, None]:
        [gate_up] = ctx.saved_tensors
        return native.silu_mul_backward(gradient.contiguous(), gate_up, ctx.num_blocks), None


class _RmsNorm(Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return native.add_rms_norm(x, None, weight, eps)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        return *native.rms_norm_backward(gradient.contiguous(), x, weight, ctx.eps), None


class _Rope(Function):
    @staticmethod
    def forward(ctx: Context, heads: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return native.rope(heads, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return native.rope_backward(*(each.contiguous() for each in gradients), *ctx.saved_tensors), None, None


class _Linear(Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), gradient = ctx.saved_tensors, gradient.contiguous()
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        of_x = _product_back(gradient, weight) if needs_x else None
        of_weight = None
        if needs_weight:
            turned = gradient.t(), x.t()
            of_weight = native.multiply_turned(*turned) if native.can_turn(*turned) else turned[0] @ x
        return of_x, of_weight, gradient.sum(0) if needs_bias else None


class _Attention(Function):
    @staticmethod
    def forward(ctx: Context, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, window: int) -> Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out = native.packed_attention(q, k, v, starts, window)
        ctx.save_for_backward(out, q, k, v, starts)
        ctx.window = window
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor | None, ...]:
        out, q, k, v, starts = ctx.saved_tensors
        found = native.packed_attention_backward(gradient.contiguous(), out, q, k, v, starts, ctx.window)
        return *found, None, None


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if native.can_turn(x, weight, bias):
        return native.multiply_turned(x, weight, bias)
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _product_back(gradient: Tensor, weight: Tensor) -> Tensor:
    """[n, out], [out, in] -> [n, in]"""
    if native.CAPABILITY == "AVX2":  # there oneDNN is slow by a turned weight, but for some sizes
        return gradient @ weight
    return _product(gradient, weight.t())


def silu_mul(gate_up: Tensor, num_blocks: int = 1) -> Tensor:
    """As engine.kernels.silu_mul. [n, 2 * I] -> [n, I]"""
    return (_SiluMul.apply if native.fits(gate_up) else silu_mul_torch)(gate_up, num_blocks)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last dimension. [..., n], [n] -> [..., n]"""
    if x.dim() == 2 and native.fits(x, weight):
        return _RmsNorm.apply(x, weight, eps)
    return F.rms_norm(x, weight.shape, weight, eps)


def rope(heads: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As `model.split_heads`, where `native.can_rope`."""
    return _Rope.apply(heads, cos, sin)


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`linear` where nothing has a gradient. [n, in], [out, in] -> [n, out]"""
    return (native.multiply_turned if native.can_turn(x, weight, bias) else F.linear)(x, weight, bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[n, in], [out, in] -> [n, out]"""
    is_known = x.dim() == 2 and x.is_cpu and x.dtype == weight.dtype == torch.float32 and can_pack(x.dtype)
    return (_Linear.apply if is_known and len(x) >= MIN_ROWS else F.linear)(x, weight, bias)


def compiles(head_dim: int, dtype: torch.dtype) -> bool:
    """Whether a CPU trains with all of these, not only some: in float32, with heads of the usual sizes."""
    return native.can_attend(torch.empty(0, 1, head_dim, dtype=dtype))


def attend(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, window: int) -> Tensor:
    """Causal attention inside each of several sequences that lie one after another. [T, H, D], [T, K, D] twice

    starts [n + 1] int64: of the sequences, and the end of the last. `window`: as for `PackedAttention`.
    """
    return _Attention.apply(q, k, v, starts, window)
