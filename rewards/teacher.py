"""A teacher: a model that says how likely each token of a student's response is. (on-policy distillation)

It reads what the student wrote, when that is trained: a forward of each micro-batch, before the gradients.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

import checkpoint
from config import ConfigError, option
from core import ModelShape, Tokenizer
from model import parse_shape
from rewards.offload import OffloadedModel, check_room, least_bytes
from sampling import SamplingConfig

ROWS = 256  # tokens whose logits are there together


@dataclass(frozen=True)
class DistillConfig:
    teacher: str = option("", "local Hugging Face folder of a causal model with the tokens of the student; empty: none")
    top_k: int = option(
        0,
        "tokens that the teacher finds likeliest, over which the reverse KL is taken in full, with all others as one; "
        "0: its estimate by the sampled token, as an advantage",
        min=0,
    )
    coef: float = option(1.0, "weight of the reverse KL to the teacher", above=0.0, max=1e6)
    reward_coef: float = option(
        0.0, "weight of the rewards' advantages beside it; 0: the teacher alone", min=0.0, max=1e6
    )
    memory_gib: float = option(
        0.0,
        "device memory of the teacher in GiB, kept; layers beyond it stream from the host; 0: free memory, given back "
        "before each gradient (on CPU: all)",
        min=0.0,
        max=1e5,
    )


class Teacher(OffloadedModel):
    """The weights of a teacher and its forward."""

    def __init__(
        self,
        config: DistillConfig,
        vocab_size: int,
        sampling: SamplingConfig,
        device: torch.device,
        dtype: torch.dtype,
    ):
        """`vocab_size`: the student's."""
        super().__init__(checkpoint.load_model(config.teacher, torch.device("cpu"), dtype), device, config.memory_gib)
        self.config, self.vocab_size, self.scale = config, vocab_size, sampling.scale
        self.fingerprint = checkpoint.fingerprint(checkpoint.check_model(config.teacher)[1])
        self.about = f"teacher {config.teacher}: {len(self.layers)} layers, read before each gradient"

    @torch.inference_mode()
    def __call__(
        self, texts: Sequence[Sequence[int]], places: Sequence[int], targets: Sequence[int]
    ) -> tuple[array, array]:
        """Return log-probs of the tokens after `places` of the texts, and the ids that they belong to, row by row.

        With `top_k` those of the k likeliest tokens, else of `targets` [n] and no ids. The distribution is over the
        student's vocabulary, at the temperature of sampling; top-k, top-p and min-p of sampling do not cut it.
        """
        self.place(sum(map(len, texts)))
        logprobs, ids = array("f"), array("i")
        own = torch.tensor(targets, device=self.device)
        for rows, drawn in zip(self.hidden(texts, places).split(ROWS), own.split(ROWS), strict=True):
            logits = F.linear(rows, self.model.head_weight)[:, : self.vocab_size].float() / self.scale
            found = logits.log_softmax(-1)
            if self.config.top_k:
                found, likeliest = found.topk(self.config.top_k)
                ids.frombytes(likeliest.int().cpu().numpy().tobytes())
            else:
                found = found.gather(-1, drawn[:, None])
            logprobs.frombytes(found.cpu().numpy().tobytes())
        return logprobs, ids


# ---- checks ------------------------------------------------------------------------------------------------------


def shape_of(config: DistillConfig) -> ModelShape:
    """Return the teacher's shape, by its config.json alone."""
    where = f"{config.teacher}/config.json"
    return parse_shape(checkpoint.read_config(config.teacher, "distill.teacher"), where)


def planned_bytes(config: DistillConfig, dtype: torch.dtype, tokens: int) -> dict[str, Any]:
    """Return what a teacher holds on a device all the time, and what a forward of so many tokens adds."""
    if not config.teacher:
        return {}
    shape = shape_of(config)
    fixed, forward = least_bytes(shape, dtype, tokens)
    logits = ROWS * shape.vocab_size * (dtype.itemsize + 3 * 4)  # scaled and normalised in fp32
    if config.memory_gib:
        return {"teacher": config.memory_gib * 2**30, "teaching": logits}
    return {"teacher": fixed, "teaching": forward + logits}


def check_teacher(
    config: DistillConfig, shape: ModelShape, tokenizer: Tokenizer, dtype: torch.dtype, longest: int, tokens: int
) -> None:
    """Raise ConfigError for a teacher that cannot read what a student of this shape and tokenizer writes.

    `longest`: tokens of a prompt and its response; `tokens`: of a forward.
    """
    if not config.teacher:
        if config != DistillConfig():
            raise ConfigError("[distill] has no effect without distill.teacher; give a local Hugging Face folder")
        return
    theirs, _ = checkpoint.check_model(config.teacher, "distill.teacher")
    ours, known = tokenizer.get_vocab(), checkpoint.load_tokenizer(config.teacher).get_vocab()
    if ours != known:
        token = min(ours.items() ^ known.items(), key=lambda item: (item[1], item[0]))[0]
        raise ConfigError(
            f"distill.teacher = {config.teacher!r} has other tokens than the student: {token!r} is "
            f"{known.get(token, 'no token')} there and {ours.get(token, 'no token')} here; give a model with the "
            "student's tokenizer"
        )
    if theirs.vocab_size < shape.vocab_size:
        raise ConfigError(
            f"distill.teacher = {config.teacher!r} has logits for {theirs.vocab_size} tokens, the student draws from "
            f"{shape.vocab_size} (vocab_size of config.json); give a model with as many"
        )
    if config.top_k > shape.vocab_size:
        raise ConfigError(f"distill.top_k = {config.top_k} is over the vocabulary of {shape.vocab_size}; lower it")
    if theirs.max_positions < longest:
        raise ConfigError(
            f"distill.teacher = {config.teacher!r} has a context of {theirs.max_positions} tokens, but prompt and "
            f"response may have {longest}; lower rollout.max_response_tokens, or give another teacher"
        )
    check_room("distill.memory_gib", config.memory_gib, theirs, dtype, tokens, "trainer.tokens_per_microbatch")
