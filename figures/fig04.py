"""Figure 4: preemptions and rollout time of both kinds of round at TP 1 and 2 (Qwen3-8B/32k, 8 H800)."""

from dataclasses import replace
from statistics import mean

from paper import TAIL, ClusterConfig, Table, command, legend, pair, plt, save, seconds, simulate, style

PAPER = {  # (kind, tensor-parallel size): (preemptions, seconds)
    ("short", 1): (5199, 1284),
    ("short", 2): (4102, 1029),
    ("long", 1): (2900, 1172),
    ("long", 2): (2601, 768),
}
STEPS = 5  # one period


def rounds(model=None) -> dict[tuple[str, int], tuple[float, float]]:
    """Return (preemptions, seconds of the rollout) by kind of round and size. `model`: instead of the fitted one."""
    found = {}
    for size in (1, 2):
        cluster = ClusterConfig(model="qwen3-8b", gpus=8, tensor_parallel=size, steps=STEPS)
        records = simulate(replace(TAIL, cluster=cluster), model).records
        for kind in ("short", "long"):
            preemptions = mean(r["engine"]["preemptions"] for r in records if r["round"]["kind"] == kind)
            found[kind, size] = preemptions, seconds(records, "rollout", kind)
    return found


def main() -> None:
    found = rounds()
    table = Table("Figure 4: Qwen3-8B/32k on 8 H800", "preemptions, seconds")
    for i, what in enumerate(("preemptions", "rollout seconds")):
        for (kind, size), values in PAPER.items():
            table.add(f"{what}, {kind} round, TP = {size}", values[i], found[kind, size][i])
    style()
    figure, axes = plt.subplots(1, 2)
    labels = [f"{kind}, TP {size}" for kind, size in PAPER]
    for i, (axis, what) in enumerate(zip(axes, ("preemptions in a round", "rollout time (s)"), strict=True)):
        pair(axis, [v[i] for v in PAPER.values()], [found[key][i] for key in PAPER], labels)
        axis.set_ylabel(what)
    legend(figure, axes[0])
    save(figure, "fig04", "P0 = 128, R0 = 8, one period")
    short = found["short", 1][0] / found["long", 1][0]
    table.end("fig04", short_over_long_preemptions=round(short, 2), short_over_long_preemptions_paper=1.79)


if __name__ == "__main__":
    command(main, __doc__)
