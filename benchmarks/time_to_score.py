"""Seconds until a model has learnt a task: each way to train begins with the same model and stops at a held-out score.

    python benchmarks/time_to_score.py                           all runs that are missing, hours
    python benchmarks/time_to_score.py --task hailstone --entry sync eta_both --seed 0 1
    python benchmarks/time_to_score.py --limit-minutes 30        begins no run that would probably end later
    python benchmarks/time_to_score.py --again --entry sync      once more, though they are there
    python benchmarks/time_to_score.py --forget-old              drop what is kept of other code; runs nothing
    python benchmarks/time_to_score.py --list                    what there is and what is missing; runs nothing
    python benchmarks/time_to_score.py --quick                   a few steps of some of them; keeps nothing

An entry is a file of configs/scores/: settings over those of the task's config, with a `title`. A new file is a new row
of the table. `tasks` names the tasks that an entry can do, if not all; `program = "trl"` is TRL's GRPOTrainer, with
what the task's config says; `seconds` ends its runs earlier than those of others.

A run has 2 ranks of one thread and is evaluated every 10 steps. Its seconds are those of its steps: rollout, rewards,
training and new weights; start, warm start and evaluations do not count. It ends at the first evaluation with the
score, or at a limit. All runs of a seed begin with one model, and the held-out responses are drawn alike. They take
turns, 10 steps each, because the speed of a shared machine changes; as many at once as its memory holds, each time with
a synchronous run. A run that fails is named, and the others go on.

Each run is kept in results/time_to_score.json as soon as it ends; one that was stopped begins again. The table is of
what is kept, and says what is missing. `seconds_ratio_best_over_sync`: how many times as fast as synchronous training
the best of our entries is on the first task, the median of `best_by_seed`, of the seeds that both have; `compared`: how
many entries it is the best of, by the same seeds, which flatters it. `seconds_ratio_trl_over_best` (`trl_by_seed`): how
many times as fast as TRL, `seconds_ratio_trl_over_sync`: and synchronous training; at least that, if `trl_reached` is
false: then TRL was ended before it had the score. Runs on another CPU have rows of their own. Ratios are of runs on the
same CPU, of those that took turns where there are such: of the CPU with most runs, to TRL of that with most runs of
TRL, `trl_seeds` of them.
`window_wait_fraction`: the largest share of the rollout, of any run on the first task, that ranks wait at the ends of
windows. `idle`: the share of the steps that the rank that waits most has nothing to decode.
"""

import argparse
import hashlib
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import trl
from results import RESULTS, committed, fingerprints, load, machine, sealed
from taking_turns import GIVER, go_on

from checkpoint import load_tokenizer
from config import ConfigError, load_config
from data import PromptCursor, load_prompts
from metrics import read_records
from process.run_folder import locked
from settings import Config, model_source

NAME = "time_to_score"
STORE = ROOT / RESULTS / f"{NAME}.json"
ENTRIES = ROOT / "configs" / "scores"
SEEDS, RANKS, EVERY = 3, 2, 10  # runs of an entry; ranks of a run; steps between evaluations
RUN_GIB = 4  # memory that a run may take: two ranks, which keep theirs while others have their turn, and their launcher
BASE = "sync"
TURNS = "benchmarks/taking_turns.py"
LOOK_SECONDS = 0.2
FIXED = {"run", "data", "model", "warm_start"}  # sections that no entry changes
FIRST_GUESS = {"plainroll": 180.0, "trl": 1500.0}  # seconds of a run, before any is known
QUICK = (
    *("run.eval_every=2", "data.eval_prompts=16", "warm_start.steps=20"),
    *("scheduler.num_prompts=8", "rollout.max_response_tokens=64"),
)
QUICK_ENTRIES = "sync", "async_4", "rollpacker"  # as many as two minutes have time for


@dataclass(frozen=True)
class Task:
    config: str
    score: float  # held-out avg@4
    steps: int  # a run that has not reached the score by then has failed,
    seconds: float  # or by then


TASKS = {  # of relay and guess scores that minutes reach: no run has reached what the games were made for, 0.95 and 1
    "hailstone": Task("configs/tiny.toml", 0.80, 300, 2400.0),
    "relay": Task("configs/relay.toml", 0.70, 200, 1200.0),
    "guess": Task("configs/guess.toml", 0.50, 300, 1200.0),
}


FIRST = next(iter(TASKS))
Start = tuple[int, str]  # seed and CPU: what runs must have in common to be compared


@dataclass(frozen=True)
class Entry:
    """A way to train: a file of configs/scores/."""

    name: str
    title: str
    settings: tuple[str, ...]  # section.key=value
    tasks: tuple[str, ...]
    program: str
    seconds: float = math.inf  # a run ends by then


