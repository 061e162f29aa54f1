"""A golden run: losses and tokens of six steps under many settings, which every later commit must reproduce.

A change that moves nothing leaves `golden.json` alone. A change that means to move a trajectory says so in its commit,
and writes the file again: `GOLDEN=write pytest -n 0 tests/test_golden.py`. The file has a part for each kind of CPU, as
rounding differs by it; writing replaces the runs of the CPU at hand, so write the others too, or remove their parts. On
a CPU without a part, losses are compared loosely. `GOLDEN=all` plays every setting on 1, 2 and 4 ranks; without it
the suite plays a few. The weights are random: engine, races and gradient work, nothing is learnt.
"""

import hashlib
import json
import os
import platform
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, steps_of, train_runs

from engine.native import cpu_maker
from job import Job
from parallel import World

FILE = ROOT / "tests" / "golden.json"
MODE = os.environ.get("GOLDEN", "short")
SMALL: dict[str, Any] = dict(
    run__steps=6,
    run__eval_every=0,
    run__eval_samples=1,
    run__dump_rollouts="true",
    data__task=f"{ROOT}/tests/graders.py:share_of_digits",
    scheduler__num_prompts=8,
    scheduler__policy="synchronous",
    scheduler__window_iterations=4,
    rollout__max_response_tokens=96,
    rollout__page_size=8,
    rollout__kv_gib=0.05,
    trainer__lr=3e-3,
    trainer__tokens_per_microbatch=256,
)
RACES = dict(scheduler__policy="tail_batching", scheduler__eta_prompts=1.5, scheduler__eta_responses=1.5)
SHARDED = dict(trainer__shard=2, rollout__weights="sharded")
# The settings, the ranks that each is played on, and how far losses may be from the golden ones: 0 is bit-equal.
SETTINGS: dict[str, tuple[tuple[int, ...], float, dict[str, Any]]] = {
    "synchronous": ((1, 2, 4), 0.0, {}),
    "tail batching": ((1, 2, 4), 0.0, RACES),
    "eta on prompts": ((2,), 0.0, RACES | dict(scheduler__eta_responses=1)),
    "dynamic sampling": ((2,), 0.0, RACES | dict(scheduler__dynamic_sampling="true")),
    # What is streamed depends on time, so sums round differently.
    "stream training": ((2, 4), 1e-5, RACES | dict(stream__policy="fixed")),
    "sharded": ((2, 4), 1e-5, RACES | dict(trainer__shard=2)),
    "sharded rollout": ((2, 4), 1e-5, RACES | SHARDED),
    "sharded rollout over two": ((2, 4), 1e-5, RACES | SHARDED | dict(rollout__tensor_parallel=2)),
    "tensor parallel": ((2, 4), 0.0, RACES | dict(rollout__tensor_parallel=2)),
    # Few pages: the rule of the paper moves to larger sizes as preemptions rise.
    "elastic": ((2, 4), 0.0, RACES | dict(planner__rule="paper", rollout__kv_gib=0.0003)),
}
ASYNC = dict(overlap__depth=1, overlap__bound=3, rollout__stop=json.dumps([*"ABCDEFGH"]))
SETTINGS["async"] = ((1, 2, 4), 0.0, ASYNC)
SETTINGS["async, ranks apart"] = ((2, 4), 0.0, ASYNC | dict(overlap__train_ranks=1, overlap__update_iterations=8))
# Played without GOLDEN, and for how many steps: two short rounds and a long one, or until the size changes.
SHORT = {("tail batching", 1): 6, ("elastic", 2): 6}
SHORT |= {("async", 1): 6, ("async, ranks apart", 2): 6}  # whole: the end of a run limits what it launches before
SHORT |= {("synchronous", 1): 3} | {("tensor parallel", 2): 3}
# One trajectory, however it is computed.
SAME = ("tail batching", "stream training", "sharded", "sharded rollout", "sharded rollout over two", "tensor parallel")


def play(world: World, *runs: list[str]) -> None:
    """Train by torch's operations, which are bit-equal wherever a compiler is; tests/test_native.py has the others."""
    os.environ["CXX"] = ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Job, "evaluate", lambda *_, **__: {})  # of evaluations there are no golden numbers
        train_runs(world, *runs)


