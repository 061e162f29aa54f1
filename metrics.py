"""One record per step: `steps.jsonl`, the console, and TensorBoard or W&B when asked for."""

import json
import math
import resource
import secrets
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from config import ConfigError, option

Record = dict[str, Any]  # one line of JSON


@dataclass(frozen=True)
class LogConfig:
    tensorboard: bool = option(
        False, "also write TensorBoard files into the run folder (needs the tensorboard package)"
    )
    wandb: str = option("", "also log to this Weights & Biases project (needs the wandb package)")
    trace: bool = option(False, "write trace.json: when each replica did what; open it in ui.perfetto.dev")


@dataclass(slots=True)
class Period:
    """A period of one rank, in seconds since 1970."""

    name: str
    start: float
    end: float


@dataclass(slots=True)
class Count:
    """Numbers of a rank from a moment on: {"running": 12, "waiting": 3}."""

    at: float  # seconds since 1970
    values: dict[str, int]


class Clock:
    """Adds up the seconds of named stages; with `trace`, also keeps when each stage was.

    For the watchdog: the open `stages`, the innermost last, `step`, and `moves`, which changes as work goes on; for
    ranks that wait for this one: `on_move`, which is called then.
    """

    def __init__(self, trace: bool = False, parent: "Clock | None" = None) -> None:
        """`parent`: the clock that times a stage around all stages of this clock; it counts the moves too."""
        self.seconds: dict[str, float] = defaultdict(float)
        self.spans: list[Period] = []
        self.counts: list[Count] = []
        self.trace, self.zero = trace, time.time() - time.perf_counter()
        self.stages: list[str] = []
        self.moves = self.step = 0
        self.failed_in = ""  # the innermost stage that an exception has left
        self.parent = parent
        self.on_move: Callable[[], None] | None = None

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        self.stages.append(name)
        self.move()
        try:
            yield
        except BaseException:
            self.failed_in = self.failed_in or name
            raise
        finally:
            self.stages.pop()
            self.add(name, start, time.perf_counter())

    def move(self) -> None:
        self.moves += 1
        if self.on_move:
            self.on_move()
        if self.parent:
            self.parent.move()

    def add(self, name: str, start: float, end: float, moves: bool = True) -> None:
        """Add a stage between two `perf_counter` times. In a trace, two stages of one name without a gap are joined."""
        self.seconds[name] += end - start
        if moves:
            self.move()
        if not self.trace:
            return
        start, end = start + self.zero, end + self.zero
        if self.spans and self.spans[-1].name == name and start - self.spans[-1].end < 1e-3:
            self.spans[-1].end = end
        else:
            self.spans.append(Period(name, start, end))

    def count(self, **values: int) -> None:
        """Keep numbers of this moment for the trace."""
        if self.trace and (not self.counts or self.counts[-1].values != values):
            self.counts.append(Count(time.time(), values))

    def take(self) -> dict[str, float]:
        """Return the seconds by stage since the last call."""
        taken, self.seconds = dict(self.seconds), defaultdict(float)
        return taken

    def take_track(self) -> "RankTrack":
        """Return the spans and counts since the last call."""
        taken = self.spans, self.counts
        self.spans, self.counts = [], []
        return taken


RankTrack = tuple[list[Period], list[Count]]


RECENT = 10  # rounds of a kind in a moving mean
HEADER_EVERY = 25
LEAST_VERDICTS = 0.1  # share of a judge's probability that its two words should have
COLUMNS = {"step": 6, "round": 7, "reward": 8, f"mean {RECENT}": 8, "length": 8, "longest": 8, "wasted": 7}  # width
COLUMNS |= {"entropy": 8, "grad": 8, "diff": 7, "rollout": 8, "train": 7, "tokens/s": 9, "left": 10}  # 110 at most


def brief(value: float) -> str:
    """Return a number in at most 6 characters, 7 for negative numbers."""
    size = abs(value)
    if size < 1e-99:
        return "0"
    if 1000 <= size < 99_999:
        return f"{value:.0f}"
    if 0.001 <= size < 1000:
        return f"{value:.{3 if size < 10 else 2 if size < 100 else 1}f}"
    return f"{value:.0e}"


def kind_of(record: Record) -> str:
    return record.get("round", {}).get("kind", "replay")


def of_failed(record: Record) -> str:
    """Say how many rewards of a step or an evaluation failed, and why the first did."""
    return f"{record['reward_errors']} rewards failed and count 0: {record['first_reward_error']}"


