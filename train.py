"""Train: `torchrun --nproc_per_node=2 train.py --config configs/tiny.toml --section.key=value ...`

The composition of all rooms and the step loop; formulas and heuristics live elsewhere.
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import checkpoint
import parallel
from config import ConfigError, describe, dump_toml, flatten, load_config, option
from core import Group, Prompt, Reward, Sample
from data import DataConfig, PromptStream, dump_groups, load_groups, load_prompts
from loss import ADVANTAGES, LossConfig
from metrics import Clock, LogConfig, Recorder, check_loggers, peak_memory, quantiles
from model import parse_shape
from parallel import World
from reward import RewardConfig, RewardPool, overlong_penalty, resolve_grader
from rollout import Engine, RolloutConfig, num_pages_for, sequences_for
from sampling import SamplingConfig
from scheduler import POLICIES, SchedulerConfig
from trainer import Example, NonFiniteError, Trainer, TrainerConfig
from warm_start import WarmStartConfig, byte_tokenizer, ensure_model, hf_config, model_folder

EVAL_EPOCH = -1  # held-out samples have names, and so random streams, of their own


@dataclass(frozen=True)
class RunConfig:
    dir: str = option("runs/tiny", "run folder: records, transcripts, checkpoints")
    steps: int = option(150, "steps (updates of the policy) of the whole run", min=0)
    seed: int = option(0, "seed of sampling and of the order of prompts")
    device: str = option("auto", "auto (GPU if there is one), cpu or cuda", choices=("auto", "cpu", "cuda"))
    timeout_seconds: float = option(600.0, "longest wait for another rank", above=0.0)
    eval_every: int = option(25, "steps between evaluations; 0: only before and after", min=0)
    eval_samples: int = option(4, "responses per held-out prompt (the k of avg@k and pass@k)", min=1)
    checkpoint_every: int = option(25, "steps between checkpoints; 0: only at the end", min=0)
    keep_checkpoints: int = option(2, "newest checkpoints that are kept", min=1)
    dump_rollouts: bool = option(False, "write every trained sample to rollouts/step_N.jsonl in the run folder")
    replay: str = option("", "train on the rollouts/ folder of an earlier run instead of generating")


@dataclass(frozen=True)
class ModelConfig:
    path: str = option("", "local Hugging Face folder; empty: warm-start a small model on the built-in task data.train")
    dtype: str = option(
        "auto", "auto (bfloat16 on GPU, float32 on CPU), float32 or bfloat16", choices=("auto", "float32", "bfloat16")
    )


@dataclass(frozen=True)
class Config:
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    data: DataConfig = field(default_factory=DataConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    log: LogConfig = field(default_factory=LogConfig)


# ---- the step loop -----------------------------------------------------------------------------------------------


def train(config: Config, world: World, resume: bool) -> None:
    """Run the whole training. Every rank runs this, in step with the others."""
    clock = Clock()
    with clock.span("start"):
        run = build(config, world, resume)
    engine, trainer, recorder = run.engine, run.trainer, run.recorder
    with run.pool, StopSignal() as stop:
        if run.step == 0:
            before = evaluate(run, clock)
            recorder.write({"step": 0, "eval": before, "seconds": clock.take()})
            recorder.evaluation(0, before)
        while run.step < config.run.steps and not stop.is_set:
            start = time.perf_counter()
            if config.run.replay:
                with clock.span("rollout"):
                    groups = load_groups(Path(config.run.replay), run.step + 1)
            else:
                plan = run.policy.plan(run.stream.take)
                with clock.span("rollout"):
                    groups = roll_out(run, plan.prompts[world.rank :: world.size], plan.num_responses, clock)
                with clock.span("exchange"):
                    groups = exchange(groups, world)
            with clock.span("train"):
                advantages = group_advantages(groups, config)
                updates = learn(trainer, groups, advantages, config)
            with clock.span("sync"):
                run.step += 1
                engine.load_weights(trainer.model, run.step)
            record = step_record(run, groups, updates, clock, time.perf_counter() - start)

            is_last = run.step == config.run.steps
            if config.run.dump_rollouts and world.is_main:
                dump_groups(run.folder / "rollouts", run.step, groups, advantages)
            if is_last or due(run.step, config.run.eval_every):
                record["eval"] = evaluate(run, clock)
            recorder.write(record)
            recorder.step(record)
            stop.agree(world)
            if is_last or stop.is_set or due(run.step, config.run.checkpoint_every):
                with clock.span("checkpoint"):
                    save(run)
    recorder.finish(run.folder, run.step, config.run.steps)


# ---- pieces of one step ------------------------------------------------------------------------------------------


def roll_out(run: "Run", prompts: Sequence[tuple[int, Prompt]], num_responses: int, clock: Clock) -> list[Group]:
    """Generate this rank's groups; each finished sample is graded while others decode."""
    config, engine, pool = run.config, run.engine, run.pool
    owners = {(epoch, prompt.index): prompt for epoch, prompt in prompts}
    for epoch, prompt in prompts:
        for sequence in sequences_for(
            epoch, prompt, num_responses, config.run.seed, config.rollout.max_response_tokens
        ):
            engine.add(sequence)
    samples: dict[tuple, Sample] = {}
    rewards: dict[tuple, Reward] = {}
    while not engine.is_idle:
        for sample in engine.step():
            prompt = owners[sample.epoch, sample.prompt_index]
            samples[sample.id] = sample
            text = run.tokenizer.decode(sample.token_ids, skip_special_tokens=True)
            pool.submit(sample.id, prompt.task, text, prompt.answer, prompt.extra)
        rewards.update(pool.poll())
    with clock.span("reward"):
        rewards.update(pool.drain())
    groups = []
    for epoch, prompt in prompts:
        ids = [(epoch, prompt.index, r) for r in range(num_responses)]
        groups.append(Group(prompt, epoch, tuple(samples[i] for i in ids), tuple(rewards[i] for i in ids)))
    return groups


