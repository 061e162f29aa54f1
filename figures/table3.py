"""Table 3: step speed-up by the reward scheduler: graded as responses end, time limits that adapt, against neither.

The paper speaks of grading beside the rollout alone; that alone gives less here (`beside` in the JSON line), because
responses that the race then drops take up sandboxes. So the rows compare with both parts, as Table 2 does.
"""

from dataclasses import replace

from paper import (
    FAST,
    MODELS,
    TAIL,
    Table,
    cluster,
    command,
    legend,
    measured,
    plt,
    put_values,
    save,
    seconds,
    simulate,
    style,
)

PAPER = (1.48, 1.35, 1.18)  # 7B, 14B, 32B
SANDBOX = 1.6  # rollout and reward together, code only: adaptive against fixed time limits
STEPS = 25


def main() -> None:
    def records(model: str, **grading) -> list[dict]:
        return simulate(
            replace(TAIL, grading=replace(TAIL.grading, **grading), cluster=cluster(model, steps=STEPS))
        ).records

    after = [seconds(records(model)) for model in MODELS]
    beside = [seconds(records(model, overlap=True)) for model in MODELS]
    both = [seconds(records(model, overlap=True, adaptive=FAST.adaptive)) for model in MODELS]
    table = Table("Table 3: step time, rewards after the rollout / beside it with adaptive limits", "speed-up")
    real = measured("reward")
    for i, model in enumerate(MODELS):
        table.add(model, PAPER[i], after[i] / both[i], real.get("speedup_async") if i == 0 else None)
    fixed, adaptive = (records("7B/8k", adaptive=a) for a in (False, True))
    taken = [seconds(r, "rollout") + seconds(r, "reward") for r in (fixed, adaptive)]
    table.add("7B/8k  rollout and reward, adaptive limits", SANDBOX, taken[0] / taken[1], real.get("speedup_adaptive"))
    style()
    figure, axis = plt.subplots()
    places = range(len(MODELS))
    for offset, name, values in (
        (-0.27, "after", after),
        (0, "beside", beside),
        (0.27, "beside, adaptive limits", both),
    ):
        put_values(axis, axis.bar([x + offset for x in places], values, 0.25, label=name))
    axis.set_xticks(list(places), MODELS)
    axis.set(title="Step time with tail batching, rewards graded ...", ylabel="step time (s)")
    axis.grid(axis="x", visible=False)
    legend(figure, axis)
    save(figure, "table3", f"a third each of code, judge and rule, {STEPS} steps")
    table.end("table3", beside=[round(a / b, 2) for a, b in zip(after, beside)])


if __name__ == "__main__":
    command(main, __doc__)