@dataclass(frozen=True)
class Asked:
    """A run."""

    task: str
    entry: Entry
    seed: int

    @property
    def key(self) -> tuple[str, str, int]:
        return self.task, self.entry.name, self.seed

    def __str__(self) -> str:
        return f"{self.task}, {self.entry.title}, seed {self.seed}"


# ---- entries -----------------------------------------------------------------------------------------------------


def read_entry(path: Path) -> Entry:
    """Return an entry. Raises ConfigError for a file that is none."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); remove it") from None
    sections = {name: value for name, value in values.items() if isinstance(value, dict)}
    told: dict[str, Any] = {"tasks": [*TASKS], "program": "plainroll", "seconds": math.inf}
    told |= {n: v for n, v in values.items() if n not in sections}
    if unknown := told.keys() - {"title", "tasks", "program", "seconds"}:
        raise ConfigError(
            f"{path}: unknown key {min(unknown)}; an entry has title, tasks, program, seconds and sections"
        )
    if type(told["seconds"]) not in (int, float) or not told["seconds"] > 0:
        raise ConfigError(f"{path}: seconds = {told['seconds']!r}; give a number over 0, as seconds = 600")
    if not isinstance(told.get("title"), str) or not told["title"] or {*"|\n"} & {*told["title"]}:
        raise ConfigError(f'{path}: an entry needs a title of one line without |, as title = "eta on both"')
    if told["program"] not in [*FIRST_GUESS]:
        raise ConfigError(f"{path}: program = {told['program']!r}; possible: {', '.join(FIRST_GUESS)}")
    if not isinstance(told["tasks"], list) or any(task not in [*TASKS] for task in told["tasks"]):
        raise ConfigError(f"{path}: tasks = {told['tasks']!r}; give a list of some of {', '.join(TASKS)}")
    if fixed := sections.keys() & FIXED:
        raise ConfigError(f"{path}: section {min(fixed)} is the same for all entries; leave it out")
    keys = (
        f"{section}.{key}={value if isinstance(value, str) else json.dumps(value, default=str)}"
        for section, inner in sections.items()
        for key, value in inner.items()
    )
    entry = Entry(path.stem, told["title"], tuple(keys), tuple(told["tasks"]), told["program"], told["seconds"])
    for task in entry.tasks:
        try:
            load_config(Config, str(ROOT / TASKS[task].config), [f"--{key}" for key in entry.settings])
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
    return entry


def read_entries() -> dict[str, Entry]:
    entries, titles = {path.stem: read_entry(path) for path in sorted(ENTRIES.glob("*.toml"))}, dict[str, str]()
    for name, entry in entries.items():
        if name != (first := titles.setdefault(entry.title, name)):
            raise ConfigError(f"{ENTRIES / name}.toml: {first}.toml has this title, too; take another")
    return entries


def all_runs(
    entries: Iterable[Entry], tasks: Iterable[str] = TASKS, seeds: Iterable[int] = range(SEEDS)
) -> list[Asked]:
    """Return the runs of each seed together, in the order in which they take turns: synchronous first, TRL's last."""
    of = [entry for entry in entries]
    runs = [Asked(task, entry, seed) for task in tasks for seed in seeds for entry in of if task in entry.tasks]
    order = [*TASKS]
    place = {run: (run.entry.program != "plainroll", run.entry.name != BASE) for run in runs}
    return sorted(runs, key=lambda run: (order.index(run.task), run.seed, *place[run]))


def contests_of(runs: Iterable[Asked], gib: float, base: Entry) -> list[list[Asked]]:
    """Return the runs of each task and seed that take turns, as many at once as a memory holds, `base` always there."""
    most, contests = max(1, int(gib / RUN_GIB) - 1), list[list[Asked]]()
    for (task, seed), of in groupby(runs, key=lambda run: (run.task, run.seed)):
        others, own = [run for run in of if run.entry.name != base.name], Asked(task, base, seed)
        contests += [[own, *others[i : i + most]] for i in range(0, max(len(others), 1), most)]
    return contests


# ---- one run -----------------------------------------------------------------------------------------------------


def train_command(task: Task, seed: int, folder: Path, *settings: str, script: str = "train.py") -> list[str]:
    own = f"run.seed={seed}", f"warm_start.seed={seed}", f"run.dir={folder}", "run.checkpoint_every=0"
    keys = (f"--{key}" for key in (*own, *settings))
    return [sys.executable, script, f"--ranks={RANKS}", "--config", task.config, *keys]


