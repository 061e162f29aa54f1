"""Runs benchmarks, keeps the last line of each with commit, date and machine, and prints documents from what is kept.

    python benchmarks/results.py list                   what there is, and what is older than the code
    python benchmarks/results.py run [NAME... | all]    without a name: what is missing or old
    python benchmarks/results.py run all --quick        each with --quick; keeps nothing
    python benchmarks/results.py write                  fill the blocks of README.md and docs/
    python benchmarks/results.py check                  exit code 1 when a block or a result is not up to date
    python benchmarks/results.py spare NAME... --why "…"   keep results current whose runs a change left as they were

`results/NAME.json` holds a run. A result is old when a file that it measures has changed since; comments, docstrings
and layout do not count, nor does what `spared_results.json` says, with the reason, to be nothing that this result ran:
a branch for another CPU, say. An old result needs a reason in `old_results.json`. Until the next run the reason stands
behind its numbers or, where a page has a block `<!-- results:notes NAMES -->`, once there for sentences and cells.

A block is `<!-- results:NAME TEMPLATE -->text<!-- end -->`; NAME may also be the path of any JSON file, or `all`,
whose `rows` have `command` and `claim` of every benchmark. The template is `str.format` with the fields of the JSON
line, and `commit`, `date`, `minutes`, `command`, `output` and those of `machine`. A template that begins on a new line
makes a block of lines, where `@rows | {name} | {seconds:.1f} |` is repeated for each item of the list `rows`.
"""

import argparse
import ast
import hashlib
import json
import os
import platform
import re
import string
import subprocess
import sys
import time
import tomllib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS, OLD = Path("benchmarks/results"), Path("benchmarks/old_results.json")
SPARED = Path("benchmarks/spared_results.json")
BLOCK = re.compile(r"<!-- results:(\S+)(.*?)-->(.*?)<!-- end -->", re.DOTALL)

ENGINE = (
    *("rollout.py", "engine/*.py", "engine/native.cpp", "attention.py", "sampling.py", "model.py"),
    "process/threads.py",
)
ROUND = (*ENGINE, "rounds.py", "scheduler.py", "policies/placement.py", "parallel.py")
TRAINING = ("buffer.py", "trainer.py", "loss.py", "learning.py", "weights/sharding.py", "weights/lora.py")
REWARDS = ("reward.py", "rewards/*.py")
STREAM = ("policies/scale_down.py", "policies/step_times.py", "overlap/streamed.py")
ENDLESS = ("policies/flow.py", "overlap/endless.py", "overlap/pools.py", "overlap/weights.py")
SIMULATOR = (
    *("simulate.py", "simulation/costs.py", "simulation/episodes.py", "simulation/drafts.py", "simulation/workload.py"),
    *("engine/pages.py", "envs/latency.py", "rewards/timeouts.py", "scheduler.py", "configs/simulate/*.toml"),
    *(
        f"policies/{name}.py"
        for name in ("flow", "placement", "planner", "replica", "scale_down", "split", "step_times")
    ),
)
# Of figures/mux_*.py: jobs that share pools.
SHARED_POOLS = (
    *("simulation/cluster.py", "simulation/mux_jobs.py", "simulation/mux_sync.py"),
    *("policies/group.py", "policies/admission.py", "policies/regroup.py"),
)
OF_FIGURES = {  # that are of other files than their kind
    **dict.fromkeys(
        ("mux_micro", "mux_tail", "mux_async"), (*SIMULATOR, "simulation/mux_group.py", "policies/group.py")
    ),
    "mux_theorem": ("simulation/mux_orders.py", "policies/group.py"),
    "mux_pair": ("policies/group.py", "policies/admission.py"),
    "mux_memory": ("policies/memory_plan.py", "engine/pages.py"),
}
RUN = ("train.py", "job.py")
DEFAULT_RUN = (*ROUND, *TRAINING, "policies/flow.py", "overlap/*.py", *RUN, "warm_start.py", "configs/rollflash.toml")
END_TO_END = (
    *(*ROUND, *TRAINING, *REWARDS, *STREAM, *RUN, "policies/planner.py", "benchmarks/texts.py"),
    *("policies/drafts.py", "overlap/drafting.py"),
)
SIMULATED = Path("figures/paper.json")  # what figures/*.py have simulated


@dataclass(frozen=True)
class Benchmark:
    """A script, its arguments, the files that its numbers are about beside it, and its row in docs/results.md."""

    command: str
    measures: tuple[str, ...]
    claim: str = ""  # a template
    keeps: bool = False  # it keeps its result itself, run by run

    @property
    def files(self) -> tuple[str, ...]:
        script = self.command.split()[0]
        return (script, *companions(script), *self.measures)


