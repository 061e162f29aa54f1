"""A small model made here: byte tokenizer, random weights, supervised steps on a built-in task's worked solutions.

The solutions have slips (a wrong digit now and then), so the model learns the procedure but not to be careful;
reinforcement then teaches care. Counted in steps, deterministic (on a GPU but for rounding),
written as a Hugging Face folder.
"""

import hashlib
import json
import os
import platform
import re
import shutil
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from tqdm import tqdm

import parallel
from checkpoint import load_tokenizer, save_model
from config import ConfigError, option
from core import Example, SampleId, Span, Tokenizer
from data import BUILT_IN
from envs.games import ENVIRONMENTS
from envs.player import transcript
from loss import LossConfig
from model import Model, parse_shape
from parallel import World
from policies.placement import assign_by_load
from sampling import SamplingConfig
from tasks import TASKS, is_held_out
from trainer import Trainer, TrainerConfig

END, PAD = "<|endoftext|>", "<|pad|>"  # AutoTokenizer would add the first to a qwen2 folder without it
SAY_SECONDS = 15.0
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@dataclass(frozen=True)
class WarmStartConfig:
    task: str = option("", f"built-in task that the small model learns ({', '.join(BUILT_IN)}); empty: data.train")
    steps: int = option(600, "supervised updates", min=0)
    batch_size: int = option(64, "worked solutions per supervised update, over all ranks", min=1, max=65536)
    lr: float = option(3e-3, "peak learning rate; it falls linearly to 0", above=0.0, max=1.0)
    slip: float = option(0.04, "probability that a digit of a worked solution is wrong", min=0.0, max=1.0)
    hidden_size: int = option(64, "width of the model", min=8, max=65536)
    num_layers: int = option(3, "layers of the model", min=1, max=1024)
    num_heads: int = option(4, "query heads", min=1, max=1024)
    num_kv_heads: int = option(2, "key and value heads", min=1, max=1024)
    max_positions: int = option(4096, "longest context of the model, in tokens", min=64, max=2**22)
    seed: int = option(0, "seed of weights and batches", min=0, max=2**63 - 1)


def ensure_model(config: WarmStartConfig, train: str, models: Path, world: World) -> Path:
    """Return the folder of the warm-started model; make it unless it exists for the same inputs. Collective."""
    task, folder = config.task or train, model_folder(config, train, models)
    if not parallel.broadcast_object(world, folder.exists()):
        if world.is_main:
            print(f"warm start: {config.steps} supervised steps on {task} -> {folder}", flush=True)
        make_model(config, task, folder, world)
    return folder


def model_folder(config: WarmStartConfig, train: str, models: Path) -> Path:
    """Return the folder for these inputs: the config, the task and the code that writes its solutions."""
    task = config.task or train
    if task not in BUILT_IN:
        raise ConfigError(
            f"model.path is empty, and a small model can only learn a built-in task ({', '.join(BUILT_IN)}), "
            f"not {task!r}; give a local Hugging Face folder as model.path, or name a built-in task as warm_start.task"
        )
    width, heads, kv_heads = config.hidden_size, config.num_heads, config.num_kv_heads
    if width % (2 * heads) or heads % kv_heads:
        raise ConfigError(
            f"warm_start: hidden_size {width} must be an even multiple of num_heads {heads}, and num_heads a multiple "
            f"of num_kv_heads {kv_heads}"
        )
    longest = max(sum(len(text) for text, _ in _solution(task, n, Random(n), 0.0)) for n in _numbers(task)) + 1
    if config.steps and config.max_positions < longest:
        raise ConfigError(
            f"warm_start.max_positions = {config.max_positions} is too small: the longest solution of {task} takes "
            f"{longest} tokens"
        )
    names = "warm_start.py", "tasks.py", "environments.py", "envs/games.py", "envs/player.py"
    code = b"".join((Path(__file__).parent / name).read_bytes() for name in names)
    inputs = json.dumps([asdict(replace(config, task=task)), hashlib.sha256(code).hexdigest()], sort_keys=True)
    return models / f"{task}-{hashlib.sha256(inputs.encode()).hexdigest()[:8]}"


