"""Train: `python train.py --ranks=2 --config configs/tiny.toml --section.key=value ...`

The composition of all rooms and the step loop; formulas and heuristics live elsewhere.
"""

import argparse
import ctypes
import fcntl
import os
import re
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # Ctrl-C ends this process without a traceback until there is somebody to handle it
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import torch

import checkpoint
import parallel
from config import ConfigError, describe, dump_toml, flatten, load_config
from core import Group, Prompt, RoundPlan, SampleId, Visit
from data import PromptCursor, dump_groups, load_groups, load_prompts
from learning import audit_report, group_advantages, learn
from metrics import Clock, Recorder, peak_memory, quantiles, write_transcripts
from model import Model
from overlap import StreamTraining
from parallel import World
from policies.planner import Choice, Launch, Limits, ParallelismPlanner, Report
from process import launcher
from process.watchdog import Watchdog
from rewards import sandbox
from rewards.gradings import merge_stats
from rewards.judge import Graders, judge_record, open_graders
from rewards.pool import GraderError
from rollout import Engine, EngineStats, kv_budget
from rounds import Referee, Round, Streaming
from scheduler import POLICIES, Race, RoundPolicy
from settings import MODELS, Config, check, model_dtype, rollout_profile, rollout_sizes
from trainer import NonFiniteError, Trainer
from warm_start import ensure_model

LOCK_SECONDS = 10.0  # a killed run may take so long to let go of its folder
EVAL_EPOCH = -1  # held-out samples have names, and so random streams, of their own


# ---- the step loop -----------------------------------------------------------------------------------------------


def train(config: Config, world: World, resume: bool, clock: Clock | None = None) -> None:
    """Run the whole training. Every rank runs this, in step with the others."""
    clock = clock or Clock(config.log.trace)
    with clock.span("start"):
        run = build(config, world, resume)
    with run.pool, StopSignal() as stop:
        if run.step == 0:
            before = evaluate(run, clock)
            run.recorder.write({"step": 0, "eval": before, "seconds": clock.take()})
            run.recorder.evaluation(0, before)
        stopping = stop.agreed(world)
        while run.step < config.run.steps and not stopping:
            record = take_step(run, clock)
            is_last = run.step == config.run.steps
            if is_last or due(run.step, config.run.eval_every):
                with clock.span("evaluate"):
                    record["eval"] = evaluate(run, clock)
            run.recorder.write(record)
            run.recorder.step(record)
            stopping = stop.agreed(world)
            if is_last or stopping or due(run.step, config.run.checkpoint_every):
                with clock.span("checkpoint"):
                    save(run)
    run.recorder.finish(run.folder, run.step, config.run.steps)


def take_step(run: "Run", clock: Clock) -> dict[str, Any]:
    """Play a round, learn from it, sync the weights; return the record of the step. Collective."""
    config, start = run.config, time.perf_counter()
    clock.step = run.step + 1
    done: set[SampleId] = set()  # trained while the rollout went on
    if config.run.replay:
        plan, played = None, {}
        with clock.span("rollout"):
            groups = load_groups(Path(config.run.replay), run.step + 1, run.trainer.model.shape.vocab_size)
    else:
        plan = run.policy.begin(run.cursor.take, config.run.steps - run.step)
        regroup(run, plan, clock)
        streaming = run.streaming.begin(plan) if run.streaming else None
        groups, current = roll_out(run, plan, run.policy, clock, streaming)
        tokens = run.policy.race.tokens | current.aborted  # of all launched responses
        if plan.audit:
            current.record["audited"] = audit_report(run.policy.accepted_ids(), current.audited, config.loss)
        played = asdict(run.policy.close(current.aborted)) | current.record
        if streaming:
            done, played["stream"] = streaming.settle(groups)
    with clock.span("train"):
        advantages = group_advantages(groups, config.loss, config.reward, config.rollout.max_response_tokens)
        updates = learn(run.trainer, groups, advantages, done)
    with clock.span("sync"):
        run.step += 1
        run.engine.load_weights(run.trainer.model, run.step)
    record = step_record(run, groups, played, updates, clock, time.perf_counter() - start)
    if plan:
        record["planner"] = close_round(run, plan.kind, tuple(tokens.values()), record)
    if config.run.dump_rollouts and run.world.is_main:
        dump_groups(run.folder / "rollouts", run.step, groups, advantages)
    return record


