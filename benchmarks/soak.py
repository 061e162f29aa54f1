"""A long run of the smallest model on two ranks: does anything grow?

    python benchmarks/soak.py [--quick] [--steps 2000]

Runs train.py as a user would, with tail batching, stream training, graders in worker processes, programs in the sandbox
and checkpoints, and looks at it from outside: memory, threads, open files and processor time of every process, and the
folders for temporary files. Slopes are those of a straight line through the lowest values of 40 parts, without the
first half of the steps, as a share of the mean, over 1,000 steps. Torch's and oneDNN's caches of compiled products hold
64 here, not 1,024, so that they are full soon and do not hide a leak. Slopes of step time go through medians, for short
and long rounds apart, and the worse counts. `step_time_slope` is by the clock, so it needs a quiet machine; `cpu_slope`
needs less. Exit code 1: something grows by more than LIMITS, or was left.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402
from tqdm import tqdm  # noqa: E402

from parallel import World  # noqa: E402
from warm_start import WarmStartConfig, make_model  # noqa: E402

GRADER = "def digits(response, answer, row):\n    return sum(c.isdigit() for c in response) / max(len(response), 1)\n"

# Of the steps: memory for lengths and batches that come seldom is taken late.
WARM_UP = 0.5
# The most that each may grow in 1,000 steps, as a share; a clock is noisier than a count.
LIMITS = {"memory_slope": 0.01, "files_slope": 0.01, "threads_slope": 0.01, "pages_slope": 0.03}
LIMITS |= {"step_time_slope": 0.03, "cpu_slope": 0.03}


def descendants(pid: int) -> list[int]:
    found = []
    with suppress(OSError):  # it has gone meanwhile
        for thread in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in map(int, thread.read_text().split()):
                found += [child, *descendants(child)]
    return found


def look(pid: int) -> dict[str, Any] | None:
    """Return what a process uses, or None when it has gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        lines = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        memory = int(lines["VmRSS"].split()[0]) * 1024
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # 11, 12: user and system; 19: start
        files = len(os.listdir(f"/proc/{pid}/fd"))
        name = next((Path(os.fsdecode(c)).name for c in command if c.endswith(b".py")), "torchrun")
        counts = {"threads": int(lines["Threads"]), "files": files, "ticks": int(stat[11]) + int(stat[12])}
        return {"name": name, "start": stat[19], "memory": memory, **counts}
    except (OSError, KeyError):
        return None


def temporary(folder: Path) -> set[Path]:
    """Return what lies where the run puts temporary files, but for what torch leaves there of every process."""
    found = {path for place in (folder, Path("/dev/shm")) if place.is_dir() for path in place.iterdir()}
    return {path for path in found if not path.name.startswith(("torchelastic_", "torchinductor_"))}


def slope(steps: Sequence[float], values: Sequence[float]) -> float:
    """Return by which share of the mean the values rise in 1,000 steps."""
    rise = np.polyfit(steps, values, 1)[0]
    return 1000 * rise / max(float(np.mean(values)), 1e-9)


def watch(run: subprocess.Popen, records: Path, steps: int) -> tuple[dict[tuple[int, str], list[tuple]], int]:
    """Look at all processes twice a second until the run ends; return (step, use) by process, and the most of them."""
    seen: dict[tuple[int, str], list[tuple]] = defaultdict(list)
    most = step = 0
    with tqdm(total=steps, unit="step", desc="soak", disable=None) as bar:
        while run.poll() is None:
            time.sleep(0.5)
            if not records.exists():
                continue
            with open(records, "rb") as file:
                done = sum(1 for _ in file) - 1
            bar.update(done - step)
            step = done
            processes = descendants(run.pid)
            most = max(most, len(processes))
            for pid in processes:
                if use := look(pid):
                    seen[pid, use["start"]].append((step, use))
    return seen, most


