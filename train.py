"""Train: `python train.py --ranks=2 --config configs/tiny.toml --section.key=value ...`

The command line and the step loop. `job.Job` has the parts of a step; formulas and heuristics live elsewhere.
"""

import argparse
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from process.threads import before_torch

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a traceback until a handler is set
    before_torch()

from config import ConfigError, describe
from job import Job, open_job
from metrics import Clock, Record
from parallel import World, collect, own_place
from process import command, ending, launcher, run_folder
from process.ending import StopSignal
from records import of_replicas, step_record
from settings import Config, check_run, load_run

Callbacks = Sequence[Callable[[Job, Record], object]]  # each is called after each step, on every rank

# ---- the step loop -----------------------------------------------------------------------------------------------


def train(config: Config, world: World, resume: bool, clock: Clock | None = None, callbacks: Callbacks = ()) -> None:
    """Run the whole training. Every rank runs this, in step with the others."""
    clock = clock or Clock(config.log.trace)
    with open_job(config, world, resume, clock) as job, StopSignal() as stop:
        if job.step == 0:
            before = job.evaluate()
            job.recorder.write({"step": 0, "eval": before, "seconds": clock.take()})
            job.recorder.evaluation(0, before)
        ends = stop.agreed(world) or job.step >= config.run.steps
        while not ends and not job.split.moves:
            record = take_step(job)
            if config.run.evaluates(job.step):
                with clock.span("evaluate"):
                    record["eval"] = job.evaluate()
            job.recorder.write(record)
            job.recorder.step(record)
            ending.call(callbacks, job, record)
            ends = stop.agreed(world) or job.step == config.run.steps
            with clock.span("checkpoint"):
                job.checkpoints.check()
                if (waits := ends or job.split.moves) or config.run.saves(job.step, job.checkpoints.best_step):
                    job.save(waits)
        ends = ends or stop.agreed(world)  # a signal while ranks are about to change sides
        job.recorder.finish(job.folder, job.step, config.run.steps) if ends else job.recorder.close()
    if ends:
        return
    del job  # ranks change sides in another one, which needs its memory
    collect()
    train(config, world, True, clock, callbacks)


def take_step(job: Job) -> Record:
    """Take one step; return its record. Collective. (Sections are RollPacker's.) Raises ConfigError after the last."""
    start, job.clock.step = time.perf_counter(), job.step + 1
    if job.step >= job.config.run.steps:
        raise ConfigError(f"the run has taken its run.steps = {job.config.run.steps} steps; resume it with more")
    plan, rollout = None, None
    if job.decodes and not (job.config.run.replay or job.endless):
        plan = job.plan()  # which prompts, how many responses of each (3)
        job.regroup(plan)  # tensor-parallel size of the round (4.2)
    with job.phases("rollout", job.part_of(plan)):
        if plan:
            rollout = job.roll_out(plan)  # windows of decoding, grading beside them, aborts (3, 4.3, 4.4)
        elif job.config.run.replay or job.endless:  # the latter decodes on across updates (ROLL Flash)
            rollout = job.replay() if job.config.run.replay else job.next_batch()
    rollout = job.hand_over(rollout)  # to ranks that only train
    with job.phases("train"):
        advantages, updates = job.learn(rollout)
        job.sync_weights()
    seconds = time.perf_counter() - start
    reports, played = job.take_reports(), rollout.record.get("round", {})
    job.observe(plan, rollout, reports)
    job.dump(rollout.groups, advantages)
    job.recorder.timeline(job.step, [report.track for report in of_replicas(reports)], played)
    return step_record(job.step, seconds, rollout.groups, rollout.record, updates, reports)


# ---- command line ------------------------------------------------------------------------------------------------


def main(argv: list[str], script: str = __file__) -> int:
    """Run the command line; return the exit code. `script` is what `--ranks` starts, such as one of examples/."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--help", "-h", nargs="?", const="")
    parser.add_argument("--config", action="append", default=[])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--resume", action="store_true")
    asked, argv = launcher.parse(argv)
    flags, overrides = parser.parse_known_args(argv)
    launcher.settle()
    try:
        if flags.help is not None:
            print(describe(Config(), flags.help) if flags.help else USAGE + describe(Config(), is_short=True))
            return 0
        if len(flags.config) > 1:
            raise ConfigError(f"--config is given {len(flags.config)} times; put all settings in one file")
        config = load_run(flags.config[0] if flags.config else None, overrides)
        if launcher.is_wanted(asked):
            if not flags.check:
                return launcher.launch(script, asked, argv)
            rank, size = 0, launcher.pretend(asked)
        else:
            rank, size = own_place()
        check_run(config, size, flags.resume, is_main=rank == 0, reports=flags.check)
    except (ConfigError, OSError) as error:  # of the system: a name that is too long, a folder that may not be read
        return ending.refuse(error)
    return 0 if flags.check else run(config, flags.resume)


def run(config: Config, resume: bool, callbacks: Callbacks = ()) -> int:
    """Train on this rank, with a lock on the folder and an eye on ranks that hang; return the exit code."""
    clock = Clock(config.log.trace)

    def work(world: World) -> None:
        with run_folder.guarded(config, Path(config.run.dir), world, clock):
            train(config, world, resume, clock, callbacks)

    return ending.exit_code(work, config.run.device, config.run.timeout_seconds, clock)


USAGE = """plainroll: on-policy RL of language models

usage: python train.py [--ranks=N] [--config FILE.toml] [--section.key=value ...]
       torchrun --nproc_per_node=N train.py [--config FILE.toml] [--section.key=value ...]

  --ranks N       processes on this machine, one a GPU (default 1); starts torchrun, whose options, such as
                  --nnodes=4 or --max-restarts=3, are taken too
  --config FILE   settings from a TOML file; see configs/
  --check         print the memory plan, check all that these ranks will read, play their environments, then exit
  --resume        continue the run in run.dir from its newest checkpoint, or begin it if there is none
  --help          this text
  --help SECTION  all about the keys of a section, such as loss

Every key, its default and its meaning, cut to a line (docs/reference.md has all):
"""

if __name__ == "__main__":
    command.run(main)
