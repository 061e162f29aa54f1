"""What a run is told: all sections of the config, and the checks that refuse what cannot work before it starts."""

from dataclasses import dataclass, field
from pathlib import Path

import torch

import checkpoint
from config import ConfigError, flatten, load_config, option
from data import DataConfig, load_prompts
from loss import LossConfig
from metrics import LogConfig, check_loggers
from model import check_split, parse_shape
from reward import RewardConfig, check_grader, try_graders
from rollout import RolloutConfig, num_pages_for
from sampling import SamplingConfig
from scheduler import SchedulerConfig
from trainer import TrainerConfig
from warm_start import WarmStartConfig, byte_tokenizer, hf_config, model_folder

MODELS = Path("models")  # where warm-started models are kept


@dataclass(frozen=True)
class RunConfig:
    dir: str = option("runs/tiny", "run folder: records, transcripts, checkpoints")
    steps: int = option(150, "steps (updates of the policy) of the whole run", min=0)
    seed: int = option(0, "seed of sampling and of the order of prompts", min=0)
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


# ---- checks before any rank starts to work -----------------------------------------------------------------------


def model_dtype(config: Config, device_type: str) -> torch.dtype:
    name = config.model.dtype
    if name == "auto":
        name = "bfloat16" if device_type == "cuda" else "float32"
    return getattr(torch, name)


def check(config: Config, world_size: int, resume: bool, is_main: bool) -> None:
    """Raise ConfigError on anything that would fail later: combinations, data, graders, model folder, run folder."""
    c = config
    tp = c.rollout.tensor_parallel
    if world_size % tp:
        raise ConfigError(
            f"rollout.tensor_parallel = {tp} does not divide the {world_size} ranks; possible here: "
            f"{[n for n in (1, 2, 4, 8) if world_size % n == 0]}"
        )
    if c.scheduler.num_prompts % (world_size // tp):
        replicas = f"{world_size // tp} replicas of {tp} ranks" if tp > 1 else f"{world_size} ranks"
        near = max(c.scheduler.num_prompts // (world_size // tp), 1) * (world_size // tp)
        raise ConfigError(
            f"scheduler.num_prompts = {c.scheduler.num_prompts} is not a multiple of the {replicas}; "
            f"take {near} prompts, or another --nproc_per_node"
        )
    if c.run.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "run.device = cuda, but torch sees no GPU; take run.device = auto, or install torch with CUDA"
        )
    check_scheduler(c.scheduler, tp)
    if c.loss.name == "sft":
        raise ConfigError("loss.name = sft ignores rewards and is for the warm start; take ppo, gspo or cispo")
    if c.trainer.updates_per_step > c.scheduler.num_prompts:
        raise ConfigError(
            f"trainer.updates_per_step = {c.trainer.updates_per_step} is over scheduler.num_prompts = "
            f"{c.scheduler.num_prompts}; an update needs a prompt"
        )
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
        if len(tokenizer) > shape.vocab_size:
            raise ConfigError(
                f"{folder}: the tokenizer has {len(tokenizer)} tokens, the model only {shape.vocab_size} (vocab_size); "
                "copy the tokenizer that belongs to the model"
            )
    else:
        tokenizer = byte_tokenizer()
        shape = parse_shape(hf_config(c.warm_start, tokenizer), "warm_start")
    check_split(shape, tp)
    longest = c.rollout.max_prompt_tokens + c.rollout.max_response_tokens
    if longest > shape.max_positions:
        raise ConfigError(
            f"rollout.max_prompt_tokens + rollout.max_response_tokens = {longest} is over the model's context of "
            f"{shape.max_positions} tokens; lower rollout.max_response_tokens"
        )
    num_pages_for(c.rollout, shape, model_dtype(config, device.type), device)
    prompts, held_out = load_prompts(c.data, tokenizer, c.rollout.max_prompt_tokens)
    first = {p.task: p.where for p in reversed(prompts + held_out)}
    for task, where in sorted(first.items()):
        try:
            check_grader(task)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
    if is_main:
        try_graders(c.reward, first)
    if len(prompts) < c.scheduler.num_prompts:
        raise ConfigError(
            f"data.train has {len(prompts)} prompts, fewer than scheduler.num_prompts = {c.scheduler.num_prompts}; "
            "lower scheduler.num_prompts"
        )


def check_scheduler(c: SchedulerConfig, tensor_parallel: int) -> None:
    """Refuse combinations of which one half would do nothing, or that ranks could not agree on."""
    if c.window_seconds and tensor_parallel > 1:
        raise ConfigError(
            f"scheduler.window_seconds = {c.window_seconds}: the {tensor_parallel} ranks of a replica must end windows "
            "after the same step; take scheduler.window_iterations (and window_seconds = 0), or tensor_parallel = 1"
        )
    if c.audit and (c.policy == "synchronous" or c.eta_prompts == c.eta_responses == 1):
        raise ConfigError(
            f"scheduler.audit = {c.audit}: without a race nothing is left out; take scheduler.policy = tail_batching "
            "with eta_prompts or eta_responses over 1, or audit = 0"
        )
    if c.dynamic_sampling and c.policy == "tail_batching" and c.max_draws < c.eta_prompts:
        raise ConfigError(
            f"scheduler.max_draws = {c.max_draws} is under scheduler.eta_prompts = {c.eta_prompts}, which a round "
            "launches to begin with; raise it"
        )


FREE_TO_CHANGE = (
    "run.steps",
    "run.eval_every",
    "run.checkpoint_every",
    "run.keep_checkpoints",
    "run.timeout_seconds",
    "run.dump_rollouts",
    "run.dir",
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
    if not saved.exists():
        return  # with --resume too: what restarts a run gives it one command line for the first start and the others
    before = flatten(load_config(Config, str(saved), []))
    for key, (value, _) in flatten(config).items():
        is_free = key in FREE_TO_CHANGE or key.startswith("log.")
        if key == "run.steps" and config.trainer.lr_schedule != "constant":
            is_free = False  # the schedule ends with the run
        if value != before[key][0] and not is_free:
            raise ConfigError(
                f"--resume: {key} is {value!r} now and was {before[key][0]!r} when {folder} was started; "
                "restore it, or start another run from the checkpoint with model.path and a new run.dir"
            )
