"""Evaluate: `python process/evaluate.py FOLDER [--ranks=N] [--config FILE.toml] [--section.key=value ...]`

Scores any Hugging Face folder, checkpoint or run on held-out prompts, as a run does between steps (`job.Job.evaluate`):
a checkpoint draws the very responses that its run drew there.
"""

import argparse
import json
import os
import signal
import sys
from dataclasses import asdict, replace
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory

if __name__ == "__main__":
    sys.path[0] = os.path.dirname(sys.path[0])  # not process/, where Python starts this file

from process.threads import before_torch

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a traceback until a handler is set
    before_torch()

import checkpoint
from config import ConfigError, flatten, load_config
from job import open_job
from metrics import Clock, Record, of_failed
from parallel import World, own_place
from process import command, ending, launcher
from scheduler import SchedulerConfig
from settings import Config, check_run, settings_of

SCRATCH = (
    "PLAINROLL_SCRATCH"  # in the environment: the launcher's folder, as ranks may be ended before they remove theirs
)
OWN = {"run.dir": "--out=FILE keeps the scores", "run.steps": "nothing is trained", "model.path": "FOLDER is the model"}
TRAINING = (
    "warm_start planner drafts overlap loss distill stream group log".split()
)  # sections that change no evaluation
IDLE = set("run.eval_every run.checkpoint_every run.keep_checkpoints data.curriculum".split())  # and other such keys
IDLE |= {"reward.weights", "reward.overlong_buffer"}


