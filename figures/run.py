"""What a run came to: reward, held-out accuracy, lengths, health of the training, and where a step's seconds went.

python figures/run.py runs/rollflash [OTHER ...] [--out run.png]  later runs are drawn over the first; run.pdf works too

Dots are steps, lines the mean of the last ten: short and long rounds differ, so they are drawn apart. The x axis counts
trained samples, so that runs with other batches compare; bars are 95 % intervals.
"""

import argparse
import sys
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from metrics import RECENT, kind_of, read_records

MARKS = {"short": ".", "long": "x"}
PANELS: dict[str, tuple[str, Callable[[dict], float]]] = {  # title: unit, value of a step
    "Reward": ("mean of a step", lambda r: r["reward"]),
    "Mean length": ("tokens", lambda r: r["length"]["mean"]),
    "Longest response": ("tokens", lambda r: r["length"]["max"]),
    "Rollout": ("seconds, slowest rank", lambda r: r["seconds"].get("rollout", 0.0)),
    "Training": ("seconds, slowest rank", lambda r: r["seconds"].get("train", 0.0)),
    "Entropy": ("nats a token", lambda r: r["train"]["entropy"]),
    "Gradient norm": ("before clipping", lambda r: r["train"]["grad_norm"]),
    "Log-prob difference": ("largest of a step", lambda r: r["train"]["logprob_diff_max"]),
}


def moving(values: list[float]) -> list[float]:
    """Return the mean of each value and up to RECENT - 1 before it."""
    return [sum(part) / len(part) for i in range(len(values)) if (part := values[max(i + 1 - RECENT, 0) : i + 1])]


def draw(folders: list[Path], out: Path) -> None:
    plt.style.use(HERE / "plainroll.mplstyle")
    figure, axes = plt.subplots(3, 3, figsize=(11, 8), sharex=True)
    held_out, *panels = axes.flat
    are_alike = len({folder.name for folder in folders}) < len(folders)
    labels = [str(folder) if are_alike else folder.name for folder in folders]
    for i, folder in enumerate(folders):
        records = read_records(folder / "steps.jsonl")
        samples = dict(zip((r["step"] for r in records), accumulate(r.get("samples", 0) for r in records)))
        evaluated = [r for r in records if r.get("eval")]
        for key in [k for k in (evaluated[0]["eval"] if evaluated else {}) if k.startswith("avg@")]:
            errors = [1.96 * r["eval"]["standard_error"] for r in evaluated]
            places, points = [samples[r["step"]] for r in evaluated], [r["eval"][key] for r in evaluated]
            held_out.errorbar(places, points, errors, fmt="o-", markersize=3, capsize=2, color=f"C{i}", label=labels[i])
            held_out.set_ylabel(key)
        for axis, (_, value) in zip(panels, PANELS.values(), strict=True):
            for kind in sorted({kind_of(r) for r in records if r["step"]}):
                mine = [r for r in records if r["step"] and kind_of(r) == kind and value(r) is not None]
                places, values = [samples[r["step"]] for r in mine], [value(r) for r in mine]
                mark = MARKS.get(kind, "+")
                axis.plot(places, values, mark, color=f"C{i}", alpha=0.35, markersize=4)
                axis.plot(
                    places,
                    moving(values),
                    "--" if kind == "long" else "-",
                    color=f"C{i}",
                    label=f"{labels[i]}, {kind}",
                )
    held_out.set_title("Held out")
    for axis, (title, (unit, _)) in zip(panels, PANELS.items(), strict=True):
        axis.set(title=title, ylabel=unit)
    panels[-1].set_yscale("log")
    for axis in axes[-1]:
        axis.set_xlabel("trained samples")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper right", ncols=4)
    figure.supxlabel(f"python figures/run.py {' '.join(map(str, folders))}", fontsize=7, color="0.4")
    figure.savefig(out)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders")
    parser.add_argument("--out", type=Path, default=Path("run.png"), help="file to draw; .pdf and .svg work too")
    arguments = parser.parse_args()
    for folder in arguments.runs:
        if not (folder / "steps.jsonl").exists():
            print(f"error: {folder}: no steps.jsonl there; give the run.dir of a run", file=sys.stderr)
            return 2
    draw(arguments.runs, arguments.out)
    print(arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
