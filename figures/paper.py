"""What the figures share: the paper's numbers and set-ups (RollPacker, section 6), runs, tables, the look."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from textwrap import fill
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.container import BarContainer

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from planner import PlannerConfig
from scheduler import SchedulerConfig
from simulate import ClusterConfig, GradingConfig, Simulation, SimulationConfig, simulate
from streaming import StreamConfig

MODELS = {"7B/8k": "qwen2.5-7b", "14B/16k": "qwen2.5-14b", "32B/32k": "qwen2.5-32b"}
GPUS = {"7B/8k": 16, "14B/16k": 32, "32B/32k": 64}
TENSOR_PARALLEL = {"7B/8k": 1, "14B/16k": 2, "32B/32k": 2}


def cluster(model: str, **changes: Any) -> ClusterConfig:
    """Return the paper's cluster for one of MODELS: H800, tensor parallelism 1 / 2 / 2."""
    base = ClusterConfig(model=MODELS[model], gpus=GPUS[model], tensor_parallel=TENSOR_PARALLEL[model])
    return replace(base, **changes)


def scheduler(
    policy: str, eta_prompts: float = 1.25, eta_responses: float = 1.25, prompts: int = 128
) -> SchedulerConfig:
    """Return P0 = 128, R0 = 8. The paper moves no sequences between replicas before the stream trainer does."""
    return SchedulerConfig(policy, prompts, 8, eta_prompts, eta_responses, migrate=False)


# The systems of Table 2, each with what the one before has, and the paper's RLHFuse, which got a stream trainer too.
SLOW, FAST = GradingConfig(overlap=False, adaptive=False), GradingConfig()
VERL = SimulationConfig(scheduler=scheduler("synchronous"), grading=SLOW, stream=StreamConfig("off"))
TAIL = replace(VERL, scheduler=scheduler("tail_batching"))
REWARD = replace(TAIL, grading=FAST)
PLANNER = replace(REWARD, planner=PlannerConfig("paper"))
ROLLPACKER = replace(PLANNER, stream=StreamConfig("paper"))
RLHFUSE = replace(VERL, grading=FAST, stream=StreamConfig("paper"))
SYSTEMS = {
    "veRL": VERL,
    "+ tail batching": TAIL,
    "+ reward scheduler": REWARD,
    "+ parallelism planner": PLANNER,
    "+ stream trainer": ROLLPACKER,
    "RLHFuse": RLHFUSE,
}


def run(system: str, model: str, steps: int = 20, **changes: Any) -> Simulation:
    """Simulate one of SYSTEMS on the paper's cluster for `model`. `changes` go to the cluster."""
    return simulate(replace(SYSTEMS[system], cluster=cluster(model, steps=steps, **changes)))


def seconds(records: Sequence[dict], stage: str = "step", kind: str = "") -> float:
    """Mean seconds of a stage over whole steps, or over those of one kind of round."""
    return mean(r["seconds"][stage] for r in records if not kind or r["round"]["kind"] == kind)


def measured(benchmark: str) -> dict[str, Any]:
    """Return what benchmarks/`benchmark`.py printed when it was last recorded, on a few CPU cores."""
    path = HERE.parent / "benchmarks" / "results" / f"{benchmark}.json"
    return json.loads(path.read_text(encoding="utf-8"))["result"] if path.exists() else {}


def command(play: Callable[[], None], about: str | None) -> None:
    """Run a script that takes nothing but `--help`: other arguments are refused before minutes of simulation."""
    argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    play()


class Table:
    """Rows of paper value, simulated value and difference, printed as they come; ends with one JSON line.

    The last column is what really ran on a CPU, at a tiny scale, where something did.
    """

    def __init__(self, title: str, unit: str):
        self.rows: list[tuple[str, float, float]] = []
        print(f"{title}\n{'':44}{'paper':>9}{'simulated':>11}{'difference':>12}{'real, CPU':>11}   ({unit})")

    def add(self, name: str, paper: float, simulated: float, real: float | None = None) -> None:
        self.rows.append((name, paper, simulated))
        ran = f"{real:>11.3g}" if real else ""
        print(f"{name:<44}{paper:>9.3g}{simulated:>11.3g}{simulated / paper - 1:>+12.1%}{ran}")

    def end(self, name: str, **more: Any) -> None:
        """Print the JSON line: the largest and the mean relative error, and everything in `more`."""
        errors = {row: abs(simulated / paper - 1) for row, paper, simulated in self.rows}
        worst = max(errors, key=errors.__getitem__)
        print(
            json.dumps(
                {"figure": name, "max_rel_error": round(errors[worst], 4), "worst": worst}
                | {"mean_rel_error": round(mean(errors.values()), 4), "entries": len(errors)}
                | {"within_15_percent": sum(e <= 0.15 for e in errors.values()), **more}
            )
        )


def note(text: str) -> None:
    """Say why simulated and paper's values differ."""
    print(fill(text, 118))


def style() -> None:
    plt.style.use(HERE / "plainroll.mplstyle")


def legend(figure: plt.Figure, axis: plt.Axes) -> None:
    """Put the legend of one axis above all of them, where it hides no data."""
    figure.legend(*axis.get_legend_handles_labels(), loc="outside upper right", ncols=5)


def pair(axis: plt.Axes, paper: Sequence[float], simulated: Sequence[float], labels: Sequence[str]) -> None:
    """Draw the paper's and the simulated values side by side; more of the second are rules that are ours alone."""
    count = len(paper)
    put_values(axis, axis.bar([x - 0.2 for x in range(count)], paper, 0.4, label="paper", color="0.7"))
    put_values(axis, axis.bar([x + 0.2 for x in range(count)], simulated[:count], 0.4, label="simulated", color="C0"))
    if ours := simulated[count:]:
        places = range(count, len(simulated))
        put_values(axis, axis.bar(places, ours, 0.4, label="simulated, not in the paper", color="C2"))
    axis.set_xticks(range(len(labels)), labels, rotation=35, ha="right", rotation_mode="anchor", fontsize=7.5)
    axis.grid(axis="x", visible=False)


def put_values(axis: plt.Axes, bars: BarContainer) -> None:
    """Write each bar's value above it, upright, so that narrow bars have room."""
    labels = [f"{bar.get_height():.4g}" if bar.get_height() >= 1000 else f"{bar.get_height():.3g}" for bar in bars]
    axis.bar_label(bars, labels, rotation=90, padding=2, fontsize=6.5)
    axis.margins(y=0.16)


def save(figure: plt.Figure, name: str, data: str) -> None:
    """Write figures/NAME.png with a caption line that names the command and the data."""
    caption = f"python figures/{name}.py: {data}; paper: arXiv 2509.21009"
    figure.supxlabel(caption, fontsize=7, color="0.4")
    figure.savefig(HERE / f"{name}.png")
    plt.close(figure)