def companions(script: str) -> list[str]:
    """Return the benchmarks that a script imports: what it measures is in them, too."""
    names = list[str]()
    for node in ast.walk(ast.parse((ROOT / script).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == "benchmarks":
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [node.module] if node.module and not (ROOT / f"{node.module}.py").exists() else []
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    files = (f"benchmarks/{name}.py" for name in dict.fromkeys(names) if name != Path(__file__).stem)
    return [file for file in files if (ROOT / file).exists() and file != script]


# In the order in which they run: what docs/results.md claims first comes first.
BENCHMARKS = {
    "end_to_end": Benchmark(
        "benchmarks/end_to_end.py --ranks 4",
        END_TO_END,
        "all parts added one by one ([table](#all-parts-together)), {ranks} ranks on {cores} cores: {speedup_all:.1f} "
        "x our own synchronous step ({speedup_all_tokens:.2f} x its trained tokens a second, since races keep the "
        "shorter responses), {speedup_all_paper:.1f} x one that grades at its end, as the paper's baseline; "
        "TRL's GRPOTrainer, on the same prompts, graders and cores, took {ratio_trl:.0f} times as long as all parts, "
        "and {ratio_trl_synchronous:.0f} times as long as our synchronous step, whose responses are as long as its own",
    ),
    "end_to_end_2": Benchmark(
        "benchmarks/end_to_end.py --ranks 2",
        END_TO_END,
        "the same with {ranks} ranks on {cores} cores: {speedup_all:.1f} x ({speedup_all_tokens:.2f} x) and "
        "{speedup_all_paper:.1f} x; TRL "
        "{ratio_trl:.0f} and {ratio_trl_synchronous:.0f} times as long",
    ),
    "trl": Benchmark(
        "benchmarks/trl.py",
        (*ROUND, *TRAINING, *RUN, "configs/tiny.toml"),
        "the default task, 256 samples a step, model, prompts, limit and loss equal: ours {samples_per_s_ours:.0f} "
        "samples/s, TRL 1.16, with the best of three numbers of processes, {samples_per_s_trl:.0f} samples/s "
        "(medians); all steps together {ratio:.1f} x (pairs {ratio_of_pairs[0]:.1f} to {ratio_of_pairs[2]:.1f}), with "
        "tail batching {ratio_tail_batching:.1f} x",
    ),
    "tail_batching": Benchmark(
        "benchmarks/tail_batching.py",
        ROUND,
        "tail batching against waiting for all, eta 1.25: rollout {rollout_speedup_trace:.1f} x with long-tailed "
        "lengths given by a trace ({engine_step_ratio_trace:.1f} x fewer engine steps), {rollout_speedup_task:.1f} x "
        "on the default task, whole steps {step_speedup_task:.1f} x; the same prompts trained, {prompts_lost} lost, "
        "{prompts_doubled} twice, but of the trace {contenders[3][tokens]:,} tokens for {contenders[0][tokens]:,}, "
        "since races keep the shorter responses",
    ),
    "asynchrony": Benchmark(
        "benchmarks/asynchrony.py",
        (*ROUND, *TRAINING, *ENDLESS, *RUN, "configs/tiny.toml"),
        "rollout that runs a batch ahead of training, on {ranks} ranks, with long-tailed lengths: "
        "{speedup_depth1:.2f} x the synchronous step in turns, {speedup_split_best:.2f} x with ranks that only train; "
        "no token older than {max_lag} updates, {samples_lost} samples lost; seconds until the default task has an "
        "accuracy of {score}, synchronous over in turns, {seconds_to_score_ratio:.2f} "
        "([tables](#asynchronous-training))",
    ),
    "time_to_score": Benchmark(
        "benchmarks/time_to_score.py",
        (*ROUND, *TRAINING, *STREAM, *RUN, "policies/*.py", "overlap/*.py", "environments.py", "envs/*.py")
        + ("configs/tiny.toml", "configs/guess.toml", "configs/relay.toml", "warm_start.py", "benchmarks/trl.py")
        + ("benchmarks/taking_turns.py",),
        "seconds until the default task is learnt, to a held-out accuracy of {score:.2f}, medians of each seed's "
        "ratio: the best of {compared} ways, {best}, is {seconds_ratio_best_over_sync:.2f} x as fast as synchronous "
        "training (by seed {best_by_seed}, {cpu}); TRL's GRPOTrainer ({trl_cpu}) takes "
        "{trl_reached:|at least }{seconds_ratio_trl_over_best:.1f} times the seconds of {trl_best} (by seed "
        "{trl_by_seed}), and {seconds_ratio_trl_over_sync:.1f} times those of synchronous training "
        "([leaderboard](#time-to-a-score))",
        keeps=True,
    ),
    "drafts": Benchmark(
        "benchmarks/drafts.py",
        (*ROUND, "policies/drafts.py", "overlap/drafting.py", "overlap/ahead.py", *RUN, "configs/tiny.toml")
        + ("configs/relay.toml", "simulation/drafts.py"),
        "responses drafted from older weights' texts, long rounds of tail batching on the default task: "
        "{long_round_engine_steps_ratio:.2f} of the engine steps, {long_round_speedup:.2f} x as fast, whole steps "
        "{step_speedup:.2f} x; a source that is always wrong costs {worst_source_cost:.1%} ([page](drafts.md))",
    ),
    "slow_environments": Benchmark(
        "benchmarks/slow_environments.py",
        (*ROUND, "environments.py", "envs/episodes.py", "envs/pool.py", "envs/latency.py"),
        "environments that take normal(10, sigma) / 100 seconds a turn, {prompts} x {responses} episodes of {turns}: "
        "rollout without a turn barrier {speedup_async_sigma1:.2f}, {speedup_async_sigma5:.2f} and "
        "{speedup_async_sigma10:.2f} x for sigma 1, 5 and 10; the same samples trained in a small run on the clock of "
        "engine steps: {samples_trained_equal}; where "
        "{slow} are slow and {stop} never answer, 36 x 9 for 32 x 8 {speedup_redundant:.1f} x; pages kept over turns "
        "{keep_over_recompute_8:.2f} x for turns of 8 tokens, {keep_over_recompute_200:.2f} x for 200 "
        "([tables](#slow-environments))",
    ),
    "reward": Benchmark(
        "benchmarks/reward.py",
        (*REWARDS, *ROUND, *TRAINING, "benchmarks/texts.py"),
        "step time with programs graded as responses end {speedup_async:.2f} x, with limits that adapt another "
        "{speedup_adaptive:.2f} x ([table](#rewards)); {rewards_changed} rewards changed",
    ),
    "stream": Benchmark(
        "benchmarks/stream.py",
        (*STREAM, *ENGINE, *TRAINING, "rounds.py", "parallel.py"),
        "long rounds with half of the ranks leaving to train: {speedup_adaptive_ours:.2f} x by `estimate`, "
        "{speedup_adaptive_paper:.2f} x by the paper's rule, training {train_share:.0%} of a step; the gradient "
        "differs by {gradient_rel_error:.0e}",
    ),
    "elastic_tp": Benchmark(
        "benchmarks/elastic_tp.py",
        (
            *ENGINE,
            *(f"policies/{name}.py" for name in ("planner", "replica", "step_times")),
            "parallel.py",
            "weights/sharding.py",
        ),
        "the tensor-parallel size of each round chosen by `predict`, {ranks} ranks on {cores} cores: "
        "{regret_vs_best_fixed:+.0%} time against the best fixed size in hindsight",
    ),
    "validate_simulator": Benchmark(
        "benchmarks/validate_simulator.py",
        (
            "simulate.py",
            "policies/replica.py",
            "simulation/*.py",
            "profiler.py",
            "policies/planner.py",
            *STREAM,
            *ROUND,
        ),
        "simulated against real step seconds, in the mean: {mean_error_synchronous:.0%} off for synchronous steps, "
        "{mean_error_tail_batching:.0%} with tail batching, {mean_error_elastic:.0%} with elastic tensor parallelism,"
        " {mean_error_stream:.0%} with stream training",
    ),
    "control_path": Benchmark(
        "benchmarks/control_path.py",
        ("simulate.py", "policies/placement.py", "policies/replica.py", "scheduler.py", "rounds.py", "parallel.py"),
        "a response of the simulator takes {growth:.1f} x the seconds on {largest:,} GPUs as on 16; {steps} steps of "
        "{batch} x 8 responses on 1,024 GPUs take {seconds_many_steps:.0f} s of one core; to exchange what "
        "{most_ranks} ranks have to tell takes two processes {exchange_share:.1%} of a rollout "
        "([tables](#the-control-path))",
    ),
    "engine": Benchmark(
        "benchmarks/engine.py",
        (*ENGINE, "policies/drafts.py", "warm_start.py"),
        "decode of a 0.5B shape at {roofline_fraction_b1:.0%}, {roofline_fraction_b8:.0%}, "
        "{roofline_fraction_b32:.0%}, {roofline_fraction_b128:.0%} of the measured roofline for 1, 8, 32, 128 rows; "
        "equal lengths at least {ratio_generate_equal_min:.2f} x `generate`; long-tailed lengths on a small model "
        "{ratio_generate_longtail:.1f} x `generate` in static batches of the fastest size and "
        "{ratio_generate_batch_longtail:.1f} x `generate_batch`; on the warm-started model, which ends by itself, "
        "{ratio_generate_trained:.1f} x `generate`, with drafts from older texts {ratio_generate_trained_drafts:.1f} x "
        "([all of it](../benchmarks/results/engine_cpu.md))",
    ),
    "peers": Benchmark(
        "benchmarks/peers.py",
        (*ENGINE, "policies/drafts.py", "benchmarks/engine.py", "benchmarks/peers/contender.py"),
        "a 0.5B shape in fp32, our tokens/s over OpenVINO GenAI's, for equal lengths, long-tailed ones and one row: "
        "{ratio_openvino_equal:.2f}, {ratio_openvino_longtail:.2f}, {ratio_openvino_one:.2f}, both with drafts "
        "{ratio_drafts_openvino_equal:.2f}, {ratio_drafts_openvino_longtail:.2f}, {ratio_drafts_openvino_one:.2f}; "
        "over vLLM's {ratio_vllm_equal:.2f}, {ratio_vllm_longtail:.2f}, {ratio_vllm_one:.2f} ([table](#other-engines))",
    ),
    "training": Benchmark(
        "benchmarks/training.py",
        ("trainer.py", "loss.py", "model.py", "attention.py", "sampling.py", "benchmarks/engine.py")
        + ("benchmarks/training_sides.py",)
        + ("engine/gradients.py", "engine/native.py", "engine/native.cpp", "parallel.py", "process/threads.py"),
        "training step of a 0.5B shape with fewer layers, long-tailed lengths: {tokens_per_s:,} tokens/s, "
        "{training_roofline_fraction:.0%} of the measured roofline, {training_ratio_hf:.2f} x transformers on padded "
        "batches at its fastest, {training_ratio_hf_tiny:.2f} x with a tiny model ([table](#the-training-step))",
    ),
    "waiting": Benchmark(
        "benchmarks/waiting.py",
        (*ENGINE, "trainer.py", "loss.py", "benchmarks/engine.py", "benchmarks/training_sides.py"),
        "threads that spin briefly, against libgomp's default, beside a busy core: steps {busy_faster_least:.1f} to "
        "{busy_faster_most:.1f} x as fast; alone at most {alone_slower_most:.0%} slower ([table](#beside-other-work))",
    ),
    "cold_start": Benchmark(
        "benchmarks/cold_start.py",
        DEFAULT_RUN,
        "the default run from an empty folder, compilation and warm start included: {seconds_compiled:.0f} s with "
        "compiled kernels, {seconds_plain:.0f} s without: {cold_start_speedup:.2f} x",
    ),
    "draw": Benchmark(
        "benchmarks/draw.py",
        ("sampling.py", "engine/kernels.py", "engine/native.py", "engine/native.cpp", "benchmarks/engine.py"),
        "tokens drawn by a race: weights one update older draw another token in {lags[0][race]:.2%} of all contexts, "
        "by inverse CDF in {lags[0][inverse]:.2%} ([tables](#draws))",
    ),
    "profile_decode": Benchmark("benchmarks/profile_decode.py", (*ENGINE, "benchmarks/engine.py")),
    "faults": Benchmark(
        "benchmarks/faults.py",
        (
            *(*RUN, "checkpoint.py", "process/watchdog.py", "envs/pool.py", "envs/episodes.py"),
            *(*STREAM, *ENDLESS),
        ),
        "{injected} faults in runs of 2 and 4 ranks (ranks killed, stopped, cut off at every stage; no room or no "
        "right to write a checkpoint; checkpoints damaged; NaN; reward workers killed; environments that die, freeze, "
        "raise and hang): {resumed} resumed to the same losses, {clear_errors} ended in one clear error and then "
        "resumed, {recorded} were recorded; {hangs} hangs, {prompts_lost} prompts lost, {prompts_doubled} doubled; the "
        "slowest that ended a run took {slowest_seconds:.1f} s, {timeout_seconds:g} of them the configured time-out "
        "([all of it](../benchmarks/results/faults_cpu.md))",
    ),
    "memory": Benchmark(
        "benchmarks/memory.py",
        ("policies/memory_plan.py", "model.py", "attention.py", "sampling.py", *TRAINING, "parallel.py"),
        "the memory that a rank plans against what its tensors take, tiny and 0.5B shapes, training state and the "
        "rollout's weights whole and over two ranks, with and without recomputation: at most {plan_max_error:.0%} off "
        "([table](running.md#memory)); the exchange of 256k tokens takes {exchange_packed_mib:.1f} MiB a rank, "
        "{exchange_tuples_mib:.0f} MiB where every rank gets all samples as Python numbers",
    ),
    "checkpoints": Benchmark(
        "benchmarks/checkpoints.py",
        ("checkpoint.py", "trainer.py"),
        "a checkpoint of {parameters:,} parameters from 2 ranks: training stands still for {pause_seconds_shard1:.2f} s"
        " of the {write_seconds_shard1:.1f} s until it is whole; with sharded masters for {pause_seconds_shard2:.2f} s "
        "of {write_seconds_shard2:.1f} s",
    ),
    "mux": Benchmark(
        "benchmarks/mux.py",
        (*ROUND, *TRAINING, *RUN, "mux.py", "process/group_*.py", "process/permits.py", "policies/group.py")
        + tuple(f"overlap/{name}.py" for name in ("phases", "pools", "tail", "weights")),
        "two jobs that share a core that trains and a core that decodes: {throughput_over_solo_disaggregated:.2f} x "
        "the throughput of each alone on them (at most {ceiling:.2f}), {throughput_over_colocated:.2f} x that of "
        "co-located jobs; runs with the same losses, bit by bit: {trajectories_equal:.0%}; a warm switch, in which "
        "nothing moves on a CPU, takes {switch_warm_over_cold:.1%} of a cold start, permits "
        "{permit_overhead_fraction:.1%} of a job's steps "
        "([table](#several-jobs-on-two-pools))",
    ),
    "mux_faults": Benchmark(
        "benchmarks/mux_faults.py",
        (*RUN, "mux.py", "process/group_*.py", "process/permits.py", "policies/group.py", "overlap/phases.py"),
        "{faults} faults in a group of three jobs, one of them co-located (ranks and jobs killed and stopped in every "
        "phase, the server killed and stopped, its socket removed, lines that are no messages, wrong secrets): "
        "{ended_as_told} ended as they should, {hangs} hangs; all jobs went on to the losses that they have alone, bit "
        "by bit: {equal:.0%} ([table](mux.md#when-something-ends-or-hangs))",
    ),
    "mux_sync": Benchmark(
        "benchmarks/mux_sync.py",
        ("overlap/weights.py", "overlap/pools.py", "parallel.py"),
        "new weights from training ranks to decoding ranks over a slow link: {copies_in_parts:.2f} times the model's "
        "bytes cross it; {speedup_2_2:.1f} x a flat broadcast with 2 -> 2 ranks, {speedup_1_3:.1f} x with 1 -> 3 "
        "([table](#new-weights-over-a-slow-link))",
    ),
    "learning": Benchmark("figures/learning.py", DEFAULT_RUN),
    "adapters": Benchmark(
        "figures/adapters.py",
        (*ROUND, *TRAINING, *RUN, "warm_start.py", "configs/tiny.toml", "configs/lora.toml"),
    ),
    "distillation": Benchmark(
        "figures/distillation.py --again",  # else it draws what is stored
        (*ROUND, *TRAINING, "rewards/offload.py", "rewards/teacher.py", *RUN, "warm_start.py")
        + ("configs/tiny.toml", "configs/distill.toml"),
    ),
    "accuracy": Benchmark(
        "figures/accuracy.py",
        (*ROUND, *TRAINING, *STREAM, "policies/planner.py", *RUN, "warm_start.py", "configs/tiny.toml"),
    ),
    "asynchrony_learning": Benchmark(
        "figures/asynchrony_learning.py",
        (*ROUND, *TRAINING, "policies/flow.py", "overlap/*.py", *RUN, "warm_start.py", "configs/tiny.toml"),
    ),
    "environments_learning": Benchmark(
        "figures/environments_learning.py",
        (
            *(*ROUND, *TRAINING, "environments.py", "envs/*.py", *RUN, "warm_start.py"),
            *("configs/guess.toml", "configs/relay.toml", "configs/lake.toml", "configs/bandit.toml"),
        ),
    ),
    "soak": Benchmark(
        "benchmarks/soak.py --steps 4000",
        (*RUN, "checkpoint.py", *ROUND, *TRAINING, *REWARDS, *STREAM),
        "tail batching, stream training, sandbox and checkpoints, on {cores} cores: in 1,000 steps memory grows by "
        "{memory_slope:.1%} in the worst process, open files by {files_slope:.1%}; step time changes by "
        "{step_time_slope:+.1%}, processor time of a step by {cpu_slope:+.1%}; {processes_left} processes and "
        "{temporary_files_left} temporary files are left ([all of it](../benchmarks/results/soak_cpu.md))",
    ),
}


# ---- what a file does ----------------------------------------------------------------------------------------------


def outline(node: Any) -> str:
    """Return the syntax tree as text, without strings that stand alone; the same for every version of Python."""
    if isinstance(node, ast.AST):
        fields = ((name, value) for name, value in ast.iter_fields(node) if name not in ("kind", "type_comment"))
        inner = (f"{name}={outline(value)}" for name, value in fields if value is not None and value != [])
        return f"{type(node).__name__}({','.join(inner)})"
    if isinstance(node, list):
        kept = (item for item in node if not (isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant)))
        return f"[{','.join(map(outline, kept))}]"
    return repr(node)


def fingerprint(path: Path) -> str:
    """Return a hash of what a file says to the machine; `missing` for one that is not there."""
    return hash_of(path.read_text(encoding="utf-8"), path.suffix) if path.exists() else "missing"


@cache
def hash_of(text: str, suffix: str) -> str:
    if suffix == ".py":
        text = outline(ast.parse(text))
    elif suffix == ".toml":
        text = json.dumps(tomllib.loads(text), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def fingerprints(name: str) -> dict[str, str]:
    return prints_of(BENCHMARKS[name].files)


def simulators(figure: str) -> dict[str, str]:
    """Return the fingerprints of what a simulated figure is made of."""
    return prints_of(OF_FIGURES.get(figure, SHARED_POOLS if figure.startswith("mux_") else SIMULATOR))


def prints_of(patterns: Sequence[str]) -> dict[str, str]:
    files = (path for pattern in patterns for path in sorted(ROOT.glob(pattern)) or [ROOT / pattern])
    return {str(path.relative_to(ROOT)): fingerprint(path) for path in files}


def sealed(data: dict[str, Any]) -> dict[str, Any]:
    """Return `data` with a checksum of all else that is in it, so that a number edited by hand is seen."""
    rest = json.loads(json.dumps({key: value for key, value in data.items() if key != "checksum"}))
    return rest | {"checksum": hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()[:16]}


def load(path: Path) -> dict[str, Any]:
    """Read a result; end the program with one line if the file is damaged."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if {"measured", "result", "seconds"} <= data.keys():
            return data
    except (ValueError, AttributeError):
        pass
    sys.exit(f"error: {path} is damaged; take it from git again, or run its benchmark")


def outdated(name: str) -> list[str]:
    """Return the measured files that have changed since the result was taken; all of them where there is none."""
    return [*changes(name)]


def changes(name: str) -> dict[str, list[str | None]]:
    """Return the fingerprints of measured files that have changed since the result was taken: then and now."""
    path, now = ROOT / RESULTS / f"{name}.json", fingerprints(name)
    then = load(path)["measured"] if path.exists() else {}
    for change in spared():  # in their order: each begins where others ended
        for file, (before, after) in change["files"].items() if name in change["results"] else ():
            if then.get(file) == before != now.get(file):  # not where it was taken back
                then[file] = after
    return {file: [then.get(file), now[file]] for file in now if now[file] != then.get(file)}


def spared() -> list[dict[str, Any]]:
    """Return changes that left alone what some results ran, with the fingerprints of files before and after."""
    path = ROOT / SPARED
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


def spare(names: Sequence[str], why: str) -> list[str]:
    """Write down that what has changed since these results is nothing that they ran; return what cannot be."""
    if known := [name for name in names if name in reasons()]:
        return [f"{', '.join(known)}: old already, as {OLD} says: run it"]
    files: dict[str, list[str | None]] = {}
    for name in names:
        for file, change in changes(name).items():
            if None in change:
                return [f"{name} has not measured {file}: run it"]
            if files.setdefault(file, change) != change:
                return [f"{file} has changed more since {name} than since the others: spare it by itself"]
    if not files:
        return ["nothing has changed since these results"]
    kept = [*spared(), {"why": why, "results": [*names], "files": files}]
    (ROOT / SPARED).write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{SPARED}: {', '.join(files)} did not change what {', '.join(names)} ran")
    return []


def reasons() -> dict[str, str]:
    """Return what each result that is known to be old was measured before."""
    return json.loads((ROOT / OLD).read_text(encoding="utf-8"))


# ---- running -------------------------------------------------------------------------------------------------------


def git(*arguments: str) -> str:
    """Return what git prints, or nothing where this is no clone."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def committed(files: Sequence[str]) -> str:
    """Return the commit that `files` are of. Raises RuntimeError when they have changed since."""
    if dirty := git("status", "--porcelain", "--", *files):
        raise RuntimeError(f"commit what is measured first: {', '.join(dirty.split()[1::2])}")
    return git("rev-parse", "HEAD") or "unknown"


VECTORS = {"amx_tile": "AMX", "avx512f": "AVX-512", "avx2": "AVX2"}  # widest first: CPUs of one name differ in them


def machine() -> dict[str, Any]:
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    names, flags = (re.findall(rf"{name}\s*: (.*)", text) or [""] for name in ("model name", "flags"))
    widest = next((f" ({name})" for flag, name in VECTORS.items() if flag in flags[0].split()), "")
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": (names[0] or platform.processor()) + widest,
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "torch": version("torch"),
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 1),  # of other programs, before the run
    }


