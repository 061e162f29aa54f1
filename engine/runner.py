"""The device's part of an engine: it computes what the batcher has decided, and moves rows and pages where it says."""

from collections import abc

import numpy as np
import torch
from torch import Tensor

from engine import native
from engine.batcher import Batcher, Removed, Started
from engine.cpu import BatchedPages, PageAttention, few_sizes, threads_for
from engine.drafts import Drafts
from engine.experts import record, record_rows, waits
from engine.graphs import DecodeGraphs
from engine.host import upload
from engine.memory import PageMemory
from engine.paged_attention import ChunkAttention, DraftAttention, StepAttention
from engine.pages import Pages
from engine.rows import Rows
from engine.sequence import Chunk, Parked, Sequence
from engine.shard import Shard


def chunk_rows(chunks: list[Chunk], before: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return each token of chunks as a row of its own: tokens [T], positions [T] and pages [T, width] int32.

    Rows of none, with position -1, are behind them, so that with the rows `before` there are `few_sizes`.
    """
    size = few_sizes(before + sum(end - start for _, start, end in chunks)) - before
    tokens, positions, pages = np.zeros(size, np.int64), np.full(size, -1), np.zeros((size, width), np.int32)
    row = 0
    for prefill, start, end in chunks:
        own = slice(row, row := row + end - start)
        tokens[own], positions[own] = prefill.context[start:end], np.arange(start, end)
        pages[own, : len(prefill.leader.pages)] = prefill.leader.pages
    return torch.from_numpy(tokens), torch.from_numpy(positions), torch.from_numpy(pages)


class Runner:
    """Rows, KV memory and a shard of the weights; `graphs` on a GPU, where decoding is a step of its own."""

    def __init__(self, rows: Rows, memory: PageMemory, graphs: DecodeGraphs | None):
        self.rows, self.memory, self.graphs = rows, memory, graphs
        self.shard: Shard | None = None

    @property
    def weights(self) -> Shard:
        assert self.shard, "the engine makes a shard before each step that lacks one"
        return self.shard

    def use(self, shard: Shard, pages: Pages, start: int) -> None:
        """Compute with this shard from now on, whose KV stands in these pages; `start`: their place in the memory."""
        self.shard, self.pages = shard, pages
        self.memory.shape(start, shard.kv_shape(pages.size, pages.page_size))
        if self.graphs:
            self.graphs.layout = shard.split.size
            if shard.shape.num_experts and waits(shard.model.dtype, self.memory.device):
                self.graphs.captures = False

    @torch.inference_mode()
    def capture(self) -> None:
        """Have the graphs of this shard, on a GPU. Collective in the replica."""
        if self.graphs:
            self.graphs.capture(self.decode_step)

    # ---- one forward -----------------------------------------------------------------------------------------

    def launch(self, batcher: Batcher, drafts: Drafts | None) -> None:
        """Start one fused decode step over all rows. With drafts it is eager and has ended on return. (GPU path)"""
        assert self.graphs, "only the GPU path decodes in steps of their own"
        n = len(batcher.running)
        if drafts:  # each token is a row of its own, with the pages of the tokens before it
            table = upload(batcher.table[drafts.row], self.memory.kv.device, torch.int32)
            tokens, positions = self._inputs(drafts, batcher.length)
            choose = record_rows(self.memory.experts, positions, table)
            return self.verify(batcher, drafts, self.weights.decode(tokens, positions, table, self.memory.kv, choose))
        self.graphs.send(batcher.table[:n])
        self.graphs.run(self.decode_step, n, eager=bool(self.rows.own))
        batcher.count_decoded(n)

    def decode_step(self, n: int) -> None:
        """Decode one token in every row that has not ended, on tensors of fixed places, so that a graph can hold it."""
        assert self.graphs, "only the GPU path decodes in steps of their own"
        rows = self.rows
        alive = rows.ended[:n] == 0
        positions = (rows.length[:n] + 1) * alive - 1  # an ended row: -1
        table = self.graphs.table[:n]
        choose = record_rows(self.memory.experts, positions, table)
        hidden = self.weights.decode(rows.last_token[:n], positions, table, self.memory.kv, choose)
        rows.length[:n] += alive
        rows.draw(slice(0, n), self.weights.logits(hidden))

    def forward(
        self, batcher: Batcher, chunks: list[Chunk], drafts: Drafts | None = None, decodes: bool = True
    ) -> None:
        """Compute `chunks`, on a CPU the decoding rows and their drafts too; draw for every row that is due a token.

        `decodes`: False where the rows stand still.
        """
        n = 0 if self.graphs or not decodes else len(batcher.running)  # rows that decode in this forward
        num_tokens = (drafts.num_tokens if n and drafts else n) + sum(end - start for _, start, end in chunks)
        length = (
            self.pages.used * self.pages.page_size // max(len(batcher.running) + len(chunks), 1)
        )  # mean of sequences
        with threads_for(num_tokens * self.weights.multiplications(length)):
            self._forward(batcher, chunks, drafts, n)

    def _forward(self, batcher: Batcher, chunks: list[Chunk], drafts: Drafts | None, n: int) -> None:
        rows, kv, num_running = self.rows, self.memory.kv, len(batcher.running)
        hidden = self._compute(batcher, chunks, drafts, n)
        if n and drafts:
            own = drafts.num_tokens if chunks else len(hidden)
            self.verify(batcher, drafts, hidden[:own])
            n, hidden = 0, hidden[own:]
        rows.length[:n].add_(1)
        batcher.count_decoded(n)
        if chunks:
            started = batcher.count_prefilled(chunks)
            self.start(started)
            hidden = hidden[upload([*range(n), *(n + token for token in started.predicts)], kv.device)]
        if len(hidden):
            rows.draw(slice(num_running - n, len(batcher.running)), self.weights.logits(hidden))

    def _compute(self, batcher: Batcher, chunks: list[Chunk], drafts: Drafts | None, n: int) -> Tensor:
        """Return hidden states of `n` decoding rows and their drafts, then of the chunks. [T, hidden_size]

        With drafts or chunks some rows more may follow, which mean nothing.
        """
        rows, kv, table, length = self.rows, self.memory.kv, batcher.table, batcher.length[:n]
        inputs = self._inputs(drafts, length) if n and drafts else (rows.last_token[:n], rows.length[:n])
        if native.can_decode(kv):
            rows_pages = upload(table[drafts.row] if n and drafts else table[:n], kv.device, torch.int32)
            if chunks or drafts:
                own = chunk_rows(chunks, len(rows_pages), table.shape[1])
                tokens, positions, rows_pages = (torch.cat(pair) for pair in zip((*inputs, rows_pages), own))
                inputs = tokens, positions
            choose = record_rows(self.memory.experts, inputs[1], rows_pages)
            return self.weights.decode(*inputs, rows_pages, kv, choose)
        decode: PageAttention | DraftAttention | None = None
        if n and drafts:
            decode = DraftAttention(drafts, table, length, self.pages.page_size, kv.device)
        elif n:
            assert isinstance(self.pages, BatchedPages)
            owner = self.pages.row[: self.pages.dense]
            decode = PageAttention(self.pages, owner, table, length, kv, bool(chunks))
        prefill = ChunkAttention(chunks, self.pages.page_size, kv.device) if chunks else None
        attention = StepAttention(kv, decode, inputs, prefill)
        choose = record(self.memory.experts, attention.pages, attention.offset)
        return self.weights(attention.token_ids, attention.positions, attention, choose)

    def _inputs(self, drafts: Drafts, length: np.ndarray) -> tuple[Tensor, Tensor]:
        """Return the tokens that a step with drafts computes, and their positions. [T] twice"""
        device = self.memory.kv.device
        return upload(drafts.tokens, device), upload(drafts.positions(length), device)

    def verify(self, batcher: Batcher, drafts: Drafts, hidden: Tensor) -> None:
        """Draw after each token of a step with drafts, and keep what each row's draft foresaw. [T, hidden_size]"""
        self.rows.verify(drafts, lambda part: self.weights.logits(hidden[part]))
        moves = batcher.count_verified(drafts.counts, drafts.kept)
        self.memory.copy((move.source, move.target) for move in moves)

    # ---- what the batcher asks for ---------------------------------------------------------------------------

    def start(self, started: Started) -> None:
        """Load the rows of sequences that begin to decode, and the pages of those that are resumed."""
        for parked, sequence in started.resumed:
            if parked.kv is not None:
                pages = sequence.pages[: parked.kv.shape[2]]
                self.memory.kv[:, :, pages] = parked.kv
                if self.memory.experts is not None:
                    self.memory.experts[pages] = parked.experts
        self.memory.copy(started.copies)
        self.rows.load(started)

    def park(self, sequence: Sequence, parked: Parked) -> None:
        """Keep what is in the pages of a sequence, if they do not stay."""
        if not self.pages.shares:
            pages = sequence.pages[: len(parked.pages)]
            parked.kv = self.memory.kv[:, :, pages]
            if self.memory.experts is not None:
                parked.experts = self.memory.experts[pages]

    def drawn(self, counts: np.ndarray) -> np.ndarray:
        """Return the tokens of the first rows, which have so many. On a CPU nothing is copied."""
        return self.rows.drawn(counts) if self.graphs else self.rows.tokens[: len(counts)].numpy()

    def experts(self, sequence: Sequence, num_tokens: int) -> abc.Sequence[int]:
        """Return which experts the first so many tokens of a sequence took, as `Sample.experts`; none: not recorded."""
        if self.memory.experts is None:
            return ()
        with self.rows.reading():
            taken = self.memory.experts[upload(sequence.pages, self.memory.kv.device)]
            return taken.flatten(0, 1)[:num_tokens].cpu().numpy().tobytes()

    def close(self, removed: Removed, num_running: int) -> None:
        """Move pages and rows to the holes of sequences that have left `num_running` others."""
        self.memory.copy((move.source, move.target) for move in removed.pages)
        self.rows.close(removed, num_running)
