"""Long rounds whose tensor-parallel size changes when few responses are left, against one size a round.

PAT (arXiv 2605.23945) reports 34.6 % less generation time by such changes. Each workload is simulated with the engine
fitted to RollPacker's figures, where every decoding row costs time, and with one whose rows cost only memory reads: its
tail is bound by latency alone.
"""

import json
from dataclasses import replace
from statistics import mean

from paper import (
    GPUS,
    MODELS,
    REWARD,
    TENSOR_PARALLEL,
    PlannerConfig,
    cluster,
    command,
    legend,
    load_model_file,
    note,
    plt,
    put_values,
    save,
    simulate,
    store,
    style,
    with_result,
)

PLANNERS = {
    "fixed": PlannerConfig("fixed"),
    "predicted": PlannerConfig("predict"),
    "predicted, also within": PlannerConfig("predict", within_round=True),
}
STEPS = 20


def long_rounds(model: str, planner: PlannerConfig, row_seconds: float | None) -> tuple[float, list[list[int]]]:
    """Return the mean seconds of long rollouts, but for their fixed costs, and the sizes that each had."""
    file = load_model_file(MODELS[model])
    if row_seconds is not None:
        file = replace(file, efficiency=replace(file.efficiency, sequence_seconds=row_seconds))
    records = simulate(replace(REWARD, planner=planner, cluster=cluster(model, steps=STEPS)), file).records
    records = [r for r in records if r["round"]["kind"] == "long"]
    sizes = [[r["engine"]["tensor_parallel"], *(c["size"] for c in r["round"]["resized"])] for r in records]
    return mean(r["seconds"]["rollout"] for r in records) - file.efficiency.rollout_seconds, sizes


def main() -> None:
    rows = []
    print(f"{'seconds of a long rollout':36}{''.join(f'{name:>24}' for name in PLANNERS)}{'shorter by':>18}")
    for engine, row_seconds in (("fitted", None), ("rows cost reads only", 0.0)):
        for model in MODELS:
            found = {name: long_rounds(model, planner, row_seconds) for name, planner in PLANNERS.items()}
            fixed, predicted, within = (seconds for seconds, _ in found.values())
            saved = {"of_fixed": 1 - within / fixed, "of_predicted": 1 - within / predicted}
            times = {"fixed": fixed, "predicted": predicted, "within": within}
            times = {name: round(seconds, 1) for name, seconds in times.items()}
            rows.append({"workload": model, "engine": engine, **times, **{k: round(v, 4) for k, v in saved.items()}})
            print(f"{f'{model}, {engine}':36}{fixed:24.1f}{predicted:24.1f}{within:24.1f}", end="")
            print(f"{saved['of_fixed']:9.1%} of fixed, {saved['of_predicted']:.1%} of predicted")
            print(f"{'':4}sizes: {found['predicted, also within'][1]}")
    note(
        "Fixed is the paper's size for the model (1, 2, 2). A size predicted for each round takes most of the gain: "
        "where the tail is bound by latency alone, long rounds begin at the size that their tail wants."
    )
    style()
    figure, axes = plt.subplots(1, 2, figsize=(7.2, 3.4), sharey=True)
    for axis, engine in zip(axes, ("fitted", "rows cost reads only"), strict=True):
        mine = [row for row in rows if row["engine"] == engine]
        for i, (key, label) in enumerate(zip(("fixed", "predicted", "within"), PLANNERS, strict=True)):
            shares = [row[key] / row["fixed"] for row in mine]
            put_values(axis, axis.bar([x + 0.27 * (i - 1) for x in range(len(mine))], shares, 0.25, label=label))
        axis.set_xticks(range(len(mine)), [f"{m}\n{GPUS[m]} GPUs, TP {TENSOR_PARALLEL[m]}" for m in MODELS])
        axis.set(title=engine)
        axis.grid(axis="x", visible=False)
    axes[0].set_ylabel("time of a long rollout / at the fixed size")
    legend(figure, axes[0])
    save(figure, "within_round", f"{STEPS} steps, P0 = 128, R0 = 8")
    best = {f"shorter_than_{key[3:]}": max(row[key] for row in rows) for key in ("of_fixed", "of_predicted")}
    result = {"figure": "within_round", **best}
    print(json.dumps(result | {"rows": rows}))
    store(with_result("within_round", result) | {"within": rows})


if __name__ == "__main__":
    command(main, __doc__)
