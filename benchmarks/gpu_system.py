"""Whether what surrounds the engine does on a GPU what it should: a judge beside decoding, memory, several ranks.

As a script it is a rank of such runs: torchrun gpu_system.py DEVICE FOLDER.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import memory
import torch
import torch.distributed as dist
from gpu_checks import PLAIN, SMALL, build, drain, make_engine, make_sequences, model_config, same, tokens_of
from gpu_rows import Section, wait

import train
from config import load_config
from core import Sample
from job import Job
from metrics import Clock, read_records
from model import Model
from parallel import TensorParallel, World, barrier, gather_tensor
from policies import planner
from policies.memory_plan import CONTEXT
from policies.planner import Choice, Launch, ParallelismPlanner
from process import ending
from rewards.judge import Judge, JudgeConfig
from rewards.offload import token_bytes
from rollout import Engine
from settings import Config, memory_plan, model_dtype
from trainer import Trainer
from warm_start import WarmStartConfig, make_model

ALONE = World(0, 1, torch.device("cpu"))

# ---- a judge beside decoding -------------------------------------------------------------------------------------

TEMPLATE = "{question}{answer}|{response}?"
BATCH = 512  # tokens of one forward of the judge


def section_judge(s: Section) -> None:
    """A judge half of whose layers stream from the host, beside decoding: each computes what it computes alone."""
    small = WarmStartConfig(steps=0, num_layers=8, max_positions=512)
    large = replace(small, hidden_size=1024, num_layers=16, num_heads=16, num_kv_heads=4)
    count = 40 if s.on_gpu else 8
    c = model_config(256, 4, 8, 2, 512, 2000, True, head_dim=64) if s.on_gpu else SMALL
    model = build(c, s.device, torch.float32, gain=2.0)
    with tempfile.TemporaryDirectory() as folder:
        make_model(large if s.on_gpu else small, "hailstone", Path(folder) / "judge", ALONE)
        judge = open_judge(Path(folder) / "judge", s.device)
        try:
            submit(judge, count)
            expected = scores(judge.drain())
            judge.take_stats()

            def decode(beside: Callable[[], None]) -> tuple[dict[int, Sample], float]:
                engine, samples = make_engine(model, PLAIN), dict[int, Sample]()
                drain(engine, make_sequences(count, c["vocab_size"]))  # compiles, captures
                for sequence in make_sequences(count, c["vocab_size"]):
                    engine.add(sequence)
                start = time.perf_counter()
                while not engine.is_idle:
                    samples |= {sample.prompt_index: sample for sample in engine.step()}
                    beside()
                wait(s.device)
                return samples, time.perf_counter() - start

            alone, seconds = decode(lambda: None)
            found: dict[int, float] = {}
            submit(judge, count)
            mine, longer = decode(lambda: found.update(scores(judge.poll())))
            found |= scores(judge.drain())
            stats, layers = judge.take_stats(), len(judge.model.layers)
        finally:
            judge.close()
    same(s, "tokens beside a judge", tokens_of(mine), tokens_of(alone))
    worst = max(abs(found[i] - expected[i]) for i in expected)
    text = f"{len(found)} differ from those without decoding by {worst:.1e} at most"
    s.row("verdicts beside decoding, fp32", text, found.keys() == expected.keys() and worst < 1e-5, "1e-5")
    streamed = stats.streamed_bytes / 2**20
    text = (
        f"{streamed:.0f} MiB in {stats.batches} forwards, {stats.resident_layers / stats.batches:.0f} of {layers} stay"
    )
    s.row("layers streamed from the host", text, streamed > 0 and stats.batches > 1)
    slower = longer / seconds
    s.row("decoding beside a judge", f"{slower:.2f} times the seconds", judge_decode_slowdown=round(slower, 3))


def open_judge(folder: Path, device: torch.device) -> Judge:
    """Return a judge with memory for half of its layers."""
    config = JudgeConfig(str(folder), TEMPLATE, accept="y", reject="n", max_wait_seconds=0.0, batch_tokens=BATCH)
    judge = Judge(config, device, torch.float32)
    model, layers = judge.model, judge.model.layers
    room = (len(layers) // 2 + 2) * layers.layer_bytes + BATCH * token_bytes(model.shape, model.dtype)
    model.memory_gib = (model.fixed_bytes + room) / 2**30
    return judge


def submit(judge: Judge, count: int) -> None:
    for i in range(count):
        judge.submit(i, "judge", "x" * (37 * i % 200), "5", {"prompt": f"{i}+1="})


def scores(graded: list) -> dict[int, float]:
    return {key: reward.value for key, reward in graded if not reward.error}


# ---- memory ------------------------------------------------------------------------------------------------------


def section_memory(s: Section) -> None:
    """What a rank plans to hold against what it held at most, in two steps of full micro-batches; what CUDA takes."""
    for name, recompute in (("0.5B", "off"), ("0.5B", "on")) if s.on_gpu else (("nano", "on"),):
        with s.guard(f"plan of {name}, recompute {recompute}"):
            case = memory.Case(name, 1, recompute)
            if s.on_gpu:
                planned, measured = hold(case, s.device)
            else:
                plan, peaks = memory.measure(case, ALONE)
                planned, measured = plan.total, max(peaks.values())
            error = planned / measured - 1
            text = f"{planned / 2**20:,.0f} MiB planned, {measured / 2**20:,.0f} held at most: {error:+.1%}"
            metrics = {f"plan_error_{name}_{recompute}": round(error, 4)}
            s.row(f"plan of {name}, recompute {recompute}", text, abs(error) <= 0.15, "15 %", **metrics)
    if s.on_gpu:
        free, total = torch.cuda.mem_get_info()
        outside = total - free - torch.cuda.memory_reserved()
        text = f"{outside / 2**20:,.0f} MiB with its libraries and kernels; the plan has {CONTEXT / 2**20:,.0f}"
        limit = 1.5 * CONTEXT  # a run measures it, so more fails nothing
        s.aim("context of CUDA", text, outside <= limit, f"{limit / 2**20:.0f} MiB", context_mib=round(outside / 2**20))


def hold(case: memory.Case, device: torch.device) -> tuple[float, int]:
    """Take two steps on a GPU; return what torch's allocator should hold by the plan, and the most that it held."""
    config = replace(case.config, rollout=replace(case.config.rollout, kv_gib=0.25))
    [plan] = memory_plan(config, case.shape, 1, 1, device)
    others = sum(size for name, size in plan.lasting.items() if name.startswith(("CUDA context", "left free")))
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = Model(case.shape).to(device, model_dtype(config, device.type))
    world = World(0, 1, device)
    trainer = Trainer(model, config.trainer, config.loss, config.sampling, world, memory.RESPONSE, 10)
    engine = Engine(model, config.rollout, config.sampling, ())
    for step in range(2):
        memory.generate(engine)
        trainer.accumulate(memory.examples(config.trainer.tokens_per_microbatch, 2))
        trainer.update()
        engine.load_weights(model, step + 1)
    return plan.total - others, torch.cuda.max_memory_allocated() - before


