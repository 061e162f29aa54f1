"""Two jobs that share two pools, really run: one rank that trains and one that decodes, each pinned to a core.

    python benchmarks/mux.py [--quick] [--tails]

alone        each job by itself on the two cores, a rollout rank and a training rank (solo-disaggregated)
group        both at once in a co-execution group (mux.py): while one trains, the other decodes
co-located   each job by itself, both ranks decode and then train
single       one job in a group of its own: nobody holds it up, so what its permits take is overhead

Prompts and lengths are such that rollout and training take about equally long. Throughput is steps of both jobs over
seconds: of the group from its first rollout to its last update, with the phases at both ends in which a worker idles;
of jobs alone the seconds of all steps, one job after the other. `ceiling` is what a group could gain: the seconds of
all phases of jobs alone over those of the busier pool. `phases_slower`: how much longer its phases took than alone,
since the cores of a machine share caches and memory. A CPU's cores are all alike, so co-located jobs idle little
here; pools of unlike GPUs are why the paper takes jobs apart.

`switch_warm_over_cold`: seconds to give the device up and have it again, over the seconds from a job's start until it
could begin its first phase: processes, groups, load. On a CPU host and device are the same memory.
`permit_overhead_fraction`: seconds in which the single job waits for permits, over those of its steps.
`trajectories_equal`: losses and gradient norms in the group are those of the job alone, bit by bit.
`sync_bytes_over_model`: bytes of weights that crossed between the pools in an update, over those of the model.

With --tails both jobs have the same two workers for their rollouts, on which they train too, and responses with a long
tail. `tails_gain`: throughput with group.tail_share = 0.8 over that with whole rollouts. `worker_seconds_whole` and
`worker_seconds_parts`: what a rollout keeps others from. `loss_difference`: the largest between the two.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from metrics import read_records  # noqa: E402
from parallel import World  # noqa: E402
from process import launcher  # noqa: E402
from process.group_timeline import held  # noqa: E402
from warm_start import WarmStartConfig, make_model  # noqa: E402

JOBS = ("first", "second")
SETTINGS: dict[str, Any] = {
    "run.device": "cpu",
    "run.eval_every": 0,
    "run.checkpoint_every": 0,
    "data.train": "hailstone",
    "data.eval_prompts": 0,
    "scheduler.policy": "synchronous",
    "scheduler.num_responses": 4,
    "rollout.max_prompt_tokens": 64,
    "rollout.kv_gib": 0.1,
    "trainer.tokens_per_microbatch": 2048,
}


@dataclass(frozen=True)
class Size:
    steps: int
    repeats: int
    prompts: int
    response_tokens: int
    hidden: int
    layers: int


FULL, QUICK = Size(10, 2, 6, 352, 256, 4), Size(2, 1, 4, 64, 128, 2)
TAILS = Size(6, 3, 8, 1024, 128, 2)  # an untrained model ends a response at any token: few are long
GRADER = """def digits(response, answer, row):  # an untrained model has some, so there is a gradient
    return min(sum(c.isdigit() for c in response) / 32, 1.0)
