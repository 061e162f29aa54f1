"""Figure 9: step time of veRL, RLHFuse and RollPacker, its short and its long rounds apart."""

from paper import MODELS, Table, command, legend, note, plt, run, save, seconds, style

PAPER = {  # typical seconds; for veRL on 7B the paper's steps go from 180 to 340
    "veRL": (260, 375, 870),
    "RLHFuse": (130, 290, 760),
    "RollPacker short": (106, 140, 240),
    "RollPacker long": (129, 300, 740),
}
STEPS = 30


def main() -> None:
    runs = {
        name: [run(name, model, STEPS).records for model in MODELS] for name in ("veRL", "RLHFuse", "+ stream trainer")
    }
    ours = runs["+ stream trainer"]
    simulated = {name: [seconds(records) for records in runs[name]] for name in ("veRL", "RLHFuse")}
    simulated |= {f"RollPacker {kind}": [seconds(r, kind=kind) for r in ours] for kind in ("short", "long")}
    table = Table("Figure 9: step time", "seconds")
    for i, model in enumerate(MODELS):
        for name, paper in PAPER.items():
            table.add(f"{model}  {name}", paper[i], simulated[name][i])
    note(
        "The paper's 7B steps of veRL go from 180 to 340 s, which we put at 260; its other numbers for 7B (Table 2 "
        "and the rounds of RollPacker) say 225."
    )
    style()
    figure, axes = plt.subplots(1, 3)
    for i, (axis, model) in enumerate(zip(axes, MODELS, strict=True)):
        for color, (name, label) in enumerate(
            (("veRL", "veRL"), ("RLHFuse", "RLHFuse"), ("+ stream trainer", "RollPacker"))
        ):
            axis.plot([r["seconds"]["step"] for r in runs[name][i]], label=label, color=f"C{color}", linewidth=1.2)
            for key in (key for key in PAPER if key.startswith(label)):
                dashes = "--" if key.endswith("long") else ":"
                axis.axhline(PAPER[key][i], color=f"C{color}", linewidth=1, linestyle=dashes)
        axis.set(title=model, xlabel="step", ylim=(0, None))
    axes[0].set_ylabel("step time (s)")
    axes[0].plot([], ":", color="0.4", linewidth=1, label="paper")
    axes[0].plot([], "--", color="0.4", linewidth=1, label="paper, long rounds")
    legend(figure, axes[0])
    save(figure, "fig09", "simulated, 16 / 32 / 64 H800; broken lines: the paper's typical values")
    against = [seconds(runs["RLHFuse"][i]) / seconds(ours[i]) for i in range(3)]
    table.end(
        "fig09", speedup_over_rlhfuse=[round(x, 2) for x in against], speedup_over_rlhfuse_paper=[1.14, 1.68, 2.24]
    )


if __name__ == "__main__":
    command(main, __doc__)
