"""Runs from Python: settings as a dict, callbacks after each step, or a job that you step (docs/library.md)."""

import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from plainroll import train
from plainroll.config import ConfigError, load_config
from plainroll.job import Job
from plainroll.job import open_job as opened_job
from plainroll.metrics import Clock, Record, read_records
from plainroll.parallel import own_place, start, stop
from plainroll.process import ending, launcher, run_folder
from plainroll.settings import Config, check_run
from plainroll.train import Callbacks, take_step

__all__ = ["Callbacks", "Config", "ConfigError", "Record", "open_job", "read_records", "run", "take_step"]


def run(settings: Mapping[str, object], callbacks: Callbacks = (), ranks: int = 1, resume: bool = False) -> int:
    """Train as `train.py` does; return its exit code. Bad settings print one line.

    `settings`: by key, as {"run.steps": 10} or {"run": {"steps": 10}}; the rest have their defaults. `callbacks`: each
    gets (job, record) after each step, on every rank. `ranks`: over 1, torchrun starts the calling script that often,
    with the same arguments. There this call trains and ends the process; here it waits for them.
    """
    is_rank = "RANK" in os.environ
    try:
        ending.check_callbacks(callbacks)
        asked, _ = launcher.parse([f"--ranks={ranks}"])
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError("a run is ended by signals, which reach the main thread only; call `run` there")
        if not is_rank and launcher.is_wanted(asked):
            if not (hasattr(sys.modules["__main__"], "__file__") and os.path.isfile(sys.argv[0])):
                raise ConfigError(f"ranks = {ranks}: torchrun starts a script, and there is none here; write one")
            return launcher.launch(sys.argv[0], asked, sys.argv[1:])
        launcher.settle()
        code = train.run(_checked(settings, resume), resume, callbacks)
    except (ConfigError, OSError) as error:
        code = ending.refuse(error)
    if is_rank and ranks > 1:
        sys.exit(code)
    return code


@contextmanager
def open_job(settings: Mapping[str, object], resume: bool = False) -> Iterator[Job]:
    """Give a job, which `take_step` moves by one step. Raises ConfigError. Under torchrun collective.

    Steps that `job.save()` has not written are lost; `job.recorder.write(record)` puts a record into steps.jsonl.
    """
    config = _checked(settings, resume)
    world, clock = start(config.run.device, config.run.timeout_seconds), Clock(config.log.trace)
    with run_folder.guarded(config, Path(config.run.dir), world, clock):
        with opened_job(config, world, resume, clock) as job:
            yield job
            job.recorder.close()
    stop(world)


def _checked(settings: Mapping[str, object], resume: bool) -> Config:
    if not isinstance(settings, Mapping):
        raise ConfigError(f"settings = {settings!r:.60}: not a dict of settings")
    config = load_config(Config, settings)
    rank, size = own_place()
    check_run(config, size, resume, is_main=rank == 0)
    return config
