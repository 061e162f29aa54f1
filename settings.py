"""The settings of a run: all sections of the config, and the checks that refuse a run which would fail later."""

import math
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

import checkpoint
from config import Auto, ConfigError, flatten, load_config, option, toml_text
from core import ModelShape, Prompt, Tokenizer
from data import DUMP, DataConfig, load_prompts, notes_on
from engine import gradients, native
from engine.cpu import can_pack
from engine.graphs import row_counts
from engine.memory import CPU_KV_BYTES, cache_of, num_pages_for
from environments import ENVIRONMENTS, EnvConfig, check_environment
from envs.chat import Reader, turn_end
from envs.latency import Latency
from envs.player import player_named
from envs.pool import TRIES, try_environments
from envs.trial import tried
from loss import ADVANTAGES, BATCH_WIDE, OF_RATIO, OWN_OPTIONS, PROXIMAL, LossConfig
from metrics import LogConfig, check_loggers, read_records
from model import can_split, check_split, parse_shape
from overlap.phases import GroupConfig
from parallel import World, check_group_size, gather_objects, group_sizes, own_device, own_node_size
from policies.drafts import SOURCES, DraftsConfig
from policies.flow import OverlapConfig, check_overlap
from policies.memory_plan import ENOUGH, GIB, Changes, Demand, Plan, plans, remedy
from policies.planner import PlannerConfig, refuse_within_round
from policies.scale_down import StreamConfig, half, refuse_dynamic_sampling, replicas_together
from policies.step_times import PROFILE_NAME, Profile, load_profile
from reward import RewardConfig, by_grader
from rewards import sandbox
from rewards.box import box_paths
from rewards.graders import GRADERS, TASK_OF_JUDGE, check_rewards
from rewards.judge import JudgeConfig, check_judge
from rewards.pool import try_graders
from rewards.remote import is_address
from rewards.teacher import DistillConfig, check_teacher, planned_bytes
from rollout import RolloutConfig
from sampling import SamplingConfig
from scheduler import POLICIES, SchedulerConfig
from trainer import TrainerConfig
from warm_start import WarmStartConfig, byte_tokenizer, hf_config, model_folder
from weights.lora import check_lora, count

OTHERWISE = "a smaller model, shorter responses, more ranks or adapters (trainer.lora.rank)"  # where no settings help
MOST_LR, LARGE = 1e-5, 3e8  # learning rate that is said to be high for a model of so many weights
MODELS = Path("models")  # folder of warm-started models


