"""One training step on two CPU cores: our packed trainer against transformers on padded batches sorted by length.

    python benchmarks/training.py [--quick]

Two models with random weights: `tiny` (4 layers x 128), and `half`, the shape of a 0.5B Qwen2 with fewer layers, so
that it runs in minutes. Long-tailed lengths, as in engine.py. Both sides have the same weights, samples, loss (PPO's,
on log-probs of the sampled tokens), clipping, AdamW, fp32 and threads; each runs in a process of its own. Each takes
the best of several budgets of tokens in a micro-batch. transformers also runs under torch.compile, where that works,
but not in --quick. Contenders take turns; a speed is that of the median turn. Tokens are prompts and responses,
without padding.

The roofline: operations of the matrix products and of causal attention over the rate of a matrix product, measured
before each turn. At the end all run beside a process that keeps one core busy.
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
from dataclasses import replace
from pathlib import Path
from typing import Any

THREADS = "2"
os.environ["OMP_NUM_THREADS"] = THREADS  # before torch is imported
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks import engine as bench
from core import Example, ModelShape, SampleId, Span
from loss import LossConfig
from model import Model, parse_shape
from parallel import World, keep_memory
from sampling import SamplingConfig
from trainer import Trainer, TrainerConfig

PROMPT, MEDIAN = 16, 60  # tokens
LR, CLIP, CLIP_LOW, CLIP_HIGH = 1e-5, 1.0, 0.2, 0.28
BUDGETS = {  # tokens of a micro-batch that are tried; `half` has 2,400 in all
    "tiny": {"ours": (4096, 8192), "transformers": (1024, 2048, 4096, 8192)},
    "half": {"ours": (1024, 4096), "transformers": (512, 1024, 2048)},
}
LAYERS = {"nano": 1, "tiny": 4, "half": 4}  # in --quick half of them for `half`
SAMPLES = {"nano": (4, 4), "tiny": (192, 96), "half": (24, 12)}  # and in --quick
TURNS = {"nano": 1, "tiny": 3, "half": 2}
NANO = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_attention_heads=2)


def config_of(name: str, quick: bool) -> Qwen2Config:
    shape: dict[str, Any] = NANO if name == "nano" else bench.SHAPES[name]
    layers = LAYERS[name] // (2 if quick and name == "half" else 1)
    shape = shape | dict(num_hidden_layers=layers, num_key_value_heads=2, tie_word_embeddings=True)
    return Qwen2Config(**shape, max_position_embeddings=4096)


def samples_of(name: str, quick: bool) -> list[Example]:
    """Return responses to learn from; every second one was better than its group."""
    count, vocabulary = SAMPLES[name][quick], config_of(name, quick).vocab_size
    generator = torch.Generator().manual_seed(0)
    made = []
    for i, length in enumerate(bench.long_tailed(count, MEDIAN)):
        ids = torch.randint(3, vocabulary, (PROMPT + length,), generator=generator).tolist()
        spans, old = (Span(0, length, 0),), [-float(torch.tensor(vocabulary).log())] * length
        made.append(Example(SampleId(0, i, 0), tuple(ids[:PROMPT]), ids[PROMPT:], spans, old, 0.5 * (-1) ** i))
    return made


def budgets_of(name: str, kind: str, quick: bool) -> tuple[int, ...]:
    budgets = BUDGETS.get(name, BUDGETS["tiny"])[kind]
    return budgets[1:3] if quick else budgets


def operations(shape: ModelShape, samples: list[Example]) -> float:
    """Return the least operations of a step: matrix products, the head on sampled tokens only, causal attention."""
    s, tokens = shape, sum(e.num_tokens for e in samples)
    layer = s.hidden_size * ((2 * s.num_heads + 2 * s.num_kv_heads) * s.head_dim + 3 * s.intermediate_size)
    head = s.vocab_size * s.hidden_size * sum(e.num_sampled for e in samples)
    attention = s.num_heads * s.head_dim * sum(e.num_tokens**2 for e in samples)
    return 6 * (s.num_layers * (layer * tokens + attention) + head)


# ---- contenders: one step, each in a process of its own ------------------------------------------------------------

Step = Callable[[int], tuple[float, float]]  # tokens of a micro-batch -> loss, norm of the gradient


def make_ours(theirs: Qwen2ForCausalLM, samples: list[Example]) -> Step:
    model = Model(parse_shape(theirs.config.to_dict(), "benchmark"))
    weights = theirs.state_dict()
    for key, view, _ in model.hf_tensors():
        view.copy_(weights[key].view(view.shape))
    world = World(0, 1, torch.device("cpu"))
    loss, sampling = LossConfig(clip_low=CLIP_LOW, clip_high=CLIP_HIGH), SamplingConfig()
    settings = TrainerConfig(lr=LR, lr_warmup_updates=0, grad_clip=CLIP)
    trainer = Trainer(model, settings, loss, sampling, world, 16 * MEDIAN, 1000)

    def step(budget: int) -> tuple[float, float]:
        trainer.config = replace(trainer.config, tokens_per_microbatch=budget)
        trainer.accumulate(samples)
        stats = trainer.update()
        return stats["loss"], stats["grad_norm"]

    return step


def padded_batches(samples: list[Example], budget: int) -> list[list[Example]]:
    """Return micro-batches of similar lengths: at most `budget` tokens, padding included."""
    batches: list[list[Example]] = []
    for example in sorted(samples, key=lambda e: -e.num_tokens):
        if not batches or (len(batches[-1]) + 1) * batches[-1][0].num_tokens > budget:
            batches.append([])
        batches[-1].append(example)
    return batches


def policy_loss(model: Any, batch: list[Example]) -> Tensor:
    """Return the sum of PPO's loss over the sampled tokens of a padded batch."""
    width = max(e.num_tokens for e in batch)
    ids, mask = torch.zeros(2, len(batch), width, dtype=torch.int64)
    old = torch.zeros(len(batch), width - PROMPT)
    for row, e in enumerate(batch):
        ids[row, : e.num_tokens], mask[row, : e.num_tokens] = torch.tensor([*e.prompt_ids, *e.token_ids]), 1
        old[row, : e.num_sampled] = torch.tensor(e.logprobs)
    advantages = torch.tensor([e.advantage for e in batch])[:, None]
    logits = model(input_ids=ids, attention_mask=mask, logits_to_keep=width - PROMPT + 1, use_cache=False).logits
    logits = logits[:, :-1]
    logprobs = logits.gather(-1, ids[:, PROMPT:, None])[..., 0] - logits.logsumexp(-1)
    ratio = (logprobs - old).exp()
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * advantages)
    return (loss * mask[:, PROMPT:]).sum()


