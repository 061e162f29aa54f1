"""ROLL Flash, environment-level asynchrony: a rollout of 256 episodes by the spread of the environment's latency.

With a barrier a turn begins when all episodes have their replies; without, each goes on when its own is there. The
latency of a turn is normal, cut off at 0, with a mean of 10 s. RollArt (arXiv 2512.22560) is of the same group.
"""

from flash import PAPER as SOURCE
from flash import episodes
from flash_queue import decoding
from paper import Table, command, mean, note, plt, save, style

from simulation.episodes import EpisodesConfig

SIGMAS = (1, 3, 5, 7, 10)
SECONDS = {True: 892, False: 362}  # of a rollout at sigma 10, with a barrier and without
ROLLART = {1: 1.23, 10: 2.27}  # times as fast without
FITTED, FEW = 23, 8  # turns
STEPS = 5


def seconds(turns: int, sigma: int, barrier: bool) -> float:
    return mean(decoding(episodes(EpisodesConfig(turns, latency=f"normal(10,{sigma})", barrier=barrier), STEPS)))


def main() -> None:
    table = Table("ROLL Flash, environments: 256 episodes, latency normal(10, sigma)", "seconds, or times as fast")
    found = {
        turns: {sigma: [seconds(turns, sigma, barrier) for barrier in (True, False)] for sigma in SIGMAS}
        for turns in (FITTED, FEW)
    }
    faster = {turns: {sigma: a / b for sigma, (a, b) in times.items()} for turns, times in found.items()}
    for barrier, paper in SECONDS.items():
        name = "with" if barrier else "without"
        table.add(f"{FITTED} turns, sigma 10, seconds {name} barrier", paper, found[FITTED][10][not barrier])
    table.add(f"{FITTED} turns, sigma 10", SECONDS[True] / SECONDS[False], faster[FITTED][10])
    for sigma, known in ROLLART.items():
        table.add(f"{FITTED} turns, sigma {sigma}, RollArt", known, faster[FITTED][sigma])
    note(
        f"Fitted: the turns of an episode, {FITTED}, to the seconds with a barrier. Predicted: the rest. With {FEW} "
        f"turns the speed-up at sigma 10 is {faster[FEW][10]:.2f}: in the sum of more turns, latencies even out more."
    )
    style()
    figure, axes = plt.subplots(1, 2, figsize=(7.2, 3.4))
    for color, turns in enumerate(found):
        for name, line, times in zip(("barrier", "no barrier"), ("--", "-"), zip(*found[turns].values(), strict=True)):
            axes[0].plot(SIGMAS, times, line, marker="o", color=f"C{color}", label=f"{turns} turns, {name}")
        axes[1].plot(SIGMAS, [*faster[turns].values()], marker="o", color=f"C{color}")
    axes[0].plot([10, 10], [*SECONDS.values()], "k*", markersize=8, label="ROLL Flash")
    axes[1].plot(10, SECONDS[True] / SECONDS[False], "k*", markersize=8)
    axes[1].plot([*ROLLART], [*ROLLART.values()], "ks", markersize=5, label="RollArt")
    axes[0].set(title="A rollout", ylabel="seconds", ylim=(0, None))
    axes[1].set(title="No barrier over a barrier", ylabel="times as fast", ylim=(1, None))
    for axis in axes:
        axis.set(xlabel="sigma of a turn's latency, s")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    axes[1].legend(loc="upper left")
    save(figure, "flash_envs", "256 episodes on 32 GPUs", SOURCE)
    told = {f"turns_{n}": {f"sigma_{s}": round(x, 2) for s, x in values.items()} for n, values in faster.items()}
    table.end("flash_envs", **told)


if __name__ == "__main__":
    command(main, __doc__)