# ---- several ranks -----------------------------------------------------------------------------------------------

RANKS, STEPS = 2, 3
LOSSES, BROKEN = ("loss", "grad_norm"), "rank 1 fails as it should"
RUN: dict[str, Any] = {
    "run.steps": STEPS,
    "run.eval_every": 0,
    "run.checkpoint_every": 0,
    "run.dump_rollouts": "true",
    "model.dtype": "float32",
    "loss.entropy_coef": 0.01,  # a random model has no rewards to learn from
    "data.train": "hailstone",
    "data.eval_prompts": 0,
    "scheduler.policy": "synchronous",
    "scheduler.num_prompts": 8,
    "scheduler.num_responses": 4,
    "scheduler.window_iterations": 2,
    "rollout.max_prompt_tokens": 64,
    "rollout.max_response_tokens": 64,
    "rollout.page_size": 16,
    "rollout.stop": json.dumps([*"ABCD"]),  # a random model ends most responses by one of them, so there is a tail
    "rollout.max_running": 32,
    "rollout.kv_gib": 0.05,
    "reward.num_workers": 1,
}
VARIANTS: dict[str, dict[str, Any]] = {  # each is compared with the first
    "plain": {},
    "FSDP, both ranks share training state": {"trainer.shard": 2},
    "tensor parallel 2": {"rollout.tensor_parallel": 2},
    "another size at every step": {"planner.rule": "paper"},
    "another size, weights and training state sharded": {
        "planner.rule": "paper",
        "rollout.weights": "sharded",
        "trainer.shard": 2,
    },
    "one rank trains while the other decodes": {"stream.policy": "fixed", "stream.fixed_share": 0.4},
}


def section_ranks(s: Section) -> None:
    """Two ranks by NCCL, on a CPU by gloo: sums; the same tokens and losses however the work is spread; exits."""
    if s.on_gpu and torch.cuda.device_count() < RANKS:
        for name in ("sums over the ranks", *list(VARIANTS)[1:], "a failure on one rank"):
            s.skip(name, f"needs {RANKS} GPUs")
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(WarmStartConfig(steps=0, hidden_size=128, num_layers=2, max_positions=256), "hailstone",
                   folder / "model", ALONE)  # fmt: skip
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={RANKS}"]
        command += [__file__, s.device.type, str(folder)]
        environment = os.environ | {"TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}
        left = max(s.end - time.perf_counter(), 30.0)
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=left)
        except subprocess.TimeoutExpired:  # what is there counts all the same
            done = None
        late = f"not done after {left:.0f} s; give it more by --only ranks"
        if done or (folder / "sums.json").exists():
            with s.guard("sums over the ranks"):
                report_sums(s, json.loads((folder / "sums.json").read_text()))
        else:
            s.skip("sums over the ranks", late)
        for variant in list(VARIANTS)[1:]:
            if done or all(is_over(folder / name) for name in ("plain", variant)):
                with s.guard(variant):
                    compare(s, folder / "plain", folder / variant)
            else:
                s.skip(variant, late)
    if done is None:
        return s.skip("a failure on one rank", late)
    lines = done.stderr.splitlines()
    told = [line for line in lines if BROKEN in line] or [line for line in lines if "rror" in line][-3:] or lines[-3:]
    text = f"exit code {done.returncode}: {' / '.join(told)[-300:]}"
    s.row("a failure on one rank", text, done.returncode != 0 and any(BROKEN in line for line in told))


