"""Operations of a training step on a CPU: values and gradients are those of torch's plain forms."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attention import PackedAttention
from engine import gradients, native
from engine.kernels import silu_mul_torch
from model import split_heads

needs_compiler = pytest.mark.skipif(not native.library(), reason="no C++ compiler")


def compare(ours: Callable[..., Tensor], plain: Callable[..., Tensor], *inputs: Tensor, within: float = 1e-5) -> None:
    """Assert that both have the same value, and the same gradients for all inputs."""
    found = []
    for function, dtype in ((ours, inputs[0].dtype), (plain, torch.float64)):
        own = [x.detach().to(dtype).requires_grad_() for x in inputs]
        out = function(*own)
        toward = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        found.append([out, *torch.autograd.grad((out * toward.to(dtype)).sum(), own)])
    for one, other in zip(*found, strict=True):
        assert one.shape == other.shape and one.dtype == inputs[0].dtype
        assert (one - other).abs().max() <= within * (1 + other.abs().max())


def made(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@needs_compiler
@pytest.mark.parametrize("blocks", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_silu_mul(blocks: int, dtype: torch.dtype) -> None:
    within = 1e-5 if dtype == torch.float32 else 2e-2
    x = 4 * made(37, 2 * 4 * 24).to(dtype)
    compare(lambda x: gradients.silu_mul(x, blocks), lambda x: silu_mul_torch(x, blocks), x, within=within)


@needs_compiler
@pytest.mark.parametrize(("rows", "size"), [(1, 32), (5, 48), (700, 128)])
def test_rms_norm(rows: int, size: int) -> None:
    plain = lambda x, w: F.rms_norm(x, w.shape, w, 1e-6)  # noqa: E731
    compare(lambda x, w: gradients.rms_norm(x, w, 1e-6), plain, made(rows, size), 1 + made(size))


@pytest.mark.parametrize("capability", ["AVX2", "AVX512"])  # of either CPU, on any
@pytest.mark.parametrize("rows", [3, 64, 301])
def test_linear(rows: int, capability: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "CAPABILITY", capability)
    compare(gradients.linear, F.linear, made(rows, 96), made(80, 96), made(80), within=1e-4)
    compare(lambda x, w: gradients.linear(x, w, None), F.linear, made(rows, 96), made(80, 96), within=1e-4)


@pytest.mark.skipif(not native.has_tiles(), reason="a CPU without a matrix unit")
@pytest.mark.parametrize("rows", [64, 301])
def test_linear_of_a_large_weight(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    called, run = [], native.multiply_turned
    monkeypatch.setattr(native, "multiply_turned", lambda *args: (called.append(1), run(*args))[1])
    given = made(rows, 1056), made(544, 1056), made(544)
    compare(gradients.linear, F.linear, *given, within=1e-6)
    assert len(called) == 3, "forward, and the gradients of x and of the weight"
    with torch.no_grad():
        assert torch.equal(gradients.product(*given), gradients.linear(*given))


@pytest.mark.skipif(not native.has_tiles(), reason="a CPU without a matrix unit")
@pytest.mark.parametrize(
    ("rows", "size_in", "size_out", "products"), [(2100, 128, 128, 3), (2100, 128, 258, 2), (500, 128, 128, 0)]
)
def test_linear_of_a_small_weight(
    rows: int, size_in: int, size_out: int, products: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By tiles where rows are many: the gradient of x only where `out` is whole tiles."""
    called, run = [], native.multiply_turned
    monkeypatch.setattr(native, "multiply_turned", lambda *args: (called.append(1), run(*args))[1])
    compare(gradients.linear, F.linear, made(rows, size_in), made(size_out, size_in), made(size_out), within=1e-6)
    assert len(called) == products


@needs_compiler
@pytest.mark.parametrize(("rows", "kv", "groups", "size"), [(1, 1, 1, 16), (5, 2, 3, 30), (700, 2, 7, 64)])
def test_rope(rows: int, kv: int, groups: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    half = made(rows, 1, 1, size // 2), made(rows, 1, 1, size // 2)
    cos, sin = torch.cat((half[0], half[0]), -1), torch.cat((-half[1], half[1]), -1)
    called, run = [], native.rope
    monkeypatch.setattr(native, "rope", lambda *args: (called.append(1), run(*args))[1])

    def parts(heads: Tensor) -> Tensor:
        return torch.cat([part.flatten(1) for part in split_heads(heads, cos.to(heads), sin.to(heads))], 1)

    compare(parts, parts, made(rows, kv, groups + 2, size))
    assert not native.can_rope(made(rows + 1, kv, groups + 2, size), cos, sin), "a table for all rows"
    assert len(called) == 1, "only float32 goes by the compiled kernel"


def test_a_frozen_weight_has_no_gradient() -> None:
    x, weight = made(70, 32).requires_grad_(), made(48, 32)
    gradients.linear(x, weight, None).sum().backward()
    assert x.grad is not None and torch.allclose(x.grad, weight.sum(0).expand(70, 32), atol=1e-5)


@needs_compiler
@pytest.mark.parametrize("window", [0, 1, 7, 40])
@pytest.mark.parametrize(("heads", "kv", "size"), [(4, 2, 32), (3, 1, 16), (2, 2, 80), (14, 2, 64)])
def test_attention_of_packed_sequences(
    heads: int, kv: int, size: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [1, 33, 2, 50, 16]
    inputs = made(sum(lengths), heads, size), made(sum(lengths), kv, size), made(sum(lengths), kv, size)
    packed = PackedAttention(lengths, torch.device("cpu"))
    called, run = [], native.packed_attention
    monkeypatch.setattr(native, "packed_attention", lambda *args: (called.append(1), run(*args))[1])

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return packed(0, q, k, v, window)

    compare(attend, attend, *inputs)
    assert len(called) == 1, "only float32 goes by the compiled kernel"


@needs_compiler
def test_results_do_not_depend_on_threads() -> None:
    lengths, threads = [200, 100, 300, 7], torch.get_num_threads()
    inputs = [made(sum(lengths), heads, 32).requires_grad_() for heads in (4, 2, 2)]
    found = []
    for number in (1, 4):
        torch.set_num_threads(number)
        normed = gradients.rms_norm(
            PackedAttention(lengths, torch.device("cpu"))(0, *inputs).flatten(1), made(128), 1e-6
        )
        found.append([normed, *torch.autograd.grad(normed.sum(), inputs)])
    torch.set_num_threads(threads)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
