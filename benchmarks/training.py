"""One training step on two CPU cores: our packed trainer against transformers on padded batches sorted by length.

    python benchmarks/training.py [--quick]

Two models with random weights: `tiny` (4 layers x 128), and `half`, the shape of a 0.5B Qwen2 with fewer layers, so
that it runs in minutes. Long-tailed lengths, as in engine.py. Both sides have the same weights, samples, loss (PPO's,
on log-probs of the sampled tokens), clipping, AdamW, fp32 and threads; each runs in a process of its own. Each takes
the best of several budgets of tokens in a micro-batch (--quick: one). transformers also runs under torch.compile, but
not in --quick; where that fails there is no ratio. Ours waits for its threads as a run does, transformers both so and
as libgomp does by default (benchmarks/waiting.py; --quick: as ours), and what is faster counts. Contenders take turns;
a speed is that of the median turn. Tokens are prompts and responses, without padding.

Attention in one long sequence, which these samples do not have, is compared with torch's own on its own.

The roofline: operations of the matrix products and of causal attention over the rate of a matrix product, the highest
of those measured before each turn. At the end all run beside a process that keeps one core busy.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

THREADS = "2"
os.environ["OMP_NUM_THREADS"] = THREADS  # before torch is imported
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm
from training_sides import make_ours, make_transformers, samples_of
from transformers import Qwen2Config, Qwen2ForCausalLM
from waiting import OWN, WAYS

from attention import PackedAttention
from benchmarks import engine as bench
from core import Example, ModelShape
from model import parse_shape
from parallel import keep_memory

PROMPT, MEDIAN = 16, 60  # tokens
BUDGETS: dict[str, dict[str, tuple[int, ...]]] = {  # tokens of a micro-batch that are tried; `half` has 2,400 in all
    "nano": {"ours": (8192,), "transformers": (2048,)},
    "tiny": {"ours": (4096, 8192), "transformers": (512, 1024, 2048, 4096)},
    "half": {"ours": (1024, 4096), "transformers": (256, 512, 1024, 2048)},
}
OURS = "ours"
SIDES = {  # kind of the worker, and how its threads wait
    OURS: ("ours", "briefly"),
    "transformers": ("transformers", "as it is"),
    "transformers, briefly": ("transformers", "briefly"),
    "compiled": ("compiled", "as it is"),
    "compiled, briefly": ("compiled", "briefly"),
}
QUICK_SIDES = OURS, "transformers, briefly"
LAYERS = {"nano": 1, "tiny": 4, "half": 4}  # in --quick half of them for `half`
SAMPLES = {"nano": (4, 4), "tiny": (192, 96), "half": (24, 12)}  # and in --quick
TURNS = {"nano": 1, "tiny": 3, "half": 2}
LONG, HEADS = 2048, {"tiny": (4, 2, 32), "half": (14, 2, 64)}  # tokens; heads, those of keys, and their size
NANO = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_attention_heads=2)


def config_of(name: str, quick: bool) -> Qwen2Config:
    shape: dict[str, Any] = NANO if name == "nano" else bench.SHAPES[name]
    layers = LAYERS[name] // (2 if quick and name == "half" else 1)
    shape = shape | dict(num_hidden_layers=layers, num_key_value_heads=2, tie_word_embeddings=True)
    return Qwen2Config(**shape, max_position_embeddings=4096)


def examples_of(name: str, quick: bool) -> list[Example]:
    lengths = bench.long_tailed(SAMPLES[name][quick], MEDIAN)
    return samples_of(lengths, PROMPT, config_of(name, quick).vocab_size)


def budgets_of(name: str, kind: str, quick: bool) -> tuple[int, ...]:
    budgets = BUDGETS[name][kind]
    return budgets[1:2] or budgets if quick else budgets


def operations(shape: ModelShape, samples: list[Example]) -> float:
    """Return the least operations of a step: matrix products, the head on sampled tokens only, causal attention."""
    s, tokens = shape, sum(e.num_tokens for e in samples)
    layer = s.hidden_size * ((2 * s.num_heads + 2 * s.num_kv_heads) * s.head_dim + 3 * s.intermediate_size)
    head = s.vocab_size * s.hidden_size * sum(e.num_sampled for e in samples)
    attention = s.num_heads * s.head_dim * sum(e.num_tokens**2 for e in samples)
    return 6 * (s.num_layers * (layer * tokens + attention) + head)


# ---- contenders: one step, each in a process of its own ------------------------------------------------------------


def work(side: str, name: str, quick: bool) -> None:
    """Be a contender: for each budget that comes in, take a step and tell about it."""
    torch.set_num_threads(int(THREADS))
    torch.set_flush_denormal(True)
    keep_memory()
    torch.manual_seed(0)
    theirs, samples = Qwen2ForCausalLM(config_of(name, quick)).train(), examples_of(name, quick)
    if side == "ours":
        step = make_ours(bench.same_model(theirs), samples)
        del theirs  # it does not count as memory of ours
    else:
        step = make_transformers(theirs, samples, side == "compiled")
    for line in sys.stdin:
        start = time.perf_counter()
        loss, norm = step(int(line))
        seconds = time.perf_counter() - start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(json.dumps(dict(seconds=seconds, peak_gib=peak, loss=loss, norm=norm)), flush=True)


class Contender:
    """A process that takes steps."""

    def __init__(self, kind: str, way: str, name: str, quick: bool):
        """`way`: how its threads wait, of waiting.WAYS."""
        self.command = [sys.executable, __file__, "--worker", kind, "--shape", name, *["--quick"] * quick]
        self.environment = OWN | WAYS[way]
        self.budget, self.seconds = 0, list[float]()
        self.start()

    def start(self) -> None:
        pipes: dict[str, Any] = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.process = subprocess.Popen(self.command, env=self.environment, **pipes)

    def step(self, budget: int = 0) -> dict[str, float]:
        """Raises RuntimeError when the process has failed."""
        assert self.process.stdin and self.process.stdout
        with suppress(BrokenPipeError):  # it has ended: there will be no line
            print(budget or self.budget, file=self.process.stdin, flush=True)
        if not (line := self.process.stdout.readline()):
            raise RuntimeError(f"a contender ended with exit code {self.process.wait()}")
        return json.loads(line)

    def choose(self, budgets: tuple[int, ...]) -> dict[str, float]:
        """Take the fastest budget, in a new process, whose peak of memory is that budget's; return the first step."""
        first = self.step(budgets[0])
        if len(budgets) == 1:
            self.budget = budgets[0]
            return first
        tried = {budget: min(self.step(budget)["seconds"] for _ in range(2)) for budget in budgets}  # one warms up
        self.budget = min(tried, key=tried.__getitem__)
        self.stop()
        self.start()
        self.step()
        return first

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