def exchange(groups: list[Group], world: World) -> list[Group]:
    """Return the groups of all ranks in one order that does not depend on the number of ranks."""
    everyone = [group for part in parallel.gather_objects(world, groups) for group in part]
    return sorted(everyone, key=lambda group: (group.epoch, group.prompt.index))


def group_advantages(groups: Sequence[Group], config: Config) -> torch.Tensor:
    """Return advantages [P, R] float64 from the graders' rewards and the penalty for overlong answers."""
    limit, buffer = config.rollout.max_response_tokens, config.reward.overlong_buffer
    rewards = [
        [
            reward.value + overlong_penalty(len(sample.token_ids), limit, buffer)
            for sample, reward in zip(g.samples, g.rewards)
        ]
        for g in groups
    ]
    return ADVANTAGES[config.loss.advantage](torch.tensor(rewards, dtype=torch.float64))


def learn(trainer: Trainer, groups: Sequence[Group], advantages: torch.Tensor, config: Config) -> list[dict]:
    """Turn a step's groups into gradients and `updates_per_step` updates; return the statistics of each."""
    world, num_updates = trainer.world, min(config.trainer.updates_per_step, len(groups))
    shares = []
    for part in range(num_updates):
        examples = [
            Example(group.prompt.token_ids, sample.token_ids, sample.logprobs, advantage)
            for group, row in list(zip(groups, advantages.tolist()))[part::num_updates]
            for sample, advantage in zip(group.samples, row)
            if not (config.loss.mask_truncated and sample.finish_reason == "length")
        ]
        share = parallel.assign_by_load([e.num_tokens for e in examples], world.size)[world.rank]
        shares.append([examples[i] for i in share])
    if config.loss.old_logprobs == "trainer" and num_updates > 1:
        shares = [trainer.with_old_logprobs(share) for share in shares]
    updates = []
    for share in shares:
        trainer.accumulate(share)
        updates.append(trainer.update())
    return updates


