"""Generated tokens per second of our engine, of transformers' `generate` and of its `generate_batch`, on two CPU cores.

    python benchmarks/engine.py [--quick]

Two models with random weights: `tiny` (4 layers x 128) and `half`, the shape of a 0.5B Qwen2 (24 x 896, 14/2 heads,
4864, 32k vocabulary). Equal lengths, and long-tailed ones (log-normal: P75 1.8, P99 8 times the median, cut at 16).
Only tokens that were asked for count. Contenders take turns in one run; each speed is the best of its turns. For
long-tailed lengths `generate` has the fastest of several sizes of batches, in order of arrival: who samples does not
know which response will be long.

A last contest samples responses to the default task's prompts from its warm-started model, which ends them. `generate`
is told how long the longest of a batch is, and has the fastest of batches of 1 to 16 prompts. Ours goes
without drafts; with drafts from the text of siblings and of the response itself (`new_drafts`); with these and old text
(`drafts`), which weights a little off these have drawn for the same samples.

The roofline of a decode step is the larger of bytes over bandwidth and operations over arithmetic rate (the fastest of
torch's, oneDNN's and our products in float32), both measured here; bytes are weights and keys/values read once,
operations those of the matrix products. Last, how much longer the steps of `half` are beside another process that
computes: a core less, and threads that wait for each other.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from array import array
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

THREADS = "2"
os.environ["OMP_NUM_THREADS"] = THREADS  # before torch is imported
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from process.threads import before_torch  # isort: skip

before_torch()  # as ranks do

import torch
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
)

import checkpoint
from attention import PackedAttention
from core import SampleId
from engine import native
from engine.cpu import keep_memory
from engine.sequence import Sequence
from model import Model, parse_shape
from policies.drafts import DraftPolicy
from rollout import ALONE, Engine, RolloutConfig
from sampling import SamplingConfig, sample_key
from settings import MODELS
from tasks import TASKS
from warm_start import WarmStartConfig, ensure_model

GREEDY = SamplingConfig(temperature=0.0)
PROMPT = 16  # tokens
BATCHES = 8, 16, 32, 64, 128  # rows of `generate`, of which long-tailed lengths get the fastest
READS = 8  # of 256 MiB: as many bytes as the weights of the 0.5B shape have
ROLLOUT = RolloutConfig(max_prompt_tokens=PROMPT, max_response_tokens=512, max_running=128, kv_gib=1.0)
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": dict(vocab_size=258, hidden_size=128, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4),
    "half": dict(
        vocab_size=32000, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14
    ),
}


@dataclass
class Case:
    model: str
    batch: int
    lengths: list[int]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def is_long_tailed(self) -> bool:
        return len(set(self.lengths)) > 1


def long_tailed(count: int, median: int, seed: int = 0) -> list[int]:
    """Return log-normal lengths, cut at 16 times the median."""
    generator = torch.Generator().manual_seed(seed)
    factor = (0.9 * torch.randn(count, generator=generator)).exp().clamp(max=16)
    return (median * factor).ceil().long().tolist()


def build(name: str) -> tuple[Model, Qwen2ForCausalLM]:
    """Return the same random weights as our model and as transformers'."""
    config = Qwen2Config(**SHAPES[name], num_key_value_heads=2, tie_word_embeddings=True, max_position_embeddings=4096)
    torch.manual_seed(0)
    theirs = Qwen2ForCausalLM(config).eval()
    return same_model(theirs), theirs


def same_model(theirs: Qwen2ForCausalLM) -> Model:
    """Return our model with the weights of theirs."""
    model, weights = Model(parse_shape(theirs.config.to_dict(), "benchmark")), theirs.state_dict()
    for key, view, _ in model.hf_tensors():
        view.copy_(weights[key].view(view.shape))
    return model


def prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, 250, (count, PROMPT), generator=generator).tolist()


# ---- contenders: seconds for one case ----------------------------------------------------------------------------


