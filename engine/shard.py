"""What an engine decodes with: one tensor-parallel rank's part of a model."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from core import ModelShape
from engine import kernels, native
from engine.cpu import Packed, most_fused, packed, way
from engine.experts import Choose, own_choice
from model import Attend, LayerWeights, Model, Split, empty_model, linear, rms_norm, run_layer, run_mlp
from parallel import TensorParallel
from weights.sharding import gather

ALIGNED = 128  # elements: the places of copies are multiples of this


class Copies:
    """Copies of tensors, one behind another in memory of a rank's own."""

    def __init__(self, memory: Tensor):
        self.memory, self.used = memory, 0

    def __call__(self, tensor: Tensor) -> Tensor:
        place = self.memory[self.used : self.used + tensor.numel()].view(tensor.shape)
        self.used += -(-tensor.numel() // ALIGNED) * ALIGNED
        return place.copy_(tensor)


def own_layers(model: Model, split: Split, copies: Copies | None) -> Iterator[LayerWeights]:
    """Yield a rank's part of each layer: copies, or views where views can be. One layer at a time is gathered."""
    for layer in model.layers:
        weights = layer.weights()
        whole = iter(gather(model, [w for w in weights if w is not None]))
        part = LayerWeights._make(w if w is None else next(whole) for w in weights).shard(split)
        yield part if copies is None else LayerWeights._make(None if t is None else copies(t) for t in part)


def own_vocabulary(model: Model, split: Split, copies: Copies | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return a rank's part of the embedding, its part of the head, and the norm between layers and head.

    [V, hidden], [rows, hidden], [hidden]: each rank embeds by itself, and the last may have fewer rows of the head. Of
    copies the embedding is [rows, hidden] too, and all ranks have as many rows.
    """
    rows = -(-model.shape.vocab_size // split.size)
    mine = slice(split.rank * rows, (split.rank + 1) * rows)
    heads = [] if model.head is None else [model.head.weight]
    norm, *tables = (t.detach() for t in gather(model, [model.norm.weight, model.embed.weight, *heads]))
    if copies is None:
        return tables[0], tables[-1][mine], norm
    own = [copies(F.pad(t[mine], (0, 0, 0, rows - len(t[mine])))) for t in tables]
    return own[0], own[-1], copies(norm)


def num_own_elements(shape: ModelShape, size: int) -> int:
    """Return how many elements a rank's own copies take, at most. Rank 0 has biases that others lack."""
    model, split, copies = empty_model(shape), Split(shape, 0, size), Copies(torch.empty(2**50, device="meta"))
    for _ in own_layers(model, split, copies):
        pass
    own_vocabulary(model, split, copies)
    return copies.used


class Shard:
    """One tensor-parallel rank's part of a model, as plain tensors.

    Whole weights: views of the model's, and copies where a view cannot be. Sharded weights: copies in `memory`, taken
    layer by layer. The model may then lie over several ranks (sharding.py), which make and refresh their shards at the
    same time. Packed copies aside, tensors keep their places when the weights change, as CUDA graphs need it.
    """

    def __init__(self, model: Model, parallel: TensorParallel, prepack: bool = True, memory: Tensor | None = None):
        """`memory` [elements]: for copies of this rank's own, `num_own_elements`; None: the weights are whole."""
        self.model, self.shape, self.parallel, self.memory = model, model.shape, parallel, memory
        self.split = Split(model.shape, parallel.rank, parallel.size)
        self.pack: Callable[[Tensor], Any] = packed if prepack else (lambda weight: weight)
        self._make()
        everything = [t for w in self.layers for t in w if t is not None] + [self.embedding, self.head, self.norm]
        views = {_start(p) for p in model.parameters()} if memory is None else set()
        plain = [(t.plain, True) if isinstance(t, Packed) else (t, _start(t) not in views) for t in everything]
        #: Bytes that are not views of the model's weights: what making or refreshing this shard copies.
        self.copied_bytes = sum({t.data_ptr(): t.nbytes for t, is_copy in plain if is_copy}.values())
        shape, shares = self.shape, {3: self.shape.experts_per_token / max(self.shape.num_experts, 1)}
        used = [t.plain if isinstance(t, Packed) else t for t in everything if t is not self.embedding]
        self._of_weights = int(sum(t.numel() * shares.get(t.dim(), 1) for t in used))
        self._of_a_key = 2 * shape.num_layers * shape.num_heads // self.split.size * shape.head_dim

    def _make(self) -> None:
        copies = None if self.memory is None else Copies(self.memory)
        self.layers: list[LayerWeights] = []  # packed copies of old weights go first
        layers = own_layers(self.model, self.split, copies)  # one at a time: packing drops what it copies
        self.layers = [w._replace(**{name: self.pack(getattr(w, name)) for name in native.MATRICES}) for w in layers]
        self.embedding, head, self.norm = own_vocabulary(self.model, self.split, copies)
        self.head = self.pack(head)
        self._fuse()

    def _fuse(self) -> None:
        """On a CPU, have steps of up to `most_fused` rows be one call."""
        self.most_fused = 0
        if self.split.size == 1 and not self.shape.num_experts and native.can_fuse(self.norm):
            matrices = [[getattr(w, name) for name in native.MATRICES] for w in self.layers]
            self.most_fused = min(most_fused(weight) for weights in matrices for weight in weights)
            ways = [[way(weight) for weight in weights] for weights in matrices]
            others = [{name: getattr(w, name) for name in native.VECTORS} for w in self.layers]
            self.fused = native.Layers(self.shape, ways, others, self.norm)

    def multiplications(self, length: int) -> int:
        """Return about how many a token takes in a sequence of such a length: with weights, and in attention."""
        return self._of_weights + length * self._of_a_key

    def kv_shape(self, num_pages: int, page_size: int) -> tuple[int, ...]:
        """Return the shape of this rank's keys and values: [layers, 2, pages, K, page, D]."""
        return self.shape.num_layers, 2, num_pages, self.split.num_kv_heads, page_size, self.shape.head_dim

    def refresh(self) -> None:
        """Follow the model's newest weights: views need nothing, copies are made again where they are."""
        if self.memory is not None:
            self._make()
            return
        for new_part, part in zip(own_layers(self.model, self.split, None), self.layers, strict=True):
            for old, new in zip(part, new_part, strict=True):
                if isinstance(old, Packed):
                    old.pack(new)
                elif old is not None and old.data_ptr() != new.data_ptr():
                    old.copy_(new)
        if isinstance(self.head, Packed):
            self.head.pack(own_vocabulary(self.model, self.split, None)[1])
        self._fuse()

    def _embed(self, token_ids: Tensor) -> Tensor:
        """[T] -> [T, hidden_size]"""
        rows = self.embedding.shape[0]
        if rows >= self.shape.vocab_size:
            return F.embedding(token_ids, self.embedding)
        own = token_ids - self.split.rank * rows
        is_here = (own >= 0) & (own < rows)
        part = F.embedding(own.clamp(0, rows - 1), self.embedding)
        return self.parallel.reduce(part.masked_fill(~is_here[:, None], 0.0))  # a single rank has it: no rounding

    def __call__(self, token_ids: Tensor, positions: Tensor, attend: Attend, choose: Choose = own_choice) -> Tensor:
        """As `Model.forward`. Every rank of the group calls it with the same arguments."""
        cos, sin = self.model.rope(positions)
        x = self._embed(token_ids)
        for index, weights in enumerate(self.layers):
            x = run_layer(weights, self.split, index, x, cos, sin, attend, self.parallel.reduce, choose, inference=True)
        return rms_norm(x, self.norm, self.shape.norm_eps, inference=True)

    def decode(
        self,
        token_ids: Tensor,
        positions: Tensor,
        table: Tensor,
        kv_pages: Tensor,
        choose: Choose = own_choice,
    ) -> Tensor:
        """Return hidden states of one new token per row, its keys and values written to the row's pages. GPU path.

        token_ids, positions [n]; a negative position is a padding row; table [n, max_pages] int32; kv_pages
        [layers, 2, pages, K, page, D] -> [n, hidden_size]. Depends on shapes only, so a CUDA graph can hold it.

        As `run_layer` for each layer, with fewer launches: a norm adds the residual before it. On a CPU one call may
        do the same (`_fuse`).
        """
        cos, sin = (x[:, 0, 0] for x in self.model.rope_tables())
        split, reduce, eps = self.split, self.parallel.reduce, self.shape.norm_eps
        counts = split.groups * split.num_kv_heads, split.num_kv_heads
        x, residual = self._embed(token_ids), None
        is_fused = 0 < len(x) <= self.most_fused and not kernels.use_triton(x)
        if is_fused and native.can_decode_all(x, positions, table, kv_pages):
            return self.fused.decode(x, cos, sin, positions, table, kv_pages)
        lengths, (keys, values) = (positions + 1).int(), (part.unbind() for part in kv_pages.unbind(1))
        for index, (w, k_pages, v_pages) in enumerate(zip(self.layers, keys, values, strict=True)):
            normed, residual = kernels.add_rms_norm(x, residual, w.input_norm, eps)
            qkv, places = linear(normed, w.qkv, w.qkv_bias), (positions, table, k_pages, v_pages)
            q = kernels.rope_and_write(qkv, cos, sin, *places, *counts, w.q_norm, w.k_norm, eps)
            attended = kernels.paged_decode(q, k_pages, v_pages, table, lengths, window=self.shape.window(index))
            x = reduce(linear(attended.flatten(1), w.out, w.out_bias))
            normed, residual = kernels.add_rms_norm(x, residual, w.post_norm, eps)
            x = reduce(run_mlp(w, split, index, normed, choose, inference=True))
        return kernels.add_rms_norm(x, residual, self.norm, eps)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """[T, hidden_size] -> [T, vocab_size] on every rank"""
        part = linear(hidden, self.head, None)
        missing = -(-self.shape.vocab_size // self.split.size) - part.shape[1]  # the last rank may have fewer rows
        part = F.pad(part, (0, missing)) if missing else part
        return self.parallel.gather(part)[:, : self.shape.vocab_size]


def _start(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
