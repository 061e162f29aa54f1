"""Whether the GPU's kernels, its attention over packed sequences and its engine compute what they should."""

import copy
import gc
import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from gpu_rows import Section, measure_bandwidth, seconds_of
from torch import Tensor

from attention import PackedAttention, VarlenAttention
from core import ModelShape, Sample
from engine import kernels
from engine.host import OnHost
from engine.pages import LAYOUTS
from engine.sequence import Sequence
from model import Model, parse_shape
from rollout import Engine, RolloutConfig, cache_of
from sampling import SamplingConfig, sample_key, score

QWEN = dict(model_type="qwen2", max_position_embeddings=32768, rope_theta=1e6)


def model_config(
    hidden: int, layers: int, heads: int, kv: int, inner: int, vocab: int, tied: bool, **more: Any
) -> dict:
    sizes = dict(hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv)
    return {**QWEN, **sizes, "intermediate_size": inner, "vocab_size": vocab, "tie_word_embeddings": tied, **more}


MODELS = {
    "0.5B": model_config(896, 24, 14, 2, 4864, 151936, True),
    "1.5B": model_config(1536, 28, 12, 2, 8960, 151936, True),
    "7B": model_config(3584, 28, 28, 4, 18944, 152064, False),
}
Rows = Collection[tuple[Sequence, np.ndarray]]
MIXTURE = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=128, norm_topk_prob=True)
SMALL = model_config(64, 2, 4, 2, 128, 300, True)  # stands in on a CPU
GREEDY, PLAIN = SamplingConfig(temperature=0.0), SamplingConfig()
CUT = SamplingConfig(temperature=0.8, top_k=50, top_p=0.9)
INTERPRETED, kernels.INTERPRETED = kernels.INTERPRETED, False  # on a CPU the twins serve; they are fast


# ---- kernels ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KernelShape:
    label: str
    heads: int
    kv: int
    size: int  # of a head
    hidden: int
    inner: int
    qk_norm: bool = False
    page: int = 64
    window: int = 0


KERNEL_SHAPES = (
    KernelShape("0.5B 14/2x64", 14, 2, 64, 896, 4864),
    KernelShape("7B 28/4x128", 28, 4, 128, 3584, 18944),
    KernelShape("Qwen3 8B 32/8x128 qk-norm", 32, 8, 128, 4096, 12288, True),
    KernelShape("1.5B 12/2x128, window 1000", 12, 2, 128, 1536, 8960, window=1000),
    KernelShape("8/1x256", 8, 1, 256, 2304, 9216, page=16),
    KernelShape("32/8x80", 32, 8, 80, 2560, 6912, page=256),
)
TINY_KERNELS = (
    KernelShape("4/2x64", 4, 2, 64, 96, 128, page=16),
    KernelShape("7/1x80 qk", 7, 1, 80, 96, 64, True, 32, 20),
)
LENGTHS = (0, 1, 17, 64, 65, 500, 1023, 2048, 3000, 4097, 6000, 7777, 8191, 8192, 128, 0)
CLOSE = {torch.float32: (1e-4, 1e-5), torch.bfloat16: (2e-2, 1e-2)}  # relative, absolute
FAR = 1 << 30  # a page that nobody may follow


