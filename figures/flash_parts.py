"""ROLL Flash on agents: all parts, one by one, as its SWE and ALFWorld runs have them.

Each step trains 32 x 8 episodes of 20 turns. First, all turns have a barrier, and training follows the rollout. Then no
turn waits for others; then a rollout runs one batch ahead of training; then 36 x 9 episodes run.
"""

from dataclasses import replace
from typing import Any

from flash import EPISODES, episodes, step_seconds
from flash import PAPER as SOURCE
from paper import Table, command, legend, note, pair, plt, save, style

from simulation.episodes import EpisodesConfig

PAPER = {"SWE": (1.23, 1.68, 1.81), "ALFWorld": (1.58, 2.27, 2.72)}  # times as fast as with barriers
LATENCY = {"SWE": "normal(10,2)", "ALFWorld": "normal(10,5)"}
PARTS = ("no barrier", "+ asynchronous training", "+ redundancy")
TURNS, TRAIN_SECONDS = 20, 100.0
STEPS, ENDLESS_STEPS, REDUNDANT = 4, 16, (36, 9)


def seconds(env: EpisodesConfig, steps: int, launched: tuple[int, int] = EPISODES, **overlap: Any) -> float:
    return step_seconds(episodes(env, steps, launched, TRAIN_SECONDS, **overlap))


def main() -> None:
    table = Table("ROLL Flash, agents: all parts, one by one", "times as fast")
    found: dict[str, list[float]] = {}
    for name, paper in PAPER.items():
        env = EpisodesConfig(TURNS, latency=LATENCY[name])
        ahead: dict[str, Any] = {"depth": 1.0, "bound": 2}
        barrier = seconds(replace(env, barrier=True), STEPS)
        parts = (
            seconds(env, STEPS),
            seconds(env, ENDLESS_STEPS, **ahead),
            seconds(env, ENDLESS_STEPS, REDUNDANT, **ahead),
        )
        found[name] = [barrier / part for part in parts]
        for part, known, value in zip(PARTS, paper, found[name], strict=True):
            table.add(f"{name}, {part}", known, value)
    note(
        f"Set by hand, in view of all bars: the latency's spread of each workload ({LATENCY['SWE']} and "
        f"{LATENCY['ALFWorld']} seconds a turn), and for both {TURNS} turns and {TRAIN_SECONDS:.0f} s of training a "
        "batch. No environment fails here; the paper's may."
    )
    style()
    figure, axes = plt.subplots(1, 2, sharey=True)
    for axis, (name, paper) in zip(axes, PAPER.items(), strict=True):
        pair(axis, paper, found[name], PARTS)
        axis.set(title=f"{name}, {LATENCY[name]} s a turn")
    axes[0].set_ylabel("times as fast as with barriers")
    legend(figure, axes[0])
    save(figure, "flash_parts", f"32 x 8 episodes of {TURNS} turns, no failures", SOURCE)
    table.end("flash_parts", **{name: [round(x, 2) for x in values] for name, values in found.items()})


if __name__ == "__main__":
    command(main, __doc__)