class Recorder:
    """Writes the records of one run: on rank 0, where it is `active`. On other ranks it does nothing."""

    def __init__(self, run: Path, config: LogConfig, settings: Record, first_step: int, steps: int, active: bool):
        self.active, self.shown, self.lines = active, 0.0, 0
        self.steps, self.first, self.began = steps, first_step, time.perf_counter()
        self.means: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=RECENT))  # rewards by kind of round
        shown = {"disable": None if active else True, "leave": False}
        self.bar = tqdm(total=steps, initial=first_step, desc="step", unit="step", **shown)
        if not active:
            return
        self.path = run / "steps.jsonl"
        for record in _drop_after(self.path, first_step):
            self._mean(record)
        self.file = open(self.path, "a", encoding="utf-8")
        self.trace = Trace(run / "trace.json", first_step) if config.trace else None
        self.tensorboard = self.wandb = None  # neither package is needed without its setting
        if config.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            repeated = first_step + 1 if first_step else 0  # what a killed run has told of these steps is told again
            self.tensorboard = SummaryWriter(str(run / "tensorboard"), purge_step=repeated)
        if config.wandb:
            import wandb

            name = run / "wandb_id"  # a resumed run goes on in the run that it has there
            if not name.exists():
                name.write_text(secrets.token_hex(4))
            own = {"id": name.read_text(), "resume": "allow"}
            self.wandb = wandb.init(project=config.wandb, name=run.name, dir=str(run), config=settings, **own)

    def say(self, text: str) -> None:
        """Print one line above the progress bar."""
        if self.active:
            known = (
                getattr(sys.stdout, "encoding", None) or "utf-8"
            )  # a grader's error may quote any character, or half
            line = " ".join(text.split("\n")).encode(known, "backslashreplace").decode(known)
            tqdm.write(line, file=sys.stdout)
            sys.stdout.flush()

    def progress(self, what: str, done: int, total: int) -> None:
        """Show at the end of the progress bar how far the current stage is, twice a second at most."""
        if self.active and time.perf_counter() - self.shown > 0.5:
            self.shown = time.perf_counter()
            self.bar.set_postfix_str(f"{what} {done}/{total}")

    def write(self, record: Record) -> None:
        """Append one record to `steps.jsonl`. A kill can lose the record that is being written, but none before it."""
        if not self.active:
            return
        self.file.write(json.dumps(_finite(record)) + "\n")
        self.file.flush()
        numbers = {k: v for k, v in _flat(record) if isinstance(v, int | float) and k != "step"}
        if "reward" in record:
            shown = {"reward": record["reward"], f"reward_mean_{RECENT}": self._mean(record)}
            shown |= {"length": record["length"]["mean"], "seconds": record["seconds"].get("step", 0.0)}
            numbers |= {f"{kind_of(record)}/{name}": value for name, value in shown.items()}
        if self.tensorboard:
            for name, value in numbers.items():
                self.tensorboard.add_scalar(name, value, record["step"])
        if self.wandb:
            self.wandb.log(numbers, step=record["step"])

    def step(self, record: Record) -> None:
        """Show one finished step, and its evaluation when it has one."""
        if self.lines % HEADER_EVERY == 0:
            self.say("".join(name.rjust(width) for name, width in COLUMNS.items()))
        self.lines += 1
        self.say("".join(text.rjust(width) for text, width in zip(self._row(record), COLUMNS.values(), strict=True)))
        self.bar.update()
        played, warning = record.get("round"), f"WARNING: step {record['step']}: "
        if skipped := record["train"]["skipped"]:
            self.say(f"{warning}update skipped: {skipped}")
        if record["reward_errors"]:
            self.say(f"{warning}{of_failed(record)}")
        if played and played["padded"]:
            self.say(
                f"{warning}dynamic sampling found {played['zero_variance']} of {played['prompts']} prompts with equal "
                f"rewards and trains {played['padded']} of them, because scheduler.max_draws is reached; raise it, or "
                "take prompts of medium difficulty"
            )
        if (mass := record.get("judge", {}).get("verdict_mass", 1.0)) < LEAST_VERDICTS:
            self.say(
                f"{warning}the judge gives judge.accept and judge.reject {mass:.1%} of its probability: it does not "
                "answer by them, so that rewards are noise; take words that its answers begin with, or another "
                "judge.template"
            )
        if failed := record.get("episodes", {}).get("failed"):
            self.say(f"{warning}{failed} episodes began again, because their environment failed")
        if advice := record.get("split", {}).get("advice"):
            self.say(advice)
        if "eval" in record:
            self.evaluation(record["step"], record["eval"])

    def _row(self, record: Record) -> list[str]:
        """Return the text of each column."""
        length, train, seconds = record["length"], record["train"], record["seconds"]
        wasted, rewards = "", self.means[kind_of(record)] or [record["reward"]]
        if played := record.get("round"):
            wasted = f"{played['wasted_tokens'] / max(played['wasted_tokens'] + record['tokens'], 1):.0%}"
        each = (time.perf_counter() - self.began) / max(record["step"] - self.first, 1)  # evaluations included
        rest = each * (self.steps - record["step"])
        left = tqdm.format_interval(rest) if rest < 1e5 else f"{rest / 86_400:.0f}d"
        numbers = (record["reward"], sum(rewards) / len(rewards), length["mean"], length["max"])
        diff = "-" if math.isnan(train["logprob_diff_max"]) else brief(train["logprob_diff_max"])  # of no token
        times = seconds["rollout"], seconds["train"], record["tokens_per_second"]
        return [
            *(str(record["step"]), kind_of(record)[:6], *map(brief, numbers)),
            *(wasted, brief(train["entropy"]), brief(train["grad_norm"]), diff, *map(brief, times), left),
        ]

    def _mean(self, record: Record) -> float:
        """Add a step's reward to the moving mean over rounds of its kind, and return the mean."""
        rewards, reward = self.means[kind_of(record)], record.get("reward")
        if isinstance(reward, int | float) and math.isfinite(reward):
            rewards.append(reward)
        return sum(rewards) / len(rewards) if rewards else math.nan

    def timeline(self, step: int, tracks: Sequence[RankTrack], played: Record) -> None:
        """Add one step of every replica to the trace, with the kind of the round `played` and the queue after it."""
        if self.active and self.trace:
            self.trace.write(step, tracks, played.get("kind", ""), played.get("queue", 0))

    def evaluation(self, step: int, result: Record) -> None:
        if result:
            scores = " ".join(f"{name} {value:.3f}" for name, value in result.items() if "@" in name)
            error, count = result["standard_error"], result["num_prompts"]
            turns = f" | turns P50 {n['p50']:g} P99 {n['p99']:g}" if (n := result.get("turns")) else ""
            self.say(f"eval {step:4d} | {scores} | standard error {error:.3f}, {count} held-out prompts{turns}")
            if result["reward_errors"]:
                self.say(f"WARNING: eval {step}: {of_failed(result)}")

    def close(self) -> None:
        self.bar.close()
        if not self.active:
            return
        for file in (self.file, self.trace, self.tensorboard):
            if file:
                file.close()
        if self.wandb:
            self.wandb.finish()

    def finish(self, run: Path, step: int, steps: int) -> None:
        """Close the files and print a table of the evaluations."""
        self.close()
        if not self.active:
            return
        records = read_records(self.path)
        rows = [(r["step"], r["eval"]) for r in records if r.get("eval")]
        if rows:
            names = [name for name in rows[0][1] if "@" in name]
            print("\n  step" + "".join(name.rjust(9) for name in names) + "   mean length   max length   cut off")
            for at, result in rows:
                scores, length = "".join(f"{result[name]:9.3f}" for name in names), result["length"]
                print(f"{at:6d}{scores}{length['mean']:14.1f}{length['max']:13.0f}{result['truncated']:10.1%}")
        if played := [r for r in records if "episodes" in r]:
            print(f"\n{of_episodes(played)}")
        if best := rows[-1][1].get("best") if rows else None:
            kept = run / "checkpoints" / f"step_{best['step']:06d}"
            where = f", model {kept}" if kept.exists() else "" if best["step"] else ", the model before training"
            print(f"\nbest evaluation: step {best['step']}, {names[0]} {best['score']:.3f}{where}")
        if step < steps:
            print(f"\nstopped after step {step} of {steps}; continue with --resume")
        files = {"transcripts": run / "samples", "model": run / "checkpoints" / f"step_{step:06d}"}
        saved = "".join(f", {name} {path}" for name, path in files.items() if path.exists())
        print(f"\nrecords {self.path}{saved}")


