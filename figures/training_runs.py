"""Runs of train.py that the figures are drawn from; what is there already is continued or taken as it is."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
CONFIG = "configs/tiny.toml"


def run(name: str, *settings: str, ranks: int = 2) -> Path:
    """Train `configs/tiny.toml` with `--settings` in runs/`name`, unless that is done; return the run's folder."""
    folder = ROOT / "runs" / name
    resume = ["--resume"] if (folder / "config.toml").exists() else []
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    keys = [f"--{setting}" for setting in (*settings, f"run.dir={folder}")]
    subprocess.run([*command, "train.py", "--config", CONFIG, *keys, *resume], cwd=ROOT, check=True)
    return folder