# ---- the table -----------------------------------------------------------------------------------------------------


def race(name: str, quick: bool) -> dict[str, Any]:
    """Return what one shape's contenders do."""
    turns = 1 if quick else TURNS[name]
    samples = examples_of(name, quick)
    tokens, least = (
        sum(e.num_tokens for e in samples),
        operations(parse_shape(config_of(name, quick).to_dict(), name), samples),
    )
    sides = {side: SIDES[side] for side in SIDES if not quick or side in QUICK_SIDES}
    contenders, first, peaks = {}, {}, dict[str, float]()
    for side, (kind, way) in tqdm(sides.items(), desc=f"{name}: budgets", disable=None):
        contenders[side] = Contender(kind, way, name, quick)
        try:
            budgets = budgets_of(name, "ours" if side == OURS else "transformers", quick)
            first[side] = contenders[side].choose(budgets)
        except RuntimeError as error:
            if kind != "compiled":
                raise SystemExit(f"error: {name} {side}: {error}") from None
            tqdm.write(f"{name} {side}: {error}")
            contenders.pop(side).stop()
    rates, alone = list[float](), dict[str, float]()
    for _ in tqdm(range(turns), desc=f"{name}: turns", disable=None):
        rates.append(bench.machine()[1])
        for side, contender in contenders.items():
            done = contender.step()
            contender.seconds.append(done["seconds"])
            peaks[side] = done["peak_gib"]
    for side, contender in contenders.items():
        alone[side] = statistics.median(contender.seconds)
    beside = beside_load(contenders, turns)
    for side, contender in contenders.items():
        tqdm.write(
            f"{name:5} {side:22} budget {contender.budget:5}: {tokens / alone[side]:8,.0f} tokens/s, "
            f"beside a busy core {tokens / beside[side]:8,.0f}, peak {peaks[side]:.2f} GiB"
        )
        contender.stop()
    norms = [step["norm"] for step in first.values()]
    theirs, are_all = [side for side in alone if side != OURS], len(alone) == len(sides)
    best, compiled = (
        min(alone[side] for side in theirs),
        [s for side, s in alone.items() if sides[side][0] == "compiled"],
    )
    return {
        "tokens_per_s": round(tokens / alone[OURS]),
        "tokens_per_s_hf": round(tokens / best),
        "training_ratio_hf": round(best / alone[OURS], 2) if are_all else None,
        "training_ratio_hf_compiled": round(min(compiled) / alone[OURS], 2) if compiled else None,
        "training_roofline_fraction": round(least / max(rates) / alone[OURS], 3),
        "peak_gib": round(peaks[OURS], 2),
        "peak_gib_hf": round(min(peak for side, peak in peaks.items() if sides[side][0] == "transformers"), 2),
        "busy_slowdown": round(beside[OURS] / alone[OURS], 2),
        "busy_ratio_hf": round(min(beside[side] for side in theirs) / beside[OURS], 2),
        "fastest_hf": min(theirs, key=alone.__getitem__),
        "gradient_norms_differ": max(abs(norm / norms[0] - 1) for norm in norms),
    }


