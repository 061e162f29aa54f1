"""Runs of train.py that the figures are drawn from; what is there already is continued, but never by other code."""

import argparse
import hashlib
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CONFIG = "configs/tiny.toml"
FOLDERS = (".", "engine", "envs", "overlap", "policies", "process", "rewards", "simulation", "weights")  # of rooms
LOOK_SECONDS = 1.0  # between two looks whether a run has ended, or should
QUICK = (
    *("run.steps=5", "run.eval_every=5", "data.eval_prompts=16", "warm_start.steps=20"),
    *("scheduler.num_prompts=4", "rollout.max_response_tokens=64"),
)

sys.path.insert(0, str(ROOT))
sys.path.append(str(ROOT / "benchmarks"))  # last: a benchmark may have the name of a room

from results import committed, fingerprint

from metrics import read_records


def stamp(quick: bool) -> dict[str, str]:
    """Return commit and date, and a hash of all rooms and configs: `code`. Raises RuntimeError when uncommitted."""
    rooms = (path for folder in FOLDERS for path in (ROOT / folder).glob("*.py"))
    files = sorted(str(path.relative_to(ROOT)) for path in (*rooms, *ROOT.glob("configs/*.toml")))
    code = hashlib.sha256("".join(fingerprint(ROOT / file) for file in files).encode()).hexdigest()[:16]
    commit = "quick" if quick else committed(files)
    return {"commit": commit, "date": time.strftime("%Y-%m-%d", time.gmtime()), "code": code}


def never(folder: Path) -> bool:
    return False


def has_collapsed(evaluations: Sequence[dict[str, Any]]) -> bool:
    """Return whether held-out accuracy has fallen below a fifth of that of the start."""
    return any(evaluation["avg@4"] < evaluations[0]["avg@4"] / 5 for evaluation in evaluations)


def collapsed(folder: Path) -> bool:
    path = folder / "steps.jsonl"
    return path.exists() and has_collapsed([record["eval"] for record in read_records(path) if record.get("eval")])


def run(
    name: str,
    *settings: str,
    ranks: int = 2,
    quick: bool = False,
    until: Callable[[Path], bool] = never,
    config: str = CONFIG,
) -> Path:
    """Train `config` with `--settings` in runs/`name`, unless that is done; return the run's folder.

    A profile is measured first where the planner needs one. With `quick` a few steps, in a folder made anew. A run may
    be ended before its last step: as soon as `until` says so of its folder.
    """
    folder = ROOT / "runs" / (f"quick-{name}" if quick else name)
    if quick:
        shutil.rmtree(folder, ignore_errors=True)
    begun, now = (folder / "config.toml").exists(), stamp(quick)
    if begun and (then := of_run(folder))["code"] != now["code"]:
        what = f"{folder.relative_to(ROOT)} was trained by other code (commit {then['commit'][:7]} of {then['date']})"
        raise SystemExit(f"error: {what}: remove that folder, or check that commit out to go on")
    if not begun:
        folder.parent.mkdir(exist_ok=True)
        beside(folder).write_text(json.dumps(now), encoding="utf-8")
    is_given = any(setting.startswith("model.path=") for setting in settings)
    few = [key for key in QUICK if quick and not (is_given and key.startswith("warm_start."))]
    keys = [f"--{setting}" for setting in (f"config={config}", *settings, *few, f"run.dir={folder}")]
    if "planner.rule=predict" in settings and not begun:
        launch(ranks, "profiler.py", *keys)
    if not until(folder):
        launch(ranks, "train.py", *keys, *(["--resume"] if begun else []), until=partial(until, folder))
    return folder


def keep(data: Path, drawn: Any) -> None:
    """Store what a figure draws, with the commit that has made it."""
    made = stamp(quick=False)
    data.write_text(json.dumps({"commit": made["commit"], "date": made["date"], "drawn": drawn}), encoding="utf-8")


def kept(data: Path) -> tuple[Any, str]:
    """Return what a figure draws, and a text for its caption that names the commit."""
    stored = json.loads(data.read_text(encoding="utf-8"))
    return stored["drawn"], f"commit {stored['commit'][:7]} of {stored['date']}"


def beside(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.code.json")


def of_run(folder: Path) -> dict[str, str]:
    """Return the stamp of the code that a run began with."""
    path = beside(folder)
    unknown = {"commit": "unknown", "date": "unknown", "code": "unknown"}
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else unknown


def refuse_mixed(points: Sequence[dict[str, Any]]) -> None:
    """Raise SystemExit when points that are compared come from runs of different code."""
    if len({point["code"] for point in points}) > 1:
        runs = sorted({f"{point['commit'][:7]} of {point['date']}" for point in points})
        raise SystemExit(f"error: the points come from runs of different code ({', '.join(runs)}): train them again")


def command_line(doc: str, name: str) -> argparse.ArgumentParser:
    """Return the arguments of a figure that several seeds are trained for."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (default 3)")
    parser.add_argument("--draw", action="store_true", help=f"only draw, from figures/{name}.json")
    parser.add_argument("--quick", action="store_true", help="a few steps of one seed, drawn in runs/quick")
    return parser


def make(
    name: str,
    arguments: argparse.Namespace,
    train: Callable[[argparse.Namespace, Sequence[int]], list[dict]],
    draw: Callable[[list[dict], Path], None],
    summary: Callable[[list[dict]], dict],
    panel: Callable[[dict], str] = lambda row: "",
) -> None:
    """Train what is missing, keep the rows that `train` returns, draw them and print their summary in JSON.

    `panel`: in which a row is drawn. Rows of one panel are of one code; those of panels without new rows stay.
    """
    out = ROOT / "runs" / "quick" if arguments.quick else ROOT / "figures"
    out.mkdir(parents=True, exist_ok=True)
    data = out / f"{name}.json"
    if not arguments.draw:
        new = train(arguments, range(1 if arguments.quick else arguments.seeds))
        known = json.loads(data.read_text(encoding="utf-8")) if data.exists() else []
        rows = [row for row in known if panel(row) not in set(map(panel, new))] + new
        data.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    if not data.exists():
        raise SystemExit(f"error: there is no {data.relative_to(ROOT)} to draw; train the runs first, without --draw")
    rows = json.loads(data.read_text(encoding="utf-8"))
    for each in set(map(panel, rows)):
        refuse_mixed([row for row in rows if panel(row) == each])
    draw(rows, out / f"{name}.png")
    print(json.dumps(summary(rows)))


def launch(ranks: int, script: str, *arguments: str, until: Callable[[], bool] = lambda: False) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", script]
    # The run's lines are progress: standard output is for results.
    process, is_over = subprocess.Popen([*command, *arguments], cwd=ROOT, stdout=sys.stderr), False
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # a run ends with the script that started it
    try:
        while process.poll() is None:
            time.sleep(LOOK_SECONDS)
            if not is_over and (is_over := until()):
                process.terminate()  # it ends after its step
    except BaseException:
        process.terminate()
        process.wait()
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
    if process.returncode and not is_over:
        raise subprocess.CalledProcessError(process.returncode, process.args)


if __name__ == "__main__":
    argparse.ArgumentParser(description=f"{__doc__} For figures and benchmarks: alone it does nothing.").parse_args()
