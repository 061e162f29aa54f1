"""RollMux, Theorem 1: the round robin against all other orders, by brute force, and the condition that it needs."""

from paper import Table, command, legend, note, plt, save, style

from policies.group import Member, cycle, load, play
from simulation.mux_orders import best, random_groups, utilisation

GROUPS, LONGEST, LAST = 300, 4, 8  # groups, turns of a word, iterations of the steady state
ONE = frozenset([0])
STARVING = [Member(f"job {i}", ONE, roll, train) for i, (roll, train) in enumerate(((4, 6), (16, 20), (6, 4)))]


def gain(group: list[Member], starves: bool) -> float:
    """Return by how much the best order uses the nodes better than the round robin."""
    return utilisation(best(group, LONGEST, starves)) / utilisation(group)


def slowest(group: list[Member]) -> float:
    """Return the longest of its jobs' periods, as it plays, over the period of its longest job alone."""
    ends = {job.name: [ran.end for ran in play(group, 2 * LAST) if ran[:2] == (job.name, "train")] for job in group}
    return max((at[2 * LAST - 1] - at[LAST - 1]) / LAST for at in ends.values()) / cycle(group)


def main() -> None:
    groups = random_groups(0, GROUPS)
    unsaturated = [group for group in groups if load(group) < cycle(group)]
    saturated = [group for group in groups if load(group) >= cycle(group)]
    kept, full = ([gain(group, starves=False) for group in part] for part in (unsaturated, saturated))
    starved = [gain(group, starves=True) for group in unsaturated]
    table = Table(f"RollMux, Theorem 1: {len(unsaturated)} groups with idle time", "times the round robin's")
    table.add("period over that of the longest job", 1.0, max(map(slowest, unsaturated)))
    table.add("best order in which all jobs take turns", 1.0, max(kept))
    left_out = [job for job in STARVING if job not in best(STARVING, LONGEST, starves=True)]
    table.add("best order, if a job may be left out", 1.0, gain(STARVING, starves=True))
    beaten = {
        "starves": sum(g > 1 + 1e-6 for g in starved),
        "saturated": sum(g > 1 + 1e-6 for g in full),
        "saturated_most": round(max(full), 3),
    }
    note(
        f"In {beaten['starves']} of {len(unsaturated)} groups an order that leaves a job out uses the nodes better; "
        f"the theorem does not exclude it. Without idle time ({len(saturated)} groups), which it does not "
        f"claim, {beaten['saturated']} are beaten, by up to {max(full):.2f} times."
    )
    style()
    figure, axes = plt.subplots(2, 1, figsize=(8, 3.6), sharex=True)
    rest = [job for job in STARVING if job not in left_out]
    for axis, group in zip(axes, (STARVING, rest), strict=True):
        for ran in play(group, 12):
            row = ("train", "rollout").index(ran.phase)
            color = f"C{[job.name for job in STARVING].index(ran.job)}"
            known = ran.job in axis.get_legend_handles_labels()[1]
            axis.barh(row, ran.end - ran.start, left=ran.start, color=color, label="" if known else ran.job)
        axis.set(xlim=(0, 3 * cycle(STARVING)), yticks=(0, 1), yticklabels=("training", "rollout"))
        axis.set_title(
            f"{'round robin' if group is STARVING else f'without {left_out[0].name}'}: "
            f"utilisation {utilisation(group):.2f}"
        )
    axes[1].set(xlabel="seconds")
    legend(figure, axes[0])
    save(figure, "mux_theorem", f"{GROUPS} groups of 2 or 3 jobs, words of {LONGEST} turns", "arXiv 2512.11306")
    both = {"round_robin": utilisation(STARVING), "best": utilisation(rest)}
    table.end(
        "mux_theorem",
        unsaturated=len(unsaturated),
        saturated_groups=len(saturated),
        **beaten,
        **{key: round(value, 3) for key, value in both.items()},
    )


if __name__ == "__main__":
    command(main, __doc__)