def evaluate(run: "Run", clock: Clock) -> dict[str, Any]:
    """Score the held-out prompts: avg@k and pass@k (a prompt passes when its best reward is at least 1). Collective."""
    k = run.config.run.eval_samples
    if not run.held_out:
        return {}
    with clock.span("evaluate"):
        mine = [(EVAL_EPOCH, prompt) for prompt in run.held_out[run.world.rank :: run.world.size]]
        groups = exchange(roll_out(run, mine, k, clock), run.world)
    rewards = torch.tensor([[reward.value for reward in group.rewards] for group in groups])  # [P, k]
    per_prompt = rewards.mean(1)
    if run.world.is_main:
        write_transcripts(run.folder / "samples" / f"step_{run.step:06d}.txt", groups, run.tokenizer)
    return {
        f"avg@{k}": per_prompt.mean().item(),
        f"pass@{k}": (rewards.amax(1) >= 1).double().mean().item(),
        "standard_error": (per_prompt.std() / len(groups) ** 0.5).item() if len(groups) > 1 else 0.0,
        "num_prompts": len(groups),
        "truncated": sum(s.finish_reason == "length" for g in groups for s in g.samples) / rewards.numel(),
        "length": quantiles([len(s.token_ids) for g in groups for s in g.samples]),
    }


def due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


# ---- records -----------------------------------------------------------------------------------------------------


def step_record(
    run: "Run", groups: Sequence[Group], updates: list[dict], clock: Clock, seconds: float
) -> dict[str, Any]:
    """Return the JSON record of one step. Collective: adds up what only each rank knows."""
    stats = run.engine.stats
    own = asdict(stats), clock.take(), peak_memory()
    run.engine.stats = type(stats)()
    engines, spans, memories = zip(*parallel.gather_objects(run.world, own), strict=True)
    samples = [sample for group in groups for sample in group.samples]
    rewards = [reward for group in groups for reward in group.rewards]
    lengths = [len(sample.token_ids) for sample in samples]
    slowest = {name: max(s.get(name, 0.0) for s in spans) for name in {n for s in spans for n in s}}
    skipped = "; ".join(u["skipped"] for u in updates if u["skipped"])
    errors = [reward.error for reward in rewards if reward.error]
    return {
        "step": run.step,
        "epoch": groups[-1].epoch,
        "seconds": {"step": seconds, **dict(sorted(slowest.items()))},
        "samples": len(samples),
        "tokens": sum(lengths),
        "tokens_per_second": sum(lengths) / seconds,
        "rollout_tokens_per_second": sum(lengths) / max(slowest.get("rollout", seconds), 1e-9),
        "reward": sum(r.value for r in rewards) / len(rewards),
        "reward_errors": len(errors),
        "first_reward_error": errors[0] if errors else "",
        "mixed_groups": sum(len({r.value for r in g.rewards}) > 1 for g in groups) / len(groups),
        "truncated": sum(s.finish_reason == "length" for s in samples) / len(samples),
        "length": quantiles(lengths),
        "train": {
            # Later updates of a step are off-policy on purpose; only the first compares rollout and trainer.
            **{k: sum(u[k] for u in updates) / len(updates) for k in updates[0] if k != "skipped"},
            **{k: updates[0][k] for k in ("logprob_diff_mean", "logprob_diff_max")},
            "updates": len(updates),
            "skipped": skipped,
        },
        "engine": {
            **{k: sum(e[k] for e in engines) for k in ("decoded_tokens", "prefilled_tokens", "preemptions")},
            "decode_steps": max(e["decode_steps"] for e in engines),
            "peak_pages": max(e["peak_pages"] for e in engines),
            "pages": run.engine.num_pages,
        },
        "memory": {name: sum(m.get(name, 0.0) for m in memories) for name in memories[0]},
    }