def decode_inputs(k: KernelShape, lengths: Iterable[int], dtype: torch.dtype, device: torch.device) -> tuple:
    """Return q, kv [2, pages, K, page, D], table, lengths: pages in random order, table entries without keys FAR."""
    lengths = list(lengths)
    counts = [-(-length // k.page) for length in lengths]
    pages = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(1)).int().split(counts)
    table = torch.full((len(lengths), max(counts)), FAR, dtype=torch.int32)
    for row, own in zip(table, pages):
        row[: len(own)] = own
    kv = torch.empty(2, sum(counts), k.kv, k.page, k.size, dtype=dtype, device=device).normal_()
    q = torch.randn(len(lengths), k.heads, k.size, device=device).to(dtype)
    return q, kv, table.to(device), torch.tensor(lengths, dtype=torch.int32, device=device)


def kernel_calls(k: KernelShape, lengths: Iterable[int], dtype: torch.dtype, device: torch.device) -> tuple:
    """Return {name of a kernel: a call of what it is given, the kernel or its twin}, and the pages that are written."""
    q, kv, table, cached = decode_inputs(k, lengths, dtype, device)
    n = len(q)
    x, residual, weight = (
        torch.randn(size, device=device).to(dtype) for size in ((n, k.hidden), (n, k.hidden), k.hidden)
    )
    gate_up = torch.randn(n, 2 * k.inner, device=device).to(dtype)
    qkv = torch.randn(n, (k.heads + 2 * k.kv) * k.size, device=device).to(dtype)
    angles = torch.rand(table.shape[1] * k.page, k.size // 2, device=device) * 7
    cos, sin, positions = angles.cos().to(dtype), angles.sin().to(dtype), cached.long() - 1
    norms = tuple(torch.rand(2, k.size, device=device).to(dtype)) if k.qk_norm else ()
    place = (qkv, cos, sin, positions, table, kv[0], kv[1], k.heads, k.kv, *norms)
    return {
        "paged_decode": lambda f: f(q, kv[0], kv[1], table, cached, None, k.window),
        "rope_and_write": lambda f: (f(*place), kv),
        "add_rms_norm": lambda f: f(x, residual, weight, 1e-6),
        "silu_mul": lambda f: f(gate_up, 8),
    }, kv


def differ(mine: Any, twin: Any, dtype: torch.dtype) -> tuple[float, bool]:
    """Return the largest absolute error and whether all are within `CLOSE`."""
    pairs = [(mine, twin)] if isinstance(mine, Tensor) else list(zip(mine, twin, strict=True))
    relative, absolute = CLOSE[dtype]
    errors = [((a.float() - b.float()).abs(), b.float().abs() * relative + absolute) for a, b in pairs]
    return max(e.max().item() for e, _ in errors), all(bool((e <= bound).all()) for e, bound in errors)


def section_kernels(s: Section) -> None:
    """Each Triton kernel against its twin in plain torch; speed inside a CUDA graph, the twin's as it is called."""
    kernels.INTERPRETED = INTERPRETED
    torch.manual_seed(0)
    shapes = KERNEL_SHAPES if s.on_gpu else TINY_KERNELS
    lengths = LENGTHS if s.on_gpu else (0, 1, 17, 40)
    if not kernels.HAS_TRITON:
        return s.row("kernels", "triton is not installed", False)
    cases = [(k, torch.bfloat16) for k in shapes if s.on_gpu] + [(k, torch.float32) for k in shapes]
    cases = sorted(cases, key=lambda case: case[0].label not in ("0.5B 14/2x64", "7B 28/4x128"))
    with s.guard("sampling"):
        check_sampling(s)
    for k, dtype in s.in_time(cases):
        name = f"{k.label} {str(dtype).removeprefix('torch.')}"
        with s.guard(name):
            compare_kernels(s, name, k, lengths, dtype)
    bandwidth = 1e9 * s.known.get("bandwidth_gbs", 0.0) or measure_bandwidth(s.device)
    loads = ((64, 8192), (256, 2048), (8, 32768), (1, 262144)) if s.on_gpu else ((3, 40),)
    for k, (rows, length) in s.in_time([(k, load) for k in shapes[:2] for load in loads]):
        with s.guard(f"paged_decode {k.label}"):
            time_decode(s, k, rows, length, bandwidth)


def time_decode(s: Section, k: KernelShape, rows: int, length: int, bandwidth: float) -> None:
    dtype = torch.bfloat16 if s.on_gpu else torch.float32
    q, kv, table, sizes = decode_inputs(k, [length] * rows, dtype, s.device)
    seconds = seconds_of(lambda: kernels.paged_decode(q, kv[0], kv[1], table, sizes), s.device, captured=True)
    share = kv.nbytes / seconds / bandwidth
    text = f"{1e6 * seconds:.0f} us, {kv.nbytes / 2**20:.0f} MiB, {share:.0%} of the memory's bandwidth"
    metrics = {f"paged_decode_{k.label.split()[0]}_{rows}x{length}": round(share, 3)}
    s.row(f"paged_decode {k.label}, {rows} x {length} keys", text, **metrics)


def compare_kernels(s: Section, name: str, k: KernelShape, lengths: Iterable[int], dtype: torch.dtype) -> None:
    calls, kv = kernel_calls(k, lengths, dtype, s.device)
    before, parts, good = kv.clone(), [], True
    for kernel, call in calls.items():
        mine = call(getattr(kernels, kernel))
        mine = mine.clone() if isinstance(mine, Tensor) else [x.clone() for x in mine]
        kv.copy_(before)
        error, close = differ(mine, call(getattr(kernels, f"{kernel}_torch")), dtype)
        kv.copy_(before)
        good &= close
        speed = ""
        if s.on_gpu:
            fast = seconds_of(lambda: call(getattr(kernels, kernel)), s.device, captured=True)  # noqa: B023
            slow = seconds_of(lambda: call(getattr(kernels, f"{kernel}_torch")), s.device)  # noqa: B023
            speed = f", {1e6 * fast:.1f} us (twin {1e6 * slow:.0f})"
        parts.append(f"{kernel} {'' if close else 'WRONG '}{error:.1e}{speed}")
    relative, absolute = CLOSE[dtype]
    s.row(name, "; ".join(parts), good, f"within {relative:g} x + {absolute:g}")


def check_sampling(s: Section) -> None:
    rows, vocab = (256, 151936) if s.on_gpu else (4, 600)
    for dtype in (torch.bfloat16, torch.float32) if s.on_gpu else (torch.float32,):
        logits = torch.randn(rows, vocab, device=s.device).mul_(3).to(dtype)
        keys = torch.arange(rows, device=s.device)
        args = (logits, keys, keys, 0.7)  # the positions differ too
        mine, theirs = kernels.race(*args), kernels.race_torch(*args)
        same = mine[0] == theirs[0]
        error = (mine[1] - theirs[1])[same].abs().max().item()
        share, speed = same.float().mean().item(), ""
        if s.on_gpu:
            fast = seconds_of(lambda: kernels.race(*args), s.device, captured=True)  # noqa: B023
            slow = seconds_of(lambda: kernels.race_torch(*args), s.device)  # noqa: B023
            speed = f", {1e6 * fast:.0f} us (twin {1e6 * slow:.0f})"
        s.row(f"race {rows} x {vocab} {str(dtype).removeprefix('torch.')}",
              f"{share:.1%} equal tokens, log-probs {error:.1e}{speed}", share >= 0.99 and error < 1e-4,
              "99 % (ties), 1e-4")  # fmt: skip
        leasts = kernels.least_in_nucleus, kernels.least_in_nucleus_torch
        for top_p in (0.3, 0.9) if dtype == torch.float32 else ():
            inside = [logits >= least(logits, top_p) for least in leasts]
            off = (logits.softmax(-1) * (inside[0] != inside[1])).sum(-1).max().item()
            s.row(f"least_in_nucleus {top_p}", f"sets differ by {off:.1e} of the mass", off < 1e-4, "1e-4")


# ---- attention over packed sequences ----------------------------------------------------------------------------


def plain_attention(lengths: tuple[list[int], list[int]], window: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same by softmax over whole rows, one sequence at a time, in the dtype of the inputs."""
    parts, groups = [], q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    for query, key, value in zip(q.split(lengths[0]), k.split(lengths[1]), v.split(lengths[1])):
        scores = torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(q.shape[2])
        every = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device)
        hidden = every.triu(len(key) - len(query) + 1)
        hidden |= every.tril(len(key) - len(query) - window) if window else False
        parts.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -math.inf).softmax(-1), value))
    return torch.cat(parts)


def section_varlen(s: Section) -> None:
    """`VarlenAttention` (flash attention in bf16), forward and backward, against a softmax in float32."""
    torch.manual_seed(0)
    shapes = ((14, 2, 64), (28, 4, 128), (32, 8, 80), (8, 1, 256), (4, 2, 16)) if s.on_gpu else ((4, 2, 16), (7, 1, 20))
    whole, chunks = ([700, 1, 33, 1200], [700, 1, 33, 1200]), ([5, 128, 1, 300], [400, 128, 77, 1300])
    if not s.on_gpu:
        whole, chunks = ([9, 1, 20], [9, 1, 20]), ([3, 1, 12], [11, 8, 12])
    dtype = torch.bfloat16 if s.on_gpu else torch.float32
    cases = [(shape, lengths, 0) for shape in shapes for lengths in (whole, chunks)]
    cases += [(shapes[0], lengths, 100 if s.on_gpu else 5) for lengths in (whole, chunks)]
    for (heads, kv, size), lengths, window in s.in_time(cases):
        name = f"{heads}/{kv}x{size} {'whole' if lengths is whole else 'chunks'}" + f", window {window}" * bool(window)
        with s.guard(name):
            q = torch.randn(sum(lengths[0]), heads, size, device=s.device).to(dtype).requires_grad_()
            k = torch.randn(sum(lengths[1]), kv, size, device=s.device).to(dtype).requires_grad_()
            v = torch.randn_like(k).requires_grad_()
            out = VarlenAttention(lengths[0], lengths[1], s.device)(q, k, v, window)
            exact = [x.detach().float().requires_grad_() for x in (q, k, v)]
            expected = plain_attention(lengths, window, *exact)
            towards = torch.randn_like(expected)
            grads = torch.autograd.grad(out, (q, k, v), towards.to(dtype))
            exact_grads = torch.autograd.grad(expected, exact, towards)
            forward, near = differ(out, expected, dtype)
            # Sums of many rounded terms: relative to the largest.
            backward = max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(grads, exact_grads))
            limit = 3e-2 if s.on_gpu else 1e-4
            s.row(name, f"forward {forward:.1e}, gradients {backward:.1e} of the largest", near and backward < limit,
                  f"gradients {limit:g}")  # fmt: skip
    if s.on_gpu:
        with s.guard("speed"):
            q = torch.randn(8192, 28, 128, device=s.device, dtype=dtype)
            k, v = torch.randn(2, 8192, 4, 128, device=s.device, dtype=dtype)
            attend = VarlenAttention([2048] * 4, [2048] * 4, s.device)
            seconds = seconds_of(lambda: attend(q, k, v), s.device)
            rate = 4 * 4 * 28 * 128 * 2048**2 / 2 / seconds
            s.row("speed, 4 x 2048, 28/4x128", f"{1000 * seconds:.2f} ms forward, {rate / 1e12:.0f} TFLOP/s")


# ---- the engine -------------------------------------------------------------------------------------------------


class FusedEngine(Engine):
    """Shared pages, fused step and flags one step late on a CPU too."""

    @staticmethod
    def _is_fused(device: torch.device) -> bool:
        return True


def build(c: dict, device: torch.device, dtype: torch.dtype, gain: float = 0.0, seed: int = 0) -> Model:
    """Return a model with random weights, made on the device. A `gain` over 1 makes tokens depend on every other."""
    with torch.device("meta"):
        model = Model(parse_shape(c, "benchmark"))
    model = model.to(dtype).to_empty(device=device)
    generator = torch.Generator(device).manual_seed(seed)
    for name, tensor, _ in model.hf_tensors():
        if name.endswith("norm.weight"):
            tensor.fill_(1.0)
        else:
            tensor.normal_(0.0, gain / math.sqrt(c["hidden_size"]) if gain else 0.02, generator=generator)
    return model


def pool_gib(shape: ModelShape, config: RolloutConfig, dtype: torch.dtype, pages: int) -> float:
    return (pages + 0.5) * cache_of(config, shape, dtype).page_bytes(1) / 2**30


SIZES = RolloutConfig(max_prompt_tokens=96, max_response_tokens=48, max_running=24, page_size=16)


def make_engine(
    model: Model, sampling: SamplingConfig, kind: type[Engine] = FusedEngine, pages: int = 400, **more: Any
) -> Engine:
    config = replace(SIZES, **more)
    gib = pool_gib(model.shape, config, model.embed.weight.dtype, pages) if pages else 0.0  # half of the free memory
    return kind(model, replace(config, kv_gib=gib), sampling, [])


def make_sequences(count: int, vocab: int, longest: int = 48) -> list[Sequence]:
    """Every four share one prompt."""
    rng, made = Random(5), list[Sequence]()
    for i in range(count):
        prompt = made[-1].prompt_ids if i % 4 else tuple(rng.randrange(vocab) for _ in range(rng.randint(1, 96)))
        made.append(Sequence(i, 0, 0, prompt, sample_key(7, i), rng.randint(longest // 4, longest)))
    return made


def drain(engine: Engine, sequences: Iterable[Sequence] = ()) -> dict[int, Sample]:
    for sequence in sequences:
        engine.add(sequence)
    samples: dict[int, Sample] = {}
    while not engine.is_idle:
        samples |= {sample.prompt_index: sample for sample in engine.step()}
    assert engine.pages.used == 0, f"{engine.pages.used} pages leaked"
    return samples


def tokens_of(samples: dict[int, Sample]) -> dict[int, tuple[int, ...]]:
    return {i: tuple(sample.token_ids) for i, sample in sorted(samples.items())}


def by_other_path(s: Section, model: Model, sampling: SamplingConfig) -> Engine:
    """Return an engine that computes the same otherwise: without graphs; on a CPU, without fused kernels."""
    engine = make_engine(model, sampling, FusedEngine if s.on_gpu else Engine)
    if engine.runner.graphs:
        engine.runner.graphs.captures = False
    return engine


@torch.no_grad()
def full_forward(model: Model, sequences: list[Sequence], samples: dict[int, Sample], sampling: SamplingConfig):
    """Return (logits, log-probs) of every response token, from one forward as the trainer runs it."""
    device = model.embed.weight.device
    rows, targets, ids, lengths = list[int](), list[int](), list[int](), list[int]()
    for q in sequences:
        response = samples[q.prompt_index].token_ids
        first = len(ids) + len(q.prompt_ids) - 1
        rows += range(first, first + len(response))
        targets += response
        ids += (*q.prompt_ids, *response)
        lengths.append(len(q.prompt_ids) + len(response))
    positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
    hidden = model(torch.tensor(ids, device=device), positions, PackedAttention(lengths, device))
    logits = model.logits(hidden[torch.tensor(rows, device=device)])
    if sampling.temperature == 0:
        return logits, logits.new_zeros(len(logits))
    return logits, score(logits, torch.tensor(targets, device=device), sampling)[0]


def same(s: Section, case: str, mine: dict, theirs: dict, more: str = "", good: bool = True) -> None:
    wrong = [i for i in theirs if mine.get(i) != theirs[i]] + [i for i in mine if i not in theirs]
    count = sum(len(x) for x in theirs.values())
    equal = f"{len(theirs)} samples, {count} tokens equal"
    result = f"{len(wrong)} of {len(theirs)} samples differ" if wrong else equal
    s.row(case, result + more, not wrong and good and count > 0)


def section_engine(s: Section) -> None:
    """Tokens and log-probs of the engine: graphs, pressure, new weights, memory."""
    torch.manual_seed(0)
    c = model_config(256, 4, 8, 2, 512, 2000, True, head_dim=64) if s.on_gpu else SMALL
    count = 40 if s.on_gpu else 8
    model = build(c, s.device, torch.float32, gain=2.0)
    half, vocab = copy.deepcopy(model).bfloat16(), c["vocab_size"]
    parts: list[Callable[[], None]] = []
    for name, sampling in {"greedy": GREEDY, "sampled": PLAIN, "top-k, top-p": CUT}.items():
        for own in (model, half) if s.on_gpu else (model,):
            parts.append(partial(check_paths, s, name, own, sampling, count))
    parts += [lambda: check_bf16(s, half, count), lambda: check_pressure(s, model, count), lambda: check_stop(s, model)]
    parts += [lambda: check_drafts(s, model, count)]
    parts += [
        lambda: check_families(s, vocab),
        lambda: check_memory(s, half),
        *(partial(check_new_weights, s, model, c, count, layout) for layout in LAYOUTS),
        *(partial(check_release, s, model, count, layout) for layout in LAYOUTS),
        lambda: check_neighbours(s, model, count),  # last: a fault of the device ends what follows in this process
    ]
    for part in s.in_time(parts):
        with s.guard("engine"):
            part()


def check_paths(s: Section, name: str, model: Model, sampling: SamplingConfig, count: int) -> None:
    """Tokens of the two paths are equal; in fp32 they and their log-probs are those of one full forward."""
    exact, vocab = model.embed.weight.dtype == torch.float32, model.shape.vocab_size
    sequences = make_sequences(count, vocab)
    engine = make_engine(model, sampling)
    mine, other = drain(engine, sequences), drain(by_other_path(s, model, sampling), make_sequences(count, vocab))
    captured = f", {len(engine.runner.graphs.graphs)} graphs" if engine.runner.graphs else ""
    paths = "graphs = eager" if s.on_gpu else "fused = plain"
    same(s, f"{paths}, {name} {'fp32' if exact else 'bf16'}", tokens_of(mine), tokens_of(other), captured)
    if exact:
        logits, logprobs = full_forward(model, sequences, mine, sampling)
        tokens = torch.tensor([t for q in sequences for t in mine[q.prompt_index].token_ids], device=s.device)
        if sampling is GREEDY:
            wrong = int((logits.argmax(-1) != tokens).sum())
            s.row("greedy = likeliest of a full forward, fp32", f"{wrong} of {len(tokens)} tokens differ", wrong == 0)
            return
        drawn = torch.tensor([x for q in sequences for x in mine[q.prompt_index].logprobs], device=s.device)
        differences = (drawn - logprobs).abs().sort().values
        # A token at the very edge of top-p may be inside on one side only, and its share moves all the others.
        edge = len(differences) // 100 if sampling.truncates else 0
        worst = differences[len(differences) - edge - 1].item()
        metrics = {"logprob_diff_fp32_max": worst} if sampling is PLAIN else {}
        text = f"differ from a full forward's by {worst:.1e} at most" + f" (but for {edge} tokens)" * bool(edge)
        s.row(f"log-probs, {name} fp32", text, worst < 1e-4, "1e-4", **metrics)


def check_bf16(s: Section, half: Model, count: int) -> None:
    sequences = make_sequences(count, half.shape.vocab_size)
    samples = drain(make_engine(half, PLAIN), sequences)
    drawn = torch.tensor([x for q in sequences for x in samples[q.prompt_index].logprobs], device=s.device)
    difference = (drawn - full_forward(half, sequences, samples, PLAIN)[1]).abs()
    mean, worst = difference.mean().item(), difference.max().item()
    text = f"differ from a full forward's by {mean:.1e} in the mean, {worst:.1e} at most"
    metrics = {"logprob_diff_bf16_mean": mean, "logprob_diff_bf16_max": worst}
    s.row("log-probs, sampled bf16", text, mean < 0.1, "mean 0.1 (random weights, large)", **metrics)


def check_pressure(s: Section, model: Model, count: int) -> None:
    """fp32 tokens do not depend on pages, on who else is there, or on a move to another engine."""
    vocab = model.shape.vocab_size
    expected = tokens_of(drain(make_engine(model, PLAIN), make_sequences(count, vocab)))
    engine = make_engine(model, PLAIN, pages=9)
    mine = drain(engine, make_sequences(count, vocab))
    preempted = engine.stats.preemptions
    same(s, "preemption", tokens_of(mine), expected, f", {preempted} preemptions", good=preempted > 0)
    here, there = make_engine(model, PLAIN), make_engine(model, PLAIN, page_size=32)
    sequences, samples = make_sequences(count, vocab), dict[int, Sample]()
    for sequence in sequences:
        here.add(sequence)
        samples |= {sample.prompt_index: sample for sample in here.step()}
    aborted = [q.id for q in sequences[:-4:4] if q.prompt_index not in samples]
    here.abort(aborted)
    moved = here.export([q.id for q in sequences[1::4]])
    samples |= drain(here) | drain(there, moved)
    left = {i: ids for i, ids in expected.items() if i in samples or (0, i, 0) not in aborted}
    more = f", {len(aborted)} aborted, {len(moved)} moved"
    same(s, "abort and move to another engine", tokens_of(samples), left, more, good=bool(aborted and moved))


def check_stop(s: Section, model: Model) -> None:
    sequences = make_sequences(4, model.shape.vocab_size)
    expected = tokens_of(drain(make_engine(model, PLAIN), make_sequences(4, model.shape.vocab_size)))
    at = len(expected[0]) // 2
    engine = make_engine(model, PLAIN)
    reads = SimpleNamespace(decode=lambda ids, **_: "".join(f"<{i}>" for i in ids), all_special_tokens=[])
    engine.tokenizer = engine.flights.tokenizer = reads
    sequences[0].stop = (f"<{expected[0][at - 1]}><{expected[0][at]}>",)
    same(s, "stop text", tokens_of(drain(engine, sequences)), expected | {0: expected[0][: at + 1]})


class Foresight:
    """Knows the responses; every third of its drafts begins with a wrong token, every third ends with one."""

    def __init__(self, responses: dict[int, tuple[int, ...]]):
        self.responses, self.accepted = responses, 0

    def wants_rows(self, num_rows: int) -> bool:
        return True

    def propose(self, rows: Rows) -> list[list[int]]:
        drafts = [[*self.responses[q.prompt_index][len(text) : len(text) + 7]] for q, text in rows]
        for (q, text), draft in zip(rows, drafts, strict=True):
            if draft and (kind := (q.prompt_index + len(text)) % 3):
                draft[0 if kind == 1 else -1] ^= 1
        return drafts

    def learn(self, outcome: Iterable[tuple[Sequence, int, int]]) -> None:
        self.accepted += sum(accepted for *_, accepted in outcome)

    def observe(self, tokens: int, seconds: float) -> None:
        """The seconds of a step do not matter here."""


def check_drafts(s: Section, model: Model, count: int) -> None:
    """Rows that verify drafts, in eager steps among those by graphs, draw what they draw without."""
    vocab = model.shape.vocab_size
    expected = tokens_of(drain(make_engine(model, PLAIN), make_sequences(count, vocab)))
    engine = make_engine(model, PLAIN)
    engine.drafter = drafter = Foresight(expected)
    mine = tokens_of(drain(engine, make_sequences(count, vocab)))
    more = f", {drafter.accepted} drafted, {engine.stats.decode_steps} steps"
    same(s, "drafts", mine, expected, more, good=drafter.accepted > 0)


def check_new_weights(s: Section, model: Model, c: dict, count: int, layout: str) -> None:
    """An engine that has graphs follows an update in place, and another model."""
    vocab, changed = c["vocab_size"], copy.deepcopy(model)
    engine = make_engine(changed, PLAIN, weights=layout)
    before = tokens_of(drain(engine, make_sequences(count, vocab)))
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.mul_(1.1)
    engine.load_weights(changed, 1)
    mine, expected = (tokens_of(drain(e, make_sequences(count, vocab))) for e in (engine, make_engine(changed, PLAIN)))
    same(s, f"{layout} weights updated in place", mine, expected, good=mine != before)
    other = build(c, s.device, torch.float32, gain=2.0, seed=1)
    engine.load_weights(other, 2)
    mine, expected = (tokens_of(drain(e, make_sequences(count, vocab))) for e in (engine, make_engine(other, PLAIN)))
    same(s, f"another model's weights, {layout}", mine, expected, good=mine != before)


def check_release(s: Section, model: Model, count: int, layout: str) -> None:
    """An engine that has graphs gives its device memory and the weights' up, has them again, and draws the same."""
    own = copy.deepcopy(model)
    engine = make_engine(own, PLAIN, weights=layout)
    before = tokens_of(drain(engine, make_sequences(count, model.shape.vocab_size)))
    assert engine.runner.memory.whole is not None
    held = engine.runner.memory.whole.nbytes + sum(parameter.nbytes for parameter in own.parameters())
    used = torch.cuda.memory_allocated() if s.on_gpu else held
    engine.release()
    weights = OnHost(own.parameters())
    freed = used - (torch.cuda.memory_allocated() if s.on_gpu else 0)
    weights.bring_back()
    engine.take_back()
    after = tokens_of(drain(engine, make_sequences(count, model.shape.vocab_size)))
    same(
        s,
        f"release and take back, {layout} weights",
        after,
        before,
        f", {freed / 2**20:.0f} MiB given up",
        good=freed >= held,
    )


def check_neighbours(s: Section, model: Model, count: int) -> None:
    """An engine's graphs outlive another's: what a graph reads must not be freed with the other's."""
    vocab = model.shape.vocab_size
    engine, other = make_engine(model, PLAIN), make_engine(model, PLAIN)
    expected = tokens_of(drain(engine, make_sequences(count, vocab)))
    drain(other, make_sequences(count, vocab))
    del other
    gc.collect()
    if s.on_gpu:
        torch.cuda.empty_cache()
    filler = [
        torch.full((2**18,), math.nan, device=s.device) for _ in range(64 if s.on_gpu else 1)
    ]  # takes what is free
    same(s, "another engine's end", tokens_of(drain(engine, make_sequences(count, vocab))), expected)
    del filler


def check_families(s: Section, vocab: int) -> None:
    families = {
        "qwen3": dict(head_dim=128),
        "llama": dict(head_dim=80, attention_bias=True),
        "qwen2": dict(head_dim=256),
        "qwen3_moe": dict(head_dim=128, **MIXTURE),
    }
    small = [("qwen3", dict(head_dim=16)), ("qwen3_moe", dict(head_dim=16, **MIXTURE))]
    for family, more in families.items() if s.on_gpu else small:
        name = f"{family}, head size {more['head_dim']}, untied"
        with s.guard(name):
            c = model_config(256 if s.on_gpu else 32, 3, 4, 2, 256, vocab, False, model_type=family, **more)
            model = build(c, s.device, torch.float32, gain=2.0)
            sequences = make_sequences(8, vocab, 24)
            samples = drain(make_engine(model, GREEDY), sequences)
            tokens = torch.tensor([t for q in sequences for t in samples[q.prompt_index].token_ids], device=s.device)
            wrong = int((full_forward(model, sequences, samples, GREEDY)[0].argmax(-1) != tokens).sum())
            s.row(name, f"greedy: {wrong} of {len(tokens)} tokens differ from a full forward's", wrong == 0)
        if s.on_gpu and model.shape.num_experts:
            with s.guard("mixture, bf16"):
                check_paths(s, "mixture", model.bfloat16(), PLAIN, 8)


def check_memory(s: Section, model: Model) -> None:
    """Rounds of the same work leave the allocator where the first left it."""
    if not s.on_gpu:
        return s.skip("memory", "needs a GPU")
    engine = make_engine(model, CUT, pages=0, max_running=128)
    gc.collect()  # earlier engines
    torch.cuda.synchronize()
    first, used = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
    after = []
    for _ in range(3):
        drain(engine, make_sequences(160, model.shape.vocab_size))
        torch.cuda.synchronize()
        after.append(torch.cuda.memory_allocated())
    growth = [(x - first) / 2**20 for x in after]
    driver = (used - torch.cuda.mem_get_info()[0]) / 2**20
    assert engine.runner.graphs
    later, graphs = growth[2] - growth[0], len(engine.runner.graphs.graphs)
    text = f"{graphs} graphs: {growth[0]:.0f} MiB allocated, {driver:.0f} MiB taken from the device"
    metrics = {"graphs_allocated_mib": round(growth[0]), "graphs_device_mib": round(driver)}
    s.row("memory of three rounds", f"{text}; later rounds {later:+.1f} MiB", abs(later) < 1, "flat", **metrics)