def run_ours(engine: Engine, case: Case) -> float:
    start = time.perf_counter()
    for i, (ids, length) in enumerate(zip(prompts(len(case.lengths)), case.lengths)):
        engine.add(Sequence(i, 0, 0, tuple(ids), i, length, ignore_eos=True))
    done = 0
    while not engine.is_idle:
        done += sum(len(sample.token_ids) for sample in engine.step())
    assert done == case.tokens
    return time.perf_counter() - start


def run_generate(model: Qwen2ForCausalLM, case: Case, batch: int) -> float:
    """Static batches in order of arrival: each runs to its longest."""
    start = time.perf_counter()
    ids = torch.tensor(prompts(len(case.lengths)))
    for i in range(0, len(ids), batch):
        length = max(case.lengths[i : i + batch])
        part = ids[i : i + batch]
        model.generate(  # type: ignore[misc]  # its class has the mixin that this method asks for
            part,
            attention_mask=torch.ones_like(part),
            do_sample=False,
            max_new_tokens=length,
            pad_token_id=0,
            eos_token_id=None,
        )
    return time.perf_counter() - start


def run_generate_batch(model: Qwen2ForCausalLM, case: Case) -> float:
    """Continuous batching of transformers, in the fastest of the settings tried."""
    config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=max(case.lengths))
    cache = ContinuousBatchingConfig(page_size=32, num_blocks=256, max_batch_tokens=case.batch)
    with model.continuous_batching_context_manager(
        generation_config=config, continuous_batching_config=cache, warmup=False
    ) as manager:
        start = time.perf_counter()  # its start-up is not counted
        for i, (ids, length) in enumerate(zip(prompts(len(case.lengths)), case.lengths)):
            manager.add_request(ids, request_id=str(i), max_new_tokens=length)
        done = 0
        while done < len(case.lengths):
            result = manager.get_result(timeout=120)
            if result is None:
                raise TimeoutError("generate_batch gave no result within 120 s")
            done += result.is_finished()
        return time.perf_counter() - start


# ---- a trained model ---------------------------------------------------------------------------------------------

TASK, RESPONSES, LIMIT = "hailstone", 8, 1024
AT_ONCE = 1, 2, 4, 8, 16  # prompts of a batch of `generate`
OTHER = 1e-2  # of the standard deviation of each weight: the noise that makes the older weights
Texts = dict[SampleId, array]


class Trained:
    """The default task's warm-started model, some of the task's prompts, and responses of somewhat other weights."""

    def __init__(self, num_prompts: int):
        folder = ensure_model(WarmStartConfig(), TASK, MODELS, ALONE.world)
        tokenizer = checkpoint.load_tokenizer(folder)
        self.model = checkpoint.load_model(folder, ALONE.world.device, torch.float32)
        self.theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        numbers = Random(0).sample(TASKS[TASK].numbers(), num_prompts)
        self.prompts = [tokenizer.encode(TASKS[TASK].prompt(number)) for number in numbers]
        rollout = replace(ROLLOUT, max_prompt_tokens=64, max_response_tokens=LIMIT)
        ends = checkpoint.eos_ids(folder, tokenizer, self.model.shape.vocab_size)
        self.engine = Engine(self.model, rollout, SamplingConfig(), ends)
        weights = [weight.detach().clone() for weight in self.model.parameters()]
        torch.manual_seed(0)
        with torch.no_grad():
            for weight in self.model.parameters():
                weight.add_(OTHER * weight.std() * torch.randn_like(weight))
            self.engine.load_weights(self.model, 0)
            _, self.old = self.run_ours(None)
            for weight, own in zip(self.model.parameters(), weights, strict=True):
                weight.copy_(own)
        self.engine.load_weights(self.model, 1)

    def run_ours(self, drafter: DraftPolicy | None) -> tuple[float, Texts]:
        """Return seconds and responses."""
        texts, self.engine.drafter = Texts(), drafter
        start = time.perf_counter()
        if drafter:
            drafter.begin(self.old, {})
        for i, ids in enumerate(self.prompts):
            for response in range(RESPONSES):
                self.engine.add(Sequence(i, response, 0, tuple(ids), sample_key(0, i, response), LIMIT))
        while not self.engine.is_idle:
            texts |= {sample.id: array("i", sample.token_ids) for sample in self.engine.step()}
        return time.perf_counter() - start, texts

    def run_generate(self, texts: Texts, batch: int) -> float:
        """Batches of so many prompts' responses, each to its longest. Sampled, as ours."""
        start = time.perf_counter()
        for i in range(0, len(self.prompts), batch):
            part = self.prompts[i : i + batch]
            longest, size = max(len(texts[id]) for id in texts if i <= id.prompt < i + batch), max(map(len, part))
            ids = torch.tensor([[0] * (size - len(ids)) + ids for ids in part]).repeat_interleave(RESPONSES, 0)
            mask = torch.tensor([[0] * (size - len(ids)) + [1] * len(ids) for ids in part])
            self.theirs.generate(
                ids,
                attention_mask=mask.repeat_interleave(RESPONSES, 0),
                do_sample=True,
                top_k=0,
                max_new_tokens=longest,
                pad_token_id=0,
                eos_token_id=None,
            )
        return time.perf_counter() - start


