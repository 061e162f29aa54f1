"""Two asynchronous runs, lane by lane: which weights each rank decodes with, and whose tokens each update is made of.

python figures/timeline_asynchrony.py           runs ten steps of each on two ranks (a minute), then draws them
python figures/timeline_asynchrony.py --draw    draws again from figures/timeline_asynchrony.json
"""

import argparse
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Patch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from timeline import SETTINGS, STEPS, Span, read_trace
from training_runs import CONFIG, keep, kept, run

from metrics import read_records

ASYNCHRONOUS = [*SETTINGS, "scheduler.policy=synchronous", "overlap.depth=1", "overlap.bound=4", "overlap.clock=time"]
RUNS = {  # title: ranks that only train, settings
    "apart: one rank trains, the other decodes on": (1, [*ASYNCHRONOUS, "overlap.train_ranks=1"]),
    "in turns: both ranks decode until a batch is there, and train it": (0, ASYNCHRONOUS),
}
WAIT = "0.8"
SYNC = ("publish", "sync", "exchange")
GAP = 0.02  # seconds; a shorter wait between two windows is not drawn
Run = dict[str, Any]  # trainers; spans, without waits; tokens of each update by the version that drew them


def colour(version: int) -> str:
    """Return one of five colours: no batch has tokens of more versions, with a bound of 4."""
    return f"C{version % 5}"


def joined(spans: list[Span]) -> list[Span]:
    """Return the spans of a rank with those of one stage and step joined where the gap between them is short."""
    found: list[Span] = []
    for span in sorted(spans, key=lambda span: span[2]):
        rank, name, start, end, step = span
        if found and found[-1][1::3] == (name, step) and start - found[-1][3] < GAP:
            span = (rank, name, found.pop()[2], end, step)
        found.append(span)
    return [(rank, name, round(start, 4), round(end, 4), step) for rank, name, start, end, step in found]


def read(folder: Path, num_trainers: int) -> Run:
    spans = [s for s in read_trace(folder / "trace.json") if s[1] in ("prefill", "decode", "train", *SYNC)]
    by_rank = groupby(sorted(spans), key=lambda span: span[0])
    lags = {r["step"]: r["round"]["lag"]["tokens"] for r in read_records(folder / "steps.jsonl") if r["step"]}
    drawn = {step: {step - 1 - int(lag): count for lag, count in tokens.items()} for step, tokens in lags.items()}
    return {"trainers": num_trainers, "spans": [s for _, of in by_rank for s in joined([*of])], "tokens": drawn}


def draw_lane(axes: Any, lane: int, spans: list[Span], tokens: dict[str, dict[str, int]]) -> None:
    """Draw one rank. In step n the weights are of version n - 1, and its update makes those of version n."""
    for _, name, start, end, step in spans:
        if name == "train":
            bottom, total = lane + 0.4, sum(tokens[str(step)].values())
            for version, count in sorted((int(v), n) for v, n in tokens[str(step)].items()):
                height = 0.8 * count / total
                bottom -= height
                axes.broken_barh([(start, end - start)], (bottom, height), color=colour(version), linewidth=0)
            axes.broken_barh([(start, end - start)], (lane - 0.4, 0.8), facecolor="none", edgecolor="k", linewidth=1.2)
        elif name in SYNC:
            axes.broken_barh([(start, end - start)], (lane - 0.4, 0.8), color="k", linewidth=0)
        else:
            hatch = "////" if name == "prefill" else None
            axes.broken_barh(
                [(start, end - start)],
                (lane - 0.4, 0.8),
                facecolor=colour(step - 1),
                edgecolor="w",
                linewidth=0,
                hatch=hatch,
            )


def draw(runs: dict[str, Run], path: Path, caption: str) -> None:
    plt.style.use(HERE / "plainroll.mplstyle")
    figure, panels = plt.subplots(len(runs), sharex=True, squeeze=False, figsize=(7.2, 1.4 + 1.5 * len(runs)))
    for axes, (title, made) in zip(panels[:, 0], runs.items(), strict=True):
        lanes = {lane: [*of] for lane, of in groupby(map(tuple, made["spans"]), key=lambda span: span[0])}
        end = max(span[3] for of in lanes.values() for span in of)
        for lane, spans in lanes.items():
            axes.broken_barh([(0, end)], (lane - 0.4, 0.8), color=WAIT, linewidth=0)
            draw_lane(axes, lane, spans, made["tokens"])
        updates = {s[4]: s[3] for s in sorted(lanes[0], key=lambda span: span[3]) if s[1] in ("train", *SYNC)}
        for step, at in updates.items():
            axes.axvline(at, color="k", linewidth=0.8)
            axes.text(at, -0.62, str(step), color=colour(step), ha="center", fontsize=8, fontweight="bold")
        names = []
        for lane, spans in lanes.items():
            busy = sum(s[3] - s[2] for s in spans if s[1] not in SYNC) / end
            role = "" if not made["trainers"] else " trains" if lane < made["trainers"] else " decodes"
            names.append(f"rank {lane}{role}\n{busy:.0%} busy")
        axes.set_title(title, pad=16)
        axes.set(ylim=(len(lanes) - 0.5, -0.5), yticks=[*lanes], yticklabels=names)
        axes.grid(False)
    panels[-1, 0].set(
        xlim=(0, None), xlabel="seconds; a line at each update, with the version of the weights that it makes"
    )
    figure.legend(
        handles=[
            Patch(color=colour(0), label="decode; colour: version of the weights"),
            Patch(
                facecolor=colour(0),
                edgecolor="w",
                hatch="////",
                label="prefill: prompts, and interrupted sequences again",
            ),
            Patch(facecolor=colour(0), edgecolor="k", label="train; colours: versions that drew the tokens"),
            Patch(color="k", label="new weights travel"),
            Patch(color=WAIT, label="wait"),
        ],
        loc="outside lower center",
        ncols=3,
        fontsize=7,
    )
    figure.suptitle(caption, fontsize=7, color="0.4", x=0.01, ha="left")
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", action="store_true", help="only draw, from figures/timeline_asynchrony.json")
    args = parser.parse_args()
    data = HERE / "timeline_asynchrony.json"
    if not args.draw:
        runs = {
            title: read(run(f"timeline-asynchrony-{trainers}", *settings), trainers)
            for title, (trainers, settings) in RUNS.items()
        }
        keep(data, runs)
    runs, made = kept(data)
    caption = f"python figures/timeline_asynchrony.py ({made}): {CONFIG}, hailstone, 2 ranks, depth 1, {STEPS} steps"
    draw(runs, HERE / "timeline_asynchrony.png", caption)


if __name__ == "__main__":
    main()
