"""What an engine decodes with: one tensor-parallel rank's part of a model."""

import torch.nn.functional as F
from torch import Tensor

from engine import kernels
from engine.cpu import Packed, packed
from model import Attend, Model, Split, linear, rms_norm, run_layer
from parallel import TensorParallel


class Shard:
    """One tensor-parallel rank's part of a model, as plain tensors.

    Packed copies aside, its tensors keep their places when the weights change, as CUDA graphs need it.
    """

    def __init__(self, model: Model, parallel: TensorParallel, prepack: bool = True):
        self.model, self.shape, self.parallel = model, model.shape, parallel
        self.split = Split(model.shape, parallel.rank, parallel.size)
        pack = packed if prepack else (lambda weight: weight)
        names = ("qkv", "out", "gate_up", "down")
        shards = (layer.shard(self.split) for layer in model.layers)  # one at a time: packing drops what it copies
        self.layers = [w._replace(**{n: pack(getattr(w, n)) for n in names}) for w in shards]
        self.embedding, self.norm = model.embed.weight.detach(), model.norm.weight.detach()
        head = self._own_head()
        self.missing = -(-self.shape.vocab_size // parallel.size) - len(head)
        self.head = pack(head)
        own = {_start(p) for p in model.parameters()}
        tensors = [t for w in self.layers for t in w if t is not None] + [self.head]
        #: Bytes that are not views of the model's weights: what making or refreshing this shard copies.
        self.copied_bytes = sum(t.plain.nbytes for t in tensors if isinstance(t, Packed))
        self.copied_bytes += sum(t.nbytes for t in tensors if isinstance(t, Tensor) and _start(t) not in own)

    def kv_shape(self, num_pages: int, page_size: int) -> tuple[int, ...]:
        """Return the shape of this rank's keys and values: [layers, 2, pages, K, page, D]."""
        return self.shape.num_layers, 2, num_pages, self.split.num_kv_heads, page_size, self.shape.head_dim

    def refresh(self) -> None:
        """Follow the model's newest weights: views need nothing, copies are made again where they are."""
        for layer, own in zip(self.model.layers, self.layers, strict=True):
            for old, new in zip(own, layer.shard(self.split), strict=True):
                if isinstance(old, Packed):
                    old.pack(new)
                elif old is not None and old.data_ptr() != new.data_ptr():
                    old.copy_(new)
        if isinstance(self.head, Packed):
            self.head.pack(self._own_head())

    def _own_head(self) -> Tensor:
        rows = -(-self.shape.vocab_size // self.parallel.size)  # of the vocabulary; the last rank may have fewer
        return self.model.head_weight.detach()[self.parallel.rank * rows : (self.parallel.rank + 1) * rows]

    def __call__(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """As `Model.forward`. Every rank of the group calls it with the same arguments."""
        cos, sin = self.model.rope(positions)
        x = F.embedding(token_ids, self.embedding)
        for index, weights in enumerate(self.layers):
            x = run_layer(weights, self.split, index, x, cos, sin, attend, self.parallel.reduce, inference=True)
        return rms_norm(x, self.norm, self.shape.norm_eps, inference=True)

    def decode(self, token_ids: Tensor, positions: Tensor, table: Tensor, kv_pages: Tensor) -> Tensor:
        """Return hidden states of one new token per row, its keys and values written to the row's pages. GPU path.

        token_ids, positions [n]; a negative position is a padding row; table [n, max_pages] int32; kv_pages
        [layers, 2, pages, K, page, D] -> [n, hidden_size]. Depends on shapes only, so a CUDA graph can hold it.

        As `run_layer` for each layer, with fewer launches: a norm adds the residual before it.
        """
        cos, sin = (x[:, 0, 0] for x in self.model.rope_tables())
        split, reduce, eps = self.split, self.parallel.reduce, self.shape.norm_eps
        counts = split.groups * split.num_kv_heads, split.num_kv_heads
        lengths, x, residual = (positions + 1).int(), F.embedding(token_ids, self.embedding), None
        for w, (k_pages, v_pages) in zip(self.layers, kv_pages, strict=True):
            normed, residual = kernels.add_rms_norm(x, residual, w.input_norm, eps)
            qkv, places = linear(normed, w.qkv, w.qkv_bias), (positions, table, k_pages, v_pages)
            q = kernels.rope_and_write(qkv, cos, sin, *places, *counts, w.q_norm, w.k_norm, eps)
            attended = kernels.paged_decode(q, k_pages, v_pages, table, lengths)  # [n, H, D]
            x = reduce(linear(attended.flatten(1), w.out, w.out_bias))
            normed, residual = kernels.add_rms_norm(x, residual, w.post_norm, eps)
            activated = kernels.silu_mul(linear(normed, w.gate_up, w.gate_up_bias), split.mlp_blocks)
            x = reduce(linear(activated, w.down, w.down_bias))
        return kernels.add_rms_norm(x, residual, self.norm, eps)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """[T, hidden_size] -> [T, vocab_size] on every rank"""
        part = linear(hidden, self.head, None)
        part = F.pad(part, (0, self.missing)) if self.missing else part
        return self.parallel.gather(part)[:, : self.shape.vocab_size]


def _start(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