def follow(command: list[str], log: Path, **environment: str) -> Generator[None]:
    """Run a command to its end and give way meanwhile; when closed, end it. Raises RuntimeError when it fails."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", GIVER: str(os.getpid()), **environment}
    with open(log, "a") as file, subprocess.Popen(command, cwd=ROOT, env=env, stdout=file, stderr=file) as process:
        try:
            while process.poll() is None:
                time.sleep(LOOK_SECONDS)
                yield
        except BaseException:
            process.terminate()  # a run of ours ends after its step
            raise
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{log.read_text()[-3000:]}")


def finish(command: list[str], log: Path) -> None:
    for _ in follow(command, log):
        pass


def records_of(folder: Path) -> list[dict]:
    path = folder / "steps.jsonl"
    return read_records(path) if path.exists() else []


def curve_of(records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the evaluations: step, seconds and samples of the steps until then, score."""
    points, seconds, samples = [], 0.0, 0
    for record in records:
        if record["step"]:
            seconds, samples = seconds + record["seconds"]["step"], samples + record["samples"]
        if record.get("eval"):
            point = {"step": record["step"], "seconds": round(seconds, 2), "samples": samples}
            points.append(point | {"score": round(record["eval"]["avg@4"], 4)})
    return points


def window_wait(records: Iterable[Mapping[str, Any]]) -> float | None:
    """Return the share of a run's rollout that ranks waited at the ends of windows; None where it has no windows."""
    steps = [r for r in records if "window_wait" in r.get("round", {})]
    rollout = sum(r["seconds"].get("rollout", 0.0) for r in steps)
    return round(sum(r["round"]["window_wait"] for r in steps) / rollout, 4) if rollout else None


def idle(records: Iterable[Mapping[str, Any]]) -> float | None:
    """Return the share of a run's steps that the rank that waits most has nothing to decode; None without steps."""
    steps = [r["seconds"] for r in records if r["step"]]
    return round(sum(s.get("idle", 0.0) for s in steps) / sum(s["step"] for s in steps), 4) if steps else None


def limited(task: Task, entry: Entry) -> Task:
    """Return a task that ends when the entry's runs end."""
    return replace(task, seconds=min(task.seconds, entry.seconds))


def is_over(curve: Sequence[Mapping[str, Any]], task: Task) -> bool:
    """Return whether a run has the score, or is at a limit."""
    last = curve[-1] if curve else {"step": 0, "seconds": 0.0, "score": -math.inf}
    return last["step"] > 0 and (
        last["score"] >= task.score or last["step"] >= task.steps or last["seconds"] >= task.seconds
    )


def say(run: Asked, point: Mapping[str, Any]) -> None:
    print(f"    {run!s:66} step {point['step']:4}{point['seconds']:9.1f} s   score {point['score']:.3f}", flush=True)


def play_ours(run: Asked, task: Task, folder: Path, more: Sequence[str]) -> Generator[None, None, list[dict[str, Any]]]:
    """Train as train.py does, a turn to each evaluation; return the curve."""
    settings = [f"run.eval_every={EVERY}", f"run.steps={task.steps}", "run.timeout_seconds=3600"]
    settings += [*more, *run.entry.settings]
    log, told = folder / "log.txt", list[dict[str, Any]]()
    if "planner.rule=predict" in settings:
        finish(train_command(task, run.seed, folder, *settings, script="profiler.py"), log)
    with closing(follow(train_command(task, run.seed, folder, *settings, script=TURNS), log)) as looks:
        try:
            for _ in looks:
                points = curve_of(records_of(folder))[len(told) :]
                for point in points:
                    say(run, point)
                told += points
                if points and (step := points[-1]["step"]):
                    if is_over(told, task):
                        break
                    yield
                    go_on(folder, step)
        finally:
            go_on(folder, task.steps)  # so that a run that waits, or is about to, hears that it is to end
    return told


def evaluated(model: Path, run: Asked, task: Task, folder: Path) -> dict[str, Any]:
    """Return the evaluation of a model folder, as a run of train.py has it."""
    folder.mkdir(parents=True)
    command = train_command(task, run.seed, folder, "run.steps=0", f"model.path={model}")
    finish([part for part in command if not part.startswith("--warm_start.")], folder / "log.txt")
    return records_of(folder)[0]["eval"]