def prepare(folder: Path) -> None:
    """Write grader, data and model: every sixteenth row is a program, and one token in sixteen ends a response."""
    (folder / "grader.py").write_text(GRADER)
    rows: list[dict] = [{"prompt": f"count {i}", "answer": str(i)} for i in range(64)]
    for row in rows[::16]:
        row |= {
            "task": "code",
            "answer": json.dumps([{"stdin": "", "stdout": "1"}]),
            "template": "print(1)  # {program}",
        }
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shape = WarmStartConfig(steps=0, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, max_positions=256)
    make_model(shape, "hailstone", folder / "model", World(0, 1, torch.device("cpu")))
    (folder / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(16))}))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="300 steps, too few to tell a slope: what is left is all that counts"
    )
    parser.add_argument("--steps", type=int, default=2000)
    arguments = parser.parse_args()
    steps = 300 if arguments.quick else arguments.steps
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        options = {
            "run.dir": folder / "run",
            "run.steps": steps,
            "run.eval_every": 100,
            "run.checkpoint_every": 50,
            "run.device": "cpu",
            "model.path": folder / "model",
            "data.train": folder / "data.jsonl",
            "data.task": f"{folder / 'grader.py'}:digits",
            "data.eval_prompts": 4,
            "scheduler.num_prompts": 4,
            "scheduler.num_responses": 4,
            "rollout.max_prompt_tokens": 32,
            "rollout.max_response_tokens": 48,
            "rollout.kv_gib": 0.01,
            "reward.num_workers": 1,
            "trainer.lr": 0,  # the policy stays as it is, so that steps stay alike
            "stream.policy": "fixed",
            "stream.fixed_share": 0.2,
            "scheduler.window_iterations": 2,
        }
        (folder / "tmp").mkdir()
        before = temporary(folder / "tmp")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
        command += [str(ROOT / "train.py"), *(f"--{key}={value}" for key, value in options.items())]
        env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(folder / "tmp")}
        env |= dict.fromkeys(("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"), "64")  # soon full
        with open(folder / "log.txt", "w") as log:
            run = subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=subprocess.STDOUT)
            try:
                seen, most = watch(run, folder / "run" / "steps.jsonl", steps)
            finally:
                run.kill()
        if run.returncode:
            print((folder / "log.txt").read_text()[-3000:], file=sys.stderr)
            return 1
        records = [json.loads(line) for line in (folder / "run" / "steps.jsonl").read_text().splitlines()][1:]
        left = sorted(map(str, temporary(folder / "tmp") - before))
        leftovers = [pid for pid, start in seen if (use := look(pid)) and use["start"] == start]
    result = report(seen, records, steps)
    result |= {"processes": most, "processes_left": len(leftovers), "temporary_files_left": len(left)}
    if left:
        print("left:", *left, file=sys.stderr)
    print(json.dumps(result))
    failures = [] if arguments.quick else grown(result)
    print(*failures, sep="\n", end="\n" * bool(failures), file=sys.stderr)
    return 1 if failures or left or leftovers else 0


def grown(result: dict) -> list[str]:
    """Return a line for each slope that is over its limit."""
    over = [name for name, limit in LIMITS.items() if result[name] > limit]
    return [f"{name}: {result[name]:.1%} in 1,000 steps, over the limit of {LIMITS[name]:.0%}" for name in over]


def parts(looks: list[tuple[int, Any]], count: int = 40) -> list[list[tuple[int, Any]]]:
    each = max(len(looks) // count, 2)
    return [looks[i : i + each] for i in range(0, len(looks) - each + 1, each)]


def floor(looks: list[tuple[int, dict]], key: str) -> tuple[list[int], list[float]]:
    """Return the step and the least use of each part: what comes and goes, such as a program's pipes, is no leak."""
    return [part[0][0] for part in parts(looks)], [min(use[key] for _, use in part) for part in parts(looks)]


def per_step(looks: list[tuple[int, dict]]) -> tuple[list[int], list[float]]:
    """Return the step and the ticks of processor time for each step of each part."""
    ends = [(*part[0], *part[-1]) for part in parts(looks) if part[-1][0] > part[0][0]]
    return [a for a, *_ in ends], [(late["ticks"] - early["ticks"]) / (b - a) for a, early, b, late in ends]


def step_time_slope(records: list[dict]) -> float:
    """Return the worse of both kinds' slopes: a short round grows unseen beside a long one of ten times its length."""
    slopes = []
    for kind in {r["round"]["kind"] for r in records}:
        looks = parts([(r["step"], r["seconds"]["step"]) for r in records if r["round"]["kind"] == kind])
        slopes.append(slope([part[0][0] for part in looks], [statistics.median(s for _, s in part) for part in looks]))
    return max(slopes)


def report(seen: dict[tuple[int, str], list[tuple]], records: list[dict], steps: int) -> dict:
    """Print a row for each process that lived through the run; return the worst slopes."""
    worst: dict[str, float] = {"memory": 0.0, "files": 0.0, "threads": 0.0}
    cpu: list[float] = []
    print(f"{'process':24}   MiB, first .. last   memory   open files   threads: growth in 1,000 steps")
    for (pid, _), looks in seen.items():
        name = looks[0][1]["name"]
        after = [(step, use) for step, use in looks if WARM_UP * steps < step < steps]  # the end frees all
        if len(after) < 10 or after[-1][0] < 0.95 * steps or after[0][0] > (WARM_UP + 0.1) * steps:
            continue  # it came or went meanwhile
        rises = {key: slope(*floor(after, key)) for key in worst}
        worst = {key: max(worst[key], rise) for key, rise in rises.items()}
        if name == "train.py":
            cpu.append(slope(*per_step(after)))
        first, last = (use["memory"] / 2**20 for use in (after[0][1], after[-1][1]))
        print(f"{name[:16]:16}{pid:8d}{first:11.1f} ..{last:8.1f}" + "".join(f"{100 * rises[k]:9.2f} %" for k in worst))
    late = [r for r in records if r["step"] > WARM_UP * steps]
    pages = [r["engine"]["peak_pages"] for r in late]
    return {
        "name": "soak",
        "steps": len(records),
        "memory_slope": round(worst["memory"], 5),
        "files_slope": round(worst["files"], 5),
        "threads_slope": round(worst["threads"], 5),
        "step_time_slope": round(step_time_slope(late), 4),
        "cpu_slope": round(max(cpu), 4),
        "pages_slope": round(slope([r["step"] for r in late], pages), 4),
    }


if __name__ == "__main__":
    sys.exit(main())
