"""Gradients: packing, un-normalised sums, one division by the global count, one update.

`accumulate` may be called any number of times, with any share of the samples on any rank, before `update`
reduces, divides and steps: the result is the gradient of the plain, unpacked, single-process batch.
"""

import math
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import parallel
from attention import PackedAttention
from config import option
from core import Example, ModelShape
from engine.experts import no_counts, replay, routing_record
from engine.host import OnHost
from loss import LOSSES, LossConfig, Tokens, kl_to_reference, kl_to_teacher, weighted_sum
from model import Model
from parallel import World
from rewards.teacher import DistillConfig, Teacher
from sampling import SamplingConfig, score
from weights import sharding
from weights.lora import Adapters, LoraConfig


@dataclass(frozen=True)
class TrainerConfig:
    lr: float = option(1e-4, "peak learning rate of AdamW", min=0.0, max=1.0)
    lr_schedule: str = option(
        "constant", "after the warm-up: constant, or linear to 0 at the run's end", choices=("constant", "linear")
    )
    lr_warmup_updates: int = option(5, "updates over which the learning rate rises from 0 to lr", min=0)
    beta1: float = option(0.9, "AdamW beta1", min=0.0, max=0.9999)
    beta2: float = option(0.95, "AdamW beta2", min=0.0, max=0.99999)
    weight_decay: float = option(
        0.0, "AdamW weight decay of matrices and embeddings; norms and biases have none", min=0.0, max=1.0
    )
    grad_clip: float = option(1.0, "largest norm of the gradient; 0 is no clipping", min=0.0, max=1e6)
    updates_per_step: int = option(
        1, "split a step's prompts into this many parts, one update each (1 is strictly on-policy)", min=1
    )
    tokens_per_microbatch: int = option(
        8192,
        "prompt and response tokens of one forward and backward on one rank, at most (a longer sample goes alone)",
        min=1,
    )
    tokens_per_logits: int = option(
        0, "sampled tokens whose logits are held at once; more are recomputed; 0: 2048 on a GPU, 4096 on a CPU", min=0
    )
    shard: int = option(
        1, "neighbouring ranks that share masters, gradients and optimizer state (FSDP); 1: every rank has all", min=1
    )
    recompute: str = option(
        "auto",
        "on: keep only each layer's input for the backward pass, and compute the rest again; auto: on a GPU",
        choices=("auto", "on", "off"),
    )
    offload_optimizer: bool = option(
        False, "keep the optimizer's state, and weights without adapters, in host memory, except during the update"
    )
    lora: LoraConfig = field(default_factory=LoraConfig)

    def for_device(self, device_type: str) -> "TrainerConfig":
        """Return the settings with those chosen that depend on the device."""
        recompute, tokens = ("on", 2048) if device_type == "cuda" else ("off", 4096)
        recompute = recompute if self.recompute == "auto" else self.recompute
        return replace(self, recompute=recompute, tokens_per_logits=self.tokens_per_logits or tokens)


class NonFiniteError(RuntimeError):
    """Three updates in a row had a loss or gradient that is not a number."""


MOMENTS = ("exp_avg", "exp_avg_sq")  # of AdamW
TOKEN_MEANS = ("entropy", "clip_fraction", "kl", "teacher_kl")
SUMS = ("loss", "count", "tokens", *TOKEN_MEANS, "newest", "difference")  # newest: tokens of the weights of this step


