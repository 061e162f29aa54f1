"""Synchronous jobs and jobs that run ahead in one group: what bubbles are left. (beyond RollMux, arXiv 2512.11306)"""

from statistics import fmean
from typing import Any

from mux_kinds import group, throughput
from paper import command, legend, note, plt, put_values, save, store, style, with_result

NODE = (0,)
GROUPS = {  # kinds of jobs and their rollout nodes, and of each by how many batches it runs ahead
    "A": ([("A", NODE)], [0]),
    "A ahead": ([("A", NODE)], [1]),
    "A + A": ([("A", NODE)] * 2, [0, 0]),
    "A ahead + A": ([("A", NODE)] * 2, [1, 0]),
    "A ahead + A ahead": ([("A", NODE)] * 2, [1, 1]),
    "D ahead": ([("D", NODE)], [1]),
    "D + D": ([("D", (0,)), ("D", (1,))], [0, 0]),
    "D ahead + D": ([("D", (0,)), ("D", (1,))], [1, 0]),
    "D ahead + D ahead": ([("D", (0,)), ("D", (1,))], [1, 1]),
}


def row(name: str) -> dict[str, Any]:
    places, depths = GROUPS[name]
    played = group(places, depths=depths)
    speeds = throughput(places, played)
    rollout, train = played.busy()
    nodes = len({node for _, nodes in places for node in nodes})
    text = ", ".join(f"{speed:.2f}" for speed in speeds)
    found: dict[str, Any] = {
        "group": name,
        "nodes": f"{nodes} + 1",
        "throughput": text,
        "mean": round(fmean(speeds), 3),
    }
    return found | {"rollout_idle": round(1 - rollout, 3), "train_idle": round(1 - train, 3)}


def main() -> None:
    rows = [row(name) for name in GROUPS]
    print(f"{'':20}{'nodes':>8}{'throughput over alone':>24}{'idle, rollout':>16}{'idle, training':>16}")
    for r in rows:
        idle = f"{r['rollout_idle']:>16.0%}{r['train_idle']:>16.0%}"
        print(f"{r['group']:20}{r['nodes']:>8}{r['throughput']:>24}{idle}")
    note(
        "Nodes: for rollouts + for training. Ahead: a rollout begins when the one before has ended; at most one batch "
        "waits for its training (depth 1). Throughput is over that alone at depth 0. Idle: held by no job."
    )
    style()
    figure, axis = plt.subplots(figsize=(9, 3.6))
    for i, (key, label) in enumerate((("rollout_idle", "rollout workers"), ("train_idle", "training node"))):
        bars = axis.bar([x + 0.4 * (i - 0.5) for x in range(len(rows))], [r[key] for r in rows], 0.4, label=label)
        put_values(axis, bars)
    axis.set_xticks(range(len(rows)), [str(r["group"]) for r in rows], rotation=20, ha="right")
    axis.set(title="share of the time in which no job holds them")
    legend(figure, axis)
    save(figure, "mux_async", "H20 for rollouts and H800 for training, simulated", "none")
    name = "mux_async"
    store(with_result(name, {"figure": name}) | {"mux_async_rows": rows})


if __name__ == "__main__":
    command(main, __doc__)
