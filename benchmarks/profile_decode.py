"""Where the time of one decode step goes on a CPU: tables of torch.profiler, the largest operations first.

python benchmarks/profile_decode.py [--quick]

Names of compiled kernels begin with `native`; each is called by itself for the tables, though a run has all layers in
one call. At the end: the matrix products of all layers of a step, in fp32 as the
engine has them, and by torch with int8 weights (by row, rounded before), inputs rounded at each call or left as they
are, for the model of the default task, too. Medians of calls.
"""

import argparse
import json
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import engine as bench  # isort: skip  # before torch: it sets the number of threads

import torch
from torch.profiler import profile, record_function
from tqdm import tqdm

from core import SampleId
from engine import native
from engine.cpu import packed
from engine.sequence import Sequence
from rollout import Engine
from warm_start import WarmStartConfig

CASES = (  # model, rows, steps
    ("tiny", 32, 14, torch.float32),
    ("half", 1, 5, torch.float32),
    ("half", 32, 5, torch.float32),
    ("half", 32, 5, torch.bfloat16),
)
PRODUCTS, TURNS = (1, 8, 32, 128), 50  # rows; calls of each kind, fewer for large models


def profile_steps(engine: Engine, rows: int, steps: int) -> tuple[str, float]:
    """Return a table of the self time of `steps` decode steps of `rows` sequences, and the milliseconds of its steps.

    Sequences stay short of their second page.
    """
    for i, ids in enumerate(bench.prompts(rows)):
        engine.add(Sequence(i, 0, 0, tuple(ids), i, 3 * steps + 10, ignore_eos=True))
    for _ in range(4):
        engine.step()
    seconds: tuple[list[float], list[float]] = [], []
    most = engine.runner.weights.most_fused
    for i in range(2 * steps):
        engine.runner.weights.most_fused = most * (i % 2)
        start = time.perf_counter()
        engine.step()
        seconds[i % 2].append(time.perf_counter() - start)
    one_by_one, fused = map(statistics.median, seconds)
    engine.runner.weights.most_fused = 0
    call = native._call

    def named(name: str, *args: object) -> None:
        with record_function(f"native::{name}"):
            call(name, *args)

    with patch.object(native, "_call", named), profile() as profiler:
        for _ in range(steps):
            engine.step()
    engine.abort([SampleId(0, i, 0) for i in range(rows)])
    events = profiler.key_averages()
    total = sum(e.self_cpu_time_total for e in events)
    lines = [f"{'operation':<52} {'calls':>6} {'us each':>9} {'us a step':>10} {'share':>6}"]
    for e in sorted(events, key=lambda e: -e.self_cpu_time_total)[:16]:
        each, a_step = e.self_cpu_time_total / e.count, e.self_cpu_time_total / steps
        share = e.self_cpu_time_total / total
        lines.append(f"{e.key:<52} {e.count / steps:>6.0f} {each:>9.1f} {a_step:>10.0f} {share:>6.1%}")
    lines.append(f"all operations: {total / steps / 1000:.2f} ms a step, with the profiler's own cost")
    lines.append(f"a step without the profiler: {1e3 * one_by_one:.2f} ms; as runs have it: {1e3 * fused:.2f} ms")
    return "\n".join(lines), round(total / steps / 1000, 2)


def products(width: int, inner: int, queries: int, key_values: int, layers: int, rows: int) -> list[float]:
    """Return the milliseconds of the matrix products of all layers: in fp32, in int8, with weights only in int8."""
    shapes = ((width, queries + 2 * key_values), (queries, width), (width, 2 * inner), (inner, width))
    seconds = [0.0, 0.0, 0.0]
    for size, outputs in shapes:
        x, weight = torch.randn(rows, size), torch.randn(outputs, size)
        scales, zeros = weight.abs().amax(1) / 127, torch.zeros(outputs, dtype=torch.long)
        whole = packed(weight)
        with warnings.catch_warnings():  # torch says that this form will move to another package
            warnings.simplefilter("ignore")
            rounded = torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8)
        few = torch.ops.quantized.linear_prepack(rounded, None)

        fp32: list[Any] = [whole, (x, None)] if callable(whole) else [torch.nn.functional.linear, (x, weight)]
        int8: list[Any] = [torch.ops.quantized.linear_dynamic, (x, few)]
        weights_only: list[Any] = [torch.ops.aten._weight_int8pack_mm, (x, rounded.int_repr(), scales)]
        for i, (call, given) in enumerate((fp32, int8, weights_only)):
            call(*given)
            times = list[float]()
            for _ in range(TURNS if width < 512 else 5):
                start = time.perf_counter()
                call(*given)
                times.append(time.perf_counter() - start)
            seconds[i] += layers * statistics.median(times)
    return [1e3 * each for each in seconds]


def print_products(quick: bool) -> dict[str, float]:
    """Print the table of `products`; return fp32 over the other two by model and rows."""
    w, found = WarmStartConfig(), dict[str, float]()
    shapes = {"default": (w.hidden_size, 4 * w.hidden_size, w.hidden_size, w.hidden_size // 2, w.num_layers)}
    for name in () if quick else ("tiny", "half"):
        s = bench.build(name)[0].shape
        sizes = s.hidden_size, s.intermediate_size, s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
        shapes[name] = (*sizes, s.num_layers)
    tqdm.write(f"{'products of a step':<20} {'rows':>5} {'fp32, ms':>10} {'int8, ms':>10} {'weights only':>13}")
    for name, shape in shapes.items():
        for rows in PRODUCTS:
            fp32, int8, weights_only = products(*shape, rows)
            tqdm.write(f"{name:<20} {rows:>5} {fp32:>10.3f} {int8:>10.3f} {weights_only:>13.3f}")
            found[f"fp32_over_int8_{name}_{rows}"] = round(fp32 / int8, 2)
            found[f"fp32_over_int8_weights_{name}_{rows}"] = round(fp32 / weights_only, 2)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the small model only: seconds")
    quick = parser.parse_args().quick
    cases = CASES[:1] if quick else CASES
    torch.set_num_threads(int(bench.THREADS))
    torch.set_flush_denormal(True)
    metrics: dict[str, str | float] = {"name": "profile_decode"}
    for name, rows, steps, dtype in tqdm(cases, desc="profile", disable=None):
        engine = Engine(bench.build(name)[0].to(dtype), bench.ROLLOUT, bench.GREEDY, [])
        suffix, what = ("", "") if dtype == torch.float32 else ("_bf16", ", in bfloat16")
        table, metrics[f"ms_a_step_{name}_{rows}{suffix}"] = profile_steps(engine, rows, steps)
        tqdm.write(f"{name}, {rows} rows{what}\n{table}\n")
    with torch.inference_mode():
        print(json.dumps(metrics | print_products(quick)))


if __name__ == "__main__":
    main()