class Trainer:
    """Owns optimizer state and gradient sums of one model replica; every rank holds the same weights.

    `model` is the very module that the engine decodes with. A bf16 one is trained through fp32 masters, kept here with
    fp32 gradient sums. With `shard` ranks to a shard group the masters are those of a second module, the learner, which
    lies over the group's ranks and computes in the model's dtype (torch's FSDP2); after an update `model` follows it,
    or is the learner itself, where the rollout's weights are sharded too. Weights of `model` that need no gradient stay
    as they are. With adapters (lora.py) these alone are trained, and the model's weights follow them.
    Gradients and optimizer state have their memory from the start, so that the rollout can be sized by the rest.
    """

    def __init__(
        self,
        model: Model,
        config: TrainerConfig,
        loss: LossConfig,
        sampling: SamplingConfig,
        world: World,
        max_response_tokens: int,
        total_updates: int,
        reference: Model | None = None,
        keeps_model: bool = True,
        teacher: Teacher | None = None,
    ):
        """`keeps_model`: the engine decodes with views of the whole model; else a sharded learner is all that stays.
        Then it gets its weights later if `model` is on the meta device."""
        config = config.for_device(world.device.type)
        self.dtype, self.config, self.sampling, self.world = model.dtype, config, sampling, world
        self.loss = loss.for_dtype(model.head_weight.dtype)
        self.max_response_tokens, self.total_updates = max_response_tokens, total_updates
        self.reference, self.teacher = reference, teacher
        self.shards, self.replicas = sharding.shard_groups(world, config.shard)
        if config.lora.rank:
            model.requires_grad_(False)
        self.learner = sharding.shard_model(model, self.shards) if config.shard > 1 else model
        self.model = model if keeps_model else self.learner  # where the engine takes its weights from
        named: dict[str, Tensor] = dict(self.model.named_parameters())
        self.params = list(named.values())
        self.learner.recompute = config.recompute == "on"
        self.masters: list[Tensor] = [
            master if master.dtype == torch.float32 or not master.requires_grad else master.detach().float()
            for master in self.learner.parameters()
        ]
        pairs = [(p, m) for p, m in zip(self.params, self.masters, strict=True) if p.requires_grad]
        self.names = [name for name, param in named.items() if param.requires_grad]  # of what is trained
        self.copies = [(param, master) for param, master in pairs if param is not master]
        self.adapters: Adapters | None = None
        self.bases: list[Tensor] = []  # copies of weights without adapters
        if config.lora.rank:
            self.adapters = Adapters(self.learner, config.lora, reference if config.shard == 1 else None)
            self.names, pairs = list(self.adapters.tensors), [(a, a) for a in self.adapters.tensors.values()]
            self.copies, self.bases = self.adapters.merged_in(self.params), self.adapters.copies
        self.trained = [master for _, master in pairs]
        self.gradients = [torch.zeros_like(master) for master in self.trained]  # sums: backward passes add in place
        for (param, master), gradient in zip(pairs, self.gradients, strict=True):
            master.grad = gradient
            if param is not master and config.shard == 1:
                param.register_post_accumulate_grad_hook(_add_to(gradient))
        self.optimizer = make_optimizer(self.trained, config)
        self.offloaded = self.released = OnHost(())  # optimizer state between updates; all that lasts, in a release
        self._offload()
        self.num_updates = self.bad_updates = 0  # bad: in a row
        self.seconds, self.tokens = 0.0, 0  # in `accumulate`, since they were taken
        self.sums = torch.zeros(len(SUMS), dtype=torch.float64, device=world.device)
        self.worst_diff, self.routing = self.sums.new_zeros(()), no_counts(model.shape, world.device)

    def lr_at(self, update: int) -> float:
        """Return the learning rate of an update, counted from 0: up to the peak in the warm-up's last, then down."""
        warm_up = max(self.config.lr_warmup_updates, 1)
        rise, fall = (update + 1) / warm_up, 1.0
        if self.config.lr_schedule == "linear":
            fall = (self.total_updates - update) / max(self.total_updates - warm_up + 1, 1)
        return self.config.lr * max(min(rise, fall, 1.0), 0.0)

    # ---- gradient sums ---------------------------------------------------------------------------------------

    def accumulate(self, examples: Sequence[Example], progress: Callable[[], None] = lambda: None) -> None:
        """Add the gradient sums of `examples`, this rank's share. No update. Collective in a shard group, else not."""
        start = time.perf_counter()
        idle, teaching = by_gradient(examples, self.loss, bool(self.teacher))
        with torch.no_grad(), sharding.gathered(self.learner):  # what teaches nothing is scored for the records
            self._add_all(idle, progress)
        self._add_all(teaching, progress)
        if self.world.device.type == "cuda":
            torch.cuda.synchronize()  # so that the time is that of the work
        self.seconds += time.perf_counter() - start
        self.tokens += sum(e.num_tokens for e in examples)

    def take_times(self) -> tuple[float, int]:
        """Return the seconds and tokens of this rank's gradients since the last call."""
        taken, self.seconds, self.tokens = (self.seconds, self.tokens), 0.0, 0
        return taken

    def _batches(self, examples: Sequence[Example]) -> list[list[Example]]:
        """Return micro-batches, as many on each rank of a shard group: every forward gathers weights from all.

        Examples without a sampled token, which teach nothing, are in none.
        """
        batches = pack([e for e in examples if e.num_sampled], self.config.tokens_per_microbatch)
        most = torch.tensor(len(batches), device=self.world.device)
        parallel.max_tensor(self.shards, most)
        return batches + [[] for _ in range(int(most) - len(batches))]

    def _add_all(self, examples: Sequence[Example], progress: Callable[[], None]) -> None:
        batches = self._batches(examples)
        for batch in taught(batches, self.teacher, progress) if self.teacher else batches:
            self._add_gradients(batch) if batch else take_part(self.learner, self.world.device)
            progress()

    def _add_gradients(self, batch: Sequence[Example]) -> None:
        device = self.world.device
        theirs, likely = (x.to(device) for x in taught_of(batch))
        logprobs, entropy = self._score(self.learner, batch, likely=likely)  # ..., [T]
        logprobs, others = logprobs[:, 0], logprobs[:, 1:]  # [T], [T, k]
        sample, lengths, advantages = (x.to(device) for x in told_of(batch))
        rollout, old = old_logprobs_of(batch, logprobs, self.loss)
        tokens = Tokens(logprobs, old, rollout, advantages, sample, lengths)
        added = kl = teacher_kl = torch.zeros_like(logprobs)
        if self.teacher:
            tokens, added, teacher_kl = distilled(tokens, others, theirs, self.teacher.config)
        values, clipped = LOSSES[self.loss.name](tokens, self.loss)
        values = values + added
        if self.reference is not None:
            with torch.no_grad():
                ref_logprobs, _ = self._score(self.reference, batch, inference=True)
            kl = kl_to_reference(logprobs, ref_logprobs)
            values = values + self.loss.kl_coef * kl
        if self.loss.entropy_coef:
            values = values - self.loss.entropy_coef * entropy
        total, count = weighted_sum(values, tokens, self.loss.normalisation, self.max_response_tokens)
        if torch.is_grad_enabled():
            total.backward()
        with torch.no_grad():
            # Tokens of older weights differ for another reason than that rollout and trainer disagree.
            newest = sampled_by(batch, self.num_updates // self.config.updates_per_step).to(device)
            difference = (logprobs - rollout).abs() * newest
            means = entropy, clipped, kl, teacher_kl
            parts = total, torch.tensor(count), *map(torch.sum, (lengths, *means, newest, difference))
            self.sums += torch.stack([part.detach().to(device).double() for part in parts])
            self.worst_diff = torch.maximum(self.worst_diff, difference.max().double())

    def _score(
        self, model: Model, batch: Sequence[Example], inference: bool = False, likely: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return log-probs (with gradient) and entropies of all sampled tokens of `batch`, [T] each.

        With ids of other tokens [T, k] their log-probs stand beside those of the sampled ones: [T, 1 + k].
        """
        token_ids, positions, predicts = (x.to(self.world.device) for x in join(batch))
        attend = PackedAttention([e.num_tokens for e in batch], self.world.device)
        choose = replay(model.shape, batch, self.routing if model is self.learner else None)
        hidden = model(token_ids, positions, attend, inference, choose)[predicts]  # [T, hidden_size]
        targets = token_ids[predicts + 1]
        if likely is not None:
            targets = torch.cat([targets[:, None], likely], 1)
        has_gradient, size = bool(self.loss.entropy_coef), self.config.tokens_per_logits
        return score_in_parts(model, hidden, targets, self.sampling, has_gradient, size)

    @torch.no_grad()
    def with_old_logprobs(
        self, examples: Sequence[Example], progress: Callable[[], None] = lambda: None
    ) -> list[Example]:
        """Return examples with the current policy's log-probs as the old ones, ahead of several updates.

        Those without a sampled token are left out. `progress` is called after each micro-batch. Collective in a shard
        group, else not.
        """
        done = []
        with sharding.gathered(self.learner):  # what this leaves whole would hide the update from the next forward
            for batch in chain.from_iterable(map(self._batches, by_gradient(examples, self.loss, bool(self.teacher)))):
                if not batch:
                    take_part(self.learner, self.world.device)
                    continue
                # In the batches of the gradient's forward, and by its operations but for matrix products, which may
                # round otherwise: the ratio of the first update is 1, but for rounding.
                logprobs, _ = self._score(self.learner, batch)
                parts = [array("f", part.tolist()) for part in logprobs.split([e.num_sampled for e in batch])]
                done += [replace(e, old_logprobs=part) for e, part in zip(batch, parts, strict=True)]
                progress()
        return done

    # ---- update ----------------------------------------------------------------------------------------------

    def update(self) -> dict[str, float]:
        """Reduce over ranks, divide once by the global count, clip, step. Collective.

        Returns the update's statistics. An update whose loss or gradient is not finite, or that has nothing to learn
        from, is skipped and says so under "skipped"; three non-finite ones in a row raise NonFiniteError.
        """
        gradients = [sharding.own_part(gradient) for gradient in self.gradients]
        parallel.sum_tensors(self.world if self.adapters else self.replicas, gradients)
        parallel.sum_tensors(self.world, [self.sums, self.routing])
        parallel.max_tensor(self.world, self.worst_diff)
        sums = dict(zip(SUMS, self.sums.tolist(), strict=True))
        count, tokens, newest = max(sums["count"], 1.0), max(sums["tokens"], 1.0), sums["newest"]
        torch._foreach_div_(gradients, count)
        norm = sharding.whole(torch.nn.utils.clip_grad_norm_(self.trained, self.config.grad_clip or math.inf)).item()
        stats = {
            "loss": sums["loss"] / count,
            **{name: sums[name] / tokens for name in TOKEN_MEANS} | routing_record(self.routing),
            "logprob_diff_mean": sums["difference"] / newest if newest else math.nan,
            "logprob_diff_max": self.worst_diff.item() if newest else math.nan,
            "grad_norm": norm,
            "lr": self.lr_at(self.num_updates),
            "trained_tokens": sums["tokens"],
            "skipped": "",
        }
        if not math.isfinite(stats["loss"]) or not math.isfinite(norm):
            stats["skipped"] = f"loss {stats['loss']}, gradient norm {norm}"
            self.bad_updates += 1
        elif sums["count"] == 0:
            stats["skipped"] = "no sample to learn from"
        else:
            self._step(stats["lr"])
            self.bad_updates = 0
        self.num_updates += 1
        for tensor in (*gradients, self.sums, self.worst_diff, self.routing):
            tensor.zero_()
        if self.bad_updates == 3:
            raise NonFiniteError(
                f"three updates in a row were not finite ({stats['skipped']}); lower trainer.lr, or look for rewards "
                "or weights that are not numbers"
            )
        return stats

    def _step(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        with self._optimizer_state():
            self.optimizer.step()
            self._follow()

    @torch.no_grad()
    def _follow(self) -> None:
        """Have the model follow what is trained. Collective in the shard group."""
        if self.adapters:
            self.adapters.merge()
        for param, master in self.copies:
            param.copy_(sharding.whole(master))  # one at a time: no second model is ever whole

    @contextmanager
    def _optimizer_state(self) -> Iterator[None]:
        """Have all on the device that an update needs while inside."""
        self.offloaded.bring_back()
        yield
        self._offload()

    def _offload(self) -> None:
        if self.config.offload_optimizer:
            self.offloaded = OnHost(map(sharding.own_part, (*self._moments(), *self.bases)))

    def _moments(self) -> list[Tensor]:
        return [state[name] for state in self.optimizer.state.values() for name in MOMENTS]

    # ---- state -----------------------------------------------------------------------------------------------

    def start_from_model(self) -> None:
        """Train from weights that the model has got only now."""
        if self.adapters:
            with self._optimizer_state():
                self.adapters.keep()

    def release(self) -> None:
        """Move to host memory all that lasts: weights, masters, gradient sums, optimizer state. `take_back` ends it.

        No collective. Views of the weights, such as an engine's shards, are empty meanwhile and valid again afterwards.
        """
        weights = [*self.params, *self.masters, *(self.reference.parameters() if self.reference else ())]
        state = *self.trained, *self.gradients, *self._moments(), *self.bases
        self.released = OnHost(map(sharding.own_part, (*weights, *state)))

    def take_back(self) -> None:
        self.released.bring_back()

    def state_dict(self) -> dict[str, int]:
        """Return the counts that go on from here."""
        steps = next((int(state["step"]) for state in self.optimizer.state.values()), 0)  # of all masters the same
        return {"num_updates": self.num_updates, "bad_updates": self.bad_updates, "optimizer_steps": steps}

    @contextmanager
    def saved_tensors(self) -> Iterator[dict[str, Tensor]]:
        """Give by name the tensors that go on beside the model: moments, and masters that hold more than it does."""
        with self._optimizer_state():
            tensors: dict[str, Tensor] = {}
            for name, master in zip(self.names, self.trained, strict=True):
                tensors |= {f"{key}.{name}": self.optimizer.state[master][key] for key in MOMENTS}
                if self.adapters or self.dtype != master.dtype:
                    tensors[f"master.{name}"] = master.detach()
            yield tensors

    def load_state_dict(self, state: dict[str, int], fill: Callable[[dict[str, Tensor]], None]) -> None:
        """Take over what `state_dict` returned; `fill` fills `saved_tensors`. The model has weights of then, or W0."""
        self.num_updates, self.bad_updates = state["num_updates"], state["bad_updates"]
        for moments in self.optimizer.state.values():
            moments["step"].fill_(state["optimizer_steps"])
        with self.saved_tensors() as tensors:
            fill(tensors)
            if self.adapters:
                self._follow()


def make_optimizer(trained: Sequence[Tensor], c: TrainerConfig) -> torch.optim.AdamW:
    """Return AdamW with all of its state."""
    matrices = {"params": [m for m in trained if m.dim() > 1], "weight_decay": c.weight_decay}
    others = {"params": [m for m in trained if m.dim() < 2], "weight_decay": 0.0}  # norms and biases
    optimizer = torch.optim.AdamW([matrices, others], lr=c.lr, betas=(c.beta1, c.beta2), fused=True)
    for master in trained:  # what its first step would make
        moments = {name: torch.zeros_like(master) for name in MOMENTS}
        optimizer.state[master] = {"step": torch.zeros((), device=master.device), **moments}
    return optimizer


def take_part(learner: Model, device: torch.device) -> None:
    """Take part in the shard group's forward with nothing of one's own and, where gradients are enabled, backward."""
    token = torch.zeros(1, dtype=torch.int64, device=device)
    zero = learner.logits(learner(token, token, PackedAttention([1], device))).mul(0.0).sum()
    if torch.is_grad_enabled():
        zero.backward()


def old_logprobs_of(batch: Sequence[Example], logprobs: Tensor, loss: LossConfig) -> tuple[Tensor, Tensor]:
    """Return what the rollout recorded and the denominator of the ratio, [T] each, for the current log-probs."""
    current = logprobs.detach()
    if loss.name == "sft":
        return current, current
    sampled = [x for e in batch for span in e.spans for x in e.logprobs[span.start : span.end]]
    rollout = torch.tensor(sampled, device=current.device)
    if loss.old_logprobs == "rollout":
        return rollout, rollout
    if batch[0].old_logprobs is None:  # a single update: the old policy is the current one
        return rollout, current
    return rollout, torch.tensor([x for e in batch for x in e.old_logprobs or ()], device=current.device)


def score_in_parts(
    model: Model, hidden: Tensor, targets: Tensor, sampling: SamplingConfig, entropy_gradient: bool, size: int
) -> tuple[Tensor, Tensor]:
    """Return `sampling.score` of the logits of `size` rows at a time; those of more than one part are not kept."""

    def score_part(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return score(model.logits(hidden), targets, sampling, entropy_gradient)

    if len(targets) <= size:
        return score_part(hidden, targets)
    parts = [
        checkpoint(score_part, h, t, use_reentrant=False)
        for h, t in zip(hidden.split(size), targets.split(size), strict=True)
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def told_of(batch: Sequence[Example]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sample of each sampled token [T], the sampled tokens of each sample [S], and advantages [T]."""
    lengths = torch.tensor([e.num_sampled for e in batch])
    spans = torch.tensor([len(span) for e in batch for span in e.spans])
    advantages = torch.tensor([a for e in batch for a in e.span_advantages]).repeat_interleave(spans)
    return torch.arange(len(batch)).repeat_interleave(lengths), lengths, advantages


def taught(batches: Sequence[Sequence[Example]], teacher: Teacher, progress: Callable[[], None]) -> list[list[Example]]:
    """Return micro-batches with what the teacher says of them: a forward for each. `progress` is called after each."""
    found = []
    for batch in batches:
        examples = list[Example]()
        if batch:
            token_ids, _, predicts = join(batch)
            texts = [[*e.prompt_ids, *e.token_ids] for e in batch]
            logprobs, ids = teacher(texts, predicts.tolist(), token_ids[predicts + 1].tolist())
            ends, width = accumulate(e.num_sampled for e in batch), teacher.config.top_k
            for e, end in zip(batch, ends, strict=True):
                own = slice((end - e.num_sampled) * max(width, 1), end * max(width, 1))
                examples.append(replace(e, teacher_logprobs=logprobs[own], teacher_ids=ids[own]))
        found.append(examples)
        progress()
    teacher.give_back()
    return found


def taught_of(batch: Sequence[Example]) -> tuple[Tensor, Tensor]:
    """Return log-probs and token ids of a teacher: [T, 1] and [T, 0] of sampled tokens, [T, k] and [T, k] of others."""
    count = sum(e.num_sampled for e in batch)
    logprobs = np.frombuffer(b"".join(array("f", e.teacher_logprobs) for e in batch), np.float32)
    ids = np.frombuffer(b"".join(array("i", e.teacher_ids) for e in batch), np.int32)
    return torch.tensor(logprobs.reshape(count, -1)), torch.tensor(ids.reshape(count, -1), dtype=torch.int64)


def distilled(t: Tokens, likely: Tensor, theirs: Tensor, aim: DistillConfig) -> tuple[Tokens, Tensor, Tensor]:
    """Return tokens whose advantages know the teacher, a loss beside the policy's [T], and the reverse KL to it [T].

    `likely`: log-probs of the tokens that the teacher finds likeliest; `theirs`: its own, else of the sampled tokens.

    The estimate by the sampled token is its advantage, for this token alone: a discount of 0, as GKD has no gradient
    through the sampling of later tokens. (Lu et al., On-Policy Distillation, Thinking Machines, 2025)
    """
    if aim.top_k:
        kl = kl_to_teacher(likely, theirs)
        return replace(t, advantages=aim.reward_coef * t.advantages), aim.coef * kl, kl
    kl = t.logprobs.detach() - theirs[:, 0]
    return replace(t, advantages=aim.reward_coef * t.advantages - aim.coef * kl), torch.zeros_like(kl), kl


def _add_to(gradient: Tensor) -> Callable[[Tensor], None]:
    def hook(param: Tensor) -> None:
        assert param.grad is not None, "torch has just made it"
        gradient.add_(param.grad)
        param.grad = None

    return hook


def sampled_by(batch: Sequence[Example], version: int) -> Tensor:
    """Return which of the sampled tokens this version of the weights drew, [T] bool."""
    spans = [span for e in batch for span in e.spans]
    lengths, flags = zip(*((len(span), span.version == version) for span in spans), strict=True)
    return torch.repeat_interleave(torch.tensor(flags), torch.tensor(lengths))


def join(batch: Sequence[Example]) -> tuple[Tensor, Tensor, Tensor]:
    """Return all tokens of `batch` in a row and their positions, and the place before each sampled token.

    [N], [N] and [T] int64, for N tokens with those of the prompts, T of them sampled.
    """
    token_ids = [t for e in batch for ids in (e.prompt_ids, e.token_ids) for t in ids]
    positions, predicts, start = [], [], 0
    for e in batch:
        first = start + len(e.prompt_ids) - 1  # it predicts the first response token
        predicts += [torch.arange(first + span.start, first + span.end) for span in e.spans]
        positions.append(torch.arange(e.num_tokens))
        start += e.num_tokens
    return torch.tensor(token_ids), torch.cat(positions), torch.cat(predicts)


def by_gradient(
    examples: Sequence[Example], loss: LossConfig, has_teacher: bool
) -> tuple[list[Example], list[Example]]:
    """Return the examples without a gradient and those with one: each part has micro-batches of its own."""
    parts: tuple[list[Example], list[Example]] = [], []
    for example in examples:
        parts[has_teacher or loss.teaches(example.span_advantages)].append(example)
    return parts


def work_of(trainer: Trainer, example: Example) -> float:
    """Return the multiplications of an example's forward pass, and of a backward pass, if it has a gradient."""
    _, teaching = by_gradient([example], trainer.loss, bool(trainer.teacher))
    forward = multiplications(trainer.model.shape, example.num_tokens, example.num_sampled)
    return (3 if teaching else 1) * forward


def multiplications(shape: ModelShape, num_tokens: int, num_sampled: int) -> int:
    """Return those of a forward pass: layers and causal attention for all tokens, the head for sampled ones."""
    heads, kv_heads = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    weights = shape.hidden_size * (2 * heads + 2 * kv_heads + 3 * shape.mlp_width + shape.num_experts)
    seen = sum(min(num_tokens, shape.window(i) or num_tokens) for i in range(shape.num_layers))
    return num_tokens * (shape.num_layers * weights + heads * seen) + num_sampled * shape.hidden_size * shape.vocab_size


def pack(examples: Sequence[Example], max_tokens: int) -> list[list[Example]]:
    """Return batches of at most `max_tokens` tokens, without padding: longest first, each where it first fits."""
    batches: list[list[Example]] = []
    room: list[int] = []
    for example in sorted(examples, key=lambda e: -e.num_tokens):
        i = next((i for i, free in enumerate(room) if example.num_tokens <= free), len(room))
        if i == len(room):
            batches.append([])
            room.append(max_tokens)
        batches[i].append(example)
        room[i] -= example.num_tokens
    return batches
