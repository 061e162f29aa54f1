"""Runs of train.py that the figures are drawn from; what is there already is continued or taken as it is."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
CONFIG = "configs/tiny.toml"


def run(name: str, *settings: str, ranks: int = 2) -> Path:
    """Train `configs/tiny.toml` with `--settings` in runs/`name`, unless that is done; return the run's folder.

    A profile is measured first where the planner needs one.
    """
    folder = ROOT / "runs" / name
    begun = (folder / "config.toml").exists()
    keys = [f"--{setting}" for setting in (*settings, f"run.dir={folder}")]
    if "planner.rule=predict" in settings and not begun:
        launch(ranks, "profiler.py", *keys)
    launch(ranks, "train.py", *keys, *(["--resume"] if begun else []))
    return folder


def launch(ranks: int, script: str, *arguments: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", script]
    subprocess.run([*command, "--config", CONFIG, *arguments], cwd=ROOT, check=True)
