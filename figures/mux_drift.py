"""RollMux when jobs' phases grow or shrink: groups that stay, groups that change each hour, and changes that pay."""

from paper import Table, command, note, pair, plt, put_values, save, style

from policies.admission import Prices
from policies.regroup import Regrouping
from simulation.cluster import RULES, Cluster, Outcome
from simulation.mux_jobs import MIXES, arrivals, drifting

JOBS, HOURS = 200, 387  # as dense as in section 7.5
MOVING = 0.25  # hours: stopped, resubmitted, started cold
DRIFTS = {  # by how much a phase grows until its job ends; the paper's static plan: cost over the ideal, SLO attainment
    "grow": ((0.0, 0.5), 1.11, 0.986),
    "shrink": ((-0.35, 0.0), 1.10, 0.987),
    "both": ((-0.35, 0.5), 1.08, 0.956),
}
PLANS = {"static": None, "hourly, moves are free": Regrouping(0.0), "hourly, moves that pay": Regrouping(MOVING)}


def main() -> None:
    table = Table("RollMux, drift: groups that stay, over an hourly regrouping whose moves are free", "times, shares")
    jobs, prices = arrivals(MIXES["Mixed"], JOBS, 0, span=HOURS), Prices()
    found: dict[str, dict[str, Outcome]] = {}
    for name, ((low, high), cost, slo) in DRIFTS.items():
        drifted = drifting(jobs, 0, low, high)
        found[name] = {
            plan: Cluster(RULES["rollmux"], prices, regrouping=rule).run(drifted) for plan, rule in PLANS.items()
        }
        static, ideal, _ = found[name].values()
        table.add(f"{name}, cost", cost, static.dollars / ideal.dollars)
        table.add(f"{name}, jobs that keep their SLO", slo, static.slo_attainment)
    ideal_dollars = {name: by["hourly, moves are free"].dollars for name, by in found.items()}
    costs = {name: {plan: o.dollars / ideal_dollars[name] for plan, o in by.items()} for name, by in found.items()}
    print(f"\n{'over free moves: cost, SLO, moves':36}" + "".join(f"{plan:>26}" for plan in PLANS))
    for name, by_plan in found.items():
        cells = [f"{costs[name][plan]:.3f}, {o.slo_attainment:.1%}, {o.moved}" for plan, o in by_plan.items()]
        print(f"{name:36}" + "".join(f"{cell:>26}" for cell in cells))
    note(
        "The paper's drift is not known: here both phases of a job grow by up to a half or shrink by up to 35 % until "
        f"it ends. A move takes {60 * MOVING:.0f} minutes, in which the job does nothing. It is made if the group "
        "would break an SLO, or if the job is ahead of its own and its nodes cost less meanwhile than what is saved."
    )
    style()
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6))
    titles, kept = [*DRIFTS], {plan: [by[plan].slo_attainment for by in found.values()] for plan in PLANS}
    pair(left, [paper for _, paper, _ in DRIFTS.values()], [by["static"] for by in costs.values()], titles)
    left.set(title="groups that stay: cost over free moves", ylim=(0.9, 1.2))
    left.legend()
    for i, plan in enumerate(PLANS):
        places = [x + 0.26 * (i - 1) for x in range(len(titles))]
        put_values(right, right.bar(places, kept[plan], 0.26, label=plan))
    right.set_xticks(range(len(titles)), titles)
    right.set(title="jobs that keep their SLO", ylim=(0.9, 1.05))
    right.legend(ncols=3, fontsize=6.5)
    save(figure, "mux_drift", f"{JOBS} jobs in {HOURS} hours", "notes on the OSDI version")
    ours = [by["hourly, moves that pay"] for by in found.values()]
    table.end(
        "mux_drift",
        slo_attainment=min(o.slo_attainment for o in ours),
        slo_attainment_static=min(by["static"].slo_attainment for by in found.values()),
        cost_over_free_moves=round(max(by["hourly, moves that pay"] for by in costs.values()), 3),
        static_over_free_moves=round(max(by["static"] for by in costs.values()), 3),
        moves_a_job=round(sum(o.moved for o in ours) / JOBS / len(ours), 2),
    )


if __name__ == "__main__":
    command(main, __doc__)
