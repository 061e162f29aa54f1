"""A smaller student learns from a teacher, by rewards, and from the teacher's texts: held-out accuracy over seconds.

python figures/distillation.py            trains the seeds that figures/distillation.json lacks (15 min each), draws
python figures/distillation.py --again    trains all seeds, but what is in runs/
python figures/distillation.py --draw     draws again from figures/distillation.json
python figures/distillation.py --quick    a few steps of one seed, drawn in runs/quick: to see that it works

The teacher is a run of configs/tiny.toml (of figures/adapters.py), trained by rewards. The student, warm-started as it
was, has half of its width and two layers. It learns by configs/distill.toml from the teacher's likeliest tokens, and
from the sampled tokens alone; without a teacher by rewards; and by supervised steps on texts that the teacher writes to
as many prompts, to whose seconds those of writing are added. A run ends at its first evaluation with the last of the
scores, or after STEPS. Runs are kept one by one: one that was stopped goes on. Seconds are those of steps: no start,
evaluation or checkpoint counts, nor the training of the teacher.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
DATA = HERE / "distillation.json"
sys.path.insert(0, str(HERE.parent))

from training_runs import command_line, make, of_run, run

from metrics import read_records

SCORES, STEPS = (0.3, 0.4, 0.5), 120  # held-out avg@4
CONFIG, EVALUATED = "configs/distill.toml", "data.eval_prompts=256"
ALONE = ("distill.teacher=", "distill.top_k=0")
WAYS = {
    "teacher, 16 likeliest": (),
    "teacher, sampled token": ("distill.top_k=0",),
    "rewards": ALONE,
    "rewards, lr 3e-4": (*ALONE, "trainer.lr=3e-4"),  # of the teacher
    "teacher's texts": (*ALONE, "loss.name=sft"),
}


def plain(way: str) -> str:
    return re.sub("[^a-z0-9]+", "_", way)


def evaluations(folder: Path, written: Sequence[float] = ()) -> list[dict]:
    """Return step, seconds of the steps until then and accuracy. `written`: seconds of writing the texts of a step."""
    points, seconds, path = list[dict](), 0.0, folder / "steps.jsonl"
    for record in read_records(path) if path.exists() else []:
        if step := record["step"]:
            seconds += record["seconds"]["step"] + sum(written[step - 1 : step])
        if record.get("eval"):
            points.append({"step": step, "seconds": round(seconds, 2), "avg@4": record["eval"]["avg@4"]})
    return points


def is_over(folder: Path) -> bool:
    return any(point["avg@4"] >= SCORES[-1] for point in evaluations(folder))


def seconds_to(score: float, points: Sequence[dict]) -> float | None:
    return next((point["seconds"] for point in points if point["avg@4"] >= score), None)


def trained(seed: int, quick: bool) -> list[dict]:
    """Return the evaluations of each way for one seed, training what is not there."""
    seeds, rows = (f"run.seed={seed}", f"warm_start.seed={seed}"), []
    teacher = max((run(f"adapters-all-weights-seed{seed}", *seeds, quick=quick) / "checkpoints").glob("step_*"))
    for way, settings in WAYS.items():
        own, written = [*seeds, EVALUATED, f"run.steps={STEPS}", f"distill.teacher={teacher}", *settings], []
        if "loss.name=sft" in settings:
            writes = [f"model.path={teacher}", "trainer.lr=0", "run.dump_rollouts=true", f"run.steps={STEPS}"]
            # All that a round launches is trained: a race would leave the longest texts out.
            writes += ["scheduler.policy=synchronous", "run.eval_every=0", "data.eval_prompts=0"]
            texts = run(f"distillation-texts-seed{seed}", f"run.seed={seed}", *writes, quick=quick)
            written = [r["seconds"]["rollout"] for r in read_records(texts / "steps.jsonl") if r["step"]]
            own.append(f"run.replay={texts / 'rollouts'}")
        folder = run(f"distillation-{plain(way)}-seed{seed}", *own, quick=quick, until=is_over, config=CONFIG)
        rows.append({"way": way, "seed": seed, **of_run(folder), "evaluations": evaluations(folder, written)})
    return rows


def draw(rows: list[dict], path: Path) -> None:
    plt.style.use(HERE / "plainroll.mplstyle")
    figure, axes = plt.subplots()
    for color, way in enumerate(WAYS):
        for label, row in zip((way, *(None for _ in rows)), (row for row in rows if row["way"] == way)):
            seconds, scores = zip(*((p["seconds"], 100 * p["avg@4"]) for p in row["evaluations"]), strict=True)
            axes.plot(seconds, scores, color=f"C{color}", alpha=0.8, label=label)
    for score in SCORES:
        axes.axhline(100 * score, color="0.4", linestyle="--", linewidth=0.7)
    axes.set(title="Held-out accuracy of the student", xlabel="seconds of steps", ylabel="avg@4 at temperature 1 (%)")
    axes.set_ylim(0, 60)
    axes.legend(loc="lower right")
    figure.supxlabel("python figures/distillation.py; hailstone, 2 ranks of one thread", fontsize=7, color="0.4")
    figure.savefig(path)


def seed_of(row: dict) -> int:
    return row["seed"]


def summary(rows: list[dict]) -> dict:
    """Return by way each seed's seconds to the scores, null where it did not come so far, and its best accuracy."""
    found: dict = {"name": "distillation", "scores": SCORES, "rows": []}
    for way in WAYS:
        curves = [row["evaluations"] for row in sorted(rows, key=seed_of) if row["way"] == way]
        seconds = [[seconds_to(score, points) for score in SCORES] for points in curves]
        best = [max(p["avg@4"] for p in points) for points in curves]
        found |= {f"seconds_{plain(way)}": seconds, f"best_{plain(way)}": best}
        cells = [", ".join("-" if x is None else f"{x:.0f}" for x in column) for column in zip(*seconds, strict=True)]
        found["rows"].append({"way": way, "to": cells, "best": ", ".join(f"{100 * x:.0f}" for x in best)})
        print(f"{way}: seconds to {SCORES} {'; '.join(cells)}; best {found['rows'][-1]['best']} %")
    return found


def train(args: argparse.Namespace, seeds: Sequence[int]) -> list[dict]:
    there = {seed_of(row) for row in json.loads(DATA.read_text())} if DATA.exists() else set[int]()
    if not (args.again or args.quick):
        seeds = [seed for seed in seeds if seed not in there]
    return [row for seed in seeds for row in trained(seed, args.quick)]


if __name__ == "__main__":
    parser = command_line(__doc__, "distillation")
    parser.add_argument("--again", action="store_true", help="train seeds that were drawn before, too")
    make("distillation", parser.parse_args(), train, draw, summary, panel=lambda row: str(seed_of(row)))