"""
Records = list[dict[str, Any]]  # of steps.jsonl


# ---- runs ----------------------------------------------------------------------------------------------------------


def settings_file(folder: Path, size: Size, name: str, train_ranks: int, tail_share: float = 0.0) -> Path:
    """Write the settings of a job, whose run will be in `folder`; return their file."""
    own = {"run.dir": str(folder / name), "run.steps": size.steps, "run.seed": JOBS.index(name)}
    own |= {"model.path": str(folder.parents[1] / "model"), "overlap.train_ranks": train_ranks}
    own |= {"reward.also": f"{folder.parents[1] / 'digits.py'}:digits=1", "group.tail_share": tail_share}
    own |= {"scheduler.num_prompts": size.prompts, "rollout.max_response_tokens": size.response_tokens}
    path = folder / f"{name}.toml"
    folder.mkdir(exist_ok=True)
    path.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in (SETTINGS | own).items()))
    return path


def call(*command: str, **environment: str) -> None:
    """Run a script of the repository. Raises RuntimeError with what it printed when it fails."""
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=1200
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with code {done.returncode}:\n{done.stdout}{done.stderr}")


def play_alone(folder: Path, size: Size, cores: Sequence[int], train_ranks: int) -> dict[str, Records]:
    """Run each job by itself, its training rank on the first of two cores; return their records."""
    for name in JOBS:
        path = settings_file(folder, size, name, train_ranks)
        call("train.py", "--ranks=2", f"--config={path}", **{launcher.CORES: f"{cores[0]};{cores[1]}"})
    return {name: steps_of(folder / name) for name in JOBS}


def play_group(
    folder: Path, size: Size, names: Sequence[str], train_ranks: int = 1, tail_share: float = 0.0
) -> tuple[dict[str, Records], Records]:
    """Run jobs in a group; return the records of each, and the events of the group."""
    files = [str(settings_file(folder, size, name, train_ranks, tail_share)) for name in names]
    path = folder / "mux.toml"
    path.write_text(f"mux.dir = {json.dumps(str(folder / 'mux'))}\nmux.jobs = {json.dumps(files)}\n")
    call("mux.py", str(path))
    events = [json.loads(line) for line in (folder / "mux" / "mux.jsonl").read_text(encoding="utf-8").splitlines()]
    return {name: steps_of(folder / name) for name in names}, events


def steps_of(folder: Path) -> Records:
    return [record for record in read_records(folder / "steps.jsonl") if record["step"]]


# ---- numbers ---------------------------------------------------------------------------------------------------------


def seconds(records: Records, *stages: str) -> float:
    """Return the seconds of stages in all steps."""
    return sum(record["seconds"].get(stage, 0.0) for record in records for stage in stages)


def group_seconds(events: Records, steps: int) -> float:
    """Return the seconds from a group's first rollout to the last of its jobs' updates."""
    begins = min(e["at"] for e in events if e["event"] == "begins" and e["phase"] == "rollout")
    ends: dict[str, list[float]] = {}
    for event in events:
        if event["event"] == "ends" and event["phase"] == "train":
            ends.setdefault(event["job"], []).append(event["at"])
    return max(times[steps - 1] for times in ends.values()) - begins  # another phase saves the last checkpoint


def cold_seconds(events: Records) -> float:
    """Return the seconds from the start of a group of one job until the job could begin its first phase."""
    begins = next(e["at"] for e in events if e["event"] == "starts")
    return next(e["at"] for e in events if e["event"] == "ends" and e["phase"] == "start") - begins


def trajectory(records: Records) -> list[tuple[float, float]]:
    found = [(record["train"]["loss"], record["train"]["grad_norm"]) for record in records]
    assert len({*found}) == len(found), "equal losses would say nothing"
    return found


def held_seconds(events: Records, steps: int) -> float:
    """Return the seconds of all workers that a rollout holds, the mean over two jobs."""
    return sum(span.end - span.start for span in held(events) if span.phase == "rollout") / (2 * steps)


def measure(folder: Path, size: Size, cores: Sequence[int]) -> dict[str, float]:
    """Run all contenders once; return the metrics."""
    alone = play_alone(folder / "alone", size, cores, 1)
    group, events = play_group(folder / "group", size, JOBS)
    colocated = play_alone(folder / "co-located", size, cores, 0)
    single, its_events = play_group(folder / "single", replace(size, steps=min(size.steps, 3)), JOBS[:1])
    taken = group_seconds(events, size.steps)
    rollout, train = (sum(seconds(records, stage) for records in alone.values()) for stage in ("rollout", "train"))
    phases = sum(seconds(records, "rollout", "train") for records in group.values())
    one = single[JOBS[0]]
    together = [record for records in group.values() for record in records]
    switches = [max(r["seconds"][f"switch_{phase}"] for phase in ("rollout", "train")) for r in together]
    return {
        "throughput_over_solo_disaggregated": sum(seconds(r, "step") for r in alone.values()) / taken,
        "throughput_over_colocated": sum(seconds(r, "step") for r in colocated.values()) / taken,
        "ceiling": (rollout + train) / max(rollout, train),
        "phases_slower": phases / (rollout + train),
        "trajectories_equal": int(all(trajectory(group[name]) == trajectory(alone[name]) for name in JOBS)),
        "switch_warm_over_cold": mean(switches) / cold_seconds(its_events),
        "switch_warm_seconds": mean(switches),
        "switch_cold_seconds": cold_seconds(its_events),
        "permit_overhead_fraction": seconds(one, "permit_rollout", "permit_train") / seconds(one, "step"),
        "sync_bytes_over_model": sum(r["sync"]["sync_bytes"] for r in together)
        / sum(r["sync"]["model_bytes"] for r in together),
        "seconds_alone": sum(seconds(r, "step") for r in alone.values()),
        "seconds_group": taken,
        "seconds_colocated": sum(seconds(r, "step") for r in colocated.values()),
    }


def measure_tails(folder: Path, size: Size, cores: Sequence[int]) -> dict[str, float]:
    """Run both jobs in a group, with whole rollouts and with rollouts in parts; return the metrics."""
    whole, events = play_group(folder / "whole", size, JOBS, 0)
    parts, its_events = play_group(folder / "parts", size, JOBS, 0, tail_share=0.8)
    pairs = [pair for name in JOBS for pair in zip(trajectory(whole[name]), trajectory(parts[name]), strict=True)]
    return {
        "tails_gain": group_seconds(events, size.steps) / group_seconds(its_events, size.steps),
        "seconds_whole": group_seconds(events, size.steps),
        "seconds_parts": group_seconds(its_events, size.steps),
        "worker_seconds_whole": held_seconds(events, size.steps),
        "worker_seconds_parts": held_seconds(its_events, size.steps),
        "loss_difference": max(abs(a[0] - b[0]) for a, b in pairs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model, two steps: under two minutes")
    parser.add_argument("--tails", action="store_true", help="rollouts in parts against whole ones")
    flags, cores = parser.parse_args(), sorted(os.sched_getaffinity(0))[:2]
    size, name, way = (TAILS, "mux_tails", measure_tails) if flags.tails else (FULL, "mux", measure)
    if flags.quick:
        size = replace(size, steps=2, repeats=1) if flags.tails else QUICK
    if len(cores) < 2:
        sys.exit("two pools need two cores; this process may use one")
    found: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as base:
        shape = WarmStartConfig(steps=0, hidden_size=size.hidden, num_layers=size.layers)
        make_model(shape, "hailstone", Path(base) / "model", World(0, 1, torch.device("cpu")))
        (Path(base) / "digits.py").write_text(GRADER)
        for repeat in range(size.repeats):
            folder = Path(base) / f"repeat {repeat}"
            folder.mkdir()
            found.append(way(folder, size, cores))
            print({key: f"{value:.4g}" for key, value in found[-1].items()}, flush=True)
    metrics = {key: float(f"{median(each[key] for each in found):.4g}") for key in found[0]}
    if not flags.tails:
        metrics["trajectories_equal"] = min(each["trajectories_equal"] for each in found)
    print(json.dumps({"name": name, "steps": size.steps, **metrics}))


if __name__ == "__main__":
    main()