def make_transformers(theirs: Qwen2ForCausalLM, samples: list[Example], compiled: bool) -> Step:
    model: Any = torch.compile(theirs, dynamic=True) if compiled else theirs
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    count = sum(e.num_sampled for e in samples)

    def step(budget: int) -> tuple[float, float]:
        total = 0.0
        for batch in padded_batches(samples, budget):
            loss = policy_loss(model, batch) / count
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), CLIP).item()
        optimizer.step()
        optimizer.zero_grad()
        return total, norm

    return step


def work(side: str, name: str, quick: bool) -> None:
    """Be a contender: for each budget that comes in, take a step and tell about it."""
    torch.set_num_threads(int(THREADS))
    torch.set_flush_denormal(True)
    keep_memory()
    torch.manual_seed(0)
    theirs, samples = Qwen2ForCausalLM(config_of(name, quick)).train(), samples_of(name, quick)
    step = make_ours(theirs, samples) if side == "ours" else make_transformers(theirs, samples, side == "compiled")
    for line in sys.stdin:
        start = time.perf_counter()
        loss, norm = step(int(line))
        seconds = time.perf_counter() - start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(json.dumps(dict(seconds=seconds, peak_gib=peak, loss=loss, norm=norm)), flush=True)


class Contender:
    """A process that takes steps."""

    def __init__(self, side: str, name: str, quick: bool):
        command = [sys.executable, __file__, "--worker", side, "--shape", name, *["--quick"] * quick]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.budget, self.seconds = 0, list[float]()

    def step(self, budget: int = 0) -> dict[str, float]:
        """Raises RuntimeError when the process has failed."""
        assert self.process.stdin and self.process.stdout
        print(budget or self.budget, file=self.process.stdin, flush=True)
        if not (line := self.process.stdout.readline()):
            raise RuntimeError(f"a contender ended with exit code {self.process.wait()}")
        return json.loads(line)

    def choose(self, budgets: tuple[int, ...]) -> dict[str, float]:
        """Take the fastest budget; return the first step of all."""
        first = self.step(budgets[0])
        tried = {budget: self.step(budget)["seconds"] for budget in budgets}
        self.budget = min(tried, key=tried.__getitem__)
        return first

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


