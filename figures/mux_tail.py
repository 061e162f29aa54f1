"""RollMux, Figures 2 and 11: iterations of single jobs, and what tail migration gains where two share a node."""

from statistics import fmean

from mux_kinds import TAIL_REPLICAS, TAIL_SHARE, group, solo, throughput
from paper import Table, command, legend, note, pair, plt, save, style

from simulation.mux_group import TRAINING, Group

ITERATION = {"7B-4k": 158.0, "A": 247.0, "B": 436.0, "C": 539.0}  # seconds, Figure 2
GAIN = {("7B-4k", "7B-4k"): 1.12, ("A", "A"): 1.19, ("A", "B"): 1.06, ("B", "B"): 1.28}
TITLES = {"7B-4k": "7B, 4k", "A": "7B, 8k", "B": "14B, 8k", "C": "32B, 8k"}
NODE = (0,)


def title(kinds: tuple[str, str]) -> str:
    return " + ".join(TITLES[kind] for kind in kinds)


def main() -> None:
    table = Table("RollMux, Figure 2: a job alone", "seconds of an iteration")
    for kind, paper in ITERATION.items():
        table.add(TITLES[kind], paper, solo(kind).period)
    rows = table.rows
    table = Table("RollMux, Figure 11: tail migration", "times the throughput")
    means = {}
    style()
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.6), width_ratios=(1, 1, 0.8), sharey=False)
    for kinds, paper in GAIN.items():
        places = tuple((kind, NODE) for kind in kinds)
        played = [group(places, migrates=migrates) for migrates in (False, True)]
        means[kinds] = [fmean(throughput(places, each)) for each in played]
        table.add(title(kinds), paper, means[kinds][1] / means[kinds][0])
        if kinds == ("A", "A"):
            for axis, each, how in zip(axes, played, ("all workers to the end", "tail migration"), strict=False):
                draw(axis, each)
                axis.set(title=f"{title(kinds)}, {how}", xlabel="seconds", xlim=(0, 1000))
    note(
        "Fitted: the prompts of a batch and training's share of the peak, to Figure 2, and how many of 8 replicas keep "
        f"the tail ({TAIL_REPLICAS}), to Figure 11. Predicted: the rest, from lengths that fit other figures. A GPU is "
        "given back only if the other job waits for it. A gain is that of the mean throughput over that alone."
    )
    pair(axes[2], list(GAIN.values()), [on / off for off, on in means.values()], [title(kinds) for kinds in GAIN])
    axes[2].set(title="gain", ylim=(0.8, 1.5))
    axes[2].legend(fontsize=7)
    legend(figure, axes[0])
    save(figure, "mux_tail", f"a node of 8 H20 and one of 8 H800, from {TAIL_SHARE:.0%} on", "arXiv 2512.11306")
    table.rows = rows + table.rows
    table.end("mux_tail", throughput={title(kinds): round(on, 3) for kinds, (_, on) in means.items()})


def draw(axis: plt.Axes, played: Group) -> None:
    """Draw who holds which worker, over time."""
    workers = [*played.jobs[0].pool, TRAINING]
    for held in played.held:
        color = f"C{[job.name for job in played.jobs].index(held.job)}"
        known = axis.get_legend_handles_labels()[1]
        label = f"job {held.job[-1]}"
        axis.barh(
            workers.index(held.workers),
            held.end - held.start,
            left=held.start,
            color=color,
            label="" if label in known else label,
        )
    axis.set(yticks=range(len(workers)), yticklabels=[*(f"worker {i}" for i in range(len(workers) - 1)), "training"])


if __name__ == "__main__":
    command(main, __doc__)
