"""What a run came to: reward and held-out accuracy, response lengths, and where a step's seconds went.

python figures/run.py runs/tiny [OTHER ...] [--out run.png]      later runs are drawn over the first
"""

import argparse
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from metrics import read_records


def draw(folders: list[Path], out: Path) -> None:
    plt.style.use(HERE / "plainroll.mplstyle")
    figure, (reward, length, seconds) = plt.subplots(1, 3, figsize=(12, 3.6))
    for i, folder in enumerate(folders):
        records = read_records(folder / "steps.jsonl")
        trained, evaluated = [r for r in records if r["step"]], [r for r in records if r.get("eval")]
        steps, color = [r["step"] for r in trained], f"C{i}"
        reward.plot(steps, [r["reward"] for r in trained], color=color, alpha=0.35, label=f"{folder.name}, trained")
        for key in [k for k in (evaluated[0]["eval"] if evaluated else {}) if k.startswith("avg@")]:
            points = [r["eval"][key] for r in evaluated]
            reward.plot([r["step"] for r in evaluated], points, "o-", color=color, label=f"{folder.name}, held out")
        for key, style in (("p50", "-"), ("max", ":")):
            length.plot(steps, [r["length"][key] for r in trained], style, color=color, label=f"{folder.name}, {key}")
        for stage, style in (("rollout", "-"), ("train", "--")):
            spent = [r["seconds"].get(stage, 0.0) for r in trained]
            seconds.plot(steps, spent, style, color=color, label=f"{folder.name}, {stage}")
    reward.set(title="Reward", xlabel="step", ylabel="mean reward")
    length.set(title="Trained responses", xlabel="step", ylabel="tokens", ylim=(0, None))
    seconds.set(title="Time of a step", xlabel="step", ylabel="seconds, slowest rank", ylim=(0, None))
    for axis in (reward, length, seconds):
        axis.legend(fontsize=7)
    figure.supxlabel(f"python figures/run.py {' '.join(map(str, folders))}", fontsize=7, color="0.4")
    figure.savefig(out)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders")
    parser.add_argument("--out", type=Path, default=Path("run.png"))
    arguments = parser.parse_args()
    for folder in arguments.runs:
        if not (folder / "steps.jsonl").exists():
            print(f"error: {folder}: no steps.jsonl there; give the run.dir of a run", file=sys.stderr)
            return 2
    draw(arguments.runs, arguments.out)
    print(arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