def play_trl(run: Asked, task: Task, folder: Path, more: Sequence[str]) -> Generator[None, None, list[dict[str, Any]]]:
    """Train by TRL, a turn to each evaluation, for which it waits; return the curve."""
    start = folder / "start"
    start.mkdir()
    finish(train_command(task, run.seed, start, "run.steps=0", *more), folder / "log.txt")
    evals = {0: records_of(start)[0]["eval"]}
    own = [f"--{key}" for key in (f"warm_start.seed={run.seed}", *more)]
    config = load_config(Config, str(ROOT / task.config), own)
    model = model_source(config).absolute()
    prompts, _ = load_prompts(config.data, load_tokenizer(model), config.rollout.max_prompt_tokens)
    taken = PromptCursor(prompts, run.seed).take(task.steps * config.scheduler.num_prompts)
    rows = [{"prompt": v.prompt.text, "answer": v.prompt.answer, "task": v.prompt.task} for v in taken]
    arguments = trl.trl_arguments(config, RANKS) | {"max_steps": task.steps, "seed": run.seed}
    spec = {"model": str(model), "rows": rows, "arguments": arguments, "pause_every": EVERY}
    (folder / "spec.json").write_text(json.dumps(spec), encoding="utf-8")
    samples = config.scheduler.num_prompts * config.scheduler.num_responses

    def curve() -> list[dict[str, Any]]:
        zero = {"step": 0, "eval": evals[0]}
        return curve_of([zero, *({**r, "samples": samples, "eval": evals.get(r["step"])} for r in records_of(folder))])

    say(run, curve()[0])
    launch = "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={RANKS}"
    command = [trl.trl_python(), *launch, trl.__file__, "--trl-worker", str(folder / "spec.json")]
    with closing(follow(command, folder / "log.txt", HF_HUB_OFFLINE="1")) as looks:
        for _ in looks:
            step = max(evals) + EVERY
            saved = folder / f"model-{step}"
            if (saved / "ready").exists():
                evals[step] = evaluated(saved, run, task, saved / "eval")
                spent = sum(record["seconds"]["step"] for record in records_of(folder))  # of the last step not yet
                last = {"step": step, "seconds": spent, "score": evals[step]["avg@4"]}
                say(run, last)
                yield
                (saved / "answer.new").write_text("stop" if is_over([last], task) else "go on", encoding="utf-8")
                (saved / "answer.new").rename(saved / "answer")
    return curve()


def play(run: Asked, task: Task, more: Sequence[str] = ()) -> Generator[None, None, dict[str, Any]]:
    """Train until the score or a limit, turn by turn; return what is kept of it."""
    folder = ROOT / "runs" / NAME / f"{run.task}-{run.entry.name}-{run.seed}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    here = machine()
    curve = yield from (play_trl if run.entry.program == "trl" else play_ours)(run, task, folder, more)
    reached = next((point for point in curve if point["step"] and point["score"] >= task.score), None)
    last = reached or curve[-1]
    return {
        **{"task": run.task, "entry": run.entry.name, "seed": run.seed, "score": task.score},
        **{"settings": list(run.entry.settings), "reached": reached is not None},
        **{name: last[name] for name in ("seconds", "samples", "step")},
        **{"load": here["load"], "cpu": here["cpu"]},
        "window_wait": window_wait(records_of(folder)),
        "idle": idle(records_of(folder)) if run.entry.program == "plainroll" else None,
        "curve": curve,
    }


