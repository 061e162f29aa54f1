"""What compiled kernels save of the default run from a cold start: no model, no compiled kernels.

    python benchmarks/cold_start.py [--quick]

Each turn starts `train.py --ranks=2 --config configs/rollflash.toml` in an empty folder, once with a C++ compiler and
once without (`CXX=`), and takes the seconds until it ends: imports, compilation, warm start, steps and evaluations; not
the installation of `make train`.
`cold_start_speedup`: seconds without over seconds with, medians; `saved`: the share that is saved. Both sides learn;
rounding makes them two runs.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
COMMAND = "--ranks=2", f"--config={ROOT / 'configs' / 'rollflash.toml'}"
QUICK = "--run.steps=8", "--run.eval_every=0", "--warm_start.steps=40", "--scheduler.num_prompts=8"
SIDES = {"compiled": {}, "plain": {"CXX": ""}}
TURNS = 2
LIMIT = 1800.0  # seconds of one run


def run(side: str, settings: tuple[str, ...]) -> float:
    """Return the seconds of a run in a folder of its own, whose kernels are compiled there too."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"XDG_CACHE_HOME": folder} | SIDES[side]
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, ROOT / "train.py", *COMMAND, *settings],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
        seconds = time.perf_counter() - start
        if done.returncode:
            raise SystemExit(f"error: the run {side} ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
        is_compiled = any((Path(folder) / "plainroll").glob("*"))
        assert is_compiled == (side == "compiled"), "no compiler was found, or CXX= has no effect"
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few small steps, once: under 2 minutes")
    quick = parser.parse_args().quick
    found: dict[str, list[float]] = {side: [] for side in SIDES}
    turns = [side for _ in range(1 if quick else TURNS) for side in SIDES]
    for side in tqdm(turns, desc="runs", disable=None):
        found[side].append(run(side, QUICK if quick else ()))
        tqdm.write(f"{side:8} {found[side][-1]:6.1f} s")
    seconds = {side: statistics.median(values) for side, values in found.items()}
    metrics: dict[str, float] = {f"seconds_{side}": round(value, 1) for side, value in seconds.items()}
    ratio = seconds["compiled"] / seconds["plain"]
    metrics |= {"cold_start_speedup": round(1 / ratio, 2), "saved": round(1 - ratio, 3)}
    print(json.dumps({"name": "cold_start"} | metrics))


if __name__ == "__main__":
    main()
