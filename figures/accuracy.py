"""Tail batching against the synchronous baseline: held-out accuracy after equal numbers of trained samples (Figure 8).

python figures/accuracy.py            trains what is missing in runs/ (twelve runs, 2 to 4 minutes each), then draws
python figures/accuracy.py --draw     draws again from figures/accuracy.json
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from training_runs import CONFIG, run

from metrics import read_records

CURVES = {
    "synchronous": ("synchronous", ["scheduler.policy=synchronous"]),
    "tail_batching": ("tail batching, eta 1.25 on both", []),
    "all": ("all parts, eta 1.25 on both", ["planner.rule=predict", "stream.policy=estimate"]),
    "eta_on_prompts": ("tail batching, eta on prompts only", ["scheduler.eta_responses=1"]),
}
EVERY = 20  # steps between evaluations: whole periods of 4 short rounds and a long one, so both have trained the same


def evaluations(curve: str, seed: int) -> list[dict]:
    """Return the evaluations of one run, each with the samples and prompts that were trained before it."""
    settings = [*CURVES[curve][1], f"run.seed={seed}", f"warm_start.seed={seed}", f"run.eval_every={EVERY}"]
    records = read_records(run(f"accuracy-{curve}-seed{seed}", *settings) / "steps.jsonl")
    points, samples = [], 0
    for record in records:
        samples += record.get("samples", 0)
        if record.get("eval"):
            queue = record["round"]["queue"] if record["step"] else 0
            points.append({"curve": curve, "seed": seed, "samples": samples, "queue": queue, **record["eval"]})
    return points


def by_samples(points: list[dict], curve: str, value) -> tuple[list[int], list[list[float]]]:
    """Return the numbers of trained samples, and `value` of every seed at each."""
    mine = [p for p in points if p["curve"] == curve]
    samples = sorted({p["samples"] for p in mine})
    return samples, [[value(p) for p in mine if p["samples"] == s] for s in samples]


def draw(points: list[dict], path: Path) -> None:
    plt.style.use(HERE / "plainroll.mplstyle")
    figure, (left, right) = plt.subplots(1, 2)
    panels = ((left, lambda p: 100 * p["avg@4"]), (right, lambda p: p["length"]["mean"]))
    for i, (curve, (label, _)) in enumerate(CURVES.items()):
        for axes, value in panels:
            samples, values = by_samples(points, curve, value)
            axes.plot(samples, [statistics.mean(v) for v in values], color=f"C{i}", label=label)
            axes.fill_between(samples, [min(v) for v in values], [max(v) for v in values], color=f"C{i}", alpha=0.2)
            axes.set(xlabel="trained samples", xticks=samples[:: len(samples) // 3 or 1])
    left.set(title="Held-out accuracy", ylabel="avg@4 at temperature 1 (%)", ylim=(40, 90))
    right.set(title="Length of held-out responses", ylabel="mean tokens", ylim=(0, None))
    left.legend(loc="lower right")
    seeds, count = len({p["seed"] for p in points}), points[0]["num_prompts"]
    data = f"{CONFIG}, hailstone, {count} held-out prompts x 4"
    caption = f"python figures/accuracy.py: {data}; mean and range of {seeds} seeds"
    figure.supxlabel(caption, fontsize=7, color="0.4")
    figure.savefig(path)


def compare(points: list[dict]) -> None:
    """Print whether each curve overlaps the baseline's, and the difference of the seeds' pairs beside its noise."""
    at = {(p["curve"], p["seed"], p["samples"]): p for p in points}
    seeds = sorted({p["seed"] for p in points})
    base, *others = CURVES
    for other in others:
        print(f"\n{'samples':>7}   {base + ' min mean max':>30}   {other + ' min mean max':>30}   overlap   difference")
        for samples in sorted({p["samples"] for p in points}):
            pairs = [(at[base, seed, samples], at[other, seed, samples]) for seed in seeds]
            a, b = ([pair[i]["avg@4"] for pair in pairs] for i in (0, 1))
            overlap = max(min(a), min(b)) <= min(max(a), max(b))
            error = sum(p["standard_error"] ** 2 for pair in pairs for p in pair) ** 0.5 / len(seeds)
            ranges = [f"{min(v):.3f} {statistics.mean(v):.3f} {max(v):.3f}" for v in (a, b)]
            print(
                f"{samples:7}   {ranges[0]:>30}   {ranges[1]:>30}   {'yes' if overlap else 'NO':>7}   "
                f"{statistics.mean(b) - statistics.mean(a):+.3f} (standard error {error:.3f})"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (default 3)")
    parser.add_argument("--draw", action="store_true", help="only draw, from figures/accuracy.json")
    args = parser.parse_args()
    data = HERE / "accuracy.json"
    if not args.draw:
        points = [p for seed in range(args.seeds) for curve in CURVES for p in evaluations(curve, seed)]
        data.write_text(json.dumps(points, indent=1), encoding="utf-8")
    points = json.loads(data.read_text(encoding="utf-8"))
    draw(points, HERE / "accuracy.png")
    compare(points)


if __name__ == "__main__":
    main()
