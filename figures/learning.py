"""The default run, three seeds: held-out accuracy and response length over steps, from warm start to the end.

python figures/learning.py            trains what is missing in runs/ (about 4 minutes a seed), then draws
python figures/learning.py --draw     draws again from figures/learning.json
python figures/learning.py --quick    a few steps of one seed, drawn in runs/quick: to see that it works

The default run is configs/rollflash.toml as it is; only the seeds of warm start and run differ.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from training_runs import command_line, make, of_run, run

from metrics import read_records

CONFIG = "configs/rollflash.toml"  # of `make train`
LENGTHS = {"p50": ":", "mean": "-", "p99": "--"}


def run_seed(seed: int, quick: bool) -> list[dict]:
    """Return the evaluations of one seed's run, training it first when its folder is not there."""
    settings = f"run.seed={seed}", f"warm_start.seed={seed}"
    folder = run(f"learning-seed{seed}", *settings, quick=quick, config=CONFIG)
    records = read_records(folder / "steps.jsonl")
    return [{"seed": seed, "step": r["step"], **of_run(folder), **r["eval"]} for r in records if r.get("eval")]


def draw(points: list[dict], path: Path) -> None:
    plt.style.use(HERE / "plainroll.mplstyle")
    figure, (left, right) = plt.subplots(1, 2)
    for seed in sorted({p["seed"] for p in points}):
        mine = [p for p in points if p["seed"] == seed]
        steps, error = [p["step"] for p in mine], [1.96 * p["standard_error"] for p in mine]
        left.errorbar(
            steps, [100 * p["avg@4"] for p in mine], [100 * e for e in error], label=f"seed {seed}", capsize=2
        )
        for key, dashes in LENGTHS.items():
            right.plot(steps, [p["length"][key] for p in mine], dashes, color=f"C{seed}")
    left.set(title="Held-out accuracy", xlabel="step", ylabel="avg@4 at temperature 1 (%)", ylim=(0, 100))
    right.set(title="Length of held-out responses", xlabel="step", ylabel="tokens", yscale="log", ylim=(10, 1000))
    right.set_yticks([10, 30, 100, 300, 1000], ["10", "30", "100", "300", "1,000"])
    right.minorticks_off()
    for key, dashes in LENGTHS.items():
        right.plot([], dashes, color="0.4", label=key)
    right.legend(loc="upper right", ncols=len(LENGTHS))
    left.legend(loc="lower right")
    count = points[0]["num_prompts"]
    made = f"commit {points[0]['commit'][:7]} of {points[0]['date']}"
    data = f"{CONFIG}, hailstone, {count} held-out prompts x 4, bars: 95 % interval"
    caption = f"python figures/learning.py ({made}): {data}"
    figure.supxlabel(caption, fontsize=7, color="0.4")
    figure.savefig(path)


def summary(points: list[dict]) -> dict:
    """Print what each seed gained; return it."""
    gained: dict[str, list[float]] = {"first": [], "last": [], "standard_errors": []}
    seeds = sorted({p["seed"] for p in points})
    for seed in seeds:
        first, *_, last = [p for p in points if p["seed"] == seed]
        rise = last["avg@4"] - first["avg@4"]
        error = (first["standard_error"] ** 2 + last["standard_error"] ** 2) ** 0.5
        errors = rise / error if error else 0.0  # a few held-out prompts can all be wrong
        print(f"seed {seed}: {first['avg@4']:.3f} -> {last['avg@4']:.3f}, {errors:.0f} standard errors")
        for name, value in zip(gained, (first["avg@4"], last["avg@4"], errors), strict=True):
            gained[name].append(round(value, 3))
    return {"name": "learning", "seeds": len(seeds), "steps": max(p["step"] for p in points), **gained}


def train(args: argparse.Namespace, seeds: Sequence[int]) -> list[dict]:
    return [point for seed in seeds for point in run_seed(seed, args.quick)]


if __name__ == "__main__":
    make("learning", command_line(__doc__, "learning").parse_args(), train, draw, summary)
