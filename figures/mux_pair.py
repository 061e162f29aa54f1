"""RollMux, Figure 3: two jobs that share a rollout node to their loss, and that admission refuses."""

from paper import Table, command, legend, note, pair, plt, save, style

from policies.admission import Admission, Asked, Prices, admit, alone
from policies.group import periods

ITERATION = {"4B-8K-M": 349, "8B-8K-M": 431}  # seconds alone, Figure 2
SLOWDOWN = {"4B-8K-M": 1.64, "8B-8K-M": 1.40}  # both have one period, so the shorter job is slowed down more
RATIO = 2.5  # rollout over training, as for the paper's kind D, which is 8B-8K-M too
ONE = frozenset([0])


def asked(name: str, slo: float) -> Asked:
    train = ITERATION[name] / (1 + RATIO)
    return Asked(name, RATIO * train, train, slo)


def slowdowns() -> dict[str, float]:
    """Return the jobs' periods on one rollout and one training node, over those alone."""
    first, second = (asked(name, 1.0) for name in ITERATION)
    seconds = periods(alone(first).joined(second, ONE).members)
    return {name: each / ITERATION[name] for name, each in zip(ITERATION, seconds, strict=True)}


def on_one_node(slo: float) -> str:
    """Return why the second job may not join the first on its nodes, or ""."""
    first, second = (asked(name, slo) for name in ITERATION)
    return alone(first).joined(second, ONE).delay()


def admission(slo: float) -> Admission:
    first, second = (asked(name, slo) for name in ITERATION)
    return admit(second, [alone(first)], Prices())


def main() -> None:
    table = Table("RollMux, Figure 3: two jobs on one node of each kind", "times as slow as alone")
    found = slowdowns()
    for name, paper in SLOWDOWN.items():
        table.add(name, paper, found[name])
    least = next(slo / 100 for slo in range(100, 300) if not on_one_node(slo / 100))
    placed = admission(1.2)
    where = "the first one's group" if placed.group == 0 else "nodes of its own"
    note(
        f"Under an SLO of 1.2 one node of each kind is refused: {on_one_node(1.2)}. The second job gets {where}. On "
        f"one node of each kind both would need an SLO of {least:.2f}. The paper does not divide an iteration: here a "
        f"rollout takes {RATIO} times its training, as in its kind D."
    )
    style()
    figure, axis = plt.subplots(figsize=(5, 3.2))
    pair(axis, list(SLOWDOWN.values()), list(found.values()), list(found))
    axis.axhline(1.2, color="0.3", linestyle=":", label="SLO")
    axis.set(title="slowdown on one node of each kind")
    legend(figure, axis)
    save(figure, "mux_pair", "iterations of Figure 2", "arXiv 2512.11306")
    table.end("mux_pair", refused=bool(on_one_node(1.2)), least_slo=least)


if __name__ == "__main__":
    command(main, __doc__)