# ---- pieces of one step ------------------------------------------------------------------------------------------


def roll_out(
    run: "Run", plan: RoundPlan, referee: Referee, clock: Clock, streaming: Streaming | None = None
) -> tuple[list[Group], Round]:
    """Play one round; return its accepted groups, on every rank the same, and the finished round. Collective."""
    c = run.config
    told = c.scheduler, c.run.seed, c.reward.overlong_buffer, run.recorder.progress
    current = Round(run.engine, run.pool, run.world, clock, *told, streaming)
    with clock.span("rollout"):
        current.play(plan, referee)
    with clock.span("exchange"):
        return current.collect(), current


def regroup(run: "Run", plan: RoundPlan, clock: Clock) -> None:
    """Let the planner choose the tensor-parallel size of the round and take it. No collective: all choose the same."""
    run.choice = run.planner.choose(plan.kind, Launch.of(plan))
    with clock.span("regroup"):
        run.engine.regroup(run.tp_groups[run.choice.size])


def close_round(run: "Run", kind: str, lengths: tuple[int, ...], record: dict[str, Any]) -> dict[str, Any]:
    """Tell the planner what became of the round; return its decision for the record."""
    run.planner.observe(kind, Report(record["engine"]["preemptions"], record["seconds"]["generate"], lengths))
    return {"kind": kind, **asdict(run.choice), "predicted": {str(n): t for n, t in run.choice.predicted.items()}}


def evaluate(run: "Run", clock: Clock) -> dict[str, Any]:
    """Score the held-out prompts: avg@k and pass@k (a prompt passes when its best reward is at least 1). Collective."""
    k = run.config.run.eval_samples
    if not run.held_out:
        return {}
    start = time.perf_counter()
    prompts = tuple(Visit(EVAL_EPOCH, prompt) for prompt in run.held_out)
    plan = RoundPlan("long", prompts, k, keep_prompts=len(prompts), keep_responses=k)
    groups, _ = roll_out(run, plan, Race(plan), Clock(parent=clock))
    run.engine.stats = EngineStats()  # the next step's record starts from zero
    for pool, _ in parallel.gather_objects(run.world, run.pool.take_stats()):
        run.pool.timeouts.merge(pool.anchors)
    rewards = torch.tensor([[reward.value for reward in group.rewards] for group in groups])  # [P, k]
    per_prompt = rewards.mean(1)
    if run.world.is_main:
        write_transcripts(run.folder / "samples" / f"step_{run.step:06d}.txt", groups, run.tokenizer)
    return {
        f"avg@{k}": per_prompt.mean().item(),
        f"pass@{k}": (rewards.amax(1) >= 1).double().mean().item(),
        "standard_error": (per_prompt.std() / len(groups) ** 0.5).item() if len(groups) > 1 else 0.0,
        **reward_parts(groups),
        "num_prompts": len(groups),
        "seconds": time.perf_counter() - start,
        "truncated": sum(s.finish_reason == "length" for g in groups for s in g.samples) / rewards.numel(),
        "length": quantiles([len(s.token_ids) for g in groups for s in g.samples]),
    }


def due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


# ---- records -----------------------------------------------------------------------------------------------------