def make_model(config: WarmStartConfig, task: str, folder: Path, world: World) -> None:
    """Train from random weights; write under another name, then rename to `folder`. Collective."""
    maker, node = parallel.broadcast_object(world, (os.getpid(), re.sub(r"[^\w.-]", "_", platform.node())))
    begin, end = f".part-{folder.name}-", f"@{node}"  # other machines may share the folder
    part = folder.with_name(f"{begin}{maker}{end}")
    if world.is_main:
        for other in folder.parent.glob(f"{begin}*{end}"):
            if not Path("/proc", other.name.removeprefix(begin).removesuffix(end)).exists():  # of a run that was killed
                shutil.rmtree(other)
        _write_source(config, part)
    parallel.barrier(world)
    tokenizer = load_tokenizer(part)
    model = _random_model(config, part).to(world.device)
    learning = TrainerConfig(lr=config.lr, lr_schedule="linear", lr_warmup_updates=20, beta2=0.99), LossConfig("sft")
    trainer = Trainer(model, *learning, SamplingConfig(), world, config.max_positions, config.steps)
    numbers = [n for n in _numbers(task) if not is_held_out(n)]
    bar = tqdm(range(config.steps), desc="warm start", disable=None if world.is_main else True, leave=False)
    start = said = time.perf_counter()
    for step in bar:
        batch = _examples(config, task, numbers, step, tokenizer)
        share = assign_by_load([e.num_tokens for e in batch], world.size)[world.rank]
        trainer.accumulate([batch[i] for i in share])  # no buffer: no rollout fills the batch
        stats = trainer.update()
        bar.set_postfix(loss=f"{stats['loss']:.3f}")
        if world.is_main and bar.disable and (now := time.perf_counter()) - said >= SAY_SECONDS:  # no terminal: a log
            said, left = now, tqdm.format_interval((now - start) / (step + 1) * (config.steps - step - 1))
            print(f"warm start: step {step + 1} of {config.steps}, loss {stats['loss']:.3f}, {left} left", flush=True)
    parallel.barrier(world)  # with no steps, others may still read `part`
    if world.is_main:
        save_model(part, model, part)
        if folder.exists():  # another run made the same model meanwhile
            shutil.rmtree(part)
        else:
            part.rename(folder)
    parallel.barrier(world)


def _write_source(config: WarmStartConfig, folder: Path) -> None:
    """Write the model's config, its generation config and the tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(str(folder))
    values = hf_config(config, tokenizer)
    generation = {"do_sample": True, **{key: values[key] for key in ("eos_token_id", "pad_token_id")}}
    (folder / "config.json").write_text(json.dumps(values, indent=2), encoding="utf-8")
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2), encoding="utf-8")


def hf_config(config: WarmStartConfig, tokenizer: Tokenizer) -> dict:
    """Return the Hugging Face config of the model: a small Qwen2."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": len(tokenizer),
        "hidden_size": config.hidden_size,
        "intermediate_size": 4 * config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "dtype": "float32",
    }


def byte_tokenizer() -> Any:
    """Return a tokenizer with one token per byte, so that the smallest model reads any text."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate([END, PAD, *alphabet])}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=END, pad_token=PAD)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _random_model(config: WarmStartConfig, folder: Path) -> Model:
    model = Model(parse_shape(json.loads((folder / "config.json").read_text()), str(folder)))
    generator = torch.Generator().manual_seed(config.seed)
    for name, tensor, _ in model.hf_tensors():
        if name.endswith(("norm.weight", ".bias")):
            tensor.fill_(name.endswith("norm.weight"))
        else:
            tensor.normal_(0.0, 0.07, generator=generator)
    return model


def _numbers(task: str) -> list[int]:
    return (TASKS[task] if task in TASKS else ENVIRONMENTS[task]).numbers()


def _solution(task: str, n: int, rng: Random, slip: float) -> list[tuple[str, bool]]:
    """Return the texts of a problem in order, the prompt first, each with whether the model is to write it."""
    if task in TASKS:
        of = TASKS[task]
        return [(of.prompt(n), False), (of.slip(of.solution(n), rng, slip), True)]
    return [(ENVIRONMENTS[task].row(n)["prompt"], False), *transcript(task, n, rng.getrandbits(32), slip)]


def _examples(config: WarmStartConfig, task: str, numbers: list[int], step: int, tokenizer: Tokenizer) -> list[Example]:
    """Return the worked solutions of a step, with slips."""
    rng, examples = Random(f"{config.seed} {step}"), []
    for i, n in enumerate(rng.choices(numbers, k=config.batch_size)):
        (prompt, _), *texts = _solution(task, n, rng, config.slip)
        ids, spans = list[int](), list[Span]()
        for text, is_written in texts:
            start = len(ids)
            ids += tokenizer.encode(text + END if is_written else text)
            spans += [Span(start, len(ids), 0)] if is_written else []
        examples.append(Example(SampleId(0, i, 0), tuple(tokenizer.encode(prompt)), tuple(ids), tuple(spans), (), 1.0))
    return examples
