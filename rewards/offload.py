"""A decoder that reads texts, with its layers in host memory: some on the device too, others stream through buffers.

The copy of a layer waits until the computation has left its buffer, the computation waits for the copy; so while one
layer computes, the next arrives. (RollPacker, section 4.3)
"""

import itertools
import math
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attention import PackedAttention
from config import ConfigError
from core import ModelShape
from engine.host import upload
from model import LayerWeights, Model, Split, rms_norm, run_layer

Event = Any  # of a copy: a CUDA event, or a future on a CPU


def token_bytes(shape: ModelShape, dtype: torch.dtype) -> int:
    """Return the activation bytes of one token at the peak of a layer: in its MLP, or in its attention."""
    of_experts = 3 * shape.experts_per_token * shape.hidden_size  # of a mixture: as policies/memory_plan.py has it
    mlp = 3 * shape.mlp_width + 3 * shape.hidden_size + of_experts * bool(shape.num_experts)
    attention = 3 * shape.hidden_size + (5 * shape.num_heads + 4 * shape.num_kv_heads) * shape.head_dim
    return max(mlp, attention) * dtype.itemsize


def num_resident(num_layers: int, layer_bytes: int, token_bytes: int, num_tokens: int, free_bytes: float) -> int:
    """Return how many layers stay on the device beside a forward: all, or as many as fit beside two buffers."""
    room = (free_bytes - token_bytes * num_tokens) / layer_bytes
    return num_layers if room >= num_layers else max(int(room) - 2, 0)


def residence_order(num_layers: int) -> list[int]:
    """Return layers in the order in which they become resident: every prefix is spread evenly over the depth.

    So resident layers compute between two copies, and a change of their number by one moves no other layer.
    """
    width = (num_layers - 1).bit_length()
    return sorted(range(num_layers), key=lambda i: f"{i:0{width}b}"[::-1])


class ThreadCopies:
    """Copies on a CPU: in one thread, in order, while the caller computes."""

    def __init__(self) -> None:
        self.thread = ThreadPoolExecutor(1)
        self.last: Future | None = None

    def mark(self) -> None:
        """On a CPU all calls have been computed when they return."""

    def start(self, target: Tensor, source: Tensor, after: None) -> Future:
        # numpy's copy stays in its thread; torch's would start a second team of threads, which compete for the cores
        self.last = self.thread.submit(np.copyto, target.view(torch.uint8).numpy(), source.view(torch.uint8).numpy())
        return self.last

    def wait(self, copied: Future) -> None:
        copied.result()

    def finish(self) -> None:
        if self.last is not None:
            self.last.result()

    def close(self) -> None:
        self.thread.shutdown()


class StreamCopies:
    """Copies to a GPU from pinned memory: in a stream of their own, with events between it and the caller's stream."""

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device)

    def mark(self) -> torch.cuda.Event:
        """Return the event after all work that the current stream has been given."""
        return torch.cuda.current_stream(self.stream.device).record_event()

    def start(self, target: Tensor, source: Tensor, after: torch.cuda.Event) -> torch.cuda.Event:
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(after)
            target.copy_(source, non_blocking=True)
            return self.stream.record_event()

    def wait(self, copied: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self.stream.device).wait_event(copied)

    def finish(self) -> None:
        self.stream.synchronize()

    def close(self) -> None:
        """A stream needs no clean-up."""


class Layers:
    """The layers: each is one block of memory, so it travels in one copy.

    At the end of a forward the two buffers fill with the first layers of the next forward that are not resident.
    """

    def __init__(self, model: Model, device: torch.device):
        """Takes the layers out of `model`, so that each is in host memory once."""
        self.device, on_gpu = device, device.type == "cuda"
        self.copies: StreamCopies | ThreadCopies = StreamCopies(device) if on_gpu else ThreadCopies()
        self.host: list[Tensor] = []
        while model.layers:
            weights = model.layers.pop(0).weights()
            if not self.host:
                self.views, self.size = _views(weights)
            self.host.append(torch.empty(self.size, dtype=weights.qkv.dtype, pin_memory=on_gpu))
            for own, theirs in zip(self.unpack(self.host[-1]), weights, strict=True):
                if own is not None:
                    own.copy_(theirs.detach())
        self.order = residence_order(len(self.host))
        self.streamed_bytes = 0
        self.release()

    def __len__(self) -> int:
        return len(self.host)

    @property
    def layer_bytes(self) -> int:
        return self.host[0].nbytes

    @property
    def device_bytes(self) -> int:
        return (len(self.resident) + len(self.arriving)) * self.layer_bytes

    def unpack(self, block: Tensor) -> LayerWeights:
        parts = (None if v is None else block[v[0] : v[0] + math.prod(v[1])].view(v[1]) for v in self.views)
        return LayerWeights._make(parts)

    def release(self) -> None:
        """Give the device memory back. The device must be idle."""
        self.copies.finish()
        self.placed = -1
        self.resident: dict[int, tuple[Tensor, Event | None]] = {}  # block, and its copy's event if any
        self.arriving: deque[tuple[int, Tensor, Event]] = deque()  # layer, buffer, its copy's event: two, in turns

    def close(self) -> None:
        self.release()
        self.copies.close()

    def place(self, count: int) -> None:
        """Keep `count` layers on the device from now on. The device must be idle."""
        if count == self.placed:
            return
        self.copies.finish()  # into buffers that may be dropped now
        self.placed, kept, computed = count, set(self.order[:count]), self.copies.mark()
        self.resident = {i: block for i, block in self.resident.items() if i in kept}
        for i in sorted(kept - self.resident.keys()):
            self.resident[i] = (self.host[i], None)  # on a CPU the host's block is the device's
            if self.device.type != "cpu":
                self.resident[i] = self._fetch(i, torch.empty_like(self.host[i], device=self.device), computed)
        buffers = [block for _, block, _ in self.arriving] or [
            torch.empty_like(self.host[0], device=self.device) for _ in range(2 if count < len(self) else 0)
        ]
        self.arriving.clear()
        self.upcoming = itertools.cycle(i for i in range(len(self)) if i not in kept)
        for block in buffers if count < len(self) else ():
            self._arrive(block, computed)

    def _fetch(self, index: int, block: Tensor, after: Event) -> tuple[Tensor, Event]:
        self.streamed_bytes += block.nbytes
        return block, self.copies.start(block, self.host[index], after)

    def _arrive(self, block: Tensor, after: Event) -> None:
        index = next(self.upcoming)
        self.arriving.append((index, *self._fetch(index, block, after)))

    def __iter__(self) -> Iterator[LayerWeights]:
        """Yield the layers on the device, in order. The caller computes with each layer before it asks for the next."""
        for index in range(len(self)):
            if index in self.resident:
                block, copied = self.resident[index]
                if copied is not None:
                    self.copies.wait(copied)
                yield self.unpack(block)
            else:
                expected, block, copied = self.arriving.popleft()
                assert expected == index, "the last forward stopped half-way"
                self.copies.wait(copied)
                yield self.unpack(block)
                self._arrive(block, self.copies.mark())  # once the layer has been computed