def step_record(
    run: "Run", groups: Sequence[Group], played: dict[str, Any], updates: list[dict], clock: Clock, seconds: float
) -> dict[str, Any]:
    """Return the JSON record of one step. Collective: adds up what only each rank knows."""
    stats = run.engine.stats
    own = asdict(stats), clock.take(), peak_memory(), clock.take_track(), run.pool.take_stats()
    run.engine.stats = EngineStats()
    engines, spans, memories, tracks, graders = zip(*parallel.gather_objects(run.world, own), strict=True)
    pools, judges = zip(*graders, strict=True)
    shown = played.get("kind", ""), played.get("queue", 0)
    run.recorder.timeline(run.step, tracks[:: run.engine.parallel.size], *shown)
    if played:
        played["window_wait"] = sum(s.get("window_wait", 0.0) for s in spans) / len(spans)
    for pool in pools:
        run.pool.timeouts.merge(pool.anchors)
    samples = [sample for group in groups for sample in group.samples]
    rewards = [reward for group in groups for reward in group.rewards]
    lengths = [len(sample.token_ids) for sample in samples]
    slowest = {name: max(s.get(name, 0.0) for s in spans) for name in {n for s in spans for n in s}}
    generate = max(s.get("rollout", 0.0) - s.get("reward", 0.0) for s in spans)  # before the wait for graders
    skipped = "; ".join(u["skipped"] for u in updates if u["skipped"])
    errors = [f"{g.prompt.where}: {r.error}" for g in groups for r in g.rewards if r.error]
    return {
        "step": run.step,
        "epoch": groups[-1].epoch,
        "seconds": {"step": seconds, **dict(sorted(slowest.items())), "generate": generate},
        "samples": len(samples),
        "tokens": sum(lengths),
        "tokens_per_second": sum(lengths) / seconds,
        "rollout_tokens_per_second": sum(lengths) / max(slowest.get("rollout", seconds), 1e-9),
        "reward": sum(r.value for r in rewards) / len(rewards),
        "reward_by_task": mean_by_task(groups),
        **reward_parts(groups),
        "rewards": merge_stats(pools, seconds),
        "reward_errors": len(errors),
        "first_reward_error": errors[0] if errors else "",
        "mixed_groups": sum(len({r.value for r in g.rewards}) > 1 for g in groups) / len(groups),
        "truncated": sum(s.finish_reason == "length" for s in samples) / len(samples),
        "length": quantiles(lengths),
        **({"round": played} if played else {}),
        "train": {
            # Later updates of a step are off-policy on purpose; only the first compares rollout and trainer.
            **{k: sum(u[k] for u in updates) / len(updates) for k in updates[0] if k != "skipped"},
            **{k: updates[0][k] for k in ("logprob_diff_mean", "logprob_diff_max")},
            "updates": len(updates),
            "skipped": skipped,
        },
        "engine": {
            **{
                k: sum(e[k] for e in engines[:: run.engine.parallel.size])  # a replica's ranks count the same
                for k in ("decoded_tokens", "prefilled_tokens", "shared_tokens", "preemptions")
            },
            "regroup_bytes": sum(e["regroup_bytes"] for e in engines),
            "decode_steps": max(e["decode_steps"] for e in engines),
            "peak_pages": max(e["peak_pages"] for e in engines),
            "pages": run.engine.pages.size,
        },
        "judge": judge_record(judges),
        "memory": {name: sum(m.get(name, 0.0) for m in memories) for name in memories[0]},
    }


