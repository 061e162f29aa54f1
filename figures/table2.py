"""Table 2: speed-up of the whole step over veRL as RollPacker's parts are added, one after the other."""

from itertools import accumulate
from operator import mul

from paper import MODELS, SYSTEMS, Table, command, legend, measured, pair, plt, run, save, seconds, style

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
    parts = measured("end_to_end")  # with the lengths of 32B/32k, scaled
    keys = ("speedup_tail_batching", "speedup_reward_scheduler", "speedup_planner", "speedup_stream_trainer")
    real = dict(zip(PAPER, accumulate((parts[key] for key in keys if key in parts), mul)))
    for name, paper in PAPER.items():
        for i, model in enumerate(MODELS):
            table.add(f"{model}  {name}", paper[i], simulated[name][i], real.get(name) if model == "32B/32k" else None)
    style()
    figure, axes = plt.subplots(1, 3, sharey=True)
    for i, (axis, model) in enumerate(zip(axes, MODELS, strict=True)):
        pair(axis, [v[i] for v in PAPER.values()], [v[i] for v in simulated.values()], list(PAPER))
        axis.set(title=model)
    axes[0].set_ylabel("speed-up of a step over veRL")
    legend(figure, axes[0])
    save(figure, "table2", f"{STEPS} steps, 16 / 32 / 64 H800, P0 = 128, R0 = 8")
    parts = [{"part": name, "paper": PAPER[name], "simulated": found} for name, found in simulated.items()]
    parts = [p | {"difference": [a / b - 1 for a, b in zip(p["simulated"], p["paper"])]} for p in parts]
    speedup = {name: [round(x, 2) for x in v] for name, v in simulated.items()}
    table.end("table2", kept={"parts": parts}, speedup=speedup)


if __name__ == "__main__":
    command(main, __doc__)
