"""Table 1: where a synchronous step's time goes (14B/16k, 32 H800)."""

from paper import Table, command, plt, run, save, seconds, style

PAPER = {"rollout": (0.66, 0.72), "reward": (0.05, 0.13), "train": (0.21, 0.23)}  # ranges over data sets


def main() -> None:
    records = run("veRL", "14B/16k", 20).records
    share = {stage: seconds(records, stage) / seconds(records) for stage in PAPER}
    table = Table("Table 1: share of a synchronous step, 14B/16k", "the paper's values are the middles of its ranges")
    for stage, (low, high) in PAPER.items():
        table.add(f"{stage}  ({low:.0%} to {high:.0%})", (low + high) / 2, share[stage])
    style()
    figure, axis = plt.subplots()
    for name, shares in (("paper", [sum(PAPER[s]) / 2 for s in PAPER]), ("simulated", list(share.values()))):
        for i, width in enumerate(shares):
            bar = axis.barh(name, width / sum(shares), 0.5, sum(shares[:i]) / sum(shares), color=f"C{i}")
            axis.bar_label(bar, [f"{width:.0%}"], label_type="center", color="white", fontsize=8)
    for i, stage in enumerate(PAPER):
        axis.plot([], [], color=f"C{i}", linewidth=6, label=stage)
    axis.set(title="A synchronous step of 14B/16k", xlabel="share of the step's time", xlim=(0, 1))
    axis.grid(axis="y", visible=False)
    axis.legend(ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.22))
    save(figure, "table1", "veRL-like baseline, 32 H800, 20 steps")
    table.end("table1")


if __name__ == "__main__":
    command(main, __doc__)
