"""ROLL Flash, Figure 1b: samples per second on 16 to 128 GPUs, the batch always the same (Qwen3-8B-Think and -Base)."""

from flash import ALPHA, MODELS, endless, step_seconds, synchronous
from flash import PAPER as SOURCE
from paper import Table, command, note, plt, save, style

GPUS = (16, 32, 64, 128)
# Relative to the asynchronous run on 16 GPUs. Synchronous with the paper's queue, "Sync-ROLL": as here, a response is a
# sequence of its own, and graded as it ends. Its "Sync-Naive", which is slower, has no counterpart here.
PAPER = {
    "Think": {"async": (1.00, 1.88, 3.86, 7.60), "sync": (1.08, 1.74, 3.06, 4.10)},
    "Base": {"async": (1.00, 1.47, 2.02, 2.40), "sync": (0.77, 0.88, 1.02, 1.15)},
}
LABELS = {"async": f"asynchronous, ratio {ALPHA}", "sync": "synchronous"}


def main() -> None:
    table = Table("ROLL Flash, Figure 1b: samples per second", "relative to the asynchronous run on 16 GPUs")
    found: dict[str, dict[str, list[float]]] = {}
    for model in MODELS:
        times = [step_seconds(endless(model, gpus, gpus // 2)) for gpus in GPUS]
        alone = [step_seconds(synchronous(model, gpus)) for gpus in GPUS]
        found[model] = {"async": [times[0] / t for t in times], "sync": [times[0] / t for t in alone]}
        for name, values in found[model].items():
            for gpus, paper, value in zip(GPUS, PAPER[model][name], values, strict=True):
                if (name, gpus) != ("async", GPUS[0]):  # 1 by definition
                    table.add(f"{model}, {LABELS[name]}, {gpus} GPUs", paper, value)
        over = [rows[model]["async"][-1] / rows[model]["sync"][-1] for rows in (PAPER, found)]
        table.add(f"{model}, asynchronous over synchronous, 128 GPUs", *over)
    note(
        "Predicted: engine and trainer are those of Figure 5, the lengths have only their mean fitted. One choice was "
        "made in view of this figure: half of the GPUs train. Whole nodes of 8 leave nothing else on 16, and that the "
        "paper's Think grows in proportion to the GPUs says that the share stays the same. Synchronous is the paper's "
        "with its queue; its naive one is slower: asynchronous is 2.13 (Think) and 2.24 (Base) times as fast there."
    )
    style()
    figure, axes = plt.subplots(1, 2)
    for axis, model in zip(axes, MODELS, strict=True):
        for color, name in enumerate(LABELS):
            axis.plot(GPUS, found[model][name], marker="o", color=f"C{color}", label=f"{LABELS[name]}, simulated")
            known = PAPER[model][name]
            axis.plot(GPUS, known, marker="s", linestyle=":", color=f"C{color}", label=f"{LABELS[name]}, paper")
        axis.set(title=f"Qwen3-8B-{model}", xlabel="GPUs", xscale="log", yscale="log")
        axis.set_xticks(GPUS, [str(gpus) for gpus in GPUS])
        axis.set_yticks([0.5, 1, 2, 4, 8], ["0.5", "1", "2", "4", "8"])
        axis.minorticks_off()
    axes[0].set_ylabel("samples/s over asynchronous on 16")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper right", ncols=2)
    save(figure, "flash_scaling", "256 x 16 responses a step at every size", SOURCE)
    faster = {model: round(rows["async"][-1] / rows["sync"][-1], 2) for model, rows in found.items()}
    grows = {model: round(rows["async"][-1], 2) for model, rows in found.items()}
    table.end("flash_scaling", over_synchronous_128=faster, from_16_to_128=grows)


if __name__ == "__main__":
    command(main, __doc__)