def run(name: str, quick: bool) -> None:
    """Run a benchmark and keep its result. Raises RuntimeError when it fails or the code is not the commit's."""
    before, here = fingerprints(name), machine()
    commit = "quick" if quick else committed(list(before))
    command = BENCHMARKS[name].command + " --quick" * quick
    print(f"---- python {command}", flush=True)
    start, lines = time.time(), []
    with subprocess.Popen([sys.executable, *command.split()], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            lines.append(line.rstrip().replace(f"{ROOT}/", ""))  # paths of this machine tell others nothing
            print(lines[-1], flush=True)
    if process.returncode:
        raise RuntimeError(f"exit code {process.returncode}, nothing is kept")
    if fingerprints(name) != before:
        raise RuntimeError("what it measures changed while it ran, nothing is kept")
    try:
        result = json.loads(lines[-1])
    except (IndexError, ValueError):
        raise RuntimeError("its last line is no JSON, nothing is kept") from None
    kept = {
        "command": f"python {command}",
        "commit": commit,
        "date": time.strftime("%Y-%m-%d", time.gmtime(start)),
        "seconds": round(time.time() - start),
        "machine": here,
        "measured": before,
        "result": result,
        "output": lines[:-1],
    }
    if quick:
        return
    path = ROOT / RESULTS / f"{name}.json"
    if not BENCHMARKS[name].keeps:
        gone = lacking(result, load(path)["result"]) if path.exists() else []
        path.with_suffix(".new").write_text(json.dumps(sealed(kept), indent=1) + "\n", encoding="utf-8")
        path.with_suffix(".new").replace(path)
        if gone:
            what = f"kept, but without {', '.join(gone)}, which the result before has"
            raise RuntimeError(f"{what}: look whether that may go")
    elif outdated(name):
        return  # some of its runs are of other code
    left = {other: reason for other, reason in reasons().items() if other != name}
    (ROOT / OLD).write_text(json.dumps(left, indent=1) + "\n", encoding="utf-8")


def lacking(new: Mapping[str, Any], old: Mapping[str, Any]) -> list[str]:
    """Return the numbers that the old result has and the new one could not measure, because a peer was not there."""
    return [key for key, value in new.items() if value is None and old.get(key) is not None]


# ---- documents -----------------------------------------------------------------------------------------------------


class Cells(string.Formatter):
    """`str.format` with an empty text for what was not measured, and a space before a percent sign.

    `{field:one|other}` is one text or the other, as the field is true or not.
    """

    def format_field(self, value: Any, spec: str) -> str:
        if isinstance(value, bool) and "|" in spec:
            return spec.split("|")[not value]
        text = "" if value is None else super().format_field(value, spec)
        return text.replace("%", " %") if spec.endswith("%") else text


def claimed() -> list[str]:
    return [n for n, b in BENCHMARKS.items() if b.claim and (ROOT / RESULTS / f"{n}.json").exists()]


def fields(name: str) -> dict[str, Any]:
    """Return what a template may name: the fields of a result, or of any JSON file, or all claims as `rows`."""
    if name == "all":
        return {"rows": [fields(n) | {"claim": fill(n, BENCHMARKS[n].claim)} for n in claimed()]}
    if name.endswith(".json"):
        values = json.loads((ROOT / name).read_text(encoding="utf-8"))
        return {"rows": values} if isinstance(values, list) else values
    data = load(ROOT / RESULTS / f"{name}.json")
    known = data["machine"] | data["result"] | {key: data[key] for key in ("command", "date")}
    minutes = data["seconds"] and data["seconds"] / 60
    return known | {"commit": data["commit"][:7], "minutes": minutes, "output": "\n".join(data["output"])}


def notes(names: Sequence[str]) -> str:
    """Return a list of the results that are old, by what has changed since: their commands and commits."""
    old, alike = reasons(), defaultdict[str, list[str]](list)
    for name in filter(old.__contains__, names):
        alike[old[name]].append(f"`{BENCHMARKS[name].command}` ({fields(name)['commit']})")
    lines = [f"- {', '.join(results)}: {reason}" for reason, results in alike.items()]
    head = "Older than the code, and what has changed since:", ""
    return "\n".join(("", *head, *lines, "")) if lines else ""


def fill(name: str, template: str, note: bool = False) -> str:
    """Return the text of a block; with `note` it says after its numbers why they are old."""
    if name in BENCHMARKS and not (ROOT / RESULTS / f"{name}.json").exists():
        return "\nNot measured yet.\n" if template.startswith("\n") else "not measured yet"
    known, cells = fields(name), Cells()
    lines: list[str] = []
    for line in template.strip().splitlines():
        each, _, rest = line.partition(" ")
        if each.startswith("@"):
            lines += [cells.vformat(rest, (), {**known, **item}) for item in known[each[1:]]]
        else:
            lines.append(cells.vformat(line, (), known))
    said = f"easured at commit {known['commit']}, before {reasons()[name]}" if note and name in reasons() else ""
    if not template.startswith("\n"):
        return lines[0] + f" (m{said})" * bool(said)
    return "\n" + "\n".join([*lines, *(["", f"(M{said}.)"] if said else [])]) + "\n"


def filled(path: Path) -> str:
    """Return a document with all its blocks filled anew. Raises ValueError for a template that its file cannot fill."""
    text = path.read_text(encoding="utf-8")
    noted = [name for kind, names, _ in BLOCK.findall(text) if kind == "notes" for name in names.split()]
    noted = [each for name in noted for each in (claimed() if name == "all" else [name])]

    def replace(match: re.Match) -> str:
        name, template, _ = match.groups()
        note = name not in noted or template.startswith("\n")
        try:
            inner = notes(noted) if name == "notes" else fill(name, template, note)
            return f"<!-- results:{name}{template}-->{inner}<!-- end -->"
        except (KeyError, IndexError, TypeError, ValueError, OSError) as error:
            where = path.relative_to(ROOT)
            raise ValueError(f"{where}: results:{name}: {type(error).__name__}: {error}") from error

    return BLOCK.sub(replace, text)


def documents() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / RESULTS).glob("*.md"))]


