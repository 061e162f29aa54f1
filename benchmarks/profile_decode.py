"""Where the time of one decode step goes on a CPU: tables of torch.profiler, the largest operations first.

python benchmarks/profile_decode.py [--quick]
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import engine as bench  # isort: skip  # before torch: it sets the number of threads

import torch
from torch.profiler import profile
from tqdm import tqdm

from core import SampleId
from engine.sequence import Sequence
from rollout import Engine

CASES = (("tiny", 32, 20), ("half", 1, 5), ("half", 32, 5))  # model, rows, steps


def profile_steps(engine: Engine, rows: int, steps: int) -> tuple[str, float]:
    """Return a table of the self time of `steps` decode steps of `rows` sequences, and the milliseconds of a step.

    Sequences stay short of their second page.
    """
    for i, ids in enumerate(bench.prompts(rows)):
        engine.add(Sequence(i, 0, 0, tuple(ids), i, steps + 10, ignore_eos=True))
    for _ in range(4):
        engine.step()
    with profile() as profiler:
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
    return "\n".join(lines), round(total / steps / 1000, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the small model only: seconds")
    cases = CASES[:1] if parser.parse_args().quick else CASES
    torch.set_num_threads(int(bench.THREADS))
    torch.set_flush_denormal(True)
    metrics: dict[str, str | float] = {"name": "profile_decode"}
    for name, rows, steps in tqdm(cases, desc="profile", disable=None):
        engine = Engine(bench.build(name)[0], bench.ROLLOUT, bench.GREEDY, [])
        table, metrics[f"ms_a_step_{name}_{rows}"] = profile_steps(engine, rows, steps)
        tqdm.write(f"{name}, {rows} rows\n{table}\n")
    print(json.dumps(metrics))


if __name__ == "__main__":
    main()
