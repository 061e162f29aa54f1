"""RollMux, section 7.5: costs of shared pools over the best groups that can be, kept SLOs, and times of decisions."""

from dataclasses import dataclass, replace
from statistics import fmean
from time import perf_counter

from paper import Table, command, legend, note, pair, plt, put_values, save, style

from policies.admission import MuxGroup, Prices, admit
from simulation.cluster import RULES, Cluster, Outcome, optimum
from simulation.mux_jobs import MIXES, arrivals


@dataclass(frozen=True)
class Setting:
    """Bars of Figures 14 and 15: what differs from section 7.5's defaults, and the paper's costs over the optimum."""

    title: str
    paper: dict[str, float]
    mix: str = "Mixed"
    slo: tuple[float, float] = (1.0, 2.0)
    max_jobs: int = 5

    @property
    def prices(self) -> Prices:
        return Prices(max_jobs=self.max_jobs)


def paper(rollmux: float, random: float = 0.0, greedy: float = 0.0) -> dict[str, float]:
    return {"rollmux": rollmux, "random": random, "greedy": greedy}


SETTINGS = [
    Setting("balanced", paper(1.12, 2.00, 1.75), mix="BL"),
    Setting("rollout heavy", paper(1.10, 1.92, 1.89), mix="RH"),
    Setting("training heavy", paper(1.01, 1.72, 1.38), mix="TH"),
    Setting("mixed", paper(1.06, 1.97, 1.66)),
    Setting("SLO 1.2", paper(1.07, 2.09, 1.73), slo=(1.2, 1.2)),
    Setting("SLO 1.5", paper(1.07, 1.95, 1.75), slo=(1.5, 1.5)),
    Setting("SLO 2.0", paper(1.07, 1.89, 1.59), slo=(2.0, 2.0)),
    Setting("at most 2 jobs", paper(1.10), max_jobs=2),
    Setting("at most 3 jobs", paper(1.07), max_jobs=3),
    Setting("at most 4 jobs", paper(1.06), max_jobs=4),
]
SMALL, CASES = 6, 12  # jobs at once, since the optimum tries all groups
JOBS, HOURS, SEEDS = 300, 580, 2
SHOWN = {"rollmux": "C0", "random": "C1", "greedy": "C2", "solo": "0.7"}  # rules, and their colors
LATENCY = {5: 5.6, 9: 6.5, 13: 7.6, 100: 41.9, 500: 198, 1000: 318, 2000: 591}  # the paper's ms, by jobs
DECISIONS, AT_ONCE = 20, 100


def over_optimum(setting: Setting, seed: int) -> float:
    """Return the cost of jobs that are admitted one after the other over that of the best groups of them."""
    jobs = [arrival.job for arrival in arrivals(MIXES[setting.mix], SMALL, seed, setting.slo)]
    groups: list[MuxGroup] = []
    for job in jobs:
        admit(job, groups, setting.prices).carry_out(groups)
    return sum(group.cost(setting.prices) for group in groups) / optimum(jobs, setting.prices)


def over_time(setting: Setting) -> dict[str, list[Outcome]]:
    """Return what each rule comes to, by seed."""
    traces = [arrivals(MIXES[setting.mix], JOBS, seed, setting.slo, HOURS) for seed in range(SEEDS)]
    return {name: [Cluster(RULES[name], setting.prices).run(trace) for trace in traces] for name in SHOWN}


def show(setting: Setting, dollars: dict[str, float], slo: dict[str, float]) -> None:
    """Print what the rules cost over RollMux, and the jobs that keep their SLO; in brackets the paper's cost."""
    cells = []
    for name in SHOWN:
        known = setting.paper.get(name, 0.0) / setting.paper["rollmux"]
        cells.append(
            f"{dollars[name] / dollars['rollmux']:.2f}{f' ({known:.2f})' if known else ''}, SLO {slo[name]:.0%}"
        )
    print(f"{setting.title:24}" + "".join(f"{cell:>22}" for cell in cells))


def decision_ms() -> dict[int, float]:
    """Return the milliseconds of the slowest of some decisions, which looks at all groups, by the jobs that run.

    These come AT_ONCE at a time and share nodes among themselves, so that thousands are there soon.
    """
    taken, prices, groups = {}, Prices(), list[MuxGroup]()
    asking = [arrival.job for arrival in arrivals(MIXES["Mixed"], DECISIONS, seed=-1)]
    there = 0
    for jobs in LATENCY:
        while there < jobs:
            count = min(AT_ONCE, jobs - there)
            part: list[MuxGroup] = []
            for arrival in arrivals(MIXES["Mixed"], count, seed=there):
                job = replace(arrival.job, name=f"job{there}")
                admit(job, part, prices).carry_out(part)
                there += 1
            groups += part
        seconds = []
        for job in asking:
            start = perf_counter()
            admit(job, groups, prices)
            seconds.append(perf_counter() - start)
        taken[jobs] = round(1000 * max(seconds), 1)
    return taken