def write() -> list[str]:
    """Fill the documents; return which could not be, and why."""
    failed = []
    for path in documents():
        try:
            text = filled(path)
        except ValueError as error:
            failed.append(f"{error}: run the benchmark, or correct the template")
            continue
        if text != path.read_text(encoding="utf-8"):
            path.write_text(text, encoding="utf-8")
            print(f"filled {path.relative_to(ROOT)}")
    return failed


def simulated_problems() -> list[str]:
    """Return which simulated figures are not of the code as it is."""
    path = ROOT / SIMULATED
    if not path.exists():
        return []
    data = json.loads(path.read_text(encoding="utf-8"))
    found = [] if data == sealed(data) else [f"{SIMULATED} was edited by hand: make figures"]
    drawn: dict[str, dict] = {name: {} for name, kept in data.items() if isinstance(kept, dict) and "figure" in kept}
    for name, then in (drawn | data.get("measured", {})).items():
        now = simulators(name)
        if changed := [file for file in now.keys() | then.keys() if now.get(file) != then.get(file)]:
            found.append(f"{SIMULATED}: {name} is older than {', '.join(sorted(changed))}: run figures/{name}.py")
    return found


def problems() -> list[str]:
    """Return what is not up to date, with the remedy."""
    found, old = simulated_problems(), reasons()
    for path in sorted((ROOT / RESULTS).glob("*.json")):
        data = load(path)
        if data != sealed(data) and ("checksum" in data or path.stem not in old):  # the first ones had none
            found.append(f"{path.relative_to(ROOT)} was edited by hand: run it again")
    for name in sorted({path.stem for path in (ROOT / RESULTS).glob("*.json")} | old.keys()):
        if name not in BENCHMARKS:
            found.append(f"{name} is no benchmark of benchmarks/results.py")
        elif (changed := outdated(name)) and name not in old:
            remedy = f"run `python benchmarks/results.py run {name}`, or say in {OLD} before what it was measured"
            found.append(f"{name} is older than {', '.join(changed)}: {remedy}")
    for name in {name for change in spared() for name in change["results"]} - {*BENCHMARKS}:
        found.append(f"{SPARED}: {name} is no benchmark of benchmarks/results.py")
    for path in documents():
        try:
            if filled(path) != path.read_text(encoding="utf-8"):
                found.append(f"{path.relative_to(ROOT)} differs from the results: python benchmarks/results.py write")
        except ValueError as error:
            found.append(f"{error}: run the benchmark, or correct the template")
    return found


