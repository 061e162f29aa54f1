"""Check and measure every path that only a GPU runs; print one table, then one line of JSON. Under 8 minutes.

    bash benchmarks/gpu.sh [--only kernels engine] > benchmarks/results/gpu_h100.md

Needs this repository, torch with CUDA, triton, transformers, a C compiler with Python's headers, which Triton asks for,
and one GPU. Each section runs in a process of its own, in bounded time: what crashes, hangs or fails becomes a row that
says FAIL, with a traceback on stderr, the other sections go on, and the exit code is 1. `--device cpu` runs the same
code on small shapes in seconds: kernels in Triton's interpreter, no graphs.
"""

import argparse
import inspect
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

if __name__ == "__main__" and "cpu" in sys.argv:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import torch
from gpu_checks import section_engine, section_kernels, section_varlen
from gpu_rows import GRACE, Row, Section, measure_bandwidth, print_table, run_section, seconds_of
from gpu_speed import section_decode, section_generate, section_steps
from gpu_system import section_judge, section_memory, section_ranks
from gpu_training import section_training

SECONDS = 460  # of the whole run


def section_machine(s: Section) -> None:
    """What the memory and the matrix units of this machine give."""
    name = platform.processor() or platform.machine()
    if s.on_gpu:
        properties = torch.cuda.get_device_properties(s.device)
        name = properties.name
        s.row("device", f"{name}, {properties.total_memory / 2**30:.0f} GiB, {properties.multi_processor_count} SMs",
              device=name)  # fmt: skip
    else:
        s.row("device", name, device=name)
    with s.guard("memory"):
        bandwidth = measure_bandwidth(s.device)
        s.row("memory", f"{bandwidth / 1e12:.2f} TB/s (copy or sum)", bandwidth_gbs=round(bandwidth / 1e9, 1))
    with s.guard("matrix product"):
        size, dtype = (8192, torch.bfloat16) if s.on_gpu else (512, torch.float32)
        a, b = torch.randn(2, size, size, device=s.device).to(dtype)
        rate = 2 * size**3 / seconds_of(lambda: a @ b, s.device)
        s.row(f"matrix product {size}^3 {dtype}", f"{rate / 1e12:.1f} TFLOP/s", gemm_tflops=round(rate / 1e12, 2))


ON_CPU = "--data.eval_prompts=8 --scheduler.num_prompts=2 --scheduler.num_responses=2 --rollout.max_response_tokens=48"


def section_grpo(s: Section) -> None:
    """`train.py` on the default task: it runs, its two log-probs agree, held-out accuracy rises."""
    steps, warm = (25, 300) if s.on_gpu else (2, 2)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "train.py"), "--config", str(ROOT / "configs" / "tiny.toml"),
                   f"--run.device={s.device.type}", f"--run.steps={steps}", "--run.dir=run", "--run.eval_every=0",
                   "--run.checkpoint_every=0", f"--warm_start.steps={warm}"]  # fmt: skip
        command += [] if s.on_gpu else ON_CPU.split()
        left = s.end - time.perf_counter() + GRACE / 2
        environment = os.environ | {"TRITON_INTERPRET": "0"}  # Triton's interpreter is for the sections on kernels
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=left)
        if done.returncode:
            lines = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()
            return s.row("train.py", f"exit code {done.returncode}: {' / '.join(lines[-3:])[-400:]}", False)
        records = [json.loads(line) for line in (Path(folder) / "run" / "steps.jsonl").read_text().splitlines()]
    trained = [r for r in records if r["step"]]
    before, after = records[0]["eval"], records[-1]["eval"]
    [name] = [key for key in before if key.startswith("avg@")]
    error = math.hypot(before["standard_error"], after["standard_error"])
    rise = after[name] - before[name]
    s.row(f"held-out {name}, {steps} steps", f"{before[name]:.3f} before, {after[name]:.3f} after: "
          f"{rise / max(error, 1e-9):+.1f} standard errors", rise > 3 * error if s.on_gpu else None, "rises by 3",
          grpo_before=before[name], grpo_after=after[name])  # fmt: skip
    mean = statistics.mean(r["train"]["logprob_diff_mean"] for r in trained)
    worst = max(r["train"]["logprob_diff_max"] for r in trained)
    s.row("rollout against trainer, log-probs", f"mean {mean:.1e}, at most {worst:.1e}",
          mean < 0.05 if s.on_gpu else worst < 1e-4, "mean 0.05 (bf16)" if s.on_gpu else "1e-4",
          grpo_logprob_diff_mean=mean)  # fmt: skip
    later = trained[len(trained) // 2 :]
    speed = statistics.median(r["tokens_per_second"] for r in later)
    spent = {name: statistics.median(r["seconds"][name] for r in later) for name in ("step", "rollout", "train")}
    stages = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in spent.items())
    s.row("speed", f"{speed:,.0f} tokens/s; {stages}", grpo_tokens_s=round(speed))


SECTIONS: dict[str, tuple[Callable[[Section], None], float]] = {  # seconds, at most; first what must be right
    "machine": (section_machine, 15),
    "kernels": (section_kernels, 80),
    "varlen": (section_varlen, 25),
    "engine": (section_engine, 70),
    "judge": (section_judge, 30),
    "memory": (section_memory, 30),
    "ranks": (section_ranks, 90),
    "grpo": (section_grpo, 85),
    "steps": (section_steps, 45),
    "decode": (section_decode, 95),
    "training": (section_training, 60),
    "generate": (section_generate, 90),  # last: compiling may take all that is left
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="+", choices=tuple(SECTIONS), default=tuple(SECTIONS), help="these sections")
    parser.add_argument(
        "--plan", action="store_true", help="only list what each section checks, and its seconds at most"
    )
    parser.add_argument("--quick", action="store_true", help="machine, kernels and attention only: under 2 minutes")
    options = parser.parse_args()
    if options.quick:
        options.only = ("machine", "kernels", "varlen")
    if options.plan:
        for name in options.only:
            function, seconds = SECTIONS[name]
            print(f"{name:10}{seconds:4} s  {inspect.getdoc(function)}")
        return 0
    torch.backends.cuda.matmul.allow_tf32 = False
    results: list[tuple[str, Row]] = []
    start, chosen = time.perf_counter(), {name: SECTIONS[name] for name in SECTIONS if name in options.only}
    rest = sum(seconds for _, seconds in chosen.values())
    for name, (function, seconds) in chosen.items():
        left = SECONDS - GRACE - (time.perf_counter() - start)
        if left < 5 and options.device == "cuda":
            results.append((name, Row("section", "the run's time is used up", "skipped")))
            continue
        known = {key: value for _, row in results for key, value in row.metrics.items()}
        # A share of the time that is left, so that every section has some; small shapes end by themselves.
        limit = seconds * min(1.0, left / rest) if options.device == "cuda" else SECONDS
        rest -= seconds
        rows = run_section(function, options.device, limit, known)
        if name in ("training", "generate"):  # how long others compile is not our failure
            rows = [replace(row, state="skipped") if row.case == "time" else row for row in rows]
        results += [(name, row) for row in rows]
        failed = sum(row.state == "FAIL" for row in rows)
        spent = time.perf_counter() - start
        print(f"{spent:6.1f} s  {name}: {len(rows)} rows, {failed} failed", file=sys.stderr, flush=True)
    print_table(results, time.perf_counter() - start)
    return int(any(row.state == "FAIL" for _, row in results))


if __name__ == "__main__":
    sys.exit(main())