def is_over(folder: Path) -> bool:
    path = folder / "steps.jsonl"
    return path.exists() and sum(bool(record["step"]) for record in read_records(path)) == STEPS


def report_sums(s: Section, found: dict[str, Any]) -> None:
    way = found.pop("way")
    for rows, (error, ours, plain) in found.items():
        text = f"{ours:.1f} us by {way}, all-reduce {plain:.1f} us; off by {error:.1e} of the largest"
        s.row(f"sum of {rows} x 3584 over {RANKS} ranks", text, error < 1e-2, "1e-2",
              **{f"sum_speedup_{rows.split()[0]}": round(plain / ours, 2)})  # fmt: skip


def compare(s: Section, plain: Path, other: Path) -> None:
    """Compare a run with the plain run, and say whether its variant was really at work."""
    mine, theirs = ([r for r in read_records(folder / "steps.jsonl") if r["step"]] for folder in (other, plain))
    worst = max(abs(a["train"][key] - b["train"][key]) for a, b in zip(mine, theirs, strict=True) for key in LOSSES)
    equal = sum(a == b for a, b in zip(tokens_of_steps(other), tokens_of_steps(plain), strict=True))
    text, at_work = f"tokens of {equal} of {STEPS} steps equal, losses and norms within {worst:.1e}", True
    if "stream" in mine[0]["round"]:
        streamed = sum(record["round"]["stream"]["samples"] for record in mine)
        text, at_work = f"{text}; {streamed} samples streamed", streamed > 0
    if VARIANTS[other.name].get("planner.rule"):
        sizes = [record["planner"]["size"] for record in mine]
        text, at_work = f"{text}; sizes {sizes}", len(set(sizes)) > 1
    s.row(other.name, text, at_work and equal == STEPS and worst < 1e-3, "1e-3")


def tokens_of_steps(folder: Path) -> list[list]:
    """Return [prompt, tokens of its samples] of what each step has trained."""
    files = sorted((folder / "rollouts").glob("*.jsonl"))
    steps = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    return [
        sorted([row["prompt"]["index"], [q["token_ids"] for q in row["samples"]]] for row in step) for step in steps
    ]


def time_sums(world: World, folder: Path) -> None:
    """Sum hidden states over the ranks as decoding does and by an all-reduce, on a GPU in CUDA graphs."""
    tp, on_gpu = TensorParallel(world, world.size), world.device.type == "cuda"
    found: dict[str, Any] = {
        "way": "symmetric memory" if tp.symmetric is not None else "NCCL" if on_gpu else "shared memory"
    }
    for rows in (1, 32):
        x = torch.randn(rows, 3584, device=world.device, dtype=torch.bfloat16 if on_gpu else torch.float32)
        exact = gather_tensor(world, x).float().sum(0)
        error = (tp.reduce(x.clone()).float() - exact).abs().max() / exact.abs().max()
        calls = partial(tp.reduce, x), partial(dist.all_reduce, x, group=world.tensors)
        found[f"{rows} rows"] = error.item(), *(microseconds(call, world) for call in calls)
    if world.is_main:
        (folder / "sums.json").write_text(json.dumps(found))


def microseconds(call: Callable[[], Any], world: World, turns: int = 50) -> float:
    """Return the mean time of a call that all ranks make, alike often."""
    for _ in range(3):
        call()
    if world.device.type == "cuda":
        wait(world.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's watchdog asks for events meanwhile
            call()
        call = graph.replay
    barrier(world)
    start = time.perf_counter()
    for _ in range(turns):
        call()
    wait(world.device)
    return 1e6 * (time.perf_counter() - start) / turns


def next_size(p: ParallelismPlanner, kind: str, launch: Launch, is_first: bool) -> Choice:
    return Choice(p.sizes[(p.sizes.index(p.tracks[kind].size) + 1) % len(p.sizes)], "the next")


def main(device: str, folder: str) -> int:
    """Time sums, train all variants; in one more run rank 1 fails as it learns, while the other waits for it."""

    # PR_SET_PDEATHSIG: torchrun gives each rank a session of its own, so ranks would outlive a torchrun that is killed.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)

    def work(world: World) -> None:
        time_sums(world, Path(folder))
        planner.RULES["paper"] = next_size
        for name, more in (VARIANTS | {"failing": {}}).items():
            if name == "failing" and world.rank == 1:
                patch.object(Job, "learn", side_effect=AssertionError(BROKEN)).start()
            run = Path(folder) / name
            values = RUN | more | {"run.dir": run, "run.device": device, "model.path": f"{folder}/model"}
            config = load_config(Config, None, [f"--{key}={value}" for key, value in values.items()])
            run.mkdir(exist_ok=True)
            train.train(config, world, resume=False)

    return ending.exit_code(work, device, 60.0, Clock())


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
