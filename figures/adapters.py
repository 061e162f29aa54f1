"""Adapters (LoRA) against training all weights: held-out accuracy over steps of the default task, three seeds each.

python figures/adapters.py            trains what is missing in runs/ (about 4 minutes a run, six runs), then draws
python figures/adapters.py --draw     draws again from figures/adapters.json
python figures/adapters.py --quick    a few steps of one seed, drawn in runs/quick: to see that it works

The runs are configs/lora.toml and configs/tiny.toml as they are; only the seeds of warm start and run differ. Both
start from the same warm-started model of a seed.
"""

import argparse
import statistics
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

WAYS = {"all weights": "configs/tiny.toml", "adapters": "configs/lora.toml"}


def trained(way: str, seed: int, quick: bool) -> dict:
    """Return the evaluations of one run, training it first when its folder is not there."""
    settings, name = (f"run.seed={seed}", f"warm_start.seed={seed}"), way.replace(" ", "-")
    folder = run(f"adapters-{name}-seed{seed}", *settings, quick=quick, config=WAYS[way])
    records = read_records(folder / "steps.jsonl")
    return {
        "way": way,
        "seed": seed,
        **of_run(folder),
        "train_seconds": round(sum(r["seconds"]["train"] for r in records if r["step"]), 1),
        "trained_tokens": sum(r["train"]["trained_tokens"] for r in records if r["step"]),
        "evaluations": [{"step": r["step"], **r["eval"]} for r in records if r.get("eval")],
    }


def draw(rows: list[dict], path: Path) -> None:
    plt.style.use(HERE / "plainroll.mplstyle")
    figure, axes = plt.subplots()
    for row in rows:
        points, dashes = row["evaluations"], "--" if row["way"] == "all weights" else "-"
        steps, scores = [p["step"] for p in points], [100 * p["avg@4"] for p in points]
        errors = [196 * p["standard_error"] for p in points]
        label = f"{row['way']}, seed {row['seed']}"
        axes.errorbar(steps, scores, errors, color=f"C{row['seed']}", linestyle=dashes, capsize=2, label=label)
    axes.set(title="Held-out accuracy", xlabel="step", ylabel="avg@4 at temperature 1 (%)", ylim=(0, 100))
    axes.legend(loc="lower right")
    figure.supxlabel("python figures/adapters.py; hailstone, bars: 95 % interval", fontsize=7, color="0.4")
    figure.savefig(path)


def summary(rows: list[dict]) -> dict:
    """Return the first and last accuracy of each seed by way, and the seconds of training a thousand tokens."""
    found: dict = {"name": "adapters", "steps": max(p["step"] for row in rows for p in row["evaluations"])}
    for way in WAYS:
        runs, name = [row for row in rows if row["way"] == way], way.replace(" ", "_")
        for key, place in (("first", 0), ("last", -1)):
            found[f"{key}_{name}"] = [round(row["evaluations"][place]["avg@4"], 3) for row in runs]
        seconds = [1000 * row["train_seconds"] / max(row["trained_tokens"], 1) for row in runs]
        found[f"train_seconds_{name}"] = round(statistics.mean(seconds), 3)
        print(f"{way}: {found[f'first_{name}']} -> {found[f'last_{name}']}")
    return found


def train(args: argparse.Namespace, seeds: Sequence[int]) -> list[dict]:
    return [trained(way, seed, args.quick) for seed in seeds for way in WAYS]


if __name__ == "__main__":
    make("adapters", command_line(__doc__, "adapters").parse_args(), train, draw, summary)