# ---- the table -----------------------------------------------------------------------------------------------------


def gemm_rate(size: int = 1536) -> float:
    """Return operations per second of a matrix product, the faster of torch's two libraries."""
    a = torch.randn(size, size)
    calls = (lambda: a @ a, lambda: torch.ops.mkldnn._linear_pointwise(a, a, None, "none", [], ""))
    return 2 * size**3 / min(bench.best(call, turns=3) for call in calls)


def race(name: str, quick: bool) -> dict[str, Any]:
    """Return what one shape's contenders do."""
    turns = TURNS[name]
    samples = samples_of(name, quick)
    tokens, least = (
        sum(e.num_tokens for e in samples),
        operations(parse_shape(config_of(name, quick).to_dict(), name), samples),
    )
    sides = {"ours": "ours", "transformers": "transformers"} | ({} if quick else {"compiled": "transformers"})
    contenders, first, peaks = {}, {}, dict[str, float]()
    for side, kind in tqdm(sides.items(), desc=f"{name}: budgets", disable=None):
        contenders[side] = Contender(side, name, quick)
        try:
            first[side] = contenders[side].choose(budgets_of(name, kind, quick))
        except RuntimeError as error:
            tqdm.write(f"{name} {side}: {error}")
            contenders.pop(side).stop()
    fractions, alone = [], dict[str, float]()
    for _ in tqdm(range(turns), desc=f"{name}: turns", disable=None):
        rate = gemm_rate()
        for side, contender in contenders.items():
            done = contender.step()
            contender.seconds.append(done["seconds"])
            peaks[side] = done["peak_gib"]
        fractions.append(least / rate / contenders["ours"].seconds[-1])
    for side, contender in contenders.items():
        alone[side] = statistics.median(contender.seconds)
    beside = beside_load(contenders, turns)
    for side, contender in contenders.items():
        tqdm.write(
            f"{name:5} {side:12} budget {contender.budget:5}: {tokens / alone[side]:8,.0f} tokens/s, "
            f"beside a busy core {tokens / beside[side]:8,.0f}, peak {peaks[side]:.2f} GiB"
        )
        contender.stop()
    norms = [step["norm"] for step in first.values()]
    others = [seconds for side, seconds in alone.items() if side != "ours"]
    return {
        "tokens_per_s": round(tokens / alone["ours"]),
        "tokens_per_s_hf": round(tokens / min(others)),
        "training_ratio_hf": round(min(others) / alone["ours"], 2),
        "training_ratio_hf_compiled": round(alone["compiled"] / alone["ours"], 2) if "compiled" in alone else None,
        "training_roofline_fraction": round(statistics.median(fractions), 3),
        "peak_gib": round(peaks["ours"], 2),
        "peak_gib_hf": round(peaks["transformers"], 2),
        "busy_slowdown": round(beside["ours"] / alone["ours"], 2),
        "busy_ratio_hf": round(min(beside[s] for s in beside if s != "ours") / beside["ours"], 2),
        "gradient_norms_differ": max(abs(norm / norms[0] - 1) for norm in norms),
    }


def beside_load(contenders: dict[str, Contender], turns: int) -> dict[str, float]:
    """Return each contender's seconds of a step while another process keeps one core busy."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            found = [{side: c.step()["seconds"] for side, c in contenders.items()} for _ in range(turns)]
        finally:
            busy.kill()
    return {side: statistics.median(turn[side] for turn in found) for side in contenders}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer samples and layers: under 2 minutes on 2 cores")
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
    print(json.dumps(metrics))


if __name__ == "__main__":
    main()
