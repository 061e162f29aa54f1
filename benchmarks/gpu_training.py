"""How fast the GPU trains: a step of our packed trainer, and of transformers on padded batches, on the same samples."""

import time
from collections.abc import Callable

import torch
from gpu_checks import MODELS, SMALL, build
from gpu_rows import Section, describe, wait
from gpu_speed import in_transformers, release
from training_sides import Step, make_ours, make_transformers, samples_of

from core import Example

Make = Callable[[], Step]


def lengths_of(classes: int, shortest: int) -> list[int]:
    """Return lengths of responses, as long-tailed as is usual: of each twice as long half as many."""
    return [shortest << power for power in range(classes) for _ in range(1 << (classes - 1 - power))]


def section_training(s: Section) -> None:
    """A step of ours and of transformers' (its attention by torch; compiled; with Liger's kernels, where installed).

    All have bfloat16 weights and the same samples, loss and clipping, each its best budget of tokens in a micro-batch,
    and keep all activations and logits of a micro-batch (in a run, ours computes them again unless told otherwise).
    Ours keeps fp32 weights for AdamW besides; transformers' AdamW is in bfloat16, which is less work. The attention of
    ours is torch's over packed sequences (torch.nn.attention.varlen), as in torchtitan.
    """
    name, classes, shortest, prompt = ("0.5B", 6, 64, 128) if s.on_gpu else ("small", 3, 4, 4)
    c, dtype = MODELS.get(name, SMALL), torch.bfloat16 if s.on_gpu else torch.float32
    samples = samples_of(lengths_of(classes, shortest), prompt, c["vocab_size"])
    tokens = sum(e.num_tokens for e in samples)
    found, norms = dict[str, float](), dict[str, float]()
    for side, (make, budgets) in s.in_time(sides(s, c, dtype, samples).items()):
        try:
            found[side], norms[side] = fastest(make(), budgets, s.device)
        except ImportError as error:
            s.skip(f"{name}, {side}", describe(error))
            continue
        except Exception as error:  # out of memory, or a compiler's
            s.row(f"{name}, {side}", describe(error), False if side == "ours" else None)
            continue
        finally:
            release(s)
        rate, ratio = tokens / found[side], found[side] / found.get("ours", found[side])
        metrics: dict[str, float] = {f"training_tokens_s_{side}": round(rate)}
        if "ours" in found and side != "ours":  # so far: compiling may take the rest of the time
            fastest_other = min(seconds for other, seconds in found.items() if other != "ours")
            metrics["training_ratio_hf"] = round(fastest_other / found["ours"], 2)
        s.row(f"{name}, {side}", f"{rate:,.0f} tokens/s; ours {ratio:.2f} x", **metrics)
    others = [seconds for side, seconds in found.items() if side != "ours"]
    if "ours" in found and others:
        ratio = min(others) / found["ours"]
        differ = max(abs(norm / norms["ours"] - 1) for norm in norms.values())
        close = 0.05 if s.on_gpu else 1e-3
        report = s.aim if s.on_gpu else s.row  # sums in bfloat16 may be that far off
        report("the same gradient", f"norms differ by {differ:.1e}", differ < close, f"{close:g}")
        s.aim("ours over the fastest", f"{ratio:.2f} x", ratio >= 1.3 or not s.on_gpu, "1.3")


def sides(s: Section, c: dict, dtype: torch.dtype, samples: list[Example]) -> dict[str, tuple[Make, tuple[int, ...]]]:
    """Return who trains: what makes its step, and its budgets."""
    several = 4096, 16384  # more would hold 20 GB of logits in float32

    def ours() -> Step:
        return make_ours(build(c, s.device, dtype), samples, recompute="off", tokens_per_logits=max(several))

    def theirs(compiled: bool = False) -> Step:
        return make_transformers(in_transformers(build(c, s.device, dtype), c).train(), samples, compiled)

    def with_liger() -> Step:
        from liger_kernel.transformers import apply_liger_kernel_to_qwen2

        apply_liger_kernel_to_qwen2(fused_linear_cross_entropy=False)  # the loss is of log-probs, not of labels
        return theirs()

    found: dict[str, tuple[Make, tuple[int, ...]]] = {
        "ours": (ours, several),
        "transformers": (theirs, several),
    }
    if s.on_gpu:  # on a CPU a compiler takes half a minute
        found["compiled"] = (lambda: theirs(compiled=True)), several[1:]
    return found | {"Liger": (with_liger, several)}  # last: it changes classes of transformers


def fastest(step: Step, budgets: tuple[int, ...], device: torch.device) -> tuple[float, float]:
    """Return the least seconds of a step over the budgets, and the first step's norm of the gradient."""
    norm, best = step(budgets[0])[1], float("inf")
    for budget in budgets:
        for turn in range(3):
            wait(device)
            start = time.perf_counter()
            step(budget)
            wait(device)
            best = min(best, time.perf_counter() - start) if turn else best  # the first warms up
    return best, norm
