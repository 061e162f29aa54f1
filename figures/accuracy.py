"""Tail batching against the synchronous baseline: held-out accuracy over trained samples (Figure 8) and over seconds.

python figures/accuracy.py            trains what is missing in runs/ (twelve runs, 2 to 4 minutes each), then draws
python figures/accuracy.py --draw     draws again from figures/accuracy.json
python figures/accuracy.py --quick    a few steps of one seed, drawn in runs/quick: to see that it works

All runs must be of one code; one that was stopped goes on where it was. Seconds are those of the steps, without
evaluations and checkpoints, so they need a quiet machine. In the background:

nohup python benchmarks/results.py run accuracy > accuracy.log 2>&1 &
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

from training_runs import CONFIG, command_line, make, of_run, run

from metrics import read_records

RACE = "scheduler.eta_responses=1.25"
CURVES = {
    "synchronous": ("synchronous", ["scheduler.policy=synchronous"]),
    "tail_batching": ("tail batching, eta 1.25 on both", [RACE]),
    "all": ("all parts, eta 1.25 on both", [RACE, "planner.rule=predict", "stream.policy=estimate"]),
    "eta_on_prompts": ("tail batching, eta on prompts only", ["scheduler.eta_responses=1"]),
}
EVERY = 20  # steps between evaluations: whole periods of 4 short rounds and a long one, so both have trained the same


def evaluations(curve: str, seed: int, quick: bool) -> list[dict]:
    """Return the evaluations of one run, each with the samples that were trained and the seconds of steps before it."""
    settings = [*CURVES[curve][1], f"run.seed={seed}", f"warm_start.seed={seed}", f"run.eval_every={EVERY}"]
    folder = run(f"accuracy-{curve}-seed{seed}", *settings, quick=quick)
    own = {"curve": curve, "seed": seed, **of_run(folder)}
    points, samples, seconds = [], 0, 0.0
    for record in read_records(folder / "steps.jsonl"):
        samples += record.get("samples", 0)
        seconds += record["seconds"].get("step", 0.0)
        if record.get("eval"):
            queue = record["round"]["queue"] if record["step"] else 0
            points.append(own | {"samples": samples, "step_seconds": seconds, "queue": queue, **record["eval"]})
    return points


def by_samples(points: list[dict], curve: str, value) -> tuple[list[int], list[list[float]]]:
    """Return the numbers of trained samples, and `value` of every seed at each."""
    mine = [p for p in points if p["curve"] == curve]
    samples = sorted({p["samples"] for p in mine})
    return samples, [[value(p) for p in mine if p["samples"] == s] for s in samples]


def draw(points: list[dict], path: Path) -> None:
    plt.style.use(HERE / "plainroll.mplstyle")
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(10.5, 3.4))
    for i, (curve, (label, _)) in enumerate(CURVES.items()):
        samples, accuracy = by_samples(points, curve, lambda p: 100 * p["avg@4"])
        _, lengths = by_samples(points, curve, lambda p: p["length"]["mean"])
        _, seconds = by_samples(points, curve, lambda p: p["step_seconds"])
        for axes, x, values in (
            (left, samples, accuracy),
            (middle, [statistics.mean(s) for s in seconds], accuracy),
            (right, samples, lengths),
        ):
            axes.plot(x, [statistics.mean(v) for v in values], color=f"C{i}", label=label)
            axes.fill_between(x, [min(v) for v in values], [max(v) for v in values], color=f"C{i}", alpha=0.2)
        for axes in (left, right):
            axes.set(xlabel="trained samples", xticks=samples[:: len(samples) // 3 or 1])
    left.set(title="Accuracy over samples", ylabel="avg@4 at temperature 1 (%)", ylim=(40, 90))
    middle.set(title="Accuracy over time", xlabel="seconds of steps", ylim=(40, 90), xlim=(0, None))
    right.set(title="Length of held-out responses", ylabel="mean tokens", ylim=(0, None))
    left.legend(loc="lower right", fontsize=7.5)
    seeds, count = len({p["seed"] for p in points}), points[0]["num_prompts"]
    data = f"{CONFIG}, hailstone, {count} held-out prompts x 4"
    made = f"commit {points[0]['commit'][:7]} of {points[0]['date']}"
    caption = f"python figures/accuracy.py ({made}): {data}; mean and range of {seeds} seeds"
    figure.supxlabel(caption, fontsize=7, color="0.4")
    figure.savefig(path)


def compare(points: list[dict]) -> dict:
    """Print whether each curve overlaps the baseline's, and the difference of the seeds' pairs beside its noise.

    Return the differences after the start, in points of accuracy, and how many times as fast the steps were.
    """
    at = {(p["curve"], p["seed"], p["samples"]): p for p in points}
    seeds, counts = sorted({p["seed"] for p in points}), sorted({p["samples"] for p in points})
    base, *others = CURVES
    rows = []
    for other in others:
        print(f"\n{'samples':>7}   {base + ' min mean max':>30}   {other + ' min mean max':>30}   overlap   difference")
        differences, overlaps, errors = [], [], []
        for samples in counts:
            pairs = [(at[base, seed, samples], at[other, seed, samples]) for seed in seeds]
            a, b = at_end = [[pair[i]["avg@4"] for pair in pairs] for i in (0, 1)]
            overlaps.append(max(min(a), min(b)) <= min(max(a), max(b)))
            errors.append(sum(p["standard_error"] ** 2 for pair in pairs for p in pair) ** 0.5 / len(seeds))
            differences.append(statistics.mean(b) - statistics.mean(a))
            ranges = [f"{min(v):.3f} {statistics.mean(v):.3f} {max(v):.3f}" for v in (a, b)]
            print(
                f"{samples:7}   {ranges[0]:>30}   {ranges[1]:>30}   {'yes' if overlaps[-1] else 'NO':>7}   "
                f"{differences[-1]:+.3f} (standard error {errors[-1]:.3f})"
            )
        times = [[at[curve, seed, counts[-1]]["step_seconds"] for seed in seeds] for curve in (base, other)]
        ratios = sorted(a / b for a, b in zip(*times))
        rows.append(
            {
                "curve": CURVES[other][0],
                "least": round(100 * min(differences[1:]), 1),
                "most": round(100 * max(differences[1:]), 1),
                "standard_error": round(100 * max(errors[1:]), 1),  # of the evaluations, not of the seeds
                "pairs": [round(100 * (b - a), 1) + 0.0 for a, b in zip(*at_end)],
                "overlaps": f"{sum(overlaps[1:])} of {len(overlaps) - 1}",
                "faster": [round(ratios[i], 2) for i in (0, len(ratios) // 2, -1)],  # least, middle, most of the seeds
            }
        )
    return {"name": "accuracy", "seeds": len(seeds), "curves": rows}


def train(args: argparse.Namespace, seeds: Sequence[int]) -> list[dict]:
    return [point for seed in seeds for curve in CURVES for point in evaluations(curve, seed, args.quick)]


if __name__ == "__main__":
    make("accuracy", command_line(__doc__, "accuracy").parse_args(), train, draw, compare)
