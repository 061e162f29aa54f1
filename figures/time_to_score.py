"""Seconds until a model has learnt a task, by ways to train: the runs of benchmarks/time_to_score.py that are there.

python figures/time_to_score.py    draws from benchmarks/results/time_to_score.json

A panel is a task on one CPU, a row a way to train, a dot a run, in the color of its seed; an arrow is a run that ended
without the score. A bar is the median of a way's seeds, where most of them have the score.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
DATA = HERE.parent / "benchmarks" / "results" / "time_to_score.json"
TICKS = 5, 10, 20, 50, 100, 200, 500, 1000, 2000  # seconds; nothing reaches a score in the first


def draw(result: dict[str, Any], path: Path) -> None:
    plt.style.use(HERE / "plainroll.mplstyle")
    contests = list(dict.fromkeys((row["task"], row["cpu"]) for row in result["board"]))
    rows = {c: [row for row in result["board"] if (row["task"], row["cpu"]) == c] for c in contests}
    heights = [len(found) + 2 for found in rows.values()]
    figure, panels = plt.subplots(
        len(contests), squeeze=False, sharex=True, figsize=(7.5, 0.8 + 0.23 * sum(heights)), height_ratios=heights
    )
    for axes, (task, cpu) in zip(panels.flat, contests):
        for y, place in enumerate(rows[task, cpu]):
            if place["median"]:
                axes.barh(y, place["median"], color="0.88", zorder=0)
                axes.annotate(f"{place['median']:.0f} s", (TICKS[0], y), (4, -3), textcoords="offset points")
            for run in (r for r in result["runs"] if (r["task"], r["entry"], r["cpu"]) == (task, place["entry"], cpu)):
                axes.plot(run["seconds"], y, "o" if run["reached"] else ">", color=f"C{run['seed']}")
        titles = [place["title"] for place in rows[task, cpu]]
        axes.set_yticks(range(len(titles)), titles)
        axes.set(ylim=(len(titles) - 0.4, -0.6))
        axes.set_title(f"{task}, to {rows[task, cpu][0]['score']:g}, on cores of {cpu}", loc="right")
        axes.grid(visible=False, axis="y")
    axes.set_xscale("log")
    axes.set_xticks(TICKS, map(str, TICKS))
    axes.set(xlabel="seconds of steps", xlim=(TICKS[0], 1.3 * max(run["seconds"] for run in result["runs"])))
    for seed in sorted({run["seed"] for run in result["runs"]}):
        axes.plot([], [], "o", color=f"C{seed}", label=f"seed {seed}")
    panels[0, 0].legend(*axes.get_legend_handles_labels(), loc="upper right")
    made = "python figures/time_to_score.py, 2 ranks of one thread; docs/results.md names the commits"
    figure.supxlabel(made, fontsize=7, color="0.4")
    figure.savefig(path)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    if not DATA.exists():
        raise SystemExit(f"error: there is no {DATA.name} to draw; run benchmarks/time_to_score.py first")
    draw(json.loads(DATA.read_text(encoding="utf-8"))["result"], HERE / "time_to_score.png")


if __name__ == "__main__":
    main()