@dataclass(frozen=True)
class RunConfig:
    dir: str = option("runs/tiny", "run folder: records, transcripts, checkpoints")
    steps: int = option(150, "steps (updates of the policy) of the whole run", min=0)
    seed: int = option(0, "seed of sampling and of the order of prompts", min=0)
    device: str = option("auto", "auto (GPU if there is one), cpu or cuda", choices=("auto", "cpu", "cuda"))
    device_gib: float = option(
        0.0,
        "GPU memory that a rank plans with, in GiB; 0: all that it has; --check plans so without a GPU too",
        min=0.0,
        max=1e5,
    )
    timeout_seconds: float = option(600.0, "longest wait for another rank", above=0.0, max=1e7)
    eval_every: int = option(25, "steps between evaluations; 0: only before and after", min=0)
    eval_samples: int = option(4, "responses per held-out prompt (the k of avg@k and pass@k)", min=1, max=4096)
    checkpoint_every: int = option(25, "steps between checkpoints; 0: only at the end", min=0)
    keep_checkpoints: int = option(2, "newest checkpoints that are kept", min=1)
    keep_best: bool = option(
        True,
        "keep the checkpoint of the best evaluation (avg@k), too, as checkpoints/best, if it is better than the model "
        "of the start; one is written for it where none is due, unless checkpoint_every = 0",
    )
    dump_rollouts: bool = option(False, "write every trained sample to rollouts/step_N.jsonl in the run folder")
    replay: str = option("", "train on the rollouts/ folder of an earlier run instead of generating")

    def evaluates(self, step: int) -> bool:
        """Whether there is an evaluation after a step."""
        return step == self.steps or (self.eval_every > 0 and step % self.eval_every == 0)

    def saves(self, step: int, best: int = -1) -> bool:
        """Whether there is a checkpoint after a step. `best`: the step of the best evaluation."""
        return step == self.steps or (self.checkpoint_every > 0 and (step % self.checkpoint_every == 0 or step == best))


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
    env: EnvConfig = field(default_factory=EnvConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    drafts: DraftsConfig = field(default_factory=DraftsConfig)
    planner: PlannerConfig = field(default_factory=PlannerConfig)
    overlap: OverlapConfig = field(default_factory=OverlapConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    stream: StreamConfig = field(default_factory=StreamConfig)
    group: GroupConfig = field(default_factory=GroupConfig)
    log: LogConfig = field(default_factory=LogConfig)

    @property
    def trains_older(self) -> bool:
        """Whether samples may be of older weights than those of their step, or of another run's."""
        return bool(self.overlap.depth or self.run.replay)


def load_run(path: str | None, overrides: Sequence[str]) -> Config:
    """Return the settings of a file and a command line, whose model.path takes the place of the file's [warm_start].

    Raises ConfigError.
    """
    config, own = load_config(Config, path, overrides), load_config(Config, None, overrides)
    return replace(config, warm_start=own.warm_start) if own.model.path else config


# ---- checks before any rank starts to work -----------------------------------------------------------------------


def model_dtype(config: Config, device_type: str) -> torch.dtype:
    auto = "bfloat16" if device_type == "cuda" else "float32"
    return getattr(torch, auto if config.model.dtype == "auto" else config.model.dtype)


def model_source(config: Config) -> Path:
    """Return the folder of the model that a run starts from; a warm-started one may not exist yet."""
    return Path(config.model.path) if config.model.path else model_folder(config.warm_start, config.data.train, MODELS)


def planned_device(config: Config) -> torch.device:
    """Return the device to plan for, which this machine need not have."""
    if config.run.device_gib and config.run.device != "cpu" and not torch.cuda.is_available():
        return torch.device("cuda")
    return own_device(config.run.device)


def trains(config: Config) -> bool:
    """Whether ranks hold what training needs. A run without steps does only where its weights come from masters."""
    return config.run.steps > 0 or config.trainer.shard > 1


def check_sharers(c: Config) -> None:
    """Refuse settings by which KV pages would take memory of a GPU that others need."""
    if c.group.server and not (c.rollout.kv_gib or c.run.device_gib):
        raise ConfigError(
            f"group.server = {c.group.server!r}: KV pages would take the rest of the GPU, but processes of other jobs "
            "keep some of it (contexts, communicators, rows); give rollout.kv_gib, or run.device_gib less than the GPU "
            "has"
        )
    if c.judge.path and not c.judge.memory_gib and (c.overlap.train_ranks or not trains(c)):
        raise ConfigError(
            "judge.memory_gib = 0 has a judge take what training leaves free, but here ranks decode that do not train, "
            "and KV pages take that; give judge.memory_gib"
        )


def memory_plan(
    config: Config, shape: ModelShape, num_ranks: int, node_size: int, device: torch.device, outside: float = 0.0
) -> tuple[Plan, ...]:
    """Return the memory plan of each kind of rank, that of ranks that decode last.

    `outside`: bytes of the device that torch cannot have now. Raises ConfigError for weights that cannot be sharded.
    """
    if config.rollout.weights == "sharded" and config.trainer.shard == 1:
        raise ConfigError(
            "rollout.weights = sharded with trainer.shard = 1: every rank has all weights to train, and parts would be "
            "copies; take trainer.shard over 1, or rollout.weights = auto"
        )
    c, dtype, is_gpu = config, model_dtype(config, device.type), device.type == "cuda"
    trainer, cache, gpu_bytes = c.trainer.for_device(device.type), cache_of(c.rollout, shape, dtype), 0.0
    if is_gpu:
        own = torch.cuda.get_device_properties(device).total_memory if torch.cuda.is_available() else math.inf
        gpu_bytes = min(own, c.run.device_gib * GIB or math.inf)
    if is_gpu:
        check_sharers(c)
    possible = rollout_sizes(c, shape, num_ranks, node_size, elastic=True)
    tp_sizes = possible if c.planner.rule != "fixed" else [c.rollout.tensor_parallel]
    training = c.overlap.train_ranks or num_ranks
    tokens = max(trainer.tokens_per_microbatch, cache.longest)  # a longer sample goes alone
    groups = (num_ranks > 1) + 2 * (1 < trainer.shard < training) + len({*tp_sizes} - {1, num_ranks})
    return plans(
        Demand(
            shape,
            dtype.itemsize,
            cache,
            tokens=tokens,
            logits_tokens=trainer.tokens_per_logits,
            recompute=trainer.recompute == "on",
            num_ranks=num_ranks,
            shard=trainer.shard,
            offload=trainer.offload_optimizer,
            has_reference=bool(c.loss.kl_coef),
            trains=trains(c),
            **count(c.trainer.lora, shape),
            filters=c.sampling.truncates,
            entropy=bool(c.loss.entropy_coef),
            scales=c.sampling.temperature != 1.0,
            tensor_parallel=c.rollout.tensor_parallel,
            step_tokens=c.rollout.step_tokens,
            graphs=is_gpu * len(tp_sizes) * len(row_counts(cache.max_running)),
            communicators=is_gpu * groups,
            outside=outside,
            judge=_judge_bytes(c.judge, dtype) if is_gpu else 0.0,
            packed=c.rollout.prepack and not is_gpu and can_pack(dtype) and not native.multiplies_all(dtype),
            compiled=not is_gpu and gradients.compiles(shape.head_dim, dtype),
            **planned_bytes(c.distill, dtype, tokens),
            device=gpu_bytes,
            kv=c.rollout.kv_gib * GIB or (0 if is_gpu else CPU_KV_BYTES),
            layout="whole" if c.overlap.train_ranks else c.rollout.weights,  # ranks that only decode have no masters
        ),
        c.overlap.train_ranks,
    )


def _judge_bytes(c: JudgeConfig, dtype: torch.dtype) -> float:
    """Return what a judge holds all the time: its layers come in the rollout, when no activations are there."""
    if not c.path or c.memory_gib:
        return c.memory_gib * GIB * bool(c.path)
    shape, _ = checkpoint.check_model(c.path, "judge.path", rewards=True)
    return shape.vocab_size * shape.hidden_size * dtype.itemsize * (1 if shape.tied else 2)


def check_memory(
    config: Config, memory: Sequence[Plan], shape: ModelShape, num_ranks: int, node_size: int, device: torch.device
) -> None:
    """Raise ConfigError for a plan that cannot work, with the settings that would help."""
    for each in memory:
        if not each.fits:
            helps = find_remedy(config, memory, shape, num_ranks, node_size, device)
            pages = f", and {each.least_kv / GIB:.2f} for KV pages" * each.demand.decodes
            raise ConfigError(
                f"a GPU of {each.demand.device / GIB:.1f} GiB is too small: {each.worst} a {each.rank} needs "
                f"{each.wanted / GIB:.1f} GiB{pages}; "
                f"take {helps or OTHERWISE} (--check prints the plan)"
            )


def find_remedy(
    config: Config, memory: Sequence[Plan], shape: ModelShape, num_ranks: int, node_size: int, device: torch.device
) -> str:
    """Return settings that give a plan for a GPU room, and the room, as text; "" if there are none."""
    d, c, training = memory[0].demand, config.rollout, config.overlap.train_ranks
    pools = [n for n in (training << i for i in range(num_ranks.bit_length())) if 0 < n < num_ranks]
    shards = pools or [n for n in range(1, num_ranks + 1) if num_ranks % n == 0]
    sizes = rollout_sizes(config, shape, num_ranks, node_size, elastic=True)
    options: dict[str, list] = {  # the cheapest first
        "trainer.recompute": ["on"] * (not d.recompute),
        "trainer.tokens_per_logits": [1024] * (d.logits_tokens > 1024),
        "trainer.tokens_per_microbatch": [d.cache.longest] * (d.tokens > d.cache.longest),
        "rollout.step_tokens": [2048] * (d.step_tokens > 2048),
        "rollout.kv_gib": [0] * bool(d.kv),
        "trainer.shard": [n for n in shards if n > d.shard],
        "overlap.train_ranks": pools[1:],
        "rollout.tensor_parallel": [n for n in sizes if n > c.tensor_parallel],
        "trainer.offload_optimizer": [True] * (not d.offload),
        "rollout.max_running": [ENOUGH] * (c.max_running > ENOUGH),
        "rollout.weights": ["sharded"] * (c.weights == "whole"),
        "stream.policy": ["off"] * (config.stream.policy != "off"),  # which may forbid the others
    }
    if config.judge.path:  # is asked for its size once
        config = replace(config, judge=replace(config.judge, memory_gib=d.judge / GIB))

    def planned(changes: Changes) -> Sequence[Plan]:
        changed = config
        for key, value in changes.items():
            section, name = key.split(".")
            changed = replace(changed, **{section: replace(getattr(changed, section), **{name: value})})
        try:
            made = memory_plan(changed, shape, num_ranks, node_size, device, d.outside)
            if all(each.fits for each in made):
                check_settings(changed, num_ranks)
            return made
        except ConfigError:
            return ()

    found = remedy({key: values for key, values in options.items() if values}, planned)
    if not found:
        return ""
    texts = (f"{key} = {toml_text(value).strip(chr(34))}" for key, value in found[0].items())
    return f"{' and '.join(texts)}, which leaves pages for {found[1].sequences:.1f} of the longest sequences"


def check_device_gib(config: Config, device: torch.device) -> None:
    """Refuse memory of GPUs for a run on a CPU; `--check` there plans for GPUs."""
    if config.run.device_gib and device.type == "cpu":
        raise ConfigError(
            f"run.device_gib = {config.run.device_gib} is about GPUs, but the run is on a CPU; leave it out"
        )


def with_kv_memory(config: Config, shape: ModelShape, world: World) -> Config:
    """Return the settings with the KV memory that the plan leaves: the least of those that decode with equal pages.

    A rank that only trains gets pages for one sequence, which its engine gives back. Collective. Raises ConfigError
    when a rank has too little.
    """
    outside = 0.0
    if world.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(world.device)
        outside = total - free - torch.cuda.memory_reserved(world.device)
    check_device_gib(config, world.device)
    given = shape, world.size, world.node_size, world.device
    training, planned = config.overlap.train_ranks, memory_plan(config, *given, outside)
    everyone = gather_objects(world, planned[0 if world.rank < training else -1])
    for each in everyone:
        check_memory(config, [each], *given)
    kv = min(each.kv for each in everyone[training:]) if world.rank >= training else planned[0].kv_of_longest
    return replace(config, rollout=replace(config.rollout, kv_gib=kv / GIB))


def with_layout(config: Config, shape: ModelShape, num_ranks: int, node_size: int, device: torch.device) -> Config:
    """Return the settings with `rollout.weights` decided: whole or sharded. Raises ConfigError when it cannot be."""
    layout = memory_plan(config, shape, num_ranks, node_size, device)[-1].layout
    return replace(config, rollout=replace(config.rollout, weights=layout))


def rollout_sizes(config: Config, shape: ModelShape, num_ranks: int, node_size: int, elastic: bool) -> list[int]:
    """Return the tensor-parallel sizes that ranks and model allow; without `elastic` only `rollout.tensor_parallel`.

    Raises ConfigError, with the possible sizes, if that size does not divide ranks, machines or model.
    """
    own = config.rollout.tensor_parallel
    check_group_size(own, num_ranks, node_size)
    check_split(shape, own)
    return [n for n in group_sizes(num_ranks, node_size) if can_split(shape, n)] if elastic else [own]


def sizes_with_room(config: Config, shape: ModelShape, device: torch.device, sizes: Iterable[int]) -> list[int]:
    """Return those of the sizes whose pages hold one full sequence.

    Raises ConfigError if the pages of `rollout.tensor_parallel` do not.
    """
    found = []
    for size in sizes:
        try:
            num_pages_for(config.rollout, shape, model_dtype(config, device.type), device, size)
            found.append(size)
        except ConfigError:
            if size == config.rollout.tensor_parallel:
                raise
    return found


def profile_path(config: Config) -> Path:
    return Path(config.planner.profile or model_source(config) / PROFILE_NAME)


def settings_of(model: Path) -> Path | None:
    """Return the file of settings of the run whose checkpoint this folder is; None: it is no such folder."""
    place = Path(os.path.abspath(model))  # without .., and a link stays one
    settings = place.parent.parent / "config.toml"
    return settings if place.parent.name == "checkpoints" and settings.exists() else None


def profile_conditions(config: Config, shape: ModelShape, num_ranks: int, device: torch.device) -> dict[str, object]:
    """Return the conditions that a rollout profile depends on. A profile made under other conditions is refused."""
    return {
        "model": str(shape),
        "threads": torch.get_num_threads(),
        "prepack": config.rollout.prepack,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "dtype": str(model_dtype(config, device.type)).removeprefix("torch."),
        "ranks": num_ranks,
        "page_size": config.rollout.page_size,
    }


def rollout_profile(
    config: Config, shape: ModelShape, sizes: list[int], num_ranks: int, device: torch.device
) -> Profile | None:
    """Read the profile that the planner's rule needs, or the existing profile that it can use."""
    rule, path = config.planner.rule, profile_path(config)
    if rule == "fixed" or (rule == "paper" and not config.planner.profile and not path.exists()):
        return None
    return load_profile(path, profile_conditions(config, shape, num_ranks, device), sizes)


def check_run(config: Config, world_size: int, resume: bool, is_main: bool, reports: bool = False) -> None:
    """Raise ConfigError on anything that would fail later: combinations, memory, data, graders, folders.

    `reports`: print the memory plan, play environments, and say that all is fine.
    """
    device, node_size = planned_device(config), own_node_size(world_size)
    dtype = model_dtype(config, device.type)
    asked, config = config, with_split(config, world_size)
    check_settings(config, world_size)
    if not reports:
        check_device_gib(config, own_device(config.run.device))
    check_loggers(config.log)
    check_run_folder(asked, resume)  # a run saves its settings as they were asked for
    given = shape_of(config), world_size, node_size, device
    check_lora(config.trainer.lora, given[0])
    memory = memory_plan(config, *given)
    if reports and is_main:
        print("\n".join(each.table() for each in memory), flush=True)
    check_memory(config, memory, *given)
    decoding = memory[-1]
    if is_main and not decoding.has_room:
        helps = find_remedy(config, memory, *given) or OTHERWISE
        print(f"few sequences can decode together: KV pages hold {decoding.sequences:.1f} of the longest; take {helps}")
    numbers = decoding.demand.weights / dtype.itemsize
    trains_all = config.run.steps and config.loss.name != "sft" and not config.trainer.lora.rank
    if is_main and trains_all and config.trainer.lr > MOST_LR and numbers > LARGE:
        print(
            f"WARNING: trainer.lr = {config.trainer.lr:g} trains all {numbers / 1e9:.1f}e9 weights: so large a model "
            "may be lost in a few steps; 1e-6 is usual, or adapters (trainer.lora.rank)"
        )
    shape, tokenizer = check_source(config)
    check_teacher(config.distill, shape, tokenizer, dtype, decoding.demand.cache.longest, decoding.demand.tokens)
    planned = replace(config, rollout=replace(config.rollout, kv_gib=decoding.kv / GIB, weights=decoding.layout))
    sizes = rollout_sizes(config, shape, world_size, node_size, config.planner.rule != "fixed")
    sizes = sizes_with_room(planned, shape, device, sizes)
    if is_main and (device.type == "cpu" or torch.cuda.is_available()):
        rollout_profile(config, shape, sizes, world_size, device)
    check_data(config, tokenizer, dtype, is_main, plays=reports and is_main)
    if is_main:
        warn_of_open_end(config, tokenizer, shape.vocab_size)
    if reports and is_main and config.drafts.sources:
        rounds = "evaluations" if config.scheduler.dynamic_sampling else "long rounds and evaluations"
        rounds = "the endless rollout and evaluations" if config.overlap.depth else rounds
        print(f"drafts from {', '.join(config.drafts.sources)}: in {rounds}; where responses race there are none")
    if reports and is_main:
        ranks = "1 rank (--ranks=N checks for N)" if world_size == 1 else f"{world_size} ranks"
        print(f"config, data, graders and model folder are fine for {ranks}")


def check_settings(c: Config, world_size: int) -> None:
    """Raise ConfigError on values and combinations that need no file to be refused."""
    if not c.run.dir:
        raise ConfigError('run.dir = "" names no folder; give one, such as runs/mine')
    tp, prompts = c.rollout.tensor_parallel, c.scheduler.num_prompts
    check_group_size(tp, world_size, own_node_size(world_size))
    training = c.overlap.train_ranks or world_size
    if not isinstance(training, Auto) and training % c.trainer.shard:  # auto is decided, or refused below
        raise ConfigError(
            f"trainer.shard = {c.trainer.shard} does not divide the number of ranks that train, {training}; possible "
            f"here: {[n for n in range(1, training + 1) if training % n == 0]}"
        )
    check_warm_start(c)
    check_scheduler(c.scheduler)
    refuse_commas("trainer.lora.targets", c.trainer.lora.targets)
    refuse_commas("drafts.sources", c.drafts.sources)
    check_drafts(c)
    check_stream(c, world_size)
    check_endless(c, world_size)
    decoding = world_size - c.overlap.train_ranks
    if not c.overlap.depth and prompts % (replicas := decoding // tp):
        raise ConfigError(
            f"scheduler.num_prompts = {prompts} is not a multiple of the {replicas} replicas ({decoding} ranks / "
            f"tensor_parallel {tp}); take {max(prompts // replicas, 1) * replicas} prompts, or another number of ranks"
        )
    refuse_within_round(c.planner, c.stream.policy)
    check_group(c, world_size)
    if c.loss.name == "sft" and not c.run.replay:
        raise ConfigError(
            "loss.name = sft ignores rewards and is for the warm start, and for recorded texts (run.replay); take ppo "
            "or another loss"
        )
    check_loss(c.loss, c.trainer.updates_per_step)
    check_distill(c)
    if c.trainer.updates_per_step > prompts:
        raise ConfigError(
            f"trainer.updates_per_step = {c.trainer.updates_per_step} is over scheduler.num_prompts = {prompts}; an "
            "update needs a prompt"
        )
    if c.sampling.temperature == 0 and c.run.steps:
        raise ConfigError("sampling.temperature = 0 draws equal responses, which teach nothing; take 1.0")
    if c.scheduler.dynamic_sampling and c.loss.credit == "turn":
        raise ConfigError(
            "scheduler.dynamic_sampling drops groups whose responses earn alike, but with loss.credit = turn they may "
            "teach, if turns differ; take loss.credit = episode, or scheduler.dynamic_sampling = false"
        )
    if c.reward.overlong_buffer > c.rollout.max_response_tokens:
        raise ConfigError(
            f"reward.overlong_buffer = {c.reward.overlong_buffer} is over rollout.max_response_tokens = "
            f"{c.rollout.max_response_tokens}; lower it"
        )
    if c.run.replay and not Path(c.run.replay).is_dir():
        raise ConfigError(f"run.replay = {c.run.replay!r}: no such folder; give the rollouts/ folder of an earlier run")
    last = Path(c.run.replay, DUMP.format(c.run.steps))
    if c.run.replay and c.run.steps and not last.exists():
        raise ConfigError(f"run.replay: there is no {last}; lower run.steps to the number of dumped steps")


def shape_of(c: Config) -> ModelShape:
    """Return the shape of the model that the run starts from, by its config.json alone."""
    folder = model_source(c)
    if c.model.path or folder.exists():
        return parse_shape(checkpoint.read_config(folder), str(folder / "config.json"))
    return parse_shape(hf_config(c.warm_start, byte_tokenizer()), "warm_start")


def check_source(c: Config) -> tuple[ModelShape, Tokenizer]:
    """Return the shape and the tokenizer of the model that the run starts from. Raises ConfigError if it cannot."""
    folder = model_source(c)
    if c.model.path or folder.exists():
        shape, _ = checkpoint.check_model(folder)
        tokenizer = checkpoint.load_tokenizer(folder)
        checkpoint.eos_ids(folder, tokenizer, shape.vocab_size)
        if len(tokenizer) > shape.vocab_size:
            raise ConfigError(
                f"{folder}: the tokenizer has {len(tokenizer)} tokens, the model only {shape.vocab_size} (vocab_size); "
                "copy the tokenizer that belongs to the model"
            )
    else:
        tokenizer, shape = byte_tokenizer(), shape_of(c)
    longest = c.rollout.max_prompt_tokens + c.rollout.max_response_tokens
    if longest > shape.max_positions:
        raise ConfigError(
            f"rollout.max_prompt_tokens + rollout.max_response_tokens = {longest} is over the model's context of "
            f"{shape.max_positions} tokens; lower rollout.max_response_tokens"
        )
    return shape, tokenizer


def open_end(c: Config, tokenizer: Tokenizer, vocab_size: int) -> str:
    """Return the token by which a chat template ends the model's turn, if no response ends at it."""
    options = c.data.chat_for(tokenizer)
    if options is None or not c.model.path:
        return ""
    try:
        ends = turn_end(tokenizer, options)
    except Exception:  # a template may refuse turns of the model
        return ""
    text = tokenizer.decode(ends[:1])
    marks = {*getattr(tokenizer, "all_special_ids", ())}  # a line break is none: responses have many
    is_open = marks.intersection(ends[:1]) - checkpoint.eos_ids(c.model.path, tokenizer, vocab_size)
    return text if is_open and text not in c.rollout.stop else ""


def warn_of_open_end(c: Config, tokenizer: Tokenizer, vocab_size: int) -> None:
    if end := open_end(c, tokenizer, vocab_size):
        print(
            f"WARNING: the chat template ends a turn with {end!r}, which is no end token of the model: it would go on "
            f"behind its turns; take rollout.stop = [{toml_text(end)}]"
        )


def check_data(c: Config, tokenizer: Tokenizer, dtype: torch.dtype, is_main: bool, plays: bool) -> None:
    """Raise ConfigError on data that cannot be read or are too few, and on graders that do not work.

    `plays`: environments are played, too.
    """
    prompts, held_out = load_prompts(c.data, tokenizer, c.rollout.max_prompt_tokens)
    for note in notes_on(c.data, prompts, held_out) if is_main else ():
        print(note)
    everything = prompts + held_out
    first = dict.fromkeys(by_grader("reward.also", c.reward.also), everything[0])
    first |= {prompt.task: prompt for prompt in reversed(everything)}
    if TASK_OF_JUDGE in first:
        check_judge(c.judge, dtype)
    elif c.judge.path:
        raise ConfigError(
            f"judge.path = {c.judge.path!r}, but no data row has the task {TASK_OF_JUDGE}; take it as data.task"
        )
    elif c.judge != JudgeConfig():
        raise ConfigError(
            "[judge] has no effect without judge.path; give a local Hugging Face folder and rows with the task "
            f"{TASK_OF_JUDGE}, or leave [judge] out"
        )
    environments = sorted({prompt.env for prompt in everything if prompt.env})
    for name in environments:
        check_environment(name)
    if is_main:
        try_environments(c.reward, environments)
    check_environments(c, everything, tokenizer, plays)
    check_rewards(c.reward, everything)
    first.pop(TASK_OF_JUDGE, None)
    slow = {name: "remote" if is_address(name) else "timeout" for name in first if name not in GRADERS}
    for name, limit in slow.items():
        if (longest := getattr(c.reward, f"{limit}_seconds")) > c.run.timeout_seconds:
            raise ConfigError(
                f"reward.{limit}_seconds = {longest:g}: other ranks wait for a grading by {name!r} at most "
                f"run.timeout_seconds = {c.run.timeout_seconds:g}; raise that"
            )
    if is_main:  # an episode whose first turn is cut off has no rewards of turns
        more: dict[str, dict] = {name: {"turn_rewards": []} if row.env else {} for name, row in first.items()}
        try_graders(c.reward, {name: replace(row, extra=row.extra | more[name]) for name, row in first.items()})
        if box := box_of_programs("code" in first, environments):
            check_hidden(c, everything, box)
    if (found := len(prompts)) < c.scheduler.num_prompts:
        every, _ = load_prompts(replace(c.data, eval_prompts=0), tokenizer, c.rollout.max_prompt_tokens)
        left = len(every) - found
        told = f" (rows left out, as they equal held-out prompts: {left})" if left else ""
        advice = "give other held-out data (data.eval) or fewer data.eval_prompts"
        raise ConfigError(
            f"data.train has {found} prompts, fewer than scheduler.num_prompts = {c.scheduler.num_prompts}{told}; "
            f"{'lower scheduler.num_prompts' if found else advice}"
        )


def box_of_programs(are_graded: bool, environments: Iterable[str]) -> sandbox.Isolation | None:
    """Return how programs that the model writes are kept apart; None: there are none.

    `are_graded`: by the grader `code`. An environment of a user's file may run some, if there is a box for them.
    Raises SandboxError where those that are graded have none.
    """
    if are_graded:
        return sandbox.isolation()
    if any(name not in ENVIRONMENTS and not is_address(name) for name in environments):
        with suppress(sandbox.SandboxError):
            return sandbox.isolation()
    return None


def check_hidden(c: Config, prompts: Sequence[Prompt], box: sandbox.Isolation) -> None:
    """Raise ConfigError where the model's programs could read a run's data and responses in their box."""
    shown = box_paths(box.prefix)
    files = {re.sub(r"(:| row )\d+$", "", prompt.where): "the data" for prompt in prompts if prompt.where}
    for path, what in {c.run.dir: "the run (run.dir)", **files}.items():
        real = os.path.realpath(path)
        if folder := next((folder for folder in shown if real.startswith(f"{os.path.realpath(folder)}/")), ""):
            raise ConfigError(
                f"{real} is below {folder}, which the sandbox shows to programs: they could read answers there; move "
                f"{what} elsewhere, as to /data"
            )


def check_environments(c: Config, prompts: Sequence[Prompt], tokenizer: Tokenizer, plays: bool) -> None:
    """Raise ConfigError on settings that have no place beside environments.

    `plays`: play each at random, print what its episodes are like, and raise if it always fails.
    """
    names = {prompt.env for prompt in prompts if prompt.env}
    chat = c.data.chat_for(tokenizer) if names else None
    reader = Reader(tokenizer, c.env.max_reply_tokens, chat)
    if not names and c.env != EnvConfig():
        raise ConfigError("[env] has no effect: no data row has an environment; give data.env, or leave it out")
    if not names and c.loss.credit == "turn":
        raise ConfigError("loss.credit = turn has no effect: no data row has an environment; take credit = episode")
    others = [prompt for prompt in prompts if prompt.env and prompt.task != "env"]
    if others and c.loss.credit == "turn" and "env" not in by_grader("reward.also", c.reward.also):
        raise ConfigError(
            f"{others[0].where}: loss.credit = turn has no effect with the grader {others[0].task}: only env "
            'knows the rewards of turns; add it (reward.also = "env=1"), or take credit = episode'
        )
    if names and c.env.clock == "time" and (c.rollout.tensor_parallel > 1 or c.planner.rule != "fixed"):
        raise ConfigError(
            "env.clock = time has no place beside tensor parallelism: the ranks of a replica would get replies at "
            "different steps; take env.clock = steps"
        )
    if names and c.env.clock == "time" and c.group.server and c.group.tail_share:
        raise ConfigError(
            f"group.tail_share = {c.group.tail_share:g} has no place beside env.clock = time: episodes that wait for "
            "replies would begin again where they move; take env.clock = steps, or group.tail_share = 0"
        )
    if names and (longest := TRIES * c.env.step_seconds) > c.run.timeout_seconds:
        raise ConfigError(
            f"env.step_seconds = {c.env.step_seconds:g}: a turn that hangs is tried {TRIES} times, for {longest:g} s, "
            f"but other ranks wait at most run.timeout_seconds = {c.run.timeout_seconds:g}; raise that"
        )
    if told := [p for p in prompts if p.env and not c.data.chat and isinstance(p.extra.get("prompt"), list)]:
        raise ConfigError(
            f"{told[0].where}: the prompt is a list of messages, whose turns would not go on as a chat with "
            "data.chat = false; write it as text, or leave data.chat out"
        )
    Latency(c.env.latency, c.env.slow, c.env.stop)
    if c.env.barrier and (c.overlap.depth or c.scheduler.migrate or c.planner.rule != "fixed"):
        raise ConfigError(
            "env.barrier is for comparison only, with overlap.depth = 0, planner.rule = fixed and without "
            "scheduler.migrate, which all take sequences between two turns; leave it out"
        )
    if names and c.stream.policy != "off":
        raise ConfigError(
            f"stream.policy = {c.stream.policy} has no place beside environments ({', '.join(sorted(names))}): ranks "
            "that leave a round would take its episodes with them; leave it out"
        )
    for name in sorted(names) if plays else ():
        rows = [prompt.extra for prompt in prompts if prompt.env == name]
        trial = tried(name, rows, player_named("random", name), c.env, c.reward, reader, c.rollout.max_response_tokens)
        print(trial.table(c.env, c.rollout.max_response_tokens))
        if not trial.ended:
            raise ConfigError(f"environment {name} fails in every episode; correct it")


def check_warm_start(c: Config) -> None:
    """Refuse settings of a model that no run makes."""
    if c.model.path and (given := flatten(c.warm_start).items() - flatten(WarmStartConfig()).items()):
        key, (value, _) = min(given)
        raise ConfigError(
            f"warm_start.{key} = {toml_text(value)} has no effect: model.path names the model; leave one of them out"
        )


def check_loss(c: LossConfig, updates: int) -> None:
    """Refuse settings that the chosen loss does not read, or that do nothing. `updates`: in a step."""
    everything = set[str]().union(*OWN_OPTIONS.values())
    for key in sorted(everything - OWN_OPTIONS.get(c.name, everything)):
        if (value := getattr(c, key)) != getattr(LossConfig, key):
            readers = ", ".join(name for name, own in OWN_OPTIONS.items() if key in own)
            raise ConfigError(f"loss.{key} = {value} has no effect with loss.name = {c.name}; it is for {readers}")
    if c.credit == "turn" and c.advantage in BATCH_WIDE:
        raise ConfigError(
            f"loss.credit = turn compares within a group, but loss.advantage = {c.advantage} needs the whole batch; "
            "take another advantage, or credit = episode"
        )
    if c.name in PROXIMAL and c.old_logprobs == "rollout":
        raise ConfigError(
            f"loss.name = {c.name} with loss.old_logprobs = rollout weighs all samples alike; take ppo, or "
            "loss.old_logprobs = trainer"
        )

    is_weighted = c.name == "topr" and (c.topr_positive, c.topr_negative) != (1.0, 1.0)
    if c.name in OF_RATIO and c.old_logprobs == "trainer" and updates == 1 and not is_weighted:
        raise ConfigError(
            f"loss.name = {c.name} with loss.old_logprobs = trainer and trainer.updates_per_step = 1 has a ratio of 1, "
            "so that its bounds and weights do nothing; take loss.old_logprobs = rollout, or more updates"
        )


def check_distill(c: Config) -> None:
    """Refuse combinations that have no place beside a teacher, or no effect without rewards."""
    if not c.distill.teacher:
        return
    alone, nothing = not c.distill.reward_coef, "rewards teach nothing with distill.reward_coef = 0"
    equal = "groups of equal rewards teach as others do with distill.reward_coef = 0"
    for setting, is_given, reason in (
        (f"loss.name = {c.loss.name}", c.loss.name == "sft", "it looks at no advantage"),
        ("loss.credit = turn", alone and c.loss.credit == "turn", nothing),
        (f"loss.advantage = {c.loss.advantage}", alone and c.loss.advantage != LossConfig.advantage, nothing),
        ("scheduler.dynamic_sampling = true", alone and c.scheduler.dynamic_sampling, equal),
        ("data.curriculum = pass_rate", alone and c.data.curriculum != "off", equal),
    ):
        if is_given:
            raise ConfigError(f"distill.teacher has no place beside {setting}: {reason}; leave one of them out")


def check_scheduler(c: SchedulerConfig) -> None:
    """Refuse combinations of settings without effect."""
    used = POLICIES[c.policy](c).config
    for key in ("eta_prompts", "eta_responses"):
        if (value := getattr(c, key)) not in (getattr(used, key), getattr(SchedulerConfig, key)):
            raise ConfigError(
                f"scheduler.{key} = {value} has no effect with scheduler.policy = {c.policy}; take tail_batching, or "
                "leave it out"
            )
    if c.audit and used.eta_prompts == used.eta_responses == 1:
        raise ConfigError(
            f"scheduler.audit = {c.audit}: without a race there is nothing to audit; take scheduler.policy = "
            "tail_batching with eta_prompts or eta_responses over 1, or audit = 0"
        )
    if c.dynamic_sampling and c.policy == "tail_batching" and c.max_draws < c.eta_prompts:
        raise ConfigError(
            f"scheduler.max_draws = {c.max_draws} is under scheduler.eta_prompts = {c.eta_prompts}; raise it"
        )


def check_stream(c: Config, num_ranks: int) -> None:
    """Refuse stream training that would change the gradient, and ranks that can never be halved."""
    policy, sizes = f"stream.policy = {c.stream.policy}", [c.rollout.tensor_parallel]
    if c.stream.policy == "off":
        return
    if c.stream.first > c.stream.last:
        raise ConfigError(f"stream.first = {c.stream.first} is over stream.last = {c.stream.last}; lower it")
    if c.trainer.updates_per_step > 1:
        raise ConfigError(
            f"{policy} takes gradients with the weights that a round began with, but trainer.updates_per_step = "
            f"{c.trainer.updates_per_step} changes them in between; take 1, or stream.policy = off"
        )
    if c.loss.advantage in BATCH_WIDE:
        local = ", ".join(name for name in ADVANTAGES if name not in BATCH_WIDE)
        raise ConfigError(
            f"{policy} trains a group before others are complete, but loss.advantage = {c.loss.advantage} needs all "
            f"groups; take one of {local}, or stream.policy = off"
        )
    if c.loss.credit == "turn":
        raise ConfigError(f"{policy} knows the advantages of whole episodes only; take loss.credit = episode")
    refuse_dynamic_sampling(c.stream, c.scheduler.dynamic_sampling)
    if c.planner.rule != "fixed":
        sizes = group_sizes(num_ranks, own_node_size(num_ranks))
    if num_ranks > 1 and not any(half(num_ranks // n, replicas_together(c.trainer.shard, n)) for n in sizes):
        raise ConfigError(
            f"{policy} lets half of the replicas leave, but {num_ranks} ranks with rollout.tensor_parallel = "
            f"{sizes[0]} and trainer.shard = {c.trainer.shard} have no two halves of whole groups; take smaller "
            "groups, more ranks, or stream.policy = off"
        )


def check_endless(c: Config, world_size: int) -> None:
    """Refuse combinations that have no place in an endless rollout or on ranks apart."""
    policy = POLICIES[c.scheduler.policy](c.scheduler)
    check_overlap(c.overlap, policy, c.stream.policy, c.planner.rule, c.run.replay)
    check_pools(c, world_size)
    if c.overlap.depth and c.loss.name not in PROXIMAL and c.loss.old_logprobs == "trainer":
        raise ConfigError(
            f"overlap.depth = {c.overlap.depth:g} trains samples of older weights, but loss.name = {c.loss.name} with "
            "loss.old_logprobs = trainer takes them for samples of the newest; take loss.name = decoupled, or "
            "loss.old_logprobs = rollout (a loss of your own that corrects for it: loss.PROXIMAL)"
        )


def refuse_commas(key: str, names: Sequence[str]) -> None:
    """Refuse names that a comma joins: a list of texts is not split, as texts of rollout.stop may have commas."""
    parts = tuple(part.strip() for name in names for part in name.split(","))
    if len(parts) > len(names):
        raise ConfigError(
            f"{key} = {toml_text(tuple(names))}: commas do not part names; write '--{key}={toml_text(parts)}'"
        )


def check_drafts(c: Config) -> None:
    """Refuse sources of drafts that are none, and combinations in which a race or unequal ranks would use them."""
    given = f"drafts.sources = {toml_text(c.drafts.sources)}"
    if wrong := [name for name in c.drafts.sources if name not in SOURCES]:
        raise ConfigError(f"{given}: {wrong[0]!r} is not one of: {', '.join(SOURCES)}")
    if len({*c.drafts.sources}) < len(c.drafts.sources):
        raise ConfigError(f"{given} names a source twice; name each once")
    if not c.drafts.sources:
        if c.drafts != DraftsConfig():
            raise ConfigError(f"[drafts] has no effect without drafts.sources; name some of: {', '.join(SOURCES)}")
        return
    if not c.drafts.memory_mib and (kept := [name for name in ("old", "epoch") if name in c.drafts.sources]):
        raise ConfigError(
            f"drafts.memory_mib = 0 keeps no text of an earlier round, but {given} looks there for {kept[0]}; take 16"
        )
    others = [
        (
            f"overlap.clock = {c.overlap.clock} with overlap.depth = {c.overlap.depth:g}",
            c.overlap.depth and c.overlap.clock == "steps",
            "which groups an endless rollout trains is a race of engine steps",
        ),
        ("planner.within_round = true", c.planner.within_round, "ranks that come together know other texts"),
        ("overlap.train_ranks", c.overlap.train_ranks, "ranks that only train have no part in the exchange of texts"),
    ]
    if c.drafts.ahead:
        if "old" not in c.drafts.sources:
            raise ConfigError(f"drafts.ahead = true: nobody reads its texts with {given}; add old to them")
        given, size = "drafts.ahead = true", c.rollout.tensor_parallel
        alike = "ranks of a replica would stop at different steps"
        others += [
            (f"overlap.depth = {c.overlap.depth:g}", c.overlap.depth, "an endless rollout has no next round"),
            ("scheduler.dynamic_sampling = true", c.scheduler.dynamic_sampling, "every round is a race there"),
            (f"rollout.tensor_parallel = {size}", size > 1, alike),
            (f"planner.rule = {c.planner.rule}", c.planner.rule != "fixed", alike),
            (f"stream.policy = {c.stream.policy}", c.stream.policy != "off", "ranks that are free train there"),
            (f"group.tail_share = {c.group.tail_share:g}", c.group.tail_share, "ranks that are free leave there"),
            ("scheduler.migrate = true", c.scheduler.migrate, "ranks that are free take sequences from others there"),
        ]
    for setting, is_given, reason in others:
        if is_given:
            raise ConfigError(f"{given} has no place beside {setting}: {reason}; leave one of them out")


def check_group(c: Config, world_size: int) -> None:
    """Refuse combinations that a job in a group has no place for."""
    if not c.group.server:
        return  # alone the rest of the section has no effect: the same file serves in a group
    if c.overlap.depth:
        raise ConfigError(
            f"group.server = {c.group.server!r} has no place in an endless rollout (overlap.depth = "
            f"{c.overlap.depth:g}): it leaves no time in which others could have the device; take overlap.depth = 0"
        )
    tp, shard, decoding = c.rollout.tensor_parallel, c.trainer.shard, world_size - c.overlap.train_ranks
    is_spread = shard > 1 and not c.overlap.train_ranks and c.rollout.weights != "whole"
    for setting, is_given, reason in (
        (f"stream.policy = {c.stream.policy}", c.stream.policy != "off", "ranks that are free train there"),
        ("planner.within_round = true", c.planner.within_round, "it deals the tail to all ranks"),
        (f"judge.path = {c.judge.path!r}", c.judge.path, "its grading uses the device of ranks that have left"),
        (f"rollout.weights = {c.rollout.weights} over {shard} ranks", is_spread, "these come back together"),
        (f"rollout.tensor_parallel = {tp}", decoding == tp, f"{decoding} ranks are one replica, so none can leave"),
    ):
        if c.group.tail_share and is_given:
            raise ConfigError(
                f"group.tail_share = {c.group.tail_share:g} has no place beside {setting}: {reason}; take 0"
            )


def check_pools(c: Config, world_size: int) -> None:
    """Refuse pools of ranks that cannot be made."""
    n, tp, shard = c.overlap.train_ranks, c.rollout.tensor_parallel, c.trainer.shard
    if n >= world_size:
        raise ConfigError(f"overlap.train_ranks = {n} leaves none of {world_size} ranks to decode; take fewer")
    if n and (n % tp or (world_size - n) % tp):
        raise ConfigError(
            f"rollout.tensor_parallel = {tp} does not divide both pools of overlap.train_ranks = {n}: {n} of "
            f"{world_size} ranks train and {world_size - n} decode; take another of the two"
        )
    if n and shard not in (1, n):
        raise ConfigError(
            f"trainer.shard = {shard} with overlap.train_ranks = {n}: ranks that train make no smaller groups; take "
            f"1 (each has everything) or {n}"
        )
    if n and c.rollout.weights == "sharded":
        raise ConfigError(
            f"rollout.weights = sharded with overlap.train_ranks = {n}: ranks that decode have whole weights of their "
            "own; take rollout.weights = whole"
        )


def possible_splits(c: Config, num_ranks: int) -> list[int]:
    """Return the numbers of ranks that may train while the others decode."""
    found = []
    for n in range(1, num_ranks):
        with suppress(ConfigError):
            check_pools(replace(c, overlap=replace(c.overlap, train_ranks=n)), num_ranks)
            found.append(n)
    return found


def with_split(c: Config, num_ranks: int, chosen: int = 0) -> Config:
    """Return the settings with `overlap.train_ranks` = auto decided: the number that was chosen before, else a half.

    Raises ConfigError when these ranks have no two pools.
    """
    if not isinstance(c.overlap.train_ranks, Auto) or not c.overlap.depth:
        return c
    if not (possible := possible_splits(c, num_ranks)):
        raise ConfigError(
            f"overlap.train_ranks = auto: {num_ranks} ranks have no two pools with rollout.weights = "
            f"{c.rollout.weights}, rollout.tensor_parallel = {c.rollout.tensor_parallel} and trainer.shard = "
            f"{c.trainer.shard}; take whole weights, smaller groups, more ranks, or overlap.train_ranks = 0"
        )
    n = chosen if chosen in possible else possible[len(possible) // 2]
    return replace(c, overlap=replace(c.overlap, train_ranks=n))


# `--resume` takes other values of these: they change no trajectory; only run.steps does, in the last batches of an
# endless rollout and the last rounds of tail batching, which draw no more prompts than they will train. (Rows stay,
# whatever names data.graders adds.) The last three lines and group.tail_share change it by rounding only; as another
# number of ranks does, those of the rollout may decide who waits where rows or pages are short, and so which samples a
# race trains.
FREE_TO_CHANGE = (
    *(f"run.{key}" for key in ("steps", "eval_every", "checkpoint_every", "keep_checkpoints", "keep_best")),
    *("run.device_gib", "run.timeout_seconds", "run.dump_rollouts", "run.dir", "data.graders"),
    *(f"reward.{key}" for key in ("num_workers", "max_failures", "max_queue", "concurrency", "worker_gib")),
    *("reward.remote_retries", "reward.remote_concurrency"),
    *(f"env.{key}" for key in ("num_workers", "max_failures", "step_seconds")),
    *(f"rollout.{key}" for key in ("weights", "tensor_parallel", "kv_gib", "step_tokens", "max_running")),
    *("trainer.shard", "trainer.recompute", "trainer.offload_optimizer"),
    *("trainer.tokens_per_logits", "trainer.tokens_per_microbatch", "distill.memory_gib"),
)


def check_run_folder(config: Config, resume: bool) -> None:
    """Refuse to overwrite a run, and to resume one with settings that would change its trajectory."""
    folder = Path(config.run.dir)
    saved, checkpoints = folder / "config.toml", folder / "checkpoints"
    if checkpoints.exists() and not checkpoints.is_dir():
        raise ConfigError(f"{checkpoints} is not a folder; move it away, or choose another run.dir")
    if not resume and saved.exists():
        raise ConfigError(
            f"run.dir = {str(folder)!r} already holds a run; continue it with --resume (from Python: resume=True), or "
            "choose another run.dir"
        )
    if not saved.exists() and (left := checkpoint.list_checkpoints(folder)):
        raise ConfigError(
            f"run.dir = {str(folder)!r} holds {left[-1].name} but no config.toml, its run's settings; put that file "
            "back, or choose another run.dir"
        )
    if not saved.exists():
        return  # with --resume too: a launcher starts and restarts a run by one command line
    try:
        before = flatten(load_config(Config, str(saved), []))
    except ConfigError as error:
        raise ConfigError(f"--resume: {error}; correct the file, or start another run in a new run.dir") from None
    records = folder / "steps.jsonl"
    if not checkpoint.list_checkpoints(folder) and not (
        records.exists() and any(r["step"] for r in read_records(records))
    ):
        return  # no step is done, so the run may have other settings: the first ones may have been too large
    for key, (value, _) in flatten(config).items():
        is_free = key in FREE_TO_CHANGE or key.startswith(("log.", "planner.", "stream.", "group.", "drafts."))
        is_free |= key.startswith("warm_start.") and bool(config.model.path)  # earlier versions ignored them there
        is_free |= key == "distill.teacher" and bool(value) and bool(before[key][0])  # `job.restore` knows its weights
        is_free &= key != "run.steps" or config.trainer.lr_schedule == "constant"  # a schedule ends with the run
        # Between two batches all sequences leave the engine, and KV of older weights is not kept.
        is_free &= key not in ("run.eval_every", "run.checkpoint_every") or config.overlap.flight != "keep"
        if value != before[key][0] and not is_free:
            raise ConfigError(
                f"--resume: {key} is {value!r} now and was {before[key][0]!r} when {folder} was started; "
                "restore it, or start another run from the checkpoint with model.path and a new run.dir"
            )
