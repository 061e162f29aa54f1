"""What the rollout is told; the memory of KV pages, and how many it holds at each tensor-parallel size."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from config import ConfigError, option
from core import ModelShape
from engine.host import upload
from engine.pages import LAYOUTS, Cache
from model import empty_model

CPU_KV_BYTES = 2**28


@dataclass(frozen=True)
class RolloutConfig:
    max_prompt_tokens: int = option(512, "longest prompt allowed, in tokens", min=1, max=2**22)
    max_response_tokens: int = option(1024, "length limit of a response, in tokens", min=1, max=2**22)
    stop: tuple[str, ...] = option(
        (), 'texts that end a response besides the end token, as ["</answer>"]; the response includes them'
    )
    max_running: int = option(256, "sequences that decode together in one replica, at most", min=1, max=65536)
    step_tokens: int = option(
        8192, "tokens of one forward: decoding rows and chunks of prefill beside them", min=16, max=2**22
    )
    prepack: bool = option(
        True, "on CPU, decode with a second copy of large weights in a faster layout, where that is faster"
    )
    tensor_parallel: int = option(1, "ranks that decode one replica together: 1, 2, 4 or 8 neighbours", min=1, max=8)
    weights: str = option(
        "auto",
        "where the rollout's weights are: whole on every rank, sharded over the ranks of a replica (with trainer.shard "
        "over 1), or auto: sharded where whole ones would leave a GPU under a quarter of its memory for KV pages",
        choices=("auto", *LAYOUTS),
    )
    page_size: int = option(64, "tokens in one KV page", min=1, max=1024)
    replay_experts: bool = option(
        True,
        "of a mixture of experts: record which experts each token takes (a byte for each, in each layer), and train "
        "with the same ones",
    )
    kv_gib: float = option(
        0.0,
        "memory of the KV pages of one rank at the size rollout.tensor_parallel, in GiB (sharded weights leave more at "
        "larger sizes, less at smaller ones); 0: what the memory plan leaves of a GPU, 0.25 on a CPU",
        min=0.0,
        max=1e5,
    )

    @property
    def layout(self) -> str:
        return "sharded" if self.weights == "sharded" else "whole"


@dataclass(frozen=True)
class EngineCache(Cache):
    """With what a mixture of experts leaves beside keys and values."""

    choice: int = 0  # bytes that tell which experts a token took; each rank has them

    def page_bytes(self, tensor_parallel: int) -> int:
        return super().page_bytes(tensor_parallel) + self.page_size * self.choice


def cache_of(config: RolloutConfig, shape: ModelShape, dtype: torch.dtype) -> EngineCache:
    """Return what the tokens of a rollout of this model leave in the cache."""
    longest = config.max_prompt_tokens + config.max_response_tokens
    kv = shape.num_layers, shape.num_kv_heads, shape.head_dim, dtype.itemsize
    choice = shape.choice_bytes if config.replay_experts else 0
    return EngineCache(*kv, config.page_size, config.max_running, longest, choice)


def weight_bytes(shape: ModelShape, dtype: torch.dtype) -> int:
    return sum(p.nbytes for p in empty_model(shape, dtype).parameters())


def kv_budget(config: RolloutConfig, device: torch.device) -> float:
    """Return the bytes that one rank's pages may have at the size `rollout.tensor_parallel`. 0: as `Engine` says."""
    if config.kv_gib:
        return config.kv_gib * 2**30
    return torch.cuda.mem_get_info(device)[0] / 2 if device.type == "cuda" else CPU_KV_BYTES


def num_pages_for(
    config: RolloutConfig, shape: ModelShape, dtype: torch.dtype, device: torch.device, tensor_parallel: int = 1
) -> int:
    """Return how many pages the memory budget holds. Raises ConfigError when one full sequence does not fit."""
    if device.type == "cuda" and config.page_size not in (16, 32, 64, 128, 256):
        raise ConfigError(f"rollout.page_size = {config.page_size}: on a GPU take 16, 32, 64, 128 or 256")
    cache, weights = cache_of(config, shape, dtype), weight_bytes(shape, dtype) if config.layout == "sharded" else 0
    at_start = cache.own_weights(weights, config.tensor_parallel, config.layout)
    memory = kv_budget(config, device) + at_start
    num_pages = cache.num_pages(memory, tensor_parallel, weights, config.layout)
    needed, page_bytes = cache.pages_of_longest, cache.page_bytes(tensor_parallel)
    if num_pages < needed:
        freed = at_start - cache.own_weights(weights, tensor_parallel, config.layout)
        raise ConfigError(
            f"rollout.kv_gib = {config.kv_gib} holds {num_pages} pages of {page_bytes} bytes, but one sequence of "
            f"rollout.max_prompt_tokens + rollout.max_response_tokens = {cache.longest} tokens needs {needed}; set "
            f"rollout.kv_gib to at least {math.ceil((needed * page_bytes - freed) / 2**30 * 1e6) / 1e6}, "
            "or lower rollout.max_response_tokens"
        )
    return num_pages


class PageMemory:
    """One piece of device memory: a rank's own part of the weights, if it has any, and behind that its pages.

    Both have the shape of one tensor-parallel size at a time: the smaller the part, the more pages.
    """

    def __init__(self, num_bytes: int, dtype: torch.dtype, device: torch.device, cache: EngineCache | None = None):
        """`cache`: of a mixture of experts; then there is a page more, for the choices of dead rows."""
        self.dtype, self.device, self.choice = dtype, device, cache.choice if cache else 0
        spare = cache.page_size * cache.choice if cache else 0
        self.length = -(-(num_bytes + spare) // dtype.itemsize)
        self.experts: Tensor | None = None  # that each token took [pages + 1, page, layers, k] uint8, behind the pages
        self.whole: Tensor | None = None
        self._kv: Tensor | None = None  # `whole` in the shape of pages

    @property
    def kv(self) -> Tensor:
        """Keys and values [layers, 2, pages, K, page, D]: one tensor, so that a page moves with one copy."""
        assert self._kv is not None, "the memory was given back: take it first"
        return self._kv

    @torch.inference_mode(False)  # what is made inside could not be changed outside
    def take(self) -> None:
        """Allocate the memory if it is not there."""
        if self.whole is None:
            self.whole = torch.zeros(self.length, dtype=self.dtype, device=self.device)

    def shape(self, start: int, shape: tuple[int, ...]) -> None:
        """Give the memory behind its first `start` elements the shape of pages."""
        assert self.whole is not None, "take it first"
        end = start + math.prod(shape)
        self._kv = self.whole[start:end].view(shape)
        if self.choice:
            pages, page = shape[2] + 1, shape[4]
            taken = self.whole[end:].view(torch.uint8)[: pages * page * self.choice]
            self.experts = taken.view(pages, page, shape[0], -1)

    def free(self) -> None:
        """Give the memory back, on a CPU to the process only."""
        self.whole = self._kv = self.experts = None

    def copy(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy pages, (from, to) each. No copy reads what another writes."""
        if pairs := list(pairs):
            source, target = upload(pairs, self.device).T
            for layer in self.kv.unbind():  # a copy of all layers at once is in no memory plan
                layer[:, target] = layer[:, source]
            if self.experts is not None:
                self.experts[target] = self.experts[source]
