"""Which job of a co-execution group had which worker when: python figures/mux_timeline.py runs/mux/mux.jsonl

Draws mux.png beside the file that mux.py writes, for the newest start of the group's server.
"""

import argparse
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Patch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from metrics import read_records
from process.group_timeline import held


def draw(path: Path) -> Path:
    plt.style.use(HERE / "plainroll.mplstyle")
    spans = held(read_records(path))
    if not spans:
        raise SystemExit(f"{path}: no phase of any job; give the mux.jsonl of a group")
    workers, jobs = sorted({span.worker for span in spans}), sorted({span.job for span in spans})
    figure, axes = plt.subplots(figsize=(7.2, 1.4 + 0.4 * len(workers)))
    for span in spans:
        bar, row = [(span.start, span.end - span.start)], workers.index(span.worker)
        hatch = "////" if span.phase == "start" else None
        axes.broken_barh(bar, (row - 0.4, 0.8), color=f"C{jobs.index(span.job)}", hatch=hatch, edgecolor="white")
    axes.set(yticks=range(len(workers)), yticklabels=workers, ylim=(len(workers) - 0.4, -0.6))
    axes.set(xlabel="seconds; hatched: a job starts", xlim=(0, None))
    axes.grid(False)
    handles = [Patch(color=f"C{i}", label=job) for i, job in enumerate(jobs)]
    figure.legend(handles=handles, loc="outside lower center", ncols=6, fontsize=7)
    figure.savefig(path.with_name("mux.png"))
    plt.close(figure)
    return path.with_name("mux.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="mux.jsonl of a group")
    try:
        print(draw(parser.parse_args().file))
    except OSError as error:
        raise SystemExit(f"{error.filename}: {error.strerror}") from None
