"""Asynchronous training against the synchronous run: reward and held-out accuracy after equal numbers of samples.

python figures/asynchrony_learning.py            trains what is missing in runs/ (48 runs of minutes each), then draws
python figures/asynchrony_learning.py --draw     draws again from figures/asynchrony_learning.json
python figures/asynchrony_learning.py --quick    a few steps of one seed, drawn in runs/quick: to see that it works
python figures/asynchrony_learning.py --seeds 1 --losses ppo tis --alphas 2     a part of it

alpha is the paper's asynchronous ratio, here `overlap.depth` and with it `overlap.bound`. At alpha 0 the weights that
sampled a batch are those that it trains, so all losses have the same gradient: one run of each seed, whose range is the
band of every panel. Each run has one rank, so that several fit on a machine: on the clock of steps, the default, tokens
are the same on any number. A run whose held-out accuracy falls below a fifth of the start's has collapsed and is ended:
its responses run to the limit. `--once LOSS-ALPHA ...` trains one seed of those that do. (ROLL Flash, arXiv 2510.11345,
Figure 7)
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from run import moving
from training_runs import CONFIG, collapsed, command_line, has_collapsed, make, of_run, run

from metrics import read_records

LOSSES = {  # title, settings
    "ppo": ("PPO", []),
    "decoupled": ("decoupled PPO", []),
    "tis": ("TIS", []),
    "cispo": ("CISPO", ["loss.clip_low=0.1", "loss.clip_high=0.1"]),  # ROLL's bounds
    "topr": ("TOPR", []),
}
ALPHAS = (1, 2, 8)
SYNCHRONOUS = ("ppo", 0)


def trained(loss: str, alpha: int, seed: int, quick: bool) -> dict:
    """Return the rewards of all steps of a run, its evaluations, and the mean lag of its samples."""
    settings = [f"run.seed={seed}", f"warm_start.seed={seed}", "scheduler.policy=synchronous"]
    settings += [f"loss.name={loss}", *LOSSES[loss][1], *([f"overlap.depth={alpha}"] if alpha else [])]
    name = f"asynchrony-{loss}-{alpha}-seed{seed}"
    folder = run(name, *settings, ranks=1, quick=quick, until=collapsed)
    records = read_records(folder / "steps.jsonl")
    steps = [r for r in records if r["step"]]
    return {
        "loss": loss,
        "alpha": alpha,
        "seed": seed,
        **of_run(folder),
        "lag": statistics.mean(r["round"]["lag"]["mean"] for r in steps) if alpha else 0.0,
        "reward": [round(r["reward"], 4) for r in steps],
        "evaluations": [{"step": r["step"], **r["eval"]} for r in records if r.get("eval")],
    }


def curves(rows: list[dict]) -> dict[str, tuple[list[int], list[list[float]]]]:
    """Return for reward and accuracy the steps, and at each the values of all seeds."""
    rewards = [dict(enumerate(moving(row["reward"]), 1)) for row in rows]
    accuracies = [{e["step"]: 100 * e["avg@4"] for e in row["evaluations"]} for row in rows]
    found = {}
    for title, curves in (("reward, mean of ten steps", rewards), ("held-out avg@4 (%)", accuracies)):
        steps = sorted(set[int]().union(*curves))
        found[title] = steps, [[curve[step] for curve in curves if step in curve] for step in steps]
    return found


def draw(rows: list[dict], path: Path) -> None:
    plt.style.use(HERE / "plainroll.mplstyle")
    losses = [loss for loss in LOSSES if any(row["loss"] == loss and row["alpha"] for row in rows)]
    figure, panels = plt.subplots(
        2, len(losses), figsize=(2.6 * len(losses) + 1, 5), sharex=True, sharey="row", squeeze=False
    )
    base = curves([row for row in rows if (row["loss"], row["alpha"]) == SYNCHRONOUS])
    for i, loss in enumerate(losses):
        alphas = sorted({row["alpha"] for row in rows if row["loss"] == loss and row["alpha"]})
        for axes, (title, (steps, values)) in zip(panels[:, i], base.items(), strict=True):
            axes.plot(
                steps, [statistics.mean(v) for v in values], color="0.4", label="alpha 0, mean and range of seeds"
            )
            axes.fill_between(steps, [min(v) for v in values], [max(v) for v in values], color="0.4", alpha=0.25)
            for j, alpha in enumerate(alphas):
                mine = curves([row for row in rows if (row["loss"], row["alpha"]) == (loss, alpha)])[title]
                axes.plot(mine[0], [statistics.mean(v) for v in mine[1]], color=f"C{j}", label=f"alpha {alpha}")
            axes.set_ylabel(title if i == 0 else "")
        panels[0, i].set_title(LOSSES[loss][0])
        panels[1, i].set_xlabel("step")
    panels[0, 0].legend(loc="lower right", fontsize=7)
    seeds, count = len({row["seed"] for row in rows}), rows[0]["evaluations"][0]["num_prompts"]
    made = f"commit {rows[0]['commit'][:7]} of {rows[0]['date']}"
    data = f"{CONFIG} without a race, hailstone, {seeds} seeds, {count} held-out prompts x 4"
    figure.supxlabel(f"python figures/asynchrony_learning.py ({made}): {data}", fontsize=7, color="0.4")
    figure.savefig(path)


def compare(rows: list[dict]) -> dict:
    """Print the last accuracy of each loss and alpha beside alpha 0, the seeds in pairs; return the table."""
    last = {(row["loss"], row["alpha"], row["seed"]): row["evaluations"][-1] for row in rows}
    accuracies = [e["avg@4"] for (*kind, _), e in last.items() if (*kind,) == SYNCHRONOUS]
    spread = min(accuracies), max(accuracies)
    print(f"alpha 0: {spread[0]:.3f} to {spread[1]:.3f}")
    table = []
    for loss, alpha in dict.fromkeys((row["loss"], row["alpha"]) for row in rows if row["alpha"]):
        seeds = [seed for *kind, seed in last if kind == [loss, alpha]]
        mine, base = ([last[*kind, seed] for seed in seeds] for kind in ((loss, alpha), SYNCHRONOUS))
        accuracy = statistics.mean(e["avg@4"] for e in mine)
        difference = accuracy - statistics.mean(e["avg@4"] for e in base)
        error = sum(e["standard_error"] ** 2 for e in (*mine, *base)) ** 0.5 / len(seeds)
        lag = statistics.mean(row["lag"] for row in rows if (row["loss"], row["alpha"]) == (loss, alpha))
        is_inside = spread[0] <= accuracy <= spread[1]
        ended = sum(has_collapsed(row["evaluations"]) for row in rows if (row["loss"], row["alpha"]) == (loss, alpha))
        print(
            f"{loss:10} alpha {alpha}: {accuracy:.3f}, {difference:+.3f} (standard error {error:.3f}), mean lag "
            f"{lag:.2f}{'' if is_inside else ', outside the range of alpha 0'}"
            f"{f', {ended} of {len(mine)} collapsed' if ended else ''}"
        )
        values = {
            "seeds": len(seeds),
            "collapsed": ended,
            "accuracy": accuracy,
            "difference": difference,
            "standard_error": error,
            "lag": lag,
        }
        table.append({"loss": loss, "alpha": alpha, **{k: round(v, 4) for k, v in values.items()}, "inside": is_inside})
    worst = min(table, key=lambda row: row["difference"])["difference"]
    return {
        "name": "asynchrony_learning",
        "seeds": len(accuracies),
        "synchronous": spread,
        "worst": worst,
        "rows": table,
    }


def train(args: argparse.Namespace, seeds: Sequence[int]) -> list[dict]:
    alphas = args.alphas[:1] if args.quick else args.alphas
    kinds = [SYNCHRONOUS, *((loss, alpha) for loss in args.losses for alpha in alphas)]
    once = [] if args.quick else args.once
    return [trained(*k, seed, args.quick) for seed in seeds for k in kinds if not seed or f"{k[0]}-{k[1]}" not in once]


def main() -> None:
    parser = command_line(__doc__, "asynchrony_learning")
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=[*LOSSES])
    parser.add_argument("--alphas", nargs="+", type=int, default=ALPHAS)
    parser.add_argument("--once", nargs="+", default=[], help="such as tis-8: with one seed, whatever --seeds says")
    make("asynchrony_learning", parser.parse_args(), train, draw, compare)


if __name__ == "__main__":
    main()