def of_episodes(records: Sequence[Record]) -> str:
    """Return lines about the episodes of a run's steps."""
    turns, seconds = (records[-1]["episodes"][name] for name in ("turns", "reply_seconds"))
    kept, again = (sum(r["engine"][f"{name}_tokens"] for r in records) for name in ("resumed", "recomputed"))
    pages = max(r["engine"]["peak_parked_pages"] for r in records)
    return (
        f"episodes: turns P50 {turns['p50']:g} P99 {turns['p99']:g}, replies P50 {brief(seconds['p50'])} s P99 "
        f"{brief(seconds['p99'])} s in the last step; {sum(r['episodes']['failed'] for r in records)} failed\n"
        f"tokens of earlier turns: {kept} kept (in {pages} pages at most), {again} computed again"
    )


class Trace:
    """A timeline in Chrome's trace format: rounds, and a track for each replica. Readable during the run."""

    REPLICAS, ROUNDS = 0, 1  # "processes" of the viewer

    def __init__(self, path: Path, first_step: int):
        kept = []
        if path.exists() and first_step:
            lines = _whole(path.read_text(encoding="utf-8").splitlines()[1:])  # without the bracket
            events = [(line, event) for line, event in lines if line.endswith(",")]
            kept = [line for line, event in events if event.get("step", math.inf) <= first_step]  # not the last names
        path.write_text("".join(f"{line}\n" for line in ("[", *kept)), encoding="utf-8")
        self.file, self.named = open(path, "a", encoding="utf-8"), 0

    def write(self, step: int, tracks: Sequence[RankTrack], kind: str = "", queue: int = 0) -> None:
        for i, (spans, counts) in enumerate(tracks):
            if i >= self.named:
                self.named = i + 1
                self._add(step, "thread_name", "M", tid=i, args={"name": f"replica {i}"})
            for span in spans:
                self._span(step, span, tid=i)
            for count in counts:
                self._add(step, f"sequences of replica {i}", "C", ts=round(count.at * 1e6), args=count.values)
        rollouts = [span for spans, _ in tracks for span in spans if span.name == "rollout"]
        if kind and rollouts:
            start, end = min(span.start for span in rollouts), max(span.end for span in rollouts)
            self._span(step, Period(f"{kind} round", start, end), pid=self.ROUNDS)
            self._add(step, "long-prompt queue", "C", pid=self.ROUNDS, ts=round(end * 1e6), args={"prompts": queue})
        self.file.flush()

    def _span(self, step: int, span: Period, **place: int) -> None:
        times = {"ts": round(span.start * 1e6), "dur": round((span.end - span.start) * 1e6)}
        self._add(step, span.name, "X", **times, args={"step": step}, **place)

    def _add(self, step: int, name: str, type: str, pid: int = REPLICAS, **more: object) -> None:
        self.file.write(json.dumps({"name": name, "ph": type, "pid": pid, **more, "step": step}) + ",\n")

    def close(self) -> None:
        """Write the names of the processes, and complete the JSON."""
        names = enumerate(("replicas", "rounds"))  # by REPLICAS and ROUNDS
        events = ({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}} for pid, name in names)
        self.file.write(",\n".join(map(json.dumps, events)) + "\n]\n")
        self.file.close()