def trajectory(folder: Path) -> dict[str, list]:
    """Return what must not move: of each step the loss, the gradient's norm and a hash of the trained tokens."""
    steps = steps_of(folder)
    dumps = [folder / "rollouts" / f"step_{r['step']:06d}.jsonl" for r in steps]
    samples = [[json.loads(line)["samples"] for line in path.read_text().splitlines()] for path in dumps]
    tokens = [[s["token_ids"] for group in step for s in group] for step in samples]
    assert all(r["train"]["logprob_diff_max"] < 1e-4 for r in steps), "rollout and trainer disagree"
    return {
        "kind": [r["round"]["kind"] for r in steps],
        "tensor_parallel": [r["planner"]["size"] if "planner" in r else 1 for r in steps],
        "loss": [r["train"]["loss"] for r in steps],
        "grad_norm": [r["train"]["grad_norm"] for r in steps],
        "tokens": [hashlib.sha256(json.dumps(step).encode()).hexdigest()[:16] for step in tokens],
    }


def machine() -> str:
    """Return what rounding depends on: matrix products go by other kernels on a CPU of another maker, too."""
    return f"{platform.machine()} {cpu_maker()} {torch.backends.cpu.get_cpu_capability()} torch {torch.__version__}"


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_trajectories_are_the_golden_ones(ranks: int, settings, run_ranks, tmp_path: Path) -> None:
    here = [name for name, (on, *_) in SETTINGS.items() if ranks in on]
    chosen = {name: SHORT.get((name, ranks), 0) if MODE == "short" else SMALL["run__steps"] for name in here}
    chosen = {name: steps for name, steps in chosen.items() if steps}
    if not chosen:
        pytest.skip("GOLDEN=all plays these")
    rows = [{"prompt": "count " + "up " * (i % 5) + str(i), "answer": str(i)} for i in range(48)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    make = partial(settings, data__train=tmp_path / "prompts.jsonl", rollout__max_prompt_tokens=32)
    run_ranks(ranks, play, *(make(n, **SMALL | SETTINGS[n][2] | {"run__steps": chosen[n]}) for n in chosen))
    played = {name: trajectory(tmp_path / name) for name in chosen}
    golden: dict[str, dict[str, Any]] = json.loads(FILE.read_text()) if FILE.exists() else {}
    same = machine() in golden
    if MODE == "write":
        golden.setdefault(machine(), {}).update({f"{name}, {ranks} ranks": run for name, run in played.items()})
        FILE.write_text(json.dumps(golden, indent=1) + "\n")
        return
    runs = golden[machine()] if same else next(iter(golden.values()))
    for name, run in played.items():
        wanted = {key: row[: chosen[name]] for key, row in runs[f"{name}, {ranks} ranks"].items()}
        bound = SETTINGS[name][1] if same else 1e-3
        assert run["kind"] == wanted["kind"] and run["tensor_parallel"] == wanted["tensor_parallel"], name
        assert not same or run["tokens"] == wanted["tokens"], name  # elsewhere a draw can tip
        for key in ("loss", "grad_norm"):
            assert run[key] == pytest.approx(wanted[key], rel=bound, abs=bound), (name, key)


def test_how_a_run_is_spread_leaves_its_golden_trajectory_as_it_is() -> None:
    assert (golden := json.loads(FILE.read_text())), "no CPU has a part"
    likes = {name: "tail batching" if name in SAME else name for name in SETTINGS}
    for name in ("eta on prompts", "dynamic sampling", "elastic"):  # speed decides some of their races
        del likes[name]
    for runs, (name, like) in product(golden.values(), likes.items()):
        fewest = SETTINGS[like][0][0]
        for ranks in SETTINGS[name][0]:
            mine, alone = runs[f"{name}, {ranks} ranks"], runs[f"{like}, {fewest} ranks"]
            assert mine["tokens"] == alone["tokens"] and len(set(alone["tokens"])) == 6
            assert mine["loss"] == pytest.approx(alone["loss"], abs=1e-5)
            assert mine["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-4)