def write_transcripts(path: Path, groups: Sequence[Group], tokenizer: Any, count: int = 16) -> None:
    """Write the first response to some held-out prompts, for a person to read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = []
    for group in groups[:: max(len(groups) // count, 1)][:count]:
        sample, reward = group.samples[0], group.rewards[0]
        text = tokenizer.decode(sample.token_ids, skip_special_tokens=True)
        cost = f"{len(sample.token_ids)} tokens, {sample.finish_reason}"
        head = f"--- prompt {group.prompt.index} | reward {reward.value:g} | {cost}"
        parts.append(
            f"{head}\n{group.prompt.text}{text}\nanswer: {group.prompt.answer}\n"
            + (f"error: {reward.error}\n" if reward.error else "")
        )
    path.write_text("\n".join(parts), encoding="utf-8")


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
    pool: RewardPool
    stream: PromptStream
    policy: Any
    held_out: list[Prompt]
    recorder: Recorder
    step: int = 0


def build(config: Config, world: World, resume: bool) -> Run:
    """Make or load the model and put the rooms together; with `resume`, in the state of the newest checkpoint."""
    folder = Path(config.run.dir)
    checkpoints = checkpoint.list_checkpoints(folder) if resume else []
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
    engine = Engine(model, config.rollout, config.sampling, checkpoint.eos_ids(source, tokenizer))
    stream = PromptStream(prompts, config.run.seed)
    step = 0
    if checkpoints:
        state = checkpoint.load_state(checkpoints[-1], world.device)
        trainer.load_state_dict(state["trainer"])
        stream.load_state_dict(state["stream"])
        step = state["step"]
        engine.load_weights(model, step)
    pool = RewardPool(config.reward, {p.task for p in prompts} | {p.task for p in held_out})
    policy = POLICIES[config.scheduler.policy](config.scheduler)
    settings = {key: value for key, (value, _) in flatten(config).items()}
    recorder = Recorder(folder, config.log, settings, step, config.run.steps, world.is_main)
    if checkpoints:
        recorder.say(f"resumed from {checkpoints[-1]}")
    return Run(
        config, world, folder, source, tokenizer, engine, trainer, pool, stream, policy, held_out, recorder, step
    )


def save(run: Run) -> None:
    """Write a checkpoint: model, optimizer, cursor, step. Sampling is counter-based: there is no other random state."""
    if run.world.is_main:
        state = {"step": run.step, "trainer": run.trainer.state_dict(), "stream": run.stream.state_dict()}
        keep = run.config.run.keep_checkpoints
        checkpoint.save_checkpoint(run.folder, run.step, run.trainer.model, run.source, state, keep)
    parallel.barrier(run.world)


class StopSignal:
    """SIGTERM or Ctrl-C ends the run after the current step; a second Ctrl-C ends it at once."""

    def __init__(self) -> None:
        self.is_set = False

    def __enter__(self) -> "StopSignal":
        self._previous = {s: signal.signal(s, self._handle) for s in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _: Any) -> None:
        if self.is_set and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.is_set = True

    def agree(self, world: World) -> None:
        """Signals reach ranks at different moments; all stop after the same step. Collective."""
        self.is_set = any(parallel.gather_objects(world, self.is_set))


# ---- checks before any rank starts to work -----------------------------------------------------------------------


def model_dtype(config: Config, device_type: str) -> torch.dtype:
    name = config.model.dtype
    if name == "auto":
        name = "bfloat16" if device_type == "cuda" else "float32"
    return getattr(torch, name)


def check(config: Config, world_size: int, resume: bool) -> None:
    """Raise ConfigError on anything that would fail later: combinations, data, graders, model folder, run folder."""
    c = config
    if c.scheduler.num_prompts % world_size:
        raise ConfigError(
            f"scheduler.num_prompts = {c.scheduler.num_prompts} is not a multiple of the {world_size} ranks; "
            f"take {max(c.scheduler.num_prompts // world_size, 1) * world_size} prompts, or another --nproc_per_node"
        )
    if c.run.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "run.device = cuda, but torch sees no GPU; take run.device = auto, or install torch with CUDA"
        )
    if c.loss.name == "sft":
        raise ConfigError("loss.name = sft ignores rewards and is for the warm start; take ppo, gspo or cispo")
    if c.loss.tis_cap and c.loss.old_logprobs != "trainer":
        raise ConfigError(f"loss.tis_cap = {c.loss.tis_cap} needs loss.old_logprobs = trainer")
    if c.sampling.temperature == 0:
        raise ConfigError(
            "sampling.temperature = 0 draws the same response every time, so nothing can be learnt; take 1.0"
        )
    if c.reward.overlong_buffer > c.rollout.max_response_tokens:
        raise ConfigError(
            f"reward.overlong_buffer = {c.reward.overlong_buffer} is over rollout.max_response_tokens = "
            f"{c.rollout.max_response_tokens}; lower it"
        )
    if c.run.replay and not Path(c.run.replay).is_dir():
        raise ConfigError(f"run.replay = {c.run.replay!r}: no such folder; give the rollouts/ folder of an earlier run")
    check_loggers(c.log)
    check_run_folder(config, resume)
    device = torch.device("cuda" if c.run.device != "cpu" and torch.cuda.is_available() else "cpu")
    folder = Path(c.model.path) if c.model.path else model_folder(c.warm_start, c.data.train, MODELS)
    if c.model.path or folder.exists():
        checkpoint.check_model(folder)
        tokenizer = checkpoint.load_tokenizer(folder)
        shape = parse_shape(checkpoint.read_config(folder), str(folder / "config.json"))
        checkpoint.eos_ids(folder, tokenizer)
    else:
        tokenizer = byte_tokenizer()
        shape = parse_shape(hf_config(c.warm_start, tokenizer), "warm_start")
    longest = c.rollout.max_prompt_tokens + c.rollout.max_response_tokens
    if longest > shape.max_positions:
        raise ConfigError(
            f"rollout.max_prompt_tokens + rollout.max_response_tokens = {longest} is over the model's context of "
            f"{shape.max_positions} tokens; lower rollout.max_response_tokens"
        )
    num_pages_for(c.rollout, shape, model_dtype(config, device.type), device)
    prompts, held_out = load_prompts(c.data, tokenizer, c.rollout.max_prompt_tokens)
    for task in sorted({p.task for p in prompts} | {p.task for p in held_out}):
        resolve_grader(task)
    if len(prompts) < c.scheduler.num_prompts:
        raise ConfigError(
            f"data.train has {len(prompts)} prompts, fewer than scheduler.num_prompts = {c.scheduler.num_prompts}; "
            "lower scheduler.num_prompts"
        )


FREE_TO_CHANGE = (
    "run.steps",
    "run.eval_every",
    "run.checkpoint_every",
    "run.keep_checkpoints",
    "run.timeout_seconds",
    "run.dump_rollouts",
    "log.",
    "reward.num_workers",
)


def check_run_folder(config: Config, resume: bool) -> None:
    """Refuse to overwrite a run, and to resume one with settings that would change its trajectory."""
    folder = Path(config.run.dir)
    saved = folder / "config.toml"
    if not resume and saved.exists():
        raise ConfigError(
            f"run.dir = {str(folder)!r} already holds a run; continue it with --resume, or choose another run.dir"
        )
    if not resume:
        return
    if not saved.exists():
        raise ConfigError(f"--resume: run.dir = {str(folder)!r} holds no run; start it without --resume")
    before = flatten(load_config(Config, str(saved), []))
    for key, (value, _) in flatten(config).items():
        if value != before[key][0] and not key.startswith(FREE_TO_CHANGE) and key != "run.dir":
            raise ConfigError(
                f"--resume: {key} is {value!r} now and was {before[key][0]!r} when {folder} was started; "
                "restore it, or start another run from the checkpoint with model.path and a new run.dir"
            )


# ---- command line ------------------------------------------------------------------------------------------------


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in ("--help", "-h"):
        parser.add_argument(flag, dest="help", action="store_true")
    parser.add_argument("--config")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--resume", action="store_true")
    flags, overrides = parser.parse_known_args(argv)
    if flags.help:
        print(USAGE + describe(Config()))
        return 0
    torch.set_flush_denormal(True)  # a denormal costs a hundred normal operations on a CPU
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    try:
        config = load_config(Config, flags.config, overrides)
        check(config, size, flags.resume)
    except ConfigError as error:
        time.sleep(1.0 if rank else 0.0)  # rank 0 speaks; torchrun ends the others before they repeat it
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    if flags.check:
        if rank == 0:
            print("config, data, graders and model folder are fine")
        return 0
    world = parallel.start(config.run.device, config.run.timeout_seconds)
    try:
        if world.is_main:
            folder = Path(config.run.dir)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "config.toml").write_text(dump_toml(config), encoding="utf-8")
        train(config, world, flags.resume)
        return 0
    except (ConfigError, NonFiniteError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2 if isinstance(error, ConfigError) else 1
    finally:
        parallel.stop(world)


MODELS = Path("models")
USAGE = """plainroll: on-policy RL of language models

usage: torchrun --nproc_per_node=N train.py [--config FILE.toml] [--section.key=value ...]

  --config FILE   settings from a TOML file; see configs/
  --check         validate config, data, graders and model folder, then exit
  --resume        continue the run in run.dir from its newest checkpoint
  --help          this text

Every key, its default and its meaning:
"""

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
