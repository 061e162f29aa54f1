"""LoRA: small adapters of a model's projections are trained, and merged into the weights that it computes with.

W = W0 + alpha / rank * B A (Hu et al., arXiv 2106.09685). Rollout and training compute with the same merged W, so LoRA
adds no difference between them. Each merge starts from a copy of W0: nothing drifts. In bfloat16 most of B A is less
than half a step between numbers: rounded to nearest, W would stay W0 for many updates, so each place has a threshold
of its own (`round_up_at`). The backward pass takes the gradients of A and B from those of the projection's input and
output, and never makes a gradient as large as W.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from config import ConfigError, option
from core import ModelShape
from engine.gradients import product
from model import HFTensor, Layer, Model, empty_model
from weights import sharding

FOLDER = "adapter"  # of a checkpoint: the adapters as PEFT reads them
FIELDS = {"qkv": "qkv_proj", "out": "o_proj", "gate_up": "gate_up_proj", "down": "down_proj"}  # of LayerWeights


@dataclass(frozen=True)
class LoraConfig:
    rank: int = option(0, "rank of the adapters that are trained instead of the model (LoRA); 0: all is trained", min=0)
    alpha: float = option(32.0, "the product of an adapter's matrices is scaled by alpha / rank", above=0.0, max=1e6)
    targets: tuple[str, ...] = option(("all",), "projections with adapters, such as q_proj and v_proj, or all")
    seed: int = option(0, "seed of the adapters' first values", min=0, max=2**63 - 1)


@dataclass
class Adapted:
    """A weight of the model, which may join several projections, and their adapters. [out, in]"""

    weight: Tensor  # merged; this rank's part where the model lies over several
    parts: Callable[[Tensor], list[HFTensor]]  # of a tensor with the weight's rows
    targets: Sequence[str]
    scale: float
    adapters: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)  # A [rank, in], B [out, rank]; fp32
    base: Tensor | None = None  # the weight without them; this rank's part
    thresholds: tuple[Tensor, Tensor] | None = None  # [out, 1], [1, in] int32, of which each place has the xor

    def projections(self) -> list[tuple[str, int]]:
        """Return name and rows of each projection that is a target."""
        whole = torch.empty(self.weight.shape, device="meta")
        return [
            (name.removesuffix(".weight"), view.numel() // whole.shape[1])
            for name, view, _ in self.parts(whole)
            if name.split(".")[-2] in self.targets
        ]

    def rows(self, tensor: Tensor) -> list[Tensor]:
        """Return views of the rows of each projection with an adapter. [out, n] -> [..., n] each"""
        return [view for name, view, _ in self.parts(tensor) if name.removesuffix(".weight") in self.adapters]

    def __call__(self, weight: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return x W^T + bias, for the merged W. [T, in] -> [T, out]"""
        return _Merged.apply(x, weight, bias, self, *chain(*self.adapters.values()))

    def keep(self) -> None:
        """Take the weight as it is now for the one without adapters."""
        assert self.base is not None
        self.base.copy_(sharding.own_part(self.weight.detach()))

    def merge(self) -> None:
        assert self.base is not None
        own, rank = sharding.own_part(self.weight.detach()), len(next(iter(self.adapters.values()))[0])
        # One product for all of the weight's projections: B of each in its own rows and columns.
        left = torch.zeros(len(self.weight), rank * len(self.adapters), device=own.device)
        for i, (_, b) in enumerate(self.adapters.values()):
            view = self.rows(left[:, i * rank : (i + 1) * rank])[i]
            view.copy_(b.view(view.shape))
        mine = sharding.own_rows(self.weight, left)
        product = mine @ torch.cat([a for a, _ in self.adapters.values()])
        merged = product.mul_(self.scale).add_(self.base)
        if own.dtype == torch.bfloat16:
            assert self.thresholds
            rows, columns = self.thresholds
            for at, part in zip(sharding.own_rows(self.weight, rows).split(256), merged.split(256), strict=True):
                round_up_at(at ^ columns, part)  # some rows at a time: no thresholds as large as W
        own.copy_(merged)


