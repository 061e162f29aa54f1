"""ROLL Flash, Figure 5: seconds of a step as 40 GPUs are divided into training and decoding (Qwen3-8B-Think)."""

from flash import PAPER as SOURCE
from flash import endless, step_seconds, synchronous
from paper import Table, command, legend, note, pair, plt, save, style

from simulate import ModelFile

GPUS = 40
PAPER = {0: 2133, 8: 1703, 16: 1298, 24: 2188, 32: 4326}  # GPUs that train; 0: all do both, one after the other
TRAIN = {40: 365, 8: 1640, 16: 850, 24: 575, 32: 455}  # read off its bars: training, and log-probs of the reference


def seconds(train: int, file: ModelFile | None = None) -> float:
    """Return the seconds of a step with so many GPUs that train."""
    return step_seconds(endless("Think", GPUS, train, file=file) if train else synchronous("Think", GPUS, file))


def main() -> None:
    runs = {train: endless("Think", GPUS, train) for train in PAPER if train}
    found = {0: seconds(0)} | {train: step_seconds(run) for train, run in runs.items()}
    table = Table("ROLL Flash, Figure 5: 40 GPUs, Qwen3-8B-Think", "seconds a step")
    names = {train: f"{train} train, {GPUS - train} decode" if train else "all do both" for train in PAPER}
    for train, paper in PAPER.items():
        table.add(names[train], paper, found[train])
    best = min(runs, key=found.__getitem__)
    share = runs[best].split_times().best_share
    table.add("16 train, 24 decode, over all do both", PAPER[0] / PAPER[16], found[0] / found[16])
    note(
        f"Best: {names[best]}. Fitted: training, to its bars; one number of the engine, seconds of a layer, to three "
        "bars: all do both, 24 / 16, 32 / 8; the mean length. Predicted: 16 / 24, and so the best. "
        f"beta* of Proposition 2 by the times of the best run: {share:.3f}, which is {share * GPUS:.1f} GPUs."
    )
    style()
    figure, axis = plt.subplots()
    pair(axis, [*PAPER.values()], [*found.values()], [*names.values()])
    axis.axvline(share * GPUS / 8, color="C1", linestyle="--", label="beta* of Proposition 2")  # a bar for each 8 GPUs
    axis.set(title=f"A step on {GPUS} GPUs", ylabel="seconds")
    legend(figure, axis)
    save(figure, "flash_split", "256 x 16 responses of 11k tokens, asynchronous ratio 2", SOURCE)
    table.end(
        "flash_split",
        best_train_gpus=best,
        best_share=round(share, 3),
        speedup=round(found[0] / found[16], 2),
        speedup_paper=1.64,
    )


if __name__ == "__main__":
    command(main, __doc__)