def race_trained(quick: bool) -> dict[str, float]:
    """Return the ratios of our tokens per second to those of `generate`, without and with drafts; print speeds."""
    it = Trained(32 if quick else 64)
    _, texts = it.run_ours(None)
    policies = {
        "new drafts": DraftPolicy(("siblings", "own"), 16),
        "drafts": DraftPolicy(("old", "siblings", "own"), 16),
    }
    seconds: dict[str, list[float]] = defaultdict(list)
    batch = min(AT_ONCE, key=lambda batch: it.run_generate(texts, batch))
    for _ in range(2 if quick else 3):
        for name, policy in {"ours": None, **policies}.items():
            took, drawn = it.run_ours(policy)
            assert drawn == texts, "drafts have changed a token"
            seconds[name].append(took)
        seconds["generate"].append(it.run_generate(texts, batch))
    tokens = sum(map(len, texts.values()))
    speed = {name: tokens / min(times) for name, times in seconds.items()}
    row = "  ".join(f"{name} {value:,.0f}" for name, value in speed.items())
    right = sum(common(texts[id], it.old[id]) for id in texts) / tokens
    longest = max(map(len, texts.values()))
    tqdm.write(f"trained, {len(texts)} responses, mean {tokens / len(texts):.0f}, longest {longest}  tokens/s: {row}")
    tqdm.write(f"  generate: batches of {batch * RESPONSES}")
    tqdm.write(f"  old texts: {right:.0%} of the tokens stand before their first difference")
    names = {"ours": "", "new drafts": "_new_drafts", "drafts": "_drafts"}
    return {f"ratio_generate_trained{s}": round(speed[n] / speed["generate"], 2) for n, s in names.items()}


def common(new: array, old: array) -> int:
    """Return how many tokens two texts have in common at their beginning."""
    return next((i for i, (a, b) in enumerate(zip(new, old)) if a != b), min(len(new), len(old)))


# ---- roofline ----------------------------------------------------------------------------------------------------


def best(function, turns: int = 5) -> float:
    function()
    times = []
    for _ in range(turns):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def machine() -> tuple[float, float]:
    """Return measured bytes/s of reading memory and operations/s of an fp32 matrix product.

    Memory is read for as long as a step reads it: on a shared machine it is twice as fast for some milliseconds.
    """
    block = torch.ones(64 * 2**20)  # 256 MiB: beyond any cache
    a = torch.randn(1536, 1536)
    packed = torch.ops.mkldnn._reorder_linear_weight(a, 1536)
    ways = [lambda: a @ a, lambda: torch.ops.mkldnn._linear_pointwise(a, packed, None, "none", [], "")]
    with torch.no_grad():
        if native.can_multiply(a, a, None):
            ways.append(lambda: native.multiply(a, a, None))
        product = min(map(best, ways))
    reading = best(lambda: [block.sum() for _ in range(READS)], turns=2)
    return READS * block.nbytes / reading, 2 * 1536**3 / product