def round_up_at(thresholds: Tensor, values: Tensor) -> None:
    """Round fp32 to bfloat16, in place: away from 0 where the bits that are cut off and a threshold overflow.

    With thresholds of 0 to 2^16 - 1, each as likely, the mean error is 0. What bfloat16 has stays as it is.
    """
    values.view(torch.int32).add_(thresholds).bitwise_and_(-(2**16))


class _Merged(torch.autograd.Function):
    """A projection by its merged weight, whose gradients go to the input and to the adapters. s: the scale.

    dA = s (B^T dy^T) x, dB = s dy^T (x A^T): as of adapters beside W0, for the x and dy of this weight.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, of: Adapted, *adapters: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, *adapters)
        ctx.of = of
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, *adapters = ctx.saved_tensors
        found, scale = list[Tensor | None](), ctx.of.scale
        for i, view in enumerate(ctx.of.rows(gradient.T)):
            rows, a, b = view.reshape(-1, len(x)), *(t.to(x.dtype) for t in adapters[2 * i : 2 * i + 2])
            found += [((b.T @ rows) @ x).float() * scale, (rows @ (x @ a.T)).float() * scale]
        return gradient @ weight if ctx.needs_input_grad[0] else None, None, None, None, *found


class Adapters:
    """The adapters of a model. Every rank has them whole, with the same values."""

    def __init__(self, model: Model, config: LoraConfig, reference: Model | None = None):
        """`reference`: a model like it with the weights without adapters, which then need no copy."""
        self.model, self.config, generator = model, config, torch.Generator().manual_seed(config.seed)
        theirs = reference.parameters() if reference else ()
        bases: dict[Tensor, Tensor] = dict(zip(model.parameters(), theirs, strict=False))
        self.copies: list[Tensor] = []
        self.adapted: list[Adapted] = []
        self.tensors: dict[str, Tensor] = {}  # by PEFT's name
        places = torch.Generator().manual_seed(config.seed)
        for layer, place, adapted in _places(model, config):
            layer.adapted[place] = adapted
            self.adapted.append(adapted)
            device, (rows, columns) = adapted.weight.device, adapted.weight.shape
            sides = (torch.randint(2**16, size, generator=places) for size in ((rows, 1), (1, columns)))
            of_rows, of_columns = (side.to(device, torch.int32) for side in sides)
            adapted.thresholds = of_rows, of_columns
            for name, rows in adapted.projections():
                bound = columns**-0.5  # Kaiming's of a leaky ReLU of slope sqrt(5), as PEFT takes it
                a = torch.empty(config.rank, columns).uniform_(-bound, bound, generator=generator).to(device)
                b = torch.zeros(rows, config.rank, device=device)  # the first merge adds nothing
                adapted.adapters[name] = a.requires_grad_(), b.requires_grad_()
                self.tensors |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
            if adapted.weight in bases:
                adapted.base = bases[adapted.weight].detach()
            else:
                adapted.base = sharding.own_part(adapted.weight.detach()).clone()
                self.copies.append(adapted.base)

    def merged_in(self, weights: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Return those of another model's weights that have adapters in this one, with this one's."""
        mine = {id(adapted.weight) for adapted in self.adapted}
        both = zip(weights, self.model.parameters(), strict=True)
        return [(other, own) for other, own in both if id(own) in mine and own is not other]

    def keep(self) -> None:
        """Take the model's weights as they are now for those without adapters."""
        for adapted in self.adapted:
            adapted.keep()

    @torch.no_grad()
    def merge(self) -> None:
        """Write W0 + alpha / rank * B A into the model's weights. No collective."""
        for adapted in self.adapted:
            adapted.merge()

    def files(self, source: Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, bytes]]:
        """Return PEFT's files of the adapters of a model of the folder `source`: tensors by file, other files."""
        targets = sorted({name.split(".")[-3] for name in self.tensors})
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": str(source.resolve()),
            "r": self.config.rank,
            "lora_alpha": self.config.alpha,
            "target_modules": targets,
            "lora_dropout": 0.0,
            "bias": "none",
            "inference_mode": True,
        }
        tensors = {f"base_model.model.{name}": tensor.detach() for name, tensor in self.tensors.items()}
        content = json.dumps(config, indent=2).encode()
        return {f"{FOLDER}/adapter_model.safetensors": tensors}, {f"{FOLDER}/adapter_config.json": content}