def play_in_turns(runs: Mapping[Asked, Generator[None, None, dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """Give what is kept of each run as it ends, and its seconds. All share what the machine does to their speed.

    Raises RuntimeError at the end if some have failed.
    """
    walls, failed = dict.fromkeys(runs, 0.0), list[str]()
    try:
        while walls:
            for run in [*walls]:
                begin, row = time.time(), None
                try:
                    next(runs[run])
                except StopIteration as end:
                    row = end.value
                except (ConfigError, RuntimeError, OSError, subprocess.SubprocessError) as error:
                    print(f"    {run} failed: {error}", file=sys.stderr, flush=True)
                    failed.append(str(run))
                    del walls[run]
                    continue
                walls[run] += time.time() - begin
                if row is not None:
                    yield row | {"wall": round(walls.pop(run))}
    finally:
        for playing in runs.values():
            playing.close()
    if failed:
        raise RuntimeError(f"these have failed: {'; '.join(failed)}")


# ---- what is kept ------------------------------------------------------------------------------------------------


def load_store() -> dict[str, Any]:
    empty: dict[str, Any] = {"seconds": 0, "codes": {}, "result": {"runs": []}}
    return load(STORE) if STORE.exists() else empty


def is_current(row: Mapping[str, Any], entries: Mapping[str, Entry]) -> bool:
    """Return whether a kept run is of the entry and the task as they are, limits included."""
    entry, task = entries.get(row["entry"]), TASKS.get(row["task"])
    return bool(
        entry
        and task
        and row["task"] in entry.tasks
        and row["settings"] == [*entry.settings]
        and row["score"] == task.score
        and is_over(row["curve"], limited(task, entry))
    )


def today() -> str:
    return time.strftime("%Y-%m-%d", time.gmtime())


def code_of(measured: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(measured, sort_keys=True).encode()).hexdigest()[:16]


def common(codes: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Return the fingerprint of each file; `several` where runs are of more than one version of it."""
    known = [*codes]
    files = dict.fromkeys(file for code in known for file in code)
    return {f: min(seen) if len(seen := {code.get(f, "missing") for code in known}) == 1 else "several" for f in files}


def keep(row: dict[str, Any], commit: str, measured: dict[str, str], entries: Mapping[str, Entry]) -> None:
    """Write a run to the store, and the summary of all that is there."""
    data = load_store()
    row = row | {"commit": commit, "date": today(), "code": code_of(measured)}
    others = [r for r in data["result"]["runs"] if any(r[k] != row[k] for k in ("task", "entry", "seed", "cpu"))]
    rows = [*(r for r in others if is_current(r, entries)), row]
    data["codes"] |= {row["code"]: measured}
    write(data | {"commit": commit, "date": row["date"], "machine": machine()}, rows, entries)


def keep_beside(contest: Sequence[Mapping[str, Any]], entries: Mapping[str, Entry]) -> None:
    """Write to the runs of a contest how long synchronous training took in turns with them: it may be run once more."""
    if not contest:
        return
    base = {(r["task"], *start_of(r)): r["seconds"] for r in contest if r["entry"] == BASE and r["reached"]}
    ran, data = {(r["entry"], r["task"], *start_of(r)) for r in contest}, load_store()
    rows = [
        row | {"beside": base[key]} if (row["entry"], *key) in ran and key in base else row
        for row in data["result"]["runs"]
        for key in [(row["task"], *start_of(row))]
    ]
    write(data, rows, entries)


def forget(code: str, entries: Mapping[str, Entry]) -> None:
    """Keep only the runs of a code."""
    if STORE.exists():
        data = load_store()
        write(data, [row for row in data["result"]["runs"] if row["code"] == code], entries)


def write(data: dict[str, Any], rows: list[dict[str, Any]], entries: Mapping[str, Entry]) -> None:
    """Write the store with these runs, and the summary of all of them."""
    codes = {code: files for code, files in data["codes"].items() if code in {r["code"] for r in rows}}
    kept = {
        **{"command": f"python benchmarks/{NAME}.py", "commit": data["commit"], "date": data["date"]},
        **{"seconds": sum(r["wall"] for r in rows), "machine": data["machine"], "measured": common(codes.values())},
        **{"codes": codes, "result": summary(rows, entries), "output": []},
    }
    new = STORE.with_suffix(".new")
    new.write_text(json.dumps(sealed(kept), indent=1) + "\n", encoding="utf-8")
    new.replace(STORE)


# ---- the table ---------------------------------------------------------------------------------------------------


def start_of(row: Mapping[str, Any]) -> Start:
    return row["seed"], row["cpu"]


def seconds_of(rows: Iterable[Mapping[str, Any]]) -> dict[Start, float]:
    """Return the seconds to the score by seed and CPU; infinite for a run that did not reach it."""
    return {start_of(row): row["seconds"] if row["reached"] else math.inf for row in rows}


def finite(value: float, digits: int = 1) -> float | None:
    return round(value, digits) if math.isfinite(value) else None


def spent(rows: Iterable[Mapping[str, Any]]) -> dict[Start, float]:
    """Return the seconds by seed and CPU until the score, or the end of the run."""
    return {start_of(row): row["seconds"] for row in rows}


def ratio(slow: Mapping[Start, float], fast: Mapping[Start, float]) -> float | None:
    """Return the median of the ratios of each seed that both have on the same CPU; None where there is none."""
    starts = [start for start in slow.keys() & fast.keys() if math.isfinite(min(slow[start], fast[start]))]
    found = statistics.median(slow[start] / fast[start] for start in starts) if starts else 0.0
    return finite(found, 2) if found else None  # 0: most of the fast side did not reach the score


def base_of(rows: Iterable[Mapping[str, Any]], base: Mapping[Start, float]) -> dict[Start, float]:
    """Return the seconds of synchronous training by seed and CPU: of the run in turns with a row's, else `base`."""
    found = {start_of(row): row.get("beside") or base.get(start_of(row)) for row in rows}
    return {start: seconds for start, seconds in found.items() if seconds}


def by_seed(slow: Mapping[Start, float], fast: Mapping[Start, float]) -> list[float | None]:
    """Return the ratio for each seed that both have on the same CPU; None where one did not reach the score."""
    starts = sorted(slow.keys() & fast.keys())
    return [finite(slow[start] / fast[start], 2) if math.isfinite(fast[start]) else None for start in starts]


def board(rows: Sequence[Mapping[str, Any]], entries: Mapping[str, Entry]) -> list[dict[str, Any]]:
    """Return the table: the tasks, of each the CPU with most runs first, of each the fastest first."""
    table = []
    for task, name, cpu in dict.fromkeys((row["task"], row["entry"], row["cpu"]) for row in rows):
        here = [row for row in rows if (row["task"], row["cpu"]) == (task, cpu)]
        mine, base = ([row for row in here if row["entry"] == each] for each in (name, BASE))
        seconds, reached = seconds_of(mine), [row for row in mine if row["reached"]]
        slow = base_of(mine, seconds_of(base))
        middle, least = statistics.median(seconds.values()), statistics.median(spent(mine).values())
        waits = {wait: [row[wait] for row in mine if row.get(wait) is not None] for wait in ("window_wait", "idle")}
        table.append(
            {
                **{"task": task, "entry": name, "title": entries[name].title, "score": TASKS[task].score},
                **{"median": finite(middle), "least": finite(min(seconds.values()))},
                "seconds": f"{middle:.1f}" if math.isfinite(middle) else f"> {least:.1f}",
                **{"most": finite(max(seconds.values())), "reached": len(reached), "seeds": len(mine)},
                "samples": round(statistics.median(r["samples"] for r in reached)) if math.isfinite(middle) else None,
                "faster": ratio(slow, seconds),
                "by_seed": ", ".join("-" if r is None else f"{r:.2f}" for r in by_seed(slow, seconds)),
                **{wait: f"{statistics.median(seen):.1%}" if seen else "" for wait, seen in waits.items()},
                "commits": ", ".join(sorted({row["commit"][:7] for row in mine})),
                "cpu": cpu,
            }
        )
    order, cpus = [*TASKS], {task: most_first([row for row in rows if row["task"] == task]) for task in TASKS}
    return sorted(
        table,
        key=lambda r: (order.index(r["task"]), cpus[r["task"]].index(r["cpu"]), r["median"] or math.inf),
    )


def most_first(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the CPUs of runs, that with most runs first; of equals, that of the newest run."""
    newest = dict.fromkeys(row["cpu"] for row in sorted(rows, key=lambda row: row["date"], reverse=True))
    counts = Counter(row["cpu"] for row in rows)
    return sorted(newest, key=lambda cpu: -counts[cpu])


def best_of(rows: Sequence[Mapping[str, Any]], entries: Mapping[str, Entry], task: str) -> dict[str, Any]:
    """Return the best of our entries with the most seeds, and its ratios: to synchronous training of the CPU with most
    runs, to TRL of that with most runs of TRL.
    """
    rows = [row for row in rows if row["task"] == task]
    trls = [row for row in rows if entries[row["entry"]].program == "trl"]
    ratios = {
        "seconds_ratio_best_over_sync": (most_first(rows), {"best", "best_by_seed", "compared", "cpu"}),
        "seconds_ratio_trl_over_best": (
            most_first(trls),
            {"trl_best", "trl_by_seed", "trl_cpu", "trl_seeds", "trl_reached", "seconds_ratio_trl_over_sync"},
        ),
    }
    result = dict[str, Any]()
    for ratio, (cpus, others) in ratios.items():
        found = [_best_of([row for row in rows if row["cpu"] == cpu], entries) for cpu in cpus]
        of = next((each for each in found if each.get(ratio)), {})
        result |= {key: of.get(key) for key in (ratio, *sorted(others))}
    return result


def _best_of(rows: Sequence[Mapping[str, Any]], entries: Mapping[str, Entry]) -> dict[str, Any]:
    """`best_of` the runs of one task and CPU."""
    runs: dict[str, dict[Start, float]] = {}
    for name in entries:
        if found := [row for row in rows if row["entry"] == name]:
            runs[name] = seconds_of(found)
    ours = {name: seconds for name, seconds in runs.items() if entries[name].program == "plainroll"}
    most = max(map(len, ours.values()), default=0)
    slow_of = {n: base_of((row for row in rows if row["entry"] == n), runs.get(BASE, {})) for n in ours}
    places = {  # the largest ratio, else the least seconds
        name: (ratio(slow_of[name], seconds) or 0.0, -statistics.median(seconds.values()))
        for name, seconds in ours.items()
        if len(seconds) == most
    }
    best = max(places, key=places.__getitem__, default="")
    slow = slow_of.get(best, {})
    trls = [row for row in rows if entries[row["entry"]].program == "trl"]
    title = entries[best].title if best else None
    return {
        **{"cpu": rows[0]["cpu"], "best": title, "trl_cpu": rows[0]["cpu"], "trl_best": title, "trl_seeds": len(trls)},
        "compared": len(places),
        "seconds_ratio_best_over_sync": ratio(slow, runs.get(best, {})),
        "best_by_seed": by_seed(slow, runs.get(best, {})),
        "seconds_ratio_trl_over_best": ratio(spent(trls), runs.get(best, {})),
        "trl_by_seed": by_seed(spent(trls), runs.get(best, {})),
        "seconds_ratio_trl_over_sync": ratio(spent(trls), runs.get(BASE, {})),
        "trl_reached": all(row["reached"] for row in trls) if trls else None,
    }


def summary(rows: Sequence[Mapping[str, Any]], entries: Mapping[str, Entry]) -> dict[str, Any]:
    """Return the result: table, ratios, what is missing, and the runs themselves."""
    there = {(row["task"], row["entry"], row["seed"]) for row in rows}
    waits = [row["window_wait"] for row in rows if row["task"] == FIRST and row.get("window_wait") is not None]
    idles = [r["idle"] for r in rows if (r["task"], r["entry"]) == (FIRST, BASE) and r.get("idle") is not None]
    tasks = [{"task": task, "score": TASKS[task].score, **best_of(rows, entries, task)} for task in TASKS]
    return {
        "name": NAME,
        **{key: value for key, value in tasks[0].items() if key != "task"},
        "window_wait_fraction": max(waits, default=None),
        "sync_idle": statistics.median(idles) if idles else None,
        "tasks": tasks,
        "board": board(rows, entries),
        "missing": [str(run) for run in all_runs(entries.values()) if run.key not in there],
        "runs": list(rows),
    }


def show(result: Mapping[str, Any], now: str) -> None:
    print(f"\n{'seconds to the score':>67}{'range':>15}{'samples':>9}  reached  faster")
    part = None
    for row in result["board"]:
        if (row["task"], row["cpu"]) != part:
            print("{} on cores of {}".format(*(part := (row["task"], row["cpu"]))))
        shown = {k: "-" if row[k] is None else row[k] for k in ("seconds", "least", "most", "samples", "faster")}
        print(
            f"{row['task']:10}{row['title']:48}{shown['seconds']:>9}{shown['least']:>9} .. {shown['most']:<8}"
            f"{shown['samples']:>5}{row['reached']:>4} of {row['seeds']}{shown['faster']:>8}"
        )
    other = sum(row.get("code", now) != now for row in result["runs"])
    if (missing := result.get("missing")) is not None:
        print(f"missing: {len(missing)} runs (--list names them)" if missing else "all runs are there")
    if other:
        print(f"{other} of {len(result['runs'])} runs are of other code: --again runs them once more")


# ---- command line ------------------------------------------------------------------------------------------------


def expected(run: Asked, rows: Iterable[Mapping[str, Any]], entries: Mapping[str, Entry]) -> float:
    """Return the seconds that a run will probably take: as long as others of its entry, task or program."""
    same = [r for r in rows if r["entry"] in entries and entries[r["entry"]].program == run.entry.program]
    for names in (("task", "entry"), ("task",), ()):
        own = {"task": run.task, "entry": run.entry.name}
        if walls := [row["wall"] for row in same if all(row[name] == own[name] for name in names)]:
            return statistics.median(walls)
    return FIRST_GUESS[run.entry.program]


def play_all(arguments: argparse.Namespace, entries: dict[str, Entry]) -> None:
    """Play what is asked for and not there, and keep each run."""
    begin, asked = time.time(), all_runs((entries[name] for name in arguments.entry), arguments.task, arguments.seed)
    there = {(r["task"], r["entry"], r["seed"]) for r in load_store()["result"]["runs"] if is_current(r, entries)}
    todo = [run for run in asked if arguments.again or run.key not in there]
    print(f"{len(todo)} runs to do, {len(asked) - len(todo)} of {len(asked)} are there")
    contests = contests_of(todo, machine()["memory_gib"], entries[BASE])
    for i, contest in enumerate(contests):
        rows = load_store()["result"]["runs"]
        minutes = [sum(expected(run, rows, entries) for run in each) / 60 for each in contests[i:]]
        print(f"{contest[0].task}, seed {contest[0].seed}, {len(contest)} runs in turns: about {minutes[0]:.0f} min, "
              f"all that is left {sum(minutes):.0f} min", flush=True)  # fmt: skip
        if arguments.limit_minutes is not None and (time.time() - begin) / 60 + minutes[0] > arguments.limit_minutes:
            print(f"that is over --limit-minutes; {sum(map(len, contests[i:]))} runs are left")
            break
        measured, task = fingerprints(NAME), TASKS[contest[0].task]
        commit = committed([*measured, *(str(path.relative_to(ROOT)) for path in ENTRIES.glob("*.toml"))])
        playing = {run: play(run, limited(task, run.entry)) for run in contest}
        ended = list[dict[str, Any]]()
        try:
            for row in play_in_turns(playing):
                if fingerprints(NAME) != measured:
                    raise RuntimeError("what it measures changed while it ran, nothing is kept of this run")
                keep(row, commit, measured, entries)
                ended.append(row)
                end = "reached" if row["reached"] else "not reached"
                what = f"{entries[row['entry']].title}: {end}, {row['seconds']:.1f} s of steps, {row['wall']} s in all"
                print(f"    {what}", flush=True)
        finally:
            keep_beside(ended, entries)


@contextmanager
def alone() -> Iterator[None]:
    """Keep other contests out of the folder of the runs. Raises RuntimeError while there is one."""
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(ROOT / "runs" / NAME))
        except ConfigError as error:
            raise RuntimeError(f"another contest may be under way, wait for its end ({error})") from None
        yield


def play_quick(entries: dict[str, Entry]) -> dict[str, Any]:
    """Play two steps of each of our entries on the first task, with a score that any model has."""
    task = Task(TASKS[FIRST].config, 0.0, 2, 60.0)
    runs = all_runs((e for e in entries.values() if e.program == "plainroll"), [FIRST], [0])
    contests = contests_of(runs, machine()["memory_gib"], entries.get(BASE, next(iter(entries.values()))))
    rows, failed = list[dict[str, Any]](), list[str]()
    for contest in contests:
        try:
            for row in play_in_turns({run: play(run, task, QUICK) for run in contest}):
                rows.append(row | {"commit": "quick", "date": today()})
        except RuntimeError as error:
            failed.append(str(error))
    print("\n--quick: two steps of each, to see that they work; no score was asked for", end="")
    own = {"score": task.score, "failed": failed, "quick": True}
    return {key: value for key, value in (summary(rows, entries) | own).items() if key != "missing"}


def limit(text: str) -> float:
    if not 0 <= (minutes := float(text)) < math.inf:
        raise ValueError
    return minutes


def parsed(entries: Mapping[str, Entry]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", nargs="+", choices=TASKS, help="default: all")
    parser.add_argument("--entry", nargs="+", choices=entries, help="default: all; with --quick a few", metavar="NAME")
    parser.add_argument("--seed", nargs="+", type=int, choices=range(SEEDS), help="default: all")
    parser.add_argument("--limit-minutes", type=limit, help="begin no run that would probably end later")
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--again", action="store_true", help="run what is there too")
    modes.add_argument("--forget-old", action="store_true", help="run nothing; forget the runs of other code")
    modes.add_argument("--list", action="store_true", help="run nothing; name the runs that are missing")
    modes.add_argument("--quick", action="store_true", help="under 2 minutes: two steps of an entry, without TRL")
    arguments = parser.parse_args()
    if arguments.quick and ((arguments.task, arguments.seed, arguments.limit_minutes) != (None,) * 3):
        parser.error("--quick plays seed 0 of the first task: leave out --task, --seed and --limit-minutes")
    if arguments.quick and "trl" in {entries[name].program for name in arguments.entry or ()}:
        parser.error("--quick plays our own entries only: leave out TRL's")
    if arguments.list and arguments.limit_minutes is not None:
        parser.error("--list runs nothing: leave out --limit-minutes")
    if arguments.forget_old and (arguments.task or arguments.entry or arguments.seed or arguments.limit_minutes):
        parser.error("--forget-old is about all runs: leave out the other options")
    arguments.entry = arguments.entry or [*(QUICK_ENTRIES if arguments.quick else entries)]
    arguments.task, arguments.seed = arguments.task or [*TASKS], arguments.seed or [*range(SEEDS)]
    return arguments


def main() -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        entries = read_entries()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    arguments = parsed(entries)
    now = code_of(fingerprints(NAME))
    try:
        with nullcontext() if arguments.list else alone():
            if arguments.quick:
                result = play_quick({name: entries[name] for name in arguments.entry})
            elif arguments.forget_old:
                forget(now, entries)
            elif not arguments.list:
                play_all(arguments, entries)
        if not arguments.quick:
            result = summary([r for r in load_store()["result"]["runs"] if is_current(r, entries)], entries)
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        kept = "nothing is kept" if arguments.quick else "what has ended is kept; the same command goes on"
        print(f"\nstopped: {kept}", file=sys.stderr)
        return 130
    show(result, now)
    if STORE.exists() and not (arguments.quick or arguments.list):
        subprocess.run([sys.executable, ROOT / "figures" / f"{NAME}.py"], check=True)
    if arguments.list:
        asked = [
            str(run) for run in all_runs(map(entries.__getitem__, arguments.entry), arguments.task, arguments.seed)
        ]
        print(*(run for run in result["missing"] if run in asked), sep="\n")
    print(json.dumps({k: len(v) if k in ("missing", "runs") else v for k, v in result.items() if k != "board"}))
    return bool(result.get("failed"))


if __name__ == "__main__":
    sys.exit(main())