def decode_step_floor(model: Model, batch: int, context: float, bandwidth: float, rate: float) -> float:
    """Return the least seconds of one decode step."""
    s = model.shape
    weights = sum(p.numel() for p in model.parameters())  # tied: the embedding is read once, as the head
    kv = 2 * s.num_layers * s.num_kv_heads * s.head_dim * context * batch
    attention = 4 * s.num_layers * s.num_heads * s.head_dim * context * batch
    return max(4 * (weights + kv) / bandwidth, (2 * weights * batch + attention) / rate)


def measure_decode(model: Model, engine: Engine, batch: int, rounds: int) -> tuple[float, float]:
    """Return (fraction of the roofline, seconds of a decode step) of `batch` rows, medians over rounds.

    Each round measures the machine beside the steps, because what a shared machine can do changes by the second.
    """
    for i, ids in enumerate(prompts(batch)):
        engine.add(Sequence(i, 0, 0, tuple(ids), i, 3 * rounds + 2, ignore_eos=True))
    engine.step()
    fractions, seconds = [], []
    for turn in range(rounds):
        bandwidth, rate = machine()
        step = best(engine.step, turns=2)
        fractions.append(decode_step_floor(model, batch, PROMPT + 3 * turn + 2, bandwidth, rate) / step)
        seconds.append(step)
    engine.abort([SampleId(0, i, 0) for i in range(batch)])
    return statistics.median(fractions), statistics.median(seconds)


# ---- beside other work -------------------------------------------------------------------------------------------


@contextmanager
def busy_core() -> Iterator[None]:
    """Have another process compute meanwhile, at most as long as this one lives."""
    code = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(10**6))"
    with subprocess.Popen([sys.executable, "-S", "-c", code]) as process:
        try:
            yield
        finally:
            process.kill()


def slowdown(function, turns: int) -> float:
    """Return how much longer `turns` calls take beside one busy core."""

    def seconds() -> float:
        function()
        start = time.perf_counter()
        for _ in range(turns):
            function()
        return time.perf_counter() - start

    alone = seconds()
    with busy_core():
        return seconds() / alone


