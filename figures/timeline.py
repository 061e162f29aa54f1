"""When each replica did what: the synchronous baseline above tail batching, two periods of rounds on one time axis.

python figures/timeline.py                 runs ten steps of each on two ranks (a minute), then draws them
python figures/timeline.py --draw          draws again from figures/timeline.json
python figures/timeline.py TRACE.json ...  draws any run's trace.json (--log.trace=true) as timeline.png beside it
"""

import argparse
import json
import sys
from contextlib import suppress
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Patch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from training_runs import CONFIG, keep, kept, run

STEPS = 10
SETTINGS = ["log.trace=true", f"run.steps={STEPS}", "data.eval_prompts=0", "run.checkpoint_every=0"]
RUNS = {
    "synchronous": [*SETTINGS, "scheduler.policy=synchronous"],
    "tail batching, twice four short rounds and a long one": [*SETTINGS, "scheduler.eta_responses=1.25"],
}
COLORS = {  # of a trace's spans; those that enclose others are left out
    "evaluate": ("#eeeeee", "evaluate, checkpoint"),
    "checkpoint": ("#eeeeee", "evaluate, checkpoint"),
    "prefill": ("#edae49", "prefill"),
    "decode": ("#2a6f97", "decode"),
    "verify": ("#61a5c2", "decode with drafts"),
    "ahead": ("#a9d6e5", "draw the next round's drafts"),
    "idle": ("#d1495b", "idle: nothing left to decode"),
    "window_wait": ("#f2a6ae", "wait at a window's end"),
    "hand_over": ("#6a4c93", "hand-over, exchange"),
    "resize": ("#6a4c93", "hand-over, exchange"),
    "exchange": ("#6a4c93", "hand-over, exchange"),
    "reward": ("#8d6a4f", "wait for graders"),
    "stream_train": ("#b5d99c", "train what is complete"),
    "stream_wait": ("#d9d9d9", "wait for complete groups"),
    "wait_batch": ("#d9d9d9", "wait for complete groups"),
    "publish": ("#222222", "new weights travel"),
    "train": ("#66a182", "train"),
    "sync": ("#66a182", "train"),
}
WAITS = ("idle", "window_wait", "stream_wait", "wait_batch", "reward")
BESIDE = ("evaluate", "checkpoint")  # between steps: neither busy nor idle
Span = tuple[int, str, float, float, int]  # replica, name, start, end, step


def read_trace(path: Path, steps: int = 0) -> list[Span]:
    """Return the drawn spans of the last `steps` steps (0: all), in seconds from the first on."""
    events = []
    for line in path.read_text(encoding="utf-8").splitlines():  # a run that goes on, or was killed, has no end
        with suppress(ValueError):
            events.append(json.loads(line.strip().lstrip("[").rstrip(",]")))
    events = [e for e in events if isinstance(e, dict) and e.get("ph") == "X" and e["name"] in COLORS]
    if not events:
        raise SystemExit(f"{path}: no step is in it yet")
    first_step = max(e["args"]["step"] for e in events) - steps + 1 if steps else 0
    events = [e for e in events if e["args"]["step"] >= first_step]
    zero = min(e["ts"] for e in events)
    return [
        (e["tid"], e["name"], (e["ts"] - zero) / 1e6, (e["ts"] + e["dur"] - zero) / 1e6, e["args"]["step"])
        for e in events
    ]


def draw(timelines: dict[str, list[Span]], path: Path, caption: str) -> None:
    plt.style.use(HERE / "plainroll.mplstyle")
    tracks = [1 + max(span[0] for span in spans) for spans in timelines.values()]
    figure, panels = plt.subplots(
        len(timelines),
        sharex=True,
        squeeze=False,
        height_ratios=tracks,
        figsize=(7.2, 1.2 + sum(0.5 + 0.4 * n for n in tracks)),
    )
    for axes, (title, spans), count in zip(panels[:, 0], timelines.items(), tracks):
        for name, (color, _) in COLORS.items():
            for replica in range(count):
                bars = [(s, e - s) for r, n, s, e, _ in spans if (r, n) == (replica, name)]
                axes.broken_barh(bars, (replica - 0.4, 0.8), color=color, linewidth=0)
        end = max(e for _, _, _, e, _ in spans)
        for step in sorted({span[4] for span in spans}):
            axes.axvline(min(s for _, _, s, _, n in spans if n == step), color="0.2", linewidth=0.8)
        beside = sum(e - s for _, n, s, e, _ in spans if n in BESIDE)
        busy = sum(e - s for _, n, s, e, _ in spans if n not in (*WAITS, *BESIDE)) / max(end * count - beside, 1e-9)
        axes.set(title=f"{title}: {end:.1f} s, replicas busy {busy:.0%}", ylim=(count - 0.4, -0.6))
        axes.set(yticks=range(count), yticklabels=[f"replica {r}" for r in range(count)])
        axes.grid(False)
    panels[-1, 0].set(xlabel="seconds; a line where a step begins", xlim=(0, None))
    drawn = {span[1] for spans in timelines.values() for span in spans}
    labels = {label: color for name, (color, label) in COLORS.items() if name in drawn}
    figure.legend(
        handles=[Patch(color=color, label=label) for label, color in labels.items()],
        loc="outside lower center",
        ncols=4,
        fontsize=7,
    )
    figure.suptitle(caption, fontsize=7, color="0.4", x=0.01, ha="left")
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", type=Path, help="trace.json, or folder, of one or several runs")
    parser.add_argument("--draw", action="store_true", help="only draw, from figures/timeline.json")
    parser.add_argument(
        "--last", type=int, default=STEPS, help="how many of the last steps to draw (default 10; 0: all)"
    )
    args = parser.parse_args()
    if args.traces:
        traces = [path / "trace.json" if path.is_dir() else path for path in args.traces]
        try:
            timelines = {str(path.parent): read_trace(path, args.last) for path in traces}
        except OSError as error:
            raise SystemExit(f"{error.filename}: {error.strerror}") from None
        out = traces[0].with_name("timeline.png")
        draw(timelines, out, " ".join(["python figures/timeline.py", *map(str, args.traces)]))
        print(out)
        return
    data = HERE / "timeline.json"
    if not args.draw:
        names = (f"timeline-{i}" for i in range(len(RUNS)))
        folders = {title: run(name, *settings) for name, (title, settings) in zip(names, RUNS.items())}
        timelines = {title: read_trace(folder / "trace.json", args.last) for title, folder in folders.items()}
        keep(data, timelines)
    timelines, made = kept(data)
    caption = f"python figures/timeline.py ({made}): {CONFIG}, hailstone, 2 ranks, the first {STEPS} steps"
    draw(timelines, HERE / "timeline.png", caption)


if __name__ == "__main__":
    main()
