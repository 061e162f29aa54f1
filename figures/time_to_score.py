"""Held-out accuracy over seconds of training: the runs of benchmarks/time_to_score.py, as far as they are there.

python figures/time_to_score.py    draws from benchmarks/results/time_to_score.json

A panel is a task on one CPU. A line is a run, to its first evaluation with the score (dashed); a dot or square is the
median of an entry's seeds, where most of them have it.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
COLORS = 5  # of plainroll.mplstyle; further entries have dotted lines and squares
DATA = HERE.parent / "benchmarks" / "results" / "time_to_score.json"


def draw(result: dict[str, Any], path: Path) -> None:
    plt.style.use(HERE / "plainroll.mplstyle")
    contests = list(dict.fromkeys((row["task"], row["cpu"]) for row in result["board"]))
    names = list(dict.fromkeys(row["entry"] for row in result["board"]))
    figure, panels = plt.subplots(1, len(contests), squeeze=False, figsize=(1.2 + 3.4 * len(contests), 3.9))
    for axes, (task, cpu) in zip(panels.flat, contests):
        places = [row for row in result["board"] if (row["task"], row["cpu"]) == (task, cpu)]
        score = places[0]["score"]
        axes.axhline(score, color="0.4", linestyle="--", linewidth=1)
        for place in places:
            number = names.index(place["entry"])
            color, line, mark = f"C{number}", "-:"[number // COLORS % 2], "os"[number // COLORS % 2]
            asked = task, place["entry"], cpu
            for run in (r for r in result["runs"] if (r["task"], r["entry"], r["cpu"]) == asked):
                points = [p for p in run["curve"] if p["seconds"] <= run["seconds"]]
                axes.plot([p["seconds"] for p in points], [p["score"] for p in points], line, color=color, alpha=0.45)
            label = place["title"] + (f": {place['median']:.0f} s" if place["median"] else ": not reached")
            axes.plot(place["median"] or [], score if place["median"] else [], mark, color=color, label=label)
        axes.set(title=f"{task}, to {score:g}\n{cpu}", xlabel="seconds of steps")
        axes.set_xscale("symlog", linthresh=20)  # TRL takes many times as long
        axes.legend(loc="lower right", fontsize=6)
    panels[0, 0].set_ylabel("held-out avg@4")
    commits = ", ".join(sorted({run["commit"][:7] for run in result["runs"]}))
    figure.supxlabel(f"python figures/time_to_score.py ({commits}), 2 ranks of one thread", fontsize=7, color="0.4")
    figure.savefig(path)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    if not DATA.exists():
        raise SystemExit(f"error: there is no {DATA.name} to draw; run benchmarks/time_to_score.py first")
    draw(json.loads(DATA.read_text(encoding="utf-8"))["result"], HERE / "time_to_score.png")


if __name__ == "__main__":
    main()
