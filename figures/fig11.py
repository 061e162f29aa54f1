"""Figure 11: mean rollout seconds over full periods of tail batching, with eta on prompts, on responses, on both.

No bar is a prediction: figures/fit.py fitted the lengths and the engine to them, 20 numbers to 24 bars. The fit drew
with seed 0; here it is another.
"""

import argparse
from statistics import mean

from paper import (
    MODELS,
    SLOW,
    SimulationConfig,
    StreamConfig,
    Table,
    cluster,
    legend,
    measured,
    note,
    pair,
    plt,
    save,
    scheduler,
    simulate,
    style,
)

# (eta on prompts, eta on responses): seconds for 7B/8k, 14B/16k, 32B/32k
PAPER = {
    (1.0, 1.0): (82, 277, 673),
    (1.0, 1.125): (77, 260, 658),
    (1.0, 1.25): (71, 232, 655),
    (1.0, 1.5): (54, 115, 265),
    (1.125, 1.0): (77, 244, 636),
    (1.25, 1.0): (72, 169, 259),
    (1.5, 1.0): (60, 143, 279),
    (1.25, 1.25): (47, 88, 170),
}
PERIOD = {1.0: 1, 1.125: 9, 1.25: 5, 1.5: 3}  # rounds until the queue is empty again


def rollout_seconds(model: str, etas: tuple[float, float], periods: int, lengths=None, seed: int = 0) -> float:
    """Return the mean over whole periods. `lengths`: a ModelFile instead of the fitted one."""
    steps = PERIOD[etas[0]] * max(periods // PERIOD[etas[0]], 1)
    policy = scheduler("tail_batching" if max(etas) > 1 else "synchronous", *etas)
    config = SimulationConfig(cluster(model, steps=steps, seed=seed), policy, SLOW, StreamConfig("off"))
    return mean(r["seconds"]["rollout"] for r in simulate(config, lengths).records)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of the lengths; the fit used 0")
    args = parser.parse_args()
    simulated = {etas: [rollout_seconds(model, etas, 90, seed=args.seed) for model in MODELS] for etas in PAPER}
    table = Table("Figure 11: mean rollout time", "seconds; eta on prompts, on responses")
    for i, model in enumerate(MODELS):
        for etas, paper in PAPER.items():
            table.add(f"{model}  {etas[0]}, {etas[1]}", paper[i], simulated[etas][i])
    if real := measured("tail_batching"):
        ratios = [real[f"rollout_speedup_trace{key}"] for key in ("_prompts", "_responses", "")]
        wanted = [PAPER[1.0, 1.0][1] / PAPER[etas][1] for etas in ((1.25, 1.0), (1.0, 1.25), (1.25, 1.25))]
        parts = zip(("prompts", "responses", "both"), ratios, wanted)
        text = ", ".join(f"{name} {ratio:.2g} (paper {paper:.2g})" for name, ratio, paper in parts)
        note(f"Really run on a CPU with the lengths of 14B/16k, rollout times as fast, eta 1.25 on {text}.")
    style()
    figure, axes = plt.subplots(1, 3)
    labels = ["1 / 1" if e == (1, 1) else f"{e[0]:g} / {e[1]:g}" for e in PAPER]
    for i, (axis, model) in enumerate(zip(axes, MODELS, strict=True)):
        pair(axis, [v[i] for v in PAPER.values()], [v[i] for v in simulated.values()], labels)
        axis.set(title=model, xlabel="eta on prompts / responses")
    axes[0].set_ylabel("mean rollout time (s)")
    legend(figure, axes[0])
    save(figure, "fig11", f"lengths and engine fitted to these bars, 90 steps a bar, seed {args.seed}")
    both = [simulated[1.0, 1.0][i] / simulated[1.25, 1.25][i] for i in range(3)]
    table.end("fig11", rollout_speedup=[round(x, 2) for x in both], rollout_speedup_paper=[1.74, 3.15, 3.96])


if __name__ == "__main__":
    main()