def _views(weights: LayerWeights) -> tuple[list[tuple[int, torch.Size] | None], int]:
    """Return (offset, shape) of each tensor in a layer's block, and the elements of the block."""
    views, offset = [], 0
    for tensor in weights:
        views.append(None if tensor is None else (offset, tensor.shape))
        if tensor is not None:
            offset += -(-tensor.numel() // 128) * 128  # kernels like 256-byte boundaries
    return views, offset


# ---- the model ---------------------------------------------------------------------------------------------------


class OffloadedModel:
    """A decoder that only reads: one forward over packed texts, no gradients. A judge and a teacher are such models."""

    def __init__(self, model: Model, device: torch.device, memory_gib: float):
        """Takes `model` from host memory apart. `memory_gib`: device memory that it may hold; 0: all that is free."""
        self.model, self.device, self.memory_gib = model, device, memory_gib
        self.shape, self.dtype, self.split = model.shape, model.dtype, Split(model.shape)
        self.layers = Layers(model, device)
        model.to(device)
        self.fixed_bytes = sum(p.nbytes for p in model.parameters())

    def place(self, num_tokens: int) -> None:
        """Keep as many layers on the device as its memory holds beside a forward of `num_tokens`."""
        layers = self.layers
        if self.memory_gib:
            free = self.memory_gib * 2**30 - self.fixed_bytes
        elif self.device.type == "cuda":
            unused = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
            # A part is left for other users of the GPU and for fragmentation.
            free = layers.device_bytes + 0.8 * (torch.cuda.mem_get_info(self.device)[0] + unused)
        else:
            free = math.inf
        per_token = token_bytes(self.shape, self.dtype)
        layers.place(num_resident(len(layers), layers.layer_bytes, per_token, num_tokens, free))

    def give_back(self) -> None:
        """Let others have what it took of the GPU's free memory. The device must be idle."""
        if self.device.type == "cuda" and not self.memory_gib:
            self.layers.release()
            torch.cuda.empty_cache()

    def hidden(self, texts: Sequence[Sequence[int]], places: Sequence[int]) -> Tensor:
        """Return what the head reads at `places` of the texts' tokens, one text after another. [n, hidden_size]"""
        lengths = [len(text) for text in texts]
        ids = upload([token for text in texts for token in text], self.device)  # [T]
        positions = upload([position for length in lengths for position in range(length)], self.device)
        attend = PackedAttention(lengths, self.device)
        cos, sin = self.model.rope(positions)
        x = self.model.embed(ids)
        for index, weights in enumerate(self.layers):
            x = run_layer(weights, self.split, index, x, cos, sin, attend, inference=True)
        read = x[upload(places, self.device)]
        return rms_norm(read, self.model.norm.weight, self.shape.norm_eps, inference=True)


def least_bytes(shape: ModelShape, dtype: torch.dtype, tokens: int) -> tuple[int, int]:
    """Return the bytes of a model but for its layers, and what a forward of so many tokens adds: two layers at least.

    By the shape alone.
    """
    with torch.device("meta"):
        model = Model(shape)
    layer = sum(p.numel() for p in model.layers[0].parameters()) * dtype.itemsize
    fixed = sum(p.numel() for p in model.parameters()) * dtype.itemsize - layer * shape.num_layers
    return fixed, 2 * layer + tokens * token_bytes(shape, dtype)


def check_room(key: str, memory_gib: float, shape: ModelShape, dtype: torch.dtype, tokens: int, setting: str) -> None:
    """Raise ConfigError when `key` is too little memory for a forward of so many tokens, which `setting` says."""
    needed = sum(least_bytes(shape, dtype, tokens)) if memory_gib else 0
    if memory_gib * 2**30 < needed:
        raise ConfigError(
            f"{key} = {memory_gib} is too small for embeddings, two layers and a forward of {setting} = {tokens}: at "
            f"least {math.ceil(needed / 2**30 * 1e6) / 1e6}; raise it, or lower {setting}"
        )
