"""RollMux, section 6: host memory of an actor and seconds of switching to it, against our memory plan."""

from typing import Any

from paper import Table, command, legend, note, plt, save, style

from core import ModelShape
from engine.pages import Cache
from policies.memory_plan import Demand, Plan, plan

SIZES = {  # of Qwen2.5: hidden, intermediate, layers, heads, KV heads, tied; tensor parallelism
    "3B": ((2048, 11008, 36, 16, 2, True), 1),
    "7B": ((3584, 18944, 28, 28, 4, False), 1),
    "14B": ((5120, 13824, 48, 40, 8, False), 1),
    "32B": ((5120, 27648, 64, 40, 8, False), 2),
}
MEMORY = {"rollout": (113.4, 275.7, 445.4, 490.3), "training": (156.2, 240.0, 456.1, 520.4)}  # GB of a node of 8 GPUs
WARM = {"rollout": (0.8, 0.9, 1.8, 1.7), "training": (1.9, 4.1, 4.7, 5.9)}  # seconds
COLD = {"rollout": (25.3, 38.8, 60.4, 81.7), "training": (26.7, 32.7, 59.0, 81.2)}
STATE = ("weights of the rollout", "masters", "gradients", "optimizer state")  # moves out and back, by Job.release
GPUS = 8


def planned(size: str, trains: bool) -> Plan:
    (hidden, middle, layers, heads, kv_heads, tied), tensor_parallel = SIZES[size]
    flags: dict[str, Any] = {"tied": tied, "qkv_bias": True, "out_bias": False, "mlp_bias": False, "qk_norm": False}
    shape = ModelShape(152064, hidden, middle, layers, heads, kv_heads, 128, 32768, 1e-6, {}, **flags)
    cache = Cache(layers, kv_heads, 128, 2, page_size=64, max_running=256, longest=8192)
    part: dict[str, Any] = {"trains": trains, "decodes": not trains, "shard": GPUS, "num_ranks": GPUS}
    part |= {"layout": "sharded" if tensor_parallel > 1 else "whole", "tensor_parallel": tensor_parallel}
    return plan(Demand(shape, 2, cache, 16384, 2048, True, device=80e9, **part))


def state_gb(size: str, trains: bool) -> float:
    """Return what a rank moves to host memory between two phases."""
    lasting = planned(size, trains).lasting
    return sum(lasting[line] for line in STATE if trains or line == STATE[0]) / 1e9


def weights_gb(size: str) -> float:
    return planned(size, trains=False).demand.weights / 1e9


def main() -> None:
    sizes = list(SIZES)
    table = Table("RollMux, host memory: of an actor on a node of 8 GPUs", "GB")
    computed: dict[str, list[float]] = {}
    for phase, paper in MEMORY.items():
        computed[phase] = [GPUS * state_gb(size, phase == "training") for size in sizes]
        for size, given, ours in zip(sizes, paper, computed[phase], strict=True):
            table.add(f"{size}, {phase}", given, ours)
    rows, table = table.rows, Table("RollMux, switching: to an actor", "seconds")
    rate = state_gb("7B", False) / WARM["rollout"][1]
    for phase, paper in WARM.items():
        for size, given in zip(sizes, paper, strict=True):
            table.add(f"{size}, {phase}, warm", given, state_gb(size, phase == "training") / rate)
    ends = [(weights_gb(size), seconds) for size, seconds in zip(sizes, COLD["rollout"], strict=True)]
    slope = (ends[-1][1] - ends[0][1]) / (ends[-1][0] - ends[0][0])
    for phase, paper in COLD.items():
        for size, given in zip(sizes, paper, strict=True):
            table.add(f"{size}, {phase}, cold", given, ends[0][1] + slope * (weights_gb(size) - ends[0][0]))
    note(
        f"Fitted: {rate:.1f} GB a second between a GPU and its host, to the warm rollout of 7B; a cold start, "
        f"{ends[0][1] - slope * ends[0][0]:.0f} s and {slope:.2f} s for each GB of weights, to the smallest and the "
        "largest rollout. The rest is computed: host memory by the plan that `train.py --check` prints."
    )
    style()
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4))
    for i, (phase, paper) in enumerate(MEMORY.items()):
        for values, label, style_of in ((paper, "paper", "--"), (computed[phase], "computed", "-")):
            axes[0].plot(sizes, values, style_of, color=f"C{i}", marker="o", label=f"{phase}, {label}")
    axes[0].set(title="host memory of an actor", ylabel="GB on a node of 8 GPUs")
    for i, how in enumerate(("warm", "cold")):
        for phase, line in (("rollout", "-"), ("training", ":")):
            mine = [row for row in table.rows if row["name"].endswith(f"{phase}, {how}")]
            axes[1].plot(sizes, [row["paper"] for row in mine], line, color="0.6", marker="o")
            axes[1].plot(
                sizes, [row["simulated"] for row in mine], line, color=f"C{i + 2}", marker="o", label=f"{how}, {phase}"
            )
    axes[1].set(title="seconds of a switch (grey: paper)", yscale="log")
    axes[1].legend(fontsize=7)
    legend(figure, axes[0])
    save(figure, "mux_memory", "Qwen2.5 shapes, bf16 weights, fp32 masters and AdamW", "arXiv 2512.11306")
    table.rows = rows + table.rows
    table.end("mux_memory")


if __name__ == "__main__":
    command(main, __doc__)