def draw(costs: list[float], dollars: dict[str, list[float]], slo: dict[str, list[float]]) -> None:
    style()
    figure, axes = plt.subplots(3, 1, figsize=(9, 8.5))
    titles = [setting.title for setting in SETTINGS]
    pair(axes[0], [setting.paper["rollmux"] for setting in SETTINGS], costs, titles)
    axes[0].set(title=f"{SMALL} jobs at once: cost over the optimum", ylim=(0.8, None))
    axes[0].legend(ncols=2)
    for axis, values, title in (
        (axes[1], dollars, f"{JOBS} jobs over {HOURS} hours: cost over RollMux"),
        (axes[2], slo, "jobs that keep their SLO"),
    ):
        for i, (name, color) in enumerate(SHOWN.items()):
            places = [x + 0.2 * (i - 1.5) for x in range(len(SETTINGS))]
            put_values(axis, axis.bar(places, values[name], 0.2, label=name, color=color))
        axis.set_xticks(range(len(titles)), titles, rotation=35, ha="right", rotation_mode="anchor", fontsize=7.5)
        axis.set(title=title)
    legend(figure, axes[1])
    save(figure, "mux_cost", f"one rollout and one training node a job, {SEEDS} seeds", "arXiv 2512.11306")


def main() -> None:
    table = Table(f"RollMux, section 7.5: {SMALL} jobs at once, mean of {CASES} cases", "cost over the optimum")
    costs = [fmean(over_optimum(setting, seed) for seed in range(CASES)) for setting in SETTINGS]
    for setting, cost in zip(SETTINGS, costs, strict=True):
        table.add(setting.title, setting.paper["rollmux"], cost)
    print(
        f"\n{JOBS} jobs that come within {HOURS} hours: cost over RollMux (in the paper), and jobs that keep their SLO"
    )
    print(f"{'':24}" + "".join(f"{name:>22}" for name in SHOWN))
    dollars: dict[str, list[float]] = {name: [] for name in SHOWN}
    slo: dict[str, list[float]] = {name: [] for name in SHOWN}
    for setting in SETTINGS:
        found = over_time(setting)
        totals = {name: fmean(o.dollars for o in outcomes) for name, outcomes in found.items()}
        kept = {name: fmean(o.slo_attainment for o in outcomes) for name, outcomes in found.items()}
        show(setting, totals, kept)
        for name in SHOWN:
            dollars[name].append(totals[name] / totals["rollmux"])
            slo[name].append(kept[name])
    for name in ("random", "greedy"):
        known = [i for i, setting in enumerate(SETTINGS) if setting.paper[name]]
        theirs = fmean(SETTINGS[i].paper[name] / SETTINGS[i].paper["rollmux"] for i in known)
        table.add(f"{name} over RollMux, mean of {len(known)} settings", theirs, fmean(dollars[name][i] for i in known))
    note(
        "The paper gives neither the jobs' nodes nor their memory nor the distribution of their lengths: here a job "
        "has one node of each kind, its memory fits, lengths are lognormal. The cases of its optimum are not known. "
        "Nor is it known how its Random and Greedy place jobs; here they share whatever has room, so they cost little "
        "and miss SLOs."
    )
    milliseconds = decision_ms()
    print("\nmilliseconds of a decision, at most, by jobs that run (in the paper): ", end="")
    print(", ".join(f"{jobs}: {ms:g} ({LATENCY[jobs]:g})" for jobs, ms in milliseconds.items()))
    draw(costs, dollars, slo)
    at = {setting.title: i for i, setting in enumerate(SETTINGS)}
    table.end(
        "mux_cost",
        slo_attainment=min(slo["rollmux"]),
        cost_over_optimum=round(costs[at["mixed"]], 3),
        largest_cost_over_optimum=round(max(costs), 3),
        largest_difference=round(max(abs(c / s.paper["rollmux"] - 1) for c, s in zip(costs, SETTINGS, strict=True)), 4),
        solo_over_rollmux={setting.mix: round(dollars["solo"][at[setting.title]], 2) for setting in SETTINGS[:4]},
        slo_attainment_random=[round(f(slo["random"]), 3) for f in (min, max)],
        slo_attainment_greedy=[round(f(slo["greedy"]), 3) for f in (min, max)],
        decision_ms_at_2000=milliseconds[2000],
    )


if __name__ == "__main__":
    command(main, __doc__)
