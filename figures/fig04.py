"""Figure 4: preemptions and rollout time of both kinds of round at TP 1 and 2 (Qwen3-8B/32k, 8 H800)."""

from dataclasses import replace
from statistics import mean

from paper import TAIL, ClusterConfig, Table, command, legend, note, pair, plt, save, seconds, simulate, style

PAPER = {  # (kind, tensor-parallel size): (preemptions, seconds)
    ("short", 1): (5199, 1284),
    ("short", 2): (4102, 1029),
    ("long", 1): (2900, 1172),
    ("long", 2): (2601, 768),
}
STEPS = 5  # one period


def rounds(model=None, weights: str = "sharded") -> dict[tuple[str, int], tuple[float, float]]:
    """Return (preemptions, seconds of the rollout) by kind of round and size. `model`: instead of the fitted one.

    The paper's engine shards its weights, so that layout is compared with it, and fitted to it.
    """
    found = {}
    for size in (1, 2):
        cluster = ClusterConfig(model="qwen3-8b", gpus=8, tensor_parallel=size, weights=weights, steps=STEPS)
        records = simulate(replace(TAIL, cluster=cluster), model).records
        for kind in ("short", "long"):
            preemptions = mean(r["engine"]["preemptions"] for r in records if r["round"]["kind"] == kind)
            found[kind, size] = preemptions, seconds(records, "rollout", kind)
    return found


def main() -> None:
    found, whole = rounds(), rounds(weights="whole")
    table = Table("Figure 4: Qwen3-8B/32k on 8 H800", "preemptions, seconds")
    for i, what in enumerate(("preemptions", "rollout seconds")):
        for (kind, size), values in PAPER.items():
            table.add(f"{what}, {kind} round, TP = {size}", values[i], found[kind, size][i])
    note("Weights are sharded, as in the paper's engine. With whole weights:")
    for i, what in enumerate(("preemptions", "rollout seconds")):
        for kind in ("short", "long"):
            print(f"{f'{what}, {kind} round, TP = 2':<44}{'':>9}{whole[kind, 2][i]:>11.3g}")
    style()
    figure, axes = plt.subplots(1, 2)
    labels = [f"{kind}, TP {size}" for kind, size in PAPER] + ["short, TP 2, whole", "long, TP 2, whole"]
    for i, (axis, what) in enumerate(zip(axes, ("preemptions in a round", "rollout time (s)"), strict=True)):
        times = [found[key][i] for key in PAPER] + [whole[kind, 2][i] for kind in ("short", "long")]
        pair(axis, [v[i] for v in PAPER.values()], times, labels)
        axis.set_ylabel(what)
    legend(figure, axes[0])
    save(figure, "fig04", "P0 = 128, R0 = 8, one period; weights sharded, or whole")
    short = found["short", 1][0] / found["long", 1][0]
    kept = {kind: [round(x, 1) for x in whole[kind, 2]] for kind in ("short", "long")}
    ratios = {"short_over_long_preemptions": round(short, 2), "short_over_long_preemptions_paper": 1.79}
    table.end("fig04", **ratios, whole_weights_tp2=kept)


if __name__ == "__main__":
    command(main, __doc__)