def show() -> None:
    for name, benchmark in BENCHMARKS.items():
        path = ROOT / RESULTS / f"{name}.json"
        took = load(path)["seconds"] if path.exists() else None
        minutes = f"{took / 60:5.1f} min" if took else "    ? min"
        changed = outdated(name)
        state = "current" if not changed else f"older than {', '.join(changed)}" if path.exists() else "never run"
        print(f"{name:20}{minutes}   python {benchmark.command:40}{state}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("list", "run", "write", "check", "spare"))
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join((*BENCHMARKS, "all")))
    parser.add_argument("--quick", action="store_true", help="smallest runs, to see that all work; keeps nothing")
    parser.add_argument("--why", help="of spare: the reason, as a reader of the file would want it")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - {*BENCHMARKS, "all"}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(BENCHMARKS)}")
    spares = arguments.what == "spare"
    if spares != bool(arguments.why) or spares and (arguments.quick or "all" in arguments.names or not arguments.names):
        parser.error("--why goes with spare, and spare needs it and names: spare training --why 'a branch for GPUs'")
    if arguments.what not in ("run", "spare") and (arguments.names or arguments.quick):
        parser.error(f"{arguments.what} is about all results: leave out names and --quick")
    failed = []
    if spares:
        failed = spare(arguments.names, arguments.why)
    if arguments.what == "list":
        show()
    if arguments.what == "run":
        names = BENCHMARKS if "all" in arguments.names else arguments.names or filter(outdated, BENCHMARKS)
        for name in list(names):
            try:
                run(name, arguments.quick)
            except RuntimeError as error:
                failed.append(f"{name}: {error}")
                print(f"error: {failed[-1]}", file=sys.stderr, flush=True)
    if arguments.what == "write" or (arguments.what == "run" and not arguments.quick):
        failed += write()
    if arguments.what == "check":
        failed = problems()
    print(*failed, sep="\n", end="\n" * bool(failed), file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