def check_loggers(config: LogConfig) -> None:
    """Raise ConfigError if a logger's package is not installed."""
    for package in ("tensorboard", "wandb"):
        try:
            if getattr(config, package):
                __import__(package)
        except ImportError:
            raise ConfigError(f"log.{package} needs a package that is not installed: pip install {package}") from None


def _drop_after(path: Path, first_step: int) -> list[Record]:
    """Remove the records that a resumed run will write again, and a last line cut short by a kill; return the rest."""
    kept = []
    if path.exists():
        kept = [r for r in read_records(path) if 0 < first_step and r["step"] <= first_step]
        part = path.with_suffix(".part")
        part.write_text("".join(json.dumps(r) + "\n" for r in kept), encoding="utf-8")
        part.replace(path)
    return kept


def read_records(path: str | Path) -> list[Record]:
    """Return the whole lines of a `steps.jsonl`."""
    return [record for _, record in _whole(Path(path).read_text(encoding="utf-8").splitlines())]


def _whole(lines: Sequence[str]) -> Iterator[tuple[str, Record]]:
    """Yield lines and what they hold, up to one that a kill has cut; a comma may end each."""
    for line in lines:
        try:
            yield line, json.loads(line.removesuffix(","))
        except json.JSONDecodeError:
            return


def _finite(value: object) -> object:
    """Return `value` with None for each infinite number or NaN, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _flat(record: Record, prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in record.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}/")
        else:
            yield prefix + key, value


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """Return P50, P75, P99, maximum and mean; zeros when there are no values."""
    array = np.asarray(values if len(values) else [0])
    p50, p75, p99 = np.percentile(array, [50, 75, 99])
    named = {"p50": p50, "p75": p75, "p99": p99, "max": array.max(), "mean": array.mean()}
    return {name: float(value) for name, value in named.items()}


def peak_memory() -> dict[str, float]:
    """Return the peak resident memory of this process, and of its GPU, in MiB."""
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024 if sys.platform == "linux" else 2**20)
    gpu = {"gpu_mib": torch.cuda.max_memory_allocated() / 2**20} if torch.cuda.is_initialized() else {}
    return {"host_mib": host, **gpu}