def beside_load(contenders: dict[str, Contender], turns: int) -> dict[str, float]:
    """Return each contender's seconds of a step while another process keeps one core busy."""
    with bench.busy_core():
        found = [{side: c.step()["seconds"] for side, c in contenders.items()} for _ in range(turns)]
    return {side: statistics.median(turn[side] for turn in found) for side in contenders}


def long_attention(name: str) -> float:
    """Return the least seconds of torch's attention, forward and backward, in one layer over those of ours."""
    heads, kv_heads, size = HEADS[name]
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(LONG, h, size, generator=generator, requires_grad=True) for h in (heads, kv_heads, kv_heads))
    packed = PackedAttention([LONG], q.device)

    def theirs() -> Tensor:
        query, key, value = (x.transpose(0, 1)[None] for x in (q, k, v))
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    def seconds(attend: Callable[[], Tensor]) -> float:
        start = time.perf_counter()
        attend().sum().backward()
        return time.perf_counter() - start

    turns = [(seconds(theirs), seconds(lambda: packed(0, q, k, v))) for _ in range(5)]
    least_theirs, least_ours = map(min, zip(*turns, strict=True))
    return least_theirs / least_ours


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one turn, fewer samples: under 2 minutes on 2 cores")
    parser.add_argument("--shape", choices=tuple(LAYERS), help="only this one")
    parser.add_argument("--worker", choices=("ours", "transformers", "compiled"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return work(options.worker, options.shape, options.quick)
    torch.set_num_threads(int(THREADS))
    metrics: dict[str, Any] = {"name": "training"}
    for name in [options.shape] if options.shape else ["tiny", "half"]:
        suffix = "_tiny" if name == "tiny" else ""
        metrics |= {f"{key}{suffix}": value for key, value in race(name, options.quick).items()}
        if name in HEADS:
            metrics[f"attention_ratio_torch{suffix}"] = round(long_attention(name), 2)
    print(json.dumps(metrics))


if __name__ == "__main__":
    main()
