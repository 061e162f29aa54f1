"""Table 2: speed-up of the whole step over veRL as RollPacker's parts are added, one after the other."""

from paper import MODELS, SYSTEMS, Table, plt, run, save, seconds, style

PAPER = {
    "+ tail batching": (1.30, 1.48, 2.21),
    "+ reward scheduler": (2.01, 1.99, 2.48),
    "+ parallelism planner": (2.01, 2.02, 2.52),
    "+ stream trainer": (2.03, 2.22, 2.56),
}
STEPS = 40


def main() -> None:
    step = {name: [seconds(run(name, model, STEPS).records) for model in MODELS] for name in SYSTEMS}
    table = Table("Table 2: speed-up over veRL, cumulative", "step time of veRL / step time")
    simulated = {name: [step["veRL"][i] / step[name][i] for i in range(3)] for name in PAPER}
    for name, paper in PAPER.items():
        for i, model in enumerate(MODELS):
            table.add(f"{model}  {name}", paper[i], simulated[name][i])
    style()
    figure, axes = plt.subplots(1, 3, sharey=True)
    for i, (axis, model) in enumerate(zip(axes, MODELS, strict=True)):
        places = range(len(PAPER))
        axis.bar([x - 0.2 for x in places], [v[i] for v in PAPER.values()], 0.4, label="paper", color="0.7")
        axis.bar([x + 0.2 for x in places], [v[i] for v in simulated.values()], 0.4, label="simulated")
        axis.set_xticks(list(places), PAPER, rotation=35, ha="right", fontsize=7)
        axis.set(title=model)
        axis.grid(axis="x", visible=False)
    axes[0].set_ylabel("speed-up over veRL")
    axes[0].legend(loc="upper left")
    save(figure, "table2", f"{STEPS} steps, 16 / 32 / 64 H800, P0 = 128, R0 = 8")
    table.end("table2", speedup={name: [round(x, 2) for x in v] for name, v in simulated.items()})


if __name__ == "__main__":
    main()
