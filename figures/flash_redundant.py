"""ROLL Flash, redundant environments: seconds until 32 groups have 8 episodes each, where more of both are launched.

The latency of a turn is normal(10, 5) s. Which environments failed in the paper, and how, is not known. Here there are
two cases: none is slower than others, or 1 % of the episodes are 6 times as slow in all their turns.
"""

from flash import EPISODES, episodes
from flash import PAPER as SOURCE
from flash_queue import decoding
from paper import Table, command, mean, note, plt, save, style

from simulation.episodes import EpisodesConfig

GROUPS, SIZES = (32, 33, 34, 36, 40), (8, 9, 10, 12)
PAPER = {(32, 8): 243, (36, 9): 45, (36, 12): 46}  # seconds
MOST = 1.62  # times as fast: RollArt's best
TURNS, STEPS = 3, 16
SLOW = "0.01x6"
CASES = {"": "no failures", SLOW: "1 % of episodes 6 times as slow"}


def seconds(slow: str, launched: tuple[int, int]) -> float:
    """Return the mean seconds of a rollout. The losers' rounds do not count: in the paper losers are ignored."""
    env = EpisodesConfig(TURNS, latency="normal(10,5)", slow=slow)
    return mean(decoding(episodes(env, STEPS, launched), "long" if launched == EPISODES else "short"))


def main() -> None:
    table = Table("ROLL Flash, redundant environments: 256 episodes kept", "seconds, or times as fast")
    found = {slow: {(g, n): seconds(slow, (g, n)) for g in GROUPS for n in SIZES} for slow in CASES}
    faster = {slow: {at: times[EPISODES] / s for at, s in times.items()} for slow, times in found.items()}
    for (groups, size), paper in PAPER.items():
        table.add(f"{groups} x {size}, seconds", paper, found[SLOW][groups, size])
    for at in [*PAPER][1:]:
        table.add(f"{at[0]} x {at[1]}, times as fast", PAPER[EPISODES] / PAPER[at], faster[SLOW][at])
    table.add("no failures, the most, RollArt", MOST, max(faster[""].values()))
    more = {name: faster[SLOW][at] for name, at in {"groups": (40, 8), "size": (32, 10)}.items()}  # 320 episodes each
    note(
        f"Fitted: {TURNS} turns to the seconds of 36 x 9, how slow the 1 % are to those of 32 x 8. Predicted: 36 x 12. "
        f"320 episodes are {more['groups']:.1f} times as fast as 40 x 8, {more['size']:.1f} times as fast as 32 x 10. "
        f"The gain is that of failures: without any it is at most {max(faster[''].values()):.2f} times."
    )
    style()
    figure, axes = plt.subplots(1, 2, figsize=(7.2, 3.6))
    for axis, (slow, title) in zip(axes, CASES.items(), strict=True):
        values = [[faster[slow][g, n] for n in SIZES] for g in GROUPS]
        axis.imshow(values, cmap="Blues", aspect="auto", vmin=0.5)
        for y, row in enumerate(values):
            for x, value in enumerate(row):
                dark = value > 0.6 * max(map(max, values))
                axis.text(x, y, f"{value:.2f}", ha="center", va="center", color="white" if dark else "black")
        axis.set_xticks(range(len(SIZES)), [str(n) for n in SIZES])
        axis.set_yticks(range(len(GROUPS)), [str(g) for g in GROUPS])
        axis.set(title=f"{title}\n(times as fast as 32 x 8)", xlabel="episodes of a group, 8 kept")
        axis.grid(visible=False)
    axes[0].set_ylabel("groups, 32 kept")
    save(figure, "flash_redundant", f"{TURNS} turns of normal(10, 5) s, {STEPS} steps a cell", SOURCE)
    told = {"most_without_failures": max(faster[""].values())} | {f"more_{key}": value for key, value in more.items()}
    told = {key: round(value, 2) for key, value in told.items()}
    table.end("flash_redundant", **told)


if __name__ == "__main__":
    command(main, __doc__)
