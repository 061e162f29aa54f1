"""RollMux, section 7.5: what shared pools cost over the best groups that can be, and which jobs keep their SLO."""

from statistics import fmean

from paper import Table, command, legend, note, plt, put_values, save, style

from policies.admission import MuxGroup, Prices, admit
from simulation.cluster import RULES, Arrival, Cluster, arrivals, optimum

PAPER = {"BL": 1.12, "RH": 1.10, "TH": 1.01, "Mixed": 1.06}  # cost of RollMux over the optimum, by mix of jobs
TITLES = {"BL": "balanced", "RH": "rollout heavy", "TH": "training heavy", "Mixed": "mixed"}
SMALL, CASES, JOBS, SEEDS = 6, 4, 300, 2
PRICES = Prices()


def over_optimum(mix: str, seed: int) -> float:
    """Return the cost of jobs that are admitted one after the other over that of the best groups of them."""
    jobs = [arrival.job for arrival in arrivals(mix, SMALL, seed)]
    groups: list[MuxGroup] = []
    for job in jobs:
        admit(job, groups, PRICES).carry_out(groups)
    return sum(group.cost(PRICES) for group in groups) / optimum(jobs, PRICES)


def main() -> None:
    table = Table(f"RollMux, section 7.5: {SMALL} jobs at once, mean of {CASES} cases", "cost over the optimum")
    costs = {mix: fmean(over_optimum(mix, seed) for seed in range(CASES)) for mix in PAPER}
    for mix, paper in PAPER.items():
        table.add(TITLES[mix], paper, costs[mix])
    print(f"\n{JOBS} jobs that come within 580 hours\n{'':24}" + "".join(f"{rule:>22}" for rule in RULES))
    slo: dict[str, dict[str, float]] = {}
    dollars: dict[str, dict[str, float]] = {}
    for mix in PAPER:
        traces: list[list[Arrival]] = [arrivals(mix, JOBS, seed) for seed in range(SEEDS)]
        found = {name: [Cluster(rule, PRICES).run(trace) for trace in traces] for name, rule in RULES.items()}
        slo[mix] = {name: fmean(o.slo_attainment for o in outcomes) for name, outcomes in found.items()}
        dollars[mix] = {name: fmean(o.dollars_per_hour for o in outcomes) for name, outcomes in found.items()}
        cells = [f"{dollars[mix][rule]:,.0f} $/h, SLO {slo[mix][rule]:.0%}" for rule in RULES]
        print(f"{TITLES[mix]:24}" + "".join(f"{cell:>22}" for cell in cells))
    savings = {mix: dollars[mix]["solo"] / dollars[mix]["rollmux"] for mix in PAPER}
    note(
        "The paper gives neither the jobs' nodes nor their memory nor the distribution of their lengths: here a job "
        "has one node of each kind, its memory fits, lengths are lognormal. The cases are small, since the optimum "
        "tries all groups; those of the paper are not known. Nor is it known how its Random and Greedy place jobs; "
        "here they share whatever has room, so they cost little and miss SLOs."
    )
    style()
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6))
    colors = {"rollmux": "C0", "solo": "0.7", "random": "C1", "greedy": "C2"}
    for axis, values, title in ((left, dollars, "dollars an hour"), (right, slo, "jobs that keep their SLO")):
        for i, rule in enumerate(RULES):
            places = [x + 0.2 * (i - 1.5) for x in range(len(PAPER))]
            heights = [values[mix][rule] for mix in PAPER]
            put_values(axis, axis.bar(places, heights, 0.2, label=rule, color=colors[rule]))
        axis.set_xticks(range(len(PAPER)), [TITLES[mix] for mix in PAPER])
        axis.set(title=title)
    legend(figure, left)
    save(figure, "mux_cost", f"{JOBS} jobs, one rollout and one training node each, {SEEDS} seeds", "arXiv 2512.11306")
    table.end(
        "mux_cost",
        slo_attainment=min(by_rule["rollmux"] for by_rule in slo.values()),
        cost_over_optimum=round(max(costs.values()), 3),
        solo_over_rollmux={mix: round(saving, 2) for mix, saving in savings.items()},
    )


if __name__ == "__main__":
    command(main, __doc__)
