"""ROLL Flash's rollout alone: responses of a prompt spread over GPUs, and prompts that replace filtered ones at once.

The paper's GPUs, lengths and filter are not known: here they are 16 H800 and 7B/8k, whose lengths are fitted to other
figures, and a filter that half of the prompts do not pass. So only ratios are compared.
"""

from dataclasses import replace
from statistics import mean
from typing import Any

from flash import PAPER as SOURCE
from paper import ClusterConfig, SimulationConfig, StreamConfig, Table, command, legend, note, pair, plt, save, style

from core import VisitId
from scheduler import SchedulerConfig
from simulate import Simulation, load_model_file, simulate

# (prompts, responses of each): speed-up by prompt replication
REPLICATION = {(32, 16): 116 / 89, (64, 16): 149 / 81, (16, 64): 162 / 83}
QUEUE = {"no extra prompts": 125 / 58, "16 extra prompts": 125 / 37}  # 8 x 8, against whole batches
GPUS, STEPS, SOLVED = 16, 60, 0.917  # of 8 responses all are right, or all wrong, with a probability of 1/2


def run(prompts: int, responses: int, policy: str = "synchronous", eta: float = 1.0, **changes: Any) -> Simulation:
    scheduler = SchedulerConfig(policy, prompts, responses, eta, 1.0, **changes)
    cluster = ClusterConfig(gpus=GPUS, steps=STEPS)
    file = load_model_file("qwen2.5-7b")
    file = replace(file, lengths=replace(file.lengths, solved=SOLVED, code=0.0, judge=0.0))
    return simulate(SimulationConfig(cluster, scheduler, stream=StreamConfig("off")), file)


def decoding(played: Simulation, kind: str = "") -> list[float]:
    """Return the seconds of each rollout, but for what a rollout costs whatever its batch."""
    records = [r for r in played.records if not kind or r["round"]["kind"] == kind]
    return [r["seconds"]["rollout"] - played.model.efficiency.rollout_seconds for r in records]


def in_batches() -> float:
    """Return the mean seconds until 8 prompts have passed the filter, where batches of 8 start until they have."""
    played = run(8, 8)
    full = passed = 0
    spent, used = 0.0, 0.0  # the last batch may not be full
    for ids, seconds in zip(played.trained, decoding(played), strict=True):
        spent += seconds
        rewards: dict[VisitId, set[float]] = {}
        for id in ids:
            rewards.setdefault(id.visit, set()).add(played.reward(id))
        passed += sum(len(values) > 1 for values in rewards.values())
        if passed >= 8:  # those beyond 8 are lost
            full, passed, used = full + 1, 0, spent
    return used / full


def main() -> None:
    table = Table("ROLL Flash, queue: the rollout alone", "times as fast")
    found: dict[str, tuple[float, float]] = {}
    for (prompts, responses), paper in REPLICATION.items():
        together, spread = (mean(decoding(run(prompts, responses, placement=p))) for p in ("together", "spread"))
        found[f"{prompts} x {responses}, spread"] = paper, together / spread
    batches = in_batches()
    given: dict[str, Any] = {"dynamic_sampling": True, "max_draws": 64.0}
    queued, extra = run(8, 8, **given), run(8, 8, "tail_batching", 3.0, **given)
    found["8 x 8, queue"] = QUEUE["no extra prompts"], batches / mean(decoding(queued))
    found["8 x 8, queue, 16 extra"] = QUEUE["16 extra prompts"], batches / mean(decoding(extra, "short"))
    for name, values in found.items():
        table.add(name, *values)
    nothing_lost = batches / mean(decoding(extra))
    note(
        "Nothing is fitted. Extra prompts are fast because the first of them are the short ones: with the long rounds "
        f"that train the others, so that none is lost, it is {nothing_lost:.2f} times as fast."
    )
    style()
    figure, axis = plt.subplots()
    pair(axis, [p for p, _ in found.values()], [s for _, s in found.values()], list(found))
    axis.set(title="A rollout", ylabel="times as fast")
    legend(figure, axis)
    save(figure, "flash_queue", f"7B/8k on {GPUS} H800, {STEPS} rollouts a bar", SOURCE)
    table.end("flash_queue", extra_nothing_lost=round(nothing_lost, 2))


if __name__ == "__main__":
    command(main, __doc__)
