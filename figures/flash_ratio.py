"""How far the rollout runs ahead (depth), how old a group may get (bound), and what is done with late ones (late).

ROLL Flash has one number for depth and bound, the asynchronous ratio alpha. The rules that ship play them apart, with
the costs of decoding and whole groups, on two workloads: one bound by work, one by its longest responses.
"""

import json

from flash import PAPER as SOURCE
from flash import endless, step_seconds, synchronous
from paper import command, legend, mean, note, plt, put_values, save, store, style, with_result

SETTINGS = [(1, 1), (2, 2), (4, 4), (1, 4)]  # depth, bound
LATE = ("wait", "drop", "keep")
GPUS = {"Think": (40, 16), "Base": (128, 64)}  # in all, and of these for training: as in Figures 5 and 1b
HEAD = "workload        depth bound  late  speed-up whole   lag  max  length dropped  late  idle: train  decode   again"
ROW = (
    "{workload:16}{depth:5}{bound:6}  {rule:6}{speedup:8.2f}{whole:6.2f}{lag_mean:6.2f}{lag_max:5}{trained_length:8.3f}"
)
ROW += "{dropped:8}{late:6}{trainers_idle:13.0%}{decoders_idle:8.0%}{recomputed:8.1%}"


def find(rows: list[dict], model: str, depth: int, bound: int) -> dict:
    """Return the row of a setting whose late groups are waited for."""
    wanted = depth, bound, "wait"
    return next(r for r in rows if r["workload"].startswith(model) and (r["depth"], r["bound"], r["rule"]) == wanted)


def main() -> None:
    rows = []
    print(HEAD)
    for model, (gpus, train) in GPUS.items():
        one = step_seconds(synchronous(model, gpus))
        for depth, bound in SETTINGS:
            for rule in LATE:
                run = endless(model, gpus, train, depth, bound=bound, late=rule)
                told = {key: round(value, 4) for key, value in run.summary().items()}
                row = {"workload": f"{model}, {gpus} GPUs", "depth": depth, "bound": bound, "rule": rule, **told}
                whole = one / mean(record["seconds"]["step"] for record in run.records)
                rows.append(row | {"speedup": round(one / step_seconds(run), 3), "whole": round(whole, 3)})
                print(ROW.format(**rows[-1]), flush=True)
    note(
        "Speed-up over the synchronous run on as many GPUs: of steps in the steady state, and of the whole run, at "
        "whose end the prompts are trained that were given up before; lag in updates, by sample; length of a trained "
        "response over that of all that were launched; share of tokens that were computed again."
    )
    style()
    figure, axes = plt.subplots(1, 2, figsize=(7.2, 3.6))
    for axis, (model, (gpus, train)) in zip(axes, GPUS.items(), strict=True):
        mine = [row for row in rows if row["workload"].startswith(model)]
        for i, rule in enumerate(LATE):
            bars = [row["speedup"] for row in mine if row["rule"] == rule]
            put_values(axis, axis.bar([x + 0.27 * (i - 1) for x in range(len(bars))], bars, 0.25, label=rule))
        axis.set_xticks(range(len(SETTINGS)), [f"depth {d}\nbound {b}" for d, b in SETTINGS])
        axis.set(title=f"{model}, {gpus} GPUs, {train} train")
        axis.grid(axis="x", visible=False)
    axes[0].set_ylabel("times as fast as synchronous")
    legend(figure, axes[0])
    save(figure, "flash_ratio", "256 x 16 responses a step", SOURCE)
    apart, one = (find(rows, "Base", *setting) for setting in ((1, 4), (4, 4)))
    base = {key: apart[key] for key in ("speedup", "lag_mean")}
    base |= {f"{key}_ratio_4": one[key] for key in ("speedup", "lag_mean")}
    result = {"figure": "flash_ratio", "base": base}
    print(json.dumps(result | {"rows": rows}))
    store(with_result("flash_ratio", result) | {"flash_ratio_rows": rows})


if __name__ == "__main__":
    command(main, __doc__)