def beside_busy_core(model: Model, engine: Engine, steps: int) -> dict[str, float]:
    """Return by how much a decode step of 4 rows and a training step of 256 tokens are longer then, and print it."""
    for i, ids in enumerate(prompts(4)):
        engine.add(Sequence(i, 0, 0, tuple(ids), i, 2 * steps + 4, ignore_eos=True))
    engine.step()
    factors = {"busy_core_decode": slowdown(engine.step, steps)}
    engine.abort([SampleId(0, i, 0) for i in range(4)])
    tokens, layer = torch.randint(3, 250, (256,)), model.layers[:2]
    attend = PackedAttention([256], torch.device("cpu"))

    def train() -> None:
        x, (cos, sin) = model.embed(tokens), model.rope(torch.arange(256))
        for each in layer:
            x = each(x, cos, sin, attend, inference=False)
        x.sum().backward()

    factors["busy_core_training"] = slowdown(train, max(steps // 4, 2))
    row = "  ".join(f"{name} {factor:.2f} x" for name, factor in factors.items())
    tqdm.write(f"half, beside one busy core, as long as alone: {row}")
    return {name: round(factor, 2) for name, factor in factors.items()}


# ---- the table ---------------------------------------------------------------------------------------------------


def cases_for(name: str, quick: bool) -> list[Case]:
    tiny = name == "tiny"
    length = 64 if tiny else (6 if quick else 24)
    batches = (1, 8, 32, 128) if tiny or not quick else (1, 8, 32)
    cases = [Case(name, b, [length] * b) for b in batches]
    if tiny:
        cases.append(Case(name, 64 if quick else 128, long_tailed(64 if quick else 256, 24)))
    elif not quick:
        cases.append(Case(name, 32, long_tailed(64, 4)))
    return cases


def race(case: Case, engine: Engine, theirs: Qwen2ForCausalLM, turns: int) -> dict[str, float]:
    """Return useful tokens per second of each contender and print them."""
    batch = case.batch
    if case.is_long_tailed:
        batch = min((b for b in BATCHES if b <= len(case.lengths)), key=lambda batch: run_generate(theirs, case, batch))
    runs = {"ours": lambda: run_ours(engine, case), "generate": lambda: run_generate(theirs, case, batch)}
    if case.is_long_tailed:
        runs["generate_batch"] = lambda: run_generate_batch(theirs, case)
    seconds: dict[str, list[float]] = {key: [] for key in runs}
    for _ in range(turns):
        for key, run in runs.items():
            seconds[key].append(run())
    speed = {key: case.tokens / min(times) for key, times in seconds.items()}
    spread = statistics.median(seconds["ours"]) / min(seconds["ours"])
    row = "  ".join(f"{key} {value:,.0f}" for key, value in speed.items())
    row += f"  (generate's batches: {batch})" if case.is_long_tailed else ""
    kind = "long-tailed" if case.is_long_tailed else "equal"
    tqdm.write(f"{case.model:5} B {case.batch:3} {kind:11} tokens/s: {row}   (median/best of ours {spread:.2f})")
    return speed


def roofline(model: Model, engine: Engine, rounds: int) -> dict[str, float]:
    """Return the fraction of the roofline at each batch size and print it."""
    fractions = {}
    for b in tqdm((1, 8, 32, 128), desc="roofline", disable=None):
        fraction, step = measure_decode(model, engine, b, rounds)
        fractions[f"roofline_fraction_b{b}"] = round(fraction, 3)
        tqdm.write(f"half  B {b:3} decode step {1000 * step:.1f} ms, {fraction:.0%} of the roofline")
    bandwidth, rate = machine()
    tqdm.write(f"machine, now: {bandwidth / 1e9:.1f} GB/s, {rate / 1e9:.0f} GFLOP/s")
    return fractions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter cases: under 2 minutes on 2 cores")
    quick = parser.parse_args().quick
    torch.set_num_threads(int(THREADS))
    keep_memory()  # as train.py does
    torch.set_flush_denormal(True)
    metrics: dict[str, float | str] = {"name": "engine"}
    equal_ratios = []
    for name in ("tiny", "half"):
        ours, theirs = build(name)
        turns = 3 if name == "tiny" or not quick else 1
        for case in tqdm(cases_for(name, quick), desc=name, disable=None):
            engine = Engine(ours, replace(ROLLOUT, max_running=case.batch), GREEDY, [])
            speed = race(case, engine, theirs, min(turns, 2) if quick and case.is_long_tailed else turns)
            ratio = speed["ours"] / speed["generate"]
            if case.is_long_tailed:
                suffix = "" if name == "tiny" else "_half"
                metrics[f"ratio_generate_longtail{suffix}"] = round(ratio, 2)
                batch_ratio = speed["ours"] / speed["generate_batch"]
                metrics[f"ratio_generate_batch_longtail{suffix}"] = round(batch_ratio, 2)
            else:
                equal_ratios.append(ratio)
        if name == "half":
            metrics |= roofline(ours, Engine(ours, ROLLOUT, GREEDY, []), rounds=5 if quick else 15)
            metrics |= beside_busy_core(ours, Engine(ours, ROLLOUT, GREEDY, []), steps=12 if quick else 40)
    metrics |= race_trained(quick)
    metrics["ratio_generate_equal_min"] = round(min(equal_ratios), 2)
    print(json.dumps(metrics))


if __name__ == "__main__":
    main()
