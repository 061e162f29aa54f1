"""How a draft is verified, and how often older weights draw a token again: python figures/drafts.py

The left part is a drawing; the others show the stored run of benchmarks/drafts.py.
"""

import argparse
import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

HERE = Path(__file__).parent
DATA = HERE.parent / "benchmarks" / "results" / "drafts.json"

CONTEXT, DRAFT, DRAWN = ["The", "sum", "is"], ["27", ".", "So", "we"], ["27", ".", "Now", "try", "x"]
LAGS = (1, 2, 4, 8)


def cell(axes: Axes, x: float, y: float, text: str, color: str, fades: bool = False) -> None:
    axes.add_patch(Rectangle((x, y), 0.92, 0.7, facecolor=color, alpha=0.12 if fades else 0.4, edgecolor="0.4"))
    axes.text(x + 0.46, y + 0.35, text, ha="center", va="center", fontsize=8, color="0.6" if fades else "0.1")


def draw_step(axes: Axes) -> None:
    """Draw one step of one row: what is computed, what is drawn, what is kept."""
    first = next(i for i, (draft, drawn) in enumerate(zip(DRAFT, DRAWN)) if draft != drawn)
    for i, token in enumerate([*CONTEXT, *DRAFT]):
        cell(axes, i, 2.4, token, "0.7" if i < len(CONTEXT) else "C0")
    for i, token in enumerate(DRAWN):
        x = i + len(CONTEXT) - 1
        cell(axes, x, 0.6, token, "C2" if i < first else "C1", fades=i > first)
        arrow = dict(arrowstyle="->", color="0.75" if i > first else "0.3")
        axes.annotate("", (x + 0.46, 1.35), (x + 0.46, 2.35), arrowprops=arrow)
    axes.text(0, 3.3, "context", fontsize=8)
    axes.text(len(CONTEXT), 3.3, "draft: what older weights drew", fontsize=8, color="C0")
    axes.text(-0.2, 0.75, "drawn, each by\nits place's noise", fontsize=7)
    kept = len(CONTEXT) - 1
    axes.text(kept, 0.1, "kept: equal to the draft, and the first that differs", fontsize=7)
    axes.text(kept + first + 1.05, -0.4, "dropped: their context is another", fontsize=7, color="0.5")
    axes.set(xlim=(-0.3, len(CONTEXT) + len(DRAFT)), ylim=(-0.7, 3.8), title="One step of one row")
    axes.axis("off")


def draw_agreement(axes: Axes, run: dict) -> None:
    lags = [lag for lag in LAGS if f"agreement_lag{lag}" in run]
    for i, (name, label) in enumerate((("agreement", "a token"), ("prefix", "all tokens up to it"))):
        axes.plot(lags, [run[f"{name}_lag{lag}"] for lag in lags], "o-", color=f"C{2 - 2 * i}", label=label)
    axes.set(xscale="log", xticks=lags, xticklabels=lags, ylim=(0, 1.03), xlabel="updates since older weights drew")
    axes.set(ylabel="share drawn again", title="The default task, trained")
    axes.minorticks_off()
    axes.legend(fontsize=7)


def draw_sources(axes: Axes, run: dict) -> None:
    """Draw which share of the drafted tokens was kept, by task and source."""
    names = sorted({name for task in run["tasks"] for name in task["sources"]})
    for i, name in enumerate(names):
        shares = [
            count["accepted"] / count["drafted"] if (count := t["sources"].get(name)) else 0 for t in run["tasks"]
        ]
        axes.bar([x + 0.8 * i / len(names) for x in range(len(shares))], shares, 0.75 / len(names), label=name)
    axes.set_xticks([x + 0.3 for x in range(len(run["tasks"]))], [t["task"].replace(" ", "\n") for t in run["tasks"]])
    axes.set(ylim=(0, 1.2), yticks=[0, 0.2, 0.4, 0.6, 0.8, 1], ylabel="kept of drafted tokens", title="By source")
    axes.legend(fontsize=7, ncols=len(names), loc="upper center")  # above the bars


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    plt.style.use(HERE / "plainroll.mplstyle")
    if not DATA.exists():
        sys.exit(f"{DATA}: missing; python benchmarks/results.py run drafts")
    stored = json.loads(DATA.read_text(encoding="utf-8"))
    run = stored["result"]
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(10.5, 2.9), width_ratios=(3, 2, 2))
    draw_step(left)
    draw_agreement(middle, run)
    draw_sources(right, run)
    figure.savefig(HERE / "drafts.png", metadata={"Comment": stored["checksum"]})  # a test compares them


if __name__ == "__main__":
    main()