def model_of(folder: Path) -> tuple[Path, Path | None]:
    """Return the model that a folder means, a run folder its newest checkpoint, and its run's settings if it has some.

    Raises ConfigError for a folder without a model.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder; give a Hugging Face folder, a run folder or a checkpoint of one")
    model = folder
    if not (folder / "config.json").exists():
        saved = checkpoint.list_checkpoints(folder)
        if not saved:
            raise ConfigError(f"{folder}: holds neither a model (config.json) nor checkpoints; give one that does")
        model = saved[-1]
    return model, settings_of(model)


def settled(config: Config, model: Path, folder: str, num_ranks: int) -> Config:
    """Return the settings of a run on this model that takes no step, in a folder of its own."""
    plain, s, t = Config(), config.scheduler, config.trainer
    scheduler = SchedulerConfig(num_prompts=num_ranks, placement=s.placement, window_iterations=s.window_iterations)
    run = replace(config.run, dir=folder, steps=0, replay="", dump_rollouts=False, keep_best=False)
    trainer = replace(plain.trainer, shard=t.shard, offload_optimizer=t.offload_optimizer)
    if num_ranks % t.shard or num_ranks % config.rollout.tensor_parallel:  # those of a run on more ranks
        trainer = plain.trainer
        config = replace(config, rollout=replace(config.rollout, tensor_parallel=1, weights=plain.rollout.weights))
    config = replace(config, **{name: getattr(plain, name) for name in TRAINING})
    own = replace(config.model, path=str(model))
    return replace(config, run=run, model=own, scheduler=scheduler, trainer=trainer)


def refuse_without_effect(overrides: list[str], given: Config, used: Config) -> None:
    """Raise ConfigError for settings on the command line that an evaluation does not read."""
    wanted, kept = flatten(given), flatten(used)
    for key in (text.removeprefix("--").partition("=")[0] for text in overrides):
        if key in OWN or key in IDLE or key.partition(".")[0] in TRAINING or kept.get(key) != wanted.get(key):
            raise ConfigError(
                f"{key} has no place in an evaluation: {OWN.get(key, 'it changes nothing')}; leave it out"
            )


def evaluate(config: Config, world: World, transcripts: int = 0) -> tuple[Record, str]:
    """Return the record of an evaluation, and on rank 0 so many of its responses as text. Collective.

    Raises ConfigError where no prompt is held out.
    """
    with open_job(config, world, resume=False) as job:
        if not job.held_out:
            short = f"data.train = {config.data.train!r} is too short to hold out a tenth of it"
            raise ConfigError(f"nothing to evaluate: {short}; give data.eval")
        record = job.evaluate(transcripts)
        job.recorder.close()
    path = job.folder / "samples" / "step_000000.txt"
    return record, path.read_text(encoding="utf-8") if world.is_main else ""


def table(record: Record) -> str:
    """Return the scores of all prompts, of each data source and of each grader, as lines of text."""
    rows = {"all": record}
    for key, label in (("by_source", "source"), ("by_task", "task")):
        rows |= {f"{label} {name}": part for name, part in record.get(key, {}).items()}
    names, width = [name for name in record if "@" in name], max(map(len, rows))
    heads = ["prompts", names[0], "std. error", *names[1:], "mean length", "P99", "longest", "cut off"]
    lines = [" " * width + "".join(f"  {head:>8}" for head in heads)]
    for name, part in rows.items():
        length = part["length"]
        values = [str(part["num_prompts"]), f"{part[names[0]]:.3f}", f"{part['standard_error']:.3f}"]
        values += [f"{part[score]:.3f}" for score in names[1:]]
        values += [f"{length['mean']:.1f}", f"{length['p99']:.0f}", f"{length['max']:.0f}", f"{part['truncated']:.1%}"]
        lines.append(f"{name:<{width}}" + "".join(f"  {v:>{max(len(h), 8)}}" for h, v in zip(heads, values)))
    parts = (f"  {name} {value:.3f}" for name, value in record.get("reward_parts", {}).items())
    if record["reward_errors"]:
        lines.append(f"WARNING: {of_failed(record)}")
    return "\n".join([*lines, *(["mean parts of the reward:", *parts] if "reward_parts" in record else [])])


def main(argv: list[str]) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--config")
    parser.add_argument("--out")
    parser.add_argument("--samples", default="0")
    asked, argv = launcher.parse(argv)
    flags, rest = parser.parse_known_args(argv)
    if flags.help:
        print(USAGE)
        return 0
    launcher.settle()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # or a folder would be left
    if "RANK" not in os.environ:  # a rank may be in a collective, and ends at once
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(launcher.SIGNALLED + number))
    with TemporaryDirectory(prefix="plainroll-", dir=os.environ.get(SCRATCH)) as scratch:
        try:
            folders, overrides = ([text for text in rest if text.startswith("--") == flag] for flag in (False, True))
            if len(folders) != 1:
                raise ConfigError(
                    f"name one folder to evaluate, not {len(folders)}; see python process/evaluate.py --help"
                )
            if not flags.samples.isdecimal():
                raise ConfigError(f"--samples={flags.samples} is not valid; write a number from 0")
            if flags.out and (Path(flags.out).is_dir() or not Path(flags.out).absolute().parent.is_dir()):
                raise ConfigError(
                    f"--out={flags.out}: no file can be written there; name one in a folder that is there"
                )
            model, own = model_of(Path(folders[0]))
            # A loss or a policy may be an entry of a script that is not here.
            source, without = flags.config or (str(own) if own else None), (*TRAINING, "scheduler.policy")
            given = load_config(Config, source, overrides, without)
            is_wanted = launcher.is_wanted(asked)
            rank, size = (0, launcher.num_ranks(asked)) if is_wanted else own_place()
            config = settled(given, model, scratch, size)
            refuse_without_effect(overrides, given, config)
            if not config.data.eval_prompts:
                raise ConfigError("data.eval_prompts = 0 leaves nothing to evaluate; raise it")
            if is_wanted:
                os.environ[SCRATCH] = scratch
                return launcher.launch(__file__, asked, argv)
            check_run(config, size, resume=False, is_main=rank == 0)
        except (ConfigError, OSError) as error:
            rmtree(scratch, ignore_errors=True)  # torchrun may end this rank before it cleans up
            return ending.refuse(error)
        except KeyboardInterrupt:
            return 130

        def work(world: World) -> None:
            try:
                record, texts = evaluate(config, world, int(flags.samples))
            finally:
                rmtree(scratch, ignore_errors=True)
            if world.is_main:
                report(config, record, texts, flags.out)

        return ending.exit_code(work, config.run.device, config.run.timeout_seconds, Clock())


def report(config: Config, record: Record, texts: str, out: str | None) -> None:
    """Print the responses and the table, and write the JSON file that was asked for."""
    c = config
    drawn = f"{c.run.eval_samples} responses each, temperature {c.sampling.temperature:g}, seed {c.run.seed}"
    text = f"{texts}\n" if texts else ""
    try:
        if out:
            told: Record = {name: asdict(getattr(c, name)) for name in ("data", "sampling")}
            told |= {"model": c.model.path, "eval_samples": c.run.eval_samples, "seed": c.run.seed, "eval": record}
            Path(out).write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    finally:  # file or console may fail, and the other has the scores
        print(f"{text}{c.model.path}: {drawn}, {record['seconds']:.0f} s\n{table(record)}", flush=True)
    if out:
        print(f"written to {out}")


USAGE = """plainroll: the score of a model on held-out prompts

usage: python process/evaluate.py FOLDER [--ranks=N] [--config FILE.toml] [--section.key=value ...]

  FOLDER          a Hugging Face folder, a run folder (its newest checkpoint) or a checkpoint (runs/x/checkpoints/best)
  --ranks N       processes on this machine, as for train.py
  --config FILE   settings from a TOML file; without it those of the run that FOLDER belongs to, if it does
  --samples N     print the first response to N of the prompts, too
  --out FILE      write the scores as JSON
  --help          this text

Settings are those of train.py (python train.py --help). Prompts: data.eval, or what a run on data.train holds out;
data.eval_prompts of them, run.eval_samples responses each, sampled as in training; sampling.temperature=0 is greedy.
"""

if __name__ == "__main__":
    command.run(main)