def _places(model: Model, config: LoraConfig) -> Iterator[tuple[Layer, str, Adapted]]:
    """Yield each weight that has a target, with its layer and its place among the layer's weights."""
    parts, names = {id(weight): parts for weight, parts in model.hf_parts()}, set(config.targets)
    targets = _names(model) if "all" in names else names
    for layer in model.layers:
        for place, name in FIELDS.items():
            weight = getattr(layer, name).weight
            if weight.dim() > 2:  # experts have no adapters
                continue
            adapted = Adapted(weight, parts[id(weight)], sorted(targets), config.alpha / config.rank)
            if adapted.projections():
                yield layer, place, adapted


def _names(model: Model) -> set[str]:
    """Return the names of all projections that can have adapters."""
    weights = [getattr(layer, name).weight for layer in model.layers for name in FIELDS.values()]
    places = {id(weight) for weight in weights if weight.dim() == 2}
    return {name.split(".")[-2] for w, parts in model.hf_parts() if id(w) in places for name, _, _ in parts(w.data)}


def check_lora(config: LoraConfig, shape: ModelShape) -> None:
    """Raise ConfigError for targets that the model does not have, and for settings without effect."""
    if not config.rank:
        if config != LoraConfig():
            raise ConfigError("trainer.lora has no effect with trainer.lora.rank = 0; give a rank, such as 16")
        return
    if shape.stored_joined:
        raise ConfigError(
            "trainer.lora: this family's folders join q|k|v and gate|up, and adapters of the joined weights are not "
            "supported; take trainer.lora.rank = 0"
        )
    known = sorted(_names(_first_layer(shape)))
    if wrong := [name for name in config.targets if name not in (*known, "all")]:
        raise ConfigError(
            f"trainer.lora.targets: {wrong[0]!r} is no projection of this model's layers, which have "
            f"{', '.join(known)} (embeddings and the head have no adapters); name some of them, or all"
        )
    if not config.targets:
        raise ConfigError(f"trainer.lora.targets is empty; name some of {', '.join(known)}, or all")
    if config.rank > (most := max(min(sides) for sides in _projections(config, shape))):
        raise ConfigError(
            f"trainer.lora.rank = {config.rank}, but no targeted weight of this model has a rank over {most}; take less"
        )


def _projections(config: LoraConfig, shape: ModelShape) -> list[tuple[int, int]]:
    """Return outputs and inputs of each projection of a layer that has an adapter."""
    places = _places(_first_layer(shape), config)
    return [(rows, adapted.weight.shape[1]) for _, _, adapted in places for _, rows in adapted.projections()]


def count(config: LoraConfig, shape: ModelShape) -> dict[str, Any]:
    """Return how many numbers adapters have, the weights that they belong to, and the largest of these weights."""
    if not config.rank:
        return {}
    n, sizes = shape.num_layers, [adapted.weight.numel() for _, _, adapted in _places(_first_layer(shape), config)]
    numbers = n * config.rank * sum(map(sum, _projections(config, shape)))
    return {"adapters": numbers, "adapted": n * sum(sizes), "largest_adapted": max(sizes)}


def _first_layer(shape: ModelShape) -> Model:
    return empty_model(replace(shape, num_layers=1))