def mean_by_task(groups: Sequence[Group]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for group in groups:
        values.setdefault(group.prompt.task, []).extend(reward.value for reward in group.rewards)
    return {task: sum(v) / len(v) for task, v in sorted(values.items())}


def reward_parts(groups: Sequence[Group]) -> dict[str, dict[str, float]]:
    """Return the mean of each part of the rewards, where they have parts."""
    values: dict[str, list[float]] = {}
    for part in (part for group in groups for reward in group.rewards for part in reward.parts.items()):
        values.setdefault(part[0], []).append(part[1])
    return {"reward_parts": {name: sum(v) / len(v) for name, v in sorted(values.items())}} if values else {}


# ---- building, saving, resuming ----------------------------------------------------------------------------------


@dataclass
class Run:
    """Everything that the loop works with."""

    config: Config
    world: World
    folder: Path
    source: Path  # model folder whose config and tokenizer checkpoints carry on
    tokenizer: Any
    engine: Engine
    trainer: Trainer
    pool: Graders
    cursor: PromptCursor
    policy: RoundPolicy
    tp_groups: parallel.TPGroups
    planner: ParallelismPlanner
    streaming: StreamTraining | None
    held_out: list[Prompt]
    recorder: Recorder
    step: int = 0
    choice: Choice | None = None  # of the newest round


def build(config: Config, world: World, resume: bool) -> Run:
    """Make or load the model and put the rooms together; with `resume`, in the state of the newest checkpoint."""
    folder = Path(config.run.dir)
    checkpoints = checkpoint.list_checkpoints(folder) if resume else []
    if checkpoints:
        wrong = parallel.broadcast_object(world, checkpoint.damage(checkpoints[-1]) if world.is_main else "")
        if wrong:
            raise ConfigError(wrong)
    source = (
        Path(config.model.path)
        if config.model.path
        else ensure_model(config.warm_start, config.data.train, MODELS, world)
    )
    tokenizer = checkpoint.load_tokenizer(source)
    dtype = model_dtype(config, world.device.type)
    model = checkpoint.load_model(checkpoints[-1] if checkpoints else source, world.device, dtype)
    reference = None
    if config.loss.kl_coef:
        reference = checkpoint.load_model(source, world.device, dtype).requires_grad_(False)
    prompts, held_out = load_prompts(config.data, tokenizer, config.rollout.max_prompt_tokens)
    trainer = Trainer(
        model,
        config.trainer,
        config.loss,
        config.sampling,
        world,
        config.rollout.max_response_tokens,
        config.run.steps * config.trainer.updates_per_step,
        reference,
    )
    ends = checkpoint.eos_ids(source, tokenizer, model.shape.vocab_size)
    tp_groups, engine, planner = build_rollout(config, model, ends, tokenizer, world)
    streaming = None
    if config.stream.policy != "off" and world.size > 1:
        streaming = StreamTraining(config.stream, config.reward, engine, trainer, world, tp_groups.by_size)
    cursor = PromptCursor(prompts, config.run.seed)
    policy = POLICIES[config.scheduler.policy](config.scheduler, config.run.seed)
    step = 0
    if checkpoints:
        state = checkpoint.load_state(checkpoints[-1])
        trainer.load_state_dict(state["trainer"])
        cursor.load_state_dict(state["stream"])
        planner.load_state_dict(state["planner"])
        if streaming and "streaming" in state:
            streaming.load_state_dict(state["streaming"])
        step = state["step"]
        policy.load_state_dict(state["policy"], prompts)
        waiting, places = len(policy.queue), (config.run.steps - step) * config.scheduler.num_prompts
        if policy.trains_all and waiting > places:
            raise ConfigError(
                f"run.steps = {config.run.steps} leaves {waiting - places} prompts of the long-prompt queue untrained; "
                f"take at least {step + -(-waiting // config.scheduler.num_prompts)}"
            )
        engine.load_weights(model, step)
    # The first rank of a replica has its samples graded: any rank, when the size changes.
    grades = engine.parallel.rank == 0 or config.planner.rule != "fixed"
    tasks = {p.task for p in (*prompts, *held_out)} if grades else set()
    pool = open_graders(config.reward, config.judge, tasks, world.device, dtype)
    if checkpoints:
        pool.timeouts.load_state_dict(state["timeouts"])
    settings = {key: value for key, (value, _) in flatten(config).items()}
    recorder = Recorder(folder, config.log, settings, step, config.run.steps, world.is_main)
    if pool.judge:
        recorder.say(pool.judge.about)
    if resume:
        recorder.say(f"resumed from {checkpoints[-1]}" if checkpoints else f"no checkpoint in {folder}: starts afresh")
    if any(p.task == "code" for p in prompts + held_out):
        recorder.say(f"sandbox: {sandbox.isolation()}")
    rooms = engine, trainer, pool, cursor, policy, tp_groups, planner, streaming
    return Run(config, world, folder, source, tokenizer, *rooms, held_out, recorder, step)


def build_rollout(
    config: Config, model: Model, ends: Iterable[int], tokenizer: Any, world: World
) -> tuple[parallel.TPGroups, Engine, ParallelismPlanner]:
    """Make the engine, all groups that it may ever decode in, and the planner that chooses among them."""
    free = min(parallel.gather_objects(world, kv_budget(config.rollout, world.device)))  # ranks need equal pools
    rollout = replace(config.rollout, kv_gib=free / 2**30)
    config, elastic = replace(config, rollout=rollout), config.planner.rule != "fixed"
    sizes = rollout_sizes(config, model.shape, world.size, world.node_size, world.device, elastic)
    # One rank reads it: on other machines there may be none, or another, and all must choose the same.
    profile = rollout_profile(config, model.shape, sizes, world.size, world.device) if world.is_main else None
    profile = parallel.broadcast_object(world, profile)
    tp_groups, own = parallel.TPGroups(world, sizes), rollout.tensor_parallel
    engine = Engine(model, rollout, config.sampling, ends, tokenizer, tp_groups[own], sizes)
    sizes_of = rollout.page_size, rollout.max_running, rollout.max_response_tokens
    limits = Limits(world.size, engine.num_pages, *sizes_of, shares_prompts=not engine.pages.dense)
    return tp_groups, engine, ParallelismPlanner(config.planner, limits, own, profile)


def save(run: Run) -> None:
    """Write a checkpoint. Sampling is counter-based, so there is no random state in it."""
    trainer = run.trainer.state_dict()  # collective when it is sharded
    if run.world.is_main:
        state = {"step": run.step, "trainer": trainer, "timeouts": run.pool.timeouts.state_dict()}
        state |= {"stream": run.cursor.state_dict(), "policy": run.policy.state_dict()}
        state |= {"planner": run.planner.state_dict()}
        state |= {"streaming": run.streaming.state_dict()} if run.streaming else {}
        keep = run.config.run.keep_checkpoints
        checkpoint.save_checkpoint(run.folder, run.step, run.trainer.model, run.source, state, keep)
    parallel.barrier(run.world)


class StopSignal:
    """SIGTERM or Ctrl-C ends the run after the current step; a second Ctrl-C ends it at once."""

    def __init__(self) -> None:
        self.first = 0  # signal; 0: none

    def __enter__(self) -> "StopSignal":
        self._previous = {s: signal.signal(s, self._handle) for s in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _: Any) -> None:
        if self.first and signal.SIGINT in (self.first, number):  # torchrun passes the second one on as SIGTERM
            raise KeyboardInterrupt
        self.first = self.first or number

    def agreed(self, world: World) -> bool:
        """Whether any rank was signalled. Signals come at different moments; all act on this answer. Collective."""
        return any(parallel.gather_objects(world, self.first))


# ---- command line ------------------------------------------------------------------------------------------------


def main(argv: list[str], script: str = __file__) -> int:
    """Run the command line; return the exit code. `script` is what `--ranks` starts, such as one of examples/."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in ("--help", "-h"):
        parser.add_argument(flag, dest="help", action="store_true")
    parser.add_argument("--config", action="append", default=[])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--resume", action="store_true")
    asked, argv = launcher.parse(argv)
    flags, overrides = parser.parse_known_args(argv)
    if flags.help:
        print(USAGE + describe(Config()))
        return 0
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: a killed torchrun leaves no rank running
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    try:
        if len(flags.config) > 1:
            raise ConfigError(f"--config is given {len(flags.config)} times; put all settings in one file")
        config = load_config(Config, flags.config[0] if flags.config else None, overrides)
        if launcher.is_wanted(asked):
            if not flags.check:
                return launcher.launch(script, asked, argv)
            size = launcher.pretend(asked)
        check(config, size, flags.resume, is_main=rank == 0)
    except (ConfigError, OSError) as error:  # of the system: a name that is too long, a folder that may not be read
        time.sleep(10.0 if rank else 0.0)  # rank 0 speaks; torchrun ends the others before they repeat it
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    if flags.check:
        if rank == 0:
            ranks = "1 rank (--ranks=N checks for N)" if size == 1 else f"{size} ranks"
            print(f"config, data, graders and model folder are fine for {ranks}")
        return 0
    return train_on_ranks(config, flags.resume)


def train_on_ranks(config: Config, resume: bool) -> int:
    """Join the other ranks and train; return the exit code. What a user can mend is told in a line."""
    world, clock, folder = None, Clock(config.log.trace), Path(config.run.dir)
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with clock.span("rendezvous"):
            world = parallel.start(config.run.device, config.run.timeout_seconds)
        with ExitStack() as stack:
            if world.is_main:
                stack.enter_context(locked(folder))
                write_settings(config, folder)
            stack.enter_context(Watchdog(world, clock, folder / "stacks"))
            train(config, world, resume, clock)
        return 0
    except (ConfigError, NonFiniteError, GraderError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:  # the first one ahead of all steps, else the second
        if world and world.is_main:
            print(f"interrupted in {clock.failed_in or 'start'}", file=sys.stderr, flush=True)
        return 130
    except OSError as error:
        if parallel.is_lost(error):
            return lost(clock, error)
        print(f"error: {clock.failed_in or 'start'} of step {clock.step}: {error}", file=sys.stderr, flush=True)
        return 1
    except RuntimeError as error:
        if not parallel.is_lost(error):
            raise
        return lost(clock, error)
    finally:
        if world:
            parallel.stop(world)


def lost(clock: Clock, error: Exception) -> int:
    """Say that other ranks have gone, unless torchrun, which knows who and why, ends this rank first."""
    time.sleep(2.0)
    rank, reason = os.environ.get("RANK", 0), re.sub(r"^\[.*?\] ", "", str(error).strip().splitlines()[0])
    reason = reason.partition(". ")[0]  # gloo goes on with advice
    stage = clock.failed_in or "start"
    print(f"error: rank {rank} lost the others in {stage} of step {clock.step}: {reason}", file=sys.stderr, flush=True)
    return 1


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make the run folder and keep other runs out of it: they would remove each other's checkpoints."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / ".lock", "a")
    except OSError as error:
        raise ConfigError(f"run.dir = {str(folder)!r}: cannot write it ({error.strerror}); choose another") from None
    with file:
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ConfigError(
                        f"run.dir = {str(folder)!r}: another run is using it; end that, or choose another folder"
                    ) from None
                time.sleep(0.2)
            except OSError:  # a file system without locks
                break
        yield


def write_settings(config: Config, folder: Path) -> None:
    part = folder / ".config.toml"
    try:
        part.write_text(dump_toml(config), encoding="utf-8")
        part.replace(folder / "config.toml")  # a kill leaves the one before whole: --resume reads it
    except OSError as error:
        raise ConfigError(f"run.dir = {str(folder)!r}: cannot write it ({error.strerror}); choose another") from None


USAGE = """plainroll: on-policy RL of language models

usage: python train.py [--ranks=N] [--config FILE.toml] [--section.key=value ...]
       torchrun --nproc_per_node=N train.py [--config FILE.toml] [--section.key=value ...]

  --ranks N       processes on this machine, one a GPU (default 1); starts torchrun, whose options, such as
                  --nnodes=4 or --max-restarts=3, are taken too
  --config FILE   settings from a TOML file; see configs/
  --check         validate config, data, graders and model folder for these ranks, then exit
  --resume        continue the run in run.dir from its newest checkpoint, or begin it if there is none
  --help          this text

Every key, its default and its meaning:
"""

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
