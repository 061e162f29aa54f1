"""The sides of training.py and gpu_training.py: one step on the same samples, by our trainer and by transformers."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from core import Example, SampleId, Span
from loss import LossConfig
from model import Model
from parallel import World
from sampling import SamplingConfig
from trainer import Trainer, TrainerConfig

LR, CLIP, CLIP_LOW, CLIP_HIGH = 1e-5, 1.0, 0.2, 0.28

Step = Callable[[int], tuple[float, float]]  # tokens of a micro-batch -> loss, norm of the gradient


def samples_of(lengths: Sequence[int], prompt: int, vocabulary: int) -> list[Example]:
    """Return responses of these lengths to learn from; every second one was better than its group."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for i, length in enumerate(lengths):
        ids = torch.randint(3, vocabulary, (prompt + length,), generator=generator).tolist()
        spans, old = (Span(0, length, 0),), [-float(torch.tensor(vocabulary).log())] * length
        made.append(Example(SampleId(0, i, 0), tuple(ids[:prompt]), ids[prompt:], spans, old, 0.5 * (-1) ** i))
    return made


def make_ours(model: Model, samples: list[Example], **options: Any) -> Step:
    """`options`: of the trainer, where they are not those that a run would have."""
    world = World(0, 1, model.embed.weight.device)
    loss, sampling = LossConfig(clip_low=CLIP_LOW, clip_high=CLIP_HIGH), SamplingConfig()
    settings = TrainerConfig(lr=LR, lr_warmup_updates=0, grad_clip=CLIP, **options)
    longest = max(e.num_sampled for e in samples)
    trainer = Trainer(model, settings, loss, sampling, world, longest, 1000)

    def step(budget: int) -> tuple[float, float]:
        trainer.config = replace(trainer.config, tokens_per_microbatch=budget)
        trainer.accumulate(samples)
        stats = trainer.update()
        return stats["loss"], stats["grad_norm"]

    return step


def padded_batches(samples: list[Example], budget: int) -> list[list[Example]]:
    """Return micro-batches of similar lengths: at most `budget` tokens, padding included."""
    batches: list[list[Example]] = []
    for example in sorted(samples, key=lambda e: -e.num_tokens):
        if not batches or (len(batches[-1]) + 1) * batches[-1][0].num_tokens > budget:
            batches.append([])
        batches[-1].append(example)
    return batches


def policy_loss(model: Any, batch: list[Example], device: torch.device) -> Tensor:
    """Return the sum of PPO's loss over the sampled tokens of a padded batch, whose prompts are equally long."""
    width, prompt = max(e.num_tokens for e in batch), len(batch[0].prompt_ids)
    ids, mask = torch.zeros(2, len(batch), width, dtype=torch.int64)
    old = torch.zeros(len(batch), width - prompt)
    for row, e in enumerate(batch):
        ids[row, : e.num_tokens], mask[row, : e.num_tokens] = torch.tensor([*e.prompt_ids, *e.token_ids]), 1
        old[row, : e.num_sampled] = torch.tensor(e.logprobs)
    advantages = torch.tensor([e.advantage for e in batch])[:, None]
    ids, mask, old, advantages = (x.to(device) for x in (ids, mask, old, advantages))
    logits = model(input_ids=ids, attention_mask=mask, logits_to_keep=width - prompt + 1, use_cache=False).logits
    logits = logits[:, :-1].float()
    logprobs = logits.gather(-1, ids[:, prompt:, None])[..., 0] - logits.logsumexp(-1)
    ratio = (logprobs - old).exp()
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * advantages)
    return (loss * mask[:, prompt:]).sum()


def make_transformers(theirs: Any, samples: list[Example], compiled: bool) -> Step:
    model: Any = torch.compile(theirs, dynamic=True) if compiled else theirs
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    count, device = sum(e.num_sampled for e in samples), next(theirs.parameters()).device

    def step(budget: int) -> tuple[float, float]:
        total = 0.0
        for batch in padded_batches(samples, budget):
            loss = policy_loss(model, batch, device) / count
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), CLIP).item()
        optimizer.step()
        optimizer.zero_grad()
        return total, norm

    return step
