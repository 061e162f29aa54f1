"""What a short round leaves out: length, reward and advantage of kept and censored responses, audited.

python figures/bias.py            trains what is missing in runs/ (two runs of minutes), then draws
python figures/bias.py --draw     draws again from figures/bias.json
python figures/bias.py --bandit   gradients on a bandit where the true one is known; writes figures/bias_bandit.json

`scheduler.audit = 1` finishes every response of every short round and trains the same samples all the same. Keeping
the first R0 of eta x R0 responses censors the others for good. With `eta_responses = 1` there are none: what a race
stops are whole prompts, which another round trains.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from training_runs import CONFIG, keep, kept, run

from metrics import read_records

STEPS = 50
RUNS = {"eta on both": ["scheduler.eta_responses=1.25"], "eta on prompts only": ["scheduler.eta_responses=1"]}
SETS = {
    "accepted": "trained",
    "censored_responses": "never trained",
    "censored_prompts": "put off to another round",
}
WHAT = {"length": "tokens", "reward": "share right", "advantage": "advantage; of whole groups 0"}


def audited(name: str) -> list[dict]:
    """Return what each short round of a run's steps recorded, by set."""
    settings = ["scheduler.audit=1", f"run.steps={STEPS}", "data.eval_prompts=0", *RUNS[name]]
    records = read_records(run(f"bias-{name.replace(' ', '-')}", *settings) / "steps.jsonl")
    rounds = [{"step": r["step"], **r["round"]["audited"]} for r in records if r.get("round", {}).get("audited")]
    return [
        {
            "run": name,
            "step": r["step"],
            "set": part,
            "responses": r[part]["responses"],
            "p99": r[part]["length"]["p99"],
            **{what: r[part][what]["mean"] for what in WHAT},
        }
        for r in rounds
        for part in SETS
        if r[part]["responses"]
    ]


def mean(rows: list[dict], what: str) -> tuple[float, float]:
    """Return the mean over all responses, and its standard error over rounds."""
    count = sum(row["responses"] for row in rows)
    error = statistics.stdev(row[what] for row in rows) / len(rows) ** 0.5
    return sum(row[what] * row["responses"] for row in rows) / count, error


def draw(rows: list[dict], path: Path, caption: str) -> None:
    plt.style.use(HERE / "plainroll.mplstyle")
    figure, panels = plt.subplots(1, len(WHAT), figsize=(7.2, 3.6))
    for axes, (what, unit) in zip(panels, WHAT.items()):
        for x, name in enumerate(RUNS):
            for i, (part, label) in enumerate(SETS.items()):
                mine = [row for row in rows if (row["run"], row["set"]) == (name, part)]
                value, error = mean(mine, what) if mine else (0.0, 0.0)
                place = x + 0.26 * (i - 1)
                whole = what == "advantage" and abs(value) < 1e-9  # of all of a group the mean is 0
                axes.bar(place, value, 0.24, yerr=1.96 * error, color=f"C{i}", label="" if x else label)
                text = "none" if not mine else "0" if whole else f"{value:.{2 if value < 1 else 0}f}"
                is_below = value < 0 and not whole
                end = value - 1.96 * error if is_below else value + 1.96 * error
                look = {"rotation": 90, "va": "top" if is_below else "bottom", "fontsize": 6.5, "color": "0.3"}
                axes.text(place, end, f" {text} ", ha="center", **look)
        axes.margins(y=0.2)
        axes.set(title=what.capitalize(), ylabel=unit, xticks=range(len(RUNS)))
        axes.set_xticklabels([name.replace(" on ", " on\n") for name in RUNS])
        axes.grid(False, axis="x")
        axes.set_axisbelow(True)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper right", ncols=len(SETS))
    figure.supxlabel(caption, fontsize=7, color="0.4")
    figure.savefig(path)


# ---- a bandit ------------------------------------------------------------------------------------------------------

ARM_REWARDS = np.array([0.2, 0.9, 0.5, 0.8, 0.1, 0.3])  # of arms from the shortest to the longest
ARM_LOGITS = np.array([0.3, 0.2, 0.1, 0.0, -0.2, 0.1])
LAUNCHED, KEPT, SHARE, TRIALS = 10, 8, 0.2, 20_000


def gradient(arms: np.ndarray, chances: np.ndarray) -> np.ndarray:
    """Return the policy gradient of pulls of one prompt, without bias: its baseline is the mean of the others."""
    rewards = ARM_REWARDS[arms]
    weights = (rewards - rewards.mean()) / (len(arms) - 1)
    return np.bincount(arms, weights, len(chances)) - weights.sum() * chances


def bandit(trials: int = TRIALS) -> list[dict]:
    """Return how far the mean of each estimate is from the known gradient, and its variance, over that of no race.

    "corrected": a share of the prompts finishes all responses; for them, what the race left out counts 1 / share.
    """
    random, chances = np.random.default_rng(0), np.exp(ARM_LOGITS) / np.exp(ARM_LOGITS).sum()
    true = chances * (ARM_REWARDS - chances @ ARM_REWARDS)
    found: dict[str, list[np.ndarray]] = {"no race": [], "the fastest responses": [], "corrected": []}
    for _ in range(trials):
        arms = random.choice(len(chances), LAUNCHED, p=chances)
        fast = gradient(arms[np.lexsort((random.random(LAUNCHED), arms))[:KEPT]], chances)
        found["no race"].append(gradient(arms[:KEPT], chances))
        found["the fastest responses"].append(fast)
        is_whole = random.random() < SHARE
        found["corrected"].append(fast + is_whole / SHARE * (gradient(arms, chances) - fast))
    base = np.var(found["no race"], axis=0).sum()
    return [
        {
            "estimate": name,
            "bias": round(float(np.linalg.norm(np.mean(each, axis=0) - true) / np.linalg.norm(true)), 3),
            "variance": round(float(np.var(each, axis=0).sum() / base), 2),
        }
        for name, each in found.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", action="store_true", help="only draw, from figures/bias.json")
    parser.add_argument("--bandit", action="store_true", help="gradients on a bandit; seconds")
    args = parser.parse_args()
    if args.bandit:
        (HERE / "bias_bandit.json").write_text(json.dumps(rows := bandit(), indent=1) + "\n", encoding="utf-8")
        print(json.dumps(rows))
        return
    data = HERE / "bias.json"
    if not args.draw:
        keep(data, [row for name in RUNS for row in audited(name)])
    rows, made = kept(data)
    what = f"{CONFIG}, hailstone, short rounds of {STEPS} steps, all audited; bars: 95 % interval"
    draw(rows, HERE / "bias.png", f"python figures/bias.py ({made}): {what}")
    for name in RUNS:
        for part, label in SETS.items():
            if mine := [row for row in rows if (row["run"], row["set"]) == (name, part)]:
                shown = "   ".join("{} {:.3f} +- {:.3f}".format(what, *mean(mine, what)) for what in WHAT)
                print(f"{name:20} {label:25} {sum(row['responses'] for row in mine):6} responses   {shown}")


if __name__ == "__main__":
    main()
