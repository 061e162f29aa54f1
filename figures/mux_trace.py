"""RollMux, Figure 13: 200 jobs of a production cluster over two weeks, in shared pools and in others."""

from statistics import fmean

from paper import Table, command, note, pair, plt, put_values, save, style

from policies.admission import Prices
from simulation.cluster import RULES, Cluster, Outcome
from simulation.mux_jobs import MIXES, PRODUCTION, arrivals

JOBS, HOURS, MEAN, SEEDS = 200, 14 * 24, 27.9, 3
SYSTEMS = {"solo": "Solo-D", "colocated": "veRL, co-located", "slices": "Gavel+", "rollmux": "RollMux"}
KINDS = {  # of jobs; the paper's mix is not known
    "Figure 2": [*PRODUCTION],
    "Figure 2, several turns": [kind for kind in PRODUCTION if kind.endswith("M")],
    "Figure 2, one turn": [kind for kind in PRODUCTION if kind.endswith("S")],
    "Table 6, rollout heavy": [*MIXES["RH"]],
    "Table 6, mixed": [*MIXES["Mixed"]],
}
PAPER = {"solo": 938.0, "colocated": 704.0, "rollmux": 510.0}  # dollars an hour
RATIOS = {"Solo-D over RollMux": ("solo", 1.84), "veRL over RollMux": ("colocated", 1.38)}


def play(kinds: list[str]) -> dict[str, list[Outcome]]:
    """Return what each system comes to, by seed."""
    traces = [arrivals(kinds, JOBS, seed, span=HOURS, mean=MEAN, by_day=True) for seed in range(SEEDS)]
    return {system: [Cluster(RULES[system], Prices()).run(trace) for trace in traces] for system in SYSTEMS}


def dollars(found: dict[str, list[Outcome]]) -> dict[str, float]:
    """Return dollars an hour of the two weeks."""
    return {system: fmean(outcome.dollars for outcome in outcomes) / HOURS for system, outcomes in found.items()}


def main() -> None:
    table = Table("RollMux, Figure 13: two weeks of production jobs", "times, dollars, GPUs, shares")
    found = {name: play(kinds) for name, kinds in KINDS.items()}
    chosen = found["Figure 2"]
    costs, rollmux, alone = dollars(chosen), chosen["rollmux"], chosen["solo"]
    over = {name: {s: d / dollars(mix)["rollmux"] for s, d in dollars(mix).items()} for name, mix in found.items()}
    for name, (system, paper) in RATIOS.items():
        table.add(name, paper, over["Figure 2"][system])
        table.add(f"{name}, jobs of several turns", paper, over["Figure 2, several turns"][system])
    for system, paper in PAPER.items():
        table.add(f"{SYSTEMS[system]}, dollars an hour", paper, costs[system])
    table.add("peak GPUs, rollout", 216, fmean(8 * o.rollout.peak for o in rollmux))
    table.add("peak GPUs, training", 152, fmean(8 * o.train.peak for o in rollmux))
    idle = [(a.rollout.idle / b.rollout.idle, a.train.idle / b.train.idle) for a, b in zip(rollmux, alone, strict=True)]
    table.add("bubbles over Solo-D's, rollout", 1 - 0.244, fmean(rollout for rollout, _ in idle))
    table.add("bubbles over Solo-D's, training", 1 - 0.431, fmean(train for _, train in idle))
    attained = {system: fmean(o.slo_attainment for o in outcomes) for system, outcomes in chosen.items()}
    table.add("jobs that keep their SLO", 1.0, attained["rollmux"])
    print(f"\n{'by the mix of jobs: dollars an hour':36}" + "".join(f"{title:>18}" for title in SYSTEMS.values()))
    for name, mix in found.items():
        cells = [f"{cost:,.0f} ({over[name][system]:.2f})" for system, cost in dollars(mix).items()]
        print(f"{name:36}" + "".join(f"{cell:>18}" for cell in cells))
    note(
        "Not known, and so assumed: jobs are those of Figure 2, in equal shares, on 8 + 8 GPUs (then Solo-D's dollars "
        "are the paper's); several turns have rollouts of 2.5 to 6 times their training, as jobs D and E; jobs come in "
        "working hours. Both ratios are within 15 % if all jobs have several turns. Tail migration is not modelled. "
        "Dollars are those of all the work, over two weeks. Co-located jobs decode on H800, about "
        "as fast as on H20 (Figure 10). Of Gavel+ only the name is known: here whole jobs take turns, which fills "
        "no bubble, and keeps no SLO below 2. A bubble is the idle share of a pool's hours."
    )
    style()
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4))
    names = [*PAPER, "slices"]
    pair(left, [*PAPER.values()], [costs[name] for name in names], [SYSTEMS[name] for name in names])
    left.set(title="dollars an hour", ylim=(0, 1300))
    left.legend()
    for i, (title, (system, paper)) in enumerate(RATIOS.items()):
        places = [x + 0.4 * (i - 0.5) for x in range(len(KINDS))]
        put_values(right, right.bar(places, [by[system] for by in over.values()], 0.4, label=title, color=f"C{i}"))
        right.axhline(paper, color=f"C{i}", linestyle=":", linewidth=1, label=f"paper, {paper}")
    right.set_xticks(range(len(KINDS)), [*KINDS], rotation=25, ha="right", rotation_mode="anchor", fontsize=7.5)
    right.set(title="cost over RollMux, by the mix of jobs", ylim=(0, 2.5))
    right.legend(ncols=2)
    save(figure, "mux_trace", f"{JOBS} jobs in two weeks, {SEEDS} seeds", "arXiv 2512.11306")
    table.end(
        "mux_trace",
        slo_attainment=round(attained["rollmux"], 4),
        slo_attainment_colocated=round(attained["colocated"], 3),
        over_rollmux={name: {s: round(ratio, 2) for s, ratio in by.items()} for name, by in over.items()},
    )


if __name__ == "__main__":
    command(main, __doc__)
